//! Chooses the next frame on an interface of known capacity. Each traffic class
//! has its guarantee, whatever others send. Unused capacity is divided by weight.
//!
//! Two rules apply, as in hierarchical fair service curves with straight curves
//! (Stoica, Zhang, Ng: A Hierarchical Fair Service Curve Algorithm, SIGCOMM 1997):
//!
//! - A class with queued frames that has had less than its guarantee is *owed* a
//!   frame. Of the classes that are owed one, the one with the earliest deadline is
//!   next (rate-controlled earliest deadline first; Zhang: Service Disciplines for
//!   Guaranteed Performance Service in Packet-Switching Networks, 1995, section III).
//! - If no class is owed a frame, the classes with queued frames divide
//!   the capacity by weight (start-time fair queueing; Goyal, Vin, Cheng,
//!   SIGCOMM 1996). Frames beyond the guarantee are not charged to it.
//!
//! Bound: let the guarantees add up to no more than the capacity. Take a frame that arrives
//! within its class's guarantee, and the time when the guarantee alone would have sent its
//! last bit. The frame is sent at most `BYTES_MAX / guarantee + BYTES_MAX / capacity`
//! later. If the caller calls [`WfqScheduler::next`] too late, that delay has to be added.
//!
//! Pure: the caller passes the time.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::mem;

/// Longest frame that deadlines account for, bytes on the interface.
pub const BYTES_MAX: u64 = 2048;

const FRACTION_BITS: u32 = 32;
const SECOND: u128 = 1_000_000_000 << FRACTION_BITS;

/// A time or a time span: nanoseconds with 32 bits of
/// fraction, so that rounding errors do not add up.
type Time = u128;

/// Capacity for a traffic class.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BandwidthShare {
    /// Guaranteed rate, whatever others send, bits a second.
    pub guarantee_bps: u64,
    /// Weight for unused capacity, relative to the other classes; 0: none of it.
    pub weight: u32,
}

/// Next event on the interface.
#[derive(Debug, PartialEq, Eq)]
pub enum NextFrame<T> {
    /// A frame of this class is sent now.
    Send(usize, T),
    /// No frame is sent before this time, nanoseconds.
    At(u64),
    /// No frame is queued.
    Idle,
}

/// Scheduler of an interface. `T` is a frame.
#[derive(Debug)]
pub struct WfqScheduler<T> {
    classes: Vec<WfqClass<T>>,
    /// Time that a byte takes at the capacity.
    step: Time,
    /// Most time that it catches up on after a late call of [`WfqScheduler::next`].
    late: Time,
    /// Time when all sent frames have left the interface.
    out_at: Time,
    /// Classes with queued frames and a guarantee, by the time when they are owed a frame.
    later: BinaryHeap<Reverse<(Time, usize)>>,
    /// Classes that are owed a frame, by its deadline.
    eligible: BinaryHeap<Reverse<(Time, usize)>>,
    /// Classes with queued frames and a weight, by their virtual times.
    sharing: BinaryHeap<Reverse<(u128, usize)>>,
    /// Virtual time: that of the last frame that was sent by weight.
    now: u128,
    waiting: usize,
}

#[derive(Debug)]
struct WfqClass<T> {
    part: BandwidthShare,
    /// Time that a byte takes at the guaranteed rate.
    step: Time,
    /// Frames and their lengths on the interface, bytes.
    frames: VecDeque<(T, u32)>,
    /// Time when the guarantee alone would have sent the frames charged to it.
    served: Time,
    /// Time since when it has queued frames.
    since: Time,
    /// Virtual time when its next frame starts.
    start: u128,
    /// True if it is in `later` or `owed`; true if it is in `sharing`.
    is_timed: bool,
    is_sharing: bool,
}

impl<T> WfqClass<T> {
    fn new() -> Self {
        Self {
            part: BandwidthShare::default(),
            step: 0,
            frames: VecDeque::new(),
            served: 0,
            since: 0,
            start: 0,
            is_timed: false,
            is_sharing: false,
        }
    }

    /// Returns when it is owed its next frame, if it has queued frames.
    fn owed_at(&self) -> Time {
        self.served.max(self.since)
    }

    fn deadline(&self) -> Time {
        self.owed_at() + self.step * Time::from(BYTES_MAX)
    }
}

/// Returns the time that a byte takes at a rate above 0.
fn step(bps: u64) -> Time {
    SECOND * 8 / Time::from(bps.max(1))
}

impl<T> WfqScheduler<T> {
    /// Returns a scheduler without a capacity: every frame is sent
    /// at once. It catches up on `late_ns` of late calls at most.
    pub fn new(late_ns: u64) -> Self {
        Self {
            classes: vec![],
            step: 0,
            late: Time::from(late_ns) << FRACTION_BITS,
            out_at: 0,
            later: BinaryHeap::new(),
            eligible: BinaryHeap::new(),
            sharing: BinaryHeap::new(),
            now: 0,
            waiting: 0,
        }
    }

    /// Sets the capacity from now on, bits a second. `None`: all queued frames are sent at once.
    pub fn set_capacity(&mut self, bps: Option<u64>) {
        self.step = bps.map_or(0, step);
    }

    /// Sets a class's capacity from now on. Queued frames stay queued.
    pub fn set(&mut self, class: usize, part: BandwidthShare, now_ns: u64) {
        if self.classes.len() <= class {
            self.classes.resize_with(class + 1, WfqClass::new);
        }
        if self.classes[class].part == part {
            return;
        }
        self.leave(class);
        let here = &mut self.classes[class];
        here.part = part;
        here.step = if part.guarantee_bps == 0 { 0 } else { step(part.guarantee_bps) };
        // Service under the old parameters says nothing about the new ones.
        here.served = Time::from(now_ns) << FRACTION_BITS;
        here.start = self.now;
        self.enter(class);
    }

    /// Removes a class and returns its frames. Another class may get its number.
    pub fn remove(&mut self, class: usize) -> VecDeque<(T, u32)> {
        self.leave(class);
        let was = self.classes.get_mut(class).map(|here| mem::replace(here, WfqClass::new()));
        let frames = was.map_or(VecDeque::new(), |was| was.frames);
        self.waiting -= frames.len();
        frames
    }

    /// Removes a class from all heaps.
    fn leave(&mut self, class: usize) {
        let Some(here) = self.classes.get_mut(class) else { return };
        if mem::take(&mut here.is_timed) {
            self.later.retain(|it| it.0.1 != class);
            self.eligible.retain(|it| it.0.1 != class);
        }
        if mem::take(&mut here.is_sharing) {
            self.sharing.retain(|it| it.0.1 != class);
        }
    }

    /// Returns the queued frames of all classes.
    pub fn waiting(&self) -> usize {
        self.waiting
    }

    /// Queues a frame of `bytes` on the interface. [`WfqScheduler::set`] must have set its class.
    pub fn enqueue(&mut self, class: usize, frame: T, bytes: u32, now_ns: u64) {
        let now = Time::from(now_ns) << FRACTION_BITS;
        if self.waiting == 0 {
            self.out_at = self.out_at.max(now);
        }
        let here = &mut self.classes[class];
        if here.frames.is_empty() {
            here.since = now;
            here.start = here.start.max(self.now);
        }
        here.frames.push_back((frame, bytes));
        self.waiting += 1;
        self.enter(class);
    }

    /// Adds a class with queued frames to the heaps.
    fn enter(&mut self, class: usize) {
        let here = &mut self.classes[class];
        if here.frames.is_empty() {
            return;
        }
        if here.part.guarantee_bps > 0 && !here.is_timed {
            here.is_timed = true;
            self.later.push(Reverse((here.owed_at(), class)));
        }
        if here.part.weight > 0 && !here.is_sharing {
            here.is_sharing = true;
            self.sharing.push(Reverse((here.start, class)));
        }
    }

    /// Returns the next frame, if the interface can send one at `now_ns`.
    pub fn next(&mut self, now_ns: u64) -> NextFrame<T> {
        if self.waiting == 0 {
            return NextFrame::Idle;
        }
        let now = Time::from(now_ns) << FRACTION_BITS;
        if self.out_at > now && self.step > 0 {
            return NextFrame::At(up(self.out_at));
        }
        let class = match self.first_owed(now) {
            Some(class) => class,
            None => match self.first_sharing() {
                Some(class) => class,
                None => {
                    return self
                        .later
                        .peek()
                        .map_or(NextFrame::Idle, |it| NextFrame::At(up(it.0.0)));
                }
            },
        };
        let here = &mut self.classes[class];
        let Some((frame, bytes)) = here.frames.pop_front() else { return NextFrame::Idle };
        self.waiting -= 1;
        let at = self.out_at.clamp(now.saturating_sub(self.late), now);
        self.out_at = at + self.step * Time::from(bytes);
        self.enter(class);
        NextFrame::Send(class, frame)
    }

    /// Removes the class that is owed a frame and has the
    /// earliest deadline, and charges the frame to its guarantee.
    fn first_owed(&mut self, now: Time) -> Option<usize> {
        while let Some(&Reverse((at, class))) = self.later.peek().filter(|it| it.0.0 <= now) {
            self.later.pop();
            let here = &mut self.classes[class];
            let owed_at = here.owed_at();
            if here.frames.is_empty() || here.part.guarantee_bps == 0 {
                here.is_timed = false;
            } else if owed_at > at {
                // The class was empty meanwhile.
                self.later.push(Reverse((owed_at, class)));
            } else {
                self.eligible.push(Reverse((here.deadline(), class)));
            }
        }
        while let Some(Reverse((deadline, class))) = self.eligible.pop() {
            let here = &mut self.classes[class];
            if here.frames.is_empty() || here.part.guarantee_bps == 0 {
                here.is_timed = false;
            } else if here.deadline() > deadline {
                self.eligible.push(Reverse((here.deadline(), class)));
            } else {
                here.is_timed = false;
                let bytes = here.frames.front().map_or(0, |first| first.1);
                here.served = here.owed_at() + here.step * Time::from(bytes);
                return Some(class);
            }
        }
        None
    }

    /// Removes the class with the earliest virtual time, and charges its first frame to its weight.
    fn first_sharing(&mut self) -> Option<usize> {
        while let Some(Reverse((start, class))) = self.sharing.pop() {
            let here = &mut self.classes[class];
            if here.frames.is_empty() || here.part.weight == 0 {
                here.is_sharing = false;
            } else if here.start > start {
                self.sharing.push(Reverse((here.start, class)));
            } else {
                here.is_sharing = false;
                self.now = start;
                let bytes = here.frames.front().map_or(0, |first| first.1);
                here.start +=
                    u128::from((u64::from(bytes) << FRACTION_BITS) / u64::from(here.part.weight));
                return Some(class);
            }
        }
        None
    }
}

/// Rounds a time up to whole nanoseconds.
fn up(at: Time) -> u64 {
    u64::try_from(at.div_ceil(1 << FRACTION_BITS)).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn wfq<T>(capacity_bps: u64, parts: &[BandwidthShare], late_ns: u64) -> WfqScheduler<T> {
        let mut wfq = WfqScheduler::new(late_ns);
        wfq.set_capacity(Some(capacity_bps));
        parts.iter().enumerate().for_each(|(class, part)| wfq.set(class, *part, 0));
        wfq
    }

    /// Ideal scheduler. It serves every class with queued frames
    /// at once, at its guarantee and its part of the rest.
    struct Fluid {
        capacity: f64,
        parts: Vec<BandwidthShare>,
        /// Queued bits.
        queues: Vec<f64>,
        served: Vec<f64>,
        now: f64,
    }

    impl Fluid {
        fn new(capacity_bps: u64, parts: &[BandwidthShare]) -> Self {
            let zero = vec![0.0; parts.len()];
            let (queues, served) = (zero.clone(), zero);
            Self {
                capacity: capacity_bps as f64 / 1e9,
                parts: parts.to_vec(),
                queues,
                served,
                now: 0.0,
            }
        }

        fn until(&mut self, end: f64) {
            while self.now < end {
                let waits = |at: usize| self.queues[at] > 1e-9;
                let all = 0..self.parts.len();
                let sum: f64 = all
                    .clone()
                    .filter(|&at| waits(at))
                    .map(|at| self.parts[at].guarantee_bps as f64 / 1e9)
                    .sum();
                let weights: f64 = all
                    .clone()
                    .filter(|&at| waits(at))
                    .map(|at| f64::from(self.parts[at].weight))
                    .sum();
                let rates: Vec<f64> = all
                    .clone()
                    .map(|at| {
                        if !waits(at) {
                            return 0.0;
                        }
                        let share = if weights > 0.0 {
                            (self.capacity - sum) * f64::from(self.parts[at].weight) / weights
                        } else {
                            0.0
                        };
                        self.parts[at].guarantee_bps as f64 / 1e9 + share
                    })
                    .collect();
                let empty =
                    all.clone().filter(|&at| waits(at)).map(|at| self.queues[at] / rates[at]);
                let span = empty.fold(end - self.now, f64::min).max(1e-6).min(end - self.now);
                for at in all {
                    let bits = (rates[at] * span).min(self.queues[at]);
                    self.queues[at] -= bits;
                    self.served[at] += bits;
                }
                self.now += span;
                if end - self.now < 1e-6 {
                    self.now = end;
                }
            }
        }
    }

    fn parts() -> impl Strategy<Value = (u64, Vec<BandwidthShare>)> {
        (2usize..12, 1_000_000u64..1_000_000_000).prop_flat_map(|(count, capacity)| {
            let parts = prop::collection::vec((0u64..1000, 0u32..10), count);
            (Just(capacity), parts, 1u64..=100).prop_map(|(capacity, raw, full)| {
                let sum: u64 = raw.iter().map(|it| it.0).sum::<u64>().max(1);
                let parts = raw.iter().map(|&(guarantee, weight)| {
                    let guarantee_bps = capacity * full / 100 * guarantee / sum;
                    // At least one of both, so that every class gets some capacity.
                    let weight = if guarantee_bps < capacity / 1000 { weight + 1 } else { weight };
                    BandwidthShare { guarantee_bps, weight }
                });
                (capacity, parts.collect())
            })
        })
    }

    proptest! {
        /// Frames of a class are sent in order. None is lost. The capacity
        /// is never exceeded. Frames within the guarantee are sent within
        /// the bound. No class is far from the ideal scheduler.
        #[test]
        fn wfq_matches_the_ideal_fluid_scheduler(
            (capacity, parts) in parts(),
            load in prop::collection::vec((0u64..40, any::<prop::sample::Index>(), 60u32..2048, 1usize..30), 1..60),
        ) {
            let mut wfq = wfq(capacity, &parts, 0);
            let mut fluid = Fluid::new(capacity, &parts);
            let frame_ns = 1514 * 8_000_000_000 / capacity;
            let mut arrivals = vec![];
            let mut at = 0;
            for (gap, class, bytes, count) in load {
                at += gap * frame_ns;
                let class = class.index(parts.len());
                for _ in 0..count { arrivals.push((at, class, bytes)); }
            }
            let total = arrivals.len();
            let mut arrivals = arrivals.into_iter().enumerate().peekable();
            let (mut now, mut gone) = (0u64, 0);
            let mut bits = vec![0u64; parts.len()];
            let mut last = vec![None; parts.len()];
            // Time when each frame would be sent at its class's guarantee alone.
            let mut alone = vec![0f64; parts.len()];
            let mut due = vec![f64::INFINITY; total];
            let mut free = 0f64;
            while gone < total {
                while let Some(&(number, (at, class, bytes))) = arrivals.peek() {
                    if at > now { break }
                    arrivals.next();
                    fluid.until(at as f64);
                    fluid.queues[class] += f64::from(bytes) * 8.0;
                    wfq.enqueue(class, (number, bytes), bytes, at);
                    if parts[class].guarantee_bps > 0 {
                        let rate = parts[class].guarantee_bps as f64 / 8e9;
                        alone[class] = alone[class].max(at as f64) + f64::from(bytes) / rate;
                        due[number] = alone[class] + BYTES_MAX as f64 / rate;
                    }
                }
                let next_ns = arrivals.peek().map(|it| it.1.0);
                match wfq.next(now) {
                    NextFrame::Send(class, (number, bytes)) => {
                        prop_assert!(last[class] < Some(number));
                        last[class] = Some(number);
                        gone += 1;
                        bits[class] += u64::from(bytes) * 8;
                        prop_assert!(now as f64 + 1.0 >= free, "{now} before {free}");
                        let takes = f64::from(bytes) * 8e9 / capacity as f64;
                        free = free.max(now as f64) + takes;
                        let bound = due[number] + 8e9 * BYTES_MAX as f64 / capacity as f64 + 4.0;
                        prop_assert!(free <= bound, "frame {number} of {class}: {free} after {bound}");
                        fluid.until(now as f64 + takes);
                        let most = 8.0 * BYTES_MAX as f64 * (parts.len() as f64 + 2.0);
                        for (at, (bits, served)) in bits.iter().zip(&fluid.served).enumerate() {
                            let off = *bits as f64 - served;
                            prop_assert!(off.abs() <= most, "class {at} is {off} bits from the ideal; {most}");
                        }
                    }
                    NextFrame::At(at) => {
                        prop_assert!(at > now);
                        now = next_ns.map_or(at, |next| at.min(next));
                    }
                    NextFrame::Idle => {
                        prop_assert!(next_ns.is_some());
                        now = next_ns.unwrap();
                    }
                }
            }
            prop_assert_eq!(wfq.next(u64::MAX >> 1), NextFrame::Idle);
        }
    }

    /// A class with most of the capacity waits only for the frame that
    /// is being sent, although other classes were owed frames before.
    #[test]
    fn wfq_sends_the_earliest_deadline_first() {
        let part = |percent: u64| BandwidthShare { guarantee_bps: percent * 10_000_000, weight: 1 };
        let parts: Vec<_> = (0..11).map(|class| part(if class == 0 { 80 } else { 2 })).collect();
        let mut wfq = wfq(1_000_000_000, &parts, 0);
        (1..11).for_each(|class| wfq.enqueue(class, (), 2000, 0));
        assert_eq!(wfq.next(0), NextFrame::Send(1, ()));
        wfq.enqueue(0, (), 2000, 1);
        assert_eq!(
            (wfq.next(1), wfq.next(16_000)),
            (NextFrame::At(16_000), NextFrame::Send(0, ()))
        );
    }

    /// Queued frames stay in order when the shares or the capacity change or end. Removing
    /// a class returns its frames. A class that reuses the number inherits nothing.
    #[test]
    fn wfq_applies_new_shares_while_frames_are_queued() {
        let slow = BandwidthShare { guarantee_bps: 1, weight: 1 };
        let mut wfq = wfq(1_000_000, &[slow, BandwidthShare { guarantee_bps: 0, weight: 1000 }], 0);
        for number in 0..30 {
            (0..2).for_each(|class| wfq.enqueue(class, number, 1250, 0));
        }
        assert_eq!((wfq.next(0), wfq.next(0)), (NextFrame::Send(0, 0), NextFrame::At(10_000_000)));
        assert_eq!(wfq.next(10_000_000), NextFrame::Send(0, 1), "both begin alike");
        assert_eq!(wfq.next(20_000_000), NextFrame::Send(1, 0));
        assert_eq!(wfq.next(30_000_000), NextFrame::Send(1, 1), "nothing is owed for hours");
        wfq.set(0, BandwidthShare { guarantee_bps: 1_000_000, weight: 1 }, 40_000_000);
        for number in 2..6 {
            assert_eq!(
                wfq.next((2 + number) * 10_000_000),
                NextFrame::Send(0, number),
                "all of it"
            );
        }
        wfq.set_capacity(Some(10_000_000));
        assert!(matches!(wfq.next(80_000_000), NextFrame::Send(_, 6 | 2)));
        assert_eq!(wfq.next(80_000_000), NextFrame::At(81_000_000));
        let left: Vec<_> = wfq.remove(0).into_iter().map(|(frame, _)| frame).collect();
        assert_eq!(left.last(), Some(&29));
        assert_eq!(left.len() + wfq.waiting(), 60 - 9);
        wfq.set(0, BandwidthShare { guarantee_bps: 0, weight: 1 }, 81_000_000);
        wfq.set_capacity(None);
        let rest: Vec<_> = std::iter::from_fn(|| match wfq.next(81_000_000) {
            NextFrame::Send(class, number) => Some((class, number)),
            _ => None,
        })
        .collect();
        assert!(rest.iter().all(|it| it.0 == 1) && rest.is_sorted(), "{rest:?}");
        assert_eq!((rest.len() + left.len(), wfq.next(0)), (60 - 9, NextFrame::Idle));
    }

    /// A late caller gets the frames that have become
    /// due, up to a bound. Idle time brings no credit.
    #[test]
    fn late_wfq_caller_catches_up_to_a_bound() {
        let mut wfq =
            wfq(1_000_000_000, &[BandwidthShare { guarantee_bps: 0, weight: 1 }], 1_000_000);
        let mut due = |now_ns| {
            let mut count = 0;
            while let NextFrame::Send(..) = wfq.next(now_ns) {
                count += 1;
            }
            let waits = wfq.waiting();
            (waits..200).for_each(|_| wfq.enqueue(0, (), 1250, now_ns));
            count
        };
        assert_eq!(due(5_000_000), 0);
        assert_eq!((due(5_000_000), due(5_500_000), due(5_505_000)), (1, 50, 0));
        assert_eq!(due(15_500_000), 101, "a millisecond of ten");
        assert_eq!(due(15_500_000), 0);
    }

    /// Returns the shares of classes that always have frames, over a second of a Gigabit.
    fn shares(parts: &[BandwidthShare]) -> Vec<f64> {
        let mut wfq = wfq(1_000_000_000, parts, 0);
        let (mut now, mut bytes) = (0, vec![0u64; parts.len()]);
        for class in 0..parts.len() {
            for _ in 0..2 {
                wfq.enqueue(class, (), 64 + (class as u32 * 397) % 1450, 0);
            }
        }
        while now < 1_000_000_000 {
            match wfq.next(now) {
                NextFrame::Send(class, ()) => {
                    let length = 64 + (class as u32 * 397) % 1450;
                    bytes[class] += u64::from(length);
                    wfq.enqueue(class, (), length, now);
                }
                NextFrame::At(at) => now = at,
                NextFrame::Idle => unreachable!(),
            }
        }
        let sum: u64 = bytes.iter().sum();
        bytes.iter().map(|&bytes| bytes as f64 / sum as f64).collect()
    }

    #[test]
    fn wfq_shares_match_weights_and_guarantees() {
        let five = [30u32, 25, 20, 15, 10];
        let by_weight = five.map(|weight| BandwidthShare { guarantee_bps: 0, weight });
        let by_guarantee = five.map(|percent| BandwidthShare {
            guarantee_bps: u64::from(percent) * 10_000_000,
            weight: 1,
        });
        for parts in [by_weight, by_guarantee] {
            for (share, expected) in shares(&parts).into_iter().zip(five) {
                assert!(
                    (share - f64::from(expected) / 100.0).abs() < 0.005 / 2.0,
                    "{share} {expected}"
                );
            }
        }
        // One of 64 has a guarantee of half the capacity, and all divide the other half.
        let mut many = vec![BandwidthShare { guarantee_bps: 0, weight: 1 }; 64];
        many[0].guarantee_bps = 500_000_000;
        let shares = shares(&many);
        assert!((shares[0] - (0.5 + 0.5 / 64.0)).abs() < 0.0025, "{}", shares[0]);
        assert!(shares[1..].iter().all(|share| (share - 0.5 / 64.0).abs() < 0.0001), "{shares:?}");
    }
}
