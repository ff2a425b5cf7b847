//! A crash at any step of `apply` and `delete`: kill -9 of pdpd, or of what it just started, as it
//! is about to make a system call that changes the machine. What is left is completed by the next
//! `apply`, and by the next `delete` nothing is left of it.
//!
//! strace(1) does the killing: each thread of pdpd, and each process it starts, is killed at its own
//! Nth call of a kind; so shims, `runc` and helpers die in the middle of a create too.

use std::fs;
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use pdp_e2e::specs::{SUBSTRATE, two_hosts};
use pdp_e2e::{Background, Node, beside, eventually};

/// Calls at which to kill, and at which of them: all of those that are made a few times (the
/// journal's commits, processes, TAPs, messages to the mux and to helpers), and some of the others.
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

/// Longest wait for an `apply` or `delete` that something was killed in.
const STEP_MAX: Duration = Duration::from_secs(15);

/// How long strace takes to have all threads, if it does: one that is begun meanwhile may escape it.
const SEIZE_MAX: Duration = Duration::from_secs(2);

/// Kills pdpd, and what it starts, at their Nth of these calls.
fn trap(node: &Node, calls: &str, at: u32) -> Background {
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

/// Runs `pdp` with the trap set; whether pdpd survived it. Then one runs without a trap.
fn under(node: &mut Node, calls: &str, at: u32, arguments: &[&str]) -> bool {
    let trap = trap(node, calls, at);
    let mut pdp = node.pdp_command(arguments);
    let mut pdp = pdp.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
    let pdp = pdp.as_mut().expect("pdp starts");
    let end = Instant::now() + STEP_MAX;
    while pdp.try_wait().expect("own child").is_none() && Instant::now() < end {
        thread::sleep(Duration::from_millis(10));
    }
    // strace that traces `runc`'s threads while they are killed may not end by itself, nor let go.
    trap.stop("KILL");
    let survived = node.try_pdp(&["inspect", "substrate"]).is_ok();
    node.kill_pdpd();
    let _ = pdp.wait();
    node.start_pdpd();
    survived
}

/// Nodes on which steps are tried side by side: most of the time of each is waiting.
const NODES: usize = 4;

#[test]
fn a_crash_at_any_step_is_made_good() {
    let _turn = beside();
    let steps: Vec<_> =
        STEPS.iter().flat_map(|(calls, at)| at.iter().map(|at| (*calls, *at))).collect();
    let next = Mutex::new(steps.iter());
    let take = || next.lock().unwrap_or_else(PoisonError::into_inner).next();
    let deaths = thread::scope(|scope| {
        let nodes = [(); NODES].map(|()| scope.spawn(|| on_a_node(take)));
        nodes.map(|node| node.join().expect("all steps of a node"))
    });
    let count = steps.len();
    let [apply, delete] = [0, 1].map(|verb| deaths.iter().map(|died| died[verb]).sum::<usize>());
    println!("{count} steps: pdpd died {apply} times in apply, {delete} in delete");
    assert!(apply >= count / 3 && delete >= count / 4, "{deaths:?}");
}

/// Tries steps on a node until none is left; how often pdpd died in `apply`, and in `delete`.
fn on_a_node<'a>(take: impl Fn() -> Option<&'a (&'static str, u32)>) -> [usize; 2] {
    let mut node = Node::start("steps");
    node.apply(SUBSTRATE);
    let vnet = two_hosts("red", "{power: 0.2}");
    // h1 has a volume, so that one is made and removed as well.
    let vnet = vnet.replace(
        "h1:\n      kind: host\n",
        "h1:\n      kind: host\n      volumes: [{source: kept, target: /srv, size: 16Mi}]\n",
    );
    assert!(vnet.contains("volumes"), "{vnet}");
    let file = node.directory.join("red.yaml");
    fs::write(&file, &vnet).expect("spec");
    let file = file.to_str().expect("a path").to_owned();
    let apply = ["apply", "-f", &file];
    let mut deaths = [0, 0];
    while let Some(&(calls, at)) = take() {
        under(&mut node, calls, at, &apply);
        delete(&node, &format!("killed at {calls} {at} of apply"));

        deaths[0] += usize::from(!under(&mut node, calls, at, &apply));
        if let Err(error) = node.try_apply(&vnet) {
            panic!("killed at {calls} {at}, and apply: {error}\n{}", node.log());
        }
        eventually(&format!("h1 reaches h2, killed at {calls} {at} of apply"), || {
            node.try_exec("red/h1", "ping -c1 -W1 10.2.0.2").is_ok()
        });

        let survived = under(&mut node, calls, at, &["delete", "red"]);
        deaths[1] += usize::from(!survived);
        delete(&node, &format!("killed at {calls} {at} of delete"));
    }
    node.pdp(&["down", "--purge"]);
    node.wait_pdpd();
    thread::sleep(Duration::from_millis(100));
    assert_eq!(node.leftovers(), [""; 0]);
    deaths
}

/// Deletes the vnet, if it is there, and waits until nothing is left of it, whatever it is.
fn delete(node: &Node, after: &str) {
    // Its spec may not have been stored, or be gone already.
    if node.try_pdp(&["inspect", "red"]).is_ok() {
        node.pdp(&["delete", "red"]);
    }
    eventually(&format!("nothing is left, {after}"), || {
        let left = node.leftovers();
        !left.iter().any(|left| left.contains("red") || left.contains("/vnets/"))
    });
}
