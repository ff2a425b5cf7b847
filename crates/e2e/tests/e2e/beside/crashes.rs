//! Dependencies between processes: kill -9 of each, and what continues meanwhile.

use pdp_e2e::specs::SUBSTRATE;
use pdp_e2e::{Background, TestNode, all_answered, eventually, kill, routing};
use serde_json::Value;

fn spec() -> String {
    SUBSTRATE.to_owned() + "---" + &routing::vnet("red", 20)
}

fn reaches(node: &TestNode) -> bool {
    node.try_exec("red/h1", "ping -c1 -W1 10.2.0.2").is_ok()
}

fn status(node: &TestNode) -> Value {
    node.json(&["inspect", "red"])["status"].clone()
}

fn r1(node: &TestNode) -> Value {
    let nodes = status(node)["nodes"].as_array().expect("nodes").clone();
    nodes.into_iter().find(|found| found["name"] == "r1").expect("r1")
}

fn pid(process: &Value) -> Option<u32> {
    process["pid"].as_u64().and_then(|pid| u32::try_from(pid).ok())
}

fn is_running(node: &TestNode) -> bool {
    status(node)["phase"] == "running"
}

#[test]
fn network_survives_a_crash_of_any_process() {
    let mut node = TestNode::start("crash");
    node.apply(&spec());
    eventually("OSPF has its routes and h1 reaches h2", || reaches(&node));
    eventually("everything runs", || is_running(&node));
    eventually("BGP has its session", || routing::has_session(&node, "red/r1"));
    let changes = routing::changes(&node, "red/r1");

    // pdpd: forwarding and route updates continue without it.
    let before = r1(&node);
    let h1 = pid(&status(&node)["nodes"][0]["control"]).expect("h1 runs");
    let router = pid(&before["control"]).expect("r1 runs");
    let inside = |target: u32, command: &str| {
        let target = target.to_string();
        let mut all = std::process::Command::new("nsenter");
        all.args(["-n", "-t", &target, "sh", "-c", command]);
        all
    };
    node.kill_pdpd();
    let ping = Background::start(&mut inside(h1, "ping -c20 -i0.05 -w60 10.2.0.2"));
    let words = ping.finish();
    assert!(all_answered(&words, 20), "{words}");
    // A new route in r1's kernel, with pdpd dead, reaches its forwarding guest.
    Background::start(&mut inside(router, "ip route add blackhole 203.0.113.0/24")).finish();
    node.start_pdpd();
    eventually("the new pdpd knows what runs", || is_running(&node));
    let after = r1(&node);
    for part in ["control", "tap", "mirror"] {
        assert_eq!(before[part]["pid"], after[part]["pid"], "{part} was adopted");
    }
    assert_eq!(before["guests"][0]["pid"], after["guests"][0]["pid"], "g0 was adopted");
    eventually("the guest's routes equal the kernel's", || {
        node.pdp(&["routes", "red/r1", "--guest", "0"]).contains("203.0.113.0/24")
    });
    assert!(reaches(&node));

    let restarts = |node: &TestNode, part: &str| match part {
        "g0" => r1(node)["guests"][0]["restarts"].as_u64(),
        part => r1(node)[part]["restarts"].as_u64(),
    };

    // A forwarding guest.
    let guest = pid(&r1(&node)["guests"][0]).expect("g0 runs");
    kill(guest);
    eventually("g0 is replaced", || {
        pid(&r1(&node)["guests"][0]).is_some_and(|now| now != guest) && reaches(&node)
    });

    assert_eq!(restarts(&node, "g0"), Some(1));

    // A guest's shim: nobody would notice the guest's end, so it is killed too and replaced.
    let guest = pid(&r1(&node)["guests"][0]).expect("g0 runs");
    let shim = std::fs::read(node.record("red.r1.g0").join("shim")).expect("shim");
    kill(pid(&serde_json::from_slice(&shim).expect("JSON")).expect("process id"));
    eventually("g0 is replaced", || {
        pid(&r1(&node)["guests"][0]).is_some_and(|now| now != guest) && reaches(&node)
    });
    assert_eq!(restarts(&node, "g0"), Some(2));
    assert!(node.processes().iter().all(|process| process.pid != guest), "the old one was ended");
    assert!(node.pdp(&["logs", "daemon"]).contains("ended with its shim, which was killed"));

    // A TAP helper: the TAPs stay, and so do the carriers.
    let helper = pid(&r1(&node)["tap"]).expect("the helper runs");
    kill(helper);
    eventually("the TAP helper is replaced", || {
        pid(&r1(&node)["tap"]).is_some_and(|now| now != helper) && reaches(&node)
    });

    // A route mirror.
    let mirror = pid(&r1(&node)["mirror"]).expect("the mirror runs");
    kill(mirror);
    eventually("the mirror is replaced and the guest connected to it", || {
        pid(&r1(&node)["mirror"]).is_some_and(|now| now != mirror)
            && node.try_pdp(&["routes", "red/r1", "--diff"]).is_ok()
    });
    assert!(reaches(&node));
    let all = ["control", "tap", "mirror"].map(|part| restarts(&node, part));
    assert_eq!(all, [Some(0), Some(1), Some(1)]);

    // The mux.
    let mux = pid(&node.json(&["inspect", "substrate"])["status"]["mux"]).expect("the mux runs");
    kill(mux);
    eventually("the mux is replaced and everything attached", || {
        pid(&node.json(&["inspect", "substrate"])["status"]["mux"]).is_some_and(|now| now != mux)
            && reaches(&node)
    });
    assert_eq!(pid(&r1(&node)["control"]), Some(router), "no control guest was touched");
    assert_eq!(routing::changes(&node, "red/r1"), changes, "no adjacency was lost in all this");

    // zebra: the daemons that gave it routes restart with it, and give them to the new one.
    let daemon = |name: &str| {
        let found = node.try_exec("red/r1", &format!("pgrep -x {name}"));
        found.ok().and_then(|pid| pid.trim().parse::<u32>().ok())
    };
    let daemons = || ["zebra", "ospfd", "bgpd"].map(daemon);
    let were = daemons();
    node.exec("red/r1", "pkill -KILL -x zebra");
    eventually("all daemons are others, and zebra has OSPF's route", || {
        let route = routing::vtysh(&node, "red/r1", "show ip route 10.2.0.0/24 json");
        let is_ospf = route.is_ok_and(|it| it["10.2.0.0/24"][0]["protocol"] == "ospf");
        let are = daemons();
        // r2 has the return route as soon as it knows the new ospfd.
        is_ospf
            && are.iter().zip(&were).all(|(is, was)| is.is_some() && is != was)
            && reaches(&node)
    });
    // ospfd, which starts after zebra: zebra stays.
    let were = daemons();
    node.exec("red/r1", "pkill -KILL -x ospfd");
    eventually("ospfd and bgpd are others", || {
        let are = daemons();
        assert_eq!(are[0], were[0]);
        are[1..].iter().zip(&were[1..]).all(|(is, was)| is.is_some() && is != was)
    });

    // A control guest: the same spec again.
    kill(router);
    eventually("r1 is restarted", || {
        pid(&r1(&node)["control"]).is_some_and(|now| now != router) && reaches(&node)
    });
}

#[test]
fn daemon_killed_anytime_leaves_nothing_half_made() {
    let mut node = TestNode::start("killed");
    for wait_ms in [30, 150, 300, 500, 800] {
        let file = node.directory.join("spec.yaml");
        std::fs::write(&file, spec()).expect("spec");
        let mut apply = node.pdp_command(&["apply", "-f", file.to_str().expect("a path")]);
        let applying = Background::start(&mut apply);
        std::thread::sleep(std::time::Duration::from_millis(wait_ms));
        node.kill_pdpd();
        drop(applying);
        node.start_pdpd();
        if node.try_pdp(&["inspect", "red"]).is_ok() {
            eventually("what was stored runs", || is_running(&node));
            // Killed during the deletion.
            let deleting = Background::start(&mut node.pdp_command(&["delete", "red"]));
            std::thread::sleep(std::time::Duration::from_millis(wait_ms));
            node.kill_pdpd();
            drop(deleting);
            node.start_pdpd();
        }
        if node.try_pdp(&["inspect", "red"]).is_ok() {
            node.pdp(&["delete", "red"]);
        }
        eventually("nothing of the vnet is left", || {
            let left = node.leftovers();
            left.iter().all(|left| !left.contains("/vnets/") && !left.contains("pdp-init"))
                && !node.socket_directory("red").exists()
        });
    }
    node.pdp(&["down", "--purge"]);
    node.wait_pdpd();
    assert_eq!(node.leftovers(), [""; 0]);
}

#[test]
fn failed_node_leaves_nothing_after_delete() {
    let node = TestNode::start("never");
    let vnet = |more: &str| {
        format!(
            "{{apiVersion: pdp/v1, kind: VirtualNetwork, metadata: {{name: red}}, spec: {{nodes: {{
               h1: {{kind: host, interfaces: {{eth0: {{}}}}}}{more}}}}}}}"
        )
    };
    let never = ", h2: {kind: host, interfaces: {eth0: {}},
                  files: {/etc/no: {content: text, owner: nosuch}}}";
    let words = node.try_apply(&vnet(never)).expect_err("h2 can't come up");
    assert!(words.contains("node red/h2") && words.contains("no user nosuch"), "{words}");
    assert!(node.socket_directory("red/h2").exists(), "what was begun is there");
    node.apply(&vnet(""));
    assert!(!node.socket_directory("red/h2").exists());
    let left = node.leftovers();
    assert!(left.iter().all(|left| !left.contains("red/h2")), "{left:?}");
    assert!(node.socket_directory("red/h1").exists());
}
