//! Longest-prefix match for forwarding: [`Table`] maps prefixes of IPv4 (`u32`) and IPv6 (`u128`)
//! addresses to values, made for look-ups in batches while routes come and go.
//!
//! The structure is a poptrie (Asai and Ohara, "Poptrie: A Compressed Trie with Population Count
//! for Fast and Scalable Software IP Routing Table Lookup", SIGCOMM 2015): nodes of six bits of
//! address, children and runs of equal leaves packed and found by counting bits, the first
//! [`DIRECT_BITS`] bits resolved by one array. It differs in three ways that make updates cheap:
//!
//! - A value is not pushed down to all leaves below. Each node carries the value that it inherits
//!   from its parent, so a change touches one node and its direct children.
//! - Prefixes of up to six bits stand in an array of their own, consulted where nothing longer
//!   matched. A default route is changed by 64 writes.
//! - Small tables have no array for the first bits; it is made when the table grows.
//!
//! # Cost of an update
//!
//! | prefix length | work |
//! |---|---|
//! | 0 to 6 | 64 writes |
//! | 7 to 12, with the array | `2^(18 - length)` entries, 2,048 at most, each with one node |
//! | other | one node of six bits and its children's inherited values, 64 at most |
//!
//! Beside that a node is made or removed for each six bits of the path, and once in the life of a
//! table, at [`DIRECT_FROM`] prefixes, the array is made (2^18 entries). Vectors grow by moving; a
//! large table reserves room for some two million prefixes, so that this is not a pause.
//!
//! Memory that removed routes held is used again by the table; it is given back when the table
//! is dropped.
//!
//! Limits: values up to [`VALUE_MAX`]. No table is shared between threads while it changes: the
//! owner looks up and changes in turn.

#![forbid(unsafe_code)]

mod address;
mod pool;
mod table;
mod walk;

pub use address::Address;
pub use table::{DIRECT_BITS, DIRECT_FROM, NONE, Table, VALUE_MAX};
pub use walk::Cursor;

/// A table of IPv4 prefixes.
pub type TableV4 = Table<u32>;

/// A table of IPv6 prefixes.
pub type TableV6 = Table<u128>;

#[cfg(test)]
mod tests;
