//! A worker's part of the packet pool.
//!
//! Every packet has a home, the worker whose part it is of. One that ends at another worker goes
//! home by a ring that has room for all packets of that home, so that it is never full.

use pdp_afxdp::{Packet, Pool};
use pdp_proto::limits::BUFFERS_PART;
use rtrb::{Consumer, Producer, RingBuffer};

/// Frames as they are passed from stage to stage, and to and from exits. Each carries its length, its port
/// and its mark. A stage takes out what it takes; what it leaves there it has no room for, or others take.
pub type Batch = Vec<Packet>;

/// Packets that are kept to send frames in again.
pub const SENT_PACKETS: usize = 512;

/// Free packets of a worker, and the rings by which packets go home.
#[derive(Debug)]
pub struct Packets {
    me: usize,
    share: usize,
    free: Vec<Packet>,
    /// Free ones whose frames an AF_XDP socket has sent, taken before others: those that frames arrive in
    /// stay apart from those that they leave in, and each is in the caches of whose CPU writes it.
    sent: Vec<Packet>,
    /// How many of them are kept for queues that have them set aside.
    aside: usize,
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

    /// Packets of this worker, wherever they are.
    pub fn share(&self) -> usize {
        self.share
    }

    /// Packets that can be taken now, by whoever gives them back in the same round.
    #[inline]
    pub fn at_hand(&self) -> usize {
        self.free.len() + self.sent.len()
    }

    /// Packets of these that nobody has set aside: by them it is said what may wait.
    #[inline]
    pub fn free(&self) -> usize {
        self.at_hand().saturating_sub(self.aside())
    }

    /// Whatever is asked for, others have their part.
    #[inline]
    fn aside(&self) -> usize {
        self.aside.min(self.share / BUFFERS_PART as usize)
    }

    /// Of those that are set aside so many more are not in use now, in place of `before`.
    #[inline]
    pub fn set_aside(&mut self, before: usize, now: usize) {
        self.aside = self.aside - before + now;
    }

    /// Takes an empty one.
    #[inline]
    pub fn take(&mut self) -> Option<Packet> {
        let mut packet = self.sent.pop().or_else(|| self.free.pop())?;
        packet.reset();
        Some(packet)
    }

    /// Takes one with these bytes.
    pub fn copy_of(&mut self, bytes: &[u8], mark: u32) -> Option<Packet> {
        let mut copy = self.take()?;
        if copy.set_len(bytes.len()).is_none() {
            self.give(copy);
            return None;
        }
        copy.bytes_mut().copy_from_slice(bytes);
        copy.mark = mark;
        Some(copy)
    }

    /// The worker whose part it is of.
    #[inline]
    fn home(&self, packet: &Packet) -> usize {
        if self.homes.len() == 1 { self.me } else { packet.number() / self.share }
    }

    /// Gives one back, to its home.
    #[inline]
    pub fn give(&mut self, packet: Packet) {
        let home = self.home(&packet);
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

    /// Gives those back that an AF_XDP socket has sent. [`SENT_PACKETS`] at most are the next to be taken.
    pub fn give_sent(&mut self, packets: &mut Batch) {
        for packet in packets.drain(..) {
            if self.sent.len() < SENT_PACKETS && self.home(&packet) == self.me {
                self.sent.push(packet);
            } else {
                self.give(packet);
            }
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

    /// The free ones, to receive frames in, and how many of them are to be left if `keep` are to be of all that nobody has
    /// set aside.
    pub fn free_mut(&mut self, keep: usize) -> (&mut Vec<Packet>, usize) {
        let keep = keep + self.aside();
        (&mut self.free, keep.saturating_sub(self.sent.len()))
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

    #[test]
    fn what_is_set_aside_is_not_free_and_half_of_all_at_most() {
        let (_pool, mut parts) = Packets::pool(1, 16).unwrap();
        let part = &mut parts[0];
        part.set_aside(0, 5);
        assert_eq!((part.free(), part.at_hand(), part.free_mut(3).1), (11, 16, 8));
        part.set_aside(2, 0);
        assert_eq!(part.free(), 13);
        part.set_aside(0, 100);
        assert_eq!((part.free(), part.at_hand()), (8, 16));
        let taken: Vec<_> = (0..10).filter_map(|_| part.take()).collect();
        assert_eq!((part.free(), part.at_hand(), taken.len()), (0, 6, 10));
    }

    #[test]
    fn frames_leave_in_what_was_sent_last_and_sockets_have_the_rest() {
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
