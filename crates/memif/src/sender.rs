//! Frames to a client that is not trusted.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::fault::{Fault, ahead, checked, whole};
use crate::ring::{Descriptor, NEXT, Ring};
use crate::{Bell, CHAIN_SLOTS_MAX, idle};

/// Frames to a client.
#[derive(Debug)]
pub struct Sender {
    ring: Ring,
    bell: Arc<Bell>,
    /// The client's index when last looked at.
    head: u16,
    /// Index of the first slot not filled.
    filled: u16,
    /// Index of the first slot not shown.
    shown: u16,
    /// Index of the first slot that the client may sleep through.
    woken: u16,
    /// Whether the client arms its doorbell anew before each sleep.
    rearms: bool,
}

/// How many buffers ahead of the one that is filled the cache is to fetch.
const PREFETCH_SLOTS: u16 = 16;

impl Sender {
    pub(crate) fn new(ring: Ring, bell: Bell) -> Self {
        ring.tail().store(0, Ordering::Relaxed);
        let bell = Arc::new(bell);
        Self { ring, bell, head: 0, filled: 0, shown: 0, woken: 0, rearms: false }
    }

    /// From now on the client is rung once a sleep. For clients that arm their doorbell anew before
    /// each, as [`crate::Client`] does and memif does not ask for.
    pub fn ring_once_a_sleep(&mut self) {
        self.rearms = true;
    }

    /// Buffers that the client has posted and that are not filled yet. A frame takes one, or
    /// several if it is longer than the client's buffers.
    pub fn room(&mut self) -> Result<usize, Fault> {
        let head = self.ring.head().load(Ordering::Acquire);
        let room = ahead(head, self.filled, self.ring.slots())?;
        // Nor may it take back what it posted: this side counts on that.
        ahead(head, self.head, self.ring.slots())?;
        let exhausted = self.head == self.filled;
        self.head = head;
        if exhausted {
            (0..PREFETCH_SLOTS).for_each(|ahead| self.prefetch(self.filled.wrapping_add(ahead)));
        }
        Ok(room.into())
    }

    /// Copies a frame into the client's memory, with a word about it; the client sees both after
    /// [`Self::flush`]. False (and nothing done) if there is no room.
    #[inline]
    pub fn push(&mut self, metadata: u32, frame: &[u8]) -> Result<bool, Fault> {
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

    /// Has the cache fetch the buffer at `index`, if the client has posted one there.
    #[inline]
    fn prefetch(&self, index: u16) {
        if (self.head.wrapping_sub(index) as i16) > 0 {
            let Descriptor { region, offset, .. } = self.ring.descriptor(index);
            if let Some(region) = self.ring.regions().get(usize::from(region)) {
                region.prefetch_to_write(offset as usize);
            }
        }
    }

    /// Says that `bytes` were written to the next buffer, and moves on.
    #[inline]
    fn fill(&mut self, buffer: Descriptor, bytes: usize, flags: u16, metadata: u32) {
        // No more than the buffer's length, which is a u32.
        let written = Descriptor { flags, length: bytes as u32, metadata, ..buffer };
        self.ring.set_descriptor(self.filled, written);
        self.filled = self.filled.wrapping_add(1);
    }

    /// A frame longer than its first buffer.
    #[cold]
    fn push_chain(
        &mut self,
        metadata: u32,
        frame: &[u8],
        first: Descriptor,
    ) -> Result<bool, Fault> {
        let room = self.room()?;
        let slots_max = CHAIN_SLOTS_MAX.min(self.ring.slots().into());
        let mut buffers = [first; CHAIN_SLOTS_MAX];
        let mut count = 1;
        let mut capacity = first.length as usize;
        while capacity < frame.len() {
            if count == slots_max {
                return Err(Fault::Chain { slots: count });
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

    /// [`Self::show`] and [`Self::wake`].
    pub fn flush(&mut self) -> Result<(), Fault> {
        self.show()?;
        if self.unheard() > 0 { self.wake() } else { Ok(()) }
    }

    /// Shows the client what was pushed, without waking it.
    pub fn show(&mut self) -> Result<(), Fault> {
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

    /// Slots shown since the last [`Self::wake`]: a client that sleeps does not know of them.
    pub fn unheard(&self) -> u16 {
        self.shown.wrapping_sub(self.woken)
    }

    /// Rings if the client sleeps, for what it was shown or for room in its own ring
    /// ([`crate::Receiver::awaits_room`]; memif itself has no doorbell for that). The only system call
    /// here, and none while the client is busy.
    pub fn wake(&mut self) -> Result<(), Fault> {
        self.sleeper()?.map_or(Ok(()), |bell| bell.ring())
    }

    /// As [`Self::wake`], for who leaves the ringing to another thread: the doorbell that is to be
    /// rung, if any. Fails if the last ring showed a fault of the client's.
    #[inline]
    pub fn sleeper(&mut self) -> Result<Option<&Arc<Bell>>, Fault> {
        self.bell.fault()?;
        self.woken = self.shown;
        let flags = self.ring.flags();
        let sleeps = if self.rearms { idle::wakes(flags) } else { idle::is_asleep(flags) };
        Ok(sleeps.then_some(&self.bell))
    }
}
