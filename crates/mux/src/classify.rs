//! Maps an arriving frame to its vnet and port.
//!
//! Never rewrites the frame: says where the inner frame is. Never panics, whatever the bytes. One
//! hash look-up a frame of VXLAN, two of Ethernet in UDP and three at most, however many addresses, ports
//! and tunnels there are. What an interface's tunnels do not take goes to the vlink that takes the whole interface, if
//! there is one.
//! Source: RFC 7348 sections 4 and 5, RFC 6935; docs/ARCHITECTURE.md.

use std::collections::HashMap;
use std::hash::BuildHasherDefault;
use std::ops::Range;

use pdp_proto::mux::Encapsulation;
use pdp_wire::outer::{Carried, Outer};
use pdp_wire::tunnel::{Key, Kind, Take};
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
    /// Kinds of tunnels can't share a port.
    #[error("uses {0}, which another vlink uses for {1}")]
    Mixed(Take, &'static str),
    /// Something is out of range.
    #[error("{0}")]
    Range(&'static str),
}

/// What the vlinks on one external interface take.
#[derive(Clone, Debug, Default)]
pub struct Table {
    /// Where tunnels' frames are addressed to; not looked at if nobody else can be meant.
    mac: Option<[u8; 6]>,
    /// Of what kind the tunnels are that share what is taken off the interface.
    services: HashMap<Take, &'static Kind, BuildHasherDefault<flow::Hash>>,
    tunnels: HashMap<Key, Entry, BuildHasherDefault<flow::Hash>>,
    interface: Option<PortRef>,
}

/// A tunnel that was found by its key.
#[derive(Clone, Debug)]
struct Entry {
    port: PortRef,
    check: Check,
}

/// What of a kind's own header has to be looked at once the tunnel is known.
#[derive(Clone, Debug)]
enum Check {
    Vxlan,
    Udp,
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
        let check = match by {
            Encapsulation::Interface => {
                return match self.interface.replace(port) {
                    None => Ok(()),
                    Some(_) => Err(Taken::Taken),
                };
            }
            Encapsulation::Vxlan(_) => Check::Vxlan,
            Encapsulation::Udp(_) => Check::Udp,
        };
        if let Some(fault) = by.fault() {
            return Err(Taken::Range(fault));
        }
        if let Some(tunnel) = by.tunnel() {
            let (take, kind) = (tunnel.takes(), tunnel.kind());
            let other = self.services.entry(take).or_insert(kind);
            if *other != kind {
                return Err(Taken::Mixed(take, other.name));
            }
        }
        match self.tunnels.insert(by.key(), Entry { port, check }) {
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
        let entry = match self.find(&outer, &frame[inner.clone()]) {
            Ok(entry) => entry,
            Err(reason) => return otherwise(reason),
        };
        match entry.check {
            Check::Vxlan => match vxlan::parse(&frame[inner.clone()]) {
                Some(_) => inner.start += vxlan::HEADER_BYTES,
                None => return otherwise(OuterReason::VxlanHeader),
            },
            Check::Udp => {}
        }
        if let Some(mac) = self.mac
            && ether::Header::parse(frame).is_none_or(|header| header.destination != mac)
        {
            return otherwise(OuterReason::OtherMac);
        }
        if !outer.checksum_ok(frame, matches!(entry.check, Check::Vxlan)) {
            return Err(OuterReason::UdpChecksum);
        }
        Ok((entry.port, inner))
    }

    /// The tunnel that a frame with these outer headers and this `payload` behind them is of.
    #[inline]
    fn find(&self, outer: &Outer, payload: &[u8]) -> Result<&Entry, OuterReason> {
        let found = |key| self.tunnels.get(&Key::of(outer, key));
        let Carried::Udp { remote_port, local_port, .. } = outer.carried;
        let vni = payload.first_chunk().map(|header: &[u8; 8]| vxlan::vni(header));
        if let Some(entry) = vni.and_then(|vni| found(Key::vni(local_port, vni))) {
            return Ok(entry);
        }
        if let Some(entry) = found(Key::ports(local_port, remote_port)) {
            return Ok(entry);
        }
        // An address and port has one kind of tunnels.
        let kind = self.services.get(&Take::Udp { local: outer.local, port: local_port });
        match kind {
            Some(kind) if **kind == vxlan::KIND && vxlan::parse(payload).is_none() => {
                Err(OuterReason::VxlanHeader)
            }
            _ => Err(OuterReason::UnknownTunnel),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::*;
    use pdp_wire::udp;
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
        let Some(template) = outer::Template::new(&by.reversed()) else { return vec![0; 60] };
        let mut frame = vec![0; template.len()];
        frame.extend(b"inner");
        template.write(&mut frame, mac, [9; 6]).unwrap();
        frame
    }

    fn vxlan_of(local: IpAddr, remote: IpAddr, port: u16, vni: u32) -> Encapsulation {
        Encapsulation::Vxlan(vxlan::Tunnel { local, remote, port, vni })
    }

    fn udp_of(local: IpAddr, remote: IpAddr, local_port: u16, remote_port: u16) -> Encapsulation {
        Encapsulation::Udp(udp::Tunnel { local, remote, local_port, remote_port })
    }

    fn encapsulation() -> impl Strategy<Value = Encapsulation> {
        let ends = (any::<bool>(), 1u8..4, 4u8..7);
        prop_oneof![
            (ends.clone(), 4789u16..4791, 0u32..4).prop_map(|((six, l, r), port, vni)| {
                vxlan_of(address(six, l), address(six, r), port, vni)
            }),
            (ends, 4790u16..4793, 7u16..9).prop_map(|((six, l, r), local_port, remote_port)| {
                udp_of(address(six, l), address(six, r), local_port, remote_port)
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
            for (port, by) in wanted.iter().enumerate() {
                let mixed = accepted.iter().any(|(other, _)| {
                    let kind = |by: &Encapsulation| by.tunnel().unwrap().kind();
                    other.takes() == by.takes() && kind(other) != kind(by)
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
            let by = vxlan_of(local, remote, 4789, 7);
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
            let unknown = vxlan_of(local, remote, 4789, 8);
            let unknown = table.classify(&arriving(&unknown, MAC));
            assert_eq!(unknown.unwrap_err(), OuterReason::UnknownTunnel);
        }
        let (local, remote) = (address(true, 1), address(true, 2));
        let by = udp_of(local, remote, 5, 6);
        let mut table = Table::new(Some(MAC));
        table.insert(&by, reference(1)).unwrap();
        let mut frame = arriving(&by, MAC);
        frame[60..62].fill(0);
        assert_eq!(table.classify(&frame).unwrap_err(), OuterReason::UdpChecksum);
    }
}
