//! The kinds of tunnels: one table that specs, grants, the mux and the XDP program follow.
//!
//! A kind is an entry of [`Encapsulation`] and of [`KINDS`], and a file of this crate that implements
//! [`Tunnel`] for it: what tells its frames apart, what stands before them, what has to be taken off an
//! interface for it. Nobody else knows of kinds, but for the types of specs and the check of a header
//! where a frame is sorted.
//! Limits: of each kind, [`Kind::keys`].

use std::fmt;
use std::hash::{Hash, Hasher};
use std::net::IpAddr;
use std::ops::RangeInclusive;

use serde::{Deserialize, Serialize};

use crate::outer::{self, Outer};
use crate::{ether, geneve, gre, udp, vlan, vxlan};

/// How a vlink's frames are told apart on an external interface.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Encapsulation {
    /// All of the interface's frames that no tunnel takes, as they are.
    Interface,
    /// VXLAN (RFC 7348).
    Vxlan(vxlan::Tunnel),
    /// An Ethernet frame in a UDP datagram without any header between (as the PdP paper's tunnels).
    Udp(udp::Tunnel),
    /// Ethernet over GRE (RFC 2784, RFC 2890).
    Gre(gre::Tunnel),
    /// Geneve (RFC 8926).
    Geneve(geneve::Tunnel),
    /// A VLAN (802.1Q) of the interface.
    Vlan(vlan::Tunnel),
}

/// All kinds, by name.
pub const KINDS: [&Kind; 5] = [&vxlan::KIND, &udp::KIND, &gre::KIND, &geneve::KIND, &vlan::KIND];

/// What all tunnels of a kind have in common.
#[derive(Debug, PartialEq, Eq)]
pub struct Kind {
    /// Its name, in specs too.
    pub name: &'static str,
    /// What its key is called in specs.
    pub key: &'static str,
    /// Its keys.
    pub keys: RangeInclusive<u32>,
    /// The UDP port that it has where none is said.
    pub port: Option<u16>,
}

/// A tunnel of some kind.
pub trait Tunnel {
    /// Its kind.
    fn kind(&self) -> &'static Kind;

    /// Outer addresses, of this side and of the other. `None`: there is no IP around its frames.
    fn ends(&self) -> Option<(IpAddr, IpAddr)>;

    /// Its key, within [`Kind::keys`].
    fn number(&self) -> Option<u32>;

    /// What tells it from others between the same addresses; see [`Key`].
    fn key(&self) -> u64;

    /// What is to be taken off an interface for it.
    fn takes(&self) -> Take;

    /// What stands behind the outer IP header and before each frame.
    fn header(&self) -> Header;

    /// The same as it is at its other end.
    fn reversed(&self) -> Encapsulation;

    /// What its key is, for people.
    fn key_text(&self) -> String;
}

/// What stands behind an outer IP header and before a frame, ready but for what each frame changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// Number in the IP header.
    pub protocol: u8,
    /// All headers.
    pub bytes: Vec<u8>,
    /// What each frame changes.
    pub fix: Fix,
}

/// What a frame changes in the headers before it, beside the outer IP header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fix {
    /// Length and checksum of UDP.
    Udp {
        /// The source port too, by the inner flow, so that the underlay can spread flows.
        spread: bool,
    },
    /// Checksum and number of GRE, where its header has them.
    Gre,
    /// There is no IP header: the frame has this tag behind its link addresses.
    Tag,
}

impl Encapsulation {
    /// The tunnel, if it is one.
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

    /// Outer addresses of a tunnel, of this side and of the other.
    pub fn ends(&self) -> Option<(IpAddr, IpAddr)> {
        self.tunnel()?.ends()
    }

    /// What is to be taken off an interface for it.
    pub fn takes(&self) -> Option<Take> {
        self.tunnel().map(Tunnel::takes)
    }

    /// What tells it from all others on its interface.
    pub fn key(&self) -> Key {
        let key = self.tunnel().map_or(Key::WHOLE, Tunnel::key);
        Key::new(self.ends(), key)
    }

    /// The same as it is at the other end.
    pub fn reversed(&self) -> Self {
        self.tunnel().map_or(Self::Interface, Tunnel::reversed)
    }

    /// Bytes that it puts before an inner IP packet: what the interface's MTU must have room for.
    pub fn overhead(&self) -> u32 {
        let Some(tunnel) = self.tunnel() else { return 0 };
        let ip = match tunnel.ends() {
            None => return 0,
            Some((IpAddr::V4(_), _)) => outer::IPV4_BYTES,
            Some((IpAddr::V6(_), _)) => outer::IPV6_BYTES,
        };
        (ip + tunnel.header().bytes.len() + ether::HEADER_BYTES) as u32
    }

    /// What is out of range, if anything is.
    pub fn fault(&self) -> Option<&'static str> {
        let tunnel = self.tunnel()?;
        if tunnel.number().is_some_and(|key| !tunnel.kind().keys.contains(&key)) {
            return Some("has a key beyond those of its kind");
        }
        let mixed =
            tunnel.ends().is_some_and(|(local, remote)| local.is_ipv4() != remote.is_ipv4());
        mixed.then_some("has addresses of different families")
    }
}

/// `the whole interface`, or a tunnel as `vxlan 192.0.2.1 > 192.0.2.2 vni 7 port 4789`.
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

/// What is taken off an interface for tunnels: as many may share one of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Take {
    /// UDP to here.
    Udp {
        /// Outer destination address.
        local: IpAddr,
        /// Destination port.
        port: u16,
    },
    /// Ethernet in GRE to here.
    Gre {
        /// Outer destination address.
        local: IpAddr,
    },
    /// A VLAN, whoever its frames are for.
    Vlan {
        /// Its identifier.
        id: u16,
    },
}

impl Take {
    /// The UDP port, where it is one.
    pub fn udp_port(&self) -> Option<u16> {
        match self {
            Self::Udp { port, .. } => Some(*port),
            Self::Gre { .. } | Self::Vlan { .. } => None,
        }
    }

    /// Whether frames come that are not for the interface's own link address, as of a whole interface.
    pub fn is_anybodys(&self) -> bool {
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

/// Outer addresses and what tells tunnels between them apart: what a frame is looked up by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key {
    local: u128,
    remote: u128,
    /// What the kind says, and [`V4`].
    rest: u64,
}

/// Over IPv4.
const V4: u64 = 1 << 63;

impl Key {
    /// Of the whole interface.
    const WHOLE: u64 = 0;

    /// Of a UDP port and 24 bits behind it: VXLAN's and Geneve's identifier, which stand at one place.
    /// An address and port has tunnels of one kind.
    #[inline]
    pub fn vni(port: u16, vni: u32) -> u64 {
        1 << 60 | u64::from(port) << 32 | u64::from(vni & (vxlan::VNI_END - 1))
    }

    /// Of a pair of UDP ports.
    #[inline]
    pub fn ports(local: u16, remote: u16) -> u64 {
        2 << 60 | u64::from(local) << 16 | u64::from(remote)
    }

    /// Of a key of GRE, or of having none.
    #[inline]
    pub fn gre(key: Option<u32>) -> u64 {
        3 << 60 | key.map_or(0, |key| 1 << 32 | u64::from(key))
    }

    /// Of a VLAN.
    pub fn vlan(id: u16) -> u64 {
        4 << 60 | u64::from(id)
    }

    /// Of a frame without outer addresses.
    pub fn without_ends(key: u64) -> Self {
        Self::new(None, key)
    }

    /// The same from anybody.
    pub fn of_anybody(self) -> Self {
        Self { remote: 0, ..self }
    }

    #[inline]
    fn new(ends: Option<(IpAddr, IpAddr)>, key: u64) -> Self {
        let Some((local, remote)) = ends else { return Self { local: 0, remote: 0, rest: key } };
        let family = if local.is_ipv4() { V4 } else { 0 };
        Self { local: bits(local), remote: bits(remote), rest: family | key }
    }

    /// Of a frame with these outer headers: who has the `key` between its addresses.
    #[inline]
    pub fn of(outer: &Outer, key: u64) -> Self {
        Self::new(Some((outer.local, outer.remote)), key)
    }
}

impl Hash for Key {
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
            Encapsulation::Vxlan(vxlan::Tunnel { local, remote, port: 4789, vni: 7 }),
            Encapsulation::Udp(udp::Tunnel { local, remote, local_port: 5, remote_port: 6 }),
            Encapsulation::Gre(gre::Tunnel {
                local,
                remote,
                key: Some(9),
                checksum: true,
                sequence: false,
            }),
            Encapsulation::Geneve(geneve::Tunnel { local, remote, port: 6081, vni: 8 }),
            Encapsulation::Vlan(vlan::Tunnel { id: 10 }),
        ]
    }

    #[test]
    fn the_table_has_every_kind_once() {
        let kinds: Vec<_> =
            one_of_each().iter().filter_map(|by| Some(by.tunnel()?.kind())).collect();
        assert_eq!(kinds, KINDS);
        for (at, kind) in KINDS.iter().enumerate() {
            assert!(KINDS[..at].iter().all(|other| other.name != kind.name));
        }
    }

    #[test]
    fn what_people_and_messages_say_of_each() {
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
        // Over an MTU of 1,500: 1450, 1458, 1454 with key and checksum, 1450, and all of it.
        let overheads = one_of_each().map(|by| by.overhead());
        assert_eq!(overheads, [0, 50, 42, 46, 50, 0]);
        let vxlan = serde_json::to_string(&one_of_each()[1]).unwrap();
        let was = r#"{"Vxlan":{"local":"192.0.2.1","remote":"192.0.2.2","port":4789,"vni":7}}"#;
        assert_eq!(vxlan, was);
    }
}
