//! One tenant's faults affect only that tenant. Whatever its guests make, and however damaged the
//! files with its data are, other tenants start, deletions finish, and a purge ends.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use pdp_e2e::{TestNode, eventually, run, sh};
use serde_json::json;

/// Everything that a guest may do in the directory of its socket, which is a mount.
const MESS: &str = "cd /run/pdp/memif; mkdir -p d/e/f g h; for i in 1 2 3; do echo x > d/e/f/$i; done; \
                    ln -s / g/root; mkfifo h/pipe; echo done; exec sleep 1000";

fn substrate(images: &Path) -> String {
    format!(
        r#"
apiVersion: pdp/v1
kind: Substrate
metadata: {{name: node}}
spec:
  mux: {{cpus: "0", power: 0.5}}
  forwardingEngines: {{fe1: {{cpus: "1", capacity: 1}}}}
---
apiVersion: pdp/v1
kind: Tenant
metadata: {{name: acme}}
spec: {{images: ["{}"], quota: {{power: 0.4}}}}
---
apiVersion: pdp/v1
kind: Tenant
metadata: {{name: other}}
spec: {{quota: {{power: 0.4}}}}
"#,
        images.display()
    )
}

/// Router whose guest makes a mess, with a volume, and a host.
fn acme(name: &str) -> String {
    let spec = json!({
        "apiVersion": "pdp/v1", "kind": "VirtualNetwork", "metadata": {"name": format!("acme.{name}")},
        "spec": {
            "nodes": {
                "h": {"kind": "host", "interfaces": {"e0": {}}, "volumes": [{"source": "kept", "target": "/srv/kept", "size": "16Mi"}]},
                "r": {
                    "kind": "router", "interfaces": {"e0": {}},
                    "commands": [{"run": ["sh", "-c", "exec sleep 1001"]}],
                    "dataPlane": {
                        "power": 0.05, "guests": 1,
                        "program": {"attach": "memif", "run": ["sh", "-c", MESS]},
                    },
                },
            },
            "links": [{"endpoints": ["h:e0", "r:e0"]}],
        },
    });
    spec.to_string()
}

/// Two hosts of another tenant.
const OTHER: &str = r#"
apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {name: other.net}
spec:
  nodes:
    a: {kind: host, interfaces: {e0: {addresses: [10.3.0.1/24]}}}
    b: {kind: host, interfaces: {e0: {addresses: [10.3.0.2/24]}}}
  links: [{endpoints: ["a:e0", "b:e0"]}]
"#;

fn others_run(node: &TestNode, what: &str) {
    eventually(&format!("{what}: the other tenant's hosts reach each other"), || {
        node.try_exec("other.net/a", "ping -c1 -W1 10.3.0.2").is_ok()
    });
}

fn has_messed(node: &TestNode, name: &str) -> bool {
    let log = node.try_pdp(&["logs", &format!("acme.{name}/r"), "--guest", "0"]);
    log.is_ok_and(|log| log.contains("done"))
}

/// Running processes of acme.
fn running(node: &TestNode) -> Vec<String> {
    let all = node.processes().into_iter().map(|process| process.line);
    all.filter(|words| words.contains("sleep 1000") || words.contains("sleep 1001")).collect()
}

/// Neither by killing the mux, which would empty the directory, nor after filling it.
#[test]
fn guest_directories_beside_its_socket_are_removed() {
    let mut node = TestNode::start("beside-socket");
    node.apply(&substrate(Path::new("/srv/none")));
    node.apply(OTHER);
    for round in 0..2 {
        node.apply(&acme("lab"));
        eventually("the guest made its directories", || has_messed(&node, "lab"));
        let directory = node.run_dir().join("vnets/acme.lab/r/g0/memif/d/e/f");
        assert!(directory.is_dir(), "it could make them");
        if round == 1 {
            node.kill_pdpd();
            node.start_pdpd();
        }
        node.pdp(&["delete", "acme.lab"]);
        assert!(!node.run_dir().join("vnets/acme.lab").exists());
        assert_eq!(running(&node), [""; 0]);
        let doctor = node.pdp(&["doctor"]);
        assert!(doctor.contains("nothing outlives its network or tenant"), "{doctor}");
    }
    node.apply(&acme("again"));
    eventually("the guest made its directories", || has_messed(&node, "again"));
    others_run(&node, "at the end");
    node.pdp(&["down", "--purge"]);
    node.wait_pdpd();
    assert_eq!(node.leftovers(), [""; 0]);
}

/// A file blocks a guest's removal. No process of its network runs, the reason is reported where
/// people look, all others continue, and the purge ends.
#[test]
fn unremovable_files_are_reported_with_the_remedy() {
    let mut node = TestNode::start("undeletable");
    node.apply(&substrate(Path::new("/srv/none")));
    node.apply(OTHER);
    node.apply(&acme("lab"));
    eventually("the guest runs", || has_messed(&node, "lab"));
    let guest = node.run_dir().join("vnets/acme.lab/r/g0");
    let stays = Stays::in_the_way(&guest);
    let error = node.try_pdp(&["delete", "acme.lab"]).expect_err("it stays");
    assert!(error.contains("not removed yet") && error.contains("guest acme.lab/r/0"), "{error}");
    assert_eq!(running(&node), [""; 0], "nothing of it runs");
    let listed = node.pdp(&["get"]);
    let line = listed.lines().find(|line| line.starts_with("acme.lab")).expect("it is listed");
    assert!(line.contains("removing") && line.contains("can't be removed for"), "{line}");
    let doctor = node.pdp(&["doctor", "--format", "json"]);
    let removes = format!("rm -rf --one-file-system {}", guest.display());
    assert!(doctor.contains("network acme.lab, which has the user ids"), "{doctor}");
    assert!(doctor.contains(&removes), "{doctor}");
    others_run(&node, "while it stays");
    // Restart, and the final purge.
    node.kill_pdpd();
    node.start_pdpd();
    others_run(&node, "after another start");
    let error = node.try_pdp(&["down", "--purge"]).expect_err("it stays");
    assert!(error.contains("everything else is removed") && error.contains(&removes), "{error}");
    node.wait_pdpd();
    let left = node.leftovers();
    let run_dir = node.run_dir().display().to_string();
    let cgroups = |what: &String| what.contains("cgroup") || what.starts_with("process");
    assert!(!left.is_empty() && !left.iter().any(cgroups), "{run_dir}: {left:?}");
    drop(stays);
    // Nested directories may have moved up.
    sh(&format!("chattr -R -i {run_dir} || true"));
    assert!(sh(&format!("rm -rf --one-file-system {run_dir} && echo gone")).contains("gone"));
}

/// Directory with a file that not even root can remove while this lives.
struct Stays(PathBuf);

impl Stays {
    fn in_the_way(directory: &Path) -> Self {
        let place = directory.join("stays");
        fs::create_dir(&place).expect("made");
        fs::write(place.join("file"), "").expect("written");
        sh(&format!("chattr +i {}", place.join("file").display()));
        Self(place.join("file"))
    }
}

impl Drop for Stays {
    fn drop(&mut self) {
        sh(&format!("chattr -i {} || true", self.0.display()));
    }
}

/// Kinds of damage to a file.
#[derive(Clone, Copy, Debug)]
enum Damage {
    Half,
    Rubbish,
    Huge,
    Directory,
    Pipe,
    Mount,
}

fn damage(path: &Path, how: Damage) {
    let at = path.display();
    let bytes = fs::read(path).unwrap_or_default();
    match how {
        Damage::Half => fs::write(path, &bytes[..bytes.len() / 2]).expect("written"),
        Damage::Rubbish => fs::write(path, [0xff; 300]).expect("written"),
        Damage::Huge => fs::write(path, vec![b'['; 8 << 20]).expect("written"),
        Damage::Directory => {
            fs::remove_file(path).expect("removed");
            fs::create_dir_all(path.join("a/b")).expect("made");
            fs::write(path.join("a/b/file"), "").expect("written");
        }
        Damage::Pipe => {
            fs::remove_file(path).expect("removed");
            sh(&format!("mkfifo {at}"));
        }
        Damage::Mount => {
            let other = path.with_file_name("other");
            fs::write(&other, "x").expect("written");
            sh(&format!("mount --bind {} {at}", other.display()));
        }
    }
}

/// All files of acme's to damage: records written by root, and files made by its guests.
fn files_of_acme(node: &TestNode) -> Vec<PathBuf> {
    let records = node.run_dir().join("records");
    let mut found = Vec::new();
    for entry in fs::read_dir(&records).expect("records").flatten() {
        if entry.file_name().to_string_lossy().starts_with("acme_") {
            let names = ["record.json", "pid", "shim", "commands", "bundle/config.json"];
            found.extend(names.map(|name| entry.path().join(name)));
        }
    }
    let vnet = node.run_dir().join("vnets/acme.lab");
    found.extend(["hosts", "r/mirror.json"].map(|name| vnet.join(name)));
    let volumes = node.directory.join("state/volumes");
    for owner in fs::read_dir(&volumes).into_iter().flatten().flatten() {
        found
            .extend(fs::read_dir(owner.path()).into_iter().flatten().flatten().map(|it| it.path()));
    }
    let index = node.directory.join("state/images/store/acme/index.json");
    fs::create_dir_all(index.parent().unwrap()).expect("made");
    if !index.exists() {
        fs::write(&index, "{}").expect("written");
    }
    found.push(index);
    found.retain(|path| path.is_file());
    found
}

/// Damages each file of one tenant, in each way. The other tenant's
/// network is there, and a purge ends and leaves nothing.
#[test]
fn start_and_purge_survive_damaged_tenant_files() {
    for how in [
        Damage::Half,
        Damage::Rubbish,
        Damage::Huge,
        Damage::Directory,
        Damage::Pipe,
        Damage::Mount,
    ] {
        let what = format!("{how:?}");
        let mut node = TestNode::start("damaged");
        node.apply(&substrate(Path::new("/srv/none")));
        node.apply(OTHER);
        node.apply(&acme("lab"));
        eventually("the guest made its directories", || has_messed(&node, "lab"));
        node.kill_pdpd();
        let files = files_of_acme(&node);
        assert!(files.len() > 20, "{files:?}");
        for file in &files {
            damage(file, how);
        }
        let memif = node.run_dir().join("vnets/acme.lab/r/g0/memif/d");
        sh(&format!("mount -t tmpfs below {0} && mkdir {0}/nested", memif.display()));
        node.start_pdpd();
        others_run(&node, &what);
        let images = node.pdp(&["images"]);
        assert!(
            images.contains("its images can't be read") && images.contains("rm -r"),
            "{images}"
        );
        node.pdp(&["down", "--purge"]);
        node.wait_pdpd();
        assert_eq!(node.leftovers(), [""; 0], "{what}");
        assert_eq!(running(&node), [""; 0], "{what}");
    }
}

/// pdpd reports a tenant's stored spec that it can't read, keeps that network's volumes, and runs
/// the other tenant's network.
#[test]
fn damaged_stored_spec_blocks_no_other_tenant() {
    let mut node = TestNode::start("damaged-spec");
    node.apply(&substrate(Path::new("/srv/none")));
    node.apply(OTHER);
    node.apply(&acme("lab"));
    node.pdp(&["exec", "acme.lab/h", "--", "sh", "-c", "echo mine > /srv/kept/file"]);
    node.kill_pdpd();
    let state = node.directory.join("state/pdpd.sqlite");
    let change = "import sqlite3, sys; db = sqlite3.connect(sys.argv[1]); \
                  db.execute(\"UPDATE documents SET body = '{' WHERE name = 'acme.lab'\"); db.commit()";
    let output = run(Command::new("python3").args(["-c", change]).arg(&state), "");
    assert!(output.status.success(), "{output:?}");
    node.start_pdpd();
    others_run(&node, "with a damaged spec");
    let listed = node.pdp(&["get"]);
    let line = listed.lines().find(|line| line.starts_with("acme.lab")).expect("it is listed");
    assert!(line.contains("failed") && line.contains("its stored spec can't be read"), "{line}");
    assert!(node.pdp(&["doctor"]).contains("pdp delete acme.lab"));
    eventually("nothing of it runs", || running(&node).is_empty());
    // Applied again, it has everything it had.
    node.apply(&acme("lab"));
    assert_eq!(node.exec("acme.lab/h", "cat /srv/kept/file").trim(), "mine");
    node.pdp(&["down", "--purge"]);
    node.wait_pdpd();
    assert_eq!(node.leftovers(), [""; 0]);
}
