//! Forwarding guests: the runtime that programs are written on, and the programs of PdP.
//!
//! A forwarding program implements [`Program`]: it is given batches of frames, each with the vport
//! that it came in by, and decides on each: out of a vport, to the control guest, dropped, kept;
//! and further copies to other vports. [`Runtime`] does everything else: the memif trunk to the
//! mux, tags, completions in order, sleeping, coming back after the mux has died. docs/guests.md is
//! the tutorial.
//!
//! [`router`] is the built-in IPv4 and IPv6 router (binary `pdp-router`); `pdp-label` is a program
//! for a protocol of its own.

#![forbid(unsafe_code)]

mod batch;
pub mod router;
mod runtime;

pub use batch::{Batch, Kept, Outbox};
pub use pdp_wire::tag::{GuestDrop, PuntClass, VPORTS_MAX};
pub use runtime::{Counters, Error, Guest, Program, Runtime, Tended, environment, run};
