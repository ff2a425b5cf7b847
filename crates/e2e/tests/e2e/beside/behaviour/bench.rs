//! The two routers, and the simulated machines around them.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use pdp_e2e::{TestNode, eventually, sh};
use pdp_proto::channel::Channel;
use pdp_proto::mirror::{MirrorConfig, MirrorReply, MirrorRequest};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::case::{Case, case};
use super::frames::{ECHO, Host, ICMP, Link, Mac, V4, echo, mac_of};
use super::namespace::{Shell, link_addresses, make_settings_equal, make_tap, words_of};
use super::seen::{Frames, answer, compare, is_own_talk, plain, solicitation, words};

pub const PORTS: usize = 4;

/// Time after which a router counts as not answering.
const ANSWER_MAX: Duration = Duration::from_secs(10);

/// Time after which a port that answers no ping sends nothing more.
const QUIET: Duration = Duration::from_millis(40);

/// A failed case is repeated, with this much more time for late frames.
const TRIES: usize = 3;
const LATE: Duration = Duration::from_millis(300);

/// Sender of pings on each link: 10.PORT.255.250, a permanent neighbour of the router.
const PINGER: [u8; 2] = [255, 250];
const PINGER_ID: [u8; 2] = [0x12, 0x34];

const SPEC: &str = r#"
apiVersion: pdp/v1
kind: Substrate
metadata: {name: node}
spec:
  mux: {cpus: "0", power: 0.5}
  interfaces: {A: {device: ext0}, B: {device: ext1}, C: {device: ext2}, D: {device: ext3}}
  forwardingEngines:
    fe1: {cpus: "1", capacity: 1}
---
apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {name: red}
spec:
  nodes:
    r1:
      kind: router
      interfaces:
        eth0: {addresses: [10.0.0.1/16, "fd00::1/64"]}
        eth1: {addresses: [10.1.0.1/16, "fd00:1::1/64"]}
        eth2: {addresses: [10.2.0.1/16, "fd00:2::1/64"], mtu: 1400}
        eth3: {addresses: [10.3.0.1/16, "fd00:3::1/64"]}
      dataPlane:
        PLANE
        puntLimits: {neighbour: {pps: 20000}, exception: {pps: 20000}}
  externals:
    a: {interface: A}
    b: {interface: B}
    c: {interface: C}
    d: {interface: D}
  links:
    - endpoints: ["r1:eth0", "external:a"]
    - endpoints: ["r1:eth1", "external:b"]
    - endpoints: ["r1:eth2", "external:c"]
    - endpoints: ["r1:eth3", "external:d"]
"#;

const MTUS: [u32; PORTS] = [1500, 1500, 1400, 1500];

/// Setup of both: a default route by port 3, and no rate
/// limits of ICMP messages, which are not compared.
const BASE: &str = "
    ip route add default via 10.3.0.5 proto static
    ip -6 route add default via fd00:3::5 proto static
    echo 0 >/proc/sys/net/ipv4/icmp_ratelimit
    echo 0 >/proc/sys/net/ipv6/icmp/ratelimit
    echo 1000000 >/proc/sys/net/ipv4/icmp_msgs_per_sec || true
    echo 1000000 >/proc/sys/net/ipv4/icmp_msgs_burst || true
";

/// Beginning of every case: no neighbour is known.
const COLD: &str = "ip neigh flush all; ip -6 neigh flush all\n";

/// End of a case with a setup.
const RESET: &str = "
    ip nexthop flush >/dev/null; ip route flush proto boot; ip -6 route flush proto boot
";

/// Router with its four links, whose other ends are here.
struct BenchSide {
    name: &'static str,
    shell: Shell,
    links: [File; PORTS],
    /// Frames received since the last look.
    seen: Vec<(usize, Vec<u8>)>,
    /// Ports whose last ping was answered.
    answered: [bool; PORTS],
    /// True if it sent a neighbour request since the last pings.
    asked: bool,
}

pub struct Bench {
    sides: [BenchSide; 2],
    mirror: Channel,
    macs: [Mac; PORTS],
    pings: u16,
    hosts: u32,
    netns: String,
    /// Kept alive until the end.
    _node: TestNode,
}

impl Drop for Bench {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["netns", "del", &self.netns]).status();
    }
}

impl Bench {
    /// Makes PdP's router on a node, with further keys of its data plane, and a namespace that
    /// equals its control guest.
    pub fn new(label: &str, plane: &str) -> Self {
        let mut node = TestNode::prepare(label);
        let space = PathBuf::from(format!("/run/netns/{}", node.netns));
        let outside = (0..PORTS).map(|port| {
            let mac = [2, 0xee, 0, 0, 0, port as u8];
            make_tap(&space, &format!("ext{port}"), mac, 1500)
        });
        let outside: Vec<File> = outside.collect();
        node.namespace().run("sysctl -qw net.ipv6.conf.all.disable_ipv6=1");
        node.start_pdpd();
        node.apply(&SPEC.replace("PLANE", plane));
        let config =
            fs::read(node.socket_directory("red/r1").join("mirror.json")).expect("the mirror's");
        let config: MirrorConfig =
            serde_json::from_slice(&config).expect("the mirror's configuration");
        let guest = config.netns;
        let mut shell = Shell::new(&guest);
        let macs = link_addresses(&shell.run("ip -o link show"));

        let netns = format!("{}-k", node.id);
        sh(&format!("ip netns add {netns}"));
        let kernel = PathBuf::from(format!("/run/netns/{netns}"));
        let links =
            (0..PORTS).map(|port| make_tap(&kernel, &format!("eth{port}"), macs[port], MTUS[port]));
        let links: Vec<File> = links.collect();
        let mut plain = Shell::new(&kernel);
        plain.run("ip link set lo up");
        make_settings_equal(&guest, &kernel);
        for port in 0..PORTS {
            let short = if port == 0 { String::new() } else { port.to_string() };
            let v6 = if port == 0 { "fd00::1".into() } else { format!("fd00:{short}::1") };
            plain.run(&format!(
                "ip addr add 10.{port}.0.1/16 dev eth{port}
                 ip addr add {v6}/64 dev eth{port} nodad"
            ));
        }
        let mut pingers = String::new();
        for port in 0..PORTS {
            let [a, b] = PINGER;
            let mac = words_of(&mac_of(port, &[10, port as u8, a, b]));
            let _ = writeln!(pingers, "ip neigh add 10.{port}.{a}.{b} lladdr {mac} dev eth{port}");
        }
        let mut sides = [("PdP", shell, outside), ("kernel", plain, links)].map(|it| {
            let (name, shell, links) = it;
            let links = links.try_into().expect("four");
            let (seen, answered) = (Vec::new(), [false; PORTS]);
            BenchSide { name, shell, links, seen, answered, asked: false }
        });
        for side in &mut sides {
            side.shell.run(BASE);
            side.shell.run(&pingers);
        }
        let mirror = Channel::connect(&config.control_socket).expect("the mirror");
        let mut bench = Self { sides, mirror, macs, pings: 0, hosts: 0, netns, _node: node };
        eventually("both routers answer", || {
            bench.settle();
            bench.ping(&[0, 1, 2, 3], Duration::from_millis(200))
        });
        bench
    }

    /// True if this kernel has the features that a case needs.
    pub fn can_judge(&mut self, case: &Case) -> bool {
        case.needs.is_none_or(|line| {
            let [_, kernel] = &mut self.sides;
            kernel.shell.begin(line);
            kernel.shell.end().is_ok()
        })
    }

    /// Runs a case; returns any deviation from the expectation.
    pub fn judge(&mut self, case: &Case) -> Option<String> {
        let mut wrong = None;
        for attempt in 0..TRIES {
            let late = LATE * (attempt * attempt) as u32;
            let host = self.host();
            wrong = match self.run(case, &host, late) {
                Ok(seen) => {
                    if std::env::var_os("PDP_CASES").is_some() {
                        let [pdp, kernel] = &seen[1];
                        println!("{}: kernel {}; PdP {}", case.name, words(kernel), words(pdp));
                    }
                    compare(case, &seen)
                }
                Err(error) => Some(error),
            };
            match &wrong {
                None => break,
                Some(text) => println!("{}, not as expected:\n{text}", case.name),
            }
        }
        wrong
    }

    /// Returns a machine that is unknown so far.
    fn host(&mut self) -> Host {
        // Not 102, which is silent.
        let (high, low) = (1 + self.hosts / 100, 1 + self.hosts % 100);
        self.hosts += 1;
        Host {
            v4: Ipv4Addr::new(10, 0, high as u8, low as u8),
            v6: Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, high as u16, low as u16),
            router: self.macs,
        }
    }

    /// Output of PdP's router and the kernel, cold and warm.
    fn run(
        &mut self,
        case: &Case,
        host: &Host,
        late: Duration,
    ) -> Result<[[Frames; 2]; 2], String> {
        let setup = format!("{COLD}{}", case.setup);
        let done = self.both(&setup).and_then(|()| {
            std::thread::sleep(case.wait);
            let cold = self.exchange(case, host, late)?;
            self.exchange(&warm_up().dead(&case.dead), host, Duration::ZERO)?;
            Ok([cold, self.exchange(case, host, late)?])
        });
        if !case.setup.is_empty() {
            self.both(&format!("{}{RESET}", case.undo))?;
            self.settle();
        }
        done
    }

    /// Runs shell lines in both routers.
    fn both(&mut self, lines: &str) -> Result<(), String> {
        let lines = &lines.replace("MAC0", &words_of(&self.macs[0]));
        for side in &mut self.sides {
            side.shell.begin(lines);
        }
        let ends = self.sides.each_mut().map(|side| (side.name, side.shell.end()));
        for (name, end) in ends {
            end.map_err(|error| format!("{name}: {lines}: {error}"))?;
        }
        Ok(())
    }

    /// Waits until the guests have the kernel's state.
    fn settle(&mut self) {
        let end = Instant::now() + ANSWER_MAX;
        // The answer to a request may be older than it; the answer to the next is not.
        let mut before = false;
        loop {
            self.mirror.send(&MirrorRequest::Status, &[]).expect("the mirror");
            let reply = self.mirror.receive().expect("the mirror").expect("an answer").0;
            let MirrorReply::Status(status) = reply else { panic!("{reply:?}") };
            if status.settled && before {
                return;
            }
            before = true;
            assert!(Instant::now() < end, "the mirror does not settle: {status:?}");
            if !status.settled {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }

    /// Sends the frames of a case, and returns the output.
    fn exchange(
        &mut self,
        case: &Case,
        host: &Host,
        late: Duration,
    ) -> Result<[Frames; 2], String> {
        self.sides.iter_mut().for_each(|side| side.seen.clear());
        let live: Vec<usize> = (0..PORTS).filter(|port| !case.dead.contains(port)).collect();
        for step in &case.frames {
            self.settle();
            for side in &mut self.sides {
                for make in step {
                    let (port, frame) = make(host);
                    // A link that is down accepts nothing.
                    let _ = side.links[port].write(&frame);
                }
            }
            // After the first answers, all frames sent before the pings have passed by any path.
            // After the second, all output has arrived. A neighbour request starts this over.
            let mut rounds = 0;
            while rounds < 2 {
                if !self.ping(&live, ANSWER_MAX) {
                    return Err("a port does not answer".into());
                }
                let asked = self.sides.iter_mut().any(|side| std::mem::take(&mut side.asked));
                rounds = if asked { 0 } else { rounds + 1 };
            }
        }
        let late = late + case.after;
        if !case.dead.is_empty() || !late.is_zero() {
            let end = Instant::now() + QUIET.max(late);
            while Instant::now() < end {
                self.receive(end);
            }
        }
        let macs = self.macs;
        Ok(self.sides.each_mut().map(|side| {
            let seen = std::mem::take(&mut side.seen);
            let mut asks = BTreeSet::new();
            let mut seen: Frames = seen
                .into_iter()
                .filter(|(port, frame)| match solicitation(frame) {
                    Some(_) => case.asks && asks.insert((*port, frame.clone())),
                    None => !is_own_talk(frame),
                })
                .map(|(port, frame)| (port, plain(frame, &macs)))
                .collect();
            seen.sort();
            seen
        }))
    }

    /// Pings both routers on these ports. True if all answered in time.
    fn ping(&mut self, ports: &[usize], within: Duration) -> bool {
        self.pings = self.pings.wrapping_add(1);
        for side in &mut self.sides {
            side.answered = std::array::from_fn(|port| !ports.contains(&port));
            for &port in ports {
                let from = Ipv4Addr::from([10, port as u8, PINGER[0], PINGER[1]]);
                let host = Host { v4: from, v6: Ipv6Addr::UNSPECIFIED, router: self.macs };
                let mut packet = V4::new(&host);
                packet.link = Link { port, to: self.macs[port], ..packet.link };
                packet.destination = Ipv4Addr::from([10, port as u8, 0, 1]);
                packet.segment(ICMP, echo(ECHO, self.pings, 0));
                let _ = side.links[port].write(&packet.frame().1);
            }
        }
        let end = Instant::now() + within;
        while self.sides.iter().any(|side| side.answered.contains(&false)) {
            if Instant::now() >= end {
                return false;
            }
            self.receive(end);
        }
        true
    }

    /// Receives the routers' frames, and answers as the machines around them.
    fn receive(&mut self, until: Instant) {
        let left = until.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left).expect("seconds");
        let mut polled: Vec<PollFd<'_>> = self
            .sides
            .iter()
            .flat_map(|side| &side.links)
            .map(|link| PollFd::new(link, PollFlags::IN))
            .collect();
        poll(&mut polled, Some(&left)).expect("poll");
        let mut buffer = [0; 4096];
        for side in &mut self.sides {
            for port in 0..PORTS {
                while let Ok(count) = side.links[port].read(&mut buffer) {
                    side.take(port, &buffer[..count], self.pings);
                }
            }
        }
    }
}

impl BenchSide {
    fn take(&mut self, port: usize, frame: &[u8], ping: u16) {
        let pinger = mac_of(port, &[10, port as u8, PINGER[0], PINGER[1]]);
        if frame[..6] == pinger {
            let is_answer = frame.get(34) == Some(&0) && frame.get(38..40) == Some(&PINGER_ID);
            self.answered[port] |= is_answer && frame.get(40..42) == Some(&ping.to_be_bytes());
            return;
        }
        if let Some(target) = solicitation(frame) {
            let is_silent = match target {
                IpAddr::V4(v4) => v4.octets()[3] == SILENT,
                IpAddr::V6(v6) => v6.octets()[15] == SILENT,
            };
            if !is_silent && let Some(answer) = answer(port, frame, target) {
                self.asked = true;
                let _ = self.links[port].write(&answer);
            }
        }
        self.seen.push((port, frame.to_vec()));
    }
}

/// Last byte of the addresses of machines that never answer.
pub const SILENT: u8 = 0x66;

/// Packets to the machines that most cases use, so that these become known.
fn warm_up() -> Case {
    let mut case = case("neighbours get known");
    for to in ["10.1.0.9", "10.2.0.9", "192.0.2.1", "10.0.7.7", "10.1.0.7", "10.3.0.7"] {
        case = case.v4(|p, _| p.to(to).done());
    }
    for to in ["fd00:1::9", "fd00:2::9", "3fff::1", "fd00::777", "fd00:1::7", "fd00:3::7"] {
        case = case.v6(|p, _| p.to(to).done());
    }
    case
}
