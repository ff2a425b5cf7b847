//! What links do to frames on purpose is what the spec says, and changes while frames are on their way.

use pdp_e2e::{Node, all_answered, eventually};

const SPEC: &str = r#"
apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {name: red}
spec:
  nodes:
    h1: {kind: host, interfaces: {eth0: {addresses: [10.0.0.1/24]}, eth1: {addresses: [10.0.1.1/24]}}}
    h2: {kind: host, interfaces: {eth0: {addresses: [10.0.0.2/24]}, eth1: {addresses: [10.0.1.2/24]}}}
  links:
    - {name: far, endpoints: ["h1:eth0", "h2:eth0"], rate: 100Mbps, queue: 50ms, delay: 20ms}
    - name: lossy
      endpoints: ["h1:eth1", "h2:eth1"]
      at: {"h2:eth1": {loss: 30%, seed: 3}}
"#;

/// Least and mean round trip in what `ping` said, milliseconds.
fn round_trip_ms(words: &str) -> [f64; 2] {
    let (_, times) = words.split_once("min/avg/max/mdev = ").expect("round trips");
    let mut times = times.split('/').map(|time| time.parse().expect("a time"));
    [times.next().expect("the least"), times.next().expect("the mean")]
}

fn counter(node: &Node, host: &str, port: &str, what: &[&str]) -> u64 {
    let stats = node.json(&["stats", "red"]);
    let port = &stats["vnets"]["red"]["nodes"][host]["ports"][port];
    what.iter().fold(port, |value, key| &value[key]).as_u64().unwrap_or(0)
}

#[test]
fn delays_and_losses_are_as_written_and_change_without_a_frame_lost() {
    let mut node = Node::start("links");
    node.apply(SPEC);
    // 20 ms each way, and what the way takes without.
    let words = node.exec("red/h1", "ping -c10 -i0.05 -w60 10.0.0.2");
    assert!(all_answered(&words, 10), "{words}");
    let [least, mean] = round_trip_ms(&words);
    assert!(least >= 40.0 && mean < 60.0, "{words}");

    // One way only: what is lost there is what no answer came to.
    let words = node.exec("red/h1", "ping -c100 -i0.01 -W1 10.0.1.2 || true");
    let lost = counter(&node, "h2", "eth1", &["dropped", "loss"]);
    let sent = counter(&node, "h2", "eth1", &["sent"]);
    assert!((10..60).contains(&lost) && sent + lost >= 100, "{lost} of {sent}: {words}");
    assert_eq!(counter(&node, "h1", "eth1", &["dropped", "loss"]), 0);
    let answers = 100 - words.matches("bytes from").count() as u64;
    // Neighbour discovery loses some, too.
    assert!(answers <= lost && lost - answers < 10, "{answers} missing of {lost}: {words}");

    // Longer, shorter and none, while a hundred a second are on their way.
    let ping = "ping -c250 -i0.01 -w60 10.0.0.2 > /run/ping.txt; echo over >> /run/ping.txt";
    node.pdp(&[
        "exec",
        "red/h1",
        "--",
        "sh",
        "-c",
        &format!("({ping}) < /dev/null > /dev/null 2>&1 &"),
    ]);
    for delay in ["delay: 60ms", "delay: 5ms, jitter: 2ms", "delay: 0ms"] {
        node.apply(&SPEC.replace("delay: 20ms", delay));
    }
    eventually("all of them", || node.exec("red/h1", "cat /run/ping.txt").contains("over"));
    let words = node.exec("red/h1", "cat /run/ping.txt");
    assert!(all_answered(&words, 250) && !words.contains("DUP"), "{words}");
    let words = node.exec("red/h1", "ping -c5 -i0.05 -w60 10.0.0.2");
    assert!(round_trip_ms(&words)[0] < 20.0, "{words}");
    assert_eq!(counter(&node, "h1", "eth0", &["dropped", "delay-full"]), 0);
    node.pdp(&["down", "--purge"]);
    node.wait_pdpd();
    assert_eq!(node.leftovers(), [""; 0]);
}
