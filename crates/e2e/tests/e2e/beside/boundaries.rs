//! Root trusts nothing that a guest, a helper, the mux or a memif program can write. Only root and
//! a tenant's own processes read the tenant's files.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use pdp_e2e::specs::two_hosts;
use pdp_e2e::{Background, MonitoredProcess, TestNode, eventually, run};
use pdp_spec::RUN_BYTES;
use serde_json::json;

/// Tries everything possible in a directory that root has made for its socket.
const EVIL: &str = include_str!("boundaries/evil.py");

/// A group of programs behind a memif interface, and a user of it.
const GROUP: u32 = 54_321;

const SUBSTRATE: &str = r#"
apiVersion: pdp/v1
kind: Substrate
metadata: {name: node}
spec:
  interfaces: {in: {memif: {group: "54321"}}}
  mux: {cpus: "0", power: 0.5}
  forwardingEngines: {fe1: {cpus: "1", capacity: 1}}
"#;

/// Makes networks with every kind of attached program.
fn start(label: &str) -> TestNode {
    let node = TestNode::start(label);
    node.apply(SUBSTRATE);
    node.apply(&two_hosts("good", "{power: 0.2}"));
    eventually("h1 reaches h2", || reaches(&node));
    node
}

fn reaches(node: &TestNode) -> bool {
    node.try_exec("good/h1", "ping -c1 -W1 10.2.0.2").is_ok()
}

/// Network whose router's guests run this program.
fn network(name: &str, guests: u32, attach: &str, program: &[&str]) -> String {
    let plane = json!({
        "power": 0.2, "guests": guests, "program": {"attach": attach, "run": program},
    });
    two_hosts(name, &plane.to_string())
}

/// Collects all paths below a directory.
fn all_below(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let path = entry.path();
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            all_below(&path, found);
        }
        found.push(path);
    }
}

/// Paths for which `test -WHAT` succeeds as a user of this group.
fn may(what: char, (uid, gid): (u32, u32), paths: &[PathBuf]) -> BTreeSet<PathBuf> {
    let list: String = paths.iter().map(|path| format!("{}\n", path.display())).collect();
    let user = format!("--reuid={uid} --regid={gid} --clear-groups");
    let mut command = Command::new("setpriv");
    command.args(user.split(' ')).args(["sh", "-c"]).arg(format!(
        "while read -r path; do test -{what} \"$path\" && echo \"$path\"; done; true"
    ));
    let output = run(&mut command, &list);
    assert!(output.status.success(), "{output:?}");
    String::from_utf8_lossy(&output.stdout).lines().map(PathBuf::from).collect()
}

#[test]
fn only_root_can_write_files_root_reads() {
    let node = start("writes");
    node.apply(&network("taps", 1, "tap", &["sleep", "1000"]));
    node.apply(&network("memifs", 1, "memif", &["sleep", "1000"]));
    let mut users: BTreeSet<(u32, u32)> = BTreeSet::from([(GROUP, GROUP)]);
    for MonitoredProcess { pid, .. } in node.processes() {
        let meta = fs::metadata(format!("/proc/{pid}/stat"));
        users.extend(meta.map(|meta| (meta.uid(), meta.gid())).ok());
    }
    users.retain(|(uid, _)| *uid != 0);
    assert!(users.len() > 8, "the mux, helpers and guests have users of their own: {users:?}");
    let mut paths = Vec::new();
    all_below(&node.run_dir(), &mut paths);
    // Guests' own root is read-only.
    paths.retain(|path| !path.components().any(|part| part.as_os_str() == "root"));
    // Writable paths: sockets, as connecting needs that, and directories with a bound.
    let run_dir = node.run_dir();
    let mut bounded = BTreeSet::new();
    for user in users {
        for path in may('w', user, &paths) {
            let is_socket = path.extension().is_some_and(|it| it == "sock");
            let is_null =
                fs::symlink_metadata(&path).is_ok_and(|meta| !meta.is_file() && !meta.is_dir());
            let below = path.strip_prefix(&run_dir).expect("below it");
            if is_socket || is_null && !below.starts_with("vnets") {
                continue;
            }
            bounded.insert(below.to_owned());
            let room = rustix::fs::statvfs(&path).expect("a directory");
            assert!(room.f_files <= 64 && room.f_blocks * room.f_frsize <= 64 << 10, "{path:?}");
            let meta = fs::metadata(&path).expect("a directory");
            assert_eq!((meta.uid(), meta.mode() & 0o7777), (0, 0o1770), "{path:?}");
        }
    }
    let expected = ["externals/in", "vnets/memifs/r1/g0/memif"].map(PathBuf::from);
    assert_eq!(bounded, BTreeSet::from(expected));
}

/// A network whose node has an environment, arguments, files, a volume and a published port.
const SECRETS: &str = r#"
apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {name: secrets}
spec:
  nodes:
    h:
      kind: host
      env: {PASSWORD: hunter2}
      commands: [[sh, -c, "exec sleep 1000 # --token 4711"]]
      files:
        /etc/key: {content: "a key\n"}
        /var/key: {content: "a key\n"}
      volumes: [{source: data, target: /data, size: 16Mi}]
      management: {ports: ["18099:80"]}
"#;

/// Network of each user ID that its processes use.
fn owners(node: &TestNode) -> BTreeMap<u32, String> {
    let mut owners = BTreeMap::new();
    for record in fs::read_dir(node.run_dir().join("records")).expect("records").flatten() {
        let name = record.file_name().into_string().expect("a name");
        let pid: serde_json::Value = fs::read_to_string(record.path().join("pid"))
            .ok()
            .and_then(|text| serde_json::from_str(&text).ok())
            .unwrap_or_default();
        let uid = fs::metadata(format!("/proc/{}/stat", pid["pid"])).map(|meta| meta.uid());
        let vnet = name.split('.').next().unwrap_or_default();
        owners.extend(uid.ok().map(|uid| (uid, vnet.to_owned())));
    }
    owners.retain(|uid, _| *uid != 0);
    owners
}

/// Asserts that each process only reads its own network's files, and that a stranger reads nothing.
fn nobody_reads_anothers(node: &TestNode, when: &str) {
    let (run_dir, state) = (node.run_dir(), node.directory.join("state"));
    let mut paths = vec![run_dir.clone(), state.clone()];
    all_below(&run_dir, &mut paths);
    all_below(&state, &mut paths);
    assert!(paths.len() > 500, "{when}: {} paths", paths.len());
    let relative = |path: &Path| path.strip_prefix(&node.directory).expect("below").to_owned();
    let is_socket =
        |path: &Path| fs::symlink_metadata(path).is_ok_and(|meta| meta.file_type().is_socket());
    let is_special = |path: &Path| {
        fs::metadata(path).is_ok_and(|meta| !meta.is_file() && !meta.is_dir()) && !is_socket(path)
    };
    let mut users = owners(node);
    assert!(users.len() >= 6, "{when}: the mux, helpers and guests of three networks: {users:?}");
    let strangers = [71_002, 65_534, GROUP].map(|uid| (uid, String::new()));
    users.extend(strangers);
    for (uid, vnet) in &users {
        let user = (*uid, *uid);
        let own = |path: &Path| {
            let path = path.strip_prefix("run").unwrap_or(path);
            let is_mux = vnet == "mux";
            match path.strip_prefix("vnets") {
                // The mux has the routes of the routers that it forwards for.
                Ok(path) if is_mux => path.ends_with("routes") || path.ends_with("routes.sock"),
                Ok(path) => path.starts_with(vnet),
                // A memif program reaches the mux.
                _ if *uid == GROUP => path.starts_with("externals/in"),
                _ => {
                    path.starts_with("records")
                        && path.to_string_lossy().contains(&format!("records/{vnet}."))
                }
            }
        };
        let mut read: BTreeSet<PathBuf> = may('r', user, &paths);
        read.retain(|path| !is_socket(path) && !is_special(path));
        let mut reached = may('w', user, &paths);
        reached.retain(|path| is_socket(path));
        let others = |paths: BTreeSet<PathBuf>| -> BTreeSet<PathBuf> {
            paths.iter().map(|path| relative(path)).filter(|path| !own(path)).collect()
        };
        assert_eq!(others(read), BTreeSet::new(), "{when}: {uid} of {vnet:?} reads this");
        let api = BTreeSet::from([PathBuf::from("run/pdpd.sock")]);
        assert_eq!(others(reached), api, "{when}: {uid} of {vnet:?} connects to these");
    }
}

#[test]
fn local_users_cannot_read_tenant_data() {
    let mut node = start("reads");
    node.apply(&network("memifs", 1, "memif", &["sleep", "1000"]));
    node.apply(&two_hosts("engine", "{kind: fastpath, power: 0.1}"));
    node.apply(SECRETS);
    nobody_reads_anothers(&node, "made");
    // Inside the node, every user can read all of it.
    let read = "cat /etc/key /var/key; getent hosts localhost; ls /data";
    for user in [&[][..], &["-u", "nobody"]] {
        let mut words = vec!["exec", "-n"];
        words.extend(user);
        words.extend(["secrets/h", "--", "sh", "-c", read]);
        let text = node.try_pdp(&words).unwrap_or_else(String::from);
        assert!(text.starts_with("a key\na key\n"), "{user:?}: {text}");
    }
    // An earlier daemon left world-readable files.
    node.kill_pdpd();
    let run_dir = node.run_dir();
    let open = |path: PathBuf, mode| {
        fs::set_permissions(&path, fs::Permissions::from_mode(mode))
            .unwrap_or_else(|error| panic!("{path:?}: {error}"));
    };
    for name in ["secrets.h", "good.r1", "good.r1.g0"] {
        open(node.record(name), 0o711);
    }
    for name in
        ["pdpd.log", "version", "vnets/good/r1/mirror.json", "vnets/secrets/h/management.json"]
    {
        open(run_dir.join(name), 0o644);
    }
    let before = run_dir.join("vnets/good/_hosts");
    fs::rename(run_dir.join("vnets/good/_names/hosts"), &before).expect("as it was before");
    fs::remove_dir(run_dir.join("vnets/good/_names")).expect("as it was before");
    node.start_pdpd();
    eventually("the file of names is where it belongs", || !before.exists());
    nobody_reads_anothers(&node, "upgraded");
    // Names added later reach the nodes that already ran.
    node.apply(&two_hosts("good", "{power: 0.2}").replace("10.2.0.2", "10.2.0.77"));
    eventually("h1 hears of it", || {
        node.try_exec("good/h1", "grep -q 10.2.0.77 /etc/hosts").is_ok()
    });
}

#[test]
fn root_survives_forged_records_and_deep_trees() {
    let mut node = start("forged");
    let marker = node.directory.join("root-was-here");
    let run_dir = node.run_dir();
    let evil = |inside: &str, outside: &Path| {
        let words = [inside, outside.to_str().unwrap(), marker.to_str().unwrap()];
        ["/usr/bin/python3", "-c", EVIL]
            .into_iter()
            .chain(words)
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    // As a tenant's guest, in the directory of its socket.
    let outside = run_dir.join("vnets/evil/r1/g0/memif");
    let program = evil("/run/pdp/memif", &outside);
    let program: Vec<&str> = program.iter().map(String::as_str).collect();
    let spec = |guests| network("evil", guests, "memif", &program);
    node.apply(&spec(1));
    // Before its first output there may be no log.
    let output = || node.try_pdp(&["logs", "evil/r1", "--guest", "0"]).unwrap_or_default();
    eventually("the guest did what it could", || output().contains("all done"));
    let words = output();
    for what in ["unlink", "replace", "directory in its place"] {
        assert!(words.contains(&format!("{what}: refused")), "{words}");
    }
    // Some forty levels deep, until the directory is full.
    assert!(words.contains("nested: refused"), "{words}");
    assert!(outside.join("n/n/n/n").is_dir());
    // Another directory stays as it is: no mux that ended has cleaned it.
    let twin = evil("/run/pdp/memif", &run_dir.join("vnets/twin/r1/g0/memif"));
    let twin: Vec<&str> = twin.iter().map(String::as_str).collect();
    node.apply(&network("twin", 1, "memif", &twin));
    let output = || node.try_pdp(&["logs", "twin/r1", "--guest", "0"]).unwrap_or_default();
    eventually("the twin did what it could", || output().contains("all done"));
    node.pdp(&["delete", "twin"]);
    assert!(!node.socket_directory("twin").exists());
    // As a program of a memif group; and as the mux and a helper, which may write nothing at all.
    let external = run_dir.join("externals/in");
    let as_user = |uid: u32, directory: &Path| {
        let user = format!("--reuid={uid} --regid={uid} --clear-groups");
        let mut command = Command::new("setpriv");
        command.args(user.split(' ')).args(evil(directory.to_str().unwrap(), directory));
        Background::start(&mut command)
    };
    let program = as_user(GROUP, &external);
    let owner = |id: &str| {
        let pid = fs::read_to_string(node.record(id).join("pid")).expect("it runs");
        let pid: serde_json::Value = serde_json::from_str(&pid).expect("JSON");
        fs::metadata(format!("/proc/{}/stat", pid["pid"])).expect("it runs").uid()
    };
    eventually("the program did what it could", || external.join("record.json").exists());
    for (id, directory) in [
        ("mux", run_dir.join("mux")),
        ("mux", outside.clone()),
        ("mux", run_dir.join("records/mux")),
        ("evil.r1.tap", run_dir.join("vnets/evil/r1/tap")),
        ("evil.r1.tap", run_dir.join("records")),
    ] {
        let words = as_user(owner(id), &directory).finish();
        assert!(words.contains("nothing can be done"), "{id} in {directory:?}: {words}");
    }
    // Death and return of pdpd, of a mux, scaling, a change, and the end of each.
    let check = |node: &TestNode, what: &str| {
        assert!(!marker.exists(), "{what}: root ran a tenant's program");
        eventually(&format!("{what}: h1 reaches h2"), || reaches(node));
    };
    node.kill_pdpd();
    node.start_pdpd();
    node.apply(&two_hosts("another", "{power: 0.1}"));
    check(&node, "a new pdpd");
    let socket =
        |directory: &Path| fs::metadata(directory.join("memif.sock")).expect("there").uid();
    let mux = node.json(&["inspect", "substrate"])["status"]["mux"]["pid"].as_u64().expect("runs");
    pdp_e2e::kill(u32::try_from(mux).expect("a pid"));
    eventually("another mux", || {
        let pid = node.json(&["inspect", "substrate"])["status"]["mux"]["pid"].as_u64();
        pid.is_some_and(|pid| pid != mux)
    });
    check(&node, "a new mux");
    assert_eq!((socket(&outside), socket(&external)), (0, 0));
    node.apply(&spec(2));
    node.apply(&spec(1));
    check(&node, "scaled");
    node.pdp(&["delete", "evil"]);
    assert!(!node.socket_directory("evil").exists());
    check(&node, "deleted");
    node.kill_pdpd();
    node.start_pdpd();
    check(&node, "pdpd once more");
    node.pdp(&["down", "--purge"]);
    node.wait_pdpd();
    assert!(!marker.exists());
    drop(program);
    assert_eq!(node.leftovers(), [""; 0]);
}

/// Two hosts of two networks.
fn two_networks() -> String {
    let host = |name| {
        format!(
            "apiVersion: pdp/v1\nkind: VirtualNetwork\nmetadata: {{name: {name}}}\nspec: {{nodes: {{a: {{kind: host}}, b: \
             {{kind: host}}}}}}\n"
        )
    };
    format!("{}---\n{}", host("one"), host("two"))
}

/// Runs a command in a terminal of a node and returns its output.
fn in_terminal(node: &TestNode, target: &str, line: &str) -> String {
    let pdp = node.pdp_command(&["exec", "-t", target, "--", "sh", "-c", line]);
    let words = std::iter::once(pdp.get_program()).chain(pdp.get_args());
    let words: Vec<&str> = words.map(|word| word.to_str().expect("UTF-8")).collect();
    let words = words.iter().map(|word| format!("'{word}'")).collect::<Vec<_>>().join(" ");
    let mut script = Command::new("timeout")
        .args(["60", "script", "-qec", &words, "/dev/null"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("script");
    // At the end of its input, `script` would type an end of file into the terminal.
    let input = script.stdin.take();
    let output = script.wait_with_output().expect("own child");
    drop(input);
    String::from_utf8_lossy(&output.stdout).replace('\r', "")
}

/// Guests of the machine share a limit of pseudo-terminals,
/// and guests of a network one of inotify instances.
#[test]
fn one_guest_cannot_exhaust_kernel_wide_limits() {
    let node = TestNode::start("all");
    node.apply(SUBSTRATE);
    node.apply(&two_networks());
    let all = r#"python3 -c "
import ctypes, os, time
libc = ctypes.CDLL(None)
for what in (lambda: libc.open(b'/dev/ptmx', os.O_RDWR | os.O_NOCTTY), libc.inotify_init):
    held = 0
    while held < 100_000 and what() >= 0: held += 1
open('/tmp/holds-all', 'w')
time.sleep(1000)""#;
    let greedy =
        Background::start(&mut node.pdp_command(&["exec", "one/a", "--", "sh", "-c", all]));
    let one = r#"python3 -c "
import ctypes, os
print(ctypes.CDLL(None).inotify_init() >= 0, os.open('/dev/ptmx', os.O_RDWR | os.O_NOCTTY) >= 0)""#;
    let in_shell = |line: &str, target: &str| node.pdp(&["exec", target, "--", "sh", "-c", line]);
    eventually("it holds all that it gets", || node.try_exec("one/a", "ls /tmp/holds-all").is_ok());
    let refused = in_terminal(&node, "one/a", "tty");
    assert!(refused.contains("no space"), "{refused}");
    for other in ["one/b", "two/a"] {
        assert_eq!(in_terminal(&node, other, "tty"), "/dev/pts/0\n", "{other}");
        assert_eq!(in_shell(one, other), "True True\n", "{other}");
    }
    // A terminal session has the same limits as all commands in a node.
    let bounds = "ulimit -c; ulimit -n; umask";
    assert_eq!(in_terminal(&node, "one/b", bounds), in_shell(bounds, "one/b"));
    let setting = |path| {
        fs::read_to_string(path).expect("a setting").trim().parse::<u64>().expect("a number")
    };
    // Limits of 4 guests, and of 2 guests of a network.
    assert!(
        setting("/proc/sys/kernel/pty/max") >= 4 * 64 + setting("/proc/sys/kernel/pty/reserve")
    );
    assert!(setting("/proc/sys/fs/inotify/max_user_instances") >= 2 * 128);
    drop(greedy);
}

/// Disk space used below a directory, bytes.
fn taken(directory: &Path) -> u64 {
    let mut paths = Vec::new();
    all_below(directory, &mut paths);
    let blocks = paths.iter().filter_map(|path| Some(fs::symlink_metadata(path).ok()?.blocks()));
    blocks.sum::<u64>() * 512
}

#[test]
fn run_directory_stays_below_the_counted_size() {
    const FILE_BYTES: usize = 200_000;
    let (nodes, guests) = (10, 10);
    let node = TestNode::start("rundir");
    node.apply(SUBSTRATE);
    let hosts: String = (1..nodes)
        .map(|number| {
            format!(
                "    h{number}: {{kind: host, resources: {{memory: 32Mi}}, interfaces: {{eth0: {{}}}}, env: {{X: {}}}, \
                 files: {{/etc/x: {{content: {}}}}}}}\n",
                "x".repeat(10_000),
                "x".repeat(FILE_BYTES),
            )
        })
        .collect();
    let links: String = (1..nodes)
        .map(|number| format!("    - endpoints: [\"r:eth{number}\", \"h{number}:eth0\"]\n"))
        .collect();
    let interfaces: Vec<String> = (1..nodes).map(|number| format!("eth{number}: {{}}")).collect();
    let before = taken(&node.run_dir());
    node.apply(&format!(
        "apiVersion: pdp/v1\nkind: VirtualNetwork\nmetadata: {{name: lab}}\nspec:\n  nodes:\n{hosts}    r:\n      \
         kind: router\n      interfaces: {{{}}}\n      dataPlane: {{power: 0.1, guests: {guests}, memory: 8Mi, \
         program: {{attach: memif, run: [sleep, \"1000\"], files: {{/etc/x: {{content: {}}}}}}}}}\n  links:\n{links}",
        interfaces.join(", "),
        "x".repeat(FILE_BYTES),
    ));
    let took = taken(&node.run_dir()) - before;
    // As counted by `usage.rs` of pdp-spec, without the parts that are longer in a spec.
    let of_words = FILE_BYTES as u64 + 4096;
    let counted = (nodes + guests) * (RUN_BYTES + of_words) + (nodes - 1) * 10_000;
    eprintln!("{took} bytes of {nodes} nodes and {guests} guests, {counted} counted");
    assert!(took > (nodes + guests - 1) * FILE_BYTES as u64, "{took}");
    assert!(took < counted, "{took} of {counted}");
}
