//! A PdP node whose mux makes the frames itself and drops them again. So this measures only the
//! routers, from port to port, and needs no other CPU.
//!
//! The generator feeds frames in before classification; its cycles count as the mux's. Between
//! measurements it is a sink without frames, so that nothing polls.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use pdp_api::Stats;
use pdp_testbed::TemporaryNode;
use pdp_testbed::meter::Clock;
use pdp_wire::outer;

use crate::peers::pdp::{Design, ExternalDriver, Pdp};
use crate::reading::Reading;
use crate::site::{Prefix, stream};
use crate::stream::{FrameStream, NUMBER_AT};

/// Frames that the generator repeats, as a pcap file of at most 10 MiB.
const PCAP_BYTES_MAX: usize = 10 << 20;
const PCAP_HEADER_BYTES: usize = 24;
const PCAP_RECORD_BYTES: usize = 16;

/// Frames that come through tunnels. The same number for
/// any number of tunnels, so that caches behave alike.
const FRAMES_TUNNELLED: usize = 2048;

/// Time before the measurement.
const WARM_UP: Duration = Duration::from_millis(200);

/// A running node with a router between two generators.
#[derive(Debug)]
pub struct ForwardingTestbed {
    node: TemporaryNode,
    design: Design,
    stream: FrameStream,
    frames: PathBuf,
    pdp: Pdp,
}

/// Result of a load.
#[derive(Clone, Debug)]
pub struct LoadResult {
    /// Frames made per second.
    pub offered_pps: f64,
    /// Frames forwarded per second.
    pub rate_pps: f64,
    /// Percentage of these whose number was lower than an earlier one's.
    pub reordered_percent: f64,
    /// Cycles of mux and guests per forwarded frame.
    pub cycles: f64,
    /// CPU time that each guest's cgroup used, percent of its quota.
    pub of_quota: Vec<f64>,
    /// Frames forwarded per second of the guests' CPU time.
    pub rate_pgps: f64,
    /// Frames dropped, by reason.
    pub dropped: BTreeMap<String, u64>,
}

impl LoadResult {
    /// Converts to figures.
    pub fn readings(&self) -> Vec<Reading> {
        let rate = Reading::new("rate", self.rate_pps / 1e6, "Mpps");
        vec![
            rate.cycles(self.cycles).notes(self.notes()),
            Reading::new("offered", self.offered_pps / 1e6, "Mpps"),
            Reading::new("loss", self.loss(), "%"),
            Reading::new("late", self.reordered_percent, "%"),
        ]
    }

    /// Percentage of the made frames that were not forwarded.
    pub fn loss(&self) -> f64 {
        (1.0 - self.rate_pps / self.offered_pps.max(1.0)).max(0.0) * 100.0
    }

    /// Reasons for drops, if any.
    pub fn notes(&self) -> String {
        match &*self.dropped.keys().map(String::as_str).collect::<Vec<_>>().join(", ") {
            "" => String::new(),
            reasons => format!("dropped: {reasons}"),
        }
    }

    /// Converts to figures, including those of guests with a share of a core.
    pub fn readings_of_capped(&self) -> Vec<Reading> {
        let mut readings = self.readings();
        let rate = self.rate_pgps / 1e6;
        readings.push(Reading::new("rate for a guest's CPU second", rate, "million"));
        let least = self.of_quota.iter().copied().fold(f64::INFINITY, f64::min);
        let most = self.of_quota.iter().copied().fold(0.0, f64::max);
        readings.push(Reading::new(
            "CPU time of the guest that had least",
            least,
            "% of its quota",
        ));
        readings.push(Reading::new("CPU time of the guest that had most", most, "% of its quota"));
        readings
    }
}

impl ForwardingTestbed {
    /// Starts it with these routes, for frames of `bytes` bytes without FCS to random destinations.
    pub fn start(design: Design, prefixes: &[Prefix], bytes: usize) -> Result<Self> {
        Self::start_with(design, prefixes, stream(prefixes, bytes))
    }

    /// Directory of a virtual network's node.
    pub fn place(&self, name: &str) -> PathBuf {
        self.node.socket_directory(name)
    }

    /// Starts it for these frames.
    pub fn start_with(design: Design, prefixes: &[Prefix], stream: FrameStream) -> Result<Self> {
        let node = TemporaryNode::start("bed");
        let frames = node.directory.join("frames.pcap");
        let pdp = Pdp::start(&node, &design, &interfaces(&design, ""))?;
        pdp.add_routes(&node, prefixes)?;
        let bed = Self { node, design, stream, frames, pdp };
        bed.aim(bed.design.vnets)?;
        Ok(bed)
    }

    /// Directs the frames to the first `vnets` virtual networks from now on.
    pub fn aim(&self, vnets: usize) -> Result<()> {
        let tunnels = self.design.tunnels(vnets)?;
        let outer = tunnels.first().map_or(0, outer::HeaderTemplate::len);
        let most =
            (PCAP_BYTES_MAX - PCAP_HEADER_BYTES) / (outer + self.stream.bytes + PCAP_RECORD_BYTES);
        let count = match tunnels.len() {
            0 => self.stream.destinations.len(),
            _ => FRAMES_TUNNELLED,
        };
        self.stream.write_pcap(&self.frames, count.min(most), &tunnels)
    }

    /// Offers `pps` frames per second, or as many as possible (0), for `time`.
    pub fn offer(&self, pps: u64, time: Duration, clock: &Clock) -> Result<LoadResult> {
        let frames = format!("frames: {}, ", self.frames.display());
        let pps = if pps > 0 { format!("pps: {pps}, ") } else { String::new() };
        self.node.apply(&self.design.substrate(&interfaces(&self.design, &(frames + &pps))));
        std::thread::sleep(WARM_UP);
        let before = self.stats()?;
        let meter = clock.start(&self.pdp.processes, false);
        let (guests_before, start) = (self.pdp.guests_cpu_seconds()?, Instant::now());
        std::thread::sleep(time);
        let (guests_after, metered) =
            (self.pdp.guests_cpu_seconds()?, start.elapsed().as_secs_f64());
        let cycles = clock.stop(meter);
        let after = self.stats()?;
        self.node.apply(&self.design.quiet().substrate(&interfaces(&self.design, "")));
        let seconds = after.at_ns.saturating_sub(before.at_ns) as f64 / 1e9;
        let count = |of: fn(&pdp_api::ExternalStats) -> u64, side: char| -> f64 {
            let sum = |stats: &Stats| -> u64 {
                let own = stats.externals.iter().filter(|(name, _)| name.starts_with(side));
                own.map(|(_, external)| of(external)).sum()
            };
            sum(&after).saturating_sub(sum(&before)) as f64
        };
        let received = count(|external| external.sent, 'B');
        ensure!(received > 0.0, "no frame came out");
        let guests: Vec<f64> =
            guests_after.iter().zip(&guests_before).map(|(after, before)| after - before).collect();
        let quotas = self.design.guests.iter().cycle().map(|power| f64::from(*power) / 1e3);
        Ok(LoadResult {
            offered_pps: count(|external| external.received, 'A') / seconds,
            rate_pps: received / seconds,
            reordered_percent: count(|external| external.late, 'B') / received * 100.0,
            cycles: (cycles.user + cycles.kernel) / received * seconds / metered,
            of_quota: guests.iter().zip(quotas).map(|(s, q)| s / metered / q * 100.0).collect(),
            rate_pgps: received / seconds * metered / guests.iter().sum::<f64>(),
            dropped: dropped(&before, &after),
        })
    }

    fn stats(&self) -> Result<Stats> {
        serde_json::from_value(self.node.json(&["stats"])).context("pdp stats --format json")
    }
}

/// The interfaces A as generators with these settings, and B as sinks. Frames in UDP over IPv6 have
/// no numbers, which would invalidate the checksum.
fn interfaces(design: &Design, source: &str) -> String {
    let numbered = design.carriers[0] != ExternalDriver::Vxlan6;
    let [at_a, at_b] = design.carriers.map(|carrier| {
        let at = NUMBER_AT + carrier.bytes();
        if numbered { format!("numberAt: {at}") } else { String::new() }
    });
    format!(
        "    A0: {{generator: {{{source}{at_a}}}}}\n    \
             B0: {{generator: {{{at_b}}}}}\n"
    )
}

/// Frames dropped between two moments, by reason.
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
