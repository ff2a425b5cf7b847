//! The built-in IPv4 and IPv6 router: [`pdp_ip`] as a program on the runtime.

use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

pub use pdp_ip::{Decision, Fib, FrameBatch, IpForwarder};
use pdp_ip::{FollowerDeadline, MirrorFollower, MirrorSocket};
use pdp_proto::routes::ToGuest;
use rustix::event::PollFlags;

use crate::{Batch, ForwardingProgram, NextPoll, Outbox};

/// Messages applied per call (about half a microsecond each).
const MESSAGES_STEP: usize = 64;

/// Time between two attempts to connect.
const RECONNECT_INTERVAL: Duration = Duration::from_millis(200);

impl FrameBatch for Batch<'_> {
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

/// State of the connection to the mirror.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MirrorStatus {
    /// True if there is a mirror.
    pub connected: bool,
    /// True if its whole snapshot is applied.
    pub synced: bool,
    /// Connections made.
    pub connections: u64,
    /// Messages applied.
    pub messages: u64,
}

/// Connection to the route mirror, or the wait for one. After an end of
/// file or invalid bytes, it reconnects after [`RECONNECT_INTERVAL`]. The
/// tables stay as they are until the new mirror's snapshot replaces them.
#[derive(Debug)]
struct MirrorConnection {
    path: PathBuf,
    guest: u32,
    connection: Option<MirrorSocket>,
    connections: u64,
    connect_at: Option<Instant>,
    follower: MirrorFollower,
    /// Origin of the follower's times.
    since: Instant,
}

impl MirrorConnection {
    fn new(path: &Path, guest: u32) -> Self {
        Self {
            path: path.into(),
            guest,
            connection: None,
            connections: 0,
            connect_at: None,
            follower: MirrorFollower::default(),
            since: Instant::now(),
        }
    }

    /// Continues connecting or applying messages, for some tens of microseconds.
    fn poll(&mut self, fib: &mut Fib, now: Instant) -> NextPoll {
        if self.connection.is_none() && self.connect_at.is_none_or(|at| now >= at) {
            match MirrorSocket::open(&self.path, self.guest) {
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
        match self.follower.poll(fib, self.connection.as_mut(), now_ns, go_on) {
            Ok(FollowerDeadline::Now) => NextPoll::More,
            Ok(FollowerDeadline::At(at)) => {
                let at = at.map(|ns| self.since + Duration::from_nanos(ns));
                let connect_at = self.connect_at.filter(|_| self.connection.is_none());
                NextPoll::Until(at.into_iter().chain(connect_at).min())
            }
            Err(_) => {
                self.connection = None;
                self.follower.restart();
                self.connect_at = Some(now + RECONNECT_INTERVAL);
                NextPoll::Until(self.connect_at)
            }
        }
    }
}

/// The router, as a program on the runtime.
#[derive(Debug)]
pub struct RouterProgram {
    fib: Fib,
    forwarder: IpForwarder,
    mirror: MirrorConnection,
}

impl RouterProgram {
    /// Makes a router without routes. As guest number `guest`,
    /// it gets them from the mirror that listens at `routes`.
    pub fn new(routes: &Path, guest: u32) -> Self {
        Self {
            fib: Fib::default(),
            forwarder: IpForwarder::default(),
            mirror: MirrorConnection::new(routes, guest),
        }
    }

    /// The tables.
    pub fn fib(&self) -> &Fib {
        &self.fib
    }

    /// State of the connection to the mirror.
    pub fn status(&self) -> MirrorStatus {
        let MirrorConnection { connection, connections, follower, .. } = &self.mirror;
        MirrorStatus {
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

impl ForwardingProgram for RouterProgram {
    fn process(&mut self, batch: &mut Batch<'_>) {
        self.forwarder.process(&mut self.fib, batch);
    }

    fn poll(&mut self, now: Instant, _outbox: &mut Outbox<'_>) -> NextPoll {
        self.mirror.poll(&mut self.fib, now)
    }

    fn wake_by(&self) -> Vec<(BorrowedFd<'_>, PollFlags)> {
        self.mirror.connection.iter().map(|it| (it.as_fd(), it.wants())).collect()
    }
}
