//! Links with more than two ends or kinds: a segment of eight hosts and two external machines, and
//! a transit between tunnels of two kinds.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use pdp_e2e::{TestMachine, TestNode, all_answered, eventually};
use serde_json::Value;

const HOSTS: usize = 8;

fn spec() -> String {
    let hosts: String = (1..=HOSTS)
        .map(|n| {
            format!(
                "    h{n}: {{kind: host, interfaces: {{eth0: {{addresses: [10.1.0.{n}/24]}}}}}}\n"
            )
        })
        .collect();
    let ends: String = (1..=HOSTS).map(|n| format!("\"h{n}:eth0\", ")).collect();
    format!(
        r#"
apiVersion: pdp/v1
kind: Substrate
metadata: {{name: node}}
spec:
  mux: {{cpus: "0-1", power: 0.5}}
  interfaces: {{A: {{device: extA}}, B: {{device: extB}}}}
---
apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {{name: red}}
spec:
  nodes:
{hosts}  externals:
    a: {{interface: A, vxlan: {{vni: 7, local: 192.0.2.1, remote: 192.0.2.2}}}}
    b: {{interface: B, vxlan: {{vni: 7, local: 198.51.100.1, remote: 198.51.100.2}}}}
  links:
    - {{name: lan, endpoints: [{ends}"external:a", "external:b"]}}
---
apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {{name: via}}
spec:
  nodes: {{}}
  externals:
    a: {{interface: A, vxlan: {{vni: 8, local: 192.0.2.1, remote: 192.0.2.2}}}}
    b: {{interface: B, udp: {{localPort: 5008, remotePort: 5008, local: 198.51.100.1, remote: 198.51.100.2}}}}
  links:
    - {{name: transit, rate: 100Mbps, endpoints: ["external:a", "external:b"]}}
"#
    )
}

fn count(stats: &Value, vnet: &str, node: &str, port: &str, what: &str) -> u64 {
    stats["vnets"][vnet]["nodes"][node]["ports"][port][what].as_u64().expect("a counter")
}

/// Addresses by ends, as in `pdp fdb`.
fn fdb(node: &TestNode) -> BTreeMap<String, Vec<String>> {
    let mut ends: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let text = |entry: &Value, key: &str| entry[key].as_str().expect("a text").to_owned();
    for entry in node.json(&["fdb", "red/lan"]).as_array().expect("a list") {
        ends.entry(text(entry, "endpoint")).or_default().push(text(entry, "mac"));
    }
    ends
}

/// An interface gets a capacity, another one, and none again, while its sockets stay. Nothing is
/// lost meanwhile. Links over it never exceed the capacity.
fn capacities_change(node: &TestNode, a: &TestMachine) {
    let ping = a.spawn("ping -c200 -i0.01 -w60 10.2.0.2");
    let guaranteed = "100Mbps, at: {\"external:b\": {guarantee: 1Mbps}}";
    let guaranteed = spec().replace("100Mbps", guaranteed);
    let with = |mbps: u64| {
        let interface = format!("B: {{device: extB, capacity: {mbps}Mbps}}");
        node.apply(&guaranteed.replace("B: {device: extB}", &interface));
    };
    with(4);
    with(2);
    node.apply(&spec());
    assert!(all_answered(&ping.finish(), 200));
    with(1);
    // 603,200 bits on the interface, which ping sends in 0.1 s without a queue.
    let start = Instant::now();
    let words = a.run("ping -c50 -i0.002 -s 1400 -w60 10.2.0.2");
    assert!(all_answered(&words, 50), "{words}");
    assert!(start.elapsed() > Duration::from_millis(550), "{words}");
    let error = node.try_apply(&guaranteed).expect_err("no capacity to guarantee of");
    assert!(
        error.contains("interface B has no capacity, so links can't have guarantees"),
        "{error}"
    );
}

#[test]
fn segment_and_transit_join_hosts_and_tunnels() {
    let mut node = TestNode::start("segments");
    let [a, b] = [node.machine("mA", "extA"), node.machine("mB", "extB")];
    node.namespace().run("ip addr add 192.0.2.1/24 dev extA; ip addr add 198.51.100.1/24 dev extB");
    for (machine, net, last) in [(&a, "192.0.2", 101), (&b, "198.51.100", 102)] {
        machine.run(&format!(
            "ip addr add {net}.2/24 dev eth0
             ip link add lan type vxlan id 7 local {net}.2 remote {net}.1 dstport 4789
             ip addr add 10.1.0.{last}/24 dev lan; ip link set lan mtu 1450 up"
        ));
    }
    a.run(
        "ip link add far type vxlan id 8 local 192.0.2.2 remote 192.0.2.1 dstport 4789
         ip addr add 10.2.0.1/24 dev far; ip link set far mtu 1450 up",
    );
    let address = "UDP4-DATAGRAM:198.51.100.1:5008,bind=198.51.100.2:5008";
    let _program = b.spawn(&format!("socat {address} TUN,tun-type=tap,tun-name=far,iff-no-pi"));
    eventually("the TAP of socat", || b.try_run("ip link show far").is_ok());
    b.run("ip addr add 10.2.0.2/24 dev far; ip link set far mtu 1450 up");
    node.apply(&spec());

    // All stations reach each other, with frames of the full
    // MTU, except the external machines among themselves.
    let all: String = (1..=HOSTS).chain([101, 102]).map(|n| format!("10.1.0.{n} ")).collect();
    let ping = "ping -q -c1 -W5 -M do -s 1422";
    for n in 1..=HOSTS {
        let line = format!("for to in {all}; do {ping} $to || exit 1; done");
        node.pdp(&["exec", &format!("red/h{n}"), "--", "sh", "-c", &line]);
    }
    for machine in [&a, &b] {
        let hosts: String = (1..=HOSTS).map(|n| format!("10.1.0.{n} ")).collect();
        machine.run(&format!("for to in {hosts}; do {ping} $to || exit 1; done"));
    }
    assert!(a.try_run("ping -q -c1 -W1 10.1.0.102").is_err(), "from a tunnel to another");
    let known = fdb(&node);
    let red = node.json(&["inspect", "red"]);
    for found in red["status"]["nodes"].as_array().expect("nodes") {
        let name = found["name"].as_str().expect("a name");
        let mac = found["ports"][0]["mac"].as_str().expect("an address").to_owned();
        assert_eq!(known[&format!("{name}:eth0")], [mac], "{known:?}");
    }
    for (machine, end) in [(&a, "external:a"), (&b, "external:b")] {
        let mac = machine.run("cat /sys/class/net/lan/address").trim().to_owned();
        assert_eq!(known[end], [mac], "{known:?}");
    }
    // A unicast frame only goes to its destination.
    let before = node.json(&["stats", "red"]);
    let words = node.exec("red/h1", "ping -c20 -i0.02 -w60 10.1.0.2");
    assert!(all_answered(&words, 20), "{words}");
    let after = node.json(&["stats", "red"]);
    let more = |of: &str, port: &str, what: &str| {
        count(&after, "red", of, port, what) - count(&before, "red", of, port, what)
    };
    assert!(more("h2", "eth0", "received") >= 20);
    for n in 3..=HOSTS {
        assert!(more(&format!("h{n}"), "eth0", "received") < 10, "h{n}");
    }
    assert!(more("external", "a", "sent") < 10);
    node.pdp(&["fdb", "red/lan", "--clear"]);
    assert!(!fdb(&node).contains_key("h3:eth0"), "{:?}", fdb(&node));

    // Bridges in two hosts and outside elect one root.
    let bridge = |port: &str| {
        format!(
            "ip link add br0 type bridge stp_state 1 hello_time 100 && ip link set {port} master br0 && \
             ip link set br0 up"
        )
    };
    for n in [7, 8] {
        node.pdp(&["exec", &format!("red/h{n}"), "--", "sh", "-c", &bridge("eth0")]);
    }
    b.run(&bridge("lan"));
    let root = "cat /sys/class/net/br0/bridge/root_id";
    let own = "cat /sys/class/net/br0/bridge/bridge_id";
    let least = [node.exec("red/h7", own), node.exec("red/h8", own), b.run(own)].into_iter().min();
    eventually("one root", || {
        let roots = [node.exec("red/h7", root), node.exec("red/h8", root), b.run(root)];
        roots.into_iter().all(|root| Some(root) == least)
    });

    // By the transit, both ways, with the longest frames that fit both tunnels.
    eventually("an answer by the transit", || a.try_run("ping -c1 -W1 10.2.0.2").is_ok());
    let words = a.run("ping -c20 -i0.02 -w60 -M do -s 1422 10.2.0.2");
    assert!(all_answered(&words, 20), "{words}");
    let stats = node.json(&["stats", "via"]);
    for (from, to) in [("a", "b"), ("b", "a")] {
        let received = count(&stats, "via", "external", from, "received");
        assert!(received >= 21, "{stats}");
        assert_eq!(received, count(&stats, "via", "external", from, "consumed"));
        assert_eq!(received, count(&stats, "via", "external", to, "sent"));
    }
    capacities_change(&node, &a);
    node.pdp(&["down", "--purge"]);
    node.wait_pdpd();
    assert_eq!(node.leftovers(), [""; 0]);
}
