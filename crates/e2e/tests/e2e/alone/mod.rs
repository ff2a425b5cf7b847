//! Tests that measure, or that fill the whole machine. Each runs alone.

mod events;
pub(crate) mod examples;
mod fabric;
mod faults;
pub(crate) mod figure1;
mod kernel_power;
mod order;
mod overload;
mod scale;
mod shares;
