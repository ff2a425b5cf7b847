//! A vlink's rate in one direction: frames beyond it wait in a queue of bounded length, or in several ([`Queues`]),
//! which also have them wait for an interface's capacity; and where those wait that have to wait for their tunnel.

use std::collections::VecDeque;
use std::iter;

use pdp_afxdp::Packet;
use pdp_proto::mux::{self, Leaving, QueueStats, Rate};

use crate::class::Room;
use crate::police::TokenBucket;
use crate::queues::{Buffers, Queues};

/// How far a shaper may run ahead, as time at its rate: what a worker may sleep too long.
pub const SHAPER_BURST_NS: u64 = 2_000_000;

/// Full frames that a shaper may run ahead where it is not told, at least.
const SHAPER_BURST_FRAMES_MIN: u64 = 2;

/// The same where it is told, bytes: else the longest frame would never go.
const SHAPER_BURST_BYTES_MIN: u64 = 2048;

/// Rate of a vlink between two ports of this node that was given none: finite, so that a loop that
/// no protocol breaks burns its own vnet only.
pub const LOCAL_RATE: Rate = Rate { bps: 10_000_000_000, pps: 2_000_000 };

/// What becomes of a frame that is offered.
#[derive(Debug)]
pub enum Offered {
    /// It may go at once.
    Go(Packet),
    /// It waits.
    Waits,
    /// There is no room for it.
    Full(Packet),
}

/// One direction of a vlink.
#[derive(Debug)]
pub struct Shaper {
    rate: Rate,
    burst_bytes: u64,
    /// What each frame counts beyond its bytes.
    overhead_bytes: usize,
    bucket: TokenBucket,
    queue: VecDeque<Packet>,
    queue_max: usize,
    /// Bytes that wait, as they count, and how many may.
    bytes: u64,
    bytes_max: u64,
    /// Where frames wait instead.
    queues: Option<Box<Queues>>,
}

impl Shaper {
    /// At the rate that it has, or else at `default`; with these queues, or without any with one for all.
    pub fn new(leaving: &Leaving, queues: &[mux::Queue], default: Rate) -> Self {
        let rate = leaving.rate_bps.map_or(default, |bps| Rate { bps, pps: 0 });
        let bucket = match leaving.burst_bytes {
            0 => TokenBucket::new(rate, SHAPER_BURST_NS, SHAPER_BURST_FRAMES_MIN),
            bytes => TokenBucket::with_burst(rate.bps, bytes.max(SHAPER_BURST_BYTES_MIN)),
        };
        Self {
            rate,
            burst_bytes: leaving.burst_bytes,
            overhead_bytes: leaving.overhead_bytes as usize,
            bucket,
            // Grows as frames come to wait: a vnet may have thousands of vlinks where none ever does.
            queue: VecDeque::new(),
            queue_max: leaving.queue_frames as usize,
            bytes: 0,
            bytes_max: if leaving.queue_bytes == 0 { u64::MAX } else { leaving.queue_bytes },
            queues: Queues::of(queues, leaving),
        }
    }

    /// Goes on where `old` stopped, at the new rate. All that waits goes on waiting, be it more than there is room for
    /// now.
    pub fn take_over(&mut self, old: &mut Self) {
        if (old.rate, old.burst_bytes) == (self.rate, self.burst_bytes) {
            self.bucket = old.bucket;
        }
        match (&mut self.queues, &mut old.queues) {
            (Some(queues), Some(were)) => queues.take_over(were),
            (Some(queues), None) => {
                for packet in old.queue.drain(..) {
                    queues.put(queues.choose(&packet), packet);
                }
            }
            (None, _) => old.drain().for_each(|packet| self.push(packet)),
        }
    }

    fn count(&self, packet: &Packet) -> usize {
        packet.len() + self.overhead_bytes
    }

    /// Whether a frame may wait: always one, and as many as have room.
    fn has_room(&self, packet: &Packet) -> bool {
        let fits =
            self.queue.is_empty() || self.bytes + self.count(packet) as u64 <= self.bytes_max;
        self.queue.len() < self.queue_max && fits
    }

    fn push(&mut self, packet: Packet) {
        self.bytes += self.count(&packet) as u64;
        self.queue.push_back(packet);
    }

    /// Frames that wait.
    pub fn waiting(&self) -> usize {
        self.queues.as_ref().map_or(self.queue.len(), |queues| queues.waiting())
    }

    /// What its queues have set aside for them.
    #[inline]
    pub fn buffers(&self) -> Buffers {
        self.queues.as_ref().map_or_else(Buffers::default, |queues| queues.buffers())
    }

    /// Whether everything that is offered may go at once, and nothing is to be counted.
    #[inline]
    pub fn is_open(&self) -> bool {
        self.queues.is_none() && self.queue.is_empty() && self.bucket.is_unlimited()
    }

    /// Whether it has several queues, where frames wait for an interface's capacity, too.
    #[inline]
    pub fn has_queues(&self) -> bool {
        self.queues.is_some()
    }

    /// Its several queues.
    pub fn queues(&mut self) -> Option<&mut Queues> {
        self.queues.as_deref_mut()
    }

    /// Whether it has no rate that frames in its one queue could wait for.
    pub fn waits_for_capacity(&self) -> bool {
        self.queues.is_none() && self.bucket.is_unlimited()
    }

    /// What was counted of each of several queues, from one of them on.
    pub fn stats(&self, from: usize) -> impl Iterator<Item = QueueStats> {
        self.queues.iter().flat_map(move |queues| queues.stats(from))
    }

    /// Frames are offered next.
    #[inline]
    pub fn expect(&self, frames: &[Packet]) {
        self.queues.iter().for_each(|queues| queues.expect(frames));
    }

    /// Sends or keeps a frame. `spare` is how many more of the packet pool those that wait with it may have; `room`, where
    /// there are several queues, what may go on.
    pub fn offer(&mut self, packet: Packet, now_ns: u64, spare: usize, room: &mut Room) -> Offered {
        let bytes = self.count(&packet);
        let Some(queues) = &mut self.queues else {
            return if self.queue.is_empty() && self.bucket.take(now_ns, bytes).is_ok() {
                Offered::Go(packet)
            } else if spare > 0 && self.has_room(&packet) {
                self.push(packet);
                Offered::Waits
            } else {
                Offered::Full(packet)
            };
        };
        let queue = queues.choose(&packet);
        let goes = queues.waiting() == 0 && room.take(packet.len());
        if goes && self.bucket.take(now_ns, bytes).is_ok() {
            queues.passed(queue, &packet);
            Offered::Go(packet)
        } else if queues.has_room(queue, &packet, spare) {
            queues.put(queue, packet);
            Offered::Waits
        } else {
            queues.dropped(queue);
            Offered::Full(packet)
        }
    }

    /// The next frame whose time has come, or when that is, or when to look again whether there is `room`; `None` if
    /// nothing waits.
    pub fn next(&mut self, now_ns: u64, room: &mut Room) -> Option<Result<Packet, u64>> {
        if let Some(queues) = &mut self.queues {
            let (counted, bytes) = queues.first()?;
            let goes = match room.has(bytes) {
                true => self.bucket.take(now_ns, counted),
                false => Err(now_ns + room.look_ns),
            };
            return match goes {
                Err(at_ns) => Some(Err(at_ns)),
                Ok(()) => {
                    room.take(bytes);
                    queues.pop().map(Ok)
                }
            };
        }
        let bytes = self.count(self.queue.front()?);
        Some(match self.bucket.take(now_ns, bytes) {
            Err(at_ns) => Err(at_ns),
            Ok(()) => {
                self.bytes -= bytes as u64;
                Ok(self.queue.pop_front()?)
            }
        })
    }

    /// Whether a frame may wait in `held`, which has as much room as its queue.
    pub fn may_hold(&self, held: &Held, packet: &Packet) -> bool {
        let frames = held.len() + 1;
        let bytes = held.bytes + (packet.len() + frames * self.overhead_bytes) as u64;
        frames <= self.queue_max && (frames == 1 || bytes <= self.bytes_max)
    }

    /// Takes what waits.
    pub fn drain(&mut self) -> impl Iterator<Item = Packet> {
        self.bytes = 0;
        let queues = self.queues.iter_mut();
        self.queue.drain(..).chain(queues.flat_map(|queues| iter::from_fn(|| queues.pop())))
    }
}

/// Frames behind a shaper that wait for their tunnel: for its next hop, or for the interface's capacity.
#[derive(Debug, Default)]
pub struct Held {
    /// Each, and since when, nanoseconds.
    frames: VecDeque<(u64, Packet)>,
    bytes: u64,
}

impl Held {
    /// Frames that wait.
    pub fn len(&self) -> usize {
        self.frames.len()
    }

    /// Whether none does.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    /// The one that has waited longest, and since when, nanoseconds.
    pub fn first(&self) -> Option<&(u64, Packet)> {
        self.frames.front()
    }

    /// Since when the last one waits, nanoseconds.
    pub fn last_ns(&self) -> Option<u64> {
        self.frames.back().map(|last| last.0)
    }

    /// Their lengths, bytes.
    pub fn lengths(&self) -> impl Iterator<Item = usize> {
        self.frames.iter().map(|(_, packet)| packet.len())
    }

    /// One more waits, since `now_ns`.
    pub fn push(&mut self, now_ns: u64, packet: Packet) {
        self.bytes += packet.len() as u64;
        self.frames.push_back((now_ns, packet));
    }

    /// Takes the one that has waited longest.
    pub fn pop(&mut self) -> Option<Packet> {
        let (_, packet) = self.frames.pop_front()?;
        self.bytes -= packet.len() as u64;
        Some(packet)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pdp_afxdp::Pool;
    use proptest::prelude::*;

    proptest! {
        /// In order, nothing lost unless refused, never more than may wait, never faster than the
        /// rate and its burst, and as fast while something waits.
        #[test]
        fn a_queue_at_a_rate(
            bps in 1_000_000u64..10_000_000_000, queue_frames in 0u32..50,
            queue_bytes in prop_oneof![Just(0), 1_000u64..40_000], overhead_bytes in 0u32..64,
            burst_bytes in prop_oneof![Just(0), 2048u64..100_000],
            gaps in prop::collection::vec((0u64..200_000, 60usize..1514), 1..200),
        ) {
            let (_pool, mut free) = Pool::new(gaps.len()).unwrap();
            let leaving = Leaving {
                rate_bps: Some(bps), burst_bytes, overhead_bytes, queue_frames, queue_bytes, ..Leaving::default()
            };
            let mut shaper = Shaper::new(&leaving, &[], Rate { bps: 1, pps: 1 });
            let (mut now, mut order, mut accepted, mut sent) = (0u64, 0u32, vec![], vec![]);
            let overhead = overhead_bytes as usize;
            let (mut sent_bits, mut waiting_bytes) = (0u64, 0);
            let burst = match burst_bytes {
                0 => (bps as f64 * 0.002).max(2.0 * 1514.0 * 8.0),
                bytes => bytes as f64 * 8.0,
            };
            for (gap, size) in gaps {
                now += gap;
                while let Some(Ok(packet)) = shaper.next(now, &mut Room::all()) {
                    sent_bits += (packet.len() + overhead) as u64 * 8;
                    waiting_bytes -= packet.len() + overhead;
                    sent.push(packet.mark);
                }
                let mut packet = free.pop().unwrap();
                packet.set_len(size).unwrap();
                order += 1;
                packet.mark = order;
                match shaper.offer(packet, now, 1, &mut Room::all()) {
                    Offered::Go(packet) => {
                        sent_bits += (packet.len() + overhead) as u64 * 8;
                        accepted.push(packet.mark);
                        sent.push(packet.mark);
                    }
                    Offered::Waits => {
                        accepted.push(order);
                        waiting_bytes += size + overhead;
                    }
                    Offered::Full(packet) => {
                        let bytes = waiting_bytes + packet.len() + overhead;
                        let is_full = shaper.waiting() == queue_frames as usize;
                        prop_assert!(is_full || queue_bytes > 0 && bytes > queue_bytes as usize);
                    }
                }
                prop_assert!(shaper.waiting() <= queue_frames as usize);
                let fits = queue_bytes == 0 || waiting_bytes <= queue_bytes as usize;
                prop_assert!(fits || shaper.waiting() == 1);
                prop_assert!(sent_bits as f64 <= bps as f64 * (now as f64 + 10.0) / 1e9 + burst + 8.0);
            }
            while let Some(next) = shaper.next(now, &mut Room::all()) {
                match next {
                    Ok(packet) => sent.push(packet.mark),
                    Err(at) => {
                        prop_assert!(at > now);
                        now = at;
                        let Some(Ok(packet)) = shaper.next(now, &mut Room::all()) else {
                            panic!("not sent at the time told");
                        };
                        sent.push(packet.mark);
                    }
                }
            }
            prop_assert_eq!(sent, accepted);
        }
    }
}
