//! In which order what comes back from the guests of a vrouter is sent on.
//!
//! Guests complete their frames in the order in which they took them. So it is enough to remember
//! whose turn it is: frames are given to guests in *turns*, some frames in a row to one guest, and
//! completions are taken from the guest of the oldest turn alone, as many as the turn had frames.
//! What other guests have completed meanwhile waits in their own rings, in their own memory; when
//! those are full the guests stop, then their rings from the mux fill, and the frames of this
//! vrouter alone have no room any more. Nothing waits for a time-out: a drop is a completion too,
//! and the turns of a guest that died are forgotten.
//!
//! With the policy `ordered` every frame is noted. By flow and flowlet nothing is noted, and all guests'
//! completions are taken freely, but for a *barrier* when members come or go: what the guests had
//! before it is sent on, in any order among them, before what was given after it, so that a flow that
//! moves keeps its order. Policies that promise no order have no barriers.
//!
//! Source: the problem is that of PdP (VISA'09), Table 1: 10 to 13 % of the packets reordered.

use std::collections::VecDeque;

/// Some frames in a row, or, of a barrier, all that a guest had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Turn {
    /// Turns of one place are completed in any order, before those of later places.
    place: u64,
    /// The guest's number.
    guest: u32,
    /// Frames that it has not completed yet.
    frames: usize,
}

/// Whose completions are next.
#[derive(Clone, Debug, Default)]
pub struct Order {
    turns: VecDeque<Turn>,
    /// Places that were ever given out.
    places: u64,
}

impl Order {
    /// `frames` were given to `guest`, and are to be sent on after all that was given before.
    #[inline]
    pub fn note(&mut self, guest: u32, frames: usize) {
        let mut last = self.turns.iter_mut().rev();
        let (turn, before) = (last.next(), last.next().map(|turn| turn.place));
        match turn {
            Some(turn) if turn.guest == guest && before != Some(turn.place) => {
                turn.frames += frames
            }
            _ => {
                self.places += 1;
                self.add(guest, frames);
            }
        }
    }

    /// What the guests have now (number and count of frames) is to be sent on before anything that
    /// is given to them later.
    pub fn barrier(&mut self, guests: impl IntoIterator<Item = (u32, usize)>) {
        self.places += 1;
        for (guest, holds) in guests {
            let turns = self.turns.iter().filter(|turn| turn.guest == guest);
            let noted: usize = turns.map(|turn| turn.frames).sum();
            self.add(guest, holds.saturating_sub(noted));
        }
    }

    fn add(&mut self, guest: u32, frames: usize) {
        if frames > 0 {
            self.turns.push_back(Turn { place: self.places, guest, frames });
        }
    }

    /// Where the turn of `guest` is, if its completions are among the next.
    #[inline]
    fn turn_of(&self, guest: u32) -> Option<usize> {
        let first = self.turns.front()?.place;
        let mut next = self.turns.iter().take_while(|turn| turn.place == first);
        next.position(|turn| turn.guest == guest)
    }

    /// How many completions may be taken from `guest` now.
    #[inline]
    pub fn allowance(&self, guest: u32) -> usize {
        match self.turn_of(guest) {
            Some(at) => self.turns[at].frames,
            None if self.turns.is_empty() => usize::MAX,
            None => 0,
        }
    }

    /// A guest whose completions are next, if others have to wait for it.
    pub fn awaited(&self) -> Option<u32> {
        self.turns.front().map(|turn| turn.guest)
    }

    /// `frames` completions were taken from `guest`, no more than were allowed.
    #[inline]
    pub fn completed(&mut self, guest: u32, frames: usize) {
        if let Some(at) = self.turn_of(guest) {
            let turn = &mut self.turns[at];
            turn.frames = turn.frames.saturating_sub(frames);
            if turn.frames == 0 {
                self.turns.remove(at);
            }
        }
    }

    /// `guest` is gone, and what it had with it.
    pub fn forget(&mut self, guest: u32) {
        self.turns.retain(|turn| turn.guest != guest);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::distribute::{Candidate, Distributor, Guests};
    use pdp_proto::mux::{FlowKey, Policy};
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
        /// Frames taken and not completed.
        taken: Vec<u8>,
        /// Completed and not taken back.
        done: Vec<u8>,
        given: u64,
    }

    impl Guests for Vec<Guest> {
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

    /// A vrouter with its guests, small enough to go through everything that can happen.
    #[derive(Clone, Debug)]
    struct World {
        policy: Policy,
        /// A frame of each flow.
        flows: Vec<Vec<u8>>,
        distributor: Distributor,
        order: Order,
        guests: Vec<Guest>,
        /// Frames not arrived yet; frames are numbered as they arrive.
        left: u8,
        /// By number: the flow of a frame that arrived.
        arrived: Vec<u8>,
        /// Deaths, joins and leaves to come.
        changes: u8,
        sent: Vec<u8>,
        /// With dead guests, and for want of room.
        lost: usize,
    }

    impl World {
        fn new(policy: Policy, left: u8, changes: u8) -> Self {
            let numbers = [0, 1, 2];
            let candidates = numbers.map(|number| Candidate { number, weight: 1 });
            let of = |policy| Distributor::new(policy, FlowKey::Ip, &candidates, 4);
            let guest = |is| Guest { is, taken: vec![], done: vec![], given: 0 };
            let mut world = Self {
                policy,
                flows: vec![vec![0; 60]],
                distributor: of(Policy::Flow),
                order: Order::default(),
                guests: [Is::Member, Is::Member, Is::Gone].map(guest).to_vec(),
                left,
                arrived: vec![],
                changes,
                sent: vec![],
                lost: 0,
            };
            world.redistribute();
            if policy != Policy::Ordered {
                // Another flow, for the other guest.
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
                    Policy::Flow => false,
                    Policy::Flowlet => flows.all(|had| had != flow),
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

        /// What can happen next without anybody's doing.
        fn steps(&self) -> Vec<World> {
            let mut next = vec![];
            if self.left > 0 {
                next.extend((0..self.flows.len()).map(|flow| self.after(|it| it.arrive(flow))));
            }
            for (at, guest) in self.guests.iter().enumerate() {
                // It completes one, if its ring has room.
                if !guest.taken.is_empty() && guest.done.len() < RING {
                    next.push(self.after(|it| {
                        let done = it.guests[at].taken.remove(0);
                        it.guests[at].done.push(done);
                    }));
                }
                // The mux takes what it may.
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
            let first = self.order.turns.front().map_or(0, |turn| turn.place);
            for turn in &self.order.turns {
                (turn.place - first, turn.guest, turn.frames).hash(&mut hasher);
            }
            self.distributor.state().hash(&mut hasher);
            (&self.guests, self.left, &self.arrived, self.changes).hash(&mut hasher);
            (&self.sent, self.lost).hash(&mut hasher);
            hasher.finish()
        }
    }

    /// All interleavings of arrivals, completions, takings, deaths, joins and leaves, with the
    /// distributor: what is sent is in order, nothing is sent twice, or lost but with a dead guest and
    /// where there is no room, and nothing ever hangs.
    #[test]
    fn whatever_happens_order_holds_and_nothing_hangs() {
        for (policy, frames) in [(Policy::Ordered, 5), (Policy::Flow, 4), (Policy::Flowlet, 4)] {
            let (mut seen, mut open) = (HashSet::new(), vec![World::new(policy, frames, 2)]);
            let mut ends = 0;
            while let Some(world) = open.pop() {
                world.check();
                let next = world.steps();
                if next.is_empty() {
                    assert_eq!(world.sent.len() + world.lost, usize::from(frames), "{world:?}");
                    assert!(world.order.turns.is_empty(), "{world:?}");
                    ends += 1;
                }
                let next = next.into_iter().chain(world.changes());
                open.extend(next.filter(|world| seen.insert(world.key())));
            }
            assert!(ends > 100 && seen.len() > 10_000, "{policy:?}: {ends}, {} states", seen.len());
            println!("{policy:?}: {ends} ends of {} states", seen.len());
        }
    }

    /// Guests owe each other nothing of what they had before; turns are in a row.
    #[test]
    fn a_barrier_holds_back_what_comes_after_it_and_no_more() {
        let mut order = Order::default();
        let allowances = |order: &Order| [1, 2, 3].map(|guest| order.allowance(guest));
        assert_eq!(allowances(&order), [usize::MAX; 3]);
        order.barrier([(1, 2), (2, 0), (3, 1)]);
        assert_eq!(allowances(&order), [2, 0, 1]);
        order.completed(1, 1);
        // Guest 1 got four more, guest 2 one; another barrier.
        order.barrier([(1, 5), (2, 1), (3, 1)]);
        assert_eq!(allowances(&order), [1, 0, 1]);
        order.completed(3, 1);
        assert_eq!(allowances(&order), [1, 0, 0]);
        // Frames in turns come after all of it.
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
