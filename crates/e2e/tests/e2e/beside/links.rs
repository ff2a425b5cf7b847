//! Links impair frames as the spec says, and change while frames are in flight.

use pdp_e2e::{TestNode, all_answered, eventually, kill};

const SPEC: &str = r#"
apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {name: red}
spec:
  nodes:
    h1: {kind: host, interfaces: {eth0: {addresses: [10.0.0.1/24]}, eth1: {addresses: [10.0.1.1/24]}, eth2: {addresses: [10.0.2.1/24]}}}
    h2: {kind: host, interfaces: {eth0: {addresses: [10.0.0.2/24]}, eth1: {addresses: [10.0.1.2/24]}, eth2: {addresses: [10.0.2.2/24]}}}
  links:
    - {name: far, endpoints: ["h1:eth0", "h2:eth0"], rate: 100Mbps, queue: 50ms, delay: 20ms}
    - name: lossy
      endpoints: ["h1:eth1", "h2:eth1"]
      at: {"h2:eth1": {loss: 30%, seed: 3}}
    - {name: timed, endpoints: ["h1:eth2", "h2:eth2"], schedule: [{at: 6s, up: false}, {at: 12s, up: true, delay: 30ms}]}
"#;

/// Least and mean round trip in the output of `ping`, milliseconds.
fn round_trip_ms(words: &str) -> [f64; 2] {
    let (_, times) = words.split_once("min/avg/max/mdev = ").expect("round trips");
    let mut times = times.split('/').map(|time| time.parse().expect("a time"));
    [times.next().expect("the least"), times.next().expect("the mean")]
}

fn counter(node: &TestNode, host: &str, port: &str, what: &[&str]) -> u64 {
    let stats = node.json(&["stats", "red"]);
    let port = &stats["vnets"]["red"]["nodes"][host]["ports"][port];
    what.iter().fold(port, |value, key| &value[key]).as_u64().unwrap_or(0)
}

#[test]
fn link_impairments_match_spec_and_change_without_loss() {
    let mut node = TestNode::start("links");
    node.apply(SPEC);
    // Answers stop after 6 s, and come after 60 ms from
    // 12 s on, although daemon and mux die earlier.
    let in_background = |line: &str, file: &str| {
        let line = format!("({line}; echo over) < /dev/null > /run/{file} 2>&1 &");
        node.pdp(&["exec", "red/h1", "--", "sh", "-c", &line]);
    };
    in_background("ping -D -i0.1 -c130 10.0.2.2", "timed.txt");
    // 20 ms each way, plus the path's own time.
    let words = node.exec("red/h1", "ping -c10 -i0.05 -w60 10.0.0.2");
    assert!(all_answered(&words, 10), "{words}");
    let [least, mean] = round_trip_ms(&words);
    assert!(least >= 40.0 && mean < 60.0, "{words}");

    // One direction only: a lost frame is a missing answer.
    let over = |file: &str| {
        let line = format!("cat /run/{file}");
        eventually("all of them", || node.exec("red/h1", &line).contains("over"));
        node.exec("red/h1", &line)
    };
    let line = "ping -c100 -i0.01 -W1 10.0.1.2 || true";
    let words = node.pdp(&["exec", "red/h1", "--", "sh", "-c", line]);
    let lost = counter(&node, "h2", "eth1", &["dropped", "loss"]);
    let sent = counter(&node, "h2", "eth1", &["sent"]);
    assert!((10..60).contains(&lost) && sent + lost >= 100, "{lost} of {sent}: {words}");
    assert_eq!(counter(&node, "h1", "eth1", &["dropped", "loss"]), 0);
    let answers = 100 - words.matches("bytes from").count() as u64;
    // Neighbour discovery loses some, too.
    assert!(answers <= lost && lost - answers < 10, "{answers} missing of {lost}: {words}");

    // Longer, shorter and no delay, while a hundred frames per second are in flight.
    in_background("ping -c250 -i0.01 -w60 10.0.0.2", "ping.txt");
    for delay in ["delay: 60ms", "delay: 5ms, jitter: 2ms"] {
        node.apply(&SPEC.replace("delay: 20ms", delay));
    }
    node.pdp(&["link", "set", "red/far", "jitter=", "delay="]);
    let words = over("ping.txt");
    assert!(all_answered(&words, 250) && !words.contains("DUP"), "{words}");
    let words = node.exec("red/h1", "ping -c5 -i0.05 -w60 10.0.0.2");
    assert!(round_trip_ms(&words)[0] < 20.0, "{words}");
    assert_eq!(counter(&node, "h1", "eth0", &["dropped", "delay-full"]), 0);

    let link = |node: &TestNode| node.json(&["inspect", "red"])["status"]["links"][2].clone();
    let mux = node.json(&["inspect", "substrate"])["status"]["mux"]["pid"].as_u64().expect("a mux");
    let carrier = |node: &TestNode| node.exec("red/h1", "cat /sys/class/net/eth2/carrier");
    eventually("the link is down by its schedule", || link(&node)["schedule"]["done"] == 1);
    eventually("its ends see that", || carrier(&node).trim() == "0");
    node.kill_pdpd();
    kill(mux as u32);
    node.start_pdpd();
    let timed = || node.try_exec("red/h1", "cat /run/timed.txt").unwrap_or_default();
    eventually("what was pinged is over", || timed().contains("over"));
    let words = timed();
    let answers: Vec<(f64, f64)> = words.lines().filter_map(answer).collect();
    let gaps = answers.windows(2).map(|two| two[1].0 - two[0].0);
    let longest = gaps.fold(0.0, f64::max);
    assert!((5.0..8.0).contains(&longest), "{longest} s: {words}");
    assert!(answers[0].1 < 30.0 && answers.last().expect("answers").1 >= 60.0, "{words}");
    eventually("its ends see that it is up", || carrier(&node).trim() == "1");
    let links = node.json(&["get", "links", "red"]);
    let link = &links[2];
    assert_eq!((&link["vnet"], &link["name"]), (&"red".into(), &"timed".into()));
    assert_eq!(
        (&link["impairments"], &link["schedule"]["done"]),
        (&"delay 30ms".into(), &2.into())
    );
    node.pdp(&["down", "--purge"]);
    node.wait_pdpd();
    assert_eq!(node.leftovers(), [""; 0]);
}

/// Time of an answer and its delay in milliseconds, from a line of `ping -D`.
fn answer(line: &str) -> Option<(f64, f64)> {
    let (at, rest) = line.strip_prefix('[')?.split_once(']')?;
    let (time, _) = rest.split_once("time=")?.1.split_once(" ms")?;
    Some((at.parse().ok()?, time.parse().ok()?))
}

const QUEUED: &str = r#"
apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {name: red}
spec:
  nodes:
    h1: {kind: host, interfaces: {eth0: {addresses: [10.0.0.1/24]}}}
    h2: {kind: host, interfaces: {eth0: {addresses: [10.0.0.2/24]}}}
  links:
    - name: thin
      endpoints: ["h1:eth0", "h2:eth0"]
      at:
        h1:eth0:
          rate: 2Mbps
          queues: [{name: rest, weight: 1, length: 30}, {name: voice, weight: 3, length: 48KiB, dscp: [46]}]
"#;

#[test]
fn traffic_classes_divide_a_link_by_weight() {
    let mut node = TestNode::start("queues");
    node.apply(QUEUED);
    // Each sends four times the link's rate, in frames of one size.
    let ping =
        |tos: &str, count: u32| format!("ping -i 0.002 -c {count} -s 1000 -Q {tos} 10.0.0.2");
    assert!(all_answered(&node.exec("red/h1", &ping("0xb8", 3)), 3));
    for tos in ["0x0", "0x0", "0xb8", "0xb8"] {
        let line = format!("({}) < /dev/null > /dev/null 2>&1 &", ping(tos, 1_000_000));
        node.pdp(&["exec", "red/h1", "--", "sh", "-c", &line]);
    }
    let queues = |node: &TestNode| {
        let stats = node.json(&["stats", "red"]);
        let port = &stats["vnets"]["red"]["nodes"]["h1"]["ports"]["eth0"];
        let count = |queue: &serde_json::Value, key: &str| queue[key].as_u64().expect("a count");
        let of = |name: &str| {
            let all = port["queues"].as_array().expect("queues");
            let found = all.iter().find(|it| it["name"] == name).expect("the queue");
            ["sent", "dropped", "waiting"].map(|key| count(found, key))
        };
        (["rest", "voice"].map(of), port["dropped"].clone())
    };
    // Part of `voice` in the next 500 frames, while both queues are full.
    let part = |node: &TestNode| {
        let all_full = |node: &TestNode| queues(node).0.iter().all(|queue| queue[2] > 10);
        eventually("both are full", || all_full(node));
        let before = queues(node).0;
        let since = |node: &TestNode| [0, 1].map(|at| queues(node).0[at][0] - before[at][0]);
        eventually("frames go", || since(node).iter().sum::<u64>() > 500);
        let [rest, voice] = since(node);
        let after = queues(node).0;
        assert!((0..2).all(|at| after[at][1] > before[at][1]), "{before:?} {after:?}");
        voice as f64 / (rest + voice) as f64
    };
    let three_of_four = part(&node);
    assert!((0.70..0.80).contains(&three_of_four), "{three_of_four}");
    let other = r#"queues=[{"name": "voice", "dscp": [46], "length": 30}, {"name": "rest", "weight": 3, "dscp": [0], "length": 30}]"#;
    node.pdp(&["link", "set", "red/thin", "--at", "h1:eth0", other]);
    let one_of_four = part(&node);
    assert!((0.20..0.30).contains(&one_of_four), "{one_of_four}");
    let (each, dropped) = queues(&node);
    let full: u64 = each.iter().map(|queue| queue[1]).sum();
    let dropped = ["queue-full", "link-down"].map(|reason| dropped[reason].as_u64().unwrap_or(0));
    // Queues are counted a moment later.
    assert!((1..=full).contains(&dropped[0]) && dropped[1] == 0, "{dropped:?}, {full}");
    assert!(node.pdp(&["stats", "red"]).contains("voice"));
    node.pdp(&["down", "--purge"]);
    node.wait_pdpd();
    assert_eq!(node.leftovers(), [""; 0]);
}
