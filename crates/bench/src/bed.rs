//! A PdP node whose mux makes the frames itself and ends them again: the router alone is measured,
//! from port to port, and no other CPU is needed.
//!
//! The generator enters before classification; its cycles are the mux's. Between measurements it is
//! a sink without frames, so that nothing polls.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use pdp_api::Stats;
use pdp_e2e::meter::{self, Clock};
use pdp_e2e::{Node, eventually};

use crate::peers::kernel;
use crate::peers::pdp::wait_for_routes;
use crate::run::Reading;
use crate::site::{MAC_A, MAC_B, MAC_MIDDLE_A, MAC_MIDDLE_B, Prefix, stream, words};
use crate::stream::NUMBER_AT;

/// Frames that the generator repeats, as a pcap file of at most 10 MiB.
const PCAP_BYTES_MAX: usize = 10 << 20;
const PCAP_HEADER_BYTES: usize = 24;
const PCAP_RECORD_BYTES: usize = 16;

/// Time before what counts.
const WARM_UP: Duration = Duration::from_millis(500);

/// What is put up.
#[derive(Clone, Debug)]
pub struct Design {
    /// CPU of the mux.
    pub mux: usize,
    /// CPU of all guests.
    pub guest: usize,
    /// Power of each guest, thousandths of a core.
    pub guests: Vec<u32>,
    /// How frames are shared out.
    pub policy: &'static str,
    /// Frames that each guest's rings hold.
    pub queue: u32,
    /// Length of a frame without check sequence, bytes.
    pub bytes: usize,
}

/// A running node with a router between two generators.
#[derive(Debug)]
pub struct Bed {
    node: Node,
    design: Design,
    frames: PathBuf,
    mux: u32,
    guests: Vec<u32>,
}

/// What came of a load.
#[derive(Clone, Debug)]
pub struct Passed {
    /// Frames a second that were made.
    pub offered_pps: f64,
    /// Frames a second that came out.
    pub rate_pps: f64,
    /// Of these: with a number lower than one that had come before, percent.
    pub late: f64,
    /// Cycles a frame that came out, of mux and guests.
    pub cycles: f64,
    /// Cores that the mux and each guest used.
    pub cores: Vec<f64>,
    /// Frames dropped, by reason.
    pub dropped: BTreeMap<String, u64>,
}

impl Passed {
    /// As figures.
    pub fn readings(&self) -> Vec<Reading> {
        let cores: Vec<String> = self.cores.iter().map(|cores| format!("{cores:.2}")).collect();
        let mut notes = format!("cores used by mux and guests: {}", cores.join(", "));
        if !self.dropped.is_empty() {
            notes += &format!("; dropped {:?}", self.dropped.keys().collect::<Vec<_>>());
        }
        let loss = (1.0 - self.rate_pps / self.offered_pps.max(1.0)).max(0.0) * 100.0;
        vec![
            Reading::new("rate", self.rate_pps / 1e6, "Mpps").cycles(self.cycles).notes(notes),
            Reading::new("offered", self.offered_pps / 1e6, "Mpps"),
            Reading::new("loss", loss, "%"),
            Reading::new("late", self.late, "%"),
        ]
    }
}

impl Bed {
    /// Puts it up with these routes.
    pub fn start(design: Design, prefixes: &[Prefix]) -> Result<Self> {
        let node = Node::start("bed");
        let frames = node.directory.join("frames.pcap");
        let each = design.bytes + PCAP_RECORD_BYTES;
        let most = (PCAP_BYTES_MAX - PCAP_HEADER_BYTES) / each;
        stream(prefixes, design.bytes).write_pcap(&frames, most)?;
        let mut bed = Self { node, design, frames, mux: 0, guests: Vec::new() };
        bed.node.apply(&format!("{}---\n{}", bed.substrate(None), bed.vnet()));
        for (address, mac, device) in [("10.0.1.2", MAC_A, "eth0"), ("10.0.2.2", MAC_B, "eth1")] {
            let mac = words(mac);
            let line =
                format!("ip neigh replace {address} lladdr {mac} dev {device} nud permanent");
            bed.node.exec("bench/r1", &line);
        }
        let mut batch = bed.node.pdp_command(&["exec", "bench/r1", "--", "ip", "-batch", "-"]);
        let output = pdp_e2e::run(&mut batch, &kernel::routes(prefixes, "eth1"));
        ensure!(output.status.success(), "ip -batch: {}", String::from_utf8_lossy(&output.stderr));
        for guest in 0..bed.design.guests.len() {
            wait_for_routes(&bed.node, guest, prefixes.len())?;
        }
        let substrate = bed.node.json(&["inspect", "substrate"]);
        let mux = substrate["status"]["mux"]["pid"].as_u64().context("the mux's process")?;
        bed.mux = u32::try_from(mux)?;
        for guest in 0..bed.design.guests.len() {
            let cgroup = format!("{}/vnets/bench/r1.g{guest}/guest\n", bed.node.cgroup());
            let mut found = Vec::new();
            eventually("the guest runs", || {
                found = meter::processes("cgroup", &cgroup);
                !found.is_empty()
            });
            bed.guests.extend(found);
        }
        Ok(bed)
    }

    /// Offers so many frames a second, or as many as are taken (0), for some time.
    pub fn offer(&self, pps: u64, time: Duration, clock: &Clock) -> Result<Passed> {
        self.node.apply(&self.substrate(Some(pps)));
        std::thread::sleep(WARM_UP);
        let processes: Vec<u32> = [self.mux].iter().chain(&self.guests).copied().collect();
        let (before, start) = (self.stats()?, Instant::now());
        let meters: Vec<_> = processes.iter().map(|pid| clock.start(&[*pid], false)).collect();
        std::thread::sleep(time);
        let used: Vec<f64> = meters
            .into_iter()
            .map(|meter| clock.stop(meter))
            .map(|cycles| cycles.user + cycles.kernel)
            .collect();
        let metered = start.elapsed().as_secs_f64();
        let after = self.stats()?;
        self.node.apply(&self.substrate(None));
        let seconds = after.at_ns.saturating_sub(before.at_ns) as f64 / 1e9;
        let count = |of: fn(&pdp_api::ExternalStats) -> u64, name: &str| -> Result<f64> {
            let now = after.externals.get(name).map(of).context("no counters")?;
            let then = before.externals.get(name).map(of).context("no counters")?;
            Ok(now.saturating_sub(then) as f64)
        };
        let came = count(|external| external.sent, "B")?;
        ensure!(came > 0.0, "no frame came out");
        let hz = meter::cpu("cpu MHz").parse::<f64>()? * 1e6;
        Ok(Passed {
            offered_pps: count(|external| external.received, "A")? / seconds,
            rate_pps: came / seconds,
            late: count(|external| external.late, "B")? / came * 100.0,
            cycles: used.iter().sum::<f64>() / came * seconds / metered,
            cores: used.iter().map(|cycles| cycles / hz / metered).collect(),
            dropped: dropped(&before, &after),
        })
    }

    fn stats(&self) -> Result<Stats> {
        serde_json::from_value(self.node.json(&["stats"])).context("pdp stats --format json")
    }

    /// With a generator of so many frames a second (0: as many as go), or without.
    fn substrate(&self, pps: Option<u64>) -> String {
        let Design { mux, guest, guests, .. } = &self.design;
        let source = match pps {
            None => String::new(),
            Some(0) => format!("frames: {}, ", self.frames.display()),
            Some(pps) => format!("frames: {}, pps: {pps}, ", self.frames.display()),
        };
        let mux_power =
            if mux == guest { 1000 - guests.iter().sum::<u32>().min(900) } else { 1000 };
        let mut engines = String::new();
        for (number, power) in guests.iter().enumerate() {
            engines += &format!("    fe{number}: {{cpus: \"{guest}\", capacity: {power}m}}\n");
        }
        format!(
            r#"apiVersion: pdp/v1
kind: Substrate
metadata: {{name: node}}
spec:
  mux: {{cpus: "{mux}", power: {mux_power}m}}
  interfaces:
    A: {{generator: {{{source}numberAt: {NUMBER_AT}}}}}
    B: {{generator: {{numberAt: {NUMBER_AT}}}}}
  forwardingEngines:
{engines}"#
        )
    }

    fn vnet(&self) -> String {
        let power: u32 = self.design.guests.iter().sum();
        let (mac_a, mac_b) = (words(MAC_MIDDLE_A), words(MAC_MIDDLE_B));
        let Design { policy, queue, .. } = self.design;
        format!(
            r#"apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {{name: bench}}
spec:
  nodes:
    r1:
      kind: router
      interfaces:
        eth0: {{addresses: [10.0.1.1/24], mac: "{mac_a}"}}
        eth1: {{addresses: [10.0.2.1/24], mac: "{mac_b}"}}
      resources: {{cpu: 1, memory: 2Gi, routes: 1200000}}
      dataPlane:
        power: {power}m
        memory: 1Gi
        queue: {queue}
        split: true
        distribution: {{policy: {policy}}}
  externals: {{a: {{interface: A}}, b: {{interface: B}}}}
  links:
    - endpoints: ["r1:eth0", "external:a"]
    - endpoints: ["r1:eth1", "external:b"]
"#
        )
    }
}

/// What was dropped between two moments, by reason.
fn dropped(before: &Stats, after: &Stats) -> BTreeMap<String, u64> {
    let sums = |stats: &Stats| {
        let mut sums: BTreeMap<String, u64> = BTreeMap::new();
        let nodes = stats.vnets.values().flat_map(|vnet| vnet.nodes.values());
        for port in nodes.flat_map(|node| node.ports.values()) {
            for (reason, count) in &port.dropped {
                *sums.entry(reason.clone()).or_default() += count;
            }
        }
        sums
    };
    let then = sums(before);
    let mut now = sums(after);
    now.retain(|reason, count| {
        *count = count.saturating_sub(then.get(reason).copied().unwrap_or(0));
        *count > 0
    });
    now
}
