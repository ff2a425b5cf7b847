//! What a guest, a helper, the mux or a program of a memif group can write is nothing to root.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use pdp_e2e::specs::two_hosts;
use pdp_e2e::{Background, Node, eventually, run};
use serde_json::json;

/// Does in the directory that it is given, which root has made for its socket, what it can.
const EVIL: &str = include_str!("boundaries/evil.py");

/// A group of programs behind a memif interface, and a user of it.
const GROUP: u32 = 54_321;

const SUBSTRATE: &str = r#"
apiVersion: pdp/v1
kind: Substrate
metadata: {name: node}
spec:
  interfaces: {in: {memif: {group: "54321"}}}
  mux: {cpus: "0", power: 0.5}
  forwardingEngines: {fe1: {cpus: "1", capacity: 1}}
"#;

/// Networks with every way for a program to be attached.
fn start(label: &str) -> Node {
    let node = Node::start(label);
    node.apply(SUBSTRATE);
    node.apply(&two_hosts("good", "{power: 0.2}"));
    eventually("h1 reaches h2", || reaches(&node));
    node
}

fn reaches(node: &Node) -> bool {
    node.try_exec("good/h1", "ping -c1 -W1 10.2.0.2").is_ok()
}

/// A network whose router's guests are this program.
fn network(name: &str, guests: u32, attach: &str, program: &[&str]) -> String {
    let plane = json!({
        "power": 0.2, "guests": guests, "program": {"attach": attach, "run": program},
    });
    two_hosts(name, &plane.to_string())
}

/// All below a directory, without what guests see as their own root, read-only.
fn all_below(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.ends_with("bundle/root") {
            continue;
        }
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            all_below(&path, found);
        }
        found.push(path);
    }
}

#[test]
fn nobody_below_root_writes_what_root_reads() {
    let node = start("writes");
    node.apply(&network("taps", 1, "tap", &["sleep", "1000"]));
    node.apply(&network("memifs", 1, "memif", &["sleep", "1000"]));
    let mut users: BTreeSet<(u32, u32)> = BTreeSet::from([(GROUP, GROUP)]);
    for (pid, _) in node.processes() {
        let meta = fs::metadata(format!("/proc/{pid}/stat"));
        users.extend(meta.map(|meta| (meta.uid(), meta.gid())).ok());
    }
    users.retain(|(uid, _)| *uid != 0);
    assert!(users.len() > 8, "the mux, helpers and guests have users of their own: {users:?}");
    let mut paths = Vec::new();
    all_below(&node.run_dir(), &mut paths);
    let list: String = paths.iter().map(|path| format!("{}\n", path.display())).collect();
    // What each of them may write: sockets, since that is to connect, and directories with a bound.
    let run_dir = node.run_dir();
    let mut bounded = BTreeSet::new();
    for (uid, gid) in users {
        let user = format!("--reuid={uid} --regid={gid} --clear-groups");
        let mut command = Command::new("setpriv");
        command.args(user.split(' ')).args(["sh", "-c"]);
        command.arg("while read -r path; do test -w \"$path\" && echo \"$path\"; done; true");
        let output = run(&mut command, &list);
        assert!(output.status.success(), "{output:?}");
        for path in String::from_utf8_lossy(&output.stdout).lines() {
            let is_socket = path.ends_with(".sock");
            let is_null =
                fs::symlink_metadata(path).is_ok_and(|meta| !meta.is_file() && !meta.is_dir());
            if is_socket || is_null && !path.contains("/vnets/") {
                continue;
            }
            let below = Path::new(path).strip_prefix(&run_dir).expect("below it");
            bounded.insert(below.to_owned());
            let room = rustix::fs::statvfs(path).expect("a directory");
            assert!(room.f_files <= 64 && room.f_blocks * room.f_frsize <= 64 << 10, "{path}");
            let meta = fs::metadata(path).expect("a directory");
            assert_eq!((meta.uid(), meta.mode() & 0o7777), (0, 0o1770), "{path}");
        }
    }
    let expected = ["externals/in", "vnets/memifs/r1/g0/memif"].map(PathBuf::from);
    assert_eq!(bounded, BTreeSet::from(expected));
}

#[test]
fn forged_records_rubbish_and_depth_are_nothing_to_root() {
    let mut node = start("forged");
    let marker = node.directory.join("root-was-here");
    let run_dir = node.run_dir();
    let evil = |inside: &str, outside: &Path| {
        let words = [inside, outside.to_str().unwrap(), marker.to_str().unwrap()];
        ["/usr/bin/python3", "-c", EVIL]
            .into_iter()
            .chain(words)
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    // By the guest of a tenant, in the directory of its socket.
    let outside = run_dir.join("vnets/evil/r1/g0/memif");
    let program = evil("/run/pdp/memif", &outside);
    let program: Vec<&str> = program.iter().map(String::as_str).collect();
    let spec = |guests| network("evil", guests, "memif", &program);
    node.apply(&spec(1));
    // Before its first word there may be no log.
    let said = || node.try_pdp(&["logs", "evil/r1", "--guest", "0"]).unwrap_or_default();
    eventually("the guest did what it could", || said().contains("all done"));
    let words = said();
    for what in ["unlink", "replace", "directory in its place"] {
        assert!(words.contains(&format!("{what}: refused")), "{words}");
    }
    assert!(words.contains("nested: refused"), "{words}");
    // By a program of a memif group, and by the mux and a helper, as which it may write nothing at all.
    let external = run_dir.join("externals/in");
    let as_user = |uid: u32, directory: &Path| {
        let user = format!("--reuid={uid} --regid={uid} --clear-groups");
        let mut command = Command::new("setpriv");
        command.args(user.split(' ')).args(evil(directory.to_str().unwrap(), directory));
        Background::start(&mut command)
    };
    let program = as_user(GROUP, &external);
    let owner = |id: &str| {
        let pid = fs::read_to_string(node.record(id).join("pid")).expect("it runs");
        let pid: serde_json::Value = serde_json::from_str(&pid).expect("JSON");
        fs::metadata(format!("/proc/{}/stat", pid["pid"])).expect("it runs").uid()
    };
    eventually("the program did what it could", || external.join("record.json").exists());
    for (id, directory) in [
        ("mux", run_dir.join("mux")),
        ("mux", outside.clone()),
        ("mux", run_dir.join("records/mux")),
        ("evil.r1.tap", run_dir.join("vnets/evil/r1/tap")),
        ("evil.r1.tap", run_dir.join("records")),
    ] {
        let words = as_user(owner(id), &directory).finish();
        assert!(words.contains("nothing can be done"), "{id} in {directory:?}: {words}");
    }
    // pdpd's death and return, a mux's, scaling, a change, and the end of each.
    let check = |node: &Node, what: &str| {
        assert!(!marker.exists(), "{what}: root ran a tenant's program");
        eventually(&format!("{what}: h1 reaches h2"), || reaches(node));
    };
    node.kill_pdpd();
    node.start_pdpd();
    node.apply(&two_hosts("another", "{power: 0.1}"));
    check(&node, "a new pdpd");
    let socket =
        |directory: &Path| fs::metadata(directory.join("memif.sock")).expect("there").uid();
    let mux = node.json(&["inspect", "substrate"])["status"]["mux"]["pid"].as_u64().expect("runs");
    pdp_e2e::kill(u32::try_from(mux).expect("a pid"));
    eventually("another mux", || {
        let pid = node.json(&["inspect", "substrate"])["status"]["mux"]["pid"].as_u64();
        pid.is_some_and(|pid| pid != mux)
    });
    check(&node, "a new mux");
    assert_eq!((socket(&outside), socket(&external)), (0, 0));
    node.apply(&spec(2));
    node.apply(&spec(1));
    check(&node, "scaled");
    node.pdp(&["delete", "evil"]);
    assert!(!node.place("evil").exists());
    check(&node, "deleted");
    node.kill_pdpd();
    node.start_pdpd();
    check(&node, "pdpd once more");
    node.pdp(&["down", "--purge"]);
    node.wait_pdpd();
    assert!(!marker.exists());
    drop(program);
    assert_eq!(node.leftovers(), [""; 0]);
}
