//! The table: look-up, insertion and removal.

mod root;

use std::hint::{black_box, select_unpredictable};

use crate::AddressBits;
use crate::node::{NODE, NOTHING, SLOTS, TrieNodes};
use crate::pool::BlockPool;
use root::{RootTable, UPPER_BITS};

/// Prefixes at which a table gets its root.
pub const ROOT_FROM: usize = 256;

/// The largest value.
pub const VALUE_MAX: u32 = (1 << 31) - 2;

/// Result of [`PrefixTable::lookup_batch`] for an address without a matching prefix.
pub const NONE: u32 = u32::MAX;

/// Number of node units, nodes and routes for which a table with a root reserves
/// address space (56 MB; memory is used as it is written). This is twice the
/// Internet's table of 2022, so that tables don't move while they grow.
const LARGE_UNITS: usize = 1 << 20;
const LARGE_NODES: usize = 1 << 18;
const LARGE_ROUTES: usize = 1 << 21;

/// Bits of one node.
pub(crate) const STRIDE: u32 = 6;

/// Number of addresses whose look-ups overlap.
const LANES: usize = 64;

/// Nodes of the longest path.
const PATH: usize = 128usize.div_ceil(STRIDE as usize);

/// Nodes on the path of an address, by their depth in strides.
type NodePath = [u32; PATH];

/// Prefixes that end in one node. A prefix of `l` bits
/// (1..=6) of the node with value `b` has number `2^l + b`.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct NodePrefixes {
    pub(crate) present: u128,
    pub(crate) first_route: u32,
}

impl NodePrefixes {
    fn routes_count(&self) -> usize {
        self.present.count_ones() as usize
    }

    pub(crate) fn rank(&self, number: usize) -> usize {
        (self.present & ((1 << number) - 1)).count_ones() as usize
    }

    fn has(&self, number: usize) -> bool {
        self.present >> number & 1 != 0
    }

    /// Inserts a prefix; returns its previous route.
    fn put(
        &mut self,
        routes: &mut BlockPool<StoredRoute>,
        number: usize,
        route: StoredRoute,
    ) -> Option<StoredRoute> {
        let (count, rank) = (self.routes_count(), self.rank(number));
        if self.has(number) {
            let place = &mut routes.items[self.first_route as usize + rank];
            return Some(std::mem::replace(place, route));
        }
        self.first_route = routes.insert(self.first_route, count, rank, route);
        self.present |= 1 << number;
        None
    }

    /// Removes an existing prefix.
    fn take(&mut self, routes: &mut BlockPool<StoredRoute>, number: usize) {
        let (count, rank) = (self.routes_count(), self.rank(number));
        self.first_route = routes.remove(self.first_route, count, rank);
        self.present &= !(1 << number);
    }

    /// Returns the stored value of the longest prefix, by slot.
    fn best(&self, routes: &BlockPool<StoredRoute>) -> [u32; SLOTS] {
        let mut best = [NOTHING; SLOTS];
        let mut present = self.present;
        // Numbers ascend with length, so more specific prefixes come later.
        for route in routes.block(self.first_route, self.routes_count()) {
            let number = present.trailing_zeros() as usize;
            present &= present - 1;
            best[slots_of(number)].fill(route.value + 1);
        }
        best
    }
}

/// A route as it was inserted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct StoredRoute {
    pub(crate) value: u32,
    pub(crate) generation: u32,
}

/// Maps prefixes to values; see the [crate] for its structure and costs.
///
/// A prefix is an address and a length in bits; bits beyond the length are ignored. Each
/// route has the number of the generation that inserted it last, for [`PrefixTable::sweep`].
#[derive(Clone, Debug)]
pub struct PrefixTable<A: AddressBits> {
    /// Prefixes of up to six bits; the default route has number 1.
    pub(crate) short: NodePrefixes,
    /// Stored value of the longest short prefix for the first six bits.
    short_best: [u32; SLOTS],
    /// Nodes for bits 6.. by the first six bits, or [`NOTHING`].
    pub(crate) top: [u32; SLOTS],
    /// Resolves the first bits at once; `None` in small tables.
    root: Option<RootTable<A>>,
    pub(crate) nodes: TrieNodes<A>,
    pub(crate) controls: BlockPool<NodePrefixes>,
    pub(crate) routes: BlockPool<StoredRoute>,
    len: usize,
    root_from: usize,
}

impl<A: AddressBits> Default for PrefixTable<A> {
    fn default() -> Self {
        Self::new()
    }
}

impl<A: AddressBits> PrefixTable<A> {
    /// Makes an empty table.
    pub fn new() -> Self {
        Self::with_root_from(ROOT_FROM)
    }

    pub(crate) fn with_root_from(root_from: usize) -> Self {
        Self {
            short: NodePrefixes::default(),
            short_best: [NOTHING; SLOTS],
            top: [NOTHING; SLOTS],
            root: None,
            nodes: TrieNodes::default(),
            controls: BlockPool::new(),
            routes: BlockPool::new(),
            len: 0,
            root_from,
        }
    }

    /// Number of routes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True if there is no route.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes of memory in use or free for reuse.
    pub fn memory_bytes(&self) -> usize {
        size_of::<Self>()
            + self.root.as_ref().map_or(0, RootTable::memory_bytes)
            + self.nodes.memory_bytes()
            + self.controls.memory_bytes()
            + self.routes.memory_bytes()
    }

    /// Returns the value of the longest prefix that matches `address`.
    pub fn lookup(&self, address: A) -> Option<u32> {
        let mut value = [NONE];
        self.lookup_batch(&[address], &mut value);
        (value[0] != NONE).then_some(value[0])
    }

    /// Writes to each of `values` the value of the longest prefix that matches the address
    /// at the same index, or [`NONE`]. Cache misses of different addresses overlap.
    ///
    /// # Panics
    /// If the slices differ in length.
    pub fn lookup_batch(&self, addresses: &[A], values: &mut [u32]) {
        assert_eq!(addresses.len(), values.len());
        for (addresses, values) in addresses.chunks(LANES).zip(values.chunks_mut(LANES)) {
            match &self.root {
                Some(root) => {
                    self.lookup_lanes(addresses, values, A::ROOT_BITS, |address| root.get(address));
                }
                None => self.lookup_lanes(addresses, values, STRIDE, |address| {
                    let head = address.head(STRIDE);
                    (self.short_best[head], self.top[head])
                }),
            }
        }
    }

    /// Moves all lanes down one level, then all pending ones down the next. No branch depends on an
    /// address. `begin` returns the stored value if nothing longer matches, and the first entry.
    #[inline(always)]
    fn lookup_lanes(
        &self,
        addresses: &[A],
        values: &mut [u32],
        bits: u32,
        begin: impl Fn(A) -> (u32, u32),
    ) {
        let nodes = self.nodes.view();
        let mut best = [NOTHING; LANES];
        let mut entry = [NOTHING; LANES];
        let mut pending = [0u8; LANES];
        let mut pending_count = 0;
        for (lane, &address) in addresses.iter().enumerate().take(LANES) {
            (best[lane], entry[lane]) = begin(address);
            pending[pending_count % LANES] = lane as u8;
            pending_count += usize::from(entry[lane] & NODE != 0);
        }
        // A short loop has more cache misses in flight at a time than the one below.
        let touch = |&lane: &u8| nodes.inherited(entry[usize::from(lane) % LANES] & !NODE);
        black_box(pending[..pending_count].iter().map(touch).fold(0, |all, one| all | one));
        let mut depth = bits;
        while pending_count > 0 {
            let mut still = 0;
            // A copy, so that no load waits for the stores below.
            let before = pending;
            for &lane in &before[..pending_count] {
                let lane = usize::from(lane) % LANES;
                let node = entry[lane] & !NODE;
                best[lane] = first_of(nodes.inherited(node), best[lane]);
                entry[lane] = nodes.entry(node, addresses[lane].slot(depth));
                pending[still % LANES] = lane as u8;
                still += usize::from(entry[lane] & NODE != 0);
            }
            pending_count = still;
            depth += STRIDE;
        }
        for (value, (&best, &entry)) in values.iter_mut().zip(best.iter().zip(&entry)) {
            *value = first_of(entry, best).wrapping_sub(1);
        }
    }

    /// Returns the value of exactly this prefix.
    ///
    /// # Panics
    /// If `length` exceeds the address's bits.
    pub fn get(&self, address: A, length: u32) -> Option<u32> {
        self.route(address, length).map(|route| route.value)
    }

    fn route(&self, address: A, length: u32) -> Option<StoredRoute> {
        assert!(length <= A::BITS);
        let depth = depth_of(length);
        let control = if length <= STRIDE {
            &self.short
        } else {
            let node = self.follow(address, depth, &mut [0; PATH])?;
            &self.controls.items[self.nodes.control(node) as usize]
        };
        let number = number(address, depth, length);
        control
            .has(number)
            .then(|| self.routes.items[control.first_route as usize + control.rank(number)])
    }

    /// Writes the nodes on the path to the one at `depth`, and returns that one.
    fn follow(&self, address: A, depth: u32, path: &mut NodePath) -> Option<u32> {
        let mut entry = self.top[address.slot(0)];
        for level in (STRIDE..=depth).step_by(STRIDE as usize) {
            let node = (entry & NODE != 0).then_some(entry & !NODE)?;
            path[at(level)] = node;
            if level < depth {
                entry = self.nodes.entry(node, address.slot(level));
            }
        }
        Some(path[at(depth)])
    }

    /// Inserts or replaces a route; returns its previous value.
    ///
    /// # Panics
    /// If `length` exceeds the address's bits, or `value` exceeds [`VALUE_MAX`].
    pub fn insert(&mut self, address: A, length: u32, value: u32, generation: u32) -> Option<u32> {
        assert!(length <= A::BITS && value <= VALUE_MAX, "{address:?}/{length} to {value}");
        let route = StoredRoute { value, generation };
        let depth = depth_of(length);
        let number = number(address, depth, length);
        if length <= STRIDE {
            let old = self.short.put(&mut self.routes, number, route);
            self.refresh_short(address, length);
            return self.inserted(old);
        }
        let mut path = [0; PATH];
        let made_from = self.make_path(address, depth, &mut path);
        let control = self.nodes.control(path[at(depth)]) as usize;
        let old = self.controls.items[control].put(&mut self.routes, number, route);
        if old.is_none_or(|old| old.value != value) {
            self.refresh_node(address, depth, &mut path, None);
            self.refresh_root(address, length, made_from);
        }
        self.inserted(old)
    }

    fn inserted(&mut self, old: Option<StoredRoute>) -> Option<u32> {
        if old.is_none() {
            self.len += 1;
            if self.root.is_none() && self.len >= self.root_from {
                self.make_root();
            }
        }
        old.map(|route| route.value)
    }

    /// Removes exactly this prefix; returns its value.
    ///
    /// # Panics
    /// If `length` exceeds the address's bits.
    pub fn remove(&mut self, address: A, length: u32) -> Option<u32> {
        let old = self.route(address, length)?;
        self.len -= 1;
        let depth = depth_of(length);
        let number = number(address, depth, length);
        if length <= STRIDE {
            self.short.take(&mut self.routes, number);
            self.refresh_short(address, length);
            return Some(old.value);
        }
        let mut path = [0; PATH];
        let node = self.follow(address, depth, &mut path)?;
        let control = self.nodes.control(node) as usize;
        self.controls.items[control].take(&mut self.routes, number);
        let gone_from = self.remove_empty(address, depth, &mut path);
        self.refresh_root(address, length, gone_from);
        Some(old.value)
    }

    /// Makes the missing nodes on the path to the one at `depth`,
    /// and writes the path. Returns the depth of the first new node.
    fn make_path(&mut self, address: A, depth: u32, path: &mut NodePath) -> Option<u32> {
        let mut made_from = None;
        for level in (STRIDE..=depth).step_by(STRIDE as usize) {
            let parent = level - STRIDE;
            let entry = match parent {
                0 => self.top[address.slot(0)],
                _ => self.nodes.entry(path[at(parent)], address.slot(parent)),
            };
            if entry & NODE != 0 {
                path[at(level)] = entry & !NODE;
                continue;
            }
            made_from = made_from.or(Some(level));
            let control = self.controls.allocate(1);
            self.controls.items[control as usize] = NodePrefixes::default();
            let node = self.nodes.make(control);
            path[at(level)] = node;
            match parent {
                0 => self.top[address.slot(0)] = NODE | node,
                _ => self.refresh_node(address, parent, path, Some(NODE | node)),
            }
        }
        made_from
    }

    /// Removes the empty nodes at the end of a path, and refreshes the
    /// last node that stays. Returns the depth of the first removed node.
    fn remove_empty(&mut self, address: A, depth: u32, path: &mut NodePath) -> Option<u32> {
        let mut gone_from = None;
        for level in (STRIDE..=depth).rev().step_by(STRIDE as usize) {
            let node = path[at(level)];
            // The entry of a removed child is [`NOTHING`].
            let without = gone_from.map(|_| NOTHING);
            let control = self.nodes.control(node);
            let empty = self.controls.items[control as usize].present == 0
                && self
                    .nodes
                    .children(node, 0)
                    .all(|(slot, _)| without.is_some() && slot == address.slot(level));
            if !empty {
                self.refresh_node(address, level, path, without);
                return gone_from;
            }
            self.nodes.release(node);
            self.controls.release(control, 1);
            gone_from = Some(level);
        }
        self.top[address.slot(0)] = NOTHING;
        gone_from
    }

    /// Returns the stored value of the longest of a node's own prefixes, by slot.
    pub(crate) fn own_best(&self, node: u32) -> [u32; SLOTS] {
        self.controls.items[self.nodes.control(node) as usize].best(&self.routes)
    }

    /// Rewrites the node at `depth` of a path from its prefixes, with its children's
    /// inherited values and an optional new entry on the path. The node may move.
    fn refresh_node(&mut self, address: A, depth: u32, path: &mut NodePath, next: Option<u32>) {
        let node = path[at(depth)];
        let mut entries = self.nodes.entries(node);
        if let Some(next) = next {
            entries[address.slot(depth)] = next;
        }
        // A node that the root replaces also passes on its own inherited value.
        let hands_on = self.root.is_some() && depth > UPPER_BITS && depth < A::ROOT_BITS;
        let from_above = if hands_on { self.nodes.inherited(node) } else { NOTHING };
        for (entry, own) in entries.iter_mut().zip(self.own_best(node)) {
            if *entry & NODE == 0 {
                *entry = own;
            } else {
                self.nodes.set_inherited(*entry & !NODE, first_of(own, from_above));
            }
        }
        let moved = self.nodes.rewrite(node, &entries);
        if moved == node {
            return;
        }
        path[at(depth)] = moved;
        match depth - STRIDE {
            0 => self.top[address.slot(0)] = NODE | moved,
            parent => self.nodes.set_child(path[at(parent)], address.slot(parent), moved),
        }
        if let Some(root) = &mut self.root {
            root.moved(address, depth, moved);
        }
    }

    fn refresh_short(&mut self, address: A, length: u32) {
        self.short_best = self.short.best(&self.routes);
        self.refresh_root(address, length, None);
    }

    /// Updates the root after a change of a route, and of nodes from a depth on.
    fn refresh_root(&mut self, address: A, length: u32, nodes_from: Option<u32>) {
        let concerned = |bits: u32| bits <= A::ROOT_BITS;
        if (concerned(length) || nodes_from.is_some_and(concerned))
            && let Some(mut root) = self.root.take()
        {
            root.refresh(self, address, length.min(A::ROOT_BITS));
            self.root = Some(root);
        }
    }

    fn make_root(&mut self) {
        self.nodes.reserve(LARGE_UNITS);
        self.controls.reserve(LARGE_NODES);
        self.routes.reserve(LARGE_ROUTES);
        let root = RootTable::new(self);
        self.root = Some(root);
    }

    /// Returns the upper level's group for the first twelve bits:
    /// the longest prefix of up to twelve bits, and the node below.
    pub(crate) fn group(&self, head: usize) -> (u32, Option<u32>) {
        let (slot, next) = (head / SLOTS, head % SLOTS);
        let short = self.short_best[slot];
        if self.top[slot] == NOTHING {
            return (short, None);
        }
        let entry = self.nodes.entry(self.top[slot] & !NODE, next);
        if entry & NODE == 0 {
            (first_of(entry, short), None)
        } else {
            (first_of(self.nodes.inherited(entry & !NODE), short), Some(entry & !NODE))
        }
    }
}

/// Returns the first of two stored values that is not [`NOTHING`].
#[inline(always)]
pub(crate) fn first_of(first: u32, second: u32) -> u32 {
    select_unpredictable(first != NOTHING, first, second)
}

/// Depth of the node in which a prefix of this length (at least 1) ends.
pub(crate) fn depth_of(length: u32) -> u32 {
    (length.max(1) - 1) / STRIDE * STRIDE
}

/// Returns the index in a path.
fn at(depth: u32) -> usize {
    (depth / STRIDE) as usize
}

/// Returns the number of a prefix in the node at `depth`.
fn number<A: AddressBits>(address: A, depth: u32, length: u32) -> usize {
    let bits = length - depth;
    1 << bits | address.slot(depth) >> (STRIDE - bits)
}

/// Returns the slots that the prefix with this number covers.
fn slots_of(number: usize) -> std::ops::Range<usize> {
    let bits = number.ilog2();
    let width = SLOTS >> bits;
    let first = (number - (1 << bits)) * width;
    first..first + width
}
