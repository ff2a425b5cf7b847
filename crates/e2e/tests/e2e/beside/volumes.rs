//! Volumes of nodes: their contents outlast everything except the node itself.

use std::path::PathBuf;

use pdp_e2e::specs::SUBSTRATE;
use pdp_e2e::{CommandError, TestNode, eventually, kill};

/// A host of a vnet `red` with these keys.
fn network(keys: &str) -> String {
    format!(
        "{SUBSTRATE}---\napiVersion: pdp/v1\nkind: VirtualNetwork\nmetadata: {{name: red}}\n\
         spec: {{nodes: {{h1: {{kind: host{keys}}}, h2: {{kind: host}}}}}}\n"
    )
}

const KEPT: &str = ", volumes: [{source: kept, target: /srv/kept, size: 16Mi}]";

fn file(node: &TestNode, name: &str) -> PathBuf {
    node.directory.join("state/volumes/red.h1").join(format!("{name}.ext4"))
}

fn shell(node: &TestNode, of: &str, script: &str) -> Result<String, CommandError> {
    node.try_pdp(&["exec", of, "--", "sh", "-c", script])
}

/// Records another event, and reads all of them.
fn event(node: &TestNode, what: &str) -> String {
    let script = format!("echo {what} >> /srv/kept/events && cat /srv/kept/events");
    let mut text = String::new();
    eventually("h1 runs", || match shell(node, "red/h1", &script) {
        Ok(output) => {
            text = output;
            true
        }
        Err(_) => false,
    });
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn pid(node: &TestNode) -> u32 {
    let status = node.json(&["inspect", "red"])["status"].clone();
    u32::try_from(status["nodes"][0]["control"]["pid"].as_u64().expect("it runs")).unwrap()
}

#[test]
fn volume_outlasts_everything_but_its_node() {
    let mut node = TestNode::start("volumes");
    node.apply(&network(KEPT));
    assert_eq!(event(&node, "made"), "made");
    let inspected = node.pdp(&["inspect", "red", "--format", "yaml"]);
    assert!(inspected.contains("source: kept"), "{inspected}");

    node.pdp(&["restart", "red/h1"]);
    assert_eq!(event(&node, "restarted"), "made restarted");
    let before = pid(&node);
    kill(before);
    eventually("h1 is made anew", || {
        let status = node.json(&["inspect", "red"])["status"].clone();
        status["nodes"][0]["control"]["pid"].as_u64().is_some_and(|pid| pid != u64::from(before))
    });
    assert_eq!(event(&node, "killed"), "made restarted killed");

    node.kill_pdpd();
    node.start_pdpd();
    assert_eq!(event(&node, "adopted"), "made restarted killed adopted");
    // A changed spec recreates the node, with the volume at another path.
    let moved = ", env: {X: y}, volumes: [{source: kept, target: /mnt, size: 16Mi}]";
    node.apply(&network(moved));
    assert!(node.exec("red/h1", "cat /mnt/events").ends_with("adopted\n"));
    let other = node.try_apply(&network(&KEPT.replace("16Mi", "32Mi"))).unwrap_err();
    assert!(other.contains("volume kept: size 32Mi differs from its 16Mi"), "{other}");
    node.apply(&network(KEPT));
    assert_eq!(event(&node, "applied"), "made restarted killed adopted applied");

    node.reboot();
    node.start_pdpd();
    assert_eq!(event(&node, "rebooted"), "made restarted killed adopted applied rebooted");
    node.pdp(&["down"]);
    node.wait_pdpd();
    let left: Vec<String> = node.leftovers();
    assert!(left.len() == 1 && left[0].starts_with("volumes "), "{left:?}");
    node.start_pdpd();
    assert!(file(&node, "kept").exists());
    node.pdp(&["up"]);
    assert!(event(&node, "up").ends_with("rebooted up"));

    // The spec lacks it now, or the node is gone.
    let report = node.apply(&network(", volumes: [\"other:/srv/kept\"]"));
    assert!(report.contains("volume kept removed"), "{report}");
    assert_eq!(event(&node, "other"), "other");
    assert!(!file(&node, "kept").exists() && file(&node, "other").exists());
    node.apply(&network(KEPT).replace("h1:", "h3:"));
    assert!(!file(&node, "other").parent().unwrap().exists());
    node.apply(&network(KEPT));
    assert_eq!(event(&node, "new"), "new");
    node.pdp(&["delete", "red"]);
    assert!(!file(&node, "kept").parent().unwrap().exists());
    node.apply(&network(KEPT));
    assert_eq!(event(&node, "again"), "again");

    // Also while everything is stopped.
    node.pdp(&["down"]);
    node.wait_pdpd();
    node.start_pdpd();
    node.pdp(&["delete", "red"]);
    eventually("it is gone", || !file(&node, "kept").exists());
    node.apply(&network(KEPT));
    node.pdp(&["down", "--purge"]);
    node.wait_pdpd();
    assert_eq!(node.leftovers(), [""; 0]);
    assert!(!node.directory.join("state/volumes").exists());
}

/// A guest that fills its volume has a full volume,
/// without effect on the node beside it or the daemon.
#[test]
fn full_volume_harms_no_other_node() {
    let node = TestNode::start("full-volume");
    node.apply(&network(KEPT));
    assert_eq!(event(&node, "made"), "made");
    let error = node.try_exec("red/h1", "dd if=/dev/zero of=/srv/kept/x bs=64k").unwrap_err();
    assert!(error.contains("No space left on device"), "{error}");
    shell(&node, "red/h2", "echo well > /tmp/x").unwrap();
    node.apply(&network(&format!(", env: {{X: y}}{KEPT}")));
    let error = node.try_exec("red/h1", "dd if=/dev/zero of=/srv/kept/y bs=4k").unwrap_err();
    assert!(error.contains("No space left on device"), "still: {error}");
    node.exec("red/h1", "rm /srv/kept/x /srv/kept/y");
    assert_eq!(event(&node, "emptied"), "made emptied");
}
