//! The node, controlled only through the `pdp` command.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use pdp_api::{NodeStats, RouteEntry, Stats, SubstrateStatus, VnetStatus};
use pdp_testbed::{PdpNode, bin, finish};
use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::paths;

/// File with the output of `pdp up`, in the run directory.
const UP_LOG: &str = "up.log";

/// The node.
pub struct DemoNode(PdpNode);

impl DemoNode {
    /// The demo's node, with the `pdp` command beside this program.
    pub fn new() -> Self {
        Self(paths::pdp_node())
    }

    /// Command line that reaches the node, for users.
    pub fn command_line(&self) -> String {
        format!("{} --socket {}", bin("pdp").display(), self.0.socket().display())
    }

    /// Returns the command of a verb, without running it.
    pub fn command(&self, words: &[&str]) -> Command {
        let mut command = self.0.pdp_command(words);
        command.stdin(Stdio::null());
        command
    }

    /// Runs a verb to its end, and returns its output.
    pub fn pdp(&self, words: &[&str]) -> Result<String> {
        Ok(finish(&mut self.command(words))?)
    }

    /// Applies these YAML documents.
    pub fn apply(&self, yaml: &str) -> Result<()> {
        self.0.try_apply(yaml)?;
        Ok(())
    }

    /// Starts the daemon unless it runs, and brings the spec up, if given.
    pub fn up(&self, spec: Option<&Path>) -> Result<()> {
        let arguments = self.0.daemon_arguments().join(" ");
        // The daemon must not inherit a pipe whose end this program waits for.
        let log = logfile()?;
        let up = self.command(&["up", "--daemon-args", &arguments]);
        // The daemon runs in the namespace that it is started in.
        let status = paths::node()
            .enter(&up.get_program().to_string_lossy())
            .args(up.get_args())
            .args(spec.iter().flat_map(|spec| [Path::new("-f"), spec]))
            .env("NO_COLOR", "1")
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .status()?;
        let output = std::fs::read_to_string(paths::run().join(UP_LOG)).unwrap_or_default();
        ensure!(status.success(), "pdp up: {status}\n{}", output.trim_end());
        Ok(())
    }

    /// Stops the node and removes its state.
    pub fn down(&self) -> Result<()> {
        if self.0.socket().exists() {
            self.pdp(&["down", "--purge"])?;
        }
        for directory in [paths::run(), paths::state()] {
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

    /// Status of a vnet.
    pub fn inspect(&self, vnet: &str) -> Result<VnetStatus> {
        self.status(vnet)
    }

    /// Status of the substrate.
    pub fn substrate(&self) -> Result<SubstrateStatus> {
        self.status("substrate")
    }

    fn status<T: DeserializeOwned>(&self, name: &str) -> Result<T> {
        /// Applied object with its status.
        #[derive(Deserialize)]
        struct Inspected<T> {
            status: T,
        }
        let text = self.pdp(&["inspect", name, "--format", "json"])?;
        let inspected: Inspected<T> = serde_json::from_str(&text)
            .with_context(|| format!("pdp inspect {name} --format json"))?;
        Ok(inspected.status)
    }

    /// Calls `each` with every route of a forwarding guest.
    pub fn routes(
        &self,
        router: &str,
        guest: u32,
        mut each: impl FnMut(RouteEntry) -> Result<()>,
    ) -> Result<()> {
        let number = guest.to_string();
        let mut child = self
            .command(&["routes", router, "--guest", &number, "--format", "json"])
            .stdout(Stdio::piped())
            .spawn()?;
        let pipe = child.stdout.take().context("pdp routes")?;
        // One row per line of a JSON list, so that a million rows are never in memory at once.
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

    /// The kernel's counters of a node's interfaces, by name.
    pub fn kernel_counters(&self, node: &str) -> Result<BTreeMap<String, InterfaceCounts>> {
        let text = self.exec(node, &["cat", "/proc/net/dev"])?;
        Ok(interface_counters(&text))
    }
}

fn logfile() -> Result<std::fs::File> {
    std::fs::create_dir_all(paths::run())?;
    Ok(std::fs::File::create(paths::run().join(UP_LOG))?)
}

/// The kernel's counters of an interface, in packets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InterfaceCounts {
    /// Received.
    pub received: u64,
    /// Sent.
    pub sent: u64,
    /// Dropped, in both directions.
    pub dropped: u64,
}

/// Counters by interface, from /proc/net/dev.
pub fn interface_counters(text: &str) -> BTreeMap<String, InterfaceCounts> {
    let mut counters = BTreeMap::new();
    for line in text.lines() {
        let Some((name, numbers)) = line.split_once(':') else { continue };
        let numbers: Vec<u64> =
            numbers.split_whitespace().filter_map(|number| number.parse().ok()).collect();
        if let [_, received, _, receive_dropped, _, _, _, _, _, sent, _, send_dropped, ..] =
            numbers[..]
        {
            let dropped = receive_dropped + send_dropped;
            counters.insert(name.trim().to_owned(), InterfaceCounts { received, sent, dropped });
        }
    }
    counters
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_kernel_interface_counters() {
        let text = "Inter-|   Receive                            |  Transmit\n \
            face |bytes packets errs drop fifo frame compressed multicast|bytes packets errs\n \
            eth0:  1296      16    0    3    0     0          0         0     2370   31    0 4 0 0 0 0\n";
        let eth0 = InterfaceCounts { received: 16, sent: 31, dropped: 7 };
        assert_eq!(interface_counters(text)["eth0"], eth0);
    }
}
