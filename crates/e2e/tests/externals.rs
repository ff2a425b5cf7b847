//! The outside: a tunnel to a Linux machine over AF_XDP, through restarts of mux and pdpd.

use pdp_e2e::{Machine, Node, all_answered, eventually, kill};

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

fn reaches(outside: &Machine) -> bool {
    outside.try_run("ping -c1 -W1 10.0.1.2").is_ok()
}

fn attached(node: &Node) -> bool {
    let substrate = node.json(&["inspect", "substrate"]);
    substrate["status"]["externals"][0]["attached"] == true
}

#[test]
fn a_tunnel_survives_the_mux_and_pdpd() {
    let mut node = Node::start("ext");
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
    // What is not PdP's goes to the kernel.
    outside.run("ping -c1 -W2 192.0.2.1");

    // pdpd: not a packet is lost, and the next one adopts the sockets.
    node.kill_pdpd();
    let words = outside.run("ping -c20 -i0.02 -w60 10.0.1.2");
    assert!(all_answered(&words, 20), "{words}");
    node.start_pdpd();
    eventually("the new pdpd knows the external", || attached(&node));
    let words = outside.run("ping -c20 -i0.02 -w60 10.0.1.2");
    assert!(all_answered(&words, 20), "{words}");

    // The mux: sockets are made anew.
    let pid = |node: &Node| node.json(&["inspect", "substrate"])["status"]["mux"]["pid"].as_u64();
    let mux = pid(&node).expect("the mux runs");
    kill(u32::try_from(mux).expect("a process id"));
    eventually("a new mux has the tunnel", || {
        pid(&node).is_some_and(|now| now != mux) && reaches(&outside)
    });

    // A device that goes and comes back.
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
