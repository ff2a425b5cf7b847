//! The header pipeline's verdicts and rewritten frames against pdp-ip's.
//!
//! Each world is a card with four VEs on the same segments. Three VEs have a [`VeDriver`] and a
//! [`Fib`] that get the same messages of a mirror; the fourth is disabled. Between batches of
//! frames the mirrors send random changes. `CARD_FRAMES` sets the number of frames, `CARD_SEED` the
//! first world.
//!
//! Differences that are intended, and no others:
//!
//! | frame | pdp-ip | card |
//! |---|---|---|
//! | IPv4 header above 48 bytes | its usual verdict | punt exception |
//! | unknown station on a link, if many are being resolved | drop unresolved | punt |
//! | by a hop without gateway among several | out | punt neighbour |
//! | to a group address, if the vport is hooked or not named | punt hook, local | as any vport |
//! | to a MAC address of no VE | drop not-for-us | drop no-ve |

mod common;

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use common::Random;
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use pdp_card::header::{FRAME_BYTES_MAX, HEADER_BYTES, HOST_PORT, sizes};
use pdp_card::table::{AttachmentEntry, HopSegments, TableRange, VmacEntry};
use pdp_card::{
    CardVerdict, HeaderIn, HeaderModel, HeaderOut, LpmSegment, TableWord, TableWrite, VeDriver,
    VmacTable,
};
use pdp_ip::{Decision, FRAMES_MAX, Fib, FrameBatch, IpForwarder};
use pdp_proto::routes::{GroupHop, ResolvedRoute, RouteDecision, ToGuest, Vport, VportHooks};
use pdp_wire::ipv4::Ipv4Packet;
use pdp_wire::tag::{GuestDrop, PuntClass};

/// VEs with a mirror. The one behind them is disabled.
const ROUTERS: u8 = sizes::VES - 1;

/// Vports that the mirror names; the next one it never names, and the one behind has no place.
const NAMED: u8 = 4;
const VPORTS: u8 = NAMED + 2;

/// Frames between two changes of the tables, and such batches of a world.
const BATCH: usize = 512;
const BATCHES: usize = 16;

/// Frames without `CARD_FRAMES`.
const FRAMES: u64 = 600_000;

const IPV4: u16 = 0x0800;
const IPV6: u16 = 0x86dd;
const ARP: u16 = 0x0806;

/// Frames of a batch for one VE.
#[derive(Default)]
struct List(Vec<(u16, Vec<u8>, Option<Decision>)>);

impl FrameBatch for List {
    fn count(&self) -> usize {
        self.0.len()
    }

    fn vport(&self, frame: usize) -> u16 {
        self.0[frame].0
    }

    fn bytes(&self, frame: usize) -> &[u8] {
        &self.0[frame].1
    }

    fn bytes_mut(&mut self, frame: usize) -> &mut [u8] {
        &mut self.0[frame].1
    }

    fn cut(&mut self, frame: usize, bytes: usize) {
        self.0[frame].1.truncate(bytes);
    }

    fn decide(&mut self, frame: usize, decision: Decision) {
        assert_eq!(self.0[frame].2.replace(decision), None, "decided once");
    }
}

fn pick<T: Copy>(random: &mut Random, from: &[T]) -> T {
    from[random.below(from.len() as u64) as usize]
}

fn one_in(random: &mut Random, count: u64) -> bool {
    random.below(count) == 0
}

// Addresses: few, so that routes, neighbours, the router, and destinations often coincide.

fn v4(random: &mut Random) -> Ipv4Addr {
    let special = ["127.0.0.1", "255.255.255.255", "0.0.0.0", "0.1.2.3", "224.0.0.5"];
    let edges = ["240.0.0.1", "223.255.255.255", "239.1.1.1", "126.0.0.1", "128.0.0.0", "1.0.0.0"];
    match random.below(16) {
        0 => (random.draw() as u32).into(),
        1 => pick(random, &special).parse().unwrap(),
        2 if one_in(random, 2) => pick(random, &edges).parse().unwrap(),
        _ => {
            let [a, b, c] = [3, 3, 4].map(|bound| random.below(bound) as u8);
            Ipv4Addr::new(10, a, b, c)
        }
    }
}

fn v6(random: &mut Random) -> Ipv6Addr {
    let special = ["::1", "::", "ff02::5", "fe80::1", "febf::1", "fec0::1", "::2", "fe7f::1"];
    match random.below(16) {
        0 => random.wide().into(),
        1 => pick(random, &special).parse().unwrap(),
        _ => {
            let [a, b, c] = [3, 3, 4].map(|bound| random.below(bound) as u16);
            Ipv6Addr::new(0x2001, 0xdb8, a, 0, 0, 0, b, c)
        }
    }
}

fn address(random: &mut Random) -> IpAddr {
    if one_in(random, 2) { v4(random).into() } else { v6(random).into() }
}

/// Gateways: fewer, so that most are known.
fn gateway(random: &mut Random) -> IpAddr {
    let last = random.below(4) as u8;
    match random.below(12) {
        0 => address(random),
        1..6 => Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, last.into()).into(),
        _ => Ipv4Addr::new(10, 0, 0, last).into(),
    }
}

fn prefix(random: &mut Random) -> IpNet {
    // Host routes hide neighbours; short ones cover many of the addresses.
    match address(random) {
        IpAddr::V4(address) => {
            let length = if one_in(random, 4) { 32 } else { random.below(33) as u8 };
            Ipv4Net::new(address, length).unwrap().trunc().into()
        }
        IpAddr::V6(address) => {
            let length = if one_in(random, 4) { 128 } else { random.below(129) as u8 };
            Ipv6Net::new(address, length).unwrap().trunc().into()
        }
    }
}

/// Odd for vport 0, so that each bit of the seed that pdp-ip derives from it matters.
fn mac_of(ve: u8, vport: u8) -> [u8; 6] {
    [2, 0, 0x5c, ve, 0x9d, 0x31 + vport]
}

/// MAC address of VRRP (RFC 9568 section 7.3).
fn virtual_mac(ve: u8) -> [u8; 6] {
    [0, 0, 0x5e, 0, 1, 5 + ve]
}

/// Vports of equal number are on the same segment and port.
fn attachment(ve: u8, vport: u8) -> Option<AttachmentEntry> {
    let (port, segment) = (vport % 4, 0x0ff + u16::from(vport));
    (vport <= NAMED).then_some(AttachmentEntry { port, segment, mac: mac_of(ve, vport) })
}

fn vport(random: &mut Random, ve: u8, index: u8) -> Vport {
    let which = random.below(48);
    let hooked = VportHooks {
        all: which == 0,
        v4: which == 1,
        v6: which == 2,
        out: which == 3,
        back_v4: which == 4,
        back_v6: which == 5,
    };
    let macs = match random.below(3) {
        0 => vec![virtual_mac(ve), [2, 2, 2, 2, ve, index]],
        _ => Vec::new(),
    };
    Vport {
        index: index.into(),
        mac: mac_of(ve, index),
        mtu: pick(random, &[68, 100, 576, 1280, 1500, 1500, 1500, 1500, 9000, 1 << 20]),
        up: !one_in(random, 16),
        hooked,
        macs,
        forwards_v4: !one_in(random, 12),
    }
}

fn group(random: &mut Random) -> (Vec<GroupHop>, u32) {
    let count = pick(random, &[0, 1, 1, 1, 1, 1, 1, 1, 2, 2, 3, 4]);
    let mut hop = |_| {
        // Seldom a vport that the mirror never names.
        let known = if one_in(random, 12) { VPORTS } else { NAMED };
        GroupHop {
            vport: random.below(known.into()) as u16,
            gateway: (!one_in(random, 4)).then(|| gateway(random)),
            weight: pick(random, &[1, 1, 2, 7, 300]),
        }
    };
    let hops = (0..count).map(&mut hop).collect();
    (hops, pick(random, &[0, 0, 0, 90, 1280, 1500, 1 << 20]))
}

/// Identifiers of groups are `0..GROUPS`.
const GROUPS: u64 = 8;

fn target(random: &mut Random) -> RouteDecision {
    match random.below(16) {
        0 => RouteDecision::Punt,
        1 => RouteDecision::Drop,
        // It may have no name.
        2 => RouteDecision::Group(random.below(GROUPS) as u32),
        _ => RouteDecision::Group(random.below(GROUPS - 2) as u32),
    }
}

/// A message of the mirror after its snapshot.
fn change(random: &mut Random, ve: u8, routes: &[IpNet]) -> ToGuest {
    let on_or_off = |random: &mut Random| !one_in(random, 12);
    match random.below(20) {
        0..6 => ToGuest::Route { prefix: prefix(random), target: target(random) },
        6..9 if !routes.is_empty() => ToGuest::RouteGone(pick(random, routes)),
        6..11 => {
            let (hops, mtu) = group(random);
            ToGuest::Group { id: random.below(GROUPS) as u32, hops, mtu }
        }
        11 => ToGuest::GroupGone(random.below(GROUPS) as u32),
        12..16 => {
            let known = !one_in(random, 4);
            let mac = known.then(|| noise(random, 6).try_into().unwrap());
            let vport = random.below(VPORTS.into()) as u16;
            let address = if one_in(random, 2) { gateway(random) } else { address(random) };
            ToGuest::Neighbour { vport, address, mac }
        }
        16 if one_in(random, 2) => ToGuest::LocalGone(address(random)),
        16 => ToGuest::Local { address: address(random), own: one_in(random, 2) },
        17 => {
            let index = random.below(NAMED.into()) as u8;
            ToGuest::Vport(vport(random, ve, index))
        }
        18 => ToGuest::Forwarding { v4: on_or_off(random), v6: on_or_off(random) },
        _ => ToGuest::Choosing { v4: on_or_off(random), v6: on_or_off(random) },
    }
}

/// The mirror's snapshot.
fn snapshot(random: &mut Random, ve: u8, scattered: bool) -> Vec<ToGuest> {
    let mut messages = vec![ToGuest::Begin, ToGuest::Forwarding { v4: true, v6: true }];
    messages.extend((0..NAMED).map(|index| ToGuest::Vport(vport(random, ve, index))));
    for id in 0..GROUPS as u32 - 2 {
        let (mut hops, mtu) = group(random);
        if scattered {
            hops = vec![GroupHop { vport: id as u16 % 4, gateway: None, weight: 1 }];
        }
        messages.push(ToGuest::Group { id, hops, mtu });
    }
    for _ in 0..random.below(40) {
        messages.push(ToGuest::Route { prefix: prefix(random), target: target(random) });
    }
    for prefix in ["10.0.0.0/8", "2001:db8::/32"] {
        let target = RouteDecision::Group(random.below(GROUPS - 2) as u32);
        messages.push(ToGuest::Route { prefix: prefix.parse().unwrap(), target });
    }
    for _ in 0..50 + random.below(60) {
        let mac = Some(noise(random, 6).try_into().unwrap());
        let vport = random.below(NAMED.into()) as u16;
        let address = if one_in(random, 2) { gateway(random) } else { address(random) };
        messages.push(ToGuest::Neighbour { vport, address, mac });
    }
    for _ in 0..random.below(6) {
        messages.push(ToGuest::Local { address: address(random), own: one_in(random, 2) });
    }
    messages.push(ToGuest::End);
    messages
}

// Frames.

/// Returns the Internet checksum's sum, RFC 1071.
fn ones_sum(bytes: &[u8]) -> u16 {
    let words = bytes.chunks(2).map(|word| u32::from(word[0]) << 8 | u32::from(word[1]));
    let mut sum: u32 = words.sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

fn ttl(random: &mut Random) -> u8 {
    if one_in(random, 8) { random.below(3) as u8 } else { random.draw() as u8 }
}

fn noise(random: &mut Random, length: usize) -> Vec<u8> {
    (0..length.div_ceil(8)).flat_map(|_| random.draw().to_le_bytes()).take(length).collect()
}

/// Length of a payload: mostly short, else up to the longest frame or around a largest packet.
fn payload(random: &mut Random, header: usize) -> Vec<u8> {
    let most = FRAME_BYTES_MAX - 14 - header;
    let length = match random.below(12) {
        0 => random.below(most as u64 + 1) as usize,
        1 => {
            let mtu = pick(random, &[68, 90, 100, 576, 1280, 1500]) + random.below(3) as usize;
            mtu.saturating_sub(header + 1)
        }
        _ => random.below(80) as usize,
    };
    noise(random, length)
}

/// A length field that is seldom wrong by little.
fn length_field(random: &mut Random, right: usize) -> u16 {
    let change = if one_in(random, 24) { random.below(9) as i32 - 4 } else { 0 };
    (right as i32 + change).max(0) as u16
}

fn traffic_class(random: &mut Random) -> u8 {
    let few = [0, 0, 46 << 2, 47 << 2 | 3, 48 << 2, 56 << 2];
    if one_in(random, 2) { random.draw() as u8 } else { pick(random, &few) }
}

fn ipv4_packet(random: &mut Random) -> Vec<u8> {
    let words = if one_in(random, 8) { 5 + random.below(11) as usize } else { 5 };
    let payload = payload(random, 4 * words);
    let mut packet = vec![0; 4 * words];
    packet[0] = 0x40 | words as u8;
    packet[1] = traffic_class(random);
    let length = length_field(random, 4 * words + payload.len());
    packet[2..4].copy_from_slice(&length.to_be_bytes());
    let fragment = match random.below(8) {
        0 => random.draw() as u16,
        1 => 0x2000,
        few => (few as u16 & 1) << 14,
    };
    packet[6..8].copy_from_slice(&fragment.to_be_bytes());
    packet[8] = ttl(random);
    packet[9] =
        if one_in(random, 4) { random.draw() as u8 } else { pick(random, &[6, 17, 132, 1, 89]) };
    let source = if one_in(random, 3) { random.draw() as u32 } else { v4(random).into() };
    packet[12..16].copy_from_slice(&source.to_be_bytes());
    packet[16..20].copy_from_slice(&v4(random).octets());
    let options = noise(random, 4 * words - 20);
    packet[20..].copy_from_slice(&options);
    if one_in(random, 8) {
        // Checksums at the edges of the one's complement; the identification makes them right.
        let edge: u16 = pick(random, &[0, 0xffff, 0xfeff, 0xff00, 0xfefe, 0xff]);
        packet[10..12].copy_from_slice(&edge.to_be_bytes());
        let identification = !ones_sum(&packet);
        packet[4..6].copy_from_slice(&identification.to_be_bytes());
    } else {
        let identification = random.draw() as u16;
        packet[4..6].copy_from_slice(&identification.to_be_bytes());
        let checksum = !ones_sum(&packet);
        packet[10..12].copy_from_slice(&checksum.to_be_bytes());
    }
    packet.extend(payload);
    packet
}

fn ipv6_packet(random: &mut Random) -> Vec<u8> {
    let mut payload = payload(random, 40);
    let mut packet = vec![0; 40];
    let class = traffic_class(random);
    (packet[0], packet[1]) = (0x60 | class >> 4, class << 4 | random.below(16) as u8);
    let length = length_field(random, payload.len());
    packet[4..6].copy_from_slice(&length.to_be_bytes());
    packet[6] = match random.below(16) {
        0 => 0,
        1..5 => 58,
        5 => random.draw() as u8,
        _ => pick(random, &[6, 17, 132, 43, 89]),
    };
    if let (58, Some(kind)) = (packet[6], payload.first_mut()) {
        *kind = 128 + *kind % 12;
    }
    packet[7] = ttl(random);
    let source = if one_in(random, 3) { random.wide().into() } else { v6(random) };
    packet[8..24].copy_from_slice(&source.octets());
    packet[24..40].copy_from_slice(&v6(random).octets());
    packet.extend(payload);
    packet
}

/// Returns a frame for a vport of a VE, or for others on its segment.
fn frame(random: &mut Random, ve: u8, vport: u8, scattered: bool) -> Vec<u8> {
    let mut to = mac_of(ve, vport);
    match random.below(32) {
        0 => to = [0xff; 6],
        1 => to = [1, 0, 0x5e, 0, 0, 5],
        2 => to = [2, 9, 9, 9, 9, 9],
        3 => to = virtual_mac(ve),
        4 => to = [2, 2, 2, 2, ve, vport],
        5 => to[random.below(6) as usize] ^= 1 << random.below(8),
        _ => {}
    }
    let (kind, packet) = match random.below(20) {
        0..9 => (IPV4, ipv4_packet(random)),
        9..18 => (IPV6, ipv6_packet(random)),
        18 => {
            let kinds = [ARP, 0x8100, 0x8847, 0x88b5, 0, 60, 0x5ff, 0x600, IPV4, IPV6];
            let length = random.below(60) as usize;
            (pick(random, &kinds), noise(random, length))
        }
        _ => {
            let length = random.below(101) as usize;
            (random.draw() as u16, noise(random, length))
        }
    };
    let mut packet = packet;
    if scattered && kind == IPV6 && packet.len() >= 40 && one_in(random, 2) {
        // One of many stations on a link.
        packet[24..28].copy_from_slice(&[0x20, 0x01, 0x0d, 0xb8]);
        packet[28..40].copy_from_slice(&noise(random, 12));
    }
    let mut frame = to.to_vec();
    frame.extend([2, 7, 7, 7, 7, 7]);
    frame.extend(kind.to_be_bytes());
    frame.extend(packet);
    match random.below(12) {
        0 => frame.truncate(1 + random.below(frame.len() as u64) as usize),
        1 => {
            // Mostly a byte of the headers.
            let bytes = if one_in(random, 4) { frame.len() } else { frame.len().min(64) };
            let at = random.below(bytes as u64) as usize;
            frame[at] = random.draw() as u8;
        }
        2 => frame.extend(noise(random, 30)),
        3 => frame.resize(frame.len().max(60), 0),
        _ => {}
    }
    frame.truncate(FRAME_BYTES_MAX);
    frame
}

/// Frame that enters, and the verdict that it must have.
struct Case {
    frame: Vec<u8>,
    port: u8,
    segment: u16,
    /// VE and vport that the card must find.
    owner: Option<(u8, u8)>,
    expected: Expected,
}

enum Expected {
    /// The card's own rule.
    Card(CardVerdict),
    /// pdp-ip's: VE, decision, and frame after it. `None` before pdp-ip has decided.
    Ip(u8, Option<Decision>, Vec<u8>),
    /// A frame to a group that the VE's vport does not take as others do.
    AnyPunt,
}

#[derive(Default)]
struct Counts {
    verdicts: BTreeMap<CardVerdict, u64>,
    long_headers: u64,
    unresolved: u64,
    gatewayless: u64,
    groups: u64,
    groups_skipped: u64,
}

fn card_verdict(decision: Decision) -> Option<CardVerdict> {
    Some(match decision {
        Decision::Out(_) => CardVerdict::Out,
        Decision::Punt(PuntClass::Local) => CardVerdict::PuntLocal,
        Decision::Punt(PuntClass::Neighbour) => CardVerdict::PuntNeighbour,
        Decision::Punt(PuntClass::Exception) => CardVerdict::PuntException,
        Decision::Punt(PuntClass::Hook) => CardVerdict::PuntHook,
        Decision::Punt(PuntClass::Control) => CardVerdict::PuntControl,
        Decision::Drop(GuestDrop::NotForUs) => CardVerdict::DropNotForUs,
        Decision::Drop(GuestDrop::Malformed) => CardVerdict::DropMalformed,
        Decision::Drop(GuestDrop::Policy) => CardVerdict::DropPolicy,
        Decision::Drop(GuestDrop::Blackhole) => CardVerdict::DropBlackhole,
        Decision::Drop(_) => return None,
    })
}

struct Ve {
    number: u8,
    driver: VeDriver,
    fib: Fib,
    forwarder: IpForwarder,
    vports: BTreeMap<u8, Vport>,
    routes: Vec<IpNet>,
    changes: Vec<ToGuest>,
}

struct Bench {
    seed: u64,
    random: Random,
    /// Many stations on the links, so that pdp-ip limits how many the kernel resolves.
    scattered: bool,
    model: HeaderModel,
    vmacs: VmacTable,
    ves: Vec<Ve>,
}

impl Bench {
    fn new(seed: u64) -> Option<Self> {
        let mut random = Random(seed);
        let mut model = HeaderModel::new(seed as u32)?;
        let vmacs = VmacTable::new(sizes::VMAC_SETS, random.draw() >> 4);
        model.write_all(vmacs.clear_writes().iter().map(|write| write.word(0)));
        let scattered = seed.is_multiple_of(16);
        let mut bench = Self { seed, random, scattered, model, vmacs, ves: Vec::new() };
        for ve in 0..sizes::VES {
            bench.add_ve(ve);
        }
        Some(bench)
    }

    fn add_ve(&mut self, number: u8) {
        let range = |entries: u16| {
            let length = entries / u16::from(sizes::VES);
            TableRange { base: length * u16::from(number), length }
        };
        let hops = HopSegments {
            arps: range(sizes::ARPS),
            hops: range(sizes::HOPS),
            blocks: range(sizes::BUCKET_BLOCKS),
            groups: range(sizes::GROUPS),
        };
        let [nodes, leaves] = [sizes::NODES, sizes::LEAVES].map(|all| all / u32::from(sizes::VES));
        let lpm = LpmSegment {
            node_base: nodes * u32::from(number),
            node_length: nodes,
            leaf_base: leaves * u32::from(number),
            leaf_length: leaves,
        };
        let driver = VeDriver::new(&hops, &lpm);
        let mut writes = vec![TableWrite::HopSegments(hops), TableWrite::LpmSegments(lpm)];
        // Writes see the parts of the look-up some cycles later.
        writes.extend([TableWrite::Meter(None); 8]);
        writes
            .extend((0..16).map(|vport| TableWrite::Attachment(vport, attachment(number, vport))));
        writes.extend(driver.clear_writes());
        writes.push(TableWrite::Enabled(number < ROUTERS));
        self.model.write_all(writes.iter().map(|write| write.word(number)));
        let mut ve = Ve {
            number,
            driver,
            fib: Fib::default(),
            forwarder: IpForwarder::default(),
            vports: BTreeMap::new(),
            routes: Vec::new(),
            changes: Vec::new(),
        };
        let places = (0..16).filter_map(|vport| Some((vport, attachment(number, vport)?)));
        for (vport, place) in places {
            let AttachmentEntry { segment, mac, .. } = place;
            self.add_vmac(VmacEntry { segment, mac, ve: number, vport });
        }
        if number < ROUTERS {
            let messages = snapshot(&mut self.random, number, self.scattered);
            messages.into_iter().for_each(|message| self.apply(&mut ve, message));
        }
        self.ves.push(ve);
    }

    fn add_vmac(&mut self, entry: VmacEntry) {
        let mut writes = Vec::new();
        self.vmacs.insert(entry, &mut writes).unwrap();
        self.model.write_all(writes.iter().map(|write| write.word(0)));
    }

    /// Applies a message of a VE's mirror to both, with no frame on the way.
    fn apply(&mut self, ve: &mut Ve, message: ToGuest) {
        match &message {
            ToGuest::Vport(vport) => {
                let index = vport.index as u8;
                let segment = attachment(ve.number, index).unwrap().segment;
                let mut writes = Vec::new();
                for mac in ve.vports.get(&index).map_or(&[][..], |old| &old.macs) {
                    self.vmacs.remove(segment, *mac, &mut writes);
                }
                for &mac in &vport.macs {
                    let entry = VmacEntry { segment, mac, ve: ve.number, vport: index };
                    self.vmacs.insert(entry, &mut writes).unwrap();
                }
                self.model.write_all(writes.iter().map(|write| write.word(0)));
                ve.vports.insert(index, vport.clone());
            }
            ToGuest::Route { prefix, .. } if !ve.routes.contains(prefix) => {
                ve.routes.push(*prefix);
            }
            ToGuest::RouteGone(prefix) => ve.routes.retain(|route| route != prefix),
            _ => {}
        }
        ve.driver.apply(&message).unwrap();
        let words: Vec<TableWord> =
            ve.driver.take_writes().iter().map(|write| write.word(ve.number)).collect();
        self.model.write_all(words);
        assert_eq!(self.model.refused_count(), 0, "refused: {message:?}");
        ve.driver.retire();
        ve.fib.apply(message.clone());
        ve.changes.push(message);
    }

    fn change(&mut self) {
        let mut ves = std::mem::take(&mut self.ves);
        for ve in ves.iter_mut().filter(|ve| ve.number < ROUTERS) {
            for _ in 0..self.random.below(6) {
                // Enough routes to route, few enough to fit.
                let message = change(&mut self.random, ve.number, &ve.routes);
                let is_new = matches!(message, ToGuest::Route { .. });
                if !is_new || ve.routes.len() < 60 {
                    self.apply(ve, message);
                }
            }
        }
        self.ves = ves;
    }

    /// Returns a frame, and its expected verdict as far as pdp-ip does not decide.
    fn case(&mut self) -> Case {
        let random = &mut self.random;
        let few = if one_in(random, 30) { VPORTS } else { NAMED };
        let (ve, vport) = (random.below(sizes::VES.into()), random.below(few.into()) as u8);
        // The disabled VE seldom.
        let ve = if ve as u8 == ROUTERS && !one_in(random, 8) { 0 } else { ve as u8 };
        let frame = frame(random, ve, vport, self.scattered);
        // A vport without a place has no segment: another one's.
        let place = attachment(ve, vport).or(attachment(ve, 0)).unwrap();
        let (mut port, segment) = (place.port, place.segment);
        if one_in(random, 60) {
            port = random.below(4) as u8;
        }
        let group = frame[0] & 1 != 0;
        let mac = frame.first_chunk().filter(|_| !group && frame.len() >= 14);
        let owner = mac.and_then(|mac| self.vmacs.get(segment, *mac));
        let owner = owner.map(|entry| (entry.ve, entry.vport));
        let expected = if frame.len() < 14 {
            Expected::Ip(0, None, frame.clone())
        } else if group {
            // The host hands it to each VE. pdp-ip's verdict is that of a vport like any other.
            let named = self.ves[0].vports.get(&vport).is_some_and(|vport| !vport.hooked.all);
            if named { Expected::Ip(0, None, frame.clone()) } else { Expected::AnyPunt }
        } else {
            match owner {
                None => Expected::Card(CardVerdict::DropNoVe),
                Some((ROUTERS.., _)) => Expected::Card(CardVerdict::DropNoVe),
                Some((ve, vport)) => {
                    let named = self.ves[usize::from(ve)].vports.contains_key(&vport);
                    let right = attachment(ve, vport).is_some_and(|place| place.port == port);
                    if named && !right {
                        Expected::Card(CardVerdict::DropNotForUs)
                    } else {
                        Expected::Ip(ve, None, frame.clone())
                    }
                }
            }
        };
        // A group frame and a runt have no owner; pdp-ip gets them on a vport of VE 0.
        Case { frame, port, segment, owner, expected }
    }

    /// Has pdp-ip decide on the frames of each VE.
    fn decide(&mut self, cases: &mut [Case]) {
        for ve in &mut self.ves {
            let mut mine: Vec<&mut Case> = cases
                .iter_mut()
                .filter(|case| matches!(case.expected, Expected::Ip(of, ..) if of == ve.number))
                .collect();
            for cases in mine.chunks_mut(FRAMES_MAX) {
                let mut list = List::default();
                for case in cases.iter() {
                    let vport = case.owner.map_or(case.segment - 0x0ff, |owner| owner.1.into());
                    list.0.push((vport, case.frame.clone(), None));
                }
                ve.forwarder.process(&mut ve.fib, &mut list);
                for (case, (_, frame, decision)) in cases.iter_mut().zip(list.0) {
                    case.expected = Expected::Ip(ve.number, decision, frame);
                }
            }
        }
    }

    /// Passes a batch through both, and compares.
    fn batch(&mut self, counts: &mut Counts) {
        let mut cases: Vec<Case> = (0..BATCH).map(|_| self.case()).collect();
        self.decide(&mut cases);
        let record = |(token, case): (u16, &Case)| {
            HeaderIn::new(&case.frame, case.port, case.segment, token)
        };
        let records: Vec<HeaderIn> = (0..).zip(&cases).map(record).collect();
        let results = self.model.process(&records);
        for ((token, case), result) in (0..).zip(&cases).zip(&results) {
            assert_eq!(result.token, token);
            *counts.verdicts.entry(result.verdict).or_default() += 1;
            if let Err(want) = self.compare(case, result, counts) {
                let Case { frame, owner, port, segment, .. } = case;
                let changes = owner.map(|(ve, _)| &self.ves[usize::from(ve)].changes);
                panic!(
                    "world {}, frame {frame:02x?}, port {port}, segment {segment}, owner \
                     {owner:?}:\ncard {result:02x?}\nbut want {want}\nmessages {changes:?}",
                    self.seed
                );
            }
        }
    }

    /// Returns the expectation if the card differs from it.
    fn compare(&self, case: &Case, result: &HeaderOut, counts: &mut Counts) -> Result<(), String> {
        if result.fault || result.excess {
            return Err("neither fault nor excess".into());
        }
        let is_group = case.frame.len() >= 14 && case.frame[0] & 1 != 0;
        counts.groups += u64::from(is_group);
        if result.group != is_group {
            return Err(format!("group {is_group}"));
        }
        let owner = result.owned.then_some(result.ve);
        if owner != case.owner.map(|(ve, _)| ve) {
            return Err(format!("owner {:?}", case.owner));
        }
        let punts = [
            CardVerdict::PuntLocal,
            CardVerdict::PuntNeighbour,
            CardVerdict::PuntException,
            CardVerdict::PuntHook,
            CardVerdict::PuntControl,
        ];
        let (ve, decision, after) = match &case.expected {
            Expected::Card(verdict) => {
                let same = result.verdict == *verdict && unchanged(case, result);
                return same.then_some(()).ok_or(format!("{verdict:?}, unchanged"));
            }
            Expected::AnyPunt => {
                counts.groups_skipped += 1;
                let same = punts.contains(&result.verdict) && unchanged(case, result);
                return same.then_some(()).ok_or("a punt, unchanged".into());
            }
            Expected::Ip(ve, decision, after) => (ve, decision.unwrap(), after),
        };
        let kind = case.frame.get(12..14).map(|kind| u16::from_be_bytes([kind[0], kind[1]]));
        let packet = case.frame.get(14..).unwrap_or_default();
        // The card sees the first 64 bytes only: it can't check the checksum of a longer header.
        let header = Ipv4Packet::read(packet).filter(|_| kind == Some(IPV4) && !is_group);
        if header.is_some_and(|header| header.header_bytes > 48)
            && result.verdict == CardVerdict::PuntException
        {
            counts.long_headers += u64::from(decision != Decision::Punt(PuntClass::Exception));
            return unchanged(case, result).then_some(()).ok_or("unchanged".into());
        }
        // The host's software limits how many stations the kernel resolves, not the card.
        if decision == Decision::Drop(GuestDrop::Unresolved) {
            counts.unresolved += 1;
            let same = punts.contains(&result.verdict) && unchanged(case, result);
            return same.then_some(()).ok_or("a punt, unchanged".into());
        }
        // The card has no host routes for a hop without gateway among several: software forwards.
        if let Decision::Out(vport) = decision
            && result.verdict == CardVerdict::PuntNeighbour
            && self.is_gatewayless_choice(*ve, vport, kind, packet)
        {
            counts.gatewayless += 1;
            return unchanged(case, result).then_some(()).ok_or("unchanged".into());
        }
        let want = || format!("{decision:?} of VE {ve}, {after:02x?}");
        if card_verdict(decision) != Some(result.verdict) {
            return Err(want());
        }
        let known = after.len().min(HEADER_BYTES);
        if usize::from(result.length) != after.len() || result.bytes[..known] != after[..known] {
            return Err(want());
        }
        let ingress = case.owner.map_or(0, |(_, vport)| vport);
        let (vport, port, segment) = match decision {
            Decision::Out(vport) => {
                let place = attachment(*ve, vport as u8).unwrap();
                (vport as u8, place.port, place.segment)
            }
            _ => (ingress, HOST_PORT, case.segment),
        };
        if (result.vport, result.port, result.segment) != (vport, port, segment) {
            return Err(format!("{}; vport {vport}, port {port}, segment {segment}", want()));
        }
        Ok(())
    }

    /// True if the destination's route has several hops, one of them by `vport` without gateway.
    fn is_gatewayless_choice(&self, ve: u8, vport: u16, kind: Option<u16>, packet: &[u8]) -> bool {
        let address: IpAddr = match kind {
            Some(IPV4) => <[u8; 4]>::try_from(&packet[16..20]).unwrap().into(),
            _ => <[u8; 16]>::try_from(&packet[24..40]).unwrap().into(),
        };
        match self.ves[usize::from(ve)].fib.resolve(address) {
            Some(ResolvedRoute::Hops(hops)) => {
                let on_link = |hop: &GroupHop| hop.gateway.is_none() && hop.vport == vport;
                hops.len() > 1 && hops.iter().any(on_link)
            }
            _ => false,
        }
    }
}

/// True if the card left the frame as it was, and sends it to the host or nowhere.
fn unchanged(case: &Case, result: &HeaderOut) -> bool {
    let known = case.frame.len().min(HEADER_BYTES);
    usize::from(result.length) == case.frame.len()
        && result.bytes[..known] == case.frame[..known]
        && (result.port, result.segment) == (HOST_PORT, case.segment)
}

#[test]
fn verdicts_and_frames_match_pdp_ip() {
    let number = |name| std::env::var(name).ok().map(|value| value.parse::<u64>().unwrap());
    let frames = number("CARD_FRAMES").unwrap_or(FRAMES);
    let first = number("CARD_SEED").unwrap_or(1);
    let worlds = frames.div_ceil((BATCH * BATCHES) as u64);
    let mut counts = Counts::default();
    for seed in first..first + worlds {
        let Some(mut bench) = Bench::new(seed) else {
            println!("skipped: built without the card's models");
            return;
        };
        for _ in 0..BATCHES {
            bench.batch(&mut counts);
            bench.change();
        }
    }
    let Counts { verdicts, long_headers, unresolved, gatewayless, groups, groups_skipped } = counts;
    let all: u64 = verdicts.values().sum();
    println!(
        "{all} frames in {worlds} worlds: {verdicts:?}; {groups} to groups, {groups_skipped} of \
         these without comparison; differences: {long_headers} long headers, {unresolved} \
         unresolved stations, {gatewayless} hops without gateway"
    );
    // Neither the test's frames nor its exceptions hide anything.
    let from_ip = [
        CardVerdict::PuntLocal,
        CardVerdict::PuntNeighbour,
        CardVerdict::PuntException,
        CardVerdict::PuntHook,
        CardVerdict::PuntControl,
        CardVerdict::DropNotForUs,
        CardVerdict::DropMalformed,
        CardVerdict::DropPolicy,
        CardVerdict::DropBlackhole,
        CardVerdict::DropNoVe,
    ];
    if all > 100_000 {
        for verdict in from_ip {
            let count = verdicts.get(&verdict).copied().unwrap_or(0);
            assert!(count > all / 2000, "{count} of {all} frames: {verdict:?}");
        }
        assert!(verdicts[&CardVerdict::Out] > all / 12, "{verdicts:?}");
        assert!(long_headers + unresolved + gatewayless < all / 20);
    }
}
