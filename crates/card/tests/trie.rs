//! The driver's tables, walked in software after each write, against `pdp_lookup`.

mod common;

use common::{FAMILIES, Image, Random, Reference, Walk, edges, segments};
use pdp_card::{Leaf, LpmSegment, LpmTrie, RouteFamily, RoutePrefix, SegmentFull};
use proptest::prelude::*;

const VES: u32 = 3;

/// A look-up that takes some time.
struct Walker {
    ve: u8,
    family: RouteFamily,
    key: u128,
    walk: Walk,
    /// Number of the VE's last change when it began.
    began: u64,
    /// Leaves of all tables since it began.
    allowed: Vec<Leaf>,
}

struct Ve {
    segment: LpmSegment,
    trie: LpmTrie,
    reference: Reference,
    routes: Vec<RoutePrefix>,
}

struct Bench {
    random: Random,
    image: Image,
    ves: Vec<Ve>,
    walkers: Vec<Walker>,
    probes: Vec<(RouteFamily, u128)>,
    full_count: usize,
}

impl Bench {
    fn new(seed: u64, nodes: u32, leaves: u32) -> Self {
        let mut image = Image::default();
        let make = |(ve, segment): (usize, LpmSegment)| {
            for write in LpmTrie::clear_writes() {
                image.write(ve as u8, &segment, &write);
            }
            let trie = LpmTrie::new(20, segment.node_length, segment.leaf_length);
            Ve { segment, trie, reference: Reference::default(), routes: Vec::new() }
        };
        let ves = segments(VES, nodes, leaves).into_iter().enumerate().map(make).collect();
        let (walkers, probes) = (Vec::new(), Vec::new());
        Self { random: Random(seed), image, ves, walkers, probes, full_count: 0 }
    }

    /// Inserts or removes a random route.
    fn change(&mut self) {
        let at = self.random.below(u64::from(VES)) as u8;
        let family = FAMILIES[self.random.below(2) as usize];
        let ve = &mut self.ves[usize::from(at)];
        let (prefix, leaf) = if !ve.routes.is_empty() && self.random.below(5) < 2 {
            (ve.routes[self.random.below(ve.routes.len() as u64) as usize], None)
        } else {
            let prefix = common::prefix(&mut self.random, family, 128);
            (prefix, Some(common::leaf(&mut self.random)))
        };
        let mut writes = Vec::new();
        let result = match leaf {
            Some(leaf) => ve.trie.insert(prefix, leaf, &mut writes),
            None => ve.trie.remove(prefix, &mut writes),
        };
        let old = match result {
            Ok(old) => old,
            Err(SegmentFull { .. }) => {
                assert!(writes.is_empty());
                self.full_count += 1;
                self.check(at);
                return;
            }
        };
        let before = ve.reference.clone();
        assert_eq!(ve.reference.change(&prefix, leaf), old);
        assert_eq!(ve.trie.get(&prefix), leaf);
        ve.routes.retain(|route| *route != prefix);
        if leaf.is_some() {
            ve.routes.push(prefix);
        }
        assert_eq!(ve.trie.len(), ve.routes.len());
        self.probes.extend(edges(&prefix).map(|key| (prefix.family, key)));
        if self.probes.len() > 40 {
            self.probes.swap_remove(self.random.below(36) as usize);
            self.probes.drain(..self.probes.len() - 40);
        }
        for walker in self.walkers.iter_mut().filter(|walker| walker.ve == at) {
            walker
                .allowed
                .push(self.ves[usize::from(at)].reference.lookup(walker.family, walker.key));
        }
        for write in &writes {
            self.walk(at, Some(&before));
            let ve = &self.ves[usize::from(at)];
            self.image.write(at, &ve.segment, write);
            for &(family, key) in &self.probes {
                let leaf = self.image.lookup(at, &ve.segment, family, key);
                let both = [before.lookup(family, key), ve.reference.lookup(family, key)];
                assert!(both.contains(&leaf), "{key:x} of {family:?}: {leaf:?}, not {both:?}");
            }
        }
        self.walk(at, None);
        self.check(at);
        self.retire(at);
    }

    /// All probes have the leaves of the reference, in each VE.
    fn check(&self, changed: u8) {
        for (at, ve) in self.ves.iter().enumerate() {
            let mut more = Vec::new();
            if at == usize::from(changed) {
                let edges = |route: &RoutePrefix| edges(route).map(|key| (route.family, key));
                more.extend(ve.routes.iter().rev().take(8).flat_map(edges));
            }
            for &(family, key) in self.probes.iter().chain(&more) {
                let leaf = self.image.lookup(at as u8, &ve.segment, family, key);
                assert_eq!(leaf, ve.reference.lookup(family, key), "{key:x} of {family:?}");
            }
        }
    }

    /// Starts look-ups, and moves some of those on the way by one read.
    fn walk(&mut self, changing: u8, before: Option<&Reference>) {
        if !self.probes.is_empty() && self.walkers.len() < 8 && self.random.below(3) == 0 {
            let at = self.random.below(u64::from(VES)) as u8;
            let ve = &self.ves[usize::from(at)];
            let (family, key) = self.probes[self.random.below(self.probes.len() as u64) as usize];
            let mut allowed = vec![ve.reference.lookup(family, key)];
            if let Some(before) = before.filter(|_| at == changing) {
                allowed.push(before.lookup(family, key));
            }
            let (walk, began) = (Walk::Root, ve.trie.change());
            self.walkers.push(Walker { ve: at, family, key, walk, began, allowed });
        }
        for walker in &mut self.walkers {
            if self.random.below(2) == 0 {
                let Walker { ve, family, key, .. } = *walker;
                let segment = &self.ves[usize::from(ve)].segment;
                walker.walk = self.image.step(walker.walk, ve, segment, family, key);
            }
        }
        self.walkers.retain(|walker| match walker.walk {
            Walk::Done(leaf) => {
                let Walker { key, allowed, .. } = walker;
                assert!(allowed.contains(&leaf), "slow look-up of {key:x}: {leaf:?}, {allowed:?}");
                false
            }
            _ => true,
        });
    }

    /// Frees what no look-up on the way can reach.
    fn retire(&mut self, at: u8) {
        let trie = &mut self.ves[usize::from(at)].trie;
        let oldest = self.walkers.iter().filter(|walker| walker.ve == at).map(|w| w.began).min();
        trie.retire(oldest.map_or(trie.change(), |began| began.saturating_sub(1)));
    }

    /// Removes all routes; everything is free again.
    fn finish(mut self) {
        self.walkers.clear();
        for ve in &mut self.ves {
            ve.trie.retire(ve.trie.change());
            while let Some(route) = ve.routes.pop() {
                // Shortest last: a removal never needs more room than there is then.
                if ve.trie.remove(route, &mut Vec::new()).is_err() {
                    ve.routes.insert(0, route);
                }
                ve.trie.retire(ve.trie.change());
            }
            assert!(ve.trie.is_empty());
            assert_eq!(ve.trie.free_leaves(), ve.segment.leaf_length);
            assert!((1..=20).all(|level| ve.trie.free_nodes(level) == ve.segment.node_length));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn tables_match_pdp_lookup_after_each_write(seed: u64, changes in 1usize..60) {
        let mut bench = Bench::new(seed, 3 * 200, 3 * 2000);
        (0..changes).for_each(|_| bench.change());
        prop_assert_eq!(bench.full_count, 0);
        bench.finish();
    }
}

/// A change that does not fit leaves routes and tables as they were.
#[test]
fn full_segments_keep_their_tables() {
    let mut full_count = 0;
    for seed in 0..24 {
        let mut bench = Bench::new(seed, 3 * 10, 3 * 80);
        (0..150).for_each(|_| bench.change());
        full_count += bench.full_count;
        bench.finish();
    }
    assert!(full_count > 100, "{full_count} of 3600 changes did not fit");
}

/// A table's image is the same table as the sum of its changes.
#[test]
fn image_is_the_sum_of_the_changes() {
    let mut random = Random(5);
    let segment = segments(1, 4096, 65536)[0];
    let mut trie = LpmTrie::new(20, segment.node_length, segment.leaf_length);
    let mut reference = Reference::default();
    let mut routes = Vec::new();
    for _ in 0..1500 {
        let family = FAMILIES[random.below(2) as usize];
        let prefix = common::prefix(&mut random, family, 128);
        let leaf = common::leaf(&mut random);
        trie.insert(prefix, leaf, &mut Vec::new()).unwrap();
        trie.retire(trie.change());
        reference.change(&prefix, Some(leaf));
        routes.push(prefix);
    }
    let (mut image, mut writes) = (Image::default(), Vec::new());
    trie.image(&mut writes);
    writes.iter().for_each(|write| image.write(0, &segment, write));
    for route in routes {
        for key in edges(&route) {
            let want = reference.lookup(route.family, key);
            assert_eq!(image.lookup(0, &segment, route.family, key), want);
        }
    }
}
