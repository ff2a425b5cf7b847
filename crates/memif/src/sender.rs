//! Frames to an untrusted client.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::fault::{ProtocolViolation, ahead, checked, whole};
use crate::ring::{Descriptor, NEXT, Ring};
use crate::{Bell, CHAIN_SLOTS_MAX, idle};

/// Frames to a client.
#[derive(Debug)]
pub struct Sender {
    ring: Ring,
    bell: Arc<Bell>,
    /// The client's index at the last look.
    head: u16,
    /// Index of the first slot not filled.
    filled: u16,
    /// Index of the first slot not published.
    shown: u16,
    /// Index of the first slot that a sleeping client may have missed.
    woken: u16,
    /// True if the client arms its doorbell anew before each sleep.
    rearms: bool,
}

/// Number of buffers that the cache fetches ahead of the one being filled.
const PREFETCH_SLOTS: u16 = 16;

impl Sender {
    pub(crate) fn new(ring: Ring, bell: Bell) -> Self {
        ring.tail().store(0, Ordering::Relaxed);
        let bell = Arc::new(bell);
        Self { ring, bell, head: 0, filled: 0, shown: 0, woken: 0, rearms: false }
    }

    /// Rings the client once per sleep from now on. For clients that arm their doorbell anew before
    /// each sleep: [`crate::MemifClient`] does, but memif does not require it.
    pub fn ring_once_a_sleep(&mut self) {
        self.rearms = true;
    }

    /// Buffers that the client has posted and that are not filled yet. A frame takes one, or
    /// several if it is longer than the client's buffers.
    pub fn room(&mut self) -> Result<usize, ProtocolViolation> {
        let head = self.ring.head().load(Ordering::Acquire);
        let room = ahead(head, self.filled, self.ring.slots())?;
        // The client must not take posted buffers back: this side relies on them.
        ahead(head, self.head, self.ring.slots())?;
        let exhausted = self.head == self.filled;
        self.head = head;
        if exhausted {
            (0..PREFETCH_SLOTS).for_each(|ahead| self.prefetch(self.filled.wrapping_add(ahead)));
        }
        Ok(room.into())
    }

    /// Copies a frame and its metadata into the client's memory. The client sees both after
    /// [`Self::flush`]. False (and no change) if there are not enough buffers.
    #[inline]
    pub fn push(&mut self, metadata: u32, frame: &[u8]) -> Result<bool, ProtocolViolation> {
        if self.head == self.filled && self.room()? == 0 {
            return Ok(false);
        }
        self.prefetch(self.filled.wrapping_add(PREFETCH_SLOTS));
        let buffer = checked(&self.ring, self.filled)?;
        if frame.len() > buffer.length as usize {
            return self.push_chain(metadata, frame, buffer);
        }
        let region = &self.ring.regions()[usize::from(buffer.region)];
        region.write(buffer.offset as usize, frame);
        self.fill(buffer, frame.len(), 0, metadata);
        Ok(true)
    }

    /// Prefetches the buffer at `index`, if the client has posted one there.
    #[inline]
    fn prefetch(&self, index: u16) {
        if (self.head.wrapping_sub(index) as i16) > 0 {
            let Descriptor { region, offset, .. } = self.ring.descriptor(index);
            if let Some(region) = self.ring.regions().get(usize::from(region)) {
                region.prefetch_to_write(offset as usize);
            }
        }
    }

    /// Records that `bytes` were written to the next buffer, and advances.
    #[inline]
    fn fill(&mut self, buffer: Descriptor, bytes: usize, flags: u16, metadata: u32) {
        // At most the buffer's length, which is a u32.
        let written = Descriptor { flags, length: bytes as u32, metadata, ..buffer };
        self.ring.set_descriptor(self.filled, written);
        self.filled = self.filled.wrapping_add(1);
    }

    /// Pushes a frame longer than its first buffer.
    #[cold]
    fn push_chain(
        &mut self,
        metadata: u32,
        frame: &[u8],
        first: Descriptor,
    ) -> Result<bool, ProtocolViolation> {
        let room = self.room()?;
        let slots_max = CHAIN_SLOTS_MAX.min(self.ring.slots().into());
        let mut buffers = [first; CHAIN_SLOTS_MAX];
        let mut count = 1;
        let mut capacity = first.length as usize;
        while capacity < frame.len() {
            if count == slots_max {
                return Err(ProtocolViolation::Chain { slots: count });
            }
            if count >= room {
                return Ok(false);
            }
            let buffer = checked(&self.ring, self.filled.wrapping_add(count as u16))?;
            buffers[count] = buffer;
            capacity += buffer.length as usize;
            count += 1;
        }
        let mut rest = frame;
        for (number, &buffer) in buffers[..count].iter().enumerate() {
            let region = &self.ring.regions()[usize::from(buffer.region)];
            let (piece, after) = rest.split_at(rest.len().min(buffer.length as usize));
            region.write(buffer.offset as usize, piece);
            rest = after;
            let flags = if number + 1 < count { NEXT } else { 0 };
            self.fill(buffer, piece.len(), flags, if number == 0 { metadata } else { 0 });
        }
        Ok(true)
    }

    /// Calls [`Self::publish`], and [`Self::wake`] if needed.
    pub fn flush(&mut self) -> Result<(), ProtocolViolation> {
        self.publish()?;
        if self.unnotified() > 0 { self.wake() } else { Ok(()) }
    }

    /// Publishes the pushed frames to the client, without waking it.
    pub fn publish(&mut self) -> Result<(), ProtocolViolation> {
        if self.shown == self.filled {
            return Ok(());
        }
        whole(self.ring.regions())?;
        self.shown = self.filled;
        self.ring.tail().store(self.filled, Ordering::Release);
        Ok(())
    }

    /// Slots of the ring.
    pub fn slots(&self) -> u16 {
        self.ring.slots()
    }

    /// Slots published since the last [`Self::wake`]. A sleeping client does not know of them.
    pub fn unnotified(&self) -> u16 {
        self.shown.wrapping_sub(self.woken)
    }

    /// Rings if the client sleeps: for published frames, or for free slots in its own ring
    /// ([`crate::Receiver::awaits_room`]; memif itself has no doorbell for that). This is the only
    /// system call here, and only happens while the client sleeps.
    pub fn wake(&mut self) -> Result<(), ProtocolViolation> {
        self.sleeper()?.map_or(Ok(()), |bell| bell.ring())
    }

    /// Like [`Self::wake`], for callers that let another thread ring. Returns the doorbell to ring,
    /// if any. Fails if the last ring showed a fault of the client.
    #[inline]
    pub fn sleeper(&mut self) -> Result<Option<&Arc<Bell>>, ProtocolViolation> {
        self.bell.fault()?;
        self.woken = self.shown;
        let flags = self.ring.flags();
        let sleeps = if self.rearms { idle::wakes(flags) } else { idle::is_asleep(flags) };
        Ok(sleeps.then_some(&self.bell))
    }
}
