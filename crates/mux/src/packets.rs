//! A worker's part of the packet pool.
//!
//! Every packet has a home: the worker whose part it belongs to. A
//! packet that is freed at another worker goes home by a ring. The
//! ring has space for all packets of that home, so it is never full.

use pdp_afxdp::{PacketBuffer, Pool};
use pdp_proto::limits::BUFFERS_PART;
use rtrb::{Consumer, Producer, RingBuffer};

/// Frames as stages and netdevs pass them on. Each frame has its length,
/// its port and its mark. A stage removes the frames that it takes. The
/// frames that it leaves are for other stages, or found no space.
pub type PacketBatch = Vec<PacketBuffer>;

/// Packets that are reserved for sending again.
pub const SENT_PACKETS: usize = 512;

/// A worker's free packets, and the rings by which packets go home.
#[derive(Debug)]
pub struct Packets {
    me: usize,
    share: usize,
    free: Vec<PacketBuffer>,
    /// Free packets whose frames an AF_XDP socket has sent. They are taken
    /// first, so that packets for received and for sent frames stay apart.
    /// Each packet then stays in the cache of the CPU that writes it.
    sent: Vec<PacketBuffer>,
    /// Free packets that are reserved for queues.
    aside: usize,
    /// Rings to other workers; `None` for this one.
    homes: Vec<Option<Producer<PacketBuffer>>>,
    /// Rings from other workers.
    returned: Vec<Option<Consumer<PacketBuffer>>>,
}

impl Packets {
    /// Creates a pool of `workers` parts with `share` packets each.
    pub fn pool(workers: usize, share: usize) -> Result<(Pool, Vec<Self>), pdp_afxdp::Error> {
        let (pool, mut all) = Pool::new(workers * share)?;
        let mut parts: Vec<Self> = (0..workers)
            .map(|me| {
                let homes = (0..workers).map(|_| None).collect();
                let returned = (0..workers).map(|_| None).collect();
                let free = all.drain(..share).rev().collect();
                Self { me, share, free, sent: vec![], aside: 0, homes, returned }
            })
            .collect();
        for from in 0..workers {
            for to in (0..workers).filter(|to| *to != from) {
                let (producer, consumer) = RingBuffer::new(share);
                parts[from].homes[to] = Some(producer);
                parts[to].returned[from] = Some(consumer);
            }
        }
        Ok((pool, parts))
    }

    /// Returns the packets of this worker, free or not.
    pub fn total(&self) -> usize {
        self.share
    }

    /// Returns the packets that can be taken now, for
    /// callers that give them back in the same round.
    #[inline]
    pub fn at_hand(&self) -> usize {
        self.free.len() + self.sent.len()
    }

    /// Returns the free packets that are not reserved. Frames may be queued while there are some.
    #[inline]
    pub fn free(&self) -> usize {
        self.at_hand().saturating_sub(self.aside())
    }

    /// Returns the reserved packets, limited so that others keep their part.
    #[inline]
    fn aside(&self) -> usize {
        self.aside.min(self.share / BUFFERS_PART as usize)
    }

    /// Updates the reserved packets not in use from `before` to `now`.
    #[inline]
    pub fn reserve(&mut self, before: usize, now: usize) {
        self.aside = self.aside - before + now;
    }

    /// Takes an empty packet.
    #[inline]
    pub fn take(&mut self) -> Option<PacketBuffer> {
        let mut packet = self.sent.pop().or_else(|| self.free.pop())?;
        packet.reset();
        Some(packet)
    }

    /// Takes a packet with a copy of these bytes.
    pub fn copy_of(&mut self, bytes: &[u8], mark: u32) -> Option<PacketBuffer> {
        let mut copy = self.take()?;
        if copy.set_len(bytes.len()).is_none() {
            self.give(copy);
            return None;
        }
        copy.bytes_mut().copy_from_slice(bytes);
        copy.mark = mark;
        Some(copy)
    }

    /// Returns the worker that the packet belongs to.
    #[inline]
    fn home(&self, packet: &PacketBuffer) -> usize {
        if self.homes.len() == 1 { self.me } else { packet.number() / self.share }
    }

    /// Gives a packet back to its home.
    #[inline]
    pub fn give(&mut self, packet: PacketBuffer) {
        let home = self.home(&packet);
        match self.homes.get_mut(home).and_then(Option::as_mut) {
            None => self.free.push(packet),
            Some(ring) => {
                let pushed = ring.push(packet);
                debug_assert!(pushed.is_ok(), "the ring has room for all packets of its home");
            }
        }
    }

    /// Gives all packets back to their homes.
    pub fn give_all(&mut self, packets: &mut PacketBatch) {
        if self.homes.len() == 1 {
            self.free.append(packets);
        } else {
            packets.drain(..).for_each(|packet| self.give(packet));
        }
    }

    /// Gives back packets that an AF_XDP socket has sent.
    /// [`SENT_PACKETS`] of them, at most, are the next to be taken.
    pub fn give_sent(&mut self, packets: &mut PacketBatch) {
        for packet in packets.drain(..) {
            if self.sent.len() < SENT_PACKETS && self.home(&packet) == self.me {
                self.sent.push(packet);
            } else {
                self.give(packet);
            }
        }
    }

    /// Collects packets that came home.
    pub fn collect(&mut self) {
        for ring in self.returned.iter_mut().flatten() {
            while let Ok(packet) = ring.pop() {
                self.free.push(packet);
            }
        }
    }

    /// Returns the free packets, to receive frames in, and how many of them the caller
    /// must leave. At least `keep` packets then stay free beside the reserved ones.
    pub fn free_mut(&mut self, keep: usize) -> (&mut Vec<PacketBuffer>, usize) {
        let keep = keep + self.aside();
        (&mut self.free, keep.saturating_sub(self.sent.len()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_return_to_their_worker() {
        let (_pool, mut parts) = Packets::pool(3, 4).unwrap();
        let mut away: Vec<_> =
            parts.iter_mut().flat_map(|part| [part.take(), part.take()]).collect();
        assert!(parts.iter().all(|part| part.free() == 2));
        for packet in away.drain(..).flatten() {
            parts[1].give(packet);
        }
        parts.iter_mut().for_each(Packets::collect);
        for (me, part) in parts.iter().enumerate() {
            assert_eq!(part.free(), 4);
            assert!(part.free.iter().all(|packet| packet.number() / 4 == me));
        }
    }

    #[test]
    fn reserved_packets_are_at_most_half_the_pool() {
        let (_pool, mut parts) = Packets::pool(1, 16).unwrap();
        let part = &mut parts[0];
        part.reserve(0, 5);
        assert_eq!((part.free(), part.at_hand(), part.free_mut(3).1), (11, 16, 8));
        part.reserve(2, 0);
        assert_eq!(part.free(), 13);
        part.reserve(0, 100);
        assert_eq!((part.free(), part.at_hand()), (8, 16));
        let taken: Vec<_> = (0..10).filter_map(|_| part.take()).collect();
        assert_eq!((part.free(), part.at_hand(), taken.len()), (0, 6, 10));
    }

    #[test]
    fn pool_reuses_the_most_recently_sent_packets() {
        let (_pool, mut parts) = Packets::pool(2, 2 * SENT_PACKETS).unwrap();
        let mut others: Vec<_> = parts[1].take().into_iter().collect();
        let part = &mut parts[0];
        let mut sent: Vec<_> = std::iter::from_fn(|| part.take()).take(SENT_PACKETS + 1).collect();
        let last = sent[SENT_PACKETS - 1].number();
        part.give_sent(&mut others);
        part.give_sent(&mut sent);
        assert_eq!((part.free(), part.sent.len()), (2 * SENT_PACKETS, SENT_PACKETS));
        let (free, keep) = part.free_mut(SENT_PACKETS + 5);
        assert_eq!((free.len(), keep), (SENT_PACKETS, 5), "no more than all that is kept");
        assert_eq!(part.take().map(|packet| packet.number()), Some(last));
        assert_eq!(std::iter::from_fn(|| part.take()).count(), 2 * SENT_PACKETS - 1);
        parts[1].collect();
        assert_eq!(parts[1].free(), 2 * SENT_PACKETS, "at home");
    }
}
