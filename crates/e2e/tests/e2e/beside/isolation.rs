//! Isolation of whole virtual networks, with every data plane and attachment side by side. No
//! frame, count, route, neighbour, sysctl, capture or API answer of one appears in another.
//!
//! All networks use the same names, MACs and addresses inside, and tunnels over one interface that
//! differ in one field. Each sends frames with its own pattern, and some misleading ones; captures
//! run at every port. The interface is attached by AF_XDP, and by packet sockets.
//! crates/mux/tests/isolation.rs tests the mux alone. External machines use Linux, so that none of
//! our own code decides about a frame's owner.

use std::fs;
use std::process::Command;
use std::time::Duration;

use pdp_e2e::{Background, TestNode, eventually};
use serde_json::json;

/// Kinds of data planes: our router with one guest, and with two in order; a program on TAPs;
/// DPDK's testpmd on memif; the mux; two joined routers with the kernel data plane, twice.
const PLANES: [&str; NETS] = ["router", "kernel", "tap", "memif", "ordered", "fastpath", "kernel"];

const NETS: usize = 7;

/// Names of the networks, which occur nowhere else.
const NAMES: [&str; NETS] = ["qazvn", "wsxvn", "edcvn", "rfvvn", "tgbvn", "yhnvn", "ujmvn"];

/// Tunnels: remote address, port and VNI. Each differs from another in one of them.
const TUNNELS: [(&str, u16, u32); NETS] = [
    ("192.0.2.2", 4789, 7),
    ("192.0.2.2", 4789, 8),
    ("192.0.2.3", 4789, 7),
    ("192.0.2.2", 4790, 7),
    ("192.0.2.3", 4789, 8),
    ("192.0.2.3", 4790, 7),
    ("192.0.2.2", 4790, 8),
];

/// Pings of each network.
const PINGS: usize = 30;

/// A bridge between two TAPs, as examples/taps.yaml has it.
const BRIDGE: &str = r#"
import select, socket, struct
ends = []
for name in ("eth0", "eth1"):
    end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
    end.bind((name, 3))
    end.setsockopt(263, 1, struct.pack("iHH8s", socket.if_nametoindex(name), 1, 0, b""))
    ends.append(end)
while True:
    for end in select.select(ends, [], [])[0]:
        frame, address = end.recvfrom(2048)
        if address[2] != socket.PACKET_OUTGOING:
            ends[1 - ends.index(end)].send(frame)
"#;

/// Misleading frames, each with its sender's pattern: with a VLAN tag, from others' MACs, and to
/// the node's own underlay address and MAC as another's tunnel.
const SPOOFS: &str = r#"
import socket, struct, sys
mark, mac = bytes.fromhex(sys.argv[1]) * 8, bytes.fromhex(sys.argv[2])
s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
s.bind((sys.argv[3], 0))
own = s.getsockname()[4]
def outer(remote, port, vni):
    inner = b"\xff" * 6 + own + b"\x88\xb5" + mark
    vxlan = bytes([8, 0, 0, 0]) + struct.pack(">I", vni << 8) + inner
    udp = struct.pack(">HHHH", 40000, port, 8 + len(vxlan), 0) + vxlan
    ip = bytearray(struct.pack(">BBHHHBBH4s4s", 0x45, 0, 20 + len(udp), 0, 0, 64, 17, 0,
        socket.inet_aton(remote), socket.inet_aton("192.0.2.1")))
    total = sum(struct.unpack(">10H", ip))
    total = (total & 0xffff) + (total >> 16)
    ip[10:12] = struct.pack(">H", ~((total & 0xffff) + (total >> 16)) & 0xffff)
    return mac + own + b"\x08\x00" + bytes(ip) + udp
for _ in range(20):
    for vlan in (0, 5, 7, 8, 4095):
        s.send(b"\xff" * 6 + own + struct.pack(">HHH", 0x8100, vlan, 0x88b5) + mark)
    for last in range(8):
        s.send(b"\xff" * 6 + bytes([2, 0, 0, 0, 0, last]) + b"\x88\xb5" + mark)
    for remote in ("192.0.2.2", "192.0.2.3"):
        for port in (4789, 4790):
            for vni in (7, 8):
                s.send(outer(remote, port, vni))
"#;

struct Net {
    name: &'static str,
    plane: &'static str,
    tunnel: (&'static str, u16, u32),
    /// The namespace at the tunnel's other end.
    outside: String,
    /// Two bytes that fill its frames.
    mark: String,
}

impl Net {
    fn is_routed(&self) -> bool {
        self.has_guests() || ["fastpath", "kernel"].contains(&self.plane)
    }

    /// True if guests with route tables forward.
    fn has_guests(&self) -> bool {
        ["router", "ordered"].contains(&self.plane)
    }

    /// Address that h1 pings: behind the router, or on its own subnet.
    fn target(&self) -> &'static str {
        if self.is_routed() { "10.0.2.2" } else { "10.0.1.3" }
    }

    fn spec(&self) -> String {
        let testpmd = "dpdk-testpmd --no-huge --no-shconf --no-pci --no-telemetry -m 128 \
            --lcores 0@{cpus},1@{cpus} \
            --vdev=net_memif0,role=client,id=0,socket=/run/pdp/memif/memif.sock,socket-abstract=no \
            --vdev=net_memif1,role=client,id=1,socket=/run/pdp/memif/memif.sock,socket-abstract=no \
            -- --forward-mode=io --total-num-mbufs=4096 --no-mlockall --no-flush-rx --auto-start \
            --stats-period=3600";
        let plane = match self.plane {
            "router" => json!({"power": 0.1}),
            "ordered" => json!({"power": 0.2, "guests": 2, "distribution": {"policy": "ordered"}}),
            "fastpath" | "kernel" => json!({"kind": self.plane}),
            "tap" => json!({"power": 0.1, "program": {
                "attach": "tap", "run": ["python3", "-c", BRIDGE]}}),
            _ => json!({"power": 0.3, "memory": "600Mi", "processes": 64, "program": {
                "attach": "memif", "run": testpmd}}),
        };
        let (interfaces, gateways) = match self.is_routed() {
            true => (
                json!({"eth0": {"addresses": ["10.0.1.1/24"]}, "eth1": {"addresses": ["10.0.2.1/24"]}}),
                json!(["10.0.1.1"]),
            ),
            false => (json!({"eth0": {}, "eth1": {}}), json!([])),
        };
        let (remote, port, vni) = self.tunnel;
        let outside = json!({"interface": "A", "vxlan": {
            "vni": vni, "port": port, "local": "192.0.2.1", "remote": remote}});
        let mut nodes = json!({
            "r1": {"kind": "router", "interfaces": interfaces, "dataPlane": plane},
            "h1": {"kind": "host", "interfaces": {"eth0": {
                "addresses": ["10.0.1.2/24"], "gateways": gateways}}},
        });
        let mut links = vec![
            json!({"endpoints": ["r1:eth0", "h1:eth0"]}),
            json!({"endpoints": [self.outer(), "external:out"]}),
        ];
        if self.plane == "kernel" {
            nodes["r1"]["interfaces"]["eth1"] = json!({"addresses": ["10.0.12.1/24"]});
            nodes["r1"]["routes"] = json!([{"to": "10.0.2.0/24", "via": "10.0.12.2"}]);
            nodes["r2"] = json!({
                "kind": "router",
                "interfaces": {
                    "eth0": {"addresses": ["10.0.2.1/24"]}, "eth1": {"addresses": ["10.0.12.2/24"]}},
                "routes": [{"to": "10.0.1.0/24", "via": "10.0.12.1"}],
                "dataPlane": plane,
            });
            links.push(json!({"endpoints": ["r1:eth1", "r2:eth1"]}));
        }
        json!({
            "apiVersion": "pdp/v1",
            "kind": "VirtualNetwork",
            "metadata": {"name": self.name},
            "spec": {"nodes": nodes, "externals": {"out": outside}, "links": links},
        })
        .to_string()
    }

    /// Port of the tunnel.
    fn outer(&self) -> &'static str {
        if self.plane == "kernel" { "r2:eth0" } else { "r1:eth1" }
    }

    /// Ports that the mux captures.
    fn ports(&self) -> [String; 2] {
        ["r1:eth0", self.outer()].map(|port| format!("{}/{port}", self.name))
    }

    /// Nodes and their interfaces that are captured from inside.
    fn watched(&self) -> &'static [(&'static str, &'static str)] {
        match self.plane {
            "kernel" => &[("h1", "eth0"), ("r1", "eth1"), ("r2", "eth1")],
            _ => &[("h1", "eth0")],
        }
    }

    /// Own pattern, as in frames.
    fn pattern(&self) -> Vec<u8> {
        let byte = |at: usize| u8::from_str_radix(&self.mark[at..at + 2], 16).expect("hex");
        [byte(0), byte(2)].repeat(8)
    }
}

/// Networks with a new assignment of plane, tunnel and position.
fn networks(node: &TestNode, round: usize) -> Vec<Net> {
    let net = |at: usize| Net {
        name: NAMES[at],
        plane: PLANES[(at * 3 + round) % NETS],
        tunnel: TUNNELS[(at + round * 2) % NETS],
        outside: format!("{}-o{at}", node.id),
        mark: format!("a{at}5{}", at + 1),
    };
    (0..NETS).map(net).collect()
}

fn is_in(bytes: &[u8], pattern: &[u8]) -> bool {
    bytes.windows(pattern.len()).any(|window| window == pattern)
}

fn isolated(round: usize) {
    let mut node = TestNode::start("isolated");
    let outside = node.machine("mA", "extA");
    node.namespace().run("ip addr add 192.0.2.1/24 dev extA");
    // A second machine on the same wire: Linux has each VNI once.
    let second = Namespace::new(&format!("{}-m3", node.id));
    outside.run(&format!(
        "ip addr add 192.0.2.2/24 dev eth0
         ip link add link eth0 name mv type macvlan mode bridge
         ip link set mv netns {0} name eth0; ip -n {0} link set eth0 up
         ip -n {0} addr add 192.0.2.3/24 dev eth0",
        second.0
    ));
    let nets = networks(&node, round);
    let _namespaces: Vec<Namespace> = nets.iter().map(|net| Namespace::new(&net.outside)).collect();
    for net in &nets {
        let (own, port, vni) = net.tunnel;
        let address = if net.is_routed() { "10.0.2.2" } else { "10.0.1.3" };
        let machine = if own == "192.0.2.2" { &outside.netns } else { &second.0 };
        pdp_e2e::sh(&format!(
            "ip -n {machine} link add vx type vxlan id {vni} local {own} remote 192.0.2.1 dstport {port} dev eth0
             ip -n {machine} link set vx netns {0} address 02:00:00:00:00:99
             ip -n {0} addr add {address}/24 dev vx; ip -n {0} link set vx up mtu 1450
             ip -n {0} route add default via 10.0.2.1 || true",
            net.outside
        ));
    }
    let attach = ["af-xdp", "packet"][round % 2];
    node.apply(&format!(
        "{{apiVersion: pdp/v1, kind: Substrate, metadata: {{name: node}}, spec: {{
            mux: {{cpus: \"0\", power: 0.3}}, interfaces: {{A: {{device: extA, attach: {attach}}}}},
            forwardingEngines: {{fe1: {{cpus: \"1\", capacity: 1}}}}}}}}"
    ));
    for net in &nets {
        node.apply(&net.spec());
    }
    for (at, net) in nets.iter().enumerate() {
        let h1 = format!("{}/h1", net.name);
        eventually(&format!("{} ({}) reaches the outside", net.name, net.plane), || {
            node.try_exec(&h1, &format!("ping -c1 -W1 {}", net.target())).is_ok()
        });
        let r1 = format!("{}/r1", net.name);
        if net.is_routed() {
            node.exec(&r1, &format!("ip route add blackhole 203.0.113.{}/32", at + 1));
        }
        node.exec(
            &r1,
            &format!("ip neigh add 198.51.100.{} lladdr 02:00:00:00:01:00 dev eth0", at + 1),
        );
        node.exec(&r1, &format!("sysctl -qw net.ipv4.ip_default_ttl={}", at + 100));
    }

    // Captures at every port, while all send. The last network sends nothing.
    let (silent, loud) = nets.split_last().expect("some");
    let before = node.json(&["stats", silent.name]);
    let mut captures = Vec::new();
    for port in nets.iter().flat_map(Net::ports) {
        let file = node.directory.join(port.replace(['/', ':'], "-"));
        let arguments = ["capture", &port, "-w", file.to_str().expect("a path")];
        let capture = Background::start(&mut node.pdp_command(&arguments));
        captures.push((port, file, capture));
    }
    // For the ports beyond the mux's limit of captures, and
    // for kernel links, the nodes themselves capture.
    for net in &nets {
        for (name, device) in net.watched() {
            let port = format!("{}/{name}", net.name);
            let file = node.directory.join(port.replace('/', "-"));
            let nodes = node.json(&["inspect", net.name])["status"]["nodes"].clone();
            let nodes = nodes.as_array().expect("nodes");
            let found = nodes.iter().find(|found| found["name"] == *name).expect("the node");
            let mut capture = Command::new("nsenter");
            capture.args(["-n", "-t", &found["control"]["pid"].to_string(), "tcpdump", "-U"]);
            capture.args(["-i", device, "-w", file.to_str().expect("a path"), "-Z", "root"]);
            captures.push((port, file, Background::start(&mut capture)));
        }
    }
    eventually("captures run", || {
        captures.iter().all(|(_, file, _)| fs::metadata(file).is_ok_and(|file| file.len() >= 24))
    });
    let mac = node.namespace().run("cat /sys/class/net/extA/address").replace(':', "");
    for net in loud {
        let h1 = format!("{}/h1", net.name);
        let line = format!("ping -c{PINGS} -i0.02 -W9 -s 400 -p {} {}", net.mark, net.target());
        let words = node.exec(&h1, &line);
        // The number of answers does not matter here: testpmd uses the others' CPU.
        let some = words.contains("bytes from") && !words.contains("wrong");
        assert!(some, "{}: {words}", net.name);
        let spoofs = |from: &str, port: &str| {
            let spoofs = ["python3", "-c", SPOOFS, &net.mark, mac.trim(), port];
            node.pdp(&[&["exec", from, "--"], spoofs.as_slice()].concat());
        };
        spoofs(&h1, "eth0");
        if net.plane == "kernel" {
            spoofs(&format!("{}/r1", net.name), "eth1");
        }
    }
    std::thread::sleep(Duration::from_millis(300));
    for (port, file, capture) in captures {
        capture.stop("INT");
        let bytes = fs::read(&file).expect("a capture");
        for net in &nets {
            let seen = is_in(&bytes, &net.pattern());
            let own = port.starts_with(net.name);
            assert!(own || !seen, "at {port} a frame of {} ({})", net.name, net.plane);
            let spoke = loud.iter().any(|loud| loud.name == net.name);
            assert!(!own || seen == spoke, "{port} has not its own frames ({})", net.plane);
        }
    }

    // Counters of the silent network: almost zero (neighbour requests are possible).
    let after = node.json(&["stats", silent.name]);
    let counted = |stats: &serde_json::Value| -> u64 {
        let nodes = stats["vnets"][silent.name]["nodes"].as_object().expect("nodes");
        let ports = nodes.values().flat_map(|node| node["ports"].as_object().expect("ports"));
        ports.map(|(_, port)| port["received"].as_u64().unwrap_or(0)).sum()
    };
    let more = counted(&after) - counted(&before);
    assert!(more < PINGS as u64, "{}: {more} frames", silent.name);

    // Routes, and the API's answers.
    for (at, net) in nets.iter().enumerate() {
        let r1 = format!("{}/r1", net.name);
        let mut answers = vec![
            node.pdp(&["inspect", net.name]),
            node.pdp(&["inspect", net.name, "--format", "json"]),
            node.pdp(&["stats", net.name, "--format", "json"]),
            node.pdp(&["logs", &r1]),
            node.exec(&r1, "ip route show table all"),
            node.exec(&r1, "ip neigh"),
        ];
        if !["fastpath", "kernel"].contains(&net.plane) {
            answers.push(node.pdp(&["logs", &r1, "--guest", "0"]));
        }
        let ttl = node.exec(&r1, "sysctl -n net.ipv4.ip_default_ttl");
        assert_eq!(ttl.trim(), (at + 100).to_string(), "{}", net.name);
        if net.has_guests() {
            eventually("the guest has the route", || {
                let routes = node.pdp(&["routes", &r1, "--guest", "0"]);
                routes.contains(&format!("203.0.113.{}", at + 1))
            });
            answers.push(node.pdp(&["routes", &r1]));
            answers.push(node.pdp(&["routes", &r1, "--guest", "0"]));
        }
        for answer in answers {
            for (other_at, other) in nets.iter().enumerate().filter(|(other, _)| *other != at) {
                let route = format!("203.0.113.{}", other_at + 1);
                let neighbour = format!("198.51.100.{} ", other_at + 1);
                let shows = [other.name, &route, &neighbour].iter().any(|it| answer.contains(*it));
                assert!(!shows, "{} in an answer about {}: {answer}", other.name, net.name);
            }
        }
    }

    // One is deleted, the others stay.
    node.pdp(&["delete", nets[0].name]);
    for net in &nets[1..] {
        let line = format!("ping -c1 -W1 {}", net.target());
        eventually(&format!("{} goes on", net.name), || {
            node.try_exec(&format!("{}/h1", net.name), &line).is_ok()
        });
    }
}

/// Network namespace, removed when dropped.
struct Namespace(String);

impl Namespace {
    fn new(name: &str) -> Self {
        pdp_e2e::sh(&format!("ip netns add {name}; ip -n {name} link set lo up"));
        Self(name.to_owned())
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = std::process::Command::new("ip").args(["netns", "del", &self.0]).status();
    }
}

#[test]
fn networks_see_nothing_of_each_other() {
    isolated(0);
}

#[test]
fn networks_stay_isolated_with_other_plane_pairings() {
    isolated(1);
}
