//! Tables against a list with linear search.

use proptest::prelude::*;

use crate::{AddressBits, NONE, PrefixTable, WalkCursor};

/// Routes as a list.
#[derive(Clone, Debug, Default)]
struct Slow<A> {
    routes: Vec<(A, u32, u32, u32)>,
}

impl<A: AddressBits> Slow<A> {
    fn insert(&mut self, address: A, length: u32, value: u32, generation: u32) -> Option<u32> {
        let old = self.remove(address, length);
        self.routes.push((address.masked(length), length, value, generation));
        old
    }

    fn remove(&mut self, address: A, length: u32) -> Option<u32> {
        let key = (address.masked(length), length);
        let at = self.routes.iter().position(|route| (route.0, route.1) == key)?;
        Some(self.routes.swap_remove(at).2)
    }

    fn lookup(&self, address: A) -> Option<u32> {
        let covers = self.routes.iter().filter(|route| address.masked(route.1) == route.0);
        covers.max_by_key(|route| route.1).map(|route| route.2)
    }
}

/// Addresses with common first bits, so that prefixes nest.
fn v4() -> BoxedStrategy<u32> {
    prop_oneof![
        any::<u32>(),
        (0u32..4, 0u32..32, any::<u32>())
            .prop_map(|(a, cut, low)| (a << 30 | 0x0a14_0000) ^ low.checked_shr(cut).unwrap_or(0)),
        (0u32..256).prop_map(|low| 0xc0a8_0100 | low),
    ]
    .boxed()
}

fn v6() -> BoxedStrategy<u128> {
    prop_oneof![
        any::<u128>(),
        (0u32..128, any::<u128>())
            .prop_map(|(cut, low)| 0x2001_0db8_0000_0001_0000_0000_0000_0000 ^ (low >> cut)),
        (0u128..256).prop_map(|low| 0xfe80 << 112 | low),
    ]
    .boxed()
}

#[derive(Clone, Debug)]
enum Step<A> {
    Insert(A, u32, u32),
    Remove(A, u32),
    RemoveSome(usize),
    Sweep,
}

fn steps<A: AddressBits + 'static>(address: BoxedStrategy<A>) -> BoxedStrategy<Vec<Step<A>>> {
    // Lengths between two nodes are the critical ones.
    let edge = (0..=A::BITS / 6, 0u32..2).prop_map(|(node, more)| (node * 6 + more).min(A::BITS));
    let length = prop_oneof![0..=A::BITS, edge].boxed();
    // Values on both sides of the 16-bit limit in nodes, stored as the value plus one.
    let value = prop_oneof![4 => 0u32..5, 1 => 0x7ffdu32..0x8001, 1 => any::<u32>()];
    let value = value.prop_map(|value| value % (crate::VALUE_MAX + 1));
    let step = prop_oneof![
        6 => (address.clone(), length.clone(), value).prop_map(|(a, l, v)| Step::Insert(a, l, v)),
        1 => (address, length).prop_map(|(a, l)| Step::Remove(a, l)),
        3 => any::<usize>().prop_map(Step::RemoveSome),
        1 => Just(Step::Sweep),
    ];
    prop::collection::vec(step, 0..120).boxed()
}

fn agrees<A: AddressBits>(table: &PrefixTable<A>, slow: &Slow<A>, probes: &[A]) {
    assert_eq!(table.len(), slow.routes.len());
    // The first and last address of each route, and those just outside.
    let mut addresses = probes.to_vec();
    for &(address, length, value, _) in &slow.routes {
        assert_eq!(table.get(address, length), Some(value));
        addresses.push(address);
        if length < A::BITS {
            addresses.push(flip(address, length));
        }
        if length > 0 {
            addresses.push(flip(address, length - 1));
        }
    }
    let mut values = vec![7; addresses.len()];
    table.lookup_batch(&addresses, &mut values);
    for (&address, &value) in addresses.iter().zip(&values) {
        let want = slow.lookup(address);
        assert_eq!(value, want.unwrap_or(NONE), "{address:x?}");
        assert_eq!(table.lookup(address), want);
    }
    let (mut all, mut cursor) = (Vec::new(), WalkCursor::default());
    while table.walk(&mut cursor, 3, |a, l, v, g| all.push((a, l, v, g))) {}
    let mut want = slow.routes.clone();
    all.sort();
    want.sort();
    assert_eq!(all, want);
}

/// Returns the address with the bit at `index` inverted.
fn flip<A: AddressBits>(address: A, index: u32) -> A {
    let (depth, bit) = (index / 6 * 6, 32 >> (index % 6));
    if address.slot(depth) & bit == 0 {
        address.with_slot(depth, bit)
    } else {
        // `with_slot` only sets bits; clear the following bits instead.
        address.masked(index)
    }
}

fn run<A: AddressBits>(steps: Vec<Step<A>>, probes: &[A], root_from: usize) {
    let (mut table, mut slow) = (PrefixTable::with_root_from(root_from), Slow::default());
    let mut generation = 0;
    for step in steps {
        match step {
            Step::Insert(address, length, value) => {
                let old = slow.insert(address, length, value, generation);
                assert_eq!(table.insert(address, length, value, generation), old);
            }
            Step::Remove(address, length) => {
                assert_eq!(table.remove(address, length), slow.remove(address, length));
            }
            Step::RemoveSome(which) => {
                if !slow.routes.is_empty() {
                    let (address, length, ..) = slow.routes[which % slow.routes.len()];
                    assert_eq!(table.remove(address, length), slow.remove(address, length));
                }
            }
            Step::Sweep => {
                let mut cursor = WalkCursor::default();
                let mut removed = Vec::new();
                while table.sweep(&mut cursor, 5, generation, |value| removed.push(value)) {}
                let stale = slow.routes.extract_if(.., |route| route.3 != generation);
                let mut want: Vec<u32> = stale.map(|route| route.2).collect();
                removed.sort();
                want.sort();
                assert_eq!(removed, want);
                generation += 1;
            }
        }
    }
    agrees(&table, &slow, probes);
    for (address, length, value, _) in slow.routes.clone() {
        assert_eq!(table.remove(address, length), Some(value));
        slow.remove(address, length);
    }
    agrees(&table, &slow, probes);
}

proptest! {
    #[test]
    fn small_v4_tables_match_a_list(steps in steps(v4()), probes in prop::collection::vec(v4(), 70)) {
        run(steps, &probes, usize::MAX);
    }

    #[test]
    fn small_v6_tables_match_a_list(steps in steps(v6()), probes in prop::collection::vec(v6(), 70)) {
        run(steps, &probes, usize::MAX);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn large_v4_tables_match_a_list(steps in steps(v4()), from in 0usize..40, probes in prop::collection::vec(v4(), 70)) {
        run(steps, &probes, from);
    }

    #[test]
    fn large_v6_tables_match_a_list(steps in steps(v6()), from in 0usize..40, probes in prop::collection::vec(v6(), 70)) {
        run(steps, &probes, from);
    }

    /// A walk visits each remaining route once, whatever changes between its steps.
    #[test]
    fn walk_visits_each_remaining_route_once(
        before in prop::collection::vec((v4(), 0u32..=32), 1..60),
        changes in prop::collection::vec((v4(), 0u32..=32, any::<bool>()), 0..60),
    ) {
        let (mut table, mut lasting) = (PrefixTable::<u32>::new(), std::collections::BTreeMap::new());
        for &(address, length) in &before {
            table.insert(address, length, 1, 0);
            lasting.insert((address.masked(length), length), 0);
        }
        for &(address, length, insert) in &changes {
            if !insert {
                lasting.remove(&(address.masked(length), length));
            }
        }
        let (mut cursor, mut changes) = (WalkCursor::default(), changes.into_iter());
        let mut met = Vec::new();
        while table.walk(&mut cursor, 2, |a, l, _, _| met.push((a, l))) {
            for (address, length, insert) in changes.by_ref().take(3) {
                if insert {
                    table.insert(address, length, 2, 0);
                } else {
                    table.remove(address, length);
                }
            }
        }
        for prefix in met {
            if let Some(count) = lasting.get_mut(&prefix) {
                *count += 1;
            }
        }
        prop_assert!(lasting.values().all(|&count| count == 1), "{:?}", lasting);
    }
}

/// The longest prefix that the root itself resolves.
#[test]
fn root_table_follows_changes_of_its_longest_prefix() {
    let mut table = PrefixTable::<u32>::with_root_from(0);
    table.insert(0x0a00_0000, 13, 1, 0);
    table.insert(0x0a00_4000, 18, 2, 0);
    assert_eq!(table.lookup(0x0a00_4001), Some(2));
    table.insert(0x0a00_4000, 18, 3, 0);
    assert_eq!(table.lookup(0x0a00_4001), Some(3));
    table.remove(0x0a00_4000, 18);
    assert_eq!(table.lookup(0x0a00_4001), Some(1));
}

/// Nodes right below the root inherit from two replaced levels of
/// nodes, whichever changes, and whether it existed before them or not.
#[test]
fn nodes_below_the_root_inherit_replaced_levels() {
    let (prefix, far) = (0x2001_0db8u128 << 96, 0x2001_0db8_ffffu128 << 80);
    for root_from in 0..8 {
        let mut table = PrefixTable::<u128>::with_root_from(root_from);
        let behind = prefix ^ 1 << 100;
        table.insert(prefix, 32, 32, 0);
        table.insert(prefix, 10, 10, 0);
        table.insert(prefix, 16, 16, 0);
        // A different route in the node above.
        table.insert(prefix ^ 1 << 104, 24, 24, 0);
        assert_eq!((table.lookup(far), table.lookup(behind)), (Some(32), Some(16)));
        table.insert(prefix, 23, 23, 0);
        assert_eq!((table.lookup(far), table.lookup(behind)), (Some(32), Some(23)));
        table.insert(prefix, 16, 17, 0);
        table.remove(prefix, 23);
        assert_eq!(table.lookup(behind), Some(17), "root from {root_from}");
        table.remove(prefix, 16);
        assert_eq!(table.lookup(behind), Some(10));
        table.remove(prefix, 10);
        assert_eq!((table.lookup(behind), table.lookup(far)), (None, Some(32)));
    }
}

#[test]
fn lookup_accepts_extreme_values_and_lengths() {
    let mut table = crate::TableV6::new();
    table.insert(0, 0, crate::VALUE_MAX, u32::MAX);
    table.insert(u128::MAX, 128, 0, u32::MAX);
    table.insert(u128::MAX, 126, 1, u32::MAX);
    assert_eq!(table.lookup(5), Some(crate::VALUE_MAX));
    assert_eq!(table.lookup(u128::MAX), Some(0));
    assert_eq!(table.lookup(u128::MAX - 1), Some(1));
    assert_eq!(table.lookup(u128::MAX - 4), Some(crate::VALUE_MAX));
}

#[test]
#[should_panic(expected = "to 2147483647")]
fn insert_panics_on_a_too_large_value() {
    crate::TableV4::new().insert(0, 0, crate::VALUE_MAX + 1, 0);
}

/// Bytes of a table with ten routes: a default route, and others next to each other.
fn small_table_bytes<A: AddressBits>(first: A, length: u32) -> usize {
    let mut table = PrefixTable::new();
    table.insert(A::default(), 0, 1, 0);
    for slot in 0..9 {
        table.insert(first.with_slot(length - 6, slot), length, slot as u32, 0);
    }
    table.memory_bytes()
}

#[test]
fn a_thousand_small_tables_fit_in_a_few_megabytes() {
    let v4: usize = (0..1000u32).map(|i| small_table_bytes(0x0a00_0000 + (i << 8), 30)).sum();
    let v6: usize =
        (0..1000u128).map(|i| small_table_bytes((0x2001_0db8 << 16 | i) << 80, 66)).sum();
    assert!(v4 < 2 << 20 && v6 < 3 << 20, "{v4} and {v6} bytes");
}

#[test]
fn reinserted_routes_take_no_more_memory() {
    let mut table = crate::TableV4::new();
    let prefixes: Vec<(u32, u32)> =
        (0..20_000u32).map(|i| (i.wrapping_mul(2_654_435_761), 12 + i % 21)).collect();
    let mut after_first = 0;
    for round in 0..5 {
        for &(address, length) in &prefixes {
            table.insert(address, length, round, round);
        }
        for &(address, length) in &prefixes {
            table.remove(address, length);
        }
        assert!(table.is_empty());
        if round == 0 {
            after_first = table.memory_bytes();
        }
    }
    assert_eq!(table.memory_bytes(), after_first);
}
