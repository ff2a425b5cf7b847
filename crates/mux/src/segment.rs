//! An Ethernet segment: learns at which end each MAC address is, and forwards frames.
//!
//! The segment learns the source address of each frame, and forgets addresses not heard
//! for [`AGE_S`]. A frame for a known address goes only to that address's end. A frame
//! for an unknown address or a group is flooded: it goes to every other end, within a
//! rate for each ingress end. Addresses reserved for bridges are flooded too. A segment
//! is a wire, and bridges on it see each other. No frame goes back to its ingress end, or
//! from one tunnel to another. In a full mesh of tunnels, each frame thus arrives once.
//!
//! An address heard at another end moves there. If it was heard at its old end less
//! than two seconds ago, the move counts against a limit of [`MOVES_A_SECOND`] for
//! each end that takes addresses. It may always move back home when it is heard there.
//! So a loop, or two stations with one address, change the table only that often, and
//! not with each frame. Home is the end where the address stayed for two seconds.
//!
//! The table has a fixed size. An address is in the emptier of two buckets.
//! Addresses not heard for [`AGE_S`] give up their slots. If there is no free slot,
//! the address is not learned and its frames are flooded. Known addresses stay.
//!
//! Pure: it allocates nothing after [`MuxSegment::new`], and the caller passes the time.
//!
//! Source: IEEE Std 802.1D-2004 sections 7.7 to 7.9; RFC 4762 section
//! 4.4 (split horizon); Azar et al., "Balanced allocations" (1999).

use pdp_proto::mux::{LearnedMac, Rate};

use crate::police::TokenBucket;

/// Lifetime of an address that is not heard, seconds.
pub const AGE_S: u32 = 300;

/// Addresses that one end may take over in a second from ends where they were heard just before.
pub const MOVES_A_SECOND: u64 = 16;

/// Burst of flooded frames, as time at their rate. Starting stations ask for many others at once.
const FLOOD_BURST_NS: u64 = 250_000_000;

/// Least burst of flooded frames.
const FLOOD_BURST_FRAMES_MIN: u64 = 32;

/// Slots of a bucket, which is one cache line.
const PLACES: usize = 4;

/// Slots for each address, as a fraction. With fewer,
/// some addresses find both of their buckets full.
const SLACK: (usize, usize) = (3, 2);

/// Forwarding decision of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SegmentVerdict {
    /// To this port's end.
    Port(u16),
    /// To all ends that [`MuxSegment::others`] returns.
    All,
    /// Nowhere: its address is at its ingress end, or behind another tunnel.
    Nobody,
    /// Nowhere: it exceeds the rate for flooded frames.
    TooMany,
}

/// A segment.
#[derive(Debug)]
pub struct MuxSegment {
    /// Name of its vlink.
    pub name: String,
    buckets: Box<[FdbBucket]>,
    ends: Vec<SegmentEnd>,
    flood: Rate,
}

#[derive(Debug)]
struct SegmentEnd {
    port: u16,
    is_tunnel: bool,
    floods: TokenBucket,
    moves: TokenBucket,
}

#[derive(Clone, Copy, Debug, Default)]
#[repr(align(64))]
struct FdbBucket([FdbSlot; PLACES]);

/// A slot for one address.
#[derive(Clone, Copy, Debug, Default)]
struct FdbSlot {
    /// The address, and the end in the lowest bits; 0 if the slot is empty.
    word: u64,
    /// Time when it was last heard, seconds.
    heard_s: u32,
    /// Time when it moved to that end, seconds; the lowest bits.
    came_s: u16,
    /// The end that it may always move back to.
    home: u8,
}

impl FdbSlot {
    fn new(mac: u64, end: u8, heard_s: u32) -> Self {
        Self { word: mac << 16 | u64::from(end), heard_s, came_s: heard_s as u16, home: end }
    }

    #[inline]
    fn is_of(&self, mac: u64) -> bool {
        self.word >> 16 == mac
    }

    fn end(&self) -> u8 {
        self.word as u8
    }

    #[inline]
    fn is_free(&self, now_s: u32) -> bool {
        self.word == 0 || now_s.saturating_sub(self.heard_s) > AGE_S
    }
}

fn seconds(now_ns: u64) -> u32 {
    (now_ns / 1_000_000_000) as u32
}

/// Converts an address, with two bytes behind it, to a number.
#[inline]
fn number(mac: [u8; 8]) -> u64 {
    u64::from_be_bytes(mac) >> 16
}

fn is_group(mac: u64) -> bool {
    mac >> 40 & 1 == 1
}

impl MuxSegment {
    /// Creates a segment for `addresses`, with these ends, 256 at most. An end
    /// has a port, and true if it is a tunnel. Each end may flood at `flood`.
    pub fn new(
        name: String,
        addresses: usize,
        flood: Rate,
        ends: impl Iterator<Item = (u16, bool)>,
    ) -> Self {
        let count = (addresses * SLACK.0).div_ceil(SLACK.1 * PLACES).max(2);
        let moves = TokenBucket::limit(Rate { bps: 0, pps: MOVES_A_SECOND });
        let floods = TokenBucket::new(flood, FLOOD_BURST_NS, FLOOD_BURST_FRAMES_MIN);
        let end = |(port, is_tunnel)| SegmentEnd { port, is_tunnel, floods, moves };
        let buckets = vec![FdbBucket::default(); count].into_boxed_slice();
        Self { name, buckets, ends: ends.map(end).collect(), flood }
    }

    /// Returns the ports of its ends.
    pub fn ports(&self) -> impl ExactSizeIterator<Item = u16> {
        self.ends.iter().map(|end| end.port)
    }

    /// Learns the source address of a frame that arrived
    /// at the end `from`. Returns where the frame goes.
    #[inline]
    pub fn forward(&mut self, from: u8, frame: &[u8], now_ns: u64) -> SegmentVerdict {
        let (Some(to), Some(source)) =
            (frame.first_chunk(), frame.get(6..).and_then(<[u8]>::first_chunk))
        else {
            return SegmentVerdict::Nobody;
        };
        let (to, source) = (number(*to), number(*source));
        let now_s = seconds(now_ns);
        if source != 0 && !is_group(source) {
            self.learn(source, from, now_s, now_ns);
        }
        let known = if is_group(to) { None } else { self.find(to, now_s) };
        match known {
            Some(end) if end == from || self.is_barred(from, end) => SegmentVerdict::Nobody,
            Some(end) => SegmentVerdict::Port(self.ends[usize::from(end)].port),
            None => match self.ends[usize::from(from)].floods.take(now_ns, frame.len()) {
                Ok(()) => SegmentVerdict::All,
                Err(_) => SegmentVerdict::TooMany,
            },
        }
    }

    /// Returns the ports of the ends that a flooded frame from the end `from` goes to.
    pub fn others(&self, from: u8) -> impl Iterator<Item = u16> {
        let ends = (0..=u8::MAX).zip(&self.ends);
        let others = ends.filter(move |(at, _)| *at != from && !self.is_barred(from, *at));
        others.map(|(_, end)| end.port)
    }

    /// True if both are tunnels.
    fn is_barred(&self, from: u8, to: u8) -> bool {
        self.ends[usize::from(from)].is_tunnel && self.ends[usize::from(to)].is_tunnel
    }

    /// Returns the two buckets that an address can be in.
    #[inline]
    fn places(&self, mac: u64) -> [usize; 2] {
        // Folds a product, so that each half depends on all bits.
        let product = u128::from(mac) * 0x9e37_79b9_7f4a_7c15;
        let hash = (product >> 64) as u64 ^ product as u64;
        let count = self.buckets.len() as u64;
        let first = ((hash & 0xffff_ffff) * count) >> 32;
        // Always differs from the first.
        let second = first + 1 + (((hash >> 32) * (count - 1)) >> 32);
        [first as usize, (if second < count { second } else { second - count }) as usize]
    }

    #[inline]
    fn find(&self, mac: u64, now_s: u32) -> Option<u8> {
        for at in self.places(mac) {
            for place in &self.buckets[at].0 {
                if place.is_of(mac) && !place.is_free(now_s) {
                    return Some(place.end());
                }
            }
        }
        None
    }

    #[inline]
    fn learn(&mut self, mac: u64, from: u8, now_s: u32, now_ns: u64) {
        let at = self.places(mac);
        for at in at {
            let Some(place) = self.buckets[at].0.iter_mut().find(|place| place.is_of(mac)) else {
                continue;
            };
            if place.end() == from {
                if place.heard_s != now_s {
                    place.heard_s = now_s;
                    let stayed_s = (now_s as u16).wrapping_sub(place.came_s);
                    place.home = if stayed_s > 1 { from } else { place.home };
                }
                return;
            }
            let (just, home) = (now_s.saturating_sub(place.heard_s) <= 1, place.home);
            let moves = &mut self.ends[usize::from(from)].moves;
            if just && home != from && moves.take(now_ns, 0).is_err() {
                return;
            }
            *place =
                FdbSlot { home: if just { home } else { from }, ..FdbSlot::new(mac, from, now_s) };
            return;
        }
        self.insert(at, FdbSlot::new(mac, from, now_s), now_s);
    }

    /// Inserts an unknown address into the emptier of its buckets, if that has a free slot.
    fn insert(&mut self, at: [usize; 2], new: FdbSlot, now_s: u32) {
        let free = at.map(|at| self.buckets[at].0.iter().filter(|it| it.is_free(now_s)).count());
        let at = if free[1] > free[0] { at[1] } else { at[0] };
        if let Some(place) = self.buckets[at].0.iter_mut().find(|place| place.is_free(now_s)) {
            *place = new;
        }
    }

    /// Forgets all addresses.
    pub fn clear(&mut self) {
        self.buckets.fill(FdbBucket::default());
    }

    /// Returns the known addresses in the part of the table that begins at `next`.
    /// Sets `next` to the beginning of the rest, or to 0 after the last part.
    pub fn heard(&self, next: &mut usize, now_ns: u64) -> Vec<LearnedMac> {
        const PART: usize = 1024;
        let now_s = seconds(now_ns);
        let part = self.buckets.iter().skip(*next).take(PART);
        let places = part.flat_map(|bucket| &bucket.0).filter(|place| !place.is_free(now_s));
        let heard = places.map(|place| {
            let [_, _, mac @ ..] = (place.word >> 16).to_be_bytes();
            LearnedMac { mac, end: place.end().into(), age_s: now_s.saturating_sub(place.heard_s) }
        });
        let heard = heard.collect();
        *next = if *next + PART < self.buckets.len() { *next + PART } else { 0 };
        heard
    }

    /// Continues where `old` stopped. `now` maps the ends of `old` to the ends here.
    pub fn take_over(&mut self, old: &mut Self, now: &[Option<u8>], now_ns: u64) {
        let now_s = seconds(now_ns);
        for (was, now) in old.ends.iter().zip(now) {
            let Some(now) = now.map(usize::from) else { continue };
            self.ends[now].moves = was.moves;
            if self.flood == old.flood {
                self.ends[now].floods = was.floods;
            }
        }
        let same = now.iter().enumerate().all(|(was, now)| now.map(usize::from) == Some(was));
        if same && self.buckets.len() == old.buckets.len() {
            std::mem::swap(&mut self.buckets, &mut old.buckets);
            return;
        }
        for place in old.buckets.iter().flat_map(|bucket| &bucket.0) {
            if let Some(Some(end)) = now.get(usize::from(place.end()))
                && !place.is_free(now_s)
            {
                let mac = place.word >> 16;
                self.insert(self.places(mac), FdbSlot::new(mac, *end, place.heard_s), now_s);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;

    const SECOND: u64 = 1_000_000_000;

    fn frame(to: u64, source: u64) -> [u8; 60] {
        let mut frame = [0; 60];
        frame[..6].copy_from_slice(&to.to_be_bytes()[2..]);
        frame[6..12].copy_from_slice(&source.to_be_bytes()[2..]);
        frame
    }

    fn segment(addresses: usize, flood_pps: u64, tunnels: &[bool]) -> MuxSegment {
        let ends = (0..).map(|at| 100 + at).zip(tunnels.iter().copied());
        MuxSegment::new("s".into(), addresses, Rate { bps: 0, pps: flood_pps }, ends)
    }

    fn all(segment: &MuxSegment, now_ns: u64) -> HashMap<[u8; 6], (u16, u32)> {
        let (mut all, mut next) = (HashMap::new(), 0);
        loop {
            for LearnedMac { mac, end, age_s } in segment.heard(&mut next, now_ns) {
                assert_eq!(all.insert(mac, (end, age_s)), None, "an address is there twice");
            }
            if next == 0 {
                return all;
            }
        }
    }

    /// Reference bridge: an unbounded map that is searched for each frame.
    #[derive(Default)]
    struct Slow {
        heard: HashMap<u64, (u8, u32)>,
    }

    impl Slow {
        fn forward(
            &mut self,
            tunnels: &[bool],
            from: u8,
            [to, source]: [u64; 2],
            now_ns: u64,
        ) -> Vec<u16> {
            let now_s = (now_ns / SECOND) as u32;
            self.heard.retain(|_, (_, heard)| now_s - *heard <= AGE_S);
            if source != 0 && source >> 40 & 1 == 0 {
                self.heard.insert(source, (from, now_s));
            }
            let known = self.heard.get(&to).filter(|_| to >> 40 & 1 == 0);
            let may =
                |end: u8| end != from && !(tunnels[usize::from(from)] && tunnels[usize::from(end)]);
            let ends: Vec<u8> = match known {
                Some((end, _)) => vec![*end],
                None => (0..tunnels.len() as u8).collect(),
            };
            ends.into_iter().filter(|end| may(*end)).map(|end| 100 + u16::from(end)).collect()
        }
    }

    fn address() -> impl Strategy<Value = u64> {
        prop_oneof![
            8 => (1u64..20).prop_map(|station| 0x0200_0000_0000 | station),
            // Broadcast, and addresses reserved for bridges.
            2 => prop::sample::select(vec![0xffff_ffff_ffff, 0x0180_c200_0000, 0x0180_c200_000e, 0]),
        ]
    }

    proptest! {
        /// Frames go where the reference bridge forwards them. No end
        /// takes so many addresses that the limit of moves applies.
        #[test]
        fn segment_forwards_like_the_reference_bridge(
            tunnels in prop::collection::vec(any::<bool>(), 3..8),
            frames in prop::collection::vec(
                (0usize..8, address(), address(), prop_oneof![9 => 0u64..500, 1 => 0u64..400_000]), 1..30),
        ) {
            let mut segment = segment(64, 0, &tunnels);
            let mut slow = Slow::default();
            let mut now_ns = 0;
            for (from, to, source, pause_ms) in frames {
                let from = (from % tunnels.len()) as u8;
                now_ns += pause_ms * 1_000_000;
                let went = match segment.forward(from, &frame(to, source), now_ns) {
                    SegmentVerdict::Port(port) => vec![port],
                    SegmentVerdict::All => segment.others(from).collect(),
                    SegmentVerdict::Nobody => vec![],
                    SegmentVerdict::TooMany => unreachable!("no limit"),
                };
                let expected = slow.forward(&tunnels, from, [to, source], now_ns);
                prop_assert!(!went.contains(&(100 + u16::from(from))), "back where it came from");
                prop_assert_eq!(went, expected);
                let known = all(&segment, now_ns);
                prop_assert_eq!(known.len(), slow.heard.len());
                for (mac, (end, heard)) in &slow.heard {
                    let place = known[&mac.to_be_bytes()[2..]];
                    prop_assert_eq!(place, (u16::from(*end), (now_ns / SECOND) as u32 - heard));
                }
            }
        }
    }

    #[test]
    fn full_fdb_keeps_its_addresses_under_a_flood() {
        const COUNT: u64 = 16_384;
        let mut segment = segment(COUNT as usize, 1000, &[false; 3]);
        // Addresses in sequence, and as the drivers of virtual machines draw them.
        let address = |n: u64| {
            0x0200_0000_0000
                | if n.is_multiple_of(2) { n } else { (n * 0x9e37_79b1) & 0xff_ffff_ffff }
        };
        for n in 0..COUNT {
            let _ = segment.forward((n % 2) as u8, &frame(address(n), address(n)), 0);
        }
        let known = all(&segment, 0);
        assert!(known.len() as u64 > COUNT - COUNT / 1000, "{} of {COUNT}", known.len());
        // A station with a new address for each frame.
        for n in 0..100_000u64 {
            let strange = 0x0600_0000_0000 | (n * 0x9e37);
            let _ = segment.forward(2, &frame(address(2), strange), SECOND * n / 100_000);
        }
        let after = all(&segment, SECOND);
        assert!(known.iter().all(|(mac, (end, _))| after[mac].0 == *end));
        assert_eq!(
            segment.forward(1, &frame(address(4), address(1)), SECOND),
            SegmentVerdict::Port(100)
        );
        // Addresses that are not heard give up their slots. Those that are heard keep theirs.
        let later = (u64::from(AGE_S) + 1) * SECOND;
        assert_eq!(all(&segment, later).len(), 1, "the one that was heard last");
        let _ = segment.forward(0, &frame(1 << 40, 0x0a00_0000_0001), later);
        assert_eq!(all(&segment, later).len(), 2);
        segment.clear();
        assert!(all(&segment, later).is_empty());
    }

    #[test]
    fn each_segment_end_has_its_own_flood_rate() {
        let mut segment = segment(64, 1000, &[false; 3]);
        let broadcast = frame(0xffff_ffff_ffff, 0x0200_0000_0001);
        let mut flooded = 0;
        // 100,000 frames a second, for 2 s.
        for n in 0..200_000 {
            flooded += u64::from(segment.forward(0, &broadcast, n * 10_000) == SegmentVerdict::All);
        }
        assert!((2000..=2000 + 251).contains(&flooded), "{flooded}");
        let unknown = frame(0x0200_0000_0009, 0x0200_0000_0002);
        let _ = segment.forward(0, &unknown, 2 * SECOND);
        assert_eq!(segment.forward(0, &unknown, 2 * SECOND), SegmentVerdict::TooMany);
        assert_eq!(
            segment.forward(1, &unknown, 2 * SECOND),
            SegmentVerdict::All,
            "others have their own"
        );
        let known = frame(0x0200_0000_0002, 0x0200_0000_0001);
        assert_eq!(
            segment.forward(0, &known, 2 * SECOND),
            SegmentVerdict::Port(101),
            "what is known is not flooded"
        );
    }

    #[test]
    fn flapping_address_moves_at_a_limited_rate() {
        let mut segment = segment(64, 0, &[false; 3]);
        let (station, other) = (0x0200_0000_0001, 0x0200_0000_0002);
        let mut moved = 0;
        for n in 0..100_000u64 {
            let now_ns = n * 10_000;
            let _ = segment.forward(0, &frame(other, station), now_ns);
            let _ = segment.forward(1, &frame(other, station), now_ns);
            let place = segment.forward(2, &frame(station, other), now_ns);
            moved += u64::from(place == SegmentVerdict::Port(101));
        }
        assert!((1..=MOVES_A_SECOND + 33).contains(&moved), "{moved} of 100,000");
        let _ = segment.forward(1, &frame(other, station), 4 * SECOND);
        assert_eq!(
            segment.forward(2, &frame(station, other), 4 * SECOND),
            SegmentVerdict::Port(101)
        );
    }

    #[test]
    fn fdb_keeps_addresses_of_remaining_ends() {
        let mut old = segment(64, 10, &[false; 3]);
        for end in 0..3 {
            let _ = old.forward(end, &frame(1 << 40, 0x0200_0000_0000 | u64::from(end)), 0);
        }
        // The second end is gone, the others are in another order, and the table is larger.
        let mut new = segment(4096, 10, &[false; 4]);
        new.take_over(&mut old, &[Some(3), None, Some(0)], SECOND);
        let known = all(&new, SECOND);
        assert_eq!(known[&[2, 0, 0, 0, 0, 2]], (0, 1));
        // The address that ends in zeros is an address too.
        assert_eq!((known.len(), known[&[2, 0, 0, 0, 0, 0]]), (2, (3, 1)));
        let mut same = segment(4096, 10, &[false; 4]);
        same.take_over(&mut new, &[Some(0), Some(1), Some(2), Some(3)], SECOND);
        assert_eq!(all(&same, SECOND), known);
    }
}
