//! The state that a slow path programs into an engine: filters, their actions, and counters.
//!
//! Filters are in one of two sets, by the length of their pattern. Each set has two slots
//! for each filter number: slot `number`, and slot `number` plus the maximum number of
//! filters. A filter that replaces another takes the slot that is free in both sets. Actions
//! are stored by slot. So all of a [`ChangeSet`] takes effect with the commit of the sets.
//!
//! The engine applies changes in bounded pieces, between two batches of frames. The
//! caller that builds the changes allocates all memory; this module allocates none.

use std::sync::atomic::{AtomicU32, Ordering};

use pdp_filters::{FilterRefusal, Filters};
use pdp_proto::slowpath::{
    COUNTERS_MAX, Filter, FilterAction, FilterCounter, FilterPattern, NO_FILTER, QueueSetting,
};

use crate::queues::{AtPorts, QueueParameters, Queues};

/// Steps that a look-up may take ([`Filters::new`]). Sets of 100,000 filters take up to 1,400.
const STEPS_MAX: usize = 2048;

/// Filters that are settled between two checks of the time.
const SETTLED_AT_ONCE: usize = 16;

/// Layout of a packet's counter tag: the counter's number in
/// the low bits, and above it the generation of the tables.
const COUNTER_BITS: u32 = 17;
const GENERATIONS: u32 = (1 << (u32::BITS - COUNTER_BITS)) - 1;
const _: () = assert!(COUNTERS_MAX <= 1 << COUNTER_BITS);

/// Queues that are checked between two checks of the time.
const QUEUES_CHECKED_AT_ONCE: usize = 16;

/// Changes that can take effect together, at most, with `filters_max` filters.
pub fn changes_max(filters_max: u32) -> usize {
    filters_max as usize + 1024
}

/// A change to the filters.
#[derive(Clone, Debug)]
pub enum FilterChange {
    /// Sets a filter. It replaces the one with the same number.
    Set(Filter),
    /// Removes the filter with this number.
    Remove(u32),
}

/// Changes that take effect together, or not at all.
#[derive(Debug, Default)]
pub struct ChangeSet {
    /// Changes of filters, in order.
    pub all: Vec<FilterChange>,
    /// New queue parameters, [`QUEUES_SET_MAX`](pdp_proto::slowpath::QUEUES_SET_MAX) at most. They
    /// take effect together.
    pub queues: Vec<QueueSetting>,
    /// Removes every filter that these changes do not set.
    pub sweep: bool,
    /// Changes staged so far, and ids swept so far.
    staged: usize,
    swept: u32,
    /// Entries of `queues` checked so far.
    checked: usize,
    /// The result: the number of filters, or the refused filter
    /// and the reason. `None` while the changes are in progress.
    pub result: Option<Result<u32, (u32, ChangeRefusal)>>,
}

impl ChangeSet {
    /// Returns the number of changes.
    pub fn count(&self) -> usize {
        self.all.len() + self.queues.len()
    }
}

/// Reason why a filter or a queue is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChangeRefusal {
    /// Look-ups would take too long.
    Crowded,
    /// The vport has no such queue: vport, queue (counted from 1), and the number of queues.
    NoQueue(u8, u16, usize),
    /// The queue is to be longer than its spec allows: vport, queue, the most
    /// frames, and the most bytes. 0 bytes: the request exceeds the frames.
    TooLong(u8, u16, u16, u32),
}

impl ChangeRefusal {
    /// Returns the reason, and what to do.
    pub fn text(self) -> String {
        match self {
            Self::Crowded => FilterRefusal::Crowded.to_string(),
            Self::NoQueue(vport, _, 0) => {
                format!("vport {vport} has no queues (set `queues` of its link's end in the spec)")
            }
            Self::NoQueue(vport, queue, count) => {
                format!("queue {queue} of vport {vport} does not exist (use 1 to {count})")
            }
            Self::TooLong(vport, queue, frames, 0) => format!(
                "queue {queue} of vport {vport} holds at most {frames} frames (raise its length in the spec)"
            ),
            Self::TooLong(vport, queue, _, bytes) => format!(
                "queue {queue} of vport {vport} holds at most {bytes} bytes (raise its length in the spec)"
            ),
        }
    }
}

/// Allocates a set for `filters_max` filters with patterns
/// of `W` words. `secret` is as for [`Filters::new`].
pub fn with_capacity<const W: usize>(filters_max: u32, secret: u64) -> Box<Filters<W>> {
    Box::new(Filters::new(2 * filters_max as usize, STEPS_MAX, secret))
}

/// Filters, actions and counters of one engine.
#[derive(Debug)]
pub struct Actions {
    filters_max: u32,
    /// Filters with patterns of 128 bits. Allocated with the first such filter ([`with_capacity`]).
    pub short: Option<Box<Filters<2>>>,
    /// Filters with patterns of 320 bits; see `short`.
    pub long: Option<Box<Filters<5>>>,
    /// Actions by slot.
    actions: Vec<FilterAction>,
    /// Counters by number.
    pub counters: Vec<FilterCounter>,
    /// Generation of these tables, to tell them from earlier ones; never 0.
    generation: u32,
    /// Number of filters, with and without the staged ones.
    count: u32,
    in_force: u32,
    /// One bit for each id that the staged changes set, if they sweep.
    marks: Vec<u64>,
    settled: bool,
    /// True if a filter may be in force or staged.
    any: bool,
}

impl Actions {
    /// Returns empty tables for `filters_max` filters of each length, and for `counters` counters.
    pub fn new(filters_max: u32, counters: u32) -> Self {
        static MADE: AtomicU32 = AtomicU32::new(0);
        let made = MADE.fetch_add(1, Ordering::Relaxed);
        let words = filters_max.div_ceil(64) as usize;
        Self {
            filters_max,
            short: None,
            long: None,
            actions: vec![FilterAction::default(); 2 * filters_max as usize],
            counters: vec![FilterCounter::default(); counters as usize],
            generation: made % GENERATIONS + 1,
            count: 0,
            in_force: 0,
            marks: vec![0; words],
            settled: true,
            any: false,
        }
    }

    /// True if no filter is in force.
    #[inline]
    pub fn is_empty(&self) -> bool {
        !self.any
    }

    /// True if no work is left over from earlier changes.
    pub fn is_settled(&self) -> bool {
        self.settled
    }

    /// Returns the number of valid filter ids.
    pub fn filters_max(&self) -> u32 {
        self.filters_max
    }

    /// Returns the number of filters.
    pub fn count(&self) -> u32 {
        self.count
    }

    /// Returns the memory in use, bytes.
    pub fn memory(&self) -> usize {
        let actions = self.actions.len() * size_of::<FilterAction>();
        let marks = self.marks.len() * size_of::<u64>();
        let counters = self.counters.len() * size_of::<FilterCounter>();
        let sets = self.short.as_ref().map_or(0, |set| set.memory())
            + self.long.as_ref().map_or(0, |set| set.memory());
        size_of::<Self>() + actions + marks + counters + sets
    }

    /// Counts a packet. Returns the tag to pass to [`Self::count_sent`] when the packet is sent.
    #[inline]
    pub fn count_packet(&mut self, counter: u32, bytes: usize) -> u32 {
        let Some(here) = self.counters.get_mut(counter as usize) else { return 0 };
        here.packets += 1;
        here.bytes += bytes as u64;
        self.generation << COUNTER_BITS | counter
    }

    /// Counts a packet that was sent. With `back`, takes that count back,
    /// because the packet was not sent after all. Ignores tags of other tables.
    #[inline]
    pub fn count_sent(&mut self, counted: u32, bytes: usize, back: bool) {
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

    /// Returns the action of the filter in a slot.
    #[inline]
    pub fn action(&self, slot: u32) -> FilterAction {
        self.actions[slot as usize]
    }

    /// Returns the filter with this number, if there is one.
    pub fn filter(&self, id: u32) -> Option<Filter> {
        self.slots(id).find_map(|slot| {
            let (pattern, priority) = self.pattern(slot)?;
            Some(Filter { id, priority, pattern, action: self.action(slot) })
        })
    }

    /// Returns the slots that the filter with this number can be in.
    fn slots(&self, id: u32) -> impl Iterator<Item = u32> + use<> {
        let max = self.filters_max;
        (id < max).then(|| [id, id + max]).into_iter().flatten()
    }

    fn pattern(&self, slot: u32) -> Option<(FilterPattern, u32)> {
        if let Some(it) = self.short.as_ref().and_then(|set| set.get(slot)) {
            let pattern = FilterPattern::Short { value: bytes(it.value), mask: bytes(it.mask) };
            return Some((pattern, it.priority));
        }
        let it = self.long.as_ref().and_then(|set| set.get(slot))?;
        let pattern = FilterPattern::Long { value: bytes(it.value), mask: bytes(it.mask) };
        Some((pattern, it.priority))
    }

    fn is_free(&self, slot: u32) -> bool {
        self.short.as_ref().is_none_or(|set| set.is_free(slot))
            && self.long.as_ref().is_none_or(|set| set.is_free(slot))
    }

    /// Settles earlier changes while `go_on` returns true. Returns true once nothing is left to do.
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

    /// Continues with changes while `go_on` returns true. Returns true once they have a result;
    /// only then may the next ones begin. The sets for the pattern lengths in `changes` must exist.
    pub fn apply(
        &mut self,
        changes: &mut ChangeSet,
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
            let to = QueueParameters { weight, frames, bytes };
            if let Some(queues) = queues.at(*vport) {
                queues.set(usize::from(*queue).wrapping_sub(1), to);
            }
        }
        changes.result = Some(Ok(self.count));
        true
    }

    fn stage(&mut self, change: &FilterChange, marks: bool) -> Result<(), (u32, ChangeRefusal)> {
        let filter = match *change {
            FilterChange::Set(filter) => filter,
            FilterChange::Remove(id) => {
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
        let refused = (id, ChangeRefusal::Crowded);
        // The old filter occupies at most one slot: earlier filters
        // of this batch with the same number were removed at once.
        let slot = self.slots(id).find(|slot| self.is_free(*slot)).ok_or(refused)?;
        let set = match pattern {
            FilterPattern::Short { value, mask } => {
                let (value, mask) = (words(value), words(mask));
                let filter = pdp_filters::Filter { value, mask, priority };
                self.short.as_mut().map(|set| set.set(slot, filter))
            }
            FilterPattern::Long { value, mask } => {
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

/// Checks a queue's new parameters against its spec. The caller has checked the general limits.
fn check(setting: &QueueSetting, queues: &mut dyn AtPorts) -> Result<(), ChangeRefusal> {
    let QueueSetting { vport, queue, frames, bytes, .. } = *setting;
    let Some(queues) = queues.at(vport) else {
        return Err(ChangeRefusal::NoQueue(vport, queue, 0));
    };
    let Some(spec) = queues.spec(usize::from(queue).wrapping_sub(1)) else {
        return Err(ChangeRefusal::NoQueue(vport, queue, queues.count()));
    };
    if frames > u32::from(spec.frames) {
        return Err(ChangeRefusal::TooLong(vport, queue, spec.frames, 0));
    }
    if bytes > spec.bytes {
        return Err(ChangeRefusal::TooLong(vport, queue, spec.frames, spec.bytes));
    }
    Ok(())
}

/// Converts a pattern's bytes to words, first bits first.
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
    use pdp_proto::slowpath::{FilterVerdict, NO_COUNTER};
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

    /// Reference model: the filters, each with the time when it was set. It searches all of them.
    #[derive(Clone, Default)]
    struct Slow {
        filters: BTreeMap<u32, (Filter, u64)>,
        age: u64,
    }

    impl Slow {
        fn apply(&mut self, changes: &ChangeSet) {
            let mut set = vec![];
            for change in &changes.all {
                match change {
                    FilterChange::Set(filter) => {
                        set.push(filter.id);
                        let filter = filter.under_mask();
                        if self.filters.get(&filter.id).is_none_or(|it| it.0 != filter) {
                            self.filters.insert(filter.id, (filter, self.age));
                            self.age += 1;
                        }
                    }
                    FilterChange::Remove(id) => _ = self.filters.remove(id),
                }
            }
            if changes.sweep {
                self.filters.retain(|id, _| set.contains(id));
            }
        }

        fn find(&self, key: &[u8]) -> Option<FilterAction> {
            let meets = |filter: &Filter| match &filter.pattern {
                FilterPattern::Short { value, mask } => meets(key, value, mask),
                FilterPattern::Long { value, mask } => meets(key, value, mask),
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

    fn find(actions: &Actions, key: &[u8]) -> Option<FilterAction> {
        let mut slots = [NONE];
        if let Ok(key) = <[u8; 16]>::try_from(key) {
            actions.short.as_ref().unwrap().find(&[words(key)], &mut slots);
        } else {
            let key = words(<[u8; 40]>::try_from(key).unwrap());
            actions.long.as_ref().unwrap().find(&[key], &mut slots);
        }
        (slots != [NONE]).then(|| actions.action(slots[0]))
    }

    fn action(number: u8) -> FilterAction {
        let mut action =
            FilterAction { vport: number, counter: NO_COUNTER, ..FilterAction::default() };
        action.verdict = FilterVerdict::ALL[usize::from(number % 4)];
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
                    FilterPattern::Short { value: of, mask: under }
                }
                true => {
                    let (mut of, mut under) = ([0; 40], [0; 40]);
                    (of[at + 24], under[at + 24]) = (value, mask);
                    FilterPattern::Long { value: of, mask: under }
                }
            };
            Filter { id, priority, pattern, action: action(number) }
        }
    }

    fn changes() -> impl Strategy<Value = (Vec<FilterChange>, bool)> {
        let change = prop_oneof![
            3 => filter().prop_map(FilterChange::Set),
            // Includes numbers beyond the valid ids.
            1 => (0..3 * IDS).prop_map(FilterChange::Remove),
        ];
        (vec(change, 0..40), prop::bool::weighted(0.2))
    }

    proptest! {
        /// Before, during and after changes, in pieces of any length,
        /// look-ups find what a scan of all filters finds. They see the old
        /// filters until all changes take effect at once, or none does.
        #[test]
        fn filter_changes_apply_atomically(
            all in vec((changes(), 1..20_usize), 1..12),
            keys in vec((0..16_usize, 0..4_u8), 16),
        ) {
            let mut actions = Actions::new(IDS, 1);
            (actions.short, actions.long) = (Some(with_capacity(IDS, 1)), Some(with_capacity(IDS, 2)));
            let mut slow = Slow::default();
            let keys: Vec<Vec<u8>> = keys.into_iter().flat_map(|(at, bits)| {
                let (mut short, mut long) = (vec![0; 16], vec![0; 40]);
                (short[at], long[at + 24]) = (bits, bits);
                [short, long]
            }).collect();
            for ((all, sweep), piece) in all {
                let mut changes = ChangeSet { all, sweep, ..ChangeSet::default() };
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

    /// A batch may replace all filters again and again. If
    /// one filter is refused, none of the batch takes effect.
    #[test]
    fn refused_filter_batch_changes_nothing() {
        let mut actions = Actions::new(1024, 0);
        actions.short = Some(with_capacity(1024, 1));
        let filter = |id: u32, value: u8| {
            let pattern = FilterPattern::Short { value: [value; 16], mask: [255; 16] };
            FilterChange::Set(Filter { id, priority: 1, pattern, action: action(value) })
        };
        let apply = |actions: &mut Actions, all: Vec<FilterChange>| {
            let mut changes = ChangeSet { all, ..ChangeSet::default() };
            while !actions.apply(&mut changes, &mut NoQueues, || false) {}
            changes.result.unwrap()
        };
        let all = |value| (0..64).map(|id| filter(id, id as u8 + value)).collect::<Vec<_>>();
        assert_eq!(apply(&mut actions, all(0)), Ok(64));
        let alike: Vec<_> = (64..1024).map(|id| filter(id, 255)).collect();
        let refused = apply(&mut actions, [all(64), all(128), alike].concat());
        assert!(matches!(refused, Err((64.., ChangeRefusal::Crowded))), "{refused:?}");
        assert_eq!(find(&actions, &[3; 16]), Some(action(3)));
        assert_eq!(find(&actions, &[64; 16]), None);
        // All slots are free again.
        for value in [64, 128, 64] {
            assert_eq!(apply(&mut actions, [all(0), all(192), all(value)].concat()), Ok(64));
            assert_eq!(find(&actions, &[value; 16]), Some(action(value)));
            assert_eq!(find(&actions, &[192; 16]), None);
        }
    }

    #[test]
    fn sent_packet_counts_in_its_original_counter() {
        let (mut one, mut two) = (Actions::new(8, 4), Actions::new(8, 4));
        let counted = one.count_packet(3, 60);
        assert_eq!(one.count_packet(4, 60), 0, "there is no such counter");
        two.count_sent(counted, 60, false);
        one.count_sent(0, 60, false);
        assert!(two.counters.iter().chain(&one.counters).all(|it| it.sent == 0));
        let counts =
            |of: &Actions| [of.counters[3].packets, of.counters[3].sent, of.counters[3].sent_bytes];
        for (bytes, back, wanted) in
            [(60, false, [1, 1, 60]), (58, false, [1, 2, 118]), (58, true, [1, 1, 60])]
        {
            one.count_sent(counted, bytes, back);
            assert_eq!(counts(&one), wanted);
        }
        for _ in 0..GENERATIONS {
            let mut next = Actions::new(0, 1);
            assert!(next.count_packet(0, 1) != 0);
        }
    }
}
