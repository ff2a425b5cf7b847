//! Measures the time from a route's presence in the
//! kernel to its presence in all forwarding guests.
//!
//! `cargo run --release -p pdp-e2e --example route-latency --
//! [ROUTES]`, as root, after `cargo build --release --bins`.
//!
//! A node of the end-to-end harness has a router with two forwarding guests. This
//! adds IPv4 routes to its control guest's kernel and deletes them, one at a time,
//! by netlink. The clock starts when the kernel has acknowledged the change. It
//! stops when both guests' own tables, queried one after the other, show it.
//!
//! Contents of the figures:
//! - Mirror and guests sleep before each change, so that every wake-up is included.
//! - Querying the guests is included: two queries from here to the mirror, on to the guest, and
//!   back. The output also shows the time of the same queries without a change. The true time is
//!   between the first figure less the second, and the first.
//! - The mirror itself measures the time from reading the notification until the slower guest has
//!   applied it, using barriers that guests answer.
//! - Tables are nearly empty: a query of a table takes longer the larger it is.

use std::fs::File;
use std::net::Ipv4Addr;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use clap::Parser;
use pdp_e2e::{TestNode, eventually};
use pdp_netlink::{Netlink, Request, family};
use pdp_proto::channel::Channel;
use pdp_proto::mirror::{MirrorReply, MirrorRequest, MirrorStatusReply, TableSource};

const SPEC: &str = r#"
apiVersion: pdp/v1
kind: Substrate
metadata: {name: node}
spec:
  mux: {cpus: "0", power: 0.5}
  forwardingEngines:
    fe1: {cpus: "0", capacity: 0.4}
    fe2: {cpus: "1", capacity: 0.4}
---
apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {name: red}
spec:
  nodes:
    r1:
      kind: router
      interfaces:
        eth0: {addresses: [10.0.1.1/24]}
        eth1: {addresses: [10.0.2.1/24]}
      dataPlane: {power: 0.8}
    h1:
      kind: host
      interfaces:
        eth0: {addresses: [10.0.1.2/24], gateways: [10.0.1.1]}
        eth1: {addresses: [10.0.2.2/24]}
  links:
    - endpoints: ["r1:eth0", "h1:eth0"]
    - endpoints: ["r1:eth1", "h1:eth1"]
"#;

/// Forwarding guests of the router above.
const GUESTS: [u32; 2] = [0, 1];

/// Next hop of all routes.
const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 2);

/// Pause before a change, in which everything goes to sleep.
const PAUSE: Duration = Duration::from_millis(10);

/// Most routes: 10.64.0.0/24 and the following ones.
const ROUTES_MAX: u32 = 1 << 12;

/// Longest wait for a change to reach a guest.
const PATIENCE: Duration = Duration::from_secs(10);

/// Measures the time from a route in the kernel to the route in all forwarding guests
#[derive(Parser)]
#[command(name = "route-latency", after_help = "Example:\n  route-latency 1000")]
struct Arguments {
    /// Routes to add and to delete
    #[arg(default_value_t = 300, value_parser = clap::value_parser!(u32).range(1..=i64::from(ROUTES_MAX)))]
    routes: u32,
}

/// Times of one kind of change.
#[derive(Default)]
struct Times {
    change: Vec<Duration>,
    asking: Vec<Duration>,
    apply: Vec<Duration>,
}

fn main() {
    let arguments = Arguments::parse();
    let node = TestNode::start("latency");
    node.apply(SPEC);
    eventually("the guests have their routes", || {
        node.try_pdp(&["routes", "red/r1", "--diff"]).is_ok()
            && node.try_exec("red/h1", "ping -c1 -W1 10.0.2.1").is_ok()
    });
    let mut kernel = Kernel::of(&node);
    let mut mirror = Mirror::of(&node);

    let (mut added, mut deleted) = (Times::default(), Times::default());
    for adds in [true, false] {
        let times = if adds { &mut added } else { &mut deleted };
        for number in 0..arguments.routes {
            let prefix = Ipv4Addr::from(u32::from(Ipv4Addr::new(10, 64, 0, 0)) + (number << 8));
            std::thread::sleep(PAUSE);
            kernel.change(adds, prefix);
            let start = Instant::now();
            mirror.wait(adds, prefix);
            times.change.push(start.elapsed());
            let status = mirror.status();
            let slowest_us = status.stats.guests.iter().map(|guest| guest.apply_us).max();
            times.apply.push(Duration::from_micros(slowest_us.unwrap_or(0)));
            std::thread::sleep(PAUSE);
            let start = Instant::now();
            mirror.wait(adds, prefix);
            times.asking.push(start.elapsed());
        }
    }
    println!("{} routes, {} forwarding guests; milliseconds", arguments.routes, GUESTS.len());
    println!("{:<66} {:>8} {:>8} {:>8}", "", "median", "99 %", "max");
    for (what, times) in [("added", added), ("deleted", deleted)] {
        show(&format!("{what}: in the kernel, to confirmed by all guests"), times.change);
        show("  of it asking the guests", times.asking);
        show("  of it read by the mirror, to applied by the slower guest", times.apply);
    }
}

fn show(what: &str, mut times: Vec<Duration>) {
    times.sort_unstable();
    let at = |part: f64| times[((times.len() - 1) as f64 * part) as usize].as_secs_f64() * 1e3;
    println!("{what:<66} {:>8.3} {:>8.3} {:>8.3}", at(0.5), at(0.99), at(1.0));
}

/// The control guest's kernel.
struct Kernel {
    netlink: Netlink,
    interface: u32,
}

impl Kernel {
    fn of(node: &TestNode) -> Self {
        let status = node.json(&["inspect", "red"])["status"].clone();
        let nodes = status["nodes"].as_array().expect("nodes");
        let router = nodes.iter().find(|found| found["name"] == "r1").expect("r1");
        let pid = router["control"]["pid"].as_u64().expect("r1 runs");
        let netns = File::open(format!("/proc/{pid}/ns/net")).expect("a network namespace");
        let netlink = pdp_net::netns::within(netns.as_fd(), || Ok(Netlink::routing()));
        let interface = node.exec("red/r1", "cat /sys/class/net/eth1/ifindex");
        Self {
            netlink: netlink.expect("the namespace").expect("a netlink socket"),
            interface: interface.trim().parse().expect("a number"),
        }
    }

    /// Adds or deletes a /24; returns once the kernel has acknowledged it (rtnetlink(7)).
    fn change(&mut self, adds: bool, prefix: Ipv4Addr) {
        let (kind, flags) = match adds {
            true => (libc::RTM_NEWROUTE, libc::NLM_F_CREATE | libc::NLM_F_EXCL),
            false => (libc::RTM_DELROUTE, 0),
        };
        // struct rtmsg: family, destination's and source's
        // length, TOS, table, protocol, scope, type, flags.
        let (table, protocol) = (libc::RT_TABLE_MAIN, libc::RTPROT_STATIC);
        let (scope, unicast) = (libc::RT_SCOPE_UNIVERSE, libc::RTN_UNICAST);
        let header = [family(false), 24, 0, 0, table, protocol, scope, unicast, 0, 0, 0, 0];
        let mut request = Request::new(kind, flags, &header);
        request.address(libc::RTA_DST, prefix.into()).address(libc::RTA_GATEWAY, GATEWAY.into());
        request.number(libc::RTA_OIF, self.interface);
        self.netlink.change(&mut request).expect("the kernel takes the route");
    }
}

/// The router's route mirror.
struct Mirror {
    channel: Channel,
}

impl Mirror {
    fn of(node: &TestNode) -> Self {
        let path = node.socket_directory("red/r1").join("mirror.sock");
        Self { channel: Channel::connect(&path).expect("the mirror listens") }
    }

    fn answer(&mut self) -> MirrorReply {
        self.channel.receive().expect("an answer").expect("the mirror runs").0
    }

    fn status(&mut self) -> MirrorStatusReply {
        self.channel.send(&MirrorRequest::Status, &[]).expect("the mirror listens");
        match self.answer() {
            MirrorReply::Status(status) => status,
            other => panic!("{other:?}"),
        }
    }

    /// Queries each guest until its table has this /24, or has it no more.
    fn wait(&mut self, has: bool, prefix: Ipv4Addr) {
        let end = Instant::now() + PATIENCE;
        for guest in GUESTS {
            while self.guest_has(guest, prefix) != has {
                assert!(Instant::now() < end, "guest {guest} has not followed: {prefix}/24");
            }
        }
    }

    fn guest_has(&mut self, guest: u32, prefix: Ipv4Addr) -> bool {
        let prefix = format!("{prefix}/24").parse().expect("a prefix");
        let request =
            MirrorRequest::Routes { source: TableSource::Guest(guest), within: Some(prefix) };
        self.channel.send(&request, &[]).expect("the mirror listens");
        let mut has = false;
        loop {
            match self.answer() {
                MirrorReply::Routes(rows) => has |= rows.iter().any(|row| row.prefix == prefix),
                MirrorReply::End => return has,
                other => panic!("{other:?}"),
            }
        }
    }
}
