//! Changing the number of a vrouter's forwarding guests under traffic loses nothing, and with
//! `ordered` nothing is late.

use std::path::Path;
use std::time::Duration;

use pdp_e2e::frame::{NUMBER_AT, write_frame};
use pdp_e2e::{TestNode, alone, eventually, meter, sh};

/// Frames per second: well below the capacity of one guest.
const PPS: u64 = 5_000;

fn substrate(frames: Option<&Path>) -> String {
    let source = match frames {
        None => String::new(),
        Some(frames) => format!("frames: {}, pps: {PPS}, ", frames.display()),
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
    fe0: {{cpus: \"1\", capacity: 1}}
"
    )
}

fn vnet(policy: &str, guests: u32) -> String {
    let power = 300 * guests;
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
        power: {power}m
        guests: {guests}
        queue: 4096
        distribution: {{policy: {policy}}}
  externals: {{a: {{interface: source}}, b: {{interface: sink}}}}
  links:
    - endpoints: [\"r1:eth0\", \"external:a\"]
    - endpoints: [\"r1:eth1\", \"external:b\"]
"
    )
}

struct Counts {
    made: u64,
    received: u64,
    late: u64,
}

fn counts(node: &TestNode) -> Counts {
    let stats = node.json(&["stats"]);
    let of = |name: &str, what: &str| stats["externals"][name][what].as_u64().expect("a counter");
    Counts {
        made: of("source", "received"),
        received: of("sink", "numbered"),
        late: of("sink", "late"),
    }
}

/// Completions of each guest.
fn completed(node: &TestNode) -> Vec<u64> {
    let stats = node.json(&["stats", "red"]);
    let guests =
        stats["vnets"]["red"]["nodes"]["r1"]["guests"].as_object().expect("guests").clone();
    guests.values().map(|guest| guest["completed"].as_u64().expect("a counter")).collect()
}

/// Waits for some hundred frames.
fn some_more(node: &TestNode) {
    let before = counts(node).received;
    eventually("frames come", || counts(node).received > before + PPS / 10);
}

/// Long enough for a command to be running, short enough for the rings to hold all frames.
fn some_time() {
    std::thread::sleep(Duration::from_millis(150));
}

#[test]
fn guests_come_and_go_without_loss() {
    let _alone = alone();
    let node = TestNode::start("scale");
    let frames = node.directory.join("frame.pcap");
    write_frame(&frames).expect("the frame");
    node.apply(&format!("{}---{}", substrate(None), vnet("ordered", 1)));
    node.exec(
        "red/r1",
        "ip neigh replace 10.0.2.2 lladdr 02:00:00:00:02:02 dev eth1 nud permanent",
    );
    // Routes ahead of the needed one, so that a new guest takes a while to get them.
    let many =
        r#"seq 0 49999 | awk '{printf "route add 1.%d.%d.0/24 via 10.0.2.3\n", $1/256, $1%256}'"#;
    node.pdp(&["exec", "red/r1", "--", "sh", "-c", &format!("{many} | ip -batch -")]);
    for policy in ["ordered", "flow"] {
        node.apply(&vnet(policy, 1));
        eventually("the guest has the neighbour's subnet", || {
            let routes = node.try_pdp(&["routes", "red/r1", "--guest", "0"]);
            routes.is_ok_and(|routes| routes.contains("10.0.2.0/24"))
        });
        let before = counts(&node);
        node.apply(&substrate(Some(&frames)));
        some_more(&node);

        node.pdp(&["scale", "red/r1", "3"]);
        let three = completed(&node);
        some_more(&node);
        let more = completed(&node);
        assert_eq!((three.len(), more.len()), (3, 3));
        if policy == "ordered" {
            let worked = three.iter().zip(&more).all(|(before, after)| before < after);
            assert!(worked, "each of three works: {three:?}, {more:?}");
        }
        // The leaving guest has outstanding frames and takes its time.
        let cgroup = format!("{}/vnets/_red/_r1.g2/guest\n", node.cgroup());
        let guest: Vec<String> =
            meter::processes("cgroup", &cgroup).iter().map(u32::to_string).collect();
        let guest = guest.join(" ");
        sh(&format!("kill -STOP {guest}"));
        some_time();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                some_time();
                // With one flow it may have had no frames, and be gone.
                sh(&format!("kill -CONT {guest} || true"));
            });
            node.pdp(&["scale", "red/r1", "2"]);
        });
        some_more(&node);
        // Also by a spec.
        node.apply(&vnet(policy, 1));
        assert_eq!(completed(&node).len(), 1);
        some_more(&node);

        node.apply(&substrate(None));
        let stats = || node.json(&["stats", "red"]);
        eventually("none is on its way", || {
            stats()["vnets"]["red"]["nodes"]["r1"]["inFlight"].as_u64() == Some(0)
        });
        let after = counts(&node);
        assert_eq!(
            after.received - before.received,
            after.made - before.made,
            "{policy}: all came"
        );
        if policy == "ordered" {
            assert_eq!(after.late, before.late, "{policy}: none came late");
        }
    }
    // Admission control: nothing changes if the engine lacks power.
    let refused = node.try_pdp(&["scale", "red/r1", "4"]).expect_err("1.2 of 1 core");
    assert!(refused.to_string().contains("power 1.2 does not fit"), "{refused}");
    assert_eq!(completed(&node).len(), 1);

    // A guest learns its quota, and keeps running when that changes.
    let cgroup = format!("{}/vnets/_red/_r1.g0/guest\n", node.cgroup());
    let quota_of_guest = || {
        let pids = meter::processes("cgroup", &cgroup);
        let file = format!("/proc/{}/root/run/pdp/quota/cores", pids[0]);
        (pids, std::fs::read_to_string(file).expect("its quota"))
    };
    let (pids, quota) = quota_of_guest();
    assert_eq!(quota, "0.3\n");
    node.pdp(&["scale", "red/r1", "1", "--power", "0.2"]);
    assert_eq!(quota_of_guest(), (pids, "0.2\n".to_owned()));
}
