//! Who sleeps, and who wakes whom.
//!
//! A peer is in one state towards its worker:
//!
//! | state | from the peer | to the peer |
//! |---|---|---|
//! | [`State::Polled`] | looked at with each visit to its vnet; it does not ring | it knows of all that it was shown |
//! | [`State::Waiting`] | as above | it was shown frames and was not rung for them yet: it may sleep |
//! | [`State::Armed`] | not looked at; it rings | it knows of all |
//!
//! A peer that waits is rung before it is armed, and who is shown something is not armed any more. A vnet rests
//! when all of its peers are armed, and the worker sleeps when those of all vnets are; one that has been quiet
//! for long is armed while its vnet goes on. So what was shown to somebody who sleeps has been rung for, or will
//! be by a worker that is awake. How flag and index are stored and loaded is `pdp_memif`'s (its `idle.rs` is
//! checked with loom); that nothing is forgotten beyond that, the test here goes through.

use crate::ringers::{Asked, RungFor};

/// Frames that a sleeping peer is rung for while the worker has other things to do: to be woken for each few
/// would cost both more than the frames.
const WAKE_FRAMES: u16 = 64;

/// Time after which it is rung for fewer, nanoseconds.
const WAKE_NS: u64 = 50_000;

/// Time that must be between such rings on average, nanoseconds: each costs the machine 2 to 8 µs.
const WAKE_EACH_NS: u64 = 10_000;

/// Rings of them that may follow at once.
const WAKE_BURST: u64 = 8;

/// Time after which a peer is rung whatever the number of rings, nanoseconds.
const WAKE_NS_MAX: u64 = 20_000_000;

/// A peer that may wait to be rung is; see the table above.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum State {
    /// Looked at, and knows of all.
    #[default]
    Polled,
    /// Looked at, and may sleep through what it was shown since then, nanoseconds.
    Waiting {
        /// When it was shown the first of it.
        since_ns: u64,
    },
    /// Rings.
    Armed,
}

/// What a peer's rings and doorbells do.
pub trait Peer {
    /// How it broke the contract.
    type Fault;
    /// Lets it see what was pushed; whether there was anything.
    fn show(&mut self) -> Result<bool, Self::Fault>;
    /// Slots that it was shown since it was last rung.
    fn unheard(&self) -> u16;
    /// Whether it may wait for room towards the worker, and has enough by now.
    fn awaits_room(&mut self) -> bool;
    /// Has it rung, if it sleeps, for all that it was shown, and for room.
    fn ring(&mut self, alarm: &mut Alarm) -> Result<(), Self::Fault>;
    /// Lets it ring from now on; false, and it does not, if it has sent something.
    fn arm(&mut self) -> bool;
    /// It is not to ring any more.
    fn disarm(&mut self);
}

/// When peers that sleep are rung, and whose bells are to be.
#[derive(Debug, Default)]
pub struct Alarm {
    now_ns: u64,
    busy: bool,
    /// Up to when rings are used up at their rate, nanoseconds.
    rung_ns: u64,
    /// Whose peers are flushed.
    pub owner: RungFor,
    /// Bells that are to be rung.
    pub bells: Vec<Asked>,
}

impl Alarm {
    /// For the next round: `busy` says that there are other things to do than to ring for few frames.
    pub fn next(&mut self, now_ns: u64, busy: bool) {
        (self.now_ns, self.busy) = (now_ns, busy);
    }

    /// As [`Alarm::next`] was told.
    pub fn is_busy(&self) -> bool {
        self.busy
    }

    /// Whether a peer that was shown `frames` in vain since `since_ns` is rung now.
    #[inline]
    fn rings(&mut self, frames: u16, since_ns: u64) -> bool {
        if !self.busy {
            return true;
        }
        let waited_ns = self.now_ns.saturating_sub(since_ns);
        let free = self.rung_ns <= self.now_ns || waited_ns >= WAKE_NS_MAX;
        let rings = frames >= WAKE_FRAMES || waited_ns >= WAKE_NS && free;
        if rings {
            let earliest_ns = self.now_ns.saturating_sub(WAKE_BURST * WAKE_EACH_NS);
            self.rung_ns = self.rung_ns.max(earliest_ns) + WAKE_EACH_NS;
        }
        rings
    }
}

impl State {
    /// Whether the worker need not look at it.
    #[inline]
    pub fn is_armed(self) -> bool {
        self == Self::Armed
    }

    /// Lets the peer see what was pushed, and has it rung when it is time, or at once.
    #[inline]
    pub fn flush<P: Peer>(
        &mut self,
        peer: &mut P,
        alarm: &mut Alarm,
        at_once: bool,
    ) -> Result<(), P::Fault> {
        if peer.show()? && !matches!(self, Self::Waiting { .. }) {
            self.disarm(peer);
            *self = Self::Waiting { since_ns: alarm.now_ns };
        }
        let rings = match *self {
            Self::Waiting { since_ns } => at_once || alarm.rings(peer.unheard(), since_ns),
            Self::Polled | Self::Armed => false,
        };
        if rings || peer.awaits_room() {
            if rings {
                *self = Self::Polled;
            }
            peer.ring(alarm)?;
        }
        Ok(())
    }

    /// Lets the peer ring from now on, and rings it for what it may not know of. False, and nothing is
    /// changed but that, if it has sent something.
    pub fn arm<P: Peer>(&mut self, peer: &mut P, alarm: &mut Alarm) -> Result<bool, P::Fault> {
        if self.is_armed() {
            return Ok(true);
        }
        self.flush(peer, alarm, true)?;
        if peer.arm() {
            *self = Self::Armed;
        }
        Ok(self.is_armed())
    }

    /// It is looked at again, and does not ring any more.
    pub fn disarm<P: Peer>(&mut self, peer: &mut P) {
        if self.is_armed() {
            peer.disarm();
            *self = Self::Polled;
        }
    }
}
