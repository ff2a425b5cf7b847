//! Filters: which of many patterns of value and mask, the one of the highest priority, meets a key. Made for look-ups
//! in batches while filters come and go.
//!
//! A key is a string of `64 * W` bits that nobody here understands (Turner et al., "Supercharging PlanetLab",
//! SIGCOMM 2007, section 4: 112 bits with as many of mask). [`Filters`] keeps filters in hash tables, each of which
//! hashes those bits of the key that its mask has (Srinivasan, Suri and Varghese, "Packet Classification Using Tuple
//! Space Search", SIGCOMM 1999). A table takes every filter whose mask has all bits of its own, so that many masks
//! share few tables (Daly et al., "TupleMerge", IEEE/ACM Transactions on Networking 2019): the first tables hash few
//! bits, and where too many filters fall together there, those that come get a table with more of their bits. What no
//! table takes waits in a small ternary memory, which is also what new tables are chosen by. docs/filters.md says what
//! that reaches.
//!
//! What a filter means, its caller keeps by slot. Nothing is remembered from one look-up for another, so that no
//! traffic makes another's slower but by the caches of the processor.
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
//! # Ok::<(), pdp_filters::Refused>(())
//! ```
//!
//! # Bounds
//!
//! Whoever chooses filters and keys may be hostile, and nothing that is done here takes longer for it than these bounds
//! say. A *step* is a hash of a key, or a comparison of a key with a filter.
//!
//! | what | bound |
//! |---|---|
//! | filters | the capacity that [`Filters::new`] was given: memory for them is there from the start |
//! | steps of a look-up | the number that it was given, and [`NURSERY_MAX`] for the ternary memory: filters by which it would be more are [`Refused::Crowded`]. [`Filters::steps`] says what it is now |
//! | tables | half of these steps, and [`TABLES_MAX`] |
//! | filters of one table with the same bits of those that it hashes | [`CHAIN_MAX`] |
//! | [`Filters::set`] | looks at the mask of each table, and into each table, at most twice; where the ternary memory is full, a look at each of its filters, of which 64 are moved, and if none can be, at most 128 masks tried with 128 of them |
//! | [`Filters::commit`], [`Filters::abandon`] | constant |
//! | [`Filters::remove`]; [`Filters::settle`], for each filter | a look into one table, a pass over the ternary memory; to settle, also a look at a word for each 4,096 slots |
//! | each of the first two | once in a quarter of the capacity, the tables are sorted |
//!
//! Masks are not counted: what they cost are steps, and these are. A quota of masks would refuse thousands that a few
//! tables hold, and allow a chain that is too long.
//!
//! What a key is hashed with is secret and drawn anew for each table, so that who knows this code can't have keys or
//! filters fall together on purpose (Crosby and Wallach, "Denial of Service via Algorithmic Complexity Attacks", USENIX
//! Security 2003): NH of UMAC (RFC 4418, section 5.2.2), by which the sums of two different strings are equal with a
//! probability of 2^-32, and a multiplication that spreads sums over buckets. Filters that fall together by chance cost
//! a step each; so do wrong tags, of which a bucket has one in thirty look-ups.
//!
//! # Changes together
//!
//! Changes are staged, and none of them is seen before [`Filters::commit`], from which on all of them are. Then
//! [`Filters::settle`] tidies up, a bounded number of filters at a time; look-ups go on between. Only then more can be
//! staged, and the slots of what went be taken: who changes a filter in one commit needs another slot for the new one.

#![forbid(unsafe_code)]

mod bits;
mod bucket;
mod cam;
mod filters;
mod table;

pub use cam::CAM_MAX as NURSERY_MAX;
pub use filters::{BATCH, Filter, Filters, NONE, Refused, SLOTS_MAX, STEPS_MAX, TABLES_MAX};
pub use table::CHAIN_MAX;
