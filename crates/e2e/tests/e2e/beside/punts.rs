//! Limits of packets that a router's data plane punts to its kernel. A tunnel inside the router
//! stays below them, and a limit that drops packets reports it.

use std::process::Stdio;

use pdp_e2e::{TestNode, eventually};
use serde_json::Value;

/// Datagrams sent by a host, at 3,750 per second.
const SENT: u64 = 11_250;

/// h1 - a - b - h2. The routers `a` and `b` have a VXLAN
/// tunnel between them, made by their own commands.
fn vnet(plane: &str) -> String {
    let router = |n: u8, peer: u8| {
        format!(
            "kind: router
      dataPlane: {plane}
      interfaces:
        eth0: {{addresses: [10.{n}.0.1/24]}}
        eth1: {{addresses: [192.0.2.{n}/24]}}
      exec:
        - ip link add vx0 type vxlan id 5 local 192.0.2.{n} remote 192.0.2.{peer} dstport 4789
        - ip link set vx0 up mtu 1450
        - ip addr add 10.255.0.{n}/24 dev vx0
        - ip route add 10.{peer}.0.0/24 via 10.255.0.{peer}"
        )
    };
    let host = |n: u8| {
        format!(
            "{{kind: host, interfaces: {{eth0: {{addresses: [10.{n}.0.2/24], gateways: [10.{n}.0.1]}}}}}}"
        )
    };
    format!(
        "
apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {{name: red}}
spec:
  nodes:
    h1: {}
    h2: {}
    a:
      {}
    b:
      {}
  links:
    - endpoints: [\"h1:eth0\", \"a:eth0\"]
    - endpoints: [\"a:eth1\", \"b:eth1\"]
    - endpoints: [\"b:eth0\", \"h2:eth0\"]
",
        host(1),
        host(2),
        router(1, 2),
        router(2, 1),
    )
}

/// Sends [`SENT`] datagrams from h1 to h2 through the tunnel.
fn send(node: &TestNode) {
    let server = ["exec", "red/h2", "--", "iperf3", "-s", "-1"];
    let mut server = node.pdp_command(&server);
    let server = server.stdout(Stdio::null()).spawn().expect("iperf3 starts");
    eventually("iperf3 listens", || node.exec("red/h2", "ss -Hltn sport = :5201").contains("5201"));
    node.exec("red/h1", "iperf3 -u -b 30M -l 1000 -t 3 -c 10.2.0.2");
    let output = server.wait_with_output().expect("iperf3 ends");
    assert!(output.status.success(), "{output:?}");
}

fn dropped(node: &TestNode, limit: &str) -> u64 {
    let stats = node.json(&["stats", "red"]);
    let nodes = stats["vnets"]["red"]["nodes"].as_object().expect("nodes").values();
    let ports = nodes.flat_map(|node| node["ports"].as_object().expect("ports").values());
    ports.filter_map(|port| port["dropped"][limit].as_u64()).sum()
}

fn conditions(node: &TestNode) -> Vec<Value> {
    let all = node.json(&["inspect", "red/a"])["conditions"].as_array().cloned();
    all.unwrap_or_default().into_iter().filter(|it| it["kind"] == "limitDrops").collect()
}

#[test]
fn punt_limits_spare_tunnels_and_report_drops() {
    let node = TestNode::start("punts");
    for kind in ["parallel", "fastpath"] {
        node.apply(&vnet(&format!("{{kind: {kind}}}")));
        eventually("the tunnel is up", || node.try_exec("red/h1", "ping -c1 -W1 10.2.0.2").is_ok());
        send(&node);
        for limit in ["punt-limit-hook", "punt-limit-exception", "punt-limit-local"] {
            assert_eq!(dropped(&node, limit), 0, "{kind}: {limit}");
        }
        assert_eq!(conditions(&node), Vec::<Value>::new());

        node.apply(&vnet(&format!("{{kind: {kind}, puntLimits: {{hook: {{pps: 100}}}}}}")));
        send(&node);
        let lost = dropped(&node, "punt-limit-hook");
        assert!(lost > SENT / 2, "{kind}: {lost}");
        let conditions_now = conditions(&node);
        let words = "eth0: puntLimits.hook drops packets; raise the limit, or send less";
        assert!(
            conditions_now.len() == 1 && conditions_now[0]["message"] == words,
            "{conditions_now:?}"
        );
        let row = node.pdp(&["get", "red"]);
        assert!(row.contains("puntLimits.hook"), "{row}");
        eventually("nothing is dropped any more", || conditions(&node).is_empty());
        node.pdp(&["delete", "red"]);
    }
}
