//! A slow path: a program in a control guest that selects packets for the mux to drop, with the
//! Python client and by `pdp fastpath`. Also the effects of killing the program and the mux.

use std::path::Path;

use pdp_e2e::specs::{SUBSTRATE, two_hosts};
use pdp_e2e::{Background, TestNode, eventually, kill, run};
use serde_json::Value;

/// Drops packets to port 9, and keeps the mux in that state.
const PROGRAM: &str = "
from pdp_slowpath import Error, Filter, SlowPath, discard
slow_path = SlowPath()
with slow_path.batch() as batch:
    batch.set(Filter(7, 100, 'ip proto udp dport 9 in 0', discard(counter=3)))
while True:
    try:
        slow_path.keep(1.0)
    except Error as error:
        print(error, flush=True)
";

/// Answers datagrams to port 10 with the number of those received on port 9.
const SERVER: &str = "
import socket
nine, ten = (socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2))
nine.bind(('', 9)), ten.bind(('', 10)), nine.setblocking(False)
count = 0
while True:
    _, peer = ten.recvfrom(9)
    while True:
        try:
            nine.recv(9)
            count += 1
        except BlockingIOError:
            break
    ten.sendto(b'%d' % count, peer)
";

/// Sends five packets to port 9, and queries port 10 until it gets their number.
const CLIENT: &str = "
import socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for _ in range(5):
    s.sendto(b'x', ('10.2.0.2', 9))
s.settimeout(1)
while True:
    s.sendto(b'?', ('10.2.0.2', 10))
    try:
        print(s.recv(99).decode())
        break
    except socket.timeout:
        pass
";

/// Number of packets to port 9 that arrived, after five more.
fn received(node: &TestNode) -> u64 {
    let words = node.pdp(&["exec", "lab/h1", "--", "python3", "-c", CLIENT]);
    words.trim().parse().unwrap_or_else(|_| panic!("{words}"))
}

fn filters(node: &TestNode) -> Value {
    node.json(&["fastpath", "lab/r1", "filters"])
}

/// Packets that matched filters with this counter.
fn counted(node: &TestNode, counter: &str) -> u64 {
    let rows = node.json(&["fastpath", "lab/r1", "counters", counter]);
    rows[0]["packets"].as_u64().unwrap_or_else(|| panic!("{rows}"))
}

fn programs(node: &TestNode) -> u64 {
    let stats = node.json(&["stats", "lab"]);
    let slow_path = &stats["vnets"]["lab"]["nodes"]["r1"]["engine"]["slowpath"];
    slow_path["programs"].as_u64().unwrap_or_else(|| panic!("{stats}"))
}

fn is_there(node: &TestNode) -> bool {
    let all = filters(node);
    all[0]["id"] == 7 && all[0]["match"] == "ip proto udp dport 9 in eth0"
}

#[test]
fn filters_outlast_their_program_and_the_mux() {
    let node = TestNode::start("slowpath");
    node.apply(SUBSTRATE);
    node.apply(&two_hosts("lab", "{kind: fastpath, filters: 100, counters: 10}"));
    node.pdp(&["wait", "lab", "--for", "ready", "--timeout", "60s"]);
    let _server = Background::start(
        &mut node.pdp_command(&["exec", "lab/h2", "--", "python3", "-c", SERVER]),
    );
    eventually("the server", || node.exec("lab/h2", "ss -lun").contains(":10 "));
    assert_eq!(received(&node), 5);
    assert_eq!(filters(&node), serde_json::json!([]));

    let client = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../clients/python/pdp_slowpath.py");
    node.pdp(&["cp", client.to_str().expect("a path"), "lab/r1:/tmp/pdp_slowpath.py"]);
    let program = || {
        let words = ["exec", "lab/r1", "-w", "/tmp", "--", "python3", "-c", PROGRAM];
        Background::start(&mut node.pdp_command(&words))
    };
    let running = program();
    eventually("the filter", || is_there(&node));
    assert_eq!((received(&node), counted(&node, "3")), (5, 5));

    // The program is killed, and its filters stay.
    running.stop("KILL");
    eventually("it is gone", || programs(&node) == 0);
    assert_eq!((received(&node), counted(&node, "3")), (5, 10));
    // A restarted program sends them again, which removes all other filters.
    let other =
        ["fastpath", "lab/r1", "add", "--id", "8", "--match", "ip proto udp dport 11", "--drop"];
    assert_eq!(node.pdp(&other), "2 filters in force\n");
    let running = program();
    eventually("only its own", || filters(&node).as_array().is_some_and(|all| all.len() == 1));
    assert_eq!((received(&node), counted(&node, "3")), (5, 15));

    // A new mux gets all that the program wants, and counts from 0.
    let mux = node.processes().into_iter().find(|process| process.line.contains("pdp-mux"));
    kill(mux.expect("a mux").pid);
    let listed = || node.try_pdp(&["fastpath", "lab/r1", "filters"]).is_ok();
    eventually("the mux again", || listed() && is_there(&node));
    node.pdp(&["wait", "lab", "--for", "ready", "--timeout", "60s"]);
    assert_eq!((received(&node), counted(&node, "3")), (5, 5));
    running.stop("KILL");
    eventually("it is gone", || programs(&node) == 0);
    by_hand(&node);
}

/// `pdp fastpath` can do everything that a program can.
fn by_hand(node: &TestNode) {
    let fastpath = |words: &[&str]| node.pdp(&[&["fastpath", "lab/r1"], words].concat());
    let file = "filters:\n- {id: 2, priority: 1, match: ip dst 10.2.0.2 proto udp dport 9, verdict: drop, counter: 1}\n";
    let mut apply = node.pdp_command(&["fastpath", "lab/r1", "apply", "-f", "-"]);
    let applied = run(&mut apply, file);
    assert!(applied.status.success(), "{}", String::from_utf8_lossy(&applied.stderr));
    let table = fastpath(&["filters"]);
    assert!(table.contains("ip dst 10.2.0.2 proto udp dport 9  drop"), "{table}");
    assert!(table.contains("1 of 100 filters, 10 counters, code ip"), "{table}");
    assert_eq!((received(node), counted(node, "1")), (5, 5));
    // A frame treated as if received by an interface: UDP from h1 to h2's port 9.
    let mac = |name: &str| {
        let status = node.json(&["inspect", name]);
        status["ports"][0]["mac"].as_str().expect("an address").replace(':', "")
    };
    let frame = format!(
        "{}{}0800 4500001d00000000401166ca 0a0100020a020002 1234000900090000 78",
        mac("lab/r1"),
        mac("lab/h1")
    );
    fastpath(&["send", "--in", "eth0", &frame]);
    eventually("it is counted", || counted(node, "1") == 6);
    // A frame sent unchanged: the host answers an ARP request.
    let ask = format!(
        "ffffffffffff{0}0806 0001080006040001 {0} 0a020001 000000000000 0a020002",
        "02000000aa01"
    );
    node.exec("lab/h2", "ip neigh flush dev eth0");
    fastpath(&["send", "--out", "eth1", &ask]);
    let heard = || node.exec("lab/h2", "ip neigh show 10.2.0.1").contains("02:00:00:00:aa:01");
    eventually("the host hears it", heard);
    node.exec("lab/h2", "ip neigh flush dev eth0");

    assert_eq!(fastpath(&["remove", "2"]), "0 filters in force\n");
    assert_eq!(received(node), 10);
    // Queues of a link's end, within the limits of the spec.
    let queues = r#"queues=[{"name": "rest"}, {"name": "voice", "length": 64, "buffers": 16}]"#;
    node.pdp(&["link", "set", "lab/link2", "--at", "r1:eth1", queues]);
    let table = fastpath(&["queues"]);
    assert!(table.contains("eth1  2      voice  1       64      -      16"), "{table}");
    fastpath(&["queue", "eth1", "2", "--weight", "30", "--frames", "32"]);
    let queues = node.json(&["fastpath", "lab/r1", "queues", "eth1"]);
    assert_eq!((&queues[1]["weight"], &queues[1]["frames"]), (&30.into(), &32.into()), "{queues}");
    let shown = node.pdp(&["inspect", "lab/r1"]);
    assert!(shown.contains("r1:eth1  voice  1       64      -      16"), "{shown}");
    for (words, why) in [
        (&["fastpath", "lab/r1", "queue", "eth1", "2", "--frames", "65"][..], "at most 64 frames"),
        (&["fastpath", "lab/r1", "queue", "eth1", "3", "--weight", "2"], "use 1 to 2"),
        (&["fastpath", "lab/r1", "queue", "eth0", "1", "--weight", "2"], "vport 0 has no queues"),
        (&["fastpath", "lab/h1", "filters"][..], "lab/h1: the mux has no filters for this node"),
        (
            &["fastpath", "lab/r1", "add", "--id", "100", "--match", "ip", "--drop"],
            "the router has 100 filters",
        ),
        (&["fastpath", "lab/r1", "add", "--id", "1", "--match", "ip6 in eth9", "--drop"], "eth9"),
        (&["fastpath", "lab/r1", "counters", "10"], "the router has 10, numbered from 0"),
    ] {
        let refused = node.try_pdp(words).expect_err("it is refused");
        assert!(refused.contains(why), "{words:?}: {refused}");
    }
}

/// Prints the first frame of the protocol.
const HEARD: &str = "
import socket
s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x88b5))
s.bind(('eth0', 0x88b5))
print(s.recv(99).hex())
";

/// Sends a frame of the protocol to label 7, which may go two hops.
const SAID: &str = "
import socket, sys
s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
s.bind(('eth0', 0x88b5))
s.send(bytes.fromhex(sys.argv[1] + '020000000001' + '88b5' + '0007' + '0000' + '02') + b'x' * 41)
";

#[test]
fn custom_protocol_is_forwarded_by_filters() {
    let node = TestNode::start("fields");
    node.apply(SUBSTRATE);
    let plane = "{kind: fastpath, code: fields, fields: {key: [{offset: 12, bytes: 4}], write: [
        {offset: 0, data: {from: 0, bytes: 6}}, {offset: 6, source: true}, {offset: 18, hops: true}]}}";
    node.apply(&two_hosts("lab", plane));
    let to = "02:00:00:00:00:77";
    let words = ["--match", "raw 88b50007 in eth0", "--send", "eth1", "--to", to, "--counter", "0"];
    let add = [&["fastpath", "lab/r1", "add", "--id", "1"], &words[..]].concat();
    assert_eq!(node.pdp(&add), "1 filter in force\n");
    let table = node.pdp(&["fastpath", "lab/r1", "filters"]);
    assert!(table.contains("raw 88b50007 in eth0  send eth1 data 020000000077"), "{table}");
    let mac = |port: usize| {
        let status = node.json(&["inspect", "lab/r1"]);
        status["ports"][port]["mac"].as_str().expect("an address").replace(':', "")
    };
    let heard = ["exec", "lab/h2", "--", "python3", "-c", HEARD];
    let mut heard = Background::start(&mut node.pdp_command(&heard));
    eventually("it is heard", || {
        node.pdp(&["exec", "lab/h1", "--", "python3", "-c", SAID, &mac(0)]);
        !heard.runs()
    });
    let frame = heard.finish();
    let expected = format!("020000000077{}88b500070000{}", mac(1), "01");
    assert!(frame.starts_with(&expected), "{frame}: {expected}");
    assert!(counted(&node, "0") > 0);
}
