//! A vlink's rate in one direction. Frames that exceed it wait in a bounded queue, or
//! in several ([`Queues`]). Several queues also make frames wait for an interface's
//! capacity. This module also has the frames that are pending on their tunnel.

use std::collections::VecDeque;
use std::iter;

use pdp_afxdp::PacketBuffer;
use pdp_model::QueueStats;
use pdp_proto::mux::{self, EgressConfig, Rate};

use crate::police::TokenBucket;
use crate::queues::{Buffers, Queues};
use crate::traffic_class::SchedulerBudget;

/// Burst of a shaper, as time at its rate: how much too long a worker may sleep.
pub const SHAPER_BURST_NS: u64 = 2_000_000;

/// Least burst without a configured one, full frames.
const SHAPER_BURST_FRAMES_MIN: u64 = 2;

/// Least configured burst, bytes. With less, the longest frame could never be sent.
const SHAPER_BURST_BYTES_MIN: u64 = 2048;

/// Rate of a vlink without a configured one, between two ports of this node. It
/// is finite, so that a loop that no protocol breaks burdens only its own vnet.
pub const LOCAL_RATE: Rate = Rate { bps: 10_000_000_000, pps: 2_000_000 };

/// Outcome of offering a frame.
#[derive(Debug)]
pub enum Offered {
    /// The frame may be sent at once.
    Send(PacketBuffer),
    /// The frame is queued.
    Queued,
    /// The queue has no space for the frame.
    Full(PacketBuffer),
}

/// Shaper of one direction of a vlink.
#[derive(Debug)]
pub struct Shaper {
    rate: Rate,
    burst_bytes: u64,
    /// Bytes that count for each frame beyond its own.
    overhead_bytes: usize,
    bucket: TokenBucket,
    queue: VecDeque<PacketBuffer>,
    queue_max: usize,
    /// Queued bytes, as counted, and how many may be queued.
    bytes: u64,
    bytes_max: u64,
    /// Queues to use instead of the one queue.
    queues: Option<Box<Queues>>,
}

impl Shaper {
    /// Creates a shaper at the configured rate, or else at `default`. It
    /// has these queues or, if there are none, one queue for all frames.
    pub fn new(egress: &EgressConfig, queues: &[mux::QueueConfig], default: Rate) -> Self {
        let rate = egress.rate_bps.map_or(default, |bps| Rate { bps, pps: 0 });
        let bucket = match egress.burst_bytes {
            0 => TokenBucket::new(rate, SHAPER_BURST_NS, SHAPER_BURST_FRAMES_MIN),
            bytes => TokenBucket::with_burst(rate.bps, bytes.max(SHAPER_BURST_BYTES_MIN)),
        };
        Self {
            rate,
            burst_bytes: egress.burst_bytes,
            overhead_bytes: egress.overhead_bytes as usize,
            bucket,
            // Grows on demand, because a vnet may have
            // thousands of vlinks where no frame ever waits.
            queue: VecDeque::new(),
            queue_max: egress.queue_frames as usize,
            bytes: 0,
            bytes_max: if egress.queue_bytes == 0 { u64::MAX } else { egress.queue_bytes },
            queues: Queues::of(queues, egress),
        }
    }

    /// Continues where `old` stopped, at the new rate. All
    /// queued frames stay queued, even beyond the new limits.
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

    fn count(&self, packet: &PacketBuffer) -> usize {
        packet.len() + self.overhead_bytes
    }

    /// True if one more frame may be queued: always the first, and others within the limits.
    fn has_room(&self, packet: &PacketBuffer) -> bool {
        let fits =
            self.queue.is_empty() || self.bytes + self.count(packet) as u64 <= self.bytes_max;
        self.queue.len() < self.queue_max && fits
    }

    fn push(&mut self, packet: PacketBuffer) {
        self.bytes += self.count(&packet) as u64;
        self.queue.push_back(packet);
    }

    /// Returns the number of queued frames.
    pub fn waiting(&self) -> usize {
        self.queues.as_ref().map_or(self.queue.len(), |queues| queues.waiting())
    }

    /// Returns the packets that are reserved for its queues.
    #[inline]
    pub fn buffers(&self) -> Buffers {
        self.queues.as_ref().map_or_else(Buffers::default, |queues| queues.buffers())
    }

    /// True if every offered frame may be sent at once, and none has to be counted.
    #[inline]
    pub fn is_open(&self) -> bool {
        self.queues.is_none() && self.queue.is_empty() && self.bucket.is_unlimited()
    }

    /// True if it has several queues, where frames also wait for an interface's capacity.
    #[inline]
    pub fn has_queues(&self) -> bool {
        self.queues.is_some()
    }

    /// Returns its several queues.
    pub fn queues(&mut self) -> Option<&mut Queues> {
        self.queues.as_deref_mut()
    }

    /// True if it has one queue and no rate that frames could wait for in it.
    pub fn waits_for_capacity(&self) -> bool {
        self.queues.is_none() && self.bucket.is_unlimited()
    }

    /// Returns the counters of each of several queues, beginning with queue `from`.
    pub fn stats(&self, from: usize) -> impl Iterator<Item = QueueStats> {
        self.queues.iter().flat_map(move |queues| queues.stats(from))
    }

    /// Prepares for these frames, which are offered next.
    #[inline]
    pub fn expect(&self, frames: &[PacketBuffer]) {
        self.queues.iter().for_each(|queues| queues.expect(frames));
    }

    /// Offers a frame: returns it if it may be sent now, and queues it otherwise.
    /// `spare` is the number of packets that its queue may still take from the
    /// pool. With several queues, `room` is the budget at the interface.
    pub fn offer(
        &mut self,
        packet: PacketBuffer,
        now_ns: u64,
        spare: usize,
        room: &mut SchedulerBudget,
    ) -> Offered {
        let bytes = self.count(&packet);
        let Some(queues) = &mut self.queues else {
            return if self.queue.is_empty() && self.bucket.take(now_ns, bytes).is_ok() {
                Offered::Send(packet)
            } else if spare > 0 && self.has_room(&packet) {
                self.push(packet);
                Offered::Queued
            } else {
                Offered::Full(packet)
            };
        };
        let queue = queues.choose(&packet);
        let goes = queues.waiting() == 0 && room.take(packet.len());
        if goes && self.bucket.take(now_ns, bytes).is_ok() {
            queues.passed(queue, &packet);
            Offered::Send(packet)
        } else if queues.has_room(queue, &packet, spare) {
            queues.put(queue, packet);
            Offered::Queued
        } else {
            queues.dropped(queue);
            Offered::Full(packet)
        }
    }

    /// Returns the next frame if it may be sent now. Otherwise returns when
    /// it may, or when to check `room` again. `None` if no frame is queued.
    pub fn next(
        &mut self,
        now_ns: u64,
        room: &mut SchedulerBudget,
    ) -> Option<Result<PacketBuffer, u64>> {
        if let Some(queues) = &mut self.queues {
            let (counted, bytes) = queues.first()?;
            let goes = match room.has(bytes) {
                true => self.bucket.take(now_ns, counted),
                false => Err(now_ns + room.retry_ns),
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

    /// True if one more frame may be pending in `pending`, which has the same limits as the queue.
    pub fn may_hold(&self, pending: &PendingFrames, packet: &PacketBuffer) -> bool {
        let frames = pending.len() + 1;
        let bytes = pending.bytes + (packet.len() + frames * self.overhead_bytes) as u64;
        frames <= self.queue_max && (frames == 1 || bytes <= self.bytes_max)
    }

    /// Removes and returns all queued frames.
    pub fn drain(&mut self) -> impl Iterator<Item = PacketBuffer> {
        self.bytes = 0;
        let queues = self.queues.iter_mut();
        self.queue.drain(..).chain(queues.flat_map(|queues| iter::from_fn(|| queues.pop())))
    }
}

/// Frames behind a shaper that are pending on their tunnel:
/// on its next hop, or on the interface's capacity.
#[derive(Debug, Default)]
pub struct PendingFrames {
    /// The frames, each with the time since when it waits, nanoseconds.
    frames: VecDeque<(u64, PacketBuffer)>,
    bytes: u64,
}

impl PendingFrames {
    /// Returns the number of frames.
    pub fn len(&self) -> usize {
        self.frames.len()
    }

    /// True if there are no frames.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    /// Returns the oldest frame, and the time since when it waits, nanoseconds.
    pub fn first(&self) -> Option<&(u64, PacketBuffer)> {
        self.frames.front()
    }

    /// Returns the time since when the newest frame waits, nanoseconds.
    pub fn last_ns(&self) -> Option<u64> {
        self.frames.back().map(|last| last.0)
    }

    /// Returns the frames' lengths, bytes.
    pub fn lengths(&self) -> impl Iterator<Item = usize> {
        self.frames.iter().map(|(_, packet)| packet.len())
    }

    /// Adds a frame that waits since `now_ns`.
    pub fn push(&mut self, now_ns: u64, packet: PacketBuffer) {
        self.bytes += packet.len() as u64;
        self.frames.push_back((now_ns, packet));
    }

    /// Removes and returns the oldest frame.
    pub fn pop(&mut self) -> Option<PacketBuffer> {
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
        /// Frames stay in order, and none is lost unless refused. The
        /// queue never exceeds its limits. The rate and its burst are
        /// never exceeded, and are reached while frames are queued.
        #[test]
        fn shaper_keeps_order_rate_and_limits(
            bps in 1_000_000u64..10_000_000_000, queue_frames in 0u32..50,
            queue_bytes in prop_oneof![Just(0), 1_000u64..40_000], overhead_bytes in 0u32..64,
            burst_bytes in prop_oneof![Just(0), 2048u64..100_000],
            gaps in prop::collection::vec((0u64..200_000, 60usize..1514), 1..200),
        ) {
            let (_pool, mut free) = Pool::new(gaps.len()).unwrap();
            let egress = EgressConfig {
                rate_bps: Some(bps), burst_bytes, overhead_bytes, queue_frames, queue_bytes, ..EgressConfig::default()
            };
            let mut shaper = Shaper::new(&egress, &[], Rate { bps: 1, pps: 1 });
            let (mut now, mut order, mut accepted, mut sent) = (0u64, 0u32, vec![], vec![]);
            let overhead = overhead_bytes as usize;
            let (mut sent_bits, mut waiting_bytes) = (0u64, 0);
            let burst = match burst_bytes {
                0 => (bps as f64 * 0.002).max(2.0 * 1514.0 * 8.0),
                bytes => bytes as f64 * 8.0,
            };
            for (gap, size) in gaps {
                now += gap;
                while let Some(Ok(packet)) = shaper.next(now, &mut SchedulerBudget::all()) {
                    sent_bits += (packet.len() + overhead) as u64 * 8;
                    waiting_bytes -= packet.len() + overhead;
                    sent.push(packet.mark);
                }
                let mut packet = free.pop().unwrap();
                packet.set_len(size).unwrap();
                order += 1;
                packet.mark = order;
                match shaper.offer(packet, now, 1, &mut SchedulerBudget::all()) {
                    Offered::Send(packet) => {
                        sent_bits += (packet.len() + overhead) as u64 * 8;
                        accepted.push(packet.mark);
                        sent.push(packet.mark);
                    }
                    Offered::Queued => {
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
            while let Some(next) = shaper.next(now, &mut SchedulerBudget::all()) {
                match next {
                    Ok(packet) => sent.push(packet.mark),
                    Err(at) => {
                        prop_assert!(at > now);
                        now = at;
                        let Some(Ok(packet)) = shaper.next(now, &mut SchedulerBudget::all()) else {
                            panic!("not sent at the announced time");
                        };
                        sent.push(packet.mark);
                    }
                }
            }
            prop_assert_eq!(sent, accepted);
        }
    }
}
