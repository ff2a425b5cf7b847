//! One node with two similar vnets, and traffic through their forwarding guests: applied twice,
//! changed, deleted, taken down.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use pdp_e2e::specs::SUBSTRATE;
use pdp_e2e::{TestNode, bin, eventually, run, sh};
use serde_json::Value;

/// h1 - r1 - h2, by connected routes.
fn vnet(name: &str, motd: &str, power: &str) -> String {
    format!(
        r#"---
apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {{name: {name}}}
spec:
  nodes:
    r1:
      kind: router
      interfaces:
        eth0: {{addresses: [10.0.1.1/24, "fd00:1::1/64"]}}
        eth1: {{addresses: [10.0.2.1/24, "fd00:2::1/64"]}}
      files: {{/etc/motd: {{content: "{motd}"}}}}
      dataPlane: {{power: {power}}}
    h1:
      kind: host
      interfaces: {{eth0: {{addresses: [10.0.1.2/24, "fd00:1::2/64"], gateways: [10.0.1.1, "fd00:1::1"]}}}}
    h2:
      kind: host
      interfaces: {{eth0: {{addresses: [10.0.2.2/24, "fd00:2::2/64"], gateways: [10.0.2.1, "fd00:2::1"]}}}}
  links:
    - endpoints: ["r1:eth0", "h1:eth0"]
    - endpoints: ["r1:eth1", "h2:eth0"]
"#
    )
}

fn reaches(node: &TestNode, vnet: &str, target: &str) -> bool {
    node.try_exec(&format!("{vnet}/h1"), &format!("ping -c1 -W1 {target}")).is_ok()
}

fn pids(node: &TestNode, vnet: &str) -> BTreeMap<String, u64> {
    let status = node.json(&["inspect", vnet])["status"].clone();
    let mut pids = BTreeMap::new();
    for found in status["nodes"].as_array().expect("nodes") {
        let name = found["name"].as_str().expect("a name");
        let mut add = |part: &str, process: &Value| {
            if let Some(pid) = process["pid"].as_u64() {
                pids.insert(format!("{name} {part}"), pid);
            }
        };
        for part in ["control", "tap", "mirror"] {
            add(part, &found[part]);
        }
        for guest in found["guests"].as_array().expect("guests") {
            add(&format!("g{}", guest["number"]), guest);
        }
    }
    pids
}

fn to_guest(node: &TestNode, vnet: &str) -> u64 {
    let stats = node.json(&["stats", vnet]);
    stats["vnets"][vnet]["nodes"]["r1"]["guests"]["0"]["toGuest"].as_u64().expect("a counter")
}

#[test]
fn vnets_with_equal_addresses_run_independently() {
    let mut node = TestNode::start("two");
    node.apply(&format!("{SUBSTRATE}{}{}", vnet("red", "a", "0.2"), vnet("blue", "a", "0.2")));
    eventually("red forwards IPv4", || reaches(&node, "red", "10.0.2.2"));
    let (red, blue) = (to_guest(&node, "red"), to_guest(&node, "blue"));
    node.exec("red/h1", "ping -c10 -i0.05 -W2 10.0.2.2");
    assert!(to_guest(&node, "red") >= red + 20, "both directions cross the forwarding guest");
    assert!(to_guest(&node, "blue") < blue + 10, "nothing of red reaches blue");
    eventually("red forwards IPv6", || reaches(&node, "red", "fd00:2::2"));
    eventually("blue forwards", || reaches(&node, "blue", "10.0.2.2"));

    // Applied twice: one change.
    let before = (pids(&node, "red"), pids(&node, "blue"));
    assert_eq!(before.0.len(), 4 + 2 * 2, "{before:?}");
    node.apply(&vnet("red", "a", "0.2"));
    assert_eq!(before, (pids(&node, "red"), pids(&node, "blue")));

    // A changed power applies in place. A changed file restarts only that node's control side.
    node.apply(&vnet("red", "a", "0.4"));
    assert_eq!(before, (pids(&node, "red"), pids(&node, "blue")));
    node.apply(&vnet("red", "b", "0.4"));
    let after = pids(&node, "red");
    assert_eq!(node.exec("red/r1", "cat /etc/motd"), "b");
    for (part, pid) in &before.0 {
        let changed = ["r1 control", "r1 tap", "r1 mirror"].contains(&part.as_str());
        assert_eq!(changed, after[part] != *pid, "{part}");
    }
    assert_eq!(before.1, pids(&node, "blue"));
    eventually("red forwards again", || reaches(&node, "red", "10.0.2.2"));

    // An invalid spec changes nothing.
    let wrong = vnet("red", "a", "0.4").replace("h1:eth0\"]", "h9:eth0\"]");
    let words = node.try_apply(&wrong).expect_err("an endpoint that does not exist");
    assert!(words.contains("h9"), "{words}");
    assert_eq!(after, pids(&node, "red"));

    // Both ends lose the carrier, and get it back.
    let carrier = |of: &str| node.exec(of, "cat /sys/class/net/eth0/carrier").trim() == "1";
    assert!(carrier("red/h1") && carrier("red/r1"));
    node.pdp(&["link", "down", "red/r1:eth0"]);
    assert!(!carrier("red/h1") && !carrier("red/r1") && carrier("blue/h1"));
    node.pdp(&["link", "up", "red/r1:eth0"]);
    assert!(carrier("red/h1") && carrier("red/r1"));
    eventually("red forwards after the link came back", || reaches(&node, "red", "10.0.2.2"));

    // One is deleted, the other stays.
    let blue = pids(&node, "blue");
    node.pdp(&["delete", "red"]);
    assert_eq!(pids(&node, "blue"), blue);
    assert!(node.try_pdp(&["inspect", "red"]).is_err());
    assert!(!node.socket_directory("red").exists());
    assert!(reaches(&node, "blue", "10.0.2.2"));

    // Everything is removed.
    node.pdp(&["down", "--purge"]);
    node.wait_pdpd();
    assert_eq!(node.leftovers(), [""; 0]);
    assert!(!node.directory.join("state/pdpd.sqlite").exists());
}

#[test]
fn stored_vnets_return_after_a_reboot() {
    let mut node = TestNode::start("reboot");
    node.apply(&format!("{SUBSTRATE}{}", vnet("red", "a", "0.2")));
    eventually("red forwards", || reaches(&node, "red", "10.0.2.2"));
    node.reboot();
    node.start_pdpd();
    eventually("red is back", || {
        node.try_pdp(&["inspect", "red"]).is_ok() && reaches(&node, "red", "10.0.2.2")
    });
    node.pdp(&["down"]);
    node.wait_pdpd();
    assert_eq!(node.leftovers(), [""; 0]);
    node.start_pdpd();
    let phase = node.json(&["inspect", "red"])["status"]["phase"].clone();
    assert_eq!(phase, "stopped", "what was taken down stays down");
    node.pdp(&["up"]);
    eventually("red is up", || reaches(&node, "red", "10.0.2.2"));
}

/// A second daemon is refused the directories of a first, by any path and from another network
/// namespace, before it changes anything.
#[test]
fn second_daemon_is_refused_the_same_directories() {
    let mut node = TestNode::start("claims");
    node.apply(&format!("{SUBSTRATE}{}", vnet("red", "a", "0.2")));
    let before = pids(&node, "red");
    let first = |name: &str| node.directory.join(name);
    let other = first("other");
    std::fs::create_dir(&other).unwrap();
    // Each by another path than the first one's.
    let (link, bound) = (other.join("link"), other.join("bound"));
    std::os::unix::fs::symlink(node.run_dir(), &link).unwrap();
    std::fs::create_dir(&bound).unwrap();
    let second_cgroup = format!("{}-second", node.cgroup());
    let second_pins = format!("{}-second", node.pins().display());
    let fresh = [
        ("--run-dir", other.join("run").display().to_string()),
        ("--state-dir", other.join("state").display().to_string()),
        ("--cgroup", second_cgroup.clone()),
        ("--bpf-pin-dir", second_pins.clone()),
    ];
    let taken = [
        ("run directory", "--run-dir", link.display().to_string(), first("run")),
        ("state directory", "--state-dir", bound.display().to_string(), first("state")),
        ("cgroup", "--cgroup", node.cgroup(), first("run")),
        ("cgroup", "--cgroup", format!("{}/inner", node.cgroup()), first("run")),
        ("directory", "--bpf-pin-dir", bound.display().to_string(), node.pins()),
    ];
    let holder = format!(
        "is in use by the daemon with pid {} and run directory {}; start this daemon with --name",
        node.pdpd_pid(),
        node.run_dir().display()
    );
    for (what, option, value, source) in &taken {
        let mut line = format!(
            "mount --bind {} {}; exec {}",
            source.display(),
            bound.display(),
            bin("pdpd").display()
        );
        for (fresh_option, fresh) in &fresh {
            let value = if fresh_option == option { value } else { fresh };
            line += &format!(" {fresh_option} {value}");
        }
        let mut second = Command::new("unshare");
        second.args(["-mn", "sh", "-ec", &line]).env("RUST_BACKTRACE", "1");
        let output = run(&mut second, "");
        let words = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{option} {value}: {words}");
        assert!(
            words.starts_with(&format!("error: {what} ")) && words.contains(&holder),
            "{words}"
        );
        assert_eq!(words.lines().count(), 1, "{words}");
        for left in [&fresh[0].1, &fresh[1].1, &fresh[3].1] {
            assert!(!Path::new(left).exists(), "{option}: {left}");
        }
    }
    assert_eq!(sh(&format!("find /sys/fs/cgroup -maxdepth 2 -name {second_cgroup}")), "");

    // Like a user who starts another one with the plain command.
    let socket = other.join("up/pdpd.sock");
    let mut up = Command::new(bin("pdp"));
    let state = format!("--state-dir {}", first("state").display());
    up.env("PDP_DAEMON", bin("pdpd")).arg("--socket").arg(&socket);
    let output = run(up.args(["up", "--daemon-args", &state]), "");
    let words = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && words.contains(&holder), "{words}");
    assert!(!other.join("up").exists(), "nothing is left of it");
    assert_eq!(before, pids(&node, "red"), "the first's network runs as it did");

    // With a name it has its own directories, which are removed with it.
    let name = format!("e2e-{}", std::process::id());
    let named = |words: &[&str]| {
        let mut command = Command::new("unshare");
        command.args(["-n", "--"]).arg(bin("pdp")).args(["--name", &name]).args(words);
        let output = run(command.env("PDP_DAEMON", bin("pdpd")), "");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    named(&["up"]);
    assert!(named(&["version"]).contains("(pid "));
    let substrate = named(&["inspect", "substrate", "--format", "yaml"]);
    assert!(substrate.contains("name: default") && substrate.contains("fe1:"), "{substrate}");
    let places = ["/run", "/var/lib", "/sys/fs/bpf"].map(|above| format!("{above}/pdp-{name}"));
    assert!(places.iter().all(|place| Path::new(place).is_dir()), "{places:?}");
    assert_ne!(sh(&format!("find /sys/fs/cgroup -maxdepth 2 -name pdp-{name}")), "");
    named(&["down", "--purge"]);
    eventually("all of its places are gone", || {
        let cgroups = sh(&format!("find /sys/fs/cgroup -maxdepth 2 -name pdp-{name}"));
        cgroups.is_empty() && !places.iter().any(|place| Path::new(place).exists())
    });

    // After being killed it holds nothing any more.
    node.kill_pdpd();
    node.start_pdpd();
    eventually("the first adopts", || pids(&node, "red") == before);
}
