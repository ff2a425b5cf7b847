//! Delay line: the impairments of one direction of a vlink. These
//! are delay, jitter, loss, reordering, corruption and duplicates.
//!
//! Delayed frames are copied into a ring of bytes, so that a long and fast vlink
//! takes no packets of the pool. The control thread allocates the ring, with the
//! length that [`Impairments::line_bytes`] gives. The random numbers of a frame
//! follow from the seed and from how many frames preceded it, whatever the other
//! settings. So a run can be repeated. Jitter also depends on when frames arrive.
//!
//! Frames leave in the order of their arrival, except
//! those that `reorder` lets overtake all delayed frames.

use std::ops::Range;

use pdp_proto::mux::{EgressConfig, FrameFraction, Impairments, LINE_RECORD_BYTES};
use rand_core::Rng;
use rand_pcg::Pcg64Mcg;

/// Bytes before each delayed frame: its departure time, its length, its mark.
const RECORD_BYTES: usize = LINE_RECORD_BYTES as usize;

/// Records are aligned to this many bytes.
const ALIGN: usize = 8;

/// Longest frame, bytes.
const FRAME_BYTES_MAX: usize = 2048;

/// True if the drawn number hits this share of all numbers.
fn hits(share: FrameFraction, drawn: u32) -> bool {
    u64::from(drawn) * u64::from(FrameFraction::ALL.0) < u64::from(share.0) << 32
}

/// Impairments that were drawn for a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DrawnImpairments {
    /// The frame is lost.
    pub lost: bool,
    /// The frame is duplicated; the copy follows directly.
    pub duplicate: bool,
    /// Index of the bit that is flipped, counted from the frame's first bit.
    pub corrupt: Option<usize>,
    /// Departure time. `None`: at once, ahead of all delayed frames.
    pub at_ns: Option<u64>,
}

/// Delay line of one direction of a vlink.
#[derive(Debug)]
pub struct DelayLine {
    impairments: Impairments,
    random: Pcg64Mcg,
    jitter: Jitter,
    /// Rings of delayed frames. Frames are put into the last ring, and taken from the first that
    /// is not empty. There are several if a change asked for another length while frames were
    /// delayed. New frames that have to wait behind these are put into the same ring as these.
    rings: Vec<DelayRing>,
    /// Index of the ring that frames are taken from. Earlier ones are empty ([`DelayLine::spent`]).
    at: usize,
    frames: usize,
    /// Departure time of the latest frame.
    last_ns: u64,
}

/// A delay between 0 and a range, as a function of time. Each delay of the range
/// is equally likely at any time, and no frame overtakes the frame before it.
///
/// A point moves round a circle of twice the range, up on one half and down on the
/// other. Its first position is uniform on the circle. How far it moves does not
/// depend on its position, so its position stays uniform, and so does the delay.
/// It moves more slowly than time passes, so departure times never go back.
#[derive(Clone, Copy, Debug, Default)]
struct Jitter {
    /// The point's position when its speed was drawn, and the time of that.
    place: u64,
    since_ns: u64,
    /// Nanoseconds of delay in [`SPEED_UNIT`] nanoseconds.
    speed: u64,
    /// Time when the last frame arrived.
    last_ns: Option<u64>,
}

const SPEED_UNIT: u64 = 1 << 16;

/// Slowest and fastest change of the delay. A decreasing delay
/// brings frames closer together, at most by a factor of two.
const SPEED_MIN: u64 = SPEED_UNIT / 8;
const SPEED_MAX: u64 = SPEED_UNIT / 2;

/// A new speed is drawn after this many times the range, so that the changes have no period.
const SPEED_RANGES: u64 = 4;

impl Jitter {
    /// Returns the delay of a frame that arrives at
    /// `now_ns`, from 0 to `range_ns`. `drawn` is random.
    fn next(&mut self, now_ns: u64, range_ns: u64, drawn: u32) -> u64 {
        let circle = 2 * (range_ns + 1);
        let apart = |last_ns| now_ns.saturating_sub(last_ns) >= range_ns;
        // With any delay of the range, such a frame departs no earlier than the last one.
        let is_free = self.last_ns.is_none_or(apart);
        self.last_ns = Some(now_ns);
        let gone_ns = now_ns.saturating_sub(self.since_ns);
        let place = match is_free {
            true => scale(drawn, circle),
            false => (self.place + gone_ns * self.speed / SPEED_UNIT) % circle,
        };
        if is_free || gone_ns >= SPEED_RANGES * range_ns {
            // Uses the low bits, because the position follows from the high ones.
            self.speed = SPEED_MIN + scale(drawn << 16, SPEED_MAX - SPEED_MIN);
            (self.place, self.since_ns) = (place, now_ns);
        }
        place.min(circle - 1 - place)
    }
}

/// Rings of a line, at most. Beyond that, while the first ring
/// has frames, a change keeps the last ring at its length.
const RINGS_MAX: usize = 16;

/// Frames in a ring of bytes.
#[derive(Debug, Default)]
struct DelayRing {
    bytes: Box<[u8]>,
    /// Positions of the oldest record and of the first free byte, as the
    /// bytes ever taken and put. They are equal if the ring is empty.
    head: u64,
    tail: u64,
}

/// A delayed frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DelayedFrame {
    /// Departure time, nanoseconds.
    pub at_ns: u64,
    /// The frame's mark.
    pub mark: u32,
    place: Range<usize>,
}

impl DelayLine {
    /// Returns a line for these egress settings, if they
    /// have impairments. The control thread calls it.
    pub fn of(egress: &EgressConfig) -> Option<Box<Self>> {
        let impairments = egress.impairments;
        (!impairments.are_none())
            .then(|| Box::new(Self::new(impairments, egress.line_bytes() as usize)))
    }

    /// Returns the line that continues where `old` stopped. This is `new`, or the
    /// old line without impairments if it still has frames. The rest stays in `old`.
    pub fn continue_from(new: Option<Box<Self>>, old: &mut Option<Box<Self>>) -> Option<Box<Self>> {
        let Some(was) = old else { return new };
        if let Some(mut new) = new {
            new.take_over(was);
            return Some(new);
        }
        was.impairments = Impairments::default();
        if was.waiting() > 0 { old.take() } else { None }
    }

    /// Creates a line with a ring of `bytes`. The ring uses no memory before frames are put there.
    pub fn new(impairments: Impairments, bytes: usize) -> Self {
        let random = Pcg64Mcg::new(u128::from(impairments.seed) << 64 | 0xda3e_39cb_94b9_5bdb);
        let (jitter, rings) = (Jitter::default(), vec![DelayRing::new(bytes)]);
        Self { impairments, random, jitter, rings, at: 0, frames: 0, last_ns: 0 }
    }

    /// Continues where `old` stopped. Delayed frames depart when they were to, and before new
    /// ones. Random numbers continue if the seed is the same, and jitter if its range is.
    pub fn take_over(&mut self, old: &mut Self) {
        if old.impairments.seed == self.impairments.seed {
            self.random = old.random.clone();
        }
        if old.impairments.jitter_ns == self.impairments.jitter_ns {
            self.jitter = old.jitter;
        }
        (self.frames, self.last_ns) = (old.frames, old.last_ns);
        if old.frames == 0 {
            return;
        }
        let mut rings: Vec<_> = old.rings.drain(old.at..).collect();
        let length = |rings: &[DelayRing]| rings.last().map(|ring| ring.bytes.len());
        if length(&rings) != length(&self.rings) && rings.len() < RINGS_MAX {
            rings.append(&mut self.rings);
        } else {
            // The caller frees the old line.
            old.rings.append(&mut self.rings);
        }
        (self.rings, self.at) = (rings, 0);
    }

    /// Returns the number of delayed frames.
    pub fn waiting(&self) -> usize {
        self.frames
    }

    /// True if frames pass unchanged and without delay.
    pub fn is_open(&self) -> bool {
        self.frames == 0 && self.impairments.are_none()
    }

    /// Draws the impairments of a frame of `bytes` that arrives at `now_ns`.
    pub fn draw(&mut self, now_ns: u64, bytes: usize) -> DrawnImpairments {
        // Always draws equally many numbers, so that one setting
        // does not change which frames another one hits.
        let [first, second, third] = std::array::from_fn(|_| self.random.next_u64());
        let (loss, duplicate) = (first as u32, (first >> 32) as u32);
        let (corrupt, reorder) = (second as u32, (second >> 32) as u32);
        let (bit, jitter) = (third as u32, (third >> 32) as u32);
        let impairments = &self.impairments;
        let jitter_ns = impairments.jitter_ns.min(impairments.delay_ns);
        let spread_ns = self.jitter.next(now_ns, 2 * jitter_ns, jitter);
        // Behind frames that still wait for an earlier delay.
        let waits =
            (impairments.delay_ns > 0 || self.frames > 0) && !hits(impairments.reorder, reorder);
        let at_ns = now_ns + impairments.delay_ns - jitter_ns + spread_ns;
        let at_ns = waits.then(|| at_ns.max(self.last_ns));
        DrawnImpairments {
            lost: hits(impairments.loss, loss),
            duplicate: hits(impairments.duplicate, duplicate),
            corrupt: hits(impairments.corrupt, corrupt)
                .then(|| scale(bit, bytes as u64 * 8) as usize),
            at_ns,
        }
    }

    /// Delays a frame. False if the ring has no space.
    pub fn put(&mut self, at_ns: u64, mark: u32, frame: &[u8]) -> bool {
        // A frame that waits behind frames of a longer
        // delay has no space in a ring for a shorter delay.
        let is_held_up = at_ns <= self.last_ns;
        let at_ns = at_ns.max(self.last_ns);
        let beside = self.rings.iter().rposition(|ring| is_held_up && !ring.is_empty());
        let ring = match beside {
            Some(beside) => self.rings.get_mut(beside),
            None => self.rings.last_mut(),
        };
        let put = ring.is_some_and(|ring| ring.put(at_ns, mark, frame));
        if put {
            (self.last_ns, self.frames) = (at_ns, self.frames + 1);
        }
        put
    }

    /// Returns the frame that departs first.
    pub fn first(&mut self) -> Option<DelayedFrame> {
        loop {
            if let Some(first) = self.rings.get_mut(self.at)?.first() {
                return Some(first);
            }
            if self.at + 1 == self.rings.len() {
                return None;
            }
            self.at += 1;
        }
    }

    /// Returns memory that is no longer needed, if there is any.
    pub fn spent(&mut self) -> Option<Box<[u8]>> {
        if self.is_open() {
            self.at = 0;
            return self.rings.pop().map(|ring| ring.bytes);
        }
        self.at = self.at.checked_sub(1)?;
        Some(self.rings.remove(0).bytes)
    }

    /// Returns the frame's bytes.
    pub fn bytes(&self, waiting: &DelayedFrame) -> &[u8] {
        &self.rings[self.at].bytes[waiting.place.clone()]
    }

    /// Removes the first frame.
    pub fn end_first(&mut self) {
        if let Some(first) = self.first() {
            let bytes = RECORD_BYTES + first.place.len().next_multiple_of(ALIGN);
            self.rings[self.at].head += bytes as u64;
            self.frames -= 1;
        }
    }
}

impl DelayRing {
    fn new(bytes: usize) -> Self {
        let bytes = vec![0; bytes.next_multiple_of(ALIGN)].into_boxed_slice();
        Self { bytes, ..Self::default() }
    }

    fn is_empty(&self) -> bool {
        self.head == self.tail
    }

    fn put(&mut self, at_ns: u64, mark: u32, frame: &[u8]) -> bool {
        let length = match u16::try_from(frame.len()) {
            Ok(length) if frame.len() <= FRAME_BYTES_MAX => length,
            _ => return false,
        };
        let bytes = RECORD_BYTES + frame.len().next_multiple_of(ALIGN);
        let size = self.bytes.len() as u64;
        if size == 0 {
            return false;
        }
        let at = (self.tail % size) as usize;
        // A record is contiguous, so the rest of the ring is skipped.
        let left = self.bytes.len() - at;
        let skipped = if left < bytes { left } else { 0 };
        if self.tail + (skipped + bytes) as u64 - self.head > size {
            return false;
        }
        if skipped > 0 {
            // The skipped part is a multiple of ALIGN, so that a length always fits.
            self.bytes[at..at + 2].copy_from_slice(&SKIP.to_le_bytes());
            self.tail += skipped as u64;
        }
        let at = (self.tail % size) as usize;
        let record = &mut self.bytes[at..at + bytes];
        record[..2].copy_from_slice(&length.to_le_bytes());
        record[4..8].copy_from_slice(&mark.to_le_bytes());
        record[8..16].copy_from_slice(&at_ns.to_le_bytes());
        record[RECORD_BYTES..][..frame.len()].copy_from_slice(frame);
        self.tail += bytes as u64;
        true
    }

    fn first(&mut self) -> Option<DelayedFrame> {
        if self.is_empty() {
            return None;
        }
        let size = self.bytes.len() as u64;
        let mut at = (self.head % size) as usize;
        if self.length(at) == SKIP {
            self.head += size - at as u64;
            at = 0;
        }
        let record = &self.bytes[at..];
        let mark = u32::from_le_bytes(record[4..8].try_into().ok()?);
        let at_ns = u64::from_le_bytes(record[8..16].try_into().ok()?);
        let place = at + RECORD_BYTES..at + RECORD_BYTES + usize::from(self.length(at));
        Some(DelayedFrame { at_ns, mark, place })
    }

    fn length(&self, at: usize) -> u16 {
        u16::from_le_bytes([self.bytes[at], self.bytes[at + 1]])
    }
}

/// Length in a record that marks a skipped end of the ring.
const SKIP: u16 = u16::MAX;

/// Scales a random number to a number below `end`.
fn scale(drawn: u32, end: u64) -> u64 {
    ((u128::from(drawn) * u128::from(end)) >> 32) as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    fn impairments() -> impl Strategy<Value = Impairments> {
        let share = || {
            prop_oneof![Just(0), 0..FrameFraction::ALL.0, Just(FrameFraction::ALL.0)]
                .prop_map(FrameFraction)
        };
        (0u64..5_000, 0u64..5_000, share(), share(), share(), share(), any::<u64>()).prop_map(
            |(delay_ns, jitter_ns, loss, reorder, corrupt, duplicate, seed)| Impairments {
                delay_ns,
                jitter_ns,
                loss,
                reorder,
                corrupt,
                duplicate,
                seed,
            },
        )
    }

    /// An occasional change of the settings and of the line's bytes.
    fn change() -> impl Strategy<Value = Option<(Impairments, usize)>> {
        prop_oneof![9 => Just(None), 1 => (impairments(), 0usize..2_000).prop_map(Some)]
    }

    proptest! {
        /// Compares with a queue of frames: the same frames, in the same order,
        /// at times that the settings allow, whatever changes meanwhile.
        #[test]
        fn delay_line_matches_a_model_queue(
            config in impairments(), room in 0usize..2_000,
            steps in prop::collection::vec((0u64..3_000, 0usize..300, any::<bool>(), change()), 1..200),
        ) {
            let mut config = config;
            let mut line = DelayLine::new(config, room);
            let mut model: VecDeque<(u64, u32, Vec<u8>)> = VecDeque::new();
            let (mut now, mut last) = (0, 0);
            for (mark, (gap, length, take, change)) in steps.into_iter().enumerate() {
                now += gap;
                if let Some((new, room)) = change {
                    let mut old = std::mem::replace(&mut line, DelayLine::new(new, room));
                    line.take_over(&mut old);
                    config = new;
                }
                let drawn = line.draw(now, length);
                let frame: Vec<u8> = (0..length).map(|at| (at * 7 + mark) as u8).collect();
                if let Some(at_ns) = drawn.at_ns {
                    let jitter = config.jitter_ns.min(config.delay_ns);
                    let allowed = now + config.delay_ns - jitter..=now + config.delay_ns + jitter;
                    prop_assert!(allowed.contains(&at_ns) || at_ns == last);
                    if line.put(at_ns, mark as u32, &frame) {
                        prop_assert!(at_ns >= last);
                        last = at_ns;
                        model.push_back((at_ns, mark as u32, frame));
                    } else if line.rings.len() == 1 {
                        let used: usize = model.iter().map(|it| 16 + it.2.len().next_multiple_of(8)).sum();
                        let needed = used + 2 * (16 + length.next_multiple_of(8));
                        prop_assert!(needed + 8 > line.rings[0].bytes.len() || needed + 320 > line.rings[0].bytes.len());
                    }
                } else {
                    prop_assert!(config.delay_ns == 0 && model.is_empty() || config.reorder != FrameFraction::default());
                }
                prop_assert!(drawn.corrupt.is_none_or(|bit| bit < length * 8 || length == 0));
                prop_assert_eq!(line.waiting(), model.len());
                if take {
                    let first = line.first();
                    let model = model.pop_front();
                    prop_assert_eq!(first.is_some(), model.is_some());
                    if let (Some(first), Some((at_ns, mark, frame))) = (first, model) {
                        prop_assert_eq!((first.at_ns, first.mark), (at_ns, mark));
                        prop_assert_eq!(line.bytes(&first), &frame[..]);
                        line.end_first();
                    }
                }
            }
        }

        /// The computed length is sufficient: frames at the vlink's rate never find the line full.
        #[test]
        fn delay_line_of_computed_length_is_never_full(
            delay_ns in 1u64..2_000_000, jitter_ns in 0u64..2_000_000, bps in 1_000_000u64..2_000_000_000,
            burst in 0u64..10_000, duplicate: bool,
            lengths in prop::collection::vec(60usize..1514, 1..40), seed: u64,
        ) {
            let duplicate = if duplicate { FrameFraction::ALL } else { FrameFraction::default() };
            let config = Impairments { delay_ns, jitter_ns, duplicate, seed, ..Impairments::default() };
            let mut line = DelayLine::new(config, {
                EgressConfig { rate_bps: Some(bps), burst_bytes: burst, impairments: config, ..EgressConfig::default() }
                    .line_bytes() as usize
            });
            // As fast as the token bucket permits.
            let (mut free_ns, mut now) = (0u64, 0u64);
            let burst_ns = burst * 8_000_000_000 / bps;
            for length in lengths.iter().cycle().take(400) {
                free_ns = free_ns.max(now) + (*length as u64 * 8_000_000_000).div_ceil(bps);
                now = now.max(free_ns.saturating_sub(burst_ns));
                while line.first().is_some_and(|first| first.at_ns <= now) {
                    line.end_first();
                }
                let drawn = line.draw(now, *length);
                for _ in 0..=usize::from(drawn.duplicate) {
                    prop_assert!(line.put(drawn.at_ns.unwrap(), 0, &vec![0; *length]));
                }
            }
        }

        /// The line is not full either when it gets shorter or is removed
        /// while earlier frames wait. Their memory is returned then.
        #[test]
        fn shortened_delay_line_returns_its_memory(
            delay_ns in 1u64..20_000_000, shorter_ns in 0u64..1_000_000, bps in 1_000_000u64..200_000_000,
            lengths in prop::collection::vec(60usize..1514, 1..40), change in 0usize..400,
        ) {
            let delayed = |delay_ns| Impairments { delay_ns, ..Impairments::default() };
            let line_of = |config| DelayLine::of(&EgressConfig { rate_bps: Some(bps), impairments: config, ..EgressConfig::default() });
            let mut line = line_of(delayed(delay_ns)).unwrap();
            let length = line.rings[0].bytes.len();
            let mut now = 0;
            for (number, length) in lengths.iter().cycle().take(800).enumerate() {
                if number == change {
                    let mut old = Some(line);
                    match DelayLine::continue_from(line_of(delayed(shorter_ns)), &mut old) {
                        Some(new) => line = new,
                        None => return Ok(()),
                    }
                }
                now += (*length as u64 * 8_000_000_000).div_ceil(bps);
                while line.first().is_some_and(|first| first.at_ns <= now) {
                    line.end_first();
                }
                if let Some(at_ns) = line.draw(now, *length).at_ns {
                    prop_assert!(line.put(at_ns, 0, &vec![0; *length]), "full at {number}");
                }
            }
            while line.first().is_some() {
                line.end_first();
            }
            let spent: usize = std::iter::from_fn(|| line.spent()).map(|it| it.len()).sum();
            let left: usize = line.rings.iter().map(|ring| ring.bytes.len()).sum();
            let needed = line_of(delayed(shorter_ns)).map_or(0, |line| line.rings[0].bytes.len());
            prop_assert_eq!(left, needed, "{} of {} are spent", spent, length);
        }

        #[test]
        fn impairments_repeat_for_the_same_seed(config in impairments(), other in impairments()) {
            let draws = |config| {
                let mut line = DelayLine::new(config, 0);
                (0..50).map(|_| line.draw(0, 100)).collect::<Vec<_>>()
            };
            prop_assert_eq!(draws(config), draws(config));
            let mixed = Impairments { loss: config.loss, seed: config.seed, ..other };
            let lost = |draws: Vec<DrawnImpairments>| draws.into_iter().map(|drawn| drawn.lost).collect::<Vec<_>>();
            prop_assert_eq!(lost(draws(config)), lost(draws(mixed)));
        }

        #[test]
        fn jitter_preserves_frame_order(
            range_ns in 0u64..40_000_000,
            frames in prop::collection::vec((prop_oneof![0u64..3, 0u64..100_000, 0u64..50_000_000], any::<u32>()), 1..300),
        ) {
            let mut jitter = Jitter::default();
            let (mut now_ns, mut last_ns) = (0, 0);
            for (gap_ns, drawn) in frames {
                now_ns += gap_ns;
                let delay_ns = jitter.next(now_ns, range_ns, drawn);
                prop_assert!(delay_ns <= range_ns);
                prop_assert!(now_ns + delay_ns >= last_ns);
                last_ns = now_ns + delay_ns;
            }
        }
    }

    /// Bounds the largest distance between the distribution of delays and the uniform one
    /// (Kolmogorov and Smirnov). This also bounds the distance of the means, which is no larger.
    #[test]
    fn jittered_delays_are_uniform_at_any_frame_rate() {
        let (delay_ns, jitter_ns) = (30_000_000, 20_000_000);
        let distance = |fps: u64, seconds: u64, seed: u64| {
            let config = Impairments { delay_ns, jitter_ns, seed, ..Impairments::default() };
            let mut line = DelayLine::new(config, 1 << 20);
            let delays = (0..fps * seconds).map(|number| {
                let now_ns = number * 1_000_000_000 / fps;
                while line.first().is_some_and(|first| first.at_ns <= now_ns) {
                    line.end_first();
                }
                let at_ns = line.draw(now_ns, 0).at_ns.unwrap();
                assert!(line.put(at_ns, 0, &[]));
                (at_ns - now_ns - (delay_ns - jitter_ns)) as f64 / (2 * jitter_ns) as f64
            });
            let mut delays: Vec<f64> = delays.collect();
            delays.sort_unstable_by(f64::total_cmp);
            let part = 1.0 / delays.len() as f64;
            let distances = delays.iter().enumerate().map(|(number, delay)| {
                let (before, after) = (number as f64 * part, (number + 1) as f64 * part);
                (delay - before).abs().max((delay - after).abs())
            });
            distances.fold(0.0, f64::max)
        };
        for (fps, seconds) in [(10, 1000), (1_000, 60), (100_000, 20)] {
            for seed in 0..2 {
                let distance = distance(fps, seconds, seed);
                assert!(distance < 0.03, "{distance} at {fps} frames a second");
            }
        }
    }

    /// χ² of 100 equal parts, 99 degrees of freedom. It exceeds
    /// 160 once in 10,000 times, and the seed is fixed.
    #[test]
    fn impairments_follow_their_probability_distributions() {
        const N: usize = 200_000;
        let share = FrameFraction(30_000_000);
        let config = Impairments {
            delay_ns: 1_000_000,
            jitter_ns: 500_000,
            loss: share,
            reorder: share,
            corrupt: share,
            duplicate: share,
            seed: 7,
        };
        let mut line = DelayLine::new(config, 0);
        let mut hits = [0usize; 4];
        let (mut jitter, mut bits) = ([0usize; 100], [0usize; 100]);
        for number in 0..N as u64 {
            // Far enough apart that each frame's delay is drawn independently.
            let now_ns = number * 2_000_000;
            let drawn = line.draw(now_ns, 100);
            for (hits, hit) in hits.iter_mut().zip([
                drawn.lost,
                drawn.duplicate,
                drawn.corrupt.is_some(),
                drawn.at_ns.is_none(),
            ]) {
                *hits += usize::from(hit);
            }
            if let Some(bit) = drawn.corrupt {
                bits[bit / 8] += 1;
            }
            if let Some(at_ns) = drawn.at_ns {
                jitter[((at_ns - now_ns - 500_000) * 100 / 1_000_001) as usize] += 1;
            }
        }
        for hits in hits {
            let (expected, deviation) = (0.03 * N as f64, (0.03 * 0.97 * N as f64).sqrt());
            assert!((hits as f64 - expected).abs() < 4.0 * deviation, "{hits} of {N}");
        }
        for parts in [jitter, bits] {
            let expected = parts.iter().sum::<usize>() as f64 / 100.0;
            let chi: f64 = parts.iter().map(|&n| (n as f64 - expected).powi(2) / expected).sum();
            assert!((50.0..160.0).contains(&chi), "{chi}: {parts:?}");
        }
    }
}
