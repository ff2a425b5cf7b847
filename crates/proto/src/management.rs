//! The management helper's configuration file (JSON), and
//! constants that the helper and the spec's check share.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Name of the node's management interface.
pub const INTERFACE: &str = "mgmt0";

/// Source address of the node's packets to the outside: one of its loopback addresses. No interface
/// needs it, no routing daemon announces it, and no vnet can have it.
pub const SOURCE: Ipv4Addr = Ipv4Addr::new(127, 77, 0, 1);

/// Next hop to the outside, which answers DNS and nothing else. It is from the prefix that RFC 7335
/// reserves between a node and a translator beside it.
pub const GATEWAY: Ipv4Addr = Ipv4Addr::new(192, 0, 0, 1);

/// MTU of the management interface: longest IP packet to the outside, bytes.
pub const MTU: u32 = 1500;

/// Most ports that a node publishes.
pub const PORTS_MAX: usize = 64;

/// Configuration of a management helper; see the module.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ManagementConfig {
    /// Network namespace of the node, e.g. `/proc/123/ns/net`.
    pub netns: PathBuf,
    /// Socket that pdpd connects to, to check that the helper is complete.
    pub control_socket: PathBuf,
    /// User id of the helper and its children once they no longer need privileges.
    pub uid: u32,
    /// True if the node has the management interface.
    pub outside: bool,
    /// Ports of the machine that are forwarded into the node.
    pub ports: Vec<ManagementPort>,
}

/// Port of the machine that is forwarded into a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ManagementPort {
    /// Address and port on the machine.
    pub listen: SocketAddr,
    /// Port in the node, at its loopback address.
    pub port: u16,
    /// True for UDP, false for TCP.
    pub udp: bool,
}
