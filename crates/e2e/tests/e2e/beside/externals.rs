//! External connections: a tunnel to a Linux machine over AF_XDP,
//! through restarts of mux and pdpd; tunnels and whole interfaces by
//! packet sockets; kernels that leave work to their devices; carriers.

use std::time::Instant;

use pdp_e2e::{TestMachine, TestNode, all_answered, eventually, kill};

const SPEC: &str = r#"
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
metadata: {name: red}
spec:
  nodes:
    r1:
      kind: router
      interfaces:
        eth0: {addresses: [10.0.1.1/24]}
        eth1: {addresses: [10.0.2.1/24]}
      dataPlane: {power: 0.2}
    h1:
      kind: host
      interfaces: {eth0: {addresses: [10.0.1.2/24], gateways: [10.0.1.1]}}
  externals:
    out: {interface: A, vxlan: {vni: 7, local: 192.0.2.1, remote: 192.0.2.2}}
  links:
    - endpoints: ["r1:eth0", "h1:eth0"]
    - endpoints: ["r1:eth1", "external:out"]
"#;

fn reaches(outside: &TestMachine) -> bool {
    outside.try_run("ping -c1 -W1 10.0.1.2").is_ok()
}

fn attached(node: &TestNode) -> bool {
    let substrate = node.json(&["inspect", "substrate"]);
    substrate["status"]["externals"][0]["attached"] == true
}

/// Makes `socket(AF_XDP)` fail as in a kernel without it,
/// for itself and for the program that it executes.
const WITHOUT_AF_XDP: &str = r#"
import ctypes, os, struct, sys
AF_XDP, SOCKET, EAFNOSUPPORT = 44, 41, 97
code = [(0x20, 0, 0, 0), (0x15, 0, 3, SOCKET), (0x20, 0, 0, 16), (0x15, 0, 1, AF_XDP),
        (6, 0, 0, 0x50000 | EAFNOSUPPORT), (6, 0, 0, 0x7fff0000)]
text = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
program = struct.pack("HxxxxxxQ", len(code), ctypes.addressof(text))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(22, 2, program, 0, 0) == 0, os.strerror(ctypes.get_errno())
os.execv(sys.argv[1], sys.argv[1:])
"#;

/// Without AF_XDP the network works, more slowly, and pdpd reports that.
#[test]
fn packet_sockets_replace_missing_af_xdp() {
    let mut node = TestNode::prepare("noxdp");
    node.pdpd_wrapper(&["python3", "-c", WITHOUT_AF_XDP]);
    node.start_pdpd();
    let outside = node.machine("mA", "extA");
    outside.run("ip addr add 10.0.2.2/24 dev eth0; ip route add 10.0.1.0/24 via 10.0.2.1");
    let spec = SPEC.replace(", vxlan: {vni: 7, local: 192.0.2.1, remote: 192.0.2.2}", "");
    node.apply(&spec);
    eventually("the outside reaches h1", || reaches(&outside));
    let message = |node: &TestNode| {
        let substrate = node.json(&["inspect", "substrate"])["status"].clone();
        assert_eq!(substrate["phase"], "running", "{substrate}");
        substrate["externals"][0]["message"].as_str().unwrap_or_default().to_owned()
    };
    assert!(message(&node).contains("packet sockets replace AF_XDP"), "{}", message(&node));
    // Applying again changes nothing.
    node.apply(&spec.replace("power: 0.2", "power: 0.3"));
    assert!(message(&node).contains("CONFIG_XDP_SOCKETS"), "{}", message(&node));
    eventually("the outside reaches h1", || reaches(&outside));
    // A pdpd with AF_XDP uses it.
    node.kill_pdpd();
    node.pdpd_wrapper(&[]);
    node.start_pdpd();
    eventually("nothing is told", || message(&node).is_empty());
    eventually("the outside reaches h1", || reaches(&outside));
}

#[test]
fn tunnel_survives_restarts_of_mux_and_pdpd() {
    let mut node = TestNode::start("ext");
    let outside = node.machine("mA", "extA");
    outside.run(
        "ip addr add 192.0.2.2/24 dev eth0
         ip link add vx0 type vxlan id 7 local 192.0.2.2 remote 192.0.2.1 dstport 4789 dev eth0
         ip link set vx0 up; ip addr add 10.0.2.2/24 dev vx0
         ip route add 10.0.1.0/24 via 10.0.2.1",
    );
    node.namespace().run("ip addr add 192.0.2.1/24 dev extA");
    node.apply(SPEC);
    eventually("the outside reaches h1", || reaches(&outside));
    assert!(attached(&node));
    let words = outside.run("ping -c20 -i0.02 -w60 10.0.1.2");
    assert!(all_answered(&words, 20), "{words}");
    let stats = node.json(&["stats"]);
    assert!(stats["externals"]["A"]["received"].as_u64().expect("a counter") >= 20, "{stats}");
    // Other packets go to the kernel.
    outside.run("ping -c1 -W2 192.0.2.1");

    // pdpd: no packet is lost, and the next one adopts the sockets.
    node.kill_pdpd();
    let words = outside.run("ping -c20 -i0.02 -w60 10.0.1.2");
    assert!(all_answered(&words, 20), "{words}");
    node.start_pdpd();
    eventually("the new pdpd knows the external", || attached(&node));
    let words = outside.run("ping -c20 -i0.02 -w60 10.0.1.2");
    assert!(all_answered(&words, 20), "{words}");

    // The mux: it gets new sockets.
    let pid =
        |node: &TestNode| node.json(&["inspect", "substrate"])["status"]["mux"]["pid"].as_u64();
    let mux = pid(&node).expect("the mux runs");
    kill(u32::try_from(mux).expect("a process id"));
    eventually("a new mux has the tunnel", || {
        pid(&node).is_some_and(|now| now != mux) && reaches(&outside)
    });

    // A device that vanishes and returns.
    node.namespace().run("ip link del extA");
    eventually("the loss is told", || !attached(&node));
    outside.run(&format!(
        "ip link add eth0 type veth peer name extA netns {}; ip link set eth0 up
         ip addr add 192.0.2.2/24 dev eth0
         ip link del vx0 2>/dev/null || true
         ip link add vx0 type vxlan id 7 local 192.0.2.2 remote 192.0.2.1 dstport 4789 dev eth0
         ip link set vx0 up; ip addr add 10.0.2.2/24 dev vx0
         ip route add 10.0.1.0/24 via 10.0.2.1; ethtool -K eth0 tx off >/dev/null",
        node.netns
    ));
    node.namespace().run(
        "ip link set extA up; ip addr add 192.0.2.1/24 dev extA; ethtool -K extA tx off >/dev/null",
    );
    eventually("the tunnel is back", || reaches(&outside));

    node.pdp(&["down", "--purge"]);
    node.wait_pdpd();
    assert_eq!(node.leftovers(), [""; 0]);
}

/// Machines A, by a tunnel, and B, by a whole interface, with a router between.
const PACKET_SPEC: &str = r#"
apiVersion: pdp/v1
kind: Substrate
metadata: {name: node}
spec:
  mux: {cpus: "0", power: 0.5, workers: WORKERS}
  interfaces: {A: {device: extA, attach: packet}, B: {device: extB, attach: packet}}
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
        eth0: {addresses: [10.0.1.1/24]}
        eth1: {addresses: [10.0.2.1/24]}
      dataPlane: {power: 0.2}
  externals:
    a: {interface: A, vxlan: {vni: 7, local: 192.0.2.1, remote: 192.0.2.2}}
    b: {interface: B}
  links:
    - endpoints: ["r1:eth0", "external:a"]
    - endpoints: ["r1:eth1", "external:b"]
"#;

/// Frames that B has sent and the node has not received, and the
/// reverse. These predate the node's use of the interface.
fn of_b(node: &TestNode, b: &TestMachine) -> [u64; 2] {
    let stats = node.json(&["stats"])["externals"]["B"].clone();
    let count = |name: &str| stats[name].as_u64().expect("a counter");
    assert!(stats["dropped"]["too-long"].is_null() && stats["dropped"]["refused"].is_null());
    let by_node = [count("received") + count("kernelDropped"), count("sent")];
    let by_b = ["tx", "rx"].map(|direction| {
        let words = b.run(&format!("cat /sys/class/net/eth0/statistics/{direction}_packets"));
        words.trim().parse::<u64>().expect("a count")
    });
    std::array::from_fn(|direction| by_b[direction].wrapping_sub(by_node[direction]))
}

/// The same, with no frame in flight between the two readings.
fn at_rest(node: &TestNode, b: &TestMachine) -> [u64; 2] {
    let mut before = of_b(node, b);
    eventually("no frame is on its way", || {
        std::mem::replace(&mut before, of_b(node, b)) == before
    });
    before
}

#[test]
fn packet_sockets_leave_other_frames_to_the_kernel() {
    let mut node = TestNode::start("packet");
    let (a, b) = (node.machine("mA", "extA"), node.machine("mB", "extB"));
    a.run(
        "ip addr add 192.0.2.2/24 dev eth0
         ip link add vx0 type vxlan id 7 local 192.0.2.2 remote 192.0.2.1 dstport 4789 dev eth0
         ip link set vx0 up; ip addr add 10.0.1.2/24 dev vx0
         ip route add 10.0.2.0/24 via 10.0.1.1",
    );
    // The sender leaves checksums to the device; the mux completes them.
    b.run(
        "ip addr add 10.0.2.2/24 dev eth0; ip route add 10.0.1.0/24 via 10.0.2.1
         ethtool -K eth0 tx on tso off gso off >/dev/null",
    );
    // The host has the router's address as well, and would answer for it.
    let host = node.namespace();
    host.run(
        "sysctl -qw net.ipv6.conf.extB.disable_ipv6=1
         ip addr add 192.0.2.1/24 dev extA; ip addr add 10.0.2.1/24 dev extB
         ethtool -K extA gro on; ethtool -K extB gro on",
    );
    for workers in [1, 2] {
        node.apply(&PACKET_SPEC.replace("WORKERS", &workers.to_string()));
        eventually("A reaches B", || a.try_run("ping -c1 -W1 10.0.2.2").is_ok());
        let before = at_rest(&node, &b);
        let no_ports = || host.run("awk '/^Udp: [0-9]/ {print $3}' /proc/net/snmp");
        let no_ports_before = no_ports();
        // Up to the MTU, 1,450 bytes in the tunnel.
        for bytes in [0, 1, 100, 1000, 1422] {
            let words = a.run(&format!("ping -c5 -i0.02 -w60 -Mdo -s{bytes} 10.0.2.2"));
            assert!(all_answered(&words, 5), "{words}");
        }
        let server = a.spawn("socat -u TCP-LISTEN:5000,reuseaddr EXEC:'wc -c'");
        eventually("A listens", || !a.run("ss -Hltn sport = 5000").is_empty());
        b.run("head -c 3000001 /dev/zero | socat -u - TCP:10.0.1.2:5000");
        assert_eq!(server.finish().trim(), "3000001");
        let mut seen = before;
        eventually("all frames are counted", || {
            let now = of_b(&node, &b);
            if now != seen {
                println!("before {before:?}, now {now:?}");
                seen = now;
            }
            now == before
        });
        // Only packets that are not PdP's go to the kernel.
        a.run("ping -c1 -W5 192.0.2.1");
        assert_eq!(host.run("ip neigh show dev extB"), "");
        assert_eq!(no_ports(), no_ports_before, "datagrams to ports without a socket");
    }
    // The host's frames may be merged (GRO), the vnet's must not.
    let aggregates = |device: &str| host.run(&format!("ethtool -k {device} | grep generic-rec"));
    assert!(aggregates("extA").contains(": on") && aggregates("extB").contains(": off"));
    let filters = |host: &TestMachine| host.run("tc filter show dev extB ingress");
    assert!(filters(&host).contains("pdp_tc"), "{}", filters(&host));
    node.pdp(&["down", "--purge"]);
    node.wait_pdpd();
    assert_eq!(filters(&host), "");
    assert_eq!(node.leftovers(), [""; 0]);
}

/// A is this machine, by a whole interface. B uses a VXLAN device of its kernel.
const KERNELS_SPEC: &str = r#"
apiVersion: pdp/v1
kind: Substrate
metadata: {name: node}
spec:
  mux: {cpus: "0", power: 0.5}
  interfaces: {A: {device: extA, attach: ATTACH}, B: {device: extB, attach: ATTACH}}
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
        eth0: {addresses: [10.0.1.1/24, "fd00:1::1/64"]}
        eth1: {addresses: [10.0.2.1/24, "fd00:2::1/64"]}
        eth2: {addresses: [10.0.3.1/24]}
      dataPlane: {power: 0.2}
    h1:
      kind: host
      interfaces:
        eth0: {addresses: [10.0.1.2/24, "fd00:1::2/64"], gateways: [10.0.1.1, "fd00:1::1"]}
      commands: [iperf3 -s]
  externals:
    a: {interface: A}
    b: {interface: B, vxlan: {vni: 7, local: 192.0.2.1, remote: 192.0.2.2}}
  links:
    - {name: h, endpoints: ["r1:eth0", "h1:eth0"]}
    - {name: a, endpoints: ["r1:eth1", "external:a"]}
    - {name: b, endpoints: ["r1:eth2", "external:b"]}
"#;

#[test]
fn mux_completes_kernel_offloads_and_passes_carrier() {
    let mut node = TestNode::start("kernels");
    // The kernel reports a lost carrier up to a second late, but a veth's at once. It recognises a
    // veth by the numbers of its two ends, so these must differ.
    node.namespace().run("ip link add pad0 type veth peer name pad1");
    let (a, b) = (node.machine("mA", "extA"), node.machine("mB", "extB"));
    let all_on = "ethtool -K eth0 tx on tso on gso on tx-udp-segmentation on >/dev/null";
    a.run(&format!(
        "{all_on}; ip addr add 10.0.2.2/24 dev eth0; ip route add 10.0.0.0/16 via 10.0.2.1
         ip addr add fd00:2::2/64 dev eth0 nodad; ip route add fd00::/16 via fd00:2::1"
    ));
    b.run(&format!(
        "{all_on}; ip addr add 192.0.2.2/24 dev eth0
         ip link add vx0 type vxlan id 7 local 192.0.2.2 remote 192.0.2.1 dstport 4789 dev eth0 udpcsum
         ip link set vx0 up; ip addr add 10.0.3.2/24 dev vx0; ip route add 10.0.0.0/16 via 10.0.3.1"
    ));
    node.namespace().run("ip addr add 192.0.2.1/24 dev extB");
    // 45 datagrams that the kernel need not cut: UDP_SEGMENT of linux/udp.h.
    let datagrams = "python3 -c \"import socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.setsockopt(17, 103, 1400)
s.sendto(bytes(45 * 1400), ('10.0.1.2', 9))\"";
    // A busy-polled socket replaces an ordinary one at the same queues.
    node.apply(&KERNELS_SPEC.replace("ATTACH", "af-xdp"));
    for attach in ["af-xdp-busy-poll", "packet"] {
        node.apply(&KERNELS_SPEC.replace("ATTACH", attach));
        for outside in [&a, &b] {
            eventually("h1 is reached", || outside.try_run("ping -c1 -W1 10.0.1.2").is_ok());
        }
        // The device lacks the network's own addresses.
        let all = node.namespace().run("ip -d -o link show extA");
        assert!(!all.contains("promiscuity 0"), "{attach}: {all}");
        for (outside, target) in [(&a, "10.0.1.2"), (&a, "fd00:1::2"), (&b, "10.0.1.2")] {
            // It takes a fraction of a second, or minutes with many
            // retransmissions. The server has one client at a time.
            for reverse in ["", "-R"] {
                let transfer = format!("timeout 20 iperf3 {reverse} -c {target} -n 20M");
                eventually("20 MB are carried", || outside.try_run(&transfer).is_ok());
            }
            if target == "10.0.1.2" {
                let received = || udp_datagrams(&node);
                let before = received();
                outside.run(datagrams);
                eventually("all datagrams have come", || received() == before + 45);
            }
        }
        // The host can reach A through the network, and both
        // kernels accept the packets' open checksums.
        let server = b.spawn("iperf3 -s -1");
        eventually("B listens", || !b.run("ss -Hltn sport = 5201").is_empty());
        a.run("timeout 20 iperf3 -c 10.0.3.2 -n 20M");
        server.finish();
        let stats = node.json(&["stats"]);
        for external in ["A", "B"] {
            let dropped = &stats["externals"][external]["dropped"];
            for reason in ["udp-checksum", "too-long", "not-cut"] {
                assert!(dropped[reason].is_null(), "{attach} {external} {dropped}");
            }
        }
        assert!(node.log_of("red.h1").contains("Accepted connection from fd00:2::2"));
    }
    // A device whose driver lacks XDP would lose long frames, and pdpd reports that.
    node.namespace().run("ip link add br0 type bridge; ip link set br0 up");
    for (attach, loses) in [("af-xdp", true), ("packet", false)] {
        let interface = format!("C: {{device: br0, attach: {attach}}}, A: {{");
        node.apply(&KERNELS_SPEC.replace("A: {", &interface).replace("ATTACH", "packet"));
        let substrate = node.json(&["inspect", "substrate"]);
        let all = substrate["status"]["externals"].as_array().expect("externals").clone();
        let bridge = all.iter().find(|external| external["name"] == "C").expect("C");
        assert_eq!(bridge["attached"], true, "{bridge}");
        let note = bridge["message"].as_str().unwrap_or_default();
        assert_eq!(note.contains("give attach: packet"), loses, "{bridge}");
    }
    // Reason for a frame dropped before classification.
    b.run(
        "ip link add vx9 type vxlan id 9 local 192.0.2.2 remote 192.0.2.1 dstport 4789 dev eth0
         ip link set vx9 up; ip addr add 10.0.9.2/24 dev vx9; ping -c1 -W1 10.0.9.1 || true",
    );
    let table = node.pdp(&["stats"]);
    let counts = |line: &str| line.starts_with("external B ") && line.contains("unknown-tunnel");
    assert!(table.lines().any(counts), "{table}");

    // The peer of A goes down, and B's device: ports lose their carrier, and get it back.
    let machines = [
        ("r1:eth1", &a, "eth0", "external A: extA has no carrier"),
        ("r1:eth2", &node.namespace(), "extB", "external B: extB is down (ip link set extB up)"),
    ];
    for (port, machine, device, why) in machines {
        let interface = port.split_once(':').expect("NODE:PORT").1;
        let up = || {
            let words = node.exec("red/r1", &format!("ip -o link show {interface}"));
            words.contains("LOWER_UP") && !words.contains("NO-CARRIER")
        };
        assert!(up(), "{port}");
        let links = || node.json(&["inspect", "red"])["status"]["links"].clone();
        let reasons = |links: &serde_json::Value| {
            let all = links.as_array().expect("links").iter();
            let down = all.filter(|link| link["carrier"] == false);
            down.map(|link| link["message"].as_str().expect("a reason").to_owned())
                .collect::<Vec<_>>()
        };
        for on in [false, true] {
            machine.run(&format!("ip link set {device} {}", if on { "up" } else { "down" }));
            let since = Instant::now();
            eventually("the port's carrier follows", || up() == on);
            println!("{port} {on}: seen after {:?}", since.elapsed());
            match on {
                false => assert_eq!(reasons(&links()), [why]),
                true => assert_eq!(reasons(&links()), [""; 0]),
            }
        }
    }
    // Its routes vanished with its carrier.
    a.run("ip route add 10.0.0.0/16 via 10.0.2.1");
    eventually("A reaches h1 again", || a.try_run("ping -c1 -W1 10.0.1.2").is_ok());
    // A new pdpd knows and reports it.
    a.run("ip link set eth0 down");
    let status = || node.json(&["inspect", "substrate"])["status"].clone();
    eventually("it is told", || status()["externals"][0]["carrier"] == false);
    assert!(status()["externals"][0]["attached"] == true && status()["phase"] == "running");
}

/// Datagrams to closed ports of h1, as its kernel counts them.
fn udp_datagrams(node: &TestNode) -> u64 {
    let words = node.exec("red/h1", "cat /proc/net/snmp");
    let udp = words.lines().filter(|line| line.starts_with("Udp: ")).nth(1).expect("counters");
    udp.split_whitespace().nth(2).and_then(|word| word.parse().ok()).expect("NoPorts")
}
