//! What all vnets of a worker share: time, packets, external interfaces, and the way to sleep.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use pdp_afxdp::Packet;
use rustix::event::epoll;

use crate::external::External;
use crate::meter::Meter;
use crate::packets::Packets;
use crate::peer::{Alarm, Pulled};
use crate::trace::Tracer;
use crate::wake::Wake;

/// A connection that a worker gave up, for the thread that keeps the control sockets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dropped {
    /// The connection's number.
    pub epoch: u64,
    /// Why, for the peer.
    pub reason: String,
    /// Whether the peer broke the contract.
    pub fault: bool,
}

/// Room to collect packets in, taken while it is used; kept so that nothing is allocated.
#[derive(Debug, Default)]
pub struct Scratch {
    /// For frames that leave by a port.
    pub leaving: Vec<Packet>,
    /// For frames that a shaper lets go.
    pub going: Vec<Packet>,
    /// For packets that come back.
    pub back: Vec<Packet>,
    /// For frames of one port from a socket or a vlink.
    pub run: Vec<Packet>,
    /// For what peers sent.
    pub pulled: Pulled,
}

/// Shared by all stages of one worker.
#[derive(Debug)]
pub struct Core {
    /// Nanoseconds since the worker started, as of the beginning of this round.
    pub now_ns: u64,
    /// When sleeping peers are woken.
    pub alarm: Alarm,
    /// Packets.
    pub packets: Packets,
    /// External interfaces by slot.
    pub externals: Vec<Option<External>>,
    /// Traces.
    pub tracer: Tracer,
    /// Room to collect packets in.
    pub scratch: Scratch,
    /// What each stage takes.
    pub meter: Meter,
    /// What the worker waits for.
    pub connections: Connections,
    start: Instant,
    start_wall_ns: u64,
}

/// Doorbells that are taken note of at a time; those beyond have their turn the next time.
const RUNG_MAX: usize = 64;

/// No vnet has this slot.
const NOBODY: u64 = u64::MAX;

/// What a worker's sleep ends for, and the way to the thread that keeps the control sockets.
#[derive(Debug)]
pub struct Connections {
    epoll: OwnedFd,
    dropped: Sender<Dropped>,
    keeper: Arc<Wake>,
}

impl Core {
    /// `keeper` is woken for what is sent to `dropped`.
    pub fn new(
        packets: Packets,
        dropped: Sender<Dropped>,
        keeper: Arc<Wake>,
    ) -> std::io::Result<Self> {
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Ok(Self {
            now_ns: 0,
            alarm: Alarm::default(),
            packets,
            externals: vec![],
            tracer: Tracer::default(),
            scratch: Scratch::default(),
            meter: Meter::default(),
            connections: Connections {
                epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?,
                dropped,
                keeper,
            },
            start: Instant::now(),
            start_wall_ns: wall.as_nanos() as u64,
        })
    }

    /// Sets the time.
    pub fn tick(&mut self) {
        self.now_ns = self.start.elapsed().as_nanos() as u64;
    }

    /// Time of day as of the beginning of this round, nanoseconds since 1970.
    pub fn wall_ns(&self) -> u64 {
        self.start_wall_ns + self.now_ns
    }

    /// The external interface in `slot`.
    pub fn external(&mut self, slot: usize) -> Option<&mut External> {
        self.externals.get_mut(slot)?.as_mut()
    }
}

impl Connections {
    /// Lets `fd` end the worker's sleep when it is readable.
    pub fn watch(&self, fd: &impl AsFd) -> std::io::Result<()> {
        self.add(fd, NOBODY)
    }

    /// The same for a doorbell of the vnet in `slot`.
    pub fn watch_for(&self, slot: u16, fd: &impl AsFd) -> std::io::Result<()> {
        self.add(fd, slot.into())
    }

    fn add(&self, fd: &impl AsFd, data: u64) -> std::io::Result<()> {
        let data = epoll::EventData::new_u64(data);
        Ok(epoll::add(&self.epoll, fd, data, epoll::EventFlags::IN)?)
    }

    /// Takes [`Connections::watch`] back; needed before `fd` is closed where another process has
    /// it too.
    pub fn unwatch(&self, fd: &impl AsFd) {
        // Fails only if it was not watched.
        let _ = epoll::delete(&self.epoll, fd);
    }

    /// Blocks until something that is watched is readable, at most `nanoseconds`. `rung` gets the
    /// slots of vnets whose doorbells are.
    pub fn sleep(&self, nanoseconds: u64, rung: &mut Vec<u16>) {
        let timeout = rustix::event::Timespec {
            tv_sec: (nanoseconds / 1_000_000_000) as i64,
            tv_nsec: (nanoseconds % 1_000_000_000) as i64,
        };
        let mut events = [MaybeUninit::uninit(); RUNG_MAX];
        // A signal ends the sleep as well.
        if let Ok((events, _)) = epoll::wait(&self.epoll, &mut events, Some(&timeout)) {
            let slots = events.iter().map(|event| event.data.u64());
            rung.extend(slots.filter_map(|slot| u16::try_from(slot).ok()));
        }
    }

    /// Has the connection's control socket closed.
    pub fn end(&self, dropped: Dropped) {
        // The keeper ends with the process only.
        let _ = self.dropped.send(dropped);
        self.keeper.ring();
    }
}
