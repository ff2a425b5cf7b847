//! Random messages of a mirror and random frames, which have to do with each other.
#![allow(dead_code)]

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::Path;
use std::process::Command;
use std::sync::LazyLock;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use pdp_card::header::FRAME_BYTES_MAX;
use pdp_card::table::AttachmentEntry;
use pdp_proto::routes::{GroupHop, RouteDecision, ToGuest, Vport, VportHooks};

use super::Random;

/// Vports that the mirror names; the next one it never names, and the one behind has no place.
pub const NAMED: u8 = 4;
pub const VPORTS: u8 = NAMED + 2;

pub const IPV4: u16 = 0x0800;
pub const IPV6: u16 = 0x86dd;
pub const ARP: u16 = 0x0806;

pub fn pick<T: Copy>(random: &mut Random, from: &[T]) -> T {
    from[random.below(from.len() as u64) as usize]
}

pub fn one_in(random: &mut Random, count: u64) -> bool {
    random.below(count) == 0
}

// Addresses: few, so that routes, neighbours, the router, and destinations often coincide.

pub fn v4(random: &mut Random) -> Ipv4Addr {
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

pub fn v6(random: &mut Random) -> Ipv6Addr {
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

pub fn address(random: &mut Random) -> IpAddr {
    if one_in(random, 2) { v4(random).into() } else { v6(random).into() }
}

/// Gateways: fewer, so that most are known.
pub fn gateway(random: &mut Random) -> IpAddr {
    let last = random.below(4) as u8;
    match random.below(12) {
        0 => address(random),
        1..6 => Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, last.into()).into(),
        _ => Ipv4Addr::new(10, 0, 0, last).into(),
    }
}

pub fn prefix(random: &mut Random) -> IpNet {
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
pub fn mac_of(ve: u8, vport: u8) -> [u8; 6] {
    [2, 0, 0x5c, ve, 0x9d, 0x31 + vport]
}

/// MAC address of VRRP (RFC 9568 section 7.3).
pub fn virtual_mac(ve: u8) -> [u8; 6] {
    [0, 0, 0x5e, 0, 1, 5 + ve]
}

/// Vports of equal number are on the same segment and port.
pub fn attachment(ve: u8, vport: u8) -> Option<AttachmentEntry> {
    let (port, segment) = (vport % 4, 0x0ff + u16::from(vport));
    (vport <= NAMED).then_some(AttachmentEntry { port, segment, mac: mac_of(ve, vport) })
}

pub fn vport(random: &mut Random, ve: u8, index: u8) -> Vport {
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

pub fn group(random: &mut Random) -> (Vec<GroupHop>, u32) {
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
pub const GROUPS: u64 = 8;

pub fn target(random: &mut Random) -> RouteDecision {
    match random.below(16) {
        0 => RouteDecision::Punt,
        1 => RouteDecision::Drop,
        // It may have no name.
        2 => RouteDecision::Group(random.below(GROUPS) as u32),
        _ => RouteDecision::Group(random.below(GROUPS - 2) as u32),
    }
}

/// A message of the mirror after its snapshot.
pub fn change(random: &mut Random, ve: u8, routes: &[IpNet]) -> ToGuest {
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
pub fn snapshot(random: &mut Random, ve: u8, scattered: bool) -> Vec<ToGuest> {
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
pub fn ones_sum(bytes: &[u8]) -> u16 {
    let words = bytes.chunks(2).map(|word| u32::from(word[0]) << 8 | u32::from(word[1]));
    let mut sum: u32 = words.sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

pub fn ttl(random: &mut Random) -> u8 {
    if one_in(random, 8) { random.below(3) as u8 } else { random.draw() as u8 }
}

pub fn noise(random: &mut Random, length: usize) -> Vec<u8> {
    (0..length.div_ceil(8)).flat_map(|_| random.draw().to_le_bytes()).take(length).collect()
}

/// Length of a payload: mostly short, else up to the longest frame or around a largest packet.
pub fn payload(random: &mut Random, header: usize) -> Vec<u8> {
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
pub fn length_field(random: &mut Random, right: usize) -> u16 {
    let change = if one_in(random, 24) { random.below(9) as i32 - 4 } else { 0 };
    (right as i32 + change).max(0) as u16
}

pub fn traffic_class(random: &mut Random) -> u8 {
    let few = [0, 0, 46 << 2, 47 << 2 | 3, 48 << 2, 56 << 2];
    if one_in(random, 2) { random.draw() as u8 } else { pick(random, &few) }
}

pub fn ipv4_packet(random: &mut Random) -> Vec<u8> {
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

pub fn ipv6_packet(random: &mut Random) -> Vec<u8> {
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

/// Frames of scapy, which the tools of the card include.
pub fn scapy_frames() -> Vec<Vec<u8>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut scapy = Command::new(root.join("../../target/hw-tools/venv/bin/python"));
    scapy.arg(root.join("tests/scapy_frames.py")).args(["1000", "1"]);
    let Ok(output) = scapy.output() else {
        println!("without frames of scapy: run make deps");
        return Vec::new();
    };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let byte = |hex: &[u8]| u8::from_str_radix(str::from_utf8(hex).unwrap(), 16).unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().map(|line| line.as_bytes().chunks(2).map(byte).collect()).collect()
}

/// Frames of the fuzz corpora. A packet gets an Ethernet header.
pub fn corpus_frames() -> Vec<Vec<u8>> {
    let corpora = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus");
    let mut frames = Vec::new();
    for name in ["ethernet", "flow", "ipv4", "ipv6", "outer", "encapsulate", "router"] {
        for entry in corpora.join(name).read_dir().unwrap() {
            let mut bytes = std::fs::read(entry.unwrap().path()).unwrap();
            match name {
                // A vport, the frame's length, and the frame.
                "router" => drop(bytes.drain(..bytes.len().min(3))),
                "flow" | "ipv4" | "ipv6" => {
                    let kind = if bytes.first().is_some_and(|b| b >> 4 == 6) { IPV6 } else { IPV4 };
                    bytes.splice(..0, [[0; 12].as_slice(), &kind.to_be_bytes()].concat());
                }
                _ => {}
            }
            frames.push(bytes);
        }
    }
    frames
}

pub static KNOWN_FRAMES: LazyLock<Vec<Vec<u8>>> = LazyLock::new(|| {
    let mut frames = scapy_frames();
    frames.extend(corpus_frames());
    frames.retain(|frame| frame.len() >= 14);
    frames
});

/// Returns a known frame, mostly with the right checksum and a destination that may have a route.
pub fn known_frame(random: &mut Random) -> (u16, Vec<u8>) {
    let frame = &KNOWN_FRAMES[random.below(KNOWN_FRAMES.len() as u64) as usize];
    let (header, packet) = frame.split_at(14);
    let kind = u16::from_be_bytes([header[12], header[13]]);
    let mut packet = packet.to_vec();
    if kind == IPV6 && packet.len() >= 40 && one_in(random, 2) {
        packet[24..40].copy_from_slice(&v6(random).octets());
    }
    let length = 4 * usize::from(packet.first().map_or(0, |first| first & 15));
    if kind == IPV4 && (20..=packet.len()).contains(&length) && !one_in(random, 4) {
        if one_in(random, 2) {
            packet[16..20].copy_from_slice(&v4(random).octets());
        }
        packet[10..12].fill(0);
        let checksum = !ones_sum(&packet[..length]);
        packet[10..12].copy_from_slice(&checksum.to_be_bytes());
    }
    (kind, packet)
}

/// Returns a frame for a vport of a VE, or for others on its segment.
pub fn frame(random: &mut Random, ve: u8, vport: u8, scattered: bool) -> Vec<u8> {
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
    let (kind, packet) = match random.below(24) {
        0..9 => (IPV4, ipv4_packet(random)),
        9..18 => (IPV6, ipv6_packet(random)),
        18..22 => known_frame(random),
        22 => {
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
