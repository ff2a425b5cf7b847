//! Kinds of tunnels: one table for specs, grants, the mux and the XDP program.
//!
//! A kind is an entry of [`Encapsulation`] and of [`KINDS`], and a file of this crate that
//! implements [`Tunnel`] for it. The implementation gives the key of the tunnel's frames, their
//! headers, and the traffic to take from an interface. Other code is independent of kinds, apart
//! from the types of specs, and the check of a header where frames are classified.
//! Limits: for each kind, [`TunnelKind::keys`].

use std::fmt;
use std::hash::{Hash, Hasher};
use std::net::IpAddr;
use std::ops::RangeInclusive;

use serde::{Deserialize, Serialize};

use crate::outer::{self, Outer};
use crate::{ether, geneve, gre, udp, vlan, vxlan};

/// Encapsulation of a vlink's frames on an external interface.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Encapsulation {
    /// All of the interface's frames that no tunnel takes, unchanged.
    Interface,
    /// VXLAN (RFC 7348).
    Vxlan(vxlan::VxlanTunnel),
    /// Ethernet frame directly in a UDP datagram (as in the PdP paper's tunnels).
    Udp(udp::UdpTunnel),
    /// Ethernet over GRE (RFC 2784, RFC 2890).
    Gre(gre::GreTunnel),
    /// Geneve (RFC 8926).
    Geneve(geneve::GeneveTunnel),
    /// A VLAN (802.1Q) of the interface.
    Vlan(vlan::VlanTunnel),
}

/// All kinds, by name.
pub const KINDS: [&TunnelKind; 5] =
    [&vxlan::KIND, &udp::KIND, &gre::KIND, &geneve::KIND, &vlan::KIND];

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

    /// Returns the tunnel as seen from its other end.
    fn reversed(&self) -> Encapsulation;

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

impl Encapsulation {
    /// Returns the tunnel, if it is one.
    #[inline]
    pub fn tunnel(&self) -> Option<&dyn Tunnel> {
        match self {
            Self::Interface => None,
            Self::Vxlan(tunnel) => Some(tunnel),
            Self::Udp(tunnel) => Some(tunnel),
            Self::Gre(tunnel) => Some(tunnel),
            Self::Geneve(tunnel) => Some(tunnel),
            Self::Vlan(tunnel) => Some(tunnel),
        }
    }

    /// Returns the outer addresses of a tunnel, local and remote.
    pub fn ends(&self) -> Option<(IpAddr, IpAddr)> {
        self.tunnel()?.ends()
    }

    /// Returns the traffic to take from an interface for it.
    pub fn takes(&self) -> Option<Take> {
        self.tunnel().map(Tunnel::takes)
    }

    /// Returns the key that identifies it on its interface.
    pub fn key(&self) -> TunnelKey {
        let key = self.tunnel().map_or(TunnelKey::WHOLE, Tunnel::key);
        TunnelKey::new(self.ends(), key)
    }

    /// Returns the encapsulation as seen from the other end.
    pub fn reversed(&self) -> Self {
        self.tunnel().map_or(Self::Interface, Tunnel::reversed)
    }

    /// Returns the bytes that it adds before an inner IP packet.
    /// The interface's MTU must cover them as well.
    pub fn overhead(&self) -> u32 {
        let Some(tunnel) = self.tunnel() else { return 0 };
        let ip = match tunnel.ends() {
            None => return 0,
            Some((IpAddr::V4(_), _)) => outer::IPV4_BYTES,
            Some((IpAddr::V6(_), _)) => outer::IPV6_BYTES,
        };
        (ip + tunnel.header().bytes.len() + ether::HEADER_BYTES) as u32
    }

    /// Returns a description of the value that is out of range, if any.
    pub fn fault(&self) -> Option<&'static str> {
        let tunnel = self.tunnel()?;
        if tunnel.number().is_some_and(|key| !tunnel.kind().keys.contains(&key)) {
            return Some("has a key out of range");
        }
        let mixed =
            tunnel.ends().is_some_and(|(local, remote)| local.is_ipv4() != remote.is_ipv4());
        mixed.then_some("has addresses of different families")
    }
}

/// Text form: `the whole interface`, or a tunnel as `vxlan 192.0.2.1 > 192.0.2.2 vni 7 port 4789`.
impl fmt::Display for Encapsulation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(tunnel) = self.tunnel() else { return f.write_str("the whole interface") };
        f.write_str(tunnel.kind().name)?;
        if let Some((local, remote)) = tunnel.ends() {
            write!(f, " {local} > {remote}")?;
        }
        write!(f, " {}", tunnel.key_text())
    }
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
    const WHOLE: u64 = 0;

    /// Value for a UDP port and the 24-bit identifier behind it, which VXLAN and Geneve have at the
    /// same place. An address and port has tunnels of only one kind.
    #[inline]
    pub fn vni(port: u16, vni: u32) -> u64 {
        1 << 60 | u64::from(port) << 32 | u64::from(vni & (vxlan::VNI_END - 1))
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
    fn new(ends: Option<(IpAddr, IpAddr)>, key: u64) -> Self {
        let Some((local, remote)) = ends else { return Self { local: 0, remote: 0, rest: key } };
        let family = if local.is_ipv4() { V4 } else { 0 };
        Self { local: bits(local), remote: bits(remote), rest: family | key }
    }

    /// Key of a frame with these outer headers and this value.
    #[inline]
    pub fn of(outer: &Outer, key: u64) -> Self {
        Self::new(Some((outer.local, outer.remote)), key)
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

#[cfg(test)]
mod tests {
    use super::*;

    fn one_of_each() -> [Encapsulation; KINDS.len() + 1] {
        let (local, remote) = ([192, 0, 2, 1].into(), [192, 0, 2, 2].into());
        [
            Encapsulation::Interface,
            Encapsulation::Vxlan(vxlan::VxlanTunnel { local, remote, port: 4789, vni: 7 }),
            Encapsulation::Udp(udp::UdpTunnel { local, remote, local_port: 5, remote_port: 6 }),
            Encapsulation::Gre(gre::GreTunnel {
                local,
                remote,
                key: Some(9),
                checksum: true,
                sequence: false,
            }),
            Encapsulation::Geneve(geneve::GeneveTunnel { local, remote, port: 6081, vni: 8 }),
            Encapsulation::Vlan(vlan::VlanTunnel { id: 10 }),
        ]
    }

    #[test]
    fn tunnel_table_lists_every_kind_once() {
        let kinds: Vec<_> =
            one_of_each().iter().filter_map(|by| Some(by.tunnel()?.kind())).collect();
        assert_eq!(kinds, KINDS);
        for (at, kind) in KINDS.iter().enumerate() {
            assert!(KINDS[..at].iter().all(|other| other.name != kind.name));
        }
    }

    #[test]
    fn tunnel_kinds_have_stable_text_and_encoding() {
        let texts = one_of_each().map(|by| by.to_string());
        assert_eq!(
            texts,
            [
                "the whole interface",
                "vxlan 192.0.2.1 > 192.0.2.2 vni 7 port 4789",
                "udp 192.0.2.1 > 192.0.2.2 port 5 > 6",
                "gre 192.0.2.1 > 192.0.2.2 key 9",
                "geneve 192.0.2.1 > 192.0.2.2 vni 8 port 6081",
                "vlan id 10",
            ]
        );
        for by in one_of_each() {
            let text = serde_json::to_string(&by).unwrap();
            assert_eq!(serde_json::from_str::<Encapsulation>(&text).unwrap(), by);
            assert_eq!(by.reversed().reversed(), by);
            assert_eq!(by.fault(), None);
        }
        // With an MTU of 1,500, this leaves 1450, 1458, 1454
        // with key and checksum, 1450, and all of it.
        let overheads = one_of_each().map(|by| by.overhead());
        assert_eq!(overheads, [0, 50, 42, 46, 50, 0]);
        let vxlan = serde_json::to_string(&one_of_each()[1]).unwrap();
        let was = r#"{"Vxlan":{"local":"192.0.2.1","remote":"192.0.2.2","port":4789,"vni":7}}"#;
        assert_eq!(vxlan, was);
    }
}
