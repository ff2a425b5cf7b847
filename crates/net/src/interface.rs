//! Facts about interfaces of this network namespace.

use ipnet::IpNet;

use crate::error::Result;

/// An interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interface {
    /// Its name.
    pub name: String,
    /// Its index.
    pub index: u32,
    /// Its link address.
    pub mac: [u8; 6],
    /// Largest IP packet, bytes.
    pub mtu: u32,
    /// Administratively up.
    pub up: bool,
    /// With carrier.
    pub lower_up: bool,
    /// Receive queues in use: as many AF_XDP sockets.
    pub receive_queues: u32,
    /// Addresses with their prefix lengths.
    pub addresses: Vec<IpNet>,
}

impl Interface {
    /// The interface of this name.
    pub fn by_name(name: &str) -> Result<Self> {
        todo!("{name}")
    }
}
