//! Properties that tunnels of all kinds have: keys, headers, and the traffic to take for them.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::net::IpAddr;
use std::ops::RangeInclusive;

use serde::{Deserialize, Serialize};

/// Properties of a kind of tunnel.
#[derive(Debug, PartialEq, Eq)]
pub struct TunnelKind {
    /// Name, also in specs.
    pub name: &'static str,
    /// Name of its key in specs.
    pub key: &'static str,
    /// Range of its keys.
    pub keys: RangeInclusive<u32>,
    /// Default UDP port.
    pub port: Option<u16>,
}

/// A tunnel of any kind.
pub trait Tunnel {
    /// Returns the kind.
    fn kind(&self) -> &'static TunnelKind;

    /// Returns the outer addresses, local and remote; `None` if there is no outer IP header.
    fn ends(&self) -> Option<(IpAddr, IpAddr)>;

    /// Returns the key, within [`TunnelKind::keys`].
    fn number(&self) -> Option<u32>;

    /// Returns the value that distinguishes it from others between the same addresses; see
    /// [`TunnelKey`].
    fn key(&self) -> u64;

    /// Returns the traffic to take from an interface for it.
    fn takes(&self) -> Take;

    /// Returns the header between the outer IP header and each frame.
    fn header(&self) -> TunnelHeader;

    /// Returns the key as text for people.
    fn key_text(&self) -> String;
}

/// Header between an outer IP header and a frame, complete
/// except for the fields that differ for each frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TunnelHeader {
    /// Protocol number in the IP header.
    pub protocol: u8,
    /// Bytes of all headers.
    pub bytes: Vec<u8>,
    /// Fields that differ for each frame.
    pub fix: Fix,
}

/// Fields of the headers that differ for each frame, apart from the outer IP header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fix {
    /// Length and checksum of UDP.
    Udp {
        /// True if the source port is set from the inner flow's
        /// hash, so that the underlay can spread flows.
        spread: bool,
    },
    /// Checksum and sequence number of GRE, if the header has them.
    Gre,
    /// Tag behind the frame's MAC addresses; there is no IP header.
    Tag,
}

/// Traffic that is taken from an interface for tunnels. Many tunnels may share one entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Take {
    /// UDP to this address and port.
    Udp {
        /// Outer destination address.
        local: IpAddr,
        /// Destination port.
        port: u16,
    },
    /// Ethernet in GRE to this address.
    Gre {
        /// Outer destination address.
        local: IpAddr,
    },
    /// VLAN, for frames to any address.
    Vlan {
        /// Identifier of the VLAN.
        id: u16,
    },
}

impl Take {
    /// Returns the UDP port, if it is UDP.
    pub fn udp_port(&self) -> Option<u16> {
        match self {
            Self::Udp { port, .. } => Some(*port),
            Self::Gre { .. } | Self::Vlan { .. } => None,
        }
    }

    /// True if it includes frames that are not for the interface's
    /// own MAC address, as for a whole interface.
    pub fn accepts_any_sender(&self) -> bool {
        matches!(self, Self::Vlan { .. })
    }
}

impl fmt::Display for Take {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Udp { local, port } => write!(f, "UDP port {port} of {local}"),
            Self::Gre { local } => write!(f, "GRE to {local}"),
            Self::Vlan { id } => write!(f, "VLAN {id}"),
        }
    }
}

/// Lookup key of a frame's tunnel: outer addresses, and the
/// value that distinguishes tunnels between them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct TunnelKey {
    local: u128,
    remote: u128,
    /// Value of the tunnel's kind, and [`V4`].
    rest: u64,
}

/// Flag for IPv4.
const V4: u64 = 1 << 63;

impl TunnelKey {
    /// Value for the whole interface.
    pub(crate) const WHOLE: u64 = 0;

    /// Value for a UDP port and the 24-bit identifier behind it, which VXLAN and Geneve have at the
    /// same place. An address and port has tunnels of only one kind.
    #[inline]
    pub fn vni(port: u16, vni: u32) -> u64 {
        1 << 60 | u64::from(port) << 32 | u64::from(vni & 0xff_ffff)
    }

    /// Value for a pair of UDP ports.
    #[inline]
    pub fn ports(local: u16, remote: u16) -> u64 {
        2 << 60 | u64::from(local) << 16 | u64::from(remote)
    }

    /// Value for a GRE key, or for none.
    #[inline]
    pub fn gre(key: Option<u32>) -> u64 {
        3 << 60 | key.map_or(0, |key| 1 << 32 | u64::from(key))
    }

    /// Value for a VLAN.
    pub fn vlan(id: u16) -> u64 {
        4 << 60 | u64::from(id)
    }

    /// Key of a frame without outer addresses.
    pub fn without_ends(key: u64) -> Self {
        Self::new(None, key)
    }

    /// Returns the key without the remote address, which matches any sender.
    pub fn without_remote(self) -> Self {
        Self { remote: 0, ..self }
    }

    #[inline]
    pub(crate) fn new(ends: Option<(IpAddr, IpAddr)>, key: u64) -> Self {
        let Some((local, remote)) = ends else { return Self { local: 0, remote: 0, rest: key } };
        let family = if local.is_ipv4() { V4 } else { 0 };
        Self { local: bits(local), remote: bits(remote), rest: family | key }
    }
}

impl Hash for TunnelKey {
    #[inline]
    fn hash<H: Hasher>(&self, state: &mut H) {
        if self.rest & V4 == 0 {
            state.write_u64((self.local >> 64) as u64 ^ (self.remote >> 64) as u64);
        }
        state.write_u64((self.local as u64).rotate_left(32) ^ self.remote as u64);
        state.write_u64(self.rest);
    }
}

fn bits(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(address) => u128::from(address.to_bits()),
        IpAddr::V6(address) => address.to_bits(),
    }
}

/// Reason why a frame has no outer headers of a tunnel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotATunnel {
    /// Not IPv4 or IPv6, or no protocol that tunnels use.
    Other,
    /// Lengths or versions that contradict each other or the frame.
    Malformed,
    /// The IPv4 header's checksum is wrong.
    HeaderChecksum,
    /// The frame is a fragment, but tunnels set Don't Fragment.
    Fragment,
    /// GRE of another version, or with routing.
    GreHeader,
}
