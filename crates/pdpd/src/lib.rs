//! The PdP daemon: decides and configures. It never touches a packet, and is on no route's path.
//!
//! | module | what |
//! |---|---|
//! | [`access`], [`audit`] | permissions, and the audit log |
//! | [`http`] | the API; calls [`engine`] |
//! | [`engine`] | changes the desired state, one change at a time; answers queries |
//! | [`observe`], [`view`], `ask`, `kernel_routes` | the current state, for the API |
//! | [`model`] | the desired state: specs, allocations, and the plan made from both (pure) |
//! | [`shared`] | maps whose versions point to the same unchanged values (pure) |
//! | [`plan`] | turns specs into objects that shall run (pure) |
//! | [`reconciler`], [`queue`] | decides which object is worked on when |
//! | [`reconcile`] | moves an object towards the plan |
//! | [`images`] | images from registries and archives |
//! | [`watch`] | state, events and counters for watchers |
//! | [`doctor`] | checks of the machine |
//! | [`claim`] | paths that one daemon has for itself |
//! | [`machine`], [`host`], [`control`] | actions on the machine; calls to mux and helpers |
//! | [`settings`] | settings of the machine that limit all guests together |
//! | [`state`] | the state file |
//! | [`applied`] | settings of running guests and hosts, as the journal has them (pure) |

#![forbid(unsafe_code)]

pub mod access;
pub mod allocations;
pub mod applied;
pub mod audit;
pub mod backoff;
pub mod bounds;
pub mod claim;
pub mod control;
pub mod doctor;
pub mod engine;
mod fastpath;
pub mod host;
pub mod http;
pub mod images;
mod kernel_frames;
mod kernel_routes;
pub mod kernel_tunnels;
pub mod key;
pub mod machine;
pub mod model;
pub mod observe;
pub mod observers;
pub mod plan;
pub mod ports;
mod query;
pub mod queue;
pub mod reconcile;
pub mod reconciler;
pub mod remains;
pub mod settings;
pub mod shared;
pub mod sockets;
pub mod state;
pub mod upgrade;
pub mod view;
pub mod watch;
