//! TAPs, the XDP program and interfaces in the real kernel, in network namespaces of their own.
//! Needs root.

mod common;

use std::fs::File;
use std::io::Read;
use std::net::{IpAddr, TcpListener, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::process::Command;

use common::{Peer, Pins, eventually, isolated, run};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use pdp_afxdp::{Pool, XdpSocket, bind_socket, create_socket};
use pdp_net::interface::{Carrier, InterfaceInfo, InterfaceState, InterfaceWatch};
use pdp_net::route::{
    self, KernelVerdict, StaticRouteHop, StaticRouteKind, StaticRouteScope, StaticRouteSpec,
};
use pdp_net::tap::{self, TapSpec};
use pdp_net::xdp::{self, Take, Xdp, XdpCounters, XdpMode};
use pdp_net::{Error, ethtool, management, packet, sysctl};
use pdp_wire::outer::NotATunnel;
use pdp_wire::tunnel::Encapsulation;
use pdp_wire::{checksum, geneve, gre, outer, udp, vlan, vxlan};

/// Makes a veth pair, `ext` here and `far` at a peer,
/// with addresses 10.1.1.1 and .2, fd00::1 and ::2.
fn veth() -> Peer {
    let peer = Peer::new();
    run(&format!(
        "ip link add ext type veth peer name far netns {}
         ip addr add 10.1.1.1/24 dev ext
         ip addr add fd00::1/64 dev ext nodad
         ip link set ext up",
        peer.id()
    ));
    peer.run(
        "ip addr add 10.1.1.2/24 dev far; ip addr add fd00::2/64 dev far nodad; \
         ip link set far up; ethtool -K far tx off > /dev/null",
    );
    peer
}

/// An AF_XDP socket and its pool, as the mux has them.
struct Receiver {
    socket: XdpSocket,
    fd: OwnedFd,
    free: Vec<pdp_afxdp::PacketBuffer>,
    got: Vec<pdp_afxdp::PacketBuffer>,
    _pool: Pool,
}

impl Receiver {
    fn new(index: u32) -> Self {
        let (pool, mut free) = Pool::new(512).unwrap();
        let fd = create_socket(pool.memfd()).unwrap();
        let mut socket = XdpSocket::new(fd.try_clone().unwrap(), &pool).unwrap();
        bind_socket(fd.as_fd(), index, 0).unwrap();
        socket.fill(&mut free, 0);
        Self { socket, fd, free, got: Vec::new(), _pool: pool }
    }

    /// True if a frame arrived that ends with `text`.
    fn got(&mut self, text: &str) -> bool {
        self.socket.receive(&mut self.got, 64);
        let ends = |packet: &pdp_afxdp::PacketBuffer| packet.bytes().ends_with(text.as_bytes());
        let found = self.got.iter().any(ends);
        self.free.append(&mut self.got);
        found
    }
}

fn udp(address: &str) -> UdpSocket {
    let socket = UdpSocket::bind(address).unwrap();
    socket.set_nonblocking(true).unwrap();
    socket
}

fn received(socket: &UdpSocket, text: &str) -> bool {
    let mut bytes = vec![0; 65_536];
    socket.recv(&mut bytes).is_ok_and(|count| bytes[..count].ends_with(text.as_bytes()))
}

#[test]
fn xdp_takes_only_pdp_frames() {
    isolated(|| {
        let (peer, pins) = (veth(), Pins::new());
        let interface = InterfaceInfo::by_name("ext").unwrap();
        let mut xdp = Xdp::attach("ext", &pins.dir()).unwrap();
        assert_eq!(xdp.mode(), XdpMode::Native);
        assert!(run("ip link show ext").contains(" xdp "), "xdpgeneric: not in the driver");
        let take =
            |address: &str, port| Take::Udp { local: address.parse::<IpAddr>().unwrap(), port };
        xdp.set_takes(&[take("10.1.1.1", 4789), take("fd00::1", 4789)]).unwrap();
        let (v4, v6) = (udp("10.1.1.1:4789"), udp("[fd00::1]:4789"));
        let other = udp("10.1.1.1:4790");
        // No socket yet: the kernel gets all.
        peer.run("echo -n early > /dev/udp/10.1.1.1/4789");
        eventually("without a socket, the host gets it", || received(&v4, "early"));
        assert_eq!(xdp.counters().unwrap().no_socket, 1);
        let mut receiver = Receiver::new(interface.index);
        xdp.set_sockets(&[(0, receiver.fd.as_fd())]).unwrap();
        let beyond = xdp.set_sockets(&[(xdp::QUEUES_MAX, receiver.fd.as_fd())]).unwrap_err();
        assert!(matches!(beyond, Error::Invalid { .. }), "{beyond}");
        peer.run("echo -n taken-v4 > /dev/udp/10.1.1.1/4789");
        eventually("IPv4 is taken", || receiver.got("taken-v4"));
        peer.run("echo -n taken-v6 > /dev/udp/fd00::1/4789");
        eventually("IPv6 is taken", || receiver.got("taken-v6"));
        assert!(!received(&v4, "taken-v4") && !received(&v6, "taken-v6"));
        // Another port, TCP, ping and neighbour discovery go to the host.
        peer.run("echo -n passed > /dev/udp/10.1.1.1/4790");
        eventually("another port passes", || received(&other, "passed"));
        let listener = TcpListener::bind("10.1.1.1:4789").unwrap();
        let mut client = Command::new("nsenter")
            .args(["-t", &peer.id().to_string(), "-n", "bash", "-c"])
            .arg("echo -n ssh > /dev/tcp/10.1.1.1/4789")
            .spawn()
            .unwrap();
        let mut text = String::new();
        listener.accept().unwrap().0.read_to_string(&mut text).unwrap();
        assert_eq!(text, "ssh");
        assert!(client.wait().unwrap().success());
        peer.run("ping -c 1 -W 10 10.1.1.1 && ping -6 -c 1 -W 10 fd00::1");
        // Fragments of a datagram to the taken port, and frames to another address with that port.
        peer.run("head -c 4000 /dev/zero > /dev/udp/10.1.1.1/4789");
        eventually("fragments pass", || received(&v4, "\0\0\0\0"));
        run("ip addr add 10.1.1.9/24 dev ext");
        let elsewhere = udp("10.1.1.9:4789");
        peer.run("echo -n elsewhere > /dev/udp/10.1.1.9/4789");
        eventually("another address passes", || received(&elsewhere, "elsewhere"));
        let XdpCounters { taken, passed, no_socket } = xdp.counters().unwrap();
        assert_eq!((taken, no_socket), (2, 1));
        assert!(passed > 8, "{passed}");
        // The taken traffic can be changed, and everything can be taken.
        xdp.set_takes(&[take("10.1.1.1", 4790)]).unwrap();
        peer.run("echo -n back > /dev/udp/10.1.1.1/4789; echo -n now > /dev/udp/10.1.1.1/4790");
        eventually("no longer taken", || received(&v4, "back"));
        eventually("taken now", || receiver.got("now"));
        xdp.take_all(true).unwrap();
        peer.run("echo -n everything > /dev/udp/10.1.1.1/9");
        eventually("everything is taken", || receiver.got("everything"));
        xdp.take_all(false).unwrap();
        xdp.set_sockets(&[]).unwrap();
        peer.run("echo -n none > /dev/udp/10.1.1.1/4790");
        eventually("without a socket, the host gets it", || received(&other, "none"));
        // The program is detached at once, though another process holds the link too.
        let _held = libbpf_rs::Link::open(pins.dir().join("link")).unwrap();
        xdp.detach().unwrap();
        assert!(!pins.dir().exists());
        assert!(!run("ip link show ext").contains("xdp"));
        let error = xdp::Xdp::attach("no-such", &pins.dir()).unwrap_err();
        assert!(matches!(error, Error::NoInterface(_)), "{error}");
    });
}

#[test]
fn pins_outlive_the_process_and_are_adopted() {
    isolated(|| {
        let (peer, pins) = (veth(), Pins::new());
        let index = InterfaceInfo::by_name("ext").unwrap().index;
        let mut xdp = Xdp::attach("ext", &pins.dir()).unwrap();
        xdp.set_takes(&[Take::Udp { local: [10, 1, 1, 1].into(), port: 4789 }]).unwrap();
        let mut receiver = Receiver::new(index);
        xdp.set_sockets(&[(0, receiver.fd.as_fd())]).unwrap();
        drop(xdp);
        peer.run("echo -n alone > /dev/udp/10.1.1.1/4789");
        eventually("taken without the loader", || receiver.got("alone"));
        let link = || {
            let link = libbpf_rs::Link::open(pins.dir().join("link")).unwrap();
            let info = link.info().unwrap();
            (info.id, info.prog_id)
        };
        let before = link();
        // A new process takes over the pinned state, without a gap in the taken traffic.
        let xdp = Xdp::attach("ext", &pins.dir()).unwrap();
        assert_eq!(link().0, before.0);
        assert_ne!(link().1, before.1, "it runs its own program");
        assert_eq!(xdp.counters().unwrap().taken, 1);
        peer.run("echo -n adopted > /dev/udp/10.1.1.1/4789");
        eventually("taken by what was adopted", || receiver.got("adopted"));
        drop(xdp);
        drop(receiver);
        // The interface is gone and another has its name, so the pinned state is useless.
        run("ip link del ext");
        drop(peer);
        let _peer = veth();
        let xdp = Xdp::attach("ext", &pins.dir()).unwrap();
        assert_eq!(xdp.counters().unwrap().taken, 0, "not those of before");
        assert!(run("ip link show ext").contains("xdp"));
        drop(xdp);
        xdp::detach(&pins.dir()).unwrap();
        xdp::detach(&pins.dir()).unwrap();
        assert!(!run("ip link show ext").contains("xdp"));
    });
}

#[test]
fn pins_must_be_in_a_bpf_file_system() {
    isolated(|| {
        let _peer = veth();
        let dir = tempfile::tempdir().unwrap();
        let error = Xdp::attach("ext", &dir.path().join("pins")).unwrap_err();
        assert!(error.to_string().contains("mount -t bpf"), "{error}");
    });
}

fn spec(name: &str) -> TapSpec {
    TapSpec {
        name: name.into(),
        mac: [2, 0, 0, 0, 0, 7],
        mtu: 1400,
        addresses: vec!["10.7.0.1/24".parse().unwrap(), "fd07::1/64".parse().unwrap()],
        routes: vec![
            ("0.0.0.0/0".parse().unwrap(), [10, 7, 0, 2].into()),
            ("::/0".parse().unwrap(), "fd07::2".parse().unwrap()),
        ],
        queue_frames: Some(300),
        owner: None,
    }
}

#[test]
fn a_tap_is_made_inside_a_namespace() {
    isolated(|| {
        let peer = Peer::new();
        let netns = peer.netns();
        let tap = tap::create(netns.as_fd(), &spec("eth0")).unwrap();
        let text = peer.run("ip addr show eth0; ip route; ip -6 route; ip neigh");
        for want in [
            "LOWER_UP",
            "mtu 1400",
            "qlen 300",
            "02:00:00:00:00:07",
            "inet 10.7.0.1/24",
            "inet6 fd07::1/64",
            "default via 10.7.0.2 dev eth0",
            "default via fd07::2 dev eth0",
        ] {
            assert!(text.contains(want), "{want} in {text}");
        }
        // The kernel sets the link-local address a little later, from a work queue.
        eventually("addresses are of use", || !peer.run("ip addr").contains("tentative"));
        assert!(!run("ip link show").contains("eth0"), "not in this namespace");
        assert_eq!(tap::name(tap.as_fd()).unwrap(), "eth0");
        // Frames arrive as they are, without any header before them.
        peer.run("ping -c 1 -W 1 10.7.0.2 || true");
        let mut arp = vec![0; 2048];
        let mut file = File::from(tap.try_clone().unwrap());
        eventually("the request for the neighbour comes", || {
            let count = file.read(&mut arp).unwrap_or(0);
            count >= 42 && arp[..14] == [255, 255, 255, 255, 255, 255, 2, 0, 0, 0, 0, 7, 8, 6]
        });
        tap::set_mtu(netns.as_fd(), "eth0", 1300).unwrap();
        assert!(peer.run("ip link show eth0").contains("mtu 1300"));
        let accepts = sysctl::get(netns.as_fd(), "net.ipv6.conf.eth0.accept_dad").unwrap();
        assert_eq!(accepts, "0", "no address waits for the detection of duplicates");
        // A second TAP of the name is refused, and the first stays.
        assert!(tap::create(netns.as_fd(), &spec("eth0")).is_err());
        assert!(tap::create(netns.as_fd(), &spec("a-name-of-16-char")).is_err());
        peer.run("ip tuntap add others mode tap");
        let others = TapSpec { addresses: vec![], routes: vec![], ..spec("others") };
        assert!(tap::create(netns.as_fd(), &others).is_err(), "nobody else's is taken");
        drop(file);
        drop(tap);
        // Programs that other tests are starting may have the descriptor for a moment.
        eventually("gone with its last descriptor", || !peer.run("ip link show").contains("eth0"));
    });
}

#[test]
fn refused_tap_settings_are_reported() {
    isolated(|| {
        let peer = Peer::new();
        let netns = peer.netns();
        let far = ("10.9.0.0/16".parse().unwrap(), [192, 0, 2, 1].into());
        let twice: ipnet::IpNet = "10.7.0.1/24".parse().unwrap();
        for (spec, words) in [
            (TapSpec { routes: vec![far], ..spec("eth1") }, "add route 10.9.0.0/16 via 192.0.2.1"),
            (TapSpec { addresses: vec![twice; 2], ..spec("eth2") }, "add address 10.7.0.1/24"),
            (TapSpec { mtu: 1_000_000, ..spec("eth3") }, "set up eth3"),
        ] {
            let error = tap::create(netns.as_fd(), &spec).unwrap_err();
            assert!(error.to_string().contains(words), "{error}");
            let gone = || !peer.run("ip link show").contains(&spec.name);
            eventually("nothing is left of it", gone);
        }
    });
}

#[test]
fn a_tap_can_be_given_to_a_user() {
    isolated(|| {
        let peer = Peer::new();
        let owned = TapSpec { owner: Some(4321), ..spec("eth0") };
        let _tap = tap::create(peer.netns().as_fd(), &owned).unwrap();
        assert!(peer.run("ip -d link show eth0").contains("user 4321"));
    });
}

#[test]
fn namespace_sees_the_taps_carrier() {
    isolated(|| {
        let peer = Peer::new();
        let tap = tap::create(peer.netns().as_fd(), &spec("eth0")).unwrap();
        let flags = || peer.run("ip link show eth0");
        assert!(flags().contains("LOWER_UP"), "{}", flags());
        tap::set_carrier(tap.as_fd(), false).unwrap();
        eventually("no carrier", || {
            flags().contains("NO-CARRIER") && !flags().contains("LOWER_UP")
        });
        // The route by it is dead, addresses stay.
        assert!(peer.run("ip route; ip addr show eth0").contains("linkdown"));
        tap::set_carrier(tap.as_fd(), true).unwrap();
        eventually("carrier", || flags().contains("LOWER_UP"));
    });
}

#[test]
fn reads_interface_properties() {
    isolated(|| {
        let _peer = veth();
        let ext = InterfaceInfo::by_name("ext").unwrap();
        assert!(ext.up && ext.lower_up && ext.mtu == 1500 && ext.index > 0);
        let mac = run("cat /sys/class/net/ext/address || ip -br link show ext");
        let text: Vec<_> = ext.mac.iter().map(|byte| format!("{byte:02x}")).collect();
        assert!(run("ip link show ext").contains(&text.join(":")), "{mac}");
        let addresses: Vec<_> = ext.addresses.iter().map(ToString::to_string).collect();
        assert!(addresses.contains(&"10.1.1.1/24".to_owned()), "{addresses:?}");
        assert!(addresses.contains(&"fd00::1/64".to_owned()), "{addresses:?}");
        assert_eq!(ext.receive_queues, 1);
        run("ip link add q4 numrxqueues 4 numtxqueues 4 type veth peer name p4");
        assert_eq!(InterfaceInfo::by_name("q4").unwrap().receive_queues, 4);
        run("ethtool -L q4 rx 2");
        assert_eq!(InterfaceInfo::by_name("q4").unwrap().receive_queues, 2);
    });
}

#[test]
fn watch_reports_interface_changes() {
    isolated(|| {
        let peer = veth();
        eventually("carrier", || {
            InterfaceState::of("ext").is_some_and(|ext| ext.carrier == Carrier::Yes)
        });
        let (whole, ext) =
            (InterfaceInfo::by_name("ext").unwrap(), InterfaceState::of("ext").unwrap());
        assert_eq!((ext.index, ext.mac, ext.mtu), (whole.index, whole.mac, whole.mtu));
        assert!(whole.is_virtual && !InterfaceInfo::by_name("lo").unwrap().is_virtual);
        let watch = InterfaceWatch::new().unwrap();
        let reported = || {
            let mut events = [PollFd::new(watch.as_fd(), PollFlags::POLLIN)];
            poll(&mut events, PollTimeout::ZERO).unwrap() > 0
        };
        assert!(!reported());
        let follows = |make: &dyn Fn(), expected: Option<InterfaceState>| {
            watch.clear();
            make();
            eventually("it is told", &reported);
            eventually("it is so", || InterfaceState::of("ext") == expected);
        };
        let with = |carrier| Some(InterfaceState { carrier, ..ext });
        follows(&|| drop(peer.run("ip link set far down")), with(Carrier::Lost));
        follows(&|| drop(peer.run("ip link set far up")), with(Carrier::Yes));
        follows(&|| drop(run("ip link set ext down")), with(Carrier::Down));
        let long = Some(InterfaceState { mtu: 1400, carrier: Carrier::Down, ..ext });
        follows(&|| drop(run("ip link set ext mtu 1400")), long);
        follows(&|| drop(run("ip link del ext")), None);
    });
}

#[test]
fn offloads_are_turned_off() {
    isolated(|| {
        let _peer = veth();
        let features = || run("ethtool -k ext");
        assert!(features().contains("\ntx-checksumming: on"));
        ethtool::offloads_off("ext").unwrap();
        for name in [
            "tx-checksumming",
            "tx-tcp-segmentation",
            "tx-tcp6-segmentation",
            "generic-segmentation-offload",
            "generic-receive-offload",
        ] {
            assert!(features().contains(&format!("{name}: off")), "{name} in {}", features());
        }
        assert!(ethtool::offloads_off("no-such").is_err());
    });
}

#[test]
fn veth_ends_disable_tag_offload_concurrently() {
    isolated(|| {
        run("ip link add end0 type veth peer name end1");
        let ends = ["end0", "end1"].map(|name| InterfaceInfo::by_name(name).unwrap());
        for _ in 0..200 {
            std::thread::scope(|scope| {
                for end in &ends {
                    scope.spawn(|| {
                        let peer = end.veth_peer.as_deref();
                        assert!(ethtool::tags_in_frames(&end.name, peer).unwrap(), "{}", end.name);
                    });
                }
            });
            for end in ["end0", "end1"] {
                let shown = run(&format!("ethtool -k {end}"));
                for tags in ["rx-vlan-offload: off", "tx-vlan-offload: off"] {
                    assert!(shown.contains(tags), "{shown}");
                }
            }
            run("for end in end0 end1; do ethtool -K $end rxvlan on txvlan on; done");
        }
    });
}

#[test]
fn sysctls_apply_inside_the_namespace() {
    isolated(|| {
        let peer = Peer::new();
        let netns = peer.netns();
        let host = || std::fs::read_to_string("/proc/sys/net/ipv4/ip_forward").unwrap();
        let before = host();
        for value in ["1", "0", "1"] {
            sysctl::set(netns.as_fd(), "net.ipv4.ip_forward", value).unwrap();
            assert_eq!(sysctl::get(netns.as_fd(), "net.ipv4.ip_forward").unwrap(), value);
            assert_eq!(peer.run("cat /proc/sys/net/ipv4/ip_forward").trim(), value);
        }
        assert_eq!(host(), before);
        assert!(sysctl::set(netns.as_fd(), "kernel.hostname", "x").is_err());
        assert!(Path::new("/proc/sys/net").exists());
    });
}

#[test]
fn the_probe_tries_everything_and_leaves_nothing() {
    isolated(|| {
        let before = run("ip -br link; cat /proc/self/mounts");
        let checks = pdp_net::probe::run();
        for check in &checks {
            eprintln!("{check:?}");
        }
        let level = |name: &str| checks.iter().find(|check| check.name == name).unwrap().level;
        for name in [
            "root",
            "kernel",
            "processor",
            "cgroups",
            "user namespaces",
            "seccomp",
            "runc",
            "frr",
            "bird",
            "passt",
            "skopeo",
            "locked memory",
            "devices",
            "TAP",
            "XDP",
            "AF_XDP",
        ] {
            assert_eq!(level(name), pdp_net::probe::Level::Ok, "{name}");
        }
        for check in &checks {
            let needs_remedy = check.level != pdp_net::probe::Level::Ok;
            assert_eq!(!check.remedy.is_empty(), needs_remedy, "{check:?}");
        }
        assert_eq!(before, run("ip -br link; cat /proc/self/mounts"));
    });
}

/// True if a packet socket, opened as by the mux, received a frame with `text`.
fn sniff(socket: &OwnedFd, text: &str) -> bool {
    let mut bytes = [0; 2048];
    loop {
        match nix::unistd::read(socket, &mut bytes) {
            Ok(count) if bytes[..count].ends_with(text.as_bytes()) => return true,
            Ok(_) => {}
            Err(_) => return false,
        }
    }
}

#[test]
fn packet_sockets_and_the_kernel_split_frames() {
    isolated(|| {
        let (peer, pins) = (veth(), Pins::new());
        let index = InterfaceInfo::by_name("ext").unwrap().index;
        let filters = || run("tc filter show dev ext ingress");
        let (mut xdp, program) = Xdp::attach_behind_sockets("ext", &pins.dir()).unwrap();
        assert_eq!(xdp.mode(), XdpMode::Packet);
        let take =
            |address: &str, port| Take::Udp { local: address.parse::<IpAddr>().unwrap(), port };
        xdp.set_takes(&[take("10.1.1.1", 4789), take("fd00::1", 4789)]).unwrap();
        let sockets = packet::open("ext", index, 3, program.as_fd()).unwrap();
        let (v4, v6) = (udp("10.1.1.1:4789"), udp("[fd00::1]:4789"));
        let other = udp("10.1.1.1:4790");
        // A frame reaches only one of the sockets, and not the kernel.
        let taken = |text: &str| {
            let mut got = 0;
            eventually(text, || {
                got += sockets.iter().filter(|socket| sniff(socket, text)).count();
                got > 0
            });
            got += sockets.iter().filter(|socket| sniff(socket, text)).count();
            assert_eq!(got, 1, "{text}");
        };
        for number in 0..20 {
            let text = format!("taken-v4-{number}");
            peer.run(&format!("echo -n {text} > /dev/udp/10.1.1.1/4789"));
            taken(&text);
        }
        peer.run("echo -n taken-v6 > /dev/udp/fd00::1/4789");
        taken("taken-v6");
        assert!(!received(&v4, "") && !received(&v6, ""));
        // The rest reaches only the kernel, as do fragments and frames with a VLAN tag.
        peer.run("echo -n passed > /dev/udp/10.1.1.1/4790; head -c 4000 /dev/zero > /dev/udp/10.1.1.1/4789");
        eventually("another port passes", || received(&other, "passed"));
        eventually("fragments pass", || received(&v4, "\0\0\0\0"));
        peer.run("ping -c 1 -W 10 10.1.1.1 && ping -6 -c 1 -W 10 fd00::1");
        assert!(!sockets.iter().any(|socket| sniff(socket, "")), "something else came");
        assert_eq!(xdp.counters().unwrap().taken, 21);
        // Sent frames are not received.
        xdp.take_all(true).unwrap();
        run("ip neigh add 10.1.1.9 lladdr 02:00:00:00:00:99 dev ext");
        run("bash -c 'echo -n outgoing > /dev/udp/10.1.1.9/9'");
        assert!(!sockets.iter().any(|socket| sniff(socket, "outgoing")));
        peer.run("echo -n everything > /dev/udp/10.1.1.1/9");
        taken("everything");
        // The next process continues with the existing state.
        drop(xdp);
        let (mut xdp, _) = Xdp::attach_behind_sockets("ext", &pins.dir()).unwrap();
        assert_eq!(filters().matches("handle").count(), 1, "{}", filters());
        peer.run("echo -n still > /dev/udp/10.1.1.1/9");
        taken("still");
        xdp.take_all(false).unwrap();
        peer.run("echo -n adopted > /dev/udp/10.1.1.1/4789");
        taken("adopted");
        // Switching to AF_XDP and back leaves no state of the other behind.
        let xdp = Xdp::attach("ext", &pins.dir()).unwrap();
        assert_eq!(filters(), "");
        drop(xdp);
        let (xdp, _) = Xdp::attach_behind_sockets("ext", &pins.dir()).unwrap();
        assert!(!run("ip link show ext").contains("xdp"));
        peer.run("echo -n nothing-taken > /dev/udp/10.1.1.1/4789");
        eventually("the host gets it", || received(&v4, "nothing-taken"));
        xdp.detach().unwrap();
        assert_eq!(filters(), "");
        assert!(!pins.dir().exists());
        let features = || run("ethtool -k ext");
        run("ethtool -K ext gro on");
        ethtool::aggregation_off("ext").unwrap();
        assert!(features().contains("generic-receive-offload: off"));
        assert!(features().contains("\ntx-checksumming: on"));
    });
}

/// The frames of data/hostile-frames.pcap.
fn captures() -> Vec<Vec<u8>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/hostile-frames.pcap");
    let mut reader = pcap_file::pcap::PcapReader::new(File::open(path).unwrap()).unwrap();
    std::iter::from_fn(|| Some(reader.next_raw_packet()?.unwrap().data.into_owned())).collect()
}

/// The XDP program takes every frame that the mux recognizes as a tunnel's. Every frame that it
/// takes is a tunnel's, apart from checksums and lengths, which only the mux checks.
#[test]
fn xdp_and_mux_agree_on_hostile_tunnel_frames() {
    isolated(|| {
        let (_peer, pins) = (veth(), Pins::new());
        let mut xdp = Xdp::attach("ext", &pins.dir()).unwrap();
        let ends = |four| match four {
            true => ("10.1.1.1".parse().unwrap(), "10.1.1.2".parse().unwrap()),
            false => ("fd00::1".parse().unwrap(), "fd00::2".parse().unwrap()),
        };
        let mut tunnels = vec![Encapsulation::Vlan(vlan::VlanTunnel { id: 5 })];
        for (local, remote) in [ends(true), ends(false)] {
            let key = Some(7);
            tunnels.extend([
                Encapsulation::Vxlan(vxlan::VxlanTunnel { local, remote, port: 4789, vni: 1 }),
                Encapsulation::Geneve(geneve::GeneveTunnel { local, remote, port: 6081, vni: 1 }),
                Encapsulation::Udp(udp::UdpTunnel { local, remote, local_port: 9, remote_port: 8 }),
                Encapsulation::Gre(gre::GreTunnel {
                    local,
                    remote,
                    key,
                    checksum: true,
                    sequence: false,
                }),
            ]);
        }
        let takes: Vec<_> = tunnels.iter().filter_map(Encapsulation::takes).collect();
        xdp.set_takes(&takes).unwrap();
        // The peer's kernel sends frames of its own now and then, which the counter would include.
        run("ip link set ext down");
        let link = libbpf_rs::Link::open(pins.dir().join("link")).unwrap();
        let id = link.info().unwrap().prog_id;
        let program = libbpf_rs::Program::fd_from_id(id).unwrap();
        // Without a socket in the map, the kernel gets the frames; the counter shows it.
        let taken = |frame: &[u8]| {
            let before = xdp.counters().unwrap();
            test_run(&program, frame);
            let after = xdp.counters().unwrap();
            assert_eq!(after.no_socket + after.passed, before.no_socket + before.passed + 1);
            after.no_socket > before.no_socket
        };
        let mut frames = Vec::new();
        for (at, capture) in captures().into_iter().enumerate() {
            let by = &tunnels[at % tunnels.len()];
            let template = outer::HeaderTemplate::new(&by.reversed()).unwrap();
            let mut tunnelled = vec![0; template.len()];
            tunnelled.extend(&capture[..capture.len().min(100)]);
            template.write(&mut tunnelled, [2; 6], [4; 6]).unwrap();
            let header = tunnelled[..template.len().max(18)].to_vec();
            if matches!(by, Encapsulation::Gre(_)) && tunnelled[12] == 0x86 {
                // With the tunnel encapsulation limit of Linux's ip6gretap.
                let mut limited = tunnelled.clone();
                limited[20] = 60;
                limited[19] += 8;
                limited.splice(54..54, [47, 0, 4, 1, 4, 1, 1, 0]);
                for changed in 54..62 {
                    let mut frame = limited.clone();
                    frame[changed] ^= 1 << (at % 7);
                    frames.push(frame);
                }
                frames.push(limited);
            }
            // Each byte of the headers changed, and each length.
            for changed in (0..header.len()).skip(at % 8).step_by(8) {
                let mut frame = tunnelled.clone();
                frame[changed] ^= 1 << (at % 7);
                frames.push(frame.clone());
                // With the checksum corrected.
                if frame.len() >= 34 {
                    frame[24..26].fill(0);
                    let sum = checksum::checksum(&frame[14..34]);
                    frame[24..26].copy_from_slice(&sum.to_be_bytes());
                    frames.push(frame);
                }
            }
            frames.push(tunnelled[..14 + at % (tunnelled.len() - 14)].to_vec());
            frames.extend([tunnelled, capture]);
        }
        let (mut both, mut sums) = (0, 0);
        for frame in frames.iter().filter(|frame| frame.len() >= 14) {
            let take = match outer::parse(frame) {
                Ok(outer) => Ok(Some(outer.take())),
                Err(NotATunnel::Other) => Ok(vlan::id(frame).map(|id| Take::Vlan { id })),
                Err(not) => Err(not),
            };
            let ours = |take: &Option<Take>| take.is_some_and(|take| takes.contains(&take));
            match (taken(frame), &take) {
                (true, Ok(take)) if ours(take) => both += 1,
                (true, Err(NotATunnel::Fragment)) => panic!("{frame:02x?}"),
                (true, Err(_)) => sums += 1,
                (false, Ok(take)) if !ours(take) => {}
                (false, Err(_)) => {}
                (taken, take) => panic!("{taken}, {take:?}: {frame:02x?}"),
            }
        }
        assert!(both > 500 && sums > 100, "{both} {sums}");
    });
}

/// Runs an XDP program on a frame.
fn test_run(program: &OwnedFd, frame: &[u8]) {
    // SAFETY: all zeroes is valid, and means none.
    let mut options = unsafe { std::mem::zeroed::<libbpf_sys::bpf_test_run_opts>() };
    options.sz = size_of_val(&options) as _;
    options.data_in = frame.as_ptr().cast();
    options.data_size_in = frame.len() as u32;
    // SAFETY: the frame outlives the call, which only reads it.
    let result =
        unsafe { libbpf_sys::bpf_prog_test_run_opts(program.as_raw_fd(), &raw mut options) };
    assert_eq!(result, 0);
}

/// Route to a prefix with next hops given by an address, an
/// interface or both; without any, a blackhole.
fn static_route(to: &str, hops: &[(Option<&str>, Option<&str>)]) -> StaticRouteSpec {
    let hop = |(via, dev): &(Option<&str>, Option<&str>)| StaticRouteHop {
        via: via.map(|via| via.parse().unwrap()),
        dev: dev.map(str::to_owned),
        onlink: false,
        weight: 1,
    };
    let to: ipnet::IpNet = to.parse().unwrap();
    let v4 = to.addr().is_ipv4();
    let linked = v4 && !hops.is_empty() && hops.iter().all(|(via, _)| via.is_none());
    StaticRouteSpec {
        to,
        kind: if hops.is_empty() { StaticRouteKind::Blackhole } else { StaticRouteKind::Unicast },
        hops: hops.iter().map(hop).collect(),
        metric: if v4 { 0 } else { 1024 },
        table: 254,
        src: None,
        mtu: None,
        scope: if linked { StaticRouteScope::Link } else { StaticRouteScope::Global },
    }
}

/// Every kind of route is set as `ip route` shows it, set again without effect, changed, and
/// removed. Changes that others made meanwhile stay.
#[test]
fn static_routes_are_set_changed_and_removed() {
    isolated(|| {
        let peer = Peer::new();
        let netns = peer.netns();
        let _eth0 =
            tap::create(netns.as_fd(), &TapSpec { routes: vec![], ..spec("eth0") }).unwrap();
        let addresses = vec!["10.8.0.1/24".parse().unwrap(), "fd08::1/64".parse().unwrap()];
        let eth1 = TapSpec { addresses, routes: vec![], mac: [2, 0, 0, 0, 0, 8], ..spec("eth1") };
        let _eth1 = tap::create(netns.as_fd(), &eth1).unwrap();
        let lo = ["1.1.1.1/32".parse().unwrap(), "fdff::1/128".parse().unwrap()];
        peer.run("ip link set lo up");
        route::set_loopback(netns.as_fd(), &lo).unwrap();
        let text = peer.run("ip -o addr show lo");
        assert!(text.contains("inet 1.1.1.1/32 ") && text.contains("inet6 fdff::1/128 "), "{text}");

        let kind = |to, kind| StaticRouteSpec { kind, ..static_route(to, &[]) };
        let (eth0, eth1) = (Some("eth0"), Some("eth1"));
        let (a, b) = (Some("10.7.0.2"), Some("10.8.0.2"));
        let mut weighted = static_route("10.101.0.0/16", &[(a, None), (b, eth1)]);
        weighted.hops[1].weight = 3;
        let mut onlink = static_route("10.102.0.0/16", &[(Some("192.0.2.1"), eth0)]);
        onlink.hops[0].onlink = true;
        let more = StaticRouteSpec {
            src: Some("1.1.1.1".parse().unwrap()),
            mtu: Some(1300),
            metric: 50,
            table: 1000,
            ..static_route("10.103.0.0/16", &[(a, None)])
        };
        let all = [
            static_route("10.100.0.0/16", &[(a, None)]),
            weighted,
            onlink,
            more,
            static_route("10.104.0.0/16", &[(None, eth1)]),
            // Reached through the previous route.
            static_route("10.105.0.0/16", &[(Some("10.104.0.9"), eth1)]),
            static_route("10.106.0.0/16", &[(Some("fe80::9"), eth0)]),
            static_route("10.107.0.0/16", &[(Some("fd08::9"), None)]),
            kind("10.108.0.0/16", StaticRouteKind::Blackhole),
            kind("10.109.0.0/16", StaticRouteKind::Unreachable),
            kind("10.110.0.0/16", StaticRouteKind::Prohibit),
            kind("10.111.0.0/16", StaticRouteKind::Throw),
            static_route("fd64::/32", &[(Some("fd07::2"), None), (Some("fd08::2"), None)]),
            static_route("fd65::/32", &[(Some("fe80::9"), eth1)]),
            kind("fd66::/32", StaticRouteKind::Unreachable),
            static_route("0.0.0.0/0", &[(a, None)]),
        ];
        let want = [
            "default via 10.7.0.2 dev eth0",
            "10.100.0.0/16 via 10.7.0.2 dev eth0",
            "10.101.0.0/16 \n\tnexthop via 10.7.0.2 dev eth0 weight 1 \n\tnexthop via 10.8.0.2 dev eth1 weight 3",
            "10.102.0.0/16 via 192.0.2.1 dev eth0 onlink",
            "10.103.0.0/16 via 10.7.0.2 dev eth0 table 1000 src 1.1.1.1 metric 50 mtu 1300",
            "10.104.0.0/16 dev eth1 scope link",
            "10.105.0.0/16 via 10.104.0.9 dev eth1",
            "10.106.0.0/16 via inet6 fe80::9 dev eth0",
            "10.107.0.0/16 via inet6 fd08::9 dev eth1",
            "blackhole 10.108.0.0/16",
            "unreachable 10.109.0.0/16",
            "prohibit 10.110.0.0/16",
            "throw 10.111.0.0/16",
            "fd64::/32 metric 1024",
            "nexthop via fd08::2 dev eth1 weight 1",
            "fd65::/32 via fe80::9 dev eth1 metric 1024",
            "unreachable fd66::/32 dev lo metric 1024",
        ];
        let shown = || peer.run("ip route show table all proto static");
        for before in [&[][..], &all] {
            route::set(netns.as_fd(), before, &all).unwrap();
            let text = shown();
            for want in want {
                assert!(text.contains(want), "{want} in {text}");
            }
        }
        // Two routes change, the others are removed. Meanwhile another program
        // has changed one, removed one and added one.
        peer.run("ip route replace 10.109.0.0/16 via 10.7.0.7 proto 66");
        peer.run(
            "ip route del 10.110.0.0/16; ip route add 10.120.0.0/16 via 10.7.0.7 proto static",
        );
        let routes = [
            static_route("10.100.0.0/16", &[(b, None)]),
            static_route("fd64::/32", &[(Some("fd07::3"), None)]),
        ];
        route::set(netns.as_fd(), &all, &routes).unwrap();
        let text = shown();
        let mut left: Vec<&str> = text.lines().map(str::trim).collect();
        left.sort_unstable();
        let want = [
            "10.100.0.0/16 via 10.8.0.2 dev eth1",
            "10.120.0.0/16 via 10.7.0.7 dev eth0",
            "fd64::/32 via fd07::3 dev eth0 metric 1024 pref medium",
        ];
        assert_eq!(left, want);
        assert!(peer.run("ip route").contains("10.109.0.0/16 via 10.7.0.7 dev eth0 proto 66"));
        let far = static_route("10.121.0.0/16", &[(Some("192.0.2.1"), None)]);
        let error = route::set(netns.as_fd(), &[], &[far]).unwrap_err();
        assert_eq!(error.to_string(), "set route 10.121.0.0/16 via 192.0.2.1");
    });
}

#[test]
fn management_interface_has_a_table_of_its_own() {
    isolated(|| {
        let peer = Peer::new();
        peer.run("ip link set lo up");
        let spec = TapSpec { addresses: vec![], routes: vec![], ..spec("mgmt") };
        let [source, gateway] = ["127.255.0.1", "10.255.0.1"].map(|it| it.parse().unwrap());
        let make = || management::create(peer.netns().as_fd(), &spec, source, gateway).unwrap();
        // The rules of an earlier interface remain.
        drop(make());
        let _tap = make();
        assert!(peer.run("ip link show mgmt").contains("NOARP,UP,LOWER_UP"));
        let route = peer.run("ip route show table 7777");
        let want = "default via 10.255.0.1 dev mgmt proto static src 127.255.0.1 onlink";
        assert_eq!(route.trim(), want);
        let rules = peer.run("ip rule");
        let rules = rules.lines().filter(|rule| rule.ends_with("lookup 7777"));
        let want = [
            "32760:\tfrom 127.255.0.1 iif lo lookup 7777",
            "32760:\tfrom all to 10.255.0.1 iif lo lookup 7777",
            "32770:\tfrom all iif lo lookup 7777",
        ];
        assert_eq!(rules.collect::<Vec<_>>(), want);
    });
}

#[test]
fn lookup_reports_the_kernels_decision() {
    isolated(|| {
        run("sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1
            ip link set lo up; ip link add eth0 type veth peer name far
            ip link set eth0 up; ip link set far up
            ip addr add 10.7.0.1/24 dev eth0; ip addr add fd07::1/64 dev eth0 nodad
            ip route add 10.8.0.0/16 via 10.7.0.2
            ip route add 10.9.0.0/16 via inet6 fd07::2 dev eth0
            ip route add unreachable 10.10.0.0/16; ip route add fd08::/64 via fd07::2");
        let interface = InterfaceInfo::by_name("eth0").unwrap().index;
        let lookup = |to: &str| {
            let from = if to.contains(':') { "fd07::9" } else { "10.7.0.9" };
            route::lookup(interface, from.parse().unwrap(), to.parse().unwrap())
        };
        let hop = |via: Option<&str>| KernelVerdict::Hop {
            via: via.map(|via| via.parse().unwrap()),
            interface,
        };
        for (to, want) in [
            ("10.7.0.1", KernelVerdict::Local),
            ("10.7.0.3", hop(None)),
            ("10.8.0.1", hop(Some("10.7.0.2"))),
            ("10.9.0.1", hop(Some("fd07::2"))),
            ("fd07::1", KernelVerdict::Local),
            ("fd08::1", hop(Some("fd07::2"))),
        ] {
            assert_eq!(lookup(to).unwrap(), want, "{to}");
        }
        let refused = lookup("10.10.0.1").unwrap_err();
        assert_eq!(refused.to_string(), "ask for the route to 10.10.0.1");
    });
}
