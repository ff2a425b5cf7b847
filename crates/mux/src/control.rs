//! The mux beside its packets' way: what pdpd wants is made so.
//!
//! Each file uses those above it alone: `plan` (what is wanted and where it goes; pure) and `check`, the
//! `workers` and how they are reached, `keeper` (sockets and handshakes of peers), `routes` (what mirrors say), `base` (all of these
//! together), `exits` of external interfaces, `apply` (what changes) with `schedule` (what time
//! changes), `report` (what is to be seen), `serve` (requests).

mod apply;
mod base;
pub mod check;
mod exits;
mod keeper;
pub mod plan;
mod report;
mod routes;
pub mod schedule;
mod serve;
mod slowpath;
mod workers;

pub use serve::Mux;
pub use workers::Settings;
