//! Protocol violations of a connected peer, and the checks that find them in descriptors.

use crate::memory::Mapping;
use crate::ring::{Descriptor, Ring};

/// Protocol violation of a connected peer. Drop the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProtocolViolation {
    /// The peer announced more slots than the ring has. An index that moves back looks the same.
    #[error("ring index {head} is more than {slots} slots ahead of {tail}")]
    Index {
        /// The peer's index.
        head: u16,
        /// Our index.
        tail: u16,
        /// Slots of the ring.
        slots: u16,
    },
    /// A descriptor names a region that does not exist.
    #[error("descriptor in region {region}, {count} regions")]
    Region {
        /// The region named.
        region: u16,
        /// Regions of the connection.
        count: usize,
    },
    /// A descriptor reaches beyond its region.
    #[error("descriptor of {length} bytes at {offset}, region of {size} bytes")]
    Bounds {
        /// Offset in the region.
        offset: u32,
        /// Bytes of the buffer.
        length: u32,
        /// Bytes of the region.
        size: usize,
    },
    /// A frame has too many buffers, or its last buffer was not announced. Or the posted buffers
    /// are so small that a frame needs too many.
    #[error("chain of {slots} buffers does not end")]
    Chain {
        /// Buffers seen.
        slots: usize,
    },
    /// The shared memory was taken away.
    #[error("shared memory is gone")]
    Poisoned,
    /// The peer's doorbell can't be rung.
    #[error("doorbell can't be rung")]
    Bell,
    /// Ringing the peer's doorbell takes too long.
    #[error(
        "doorbell with too many waiters: remove all but a few epoll instances from the eventfd"
    )]
    Waiters,
}

/// Number of slots from our index to the peer's.
#[inline]
pub(crate) fn ahead(head: u16, tail: u16, slots: u16) -> Result<u16, ProtocolViolation> {
    let count = head.wrapping_sub(tail);
    if count > slots { Err(ProtocolViolation::Index { head, tail, slots }) } else { Ok(count) }
}

/// Returns a copy of a descriptor that lies inside its region.
#[inline]
pub(crate) fn checked(ring: &Ring, index: u16) -> Result<Descriptor, ProtocolViolation> {
    let descriptor = ring.descriptor(index);
    let regions = ring.regions();
    let Some(region) = regions.get(usize::from(descriptor.region)) else {
        return Err(ProtocolViolation::Region { region: descriptor.region, count: regions.len() });
    };
    if u64::from(descriptor.offset) + u64::from(descriptor.length) > region.bytes() as u64 {
        return Err(ProtocolViolation::Bounds {
            offset: descriptor.offset,
            length: descriptor.length,
            size: region.bytes(),
        });
    }
    Ok(descriptor)
}

/// Fails if memory of any region was taken away.
#[inline]
pub(crate) fn whole(regions: &[Mapping]) -> Result<(), ProtocolViolation> {
    if regions.iter().any(Mapping::is_poisoned) { Err(ProtocolViolation::Poisoned) } else { Ok(()) }
}
