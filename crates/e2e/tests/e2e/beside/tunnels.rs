//! Tunnels of several vnets over the same two interfaces, against Linux's VXLAN device and a
//! program on a UDP socket (socat), over IPv4 and IPv6, with one worker thread of the mux and two.

use std::fs;

use pdp_e2e::{Background, TestMachine, TestNode, all_answered, eventually};
use serde_json::Value;

/// Tunnel to the external machine, with its inner settings.
struct Tunnel {
    /// Vnet, and the name of its device outside.
    vnet: &'static str,
    name: &'static str,
    /// Port of the vrouter; its subnet is `10.0.NUMBER.0/24`.
    number: u8,
    /// MTU inside, over 1500 bytes outside.
    mtu: u32,
    kind: Kind,
}

enum Kind {
    Vxlan { vni: u32, v6: bool },
    Udp { port: u16, v6: bool },
}

/// Both vnets have both kinds over both versions of IP. Only VNI and port distinguish frames.
const TUNNELS: [Tunnel; 8] = [
    vxlan("red", "red-v4", 2, 7, false),
    vxlan("red", "red-v6", 3, 7, true),
    udp("red", "red-u4", 4, 5007, false),
    udp("red", "red-u6", 5, 5007, true),
    vxlan("blue", "blue-v4", 6, 8, false),
    vxlan("blue", "blue-v6", 7, 8, true),
    udp("blue", "blue-u4", 8, 5008, false),
    udp("blue", "blue-u6", 9, 5008, true),
];

const VNETS: [&str; 2] = ["red", "blue"];

const fn vxlan(vnet: &'static str, name: &'static str, number: u8, vni: u32, v6: bool) -> Tunnel {
    let mtu = if v6 { 1430 } else { 1450 };
    Tunnel { vnet, name, number, mtu, kind: Kind::Vxlan { vni, v6 } }
}

const fn udp(vnet: &'static str, name: &'static str, number: u8, port: u16, v6: bool) -> Tunnel {
    let mtu = if v6 { 1438 } else { 1458 };
    Tunnel { vnet, name, number, mtu, kind: Kind::Udp { port, v6 } }
}

/// Outer addresses of the node and of the external machine.
fn outer(v6: bool) -> (&'static str, &'static str) {
    if v6 { ("fd00:a::1", "fd00:a::2") } else { ("192.0.2.1", "192.0.2.2") }
}

impl Tunnel {
    /// External interface in the spec.
    fn external(&self) -> String {
        let (Kind::Vxlan { v6, .. } | Kind::Udp { v6, .. }) = self.kind;
        let (local, remote) = outer(v6);
        let ends = format!("local: \"{local}\", remote: \"{remote}\"");
        let key = match self.kind {
            Kind::Vxlan { vni, .. } => format!("vxlan: {{vni: {vni}, {ends}}}"),
            Kind::Udp { port, .. } => {
                format!("udp: {{localPort: {port}, remotePort: {port}, {ends}}}")
            }
        };
        format!("    {}: {{interface: A, {key}}}\n", self.name)
    }

    /// Makes its remote end: a device with its name.
    fn make(&self, outside: &TestMachine) -> Option<Background> {
        let name = self.name;
        let program = match self.kind {
            Kind::Vxlan { vni, v6 } => {
                let (node, own) = outer(v6);
                outside.run(&format!(
                    "ip link add {name} type vxlan id {vni} local {own} remote {node} \
                     dstport 4789 dev eth0"
                ));
                None
            }
            Kind::Udp { port, v6 } => {
                let (node, own) = outer(v6);
                let address = match v6 {
                    true => format!("UDP6-DATAGRAM:[{node}]:{port},bind=[{own}]:{port}"),
                    false => format!("UDP4-DATAGRAM:{node}:{port},bind={own}:{port}"),
                };
                let tap = format!("TUN,tun-type=tap,tun-name={name},iff-no-pi");
                let program = outside.spawn(&format!("socat {address} {tap}"));
                eventually("the TAP of socat", || {
                    outside.try_run(&format!("ip link show {name}")).is_ok()
                });
                Some(program)
            }
        };
        let (number, mtu) = (self.number, self.mtu);
        outside.run(&format!(
            "ip link set {name} mtu {mtu} up; ip addr add 10.0.{number}.2/24 dev {name}
             ip route add 10.0.1.0/24 via 10.0.{number}.1 dev {name} metric {number}"
        ));
        program
    }
}

fn vnet(name: &str, whole: bool) -> String {
    let tunnels = || TUNNELS.iter().filter(|tunnel| tunnel.vnet == name);
    let interfaces: String = tunnels()
        .map(|tunnel| format!("        eth{0}: {{addresses: [10.0.{0}.1/24]}}\n", tunnel.number))
        .collect();
    let externals: String = tunnels().map(Tunnel::external).collect();
    let links: String = tunnels()
        .map(|t| format!("    - endpoints: [\"r1:eth{}\", \"external:{}\"]\n", t.number, t.name))
        .collect();
    // The second interface without any tunnel.
    let (interface, external, link) = match whole {
        true => (
            "        eth10: {addresses: [10.0.10.1/24]}\n",
            "    whole: {interface: B}\n",
            "    - endpoints: [\"r1:eth10\", \"external:whole\"]\n",
        ),
        false => ("", "", ""),
    };
    format!(
        r#"---
apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {{name: {name}}}
spec:
  nodes:
    r1:
      kind: router
      interfaces:
        eth1: {{addresses: [10.0.1.1/24]}}
{interfaces}{interface}      dataPlane: {{power: 0.2}}
    h1:
      kind: host
      interfaces: {{eth0: {{addresses: [10.0.1.2/24], gateways: [10.0.1.1]}}}}
  externals:
{externals}{external}  links:
    - endpoints: ["r1:eth1", "h1:eth0"]
{links}{link}"#
    )
}

fn spec(workers: usize) -> String {
    let vnets = vnet("red", true) + &vnet("blue", false);
    format!(
        r#"
apiVersion: pdp/v1
kind: Substrate
metadata: {{name: node}}
spec:
  mux: {{cpus: "0-1", power: 0.5, workers: {workers}}}
  interfaces: {{A: {{device: extA}}, B: {{device: extB}}}}
  forwardingEngines:
    fe1: {{cpus: "0-1", capacity: 0.5}}
{vnets}"#
    )
}

/// Frames that arrived at a vnet's port.
fn received(stats: &Value, vnet: &str, port: &str) -> u64 {
    stats["vnets"][vnet]["nodes"]["r1"]["ports"][port]["received"].as_u64().expect("a counter")
}

fn all_kinds(workers: usize) {
    let mut node = TestNode::start("tunnels");
    let outside = node.machine("mA", "extA");
    let beside = node.machine("mB", "extB");
    node.namespace()
        .run("ip addr add 192.0.2.1/24 dev extA; ip addr add fd00:a::1/64 dev extA nodad");
    outside.run("ip addr add 192.0.2.2/24 dev eth0; ip addr add fd00:a::2/64 dev eth0 nodad");
    beside.run("ip addr add 10.0.10.2/24 dev eth0; ip route add 10.0.1.0/24 via 10.0.10.1");
    let programs: Vec<_> = TUNNELS.iter().map(|tunnel| tunnel.make(&outside)).collect();
    node.apply(&spec(workers));

    for tunnel in &TUNNELS {
        let Tunnel { name, vnet, number, mtu, .. } = tunnel;
        eventually(&format!("the outside reaches {vnet}/h1 by {name}"), || {
            outside.try_run(&format!("ping -c1 -W1 -I {name} 10.0.1.2")).is_ok()
        });
        // Frames as long as the tunnel permits, unfragmented in both directions, and only in this
        // tunnel. IPv4 and ICMP have 28 bytes.
        let before = node.json(&["stats"]);
        let bytes = mtu - 28;
        let words = outside
            .run(&format!("ping -c20 -i0.02 -w60 -M do -s {bytes} -p a55a -I {name} 10.0.1.2"));
        assert!(all_answered(&words, 20) && !words.contains("wrong"), "{words}");
        // One byte more is too long, and h1 gets an error.
        let line = format!("ping -c1 -W5 -M do -s {} 10.0.{number}.2", bytes + 1);
        let words = node.try_exec(&format!("{vnet}/h1"), &line).expect_err("too long");
        assert!(words.contains(&format!("(mtu = {mtu})")), "{words}");
        let after = node.json(&["stats"]);
        let port = format!("eth{number}");
        assert!(received(&after, vnet, &port) >= received(&before, vnet, &port) + 20, "{name}");
        for other in TUNNELS.iter().filter(|other| other.number != *number) {
            // Others may receive neighbour requests now and then.
            let port = format!("eth{}", other.number);
            let more = received(&after, other.vnet, &port) - received(&before, other.vnet, &port);
            assert!(more < 20, "frames of {name} arrived by {}: {more}", other.name);
        }
    }
    eventually("the whole interface", || beside.try_run("ping -c1 -W1 10.0.1.2").is_ok());
    node.exec("red/h1", "ping -c5 -i0.02 -w60 -M do -s 1472 10.0.10.2");
    assert!(node.try_exec("blue/h1", "ping -c1 -W1 10.0.10.2").is_err(), "it is red's alone");

    // Frames that belong to nobody: another VNI, another port,
    // another source of one of our tunnels, or no VNI flag.
    let stats = node.json(&["stats"]);
    let all = |stats: &Value| -> u64 {
        TUNNELS.iter().map(|t| received(stats, t.vnet, &format!("eth{}", t.number))).sum()
    };
    outside.run(
        "ip addr add 192.0.2.3/24 dev eth0
         python3 -c '
import socket
def send(source, source_port, port, payload):
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    s.bind((source, source_port))
    for _ in range(100): s.sendto(payload, (\"192.0.2.1\", port))
frame = bytes([255] * 6 + [2, 0, 0, 0, 0, 1, 8, 0]) + bytes(50)
vni = lambda n: bytes([8, 0, 0, 0, 0, 0, n, 0])
send(\"192.0.2.2\", 40000, 4789, vni(9) + frame)
send(\"192.0.2.3\", 40000, 4789, vni(7) + frame)
send(\"192.0.2.2\", 40000, 4789, bytes([0, 0, 0, 0, 0, 0, 7, 0]) + frame)
send(\"192.0.2.2\", 5009, 5009, frame)
send(\"192.0.2.2\", 5009, 5007, frame)
send(\"192.0.2.3\", 5007, 5007, frame)
'",
    );
    // Everything sent before this ping was received before it.
    outside.run("ping -c1 -W5 -I red-v4 10.0.1.2");
    let now = node.json(&["stats"]);
    let more = all(&now) - all(&stats);
    assert!(more < 100, "{more} frames that belong to nobody");

    let mux = node.json(&["inspect", "substrate"])["status"]["mux"]["pid"].as_u64();
    let tasks = format!("/proc/{}/task", mux.expect("the mux runs"));
    let names = fs::read_dir(tasks).expect("threads of the mux").flatten().map(|task| {
        fs::read_to_string(task.path().join("comm")).unwrap_or_default().trim().to_owned()
    });
    assert_eq!(names.filter(|name| name.starts_with("worker")).count(), workers);
    for vnet in VNETS {
        let stats = node.json(&["stats", vnet]);
        let faults = &stats["vnets"][vnet]["nodes"]["r1"]["guests"]["0"]["faults"];
        assert_eq!(faults, 0, "{stats}");
    }
    drop(programs);
    node.pdp(&["down", "--purge"]);
    node.wait_pdpd();
    assert_eq!(node.leftovers(), [""; 0]);
}

#[test]
fn tunnels_of_two_vnets_work_with_one_worker() {
    all_kinds(1);
}

#[test]
fn tunnels_of_two_vnets_work_with_two_workers() {
    all_kinds(2);
}

/// Host with a tunnel, and faults of its network or its machine.
#[test]
fn underlay_problems_of_tunnels_are_reported() {
    let mut node = TestNode::start("underlay");
    let outside = node.machine("mA", "extA");
    let namespace = node.namespace();
    namespace.run("ip addr add 192.0.2.1/24 dev extA");
    outside.run(
        "ip addr add 192.0.2.2/24 dev eth0
         ip link add inside type vxlan id 7 local 192.0.2.2 remote 192.0.2.1 dstport 4789
         ip addr add 10.0.2.2/24 dev inside; ip link set inside up",
    );
    let spec = |mtu: &str| {
        format!(
            r#"
apiVersion: pdp/v1
kind: Substrate
metadata: {{name: node}}
spec:
  mux: {{cpus: "0-1", power: 0.5}}
  interfaces: {{A: {{device: extA}}}}
---
apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {{name: red}}
spec:
  nodes:
    h1: {{kind: host, interfaces: {{eth0: {{addresses: [10.0.2.1/24]{mtu}}}}}}}
  externals:
    out: {{interface: A, vxlan: {{vni: 7, local: 192.0.2.1, remote: 192.0.2.2}}}}
  links:
    - {{name: outward, endpoints: ["h1:eth0", "external:out"]}}
"#
        )
    };
    node.apply(&spec(""));
    let message = || {
        let red = node.json(&["inspect", "red"]);
        let text = red["status"]["links"][0]["message"].as_str().unwrap_or_default().to_owned();
        let of_all = red["status"]["message"].as_str().unwrap_or_default();
        assert!(text.is_empty() || of_all.contains(&format!("outward: {text}")), "{red}");
        text
    };
    let reports = |what: &str| eventually(what, || message().contains(what));
    let reports_nothing = || eventually("nothing is wrong", || message().is_empty());
    // The first frame waits for the next hop's MAC address, and is not lost.
    namespace.run("ip neigh flush dev extA");
    let words = node.exec("red/h1", "ping -c1 -W1 10.0.2.2");
    assert!(all_answered(&words, 1), "{words}");
    assert_eq!(message(), "");

    namespace.run("ip route add 192.0.2.2/32 dev extA mtu 1400");
    reports(
        "the path to 192.0.2.2 carries packets up to 1400 bytes, this link's have up to 1500: set \
         the mtu of h1:eth0 to at most 1350",
    );
    node.apply(&spec(", mtu: 1350"));
    reports_nothing();
    let words = node.exec("red/h1", "ping -c5 -i0.02 -w60 -M do -s 1322 10.0.2.2");
    assert!(all_answered(&words, 5), "{words}");

    outside.run("ip addr del 192.0.2.2/24 dev eth0");
    namespace.run("ip neigh flush dev extA");
    let pings = outside.spawn("ping -q -i0.2 10.0.2.1");
    let pinging = ["exec", "red/h1", "--", "ping", "-q", "-i0.2", "-w20", "10.0.2.2"];
    let from_h1 = Background::start(&mut node.pdp_command(&pinging));
    reports("192.0.2.2 does not answer ARP on extA");
    outside.run("ip link set eth0 down");
    reports("external A: extA has no carrier");
    let note = node.pdp(&["get"]);
    assert!(note.contains("outward: external A: extA has no carrier"), "{note}");
    outside.run("ip link set eth0 up; ip addr add 192.0.2.2/24 dev eth0");
    reports_nothing();
    drop((pings, from_h1));
    namespace.run("ip addr del 192.0.2.1/24 dev extA");
    reports("192.0.2.1 is not an address of this machine");
}
