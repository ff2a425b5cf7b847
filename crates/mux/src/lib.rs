//! The mux: PdP's data plane.
//!
//! A packet's way, in the order of the files: [`worker`] (the round, with all stages in one place), [`external`]
//! and [`exit`] (AF_XDP, memif, [`generator`]; [`scheduler`], [`fair`], [`class`]: whose frame is next where there is a
//! capacity), [`sort`] ([`classify`]), [`turns`] (whose time it is), [`admit`] ([`police`]),
//! [`onward`] (along vlinks that are more than a wire; [`segment`]), [`forward`] (where the mux forwards by itself; [`engine`]), [`share`] ([`distribute`], [`group`]), [`lane`] ([`memif`], [`peer`]; [`sleep`]: who is awake), [`order`], [`dispatch`]
//! (what guests and TAPs send), [`leave`] ([`shape`], [`queues`], [`line`], [`encapsulate`]). Beside it: [`control`] (what pdpd wants, and
//! memif connections), [`capture`], [`trace`], [`meter`] (cycles).
//!
//! Promises: every frame that came in or was made is sent, handed to a TAP, consumed by a guest,
//! or counted under one reason at one port. Nothing that a peer writes is trusted: it is copied,
//! then checked. No stage allocates, locks or makes a system call for a single packet.

#![forbid(unsafe_code)]

pub mod actions;
pub mod admit;
pub mod capture;
pub mod class;
pub mod classify;
pub mod connections;
pub mod control;
pub mod core;
pub mod counters;
pub mod dispatch;
pub mod distribute;
pub mod encapsulate;
pub mod engine;
pub mod exit;
pub mod external;
pub mod fair;
pub mod fields;
pub mod forward;
pub mod generator;
pub mod group;
pub mod lane;
pub mod leave;
pub mod line;
pub mod memif;
pub mod meter;
pub mod onward;
pub mod order;
pub mod packets;
pub mod peer;
pub mod police;
pub mod queues;
pub mod ringers;
pub mod scheduler;
pub mod segment;
pub mod shape;
pub mod share;
pub mod sleep;
pub mod slowpath;
pub mod sort;
pub mod timers;
pub mod trace;
pub mod turns;
pub mod vnet;
pub mod wake;
pub mod worker;
