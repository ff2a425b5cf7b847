//! Forwarding of IPv4 and IPv6 for a vrouter, by the routes of its control guest: what the built-in router's guests
//! do ([`pdp-router`](../pdp_guest/router/index.html)), and the mux itself for a fast path whose code is `ip`.
//!
//! What is the way of every packet is done here: unicast that a route leads out of a vport to a
//! neighbour with a known link address. Everything else is punted to the control guest, whose
//! kernel does it in full: local delivery, routing protocols, ARP and neighbour discovery, ICMP
//! errors, options, fragmentation. See [`Forwarder`] for the rules and their sources.
//!
//! Routes and neighbours come from the route mirror into the tables ([`Fib`]), a bounded piece between two batches:
//! a [`Follower`] applies what a [`Channel`] to the mirror has, and says what the mirror is to know. Who has lost its
//! mirror goes on with what it has.

#![forbid(unsafe_code)]

mod connection;
#[cfg(test)]
mod connection_tests;
mod fib;
mod follower;
mod forward;
mod group;
mod neighbour;
#[cfg(test)]
mod tests;

pub use connection::Connection;
pub use fib::Fib;
pub use follower::{Channel, Due, Follower, Heard, Tables};
pub use forward::{Decision, FRAMES_MAX, Forwarder, Frames, Routed};
