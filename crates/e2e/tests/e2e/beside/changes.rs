//! A change reaches running processes, and removes what is no longer wanted.

use pdp_e2e::{TestNode, eventually, sh};
use serde_json::Value;

const SUBSTRATE: &str = r#"---
apiVersion: pdp/v1
kind: Substrate
metadata: {name: node}
spec:
  mux: {cpus: "0", power: 0.5}
  forwardingEngines: {fe1: {cpus: "1", capacity: 1}, fe2: {cpus: "0", capacity: 0.5}}
"#;

fn vnet(data_plane: &str, cpu: &str, hosts: u32, owner: &str) -> String {
    let mut ports = String::new();
    let mut nodes = String::new();
    let mut links = String::new();
    for host in 1..=hosts {
        ports += &format!("eth{host}: {{addresses: [10.0.{host}.1/24]}}, ");
        nodes += &format!(
            "    h{host}:
      kind: host
      interfaces: {{eth0: {{addresses: [10.0.{host}.2/24], gateways: [10.0.{host}.1]}}}}
      files: {{/etc/motd: {{content: text, owner: {owner}}}}}\n"
        );
        links += &format!("    - endpoints: [\"r1:eth{host}\", \"h{host}:eth0\"]\n");
    }
    format!(
        "---
apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {{name: red}}
spec:
  nodes:
    r1:
      kind: router
      interfaces: {{{ports}}}
      resources: {{cpu: {cpu}}}
      dataPlane: {{{data_plane}}}
{nodes}  links:
{links}"
    )
}

fn status(node: &TestNode) -> Value {
    node.json(&["inspect", "red"])["status"].clone()
}

fn pid(node: &TestNode, part: &str) -> u64 {
    let nodes = status(node)["nodes"].as_array().expect("nodes").clone();
    let r1 = nodes.iter().find(|found| found["name"] == "r1").expect("r1").clone();
    let process = if part == "g0" { &r1["guests"][0] } else { &r1[part] };
    process["pid"].as_u64().unwrap_or(0)
}

/// CPU quota of a cgroup of the vnet, of either version.
fn quota(node: &TestNode, of: &str) -> String {
    sh(&format!(
        "find /sys/fs/cgroup -path '*/{}/vnets/_red/_{of}/cpu.max' \
         -o -path '*/{0}/vnets/_red/_{of}/cpu.cfs_quota_us' | xargs cat",
        node.cgroup()
    ))
}

#[test]
fn spec_changes_reach_running_nodes() {
    let mut node = TestNode::start("change");
    node.machine("mA", "extA");
    node.apply(&format!("{SUBSTRATE}{}", vnet("power: 0.1", "0.2", 2, "root")));
    let reaches = |to: &str| node.try_exec("red/h1", &format!("ping -c1 -W1 {to}")).is_ok();
    eventually("h1 reaches h2", || reaches("10.0.2.2"));

    // Limits change in place.
    let before = (pid(&node, "control"), pid(&node, "g0"));
    let (control, guest) = (quota(&node, "r1"), quota(&node, "r1.g0"));
    node.apply(&vnet("power: 0.2", "0.4", 2, "root"));
    assert_eq!(before, (pid(&node, "control"), pid(&node, "g0")));
    let first = |text: &str| -> u64 { text.split_whitespace().next().unwrap().parse().unwrap() };
    assert_eq!(first(&quota(&node, "r1.g0")), 2 * first(&guest));
    assert_eq!(first(&quota(&node, "r1")), 2 * first(&control));

    // Another node, beside the running ones.
    node.apply(&vnet("power: 0.2", "0.4", 3, "root"));
    eventually("h1 reaches h3", || reaches("10.0.3.2"));

    // A node that can't be made, and later can.
    let words = node.try_apply(&vnet("power: 0.2", "0.4", 3, "nosuch")).expect_err("no such user");
    assert!(words.contains("no user nosuch"), "{words}");
    assert_ne!(status(&node)["phase"], "running");
    node.apply(&vnet("power: 0.2", "0.4", 3, "root"));
    eventually("nothing is wrong any more", || status(&node)["phase"] == "running");

    // Another program only restarts the forwarding guest.
    let before = (pid(&node, "control"), pid(&node, "g0"));
    let program = "power: 0.2, program: {attach: runtime, run: sleep 1000}";
    node.apply(&vnet(program, "0.4", 3, "root"));
    assert_eq!(before.0, pid(&node, "control"));
    assert_ne!(before.1, pid(&node, "g0"));

    // A second forwarding guest is added and removed.
    let cgroups = || {
        let cgroup = node.cgroup();
        sh(&format!(
            "find /sys/fs/cgroup -path '*/{cgroup}/*' -name '_r1.g*' -printf '%f\\n' | sort -u"
        ))
    };
    node.apply(&vnet("power: 1.2", "0.4", 3, "root"));
    assert_eq!(cgroups(), "_r1.g0\n_r1.g1\n");
    node.apply(&vnet("power: 0.2", "0.4", 3, "root"));
    assert_eq!(cgroups().lines().count(), 1, "{}", cgroups());
    assert_eq!(before.0, pid(&node, "control"));

    // An external interface is added and removed.
    let outside = "  interfaces: {A: {device: extA}}\n";
    let show = || sh(&format!("ip -n {} link show extA", node.netns));
    node.apply(&format!("{SUBSTRATE}{outside}"));
    assert!(show().contains("xdp") && node.pins().exists());
    node.apply(SUBSTRATE);
    assert!(!show().contains("xdp"), "{}", show());

    // The stored state is older than the running processes. Unknown ones end.
    let state = node.directory.join("state").display().to_string();
    let restart = |node: &mut TestNode, line: &str| {
        node.kill_pdpd();
        sh(line);
        node.start_pdpd();
    };
    restart(&mut node, &format!("cp -a {state} {state}.old"));
    node.apply(
        "{apiVersion: pdp/v1, kind: VirtualNetwork, metadata: {name: blue},
          spec: {nodes: {h1: {kind: host, interfaces: {eth0: {}}}}}}",
    );
    let blue =
        |node: &TestNode| node.processes().iter().any(|process| process.line.contains("/blue/"));
    assert!(blue(&node));
    restart(&mut node, &format!("rm -r {state}; mv {state}.old {state}"));
    eventually("blue is gone", || !blue(&node));
    assert_eq!(before.0, pid(&node, "control"), "red is as it was");

    // The state is lost: no running process is wanted.
    node.pdpd_arguments(&["--forget"]);
    restart(&mut node, &format!("rm -r {state}"));
    eventually("nothing is left", || node.leftovers().is_empty());
}

#[test]
fn failing_vnet_does_not_block_other_vnets() {
    let node = TestNode::start("upfails");
    let up = |name: &str, image: &str| {
        let file = node.directory.join(format!("{name}.yaml"));
        let text = format!(
            "apiVersion: pdp/v1\nkind: VirtualNetwork\nmetadata: {{name: {name}}}\n\
             spec: {{nodes: {{h1: {{kind: host, image: {image}}}}}}}\n"
        );
        std::fs::write(&file, text).expect("a file");
        node.try_pdp(&["up", &file.display().to_string(), "--wait=30s"])
    };
    let missing = up("bad", "{rootfs: /nowhere}").expect_err("there is no such image");
    assert!(missing.contains("/nowhere"), "{missing}");
    let other = up("good", "{}");
    assert!(other.is_ok(), "{other:?}");
    let corrected = up("bad", "{}");
    assert!(corrected.is_ok(), "{corrected:?}");
}
