//! Packet memory: one sealed memfd, cut into packets of equal size.
//!
//! The mapping lives as long as the process, so a [`PacketBuffer`] needs no borrow of its pool.
//! Dropping a packet instead of giving it back loses it to the pool, but is never unsafe.

use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;

use crate::{Error, HEADROOM_BYTES, PACKET_BYTES, POOL_PACKETS_MAX};

/// Bytes of the link, IP and transport headers without options.
const HEADERS_BYTES: usize = 54;

/// Bytes of the largest pool. Each pool begins at a multiple
/// of it, so that a packet's address determines its number.
pub(crate) const POOL_BYTES_MAX: usize = POOL_PACKETS_MAX * PACKET_BYTES;

/// Bytes of a page.
const PAGE_BYTES: usize = 4096;

/// The memory of all packets of a process.
#[derive(Debug)]
pub struct Pool {
    memfd: OwnedFd,
    region: Region,
}

/// Location of the packets. Copies are harmless: only a [`PacketBuffer`] gives access.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Region {
    base: NonNull<u8>,
    packets: usize,
}

// SAFETY: the mapping is never unmapped and the base address alone gives no access to it.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Pool {
    /// Makes a pool and all its packets, in the order of their numbers.
    pub fn new(packets: usize) -> Result<(Self, Vec<PacketBuffer>), Error> {
        if packets == 0 || packets > POOL_PACKETS_MAX {
            return Err(Error::PoolSize(packets));
        }
        let bytes = packets * PACKET_BYTES;
        let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
        // SAFETY: the name is a C string; the descriptor is checked and owned by nobody else.
        let memfd = unsafe {
            let fd = libc::memfd_create(c"pdp-pool".as_ptr(), flags);
            if fd < 0 {
                return Err(Error::last("memfd_create"));
            }
            OwnedFd::from_raw_fd(fd)
        };
        // SAFETY: plain system call on a descriptor that we own.
        if unsafe { libc::ftruncate(memfd.as_raw_fd(), bytes as libc::off_t) } < 0 {
            return Err(Error::last("ftruncate of the pool"));
        }
        let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
        // SAFETY: plain system call on a descriptor that we own.
        if unsafe { libc::fcntl(memfd.as_raw_fd(), libc::F_ADD_SEALS, seals) } < 0 {
            return Err(Error::last("sealing of the pool"));
        }
        let region = Region { base: map(memfd.as_fd(), bytes)?, packets };
        // SAFETY: inside the mapping, of which no byte changes. If it fails, small pages do.
        unsafe { libc::madvise(region.base.as_ptr().cast(), bytes, libc::MADV_HUGEPAGE) };
        // SAFETY: each number is taken once, and nobody else makes packets of this mapping.
        let all = (0..packets).map(|number| unsafe { region.packet(number) }).collect();
        Ok((Self { memfd, region }, all))
    }

    /// The descriptor for [`crate::create_socket`].
    pub fn memfd(&self) -> BorrowedFd<'_> {
        self.memfd.as_fd()
    }

    /// Number of packets.
    pub fn packets(&self) -> usize {
        self.region.packets
    }

    pub(crate) fn region(&self) -> Region {
        self.region
    }
}

impl Region {
    pub(crate) fn packets(self) -> usize {
        self.packets
    }

    /// Number of the packet that contains the byte at `address` of the pool.
    pub(crate) fn number_at(self, address: u64) -> Option<usize> {
        usize::try_from(address / PACKET_BYTES as u64).ok().filter(|number| *number < self.packets)
    }

    /// True if `packet` belongs to this pool.
    pub(crate) fn owns(self, packet: &PacketBuffer) -> bool {
        let bytes = self.packets * PACKET_BYTES;
        (packet.start.addr().get().wrapping_sub(self.base.addr().get())) < bytes
    }

    /// Returns a fresh handle on packet `number`.
    ///
    /// # Safety
    /// No other handle on it exists, the kernel no longer holds it, and `number` is below
    /// `packets`.
    pub(crate) unsafe fn packet(self, number: usize) -> PacketBuffer {
        debug_assert!(number < self.packets);
        // SAFETY: the product is inside the mapping, because the number is below `packets`.
        let start = unsafe { self.base.add(number * PACKET_BYTES) };
        let offset = HEADROOM_BYTES as u16;
        PacketBuffer { start, mark: 0, counted: 0, offset, length: 0, port: 0, queue: 0 }
    }
}

/// Maps the pool's memory, at most [`POOL_BYTES_MAX`], shared,
/// readable and writable, at a multiple of that size.
pub(crate) fn map(memfd: BorrowedFd<'_>, bytes: usize) -> Result<NonNull<u8>, Error> {
    let anonymous = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let room = 2 * POOL_BYTES_MAX;
    // SAFETY: a new mapping at an address of the kernel's choice disturbs no other.
    let first =
        unsafe { libc::mmap(std::ptr::null_mut(), room, libc::PROT_NONE, anonymous, -1, 0) };
    if first == libc::MAP_FAILED {
        return Err(Error::last("mmap of room for the pool"));
    }
    let before = first.addr().next_multiple_of(POOL_BYTES_MAX) - first.addr();
    let at = first.wrapping_byte_add(before);
    let (protection, flags) =
        (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_FIXED);
    // SAFETY: `before` is less than a pool's bytes, and these are at most half of the room. So all
    // of it lies in the mapping made above, which is empty and unknown to anyone else.
    let base = unsafe { libc::mmap(at, bytes, protection, flags, memfd.as_raw_fd(), 0) };
    let mapped = if base == libc::MAP_FAILED { 0 } else { bytes.next_multiple_of(PAGE_BYTES) };
    let error = Error::last("mmap of the pool");
    for (from, length) in [(0, before), (before + mapped, room - before - mapped)] {
        if length > 0 {
            // SAFETY: the rest of the room, before the pool's
            // pages and behind them, which is empty.
            unsafe { libc::munmap(first.wrapping_byte_add(from), length) };
        }
    }
    NonNull::new(base.cast::<u8>()).filter(|_| mapped > 0).ok_or(error)
}

/// The only handle on one packet: its contents, and free space around them.
///
/// `mark`, `counted`, `port` and `queue` are for the owner's use; they do not survive the kernel.
#[derive(Debug)]
#[must_use = "a packet that is dropped is lost to its pool"]
pub struct PacketBuffer {
    start: NonNull<u8>,
    /// For the owner's use.
    pub mark: u32,
    /// Counter to increment when it leaves by its next port; 0 for none.
    pub counted: u32,
    offset: u16,
    length: u16,
    /// Current port of the frame, in the owner's numbering.
    pub port: u16,
    /// Queue chosen for it at its next port, from 1; 0 if none was chosen.
    pub queue: u16,
}

/// Stages pass packets on by value. With eight bytes more, a cache line would fit only two.
const _: () = assert!(size_of::<PacketBuffer>() == 24);

// SAFETY: the handle is the only one on its bytes, and the mapping lives as long as the process.
unsafe impl Send for PacketBuffer {}

/// Prefetches the first bytes of a value that is used soon.
#[inline]
pub fn prefetch<T>(value: &T) {
    // SAFETY: a prefetch has no visible effect, at any address.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(value).cast()) };
}

impl PacketBuffer {
    /// Returns the packet with `port` set.
    #[inline]
    pub fn at(self, port: usize) -> Self {
        Self { port: port as u16, ..self }
    }

    /// Moves it to `port`, and clears the queue and the counter chosen before.
    #[inline]
    pub fn arrive_at(&mut self, port: u16) {
        (self.port, self.queue, self.counted) = (port, 0, 0);
    }

    /// Number in the pool.
    #[inline]
    pub fn number(&self) -> usize {
        // Other SAFETY comments rely on it: `Region::packet` places packet N at N packets from a
        // multiple of the largest pool's bytes, and N is below a pool's packets.
        self.start.addr().get() % POOL_BYTES_MAX / PACKET_BYTES
    }

    /// Length of its contents, bytes.
    #[allow(clippy::len_without_is_empty)]
    #[inline]
    pub fn len(&self) -> usize {
        usize::from(self.length)
    }

    /// Contents.
    #[inline]
    pub fn bytes(&self) -> &[u8] {
        &self.memory()[self.range()]
    }

    /// Contents, mutable.
    #[inline]
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        let range = self.range();
        &mut self.memory_mut()[range]
    }

    /// Makes it empty: [`HEADROOM_BYTES`] of headroom, no mark, no queue or counter chosen.
    #[inline]
    pub fn reset(&mut self) {
        self.offset = HEADROOM_BYTES as u16;
        self.length = 0;
        self.mark = 0;
        self.counted = 0;
        self.queue = 0;
    }

    /// Returns all bytes from the start of its contents to the end of the packet, for writing new
    /// contents. [`PacketBuffer::set_len`] then sets their length.
    #[inline]
    pub fn room_mut(&mut self) -> &mut [u8] {
        let offset = usize::from(self.offset);
        &mut self.memory_mut()[offset..]
    }

    /// Sets the length of the contents. `None` (and no change) if they would exceed the packet.
    #[inline]
    pub fn set_len(&mut self, length: usize) -> Option<()> {
        if length > PACKET_BYTES - usize::from(self.offset) {
            return None;
        }
        self.length = length as u16;
        Some(())
    }

    /// Removes the first `count` bytes. `None` (and no change) if there are fewer.
    #[inline]
    pub fn advance(&mut self, count: usize) -> Option<()> {
        if count > self.len() {
            return None;
        }
        self.offset += count as u16;
        self.length -= count as u16;
        Some(())
    }

    /// Adds `count` bytes in front and returns them.
    /// `None` (and no change) without enough headroom.
    #[inline]
    pub fn prepend(&mut self, count: usize) -> Option<&mut [u8]> {
        if count > usize::from(self.offset) {
            return None;
        }
        self.offset -= count as u16;
        self.length += count as u16;
        Some(&mut self.bytes_mut()[..count])
    }

    /// Prefetches the first [`HEADERS_BYTES`] of its contents, which are read soon.
    #[inline]
    pub fn prefetch(&self) {
        let at = self.memory().as_ptr().wrapping_add(usize::from(self.offset));
        // SAFETY: a prefetch has no visible effect, at any address.
        unsafe {
            _mm_prefetch::<_MM_HINT_T0>(at.cast());
            _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(HEADERS_BYTES - 1).cast());
        }
    }

    /// Address of the contents in the pool, as the rings need it.
    pub(crate) fn address(&self) -> u64 {
        (self.number() * PACKET_BYTES + usize::from(self.offset)) as u64
    }

    /// Sets contents as the kernel reports them; `None` if they are not inside the packet.
    pub(crate) fn set_contents(&mut self, offset: usize, length: usize) -> Option<()> {
        if offset > PACKET_BYTES || length > PACKET_BYTES - offset {
            return None;
        }
        self.offset = offset as u16;
        self.length = length as u16;
        Some(())
    }

    #[inline]
    fn range(&self) -> Range<usize> {
        usize::from(self.offset)..usize::from(self.offset) + usize::from(self.length)
    }

    #[inline]
    fn memory(&self) -> &[u8] {
        // SAFETY: PACKET_BYTES from `start` are mapped for the life of the process, were zeroed
        // when made, and this handle is the only one on them.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), PACKET_BYTES) }
    }

    #[inline]
    fn memory_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `memory`, and `self` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), PACKET_BYTES) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn sizes_out_of_bounds_are_refused() {
        assert!(matches!(Pool::new(0), Err(Error::PoolSize(0))));
        assert!(Pool::new(POOL_PACKETS_MAX + 1).is_err());
    }

    #[test]
    fn packets_do_not_overlap() {
        let (pool, mut packets) = Pool::new(8).unwrap();
        assert_eq!(pool.packets(), 8);
        for packet in &mut packets {
            let number = packet.number() as u8;
            packet.room_mut().fill(number);
            packet.set_len(RECEIVE).unwrap();
            packet.prepend(HEADROOM_BYTES).unwrap().fill(number);
        }
        const RECEIVE: usize = PACKET_BYTES - HEADROOM_BYTES;
        for packet in &packets {
            assert_eq!(packet.len(), PACKET_BYTES);
            assert!(packet.bytes().iter().all(|byte| usize::from(*byte) == packet.number()));
        }
    }

    #[test]
    fn arrival_and_reset_clear_the_chosen_queue() {
        let (_pool, mut packets) = Pool::new(1).unwrap();
        let packet = &mut packets[0];
        packet.queue = 7;
        packet.arrive_at(3);
        assert_eq!((packet.port, packet.queue), (3, 0));
        packet.queue = 7;
        packet.reset();
        assert_eq!(packet.queue, 0);
    }

    #[derive(Clone, Copy, Debug)]
    enum Step {
        Advance(usize),
        Prepend(usize),
        Set(usize),
        Reset,
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let count = 0..2 * PACKET_BYTES;
        let step = prop_oneof![
            count.clone().prop_map(Step::Advance),
            (0..400usize).prop_map(Step::Prepend),
            count.prop_map(Step::Set),
            Just(Step::Reset),
        ];
        proptest::collection::vec(step, 0..64)
    }

    proptest! {
        /// Compares with a plain range. Steps that would
        /// leave the packet are refused and change nothing.
        #[test]
        fn packet_contents_stay_inside_the_buffer(steps in steps()) {
            let (_pool, mut packets) = Pool::new(1).unwrap();
            let packet = &mut packets[0];
            let (mut offset, mut length) = (HEADROOM_BYTES, 0);
            for step in steps {
                match step {
                    Step::Advance(n) => {
                        let fits = n <= length;
                        prop_assert_eq!(packet.advance(n).is_some(), fits);
                        if fits { offset += n; length -= n; }
                    }
                    Step::Prepend(n) => {
                        let fits = n <= offset;
                        prop_assert_eq!(packet.prepend(n).map(|bytes| bytes.len()), fits.then_some(n));
                        if fits { offset -= n; length += n; }
                    }
                    Step::Set(n) => {
                        let fits = offset + n <= PACKET_BYTES;
                        prop_assert_eq!(packet.set_len(n).is_some(), fits);
                        if fits { length = n; }
                    }
                    Step::Reset => {
                        packet.reset();
                        (offset, length) = (HEADROOM_BYTES, 0);
                    }
                }
                prop_assert_eq!(packet.range(), offset..offset + length);
                prop_assert_eq!(packet.room_mut().len(), PACKET_BYTES - offset);
            }
        }
    }
}
