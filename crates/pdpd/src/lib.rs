//! The PdP daemon: decides and configures, never on a packet's or a route's way.
//!
//! | module | what |
//! |---|---|
//! | [`access`], [`audit`] | who may do what, and who did |
//! | [`http`] | the API; asks [`engine`] |
//! | [`engine`] | changes what is wanted, one change at a time; answers what is |
//! | [`observe`], [`view`], `ask`, `kernel_routes` | what is, for the API |
//! | [`model`] | what is wanted: specs, what was given out, and the plan of both (pure) |
//! | [`shared`] | maps whose versions share what they have in common (pure) |
//! | [`plan`] | specs to what is to run (pure) |
//! | [`keeper`], [`queue`] | says which object is worked on when |
//! | [`reconcile`] | brings an object nearer to the plan |
//! | [`images`] | images of registries and archives |
//! | [`watch`] | what is, what happened and what was counted, for who watches |
//! | [`doctor`] | what the machine can and can't do |
//! | [`claim`] | places that no other daemon may have |
//! | [`machine`], [`host`], [`control`] | what can be done on the machine; calls to the mux and the helpers |
//! | [`settings`] | settings of the machine that bound what all guests use together |
//! | [`state`] | what is remembered |

#![forbid(unsafe_code)]

pub mod access;
mod ask;
pub mod audit;
pub mod backoff;
pub mod bounds;
pub mod claim;
pub mod control;
pub mod doctor;
pub mod engine;
pub mod far;
mod fastpath;
pub mod host;
pub mod http;
pub mod images;
pub mod keeper;
mod kernel_frames;
mod kernel_routes;
pub mod key;
pub mod ledger;
pub mod machine;
pub mod model;
pub mod observe;
pub mod observers;
pub mod plan;
pub mod ports;
pub mod queue;
pub mod reconcile;
pub mod remains;
pub mod settings;
pub mod shared;
pub mod sockets;
pub mod state;
pub mod upgrade;
pub mod view;
pub mod watch;
