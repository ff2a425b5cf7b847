//! Longest-prefix match for forwarding. [`PrefixTable`] maps prefixes of IPv4 (`u32`) and IPv6
//! (`u128`) addresses to values. It is made for look-ups in batches while routes change.
//!
//! The structure is a poptrie (Asai and Ohara, "Poptrie: A Compressed Trie with Population Count
//! for Fast and Scalable Software IP Routing Table Lookup", SIGCOMM 2015). Nodes cover six bits of
//! an address. They store runs of equal entries once and find them by counting bits. Differences:
//!
//! - A node's entries follow its bits in memory, so one cache miss reads both.
//! - A value is not pushed down to all leaves below. Each node stores the value
//!   inherited from its parent, so a change affects one node and its direct children.
//! - The first [`AddressBits::ROOT_BITS`] bits of a large table take two loads: for twelve bits,
//!   and for the rest. Prefixes of up to twelve bits are consulted if nothing longer matched.
//! - Small tables have no such root; it is made when the table grows.
//!
//! # Cost of an update
//!
//! | prefix length | work |
//! |---|---|
//! | 0 to 12 | `2^(12 - length)` groups of the root |
//! | 13 to `ROOT_BITS` | `2^(ROOT_BITS - length)` entries of the root, 2,048 at most, each with one node |
//! | each | one node of six bits, and its children's inherited values, 64 at most |
//!
//! In addition, a node is made or removed for each six bits of the path. A table makes its root
//! once, at [`ROOT_FROM`] prefixes. The root has 4,096 groups, and a page for each group with
//! longer prefixes: 256 bytes for IPv4, 16 KiB for IPv6. Vectors grow by moving. A table with a
//! root reserves address space for some two million prefixes, so that growing causes no pause.
//!
//! The table reuses the memory of removed routes, and frees it when it is dropped.
//!
//! Limits: values up to [`VALUE_MAX`]. Threads never share a table
//! while it changes: the owner alternates look-ups and changes.

#![forbid(unsafe_code)]

mod address;
mod node;
mod pool;
mod table;
mod walk;

pub use address::AddressBits;
pub use table::{NONE, PrefixTable, ROOT_FROM, VALUE_MAX};
pub use walk::WalkCursor;

/// A table of IPv4 prefixes.
pub type TableV4 = PrefixTable<u32>;

/// A table of IPv6 prefixes.
pub type TableV6 = PrefixTable<u128>;

#[cfg(test)]
mod tests;
