//! Remarks about specs that are valid, and probably not what their author means.

use std::collections::BTreeMap;

use pdp_spec::{Existing, SourceFile, Substrate, check, parse, remarks};

fn remarked(name: &str, text: &str) -> Vec<String> {
    let file = SourceFile { name: name.into(), text: text.into(), attachments: BTreeMap::new() };
    let documents = parse(&[file]).unwrap();
    let substrate = Some(Substrate::of_machine(&(0..4).collect()));
    let existing = Existing { substrate, unknown: true, ..Existing::default() };
    let intent = check(&documents, &existing).unwrap();
    remarks(&documents, &intent).iter().map(ToString::to_string).collect()
}

const LAB: &str = "\
apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {name: red}
spec:
  nodes:
    h1: {kind: host, interfaces: {eth0: {addresses: [10.0.0.2/24], gateways: [10.0.0.9]}}}
    r1: {kind: router, interfaces: {eth0: {mtu: 1400, addresses: [10.0.0.1/24]}}}
  links:
    - endpoints: [\"h1:eth0\", \"r1:eth0\"]
";

#[test]
fn a_gateway_that_no_node_has_and_unequal_mtus_are_remarked() {
    assert_eq!(
        remarked("lab.yaml", LAB),
        [
            "lab.yaml:7:49: vport red/r1:eth0: mtu 1400 differs from 1500 of h1:eth0, at the other \
             end of link1 (give all ends the same mtu: larger packets are lost here, and OSPF \
             stays in ExStart)",
            "lab.yaml:6:79: vport red/h1:eth0: no node on its link has the address of gateway \
             10.0.0.9 (give the address to a node on the link, unless routing software sets it)",
        ]
    );
}

#[test]
fn a_link_with_the_gateway_and_one_mtu_has_no_remarks() {
    let good = LAB.replace("10.0.0.9", "10.0.0.1").replace("mtu: 1400, ", "");
    assert_eq!(remarked("lab.yaml", &good), [""; 0]);
    // Routing software may set addresses of a node without any.
    let unknown = good.replace("addresses: [10.0.0.1/24]", "");
    assert_eq!(remarked("lab.yaml", &unknown), [""; 0]);
}
