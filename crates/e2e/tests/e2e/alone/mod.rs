//! Tests that measure. Each runs alone.

mod events;
mod fabric;
mod faults;
pub(crate) mod figure1;
mod kernel_power;
mod order;
mod overload;
mod scale;
mod shares;
