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
//! With the policy `ordered` every frame is noted. The other policies note nothing, and take from
//! all guests freely, but for a *barrier* when members come or go: what was given before it is
//! released before what was given after it, so that a flow that moves keeps its order.
//!
//! Source: the problem is that of PdP (VISA'09), Table 1: 10 to 13 % of the packets reordered.

use std::collections::VecDeque;

/// Some frames in a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Turn {
    /// The guest's number.
    guest: u32,
    /// Frames that it has not completed yet.
    frames: usize,
}

/// Whose completions are next.
#[derive(Clone, Debug, Default)]
pub struct Order {
    turns: VecDeque<Turn>,
}

impl Order {
    /// `frames` were given to `guest`, and are to be sent on after all that was given before.
    #[inline]
    pub fn note(&mut self, guest: u32, frames: usize) {
        match self.turns.back_mut() {
            Some(turn) if turn.guest == guest => turn.frames += frames,
            _ if frames > 0 => self.turns.push_back(Turn { guest, frames }),
            _ => {}
        }
    }

    /// What the guests have now (number and count of frames) is to be sent on before anything that
    /// is given to them later.
    pub fn barrier(&mut self, guests: impl IntoIterator<Item = (u32, usize)>) {
        for (guest, outstanding) in guests {
            let turns = self.turns.iter().filter(|turn| turn.guest == guest);
            let noted: usize = turns.map(|turn| turn.frames).sum();
            self.note(guest, outstanding.saturating_sub(noted));
        }
    }

    /// How many completions may be taken from `guest` now.
    #[inline]
    pub fn allowance(&self, guest: u32) -> usize {
        match self.turns.front() {
            None => usize::MAX,
            Some(turn) if turn.guest == guest => turn.frames,
            Some(_) => 0,
        }
    }

    /// The guest whose completions are awaited, if others have to wait for it.
    pub fn awaited(&self) -> Option<u32> {
        self.turns.front().map(|turn| turn.guest)
    }

    /// `frames` completions were taken from `guest`, no more than were allowed.
    #[inline]
    pub fn completed(&mut self, guest: u32, frames: usize) {
        if let Some(turn) = self.turns.front_mut().filter(|turn| turn.guest == guest) {
            turn.frames = turn.frames.saturating_sub(frames);
            if turn.frames == 0 {
                self.turns.pop_front();
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
    use std::collections::HashSet;

    /// A vrouter with its guests, small enough to go through everything that can happen.
    #[derive(Clone, Debug, PartialEq, Eq, Hash)]
    struct World {
        /// Frames not arrived yet; frames are numbered as they arrive.
        left: u8,
        arrived: u8,
        /// By guest: frames taken and not completed, and completed and not taken back. `None`:
        /// dead.
        guests: Vec<Option<(Vec<u8>, Vec<u8>)>>,
        sent: Vec<u8>,
        lost: Vec<u8>,
        turns: Vec<(u32, usize)>,
    }

    const RING: usize = 2;

    impl World {
        fn order(&self) -> Order {
            let turns = self.turns.iter().map(|&(guest, frames)| Turn { guest, frames });
            Order { turns: turns.collect() }
        }

        fn with(mut self, order: &Order) -> Self {
            self.turns = order.turns.iter().map(|turn| (turn.guest, turn.frames)).collect();
            self
        }

        /// Everything that can happen next.
        fn steps(&self) -> Vec<World> {
            let mut next = vec![];
            for (at, guest) in self.guests.iter().enumerate() {
                let number = at as u32;
                let Some((taken, done)) = guest else { continue };
                // A frame arrives and is given to this guest.
                if self.left > 0 && taken.len() < RING {
                    let (mut world, mut order) = (self.clone(), self.order());
                    let to = world.guests[at].as_mut().unwrap();
                    to.0.push(world.arrived);
                    (world.arrived, world.left) = (world.arrived + 1, world.left - 1);
                    order.note(number, 1);
                    next.push(world.with(&order));
                }
                // It completes one, if its ring has room.
                if !taken.is_empty() && done.len() < RING {
                    let mut world = self.clone();
                    let (taken, done) = world.guests[at].as_mut().unwrap();
                    done.push(taken.remove(0));
                    next.push(world);
                }
                // The mux takes what it may.
                let (mut world, mut order) = (self.clone(), self.order());
                let count = order.allowance(number).min(done.len());
                if count > 0 {
                    let (_, done) = world.guests[at].as_mut().unwrap();
                    world.sent.extend(done.drain(..count));
                    order.completed(number, count);
                    next.push(world.with(&order));
                }
                // It dies.
                if self.guests.iter().flatten().count() > 1 {
                    let (mut world, mut order) = (self.clone(), self.order());
                    let (taken, done) = world.guests[at].take().unwrap();
                    world.lost.extend(done.into_iter().chain(taken));
                    order.forget(number);
                    next.push(world.with(&order));
                }
            }
            next
        }
    }

    /// All interleavings of arrivals, completions, takings and deaths: what is sent is in order,
    /// nothing is sent twice or lost but with a dead guest, and nothing ever hangs.
    #[test]
    fn whatever_happens_order_holds_and_nothing_hangs() {
        let world = World {
            left: 5,
            arrived: 0,
            guests: vec![Some((vec![], vec![])); 3],
            sent: vec![],
            lost: vec![],
            turns: vec![],
        };
        let (mut seen, mut open) = (HashSet::new(), vec![world]);
        let mut ends = 0;
        while let Some(world) = open.pop() {
            assert!(world.sent.is_sorted(), "{world:?}");
            let next = world.steps();
            if next.is_empty() || next.iter().all(|next| next.lost.len() > world.lost.len()) {
                // Nothing but a death can happen: then all is done.
                assert_eq!(world.left, 0, "no room for what arrives: {world:?}");
                assert_eq!(world.sent.len() + world.lost.len(), 5, "{world:?}");
                assert!(world.turns.is_empty(), "{world:?}");
                ends += 1;
            }
            open.extend(next.into_iter().filter(|world| seen.insert(world.clone())));
        }
        assert!(ends > 100 && seen.len() > 10_000, "{ends} ends, {} states", seen.len());
    }

    #[test]
    fn a_barrier_holds_back_what_comes_after_it_and_no_more() {
        let mut order = Order::default();
        assert_eq!(order.allowance(1), usize::MAX);
        order.barrier([(1, 2), (2, 0), (3, 1)]);
        assert_eq!([1, 2, 3].map(|guest| order.allowance(guest)), [2, 0, 0]);
        order.completed(1, 1);
        // Guest 1 got four more, guest 3 none; another barrier.
        order.barrier([(1, 5), (2, 0), (3, 1)]);
        assert_eq!([1, 2, 3].map(|guest| order.allowance(guest)), [1, 0, 0]);
        order.completed(1, 1);
        assert_eq!([1, 2, 3].map(|guest| order.allowance(guest)), [0, 0, 1]);
        order.completed(3, 1);
        assert_eq!(order.allowance(1), 4);
        order.forget(1);
        assert_eq!([1, 2, 3].map(|guest| order.allowance(guest)), [usize::MAX; 3]);
    }
}
