//! A new pdpd takes over from another version.

use std::fs;
use std::process::Command;

use pdp_e2e::specs::{SUBSTRATE, two_hosts};
use pdp_e2e::{TestNode, eventually, run};
use serde_json::Value;

fn reaches(node: &TestNode) -> bool {
    node.try_exec("red/h1", "ping -c1 -W1 10.2.0.2").is_ok()
}

fn mux(node: &TestNode) -> Option<u64> {
    node.json(&["inspect", "substrate"])["status"]["mux"]["pid"].as_u64()
}

/// Process IDs of the vnet.
fn processes(node: &TestNode) -> Vec<u64> {
    fn pids(value: &Value, found: &mut Vec<u64>) {
        match value {
            Value::Object(fields) => {
                found.extend(fields.get("pid").and_then(Value::as_u64));
                fields.values().for_each(|value| pids(value, found));
            }
            Value::Array(values) => values.iter().for_each(|value| pids(value, found)),
            _ => {}
        }
    }
    let mut found = Vec::new();
    pids(&node.json(&["inspect", "red"])["status"], &mut found);
    found
}

/// Changes the journal as if another version had written it. pdpd must not run.
fn rewrite_journal(node: &TestNode, statement: &str) {
    let script = "import sqlite3, sys; file = sqlite3.connect(sys.argv[1]); \
                  assert file.execute(sys.argv[2]).rowcount == 1; file.commit()";
    let state = node.directory.join("state/pdpd.sqlite");
    let mut command = Command::new("/usr/bin/python3");
    command.args(["-c", script, state.to_str().expect("UTF-8"), statement]);
    let output = run(&mut command, "");
    assert!(output.status.success(), "{output:?}");
}

#[test]
fn upgrade_adopts_or_restarts_running_processes() {
    let mut node = TestNode::start("upgrade");
    node.apply(SUBSTRATE);
    node.apply(&two_hosts("red", "{power: 0.3}"));
    eventually("h1 reaches h2", || reaches(&node));
    let (first_mux, all) = (mux(&node).expect("it runs"), processes(&node));
    assert_eq!(all.len(), 8, "three nodes, their TAP helpers, a mirror, a forwarding guest");

    // The same version: everything is adopted.
    node.kill_pdpd();
    node.start_pdpd();
    eventually("all is known", || processes(&node) == all);
    assert_eq!(mux(&node), Some(first_mux));

    // A mux with another protocol version is replaced, and so is a mirror with another version
    // towards guests. Everything else stays.
    node.kill_pdpd();
    rewrite_journal(&node, "UPDATE things SET hash = 'older' WHERE key = 'mux'");
    rewrite_journal(&node, "UPDATE things SET detail = 'older' WHERE key = 'node red/r1'");
    node.start_pdpd();
    eventually("another mux", || mux(&node).is_some_and(|pid| pid != first_mux));
    let mirror = |pids: &[u64]| {
        let new: Vec<u64> = pids.iter().filter(|pid| !all.contains(pid)).copied().collect();
        (pids.len() == all.len() && new.len() == 1).then(|| command_line(new[0]))
    };
    let is_mirror = |words: String| words.contains("pdp-mirror");
    eventually("another mirror", || mirror(&processes(&node)).is_some_and(is_mirror));
    eventually("h1 reaches h2", || reaches(&node));
    let all = processes(&node);

    // A record that this version does not understand: only its object restarts.
    let record = node.record("red.r1.g0").join("record.json");
    let before = fs::read_to_string(&record).expect("a record");
    let is: Value = serde_json::from_str(&before).expect("JSON");
    let kept = concat!(env!("CARGO_MANIFEST_DIR"), "/../../data/kept");
    let kept = fs::read_to_string(format!("{kept}/record-{}.json", is["version"])).expect("kept");
    let kept: Value = serde_json::from_str(&kept).expect("JSON");
    assert_eq!(is, kept["record.json"], "data/kept/README.md says what to do");
    node.kill_pdpd();
    fs::write(&record, r#"{"what":{"guest":{"id":"red.r1.g0"}},"runc":"/bin/false","fds":0}"#)
        .expect("written");
    node.start_pdpd();
    eventually("it is made anew", || fs::read_to_string(&record).is_ok_and(|now| now == before));
    eventually("h1 reaches h2", || reaches(&node));
    let now = processes(&node);
    assert_eq!(now.iter().filter(|pid| !all.contains(pid)).count(), 1, "{all:?}, then {now:?}");

    // A run directory from before versions existed: everything restarts, and this is reported.
    node.kill_pdpd();
    fs::remove_file(node.run_dir().join("version")).expect("it has a version");
    let old = node.run_dir().join("vnets/red/r1/g0/record.json");
    fs::write(&old, r#"{"what":{"guest":{"id":"x"}},"runc":"/bin/false"}"#).expect("written");
    let before = processes_now(&now);
    assert_eq!(before, now, "nothing ended with pdpd");
    node.start_pdpd();
    assert_eq!(processes_now(&now), [0; 0], "what ran of that version has ended");
    eventually("h1 reaches h2", || reaches(&node));
    assert!(node.log().contains("everything restarts"), "{}", node.log());
    assert!(!old.exists());
    let all = processes(&node);
    assert!(all.len() == 8 && now.iter().all(|pid| !all.contains(pid)), "{now:?}, then {all:?}");

    // From then on it is adopted.
    node.kill_pdpd();
    node.start_pdpd();
    eventually("all is known", || processes(&node) == all);
    node.pdp(&["down", "--purge"]);
    node.wait_pdpd();
    assert_eq!(node.leftovers(), [""; 0]);
}

/// Command line of a process.
fn command_line(pid: u64) -> String {
    fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default()
}

/// Processes of these that still exist.
fn processes_now(pids: &[u64]) -> Vec<u64> {
    let runs = |pid: &&u64| {
        fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| {
            !stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('Z'))
        })
    };
    pids.iter().filter(runs).copied().collect()
}
