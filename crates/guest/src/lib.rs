//! Forwarding guests: the runtime that programs are written on, and the programs of PdP.
//!
//! A forwarding program implements [`ForwardingProgram`]. It gets batches of frames, each with the
//! vport that received it. It decides on each frame: send it out of a vport, punt it to the control
//! guest, drop it, or keep it. It may also send copies to other vports. [`ProgramRuntime`] does
//! everything else: the memif trunk to the mux, tags, completions in order, sleeping, and
//! reconnecting after the mux has died. docs/guests.md is the tutorial.
//!
//! [`router`] is the built-in IPv4 and IPv6 router (binary `pdp-router`); `pdp-label` is a program
//! for a protocol of its own.

#![forbid(unsafe_code)]

mod batch;
mod counters;
pub mod router;
mod runtime;

pub use batch::{Batch, KeptFrame, Outbox};
pub use counters::RuntimeCounters;
pub use pdp_wire::tag::{GuestDrop, PuntClass, VPORTS_MAX};
pub use runtime::{
    Error, ForwardingProgram, GuestOptions, NextPoll, ProgramRuntime, environment, run,
};
