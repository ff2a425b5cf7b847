//! Programs that use memif as external interfaces: a Debian testpmd sends, a router forwards, and
//! another testpmd receives.

use std::fs::File;
use std::process::{Child, Command, Stdio};

use pdp_e2e::{TestNode, eventually};

const SPEC: &str = r#"
apiVersion: pdp/v1
kind: Substrate
metadata: {name: here}
spec:
  interfaces:
    in: {memif: {}}
    out: {memif: {}}
  mux: {cpus: "0", power: 0.5}
  forwardingEngines:
    fe0: {cpus: "1", capacity: 0.5}
---
apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {name: red}
spec:
  nodes:
    r1:
      kind: router
      interfaces:
        eth0: {addresses: [10.0.1.1/24], mac: "02:00:00:00:01:01"}
        eth1: {addresses: [10.0.2.1/24], mac: "02:00:00:00:02:01"}
      dataPlane: {power: 0.5}
  externals: {a: {interface: in}, b: {interface: out}}
  links:
    - endpoints: ["r1:eth0", "external:a"]
    - endpoints: ["r1:eth1", "external:b"]
"#;

/// Running testpmd on the memif socket of an external interface; killed when dropped.
struct Testpmd {
    child: Child,
    output: std::path::PathBuf,
}

impl Testpmd {
    fn start(node: &TestNode, interface: &str, mode: &str) -> Self {
        let substrate = node.json(&["inspect", "substrate"]);
        let text = substrate.to_string();
        let socket = node.run_dir().join("externals").join(interface).join("memif.sock");
        let socket = socket.to_str().expect("UTF-8");
        assert!(text.contains(socket), "the socket is shown: {text}");
        let output = node.directory.join(format!("{interface}.txt"));
        let child = Command::new("dpdk-testpmd")
            .args(["--no-huge", "--no-shconf", "--no-pci", "--no-telemetry", "-m", "128"])
            .arg(format!("--file-prefix={}-{interface}", node.id))
            .args(["--lcores", "0@0,1@1"])
            .arg(format!("--vdev=net_memif0,role=client,id=0,socket={socket},socket-abstract=no"))
            .args(["--", "--total-num-mbufs=4096", "--no-mlockall", "--no-lsc-interrupt"])
            .args(["--disable-link-check", "--port-topology=loop", "--stats-period=1"])
            .args(["--eth-peer=0,02:00:00:00:01:01", "--tx-ip=10.0.1.2,10.0.2.2"])
            .arg(format!("--forward-mode={mode}"))
            .stdin(Stdio::null())
            .stdout(File::create(&output).expect("output of testpmd"))
            .stderr(Stdio::null())
            .spawn()
            .expect("dpdk-testpmd");
        Self { child, output }
    }

    /// Frames received, according to its last report.
    fn received(&self) -> u64 {
        let text = std::fs::read_to_string(&self.output).unwrap_or_default();
        let numbers = text.split("RX-packets:").skip(1);
        let last = numbers.filter_map(|rest| rest.split_whitespace().next()?.parse().ok()).last();
        last.unwrap_or(0)
    }
}

impl Drop for Testpmd {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn memif_programs_attach_as_external_interfaces() {
    let node = TestNode::start("mio");
    node.apply(SPEC);
    node.exec(
        "red/r1",
        "ip neigh replace 10.0.2.2 lladdr 02:00:00:00:02:02 dev eth1 nud permanent",
    );
    let mut sink = Testpmd::start(&node, "out", "rxonly");
    let source = Testpmd::start(&node, "in", "txonly");
    let stats = |interface: &str, what: &str| {
        node.json(&["stats"])["externals"][interface][what].as_u64().expect("a counter")
    };
    eventually("frames come through", || sink.received() > 10_000);
    assert!(stats("in", "received") >= stats("out", "sent"), "no frame comes from nowhere");

    // The receiver is killed and restarted. Meanwhile its frames are counted, and nothing blocks.
    drop(sink);
    let gone = || {
        let ports = node.json(&["stats", "red"])["vnets"]["red"]["nodes"]["r1"]["ports"].clone();
        ports["eth1"]["dropped"]["external-gone"].as_u64().unwrap_or(0)
    };
    eventually("frames without a receiver are counted", || gone() > 0);
    sink = Testpmd::start(&node, "out", "rxonly");
    eventually("frames come through again", || sink.received() > 10_000);

    // A change of the vnet leaves the programs connected.
    let lines = || node.log_of("mux").matches("is connected").count();
    let before = lines();
    node.apply(&SPEC.replace("power: 0.5}\n  externals", "power: 0.4}\n  externals"));
    let had = sink.received();
    eventually("frames still come", || sink.received() > had);
    assert_eq!(lines(), before);
    drop(source);
}
