//! Sleeping peers, and when to wake them.
//!
//! A peer is in one state towards its worker:
//!
//! | state | from the peer | to the peer |
//! |---|---|---|
//! | [`PeerPollState::Polled`] | polled at each visit to its vnet; it does not ring | it knows of all frames that it was shown |
//! | [`PeerPollState::Waiting`] | as above | it was shown frames and was not rung for them yet: it may sleep |
//! | [`PeerPollState::Armed`] | not polled; it rings | it knows of all frames |
//!
//! A waiting peer is rung before it is armed. A peer that is shown frames is no longer armed. A
//! vnet goes idle when all of its peers are armed. The worker sleeps when the peers of all vnets
//! are armed. A peer that has been quiet for long is armed while its vnet stays active. So frames
//! that were shown to a sleeping peer have been rung for, or a worker that is awake will ring.
//!
//! `pdp_memif` stores and loads flags and indices (its `idle.rs` is checked with
//! loom). The model test here shows that no wake-up is forgotten beyond that.

use std::collections::HashMap;

use crate::ringers::{BellRequest, RungFor};

/// Frames for which a sleeping peer is rung although the worker has other work.
/// Being woken costs a guest that shares its CPU with 63 others some 17 µs.
pub const WAKE_FRAMES: u16 = 256;

/// Time after which it is rung for fewer frames, nanoseconds.
pub const WAKE_NS: u64 = 100_000;

/// Average time between such rings, nanoseconds, because each costs the
/// machine 2 to 8 µs. The owner with the fewest recent rings is next.
pub const WAKE_EACH_NS: u64 = 80_000;

/// Burst of such rings.
const WAKE_BURST: u64 = 8;

/// Time after which a peer is rung regardless of the number of rings,
/// nanoseconds. Rings are also counted by owner for this long.
const WAKE_NS_MAX: u64 = 20_000_000;

/// State of a peer; see the table above.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum PeerPollState {
    /// Polled, and it knows of all frames.
    #[default]
    Polled,
    /// Polled, and it may have missed frames that it was shown.
    Waiting {
        /// Time when it was shown the first of these, nanoseconds.
        since_ns: u64,
    },
    /// It rings.
    Armed,
}

/// Notifications to and from a peer.
pub trait WakeablePeer {
    /// Type of the peer's breach of the contract.
    type Fault;
    /// Shows the pushed frames to the peer. True if there were any.
    fn show(&mut self) -> Result<bool, Self::Fault>;
    /// True if the frames shown since the last ring are
    /// worth a ring: [`WAKE_FRAMES`], or half of its ring.
    fn is_worth(&self) -> bool;
    /// True if the peer may wait for space towards the worker, and has enough by now.
    fn awaits_room(&mut self) -> bool;
    /// Rings the peer, if it sleeps, for all frames that it was shown, and for space.
    fn ring(&mut self, alarm: &mut Alarm) -> Result<(), Self::Fault>;
    /// Lets the peer ring from now on. Returns false and
    /// changes nothing if it has already sent something.
    fn arm(&mut self) -> bool;
    /// Tells the peer not to ring any more.
    fn disarm(&mut self);
}

/// Decides when sleeping peers are rung, and collects the bells to ring.
#[derive(Debug, Default)]
pub struct Alarm {
    now_ns: u64,
    busy: bool,
    /// Time up to which rings are used up at their rate, nanoseconds.
    rung_ns: u64,
    /// Rings for few frames since `counted_ns`, by owner.
    counts: HashMap<RungFor, u64>,
    counted_ns: u64,
    /// Owner with the fewest rings that was refused one:
    /// the owner, its count, and the time, nanoseconds.
    first: Option<(RungFor, u64, u64)>,
    /// Owner of the peers that are being flushed.
    pub owner: RungFor,
    /// Bells to ring.
    pub bells: Vec<BellRequest>,
}

impl Alarm {
    /// Begins a round. `busy` is true if the worker has other work than to ring for few frames.
    pub fn next(&mut self, now_ns: u64, busy: bool) {
        (self.now_ns, self.busy) = (now_ns, busy);
    }

    /// Returns the value that was passed to [`Alarm::next`].
    pub fn is_busy(&self) -> bool {
        self.busy
    }

    /// True if a peer shall be rung now. It was shown frames since
    /// `since_ns` and not rung for them. `worth` is true if there are many.
    #[inline]
    fn rings(&mut self, worth: bool, since_ns: u64) -> bool {
        if !self.busy {
            return true;
        }
        let waited_ns = self.now_ns.saturating_sub(since_ns);
        let rings = worth || waited_ns >= WAKE_NS && self.has_ring(waited_ns);
        // A peer that waited too long takes no ring away from others.
        if rings && (worth || waited_ns < WAKE_NS_MAX) {
            // Many rings that were worth it must not delay others for long afterwards.
            let burst_ns = WAKE_BURST * WAKE_EACH_NS;
            let rung_ns = self.rung_ns.max(self.now_ns.saturating_sub(burst_ns)) + WAKE_EACH_NS;
            self.rung_ns = rung_ns.min(self.now_ns + burst_ns);
        }
        rings
    }

    /// True if the owner may ring for few frames, which then counts. This requires
    /// that rings are left, and that no owner with fewer rings waits for one.
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

impl PeerPollState {
    /// True if the worker need not poll the peer.
    #[inline]
    pub fn is_armed(self) -> bool {
        self == Self::Armed
    }

    /// Shows the pushed frames to the peer. Rings it when its time comes, or now if `at_once`.
    #[inline]
    pub fn flush<P: WakeablePeer + ?Sized>(
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

    /// Lets the peer ring from now on, and rings it for frames that it may have missed.
    /// False if it has sent something; its state is then unchanged, except that it was rung.
    pub fn arm<P: WakeablePeer + ?Sized>(
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

    /// Polls the peer again, which no longer rings.
    pub fn disarm<P: WakeablePeer + ?Sized>(&mut self, peer: &mut P) {
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

    /// Frames that arrive for the peer, and frames that it originates.
    const FRAMES: u8 = 3;
    /// Slots of the ring from the peer.
    const RING: u8 = 2;

    /// A worker and one peer, small enough to explore every interleaving.
    #[derive(Clone, Debug, PartialEq, Eq, Hash)]
    struct World {
        worker_sleeps: bool,
        worker_rung: bool,
        state: PeerPollState,
        line: Line,
        /// Frames still to arrive, and frames that the peer has still to send.
        left: u8,
        to_send: u8,
    }

    /// The two rings, and the peer's side of them.
    #[derive(Clone, Debug, PartialEq, Eq, Hash)]
    struct Line {
        pushed: u8,
        shown: u8,
        unheard: u8,
        /// Shown frames that the peer has taken.
        taken: u8,
        /// Frames in the ring from the peer.
        sent: u8,
        /// True if the ring was full when the worker last took from it.
        full: bool,
        /// True if the worker wants to be rung; true if the peer does.
        worker_armed: bool,
        peer_armed: bool,
        peer: Life,
        peer_rung: bool,
    }

    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    enum Life {
        Awake,
        /// It has armed its doorbell, and checks once more.
        Looks,
        Sleeps,
    }

    impl WakeablePeer for Line {
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
            if let PeerPollState::Waiting { since_ns } = &mut world.state {
                *since_ns = 0;
            }
            world
        }

        fn has_something(&self) -> bool {
            self.line.taken < self.line.shown || self.to_send > 0 && self.line.sent < RING
        }

        /// Returns the states after each possible next step.
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
                // A quiet peer in an active vnet; then the worker itself.
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

        /// True if every wait of both sides will end.
        fn every_wait_ends(&self) -> bool {
            let line = &self.line;
            let peer_waits = line.peer == Life::Sleeps && !line.peer_rung && self.has_something();
            // A worker that is awake rings once the peer has waited, or when it has taken enough.
            let will_ring = !self.worker_sleeps
                && (matches!(self.state, PeerPollState::Waiting { .. })
                    || line.full
                    || line.sent == RING);
            let worker_waits = line.sent > 0 && self.state.is_armed() && !self.worker_rung;
            (!peer_waits || will_ring) && !worker_waits
        }
    }

    /// Even if peers were often rung for many frames, a peer that waits for few gets its ring soon.
    #[test]
    fn alarm_rings_a_quiet_peer_after_many_rings() {
        let mut alarm = Alarm::default();
        alarm.next(1_000_000, true);
        (0..100_000).for_each(|_| assert!(alarm.rings(true, 1_000_000)));
        assert!(!alarm.rings(false, 1_000_000 - WAKE_NS), "not at once");
        alarm.next(1_000_000 + WAKE_BURST * WAKE_EACH_NS, true);
        assert!(alarm.rings(false, 1_000_000));
    }

    /// Other vnets have more sleepers than there are rings. A peer with a few frames
    /// now and then is still rung soon, and the total of rings does not grow.
    #[test]
    fn sleepers_of_one_vnet_delay_only_that_vnet() {
        const ROUND_NS: u64 = 10_000;
        const ROUNDS: u64 = 100_000;
        let mut alarm = Alarm::default();
        // Start of each wait: 600 peers of one vnet that always wait, and one peer of another.
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
        // Up to [`WAKE_BURST`] rings of others may have come first.
        assert!(slowest_ns <= 2 * (WAKE_NS + WAKE_BURST * WAKE_EACH_NS), "{slowest_ns}");
        // In addition to the rate, peers that waited for [`WAKE_NS_MAX`].
        let time_ns = ROUNDS * ROUND_NS;
        let most = time_ns / WAKE_EACH_NS + greedy.len() as u64 * (time_ns / WAKE_NS_MAX);
        assert!(rings <= most, "{rings} of {most}");
    }

    /// Explores all interleavings of the worker's and the peer's steps.
    /// No frame waits for a wake-up that neither side will send.
    #[test]
    fn every_waiting_frame_has_a_pending_wakeup() {
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
            state: PeerPollState::Polled,
            line,
            left: FRAMES,
            to_send: FRAMES,
        };
        let (mut seen, mut open) = (HashSet::new(), vec![world]);
        while let Some(world) = open.pop() {
            assert!(world.every_wait_ends(), "{world:?}");
            if world.worker_sleeps && world.line.peer == Life::Sleeps {
                let rung = world.worker_rung || world.line.peer_rung;
                assert!(rung || !world.has_something() && world.line.sent == 0, "{world:?}");
            }
            open.extend(world.steps().into_iter().filter(|world| seen.insert(world.clone())));
        }
        assert!(seen.len() > 1_000, "{}", seen.len());
    }
}
