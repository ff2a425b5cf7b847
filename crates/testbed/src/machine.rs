//! Machines: network namespaces to run commands in.

use std::fs::{self, File};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::{Background, CommandError, POLL_PAUSE, enter, finish, kill, output_of, try_sh};

/// Longest wait for killed processes to end. One with a large route table takes a moment.
const END_MAX: Duration = Duration::from_secs(20);

/// A network namespace to run commands in: an external machine, or the node's own.
#[derive(Clone, Debug)]
pub struct TestMachine {
    /// Network namespace.
    pub netns: String,
}

impl TestMachine {
    /// Makes a network namespace of this name, with its loopback interface up.
    pub fn make(netns: String) -> Result<Self, CommandError> {
        try_sh(&format!("ip netns add {netns}; ip -n {netns} link set lo up"))?;
        Ok(Self { netns })
    }

    /// Makes a veth pair: `device` here, and `peer` on another machine. Both are up, with these
    /// settings of `ethtool -K` (`tx off`).
    pub fn connect(
        &self,
        device: &str,
        (other, peer): (&Self, &str),
        offloads: &str,
    ) -> Result<(), CommandError> {
        let (here, there) = (&self.netns, &other.netns);
        try_sh(&format!(
            "ip link add {device} netns {here} type veth peer name {peer} netns {there}
             ip -n {here} link set {device} up
             ip -n {there} link set {peer} up
             nsenter --net=/run/netns/{here} ethtool -K {device} {offloads}
             nsenter --net=/run/netns/{there} ethtool -K {peer} {offloads}"
        ))
        .map(drop)
    }

    /// Returns a command in this namespace, which sees its own /sys.
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.netns, program]);
        command
    }

    /// Returns a command in this namespace with this program's mounts; see [`enter`].
    pub fn enter(&self, program: &str) -> Command {
        enter(&format!("/run/netns/{}", self.netns), program)
    }

    /// Runs a command here, with this program's mounts, to its end. Returns its output as error on
    /// failure.
    pub fn finish(&self, words: &[&str]) -> Result<String, CommandError> {
        finish(self.enter(words[0]).args(&words[1..]))
    }

    /// Starts a program here, with this program's mounts, with its output in a file. It outlives
    /// this program.
    pub fn background(&self, words: &[&str], log: &Path) -> Result<Child> {
        let log = File::create(log).with_context(|| format!("log {}", log.display()))?;
        let mut command = self.enter("setsid");
        command.args(words).stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        command.spawn().with_context(|| words.join(" "))
    }

    /// Runs a shell line here; panics if it fails.
    #[track_caller]
    pub fn run(&self, line: &str) -> String {
        self.try_run(line).unwrap_or_else(|error| panic!("{error}"))
    }

    /// Runs a shell line here. Returns its output as error on failure.
    pub fn try_run(&self, line: &str) -> Result<String, CommandError> {
        output_of(self.command("sh").args(["-ec", line]), "")
    }

    /// Starts a shell line here in the background; killed when dropped.
    #[track_caller]
    pub fn spawn(&self, line: &str) -> Background {
        let mut command = self.command("sh");
        Background::start(command.args(["-ec", &format!("exec {line}")]))
    }
}

/// Kills every process in these machines, and removes their network namespaces. Continues after
/// failures, and returns them all.
pub fn remove_machines(names: &[String]) -> Result<()> {
    let mut pids: Vec<u32> = Vec::new();
    for netns in names {
        let text = try_sh(&format!("ip netns pids {netns}")).unwrap_or_default();
        pids.extend(text.split_whitespace().filter_map(|pid| pid.parse::<u32>().ok()));
    }
    pids.iter().for_each(|pid| kill(*pid));
    let mut failed = Vec::new();
    // A process that still has its memory has a command line; a zombie has none.
    let runs = |pid: &u32| fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|it| !it.is_empty());
    let end = Instant::now() + END_MAX;
    while pids.iter().any(runs) && Instant::now() < end {
        std::thread::sleep(POLL_PAUSE);
    }
    pids.retain(runs);
    if !pids.is_empty() {
        failed.push(format!("processes survived SIGKILL for {END_MAX:?}: {pids:?}"));
    }
    let deleted = names.iter().map(|netns| try_sh(&format!("ip netns delete {netns}")));
    failed.extend(deleted.filter_map(|deleted| deleted.err()).map(String::from));
    if failed.is_empty() { Ok(()) } else { bail!("{}", failed.join("\n")) }
}
