//! Harness of the end-to-end tests: a whole PdP node, with external machines, in namespaces of
//! its own.
//!
//! ```no_run
//! use pdp_e2e::{TestNode, eventually};
//! let mut node = TestNode::start("ping");         // pdpd runs in a fresh network namespace
//! let outside = node.machine("mA", "extA");       // a machine behind a veth pair; device extA
//! outside.run("ip addr add 192.0.2.1/24 dev eth0");
//! node.apply(r#"
//! apiVersion: pdp/v1
//! kind: VirtualNetwork
//! # …
//! "#);                                            // pdp apply -f - ; panics if refused
//! node.exec("red/h1", "ping -c1 -W1 10.0.1.2");   // pdp exec; panics if it fails
//! eventually("h1 reaches h2", || node.try_exec("red/h1", "ping -c1 -W1 10.0.2.2").is_ok());
//! let stats = node.json(&["stats", "red"]);       // any verb with --format json
//! node.kill_pdpd();                               // kill -9
//! node.start_pdpd();
//! // Drop takes everything down, after a panic too, and prints pdpd's log after a panic.
//! ```
//!
//! - Tests need root and the binaries of `cargo build --bins` in the same target directory (the
//!   directory above the test's own); [`bin`] returns their paths.
//! - Every [`TestNode`] has its own network namespace, cgroup, BPF pin directory, and run and state
//!   directories under /dev/shm or /tmp (short paths: Unix socket names are limited to 107 bytes).
//!   So tests run side by side. The host's network namespace stays unchanged.
//! - A test runs beside others, unless its first line is `let _alone = alone();`. [`turn`] tells
//!   which tests must be alone. Every [`TestNode`] calls [`beside`] by itself; a test without a
//!   node calls it explicitly.
//! - [`TestNode::leftovers`] lists all remains of a node (processes, mounts, cgroups, namespaces,
//!   interfaces, files). It must be empty after `down --purge`.
//! - [`eventually`] polls with a generous deadline; there are no timing thresholds.

#![forbid(unsafe_code)]

pub mod counters;
pub mod frame;
pub mod identity;
pub mod meter;
pub mod ovs;
pub mod routing;
pub mod specs;
pub mod turn;

use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::Write as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rustix::net::sockopt::socket_peercred;

pub use turn::{TestPermit, alone, beside};

/// Longest wait of [`eventually`].
pub const EVENTUALLY_MAX: Duration = Duration::from_secs(60);

/// Longest run of any command of the harness.
pub const COMMAND_MAX: Duration = Duration::from_secs(180);

/// File systems in memory (statfs(2)).
const TMPFS_MAGIC: rustix::fs::FsWord = 0x0102_1994;

/// Memory that nodes need.
const MEMORY_BYTES_MIN: u64 = 4 << 30;

const POLL_PAUSE: Duration = Duration::from_millis(50);

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

/// Directory of all binaries, if not beside this program.
static BINARIES: OnceLock<PathBuf> = OnceLock::new();

/// Takes all binaries from this directory from now on, to
/// measure another build. Only the first call counts.
pub fn use_binaries_from(directory: &Path) {
    BINARIES.get_or_init(|| directory.to_owned());
}

/// Path of a binary of this workspace: beside this program,
/// or beside its directory (tests and examples).
pub fn bin(name: &str) -> PathBuf {
    if let Some(directory) = BINARIES.get() {
        return directory.join(name);
    }
    let program = std::env::current_exe().expect("path of the running program");
    let mut paths = program.ancestors().skip(1).take(2).map(|directory| directory.join(name));
    let path = paths.find(|path| path.exists());
    path.unwrap_or_else(|| panic!("{name} is missing; run `cargo build --bins` first"))
}

/// Polls until `done`; panics after [`EVENTUALLY_MAX`].
#[track_caller]
pub fn eventually(what: &str, mut done: impl FnMut() -> bool) {
    let end = Instant::now() + EVENTUALLY_MAX;
    while !done() {
        assert!(Instant::now() < end, "not within {EVENTUALLY_MAX:?}: {what}");
        std::thread::sleep(POLL_PAUSE);
    }
}

/// Runs a command to its end, at most [`COMMAND_MAX`]. `input` is its standard input.
pub fn run(command: &mut Command, input: &str) -> Output {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap_or_else(|error| panic!("{command:?}: {error}"));
    // If the reader ends early, its exit code shows it.
    let _ = child.stdin.take().expect("piped").write_all(input.as_bytes());
    let pid = child.id();
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || sender.send(child.wait_with_output()));
    match receiver.recv_timeout(COMMAND_MAX) {
        Ok(output) => output.unwrap_or_else(|error| panic!("{command:?}: {error}")),
        Err(_) => {
            kill(pid);
            panic!("{command:?} did not end within {COMMAND_MAX:?}");
        }
    }
}

/// Runs a shell line in the harness' own namespaces; panics if it fails.
#[track_caller]
pub fn sh(line: &str) -> String {
    checked(Command::new("sh").args(["-ec", line]), "")
}

/// True if each of the first `count` requests of a `ping -c COUNT -w SECONDS` was answered, in
/// order; while answers are late, ping sends more requests. Without `-w`, ping waits only two
/// round-trip times for its last answers, and then calls them lost.
pub fn all_answered(words: &str, count: usize) -> bool {
    let numbers = words.lines().filter_map(|line| {
        line.split_once("icmp_seq=")?.1.split_whitespace().next()?.parse::<usize>().ok()
    });
    numbers.take(count).eq(1..=count)
}

/// Kills one process with kill -9.
pub fn kill(pid: u32) {
    // It may have ended meanwhile.
    let _ = Command::new("kill").args(["-9", &pid.to_string()]).stderr(Stdio::null()).status();
}

#[track_caller]
fn checked(command: &mut Command, input: &str) -> String {
    result_of(command, input).unwrap_or_else(|error| panic!("{error}"))
}

fn result_of(command: &mut Command, input: &str) -> Result<String, String> {
    let output = run(command, input);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    if output.status.success() {
        return Ok(text);
    }
    let errors = String::from_utf8_lossy(&output.stderr);
    Err(format!("{command:?}: {}\n{text}{errors}", output.status))
}

/// A PdP node under test.
#[derive(Debug)]
pub struct TestNode {
    /// Unique, at most 11 bytes: prefix of all names that this node makes outside pdpd.
    pub id: String,
    /// Network namespace.
    pub netns: String,
    /// Directory of the run directory, the state directory and the logs.
    pub directory: PathBuf,
    pdpd: Option<Child>,
    machines: Vec<String>,
    arguments: Vec<String>,
    wrapper: Vec<String>,
    _permit: TestPermit,
}

/// Raises the size of the machine's neighbour tables, which all tests share. pdpd does so through
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

impl TestNode {
    /// Starts pdpd in a fresh network namespace. `label` appears in names, for people.
    #[track_caller]
    pub fn start(label: &str) -> Self {
        let mut node = Self::prepare(label);
        node.start_pdpd();
        node
    }

    /// Prepares everything without starting pdpd, so that a test can make devices first.
    #[track_caller]
    pub fn prepare(label: &str) -> Self {
        let permit = beside();
        let number = NODES.fetch_add(1, Ordering::Relaxed);
        let id = format!("pe{}-{number}", std::process::id());
        let directory = parent().join(format!("{id}-{label}"));
        fs::create_dir_all(&directory).expect("directory of the node");
        let netns = format!("{id}-n");
        let node = Self {
            id,
            netns,
            directory,
            pdpd: None,
            machines: Vec::new(),
            arguments: Vec::new(),
            wrapper: Vec::new(),
            _permit: permit,
        };
        sh(&format!("ip netns add {0}; ip -n {0} link set lo up", node.netns));
        raise_neighbours();
        node
    }

    /// Run directory of pdpd.
    pub fn run_dir(&self) -> PathBuf {
        self.directory.join("run")
    }

    /// Directory of a process's record, by its id: `VNET.NODE`, `VNET.NODE.g0`, `mux`.
    pub fn record(&self, id: &str) -> PathBuf {
        self.run_dir().join("records").join(id)
    }

    /// Output of the process with this id.
    pub fn log_of(&self, id: &str) -> String {
        let log = self.directory.join("state/logs").join(format!("{id}.log"));
        fs::read_to_string(log).unwrap_or_default()
    }

    /// Directory of a node's sockets, `VNET/NODE`, inside the run directory.
    pub fn socket_directory(&self, node: &str) -> PathBuf {
        self.run_dir().join("vnets").join(node)
    }

    /// Name of pdpd's cgroup in every hierarchy.
    pub fn cgroup(&self) -> String {
        format!("pdp-{}", self.id)
    }

    /// Directory of pdpd's BPF pins.
    pub fn pins(&self) -> PathBuf {
        PathBuf::from(format!("/sys/fs/bpf/pdp-{}", self.id))
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
            .arg("--state-dir")
            .arg(self.directory.join("state"))
            .args(["--cgroup", &self.cgroup()])
            .arg("--bpf-pin-dir")
            .arg(self.pins())
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

    /// Socket of the API.
    pub fn socket(&self) -> PathBuf {
        self.run_dir().join("pdpd.sock")
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
    /// directory stays. Continue with [`TestNode::start_pdpd`].
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

    fn cli(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(bin("pdp"));
        command.arg("--socket").arg(self.socket()).args(arguments).env("NO_COLOR", "1");
        command
    }

    /// Runs `pdp` with these arguments. Panics with its output if it fails.
    #[track_caller]
    pub fn pdp(&self, arguments: &[&str]) -> String {
        checked(&mut self.cli(arguments), "")
    }

    /// Runs `pdp`. Returns its output as error on failure.
    pub fn try_pdp(&self, arguments: &[&str]) -> Result<String, String> {
        result_of(&mut self.cli(arguments), "")
    }

    /// A `pdp` command, not yet started (for captures and long runs).
    pub fn pdp_command(&self, arguments: &[&str]) -> Command {
        self.cli(arguments)
    }

    /// Runs `pdp ARGUMENTS --format json` and parses the output.
    #[track_caller]
    pub fn json(&self, arguments: &[&str]) -> serde_json::Value {
        let mut all = arguments.to_vec();
        all.extend(["--format", "json"]);
        let text = self.pdp(&all);
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{arguments:?}: {error}: {text}"))
    }

    /// Runs `pdp apply -f -` with these YAML documents.
    #[track_caller]
    pub fn apply(&self, yaml: &str) -> String {
        self.try_apply(yaml).unwrap_or_else(|error| panic!("{error}\npdpd:\n{}", self.log()))
    }

    /// Runs `pdp apply -f -`. Returns its output as error on failure.
    pub fn try_apply(&self, yaml: &str) -> Result<String, String> {
        result_of(&mut self.cli(&["apply", "--allow-files-outside", "-f", "-"]), yaml)
    }

    /// Runs a command line (split at spaces) in a node of a vnet, `VNET/NODE`.
    #[track_caller]
    pub fn exec(&self, node: &str, line: &str) -> String {
        self.try_exec(node, line).unwrap_or_else(|error| panic!("{error}"))
    }

    /// Like [`TestNode::exec`], but returns its output as error on failure.
    pub fn try_exec(&self, node: &str, line: &str) -> Result<String, String> {
        let mut arguments = vec!["exec", node, "--"];
        arguments.extend(line.split_whitespace());
        self.try_pdp(&arguments)
    }

    /// Makes an external machine: a network namespace with `eth0`, whose peer is `device` in the
    /// node's namespace (up, tx checksum offload off on both ends).
    #[track_caller]
    pub fn machine(&mut self, name: &str, device: &str) -> TestMachine {
        let netns = format!("{}-{name}", self.id);
        let node = &self.netns;
        self.machines.push(netns.clone());
        sh(&format!(
            "ip netns add {netns}
             ip link add eth0 netns {netns} type veth peer name {device} netns {node}
             ip -n {netns} link set lo up; ip -n {netns} link set eth0 up
             ip -n {node} link set {device} up
             ip netns exec {netns} ethtool -K eth0 tx off >/dev/null
             ip netns exec {node} ethtool -K {device} tx off >/dev/null"
        ));
        TestMachine { netns }
    }

    /// The node's own network namespace, for running commands in it.
    pub fn namespace(&self) -> TestMachine {
        TestMachine { netns: self.netns.clone() }
    }

    /// All remains of this node, one line each. Machines and the node's own network namespace
    /// belong to the harness and are not listed.
    pub fn leftovers(&self) -> Vec<String> {
        let mut found = Vec::new();
        for (pid, line) in self.processes() {
            if Some(pid) != self.pdpd.as_ref().map(Child::id) {
                found.push(format!("process {pid}: {line}"));
            }
        }
        for mount in self.mounts() {
            found.push(format!("mount {}", mount.display()));
        }
        // A running pdpd has these two, even if they are empty.
        let directories = |path: &Path| {
            let entries = fs::read_dir(path).into_iter().flatten().flatten();
            entries.filter(|entry| entry.path().is_dir()).count()
        };
        let is_claim = |path: &Path| self.pdpd.is_some() && directories(path) == 0;
        for cgroup in self.cgroups().into_iter().filter(|cgroup| !is_claim(cgroup)) {
            found.push(format!("cgroup {}", cgroup.display()));
        }
        if self.pins().exists() && !is_claim(&self.pins()) {
            found.push(format!("pins {}", self.pins().display()));
        }
        for entry in fs::read_dir("/sys/block").expect("/sys/block").flatten() {
            let backing = entry.path().join("loop/backing_file");
            let backing = fs::read_to_string(backing).unwrap_or_default();
            if Path::new(&backing).starts_with(&self.directory) {
                found.push(format!("loop device {}: {}", entry.path().display(), backing.trim()));
            }
        }
        let volumes = fs::read_dir(self.directory.join("state/volumes")).into_iter().flatten();
        for volumes in volumes.flatten() {
            found.push(format!("volumes {}", volumes.path().display()));
        }
        let run_dir = self.run_dir();
        for entry in fs::read_dir(run_dir).into_iter().flatten().flatten() {
            let own = ["pdpd.sock", "pdpd.lock", "pdpd.log", "version"];
            if !own.iter().any(|name| entry.file_name() == *name) {
                found.push(format!("file {}", entry.path().display()));
            }
        }
        let links = sh(&format!("ip -n {} -o link show type tun", self.netns));
        found.extend(links.lines().map(|line| format!("interface {line}")));
        let programs = sh(&format!("ip -n {} -o link show | grep xdp || true", self.netns));
        found.extend(programs.lines().map(|line| format!("xdp {line}")));
        found
    }

    /// Processes of this node: those whose command line names its directory, or in its cgroups.
    pub fn processes(&self) -> Vec<(u32, String)> {
        let needle = format!("{}/", self.directory.display());
        let cgroup = format!("/{}", self.cgroup());
        let mut found = Vec::new();
        for entry in fs::read_dir("/proc").expect("/proc").flatten() {
            let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else {
                continue;
            };
            let read = |file| fs::read(entry.path().join(file)).unwrap_or_default();
            // Field 3, after the name in parentheses, which may contain anything. Zombies are
            // skipped, since init is slow to reap.
            let stat = String::from_utf8_lossy(&read("stat")).into_owned();
            if stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with('Z')) {
                continue;
            }
            let line = String::from_utf8_lossy(&read("cmdline")).replace('\0', " ");
            let groups = String::from_utf8_lossy(&read("cgroup")).into_owned();
            let ours = groups
                .lines()
                .filter_map(|line| line.splitn(3, ':').nth(2))
                .any(|path| path == cgroup || path.starts_with(&format!("{cgroup}/")));
            if ours || line.contains(&needle) && pid != std::process::id() {
                found.push((pid, line));
            }
        }
        found
    }

    fn mounts(&self) -> Vec<PathBuf> {
        let text = fs::read_to_string("/proc/self/mounts").expect("/proc/self/mounts");
        let mut mounts: Vec<PathBuf> = text
            .lines()
            .filter_map(|line| line.split(' ').nth(1))
            .map(PathBuf::from)
            .filter(|path| path.starts_with(&self.directory))
            .collect();
        mounts.reverse();
        mounts
    }

    fn cgroups(&self) -> Vec<PathBuf> {
        let mut found = Vec::new();
        let root = Path::new("/sys/fs/cgroup");
        let hierarchies = fs::read_dir(root).into_iter().flatten().flatten().map(|e| e.path());
        for hierarchy in std::iter::once(root.to_path_buf()).chain(hierarchies) {
            let directory = hierarchy.join(self.cgroup());
            if directory.is_dir() {
                found.push(directory);
            }
        }
        found
    }

    fn kill_everything(&mut self) {
        if let Some(mut child) = self.pdpd.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
        let end = Instant::now() + Duration::from_secs(20);
        loop {
            let processes = self.processes();
            if processes.is_empty() || Instant::now() > end {
                break;
            }
            for (pid, _) in processes {
                kill(pid);
            }
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

    fn clean_up(&mut self) {
        self.kill_everything();
        for netns in self.machines.iter().chain([&self.netns]) {
            let _ = Command::new("ip").args(["netns", "del", netns]).status();
        }
        let _ = fs::remove_dir_all(&self.directory);
    }
}

impl Drop for TestNode {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let mut text = format!("log of pdpd:\n{}", self.log());
            let logs = fs::read_dir(self.directory.join("state/logs")).into_iter().flatten();
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
        self.clean_up();
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

/// A network namespace to run commands in: an external machine, or the node's own.
#[derive(Clone, Debug)]
pub struct TestMachine {
    /// Network namespace.
    pub netns: String,
}

impl TestMachine {
    /// Returns a command in this namespace.
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.netns, program]);
        command
    }

    /// Runs a shell line here; panics if it fails.
    #[track_caller]
    pub fn run(&self, line: &str) -> String {
        self.try_run(line).unwrap_or_else(|error| panic!("{error}"))
    }

    /// Runs a shell line here. Returns its output as error on failure.
    pub fn try_run(&self, line: &str) -> Result<String, String> {
        result_of(self.command("sh").args(["-ec", line]), "")
    }

    /// Starts a shell line here in the background; killed when dropped.
    #[track_caller]
    pub fn spawn(&self, line: &str) -> Background {
        let mut command = self.command("sh");
        Background::start(command.args(["-ec", &format!("exec {line}")]))
    }
}

/// Command in the background until it is stopped or dropped.
#[derive(Debug)]
pub struct Background {
    child: Option<Child>,
}

impl Background {
    /// Starts it, and keeps its output.
    #[track_caller]
    pub fn start(command: &mut Command) -> Self {
        let child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("{command:?}: {error}"));
        Self { child: Some(child) }
    }

    /// Process id.
    #[track_caller]
    pub fn pid(&self) -> u32 {
        self.child.as_ref().expect("not stopped").id()
    }

    /// True if it has not ended.
    pub fn runs(&mut self) -> bool {
        self.child.as_mut().is_some_and(|child| child.try_wait().is_ok_and(|end| end.is_none()))
    }

    /// Sends it this signal (`INT`, `TERM`, …) and returns its output.
    #[track_caller]
    pub fn stop(mut self, signal: &str) -> String {
        let child = self.child.take().expect("stopped once");
        sh(&format!("kill -{signal} {}", child.id()));
        let output = child.wait_with_output().expect("own child");
        String::from_utf8_lossy(&output.stdout).into_owned()
            + &String::from_utf8_lossy(&output.stderr)
    }

    /// Waits for its end and returns its output. Panics if it failed.
    #[track_caller]
    pub fn finish(mut self) -> String {
        let child = self.child.take().expect("finished once");
        let output = child.wait_with_output().expect("own child");
        let text = String::from_utf8_lossy(&output.stdout).into_owned()
            + &String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{}: {text}", output.status);
        text
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
