//! The desired state: specs, allocations, the plan made from both, and the file that keeps them.

pub mod model;
pub mod state;
