//! Types that cross both a process boundary and the API, each declared once.
//!
//! The mux, the helpers, and guests send them to pdpd in the messages of
//! `pdp-proto`. pdpd adds what only it knows, and answers the API's clients with them
//! (`pdp-api`). Keys are camelCase, as in the API. Processes of an earlier version may still run,
//! so keys of their messages are aliases.

#![forbid(unsafe_code)]

mod command;
mod filter;
mod stats;

pub use command::*;
pub use filter::*;
pub use stats::*;
