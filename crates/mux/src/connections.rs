//! What ends a worker's sleep, and the way by which it gives up connections.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::Sender;

use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};

use crate::lane::Link;
use crate::wake::Wake;

/// Time after which a peer that may not ring is looked at, nanoseconds: DPDK's memif has no fence
/// between its ring and its doorbell.
pub const UNSURE_SLEEP_NS: u64 = 5_000_000;

/// Doorbells that are taken note of at a time; those beyond have their turn the next time.
const RUNG_MAX: usize = 64;

/// The part of a sleep that the kernel may add to it: `select_estimate_accuracy` in its fs/select.c. So the sleep is
/// asked to end earlier by as much, and what is left is another one.
const LATE_PART: u64 = 1000;

const NOW: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// No vnet has this slot.
const NOBODY: u64 = u64::MAX;

/// What a worker gave up, for the thread that keeps the control sockets: to let go of it may take long.
#[derive(Debug)]
pub enum Dropped {
    /// A connection.
    Connection(Ended),
    /// Memory that nothing is in any more.
    Memory(Box<[u8]>),
}

/// A connection that a worker gave up.
#[derive(Debug)]
pub struct Ended {
    /// The connection's number.
    pub epoch: u64,
    /// Why, for the peer.
    pub reason: String,
    /// Whether the peer broke the contract.
    pub fault: bool,
    /// What is left of it. To let go of it may take as long as the peer wants.
    pub link: Box<Link>,
    /// Where its doorbell is watched.
    pub watch: Watch,
}

/// The descriptors that end a worker's sleep; any thread may change them.
#[derive(Clone, Debug)]
pub struct Watch(Arc<OwnedFd>);

/// What a worker's sleep ends for, and the way to the thread that keeps the control sockets.
#[derive(Debug)]
pub struct Connections {
    /// What ends the sleep.
    pub watch: Watch,
    dropped: Sender<Dropped>,
    keeper: Arc<Wake>,
}

impl Watch {
    /// Lets `fd` end the worker's sleep while it is readable.
    pub fn add(&self, fd: &impl AsFd) -> io::Result<()> {
        self.add_as(fd, NOBODY, epoll::EventFlags::IN)
    }

    /// Lets a peer's doorbell end the sleep each time that it is rung; `slot` is that of its vnet. May
    /// take as long as the peer wants, as may [`Watch::remove`]: not for the worker itself.
    pub fn add_bell(&self, slot: Option<u16>, bell: &impl AsFd) -> io::Result<()> {
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
        self.add_as(bell, slot.map_or(NOBODY, u64::from), flags)
    }

    fn add_as(&self, fd: &impl AsFd, data: u64, flags: epoll::EventFlags) -> io::Result<()> {
        Ok(epoll::add(&*self.0, fd, epoll::EventData::new_u64(data), flags)?)
    }

    /// Takes it back; needed before `fd` is closed where another process has it too.
    pub fn remove(&self, fd: &impl AsFd) {
        // Fails only if it was not watched.
        let _ = epoll::delete(&*self.0, fd);
    }
}

impl Connections {
    /// `keeper` is woken for what is sent to `dropped`.
    pub fn new(dropped: Sender<Dropped>, keeper: Arc<Wake>) -> io::Result<Self> {
        let watch = Watch(Arc::new(epoll::create(epoll::CreateFlags::CLOEXEC)?));
        Ok(Self { watch, dropped, keeper })
    }

    /// Blocks until something that is watched or one of `sockets` is readable, at most `nanoseconds` where the thread's
    /// timer slack is nothing, and may end before that.
    ///
    /// Sockets are not watched all the time: of one that is, the kernel tells the watch at each frame
    /// that it has sent.
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

    /// `rung` gets the slots of vnets whose doorbells were rung.
    pub fn rung(&self, rung: &mut Vec<u16>) {
        let mut events = [MaybeUninit::uninit(); RUNG_MAX];
        if let Ok((events, _)) = epoll::wait(&*self.watch.0, &mut events, Some(&NOW)) {
            let slots = events.iter().map(|event| event.data.u64());
            rung.extend(slots.filter_map(|slot| u16::try_from(slot).ok()));
        }
    }

    /// Gives up a connection: `reason` is for the peer. Another thread lets go of what it holds and
    /// closes its control socket.
    pub fn end(&self, link: Box<Link>, reason: &str, fault: bool) {
        let (epoch, reason, watch) = (link.epoch, reason.to_string(), self.watch.clone());
        self.give_up(Dropped::Connection(Ended { epoch, reason, fault, link, watch }));
    }

    /// Has another thread free memory, which takes long where there is much.
    pub fn free(&self, memory: Box<[u8]>) {
        self.give_up(Dropped::Memory(memory));
    }

    fn give_up(&self, dropped: Dropped) {
        // The keeper ends with the process only.
        let _ = self.dropped.send(dropped);
        self.keeper.ring();
    }
}
