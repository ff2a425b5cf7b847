//! Events on some routes do not affect packets on others: lost notifications, a link that goes down
//! and up, a killed routing daemon.
//!
//! Two numbered streams cross the two forwarding guests of one router, frames in turn, while these
//! events happen one after the other. Unchanged routes must lose nothing, and after each event both
//! guests must have the kernel's routes.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::File;
use std::net::{SocketAddr, UdpSocket};
use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use pdp_e2e::{TestNode, alone, eventually, run, sh};

/// h1 sends to h2 via r2, an OSPF route (IPv4), and by a connected
/// route (IPv6). The third link to h2 goes down and up.
const SPEC: &str = r#"
apiVersion: pdp/v1
kind: Substrate
metadata: {name: node}
spec:
  mux: {cpus: "0", power: 0.5}
  forwardingEngines:
    fe1: {cpus: "0", capacity: 0.4}
    fe2: {cpus: "1", capacity: 0.4}
    fe3: {cpus: "1", capacity: 0.3}
---
apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {name: red}
spec:
  nodes:
    r1:
      kind: router
      interfaces:
        eth0: {addresses: [10.0.1.1/24, "fd00:1::1/64"]}
        eth1: {addresses: [10.0.12.1/30]}
        eth2: {addresses: ["fd00:3::1/64"]}
        eth3: {addresses: [10.0.4.1/24, "fd00:4::1/64"]}
      files: &ospf
        /etc/frr/zebra.conf: {content: "log stdout\n", owner: "frr:frr"}
        /etc/frr/ospfd.conf:
          owner: "frr:frr"
          content: |
            log stdout
            interface eth0
             ip ospf passive
            interface eth1
             ip ospf network point-to-point
             ip ospf hello-interval 1
             ip ospf dead-interval 20
            interface eth3
             ip ospf passive
            router ospf
             network 10.0.0.0/8 area 0
      commands: &frr
        - /usr/lib/frr/zebra -K 60
        - sh -c "until [ -S /run/frr/zserv.api ]; do sleep 0.05; done; exec /usr/lib/frr/ospfd"
      dataPlane: {power: 0.8, distribution: {policy: round-robin}}
    r2:
      kind: router
      interfaces:
        eth0: {addresses: [10.0.2.1/24]}
        eth1: {addresses: [10.0.12.2/30]}
      files: *ospf
      commands: *frr
      dataPlane: {power: 0.3}
    h1:
      kind: host
      resources: {cpu: 1}
      interfaces:
        eth0: {addresses: [10.0.1.2/24, "fd00:1::2/64"], gateways: [10.0.1.1, "fd00:1::1"]}
    h2:
      kind: host
      resources: {cpu: 1}
      interfaces:
        eth0: {addresses: [10.0.2.2/24], gateways: [10.0.2.1]}
        eth1: {addresses: ["fd00:3::2/64"], gateways: ["fd00:3::1"]}
        eth2: {addresses: [10.0.4.2/24, "fd00:4::2/64"]}
  links:
    - endpoints: ["r1:eth0", "h1:eth0"]
    - endpoints: ["r1:eth1", "r2:eth1"]
    - endpoints: ["r1:eth2", "h2:eth1"]
    - endpoints: ["r1:eth3", "h2:eth2"]
    - endpoints: ["r2:eth0", "h2:eth0"]
"#;

/// Highest total rate of both streams, datagrams per second, unless [`RATE_VARIABLE`] sets another,
/// and at most half of the path's capacity. It is a fifth of half the capacity of two idle CPUs
/// with unoptimized programs (some 25,000), so that other load of the machine matters less.
const RATE_PPS_MAX: u64 = 5_000;

/// Frames that wait on h1's side of its TAP while its helper waits for a CPU. The kernel's default
/// of 500 is a fifth of a second of a stream.
const SENDER_QUEUE: u32 = 5_000;

/// Environment variable to set another rate, for a quiet machine.
const RATE_VARIABLE: &str = "PDP_E2E_STREAM_PPS";

/// Rates for measuring the path's capacity, datagrams per second, and the time for each.
const PROBE_PPS: [u64; 6] = [1_000, 2_500, 5_000, 10_000, 20_000, 40_000];
const PROBE_TIME_MS: u64 = 1_500;

/// Longest wait for datagrams to arrive.
const ARRIVAL_MAX: Duration = Duration::from_secs(2);

/// Datagrams before and after each event.
const MARGIN_COUNT: u64 = 500;

/// Pause of a sender; due datagrams are sent after it. Lost
/// time is not made up for: a burst would be another test.
const TICK: Duration = Duration::from_millis(1);

/// Receive buffer for the time that the receiver waits for a CPU, bytes.
const RECEIVE_BYTES: usize = 8 << 20;

/// Routes that are added, deleted or kept while notifications are lost. In total they exceed the
/// mirror's 64 MiB of buffer several times.
const LOST_ROUTES: u32 = 20_000;
const LOST_ROUNDS: u32 = 10;

/// Routes over the link that goes down.
const LINK_ROUTES: u32 = 500;

/// A numbered stream.
struct Stream {
    sent: Arc<AtomicU64>,
    arrived: Arc<Mutex<Vec<bool>>>,
    ends: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Stream {
    /// Starts a stream between the network namespaces of two
    /// processes, with `pps` at most and `count` in total.
    fn start(from: u32, to: u32, address: &str, pps: u64, count: u64) -> Self {
        let to_address: SocketAddr = address.parse().expect("an address");
        let any = if to_address.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
        let (sender, receiver) = (socket(from, any), socket(to, address));
        receiver.set_read_timeout(Some(Duration::from_millis(100))).expect("a time-out");
        rustix::net::sockopt::set_socket_recv_buffer_size_force(&receiver, RECEIVE_BYTES)
            .expect("room");
        let sent = Arc::new(AtomicU64::new(0));
        let arrived = Arc::new(Mutex::new(Vec::<bool>::new()));
        let ends = Arc::new(AtomicBool::new(false));
        let per_tick = (pps * TICK.as_micros() as u64 / 1_000_000).max(1);
        let (counter, end) = (sent.clone(), ends.clone());
        let sending = std::thread::spawn(move || {
            let mut number: u64 = 0;
            while number < count && !end.load(Ordering::Relaxed) {
                for _ in 0..per_tick {
                    sender.send_to(&number.to_be_bytes(), to_address).expect("sent");
                    number += 1;
                }
                counter.store(number, Ordering::Relaxed);
                std::thread::sleep(TICK);
            }
        });
        let (seen, end) = (arrived.clone(), ends.clone());
        let receiving = std::thread::spawn(move || {
            let mut number = [0; 8];
            while !end.load(Ordering::Relaxed) {
                if receiver.recv(&mut number).is_ok() {
                    let number = u64::from_be_bytes(number) as usize;
                    let mut seen = seen.lock().expect("seen");
                    if seen.len() <= number {
                        seen.resize(number + 1, false);
                    }
                    seen[number] = true;
                }
            }
        });
        Self { sent, arrived, ends, threads: vec![sending, receiving] }
    }

    fn sent(&self) -> u64 {
        self.sent.load(Ordering::Relaxed)
    }

    /// Waits until `count` more were sent; returns the total.
    fn go_on(&self, count: u64) -> u64 {
        let until = self.sent() + count;
        eventually("the stream goes on", || self.sent() >= until);
        self.sent()
    }

    /// Number of these still missing, after waiting for them.
    fn missing(&self, numbers: Range<u64>) -> usize {
        let end = Instant::now() + ARRIVAL_MAX;
        loop {
            let seen = self.arrived.lock().expect("seen");
            let is_missing = |number: &u64| seen.get(*number as usize) != Some(&true);
            let missing = numbers.clone().filter(is_missing).count();
            drop(seen);
            if missing == 0 || Instant::now() > end {
                return missing;
            }
            std::thread::sleep(TICK);
        }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn socket(pid: u32, address: &str) -> UdpSocket {
    let netns = File::open(format!("/proc/{pid}/ns/net")).expect("a network namespace");
    pdp_net::netns::within(netns.as_fd(), || Ok(UdpSocket::bind(address).expect("bound")))
        .expect("a socket")
}

/// Process of a part of a node: `control`, `mirror`.
fn pid(node: &TestNode, name: &str, part: &str) -> u32 {
    let status = node.json(&["inspect", "red"])["status"].clone();
    let nodes = status["nodes"].as_array().expect("nodes");
    let found = nodes.iter().find(|found| found["name"] == name).expect("the node");
    found[part]["pid"].as_u64().and_then(|pid| u32::try_from(pid).ok()).expect("it runs")
}

/// Highest rate of [`PROBE_PPS`] without losses, as measured.
fn capacity_pps(h1: u32, h2: u32) -> u64 {
    let mut best_pps = 0;
    for pps in PROBE_PPS {
        let count = pps * PROBE_TIME_MS / 1000;
        let start = Instant::now();
        let stream = Stream::start(h1, h2, "10.0.2.2:9000", pps, count);
        eventually("all are sent", || stream.sent() >= count);
        let real_pps = (count as f64 / start.elapsed().as_secs_f64()) as u64;
        if stream.missing(0..count) > 0 {
            break;
        }
        best_pps = real_pps;
    }
    best_pps
}

/// Runs `event`, and checks that these streams lost nothing.
#[track_caller]
fn during(node: &TestNode, what: &str, streams: &[&Stream], event: impl FnOnce()) {
    let first: Vec<u64> = streams.iter().map(|stream| stream.sent()).collect();
    for stream in streams {
        stream.go_on(MARGIN_COUNT);
    }
    let start = Instant::now();
    event();
    let took = start.elapsed();
    for (stream, first) in streams.iter().zip(first) {
        let numbers = first..stream.go_on(MARGIN_COUNT);
        let count = numbers.end - numbers.start;
        let missing = stream.missing(numbers);
        assert_eq!(missing, 0, "of {count} are missing while {what}:\n{}", drops(node));
        println!("{what}: {took:?}, 0 of {count} missing");
    }
}

/// Frames dropped on the path, by port and reason.
fn drops(node: &TestNode) -> String {
    let stats = node.json(&["stats", "red"]);
    let mut words = String::new();
    for (name, found) in stats["vnets"]["red"]["nodes"].as_object().expect("nodes") {
        for (port, counters) in found["ports"].as_object().expect("ports") {
            let _ = writeln!(words, "{name}:{port} {} {}", counters["dropped"], counters["tap"]);
        }
    }
    words + &node.exec("red/h1", "ip -s link show eth0")
}

/// Runs lines of ip(8) on r1, within the node's CPU share, like its routing software.
#[track_caller]
fn batch(node: &TestNode, lines: &str) {
    let mut command = node.pdp_command(&["exec", "red/r1", "--", "ip", "-batch", "-"]);
    let output = run(&mut command, lines);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Lines that change routes, each a /32 from `base` on.
fn lines(verb: &str, base: &str, numbers: Range<u32>, path: &str) -> String {
    let mut lines = String::new();
    for number in numbers {
        let _ = writeln!(lines, "route {verb} {base}.{}.{}/32 {path}", number >> 8, number & 255);
    }
    lines
}

/// The kernel's main table according to ip(8): prefix and path.
fn kernel(r1: u32) -> BTreeMap<String, String> {
    let show = |family| sh(&format!("nsenter -n -t {r1} ip -{family} route show table main"));
    let mut routes = BTreeMap::new();
    for line in (show(4) + &show(6)).lines().filter(|line| !line.starts_with("fe80::/64")) {
        let words: Vec<&str> = line.split_whitespace().collect();
        let prefix = match words[0].contains('/') {
            true => words[0].to_owned(),
            false => format!("{}/32", words[0]),
        };
        let path = ["via", "dev"].iter().filter_map(|key| {
            let at = words.iter().position(|word| word == key)?;
            Some(format!(" {key} {}", words[at + 1]))
        });
        // The first of several is the best.
        routes.entry(prefix).or_insert_with(|| path.collect());
    }
    routes
}

/// A guest's table according to `pdp routes`.
fn guest(node: &TestNode, number: &str) -> BTreeMap<String, String> {
    let split = |line: &str| match line.split_once(' ') {
        Some((prefix, path)) => (prefix.to_owned(), format!(" {path}")),
        None => (line.to_owned(), String::new()),
    };
    node.pdp(&["routes", "red/r1", "--guest", number]).lines().map(split).collect()
}

/// Checks that both guests have the kernel's routes, according to the mirror and to ip(8).
#[track_caller]
fn equal(node: &TestNode, r1: u32) {
    eventually("there is no difference", || {
        node.try_pdp(&["routes", "red/r1", "--diff"]).is_ok_and(|words| words.is_empty())
    });
    let kernel = kernel(r1);
    for number in ["0", "1"] {
        let guest = guest(node, number);
        let differing: Vec<_> = kernel
            .keys()
            .chain(guest.keys())
            .filter(|prefix| kernel.get(*prefix) != guest.get(*prefix))
            .take(10)
            .map(|prefix| (prefix, kernel.get(prefix), guest.get(prefix)))
            .collect();
        assert!(differing.is_empty(), "prefix, kernel, guest {number}: {differing:?}");
    }
}

fn overruns(node: &TestNode) -> u64 {
    let stats = node.json(&["stats", "red"]);
    stats["vnets"]["red"]["nodes"]["r1"]["routes"]["overruns"].as_u64().unwrap_or(0)
}

/// Kills a daemon of r1 and waits for its successor.
#[track_caller]
fn kill_daemon(node: &TestNode, name: &str) {
    let pidof = || node.try_exec("red/r1", &format!("pidof {name}")).unwrap_or_default();
    let before = pidof();
    assert!(!before.is_empty(), "{name} runs");
    node.exec("red/r1", &format!("kill -9 {before}"));
    eventually("it is started again", || {
        let now = pidof();
        !now.is_empty() && now != before
    });
}

/// True if the answer of FRR on r1 contains these words.
fn frr_shows(node: &TestNode, command: &str, words: &str) -> bool {
    let all = ["exec", "red/r1", "--", "vtysh", "-c", command];
    node.try_pdp(&all).is_ok_and(|answer| answer.contains(words))
}

#[test]
fn streams_over_unchanged_routes_lose_nothing() {
    let _alone = alone();
    let node = TestNode::start("events");
    node.apply(SPEC);
    let reaches = |to| node.try_exec("red/h1", &format!("ping -c1 -W1 {to}")).is_ok();
    eventually("OSPF has its route", || reaches("10.0.2.2"));
    eventually("h1 reaches h2 by IPv6", || reaches("fd00:3::2"));
    let [h1, h2, r1] = ["h1", "h2", "r1"].map(|name| pid(&node, name, "control"));

    node.exec("red/h1", &format!("ip link set eth0 txqueuelen {SENDER_QUEUE}"));
    let capacity = capacity_pps(h1, h2);
    let pps = match std::env::var(RATE_VARIABLE) {
        Ok(pps) => pps.parse().expect("a rate"),
        Err(_) => RATE_PPS_MAX.min(capacity / 2),
    };
    println!("the path takes {capacity} datagrams a second; the streams are {pps} at most");
    let by_ospf = Stream::start(h1, h2, "10.0.2.2:9001", pps / 2, u64::MAX);
    let connected = Stream::start(h1, h2, "[fd00:3::2]:9001", pps / 2, u64::MAX);

    // Losses now would be for lack of CPU.
    during(&node, "nothing happens", &[&by_ospf, &connected], || {
        std::thread::sleep(Duration::from_secs(1));
    });

    // Lost notifications: some routes are added, some deleted, many added and deleted.
    let via = "via 10.0.4.2";
    batch(&node, &lines("add", "10.100", 0..1000, via));
    equal(&node, r1);
    let mirror = pid(&node, "r1", "mirror");
    assert_eq!(overruns(&node), 0);
    during(&node, "notifications are lost", &[&by_ospf, &connected], || {
        sh(&format!("kill -STOP {mirror}"));
        batch(&node, &lines("del", "10.100", 0..500, via));
        for _ in 0..LOST_ROUNDS {
            batch(&node, &lines("add", "10.101", 0..LOST_ROUTES, via));
            batch(&node, &lines("del", "10.101", 100..LOST_ROUTES, via));
            batch(&node, &lines("del", "10.101", 0..100, via));
        }
        batch(&node, &lines("add", "10.102", 0..500, via));
        sh(&format!("kill -CONT {mirror}"));
        equal(&node, r1);
    });
    assert!(overruns(&node) > 0, "notifications were lost");
    assert_eq!(pid(&node, "r1", "mirror"), mirror);

    // A link without carrier, and one set down inside the guest:
    // the kernel removes its routes without a notification.
    during(&node, "a link goes down and up", &[&by_ospf, &connected], || {
        node.pdp(&["link", "down", "red/r1:eth3"]);
        equal(&node, r1);
        node.pdp(&["link", "up", "red/r1:eth3"]);
        equal(&node, r1);
        batch(&node, &lines("replace", "10.103", 0..LINK_ROUTES, via));
        equal(&node, r1);
        node.exec("red/r1", "ip link set eth3 down");
        equal(&node, r1);
        assert!(!guest(&node, "0").contains_key("10.103.0.1/32"));
        node.exec("red/r1", "ip link set eth3 up");
        batch(&node, &lines("replace", "10.103", 0..LINK_ROUTES, via));
        equal(&node, r1);
        assert!(guest(&node, "1").contains_key("10.103.0.1/32"));
    });

    // zebra keeps the kernel's routes until ospfd returns.
    during(&node, "zebra is killed", &[&by_ospf, &connected], || {
        kill_daemon(&node, "zebra");
        eventually("ospfd is connected to the new zebra", || {
            frr_shows(&node, "show zebra client summary", "ospf")
        });
        assert!(kernel(r1).contains_key("10.0.2.0/24"));
        equal(&node, r1);
    });
    // OSPF's own routes vanish with it.
    during(&node, "ospfd is killed", &[&connected], || {
        kill_daemon(&node, "ospfd");
        eventually("OSPF has its route again", || reaches("10.0.2.2"));
        equal(&node, r1);
    });
    during(&node, "all is as it was", &[&by_ospf, &connected], || {});
}
