//! Control plane of the mux, beside the packet path: carries out pdpd's requests.
//!
//! Each file uses only those before it in this list:
//!
//! - `plan`: what pdpd wants, and its placement on workers; pure. `check`: validation.
//! - `workers`: the worker threads, and how to reach them.
//! - `peer_listener`: peers' sockets and handshakes. `routes`: messages
//!   of route mirrors. `slowpath`: programs of control guests.
//! - `base`: all of these together.
//! - `netdevs`: drivers of external interfaces.
//! - `apply`: changes. `schedule`: changes at given times.
//! - `report`: counters, captures and traces.
//! - `serve`: requests.

mod apply;
mod base;
pub mod check;
mod netdevs;
mod peer_listener;
pub mod plan;
mod report;
mod routes;
pub mod schedule;
mod serve;
mod slowpath;
mod workers;

pub use serve::MuxServer;
pub use workers::MuxSettings;
