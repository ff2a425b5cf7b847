//! What the control guest's kernel would do to packets, and forwarding guests don't, is told and, by
//! default, done.

use std::time::{Duration, Instant};

use pdp_e2e::specs::{SUBSTRATE, two_hosts};
use pdp_e2e::{Node, beside, eventually};

const FIREWALL: [&str; 3] = [
    "nft add table ip fw",
    "nft add chain ip fw forward { type filter hook forward priority 0 ; policy accept ; }",
    "nft add rule ip fw forward icmp type echo-request drop",
];

fn reaches(node: &Node) -> bool {
    node.try_exec("red/h1", "ping -c1 -W1 10.2.0.2").is_ok()
}

/// What `get`, `inspect` and `routes --diff` say of r1's hooks: all the same, or nothing.
fn said(node: &Node) -> String {
    let conditions = |value: &serde_json::Value| -> String {
        let all = value["conditions"].as_array().cloned().unwrap_or_default();
        all.iter().map(|about| about["message"].as_str().expect("words").to_owned()).collect()
    };
    let listed = conditions(&node.json(&["get"])[0]);
    let inspected = conditions(&node.json(&["inspect", "red/r1"]));
    assert_eq!(listed, inspected);
    listed
}

#[test]
fn what_the_kernel_would_do_is_told_and_done() {
    let _turn = beside();
    let node = Node::start("hooks");
    let spec = |hooks| two_hosts("red", &format!("{{power: 0.2, kernelHooks: {hooks}}}"));
    node.apply(SUBSTRATE);
    node.apply(&two_hosts("red", "{power: 0.2}"));
    eventually("h1 reaches h2", || reaches(&node));
    assert_eq!(said(&node), "");
    let control = node.json(&["inspect", "red/r1"])["control"]["pid"].clone();

    FIREWALL.iter().for_each(|line| drop(node.exec("red/r1", line)));
    let begun = Instant::now();
    eventually("the firewall is told", || said(&node).contains("nft chain ip fw forward"));
    assert!(begun.elapsed() < Duration::from_secs(2), "told after {:?}", begun.elapsed());
    assert!(said(&node).contains("strict"));
    eventually("nothing passes the firewall", || !reaches(&node));
    assert!((0..3).all(|_| !reaches(&node)), "the firewall holds");
    let punted = &node.json(&["stats", "red"])["vnets"]["red"]["nodes"]["r1"]["ports"]["eth0"];
    assert!(punted["punted"].as_u64() > Some(3), "{punted}");
    let diff = node.pdp_command(&["routes", "red/r1", "--diff"]).output().expect("pdp routes");
    let note = String::from_utf8_lossy(&diff.stderr).into_owned();
    assert!(diff.status.success() && note.contains("note: nft chain ip fw forward"), "{diff:?}");
    assert!(node.pdp(&["get"]).contains("nft chain ip fw forward"), "the table has it too");

    // Full speed all the same, for who says so; nothing is started anew but the mirror.
    node.apply(&spec("ignore"));
    eventually("the firewall is ignored", || reaches(&node));
    eventually("and that is told", || said(&node).contains("kernelHooks: ignore"));
    assert_eq!(node.json(&["inspect", "red/r1"])["control"]["pid"], control);
    node.apply(&spec("strict"));
    eventually("the firewall is obeyed again", || !reaches(&node));
    node.exec("red/r1", "nft delete table ip fw");
    eventually("no firewall", || reaches(&node));
    eventually("and nothing is told", || said(&node).is_empty());

    // A rule by source, of which the main table knows nothing.
    node.exec("red/r1", "ip rule add from 10.1.0.2 prohibit");
    eventually("the rule is told", || said(&node).contains("from 10.1.0.2/32"));
    eventually("and obeyed", || {
        let answer = node.try_exec("red/h1", "ping -c1 -W1 10.2.0.2");
        answer.is_err_and(|said| said.contains("Packet filtered"))
    });
}
