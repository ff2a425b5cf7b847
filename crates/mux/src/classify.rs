//! Maps an arriving frame to its vnet and port.
//!
//! Never rewrites the frame: says where the inner frame is. Never panics, whatever the bytes. One
//! hash look-up a frame of VXLAN and three at most, however many addresses, ports and tunnels there
//! are. What an interface's tunnels do not take goes to the vlink that takes the whole interface, if
//! there is one.
//! Source: RFC 7348 sections 4 and 5, RFC 6935; docs/ARCHITECTURE.md.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::{BuildHasherDefault, Hasher};
use std::net::IpAddr;
use std::ops::Range;

use pdp_proto::mux::Encapsulation;
use pdp_wire::{ether, flow, outer, vxlan};

use crate::counters::OuterReason;

/// A port, as workers name it to each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortRef {
    /// The worker that owns its vnet.
    pub worker: u16,
    /// The vnet's slot there.
    pub vnet: u16,
    /// The port, counted over all nodes of the vnet.
    pub port: u16,
    /// Changes with the layout of the slot, so that a reference from before is noticed.
    pub generation: u32,
}

/// Why a vlink's end can't be had on an interface.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Taken {
    /// Another vlink has it.
    #[error("is taken by another vlink")]
    Taken,
    /// VXLAN and Ethernet in UDP can't share a port.
    #[error("uses UDP port {0} of {1}, which another vlink uses for the other kind of tunnel")]
    Mixed(u16, IpAddr),
    /// Something is out of range.
    #[error("{0}")]
    Range(&'static str),
}

/// What the vlinks on one external interface take.
#[derive(Clone, Debug, Default)]
pub struct Table {
    /// Where tunnels' frames are addressed to; not looked at if nobody else can be meant.
    mac: Option<[u8; 6]>,
    /// What kind of tunnels each local address and port has; true: VXLAN.
    services: HashMap<Service, bool, BuildHasherDefault<flow::Hash>>,
    tunnels: HashMap<Key, PortRef, BuildHasherDefault<flow::Hash>>,
    interface: Option<PortRef>,
}

/// The tables of all external interfaces, by slot.
pub type Classifier = Vec<Table>;

impl Table {
    /// Takes nothing yet. `mac` is the interface's link address; without one, tunnels' frames may
    /// be addressed to anybody.
    pub fn new(mac: Option<[u8; 6]>) -> Self {
        Self { mac, ..Self::default() }
    }

    /// Gives what `by` says to `port`.
    pub fn insert(&mut self, by: &Encapsulation, port: PortRef) -> Result<(), Taken> {
        let (local, remote, kind) = match *by {
            Encapsulation::Interface => {
                return match self.interface.replace(port) {
                    None => Ok(()),
                    Some(_) => Err(Taken::Taken),
                };
            }
            Encapsulation::Vxlan { vni: vxlan::VNI_END.., .. } => {
                return Err(Taken::Range("has a VNI of more than 24 bits"));
            }
            Encapsulation::Vxlan { local, remote, port, vni } => {
                (local, remote, Kind::Vxlan { port, vni })
            }
            Encapsulation::Udp { local, remote, local_port, remote_port } => {
                (local, remote, Kind::Udp { local_port, remote_port })
            }
        };
        if local.is_ipv4() != remote.is_ipv4() {
            return Err(Taken::Range("has addresses of different families"));
        }
        let (number, is_vxlan) = match kind {
            Kind::Vxlan { port, .. } => (port, true),
            Kind::Udp { local_port, .. } => (local_port, false),
        };
        match self.services.entry(Service::new(local, number)) {
            Entry::Occupied(known) if *known.get() != is_vxlan => {
                return Err(Taken::Mixed(number, local));
            }
            Entry::Occupied(_) => {}
            Entry::Vacant(free) => {
                free.insert(is_vxlan);
            }
        }
        match self.tunnels.insert(Key::new(local, remote, kind), port) {
            None => Ok(()),
            Some(_) => Err(Taken::Taken),
        }
    }

    /// The port that takes the whole interface, if there are no tunnels beside it.
    pub fn sole(&self) -> Option<PortRef> {
        self.interface.filter(|_| self.tunnels.is_empty())
    }

    /// Whose `frame` is, and where the inner frame is in it.
    pub fn classify(&self, frame: &[u8]) -> Result<(PortRef, Range<usize>), OuterReason> {
        let otherwise = |reason| match self.interface {
            Some(port) => Ok((port, 0..frame.len())),
            None => Err(reason),
        };
        let outer = match outer::parse(frame) {
            Ok(outer) => outer,
            Err(not) => return otherwise(not.into()),
        };
        let mut inner = outer.payload();
        let tunnel = |kind| self.tunnels.get(&Key::new(outer.local, outer.remote, kind));
        let vni = vxlan::parse(&frame[inner.clone()]);
        let vxlan = vni.and_then(|vni| tunnel(Kind::Vxlan { port: outer.local_port, vni }));
        let port = match vxlan {
            Some(port) => {
                inner.start += vxlan::HEADER_BYTES;
                port
            }
            // An address and port has one kind of tunnels.
            None => match self.services.get(&Service::new(outer.local, outer.local_port)) {
                Some(true) if vni.is_none() => return otherwise(OuterReason::VxlanHeader),
                Some(true) | None => return otherwise(OuterReason::UnknownTunnel),
                Some(false) => {
                    let (local_port, remote_port) = (outer.local_port, outer.remote_port);
                    match tunnel(Kind::Udp { local_port, remote_port }) {
                        Some(port) => port,
                        None => return otherwise(OuterReason::UnknownTunnel),
                    }
                }
            },
        };
        if let Some(mac) = self.mac
            && ether::Header::parse(frame).is_none_or(|header| header.destination != mac)
        {
            return otherwise(OuterReason::OtherMac);
        }
        if !outer.checksum_ok(frame, vxlan.is_some()) {
            return Err(OuterReason::UdpChecksum);
        }
        Ok((*port, inner))
    }
}

/// Where tunnels' frames arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Service {
    local: u128,
    /// The port, and [`V4`].
    rest: u64,
}

impl Service {
    fn new(local: IpAddr, port: u16) -> Self {
        let family = if local.is_ipv4() { V4 } else { 0 };
        Self { local: bits(local), rest: family | u64::from(port) }
    }
}

impl std::hash::Hash for Service {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64((self.local >> 64) as u64 ^ self.local as u64);
        state.write_u64(self.rest);
    }
}

enum Kind {
    Vxlan { port: u16, vni: u32 },
    Udp { local_port: u16, remote_port: u16 },
}

/// Addresses, and what tells tunnels between them apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Key {
    local: u128,
    remote: u128,
    rest: u64,
}

const V4: u64 = 1 << 63;
const VXLAN: u64 = 1 << 62;

impl Key {
    fn new(local: IpAddr, remote: IpAddr, kind: Kind) -> Self {
        let family = if local.is_ipv4() { V4 } else { 0 };
        let rest = match kind {
            Kind::Vxlan { port, vni } => VXLAN | u64::from(port) << 32 | u64::from(vni),
            Kind::Udp { local_port, remote_port } => {
                u64::from(local_port) << 16 | u64::from(remote_port)
            }
        };
        Self { local: bits(local), remote: bits(remote), rest: family | rest }
    }
}

impl std::hash::Hash for Key {
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
    use proptest::prelude::*;

    const MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];

    fn reference(port: u16) -> PortRef {
        PortRef { worker: 0, vnet: 0, port, generation: 1 }
    }

    fn address(six: bool, last: u8) -> IpAddr {
        if six {
            format!("2001:db8::{last}").parse().unwrap()
        } else {
            IpAddr::from([10, 0, 0, last])
        }
    }

    /// The frame that the other end of `by` sends.
    fn arriving(by: &Encapsulation, mac: [u8; 6]) -> Vec<u8> {
        let (local, remote, ports, inner) = match *by {
            Encapsulation::Interface => return vec![0; 60],
            Encapsulation::Vxlan { local, remote, port, vni } => {
                (local, remote, [50_000, port], vxlan::emit(vni).to_vec())
            }
            Encapsulation::Udp { local, remote, local_port, remote_port } => {
                (local, remote, [remote_port, local_port], vec![])
            }
        };
        let template = outer::Template::new(remote, local, ports, &inner).unwrap();
        let mut frame = vec![0; template.len()];
        frame.extend(b"inner");
        template.write(&mut frame, mac, [9; 6], None).unwrap();
        frame
    }

    fn encapsulation() -> impl Strategy<Value = Encapsulation> {
        let ends = (any::<bool>(), 1u8..4, 4u8..7);
        prop_oneof![
            (ends.clone(), 4789u16..4791, 0u32..4).prop_map(|((six, l, r), port, vni)| {
                Encapsulation::Vxlan { local: address(six, l), remote: address(six, r), port, vni }
            }),
            (ends, 4790u16..4793, 7u16..9).prop_map(|((six, l, r), local_port, remote_port)| {
                let (local, remote) = (address(six, l), address(six, r));
                Encapsulation::Udp { local, remote, local_port, remote_port }
            }),
        ]
    }

    proptest! {
        /// Against a walk through all that was accepted.
        #[test]
        fn finds_what_a_linear_scan_finds(
            wanted in prop::collection::vec(encapsulation(), 0..40),
            asked in prop::collection::vec(encapsulation(), 1..20),
            whole: bool,
        ) {
            let mut table = Table::new(Some(MAC));
            let mut accepted: Vec<(Encapsulation, u16)> = vec![];
            if whole {
                table.insert(&Encapsulation::Interface, reference(999)).unwrap();
            }
            let service = |by: &Encapsulation| match *by {
                Encapsulation::Vxlan { local, port, .. } => (local, port, true),
                Encapsulation::Udp { local, local_port, .. } => (local, local_port, false),
                Encapsulation::Interface => unreachable!(),
            };
            for (port, by) in wanted.iter().enumerate() {
                let (address, number, vxlan) = service(by);
                let mixed = accepted.iter().any(|(other, _)| {
                    let other = service(other);
                    (other.0, other.1) == (address, number) && other.2 != vxlan
                });
                let taken = accepted.iter().any(|(other, _)| other == by);
                let result = table.clone().insert(by, reference(port as u16));
                prop_assert_eq!(result.is_ok(), !mixed && !taken);
                if result.is_ok() {
                    table.insert(by, reference(port as u16)).unwrap();
                    accepted.push((by.clone(), port as u16));
                }
            }
            for by in &asked {
                let frame = arriving(by, MAC);
                let found = table.classify(&frame);
                match accepted.iter().find(|(other, _)| other == by) {
                    Some((_, port)) => {
                        let (found, inner) = found.unwrap();
                        prop_assert_eq!(found.port, *port);
                        prop_assert_eq!(&frame[inner], b"inner");
                    }
                    None if whole => prop_assert_eq!(found, Ok((reference(999), 0..frame.len()))),
                    None => prop_assert!(found.is_err()),
                }
            }
        }

        #[test]
        fn noise_never_panics(bytes: Vec<u8>, by in encapsulation(), at: prop::sample::Index) {
            let mut table = Table::new(Some(MAC));
            table.insert(&by, reference(1)).unwrap();
            let _ = table.classify(&bytes);
            let mut frame = arriving(&by, MAC);
            let at = at.index(frame.len());
            frame[at] ^= bytes.first().unwrap_or(&1);
            let _ = table.classify(&frame[..at]);
            let _ = table.classify(&frame);
        }
    }

    #[test]
    fn reasons_are_told_apart() {
        for six in [false, true] {
            let (local, remote) = (address(six, 1), address(six, 2));
            let by = Encapsulation::Vxlan { local, remote, port: 4789, vni: 7 };
            let mut table = Table::new(Some(MAC));
            table.insert(&by, reference(1)).unwrap();
            assert_eq!(table.insert(&by, reference(2)), Err(Taken::Taken));
            let good = arriving(&by, MAC);
            assert!(table.classify(&good).is_ok());
            let other = table.classify(&arriving(&by, [2, 0, 0, 0, 0, 9]));
            assert_eq!(other.unwrap_err(), OuterReason::OtherMac);
            let anybodys = Table { mac: None, ..table.clone() };
            assert!(anybodys.classify(&arriving(&by, [2, 0, 0, 0, 0, 9])).is_ok());
            let udp = if six { 54 } else { 34 };
            let mut frame = good.clone();
            frame[udp + 8] = 0;
            assert_eq!(table.classify(&frame).unwrap_err(), OuterReason::VxlanHeader);
            let mut frame = good.clone();
            frame[udp + 7] ^= 1;
            assert_eq!(table.classify(&frame).unwrap_err(), OuterReason::UdpChecksum);
            frame[udp + 6..udp + 8].fill(0);
            assert!(table.classify(&frame).is_ok());
            let unknown = Encapsulation::Vxlan { local, remote, port: 4789, vni: 8 };
            let unknown = table.classify(&arriving(&unknown, MAC));
            assert_eq!(unknown.unwrap_err(), OuterReason::UnknownTunnel);
        }
        let (local, remote) = (address(true, 1), address(true, 2));
        let by = Encapsulation::Udp { local, remote, local_port: 5, remote_port: 6 };
        let mut table = Table::new(Some(MAC));
        table.insert(&by, reference(1)).unwrap();
        let mut frame = arriving(&by, MAC);
        frame[60..62].fill(0);
        assert_eq!(table.classify(&frame).unwrap_err(), OuterReason::UdpChecksum);
    }
}
