//! Packets that forwarding guests leave to the control guest's kernel are answered as by any
//! router: with the right ICMP message, from the right address, over IPv4 and IPv6. This also holds
//! for packets that this kernel itself forwards.
//!
//! The kernel limits ICMP errors to one address (icmp_ratelimit, error_burst), so an answer may be
//! missing for two seconds. Tests with many requests therefore use several addresses.

use pdp_e2e::{TestMachine, TestNode, eventually};

/// outside (tunnel, 1450) - r1 - (1400) - r2 - (1300) - h2. Static routes by FRR, and no others.
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
        eth0: {addresses: [10.0.1.1/24, "fd00:1::1/64"]}
        eth1: {addresses: [10.0.12.1/30, "fd00:12::1/64"], mtu: 1400}
      files:
        /etc/frr/zebra.conf: {content: "log stdout\n", owner: "frr:frr"}
        /etc/frr/staticd.conf:
          owner: "frr:frr"
          content: |
            ip route 10.0.2.0/24 10.0.12.2
            ipv6 route fd00:2::/64 fd00:12::2
            ip route 10.99.1.0/24 reject
            ipv6 route fd00:99:1::/64 reject
            ip route 10.99.2.0/24 blackhole
            ipv6 route fd00:99:2::/64 blackhole
      commands: &frr
        - /usr/lib/frr/zebra
        - sh -c "until [ -S /run/frr/zserv.api ]; do sleep 0.05; done; exec /usr/lib/frr/staticd"
      dataPlane: PLANE
    r2:
      kind: router
      interfaces:
        eth0: {addresses: [10.0.2.1/24, "fd00:2::1/64"], mtu: 1300}
        eth1: {addresses: [10.0.12.2/30, "fd00:12::2/64"], mtu: 1400}
      files:
        /etc/frr/zebra.conf: {content: "log stdout\n", owner: "frr:frr"}
        /etc/frr/staticd.conf:
          owner: "frr:frr"
          content: |
            ip route 10.0.1.0/24 10.0.12.1
            ipv6 route fd00:1::/64 fd00:12::1
      commands: *frr
      dataPlane: PLANE
    h2:
      kind: host
      interfaces:
        eth0:
          addresses: [10.0.2.2/24, "fd00:2::2/64"]
          gateways: [10.0.2.1, "fd00:2::1"]
          mtu: 1300
  externals:
    out: {interface: A, vxlan: {vni: 7, local: 192.0.2.1, remote: 192.0.2.2}}
  links:
    - endpoints: ["r1:eth0", "external:out"]
    - endpoints: ["r1:eth1", "r2:eth1"]
    - endpoints: ["r2:eth0", "h2:eth0"]
"#;

const OUTSIDE: &str = "
    ip addr add 192.0.2.2/24 dev eth0
    ip link add vx0 type vxlan id 7 local 192.0.2.2 remote 192.0.2.1 dstport 4789 dev eth0
    ip link set vx0 up
    for n in 2 3 4 5; do ip addr add 10.0.1.$n/24 dev vx0; done
    ip route add default via 10.0.1.1
    ip addr add fd00:1::2/64 dev vx0 nodad; ip -6 route add default via fd00:1::1";

/// Repeats a command until its output has all of these.
#[track_caller]
fn eventually_prints(outside: &TestMachine, command: &str, words: &[&str]) {
    eventually(&format!("`{command}` says {words:?}"), || {
        // Our own kernel would report a path MTU that it has learned before.
        outside.run("ip route flush cache; ip -6 route flush cache");
        let output = outside.run(&format!("({command}) || true"));
        words.iter().all(|words| output.contains(words))
    });
}

/// Addresses of the hops, in order.
fn hops(words: &str) -> Vec<&str> {
    words.lines().skip(1).filter_map(|line| line.split_whitespace().nth(1)).collect()
}

const TRACEROUTE: &str = "traceroute -n -q1 -N1 -w3";

/// A counter of r1's port to the outside.
fn counter(node: &TestNode, name: &str) -> u64 {
    let stats = node.json(&["stats", "red"]);
    let port = &stats["vnets"]["red"]["nodes"]["r1"]["ports"]["eth0"];
    port[name].as_u64().or(port["dropped"][name].as_u64()).unwrap_or(0)
}

/// Data planes.
const GUESTS: &str = "{power: 0.2}";
const KERNEL: &str = "{kind: kernel}";

#[test]
fn kernel_answers_exceptions_for_forwarding_guests() {
    answers("exc", GUESTS);
}

#[test]
fn kernel_answers_exceptions_where_it_forwards() {
    answers("exckernel", KERNEL);
}

fn answers(name: &str, plane: &str) {
    let guests = plane == GUESTS;
    let mut node = TestNode::start(name);
    let outside = node.machine("mA", "extA");
    outside.run(OUTSIDE);
    node.namespace().run("ip addr add 192.0.2.1/24 dev extA");
    node.apply(&SPEC.replace("PLANE", plane));
    node.exec("red/r1", "ip route add prohibit 10.99.3.0/24");
    node.exec("red/r1", "ip route add prohibit fd00:99:3::/64");
    for address in ["10.0.2.2", "fd00:2::2"] {
        eventually("the outside reaches h2", || {
            outside.try_run(&format!("ping -c1 -W1 {address}")).is_ok()
        });
    }
    let punted = counter(&node, "punted");
    outside.run("ping -q -c20 -i0.02 -W2 10.0.2.2; ping -q -c20 -i0.02 -W2 fd00:2::2");
    let is_punted = counter(&node, "punted") >= punted + 20;
    assert_eq!(is_punted, !guests, "what guests forward is not punted");

    // Each hop is shown, both ways.
    let forth = [
        ("10.0.2.2", ["10.0.1.1", "10.0.12.2", "10.0.2.2"]),
        ("fd00:2::2", ["fd00:1::1", "fd00:12::2", "fd00:2::2"]),
    ];
    for (to, path) in forth {
        eventually("the outside traces its way", || {
            hops(&outside.run(&format!("{TRACEROUTE} {to}"))) == path
        });
    }
    let back = [
        ("10.0.1.2", ["10.0.2.1", "10.0.12.1", "10.0.1.2"]),
        ("fd00:1::2", ["fd00:2::1", "fd00:12::1", "fd00:1::2"]),
    ];
    for (to, path) in back {
        eventually("h2 traces its way", || {
            hops(&node.exec("red/h2", &format!("{TRACEROUTE} {to}"))) == path
        });
    }

    let ping = "ping -n -c1 -W2";
    // The path's MTU, in two steps. Packets that fit arrive.
    eventually_prints(
        &outside,
        &format!("{ping} -M do -s 1412 10.0.2.2"),
        &["From 10.0.1.1", "mtu = 1400"],
    );
    eventually_prints(
        &outside,
        &format!("{ping} -M do -s 1322 10.0.2.2"),
        &["From 10.0.12.2", "mtu = 1300"],
    );
    eventually_prints(&outside, &format!("{ping} -M do -s 1272 10.0.2.2"), &["1 received"]);
    eventually_prints(
        &outside,
        &format!("{ping} -M do -s 1392 fd00:2::2"),
        &["From fd00:1::1", "mtu=1400"],
    );
    eventually_prints(
        &outside,
        &format!("{ping} -M do -s 1302 fd00:2::2"),
        &["From fd00:12::2", "mtu=1300"],
    );
    eventually_prints(&outside, &format!("{ping} -M do -s 1252 fd00:2::2"), &["1 received"]);
    // Without DF the kernel makes fragments; it also writes into options.
    eventually_prints(&outside, &format!("{ping} -M dont -s 1412 10.0.2.2"), &["1 received"]);
    eventually_prints(
        &outside,
        &format!("{ping} -R 10.0.2.2"),
        &["10.0.12.1", "10.0.2.1", "10.0.2.2"],
    );

    // No route.
    let r1 = ["From 10.0.1.1", "From fd00:1::1"];
    for (from, to, words) in [
        ("10.0.1.3", "203.0.113.1", [r1[0], "Destination Net Unreachable"]),
        ("10.0.1.4", "10.99.1.1", [r1[0], "Destination Host Unreachable"]),
        ("10.0.1.5", "10.99.3.1", [r1[0], "Packet filtered"]),
        ("fd00:1::2", "2001:db8::1", [r1[1], "Destination unreachable: No route"]),
        ("fd00:1::2", "fd00:99:1::1", [r1[1], "Destination unreachable: No route"]),
        ("fd00:1::2", "fd00:99:3::1", [r1[1], "unreachable: Administratively prohibited"]),
    ] {
        eventually_prints(&outside, &format!("{ping} -I {from} {to}"), &words);
    }
    // Absent neighbours: r2 requests them for three seconds.
    let words = ["From 10.0.12.2", "Host Unreachable", "From fd00:12::2", "Address unreachable"];
    let both = "ping -n -c1 -W5 10.0.2.99 & ping -n -c1 -W5 fd00:2::99; wait";
    eventually_prints(&outside, both, &words);
    // A blackhole is silent.
    let dropped = counter(&node, "guest-blackhole");
    for to in ["10.99.2.1", "fd00:99:2::1"] {
        let output = outside.run(&format!("ping -n -c2 -i0.2 -W1 {to} || true"));
        assert!(output.contains(" 0 received") && !output.contains("From"), "{output}");
    }
    assert_eq!(counter(&node, "guest-blackhole"), dropped + if guests { 4 } else { 0 });

    // With a TTL that ends at the addressed router.
    for (ttl, to) in [(1, "10.0.1.1"), (1, "fd00:1::1"), (2, "10.0.12.2"), (2, "fd00:12::2")] {
        eventually_prints(&outside, &format!("{ping} -t{ttl} {to}"), &["1 received"]);
    }
}

/// h1 - r1 - h2, with FRR's VRRP on r1: 10.1.0.254 is h1's gateway.
const VRRP: &str = r#"
apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {name: red}
spec:
  nodes:
    r1:
      kind: router
      interfaces:
        eth0: {addresses: [10.1.0.1/24]}
        eth1: {addresses: [10.2.0.1/24]}
      files:
        /etc/frr/zebra.conf: {content: "log stdout\n", owner: "frr:frr"}
        /etc/frr/vrrpd.conf:
          owner: "frr:frr"
          content: |
            log stdout
            interface eth0
             vrrp 5
             vrrp 5 advertisement-interval 100
             vrrp 5 ip 10.1.0.254
      commands:
        - >-
          sh -ec "ip link add vrrp4 link eth0 type macvlan mode bridge;
          ip link set vrrp4 addrgenmode random address 00:00:5e:00:01:05;
          ip addr add 10.1.0.254/24 dev vrrp4; ip link set vrrp4 up;
          sysctl -qw net.ipv4.conf.eth0.arp_ignore=1; exec /usr/lib/frr/zebra"
        - sh -c "until [ -S /run/frr/zserv.api ]; do sleep 0.05; done; exec /usr/lib/frr/vrrpd"
      dataPlane: PLANE
    h1:
      kind: host
      interfaces: {eth0: {addresses: [10.1.0.2/24], gateways: [10.1.0.254]}}
    h2:
      kind: host
      interfaces: {eth0: {addresses: [10.2.0.2/24], gateways: [10.2.0.1]}}
  links:
    - endpoints: ["r1:eth0", "h1:eth0"]
    - endpoints: ["r1:eth1", "h2:eth0"]
"#;

#[test]
fn frr_vrrp_gateway_works_with_forwarding_guests() {
    is_a_gateway("vrrp", GUESTS);
}

#[test]
fn frr_vrrp_gateway_works_with_kernel_forwarding() {
    is_a_gateway("vrrpkernel", KERNEL);
}

fn is_a_gateway(name: &str, plane: &str) {
    let node = TestNode::start(name);
    node.apply(pdp_e2e::specs::SUBSTRATE);
    node.apply(&VRRP.replace("PLANE", plane));
    eventually("r1 is master", || {
        let shown = pdp_e2e::routing::vtysh(&node, "red/r1", "show vrrp json");
        shown.is_ok_and(|shown| shown[0]["v4"]["status"] == "Master")
    });
    eventually("h1 reaches h2", || node.try_exec("red/h1", "ping -c1 -W1 10.2.0.2").is_ok());
    let neighbours = node.exec("red/h1", "ip neigh show 10.1.0.254");
    assert!(neighbours.contains("00:00:5e:00:01:05"), "{neighbours}");
    let punted = counter(&node, "punted");
    node.exec("red/h1", "ping -q -c20 -i0.02 -w5 10.2.0.2");
    let is_punted = counter(&node, "punted") >= punted + 20;
    assert_eq!(is_punted, plane == KERNEL, "what guests forward is not punted");
}
