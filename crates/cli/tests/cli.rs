//! The command, run as users run it, against fixed answers in front of a real node.

mod fake;

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use fake::Server;
use fake::node::{PCAP, eventually, processes_with};
use nix::pty::openpty;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

fn pdp(socket: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pdp"));
    command
        .env("NO_COLOR", "1")
        .env_remove("PDP_DAEMON")
        .env("PDP_SOCKET", socket)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

fn run(server: &Server, arguments: &[&str]) -> Output {
    pdp(&server.socket()).args(arguments).output().unwrap()
}

/// Runs the command, which must succeed. Returns its standard output.
#[track_caller]
fn out(server: &Server, arguments: &[&str]) -> String {
    let output = run(server, arguments);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {}: {error}", output.status);
    String::from_utf8(output.stdout).unwrap()
}

/// Runs the command, which must fail. Returns its exit code and standard error.
#[track_caller]
fn fails(server: &Server, arguments: &[&str]) -> (i32, String) {
    let output = run(server, arguments);
    assert!(!output.status.success(), "{arguments:?} succeeds");
    (output.status.code().unwrap(), String::from_utf8(output.stderr).unwrap())
}

#[track_caller]
fn assert_text(text: &str, golden: &str) {
    assert!(text == golden, "is:\n{text}\nis to be:\n{golden}");
}

#[test]
fn vnets_are_listed() {
    let server = Server::start();
    assert_text(
        &out(&server, &["get"]),
        "\
VNET  STATE     READY  ROUTERS  HOSTS  LINKS  GUESTS  POWER  FES      NOTE
blue  stopped   no     0        0      0      0/0     0      -        waits for r1 ospfd
red   degraded  no     1        1      1      1/2     0.5    fe1,fe2  1 of 2 nodes is degraded; r1: nft chain inet filter forward: the kernel forwards
",
    );
    let one: Value =
        serde_json::from_str(&out(&server, &["get", "red", "--format", "json"])).unwrap();
    assert_eq!(one.as_array().unwrap().len(), 1);
    assert_eq!(one[0]["guestsConnected"], 1);
    let yaml = out(&server, &["get", "blue", "--format", "yaml"]);
    assert!(yaml.contains("name: blue\n"), "{yaml}");
    let (code, error) = fails(&server, &["get", "green"]);
    assert_eq!((code, error.as_str()), (1, "error: no vnet green; `pdp get` lists them\n"));
}

#[test]
fn a_vnet_is_shown_with_all_that_it_has() {
    let server = Server::start();
    assert_text(
        &out(&server, &["inspect", "red"]),
        "\
red: degraded (1 of 2 nodes is degraded)

Conditions
r1: nft chain inet filter forward: the kernel forwards

Nodes
NODE  KIND    PLANE     STATE     READY  POWER  NOTE
r1    router  parallel  degraded  no     0.5    g1 is not connected
h1    host    -         running   yes    -

Commands
NODE  COMMAND  STATE       RESTARTS  EXIT  NOTE
r1    zebra    restarting  3         1     ended with code 1: no such interface (started 4 times)

Processes
NODE  PROCESS  STATE    PID  RESTARTS  FE        CONNECTED  NOTE
r1    control  running  100  0         -         -
r1    tap      running  101  0         -         -
r1    mirror   running  102  0         -         -
r1    g0       running  200  0         fe1 0.25  yes
r1    g1       running  201  1         fe2 0.25  no
h1    control  running  110  0         -         -
h1    tap      running  111  0         -         -

Ports (addresses as in the spec)
PORT     ADDRESSES    MAC                MTU   CARRIER  LINK
r1:eth0  10.0.0.1/24  02:00:00:00:00:01  1500  yes      r1-h1
r1:lo    1.1.1.1/32   -                  -     -        -
h1:eth0  10.0.0.2/24  02:00:00:00:00:02  1500  yes      r1-h1

Links
LINK   ENDS                 PATH  SET  CARRIER  RATE      NOTE
r1-h1  r1:eth0 <-> h1:eth0  mux   up   yes      10Mbit/s  delay 20ms; schedule: 1 of 3 at 12.3 s, next at 60.0 s; through the mux: h1 is a host

Queues
END      QUEUE  WEIGHT  FRAMES  BYTES  BUFFERS  DSCP
r1:eth0  voice  30      64      -      16       46,44
",
    );
    let links = out(&server, &["get", "links"]);
    assert!(
        links.starts_with("LINK       ENDS") && links.contains("\nred/r1-h1  r1:eth0"),
        "{links}"
    );
    let links = out(&server, &["get", "links", "red", "--format", "json"]);
    let links: Value = serde_json::from_str(&links).unwrap();
    assert_eq!((&links[0]["vnet"], &links[0]["name"]), (&"red".into(), &"r1-h1".into()));
    assert!(fails(&server, &["get", "links", "green"]).1.contains("no vnet green"));
    let whole: Value =
        serde_json::from_str(&out(&server, &["inspect", "red", "--format", "json"])).unwrap();
    assert_eq!(whole["kind"], "VirtualNetwork");
    assert_eq!(whole["metadata"]["name"], "red");
    assert_eq!(whole["status"]["nodes"][0]["guests"][1]["pid"], 201);
    assert_eq!(whole["status"]["links"][0]["queues"][0]["buffers"], 16);
    assert!(out(&server, &["inspect", "red/r1"]).ends_with("16       46,44\n"));
    let node = out(&server, &["inspect", "red/h1"]);
    assert!(node.contains("h1    host  -      running") && !node.contains("r1:"), "{node}");
    assert!(fails(&server, &["inspect", "red/r9"]).1.contains("no node r9 in vnet red"));
}

#[test]
fn nodes_are_listed_and_selected_by_their_labels() {
    let server = Server::start();
    assert_text(
        &out(&server, &["get", "nodes", "red"]),
        "\
NODE    KIND    PLANE     STATE     READY  POWER  RESTARTS  NOTE
red/r1  router  parallel  degraded  no     0.5    3         g1 is not connected; r1: nft chain inet filter forward: the kernel forwards
red/h1  host    -         running   yes    -      0
",
    );
    assert_text(
        &out(&server, &["get", "nodes", "red", "-l", "role notin (edge)", "-o", "wide"]),
        "\
NODE    KIND  PLANE  STATE    READY  POWER  RESTARTS  PID  ADDRESSES    PUBLISHED  LABELS  NOTE
red/h1  host  -      running  yes    -      0         110  10.0.0.2/24  -          -
",
    );
    let edge = ["get", "node", "red", "-l", "role=edge"];
    let json: Value =
        serde_json::from_str(&out(&server, &[&edge[..], &["-o", "json"]].concat())).unwrap();
    assert_eq!((&json[0]["vnet"], &json[0]["labels"]["role"]), (&"red".into(), &"edge".into()));
    let wide = out(&server, &[&edge[..], &["-o", "wide"]].concat());
    assert!(wide.contains("8080:80,192.0.2.1:53:53/udp  role=edge"), "{wide}");
    assert_eq!(json.as_array().unwrap().len(), 1);
    let template = r#"jsonpath={[*].name} is {[*].control.pid}{"\n"}."#;
    assert_eq!(out(&server, &[&edge[..], &["-o", template]].concat()), "r1 is 100\n.\n");
    assert_eq!(out(&server, &["get", "nodes", "red", "-l", "none"]), "no nodes match none\n");
    assert!(out(&server, &["get", "nodes", "red", "-o", "yaml"]).contains("- vnet: red\n"));
    let (code, error) = fails(&server, &["get", "red", "-l", "role=edge"]);
    assert!(code == 2 && error.contains("pdp get nodes -l"), "{error}");
    assert_eq!(fails(&server, &["get", "nodes", "-l", "a>1"]).0, 2);
    assert_eq!(fails(&server, &["get", "nodes", "-o", "jsonpath={"]).0, 2);
    assert!(fails(&server, &["get", "nodes", "green"]).1.contains("no vnet green"));
}

#[test]
fn externals_and_the_substrate_are_listed() {
    let server = Server::start();
    assert_text(
        &out(&server, &["get", "externals", "red"]),
        "\
EXTERNAL  BY         LINK  CARRIER  NOTE
red/to-x  A (vxlan)  -     -
",
    );
    assert_eq!(out(&server, &["get", "substrate"]), out(&server, &["inspect", "substrate"]));
    assert_eq!(fails(&server, &["get", "substrate", "red"]).0, 2);
    assert_eq!(out(&server, &["get", "vnets"]), out(&server, &["get"]));
    assert_eq!(out(&server, &["inspect", "red/r1", "-o", "jsonpath=.ports[0].name"]), "eth0\n");
    let path = "jsonpath={.kind} {.status.phase}";
    assert_eq!(out(&server, &["inspect", "red", "-o", path]), "VirtualNetwork degraded\n");
}

#[test]
fn exec_in_several_nodes_returns_the_worst_code() {
    let server = Server::start();
    let script =
        ["sh", "-c", "echo $PDP_NODE; cat; [ $PDP_NODE = r1 ] || { echo bad >&2; exit 7; }"];
    let on = |choice: &[&str]| run(&server, &[&["exec"], choice, &script].concat());
    let output = on(&["red", "--all"]);
    let text = |bytes: &[u8]| {
        let mut lines: Vec<_> = String::from_utf8_lossy(bytes).lines().map(str::to_owned).collect();
        lines.sort();
        lines.join("\n")
    };
    assert_eq!(output.status.code(), Some(7));
    assert_eq!(text(&output.stdout), "h1 | h1\nr1 | r1");
    assert_eq!(text(&output.stderr), "h1 | bad");
    let output = on(&["red", "-l", "role=edge"]);
    assert_eq!((output.status.code(), text(&output.stdout)), (Some(0), "r1 | r1".to_owned()));
    let output = on(&["red/h1,r1,h1"]);
    assert_eq!(
        (output.status.code(), text(&output.stdout)),
        (Some(7), "h1 | h1\nr1 | r1".to_owned())
    );
    let (code, error) = fails(&server, &["exec", "red", "true"]);
    assert_eq!(code, 2);
    assert_eq!(
        error,
        "error: red is a vnet: name a node, red/NODE, or choose some with -l or --all\n"
    );
    let (code, error) = fails(&server, &["exec", "red", "-l", "role=none", "true"]);
    assert!(code == 1 && error.contains("no node of red matches role=none"), "{error}");
    assert_eq!(fails(&server, &["exec", "red/r1", "--all", "true"]).0, 2);
    assert_eq!(fails(&server, &["exec", "red", "--all", "-t", "true"]).0, 2);
    assert_eq!(fails(&server, &["exec", "red", "--all", "-i", "true"]).0, 2);
    let (code, error) = fails(&server, &["exec", "green/a,b", "true"]);
    assert!(code == 1 && error.contains("a | error: no vnet \"green\""), "{error}");
}

#[test]
fn node_output_is_ordered_until_one_node_stalls() {
    let server = Server::start();
    let first_waits = |seconds: &str| {
        let script = format!("[ $PDP_NODE = r1 ] || sleep {seconds}; echo 1; echo 2");
        out(&server, &["exec", "red/h1,r1", "--", "sh", "-c", &script])
    };
    assert_text(&first_waits("0.3"), "h1 | 1\nh1 | 2\nr1 | 1\nr1 | 2\n");
    assert_text(&first_waits("3"), "r1 | 1\nr1 | 2\nh1 | 1\nh1 | 2\n");
}

#[test]
fn nodes_are_restarted() {
    let server = Server::start();
    let text = out(&server, &["restart", "red/r1"]);
    assert!(text.contains("vnet/red/node/r1  restart") && text.contains("\n1 changed"), "{text}");
    out(&server, &["restart", "red", "-l", "!role"]);
    out(&server, &["restart", "red/r1,h1", "--guest", "1"]);
    for done in ["restarted red/r1", "restarted red/h1", "restarted red/r1,h1 g1"] {
        assert!(server.fake.noted(done), "{done}");
    }
    assert_eq!(fails(&server, &["restart", "red"]).0, 2);
    assert_eq!(fails(&server, &["restart", "green/r1"]).0, 1);
}

#[test]
fn the_substrate_is_shown() {
    let server = Server::start();
    assert_text(
        &out(&server, &["inspect", "substrate"]),
        "\
substrate: running
mux: running, pid 50, 0 restarts
fast paths: 0.2 of 0.5 guaranteed

Forwarding engines
FE   CPUS  CAPACITY  USED  GUESTS
fe1  0-1   1         0.25  red/r1:g0 0.25

External interfaces
EXTERNAL  DEVICE  MTU  ATTACHED  CARRIER  NOTE
A         veth-a  -    no        -        no such device
",
    );
}

#[test]
fn counters_and_rates_are_shown() {
    let server = Server::start();
    assert_text(
        &out(&server, &["stats"]),
        "\
PORT         RECEIVED  MADE  SENT  PUNTED  DROPPED
red/r1:eth0  5000      2     4990  7       5

Nodes
NODE    IN FLIGHT  IPv4 ROUTES  IPv6 ROUTES  NEIGHBOURS  RESYNCS
red/r1  3          12           4            0           0

Forwarding guests
GUEST      FE   CONNECTED  TO GUEST  FROM GUEST  COMPLETED  IN FLIGHT  FAULTS  LAST FAULT
red/r1:g0  fe1  yes        5000      4995        5000       0          0

Drops
PORT         REASON          DROPPED
red/r1:eth0  guest-no-route  5

External interfaces
EXTERNAL  RECEIVED  SENT  DROPPED  DROPPED BY KERNEL  NUMBERED  LATE
A         9         0     0        0                  0         0
",
    );
    let sample: Value =
        serde_json::from_str(&out(&server, &["stats", "red", "--rates", "--format", "json"]))
            .unwrap();
    assert_eq!(sample["rates"]["red/r1:eth0"]["receivedPps"], 1000.0);
    assert_eq!(sample["rates"]["red/r1:eth0"]["sentBps"], 512_000.0);
    assert_eq!(sample["vnets"]["red"]["nodes"]["r1"]["inFlight"], 3);
    assert_eq!(fails(&server, &["stats", "none"]).0, 1);
    let cycles = out(&server, &["stats", "--cycles"]);
    let row = |line: &str| line.split_whitespace().map(String::from).collect::<Vec<_>>();
    let rows: Vec<Vec<String>> = cycles.lines().map(row).collect();
    assert_eq!(rows[1], ["0", "arrive", "1000", "300.0", "30.0", "%"]);
    assert_eq!(rows[2], ["0", "idle", "0", "-", "70.0", "%"]);
    let json: serde_json::Value =
        serde_json::from_str(&out(&server, &["stats", "--cycles", "--format", "json"])).unwrap();
    assert_eq!(json["workers"][0]["stages"][0]["cyclesPerFrame"], 300.0);
}

#[test]
fn watched_counters_stream_until_interrupted() {
    let server = Server::start();
    let mut child =
        pdp(&server.socket()).args(["stats", "--watch=0.1", "--format", "json"]).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    for _ in 0..3 {
        let sample: Value = serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap();
        assert_eq!(sample["rates"]["red/r1:eth0"]["receivedPps"], 1000.0);
    }
    kill(Pid::from_raw(child.id() as i32), Signal::SIGINT).unwrap();
    assert!(child.wait().unwrap().success());
}

#[test]
fn routes_are_shown_and_compared() {
    let server = Server::start();
    let within = ["routes", "red/r1", "--within", "10.0.0.0/8"];
    assert_text(
        &out(&server, &within),
        "10.0.0.0/8 nexthop via 10.0.0.2 dev eth0 weight 1 nexthop dev eth1 weight 1\n",
    );
    let json = out(&server, &[&within[..], &["--format", "json"]].concat());
    let rows: Value = serde_json::from_str(&json).unwrap();
    assert_eq!(rows[0]["kernel"]["hops"][1]["port"], "eth1");
    assert_text(&out(&server, &["routes", "red/r1", "--diff", "--guest", "0"]), "");
    // Guest 1 differs.
    let output = run(&server, &["routes", "red/r1", "--diff"]);
    assert_eq!(output.status.code(), Some(1));
    assert_text(
        &String::from_utf8(output.stdout).unwrap(),
        "\
- kernel 10.9.0.0/16 via 10.0.0.2 dev eth0
+ g1 10.9.0.0/16 blackhole
- kernel 2001:db8::/32 punt
",
    );
    let equal = out(&server, &["routes", "red/r1", "--diff", "--guest", "0", "--format", "json"]);
    assert_eq!(serde_json::from_str::<Value>(&equal).unwrap(), serde_json::json!([]));
    let broken = run(&server, &["routes", "red/breaks"]);
    assert_eq!(broken.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&broken.stderr).contains("mirror of red/breaks: gone"));
}

#[test]
fn closed_output_pipe_ends_the_command_silently() {
    let server = Server::start();
    let mut child = pdp(&server.socket()).args(["routes", "red/r1"]).spawn().unwrap();
    let mut first = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut first).unwrap();
    assert_eq!(first, "10.0.0.0/28 via 10.0.0.2 dev eth0\n");
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
}

const VNET: &str = "\
apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {name: green}
spec:
  nodes:
    h1: {kind: host}
";

#[test]
fn files_directories_and_standard_input_are_applied() {
    let server = Server::start();
    let dir = server.path("specs");
    fs::create_dir(&dir).unwrap();
    fs::write(dir.join("b.yaml"), VNET.replace("green", "b")).unwrap();
    fs::write(dir.join("a.yml"), VNET.replace("green", "a")).unwrap();
    fs::write(dir.join("notes.txt"), "not a spec").unwrap();
    let one = server.path("one.yaml");
    fs::write(&one, VNET).unwrap();
    let mut child = pdp(&server.socket())
        .args(["apply", "-f"])
        .arg(&one)
        .arg("-f")
        .arg(&dir)
        .args(["-f", "-"])
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(VNET.replace("green", "piped").as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_text(
        &String::from_utf8(output.stdout).unwrap(),
        "\
OBJECT      ACTION  DETAIL
vnet/green  create  new
vnet/a      create  new
vnet/b      create  new
vnet/piped  create  new
4 changed, 1 unchanged
",
    );
    assert!(server.fake.noted("applied piped"));
    let one = one.to_str().unwrap();
    for files in [&[one, dir.to_str().unwrap()][..], &[one, "-f", dir.to_str().unwrap()]] {
        for verb in ["apply", "up"] {
            let table = out(&server, &[&[verb], files].concat());
            let all = ["green", "a", "b"].map(|name| format!("\nvnet/{name} "));
            assert!(all.iter().all(|line| table.contains(line)), "{table}");
        }
    }
    let dry = out(&server, &["apply", "--dry-run", "-f", one]);
    assert!(dry.ends_with("1 would change, 1 unchanged\n"), "{dry}");
    let (code, error) = fails(&server, &["apply", "-f", "/no/such.yaml"]);
    assert_eq!(code, 1);
    assert!(error.contains("/no/such.yaml: No such file"), "{error}");
}

#[test]
fn apply_sends_files_named_by_the_spec() {
    let server = Server::start();
    let named = VNET.replace(
        "{kind: host}",
        "{kind: host, files: {/etc/motd: {from: sub/motd}}, commands: [/bin/true]}",
    );
    let path = server.path("named.yaml");
    fs::write(&path, named).unwrap();
    let (code, error) = fails(&server, &["apply", "-f", path.to_str().unwrap()]);
    assert_eq!(code, 1);
    assert!(error.contains("sub/motd"), "{error}");
    fs::create_dir(server.path("sub")).unwrap();
    fs::write(server.path("sub/motd"), "hello").unwrap();
    out(&server, &["apply", "-f", path.to_str().unwrap()]);
    assert!(server.fake.noted("applied green"));
}

/// A spec can't read files of the user who applies it, by whatever path.
#[test]
fn files_outside_spec_directory_need_explicit_permission() {
    let server = Server::start();
    let secret = server.path("secret");
    fs::write(&secret, "of the machine").unwrap();
    let specs = server.path("specs");
    fs::create_dir(&specs).unwrap();
    fs::write(specs.join("inside"), "its own").unwrap();
    std::os::unix::fs::symlink(&secret, specs.join("link")).unwrap();
    let path = specs.join("named.yaml");
    let named = |from: &str| {
        let node = format!("{{kind: host, files: {{/etc/motd: {{from: {from}}}}}}}");
        fs::write(&path, VNET.replace("{kind: host}", &node)).unwrap();
    };
    for from in ["../secret", secret.to_str().unwrap(), "link", "../specs/../secret"] {
        named(from);
        for verb in ["apply", "validate", "up"] {
            let (code, error) = fails(&server, &[verb, "-f", path.to_str().unwrap()]);
            assert_eq!(code, 1, "{verb} {from}");
            assert!(error.contains("--allow-files-outside"), "{verb} {from}: {error}");
        }
        assert!(!server.fake.noted("applied green"), "{from}");
        out(&server, &["validate", "--allow-files-outside", path.to_str().unwrap()]);
    }
    out(&server, &["apply", "--allow-files-outside", "-f", path.to_str().unwrap()]);
    named("../specs/inside");
    out(&server, &["apply", "-f", path.to_str().unwrap()]);
}

/// The output of inspect can be applied again.
#[test]
fn inspect_output_can_be_applied_again() {
    let server = Server::start();
    for (name, format) in [("red", "yaml"), ("red", "json"), ("tenant/acme", "yaml")] {
        let text = out(&server, &["inspect", name, "--format", format]);
        let file =
            pdp_spec::SourceFile { name: "x".into(), text: text.clone(), ..Default::default() };
        let documents = pdp_spec::parse(&[file]);
        let documents = documents.unwrap_or_else(|faults| panic!("{faults:?}: {text}"));
        assert_eq!(documents.len(), 1);
        assert!(text.contains("status"), "{text}");
    }
}

#[test]
fn a_wrong_spec_is_shown_with_file_line_and_mark() {
    let server = Server::start();
    let path = server.path("wrong.yaml");
    fs::write(&path, VNET.replace("kind: host}", "kind: hots}")).unwrap();
    for verb in ["apply", "validate", "up"] {
        let (code, error) = fails(&server, &[verb, "-f", path.to_str().unwrap()]);
        assert_eq!(code, 1, "{verb}");
        assert!(error.contains("wrong.yaml:6"), "{verb}: {error}");
        assert!(error.contains("h1: {kind: hots}"), "{verb}: {error}");
        assert!(error.contains("nothing was changed"), "{verb}: {error}");
    }
    assert!(!server.fake.noted("applied green"));
}

#[test]
fn valid_files_need_no_daemon() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("good.yaml");
    fs::write(&path, VNET).unwrap();
    let socket = dir.path().join("none.sock");
    let output = pdp(&socket).arg("validate").arg(&path).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stdout).starts_with("1 object is valid"));
    // Errors in the files are still found. An empty file is an error too.
    let wrong = VNET.to_owned()
        + "    h2: {kind: host, interfaces: {eth0: {addresses: [10.0.0.2/24], gateways: [10.9.0.1]}}}
    h_3: {kind: host, interfaces: {eth0: {addresses: [10.1.0.2/24]}, a-name-of-21-letters0: {}}}
    h4: {kind: host, interfaces: {eth0: {addresses: [10.0.0.2/24]}, eth1: {}}}
    h5: {kind: host, files: {/say.py: {content: x}}, image: {rootfs: /}}
  links:
    - endpoints: [\"h2:eth0\", \"h_3:eth0\"]
    - endpoints: [\"h2:eth0\", \"h4:eth0\"]
    - endpoints: [\"h9:eth0\", \"h4:eth7\"]
";
    fs::write(&path, wrong).unwrap();
    let output = pdp(&socket).arg("validate").arg(&path).output().unwrap();
    let words = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    for fault in [
        "gateway 10.9.0.1 is outside the subnets of eth0",
        "name \"h_3\" is not",
        "has 21 characters, 15 at most",
        "PdP puts no files at /say.py",
        "rootfs is the machine's root directory",
        "address 10.1.0.2/24 is outside the subnet 10.0.0.0/24 of h2:eth0",
        "link green/link2: endpoint h2:eth0 is already used by link1",
        "address 10.0.0.2/24 is also that of h2:eth0, the link's other end",
        "endpoint h9:eth0 does not exist",
        "endpoint h4:eth7 does not exist",
    ] {
        assert!(words.contains(fault), "{fault}: {words}");
    }
    fs::write(&path, "").unwrap();
    let output = pdp(&socket).arg("validate").arg(&path).output().unwrap();
    assert!(String::from_utf8_lossy(&output.stderr).contains("the file has no object"));
}

#[test]
fn changes_reach_the_daemon() {
    let server = Server::start();
    let path = server.path("one.yaml");
    fs::write(&path, VNET.replace("green", "red")).unwrap();
    let path = path.to_str().unwrap();
    out(&server, &["link", "down", "red/r1:eth0"]);
    out(&server, &["link", "down", "red/r1:eth0", "--silent"]);
    out(&server, &["link", "up", "red/r1-h1"]);
    out(&server, &["link", "set", "red/r1-h1", "--at", "r1:eth0", "delay=20ms", "loss="]);
    for wrong in [
        &["link", "set", "red/r1-h1"][..],
        &["link", "up", "red/r1-h1", "delay=1"],
        &["link", "down", "red/r1-h1", "--at", "r1:eth0"],
        &["link", "set", "red/r1-h1", "delay=1", "--silent"],
        &["link", "set", "red/r1-h1", "delay"],
    ] {
        assert_eq!(fails(&server, wrong).0, 2, "{wrong:?}");
    }
    let learned = out(&server, &["fdb", "red/r1-h1"]);
    assert!(learned.contains("h1:eth0  02:00:00:00:00:01  7 s"), "{learned}");
    out(&server, &["fdb", "red/r1-h1", "--clear"]);
    out(&server, &["delete", "-f", path]);
    out(&server, &["up", "-f", path]);
    out(&server, &["down", "--purge"]);
    let done = server.fake.done.lock().unwrap().clone();
    let all = [
        "link r1:eth0 false",
        "link r1:eth0 false silent",
        "link r1-h1 true",
        "link r1-h1 at r1:eth0: {\"delay\": Some(\"20ms\"), \"loss\": None}",
        "fdb r1-h1 cleared",
        "deleted red",
        "up",
        "applied red",
        "down purge=true exit=true",
    ];
    assert_eq!(done, all);
    let (code, error) = fails(&server, &["delete", "substrate"]);
    assert_eq!(
        (code, error.as_str()),
        (1, "error: substrate: vnet red uses it\nhint: delete it first\n")
    );
}

#[test]
fn exit_codes_distinguish_usage_failure_and_no_daemon() {
    let server = Server::start();
    for usage in [
        &["frobnicate"][..],
        &["destroy", "red"],
        &["apply"],
        &["exec", "red", "--", "true"],
        &["exec", "red/r1"],
        &["link", "sideways", "red/x"],
        &["capture", "red/r1", "-w", "-"],
        &["trace", "red/r1:eth0", "--match", "zz"],
        &["logs", "mux", "--guest", "0"],
        &["logs", "kernel"],
        &["routes", "red/r1", "--within", "10.0.0.0/40"],
        &["completion", "tcsh"],
    ] {
        assert_eq!(fails(&server, usage).0, 2, "{usage:?}");
    }
    for (words, tip) in [
        (&["destroy", "lab"][..], "pdp delete VNET forgets a vnet, pdp down stops all"),
        (&["--ca", "x", "ps", "-a"], "pdp get lists vnets, pdp inspect VNET shows one"),
    ] {
        let word = if words.contains(&"ps") { "ps" } else { words[0] };
        let error = fails(&server, words).1;
        assert_text(&error, &format!("error: no such command: {word:?}; {tip}\n"));
    }
    assert!(fails(&server, &["aply"]).1.contains("'apply'"));
    assert_eq!(fails(&server, &["inspect", "none"]).0, 1);
    let nobody = server.path("nobody/pdpd.sock");
    for verb in [&["get"][..], &["down"], &["stats"], &["exec", "red/r1", "--", "true"]] {
        let output = pdp(&nobody).args(verb).output().unwrap();
        assert_eq!(output.status.code(), Some(3), "{verb:?}");
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(error.starts_with("error: no daemon at ") && error.contains("pdp up"), "{error}");
    }
    let version = pdp(&nobody).arg("version").output().unwrap();
    assert!(version.status.success());
    assert!(String::from_utf8_lossy(&version.stdout).ends_with("pdpd none answers\n"));
}

#[test]
fn up_starts_a_daemon_or_reports_why_not() {
    let server = Server::start();
    let script = server.path("daemon");
    fs::write(
        &script,
        format!(
            "#!/bin/sh\n[ $1 = --quiet ] && [ $2 = --run-dir ] && [ $4 = --more ] || exit 9\n\
             ps -o sid= -p $$ > {0}/session\necho $$ > {0}/pid\n\
             sleep 0.3\nln -s {0}/fake.sock $3/pdpd.sock\nexec sleep 600\n",
            server.dir.path().display()
        ),
    )
    .unwrap();
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
    let socket = server.path("runs/pdpd.sock");
    let output = pdp(&socket)
        .args(["up", "--daemon-args", "--more"])
        .env("PDP_DAEMON", &script)
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    assert!(server.fake.noted("up"));
    let read = |name: &str| fs::read_to_string(server.path(name)).unwrap().trim().to_string();
    assert_eq!(read("session"), read("pid"), "a session of its own");
    kill(Pid::from_raw(read("pid").parse().unwrap()), Signal::SIGKILL).unwrap();
    assert_eq!(fs::read_dir(server.path("runs")).unwrap().count(), 1, "only the socket is left");

    fs::write(&script, "#!/bin/sh\necho no runc here >&2\nexit 4\n").unwrap();
    let output =
        pdp(&server.path("other/pdpd.sock")).arg("up").env("PDP_DAEMON", &script).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(error.contains("exit status: 4") && error.contains("no runc here"), "{error}");
    let odd = pdp(&server.path("odd.sock")).arg("up").output().unwrap();
    assert_eq!(odd.status.code(), Some(2));
}

#[test]
fn exec_passes_streams_and_exit_code_through() {
    let server = Server::start();
    let output = run(&server, &["exec", "red/r1", "--", "sh", "-c", "echo o; echo e >&2; exit 42"]);
    assert_eq!(output.status.code(), Some(42));
    assert_eq!((output.stdout.as_slice(), output.stderr.as_slice()), (&b"o\n"[..], &b"e\n"[..]));
    assert_text(
        &out(&server, &["exec", "red/r1", "--guest", "1", "--", "sh", "-c", "echo $PDP_PROCESS"]),
        "g1\n",
    );

    let input: Vec<u8> =
        (0..2_000_000u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let mut child = pdp(&server.socket())
        .args(["exec", "red/r1", "--", "cat"])
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let bytes = input.clone();
    let writer = std::thread::spawn(move || stdin.write_all(&bytes).unwrap());
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap();
    assert!(output.stdout == input, "{} bytes of {}", output.stdout.len(), input.len());

    // Standard input stays for the next command.
    let mut child = Command::new("sh")
        .args(["-c", "\"$0\" exec -n red/r1 -- cat; cat", env!("CARGO_BIN_EXE_pdp")])
        .env("PDP_SOCKET", server.socket())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(b"kept").unwrap();
    assert_eq!(child.wait_with_output().unwrap().stdout, b"kept");
}

#[test]
fn exec_accepts_docker_flags() {
    let server = Server::start();
    for flags in [&["-it"][..], &["-i", "-t"], &["-t"]] {
        let words = [&["exec"], flags, &["red/r1", "sh", "-c", "test -t 0 && echo $PDP_NODE"]];
        assert_text(&out(&server, &words.concat()), "r1\r\n");
    }
    let mut child = pdp(&server.socket())
        .args(["exec", "-i", "red/r1", "cat"])
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(b"read").unwrap();
    assert_eq!(child.wait_with_output().unwrap().stdout, b"read");
    assert_eq!(fails(&server, &["exec", "-i", "-n", "red/r1", "true"]).0, 2);
}

#[test]
fn exec_passes_command_options_without_double_dash() {
    let server = Server::start();
    let words = ["red/r1", "--guest", "1", "printf", "%s ", "-n", "--guest", "--", "-x"];
    assert_text(&out(&server, &[&["exec"], &words[..]].concat()), "-n --guest -- -x ");
    assert_text(&out(&server, &["exec", "red/r1", "--", "echo", "--", "-n"]), "-- -n\n");
    let (code, error) = fails(&server, &["exec", "red/r1", "--gest", "1", "true"]);
    assert!(code == 2 && error.contains("--gest"), "{error}");
}

/// Returns pseudo-random bytes with all values. Their number is no multiple of a frame's size.
fn noise() -> Vec<u8> {
    (0..1_500_001u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect()
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o7777
}

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

/// Counts temporary files of incomplete copies.
fn parts(dir: &Path) -> usize {
    let names = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name());
    names.filter(|name| name.to_string_lossy().ends_with(".part")).count()
}

/// The fake node has this machine's files.
#[test]
fn a_file_is_copied_into_a_node_and_out_of_it() {
    let server = Server::start();
    let (here, node) = (server.path("here"), server.path("node"));
    fs::create_dir(&here).unwrap();
    fs::create_dir(&node).unwrap();
    let in_node = |path: &str| format!("red/r1:{}/{path}", node.display());
    let path = |name: &str| here.join(name).display().to_string();
    let bytes = noise();
    fs::write(here.join("a b"), &bytes).unwrap();
    set_mode(&here.join("a b"), 0o4751);

    // Copies to a name, below a directory, over a file, through a link, and to a relative path.
    fs::write(node.join("old"), "old").unwrap();
    std::os::unix::fs::symlink("old", node.join("link")).unwrap();
    for (to, at) in [("new", "new"), ("", "a b"), ("link", "old")] {
        assert_eq!(out(&server, &["cp", &path("a b"), &in_node(to)]), "");
        assert!(fs::read(node.join(at)).unwrap() == bytes, "{at}");
        assert_eq!(mode(&node.join(at)), 0o751, "{at}");
    }
    assert!(node.join("link").is_symlink());
    out(&server, &["cp", &path("a b"), "red/r1:-x"]);
    assert!(fs::read(server.path("-x")).unwrap() == bytes);

    // And back.
    for (from, to, at) in [("new", "copy", "copy"), ("a b", "", "a b"), ("link", "copy", "copy")] {
        out(&server, &["cp", &in_node(from), &path(to)]);
        assert!(fs::read(here.join(at)).unwrap() == bytes, "{at}");
        assert_eq!(mode(&here.join(at)) & 0o700, 0o700, "{at}");
    }

    // Copies from standard input, which keeps existing permissions; to standard output; and an
    // empty file.
    let mut child = pdp(&server.socket())
        .args(["cp", "-", &in_node("new")])
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(b"\x00\xffnew").unwrap();
    assert!(child.wait().unwrap().success());
    assert_eq!(mode(&node.join("new")), 0o751);
    let output = run(&server, &["cp", &in_node("new"), "-"]);
    assert!(output.status.success() && output.stdout == b"\x00\xffnew", "{output:?}");
    out(&server, &["cp", "-", &in_node("empty")]);
    assert_eq!(mode(&node.join("empty")), 0o644);
    out(&server, &["cp", &in_node("empty"), &path("copy")]);
    assert_eq!(fs::metadata(here.join("copy")).unwrap().len(), 0);
    assert_eq!(parts(&here) + parts(&node), 0);
}

#[test]
fn failed_copy_is_reported_and_leaves_no_file() {
    let server = Server::start();
    let (here, node) = (server.path("here"), server.path("node"));
    fs::create_dir(&here).unwrap();
    fs::create_dir(&node).unwrap();
    let in_node = |path: &str| format!("red/r1:{}/{path}", node.display());
    let path = |name: &str| here.join(name).display().to_string();
    fs::write(here.join("file"), "new").unwrap();
    fs::write(node.join("file"), "old").unwrap();
    fs::create_dir(node.join("dir")).unwrap();
    // A FIFO in place of a device of the machine, which a wrong copy would remove.
    nix::unistd::mkfifo(&node.join("fifo"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    fs::create_dir_all(node.join("sub/file")).unwrap();
    for (from, to, code, words) in [
        (path("file"), in_node("no/file"), 1, "node/no/file: no such directory"),
        (path("file"), in_node("sub"), 1, "node/sub/file: is a directory"),
        (path("file"), in_node("fifo"), 1, "node/fifo: not a regular file"),
        (path("file"), "red/r1:".into(), 2, "no path in the node"),
        (path("file"), "none/r1:/x".into(), 1, "no vnet \"none\""),
        (path("file"), path("other"), 2, "FROM or TO must be a file in a node"),
        (path("none"), in_node("x"), 1, "here/none: No such file"),
        (path(""), in_node("x"), 1, "is a directory; copy directories with `tar"),
        ("-".into(), in_node("dir"), 1, "node/dir: is a directory"),
        (in_node("none"), path("x"), 1, "error: red/r1: "),
        (in_node("none"), path("x"), 1, "node/none: no such file"),
        (in_node("dir"), path("x"), 1, "node/dir: is a directory"),
        ("red/r1:/dev/zero".into(), path("x"), 1, "/dev/zero: not a regular file"),
        (format!("red/r1:/proc/{}/mem", std::process::id()), path("file"), 1, "put error"),
        (in_node("file"), path("../node/fifo"), 1, "not a regular file; use -"),
        (in_node("file"), path("no/file"), 1, "here/no/file: No such file"),
        (in_node("file"), in_node("other"), 2, "| pdp cp -"),
    ] {
        let (is, error) = fails(&server, &["cp", &from, &to]);
        assert!(is == code && error.contains(words), "{from} to {to}: {is}: {error}");
    }
    assert_eq!(fs::read(here.join("file")).unwrap(), b"new");
    assert_eq!(fs::read(node.join("file")).unwrap(), b"old");
    for (dir, count) in [(&here, 1), (&node, 4)] {
        assert_eq!(fs::read_dir(dir).unwrap().count(), count, "{}", dir.display());
    }
}

/// A node may report a small file and send without end.
#[test]
fn copy_from_a_node_is_bounded() {
    let server = Server::start();
    let (here, node) = (server.path("here"), server.path("node"));
    fs::create_dir(&here).unwrap();
    fs::create_dir(&node).unwrap();
    fs::write(here.join("file"), "old").unwrap();
    fs::write(node.join("file"), "0123456789").unwrap();
    let (from, to) =
        (format!("red/r1:{}/file", node.display()), here.join("file").display().to_string());
    for size in ["9", "0"] {
        let (code, error) = fails(&server, &["cp", "--max-size", size, &from, &to]);
        assert!(code == 1 && error.contains(&format!("has more than {size} bytes")), "{error}");
        assert!(error.contains("raise --max-size"), "{error}");
        assert_eq!(fs::read(here.join("file")).unwrap(), b"old");
        assert_eq!(fs::read_dir(&here).unwrap().count(), 1);
    }
    out(&server, &["cp", "--max-size", "10", &from, &to]);
    assert_eq!(fs::read(here.join("file")).unwrap(), b"0123456789");
    // Standard output takes no space here and has no limit.
    assert_eq!(out(&server, &["cp", "--max-size", "1", &from, "-"]), "0123456789");
}

#[test]
fn interrupted_copy_keeps_the_old_file() {
    let server = Server::start();
    let node = server.path("node");
    fs::create_dir(&node).unwrap();
    fs::write(node.join("file"), "old").unwrap();
    let to = format!("red/r1:{}/file", node.display());
    for (signal, tidy) in
        [(Signal::SIGINT, true), (Signal::SIGTERM, true), (Signal::SIGKILL, false)]
    {
        let mut child =
            pdp(&server.socket()).args(["cp", "-", &to]).stdin(Stdio::piped()).spawn().unwrap();
        let mut stdin = child.stdin.take().unwrap();
        stdin.write_all(b"half").unwrap();
        eventually("it is under way", || parts(&node) == 1);
        kill(Pid::from_raw(child.id() as i32), signal).unwrap();
        let status = child.wait().unwrap();
        assert_eq!(status.code(), tidy.then_some(1), "{signal}");
        assert!(!tidy || parts(&node) == 0, "{signal}");
        let pattern = format!("{}/file", node.display());
        eventually("its command is gone", || processes_with(&pattern) == 0);
        assert_eq!(fs::read(node.join("file")).unwrap(), b"old", "{signal}");
    }
}

#[test]
fn exec_command_ends_with_its_client() {
    let server = Server::start();
    let mark = format!("5{:09}", std::process::id());
    let mut child =
        pdp(&server.socket()).args(["exec", "red/r1", "--", "sleep", &mark]).spawn().unwrap();
    // The client's own command line has the mark too.
    eventually("the command runs", || processes_with(&mark) == 2);
    child.kill().unwrap();
    child.wait().unwrap();
    eventually("the command is gone", || processes_with(&mark) == 0);
}

#[test]
fn shell_terminal_follows_client_window_size() {
    let server = Server::start();
    let size = |rows, columns| nix::pty::Winsize {
        ws_row: rows,
        ws_col: columns,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    let pty = openpty(&size(31, 97), None).unwrap();
    let side = |fd: &OwnedFd| Stdio::from(fd.try_clone().unwrap());
    let mut child = pdp(&server.socket())
        .args(["shell", "red/r1"])
        .env("TERM", "dumb")
        .stdin(side(&pty.slave))
        .stdout(side(&pty.slave))
        .stderr(side(&pty.slave))
        .spawn()
        .unwrap();
    let mut keys = fs::File::from(pty.master.try_clone().unwrap());
    let mut screen = fs::File::from(pty.master.try_clone().unwrap());
    let text = std::sync::Arc::new(std::sync::Mutex::new(String::new()));
    let shown = text.clone();
    let reader = std::thread::spawn(move || {
        let mut bytes = [0; 4096];
        while let Ok(count @ 1..) = screen.read(&mut bytes) {
            shown.lock().unwrap().push_str(&String::from_utf8_lossy(&bytes[..count]));
        }
    });
    let shows = |what: &str| text.lock().unwrap().contains(what);
    keys.write_all(b"stty size; echo $TERM-$PDP_NODE\n").unwrap();
    eventually("the size is shown", || shows("31 97") && shows("dumb-r1"));
    // The shell gets Ctrl-C; the client does not end.
    let mark = format!("6{:09}", std::process::id());
    keys.write_all(format!("sleep {mark}\n").as_bytes()).unwrap();
    eventually("the command runs", || processes_with(&mark) == 1);
    keys.write_all(b"\x03").unwrap();
    eventually("the command is gone", || processes_with(&mark) == 0);
    rustix::termios::tcsetwinsize(
        &pty.master,
        rustix::termios::Winsize { ws_row: 40, ws_col: 120, ws_xpixel: 0, ws_ypixel: 0 },
    )
    .unwrap();
    kill(Pid::from_raw(child.id() as i32), Signal::SIGWINCH).unwrap();
    // The size may reach the terminal after the typed text.
    eventually("the new size is shown", || {
        (&keys).write_all(b"stty size\n").unwrap();
        shows("40 120")
    });
    keys.write_all(b"exit 6\n").unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(6), "{}", text.lock().unwrap());
    let local = rustix::termios::tcgetattr(&pty.slave).unwrap().local_modes;
    assert!(local.contains(rustix::termios::LocalModes::ICANON), "the terminal is as before");
    drop(pty);
    drop(keys);
    reader.join().unwrap();
}

#[test]
fn a_capture_goes_to_a_file_or_a_pipe() {
    let server = Server::start();
    let mut child = pdp(&server.socket())
        .args(["capture", "red/r1:eth0", "--snap", "96", "-w", "-"])
        .spawn()
        .unwrap();
    let mut head = [0; 41];
    child.stdout.as_mut().unwrap().read_exact(&mut head).unwrap();
    assert_eq!((&head[..24], head[40]), (PCAP, 96));
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    let left = || server.left.load(std::sync::atomic::Ordering::Relaxed);
    eventually("the capture ends", || left() > 0);

    let file = server.path("frames.pcap");
    let mut child =
        pdp(&server.socket()).args(["capture", "red/r1:eth0", "-w"]).arg(&file).spawn().unwrap();
    eventually("frames are there", || fs::metadata(&file).is_ok_and(|file| file.len() > 8));
    kill(Pid::from_raw(child.id() as i32), Signal::SIGINT).unwrap();
    assert!(child.wait().unwrap().success());
    assert!(fs::read(&file).unwrap().starts_with(PCAP));
    assert_eq!(fails(&server, &["capture", "red/r1:eth7", "-w", "-"]).0, 1);
}

#[test]
fn capture_supports_several_ports_and_filters() {
    let server = Server::start();
    let path = server.path("both.pcapng");
    let file = path.to_str().unwrap();
    let ports = ["capture", "red/r1:eth0", "red/h1:eth0"];
    out(&server, &[&ports[..], &["-f", "udp port 53", "-c", "5", "-w", file]].concat());
    let bytes = fs::read(&path).unwrap();
    let text = String::from_utf8_lossy(&bytes);
    assert!(bytes.starts_with(&[0x0a, 0x0d, 0x0d, 0x0a]), "pcapng");
    assert!(text.contains("red/r1:eth0") && text.contains("red/h1:eth0"));
    // The frames have the program that it received.
    assert_eq!(text.matches(",40 0 0 12,").count(), 5);
    let read = Command::new("tcpdump").args(["-nr", file]).output().unwrap();
    assert!(read.status.success(), "{read:?}");
    let lines = String::from_utf8_lossy(&read.stdout).into_owned();
    assert_eq!(lines.lines().filter(|line| !line.starts_with('\t')).count(), 5, "{lines}");

    let (code, error) = fails(&server, &["capture", "red/r1:eth0", "-f", "tcp prot 1", "-w", "-"]);
    assert!(code == 2 && error.contains("filter \"tcp prot 1\": "), "{error}");
    let (code, error) = fails(&server, &["capture", "red/r1:eth0"]);
    assert!(code == 2 && error.contains("--write"), "{error}");
    out(&server, &["trace", "red/r1:eth0", "-f", "ip", "--match", "0=00"]);
    assert!(fails(&server, &["trace", "red/r1:eth0", "-f", ""]).1.contains("no frame came"));
    assert!(fails(&server, &["trace", "red/r1:eth0"]).1.contains("no frame came"));
    assert!(server.fake.noted("traced 1,6 0 0 262144"));
    assert!(
        server
            .fake
            .noted("traced 6,40 0 0 12,21 0 2 34525,40 0 0 38,21 1 0 65282,6 0 0 262144,6 0 0 0")
    );
}

#[test]
fn capture_starts_wireshark_or_prints_a_hint() {
    let server = Server::start();
    let programs = server.path("bin");
    fs::create_dir(&programs).unwrap();
    let wireshark = |path: &str| {
        pdp(&server.socket())
            .args(["capture", "red/r1:eth0", "--wireshark"])
            .env("PATH", path)
            .output()
            .unwrap()
    };
    let output = wireshark(programs.to_str().unwrap());
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(1) && error.contains("apt install wireshark"), "{error}");
    let script = programs.join("wireshark");
    let got = server.path("got");
    fs::write(&script, format!("#!/bin/sh\necho \"$@\" >{0}\nhead -c 24 >>{0}\n", got.display()))
        .unwrap();
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
    let output = wireshark(&format!("{}:/usr/bin:/bin", programs.display()));
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    assert_eq!(fs::read(got).unwrap(), [b"-k -i -\n", PCAP].concat());
}

#[test]
fn selected_nodes_can_be_applied_and_deleted() {
    let server = Server::start();
    let spec = server.path("red.yaml");
    fs::write(
        &spec,
        "apiVersion: pdp/v1\nkind: VirtualNetwork\nmetadata: {name: red}\nspec: {nodes: {}}\n",
    )
    .unwrap();
    out(&server, &["apply", spec.to_str().unwrap(), "--only", "r1,h1"]);
    assert!(server.fake.noted("applied red r1 h1"));
    let text = out(&server, &["delete", "red", "--only", "h1,r1"]);
    assert!(text.contains("vnet/red/node/h1  delete") && text.contains("\n2 changed"), "{text}");
    assert_eq!(fails(&server, &["delete", "red", "blue", "--only", "h1"]).0, 2);
}

#[test]
fn a_vnet_is_exported_and_saved() {
    let server = Server::start();
    let exported = out(&server, &["export", "red"]);
    assert!(
        exported.contains("kind: VirtualNetwork") && !exported.contains("status"),
        "{exported}"
    );
    assert!(!exported.contains("from:"));
    let directory = server.path("out");
    let at = directory.to_str().unwrap();
    let saved = || fs::read_to_string(directory.join("h1/etc/word")).unwrap();
    let text = out(&server, &["export", "red", "-o", at]);
    assert!(text.ends_with("red.yaml and 1 file of its nodes\n"), "{text}");
    assert_eq!(saved(), "as applied\n");
    let yaml = fs::read_to_string(directory.join("red.yaml")).unwrap();
    assert!(yaml.contains("from: h1/etc/word"), "{yaml}");
    // The written files can be applied again, as one spec.
    out(&server, &["apply", directory.join("red.yaml").to_str().unwrap()]);
    let (code, error) = fails(&server, &["export", "red", "-o", at]);
    assert!(
        code == 1 && error.contains("exists; name another") && error.contains("--force"),
        "{error}"
    );
    // The node, which is this machine, has no such file.
    let output = run(&server, &["export", "red", "--save", "-o", at, "--force"]);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success() && error.contains("red/h1: /etc/word: can't be read"),
        "{error}"
    );
    assert_eq!(saved(), "as applied\n");
    assert_eq!(fails(&server, &["export", "green"]).0, 1);
}

/// Returns the candidates that a shell gets for a TAB after these words.
fn completed(server: &Server, words: &[&str]) -> Vec<String> {
    let mut command = pdp(&server.socket());
    command.env("PDP_COMPLETE", "bash").env("_CLAP_IFS", "\n");
    command.env("_CLAP_COMPLETE_INDEX", (words.len() - 1).to_string());
    let output = command.arg("--").args(words).output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect()
}

#[test]
fn completion_uses_daemon_names_and_fails_silently() {
    let server = Server::start();
    assert_eq!(completed(&server, &["pdp", "exec", ""])[..2], ["blue/", "red/"]);
    assert_eq!(completed(&server, &["pdp", "exec", "red/"]), ["red/r1", "red/h1"]);
    assert_eq!(completed(&server, &["pdp", "capture", "red/r"]), ["red/r1:eth0"]);
    assert_eq!(completed(&server, &["pdp", "link", "down", "red/"]), ["red/r1-h1"]);
    assert_eq!(completed(&server, &["pdp", "delete", "r"]), ["red"]);
    assert_eq!(completed(&server, &["pdp", "images", "rm", "reg"]), ["registry.example/frr:10"]);
    let none: [&str; 0] = [];
    assert_eq!(completed(&server, &["pdp", "exec", "green/"]), none);
    // No daemon, or one that does not answer.
    let nowhere = ["pdp", "--socket", "/nowhere/pdpd.sock", "exec", "red/"];
    assert_eq!(completed(&server, &nowhere), none);
    let mute = server.path("mute.sock");
    let _listens = std::os::unix::net::UnixListener::bind(&mute).unwrap();
    assert_eq!(
        completed(&server, &["pdp", "--socket", mute.to_str().unwrap(), "exec", "red/"]),
        none
    );
}

#[test]
fn images_are_listed_pulled_and_removed() {
    let server = Server::start();
    assert_text(
        &out(&server, &["images"]),
        "\
TENANT  IMAGE                    DIGEST        SIZE     UNPACKED  USED BY
-       registry.example/frr:10  5e5e5e5e5e5e  40.0MiB  100.0MiB  red/r1
",
    );
    let list = out(&server, &["images", "ls", "--format", "json"]);
    let list: serde_json::Value = serde_json::from_str(&list).unwrap();
    assert_eq!(list[0]["unpackedBytes"], 100 << 20);
    let output = run(&server, &["images", "pull", "registry.example/frr:10"]);
    assert!(output.status.success(), "{output:?}");
    let removed =
        out(&server, &["images", "rm", "registry.example/frr:10", "5e5e5e", "--tenant", "a"]);
    assert_text(&removed, "registry.example/frr:10 is removed\n5e5e5e is removed\n");
    assert!(server.fake.noted("deleted image registry.example/frr:10 of Some(\"a\")"));
    assert!(server.fake.noted("deleted image 5e5e5e of Some(\"a\")"));
    assert_text(
        &out(&server, &["images", "prune"]),
        "registry.example/frr:10 is removed\n1 removed, 140.0MiB free\n",
    );
    assert_eq!(fails(&server, &["images", "rm"]).0, 2);
}

#[test]
fn traces_logs_and_checks_are_shown() {
    let server = Server::start();
    assert_text(
        &out(&server, &["trace", "red/r1:eth0", "--match", "12=0800"]),
        "\
AT µs  STAGE       DETAIL
0.0    receive     [8, 0]
1.5    distribute  g0
9.0    send        eth1
",
    );
    assert!(fails(&server, &["trace", "red/r1:eth0"]).1.contains("no frame came"));
    assert_text(&out(&server, &["logs", "--tail", "2"]), "two\nthree\n");
    assert_text(&out(&server, &["logs", "mux", "--tail", "3"]), "mux 1\nmux 2\nmux 3\n");
    assert_text(&out(&server, &["logs", "red/r1"]), "zebra starts\n");
    assert_text(&out(&server, &["logs", "red/r1", "--guest", "0"]), "router starts\n");
    assert_eq!(fails(&server, &["logs", "red/r1", "--helper", "tap"]).0, 1);
    let output = run(&server, &["doctor"]);
    assert_eq!(output.status.code(), Some(1), "something is missing");
    assert_text(
        &String::from_utf8(output.stdout).unwrap(),
        "\
CHECK             STATE    FOUND        HINT
kernel            ok       6.1
AF_XDP zero copy  warn     not on veth
runc              missing  not in PATH  apt install runc
",
    );
}

#[test]
fn a_followed_log_is_printed_as_it_grows() {
    let server = Server::start();
    let mut child = pdp(&server.socket()).args(["logs", "-f", "--tail", "1"]).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert_eq!(lines.next().unwrap().unwrap(), "three");
    let mut log = fs::File::options().append(true).open(server.path("run/pdpd.log")).unwrap();
    writeln!(log, "four").unwrap();
    assert_eq!(lines.next().unwrap().unwrap(), "four");
    kill(Pid::from_raw(child.id() as i32), Signal::SIGINT).unwrap();
    assert!(child.wait().unwrap().success());
}

#[test]
fn completion_is_made_for_each_shell() {
    let server = Server::start();
    for (shell, mark) in
        [("bash", "complete -o nospace"), ("zsh", "#compdef pdp"), ("fish", "--command pdp")]
    {
        let script = out(&server, &["completion", shell]);
        assert!(script.contains(mark) && script.contains("PDP_COMPLETE"), "{shell}: {script}");
    }
    let script = server.path("completion.bash");
    fs::write(&script, out(&server, &["completion", "bash"])).unwrap();
    assert!(Command::new("bash").arg("-n").arg(script).status().unwrap().success());
}

#[test]
fn routers_are_scaled() {
    let server = Server::start();
    let table = out(&server, &["scale", "red/r1", "3"]);
    assert!(table.contains("vnet/red/node/r1"), "{table}");
    assert!(server.fake.noted("scaled red/r1 to 3 with power as it is"));
    let json = out(&server, &["scale", "red/r1", "2", "--power", "1.5", "--format", "json"]);
    let report: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(report["changes"][0]["action"], "change");
    assert!(server.fake.noted("scaled red/r1 to 2 with power 1500"));
    let (code, text) = fails(&server, &["scale", "red/r1", "9"]);
    assert!(code == 1 && text.contains("ask for less"), "{text}");
    for bad in ["0", "65", "x"] {
        assert_eq!(fails(&server, &["scale", "red/r1", bad]).0, 2, "{bad}");
    }
}

#[test]
fn fast_path_filters_are_listed_with_counters() {
    let server = Server::start();
    let fastpath = |words: &[&str]| out(&server, &[&["fastpath", "red/r1"], words].concat());
    let filters = fastpath(&["filters"]);
    assert_text(
        &filters,
        "\
ID  PRIORITY  MATCH                  VERDICT                                                 COUNTER  PACKETS  BYTES
1   100       ip proto udp dport 53  drop                                                    2        1000     64000
5   7         ip6 in eth0            send eth1 to 02:00:00:00:00:09 queue 3, copies to eth0  -        -        -
2 of 10 filters, 4 counters, code ip
",
    );
    let json: Value = serde_json::from_str(&fastpath(&["filters", "-o", "json"])).unwrap();
    assert_eq!((&json[0]["id"], &json[0]["packets"]), (&1.into(), &1010.into()));
    assert_eq!((&json[1]["match"], json[1].get("packets")), (&"ip6 in eth0".into(), None));
    // Counters that are not zero, or those asked for.
    let counters = fastpath(&["counters"]);
    assert_text(
        &counters,
        "COUNTER  PACKETS  BYTES  SENT  BYTES\n2        1020     65280  510   32640\n",
    );
    assert_text(
        &fastpath(&["counters", "3"]),
        "COUNTER  PACKETS  BYTES  SENT  BYTES\n3        0        0      0     0\n",
    );
    let queues = fastpath(&["queues"]);
    let header = "PORT  QUEUE  NAME   WEIGHT  FRAMES  BYTES  BUFFERS  WAITING  SENT  DROPPED\n";
    let row = "eth1  1      voice  30      64      -      16       3        1000  2\n";
    assert_text(&queues, &[header, row].concat());
    assert_eq!(fastpath(&["queues", "eth0"]).lines().nth(1).unwrap()[..4], *"eth0");
    let json: Value = serde_json::from_str(&fastpath(&["counters", "2", "-o", "json"])).unwrap();
    assert_eq!((&json[0]["counter"], &json[0]["packets"]), (&2.into(), &1040.into()));
    let mut watch = pdp(&server.socket());
    let watch = watch.args(["fastpath", "red/r1", "counters", "--watch=0.1", "-o", "json"]);
    let mut watch = watch.spawn().unwrap();
    let mut lines = BufReader::new(watch.stdout.take().unwrap()).lines();
    let line: Value = serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap();
    assert!(line[0]["pps"].as_f64().is_some_and(|pps| pps > 0.0), "{line}");
    kill(Pid::from_raw(watch.id() as i32), Signal::SIGINT).unwrap();
    assert!(watch.wait().unwrap().success());
    assert_eq!(fails(&server, &["fastpath", "none/r1", "filters"]).0, 1);
}

#[test]
fn fast_path_filters_change_and_frames_are_sent() {
    let server = Server::start();
    let fastpath = |words: &[&str]| out(&server, &[&["fastpath", "red/r1"], words].concat());
    let drop = ["add", "--id", "3", "--match", "ip dport 9", "--drop", "--counter", "2"];
    assert_eq!(fastpath(&drop), "1 filter in force\n");
    let mac = "02:00:00:00:00:09";
    let send = ["add", "--id", "4", "-p", "7", "--match", "ip6", "--send", "eth1", "--to", mac];
    fastpath(&[&send[..], &["--copy", "eth0", "--copy", "eth2", "--queue", "2"]].concat());
    assert_eq!(fastpath(&["remove", "3", "4"]), "0 filters in force\n");
    let file = server.path("filters.yaml");
    let text = "filters:\n- {id: 0, priority: 1, match: ip, verdict: punt}\n";
    fs::write(&file, text).unwrap();
    let file = file.to_str().unwrap();
    assert_eq!(fastpath(&["apply", "-f", file, "-o", "json"]), "{\n  \"filters\": 1\n}\n");
    fastpath(&["send", "--out", "eth1", "--queue", "2", "ffffffffffff 020000000001 88b5"]);
    fastpath(&["send", "--in", "eth0", "ff:ff:ff:ff:ff:ff:02:00:00:00:00:01:88:b5"]);
    fastpath(&["queue", "eth1", "2", "--weight", "30", "--frames", "64"]);
    let all = [
        r#"fastpath r1 {"set":[{"id":3,"priority":0,"match":"ip dport 9","verdict":"drop","counter":2}],"remove":[],"sweep":false}"#,
        r#"fastpath r1 {"set":[{"id":4,"priority":7,"match":"ip6","verdict":"send","out":"eth1","to":"02:00:00:00:00:09","queue":2,"copies":["eth0","eth2"]}],"remove":[],"sweep":false}"#,
        r#"fastpath r1 {"set":[],"remove":[3,4],"sweep":false}"#,
        r#"fastpath r1 {"set":[{"id":0,"priority":1,"match":"ip","verdict":"punt"}],"remove":[],"sweep":true}"#,
        r#"frame r1 {"port":"eth1","direction":"out","queue":2,"frame":"ffffffffffff02000000000188b5"}"#,
        r#"frame r1 {"port":"eth0","direction":"in","frame":"ffffffffffff02000000000188b5"}"#,
        r#"fastpath r1 {"set":[],"remove":[],"queues":[{"port":"eth1","queue":2,"weight":30,"frames":64}],"sweep":false}"#,
    ];
    assert_eq!(*server.fake.done.lock().unwrap(), all);
    let (code, error) = fails(&server, &["fastpath", "red/r1", "remove", "9"]);
    assert_eq!((code, error.as_str()), (1, "error: red/r1: filter 9: as asked\n"));
    for (text, why) in [
        ("filters:\n- {id: 0, priority: 1, match: ip, verdict: reject}\n", "reject"),
        ("filters:\n- {id: 0, match: ip, verdict: drop}\n", "priority"),
        ("- 1\n", "filters.yaml"),
        ("filtres: []\n", "filtres"),
    ] {
        fs::write(file, text).unwrap();
        let (code, error) = fails(&server, &["fastpath", "red/r1", "apply", "-f", file]);
        assert!(code == 1 && error.contains(why), "{text}: {error}");
    }
    for wrong in [
        &["add", "--id", "1", "--match", "ip"][..],
        &["add", "--id", "1", "--match", "ip", "--drop", "--pass"],
        &["add", "--id", "1", "--match", "ip", "--drop", "--to", mac],
        &["remove"],
        &["send", "--in", "eth0", "--out", "eth0", "00"],
        &["send", "--in", "eth0", "--queue", "1", "00"],
        &["send", "00"],
        &["send", "--in", "eth0", "0x"],
        &["frobnicate"],
    ] {
        let (code, error) = fails(&server, &[&["fastpath", "red/r1"], wrong].concat());
        assert_eq!(code, 2, "{wrong:?}: {error}");
    }
}

#[test]
fn every_verb_has_help() {
    let server = Server::start();
    let help = out(&server, &["--help"]);
    for verb in [
        "up",
        "down",
        "apply",
        "delete",
        "get",
        "inspect",
        "exec",
        "cp",
        "shell",
        "logs",
        "link",
        "scale",
        "stats",
        "routes",
        "fastpath",
        "capture",
        "trace",
        "validate",
        "doctor",
        "experiment",
        "completion",
        "version",
    ] {
        assert!(help.contains(&format!("\n  {verb} ")), "{verb}");
        assert!(out(&server, &[verb, "--help"]).contains("Example: "), "{verb}");
    }
}

#[test]
fn help_lists_connection_options_last_without_environment() {
    let server = Server::start();
    let help = out(&server, &["exec", "--help"]);
    let (before, connection) = help.split_once("\nConnection:\n").expect("a heading");
    for option in ["--socket", "--name", "--server", "--ca", "--token-file"] {
        assert!(!before.contains(&format!("{option} <")), "{option}");
        assert!(connection.contains(&format!("{option} <")), "{option}");
    }
    assert!(connection.contains("[env: PDP_SOCKET="), "{connection}");
    let (_, error) = fails(&server, &["wait"]);
    assert!(error.contains("Usage: pdp wait <VNET[/NODE]>...\n"), "{error}");
}

/// Creates a token. Returns standard output, which is the token alone.
fn made_token(server: &Server, arguments: &[&str]) -> String {
    let mut all = vec!["token", "create"];
    all.extend(arguments);
    let secret = out(server, &all);
    assert!(secret.starts_with("pdp_") && secret.ends_with('\n'), "{secret}");
    secret
}

#[test]
fn tokens_are_made_listed_used_over_tls_and_revoked() {
    let server = Server::start();
    let file = server.path("acme.token");
    fs::write(&file, made_token(&server, &["--tenant", "acme", "--expires", "30d"])).unwrap();
    let list = out(&server, &["token", "list"]);
    assert!(list.lines().nth(1).unwrap().starts_with("1   tenant  acme    20"), "{list}");
    let url = format!("https://{}", server.address);
    let (ca, token) = (server.path("tls.crt"), file.display().to_string());
    let over_tls = |arguments: &[&str]| {
        let mut command = pdp(Path::new("/none.sock"));
        command.env("PDP_SERVER", &url).env("PDP_CA", &ca).args(arguments).output().unwrap()
    };
    let seen = over_tls(&["--token-file", &token, "get"]);
    let text = String::from_utf8(seen.stdout).unwrap();
    assert!(text.contains("acme.red") && !text.contains("blue"), "{text}");
    let version = over_tls(&["--token-file", &token, "version"]);
    let text = String::from_utf8(version.stdout).unwrap();
    assert!(text.contains("certificate SHA-256"), "{text}");
    let without = String::from_utf8(over_tls(&["get"]).stderr).unwrap();
    assert!(without.contains("has no token") && without.contains("--token-file"), "{without}");
    let up = over_tls(&["--token-file", &token, "up"]);
    assert!(!up.status.success());
    out(&server, &["token", "revoke", "1"]);
    let revoked = String::from_utf8(over_tls(&["--token-file", &token, "get"]).stderr).unwrap();
    assert!(revoked.contains("the token is unknown, or was revoked"), "{revoked}");
    let (code, error) = fails(&server, &["token", "revoke", "1"]);
    assert_eq!((code, error.as_str()), (1, "error: no token 1\nhint: see `pdp token list`\n"));
    let (code, _) = fails(&server, &["token", "create"]);
    assert_eq!(code, 2);
    // By default the system's authorities are trusted, and none of them issued this certificate.
    let other = pdp(Path::new("/none.sock"))
        .args(["--server", &url, "--ca", "/dev/null", "--token-file", &token, "get"])
        .output()
        .unwrap();
    assert_eq!(other.status.code(), Some(2), "{other:?}");
}

#[test]
fn the_audit_log_is_shown() {
    let server = Server::real();
    out(&server, &["get"]);
    out(&server, &["delete", "red"]);
    fails(&server, &["inspect", "acme.none"]);
    let text = out(&server, &["audit", "--since", "1h"]);
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines[0].starts_with("TIME"), "{text}");
    assert!(lines[1].contains("user:root  operator  pid "), "{text}");
    assert!(text.contains("no vnet \"acme.none\""), "{text}");
    let rows: Value =
        serde_json::from_str(&out(&server, &["audit", "--vnet", "red", "-o", "json"])).unwrap();
    assert_eq!(rows.as_array().unwrap().len(), 1);
    assert_eq!(
        (&rows[0]["what"], &rows[0]["status"]),
        (&"DELETE /v1/vnets/red".into(), &200.into())
    );
}

#[test]
fn tenants_are_listed_shown_and_deleted() {
    let server = Server::start();
    assert_text(
        &out(&server, &["get", "tenants"]),
        "\
TENANT  USERS  QUOTA  INTERFACES  VNETS  IMAGES
acme    71000  -      -           1      140.0MiB
other   71001  -      -           1      0.0MiB
",
    );
    let one = out(&server, &["inspect", "tenant/acme"]);
    assert!(one.contains("users: 71000\n") && one.contains("vnets: acme.red\n"), "{one}");
    let yaml = out(&server, &["inspect", "tenant/acme", "--format", "yaml"]);
    assert!(yaml.contains("kind: Tenant"), "{yaml}");
    out(&server, &["delete", "tenant/acme"]);
    assert!(server.fake.noted("deleted tenant acme"));
    fails(&server, &["inspect", "tenant/none"]);
}

#[test]
fn wait_succeeds_or_reports_unmet_conditions() {
    let server = Server::start();
    assert_eq!(out(&server, &["wait", "red/h1", "--for", "ready", "--for", "running"]), "");
    assert_eq!(out(&server, &["wait", "green", "red/h9", "--for", "gone"]), "");
    let (code, error) = fails(&server, &["wait", "red", "--timeout", "0.5"]);
    assert_eq!(code, 1);
    assert_text(
        &error,
        "\
error: red: not within 500ms; missing:
  red/r1 zebra: restarting (ended with code 1: no such interface (started 4 times))
  red/r1 g1: not connected
",
    );
    // Without a terminal, a line is printed once.
    let (_, error) = fails(&server, &["wait", "red", "--timeout", "5"]);
    assert_eq!(error.matches("0/2 waiting: red/r1 zebra").count(), 1, "{error}");
    let fails_always = ["wait", "red/h1", "--for", "exec false", "--timeout", "0.5"];
    assert_eq!(fails(&server, &fails_always).0, 1);
    assert_eq!(out(&server, &["wait", "red", "--for", "exec h1 sh -c 'exit 0'"]), "");
    for wrong in [
        &["wait"][..],
        &["wait", "red", "--for", "redy"],
        &["wait", "red", "--for", "exec h1"],
        &["wait", "red/", "--for", "ready"],
        &["wait", "red", "--timeout", "soon"],
    ] {
        assert_eq!(fails(&server, wrong).0, 2, "{wrong:?}");
    }
}
