//! Doorbells: eventfds by which one side wakes the other.
//!
//! The client of a connection makes both, so a hostile one can fill the counter and make the
//! descriptor blocking at any moment; write(2) would then hang the server. The server therefore
//! rings by a completed asynchronous request (io_submit(2) with `IOCB_FLAG_RESFD`), which adds to
//! the counter without ever waiting, and refuses descriptors that are not eventfds.
//! Costs 0.46 µs against 0.17 µs of a write, and only when the peer sleeps.
//!
//! A client can also attach any number of waiters to its doorbells: each epoll instance waits once
//! for each descriptor number that the eventfd has. Ringing the doorbell and reading its counter
//! both walk all waiters with interrupts off: 14 ms for 100,000. Therefore a thread other than the
//! one that moves frames can ring a [`Bell`]. The bell measures how long each ring takes, and
//! excessive time is a fault. The server never reads the counter of a client's doorbell: it watches
//! the descriptor edge-triggered.

use std::cell::OnceCell;
use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use rustix::event::EventfdFlags;
use rustix::io::ReadWriteFlags;
use rustix::time::{ClockId, clock_gettime};

use crate::fault::ProtocolViolation;

/// From linux/aio_abi.h, which libc lacks.
const IOCB_CMD_POLL: u16 = 5;
const IOCB_FLAG_RESFD: u32 = 1;

/// Completions that the kernel keeps until they are reaped.
const EVENTS: usize = 64;

/// CPU time from which a ring counts as slow, nanoseconds: about that of 1,000 waiters, where one
/// takes 1 to 3 µs. On a slow machine the limit is [`SLOW_OWN_RINGS`] instead.
const SLOW_NS: u64 = 50_000;

/// CPU time up to which a ring counts as quick, nanoseconds. One waiter on another CPU of a virtual
/// machine takes 8 to 16 µs, as some hundred on this CPU do. On a slow machine the limit is
/// [`QUICK_OWN_RINGS`] instead.
const QUICK_NS: u64 = 20_000;

/// Rings measured to find the time of one.
const OWN_RINGS: usize = 33;

/// A bell is [trusted](Bell::is_trusted) after a period of this length in which
/// its rings exceeded their quick time by at most this sum, nanoseconds. Rings
/// are also charged for some interrupts and for a busy machine.
const TRUST_NS: u64 = 1_000_000_000;
const EXCESS_NS_MAX: u64 = TRUST_NS / 100;

/// Consecutive slow rings, and their total in nanoseconds, that together are a fault. A single ring
/// may be slow because an interrupt was charged to it. Each second forgives as much. On a slow
/// machine the total is [`SLOW_SUM_OWN_RINGS`] instead.
const SLOW_RINGS: u32 = 3;
const SLOW_SUM_NS: u64 = 20_000_000;

/// Limits in multiples of the ring time of a doorbell without waiters. Such a ring takes 0.5 to 1.5
/// µs on an ordinary machine, and 5 to 10 µs on an emulated CPU. There a ring that wakes a thread
/// takes 15 to 30 times as long.
const QUICK_OWN_RINGS: u64 = 14;
const SLOW_OWN_RINGS: u64 = 100;
const SLOW_SUM_OWN_RINGS: u64 = 20_000;

/// Values of [`Bell::fault`].
const NO_EVENTFD: u32 = 1;
const TOO_SLOW: u32 = 2;

/// Doorbell that a client made. Any thread may ring it.
#[derive(Debug)]
pub struct Bell {
    fd: OwnedFd,
    asked: AtomicBool,
    cost: RingCost,
    fault: AtomicU32,
}

/// Limits on this machine, nanoseconds of CPU time. A ring below `quick_ns` is quick, a ring of
/// `slow_ns` or more is slow, and slow rings may take `slow_sum_ns` together.
#[derive(Clone, Copy, Debug)]
struct RingCostLimits {
    quick_ns: u64,
    slow_ns: u64,
    slow_sum_ns: u64,
}

impl RingCostLimits {
    /// Returns the limits of a machine on which a ring that wakes nobody takes `own_ns`.
    fn new(own_ns: u64) -> Self {
        Self {
            quick_ns: QUICK_NS.max(QUICK_OWN_RINGS * own_ns),
            slow_ns: SLOW_NS.max(SLOW_OWN_RINGS * own_ns),
            slow_sum_ns: SLOW_SUM_NS.max(SLOW_SUM_OWN_RINGS * own_ns),
        }
    }

    /// Measures this machine at the first call. Fails if the kernel has no means to ring.
    fn measured() -> io::Result<Self> {
        static LIMITS: OnceLock<RingCostLimits> = OnceLock::new();
        if let Some(limits) = LIMITS.get() {
            return Ok(*limits);
        }
        let bell = eventfd()?;
        let mut took_ns = [0; OWN_RINGS];
        for took_ns in &mut took_ns {
            let (time_ns, rung) = time_of(|| ring_of_peer(bell.as_fd()));
            rung?;
            *took_ns = time_ns;
        }
        took_ns.sort_unstable();
        Ok(*LIMITS.get_or_init(|| Self::new(took_ns[OWN_RINGS / 2])))
    }
}

/// CPU time of a bell's rings.
#[derive(Debug)]
struct RingCost {
    limits: RingCostLimits,
    /// Consecutive slow rings, their time less what was forgiven, and the time of the last one.
    slow: AtomicU32,
    slow_ns: AtomicU64,
    slow_at_ns: AtomicU64,
    /// Start of the current period of [`TRUST_NS`] in nanoseconds, the excess time of its rings,
    /// and whether the previous period was good.
    since_ns: AtomicU64,
    excess_ns: AtomicU64,
    was_good: AtomicBool,
}

impl RingCost {
    fn new(limits: RingCostLimits, now_ns: u64) -> Self {
        let (slow, slow_ns, slow_at_ns) = Default::default();
        let (excess_ns, was_good) = Default::default();
        let since_ns = AtomicU64::new(now_ns);
        Self { limits, slow, slow_ns, slow_at_ns, since_ns, excess_ns, was_good }
    }

    /// Counts a ring that took `took_ns` of CPU time. False if the bell's rings take too long.
    fn add(&self, now_ns: u64, took_ns: u64) -> bool {
        let excess_ns = took_ns.saturating_sub(self.limits.quick_ns);
        self.excess_ns.fetch_add(excess_ns, Ordering::Relaxed);
        if now_ns.saturating_sub(self.since_ns.load(Ordering::Relaxed)) >= TRUST_NS {
            self.since_ns.store(now_ns, Ordering::Relaxed);
            let excess_ns = self.excess_ns.swap(0, Ordering::Relaxed);
            self.was_good.store(excess_ns <= EXCESS_NS_MAX, Ordering::Relaxed);
        }
        if took_ns < self.limits.slow_ns {
            self.slow.store(0, Ordering::Relaxed);
            self.slow_ns.store(0, Ordering::Relaxed);
            return true;
        }
        let gone_ns = now_ns.saturating_sub(self.slow_at_ns.swap(now_ns, Ordering::Relaxed));
        let forgiven_ns = gone_ns / (1_000_000_000 / self.limits.slow_sum_ns).max(1);
        let before_ns = self.slow_ns.load(Ordering::Relaxed);
        let slow_ns = before_ns.saturating_sub(forgiven_ns) + took_ns;
        self.slow_ns.store(slow_ns, Ordering::Relaxed);
        let slow = self.slow.fetch_add(1, Ordering::Relaxed).saturating_add(1);
        slow < SLOW_RINGS || slow_ns < self.limits.slow_sum_ns
    }

    fn is_low(&self) -> bool {
        self.was_good.load(Ordering::Relaxed)
            && self.excess_ns.load(Ordering::Relaxed) <= EXCESS_NS_MAX
    }
}

impl Bell {
    /// Takes a peer's descriptor; `None` if it is no eventfd.
    pub(crate) fn of_peer(fd: OwnedFd) -> Option<Self> {
        let link = format!("/proc/self/fd/{}", fd.as_raw_fd());
        let kind = rustix::fs::readlink(link, Vec::new()).ok()?;
        let is_eventfd = kind.as_bytes() == b"anon_inode:[eventfd]";
        let limits = RingCostLimits::measured().unwrap_or(RingCostLimits::new(0));
        let cost = RingCost::new(limits, time_ns(ClockId::Monotonic));
        let (asked, fault) = Default::default();
        is_eventfd.then_some(Self { fd, asked, cost, fault })
    }

    /// Checks that this kernel can ring a client's doorbell; fails without `CONFIG_AIO`. The first
    /// call measures how long a ring takes on this machine.
    pub fn probe() -> io::Result<()> {
        RingCostLimits::measured()?;
        ring_of_peer(eventfd()?.as_fd())
    }

    /// Requests a ring. False if one is already pending; it covers what is visible now as well.
    pub fn request(&self) -> bool {
        !self.asked.swap(true, Ordering::AcqRel)
    }

    /// Rings without waiting for the client. The time grows with the client's waiters.
    pub fn ring(&self) -> Result<(), ProtocolViolation> {
        self.asked.swap(false, Ordering::AcqRel);
        let (took_ns, rung) = time_of(|| ring_of_peer(self.fd.as_fd()));
        if rung.is_err() {
            self.fault.store(NO_EVENTFD, Ordering::Relaxed);
        }
        if !self.cost.add(time_ns(ClockId::Monotonic), took_ns) {
            self.fault.store(TOO_SLOW, Ordering::Relaxed);
        }
        self.fault()
    }

    /// True if the thread that moves frames may ring it: rings were short
    /// for a second, and still are. A client that adds many waiters
    /// afterwards costs that thread a hundredth of a second, or one ring.
    #[inline]
    pub fn is_trusted(&self) -> bool {
        self.cost.is_low()
    }

    /// Returns the fault that ringing has shown, if any.
    #[inline]
    pub(crate) fn fault(&self) -> Result<(), ProtocolViolation> {
        match self.fault.load(Ordering::Relaxed) {
            0 => Ok(()),
            TOO_SLOW => Err(ProtocolViolation::Waiters),
            _ => Err(ProtocolViolation::Bell),
        }
    }
}

impl AsFd for Bell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Reads a clock, nanoseconds.
fn time_ns(clock: ClockId) -> u64 {
    let now = clock_gettime(clock);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Runs `work`; returns its CPU time in nanoseconds and its result.
fn time_of<T>(work: impl FnOnce() -> T) -> (u64, T) {
    let before = time_ns(ClockId::ThreadCPUTime);
    let done = work();
    (time_ns(ClockId::ThreadCPUTime).saturating_sub(before), done)
}

/// Makes a doorbell.
pub(crate) fn eventfd() -> io::Result<OwnedFd> {
    Ok(rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

/// Rings a doorbell of this process.
pub(crate) fn ring_own(bell: BorrowedFd<'_>) {
    // Fails only if the counter is full, and then the peer is awake.
    let _ = rustix::io::write(bell, &1u64.to_ne_bytes());
}

/// Empties a doorbell of this process, without blocking.
pub(crate) fn drain(bell: BorrowedFd<'_>) {
    let mut count = [0; 8];
    // An offset of -1 stands for the file position. An empty counter is no error.
    let _ = rustix::io::preadv2(
        bell,
        &mut [IoSliceMut::new(&mut count)],
        u64::MAX,
        ReadWriteFlags::NOWAIT,
    );
}

/// Rings a doorbell that a peer made. Never blocks; fails if it is not an eventfd, or if the kernel
/// has no asynchronous I/O (`CONFIG_AIO`).
fn ring_of_peer(bell: BorrowedFd<'_>) -> io::Result<()> {
    thread_local!(static RINGER: OnceCell<Ringer> = const { OnceCell::new() });
    RINGER.with(|cell| {
        if cell.get().is_none() {
            // Only this thread sets it.
            let _ = cell.set(Ringer::new()?);
        }
        cell.get().map_or_else(|| Err(io::ErrorKind::Other.into()), |ringer| ringer.ring(bell))
    })
}

/// `struct io_event` of linux/aio_abi.h.
#[repr(C)]
#[derive(Clone, Copy)]
struct AioEvent {
    data: u64,
    object: u64,
    result: i64,
    result2: i64,
}

/// Context of asynchronous requests, one per thread.
#[derive(Debug)]
struct Ringer {
    context: libc::c_ulong,
    /// Always writable, so that polling it completes at once.
    ready: OwnedFd,
}

impl Ringer {
    fn new() -> io::Result<Self> {
        let ready = eventfd()?;
        let mut context: libc::c_ulong = 0;
        // SAFETY: io_setup writes a context to the word given, which is zero as it has to be.
        let result =
            unsafe { libc::syscall(libc::SYS_io_setup, EVENTS as libc::c_uint, &mut context) };
        if result < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { context, ready })
    }

    fn ring(&self, bell: BorrowedFd<'_>) -> io::Result<()> {
        // SAFETY: iocb is plain integers, for which zero is a value.
        let mut request: libc::iocb = unsafe { std::mem::zeroed() };
        request.aio_lio_opcode = IOCB_CMD_POLL;
        request.aio_fildes = self.ready.as_raw_fd() as u32;
        request.aio_buf = libc::POLLOUT as u64;
        request.aio_flags = IOCB_FLAG_RESFD;
        request.aio_resfd = bell.as_raw_fd() as u32;
        loop {
            let mut requests = [&mut request as *mut libc::iocb];
            // SAFETY: the context is ours; one request is given and valid during the call. A poll
            // of a ready descriptor completes inside the call and keeps no pointer.
            let submitted = unsafe {
                libc::syscall(libc::SYS_io_submit, self.context, 1, requests.as_mut_ptr())
            };
            if submitted == 1 {
                return Ok(());
            }
            let error = io::Error::last_os_error();
            match error.raw_os_error() {
                Some(libc::EINTR) => {}
                Some(libc::EAGAIN) if self.reap() > 0 => {}
                _ => return Err(error),
            }
        }
    }

    /// Reaps completions; returns how many.
    fn reap(&self) -> usize {
        let mut events = [AioEvent { data: 0, object: 0, result: 0, result2: 0 }; EVENTS];
        let now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: room for EVENTS events is given; a zero time-out does not wait.
        let count = unsafe {
            libc::syscall(
                libc::SYS_io_getevents,
                self.context,
                0 as libc::c_long,
                EVENTS as libc::c_long,
                events.as_mut_ptr(),
                &now,
            )
        };
        usize::try_from(count).unwrap_or(0)
    }
}

impl Drop for Ringer {
    fn drop(&mut self) {
        // SAFETY: the context is ours and not used afterwards.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.context) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    fn count(bell: &OwnedFd) -> u64 {
        let mut bytes = [0; 8];
        rustix::io::read(bell, &mut bytes).unwrap();
        u64::from_ne_bytes(bytes)
    }

    #[test]
    fn bell_counts_more_rings_than_the_kernel_queues() {
        let bell = eventfd().unwrap();
        for _ in 0..10_000 {
            ring_of_peer(bell.as_fd()).unwrap();
        }
        assert_eq!(count(&bell), 10_000);
    }

    #[test]
    fn a_full_blocking_counter_does_not_hang() {
        let bell = rustix::event::eventfd(0, EventfdFlags::empty()).unwrap();
        rustix::io::write(&bell, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        ring_of_peer(bell.as_fd()).unwrap();
        ring_of_peer(bell.as_fd()).unwrap();
        drain(bell.as_fd());
        drain(bell.as_fd()); // empty and blocking
    }

    #[test]
    fn bell_refuses_descriptors_other_than_eventfds() {
        let (a, _b) = rustix::pipe::pipe().unwrap();
        assert!(ring_of_peer(a.as_fd()).is_err());
        assert!(ring_of_peer(tempfile::tempfile().unwrap().as_fd()).is_err());
        assert!(ring_of_peer(eventfd().unwrap().as_fd()).is_ok());
        assert!(Bell::of_peer(a).is_none());
        assert!(Bell::of_peer(tempfile::tempfile().unwrap().into()).is_none());
        assert!(Bell::of_peer(eventfd().unwrap()).is_some_and(|bell| bell.ring().is_ok()));
    }

    const MS: u64 = 1_000_000;
    const US: u64 = 1_000;

    /// Returns the number of the first ring that is a fault, if any. Each ring takes `took_ns` and
    /// follows the previous one after `every_ns`.
    fn fault(cost: &RingCost, rings: u64, every_ns: u64, took_ns: u64) -> Option<u64> {
        (1..=rings).find(|ring| !cost.add(ring * every_ns, took_ns))
    }

    /// Waking one thread there takes as long as waking many waiters on an ordinary machine.
    #[test]
    fn slow_rings_of_a_slow_machine_are_tolerated() {
        let cost = |own_ns| RingCost::new(RingCostLimits::new(own_ns), 0);
        let (slow, ordinary) = (cost(8 * US), cost(US / 2));
        assert_eq!(fault(&slow, 10_000, MS, 110 * US), None);
        assert!(slow.is_low());
        assert_eq!(fault(&ordinary, 10_000, MS, 110 * US), Some(222));
        assert!(!ordinary.is_low());
        assert_eq!(fault(&slow, 10_000, MS, 700 * US), None);
        // Nor is a thread that had the CPU meanwhile. 50,000 waiters are a fault on either machine.
        assert_eq!(fault(&cost(8 * US), 8, MS, 9 * MS), None);
        assert_eq!(fault(&cost(8 * US), 100, MS, 9 * MS), Some(19));
        assert_eq!(fault(&cost(US / 2), 100, MS, 7 * MS), Some(3));
    }

    #[test]
    fn slow_rings_become_a_fault_by_their_rate() {
        let fault = |every_ns, took_ns| {
            fault(&RingCost::new(RingCostLimits::new(US / 2), 0), 100_000, every_ns, took_ns)
        };
        assert_eq!(fault(100 * MS, 60 * US), None);
        assert_eq!(fault(MS, 49 * US), None);
        assert_eq!(fault(5 * MS, 99 * US), None);
        assert!(fault(4 * MS, 100 * US).is_some());
        // Regardless of how long one takes.
        assert_eq!(fault(3_000 * MS, 2_000 * MS), Some(3));
    }

    /// Returns a function that extends a list of epoll instances to a given count. Each waits 500
    /// times for the eventfd, once for each of its descriptor numbers.
    fn waiters(bell: &OwnedFd) -> impl FnMut(usize) {
        use rustix::event::epoll;
        let numbers: Vec<_> = (0..500).map(|_| bell.try_clone().unwrap()).collect();
        let mut instances = vec![];
        move |count| {
            while instances.len() < count {
                let instance = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
                let data = epoll::EventData::new_u64(0);
                for number in &numbers {
                    epoll::add(&instance, number, data, epoll::EventFlags::IN).unwrap();
                }
                instances.push(instance);
            }
        }
    }

    #[test]
    fn bell_is_trusted_until_it_has_many_waiters() {
        let bell = eventfd().unwrap();
        let mut wait = waiters(&bell);
        let bell = Bell::of_peer(bell.try_clone().unwrap()).unwrap();
        bell.ring().unwrap();
        assert!(!bell.is_trusted());
        std::thread::sleep(std::time::Duration::from_nanos(TRUST_NS));
        bell.ring().unwrap();
        assert!(bell.is_trusted());
        wait(100);
        let rings = (0..20).take_while(|_| bell.ring().is_ok() && bell.is_trusted()).count();
        assert!(rings < 20);
    }

    #[test]
    fn bell_with_too_many_waiters_is_a_fault() {
        let bell = eventfd().unwrap();
        let mut wait = waiters(&bell);
        let bell = Bell::of_peer(bell.try_clone().unwrap()).unwrap();
        wait(1);
        for _ in 0..1000 {
            let _ = bell.ring();
        }
        assert_eq!(bell.fault(), Ok(()));
        wait(100);
        let rings = (0..200).find(|_| bell.ring().is_err()).expect("a fault") + 1;
        assert!(rings >= 3, "{rings}");
        assert_eq!(bell.fault(), Err(ProtocolViolation::Waiters));
    }
}
