//! What a node promises at its bounds.

use pdp_e2e::{Node, eventually, kill};

/// As many as a node may have.
const PORTS: usize = 256;

/// A host with [`PORTS`] interfaces, the first and the last of which lead to another.
fn wide() -> String {
    let ports: String = (0..PORTS)
        .map(|port| format!("        eth{port}: {{addresses: [10.7.{port}.1/24]}}\n"))
        .collect();
    let last = PORTS - 1;
    format!(
        "
apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {{name: wide}}
spec:
  nodes:
    many:
      kind: host
      interfaces:
{ports}
    few:
      kind: host
      interfaces:
        eth0: {{addresses: [10.7.0.2/24]}}
        eth1: {{addresses: [10.7.{last}.2/24]}}
  links:
    - endpoints: [\"many:eth0\", \"few:eth0\"]
    - endpoints: [\"many:eth{last}\", \"few:eth1\"]
"
    )
}

#[test]
fn the_taps_of_the_widest_node_go_from_hand_to_hand() {
    let mut node = Node::start("wide");
    node.apply(&wide());
    let reaches = |node: &Node| {
        eventually("both ends answer", || {
            [0, PORTS - 1].iter().all(|port| {
                node.try_exec("wide/few", &format!("ping -c1 -W1 10.7.{port}.1")).is_ok()
            })
        });
    };
    let pid = |node: &Node, part: &str| {
        let status = node.json(&["inspect", "wide"])["status"].clone();
        let nodes = status["nodes"].as_array().expect("nodes");
        let many = nodes.iter().find(|found| found["name"] == "many").expect("many");
        many[part]["pid"].as_u64().and_then(|pid| u32::try_from(pid).ok())
    };
    reaches(&node);
    let guest = pid(&node, "control").expect("it runs");

    // A new pdpd gets them from the helper, a new helper from pdpd.
    node.kill_pdpd();
    node.start_pdpd();
    let helper = pid(&node, "tap").expect("it runs");
    kill(helper);
    eventually("the helper is replaced", || pid(&node, "tap").is_some_and(|now| now != helper));
    reaches(&node);
    assert_eq!(pid(&node, "control"), Some(guest), "no TAP was lost");
}
