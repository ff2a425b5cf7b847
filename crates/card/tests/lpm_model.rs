//! The Verilated look-up, one look-up per cycle while tables change, against `pdp_lookup`.

mod common;

use std::collections::VecDeque;

use common::{FAMILIES, Random, Reference, edges, segments};
use pdp_card::{
    Leaf, LpmLookup, LpmModel, LpmSegment, LpmTable, LpmTrie, LpmVariant, LpmWord, LpmWrite,
    NodeEntry, RootEntry, RouteFamily, RoutePrefix,
};

/// Makes the small model, or prints that the test is skipped.
fn small(seed: u32) -> Option<LpmModel> {
    let model = LpmModel::new(LpmVariant::SMALL, seed);
    if model.is_none() {
        eprintln!("skipped: built without Verilator (run `make deps`)");
    }
    model
}

/// Leaf of an address from a cycle on.
#[derive(Clone, Copy, Debug)]
struct Version {
    /// First cycle in which a look-up may read a word of the change.
    begins: u64,
    /// First cycle in which a look-up that enters sees the whole change; not known yet at first.
    complete: u64,
    leaf: Leaf,
}

/// An address that look-ups ask for.
struct Probe {
    family: RouteFamily,
    key: u128,
    /// Newest last. The first one was complete before the oldest look-up on the way entered.
    versions: VecDeque<Version>,
}

struct Ve {
    trie: LpmTrie,
    reference: Reference,
    routes: Vec<RoutePrefix>,
    probes: Vec<Probe>,
    /// Changes, and the first cycle in which look-ups that could reach their old words are gone.
    retiring: VecDeque<(u64, u64)>,
}

/// A look-up on the way.
struct Asked {
    ve: u8,
    probe: usize,
    entered: u64,
    token: u16,
}

struct Bench {
    random: Random,
    model: LpmModel,
    latency: u64,
    /// Bits of the longest prefix.
    reach: u32,
    ves: Vec<Ve>,
    asked: VecDeque<Asked>,
    /// Look-ups whose address had several leaves while they were on the way.
    contested_count: u64,
    full_count: u64,
}

const PROBES: usize = 48;

impl Bench {
    fn new(mut model: LpmModel, seed: u64) -> Self {
        let variant = model.variant();
        let mut random = Random(seed);
        let segments = segments(variant.ves, variant.nodes, variant.leaves);
        let clears = (0u8..).zip(&segments).flat_map(|(ve, segment)| {
            let writes = LpmTrie::clear_writes();
            let words = writes.into_iter().map(move |write| write.word(ve));
            // The write side reads a segment some cycles after the segment's write.
            let gap = LpmWord { index: u32::MAX, ..LpmWord::default() };
            [segment.word(ve), gap, gap, gap, gap].into_iter().chain(words)
        });
        model.write_all(clears);
        assert_eq!(model.refused_count(), 4 * u64::from(variant.ves));
        let ves = segments.iter().map(|segment| Ve {
            trie: LpmTrie::new(variant.levels, segment.node_length, segment.leaf_length),
            reference: Reference::default(),
            routes: Vec::new(),
            probes: (0..PROBES).map(|at| random_probe(&mut random, at)).collect(),
            retiring: VecDeque::new(),
        });
        let ves = ves.collect();
        let latency = u64::from(variant.latency());
        let (asked, contested_count, full_count) = (VecDeque::new(), 0, 0);
        let reach = 8 + 6 * u32::from(variant.levels);
        Self { random, model, latency, reach, ves, asked, contested_count, full_count }
    }

    /// Simulates a cycle with a random look-up; checks the result that comes out.
    fn step(&mut self, write: Option<LpmWord>) {
        let cycle = self.model.cycles();
        let ve = self.random.below(self.ves.len() as u64) as u8;
        let probe = self.random.below(PROBES as u64) as usize;
        let token = self.random.draw() as u16;
        let Probe { family, key, .. } = self.ves[usize::from(ve)].probes[probe];
        self.asked.push_back(Asked { ve, probe, entered: cycle, token });
        let result = self.model.step(Some(LpmLookup { ve, family, key, token }), write);
        // The oldest look-up comes out after the latency, whatever else happens.
        let done =
            self.asked.front().is_some_and(|asked| cycle + 1 - asked.entered == self.latency);
        assert_eq!(result.is_some(), done, "cycle {cycle}");
        let (Some(result), true) = (result, done) else { return };
        let asked = self.asked.pop_front().unwrap();
        assert_eq!((result.ve, result.token, result.fault), (asked.ve, asked.token, false));
        let probe = &self.ves[usize::from(asked.ve)].probes[asked.probe];
        let versions: Vec<_> = (probe.versions.iter().enumerate())
            .filter(|(at, version)| {
                let next = probe.versions.get(at + 1);
                version.begins <= cycle && next.is_none_or(|next| next.complete > asked.entered)
            })
            .map(|(_, version)| version.leaf)
            .collect();
        self.contested_count += u64::from(versions.len() > 1);
        let (leaf, key) = (result.leaf, probe.key);
        assert!(versions.contains(&leaf), "cycle {cycle}: {key:x}: {leaf:?}, {versions:?}");
    }

    /// Changes a route, with one write in each cycle.
    fn change(&mut self) {
        let at = self.random.below(self.ves.len() as u64) as u8;
        let ve = &mut self.ves[usize::from(at)];
        let crowded = ve.trie.len() > 70;
        let removes = self.random.below(10) < if crowded { 7 } else { 3 };
        let (prefix, leaf) = if removes && !ve.routes.is_empty() {
            (ve.routes[self.random.below(ve.routes.len() as u64) as usize], None)
        } else {
            let probe = &ve.probes[self.random.below(PROBES as u64) as usize];
            let mut prefix = common::prefix(&mut self.random, probe.family, self.reach);
            if self.random.below(2) == 0 {
                prefix = common::masked(RoutePrefix { key: probe.key, ..prefix });
            }
            (prefix, Some(common::leaf(&mut self.random)))
        };
        let mut writes = Vec::new();
        let changed = match leaf {
            Some(leaf) => ve.trie.insert(prefix, leaf, &mut writes),
            None => ve.trie.remove(prefix, &mut writes),
        };
        if changed.is_err() {
            self.full_count += 1;
            self.step(None);
            self.retire(at);
            return;
        }
        ve.reference.change(&prefix, leaf);
        ve.routes.retain(|route| *route != prefix);
        if leaf.is_some() {
            ve.routes.push(prefix);
        }
        let begins = self.model.cycles();
        // Look-ups that enter from this cycle on see the last write everywhere.
        let complete = begins + writes.len() as u64 + u64::from(LpmVariant::WRITE_CYCLES) - 1;
        let oldest = self.asked.front().map_or(begins, |asked| asked.entered);
        for probe in &mut ve.probes {
            let leaf = ve.reference.lookup(probe.family, probe.key);
            while probe.versions.get(1).is_some_and(|next| next.complete <= oldest) {
                probe.versions.pop_front();
            }
            if probe.versions.back().is_none_or(|last| last.leaf != leaf) {
                probe.versions.push_back(Version { begins, complete, leaf });
            }
        }
        let change = ve.trie.change();
        ve.retiring.push_back((change, complete + self.latency));
        for write in writes {
            self.step(Some(write.word(at)));
        }
        self.retire(at);
    }

    fn retire(&mut self, at: u8) {
        let ve = &mut self.ves[usize::from(at)];
        while let Some(&(change, from)) = ve.retiring.front()
            && from <= self.model.cycles()
        {
            ve.retiring.pop_front();
            ve.trie.retire(change);
        }
    }
}

fn random_probe(random: &mut Random, at: usize) -> Probe {
    let family = FAMILIES[at % 2];
    let versions = VecDeque::from([Version { begins: 0, complete: 0, leaf: Leaf::NONE }]);
    Probe { family, key: common::address(random, family), versions }
}

/// Changes routes while look-ups pass; returns the cycles and how many look-ups met a change.
fn change_while_lookups_pass(model: LpmModel, seed: u64, changes: u32) -> (u64, u64) {
    let mut bench = Bench::new(model, seed);
    for _ in 0..changes {
        bench.change();
        for _ in 0..bench.random.below(4) {
            bench.step(None);
        }
    }
    // No other writes than those that wait for a segment's write are refused.
    assert_eq!(bench.model.refused_count(), 4 * bench.ves.len() as u64);
    (bench.model.cycles(), bench.contested_count)
}

#[test]
fn lookups_see_each_change_before_or_after() {
    let (mut contested_count, mut cycles) = (0, 0);
    let start = std::time::Instant::now();
    for seed in 0..12 {
        let Some(model) = small(seed) else { return };
        let (more_cycles, contested) = change_while_lookups_pass(model, seed.into(), 2000);
        cycles += more_cycles;
        contested_count += contested;
    }
    let rate = cycles as f64 / start.elapsed().as_secs_f64();
    eprintln!("{cycles} look-ups, {contested_count} met a change of their leaf, {rate:.0}/s");
    assert!(contested_count > 1000);
}

/// The same with memories of different latency: nodes behind 20 bits are in external memory.
#[test]
fn lookups_in_external_memory_see_each_change_before_or_after() {
    let Some(model) = LpmModel::new(LpmVariant::LARGE, 9) else {
        eprintln!("skipped: built without Verilator (run `make deps`)");
        return;
    };
    let (cycles, contested_count) = change_while_lookups_pass(model, 9, 12_000);
    eprintln!("{cycles} look-ups, {contested_count} met a change of their leaf");
    assert!(contested_count > 500);
}

/// A static table: each look-up's result after exactly the latency, with and without gaps.
#[test]
fn results_come_after_the_latency_in_order() {
    let Some(model) = small(1) else { return };
    let mut bench = Bench::new(model, 1);
    (0..60).for_each(|_| bench.change());
    for _ in 0..bench.latency {
        bench.model.step(None, None);
    }
    assert_eq!(bench.latency, 43);
    let ve = &bench.ves[2];
    for route in &ve.routes {
        for key in edges(route) {
            let result = bench.model.lookup(2, route.family, key);
            assert_eq!(result.leaf, ve.reference.lookup(route.family, key), "{key:x}");
        }
    }
}

/// Fills all memories, as a VE whose segments are the whole, with indices that lead anywhere.
/// `own_seed` decides the contents of the segments of `own` and of its level 0, `seed` all others.
fn fill_with_garbage(model: &mut LpmModel, own: (u8, LpmSegment), own_seed: u64, seed: u64) {
    let LpmVariant { ves, nodes, leaves, levels, .. } = model.variant();
    let whole = LpmSegment { node_base: 0, node_length: nodes, leaf_base: 0, leaf_length: leaves };
    let (own_ve, segment) = own;
    let own_nodes = segment.node_base..segment.node_base + segment.node_length;
    let own_leaves = segment.leaf_base..segment.leaf_base + segment.leaf_length;
    let random = |is_own: bool, place: u64| {
        Random(Random(if is_own { own_seed } else { seed } ^ place << 20).draw())
    };
    for ve in 0..ves as u8 {
        model.write_all([whole.word(ve)]);
        let slots = (0..512).map(|index| {
            let mut random = random(ve == own_ve, 1 << 40 | u64::from(index));
            let entry = match random.below(4) {
                0 => RootEntry::Leaf(random.below(leaves.into()) as u32),
                _ => RootEntry::Node(random.below(nodes.into()) as u32),
            };
            let root = LpmWrite::Root { family: RouteFamily::V4, slot: 0, entry };
            LpmWord { index, ..root.word(ve) }
        });
        model.write_all(slots);
    }
    for level in 1..=levels {
        let words = (0..nodes).map(|index| {
            let place = 1 << 41 | u64::from(level) << 20 | u64::from(index);
            let mut random = random(own_nodes.contains(&index), place);
            let child_map = if level < levels { random.draw() & random.draw() } else { 0 };
            let leaf_map = random.draw() | 1;
            let mut base =
                |count, map: u64| random.below(u64::from(count - map.count_ones())) as u32;
            let (child_base, leaf_base) = (base(nodes, child_map), base(leaves, leaf_map));
            let entry = NodeEntry { child_map, leaf_map, child_base, leaf_base };
            LpmWrite::Node { level, index, entry }.word(0)
        });
        model.write_all(words);
    }
    model.write_all((0..leaves).map(|index| {
        let mut random = random(own_leaves.contains(&index), 1 << 42 | u64::from(index));
        LpmWrite::Leaf { index, leaf: Leaf::group(random.below(1024) as u16) }.word(0)
    }));
    model.write_all([segment.word(own_ve)]);
    assert_eq!(model.refused_count(), 0);
}

/// Indices that the driver never wrote may be anything. Whatever they are, a VE's look-ups depend
/// on no entry outside of its segments: two models that differ there return the same.
#[test]
fn garbage_never_leads_to_another_ves_entries() {
    let (mut leaves, mut faults) = (0, 0);
    for seed in 0..16 {
        let (Some(first), Some(second)) = (small(seed), small(seed + 100)) else { return };
        let mut random = Random(u64::from(seed));
        let ve = random.below(4) as u8;
        let segment = LpmSegment {
            node_base: 60 * u32::from(ve),
            node_length: 1 + random.below(76) as u32,
            leaf_base: 500 * u32::from(ve),
            leaf_length: 1 + random.below(548) as u32,
        };
        let mut models = [first, second];
        for (model, other_seed) in models.iter_mut().zip([1, 2]) {
            fill_with_garbage(model, (ve, segment), seed.into(), other_seed << 8);
        }
        for _ in 0..5000 {
            let family = FAMILIES[random.below(2) as usize];
            let lookup = LpmLookup { ve, family, key: random.wide(), token: 0 };
            let [first, second] = models.each_mut().map(|model| model.step(Some(lookup), None));
            assert_eq!(first, second, "seed {seed}");
            let fault = first.is_some_and(|result| result.fault);
            (leaves, faults) = (leaves + u32::from(!fault), faults + u32::from(fault));
        }
    }
    eprintln!("{leaves} leaves, {faults} faults");
    assert!(leaves > 1000 && faults > 1000);
}

/// Returns a hostile word for a VE's page.
fn hostile(random: &mut Random, ve: u8) -> LpmWord {
    let index = |random: &mut Random| match random.below(4) {
        0 => random.draw() as u32,
        1 => u32::MAX - random.below(300) as u32,
        _ => random.below(600) as u32,
    };
    let table = [LpmTable::Root, LpmTable::Node, LpmTable::Leaf][random.below(3) as usize];
    let mut data: [u32; 6] = std::array::from_fn(|_| random.draw() as u32);
    match table {
        LpmTable::Root => (data[0], data[1]) = (index(random), random.below(4) as u32),
        LpmTable::Node => {
            (data[4], data[5]) = (index(random), index(random));
            // Few children, so that some words are accepted.
            data[0] &= data[1];
            data[1] &= data[2].rotate_left(7) & data[3];
        }
        _ => data[0] &= 0x1fff,
    }
    let level = random.below(23) as u8;
    LpmWord { table, level, ve, index: index(random), data }
}

/// Writes of one VE's page, whatever they say, change no look-up of another VE.
#[test]
fn hostile_writes_change_only_the_own_table() {
    let Some(model) = small(3) else { return };
    let mut bench = Bench::new(model, 3);
    for _ in 0..200 {
        bench.change();
    }
    let refused_before = bench.model.refused_count();
    let (mut accepted_count, mut foreign_count, mut faults) = (0u64, 0u64, 0u64);
    let latency = bench.latency;
    let mut asked = VecDeque::new();
    for _ in 0..latency + 4 {
        bench.model.step(None, None);
    }
    for _ in 0..60_000u64 {
        let word = hostile(&mut bench.random, 1);
        let ve = bench.random.below(4) as u8;
        let probe = &bench.ves[usize::from(ve)].probes[bench.random.below(48) as usize];
        let (family, key) = (probe.family, probe.key);
        asked.push_back((ve, family, key));
        let lookup = LpmLookup { ve, family, key, token: 0 };
        accepted_count += 1;
        if let Some(result) = bench.model.step(Some(lookup), Some(word)) {
            let (ve, family, key) = asked.pop_front().unwrap();
            if ve == 1 {
                faults += u64::from(result.fault);
                continue;
            }
            foreign_count += 1;
            let want = bench.ves[usize::from(ve)].reference.lookup(family, key);
            assert_eq!((result.leaf, result.fault), (want, false), "VE {ve}: {key:x}");
        }
    }
    accepted_count -= bench.model.refused_count() - refused_before;
    eprintln!(
        "{accepted_count} hostile writes accepted, {foreign_count} look-ups of other VEs, \
         {faults} faults of VE 1"
    );
    assert!(accepted_count > 5000);
}

/// Each bound on write is exact.
#[test]
fn writes_out_of_bounds_are_refused() {
    let Some(mut model) = small(4) else { return };
    let (nodes, leaves) = (64, 512);
    let segment = |node_base, node_length, leaf_base, leaf_length| LpmSegment {
        node_base,
        node_length,
        leaf_base,
        leaf_length,
    };
    let node = |level, index, entry| LpmWrite::Node { level, index, entry };
    let entry = |child_map, leaf_map, child_base, leaf_base| NodeEntry {
        child_map,
        leaf_map,
        child_base,
        leaf_base,
    };
    let root = |entry| LpmWrite::Root { family: RouteFamily::V4, slot: 0, entry };
    let leaf = |index| LpmWrite::Leaf { index, leaf: Leaf::group(1) };
    model.write_all([segment(64, nodes, 512, leaves).word(1)]);
    let unknown_leaf = LpmWord { data: [6 << 10, 0, 0, 0, 0, 0], ..leaf(0).word(1) };
    let root_512 = LpmWord { index: 512, ..root(RootEntry::None).word(1) };
    let accepted = [
        root(RootEntry::Node(nodes - 1)).word(1),
        root(RootEntry::Leaf(leaves - 1)).word(1),
        root(RootEntry::Excess).word(1),
        leaf(leaves - 1).word(1),
        node(1, nodes - 1, entry(0, 1, 0, 0)).word(1),
        node(20, 0, entry(0, u64::MAX, 0, leaves - 64)).word(1),
        node(1, 0, entry(u64::MAX, 1, 0, 0)).word(1),
        node(19, 0, entry(0xf0f, 0xf1, nodes - 8, leaves - 5)).word(1),
        // Bit 0 of the leaf map counts as set, and only once.
        node(1, 0, entry(0, 0xf0, 0, leaves - 5)).word(1),
        segment(0, 256, 0, 2048).word(2),
        segment(255, 1, 2047, 1).word(3),
        segment(5, 0, 9, 0).word(3),
    ];
    let refused = [
        root(RootEntry::Node(nodes)).word(1),
        root(RootEntry::Leaf(leaves)).word(1),
        root(RootEntry::None).word(4),
        root_512,
        leaf(leaves).word(1),
        leaf(u32::MAX).word(1),
        unknown_leaf,
        node(0, 0, entry(0, 1, 0, 0)).word(1),
        node(21, 0, entry(0, 1, 0, 0)).word(1),
        node(1, nodes, entry(0, 1, 0, 0)).word(1),
        node(1, 0, entry(1, 1, nodes, 0)).word(1),
        node(1, 0, entry(u64::MAX, 1, 1, 0)).word(1),
        node(19, 0, entry(0xf0f, 0xf1, nodes - 7, leaves - 5)).word(1),
        node(19, 0, entry(0xf0f, 0xf1, u32::MAX - 3, leaves - 5)).word(1),
        node(19, 0, entry(0xf0f, 0xf1, nodes - 8, leaves - 4)).word(1),
        node(19, 0, entry(0, 0xf1, 0, u32::MAX - 2)).word(1),
        // There is no level below the last.
        node(20, 0, entry(1, 1, 0, 0)).word(1),
        segment(0, 257, 0, 2048).word(2),
        segment(1, 256, 0, 2048).word(2),
        segment(256, 0, 0, 2048).word(2),
        segment(0, 256, 1, 2048).word(2),
        segment(u32::MAX, 1, 0, 1).word(2),
        segment(0, 1, 1, u32::MAX).word(2),
        segment(0, 1, 0, 1).word(4),
    ];
    for word in accepted {
        model.write_all([word]);
        assert_eq!(model.refused_count(), 0, "{word:?}");
    }
    for (count, word) in (1..).zip(refused) {
        model.write_all([word]);
        assert_eq!(model.refused_count(), count, "{word:?}");
    }
}

/// A reset in any cycle drops the look-ups on the way, and only those.
#[test]
fn reset_drops_lookups_on_the_way() {
    let Some(model) = small(8) else { return };
    let mut bench = Bench::new(model, 8);
    (0..40).for_each(|_| bench.change());
    for _ in 0..bench.latency {
        bench.model.step(None, None);
    }
    let key = bench.ves[0].probes[0].key;
    let want = bench.ves[0].reference.lookup(RouteFamily::V4, key);
    let lookup = Some(LpmLookup { ve: 0, family: RouteFamily::V4, key, token: 0xabc });
    for entered_count in 1..bench.latency {
        for _ in 0..entered_count {
            assert_eq!(bench.model.step(lookup, None), None);
        }
        bench.model.reset();
        for _ in 0..bench.latency {
            assert_eq!(bench.model.step(None, None), None);
        }
        assert_eq!(bench.model.lookup(0, RouteFamily::V4, key).leaf, want);
    }
}

/// A leaf that was never written may have an unknown kind: that is a fault.
#[test]
fn unknown_kinds_of_leaves_are_faults() {
    let (mut faults, mut leaves) = (0, 0);
    for seed in 0..64 {
        let Some(mut model) = small(seed) else { return };
        let segment = LpmSegment { node_base: 0, node_length: 1, leaf_base: 7, leaf_length: 1 };
        model.write_all([segment.word(0)]);
        let entry = RootEntry::Leaf(0);
        model.write_all([LpmWrite::Root { family: RouteFamily::V4, slot: 9, entry }.word(0)]);
        let result = model.lookup(0, RouteFamily::V4, 9 << 120);
        assert!(!result.fault || result.leaf == Leaf::NONE);
        (faults, leaves) = (faults + u32::from(result.fault), leaves + u32::from(!result.fault));
    }
    assert!(faults > 4 && leaves > 4, "{faults} faults, {leaves} leaves");
}

/// A VE without tables ends in a fault, with any key.
#[test]
fn lookups_of_unknown_ves_are_faults() {
    let Some(mut model) = small(6) else { return };
    for ve in [4, 5, 8, 255] {
        let result = model.lookup(ve, RouteFamily::V4, 0x0a00_0001 << 96);
        assert_eq!((result.fault, result.leaf, result.ve), (true, Leaf::NONE, ve));
    }
}

/// A segment that shrinks below indices in use: look-ups end in faults, not behind its end.
#[test]
fn shrunken_segments_end_lookups_in_faults() {
    let Some(mut model) = small(7) else { return };
    let whole = LpmSegment { node_base: 0, node_length: 64, leaf_base: 0, leaf_length: 512 };
    model.write_all([whole.word(0)]);
    let entry = |child_map, child_base, leaf_base| NodeEntry {
        child_map,
        leaf_map: 1,
        child_base,
        leaf_base,
    };
    let writes = [
        LpmWrite::Root { family: RouteFamily::V4, slot: 10, entry: RootEntry::Node(3) },
        LpmWrite::Root { family: RouteFamily::V4, slot: 11, entry: RootEntry::Leaf(7) },
        LpmWrite::Node { level: 1, index: 3, entry: entry(1, 9, 6) },
        LpmWrite::Node { level: 2, index: 9, entry: entry(0, 0, 7) },
        LpmWrite::Leaf { index: 6, leaf: Leaf::group(6) },
        LpmWrite::Leaf { index: 7, leaf: Leaf::group(7) },
    ];
    model.write_all(writes.map(|write| write.word(0)));
    // By the node of level 2, by the one of level 1, and by level 0 alone.
    let keys = [0x0a00_0000u128 << 96, 0x0aff_0000 << 96, 0x0b00_0000 << 96];
    let mut look = |nodes, leaves| {
        let shrunk = LpmSegment { node_length: nodes, leaf_length: leaves, ..whole };
        model.write_all([shrunk.word(0)]);
        keys.map(|key| {
            let result = model.lookup(0, RouteFamily::V4, key);
            if result.fault { 0 } else { result.leaf.group }
        })
    };
    assert_eq!(look(64, 512), [7, 6, 7]);
    assert_eq!(look(10, 8), [7, 6, 7]);
    assert_eq!(look(9, 8), [0, 6, 7]);
    assert_eq!(look(4, 8), [0, 6, 7]);
    assert_eq!(look(3, 8), [0, 0, 7]);
    assert_eq!(look(10, 7), [0, 6, 0]);
    assert_eq!(look(10, 6), [0, 0, 0]);
    assert_eq!(look(0, 0), [0, 0, 0]);
    assert_eq!(look(10, 8), [7, 6, 7]);
}
