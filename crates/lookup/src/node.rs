//! Nodes of the trie in the form for look-ups: each is a block of half cache lines.
//!
//! A node has an entry for each of the 64 values of six address bits:
//! the name of a child, or a stored value. Neighbouring slots with the
//! same entry form a run, which is stored once. A node's words are
//!
//! | words | |
//! |---|---|
//! | 0, 1 | the slots at which a run begins, as bits (slot 0 is always one) |
//! | 2 | inherited: the stored value for entries of this node that are [`NOTHING`] |
//! | 3 | control: index of the prefixes that end in this node |
//! | 4.. | the entry of each run |
//!
//! With [`AddressBits::SHORT_RUNS`] (IPv4), words from 4 on have 16 bits for each run.
//! They are a small stored value, or [`LONG`] and the index of a later word with a
//! child or a larger stored value. A node of 24 runs without children then fits in
//! one cache line. One cache miss reads 97 of 100 nodes of the Internet's IPv4 table.

use std::hint::select_unpredictable;
use std::marker::PhantomData;

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::AddressBits;
use crate::pool::{Blocks, class_of};

/// Slots of a node.
pub(crate) const SLOTS: usize = 64;

/// Marks an entry as the name of a node; all others are stored values.
pub(crate) const NODE: u32 = 1 << 31;

/// A stored value is the value plus one; zero means that nothing matches.
pub(crate) const NOTHING: u32 = 0;

/// Words of half a cache line, the unit of blocks.
const UNIT: usize = 8;
type NodeUnit = [u32; UNIT];

/// Words before the runs.
const HEADER: usize = 4;
const INHERITED: usize = 2;
const CONTROL: usize = 3;

/// Marks a run's 16 bits as the index of a word of the node.
const LONG: u16 = 1 << 15;

/// By slot: the bits of all slots up to this one.
const UP_TO: [u64; SLOTS] = {
    let mut up_to = [0; SLOTS];
    let mut slot = 0;
    while slot < SLOTS {
        up_to[slot] = u64::MAX >> (SLOTS - 1 - slot);
        slot += 1;
    }
    up_to
};

#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, align(64))]
struct CacheLine([NodeUnit; 2]);

/// All nodes of a table. A node's name is the first unit of its block.
#[derive(Clone, Debug)]
pub(crate) struct TrieNodes<A> {
    lines: Vec<CacheLine>,
    blocks: Blocks,
    address: PhantomData<A>,
}

/// Read access to the nodes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TrieView<'a, A> {
    units: &'a [NodeUnit],
    halves: &'a [u16],
    address: PhantomData<A>,
}

impl<A: AddressBits> TrieView<'_, A> {
    #[inline(always)]
    pub(crate) fn inherited(&self, node: u32) -> u32 {
        self.units[node as usize][INHERITED]
    }

    /// A node's entry at a slot (modulo 64).
    #[inline(always)]
    pub(crate) fn entry(&self, node: u32, slot: usize) -> u32 {
        let node = node as usize;
        let header = &self.units[node];
        let runs = u64::from(header[1]) << 32 | u64::from(header[0]);
        // Number of runs that begin up to this slot; the last of them has the entry.
        let begun = (runs & UP_TO[slot % SLOTS]).count_ones() as usize;
        let words = self.units.as_flattened();
        if !A::SHORT_RUNS {
            return words[node * UNIT + HEADER - 1 + begun];
        }
        let run = self.halves[2 * (node * UNIT + HEADER) - 1 + begun];
        // Without a long entry, this reads a word that is in the cache already.
        let is_long = run & LONG != 0;
        let long = words[node * UNIT + select_unpredictable(is_long, usize::from(run & !LONG), 0)];
        select_unpredictable(is_long, long, run.into())
    }
}

impl<A: AddressBits> Default for TrieNodes<A> {
    fn default() -> Self {
        Self { lines: Vec::new(), blocks: Blocks::default(), address: PhantomData }
    }
}

impl<A: AddressBits> TrieNodes<A> {
    #[inline(always)]
    pub(crate) fn view(&self) -> TrieView<'_, A> {
        let bytes = self.lines.as_bytes();
        // Lines consist of units and halves, so the conversion can't fail.
        TrieView {
            units: FromBytes::ref_from_bytes(bytes).unwrap_or(&[]),
            halves: FromBytes::ref_from_bytes(bytes).unwrap_or(&[]),
            address: PhantomData,
        }
    }

    fn words(&self, node: u32) -> &[u32] {
        &self.view().units.as_flattened()[node as usize * UNIT..]
    }

    fn words_mut(&mut self, node: u32) -> &mut [u32] {
        let words = <[u32]>::mut_from_bytes(self.lines.as_mut_bytes()).unwrap_or(&mut []);
        &mut words[node as usize * UNIT..]
    }

    fn runs(&self, node: u32) -> u64 {
        let words = self.words(node);
        u64::from(words[1]) << 32 | u64::from(words[0])
    }

    pub(crate) fn inherited(&self, node: u32) -> u32 {
        self.view().inherited(node)
    }

    pub(crate) fn set_inherited(&mut self, node: u32, stored: u32) {
        self.words_mut(node)[INHERITED] = stored;
    }

    pub(crate) fn control(&self, node: u32) -> u32 {
        self.words(node)[CONTROL]
    }

    /// Returns the entry of a slot.
    pub(crate) fn entry(&self, node: u32, slot: usize) -> u32 {
        self.view().entry(node, slot)
    }

    /// Returns the child at a slot.
    pub(crate) fn child(&self, node: u32, slot: usize) -> Option<u32> {
        let entry = self.entry(node, slot);
        (entry & NODE != 0).then_some(entry & !NODE)
    }

    /// Returns the children from a slot on, with their slots.
    pub(crate) fn children(&self, node: u32, from: usize) -> impl Iterator<Item = (usize, u32)> {
        // A child has a run of its own.
        let runs = self.runs(node);
        (from..SLOTS)
            .filter(move |slot| runs >> slot & 1 != 0)
            .filter_map(move |slot| Some((slot, self.child(node, slot)?)))
    }

    /// Returns the entries of all slots.
    pub(crate) fn entries(&self, node: u32) -> [u32; SLOTS] {
        let mut entries = [NOTHING; SLOTS];
        let mut runs = self.runs(node);
        while runs != 0 {
            let slot = runs.trailing_zeros() as usize;
            runs &= runs - 1;
            let end = (runs.trailing_zeros() as usize).min(SLOTS);
            entries[slot..end].fill(self.entry(node, slot));
        }
        entries
    }

    /// Makes an empty node.
    pub(crate) fn make(&mut self, control: u32) -> u32 {
        let node = self.allocate(1);
        self.words_mut(node)[..=HEADER].copy_from_slice(&[1, 0, NOTHING, control, NOTHING]);
        node
    }

    /// Replaces the child at a slot by another node.
    pub(crate) fn set_child(&mut self, node: u32, slot: usize, child: u32) {
        let begun = (self.runs(node) & UP_TO[slot]).count_ones() as usize;
        let at = if A::SHORT_RUNS {
            usize::from(self.short_runs(node)[begun - 1] & !LONG)
        } else {
            HEADER - 1 + begun
        };
        self.words_mut(node)[at] = NODE | child;
    }

    /// Writes a node with new entries; returns its new name.
    pub(crate) fn rewrite(&mut self, node: u32, entries: &[u32; SLOTS]) -> u32 {
        let mut runs = 1;
        for slot in 1..SLOTS {
            runs |= u64::from(entries[slot] != entries[slot - 1]) << slot;
        }
        let count = runs.count_ones() as usize;
        let mut words = [0; HEADER + SLOTS / 2 + SLOTS];
        let mut shorts = [0u16; SLOTS];
        let mut end = HEADER + if A::SHORT_RUNS { count.div_ceil(2) } else { 0 };
        let mut left = runs;
        for short in &mut shorts[..count] {
            let entry = entries[left.trailing_zeros() as usize];
            left &= left - 1;
            *short = entry as u16;
            if !A::SHORT_RUNS || entry >= u32::from(LONG) {
                *short = LONG | end as u16;
                words[end] = entry;
                end += 1;
            }
        }
        if A::SHORT_RUNS {
            words[HEADER..].as_mut_bytes()[..2 * count].copy_from_slice(shorts[..count].as_bytes());
        }
        (words[0], words[1]) = (runs as u32, (runs >> 32) as u32);
        (words[INHERITED], words[CONTROL]) = (self.inherited(node), self.control(node));
        let name = self.resize(node, end);
        self.words_mut(name)[..end].copy_from_slice(&words[..end]);
        name
    }

    pub(crate) fn release(&mut self, node: u32) {
        self.blocks.release(node, self.units(node));
    }

    /// Reserves memory, so that nodes don't move until there are `units_count` units.
    pub(crate) fn reserve(&mut self, units_count: usize) {
        self.lines.reserve_exact((units_count / 2).saturating_sub(self.lines.len()));
    }

    /// Bytes in use or free for reuse.
    pub(crate) fn memory_bytes(&self) -> usize {
        self.lines.len() * size_of::<CacheLine>() + self.blocks.memory_bytes()
    }

    /// Returns the 16 bits of each run.
    fn short_runs(&self, node: u32) -> &[u16] {
        let count = self.runs(node).count_ones() as usize;
        &self.view().halves[2 * (node as usize * UNIT + HEADER)..][..count]
    }

    /// Returns the number of units of a node's block.
    fn units(&self, node: u32) -> usize {
        let count = self.runs(node).count_ones() as usize;
        let words = if A::SHORT_RUNS {
            let longs = self.short_runs(node).iter().filter(|&run| run & LONG != 0);
            count.div_ceil(2) + longs.count()
        } else {
            count
        };
        (HEADER + words).div_ceil(UNIT)
    }

    /// Replaces a node's block by one with this number of words.
    fn resize(&mut self, node: u32, words_count: usize) -> u32 {
        let (before, units) = (self.units(node), words_count.div_ceil(UNIT));
        if class_of(before) == class_of(units) {
            return node;
        }
        self.blocks.release(node, before);
        self.allocate(units)
    }

    fn allocate(&mut self, units: usize) -> u32 {
        let node = self.blocks.allocate(units);
        let lines = self.blocks.end().div_ceil(2);
        if self.lines.len() < lines {
            self.lines.resize(lines, CacheLine::default());
        }
        node
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Valid entries: each child at one slot.
    fn entries() -> impl Strategy<Value = [u32; SLOTS]> {
        let stored = prop_oneof![3 => 0u32..4, 1 => 0x7ffeu32..0x8002, 1 => 0..NODE];
        let run = (1usize..20, prop_oneof![3 => stored.prop_map(Some), 1 => Just(None)]);
        prop::collection::vec(run, SLOTS).prop_map(|runs| {
            let all = runs.into_iter().flat_map(|(count, stored)| vec![stored; count]);
            let mut all = all.enumerate().map(|(at, entry)| entry.unwrap_or(NODE | at as u32));
            std::array::from_fn(|_| all.next().unwrap_or(NOTHING))
        })
    }

    fn nodes_keep<A: AddressBits>(steps: Vec<(usize, [u32; SLOTS])>) {
        let mut nodes = TrieNodes::<A>::default();
        let mut names: Vec<u32> = (0..4).map(|control| nodes.make(control)).collect();
        let mut want = [[NOTHING; SLOTS]; 4];
        for (which, entries) in steps {
            nodes.set_inherited(names[which], entries[0] & !NODE);
            names[which] = nodes.rewrite(names[which], &entries);
            want[which] = entries;
            for slot in (0..SLOTS).filter(|&slot| entries[slot] & NODE != 0) {
                nodes.set_child(names[which], slot, 1000 + slot as u32);
                want[which][slot] = NODE | (1000 + slot as u32);
            }
            assert_eq!(nodes.inherited(names[which]), entries[0] & !NODE);
            for (at, (&name, want)) in names.iter().zip(&want).enumerate() {
                assert_eq!(nodes.control(name), at as u32);
                assert_eq!(&nodes.entries(name), want);
                let children = (0..SLOTS).filter(|&slot| want[slot] & NODE != 0);
                assert!(nodes.children(name, 0).map(|(slot, _)| slot).eq(children));
            }
        }
        let end = nodes.blocks.end();
        let blocks: Vec<usize> = names.iter().map(|&name| nodes.units(name)).collect();
        names.into_iter().for_each(|name| nodes.release(name));
        for units in blocks {
            nodes.blocks.allocate(units);
        }
        assert_eq!(nodes.blocks.end(), end, "released blocks are used again");
    }

    proptest! {
        #[test]
        fn trie_nodes_match_arrays(steps in prop::collection::vec((0usize..4, entries()), 1..20)) {
            nodes_keep::<u32>(steps.clone());
            nodes_keep::<u128>(steps);
        }
    }
}
