//! Commands that wait for each other, and the reports about failed ones.

use pdp_e2e::{TestNode, eventually};

const SPEC: &str = r#"
apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {name: red}
spec:
  nodes:
    good:
      kind: host
      interfaces: {eth0: {addresses: [10.0.0.1/24]}}
      commands:
        - {run: ["sh", "-c", "sleep 0.2; cat /run/said; exec sleep 1000"], name: last, after: server}
        - run: [python3, -c, "import socket, time; s = socket.create_server(('0.0.0.0', 80)); time.sleep(1000)"]
          name: server
          after: first
          ready: {tcp: 80}
        - {run: ["sh", "-c", "ip -br addr show dev eth0 > /run/said"], name: first, once: true}
        - run: ["sh", "-c", "id -u > /tmp/who; exec sleep 1000"]
          name: nobody
          user: nobody:7
          workdir: /srv
          ready: {command: ["sh", "-c", "test $(id -u):$(id -g):$PWD = 65534:7:/srv"]}
      exec:
        - ip route add 10.9.0.0/16 via 10.0.0.2
        - ["sh", "-c", "ip route show 10.9.0.0/16 > /run/routes"]
    bad:
      kind: host
      interfaces: {eth0: {addresses: [10.0.0.2/24]}}
      commands:
        - sleep 1000
        - {run: ["sh", "-c", "echo no licence >&2; exit 4"], name: daemon}
      exec:
        - ip route add 10.9.0.0/16 via 10.8.0.1
        - touch /run/never
    elsewhere:
      kind: host
      commands: [{run: "true", name: nowhere, workdir: /x}]
  links:
    - endpoints: ["good:eth0", "bad:eth0"]
"#;

#[test]
fn node_readiness_follows_its_commands() {
    let mut node = TestNode::start("ready");
    node.apply(SPEC);
    let status = |node: &TestNode| node.json(&["inspect", "red"])["status"].clone();
    let of = |status: &serde_json::Value, name: &str| {
        let nodes = status["nodes"].as_array().expect("nodes").iter();
        nodes.clone().find(|node| node["name"] == name).expect("the node").clone()
    };
    eventually("the good one is ready", || of(&status(&node), "good")["ready"] == true);
    assert!(node.exec("red/good", "cat /run/routes").contains("via 10.0.0.2"));
    eventually("what was said is logged", || {
        node.pdp(&["logs", "red/good"]).contains("10.0.0.1/24")
    });
    // Later commands also run with the given user and directory.
    let who = |words: &[&str]| node.try_pdp(&[&["exec"], words].concat());
    let script = "id -u; id -g; pwd; grep CapEff /proc/self/status";
    let output = who(&["-u", "nobody:7", "-w", "/srv", "red/good", "sh", "-c", script]);
    assert_eq!(output.expect("it runs"), "65534\n7\n/srv\nCapEff:\t0000000000000000\n");
    let output = who(&["-u", "nosuch", "red/good", "id"]).expect_err("no such user");
    assert!(output.contains("error: red/good: user nosuch: not in /etc/passwd"), "{output}");
    let output = who(&["-w", "srv", "red/good", "id"]).expect_err("no path");
    assert!(output.contains("workdir \"srv\" is not an absolute path"), "{output}");
    let output = who(&["-u", "70000", "red/good", "id"]).expect_err("no id");
    assert!(output.contains("has an id outside 0 to 65535"), "{output}");
    // A failure is reported where people look first, with its last line.
    let is_reported = |node: &TestNode| {
        let (status, message) =
            (status(node), node.json(&["get", "red"])[0]["message"].to_string());
        let bad = of(&status, "bad");
        message.contains("bad/exec-1: ended with code 2: ")
            && message.contains("bad/daemon: ended with code 4: no licence (started ")
            && [&status["phase"], &bad["phase"]].iter().all(|phase| **phase == "degraded")
            && [&status["ready"], &bad["ready"]].iter().all(|ready| **ready == false)
            && bad["commands"][2]["state"] == "failed"
            && bad["commands"][3]["message"] == "waits for exec-1"
            && {
                let node = of(&status, "elsewhere");
                node["phase"] == "degraded"
                    && node["message"]
                        .to_string()
                        .contains("nowhere: can't be started: workdir /x: no such directory")
            }
    };
    eventually("failures are told", || is_reported(&node));
    assert!(node.exec("red/bad", "ls /run").lines().all(|name| name != "never"));
    // A daemon that takes over running processes knows all of this.
    node.kill_pdpd();
    node.start_pdpd();
    eventually("failures are told again", || is_reported(&node));
    assert_eq!(of(&status(&node), "good")["ready"], true);
}
