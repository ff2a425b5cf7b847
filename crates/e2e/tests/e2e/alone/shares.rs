//! CPU shares hold. A guest that computes without end gets exactly its quota. Another guest, and
//! the mux on the same CPU, work as without it.
//!
//! Everything runs on one CPU. `pdp experiment schedulers` measures other scheduler settings.

use std::path::Path;
use std::time::{Duration, Instant};

use pdp_e2e::frame::{NUMBER_AT, write_frame};
use pdp_e2e::{TestNode, all_answered, alone, eventually, meter};
use serde_json::json;

/// Quotas of the spinning guest and of the router's, cores.
const SPINNER: f64 = 0.3;
const ROUTER: f64 = 0.3;

/// Further spinning guests, without guaranteed power.
const BORROWERS: [&str; 3] = ["lab1", "lab2", "lab3"];

/// Tolerance above a guest's quota: the kernel counts in ticks.
const SHARE_ERROR_MAX: f64 = 0.05;

/// Frames per second through the router, which then leaves some of its quota unused.
const PPS: u64 = 20_000;

/// Least throughput of router and mux beside a spinning guest,
/// relative to that without it. Frames in flight are missing.
const KEPT_MIN: f64 = 0.9;

const TIME: Duration = Duration::from_secs(4);

fn substrate(frames: &Path, pps: u64) -> String {
    let source = json!({"generator": {"frames": frames, "pps": pps, "numberAt": NUMBER_AT}});
    json!({
        "apiVersion": "pdp/v1", "kind": "Substrate", "metadata": {"name": "node"},
        "spec": {
            "interfaces": {"a": source, "b": {"generator": {"numberAt": NUMBER_AT}}},
            "mux": {"cpus": "0", "power": 0.3},
            "forwardingEngines": {"fe0": {"cpus": "0", "capacity": 0.7}},
        },
    })
    .to_string()
}

fn router() -> String {
    json!({
        "apiVersion": "pdp/v1", "kind": "VirtualNetwork", "metadata": {"name": "red"},
        "spec": {
            "nodes": {
                "r1": {
                    "kind": "router",
                    "interfaces": {
                        "eth0": {"addresses": ["10.0.1.1/24"], "mac": "02:00:00:00:01:01"},
                        "eth1": {"addresses": ["10.0.2.1/24"], "mac": "02:00:00:00:02:01"},
                        "eth2": {"addresses": ["10.0.3.1/24"]},
                    },
                    "dataPlane": {"power": ROUTER},
                },
                "h1": {"kind": "host", "interfaces": {"eth0": {
                    "addresses": ["10.0.3.2/24"], "gateways": ["10.0.3.1"]}}},
                "h2": {"kind": "host", "interfaces": {"eth0": {"addresses": ["10.0.4.2/24"]}}},
            },
            "externals": {"a": {"interface": "a"}, "b": {"interface": "b"}},
            "links": [
                {"endpoints": ["r1:eth0", "external:a"]},
                {"endpoints": ["r1:eth1", "external:b"]},
                {"endpoints": ["r1:eth2", "h1:eth0"]},
            ],
        },
    })
    .to_string()
}

fn spinner(name: &str, power: Option<f64>) -> String {
    let mut plane =
        json!({"program": {"attach": "memif", "run": ["sh", "-c", "while :; do :; done"]}});
    if let Some(power) = power {
        plane["power"] = json!(power);
    }
    json!({
        "apiVersion": "pdp/v1", "kind": "VirtualNetwork", "metadata": {"name": name},
        "spec": {"nodes": {"r1": {"kind": "router", "dataPlane": plane}}},
    })
    .to_string()
}

/// Cores used by the processes of a cgroup of the node over [`TIME`], while `act` runs.
fn cores(node: &TestNode, cgroup: &str, act: impl FnOnce()) -> f64 {
    let cgroup = format!("{}/{cgroup}\n", node.cgroup());
    let pids = meter::processes("cgroup", &cgroup);
    assert!(!pids.is_empty(), "{cgroup}");
    let (before, since) = (meter::cpu_s(&pids), Instant::now());
    act();
    std::thread::sleep(TIME.saturating_sub(since.elapsed()));
    (meter::cpu_s(&pids) - before) / since.elapsed().as_secs_f64()
}

/// Frames that left the router, and that were sent into it, over [`TIME`].
fn passed(node: &TestNode) -> (u64, u64) {
    let count = |name: &str, what: &str| {
        node.json(&["stats"])["externals"][name][what].as_u64().expect("a counter")
    };
    let before = (count("b", "numbered"), count("a", "received"));
    std::thread::sleep(TIME);
    (count("b", "numbered") - before.0, count("a", "received") - before.1)
}

#[test]
fn spinning_guest_stays_within_its_quota() {
    let _alone = alone();
    let node = TestNode::start("shares");
    let frames = node.directory.join("frame");
    write_frame(&frames).expect("a file");
    node.apply(&substrate(&frames, 1));
    node.apply(&router());
    let neighbour = "ip neigh replace 10.0.2.2 lladdr 02:00:00:00:02:02 dev eth1";
    node.exec("red/r1", neighbour);
    node.apply(&substrate(&frames, PPS));
    eventually("frames pass", || node.json(&["stats"])["externals"]["b"]["numbered"] != json!(0));
    let ping = || {
        let words = node.exec("red/h1", "ping -c200 -i0.01 -w60 10.0.3.1");
        assert!(all_answered(&words, 200), "{words}");
        words.lines().last().unwrap_or_default().to_owned()
    };
    let mut alone = (0, 0);
    let router = cores(&node, "vnets/_red/_r1.g0/guest", || alone = passed(&node));
    println!("alone: {alone:?} frames passed and sent, {router:.3} cores, {}", ping());

    node.apply(&spinner("spin", Some(SPINNER)));
    std::thread::sleep(Duration::from_millis(500));
    let mut spins = 0.0;
    eventually("it has its quota, where others leave it that", || {
        spins = cores(&node, "vnets/_spin/_r1.g0/guest", || {});
        assert!(spins <= SPINNER + SHARE_ERROR_MAX, "{spins} cores, not {SPINNER}");
        spins >= SPINNER - SHARE_ERROR_MAX
    });
    let kept = |now: u64, of: u64| now as f64 >= KEPT_MIN * of as f64;
    eventually("router and mux do as much beside it, where others leave them their CPU", || {
        let mut beside = (0, 0);
        let router = cores(&node, "vnets/_red/_r1.g0/guest", || beside = passed(&node));
        println!("beside one that spins, with {spins:.3} cores: {beside:?}, {router:.3} cores");
        assert!(router <= ROUTER + SHARE_ERROR_MAX, "{router}");
        kept(beside.0, beside.1) && kept(beside.1, alone.1)
    });
    println!("{}", ping());

    // Guests without guaranteed power are accepted although the engine is full to the last tenth.
    // They use the remaining time.
    for borrower in BORROWERS {
        node.apply(&spinner(borrower, None));
    }
    std::thread::sleep(Duration::from_millis(500));
    eventually("they have their quota beside those that borrow, which have the rest", || {
        let mut beside = (0, 0);
        let (mut spins, mut borrowed) = (0.0, 0.0);
        let router = cores(&node, "vnets/_red/_r1.g0/guest", || {
            spins = cores(&node, "vnets/_spin/_r1.g0/guest", || beside = passed(&node));
        });
        for borrower in BORROWERS {
            borrowed += cores(&node, &format!("vnets/_{borrower}/_r1.g0/guest"), || {});
        }
        println!("{spins:.3} and {router:.3} cores, {beside:?}; borrowed {borrowed:.3}");
        spins >= SPINNER - SHARE_ERROR_MAX
            && kept(beside.0, beside.1)
            && kept(beside.1, alone.1)
            && borrowed > 0.0
    });
}
