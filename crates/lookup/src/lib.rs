//! Longest-prefix match for forwarding: [`Table`] maps prefixes of IPv4 (`u32`) and IPv6 (`u128`)
//! addresses to values, made for look-ups in batches while routes come and go.
//!
//! The structure is a poptrie (Asai and Ohara, "Poptrie: A Compressed Trie with Population Count
//! for Fast and Scalable Software IP Routing Table Lookup", SIGCOMM 2015): nodes of six bits of
//! address, in which runs of equal entries are stored once and found by counting bits. It differs
//! in these ways:
//!
//! - A node's entries lie behind its bits, so that one cache miss reads both.
//! - A value is not pushed down to all leaves below. Each node carries the value that it inherits
//!   from its parent, so a change touches one node and its direct children.
//! - The first [`Address::ROOT_BITS`] bits of a large table are resolved by two loads, of twelve
//!   bits and of the rest. Prefixes of up to twelve bits are consulted where nothing longer
//!   matched.
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
//! Beside that a node is made or removed for each six bits of the path. Once in the life of a
//! table, at [`ROOT_FROM`] prefixes, the root is made (4,096 groups, and a page for each group with
//! longer prefixes: 256 bytes for IPv4, 16 KiB for IPv6). Vectors grow by moving; a table with a
//! root reserves address space for some two million prefixes, so that this is not a pause.
//!
//! Memory that removed routes held is used again by the table; it is given back when the table
//! is dropped.
//!
//! Limits: values up to [`VALUE_MAX`]. No table is shared between threads while it changes: the
//! owner looks up and changes in turn.

#![forbid(unsafe_code)]

mod address;
mod node;
mod pool;
mod root;
mod table;
mod walk;

pub use address::Address;
pub use table::{NONE, ROOT_FROM, Table, VALUE_MAX};
pub use walk::Cursor;

/// A table of IPv4 prefixes.
pub type TableV4 = Table<u32>;

/// A table of IPv6 prefixes.
pub type TableV6 = Table<u128>;

#[cfg(test)]
mod tests;
