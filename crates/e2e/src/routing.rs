//! A virtual network whose routers run OSPF and BGP with FRR. A lost carrier, or hellos and
//! keepalives lost for some time, end an adjacency or session.

use serde_json::Value;

use crate::TestNode;

/// h1 - r1 - r2 - h2. Hellos and keepalives come each second. `dead_s` seconds (3 or more) without
/// one end an adjacency or session.
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
      files:
        /etc/frr/zebra.conf: &zebra {content: "log stdout\n", owner: "frr:frr"}
        /etc/frr/bgpd.conf:
          owner: "frr:frr"
          content: |
            log stdout
            router bgp 65000
             timers bgp 1 DEAD
             neighbor 10.0.12.2 remote-as 65000
        /etc/frr/ospfd.conf: &ospfd
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
        - /usr/lib/frr/bgpd
      restart: following
      dataPlane: {power: 0.2}
    r2:
      kind: router
      interfaces:
        eth0: {addresses: [10.2.0.1/24]}
        eth1: {addresses: [10.0.12.2/30]}
      files:
        /etc/frr/zebra.conf: *zebra
        /etc/frr/bgpd.conf:
          owner: "frr:frr"
          content: |
            log stdout
            router bgp 65000
             timers bgp 1 DEAD
             neighbor 10.0.12.1 remote-as 65000
        /etc/frr/ospfd.conf: *ospfd
      commands: *frr
      restart: following
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

/// State changes so far of a router's OSPF adjacencies and of its BGP sessions. A loss and recovery
/// adds to them. Panics if there are no adjacencies or no sessions.
pub fn changes(node: &TestNode, router: &str) -> [u64; 2] {
    let shown = [
        ("show ip ospf neighbor detail json", ["stateChangeCounter"].as_slice()),
        ("show bgp neighbors json", &["connectionsEstablished", "connectionsDropped"]),
    ];
    shown.map(|(show, counters)| {
        let shown = vtysh(node, router, show).unwrap_or_else(|error| panic!("{error}"));
        let sum = counted(&shown, counters);
        assert!(sum > 0, "{router} has no neighbour: {show}: {shown:#}");
        sum
    })
}

/// FRR's answer to a command that ends in `json`.
pub fn vtysh(node: &TestNode, router: &str, show: &str) -> Result<Value, String> {
    let text = node.try_pdp(&["exec", router, "--", "vtysh", "-c", show])?;
    serde_json::from_str(&text).map_err(|error| format!("{show}: {error}: {text}"))
}

fn counted(value: &Value, counters: &[&str]) -> u64 {
    match value {
        Value::Object(all) => all
            .iter()
            .map(|(key, value)| match counters.contains(&key.as_str()) {
                true => value.as_u64().unwrap_or(0),
                false => counted(value, counters),
            })
            .sum(),
        Value::Array(all) => all.iter().map(|value| counted(value, counters)).sum(),
        _ => 0,
    }
}

/// True if a router's BGP has its session.
pub fn has_session(node: &TestNode, router: &str) -> bool {
    let shown = vtysh(node, router, "show bgp neighbors json");
    shown.is_ok_and(|shown| shown.to_string().contains("\"bgpState\":\"Established\""))
}
