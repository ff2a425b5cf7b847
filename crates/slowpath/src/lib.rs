//! Library for slow paths: programs in a control guest that install filters in
//! the mux's engine, read its counters, and send frames. docs/slowpath.md is
//! the guide; [`pdp_proto::slowpath`] defines the messages.
//!
//! ```no_run
//! use pdp_slowpath::{FilterAction, IpMatch, SOCKET, SlowPathSession, discard, filter, send};
//!
//! # fn main() -> Result<(), pdp_slowpath::Error> {
//! let mut slow_path = SlowPathSession::connect(SOCKET)?;
//! let dns = IpMatch::ip().proto(17).dport(53);
//! let noise = IpMatch::ip().src("198.51.100.0/24".parse().expect("a prefix"));
//! slow_path
//!     .batch()
//!     .set(filter(1, 100, dns, send(2, [2, 0, 0, 0, 0, 9])))
//!     .set(filter(2, 200, noise, FilterAction { counter: 0, ..discard() }))
//!     .commit()?;
//! loop {
//!     slow_path.keep(std::time::Duration::from_secs(1))?;
//!     println!("{} packets dropped", slow_path.counters(0, 1)?[0].packets);
//! }
//! # }
//! ```
//!
//! Everything blocks, for a bounded time. [`SlowPathSession`] keeps a program's wanted state and
//! restores it when the mux was replaced. [`SlowPathConnection`] is a single connection without
//! such state.

#![forbid(unsafe_code)]

mod client;
mod connection;
pub mod pattern;

pub use client::{SlowPathSession, TIMEOUT, Transaction};
pub use connection::{Error, FrameDestination, SlowPathChange, SlowPathConnection};
pub use pattern::{BadPattern, IpMatch, PatternCode};
pub use pdp_proto::slowpath::{
    COPIES_MAX, DATA_BYTES, FRAME_BYTES_MAX, Filter, FilterAction, FilterCounter, FilterPattern,
    FilterVerdict, NO_COUNTER, NO_FILTER, QUEUES_SET_MAX, QueueSetting, QueueState, Welcome,
};

/// The mux's socket, in a control guest.
pub const SOCKET: &str = "/run/pdp/slowpath/control.sock";

/// Makes a filter with a number and a priority. If
/// several filters match, the highest priority wins.
pub fn filter(
    id: u32,
    priority: u32,
    pattern: impl Into<FilterPattern>,
    action: FilterAction,
) -> Filter {
    Filter { id, priority, pattern: pattern.into(), action }
}

/// Drops the packet.
pub fn discard() -> FilterAction {
    FilterAction { verdict: FilterVerdict::Drop, ..FilterAction::default() }
}

/// Treats the packet as without the filter.
pub fn pass() -> FilterAction {
    FilterAction::default()
}

/// Sends the packet to the control guest.
pub fn punt() -> FilterAction {
    FilterAction { verdict: FilterVerdict::Punt, ..FilterAction::default() }
}

/// Sends the packet by a vport, to a MAC address.
pub fn send(vport: u8, to: [u8; 6]) -> FilterAction {
    let mut data = [0; DATA_BYTES];
    data[..to.len()].copy_from_slice(&to);
    FilterAction { verdict: FilterVerdict::Send, vport, data, ..FilterAction::default() }
}

/// Adds a copy to each of these vports. `None` for more than [`COPIES_MAX`].
pub fn copied(action: FilterAction, vports: &[u8]) -> Option<FilterAction> {
    let mut copies = [0; COPIES_MAX];
    copies.get_mut(..vports.len())?.copy_from_slice(vports);
    Some(FilterAction { copies_count: u8::try_from(vports.len()).ok()?, copies, ..action })
}
