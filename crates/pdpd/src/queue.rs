//! Which key is worked on next.
//!
//! Pure: the time is given. A key is worked on by one worker at a time; one that is added while it
//! waits is there once, and one that is added while it is worked on is worked on once more. Owners
//! take turns: next is a key of the owner that has the fewest workers, and of these of the one that
//! was served longest ago; an owner has so many workers at most as [`Bounds`] says. Some workers are left to owners
//! that have none, and some to operators. So with W workers that
//! hold on to a key for no longer than B, whoever has none gets the next that is free: after B at
//! the latest, and after B/W on average, however many others have work without end.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Instant;

/// What is worked on.
pub trait Item: Clone + Ord {
    /// On whose behalf.
    fn owner(&self) -> &str;

    /// Whether that is a tenant.
    fn is_tenants(&self) -> bool;
}

/// How many workers may be at work.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// All of them.
    pub workers: usize,
    /// For one owner.
    pub per_owner: usize,
    /// Workers that are reserved for owners that have none.
    pub newcomers: usize,
    /// Workers that are reserved for operators.
    pub operators: usize,
}

/// Whether a tenant, and who.
type Owner = (bool, String);

/// Keys that wait for a worker, now or at a time.
#[derive(Debug)]
pub struct Queue<K> {
    bounds: Bounds,
    /// Keys that wait now or are worked on, by owner.
    lanes: BTreeMap<Owner, Lane<K>>,
    /// Owners of whom a key may be taken: operators, and tenants. Workers that they have, when they were served, who.
    eligible: [BTreeSet<(usize, u64, Owner)>; 2],
    /// Workers of operators, and of tenants.
    at_work: [usize; 2],
    /// Keys in [`Lane::ready`].
    ready: BTreeSet<K>,
    /// Keys that are worked on, and whether once more.
    working: BTreeMap<K, bool>,
    due: BTreeSet<(Instant, K)>,
    due_at: BTreeMap<K, Instant>,
    served: u64,
}

#[derive(Debug)]
struct Lane<K> {
    ready: VecDeque<K>,
    workers: usize,
    served: u64,
}

impl<K: Item> Queue<K> {
    /// Empty.
    pub fn new(bounds: Bounds) -> Self {
        Self {
            bounds,
            lanes: BTreeMap::new(),
            eligible: Default::default(),
            at_work: [0; 2],
            ready: BTreeSet::new(),
            working: BTreeMap::new(),
            due: BTreeSet::new(),
            due_at: BTreeMap::new(),
            served: 0,
        }
    }

    /// Has a key worked on as soon as can be.
    pub fn add(&mut self, key: K) {
        self.forget_due(&key);
        if let Some(again) = self.working.get_mut(&key) {
            *again = true;
        } else if self.ready.insert(key.clone()) {
            self.change(&owner(&key), |lane| lane.ready.push_back(key));
        }
    }

    /// Has a key worked on at a time, unless it is to be before that.
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

    /// Moves what is due by `now` to what waits for a worker; whether there was any.
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

    /// When the next key is due.
    pub fn next_due(&self) -> Option<Instant> {
        self.due.first().map(|(at, _)| *at)
    }

    /// The key to work on; [`Queue::done`] gives it back.
    pub fn take(&mut self) -> Option<K> {
        let (_, _, owner) = self.next()?.clone();
        self.at_work[usize::from(owner.0)] += 1;
        self.served += 1;
        let turn = self.served;
        let mut taken = None;
        self.change(&owner, |lane| {
            taken = lane.ready.pop_front();
            lane.workers += 1;
            lane.served = turn;
        });
        let key = taken?;
        self.ready.remove(&key);
        self.working.insert(key.clone(), false);
        Some(key)
    }

    /// A worker is done with a key.
    pub fn done(&mut self, key: &K) {
        let again = self.working.remove(key) == Some(true);
        let owner = owner(key);
        self.at_work[usize::from(owner.0)] -= 1;
        self.change(&owner, |lane| lane.workers -= 1);
        if again {
            self.add(key.clone());
        }
    }

    /// Whether a key is to be worked on once more, without waiting for a time.
    pub fn is_wanted_again(&self, key: &K) -> bool {
        self.ready.contains(key) || self.working.get(key) == Some(&true)
    }

    /// Whose turn it is, of those who may have one more worker.
    fn next(&self) -> Option<&(usize, u64, Owner)> {
        let Bounds { workers, newcomers, operators, .. } = self.bounds;
        let free = workers.saturating_sub(self.at_work.iter().sum());
        let may = |(has, _, owner): &&(usize, u64, Owner)| {
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

    /// Changes a lane, and with it whether its owner may have a worker.
    fn change(&mut self, owner: &Owner, change: impl FnOnce(&mut Lane<K>)) {
        let new = || Lane { ready: VecDeque::new(), workers: 0, served: 0 };
        let lane = self.lanes.entry(owner.clone()).or_insert_with(new);
        let eligible = &mut self.eligible[usize::from(owner.0)];
        eligible.remove(&(lane.workers, lane.served, owner.clone()));
        change(lane);
        if lane.ready.is_empty() && lane.workers == 0 {
            self.lanes.remove(owner);
        } else if !lane.ready.is_empty() && lane.workers < self.bounds.per_owner {
            eligible.insert((lane.workers, lane.served, owner.clone()));
        }
    }
}

fn owner<K: Item>(key: &K) -> Owner {
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

    fn bounds(per_owner: usize) -> Bounds {
        Bounds { workers: 1000, per_owner, newcomers: 0, operators: 0 }
    }

    /// However many tenants' steps hang: who has no worker finds one of those that are left for that, and an operator
    /// one of its own.
    #[test]
    fn tenants_leave_workers_to_operators_and_to_who_has_none() {
        let bounds = Bounds { workers: 32, per_owner: 4, newcomers: 8, operators: 4 };
        const TENANTS: [&str; 10] = ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j"];
        let mut queue = Queue::new(bounds);
        let add = |queue: &mut Queue<_>, owner| (0..50).for_each(|key| queue.add((owner, key)));
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
        // Tenants enough have all but the operators'.
        for key in &hang {
            queue.done(key);
        }
        let mut many = Queue::new(bounds);
        (0..50).for_each(|key| many.add((&*format!("t{key}").leak(), 0)));
        assert_eq!(std::iter::from_fn(|| many.take()).count(), 28);
        add(&mut many, "_vnet");
        assert_eq!(std::iter::from_fn(|| many.take()).count(), 4);
    }

    #[test]
    fn owners_take_turns_and_none_has_all_workers() {
        let mut queue = Queue::new(bounds(2));
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
    fn whoever_has_no_worker_gets_the_next() {
        let mut queue = Queue::new(bounds(4));
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
    fn a_key_that_changes_while_it_is_worked_on_is_worked_on_once_more() {
        let mut queue = Queue::new(bounds(2));
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
        assert!(queue.lanes.is_empty() && queue.eligible.iter().all(BTreeSet::is_empty));
    }

    #[test]
    fn what_is_due_comes_at_its_time_and_what_is_added_before_comes_once() {
        let (mut queue, now) = (Queue::new(bounds(2)), Instant::now());
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
        /// Whatever happens in whatever order: no key has two workers, no owner too many, and all
        /// that was added is worked on after it was added.
        #[test]
        fn nothing_is_lost_or_worked_on_twice(
            steps in proptest::collection::vec((0u8..4, 0u32..6, 0usize..3), 0..300),
        ) {
            const OWNERS: [&str; 3] = ["a", "b", "c"];
            let mut queue = Queue::new(bounds(2));
            let mut wanted: BTreeSet<(&str, u32)> = BTreeSet::new();
            let mut working: Vec<(&'static str, u32)> = Vec::new();
            let mut now = Instant::now();
            for (what, number, owner) in steps {
                let key = (OWNERS[owner], number);
                match what {
                    0 => {
                        queue.add(key);
                        wanted.insert(key);
                    }
                    1 => {
                        queue.add_at(key, now + Duration::from_secs(u64::from(number)));
                        wanted.insert(key);
                    }
                    2 => if let Some(taken) = queue.take() {
                        prop_assert!(!working.contains(&taken));
                        prop_assert!(working.iter().filter(|key| key.0 == taken.0).count() < 2);
                        prop_assert!(wanted.remove(&taken));
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
                prop_assert!(wanted.remove(&key));
                queue.done(&key);
            }
            prop_assert!(wanted.is_empty() && queue.lanes.is_empty());
        }
    }
}
