//! Filters chosen by a tenant, compared with a linear search over the committed ones.

use std::cmp::Reverse;

use pdp_filters::{BATCH, Filter, FilterRefusal, Filters, NONE, NURSERY_MAX};

use crate::input::FuzzInput;

/// More than the ternary memory holds.
const SLOTS: usize = 640;

/// Keys looked up after each change.
const KEYS: usize = 5;

/// A filter, and the number of filters set before it.
type AgedFilter = Option<(Filter<2>, u64)>;

fn linear(kept: &[AgedFilter], key: &[u64; 2]) -> u32 {
    let meets = kept.iter().enumerate().filter_map(|(slot, kept)| {
        let (filter, age) = kept.as_ref()?;
        let differs = |word: usize| (key[word] ^ filter.value[word]) & filter.mask[word] != 0;
        (!differs(0) && !differs(1)).then_some((filter.priority, Reverse(*age), slot))
    });
    meets.max().map_or(NONE, |(.., slot)| slot as u32)
}

/// Mask of a filter: prefixes, single bits, all and none.
fn mask(which: u8) -> u64 {
    match which >> 6 {
        0 => u64::MAX.checked_shl(64 - u32::from(which)).unwrap_or(0),
        1 => 1 << (which & 63),
        2 => 0x0101_0101_0101_0101_u64.wrapping_mul((which & 63).into()),
        _ => u64::MAX >> (which & 63),
    }
}

/// Value that many filters and keys share.
fn value(which: u8) -> u64 {
    u64::from(which & 7) << (which >> 3) << (which >> 3)
}

/// Changes and look-ups.
pub(crate) fn filters(bytes: &[u8]) {
    let mut input = FuzzInput(bytes);
    let steps_max = usize::from(input.word() % 600);
    let mut filters = Filters::<2>::new(SLOTS, steps_max, input.byte().into());
    let (mut seen, mut staged): (Vec<AgedFilter>, Vec<AgedFilter>) =
        (vec![None; SLOTS], vec![None; SLOTS]);
    let (mut age, mut is_settled) = (0, true);
    while !input.is_empty() {
        match input.byte() % 8 {
            // Sets many filters. The input's bytes define the difference between consecutive ones.
            kind @ 0..=2 => {
                let (first, count) = (input.word(), input.byte() | (u8::from(kind > 0) << 7));
                let mut bytes = [0; 5].map(|_: u8| input.byte());
                let differs = [0; 5].map(|_: u8| input.byte());
                for slot in (0..u16::from(count)).map(|at| first.wrapping_add(at) % SLOTS as u16) {
                    let filter = Filter {
                        value: [value(bytes[0]), value(bytes[1])],
                        mask: [mask(bytes[2]), mask(bytes[3])],
                        priority: (bytes[4] >> 3).into(),
                    };
                    for (byte, differs) in bytes.iter_mut().zip(differs) {
                        *byte = byte.wrapping_add(differs);
                    }
                    let place = &mut staged[usize::from(slot)];
                    match filters.set(slot.into(), filter) {
                        Ok(()) => {
                            assert!(is_settled && place.is_none());
                            *place = Some((filter, age));
                            age += 1;
                        }
                        Err(FilterRefusal::Unsettled) => assert!(!is_settled),
                        Err(FilterRefusal::Taken | FilterRefusal::Crowded) => assert!(is_settled),
                        Err(refused) => panic!("{slot}: {refused}"),
                    }
                }
            }
            3 => {
                let (first, count) = (input.word(), input.byte());
                for slot in (0..u16::from(count)).map(|at| first.wrapping_add(at) % SLOTS as u16) {
                    let expected = match (is_settled, &staged[usize::from(slot)]) {
                        (false, _) => Err(FilterRefusal::Unsettled),
                        (_, None) => Err(FilterRefusal::Empty),
                        _ => Ok(()),
                    };
                    assert_eq!(filters.remove(slot.into()), expected);
                    if is_settled {
                        staged[usize::from(slot)] = None;
                    }
                }
            }
            4 => {
                filters.commit();
                if is_settled {
                    seen.clone_from(&staged);
                }
                is_settled = false;
            }
            5 => {
                filters.abandon();
                if is_settled {
                    staged.clone_from(&seen);
                }
                is_settled = false;
            }
            _ => is_settled = filters.settle(usize::from(input.byte()) * 8),
        }
        assert!(filters.steps() <= steps_max.max(2) + NURSERY_MAX);
        let differs = [input.byte(), input.byte()];
        let keys: [[u64; 2]; KEYS] = std::array::from_fn(|at| match &seen[at * 131 % SLOTS] {
            Some((filter, _)) => filter.value.map(|value| value ^ 1 << (differs[0] % 64)),
            None => differs.map(|which| value(which.wrapping_mul(at as u8))),
        });
        let mut found = [0; KEYS];
        filters.find(&keys, &mut found);
        assert_eq!(found, keys.map(|key| linear(&seen, &key)), "{keys:x?}");
    }
    // All of them together.
    let keys: Vec<_> = (0..BATCH).map(|at| [value(at as u8), value(at as u8 >> 1)]).collect();
    let mut found = [0; BATCH];
    filters.find(&keys, &mut found);
    assert!(keys.iter().zip(found).all(|(key, found)| linear(&seen, key) == found));
}
