//! Tests that measure: each runs while no other does.

mod events;
mod faults;
mod figure1;
mod order;
mod overload;
mod scale;
mod shares;
