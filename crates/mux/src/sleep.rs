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

use std::collections::HashMap;

use crate::ringers::{Asked, RungFor};

/// Frames that a sleeping peer is rung for while the worker has other things to do: to be woken costs a guest
/// that shares its CPU with 63 others some 17 µs.
pub const WAKE_FRAMES: u16 = 256;

/// Time after which it is rung for fewer, nanoseconds.
pub const WAKE_NS: u64 = 100_000;

/// Time that must be between such rings on average, nanoseconds: each costs the machine 2 to 8 µs. Who has
/// had the fewest of them of late is the next.
pub const WAKE_EACH_NS: u64 = 80_000;

/// Rings of them that may follow at once.
const WAKE_BURST: u64 = 8;

/// Time after which a peer is rung whatever the number of rings, nanoseconds; and for which it is counted who
/// had how many.
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
    /// Whether what it was shown since it was last rung is worth a ring: [`WAKE_FRAMES`], or half of its ring.
    fn is_worth(&self) -> bool;
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
    /// Rings for few frames since `counted_ns`, of all who wanted any.
    counts: HashMap<RungFor, u64>,
    counted_ns: u64,
    /// Who was refused one when it had had the fewest, how many, and when, nanoseconds.
    first: Option<(RungFor, u64, u64)>,
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

    /// Whether a peer is rung now that was shown frames since `since_ns` and not rung for them; `worth` says
    /// whether there are many.
    #[inline]
    fn rings(&mut self, worth: bool, since_ns: u64) -> bool {
        if !self.busy {
            return true;
        }
        let waited_ns = self.now_ns.saturating_sub(since_ns);
        let rings = worth || waited_ns >= WAKE_NS && self.has_ring(waited_ns);
        // Who waited for too long takes nobody's ring away.
        if rings && (worth || waited_ns < WAKE_NS_MAX) {
            // Many rings that were worth it are no reason to leave others asleep for long after.
            let burst_ns = WAKE_BURST * WAKE_EACH_NS;
            let rung_ns = self.rung_ns.max(self.now_ns.saturating_sub(burst_ns)) + WAKE_EACH_NS;
            self.rung_ns = rung_ns.min(self.now_ns + burst_ns);
        }
        rings
    }

    /// Whether the owner may ring for few frames, which counts then: if there are rings left, and nobody waits
    /// for one who has had fewer.
    fn has_ring(&mut self, waited_ns: u64) -> bool {
        if self.now_ns.saturating_sub(self.counted_ns) >= WAKE_NS_MAX {
            self.counted_ns = self.now_ns;
            self.counts.clear();
        }
        let (owner, now_ns) = (self.owner, self.now_ns);
        let count = self.counts.entry(owner).or_default();
        let first =
            self.first.filter(|(_, _, since_ns)| now_ns.saturating_sub(*since_ns) < WAKE_NS);
        let waits = first.is_some_and(|(first, had, _)| first != owner && had < *count);
        let has = self.rung_ns <= now_ns && !waits || waited_ns >= WAKE_NS_MAX;
        if has {
            self.first = first.filter(|(first, ..)| *first != owner);
        } else if !waits {
            self.first = Some((owner, *count, now_ns));
        }
        *count += u64::from(has);
        has
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
    pub fn flush<P: Peer + ?Sized>(
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
            Self::Waiting { since_ns } => at_once || alarm.rings(peer.is_worth(), since_ns),
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
    pub fn arm<P: Peer + ?Sized>(
        &mut self,
        peer: &mut P,
        alarm: &mut Alarm,
    ) -> Result<bool, P::Fault> {
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
    pub fn disarm<P: Peer + ?Sized>(&mut self, peer: &mut P) {
        if self.is_armed() {
            peer.disarm();
            *self = Self::Polled;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;
    use std::convert::Infallible;

    /// Frames that arrive for the peer, and that it makes by itself.
    const FRAMES: u8 = 3;
    /// Slots of the ring from the peer.
    const RING: u8 = 2;

    /// A worker and one peer, small enough to go through everything that can happen.
    #[derive(Clone, Debug, PartialEq, Eq, Hash)]
    struct World {
        worker_sleeps: bool,
        worker_rung: bool,
        state: State,
        line: Line,
        /// Frames that did not arrive yet, and that the peer has to send.
        left: u8,
        to_send: u8,
    }

    /// The two rings, and the peer's half of them.
    #[derive(Clone, Debug, PartialEq, Eq, Hash)]
    struct Line {
        pushed: u8,
        shown: u8,
        unheard: u8,
        /// Of what was shown the peer has taken so many.
        taken: u8,
        /// In the ring from the peer.
        sent: u8,
        /// The ring was full when the worker last took from it.
        full: bool,
        /// Whether the worker wants to be rung, and the peer.
        worker_armed: bool,
        peer_armed: bool,
        peer: Life,
        peer_rung: bool,
    }

    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    enum Life {
        Awake,
        /// It has armed its doorbell, and looks once more.
        Looks,
        Sleeps,
    }

    impl Peer for Line {
        type Fault = Infallible;

        fn show(&mut self) -> Result<bool, Infallible> {
            let pushed = std::mem::take(&mut self.pushed);
            self.unheard += pushed;
            self.shown += pushed;
            Ok(pushed > 0)
        }

        fn is_worth(&self) -> bool {
            self.unheard >= 2
        }

        fn awaits_room(&mut self) -> bool {
            let room = self.full && self.sent <= RING / 2;
            self.full &= !room;
            room
        }

        fn ring(&mut self, _: &mut Alarm) -> Result<(), Infallible> {
            self.unheard = 0;
            self.peer_rung |= std::mem::take(&mut self.peer_armed);
            Ok(())
        }

        fn arm(&mut self) -> bool {
            self.worker_armed = self.sent == 0;
            self.worker_armed
        }

        fn disarm(&mut self) {
            self.worker_armed = false;
        }
    }

    impl World {
        fn with(&self, change: impl FnOnce(&mut World)) -> World {
            let mut world = self.clone();
            change(&mut world);
            if let State::Waiting { since_ns } = &mut world.state {
                *since_ns = 0;
            }
            world
        }

        fn has_something(&self) -> bool {
            self.line.taken < self.line.shown || self.to_send > 0 && self.line.sent < RING
        }

        /// Everything that can happen next.
        fn steps(&self) -> Vec<World> {
            let mut next = vec![];
            if self.worker_rung {
                next.push(self.with(|it| {
                    (it.worker_sleeps, it.worker_rung) = (false, false);
                    it.state.disarm(&mut it.line);
                }));
            }
            if !self.worker_sleeps {
                if self.left > 0 {
                    next.push(self.with(|it| {
                        it.left -= 1;
                        it.line.pushed += 1;
                    }));
                }
                for (busy, now_ns) in [(false, 0), (true, 0), (true, WAKE_NS)] {
                    let alarm = Alarm { now_ns, busy, ..Alarm::default() };
                    next.push(self.with(|it| it.visit(alarm)));
                }
                // One that is quiet, in an awake vnet; then the worker itself.
                for sleeps in [false, true] {
                    next.push(self.with(|it| {
                        let mut alarm = Alarm { busy: true, ..Alarm::default() };
                        let Ok(armed) = it.state.arm(&mut it.line, &mut alarm);
                        it.worker_sleeps = armed && sleeps;
                    }));
                }
            }
            match self.line.peer {
                Life::Awake => {
                    if self.line.taken < self.line.shown {
                        next.push(self.with(|it| it.line.taken += 1));
                    }
                    if self.to_send > 0 && self.line.sent < RING {
                        next.push(self.with(|it| {
                            it.to_send -= 1;
                            it.line.sent += 1;
                            it.worker_rung |= it.line.worker_armed;
                        }));
                    }
                    next.push(self.with(|it| {
                        (it.line.peer, it.line.peer_armed) = (Life::Looks, true);
                    }));
                }
                Life::Looks => next.push(self.with(|it| {
                    let stays = it.has_something();
                    it.line.peer = if stays { Life::Awake } else { Life::Sleeps };
                    it.line.peer_armed &= !stays;
                })),
                Life::Sleeps => {}
            }
            if self.line.peer == Life::Sleeps && self.line.peer_rung {
                next.push(self.with(|it| {
                    (it.line.peer, it.line.peer_rung) = (Life::Awake, false);
                    it.line.peer_armed = false;
                }));
            }
            next
        }

        fn visit(&mut self, mut alarm: Alarm) {
            let Ok(()) = self.state.flush(&mut self.line, &mut alarm, false);
            if !self.state.is_armed() && self.line.sent > 0 {
                self.line.full |= self.line.sent == RING;
                self.line.sent -= 1;
            }
            let Ok(()) = self.state.flush(&mut self.line, &mut alarm, false);
        }

        /// Whether somebody owes what each side waits for.
        fn is_owed(&self) -> bool {
            let line = &self.line;
            let peer_waits = line.peer == Life::Sleeps && !line.peer_rung && self.has_something();
            // A worker that is awake rings once it has waited, or when it has taken enough.
            let owed = !self.worker_sleeps
                && (matches!(self.state, State::Waiting { .. }) || line.full || line.sent == RING);
            let worker_waits = line.sent > 0 && self.state.is_armed() && !self.worker_rung;
            (!peer_waits || owed) && !worker_waits
        }
    }

    /// However often peers were rung for many frames, one that waits for few has its turn soon after.
    #[test]
    fn many_rings_leave_nobody_asleep() {
        let mut alarm = Alarm::default();
        alarm.next(1_000_000, true);
        (0..100_000).for_each(|_| assert!(alarm.rings(true, 1_000_000)));
        assert!(!alarm.rings(false, 1_000_000 - WAKE_NS), "not at once");
        alarm.next(1_000_000 + WAKE_BURST * WAKE_EACH_NS, true);
        assert!(alarm.rings(false, 1_000_000));
    }

    /// Beside vnets with more sleepers than there are rings, one with a few frames now and then is rung for them
    /// soon; and there are no more rings in all.
    #[test]
    fn sleepers_of_one_vnet_delay_no_other() {
        const ROUND_NS: u64 = 10_000;
        const ROUNDS: u64 = 100_000;
        let mut alarm = Alarm::default();
        // When each began to wait: 600 of a vnet that always do, and one of another.
        let mut greedy: [u64; 600] = std::array::from_fn(|at| at as u64 * WAKE_NS_MAX / 600);
        let mut modest = None;
        let (mut rings, mut slowest_ns) = (0, 0);
        for round in 1..ROUNDS {
            let now_ns = round * ROUND_NS;
            alarm.next(now_ns, true);
            alarm.owner = RungFor::Vnet(1);
            for since_ns in &mut greedy {
                if alarm.rings(false, *since_ns) {
                    (*since_ns, rings) = (now_ns, rings + 1);
                }
            }
            alarm.owner = RungFor::Vnet(2);
            let since_ns = *modest.get_or_insert(now_ns);
            if alarm.rings(false, since_ns) {
                (modest, rings) = (None, rings + 1);
                slowest_ns = slowest_ns.max(now_ns - since_ns);
            }
        }
        // Up to [`WAKE_BURST`] rings of others were on time before.
        assert!(slowest_ns <= 2 * (WAKE_NS + WAKE_BURST * WAKE_EACH_NS), "{slowest_ns}");
        // Beside the rate, those who wait for [`WAKE_NS_MAX`].
        let time_ns = ROUNDS * ROUND_NS;
        let most = time_ns / WAKE_EACH_NS + greedy.len() as u64 * (time_ns / WAKE_NS_MAX);
        assert!(rings <= most, "{rings} of {most}");
    }

    /// In every order of everything that the two can do: no frame waits for a wake-up that nobody owes.
    #[test]
    fn no_frame_waits_for_a_wake_up_that_nobody_owes() {
        let line = Line {
            pushed: 0,
            shown: 0,
            unheard: 0,
            taken: 0,
            sent: 0,
            full: false,
            worker_armed: false,
            peer_armed: false,
            peer: Life::Awake,
            peer_rung: false,
        };
        let world = World {
            worker_sleeps: false,
            worker_rung: false,
            state: State::Polled,
            line,
            left: FRAMES,
            to_send: FRAMES,
        };
        let (mut seen, mut open) = (HashSet::new(), vec![world]);
        while let Some(world) = open.pop() {
            assert!(world.is_owed(), "{world:?}");
            if world.worker_sleeps && world.line.peer == Life::Sleeps {
                let rung = world.worker_rung || world.line.peer_rung;
                assert!(rung || !world.has_something() && world.line.sent == 0, "{world:?}");
            }
            open.extend(world.steps().into_iter().filter(|world| seen.insert(world.clone())));
        }
        assert!(seen.len() > 1_000, "{}", seen.len());
    }
}
