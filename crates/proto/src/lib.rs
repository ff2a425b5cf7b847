//! Messages between PdP's processes on one machine, and their framing.
//!
//! | channel | who listens | who connects | module |
//! |---|---|---|---|
//! | mux control | mux | pdpd | [`mux`] |
//! | TAP control | TAP helper | pdpd | [`tap`] |
//! | card control | card | pdpd | [`card`] |
//! | mirror control | route mirror | pdpd | [`mirror`] |
//! | management control (nothing is said) | management helper | pdpd | [`management`] |
//! | routes | route mirror | forwarding guests, mux | [`routes`] |
//! | slow path | mux | programs in control guests, pdpd | [`slowpath`] |
//!
//! Every channel is a Unix socket at a path that can be opened again, so that either
//! side may be replaced. The slow path's socket preserves packet boundaries. All others
//! are streams, whose frames are in [`channel`].

#![forbid(unsafe_code)]

pub mod card;
pub mod channel;
pub mod limits;
pub mod listener;
pub mod management;
pub mod mirror;
pub mod mux;
pub mod routes;
pub mod slowpath;
pub mod tap;
pub mod trace;
