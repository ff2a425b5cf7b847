//! Verdicts on frames.
//!
//! A batch passes three steps, so that cache misses of different frames overlap: parse
//! all frames, look up all destinations, rewrite all frames. Nothing is allocated.
//!
//! This module forwards only unicast packets that need a smaller TTL and
//! another Ethernet header, and nothing else. The rules, in this order:
//!
//! | frame | verdict | source |
//! |---|---|---|
//! | from a vport that the mirror has not named | punt local | |
//! | from a vport whose frames the kernel takes entirely (a bridge, `tc`) | punt hook | |
//! | to a group address: ARP, neighbour discovery | punt neighbour | |
//! | to a group address: anything else (OSPF, IS-IS, DHCP, …) | punt local or control | RFC 1812 5.3.4 |
//! | to another station's address, and to none of the vport's macvlans | drop not-for-us | |
//! | ARP | punt neighbour | |
//! | neither IPv4 nor IPv6 | punt local or control | |
//! | broken header: version, lengths, IPv4 checksum | drop malformed | RFC 1812 5.2.2 |
//! | neighbour discovery | punt neighbour | RFC 4861 |
//! | to an address of the router, to a multicast or link-local address | punt local or control | RFC 4291 2.5.6 |
//! | to or from an address that no packet on a link may have | drop policy | RFC 1812 5.3.7 |
//! | IPv4 from an address of the router | drop policy | RFC 1812 5.3.8, fib_validate_source |
//! | from a vport where a kernel hook may change the treatment of this IP version | punt hook | |
//! | the kernel does not forward this IP version, or IPv4 from this vport | punt exception | RFC 1812 2.2.8 |
//! | from a link-local IPv6 address | punt exception | RFC 4443 3.1 |
//! | IPv4 options, IPv6 hop-by-hop options | punt exception | RFC 8200 4.3 |
//! | TTL or hop limit 0 or 1 | punt exception | RFC 1812 5.3.1 |
//! | no route | punt exception | RFC 1812 5.2.7.1 |
//! | a route that only the kernel can follow: into a tunnel, unreachable, … | punt hook | |
//! | a blackhole route | drop blackhole | |
//! | the egress vport is down; larger than its MTU or the route's | punt exception | RFC 1191, RFC 8201 |
//! | the same for IPv4 without DF, which the kernel fragments | punt hook | RFC 791 2.3 |
//! | one of several next hops, if the kernel chooses differently; a hooked egress vport | punt hook | |
//! | unknown MAC address of the neighbour | punt neighbour | |
//! | the same for a station that is no gateway, if too many such stations are being resolved; overrides any other punt | drop unresolved | |
//! | all others | out of the egress vport | |
//!
//! Among packets for the router itself, `control` covers those of routing protocols: LLC
//! frames (IS-IS, spanning tree), and IP packets with a DSCP of CS6 or CS7 (RFC 4594 3.1).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use pdp_proto::routes::Vport;
use pdp_wire::tag::{GuestDrop, PuntClass};
use pdp_wire::{ether, flow, ipv4, ipv6};

use crate::fib::{Fib, RouteVerdict};

/// Verdict on a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Send out of this vport.
    Out(u16),
    /// Punt to the control guest.
    Punt(PuntClass),
    /// Drop.
    Drop(GuestDrop),
}

const LOCAL: Decision = Decision::Punt(PuntClass::Local);
const NEIGHBOUR: Decision = Decision::Punt(PuntClass::Neighbour);
const EXCEPTION: Decision = Decision::Punt(PuntClass::Exception);
const HOOK: Decision = Decision::Punt(PuntClass::Hook);
const CONTROL: Decision = Decision::Punt(PuntClass::Control);
const MALFORMED: Decision = Decision::Drop(GuestDrop::Malformed);
const POLICY: Decision = Decision::Drop(GuestDrop::Policy);

/// Smallest traffic class with a DSCP of CS6.
const CS6: u8 = 48 << 2;

/// Maximum number of frames in a batch.
pub const FRAMES_MAX: usize = 64;

/// A batch of frames to decide on.
pub trait FrameBatch {
    /// Number of frames.
    fn count(&self) -> usize;
    /// Ingress vport of a frame.
    fn vport(&self, frame: usize) -> u16;
    /// Bytes of a frame.
    fn bytes(&self, frame: usize) -> &[u8];
    /// Bytes of a frame, to modify.
    fn bytes_mut(&mut self, frame: usize) -> &mut [u8];
    /// Truncates a frame.
    fn cut(&mut self, frame: usize, bytes: usize);
    /// Sets the verdict on a frame; called once per frame.
    fn decide(&mut self, frame: usize, decision: Decision);
}

/// A packet of a batch whose route affects the verdict.
#[derive(Clone, Copy, Debug)]
pub struct Routed {
    frame: u32,
    packet_bytes: u32,
    /// The packet is punted in any case, unless the kernel would then resolve too many neighbours.
    punt: Option<PuntClass>,
}

impl Routed {
    /// Number of its frame in the batch.
    #[inline]
    pub fn frame(&self) -> usize {
        self.frame as usize
    }

    /// Sends it out of `vport` to the station `to`, regardless of its
    /// route: with another Ethernet header, and a smaller TTL or hop limit.
    pub fn send(
        &self,
        fib: &Fib,
        frames: &mut impl FrameBatch,
        vport: u16,
        to: [u8; 6],
    ) -> Decision {
        let Some(egress) = fib.vport(vport).filter(|egress| egress.up) else {
            return Decision::Drop(GuestDrop::PortDown);
        };
        if self.packet_bytes > egress.mtu {
            return too_big(frames.bytes(self.frame()));
        }
        let mut addresses = [0; 12];
        addresses[..6].copy_from_slice(&to);
        addresses[6..].copy_from_slice(&egress.mac);
        self.write(frames, &addresses);
        Decision::Out(vport)
    }

    /// Writes destination and source MAC address, and decrements TTL or hop
    /// limit. Cuts off bytes after the packet, such as Ethernet's padding.
    #[inline]
    fn write(&self, frames: &mut impl FrameBatch, addresses: &[u8; 12]) {
        let bytes = frames.bytes_mut(self.frame());
        if let Some((header, rest)) = bytes.split_first_chunk_mut::<{ ether::HEADER_BYTES }>() {
            header[..12].copy_from_slice(addresses);
            match u16::from_be_bytes([header[12], header[13]]) {
                ether::kind::IPV6 => ipv6::decrement_hop_limit(rest),
                _ => ipv4::decrement_ttl(rest),
            }
        }
        frames.cut(self.frame(), ether::HEADER_BYTES + self.packet_bytes as usize);
    }
}

/// The packets of one IP version in a batch.
#[derive(Debug)]
struct FamilyTables<A> {
    frames: Vec<Routed>,
    destinations: Vec<A>,
    values: Vec<u32>,
}

impl<A: Copy> FamilyTables<A> {
    fn new() -> Self {
        Self {
            frames: Vec::with_capacity(FRAMES_MAX),
            destinations: Vec::with_capacity(FRAMES_MAX),
            values: Vec::with_capacity(FRAMES_MAX),
        }
    }

    fn clear(&mut self) {
        self.frames.clear();
        self.destinations.clear();
    }

    /// Keeps packets for which `keep` returns true.
    fn retain(&mut self, mut keep: impl FnMut(Routed) -> bool) {
        let mut kept = 0;
        for at in 0..self.frames.len() {
            if keep(self.frames[at]) {
                self.frames[kept] = self.frames[at];
                self.destinations[kept] = self.destinations[at];
                kept += 1;
            }
        }
        self.frames.truncate(kept);
        self.destinations.truncate(kept);
    }

    #[inline]
    fn push(&mut self, frame: usize, bytes: usize, punt: Option<PuntClass>, destination: A) {
        self.frames.push(Routed { frame: frame as u32, packet_bytes: bytes as u32, punt });
        self.destinations.push(destination);
    }

    /// Looks up all destinations.
    fn look_up(&mut self, look_up: impl FnOnce(&[A], &mut [u32])) {
        self.values.resize(self.destinations.len(), 0);
        look_up(&self.destinations, &mut self.values);
    }

    /// Iterates over packet, destination, and value.
    fn iter(&self) -> impl Iterator<Item = (Routed, A, u32)> {
        let looked_up = self.destinations.iter().zip(&self.values);
        self.frames.iter().zip(looked_up).map(|(&packet, (&d, &v))| (packet, d, v))
    }
}

/// A packet whose route decides, or that is punted with this class.
enum ParsedPacket {
    V4(ipv4::Ipv4Packet, Option<PuntClass>),
    V6(ipv6::Ipv6Packet, Option<PuntClass>),
}

/// Forwards batches; holds the memory that a batch needs.
#[derive(Debug)]
pub struct IpForwarder {
    v4: FamilyTables<u32>,
    v6: FamilyTables<u128>,
}

impl Default for IpForwarder {
    fn default() -> Self {
        Self { v4: FamilyTables::new(), v6: FamilyTables::new() }
    }
}

impl IpForwarder {
    /// Decides on all frames, at most [`FRAMES_MAX`], and rewrites those to send.
    pub fn process(&mut self, fib: &mut Fib, frames: &mut impl FrameBatch) {
        self.classify(fib, frames);
        self.route(fib, frames);
    }

    /// Applies all rules before the route to all frames, at most
    /// [`FRAMES_MAX`]. Decides on those that need no route.
    pub fn classify(&mut self, fib: &Fib, frames: &mut impl FrameBatch) {
        let Self { v4, v6 } = self;
        v4.clear();
        v6.clear();
        for frame in 0..frames.count() {
            match classify(fib, frames.vport(frame), frames.bytes(frame)) {
                Ok(ParsedPacket::V4(header, punt)) => {
                    v4.push(frame, header.packet_bytes, punt, header.destination);
                }
                Ok(ParsedPacket::V6(header, punt)) => {
                    v6.push(frame, header.packet_bytes, punt, header.destination);
                }
                Err(decision) => frames.decide(frame, decision),
            }
        }
    }

    /// IPv4 packets whose route decides.
    pub fn routed_v4(&self) -> &[Routed] {
        &self.v4.frames
    }

    /// IPv6 packets whose route decides.
    pub fn routed_v6(&self) -> &[Routed] {
        &self.v6.frames
    }

    /// Keeps IPv4 packets for which `keep` returns true; it has decided on the others.
    pub fn retain_v4(&mut self, keep: impl FnMut(Routed) -> bool) {
        self.v4.retain(keep);
    }

    /// Keeps IPv6 packets for which `keep` returns true; it has decided on the others.
    pub fn retain_v6(&mut self, keep: impl FnMut(Routed) -> bool) {
        self.v6.retain(keep);
    }

    /// Applies the rules from the route on to all packets left by [`Self::classify`].
    pub fn route(&mut self, fib: &mut Fib, frames: &mut impl FrameBatch) {
        let Self { v4, v6 } = self;
        v4.look_up(|destinations, values| fib.lookup_v4(destinations, values));
        v6.look_up(|destinations, values| fib.lookup_v6(destinations, values));
        egress(fib, frames, v4, |to| Ipv4Addr::from(to).into(), false);
        egress(fib, frames, v6, |to| Ipv6Addr::from(to).into(), true);
    }
}

/// Applies all rules before the route.
#[inline]
fn classify(fib: &Fib, vport: u16, frame: &[u8]) -> Result<ParsedPacket, Decision> {
    let Some(header) = frame.first_chunk::<{ ether::HEADER_BYTES }>() else {
        return Err(MALFORMED);
    };
    let Some(vport) = fib.vport(vport) else { return Err(LOCAL) };
    if vport.hooked.all {
        return Err(HOOK);
    }
    let (to, kind) = (&header[..6], u16::from_be_bytes([header[12], header[13]]));
    let packet = &frame[ether::HEADER_BYTES..];
    if to[0] & 1 != 0 {
        let discovery = kind == ether::kind::IPV6
            && ipv6::Ipv6Packet::parse(packet).is_some_and(|ip| ipv6::is_discovery(packet, &ip));
        return Err(if kind == ether::kind::ARP || discovery {
            NEIGHBOUR
        } else {
            own(kind, packet)
        });
    }
    if to != vport.mac && !vport.macs.iter().any(|mac| to == mac) {
        return Err(Decision::Drop(GuestDrop::NotForUs));
    }
    match kind {
        ether::kind::IPV4 => {
            let header = ipv4::Ipv4Packet::parse(packet).ok_or(MALFORMED)?;
            classify_v4(fib, vport, packet, &header).map(|punt| ParsedPacket::V4(header, punt))
        }
        ether::kind::IPV6 => {
            let header = ipv6::Ipv6Packet::parse(packet).ok_or(MALFORMED)?;
            classify_v6(fib, vport, packet, &header).map(|punt| ParsedPacket::V6(header, punt))
        }
        ether::kind::ARP => Err(NEIGHBOUR),
        _ => Err(own(kind, packet)),
    }
}

/// Decides on a packet for the router itself.
#[cold]
fn own(kind: u16, packet: &[u8]) -> Decision {
    let is_control = match (kind, packet) {
        (ether::kind::IPV4, [_, tos, ..]) => *tos >= CS6,
        (ether::kind::IPV6, [first, second, ..]) => first << 4 | second >> 4 >= CS6,
        _ => kind < ether::kind::MIN,
    };
    if is_control { CONTROL } else { LOCAL }
}

#[inline]
fn classify_v4(
    fib: &Fib,
    vport: &Vport,
    packet: &[u8],
    header: &ipv4::Ipv4Packet,
) -> Result<Option<PuntClass>, Decision> {
    let &ipv4::Ipv4Packet { source, destination, .. } = header;
    // 0/8 and 127/8 (RFC 1122 3.2.1.3), and everything from 224/4: multicast, reserved, broadcast.
    let never = |address: u32| matches!((address >> 24) as u8, 0 | 127 | 224..);
    if destination >> 28 == 0xe || destination == u32::MAX || fib.is_local_v4(destination) {
        Err(own(ether::kind::IPV4, packet))
    } else if never(destination) || never(source) || fib.is_own_v4(source) {
        Err(POLICY)
    } else if vport.hooked.v4 {
        Ok(Some(PuntClass::Hook))
    } else if !fib.forwards_v4() || !vport.forwards_v4 || header.ttl <= 1 {
        Err(EXCEPTION)
    } else {
        Ok(header.has_options().then_some(PuntClass::Exception))
    }
}

#[inline]
fn classify_v6(
    fib: &Fib,
    vport: &Vport,
    packet: &[u8],
    header: &ipv6::Ipv6Packet,
) -> Result<Option<PuntClass>, Decision> {
    let &ipv6::Ipv6Packet { source, destination, .. } = header;
    let multicast = |address: u128| address >> 120 == 0xff;
    let link_local = |address: u128| address >> 118 == 0xfe80 >> 6;
    // Unspecified and loopback.
    let never = |address: u128| address <= 1;
    if ipv6::is_discovery(packet, header)
        && (multicast(destination) || link_local(destination) || fib.is_local_v6(destination))
    {
        Err(NEIGHBOUR)
    } else if multicast(destination) || link_local(destination) || fib.is_local_v6(destination) {
        Err(own(ether::kind::IPV6, packet))
    } else if never(destination) || never(source) || multicast(source) {
        Err(POLICY)
    } else if vport.hooked.v6 {
        Ok(Some(PuntClass::Hook))
    } else if !fib.forwards_v6() || link_local(source) || header.hop_limit <= 1 {
        Err(EXCEPTION)
    } else {
        Ok((header.next_header == ipv6::HOP_BY_HOP).then_some(PuntClass::Exception))
    }
}

/// Egress of a packet.
#[derive(Clone, Copy, Debug)]
struct EgressPath {
    vport: u16,
    /// Destination and source MAC address.
    addresses: [u8; 12],
    /// Largest packet, bytes.
    packet_bytes_max: u32,
    /// True if all packets of the route up to that size have this egress.
    all: bool,
}

/// Decides on a frame with an IP packet that is larger than the path MTU.
#[cold]
fn too_big(frame: &[u8]) -> Decision {
    match frame.split_first_chunk::<{ ether::HEADER_BYTES }>() {
        Some(([.., 0x08, 0x00], packet)) if !ipv4::must_not_be_fragmented(packet) => HOOK,
        _ => EXCEPTION,
    }
}

/// Applies the rules from the route on to all packets of one IP version. Packets
/// to send get their Ethernet header, length, and a smaller TTL or hop limit.
#[inline]
fn egress<A: Copy>(
    fib: &mut Fib,
    frames: &mut impl FrameBatch,
    packets: &FamilyTables<A>,
    address: impl Fn(A) -> IpAddr,
    v6: bool,
) {
    // Most packets have the same route as the one before.
    let mut last: Option<(u32, EgressPath)> = None;
    for (packet, destination, value) in packets.iter() {
        let frame = packet.frame as usize;
        let found = match last {
            Some((route, found))
                if route == value
                    && packet.punt.is_none()
                    && packet.packet_bytes <= found.packet_bytes_max =>
            {
                Ok(found)
            }
            _ => find(fib, frames, packet, || address(destination), value, v6),
        };
        match found {
            Ok(found) => {
                if found.all {
                    last = Some((value, found));
                }
                packet.write(frames, &found.addresses);
                frames.decide(frame, Decision::Out(found.vport));
            }
            Err(decision) => frames.decide(frame, decision),
        }
    }
}

/// Applies the rules from the route on to one packet.
#[inline(never)]
fn find(
    fib: &mut Fib,
    frames: &impl FrameBatch,
    packet: Routed,
    destination: impl Fn() -> IpAddr,
    value: u32,
    v6: bool,
) -> Result<EgressPath, Decision> {
    let mut punt = packet.punt.map(Decision::Punt);
    let or = |punt: Option<Decision>, other| Err(punt.unwrap_or(other));
    let group = match Fib::route(value) {
        RouteVerdict::Group(group) => group,
        RouteVerdict::Drop => return or(punt, Decision::Drop(GuestDrop::Blackhole)),
        RouteVerdict::Punt => return or(punt, HOOK),
        RouteVerdict::None => return or(punt, EXCEPTION),
    };
    let frame = packet.frame as usize;
    let Some(hop) = fib.next_hop(group, || flow::ip(frames.bytes(frame)) ^ fib.seed()) else {
        return or(punt, EXCEPTION);
    };
    if hop.chosen && !fib.chooses(v6) {
        punt = punt.or(Some(HOOK));
    }
    let Some(egress) = fib.vport(hop.vport).filter(|egress| egress.up) else {
        return or(punt, EXCEPTION);
    };
    let packet_bytes_max = egress.mtu.min(hop.mtu);
    if packet.packet_bytes > packet_bytes_max {
        punt = punt.or_else(|| Some(too_big(frames.bytes(frame))));
    }
    let back = if v6 { egress.hooked.back_v6 } else { egress.hooked.back_v4 };
    if egress.hooked.out || back && hop.vport == frames.vport(frame) {
        punt = punt.or(Some(HOOK));
    }
    let mut addresses = [0; 12];
    addresses[6..].copy_from_slice(&egress.mac);
    let Some(mac) = fib.link_address(&hop, &destination) else {
        // Any punted packet makes the kernel resolve the station.
        return match fib.may_ask(&hop, destination) {
            true => or(punt, NEIGHBOUR),
            false => Err(Decision::Drop(GuestDrop::Unresolved)),
        };
    };
    addresses[..6].copy_from_slice(&mac);
    let all = hop.gateway.is_some() && !hop.chosen && !back;
    punt.map_or(Ok(EgressPath { vport: hop.vport, addresses, packet_bytes_max, all }), Err)
}
