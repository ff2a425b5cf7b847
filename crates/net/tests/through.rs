//! The short way through a vrouter does what the namespace would do: two namespaces that are set up alike, one
//! with the program and one without, get the same frames, and what comes out of all ports is
//! compared byte by byte. Needs root.
//!
//! `PDP_THROUGH_CASES=N` makes so many random routers instead of [`CASES`], `PDP_THROUGH_SEED=S` others;
//! what fails names its own. `PDP_THROUGH_VERBOSE=1` tells of each, and what ip(8) refused.

mod live;
mod through_cases;

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use live::{Live, Netns, Pins, To, eventually, isolated, receive, run, send};
use pdp_net::ethtool;
use pdp_net::interface::Interface;
use pdp_net::napi::{set_threaded, threads};
use pdp_net::netns::within;
use pdp_net::through::{self, Aside, Counters, LEASE_MAX, NO_MTU, Port, Through};
use pdp_wire::checksum::checksum;
use through_cases::{INTERFACE_SETTINGS, PORTS, RESET, Random, Router, SETTINGS, base, mac_of};

/// Random routers of a normal run, and frames that each gets.
const CASES: u64 = 50;
const FRAMES: usize = 200;

/// What comes out comes within this time of what came before.
const QUIET: Duration = Duration::from_millis(3);

/// Or, where it matters, in this.
const LATE: Duration = Duration::from_millis(300);

/// A router in a namespace, and sockets at the other ends of its ports.
struct Bench {
    netns: Netns,
    sockets: Vec<OwnedFd>,
}

impl Bench {
    fn new(live: &mut Live, name: &str) -> Self {
        let netns = Netns::new();
        netns.run(SETTINGS);
        let mut sockets = Vec::new();
        for port in 0..PORTS {
            let root = format!("{name}{port}");
            run(&format!(
                "ip link add {root} mtu 2000 type veth peer name eth{port} address 02:aa:00:00:00:{port:02x} netns {}
                 echo 1 > /proc/sys/net/ipv6/conf/{root}/disable_ipv6; ip link set {root} arp off up",
                netns.pid()
            ));
            let index = Interface::by_name(&root).unwrap().index;
            live.attach("pass", index);
            ethtool::offloads_off(&root).unwrap();
            sockets.push(live.socket(&root, index));
        }
        netns.ip(&base());
        netns.run(INTERFACE_SETTINGS);
        let off = || (0..PORTS).try_for_each(|port| ethtool::offloads_off(&format!("eth{port}")));
        within(netns.fd(), off).unwrap();
        Self { netns, sockets }
    }

    /// What comes out, by port.
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

    fn indices(&self) -> Vec<u32> {
        (0..PORTS).map(|port| self.netns.index(&format!("eth{port}"))).collect()
    }
}

/// The program at the ports of a router.
struct Attached {
    through: Through,
    pins: PathBuf,
    links: Vec<PathBuf>,
}

impl Attached {
    fn new(bench: &Bench, pins: &Pins) -> Self {
        let links: Vec<_> = (0..PORTS).map(|port| pins.path(&format!("ports/{port}/in"))).collect();
        let pins = pins.path("vrouter");
        let this = Self { through: Self::attach(bench, &pins, &links), pins, links };
        for port in 0..PORTS {
            this.through.tell(port, mac_of(port), Aside::default()).unwrap();
        }
        this
    }

    fn attach(bench: &Bench, pins: &std::path::Path, links: &[PathBuf]) -> Through {
        let ports: Vec<_> = bench
            .indices()
            .into_iter()
            .zip(links)
            .map(|(index, pin)| Port { index, pin })
            .collect();
        Through::attach(pins, bench.netns.fd(), &ports).unwrap()
    }

    fn lend(&self) {
        self.through.lend(LEASE_MAX, [NO_MTU; 2]).unwrap();
    }

    /// Of all ports.
    fn counters(&self) -> Counters {
        (0..PORTS).fold(Counters::default(), |sum, port| {
            let one = self.through.counters(port).unwrap();
            Counters {
                short: sum.short + one.short,
                silent: sum.silent + one.silent,
                hooked: sum.hooked + one.hooked,
                special: sum.special + one.special,
                route: sum.route + one.route,
                neighbour: sum.neighbour + one.neighbour,
                too_big: sum.too_big + one.too_big,
                source: sum.source + one.source,
                unpaid: sum.unpaid + one.unpaid,
            }
        })
    }
}

/// Two routers that are set up alike, one with the program.
struct Benches {
    with: Bench,
    without: Bench,
    attached: Attached,
    _pins: Pins,
    _live: Live,
}

impl Benches {
    /// With a number that no others have at the time.
    fn new(number: u64) -> Self {
        let mut live = Live::new(64);
        let pins = Pins::new();
        let with = Bench::new(&mut live, &format!("p{number}x"));
        let without = Bench::new(&mut live, &format!("r{number}x"));
        let attached = Attached::new(&with, &pins);
        Self { with, without, attached, _pins: pins, _live: live }
    }
}

fn sum(counters: &Counters) -> u64 {
    let Counters { short, silent, hooked, special, route, neighbour, too_big, source, unpaid } =
        counters;
    short + silent + hooked + special + route + neighbour + too_big + source + unpaid
}

/// What a router says by itself, or at times of its own: questions for neighbours, groups, fragments that never
/// came; and what is limited by time, for all of the machine: redirects of IPv6, that there is no route of IPv4.
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

/// Whether a packet of IPv4 is from an address of the router.
fn is_own(frame: &[u8]) -> bool {
    frame.get(26..30).is_some_and(|from| from[0] == 10 && from[2..] == [0, 1])
}

/// Without the identification that a router chooses for packets of its own.
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

/// Frames that one has more of than the other, in words.
fn difference(one: &[(usize, Vec<u8>)], other: &[(usize, Vec<u8>)], who: &str) -> String {
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
                &format!("  {who}: eth{} {} bytes {}\n", frame.0, frame.1.len(), hex(&frame.1));
        }
    }
    words
}

fn number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(otherwise)
}

#[test]
fn whatever_the_router_and_the_frames_the_same_comes_out() {
    isolated(|| {
        let (seed, cases) = (number("PDP_THROUGH_SEED", 1), number("PDP_THROUGH_CASES", CASES));
        let (started, mut sent, mut out, mut short) = (Instant::now(), 0, 0, 0);
        let mut benches: Option<Benches> = None;
        for case in seed..seed + cases {
            let mut random = Random(case.wrapping_mul(0x1234_5678_9abc_def1), false);
            let router = Router::new(&mut random);
            let Benches { with, without, attached, .. } =
                benches.get_or_insert_with(|| Benches::new(case));
            let both = [&*with, &*without];
            for bench in both {
                bench.netns.ip(&router.ip);
                if !router.shell.is_empty() {
                    // What this kernel lacks is lacking in both.
                    bench.netns.run(&format!("set +e\n{}\ntrue", router.shell));
                }
            }
            attached.through.lend(LEASE_MAX, router.bytes_max).unwrap();
            // What a changed router says of itself.
            let _ = both.map(Bench::out);
            let before = attached.counters();
            let frames: Vec<_> = (0..FRAMES).map(|_| router.frame(&mut random)).collect();
            let mut seen = both.map(|bench| {
                let mut seen = Vec::new();
                // No more at once than a socket has room for.
                for some in frames.chunks(50) {
                    for (port, frame) in some {
                        send(&bench.sockets[*port], frame);
                    }
                    seen.extend(bench.out());
                }
                sorted(seen)
            });
            if seen[0] != seen[1] {
                // Whoever was not run for a while comes late.
                std::thread::sleep(LATE);
                for (seen, bench) in seen.iter_mut().zip(both) {
                    seen.extend(sorted(bench.out()));
                    seen.sort();
                }
            }
            let now = attached.counters();
            short += now.short - before.short;
            sent += frames.len();
            out += seen[1].len();
            if std::env::var("PDP_THROUGH_VERBOSE").is_ok() {
                println!(
                    "{case}: {} out, {} short, {:?}",
                    seen[1].len(),
                    now.short - before.short,
                    now
                );
            }
            if seen[0] != seen[1] {
                let words = difference(&seen[0], &seen[1], "short way alone")
                    + &difference(&seen[1], &seen[0], "kernel alone");
                panic!(
                    "PDP_THROUGH_SEED={case} PDP_THROUGH_CASES=1:\n{words}\n{}\n{}",
                    router.ip, router.shell
                );
            }
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
        assert!(short * 10 > out as u64, "{short} of {out} frames went the short way");
    });
}

/// A plain datagram to a neighbour of eth1, and what becomes of it.
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

/// How many of so many datagrams come out, and how many by the short way.
fn try_some(bench: &Bench, attached: &Attached, v6: bool) -> (usize, u64) {
    let before = attached.counters();
    for _ in 0..10 {
        assert!(send(&bench.sockets[0], &datagram(v6)));
    }
    let out = sorted(bench.out());
    let now = attached.counters();
    assert_eq!(sum(&now) - sum(&before), 10, "each is counted once");
    (out.iter().filter(|(port, _)| *port == 1).count(), now.short - before.short)
}

#[test]
fn nothing_goes_the_short_way_unless_somebody_watches() {
    isolated(|| {
        let mut live = Live::new(64);
        let pins = Pins::new();
        let bench = Bench::new(&mut live, "p");
        let attached = Attached::new(&bench, &pins);
        for v6 in [false, true] {
            assert_eq!(try_some(&bench, &attached, v6), (10, 0), "nobody has lent it yet");
        }
        assert_eq!(attached.counters().silent, 20);
        attached.lend();
        for v6 in [false, true] {
            assert_eq!(try_some(&bench, &attached, v6), (10, 10));
        }
        // The watcher dies.
        attached.through.lend(Duration::from_millis(100), [NO_MTU; 2]).unwrap();
        assert_eq!(try_some(&bench, &attached, false), (10, 10));
        std::thread::sleep(Duration::from_millis(120));
        assert_eq!(try_some(&bench, &attached, false), (10, 0), "the lease has ended");
        // It is taken back.
        attached.lend();
        attached.through.lend(Duration::ZERO, [NO_MTU; 2]).unwrap();
        assert_eq!(try_some(&bench, &attached, true), (10, 0));
        // What may be above a route's MTU.
        attached.through.lend(LEASE_MAX, [35, 55]).unwrap();
        assert_eq!(
            (try_some(&bench, &attached, false), try_some(&bench, &attached, true)),
            ((10, 0), (10, 0))
        );
        attached.through.lend(LEASE_MAX, [36, 56]).unwrap();
        assert_eq!(
            (try_some(&bench, &attached, false), try_some(&bench, &attached, true)),
            ((10, 10), (10, 10))
        );
        assert_eq!(attached.counters().too_big, 20);
        // What the watcher tells of, by port, direction and family.
        for (port, aside, v4, v6) in [
            (0, Aside { in_v4: true, ..Aside::default() }, 0, 10),
            (0, Aside { in_v6: true, ..Aside::default() }, 10, 0),
            (1, Aside { in_v4: true, in_v6: true, ..Aside::default() }, 10, 10),
            (1, Aside { out_v4: true, ..Aside::default() }, 0, 10),
            (1, Aside { out_v6: true, ..Aside::default() }, 10, 0),
            (0, Aside { out_v4: true, out_v6: true, ..Aside::default() }, 10, 10),
            (0, Aside::ALL, 0, 0),
        ] {
            attached.through.tell(port, mac_of(port), aside).unwrap();
            assert_eq!(try_some(&bench, &attached, false), (10, v4), "{port} {aside:?}");
            assert_eq!(try_some(&bench, &attached, true), (10, v6), "{port} {aside:?}");
            attached.through.tell(port, mac_of(port), Aside::default()).unwrap();
        }
        assert!(attached.through.tell(through::PORTS_MAX, [0; 6], Aside::ALL).is_err());
        assert!(attached.through.counters(through::PORTS_MAX).is_err());
    });
}

#[test]
fn a_hook_is_obeyed_from_the_command_on_that_sets_it() {
    isolated(|| {
        let mut live = Live::new(64);
        let pins = Pins::new();
        let bench = Bench::new(&mut live, "p");
        let attached = Attached::new(&bench, &pins);
        attached.lend();
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
            // Last: the kernel keeps a hook of the first bridge for as long as the namespace is there.
            (
                "ip link add br0 type bridge; ip link set br0 up; ip link set eth0 master br0"
                    .into(),
                "ip link del br0",
                10,
                10,
            ),
        ] {
            for _ in 0..if set.contains("bridge") { 1 } else { 5 } {
                assert_eq!(try_some(&bench, &attached, false), (10, 10), "before {set}");
                assert_eq!(try_some(&bench, &attached, true), (10, 10), "before {set}");
                bench.netns.run(&set);
                // The very next frames.
                let now = [false, true].map(|v6| try_some(&bench, &attached, v6));
                assert_eq!(now.map(|(out, _)| out), [v4, v6], "{set}");
                // What nothing hooks into goes on as it did.
                let is_own = |table: &str| set.starts_with(&format!("nft add table {table} t;"));
                let short = [is_own("ip6"), is_own("ip")].map(|other| if other { 10 } else { 0 });
                assert_eq!(now.map(|(_, short)| short), short, "{set}");
                bench.netns.run(unset);
            }
        }
    });
}

#[test]
fn frames_are_sent_to_ports_of_the_vrouter_alone() {
    isolated(|| {
        let mut live = Live::new(64);
        let pins = Pins::new();
        let bench = Bench::new(&mut live, "p");
        let attached = Attached::new(&bench, &pins);
        attached.lend();
        // A device of the guest's own, which could be sent to.
        bench.netns.run(
            "ip link add own0 type veth peer name own1; ip link set own0 up; ip link set own1 up
             ethtool -K own1 gro on
             ip route add 10.1.0.2/32 dev own0; ip neigh add 10.1.0.2 lladdr 02:00:00:00:00:09 dev own0",
        );
        assert_eq!(try_some(&bench, &attached, false), (0, 0));
        assert!(attached.counters().route >= 10);
        bench.netns.run("ip link del own0");
        assert_eq!(try_some(&bench, &attached, false), (10, 10));
        // A device that takes the index of a port which the guest deleted is none.
        let index = bench.netns.index("eth1");
        bench.netns.run(&format!(
            "ip link del eth1; ip link add own0 index {index} type veth peer name own1
             ip link set own0 up; ip link set own1 up; ip addr add 10.1.0.1/16 dev own0; ethtool -K own1 gro on
             ip neigh add 10.1.0.2 lladdr 02:00:00:00:00:09 dev own0"
        ));
        assert_eq!(bench.netns.index("own0"), index);
        let before = attached.counters();
        for _ in 0..10 {
            assert!(send(&bench.sockets[0], &datagram(false)));
        }
        bench.sockets.iter().for_each(|socket| while receive(socket).is_some() {});
        eventually("all are counted", || sum(&attached.counters()) - sum(&before) == 10);
        assert_eq!(attached.counters().route - before.route, 10);
    });
}

#[test]
fn another_process_adopts_what_is_there_without_a_gap() {
    isolated(|| {
        let mut live = Live::new(64);
        let pins = Pins::new();
        let bench = Bench::new(&mut live, "p");
        let first = Attached::new(&bench, &pins);
        first.lend();
        assert_eq!(try_some(&bench, &first, false), (10, 10));
        let shown = || bench.netns.run("ip -d link show eth0 | grep -o 'prog/xdp id [0-9]*'");
        let program = shown();
        let (path, links) = (first.pins.clone(), first.links.clone());
        drop(first);
        let going = std::sync::atomic::AtomicBool::new(true);
        let (sent, came) = std::thread::scope(|scope| {
            // Frames all the time.
            let traffic = scope.spawn(|| {
                let (mut sent, mut came) = (0, 0);
                while going.load(std::sync::atomic::Ordering::Relaxed) {
                    sent += usize::from(send(&bench.sockets[0], &datagram(false)));
                    came += std::iter::from_fn(|| receive(&bench.sockets[1])).count();
                }
                came += bench.out().iter().filter(|(port, _)| *port == 1).count();
                (sent, came)
            });
            for _ in 0..20 {
                let _ = Attached::attach(&bench, &path, &links);
            }
            going.store(false, std::sync::atomic::Ordering::Relaxed);
            traffic.join().unwrap()
        });
        println!("{sent} sent while the program was replaced 20 times");
        assert_eq!(sent, came, "lost while the program was replaced");
        assert_ne!(shown(), program, "it is another program");
        let second = Attached { through: Through::open(&path).unwrap(), pins: path, links };
        let expected = Counters { short: 10 + sent as u64, ..Counters::default() };
        assert_eq!(second.counters(), expected, "counters go on");

        // A port is made anew: its link is as well.
        bench.netns.run("ip link del eth3");
        run(&format!(
            "ip link add p3 type veth peer name eth3 netns {}; ip link set p3 up",
            bench.netns.pid()
        ));
        let again = Attached::attach(&bench, &second.pins, &second.links);
        assert!(bench.netns.run("ip -d link show eth3").contains("prog/xdp"));
        drop(again);

        // More than there is room for: links stay, counters begin again.
        let before = second.counters().short;
        let more: Vec<_> = (0..5).map(|port| pins.path(&format!("ports/more{port}/in"))).collect();
        for port in 0..5 {
            run(&format!(
                "ip link add more{port} type veth peer name far{port} netns {}",
                bench.netns.pid()
            ));
        }
        let far = (0..5).map(|port| bench.netns.index(&format!("far{port}")));
        let indices: Vec<u32> = bench.indices().into_iter().chain(far).collect();
        let pinned = second.links.iter().chain(&more);
        let ports: Vec<_> =
            indices.iter().zip(pinned).map(|(index, pin)| Port { index: *index, pin }).collect();
        let shown_before = shown();
        let grown = Through::attach(&second.pins, bench.netns.fd(), &ports).unwrap();
        assert!(before > 0 && grown.counters(0).unwrap().short == 0);
        assert_ne!(shown(), shown_before);
        assert!(
            grown.tell(8, [0; 6], Aside::ALL).is_ok()
                && grown.tell(16, [0; 6], Aside::ALL).is_err()
        );
        // Fewer: all stays.
        let fewer = Through::attach(&second.pins, bench.netns.fd(), &ports[..4]).unwrap();
        assert!(fewer.tell(8, [0; 6], Aside::ALL).is_ok());
        more.iter().for_each(|link| through::detach(link).unwrap());

        for link in &second.links {
            through::detach(link).unwrap();
            through::detach(link).unwrap();
        }
        assert!(!bench.netns.run("ip -d link").contains("prog/xdp"));
        through::remove(&second.pins).unwrap();
        through::remove(&second.pins).unwrap();
        assert!(!second.pins.exists());
    });
}

#[test]
fn neighbours_that_are_used_are_told() {
    isolated(|| {
        let mut live = Live::new(64);
        let pins = Pins::new();
        let bench = Bench::new(&mut live, "p");
        let attached = Attached::new(&bench, &pins);
        attached.lend();
        let before = through::now().saturating_sub(Duration::from_millis(10));
        assert_eq!(attached.through.used(Duration::ZERO).unwrap(), []);
        try_some(&bench, &attached, false);
        try_some(&bench, &attached, true);
        let mut used = attached.through.used(before).unwrap();
        used.sort_by_key(|used| used.address);
        let told: Vec<_> = used.iter().map(|used| (used.address.to_string(), used.index)).collect();
        let index = bench.netns.index("eth1");
        assert_eq!(told, [("10.1.0.2".to_string(), index), ("fd00:1::2".to_string(), index)]);
        assert_eq!(attached.through.used(through::now()).unwrap(), []);
    });
}

#[test]
fn frames_that_come_by_xdp_go_the_same_way() {
    isolated(|| {
        let mut live = Live::new(96);
        let pins = Pins::new();
        let bench = Bench::new(&mut live, "p");
        let attached = Attached::new(&bench, &pins);
        let index = Interface::by_name("p0").unwrap().index;
        let (source, destination) = ([10, 0, 0, 2], [10, 1, 0, 2]);
        live.send_to(&[To { index, mac: mac_of(0), source, destination }], 0);
        let try_some = || {
            live.call(32);
            sorted(bench.out())
        };
        let by_stack = try_some();
        assert_eq!(by_stack.len(), 32, "without a lease");
        assert!(by_stack.iter().all(|(port, frame)| *port == 1 && frame[22] == 63));
        attached.lend();
        assert_eq!(try_some(), by_stack);
        assert_eq!(attached.counters(), Counters { silent: 32, short: 32, ..Counters::default() });
    });
}

#[test]
fn what_another_thread_would_pay_for_is_dropped() {
    isolated(|| {
        let mut live = Live::new(64);
        let pins = Pins::new();
        let bench = Bench::new(&mut live, "p");
        let attached = Attached::new(&bench, &pins);
        attached.lend();
        let index = bench.netns.index("eth0");
        let through = &attached.through;
        let name = || {
            let found = threads(bench.netns.fd(), index).unwrap();
            assert_eq!(found.len(), 1);
            through.set_thread(index, Some(found[0].pid)).unwrap();
        };
        // Threads come to work when they are run.
        let try_some = || {
            let before = attached.counters();
            for _ in 0..10 {
                assert!(send(&bench.sockets[0], &datagram(false)));
            }
            eventually("all are counted", || sum(&attached.counters()) - sum(&before) == 10);
            let came = sorted(bench.out()).len();
            let now = attached.counters();
            (came, now.short - before.short, now.unpaid - before.unpaid)
        };
        set_threaded(bench.netns.fd(), "eth0", true).unwrap();
        assert_eq!(try_some(), (10, 10, 0), "no thread is named");
        name();
        assert_eq!(try_some(), (10, 10, 0));
        // Adopting changes nothing of it.
        drop(Attached::attach(&bench, &attached.pins, &attached.links));
        assert_eq!(try_some(), (10, 10, 0));
        // As a guest can.
        set_threaded(bench.netns.fd(), "eth0", false).unwrap();
        assert_eq!(try_some(), (0, 0, 10), "without threads");
        set_threaded(bench.netns.fd(), "eth0", true).unwrap();
        assert_eq!(try_some(), (0, 0, 10), "by a new thread");
        name();
        assert_eq!(try_some(), (10, 10, 0));
        bench.netns.run("ip link set eth0 down; ip link set eth0 up");
        assert_eq!(try_some(), (0, 0, 10), "down and up");
        through.set_thread(index, None).unwrap();
        assert_eq!(try_some(), (10, 10, 0), "whoever does");
        assert!(through.set_thread(u32::MAX, None).is_err());
    });
}
