//! For slow paths: programs in a control guest that tell the mux's engine how to treat packets, read its counters, and send
//! frames. docs/slowpath.md is the guide; [`pdp_proto::slowpath`] is what is said on the socket.
//!
//! ```no_run
//! use pdp_slowpath::{Action, Match, SOCKET, SlowPath, discard, filter, send};
//!
//! # fn main() -> Result<(), pdp_slowpath::Error> {
//! let mut slow_path = SlowPath::connect(SOCKET)?;
//! let dns = Match::ip().proto(17).dport(53);
//! let noise = Match::ip().src("198.51.100.0/24".parse().expect("a prefix"));
//! slow_path
//!     .batch()
//!     .set(filter(1, 100, dns, send(2, [2, 0, 0, 0, 0, 9])))
//!     .set(filter(2, 200, noise, Action { counter: 0, ..discard() }))
//!     .commit()?;
//! loop {
//!     slow_path.keep(std::time::Duration::from_secs(1))?;
//!     println!("{} packets dropped", slow_path.counters(0, 1)?[0].packets);
//! }
//! # }
//! ```
//!
//! Everything blocks, for a bounded time. [`SlowPath`] keeps what a program wants and brings it back after the mux was
//! replaced; [`Connection`] is a single connection, for who keeps nothing.

#![forbid(unsafe_code)]

mod client;
mod connection;
pub mod pattern;

pub use client::{Batch, SlowPath, TIMEOUT};
pub use connection::{Change, Connection, Error, Way};
pub use pattern::{BadPattern, Code, Match};
pub use pdp_proto::slowpath::{
    Action, COPIES_MAX, Counter, DATA_BYTES, FRAME_BYTES_MAX, Filter, NO_COUNTER, NO_FILTER,
    Pattern, QUEUES_SET_MAX, QueueSetting, QueueState, Verdict, Welcome,
};

/// Where the mux listens, in a control guest.
pub const SOCKET: &str = "/run/pdp/slowpath/control.sock";

/// A filter of a number and a priority: of those that a packet meets, the one with the highest counts.
pub fn filter(id: u32, priority: u32, pattern: impl Into<Pattern>, action: Action) -> Filter {
    Filter { id, priority, pattern: pattern.into(), action }
}

/// The packet is dropped.
pub fn discard() -> Action {
    Action { verdict: Verdict::Drop, ..Action::default() }
}

/// What would become of the packet without the filter.
pub fn pass() -> Action {
    Action::default()
}

/// The packet goes to the control guest.
pub fn punt() -> Action {
    Action { verdict: Verdict::Punt, ..Action::default() }
}

/// The packet leaves by a vport, to a link address.
pub fn send(vport: u8, to: [u8; 6]) -> Action {
    let mut data = [0; DATA_BYTES];
    data[..to.len()].copy_from_slice(&to);
    Action { verdict: Verdict::Send, vport, data, ..Action::default() }
}

/// The same, and a copy leaves by each of these vports; `None` for more than [`COPIES_MAX`].
pub fn copied(action: Action, vports: &[u8]) -> Option<Action> {
    let mut copies = [0; COPIES_MAX];
    copies.get_mut(..vports.len())?.copy_from_slice(vports);
    Some(Action { copies_count: u8::try_from(vports.len()).ok()?, copies, ..action })
}
