//! Nodes know each other by name, throughout their lives and all changes of the others.

use pdp_e2e::specs::SUBSTRATE;
use pdp_e2e::{TestNode, eventually};

/// Two hosts and a router with readable names; `h2` is the second host's address.
fn lab(h2: &str) -> String {
    format!(
        r#"
apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {{name: lab}}
spec:
  nodes:
    PE1:
      kind: router
      privileged: true
      interfaces:
        eth0: {{addresses: [10.1.0.1/24, "2001:db8:1::1/64"]}}
        eth1: {{addresses: [10.2.0.1/24]}}
      dataPlane: {{power: 0.1}}
    H1:
      kind: host
      interfaces: {{eth0: {{addresses: [10.1.0.2/24, "2001:db8:1::2/64"], gateways: [10.1.0.1]}}}}
    tasks:
      kind: host
      interfaces: {{eth0: {{addresses: [{h2}], gateways: [10.2.0.1]}}}}
    own:
      kind: host
      files: {{/etc/hosts: {{content: "192.0.2.7 elsewhere\n"}}}}
  links:
    - {{name: H1-PE1, endpoints: ["PE1:eth0", "H1:eth0"]}}
    - endpoints: ["PE1:eth1", "tasks:eth0"]
"#
    )
}

#[test]
fn node_names_resolve_and_follow_address_changes() {
    let mut node = TestNode::start("names");
    node.apply(SUBSTRATE);
    node.apply(&lab("10.2.0.2/24"));
    let ping = |from: &str, words: &str| {
        eventually(words, || {
            node.try_exec(&format!("lab/{from}"), &format!("ping -c1 -W1 {words}")).is_ok()
        });
    };
    ping("H1", "tasks");
    ping("tasks", "-4 h1");
    let found = node.exec("lab/H1", "getent ahostsv6 PE1");
    assert!(found.starts_with("2001:db8:1::1 "), "{found}");
    ping("PE1", "eth0.H1");
    assert_eq!(node.exec("lab/PE1", "hostname").trim(), "PE1");
    node.pdp(&["link", "down", "lab/H1-PE1"]);
    node.pdp(&["link", "up", "lab/H1-PE1"]);
    let own = node.exec("lab/own", "cat /etc/hosts");
    assert_eq!(own, "192.0.2.7 elsewhere\n");

    // Nobody can change a node's names, not even a guest that may mount.
    let forge = "mount -o remount,bind,rw /etc/hosts; mount -o remount,rw /etc/hosts; \
                 echo 192.0.2.66 tasks >> /etc/hosts || rm /etc/hosts || chmod 666 /etc/hosts";
    let forged = node.try_pdp(&["exec", "lab/PE1", "--", "sh", "-c", forge]);
    assert!(forged.is_err(), "{forged:?}");
    assert!(!node.exec("lab/H1", "cat /etc/hosts").contains("192.0.2.66"));

    let began = |of: &str| node.exec(&format!("lab/{of}"), "stat -c %i:%Y /proc/1/stat");
    let before = (began("H1"), began("PE1"), began("own"));
    node.apply(&lab("10.2.0.77/24"));
    for from in ["H1", "PE1"] {
        let found = node.exec(&format!("lab/{from}"), "getent hosts tasks");
        assert!(found.starts_with("10.2.0.77 "), "{found}");
    }
    ping("H1", "tasks");
    assert_eq!(before, (began("H1"), began("PE1"), began("own")), "nobody else was started anew");

    // A daemon that was absent meanwhile, or dies now.
    node.kill_pdpd();
    node.start_pdpd();
    node.apply(&lab("10.2.0.78/24"));
    let found = node.exec("lab/H1", "getent hosts tasks");
    assert!(found.starts_with("10.2.0.78 "), "{found}");
    node.pdp(&["down", "--purge"]);
    assert_eq!(node.leftovers(), [""; 0]);
}
