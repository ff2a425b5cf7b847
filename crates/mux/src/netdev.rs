//! Netdevs: the drivers by which an external interface receives and sends frames.
//!
//! Kinds: [`socket`] (AF_XDP and packet sockets), [`program`] (memif),
//! [`crate::generator`], and [`path`] (another worker's netdev). Frames are
//! encapsulated before a netdev gets them, and counted at their port when it
//! takes them ([`crate::egress`]). A netdev knows nothing of vnets and ports.

pub mod path;
pub mod program;
pub mod socket;

use pdp_model::ExternalStats;
use std::any::Any;
use std::fmt;
use std::os::fd::BorrowedFd;

use crate::connections::WorkerConnections;
use crate::counters::{ExternalCounters, Reason};
use crate::packets::{PacketBatch, Packets};
use crate::sleep::Alarm;

/// Frames taken from one netdev in one round.
pub const RECEIVE_FRAMES: usize = 256;

/// Free packets that netdevs leave for frames from guests.
pub const KEEP_FREE: usize = 1024;

/// Context in which a netdev works.
pub struct NetdevContext<'a> {
    /// Nanoseconds since the worker started.
    pub now_ns: u64,
    /// Counters of its external interface.
    pub counters: &'a mut ExternalCounters,
    /// Free packets.
    pub packets: &'a mut Packets,
    /// Channel for connections that end.
    pub connections: &'a WorkerConnections,
    /// Decides when sleeping programs are woken.
    pub alarm: &'a mut Alarm,
    /// Buffer for packets that a netdev gives back; empty between calls.
    pub back: &'a mut PacketBatch,
}

/// A netdev of an external interface, at the worker that owns it.
pub trait NetdevDriver: Any + fmt::Debug + Send {
    /// Appends frames from outside, at most [`RECEIVE_FRAMES`]. The first argument
    /// is the number of frames that can be queued; a sender that can keep frames
    /// gives no more. Returns the latest time of the next call, nanoseconds.
    fn receive(&mut self, _: usize, _: &mut NetdevContext<'_>, _: &mut PacketBatch) -> Option<u64> {
        None
    }

    /// Gives it packets to receive into.
    fn fill(&mut self, _: &mut Packets) {}

    /// Takes back the packets of frames that were transmitted, and counts the frames.
    fn complete(&mut self, _: &mut NetdevContext<'_>) {}

    /// Returns how many frames [`NetdevDriver::send`] takes now.
    fn room(&mut self) -> usize;

    /// Takes frames from the front of `frames` as long as
    /// it has space. Returns the drop reason for the rest.
    fn send(&mut self, tools: &mut NetdevContext<'_>, frames: &mut PacketBatch) -> Reason;

    /// Shows the sent frames to the other side.
    fn flush(&mut self, _: &mut NetdevContext<'_>) {}

    /// Lets the other side ring when it sends something. False if it already has.
    fn arm(&mut self, _: &mut NetdevContext<'_>) -> bool {
        true
    }

    /// Polls the other side from now on, which need not ring.
    fn disarm(&mut self, _: u64) {}

    /// Returns a descriptor that becomes readable when frames arrive, if the netdev does not ring.
    fn socket(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Returns how long the worker may sleep without checking this netdev, nanoseconds.
    fn sleep_ns(&self) -> u64 {
        u64::MAX
    }

    /// Adds the counters that only the netdev has.
    fn count(&self, _: &mut ExternalStats) {}

    /// Closes it and returns the packets that it had. May take long, so a worker must not call it.
    fn close(self: Box<Self>) -> PacketBatch {
        vec![]
    }
}
