//! Memory shared with a peer.
//!
//! All access goes through bounds-checked methods: copies out, copies in, and atomic words. No
//! reference to plain bytes is made where a peer that is not trusted may write.
//!
//! A peer may take pages away under the mapping in spite of the seal (by a kernel feature unknown
//! to us, or by a memory error): see [`crate::sigbus`].

use std::ffi::c_void;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicU64, Ordering, compiler_fence};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags};

use std::arch::x86_64::{_MM_HINT_ET0, _MM_HINT_T0, _mm_prefetch};

use crate::sigbus::{self, RegionQuota};

/// Bytes of a piece of a small copy.
const PIECE_BYTES: usize = 32;

/// Largest small copy, bytes.
const SMALL_BYTES: usize = 256;

/// Bytes of a huge page. Memory that fills at least half of one gets it whole. With 16 guests on a
/// core this raises throughput by 18 %, as few TLB entries cover a ring's buffers.
const HUGE_BYTES: usize = 2 << 20;

/// `HUGETLBFS_MAGIC` of statfs(2).
const HUGETLBFS_MAGIC: i64 = 0x958458f6;

/// One region, mapped.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: NonNull<u8>,
    bytes: usize,
    guard: sigbus::RegionGuard,
}

// SAFETY: the memory belongs to no thread; every access is a raw copy or an atomic, except slices
// handed out under the contract of `slice` and `slice_mut`.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Makes a memfd of at least `bytes`, sealed at its size, with all its
    /// pages allocated. They are huge pages if the machine's
    /// `transparent_hugepage/shmem_enabled` is `advise`, which pdpd sets.
    pub fn create(bytes: usize) -> io::Result<(Self, OwnedFd)> {
        let fd =
            rustix::fs::memfd_create("pdp-memif", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        let huge_bytes = (bytes + HUGE_BYTES / 2) / HUGE_BYTES * HUGE_BYTES;
        let bytes = bytes.max(huge_bytes);
        rustix::fs::ftruncate(&fd, bytes as u64)?;
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let mapping = Self::map(fd.as_fd(), bytes, None)?;
        let base = mapping.base.as_ptr().cast::<c_void>();
        // SAFETY: inside the mapping, of which no byte changes. If it fails, small pages do.
        let _ = unsafe { rustix::mm::madvise(base, huge_bytes, Advice::LinuxHugepage) };
        // The creator pays for the pages, and the packet path takes no page fault.
        (0..bytes).step_by(rustix::param::page_size()).for_each(|at| mapping.write(at, &[0]));
        Ok((mapping, fd))
    }

    /// Maps `bytes` of an untrusted peer's memfd, or
    /// returns why not. The region counts for `share`.
    pub fn of_peer(
        fd: BorrowedFd<'_>,
        bytes: u64,
        share: &Arc<RegionQuota>,
    ) -> Result<Self, &'static str> {
        const REFUSED: &str = "region can't be mapped";
        let seals = rustix::fs::fcntl_get_seals(fd).unwrap_or(SealFlags::empty());
        if !seals.contains(SealFlags::SHRINK) {
            return Err("region is not a memfd sealed against shrinking");
        }
        let filesystem = rustix::fs::fstatfs(fd).map_err(|_| REFUSED)?;
        if filesystem.f_type == HUGETLBFS_MAGIC {
            return Err("region in huge pages");
        }
        let stat = rustix::fs::fstat(fd).map_err(|_| REFUSED)?;
        if u64::try_from(stat.st_size).unwrap_or(0) < bytes {
            return Err("region is smaller than announced");
        }
        let bytes = usize::try_from(bytes).map_err(|_| REFUSED)?;
        if !share.has_room() {
            return Err("too many regions of one peer (close connections)");
        }
        Self::map(fd, bytes, Some(share.clone())).map_err(|_| REFUSED)
    }

    fn map(fd: BorrowedFd<'_>, bytes: usize, share: Option<Arc<RegionQuota>>) -> io::Result<Self> {
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory of ours.
        let base = unsafe {
            rustix::mm::mmap(
                place(bytes),
                bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                fd,
                0,
            )?
        };
        let base = NonNull::new(base.cast::<u8>()).ok_or(io::ErrorKind::OutOfMemory)?;
        match sigbus::RegionGuard::new(base.as_ptr() as usize, bytes, share) {
            Some(guard) => Ok(Self { base, bytes, guard }),
            None => {
                // SAFETY: just mapped, nobody else knows of it.
                unsafe { unmap(base, bytes) };
                Err(io::Error::other("too many memif regions in this process"))
            }
        }
    }

    /// Bytes of the region.
    #[inline]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// True if the peer took pages away.
    pub fn is_poisoned(&self) -> bool {
        self.guard.is_poisoned()
    }

    /// The address of `bytes` at `offset`. Panics unless they lie inside; callers have checked.
    #[inline]
    fn at(&self, offset: usize, bytes: usize) -> *mut u8 {
        assert!(offset <= self.bytes && bytes <= self.bytes - offset, "beyond the region");
        // SAFETY: `offset <= self.bytes`, so the result is in the mapping or one past its end.
        unsafe { self.base.as_ptr().add(offset) }
    }

    /// Copies out of the region.
    #[inline]
    pub fn read(&self, offset: usize, to: &mut [u8]) {
        let from = self.at(offset, to.len());
        // The two fences keep the compiler from moving the copy across our other accesses, and from
        // reading the source again in place of the copy.
        compiler_fence(Ordering::SeqCst);
        // SAFETY: `at` checked the source. The destination is a slice of ours, so they don't
        // overlap. The peer may write meanwhile; callers accept any bytes.
        unsafe { copy(from, to.as_mut_ptr(), to.len()) };
        compiler_fence(Ordering::SeqCst);
    }

    /// Copies into the region.
    #[inline]
    pub fn write(&self, offset: usize, from: &[u8]) {
        let to = self.at(offset, from.len());
        // SAFETY: `at` checked the destination; the source is a slice of ours.
        unsafe { copy(from.as_ptr(), to, from.len()) };
    }

    /// Prefetches the cache line at `offset` for reading. Does nothing beyond the end.
    #[inline]
    pub fn prefetch(&self, offset: usize) {
        if offset < self.bytes {
            // SAFETY: the address is in the mapping; a prefetch changes nothing that is seen.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(self.base.as_ptr().add(offset).cast::<i8>()) };
        }
    }

    /// Like [`Mapping::prefetch`], for writing.
    #[inline]
    pub fn prefetch_to_write(&self, offset: usize) {
        if offset < self.bytes {
            // SAFETY: as in `prefetch`.
            unsafe { _mm_prefetch::<_MM_HINT_ET0>(self.base.as_ptr().add(offset).cast::<i8>()) };
        }
    }

    /// A shared 16-bit word.
    #[inline]
    pub fn word16(&self, offset: usize) -> &AtomicU16 {
        let at = self.at(offset, 2).cast::<u16>();
        assert!(at.is_aligned(), "unaligned word");
        // SAFETY: inside the mapping, aligned, valid for any bits, and lives as long as `self`.
        unsafe { AtomicU16::from_ptr(at) }
    }

    /// Two shared 64-bit words, one after the other.
    #[inline]
    pub fn words64(&self, offset: usize) -> &[AtomicU64; 2] {
        let at = self.at(offset, 16).cast::<[AtomicU64; 2]>();
        assert!(at.is_aligned(), "unaligned words");
        // SAFETY: inside the mapping, aligned, valid for any bits, and lives as long as `self`.
        unsafe { &*at }
    }

    /// A view of bytes.
    ///
    /// # Safety
    /// Nobody, the peer included, writes to these bytes while the slice lives.
    #[inline]
    pub unsafe fn slice(&self, offset: usize, bytes: usize) -> &[u8] {
        // SAFETY: `at` checked the bounds; the caller vouches for the rest.
        unsafe { std::slice::from_raw_parts(self.at(offset, bytes), bytes) }
    }

    /// A view of bytes to write to.
    ///
    /// # Safety
    /// Nobody, the peer included, reads or writes these bytes while the slice lives.
    #[inline]
    #[allow(clippy::mut_from_ref)] // the memory behind `self` is not `self`
    pub unsafe fn slice_mut(&self, offset: usize, bytes: usize) -> &mut [u8] {
        // SAFETY: `at` checked the bounds; the caller vouches for the rest.
        unsafe { std::slice::from_raw_parts_mut(self.at(offset, bytes), bytes) }
    }
}

/// Copies `bytes` bytes. Up to [`SMALL_BYTES`] are copied as pieces of a fixed size, of which the
/// last may overlap the one before. This is faster than calling memcpy.
///
/// # Safety
/// As for [`std::ptr::copy_nonoverlapping`].
#[inline]
unsafe fn copy(from: *const u8, to: *mut u8, bytes: usize) {
    type Piece = [u8; PIECE_BYTES];
    if !(PIECE_BYTES..=SMALL_BYTES).contains(&bytes) {
        // SAFETY: the caller's promise.
        return unsafe { std::ptr::copy_nonoverlapping(from, to, bytes) };
    }
    let mut at = 0;
    while at + PIECE_BYTES < bytes {
        // SAFETY: the piece ends before `bytes`, inside what the caller vouches for.
        unsafe {
            to.add(at)
                .cast::<Piece>()
                .write_unaligned(from.add(at).cast::<Piece>().read_unaligned())
        };
        at += PIECE_BYTES;
    }
    let last = bytes - PIECE_BYTES;
    // SAFETY: as above; there is at least one piece.
    unsafe {
        to.add(last)
            .cast::<Piece>()
            .write_unaligned(from.add(last).cast::<Piece>().read_unaligned())
    };
}

#[cfg(test)]
impl Mapping {
    /// Maps memory that `of_peer` would refuse.
    pub fn map_for_test(fd: BorrowedFd<'_>, bytes: usize) -> Self {
        Self::map(fd, bytes, None).unwrap()
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        self.guard.release();
        // SAFETY: `map` made it with this size; whoever borrowed from `self` is done.
        unsafe { unmap(self.base, self.bytes) };
    }
}

/// Returns a free address for `bytes`, aligned to a huge page if they
/// fill one. Elsewhere the kernel would map small pages. The address is
/// a hint: the kernel chooses another if a thread takes it first.
fn place(bytes: usize) -> *mut c_void {
    if bytes < HUGE_BYTES {
        return std::ptr::null_mut();
    }
    let room = bytes + HUGE_BYTES;
    // SAFETY: a new mapping at an address of the kernel's choice, unused until it is unmapped.
    unsafe {
        let none = ProtFlags::empty();
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        let Ok(start) = rustix::mm::mmap_anonymous(std::ptr::null_mut(), room, none, flags) else {
            return std::ptr::null_mut();
        };
        let _ = rustix::mm::munmap(start, room);
        start.with_addr(start.addr().next_multiple_of(HUGE_BYTES))
    }
}

/// # Safety
/// The range was mapped by `map`, and nobody uses it any more.
unsafe fn unmap(base: NonNull<u8>, bytes: usize) {
    // SAFETY: the caller's promise. After an error the mapping stays, which is harmless.
    let _ = unsafe { rustix::mm::munmap(base.as_ptr().cast::<c_void>(), bytes) };
}
