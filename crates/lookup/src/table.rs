//! The table: nodes, look-up, insertion and removal.

use std::hint::select_unpredictable;

use crate::Address;
use crate::pool::Pool;

/// Bits of an address that the array of a large table resolves at once.
pub const DIRECT_BITS: u32 = 18;

/// Prefixes at which a table gets its array.
pub const DIRECT_FROM: usize = 2048;

/// The largest value.
pub const VALUE_MAX: u32 = (1 << 31) - 2;

/// What [`Table::lookup_batch`] writes for an address that no prefix covers.
pub const NONE: u32 = u32::MAX;

/// Nodes and routes for which a large table reserves address space (40 MB; memory is used as it is
/// written), so that it does not move while it grows: twice the Internet's table of 2022.
const LARGE_NODES: usize = 1 << 18;
const LARGE_ROUTES: usize = 1 << 21;

/// Bits of one node.
pub(crate) const STRIDE: u32 = 6;
const SLOTS: usize = 64;

/// Addresses whose look-ups overlap.
const LANES: usize = 32;

/// Marks an entry of an array as the index of a node; without it, it is a stored value.
const NODE: u32 = 1 << 31;

/// A stored value is the value plus one; zero says that nothing matches here.
const NOTHING: u32 = 0;

/// For each value of the first bits a node or a stored value.
type Direct = [u32; 1 << DIRECT_BITS];

/// What look-ups read of a node. A cache line holds two.
#[derive(Clone, Copy, Debug, Default)]
#[repr(align(32))]
pub(crate) struct Node {
    /// Slots that have a child.
    pub(crate) children: u64,
    /// Slots at which another leaf begins. Slots with a child belong to no run.
    runs: u64,
    first_leaf: u32,
    pub(crate) first_child: u32,
    /// Stored value of the longest prefix of this node's slot in its parent (below an array: in
    /// all nodes above).
    inherited: u32,
    /// Where the prefixes that end in this node are.
    pub(crate) control: u32,
}

/// Where the look-up of a slot goes from a node.
struct Step {
    has_child: bool,
    /// Index of the child, if there is one.
    child: u32,
    /// Index of the leaf, or 0 if there is a child.
    leaf: u32,
}

impl Node {
    #[inline(always)]
    fn step(&self, slot: usize) -> Step {
        // Bits of the slots up to this one, at the upper end.
        let (children, runs) = (self.children << (63 - slot), self.runs << (63 - slot));
        let has_child = (children as i64) < 0;
        let child = self.first_child.wrapping_add(children.count_ones()).wrapping_sub(1);
        let leaf = self.first_leaf.wrapping_add(runs.count_ones()).wrapping_sub(1);
        Step { has_child, child, leaf: select_unpredictable(has_child, 0, leaf) }
    }

    pub(crate) fn has_child(&self, slot: usize) -> bool {
        self.children >> slot & 1 != 0
    }

    fn children_count(&self) -> usize {
        self.children.count_ones() as usize
    }

    /// Children at slots before this one.
    pub(crate) fn child_rank(&self, slot: usize) -> usize {
        (self.children & ((1 << slot) - 1)).count_ones() as usize
    }
}

/// The prefixes that end in one node. A prefix of `l` bits (1..=6) of the node with those bits
/// `b` has number `2^l + b`.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Control {
    pub(crate) present: u128,
    pub(crate) first_route: u32,
}

impl Control {
    fn routes_count(&self) -> usize {
        self.present.count_ones() as usize
    }

    pub(crate) fn rank(&self, number: usize) -> usize {
        (self.present & ((1 << number) - 1)).count_ones() as usize
    }

    fn has(&self, number: usize) -> bool {
        self.present >> number & 1 != 0
    }
}

/// A route as it was inserted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Route {
    pub(crate) value: u32,
    pub(crate) generation: u32,
}

/// Maps prefixes to values; see the [crate] about its structure and costs.
///
/// Prefixes are given as an address and a length in bits; bits beyond the length are ignored.
/// Each route carries the number of the generation that inserted it last, which
/// [`Table::sweep`] goes by.
#[derive(Clone, Debug)]
pub struct Table<A: Address> {
    /// Prefixes of up to six bits, by the same numbers as in [`Control`] (1: the default route).
    pub(crate) short: Box<[Option<Route>; 2 * SLOTS]>,
    /// Stored value of the longest short prefix for the first six bits.
    short_best: [u32; SLOTS],
    /// Nodes for bits 6.. by the first six bits, or [`NOTHING`].
    pub(crate) top: [u32; SLOTS],
    /// For the first [`DIRECT_BITS`] bits a node or stored value; none in small tables.
    direct: Option<Box<Direct>>,
    /// Index 0 is a node without routes and children for ever.
    pub(crate) nodes: Pool<Node>,
    /// Index 0 is [`NOTHING`] for ever.
    leaves: Pool<u32>,
    pub(crate) controls: Pool<Control>,
    pub(crate) routes: Pool<Route>,
    len: usize,
    direct_from: usize,
    address: std::marker::PhantomData<A>,
}

impl<A: Address> Default for Table<A> {
    fn default() -> Self {
        Self::new()
    }
}

impl<A: Address> Table<A> {
    /// An empty table.
    pub fn new() -> Self {
        Self::with_direct_from(DIRECT_FROM)
    }

    pub(crate) fn with_direct_from(direct_from: usize) -> Self {
        let mut leaves = Pool::new();
        let nothing = leaves.allocate(1);
        debug_assert_eq!((nothing, leaves.items[0]), (0, NOTHING));
        let mut nodes = Pool::new();
        let empty = nodes.allocate(1);
        nodes.items[empty as usize] = Node { runs: 1, first_leaf: nothing, ..Node::default() };
        Self {
            short: Box::new([None; 2 * SLOTS]),
            short_best: [NOTHING; SLOTS],
            top: [NOTHING; SLOTS],
            direct: None,
            nodes,
            leaves,
            controls: Pool::new(),
            routes: Pool::new(),
            len: 0,
            direct_from,
            address: std::marker::PhantomData,
        }
    }

    /// Count of routes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no route.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes of memory in use or free for reuse.
    pub fn memory_bytes(&self) -> usize {
        size_of::<Self>()
            + size_of_val(&*self.short)
            + self.direct.as_ref().map_or(0, |direct| size_of_val(&**direct))
            + self.nodes.memory_bytes()
            + self.leaves.memory_bytes()
            + self.controls.memory_bytes()
            + self.routes.memory_bytes()
    }

    /// The value of the longest prefix that covers `address`.
    pub fn lookup(&self, address: A) -> Option<u32> {
        let mut value = [NONE];
        self.lookup_batch(&[address], &mut value);
        (value[0] != NONE).then_some(value[0])
    }

    /// Writes to each of `values` the value of the longest prefix that covers the address at the
    /// same index, or [`NONE`]. Cache misses of different addresses overlap.
    ///
    /// # Panics
    /// If the slices differ in length.
    pub fn lookup_batch(&self, addresses: &[A], values: &mut [u32]) {
        assert_eq!(addresses.len(), values.len());
        for (addresses, values) in addresses.chunks(LANES).zip(values.chunks_mut(LANES)) {
            match &self.direct {
                Some(direct) => {
                    self.lookup_lanes(addresses, values, DIRECT_BITS, |head| direct[head]);
                }
                None => self.lookup_lanes(addresses, values, STRIDE, |head| self.top[head]),
            }
        }
    }

    /// All lanes go down one level, then all that have not ended the next; no branch depends on
    /// an address.
    #[inline(always)]
    fn lookup_lanes(
        &self,
        addresses: &[A],
        values: &mut [u32],
        bits: u32,
        entry: impl Fn(usize) -> u32,
    ) {
        let (nodes, leaves) = (&self.nodes.items[..], &self.leaves.items[..]);
        let mut best = [NOTHING; LANES];
        let mut leaf = [0u32; LANES];
        let mut node = [0u32; LANES];
        let mut pending = [0u8; LANES];
        let mut pending_count = 0;
        for (lane, address) in addresses.iter().enumerate().take(LANES) {
            best[lane] = entry(address.head(bits));
        }
        for (lane, address) in addresses.iter().enumerate().take(LANES) {
            let entry = best[lane];
            let is_node = entry & NODE != 0;
            // What ends here goes through the empty node, so that all lanes do the same.
            let at = &nodes[select_unpredictable(is_node, entry & !NODE, 0) as usize];
            let step = at.step(address.slot(bits));
            best[lane] = select_unpredictable(is_node, at.inherited, entry);
            leaf[lane] = step.leaf;
            node[lane] = step.child;
            pending[pending_count] = lane as u8;
            pending_count += usize::from(step.has_child);
        }
        let mut depth = bits + STRIDE;
        while pending_count > 0 {
            let mut still = 0;
            // A copy, so that no load waits for the stores below.
            let before = pending;
            for &lane in &before[..pending_count] {
                let lane = usize::from(lane) % LANES;
                let at = &nodes[node[lane] as usize];
                let step = at.step(addresses[lane].slot(depth));
                best[lane] = first_of(at.inherited, best[lane]);
                leaf[lane] = step.leaf;
                node[lane] = step.child;
                pending[still] = lane as u8;
                still += usize::from(step.has_child);
            }
            pending_count = still;
            depth += STRIDE;
        }
        let lanes = addresses.iter().zip(best.iter().zip(&leaf));
        for (value, (address, (&best, &leaf))) in values.iter_mut().zip(lanes) {
            let short = self.short_best[address.head(STRIDE)];
            let stored = first_of(leaves[leaf as usize], first_of(best, short));
            *value = stored.wrapping_sub(1);
        }
    }

    /// The value of exactly this prefix.
    ///
    /// # Panics
    /// If `length` is more than the address has.
    pub fn get(&self, address: A, length: u32) -> Option<u32> {
        self.route(address, length).map(|route| route.value)
    }

    fn route(&self, address: A, length: u32) -> Option<Route> {
        assert!(length <= A::BITS);
        if length <= STRIDE {
            return self.short[number(address, 0, length)];
        }
        let mut index = self.top[address.slot(0)];
        if index == NOTHING {
            return None;
        }
        index &= !NODE;
        for depth in (STRIDE..depth_of(length)).step_by(STRIDE as usize) {
            let (node, slot) = (&self.nodes.items[index as usize], address.slot(depth));
            if !node.has_child(slot) {
                return None;
            }
            index = node.first_child + node.child_rank(slot) as u32;
        }
        let control = &self.controls.items[self.nodes.items[index as usize].control as usize];
        let number = number(address, depth_of(length), length);
        control
            .has(number)
            .then(|| self.routes.items[control.first_route as usize + control.rank(number)])
    }

    /// Inserts or replaces a route; returns the value that it had.
    ///
    /// # Panics
    /// If `length` is more than the address has, or `value` more than [`VALUE_MAX`].
    pub fn insert(&mut self, address: A, length: u32, value: u32, generation: u32) -> Option<u32> {
        assert!(length <= A::BITS && value <= VALUE_MAX, "{address:?}/{length} to {value}");
        let route = Route { value, generation };
        if length <= STRIDE {
            let old = self.short[number(address, 0, length)].replace(route);
            self.refresh_short();
            return self.inserted(old);
        }
        let depth = depth_of(length);
        let (index, made_from) = self.make_path(address, depth);
        let number = number(address, depth, length);
        let control = &mut self.controls.items[self.nodes.items[index].control as usize];
        let rank = control.rank(number);
        let old = if control.has(number) {
            let place = &mut self.routes.items[control.first_route as usize + rank];
            Some(std::mem::replace(place, route))
        } else {
            let count = control.routes_count();
            control.first_route = self.routes.insert(control.first_route, count, rank, route);
            control.present |= 1 << number;
            None
        };
        if old.is_none_or(|old| old.value != value) {
            self.refresh_node(index);
            self.refresh_direct(address, length, made_from);
        }
        self.inserted(old)
    }

    fn inserted(&mut self, old: Option<Route>) -> Option<u32> {
        if old.is_none() {
            self.len += 1;
            if self.direct.is_none() && self.len >= self.direct_from {
                self.make_direct();
            }
        }
        old.map(|route| route.value)
    }

    /// Removes exactly this prefix; returns its value.
    ///
    /// # Panics
    /// If `length` is more than the address has.
    pub fn remove(&mut self, address: A, length: u32) -> Option<u32> {
        let old = self.route(address, length)?;
        self.len -= 1;
        if length <= STRIDE {
            self.short[number(address, 0, length)] = None;
            self.refresh_short();
            return Some(old.value);
        }
        let depth = depth_of(length);
        let mut path = [0u32; 128usize.div_ceil(STRIDE as usize)];
        self.follow(address, depth, &mut path);
        let index = path[(depth / STRIDE) as usize] as usize;
        let number = number(address, depth, length);
        let control = &mut self.controls.items[self.nodes.items[index].control as usize];
        let (count, rank) = (control.routes_count(), control.rank(number));
        control.first_route = self.routes.remove(control.first_route, count, rank);
        control.present &= !(1 << number);
        let emptied_from = self.remove_empty(address, depth, &path);
        self.refresh_direct(address, length, emptied_from);
        Some(old.value)
    }

    /// The nodes on the way to the one at `depth`, which exist, by their depth.
    fn follow(&self, address: A, depth: u32, path: &mut [u32]) {
        let mut index = self.top[address.slot(0)] & !NODE;
        for level in (STRIDE..=depth).step_by(STRIDE as usize) {
            path[(level / STRIDE) as usize] = index;
            let (node, slot) = (&self.nodes.items[index as usize], address.slot(level));
            index = node.first_child + node.child_rank(slot) as u32;
        }
    }

    /// Removes the empty nodes at the end of a path, and refreshes the last node that stays.
    /// Returns the depth of the first that is gone.
    fn remove_empty(&mut self, address: A, mut depth: u32, path: &[u32]) -> Option<u32> {
        let mut gone = None;
        loop {
            let index = path[(depth / STRIDE) as usize] as usize;
            let node = self.nodes.items[index];
            let control = self.controls.items[node.control as usize];
            if control.present != 0 || node.children != 0 {
                self.refresh_node(index);
                return gone;
            }
            self.leaves.release(node.first_leaf, node.runs.count_ones() as usize);
            self.controls.release(node.control, 1);
            gone = Some(depth);
            depth -= STRIDE;
            if depth == 0 {
                self.nodes.release(index as u32, 1);
                self.top[address.slot(0)] = NOTHING;
                return gone;
            }
            let parent = path[(depth / STRIDE) as usize] as usize;
            let Node { children, first_child, .. } = self.nodes.items[parent];
            let slot = address.slot(depth);
            let rank = self.nodes.items[parent].child_rank(slot);
            let moved = self.nodes.remove(first_child, children.count_ones() as usize, rank);
            let parent = &mut self.nodes.items[parent];
            parent.first_child = moved;
            parent.children &= !(1 << slot);
        }
    }

    /// Makes the nodes that are missing on the way to the one at `depth`. Returns that one, and
    /// the depth of the first that was made.
    fn make_path(&mut self, address: A, depth: u32) -> (usize, Option<u32>) {
        let mut made_from = None;
        let entry = self.top[address.slot(0)];
        let mut index = (entry & !NODE) as usize;
        if entry == NOTHING {
            made_from = Some(STRIDE);
            let node = self.new_node();
            index = self.nodes.allocate(1) as usize;
            self.nodes.items[index] = node;
            self.top[address.slot(0)] = NODE | index as u32;
        }
        for level in (STRIDE..depth).step_by(STRIDE as usize) {
            let (node, slot) = (self.nodes.items[index], address.slot(level));
            let rank = node.child_rank(slot);
            let mut first_child = node.first_child;
            if !node.has_child(slot) {
                made_from = made_from.or(Some(level + STRIDE));
                let child = self.new_node();
                first_child =
                    self.nodes.insert(node.first_child, node.children_count(), rank, child);
                let node = &mut self.nodes.items[index];
                node.first_child = first_child;
                node.children |= 1 << slot;
                self.refresh_node(index);
            }
            index = first_child as usize + rank;
        }
        (index, made_from)
    }

    fn new_node(&mut self) -> Node {
        let control = self.controls.allocate(1);
        self.controls.items[control as usize] = Control::default();
        let first_leaf = self.leaves.allocate(1);
        self.leaves.items[first_leaf as usize] = NOTHING;
        Node { runs: 1, first_leaf, control, ..Node::default() }
    }

    /// Stored value of the longest of a node's own prefixes, by slot.
    fn own_best(&self, node: &Node) -> [u32; SLOTS] {
        let control = &self.controls.items[node.control as usize];
        let routes = self.routes.block(control.first_route, control.routes_count());
        let mut best = [NOTHING; SLOTS];
        let mut present = control.present;
        // Numbers ascend with length, so what is more specific comes later.
        for route in routes {
            let number = present.trailing_zeros() as usize;
            present &= present - 1;
            best[slots_of(number)].fill(route.value + 1);
        }
        best
    }

    /// Writes a node's leaves and its children's inherited values anew, from its prefixes.
    fn refresh_node(&mut self, index: usize) {
        let node = self.nodes.items[index];
        let best = self.own_best(&node);
        let mut child = node.first_child as usize;
        let mut leaves = [NOTHING; SLOTS];
        let (mut leaves_count, mut runs) = (0, 0u64);
        for (slot, &stored) in best.iter().enumerate() {
            if node.has_child(slot) {
                self.nodes.items[child].inherited = stored;
                child += 1;
            } else if leaves_count == 0 || leaves[leaves_count - 1] != stored {
                leaves[leaves_count] = stored;
                leaves_count += 1;
                runs |= 1 << slot;
            }
        }
        let first_leaf = self.leaves.replace(
            node.first_leaf,
            node.runs.count_ones() as usize,
            &leaves[..leaves_count],
        );
        let node = &mut self.nodes.items[index];
        node.first_leaf = first_leaf;
        node.runs = runs;
    }

    fn refresh_short(&mut self) {
        let mut best = [NOTHING; SLOTS];
        for (number, route) in self.short.iter().enumerate().skip(1) {
            if let Some(route) = route {
                best[slots_of(number)].fill(route.value + 1);
            }
        }
        self.short_best = best;
    }

    /// Brings the array up to date after a change of a route, and of nodes from a depth on.
    fn refresh_direct(&mut self, address: A, length: u32, nodes_from: Option<u32>) {
        // Entries name nodes of depth 18, whose places change with their number; deeper nodes
        // and routes are theirs alone.
        let entries_change = length <= DIRECT_BITS || nodes_from.is_some_and(|d| d <= DIRECT_BITS);
        if !entries_change {
            return;
        }
        let Some(mut direct) = self.direct.take() else { return };
        let bits = length.min(DIRECT_BITS - STRIDE);
        let first = address.masked(bits).head(DIRECT_BITS - STRIDE);
        for group in first..first + (1 << (DIRECT_BITS - STRIDE - bits)) {
            self.refresh_group(&mut direct, group);
        }
        self.direct = Some(direct);
    }

    fn make_direct(&mut self) {
        self.nodes.reserve(LARGE_NODES);
        self.controls.reserve(LARGE_NODES);
        self.leaves.reserve(LARGE_ROUTES);
        self.routes.reserve(LARGE_ROUTES);
        let entries = vec![NOTHING; 1 << DIRECT_BITS].into_boxed_slice();
        let mut direct: Box<Direct> = entries.try_into().expect("the length is the array's");
        for group in 0..1 << (DIRECT_BITS - STRIDE) {
            self.refresh_group(&mut direct, group);
        }
        self.direct = Some(direct);
    }

    /// Writes the 64 entries of the array whose first twelve bits are `group`.
    fn refresh_group(&mut self, direct: &mut Direct, group: usize) {
        let (top_slot, slot) = (group / SLOTS, group % SLOTS);
        let entries = &mut direct[group * SLOTS..][..SLOTS];
        let top = self.top[top_slot];
        if top == NOTHING {
            entries.fill(NOTHING);
            return;
        }
        let upper = self.nodes.items[(top & !NODE) as usize];
        let step = upper.step(slot);
        if !step.has_child {
            entries.fill(self.leaves.items[step.leaf as usize]);
            return;
        }
        let node = self.nodes.items[step.child as usize];
        let own_best = self.own_best(&node);
        for (slot, (entry, own)) in entries.iter_mut().zip(own_best).enumerate() {
            *entry = if own != NOTHING { own } else { node.inherited };
            let step = node.step(slot);
            if step.has_child {
                self.nodes.items[step.child as usize].inherited = *entry;
                *entry = NODE | step.child;
            }
        }
    }
}

/// The first of two stored values that is one.
#[inline(always)]
fn first_of(first: u32, second: u32) -> u32 {
    select_unpredictable(first != NOTHING, first, second)
}

/// Depth of the node in which a prefix of this length (at least 1) ends.
pub(crate) fn depth_of(length: u32) -> u32 {
    (length.max(1) - 1) / STRIDE * STRIDE
}

/// The number of a prefix in the node at `depth`.
fn number<A: Address>(address: A, depth: u32, length: u32) -> usize {
    let bits = length - depth;
    1 << bits | address.slot(depth) >> (STRIDE - bits)
}

/// The slots that the prefix of this number covers.
fn slots_of(number: usize) -> std::ops::Range<usize> {
    let bits = number.ilog2();
    let width = SLOTS >> bits;
    let first = (number - (1 << bits)) * width;
    first..first + width
}
