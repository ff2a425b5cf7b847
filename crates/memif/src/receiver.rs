//! Frames from a client that is not trusted.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;

use crate::fault::{Fault, ahead, checked, whole};
use crate::idle::{self, MASKED};
use crate::ring::{Descriptor, NEXT, Ring};
use crate::{CHAIN_SLOTS_MAX, bell};

/// Frames from a client.
///
/// `peek`, then `frame_len` and `copy_out` as often as wanted, then `release`.
#[derive(Debug)]
pub struct Receiver {
    ring: Ring,
    bell: OwnedFd,
    /// Index of the first slot not released.
    released: u16,
    /// Index of the first slot not looked at.
    peeked: u16,
    /// Frames looked at and not released.
    frames: Vec<Frame>,
    /// Their buffers, as they were when looked at.
    pieces: Vec<Descriptor>,
}

/// A frame: some of the pieces.
#[derive(Clone, Copy, Debug)]
struct Frame {
    first: u32,
    count: u32,
    bytes: usize,
}

impl Receiver {
    pub(crate) fn new(ring: Ring, bell: OwnedFd) -> Self {
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
            let count = self.peek_frame(left)?;
            left -= count;
            self.peeked = self.peeked.wrapping_add(count);
        }
        Ok(self.frames.len().min(max))
    }

    /// Looks at the next frame, which may take up to `left` slots; returns how many it takes.
    #[inline]
    fn peek_frame(&mut self, left: u16) -> Result<u16, Fault> {
        let first = self.pieces.len() as u32;
        let mut bytes = 0;
        let mut count = 0;
        loop {
            if count == left || usize::from(count) == CHAIN_SLOTS_MAX {
                return Err(Fault::Chain { slots: count.into() });
            }
            let piece = checked(&self.ring, self.peeked.wrapping_add(count))?;
            self.pieces.push(piece);
            bytes += piece.length as usize;
            count += 1;
            if piece.flags & NEXT == 0 {
                self.frames.push(Frame { first, count: count.into(), bytes });
                return Ok(count);
            }
        }
    }

    fn pieces(&self, frame: Frame) -> &[Descriptor] {
        &self.pieces[frame.first as usize..(frame.first + frame.count) as usize]
    }

    /// Bytes of a frame that `peek` found. Panics if `frame` is not below its result.
    pub fn frame_len(&self, frame: usize) -> usize {
        self.frames[frame].bytes
    }

    /// Copies from byte `from` of a frame that `peek` found; returns how many bytes there were,
    /// at most `to.len()`. The client may change the bytes between two copies: copy once, then
    /// decide. Panics if `frame` is not below the result of `peek`.
    pub fn copy_out(&self, frame: usize, from: usize, to: &mut [u8]) -> usize {
        let mut skip = from;
        let mut done = 0;
        for piece in self.pieces(self.frames[frame]) {
            let length = piece.length as usize;
            if skip >= length {
                skip -= length;
                continue;
            }
            let count = (length - skip).min(to.len() - done);
            let region = &self.ring.regions()[usize::from(piece.region)];
            region.read(piece.offset as usize + skip, &mut to[done..done + count]);
            done += count;
            skip = 0;
            if done == to.len() {
                break;
            }
        }
        done
    }

    /// Gives the oldest `frames` frames that `peek` found (or all, if there are fewer) back to
    /// the client, in one store. The numbers of the others go down by as many.
    pub fn release(&mut self, frames: usize) {
        let gone = self.frames.drain(..frames.min(self.frames.len()));
        let slots: u32 = gone.map(|frame| frame.count).sum();
        if slots == 0 {
            return;
        }
        self.pieces.drain(..slots as usize);
        for frame in &mut self.frames {
            frame.first -= slots;
        }
        // At most the ring's slots, which a u16 holds.
        self.released = self.released.wrapping_add(slots as u16);
        self.ring.tail().store(self.released, Ordering::Release);
    }

    /// Lets the client ring. True if there is nothing to receive, so that polling the descriptor
    /// is safe; false if there is (the doorbell is off again then).
    pub fn arm(&mut self) -> bool {
        idle::arm(self.ring.head(), self.released, self.ring.flags())
    }

    /// Stops the client from ringing and empties the doorbell.
    pub fn disarm(&mut self) {
        self.ring.flags().store(MASKED, Ordering::Relaxed);
        bell::drain(self.bell.as_fd());
    }
}

impl AsFd for Receiver {
    /// The doorbell: an eventfd, readable when the client rang. It stays readable until
    /// [`Receiver::disarm`].
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }
}
