//! Harmful guests, as separate programs (`hostile/guest.py`). Whatever
//! one does to the mux that it shares with others, their traffic
//! continues without loss, and the guest's tenant learns what it did.
//!
//! During each attack h1 pings h2 a hundred times per second through another network on the same
//! mux and forwarding engine.

use std::fs;
use std::time::{Duration, Instant};

use pdp_e2e::counters::missing;
use pdp_e2e::specs::{SUBSTRATE, two_hosts};
use pdp_e2e::{Background, TestNode, all_answered, eventually};
use serde_json::{Value, json};

const GUEST: &str = include_str!("hostile/guest.py");

/// Required answers during each attack, and the pause between two pings, seconds.
const PINGS: usize = 200;
const PING_PAUSE: &str = "0.01";

/// Protocol violations, and a word of the message to the tenant.
const BREACHES: [(&str, &str); 9] = [
    ("index", "ahead of"),
    ("bounds", "bytes at"),
    ("region", "descriptor in region"),
    ("chain", "chain of"),
    ("posted", "bytes at"),
    ("tags", "tag"),
    ("duplicates", "completion"),
    ("control_socket", ""),
    ("unsealed", "seal"),
];

/// Actions without a reportable violation, which must not affect others.
const NUISANCES: [&str; 13] = [
    "cookie",
    "silent",
    "flood",
    "scribble",
    "punch",
    "descriptors",
    "bell",
    "fork",
    "memory",
    "reconnect",
    "connect_whole",
    "rules",
    "stopped",
];

/// The same network with another program.
fn evil(kind: &str) -> String {
    let program = match kind {
        "rules" | "stopped" => json!("router"),
        _ => json!({"attach": "runtime", "run": ["python3", "-c", GUEST, kind]}),
    };
    two_hosts("evil", &json!({"power": 0.3, "memory": "128Mi", "program": program}).to_string())
}

struct Bench {
    node: TestNode,
    mux: u32,
}

impl Bench {
    fn start() -> Self {
        let node = TestNode::start("hostile");
        node.apply(SUBSTRATE);
        node.apply(&two_hosts("good", "{power: 0.3}"));
        eventually("h1 reaches h2", || node.try_exec("good/h1", "ping -c1 -W1 10.2.0.2").is_ok());
        let mux = node.json(&["inspect", "substrate"])["status"]["mux"]["pid"].as_u64();
        let mux = mux.and_then(|pid| u32::try_from(pid).ok()).expect("the mux runs");
        Self { node, mux }
    }

    fn guest(&self) -> Value {
        self.node.json(&["stats", "evil"])["vnets"]["evil"]["nodes"]["r1"]["guests"]["0"].clone()
    }

    /// Output of the evil guest and its starter.
    fn output(&self) -> String {
        // A guest that is being restarted briefly has no log.
        self.node.try_pdp(&["logs", "evil/r1", "--guest", "0"]).unwrap_or_default()
    }

    /// Starts pings of the good network.
    fn pings(&self) -> Background {
        let command = format!("ping -c{PINGS} -i{PING_PAUSE} -w60 10.2.0.2");
        let mut all = vec!["exec", "good/h1", "--"];
        all.extend(command.split(' '));
        Background::start(&mut self.node.pdp_command(&all))
    }

    /// Checks what must hold after any action.
    fn check(&self, kind: &str, pings: Background) {
        let words = pings.finish();
        assert!(all_answered(&words, PINGS), "{kind}: {words}");
        let mux = self.node.json(&["inspect", "substrate"])["status"]["mux"]["pid"].as_u64();
        assert_eq!(mux, Some(self.mux.into()), "{kind}: another mux");
        let stats = self.node.json(&["stats"]);
        assert_eq!(missing(&stats), [], "{kind}: {stats:#}");
        let last = words.lines().last().unwrap_or_default();
        println!("{kind}: {PINGS} of {PINGS}, {last}");
    }

    /// Waits until the mux holds no more than before.
    fn wait_released(&self, resources: [usize; 2]) {
        let mut now = [0; 2];
        for _ in 0..100 {
            now = self.resources();
            if now == resources {
                return;
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        let fds = fs::read_dir(format!("/proc/{}/fd", self.mux)).expect("the mux runs");
        let fds = fds.flatten().map(|fd| fs::read_link(fd.path()).unwrap_or_default());
        let fds: Vec<_> = fds.map(|to| to.display().to_string()).collect();
        panic!("descriptors and maps of the mux: {resources:?}, and now {now:?}: {fds:?}");
    }

    /// Resources that the mux holds at rest: the minimum
    /// within a second, to ignore brief connections.
    fn resources_at_rest(&self) -> [usize; 2] {
        let samples = (0..10).map(|_| {
            std::thread::sleep(Duration::from_millis(100));
            self.resources()
        });
        samples.reduce(|one, other| [one[0].min(other[0]), one[1].min(other[1])]).expect("ten")
    }

    /// Descriptors of the mux, and mappings of peers' memory.
    fn resources(&self) -> [usize; 2] {
        let count = |what: &str| format!("/proc/{}/{what}", self.mux);
        let fds = fs::read_dir(count("fd")).expect("the mux runs").count();
        let maps = fs::read_to_string(count("maps")).expect("the mux runs");
        [fds, maps.lines().filter(|line| line.contains("memfd:")).count()]
    }
}

#[test]
fn guest_breaking_memif_contract_is_disconnected_with_reason() {
    let bench = Bench::start();
    let node = &bench.node;
    let resources = bench.resources_at_rest();
    for (kind, reason) in BREACHES {
        node.apply(&evil(kind));
        // So that it has something to complete.
        let ask = ["exec", "evil/h1", "--", "ping", "-c100", "-i0.02", "-W1", "10.2.0.2"];
        let _frames = Background::start(&mut node.pdp_command(&ask));
        let pings = bench.pings();
        if reason.is_empty() {
            // It only hangs up because of invalid messages; no frame is at fault.
            eventually("it connects", || bench.output().contains("thrown out"));
        } else {
            eventually(&format!("{kind} is told"), || {
                let guest = bench.guest();
                let last_fault = guest["lastFault"].as_str().unwrap_or_default();
                guest["faults"].as_u64() > Some(0) && last_fault.contains(reason)
            });
        }
        bench.check(kind, pings);
        let last_fault = bench.guest()["lastFault"].clone();
        println!("{kind}: {last_fault}");
        node.pdp(&["delete", "evil"]);
    }
    bench.wait_released(resources);
}

#[test]
fn misbehaving_guest_harms_no_other_network() {
    let bench = Bench::start();
    let node = &bench.node;
    let resources = bench.resources_at_rest();
    for kind in NUISANCES {
        node.apply(&evil(kind));
        let ask = ["exec", "evil/h1", "--", "ping", "-f", "-w5", "10.2.0.2"];
        let _frames = Background::start(&mut node.pdp_command(&ask));
        let mut _more = None;
        if ["rules", "stopped"].contains(&kind) {
            _more = Some(control_side(node, kind == "stopped"));
        } else {
            eventually(&format!("{kind} is at it"), || {
                ["reconnect", "connect_whole"].contains(&kind)
                    || bench.guest()["connected"] == json!(true)
                    || bench.output().lines().count() > 1
            });
        }
        bench.check(kind, bench.pings());
        println!("{kind}: {}", bench.guest());
        let output = bench.output();
        match kind {
            "punch" => assert!(output.contains(" no memory taken away"), "{output}"),
            // 64, and 8 for each of its two vports, in addition to its usual ones.
            "descriptors" => {
                let opened = output.split(" opened ").nth(1).and_then(|rest| rest.lines().next());
                let opened: u32 = opened.and_then(|count| count.parse().ok()).expect(&output);
                assert!((40..80).contains(&opened), "{output}");
            }
            _ => {}
        }
        let since = Instant::now();
        node.pdp(&["delete", "evil"]);
        assert!(since.elapsed() < Duration::from_secs(20), "{kind} goes at once");
    }
    bench.wait_released(resources);
}

/// 20,000 rules that every packet to the control guest traverses, or a control guest that takes no
/// packets. In addition a continuous flood of them.
fn control_side(node: &TestNode, stop: bool) -> Background {
    let script = "
        nft add table ip slow
        nft add chain ip slow input '{ type filter hook input priority 0; }'
        for batch in $(seq 100); do
            seq 200 | sed 's/.*/add rule ip slow input udp dport & counter/' > /tmp/rules
            nft -f /tmp/rules
        done";
    if !stop {
        node.pdp(&["exec", "evil/r1", "--", "sh", "-ec", script]);
    }
    let flood = ["exec", "evil/h2", "--", "timeout", "10", "ping", "-f", "-s", "1400", "10.2.0.1"];
    let flood = Background::start(&mut node.pdp_command(&flood));
    let status = node.json(&["inspect", "evil"])["status"].clone();
    let nodes = status["nodes"].as_array().expect("nodes");
    let r1 = nodes.iter().find(|found| found["name"] == "r1").expect("r1");
    for part in ["tap", "control"].into_iter().filter(|_| stop) {
        let pid = r1[part]["pid"].as_u64().expect("it runs");
        pdp_e2e::sh(&format!("kill -STOP {pid}"));
    }
    std::thread::sleep(Duration::from_secs(1));
    flood
}
