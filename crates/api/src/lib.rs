//! The HTTP API of a PdP node: what is asked and answered, and a client.
//!
//! JSON over HTTP/1.1 on a Unix socket ([`DaemonName::socket`]), or over TLS with a token; keys are camelCase, units end their
//! names, and a key that is not known is refused. The paths are in [`paths`], and the same in
//! `schema/openapi.json`, which the daemon serves too.
//!
//! - Every refusal is a [`Problem`] with the status code of its [`ProblemKind`].
//! - What takes time answers with newline-delimited JSON: [`Event`]s (progress, then one result or
//!   problem) for changes, [`RouteLine`]s for route tables. A change whose client accepts `application/json` and
//!   not these lines answers with its [`Report`] or [`Problem`] alone.
//! - A watch is [`WatchLine`]s, one a line, until the client goes away.
//! - Captures are pcap, logs plain text; both stream until the client goes away.
//! - `exec` upgrades the connection to the protocol [`exec::UPGRADE`], see [`exec`].
//!
//! Limits: [`BODY_BYTES_MAX`] a request, [`FILES_MAX`] files an apply.

#![forbid(unsafe_code)]

mod access;
mod change;
pub mod client;
mod command;
mod doctor;
pub mod exec;
mod fastpath;
mod images;
mod name;
mod observe;
pub mod paths;
mod problem;
mod routes;
pub mod specs;
mod stats;
mod status;
mod watch;

pub use access::*;
pub use change::*;
pub use command::*;
pub use doctor::*;
pub use fastpath::*;
pub use images::*;
pub use name::*;
pub use observe::*;
pub use problem::*;
pub use routes::*;
pub use stats::*;
pub use status::*;
pub use watch::*;

/// Bytes of the body of one request.
pub const BODY_BYTES_MAX: usize = 32 << 20;

/// Files of one apply.
pub const FILES_MAX: usize = 1024;
