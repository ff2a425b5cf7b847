//! Frames to a client that is not trusted.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;

use crate::fault::{Fault, ahead, checked, whole};
use crate::ring::{Descriptor, NEXT, Ring};
use crate::{CHAIN_SLOTS_MAX, bell, idle};

/// Frames to a client.
#[derive(Debug)]
pub struct Sender {
    ring: Ring,
    bell: OwnedFd,
    /// The client's index when last looked at.
    head: u16,
    /// Index of the first slot not filled.
    filled: u16,
    /// Index of the first slot not shown.
    shown: u16,
    /// Slots shown, and no more than the ring has.
    ever_shown: u16,
    /// By slot: whether a frame ends there.
    ends: Vec<bool>,
}

impl Sender {
    pub(crate) fn new(ring: Ring, bell: OwnedFd) -> Self {
        ring.tail().store(0, Ordering::Relaxed);
        let ends = vec![false; usize::from(ring.slots())];
        Self { ring, bell, head: 0, filled: 0, shown: 0, ever_shown: 0, ends }
    }

    /// Buffers that the client has posted and that are not filled yet. A frame takes one, or
    /// several if it is longer than the client's buffers.
    pub fn room(&mut self) -> Result<usize, Fault> {
        let head = self.ring.head().load(Ordering::Acquire);
        let room = ahead(head, self.filled, self.ring.slots())?;
        self.head = head;
        Ok(room.into())
    }

    /// Puts a frame, gathered from `parts`, into the ring; the client sees it after
    /// [`Self::flush`]. False (and nothing done) if there is no room.
    pub fn push(&mut self, parts: &[&[u8]]) -> Result<bool, Fault> {
        if self.head == self.filled && self.room()? == 0 {
            return Ok(false);
        }
        let bytes = parts.iter().map(|part| part.len()).sum();
        let buffer = checked(&self.ring, self.filled)?;
        if bytes > buffer.length as usize {
            return self.push_chain(parts, bytes, buffer);
        }
        let region = &self.ring.regions()[usize::from(buffer.region)];
        let mut at = buffer.offset as usize;
        for part in parts {
            region.write(at, part);
            at += part.len();
        }
        self.fill(buffer, bytes, 0);
        Ok(true)
    }

    /// Says that `bytes` were written to the next buffer, and moves on.
    #[inline]
    fn fill(&mut self, buffer: Descriptor, bytes: usize, flags: u16) {
        // No more than the buffer's length, which is a u32.
        let written = Descriptor { flags, length: bytes as u32, ..buffer };
        self.ring.set_descriptor(self.filled, written);
        let slot = self.ring.slot(self.filled);
        self.ends[slot] = flags & NEXT == 0;
        self.filled = self.filled.wrapping_add(1);
    }

    /// A frame longer than its first buffer.
    fn push_chain(
        &mut self,
        parts: &[&[u8]],
        bytes: usize,
        first: Descriptor,
    ) -> Result<bool, Fault> {
        let room = self.room()?;
        let slots_max = CHAIN_SLOTS_MAX.min(self.ring.slots().into());
        let mut buffers = [first; CHAIN_SLOTS_MAX];
        let mut count = 1;
        let mut capacity = first.length as usize;
        while capacity < bytes {
            if count == slots_max {
                return Err(Fault::Chain { slots: count });
            }
            if count == room {
                return Ok(false);
            }
            let buffer = checked(&self.ring, self.filled.wrapping_add(count as u16))?;
            buffers[count] = buffer;
            capacity += buffer.length as usize;
            count += 1;
        }
        let mut parts = parts.iter();
        let mut part: &[u8] = &[];
        for (number, &buffer) in buffers[..count].iter().enumerate() {
            let region = &self.ring.regions()[usize::from(buffer.region)];
            let mut done = 0;
            while done < buffer.length as usize {
                if part.is_empty() {
                    let Some(next) = parts.next() else { break };
                    part = next;
                }
                let (piece, rest) = part.split_at(part.len().min(buffer.length as usize - done));
                region.write(buffer.offset as usize + done, piece);
                done += piece.len();
                part = rest;
            }
            self.fill(buffer, done, if number + 1 < count { NEXT } else { 0 });
        }
        Ok(true)
    }

    /// Shows the client what was pushed, and rings if it wants that. The only system call here,
    /// and none while the client is busy.
    pub fn flush(&mut self) -> Result<(), Fault> {
        if self.shown == self.filled {
            return Ok(());
        }
        whole(self.ring.regions())?;
        let fresh = self.filled.wrapping_sub(self.shown);
        self.ever_shown = self.ever_shown.saturating_add(fresh).min(self.ring.slots());
        self.shown = self.filled;
        if idle::publish(self.ring.tail(), self.filled, self.ring.flags()) {
            bell::ring_of_peer(self.bell.as_fd()).map_err(|_| Fault::Bell)?;
        }
        Ok(())
    }

    /// Frames shown whose buffers the client has not posted anew: not taken yet, or taken a
    /// moment ago. When the client dies, at most these are lost with it.
    pub fn untaken(&self) -> usize {
        let head = self.ring.head().load(Ordering::Acquire);
        let slots = self.ring.slots();
        let posted = head.wrapping_sub(self.shown).min(slots);
        let kept = (slots - posted).min(self.ever_shown);
        (1..=kept).filter(|&back| self.ends[self.ring.slot(self.shown.wrapping_sub(back))]).count()
    }
}
