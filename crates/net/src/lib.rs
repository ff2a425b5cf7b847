//! The host's side of networking: TAPs and ports of kernel vrouters in guests, XDP programs on external
//! interfaces, facts about interfaces, and what this machine can do.
//!
//! Calls block for a short while (netlink, BPF); none is on a packet's way.

pub mod capture;
mod error;
pub mod ethtool;
pub mod interface;
pub mod limits;
pub mod management;
pub mod napi;
mod netlink;
pub mod netns;
pub mod packet;
mod pins;
pub mod ports;
pub mod probe;
pub mod route;
pub mod route_mtu;
pub mod shared;
pub mod sysctl;
pub mod tap;
pub mod xdp;

pub use error::{Error, Result};
