//! The card: a virtualized router in SystemVerilog (`hw/rtl`), simulated by Verilator.
//!
//! - [`LpmModel`] is the route look-up `card_lpm`, one clock cycle at a time.
//! - [`LpmTrie`] makes a VE's tables for it: it turns each change of a route into writes that take
//!   effect while look-ups pass.
//! - [`HeaderModel`] is the header pipeline `card_header` with all its tables.
//! - [`CardModel`] is the whole card: frames at its ports, and its registers.
//! - [`BusScheduler`] distributes the register bus among VEs.
//! - [`VeDriver`] writes a VE's tables from the route mirror's messages, [`VmacTable`] the table of
//!   all VEs' MAC addresses.
//! - [`service`] is the process `pdp-card`: a card that forwards for routers.
//!
//! build.rs verilates the models if it finds Verilator 5.048. Otherwise the crate builds without
//! them: [`LpmModel::new`] returns `None` and the hardware's tests print that they were skipped.

#![deny(unsafe_code)]

mod blocks;
pub mod bus;
pub mod card;
pub mod driver;
mod entry;
#[cfg(card_models)]
#[allow(unsafe_code)]
mod ffi;
pub mod header;
pub mod lines;
mod model;
pub mod registers;
pub mod service;
pub mod setup;
pub mod sizes;
pub mod table;
pub mod trie;
pub mod vmac;

pub use blocks::BlockAllocator;
pub use bus::{BusScheduler, RegisterWrite};
pub use card::{CardCore, CardLines, FrameMeta};
pub use driver::{DriverError, VeDriver};
pub use entry::{
    Leaf, LeafKind, LpmSegment, LpmTable, LpmWord, LpmWrite, NodeEntry, RootEntry, RouteFamily,
};
pub use header::{CardVerdict, HeaderIn, HeaderModel, HeaderOut};
pub use lines::{CardInput, CardModel, CardOutput, FrameLines};
pub use model::{LpmLookup, LpmModel, LpmResult};
pub use sizes::{CardSizes, LpmVariant};
pub use table::{TableWord, TableWrite};
pub use trie::{LpmTrie, RoutePrefix, SegmentFull};
pub use vmac::{VmacError, VmacTable};
