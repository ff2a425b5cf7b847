//! Reliable measurements of PdP and its peers on this machine.
//!
//! - An experiment ([`experiments`]) takes samples. PdP and peers alternate within each round, on
//!   the same cores, with the same generator and sink. There are several rounds; the report gives
//!   their median and spread ([`statistics`]).
//! - Before each sample, while no core polls, the latency between the first and the last core is
//!   measured and recorded with it. Hosts move virtual CPUs, and figures of different states must
//!   not be compared ([`sample::CoreProximity`]).
//! - CPU time that the host took away during a sample is recorded with it. A sample that lost much
//!   is repeated ([`steal`]).
//! - Two builds are compared by alternating pairs of the same experiment ([`against`]).
//! - Results are files ([`sample::Results`]). The plots ([`plot`]) and the report ([`report`]) are
//!   made from them, with every target ([`targets`]) beside the figure reached.
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
pub mod reading;
pub mod report;
pub mod run;
pub mod sample;
pub mod site;
pub mod statistics;
pub mod steal;
pub mod stream;
pub mod targets;
pub mod vrouters;
