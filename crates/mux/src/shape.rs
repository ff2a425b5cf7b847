//! A vlink's rate in one direction: frames beyond it wait in a queue of bounded length.

use std::collections::VecDeque;

use pdp_afxdp::Packet;
use pdp_proto::mux::Rate;

use crate::police::TokenBucket;

/// How far a shaper may run ahead, as time at its rate: what a worker may sleep too long.
pub const SHAPER_BURST_NS: u64 = 2_000_000;

/// Full frames that a shaper may run ahead, at least.
const SHAPER_BURST_FRAMES_MIN: u64 = 2;

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
    bucket: TokenBucket,
    queue: VecDeque<Packet>,
    queue_max: usize,
}

impl Shaper {
    /// At `rate`, with at most `queue_frames` waiting.
    pub fn new(rate: Rate, queue_frames: u32) -> Self {
        let queue_max = if rate == (Rate { bps: 0, pps: 0 }) { 0 } else { queue_frames as usize };
        Self {
            rate,
            bucket: TokenBucket::new(rate, SHAPER_BURST_NS, SHAPER_BURST_FRAMES_MIN),
            // Grows as frames come to wait: a vnet may have thousands of vlinks where none ever does.
            queue: VecDeque::new(),
            queue_max,
        }
    }

    /// Goes on where `old` stopped, at the new rate. Returns what has no room any more.
    pub fn take_over(&mut self, mut old: Self) -> impl Iterator<Item = Packet> {
        if old.rate == self.rate {
            self.bucket = old.bucket;
        }
        let keep = old.queue.len().min(self.queue_max);
        self.queue.extend(old.queue.drain(..keep));
        old.queue.into_iter()
    }

    /// Frames that wait.
    pub fn waiting(&self) -> usize {
        self.queue.len()
    }

    /// Whether everything that is offered may go at once.
    #[inline]
    pub fn is_open(&self) -> bool {
        self.queue.is_empty() && self.bucket.is_unlimited()
    }

    /// Sends or keeps a frame. `room` is whether the packet pool can spare one more.
    pub fn offer(&mut self, packet: Packet, now_ns: u64, room: bool) -> Offered {
        if self.queue.is_empty() && self.bucket.take(now_ns, packet.len()).is_ok() {
            Offered::Go(packet)
        } else if self.queue.len() < self.queue_max && room {
            self.queue.push_back(packet);
            Offered::Waits
        } else {
            Offered::Full(packet)
        }
    }

    /// The next frame whose time has come, or when that is; `None` if nothing waits.
    pub fn next(&mut self, now_ns: u64) -> Option<Result<Packet, u64>> {
        let first = self.queue.front()?;
        Some(match self.bucket.take(now_ns, first.len()) {
            Err(at_ns) => Err(at_ns),
            Ok(()) => Ok(self.queue.pop_front()?),
        })
    }

    /// Takes what waits.
    pub fn drain(&mut self) -> impl Iterator<Item = Packet> {
        self.queue.drain(..)
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
            gaps in prop::collection::vec((0u64..200_000, 60usize..1514), 1..200),
        ) {
            let (_pool, mut free) = Pool::new(gaps.len()).unwrap();
            let mut shaper = Shaper::new(Rate { bps, pps: 0 }, queue_frames);
            let (mut now, mut order, mut accepted, mut sent) = (0u64, 0u32, vec![], vec![]);
            let mut sent_bits = 0u64;
            for (gap, size) in gaps {
                now += gap;
                while let Some(Ok(packet)) = shaper.next(now) {
                    sent_bits += packet.len() as u64 * 8;
                    sent.push(packet.mark);
                }
                let mut packet = free.pop().unwrap();
                packet.set_len(size).unwrap();
                order += 1;
                packet.mark = order;
                match shaper.offer(packet, now, true) {
                    Offered::Go(packet) => {
                        sent_bits += packet.len() as u64 * 8;
                        accepted.push(packet.mark);
                        sent.push(packet.mark);
                    }
                    Offered::Waits => accepted.push(order),
                    Offered::Full(_) => prop_assert_eq!(shaper.waiting(), queue_frames as usize),
                }
                prop_assert!(shaper.waiting() <= queue_frames as usize);
                let burst = (bps as f64 * 0.002).max(2.0 * 1514.0 * 8.0);
                prop_assert!(sent_bits as f64 <= bps as f64 * (now as f64 + 10.0) / 1e9 + burst + 8.0);
            }
            while let Some(next) = shaper.next(now) {
                match next {
                    Ok(packet) => sent.push(packet.mark),
                    Err(at) => {
                        prop_assert!(at > now);
                        now = at;
                        let Some(Ok(packet)) = shaper.next(now) else {
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
