//! Vrouters that the mux itself forwards for, with mirrors that the test controls.

mod common;

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use common::engines::*;
use common::*;
use ipnet::IpNet;
use pdp_mux::control::MuxServer;
use pdp_proto::limits::{PATTERN_BYTES_MAX, PUNT_FILTERS_MAX};
use pdp_proto::mux::*;
use pdp_proto::routes::{FromGuest, GroupHop, RouteDecision, ToGuest, encode};
use pdp_wire::vlan;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

#[test]
fn engine_keeps_its_tables_when_the_vnet_changes() {
    let (root, mux) = (tempfile::tempdir().unwrap(), start(2));
    let (mut vnet, listener) = engine(root.path(), "red");
    put(&mux, &vnet);
    let mut mirror = Mirror::accept(&listener);
    let [mut tap, mut h1, mut h2] = [0, 1, 2].map(|node: usize| Peer::tap_of(&vnet.nodes[node]));
    // Before it has routes, all frames go to the control guest.
    assert!(h1.out(0, &packet([10, 2, 0, 2], 1)));
    assert_eq!(mark_of(&tap.expect(1)[0].1), 1);
    assert!(!engine_stats(&mux, "red").synced);
    mirror.snapshot();
    forwards(&mut h1, &mut h2, 2);
    let stats = engine_stats(&mux, "red");
    assert_eq!((stats.synced, stats.routes, stats.fault), (true, 2, None));
    // Packets for the router itself, and packets without a route.
    for to in [[10, 1, 0, 1], [10, 3, 0, 1]] {
        assert!(h1.out(0, &packet(to, 3)));
        assert_eq!(mark_of(&tap.expect(1)[0].1), 3);
    }
    // A changed vnet keeps the connection and the tables.
    vnet.nodes[2].ports[0].mtu = 1400;
    put(&mux, &vnet);
    forwards(&mut h1, &mut h2, 4);
    mirror.settle(2);
    // A change without a snapshot applies. The engine continues when its mirror ends.
    let prefix: IpNet = "10.3.0.0/16".parse().unwrap();
    mirror.push(&[ToGuest::Route { prefix, target: RouteDecision::Drop }]);
    mirror.settle(3);
    assert!(h1.out(0, &packet([10, 3, 0, 1], 5)));
    eventually("dropped", || dropped(&node_stats(&mux, "red", "r1"), "guest-blackhole") == 1);
    drop(mirror);
    forwards(&mut h1, &mut h2, 6);
    // The next mirror's snapshot applies once it is complete. Routes that it lacks are removed.
    let mut mirror = Mirror::accept(&listener);
    mirror.push(&[ToGuest::Begin]);
    mirror.settle(4);
    forwards(&mut h1, &mut h2, 7);
    mirror.snapshot();
    assert!(h1.out(0, &packet([10, 3, 0, 1], 8)));
    assert_eq!(mark_of(&tap.expect(1)[0].1), 8);
    // A dump of all routes.
    mirror.push(&[ToGuest::Dump(9)]);
    let mut rows = 0;
    loop {
        match &mirror.hear()[..] {
            [FromGuest::Table { dump: 9, routes }] => rows += routes.len(),
            [FromGuest::TableEnd(9)] => break,
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(rows, 2);
    // With guests instead, the mirror hears no more of the engine.
    vnet.nodes[0].router.as_mut().unwrap().engine = None;
    put(&mux, &vnet);
    assert_eq!(mirror.stream.read(&mut [0; 64]).unwrap(), 0);
    assert!(h1.out(0, &packet([10, 2, 0, 2], 10)));
    eventually("no guest", || dropped(&node_stats(&mux, "red", "r1"), "no-guest") == 1);
    assert_adds_up(&common::stats(&mux));
}

#[test]
fn invalid_mirror_affects_only_its_own_vrouter() {
    let (root, mux) = (tempfile::tempdir().unwrap(), start(1));
    let [(red, bad), (blue, good)] = ["red", "blue"].map(|name| engine(root.path(), name));
    put(&mux, &red);
    put(&mux, &blue);
    let mut mirror = Mirror::accept(&good);
    mirror.snapshot();
    let [mut h1, mut h2] = [1, 2].map(|node: usize| Peer::tap_of(&blue.nodes[node]));
    let mut mark = 0;
    let mut blue_goes_on = || {
        mark += 1;
        forwards(&mut h1, &mut h2, mark);
    };
    let mut first = Mirror::accept(&bad);
    first.snapshot();
    // An invalid message, one of length 0, and one that never ends: the mirror is tried again.
    for nonsense in [&[0xff; 64][..], &[3, 0, 0, 0, 9, 9, 9], &[1, 0, 0, 0, 0xff, 0xff]] {
        first.stream.write_all(nonsense).unwrap();
        blue_goes_on();
        first = Mirror::accept(&bad);
    }
    first.snapshot();
    // More requests than the engine answers.
    let dumps: Vec<_> = (0..40).map(ToGuest::Dump).collect();
    first.push(&[vec![ToGuest::Begin], dumps].concat());
    first = Mirror::accept(&bad);
    eventually("it has a fault", || engine_stats(&mux, "red").fault.is_none());
    // Snapshots that begin and never end, or end at once.
    let snapshots = [ToGuest::Begin, ToGuest::Begin, ToGuest::End, ToGuest::End];
    let snapshots: Vec<_> = snapshots.iter().cycle().take(2000).cloned().collect();
    first.push(&snapshots);
    first.settle(2);
    blue_goes_on();
    // The mirror does not read the answers, so the engine stops reading its messages.
    first.stream.set_write_timeout(Some(Duration::from_millis(500))).unwrap();
    let barriers: Vec<_> = (0..4000).map(ToGuest::Barrier).collect();
    let barriers = encode(&barriers).unwrap();
    while first.stream.write_all(&barriers).is_ok() {
        blue_goes_on();
    }
    drop(first);
    // More routes than it may have.
    let mut mirror = Mirror::accept(&bad);
    mirror.push(&[ToGuest::Begin]);
    mirror.stream.set_write_timeout(Some(PATIENCE)).unwrap();
    let route = |number: u32| {
        let address = Ipv4Addr::from(number << 7);
        let prefix = IpNet::new(address.into(), 25).unwrap();
        ToGuest::Route { prefix, target: RouteDecision::Punt }
    };
    let mut number = 0;
    let ended = loop {
        let some: Vec<_> = (number..number + 4000).map(route).collect();
        number += 4000;
        if mirror.stream.write_all(&encode(&some).unwrap()).is_err() {
            break number;
        }
        assert!(number < 1 << 25, "no bound");
    };
    assert!(ended > 100_000, "{ended} routes are not much");
    let fault = soon("it is told", || engine_stats(&mux, "red").fault);
    assert!(fault.contains("raise resources.routes"), "{fault}");
    assert!(engine_stats(&mux, "red").memory_bytes <= MEMORY_BYTES);
    blue_goes_on();
    assert_eq!(engine_stats(&mux, "blue").fault, None);
    assert_adds_up(&stats(&mux));
}

/// Any frames, with any tables.
#[test]
fn engines_isolate_vrouters_and_counters_add_up() {
    let (root, mux) = (tempfile::tempdir().unwrap(), start(2));
    let mut random = SmallRng::seed_from_u64(7);
    let names = ["v0", "v1", "v2"];
    let mut vnets: Vec<_> = names.iter().map(|name| engine(root.path(), name)).collect();
    vnets.iter().for_each(|(vnet, _)| put(&mux, vnet));
    let mut mirrors: Vec<_> = vnets.iter().map(|(_, it)| Mirror::accept(it)).collect();
    mirrors.iter_mut().for_each(Mirror::snapshot);
    let mut peers: Vec<[Peer; 3]> = vnets
        .iter()
        .map(|(vnet, _)| [0, 1, 2].map(|node: usize| Peer::tap_of(&vnet.nodes[node])))
        .collect();
    let (mut sent, mut seen) = (0, 0);
    for round in 0..300 {
        for (number, peers) in peers.iter_mut().enumerate() {
            for _ in 0..8 {
                let to = [10, random.random_range(0..5), 0, random.random_range(0..4)];
                let mut frame = packet(to, number as u64);
                match random.random_range(0..6) {
                    0 => frame[..6].fill(0xff),
                    1 => frame[6..14].fill(random.random()),
                    2 => frame[14] = random.random(),
                    3 => frame[22] = random.random_range(0..3),
                    _ => {}
                }
                sent += u64::from(peers[1].out(0, &frame));
            }
            for peer in peers {
                for (_, frame) in peer.receive() {
                    seen += 1;
                    assert_eq!(mark_of(&frame), number as u64, "of another vnet");
                }
            }
        }
        let which = random.random_range(0..mirrors.len());
        let hop = |random: &mut SmallRng| {
            // Includes ports that it does not have.
            let gateway = random.random::<bool>().then(|| IpAddr::from([10, 2, 0, 2]));
            GroupHop { vport: random.random_range(0..4), gateway, weight: random.random() }
        };
        let hops = (0..random.random_range(0..5)).map(|_| hop(&mut random)).collect();
        let prefix = format!("10.{}.0.0/16", random.random_range(0..5)).parse().unwrap();
        let (id, mtu) = (random.random_range(0..4), random.random_range(0..2000));
        let message = match random.random_range(0..7) {
            0 => ToGuest::Group { id, hops, mtu },
            1 => ToGuest::Route { prefix, target: RouteDecision::Group(id) },
            2 => ToGuest::RouteGone(prefix),
            3 => ToGuest::GroupGone(id),
            4 => ToGuest::Begin,
            5 => ToGuest::End,
            _ => ToGuest::Forwarding { v4: random.random(), v6: random.random() },
        };
        mirrors[which].push(&[message]);
        if round % 20 == 0 {
            mirrors[which].snapshot();
            let vnet = &mut vnets[which].0;
            vnet.nodes[0].ports[1].mtu = random.random_range(1000..1500);
            put(&mux, vnet);
        }
    }
    eventually("all is counted", || {
        let stats = stats(&mux);
        let hosts = names.iter().map(|name| stats.vnets[*name].nodes["h1"].clone());
        let made: u64 = hosts.map(|host| host.ports["eth0"].made).sum();
        let open: u64 =
            stats.vnets.values().flat_map(|it| it.nodes.values()).map(|it| it.in_flight).sum();
        made == sent && open == 0
    });
    assert_adds_up(&stats(&mux));
    assert!(seen > sent / 10, "{seen} of {sent} seen");
}

/// Returns a memfd with these frames for a generator.
fn frames_of(frames: &[Vec<u8>]) -> std::os::fd::OwnedFd {
    let fd = rustix::fs::memfd_create("frames", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    let mut file = std::fs::File::from(fd);
    for frame in frames {
        file.write_all(&(frame.len() as u16).to_le_bytes()).unwrap();
        file.write_all(frame).unwrap();
    }
    file.into()
}

/// Returns the most expensive filters. They match no frame of zeros.
fn dear_filters() -> Vec<PuntFilterConfig> {
    let mut value = vec![0; PATTERN_BYTES_MAX];
    value[PATTERN_BYTES_MAX - 1] = 1;
    let matches = vec![BytePattern { offset: 40, value, mask: vec![0xff; PATTERN_BYTES_MAX] }];
    vec![PuntFilterConfig { matches, class: 0 }; PUNT_FILTERS_MAX]
}

/// Vnets with expensive frames, far more than there is time for, and with far
/// more weight compete with one that wants less than its power. That one loses
/// nothing. Frames of the others that find no space are dropped before any work.
#[test]
fn fast_path_within_its_power_loses_no_frame() {
    const FRAMES: u64 = 409_600;
    const OTHERS: usize = 8;
    const PART: usize = 256;
    let (root, mux) = (tempfile::tempdir().unwrap(), start(1));
    let generator = |name: &str, frames| {
        let outlet = OutletConfig::Generator(GeneratorConfig { pps: 0, frames, number_at: None });
        MuxRequest::PutExternal(ExternalConfig::new(name, 1500, outlet))
    };
    // The `index`th vnet: frames by its VLAN arrive from one generator and leave by the other.
    let lab = |index: usize| {
        let (mut vnet, listener) = engine(root.path(), &format!("v{index}"));
        let by = Encapsulation::Vlan(vlan::VlanTunnel { id: 10 + index as u16 });
        vnet.vlinks[0].ends[0] = outside("in", "G", by.clone());
        vnet.vlinks[1].ends[1] = outside("out", "S", by);
        if index > 0 {
            vnet.nodes[0].router.as_mut().unwrap().punt_filters = dear_filters();
            let mut heavy =
                router(&directory(root.path(), &vnet.name), "r2", 1, &[(0, AttachMode::Runtime)]);
            heavy.router.as_mut().unwrap().guests[0].weight = 64_000;
            vnet.nodes.push(heavy);
        }
        (vnet, listener)
    };
    let tagged = |index: usize, frame: Vec<u8>| {
        let tag = [0x81, 0, 0, 10 + index as u8];
        [&frame[..12], &tag, &frame[12..], &vec![0; 300 - frame.len()]].concat()
    };
    let own = |at: usize| if at == 0 { 0 } else { 1 + at % OTHERS };
    let frames: Vec<_> = (0..PART).map(|at| tagged(own(at), packet([10, 2, 0, 2], 0))).collect();
    // No vnet gets frames at first, so that all is ready before any arrive.
    let begin = [generator("G", 1), generator("S", 1)];
    for request in begin {
        assert_eq!(mux.handle(request, vec![frames_of(&frames[1..2])]), MuxReply::Done);
    }
    let mut labs: Vec<_> = (0..=OTHERS).map(lab).collect();
    labs[0].0.nodes[0].router.as_mut().unwrap().engine.as_mut().unwrap().power = 100_000;
    labs.iter().for_each(|(vnet, _)| put(&mux, vnet));
    let mut mirror = Mirror::accept(&labs[0].1);
    mirror.snapshot();
    assert_eq!(mux.handle(generator("G", FRAMES), vec![frames_of(&frames)]), MuxReply::Done);
    let expected = FRAMES / PART as u64;
    let v0 = || node_stats(&mux, "v0", "r1");
    // Its power changes while frames pass, and its tables are kept.
    eventually("some came", || v0().ports["eth0"].received > expected / 4);
    labs[0].0.nodes[0].router.as_mut().unwrap().engine.as_mut().unwrap().power = 110_000;
    put(&mux, &labs[0].0);
    let all_received = |mux: &MuxServer| stats(mux).externals["G"].received >= FRAMES;
    eventually("all came", || all_received(&mux) && v0().ports["eth1"].sent >= expected);
    let stats = stats(&mux);
    let own = &stats.vnets["v0"].nodes["r1"];
    let lost: u64 = own.ports.values().flat_map(|port| port.dropped.values()).sum();
    assert_eq!((own.ports["eth1"].sent, lost), (expected, 0), "{own:#?}");
    assert!(own.engine.as_ref().unwrap().used_ns > 0);
    let refused = |index: usize| {
        let node = &stats.vnets[&format!("v{index}")].nodes["r1"];
        assert_eq!(dropped(node, "worker-behind"), 0, "{node:#?}");
        dropped(node, "fastpath-power")
    };
    assert!((1..=OTHERS).map(refused).sum::<u64>() > 0, "{stats:#?}");
    mirror.settle(2);
    assert_eq!(engine_stats(&mux, "v0").routes, 2);
    eventually("all is counted", || {
        let stats = common::stats(&mux);
        stats.vnets.values().flat_map(|it| it.nodes.values()).all(|node| node.in_flight == 0)
    });
    assert_adds_up(&common::stats(&mux));
}

/// As with guests: a generator whose frames all belong to one vnet
/// makes only as many as can be queued, so that none is dropped.
#[test]
fn full_fast_path_slows_its_source() {
    const FRAMES: u64 = 60_000;
    let (root, mux) = (tempfile::tempdir().unwrap(), start(1));
    let (mut vnet, _listener) = engine(root.path(), "red");
    vnet.nodes[0].router.as_mut().unwrap().punt_filters = dear_filters();
    vnet.vlinks[0].ends[0] = outside("in", "G", Encapsulation::Interface);
    let generator = |frames| {
        let outlet = OutletConfig::Generator(GeneratorConfig { pps: 0, frames, number_at: None });
        MuxRequest::PutExternal(ExternalConfig::new("G", 1500, outlet))
    };
    let frame = [packet([10, 2, 0, 2], 0), vec![0; 300]].concat();
    assert_eq!(mux.handle(generator(1), vec![frames_of(&[frame])]), MuxReply::Done);
    put(&mux, &vnet);
    assert_eq!(mux.handle(generator(FRAMES), vec![]), MuxReply::Done);
    let received = || node_stats(&mux, "red", "r1").ports["eth0"].received;
    eventually("all came", || received() >= FRAMES);
    let r1 = node_stats(&mux, "red", "r1");
    assert_eq!(dropped(&r1, "fastpath-power"), 0, "{r1:#?}");
    assert_adds_up(&stats(&mux));
}
