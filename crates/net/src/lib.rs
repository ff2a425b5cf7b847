//! Networking on the host: TAPs and ports of kernel vrouters in guests, XDP programs on external
//! interfaces, facts about interfaces, and the machine's capabilities.
//!
//! Calls block for a short while (netlink, BPF). None is on the data path.

pub mod capture;
mod error;
pub mod ethtool;
pub mod interface;
mod ioctl;
pub mod limits;
pub mod management;
pub mod napi;
mod netlink;
mod netlink_pool;
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
mod version;
pub mod xdp;

pub use error::{Error, Result};
