//! One flow over two guests of unequal power that pause at random. With `ordered` no frame is late
//! or lost, and each guest carries its part. With `round-robin` frames come late.

use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use pdp_e2e::frame::{NUMBER_AT, write_frame};
use pdp_e2e::{TestNode, alone, eventually, meter};

/// Frames sent, and the rate per second: three seconds, well below the guests' capacity.
const FRAMES: u64 = 60_000;
const PPS: u64 = 20_000;

/// Longest pause of a guest, and longest time between pauses.
const STALL_MS_MAX: u64 = 20;

/// Powers of the guests, as in the PdP paper's experiments on reordering.
const POWERS: [&str; 2] = ["0.75", "0.5"];

fn substrate(frames: &Path, count: u64) -> String {
    let source = match count {
        0 => String::new(),
        _ => format!("frames: {}, pps: {PPS}, count: {count}, ", frames.display()),
    };
    format!(
        "
apiVersion: pdp/v1
kind: Substrate
metadata: {{name: here}}
spec:
  interfaces:
    source: {{generator: {{{source}numberAt: {NUMBER_AT}}}}}
    sink: {{generator: {{numberAt: {NUMBER_AT}}}}}
  mux: {{cpus: \"0\", power: 0.5}}
  forwardingEngines:
    fe0: {{cpus: \"1\", capacity: {}}}
    fe1: {{cpus: \"0\", capacity: {}}}
",
        POWERS[0], POWERS[1]
    )
}

fn vnet(policy: &str) -> String {
    format!(
        "
apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {{name: red}}
spec:
  nodes:
    r1:
      kind: router
      interfaces:
        eth0: {{addresses: [10.0.1.1/24], mac: \"02:00:00:00:01:01\"}}
        eth1: {{addresses: [10.0.2.1/24], mac: \"02:00:00:00:02:01\"}}
      dataPlane:
        power: 1.25
        queue: 4096
        split: true
        distribution: {{policy: {policy}}}
  externals: {{a: {{interface: source}}, b: {{interface: sink}}}}
  links:
    - endpoints: [\"r1:eth0\", \"external:a\"]
    - endpoints: [\"r1:eth1\", \"external:b\"]
"
    )
}

/// Sends a signal to all processes of a guest.
fn signal(pids: &[u32], name: &str) {
    let pids: Vec<String> = pids.iter().map(u32::to_string).collect();
    let done = Command::new("kill").arg(name).args(pids).status();
    assert!(done.expect("kill").success(), "no guest ends here");
}

/// Stops one guest after the other for a random time until `done`.
fn stall(guests: &[Vec<u32>], done: &AtomicBool) {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut random = |most: u64| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state % (most + 1)
    };
    while !done.load(Ordering::Relaxed) {
        let guest = &guests[random(guests.len() as u64 - 1) as usize];
        signal(guest, "-STOP");
        std::thread::sleep(Duration::from_millis(random(STALL_MS_MAX)));
        signal(guest, "-CONT");
        std::thread::sleep(Duration::from_millis(random(STALL_MS_MAX)));
    }
}

/// Results for [`FRAMES`]: received, late, completed by each guest.
fn send(node: &TestNode, policy: &str, frames: &Path, count: u64) -> (u64, u64, Vec<u64>) {
    node.apply(&vnet(policy));
    let guests: Vec<Vec<u32>> = (0..POWERS.len())
        .map(|guest| {
            let cgroup = format!("{}/vnets/_red/_r1.g{guest}/guest\n", node.cgroup());
            let mut found = Vec::new();
            eventually("the guest runs", || {
                found = meter::processes("cgroup", &cgroup);
                // The program, and the process that starts it.
                found.len() >= 2
            });
            found
        })
        .collect();
    let count_of = |name: &str, what: &str| {
        node.json(&["stats"])["externals"][name][what].as_u64().expect("a counter")
    };
    let completed = || -> Vec<u64> {
        let guests = node.json(&["stats", "red"])["vnets"]["red"]["nodes"]["r1"]["guests"].clone();
        let of = |guest: usize| guests[guest.to_string()]["completed"].as_u64().unwrap_or(0);
        (0..POWERS.len()).map(of).collect()
    };
    let in_flight = || {
        let stats = node.json(&["stats", "red"]);
        stats["vnets"]["red"]["nodes"]["r1"]["inFlight"].as_u64()
    };
    let made = count_of("source", "received");
    let (received, late, before) =
        (count_of("sink", "numbered"), count_of("sink", "late"), completed());
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let stalls = scope.spawn(|| stall(&guests, &done));
        node.apply(&substrate(frames, count));
        eventually("all frames are made", || count_of("source", "received") - made == count);
        eventually("none is on its way", || in_flight() == Some(0));
        done.store(true, Ordering::Relaxed);
        stalls.join().expect("stalls");
    });
    let parts = completed().iter().zip(before).map(|(after, before)| after - before).collect();
    (count_of("sink", "numbered") - received, count_of("sink", "late") - late, parts)
}

#[test]
fn flow_over_stalling_guests_stays_in_order() {
    let _alone = alone();
    let node = TestNode::start("order");
    let frames = node.directory.join("frame.pcap");
    write_frame(&frames).expect("the frame");
    node.apply(&format!("{}---{}", substrate(&frames, 0), vnet("ordered")));
    node.exec(
        "red/r1",
        "ip neigh replace 10.0.2.2 lladdr 02:00:00:00:02:02 dev eth1 nud permanent",
    );
    for guest in ["0", "1"] {
        eventually("the guest has the neighbour's subnet", || {
            let routes = node.try_pdp(&["routes", "red/r1", "--guest", guest]);
            routes.is_ok_and(|routes| routes.contains("10.0.2.0/24"))
        });
    }
    let (received, late, parts) = send(&node, "ordered", &frames, FRAMES);
    assert_eq!((received, late), (FRAMES, 0), "{parts:?}");
    assert!(parts.iter().all(|part| *part > FRAMES / 10), "each carries its part: {parts:?}");

    let (received, late, parts) = send(&node, "round-robin", &frames, FRAMES + 1);
    assert!(late > received / 100, "round-robin reorders: {late} of {received} late, {parts:?}");
}
