//! The tag: metadata that the mux and its peer exchange about a frame on a trunk.
//!
//! A trunk is one memif interface for the frames of all vports of a node. Its peer is a forwarding
//! guest on PdP's runtime, or the helper that serves a node's TAPs. The tag is the `metadata` word
//! of the descriptor of the frame's first buffer. So a frame keeps its alignment, and a completion
//! without a frame touches no packet memory.
//!
//! ```text
//! bits  0..4   4      8..16          16..24   24..32
//!       kind   LAST   reason/class   vport    trace
//! ```
//!
//! From the mux, every frame is `Deliver`. It names the ingress vport (guest) or the egress
//! vport (TAP helper). A guest answers each delivered frame with one *completion*, in the
//! order in which it took the frames. A completion is 0..n frames; the last one, and no other,
//! has `LAST` set. A dropped frame, or one that is kept for later, also completes, as a
//! descriptor of no bytes. `LAST` is never set on frames that a guest makes by itself, or
//! sends later from those that it kept (a kept frame's completion is its `Kept`). Peers
//! without completions (TAP helpers) send `Out` and never set `LAST`.
//!
//! Limits: [`VPORTS_MAX`] vports per node.

/// Version of the tag's format.
pub const VERSION: u32 = 1;

/// Most vports of one node; indices are `0..VPORTS_MAX`.
pub const VPORTS_MAX: usize = 256;

crate::named! {
    /// Classes of punts; each has a separate limit in the mux.
    PuntClass {
        /// Packets for the router itself, except for those of `control`.
        Local = "local",
        /// ARP and IPv6 neighbour discovery, or a next hop with an unknown MAC address.
        Neighbour = "neighbour",
        /// Packets that the kernel answers or that are rare: TTL expired, options, no route.
        Exception = "exception",
        /// Packets that the kernel forwards: into tunnels, as fragments, or where policy rules,
        /// firewalls or VRFs may change their treatment.
        Hook = "hook",
        /// Routing protocols: packets for the router itself with a DSCP of CS6 or CS7 (RFC 4594
        /// section 3.1), and LLC frames (IS-IS, spanning tree).
        Control = "control",
    }
}

crate::named! {
    /// Reason why a guest dropped a frame. The mux has reasons of its own.
    GuestDrop {
        /// Not a frame of the program's protocol, or malformed.
        Malformed = "guest-malformed",
        /// No route, in a guest that must not ask the control guest.
        NoRoute = "guest-no-route",
        /// Blackhole route.
        Blackhole = "guest-blackhole",
        /// The route's vport is down or gone.
        PortDown = "guest-port-down",
        /// Not for this router: another host's unicast address.
        NotForUs = "guest-not-for-us",
        /// The program's own policy.
        Policy = "guest-policy",
        /// The program has no room for it.
        NoBuffer = "guest-no-buffer",
        /// The neighbour's MAC address is unknown, and too many others are being resolved.
        Unresolved = "guest-unresolved",
    }
}

/// Verdict of a tag on its frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TagVerdict {
    /// Frame from the mux, to process (guest) or to write (TAP helper).
    Deliver,
    /// Send the frame out of the tag's vport.
    Out,
    /// Punt the frame to the control guest, on the tag's vport.
    Punt(PuntClass),
    /// The frame was dropped; no bytes follow. Counted on the tag's vport.
    Drop(GuestDrop),
    /// The program keeps the frame and may send it later; no bytes follow.
    Kept,
}

/// One tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tag {
    /// Verdict on the frame.
    pub verdict: TagVerdict,
    /// Ingress or egress vport, depending on the verdict.
    pub vport: u8,
    /// True if this completes the oldest frame not completed yet.
    pub last: bool,
    /// Number of a traced packet, 0 for none. A guest returns it unchanged.
    pub trace: u8,
}

/// Invalid tag: a kind, flag, class or reason that does not exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BadTag(pub u32);

const DELIVER: u8 = 1;
const OUT: u8 = 2;
const PUNT: u8 = 3;
const DROP: u8 = 4;
const KEPT: u8 = 5;

/// Completion of the oldest frame that the guest has not completed yet.
const LAST: u8 = 1 << 4;

impl Tag {
    /// The mux's tag on a frame for its peer.
    #[inline]
    pub fn deliver(vport: u8, trace: u8) -> Self {
        Self { verdict: TagVerdict::Deliver, vport, last: false, trace }
    }

    /// Returns the tag as a word.
    #[inline]
    pub fn emit(self) -> u32 {
        let (kind, reason) = match self.verdict {
            TagVerdict::Deliver => (DELIVER, 0),
            TagVerdict::Out => (OUT, 0),
            TagVerdict::Punt(class) => (PUNT, class as u8),
            TagVerdict::Drop(reason) => (DROP, reason as u8),
            TagVerdict::Kept => (KEPT, 0),
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
            DELIVER => TagVerdict::Deliver,
            OUT => TagVerdict::Out,
            PUNT => TagVerdict::Punt(PuntClass::from_code(reason).ok_or(bad)?),
            DROP => TagVerdict::Drop(GuestDrop::from_code(reason).ok_or(bad)?),
            KEPT => TagVerdict::Kept,
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
    fn every_tag_verdict_survives_a_round_trip() {
        let mut verdicts = vec![TagVerdict::Deliver, TagVerdict::Out, TagVerdict::Kept];
        verdicts.extend(PuntClass::ALL.map(TagVerdict::Punt));
        verdicts.extend(GuestDrop::ALL.map(TagVerdict::Drop));
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
