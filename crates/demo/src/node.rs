//! The node, driven through the `pdp` command alone.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use pdp_api::{NodeStats, RouteRow, Stats, SubstrateStatus, VnetStatus};
use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::{place, shell};

/// What `pdp up` said, in the run directory.
const UP_LOG: &str = "up.log";

/// The node.
pub struct Node {
    pdp: PathBuf,
}

impl Node {
    /// The node, with the `pdp` command that is beside this program.
    pub fn new() -> Result<Self> {
        let here = std::env::current_exe()?;
        let directory = here.parent().context("this program's directory")?;
        let pdp = directory.join("pdp");
        ensure!(pdp.exists(), "{} is missing; run `make` first", pdp.display());
        Ok(Self { pdp })
    }

    /// Where the daemon listens.
    pub fn socket() -> String {
        place::run().join("pdpd.sock").to_string_lossy().into_owned()
    }

    /// What a user types to reach the node.
    pub fn command_line(&self) -> String {
        format!("{} --socket {}", self.pdp.display(), Self::socket())
    }

    /// A verb to run by oneself.
    pub fn command(&self, words: &[&str]) -> Command {
        let pdp = self.pdp.to_string_lossy();
        let socket = Self::socket();
        let words = [&[&*pdp, "--socket", &*socket], words].concat();
        let mut command = shell::command(Some(&place::node()), &words);
        command.env("NO_COLOR", "1");
        command
    }

    /// Runs a verb to its end.
    pub fn pdp(&self, words: &[&str]) -> Result<String> {
        let shown = [&["pdp"], words].concat();
        shell::finish(&mut self.command(words), &shown)
    }

    /// Starts the daemon where it does not run, and brings the spec up, if there is one.
    pub fn up(&self, spec: Option<&Path>) -> Result<()> {
        let (base, state) = (place::base(), place::state());
        let arguments = format!(
            "--state-dir {} --cgroup {base} --bpf-pin-dir /sys/fs/bpf/{base}",
            state.display()
        );
        // A daemon inherits no pipe of ours that we would wait for.
        let log = logfile()?;
        let status = self
            .command(&["up", "--daemon-args", &arguments])
            .args(spec.iter().flat_map(|spec| [Path::new("-f"), spec]))
            .stdout(log.try_clone()?)
            .stderr(log)
            .status()?;
        let said = std::fs::read_to_string(place::run().join(UP_LOG)).unwrap_or_default();
        ensure!(status.success(), "pdp up: {status}\n{}", said.trim_end());
        Ok(())
    }

    /// Stops the node and forgets it.
    pub fn down(&self) -> Result<()> {
        if Path::new(&Self::socket()).exists() {
            self.pdp(&["down", "--purge"])?;
        }
        for directory in [place::run(), place::state()] {
            if directory.exists() {
                std::fs::remove_dir_all(&directory)
                    .with_context(|| format!("remove {}", directory.display()))?;
            }
        }
        Ok(())
    }

    /// Runs a command in a node of a vnet.
    pub fn exec(&self, node: &str, words: &[&str]) -> Result<String> {
        self.pdp(&[&["exec", "--no-stdin", node, "--"], words].concat())
    }

    /// All counters.
    pub fn stats(&self) -> Result<Stats> {
        let text = self.pdp(&["stats", "--format", "json"])?;
        serde_json::from_str(&text).context("pdp stats --format json")
    }

    /// Counters of one node.
    pub fn stats_of(&self, vnet: &str, node: &str) -> Result<NodeStats> {
        let mut stats = self.stats()?;
        let vnet_stats = stats.vnets.get_mut(vnet);
        let found = vnet_stats.and_then(|stats| stats.nodes.remove(node));
        found.with_context(|| format!("no counters of {vnet}/{node}"))
    }

    /// How a vnet is.
    pub fn inspect(&self, vnet: &str) -> Result<VnetStatus> {
        self.status(vnet)
    }

    /// How the substrate is.
    pub fn substrate(&self) -> Result<SubstrateStatus> {
        self.status("substrate")
    }

    fn status<T: DeserializeOwned>(&self, name: &str) -> Result<T> {
        /// The object as it was applied, with its status.
        #[derive(Deserialize)]
        struct Inspected<T> {
            status: T,
        }
        let text = self.pdp(&["inspect", name, "--format", "json"])?;
        let inspected: Inspected<T> = serde_json::from_str(&text)
            .with_context(|| format!("pdp inspect {name} --format json"))?;
        Ok(inspected.status)
    }

    /// Calls `each` with every route that a forwarding guest uses.
    pub fn routes(
        &self,
        router: &str,
        guest: u32,
        mut each: impl FnMut(RouteRow) -> Result<()>,
    ) -> Result<()> {
        let number = guest.to_string();
        let mut child = self
            .command(&["routes", router, "--guest", &number, "--format", "json"])
            .stdout(Stdio::piped())
            .spawn()?;
        let pipe = child.stdout.take().context("pdp routes")?;
        // One row a line of a JSON list, so that a million rows are never in memory at once.
        for line in BufReader::new(pipe).lines() {
            let line = line?;
            let row = line.trim().trim_start_matches(['[', ',']).trim_end_matches([']', ',']);
            if !row.is_empty() {
                each(serde_json::from_str(row).with_context(|| format!("route {row}"))?)?;
            }
        }
        let status = child.wait()?;
        if status.success() {
            Ok(())
        } else {
            bail!("pdp routes {router} --guest {guest}: {status}")
        }
    }

    /// What the kernel counted on a node's interfaces, by name.
    pub fn kernel_counters(&self, node: &str) -> Result<BTreeMap<String, Interface>> {
        let text = self.exec(node, &["cat", "/proc/net/dev"])?;
        Ok(interface_counters(&text))
    }
}

fn logfile() -> Result<std::fs::File> {
    std::fs::create_dir_all(place::run())?;
    Ok(std::fs::File::create(place::run().join(UP_LOG))?)
}

/// What the kernel counts of an interface, in packets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Interface {
    /// Received.
    pub received: u64,
    /// Sent.
    pub sent: u64,
    /// Dropped, of both.
    pub dropped: u64,
}

/// Counters by interface, from /proc/net/dev.
pub fn interface_counters(text: &str) -> BTreeMap<String, Interface> {
    let mut counters = BTreeMap::new();
    for line in text.lines() {
        let Some((name, numbers)) = line.split_once(':') else { continue };
        let numbers: Vec<u64> =
            numbers.split_whitespace().filter_map(|number| number.parse().ok()).collect();
        if let [_, received, _, receive_dropped, _, _, _, _, _, sent, _, send_dropped, ..] =
            numbers[..]
        {
            let dropped = receive_dropped + send_dropped;
            counters.insert(name.trim().to_owned(), Interface { received, sent, dropped });
        }
    }
    counters
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_counters_are_read() {
        let text = "Inter-|   Receive                            |  Transmit\n \
            face |bytes packets errs drop fifo frame compressed multicast|bytes packets errs\n \
            eth0:  1296      16    0    3    0     0          0         0     2370   31    0 4 0 0 0 0\n";
        let eth0 = Interface { received: 16, sent: 31, dropped: 7 };
        assert_eq!(interface_counters(text)["eth0"], eth0);
    }
}
