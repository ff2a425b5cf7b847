//! One tenant exhausts all shared resources as far as possible; another continues.

use std::collections::BTreeSet;
use std::fs;
use std::process::Command;

use pdp_e2e::identity::PdpUser;
use pdp_e2e::specs::{SUBSTRATE, two_hosts};
use pdp_e2e::{Background, TestNode, eventually, kill};

/// Takes everything it can get from the API.
const EVIL: &str = include_str!("shared/evil.py");

const ADDRESS: (&str, &str) = ("127.0.0.1", "7443");

const TENANTS: &str = "
apiVersion: pdp/v1
kind: Tenant
metadata: {name: good}
spec: {quota: {power: 0.5}}
---
apiVersion: pdp/v1
kind: Tenant
metadata: {name: evil}
spec: {quota: {sessions: 4, audit: 10}}
";

/// Processes of a host of evil's with its helpers, and
/// the sessions and audit log rows of its quota.
const PROCESSES: usize = 64 + 32;
const SESSIONS: usize = 4;
const ROWS: usize = 10;

/// Requests of each kind that evil makes: more than its kept audit rows, and more than the margin
/// before the oldest are removed.
const REQUESTS: usize = ROWS + 1000 + 500;

/// Bytes of a process's log: docs/ARCHITECTURE.md, "Places".
const LOG_BYTES_MAX: u64 = 2 * (4 << 20);

/// Files that pdpd may open in addition to those of its
/// API: some for these networks, few for another.
const FILES: u64 = 60;

const EVILS: &str = r#"
apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {name: evil.lab}
spec:
  nodes:
    h1:
      kind: host
      interfaces: {eth0: {addresses: [10.1.0.1/24]}}
      resources: {cpu: 0.2, processes: 64}
    writes:
      kind: host
      interfaces: {eth0: {addresses: [10.1.0.2/24]}}
      resources: {cpu: 0.1}
      commands: [["yes", "it writes without end, and each line is long enough to matter"]]
  links:
    - endpoints: ["h1:eth0", "writes:eth0"]
"#;

/// Forks as much as it may. All its children ignore requests
/// to end, and have another parent and their own session.
const FORKS: &str = r#"
import os, signal, sys, time
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
while True:
    try:
        if os.fork() == 0:
            os.setsid()
            if os.fork():
                os._exit(0)
            os.execv("/bin/sleep", ["sleep", sys.argv[1]])
    except OSError:
        time.sleep(0.05)
"#;

/// Argument of sleep in the processes of [`FORKS`], to identify them.
const MARK: &str = "86461";

fn good(rate: usize) -> String {
    two_hosts("good.lab", "{power: 0.4, guests: 5}") + &format!("      rate: {rate}M\n")
}

struct Good<'a> {
    node: &'a TestNode,
    who: &'a PdpUser,
    /// Number of times it continued.
    times: usize,
    /// The tenant's requests in its audit log.
    rows: BTreeSet<u64>,
}

impl Good<'_> {
    fn pdp(&self, what: &str, arguments: &[&str], input: &str) -> String {
        let said = self.who.pdp(arguments, input);
        said.unwrap_or_else(|error| panic!("{what}, {arguments:?}: {error}"))
    }

    fn guest(&self, number: usize) -> Option<u32> {
        let nodes = self.who.json(&["inspect", "good.lab"])["status"]["nodes"].clone();
        let r1 = nodes.as_array()?.iter().find(|node| node["name"] == "r1")?.clone();
        u32::try_from(r1["guests"][number]["pid"].as_u64()?).ok()
    }

    /// Changes its network, runs a command in it, has a
    /// killed guest replaced, and reads its audit log.
    fn goes_on(&mut self, what: &str) {
        // Another guest each time: frequently killed ones restart later.
        let number = self.times;
        self.times += 1;
        let before = self.guest(number).unwrap_or_else(|| panic!("{what}: guest {number} runs"));
        kill(before);
        let rate = 100 + self.times;
        self.pdp(what, &["apply", "-f", "-"], &good(rate));
        let links = self.who.json(&["inspect", "good.lab"])["spec"]["links"].clone();
        assert_eq!(links[1]["rate"], 1_000_000 * rate, "{what}: {links}");
        let ping = ["exec", "-n", "good.lab/h1", "--", "ping", "-c1", "-W5", "10.2.0.2"];
        eventually(&format!("{what}: h1 reaches h2"), || self.who.pdp(&ping, "").is_ok());
        eventually(&format!("{what}: guest {number} is replaced"), || {
            self.guest(number).is_some_and(|pid| pid != before)
        });
        let rows = ids(&self.who.json(&["audit", "--limit", "10000"]));
        let lost: Vec<_> = self.rows.difference(&rows).collect();
        assert!(lost.is_empty() && rows.len() > self.rows.len(), "{what}: {lost:?} of {rows:?}");
        self.rows = rows;
        assert!(self.node.try_pdp(&["get"]).is_ok(), "{what}: nor are operators held up");
    }
}

fn ids(rows: &serde_json::Value) -> BTreeSet<u64> {
    let rows = rows.as_array().expect("rows").iter();
    rows.map(|row| row["id"].as_u64().expect("a number")).collect()
}

fn token(node: &TestNode, tenant: &str) -> (PdpUser, String) {
    let secret = node.pdp(&["token", "create", "--tenant", tenant, "--expires", "1h"]);
    let file = node.directory.join(format!("{tenant}.token"));
    fs::write(&file, &secret).expect("token");
    let (address, port) = ADDRESS;
    (PdpUser::token(node, &format!("{address}:{port}"), &file), secret.trim().to_owned())
}

/// Runs [`EVIL`] in the node's network, and returns its output.
fn start(
    node: &TestNode,
    token: &str,
    words: &[&str],
) -> (Background, impl Fn() -> String + use<>) {
    let path = node.directory.join(format!("evil-{}", words[0]));
    let mut command = Command::new("nsenter");
    command
        .arg(format!("--net=/run/netns/{}", node.netns))
        .args(["sh", "-c", "exec python3 -c \"$@\" > \"$0\" 2>&1"])
        .arg(&path)
        .args([EVIL, ADDRESS.0, ADDRESS.1, token])
        .args(words);
    (Background::start(&mut command), move || fs::read_to_string(&path).unwrap_or_default())
}

/// Number of processes of the node with [`MARK`] in their command line.
fn marked(node: &TestNode) -> usize {
    node.processes().iter().filter(|process| process.line.contains(MARK)).count()
}

/// Bytes of the logs of evil's writing host, and true if an older half exists.
fn logs(node: &TestNode) -> (u64, bool) {
    let directory = fs::read_dir(node.directory.join("state/logs")).expect("logs");
    let mut logs = (0, false);
    for log in directory.flatten() {
        let name = log.file_name().to_string_lossy().into_owned();
        if name.starts_with("evil_lab.writes.") && !name.contains("tap") {
            logs.0 += log.metadata().map_or(0, |meta| meta.len());
            logs.1 |= name.ends_with(".1");
        }
    }
    logs
}

#[test]
fn no_tenant_exhausts_shared_resources() {
    let mut node = TestNode::prepare("shared");
    let (address, port) = ADDRESS;
    node.pdpd_arguments(&["--listen", &format!("{address}:{port}")]);

    // Too few descriptors are reported, with the missing number.
    node.pdpd_wrapper(&["prlimit", "--nofile=100:100"]);
    let refused = node.try_start_pdpd().expect_err("too few");
    assert!(refused.contains("100 open files are too few: pdpd keeps "), "{refused}");
    let kept = refused.split("pdpd keeps ").nth(1).and_then(|rest| rest.split(' ').next());
    let kept: u64 = kept.and_then(|kept| kept.parse().ok()).expect("a number");
    let limit = kept + FILES;
    node.pdpd_wrapper(&["prlimit", &format!("--nofile={limit}:{limit}")]);
    node.start_pdpd();

    node.apply(&format!("{SUBSTRATE}---{TENANTS}"));
    let (who, _) = token(&node, "good");
    let (evil, secret) = token(&node, "evil");
    evil.pdp(&["apply", "-f", "-"], EVILS).expect("its own");
    who.pdp(&["apply", "-f", "-"], &good(100)).expect("its own");
    let mut good = Good { node: &node, who: &who, times: 0, rows: BTreeSet::new() };

    // Its logs are written all the time.
    eventually("an older half of the log is begun", || logs(&node).1);
    let bounded = || assert!(logs(&node).0 <= LOG_BYTES_MAX, "{:?}", logs(&node));
    bounded();

    // Requests and connections.
    let (holding, said) = start(&node, &secret, &["hold"]);
    for what in ["body: HTTP/1.1 429", "stream: HTTP/1.1 429", "head: closed"] {
        eventually(&format!("all places are taken: {what}"), || said().contains(what));
    }
    good.goes_on("evil holds all places that it gets");
    bounded();
    drop(holding);

    // Sessions: the most allowed, each with the most processes allowed.
    let fork = ["exec", "-n", "evil.lab/h1", "--", "python3", "-c", FORKS, MARK];
    let mut sessions = Vec::new();
    eventually("it has all sessions", || {
        // Places of earlier streams return once their connections have ended.
        sessions.retain_mut(Background::runs);
        while sessions.len() < SESSIONS {
            sessions.push(Background::start(&mut evil.command(&fork)));
        }
        let refused = evil.pdp(&["exec", "-n", "evil.lab/h1", "--", "true"], "");
        refused.is_err_and(|words| words.contains(&format!("{SESSIONS} sessions")))
    });
    eventually("they fork", || marked(&node) > PROCESSES / 2);
    good.goes_on("evil forks");
    // In addition to the requesting processes and those that serve them.
    assert!(marked(&node) <= PROCESSES + 4 * SESSIONS, "{}", marked(&node));
    drop(sessions);
    eventually("all of the sessions has ended", || marked(&node) == 0);
    evil.pdp(&["exec", "-n", "evil.lab/h1", "--", "true"], "").expect("it has room again");

    // Rows of the audit log.
    let (asking, said) = start(&node, &secret, &["audit", &REQUESTS.to_string()]);
    good.goes_on("evil asks without end");
    // Each is reported once the previous kind is done: some thousand disk writes.
    for what in ["GET: 200", "DELETE: 404", "PUT: 200", "all asked"] {
        eventually(&format!("it has asked: {what}"), || said().contains(what));
    }
    drop(asking);
    let rows = ids(&evil.json(&["audit", "--limit", "10000"])).len();
    assert!(rows <= 3 * (REQUESTS - 500), "{rows} rows are kept of {REQUESTS} of each sort");
    good.goes_on("evil has asked");

    // Descriptors.
    let interfaces: String = (0..FILES).map(|n| format!("eth{n}: {{}}, ")).collect();
    let wide = |name: &str| {
        format!(
            "{{apiVersion: pdp/v1, kind: VirtualNetwork, metadata: {{name: {name}}}, \
              spec: {{nodes: {{h1: {{kind: host, interfaces: {{{interfaces}}}}}}}}}}}"
        )
    };
    let refused = node.try_apply(&wide("wide")).expect_err("too many");
    for said in ["descriptors", &format!("may open {limit}"), &format!("keeps {kept}")] {
        assert!(refused.contains(said), "{said}: {refused}");
    }
    let refused = evil.pdp(&["apply", "-f", "-"], &wide("evil.wide")).expect_err("too many");
    assert!(refused.contains("can't take so many interfaces and processes"), "{refused}");
    good.goes_on("a network for which there are too few descriptors was refused");
    bounded();

    node.pdp(&["down", "--purge"]);
    node.wait_pdpd();
    assert_eq!(node.leftovers(), [""; 0]);
}

/// One tenant starts all captures and traces that it
/// can: another tenant's and an operator's continue.
#[test]
fn tenant_cannot_take_all_captures_and_traces() {
    let mut node = TestNode::prepare("captures");
    let (address, port) = ADDRESS;
    node.pdpd_arguments(&["--listen", &format!("{address}:{port}")]);
    node.start_pdpd();
    let tenants = TENANTS.replace("sessions: 4", "sessions: 40");
    node.apply(&format!("{SUBSTRATE}---{tenants}"));
    let (good, _) = token(&node, "good");
    let (evil, _) = token(&node, "evil");
    for (name, who) in [("evil", &evil), ("good", &good)] {
        let two = two_hosts(&format!("{name}.lab"), "{power: 0.1}");
        who.pdp(&["apply", "-f", "-"], &two).expect("its own");
    }
    let capture = ["capture", "evil.lab/h1:eth0", "-w", "/dev/null"];
    // One at each port: a second one there would replace the first.
    let trace = |port: &'static str| ["trace", port, "-f", "ip proto 253", "--wait", "60"];
    // Fewer than its request limit, so that no other limit applies.
    let start = |words: &[&str]| Background::start(&mut evil.command(words));
    let mut held: Vec<Background> = (0..6).map(|_| start(&capture)).collect();
    let ports = ["evil.lab/r1:eth0", "evil.lab/r1:eth1", "evil.lab/h1:eth0"];
    held.extend(ports.map(|port| start(&trace(port))));
    eventually("what is beyond its share has ended", || {
        held.iter_mut().map(|it| usize::from(it.runs())).sum::<usize>() == 4 + ports.len()
    });
    let refused = evil.pdp(&capture, "").expect_err("no fifth capture");
    assert!(
        refused.contains("a tenant: the limit of 4 captures at a time is reached"),
        "{refused}"
    );
    let refused = evil.pdp(&trace("evil.lab/h2:eth0"), "").expect_err("no fourth trace");
    assert!(refused.contains("a tenant: the limit of 3 traces at a time is reached"), "{refused}");
    let pings = &["exec", "-n", "good.lab/h1", "--", "ping", "-c300", "-i0.1", "10.2.0.2"];
    let _pings = Background::start(&mut good.command(pings));
    let captured = ["capture", "good.lab/h1:eth0", "-c", "1", "-w", "/dev/null"];
    let traced = ["trace", "good.lab/r1:eth0", "-f", "icmp", "--wait", "10"];
    for arguments in [&captured[..], &traced] {
        good.pdp(arguments, "").unwrap_or_else(|error| panic!("another tenant: {error}"));
        node.try_pdp(arguments).unwrap_or_else(|error| panic!("an operator: {error}"));
    }
}
