//! A node of its own, with external machines, that is removed in the end.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::ops::Deref;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rustix::net::sockopt::socket_peercred;

use crate::{
    EVENTUALLY_MAX, POLL_PAUSE, PdpNode, TestMachine, bin, eventually, kill, remove_machines,
};

/// File systems in memory (statfs(2)).
const TMPFS_MAGIC: rustix::fs::FsWord = 0x0102_1994;

/// Memory that nodes need.
const MEMORY_BYTES_MIN: u64 = 4 << 30;

/// Longest wait for killed processes of a node to end.
const END_MAX: Duration = Duration::from_secs(20);

static NODES: AtomicU32 = AtomicU32::new(0);

/// Parent of nodes' directories: in memory, like /run on a usual system, if there is room. Guests'
/// roots have hundreds of files, which are slow to make and to remove on disks.
fn parent() -> &'static Path {
    let (memory, disk) = (Path::new("/dev/shm"), Path::new("/tmp"));
    let fits = || {
        let kind = rustix::fs::statfs(memory).ok()?.f_type;
        let of = rustix::fs::statvfs(memory).ok()?;
        let is_memory = kind == TMPFS_MAGIC;
        let runs = !of.f_flag.contains(rustix::fs::StatVfsMountFlags::NOEXEC);
        Some(is_memory && runs && of.f_bavail * of.f_frsize >= MEMORY_BYTES_MIN)
    };
    if fits() == Some(true) { memory } else { disk }
}

/// Raises the size of the machine's neighbour tables, which all nodes share. pdpd does so through
/// the network namespace of process 1, which some sandboxes hide.
fn raise_neighbours() {
    if fs::File::open("/proc/1/ns/net").is_ok() {
        return;
    }
    for family in ["ipv4", "ipv6"] {
        for (name, count) in [("gc_thresh3", "65536"), ("gc_thresh2", "32768")] {
            // Without IPv6 there is no such table.
            let _ = fs::write(format!("/proc/sys/net/{family}/neigh/default/{name}"), count);
        }
    }
}

/// A PdP node with its own network namespace, cgroup, BPF pin directory, and run and state
/// directories under /dev/shm or /tmp (short paths: Unix socket names are limited to 107 bytes).
/// So several run side by side, and the host's network namespace stays unchanged. Dropping it
/// removes everything.
#[derive(Debug)]
pub struct TemporaryNode {
    /// Unique, at most 11 bytes: prefix of all names that this node makes outside pdpd.
    pub id: String,
    /// Directory of the run directory, the state directory and the logs.
    pub directory: PathBuf,
    node: PdpNode,
    pdpd: Option<Child>,
    machines: Vec<TestMachine>,
    arguments: Vec<String>,
    wrapper: Vec<String>,
}

impl Deref for TemporaryNode {
    type Target = PdpNode;

    fn deref(&self) -> &PdpNode {
        &self.node
    }
}

impl TemporaryNode {
    /// Starts pdpd in a fresh network namespace. `label` appears in names, for people.
    #[track_caller]
    pub fn start(label: &str) -> Self {
        let mut node = Self::prepare(label);
        node.start_pdpd();
        node
    }

    /// Prepares everything without starting pdpd, so that the caller can make devices first.
    #[track_caller]
    pub fn prepare(label: &str) -> Self {
        let number = NODES.fetch_add(1, Ordering::Relaxed);
        let id = format!("pe{}-{number}", std::process::id());
        let directory = parent().join(format!("{id}-{label}"));
        fs::create_dir_all(&directory).expect("directory of the node");
        let node = Self {
            node: PdpNode::inside(format!("{id}-n"), format!("pdp-{id}"), &directory),
            id,
            directory,
            pdpd: None,
            machines: Vec::new(),
            arguments: Vec::new(),
            wrapper: Vec::new(),
        };
        TestMachine::make(node.netns.clone()).unwrap_or_else(|error| panic!("{error}"));
        raise_neighbours();
        node
    }

    /// Further arguments for every later start of pdpd.
    pub fn pdpd_arguments(&mut self, arguments: &[&str]) {
        self.arguments = arguments.iter().map(|argument| argument.to_string()).collect();
    }

    /// Program with arguments that every later start runs with pdpd and its arguments appended. It
    /// must become pdpd by exec.
    pub fn pdpd_wrapper(&mut self, words: &[&str]) {
        self.wrapper = words.iter().map(|word| word.to_string()).collect();
    }

    /// Starts pdpd (again) and waits until it answers.
    #[track_caller]
    pub fn start_pdpd(&mut self) {
        self.try_start_pdpd().unwrap_or_else(|error| panic!("{error}"));
    }

    /// Like [`start_pdpd`](Self::start_pdpd), but returns pdpd's output if it ends.
    #[track_caller]
    pub fn try_start_pdpd(&mut self) -> Result<(), String> {
        assert!(self.pdpd.is_none(), "pdpd runs already");
        let log = File::options()
            .create(true)
            .append(true)
            .open(self.directory.join("pdpd.log"))
            .expect("log of pdpd");
        let mut command = Command::new("nsenter");
        command.arg(format!("--net=/run/netns/{}", self.netns));
        let child = command
            .args(&self.wrapper)
            .arg(bin("pdpd"))
            .arg("--run-dir")
            .arg(self.run_dir())
            .args(self.daemon_arguments())
            .args(&self.arguments)
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("log of pdpd"))
            .stderr(log)
            .spawn()
            .expect("pdpd starts");
        let pid = child.id();
        self.pdpd = Some(child);
        let end = Instant::now() + EVENTUALLY_MAX;
        // The answer must not come from a child forked by a
        // killed pdpd, which briefly shares its socket.
        let answers = |stream| {
            socket_peercred(stream).is_ok_and(|peer| peer.pid.as_raw_nonzero().get() as u32 == pid)
        };
        while !UnixStream::connect(self.socket()).is_ok_and(answers) {
            let child = self.pdpd.as_mut().expect("just started");
            if let Some(status) = child.try_wait().expect("own child") {
                self.pdpd = None;
                return Err(format!("pdpd ended with {status}:\n{}", self.log()));
            }
            assert!(Instant::now() < end, "pdpd does not listen:\n{}", self.log());
            std::thread::sleep(POLL_PAUSE);
        }
        Ok(())
    }

    /// Process id of pdpd.
    #[track_caller]
    pub fn pdpd_pid(&self) -> u32 {
        self.pdpd.as_ref().expect("pdpd runs").id()
    }

    /// Kills pdpd with kill -9.
    #[track_caller]
    pub fn kill_pdpd(&mut self) {
        let mut child = self.pdpd.take().expect("pdpd runs");
        child.kill().expect("own child");
        child.wait().expect("own child");
    }

    /// Simulates a reboot: kills pdpd and all processes that it started,
    /// and removes the run directory, the cgroups and the pins. The state
    /// directory stays. Continue with [`TemporaryNode::start_pdpd`].
    pub fn reboot(&mut self) {
        self.kill_everything();
        let _ = fs::remove_dir_all(self.run_dir());
    }

    /// Waits until pdpd ended by itself (`pdp down`).
    #[track_caller]
    pub fn wait_pdpd(&mut self) {
        let mut child = self.pdpd.take().expect("pdpd runs");
        eventually("pdpd ends", || child.try_wait().expect("own child").is_some());
    }

    /// Output of pdpd so far.
    pub fn log(&self) -> String {
        fs::read_to_string(self.directory.join("pdpd.log")).unwrap_or_default()
    }

    /// Runs `pdp apply -f -` with these YAML documents. Panics if they are refused.
    #[track_caller]
    pub fn apply(&self, yaml: &str) -> String {
        self.try_apply(yaml).unwrap_or_else(|error| panic!("{error}\npdpd:\n{}", self.log()))
    }

    /// Makes an external machine: a network namespace with `eth0`, whose peer is `device` in the
    /// node's namespace (up, tx checksum offload off on both ends).
    #[track_caller]
    pub fn machine(&mut self, name: &str, device: &str) -> TestMachine {
        let made = TestMachine::make(format!("{}-{name}", self.id));
        let machine = made.unwrap_or_else(|error| panic!("{error}"));
        self.machines.push(machine.clone());
        let connected = machine.connect("eth0", (&self.namespace(), device), "tx off");
        connected.unwrap_or_else(|error| panic!("{error}"));
        machine
    }

    /// The node's own network namespace, for running commands in it.
    pub fn namespace(&self) -> TestMachine {
        TestMachine { netns: self.netns.clone() }
    }

    /// Remains of this node; see [`PdpNode::leftovers`].
    pub fn leftovers(&self) -> Vec<String> {
        self.node.leftovers(self.pdpd.as_ref().map(Child::id))
    }

    fn kill_everything(&mut self) {
        if let Some(mut child) = self.pdpd.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
        let end = Instant::now() + END_MAX;
        loop {
            let processes = self.processes();
            if processes.is_empty() || Instant::now() > end {
                break;
            }
            processes.iter().for_each(|process| kill(process.pid));
            std::thread::sleep(POLL_PAUSE);
        }
        for mount in self.mounts() {
            let _ = Command::new("umount").arg("-l").arg(mount).stderr(Stdio::null()).status();
        }
        for cgroup in self.cgroups() {
            remove_cgroup(&cgroup);
        }
        let _ = fs::remove_dir_all(self.pins());
    }
}

impl Drop for TemporaryNode {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let mut text = format!("log of pdpd:\n{}", self.log());
            let logs = fs::read_dir(self.state_dir().join("logs")).into_iter().flatten();
            for log in logs.flatten().map(|log| log.path()) {
                let words = fs::read_to_string(&log).unwrap_or_default();
                let tail: Vec<&str> = words.lines().rev().take(20).collect();
                let _ = writeln!(text, "--- {}", log.display());
                for line in tail.iter().rev() {
                    let _ = writeln!(text, "{line}");
                }
            }
            eprintln!("{text}");
            if std::env::var_os("PDP_E2E_KEEP").is_some() {
                eprintln!("kept: {} (netns {})", self.directory.display(), self.netns);
                return;
            }
        }
        self.kill_everything();
        let machines = self.machines.iter().map(|machine| &machine.netns).chain([&self.netns]);
        if let Err(error) = remove_machines(&machines.cloned().collect::<Vec<_>>()) {
            eprintln!("{error:#}");
        }
        let _ = fs::remove_dir_all(&self.directory);
    }
}

fn remove_cgroup(directory: &Path) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove_cgroup(&entry.path());
        }
    }
    let _ = fs::remove_dir(directory);
}
