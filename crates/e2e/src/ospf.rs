//! A virtual network whose routers run OSPF with FRR, so that a carrier or a hello that is lost is a
//! lost adjacency.

use serde_json::Value;

use crate::Node;

/// h1 - r1 - r2 - h2. Hellos come each second, and `dead_s` seconds without one end an
/// adjacency.
pub fn vnet(name: &str, dead_s: u8) -> String {
    VNET.replace("NAME", name).replace("DEAD", &dead_s.to_string())
}

const VNET: &str = r#"
apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {name: NAME}
spec:
  nodes:
    r1:
      kind: router
      interfaces:
        eth0: {addresses: [10.1.0.1/24]}
        eth1: {addresses: [10.0.12.1/30]}
      files: &ospf
        /etc/frr/zebra.conf: {content: "log stdout\n", owner: "frr:frr"}
        /etc/frr/ospfd.conf:
          owner: "frr:frr"
          content: |
            log stdout
            interface eth0
             ip ospf passive
            interface eth1
             ip ospf network point-to-point
             ip ospf hello-interval 1
             ip ospf dead-interval DEAD
            router ospf
             network 10.0.0.0/8 area 0
      commands: &frr
        - /usr/lib/frr/zebra -K 60
        - /usr/lib/frr/ospfd
      dataPlane: {power: 0.2}
    r2:
      kind: router
      interfaces:
        eth0: {addresses: [10.2.0.1/24]}
        eth1: {addresses: [10.0.12.2/30]}
      files: *ospf
      commands: *frr
      dataPlane: {power: 0.2}
    h1:
      kind: host
      interfaces: {eth0: {addresses: [10.1.0.2/24], gateways: [10.1.0.1]}}
    h2:
      kind: host
      interfaces: {eth0: {addresses: [10.2.0.2/24], gateways: [10.2.0.1]}}
  links:
    - endpoints: ["r1:eth0", "h1:eth0"]
    - endpoints: ["r1:eth1", "r2:eth1"]
    - endpoints: ["r2:eth0", "h2:eth0"]
"#;

/// Changes of the state of a router's adjacencies so far; a loss and return would count more.
pub fn changes(node: &Node, router: &str) -> u64 {
    let show = "show ip ospf neighbor detail json";
    let text = node.pdp(&["exec", router, "--", "vtysh", "-c", show]);
    counted(&serde_json::from_str(&text).expect("JSON of FRR"))
}

fn counted(value: &Value) -> u64 {
    match value {
        Value::Object(all) => all
            .iter()
            .map(|(key, value)| match key == "stateChangeCounter" {
                true => value.as_u64().unwrap_or(0),
                false => counted(value),
            })
            .sum(),
        Value::Array(all) => all.iter().map(counted).sum(),
        _ => 0,
    }
}
