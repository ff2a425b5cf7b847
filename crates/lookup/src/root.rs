//! The root of a large table: the first bits of an address, resolved by two loads.
//!
//! The first [`UPPER_BITS`] bits name a group; a group with longer prefixes has a page, an entry
//! for each value of the further bits up to [`Address::ROOT_BITS`]. So a family whose addresses
//! in use have few beginnings, as IPv6, can have a deep root.

use std::marker::PhantomData;

use crate::Address;
use crate::node::{NODE, NOTHING, SLOTS};
use crate::table::{STRIDE, Table, first_of};

/// Bits that the upper level resolves: two levels of nodes.
pub(crate) const UPPER_BITS: u32 = 2 * STRIDE;
const GROUPS: usize = 1 << UPPER_BITS;

/// What the first bits of an address lead to.
#[derive(Clone, Copy, Debug, Default)]
struct Group {
    /// Stored value of the longest prefix of up to [`UPPER_BITS`] bits.
    best: u32,
    /// Index of the page's first entry; 0 is an empty page for all that have none.
    page: u32,
}

/// The root. Where it stands for nodes, their entries and what their children inherit are kept
/// as they are without it; only the nodes right below it inherit more: from the whole page.
#[derive(Clone, Debug)]
pub(crate) struct Root<A> {
    groups: Box<[Group; GROUPS]>,
    /// Pages of [`Root::PAGE`] entries: nodes, or stored values of prefixes longer than
    /// [`UPPER_BITS`].
    entries: Vec<u32>,
    free: Vec<u32>,
    address: PhantomData<A>,
}

impl<A: Address> Root<A> {
    const PAGE: usize = 1 << (A::ROOT_BITS - UPPER_BITS);

    /// The root of a table.
    pub(crate) fn new(table: &mut Table<A>) -> Self {
        let mut root = Self {
            groups: Box::new([Group::default(); GROUPS]),
            // Address space for all pages (IPv6: 64 MB), so that they do not move.
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

    /// The stored value that holds where nothing longer does, and the entry of an address.
    #[inline(always)]
    pub(crate) fn get(&self, address: A) -> (u32, u32) {
        let head = address.head(A::ROOT_BITS);
        let group = &self.groups[head / Self::PAGE % GROUPS];
        (group.best, self.entries[group.page as usize + head % Self::PAGE])
    }

    /// A node has another name. That of one right below the root is written here.
    pub(crate) fn moved(&mut self, address: A, depth: u32, node: u32) {
        let head = address.head(A::ROOT_BITS);
        let page = self.groups[head / Self::PAGE].page;
        if depth == A::ROOT_BITS && page != 0 {
            self.entries[page as usize + head % Self::PAGE] = NODE | node;
        }
    }

    /// Bytes of memory in use or free for reuse.
    pub(crate) fn memory_bytes(&self) -> usize {
        size_of_val(&*self.groups)
            + self.entries.len() * size_of::<u32>()
            + self.free.capacity() * size_of::<u32>()
    }

    /// Brings what a prefix of up to [`Address::ROOT_BITS`] bits covers up to date.
    pub(crate) fn refresh(&mut self, table: &mut Table<A>, address: A, length: u32) {
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

    fn refresh_group(&mut self, table: &mut Table<A>, head: usize, range: std::ops::Range<usize>) {
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

/// Writes some entries of the page (or part of one) that stands for a node, the first of which
/// is number `from`.
fn refresh_entries<A: Address>(
    table: &mut Table<A>,
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
