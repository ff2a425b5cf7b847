//! The PdP daemon: decides and configures. It never touches a packet, and is on no route's path.
//!
//! A folder uses only folders below it in this table.
//!
//! | folder | task |
//! |---|---|
//! | [`api`] | the HTTP API |
//! | [`status`] | the current state and its counters, for the API and for watchers |
//! | [`engine`] | changes the desired state, one change at a time; answers queries |
//! | [`reconcile`] | decides which object is worked on when, and moves it towards the plan |
//! | [`machine`] | the actions that the reconciler takes, so that tests can replace them |
//! | [`images`] | images from registries and archives |
//! | [`events`] | events, states and samples that watchers read |
//! | [`kernel`] | ports and tunnels of kernel links; limits of captures |
//! | [`host`] | single steps on the machine; calls to the mux and the helpers |
//! | [`access`] | rights, and the audit log |
//! | [`intent`] | the desired state: specs, allocations, their plan; the state file |
//! | [`plan`] | turns specs into objects that shall run, without side effects |
//! | [`util`] | small helpers of all other folders |

#![forbid(unsafe_code)]

pub mod access;
pub mod api;
pub mod engine;
pub mod events;
pub mod host;
pub mod images;
pub mod intent;
pub mod kernel;
pub mod machine;
pub mod plan;
pub mod reconcile;
pub mod status;
pub mod util;
