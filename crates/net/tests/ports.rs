//! Ports of kernel vrouters in the real kernel, in network namespaces of their own, with the user
//! namespaces that guests have. Needs root.

mod common;

use std::fs::File;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use common::{Peer, Place, adds_up, eventually, isolated, run};
use etherparse::PacketBuilder;
use libbpf_rs::{MapCore, MapFlags};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};
use pdp_net::interface::{InterfaceInfo, InterfaceWatch};
use pdp_net::netns::within;
use pdp_net::ports::{
    self, ExternalEnd, InnerEndChange, KernelPortCounters, LEASE_MAX, LinkTarget, Made, NO_MTU,
    PortRate, PortSpec, Ports, Power, Reason, UnderlayHop,
};
use pdp_net::xdp::{self, Take, Xdp, XdpMode};
use pdp_net::{Error, sysctl};
use pdp_wire::tunnel::Encapsulation;
use pdp_wire::{checksum, ecn, outer, udp, vxlan};

/// Port `number`, called eth0 if even and eth1 if odd, with an address on link `link`.
fn spec(number: u32, link: u8) -> PortSpec {
    let host = 1 + number % 2;
    PortSpec {
        number,
        vrouter: number,
        name: format!("eth{}", number % 2),
        mac: [2, 0, 0, 0, 0, number as u8 + 1],
        mtu: 1500,
        addresses: vec![
            format!("10.0.{link}.{host}/24").parse().unwrap(),
            format!("fd00:{link}::{host}/64").parse().unwrap(),
        ],
        routes: vec![],
    }
}

/// Two guests with a link between port 0, 10.0.1.1, and port 1, 10.0.1.2.
struct Pair {
    ports: Ports,
    place: Place,
    guests: [Peer; 2],
}

impl Pair {
    fn new() -> Self {
        let (place, guests) = (Place::new(), [Peer::guest(), Peer::guest()]);
        let ports = place.open();
        for (guest, number) in guests.iter().zip(0..) {
            assert_eq!(ports.make(guest.netns().as_fd(), &spec(number, 1)).unwrap(), Made::All);
        }
        let mut pair = Self { ports, place, guests };
        pair.join();
        pair
    }

    fn join(&mut self) {
        self.ports.join(0, LinkTarget::Port(1)).unwrap();
        self.ports.join(1, LinkTarget::Port(0)).unwrap();
    }

    fn make(&mut self, number: u32) -> Made {
        self.ports.make(self.guests[number as usize].netns().as_fd(), &spec(number, 1)).unwrap()
    }

    fn changes(&self, number: u32) -> Vec<InnerEndChange> {
        let guest = self.guests[number as usize].netns();
        self.ports.changes(guest.as_fd(), &spec(number, 1)).unwrap()
    }

    fn udp(&self, number: u32) -> UdpSocket {
        let address = format!("10.0.1.{}:7", number + 1);
        let socket = inside(&self.guests[number as usize], || UdpSocket::bind(address));
        socket.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
        socket
    }

    fn pings(&self) -> bool {
        self.guests[0].tries("ping -c 1 -W 5 10.0.1.2")
    }

    fn is_cut(&self) -> bool {
        !self.guests[0].tries("ping -c 1 -W 0.3 10.0.1.2")
    }
}

/// A socket made in a guest's namespace.
fn inside<T: Send>(guest: &Peer, make: impl FnOnce() -> std::io::Result<T> + Send) -> T {
    within(guest.netns().as_fd(), || Ok(make().unwrap())).unwrap()
}

/// Returns the counters of ports at rest, after checking that they add up.
fn at_rest<const N: usize>(ports: &Ports, numbers: [u32; N]) -> [KernelPortCounters; N] {
    let read = || numbers.map(|number| ports.counters(number).unwrap());
    let mut last = read();
    let mut since = Instant::now();
    eventually("at rest", || {
        std::thread::sleep(Duration::from_millis(50));
        let before = std::mem::replace(&mut last, read());
        if before != last {
            since = Instant::now();
        }
        // If others use the CPUs, frames may stay under way for a while.
        let most = if last.iter().any(|it| it.in_transit() > 0) { 3000 } else { 50 };
        since.elapsed() >= Duration::from_millis(most)
    });
    last.iter().for_each(adds_up);
    last
}

/// Two hosts and two routers in a row, with everything that the kernel does
/// by itself: neighbours, forwarding, TTL, TCP.
#[test]
fn routers_in_a_row_carry_pings_and_tcp() {
    isolated(|| {
        let place = Place::new();
        let ports = place.open();
        // h1 0 -- 1 r1 2 -- 3 r2 4 -- 5 h2
        let nodes: Vec<Peer> = (0..4).map(|_| Peer::guest()).collect();
        let owners = [0, 1, 1, 2, 2, 3];
        for (number, owner) in (0..).zip(owners) {
            let spec = PortSpec { routes: vec![], ..spec(number, 1 + number as u8 / 2) };
            ports.make(nodes[owner].netns().as_fd(), &spec).unwrap();
            ports.join(number, LinkTarget::Port(number ^ 1)).unwrap();
        }
        for router in &nodes[1..3] {
            let netns = router.netns();
            sysctl::set(netns.as_fd(), "net.ipv4.ip_forward", "1").unwrap();
            sysctl::set(netns.as_fd(), "net.ipv6.conf.all.forwarding", "1").unwrap();
        }
        nodes[0].run("ip route add default via 10.0.1.2; ip route add default via fd00:1::2");
        nodes[1].run("ip route add default via 10.0.2.2; ip route add default via fd00:2::2");
        nodes[2].run("ip route add default via 10.0.2.1; ip route add default via fd00:2::1");
        nodes[3].run("ip route add default via 10.0.3.1; ip route add default via fd00:3::1");
        let text =
            nodes[0].run("ping -c 3 -i 0.01 -W 5 10.0.3.2; ping -c 3 -i 0.01 -W 5 fd00:3::2");
        assert_eq!(text.matches("3 received").count(), 2, "{text}");
        assert_eq!(text.matches("ttl=62").count(), 6, "{text}");

        let listener = inside(&nodes[3], || TcpListener::bind("[::]:5000"));
        let bytes: Vec<u8> = (0..4_000_000u32).map(|at| (at ^ at >> 9) as u8).collect();
        for to in ["10.0.3.2:5000", "[fd00:3::2]:5000"] {
            let mut stream = inside(&nodes[0], || TcpStream::connect(to));
            let mut got = vec![0; bytes.len()];
            std::thread::scope(|scope| {
                scope.spawn(|| listener.accept().unwrap().0.read_exact(&mut got).unwrap());
                stream.write_all(&bytes).unwrap();
            });
            assert!(got == bytes, "TCP to {to}");
        }
        let counters = at_rest(&ports, [0, 1, 2, 3, 4, 5]);
        for (number, here) in counters.iter().enumerate() {
            assert!(here.to_link.bytes > 10_000, "{here:?}");
            assert_eq!(here.to_link, counters[number ^ 1].from_link);
        }
        assert!(counters[0].to_link.bytes > 8_000_000);
        // None of it ever entered the stack of PdP's namespace, which has no address.
        let text = place.run("ip addr; cat /proc/net/snmp");
        assert!(!text.contains("inet"), "{text}");
        let ip = text.lines().filter(|line| line.starts_with("Ip:")).nth(1).unwrap();
        assert_eq!(ip.split_whitespace().nth(3), Some("0"), "{text}");
    });
}

/// Sends datagrams of this size from a socket as fast as possible, until stopped.
fn flood(socket: &UdpSocket, to: &str, bytes: usize, stop: &AtomicBool) {
    let datagram = vec![7; bytes];
    while !stop.load(Ordering::Relaxed) {
        for _ in 0..32 {
            // If the interface's queue is full, this returns an error.
            let _ = socket.send_to(&datagram, to);
        }
    }
}

#[test]
fn port_enforces_its_rate() {
    isolated(|| {
        let pair = Pair::new();
        let sender = pair.udp(0);
        let _receiver = pair.udp(1);
        assert!(pair.pings());
        let megabit = 1_000_000;
        // Bursts are 0.8 s, longer than a sender on a busy machine
        // waits for the CPU; the burst of frames is 32.
        let bps = PortRate { bps: 2 * megabit, burst_bytes: 200_000, ..PortRate::default() };
        // Frames count with 24 bytes of preamble, check sequence and gap.
        let wire = PortRate { overhead_bytes: 24, ..bps };
        let pps = PortRate { pps: 40, ..PortRate::default() };
        for (rate, payload) in [(bps, 1000), (wire, 58), (pps, 100)] {
            pair.ports.police(0, Some(rate)).unwrap();
            let policed = pair.ports.counters(0).unwrap().dropped(Reason::Policed);
            let stop = AtomicBool::new(false);
            let moved = std::thread::scope(|scope| {
                scope.spawn(|| flood(&sender, "10.0.1.2:7", payload, &stop));
                let counted = || pair.ports.counters(0).unwrap();
                // Until the burst is gone.
                let gone = || counted().dropped(Reason::Policed) > policed + 1000;
                eventually("it is policed", gone);
                // On a busy machine, a reading may take long: at least and at most this time passes
                // between both.
                let start = Instant::now();
                let before = counted();
                let least = Instant::now();
                std::thread::sleep(Duration::from_secs(3));
                let least = least.elapsed().as_secs_f64();
                let after = counted();
                let most = start.elapsed().as_secs_f64();
                stop.store(true, Ordering::Relaxed);
                let frames = (after.to_link.frames - before.to_link.frames) as f64;
                let bytes = (after.to_link.bytes - before.to_link.bytes) as f64;
                let counted = bytes + frames * f64::from(rate.overhead_bytes);
                let seconds = match rate.bps {
                    0 => frames / rate.pps as f64,
                    bps => counted * 8.0 / bps as f64,
                };
                (seconds / most, seconds / least)
            });
            assert!(moved.0 < 1.02 && moved.1 > 0.98, "{moved:?} of {rate:?}");
        }
        pair.ports.police(0, None).unwrap();
        let before = pair.ports.counters(0).unwrap().dropped(Reason::Policed);
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| flood(&sender, "10.0.1.2:7", 1000, &stop));
            std::thread::sleep(Duration::from_millis(100));
            stop.store(true, Ordering::Relaxed);
        });
        let after = pair.ports.counters(0).unwrap();
        assert_eq!(after.dropped(Reason::Policed), before);
        at_rest(&pair.ports, [0, 1]);
        let much = PortRate { overhead_bytes: 5000, ..PortRate::default() };
        assert!(matches!(pair.ports.police(0, Some(much)), Err(Error::Invalid { .. })));
    });
}

/// Two ports flood a third one, whose vrouter has many rules and takes a while for each frame.
#[test]
fn ring_overflow_drops_are_counted() {
    isolated(|| {
        let pair = Pair::new();
        let third = Peer::guest();
        let mut port = spec(2, 1);
        port.addresses = vec!["10.0.1.3/24".parse().unwrap()];
        pair.ports.make(third.netns().as_fd(), &port).unwrap();
        pair.ports.join(2, LinkTarget::Port(1)).unwrap();
        let neighbour = "ip neigh replace 10.0.1.2 lladdr 02:00:00:00:00:02 dev eth0";
        pair.guests[0].run(neighbour);
        third.run(neighbour);
        // Each frame meets 10,000 rules.
        pair.guests[1].run(
            "nft add table t; nft add chain t few; nft add chain t many
            nft add chain t first \"{ type filter hook prerouting priority -300 ; }\"
            for rule in {0..99}; do echo add rule t few udp dport $((20000 + rule)); done | nft -f -
            for rule in {0..99}; do echo add rule t many jump few; done | nft -f -
            nft add rule t first udp dport 9 jump many",
        );
        let senders =
            [&pair.guests[0], &third].map(|guest| inside(guest, || UdpSocket::bind("0.0.0.0:0")));
        let stop = AtomicBool::new(false);
        let mut last = [KernelPortCounters::default(); 3];
        std::thread::scope(|scope| {
            for sender in &senders {
                scope.spawn(|| flood(sender, "10.0.1.2:9", 18, &stop));
            }
            // As long as it takes on a busy machine.
            let begin = Instant::now();
            let full = |last: &[KernelPortCounters; 3]| last[1].dropped(Reason::Undelivered) > 1000;
            while begin.elapsed() < Duration::from_secs(1)
                || (!full(&last) && begin.elapsed() < common::EVENTUALLY)
            {
                for (number, last) in (0..).zip(&mut last) {
                    let now = pair.ports.counters(number).unwrap();
                    for reason in Reason::ALL {
                        assert!(now.dropped(reason) >= last.dropped(reason), "{now:?} {last:?}");
                    }
                    let ring = ports::RING_FRAMES + 64 * 2;
                    assert!(
                        now.in_transit() <= ring + (now.from_link.frames - last.from_link.frames)
                    );
                    *last = now;
                }
            }
            stop.store(true, Ordering::Relaxed);
        });
        let [a, b, c] = at_rest(&pair.ports, [0, 1, 2]);
        assert_eq!(a.to_link.frames + c.to_link.frames, b.from_link.frames);
        assert!(b.dropped(Reason::Undelivered) > 0, "the ring was never full: {b:?}");
        // The guest's own counters include the frames that it could not send.
        let stats = pair.guests[0].run("ip -s link show eth0");
        let sent: Vec<u64> = stats
            .lines()
            .last()
            .unwrap()
            .split_whitespace()
            .map(|word| word.parse().unwrap())
            .collect();
        assert_eq!((sent[1], sent[3]), (a.from_vrouter.frames, a.unsent), "{stats}");
    });
}

/// Sent after all numbers.
const END: u64 = u64::MAX;

/// Every frame arrives in order while processes start and stop,
/// and each new process finds the state unchanged.
#[test]
fn ports_are_adopted_without_a_gap() {
    isolated(|| {
        let pair = Pair::new();
        pair.ports.police(0, Some(PortRate { bps: 500_000_000, ..PortRate::default() })).unwrap();
        let (sender, receiver) = (pair.udp(0), pair.udp(1));
        assert!(pair.pings());
        let programs = || {
            ["0/out", "0/in", "1/out", "1/in"].map(|pin| {
                let link = libbpf_rs::Link::open(pair.place.pins.dir().join(pin)).unwrap();
                let info = link.info().unwrap();
                (info.id, info.prog_id)
            })
        };
        let mut before = programs();
        let at_first = pair.ports.counters(0).unwrap();
        receiver.set_read_timeout(Some(common::EVENTUALLY)).unwrap();
        let (stop, received) = (AtomicBool::new(false), AtomicU64::new(0));
        let sent = std::thread::scope(|scope| {
            let receiving = scope.spawn(|| {
                let mut bytes = [0; 8];
                loop {
                    receiver.recv(&mut bytes).unwrap();
                    let number = received.load(Ordering::Relaxed);
                    match u64::from_be_bytes(bytes) {
                        END => break number,
                        got => assert_eq!(got, number),
                    }
                    received.store(number + 1, Ordering::Relaxed);
                }
            });
            let sending = scope.spawn(|| {
                let send =
                    |number: u64| sender.send_to(&number.to_be_bytes(), "10.0.1.2:7").unwrap();
                let mut number = 0;
                while !stop.load(Ordering::Relaxed) {
                    // However long a process waits for the CPU, no more frames
                    // are under way than the ring can hold.
                    let enough =
                        number >= received.load(Ordering::Relaxed) + ports::RING_FRAMES / 2;
                    if !enough {
                        send(number);
                        number += 1;
                    }
                    if enough || number.is_multiple_of(8) {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                }
                send(END);
                number
            });
            let mut frames = 0;
            for _ in 0..20 {
                let next = pair.place.open();
                let now = programs();
                for (now, before) in now.iter().zip(&before) {
                    assert_eq!(now.0, before.0, "the link is the same");
                    assert_ne!(now.1, before.1, "it runs the next one's program");
                }
                before = now;
                assert_eq!(next.all().unwrap(), [0, 1].into());
                for (guest, number) in pair.guests.iter().zip(0..) {
                    let made = next.make(guest.netns().as_fd(), &spec(number, 1)).unwrap();
                    assert_eq!(made, Made::Nothing);
                }
                let counted = next.counters(0).unwrap().to_link.frames;
                assert!(counted >= frames);
                frames = counted;
            }
            stop.store(true, Ordering::Relaxed);
            let sent = sending.join().unwrap();
            assert_eq!(receiving.join().unwrap(), sent);
            sent
        });
        assert!(sent > 100);
        let counters = pair.ports.counters(0).unwrap();
        assert_eq!(counters.dropped, at_first.dropped);
        assert!(counters.to_link.frames >= sent);
    });
}

#[test]
fn guest_changes_are_reported_and_port_is_recreated() {
    isolated(|| {
        let mut pair = Pair::new();
        let watch = pair.ports.watch().unwrap();
        let reported = |watch: &InterfaceWatch| {
            let mut events = [PollFd::new(watch.as_fd(), PollFlags::POLLIN)];
            poll(&mut events, PollTimeout::ZERO).unwrap() > 0
        };
        assert!(pair.pings() && pair.changes(0).is_empty() && pair.changes(1).is_empty());
        let guest = &pair.guests[0];
        guest.run("ip link set eth0 down; ip link set eth0 name x; ip link set x mtu 1400");
        guest.run("ip link set x address 02:00:00:00:00:99");
        eventually("it is told", || reported(&watch));
        let want = [
            InnerEndChange::Renamed("x".into()),
            InnerEndChange::Resized(1400),
            InnerEndChange::Readdressed([2, 0, 0, 0, 0, 0x99]),
            InnerEndChange::Down,
        ];
        assert_eq!(pair.changes(0), want);
        let words: Vec<_> = want.iter().map(ToString::to_string).collect();
        assert_eq!(words[2], "its MAC address set to 02:00:00:00:00:99");
        // The changed end stays as the guest has it, and so does the other end.
        assert_eq!((pair.make(0), pair.make(1)), (Made::Nothing, Made::Nothing));
        assert_eq!(pair.changes(0), want);
        assert!(pair.changes(1).is_empty());
        pair.guests[0]
            .run("ip link set x name eth0; ip link set eth0 mtu 1500 address 02:00:00:00:00:01 up");
        assert_eq!(pair.changes(0), []);
        assert!(pair.pings());

        // While the end is down, frames are lost there. They stay lost when the port is made again.
        pair.guests[0].run("ip link set eth0 down");
        pair.guests[1].tries("ping -c 1 -W 0.1 10.0.1.1");
        let mut before = pair.ports.counters(0).unwrap();
        assert!(before.dropped(Reason::Undelivered) > 0);
        for gone in [
            "ip link del eth0",
            "unshare -n sleep 5 > /dev/null 2>&1 & sleep 0.3; ip link set eth0 netns $!",
        ] {
            watch.clear();
            pair.guests[0].run(gone);
            eventually("it is told", || reported(&watch));
            assert_eq!(pair.changes(0), [InnerEndChange::Gone], "{gone}");
            assert!(pair.is_cut());
            // Meanwhile, frames for it are counted where they are dropped.
            let missed = pair.ports.counters(1).unwrap();
            pair.guests[1].tries("ping -c 1 -W 0.1 10.0.1.1");
            let now = pair.ports.counters(1).unwrap();
            assert!(
                now.dropped.iter().sum::<u64>()
                    + pair.ports.counters(0).unwrap().dropped(Reason::Undelivered)
                    > missed.dropped.iter().sum::<u64>()
            );
            assert_eq!(pair.make(0), Made::All);
            assert_eq!(pair.changes(0), []);
            // Links and counters are as they were.
            assert!(pair.pings());
            let now = pair.ports.counters(0).unwrap();
            assert!(
                now.to_link.frames > before.to_link.frames
                    && now.to_vrouter.frames > before.to_vrouter.frames
            );
            let lost = before.dropped(Reason::Undelivered);
            before = at_rest(&pair.ports, [0, 1])[0];
            assert!(before.dropped(Reason::Undelivered) >= lost);
        }
        // The current owner keeps the name, and the caller gets an error.
        pair.guests[0].run("ip link del eth0; ip link add eth0 type veth peer name other");
        let guest = pair.guests[0].netns();
        let error = pair.ports.make(guest.as_fd(), &spec(0, 1)).unwrap_err();
        assert_eq!(error.to_string(), "make port eth0");
        pair.guests[0].run("ip link del eth0");
        assert_eq!(pair.make(0), Made::All);
        assert!(pair.pings());
        // The namespace is gone, and another has replaced it.
        pair.guests[0] = Peer::guest();
        eventually("gone", || pair.changes(0) == [InnerEndChange::Gone]);
        assert_eq!(pair.make(0), Made::All);
        assert!(pair.pings());
    });
}

/// Only the missing parts of a port are made. The index of a deleted inner end may be reused at
/// once: it leads to no port until that has a new end.
#[test]
fn reused_index_reaches_no_port_before_recreation() {
    isolated(|| {
        let mut pair = Pair::new();
        let inners = libbpf_rs::MapHandle::from_pinned_path(pair.place.pins.dir().join("inners"));
        let inners = inners.unwrap();
        let places = |number: u32| {
            let is = |key: &Vec<u8>| {
                let found = inners.lookup(key, MapFlags::ANY).unwrap();
                found.as_deref() == Some(&number.to_ne_bytes())
            };
            inners.keys().filter(is).count()
        };
        assert_eq!((places(0), places(1)), (1, 1));
        // The port can't be made again, since its name is taken.
        pair.guests[0].run("ip link del eth0; ip link add eth0 type ifb");
        let guest = pair.guests[0].netns();
        pair.ports.make(guest.as_fd(), &spec(0, 1)).unwrap_err();
        assert_eq!((places(0), places(1)), (0, 1));
        pair.guests[0].run("ip link del eth0");
        assert_eq!(pair.make(0), Made::All);
        assert_eq!((places(0), places(1)), (1, 1));
    });
}

/// Threads' requests to the kernel wait for each other no longer than the kernel makes them wait.
#[test]
fn threads_query_the_kernel_concurrently() {
    isolated(|| {
        let pair = Pair::new();
        std::thread::scope(|scope| {
            for number in 0..8 {
                let pair = &pair;
                scope.spawn(move || {
                    for round in 0..200 {
                        let rate = PortRate {
                            bps: 1_000_000 + number * 1000 + round,
                            ..PortRate::default()
                        };
                        pair.ports.police(number as u32 % 2, Some(rate)).unwrap();
                        assert!(pair.ports.counters(number as u32 % 2).is_ok());
                        // Other threads' changes of the same port stay.
                        pair.ports.set_carrier(0, true).unwrap();
                        assert_eq!(pair.ports.all().unwrap().len(), 2);
                    }
                });
            }
        });
        assert!(pair.pings());
    });
}

#[test]
fn missing_port_parts_are_recreated() {
    isolated(|| {
        let mut pair = Pair::new();
        assert!(pair.pings());
        for pin in ["0/in", "0/out", "1/in", "1/out"] {
            std::fs::remove_file(pair.place.pins.dir().join(pin)).unwrap();
            let number = u32::from(pin.starts_with('1'));
            assert_eq!(pair.make(number), Made::Parts, "{pin}");
            assert_eq!(pair.make(number), Made::Nothing);
            assert!(pair.pings(), "{pin}");
        }
        let longer = PortSpec { mtu: 1600, ..spec(0, 1) };
        let guest = pair.guests[0].netns();
        assert_eq!(pair.ports.make(guest.as_fd(), &longer).unwrap(), Made::Parts);
        assert!(pair.guests[0].run("ip link show eth0").contains("mtu 1600"));
        // Half-made: it was not finished.
        pair.place.run("ip link set p0 alias \"\"");
        assert_eq!(pair.make(0), Made::All);
        assert!(pair.pings());
        pair.ports.remove(&[0]).unwrap();
        assert_eq!(pair.ports.all().unwrap(), [1].into());
        assert!(!pair.place.pins.dir().join("0").exists());
        assert_eq!(pair.ports.counters(0).unwrap(), KernelPortCounters::default());
        // A port that reuses the number is not an end of the old link.
        assert_eq!(pair.make(0), Made::All);
        pair.ports.join(0, LinkTarget::Port(1)).unwrap();
        let before = pair.ports.counters(1).unwrap().dropped(Reason::Unconnected);
        assert!(!pair.guests[1].tries("ping -c 1 -W 0.2 10.0.1.1"));
        assert!(pair.ports.counters(1).unwrap().dropped(Reason::Unconnected) > before);
        pair.ports.remove(&[0, 1, 7]).unwrap();
        assert_eq!(pair.ports.all().unwrap(), [].into());
        for (number, name) in [(ports::PORTS_MAX, "eth0"), (0, "a-name-of-16-char")] {
            let wrong = PortSpec { number, name: name.into(), ..spec(0, 1) };
            let error = pair.ports.make(guest.as_fd(), &wrong).unwrap_err();
            assert!(matches!(error, Error::Invalid { .. }), "{error}");
        }
    });
}

#[test]
fn many_ports_are_removed_at_once() {
    isolated(|| {
        let (place, guest) = (Place::new(), Peer::guest());
        let ports = place.open();
        let numbers: Vec<u32> = (0..50).collect();
        for &number in &numbers {
            let spec =
                PortSpec { name: format!("eth{number}"), addresses: vec![], ..spec(number, 1) };
            ports.make(guest.netns().as_fd(), &spec).unwrap();
        }
        assert_eq!(ports.all().unwrap(), numbers.iter().copied().collect());
        let begin = Instant::now();
        ports.remove(&numbers).unwrap();
        eprintln!("{:?} for {} ports", begin.elapsed(), numbers.len());
        assert_eq!(ports.all().unwrap(), [].into());
        assert!(!guest.run("ip link").contains("eth"));
    });
}

/// Root in a guest, with all privileges there, tries to remove the
/// programs, and to escape from its end of the wire.
#[test]
fn guest_cannot_detach_programs_or_escape() {
    isolated(|| {
        let pair = Pair::new();
        let guest = &pair.guests[0];
        assert!(pair.pings());
        for command in [
            "ip link set eth0 xdp off",
            "ip link set eth0 xdpdrv off",
            "ip link set eth0 netns 1",
            &format!("ip link set eth0 netns {}", pair.guests[1].id()),
            &format!("nsenter -t {} -n true", pair.guests[1].id()),
            &format!("nsenter --net={} true", pair.place.netns().display()),
            "ethtool -L eth0 rx 2",
            "ethtool -L eth0 tx 2",
            "ip link set eth0 mtu 5000",
        ] {
            assert!(!guest.tries(command), "{command}");
        }
        // The kernel accepts some commands without effect, or without an effect that matters.
        for command in [
            "ip link set eth0 xdpgeneric off",
            "ethtool -K eth0 gro off",
            "ethtool -K eth0 gro on",
            "ethtool -K eth0 gro off tso on gso on",
            "ip link set eth0 promisc on",
            "ip link set eth0 down; ip link set eth0 up",
        ] {
            guest.tries(command);
            assert!(guest.run("ip link show eth0").contains(" xdp "), "{command}");
            assert!(pair.pings(), "{command}");
        }
        // The guest knows the root ends' namespace only by a number, and may not query it.
        let text = guest.run("ip link show eth0");
        assert!(text.contains("eth0@if4096") && text.contains("link-netnsid 0"), "{text}");
        for index in [4096u32, 4097] {
            let mut message = [0u8; 40];
            // RTM_GETLINK of this index, IFLA_TARGET_NETNSID 0.
            message[..8].copy_from_slice(&[40, 0, 0, 0, 18, 0, 1, 0]);
            message[20..24].copy_from_slice(&index.to_ne_bytes());
            message[32..36].copy_from_slice(&[8, 0, 46, 0]);
            let hex: String = message.iter().map(|byte| format!("\\x{byte:02x}")).collect();
            let answer = guest.run(&format!(
                "printf \"{hex}\" | socat -t 1 - SOCKET-DATAGRAM:16:3:0:x0000000000000000000000 | od -An -tx1 -N 20"
            ));
            let bytes: Vec<&str> = answer.split_whitespace().collect();
            assert_eq!(
                (bytes[4], &bytes[16..]),
                ("02", &["f3", "ff", "ff", "ff"][..]),
                "EACCES: {answer}"
            );
        }
    });
}

#[test]
fn a_port_that_is_down_has_no_carrier() {
    isolated(|| {
        let mut pair = Pair::new();
        assert!(pair.pings());
        let flags = |guest: &Peer| guest.run("ip link show up");
        let no_carrier = |guest: &Peer| flags(guest).contains("NO-CARRIER");
        pair.ports.set_carrier(0, false).unwrap();
        // The kernel reports a lost carrier up to a second later (linkwatch).
        eventually("no carrier", || no_carrier(&pair.guests[0]));
        assert!(pair.is_cut());
        assert!(pair.changes(0).is_empty(), "the guest did nothing");
        let before = pair.ports.counters(1).unwrap();
        pair.guests[1].tries("ping -c 1 -W 0.1 10.0.1.1");
        let after = pair.ports.counters(1).unwrap();
        assert!(after.dropped(Reason::LinkDown) > before.dropped(Reason::LinkDown));
        assert_eq!(after.to_link, before.to_link);
        // It stays down through an adoption and a deletion.
        pair.ports = pair.place.open();
        assert_eq!(pair.make(0), Made::Nothing);
        pair.guests[0].run("ip link del eth0");
        assert_eq!(pair.make(0), Made::All);
        eventually("no carrier again", || no_carrier(&pair.guests[0]));
        assert!(pair.is_cut());
        pair.ports.set_carrier(0, true).unwrap();
        eventually("carrier", || flags(&pair.guests[0]).contains("LOWER_UP"));
        eventually("it carries", || !pair.is_cut());
        at_rest(&pair.ports, [0, 1]);
        // The setting of a missing port is remembered.
        pair.ports.set_carrier(9, false).unwrap();
        let port = PortSpec { name: "eth9".into(), addresses: vec![], ..spec(9, 1) };
        let guest = pair.guests[0].netns();
        assert_eq!(pair.ports.make(guest.as_fd(), &port).unwrap(), Made::All);
        let shown = || pair.guests[0].run("ip link show eth9");
        eventually("no carrier of the later port", || shown().contains("NO-CARRIER"));
    });
}

/// A packet socket of an interface.
fn raw(guest: &Peer, name: &str) -> OwnedFd {
    inside(guest, || {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let fd = socket(AddressFamily::Packet, SockType::Raw, flags, None).unwrap();
        let index = nix::net::if_::if_nametoindex(name).unwrap();
        let address = libc::sockaddr_ll {
            sll_family: libc::AF_PACKET as u16,
            sll_protocol: (libc::ETH_P_ALL as u16).to_be(),
            sll_ifindex: index as i32,
            sll_hatype: 0,
            sll_pkttype: 0,
            sll_halen: 0,
            sll_addr: [0; 8],
        };
        // SAFETY: a whole address of the length given, read during the call alone.
        let bound = unsafe {
            libc::bind(fd.as_raw_fd(), (&raw const address).cast(), size_of_val(&address) as u32)
        };
        assert_eq!(bound, 0);
        Ok(fd)
    })
}

/// Any frame of at least an Ethernet header comes out
/// unchanged, up to the MTU plus a header and a tag.
#[test]
fn link_passes_any_frame_unchanged() {
    isolated(|| {
        let pair = Pair::new();
        let [from, to] = [0, 1].map(|at| raw(&pair.guests[at], ["eth0", "eth1"][at]));
        let read = |bytes: &mut [u8]| nix::unistd::read(&to, bytes).ok();
        let comes = |frame: &[u8]| {
            let _ = nix::unistd::write(&from, frame);
            let mut bytes = [0; 4096];
            let deadline = Instant::now() + Duration::from_millis(100);
            while Instant::now() < deadline {
                match read(&mut bytes) {
                    Some(count) if bytes[..count] == *frame => return true,
                    Some(_) => {}
                    None => std::thread::sleep(Duration::from_millis(1)),
                }
            }
            false
        };
        let frame = |kind: [u8; 2], length: usize| {
            let mut frame: Vec<u8> = (0..length).map(|at| at as u8).collect();
            frame[..12].copy_from_slice(b"\x02nobody\x02else");
            frame[12..14].copy_from_slice(&kind);
            frame
        };
        // Foreign addresses, unknown types, hardly any bytes, and the longest frames.
        for length in [14, 15, 59, 60, 61, 1000, 1514] {
            for kind in [[0x12, 0x34], [8, 0], [0x86, 0xdd], [0, 46]] {
                assert!(comes(&frame(kind, length)), "{kind:?} {length}");
            }
        }
        let mut multicast = frame([8, 0], 100);
        multicast[0] = 0xff;
        assert!(comes(&multicast));
        // The kernel removes a tag from frames for readers, so the frame is counted instead.
        let before = pair.ports.counters(1).unwrap().to_vrouter;
        let mut tagged = frame([0x81, 0], 1518);
        tagged[14..18].copy_from_slice(&[0, 5, 8, 0]);
        nix::unistd::write(&from, &tagged).unwrap();
        let to_vrouter = || pair.ports.counters(1).unwrap().to_vrouter;
        eventually("it comes", || to_vrouter().bytes == before.bytes + 1518);
        // Longer frames: the kernel drops them at the
        // ingress port, if the guest raised its own MTU.
        pair.guests[0].run("ip link set eth0 mtu 1700");
        let unsent = pair.ports.counters(0).unwrap().unsent;
        assert!(comes(&frame([8, 0], 1518)));
        assert!(!comes(&frame([8, 0], 1519)) && !comes(&frame([8, 0], 1714)));
        assert_eq!(pair.ports.counters(0).unwrap().unsent, unsent + 2);
        // The program drops them at the egress port, if that has a lower MTU.
        let guest = pair.guests[1].netns();
        let shorter = PortSpec { mtu: 1400, ..spec(1, 1) };
        pair.ports.make(guest.as_fd(), &shorter).unwrap();
        assert!(comes(&frame([8, 0], 1418)));
        assert!(!comes(&frame([8, 0], 1419)));
        assert_eq!(pair.ports.counters(0).unwrap().dropped(Reason::TooBig), 1);
        // If that guest lowered the MTU, they are lost at its end.
        pair.guests[1].run("ip link set eth1 mtu 1300");
        let before = pair.ports.counters(1).unwrap().dropped(Reason::Undelivered);
        assert!(!comes(&frame([8, 0], 1319)));
        assert!(comes(&frame([8, 0], 1318)));
        assert_eq!(pair.ports.counters(1).unwrap().dropped(Reason::Undelivered), before + 1);
        at_rest(&pair.ports, [0, 1]);
    });
}

/// Attaches an egress program to an interface. It gives each
/// frame a tag in its metadata, as VLAN devices do.
fn tag_on_the_way_out(guest: &Peer, name: &str, kind: u16) {
    // r2 = kind; r3 = 5; bpf_skb_vlan_push(r1, r2, r3); return TC_ACT_OK
    let instruction = |code, dst, imm| libbpf_sys::bpf_insn {
        code,
        _bitfield_align_1: [],
        _bitfield_1: libbpf_sys::bpf_insn::new_bitfield_1(dst, 0),
        off: 0,
        imm,
    };
    let program = [
        instruction(0xb7, 2, i32::from(kind.to_be())),
        instruction(0xb7, 3, 5),
        instruction(0x85, 0, 18),
        instruction(0xb7, 0, 0),
        instruction(0x95, 0, 0),
    ];
    // SAFETY: the instructions outlive the call; name and licence are C strings, and there are no
    // options.
    let fd = unsafe {
        libbpf_sys::bpf_prog_load(
            libbpf_sys::BPF_PROG_TYPE_SCHED_CLS,
            c"tag".as_ptr(),
            c"GPL".as_ptr(),
            program.as_ptr(),
            program.len() as _,
            std::ptr::null_mut(),
        )
    };
    assert!(fd >= 0, "{fd}");
    // SAFETY: just opened for us and owned by nobody else.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    inside(guest, || {
        let mut hook = libbpf_rs::TcHook::new(fd.as_fd());
        hook.ifindex(nix::net::if_::if_nametoindex(name).unwrap() as i32);
        hook.attach_point(libbpf_rs::TC_EGRESS).handle(1).priority(1);
        hook.create().unwrap();
        hook.replace(true).attach().unwrap();
        Ok(())
    });
}

/// Tags that the kernel keeps in the metadata until it
/// sends a frame are in the frame when it comes out.
#[test]
fn vlan_tags_are_in_the_received_frames() {
    for kind in [0x8100, 0x88a8] {
        isolated(|| {
            let pair = Pair::new();
            assert!(pair.pings());
            let features = pair.guests[0].run("ethtool -k eth0");
            for off in
                ["tx-vlan-offload: off", "tx-vlan-stag-hw-insert: off", "tx-checksumming: off"]
            {
                assert!(features.contains(off), "{off} in {features}");
            }
            tag_on_the_way_out(&pair.guests[0], "eth0", kind);
            // A reader has the tag in the metadata again; the
            // program at the end has it in the frame.
            let sender = pair.udp(0);
            let before = pair.ports.counters(1).unwrap().to_vrouter.bytes;
            sender.send_to(&[7; 100], "10.0.1.2:7").unwrap();
            let received = || pair.ports.counters(1).unwrap().to_vrouter.bytes - before;
            eventually("it comes", || received() > 0);
            assert_eq!(received(), 14 + 4 + 20 + 8 + 100, "{kind:#x}");
        });
    }
}

/// The pins may come from an older version with other maps.
#[test]
fn maps_of_another_version_are_replaced() {
    isolated(|| {
        let place = Place::new();
        let pins = place.pins.dir();
        std::fs::create_dir_all(&pins).unwrap();
        let options = libbpf_sys::bpf_map_create_opts {
            sz: size_of::<libbpf_sys::bpf_map_create_opts>() as _,
            ..Default::default()
        };
        let map = libbpf_rs::MapHandle::create(
            libbpf_rs::MapType::Array,
            Some("ports"),
            4,
            8,
            5,
            &options,
        );
        map.unwrap().pin(pins.join("ports")).unwrap();
        let ports = place.open();
        let guest = Peer::guest();
        assert_eq!(ports.make(guest.netns().as_fd(), &spec(0, 1)).unwrap(), Made::All);
        let nowhere = tempfile::tempdir().unwrap();
        let error = Ports::open(&place.netns(), nowhere.path()).unwrap_err();
        assert!(error.to_string().contains("mount -t bpf"), "{error}");
        assert!(File::open(place.netns()).is_ok());
    });
}

/// A guest's port 0, 10.0.1.1, and an interface `ext`, 10.1.1.1,
/// whose other end is `far`, 10.1.1.2, at a peer.
struct Outer {
    ports: Ports,
    xdp: Xdp,
    index: u32,
    hop: UnderlayHop,
    peer: Peer,
    guest: Peer,
    place: Place,
}

impl Outer {
    fn new(take: Take) -> Self {
        let (place, guest, peer) = (Place::new(), Peer::guest(), Peer::new());
        run(&format!(
            "ip link add ext type veth peer name far netns {}
             ip addr add 10.1.1.1/24 dev ext; ip addr add fd11::1/64 dev ext nodad
             ip link set ext up",
            peer.id()
        ));
        // Frames redirected to ext come out of far only if that has NAPI, through GRO or a program.
        peer.run(
            "ip addr add 10.1.1.2/24 dev far; ip addr add fd11::2/64 dev far nodad; \
             ip link set far up; \
             ethtool -K far tx off gro off > /dev/null",
        );
        assert_eq!(["ext", "no-such"].map(xdp::redirects), [Some(false), None]);
        peer.run("ethtool -K far gro on > /dev/null");
        assert_eq!(xdp::redirects("ext"), Some(true));
        let ports = place.open();
        let port = PortSpec { mtu: 1430, ..spec(0, 1) };
        ports.make(guest.netns().as_fd(), &port).unwrap();
        let pins = place.pins.dir().with_file_name("xdp");
        let mut xdp = Xdp::attach_for("ext", &pins, &ports).unwrap();
        assert_eq!(xdp.mode(), XdpMode::Native);
        xdp.set_takes(&[take]).unwrap();
        let far = within(peer.netns().as_fd(), || InterfaceInfo::by_name("far")).unwrap();
        let hop = UnderlayHop { mac: far.mac, mtu: 1500 };
        let index = InterfaceInfo::by_name("ext").unwrap().index;
        Self { ports, xdp, index, hop, peer, guest, place }
    }

    fn outside(&self, by: &Encapsulation) -> ExternalEnd {
        let mac = InterfaceInfo::by_name("ext").unwrap().mac;
        ExternalEnd { interface: self.index, mac, by: by.clone(), limit: Some(3) }
    }
}

/// Outer addresses.
const ENDS: [[&str; 2]; 2] = [["10.1.1.1", "10.1.1.2"], ["fd11::1", "fd11::2"]];

fn vxlan([local, remote]: [&str; 2], vni: u32) -> Encapsulation {
    let (local, remote) = (local.parse().unwrap(), remote.parse().unwrap());
    Encapsulation::Vxlan(vxlan::VxlanTunnel { local, remote, port: 4789, vni })
}

fn tunnels() -> impl Iterator<Item = Encapsulation> {
    ENDS.into_iter().flat_map(|ends| {
        let (local, remote) = (ends[0].parse().unwrap(), ends[1].parse().unwrap());
        let udp = udp::UdpTunnel { local, remote, local_port: 7000, remote_port: 7001 };
        [vxlan(ends, 0x12_3456), Encapsulation::Udp(udp)]
    })
}

/// The other end is Linux's own.
#[test]
fn a_vrouter_reaches_linux_by_a_vxlan_tunnel() {
    ENDS.into_iter().for_each(|ends| isolated(|| reach_linux(ends)));
}

fn reach_linux(ends: [&str; 2]) {
    let by = vxlan(ends, 7);
    let outer = Outer::new(by.takes().unwrap());
    outer.peer.run(&format!(
        "for vni in 7 8; do
                 ip link add vx$vni type vxlan id $vni local {1} remote {0} dstport 4789 dev far
                 ip link set vx$vni mtu 1430
                 ip addr add 10.0.$((vni - 6)).2/24 dev vx$vni; ip link set vx$vni up
             done; ip addr add fd00:1::2/64 dev vx7 nodad",
        ends[0], ends[1]
    ));
    let pings = |to| outer.guest.tries(&format!("ping -c 1 -W 5 {to}"));
    let outside = outer.outside(&by);
    outer.ports.join(0, LinkTarget::Outside(outside.clone())).unwrap();
    assert!(!outer.guest.tries("ping -c 1 -W 0.2 10.0.1.2"));
    assert!(outer.ports.counters(0).unwrap().dropped(Reason::UnderlayUnresolved) > 0);
    outer.ports.set_hop(0, Some(outer.hop)).unwrap();
    assert!(pings("10.0.1.2"), "{:?}", outer.ports.counters(0));
    assert!(pings("fd00:1::2"), "{:?}", outer.ports.counters(0));
    // Repeating the call changes nothing.
    outer.ports.join(0, LinkTarget::Outside(outside.clone())).unwrap();
    assert!(outer.guest.tries("ping -c 1 -W 5 -M do -s 1402 10.0.1.2"));
    let bytes: Vec<u8> = (0..1_000_000u32).map(|at| (at ^ at >> 9) as u8).collect();
    let listener = inside(&outer.peer, || TcpListener::bind("10.0.1.2:5000"));
    let mut stream = inside(&outer.guest, || TcpStream::connect("10.0.1.2:5000"));
    let mut got = vec![0; bytes.len()];
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut theirs = listener.accept().unwrap().0;
            theirs.read_exact(&mut got).unwrap();
            theirs.write_all(&got).unwrap();
        });
        stream.write_all(&bytes).unwrap();
        let mut back = vec![0; bytes.len()];
        stream.read_exact(&mut back).unwrap();
        assert!(back == bytes);
    });
    // Frames of another network do not reach the port, and pass as before.
    let passed = outer.xdp.counters().unwrap().no_socket;
    outer.peer.tries("ping -c 1 -W 0.2 10.0.2.1");
    assert!(outer.xdp.counters().unwrap().no_socket > passed);
    let hop = Some(UnderlayHop { mtu: 1400, ..outer.hop });
    outer.ports.set_hop(0, hop).unwrap();
    assert!(!outer.guest.tries("ping -c 1 -W 0.2 -s 1402 10.0.1.2"));
    assert!(outer.ports.counters(0).unwrap().dropped(Reason::UnderlayTooBig) > 0);
    outer.ports.limit(3, Some(PortRate { pps: 1, ..PortRate::default() })).unwrap();
    outer.peer.tries("ping -c 50 -i 0.002 -W 0.2 10.0.1.1");
    assert!(outer.ports.counters(0).unwrap().refused[Reason::Policed as usize] > 10);
    outer.ports.limit(3, None).unwrap();
    assert!(pings("10.0.1.2"));
    let taken = outer.ports.join(1, LinkTarget::Outside(outside)).unwrap_err();
    assert!(taken.to_string().contains("used by port 0"), "{taken}");
    outer.ports.join(0, LinkTarget::None).unwrap();
    let passed = outer.xdp.counters().unwrap().no_socket;
    outer.peer.tries("ping -c 1 -W 0.2 10.0.1.1");
    assert!(outer.xdp.counters().unwrap().no_socket > passed);
    at_rest(&outer.ports, [0]);
}

/// A host behind a router whose far link is a tunnel to Linux's own: the XDP
/// bypass gives the same output, in both directions.
#[test]
fn xdp_bypass_forwards_through_a_tunnel() {
    ENDS.into_iter().for_each(|ends| isolated(|| reach_linux_from_behind(ends)));
}

fn reach_linux_from_behind(ends: [&str; 2]) {
    let by = vxlan(ends, 7);
    let outer = Outer::new(by.takes().unwrap());
    outer.peer.run(&format!(
        "ip link add vx7 type vxlan id 7 local {1} remote {0} dstport 4789 dev far
         ip link set vx7 mtu 1430
         ip addr add 10.0.1.2/24 dev vx7; ip addr add fd00:1::2/64 dev vx7 nodad; ip link set vx7 up
         ip route add 10.0.2.0/24 via 10.0.1.1; ip route add fd00:2::/64 via fd00:1::1",
        ends[0], ends[1]
    ));
    let host = Peer::guest();
    let near = PortSpec { vrouter: 0, mtu: 1430, name: "eth1".into(), ..spec(2, 2) };
    let far = PortSpec { mtu: 1430, ..spec(3, 2) };
    outer.ports.make(outer.guest.netns().as_fd(), &near).unwrap();
    outer.ports.make(host.netns().as_fd(), &far).unwrap();
    outer.ports.join(2, LinkTarget::Port(3)).unwrap();
    outer.ports.join(3, LinkTarget::Port(2)).unwrap();
    outer.ports.join(0, LinkTarget::Outside(outer.outside(&by))).unwrap();
    outer.ports.set_hop(0, Some(outer.hop)).unwrap();
    let router = outer.guest.netns();
    sysctl::set(router.as_fd(), "net.ipv4.ip_forward", "1").unwrap();
    sysctl::set(router.as_fd(), "net.ipv6.conf.all.forwarding", "1").unwrap();
    host.run("ip route add default via 10.0.2.1; ip route add default via fd00:2::1");
    let pings = "ping -c 5 -i 0.01 -W 5 10.0.1.2 && ping -c 5 -i 0.01 -W 5 fd00:1::2
        ping -c 1 -W 5 -M do -s 1402 10.0.1.2";
    assert!(host.tries(pings), "by the stack");
    outer.ports.activate_bypass(0, LEASE_MAX, [NO_MTU; 2]).unwrap();
    assert!(host.tries(pings));
    let [outside, inside] = at_rest(&outer.ports, [0, 2]);
    assert!(
        outside.bypass.bypassed >= 11 && inside.bypass.bypassed >= 11,
        "{outside:?} {inside:?}"
    );
    assert_eq!((outside.dropped(Reason::Policed), inside.dropped(Reason::Policed)), (0, 0));
    // Frames too long for the tunnel are dropped as at the port.
    outer.ports.set_hop(0, Some(UnderlayHop { mtu: 1400, ..outer.hop })).unwrap();
    assert!(!host.tries("ping -c 1 -W 0.2 -s 1402 10.0.1.2"));
    outer.ports.set_hop(0, None).unwrap();
    assert!(!host.tries("ping -c 1 -W 0.2 10.0.1.2"));
    let [outside] = at_rest(&outer.ports, [0]);
    assert_eq!(outside.dropped(Reason::UnderlayTooBig), 1);
    assert!(outside.dropped(Reason::UnderlayUnresolved) >= 1);
}

/// Frames for a vrouter that has used up its CPU time are refused and counted there, whether they
/// come from ports or from tunnels.
#[test]
fn vrouter_out_of_power_refuses_and_counts_frames() {
    isolated(|| {
        let by = vxlan(ENDS[0], 7);
        let outer = Outer::new(by.takes().unwrap());
        outer.peer.run(
            "ip link add vx7 type vxlan id 7 local 10.1.1.2 remote 10.1.1.1 dstport 4789 dev far
             ip addr add 10.0.1.2/24 dev vx7; ip link set vx7 up",
        );
        outer.ports.join(0, LinkTarget::Outside(outer.outside(&by))).unwrap();
        outer.ports.set_hop(0, Some(outer.hop)).unwrap();
        let (near, host) =
            (PortSpec { vrouter: 0, name: "eth1".into(), ..spec(2, 2) }, Peer::guest());
        outer.ports.make(outer.guest.netns().as_fd(), &near).unwrap();
        outer.ports.make(host.netns().as_fd(), &spec(3, 2)).unwrap();
        outer.ports.join(2, LinkTarget::Port(3)).unwrap();
        outer.ports.join(3, LinkTarget::Port(2)).unwrap();
        let by_tunnel = "ping -c 1 -W 0.3 10.0.1.1";
        let by_port = "ping -c 1 -W 0.3 10.0.2.1";
        assert!(outer.peer.tries(by_tunnel) && host.tries(by_port));
        outer.ports.power(0, Some(Power { millicores: 1 })).unwrap();
        assert!(outer.peer.tries(by_tunnel) && host.tries(by_port), "it has used none");
        // A debt that takes an hour to pay off.
        let pin = outer.place.pins.dir().join("vrouters");
        let vrouters = libbpf_rs::MapHandle::from_pinned_path(pin).unwrap();
        let mut value = vrouters.lookup(&[0; 4], MapFlags::LOCK).unwrap().unwrap();
        let hour = ports::now() + Duration::from_secs(3600);
        value[32..40].copy_from_slice(&(hour.as_nanos() as u64).to_ne_bytes());
        vrouters.update(&[0; 4], &value, MapFlags::LOCK).unwrap();
        // Setting the same limit again does not pay it off.
        outer.ports.power(0, Some(Power { millicores: 1 })).unwrap();
        outer.ports.activate_bypass(0, LEASE_MAX, [NO_MTU; 2]).unwrap();
        let before = at_rest(&outer.ports, [0, 2, 3]);
        assert!(!outer.peer.tries(by_tunnel) && !host.tries(by_port));
        let now = at_rest(&outer.ports, [0, 2, 3]);
        for port in 0..2 {
            let refused = |of: &KernelPortCounters| of.refused[Reason::Power as usize];
            let received = now[port].from_link.frames - before[port].from_link.frames;
            assert!(received > 0, "{:?}", now[port]);
            assert_eq!(refused(&now[port]) - refused(&before[port]), received);
        }
        // It was sent, where it came from.
        let sent = now[2].to_link.frames - before[2].to_link.frames;
        assert_eq!(sent, now[1].from_link.frames - before[1].from_link.frames);
        outer.ports.power(0, None).unwrap();
        assert!(outer.peer.tries(by_tunnel) && host.tries(by_port));
    });
}

/// The program writes the same headers as the mux, apart from the flow's hash.
#[test]
fn outer_headers_match_the_muxs() {
    for by in tunnels() {
        isolated(|| {
            let outer = Outer::new(by.takes().unwrap());
            let outside = outer.outside(&by);
            outer.ports.join(0, LinkTarget::Outside(outside.clone())).unwrap();
            outer.ports.set_hop(0, Some(outer.hop)).unwrap();
            let template = outer::HeaderTemplate::new(&by).unwrap();
            let (from, to) = (raw(&outer.guest, "eth0"), raw(&outer.peer, "far"));
            let mut sources = std::collections::HashSet::new();
            for frame in inner_frames() {
                nix::unistd::write(&from, &frame).unwrap();
                let mut want = vec![0; template.len()];
                want.extend(&frame);
                template.write(&mut want, outer.hop.mac, outside.mac).unwrap();
                let mut bytes = [0; 2048];
                eventually("it comes", || {
                    let Ok(count) = nix::unistd::read(&to, &mut bytes) else { return false };
                    let mut got = bytes[..count].to_vec();
                    if got.len() != want.len() {
                        return false; // something of the host's own
                    }
                    let at = behind_ip(&by);
                    let source = u16::from_be_bytes([got[at], got[at + 1]]);
                    if matches!(by, Encapsulation::Vxlan(_)) {
                        assert!(source >= udp::SPREAD_FIRST);
                        got[at..at + 2].copy_from_slice(&want[at..at + 2]);
                        sources.insert(source);
                    }
                    if at == 54 {
                        // Another source port has another checksum.
                        assert!(
                            outer::parse(&bytes[..count])
                                .unwrap()
                                .checksum_ok(&bytes[..count], false)
                        );
                        got[at + 6..at + 8].copy_from_slice(&want[at + 6..at + 8]);
                    }
                    got == want
                });
            }
            let flows = if matches!(by, Encapsulation::Vxlan(_)) { 30 } else { 0 };
            assert!(sources.len() >= flows, "{}", sources.len());
        });
    }
}

/// Frames of several kinds and marks, of 64 flows.
fn inner_frames() -> Vec<Vec<u8>> {
    let mut frames = Vec::new();
    for flow in 0..64u8 {
        for mark in 0..4 {
            let builder = PacketBuilder::ethernet2([2; 6], [4; 6]);
            let mut frame = Vec::new();
            if flow % 2 == 0 {
                let builder = builder.ipv4([10, 0, 0, 1], [10, 0, 0, 2], 9);
                builder.udp(u16::from(flow), 9).write(&mut frame, b"payload").unwrap();
                frame[15] = 0xb8 | mark;
                frame[24..26].fill(0);
                let sum = checksum::checksum(&frame[14..34]);
                frame[24..26].copy_from_slice(&sum.to_be_bytes());
            } else {
                let builder = builder.ipv6([1; 16], [flow; 16], 9);
                builder.udp(1, 2).write(&mut frame, b"payload").unwrap();
                frame[15] |= mark << 4;
            }
            frames.push(frame);
        }
    }
    let arp = [&[2; 12][..], &[8, 6], &[0x45; 40]].concat();
    frames.extend([arp, [&[2; 12][..], &[0x12, 0x34]].concat()]);
    frames
}

/// The output equals the mux's, for every outer mark. Frames
/// with incomplete headers belong to no tunnel.
#[test]
fn tunnel_decapsulation_matches_the_mux() {
    for by in tunnels() {
        isolated(|| {
            let outer = Outer::new(by.takes().unwrap());
            let outside = outer.outside(&by);
            outer.ports.join(0, LinkTarget::Outside(outside.clone())).unwrap();
            let template = outer::HeaderTemplate::new(&by.reversed()).unwrap();
            let (from, to) = (raw(&outer.peer, "far"), raw(&outer.guest, "eth0"));
            let tunnelled = |frame: &[u8], mark: u8| {
                let mut bytes = vec![0; template.len()];
                bytes.extend(frame);
                template.write(&mut bytes, outside.mac, outer.hop.mac).unwrap();
                set_mark(&mut bytes, mark);
                bytes
            };
            let (mut congested, mut changed) = (0, 0);
            for frame in inner_frames().iter().skip(192) {
                for mark in 0..4 {
                    let mut want = frame.clone();
                    let outer_mark = ecn::of(&tunnelled(frame, mark));
                    let kept = ecn::decapsulate(&mut want, outer_mark);
                    changed += u32::from(want != *frame);
                    nix::unistd::write(&from, &tunnelled(frame, mark)).unwrap();
                    if !kept {
                        congested += 1;
                        let counted = || outer.ports.counters(0).unwrap();
                        eventually("it is counted", || {
                            counted().dropped(Reason::Congested) == congested
                        });
                        continue;
                    }
                    let mut bytes = [0; 2048];
                    eventually("it comes", || {
                        nix::unistd::read(&to, &mut bytes).is_ok_and(|count| bytes[..count] == want)
                    });
                }
            }
            assert!(congested > 10 && changed > 10, "{congested} {changed}");
            // Each byte of the headers changed, and each length: the program
            // finds a tunnel exactly when the mux does.
            let frame = &inner_frames()[0];
            let whole = tunnelled(frame, 0);
            let mut found = 0;
            for at in 0..template.len() {
                for bit in [1, 0x10, 0x80] {
                    let mut bytes = whole.clone();
                    bytes[at] ^= bit;
                    if behind_ip(&by) == 34 && (14..34).contains(&at) && !(24..26).contains(&at) {
                        bytes[24..26].fill(0);
                        let sum = checksum::checksum(&bytes[14..34]);
                        bytes[24..26].copy_from_slice(&sum.to_be_bytes());
                    }
                    let before = outer.ports.counters(0).unwrap().from_link.frames;
                    outer.send(&from, &bytes);
                    let is_found = outer.ports.counters(0).unwrap().from_link.frames > before;
                    assert_eq!(is_found, finds(&by, outside.mac, &bytes), "{at} {bit:#x}");
                    found += u32::from(is_found);
                }
            }
            // With a checksum, for datagrams of every length.
            for length in (0..70).chain(280..300).chain(1390..1400) {
                let mut bytes =
                    tunnelled(&[&frame[..14], &vec![at_of(length); length]].concat(), 0);
                if behind_ip(&by) == 34 {
                    let sum = udp_sum(&bytes);
                    bytes[40..42].copy_from_slice(&sum.to_be_bytes());
                }
                for wrong in [false, true] {
                    let before = outer.ports.counters(0).unwrap().from_link.frames;
                    let last = bytes.len() - 1;
                    bytes[last] ^= u8::from(wrong);
                    outer.send(&from, &bytes);
                    let after = outer.ports.counters(0).unwrap().from_link.frames;
                    assert_eq!(after > before, !wrong, "{length}");
                    assert_eq!(finds(&by, outside.mac, &bytes), !wrong);
                }
            }
            // Without one.
            let mut bytes = whole.clone();
            bytes[behind_ip(&by) + 6..][..2].fill(0);
            let before = outer.ports.counters(0).unwrap().from_link.frames;
            outer.send(&from, &bytes);
            let is_found = outer.ports.counters(0).unwrap().from_link.frames > before;
            assert_eq!(is_found, finds(&by, outside.mac, &bytes));
            for length in 14..whole.len() {
                let before = outer.ports.counters(0).unwrap().from_link.frames;
                outer.send(&from, &whole[..length]);
                assert_eq!(outer.ports.counters(0).unwrap().from_link.frames, before, "{length}");
            }
            assert!(found > 20, "{found}");
            // A malformed frame does not belong to a network whose number is 0.
            if let Encapsulation::Vxlan(tunnel) = &by {
                let none = Encapsulation::Vxlan(vxlan::VxlanTunnel { vni: 0, ..tunnel.clone() });
                let outside = ExternalEnd { by: none, ..outside };
                outer.ports.join(0, LinkTarget::Outside(outside)).unwrap();
                let mut bytes = whole.clone();
                let at = behind_ip(&by);
                for (valid, is_found) in [(8, true), (0, false)] {
                    bytes[at..at + 2].fill(0);
                    bytes[at + 6..at + 16].fill(0);
                    bytes[at + 8] = valid;
                    let before = outer.ports.counters(0).unwrap().from_link.frames;
                    outer.send(&from, &bytes);
                    let after = outer.ports.counters(0).unwrap().from_link.frames;
                    assert_eq!(after > before, is_found, "{valid}");
                }
            }
            at_rest(&outer.ports, [0]);
        });
    }
}

/// Returns the offset of the header behind the outer IP header.
fn behind_ip(by: &Encapsulation) -> usize {
    if by.ends().unwrap().0.is_ipv4() { 34 } else { 54 }
}

/// Gives an outer header its ECN mark.
fn set_mark(frame: &mut [u8], mark: u8) {
    if frame[12] == 8 {
        frame[15] = mark;
        frame[24..26].fill(0);
        let sum = checksum::checksum(&frame[14..34]);
        frame[24..26].copy_from_slice(&sum.to_be_bytes());
    } else {
        frame[15] = mark << 4;
    }
}

/// Returns a byte that differs for each length.
fn at_of(length: usize) -> u8 {
    (length * 7) as u8
}

/// Returns the checksum of the UDP datagram in an IPv4 packet, whose checksum field is 0.
fn udp_sum(frame: &[u8]) -> u16 {
    let mut pseudo = frame[26..34].to_vec();
    pseudo.extend([0, 17]);
    pseudo.extend(&frame[38..40]);
    pseudo.extend(&frame[34..]);
    match checksum::checksum(&pseudo) {
        0 => 0xffff,
        sum => sum,
    }
}

impl Outer {
    /// Sends a frame, and waits until the program has seen it.
    fn send(&self, from: &OwnedFd, frame: &[u8]) {
        let seen = || {
            let counters = self.xdp.counters().unwrap();
            let port = self.ports.counters(0).unwrap().from_link.frames;
            counters.taken + counters.no_socket + counters.passed + port
        };
        let before = seen();
        nix::unistd::write(from, frame).unwrap();
        let deadline = Instant::now() + common::EVENTUALLY;
        while seen() == before {
            assert!(Instant::now() < deadline, "it is not seen");
            std::thread::sleep(Duration::from_micros(50));
        }
    }
}

/// True if the mux recognizes a frame as a tunnel's, with
/// nothing between the outer IP header and UDP.
fn finds(by: &Encapsulation, mac: [u8; 6], frame: &[u8]) -> bool {
    let Ok(outer) = outer::parse(frame) else { return false };
    let inner = outer.payload();
    let key = match by {
        Encapsulation::Vxlan(tunnel) => {
            vxlan::parse(&frame[inner.clone()]) == Some(tunnel.vni)
                && outer.take() == by.takes().unwrap()
        }
        Encapsulation::Udp(tunnel) => {
            let outer::OuterPayload::Udp { remote_port, local_port, .. } = outer.carried else {
                return false;
            };
            (remote_port, local_port) == (tunnel.remote_port, tunnel.local_port)
        }
        _ => false,
    };
    let plain = matches!((frame[14], frame[20]), (0x45, _) | (_, 17));
    let whole = outer.checksum_ok(frame, matches!(by, Encapsulation::Vxlan(_)));
    key && plain && whole && frame[..6] == mac && by.ends() == Some((outer.local, outer.remote))
}
