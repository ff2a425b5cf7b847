//! Where frames come from outside, and where they go: one interface, whatever is behind it.
//!
//! Kinds: [`socket`] (AF_XDP and packet sockets), [`program`] (memif), [`crate::generator`], and [`path`] (another
//! worker's exit). Frames are wrapped before they are given to an exit, and counted at their port when it takes them
//! ([`crate::leave`]); an exit does not know of vnets and ports.

pub mod path;
pub mod program;
pub mod socket;

use std::any::Any;
use std::fmt;
use std::os::fd::BorrowedFd;

use pdp_proto::mux::ExternalStats;

use crate::connections::Connections;
use crate::counters::{ExternalCounters, Reason};
use crate::packets::{Batch, Packets};
use crate::sleep::Alarm;

/// Frames taken from one exit in one round.
pub const RECEIVE_FRAMES: usize = 256;

/// Free packets that exits leave for frames from guests.
pub const KEEP_FREE: usize = 1024;

/// What an exit works with.
pub struct Tools<'a> {
    /// Nanoseconds since the worker started.
    pub now_ns: u64,
    /// Counters of its external interface.
    pub counters: &'a mut ExternalCounters,
    /// Packets.
    pub packets: &'a mut Packets,
    /// What becomes of connections that end.
    pub connections: &'a Connections,
    /// When programs that sleep are rung.
    pub alarm: &'a mut Alarm,
    /// For packets that come back; empty between calls.
    pub back: &'a mut Batch,
}

/// One of the places behind an external interface, as the worker has it that owns it.
pub trait Exit: Any + fmt::Debug + Send {
    /// Appends frames from outside, at most [`RECEIVE_FRAMES`]. It is told how many there is room for: what has
    /// none stays with a sender that can keep it. Returns when to come again at the latest, nanoseconds.
    fn receive(&mut self, _: usize, _: &mut Tools<'_>, _: &mut Batch) -> Option<u64> {
        None
    }

    /// Lends it packets to receive into.
    fn fill(&mut self, _: &mut Packets) {}

    /// Takes back the packets of frames that are out, and counts these.
    fn complete(&mut self, _: &mut Tools<'_>) {}

    /// Frames that [`Exit::send`] takes now.
    fn room(&mut self) -> usize;

    /// Takes frames from the front of `frames` as long as there is room. Returns why others are left.
    fn send(&mut self, tools: &mut Tools<'_>, frames: &mut Batch) -> Reason;

    /// Lets the other side see what was sent.
    fn flush(&mut self, _: &mut Tools<'_>) {}

    /// Has it ring when something comes; false if something has.
    fn arm(&mut self, _: &mut Tools<'_>) -> bool {
        true
    }

    /// It is looked at from now on, and need not ring.
    fn disarm(&mut self, _: u64) {}

    /// What is readable when something comes, if it does not ring.
    fn socket(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// How long the worker may sleep at the most on its account, nanoseconds.
    fn sleep_ns(&self) -> u64 {
        u64::MAX
    }

    /// Adds what it alone knows.
    fn count(&self, _: &mut ExternalStats) {}

    /// Closes it, which may take long: not for a worker. Returns the packets that it held.
    fn close(self: Box<Self>) -> Batch {
        vec![]
    }
}
