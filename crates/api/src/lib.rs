//! The HTTP API of a PdP node: requests, answers, and a client.
//!
//! JSON over HTTP/1.1 on a Unix socket ([`DaemonName::socket`]), or over TLS with a token. Keys are
//! camelCase, and names of quantities end in their units. The daemon refuses unknown keys.
//! [`paths`] has the paths. `schema/openapi.json` has them too, and the daemon serves it.
//!
//! - Every refusal is a [`Problem`] with the status code of its [`ProblemKind`].
//! - Changes and route tables answer with newline-delimited JSON: [`ChangeEvent`]s (progress, then
//!   one result or problem) for changes, [`RouteLine`]s for route tables. If a change's client
//!   accepts `application/json` and not these lines, the answer is only its [`ChangeReport`] or
//!   [`Problem`].
//! - A watch answers with [`WatchLine`]s, one per line, until the client disconnects.
//! - Captures are pcap, logs plain text; both stream until the client disconnects.
//! - `exec` upgrades the connection to the protocol [`exec::UPGRADE`], see [`exec`].
//!
//! Limits: [`BODY_BYTES_MAX`] per request, [`FILES_MAX`] files per apply.

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

/// Largest body of one request, bytes.
pub const BODY_BYTES_MAX: usize = 32 << 20;

/// Largest number of files of one apply.
pub const FILES_MAX: usize = 1024;
