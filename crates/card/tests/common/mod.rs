//! Common parts of the look-up's tests: random routes, a reference table, a walk of the images.

#![allow(dead_code)]

pub mod traffic;
pub mod world;

use std::collections::HashMap;

use pdp_card::{
    Leaf, LeafKind, LpmSegment, LpmWrite, NodeEntry, RootEntry, RouteFamily, RoutePrefix,
};
use pdp_lookup::{TableV4, TableV6};

/// Both families.
pub const FAMILIES: [RouteFamily; 2] = [RouteFamily::V4, RouteFamily::V6];

/// Repeatable pseudo-random numbers: splitmix64 (Steele, Lea, Flood 2014).
#[derive(Clone, Debug)]
pub struct Random(pub u64);

impl Random {
    /// Returns the next number.
    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ (bits >> 31)
    }

    /// Returns a number below `bound`.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.draw() % bound
    }

    /// Returns 128 bits.
    pub fn wide(&mut self) -> u128 {
        u128::from(self.draw()) << 64 | u128::from(self.draw())
    }
}

/// Bits of an address behind its first `length`.
pub fn host_mask(family: RouteFamily, length: u32) -> u128 {
    let address = u128::MAX << (128 - family.bits());
    address & u128::MAX.checked_shr(length).unwrap_or(0)
}

/// Returns the prefix with the bits behind its length cleared.
pub fn masked(prefix: RoutePrefix) -> RoutePrefix {
    let cleared = !u128::MAX.checked_shr(prefix.length).unwrap_or(0);
    RoutePrefix { key: prefix.key & cleared, ..prefix }
}

/// Returns an address of a few related ones, so that prefixes nest.
pub fn address(random: &mut Random, family: RouteFamily) -> u128 {
    let bits = family.bits();
    let base: u128 = [0x0a14_0000 << 96, 0x2001_0db8_0000_0001 << 64][random.below(2) as usize];
    let differs_from = random.below(u64::from(bits) + 1) as u32;
    let random_bits = if random.below(8) == 0 { random.wide() } else { base };
    (random_bits ^ (random.wide() & host_mask(family, differs_from))) & host_mask(family, 0)
}

/// Returns a random prefix; lengths at the edges of levels are frequent.
pub fn prefix(random: &mut Random, family: RouteFamily, length_max: u32) -> RoutePrefix {
    let bits = family.bits().min(length_max);
    let length = match random.below(3) {
        0 => (8 + 6 * random.below(21) as u32 + random.below(2) as u32).min(bits),
        _ => random.below(u64::from(bits) + 1) as u32,
    };
    masked(RoutePrefix { family, key: address(random, family), length })
}

/// Returns a route's random leaf. Few groups, so that neighbours are often equal.
pub fn leaf(random: &mut Random) -> Leaf {
    match random.below(12) {
        0 => Leaf { kind: LeafKind::Blackhole, group: 0 },
        1 => Leaf { kind: LeafKind::Hook, group: 0 },
        2 => Leaf { kind: LeafKind::Local, group: 0 },
        3 => Leaf::group(random.below(1024) as u16),
        few => Leaf::group(few as u16 % 4),
    }
}

/// The first and last address of a prefix, and the ones beside them.
pub fn edges(prefix: &RoutePrefix) -> [u128; 4] {
    let bits = prefix.family.bits();
    let (first, one) = (prefix.key, 1u128 << (128 - bits));
    let last = first | host_mask(prefix.family, prefix.length);
    let whole = host_mask(prefix.family, 0);
    [first, last, first.wrapping_sub(one) & whole, last.wrapping_add(one) & whole]
}

/// The same routes in `pdp_lookup`.
#[derive(Clone, Debug, Default)]
pub struct Reference {
    v4: TableV4,
    v6: TableV6,
}

fn v4(key: u128) -> u32 {
    (key >> 96) as u32
}

fn leaf_of(value: Option<u32>) -> Leaf {
    value.map_or(Leaf::NONE, |value| Leaf::from_bits(value as u16).unwrap())
}

impl Reference {
    /// Inserts or removes a route.
    pub fn change(&mut self, prefix: &RoutePrefix, leaf: Option<Leaf>) -> Option<Leaf> {
        let RoutePrefix { key, length, .. } = *prefix;
        let old = match (prefix.family, leaf) {
            (RouteFamily::V4, Some(leaf)) => self.v4.insert(v4(key), length, leaf.bits().into(), 0),
            (RouteFamily::V4, None) => self.v4.remove(v4(key), length),
            (RouteFamily::V6, Some(leaf)) => self.v6.insert(key, length, leaf.bits().into(), 0),
            (RouteFamily::V6, None) => self.v6.remove(key, length),
        };
        old.map(|value| Leaf::from_bits(value as u16).unwrap())
    }

    /// Returns an address's leaf.
    pub fn lookup(&self, family: RouteFamily, key: u128) -> Leaf {
        leaf_of(match family {
            RouteFamily::V4 => self.v4.lookup(v4(key)),
            RouteFamily::V6 => self.v6.lookup(key),
        })
    }
}

/// The memories of a card, filled by writes.
#[derive(Clone, Debug, Default)]
pub struct Image {
    roots: HashMap<(u8, RouteFamily, u8), RootEntry>,
    nodes: HashMap<(u8, u32), NodeEntry>,
    leaves: HashMap<u32, Leaf>,
}

/// A walk between two reads.
#[derive(Clone, Copy, Debug)]
pub enum Walk {
    /// Reads level 0 next.
    Root,
    /// Reads this node next.
    Node(u8, u32),
    /// Reads this leaf next.
    Leaf(u32),
    /// Is done.
    Done(Leaf),
}

impl Image {
    /// Does a VE's write; panics if it leaves the segment.
    pub fn write(&mut self, ve: u8, segment: &LpmSegment, write: &LpmWrite) {
        match *write {
            LpmWrite::Root { family, slot, entry } => {
                self.roots.insert((ve, family, slot), entry);
            }
            LpmWrite::Node { level, index, entry } => {
                assert!(index < segment.node_length, "{write:?}");
                self.nodes.insert((level, segment.node_base + index), entry);
            }
            LpmWrite::Leaf { index, leaf } => {
                assert!(index < segment.leaf_length, "{write:?}");
                self.leaves.insert(segment.leaf_base + index, leaf);
            }
        }
    }

    /// Does the next read of a walk, as card_lpm does.
    pub fn step(
        &self,
        walk: Walk,
        ve: u8,
        segment: &LpmSegment,
        family: RouteFamily,
        key: u128,
    ) -> Walk {
        match walk {
            Walk::Root => match self.roots[&(ve, family, (key >> 120) as u8)] {
                RootEntry::None => Walk::Done(Leaf::NONE),
                RootEntry::Leaf(index) => Walk::Leaf(index),
                RootEntry::Node(index) => Walk::Node(1, index),
                RootEntry::Excess => Walk::Done(Leaf { kind: LeafKind::Excess, group: 0 }),
            },
            Walk::Node(level, index) => {
                assert!(index < segment.node_length);
                let node = self.nodes[&(level, segment.node_base + index)];
                let slot = (key << (8 + 6 * (u32::from(level) - 1)) >> 122) as u32;
                let below = (1u64 << slot) - 1;
                if node.child_map >> slot & 1 != 0 {
                    let rank = (node.child_map & below).count_ones();
                    Walk::Node(level + 1, node.child_base + rank)
                } else {
                    let covered = below << 1;
                    Walk::Leaf(node.leaf_base + (node.leaf_map & covered).count_ones())
                }
            }
            Walk::Leaf(index) => {
                assert!(index < segment.leaf_length);
                Walk::Done(self.leaves[&(segment.leaf_base + index)])
            }
            Walk::Done(leaf) => Walk::Done(leaf),
        }
    }

    /// Returns an address's leaf.
    pub fn lookup(&self, ve: u8, segment: &LpmSegment, family: RouteFamily, key: u128) -> Leaf {
        let mut walk = Walk::Root;
        loop {
            walk = self.step(walk, ve, segment, family, key);
            if let Walk::Done(leaf) = walk {
                return leaf;
            }
        }
    }
}

/// Segments of equal size.
pub fn segments(ves: u32, nodes: u32, leaves: u32) -> Vec<LpmSegment> {
    let (node_length, leaf_length) = (nodes / ves, leaves / ves);
    let segment = |ve| LpmSegment {
        node_base: ve * node_length,
        node_length,
        leaf_base: ve * leaf_length,
        leaf_length,
    };
    (0..ves).map(segment).collect()
}
