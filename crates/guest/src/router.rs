//! The built-in IPv4 and IPv6 router: [`pdp_ip`] as a program on the runtime.

use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::time::Instant;

pub use pdp_ip::{Decision, Fib, FrameBatch, IpForwarder, MirrorStatus};
use pdp_ip::{FollowerDeadline, RouteClient};
use pdp_proto::routes::ToGuest;
use rustix::event::PollFlags;

use crate::{Batch, ForwardingProgram, NextPoll, Outbox};

/// Messages applied per call (about half a microsecond each).
const MESSAGES_STEP: usize = 64;

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

/// The router, as a program on the runtime.
#[derive(Debug)]
pub struct RouterProgram {
    fib: Fib,
    forwarder: IpForwarder,
    mirror: RouteClient,
}

impl RouterProgram {
    /// Makes a router without routes. As guest number `guest`,
    /// it gets them from the mirror that listens at `routes`.
    pub fn new(routes: &Path, guest: u32) -> Self {
        Self {
            fib: Fib::default(),
            forwarder: IpForwarder::default(),
            mirror: RouteClient::new(routes, guest),
        }
    }

    /// The tables.
    pub fn fib(&self) -> &Fib {
        &self.fib
    }

    /// State of the connection to the mirror.
    pub fn status(&self) -> MirrorStatus {
        self.mirror.status()
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
        match self.mirror.poll(&mut self.fib, now, MESSAGES_STEP) {
            FollowerDeadline::Now => NextPoll::More,
            FollowerDeadline::At(at) => NextPoll::Until(at.map(|ns| self.mirror.time(ns))),
        }
    }

    fn wake_by(&self) -> Vec<(BorrowedFd<'_>, PollFlags)> {
        self.mirror.socket().map(|it| (it.as_fd(), it.wants())).into_iter().collect()
    }
}
