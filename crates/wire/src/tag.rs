//! The tag: what the mux and a peer say to each other about a frame on a trunk.
//!
//! A trunk is one memif interface that carries the frames of all vports of a node. Its peer is
//! a forwarding guest on PdP's runtime, or the helper that serves a node's TAPs. The tag is the
//! `metadata` word of the descriptor of the frame's first buffer, so that a frame keeps its
//! alignment and a completion without a frame touches no packet memory.
//!
//! ```text
//! bits  0..4   4      8..16          16..24   24..32
//!       kind   LAST   reason/class   vport    trace
//! ```
//!
//! From the mux, every frame is `Deliver` and names the vport that it arrived on (guest) or is
//! to leave by (TAP helper). A guest answers each delivered frame with one *completion*: 0..n
//! frames of which the last, and only the last, has `LAST` set, in the order in which it took the
//! frames. A frame that is dropped, or kept for later, completes too: as a descriptor of no bytes.
//! What a guest makes by itself, or sends later from what it had kept, never has `LAST` set
//! (a kept frame's completion is its `Kept`). Peers without completions (TAP helpers) send `Out`
//! and never set `LAST`.
//!
//! Limits: [`VPORTS_MAX`] vports a node.

/// Version of the tag's form.
pub const VERSION: u32 = 1;

/// Vports of one node; indices are `0..VPORTS_MAX`.
pub const VPORTS_MAX: usize = 256;

crate::named! {
    /// Classes of punts; each has a limit of its own in the mux.
    PuntClass {
        /// For the router itself, without the packets of `control`.
        Local = "local",
        /// ARP and IPv6 neighbour discovery, or a next hop whose link address is not known.
        Neighbour = "neighbour",
        /// Packets that the kernel answers or that are rare: TTL expired, options, no route.
        Exception = "exception",
        /// Packets that the kernel forwards: into tunnels and fragments, and where policy rules, firewalls or VRFs may
        /// change what becomes of them.
        Hook = "hook",
        /// Routing protocols: packets for the router itself with a DSCP of CS6 or CS7 (RFC 4594 section 3.1), and LLC
        /// frames (IS-IS, spanning tree).
        Control = "control",
    }
}

crate::named! {
    /// Why a guest dropped a frame. Reasons of the mux itself are the mux's.
    GuestDrop {
        /// Not a frame of the program's protocol, or malformed.
        Malformed = "guest-malformed",
        /// No route, where the control guest is not to be asked.
        NoRoute = "guest-no-route",
        /// A route that says to drop (blackhole).
        Blackhole = "guest-blackhole",
        /// The route's vport is down or gone.
        PortDown = "guest-port-down",
        /// Not for this router: another host's unicast address.
        NotForUs = "guest-not-for-us",
        /// The program's own policy.
        Policy = "guest-policy",
        /// The program has no room for it.
        NoBuffer = "guest-no-buffer",
        /// The neighbour's link address is not known, and too many others' are asked for already.
        Unresolved = "guest-unresolved",
    }
}

/// What a tag says about the frame behind it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// From the mux: a frame to process (guest) or to write (TAP helper).
    Deliver,
    /// Send the frame out of the tag's vport.
    Out,
    /// Hand the frame to the control guest, on the tag's vport.
    Punt(PuntClass),
    /// The frame was dropped; no bytes follow. Counted on the tag's vport.
    Drop(GuestDrop),
    /// The program holds the frame and may send it later; no bytes follow.
    Kept,
}

/// One tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tag {
    /// What is to be done with the frame.
    pub verdict: Verdict,
    /// The vport; whose it is depends on the verdict.
    pub vport: u8,
    /// Whether this completes the oldest frame not completed yet.
    pub last: bool,
    /// Number of a traced packet, 0 for none; a guest gives it back as it got it.
    pub trace: u8,
}

/// A word that is no tag: a kind, flag, class or reason that does not exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BadTag(pub u32);

const DELIVER: u8 = 1;
const OUT: u8 = 2;
const PUNT: u8 = 3;
const DROP: u8 = 4;
const KEPT: u8 = 5;

/// The completion of the oldest frame that the guest has not completed yet.
const LAST: u8 = 1 << 4;

impl Tag {
    /// The mux's tag on a frame for its peer.
    #[inline]
    pub fn deliver(vport: u8, trace: u8) -> Self {
        Self { verdict: Verdict::Deliver, vport, last: false, trace }
    }

    /// As a word.
    #[inline]
    pub fn emit(self) -> u32 {
        let (kind, reason) = match self.verdict {
            Verdict::Deliver => (DELIVER, 0),
            Verdict::Out => (OUT, 0),
            Verdict::Punt(class) => (PUNT, class as u8),
            Verdict::Drop(reason) => (DROP, reason as u8),
            Verdict::Kept => (KEPT, 0),
        };
        let last = if self.last { LAST } else { 0 };
        u32::from_le_bytes([kind | last, reason, self.vport, self.trace])
    }

    /// Reads a word. Never panics.
    #[inline]
    pub fn parse(word: u32) -> Result<Self, BadTag> {
        let [kind, reason, vport, trace] = word.to_le_bytes();
        let bad = BadTag(word);
        let verdict = match kind & !LAST {
            DELIVER => Verdict::Deliver,
            OUT => Verdict::Out,
            PUNT => Verdict::Punt(PuntClass::from_code(reason).ok_or(bad)?),
            DROP => Verdict::Drop(GuestDrop::from_code(reason).ok_or(bad)?),
            KEPT => Verdict::Kept,
            _ => return Err(bad),
        };
        Ok(Self { verdict, vport, last: kind & LAST != 0, trace })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn every_verdict_comes_back_as_it_went() {
        let mut verdicts = vec![Verdict::Deliver, Verdict::Out, Verdict::Kept];
        verdicts.extend(PuntClass::ALL.map(Verdict::Punt));
        verdicts.extend(GuestDrop::ALL.map(Verdict::Drop));
        for verdict in verdicts {
            for (vport, last, trace) in [(0, false, 0), (255, true, 255), (7, true, 3)] {
                let tag = Tag { verdict, vport, last, trace };
                assert_eq!(Tag::parse(tag.emit()), Ok(tag));
            }
        }
    }

    #[test]
    fn zero_is_no_tag() {
        assert_eq!(Tag::parse(0), Err(BadTag(0)), "a program that knows nothing of tags");
    }

    proptest! {
        #[test]
        fn noise_is_refused_or_read_back(word: u32) {
            if let Ok(tag) = Tag::parse(word) {
                prop_assert_eq!(Tag::parse(tag.emit()), Ok(tag));
            }
        }
    }
}
