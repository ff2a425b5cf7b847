//! What a slow path has an engine do to packets: filters, what each has done, and counters.
//!
//! A filter is in one of two sets, by how long its pattern is. Both have two slots for each number that a filter may have:
//! the one that its number says, and as many further on as there may be filters. What comes in a filter's place takes the
//! slot that is free in both sets, and what it has done stands by slot; so all of a [`Changes`] comes into force with the
//! commit of the sets. That takes a bounded piece at a time, between two batches of frames; memory is taken by who makes
//! these, not here.

use std::sync::atomic::{AtomicU32, Ordering};

use pdp_filters::{Filters, Refused};
use pdp_proto::slowpath::{
    Action, COUNTERS_MAX, Counter, Filter, NO_FILTER, Pattern, QueueSetting,
};

use crate::queues::{AtPorts, Queues, Setting};

/// Steps that a look-up may take ([`Filters::new`]): sets of 100,000 filters take up to 1,400.
const STEPS_MAX: usize = 2048;

/// Filters that are tidied up between two looks at the time.
const SETTLED_AT_ONCE: usize = 16;

/// What a packet is counted by when it leaves: a counter's number in so many bits, and before it which tables it is of.
const COUNTER_BITS: u32 = 17;
const GENERATIONS: u32 = (1 << (u32::BITS - COUNTER_BITS)) - 1;
const _: () = assert!(COUNTERS_MAX <= 1 << COUNTER_BITS);

/// Queues that are looked at between two looks at the time.
const QUEUES_CHECKED_AT_ONCE: usize = 16;

/// Changes that come into force together, at most, where there may be so many filters.
pub fn changes_max(filters_max: u32) -> usize {
    filters_max as usize + 1024
}

/// A change.
#[derive(Clone, Debug)]
pub enum Change {
    /// A filter, in the place of the one with its number.
    Set(Filter),
    /// No filter with this number.
    Remove(u32),
}

/// Changes that come into force together, or not at all.
#[derive(Debug, Default)]
pub struct Changes {
    /// In order.
    pub all: Vec<Change>,
    /// How queues are to be, [`QUEUES_SET_MAX`] at most; they come into force in one go.
    pub queues: Vec<QueueSetting>,
    /// Filters that none of these sets go.
    pub sweep: bool,
    /// How many are staged, and how many ids were swept.
    staged: usize,
    swept: u32,
    /// How many of `queues` were looked at.
    checked: usize,
    /// What became of them: how many filters there are, or which one was refused and why. `None`: nothing yet.
    pub result: Option<Result<u32, (u32, NoRoom)>>,
}

impl Changes {
    /// How many there are.
    pub fn count(&self) -> usize {
        self.all.len() + self.queues.len()
    }
}

/// Why a filter or a queue is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoRoom {
    /// Look-ups would take too long.
    Crowded,
    /// The queue of a vport, counted from 1, that there is not; there are so many.
    NoQueue(u8, u16, usize),
    /// It may have no more frames, and bytes (0: as many as these have).
    TooLong(u8, u16, u16, u32),
}

impl NoRoom {
    /// What to do.
    pub fn text(self) -> String {
        match self {
            Self::Crowded => Refused::Crowded.to_string(),
            Self::NoQueue(vport, _, 0) => {
                format!("vport {vport} has no queues: say `queues` of its link's end in the spec")
            }
            Self::NoQueue(vport, queue, count) => {
                format!("queue {queue} of vport {vport}: there are {count}, counted from 1")
            }
            Self::TooLong(vport, queue, frames, 0) => format!(
                "queue {queue} of vport {vport} can have {frames} frames: raise its length in the spec for more"
            ),
            Self::TooLong(vport, queue, _, bytes) => format!(
                "queue {queue} of vport {vport} can have {bytes} bytes: raise its length in the spec for more"
            ),
        }
    }
}

/// Room for so many filters with patterns of `W` words; `secret` is as for [`Filters::new`].
pub fn room_for<const W: usize>(filters_max: u32, secret: u64) -> Box<Filters<W>> {
    Box::new(Filters::new(2 * filters_max as usize, STEPS_MAX, secret))
}

/// All of it.
#[derive(Debug)]
pub struct Actions {
    filters_max: u32,
    /// Filters with patterns of 128 bits, and of 320; made when the first comes ([`room_for`]).
    pub short: Option<Box<Filters<2>>>,
    /// See `short`.
    pub long: Option<Box<Filters<5>>>,
    /// By slot.
    actions: Vec<Action>,
    /// By number.
    pub counters: Vec<Counter>,
    /// Which tables these are, of those that were made lately; never 0.
    generation: u32,
    /// Filters, with those that are staged, and without.
    count: u32,
    in_force: u32,
    /// A bit for each id that the changes which are being staged set, if they sweep.
    marks: Vec<u64>,
    settled: bool,
    /// Whether a filter may be in force, or staged.
    any: bool,
}

impl Actions {
    /// For so many filters of each length, and counters.
    pub fn new(filters_max: u32, counters: u32) -> Self {
        static MADE: AtomicU32 = AtomicU32::new(0);
        let made = MADE.fetch_add(1, Ordering::Relaxed);
        let words = filters_max.div_ceil(64) as usize;
        Self {
            filters_max,
            short: None,
            long: None,
            actions: vec![Action::default(); 2 * filters_max as usize],
            counters: vec![Counter::default(); counters as usize],
            generation: made % GENERATIONS + 1,
            count: 0,
            in_force: 0,
            marks: vec![0; words],
            settled: true,
            any: false,
        }
    }

    /// Whether no filter is in force.
    #[inline]
    pub fn is_empty(&self) -> bool {
        !self.any
    }

    /// Whether nothing has to be tidied up.
    pub fn is_settled(&self) -> bool {
        self.settled
    }

    /// Ids that there are.
    pub fn filters_max(&self) -> u32 {
        self.filters_max
    }

    /// Filters.
    pub fn count(&self) -> u32 {
        self.count
    }

    /// Bytes of memory.
    pub fn memory(&self) -> usize {
        let actions = self.actions.len() * size_of::<Action>();
        let marks = self.marks.len() * size_of::<u64>();
        let counters = self.counters.len() * size_of::<Counter>();
        let sets = self.short.as_ref().map_or(0, |set| set.memory())
            + self.long.as_ref().map_or(0, |set| set.memory());
        size_of::<Self>() + actions + marks + counters + sets
    }

    /// Counts a packet. Returns what is to be said when it leaves ([`Self::count_left`]).
    #[inline]
    pub fn count_packet(&mut self, counter: u32, bytes: usize) -> u32 {
        let Some(here) = self.counters.get_mut(counter as usize) else { return 0 };
        here.packets += 1;
        here.bytes += bytes as u64;
        self.generation << COUNTER_BITS | counter
    }

    /// Counts a packet that leaves, or that was counted so and did not (`back`). What other tables counted is nothing to
    /// these.
    #[inline]
    pub fn count_left(&mut self, counted: u32, bytes: usize, back: bool) {
        if counted >> COUNTER_BITS != self.generation {
            return;
        }
        let counter = counted & ((1 << COUNTER_BITS) - 1);
        let Some(here) = self.counters.get_mut(counter as usize) else { return };
        let (packets, bytes) = match back {
            true => (1_u64.wrapping_neg(), (bytes as u64).wrapping_neg()),
            false => (1, bytes as u64),
        };
        here.sent = here.sent.wrapping_add(packets);
        here.sent_bytes = here.sent_bytes.wrapping_add(bytes);
    }

    /// What the filter in a slot of a set has done.
    #[inline]
    pub fn action(&self, slot: u32) -> Action {
        self.actions[slot as usize]
    }

    /// The filter with this number, if there is one.
    pub fn filter(&self, id: u32) -> Option<Filter> {
        self.slots(id).find_map(|slot| {
            let (pattern, priority) = self.pattern(slot)?;
            Some(Filter { id, priority, pattern, action: self.action(slot) })
        })
    }

    /// Where the filter with this number may be.
    fn slots(&self, id: u32) -> impl Iterator<Item = u32> + use<> {
        let max = self.filters_max;
        (id < max).then(|| [id, id + max]).into_iter().flatten()
    }

    fn pattern(&self, slot: u32) -> Option<(Pattern, u32)> {
        if let Some(it) = self.short.as_ref().and_then(|set| set.get(slot)) {
            let pattern = Pattern::Short { value: bytes(it.value), mask: bytes(it.mask) };
            return Some((pattern, it.priority));
        }
        let it = self.long.as_ref().and_then(|set| set.get(slot))?;
        let pattern = Pattern::Long { value: bytes(it.value), mask: bytes(it.mask) };
        Some((pattern, it.priority))
    }

    fn is_free(&self, slot: u32) -> bool {
        self.short.as_ref().is_none_or(|set| set.is_free(slot))
            && self.long.as_ref().is_none_or(|set| set.is_free(slot))
    }

    /// Tidies up after changes, as long as `go_on` says; whether all is.
    pub fn settle(&mut self, mut go_on: impl FnMut() -> bool) -> bool {
        while !self.settled {
            self.settled = self.short.as_mut().is_none_or(|set| set.settle(SETTLED_AT_ONCE))
                && self.long.as_mut().is_none_or(|set| set.settle(SETTLED_AT_ONCE));
            if self.settled {
                self.any = self.count > 0;
            }
            if !go_on() {
                break;
            }
        }
        self.settled
    }

    /// Goes on with changes, as long as `go_on` says; whether something has become of them. Others may be begun only then.
    /// Sets for patterns of the lengths that are among them are there.
    pub fn apply(
        &mut self,
        changes: &mut Changes,
        queues: &mut dyn AtPorts,
        mut go_on: impl FnMut() -> bool,
    ) -> bool {
        if !self.settle(&mut go_on) {
            return false;
        }
        while let Some(setting) = changes.queues.get(changes.checked) {
            if let Err(refused) = check(setting, queues) {
                changes.result = Some(Err((NO_FILTER, refused)));
                return true;
            }
            changes.checked += 1;
            if changes.checked.is_multiple_of(QUEUES_CHECKED_AT_ONCE) && !go_on() {
                return false;
            }
        }
        if changes.staged == 0 && changes.sweep {
            self.marks.fill(0);
        }
        while let Some(change) = changes.all.get(changes.staged) {
            if let Err(refused) = self.stage(change, changes.sweep) {
                self.end(false);
                changes.result = Some(Err(refused));
                return true;
            }
            changes.staged += 1;
            if !go_on() {
                return false;
            }
        }
        while changes.sweep && changes.swept < self.filters_max {
            let end = self.filters_max.min(changes.swept + 64);
            for id in changes.swept..end {
                if self.marks[id as usize / 64] & 1 << (id % 64) == 0 {
                    self.remove(id);
                }
            }
            changes.swept = end;
            if !go_on() {
                return false;
            }
        }
        self.end(true);
        if changes.sweep {
            queues.each(&mut Queues::unset);
        }
        for QueueSetting { vport, queue, weight, frames, bytes } in &changes.queues {
            let (weight, frames, bytes) = (*weight as u16, *frames as u16, *bytes);
            let to = Setting { weight, frames, bytes };
            if let Some(queues) = queues.at(*vport) {
                queues.set(usize::from(*queue).wrapping_sub(1), to);
            }
        }
        changes.result = Some(Ok(self.count));
        true
    }

    fn stage(&mut self, change: &Change, marks: bool) -> Result<(), (u32, NoRoom)> {
        let filter = match *change {
            Change::Set(filter) => filter,
            Change::Remove(id) => {
                self.remove(id);
                return Ok(());
            }
        };
        self.any = true;
        let id = filter.id;
        if let Some(word) = self.marks.get_mut(id as usize / 64).filter(|_| marks) {
            *word |= 1 << (id % 64);
        }
        if self.filter(id) == Some(filter.under_mask()) {
            return Ok(());
        }
        self.remove(id);
        let Filter { priority, pattern, action, .. } = filter;
        let refused = (id, NoRoom::Crowded);
        // What was there has one slot at most: others of these changes with this number went at once.
        let slot = self.slots(id).find(|slot| self.is_free(*slot)).ok_or(refused)?;
        let set = match pattern {
            Pattern::Short { value, mask } => {
                let (value, mask) = (words(value), words(mask));
                let filter = pdp_filters::Filter { value, mask, priority };
                self.short.as_mut().map(|set| set.set(slot, filter))
            }
            Pattern::Long { value, mask } => {
                let (value, mask) = (words(value), words(mask));
                let filter = pdp_filters::Filter { value, mask, priority };
                self.long.as_mut().map(|set| set.set(slot, filter))
            }
        };
        set.and_then(Result::ok).ok_or(refused)?;
        self.actions[slot as usize] = action;
        self.count += 1;
        Ok(())
    }

    fn remove(&mut self, id: u32) {
        for slot in self.slots(id) {
            let short = self.short.as_mut().is_some_and(|set| set.remove(slot).is_ok());
            let long = self.long.as_mut().is_some_and(|set| set.remove(slot).is_ok());
            self.count -= u32::from(short || long);
        }
    }

    fn end(&mut self, commit: bool) {
        if commit {
            self.short.iter_mut().for_each(|set| set.commit());
            self.long.iter_mut().for_each(|set| set.commit());
            self.in_force = self.count;
        } else {
            self.short.iter_mut().for_each(|set| set.abandon());
            self.long.iter_mut().for_each(|set| set.abandon());
            self.count = self.in_force;
        }
        self.settled = false;
    }
}

/// Whether a queue can be so. What it may have at all was looked at before.
fn check(setting: &QueueSetting, queues: &mut dyn AtPorts) -> Result<(), NoRoom> {
    let QueueSetting { vport, queue, frames, bytes, .. } = *setting;
    let Some(queues) = queues.at(vport) else { return Err(NoRoom::NoQueue(vport, queue, 0)) };
    let Some(spec) = queues.spec(usize::from(queue).wrapping_sub(1)) else {
        return Err(NoRoom::NoQueue(vport, queue, queues.count()));
    };
    if frames > u32::from(spec.frames) {
        return Err(NoRoom::TooLong(vport, queue, spec.frames, 0));
    }
    if bytes > spec.bytes {
        return Err(NoRoom::TooLong(vport, queue, spec.frames, spec.bytes));
    }
    Ok(())
}

/// A pattern's bits as words, the first bits first.
pub fn words<const B: usize, const W: usize>(bytes: [u8; B]) -> [u64; W] {
    let word =
        |at: usize| bytes[8 * at..].first_chunk().map_or(0, |word| u64::from_be_bytes(*word));
    std::array::from_fn(word)
}

fn bytes<const B: usize, const W: usize>(words: [u64; W]) -> [u8; B] {
    std::array::from_fn(|at| words[at / 8].to_be_bytes()[at % 8])
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use pdp_filters::NONE;
    use pdp_proto::slowpath::{NO_COUNTER, Verdict};
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    const IDS: u32 = 24;

    struct NoQueues;

    impl AtPorts for NoQueues {
        fn at(&mut self, _: u8) -> Option<&mut Queues> {
            None
        }

        fn each(&mut self, _: &mut dyn FnMut(&mut Queues)) {}
    }

    /// What filters there are, each with when it was set, and what is found by looking at all.
    #[derive(Clone, Default)]
    struct Slow {
        filters: BTreeMap<u32, (Filter, u64)>,
        age: u64,
    }

    impl Slow {
        fn apply(&mut self, changes: &Changes) {
            let mut set = vec![];
            for change in &changes.all {
                match change {
                    Change::Set(filter) => {
                        set.push(filter.id);
                        let filter = filter.under_mask();
                        if self.filters.get(&filter.id).is_none_or(|it| it.0 != filter) {
                            self.filters.insert(filter.id, (filter, self.age));
                            self.age += 1;
                        }
                    }
                    Change::Remove(id) => _ = self.filters.remove(id),
                }
            }
            if changes.sweep {
                self.filters.retain(|id, _| set.contains(id));
            }
        }

        fn find(&self, key: &[u8]) -> Option<Action> {
            let meets = |filter: &Filter| match &filter.pattern {
                Pattern::Short { value, mask } => meets(key, value, mask),
                Pattern::Long { value, mask } => meets(key, value, mask),
            };
            let met = self.filters.values().filter(|(filter, _)| meets(filter));
            let best = met.max_by_key(|(filter, age)| (filter.priority, std::cmp::Reverse(*age)));
            best.map(|(filter, _)| filter.action)
        }
    }

    fn meets(key: &[u8], value: &[u8], mask: &[u8]) -> bool {
        let mut bits = value.iter().zip(mask).zip(key);
        key.len() == value.len() && bits.all(|((value, mask), key)| key & mask == *value)
    }

    fn find(actions: &Actions, key: &[u8]) -> Option<Action> {
        let mut slots = [NONE];
        if let Ok(key) = <[u8; 16]>::try_from(key) {
            actions.short.as_ref().unwrap().find(&[words(key)], &mut slots);
        } else {
            let key = words(<[u8; 40]>::try_from(key).unwrap());
            actions.long.as_ref().unwrap().find(&[key], &mut slots);
        }
        (slots != [NONE]).then(|| actions.action(slots[0]))
    }

    fn action(number: u8) -> Action {
        let mut action = Action { vport: number, counter: NO_COUNTER, ..Action::default() };
        action.verdict = Verdict::ALL[usize::from(number % 4)];
        action
    }

    prop_compose! {
        fn filter()(
            id in 0..IDS, priority in 0_u32..4, long: bool, at in 0..16_usize,
            value in 0..4_u8, mask in 0..4_u8, number: u8,
        ) -> Filter {
            let pattern = match long {
                false => {
                    let (mut of, mut under) = ([0; 16], [0; 16]);
                    (of[at], under[at]) = (value, mask);
                    Pattern::Short { value: of, mask: under }
                }
                true => {
                    let (mut of, mut under) = ([0; 40], [0; 40]);
                    (of[at + 24], under[at + 24]) = (value, mask);
                    Pattern::Long { value: of, mask: under }
                }
            };
            Filter { id, priority, pattern, action: action(number) }
        }
    }

    fn changes() -> impl Strategy<Value = (Vec<Change>, bool)> {
        let change = prop_oneof![
            3 => filter().prop_map(Change::Set),
            // Also of numbers that no filter may have.
            1 => (0..3 * IDS).prop_map(Change::Remove),
        ];
        (vec(change, 0..40), prop::bool::weighted(0.2))
    }

    proptest! {
        /// Before, between and after changes, in pieces of any length, what is found is what a look at all filters
        /// finds: of those before, until all of the changes hold at once, or none.
        #[test]
        fn changes_hold_at_once_or_not_at_all(
            all in vec((changes(), 1..20_usize), 1..12),
            keys in vec((0..16_usize, 0..4_u8), 16),
        ) {
            let mut actions = Actions::new(IDS, 1);
            (actions.short, actions.long) = (Some(room_for(IDS, 1)), Some(room_for(IDS, 2)));
            let mut slow = Slow::default();
            let keys: Vec<Vec<u8>> = keys.into_iter().flat_map(|(at, bits)| {
                let (mut short, mut long) = (vec![0; 16], vec![0; 40]);
                (short[at], long[at + 24]) = (bits, bits);
                [short, long]
            }).collect();
            for ((all, sweep), piece) in all {
                let mut changes = Changes { all, sweep, ..Changes::default() };
                let mut after = slow.clone();
                after.apply(&changes);
                loop {
                    let mut left = piece;
                    let done = actions.apply(&mut changes, &mut NoQueues, || { left = left.saturating_sub(1); left > 0 });
                    if done {
                        break;
                    }
                    for key in &keys {
                        prop_assert_eq!(find(&actions, key), slow.find(key));
                    }
                }
                if let Some(Ok(count)) = changes.result {
                    slow = after;
                    prop_assert_eq!(count as usize, slow.filters.len());
                }
                for key in &keys {
                    prop_assert_eq!(find(&actions, key), slow.find(key));
                }
                for id in 0..IDS {
                    prop_assert_eq!(actions.filter(id), slow.filters.get(&id).map(|it| it.0));
                }
                prop_assert_eq!(actions.count() as usize, slow.filters.len());
            }
        }
    }

    /// A batch may replace all filters again and again. One that is refused has none of the others come into force.
    #[test]
    fn what_has_no_room_changes_nothing() {
        let mut actions = Actions::new(1024, 0);
        actions.short = Some(room_for(1024, 1));
        let filter = |id: u32, value: u8| {
            let pattern = Pattern::Short { value: [value; 16], mask: [255; 16] };
            Change::Set(Filter { id, priority: 1, pattern, action: action(value) })
        };
        let apply = |actions: &mut Actions, all: Vec<Change>| {
            let mut changes = Changes { all, ..Changes::default() };
            while !actions.apply(&mut changes, &mut NoQueues, || false) {}
            changes.result.unwrap()
        };
        let all = |value| (0..64).map(|id| filter(id, id as u8 + value)).collect::<Vec<_>>();
        assert_eq!(apply(&mut actions, all(0)), Ok(64));
        let alike: Vec<_> = (64..1024).map(|id| filter(id, 255)).collect();
        let refused = apply(&mut actions, [all(64), all(128), alike].concat());
        assert!(matches!(refused, Err((64.., NoRoom::Crowded))), "{refused:?}");
        assert_eq!(find(&actions, &[3; 16]), Some(action(3)));
        assert_eq!(find(&actions, &[64; 16]), None);
        // All slots are back.
        for value in [64, 128, 64] {
            assert_eq!(apply(&mut actions, [all(0), all(192), all(value)].concat()), Ok(64));
            assert_eq!(find(&actions, &[value; 16]), Some(action(value)));
            assert_eq!(find(&actions, &[192; 16]), None);
        }
    }

    #[test]
    fn a_packet_that_leaves_counts_where_it_was_counted() {
        let (mut one, mut two) = (Actions::new(8, 4), Actions::new(8, 4));
        let counted = one.count_packet(3, 60);
        assert_eq!(one.count_packet(4, 60), 0, "there is no such counter");
        two.count_left(counted, 60, false);
        one.count_left(0, 60, false);
        assert!(two.counters.iter().chain(&one.counters).all(|it| it.sent == 0));
        let counts =
            |of: &Actions| [of.counters[3].packets, of.counters[3].sent, of.counters[3].sent_bytes];
        for (bytes, back, wanted) in
            [(60, false, [1, 1, 60]), (58, false, [1, 2, 118]), (58, true, [1, 1, 60])]
        {
            one.count_left(counted, bytes, back);
            assert_eq!(counts(&one), wanted);
        }
        for _ in 0..GENERATIONS {
            let mut next = Actions::new(0, 1);
            assert!(next.count_packet(0, 1) != 0);
        }
    }
}
