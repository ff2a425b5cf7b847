//! One of a socket's rings, shared with the kernel. One side produces, the other consumes.
//!
//! The kernel is trusted to follow the protocol. Indices are
//! masked nevertheless, so that no access leaves the mapping.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::{Error, RING_ENTRIES};

const MASK: u32 = RING_ENTRIES - 1;
const _: () = assert!(RING_ENTRIES.is_power_of_two());

/// A mapped ring of entries `T`.
#[derive(Debug)]
pub(crate) struct XdpRing<T> {
    map: NonNull<u8>,
    map_bytes: usize,
    producer: NonNull<AtomicU32>,
    consumer: NonNull<AtomicU32>,
    flags: NonNull<AtomicU32>,
    entries: NonNull<T>,
    /// Our index: the next entry to produce or consume.
    mine: u32,
    /// The other side's index when last read.
    theirs: u32,
}

// SAFETY: the pointers go to a mapping that this value owns; atomics are shared with the kernel
// only, and entries are touched through `&mut self`.
unsafe impl<T: Send> Send for XdpRing<T> {}

impl<T: Copy> XdpRing<T> {
    /// Maps the ring at page offset `page` of the socket.
    ///
    /// # Safety
    /// `T` is the kernel's type for this ring: `xdp_desc` for receive and transmit, `u64` for fill
    /// and completion. No other `XdpRing` of this socket and page is in use.
    pub(crate) unsafe fn map(
        socket: BorrowedFd<'_>,
        page: u64,
        at: &libc::xdp_ring_offset,
    ) -> Result<Self, Error> {
        let map_bytes = at.desc as usize + RING_ENTRIES as usize * size_of::<T>();
        // SAFETY: a new mapping at an address of the kernel's choice disturbs no other.
        let map = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                map_bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_POPULATE,
                socket.as_raw_fd(),
                page as libc::off_t,
            )
        };
        let map = match NonNull::new(map.cast::<u8>()) {
            Some(map) if map.as_ptr().cast() != libc::MAP_FAILED => map,
            _ => return Err(Error::last("mmap of a ring")),
        };
        // SAFETY: the kernel's offsets lie inside its ring and are aligned for their types. A
        // mapping of all RING_ENTRIES succeeded, so the ring is no smaller than that.
        let ring = unsafe {
            Self {
                map,
                map_bytes,
                producer: map.add(at.producer as usize).cast(),
                consumer: map.add(at.consumer as usize).cast(),
                flags: map.add(at.flags as usize).cast(),
                entries: map.add(at.desc as usize).cast(),
                mine: 0,
                theirs: 0,
            }
        };
        Ok(ring)
    }

    fn producer(&self) -> &AtomicU32 {
        // SAFETY: inside the mapping that `self` owns; see `map`.
        unsafe { self.producer.as_ref() }
    }

    fn consumer(&self) -> &AtomicU32 {
        // SAFETY: inside the mapping that `self` owns; see `map`.
        unsafe { self.consumer.as_ref() }
    }

    /// True if the kernel needs a system call to continue.
    pub(crate) fn needs_wakeup(&self) -> bool {
        // SAFETY: inside the mapping that `self` owns; see `map`.
        let flags = unsafe { self.flags.as_ref() };
        flags.load(Ordering::Relaxed) & libc::XDP_RING_NEED_WAKEUP != 0
    }

    /// As producer: entries that can be written.
    pub(crate) fn space(&mut self) -> u32 {
        let used = self.mine.wrapping_sub(self.theirs);
        if used >= RING_ENTRIES {
            self.theirs = self.consumer().load(Ordering::Acquire);
        }
        RING_ENTRIES.saturating_sub(self.mine.wrapping_sub(self.theirs))
    }

    /// As producer: entries that can be written, after reading the kernel's index.
    pub(crate) fn space_now(&mut self) -> u32 {
        self.theirs = self.consumer().load(Ordering::Acquire);
        RING_ENTRIES.saturating_sub(self.mine.wrapping_sub(self.theirs))
    }

    /// As producer, if [`XdpRing::space`] is more than 0: writes an entry, not yet visible.
    pub(crate) fn write(&mut self, entry: T) {
        // SAFETY: the masked index is inside the entries; the kernel doesn't read it before
        // `publish`, and has consumed what was there, as there is space.
        unsafe { self.entries.add((self.mine & MASK) as usize).write(entry) };
        self.mine = self.mine.wrapping_add(1);
    }

    /// As producer: publishes the written entries to the kernel.
    pub(crate) fn publish(&self) {
        self.producer().store(self.mine, Ordering::Release);
    }

    /// As consumer: the next entry, to be given back with [`XdpRing::release`].
    pub(crate) fn read(&mut self) -> Option<T> {
        if self.mine == self.theirs {
            self.theirs = self.producer().load(Ordering::Acquire);
            if self.mine == self.theirs {
                return None;
            }
        }
        // SAFETY: the masked index is inside the entries, and the kernel wrote it before it moved
        // its producer past it. Every bit pattern is a valid `T`.
        let entry = unsafe { self.entries.add((self.mine & MASK) as usize).read() };
        self.mine = self.mine.wrapping_add(1);
        Some(entry)
    }

    /// As consumer: returns all entries read so far to the kernel.
    pub(crate) fn release(&self) {
        self.consumer().store(self.mine, Ordering::Release);
    }
}

impl<T> Drop for XdpRing<T> {
    fn drop(&mut self) {
        // SAFETY: this value made the mapping, and all pointers into it are dropped with it.
        unsafe { libc::munmap(self.map.as_ptr().cast(), self.map_bytes) };
    }
}
