//! A ring in shared memory: two indices, a flag, and descriptors of buffers.
//!
//! ```text
//! byte 0      4       6     64     128        128 + 16 * slots
//!      cookie flags   head  tail   descriptors
//! ```
//! In both rings the client moves `head`, and the server follows with `tail`. The client puts
//! frames (ring to the server) or empty buffers (ring to the client) at `head`. The server has
//! taken or filled those before `tail`. Indices are not reduced to the slots; they wrap at 2^16.
//!
//! Source: DPDK 22.11 drivers/net/memif/memif.h (`memif_ring_t`, `memif_desc_t`).

use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicU64, Ordering};

use crate::memory::Mapping;

/// The client's regions.
pub(crate) type Regions = Arc<[Mapping]>;

/// First word of every ring.
pub(crate) const COOKIE: u32 = 0x03E3_1F20;

/// Alignment that a ring needs for its words.
pub(crate) const RING_ALIGN_BYTES: usize = 8;

const FLAGS_AT: usize = 4;
const HEAD_AT: usize = 6;
const TAIL_AT: usize = 64;
const DESCRIPTORS_AT: usize = 128;
const DESCRIPTOR_BYTES: usize = 16;

/// The frame continues in the next descriptor.
pub(crate) const NEXT: u16 = 1;

/// Bytes of a ring with this many slots.
pub(crate) const fn ring_bytes(slots: usize) -> usize {
    DESCRIPTORS_AT + DESCRIPTOR_BYTES * slots
}

/// Location of a buffer, or of a piece of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Descriptor {
    pub flags: u16,
    pub region: u16,
    pub length: u32,
    pub offset: u32,
    /// Metadata for the two sides' own use. memif itself ignores it.
    pub metadata: u32,
}

/// One ring.
#[derive(Debug)]
pub(crate) struct Ring {
    regions: Regions,
    region: usize,
    offset: usize,
    slots: u16,
}

impl Ring {
    /// The ring at `offset` of region `region`. `None` unless it lies inside, is aligned, and its
    /// number of slots is a power of two that the protocol allows.
    pub fn new(regions: Regions, region: usize, offset: usize, slots: u16) -> Option<Self> {
        let inside = regions.get(region)?.bytes().checked_sub(ring_bytes(usize::from(slots)))?;
        let fits = offset <= inside
            && offset.is_multiple_of(RING_ALIGN_BYTES)
            && slots.is_power_of_two()
            && slots <= 1 << crate::RING_LOG2_MAX;
        fits.then_some(Self { regions, region, offset, slots })
    }

    #[inline]
    pub fn slots(&self) -> u16 {
        self.slots
    }

    /// Slot of an index.
    #[inline]
    pub fn slot(&self, index: u16) -> usize {
        usize::from(index & (self.slots - 1))
    }

    #[inline]
    pub fn regions(&self) -> &[Mapping] {
        &self.regions
    }

    #[inline]
    fn memory(&self) -> &Mapping {
        &self.regions[self.region]
    }

    #[inline]
    pub fn head(&self) -> &AtomicU16 {
        self.memory().word16(self.offset + HEAD_AT)
    }

    #[inline]
    pub fn tail(&self) -> &AtomicU16 {
        self.memory().word16(self.offset + TAIL_AT)
    }

    #[inline]
    pub fn flags(&self) -> &AtomicU16 {
        self.memory().word16(self.offset + FLAGS_AT)
    }

    /// True if the client has initialised it.
    pub fn has_cookie(&self) -> bool {
        let mut cookie = [0; 4];
        self.memory().read(self.offset, &mut cookie);
        u32::from_ne_bytes(cookie) == COOKIE
    }

    /// Initialises it as empty, with `flags` for the doorbell.
    pub fn reset(&self, flags: u16) {
        self.memory().write(self.offset, &COOKIE.to_ne_bytes());
        self.head().store(0, Ordering::Relaxed);
        self.tail().store(0, Ordering::Relaxed);
        self.flags().store(flags, Ordering::Release);
    }

    #[inline]
    fn words(&self, index: u16) -> &[AtomicU64; 2] {
        let at = self.offset + DESCRIPTORS_AT + DESCRIPTOR_BYTES * self.slot(index);
        self.memory().words64(at)
    }

    /// Reads a descriptor, each of its words once.
    #[inline]
    pub fn descriptor(&self, index: u16) -> Descriptor {
        let [low, high] = self.words(index);
        let (low, high) = (low.load(Ordering::Relaxed), high.load(Ordering::Relaxed));
        Descriptor {
            flags: low as u16,
            region: (low >> 16) as u16,
            length: (low >> 32) as u32,
            offset: high as u32,
            metadata: (high >> 32) as u32,
        }
    }

    /// Writes a descriptor.
    #[inline]
    pub fn set_descriptor(&self, index: u16, descriptor: Descriptor) {
        let [low, high] = self.words(index);
        let word = u64::from(descriptor.flags)
            | u64::from(descriptor.region) << 16
            | u64::from(descriptor.length) << 32;
        low.store(word, Ordering::Relaxed);
        let high_word = u64::from(descriptor.offset) | u64::from(descriptor.metadata) << 32;
        high.store(high_word, Ordering::Relaxed);
    }
}
