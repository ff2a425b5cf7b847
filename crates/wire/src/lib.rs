//! Frame formats: what PdP reads and writes on the wire and in trunks.
//!
//! Pure logic: no I/O, no `unsafe`, no clock. A parser never panics, whatever the bytes; it
//! returns `None` or an error and the caller turns that into a counted drop.

#![forbid(unsafe_code)]

pub mod checksum;
pub mod ecn;
pub mod ether;
pub mod flow;
pub mod ipv4;
pub mod ipv6;
pub mod offload;
pub mod outer;
pub mod tag;
pub mod udp;
pub mod vxlan;
