//! Specs that several programs and tests use.

/// The mux on one CPU, a forwarding engine on the other.
pub const SUBSTRATE: &str = r#"
apiVersion: pdp/v1
kind: Substrate
metadata: {name: node}
spec:
  mux: {cpus: "0", power: 0.5}
  forwardingEngines: {fe1: {cpus: "1", capacity: 1}}
"#;

/// h1 - r1 - h2, 10.1.0.2 and 10.2.0.2, with this data plane of r1 (YAML).
pub fn two_hosts(name: &str, data_plane: &str) -> String {
    format!(
        r#"
apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {{name: {name}}}
spec:
  nodes:
    r1:
      kind: router
      interfaces:
        eth0: {{addresses: [10.1.0.1/24]}}
        eth1: {{addresses: [10.2.0.1/24]}}
      dataPlane: {data_plane}
    h1:
      kind: host
      interfaces: {{eth0: {{addresses: [10.1.0.2/24], gateways: [10.1.0.1]}}}}
    h2:
      kind: host
      interfaces: {{eth0: {{addresses: [10.2.0.2/24], gateways: [10.2.0.1]}}}}
  links:
    - endpoints: ["r1:eth0", "h1:eth0"]
    - endpoints: ["r1:eth1", "h2:eth0"]
"#
    )
}

/// r1 - r2 - r3 with the kernel data plane and kernel links: 10.1.0.2 to 10.2.0.2.
pub fn three_kernels(name: &str) -> String {
    format!(
        r#"
apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {{name: {name}}}
spec:
  kinds: {{router: {{dataPlane: {{kind: kernel}}}}}}
  nodes:
    r1:
      kind: router
      interfaces: {{eth0: {{addresses: [10.1.0.2/24]}}}}
      routes: [{{to: 10.2.0.0/24, via: 10.1.0.1}}]
    r2:
      kind: router
      interfaces: {{eth0: {{addresses: [10.1.0.1/24]}}, eth1: {{addresses: [10.2.0.1/24]}}}}
    r3:
      kind: router
      interfaces: {{eth0: {{addresses: [10.2.0.2/24]}}}}
      routes: [{{to: 10.1.0.0/24, via: 10.2.0.1}}]
  links:
    - endpoints: ["r1:eth0", "r2:eth0"]
    - endpoints: ["r2:eth1", "r3:eth0"]
"#
    )
}
