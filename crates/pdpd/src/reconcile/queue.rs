//! Decides which key is worked on next.
//!
//! Pure: the time is an argument. One worker at a time works on a key. A key that is added while
//! it waits is queued once. A key that is added while a worker has it is worked on once more.
//!
//! Owners take turns. The next key belongs to the owner with the fewest workers, and
//! among equals to the one that was served longest ago. [`WorkerLimits`] limits the workers of
//! an owner. Some workers are reserved for owners that have none, and some for operators.
//!
//! So with W workers that hold a key for at most B, an owner without workers gets the next free
//! one: after B at the latest, and after B/W on average, however many others have endless work.

use crate::plan::key::Item;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Instant;

/// Limits of workers.
#[derive(Clone, Copy, Debug)]
pub struct WorkerLimits {
    /// All workers.
    pub workers: usize,
    /// Workers of one owner.
    pub per_owner: usize,
    /// Workers that are reserved for owners that have none.
    pub newcomers: usize,
    /// Workers that are reserved for operators.
    pub operators: usize,
}

/// True for a tenant, and the owner's name.
type WorkOwner = (bool, String);

/// Keys that wait for a worker, now or at a given time.
#[derive(Debug)]
pub struct WorkQueue<K> {
    bounds: WorkerLimits,
    /// Keys that wait now or are worked on, by owner.
    queues: BTreeMap<WorkOwner, OwnerQueue<K>>,
    /// Owners that may get a worker, operators first, then tenants: the number
    /// of workers that they have, when they were last served, and the owner.
    eligible: [BTreeSet<(usize, u64, WorkOwner)>; 2],
    /// Number of workers that work for operators, and for tenants.
    at_work: [usize; 2],
    /// Keys in [`OwnerQueue::ready`].
    ready: BTreeSet<K>,
    /// Keys that are worked on, and whether they are to be worked on once more.
    working: BTreeMap<K, bool>,
    due: BTreeSet<(Instant, K)>,
    due_at: BTreeMap<K, Instant>,
    served: u64,
}

#[derive(Debug)]
struct OwnerQueue<K> {
    ready: VecDeque<K>,
    workers: usize,
    served: u64,
}

impl<K: Item> WorkQueue<K> {
    /// Returns an empty queue.
    pub fn new(bounds: WorkerLimits) -> Self {
        Self {
            bounds,
            queues: BTreeMap::new(),
            eligible: Default::default(),
            at_work: [0; 2],
            ready: BTreeSet::new(),
            working: BTreeMap::new(),
            due: BTreeSet::new(),
            due_at: BTreeMap::new(),
            served: 0,
        }
    }

    /// Queues a key to be worked on as soon as possible.
    pub fn add(&mut self, key: K) {
        self.forget_due(&key);
        if let Some(again) = self.working.get_mut(&key) {
            *again = true;
        } else if self.ready.insert(key.clone()) {
            self.change(&owner(&key), |queue| queue.ready.push_back(key));
        }
    }

    /// Queues a key for a given time, unless it is queued for an earlier one.
    pub fn add_at(&mut self, key: K, at: Instant) {
        if self.ready.contains(&key)
            || self.working.get(&key) == Some(&true)
            || self.due_at.get(&key).is_some_and(|before| *before <= at)
        {
            return;
        }
        self.forget_due(&key);
        self.due.insert((at, key.clone()));
        self.due_at.insert(key, at);
    }

    /// Moves keys that are due by `now` to the ready ones. Returns true if there were any.
    pub fn promote(&mut self, now: Instant) -> bool {
        let mut any = false;
        while let Some((at, _)) = self.due.first()
            && *at <= now
            && let Some((_, key)) = self.due.pop_first()
        {
            self.due_at.remove(&key);
            self.add(key);
            any = true;
        }
        any
    }

    /// Returns when the next key is due.
    pub fn next_due(&self) -> Option<Instant> {
        self.due.first().map(|(at, _)| *at)
    }

    /// Takes the next key to work on; [`WorkQueue::done`] returns it.
    pub fn take(&mut self) -> Option<K> {
        let (_, _, owner) = self.next()?.clone();
        self.at_work[usize::from(owner.0)] += 1;
        self.served += 1;
        let order = self.served;
        let mut taken = None;
        self.change(&owner, |queue| {
            taken = queue.ready.pop_front();
            queue.workers += 1;
            queue.served = order;
        });
        let key = taken?;
        self.ready.remove(&key);
        self.working.insert(key.clone(), false);
        Some(key)
    }

    /// Marks a key as done by its worker.
    pub fn done(&mut self, key: &K) {
        let again = self.working.remove(key) == Some(true);
        let owner = owner(key);
        self.at_work[usize::from(owner.0)] -= 1;
        self.change(&owner, |queue| queue.workers -= 1);
        if again {
            self.add(key.clone());
        }
    }

    /// True if a key is to be worked on once more, without waiting for a time.
    pub fn is_wanted_again(&self, key: &K) -> bool {
        self.ready.contains(key) || self.working.get(key) == Some(&true)
    }

    /// Returns the next owner among those that may have one more worker.
    fn next(&self) -> Option<&(usize, u64, WorkOwner)> {
        let WorkerLimits { workers, newcomers, operators, .. } = self.bounds;
        let free = workers.saturating_sub(self.at_work.iter().sum());
        let may = |(has, _, owner): &&(usize, u64, WorkOwner)| {
            let of_operators = operators.saturating_sub(self.at_work[0]);
            let left = if owner.0 { free.saturating_sub(of_operators) } else { free };
            left > if *has > 0 && owner.0 { newcomers } else { 0 }
        };
        self.eligible.iter().filter_map(|all| all.first()).filter(may).min()
    }

    fn forget_due(&mut self, key: &K) {
        if let Some(at) = self.due_at.remove(key) {
            self.due.remove(&(at, key.clone()));
        }
    }

    /// Changes an owner's lane, and updates whether the owner may have a worker.
    fn change(&mut self, owner: &WorkOwner, change: impl FnOnce(&mut OwnerQueue<K>)) {
        let new = || OwnerQueue { ready: VecDeque::new(), workers: 0, served: 0 };
        let queue = self.queues.entry(owner.clone()).or_insert_with(new);
        let eligible = &mut self.eligible[usize::from(owner.0)];
        eligible.remove(&(queue.workers, queue.served, owner.clone()));
        change(queue);
        if queue.ready.is_empty() && queue.workers == 0 {
            self.queues.remove(owner);
        } else if !queue.ready.is_empty() && queue.workers < self.bounds.per_owner {
            eligible.insert((queue.workers, queue.served, owner.clone()));
        }
    }
}

fn owner<K: Item>(key: &K) -> WorkOwner {
    (key.is_tenants(), key.owner().to_owned())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    impl Item for (&'static str, u32) {
        fn owner(&self) -> &str {
            self.0
        }

        fn is_tenants(&self) -> bool {
            !self.0.starts_with('_')
        }
    }

    fn bounds(per_owner: usize) -> WorkerLimits {
        WorkerLimits { workers: 1000, per_owner, newcomers: 0, operators: 0 }
    }

    /// However many tenants' steps hang, an owner without workers finds
    /// one reserved for it, and an operator one of its own.
    #[test]
    fn queue_reserves_workers_for_operators_and_new_owners() {
        let bounds = WorkerLimits { workers: 32, per_owner: 4, newcomers: 8, operators: 4 };
        const TENANTS: [&str; 10] = ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j"];
        let mut queue = WorkQueue::new(bounds);
        let add = |queue: &mut WorkQueue<_>, owner| (0..50).for_each(|key| queue.add((owner, key)));
        TENANTS[..8].iter().for_each(|owner| add(&mut queue, owner));
        let hang: Vec<_> = std::iter::from_fn(|| queue.take()).collect();
        assert_eq!(hang.len(), 20, "8 for others, and 4 for operators");
        for owner in ["new", "newer"] {
            add(&mut queue, owner);
            assert_eq!(queue.take(), Some((owner, 0)));
            assert_eq!(queue.take(), None, "no second one of those");
        }
        add(&mut queue, "_vnet");
        (0..4).for_each(|key| assert_eq!(queue.take(), Some(("_vnet", key))));
        // Enough tenants occupy all but the operators' workers.
        for key in &hang {
            queue.done(key);
        }
        let mut many = WorkQueue::new(bounds);
        (0..50).for_each(|key| many.add((&*format!("t{key}").leak(), 0)));
        assert_eq!(std::iter::from_fn(|| many.take()).count(), 28);
        add(&mut many, "_vnet");
        assert_eq!(std::iter::from_fn(|| many.take()).count(), 4);
    }

    #[test]
    fn queue_limits_workers_per_owner() {
        let mut queue = WorkQueue::new(bounds(2));
        (0..100).for_each(|number| queue.add(("greedy", number)));
        queue.add(("good", 0));
        let first: Vec<_> = (0..3).map_while(|_| queue.take()).collect();
        assert!(first.contains(&("good", 0)), "{first:?}");
        assert_eq!(queue.take(), None, "the greedy one has as many as it may");
        queue.add(("late", 0));
        assert_eq!(queue.take(), Some(("late", 0)));
        let served = first.iter().find(|key| key.0 == "greedy").unwrap();
        queue.done(served);
        assert_eq!(queue.take(), Some(("greedy", 2)));
    }

    #[test]
    fn owner_without_workers_is_served_next() {
        let mut queue = WorkQueue::new(bounds(4));
        for owner in ["a", "b", "c", "d"] {
            (0..50).for_each(|number| queue.add((owner, number)));
        }
        let mut busy: VecDeque<_> = (0..16).map_while(|_| queue.take()).collect();
        for _ in 0..20 {
            queue.add(("good", 0));
            queue.done(&busy.pop_front().unwrap());
            let next = queue.take().unwrap();
            assert_eq!(next, ("good", 0));
            queue.done(&next);
            busy.push_back(queue.take().unwrap());
        }
    }

    #[test]
    fn key_changed_during_work_is_queued_once_more() {
        let mut queue = WorkQueue::new(bounds(2));
        queue.add(("a", 1));
        queue.add(("a", 1));
        let key = queue.take().unwrap();
        assert_eq!(queue.take(), None);
        queue.add(key);
        queue.add(key);
        assert_eq!(queue.take(), None, "one worker at a time");
        queue.done(&key);
        assert_eq!(queue.take(), Some(key));
        queue.done(&key);
        assert_eq!(queue.take(), None);
        assert!(queue.queues.is_empty() && queue.eligible.iter().all(BTreeSet::is_empty));
    }

    #[test]
    fn due_keys_come_on_time_and_only_once() {
        let (mut queue, now) = (WorkQueue::new(bounds(2)), Instant::now());
        let later = now + Duration::from_secs(1);
        queue.add_at(("a", 1), later);
        queue.add_at(("a", 1), later + Duration::from_secs(1));
        queue.add_at(("a", 2), later);
        assert_eq!((queue.promote(now), queue.next_due()), (false, Some(later)));
        queue.add(("a", 1));
        assert_eq!(queue.take(), Some(("a", 1)));
        queue.done(&("a", 1));
        assert!(queue.promote(later));
        assert_eq!(queue.take(), Some(("a", 2)));
        assert_eq!(queue.next_due(), None);
    }

    proptest! {
        /// For all sequences of events: no key has two workers, no owner
        /// too many, and every key is worked on after it was added.
        #[test]
        fn queue_neither_loses_nor_duplicates_keys(
            steps in proptest::collection::vec((0u8..4, 0u32..6, 0usize..3), 0..300),
        ) {
            const OWNERS: [&str; 3] = ["a", "b", "c"];
            let mut queue = WorkQueue::new(bounds(2));
            let mut expected: BTreeSet<(&str, u32)> = BTreeSet::new();
            let mut working: Vec<(&'static str, u32)> = Vec::new();
            let mut now = Instant::now();
            for (what, number, owner) in steps {
                let key = (OWNERS[owner], number);
                match what {
                    0 => {
                        queue.add(key);
                        expected.insert(key);
                    }
                    1 => {
                        queue.add_at(key, now + Duration::from_secs(u64::from(number)));
                        expected.insert(key);
                    }
                    2 => if let Some(taken) = queue.take() {
                        prop_assert!(!working.contains(&taken));
                        prop_assert!(working.iter().filter(|key| key.0 == taken.0).count() < 2);
                        prop_assert!(expected.remove(&taken));
                        working.push(taken);
                    },
                    _ => {
                        now += Duration::from_secs(1);
                        queue.promote(now);
                        if !working.is_empty() {
                            queue.done(&working.remove(number as usize % working.len()));
                        }
                    }
                }
            }
            queue.promote(now + Duration::from_secs(60));
            working.iter().for_each(|key| queue.done(key));
            while let Some(key) = queue.take() {
                prop_assert!(expected.remove(&key));
                queue.done(&key);
            }
            prop_assert!(expected.is_empty() && queue.queues.is_empty());
        }
    }
}
