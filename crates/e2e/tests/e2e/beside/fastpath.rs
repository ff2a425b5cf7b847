//! A router whose packets the mux itself forwards. It follows the same routes as a forwarding
//! guest. A router changes between the two and keeps everything of its control guest.

use pdp_e2e::counters::missing;
use pdp_e2e::routing::vtysh;
use pdp_e2e::{TestNode, all_answered, eventually, kill};
use serde_json::Value;

use super::examples::read;

/// examples/fastpath.yaml with this data plane.
pub(super) fn lab(plane: &str) -> String {
    let text = read("examples/fastpath.yaml");
    let (before, after) = text.split_once("{kind: fastpath}").expect("the data plane");
    format!("{before}{plane}{after}")
}

fn router(node: &TestNode) -> Value {
    let status = node.json(&["inspect", "fastpath"])["status"].clone();
    let nodes = status["nodes"].as_array().expect("nodes").clone();
    nodes.into_iter().find(|found| found["name"] == "r1").expect("the router")
}

/// Number of state changes of r1's neighbour, and its control guest's process.
pub(super) fn kept(node: &TestNode) -> (String, Value) {
    let words = vtysh(node, "fastpath/r1", "show ip ospf neighbor detail json").expect("ospfd");
    let text = words.to_string();
    let (_, changes) = text.split_once("stateChangeCounter\":").expect("a neighbour");
    let changes = changes.split([',', '}']).next().expect("a number").to_owned();
    (changes, router(node)["control"]["pid"].clone())
}

pub(super) fn pings(node: &TestNode) {
    let words = node.exec("fastpath/h1", "ping -c30 -i0.02 -w20 10.2.0.2");
    let stats = node.json(&["stats", "fastpath"]);
    assert!(all_answered(&words, 30), "{words}{stats:#}");
    assert_eq!(missing(&stats), [], "{stats}");
}

/// Guaranteed power is shown, and changes without losing a
/// packet. Excess power is refused with a message.
#[test]
fn mux_power_is_allocated_once_and_shown() {
    let node = TestNode::start("fastpower");
    let free = |node: &TestNode| {
        let status = node.json(&["inspect", "substrate"])["status"]["fastpaths"].clone();
        let [all, used] = ["capacityMillicores", "usedMillicores"].map(|key| status[key].as_u64());
        (all.expect("a capacity"), used.expect("what is used"))
    };
    let (all, _) = free(&node);
    // Two routers have it.
    let each = all as f64 / 4000.0;
    node.apply(&lab(&format!("{{kind: fastpath, power: {each:.3}}}")));
    node.pdp(&["wait", "fastpath", "--for", "ready", "--timeout", "60s"]);
    assert_eq!(free(&node), (all, all / 2));
    let more = lab(&format!("{{kind: fastpath, power: {}}}", all as f64 / 1000.0))
        .replace("name: fastpath", "name: other");
    let words = node.try_apply(&more).expect_err("too much");
    assert!(words.contains("does not fit: fast paths can have"), "{words}");
    assert!(words.contains("leave power out to borrow unused power"), "{words}");
    pings(&node);
    node.apply(&lab(&format!("{{kind: fastpath, power: {:.3}}}", each / 2.0)));
    pings(&node);
    assert_eq!(router(&node)["powerMillicores"], all / 8);
    let engine =
        node.json(&["stats", "fastpath"])["vnets"]["fastpath"]["nodes"]["r1"]["engine"].clone();
    assert_eq!(engine["powerMillicores"], all / 8, "{engine}");
    assert!(engine["usedNs"].as_u64() > Some(0), "{engine}");
}

#[test]
fn router_switches_between_guests_and_fast_path() {
    let node = TestNode::start("fastpath");
    node.apply(&lab("{power: 0.1}"));
    let ready = || node.pdp(&["wait", "fastpath", "--for", "ready", "--timeout", "60s"]);
    ready();
    pings(&node);
    let before = kept(&node);
    let ping = node.pdp_command(&["exec", "fastpath/h1", "--", "ping", "-i0.02", "10.2.0.2"]);
    let mut ping = ping;
    let ping = pdp_e2e::Background::start(&mut ping);
    for plane in ["{kind: fastpath}", "{power: 0.1}", "{kind: fastpath}"] {
        node.apply(&lab(plane));
        ready();
        pings(&node);
        assert_eq!(kept(&node), before, "{plane}");
        let is = router(&node);
        let guests = is["guests"].as_array().expect("guests").len();
        let engine = is["engine"]["routesSynced"].as_bool();
        let expected = if plane.contains("fastpath") { (0, Some(true)) } else { (1, None) };
        assert_eq!((guests, engine), expected, "{is}");
    }
    drop(ping);
    // Only the first of the hosts' frames go to the control guest.
    let punted = || -> u64 {
        let stats = node.json(&["stats", "fastpath"]);
        let ports = stats["vnets"]["fastpath"]["nodes"]["r1"]["ports"].clone();
        ports["eth0"]["punted"].as_u64().expect("a counter")
    };
    let first = punted();
    pings(&node);
    assert!(punted() < first + 5, "{first} before, {} after", punted());
    // The mirror ends, and forwarding continues. A new mirror follows the kernel's later changes.
    let pid = router(&node)["mirror"]["pid"].as_u64().expect("a mirror");
    kill(u32::try_from(pid).expect("a process"));
    pings(&node);
    node.exec("fastpath/r1", "ip route add blackhole 10.3.0.0/16");
    let routes = || node.pdp(&["routes", "fastpath/r1", "--guest", "0", "--within", "10.3.0.0/16"]);
    eventually("the new route", || routes().contains("10.3.0.0/16"));
    pings(&node);
    // A new mux gets all of it again.
    let mux = node.processes().into_iter().find(|process| process.line.contains("pdp-mux"));
    kill(mux.expect("a mux").pid);
    eventually("the mux again", || node.try_exec("fastpath/h1", "ping -c1 -W1 10.2.0.2").is_ok());
    ready();
    pings(&node);
    assert_eq!(kept(&node), before);
}
