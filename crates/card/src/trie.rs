//! A VE's look-up tables: routes in, writes for the card out.
//!
//! The structure is that of `card_lpm_level.sv`. Level 0 resolves eight bits, each further level
//! six. A node's slots without a child have a leaf each; neighbouring equal ones share it. A node's
//! slots inherit the longest shorter prefix, so a look-up reads one leaf at its end.
//!
//! # Changes while look-ups pass
//!
//! The writes of a change, in their order, show each look-up the table before or after the change:
//!
//! - New nodes and leaves go to free places. Then one word, the parent's, leads to them.
//! - A rewritten node always has new leaves. A leaf in use is rewritten in place if its slots stay
//!   the same: a shorter prefix changed. Entries of level 0 share leaves, which never change.
//! - No address depends on two words that a change rewrites.
//!
//! Places that a change frees may still be read by look-ups that entered before. They are used
//! again after [`LpmTrie::retire`], when those look-ups have left.
//!
//! # Costs
//!
//! A prefix of up to eight bits writes up to 256 entries of level 0. A longer prefix writes one
//! block of up to 64 nodes, one node per new level, and these nodes' leaves. In addition, each run
//! of leaves below that inherits from the prefix changes: a leaf, or a node with its leaves.

use std::collections::{BTreeMap, HashMap, VecDeque};

use crate::{BlockAllocator, Leaf, LpmWrite, NodeEntry, RootEntry, RouteFamily};

/// Bits of level 0.
pub(crate) const ROOT_BITS: u32 = 8;
const ROOT_SLOTS: usize = 1 << ROOT_BITS;
/// Bits of each further level.
const STRIDE: u32 = 6;
const SLOTS: usize = 1 << STRIDE;

/// An IP prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RoutePrefix {
    /// Family of the address.
    pub family: RouteFamily,
    /// The address, aligned to the left; bits behind the length are ignored.
    pub key: u128,
    /// Number of bits.
    pub length: u32,
}

/// Error from a change that needs more nodes or leaves than the VE's segment has in one piece.
/// The table is unchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{count} neighbouring entries of {table} do not fit: {free} are free, {pending} more when \
     look-ups have left them"
)]
pub struct SegmentFull {
    /// Table without enough free entries: "leaves" or "nodes".
    pub table: &'static str,
    /// Entries that the change needs in one piece.
    pub count: u32,
    /// Free entries, in pieces.
    pub free: u32,
    /// Entries that [`LpmTrie::retire`] frees.
    pub pending: u32,
}

/// Index of a [`TrieNode`].
type NodeId = u32;

/// A node as the driver knows it.
#[derive(Clone, Debug, Default)]
struct TrieNode {
    /// Prefixes that end in this node, ordered by number. A prefix of `b` bits (1 to 6)
    /// in the node with value `v` has number `2^b + v`.
    routes: Vec<(u8, Leaf)>,
    child_map: u64,
    /// Children in the order of their slots.
    children: Vec<NodeId>,
    child_base: u32,
    leaf_map: u64,
    leaf_base: u32,
    leaves: Vec<Leaf>,
    /// Leaf of the longest shorter prefix.
    inherited: Leaf,
    /// Change that last saved this node for its undoing.
    saved_in: u64,
}

impl TrieNode {
    /// Returns each slot's leaf, also of slots with a child.
    fn slot_leaves(&self) -> [Leaf; SLOTS] {
        let mut slots = [self.inherited; SLOTS];
        // Numbers ascend with length, so longer prefixes come later.
        for &(number, leaf) in &self.routes {
            let bits = number.ilog2();
            let width = SLOTS >> bits;
            let first = (usize::from(number) - (1 << bits)) * width;
            slots[first..first + width].fill(leaf);
        }
        slots
    }

    /// Returns the leaf map and the leaves for these slots.
    fn runs(&self, slots: &[Leaf; SLOTS]) -> (u64, Vec<Leaf>) {
        let (mut map, mut leaves) = (1, Vec::new());
        for (slot, &leaf) in slots.iter().enumerate() {
            if self.child_map >> slot & 1 == 0 && leaves.last() != Some(&leaf) {
                // The first leaf also covers the slots in front, which have children.
                map |= if leaves.is_empty() { 1 } else { 1 << slot };
                leaves.push(leaf);
            }
        }
        if leaves.is_empty() {
            // The hardware takes a node for one with at least one leaf.
            leaves.push(self.inherited);
        }
        (map, leaves)
    }

    fn rank(&self, slot: usize) -> usize {
        (self.child_map & ((1 << slot) - 1)).count_ones() as usize
    }

    fn child(&self, slot: usize) -> Option<NodeId> {
        (self.child_map >> slot & 1 != 0).then(|| self.children[self.rank(slot)])
    }

    fn entry(&self) -> NodeEntry {
        NodeEntry {
            child_map: self.child_map,
            leaf_map: self.leaf_map,
            child_base: self.child_base,
            leaf_base: self.leaf_base,
        }
    }
}

/// Level 0 of a family.
#[derive(Clone, Debug)]
struct RootTable {
    /// Prefixes of up to eight bits by their number, `2^length + value`.
    routes: BTreeMap<u16, Leaf>,
    /// Leaf of the longest of them by slot.
    best: Vec<Leaf>,
    /// Node of level 1 and its place, by slot.
    children: Vec<Option<(NodeId, u32)>>,
    /// Slots whose packets are those of excess routes, whatever the routes.
    blocked: Vec<bool>,
}

impl Default for RootTable {
    fn default() -> Self {
        Self {
            routes: BTreeMap::new(),
            best: vec![Leaf::NONE; ROOT_SLOTS],
            children: vec![None; ROOT_SLOTS],
            blocked: vec![false; ROOT_SLOTS],
        }
    }
}

/// A place to free.
#[derive(Clone, Copy, Debug)]
enum Freed {
    /// Nodes of a level.
    Nodes(u8, u32, u32),
    Leaves(u32, u32),
}

/// State that a failed change must restore.
#[derive(Debug, Default)]
struct Undo {
    nodes: Vec<(NodeId, TrieNode)>,
    made: Vec<NodeId>,
    removed: Vec<NodeId>,
    allocated: Vec<Freed>,
    freed: Vec<Freed>,
}

/// The last node on a path, its level and place, and the nodes above it.
#[derive(Clone, Copy, Debug)]
struct Step {
    id: NodeId,
    level: u8,
    place: u32,
}

/// A VE's routes, and their images in the card's memories; see the [module](self).
#[derive(Debug)]
pub struct LpmTrie {
    roots: [RootTable; 2],
    nodes: Vec<TrieNode>,
    unused: Vec<NodeId>,
    /// Leaves that entries of level 0 share: index and number of entries.
    root_leaves: HashMap<Leaf, (u32, u32)>,
    node_blocks: Vec<BlockAllocator>,
    leaf_blocks: BlockAllocator,
    undo: Undo,
    change: u64,
    pending: VecDeque<(u64, Freed)>,
    routes_count: usize,
}

fn family_index(family: RouteFamily) -> usize {
    usize::from(family == RouteFamily::V6)
}

fn root_slot(key: u128) -> usize {
    (key >> (128 - ROOT_BITS)) as usize
}

/// Returns the slot of a key in a node of a level.
fn slot(key: u128, level: u8) -> usize {
    (key << (ROOT_BITS + STRIDE * u32::from(level - 1)) >> (128 - STRIDE)) as usize
}

/// Level in which a prefix of more than eight bits ends, and its number in the node.
fn place_of(prefix: &RoutePrefix) -> (u8, u8) {
    let level = (prefix.length - ROOT_BITS).div_ceil(STRIDE);
    let bits = prefix.length - ROOT_BITS - STRIDE * (level - 1);
    let value = slot(prefix.key, level as u8) >> (STRIDE - bits);
    (level as u8, 1 << bits | value as u8)
}

/// Number of a prefix of up to eight bits, and its slots in level 0.
fn root_place_of(prefix: &RoutePrefix) -> (u16, std::ops::Range<usize>) {
    let width = ROOT_SLOTS >> prefix.length;
    let value = root_slot(prefix.key) / width;
    (1 << prefix.length | value as u16, value * width..(value + 1) * width)
}

impl LpmTrie {
    /// Makes an empty table with `levels` levels of six bits, for a segment of `nodes` nodes in
    /// each level and `leaves` leaves.
    pub fn new(levels: u8, nodes: u32, leaves: u32) -> Self {
        Self {
            roots: Default::default(),
            nodes: Vec::new(),
            unused: Vec::new(),
            root_leaves: HashMap::new(),
            node_blocks: (0..levels).map(|_| BlockAllocator::new(nodes)).collect(),
            leaf_blocks: BlockAllocator::new(leaves),
            undo: Undo::default(),
            change: 0,
            pending: VecDeque::new(),
            routes_count: 0,
        }
    }

    /// Number of routes.
    pub fn len(&self) -> usize {
        self.routes_count
    }

    /// True if there are no routes.
    pub fn is_empty(&self) -> bool {
        self.routes_count == 0
    }

    /// Number of the last change; see [`LpmTrie::retire`].
    pub fn change(&self) -> u64 {
        self.change
    }

    /// Free nodes of a level, from 1.
    pub fn free_nodes(&self, level: u8) -> u32 {
        self.node_blocks[usize::from(level) - 1].free()
    }

    /// Free leaves.
    pub fn free_leaves(&self) -> u32 {
        self.leaf_blocks.free()
    }

    /// Frees the places that changes up to `change` left, when all look-ups that entered before
    /// their last write was in the tables are done. Returns true if places have become free.
    pub fn retire(&mut self, change: u64) -> bool {
        let before = self.pending.len();
        while let Some(&(of, freed)) = self.pending.front()
            && of <= change
        {
            self.pending.pop_front();
            self.release(freed);
        }
        self.pending.len() < before
    }

    /// Slots of level 0 under a prefix; one if it is longer than level 0 reaches.
    pub fn root_slots(prefix: &RoutePrefix) -> impl Iterator<Item = u8> + use<> {
        let short = RoutePrefix { length: prefix.length.min(ROOT_BITS), ..*prefix };
        root_place_of(&short).1.map(|slot| slot as u8)
    }

    /// Sets or clears the excess mark of a slot of level 0, which always fits. While the mark is
    /// set, all look-ups of the slot return excess.
    pub fn block(
        &mut self,
        family: RouteFamily,
        slot: u8,
        blocked: bool,
        writes: &mut Vec<LpmWrite>,
    ) {
        let place = &mut self.roots[family_index(family)].blocked[usize::from(slot)];
        if std::mem::replace(place, blocked) != blocked {
            writes.push(self.root_write(family, slot.into()));
        }
    }

    /// Returns the writes that clear level 0, which leads to everything else. A card's memories
    /// begin with any contents, so a VE's table begins with these.
    pub fn clear_writes() -> Vec<LpmWrite> {
        let families = [RouteFamily::V4, RouteFamily::V6];
        let entry = RootEntry::None;
        let root = |family| (0..=u8::MAX).map(move |slot| LpmWrite::Root { family, slot, entry });
        families.into_iter().flat_map(root).collect()
    }

    /// Inserts or replaces a route and appends the writes. Returns the previous leaf.
    ///
    /// # Errors
    /// If nodes or leaves do not fit. Then neither routes nor `writes` change.
    ///
    /// # Panics
    /// If the prefix is longer than an address, or than the levels reach.
    pub fn insert(
        &mut self,
        prefix: RoutePrefix,
        leaf: Leaf,
        writes: &mut Vec<LpmWrite>,
    ) -> Result<Option<Leaf>, SegmentFull> {
        self.check(&prefix);
        let old = self.change_route(&prefix, Some(leaf), writes)?;
        self.routes_count += usize::from(old.is_none());
        Ok(old)
    }

    /// Removes a route and appends the writes. Returns its leaf if it was there.
    ///
    /// # Errors
    /// If the leaves of the route's node do not fit beside the old ones. Then neither routes nor
    /// `writes` change.
    ///
    /// # Panics
    /// If the prefix is longer than an address, or than the levels reach.
    pub fn remove(
        &mut self,
        prefix: RoutePrefix,
        writes: &mut Vec<LpmWrite>,
    ) -> Result<Option<Leaf>, SegmentFull> {
        self.check(&prefix);
        if self.get(&prefix).is_none() {
            return Ok(None);
        }
        let old = self.change_route(&prefix, None, writes)?;
        self.routes_count -= usize::from(old.is_some());
        Ok(old)
    }

    /// Returns the leaf of exactly this prefix.
    pub fn get(&self, prefix: &RoutePrefix) -> Option<Leaf> {
        let root = &self.roots[family_index(prefix.family)];
        if prefix.length <= ROOT_BITS {
            return root.routes.get(&root_place_of(prefix).0).copied();
        }
        let (level, number) = place_of(prefix);
        let (mut id, _) = root.children[root_slot(prefix.key)]?;
        for above in 1..level {
            id = self.nodes[id as usize].child(slot(prefix.key, above))?;
        }
        let routes = &self.nodes[id as usize].routes;
        routes.iter().find(|route| route.0 == number).map(|route| route.1)
    }

    /// Appends the writes of the whole table, deepest entries first.
    pub fn image(&self, writes: &mut Vec<LpmWrite>) {
        for (&leaf, &(index, _)) in &self.root_leaves {
            writes.push(LpmWrite::Leaf { index, leaf });
        }
        for family in [RouteFamily::V4, RouteFamily::V6] {
            let root = &self.roots[family_index(family)];
            for slot in 0..ROOT_SLOTS {
                if let Some((id, place)) = root.children[slot] {
                    self.image_node(Step { id, level: 1, place }, writes);
                }
                writes.push(self.root_write(family, slot));
            }
        }
    }

    fn image_node(&self, step: Step, writes: &mut Vec<LpmWrite>) {
        let node = &self.nodes[step.id as usize];
        for (&id, place) in node.children.iter().zip(node.child_base..) {
            self.image_node(Step { id, level: step.level + 1, place }, writes);
        }
        self.write_leaves(step.id, writes);
        self.write_node(step, writes);
    }

    fn check(&self, prefix: &RoutePrefix) {
        let reach = ROOT_BITS + STRIDE * self.node_blocks.len() as u32;
        let bits = prefix.family.bits().min(reach);
        assert!(prefix.length <= bits, "{prefix:?} is longer than {bits} bits");
    }

    /// Makes one change, or undoes what a full segment cut short.
    fn change_route(
        &mut self,
        prefix: &RoutePrefix,
        leaf: Option<Leaf>,
        writes: &mut Vec<LpmWrite>,
    ) -> Result<Option<Leaf>, SegmentFull> {
        self.change += 1;
        let before = writes.len();
        if prefix.length <= ROOT_BITS {
            return self.change_short(prefix, leaf, writes);
        }
        let old = match leaf {
            Some(leaf) => self.insert_long(prefix, leaf, writes),
            None => self.remove_long(prefix, writes),
        };
        if old.is_err() {
            writes.truncate(before);
            self.undo_change();
        } else {
            self.finish_change();
        }
        old
    }

    fn finish_change(&mut self) {
        let undo = std::mem::take(&mut self.undo);
        for id in undo.removed {
            self.nodes[id as usize] = TrieNode::default();
            self.unused.push(id);
        }
        let change = self.change;
        self.pending.extend(undo.freed.into_iter().map(|freed| (change, freed)));
    }

    fn undo_change(&mut self) {
        let undo = std::mem::take(&mut self.undo);
        for (id, node) in undo.nodes {
            self.nodes[id as usize] = node;
        }
        for id in undo.made {
            self.nodes[id as usize] = TrieNode::default();
            self.unused.push(id);
        }
        for place in undo.allocated {
            self.release(place);
        }
    }

    fn release(&mut self, place: Freed) {
        match place {
            Freed::Nodes(level, first, count) => {
                self.node_blocks[usize::from(level) - 1].release(first, count);
            }
            Freed::Leaves(first, count) => self.leaf_blocks.release(first, count),
        }
    }

    fn full(&self, table: &'static str, count: u32, free: u32, level: u8) -> SegmentFull {
        let of = |freed: &Freed| match *freed {
            Freed::Nodes(of, _, count) if of == level => count,
            Freed::Leaves(_, count) if level == 0 => count,
            _ => 0,
        };
        let pending = self.pending.iter().map(|(_, freed)| of(freed)).sum();
        SegmentFull { table, count, free, pending }
    }

    fn allocate_nodes(&mut self, level: u8, count: u32) -> Result<u32, SegmentFull> {
        let blocks = &mut self.node_blocks[usize::from(level) - 1];
        let Some(first) = blocks.allocate(count) else {
            let free = blocks.free();
            return Err(self.full("nodes", count, free, level));
        };
        self.undo.allocated.push(Freed::Nodes(level, first, count));
        Ok(first)
    }

    fn allocate_leaves(&mut self, count: u32) -> Result<u32, SegmentFull> {
        let Some(first) = self.leaf_blocks.allocate(count) else {
            let free = self.leaf_blocks.free();
            return Err(self.full("leaves", count, free, 0));
        };
        self.undo.allocated.push(Freed::Leaves(first, count));
        Ok(first)
    }

    /// Saves a node before its first change, and returns it.
    fn edit(&mut self, id: NodeId) -> &mut TrieNode {
        let node = &mut self.nodes[id as usize];
        if node.saved_in != self.change {
            node.saved_in = self.change;
            self.undo.nodes.push((id, node.clone()));
        }
        node
    }

    fn make_node(&mut self) -> NodeId {
        let id = self.unused.pop().unwrap_or_else(|| {
            self.nodes.push(TrieNode::default());
            self.nodes.len() as u32 - 1
        });
        self.nodes[id as usize].saved_in = self.change;
        self.undo.made.push(id);
        id
    }

    fn write_leaves(&self, id: NodeId, writes: &mut Vec<LpmWrite>) {
        let node = &self.nodes[id as usize];
        for (&leaf, index) in node.leaves.iter().zip(node.leaf_base..) {
            writes.push(LpmWrite::Leaf { index, leaf });
        }
    }

    fn write_node(&self, step: Step, writes: &mut Vec<LpmWrite>) {
        let entry = self.nodes[step.id as usize].entry();
        writes.push(LpmWrite::Node { level: step.level, index: step.place, entry });
    }

    fn root_write(&self, family: RouteFamily, slot: usize) -> LpmWrite {
        let root = &self.roots[family_index(family)];
        let entry = match (root.children[slot], root.best[slot]) {
            _ if root.blocked[slot] => RootEntry::Excess,
            (Some((_, place)), _) => RootEntry::Node(place),
            (None, Leaf::NONE) => RootEntry::None,
            (None, leaf) => RootEntry::Leaf(self.root_leaves[&leaf].0),
        };
        LpmWrite::Root { family, slot: slot as u8, entry }
    }

    /// Takes a leaf for an entry of level 0, which shares it with others.
    fn take_root_leaf(
        &mut self,
        leaf: Leaf,
        writes: &mut Vec<LpmWrite>,
    ) -> Result<(), SegmentFull> {
        if leaf == Leaf::NONE {
            return Ok(());
        }
        if let Some((_, entries)) = self.root_leaves.get_mut(&leaf) {
            *entries += 1;
            return Ok(());
        }
        let index = self.allocate_leaves(1)?;
        writes.push(LpmWrite::Leaf { index, leaf });
        self.root_leaves.insert(leaf, (index, 1));
        Ok(())
    }

    /// Gives an entry's leaf back.
    fn drop_root_leaf(&mut self, leaf: Leaf) {
        if let Some((index, entries)) = self.root_leaves.get_mut(&leaf) {
            *entries -= 1;
            if *entries == 0 {
                self.undo.freed.push(Freed::Leaves(*index, 1));
                self.root_leaves.remove(&leaf);
            }
        }
    }

    /// Changes the routes and the leaves of level 0.
    fn change_short(
        &mut self,
        prefix: &RoutePrefix,
        leaf: Option<Leaf>,
        writes: &mut Vec<LpmWrite>,
    ) -> Result<Option<Leaf>, SegmentFull> {
        let (number, slots) = root_place_of(prefix);
        let family = family_index(prefix.family);
        let saved_leaves = self.root_leaves.clone();
        let saved_best = self.roots[family].best.clone();
        let before = writes.len();
        let routes = &mut self.roots[family].routes;
        let old = match leaf {
            Some(leaf) => routes.insert(number, leaf),
            None => routes.remove(&number),
        };
        let done = slots.into_iter().try_for_each(|slot| {
            let best = self.roots[family].longest_short(slot);
            self.change_best(prefix.family, slot, best, writes)
        });
        if let Err(full) = done {
            writes.truncate(before);
            self.root_leaves = saved_leaves;
            let root = &mut self.roots[family];
            root.best = saved_best;
            match old {
                Some(old) => root.routes.insert(number, old),
                None => root.routes.remove(&number),
            };
            self.undo_change();
            return Err(full);
        }
        self.finish_change();
        Ok(old)
    }

    /// Changes the leaf of a slot of level 0, or what the node below inherits.
    fn change_best(
        &mut self,
        family: RouteFamily,
        slot: usize,
        best: Leaf,
        writes: &mut Vec<LpmWrite>,
    ) -> Result<(), SegmentFull> {
        let root = &mut self.roots[family_index(family)];
        let old = std::mem::replace(&mut root.best[slot], best);
        if old == best {
            return Ok(());
        }
        if let Some((id, place)) = root.children[slot] {
            return self.inherit(Step { id, level: 1, place }, best, writes);
        }
        self.take_root_leaf(best, writes)?;
        writes.push(self.root_write(family, slot));
        self.drop_root_leaf(old);
        Ok(())
    }

    /// Changes what a node inherits.
    fn inherit(
        &mut self,
        step: Step,
        inherited: Leaf,
        writes: &mut Vec<LpmWrite>,
    ) -> Result<(), SegmentFull> {
        let old_slots = self.nodes[step.id as usize].slot_leaves();
        self.edit(step.id).inherited = inherited;
        self.refresh(step, &old_slots, writes)
    }

    /// Writes a node's leaves after a change of its routes or of what it inherits, and passes the
    /// change on to its children.
    fn refresh(
        &mut self,
        step: Step,
        old_slots: &[Leaf; SLOTS],
        writes: &mut Vec<LpmWrite>,
    ) -> Result<(), SegmentFull> {
        let node = self.edit(step.id);
        let slots = node.slot_leaves();
        let (map, leaves) = node.runs(&slots);
        if map == node.leaf_map && leaves.len() == node.leaves.len() {
            let changed = leaves.iter().zip(&node.leaves).zip(node.leaf_base..);
            let changed = changed.filter(|((new, old), _)| new != old);
            writes.extend(changed.map(|((&leaf, _), index)| LpmWrite::Leaf { index, leaf }));
            node.leaves = leaves;
        } else {
            self.place_leaves(step.id, map, leaves, writes)?;
            self.write_node(step, writes);
        }
        let node = &self.nodes[step.id as usize];
        let children: Vec<_> = (0..SLOTS)
            .filter(|&slot| slots[slot] != old_slots[slot])
            .filter_map(|slot| Some((slot, node.child(slot)?, node.rank(slot) as u32)))
            .collect();
        let (child_base, level) = (node.child_base, step.level + 1);
        for (slot, id, rank) in children {
            self.inherit(Step { id, level, place: child_base + rank }, slots[slot], writes)?;
        }
        Ok(())
    }

    /// Writes leaves to a new block of a node. The node's word is not written.
    fn place_leaves(
        &mut self,
        id: NodeId,
        map: u64,
        leaves: Vec<Leaf>,
        writes: &mut Vec<LpmWrite>,
    ) -> Result<(), SegmentFull> {
        let first = self.allocate_leaves(leaves.len() as u32)?;
        let node = &mut self.nodes[id as usize];
        let (old_first, old_count) = (node.leaf_base, node.leaves.len() as u32);
        (node.leaf_map, node.leaf_base, node.leaves) = (map, first, leaves);
        if old_count > 0 {
            self.undo.freed.push(Freed::Leaves(old_first, old_count));
        }
        self.write_leaves(id, writes);
        Ok(())
    }

    /// Returns the nodes on the path of a key, down to a level at most.
    fn path(&self, family: RouteFamily, key: u128, level: u8) -> Vec<Step> {
        let mut path = Vec::new();
        let root = &self.roots[family_index(family)];
        let mut next = root.children[root_slot(key)];
        while let Some((id, place)) = next {
            let step = Step { id, level: path.len() as u8 + 1, place };
            path.push(step);
            if step.level == level {
                break;
            }
            let (node, slot) = (&self.nodes[id as usize], slot(key, step.level));
            let place = node.child_base + node.rank(slot) as u32;
            next = node.child(slot).map(|id| (id, place));
        }
        path
    }

    fn insert_long(
        &mut self,
        prefix: &RoutePrefix,
        leaf: Leaf,
        writes: &mut Vec<LpmWrite>,
    ) -> Result<Option<Leaf>, SegmentFull> {
        let (level, number) = place_of(prefix);
        let path = self.path(prefix.family, prefix.key, level);
        if let Some(&step) = path.last().filter(|step| step.level == level) {
            let old_slots = self.nodes[step.id as usize].slot_leaves();
            let routes = &mut self.edit(step.id).routes;
            let old = match routes.binary_search_by_key(&number, |route| route.0) {
                Ok(at) => Some(std::mem::replace(&mut routes[at].1, leaf)),
                Err(at) => {
                    routes.insert(at, (number, leaf));
                    None
                }
            };
            if old != Some(leaf) {
                self.refresh(step, &old_slots, writes)?;
            }
            return Ok(old);
        }
        let inherited = match path.last() {
            Some(step) => self.nodes[step.id as usize].slot_leaves()[slot(prefix.key, step.level)],
            None => self.roots[family_index(prefix.family)].best[root_slot(prefix.key)],
        };
        let first = path.len() as u8 + 1;
        let id = self.make_chain(prefix, (first, level), (number, leaf), inherited, writes)?;
        match path.last() {
            Some(&parent) => self.attach(parent, slot(prefix.key, parent.level), id, writes)?,
            None => self.attach_to_root(prefix, id, writes)?,
        }
        Ok(None)
    }

    /// Makes the nodes from level `levels.0` to `levels.1`, the last with the route. Writes
    /// all but the first one's word, which has no place yet; returns that one.
    fn make_chain(
        &mut self,
        prefix: &RoutePrefix,
        levels: (u8, u8),
        route: (u8, Leaf),
        inherited: Leaf,
        writes: &mut Vec<LpmWrite>,
    ) -> Result<NodeId, SegmentFull> {
        let mut below = None;
        for level in (levels.0..=levels.1).rev() {
            let id = self.make_node();
            let node = &mut self.nodes[id as usize];
            node.inherited = inherited;
            match below {
                None => node.routes.push(route),
                Some(child) => {
                    let place = self.allocate_nodes(level + 1, 1)?;
                    self.write_node(Step { id: child, level: level + 1, place }, writes);
                    let node = &mut self.nodes[id as usize];
                    node.child_map = 1 << slot(prefix.key, level);
                    (node.children, node.child_base) = (vec![child], place);
                }
            }
            let node = &self.nodes[id as usize];
            let (map, leaves) = node.runs(&node.slot_leaves());
            self.place_leaves(id, map, leaves, writes)?;
            below = Some(id);
        }
        Ok(below.expect("a chain of at least one node"))
    }

    fn attach_to_root(
        &mut self,
        prefix: &RoutePrefix,
        id: NodeId,
        writes: &mut Vec<LpmWrite>,
    ) -> Result<(), SegmentFull> {
        let place = self.allocate_nodes(1, 1)?;
        self.write_node(Step { id, level: 1, place }, writes);
        let slot = root_slot(prefix.key);
        let root = &mut self.roots[family_index(prefix.family)];
        root.children[slot] = Some((id, place));
        let best = root.best[slot];
        writes.push(self.root_write(prefix.family, slot));
        self.drop_root_leaf(best);
        Ok(())
    }

    /// Adds a child to a node.
    fn attach(
        &mut self,
        parent: Step,
        slot: usize,
        id: NodeId,
        writes: &mut Vec<LpmWrite>,
    ) -> Result<(), SegmentFull> {
        let node = self.edit(parent.id);
        let rank = node.rank(slot);
        node.child_map |= 1 << slot;
        node.children.insert(rank, id);
        let old_count = node.children.len() as u32 - 1;
        self.move_children(parent, old_count, writes)
    }

    /// Removes the vacant children of a node.
    fn detach_vacant(
        &mut self,
        parent: Step,
        writes: &mut Vec<LpmWrite>,
    ) -> Result<(), SegmentFull> {
        let node = &self.nodes[parent.id as usize];
        let old_count = node.children.len() as u32;
        let slots = (0..SLOTS).filter_map(|slot| Some((slot, node.child(slot)?)));
        let (vacant, kept): (Vec<_>, Vec<_>) = slots.partition(|&(_, id)| self.is_vacant(id));
        vacant.into_iter().for_each(|(_, id)| self.discard(id, parent.level + 1));
        let node = self.edit(parent.id);
        node.child_map = kept.iter().fold(0, |map, &(slot, _)| map | 1 << slot);
        node.children = kept.into_iter().map(|(_, id)| id).collect();
        self.move_children(parent, old_count, writes)
    }

    /// Writes a node's children and leaves to new blocks, then the node.
    fn move_children(
        &mut self,
        parent: Step,
        old_count: u32,
        writes: &mut Vec<LpmWrite>,
    ) -> Result<(), SegmentFull> {
        let level = parent.level + 1;
        let count = self.nodes[parent.id as usize].children.len() as u32;
        let first = if count > 0 { self.allocate_nodes(level, count)? } else { 0 };
        let node = &mut self.nodes[parent.id as usize];
        let old_first = std::mem::replace(&mut node.child_base, first);
        if old_count > 0 {
            self.undo.freed.push(Freed::Nodes(level, old_first, old_count));
        }
        let node = &self.nodes[parent.id as usize];
        for (&id, place) in node.children.iter().zip(first..) {
            self.write_node(Step { id, level, place }, writes);
        }
        let (map, leaves) = node.runs(&node.slot_leaves());
        self.place_leaves(parent.id, map, leaves, writes)?;
        self.write_node(parent, writes);
        Ok(())
    }

    fn remove_long(
        &mut self,
        prefix: &RoutePrefix,
        writes: &mut Vec<LpmWrite>,
    ) -> Result<Option<Leaf>, SegmentFull> {
        let before = writes.len();
        let removed = self.remove_from_node(prefix, true, writes);
        if removed.is_ok() {
            return removed;
        }
        // The fewer children do not fit beside the old ones: a vacant node stays.
        writes.truncate(before);
        self.undo_change();
        self.change += 1;
        self.remove_from_node(prefix, false, writes)
    }

    /// Removes a route from its node; if `detaches`, also the nodes that become vacant.
    fn remove_from_node(
        &mut self,
        prefix: &RoutePrefix,
        detaches: bool,
        writes: &mut Vec<LpmWrite>,
    ) -> Result<Option<Leaf>, SegmentFull> {
        let (level, number) = place_of(prefix);
        let mut path = self.path(prefix.family, prefix.key, level);
        let Some(last) = path.pop().filter(|step| step.level == level) else { return Ok(None) };
        let node = &self.nodes[last.id as usize];
        let Ok(at) = node.routes.binary_search_by_key(&number, |route| route.0) else {
            return Ok(None);
        };
        let old_slots = node.slot_leaves();
        let (_, old) = self.edit(last.id).routes.remove(at);
        if !detaches || !self.is_vacant(last.id) {
            self.refresh(last, &old_slots, writes)?;
            return Ok(Some(old));
        }
        let mut top = last;
        while let Some(parent) = path.pop() {
            if !self.is_vacant(parent.id) {
                self.detach_vacant(parent, writes)?;
                return Ok(Some(old));
            }
            top = parent;
        }
        self.discard(top.id, top.level);
        self.detach_from_root(prefix, writes)?;
        Ok(Some(old))
    }

    /// True if no route ends in a node or below it.
    fn is_vacant(&self, id: NodeId) -> bool {
        let node = &self.nodes[id as usize];
        node.routes.is_empty() && node.children.iter().all(|&child| self.is_vacant(child))
    }

    /// Frees the leaves of a node and of all below it, and the nodes when the change is done. The
    /// place of the first node is not freed.
    fn discard(&mut self, id: NodeId, level: u8) {
        let node = &self.nodes[id as usize];
        self.undo.freed.push(Freed::Leaves(node.leaf_base, node.leaves.len() as u32));
        self.undo.removed.push(id);
        let (first, children) = (node.child_base, node.children.clone());
        if !children.is_empty() {
            self.undo.freed.push(Freed::Nodes(level + 1, first, children.len() as u32));
        }
        children.into_iter().for_each(|child| self.discard(child, level + 1));
    }

    fn detach_from_root(
        &mut self,
        prefix: &RoutePrefix,
        writes: &mut Vec<LpmWrite>,
    ) -> Result<(), SegmentFull> {
        let slot = root_slot(prefix.key);
        let root = &self.roots[family_index(prefix.family)];
        let Some((_, place)) = root.children[slot] else { return Ok(()) };
        self.take_root_leaf(root.best[slot], writes)?;
        self.roots[family_index(prefix.family)].children[slot] = None;
        self.undo.freed.push(Freed::Nodes(1, place, 1));
        writes.push(self.root_write(prefix.family, slot));
        Ok(())
    }
}

impl RootTable {
    /// Returns the leaf of the longest prefix of up to eight bits.
    fn longest_short(&self, slot: usize) -> Leaf {
        let numbers =
            (0..=ROOT_BITS).rev().map(|length| 1 << length | slot >> (ROOT_BITS - length));
        let mut found = numbers.filter_map(|number| self.routes.get(&(number as u16)));
        found.next().copied().unwrap_or(Leaf::NONE)
    }
}
