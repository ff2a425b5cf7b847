//! The descriptors that end a worker's sleep, and the
//! channel by which a worker gives up connections.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::Sender;

use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};

use crate::channel::PeerConnection;
use crate::wake::Wake;

/// Time after which a worker checks a peer whose doorbell is unreliable,
/// nanoseconds: DPDK's memif has no fence between its ring and its doorbell.
pub const UNSURE_SLEEP_NS: u64 = 5_000_000;

/// Doorbells that one call collects. The next call collects the rest.
const RUNG_MAX: usize = 64;

/// Fraction of a sleep by which the kernel may prolong it (`select_estimate_accuracy` in its
/// fs/select.c). The worker asks for a sleep that much shorter, and sleeps again for the rest.
const LATE_PART: u64 = 1000;

const NOW: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// Value that is no vnet's slot.
const NOBODY: u64 = u64::MAX;

/// An object that a worker gave up. The peer listener's
/// thread drops it, because that may take long.
#[derive(Debug)]
pub enum Dropped {
    /// A connection.
    Connection(Ended),
    /// Memory that holds no frame any more.
    Memory(Box<[u8]>),
}

/// A connection that a worker gave up.
#[derive(Debug)]
pub struct Ended {
    /// The connection's number.
    pub epoch: u64,
    /// Reason, for the peer.
    pub reason: String,
    /// True if the peer broke the contract.
    pub fault: bool,
    /// The connection's remains. Dropping them may take as long as the peer wants.
    pub link: Box<PeerConnection>,
    /// The set that watches its doorbell.
    pub watch: SleepWatch,
}

/// Descriptors that end a worker's sleep. Any thread may change them.
#[derive(Clone, Debug)]
pub struct SleepWatch(Arc<OwnedFd>);

/// A worker's sleep set, and its channel to the thread of the peer listener.
#[derive(Debug)]
pub struct WorkerConnections {
    /// Descriptors that end the sleep.
    pub watch: SleepWatch,
    dropped: Sender<Dropped>,
    listener_wake: Arc<Wake>,
}

impl SleepWatch {
    /// Ends the worker's sleep while `fd` is readable.
    pub fn add(&self, fd: &impl AsFd) -> io::Result<()> {
        self.add_as(fd, NOBODY, epoll::EventFlags::IN)
    }

    /// Ends the sleep each time that a peer rings its doorbell. `slot`
    /// is the slot of its vnet. May take as long as the peer wants, as
    /// may [`SleepWatch::remove`], so the worker itself must not call it.
    pub fn add_bell(&self, slot: Option<u16>, bell: &impl AsFd) -> io::Result<()> {
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
        self.add_as(bell, slot.map_or(NOBODY, u64::from), flags)
    }

    fn add_as(&self, fd: &impl AsFd, data: u64, flags: epoll::EventFlags) -> io::Result<()> {
        Ok(epoll::add(&*self.0, fd, epoll::EventData::new_u64(data), flags)?)
    }

    /// Stops watching `fd`. Required before `fd` is closed if another process holds it too.
    pub fn remove(&self, fd: &impl AsFd) {
        // Fails only if `fd` was not watched.
        let _ = epoll::delete(&*self.0, fd);
    }
}

impl WorkerConnections {
    /// Creates the set. What the worker sends to `dropped` wakes `listener_wake`.
    pub fn new(dropped: Sender<Dropped>, listener_wake: Arc<Wake>) -> io::Result<Self> {
        let watch = SleepWatch(Arc::new(epoll::create(epoll::CreateFlags::CLOEXEC)?));
        Ok(Self { watch, dropped, listener_wake })
    }

    /// Blocks until a watched descriptor or one of `sockets` is readable, or for
    /// `nanoseconds` at most if the thread has no timer slack. May return earlier.
    ///
    /// `sockets` are passed for each sleep rather than watched permanently. The
    /// kernel would notify the watch for each frame that such a socket has sent.
    pub fn sleep<'a>(&'a self, nanoseconds: u64, sockets: impl Iterator<Item = BorrowedFd<'a>>) {
        let nanoseconds = nanoseconds - nanoseconds / LATE_PART;
        let timeout = Timespec {
            tv_sec: (nanoseconds / 1_000_000_000) as i64,
            tv_nsec: (nanoseconds % 1_000_000_000) as i64,
        };
        let all = std::iter::once(self.watch.0.as_fd()).chain(sockets);
        let mut all: Vec<_> = all.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
        // A signal ends the sleep as well.
        let _ = poll(&mut all, Some(&timeout));
    }

    /// Adds to `rung` the slots of vnets whose doorbells were rung.
    pub fn rung(&self, rung: &mut Vec<u16>) {
        let mut events = [MaybeUninit::uninit(); RUNG_MAX];
        if let Ok((events, _)) = epoll::wait(&*self.watch.0, &mut events, Some(&NOW)) {
            let slots = events.iter().map(|event| event.data.u64());
            rung.extend(slots.filter_map(|slot| u16::try_from(slot).ok()));
        }
    }

    /// Gives up a connection. `reason` is for the peer. Another
    /// thread releases its resources and closes its control socket.
    pub fn end(&self, link: Box<PeerConnection>, reason: &str, fault: bool) {
        let (epoch, reason, watch) = (link.epoch, reason.to_string(), self.watch.clone());
        self.give_up(Dropped::Connection(Ended { epoch, reason, fault, link, watch }));
    }

    /// Lets another thread free memory, because freeing much takes long.
    pub fn free(&self, memory: Box<[u8]>) {
        self.give_up(Dropped::Memory(memory));
    }

    fn give_up(&self, dropped: Dropped) {
        // The peer listener ends only with the process.
        let _ = self.dropped.send(dropped);
        self.listener_wake.ring();
    }
}
