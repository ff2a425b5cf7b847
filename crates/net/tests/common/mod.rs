//! Network namespaces, and commands in them.

#![allow(dead_code, reason = "each test uses some of it")]

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use pdp_net::ports::{self, Ports};

pub const EVENTUALLY: Duration = Duration::from_secs(30);

/// Runs a test in a network and a mount namespace of its own, which disappear with its thread.
pub fn isolated<T: Send>(test: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let work = scope.spawn(|| {
            unshare(CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWNS).unwrap();
            let none: Option<&str> = None;
            mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).unwrap();
            test()
        });
        work.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Process in another network namespace, which disappears with it.
pub struct Peer {
    process: Child,
    /// Options of unshare and nsenter: the namespaces of its own.
    own: &'static str,
}

impl Peer {
    pub fn new() -> Self {
        Self::of(&["-n"], "-n")
    }

    /// Also in a user namespace, as guests are: root there, without any privilege here.
    pub fn guest() -> Self {
        Self::of(&["-n", "-U", "-r"], "-n -U")
    }

    fn of(command: &[&str], own: &'static str) -> Self {
        let command = command.iter().chain(&["sleep", "1000"]);
        let process = Command::new("unshare").args(command).stdout(Stdio::null()).spawn().unwrap();
        let peer = Self { process, own };
        eventually("the peer is in its namespaces", || {
            let path = format!("/proc/{}/comm", peer.id());
            std::fs::read_to_string(path).is_ok_and(|name| name == "sleep\n")
        });
        peer
    }

    pub fn id(&self) -> u32 {
        self.process.id()
    }

    pub fn netns(&self) -> OwnedFd {
        File::open(format!("/proc/{}/ns/net", self.id())).unwrap().into()
    }

    /// Runs a script of bash without single quotes.
    pub fn run(&self, script: &str) -> String {
        run(&format!("nsenter -t {} {} bash -c '{script}'", self.id(), self.own))
    }

    /// Like [`Peer::run`], for commands that may be refused.
    pub fn tries(&self, script: &str) -> bool {
        let Self { own, .. } = self;
        let command = format!("nsenter -t {} {own} bash -c '{script}'", self.id());
        Command::new("sh").args(["-c", &command]).output().unwrap().status.success()
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

pub fn run(script: &str) -> String {
    let output = Command::new("sh").args(["-ec", script]).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{script}: {text}{}", String::from_utf8_lossy(&output.stderr));
    text
}

pub fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + EVENTUALLY;
    while !condition() {
        assert!(Instant::now() < deadline, "not within {EVENTUALLY:?}: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// BPF file system that disappears with the test.
pub struct Pins(tempfile::TempDir);

impl Pins {
    pub fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        mount(Some("bpf"), dir.path(), Some("bpf"), MsFlags::empty(), None::<&str>).unwrap();
        Self(dir)
    }

    pub fn dir(&self) -> std::path::PathBuf {
        self.path("ext")
    }

    pub fn path(&self, name: &str) -> std::path::PathBuf {
        self.0.path().join(name)
    }
}

impl Drop for Pins {
    fn drop(&mut self) {
        umount2(self.0.path(), MntFlags::MNT_DETACH).unwrap();
    }
}

/// Location of the ports, which disappears with the test.
pub struct Place {
    pub pins: Pins,
    dir: tempfile::TempDir,
}

impl Place {
    pub fn new() -> Self {
        Self { pins: Pins::new(), dir: tempfile::tempdir().unwrap() }
    }

    pub fn netns(&self) -> PathBuf {
        self.dir.path().join("run/ports")
    }

    pub fn open(&self) -> Ports {
        Ports::open(&self.netns(), &self.pins.dir()).unwrap()
    }

    /// Runs a script in the namespace of root ends.
    pub fn run(&self, script: &str) -> String {
        run(&format!("nsenter --net={} sh -ec '{script}'", self.netns().display()))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        ports::destroy(&self.netns(), &self.pins.dir()).unwrap();
    }
}

/// Checks the equations that a port's counters satisfy at rest.
pub fn adds_up(counters: &ports::KernelPortCounters) {
    let ports::KernelPortCounters {
        from_vrouter,
        to_link,
        from_link,
        to_vrouter,
        dropped,
        refused,
        ..
    } = counters;
    let sum = |of: &[u64]| of.iter().sum::<u64>();
    assert_eq!(from_vrouter.frames, to_link.frames + sum(dropped), "{counters:?}");
    assert_eq!(counters.in_transit(), 0, "{counters:?}");
    assert_eq!(from_link.frames, to_vrouter.frames + sum(refused), "{counters:?}");
    assert_eq!(to_vrouter.frames, sum_of(&counters.bypass), "{counters:?}");
}

/// Frames by all ways.
pub fn sum_of(bypass: &ports::BypassCounters) -> u64 {
    let ports::BypassCounters {
        bypassed: short,
        silent,
        hooked,
        special,
        route,
        neighbour,
        too_big,
        source,
    } = bypass;
    short + silent + hooked + special + route + neighbour + too_big + source
}
