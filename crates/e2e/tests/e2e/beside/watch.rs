//! A watch reports all events of a node.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Stdio};
use std::sync::{Arc, Mutex};

use pdp_e2e::{TestNode, eventually, sh};
use serde_json::Value;

const SPEC: &str = r#"
apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {name: red}
spec:
  nodes:
    r1:
      kind: router
      interfaces: {eth0: {addresses: [10.0.1.1/24]}}
      dataPlane: {power: 0.1}
    h1:
      kind: host
      interfaces: {eth0: {addresses: [10.0.1.2/24], gateways: [10.0.1.1]}}
  links:
    - {name: near, delay: 200ms, endpoints: ["r1:eth0", "h1:eth0"]}
"#;

/// Stream of events, read while this lives.
pub(super) struct Watched {
    child: Child,
    lines: Arc<Mutex<Vec<Value>>>,
}

impl Drop for Watched {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Watched {
    pub(super) fn of(node: &TestNode, arguments: &[&str]) -> Self {
        let mut command = node.pdp_command(arguments);
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let (out, lines) = (child.stdout.take().unwrap(), Arc::<Mutex<Vec<Value>>>::default());
        let to = lines.clone();
        std::thread::spawn(move || {
            for line in BufReader::new(out).lines().map_while(Result::ok) {
                to.lock().unwrap().push(serde_json::from_str(&line).unwrap());
            }
        });
        Self { child, lines }
    }

    /// Waits for these events from here on, in this order, with any others between.
    #[track_caller]
    pub(super) fn expect(&self, events: &[(&str, &str)]) {
        let mut at = 0;
        for (object, what) in events {
            eventually(&format!("{what} of {object}"), || {
                let lines = self.lines.lock().unwrap();
                let is = |line: &Value| {
                    line["event"]["object"] == *object && line["event"]["what"] == *what
                };
                let found = lines.iter().skip(at).position(is);
                found.is_some_and(|found| {
                    at += found + 1;
                    true
                })
            });
        }
        self.lines.lock().unwrap().drain(..at);
    }

    fn has(&self, is: impl Fn(&Value) -> bool) -> bool {
        self.lines.lock().unwrap().iter().any(is)
    }
}

#[test]
fn watch_reports_events_and_their_actor() {
    let mut node = TestNode::start("watch");
    let watched = Watched::of(&node, &["events", "red", "--initial", "--format", "json"]);
    eventually("what is, which is nothing", || {
        watched.has(|line| line["snapshot"]["vnets"].is_array())
    });
    node.apply(SPEC);
    let by_whom =
        |line: &Value| line["event"]["what"] == "begun" && line["event"]["who"].as_str().is_some();
    eventually("who began it", || watched.has(by_whom));
    watched.expect(&[("vnet/red", "begun"), ("vnet/red/node/r1/g0", "connected")]);
    for condition in ["ready", "routes-synced"] {
        node.pdp(&["wait", "red", "--for", condition]);
    }
    let status = node.json(&["inspect", "red"]);
    let nodes = status["status"]["nodes"].as_array().unwrap();
    let pid = nodes.iter().find_map(|node| node["guests"][0]["pid"].as_u64()).unwrap();
    sh(&format!("kill -9 {pid}"));
    watched.expect(&[("vnet/red/node/r1/g0", "ended"), ("vnet/red/node/r1/g0", "restarted")]);
    node.pdp(&["link", "down", "red/near"]);
    watched.expect(&[("vnet/red/link/near", "linkDown")]);
    node.pdp(&["link", "up", "red/near"]);
    watched.expect(&[("vnet/red/link/near", "linkUp")]);
    // One shot: the current state, or the past events.
    let once = |arguments: &[&str]| node.pdp(&[&["events", "red", "--once"], arguments].concat());
    let (state, past) = (once(&[]), once(&["--since", "1h"]));
    assert!(state.contains("vnet/red  is ") && !state.contains("link/near"), "{state}");
    assert!(past.contains("vnet/red/link/near  ") && !past.contains("  is "), "{past}");
    // Current queues of links, and resources used by guests.
    let rows = node.json(&["top", "--once"]);
    let row = ["name", "guests"].map(|key| rows[0][key].clone());
    assert_eq!(row, [Value::from("red"), Value::from(1)], "{rows}");
    assert!(rows[0]["memoryBytes"].as_u64().unwrap() > 0, "{rows}");
    let parts = node.json(&["top", "red", "--once"]);
    let names = parts.as_array().unwrap().iter().filter_map(|row| row["name"].as_str());
    assert_eq!(
        names.collect::<Vec<_>>(),
        ["h1/control", "h1:eth0", "r1/control", "r1/g0", "r1:eth0"]
    );
    // A waiting client keeps waiting across a restart.
    let mut waits = node.pdp_command(&["wait", "red", "--for", "gone", "--timeout", "10m"]);
    let mut waits = waits.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let mut stderr = BufReader::new(waits.stderr.take().unwrap());
    let mut first = String::new();
    stderr.read_line(&mut first).unwrap();
    assert!(first.contains("red still exists"), "{first}");
    node.kill_pdpd();
    node.start_pdpd();
    eventually("a gap and what is", || {
        watched.has(|line| line.get("gap").is_some())
            && watched.has(|line| line["snapshot"]["status"]["phase"].is_string())
    });
    node.pdp(&["delete", "red"]);
    watched.expect(&[("vnet/red", "begun"), ("vnet/red", "gone")]);
    let mut rest = String::new();
    stderr.read_to_string(&mut rest).unwrap();
    assert!(waits.wait().unwrap().success(), "{rest}");
}
