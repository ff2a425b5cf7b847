//! Compares filters with a linear search, while filters change.

use std::cmp::Reverse;

use pdp_filters::{BATCH, CHAIN_MAX, Filter, FilterRefusal, Filters, NONE, NURSERY_MAX};
use proptest::prelude::*;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

/// More than fit into the ternary memory, so that tables are made and removed.
const SLOTS: usize = 1500;

#[derive(Clone, Debug)]
enum Step {
    /// Sets filters in this many free slots, from the seed.
    Set(u64, usize),
    /// Removes one of this many.
    Remove(u64, usize),
    Commit,
    Abandon,
    Settle(usize),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (any::<u64>(), 1..900_usize).prop_map(|(seed, count)| Step::Set(seed, count)),
        3 => (any::<u64>(), 1..6_usize).prop_map(|(seed, part)| Step::Remove(seed, part)),
        3 => Just(Step::Commit),
        1 => Just(Step::Abandon),
        4 => (0..2 * SLOTS).prop_map(Step::Settle),
    ]
}

/// Returns one of a few common words.
fn word(random: &mut SmallRng) -> u64 {
    match random.random_range(0..5) {
        0 => 0,
        1 => u64::MAX << random.random_range(0..64),
        2 => random.random_range(0..4),
        3 => 0xffff_0000_ff00_0000 >> random.random_range(0..3),
        _ => u64::MAX,
    }
}

fn value(random: &mut SmallRng) -> u64 {
    match random.random_range(0..4) {
        0 => random.random_range(0..3),
        1 => 0x0a00_0001_0a00_0000 + random.random_range(0..20),
        2 => u64::MAX,
        _ => random.random(),
    }
}

fn filter<const W: usize>(random: &mut SmallRng) -> Filter<W> {
    let value = std::array::from_fn(|_| value(random));
    let mask = std::array::from_fn(|_| word(random));
    Filter { value, mask, priority: random.random_range(0..50) }
}

/// A filter with its age.
type Kept<const W: usize> = Option<(Filter<W>, u64)>;

fn linear<const W: usize>(kept: &[Kept<W>], key: &[u64; W]) -> u32 {
    let meets = kept.iter().enumerate().filter_map(|(slot, kept)| {
        let (filter, age) = kept.as_ref()?;
        let differs = (0..W).any(|word| (key[word] ^ filter.value[word]) & filter.mask[word] != 0);
        (!differs).then_some((filter.priority, Reverse(*age), slot))
    });
    meets.max().map_or(NONE, |(.., slot)| slot as u32)
}

/// Looks up keys close to existing filters, and some random ones.
fn finds<const W: usize>(filters: &Filters<W>, seen: &[Kept<W>], random: &mut SmallRng) {
    let key = |random: &mut SmallRng| match &seen[random.random_range(0..SLOTS)] {
        Some((filter, _)) => std::array::from_fn(|word| {
            filter.value[word] ^ random.random::<u64>() & !filter.mask[word]
        }),
        None => std::array::from_fn(|_| value(random)),
    };
    let keys: Vec<[u64; W]> = (0..random.random_range(1..=BATCH)).map(|_| key(random)).collect();
    let mut found = vec![0; keys.len()];
    filters.find(&keys, &mut found);
    let expected: Vec<u32> = keys.iter().map(|key| linear(seen, key)).collect();
    assert_eq!(found, expected, "{keys:x?}");
}

fn follows<const W: usize>(steps: Vec<Step>, steps_max: usize) {
    let mut filters = Filters::<W>::new(SLOTS, steps_max, 7);
    let mut random = SmallRng::seed_from_u64(9);
    let (mut seen, mut staged): (Vec<Kept<W>>, Vec<Kept<W>>) =
        (vec![None; SLOTS], vec![None; SLOTS]);
    let (mut age, mut settled) = (0, true);
    for step in steps {
        match step {
            Step::Settle(most) => settled = filters.settle(most),
            Step::Set(seed, _) | Step::Remove(seed, _) if !settled => {
                let slot = seed as u32 % SLOTS as u32;
                let all = Filter { value: [0; W], mask: [0; W], priority: 0 };
                assert_eq!(filters.set(slot, all), Err(FilterRefusal::Unsettled));
                assert_eq!(filters.remove(slot), Err(FilterRefusal::Unsettled));
            }
            Step::Commit | Step::Abandon if !settled => {
                filters.commit();
                filters.abandon();
            }
            Step::Set(seed, count) => {
                let mut random = SmallRng::seed_from_u64(seed);
                for _ in 0..count {
                    let slot = random.random_range(0..SLOTS);
                    let filter = filter::<W>(&mut random);
                    match filters.set(slot as u32, filter) {
                        Ok(()) => {
                            assert!(staged[slot].is_none());
                            staged[slot] = Some((filter, age));
                            age += 1;
                        }
                        Err(FilterRefusal::Taken) => {
                            assert!(staged[slot].is_some() || seen[slot].is_some() || age > 0)
                        }
                        Err(FilterRefusal::Crowded) => {}
                        Err(refused) => panic!("{slot}: {refused}"),
                    }
                }
            }
            Step::Remove(seed, part) => {
                let mut random = SmallRng::seed_from_u64(seed);
                for (slot, kept) in staged.iter_mut().enumerate() {
                    if random.random_range(0..part) == 0 {
                        assert_eq!(filters.remove(slot as u32).is_ok(), kept.take().is_some());
                    }
                }
            }
            Step::Commit => {
                filters.commit();
                seen.clone_from(&staged);
                settled = false;
            }
            Step::Abandon => {
                filters.abandon();
                staged.clone_from(&seen);
                settled = false;
            }
        }
        finds(&filters, &seen, &mut random);
        assert!(2 * filters.tables() <= steps_max);
        assert!(filters.steps() <= steps_max + NURSERY_MAX);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn filters_match_a_linear_search(steps in prop::collection::vec(step(), 0..30), steps_max in 2..500_usize) {
        follows::<2>(steps, steps_max);
    }

    #[test]
    fn wide_filters_match_a_linear_search(steps in prop::collection::vec(step(), 0..30), steps_max in 2..500_usize) {
        follows::<5>(steps, steps_max);
    }
}

/// After all filters are removed, all slots are free and can be used again.
#[test]
fn removed_filters_free_all_their_slots() {
    let mut filters = Filters::<2>::new(SLOTS, 1000, 1);
    let memory = filters.memory();
    for round in 0..5 {
        let mut random = SmallRng::seed_from_u64(round);
        let set = |filters: &mut Filters<2>, random: &mut SmallRng, slot: usize| {
            filters.set(slot as u32, filter(random)).is_ok()
        };
        let count = (0..SLOTS).filter(|&slot| set(&mut filters, &mut random, slot)).count();
        assert!(count > SLOTS / 2, "{count}");
        filters.commit();
        assert!(filters.settle(usize::MAX));
        assert!(filters.tables() > 0);
        let gone = (0..SLOTS).filter(|&slot| filters.remove(slot as u32).is_ok()).count();
        assert_eq!(gone, count);
        filters.commit();
        assert!(filters.settle(usize::MAX));
        assert_eq!(filters.tables(), 0);
    }
    assert!(filters.memory() < memory + 64 * 200, "but for what tables hash with");
}

/// Similar filters collide in any table, and are refused in time.
#[test]
fn excess_similar_filters_are_refused() {
    let mut filters = Filters::<2>::new(SLOTS, 64, 1);
    let alike = |priority| Filter { value: [5, 0], mask: [u64::MAX, 0], priority };
    let results: Vec<_> =
        (0..SLOTS).map(|slot| filters.set(slot as u32, alike(slot as u32))).collect();
    let first = results.iter().position(Result::is_err).expect("a bound");
    assert!(first >= NURSERY_MAX + CHAIN_MAX, "{first}");
    assert!(results[first..].iter().all(|result| *result == Err(FilterRefusal::Crowded)));
    filters.commit();
    let mut found = [NONE];
    filters.find(&[[5, 9]], &mut found);
    assert_eq!(found, [first as u32 - 1]);
    assert!(filters.settle(first));
    assert_eq!(filters.set(SLOTS as u32, alike(1)), Err(FilterRefusal::Slot));
    assert_eq!(filters.remove(SLOTS as u32), Err(FilterRefusal::Slot));
    assert_eq!(filters.remove(first as u32), Err(FilterRefusal::Empty));
    assert_eq!(filters.set(0, alike(1)), Err(FilterRefusal::Taken));
    // After removing some, as many can be set.
    assert_eq!(filters.remove(0), Ok(()));
    filters.commit();
    assert!(filters.settle(1));
    assert_eq!(filters.set(0, alike(1)), Ok(()));
}

/// As many masks as filters, which no table takes
/// together: only those that exceed the steps are refused.
#[test]
fn lookups_stay_within_the_step_limit() {
    const STEPS: usize = 300;
    let mut random = SmallRng::seed_from_u64(3);
    let mut filters = Filters::<2>::new(4 * SLOTS, STEPS, 1);
    let mut kept: Vec<Kept<2>> = vec![None; 4 * SLOTS];
    for (slot, kept) in kept.iter_mut().enumerate() {
        // A key of 0 collides with all of them in each table, and matches none.
        let mask: [u64; 2] = [random.random(), random.random::<u64>() | 1];
        let filter = Filter { value: [0, 1], mask, priority: slot as u32 };
        match filters.set(slot as u32, filter) {
            Ok(()) => *kept = Some((filter, slot as u64)),
            Err(refused) => assert_eq!(refused, FilterRefusal::Crowded),
        }
        assert!(filters.steps() <= STEPS + NURSERY_MAX);
    }
    assert!(kept.iter().flatten().count() > NURSERY_MAX + STEPS / 4);
    assert!(kept.iter().any(Option::is_none));
    filters.commit();
    let keys: Vec<[u64; 2]> = (0..BATCH as u64).map(|n| [random.random(), n]).collect();
    let mut found = [0; BATCH];
    filters.find(&keys, &mut found);
    assert!(keys.iter().zip(found).all(|(key, found)| linear(&kept, key) == found));
}
