//! Kernel tunnels outside, AF_XDP, the mux, a guest: in network namespaces of the test's own.
//!
//! `out1 –a– node –b– out2`: each outside machine has tunnels to the node; the guest of each vnet
//! is a wire between its two ports. Needs root.

mod common;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use common::place::{Control, Place, wire_vnet, wires};
use common::*;
use pdp_net::xdp::Take;
use pdp_proto::channel::Channel;
use pdp_proto::mux::*;

/// A user without any right.
const NOBODY: u32 = 65534;

/// `pdp-mux` without any privilege.
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
        channel.send(&Request::Hello, &[]).unwrap();
        let (hello, mut fds) = channel.receive::<Reply>().unwrap().unwrap();
        assert!(matches!(hello, Reply::Hello { version: VERSION, .. }));
        Self { child, channel, pool: fds.pop().unwrap() }
    }
}

impl Control for Process {
    fn ask(&mut self, request: Request, fds: Vec<OwnedFd>) -> Reply {
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

#[test]
fn tunnels_of_the_kernel_and_of_socat_meet_through_a_guest() {
    let mut place = Place::enter("tunnels");
    let root = tempfile::tempdir().unwrap();
    let mut mux = start(2);
    let take = |local: &str, port| Take { local: local.parse().unwrap(), port };
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
    let vxlan = |local: &str, remote: &str, vni| Encapsulation::Vxlan {
        local: local.parse().unwrap(),
        remote: remote.parse().unwrap(),
        port: 4789,
        vni,
    };
    let udp = |local: &str, remote: &str| Encapsulation::Udp {
        local: local.parse().unwrap(),
        remote: remote.parse().unwrap(),
        local_port: 7001,
        remote_port: 7000,
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
    // Neither worker has the socket of every vnet: frames were handed over both ways.
    assert!(after.workers.iter().all(|worker| worker.busy_rounds > 0));

    // A key that nobody has, and what is no VXLAN at all.
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

    // The neighbour changes its address: frames follow.
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
fn a_whole_interface_is_a_wire() {
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
    // Idle, it sleeps: next to no rounds of work, and no processor time.
    let busy = || stats(&mux).workers[0].sleeps;
    let slept = busy();
    std::thread::sleep(std::time::Duration::from_millis(300));
    assert!(busy() - slept < 300, "{} sleeps in 300 ms without traffic", busy() - slept);
    stop.store(true, Ordering::Relaxed);
    guests.join().unwrap();
    // Sockets can go, and everything that they held is back.
    assert_eq!(mux.handle(Request::DeleteVnet { name: "red".into() }, vec![]), Reply::Done);
    for name in ["A", "B"] {
        assert_eq!(mux.handle(Request::DeleteExternal { name: name.into() }, vec![]), Reply::Done);
    }
    eventually("all packets are back", || stats(&mux).workers[0].free_packets == 8192);
}

/// Killed, it is replaced by another process that gets the same said again.
#[test]
fn a_mux_without_privilege_serves_and_can_be_replaced() {
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
        let put = Request::PutVnet(Box::new(vnet.clone()));
        assert_eq!(put_with_sockets(|request, fds| mux.ask(request, fds), put), Reply::Done);
        guests.get_or_insert_with(|| wires(&[&vnet], stop.clone()));
        place.exec("out1", "ping -q -i 0.05 -c 20 -w 15 192.168.8.2");
        let Reply::Stats(stats) = mux.ask(Request::Stats { vnet: None }, vec![]) else {
            panic!("no stats")
        };
        assert_adds_up(&stats);
        assert!(stats.externals["A"].received >= 20);
    }
    stop.store(true, Ordering::Relaxed);
    guests.unwrap().join().unwrap();
}
