//! PdP and its peers, measured on this machine so that it can be believed.
//!
//! - An experiment ([`experiments`]) gives samples. PdP and peers take turns within each round, on
//!   the same cores, with the same generator and sink; there are several rounds, of which the
//!   report gives median and spread ([`statistics`]).
//! - Before each sample, while no core polls, the way between the first and the last core is
//!   measured and kept with it: hosts move virtual CPUs, and figures of different states are not to
//!   be compared ([`sample::State`]).
//! - CPU time that the host took away during a sample is kept with it, and a sample that lost much
//!   is taken again ([`steal`]).
//! - Two builds are compared by pairs of the same experiment in turn ([`against`]).
//! - Results are files ([`sample::Results`]), from which plots ([`plot`]) and the report
//!   ([`report`]) are made, with every target ([`targets`]) beside the figure reached.
//!
//! Everything happens in network namespaces made for it. Needs root.

#![forbid(unsafe_code)]

pub mod against;
pub mod alone;
pub mod bed;
pub mod experiments;
pub mod live;
pub mod machine;
pub mod netlink;
pub mod paper;
pub mod peers;
pub mod plot;
pub mod report;
pub mod run;
pub mod sample;
pub mod site;
pub mod statistics;
pub mod steal;
pub mod stream;
pub mod targets;
pub mod vrouters;
