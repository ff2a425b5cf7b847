//! The card: a virtualized router in SystemVerilog (`hw/rtl`), simulated by Verilator.
//!
//! - [`LpmModel`] is the route look-up `card_lpm`, one clock cycle at a time.
//! - [`LpmTrie`] makes a VE's tables for it: it turns each change of a route into writes that take
//!   effect while look-ups pass.
//!
//! build.rs verilates the models if it finds Verilator 5.048. Otherwise the crate builds without
//! them: [`LpmModel::new`] returns `None` and the hardware's tests print that they were skipped.

#![deny(unsafe_code)]

mod blocks;
mod entry;
#[cfg(card_models)]
#[allow(unsafe_code)]
mod ffi;
mod model;
pub mod trie;

pub use blocks::BlockAllocator;
pub use entry::{
    Leaf, LeafKind, LpmSegment, LpmTable, LpmWord, LpmWrite, NodeEntry, RootEntry, RouteFamily,
};
pub use model::{LpmLookup, LpmModel, LpmResult, LpmVariant, MODELS};
pub use trie::{LpmTrie, RoutePrefix, SegmentFull};
