//! Forwarding of IPv4 and IPv6 for a vrouter by its control guest's routes. The
//! built-in router's guests ([`pdp-router`](../pdp_guest/router/index.html))
//! use it, and so does the mux for a fast path with `code: ip`.
//!
//! This crate does the common case: unicast packets whose route leads out of a vport to
//! a neighbour with a known MAC address. Everything else is punted to the control
//! guest's kernel: local delivery, routing protocols, ARP and neighbour discovery, ICMP
//! errors, options, fragmentation. See [`IpForwarder`] for the rules and their sources.
//!
//! The route mirror provides routes and neighbours for the tables ([`Fib`]). Between two batches, a
//! [`MirrorFollower`] applies a bounded piece of the messages from a [`MirrorChannel`] to the
//! mirror, and reports to the mirror. After the mirror is lost, forwarding continues with the
//! current tables.

#![forbid(unsafe_code)]

mod connection;
#[cfg(test)]
mod connection_tests;
mod fib;
mod follower;
mod forward;
mod group;
mod list;
mod neighbour;
#[cfg(test)]
mod tests;

pub use connection::{MirrorSocket, MirrorStatus, RouteClient};
pub use fib::{DumpCursor, Fib};
pub use follower::{
    FollowerDeadline, MirrorChannel, MirrorFollower, MirrorInput, RouteReport, RouteTables,
};
pub use forward::{Decision, FRAMES_MAX, FrameBatch, IpForwarder, Routed};
pub use group::buckets;
pub use list::FrameList;
