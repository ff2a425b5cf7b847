//! Each router pays for its own work: routers with the kernel
//! data plane, one of which has far more work than power.
//!
//! This repeats Trellis (ROADS 2008), Table 4, where one flow's rules cost
//! another flow a quarter of its packets. In addition, another network uses
//! all remaining CPU time, and writes to its volume all the time.

use std::path::Path;
use std::time::{Duration, Instant};

use pdp_e2e::frame::{NUMBER_AT, write_frame};
use pdp_e2e::{TestNode, alone, eventually};

/// Rules that every packet of the bad network traverses without a match.
const RULES: u32 = 20_000;

/// Power of each router in the middle, cores.
const POWER: f64 = 0.15;

/// Tolerance of the used CPU time, relative.
const POWER_ERROR: f64 = 0.35;

/// Frames per second of the good network: far less than its power permits.
const GOOD_PPS: u64 = 2_000;

/// Tolerated loss of these, and the number of tries, as the machine's other users take resources.
const GOOD_LOSS: f64 = 0.01;
const TRIES: u32 = 3;

const FLOOD: Duration = Duration::from_secs(4);

/// Hosts that use all available resources and report their progress.
const HOGS: &str = r#"
apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {name: hogs}
spec:
  nodes:
    cpu:
      kind: host
      commands: [{run: "sh -c 'while :; do :; done'"}]
    disk:
      kind: host
      volumes: [{source: written, target: /srv/written, size: 64Mi}]
      commands:
        - run: >-
            sh -c 'while dd if=/dev/zero of=/srv/written/zeros bs=1M count=16 conv=fsync status=none;
            do echo >> /srv/written/times; done'
"#;

fn generator(frames: &Path, pps: u64) -> String {
    format!("{{generator: {{frames: {}, pps: {pps}, numberAt: {NUMBER_AT}}}}}", frames.display())
}

/// Three routers in a row. The links of the middle one are kernel links.
fn row(name: &str) -> String {
    format!(
        r#"
apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {{name: {name}}}
spec:
  nodes:
    r0:
      kind: router
      dataPlane: {{kind: kernel}}
      routes: [{{to: 10.0.2.0/24, via: 10.0.3.2}}]
      interfaces:
        eth0: {{addresses: [10.0.1.1/24], mac: "02:00:00:00:01:01"}}
        eth1: {{addresses: [10.0.3.1/24]}}
    r1:
      kind: router
      dataPlane: {{kind: kernel, power: {POWER}}}
      routes: [{{to: 10.0.2.0/24, via: 10.0.4.2}}]
      interfaces:
        eth0: {{addresses: [10.0.3.2/24]}}
        eth1: {{addresses: [10.0.4.1/24]}}
    r2:
      kind: router
      dataPlane: {{kind: kernel}}
      interfaces:
        eth0: {{addresses: [10.0.4.2/24]}}
        eth1: {{addresses: [10.0.2.1/24], mac: "02:00:00:00:02:01"}}
  externals: {{in: {{interface: {name}}}, out: {{interface: {name}sink}}}}
  links:
    - endpoints: ["r0:eth0", "external:in"]
    - endpoints: ["r0:eth1", "r1:eth0"]
    - endpoints: ["r1:eth1", "r2:eth0"]
    - endpoints: ["r2:eth1", "external:out"]
"#
    )
}

#[test]
fn overloaded_kernel_router_takes_nothing_from_others() {
    let _alone = alone();
    let node = TestNode::start("kernelpower");
    let frames = node.directory.join("frames");
    write_frame(&frames).expect("a file");
    let sink = format!("{{generator: {{numberAt: {NUMBER_AT}}}}}");
    let offer = |bad: u64, good: u64| {
        let (bad, good) = (generator(&frames, bad), generator(&frames, good));
        node.apply(&format!(
            r#"
apiVersion: pdp/v1
kind: Substrate
metadata: {{name: node}}
spec:
  interfaces: {{bad: {bad}, badsink: {sink}, good: {good}, goodsink: {sink}}}
  mux: {{cpus: "0", power: 0.4}}
  forwardingEngines: {{fe1: {{cpus: "0-1", capacity: 1}}}}
"#
        ));
    };
    offer(1, 1);
    for name in ["bad", "good"] {
        node.apply(&row(name));
        // The sink answers no ARP request.
        let neighbour = "ip neigh replace 10.0.2.2 lladdr 02:00:00:00:02:02 dev eth1";
        node.exec(&format!("{name}/r2"), neighbour);
    }
    let counted = |node: &TestNode, sink: &str| {
        node.json(&["stats"])["externals"][sink]["numbered"].as_u64().expect("a counter")
    };
    for sink in ["badsink", "goodsink"] {
        let before = counted(&node, sink);
        eventually("frames come through", || counted(&node, sink) > before);
    }
    let rules = format!(
        "( echo add table ip slow
           echo 'add chain ip slow forward {{ type filter hook forward priority 0; }}'
           for at in $(seq {RULES}); do
               echo add rule ip slow forward ip saddr 198.51.100.1 udp dport $at counter drop
           done ) | split -l 500 - /tmp/rules.; for part in /tmp/rules.*; do nft -f $part; done"
    );
    node.pdp(&["exec", "bad/r1", "--", "sh", "-c", &rules]);

    let used = || {
        let args = ["top", "bad", "--once", "--every", "3"];
        let rows = node.json(&args);
        let mut rows = rows.as_array().expect("rows").iter();
        let row = rows.find(|row| row["name"] == "r1/kernel").expect("a row");
        row["cpuCores"].as_f64().expect("cores")
    };
    let written = || {
        // The file does not exist before the first time.
        let counted = node.try_exec("hogs/disk", "wc -l /srv/written/times").unwrap_or_default();
        counted.split_whitespace().next().map_or(0, |it| it.parse::<u64>().expect("a number"))
    };
    let during = |what: &str, bad: u64| {
        offer(bad, GOOD_PPS);
        std::thread::sleep(Duration::from_millis(500));
        let sinks = ["badsink", "goodsink"];
        let (before, since) = (sinks.map(|it| counted(&node, it)), Instant::now());
        let cores = used();
        std::thread::sleep(FLOOD.saturating_sub(since.elapsed()));
        let seconds = since.elapsed().as_secs_f64();
        let received = sinks.map(|it| counted(&node, it));
        let [bad, good] = [0, 1].map(|at| (received[at] - before[at]) as f64 / seconds);
        println!("{what}: bad {bad:.0}/s with {cores:.3} cores, good {good:.0}/s");
        (bad, cores, good)
    };
    // First as much as its power permits, then three times that.
    let (capacity, ..) = during("all that goes", 20_000);
    node.apply(HOGS);
    eventually("the disk is written to", || written() > 0);
    let before = written();
    let as_guaranteed = (0..TRIES).any(|_| {
        let (_, cores, good) = during("three times what its power carries", capacity as u64 * 3);
        assert!(cores < POWER * (1.0 + POWER_ERROR), "{cores} cores of {POWER}");
        cores > POWER * (1.0 - POWER_ERROR) && good > (1.0 - GOOD_LOSS) * GOOD_PPS as f64
    });
    assert!(as_guaranteed, "not in {TRIES} tries");
    // Hundredths of a second, of the process with the most CPU time (proc(5)).
    let most = "cut -d' ' -f14 /proc/[0-9]*/stat | sort -n | tail -n1";
    let most = node.pdp(&["exec", "hogs/cpu", "--", "sh", "-c", most]);
    let (ticks, times) = (most.trim().parse::<u64>().expect("a number"), written() - before);
    println!("beside them {} ms of CPU time, and 16 MB written {times} times", ticks * 10);
    assert!(ticks > 100 && times > 0, "no hogs: {ticks} ticks, {times} times");
    let stats = node.json(&["stats", "bad"]);
    let dropped = &stats["vnets"]["bad"]["nodes"]["r1"]["ports"]["eth0"]["dropped"];
    assert!(dropped["kernel-power"].as_u64() > Some(1_000), "{dropped}");
}
