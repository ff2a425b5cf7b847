//! Maps an arriving frame to its vnet and port.
//!
//! The classifier never modifies the frame; it returns the position of the inner frame. It never
//! panics, whatever the bytes. A frame of VXLAN, Geneve, GRE or a VLAN takes one hash look-up,
//! and Ethernet in UDP two. Four is the most, however many addresses, ports and tunnels exist.
//!
//! A frame that matches none of an interface's tunnels goes to
//! the vlink that takes the whole interface, if there is one.
//!
//! With GRE sequence numbers, late frames are dropped. A
//! table that replaces another starts the numbers anew.
//!
//! Source: RFC 7348 sections 4 and 5, RFC 6935, RFC 2890, RFC 8926; docs/ARCHITECTURE.md.

use std::collections::{HashMap, HashSet};
use std::hash::BuildHasherDefault;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use pdp_proto::mux::Encapsulation;
use pdp_wire::outer::{NotATunnel, Outer, OuterPayload};
use pdp_wire::tunnel::{Take, TunnelKey, TunnelKind};
use pdp_wire::{ether, flow, geneve, outer, udp, vlan, vxlan};

use crate::counters::OuterReason;

/// Reference to a port, as workers exchange it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortRef {
    /// The worker that owns its vnet.
    pub worker: u16,
    /// The vnet's slot there.
    pub vnet: u16,
    /// The port, counted over all nodes of the vnet.
    pub port: u16,
    /// Changes with the slot's layout, so that stale references are detected.
    pub generation: u32,
}

/// Reason why an external end can't use an interface.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TunnelInsertError {
    /// Another vlink uses the same key.
    #[error("is already used by another vlink")]
    Taken,
    /// Two kinds of tunnels can't use the same address and port.
    #[error("uses {0}, which another vlink uses for {1}")]
    Mixed(Take, &'static str),
    /// A value is out of range.
    #[error("{0}")]
    Range(&'static str),
}

/// Tunnels and vlinks on one external interface.
#[derive(Clone, Debug, Default)]
pub struct TunnelTable {
    /// Destination MAC address of tunnelled frames. `None`:
    /// not checked, because every frame is for this interface.
    mac: Option<[u8; 6]>,
    /// Kind of the tunnels on each address and port or protocol.
    services: HashMap<Take, &'static TunnelKind, BuildHasherDefault<flow::FlowHash>>,
    tunnels: HashMap<TunnelKey, TunnelEntry, BuildHasherDefault<flow::FlowHash>>,
    /// All keys, for any remote address.
    keys: HashSet<TunnelKey, BuildHasherDefault<flow::FlowHash>>,
    interface: Option<PortRef>,
}

/// A tunnel, found by its key.
#[derive(Clone, Debug)]
struct TunnelEntry {
    port: PortRef,
    check: HeaderCheck,
}

/// Check of the tunnel kind's own header, once the tunnel is known.
#[derive(Clone, Debug)]
enum HeaderCheck {
    Vxlan,
    Udp,
    Geneve,
    Gre { checksum: bool, sequence: Option<Arc<Sequence>> },
    Vlan,
}

/// Lowest sequence number that the tunnel's next frame may have; 0: any (Linux's ip_tunnel_rcv).
#[derive(Debug, Default)]
struct Sequence(AtomicU32);

impl Sequence {
    /// True if a frame with this number is in order. It then becomes the latest number.
    fn accept(&self, number: u32) -> bool {
        let in_order = |next: u32| {
            let is_late = next != 0 && (number.wrapping_sub(next) as i32) < 0;
            (!is_late).then_some(number.wrapping_add(1))
        };
        self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, in_order).is_ok()
    }
}

/// Position of the inner frame in a classified frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InnerFrame {
    /// The whole frame.
    Whole,
    /// Behind outer headers.
    Behind(Range<usize>),
    /// The frame without its outermost tag.
    Untagged,
}

/// Tables of all external interfaces, by slot.
pub type Classifier = Vec<TunnelTable>;

impl TunnelTable {
    /// Returns an empty table. `mac` is the interface's MAC address.
    /// Without one, tunnelled frames may have any destination.
    pub fn new(mac: Option<[u8; 6]>) -> Self {
        Self { mac, ..Self::default() }
    }

    /// Maps the frames that `by` describes to `port`.
    pub fn insert(&mut self, by: &Encapsulation, port: PortRef) -> Result<(), TunnelInsertError> {
        let check = match by {
            Encapsulation::Interface => {
                return match self.interface.replace(port) {
                    None => Ok(()),
                    Some(_) => Err(TunnelInsertError::Taken),
                };
            }
            Encapsulation::Vxlan(_) => HeaderCheck::Vxlan,
            Encapsulation::Udp(_) => HeaderCheck::Udp,
            Encapsulation::Geneve(_) => HeaderCheck::Geneve,
            Encapsulation::Gre(tunnel) => HeaderCheck::Gre {
                checksum: tunnel.checksum,
                sequence: tunnel.sequence.then(Arc::default),
            },
            Encapsulation::Vlan(_) => HeaderCheck::Vlan,
        };
        if let Some(fault) = by.fault() {
            return Err(TunnelInsertError::Range(fault));
        }
        if let Some(tunnel) = by.tunnel() {
            let (take, kind) = (tunnel.takes(), tunnel.kind());
            let other = self.services.entry(take).or_insert(kind);
            if *other != kind {
                return Err(TunnelInsertError::Mixed(take, other.name));
            }
        }
        let key = by.key();
        match self.tunnels.insert(key, TunnelEntry { port, check }) {
            None => {
                self.keys.insert(key.without_remote());
                Ok(())
            }
            Some(_) => Err(TunnelInsertError::Taken),
        }
    }

    /// Returns the port that takes the whole interface, if the interface has no tunnels.
    pub fn sole(&self) -> Option<PortRef> {
        self.interface.filter(|_| self.tunnels.is_empty())
    }

    /// Returns the port of `frame`, and the position of the inner frame.
    #[inline]
    pub fn classify(&self, frame: &[u8]) -> Result<(PortRef, InnerFrame), OuterReason> {
        let otherwise = |reason| match self.interface {
            Some(port) => Ok((port, InnerFrame::Whole)),
            None => Err(reason),
        };
        let outer = match outer::parse(frame) {
            Ok(outer) => outer,
            Err(NotATunnel::Other) => match self.of_vlan(frame) {
                Ok(port) => return Ok((port, InnerFrame::Untagged)),
                Err(reason) => return otherwise(reason),
            },
            Err(not) => return otherwise(not.into()),
        };
        let mut inner = outer.payload();
        let entry = match self.find(&outer, &frame[inner.clone()]) {
            Ok(entry) => entry,
            Err(reason) => return otherwise(reason),
        };
        match entry.check {
            HeaderCheck::Vxlan => match vxlan::parse(&frame[inner.clone()]) {
                Some(_) => inner.start += vxlan::HEADER_BYTES,
                None => return otherwise(OuterReason::VxlanHeader),
            },
            HeaderCheck::Geneve => match geneve::parse(&frame[inner.clone()]) {
                Ok(bytes) => inner.start += bytes,
                Err(fault) => return otherwise(fault.into()),
            },
            HeaderCheck::Udp | HeaderCheck::Gre { .. } | HeaderCheck::Vlan => {}
        }
        if let Some(mac) = self.mac
            && ether::EthernetHeader::parse(frame).is_none_or(|header| header.destination != mac)
        {
            return otherwise(OuterReason::OtherMac);
        }
        let none_allowed = matches!(entry.check, HeaderCheck::Vxlan | HeaderCheck::Geneve);
        match (outer.carried, &entry.check) {
            (OuterPayload::Gre(header), HeaderCheck::Gre { checksum, sequence }) => {
                if header.has_checksum != *checksum || !outer.checksum_ok(frame, false) {
                    return Err(OuterReason::GreChecksum);
                }
                let is_late = |sequence: &Arc<Sequence>| {
                    header.sequence.is_none_or(|number| !sequence.accept(number))
                };
                if sequence.as_ref().is_some_and(is_late) {
                    return Err(OuterReason::GreSequence);
                }
            }
            _ if !outer.checksum_ok(frame, none_allowed) => return Err(OuterReason::UdpChecksum),
            _ => {}
        }
        Ok((entry.port, InnerFrame::Behind(inner)))
    }

    /// Returns the port of the VLAN that a frame is in.
    #[cold]
    fn of_vlan(&self, frame: &[u8]) -> Result<PortRef, OuterReason> {
        let id = vlan::id(frame).filter(|id| *id != 0).ok_or(OuterReason::NotATunnel)?;
        let entry = self.tunnels.get(&TunnelKey::without_ends(TunnelKey::vlan(id)));
        entry.map(|entry| entry.port).ok_or(OuterReason::UnknownTunnel)
    }

    /// Returns the tunnel of a frame with these outer headers and `payload` behind them.
    #[inline]
    fn find(&self, outer: &Outer, payload: &[u8]) -> Result<&TunnelEntry, OuterReason> {
        let found = |key| self.tunnels.get(&outer.key(key));
        let unknown = |key| match self.keys.contains(&outer.key(key).without_remote()) {
            true => OuterReason::UnknownPeer,
            false => OuterReason::UnknownTunnel,
        };
        let (remote_port, local_port) = match outer.carried {
            OuterPayload::Udp { remote_port, local_port, .. } => (remote_port, local_port),
            OuterPayload::Gre(header) => {
                let key = TunnelKey::gre(header.key);
                return found(key).ok_or_else(|| unknown(key));
            }
        };
        let vni = payload.first_chunk().map(|header: &[u8; 8]| vxlan::vni(header));
        if let Some(entry) = vni.and_then(|vni| found(TunnelKey::vni(local_port, vni))) {
            return Ok(entry);
        }
        if let Some(entry) = found(TunnelKey::ports(local_port, remote_port)) {
            return Ok(entry);
        }
        // Each address and port has one kind of tunnel.
        let kind = self.services.get(&outer.take());
        Err(match kind.map(|kind| kind.name) {
            Some(name) if name == vxlan::KIND.name && vxlan::parse(payload).is_none() => {
                OuterReason::VxlanHeader
            }
            Some(name) if name == geneve::KIND.name => match geneve::parse(payload) {
                Err(fault) => fault.into(),
                Ok(_) => unknown(TunnelKey::vni(local_port, vni.unwrap_or_default())),
            },
            Some(name) if name == udp::KIND.name => {
                unknown(TunnelKey::ports(local_port, remote_port))
            }
            Some(_) => unknown(TunnelKey::vni(local_port, vni.unwrap_or_default())),
            None => OuterReason::UnknownTunnel,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::*;
    use pdp_wire::gre;
    use proptest::prelude::*;

    const MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];

    const INNER: &[u8] = b"a frame with a header";

    fn taken_out(frame: &[u8], inner: InnerFrame) -> Vec<u8> {
        match inner {
            InnerFrame::Whole => frame.to_vec(),
            InnerFrame::Behind(inner) => frame[inner].to_vec(),
            InnerFrame::Untagged => {
                let mut frame = frame.to_vec();
                vlan::strip(&mut frame);
                frame.split_off(vlan::TAG_BYTES)
            }
        }
    }

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

    /// Returns the frame that the other end of `by` sends.
    fn arriving(by: &Encapsulation, mac: [u8; 6]) -> Vec<u8> {
        let Some(template) = outer::HeaderTemplate::new(&by.reversed()) else { return vec![0; 60] };
        let mut frame = vec![0; template.len()];
        frame.extend(INNER);
        template.write(&mut frame, mac, [9; 6]).unwrap();
        frame
    }

    fn vxlan_of(local: IpAddr, remote: IpAddr, port: u16, vni: u32) -> Encapsulation {
        Encapsulation::Vxlan(vxlan::VxlanTunnel { local, remote, port, vni })
    }

    fn udp_of(local: IpAddr, remote: IpAddr, local_port: u16, remote_port: u16) -> Encapsulation {
        Encapsulation::Udp(udp::UdpTunnel { local, remote, local_port, remote_port })
    }

    /// Returns a GRE tunnel, with a checksum if the key is odd.
    fn gre_of(local: IpAddr, remote: IpAddr, key: Option<u32>, sequence: bool) -> Encapsulation {
        let checksum = key.is_some_and(|key| key % 2 == 1);
        Encapsulation::Gre(gre::GreTunnel { local, remote, key, checksum, sequence })
    }

    fn encapsulation() -> impl Strategy<Value = Encapsulation> {
        let ends = (any::<bool>(), 1u8..4, 4u8..7);
        prop_oneof![
            (ends.clone(), 4789u16..4791, 0u32..4).prop_map(|((six, l, r), port, vni)| {
                vxlan_of(address(six, l), address(six, r), port, vni)
            }),
            (ends.clone(), 4790u16..4793, 0u32..4).prop_map(|((six, l, r), port, vni)| {
                let (local, remote) = (address(six, l), address(six, r));
                Encapsulation::Geneve(geneve::GeneveTunnel { local, remote, port, vni })
            }),
            (ends.clone(), prop::option::of(0u32..4)).prop_map(|((six, l, r), key)| gre_of(
                address(six, l),
                address(six, r),
                key,
                false
            )),
            (1u16..4).prop_map(|id| Encapsulation::Vlan(vlan::VlanTunnel { id })),
            (ends, 4790u16..4793, 7u16..9).prop_map(|((six, l, r), local_port, remote_port)| {
                udp_of(address(six, l), address(six, r), local_port, remote_port)
            }),
        ]
    }

    proptest! {
        /// Compares the table with a linear scan of all accepted entries.
        #[test]
        fn tunnel_table_matches_a_linear_scan(
            wanted in prop::collection::vec(encapsulation(), 0..40),
            asked in prop::collection::vec(encapsulation(), 1..20),
            whole: bool,
        ) {
            let mut table = TunnelTable::new(Some(MAC));
            let mut accepted: Vec<(Encapsulation, u16)> = vec![];
            if whole {
                table.insert(&Encapsulation::Interface, reference(999)).unwrap();
            }
            for (port, by) in wanted.iter().enumerate() {
                let mixed = accepted.iter().any(|(other, _)| {
                    let kind = |by: &Encapsulation| by.tunnel().unwrap().kind();
                    other.takes() == by.takes() && kind(other) != kind(by)
                });
                let taken = accepted.iter().any(|(other, _)| other.key() == by.key());
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
                        prop_assert_eq!(taken_out(&frame, inner), INNER);
                    }
                    None if whole => prop_assert_eq!(found, Ok((reference(999), InnerFrame::Whole))),
                    None => prop_assert!(found.is_err()),
                }
            }
        }

        #[test]
        fn noise_never_panics(bytes: Vec<u8>, by in encapsulation(), at: prop::sample::Index) {
            let mut table = TunnelTable::new(Some(MAC));
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
    fn classifier_distinguishes_vxlan_drop_reasons() {
        for six in [false, true] {
            let (local, remote) = (address(six, 1), address(six, 2));
            let by = vxlan_of(local, remote, 4789, 7);
            let mut table = TunnelTable::new(Some(MAC));
            table.insert(&by, reference(1)).unwrap();
            assert_eq!(table.insert(&by, reference(2)), Err(TunnelInsertError::Taken));
            let good = arriving(&by, MAC);
            assert!(table.classify(&good).is_ok());
            let other = table.classify(&arriving(&by, [2, 0, 0, 0, 0, 9]));
            assert_eq!(other.unwrap_err(), OuterReason::OtherMac);
            let anybodys = TunnelTable { mac: None, ..table.clone() };
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
        let mut table = TunnelTable::new(Some(MAC));
        table.insert(&by, reference(1)).unwrap();
        let mut frame = arriving(&by, MAC);
        frame[60..62].fill(0);
        assert_eq!(table.classify(&frame).unwrap_err(), OuterReason::UdpChecksum);
    }

    #[test]
    fn gre_geneve_and_vlan_faults_have_distinct_reasons() {
        use OuterReason::*;
        let reference = reference(1);
        for six in [false, true] {
            let (local, remote) = (address(six, 1), address(six, 2));
            let at = if six { 54 } else { 34 };
            let vni = |vni| {
                Encapsulation::Geneve(geneve::GeneveTunnel { local, remote, port: 6081, vni })
            };
            let mut table = TunnelTable::new(Some(MAC));
            for by in [gre_of(local, remote, Some(7), false), gre_of(local, remote, Some(8), false)]
            {
                table.insert(&by, reference).unwrap();
            }
            table.insert(&vni(5), reference).unwrap();
            table.insert(&Encapsulation::Vlan(vlan::VlanTunnel { id: 10 }), reference).unwrap();
            let reason = |frame: &[u8]| table.classify(frame).map(|_| ()).unwrap_err();
            let other_end = |by: &Encapsulation, change: &dyn Fn(&mut Vec<u8>)| {
                let mut frame = arriving(by, MAC);
                change(&mut frame);
                table.classify(&frame).map(|(_, inner)| taken_out(&frame, inner))
            };
            // With a checksum (7) and without (8).
            let [sealed, plain] = [7, 8].map(|key| gre_of(local, remote, Some(key), false));
            for by in [&sealed, &plain, &vni(5)] {
                assert_eq!(other_end(by, &|_| {}), Ok(INNER.to_vec()));
                assert_eq!(reason(&arriving(by, [9; 6])), OtherMac);
            }
            let mut elsewhere = arriving(&plain, MAC);
            elsewhere[at + 7] = 9;
            assert_eq!(reason(&elsewhere), UnknownTunnel, "another key");
            assert_eq!(reason(&arriving(&gre_of(local, remote, None, false), MAC)), UnknownTunnel);
            let elsewhere = gre_of(local, address(six, 3), Some(8), false);
            assert_eq!(reason(&arriving(&elsewhere, MAC)), UnknownPeer);
            let peer = geneve::GeneveTunnel { local, remote: address(six, 3), port: 6081, vni: 5 };
            assert_eq!(reason(&arriving(&Encapsulation::Geneve(peer), MAC)), UnknownPeer);
            assert_eq!(reason(&arriving(&vni(6), MAC)), UnknownTunnel);
            let with = |by: &Encapsulation, place: usize, bits: u8| {
                other_end(by, &|frame| frame[at + place] ^= bits).unwrap_err()
            };
            assert_eq!(with(&plain, 0, 0x40), GreHeader);
            assert_eq!(with(&plain, 1, 1), GreHeader);
            assert_eq!(with(&plain, 3, 1), NotATunnel, "IP in GRE");
            assert_eq!(with(&sealed, 14, 1), GreChecksum);
            // As in Linux, a checksum must be present if and only if it is configured.
            let unsealed =
                gre::GreTunnel { local, remote, key: Some(7), checksum: false, sequence: false };
            assert_eq!(reason(&arriving(&Encapsulation::Gre(unsealed), MAC)), GreChecksum);
            let sealed =
                gre::GreTunnel { local, remote, key: Some(8), checksum: true, sequence: false };
            assert_eq!(reason(&arriving(&Encapsulation::Gre(sealed), MAC)), GreChecksum);
            assert_eq!(with(&vni(5), 8, 0x40), GeneveHeader);
            assert_eq!(with(&vni(5), 8, 0x3f), GeneveHeader);
            assert_eq!(with(&vni(5), 10, 1), GeneveHeader);
            // The UDP checksum is verified after the header.
            assert_eq!(with(&vni(5), 9, 0x80), GeneveControl);
            assert_eq!(with(&vni(5), 9, 0x40), GeneveCritical);
            assert_eq!(with(&vni(5), 7, 1), UdpChecksum);
        }
        let mut table = TunnelTable::new(Some(MAC));
        table.insert(&Encapsulation::Vlan(vlan::VlanTunnel { id: 10 }), reference).unwrap();
        let tagged = |tags: &[u8]| {
            let frame = [&INNER[..12], tags, &INNER[12..]].concat();
            table.classify(&frame).map(|(_, inner)| taken_out(&frame, inner))
        };
        // Any priority and any destination.
        assert_eq!(tagged(&[0x81, 0, 0xf0, 10]), Ok(INNER.to_vec()));
        let two = [&INNER[..12], &[0x81, 0, 0, 11], &INNER[12..]].concat();
        assert_eq!(tagged(&[0x81, 0, 0, 10, 0x81, 0, 0, 11]), Ok(two), "the inner tag is its own");
        assert_eq!(tagged(&[0x81, 0, 0, 11, 0x81, 0, 0, 10]), Err(UnknownTunnel));
        assert_eq!(tagged(&[0x88, 0xa8, 0, 10]), Err(NotATunnel));
        assert_eq!(tagged(&[0x88, 0xa8, 0, 11, 0x81, 0, 0, 10]), Err(NotATunnel));
        assert_eq!(tagged(&[0x81, 0, 0xe0, 0]), Err(NotATunnel), "for its priority alone");
        assert_eq!(tagged(&[]), Err(NotATunnel));
        let short = [&INNER[..12], &[0x81, 0, 0, 10]].concat();
        assert_eq!(table.classify(&short), Err(NotATunnel));
        table.insert(&Encapsulation::Interface, PortRef { port: 2, ..reference }).unwrap();
        assert_eq!(table.classify(&short).unwrap().1, InnerFrame::Whole);
        for id in [0, 4095] {
            let range = table.insert(&Encapsulation::Vlan(vlan::VlanTunnel { id }), reference);
            assert!(matches!(range, Err(TunnelInsertError::Range(_))));
        }
    }

    /// As in Linux's ip_tunnel_rcv.
    #[test]
    fn classifier_drops_late_gre_sequence_numbers() {
        let by = gre_of(address(false, 1), address(false, 2), Some(7), true);
        let mut table = TunnelTable::new(None);
        table.insert(&by, reference(1)).unwrap();
        let arrive = |number: u32, sound: bool| {
            let template = outer::HeaderTemplate::new(&by.reversed()).unwrap().from_number(number);
            let mut frame = vec![0; template.len()];
            frame.extend(INNER);
            template.write(&mut frame, MAC, [9; 6]).unwrap();
            frame[60] ^= u8::from(!sound);
            table.classify(&frame).map(|_| ()).err()
        };
        let late = Some(OuterReason::GreSequence);
        assert_eq!(arrive(5, true), None, "the first may be any");
        assert_eq!(
            [4, 5, 6, 9, 8, 7].map(|number| arrive(number, true)),
            [late, late, None, None, late, late]
        );
        assert_eq!(arrive(1 << 30, false), Some(OuterReason::GreChecksum), "counts for nothing");
        assert_eq!(arrive(10, true), None);
        assert_eq!(arrive((1 << 31) + 20, true), late, "half of all numbers are behind");
        assert_eq!([(1 << 31) + 10, u32::MAX].map(|number| arrive(number, true)), [None; 2]);
        assert_eq!(arrive(3, true), None, "they begin again");
        let without = gre::GreTunnel {
            local: address(false, 1),
            remote: address(false, 2),
            key: Some(7),
            checksum: true,
            sequence: false,
        };
        let without = arriving(&Encapsulation::Gre(without), MAC);
        assert_eq!(table.classify(&without).map(|_| ()).err(), late);
    }
}
