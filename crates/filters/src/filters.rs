//! The set of filters.

use std::fmt;

use crate::bits::NumberSet;
use crate::bucket::{ChainPosition, HashBuckets, HomeBucket, NONE};
use crate::cam::{CAM_MAX, Cam};
use crate::table::{CHAIN_MAX, FilterTable, LEVELS, relaxed};

/// Maximum number of keys in a batch.
pub const BATCH: usize = 64;

/// Maximum number of slots.
pub const SLOTS_MAX: usize = 1 << 20;

/// Maximum number of tables.
pub const TABLES_MAX: usize = 1 << 10;

/// Upper limit for the steps of a look-up. With memory
/// that no cache holds, they take half a millisecond.
pub const STEPS_MAX: usize = 1 << 12;

/// Tables tried for a filter before it goes to the ternary memory: those that hash most bits.
const TRIES: usize = 3;

/// Filters of the ternary memory whose masks are tried for a new table.
const ASKED: usize = 32;

/// A table is tried with one of this many filters in the ternary memory.
const SHARE: usize = 4;

/// A table that takes this percentage of the best one's filters counts as equally good.
const NEARLY: usize = 90;

/// Filters moved together out of the ternary memory.
const MOVED: usize = 64;

/// Bits of an entry for its state and its table's number. The others are
/// for its age: enough for a million filters per second, for 35 years.
const STATE_BITS: u32 = 2;
const TABLE_BITS: u32 = 12;

/// Table number of filters in the ternary memory.
const CAM: u16 = (1 << TABLE_BITS) - 1;
const _: () = assert!(TABLES_MAX <= CAM as usize);

/// Slots checked per change, to update their tables' highest priority.
const SEEN_PER_CHANGE: usize = 4;

/// A pattern of bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Filter<const W: usize> {
    /// Expected bits of a key. Bits outside the mask are ignored and stored as 0.
    pub value: [u64; W],
    /// Relevant bits.
    pub mask: [u64; W],
    /// If several filters match a key, the highest priority wins; among equals, the oldest.
    pub priority: u32,
}

/// Why a change can't be staged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FilterRefusal {
    /// The slot is not below [`Filters::capacity`].
    Slot,
    /// The slot already has a filter, perhaps one that the next commit removes.
    Taken,
    /// The slot has no filter, or the next commit removes it.
    Empty,
    /// Look-ups would take more steps than [`Filters::new`]
    /// allows: too many masks, or too many similar filters.
    Crowded,
    /// Earlier changes are not settled: call [`Filters::settle`] first.
    Unsettled,
}

impl fmt::Display for FilterRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Slot => "the slot does not exist",
            Self::Taken => "the slot has a filter",
            Self::Empty => "the slot has no filter",
            Self::Crowded => {
                "look-ups would take too long (use fewer masks, or fewer similar filters)"
            }
            Self::Unsettled => "earlier changes are not cleaned up",
        })
    }
}

impl std::error::Error for FilterRefusal {}

/// State of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FilterState {
    /// No filter.
    Free,
    Stays,
    /// Visible from the commit on.
    Comes,
    /// Visible until the commit.
    Goes,
}

impl FilterState {
    /// All states, by their numbers.
    const ALL: [Self; 1 << STATE_BITS] = [Self::Free, Self::Stays, Self::Comes, Self::Goes];
}

/// Phase of the changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CommitPhase {
    /// Changes are collected.
    Staged,
    /// Changes are visible and being settled.
    Committed,
    /// Changes are dropped and being settled.
    Abandoned,
}

/// A filter and its location. There are as many entries as slots, so they are as small as possible.
#[derive(Clone, Debug)]
struct FilterEntry<const W: usize> {
    value: [u64; W],
    mask: [u64; W],
    priority: u32,
    /// Next entry of the chain, which is ordered by descending priority,
    /// then by age. In the ternary memory: the filter's place.
    next: u32,
    /// From the lowest bit: state, table, age.
    packed: u64,
}

impl<const W: usize> FilterEntry<W> {
    fn new(filter: Filter<W>, state: FilterState, age: u64) -> Self {
        let Filter { value, mask, priority } = filter;
        let value = std::array::from_fn(|word| value[word] & mask[word]);
        let packed = (age << TABLE_BITS | u64::from(CAM)) << STATE_BITS | state as u64;
        Self { value, mask, priority, next: NONE, packed }
    }

    fn filter(&self) -> Filter<W> {
        Filter { value: self.value, mask: self.mask, priority: self.priority }
    }

    /// True if it matches a key.
    #[inline]
    fn meets(&self, key: &[u64; W]) -> bool {
        let differs = |word: usize| key[word] & self.mask[word] ^ self.value[word];
        (0..W).fold(0, |all, word| all | differs(word)) == 0
    }

    fn state(&self) -> FilterState {
        FilterState::ALL[self.packed as usize % FilterState::ALL.len()]
    }

    fn set_state(&mut self, state: FilterState) {
        self.packed = self.packed >> STATE_BITS << STATE_BITS | state as u64;
    }

    fn table(&self) -> u16 {
        (self.packed >> STATE_BITS) as u16 & CAM
    }

    fn set_table(&mut self, table: u16) {
        self.packed ^= u64::from(self.table() ^ table) << STATE_BITS;
    }

    fn goes_before(&self, other: &Self) -> bool {
        let age = |entry: &Self| entry.packed >> (TABLE_BITS + STATE_BITS);
        self.priority > other.priority || self.priority == other.priority && age(self) < age(other)
    }
}

/// Filters by slots. The caller chooses the slots'
/// numbers, and stores each filter's meaning by slot.
#[derive(Debug)]
pub struct Filters<const W: usize> {
    entries: Vec<FilterEntry<W>>,
    buckets: HashBuckets,
    cam: Cam<W>,
    tables: Vec<FilterTable<W>>,
    /// Tables with filters, in descending order of their highest priority.
    order: Vec<u16>,
    /// Tables without filters.
    spare: Vec<u16>,
    /// Maximum steps of a look-up in all tables.
    steps: usize,
    steps_max: usize,
    /// The newest table, and how many places of the ternary memory were already tried for it.
    newest: u16,
    asked: usize,
    /// Age of the next filter.
    age: u64,
    /// Changed slots that are not settled.
    changed: NumberSet,
    phase: CommitPhase,
    /// Next slot to check for its table's highest priority.
    seen: usize,
    random: u64,
}

impl<const W: usize> Filters<W> {
    /// Makes slots 0 to `capacity` - 1, at most [`SLOTS_MAX`], and allocates all
    /// memory for them. Later only tables, of some 200 bytes each, are allocated.
    ///
    /// `steps_max`, from 2 to [`STEPS_MAX`], limits the steps of a look-up
    /// ([`Self::steps`]); other values are clamped. Filters that would
    /// exceed it are refused. `secret` must be random and unknown to others.
    pub fn new(capacity: usize, steps_max: usize, secret: u64) -> Self {
        let capacity = capacity.min(SLOTS_MAX);
        let filter = Filter { value: [0; W], mask: [0; W], priority: 0 };
        Self {
            entries: vec![FilterEntry::new(filter, FilterState::Free, 0); capacity],
            buckets: HashBuckets::new(capacity),
            cam: Cam::new(),
            tables: Vec::new(),
            order: Vec::new(),
            spare: Vec::new(),
            steps: 0,
            steps_max: steps_max.clamp(2, STEPS_MAX),
            newest: 0,
            asked: CAM_MAX,
            age: 0,
            changed: NumberSet::new(capacity),
            phase: CommitPhase::Staged,
            seen: 0,
            random: secret,
        }
    }

    /// Number of slots.
    pub fn capacity(&self) -> usize {
        self.entries.len()
    }

    /// Returns the filter in a slot, if any. Staged filters
    /// are included, filters to be removed are not.
    pub fn get(&self, slot: u32) -> Option<Filter<W>> {
        let entry = self.entries.get(slot as usize)?;
        match (entry.state(), self.phase) {
            (FilterState::Stays, _)
            | (FilterState::Comes, CommitPhase::Staged | CommitPhase::Committed) => {
                Some(entry.filter())
            }
            (FilterState::Goes, CommitPhase::Abandoned) => Some(entry.filter()),
            _ => None,
        }
    }

    /// True if a filter can be set in a slot.
    pub fn is_free(&self, slot: u32) -> bool {
        self.entries.get(slot as usize).is_some_and(|entry| entry.state() == FilterState::Free)
    }

    /// Number of tables with filters, which is the maximum number of hashes per key.
    pub fn tables(&self) -> usize {
        self.order.len()
    }

    /// Current maximum of steps for a key's look-up: hashes, and comparisons with filters.
    /// At most `steps_max` of [`Self::new`], plus [`NURSERY_MAX`](crate::NURSERY_MAX).
    pub fn steps(&self) -> usize {
        self.steps + self.cam.count()
    }

    /// Memory in bytes.
    pub fn memory(&self) -> usize {
        let entries = self.entries.len() * size_of::<FilterEntry<W>>() + self.changed.memory();
        let tables = self.tables.len() * (size_of::<FilterTable<W>>() + 2 * size_of::<u16>());
        size_of::<Self>() + entries + self.buckets.memory() + self.cam.memory() + tables
    }

    /// Writes for each key the slot of the matching filter with the highest
    /// priority; among equals, of the one set first. [`NONE`] if no filter matches.
    ///
    /// # Panics
    ///
    /// If there are more than [`BATCH`] keys, or if the numbers of keys and results differ.
    pub fn find(&self, keys: &[[u64; W]], found: &mut [u32]) {
        assert!(keys.len() <= BATCH && keys.len() == found.len());
        found.fill(NONE);
        let mut best = [0_u32; BATCH];
        // Keys for which a later table may have a better filter.
        let mut open: [u8; BATCH] = std::array::from_fn(|at| at as u8);
        let mut open_count = keys.len();
        let mut homes = [HomeBucket::default(); BATCH];
        let mut heads = [(0_u8, 0_u32); 2 * BATCH];
        for &number in &self.order {
            let table = &self.tables[usize::from(number)];
            let mut count = 0;
            for at in 0..open_count {
                let key = usize::from(open[at]);
                open[count] = open[at];
                count += usize::from(found[key] == NONE || best[key] <= table.max);
            }
            open_count = count;
            if open_count == 0 {
                break;
            }
            for at in 0..open_count {
                homes[at] = self.buckets.home(table.hash(&keys[usize::from(open[at])]));
            }
            let mut head_count = 0;
            for at in 0..open_count {
                self.buckets.each(homes[at], |head| {
                    // Excess heads are walked immediately.
                    match heads.get_mut(head_count) {
                        Some(place) => {
                            *place = (open[at], head);
                            head_count += 1;
                        }
                        None => self.walk(number, keys, open[at], head, &mut best, found),
                    }
                });
            }
            for &(key, head) in &heads[..head_count] {
                self.walk(number, keys, key, head, &mut best, found);
            }
        }
        for (at, key) in keys.iter().enumerate() {
            if self.cam.count() == 0 || found[at] != NONE && best[at] > self.cam.max {
                continue;
            }
            self.cam.each(key, |place| {
                if found[at] != NONE && best[at] > self.cam.priorities[place] {
                    return;
                }
                let slot = self.cam.slots[place];
                let entry = &self.entries[slot as usize];
                let better =
                    found[at] == NONE || entry.goes_before(&self.entries[found[at] as usize]);
                if better && self.is_seen(entry.state()) {
                    best[at] = entry.priority;
                    found[at] = slot;
                }
            });
        }
    }

    /// Searches a chain for a better filter. Ignores another table's chain with the same tag.
    #[inline]
    fn walk(
        &self,
        number: u16,
        keys: &[[u64; W]],
        key: u8,
        head: u32,
        best: &mut [u32; BATCH],
        found: &mut [u32],
    ) {
        let at = usize::from(key);
        let mut slot = head;
        while let Some(entry) = self.entries.get(slot as usize) {
            if entry.table() != number
                || found[at] != NONE && self.entries[found[at] as usize].goes_before(entry)
            {
                return;
            }
            if self.is_seen(entry.state()) && entry.meets(&keys[at]) {
                best[at] = entry.priority;
                found[at] = slot;
                return;
            }
            slot = entry.next;
        }
    }

    fn is_seen(&self, state: FilterState) -> bool {
        match state {
            FilterState::Stays => true,
            FilterState::Comes => self.phase == CommitPhase::Committed,
            FilterState::Goes => self.phase != CommitPhase::Committed,
            FilterState::Free => false,
        }
    }

    /// Stages a filter for a free slot. It is visible from the commit on.
    pub fn set(&mut self, slot: u32, filter: Filter<W>) -> Result<(), FilterRefusal> {
        if self.phase != CommitPhase::Staged {
            return Err(FilterRefusal::Unsettled);
        }
        let entry = self.entries.get_mut(slot as usize).ok_or(FilterRefusal::Slot)?;
        if entry.state() != FilterState::Free {
            return Err(FilterRefusal::Taken);
        }
        *entry = FilterEntry::new(filter, FilterState::Comes, self.age);
        if !self.place(slot) {
            self.entries[slot as usize].set_state(FilterState::Free);
            return Err(FilterRefusal::Crowded);
        }
        self.age += 1;
        self.changed.add(slot);
        self.look_on();
        Ok(())
    }

    /// Stages the removal of a slot's filter. It is visible until the commit, and the slot
    /// is free once that is settled. A filter that is not committed yet is removed at once.
    pub fn remove(&mut self, slot: u32) -> Result<(), FilterRefusal> {
        if self.phase != CommitPhase::Staged {
            return Err(FilterRefusal::Unsettled);
        }
        let entry = self.entries.get_mut(slot as usize).ok_or(FilterRefusal::Slot)?;
        match entry.state() {
            FilterState::Stays => {
                entry.set_state(FilterState::Goes);
                self.changed.add(slot);
            }
            FilterState::Comes => self.unlink(slot),
            FilterState::Free | FilterState::Goes => return Err(FilterRefusal::Empty),
        }
        self.look_on();
        Ok(())
    }

    /// Makes all staged changes visible.
    pub fn commit(&mut self) {
        if self.phase == CommitPhase::Staged {
            self.phase = CommitPhase::Committed;
        }
    }

    /// Drops all staged changes. They must be settled as after a commit.
    pub fn abandon(&mut self) {
        if self.phase == CommitPhase::Staged {
            self.phase = CommitPhase::Abandoned;
        }
    }

    /// Settles up to `most` filters after [`Self::commit`] or [`Self::abandon`]. Returns true
    /// when all is done and more changes can be staged. Look-ups find the same before and after.
    pub fn settle(&mut self, most: usize) -> bool {
        if self.phase == CommitPhase::Staged {
            return true;
        }
        for _ in 0..most {
            let Some(slot) = self.changed.pop() else { break };
            let entry = &mut self.entries[slot as usize];
            match (entry.state(), self.phase) {
                (FilterState::Comes, CommitPhase::Committed)
                | (FilterState::Goes, CommitPhase::Abandoned) => {
                    entry.set_state(FilterState::Stays);
                }
                // Added and removed in the same commit.
                (FilterState::Free, _) => {}
                _ => self.unlink(slot),
            }
        }
        if !self.changed.is_empty() {
            return false;
        }
        self.phase = CommitPhase::Staged;
        true
    }

    /// Stores a filter in a table or the ternary memory. Returns false if there is no space.
    fn place(&mut self, slot: u32) -> bool {
        self.enter_one_of_best(slot)
            || self.remember(slot)
            || self.make_room() && (self.enter_one_of_best(slot) || self.remember(slot))
            || self.enter_any(slot)
    }

    /// Adds a filter to one of the tables that hash most of its mask.
    fn enter_one_of_best(&mut self, slot: u32) -> bool {
        let mask = self.entries[slot as usize].mask;
        let mut best = [(0, 0_u16); TRIES];
        let mut count = 0;
        for &number in &self.order {
            let table = &self.tables[usize::from(number)];
            if !table.takes(&mask) {
                continue;
            }
            let mut new = (table.bits, number);
            for place in &mut best[..count] {
                if place.0 < new.0 {
                    std::mem::swap(place, &mut new);
                }
            }
            if count < TRIES {
                best[count] = new;
                count += 1;
            }
        }
        best[..count].iter().any(|&(_, number)| self.enter(number, slot))
    }

    /// Adds a filter to any table.
    fn enter_any(&mut self, slot: u32) -> bool {
        let mask = self.entries[slot as usize].mask;
        (0..self.order.len()).any(|at| {
            let number = self.order[at];
            self.tables[usize::from(number)].takes(&mask) && self.enter(number, slot)
        })
    }

    /// Adds a filter to a table. Returns false if its chain
    /// or the steps of a look-up would exceed their limits.
    fn enter(&mut self, number: u16, slot: u32) -> bool {
        let FilterEntry { value, priority, .. } = self.entries[slot as usize];
        let table = &self.tables[usize::from(number)];
        let home = self.buckets.home(table.hash(&value));
        let place = self.chain(number, home, &value);
        let head = place.map_or(NONE, |place| self.buckets.head(place));
        // The entry before it in its chain.
        let (mut before, mut next, mut length) = (NONE, head, 0);
        while let Some(entry) = self.entries.get(next as usize) {
            if entry.goes_before(&self.entries[slot as usize]) {
                before = next;
            }
            length += 1;
            next = entry.next;
        }
        let more = table.steps_with(length) - table.steps();
        if length == CHAIN_MAX || self.steps + more > self.steps_max {
            return false;
        }
        match place {
            None if !self.buckets.add(home, slot) => return false,
            Some(place) if before == NONE => self.buckets.set_head(place, slot),
            _ => {}
        }
        self.entries[slot as usize].set_table(number);
        self.entries[slot as usize].next = match self.entries.get_mut(before as usize) {
            Some(entry) => std::mem::replace(&mut entry.next, slot),
            None => head,
        };
        self.steps += more;
        let table = &mut self.tables[usize::from(number)];
        table.add_to_chain(length);
        table.fresh = table.fresh.max(priority);
        if table.max < priority || table.filters == 1 {
            table.max = table.max.max(priority);
            self.move_forward(number);
        }
        true
    }

    /// Adds a filter to the ternary memory. Returns false if that is full.
    fn remember(&mut self, slot: u32) -> bool {
        let Filter { value, mask, priority } = self.entries[slot as usize].filter();
        let Some(place) = self.cam.add(slot, &value, &mask, priority) else { return false };
        let entry = &mut self.entries[slot as usize];
        entry.set_table(CAM);
        entry.next = place.into();
        true
    }

    /// Moves some filters out of the full ternary memory into the newest
    /// table, or into another new one. Returns false if none can be moved.
    fn make_room(&mut self) -> bool {
        if self.move_some() {
            return true;
        }
        if !self.make_table() {
            return false;
        }
        let is_moved = self.move_some();
        if !is_moved {
            self.forget(self.newest);
        }
        is_moved
    }

    /// Moves some filters out of the ternary memory into
    /// the newest table. Returns false if that takes none.
    fn move_some(&mut self) -> bool {
        let mut moved = [0; MOVED];
        let mut count = 0;
        while self.asked < CAM_MAX && count < MOVED {
            let slot = self.cam.slots[self.asked];
            let mask = self.entries[slot as usize].mask;
            if self.tables[usize::from(self.newest)].takes(&mask) && self.enter(self.newest, slot) {
                moved[count] = self.asked as u16;
                count += 1;
            }
            self.asked += 1;
        }
        self.cam.remove(&moved[..count], |slot| self.entries[slot as usize].mask);
        count > 0
    }

    /// Makes the table that takes most filters of the ternary memory,
    /// estimated from a sample. Returns false if no table can be made.
    fn make_table(&mut self) -> bool {
        if self.order.len() == TABLES_MAX || self.steps + 2 > self.steps_max {
            return false;
        }
        let start = next(&mut self.random) as usize;
        let filter = |at: usize| {
            let slot = self.cam.slots[(start + at) % CAM_MAX];
            self.entries[slot as usize].filter()
        };
        let asked = (0..CAM_MAX).step_by(CAM_MAX / ASKED);
        let mut masks: Vec<[u64; W]> =
            asked.flat_map(|at| LEVELS.map(|group| relaxed(&filter(at).mask, group))).collect();
        masks.sort_unstable();
        masks.dedup();
        let mut is_known = vec![false; masks.len()];
        for number in &self.order {
            if let Ok(at) = masks.binary_search(&self.tables[usize::from(*number)].mask) {
                is_known[at] = true;
            }
        }
        let some: Vec<Filter<W>> = (0..CAM_MAX).step_by(SHARE).map(filter).collect();
        let gain = |table: &FilterTable<W>| {
            // Approximate number of collisions.
            let mut counts = [0_u8; 1 << 9];
            let taken = some.iter().filter(|filter| {
                let count = &mut counts[(table.hash(&filter.value) >> (u64::BITS - 9)) as usize];
                let takes = table.takes(&filter.mask) && usize::from(*count) < CHAIN_MAX / SHARE;
                *count += u8::from(takes);
                takes
            });
            taken.count()
        };
        let mut random = || next(&mut self.random);
        let new = masks.into_iter().zip(is_known).filter(|(_, is_known)| !is_known);
        let gains: Vec<(usize, FilterTable<W>)> = new
            .map(|(mask, _)| {
                let table = FilterTable::new(mask, &mut random);
                (gain(&table), table)
            })
            .collect();
        // Among tables that take nearly as many, the one that hashes
        // the fewest bits: it fits more of the later filters.
        let enough = gains.iter().map(|it| it.0).max().unwrap_or(0) * NEARLY / 100;
        let good = gains.into_iter().filter(|it| it.0 >= enough);
        let Some((_, table)) = good.min_by_key(|it| it.1.bits) else { return false };
        self.newest = self.make(table);
        self.asked = 0;
        true
    }

    /// Returns the chain of a table's filters with the same hashed bits as this value.
    fn chain(&self, number: u16, home: HomeBucket, value: &[u64; W]) -> Option<ChainPosition> {
        let mask = &self.tables[usize::from(number)].mask;
        self.buckets.chain(home, |head| {
            let entry = &self.entries[head as usize];
            let same = |word: usize| (entry.value[word] ^ value[word]) & mask[word] == 0;
            entry.table() == number && (0..W).all(same)
        })
    }

    /// Removes a filter from its chain or the ternary memory, and frees its slot.
    fn unlink(&mut self, slot: u32) {
        let entry = &mut self.entries[slot as usize];
        entry.set_state(FilterState::Free);
        let number = entry.table();
        let FilterEntry { value, mask, next, .. } = *entry;
        if number == CAM {
            self.cam.remove(&[next as u16], |_| mask);
            return;
        }
        let home = self.buckets.home(self.tables[usize::from(number)].hash(&value));
        let place = self.chain(number, home, &value).expect("the chain that it is in");
        let head = self.buckets.head(place);
        let (mut before, mut at, mut length) = (NONE, head, 0);
        while let Some(entry) = self.entries.get(at as usize) {
            if entry.next == slot {
                before = at;
            }
            length += 1;
            at = entry.next;
        }
        match self.entries.get_mut(before as usize) {
            Some(entry) => entry.next = next,
            None if next == NONE => self.buckets.remove(place),
            None => self.buckets.set_head(place, next),
        }
        let table = &mut self.tables[usize::from(number)];
        self.steps -= table.steps();
        table.take_from_chain(length);
        self.steps += table.steps();
        if table.filters == 0 {
            self.forget(number);
        }
    }

    /// Adds an empty table; returns its number.
    fn make(&mut self, table: FilterTable<W>) -> u16 {
        self.steps += table.steps();
        let number = match self.spare.pop() {
            Some(number) => {
                self.tables[usize::from(number)] = table;
                number
            }
            None => {
                self.tables.push(table);
                self.tables.len() as u16 - 1
            }
        };
        self.order.push(number);
        number
    }

    /// Removes an empty table.
    fn forget(&mut self, number: u16) {
        self.steps -= self.tables[usize::from(number)].steps();
        self.order.retain(|it| *it != number);
        self.spare.push(number);
        if self.newest == number {
            self.asked = CAM_MAX;
        }
    }

    /// Moves a table forward in the order after its highest priority has grown.
    fn move_forward(&mut self, number: u16) {
        let at = self.order.iter().position(|it| *it == number).expect("a table in use");
        let max = self.tables[usize::from(number)].max;
        let to = self.order[..at].partition_point(|it| self.tables[usize::from(*it)].max >= max);
        self.order[to..=at].rotate_right(1);
    }

    /// Checks some more slots. After a full pass, tables' highest priorities are exact again.
    fn look_on(&mut self) {
        for _ in 0..SEEN_PER_CHANGE {
            let Some(entry) = self.entries.get(self.seen) else {
                self.seen = 0;
                for number in &self.order {
                    let table = &mut self.tables[usize::from(*number)];
                    table.max = std::mem::take(&mut table.fresh);
                }
                let tables = &self.tables;
                self.order.sort_by_key(|it| std::cmp::Reverse(tables[usize::from(*it)].max));
                return;
            };
            if entry.state() != FilterState::Free && entry.table() != CAM {
                let table = &mut self.tables[usize::from(entry.table())];
                table.fresh = table.fresh.max(entry.priority);
            }
            self.seen += 1;
        }
    }
}

/// SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): the next number.
fn next(random: &mut u64) -> u64 {
    *random = random.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut word = *random;
    word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ word >> 31
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Checks all invariants of chains, tables and steps.
    fn check(filters: &Filters<2>) {
        let mut chained = 0;
        let mut steps = 0;
        for &number in &filters.order {
            let table = &filters.tables[usize::from(number)];
            let of_table = |entry: &&FilterEntry<2>| {
                entry.state() != FilterState::Free && entry.table() == number
            };
            let entries: Vec<_> = filters.entries.iter().filter(of_table).collect();
            let mut longest = 0;
            for entry in &entries {
                let value = entry.value;
                let place = filters.chain(number, filters.buckets.home(table.hash(&value)), &value);
                let head = filters.buckets.head(place.expect("a chain"));
                let next = |entry: &&FilterEntry<2>| filters.entries.get(entry.next as usize);
                let chain: Vec<_> =
                    std::iter::successors(filters.entries.get(head as usize), next).collect();
                assert!(chain.iter().any(|it| std::ptr::eq(*it, *entry)));
                assert!(chain.is_sorted_by(|one, other| one.goes_before(other)));
                longest = longest.max(chain.len());
                assert!(entry.priority <= table.max);
            }
            assert!((1..=CHAIN_MAX).contains(&longest));
            assert_eq!((table.steps(), table.filters), (1 + longest, entries.len() as u32));
            steps += table.steps();
            chained += entries.len();
        }
        assert_eq!(filters.steps, steps);
        assert!(steps <= filters.steps_max);
        let max = |it: &u16| filters.tables[usize::from(*it)].max;
        assert!(filters.order.is_sorted_by(|one, other| max(one) >= max(other)));
        assert_eq!(filters.order.len() + filters.spare.len(), filters.tables.len());
        let taken =
            filters.entries.iter().filter(|entry| entry.state() != FilterState::Free).count();
        assert_eq!(taken, chained + filters.cam.count());
        let priorities = filters.cam.places().map(|place| filters.cam.priorities[place]);
        assert_eq!(filters.cam.max, priorities.max().unwrap_or(0));
    }

    /// Two tables with few buckets, so that in some
    /// rounds both have the same tag in the same bucket.
    #[test]
    fn tables_keep_separate_hash_chains() {
        for secret in 0..4000 {
            let mut filters = Filters::<2>::new(2, 64, secret);
            let filter = Filter { value: [0, 1], mask: [u64::MAX; 2], priority: 1 };
            for (slot, mask) in [[0, 1], [0, 3]].into_iter().enumerate() {
                let table = FilterTable::new(mask, &mut || next(&mut filters.random));
                let number = filters.make(table);
                filters.entries[slot] = FilterEntry::new(filter, FilterState::Stays, 0);
                assert!(filters.enter(number, slot as u32));
            }
            check(&filters);
            for slot in 0..2 {
                filters.remove(slot).expect("it is there");
                filters.commit();
                assert!(filters.settle(1));
                check(&filters);
            }
            assert_eq!((filters.tables(), filters.steps()), (0, 0));
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        #[test]
        fn filter_bookkeeping_matches_a_full_scan(
            seed: u64, groups in 1..40_u64, steps_max in 2..400_usize,
        ) {
            let mut random = seed;
            let mut below = |most: u64| next(&mut random) % most;
            let mut filters = Filters::<2>::new(1000, steps_max, seed);
            for _ in 0..6 {
                for _ in 0..700 {
                    let (slot, group) = (below(1000) as u32, below(groups));
                    let mask = [u64::MAX << group, u64::MAX << (group / 3) >> below(3)];
                    let filter =
                        Filter { value: [below(9) << 40, below(5)], mask, priority: below(30) as u32 };
                    match filters.set(slot, filter) {
                        Err(FilterRefusal::Taken) if below(3) == 0 => _ = filters.remove(slot),
                        _ => {}
                    }
                }
                check(&filters);
                if below(4) == 0 { filters.abandon() } else { filters.commit() }
                while !filters.settle(200) {
                    check(&filters);
                }
                check(&filters);
            }
        }
    }
}
