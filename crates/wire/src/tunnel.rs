//! Kinds of tunnels: one table for specs, grants, the mux and the XDP program.
//!
//! A kind is an entry of [`Encapsulation`] and of [`KINDS`], and a file of this crate that
//! implements [`Tunnel`] for it. The implementation gives the key of the tunnel's frames, their
//! headers, and the traffic to take from an interface. Other code is independent of kinds, apart
//! from the types of specs, and the check of a header where frames are classified.
//! Limits: for each kind, [`TunnelKind::keys`].

use std::fmt;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

pub use crate::tunnel_kind::{Fix, Take, Tunnel, TunnelHeader, TunnelKey, TunnelKind};
use crate::{ether, geneve, gre, ipv4, ipv6, udp, vlan, vxlan};

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
        match self {
            Self::Interface => Self::Interface,
            Self::Vxlan(tunnel) => Self::Vxlan(tunnel.reversed()),
            Self::Udp(tunnel) => Self::Udp(tunnel.reversed()),
            Self::Gre(tunnel) => Self::Gre(tunnel.reversed()),
            Self::Geneve(tunnel) => Self::Geneve(tunnel.reversed()),
            Self::Vlan(tunnel) => Self::Vlan(tunnel.reversed()),
        }
    }

    /// Returns the bytes that it adds before an inner IP packet.
    /// The interface's MTU must cover them as well.
    pub fn overhead(&self) -> u32 {
        let Some(tunnel) = self.tunnel() else { return 0 };
        let ip = match tunnel.ends() {
            None => return 0,
            Some((IpAddr::V4(_), _)) => ipv4::HEADER_BYTES,
            Some((IpAddr::V6(_), _)) => ipv6::HEADER_BYTES,
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
