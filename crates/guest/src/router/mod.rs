//! The built-in IPv4 and IPv6 router.
//!
//! What is the way of every packet is done here: unicast that a route leads out of a vport to a
//! neighbour with a known link address. Everything else is punted to the control guest, whose
//! kernel does it in full: local delivery, routing protocols, ARP and neighbour discovery, ICMP
//! errors, options, fragmentation. See [`forward`] for the rules and their sources.
//!
//! Routes and neighbours come from the route mirror ([`mirror`]) into the tables ([`Fib`]), a
//! bounded piece between two batches. A router that has lost its mirror goes on with what it has.

mod fib;
mod forward;
mod group;
mod mirror;
#[cfg(test)]
mod mirror_tests;
mod neighbour;
#[cfg(test)]
mod tests;

use std::path::Path;
use std::time::Instant;

use pdp_proto::routes::ToGuest;
use rustix::event::PollFlags;
use std::os::fd::BorrowedFd;

use crate::{Batch, Outbox, Program, Tended};
pub use fib::Fib;
pub use forward::{Decision, Forwarder, Frames};
use mirror::Mirror;
pub use mirror::Status;

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
        self.mirror.status()
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
        self.mirror.wake_by()
    }
}
