//! Tests that the XDP bypass does the same as the namespace. Two namespaces are set up alike, one
//! with the program and one without. Both get the same frames, and the output of all ports is
//! compared byte by byte. Needs root.
//!
//! `PDP_SHORT_CASES=N` makes N random routers instead of [`CASES`], and `PDP_SHORT_SEED=S`
//! sets the first seed. A failure names its seed. `PDP_SHORT_VERBOSE=1` describes each
//! router, and the commands that ip(8) refused.

mod live;
mod short_cases;

use std::collections::HashMap;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant};

use libbpf_rs::{MapCore, MapFlags};
use live::{
    Live, Netns, Place, To, adds_up, eventually, isolated, receive, run, send, sum_of as sum,
};
use pdp_net::ethtool;
use pdp_net::interface::InterfaceInfo;
use pdp_net::napi::{set_threaded, threads};
use pdp_net::netns::within;
use pdp_net::ports::{
    self, BypassCounters, BypassExclusions, InnerEndChange, KernelPortCounters, LEASE_MAX,
    LinkTarget, Made, NO_MTU, PORTS_MAX, PortRate, PortSpec, Ports, Power, Reason, UsedNeighbour,
};
use pdp_wire::checksum::checksum;
use short_cases::{INTERFACE_SETTINGS, PORTS, RESET, Random, Router, SETTINGS, base, mac_of};

/// Random routers of a normal run, and frames that each gets.
const CASES: u64 = 50;
const FRAMES: usize = 200;

/// The output is complete once nothing arrives for this long.
const QUIET: Duration = Duration::from_millis(3);

/// Or, where it matters, in this.
const LATE: Duration = Duration::from_millis(300);

/// A router in a namespace with links to this one, and sockets at their far ends.
struct Bench {
    netns: Netns,
    /// Number of the vrouter and of its first port; the far ends have the numbers after it.
    vrouter: u32,
    sockets: Vec<OwnedFd>,
}

impl Bench {
    /// Makes a router with names of its own, and the ports from `vrouter` on.
    fn new(ports: &mut Ports, live: &Live, name: &str, vrouter: u32) -> Self {
        let netns = Netns::new();
        netns.run(SETTINGS);
        run("echo 1 > /proc/sys/net/ipv6/conf/default/disable_ipv6");
        let here = File::open("/proc/thread-self/ns/net").unwrap();
        let mut this = Self { netns, vrouter, sockets: Vec::new() };
        for port in 0..PORTS {
            let (near, far) = (this.spec(port), this.far_spec(name, port));
            assert_eq!(ports.make(this.netns.fd(), &near).unwrap(), Made::All);
            assert_eq!(ports.make(here.as_fd(), &far).unwrap(), Made::All);
            ports.join(near.number, LinkTarget::Port(far.number)).unwrap();
            ports.join(far.number, LinkTarget::Port(near.number)).unwrap();
            run(&format!("ip link set {} arp off", far.name));
            ethtool::offloads_off(&far.name).unwrap();
            let index = InterfaceInfo::by_name(&far.name).unwrap().index;
            this.sockets.push(live.socket(&far.name, index));
            // As guests can do: longer frames may arrive.
            this.netns.run(&format!("ip link set eth{port} mtu 1500"));
        }
        this.netns.ip(&base());
        this.netns.run(INTERFACE_SETTINGS);
        let off = || (0..PORTS).try_for_each(|port| ethtool::offloads_off(&format!("eth{port}")));
        within(this.netns.fd(), off).unwrap();
        this
    }

    /// Restores the earlier settings of a port that was made again.
    fn equip_eth1(&self) {
        let lines: Vec<_> =
            base().lines().filter(|line| line.contains("eth1")).map(str::to_owned).collect();
        self.netns.ip(&lines.join("\n"));
    }

    fn number(&self, port: usize) -> u32 {
        self.vrouter + port as u32
    }

    fn far_number(&self, port: usize) -> u32 {
        self.vrouter + (PORTS + port) as u32
    }

    fn spec(&self, port: usize) -> PortSpec {
        PortSpec {
            number: self.number(port),
            vrouter: self.vrouter,
            name: format!("eth{port}"),
            mac: mac_of(port),
            mtu: 2000,
            addresses: vec![],
            routes: vec![],
        }
    }

    fn far_spec(&self, name: &str, port: usize) -> PortSpec {
        let number = self.far_number(port);
        let mac = [2, 0xbb, 0, 0, 0, port as u8];
        PortSpec { number, vrouter: number, name: format!("{name}{port}"), mac, ..self.spec(port) }
    }

    fn lend(&self, ports: &Ports) {
        ports.activate_bypass(self.vrouter, LEASE_MAX, [NO_MTU; 2]).unwrap();
    }

    fn counters(&self, ports: &Ports) -> Vec<KernelPortCounters> {
        (0..PORTS).map(|port| ports.counters(self.number(port)).unwrap()).collect()
    }

    /// Sums over all ports.
    fn bypass(&self, ports: &Ports) -> BypassCounters {
        self.counters(ports).iter().fold(BypassCounters::default(), |sum, one| {
            let one = one.bypass;
            BypassCounters {
                bypassed: sum.bypassed + one.bypassed,
                silent: sum.silent + one.silent,
                hooked: sum.hooked + one.hooked,
                special: sum.special + one.special,
                route: sum.route + one.route,
                neighbour: sum.neighbour + one.neighbour,
                too_big: sum.too_big + one.too_big,
                source: sum.source + one.source,
            }
        })
    }

    /// Checks that the counters of all the links' ports add up at rest.
    fn adds_up(&self, ports: &Ports) {
        for port in 0..PORTS {
            for number in [self.number(port), self.far_number(port)] {
                adds_up(&ports.counters(number).unwrap());
            }
        }
    }

    /// Returns the output, with its port.
    fn out(&self) -> Vec<(usize, Vec<u8>)> {
        let mut frames = Vec::new();
        let mut last = Instant::now();
        while last.elapsed() < QUIET {
            let before = frames.len();
            for (port, socket) in self.sockets.iter().enumerate() {
                frames.extend(std::iter::from_fn(|| receive(socket)).map(|frame| (port, frame)));
            }
            if frames.len() > before {
                last = Instant::now();
            } else {
                std::thread::sleep(Duration::from_micros(200));
            }
        }
        frames
    }
}

/// Two routers that are set up alike, one with a lease.
struct Benches {
    with: Bench,
    without: Bench,
    ports: Ports,
    _place: Place,
    _live: Live,
}

impl Benches {
    /// Uses a number that no other instance has at the time.
    fn new(number: u64) -> Self {
        let (live, place) = (Live::new(64), Place::new());
        let mut ports = place.open();
        let with = Bench::new(&mut ports, &live, &format!("p{number}x"), 16);
        let without = Bench::new(&mut ports, &live, &format!("r{number}x"), 48);
        Self { with, without, ports, _place: place, _live: live }
    }
}

/// One of them.
struct One {
    bench: Bench,
    ports: Ports,
    place: Place,
    live: Live,
}

impl One {
    /// With frames of this size, which the kernel makes.
    fn new(bytes: usize) -> Self {
        let (live, place) = (Live::new(bytes), Place::new());
        let mut ports = place.open();
        let bench = Bench::new(&mut ports, &live, "p", 16);
        Self { bench, ports, place, live }
    }

    fn lend(&self) {
        self.bench.lend(&self.ports);
    }

    fn bypass(&self) -> BypassCounters {
        self.bench.bypass(&self.ports)
    }

    /// Sends datagrams. Returns how many come out, and how many of them bypassed the stack.
    fn try_some(&self, v6: bool) -> (usize, u64) {
        let before = self.bypass();
        for _ in 0..10 {
            assert!(send(&self.bench.sockets[0], &datagram(v6)));
        }
        let out = sorted(self.bench.out());
        let now = self.bypass();
        assert_eq!(sum(&now) - sum(&before), 10, "each is counted once");
        (out.iter().filter(|(port, _)| *port == 1).count(), now.bypassed - before.bypassed)
    }
}

/// True for frames that a router sends by itself, or at times of its own: questions for neighbours,
/// groups, fragments that never arrived. Also true for those that the kernel rate-limits for the
/// whole machine: redirects of IPv6, missing routes of IPv4.
fn is_own_talk(frame: &[u8]) -> bool {
    let at = |index: usize| frame.get(index).copied().unwrap_or_default();
    match [at(12), at(13)] {
        [0x08, 0x06] => true,
        [0x08, 0x00] => {
            let carried = 14 + usize::from(at(14) & 15) * 4;
            let icmp = [at(carried), at(carried + 1)];
            at(23) == 2 || at(23) == 1 && is_own(frame) && matches!(icmp, [11, 1] | [3, 0 | 1 | 13])
        }
        [0x86, 0xdd] => {
            let listener = at(20) == 0 && at(62) == 143;
            let icmp = at(20) == 58 && matches!(at(54), 131..=133 | 137 | 143);
            listener
                || icmp
                || at(20) == 58 && (at(54) == 135 && at(21) == 255 || [at(54), at(55)] == [3, 1])
        }
        _ => false,
    }
}

/// True if an IPv4 packet comes from an address of the router.
fn is_own(frame: &[u8]) -> bool {
    frame.get(26..30).is_some_and(|from| from[0] == 10 && from[2..] == [0, 1])
}

/// Clears the identification that a router chooses for packets of its own.
fn plain(mut frame: Vec<u8>) -> Vec<u8> {
    if frame.get(12..14) == Some(&[8, 0]) && is_own(&frame) {
        frame[18..20].fill(0);
        frame[24..26].fill(0);
    }
    frame
}

fn sorted(frames: Vec<(usize, Vec<u8>)>) -> Vec<(usize, Vec<u8>)> {
    let mut frames: Vec<_> = frames
        .into_iter()
        .filter(|(_, frame)| !is_own_talk(frame))
        .map(|(port, frame)| (port, plain(frame)))
        .collect();
    frames.sort();
    frames
}

fn hex(frame: &[u8]) -> String {
    frame.iter().take(80).map(|byte| format!("{byte:02x}")).collect()
}

/// Describes the frames that one output has more often than the other.
fn difference(one: &[(usize, Vec<u8>)], other: &[(usize, Vec<u8>)], name: &str) -> String {
    let mut counts: HashMap<&(usize, Vec<u8>), i32> = HashMap::new();
    for frame in other {
        *counts.entry(frame).or_default() += 1;
    }
    let mut words = String::new();
    for frame in one {
        let count = counts.entry(frame).or_default();
        *count -= 1;
        if *count < 0 {
            words +=
                &format!("  {name}: eth{} {} bytes {}\n", frame.0, frame.1.len(), hex(&frame.1));
        }
    }
    words
}

fn number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(otherwise)
}

#[test]
fn xdp_bypass_output_matches_the_stack() {
    isolated(|| {
        let (seed, cases) = (number("PDP_SHORT_SEED", 1), number("PDP_SHORT_CASES", CASES));
        let (started, mut sent, mut out, mut short) = (Instant::now(), 0, 0, 0);
        let mut benches: Option<Benches> = None;
        for case in seed..seed + cases {
            let mut random = Random(case.wrapping_mul(0x1234_5678_9abc_def1), false);
            let router = Router::new(&mut random);
            let Benches { with, without, ports, .. } =
                benches.get_or_insert_with(|| Benches::new(case));
            let both = [&*with, &*without];
            for bench in both {
                bench.netns.ip(&router.ip);
                if !router.shell.is_empty() {
                    // Features that this kernel lacks are missing in both.
                    bench.netns.run(&format!("set +e\n{}\ntrue", router.shell));
                }
            }
            ports.activate_bypass(with.vrouter, LEASE_MAX, router.bytes_max).unwrap();
            // Frames that the routers send by themselves after a change.
            let _ = both.map(Bench::out);
            let before = with.bypass(ports);
            let frames: Vec<_> = (0..FRAMES).map(|_| router.frame(&mut random)).collect();
            let mut seen = both.map(|bench| {
                let mut seen = Vec::new();
                // No more at once than a socket's buffer can hold.
                for some in frames.chunks(50) {
                    for (port, frame) in some {
                        send(&bench.sockets[*port], frame);
                    }
                    seen.extend(bench.out());
                }
                sorted(seen)
            });
            if seen[0] != seen[1] {
                // Output may be late if the router did not run for a while.
                std::thread::sleep(LATE);
                for (seen, bench) in seen.iter_mut().zip(both) {
                    seen.extend(sorted(bench.out()));
                    seen.sort();
                }
            }
            let now = with.bypass(ports);
            short += now.bypassed - before.bypassed;
            sent += frames.len();
            out += seen[1].len();
            if std::env::var("PDP_SHORT_VERBOSE").is_ok() {
                println!(
                    "{case}: {} out, {} short, {:?}",
                    seen[1].len(),
                    now.bypassed - before.bypassed,
                    now
                );
            }
            if seen[0] != seen[1] {
                let words = difference(&seen[0], &seen[1], "short way alone")
                    + &difference(&seen[1], &seen[0], "kernel alone");
                panic!(
                    "PDP_SHORT_SEED={case} PDP_SHORT_CASES=1:\n{words}\n{}\n{}",
                    router.ip, router.shell
                );
            }
            both.iter().for_each(|bench| bench.adds_up(ports));
            for bench in both {
                bench.netns.run(RESET);
                bench.netns.ip(&router.undo_ip);
            }
            if router.is_spoilt {
                benches = None;
            }
        }
        println!(
            "{cases} routers, {sent} frames, {out} came out, {short} by the short way, {:?}",
            started.elapsed()
        );
        assert!(short * 10 > out as u64, "{short} of {out} frames took the XDP bypass");
    });
}

/// A plain datagram to a neighbour of eth1.
fn datagram(v6: bool) -> Vec<u8> {
    let mut frame = [&mac_of(0)[..], &[2, 4, 0, 0, 0, 2]].concat();
    if v6 {
        frame.extend([0x86, 0xdd, 0x60, 0, 0, 0, 0, 16, 17, 64]);
        frame.extend("fd00:0::2".parse::<std::net::Ipv6Addr>().unwrap().octets());
        frame.extend("fd00:1::2".parse::<std::net::Ipv6Addr>().unwrap().octets());
    } else {
        let mut ip = vec![0x45, 0, 0, 36, 0, 1, 0x40, 0, 64, 17, 0, 0, 10, 0, 0, 2, 10, 1, 0, 2];
        let sum = checksum(&ip);
        ip[10..12].copy_from_slice(&sum.to_be_bytes());
        frame.extend([8, 0]);
        frame.extend(ip);
    }
    frame.extend([3, 0xe8, 7, 0xd0, 0, 16, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8]);
    frame
}

#[test]
fn xdp_bypass_needs_a_live_watcher() {
    isolated(|| {
        let one = One::new(64);
        for v6 in [false, true] {
            assert_eq!(one.try_some(v6), (10, 0), "nobody has lent it yet");
        }
        assert_eq!(one.bypass().silent, 20);
        one.lend();
        for v6 in [false, true] {
            assert_eq!(one.try_some(v6), (10, 10));
        }
        // The watcher dies.
        one.ports.activate_bypass(16, Duration::from_millis(100), [NO_MTU; 2]).unwrap();
        assert_eq!(one.try_some(false), (10, 10));
        std::thread::sleep(Duration::from_millis(120));
        assert_eq!(one.try_some(false), (10, 0), "the lease has ended");
        // It is taken back.
        one.lend();
        one.ports.activate_bypass(16, Duration::ZERO, [NO_MTU; 2]).unwrap();
        assert_eq!(one.try_some(true), (10, 0));
        // Datagrams may exceed a route's MTU.
        one.ports.activate_bypass(16, LEASE_MAX, [35, 55]).unwrap();
        assert_eq!((one.try_some(false), one.try_some(true)), ((10, 0), (10, 0)));
        one.ports.activate_bypass(16, LEASE_MAX, [36, 56]).unwrap();
        assert_eq!((one.try_some(false), one.try_some(true)), ((10, 10), (10, 10)));
        assert_eq!(one.bypass().too_big, 20);
        // The watcher's exclusions, by port, direction and family.
        for (port, aside, v4, v6) in [
            (0, BypassExclusions { in_v4: true, ..BypassExclusions::default() }, 0, 10),
            (0, BypassExclusions { in_v6: true, ..BypassExclusions::default() }, 10, 0),
            (
                1,
                BypassExclusions { in_v4: true, in_v6: true, ..BypassExclusions::default() },
                10,
                10,
            ),
            (1, BypassExclusions { out_v4: true, ..BypassExclusions::default() }, 0, 10),
            (1, BypassExclusions { out_v6: true, ..BypassExclusions::default() }, 10, 0),
            (
                0,
                BypassExclusions { out_v4: true, out_v6: true, ..BypassExclusions::default() },
                10,
                10,
            ),
            (0, BypassExclusions::ALL, 0, 0),
        ] {
            one.ports.set_bypass_exclusions(16 + port, aside).unwrap();
            assert_eq!(one.try_some(false), (10, v4), "{port} {aside:?}");
            assert_eq!(one.try_some(true), (10, v6), "{port} {aside:?}");
            one.ports.set_bypass_exclusions(16 + port, BypassExclusions::default()).unwrap();
        }
        assert!(one.ports.set_bypass_exclusions(PORTS_MAX, BypassExclusions::ALL).is_err());
        assert!(one.ports.activate_bypass(PORTS_MAX, LEASE_MAX, [NO_MTU; 2]).is_err());
    });
}

#[test]
fn new_hook_stops_the_bypass_immediately() {
    isolated(|| {
        let one = One::new(64);
        one.lend();
        let rule = "type filter hook forward priority 0; policy drop;";
        for (set, unset, v4, v6) in [
            (
                format!("nft add table ip t; nft add chain ip t f '{{ {rule} }}'"),
                "nft delete table ip t",
                0,
                10,
            ),
            (
                format!("nft add table ip6 t; nft add chain ip6 t f '{{ {rule} }}'"),
                "nft delete table ip6 t",
                10,
                0,
            ),
            (
                format!("nft add table inet t; nft add chain inet t f '{{ {rule} }}'"),
                "nft delete table inet t",
                0,
                0,
            ),
            (
                "tc qdisc add dev eth1 root tbf rate 1mbit burst 10 limit 10".into(),
                "tc qdisc del dev eth1 root",
                0,
                0,
            ),
            (
                "ip xfrm policy add dir fwd src 10.0.0.0/8 dst 10.0.0.0/8 action block".into(),
                "ip xfrm policy flush",
                0,
                10,
            ),
            // Last: the kernel keeps the hook of the first bridge as long as the namespace exists.
            (
                "ip link add br0 type bridge; ip link set br0 up; ip link set eth0 master br0"
                    .into(),
                "ip link del br0",
                10,
                10,
            ),
        ] {
            for _ in 0..if set.contains("bridge") { 1 } else { 5 } {
                // On a busy machine, one lease is too short for all.
                one.lend();
                assert_eq!(one.try_some(false), (10, 10), "before {set}");
                assert_eq!(one.try_some(true), (10, 10), "before {set}");
                one.bench.netns.run(&set);
                // The very next frames.
                let now = [false, true].map(|v6| one.try_some(v6));
                assert_eq!(now.map(|(out, _)| out), [v4, v6], "{set}");
                // Traffic without hooks continues as before.
                let is_own = |table: &str| set.starts_with(&format!("nft add table {table} t;"));
                let short = [is_own("ip6"), is_own("ip")].map(|other| if other { 10 } else { 0 });
                assert_eq!(now.map(|(_, short)| short), short, "{set}");
                one.bench.netns.run(unset);
            }
        }
    });
}

#[test]
fn bypass_sends_only_to_the_vrouters_ports() {
    isolated(|| {
        let one = One::new(64);
        one.lend();
        // A device of the guest's own, which could be a destination.
        one.bench.netns.run(
            "ip link add own0 type veth peer name own1; ip link set own0 up; ip link set own1 up
             ethtool -K own1 gro on
             ip route add 10.1.0.2/32 dev own0; ip neigh add 10.1.0.2 lladdr 02:00:00:00:00:09 dev own0",
        );
        assert_eq!(one.try_some(false), (0, 0));
        assert!(one.bypass().route >= 10);
        one.bench.netns.run("ip link del own0");
        assert_eq!(one.try_some(false), (10, 10));
        // A device that takes the index of a deleted port is not a port.
        let index = one.bench.netns.index("eth1");
        one.bench.netns.run(&format!(
            "ip link del eth1; ip link add own0 index {index} type veth peer name own1
             ip link set own0 up; ip link set own1 up; ip addr add 10.1.0.1/16 dev own0; ethtool -K own1 gro on
             ip neigh add 10.1.0.2 lladdr 02:00:00:00:00:09 dev own0"
        ));
        assert_eq!(one.bench.netns.index("own0"), index);
        let before = one.bypass();
        for _ in 0..10 {
            assert!(send(&one.bench.sockets[0], &datagram(false)));
        }
        one.bench.sockets.iter().for_each(|socket| while receive(socket).is_some() {});
        eventually("all are counted", || sum(&one.bypass()) - sum(&before) == 10);
        assert_eq!(one.bypass().route - before.route, 10);
    });
}

/// Whatever slots they have: if two vrouters share a slot, for whatever
/// reason, neither sends from the other's ports.
#[test]
fn bypass_never_sends_into_another_namespace() {
    isolated(|| {
        let mut one = One::new(64);
        let other = Bench::new(&mut one.ports, &one.live, "r", 48);
        for port in 0..PORTS {
            let spec = PortSpec { vrouter: one.bench.vrouter, ..other.spec(port) };
            // The guest's MTU stays.
            assert_eq!(one.ports.make(other.netns.fd(), &spec).unwrap(), Made::Parts);
        }
        assert_eq!(one.bench.netns.index("eth1"), other.netns.index("eth1"));
        one.lend();
        let _ = other.out();
        for v6 in [false, true] {
            assert_eq!(one.try_some(v6), (10, 10));
        }
        assert_eq!(sorted(other.out()), []);
    });
}

#[test]
fn another_process_adopts_the_bypass_without_a_gap() {
    isolated(|| {
        let one = One::new(64);
        let bench = &one.bench;
        one.lend();
        assert_eq!(one.try_some(false), (10, 10));
        let shown = || bench.netns.run("ip -d link show eth0 | grep -o 'prog/xdp id [0-9]*'");
        let program = shown();
        let going = std::sync::atomic::AtomicBool::new(true);
        let (sent, received) = std::thread::scope(|scope| {
            // Frames all the time.
            let traffic = scope.spawn(|| {
                let (mut sent, mut received) = (0, 0);
                while going.load(std::sync::atomic::Ordering::Relaxed) {
                    sent += usize::from(send(&bench.sockets[0], &datagram(false)));
                    let frames = std::iter::from_fn(|| receive(&bench.sockets[1]));
                    received += frames.filter(|frame| !is_own_talk(frame)).count();
                }
                received += sorted(bench.out()).iter().filter(|(port, _)| *port == 1).count();
                (sent, received)
            });
            for _ in 0..20 {
                let next = one.place.open();
                for port in 0..PORTS {
                    let made = next.make(bench.netns.fd(), &bench.spec(port)).unwrap();
                    // The guest's MTU is not the port's.
                    assert_eq!(made, Made::Nothing);
                }
                bench.lend(&next);
            }
            going.store(false, std::sync::atomic::Ordering::Relaxed);
            traffic.join().unwrap()
        });
        println!("{sent} sent while the program was replaced 20 times");
        assert_eq!(sent, received, "lost while the program was replaced");
        assert_ne!(shown(), program, "it is another program");
        let expected = BypassCounters { bypassed: 10 + sent as u64, ..BypassCounters::default() };
        assert_eq!(one.bypass(), expected, "counters go on");
        bench.adds_up(&one.ports);
    });
}

#[test]
fn bypass_reports_used_neighbours() {
    isolated(|| {
        let one = One::new(64);
        one.lend();
        let before = ports::now().saturating_sub(Duration::from_millis(10));
        assert_eq!(one.ports.used(Duration::ZERO).unwrap(), []);
        one.try_some(false);
        one.try_some(true);
        let mut used = one.ports.used(before).unwrap();
        used.sort_by_key(|used| used.address);
        let index = one.bench.netns.index("eth1");
        let reported: Vec<_> = used
            .iter()
            .map(|UsedNeighbour { vrouter, address, index, .. }| {
                (*vrouter, address.to_string(), *index)
            })
            .collect();
        let want = ["10.1.0.2", "fd00:1::2"].map(|address| (16, address.to_string(), index));
        assert_eq!(reported, want);
        assert_eq!(one.ports.used(ports::now()).unwrap(), []);
        // All state disappears with the vrouter.
        let pinned = |name: &str| {
            libbpf_rs::MapHandle::from_pinned_path(one.place.pins.dir().join(name)).unwrap()
        };
        let inners = pinned("inners");
        let vrouter = || {
            let found = pinned("vrouters").lookup(&16_u32.to_ne_bytes(), MapFlags::ANY);
            found.unwrap().unwrap()
        };
        one.ports.power(16, Some(Power { millicores: 100 })).unwrap();
        let netns = std::fs::metadata(format!("/proc/{}/ns/net", one.bench.netns.pid())).unwrap();
        let netns = (netns.ino() as u32).to_ne_bytes();
        let keys = || inners.keys().filter(|key| key[..4] == netns).count();
        assert_eq!(keys(), PORTS);
        one.ports.remove(&[17, 18, 19]).unwrap();
        assert_eq!(keys(), 1);
        assert!(vrouter().iter().any(|byte| *byte != 0));
        // Or with the number that it had.
        let spec = PortSpec { vrouter: 40, ..one.bench.spec(0) };
        assert_eq!(one.ports.make(one.bench.netns.fd(), &spec).unwrap(), Made::Parts);
        assert_eq!(keys(), 1);
        assert!(vrouter().iter().all(|byte| *byte == 0));
        assert_eq!(one.ports.used(Duration::ZERO).unwrap(), []);
        let spec = one.bench.spec(0);
        assert_eq!(one.ports.make(one.bench.netns.fd(), &spec).unwrap(), Made::Parts);
        one.lend();
        one.ports.remove(&[16]).unwrap();
        assert_eq!(keys(), 0);
        assert!(vrouter().iter().all(|byte| *byte == 0));
        assert_eq!(one.ports.used(Duration::ZERO).unwrap(), []);
    });
}

#[test]
fn frames_received_by_xdp_are_bypassed_too() {
    isolated(|| {
        let one = One::new(96);
        let index = InterfaceInfo::by_name("p0").unwrap().index;
        let (source, destination) = ([10, 0, 0, 2], [10, 1, 0, 2]);
        one.live.send_to(&[To { index, mac: mac_of(0), source, destination, port: None }], 0);
        let try_some = || {
            one.live.call(32);
            sorted(one.bench.out())
        };
        let by_stack = try_some();
        assert_eq!(by_stack.len(), 32, "without a lease");
        assert!(by_stack.iter().all(|(port, frame)| *port == 1 && frame[22] == 63));
        one.lend();
        assert_eq!(try_some(), by_stack);
        assert_eq!(
            one.bypass(),
            BypassCounters { silent: 32, bypassed: 32, ..BypassCounters::default() }
        );
        one.bench.adds_up(&one.ports);
    });
}

/// Bypassed frames are subject to the links on which they would have gone otherwise.
#[test]
fn bypassed_frames_obey_their_links() {
    isolated(|| {
        let one = One::new(64);
        // Prevents the router from sending frames by itself.
        one.bench.netns.run("echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6");
        let far = one.bench.far_spec("p", 1);
        let (in_by, out_by) = (one.bench.number(0), one.bench.number(1));
        let here = File::open("/proc/thread-self/ns/net").unwrap();
        // Ten datagrams' effect on the counters of the egress port,
        // its link's other end, and the ingress port.
        let try_some = |one: &One, want: (usize, u64)| {
            let read = || {
                let of = |number| one.ports.counters(number).unwrap();
                (of(in_by), of(out_by), of(far.number))
            };
            let before = read();
            assert_eq!(one.try_some(false), want);
            one.bench.adds_up(&one.ports);
            let now = read();
            let to_vrouter = now.0.to_vrouter.frames - before.0.to_vrouter.frames;
            assert_eq!(to_vrouter, 10);
            (
                now.1.from_vrouter.frames - before.1.from_vrouter.frames,
                now.1.to_link.frames - before.1.to_link.frames,
                now.2.from_link.frames - before.2.from_link.frames,
                Reason::ALL.map(|reason| now.1.dropped(reason) - before.1.dropped(reason)),
            )
        };
        let none = [0; Reason::ALL.len()];
        let with = |reason: Reason, count: u64| {
            let mut all = none;
            all[reason as usize] = count;
            all
        };
        for lent in [false, true] {
            let short = if lent { 10 } else { 0 };
            one.ports
                .activate_bypass(16, if lent { LEASE_MAX } else { Duration::ZERO }, [NO_MTU; 2])
                .unwrap();
            assert_eq!(try_some(&one, (10, short)), (10, 10, 10, none));
            // No more than its rate: the burst has room for
            // three frames of 50 bytes and their overhead.
            let rate = PortRate { bps: 8, burst_bytes: 2048, overhead_bytes: 600, pps: 0 };
            one.ports.police(out_by, Some(rate)).unwrap();
            let policed = with(Reason::Policed, 7);
            assert_eq!(try_some(&one, (3, short)), (10, 3, 3, policed));
            one.ports.police(out_by, None).unwrap();
            // Without a link.
            one.ports.join(out_by, LinkTarget::None).unwrap();
            assert_eq!(try_some(&one, (0, short)), (10, 0, 0, with(Reason::Unconnected, 10)));
            one.ports.join(out_by, LinkTarget::Port(far.number)).unwrap();
            // The other end has a lower MTU than the frame's 36 bytes of IP.
            let tiny = PortSpec { mtu: 68, ..far.clone() };
            one.ports.make(here.as_fd(), &tiny).unwrap();
            assert_eq!(try_some(&one, (10, short)), (10, 10, 10, none));
            one.ports.make(here.as_fd(), &far).unwrap();
            // The other end is down, by PdP.
            one.ports.set_carrier(far.number, false).unwrap();
            assert_eq!(try_some(&one, (0, short)), (10, 0, 0, with(Reason::LinkDown, 10)));
            one.ports.set_carrier(far.number, true).unwrap();
            assert_eq!(try_some(&one, (10, short)), (10, 10, 10, none));
        }
        // Its own end without carrier: the kernel sends nothing, whatever its
        // routes say, and neither does the program.
        one.ports.set_carrier(out_by, false).unwrap();
        assert_eq!(try_some(&one, (0, 0)), (0, 0, 0, none));
        one.ports.set_carrier(out_by, true).unwrap();
        eventually("it has carrier", || {
            one.bench.netns.run("ip link show eth1").contains("LOWER_UP")
        });
        assert_eq!(try_some(&one, (10, 10)), (10, 10, 10, none));
        one.bench.netns.run("ip link set eth1 down");
        assert_eq!(try_some(&one, (0, 0)), (0, 0, 0, none));
        one.bench.netns.run("ip link set eth1 up");
        one.bench.equip_eth1();
        assert_eq!(try_some(&one, (10, 10)), (10, 10, 10, none));
        // Another name is nothing.
        one.bench.netns.run("ip link set eth1 name other");
        assert_eq!(try_some(&one, (10, 10)), (10, 10, 10, none));
        one.bench.netns.run("ip link set other name eth1");
    });
}

/// A guest that changes an egress end loses only its own traffic,
/// and gets it back when the port is made again.
#[test]
fn recreated_egress_port_regains_only_its_traffic() {
    isolated(|| {
        let mut one = One::new(64);
        one.lend();
        assert_eq!(one.try_some(false), (10, 10));
        let again = |one: &mut One| {
            let spec = one.bench.spec(1);
            assert_eq!(one.ports.make(one.bench.netns.fd(), &spec).unwrap(), Made::All);
            one.bench.netns.run("ip link set eth1 mtu 1500");
            one.bench.equip_eth1();
            assert_eq!(one.try_some(false), (10, 10));
        };
        let index = one.bench.netns.index("eth1");
        one.bench.netns.run("ip link del eth1");
        assert_eq!(one.try_some(false), (0, 0));
        again(&mut one);
        assert_ne!(one.bench.netns.index("eth1"), index);
        // A device with the earlier index is not mistaken for the port.
        let index = one.bench.netns.index("eth1");
        one.bench.netns.run("ip link del eth1");
        again(&mut one);
        one.bench.netns.run(&format!(
            "ip link add own0 index {index} type veth peer name own1
             ip link set own0 up; ip link set own1 up; ethtool -K own1 gro on
             ip route add 10.1.0.2/32 dev own0; ip neigh add 10.1.0.2 lladdr 02:00:00:00:00:09 dev own0"
        ));
        assert_eq!(one.try_some(false), (0, 0));
        one.bench.netns.run("ip link del own0");
        // Moved to another namespace, the end leads to the same
        // link, for its new owner. This router has none.
        let other = Netns::new();
        one.bench.netns.run(&format!("ip link set eth1 netns {}", other.pid()));
        assert_eq!(one.try_some(false), (0, 0));
        let spec = one.bench.spec(1);
        let changes = one.ports.changes(one.bench.netns.fd(), &spec).unwrap();
        assert_eq!(changes, [InnerEndChange::Gone]);
        again(&mut one);
        one.bench.adds_up(&one.ports);
    });
}

#[test]
fn bypass_drops_frames_charged_to_another_thread() {
    isolated(|| {
        let one = One::new(64);
        one.lend();
        let (netns, spec) = (&one.bench.netns, one.bench.spec(0));
        let serve = || -> Vec<u32> {
            let found = one.ports.serve(netns.fd(), &spec).unwrap();
            found.iter().map(|thread| thread.pid).collect()
        };
        let unpaid = || {
            let counters = one.ports.counters(spec.number).unwrap();
            assert_eq!(counters.dropped(Reason::Unpaid), counters.refused[Reason::Unpaid as usize]);
            counters.dropped(Reason::Unpaid)
        };
        // Threads get work only when they run.
        let try_some = || {
            let (before, before_unpaid) = (one.bypass(), unpaid());
            for _ in 0..10 {
                assert!(send(&one.bench.sockets[0], &datagram(false)));
            }
            eventually("all are counted", || {
                sum(&one.bypass()) - sum(&before) + unpaid() - before_unpaid == 10
            });
            let forwarded = sorted(one.bench.out()).len();
            one.bench.adds_up(&one.ports);
            (forwarded, one.bypass().bypassed - before.bypassed, unpaid() - before_unpaid)
        };
        set_threaded(netns.fd(), "eth0", true).unwrap();
        assert_eq!(try_some(), (10, 10, 0), "no thread is named");
        let first = serve();
        assert_eq!(first.len(), 1);
        assert_eq!(try_some(), (10, 10, 0));
        // Adopting changes nothing of it.
        drop(one.place.open());
        assert_eq!(try_some(), (10, 10, 0));
        assert_eq!(serve(), first);
        // As a guest can do.
        set_threaded(netns.fd(), "eth0", false).unwrap();
        assert_eq!(try_some(), (0, 0, 10), "without threads");
        set_threaded(netns.fd(), "eth0", true).unwrap();
        assert_eq!(try_some(), (0, 0, 10), "by a new thread");
        assert_eq!(serve().len(), 1);
        assert_eq!(try_some(), (10, 10, 0));
        set_threaded(netns.fd(), "eth0", false).unwrap();
        assert_eq!(serve().len(), 1, "they are turned on again");
        assert_eq!(try_some(), (10, 10, 0));
        netns.run("ip link set eth0 down; ip link set eth0 up");
        assert_eq!(try_some(), (0, 0, 10), "down and up");
        netns.run("ip link set eth0 down");
        assert_eq!(serve(), []);
        netns.run("ip link set eth0 up");
        assert_eq!(try_some(), (0, 0, 10), "down and up");
        assert_eq!(serve().len(), 1);
        assert_eq!(try_some(), (10, 10, 0));
        // Still only one queue.
        let more =
            || netns.run("ethtool -L eth0 rx 2 2>&1 || true; ethtool -L eth0 tx 2 2>&1 || true");
        more();
        assert_eq!(threads(netns.fd(), netns.index("eth0")).unwrap().len(), 1);
        let start = Instant::now();
        (0..100).for_each(|_| _ = serve());
        println!("served again in {:?}", start.elapsed() / 100);
        one.ports.serve_by_softirq(netns.fd(), &spec).unwrap();
        assert!(threads(netns.fd(), netns.index("eth0")).unwrap().is_empty());
        assert_eq!(try_some(), (10, 10, 0), "whoever does");
        // Named while it is down: nobody may serve it until its thread is known.
        netns.run("ip link set eth0 down");
        assert_eq!(serve(), []);
        netns.run("ip link set eth0 up");
        assert_eq!(try_some(), (0, 0, 10));
        // A missing port.
        let none = PortSpec { number: 99, ..spec.clone() };
        assert!(one.ports.serve(netns.fd(), &none).unwrap().is_empty());
        one.ports.serve_by_softirq(netns.fd(), &none).unwrap();
    });
}
