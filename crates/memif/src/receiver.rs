//! Frames from an untrusted client.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::Ordering;

use crate::fault::{ProtocolViolation, ahead, checked, whole};
use crate::idle::{self, MASKED};
use crate::ring::{Descriptor, NEXT, Ring};
use crate::{Bell, CHAIN_SLOTS_MAX};

/// Number of frames that the cache fetches ahead of the taken one.
const PREFETCH_SLOTS: u16 = 16;

/// Frames from a client.
///
/// `look`, then `take` one after the other, then `release`.
#[derive(Debug)]
pub struct Receiver {
    ring: Ring,
    bell: Bell,
    /// The client's index at the last look.
    head: u16,
    /// Index of the first slot not taken.
    taken: u16,
    /// Index of the first slot not released.
    released: u16,
    /// True if the client's ring was full, so that the client may wait for free slots.
    full: bool,
    /// Buffers of a frame after its first.
    others: Vec<Descriptor>,
}

/// Frame with the bounds it had when taken. Later writes of
/// the client may change its bytes, but never its bounds.
#[derive(Clone, Copy, Debug)]
pub struct RingFrame<'a> {
    ring: &'a Ring,
    first: Descriptor,
    others: &'a [Descriptor],
}

impl RingFrame<'_> {
    /// The client's metadata for the frame.
    #[inline]
    pub fn metadata(&self) -> u32 {
        self.first.metadata
    }

    /// Length in bytes.
    #[allow(clippy::len_without_is_empty)]
    #[inline]
    pub fn len(&self) -> usize {
        let others = self.others.iter().map(|piece| piece.length as usize);
        self.first.length as usize + others.sum::<usize>()
    }

    /// Copies the frame and returns the number of bytes copied, at most `to.len()`. The client may
    /// change the bytes between two copies: copy once, then decide.
    #[inline]
    pub fn copy_to(&self, to: &mut [u8]) -> usize {
        let mut done = self.copy_piece(&self.first, to);
        for piece in self.others {
            done += self.copy_piece(piece, &mut to[done..]);
        }
        done
    }

    #[inline]
    fn copy_piece(&self, piece: &Descriptor, to: &mut [u8]) -> usize {
        let count = to.len().min(piece.length as usize);
        let region = &self.ring.regions()[usize::from(piece.region)];
        region.read(piece.offset as usize, &mut to[..count]);
        count
    }
}

impl Receiver {
    pub(crate) fn new(ring: Ring, bell: Bell) -> Self {
        ring.tail().store(0, Ordering::Relaxed);
        ring.flags().store(MASKED, Ordering::Relaxed);
        let (head, taken, released, full) = Default::default();
        Self { ring, bell, head, taken, released, full, others: vec![] }
    }

    /// Looks for new frames. True if there is anything to take.
    pub fn poll(&mut self) -> Result<bool, ProtocolViolation> {
        whole(self.ring.regions())?;
        let head = self.ring.head().load(Ordering::Acquire);
        ahead(head, self.released, self.ring.slots())?;
        ahead(head, self.taken, self.ring.slots())?;
        self.head = head;
        (0..PREFETCH_SLOTS).for_each(|ahead| self.prefetch(self.taken.wrapping_add(ahead)));
        Ok(self.has_more())
    }

    /// True if the last look found more frames than were taken since.
    #[inline]
    pub fn has_more(&self) -> bool {
        self.taken != self.head
    }

    /// Takes the oldest frame that the last look found. Each
    /// of its descriptors is read once, checked and kept.
    #[inline]
    pub fn take(&mut self) -> Result<Option<RingFrame<'_>>, ProtocolViolation> {
        if !self.has_more() {
            return Ok(None);
        }
        self.prefetch(self.taken.wrapping_add(PREFETCH_SLOTS));
        let first = checked(&self.ring, self.taken)?;
        self.others.clear();
        if first.flags & NEXT != 0 {
            self.read_others()?;
        }
        self.taken = self.taken.wrapping_add(1 + self.others.len() as u16);
        Ok(Some(RingFrame { ring: &self.ring, first, others: &self.others }))
    }

    /// Reads a frame's descriptors after the first.
    #[cold]
    fn read_others(&mut self) -> Result<(), ProtocolViolation> {
        let left = usize::from(self.head.wrapping_sub(self.taken));
        let mut more = true;
        while more {
            let slots = 1 + self.others.len();
            if slots == left || slots == CHAIN_SLOTS_MAX {
                return Err(ProtocolViolation::Chain { slots });
            }
            let piece = checked(&self.ring, self.taken.wrapping_add(slots as u16))?;
            more = piece.flags & NEXT != 0;
            self.others.push(piece);
        }
        Ok(())
    }

    /// Prefetches the frame at `index`, if there is one.
    #[inline]
    fn prefetch(&self, index: u16) {
        if (self.head.wrapping_sub(index) as i16) > 0 {
            let Descriptor { region, offset, .. } = self.ring.descriptor(index);
            if let Some(region) = self.ring.regions().get(usize::from(region)) {
                region.prefetch(offset as usize);
            }
        }
    }

    /// Gives all taken slots back to the client, in one store.
    pub fn release(&mut self) {
        if self.released == self.taken {
            return;
        }
        let before = std::mem::replace(&mut self.released, self.taken);
        let head = idle::move_on(self.ring.tail(), self.released, self.ring.head());
        self.full |= head.wrapping_sub(before) >= self.ring.slots();
    }

    /// True if the client's ring was full, so that the client may wait for free slots
    /// ([`crate::Sender::wake`]), and half of it is empty now. Returns true once.
    pub fn awaits_room(&mut self) -> bool {
        let room = self.full && {
            let head = self.ring.head().load(Ordering::Relaxed);
            head.wrapping_sub(self.released) <= self.ring.slots() / 2
        };
        self.full &= !room;
        room
    }

    /// Lets the client ring. True if there is nothing to receive, so that polling the descriptor is
    /// safe. False if there is; the doorbell is off again then.
    pub fn arm(&mut self) -> bool {
        idle::arm(self.ring.head(), self.released, self.ring.flags())
    }

    /// Stops the client from ringing. Earlier rings stay in the doorbell.
    pub fn disarm(&mut self) {
        idle::disarm(self.ring.flags());
    }
}

impl AsFd for Receiver {
    /// Doorbell: an eventfd, to be watched edge-triggered. Each
    /// ring is an event, and the server never empties it.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }
}
