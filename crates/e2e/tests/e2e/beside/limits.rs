//! A node's promises at its limits.

use std::fs;

use pdp_e2e::{TestNode, eventually, kill};

/// Most interfaces of a node.
const PORTS: usize = 256;

/// Node with [`PORTS`] interfaces, of which the first and
/// the last connect to another node, both of this kind.
fn wide(kind: &str) -> String {
    let ports: String = (0..PORTS)
        .map(|port| format!("        eth{port}: {{addresses: [10.7.{port}.1/24]}}\n"))
        .collect();
    let last = PORTS - 1;
    format!(
        "
apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {{name: wide}}
spec:
  nodes:
    many:
      kind: {kind}
      interfaces:
{ports}
    few:
      kind: {kind}
      interfaces:
        eth0: {{addresses: [10.7.0.2/24]}}
        eth1: {{addresses: [10.7.{last}.2/24]}}
  links:
    - endpoints: [\"many:eth0\", \"few:eth0\"]
    - endpoints: [\"many:eth{last}\", \"few:eth1\"]
"
    )
}

#[test]
fn widest_nodes_taps_survive_restarts() {
    go_from_hand_to_hand("wide", "host");
}

/// With the kernel data plane the two links are kernel links, and all other interfaces are TAPs.
#[test]
fn widest_nodes_taps_survive_restarts_beside_kernel_links() {
    let node = go_from_hand_to_hand("widekernel", "router\n      dataPlane: {kind: kernel}");
    let ports = fs::read_dir(node.pins().join("_ports")).expect("pins of ports").flatten();
    assert_eq!(ports.filter(|entry| entry.path().is_dir()).count(), 4);
}

fn go_from_hand_to_hand(label: &str, kind: &str) -> TestNode {
    let mut node = TestNode::start(label);
    node.apply(&wide(kind));
    let reaches = |node: &TestNode| {
        eventually("both ends answer", || {
            [0, PORTS - 1].iter().all(|port| {
                node.try_exec("wide/few", &format!("ping -c1 -W1 10.7.{port}.1")).is_ok()
            })
        });
    };
    let pid = |node: &TestNode, part: &str| {
        let status = node.json(&["inspect", "wide"])["status"].clone();
        let nodes = status["nodes"].as_array().expect("nodes");
        let many = nodes.iter().find(|found| found["name"] == "many").expect("many");
        many[part]["pid"].as_u64().and_then(|pid| u32::try_from(pid).ok())
    };
    reaches(&node);
    let guest = pid(&node, "control").expect("it runs");

    // A new pdpd gets them from the helper, and a new helper from pdpd.
    node.kill_pdpd();
    node.start_pdpd();
    node.pdp(&["wait", "wide", "--for", "ready", "--timeout", "60s"]);
    let helper = pid(&node, "tap").expect("it runs");
    kill(helper);
    eventually("the helper is replaced", || pid(&node, "tap").is_some_and(|now| now != helper));
    reaches(&node);
    assert_eq!(pid(&node, "control"), Some(guest), "no TAP was lost");
    node
}

/// Bytes of one log file: docs/ARCHITECTURE.md, "Places".
const LOG_BYTES_MAX: usize = 4 << 20;

#[test]
fn running_daemons_log_is_bounded() {
    let mut node = TestNode::prepare("log");
    fs::create_dir_all(node.run_dir()).expect("run directory");
    let path = node.run_dir().join("pdpd.log");
    // Space for its first output.
    let room = 500;
    let line = "what was long ago\n";
    fs::write(&path, line.repeat((LOG_BYTES_MAX - room) / line.len())).expect("log");
    node.start_pdpd();
    let older = path.with_extension("log.1");
    assert!(!older.exists());
    let mut changes = 0;
    eventually("a new file begins", || {
        changes += 1;
        node.apply(&format!(
            "{{apiVersion: pdp/v1, kind: Substrate, metadata: {{name: node}}, spec: {{
              mux: {{cpus: '0', power: 0.5, workers: {}}}, forwardingEngines: {{}}}}}}",
            1 + changes % 2
        ));
        older.exists()
    });
    let size = |path| fs::metadata(path).expect("log").len() as usize;
    assert!(size(&older) <= LOG_BYTES_MAX && size(&path) < room + LOG_BYTES_MAX / 2);
    let text = node.pdp(&["logs", "daemon"]);
    assert!(text.contains(line) && text.contains("is ready"), "both are shown");
    node.pdp(&["down", "--purge"]);
    node.wait_pdpd();
    assert!(!older.exists() && !path.exists());
}

const NARROW: &str = r#"
apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {name: narrow}
spec:
  nodes:
    r1:
      kind: router
      interfaces: {eth0: {addresses: [10.1.0.1/24]}}
      resources: {routes: 20}
      dataPlane: {power: 0.1}
    h1: {kind: host, interfaces: {eth0: {addresses: [10.1.0.2/24], gateways: [10.1.0.1]}}}
  links:
    - endpoints: ["r1:eth0", "h1:eth0"]
"#;

#[test]
fn routes_beyond_the_limit_are_reported() {
    let node = TestNode::start("narrow");
    node.apply(NARROW);
    let phase = || node.json(&["inspect", "narrow"])["status"]["phase"].clone();
    eventually("all runs", || phase() == "running");
    let change = |verb: &str| {
        let line =
            format!("for i in $(seq 30); do ip route {verb} 203.0.113.$i via 10.1.0.2; done");
        node.pdp(&["exec", "narrow/r1", "--", "sh", "-ec", &line]);
    };
    change("add");
    // Ten, and the interface's subnet.
    let words = "mirror: 11 of the kernel's routes are not in the forwarding guests: \
                 resources.routes is 20; raise it";
    eventually("inspect tells", || node.pdp(&["inspect", "narrow/r1"]).contains(words));
    assert_eq!(phase(), "degraded");
    // The kernel's routes are counted before the guest has
    // its table. Without it the guest is not queried.
    eventually("routes tells", || {
        let mut routes = node.pdp_command(&["routes", "narrow/r1", "--guest", "0"]);
        let output = pdp_e2e::run(&mut routes, "");
        let note = String::from_utf8_lossy(&output.stderr);
        output.status.success() && note.contains("11 of the kernel's routes")
    });
    change("del");
    eventually("all is well again", || phase() == "running");
}

const SHORT: &str = r#"
apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {name: short}
spec:
  nodes:
    threads:
      kind: host
      resources: {processes: 24}
      commands:
        - - python3
          - -c
          - |
            import threading, time
            for _ in range(100): threading.Thread(target=time.sleep, args=(600,)).start()
    bytes:
      kind: host
      resources: {memory: 64Mi}
      commands: [["sh", "-c", "python3 -c 'bytearray(512 << 20)'; exec sleep 1000"]]
    big:
      kind: router
      dataPlane: {memory: 64Mi, program: {attach: runtime, run: "python3 -c 'bytearray(512 << 20)'"}}
    none:
      kind: router
      dataPlane: {program: {attach: runtime, run: /no/such}}
"#;

#[test]
fn reached_limits_are_reported_until_raised() {
    let node = TestNode::start("short");
    node.apply(SHORT);
    let inspected = |name: &str| node.pdp(&["inspect", &format!("short/{name}")]);
    let refused =
        "threads: reached resources.processes (24): the kernel refused processes or threads 1 time";
    eventually("threads that were refused", || inspected("threads").contains(refused));
    let note = node.pdp(&["get", "short"]);
    assert!(note.contains(refused), "{note}");
    let killed = "bytes: reached resources.memory (64Mi): the kernel killed 1 of its processes";
    eventually("a process that was killed", || inspected("bytes").contains(killed));
    // The reason for a forwarding guest's end is reported while it is down.
    eventually("a guest that was killed", || {
        inspected("big").contains("ended with code 137, out of memory")
    });
    eventually("a guest that can't run", || {
        inspected("none").contains("ended with code 127: /no/such can't be started: No such file")
    });
    node.apply(&SHORT.replace("processes: 24", "processes: 512"));
    eventually("the limit is another", || !inspected("threads").contains("reached"));
}
