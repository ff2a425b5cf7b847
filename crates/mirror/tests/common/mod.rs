//! A network namespace, a mirror in it, scripted guests, and their expected state.

#![allow(dead_code, reason = "each test file uses its part")]

pub mod guest;
pub mod reference;

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use pdp_proto::channel::Channel;
use pdp_proto::mirror::{
    HookPolicy, MirrorConfig, MirrorReply, MirrorRequest, MirrorRoute, MirrorStatusReply,
    TableSource,
};

/// Longest wait for "eventually", also on a machine with other load.
pub const EVENTUALLY: Duration = Duration::from_secs(60);

/// A network namespace with `vports` veth pairs: `e0..` are the vports, `x0..` their peers.
pub struct Netns {
    pub name: String,
    pub vports: usize,
}

impl Netns {
    pub fn new(vports: usize) -> Self {
        let netns = Self::named(vports);
        run("ip", &["netns", "add", &netns.name]);
        netns.furnish();
        netns
    }

    /// The network namespace of a process.
    pub fn of_process(vports: usize, pid: u32) -> Self {
        let netns = Self::named(vports);
        run("ip", &["netns", "attach", &netns.name, &pid.to_string()]);
        netns.furnish();
        netns
    }

    fn named(vports: usize) -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        Self { name: format!("pdp-mirror-{}-{count}", std::process::id()), vports }
    }

    fn furnish(&self) {
        self.sysctl("net.ipv4.ip_forward=1");
        self.sysctl("net.ipv6.conf.all.forwarding=1");
        self.ip("link set lo up");
        for i in 0..self.vports {
            self.ip(&format!("link add e{i} type veth peer name x{i}"));
            self.ip(&format!("link set x{i} up"));
            self.ip(&format!("link set e{i} up"));
            self.addresses(i);
        }
    }

    /// Adds the addresses of a vport: 172.16.N.1/24 and fd00:N::1/64.
    pub fn addresses(&self, vport: usize) {
        self.try_ip(&format!("addr add 172.16.{vport}.1/24 brd + dev e{vport}"));
        self.try_ip(&format!("-6 addr add fd00:{vport}::1/64 dev e{vport} nodad"));
    }

    pub fn ip(&self, arguments: &str) -> String {
        let output = self.try_ip(arguments);
        assert!(output.status.success(), "ip {arguments}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    pub fn try_ip(&self, arguments: &str) -> Output {
        let words = arguments.split_whitespace();
        Command::new("ip").args(["-n", &self.name]).args(words).output().unwrap()
    }

    pub fn batch(&self, lines: &str) {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), lines).unwrap();
        let path = file.path().to_str().unwrap();
        run("ip", &["-n", &self.name, "-force", "-batch", path]);
    }

    pub fn sysctl(&self, setting: &str) {
        run("ip", &["netns", "exec", &self.name, "sysctl", "-qw", setting]);
    }

    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.name, program]);
        command
    }
}

impl Drop for Netns {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["netns", "del", &self.name]).output();
    }
}

pub fn run(program: &str, arguments: &[&str]) {
    let output = Command::new(program).args(arguments).output().unwrap();
    assert!(output.status.success(), "{program} {arguments:?}: {output:?}");
}

/// Process that ends with its owner.
pub struct Process(pub Child);

impl Process {
    pub fn signal(&self, signal: &str) {
        run("kill", &[signal, &self.0.id().to_string()]);
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A mirror of a namespace.
pub struct Mirror {
    pub config: MirrorConfig,
    pub process: Process,
    directory: tempfile::TempDir,
}

impl Mirror {
    pub fn new(netns: &Netns) -> Self {
        Self::with(netns, u64::MAX, &[])
    }

    pub fn with(netns: &Netns, routes_max: u64, settings: &[(&str, usize)]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let mut config = Self::config(netns, directory.path(), routes_max);
        // This one is in the configuration.
        let receive = settings.iter().find(|(name, _)| *name == "RECEIVE");
        config.receive_bytes = receive.map_or(config.receive_bytes, |(_, bytes)| *bytes as u64);
        Self::start(config, directory, settings)
    }

    fn config(netns: &Netns, directory: &Path, routes_max: u64) -> MirrorConfig {
        MirrorConfig {
            netns: PathBuf::from("/run/netns").join(&netns.name),
            userns: None,
            vports: (0..netns.vports).map(|i| format!("e{i}")).collect(),
            routes_socket: directory.join("routes.sock"),
            control_socket: directory.join("control.sock"),
            routes_max,
            receive_bytes: 64 << 20,
            hooks: HookPolicy::Strict,
        }
    }

    fn start(
        config: MirrorConfig,
        directory: tempfile::TempDir,
        settings: &[(&str, usize)],
    ) -> Self {
        let process = spawn(&config, directory.path(), settings);
        Self { config, process, directory }
    }

    /// Starts a mirror that reports hooks but lets guests forward anyway.
    pub fn ignoring(netns: &Netns) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let config = Self::config(netns, directory.path(), u64::MAX);
        Self::start(MirrorConfig { hooks: HookPolicy::Ignore, ..config }, directory, &[])
    }

    /// Starts a mirror in the namespaces of a process.
    pub fn of_process(netns: &Netns, pid: u32) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let mut config = Self::config(netns, directory.path(), u64::MAX);
        config.netns = format!("/proc/{pid}/ns/net").into();
        config.userns = Some(format!("/proc/{pid}/ns/user").into());
        Self::start(config, directory, &[])
    }

    /// Kills the process and starts another in its place.
    pub fn restart(&mut self) {
        self.process = {
            let _ = self.process.0.kill();
            let _ = self.process.0.wait();
            spawn(&self.config, self.directory.path(), &[])
        };
    }

    pub fn channel(&self) -> Channel {
        let channel = Channel::connect(&self.config.control_socket).unwrap();
        channel.stream().set_read_timeout(Some(EVENTUALLY * 2)).unwrap();
        channel
    }

    pub fn status(&self) -> MirrorStatusReply {
        let mut channel = self.channel();
        channel.send(&MirrorRequest::Status, &[]).unwrap();
        match channel.receive().unwrap().unwrap().0 {
            MirrorReply::Status(status) => status,
            other => panic!("{other:?}"),
        }
    }

    pub fn routes(
        &self,
        source: TableSource,
        within: Option<&str>,
    ) -> Result<Vec<MirrorRoute>, String> {
        let within = within.map(|prefix| prefix.parse().unwrap());
        let mut channel = self.channel();
        channel.send(&MirrorRequest::Routes { source, within }, &[]).unwrap();
        let mut rows = Vec::new();
        loop {
            match channel.receive().unwrap().unwrap().0 {
                MirrorReply::Routes(mut part) => rows.append(&mut part),
                MirrorReply::End => return Ok(rows),
                MirrorReply::Failed { error } => return Err(error),
                other => panic!("{other:?}"),
            }
        }
    }

    pub fn memory_bytes(&self) -> u64 {
        let path = format!("/proc/{}/status", self.process.0.id());
        let text = std::fs::read_to_string(path).unwrap();
        let line = text.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
    }
}

fn spawn(config: &MirrorConfig, directory: &Path, settings: &[(&str, usize)]) -> Process {
    let path = directory.join("mirror.json");
    std::fs::write(&path, serde_json::to_vec(config).unwrap()).unwrap();
    for socket in [&config.routes_socket, &config.control_socket] {
        let _ = std::fs::remove_file(socket);
    }
    let mut command = Command::new(binary());
    command.arg("--config").arg(&path).stdin(Stdio::null());
    for (name, bytes) in settings {
        command.env(format!("PDP_MIRROR_{name}_BYTES"), bytes.to_string());
    }
    let process = Process(command.spawn().unwrap());
    // The socket appears a moment before the mirror listens.
    eventually("the mirror listens", || Channel::connect(&config.control_socket).is_ok());
    process
}

/// Path of the mirror's binary: from the environment, or from
/// cargo in tests, or beside an example's directory.
fn binary() -> PathBuf {
    let given = std::env::var_os("PDP_MIRROR_BINARY").map(PathBuf::from);
    let beside = || std::env::current_exe().unwrap().ancestors().nth(2).unwrap().join("pdp-mirror");
    given.or(option_env!("CARGO_BIN_EXE_pdp-mirror").map(PathBuf::from)).unwrap_or_else(beside)
}

/// Returns `count` prefixes of 32 bits from 20.0.0.0 on, as lines for `ip -batch`.
pub fn many(verb: &str, count: u32, rest: &str) -> String {
    (0..count)
        .map(|i| {
            let [a, b, c, d] = (0x1400_0000 + i * 3).to_be_bytes();
            format!("route {verb} {a}.{b}.{c}.{d}/32 {rest}\n")
        })
        .collect()
}

/// Waits until `holds`.
pub fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + EVENTUALLY;
    while !holds() {
        assert!(Instant::now() < end, "not within {EVENTUALLY:?}: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}
