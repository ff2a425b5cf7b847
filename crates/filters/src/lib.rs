//! Filters: among many patterns of value and mask, finds the one of the highest
//! priority that matches a key. Made for look-ups in batches while filters change.
//!
//! A key is an opaque string of `64 * W` bits (Turner et al., "Supercharging PlanetLab",
//! SIGCOMM 2007, section 4: 112 bits with as many of mask). [`Filters`] stores filters
//! in hash tables. Each table hashes the key's bits in the table's mask (Srinivasan,
//! Suri and Varghese, "Packet Classification Using Tuple Space Search", SIGCOMM 1999).
//!
//! A table takes every filter whose mask includes the table's mask, so that many masks
//! share few tables (Daly et al., "TupleMerge", IEEE/ACM Transactions on Networking
//! 2019). The first tables hash few bits. If too many filters collide there, later
//! ones get a table with more of their bits. Filters that fit no table wait in a small
//! ternary memory, from which new tables are chosen. docs/filters.md has measurements.
//!
//! The caller stores each filter's meaning by slot. Look-ups store nothing for later
//! ones, so traffic slows down other traffic only through the processor's caches.
//!
//! ```
//! use pdp_filters::{Filter, Filters, NONE};
//!
//! # fn random() -> u64 { 4 }
//! let mut filters = Filters::<1>::new(1000, 2048, random());
//! filters.set(7, Filter { value: [0x0a00], mask: [0xff00], priority: 1 })?;
//! filters.set(9, Filter { value: [0x0a05], mask: [0xffff], priority: 2 })?;
//! filters.commit();
//! while !filters.settle(100) {}
//! let mut found = [0; 3];
//! filters.find(&[[0x0a04], [0x0a05], [0x0b05]], &mut found);
//! assert_eq!(found, [7, 9, NONE]);
//! # Ok::<(), pdp_filters::FilterRefusal>(())
//! ```
//!
//! # Bounds
//!
//! Filters and keys may come from attackers. These bounds hold for all of
//! them. A *step* is a hash of a key, or a comparison of a key with a filter.
//!
//! | what | bound |
//! |---|---|
//! | filters | the capacity given to [`Filters::new`], which allocates all memory for them |
//! | steps of a look-up | the number given to [`Filters::new`], plus [`NURSERY_MAX`] for the ternary memory. Filters that would exceed it are [`FilterRefusal::Crowded`]. [`Filters::steps`] returns the current value |
//! | tables | half of these steps, and [`TABLES_MAX`] |
//! | filters of one table with the same hashed bits | [`CHAIN_MAX`] |
//! | [`Filters::set`] | at most two looks at each table's mask and into each table. If the ternary memory is full, also a look at each of its filters, of which 64 are moved; if none can be moved, at most 128 masks tried with 128 filters |
//! | [`Filters::commit`], [`Filters::abandon`] | constant |
//! | [`Filters::remove`]; [`Filters::settle`], for each filter | a look into one table, and a pass over the ternary memory; `settle` also reads a word per 4,096 slots |
//! | each of [`Filters::set`] and [`Filters::remove`] | once per quarter of the capacity, a sort of the tables |
//!
//! Masks have no limit of their own: they cost steps, which are limited. A quota of masks
//! would refuse thousands that fit a few tables, and allow a chain that is too long.
//!
//! Each table hashes keys with new random secrets. Knowing this code therefore does not help to
//! make keys or filters collide on purpose (Crosby and Wallach, "Denial of Service via
//! Algorithmic Complexity Attacks", USENIX Security 2003). The hash is NH of UMAC (RFC 4418,
//! section 5.2.2), whose sums of two different strings are equal with a probability of 2^-32.
//! The halves of a sum are folded, and a multiplication distributes the result over buckets.
//! Each accidental collision of filters costs a step. So does a wrong tag, which occurs once
//! in thirty look-ups of a bucket.
//!
//! # Changes together
//!
//! Changes are staged: none is visible before [`Filters::commit`], and all are from then
//! on. Then [`Filters::settle`] cleans up, a bounded number of filters at a time, while
//! look-ups continue. After that, more changes can be staged, and slots of removed filters
//! be used again. To replace a filter within one commit, use another slot for the new one.

#![forbid(unsafe_code)]

mod bits;
mod bucket;
mod cam;
mod filters;
mod table;

pub use bucket::NONE;
pub use cam::CAM_MAX as NURSERY_MAX;
pub use filters::{BATCH, Filter, FilterRefusal, Filters, SLOTS_MAX, STEPS_MAX, TABLES_MAX};
pub use table::CHAIN_MAX;
