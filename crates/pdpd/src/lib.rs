//! The PdP daemon: decides and configures, never on a packet's or a route's way.
//!
//! | module | what |
//! |---|---|
//! | [`access`], [`audit`] | who may do what, and who did |
//! | [`http`] | the API; asks [`engine`] |
//! | [`engine`] | changes what is wanted, one change at a time; answers what is |
//! | [`observe`], [`view`] | what is, for the API |
//! | [`model`] | what is wanted: specs, what was given out, and the plan of both (pure) |
//! | [`plan`] | specs to what is to run (pure) |
//! | [`reconcile`] | makes the machine equal the plan |
//! | [`host`], [`control`] | steps on the machine; calls to the mux and the helpers |
//! | [`state`] | what is remembered |

#![forbid(unsafe_code)]

pub mod access;
pub mod audit;
pub mod backoff;
pub mod control;
pub mod engine;
pub mod host;
pub mod http;
pub mod key;
pub mod ledger;
pub mod model;
pub mod observe;
pub mod plan;
pub mod reconcile;
pub mod state;
pub mod view;
