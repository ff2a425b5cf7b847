//! A crash at any step of `apply` and `delete`: kill -9 of pdpd, or of a process that it just
//! started, before a system call that changes the machine. The next `apply` completes the rest, and
//! the next `delete` leaves nothing of it.
//!
//! strace(1) does the killing. It kills each thread of pdpd, and each process that it starts, at
//! its own Nth call of a kind. So shims, `runc` and helpers also die in the middle of a create.

use std::fs;
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use pdp_e2e::specs::{SUBSTRATE, three_kernels, two_hosts};
use pdp_e2e::{Background, TestNode, all_answered, beside, eventually, sh};

/// Calls at which to kill, with their numbers: all calls that are made a few times (the journal's
/// commits, processes, TAPs, messages to the mux and to helpers), and some of the others.
const STEPS: [(&str, &[u32]); 19] = [
    ("fsync,fdatasync", &[1, 2, 3, 4, 5, 6]),
    ("pwrite64", &[1, 2, 4, 6, 9, 12]),
    ("clone3,clone,fork,vfork", &[1, 2, 3, 4, 5, 6]),
    ("execve", &[1, 2, 3]),
    ("ioctl", &[1, 2, 3, 4]),
    ("sendmsg", &[1, 2, 3, 4]),
    ("bind", &[1, 2]),
    ("rename", &[1, 2, 3]),
    ("chown,fchownat", &[1, 3, 5, 40]),
    ("chmod,fchmod", &[1, 10, 20, 50, 80]),
    ("symlink,symlinkat", &[1, 4, 8]),
    ("mount", &[1, 10, 30, 55]),
    ("mkdir,mkdirat", &[1, 5, 10, 25, 50, 90, 180]),
    ("write", &[1, 5, 10, 20]),
    ("unlink,unlinkat", &[1, 3, 5, 10, 30, 100]),
    ("rmdir", &[1, 3, 5, 10, 30]),
    ("fallocate", &[1]),
    ("flock", &[1, 2]),
    ("fsconfig,fsmount", &[1, 2, 3, 4, 5]),
];

/// The same for routers with kernel links: calls that make
/// and remove their ports, programs, maps and namespace.
const KERNEL_STEPS: [(&str, &[u32]); 6] = [
    ("bpf", &[1, 8, 18, 30, 34, 36]),
    ("setns", &[1, 5]),
    ("unshare", &[1]),
    ("mount,umount2", &[1]),
    ("sendto,sendmsg", &[2, 7]),
    ("unlink,unlinkat,rmdir", &[1, 4]),
];

/// Longest wait for an `apply` or `delete` during which a process was killed.
const STEP_MAX: Duration = Duration::from_secs(15);

/// Time for strace to attach to all threads. A thread started meanwhile may escape it.
const SEIZE_MAX: Duration = Duration::from_secs(2);

/// Kills pdpd, and processes that it starts, at their Nth of these calls.
fn trap(node: &TestNode, calls: &str, at: u32) -> Background {
    let pid = node.pdpd_pid();
    let has_all = || {
        let tasks = fs::read_dir(format!("/proc/{pid}/task")).expect("pdpd runs");
        tasks.flatten().all(|task| {
            let status = fs::read_to_string(task.path().join("status")).unwrap_or_default();
            !status.contains("TracerPid:\t0\n")
        })
    };
    let mut found = None;
    eventually("strace has all threads of pdpd", || {
        let mut strace = Command::new("strace");
        strace.args(["-f", "-qq", "-o", "/dev/null", "-p", &pid.to_string()]);
        strace.args(["-e", &format!("trace={calls}")]);
        strace.args(["-e", &format!("inject={calls}:signal=KILL:when={at}")]);
        let trap = Background::start(&mut strace);
        let end = Instant::now() + SEIZE_MAX;
        while !has_all() && Instant::now() < end {
            thread::sleep(Duration::from_millis(5));
        }
        found = has_all().then_some(trap);
        found.is_some()
    });
    found.expect("a trap")
}

/// Runs `pdp` with the trap set. True if pdpd survived it; afterwards a pdpd without trap runs.
fn under(node: &mut TestNode, calls: &str, at: u32, arguments: &[&str]) -> bool {
    let trap = trap(node, calls, at);
    let mut pdp = node.pdp_command(arguments);
    let mut pdp = pdp.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
    let pdp = pdp.as_mut().expect("pdp starts");
    let end = Instant::now() + STEP_MAX;
    while pdp.try_wait().expect("own child").is_none() && Instant::now() < end {
        thread::sleep(Duration::from_millis(10));
    }
    // If strace traces `runc`'s threads while they are
    // killed, it may neither end nor detach by itself.
    trap.stop("KILL");
    let survived = node.try_pdp(&["inspect", "substrate"]).is_ok();
    node.kill_pdpd();
    let _ = pdp.wait();
    node.start_pdpd();
    survived
}

/// Nodes that try steps in parallel; each mostly waits.
const NODES: usize = 4;

#[test]
fn crash_at_any_step_is_repaired() {
    let _turn = beside();
    let vnet = two_hosts("red", "{power: 0.2}");
    // h1 has a volume, so that a volume is made and removed as well.
    let vnet = vnet.replace(
        "h1:\n      kind: host\n",
        "h1:\n      kind: host\n      volumes: [{source: kept, target: /srv, size: 16Mi}]\n",
    );
    assert!(vnet.contains("volumes"), "{vnet}");
    try_all(&STEPS, &|_, take| on_a_node(&vnet, "red/h1", take));
}

#[test]
fn crash_while_making_kernel_links_is_repaired() {
    let _turn = beside();
    try_all(&KERNEL_STEPS, &|number, take| match number {
        0 => on_a_node(&three_kernels("red"), "red/r1", take),
        _ => beside_another(take),
    });
}

/// The next step to try.
type Take<'a> = &'a (dyn Fn() -> Option<(&'static str, u32)> + Sync);

/// Tries all steps with `on_a_node`, which takes the number of a node and returns how often pdpd
/// died in `apply` and in `delete`.
fn try_all(
    all: &[(&'static str, &[u32])],
    on_a_node: &(dyn Fn(usize, Take<'_>) -> [usize; 2] + Sync),
) {
    let steps: Vec<_> =
        all.iter().flat_map(|(calls, at)| at.iter().map(|at| (*calls, *at))).collect();
    let next = Mutex::new(steps.iter().copied());
    let take = || next.lock().unwrap_or_else(PoisonError::into_inner).next();
    let take: Take<'_> = &take;
    let deaths = thread::scope(|scope| {
        let nodes: [usize; NODES] = std::array::from_fn(|number| number);
        let nodes = nodes.map(|number| scope.spawn(move || on_a_node(number, take)));
        nodes.map(|node| node.join().expect("all steps of a node"))
    });
    let count = steps.len();
    let [apply, delete] = [0, 1].map(|verb| deaths.iter().map(|died| died[verb]).sum::<usize>());
    println!("{count} steps: pdpd died {apply} times in apply, {delete} in delete");
    assert!(apply >= count / 3 && delete >= count / 4, "{deaths:?}");
}

/// Tries steps of this vnet, in which `from` reaches 10.2.0.2, on a node until none is left.
/// Returns how often pdpd died in `apply` and in `delete`.
fn on_a_node(vnet: &str, from: &str, take: Take<'_>) -> [usize; 2] {
    let mut node = TestNode::start("steps");
    node.apply(SUBSTRATE);
    let deaths = until_none_is_left(&mut node, vnet, from, take, &|node| {
        let left = node.leftovers();
        !left
            .iter()
            .any(|left| ["red", "/vnets/", "/ports", "pins"].iter().any(|it| left.contains(it)))
    });
    node.pdp(&["down", "--purge"]);
    node.wait_pdpd();
    thread::sleep(Duration::from_millis(100));
    assert_eq!(node.leftovers(), [""; 0]);
    deaths
}

/// Prints the ports' remains in the kernel: pins,
/// interfaces, and the numbers with entries in each map.
const PORTS: &str = r#"
import ctypes, os, struct, sys
pins = sys.argv[1]
print(sorted(name for name in os.listdir(pins) if name.isdigit()))
bpf = lambda command, attr: ctypes.CDLL(None, use_errno=True).syscall(321, command, attr, len(attr))
for name in ("ports", "ends", "port_counts"):
    path, key = ctypes.create_string_buffer(f"{pins}/{name}".encode()), ctypes.create_string_buffer(4)
    fd = bpf(7, struct.pack("QII", ctypes.addressof(path), 0, 0))
    assert fd >= 0, name
    value, found = ctypes.create_string_buffer(1 << 16), []
    look = struct.pack("IIQQQ", fd, 0, ctypes.addressof(key), ctypes.addressof(value), 0)
    for number in range(512):
        key.raw = struct.pack("I", number)
        if bpf(1, look) == 0 and any(value.raw):
            found.append(number)
        ctypes.memset(value, 0, len(value))
    print(name, found)
"#;

/// The same beside a permanent vnet that has such links too. Afterwards only its objects remain,
/// and it loses no frame meanwhile.
fn beside_another(take: Take<'_>) -> [usize; 2] {
    let mut node = TestNode::start("steps");
    node.apply(SUBSTRATE);
    node.apply(&three_kernels("stays"));
    node.pdp(&["wait", "stays", "--for", "ready", "--timeout", "60s"]);
    let ports = |node: &TestNode| {
        let pins = node.pins().join("_ports");
        let maps = Command::new("python3").args(["-c", PORTS]).arg(pins).output().expect("python3");
        assert!(maps.status.success(), "{maps:?}");
        let netns = node.run_dir().join("ports");
        let ends = sh(&format!("nsenter --net={} ls /proc/sys/net/ipv4/conf", netns.display()));
        String::from_utf8_lossy(&maps.stdout).into_owned() + &ends
    };
    let said = node.directory.join("said");
    let status = node.json(&["inspect", "stays"])["status"].clone();
    let of = |name: &str| {
        let nodes = status["nodes"].as_array().expect("nodes");
        let found = nodes.iter().find(|found| found["name"] == name).expect("the router");
        found["control"]["pid"].clone()
    };
    let guests = ["r1", "r2", "r3"].map(of);
    let mut ping = Command::new("nsenter");
    let line = format!("exec ping -i0.01 10.2.0.2 > {}", said.display());
    ping.args(["-n", "-t", &guests[0].to_string(), "sh", "-c", &line]);
    let ping = Background::start(&mut ping);
    thread::sleep(Duration::from_millis(300));
    let before = ports(&node);
    let deaths = until_none_is_left(&mut node, &three_kernels("red"), "red/r1", take, &|node| {
        !node.leftovers().iter().any(|left| left.contains("red")) && ports(node) == before
    });
    ping.stop("INT");
    let words = fs::read_to_string(said).expect("what ping said");
    let sent =
        words.lines().find_map(|line| line.split_once(" packets transmitted")?.0.parse().ok());
    let sent: usize = sent.expect("ping's last words");
    // The last ones may be in flight.
    assert!(sent > 100 && all_answered(&words, sent - 10), "{} of {sent}", words.lines().count());
    node.pdp(&["down", "--purge"]);
    node.wait_pdpd();
    thread::sleep(Duration::from_millis(100));
    // ping's output is not part of it.
    assert_eq!(node.leftovers(), [""; 0]);
    deaths
}

fn until_none_is_left(
    node: &mut TestNode,
    vnet: &str,
    from: &str,
    take: Take<'_>,
    is_gone: &dyn Fn(&TestNode) -> bool,
) -> [usize; 2] {
    let file = node.directory.join("red.yaml");
    fs::write(&file, vnet).expect("spec");
    let file = file.to_str().expect("a path").to_owned();
    let apply = ["apply", "-f", &file];
    let mut deaths = [0, 0];
    while let Some((calls, at)) = take() {
        under(node, calls, at, &apply);
        delete(node, &format!("killed at {calls} {at} of apply"), is_gone);

        deaths[0] += usize::from(!under(node, calls, at, &apply));
        if let Err(error) = node.try_apply(vnet) {
            panic!("killed at {calls} {at}, and apply: {error}\n{}", node.log());
        }
        eventually(&format!("{from} reaches 10.2.0.2, killed at {calls} {at} of apply"), || {
            node.try_exec(from, "ping -c1 -W1 10.2.0.2").is_ok()
        });

        let survived = under(node, calls, at, &["delete", "red"]);
        deaths[1] += usize::from(!survived);
        delete(node, &format!("killed at {calls} {at} of delete"), is_gone);
    }
    deaths
}

/// Deletes the vnet, if it exists, and waits until nothing of it is left in any form.
fn delete(node: &TestNode, after: &str, is_gone: &dyn Fn(&TestNode) -> bool) {
    // Its spec may not have been stored, or may be gone already.
    if node.try_pdp(&["inspect", "red"]).is_ok()
        && let Err(error) = node.try_pdp(&["delete", "red"])
    {
        // On a busy machine it may exceed the client's wait.
        assert!(error.contains("the daemon retries"), "{error}");
    }
    eventually(&format!("nothing is left, {after}"), || is_gone(node));
}
