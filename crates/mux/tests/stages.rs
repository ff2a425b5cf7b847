//! The promises of the mux's stages, seen by memif peers.

mod common;
#[path = "../../memif/tests/common/raw.rs"]
#[allow(dead_code)]
mod raw;

use std::collections::{HashMap, VecDeque};
use std::io::Read;
use std::path::Path;
use std::time::{Duration, Instant};

use common::*;
use pdp_mux::control::schedule::now_ns;
use pdp_proto::mux::*;
use pdp_wire::tag::{GuestDrop, PuntClass, Tag, TagVerdict};
use pdp_wire::vxlan;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{
    AddressFamily, RecvFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recv, socket_with,
};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

const RUNTIME: AttachMode = AttachMode::Runtime;

#[test]
fn frame_crosses_the_guest_and_is_counted() {
    let root = tempfile::tempdir().unwrap();
    let mux = start(2);
    let vnet = two_hosts(root.path(), "red", &[(0, RUNTIME)]);
    put(&mux, &vnet);
    let (mut h1, mut h2) = (Peer::tap_of(&vnet.nodes[1]), Peer::tap_of(&vnet.nodes[2]));
    let mut guest = Peer::guest_of(&vnet.nodes[0], 0);
    eventually("guest attached", || node_stats(&mux, "red", "r1").guests[&0].connected);
    for number in 0..10u64 {
        assert!(h1.out(0, &frame(100, number)));
    }
    for (number, (tag, bytes)) in guest.expect(10).into_iter().enumerate() {
        assert_eq!(tag, Tag::deliver(0, 0));
        assert_eq!(bytes, frame(100, number as u64));
        assert!(guest.send(out(1, 0), &bytes));
    }
    let got = h2.expect(10);
    assert!((0..10).all(|number| got[number].1 == frame(100, number as u64)));
    assert_adds_up(&stats(&mux));
    let r1 = node_stats(&mux, "red", "r1");
    assert_eq!((r1.ports["eth0"].received, r1.ports["eth1"].sent), (10, 10));
    assert_eq!(r1.ports["eth0"].received_bytes, 1000);
    assert_eq!((r1.guests[&0].to_guest, r1.guests[&0].completed, r1.in_flight), (10, 10, 0));
    assert_eq!(node_stats(&mux, "red", "h1").ports["eth0"].made, 10);
    assert_eq!(node_stats(&mux, "red", "h2").ports["eth0"].punted, 10);
}

#[test]
fn mux_executes_guest_verdicts() {
    let root = tempfile::tempdir().unwrap();
    let mux = start(1);
    let mut vnet = two_hosts(root.path(), "red", &[(0, RUNTIME)]);
    vnet.nodes[0].router.as_mut().unwrap().punt_limits[1] = Rate { bps: 0, pps: 1 };
    put(&mux, &vnet);
    let (mut h1, mut h2) = (Peer::tap_of(&vnet.nodes[1]), Peer::tap_of(&vnet.nodes[2]));
    let (mut tap, mut guest) = (Peer::tap_of(&vnet.nodes[0]), Peer::guest_of(&vnet.nodes[0], 0));
    eventually("all there", || node_stats(&mux, "red", "r1").tap_connected);
    let tag = |verdict, vport, last| Tag { verdict, vport, last, trace: 0 };
    for number in 0..4 {
        assert!(h1.out(0, &frame(60, number)));
    }
    let frames = guest.expect(4);
    // One frame is flooded, one dropped, one kept, and one punted. Then the kept one is sent.
    assert!(guest.send(tag(TagVerdict::Out, 0, false), &frames[0].1));
    assert!(guest.send(tag(TagVerdict::Out, 1, true), &frames[0].1));
    assert!(guest.send(tag(TagVerdict::Drop(GuestDrop::NoRoute), 0, true), &[]));
    assert!(guest.send(tag(TagVerdict::Kept, 0, true), &[]));
    assert!(guest.send(tag(TagVerdict::Punt(PuntClass::Local), 0, true), &frames[3].1));
    assert!(guest.send(tag(TagVerdict::Out, 1, false), &frames[2].1));
    for _ in 0..100 {
        assert!(guest.send(tag(TagVerdict::Punt(PuntClass::Neighbour), 1, false), &frames[0].1));
    }
    let got: Vec<u64> = h2.expect(2).iter().map(|(_, frame)| mark(frame)).collect();
    assert_eq!(got, [0, 2]);
    assert_eq!(mark(&h1.expect(1)[0].1), 0);
    let punts = tap.expect(33);
    assert_eq!((punts[0].0, mark(&punts[0].1)), (Tag::deliver(0, 0), 3));
    assert_eq!(punts[1].0, Tag::deliver(1, 0));
    eventually("all counted", || {
        let r1 = node_stats(&mux, "red", "r1");
        r1.ports.values().map(|port| port.made).sum::<u64>() == 102
    });
    let r1 = node_stats(&mux, "red", "r1");
    assert_eq!(dropped(&r1, "guest-no-route"), 1);
    assert_eq!(r1.ports["eth0"].consumed, 1);
    // A limit permits its burst of 32, and more over time.
    let limited = dropped(&r1, "punt-limit-neighbour");
    assert!((60..=68).contains(&limited), "{limited}");
    assert_adds_up(&stats(&mux));
}

#[test]
fn punt_flood_leaves_ring_space_for_routing_protocols() {
    const FLOOD: u64 = 2000;
    const HELLOS: u64 = 20;
    let root = tempfile::tempdir().unwrap();
    let mux = start(1);
    let vnet = two_hosts(root.path(), "red", &[(0, RUNTIME)]);
    put(&mux, &vnet);
    let (mut tap, mut guest) = (Peer::tap_of(&vnet.nodes[0]), Peer::guest_of(&vnet.nodes[0], 0));
    eventually("all there", || node_stats(&mux, "red", "r1").tap_connected);
    let mut punt = |class, number| {
        let tag = Tag { verdict: TagVerdict::Punt(class), vport: 0, last: false, trace: 0 };
        eventually("it is taken", || guest.send(tag, &frame(60, number)));
    };
    let made = || node_stats(&mux, "red", "r1").ports["eth0"].made;
    // The helper does not read.
    (0..FLOOD).for_each(|number| punt(PuntClass::Hook, number));
    eventually("the flood is over", || made() == FLOOD);
    let refused = dropped(&node_stats(&mux, "red", "r1"), "tap-ring-full");
    assert!(refused > 0);
    (0..HELLOS).for_each(|number| punt(PuntClass::Control, FLOOD + number));
    eventually("all came", || made() == FLOOD + HELLOS);
    assert_eq!(dropped(&node_stats(&mux, "red", "r1"), "tap-ring-full"), refused);
    let got = tap.expect((FLOOD - refused + HELLOS) as usize);
    let last: Vec<u64> = got.iter().rev().take(HELLOS as usize).map(|it| mark(&it.1)).collect();
    assert_eq!(last, (FLOOD..FLOOD + HELLOS).rev().collect::<Vec<_>>());
    assert_adds_up(&stats(&mux));
}

#[test]
fn guests_with_invalid_tags_are_disconnected() {
    let root = tempfile::tempdir().unwrap();
    let mux = start(1);
    let vnet = two_hosts(root.path(), "red", &[(0, RUNTIME), (1, AttachMode::Tap)]);
    put(&mux, &vnet);
    let kept = Tag { verdict: TagVerdict::Kept, vport: 0, last: false, trace: 0 };
    let lies: [(usize, u32, &str); 6] = [
        (0, out(0, 0).emit(), "completion"),
        (0, Tag { last: false, ..out(2, 0) }.emit(), "vport 2"),
        (0, Tag::deliver(0, 0).emit(), "reserved for the mux"),
        (0, 0x63636363, "bad tag"),
        (0, 0, "bad tag"),
        (1, kept.emit(), "without completions"),
    ];
    for (round, (index, lie, reason)) in lies.into_iter().enumerate() {
        let mut guest = Peer::guest_of(&vnet.nodes[0], index);
        assert!(guest.send_raw(lie, &[0; 60]));
        eventually("the liar is out", || !guest.is_up());
        let stats = &node_stats(&mux, "red", "r1").guests[&(index as u32)];
        let last = stats.last_fault.clone().unwrap();
        assert!(last.contains(reason), "round {round}: {last}");
        assert!(!stats.connected || round > 100);
    }
    assert_eq!(node_stats(&mux, "red", "r1").guests[&0].faults, 5);
    let mut tap = Peer::tap_of(&vnet.nodes[1]);
    assert!(tap.send(Tag { verdict: TagVerdict::Kept, vport: 0, last: true, trace: 0 }, &[]));
    eventually("the lying TAP helper is out", || !tap.is_up());
    assert_adds_up(&stats(&mux));
}

#[test]
fn endlessly_reconnecting_client_is_rate_limited() {
    let root = tempfile::tempdir().unwrap();
    let mux = start(1);
    let vnet = two_hosts(root.path(), "red", &[(0, RUNTIME)]);
    put(&mux, &vnet);
    let path = &vnet.nodes[0].router.as_ref().unwrap().guests[0].socket;
    let address = SocketAddrUnix::new(path.as_path()).unwrap();
    let (since, mut greeted) = (Instant::now(), 0);
    // On a busy machine most clients leave before the mux greets them, which uses their turns up.
    while since.elapsed() < Duration::from_secs(2) || greeted < 1 && since.elapsed() < PATIENCE {
        let flags = SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        if connect(&socket, &address).is_ok() {
            let mut waits = [PollFd::new(&socket, PollFlags::IN)];
            let time = Timespec { tv_sec: 0, tv_nsec: 1_000_000 };
            let is_readable = poll(&mut waits, Some(&time)).unwrap() > 0;
            // A connection that the mux drops becomes readable too, and has no bytes.
            let mut hello = [0; 64];
            let received = recv(&socket, &mut hello, RecvFlags::DONTWAIT);
            greeted += usize::from(is_readable && received.is_ok_and(|(_, bytes)| bytes > 0));
        }
    }
    // The mux greets 32 at once, and 10 a second.
    let most = 33 + (10.0 * since.elapsed().as_secs_f64()) as usize;
    assert!((1..=most).contains(&greeted), "{greeted} in {:?}", since.elapsed());
    // The next client is served late. Others are served all the time.
    let mut other = Peer::tap_of(&vnet.nodes[1]);
    assert!(other.is_up());
    Peer::guest_of(&vnet.nodes[0], 0);
    let guest = node_stats(&mux, "red", "r1").guests[&0].clone();
    assert_eq!((guest.faults, guest.last_fault), (0, None));
}

/// 32 guests of one vnet begin as many handshakes as
/// allowed, with as many regions, and finish none.
#[test]
fn unfinished_handshakes_do_not_block_other_guests() {
    use pdp_memif::sigbus::REGIONS_COUNT_MAX;
    let root = tempfile::tempdir().unwrap();
    let attach = |number| (number, if number % 2 == 0 { RUNTIME } else { AttachMode::Memif });
    let hostile = two_hosts(root.path(), "mean.red", &(0..32).map(attach).collect::<Vec<_>>());
    let blue = two_hosts(root.path(), "blue", &[(0, RUNTIME)]);
    let memory = raw::memory(0x2000, rustix::fs::SealFlags::SHRINK);
    let region = |index| raw::region(index, 0x2000, Some(memory.try_clone().unwrap()));
    for round in 0..2 {
        // The second round uses a restarted mux.
        let mux = start(1);
        put(&mux, &hostile);
        put(&mux, &blue);
        let mut open = vec![];
        for guest in &hostile.nodes[0].router.as_ref().unwrap().guests {
            for _ in 0..8 {
                let socket = raw::socket(&guest.socket);
                raw::send_one(&socket, &raw::init(0x200, 0, 0));
                (0..16).for_each(|index| _ = raw::send_one(&socket, &region(index)));
                open.push(socket);
            }
        }
        let mapped = || {
            let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
            maps.lines().filter(|line| line.contains("memfd:raw")).count()
        };
        eventually("regions are mapped", || mapped() > 100);
        let mut peers: Vec<_> = (0..3).map(|at| Peer::tap_of(&blue.nodes[at])).collect();
        peers.push(Peer::guest_of(&blue.nodes[0], 0));
        let most = REGIONS_COUNT_MAX / 2;
        assert!(mapped() < most, "round {round}: {} of at most {most} regions", mapped());
        let connected = || node_stats(&mux, "blue", "r1").guests[&0].connected;
        eventually("the other's guest is there", connected);
    }
}

#[test]
fn refused_guest_gets_the_reason() {
    let root = tempfile::tempdir().unwrap();
    let mux = start(1);
    let vnet = two_hosts(root.path(), "red", &[(0, RUNTIME)]);
    put(&mux, &vnet);
    let path = &vnet.nodes[0].router.as_ref().unwrap().guests[0].socket;
    let mut second = Peer::new(path, 1);
    eventually("a fault is counted", || {
        second.is_up();
        node_stats(&mux, "red", "r1").guests[&0].faults > 0
    });
    let reason = node_stats(&mux, "red", "r1").guests[&0].last_fault.clone().unwrap();
    assert!(reason.contains("no such interface"), "{reason}");
}

#[test]
fn dead_guest_is_replaced_at_once() {
    let root = tempfile::tempdir().unwrap();
    let mux = start(1);
    let vnet = two_hosts(root.path(), "red", &[(0, RUNTIME), (1, RUNTIME)]);
    put(&mux, &vnet);
    let mut h1 = Peer::tap_of(&vnet.nodes[1]);
    let (first, mut second) =
        (Peer::guest_of(&vnet.nodes[0], 0), Peer::guest_of(&vnet.nodes[0], 1));
    let r1 = || node_stats(&mux, "red", "r1");
    eventually("both there", || r1().guests.values().all(|guest| guest.connected));
    for number in 0..20 {
        assert!(h1.out(0, &frame(60, number)));
    }
    eventually("all given", || r1().in_flight == 20);
    assert_eq!(second.expect(10).len(), 10);
    drop(first);
    eventually("it left", || !r1().guests[&0].connected);
    assert_eq!((dropped(&r1(), "guest-gone"), r1().in_flight), (10, 10));
    for number in 20..40 {
        assert!(h1.out(0, &frame(60, number)));
    }
    assert_eq!(second.expect(20).len(), 20);
    let mut third = Peer::guest_of(&vnet.nodes[0], 0);
    eventually("a new one", || r1().guests[&0].connected);
    for number in 40..60 {
        assert!(h1.out(0, &frame(60, number)));
    }
    assert_eq!(third.expect(10).len(), 10);
    assert_adds_up(&stats(&mux));
}

#[test]
fn vnet_change_keeps_connections_counters_and_frames() {
    let root = tempfile::tempdir().unwrap();
    let mux = start(1);
    let mut vnet = two_hosts(root.path(), "red", &[(0, RUNTIME), (1, RUNTIME)]);
    put(&mux, &vnet);
    let (mut h1, mut h2) = (Peer::tap_of(&vnet.nodes[1]), Peer::tap_of(&vnet.nodes[2]));
    let mut guests = [Peer::guest_of(&vnet.nodes[0], 0), Peer::guest_of(&vnet.nodes[0], 1)];
    let r1 = || node_stats(&mux, "red", "r1");
    eventually("both there", || r1().guests.values().all(|guest| guest.connected));
    assert!(h1.out(0, &frame(60, 1)));
    eventually("in a guest", || r1().in_flight == 1);
    // Weight, policy, a further host and port, and a link's rate
    // change. Connections, counters and frames in flight stay.
    let router = vnet.nodes[0].router.as_mut().unwrap();
    router.policy = GuestDistribution::Weighted;
    router.guests[1].weight = 3000;
    vnet.nodes[0].ports = ports(3);
    vnet.vlinks[0].leaving.iter_mut().for_each(|it| it.rate_bps = Some(1_000_000_000));
    vnet.nodes.push(host(&directory(root.path(), "red"), "h3"));
    vnet.vlinks.push(vlink("more", port("r1", 2), port("h3", 0)));
    put(&mux, &vnet);
    put(&mux, &vnet);
    assert!(guests.iter_mut().all(Peer::is_up) && h1.is_up() && h2.is_up());
    assert_eq!((r1().in_flight, r1().ports["eth0"].received), (1, 1));
    for number in 0..40 {
        assert!(h1.out(0, &frame(60, number)));
    }
    eventually("shared by weight", || {
        let given = r1().guests.values().map(|guest| guest.to_guest).collect::<Vec<_>>();
        given == [11, 30] || given == [10, 31]
    });
    // Only the guest that was removed is disconnected.
    vnet.nodes[0].router.as_mut().unwrap().guests.pop();
    put(&mux, &vnet);
    eventually("gone", || !guests[1].is_up());
    assert!(guests[0].is_up() && h1.is_up());
    // The link is down: no frame passes in either direction, and the drops are counted.
    vnet.vlinks[0].up = false;
    put(&mux, &vnet);
    assert!(h1.out(0, &frame(60, 0)));
    eventually("link down", || dropped(&node_stats(&mux, "red", "h1"), "link-down") == 1);
    assert!(guests[0].send(Tag { last: false, ..out(0, 0) }, &frame(60, 0)));
    eventually("link down", || dropped(&r1(), "link-down") == 1);
    assert_adds_up(&stats(&mux));
    // Everything is removed.
    assert_eq!(mux.handle(MuxRequest::DeleteVnet { name: "red".into() }, vec![]), MuxReply::Done);
    eventually("all gone", || !guests[0].is_up() && !h1.is_up());
    eventually("all packets are back", || stats(&mux).workers[0].free_packets == 8192);
}

#[test]
fn invalid_vnet_is_refused_and_changes_nothing() {
    let root = tempfile::tempdir().unwrap();
    let mux = start(1);
    let good = two_hosts(root.path(), "red", &[(0, RUNTIME)]);
    put(&mux, &good);
    let refuse = |change: &dyn Fn(&mut VnetConfig)| {
        let mut bad = good.clone();
        change(&mut bad);
        refused(&mux, &bad)
    };
    let outside = |by| outside("out", "A", by);
    assert!(refuse(&|v| v.nodes.push(v.nodes[1].clone())).contains("node h1"));
    assert!(refuse(&|v| v.vlinks[0].ends[0] = port("h1", 1)).contains("no port 1"));
    assert!(refuse(&|v| v.vlinks[1].ends[0] = port("r1", 0)).contains("another vlink"));
    assert!(
        refuse(&|v| v.vlinks[1].ends[1] = outside(Encapsulation::Interface)).contains("external A")
    );
    assert!(
        refuse(&|v| v.vlinks[0].leaving.iter_mut().for_each(|it| it.queue_frames = 1 << 20))
            .contains("4096")
    );
    // If no sockets were offered, the reply says so. Offered sockets can't be used by others.
    let mut elsewhere = good.clone();
    elsewhere.nodes[1].tap_socket = "/nonexistent/x".into();
    let lacks = || mux.handle(MuxRequest::PutVnet(Box::new(elsewhere.clone())), vec![]);
    assert_eq!(lacks(), MuxReply::Lacks { sockets: vec!["/nonexistent/x".into()] });
    let uneven = MuxRequest::Listen { sockets: vec!["/nonexistent/x".into()] };
    assert!(matches!(mux.handle(uneven, vec![]), MuxReply::Failed { .. }));
    assert!(matches!(lacks(), MuxReply::Lacks { .. }));
    assert!(refuse(&|v| v.nodes[1].tap_socket = v.nodes[2].tap_socket.clone()).contains("twice"));
    assert!(refuse(&|v| v.name = "blue".into()).contains("already used by vnet red"));
    let (device, mac) = ("none".into(), [2; 6]);
    let outlet = OutletConfig::Xdp(Device { device, ifindex: 1, mac, is_virtual: false });
    let external = ExternalConfig::new("A", 1500, outlet);
    assert_eq!(mux.handle(MuxRequest::PutExternal(external), vec![]), MuxReply::Done);
    let tunnel = |vni, remote: &str| {
        let (local, remote) = ("10.0.0.1".parse().unwrap(), remote.parse().unwrap());
        outside(Encapsulation::Vxlan(vxlan::VxlanTunnel { local, remote, port: 4789, vni }))
    };
    assert!(
        refuse(&|v| v.vlinks[1].ends[1] = tunnel(1 << 24, "10.0.0.2"))
            .contains("a key out of range")
    );
    assert!(refuse(&|v| v.vlinks[1].ends[1] = tunnel(1, "::1")).contains("families"));
    let twice = refuse(&|v| {
        v.vlinks[0].ends[0] = tunnel(1, "10.0.0.2");
        v.vlinks[1].ends[1] = tunnel(1, "10.0.0.2");
    });
    assert!(twice.contains("another vlink"), "{twice}");
    put(&mux, &good);
    assert_eq!(stats(&mux).vnets.len(), 1);
    let mut used = good.clone();
    used.vlinks[1].ends[1] = tunnel(1, "10.0.0.2");
    put(&mux, &used);
    let delete = MuxRequest::DeleteExternal { name: "A".into() };
    assert!(
        matches!(mux.handle(delete, vec![]), MuxReply::Failed { error } if error.contains("red"))
    );
    // If an interface moves where a network can't follow, the request fails until the network can.
    let moves = |outlet| {
        let external = ExternalConfig::new("A", 1500, outlet);
        let ask = |request, fds| mux.handle(request, fds);
        put_with_sockets(ask, MuxRequest::PutExternal(external))
    };
    for _ in 0..2 {
        let moved = moves(OutletConfig::Memif { socket: root.path().join("a.sock") });
        assert!(
            matches!(moved, MuxReply::Failed { error } if error.contains("can't have tunnels"))
        );
    }
    let sink = GeneratorConfig { pps: 1, frames: 1, number_at: None };
    assert_eq!(moves(OutletConfig::Generator(sink)), MuxReply::Done);
}

#[test]
fn filters_policing_and_mtu_apply_before_guests() {
    let root = tempfile::tempdir().unwrap();
    let mux = start(1);
    let mut vnet = two_hosts(root.path(), "red", &[(0, RUNTIME)]);
    let matches = vec![BytePattern { offset: 21, value: vec![7], mask: vec![0xff] }];
    let router = vnet.nodes[0].router.as_mut().unwrap();
    router.punt_filters = vec![PuntFilterConfig { matches, class: 0 }];
    vnet.nodes[1].ports[0].mtu = 9000;
    put(&mux, &vnet);
    let (mut h1, mut tap) = (Peer::tap_of(&vnet.nodes[1]), Peer::tap_of(&vnet.nodes[0]));
    let r1 = || node_stats(&mux, "red", "r1");
    eventually("there", || r1().tap_connected);
    assert!(h1.out(0, &frame(60, 8)));
    eventually("no guest", || dropped(&r1(), "no-guest") == 1);
    let mut guest = Peer::guest_of(&vnet.nodes[0], 0);
    eventually("guest", || r1().guests[&0].connected);
    assert!(h1.out(0, &frame(60, 7)));
    assert!(h1.out(0, &frame(1519, 8)));
    assert!(h1.out(0, &frame(1518, 9)));
    assert!(h1.out(0, &frame(60, 10)[..10]));
    assert_eq!(mark(&tap.expect(1)[0].1), 7);
    assert_eq!(mark(&guest.expect(1)[0].1), 9);
    eventually("too big", || dropped(&r1(), "too-big") == 1);
    eventually("runt", || dropped(&node_stats(&mux, "red", "h1"), "runt") == 1);
    // A ring that is never emptied fills up. The rest is counted.
    let mut sent = 0;
    eventually("full", || {
        (0..200).for_each(|_| sent += u64::from(h1.out(0, &frame(60, 9))));
        dropped(&r1(), "guest-ring-full") > 0
    });
    eventually("all counted", || node_stats(&mux, "red", "h1").ports["eth0"].made == sent + 5);
    assert_adds_up(&stats(&mux));
}

#[test]
fn plain_memif_has_an_interface_for_each_vport() {
    let root = tempfile::tempdir().unwrap();
    let mux = start(1);
    let vnet = two_hosts(root.path(), "red", &[(0, AttachMode::Memif)]);
    put(&mux, &vnet);
    let (mut h1, mut h2) = (Peer::tap_of(&vnet.nodes[1]), Peer::tap_of(&vnet.nodes[2]));
    let socket = &vnet.nodes[0].router.as_ref().unwrap().guests[0].socket;
    let (mut left, mut right) = (Peer::connect(socket, 0), Peer::connect(socket, 1));
    eventually("there", || node_stats(&mux, "red", "r1").guests[&0].connected);
    assert!(h1.out(0, &frame(100, 5)));
    let mut got = vec![];
    eventually("a frame", || {
        got.extend(left.receive_raw());
        !got.is_empty()
    });
    assert_eq!(got, [frame(100, 5)]);
    assert!(right.send_raw(0, &got[0]));
    assert_eq!(h2.expect(1)[0].1, frame(100, 5));
    let r1 = node_stats(&mux, "red", "r1");
    assert_eq!(
        (r1.ports["eth0"].consumed, r1.ports["eth1"].made, r1.ports["eth1"].sent),
        (1, 1, 1)
    );
    assert_adds_up(&stats(&mux));
}

/// The schedule runs, whichever client put the vnet, and even if it is put again meanwhile.
#[test]
fn mux_follows_and_catches_up_a_schedule() {
    let root = tempfile::tempdir().unwrap();
    let mut wires = wires(root.path());
    let began_ns = now_ns();
    let step = |ms: u64, up, delay_ms: u64| {
        let delay_ns = delay_ms * 1_000_000;
        let impairments = Impairments { delay_ns, ..Impairments::default() };
        let leaving = EgressConfig { queue_frames: 256, impairments, ..EgressConfig::default() };
        ScheduleStep { at_ns: ms * 1_000_000, up, leaving: vec![leaving; 2] }
    };
    let steps = vec![step(300, false, 0), step(600, true, 40), step(900, true, 0)];
    wires.vlinks[0].schedule = Some(Schedule { began_ns, steps });
    let mux = start(1);
    put(&mux, &wires);
    let mut hosts = [Peer::tap_of(&wires.nodes[0]), Peer::tap_of(&wires.nodes[1])];
    let elapsed_ms = || (now_ns() - began_ns) / 1_000_000;
    // Sends a frame each millisecond, and records when each arrives, if it does.
    let (mut sent, mut arrivals) = (vec![], HashMap::new());
    let mut again = false;
    while elapsed_ms() < 1100 {
        let number = sent.len() as u64;
        sent.push(elapsed_ms());
        assert!(hosts[0].out(0, &frame(100, number)));
        std::thread::sleep(Duration::from_millis(1));
        for (_, bytes) in hosts[1].receive() {
            arrivals.insert(mark(&bytes), elapsed_ms());
        }
        if elapsed_ms() > 450 && !again {
            put(&mux, &wires);
            again = true;
        }
    }
    let lost = |from: u64, to: u64| {
        let within = (0..).zip(&sent).filter(|(_, at)| (from..to).contains(*at));
        let (mut all, mut lost) = (0, 0);
        for (number, _) in within {
            all += 1;
            lost += u64::from(!arrivals.contains_key(&number));
        }
        (all > 20, lost * 100 / all.max(1))
    };
    // This test does not measure how late a step is.
    assert_eq!(lost(20, 280), (true, 0), "up at first");
    assert_eq!(lost(380, 590), (true, 100), "down");
    assert_eq!(lost(680, 880), (true, 0), "up again");
    let delays = (0..).zip(&sent).filter(|(_, at)| (680..850).contains(*at));
    let least = delays.map(|(number, at)| arrivals[&number] - at).min().unwrap();
    assert!(least >= 39, "{least} ms");
    assert_eq!(dropped(&node_stats(&mux, "red", "h1"), "link-down"), lost_in_all(&sent, &arrivals));
    // A mux that starts in the middle of the schedule applies the current state.
    wires.vlinks[0].schedule.as_mut().unwrap().steps.push(step(60_000, false, 0));
    drop((hosts, mux));
    let root = tempfile::tempdir().unwrap();
    for node in &mut wires.nodes {
        node.tap_socket = root.path().join(format!("{}.sock", node.name));
    }
    wires.vlinks[0].schedule.as_mut().unwrap().began_ns = now_ns() - 450_000_000;
    let mux = start(1);
    put(&mux, &wires);
    let mut host = Peer::tap_of(&wires.nodes[0]);
    assert!(host.out(0, &frame(100, 1)));
    eventually("the link is down", || dropped(&node_stats(&mux, "red", "h1"), "link-down") == 1);
    // Invalid schedules are refused.
    let schedule = wires.vlinks[0].schedule.as_mut().unwrap();
    schedule.steps.reverse();
    let reply = mux.handle(MuxRequest::PutVnet(Box::new(wires.clone())), vec![]);
    assert!(matches!(&reply, MuxReply::Failed { error } if error.contains("sorted")), "{reply:?}");
}

fn lost_in_all(sent: &[u64], arrivals: &HashMap<u64, u64>) -> u64 {
    // The last frames may still be under way.
    let numbers = (0..).zip(sent).filter(|(_, at)| **at < 700).map(|(number, _)| number);
    numbers.filter(|number| !arrivals.contains_key(number)).count() as u64
}

/// Returns two hosts with a wire between them.
fn wires(root: &Path) -> VnetConfig {
    let nodes = ["h1", "h2"].map(|name| host(root, name)).into();
    let vlinks = vec![vlink("wire", port("h1", 0), port("h2", 0))];
    VnetConfig { name: "red".into(), police: None, nodes, vlinks }
}

/// A frame outlives its trace in a queue, and leaves while a frame of another vnet is traced.
#[test]
fn trace_reports_only_its_own_vnets_frame() {
    let root = tempfile::tempdir().unwrap();
    let mux = start(1);
    let mut red = two_hosts(root.path(), "red", &[(0, RUNTIME)]);
    red.vlinks[1].leaving.iter_mut().for_each(|it| it.rate_bps = Some(16_000));
    let blue = two_hosts(root.path(), "blue", &[(0, RUNTIME)]);
    let mut peers = [&red, &blue].map(|vnet| {
        put(&mux, vnet);
        let taps = [1, 2].map(|host| Peer::tap_of(&vnet.nodes[host]));
        (taps, Peer::guest_of(&vnet.nodes[0], 0))
    });
    let [([h1, h2], guest), ([blue_h1, blue_h2], blue_guest)] = &mut peers;
    for vnet in ["red", "blue"] {
        eventually("guests", || node_stats(&mux, vnet, "r1").guests[&0].connected);
    }
    let trace = |vnet: &str, number, wait_ms| {
        let port = PortName { vnet: vnet.into(), node: "r1".into(), port: "eth0".into() };
        let filter = vec![BytePattern { offset: 21, value: vec![number], mask: vec![0xff] }];
        let mux = mux.clone();
        std::thread::spawn(move || mux.handle(MuxRequest::Trace { port, filter, wait_ms }, vec![]))
    };
    // 1000 bytes take half a second, and two frames leave at once. The last one waits for 3 s.
    const SENT: usize = 8;
    let tracing = trace("red", SENT as u8, 1500);
    std::thread::sleep(Duration::from_millis(200));
    (1..=SENT as u64).for_each(|number| assert!(h1.out(0, &frame(1000, number))));
    for (tag, bytes) in guest.expect(SENT) {
        assert!(guest.send(out(1, tag.trace), &bytes));
    }
    let MuxReply::Traced { stages } = tracing.join().unwrap() else { panic!("no trace") };
    let ends: Vec<_> = stages.iter().map(|stage| stage.stage.as_str()).collect();
    assert!(ends.ends_with(&["shape", "wait"]), "{stages:?}");
    // All frames in red's queue leave while blue's guest keeps blue's frame.
    let tracing = trace("blue", 1, 20_000);
    let mut kept = vec![];
    eventually("the other trace begins", || {
        assert!(blue_h1.out(0, &frame(100, 1)));
        kept.extend(blue_guest.receive());
        kept.iter().any(|(tag, _)| tag.trace != 0)
    });
    let mut left = 0;
    eventually("all of the slow vlink's have left", || {
        left += h2.receive().len();
        left == SENT
    });
    assert!(!tracing.is_finished());
    for (tag, bytes) in kept {
        assert!(blue_guest.send(out(1, tag.trace), &bytes));
    }
    let MuxReply::Traced { stages } = tracing.join().unwrap() else { panic!("no trace") };
    let names: Vec<_> = stages.iter().map(|stage| stage.stage.as_str()).collect();
    let expected = ["receive", "classify", "distribute", "dispatch", "send", "receive", "punt"];
    assert_eq!(names, expected, "{stages:#?}");
    blue_h2.expect(1);
}

#[test]
fn captures_show_both_directions_and_traces_every_stage() {
    let root = tempfile::tempdir().unwrap();
    let mux = start(1);
    let vnet = two_hosts(root.path(), "red", &[(0, RUNTIME)]);
    put(&mux, &vnet);
    let (mut h1, mut h2) = (Peer::tap_of(&vnet.nodes[1]), Peer::tap_of(&vnet.nodes[2]));
    let mut guest = Peer::guest_of(&vnet.nodes[0], 0);
    eventually("there", || node_stats(&mux, "red", "r1").guests[&0].connected);
    let name = |port: &str| PortName { vnet: "red".into(), node: "r1".into(), port: port.into() };
    let (mut pcap, to) = std::io::pipe().unwrap();
    let request = MuxRequest::Capture { port: name("eth0"), snap_bytes: 0 };
    assert_eq!(mux.handle(request, vec![to.into()]), MuxReply::Done);
    let filter = vec![BytePattern { offset: 21, value: vec![2], mask: vec![0xff] }];
    let request = MuxRequest::Trace { port: name("eth0"), filter, wait_ms: 20_000 };
    let tracing = std::thread::spawn({
        let mux = mux.clone();
        move || mux.handle(request, vec![])
    });
    // Frame 2 is forwarded, with others before and after it. Frame 1 goes back to its sender.
    let mut reply = None;
    eventually("a trace", || {
        assert!([1, 3, 2, 3].iter().all(|number| h1.out(0, &frame(70, *number))));
        for (tag, bytes) in guest.expect(4) {
            let vport = u8::from(mark(&bytes) != 1);
            assert!(guest.send(out(vport, tag.trace), &bytes));
        }
        h1.expect(1);
        h2.expect(3);
        if tracing.is_finished() {
            reply = Some(())
        }
        reply.is_some()
    });
    let MuxReply::Traced { stages } = tracing.join().unwrap() else { panic!("no trace") };
    let names: Vec<_> = stages.iter().map(|stage| stage.stage.as_str()).collect();
    let expected = ["receive", "classify", "distribute", "dispatch", "send", "receive", "punt"];
    assert_eq!(names, expected, "{stages:#?}");
    assert!(stages.is_sorted_by_key(|stage| stage.at_ns));
    assert_eq!(mux.handle(MuxRequest::DeleteVnet { name: "red".into() }, vec![]), MuxReply::Done);
    let mut bytes = Vec::new();
    pcap.read_to_end(&mut bytes).unwrap();
    let mut reader = pcap_file::pcap::PcapReader::new(&bytes[..]).unwrap();
    let mut marks = vec![];
    while let Some(packet) = reader.next_packet() {
        marks.push(mark(&packet.unwrap().data));
    }
    // All frames arrive, and frame 1 also goes back.
    let count = |expected| marks.iter().filter(|mark| **mark == expected).count();
    assert_eq!(count(1), 2 * count(2));
    assert_eq!(marks.len(), 5 * count(2));
    // A trace is answered even if no frame comes.
    let gone = MuxRequest::Trace { port: name("eth0"), filter: vec![], wait_ms: 10 };
    assert!(matches!(mux.handle(gone, vec![]), MuxReply::Failed { .. }));
    put(&mux, &vnet);
    let none = MuxRequest::Trace { port: name("eth0"), filter: vec![], wait_ms: 10 };
    assert!(
        matches!(mux.handle(none, vec![]), MuxReply::Failed { error } if error.contains("10 ms"))
    );
}

/// A loop that no protocol breaks burdens only its own
/// vnet. Another one on the same worker loses nothing.
#[test]
fn forwarding_loop_burdens_only_its_own_vnet() {
    let root = tempfile::tempdir().unwrap();
    let mux = start(1);
    let mut looping = two_hosts(root.path(), "loop", &[(0, AttachMode::Runtime)]);
    looping.vlinks = vec![vlink("knot", port("r1", 0), port("r1", 1))];
    let other = two_hosts(root.path(), "other", &[(0, AttachMode::Runtime)]);
    put(&mux, &looping);
    put(&mux, &other);
    let mut flooder = Peer::guest_of(&looping.nodes[0], 0);
    let (mut h1, mut h2) = (Peer::tap_of(&other.nodes[1]), Peer::tap_of(&other.nodes[2]));
    let mut guest = Peer::guest_of(&other.nodes[0], 0);
    for number in 0..10 {
        assert!(flooder.send(Tag { last: false, ..out(0, 0) }, &frame(60, number)));
    }
    // The guest answers every frame with two.
    let burning = std::thread::spawn(move || {
        let start = std::time::Instant::now();
        let mut seen = 0u64;
        while start.elapsed().as_millis() < 700 {
            for (tag, bytes) in flooder.receive() {
                seen += 1;
                flooder.send(Tag { last: false, ..out(tag.vport, 0) }, &bytes);
                flooder.send(out(tag.vport, 0), &bytes);
            }
        }
        seen
    });
    for number in 0..200 {
        assert!(h1.out(0, &frame(60, number)));
        let (_, bytes) = guest.expect(1).remove(0);
        assert!(guest.send(out(1, 0), &bytes));
        assert_eq!(mark(&h2.expect(1)[0].1), number);
    }
    assert!(burning.join().unwrap() > 1000);
    assert_adds_up(&stats(&mux));
}

/// The vnet is on the second worker. By their slots its interfaces would be on the first.
#[test]
fn full_guest_slows_its_source() {
    const FRAMES: u64 = 20_000;
    let root = tempfile::tempdir().unwrap();
    let mux = start(2);
    put(&mux, &two_hosts(root.path(), "first", &[]));
    let ask = |request, fds| mux.handle(request, fds);
    let external =
        |name: &str, outlet| MuxRequest::PutExternal(ExternalConfig::new(name, 1500, outlet));
    let making = |frames| {
        external("G", OutletConfig::Generator(GeneratorConfig { pps: 0, frames, number_at: None }))
    };
    let socket = root.path().join("memif.sock");
    for (name, socket) in [("M", socket.clone()), ("other", root.path().join("other.sock"))] {
        assert_eq!(
            put_with_sockets(ask, external(name, OutletConfig::Memif { socket })),
            MuxReply::Done
        );
    }
    assert_eq!(ask(making(1), vec![one_frame()]), MuxReply::Done);
    let mut program = Peer::connect(&socket, 0);
    let mut red = two_hosts(root.path(), "red", &[(0, RUNTIME)]);
    let outside = |interface: &str| outside(interface, interface, Encapsulation::Interface);
    red.vlinks[0].ends[0] = outside("M");
    red.vlinks[1].ends[1] = outside("G");
    put(&mux, &red);
    let mut guest = Peer::guest_of(&red.nodes[0], 0);
    eventually("the program is back", || program.is_up());
    assert_eq!(ask(making(FRAMES), vec![]), MuxReply::Done);
    let drop = Tag { verdict: TagVerdict::Drop(GuestDrop::Policy), vport: 0, last: true, trace: 0 };
    let (mut sent, mut got) = (0, 0);
    let mut unanswered = VecDeque::new();
    eventually("all frames are in the guest", || {
        while sent < FRAMES && program.out(0, &frame(60, sent)) {
            sent += 1;
        }
        program.receive_raw();
        // Completions wait while the mux is slow to take them.
        unanswered.extend(guest.receive().into_iter().map(|(tag, _)| tag.vport));
        while unanswered.front().is_some_and(|&vport| guest.send(Tag { vport, ..drop }, &[])) {
            unanswered.pop_front();
            got += 1;
        }
        got == 2 * FRAMES
    });
    let counted = stats(&mux);
    let r1 = &counted.vnets["red"].nodes["r1"];
    assert_eq!(dropped(r1, "guest-ring-full"), 0, "{r1:#?}");
    for name in ["M", "G"] {
        let external = &counted.externals[name];
        assert_eq!(external.dropped.get("handover-full"), None, "{name}: {external:?}");
    }
    assert_adds_up(&counted);
}

#[test]
fn connection_cost_is_independent_of_socket_count() {
    const TIMES: u64 = 10;
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).unwrap();
    let root = tempfile::tempdir().unwrap();
    let mux = start(1);
    let red = two_hosts(root.path(), "red", &[(0, RUNTIME)]);
    put(&mux, &red);
    let checks = || {
        let before = mux.socket_checks();
        let connected = || node_stats(&mux, "red", "r1").guests[&0].connected;
        for _ in 0..TIMES {
            let guest = Peer::guest_of(&red.nodes[0], 0);
            eventually("the guest is there", connected);
            drop(guest);
            eventually("the guest is gone", || !connected());
        }
        (mux.socket_checks() - before) / TIMES
    };
    let alone = checks();
    for number in 0..333 {
        put(&mux, &two_hosts(root.path(), &format!("other{number}"), &[]));
    }
    let among_1000 = checks();
    // The peer connects, sends up to ten messages, and disconnects.
    let few = 3..=20;
    assert!(few.contains(&alone) && few.contains(&among_1000), "{alone} looks, {among_1000} looks");
}
