//! A worker's part of the packet pool.
//!
//! Every packet has a home, the worker whose part it is of. One that ends at another worker goes
//! home by a ring that has room for all packets of that home, so that it is never full.

use pdp_afxdp::{Packet, Pool};
use rtrb::{Consumer, Producer, RingBuffer};

/// Frames as they are passed from stage to stage, and to and from exits. Each carries its length, its port
/// and its mark. A stage takes out what it takes; what it leaves there it has no room for, or others take.
pub type Batch = Vec<Packet>;

/// Free packets of a worker, and the rings by which packets go home.
#[derive(Debug)]
pub struct Packets {
    me: usize,
    share: usize,
    free: Vec<Packet>,
    /// To each worker; `None` to this one.
    homes: Vec<Option<Producer<Packet>>>,
    /// From each worker.
    returned: Vec<Option<Consumer<Packet>>>,
}

impl Packets {
    /// Makes a pool of `workers` parts of `share` packets each.
    pub fn pool(workers: usize, share: usize) -> Result<(Pool, Vec<Self>), pdp_afxdp::Error> {
        let (pool, mut all) = Pool::new(workers * share)?;
        let mut parts: Vec<Self> = (0..workers)
            .map(|me| {
                let homes = (0..workers).map(|_| None).collect();
                let returned = (0..workers).map(|_| None).collect();
                let free = all.drain(..share).rev().collect();
                Self { me, share, free, homes, returned }
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

    /// Packets of this worker, wherever they are.
    pub fn share(&self) -> usize {
        self.share
    }

    /// Packets that can be taken now.
    #[inline]
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// Takes an empty one.
    #[inline]
    pub fn take(&mut self) -> Option<Packet> {
        let mut packet = self.free.pop()?;
        packet.reset();
        Some(packet)
    }

    /// Gives one back, to its home.
    #[inline]
    pub fn give(&mut self, packet: Packet) {
        let home = if self.homes.len() == 1 { self.me } else { packet.number() / self.share };
        match self.homes.get_mut(home).and_then(Option::as_mut) {
            None => self.free.push(packet),
            Some(ring) => {
                let pushed = ring.push(packet);
                debug_assert!(pushed.is_ok(), "the ring has room for all packets of its home");
            }
        }
    }

    /// Gives all of them back.
    pub fn give_all(&mut self, packets: &mut Batch) {
        if self.homes.len() == 1 {
            self.free.append(packets);
        } else {
            packets.drain(..).for_each(|packet| self.give(packet));
        }
    }

    /// Takes in what came home.
    pub fn collect(&mut self) {
        for ring in self.returned.iter_mut().flatten() {
            while let Ok(packet) = ring.pop() {
                self.free.push(packet);
            }
        }
    }

    /// The free ones, to fill a socket from.
    pub fn free_mut(&mut self) -> &mut Vec<Packet> {
        &mut self.free
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_go_home() {
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
}
