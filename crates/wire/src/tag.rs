//! The tag: eight bytes before each Ethernet frame on a trunk between the mux and a peer.
//!
//! A trunk is one memif interface that carries the frames of all vports of a node. Its peer is
//! a forwarding guest on PdP's runtime, or the helper that serves a node's TAPs.
//!
//! ```text
//! byte  0      1       2 3            4              5       6 7
//!       kind   flags   vport (LE)     reason/class   trace   zero
//! ```
//!
//! From the mux, every frame is `Deliver` and names the vport that it arrived on (guest) or is
//! to leave by (TAP helper). A guest answers each delivered frame with one *completion*: 0..n
//! frames of which the last, and only the last, has `LAST` set, in the order in which it took the
//! frames. A frame that is dropped, or kept for later, completes too: as a tag without a frame.
//! What a guest makes by itself, or sends later from what it had kept, never has `LAST` set
//! (a kept frame's completion is its `Kept`). Peers without completions (TAP helpers) send `Out`
//! and never set `LAST`.
//!
//! Limits: [`VPORTS_MAX`] vports a node.

/// Bytes of a tag.
pub const TAG_BYTES: usize = 8;

/// Vports of one node; indices are `0..VPORTS_MAX`.
pub const VPORTS_MAX: usize = 256;

/// The completion of the oldest frame that the guest has not completed yet.
pub const LAST: u8 = 1;

/// Classes of punts; each has a limit of its own in the mux.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum PuntClass {
    /// For the router itself: routing protocols, local delivery, link-local multicast.
    Local = 0,
    /// ARP and IPv6 neighbour discovery, or a next hop whose link address is not known.
    Neighbour = 1,
    /// What the fast path leaves to the kernel: TTL expired, options, too big, no route.
    Exception = 2,
}

impl PuntClass {
    /// All classes, in the order of their codes.
    pub const ALL: [PuntClass; 3] = [Self::Local, Self::Neighbour, Self::Exception];

    /// The class with this code on the wire.
    pub fn from_code(code: u8) -> Option<Self> {
        Self::ALL.get(code as usize).copied()
    }

    /// The name in counters and in the API.
    pub fn name(self) -> &'static str {
        match self {
            Self::Local => "local",
            Self::Neighbour => "neighbour",
            Self::Exception => "exception",
        }
    }
}

/// Why a guest dropped a frame. Reasons of the mux itself are the mux's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum GuestDrop {
    /// Not a frame of the program's protocol, or malformed.
    Malformed = 0,
    /// No route, where the control guest is not to be asked.
    NoRoute = 1,
    /// A route that says to drop (blackhole).
    Blackhole = 2,
    /// The route's vport is down or gone.
    PortDown = 3,
    /// Not for this router: another host's unicast address.
    NotForUs = 4,
    /// The program's own policy.
    Policy = 5,
    /// The program has no room for it.
    NoBuffer = 6,
}

impl GuestDrop {
    /// All reasons, in the order of their codes.
    pub const ALL: [GuestDrop; 7] = [
        Self::Malformed,
        Self::NoRoute,
        Self::Blackhole,
        Self::PortDown,
        Self::NotForUs,
        Self::Policy,
        Self::NoBuffer,
    ];

    /// The reason with this code on the wire.
    pub fn from_code(code: u8) -> Option<Self> {
        Self::ALL.get(code as usize).copied()
    }

    /// The name in counters and in the API.
    pub fn name(self) -> &'static str {
        match self {
            Self::Malformed => "guest-malformed",
            Self::NoRoute => "guest-no-route",
            Self::Blackhole => "guest-blackhole",
            Self::PortDown => "guest-port-down",
            Self::NotForUs => "guest-not-for-us",
            Self::Policy => "guest-policy",
            Self::NoBuffer => "guest-no-buffer",
        }
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
    /// The vport, `0..VPORTS_MAX`; whose it is depends on the verdict.
    pub vport: u16,
    /// Whether this completes the oldest frame not completed yet.
    pub last: bool,
    /// Number of a traced packet, 0 for none; a guest gives it back as it got it.
    pub trace: u8,
}

/// Why eight bytes are not a tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BadTag {
    /// Fewer than [`TAG_BYTES`] bytes.
    Short,
    /// A kind, flag, class or reason that does not exist.
    Unknown,
    /// A vport of [`VPORTS_MAX`] or more.
    Vport,
}

const DELIVER: u8 = 1;
const OUT: u8 = 2;
const PUNT: u8 = 3;
const DROP: u8 = 4;
const KEPT: u8 = 5;

impl Tag {
    /// The mux's tag on a frame for its peer.
    pub fn deliver(vport: u16, trace: u8) -> Self {
        Self { verdict: Verdict::Deliver, vport, last: false, trace }
    }

    /// The bytes on the trunk.
    pub fn emit(self) -> [u8; TAG_BYTES] {
        let (kind, reason) = match self.verdict {
            Verdict::Deliver => (DELIVER, 0),
            Verdict::Out => (OUT, 0),
            Verdict::Punt(class) => (PUNT, class as u8),
            Verdict::Drop(reason) => (DROP, reason as u8),
            Verdict::Kept => (KEPT, 0),
        };
        let [low, high] = self.vport.to_le_bytes();
        [kind, if self.last { LAST } else { 0 }, low, high, reason, self.trace, 0, 0]
    }

    /// Reads a tag from the start of `bytes`. Never panics.
    pub fn parse(bytes: &[u8]) -> Result<Self, BadTag> {
        let &[kind, flags, low, high, reason, trace, _, _] =
            bytes.first_chunk::<TAG_BYTES>().ok_or(BadTag::Short)?;
        let verdict = match kind {
            DELIVER => Verdict::Deliver,
            OUT => Verdict::Out,
            PUNT => Verdict::Punt(PuntClass::from_code(reason).ok_or(BadTag::Unknown)?),
            DROP => Verdict::Drop(GuestDrop::from_code(reason).ok_or(BadTag::Unknown)?),
            KEPT => Verdict::Kept,
            _ => return Err(BadTag::Unknown),
        };
        if flags & !LAST != 0 {
            return Err(BadTag::Unknown);
        }
        let vport = u16::from_le_bytes([low, high]);
        if usize::from(vport) >= VPORTS_MAX {
            return Err(BadTag::Vport);
        }
        Ok(Self { verdict, vport, last: flags & LAST != 0, trace })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn verdicts() -> Vec<Verdict> {
        let mut all = vec![Verdict::Deliver, Verdict::Out, Verdict::Kept];
        all.extend(PuntClass::ALL.map(Verdict::Punt));
        all.extend(GuestDrop::ALL.map(Verdict::Drop));
        all
    }

    #[test]
    fn every_verdict_comes_back_as_it_went() {
        for verdict in verdicts() {
            for (vport, last, trace) in [(0, false, 0), (255, true, 255), (7, true, 3)] {
                let tag = Tag { verdict, vport, last, trace };
                assert_eq!(Tag::parse(&tag.emit()), Ok(tag));
            }
        }
    }

    #[test]
    fn truncated_tags_are_short() {
        let bytes = Tag::deliver(1, 0).emit();
        for length in 0..TAG_BYTES {
            assert_eq!(Tag::parse(&bytes[..length]), Err(BadTag::Short));
        }
    }

    proptest! {
        #[test]
        fn noise_is_refused_or_read_back(bytes: [u8; TAG_BYTES]) {
            if let Ok(tag) = Tag::parse(&bytes) {
                prop_assert!(usize::from(tag.vport) < VPORTS_MAX);
                prop_assert_eq!(&tag.emit()[..4], &bytes[..4]);
                prop_assert_eq!(Tag::parse(&tag.emit()), Ok(tag));
            }
        }
    }
}
