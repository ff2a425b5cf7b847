//! Frames from a client that is not trusted.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::Ordering;

use crate::fault::{Fault, ahead, checked, whole};
use crate::idle::{self, MASKED};
use crate::ring::{Descriptor, NEXT, Ring};
use crate::{Bell, CHAIN_SLOTS_MAX};

/// Frames from a client.
///
/// `peek`, then `frame_len` and `copy_out` as often as wanted, then `release`.
#[derive(Debug)]
pub struct Receiver {
    ring: Ring,
    bell: Bell,
    /// Index of the first slot not released.
    released: u16,
    /// Index of the first slot not looked at.
    peeked: u16,
    /// Frames looked at and not released.
    frames: Vec<Frame>,
    /// The buffers of those that have several, as they were when looked at.
    pieces: Vec<Descriptor>,
}

/// A frame, as it was when looked at.
#[derive(Clone, Copy, Debug)]
struct Frame {
    /// Its first buffer, which is the only one unless it has the flag [`NEXT`].
    first: Descriptor,
    /// Its other buffers among the pieces.
    others: (u32, u32),
    bytes: usize,
}

impl Receiver {
    pub(crate) fn new(ring: Ring, bell: Bell) -> Self {
        ring.tail().store(0, Ordering::Relaxed);
        ring.flags().store(MASKED, Ordering::Relaxed);
        let slots = usize::from(ring.slots());
        Self {
            ring,
            bell,
            released: 0,
            peeked: 0,
            frames: Vec::with_capacity(slots),
            pieces: Vec::with_capacity(slots),
        }
    }

    /// Looks at up to `max` frames beyond those released: each descriptor is read once, checked
    /// and kept, so that what the client writes afterwards changes the bytes of a frame at most,
    /// never its bounds. Returns how many frames there are, 0 for none.
    pub fn peek(&mut self, max: usize) -> Result<usize, Fault> {
        whole(self.ring.regions())?;
        let head = self.ring.head().load(Ordering::Acquire);
        ahead(head, self.released, self.ring.slots())?;
        let mut left = ahead(head, self.peeked, self.ring.slots())?;
        while left > 0 && self.frames.len() < max {
            let first = checked(&self.ring, self.peeked)?;
            self.ring.regions()[usize::from(first.region)].prefetch(first.offset as usize);
            let mut frame = Frame { first, others: (0, 0), bytes: first.length as usize };
            if first.flags & NEXT != 0 {
                self.peek_others(&mut frame, left)?;
            }
            let count = 1 + frame.others.1 as u16;
            self.frames.push(frame);
            left -= count;
            self.peeked = self.peeked.wrapping_add(count);
        }
        Ok(self.frames.len().min(max))
    }

    /// Looks at the buffers after the first of a frame, which may take up to `left` slots.
    #[cold]
    fn peek_others(&mut self, frame: &mut Frame, left: u16) -> Result<(), Fault> {
        let before = self.pieces.len();
        let mut more = true;
        while more {
            let slots = 1 + self.pieces.len() - before;
            if slots == usize::from(left) || slots == CHAIN_SLOTS_MAX {
                self.pieces.truncate(before);
                return Err(Fault::Chain { slots });
            }
            let piece = checked(&self.ring, self.peeked.wrapping_add(slots as u16));
            let piece = piece.inspect_err(|_| self.pieces.truncate(before))?;
            self.pieces.push(piece);
            frame.bytes += piece.length as usize;
            more = piece.flags & NEXT != 0;
        }
        frame.others = (before as u32, (self.pieces.len() - before) as u32);
        Ok(())
    }

    /// Bytes of a frame that `peek` found. Panics if `frame` is not below its result.
    #[inline]
    pub fn frame_len(&self, frame: usize) -> usize {
        self.frames[frame].bytes
    }

    /// The client's word about a frame that `peek` found. Panics if `frame` is not below its
    /// result.
    #[inline]
    pub fn metadata(&self, frame: usize) -> u32 {
        self.frames[frame].first.metadata
    }

    /// Copies a frame that `peek` found; returns how many bytes there were, at most `to.len()`.
    /// The client may change the bytes between two copies: copy once, then decide. Panics if
    /// `frame` is not below the result of `peek`.
    #[inline]
    pub fn copy_out(&self, frame: usize, to: &mut [u8]) -> usize {
        let frame = &self.frames[frame];
        let mut done = self.copy_piece(&frame.first, to);
        let (first, count) = frame.others;
        for piece in &self.pieces[first as usize..(first + count) as usize] {
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

    /// Gives the oldest `frames` frames that `peek` found (or all, if there are fewer) back to
    /// the client, in one store. The numbers of the others go down by as many. True if the client's
    /// ring was full: it may wait for this room ([`crate::Sender::wake`]).
    pub fn release(&mut self, frames: usize) -> bool {
        let gone = self.frames.drain(..frames.min(self.frames.len()));
        let (slots, pieces) = gone.fold((0, 0), |(slots, pieces), frame| {
            (slots + 1 + frame.others.1, pieces + frame.others.1)
        });
        if slots == 0 {
            return false;
        }
        if pieces > 0 {
            self.pieces.drain(..pieces as usize);
            for frame in self.frames.iter_mut().filter(|frame| frame.others.1 > 0) {
                frame.others.0 -= pieces;
            }
        }
        let before = self.released;
        // At most the ring's slots, which a u16 holds.
        self.released = before.wrapping_add(slots as u16);
        let head = idle::move_on(self.ring.tail(), self.released, self.ring.head());
        head.wrapping_sub(before) >= self.ring.slots()
    }

    /// Whether what the client has sent and was not released fills no more than half of the ring.
    pub fn is_half_empty(&self) -> bool {
        let head = self.ring.head().load(Ordering::Relaxed);
        head.wrapping_sub(self.released) <= self.ring.slots() / 2
    }

    /// Lets the client ring. True if there is nothing to receive, so that polling the descriptor
    /// is safe; false if there is (the doorbell is off again then).
    pub fn arm(&mut self) -> bool {
        idle::arm(self.ring.head(), self.released, self.ring.flags())
    }

    /// Stops the client from ringing. What it rang stays in the doorbell.
    pub fn disarm(&mut self) {
        idle::disarm(self.ring.flags());
    }
}

impl AsFd for Receiver {
    /// The doorbell: an eventfd, to be watched edge-triggered: each ring is an event, and nobody
    /// empties it.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }
}
