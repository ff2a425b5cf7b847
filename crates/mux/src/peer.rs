//! Forwarding guests: their channels, and their outstanding frames.

use std::collections::VecDeque;

use pdp_afxdp::PacketBuffer;
use pdp_model::GuestStats;
use pdp_proto::mux::{AttachMode, GuestConfig as Spec};
use pdp_wire::tag;

use crate::channel::PeerConnection;
use crate::distribute::GuestLoads;
use crate::order::CompletionOrder;

/// Frames that a guest can have outstanding: both rings and
/// a batch, for rings of any length that memif permits.
pub const OUTSTANDING_MAX: usize = (2 << pdp_memif::RING_LOG2_MAX) + 1024;

/// Vports of the frames that a guest has, oldest first.
#[derive(Debug, Default)]
pub struct Outstanding(VecDeque<u8>);

const _: () = assert!(tag::VPORTS_MAX == 256, "a vport is one byte");

impl Outstanding {
    /// Returns the number of frames.
    #[inline]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// True if there are no frames.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds frames of a node whose first port is `first`.
    #[inline]
    pub fn push(&mut self, first: u16, frames: &[PacketBuffer]) {
        self.0.extend(frames.iter().map(|packet| (packet.port - first) as u8));
    }

    /// Removes the oldest `frames`. If there are fewer, changes nothing and returns false.
    #[inline]
    pub fn pop(&mut self, frames: usize) -> bool {
        let enough = frames <= self.len();
        if enough {
            self.0.drain(..frames);
        }
        enough
    }

    /// Removes all frames.
    pub fn drain(&mut self) -> impl Iterator<Item = u8> {
        self.0.drain(..)
    }
}

/// A forwarding guest.
#[derive(Debug)]
pub struct MuxGuest {
    /// Configuration.
    pub spec: Spec,
    /// Connections: one, or by vport for [`AttachMode::Memif`].
    pub links: Vec<Option<Box<PeerConnection>>>,
    /// Frames that it has not completed.
    pub outstanding: Outstanding,
    /// Counters, except `connected` and `in_flight`.
    pub stats: GuestStats,
    /// Frames and completions that the mux has taken from it.
    pub(crate) taken: u64,
    pub(crate) silent: Silence,
}

/// Time for which a guest has completed nothing.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Silence {
    /// Frames that it had completed, and that the mux had taken from it, at the last check.
    completed: u64,
    taken: u64,
    /// Consecutive checks at which the guest had frames
    /// and had completed none since the last check.
    checks: u32,
}

impl MuxGuest {
    /// Counts a breach of the contract. The tenant can read the reason.
    pub(crate) fn fault(&mut self, fault: String) {
        self.stats.faults += 1;
        self.stats.last_fault = Some(fault);
    }

    /// Creates a guest that is not connected yet.
    pub fn new(spec: Spec, ports: usize) -> Self {
        let count = if spec.attach == AttachMode::Memif { ports } else { 1 };
        Self {
            outstanding: Outstanding::default(),
            spec,
            links: (0..count).map(|_| None).collect(),
            stats: GuestStats::default(),
            taken: 0,
            silent: Silence::default(),
        }
    }

    /// True if frames can be given to it.
    pub fn is_connected(&self) -> bool {
        self.links.iter().any(Option::is_some)
    }

    /// True if frames shall be given to it.
    pub fn is_member(&self) -> bool {
        self.is_connected() && !self.spec.leaving
    }

    /// Returns how many completions may be taken from it now. A guest without
    /// outstanding frames sends frames of its own, which wait for no other guest.
    #[inline]
    pub fn allowance(&self, order: &CompletionOrder) -> usize {
        match self.spec.attach {
            AttachMode::Runtime if !self.outstanding.is_empty() => {
                order.allowance(self.spec.number)
            }
            AttachMode::Runtime | AttachMode::Tap | AttachMode::Memif => 1,
        }
    }

    /// Checks for progress. Returns for how many consecutive checks it has completed
    /// nothing although it had frames. A check does not count if the mux left the
    /// guest's frames untaken. Frames that it sends beside completions are no progress.
    pub fn silence(&mut self) -> u32 {
        let mut links = self.links.iter_mut().flatten();
        let has_sent = links.any(|link| link.channel.has_sent());
        let Silence { completed, taken, checks } = self.silent;
        let waits = has_sent && taken == self.taken;
        let outstanding = !self.outstanding.is_empty() && !waits;
        let checks = if outstanding && completed == self.stats.completed { checks + 1 } else { 0 };
        self.silent = Silence { completed: self.stats.completed, taken: self.taken, checks };
        checks
    }

    /// Continues where `old`, the same guest, stopped.
    pub fn take_over(&mut self, old: &mut Self) {
        std::mem::swap(&mut self.outstanding, &mut old.outstanding);
        std::mem::swap(&mut self.stats, &mut old.stats);
        (self.taken, self.silent) = (old.taken, old.silent);
        self.links.iter_mut().zip(&mut old.links).for_each(|(place, link)| *place = link.take());
    }
}

impl GuestLoads for [MuxGuest] {
    fn room(&mut self, guest: usize) -> usize {
        let guest = &mut self[guest];
        let rooms = guest.links.iter_mut().flatten().map(|link| link.channel.room());
        rooms.max().unwrap_or(0).min(OUTSTANDING_MAX.saturating_sub(guest.outstanding.len()))
    }

    fn given(&self, guest: usize) -> u64 {
        self[guest].stats.to_guest
    }

    fn done(&self, guest: usize) -> u64 {
        self[guest].stats.to_guest - self[guest].outstanding.len() as u64
    }
}
