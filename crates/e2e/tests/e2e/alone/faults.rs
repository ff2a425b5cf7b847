//! Impact of faults on forwarding: the gap after each kill, a full disk, lack of memory.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use pdp_e2e::counters::missing;
use pdp_e2e::specs::{SUBSTRATE, three_kernels, two_hosts};
use pdp_e2e::{Background, TestNode, alone, eventually, kill, sh};
use serde_json::Value;

/// With two guests, so that one continues when the other dies.
fn vnet(name: &str) -> String {
    two_hosts(name, "{power: 0.2, guests: 2, distribution: {policy: round-robin}}")
}

/// Pause between two pings. They begin before the measured event and continue after it. The last
/// one's answer may still be in flight.
const PAUSE_MS: u64 = 2;
const BEFORE: Duration = Duration::from_millis(300);
const AFTER: Duration = Duration::from_secs(1);
const ON_THEIR_WAY: u64 = 100;

/// Bounds of the gaps, milliseconds; the test prints the measured ones.
/// The mux notices a guest's death by its closed socket, and loses the
/// guest's frames. A new mux must start, and all peers reconnect to it.
const GUEST_GAP_MS_MAX: u64 = 500;
const MUX_GAP_MS_MAX: u64 = 5_000;

fn reaches(node: &TestNode, vnet: &str) -> bool {
    node.try_exec(&format!("{vnet}/h1"), "ping -c1 -W1 10.2.0.2").is_ok()
}

fn up(label: &str) -> TestNode {
    let node = TestNode::start(label);
    node.apply(SUBSTRATE);
    node.apply(&vnet("red"));
    eventually("h1 reaches h2", || reaches(&node, "red"));
    eventually("both guests are there", || {
        let stats = node.json(&["stats", "red"]);
        let guests = stats["vnets"]["red"]["nodes"]["r1"]["guests"].as_object().cloned();
        guests.is_some_and(|all| all.len() == 2 && all.values().all(|it| it["connected"] == true))
    });
    node
}

fn of(node: &TestNode, name: &str) -> Value {
    let status = node.json(&["inspect", "red"])["status"].clone();
    let nodes = status["nodes"].as_array().expect("nodes");
    nodes.iter().find(|found| found["name"] == name).expect("the node").clone()
}

fn pid(value: &Value) -> u32 {
    value["pid"].as_u64().and_then(|pid| u32::try_from(pid).ok()).expect("it runs")
}

fn mux(node: &TestNode) -> u32 {
    pid(&node.json(&["inspect", "substrate"])["status"]["mux"])
}

/// Lost pings.
struct Gap {
    lost: u64,
    sent: u64,
    /// Longest burst of losses, milliseconds.
    longest_ms: u64,
}

/// Runs `act` while h1 pings 10.2.0.2.
fn gap(h1: u32, act: impl FnOnce()) -> Gap {
    // ping would block on a full pipe.
    let output = tempfile::NamedTempFile::new().expect("a file");
    let to = output.path().display();
    let line = format!("exec ping -i 0.00{PAUSE_MS} -w 120 10.2.0.2 > {to}");
    let mut ping = Command::new("nsenter");
    ping.args(["-n", "-t", &h1.to_string(), "sh", "-c", &line]);
    let (ping, since) = (Background::start(&mut ping), Instant::now());
    std::thread::sleep(BEFORE);
    act();
    std::thread::sleep(AFTER);
    let took_ms = since.elapsed().as_millis() as u64;
    ping.stop("INT");
    let words = fs::read_to_string(output.path()).expect("what ping said");
    let received: BTreeSet<u64> = words
        .split_whitespace()
        .filter_map(|word| word.strip_prefix("icmp_seq=")?.parse().ok())
        .collect();
    let all =
        words.lines().find_map(|line| line.split_once(" packets transmitted")?.0.parse().ok());
    let all: u64 = all.expect("ping's last words");
    let sent = all.saturating_sub(ON_THEIR_WAY);
    assert!(sent > 0, "{words}");
    let (mut lost, mut row, mut longest) = (0, 0, 0);
    for number in 1..=sent {
        row = if received.contains(&number) { 0 } else { row + 1 };
        lost += u64::from(row > 0);
        longest = longest.max(row);
    }
    // On a busy machine a pause is longer than requested.
    Gap { lost, sent, longest_ms: longest * took_ms / all }
}

#[test]
fn traffic_gap_of_every_crash_is_bounded() {
    let _alone = alone();
    let mut node = up("gaps");
    let h1 = pid(&of(&node, "h1")["control"]);
    let print = |what: &str, Gap { lost, sent, longest_ms }: Gap| {
        println!("kill -9 of {what}: {lost} of {sent} lost, longest gap {longest_ms} ms");
        longest_ms
    };
    let nothing = gap(h1, || {});
    assert_eq!(print("nothing", nothing), 0);

    let pdpd = gap(h1, || {
        node.kill_pdpd();
        std::thread::sleep(Duration::from_millis(500));
        node.start_pdpd();
    });
    assert_eq!(print("pdpd, and a new one", pdpd), 0);
    for part in ["tap", "mirror"] {
        // h1's path uses h1's own process; no path uses the router's.
        let old = pid(&of(&node, "r1")[part]);
        let lost = gap(h1, || {
            kill(old);
            eventually("it is replaced", || of(&node, "r1")[part]["pid"] != old);
        });
        assert_eq!(print(&format!("the router's {part} helper"), lost), 0);
    }
    let guest = pid(&of(&node, "r1")["guests"][0]);
    let lost = gap(h1, || {
        kill(guest);
        eventually("it is replaced", || of(&node, "r1")["guests"][0]["pid"] != guest);
    });
    assert!(print("one forwarding guest of two", lost) <= GUEST_GAP_MS_MAX);
    let old = mux(&node);
    let lost = gap(h1, || {
        kill(old);
        eventually("the mux is replaced, and h1 reaches h2", || reaches(&node, "red"));
    });
    assert_ne!(mux(&node), old);
    assert!(lost.lost > 0, "the mux was on the way");
    assert!(print("the mux", lost) <= MUX_GAP_MS_MAX);
}

/// Between routers with kernel links: r2 forwards from one to the other.
#[test]
fn crashes_cost_kernel_links_no_frame() {
    let _alone = alone();
    let mut node = TestNode::start("straightgaps");
    node.apply(&three_kernels("red"));
    node.pdp(&["wait", "red", "--for", "ready", "--timeout", "60s"]);
    let [r1, r2] = ["r1", "r2"].map(|name| pid(&of(&node, name)["control"]));
    assert!(of(&node, "r2")["tap"].is_null(), "all of its links are in the kernel");
    assert!(node.try_exec("red/r1", "ping -c1 -W5 10.2.0.2").is_ok());
    // Carrier changes of r2, and its ports' counters.
    let carriers = |node: &TestNode| {
        let files = ["eth0", "eth1"].map(|port| format!("/sys/class/net/{port}/carrier_changes"));
        node.exec("red/r2", &format!("cat {}", files.join(" ")))
    };
    let counted = |node: &TestNode| {
        let mut stats = Value::Null;
        // A starting program may send something while counters are read.
        eventually("counters add up", || {
            stats = node.json(&["stats", "red"]);
            missing(&stats).is_empty()
        });
        ["eth0", "eth1"].map(|port| {
            let port = &stats["vnets"]["red"]["nodes"]["r2"]["ports"][port];
            ["received", "sent"].map(|name| port[name].as_u64().expect("a counter"))
        })
    };
    let still = carriers(&node);
    let both = |node: &mut TestNode, with_mux: bool, with_pdpd: bool| {
        let old = mux(node);
        if with_pdpd {
            node.kill_pdpd();
        }
        if with_mux {
            kill(old);
        }
        if with_pdpd {
            std::thread::sleep(Duration::from_millis(500));
            node.start_pdpd();
        }
        eventually("all is there", || {
            let now = node.json(&["inspect", "substrate"])["status"]["mux"]["pid"].as_u64();
            now.is_some_and(|now| (now != u64::from(old)) == with_mux)
        });
    };
    for (what, with_mux, with_pdpd) in
        [("pdpd", false, true), ("the mux", true, false), ("both", true, true)]
    {
        let before = counted(&node);
        let Gap { lost, sent, longest_ms } = gap(r1, || both(&mut node, with_mux, with_pdpd));
        println!("kill -9 of {what}: {lost} of {sent} lost, longest gap {longest_ms} ms");
        assert_eq!(lost, 0, "{what}");
        let after = counted(&node);
        let all_more = |port: usize, direction: usize| {
            after[port][direction] >= before[port][direction] + sent
        };
        let more =
            [(0, 0), (0, 1), (1, 0), (1, 1)].map(|(port, direction)| all_more(port, direction));
        assert_eq!(more, [true; 4], "{what}: {before:?} {after:?}, {sent} sent");
        assert_eq!(carriers(&node), still, "{what}");
        assert_eq!(pid(&of(&node, "r2")["control"]), r2, "{what}");
    }
}

/// Small file system for the test, removed when dropped.
struct Small(String);

impl Small {
    fn new(path: &Path, size: &str) -> Self {
        let path = path.display().to_string();
        sh(&format!("mkdir -p {path}; mount -t tmpfs -o size={size} small {path}"));
        Self(path)
    }

    fn fill(&self) {
        let _ = sh(&format!("dd if=/dev/zero of={}/full bs=4k status=none || true", self.0));
    }

    fn clear(&self) {
        sh(&format!("rm {}/full", self.0));
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = Command::new("umount").args(["-l", &self.0]).status();
    }
}

#[test]
fn full_disk_is_reported_and_costs_no_frame() {
    let _alone = alone();
    let mut node = TestNode::prepare("full");
    let state = Small::new(&node.directory.join("state"), "4m");
    let run = Small::new(&node.run_dir(), "64m");
    node.start_pdpd();
    node.apply(SUBSTRATE);
    node.apply(&vnet("red"));
    eventually("h1 reaches h2", || reaches(&node, "red"));
    let h1 = pid(&of(&node, "h1")["control"]);

    // The state's disk is full: a change is refused without effect, and running processes continue.
    state.fill();
    let lost = gap(h1, || {
        let words = node.try_apply(&vnet("blue")).expect_err("there is no room for it");
        assert!(words.contains("full") && words.contains("free space"), "{words}");
    });
    assert_eq!(lost.lost, 0);
    assert!(node.try_pdp(&["inspect", "blue"]).is_err());
    state.clear();
    node.apply(&vnet("blue"));
    eventually("h1 reaches h2", || reaches(&node, "blue"));
    node.pdp(&["delete", "blue"]);

    // The run directory is full: pdpd reports what it can't make, and makes it once there is room.
    run.fill();
    let lost = gap(h1, || {
        let words = node.try_apply(&vnet("blue")).expect_err("there is no room for it");
        assert!(words.contains("No space left"), "{words}");
    });
    assert_eq!(lost.lost, 0);
    run.clear();
    eventually("blue comes up by itself", || reaches(&node, "blue"));
    node.pdp(&["down", "--purge"]);
    node.wait_pdpd();
    drop(state);
    drop(run);
    assert_eq!(node.leftovers(), [""; 0]);
}

#[test]
fn node_without_memory_recovers_and_harms_only_itself() {
    let _alone = alone();
    let node = up("nomem");
    let h1 = pid(&of(&node, "h1")["control"]);
    node.apply(&vnet("blue").replace("dataPlane:", "resources: {memory: 64Mi}\n      dataPlane:"));
    eventually("blue is there", || reaches(&node, "blue"));
    let Gap { lost, sent, longest_ms } = gap(h1, || {
        let eat = "a = [bytearray(b'x' * (1 << 20)) for _ in range(1000)]";
        let words = node
            .try_pdp(&["exec", "blue/r1", "--", "python3", "-c", eat])
            .expect_err("there is no room for it");
        assert!(!words.contains("Traceback"), "{words}");
        println!("blue/r1 eats its memory: {words}");
    });
    println!(
        "a node without memory: {lost} of {sent} of another lost, longest gap {longest_ms} ms"
    );
    assert_eq!(lost, 0);
    eventually("blue is back", || reaches(&node, "blue"));
}

#[test]
fn damaged_state_is_reported_and_stops_nothing() {
    let _alone = alone();
    let mut node = up("damage");
    let h1 = pid(&of(&node, "h1")["control"]);
    node.kill_pdpd();
    let state = node.directory.join("state");
    let file = state.join("pdpd.sqlite");
    // Moves the contents of the write-ahead log into the file, which is then complete.
    let whole = {
        let copy = node.directory.join("copy.sqlite");
        let script = format!(
            "import sqlite3
d = sqlite3.connect('{}')
d.execute('pragma wal_checkpoint(truncate)'); d.close()",
            file.display()
        );
        let output = Command::new("python3").args(["-c", &script]).output().expect("python3");
        assert!(output.status.success(), "{output:?}");
        fs::copy(&file, &copy).expect("a copy");
        fs::read(&copy).expect("the copy")
    };
    let half = whole[..whole.len() / 2].to_vec();
    let noise = b"no database".repeat(1000);
    let damages = [("half", half), ("noise", noise), ("empty", vec![])];
    for (what, bytes) in damages {
        fs::write(&file, &bytes).expect("damage");
        let lost = gap(h1, || {
            let error = node.try_start_pdpd().expect_err(what);
            assert!(error.contains("--forget"), "{what}: {error}");
        });
        assert_eq!(lost.lost, 0, "{what}");
        for beside in ["pdpd.sqlite-wal", "pdpd.sqlite-shm"] {
            let _ = fs::remove_file(state.join(beside));
        }
    }

    // With the file restored, everything is adopted.
    fs::write(&file, &whole).expect("the file");
    node.start_pdpd();
    eventually("it knows what runs", || pid(&of(&node, "h1")["control"]) == h1);
    // Without it, pdpd starts from scratch.
    node.kill_pdpd();
    fs::remove_file(&file).expect("the file");
    node.pdpd_arguments(&["--forget"]);
    node.start_pdpd();
    node.apply(SUBSTRATE);
    node.apply(&vnet("red"));
    eventually("h1 reaches h2", || reaches(&node, "red"));
    assert_ne!(pid(&of(&node, "h1")["control"]), h1);
    node.pdp(&["down", "--purge"]);
    node.wait_pdpd();
    assert_eq!(node.leftovers(), [""; 0]);
}
