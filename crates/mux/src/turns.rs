//! The worker's time, shared among the vnets that are awake; and the frames that wait for it.
//!
//! What arrives from outside gathers here by vnet, so that a visit finds several frames. Vnets are visited in
//! rotation; while the worker is busy those alone for which [`GATHER_FRAMES`] wait, or whose last visit was
//! [`GATHER_NS`] ago. Beside it, as long as it has credit, one is visited when so many wait for it or the
//! first has waited for so long: so who uses less than its part is served at once, and who wants more
//! waits for the rotation. A visit is charged with the time that it took. Each turn brings credit by the
//! vnet's weight among those awake, and no more than one turn's is kept; who is overdrawn is passed over until
//! it has paid. So whatever the others do, a vnet has its part of the time, and what one does not use goes to
//! whoever wants it.
//!
//! Frames that wait have a bound: for no vnet more of them wait than as many as could wait for it once more,
//! so that n greedy ones have 1/(n+1) of the packets each.
//! Sources: Shreedhar and Varghese, "Efficient fair queueing using deficit round robin" (1995); that who has
//! credit and something new goes first: RFC 8290 section 4.2; the bound: Choudhury and Hahne, "Dynamic queue
//! length thresholds" (1998).

use std::collections::VecDeque;
use std::mem;

/// Frames that are worth a visit.
pub const GATHER_FRAMES: usize = 32;

/// How long fewer of them wait for others while the worker is busy, nanoseconds.
pub const GATHER_NS: u64 = 50_000;

/// Visits in one round in rotation, and as many beside it: where more vnets have work, each visit is to
/// find more of it.
const VISITS_MAX: usize = 16;

/// Vnets that are passed over in one round.
const PASSED_MAX: usize = 256;

/// Frames from outside that one visit takes.
const VISIT_FRAMES: usize = 1024;

/// Time that a turn brings a vnet of average weight, cycles: what a visit that finds 256 frames takes.
const TURN_CYCLES: i64 = 50_000;

/// A turn brings at most so many times that, and no less than this part of it: parts are exact between
/// weights that differ no more.
const TURN_MAX: i64 = 8;
const TURN_MIN: i64 = 64;

/// The most that a vnet can owe, cycles: about what the dearest visit takes. More goes by only where another
/// had the worker's CPU.
const DEBT_MAX: i64 = 40 * TURN_CYCLES;

/// The part of the packets that frames which wait leave alone: what sockets, guests and queues need.
const RESERVE_PART: usize = 8;

/// What is known of one vnet; hot, and so kept apart from the rest of it.
#[derive(Debug)]
struct Account<F> {
    /// Frames from outside that wait for a visit.
    frames: Vec<F>,
    /// When the first of them came, nanoseconds.
    since_ns: u64,
    /// When it last had its turn, nanoseconds.
    visited_ns: u64,
    /// Cycles that it may take beside the rotation.
    credit: i64,
    weight: u32,
    generation: u32,
    /// Whether it has a place in the rotation; it rests otherwise.
    awake: bool,
    /// Whether it is among those that gather frames, and among those that have enough.
    gathers: bool,
    is_full: bool,
}

/// Why a frame can't wait for its vnet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// There is no such vnet, or it has changed since.
    Stale,
    /// Too many wait for it.
    Full,
}

/// Whose turn it is, and what waits for it; `F` is a frame.
#[derive(Debug)]
pub struct Turns<F> {
    /// By slot.
    accounts: Vec<Option<Account<F>>>,
    /// Vnets that do not rest.
    rotation: VecDeque<u16>,
    /// Vnets for which frames gather, by how long.
    gathering: VecDeque<u16>,
    /// Those that have enough of them.
    full: VecDeque<u16>,
    /// Sum of the weights in the rotation.
    weight: i64,
    /// Frames that wait in all.
    waiting: usize,
    /// Packets of the worker.
    packets: usize,
    /// Turns since there was work, or one was passed over that may have some.
    in_vain: usize,
    /// Whose turn, the next, is the one that it has had part of.
    goes_on: Option<u16>,
    /// What is left of the round: visits beside the rotation, visits in it, and vnets to pass over.
    left: [usize; 3],
}

impl<F> Turns<F> {
    /// Of a worker that has so many packets.
    pub fn new(packets: usize) -> Self {
        Self {
            accounts: vec![],
            rotation: VecDeque::new(),
            gathering: VecDeque::new(),
            full: VecDeque::new(),
            weight: 0,
            waiting: 0,
            packets,
            in_vain: 0,
            goes_on: None,
            left: [0; 3],
        }
    }

    /// The vnet in `slot` has this generation and weight now. It is visited from now on.
    pub fn put(&mut self, slot: u16, generation: u32, weight: u32) {
        let at = usize::from(slot);
        if self.accounts.len() <= at {
            self.accounts.resize_with(at + 1, || None);
        }
        let account = self.accounts[at].get_or_insert_with(|| Account {
            frames: vec![],
            since_ns: 0,
            visited_ns: 0,
            credit: 0,
            weight: 0,
            generation,
            awake: false,
            gathers: false,
            is_full: false,
        });
        let weight = weight.max(1);
        if account.awake {
            self.weight += i64::from(weight) - i64::from(account.weight);
        }
        (account.generation, account.weight) = (generation, weight);
        self.rouse(slot);
    }

    /// The vnet in `slot` is gone. Returns the frames that waited for it.
    pub fn remove(&mut self, slot: u16) -> Vec<F> {
        self.rest(slot);
        self.gathering.retain(|other| *other != slot);
        self.full.retain(|other| *other != slot);
        let account = self.accounts.get_mut(usize::from(slot)).and_then(Option::take);
        let frames = account.map(|account| account.frames).unwrap_or_default();
        self.waiting -= frames.len();
        frames
    }

    #[inline]
    fn account(&mut self, slot: u16) -> Option<&mut Account<F>> {
        self.accounts.get_mut(usize::from(slot))?.as_mut()
    }

    /// Vnets that do not rest.
    pub fn awake(&self) -> impl Iterator<Item = u16> {
        self.rotation.iter().copied()
    }

    /// Frames that wait for the vnet in `slot`.
    pub fn waiting(&self, slot: u16) -> usize {
        let account = self.accounts.get(usize::from(slot)).and_then(Option::as_ref);
        account.map_or(0, |account| account.frames.len())
    }

    /// Whether a worker that found nothing to do may have missed something: a vnet was not visited since, or
    /// frames wait.
    pub fn may_have_work(&self) -> bool {
        self.waiting > 0 || self.in_vain < self.rotation.len()
    }

    /// Has `frames` wait for a visit to the vnet in `slot`, of this generation, which must not rest
    /// ([`Turns::rouse`]); `free` is how many packets could be taken now. Leaves those that can't wait.
    pub fn give_all(
        &mut self,
        whose: (u16, u32),
        free: usize,
        now_ns: u64,
        frames: &mut Vec<F>,
    ) -> Result<(), Refused> {
        let room = self.room(free);
        let account = self.account_of(whose).ok_or(Refused::Stale)?;
        let fits = frames.len().min(room.saturating_sub(account.frames.len()));
        let before = account.frames.len();
        if before == 0 && fits == frames.len() {
            mem::swap(&mut account.frames, frames);
        } else {
            account.frames.extend(frames.drain(..fits));
        }
        self.gather(whose.0, before, now_ns);
        if frames.is_empty() { Ok(()) } else { Err(Refused::Full) }
    }

    /// As [`Turns::give_all`], for one.
    #[inline]
    pub fn give(
        &mut self,
        whose: (u16, u32),
        free: usize,
        now_ns: u64,
        frame: F,
    ) -> Result<(), (Refused, F)> {
        let room = self.room(free);
        let Some(account) = self.account_of(whose) else { return Err((Refused::Stale, frame)) };
        let before = account.frames.len();
        if before >= room {
            return Err((Refused::Full, frame));
        }
        account.frames.push(frame);
        self.gather(whose.0, before, now_ns);
        Ok(())
    }

    /// Frames that may wait for one vnet.
    #[inline]
    fn room(&self, free: usize) -> usize {
        let free = free.min(self.packets.saturating_sub(self.waiting));
        free.saturating_sub(self.packets / RESERVE_PART) + 1
    }

    #[inline]
    fn account_of(&mut self, (slot, generation): (u16, u32)) -> Option<&mut Account<F>> {
        self.account(slot).filter(|account| account.generation == generation)
    }

    /// The vnet in `slot` has more frames than the `before` that it had.
    #[inline]
    fn gather(&mut self, slot: u16, before: usize, now_ns: u64) {
        let Some(Some(account)) = self.accounts.get_mut(usize::from(slot)) else { return };
        self.waiting += account.frames.len() - before;
        if before == 0 {
            account.since_ns = now_ns;
        }
        if !mem::replace(&mut account.gathers, true) {
            self.gathering.push_back(slot);
        }
        if account.frames.len() >= GATHER_FRAMES && !mem::replace(&mut account.is_full, true) {
            self.full.push_back(slot);
        }
    }

    /// Takes what waits for the vnet in `slot`, as many as one visit may; `frames` is empty.
    #[inline]
    pub fn take(&mut self, slot: u16, frames: &mut Vec<F>) {
        let Some(account) = self.account(slot) else { return };
        if account.frames.len() <= VISIT_FRAMES {
            mem::swap(&mut account.frames, frames);
        } else {
            frames.extend(account.frames.drain(..VISIT_FRAMES));
        }
        self.waiting -= frames.len();
    }

    /// Gives the vnet in `slot`, which may have work, a place in the rotation; false if it has one.
    pub fn rouse(&mut self, slot: u16) -> bool {
        self.in_vain = 0;
        let Some(account) = self.account(slot) else { return false };
        let rested = !std::mem::replace(&mut account.awake, true);
        if rested {
            // What it left unused while it rested others have had.
            account.credit = account.credit.max(1);
            let weight = account.weight;
            self.weight += i64::from(weight);
            self.rotation.push_back(slot);
        }
        rested
    }

    /// Takes the vnet in `slot` out of the rotation.
    pub fn rest(&mut self, slot: u16) {
        let Some(account) = self.account(slot) else { return };
        if std::mem::take(&mut account.awake) {
            let weight = account.weight;
            self.weight -= i64::from(weight);
            match self.rotation.back() {
                Some(last) if *last == slot => _ = self.rotation.pop_back(),
                _ => self.rotation.retain(|other| *other != slot),
            }
        }
    }

    /// A round begins.
    pub fn begin(&mut self) {
        let visits = self.rotation.len().min(VISITS_MAX);
        // Where all have a turn in each round, none is visited twice.
        let beside = if self.rotation.len() > VISITS_MAX { VISITS_MAX } else { 0 };
        self.left = [beside, visits, PASSED_MAX];
    }

    /// Whom to visit next in this round; `busy` says that the worker has other things to do than to visit
    /// vnets for few frames. Who is visited in its turn is at the end of the rotation then.
    pub fn next(&mut self, now_ns: u64, busy: bool) -> Option<u16> {
        while self.left[0] > 0 {
            let Some(slot) = self.next_gathered(now_ns, busy) else { break };
            if self.account(slot).is_some_and(|it| it.credit > 0 && !it.frames.is_empty()) {
                self.left[0] -= 1;
                return Some(slot);
            }
        }
        while self.left[1] > 0 && self.left[2] > 0 {
            let slot = self.rotation.pop_front()?;
            self.rotation.push_back(slot);
            let (count, weight) = (self.rotation.len() as i64, self.weight.max(1));
            let goes_on = self.goes_on.take() == Some(slot);
            let account = self.account(slot)?;
            let soon = !goes_on && now_ns.saturating_sub(account.visited_ns) < GATHER_NS;
            if busy && soon && account.frames.len() < GATHER_FRAMES {
                self.left[2] -= 1;
                self.left[1] -= 1;
                self.in_vain = 0;
                continue;
            }
            let turn = TURN_CYCLES * count * i64::from(account.weight) / weight;
            let turn = turn.clamp(TURN_CYCLES / TURN_MIN, TURN_CYCLES * TURN_MAX);
            if !goes_on {
                account.credit = (account.credit + turn).min(turn);
            }
            if account.credit > 0 {
                account.visited_ns = now_ns;
                self.left[1] -= 1;
                self.in_vain += 1;
                return Some(slot);
            }
            self.left[2] -= 1;
            self.in_vain = 0;
        }
        None
    }

    /// The next for whom enough frames gathered, or for long enough.
    fn next_gathered(&mut self, now_ns: u64, busy: bool) -> Option<u16> {
        if let Some(slot) = self.full.pop_front() {
            if let Some(account) = self.account(slot) {
                account.is_full = false;
            }
            return Some(slot);
        }
        let slot = *self.gathering.front()?;
        let account = self.account(slot)?;
        let old = now_ns.saturating_sub(account.since_ns) >= GATHER_NS;
        if busy && !old && !account.frames.is_empty() {
            return None;
        }
        account.gathers = false;
        self.gathering.pop_front();
        Some(slot)
    }

    /// A visit to the vnet in `slot` is over, which took so many cycles, and found work or not.
    pub fn charge(&mut self, slot: u16, cycles: u64, work: bool) {
        if work {
            self.in_vain = 0;
        }
        let Some(account) = self.account(slot) else { return };
        account.credit = (account.credit - cycles as i64).max(-DEBT_MAX);
        // One that had much to do and has not had its part goes on.
        if work
            && account.credit > 0
            && cycles as i64 >= TURN_CYCLES / 2
            && self.rotation.back() == Some(&slot)
        {
            self.rotation.rotate_right(1);
            self.goes_on = Some(slot);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// One that wants what it is given: frames each round, and what a visit costs beside them.
    #[derive(Clone, Debug)]
    struct Vnet {
        weight: u32,
        frames: usize,
        visit_cycles: u64,
    }

    const FRAME_CYCLES: u64 = 200;
    const PACKETS: usize = 32_768;

    /// Rounds with frames for all of them; returns what each got of the time, and lost of its frames.
    fn run(vnets: &[Vnet], rounds: u64) -> Vec<(f64, usize)> {
        let mut turns: Turns<u32> = Turns::new(PACKETS);
        let mut got = vec![(0u64, 0usize); vnets.len()];
        for (slot, vnet) in vnets.iter().enumerate() {
            turns.put(slot as u16, 7, vnet.weight);
        }
        let mut frames = vec![];
        for round in 0..rounds {
            let now_ns = round * (GATHER_NS + 10_000);
            for (slot, vnet) in vnets.iter().enumerate() {
                let free = PACKETS - turns.waiting;
                for frame in 0..vnet.frames {
                    let given = turns.give((slot as u16, 7), free, now_ns, frame as u32);
                    got[slot].1 += usize::from(given.is_err());
                }
            }
            turns.begin();
            while let Some(slot) = turns.next(now_ns, true) {
                turns.take(slot, &mut frames);
                let at = usize::from(slot);
                let cycles = frames.len() as u64 * FRAME_CYCLES + vnets[at].visit_cycles;
                got[at].0 += cycles;
                turns.charge(slot, cycles, true);
                frames.clear();
            }
        }
        let total: u64 = got.iter().map(|(cycles, _)| cycles).sum();
        got.iter().map(|(cycles, lost)| (*cycles as f64 / total as f64, *lost)).collect()
    }

    #[test]
    fn a_dear_vnet_has_its_part_and_no_more() {
        let cheap = Vnet { weight: 1000, frames: 0, visit_cycles: 2_000 };
        let dear = Vnet { visit_cycles: 400_000, ..cheap.clone() };
        let got = run(&[vec![dear], vec![cheap; 31]].concat(), 20_000);
        // All of what it wants costs 400,000 of 462,000 cycles; its part of what they want is less.
        let (part, _) = got[0];
        let mean = got[1..].iter().map(|(part, _)| part).sum::<f64>() / 31.0;
        assert!(part < 0.55, "{part} beside {mean} each");
        assert!(mean > 0.014, "{part} beside {mean} each");
    }

    #[test]
    fn parts_are_by_weight() {
        let hog = |weight| Vnet { weight, frames: 0, visit_cycles: 60_000 };
        let got = run(&[hog(1000), hog(500), hog(250), hog(250)], 40_000);
        for ((part, _), want) in got.iter().zip([0.5, 0.25, 0.125, 0.125]) {
            assert!((part / want - 1.0).abs() < 0.15, "{got:?}");
        }
    }

    /// One that owes time, one that was visited just before while there was much to do, one that is roused: before all
    /// of them were looked at, the worker does not take itself for idle.
    #[test]
    fn who_was_not_visited_may_have_work() {
        type Case = fn(&mut Turns<u32>);
        let cases: [(&str, Case); 3] = [
            ("owes", |turns| turns.charge(0, DEBT_MAX as u64, true)),
            ("was visited just before", |turns| {
                turns.begin();
                assert_eq!(turns.next(1_000_000, true), Some(1));
            }),
            ("is roused", |turns| {
                turns.rest(0);
                visit_all(turns);
                turns.rouse(0);
            }),
        ];
        /// Two rounds that find nothing; who was visited.
        fn visit_all(turns: &mut Turns<u32>) -> Vec<u16> {
            let mut visited = vec![];
            for _ in 0..2 {
                turns.begin();
                // Some at a time, as where there are many.
                turns.left[1] = 2;
                while let Some(slot) = turns.next(1_000_000, false) {
                    turns.charge(slot, 1, false);
                    visited.push(slot);
                }
            }
            visited
        }
        for (what, case) in cases {
            let mut turns: Turns<u32> = Turns::new(256);
            (0..3).for_each(|slot| turns.put(slot, 1, 1));
            turns.begin();
            assert_eq!(turns.next(1_000_000, false), Some(0));
            case(&mut turns);
            let mut seen = vec![];
            while turns.may_have_work() {
                seen.extend(visit_all(&mut turns));
            }
            assert!((0..3).all(|slot| seen.contains(&slot)), "{what}: {seen:?}");
        }
    }

    /// The review's case: a thousand with a trickle, one flooded.
    #[test]
    fn a_flood_takes_no_packet_from_a_trickle() {
        let trickle = Vnet { weight: 10, frames: 1, visit_cycles: 500 };
        let flood = Vnet { weight: 10, frames: 2000, visit_cycles: 500 };
        let got = run(&[vec![flood], vec![trickle; 200]].concat(), 2_000);
        assert!(got[0].1 > 0, "the flood is more than there is time for");
        assert!(got[1..].iter().all(|(_, lost)| *lost == 0), "{:?}", &got[1..]);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]
        /// Whoever wants less than its part gets it, beside any mix of others.
        #[test]
        fn who_wants_less_than_its_part_loses_nothing(
            others in prop::collection::vec((1u32..64, 0usize..400, 0u64..300_000), 1..40),
            weight in 1u32..64,
        ) {
            let others: Vec<Vnet> = others.into_iter()
                .map(|(weight, frames, visit_cycles)| Vnet { weight, frames, visit_cycles })
                .collect();
            let modest = Vnet { weight, frames: 1, visit_cycles: 300 };
            let got = run(&[vec![modest], others].concat(), 3_000);
            prop_assert_eq!(got[0].1, 0);
        }

        /// Whatever comes, waits, rests and goes: nothing is lost or made, each is in the rotation once, and
        /// nothing that waits is forgotten.
        #[test]
        fn books_are_kept(steps in prop::collection::vec((0u8..6, 0u16..5, 0usize..100), 1..300)) {
            let mut turns: Turns<u32> = Turns::new(256);
            let (mut given, mut taken) = (0, 0);
            let mut frames = vec![];
            for (what, slot, count) in steps {
                match what {
                    0 => turns.put(slot, 1, count as u32),
                    1 => {
                        let gone = turns.remove(slot);
                        taken += gone.len();
                        prop_assert_eq!(turns.waiting(slot), 0);
                    }
                    2 | 3 => {
                        turns.rouse(slot);
                        let mut batch: Vec<u32> = (0..count as u32).collect();
                        let _ = turns.give_all((slot, 1), 256 - turns.waiting, 0, &mut batch);
                        given += count - batch.len();
                    }
                    4 => {
                        turns.begin();
                        while let Some(slot) = turns.next(1_000_000, count % 2 == 0) {
                            turns.take(slot, &mut frames);
                            taken += frames.len();
                            frames.clear();
                            turns.charge(slot, count as u64 * 1000, false);
                            if count % 3 == 0 && turns.waiting(slot) == 0 {
                                turns.rest(slot);
                            }
                        }
                    }
                    _ => _ = turns.rouse(slot),
                }
                prop_assert_eq!(given, taken + turns.waiting);
                let mut awake: Vec<_> = turns.awake().collect();
                awake.sort_unstable();
                let once = awake.windows(2).all(|two| two[0] < two[1]);
                prop_assert!(once, "{:?}", awake);
                for slot in 0..5 {
                    prop_assert!(turns.waiting(slot) == 0 || awake.contains(&slot));
                }
                let weight: i64 = awake.iter()
                    .map(|slot| i64::from(turns.accounts[usize::from(*slot)].as_ref().unwrap().weight))
                    .sum();
                prop_assert_eq!(weight, turns.weight);
            }
            for _ in 0..100 {
                turns.begin();
                while let Some(slot) = turns.next(2_000_000, true) {
                    turns.take(slot, &mut frames);
                    taken += frames.len();
                    frames.clear();
                    turns.charge(slot, 1, true);
                }
            }
            prop_assert_eq!((given, turns.waiting), (taken, 0));
        }
    }
}
