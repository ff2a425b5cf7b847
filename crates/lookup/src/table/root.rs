//! The root of a large table: resolves the first bits of an address by two loads.
//!
//! The first [`UPPER_BITS`] bits select a group. A group with longer prefixes has a page,
//! with an entry for each value of the further bits up to [`AddressBits::ROOT_BITS`]. So the
//! root can be deep if the addresses in use have few different first bits, as in IPv6.

use std::marker::PhantomData;

use super::{PrefixTable, STRIDE, first_of};
use crate::AddressBits;
use crate::node::{NODE, NOTHING, SLOTS};

/// Bits of the upper level: two levels of nodes.
pub(super) const UPPER_BITS: u32 = 2 * STRIDE;
const GROUPS: usize = 1 << UPPER_BITS;

/// Group of the upper level, for one value of an address's first bits.
#[derive(Clone, Copy, Debug, Default)]
struct RootSlot {
    /// Stored value of the longest prefix of up to [`UPPER_BITS`] bits.
    best: u32,
    /// Index of the page's first entry; 0: the empty page of groups without one.
    page: u32,
}

/// The root. It replaces the top nodes for look-ups. Their entries
/// and their children's inherited values are kept as without it. Only
/// the nodes right below the root inherit more: from the whole page.
#[derive(Clone, Debug)]
pub(super) struct RootTable<A> {
    groups: Box<[RootSlot; GROUPS]>,
    /// Pages of [`RootTable::PAGE`] entries: nodes, or stored values of prefixes longer than
    /// [`UPPER_BITS`].
    entries: Vec<u32>,
    free: Vec<u32>,
    address: PhantomData<A>,
}

impl<A: AddressBits> RootTable<A> {
    const PAGE: usize = 1 << (A::ROOT_BITS - UPPER_BITS);

    /// Builds the root of a table.
    pub(super) fn new(table: &mut PrefixTable<A>) -> Self {
        let mut root = Self {
            groups: Box::new([RootSlot::default(); GROUPS]),
            // Reserve address space for all pages (IPv6: 64 MB), so that they do not move.
            entries: Vec::with_capacity((1 + GROUPS) * Self::PAGE),
            free: Vec::new(),
            address: PhantomData,
        };
        root.entries.resize(Self::PAGE, NOTHING);
        for head in 0..GROUPS {
            root.refresh_group(table, head, 0..Self::PAGE);
        }
        root
    }

    /// Returns the stored value if nothing longer matches, and the entry of an address.
    #[inline(always)]
    pub(super) fn get(&self, address: A) -> (u32, u32) {
        let head = address.head(A::ROOT_BITS);
        let group = &self.groups[head / Self::PAGE % GROUPS];
        (group.best, self.entries[group.page as usize + head % Self::PAGE])
    }

    /// Records the new name of a node, if it is right below the root.
    pub(super) fn moved(&mut self, address: A, depth: u32, node: u32) {
        let head = address.head(A::ROOT_BITS);
        let page = self.groups[head / Self::PAGE].page;
        if depth == A::ROOT_BITS && page != 0 {
            self.entries[page as usize + head % Self::PAGE] = NODE | node;
        }
    }

    /// Bytes of memory in use or free for reuse.
    pub(super) fn memory_bytes(&self) -> usize {
        size_of_val(&*self.groups)
            + self.entries.len() * size_of::<u32>()
            + self.free.capacity() * size_of::<u32>()
    }

    /// Updates everything that a prefix of up to [`AddressBits::ROOT_BITS`] bits covers.
    pub(super) fn refresh(&mut self, table: &mut PrefixTable<A>, address: A, length: u32) {
        let first = address.masked(length).head(A::ROOT_BITS);
        let (group, at) = (first / Self::PAGE, first % Self::PAGE);
        let width = 1 << (A::ROOT_BITS - length);
        if width < Self::PAGE {
            self.refresh_group(table, group, at..at + width);
        } else {
            for group in group..group + width / Self::PAGE {
                self.groups[group].best = table.group(group).0;
            }
        }
    }

    fn refresh_group(
        &mut self,
        table: &mut PrefixTable<A>,
        head: usize,
        range: std::ops::Range<usize>,
    ) {
        let (best, node) = table.group(head);
        let group = &mut self.groups[head];
        group.best = best;
        match node {
            Some(_) if group.page == 0 => {
                group.page = self.free.pop().unwrap_or_else(|| {
                    self.entries.resize(self.entries.len() + Self::PAGE, NOTHING);
                    (self.entries.len() - Self::PAGE) as u32
                });
            }
            None if group.page != 0 => {
                self.entries[group.page as usize..][..Self::PAGE].fill(NOTHING);
                self.free.push(std::mem::take(&mut group.page));
            }
            _ => {}
        }
        if let Some(node) = node {
            let page = &mut self.entries[group.page as usize..][..Self::PAGE];
            refresh_entries(
                table,
                node,
                UPPER_BITS,
                NOTHING,
                &mut page[range.clone()],
                range.start,
            );
        }
    }
}

/// Writes some entries of a node's page (or part of one), starting with number `from`.
fn refresh_entries<A: AddressBits>(
    table: &mut PrefixTable<A>,
    node: u32,
    depth: u32,
    best: u32,
    entries: &mut [u32],
    from: usize,
) {
    // Entries of one slot.
    let width = 1 << (A::ROOT_BITS - depth - STRIDE);
    let own = if width == 1 { table.own_best(node) } else { [NOTHING; SLOTS] };
    let mut done = 0;
    while done < entries.len() {
        let at = from + done;
        let count = (width - at % width).min(entries.len() - done);
        let part = &mut entries[done..done + count];
        let entry = table.nodes.entry(node, at / width % SLOTS);
        done += count;
        if entry & NODE == 0 {
            part.fill(first_of(entry, best));
            continue;
        }
        let child = entry & !NODE;
        if width == 1 {
            table.nodes.set_inherited(child, first_of(own[at % SLOTS], best));
            part[0] = entry;
        } else {
            let best = first_of(table.nodes.inherited(child), best);
            refresh_entries(table, child, depth + STRIDE, best, part, at % width);
        }
    }
}
