//! What becomes of a frame.
//!
//! A batch goes through in three steps, so that cache misses of different frames overlap: all
//! frames are parsed, all destinations looked up, all frames rewritten. Nothing is allocated.
//!
//! Only unicast packets that need nothing but a smaller TTL and another link header are forwarded
//! here. The rules, in this order:
//!
//! | frame | becomes | source |
//! |---|---|---|
//! | from a vport that the mirror has not named | punt local | |
//! | by a vport all of whose frames something in the kernel takes (a bridge, `tc`) | punt hook | |
//! | to a group address: ARP, neighbour discovery | punt neighbour | |
//! | to a group address: anything else (OSPF, IS-IS, DHCP, …) | punt local or control | RFC 1812 5.3.4 |
//! | to another station's address, none of the vport's macvlans either | drop not-for-us | |
//! | ARP | punt neighbour | |
//! | neither IPv4 nor IPv6 | punt local or control | |
//! | broken header: version, lengths, IPv4 checksum | drop malformed | RFC 1812 5.2.2 |
//! | neighbour discovery | punt neighbour | RFC 4861 |
//! | to an address of the router, to a multicast or link-local address | punt local or control | RFC 4291 2.5.6 |
//! | to or from an address that no packet on a link may have | drop policy | RFC 1812 5.3.7 |
//! | IPv4 from an address of the router | drop policy | RFC 1812 5.3.8, fib_validate_source |
//! | by a vport whose packets of this family a hook of the kernel may treat otherwise | punt hook | |
//! | the kernel does not forward this family, or IPv4 from this vport | punt exception | RFC 1812 2.2.8 |
//! | from a link-local IPv6 address | punt exception | RFC 4443 3.1 |
//! | IPv4 options, IPv6 hop-by-hop options | punt exception | RFC 8200 4.3 |
//! | TTL or hop limit 0 or 1 | punt exception | RFC 1812 5.3.1 |
//! | no route | punt exception | RFC 1812 5.2.7.1 |
//! | a route that only the kernel can follow: into a tunnel, unreachable, … | punt hook | |
//! | a blackhole route | drop blackhole | |
//! | the way's vport is down; larger than its MTU or the route's | punt exception | RFC 1191, RFC 8201 |
//! | the same of IPv4 without DF, which the kernel makes fragments of | punt hook | RFC 791 2.3 |
//! | one of several ways, where the kernel chooses otherwise; a way that is hooked | punt hook | |
//! | the neighbour's link address is not known | punt neighbour | |
//! | the same, and it is no gateway, and many such stations are asked for already, whatever else the packet would be punted for | drop unresolved | |
//! | else | out of the way's vport | |
//!
//! `control` has the packets of routing protocols among those for the router itself: LLC frames (IS-IS, spanning tree),
//! and IP packets with a DSCP of CS6 or CS7 (RFC 4594 3.1).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use pdp_proto::routes::Vport;
use pdp_wire::tag::{GuestDrop, PuntClass};
use pdp_wire::{ether, flow, ipv4, ipv6};

use crate::fib::{Fib, Route};

/// What becomes of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Out of this vport.
    Out(u16),
    /// To the control guest.
    Punt(PuntClass),
    /// Dropped.
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

/// Frames that are decided on together at most.
pub const FRAMES_MAX: usize = 64;

/// Some frames to decide on.
pub trait Frames {
    /// How many.
    fn count(&self) -> usize;
    /// The vport that a frame came by.
    fn vport(&self, frame: usize) -> u16;
    /// Its bytes.
    fn bytes(&self, frame: usize) -> &[u8];
    /// Its bytes, to change.
    fn bytes_mut(&mut self, frame: usize) -> &mut [u8];
    /// Cuts the frame's end off.
    fn cut(&mut self, frame: usize, bytes: usize);
    /// Says what becomes of it; once for each frame.
    fn decide(&mut self, frame: usize, decision: Decision);
}

/// A packet of a batch that its route has a say in.
#[derive(Clone, Copy, Debug)]
pub struct Routed {
    frame: u32,
    packet_bytes: u32,
    /// It goes to the kernel in any case, unless that were to ask for too many neighbours then.
    punt: Option<PuntClass>,
}

impl Routed {
    /// Its frame's number in the batch.
    #[inline]
    pub fn frame(&self) -> usize {
        self.frame as usize
    }

    /// Has it leave by `vport` for the station `to`, whatever its route says: with another link header, and a smaller TTL
    /// or hop limit.
    pub fn send(&self, fib: &Fib, frames: &mut impl Frames, vport: u16, to: [u8; 6]) -> Decision {
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

    /// Writes the link header, destination and source, takes one off its TTL or hop limit, and cuts off what is behind
    /// the packet: Ethernet's padding, or nothing.
    #[inline]
    fn write(&self, frames: &mut impl Frames, addresses: &[u8; 12]) {
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

/// The packets of one family in a batch.
#[derive(Debug)]
struct Family<A> {
    frames: Vec<Routed>,
    destinations: Vec<A>,
    values: Vec<u32>,
}

impl<A: Copy> Family<A> {
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

    /// Leaves those that `keep` says.
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

    /// Looks all destinations up.
    fn look_up(&mut self, look_up: impl FnOnce(&[A], &mut [u32])) {
        self.values.resize(self.destinations.len(), 0);
        look_up(&self.destinations, &mut self.values);
    }

    /// Packet, destination, value.
    fn iter(&self) -> impl Iterator<Item = (Routed, A, u32)> {
        let looked_up = self.destinations.iter().zip(&self.values);
        self.frames.iter().zip(looked_up).map(|(&packet, (&d, &v))| (packet, d, v))
    }
}

/// A packet that its route decides on, or that goes to the kernel with this class.
enum Packet {
    V4(ipv4::Header, Option<PuntClass>),
    V6(ipv6::Header, Option<PuntClass>),
}

/// Forwards batches; keeps the memory that a batch needs.
#[derive(Debug)]
pub struct Forwarder {
    v4: Family<u32>,
    v6: Family<u128>,
}

impl Default for Forwarder {
    fn default() -> Self {
        Self { v4: Family::new(), v6: Family::new() }
    }
}

impl Forwarder {
    /// Decides on every frame, of [`FRAMES_MAX`] at most, and rewrites those that go out.
    pub fn process(&mut self, fib: &mut Fib, frames: &mut impl Frames) {
        self.classify(fib, frames);
        self.route(fib, frames);
    }

    /// All rules up to the route, for every frame, of [`FRAMES_MAX`] at most: decides on those that have no route.
    pub fn classify(&mut self, fib: &Fib, frames: &mut impl Frames) {
        let Self { v4, v6 } = self;
        v4.clear();
        v6.clear();
        for frame in 0..frames.count() {
            match classify(fib, frames.vport(frame), frames.bytes(frame)) {
                Ok(Packet::V4(header, punt)) => {
                    v4.push(frame, header.packet_bytes, punt, header.destination);
                }
                Ok(Packet::V6(header, punt)) => {
                    v6.push(frame, header.packet_bytes, punt, header.destination);
                }
                Err(decision) => frames.decide(frame, decision),
            }
        }
    }

    /// Packets of IPv4 that a route is to decide on.
    pub fn routed_v4(&self) -> &[Routed] {
        &self.v4.frames
    }

    /// The same of IPv6.
    pub fn routed_v6(&self) -> &[Routed] {
        &self.v6.frames
    }

    /// Leaves to routes those packets of IPv4 that `keep` says, which has decided on the others.
    pub fn retain_v4(&mut self, keep: impl FnMut(Routed) -> bool) {
        self.v4.retain(keep);
    }

    /// The same of IPv6.
    pub fn retain_v6(&mut self, keep: impl FnMut(Routed) -> bool) {
        self.v6.retain(keep);
    }

    /// The rules from the route on, for all packets that [`Self::classify`] left to them.
    pub fn route(&mut self, fib: &mut Fib, frames: &mut impl Frames) {
        let Self { v4, v6 } = self;
        v4.look_up(|destinations, values| fib.lookup_v4(destinations, values));
        v6.look_up(|destinations, values| fib.lookup_v6(destinations, values));
        leave(fib, frames, v4, |to| Ipv4Addr::from(to).into(), false);
        leave(fib, frames, v6, |to| Ipv6Addr::from(to).into(), true);
    }
}

/// All rules up to the route.
#[inline]
fn classify(fib: &Fib, vport: u16, frame: &[u8]) -> Result<Packet, Decision> {
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
            && ipv6::Header::parse(packet).is_some_and(|ip| ipv6::is_discovery(packet, &ip));
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
            let header = ipv4::Header::parse(packet).ok_or(MALFORMED)?;
            classify_v4(fib, vport, packet, &header).map(|punt| Packet::V4(header, punt))
        }
        ether::kind::IPV6 => {
            let header = ipv6::Header::parse(packet).ok_or(MALFORMED)?;
            classify_v6(fib, vport, packet, &header).map(|punt| Packet::V6(header, punt))
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
    header: &ipv4::Header,
) -> Result<Option<PuntClass>, Decision> {
    let &ipv4::Header { source, destination, .. } = header;
    // 0/8 and 127/8 (RFC 1122 3.2.1.3), and from 224/4 on: multicast, reserved, broadcast.
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
    header: &ipv6::Header,
) -> Result<Option<PuntClass>, Decision> {
    let &ipv6::Header { source, destination, .. } = header;
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

/// Where a packet goes.
#[derive(Clone, Copy, Debug)]
struct Found {
    vport: u16,
    /// Destination and source of the link header.
    addresses: [u8; 12],
    /// Largest packet.
    packet_bytes_max: u32,
    /// Whether all packets of its route go there that are no larger.
    all: bool,
}

/// Decides on a frame with an IP packet that is larger than its path carries.
#[cold]
fn too_big(frame: &[u8]) -> Decision {
    match frame.split_first_chunk::<{ ether::HEADER_BYTES }>() {
        Some(([.., 0x08, 0x00], packet)) if !ipv4::must_not_be_fragmented(packet) => HOOK,
        _ => EXCEPTION,
    }
}

/// The rules from the route on, for the packets of one family. Those that go out get their link header, their
/// length, and a smaller TTL or hop limit.
#[inline]
fn leave<A: Copy>(
    fib: &mut Fib,
    frames: &mut impl Frames,
    packets: &Family<A>,
    address: impl Fn(A) -> IpAddr,
    v6: bool,
) {
    // Most have the route of the one before.
    let mut last: Option<(u32, Found)> = None;
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

/// The rules from the route on, for one packet.
#[inline(never)]
fn find(
    fib: &mut Fib,
    frames: &impl Frames,
    packet: Routed,
    destination: impl Fn() -> IpAddr,
    value: u32,
    v6: bool,
) -> Result<Found, Decision> {
    let mut punt = packet.punt.map(Decision::Punt);
    let or = |punt: Option<Decision>, other| Err(punt.unwrap_or(other));
    let group = match Fib::route(value) {
        Route::Group(group) => group,
        Route::Drop => return or(punt, Decision::Drop(GuestDrop::Blackhole)),
        Route::Punt => return or(punt, HOOK),
        Route::None => return or(punt, EXCEPTION),
    };
    let frame = packet.frame as usize;
    let Some(way) = fib.way(group, || flow::ip(frames.bytes(frame)) ^ fib.seed()) else {
        return or(punt, EXCEPTION);
    };
    if way.chosen && !fib.chooses(v6) {
        punt = punt.or(Some(HOOK));
    }
    let Some(egress) = fib.vport(way.vport).filter(|egress| egress.up) else {
        return or(punt, EXCEPTION);
    };
    let packet_bytes_max = egress.mtu.min(way.mtu);
    if packet.packet_bytes > packet_bytes_max {
        punt = punt.or_else(|| Some(too_big(frames.bytes(frame))));
    }
    let back = if v6 { egress.hooked.back_v6 } else { egress.hooked.back_v4 };
    if egress.hooked.out || back && way.vport == frames.vport(frame) {
        punt = punt.or(Some(HOOK));
    }
    let mut addresses = [0; 12];
    addresses[6..].copy_from_slice(&egress.mac);
    let Some(mac) = fib.link_address(&way, &destination) else {
        // Whatever it goes to the kernel for, that asks for the station.
        return match fib.may_ask(&way, destination) {
            true => or(punt, NEIGHBOUR),
            false => Err(Decision::Drop(GuestDrop::Unresolved)),
        };
    };
    addresses[..6].copy_from_slice(&mac);
    let all = way.gateway.is_some() && !way.chosen && !back;
    punt.map_or(Ok(Found { vport: way.vport, addresses, packet_bytes_max, all }), Err)
}
