//! Overload of every ingress path by one virtual network and by several. The output stays at the
//! peak, networks with little traffic lose nothing, and routing sessions stay up.
//!
//! Generators inside the mux use all of its capacity; an external machine floods by AF_XDP. All
//! networks share the guests' core and the mux's.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use pdp_e2e::frame::{NUMBER_AT, write_frame, write_frame_to};
use pdp_e2e::{Background, TestNode, all_answered, alone, eventually, routing};
use serde_json::Value;

/// Duration of each flood: longer than an adjacency lasts without hellos.
const FLOOD: Duration = Duration::from_secs(5);
const DEAD_S: u8 = 4;

/// Pings of the network with little traffic, one each 4 ms.
const PINGS: usize = 1_250;
const PING_PAUSE: &str = "0.004";

/// Least output at any load, relative to the highest. A machine with other users varies.
const PEAK_SHARE_MIN: f64 = 0.6;

/// A load up to this part of the peak must arrive completely, with a tolerance for other users of
/// the machine.
const LITTLE_OF_PEAK: f64 = 0.3;
const LITTLE_SHARE_MIN: f64 = 0.9;

/// Frames per second to a control guest and interface by each punt limit. Then the tolerance for
/// bursts and other classes, and the least rate on a busy machine.
const PUNTS_PPS: f64 = 1_000.0;
const PUNTS_SLACK: f64 = 1.5;
const PUNTS_PPS_MIN: f64 = 100.0;

/// Generator of a frame, at a rate or, with 0, as fast as possible.
fn generator(frames: &Path, pps: u64) -> String {
    let rate = if pps == 0 { String::new() } else { format!("pps: {pps}, ") };
    format!("{{generator: {{frames: {}, {rate}numberAt: {NUMBER_AT}}}}}", frames.display())
}

/// Interfaces `a` and `b` for floods, their sinks, and X towards the outside.
fn substrate(a: &str, b: &str) -> String {
    let sink = format!("{{generator: {{numberAt: {NUMBER_AT}}}}}");
    format!(
        r#"
apiVersion: pdp/v1
kind: Substrate
metadata: {{name: node}}
spec:
  interfaces: {{a: {a}, b: {b}, asink: {sink}, bsink: {sink}, X: {{device: extA}}}}
  mux: {{cpus: "0", power: 0.5}}
  forwardingEngines: {{fe1: {{cpus: "1", capacity: 1}}}}
"#
    )
}

/// A router from a generator to a sink.
fn flooded(name: &str, from: &str) -> String {
    format!(
        r#"
apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {{name: {name}}}
spec:
  nodes:
    r1:
      kind: router
      interfaces:
        eth0: {{addresses: [10.0.1.1/24], mac: "02:00:00:00:01:01"}}
        eth1: {{addresses: [10.0.2.1/24], mac: "02:00:00:00:02:01"}}
      dataPlane:
        power: 0.15
        puntLimits: {{local: {{pps: 1000}}}}
  externals: {{in: {{interface: {from}}}, out: {{interface: {from}sink}}}}
  links:
    - endpoints: ["r1:eth0", "external:in"]
    - endpoints: ["r1:eth1", "external:out"]
"#
    )
}

/// Path through a tunnel from an external machine to a host.
const OUTSIDE: &str = r#"
apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {name: tunnel}
spec:
  nodes:
    r1:
      kind: router
      interfaces:
        eth0: {addresses: [10.0.1.1/24]}
        eth1: {addresses: [10.0.2.1/24]}
      dataPlane: {power: 0.1}
    h1: {kind: host, interfaces: {eth0: {addresses: [10.0.2.2/24], gateways: [10.0.2.1]}}}
  externals: {x: {interface: X, vxlan: {vni: 7, local: 192.0.2.1, remote: 192.0.2.2}}}
  links:
    - endpoints: ["r1:eth0", "external:x"]
    - endpoints: ["r1:eth1", "h1:eth0"]
"#;

struct Bench {
    node: TestNode,
    outside: pdp_e2e::TestMachine,
    through: PathBuf,
    to_router: PathBuf,
}

impl Bench {
    /// Makes the good network with OSPF and BGP, and the flooding networks, still silent.
    fn start() -> Self {
        let mut node = TestNode::start("overload");
        let outside = node.machine("mA", "extA");
        node.namespace().run("ip addr add 192.0.2.1/24 dev extA");
        outside.run(
            "ip addr add 192.0.2.2/24 dev eth0
             ip link add vx0 type vxlan id 7 local 192.0.2.2 remote 192.0.2.1 dstport 4789 dev eth0
             ip link set vx0 up; ip addr add 10.0.1.2/24 dev vx0; ip route add 10.0.2.0/24 via 10.0.1.1",
        );
        let (through, to_router) = (node.directory.join("through"), node.directory.join("to"));
        write_frame(&through).expect("a file");
        write_frame_to(&to_router, [10, 0, 1, 1]).expect("a file");
        let bench = Self { node, outside, through, to_router };
        bench.offer([1, 1]);
        for vnet in [routing::vnet("good", DEAD_S), flooded("a", "a"), flooded("b", "b")] {
            bench.node.apply(&vnet);
        }
        bench.node.apply(OUTSIDE);
        for name in ["a", "b"] {
            // The sink answers no ARP request.
            let neighbour = "ip neigh replace 10.0.2.2 lladdr 02:00:00:00:02:02 dev eth1";
            bench.node.exec(&format!("{name}/r1"), neighbour);
        }
        eventually("OSPF has its routes", || {
            bench.node.try_exec("good/h1", "ping -c1 -W1 10.2.0.2").is_ok()
        });
        eventually("BGP has its session", || routing::has_session(&bench.node, "good/r1"));
        eventually("the outside reaches h1", || {
            bench.outside.try_run("ping -c1 -W1 10.0.2.2").is_ok()
        });
        bench
    }

    /// Sets the frames per second into `a` and `b`; 0 for as many as possible.
    fn offer(&self, pps: [u64; 2]) {
        let [a, b] = pps.map(|pps| generator(&self.through, pps));
        self.node.apply(&substrate(&a, &b));
    }

    fn received(&self, sink: &str) -> u64 {
        self.node.json(&["stats"])["externals"][sink]["numbered"].as_u64().expect("a counter")
    }

    /// Output of a network at a load, frames per second, with the others quiet.
    fn rate(&self, pps: u64) -> f64 {
        self.offer([pps, 1]);
        std::thread::sleep(Duration::from_millis(500));
        let (before, since) = (self.received("asink"), Instant::now());
        std::thread::sleep(Duration::from_secs(2));
        (self.received("asink") - before) as f64 / since.elapsed().as_secs_f64()
    }

    fn port(&self, vnet: &str, port: &str) -> Value {
        self.node.json(&["stats", vnet])["vnets"][vnet]["nodes"]["r1"]["ports"][port].clone()
    }

    /// Checks that the good network gets all that it needs while `what` floods.
    fn good_is_well(&self, what: &str) {
        let changes = routing::changes(&self.node, "good/r1");
        let line = format!("ping -c{PINGS} -i{PING_PAUSE} -w60 10.2.0.2");
        let since = Instant::now();
        let words = self.node.exec("good/h1", &line);
        let lost = words.lines().find(|line| line.contains("packet loss")).unwrap_or_default();
        let times = words.lines().last().unwrap_or_default();
        println!("{what}: {lost}; {times}");
        assert!(all_answered(&words, PINGS), "{what}: {words}");
        assert!(since.elapsed() >= FLOOD, "the flood is as long as that");
        let now = routing::changes(&self.node, "good/r1");
        assert_eq!(now, changes, "{what}: an adjacency or a session was lost");
    }
}

#[test]
fn overload_keeps_peak_throughput_and_others_lossless() {
    let _alone = alone();
    let bench = Bench::start();
    bench.offer([1, 1]);
    bench.good_is_well("nothing");

    let loads = [50_000, 200_000, 800_000, 0];
    let rates = loads.map(|load| bench.rate(load));
    println!("offered {loads:?} (0: all that goes): came {rates:.0?} a second");
    let peak = rates.iter().copied().fold(0.0, f64::max);
    assert!(rates[0] > 10_000.0, "the way is there: {rates:?}");
    assert!(rates[3] >= PEAK_SHARE_MIN * peak, "{rates:?}");
    for (load, rate) in loads.into_iter().zip(rates) {
        let is_little = load > 0 && load as f64 <= LITTLE_OF_PEAK * peak;
        if is_little && rate < LITTLE_SHARE_MIN * load as f64 {
            eventually("what is far below the peak comes whole", || {
                bench.rate(load) >= LITTLE_SHARE_MIN * load as f64
            });
        }
    }

    bench.offer([0, 1]);
    bench.good_is_well("one network by a generator");
    bench.offer([0, 0]);
    bench.good_is_well("two networks by generators");
    bench.offer([1, 1]);

    let time = FLOOD.as_secs() + 4;
    let line = format!("iperf3 -u -b 0 -l 64 -t {time} -c 10.0.2.2");
    let _server = server(&bench.node, "tunnel/h1");
    let flood = bench.outside.spawn(&line);
    std::thread::sleep(Duration::from_secs(1));
    let before = bench.port("tunnel", "eth0")["received"].as_u64().unwrap_or(0);
    bench.good_is_well("a machine outside, by AF_XDP");
    let after = bench.port("tunnel", "eth0")["received"].as_u64().unwrap_or(0);
    println!("{} frames came by AF_XDP meanwhile", after - before);
    assert!(after - before > 100_000, "that was no flood");
    drop(flood);
}

#[test]
fn punt_storm_starves_no_other_vnet() {
    let _alone = alone();
    let bench = Bench::start();
    let storm = generator(&bench.to_router, 0);
    let quiet = generator(&bench.through, 1);
    let punted = || bench.port("a", "eth0")["punted"].as_u64().expect("a counter");
    bench.node.apply(&substrate(&storm, &quiet));
    std::thread::sleep(Duration::from_millis(500));
    let (before, since) = (punted(), Instant::now());
    bench.good_is_well("punts of another");
    let pps = (punted() - before) as f64 / since.elapsed().as_secs_f64();
    println!("punts of one interface: {pps:.0} a second pass, of {PUNTS_PPS}");
    assert!((PUNTS_PPS_MIN..PUNTS_PPS * PUNTS_SLACK).contains(&pps), "{pps}");
    let dropped = bench.port("a", "eth0")["dropped"]["punt-limit-local"].as_u64();
    assert!(dropped > Some(10_000), "the rest is counted: {dropped:?}");
}

fn server(node: &TestNode, host: &str) -> Background {
    let mut command: Command = node.pdp_command(&["exec", host, "--", "iperf3", "--server"]);
    let server = Background::start(&mut command);
    eventually("iperf3 listens", || {
        node.try_exec(host, "ss -Htln").is_ok_and(|it| it.contains("5201"))
    });
    server
}
