//! Survives the loss of shared memory.
//!
//! A seal keeps a peer from shrinking its memory, and huge pages are refused. A page of a region
//! may still be lost (a memory error, a hole that the kernel can't fill); touching it raises
//! SIGBUS. The [`install`]ed handler replaces the whole region by zeros of our own and marks it.
//! The connection then returns [`crate::ProtocolViolation::Poisoned`], and the process continues. A
//! SIGBUS anywhere else goes to the previous handler.
//!
//! Limit: [`REGIONS_COUNT_MAX`] regions per process.
//! Each [`RegionQuota`] gets at most as many as remain free.

use std::cell::UnsafeCell;
use std::ffi::{c_int, c_void};
use std::io;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Once};

/// Regions mapped in one process: 1,024 vnets with 16 peers of one region each. Descriptors may run
/// out earlier; a connection has three.
pub const REGIONS_COUNT_MAX: usize = 16_384;

/// Regions that are mapped.
static TAKEN: AtomicUsize = AtomicUsize::new(0);

/// Number of regions of one user of the table. It never exceeds the free regions: n greedy users
/// get 1/(n+1) of the table each, and as much stays free (Choudhury and Hahne, 1998).
#[derive(Debug, Default)]
pub struct RegionQuota(AtomicUsize);

impl RegionQuota {
    /// Regions in use.
    pub fn regions(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }

    /// True if it may have one more.
    pub fn has_room(&self) -> bool {
        self.regions() < REGIONS_COUNT_MAX.saturating_sub(TAKEN.load(Ordering::Relaxed))
    }
}

/// Mapped region. The handler reads it at any time, so all fields are atomics.
struct RegionEntry {
    taken: AtomicBool,
    /// First address; 0 while the other fields are invalid.
    base: AtomicUsize,
    bytes: AtomicUsize,
    poisoned: AtomicBool,
}

static SLOTS: [RegionEntry; REGIONS_COUNT_MAX] = [const {
    RegionEntry {
        taken: AtomicBool::new(false),
        base: AtomicUsize::new(0),
        bytes: AtomicUsize::new(0),
        poisoned: AtomicBool::new(false),
    }
}; REGIONS_COUNT_MAX];

/// A region's entry in the table.
#[derive(Debug)]
pub(crate) struct RegionGuard {
    slot: usize,
    share: Option<Arc<RegionQuota>>,
}

impl RegionGuard {
    /// Enters a region, which counts for `share`. `None` if the table is full.
    pub fn new(base: usize, bytes: usize, share: Option<Arc<RegionQuota>>) -> Option<Self> {
        let slot = SLOTS.iter().position(|slot| !slot.taken.swap(true, Ordering::AcqRel))?;
        TAKEN.fetch_add(1, Ordering::Relaxed);
        if let Some(share) = &share {
            share.0.fetch_add(1, Ordering::Relaxed);
        }
        let entry = &SLOTS[slot];
        entry.poisoned.store(false, Ordering::Relaxed);
        entry.bytes.store(bytes, Ordering::Relaxed);
        entry.base.store(base, Ordering::Release);
        Some(Self { slot, share })
    }

    /// True if memory of the region was taken away.
    pub fn is_poisoned(&self) -> bool {
        SLOTS[self.slot].poisoned.load(Ordering::Relaxed)
    }

    /// Removes the region. Call it before unmapping.
    pub fn release(&mut self) {
        let entry = &SLOTS[self.slot];
        entry.base.store(0, Ordering::Release);
        entry.taken.store(false, Ordering::Release);
        TAKEN.fetch_sub(1, Ordering::Relaxed);
        if let Some(share) = &self.share {
            share.0.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// The signal action before ours.
struct Previous(UnsafeCell<MaybeUninit<libc::sigaction>>);

// SAFETY: written once, by `install`, before our handler exists; only read afterwards.
unsafe impl Sync for Previous {}

static PREVIOUS: Previous = Previous(UnsafeCell::new(MaybeUninit::uninit()));
static INSTALLED: Once = Once::new();

/// Installs the handler, once per process. Further calls do nothing.
pub fn install() -> io::Result<()> {
    let mut result = Ok(());
    INSTALLED.call_once(|| {
        // SAFETY: a zeroed sigaction is a valid one. The first call only reads the present
        // action, into memory that no handler reads yet; the second installs ours, which is
        // async-signal-safe.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            if libc::sigaction(libc::SIGBUS, std::ptr::null(), (*PREVIOUS.0.get()).as_mut_ptr())
                != 0
            {
                result = Err(io::Error::last_os_error());
                return;
            }
            action.sa_sigaction = on_sigbus as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            if libc::sigaction(libc::SIGBUS, &action, std::ptr::null_mut()) != 0 {
                result = Err(io::Error::last_os_error());
            }
        }
    });
    result
}

/// Async-signal-safe: atomics, mmap and sigaction only; keeps errno.
extern "C" fn on_sigbus(_signal: c_int, info: *mut libc::siginfo_t, _context: *mut c_void) {
    // SAFETY: with SA_SIGINFO the kernel passes a valid siginfo; SIGBUS fills its address. errno
    // is this thread's own.
    let (address, errno) = unsafe { ((*info).si_addr() as usize, *libc::__errno_location()) };
    let region = SLOTS.iter().find(|slot| {
        let base = slot.base.load(Ordering::Acquire);
        base != 0 && address >= base && address - base < slot.bytes.load(Ordering::Relaxed)
    });
    let replaced = region.is_some_and(|slot| {
        slot.poisoned.store(true, Ordering::Relaxed);
        // SAFETY: the range is a mapping of ours. Its owner has not
        // unmapped it, since a thread (the one interrupted here) is using
        // it. Shared memory may change under copies and atomics anyway.
        let zeros = unsafe {
            libc::mmap(
                slot.base.load(Ordering::Relaxed) as *mut c_void,
                slot.bytes.load(Ordering::Relaxed),
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED,
                -1,
                0,
            )
        };
        zeros != libc::MAP_FAILED
    });
    if !replaced {
        // Not ours: with the former action restored, the instruction faults again and reaches it.
        // SAFETY: `install` filled PREVIOUS before this handler was installed.
        unsafe {
            libc::sigaction(libc::SIGBUS, (*PREVIOUS.0.get()).as_ptr(), std::ptr::null_mut());
        }
    }
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Mapping;
    use std::os::fd::AsFd;

    #[test]
    fn greedy_peer_leaves_half_the_regions() {
        let greedy = |share: &Arc<RegionQuota>| {
            let mut taken = vec![];
            while share.has_room() {
                // No bytes, so that no address is inside.
                taken.push(RegionGuard::new(1, 0, Some(share.clone())).unwrap());
            }
            taken
        };
        let [one, two] = [Arc::<RegionQuota>::default(), Arc::default()];
        // Other tests of this process have some.
        let (half, quarter) = (REGIONS_COUNT_MAX / 2, REGIONS_COUNT_MAX / 4);
        let mut first = greedy(&one);
        assert!((half - 100..=half).contains(&one.regions()), "{one:?}");
        let mut second = greedy(&two);
        assert!((quarter - 100..=quarter).contains(&two.regions()), "{two:?}");
        assert!(Arc::<RegionQuota>::default().has_room());
        first.iter_mut().chain(&mut second).for_each(RegionGuard::release);
        assert_eq!((one.regions(), two.regions()), (0, 0));
    }

    #[test]
    fn truncated_memory_reads_as_zeros_and_is_poisoned() {
        install().unwrap();
        // Not by `of_peer`, which would refuse it: this test shrinks the memfd to take memory away.
        let fd = rustix::fs::memfd_create("shrinks", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&fd, 8192).unwrap();
        let mapping = Mapping::map_for_test(fd.as_fd(), 8192);
        let other = Mapping::create(4096).unwrap().0;
        mapping.write(4096, b"there");
        rustix::fs::ftruncate(&fd, 0).unwrap();
        let mut bytes = *b"xxxxx";
        mapping.read(4096, &mut bytes);
        assert_eq!(bytes, [0; 5]);
        assert!(mapping.is_poisoned());
        assert!(!other.is_poisoned());
        mapping.write(0, b"still mapped");
        drop(mapping);
        assert!(!Mapping::create(4096).unwrap().0.is_poisoned(), "a slot starts clean");
    }
}
