//! Order in which the mux forwards frames that come back from a vrouter's guests.
//!
//! Guests complete their frames in the order in which they took them, so the mux need
//! only remember turns. Frames are given to guests in *turns*: some consecutive frames
//! to one guest. Completions are taken only from the guest of the oldest turn, as many
//! as the turn had frames. Meanwhile the completions of other guests wait in their own
//! rings, in their own memory. When these rings are full, the guests stop. Then their
//! rings from the mux fill, and only frames of this vrouter find no space. No time-outs
//! are needed: a drop is a completion, too, and the turns of a dead guest are forgotten.
//!
//! With the policy `ordered`, every frame is noted. By flow and flowlet, no frame is
//! noted, and the completions of all guests are taken freely. The exception is a
//! *barrier* when members join or leave. Frames that guests had before it are
//! forwarded, in any order among the guests, before frames that were given after it. So
//! a flow that moves keeps its order. Policies that promise no order have no barriers.
//!
//! Source: the problem is that of PdP (VISA'09), Table 1: 10 to 13 % of the packets reordered.

use std::collections::VecDeque;

/// Consecutive frames of one guest or, at a barrier, all frames that a guest had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct CompletionRun {
    /// Position in the order. Turns with the same position
    /// complete in any order, before those with later positions.
    place: u64,
    /// The guest's number.
    guest: u32,
    /// Frames that the guest has not completed yet.
    frames: usize,
}

/// Order of completions.
#[derive(Clone, Debug, Default)]
pub struct CompletionOrder {
    runs: VecDeque<CompletionRun>,
    /// Positions used so far.
    places: u64,
}

impl CompletionOrder {
    /// Notes that `frames` were given to `guest`. They are
    /// forwarded after all frames that were given before.
    #[inline]
    pub fn note(&mut self, guest: u32, frames: usize) {
        let mut last = self.runs.iter_mut().rev();
        let (run, before) = (last.next(), last.next().map(|run| run.place));
        match run {
            Some(run) if run.guest == guest && before != Some(run.place) => run.frames += frames,
            _ => {
                self.places += 1;
                self.add(guest, frames);
            }
        }
    }

    /// Adds a barrier. The frames that the guests have now (guest number and
    /// count of frames) are forwarded before frames that are given to them later.
    pub fn barrier(&mut self, guests: impl IntoIterator<Item = (u32, usize)>) {
        self.places += 1;
        for (guest, holds) in guests {
            let runs = self.runs.iter().filter(|run| run.guest == guest);
            let noted: usize = runs.map(|run| run.frames).sum();
            self.add(guest, holds.saturating_sub(noted));
        }
    }

    fn add(&mut self, guest: u32, frames: usize) {
        if frames > 0 {
            self.runs.push_back(CompletionRun { place: self.places, guest, frames });
        }
    }

    /// Returns the index of `guest`'s turn, if its completions may be taken now.
    #[inline]
    fn run_of(&self, guest: u32) -> Option<usize> {
        let first = self.runs.front()?.place;
        let mut next = self.runs.iter().take_while(|run| run.place == first);
        next.position(|run| run.guest == guest)
    }

    /// Returns how many completions may be taken from `guest` now.
    #[inline]
    pub fn allowance(&self, guest: u32) -> usize {
        match self.run_of(guest) {
            Some(at) => self.runs[at].frames,
            None if self.runs.is_empty() => usize::MAX,
            None => 0,
        }
    }

    /// Returns a guest that others have to wait for, if there is one.
    pub fn awaited(&self) -> Option<u32> {
        self.runs.front().map(|run| run.guest)
    }

    /// Notes that `frames` completions were taken from `guest`, within its allowance.
    #[inline]
    pub fn completed(&mut self, guest: u32, frames: usize) {
        if let Some(at) = self.run_of(guest) {
            let run = &mut self.runs[at];
            run.frames = run.frames.saturating_sub(frames);
            if run.frames == 0 {
                self.runs.remove(at);
            }
        }
    }

    /// Forgets `guest` and the frames that it had.
    pub fn forget(&mut self, guest: u32) {
        self.runs.retain(|run| run.guest != guest);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::distribute::{Distributor, GuestCandidate, GuestLoads};
    use pdp_proto::mux::{FlowKey, GuestDistribution};
    use std::collections::HashSet;
    use std::hash::{DefaultHasher, Hash, Hasher};

    const RING: usize = 2;

    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    enum Is {
        Gone,
        Member,
        Leaving,
    }

    #[derive(Clone, Debug, Hash)]
    struct Guest {
        is: Is,
        /// Frames that it took and has not completed.
        taken: Vec<u8>,
        /// Frames that it completed and the mux has not taken back.
        done: Vec<u8>,
        given: u64,
    }

    impl GuestLoads for Vec<Guest> {
        fn room(&mut self, guest: usize) -> usize {
            RING - self[guest].taken.len()
        }

        fn given(&self, guest: usize) -> u64 {
            self[guest].given
        }

        fn done(&self, guest: usize) -> u64 {
            self[guest].given - (self[guest].taken.len() + self[guest].done.len()) as u64
        }
    }

    /// A vrouter with its guests, small enough to explore every interleaving.
    #[derive(Clone, Debug)]
    struct World {
        policy: GuestDistribution,
        /// One frame of each flow.
        flows: Vec<Vec<u8>>,
        distributor: Distributor,
        order: CompletionOrder,
        guests: Vec<Guest>,
        /// Frames still to arrive. They are numbered as they arrive.
        left: u8,
        /// Flow of each arrived frame, by number.
        arrived: Vec<u8>,
        /// Deaths, joins and leaves still to happen.
        changes: u8,
        sent: Vec<u8>,
        /// Frames lost with dead guests, or for want of space.
        lost: usize,
    }

    impl World {
        fn new(policy: GuestDistribution, left: u8, changes: u8) -> Self {
            let numbers = [0, 1, 2];
            let candidates = numbers.map(|number| GuestCandidate { number, weight: 1 });
            let of = |policy| Distributor::new(policy, FlowKey::Ip, &candidates, 4);
            let guest = |is| Guest { is, taken: vec![], done: vec![], given: 0 };
            let mut world = Self {
                policy,
                flows: vec![vec![0; 60]],
                distributor: of(GuestDistribution::Flow),
                order: CompletionOrder::default(),
                guests: [Is::Member, Is::Member, Is::Gone].map(guest).to_vec(),
                left,
                arrived: vec![],
                changes,
                sent: vec![],
                lost: 0,
            };
            world.redistribute();
            if policy != GuestDistribution::Ordered {
                // Another flow that goes to the other guest.
                let mut pick = |frame: &[u8]| world.distributor.pick(frame, &mut world.guests);
                let first = pick(&world.flows[0]);
                let mut others = (1..=255).map(|byte| [[byte; 14].to_vec(), vec![0; 46]].concat());
                let other = others.find(|frame| pick(frame) != first).unwrap();
                world.flows.push(other);
            }
            world.distributor = of(policy);
            world.redistribute();
            world
        }

        fn redistribute(&mut self) {
            let guests = self.guests.iter().enumerate();
            let members = guests.clone().filter(|(_, it)| it.is == Is::Member).map(|(at, _)| at);
            let holds = guests.map(|(at, it)| (at as u32, it.taken.len() + it.done.len()));
            self.distributor.set_members(members, holds, &mut self.order);
        }

        fn after(&self, step: impl FnOnce(&mut Self)) -> Self {
            let mut world = self.clone();
            step(&mut world);
            world
        }

        fn arrive(&mut self, flow: usize) {
            let number = self.arrived.len() as u8;
            self.arrived.push(flow as u8);
            self.left -= 1;
            let pick = self.distributor.pick(&self.flows[flow], &mut self.guests);
            let full = |it: &Guest| it.is != Is::Member || it.taken.len() == RING;
            let Some((guest, count)) = pick else {
                assert!(self.guests.iter().all(|it| it.is != Is::Member));
                self.lost += 1;
                return;
            };
            assert!(count > 0 && self.guests[guest].is == Is::Member);
            if full(&self.guests[guest]) {
                self.distributor.gave(0);
                self.lost += 1;
                let has = self.guests[guest].taken.iter().chain(&self.guests[guest].done);
                let mut flows = has.map(|number| usize::from(self.arrived[usize::from(*number)]));
                let may_move = match self.policy {
                    GuestDistribution::Flow => false,
                    GuestDistribution::Flowlet => flows.all(|had| had != flow),
                    _ => true,
                };
                assert!(!may_move || self.guests.iter().all(full), "refused: {self:?}");
                return;
            }
            self.guests[guest].taken.push(number);
            self.guests[guest].given += 1;
            if self.distributor.is_ordered() {
                self.order.note(guest as u32, 1);
            }
            self.distributor.gave(1);
        }

        fn change(&mut self, guest: usize, is: Is) {
            self.changes -= 1;
            let changed = &mut self.guests[guest];
            changed.is = is;
            if is == Is::Gone {
                self.lost += changed.taken.drain(..).len() + changed.done.drain(..).len();
                self.order.forget(guest as u32);
            }
            self.redistribute();
        }

        /// Returns the states after each possible next step.
        fn steps(&self) -> Vec<World> {
            let mut next = vec![];
            if self.left > 0 {
                next.extend((0..self.flows.len()).map(|flow| self.after(|it| it.arrive(flow))));
            }
            for (at, guest) in self.guests.iter().enumerate() {
                // The guest completes one, if its ring has space.
                if !guest.taken.is_empty() && guest.done.len() < RING {
                    next.push(self.after(|it| {
                        let done = it.guests[at].taken.remove(0);
                        it.guests[at].done.push(done);
                    }));
                }
                // The mux takes as many as it may.
                let count = self.order.allowance(at as u32).min(guest.done.len());
                if count > 0 {
                    next.push(self.after(|it| {
                        it.sent.extend(it.guests[at].done.drain(..count));
                        it.order.completed(at as u32, count);
                    }));
                }
            }
            next
        }

        fn changes(&self) -> impl Iterator<Item = World> {
            let all = 0..if self.changes > 0 { self.guests.len() } else { 0 };
            let to = all.flat_map(|at| [Is::Gone, Is::Member, Is::Leaving].map(|is| (at, is)));
            let to = to.filter(|&(at, is)| match self.guests[at].is {
                Is::Gone => is == Is::Member,
                now => now != is,
            });
            to.map(|(at, is)| self.after(|it| it.change(at, is)))
        }

        fn check(&self) {
            for flow in 0..self.flows.len() {
                let of = self
                    .sent
                    .iter()
                    .filter(|at| usize::from(self.arrived[usize::from(**at)]) == flow);
                assert!(of.is_sorted(), "{self:?}");
            }
        }

        fn key(&self) -> u64 {
            let mut hasher = DefaultHasher::new();
            let first = self.order.runs.front().map_or(0, |run| run.place);
            for run in &self.order.runs {
                (run.place - first, run.guest, run.frames).hash(&mut hasher);
            }
            self.distributor.state().hash(&mut hasher);
            (&self.guests, self.left, &self.arrived, self.changes).hash(&mut hasher);
            (&self.sent, self.lost).hash(&mut hasher);
            hasher.finish()
        }
    }

    /// Explores all interleavings of arrivals, completions, takings, deaths, joins and
    /// leaves, with the distributor. Frames are forwarded in order. None is sent twice,
    /// and none is lost except with a dead guest or for want of space. Nothing ever hangs.
    #[test]
    fn completion_order_holds_in_every_interleaving() {
        for (policy, frames) in [
            (GuestDistribution::Ordered, 5),
            (GuestDistribution::Flow, 4),
            (GuestDistribution::Flowlet, 4),
        ] {
            let (mut seen, mut open) = (HashSet::new(), vec![World::new(policy, frames, 2)]);
            let mut ends = 0;
            while let Some(world) = open.pop() {
                world.check();
                let next = world.steps();
                if next.is_empty() {
                    assert_eq!(world.sent.len() + world.lost, usize::from(frames), "{world:?}");
                    assert!(world.order.runs.is_empty(), "{world:?}");
                    ends += 1;
                }
                let next = next.into_iter().chain(world.changes());
                open.extend(next.filter(|world| seen.insert(world.key())));
            }
            assert!(ends > 100 && seen.len() > 10_000, "{policy:?}: {ends}, {} states", seen.len());
            println!("{policy:?}: {ends} ends of {} states", seen.len());
        }
    }

    /// Before a barrier, guests do not wait for each other. Turns follow each other.
    #[test]
    fn barrier_delays_only_later_frames() {
        let mut order = CompletionOrder::default();
        let allowances = |order: &CompletionOrder| [1, 2, 3].map(|guest| order.allowance(guest));
        assert_eq!(allowances(&order), [usize::MAX; 3]);
        order.barrier([(1, 2), (2, 0), (3, 1)]);
        assert_eq!(allowances(&order), [2, 0, 1]);
        order.completed(1, 1);
        // Guest 1 got four more and guest 2 one. Then comes another barrier.
        order.barrier([(1, 5), (2, 1), (3, 1)]);
        assert_eq!(allowances(&order), [1, 0, 1]);
        order.completed(3, 1);
        assert_eq!(allowances(&order), [1, 0, 0]);
        // Frames in turns follow all of that.
        order.note(2, 1);
        order.completed(1, 1);
        assert_eq!(allowances(&order), [4, 1, 0]);
        order.completed(2, 1);
        assert_eq!(allowances(&order), [4, 0, 0]);
        order.forget(1);
        assert_eq!(allowances(&order), [0, 1, 0]);
        order.completed(2, 1);
        assert_eq!(allowances(&order), [usize::MAX; 3]);
    }
}
