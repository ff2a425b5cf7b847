//! The built-in IPv4 and IPv6 router: [`pdp_ip`] as a program on the runtime.

use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use pdp_ip::{Connection, Due, Follower};
pub use pdp_ip::{Decision, Fib, Forwarder, Frames};
use pdp_proto::routes::ToGuest;
use rustix::event::PollFlags;

use crate::{Batch, Outbox, Program, Tended};

/// Messages applied in one go (about half a microsecond each).
const MESSAGES_STEP: usize = 64;

/// Between two attempts to connect.
const RECONNECT_INTERVAL: Duration = Duration::from_millis(200);

impl Frames for Batch<'_> {
    #[inline]
    fn count(&self) -> usize {
        self.len()
    }

    #[inline]
    fn vport(&self, frame: usize) -> u16 {
        self.vport(frame)
    }

    #[inline]
    fn bytes(&self, frame: usize) -> &[u8] {
        self.frame(frame)
    }

    #[inline]
    fn bytes_mut(&mut self, frame: usize) -> &mut [u8] {
        self.frame_mut(frame)
    }

    #[inline]
    fn cut(&mut self, frame: usize, bytes: usize) {
        self.set_len(frame, bytes);
    }

    #[inline]
    fn decide(&mut self, frame: usize, decision: Decision) {
        match decision {
            Decision::Out(vport) => self.forward(frame, vport),
            Decision::Punt(class) => self.punt(frame, class),
            Decision::Drop(reason) => self.drop(frame, reason),
        }
    }
}

/// How the connection to the mirror is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Status {
    /// There is a mirror.
    pub connected: bool,
    /// Its snapshot is applied in whole.
    pub synced: bool,
    /// Connections made.
    pub connections: u64,
    /// Messages applied.
    pub messages: u64,
}

/// The connection to the route mirror, or the wait for one. One that ends, or whose bytes make no sense, is made anew
/// after [`RECONNECT_INTERVAL`]; the tables stay as they are until the new mirror's snapshot replaces them.
#[derive(Debug)]
struct Mirror {
    path: PathBuf,
    guest: u32,
    connection: Option<Connection>,
    connections: u64,
    connect_at: Option<Instant>,
    follower: Follower,
    /// What the follower's times are counted from.
    since: Instant,
}

impl Mirror {
    fn new(path: &Path, guest: u32) -> Self {
        Self {
            path: path.into(),
            guest,
            connection: None,
            connections: 0,
            connect_at: None,
            follower: Follower::default(),
            since: Instant::now(),
        }
    }

    /// Goes on with whatever is to be done, for some tens of microseconds.
    fn tend(&mut self, fib: &mut Fib, now: Instant) -> Tended {
        if self.connection.is_none() && self.connect_at.is_none_or(|at| now >= at) {
            match Connection::open(&self.path, self.guest) {
                Ok(connection) => {
                    self.connection = Some(connection);
                    self.connections += 1;
                }
                Err(_) => self.connect_at = Some(now + RECONNECT_INTERVAL),
            }
        }
        let now_ns = now.saturating_duration_since(self.since).as_nanos() as u64;
        let mut left = MESSAGES_STEP;
        let go_on = || {
            left -= 1;
            left > 0
        };
        match self.follower.tend(fib, self.connection.as_mut(), now_ns, go_on) {
            Ok(Due::Now) => Tended::More,
            Ok(Due::At(at)) => {
                let at = at.map(|ns| self.since + Duration::from_nanos(ns));
                let connect_at = self.connect_at.filter(|_| self.connection.is_none());
                Tended::Until(at.into_iter().chain(connect_at).min())
            }
            Err(_) => {
                self.connection = None;
                self.follower.restart();
                self.connect_at = Some(now + RECONNECT_INTERVAL);
                Tended::Until(self.connect_at)
            }
        }
    }
}

/// The router, as a program on the runtime.
#[derive(Debug)]
pub struct Router {
    fib: Fib,
    forwarder: Forwarder,
    mirror: Mirror,
}

impl Router {
    /// A router without routes, which gets them as guest number `guest` from the mirror that
    /// listens at `routes`.
    pub fn new(routes: &Path, guest: u32) -> Self {
        Self {
            fib: Fib::default(),
            forwarder: Forwarder::default(),
            mirror: Mirror::new(routes, guest),
        }
    }

    /// The tables.
    pub fn fib(&self) -> &Fib {
        &self.fib
    }

    /// How the connection to the mirror is.
    pub fn status(&self) -> Status {
        let Mirror { connection, connections, follower, .. } = &self.mirror;
        Status {
            connected: connection.is_some(),
            synced: follower.is_synced(),
            connections: *connections,
            messages: follower.messages(),
        }
    }

    /// Applies one message as if the mirror had sent it.
    pub fn apply(&mut self, message: ToGuest) {
        self.fib.apply(message);
    }
}

impl Program for Router {
    fn process(&mut self, batch: &mut Batch<'_>) {
        self.forwarder.process(&mut self.fib, batch);
    }

    fn tend(&mut self, now: Instant, _outbox: &mut Outbox<'_>) -> Tended {
        self.mirror.tend(&mut self.fib, now)
    }

    fn wake_by(&self) -> Vec<(BorrowedFd<'_>, PollFlags)> {
        self.mirror.connection.iter().map(|it| (it.as_fd(), it.wants())).collect()
    }
}
