//! Kernel tunnels outside, AF_XDP, the mux, and a guest, in network namespaces of the test's own.
//!
//! `out1 –a– node –b– out2`: each outside machine has tunnels to the node. The guest
//! of each vnet is a wire between its two ports. `far` is behind `out1`. Needs root.

mod common;

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::place::{Control, Place, Raw, wire_vnet, wires};
use common::*;
use pdp_model::{Stats, UnderlayProblem};
use pdp_net::xdp::Take;
use pdp_proto::channel::Channel;
use pdp_proto::mux::*;
use pdp_wire::ecn::Mark;
use pdp_wire::{checksum, ecn, outer, udp, vxlan};

/// A user without any privileges.
const NOBODY: u32 = 65534;

/// `pdp-mux` without any privileges.
struct Process {
    child: Child,
    channel: Channel,
    pool: OwnedFd,
}

impl Process {
    fn start(control: &Path) -> Self {
        let _ = std::fs::remove_file(control);
        let listener = std::os::unix::net::UnixListener::bind(control).unwrap();
        let user = format!("--reuid={NOBODY} --regid={NOBODY} --clear-groups");
        let child = Command::new("setpriv")
            .args(user.split(' '))
            .args(["--inh-caps=-all", "--bounding-set=-all", "--no-new-privs"])
            .arg(env!("CARGO_BIN_EXE_pdp-mux"))
            .args(["--workers", "2", "--pool-packets", "16384"])
            .stdin(OwnedFd::from(listener))
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut channel = Channel::connect(control).unwrap();
        channel.send(&MuxRequest::Hello, &[]).unwrap();
        let (hello, mut fds) = channel.receive::<MuxReply>().unwrap().unwrap();
        assert!(matches!(hello, MuxReply::Hello { version: VERSION, .. }));
        Self { child, channel, pool: fds.pop().unwrap() }
    }
}

impl Control for Process {
    fn ask(&mut self, request: MuxRequest, fds: Vec<OwnedFd>) -> MuxReply {
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        self.channel.send(&request, &fds).unwrap();
        self.channel.receive().unwrap().unwrap().0
    }

    fn pool(&self) -> BorrowedFd<'_> {
        self.pool.as_fd()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn take(local: &str) -> Take {
    Take::Udp { local: local.parse().unwrap(), port: 4789 }
}

/// Returns a VXLAN tunnel.
fn tunnel(local: &str, remote: &str, vni: u32) -> Encapsulation {
    let (local, remote) = (local.parse().unwrap(), remote.parse().unwrap());
    Encapsulation::Vxlan(vxlan::VxlanTunnel { local, remote, port: 4789, vni })
}

/// Adds a machine's end of a tunnel.
fn vxlan_device(place: &Place, out: &str, vni: u32, local: &str, remote: &str, name: &str) {
    let ends = format!("local {local} remote {remote} dstport 4789");
    place.exec(out, &format!("ip link add name {name} type vxlan id {vni} {ends}"));
    place.exec(out, &format!("ip link set dev {name} up"));
}

#[test]
fn guest_connects_kernel_and_socat_tunnels() {
    let mut place = Place::enter("tunnels");
    let root = tempfile::tempdir().unwrap();
    let mut mux = start(2);
    let take = |local: &str, port| Take::Udp { local: local.parse().unwrap(), port };
    place.external(
        &mut mux,
        "a",
        &[take("10.9.1.1", 4789), take("10.9.1.1", 7001), take("fd00:1::1", 4789)],
    );
    place.external(
        &mut mux,
        "b",
        &[take("fd00:2::1", 4789), take("fd00:2::1", 7001), take("10.9.2.1", 4789)],
    );
    let vxlan = tunnel;
    let udp = |local: &str, remote: &str| {
        let (local, remote) = (local.parse().unwrap(), remote.parse().unwrap());
        Encapsulation::Udp(udp::UdpTunnel { local, remote, local_port: 7001, remote_port: 7000 })
    };
    let red = wire_vnet(
        root.path(),
        "red",
        vxlan("10.9.1.1", "10.9.1.2", 5),
        vxlan("fd00:2::1", "fd00:2::2", 5),
    );
    let blue = wire_vnet(
        root.path(),
        "blue",
        vxlan("fd00:1::1", "fd00:1::2", 6),
        vxlan("10.9.2.1", "10.9.2.2", 6),
    );
    let green =
        wire_vnet(root.path(), "green", udp("10.9.1.1", "10.9.1.2"), udp("fd00:2::1", "fd00:2::2"));
    for vnet in [&red, &blue, &green] {
        put(&mux, vnet);
    }
    let stop = Arc::new(AtomicBool::new(false));
    let guests = wires(&[&red, &blue, &green], stop.clone());
    let vx = |out: &str, name: &str, vni: u32, local: &str, remote: &str, address: &str| {
        place.exec(
            out,
            &format!(
                "ip link add name {name} type vxlan id {vni} local {local} remote {remote} dstport 4789"
            ),
        );
        place.exec(out, &format!("ip addr add {address} dev {name}"));
        place.exec(out, &format!("ip link set dev {name} up"));
    };
    vx("out1", "red", 5, "10.9.1.2", "10.9.1.1", "192.168.5.1/24");
    vx("out2", "red", 5, "fd00:2::2", "fd00:2::1", "192.168.5.2/24");
    vx("out1", "blue", 6, "fd00:1::2", "fd00:1::1", "192.168.6.1/24");
    vx("out2", "blue", 6, "10.9.2.2", "10.9.2.1", "192.168.6.2/24");
    let tap = |address| format!("TUN:{address},tun-type=tap,iff-no-pi,iff-up,tun-name=green");
    place.spawn(
        "out1",
        &format!("socat UDP4:10.9.1.1:7001,bind=10.9.1.2:7000 {}", tap("192.168.7.1/24")),
    );
    place.spawn(
        "out2",
        &format!("socat UDP6:[fd00:2::1]:7001,bind=[fd00:2::2]:7000 {}", tap("192.168.7.2/24")),
    );
    eventually("next hops", || {
        let stats = stats(&mux);
        let sent = stats.vnets.values().all(|v| v.nodes["r1"].ports.values().all(|p| p.sent > 0));
        sent || {
            for net in [5, 6, 7] {
                let ping =
                    format!("netns exec {} ping -c 1 -W 1 192.168.{net}.2", place.netns("out1"));
                let _ = Command::new("ip").args(ping.split(' ')).output();
            }
            false
        }
    });
    let before = stats(&mux);
    for (net, size) in [(5, 1380), (6, 1380), (7, 1000)] {
        place.exec("out1", &format!("ping -q -i 0.01 -c 100 -w 15 -s 56 192.168.{net}.2"));
        place.exec("out2", &format!("ping -q -i 0.01 -c 20 -w 15 -M do -s {size} 192.168.{net}.1"));
    }
    let after = stats(&mux);
    assert_adds_up(&after);
    for name in ["red", "blue", "green"] {
        let sent = |stats: &Stats| stats.vnets[name].nodes["r1"].ports["eth1"].sent;
        assert!(sent(&after) - sent(&before) >= 120, "{name}");
        assert_eq!(dropped(&after.vnets[name].nodes["r1"], "underlay-too-big"), 0);
    }
    assert!(after.externals.values().all(|external| external.kernel_dropped == 0));
    // Neither worker has the sockets of all vnets, so frames were handed over in both directions.
    assert!(after.workers.iter().all(|worker| worker.busy_rounds > 0));

    // A key that no vlink has, and frames that are not VXLAN.
    place.exec(
        "out1",
        "ip link add nobody type vxlan id 99 local 10.9.1.2 remote 10.9.1.1 dstport 4789",
    );
    place.exec("out1", "ip addr add 192.168.99.1/24 dev nobody");
    place.exec("out1", "ip link set nobody up");
    let _ = Command::new("ip")
        .args(format!("netns exec {} ping -c 1 -W 1 192.168.99.2", place.netns("out1")).split(' '))
        .output();
    place.exec("out1", "socat -u FILE:/etc/hostname UDP4:10.9.1.1:4789");
    let reason = |name: &str| stats(&mux).externals["A"].dropped.get(name).copied().unwrap_or(0);
    eventually("unknown tunnel", || reason("unknown-tunnel") > 0);
    eventually("no VXLAN", || reason("vxlan-header") > 0);

    // The neighbour changes its MAC address, and frames follow.
    place.exec("out1", "ip link set eth0 down");
    place.exec("out1", "ip link set eth0 address 02:00:00:00:99:01");
    place.exec("out1", "ip link set eth0 up");
    place.exec("out1", "ip addr replace fd00:1::2/64 dev eth0 nodad");
    eventually("the tunnel works again", || {
        let ping = format!("netns exec {} ping -c 1 -W 1 192.168.5.2", place.netns("out1"));
        Command::new("ip").args(ping.split(' ')).output().unwrap().status.success()
    });
    stop.store(true, Ordering::Relaxed);
    guests.join().unwrap();
    assert_adds_up(&stats(&mux));
}

#[test]
fn whole_interface_forwards_like_a_wire() {
    let mut place = Place::enter("whole");
    let root = tempfile::tempdir().unwrap();
    let mut mux = start(1);
    place.external(&mut mux, "a", &[]);
    place.external(&mut mux, "b", &[]);
    let whole = Encapsulation::Interface;
    let vnet = wire_vnet(root.path(), "red", whole.clone(), whole);
    put(&mux, &vnet);
    let stop = Arc::new(AtomicBool::new(false));
    let guests = wires(&[&vnet], stop.clone());
    place.exec("out1", "ip addr add 192.168.8.1/24 dev eth0");
    place.exec("out2", "ip addr add 192.168.8.2/24 dev eth0");
    place.exec("out1", "ping -q -i 0.01 -c 100 -w 15 -s 1472 -M do 192.168.8.2");
    assert_adds_up(&stats(&mux));
    // An idle mux sleeps: almost no busy rounds, and no processor time.
    let busy = || stats(&mux).workers[0].sleeps;
    let slept = busy();
    std::thread::sleep(std::time::Duration::from_millis(300));
    assert!(busy() - slept < 300, "{} sleeps in 300 ms without traffic", busy() - slept);
    stop.store(true, Ordering::Relaxed);
    guests.join().unwrap();
    // Sockets can be removed, and all of their packets return.
    assert_eq!(mux.handle(MuxRequest::DeleteVnet { name: "red".into() }, vec![]), MuxReply::Done);
    for name in ["A", "B"] {
        assert_eq!(
            mux.handle(MuxRequest::DeleteExternal { name: name.into() }, vec![]),
            MuxReply::Done
        );
    }
    eventually("all packets are back", || stats(&mux).workers[0].free_packets == 8192);
}

/// A killed mux is replaced by another process that gets the same requests.
#[test]
fn unprivileged_mux_serves_and_can_be_replaced() {
    let mut place = Place::enter("process");
    let root = tempfile::Builder::new().tempdir().unwrap();
    let whole = Encapsulation::Interface;
    let vnet = wire_vnet(root.path(), "red", whole.clone(), whole);
    place.exec("out1", "ip addr add 192.168.8.1/24 dev eth0");
    place.exec("out2", "ip addr add 192.168.8.2/24 dev eth0");
    let stop = Arc::new(AtomicBool::new(false));
    let mut guests = None;
    for _ in 0..2 {
        let mut mux = Process::start(&root.path().join("control.sock"));
        place.external(&mut mux, "a", &[]);
        place.external(&mut mux, "b", &[]);
        let put = MuxRequest::PutVnet(Box::new(vnet.clone()));
        assert_eq!(put_with_sockets(|request, fds| mux.ask(request, fds), put), MuxReply::Done);
        guests.get_or_insert_with(|| wires(&[&vnet], stop.clone()));
        place.exec("out1", "ping -q -i 0.05 -c 20 -w 15 192.168.8.2");
        let MuxReply::Stats(stats) = mux.ask(MuxRequest::Stats { vnet: None }, vec![]) else {
            panic!("no stats")
        };
        assert_adds_up(&stats);
        assert!(stats.externals["A"].received >= 20);
    }
    stop.store(true, Ordering::Relaxed);
    guests.unwrap().join().unwrap();
}

/// Paths of tunnels over IPv4, by a next hop that has only an IPv6
/// address (RFC 8950), and over IPv6, to a machine behind a router.
#[test]
fn tunnel_paths_follow_the_host_kernel() {
    let mut place = Place::enter("ways");
    place.add_far();
    let root = tempfile::tempdir().unwrap();
    let mut mux = start(1);
    place.external(&mut mux, "a", &[take("10.9.1.1"), take("fd00:1::1")]);
    place.external(&mut mux, "b", &[take("10.9.2.1"), take("fd00:2::1")]);
    let (far, near) = (tunnel("10.9.1.1", "10.9.7.2", 5), tunnel("10.9.2.1", "10.9.2.2", 5));
    let mut red = wire_vnet(root.path(), "red", far, near);
    red.nodes[0].ports.iter_mut().for_each(|port| port.mtu = 1450);
    let (far, near) = (tunnel("fd00:1::1", "fd00:7::2", 6), tunnel("fd00:2::1", "fd00:2::2", 6));
    let mut blue = wire_vnet(root.path(), "blue", far, near);
    blue.nodes[0].ports.iter_mut().for_each(|port| port.mtu = 1430);
    for (name, vni, [local, remote], [near, ours]) in [
        ("red", 5, ["10.9.7.2", "10.9.1.1"], ["10.9.2.2", "10.9.2.1"]),
        ("blue", 6, ["fd00:7::2", "fd00:1::1"], ["fd00:2::2", "fd00:2::1"]),
    ] {
        vxlan_device(&place, "far", vni, local, remote, name);
        vxlan_device(&place, "out2", vni, near, ours, name);
        place.exec("far", &format!("ip addr add 192.168.{vni}.1/24 dev {name}"));
        place.exec("out2", &format!("ip addr add 192.168.{vni}.2/24 dev {name}"));
    }
    put(&mux, &red);
    put(&mux, &blue);
    let stop = Arc::new(AtomicBool::new(false));
    let guests = wires(&[&red, &blue], stop.clone());
    let problem = |vnet: &str, port: &str| node_stats(&mux, vnet, "r1").ports[port].underlay;
    let reports = |what: &str, port: &str, expected: [Option<UnderlayProblem>; 2]| {
        eventually(what, || [problem("red", port), problem("blue", port)] == expected);
    };
    let all = |problem| [Some(problem); 2];

    reports("no route", "eth0", all(UnderlayProblem::NoRoute));
    reports("nothing", "eth1", [None, None]);
    place.exec("node", "ip route add 10.9.7.2/32 via inet6 fd00:1::2 dev a");
    place.exec("node", "ip route add fd00:7::/64 via fd00:1::2");
    reports("nothing", "eth0", [None, None]);
    for net in [5, 6] {
        eventually("far is there", || {
            place.succeeds("far", &format!("ping -c 1 -W 1 192.168.{net}.2"))
        });
        place.exec("far", &format!("ping -q -i 0.01 -c 20 -w 15 -M do -s 1400 192.168.{net}.2"));
    }
    // The first frame to an unknown next hop waits for it.
    let unresolved = |vnet| dropped(&node_stats(&mux, vnet, "r1"), "underlay-unresolved");
    let before = [unresolved("red"), unresolved("blue")];
    for net in [5, 6] {
        place.exec("node", "ip neigh flush dev b");
        place.exec("far", &format!("ping -c 1 -W 1 192.168.{net}.2"));
    }
    assert_eq!([unresolved("red"), unresolved("blue")], before);

    // A path with a smaller MTU is detected within about a
    // second. Frames that are too long for it are counted.
    place.exec("out1", "ip link set far mtu 1400");
    let long = |net| format!("ping -q -i 0.1 -c 10 -w 1 -M do -s 1400 192.168.{net}.1");
    assert!(!place.succeeds("out2", &long(5)) && !place.succeeds("out2", &long(6)));
    let path = UnderlayProblem::PathMtu { path_bytes: 1400, packet_bytes: 1500 };
    reports("a shorter way", "eth0", all(path));
    assert!(!place.succeeds("out2", &long(5)) && !place.succeeds("out2", &long(6)));
    for (vnet, net) in [("red", 5), ("blue", 6)] {
        assert!(dropped(&node_stats(&mux, vnet, "r1"), "underlay-path-too-big") > 0);
        place.exec("out2", &format!("ping -q -i 0.01 -c 20 -w 15 -M do -s 1200 192.168.{net}.1"));
    }
    // Once the kernel forgets it (by itself after 10 minutes), the path is as before.
    place.exec("out1", "ip link set far mtu 1500");
    place.exec("node", "ip route flush cache");
    place.exec("node", "ip -6 route flush cache");
    for net in [5, 6] {
        eventually("the way is whole again", || place.succeeds("out2", &long(net)));
    }
    reports("nothing", "eth0", [None, None]);

    // The same for a device with a smaller MTU.
    place.exec("node", "ip link set dev b mtu 1400");
    reports("a shorter wire", "eth1", all(path));
    place.exec("node", "ip link set dev b mtu 1500");
    reports("nothing", "eth1", [None, None]);

    // Machines, wires, devices and addresses disappear.
    place.exec("out2", "ip addr flush dev eth0");
    place.exec("node", "ip neigh flush dev b");
    place.spawn("far", "ping -q -i 0.2 -w 5 192.168.5.2");
    place.spawn("far", "ping -q -i 0.2 -w 5 192.168.6.2");
    reports("nobody answers", "eth1", all(UnderlayProblem::Unanswered { router: false }));
    place.exec("out2", "ip link set eth0 down");
    reports("no carrier", "eth1", all(UnderlayProblem::NoCarrier));
    place.exec("node", "ip link set dev b down");
    reports("the device is down", "eth1", all(UnderlayProblem::Down));
    reports("nothing", "eth0", [None, None]);
    place.exec("node", "ip addr del 10.9.1.1/24 dev a");
    place.exec("node", "ip addr del fd00:1::1/64 dev a");
    reports("no address", "eth0", all(UnderlayProblem::NoAddress));
    stop.store(true, Ordering::Relaxed);
    guests.join().unwrap();
    assert_adds_up(&stats(&mux));
}

/// MAC address of the frames that show marks.
const MARKED: [u8; 6] = [2, 0xec, 0, 0, 0, 1];

/// Returns all combinations: whether the outer packet is IPv6, whether
/// the inner one is, the inner mark, and the mark set on the way.
fn marks() -> impl Iterator<Item = (bool, bool, Mark, Mark)> {
    let all = [Mark::NotEct, Mark::Ect0, Mark::Ect1, Mark::Ce];
    (0..64).map(move |id| (id & 1 == 1, id & 2 == 2, all[id >> 2 & 3], all[id >> 4]))
}

/// Returns a frame with a mark and a number.
fn marked(six: bool, mark: Mark, number: u64) -> Vec<u8> {
    let mut frame = [&[0xff; 6][..], &MARKED].concat();
    if six {
        frame.extend([0x86, 0xdd, 0x60, (mark as u8) << 4, 0, 0, 0, 8, 59, 9]);
        frame.extend([0xfd; 32]);
    } else {
        frame.extend([
            8, 0, 0x45, mark as u8, 0, 28, 0, 0, 0, 0, 9, 253, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8,
        ]);
        let sum = checksum::checksum(&frame[14..34]);
        frame[24..26].copy_from_slice(&sum.to_be_bytes());
    }
    frame.extend(number.to_be_bytes());
    frame
}

/// Returns the frame in a tunnel packet with a mark of its own.
fn in_tunnel(by: &Encapsulation, to: [u8; 6], mark: Mark, inner: &[u8]) -> Vec<u8> {
    let template = outer::HeaderTemplate::new(by).unwrap();
    let mut frame = vec![0; template.len()];
    frame.extend(inner);
    template.write(&mut frame, to, MARKED).unwrap();
    if by.ends().unwrap().0.is_ipv4() {
        frame[15] = mark as u8;
        frame[24..26].fill(0);
        let sum = checksum::checksum(&frame[14..34]);
        frame[24..26].copy_from_slice(&sum.to_be_bytes());
    } else {
        frame[15] = (mark as u8) << 4;
    }
    frame
}

/// Congestion marks on the way appear inside, for every combination
/// of marks (RFC 6040 section 4.2), as with Linux's VXLAN device.
/// Frames that leave have their inner mark outside (section 4.1).
#[test]
fn ecn_marks_match_linux() {
    let mut place = Place::enter("ecn");
    let root = tempfile::tempdir().unwrap();
    let mut mux = start(1);
    place.external(&mut mux, "a", &[take("10.9.1.1"), take("fd00:1::1")]);
    place.external(&mut mux, "b", &[take("10.9.2.1"), take("fd00:2::1")]);
    let ours = [tunnel("10.9.1.1", "10.9.1.2", 5), tunnel("fd00:1::1", "fd00:1::2", 6)];
    let relayed = [tunnel("10.9.2.1", "10.9.2.2", 5), tunnel("fd00:2::1", "fd00:2::2", 6)];
    let red = wire_vnet(root.path(), "red", ours[0].clone(), relayed[0].clone());
    let blue = wire_vnet(root.path(), "blue", ours[1].clone(), relayed[1].clone());
    vxlan_device(&place, "out2", 5, "10.9.2.2", "10.9.2.1", "red");
    vxlan_device(&place, "out2", 6, "fd00:2::2", "fd00:2::1", "blue");
    put(&mux, &red);
    put(&mux, &blue);
    let stop = Arc::new(AtomicBool::new(false));
    let guests = wires(&[&red, &blue], stop.clone());
    let [node, out2] = [("node", "a"), ("out2", "eth0")].map(|(name, device)| {
        let path = format!("cat /sys/class/net/{device}/address");
        let words = format!("netns exec {} {path}", place.netns(name));
        let output = Command::new("ip").args(words.split(' ')).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let bytes = text.trim().split(':').map(|byte| u8::from_str_radix(byte, 16).unwrap());
        <[u8; 6]>::try_from(bytes.collect::<Vec<_>>()).unwrap()
    });
    let wire = place.raw("out2");
    let inside = [place.raw_on("out2", "red"), place.raw_on("out2", "blue")];
    // Sends all frames, and returns the inner marks of those that arrive, by number.
    let result = |from: &Raw, by: &[Encapsulation; 2], to: [u8; 6]| {
        let mut marks_inside = BTreeMap::new();
        for (number, (six_outside, six, mark, on_the_way)) in (0..).zip(marks()) {
            let inner = marked(six, mark, number);
            let by = &by[usize::from(six_outside)];
            assert!(from.send(&in_tunnel(by, to, on_the_way, &inner)));
            if number % 8 == 7 {
                // No more at once than may wait for a next hop.
                let sent = Instant::now();
                let waits = |arrived: usize| {
                    let most = if number == 63 && arrived < 60 { 5000 } else { 20 };
                    sent.elapsed() < Duration::from_millis(most)
                };
                while waits(marks_inside.len()) {
                    for frame in inside.iter().flat_map(Raw::receive) {
                        if frame[6..12] == MARKED {
                            let (number, ip) = (mark_of(&frame), &frame[14..34]);
                            assert!(ip[0] >> 4 == 6 || checksum::checksum(ip) == 0);
                            marks_inside.insert(number, ecn::of(&frame));
                        }
                    }
                }
            }
        }
        marks_inside
    };
    let to_us = ours.each_ref().map(Encapsulation::reversed);
    let mine = result(&place.raw("out1"), &to_us, node);
    let refused = stats(&mux).externals["A"].dropped["ce-on-not-ect"];
    let mut left = 0;
    for frame in wire.receive() {
        let Ok(outer) = outer::parse(&frame) else { continue };
        // The node itself sends short datagrams, which probe the path.
        let inner = frame[outer.payload()].get(8..).unwrap_or_default();
        if inner.get(6..12) == Some(&MARKED) {
            assert_eq!(ecn::of(&frame), ecn::of(inner));
            left += 1;
        }
    }
    let linux = result(&place.raw_on("node", "b"), &relayed, out2);
    assert_eq!(mine, linux);
    assert_eq!((mine.len(), left, refused), (60, 60, 4));
    stop.store(true, Ordering::Relaxed);
    guests.join().unwrap();
    assert_adds_up(&stats(&mux));
}

/// Returns the number of a marked frame.
fn mark_of(frame: &[u8]) -> u64 {
    u64::from_be_bytes(frame[frame.len() - 8..].try_into().unwrap())
}

/// Probes that measure the path are as long as the longest current packet.
#[test]
fn path_probes_are_as_long_as_current_vlinks() {
    let mut place = Place::enter("lengths");
    let root = tempfile::tempdir().unwrap();
    let mut mux = start(1);
    place.external(&mut mux, "a", &[take("10.9.1.1")]);
    place.external(&mut mux, "b", &[take("10.9.2.1")]);
    let wire = place.raw("out1");
    let vnet = |name: &str, vni, mtu| {
        let far = tunnel("10.9.1.1", "10.9.1.2", vni);
        let near = tunnel("10.9.2.1", "10.9.2.2", vni);
        let mut vnet = wire_vnet(root.path(), name, far, near);
        vnet.nodes[0].ports.iter_mut().for_each(|port| port.mtu = mtu);
        vnet
    };
    let comes = |bytes: usize| {
        eventually(&format!("a datagram in {bytes} bytes"), || {
            let is_one = |it: &Vec<u8>| it[12..14] == [8, 0] && it[36..38] == [0, 9];
            wire.receive().iter().any(|it| is_one(it) && it.len() == ETHERNET + bytes)
        });
    };
    const ETHERNET: usize = 14;
    put(&mux, &vnet("red", 5, 1450));
    comes(1500);
    put(&mux, &vnet("blue", 6, 1400));
    put(&mux, &vnet("red", 5, 1350));
    comes(1450);
    assert_eq!(mux.handle(MuxRequest::DeleteVnet { name: "blue".into() }, vec![]), MuxReply::Done);
    comes(1400);
}
