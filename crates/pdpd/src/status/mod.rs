//! The current state and its counters, for the API and for watchers.

pub mod doctor;
pub(crate) mod fastpath;
pub mod frames;
pub(crate) mod kernel_frames;
pub(crate) mod kernel_routes;
pub mod publisher;
pub mod sampler;
pub mod stats;
pub mod tables;
pub mod view;
