//! External links of routers of kind `kernel`, bypassing the mux.

use std::time::{Duration, Instant};

use pdp_e2e::counters::missing;
use pdp_e2e::{Background, TestMachine, TestNode, all_answered, eventually, kill};
use serde_json::Value;

/// A parallel router with a tunnel, VNI 8.
const BLUE: &str = r#"
apiVersion: pdp/v1
kind: Substrate
metadata: {name: node}
spec:
  mux: {cpus: "0", power: 0.5}
  interfaces: {A: {device: extA}}
  forwardingEngines:
    fe1: {cpus: "1", capacity: 1}
---
apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {name: blue}
spec:
  nodes:
    r1: {kind: router, interfaces: {eth0: {addresses: [10.0.2.1/24]}}, dataPlane: {power: 0.2}}
  externals:
    out: {interface: A, vxlan: {vni: 8, local: 192.0.2.1, remote: 192.0.2.2}}
  links:
    - endpoints: ["r1:eth0", "external:out"]
"#;

/// Two kernels with a link between them. One of them has a tunnel, VNI 7, with the same addresses,
/// and another tunnel of Ethernet in UDP over IPv6. `more` adds keys to the vnet.
fn red(more: &str) -> String {
    format!(
        r#"
apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {{name: red}}
spec:
  {more}
  kinds: {{router: {{dataPlane: {{kind: kernel}}}}}}
  nodes:
    r1:
      kind: router
      interfaces: {{eth0: {{addresses: [10.0.2.1/24]}}, eth1: {{addresses: [10.0.1.1/24]}}}}
    r2:
      kind: router
      interfaces: {{eth0: {{addresses: [10.0.1.2/24]}}, eth1: {{addresses: [10.0.3.1/24]}}}}
      routes: [{{to: 10.0.2.0/24, via: 10.0.1.1}}]
  externals:
    out: {{interface: A, vxlan: {{vni: 7, local: 192.0.2.1, remote: 192.0.2.2}}}}
    plain: {{interface: A, udp: {{localPort: 5007, remotePort: 5007, local: "fd00:a::1", remote: "fd00:a::2"}}}}
  links:
    - {{name: out, endpoints: ["r1:eth0", "external:out"]}}
    - {{name: in, endpoints: ["r1:eth1", "r2:eth0"]}}
    - {{name: plain, endpoints: ["r2:eth1", "external:plain"]}}
"#
    )
}

/// The tunnels' Linux ends: blue's has 10.0.2.3, red's 10.0.2.2.
fn outside(node: &mut TestNode) -> TestMachine {
    let outside = node.machine("out", "extA");
    outside.run(
        "ip addr add 192.0.2.2/24 dev eth0; ip addr add fd00:a::2/64 dev eth0 nodad
         ip link add vx7 type vxlan id 7 local 192.0.2.2 remote 192.0.2.1 dstport 4789 dev eth0
         ip link add vx8 type vxlan id 8 local 192.0.2.2 remote 192.0.2.1 dstport 4789 dev eth0
         ip link set vx7 mtu 1450 up; ip addr add 10.0.2.2/24 dev vx7
         ip link set vx8 mtu 1450 up; ip addr add 10.0.2.3/32 dev vx8
         ip route add 10.0.1.0/24 via 10.0.2.1 dev vx7",
    );
    node.namespace()
        .run("ip addr add 192.0.2.1/24 dev extA; ip addr add fd00:a::1/64 dev extA nodad");
    outside
}

fn ready(node: &TestNode, vnet: &str) {
    node.pdp(&["wait", vnet, "--for", "ready", "--timeout", "60s"]);
}

fn nodes(node: &TestNode) -> Vec<Value> {
    let status = node.json(&["inspect", "red"])["status"].clone();
    status["nodes"].as_array().expect("nodes").clone()
}

fn has_tap(node: &TestNode) -> bool {
    nodes(node).iter().any(|router| !router["tap"].is_null())
}

fn pids(node: &TestNode) -> Vec<Value> {
    nodes(node).iter().map(|router| router["control"]["pid"].clone()).collect()
}

fn port(node: &TestNode, router: &str, port: &str) -> Value {
    let stats = node.json(&["stats", "red"]);
    stats["vnets"]["red"]["nodes"][router]["ports"][port].clone()
}

fn count(node: &TestNode, counter: &str) -> u64 {
    port(node, "r1", "eth0")[counter].as_u64().expect("a counter")
}

/// Checks that red's router answers `pings` pings, one each 5 ms.
fn answers(outside: &TestMachine, pings: usize) {
    let words = outside.run(&format!("ping -I vx7 -c{pings} -i0.005 -w60 10.0.2.1 || true"));
    assert!(all_answered(&words, pings), "{words}");
}

fn reaches(outside: &TestMachine, what: &str) -> bool {
    outside.try_run(&format!("ping -c1 -W1 {what}")).is_ok()
}

/// Ends pings, of which the last ones may be in flight: at most half a second's.
fn none_lost(pings: Background) {
    let words = pings.stop("INT");
    let counts = words.lines().find(|line| line.contains("packets transmitted"));
    let mut counts = counts.into_iter().flat_map(|line| line.split(", "));
    let mut count = || counts.next()?.split(' ').next()?.parse::<usize>().ok();
    let (sent, answered) = (count().expect("a count"), count().expect("a count"));
    assert!(answered > 0 && sent - answered <= 50, "{words}");
    assert!(all_answered(&words, answered), "{words}");
}

fn carrier(node: &TestNode) -> String {
    node.exec("red/r1", "cat /sys/class/net/eth0/carrier").trim().to_owned()
}

#[test]
fn kernel_router_is_reached_without_any_process() {
    let mut node = TestNode::start("far");
    let outside = outside(&mut node);
    node.apply(BLUE);
    ready(&node, "blue");
    // Frames from vx8 are blue's, though their addresses are red's.
    let blue = || reaches(&outside, "-I 10.0.2.3 10.0.2.1");
    outside.run("ip route add 10.0.2.1/32 dev vx8 table 8; ip rule add from 10.0.2.3 lookup 8");
    eventually("blue is reached", blue);

    // A device that does not transmit redirected frames: they use the mux.
    node.apply(&red(""));
    ready(&node, "red");
    eventually("red is reached by the mux", || reaches(&outside, "-I vx7 10.0.2.1"));
    assert!(has_tap(&node), "its port to the outside is a TAP");
    node.pdp(&["delete", "red"]);
    outside.run("ethtool -K eth0 gro on >/dev/null");

    // Blue's tunnel has no gap while the program is replaced.
    let mut pings = outside.command("ping");
    let pings = Background::start(pings.args("-I 10.0.2.3 -i0.01 10.0.2.1".split(' ')));
    node.apply(&red(""));
    ready(&node, "red");
    eventually("red is reached", || reaches(&outside, "-I vx7 10.0.2.1"));
    assert!(!has_tap(&node), "no process has a part in any of its links");
    answers(&outside, 100);
    let status = node.json(&["inspect", "red"])["status"].clone();
    assert!(status["message"].is_null() && status["ready"] == true, "{status}");

    // TCP of the router itself, and forwarded TCP.
    let serve = "cd /usr/bin; setsid python3 -m http.server 8000 >/dev/null 2>&1 &";
    node.pdp(&["exec", "red/r2", "--", "sh", "-c", serve]);
    eventually("a file comes whole", || {
        let get = "curl -sS -m20 -o got http://10.0.1.2:8000/python3.11";
        let directory = node.run_dir();
        let line = format!("cd {} && {get} && cmp got /usr/bin/python3.11", directory.display());
        outside.try_run(&line).is_ok()
    });
    std::fs::remove_file(node.run_dir().join("got")).expect("what came");
    eventually("counters add up", || missing(&node.json(&["stats", "red"])).is_empty());
    let [sent, received] = ["sent", "received"].map(|name| count(&node, name));
    assert!(sent > 500 && received > 100, "{sent} {received}");
    let stats = node.json(&["stats", "blue"]);
    assert_eq!(missing(&stats), [], "{stats}");
    // A capture shows external packets in their form inside the tunnel.
    let arguments = ["capture", "red/external:out", "-f", "icmp", "-c", "2", "-w", "/dev/null"];
    let mut capture = Background::start(&mut node.pdp_command(&arguments));
    eventually("frames are captured", || {
        answers(&outside, 1);
        !capture.runs()
    });

    // Ethernet in UDP over IPv6, to a TAP of socat.
    let socat = outside.spawn(
        "socat UDP6-DATAGRAM:[fd00:a::1]:5007,bind=[fd00:a::2]:5007 \
         TUN,tun-type=tap,tun-name=plain,iff-no-pi",
    );
    eventually("the TAP of socat", || outside.try_run("ip link show plain").is_ok());
    outside.run("ip link set plain mtu 1400 up; ip addr add 10.0.3.2/24 dev plain");
    eventually("red is reached by UDP", || reaches(&outside, "10.0.3.1"));
    drop(socat);

    // Neither by another network's number, nor from another address.
    let before = count(&node, "received");
    outside.run("ip addr add 192.0.2.3/24 dev eth0");
    let send = |source: &str, vni: u8| {
        outside.run(&format!(
            "python3 -c \"import socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.bind(('{source}', 0))
s.sendto(bytes([8, 0, 0, 0, 0, 0, {vni}, 0]) + b'\\xff' * 60, ('192.0.2.1', 4789))\""
        ))
    };
    (0..3).for_each(|_| {
        send("192.0.2.3", 7);
        send("192.0.2.2", 9);
    });
    std::thread::sleep(Duration::from_millis(100));
    let got = count(&node, "received");
    send("192.0.2.2", 7);
    eventually("its own comes", || count(&node, "received") > got);
    assert!(got - before < 6, "at most some of the kernels' own: {before} {got}");

    // Every process that could be on the path dies.
    none_lost(pings);
    let guests = pids(&node);
    let mut pings = outside.command("ping");
    let pings = Background::start(pings.args("-I vx7 -c1200 -i0.002 -W5 10.0.2.1".split(' ')));
    let mux = node.processes().into_iter().find(|process| process.line.contains("pdp-mux"));
    kill(mux.expect("a mux").pid);
    std::thread::sleep(Duration::from_millis(200));
    node.kill_pdpd();
    std::thread::sleep(Duration::from_millis(500));
    node.start_pdpd();
    let words = pings.finish();
    assert!(all_answered(&words, 1200), "{words}");
    ["red", "blue"].iter().for_each(|vnet| ready(&node, vnet));
    eventually("blue is reached by the new mux", blue);
    answers(&outside, 100);
    assert_eq!(pids(&node), guests);

    // The next hop changes.
    outside.run("ip link set eth0 address 02:00:00:00:09:09; ping -c1 -W2 192.0.2.1");
    let since = Instant::now();
    eventually("red is reached again", || reaches(&outside, "-I vx7 10.0.2.1"));
    assert!(since.elapsed() < Duration::from_secs(3), "{:?}", since.elapsed());
    // The next hop vanishes, which is reported.
    node.namespace().run("ip addr del 192.0.2.1/24 dev extA");
    let message = || {
        let status = node.json(&["inspect", "red"])["status"].clone();
        status["links"][0]["message"].as_str().unwrap_or_default().to_owned()
    };
    eventually("it is told", || message().contains("192.0.2.1 is not an address of this machine"));
    node.try_exec("red/r1", "ping -c1 -W1 10.0.2.2").ok();
    node.namespace().run("ip addr add 192.0.2.1/24 dev extA");
    eventually("red is reached", || reaches(&outside, "-I vx7 10.0.2.1"));
    eventually("nothing is told", || message().is_empty());

    // Carriers follow links and devices.
    node.pdp(&["link", "down", "red/out"]);
    assert_eq!(carrier(&node), "0");
    node.pdp(&["link", "up", "red/out"]);
    assert_eq!(carrier(&node), "1");
    eventually("red is reached", || reaches(&outside, "-I vx7 10.0.2.1"));
    outside.run("ip link set eth0 down");
    eventually("no carrier", || carrier(&node) == "0");
    outside.run("ip link set eth0 up; ip addr add fd00:a::2/64 dev eth0 nodad");
    eventually("carrier", || carrier(&node) == "1");
    eventually("red is reached", || reaches(&outside, "-I vx7 10.0.2.1"));

    // The ingress limit covers the whole network.
    node.apply(&red("police: {pps: 20}"));
    ready(&node, "red");
    assert_eq!(pids(&node), guests, "nothing starts anew");
    outside.run("ping -I vx7 -c200 -i0.002 -W1 10.0.2.1 >/dev/null || true");
    let policed = || port(&node, "r1", "eth0")["dropped"]["policed"].as_u64().unwrap_or(0);
    assert!(policed() > 100, "{}", policed());
    node.apply(&red(""));
    answers(&outside, 100);

    // The last such link removes everything of it, while the mux's part continues.
    let pins = node.pins().join("_ports");
    assert!(pins.exists());
    let mut pings = outside.command("ping");
    let pings = Background::start(pings.args("-I 10.0.2.3 -i0.01 10.0.2.1".split(' ')));
    node.pdp(&["delete", "red"]);
    eventually("nothing is left of it", || !pins.exists());
    std::thread::sleep(Duration::from_millis(300));
    none_lost(pings);
    node.pdp(&["down", "--purge"]);
    node.wait_pdpd();
    assert_eq!(node.leftovers(), [""; 0]);
}
