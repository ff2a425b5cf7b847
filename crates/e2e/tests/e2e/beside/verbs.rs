//! The user's verbs, run against a node with traffic.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

use pdp_e2e::counters::missing;
use pdp_e2e::{Background, EVENTUALLY_MAX, TestNode, bin, eventually, run, sh};
use serde_json::Value;

/// Rate of the link between r1 and h2.
const RATE_BPS: u64 = 20_000_000;

/// Bytes that TCP transfers over it, in each direction.
const TRANSFER_BYTES: u64 = 5_000_000;

/// h1 - r1 - h2. The link between r1 and h2 has a rate, and h2 runs an iperf3 server.
const SPEC: &str = r#"
apiVersion: pdp/v1
kind: Substrate
metadata: {name: node}
spec:
  mux: {cpus: "0", power: 0.5}
  forwardingEngines:
    fe1: {cpus: "1", capacity: 1}
---
apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {name: red}
spec:
  nodes:
    r1:
      kind: router
      interfaces:
        eth0: {addresses: [10.0.1.1/24]}
        eth1: {addresses: [10.0.2.1/24]}
      dataPlane: {power: 0.2}
    h1:
      kind: host
      interfaces: {eth0: {addresses: [10.0.1.2/24], gateways: [10.0.1.1]}}
    h2:
      kind: host
      interfaces: {eth0: {addresses: [10.0.2.2/24], gateways: [10.0.2.1]}}
      commands:
        - sh -c 'echo h2 serves; exec iperf3 --server --forceflush'
  links:
    - {name: near, endpoints: ["r1:eth0", "h1:eth0"]}
    - {name: far, rate: 20Mbps, endpoints: ["r1:eth1", "h2:eth0"]}
"#;

fn up(label: &str) -> TestNode {
    let node = TestNode::start(label);
    node.apply(SPEC);
    eventually("h1 reaches h2", || node.try_exec("red/h1", "ping -c1 -W1 10.0.2.2").is_ok());
    node
}

/// Process that is killed when dropped.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        // It may have ended and been reaped.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Output of a command, line by line as it comes.
struct Lines {
    child: Killed,
    lines: Receiver<String>,
}

impl Lines {
    fn of(command: &mut Command) -> Self {
        let mut child = Killed(command.stdout(Stdio::piped()).spawn().expect("a command"));
        let output = BufReader::new(child.0.stdout.take().expect("piped"));
        let (sender, lines) = mpsc::channel();
        thread::spawn(move || {
            output.lines().map_while(Result::ok).try_for_each(|l| sender.send(l))
        });
        Self { child, lines }
    }

    #[track_caller]
    fn next(&self) -> String {
        self.lines.recv_timeout(EVENTUALLY_MAX).expect("one more line")
    }
}

/// `pdp trace` of a frame at r1:eth0 with this target, while h1 pings it.
fn traced(node: &TestNode, target: [u8; 4]) -> Vec<Value> {
    let digits: String = target.iter().map(|byte| format!("{byte:02x}")).collect();
    let dotted = target.map(|byte| byte.to_string()).join(".");
    // The IPv4 target address is at offset 30 of the frame.
    let filter = format!("30={digits}");
    let arguments = ["trace", "red/r1:eth0", "--match", "12=0800", "--match", &filter];
    let trace = thread::scope(|scope| {
        let waits = scope.spawn(|| node.json(&[&arguments[..], &["--wait", "60"]].concat()));
        while !waits.is_finished() {
            // There is no answer if the frame is dropped.
            let _ = node.try_exec("red/h1", &format!("ping -c1 -W1 {dotted}"));
        }
        waits.join().expect("pdp trace")
    });
    let stages = trace["stages"].as_array().expect("stages").clone();
    let times: Vec<u64> = stages.iter().map(|s| s["atNs"].as_u64().expect("a time")).collect();
    assert!(times.is_sorted(), "{times:?}");
    stages
}

fn names(stages: &[Value]) -> Vec<&str> {
    stages.iter().map(|stage| stage["stage"].as_str().expect("a stage")).collect()
}

fn last_detail(stages: &[Value]) -> &str {
    stages.last().and_then(|stage| stage["detail"].as_str()).expect("a detail")
}

#[test]
fn capture_and_trace_show_packets() {
    let node = up("watch");

    // Both directions of a ping in one capture.
    let mut capture = node.pdp_command(&["capture", "red/r1:eth1", "-w", "-"]);
    let mut capture = Killed(capture.stdout(Stdio::piped()).spawn().expect("pdp capture"));
    let mut reader = Command::new("tcpdump");
    reader.args(["-nlr", "-", "icmp"]).stdin(capture.0.stdout.take().expect("piped"));
    let reader = Lines::of(reader.stderr(Stdio::null()));
    let (mut seen, mut pings) = ([0; 2], 0);
    eventually("both directions are seen", || {
        node.exec("red/h1", "ping -c1 -W5 10.0.2.2");
        pings += 1;
        for line in reader.lines.try_iter() {
            seen[0] += u32::from(line.contains("10.0.1.2 > 10.0.2.2: ICMP echo request"));
            seen[1] += u32::from(line.contains("10.0.2.2 > 10.0.1.2: ICMP echo reply"));
        }
        !seen.contains(&0)
    });
    assert!(seen.iter().all(|count| *count <= pings), "each frame once: {seen:?} of {pings}");
    sh(&format!("kill -INT {}", capture.0.id()));
    assert!(capture.0.wait().expect("own child").success(), "an interrupt ends it well");
    drop(reader);

    // Into a file, cut off after 60 bytes.
    let file = node.directory.join("capture.pcap");
    let path = file.to_str().expect("a path");
    let arguments = ["capture", "red/h2:eth0", "-w", path, "--snap", "60"];
    let capture = Background::start(&mut node.pdp_command(&arguments));
    eventually("a file with both directions", || {
        node.exec("red/h1", "ping -c1 -W5 -s 500 10.0.2.2");
        let text = Command::new("tcpdump").args(["-nr", path, "icmp"]).output().expect("tcpdump");
        let text = String::from_utf8_lossy(&text.stdout).into_owned();
        text.contains("echo request") && text.contains("echo reply")
    });
    capture.stop("INT");
    let bytes = fs::read(&file).expect("the capture");
    // The first record's header follows the 24 bytes of the file's: captured and original length.
    let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
    assert!(word(32) <= 60 && word(36) >= word(32), "{} of {}", word(32), word(36));

    // Frames of two ports matching a filter, until there are enough.
    let both = node.directory.join("both.pcapng").display().to_string();
    let filter = "icmp[icmptype] == icmp-echo and dst 10.0.2.2";
    let arguments = ["capture", "red/r1:eth0", "red/r1:eth1", "-f", filter, "-c", "4", "-w", &both];
    let mut capture = Background::start(&mut node.pdp_command(&arguments));
    eventually("four frames are there", || {
        node.exec("red/h1", "ping -c1 -W5 10.0.2.2");
        !capture.runs()
    });
    let text = sh(&format!("tcpdump -nr {both}"));
    let requests =
        text.lines().filter(|line| line.contains("10.0.1.2 > 10.0.2.2: ICMP echo request"));
    assert_eq!((requests.count(), text.lines().count()), (4, 4), "{text}");
    let error =
        node.try_pdp(&["capture", "red/external:none", "-w", "-"]).expect_err("none is there");
    assert!(error.contains("no port \"none\""), "{error}");

    // Forwarded to the end of the vlink, once the guest
    // has its routes. Until then the kernel forwards.
    let forwarded = ["receive", "classify", "distribute", "dispatch", "send", "receive", "punt"];
    eventually("the guest forwards", || names(&traced(&node, [10, 0, 2, 2])) == forwarded);
    let stages = traced(&node, [10, 0, 2, 2]);
    let details =
        ["port eth0, 10.0.1.2 > 10.0.2.2", "to guest 0, by its route 10.0.2.0/24 dev eth1"];
    assert_eq!([stages[1]["detail"].as_str(), stages[2]["detail"].as_str()], details.map(Some));
    // Punted: the router's own address.
    let stages = traced(&node, [10, 0, 1, 1]);
    assert_eq!(names(&stages), ["receive", "classify", "distribute", "dispatch", "punt"]);
    assert!(last_detail(&stages).contains("local"), "{stages:?}");
    // Dropped by a blackhole route.
    node.exec("red/r1", "ip route add blackhole 203.0.113.0/24");
    eventually("the guest has the route", || {
        node.pdp(&["routes", "red/r1", "--guest", "0"]).contains("203.0.113.0/24")
    });
    let stages = traced(&node, [203, 0, 113, 9]);
    assert_eq!(names(&stages), ["receive", "classify", "distribute", "dispatch", "drop"]);
    assert_eq!(last_detail(&stages), "guest-blackhole");
    // Nothing to trace.
    let error = node.try_pdp(&["trace", "red/r1:eth0", "--match", "12=88b5", "--wait", "0.3"]);
    let error = error.expect_err("no such frame");
    assert!(error.contains("no such frame arrived within 300 ms"), "{error}");
    let hint = "a trace follows frames that r1 receives at eth0; frames that it sends arrive at \
                red/h1:eth0";
    assert!(error.contains(hint), "{error}");
    // ARP requests with their addresses.
    let traced = ["trace", "red/r1:eth0", "-f", "arp[6:2] = 1", "--format", "json"];
    let mut trace = Background::start(&mut node.pdp_command(&traced));
    eventually("h1 asks", || {
        node.exec("red/h1", "ip neigh flush dev eth0");
        let _ = node.try_exec("red/h1", "ping -c1 -W1 10.0.1.1");
        !trace.runs()
    });
    let text = trace.finish();
    assert!(text.contains("port eth0, ARP who has 10.0.1.1, tell 10.0.1.2"), "{text}");
}

/// Carrier of an interface, according to its node's kernel.
fn carrier(node: &TestNode, port: &str) -> bool {
    let (name, interface) = port.split_once(':').expect("NODE:PORT");
    let words = node.exec(&format!("red/{name}"), &format!("ip -o link show {interface}"));
    words.contains("LOWER_UP") && !words.contains("NO-CARRIER")
}

/// Reports of a node's kernel about a port's carrier from now on.
struct Carriers {
    lines: Lines,
    interface: String,
}

impl Carriers {
    fn of(node: &TestNode, port: &str) -> Self {
        let (name, interface) = port.split_once(':').expect("NODE:PORT");
        let name = format!("red/{name}");
        let script = "echo says; exec ip monitor link";
        let lines = Lines::of(&mut node.pdp_command(&["exec", &name, "--", "sh", "-c", script]));
        assert_eq!(lines.next(), "says");
        // The monitor reports only once it listens.
        thread::sleep(Duration::from_millis(100));
        Self { lines, interface: format!(" {interface}:") }
    }

    /// Time from `since` until the first report of this carrier state.
    #[track_caller]
    fn heard(&self, on: bool, since: Instant) -> Duration {
        let word = if on { "LOWER_UP" } else { "NO-CARRIER" };
        loop {
            let line = self.lines.next();
            if line.contains(&self.interface) && line.contains(word) {
                return since.elapsed();
            }
        }
    }
}

/// The kernel reports a lost carrier at most once a second, unless something queries it. Without a
/// query the other end would learn it a second later in most rounds.
fn both_ends_hear_of_it_at_once(node: &TestNode) {
    const ROUNDS: usize = 10;
    /// Tolerance for a busy machine, larger for a single round.
    const MEDIAN_MAX: Duration = Duration::from_millis(200);
    const LAST_MAX: Duration = Duration::from_millis(900);
    let ends = ["r1:eth1", "h2:eth0"].map(|port| Carriers::of(node, port));
    let mut took = [Vec::new(), Vec::new()];
    for _ in 0..ROUNDS {
        for ((state, on), took) in [("down", false), ("up", true)].into_iter().zip(&mut took) {
            let since = Instant::now();
            node.pdp(&["link", state, "red/far"]);
            took.extend(ends.iter().map(|end| end.heard(on, since)).max());
        }
    }
    for (state, mut took) in ["down", "up"].into_iter().zip(took) {
        took.sort();
        let (median, last) = (took[ROUNDS / 2], took[ROUNDS - 1]);
        println!("link {state} is heard of at both ends: median {median:?}, last {last:?}");
        assert!(median < MEDIAN_MAX && last < LAST_MAX, "{took:?}");
    }
}

/// As if a device in between failed.
fn a_link_fails_in_silence(node: &TestNode) {
    let link = || {
        let links = node.json(&["inspect", "red"])["status"]["links"].clone();
        links.as_array().expect("links").iter().find(|link| link["name"] == "far").cloned()
    };
    node.pdp(&["link", "down", "red/far", "--silent"]);
    assert!(node.try_exec("red/h1", "ping -c1 -W1 10.0.2.2").is_err());
    assert!(carrier(node, "r1:eth1") && carrier(node, "h2:eth0"), "nobody sees it");
    let far = link().expect("far");
    assert!(far["up"] == false && far["silent"] == true && far["carrier"] == true, "{far}");
    assert!(node.pdp(&["inspect", "red"]).contains("set down, silently"));
    let table = node.pdp(&["stats", "red"]);
    let dropped = |line: &str| line.starts_with("red/r1:eth1 ") && line.contains("link-down");
    assert!(table.lines().any(dropped), "{table}");
    // Then with an explicit command.
    node.pdp(&["link", "down", "red/far"]);
    eventually("no carrier", || !carrier(node, "r1:eth1") && !carrier(node, "h2:eth0"));
    node.pdp(&["link", "up", "red/far"]);
    let far = link().expect("far");
    assert!(far["up"] == true && far["silent"].is_null() && far["message"].is_null(), "{far}");
    eventually("carrier is back", || carrier(node, "r1:eth1") && carrier(node, "h2:eth0"));
    eventually("h1 reaches h2 again", || node.try_exec("red/h1", "ping -c1 -W1 10.0.2.2").is_ok());
    let error = node.try_pdp(&["link", "up", "red/far", "--silent"]).expect_err("makes no sense");
    assert!(error.contains("only a link that is down can be silent"), "{error}");
}

#[test]
fn links_follow_commands_and_counters_add_up() {
    let node = up("links");
    both_ends_hear_of_it_at_once(&node);
    a_link_fails_in_silence(&node);
    let both = |on: bool| carrier(&node, "r1:eth1") == on && carrier(&node, "h2:eth0") == on;
    assert!(both(true));
    node.pdp(&["link", "down", "red/far"]);
    eventually("no carrier at either end", || both(false));
    assert!(carrier(&node, "r1:eth0"), "the other link is untouched");
    assert!(node.try_exec("red/h1", "ping -c1 -W1 10.0.2.2").is_err());
    let links = node.json(&["inspect", "red"])["status"]["links"].clone();
    let far = links.as_array().expect("links").iter().find(|link| link["name"] == "far");
    let far = far.expect("far");
    assert!(far["up"] == false && far["carrier"] == false, "{far}");
    // By one of its ports.
    node.pdp(&["link", "up", "red/r1:eth1"]);
    eventually("carrier is back at both ends", || both(true));
    eventually("h1 reaches h2 again", || node.try_exec("red/h1", "ping -c1 -W1 10.0.2.2").is_ok());

    // A link never exceeds its rate, and TCP works over it; each direction separately.
    for direction in [&[][..], &["--reverse"]] {
        let bytes = TRANSFER_BYTES.to_string();
        let client = ["exec", "red/h1", "--", "iperf3", "-J", "-c", "10.0.2.2", "-n", &bytes];
        let start = Instant::now();
        let report = node.pdp(&[&client, direction].concat());
        let seconds = start.elapsed().as_secs_f64();
        let report: Value = serde_json::from_str(&report).expect("JSON of iperf3");
        let carried = report["end"]["sum_received"]["bytes"].as_f64().expect("bytes");
        // Frames in flight at the end are not counted.
        assert!(carried > 0.0, "{report}");
        let bps = carried * 8.0 / seconds;
        assert!(bps <= RATE_BPS as f64, "{bps} bit/s {direction:?}");
    }

    // More than the link carries: counters add up at any moment, with drops.
    let flood = "import socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for _ in range(20000): s.sendto(bytes(1000), ('10.0.2.2', 9))";
    let mut flood = node.pdp_command(&["exec", "red/h1", "--", "python3", "-c", flood]);
    let flood = Background::start(&mut flood);
    let stats = |node: &TestNode| node.json(&["stats", "red"]);
    let port = |stats: &Value, node: &str, port: &str| {
        stats["vnets"]["red"]["nodes"][node]["ports"][port].clone()
    };
    eventually("the link's queue overflows", || {
        let now = stats(&node);
        assert_eq!(missing(&now), [], "{now}");
        port(&now, "r1", "eth1")["dropped"]["queue-full"].as_u64() > Some(0)
    });
    flood.finish();
    let idle = "nothing is in flight";
    eventually(idle, || {
        let now = stats(&node);
        assert_eq!(missing(&now), [], "{now}");
        let nodes = now["vnets"]["red"]["nodes"].as_object().expect("nodes").clone();
        nodes.values().all(|node| node["inFlight"] == 0)
    });
    // Frames sent by one end of a link are those received by the other. Frames that TAPs took or
    // refused (they are down briefly at the start) are those punted to them.
    eventually("both ends of the links agree", || {
        let now = stats(&node);
        let count = |of: &Value, name: &str| of[name].as_u64().expect("a counter");
        let ends = [("r1", "eth0", "h1", "eth0"), ("r1", "eth1", "h2", "eth0")];
        ends.iter().all(|(a, a_port, b, b_port)| {
            let (a, b) = (port(&now, a, a_port), port(&now, b, b_port));
            a["sent"] == b["received"]
                && b["sent"] == a["received"]
                && a["sentBytes"] == b["receivedBytes"]
                && count(&a, "punted")
                    == count(&a["tap"], "toTap") + count(&a["tap"], "toTapRefused")
        })
    });
    let before = port(&stats(&node), "r1", "eth0")["received"].as_u64().expect("a counter");
    node.exec("red/h1", "ping -c5 -i0.05 -w60 10.0.2.2");
    let after = port(&stats(&node), "r1", "eth0")["received"].as_u64().expect("a counter");
    assert!(after >= before + 5, "{before} to {after}");
    let table = node.pdp(&["stats", "red"]);
    assert!(table.contains("red/r1:eth1") && table.contains("queue-full"), "{table}");

    // Repeatedly.
    let watch = ["stats", "red", "--watch=0.2", "--format", "json"];
    let mut watch = Lines::of(&mut node.pdp_command(&watch));
    let samples =
        [(); 3].map(|()| -> Value { serde_json::from_str(&watch.next()).expect("JSON a line") });
    let times = samples.each_ref().map(|sample| sample["atNs"].as_u64().expect("a time"));
    assert!(times[0] < times[1] && times[1] < times[2], "{times:?}");
    assert!(samples[2]["rates"]["red/r1:eth0"]["receivedPps"].is_number());
    sh(&format!("kill -INT {}", watch.child.0.id()));
    assert!(watch.child.0.wait().expect("own child").success(), "an interrupt ends it well");
}

#[test]
fn spec_can_be_shown_checked_and_compared() {
    let node = up("shown");

    // The same twice, for programs that compare.
    eventually("everything runs", || {
        node.json(&["inspect", "red"])["status"]["phase"] == "running"
    });
    for verb in [&["get"][..], &["inspect", "red"], &["inspect", "substrate"]] {
        assert_eq!(node.json(verb), node.json(verb));
    }
    let vnets = node.json(&["get"]);
    let summary = ["name", "phase", "routers", "hosts", "links", "guests", "guestsConnected"]
        .map(|key| vnets[0][key].clone());
    let expected = serde_json::json!(["red", "running", 1, 2, 2, 1, 1]);
    assert_eq!(summary.as_slice(), expected.as_array().expect("a list").as_slice());
    let yaml = node.pdp(&["inspect", "red", "--format", "yaml"]);
    assert!(yaml.contains("kind: VirtualNetwork"), "{yaml}");

    // A dry run prints what an apply would do, and does nothing.
    let changed = SPEC.replace("power: 0.2", "power: 0.3").replace("10.0.1.2/24", "10.0.1.3/24");
    let file = node.directory.join("changed.yaml");
    fs::write(&file, &changed).expect("a spec");
    let path = file.to_str().expect("a path");
    let before = node.json(&["inspect", "red"]);
    let dry = node.json(&["apply", "--dry-run", "-f", path]);
    assert_eq!(node.json(&["inspect", "red"]), before);
    let changes: Vec<String> = dry["changes"]
        .as_array()
        .expect("changes")
        .iter()
        .map(|change| [&change["action"], &change["object"]].map(|v| v.as_str().expect("text")))
        .map(|words| words.join(" "))
        .collect();
    let expected = [
        "unchanged substrate/node",
        "change vnet/red",
        "restart vnet/red/node/h1",
        "change vnet/red/node/r1",
    ];
    assert_eq!(changes, expected, "{dry}");
    let done = node.json(&["apply", "-f", path]);
    assert_eq!(done["changes"], dry["changes"]);
    let again = node.json(&["apply", "--dry-run", "-f", path]);
    let again = again["changes"].as_array().expect("changes").clone();
    assert!(again.iter().all(|change| change["action"] == "unchanged"), "{again:?}");

    // An invalid file: location, problem, bound and remedy, by validate and by apply.
    let wrong = changed.replace("eth1: {addresses", "eth1: {mtu: 9000, addresses");
    let line = wrong.lines().position(|line| line.contains("9000")).expect("the line") + 1;
    fs::write(&file, &wrong).expect("a spec");
    let before = node.json(&["inspect", "red"]);
    for verb in [&["validate", path][..], &["apply", "-f", path]] {
        let mut command = node.pdp_command(verb);
        let output = pdp_e2e::run(&mut command, "");
        assert_eq!(output.status.code(), Some(1), "{verb:?}");
        let words = String::from_utf8_lossy(&output.stderr).into_owned();
        let where_ = format!("changed.yaml:{line}:");
        let parts =
            [&where_, "vport red/r1:eth1: mtu 9000 exceeds 1700", "help: set mtu to at most"];
        assert!(parts.iter().all(|part| words.contains(part)), "{words}");
    }
    assert_eq!(node.json(&["inspect", "red"]), before);
    fs::write(&file, &changed).expect("a spec");
    node.pdp(&["validate", path]);

    // Logs: the daemon's, a host's output, a forwarding guest's; the last line; new lines.
    assert!(node.pdp(&["logs"]).contains("is ready"));
    assert!(node.pdp(&["logs", "mux"]).contains("is connected"));
    assert!(node.pdp(&["logs", "red/h2"]).contains("h2 serves"));
    assert!(node.pdp(&["logs", "red/r1", "--guest", "0"]).contains("pdp-router started"));
    assert_eq!(node.pdp(&["logs", "red/h2", "--tail", "1"]).lines().count(), 1);
    let follow = ["logs", "red/h2", "--follow", "--tail", "1"];
    let follow = Lines::of(&mut node.pdp_command(&follow));
    follow.next();
    node.exec("red/h1", "iperf3 -c 10.0.2.2 -n 1000");
    while !follow.next().contains("Accepted") {}
    drop(follow);

    // Capabilities of this machine: it could do all of the above.
    let checks = node.json(&["doctor"]);
    let state = |name: &str| {
        let all = checks.as_array().expect("checks");
        all.iter().find(|check| check["name"] == name).map(|check| check["state"].clone())
    };
    for name in ["root", "kernel", "cgroups", "user namespaces", "seccomp", "TAP", "XDP", "AF_XDP"]
        .into_iter()
        .chain(["device files", "container", "kernel links"])
    {
        assert_eq!(state(name), Some("ok".into()), "{name}: {checks}");
    }
    // The doctor is most needed if no daemon can run.
    let no_daemon = ["--socket", "/nonexistent/pdpd.sock", "doctor", "--format", "json"];
    let output = run(Command::new(bin("pdp")).args(no_daemon), "");
    assert!(output.status.success(), "{output:?}");
    let alone: serde_json::Value = serde_json::from_slice(&output.stdout).expect("checks");
    let names = |checks: &serde_json::Value| -> Vec<String> {
        let checks = checks.as_array().expect("checks").iter();
        checks.map(|check| check["name"].as_str().expect("a name").to_owned()).collect()
    };
    let mut with_daemon = names(&checks);
    with_daemon.retain(|name| name != "left over");
    assert_eq!(names(&alone), with_daemon);

    // A missing program is reported like in a shell.
    for (program, code) in [("nosuch", 127), ("/etc/hosts", 126)] {
        let output = run(&mut node.pdp_command(&["exec", "red/h1", "--", program]), "");
        let words = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{words}");
        assert!(words.starts_with(&format!("error: red/h1: {program}: ")), "{words}");
    }

    // Completion works in a shell, and includes the daemon's names if it answers in time.
    let script = node.directory.join("completion");
    fs::write(&script, node.pdp(&["completion", "bash"])).expect("a script");
    let completed = |words: &str, word: &str| {
        let (programs, socket) = (bin("pdp"), node.socket());
        sh(&format!(
            "PATH={}:$PATH bash -c '. {}; COMP_WORDS=(pdp --socket {} {words}); \
             COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _clap_complete_pdp pdp {word}; echo ${{COMPREPLY[@]}}'",
            programs.parent().expect("a directory").display(),
            script.display(),
            socket.display(),
        ))
    };
    assert_eq!(completed("cap", "cap").trim(), "capture");
    eventually("a node is completed", || completed("exec red/h", "red/h").contains("red/h1"));
}

#[test]
fn shell_is_bash_if_the_node_has_it() {
    let node = TestNode::start("shell");
    node.apply(
        "{apiVersion: pdp/v1, kind: VirtualNetwork, metadata: {name: red}, \
         spec: {defaults: {kind: host}, nodes: {h1: {}, h2: {env: {PATH: /none}}}}}",
    );
    for (name, is_bash) in [("red/h1", true), ("red/h2", false)] {
        eventually("it runs", || node.try_pdp(&["exec", name, "/bin/true"]).is_ok());
        let output =
            run(&mut node.pdp_command(&["shell", name]), "echo version $BASH_VERSION.; exit\n");
        let output = String::from_utf8_lossy(&output.stdout).into_owned();
        // After the terminal's echo.
        let version = output.rsplit("version ").next().and_then(|version| version.lines().next());
        assert_eq!(version.map(|version| version != "."), Some(is_bash), "{name}: {output}");
    }
}

#[test]
fn files_can_be_copied_to_and_from_nodes() {
    let node = TestNode::start("files");
    node.apply(
        "{apiVersion: pdp/v1, kind: VirtualNetwork, metadata: {name: red}, spec: {nodes: {h1: {kind: host}}}}",
    );
    eventually("h1 runs", || node.try_exec("red/h1", "true").is_ok());
    let path = |name: &str| node.directory.join(name).display().to_string();
    let bytes: Vec<u8> =
        (0..3_000_001u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    fs::write(path("program"), &bytes).expect("a file");
    fs::set_permissions(path("program"), fs::Permissions::from_mode(0o750)).expect("its mode");
    node.pdp(&["cp", &path("program"), "red/h1:/tmp"]);
    assert_eq!(node.exec("red/h1", "stat -c %a:%u:%s /tmp/program").trim(), "750:0:3000001");
    node.pdp(&["cp", "red/h1:/tmp/program", &path("back")]);
    assert!(fs::read(path("back")).expect("a file") == bytes);
    assert_eq!(fs::metadata(path("back")).expect("a file").permissions().mode() & 0o777, 0o750);

    // A link in the node resolves only within the node, in both directions.
    fs::write(path("secret"), "of the machine").expect("a file");
    node.exec("red/h1", &format!("ln -s {} /tmp/link", path("secret")));
    let error = node.try_pdp(&["cp", "red/h1:/tmp/link", "-"]).expect_err("not in the node");
    assert!(error.contains("/tmp/link: no such file"), "{error}");
    let error = node.try_pdp(&["cp", &path("program"), "red/h1:/tmp/link"]).expect_err("the same");
    assert!(error.contains("/tmp/link: a dangling symbolic link"), "{error}");
    assert_eq!(fs::read_to_string(path("secret")).expect("a file"), "of the machine");

    // Lack of space is reported, and the existing file stays.
    let error =
        node.try_pdp(&["cp", "/dev/zero", "red/h1:/dev/shm/program"]).expect_err("no space");
    assert!(error.contains("red/h1: ") && error.contains("No space left on device"), "{error}");
    node.pdp(&["cp", "/etc/hostname", "red/h1:/dev/shm"]);
    assert_eq!(node.exec("red/h1", "ls -A /dev/shm").trim(), "hostname");
    let left = node.pdp(&["exec", "red/h1", "ls", "-A", "/tmp"]);
    assert!(left.contains("program\n") && !left.contains(".part"), "{left}");
}

/// h1 - r1 - h2: applies, runs commands in, restarts, exports and deletes some of them at a time.
#[test]
fn commands_can_select_some_nodes() {
    let node = TestNode::start("some");
    let file = node.directory.join("red.yaml").display().to_string();
    let host = "      kind: host\n";
    let labelled =
        "      kind: host\n      labels: {role: end}\n      files: {/etc/word: {content: old}}\n";
    fs::write(&file, SPEC.replace(host, labelled)).expect("a file");
    let printed = |what: &[&str], template: &str| {
        let template = format!("jsonpath={template}");
        node.pdp(&[what, &["red", "-o", &template]].concat()).trim().to_owned()
    };
    let names = |what: &str| printed(&["get", what], "{[*].name}");
    let pids = |name: &str| printed(&["get", "nodes"], &format!("{{[?@.name=='{name}']..pid}}"));
    let reaches = || {
        eventually("h1 reaches h2", || node.try_exec("red/h1", "ping -c1 -W1 10.0.2.2").is_ok());
    };

    // With the links whose ends exist; existing nodes are not touched.
    node.pdp(&["apply", &file, "--only", "r1,h1"]);
    assert_eq!((names("nodes"), names("links")), ("h1 r1".into(), "near".into()));
    let h1 = pids("h1");
    node.pdp(&["apply", &file, "--only", "h2"]);
    assert_eq!((names("nodes"), names("links")), ("h1 h2 r1".into(), "near far".into()));
    assert_eq!(pids("h1"), h1);
    reaches();
    let error = node.try_pdp(&["apply", &file, "--only", "h9"]).expect_err("no such node");
    assert!(
        error.contains("no node \"h9\" in the files") && error.contains("h1, h2, r1"),
        "{error}"
    );

    // A command in the nodes selected by labels; each line names its node.
    let mut lines: Vec<String> = node
        .pdp(&["exec", "red", "-l", "role=end", "cat", "/etc/word"])
        .lines()
        .map(str::to_owned)
        .collect();
    lines.sort();
    assert_eq!(lines, ["h1 | old", "h2 | old"]);

    // The export contains the existing nodes, with the current files in them.
    let exported = node.pdp(&["export", "red"]);
    assert!(node.apply(&exported).contains("0 changed"), "{exported}");
    node.pdp(&["exec", "red/h1", "sh", "-c", "echo new >/etc/word"]);
    let directory = node.directory.join("saved");
    let at = directory.to_str().expect("a path");
    node.pdp(&["export", "red", "--save", "-o", at]);
    let word =
        |name: &str| fs::read_to_string(directory.join(name).join("etc/word")).expect("a file");
    assert_eq!((word("h1"), word("h2")), ("new\n".into(), "old".into()));
    assert!(
        node.try_pdp(&["export", "red", "-o", at]).expect_err("there already").contains("--force")
    );
    let (h1, h2, r1) = (pids("h1"), pids("h2"), pids("r1"));
    node.pdp(&["apply", &format!("{at}/red.yaml")]);
    assert_eq!((pids("h2"), pids("r1")), (h2.clone(), r1.clone()));
    assert_ne!(pids("h1"), h1);
    assert_eq!(node.exec("red/h1", "cat /etc/word").trim(), "new");

    // A restart only affects the requested nodes, and counts as no failure.
    let restarts = || printed(&["get", "nodes"], "{[*].control.restarts}");
    let (h1, restarts_before) = (pids("h1"), restarts());
    node.exec("red/h1", "touch /tmp/made");
    node.pdp(&["restart", "red/h1"]);
    assert_ne!(pids("h1"), h1);
    assert!(node.try_exec("red/h1", "test -e /tmp/made").is_err());
    let guest = || printed(&["get", "nodes"], "{[?@.name=='r1'].guests[0].pid}");
    let control = || printed(&["get", "nodes"], "{[?@.name=='r1'].control.pid}");
    let (guest_before, control_before) = (guest(), control());
    node.pdp(&["restart", "red/r1", "--guest", "0"]);
    assert_eq!(control(), control_before);
    assert_ne!(guest(), guest_before);
    let guest_before = guest();
    node.pdp(&["restart", "red/r1"]);
    assert_ne!(control(), control_before);
    assert_eq!(guest(), guest_before);
    assert_eq!(restarts(), restarts_before);
    assert_eq!(pids("h2"), h2);
    reaches();

    node.pdp(&["delete", "red", "--only", "h2"]);
    assert_eq!((names("nodes"), names("links")), ("h1 r1".into(), "near".into()));
}

/// An unknown name does not prevent the deletion of others.
#[test]
fn delete_continues_past_unknown_names() {
    let node = TestNode::start("deletes");
    for name in ["one", "two"] {
        node.apply(&format!(
            "apiVersion: pdp/v1\nkind: VirtualNetwork\nmetadata: {{name: {name}}}\nspec: {{nodes: {{h: {{kind: host}}}}}}"
        ));
    }
    let error = node
        .try_pdp(&["delete", "one", "nosuch", "two", "neither"])
        .expect_err("two are not there");
    for name in ["nosuch", "neither"] {
        assert!(error.contains(&format!("no vnet {name:?}")), "{error}");
    }
    assert_eq!(node.json(&["get"]).as_array().map(Vec::len), Some(0));
}

/// If no container can be made, the reason is reported
/// once, and by the doctor before anything is applied.
#[test]
fn container_start_failure_is_reported_once() {
    let mut node = TestNode::prepare("broken");
    let runc = node.directory.join("runc");
    // Called like runc, with its log as fourth word.
    let script = r#"#!/bin/sh
case "$*" in
*' create '*) echo '{"level": "error", "msg": "no container can be made here"}' > "$4"; exit 1 ;;
esac
exec /usr/sbin/runc "$@"
"#;
    fs::write(&runc, script).expect("a script");
    fs::set_permissions(&runc, fs::Permissions::from_mode(0o755)).expect("its mode");
    let runc = runc.to_str().expect("a path");
    let line = format!("echo $$ >&2; exec {} --doctor --runc {runc}", bin("pdpd").display());
    let output = run(Command::new("sh").args(["-c", &line]), "");
    // And nothing else, such as messages of libraries.
    let pid: u32 = String::from_utf8_lossy(&output.stderr).trim().parse().expect("its pid");
    let checks: serde_json::Value = serde_json::from_slice(&output.stdout).expect("checks");
    let all = checks.as_array().expect("checks");
    let container = all.iter().find(|check| check["name"] == "container").expect("the check");
    assert_eq!(container["state"], "missing");
    let detail = container["detail"].as_str().expect("words");
    assert!(detail.contains("no container can be made here"), "{detail}");
    let places = "find /run /sys/fs/cgroup -maxdepth 2 -name";
    assert_eq!(sh(&format!("{places} 'pdp-doctor-{pid}-*'")), "", "it leaves nothing");

    node.pdpd_arguments(&["--runc", runc]);
    node.start_pdpd();
    let _ = node.try_apply(SPEC);
    eventually("it has failed", || node.json(&["get"])[0]["phase"] == "failed");
    let note = node.json(&["get"])[0]["message"].as_str().expect("a reason").to_owned();
    assert_eq!(note.matches("no container can be made here").count(), 1, "{note}");
    assert!(!note.contains("unseen") && !note.contains("guest red."), "{note}");
}
