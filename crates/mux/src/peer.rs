//! Forwarding guests: their lanes, and what they have.

use std::collections::VecDeque;

use pdp_afxdp::Packet;
use pdp_proto::mux::{Attach, Guest as Spec, GuestStats};
use pdp_wire::tag;

use crate::distribute::Guests;
use crate::lane::Link;
use crate::order::Order;

/// Frames that a guest can have taken and not completed: both rings and a batch, for rings of any
/// length that memif allows.
pub const OUTSTANDING_MAX: usize = (2 << pdp_memif::RING_LOG2_MAX) + 1024;

/// Ports of the frames that a guest has (their places in its node), oldest first.
#[derive(Debug, Default)]
pub struct Outstanding(VecDeque<u8>);

const _: () = assert!(tag::VPORTS_MAX == 256, "a vport is one byte");

impl Outstanding {
    /// Frames in all.
    #[inline]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds frames of a node whose first port is `first`.
    #[inline]
    pub fn push(&mut self, first: u16, frames: &[Packet]) {
        self.0.extend(frames.iter().map(|packet| (packet.port - first) as u8));
    }

    /// Takes the oldest `frames` away; false (and nothing done) if there are fewer.
    #[inline]
    pub fn pop(&mut self, frames: usize) -> bool {
        let enough = frames <= self.len();
        if enough {
            self.0.drain(..frames);
        }
        enough
    }

    /// Takes all.
    pub fn drain(&mut self) -> impl Iterator<Item = u8> {
        self.0.drain(..)
    }
}

/// A forwarding guest.
#[derive(Debug)]
pub struct Guest {
    /// As configured.
    pub spec: Spec,
    /// Its connections: one, or by vport for [`Attach::Memif`].
    pub links: Vec<Option<Box<Link>>>,
    /// Frames that it has not completed.
    pub outstanding: Outstanding,
    /// Counters but for `connected` and `in_flight`.
    pub stats: GuestStats,
    /// Frames and completions that the mux has taken from it.
    pub(crate) taken: u64,
    pub(crate) silent: Silence,
}

/// For how long a guest has completed nothing.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Silence {
    /// What it had completed, and the mux had taken from it, at the last look.
    completed: u64,
    taken: u64,
    /// Looks in a row at which it had completed no more although it had frames.
    looks: u32,
}

impl Guest {
    /// Counts a breach of the contract, for the tenant to read.
    pub(crate) fn fault(&mut self, fault: String) {
        self.stats.faults += 1;
        self.stats.last_fault = Some(fault);
    }

    /// Not connected yet.
    pub fn new(spec: Spec, ports: usize) -> Self {
        let count = if spec.attach == Attach::Memif { ports } else { 1 };
        Self {
            outstanding: Outstanding::default(),
            spec,
            links: (0..count).map(|_| None).collect(),
            stats: GuestStats::default(),
            taken: 0,
            silent: Silence::default(),
        }
    }

    /// Whether frames can be given to it.
    pub fn is_connected(&self) -> bool {
        self.links.iter().any(Option::is_some)
    }

    /// Whether frames are to be given to it.
    pub fn is_member(&self) -> bool {
        self.is_connected() && !self.spec.leaving
    }

    /// How many completions may be taken from it now. What a guest that has no frame sends is its own,
    /// and waits for nobody.
    #[inline]
    pub fn allowance(&self, order: &Order) -> usize {
        match self.spec.attach {
            Attach::Runtime if !self.outstanding.is_empty() => order.allowance(self.spec.number),
            Attach::Runtime | Attach::Tap | Attach::Memif => 1,
        }
    }

    /// For how many looks in a row it has completed nothing although it had frames. What the mux did not take
    /// from it is none of its silence, but what it sends beside completions is no answer.
    pub fn silence(&mut self) -> u32 {
        let mut links = self.links.iter_mut().flatten();
        let has_sent = links.any(|link| link.lane.has_sent());
        let Silence { completed, taken, looks } = self.silent;
        let waits = has_sent && taken == self.taken;
        let owes = !self.outstanding.is_empty() && !waits;
        let looks = if owes && completed == self.stats.completed { looks + 1 } else { 0 };
        self.silent = Silence { completed: self.stats.completed, taken: self.taken, looks };
        looks
    }

    /// Goes on where `old`, the same one, stopped.
    pub fn take_over(&mut self, old: &mut Self) {
        std::mem::swap(&mut self.outstanding, &mut old.outstanding);
        std::mem::swap(&mut self.stats, &mut old.stats);
        (self.taken, self.silent) = (old.taken, old.silent);
        self.links.iter_mut().zip(&mut old.links).for_each(|(place, link)| *place = link.take());
    }
}

impl Guests for [Guest] {
    fn room(&mut self, guest: usize) -> usize {
        let guest = &mut self[guest];
        let rooms = guest.links.iter_mut().flatten().map(|link| link.lane.room());
        rooms.max().unwrap_or(0).min(OUTSTANDING_MAX.saturating_sub(guest.outstanding.len()))
    }

    fn given(&self, guest: usize) -> u64 {
        self[guest].stats.to_guest
    }

    fn done(&self, guest: usize) -> u64 {
        self[guest].stats.to_guest - self[guest].outstanding.len() as u64
    }
}
