//! Forwarding against a slow reference, written from the table in
//! `forward`: one frame at a time, without any of the router's structures.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use etherparse::{IpHeaders, PacketBuilder};
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use pdp_proto::routes::{GroupHop, RouteDecision, ToGuest, Vport, VportHooks};
use pdp_wire::tag::{GuestDrop, PuntClass};
use proptest::prelude::*;

use crate::fib::Fib;
use crate::forward::{Decision, IpForwarder};
use crate::list::FrameList;

/// RFC 1071, over the bytes as they are (etherparse ignores the reserved flag).
fn sums_to_all_ones(header: &[u8]) -> bool {
    let words = header.chunks(2).map(|word| u64::from(word[0]) << 8 | u64::from(word[1]));
    words.sum::<u64>() % 0xffff == 0
}

/// All messages of the mirror.
#[derive(Clone, Debug)]
struct World {
    vports: Vec<Vport>,
    /// True for addresses of the router itself.
    locals: BTreeMap<IpAddr, bool>,
    /// With the largest packet of their routes.
    groups: Vec<(Vec<GroupHop>, u32)>,
    routes: Vec<(IpNet, RouteDecision)>,
    neighbours: Vec<(u16, IpAddr, [u8; 6])>,
    v4: bool,
    v6: bool,
    choosing: (bool, bool),
}

impl World {
    fn fib(&self) -> Fib {
        let mut fib = Fib::default();
        let mut messages = vec![ToGuest::Begin, ToGuest::Forwarding { v4: self.v4, v6: self.v6 }];
        messages.push(ToGuest::Choosing { v4: self.choosing.0, v6: self.choosing.1 });
        messages.extend(self.vports.iter().cloned().map(ToGuest::Vport));
        let local = |(&address, &own)| ToGuest::Local { address, own };
        messages.extend(self.locals.iter().map(local));
        for (id, (hops, mtu)) in self.groups.iter().enumerate() {
            messages.push(ToGuest::Group { id: id as u32, hops: hops.clone(), mtu: *mtu });
        }
        for &(prefix, target) in &self.routes {
            messages.push(ToGuest::Route { prefix, target });
        }
        for &(vport, address, mac) in &self.neighbours {
            messages.push(ToGuest::Neighbour { vport, address, mac: Some(mac) });
        }
        messages.push(ToGuest::End);
        messages.into_iter().for_each(|message| fib.apply(message));
        fib
    }

    /// Returns possible verdicts on a frame; several if a group has several hops.
    fn reference(&self, came_by: u16, frame: &[u8]) -> Vec<(Decision, Vec<u8>)> {
        let same = |decision| vec![(decision, frame.to_vec())];
        let punt = |class| same(Decision::Punt(class));
        let drop = |reason| same(Decision::Drop(reason));
        if frame.len() < 14 {
            return drop(GuestDrop::Malformed);
        }
        let Some(vport) = self.vports.iter().find(|vport| vport.index == came_by) else {
            return punt(PuntClass::Local);
        };
        if vport.hooked.all {
            return punt(PuntClass::Hook);
        }
        let kind = frame[12..14].to_vec();
        let packet = &frame[14..];
        let whole_v6 = packet.len() >= 40
            && packet[0] >> 4 == 6
            && packet.len() >= 40 + usize::from(packet[4]) * 256 + usize::from(packet[5]);
        let discovery = whole_v6
            && packet[6] == 58
            && (packet[4], packet[5]) != (0, 0)
            && (133..=137).contains(&packet[40]);
        let (is_v4, is_v6) = (kind == [0x08, 0x00], kind == [0x86, 0xdd]);
        let dscp = match packet {
            [_, tos, ..] if is_v4 => tos / 4,
            [first, second, ..] if is_v6 => (first % 16) * 4 + second / 64,
            _ => 0,
        };
        let own = if dscp >= 48 || kind[0] < 6 { PuntClass::Control } else { PuntClass::Local };
        if frame[0] % 2 == 1 {
            let neighbour = kind == [0x08, 0x06] || is_v6 && discovery;
            return punt(if neighbour { PuntClass::Neighbour } else { own });
        }
        if frame[..6] != vport.mac && !vport.macs.iter().any(|mac| frame[..6] == *mac) {
            return drop(GuestDrop::NotForUs);
        }
        if kind == [0x08, 0x06] {
            return punt(PuntClass::Neighbour);
        }
        if !is_v4 && !is_v6 {
            return punt(own);
        }
        let (destination, bytes, exception): (IpAddr, usize, bool);
        if is_v4 {
            let Ok(header) = etherparse::Ipv4HeaderSlice::from_slice(packet) else {
                return drop(GuestDrop::Malformed);
            };
            let total = usize::from(header.total_len());
            if !sums_to_all_ones(header.slice())
                || total < header.slice().len()
                || total > packet.len()
            {
                return drop(GuestDrop::Malformed);
            }
            let (to, from) = (header.destination_addr(), header.source_addr());
            if to.is_multicast() || to.is_broadcast() || self.locals.contains_key(&to.into()) {
                return punt(own);
            }
            let bad = |a: Ipv4Addr| {
                a.is_loopback() || a.is_multicast() || a.octets()[0] == 0 || a.octets()[0] >= 240
            };
            if bad(to) || bad(from) || self.locals.get(&from.into()) == Some(&true) {
                return drop(GuestDrop::Policy);
            }
            if vport.hooked.v4 {
                return punt(PuntClass::Hook);
            }
            exception =
                !self.v4 || !vport.forwards_v4 || !header.options().is_empty() || header.ttl() < 2;
            (destination, bytes) = (to.into(), total);
        } else {
            if !whole_v6 {
                return drop(GuestDrop::Malformed);
            }
            let header = etherparse::Ipv6HeaderSlice::from_slice(packet).unwrap();
            let (to, from) = (header.destination_addr(), header.source_addr());
            if to.is_multicast()
                || to.is_unicast_link_local()
                || self.locals.contains_key(&to.into())
            {
                return punt(if discovery { PuntClass::Neighbour } else { own });
            }
            let bad = |a: Ipv6Addr| a.is_loopback() || a.is_unspecified();
            if bad(to) || bad(from) || from.is_multicast() {
                return drop(GuestDrop::Policy);
            }
            if vport.hooked.v6 {
                return punt(PuntClass::Hook);
            }
            exception = !self.v6
                || from.is_unicast_link_local()
                || header.next_header().0 == 0
                || header.hop_limit() < 2;
            (destination, bytes) = (to.into(), 40 + usize::from(header.payload_length()));
        }
        if exception {
            return punt(PuntClass::Exception);
        }
        // The last among the longest prefixes that cover the destination.
        let covers = self.routes.iter().filter(|(prefix, _)| prefix.contains(&destination));
        let (hops, mtu) = match covers.max_by_key(|(prefix, _)| prefix.prefix_len()) {
            None => return punt(PuntClass::Exception),
            Some((_, RouteDecision::Punt)) => return punt(PuntClass::Hook),
            Some((_, RouteDecision::Drop)) => return drop(GuestDrop::Blackhole),
            Some((_, RouteDecision::Group(id))) => &self.groups[*id as usize],
        };
        let choosing = if is_v4 { self.choosing.0 } else { self.choosing.1 };
        if hops.len() > 1 && !choosing {
            return punt(PuntClass::Hook);
        }
        let outcomes = hops.iter().map(|hop| {
            let Some(egress) =
                self.vports.iter().find(|vport| vport.index == hop.vport && vport.up)
            else {
                return (Decision::Punt(PuntClass::Exception), frame.to_vec());
            };
            if bytes > egress.mtu as usize || *mtu > 0 && bytes > *mtu as usize {
                let df = is_v6 || packet[6] / 64 % 2 == 1;
                let class = if df { PuntClass::Exception } else { PuntClass::Hook };
                return (Decision::Punt(class), frame.to_vec());
            }
            let back = if is_v4 { egress.hooked.back_v4 } else { egress.hooked.back_v6 };
            if egress.hooked.out || back && hop.vport == came_by {
                return (Decision::Punt(PuntClass::Hook), frame.to_vec());
            }
            let neighbour = (hop.vport, hop.gateway.unwrap_or(destination));
            let Some(known) = self.neighbours.iter().find(|n| (n.0, n.1) == neighbour) else {
                return (Decision::Punt(PuntClass::Neighbour), frame.to_vec());
            };
            let mut sent = frame[..14 + bytes].to_vec();
            sent[..6].copy_from_slice(&known.2);
            sent[6..12].copy_from_slice(&egress.mac);
            if is_v4 {
                sent[22] -= 1;
                let mut header = etherparse::Ipv4Header::from_slice(&sent[14..]).unwrap().0;
                header.header_checksum = header.calc_header_checksum();
                sent[14..34].copy_from_slice(&header.to_bytes()[..20]);
            } else {
                sent[21] -= 1;
            }
            (Decision::Out(hop.vport), sent)
        });
        outcomes.collect()
    }
}

/// Few addresses, so that routes, neighbours, the router and destinations often coincide.
fn v4() -> BoxedStrategy<Ipv4Addr> {
    prop_oneof![
        12 => (0u8..3, 0u8..3, 0u8..4).prop_map(|(a, b, c)| Ipv4Addr::new(10, a, b, c)),
        1 => any::<u32>().prop_map(Ipv4Addr::from),
        1 => prop::sample::select(vec![
            Ipv4Addr::LOCALHOST, Ipv4Addr::BROADCAST, Ipv4Addr::UNSPECIFIED,
            Ipv4Addr::new(224, 0, 0, 5), Ipv4Addr::new(240, 0, 0, 1),
        ]),
    ]
    .boxed()
}

fn v6() -> BoxedStrategy<Ipv6Addr> {
    prop_oneof![
        12 => (0u16..3, 0u16..3, 0u16..4)
            .prop_map(|(a, b, c)| Ipv6Addr::new(0x2001, 0xdb8, a, 0, 0, 0, b, c)),
        1 => any::<u128>().prop_map(Ipv6Addr::from),
        1 => prop::sample::select(vec![
            Ipv6Addr::LOCALHOST, Ipv6Addr::UNSPECIFIED, "ff02::5".parse().unwrap(),
            "fe80::1".parse().unwrap(), "febf::1".parse().unwrap(), "fec0::1".parse().unwrap(),
        ]),
    ]
    .boxed()
}

fn address() -> BoxedStrategy<IpAddr> {
    prop_oneof![v4().prop_map(IpAddr::V4), v6().prop_map(IpAddr::V6)].boxed()
}

fn prefix() -> BoxedStrategy<IpNet> {
    prop_oneof![
        (v4(), 0u8..=32).prop_map(|(a, l)| Ipv4Net::new(a, l).unwrap().trunc().into()),
        (v6(), 0u8..=128).prop_map(|(a, l)| Ipv6Net::new(a, l).unwrap().trunc().into()),
    ]
    .boxed()
}

/// The mirror never names vport 4.
fn vport() -> std::ops::Range<u16> {
    0..5
}

fn mac_of(vport: u16) -> [u8; 6] {
    [2, 0, 0, 0, 1, vport as u8]
}

/// Mostly nothing, or one hook.
fn hooked() -> BoxedStrategy<VportHooks> {
    let one = (0u8..6).prop_map(|which| VportHooks {
        all: which == 0,
        v4: which == 1,
        v6: which == 2,
        out: which == 3,
        back_v4: which == 4,
        back_v6: which == 5,
    });
    prop_oneof![4 => Just(VportHooks::default()), 1 => one].boxed()
}

/// MAC address of VRRP (RFC 9568 7.3).
const VIRTUAL: [u8; 6] = [0, 0, 0x5e, 0, 1, 5];

/// Odd vports have a virtual MAC address.
fn named(index: u16) -> Vport {
    let macs = if index % 2 == 1 { vec![[2; 6], VIRTUAL] } else { vec![] };
    Vport {
        index,
        mac: mac_of(index),
        mtu: 1500,
        up: true,
        macs,
        forwards_v4: true,
        hooked: VportHooks::default(),
    }
}

fn world() -> BoxedStrategy<World> {
    let mtu = prop::sample::select(vec![68u32, 100, 1500]);
    let vports = prop::collection::vec((mtu, 0u8..5, 0u8..8, hooked()), 4);
    let hop = (vport(), prop::option::of(address()), 1u16..4)
        .prop_map(|(vport, gateway, weight)| GroupHop { vport, gateway, weight });
    let group = (prop::collection::vec(hop, 1..4), prop::sample::select(vec![0, 0, 90, 1500]));
    let groups = prop::collection::vec(group, 3);
    let target = prop_oneof![
        8 => (0u32..3).prop_map(RouteDecision::Group),
        1 => Just(RouteDecision::Punt),
        1 => Just(RouteDecision::Drop),
    ];
    let routes = prop::collection::btree_map(prefix(), target, 0..40);
    let neighbours = prop::collection::btree_map((vport(), address()), any::<u8>(), 0..60);
    let locals = prop::collection::btree_map(address(), any::<bool>(), 0..4);
    (vports, groups, routes, neighbours, locals, 0u8..10, any::<bool>(), 0u8..5)
        .prop_map(|(vports, groups, routes, neighbours, locals, off, v6_first, choosing)| World {
            vports: (0..)
                .zip(vports)
                .map(|(index, (mtu, up, forwards, hooked))| Vport {
                    mtu,
                    up: up > 0,
                    forwards_v4: forwards > 0,
                    hooked,
                    ..named(index)
                })
                .collect(),
            choosing: (choosing > 0, choosing > 1),
            locals,
            // Hops without a known gateway would end every test at its neighbour.
            groups,
            routes: routes.into_iter().collect(),
            neighbours: neighbours
                .into_iter()
                .map(|((vport, address), last)| (vport, address, [2, 0, 0, 0, 2, last]))
                .collect(),
            v4: off > 0 || v6_first,
            v6: off > 0 || !v6_first,
        })
        .boxed()
}

#[derive(Clone, Debug)]
enum Change {
    None,
    Truncate(prop::sample::Index),
    Byte(prop::sample::Index, u8),
    Pad(usize),
}

fn frame() -> BoxedStrategy<(u16, Vec<u8>)> {
    let link = (vport(), 0u8..10).prop_map(|(vport, kind)| {
        let to = match kind {
            0 => [0xff; 6],
            1 => [1, 0, 0x5e, 0, 0, 5],
            2 => [2, 9, 9, 9, 9, 9],
            3 => VIRTUAL,
            _ => mac_of(vport),
        };
        (vport, to)
    });
    let ttl = prop_oneof![4 => 2u8..=255, 1 => 0u8..2];
    let payload = prop::collection::vec(any::<u8>(), 0..80);
    let change = prop_oneof![
        6 => Just(Change::None),
        1 => any::<prop::sample::Index>().prop_map(Change::Truncate),
        1 => (any::<prop::sample::Index>(), any::<u8>()).prop_map(|(at, to)| Change::Byte(at, to)),
        1 => (0usize..30).prop_map(Change::Pad),
    ];
    let made = prop_oneof![
        5 => (link.clone(), v4(), v4(), ttl.clone(), payload.clone(), 0u8..8).prop_map(
            |((vport, to), from, dst, ttl, payload, options)| {
                let mut frame = Vec::new();
                let mut header = etherparse::Ipv4Header::new(
                    payload.len() as u16, ttl, 17u8.into(), from.octets(), dst.octets(),
                ).unwrap();
                header.dont_fragment = options % 2 == 1;
                header.dscp = (if options > 5 { 48 } else { 47 }).try_into().unwrap();
                if options == 0 {
                    header.options = [1u8; 4].into();
                    header.set_payload_len(payload.len()).unwrap();
                    header.header_checksum = header.calc_header_checksum();
                }
                PacketBuilder::ethernet2([2, 7, 7, 7, 7, 7], to)
                    .ip(IpHeaders::Ipv4(header, Default::default()))
                    .write(&mut frame, 17u8.into(), &payload)
                    .unwrap();
                (vport, frame)
            }
        ),
        5 => (link.clone(), v6(), v6(), ttl, payload, 0u8..8).prop_map(
            |((vport, to), from, dst, ttl, mut payload, next)| {
                let mut frame = Vec::new();
                let next = match next { 0 => 0, 1 => 58, 2 => 43, _ => 17 };
                if let (58, Some(kind)) = (next, payload.first_mut()) {
                    *kind = 128 + *kind % 12;
                }
                PacketBuilder::ethernet2([2, 7, 7, 7, 7, 7], to)
                    .ipv6(from.octets(), dst.octets(), ttl)
                    .write(&mut frame, 17u8.into(), &payload)
                    .unwrap();
                frame[20] = next;
                frame[14] |= u8::from(ttl % 2 == 1) * 0x0c;
                (vport, frame)
            }
        ),
        1 => (link, prop::sample::select(vec![0x0806u16, 0x8100, 0x88b5, 60, 0x0800, 0x86dd]),
            prop::collection::vec(any::<u8>(), 0..60)).prop_map(
            |((vport, to), kind, noise)| {
                let mut frame = to.to_vec();
                frame.extend([2, 7, 7, 7, 7, 7]);
                frame.extend(kind.to_be_bytes());
                frame.extend(noise);
                (vport, frame)
            }
        ),
        1 => (vport(), prop::collection::vec(any::<u8>(), 0..70)),
    ];
    (made, change)
        .prop_map(|((vport, mut frame), change)| {
            match change {
                Change::None => {}
                Change::Truncate(at) => frame.truncate(at.index(frame.len() + 1)),
                Change::Byte(at, to) if !frame.is_empty() => {
                    let at = at.index(frame.len());
                    frame[at] = to;
                }
                Change::Byte(..) => {}
                Change::Pad(count) => frame.resize(frame.len() + count, 0),
            }
            (vport, frame)
        })
        .boxed()
}

fn check(world: &World, given: Vec<(u16, Vec<u8>)>) -> Vec<Decision> {
    let mut fib = world.fib();
    let listed = given.iter().map(|(vport, frame)| (*vport, frame.clone(), None));
    let mut list = FrameList(listed.collect());
    IpForwarder::default().process(&mut fib, &mut list);
    let mut decisions = Vec::new();
    for ((came_by, before), (_, after, decision)) in given.iter().zip(list.0) {
        let decision = decision.expect("a decision on every frame");
        let allowed = world.reference(*came_by, before);
        assert!(
            allowed.contains(&(decision, after.clone())),
            "{decision:?} {after:02x?}, allowed {allowed:02x?}"
        );
        decisions.push(decision);
    }
    decisions
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn verdicts_match_the_reference(
        world in world(), frames in prop::collection::vec(frame(), 1..64),
    ) {
        check(&world, frames);
    }

    #[test]
    fn truncated_frames_match_the_reference(world in world(), (vport, frame) in frame()) {
        let cuts = (0..=frame.len()).map(|length| (vport, frame[..length].to_vec()));
        check(&world, cuts.collect());
    }
}

/// Returns a world in which most packets are forwarded.
fn plain() -> World {
    let neighbour = |last| IpAddr::from([10, 0, 0, last]);
    World {
        choosing: (true, true),
        vports: (0..4).map(named).collect(),
        locals: BTreeMap::new(),
        groups: vec![
            (vec![GroupHop { vport: 1, gateway: Some(neighbour(1)), weight: 1 }], 0),
            (
                (1..4)
                    .map(|n| GroupHop { vport: n, gateway: Some(neighbour(n as u8)), weight: n })
                    .collect(),
                0,
            ),
            (vec![GroupHop { vport: 2, gateway: None, weight: 1 }], 0),
        ],
        routes: vec![
            ("10.0.0.0/8".parse().unwrap(), RouteDecision::Group(0)),
            ("20.0.0.0/8".parse().unwrap(), RouteDecision::Group(1)),
            ("30.0.0.0/8".parse().unwrap(), RouteDecision::Group(2)),
        ],
        neighbours: (1..4).map(|n| (n.into(), neighbour(n), [2, 0, 0, 0, 2, n])).collect(),
        v4: true,
        v6: true,
    }
}

fn udp(to: [u8; 4], port: u16) -> (u16, Vec<u8>) {
    let mut frame = Vec::new();
    PacketBuilder::ethernet2([2, 7, 7, 7, 7, 7], mac_of(0))
        .ipv4([10, 9, 9, 9], to, 64)
        .udp(port, 53)
        .write(&mut frame, b"payload")
        .unwrap();
    (0, frame)
}

#[test]
fn flows_keep_their_path_and_spread_by_weight() {
    let world = plain();
    let flows: Vec<_> = (0..6000).map(|port| udp([20, 1, 1, 1], port)).collect();
    let first = check(&world, flows.clone());
    assert_eq!(check(&world, flows), first);
    for vport in 1..4 {
        let count = first.iter().filter(|&&decision| decision == Decision::Out(vport)).count();
        let want = usize::from(vport) * 1000;
        assert!(count.abs_diff(want) < 200, "{count} of {want}");
    }
}

#[test]
fn routes_follow_group_and_neighbour_changes() {
    let world = plain();
    let mut fib = world.fib();
    let mut decide = |message| {
        fib.apply(message);
        let (vport, frame) = udp([10, 1, 1, 1], 7);
        let mut list = FrameList(vec![(vport, frame, None)]);
        IpForwarder::default().process(&mut fib, &mut list);
        list.0.remove(0).2.unwrap()
    };
    let address = IpAddr::from([10, 0, 0, 3]);
    let hops = vec![GroupHop { vport: 3, gateway: Some(address), weight: 1 }];
    assert_eq!(decide(ToGuest::Group { id: 0, hops, mtu: 0 }), Decision::Out(3));
    let unknown = ToGuest::Neighbour { vport: 3, address, mac: None };
    assert_eq!(decide(unknown), Decision::Punt(PuntClass::Neighbour));
    let resolved = ToGuest::Neighbour { vport: 3, address, mac: Some([2; 6]) };
    assert_eq!(decide(resolved), Decision::Out(3));
    let down = Vport { up: false, ..named(3) };
    assert_eq!(decide(ToGuest::Vport(down)), Decision::Punt(PuntClass::Exception));
}

/// RFC 8950: an IPv4 route by an IPv6 gateway; and a neighbour on the link.
#[test]
fn ipv4_routes_may_have_ipv6_or_no_gateway() {
    let mut world = plain();
    let gateway: IpAddr = "fe80::9".parse().unwrap();
    world.groups[0].0 = vec![GroupHop { vport: 2, gateway: Some(gateway), weight: 1 }];
    world.neighbours.push((2, gateway, [2, 0, 0, 0, 2, 99]));
    world.neighbours.push((2, IpAddr::from([30, 1, 1, 1]), [2, 0, 0, 0, 2, 98]));
    let frames = vec![udp([10, 1, 1, 1], 7), udp([30, 1, 1, 1], 7), udp([30, 1, 1, 2], 7)];
    let want = [Decision::Out(2), Decision::Out(2), Decision::Punt(PuntClass::Neighbour)];
    assert_eq!(check(&world, frames), want);
}

/// A common route with the frame before does not affect ingress, length and options.
#[test]
fn frames_of_one_route_are_checked_individually() {
    for back in [false, true] {
        let mut world = plain();
        world.vports[1].hooked.back_v4 = back;
        world.groups[0].1 = 60;
        let frame = |came_by, options: &[u8], bytes| {
            let mut header =
                etherparse::Ipv4Header::new(bytes, 64, 17u8.into(), [10, 9, 9, 9], [10, 1, 1, 1])
                    .unwrap();
            header.options = options.try_into().unwrap();
            let mut frame = Vec::new();
            PacketBuilder::ethernet2([2, 7, 7, 7, 7, 7], mac_of(came_by))
                .ip(IpHeaders::Ipv4(header, Default::default()))
                .write(&mut frame, 17u8.into(), &vec![0; bytes.into()])
                .unwrap();
            (came_by, frame)
        };
        let fits = || frame(0, &[], 40);
        let frames =
            vec![fits(), frame(0, &[], 41), frame(0, &[1; 4], 8), frame(1, &[], 8), fits()];
        let exception = Decision::Punt(PuntClass::Exception);
        let returns = if back { Decision::Punt(PuntClass::Hook) } else { Decision::Out(1) };
        let want = [Decision::Out(1), exception, exception, returns, Decision::Out(1)];
        assert_eq!(check(&world, frames), want);
    }
}

#[test]
fn routing_protocols_have_their_own_punt_class() {
    let mut world = plain();
    world.locals = BTreeMap::from([
        (IpAddr::from([10, 0, 0, 9]), true),
        ("2001:db8::9".parse().unwrap(), true),
    ]);
    let llc = |to: [u8; 6]| {
        let mut frame = to.to_vec();
        frame.extend([2, 7, 7, 7, 7, 7, 0, 30, 0xfe, 0xfe, 0x03, 0x83]);
        frame.resize(44, 0);
        (0, frame)
    };
    let v4 = |to: [u8; 4], dscp: u8, options: &[u8]| {
        let mut ip = etherparse::Ipv4Header::new(8, 1, 89u8.into(), [10, 9, 9, 9], to).unwrap();
        ip.dscp = dscp.try_into().unwrap();
        ip.options = options.try_into().unwrap();
        ether(IpHeaders::Ipv4(ip, Default::default()), to[0] == 224)
    };
    let v6 = |to: &str, dscp: u8| {
        let to: Ipv6Addr = to.parse().unwrap();
        let ip = etherparse::Ipv6Header {
            traffic_class: dscp << 2,
            next_header: 89u8.into(),
            hop_limit: 1,
            source: "fe80::7".parse::<Ipv6Addr>().unwrap().octets(),
            destination: to.octets(),
            ..Default::default()
        };
        ether(IpHeaders::Ipv6(ip, Default::default()), to.is_multicast())
    };
    let mut mpls = llc(mac_of(0));
    mpls.1[12..14].copy_from_slice(&[0x88, 0x47]);
    let control = [
        llc([1, 0x80, 0xc2, 0, 0, 0x14]),
        llc([9, 0, 0x2b, 0, 0, 5]),
        llc(mac_of(0)),
        v4([224, 0, 0, 5], 48, &[]),
        v4([224, 0, 0, 22], 48, &[0x94, 4, 0, 0]), // IGMP, with a router alert
        v4([10, 0, 0, 9], 48, &[]),
        v4([10, 0, 0, 9], 56, &[]),
        v6("ff02::5", 48),
        v6("2001:db8::9", 56),
    ];
    let local = [
        v4([224, 1, 1, 1], 46, &[]),
        v4([10, 0, 0, 9], 47, &[]),
        v6("ff02::5", 47),
        v6("2001:db8::9", 0),
        mpls,
    ];
    let mut want = vec![Decision::Punt(PuntClass::Control); control.len()];
    want.extend([Decision::Punt(PuntClass::Local); 5]);
    assert_eq!(check(&world, control.into_iter().chain(local).collect()), want);
}

/// Returns a frame with a packet of eight bytes after its header, to vport 0 or to a group.
fn ether(ip: IpHeaders, group: bool) -> (u16, Vec<u8>) {
    let to = if group { [1, 0, 0x5e, 0, 0, 5] } else { mac_of(0) };
    let mut frame = Vec::new();
    let builder = PacketBuilder::ethernet2([2, 7, 7, 7, 7, 7], to).ip(ip);
    builder.write(&mut frame, 89u8.into(), &[0; 8]).unwrap();
    (0, frame)
}

#[test]
fn packets_for_the_kernel_are_not_exceptions() {
    let mut world = plain();
    world.groups[0].1 = 60;
    world.routes.push(("40.0.0.0/8".parse().unwrap(), RouteDecision::Punt));
    let large = |df| {
        let mut ip =
            etherparse::Ipv4Header::new(41, 64, 17u8.into(), [10, 9, 9, 9], [10, 1, 1, 1]).unwrap();
        ip.dont_fragment = df;
        let mut frame = Vec::new();
        PacketBuilder::ethernet2([2, 7, 7, 7, 7, 7], mac_of(0))
            .ip(IpHeaders::Ipv4(ip, Default::default()))
            .write(&mut frame, 17u8.into(), &[0; 41])
            .unwrap();
        (0, frame)
    };
    let frames = vec![large(false), large(true), udp([40, 1, 1, 1], 7), udp([50, 1, 1, 1], 7)];
    let want = [PuntClass::Hook, PuntClass::Exception, PuntClass::Hook, PuntClass::Exception];
    assert_eq!(check(&world, frames), want.map(Decision::Punt));
}
