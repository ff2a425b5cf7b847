//! The file that a management helper is started with (JSON), and what it and the spec's check both go by.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Name of the interface to outside in a node.
pub const INTERFACE: &str = "mgmt0";

/// What the node's packets to outside come from. One of its loopback addresses: no interface needs it, no
/// routing daemon passes it on, and no vnet can have it.
pub const SOURCE: Ipv4Addr = Ipv4Addr::new(127, 77, 0, 1);

/// The next hop outside, which answers DNS and nothing else: of the prefix that RFC 7335 keeps for what is between
/// a node and a translator beside it.
pub const GATEWAY: Ipv4Addr = Ipv4Addr::new(192, 0, 0, 1);

/// Length of an IP packet to outside, bytes.
pub const MTU: u32 = 1500;

/// Ports that a node publishes.
pub const PORTS_MAX: usize = 64;

/// See the module.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Config {
    /// Network namespace of the node, e.g. `/proc/123/ns/net`.
    pub netns: PathBuf,
    /// Where pdpd connects, to see that all is there.
    pub control_socket: PathBuf,
    /// User id of the helper and what it starts, once it needs no privilege any more.
    pub uid: u32,
    /// Whether the node has the interface to outside.
    pub outside: bool,
    /// Ports of the machine that lead into the node.
    pub ports: Vec<Port>,
}

/// A port of the machine that leads into a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Port {
    /// Where on the machine.
    pub listen: SocketAddr,
    /// Port in the node, at its loopback address.
    pub port: u16,
    /// By UDP, not TCP.
    pub udp: bool,
}
