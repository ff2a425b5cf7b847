//! Ports and tunnels of the kernel's data plane, and limits of captures.

pub mod observers;
pub mod ports;
pub mod tunnels;
