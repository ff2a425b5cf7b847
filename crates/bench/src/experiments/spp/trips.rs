//! Figure 10: round trips through one of eight equally loaded routers.
//!
//! The load comes from sources inside the mux and ends there, an eighth through each router. The
//! round trips use two more ports of the first router. Mux and routers have the first core. The
//! routers are the mux's fast path, the `parallel` router in a guest each, or guests whose kernel
//! forwards, in place of the paper's Click in a vServer.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Result, ensure};
use pdp_api::Stats;
use pdp_container::cgroup::Cgroups;

use crate::experiments::rtt::{ANSWER_MAX, EchoSocket};
use crate::peers::pdp::{Design, batch, site_interfaces};
use crate::run::{ExperimentRun, Reading};
use crate::site::{MAC_A, MAC_B, MAC_MIDDLE_A, MAC_MIDDLE_B, Site, words};
use crate::statistics::quantile;
use crate::stream::{FrameStream, HEADERS_BYTES};

const ROUTERS: usize = 8;

/// Payloads of the load, bytes, as in the paper, and the
/// overhead on the wire: headers, preamble, checksum, gap.
const PAYLOADS: [usize; 2] = [400, 1400];
const BESIDE_BYTES: usize = HEADERS_BYTES + 24;

/// Load of all routers, Mb/s on the wire.
const LOADS_MBPS: [u32; 7] = [0, 100, 200, 400, 800, 1600, 5000];
const LOADS_QUICK_MBPS: [u32; 2] = [0, 200];

/// MAC addresses: of a loaded router's port, and of the load's source and sink.
const MAC_IN: [u8; 6] = [2, 0, 0, 0, 7, 1];
const MAC_LOAD: [u8; 6] = [2, 0, 0, 0, 7, 2];

/// Kinds of routers: the node's keys that select them.
const KINDS: [(&str, &str); 3] = [
    ("pdp, fast path", "kind: router, dataPlane: {kind: fastpath}"),
    ("pdp, router guests", "kind: router"),
    ("kernels of guests", "kind: host, sysctls: {net.ipv4.ip_forward: 1}, resources: {cpu: 1}"),
];

/// Eight routers, with load and round trips.
struct TripTestbed {
    series: &'static str,
    echo: EchoSocket,
    site: Site,
    design: Design,
    core: usize,
    /// Frames of the load.
    frames: PathBuf,
}

impl TripTestbed {
    fn start(series: &'static str, kind: &str, core: usize) -> Result<Self> {
        let mut site = Site::make("trips");
        site.add_hosts();
        site.node.start_pdpd();
        let design = match kind.contains("fastpath") {
            true => Design::fastpath(core, 1),
            false => Design::plain(core, core),
        };
        let frames = site.node.directory.join("load.pcap");
        let echo = EchoSocket::start(&site)?;
        let bed = Self { series, echo, site, design, core, frames };
        let node = &bed.site.node;
        node.apply(&bed.substrate(""));
        let networks: Vec<_> = (0..ROUTERS).map(|number| network(number, kind)).collect();
        node.apply(&networks.join("---\n"));
        let cgroups = Cgroups::new(&node.cgroup())?;
        let neighbour = |address: &str, mac, device: &str| {
            format!("neigh replace {address} lladdr {} dev {device} nud permanent\n", words(mac))
        };
        let load = neighbour("10.2.2.2", MAC_LOAD, "eth1");
        let trips = neighbour("10.0.1.2", MAC_A, "eth2") + &neighbour("10.0.2.2", MAC_B, "eth3");
        for number in 0..ROUTERS {
            let name = name(number);
            node.pdp(&["wait", &name, "--for", "ready", "--timeout", "60s"]);
            let lines = if number == 0 { load.clone() + &trips } else { load.clone() };
            batch(&cgroups, &name, &lines)?;
        }
        Ok(bed)
    }

    /// Substrate with loads of these settings.
    fn substrate(&self, settings: &str) -> String {
        let load = |number| {
            format!(
                "    G{number}: {{generator: {{{settings}}}}}\n    S{number}: {{generator: {{}}}}\n"
            )
        };
        let loads: String = (0..ROUTERS).map(load).collect();
        // Hosts that forward in their own kernels use the same core as the mux.
        let hosts = format!("  managementHost: {{cpus: \"{}\"}}\n", self.core);
        self.design.substrate(&(site_interfaces("af-xdp") + &loads)) + &hosts
    }

    /// Frames of the load forwarded so far, and the time of reading, nanoseconds.
    fn forwarded(&self) -> Result<(u64, u64)> {
        let stats: Stats = serde_json::from_value(self.site.node.json(&["stats"]))?;
        let sinks = stats.externals.iter().filter(|(name, _)| name.starts_with('S'));
        Ok((sinks.map(|(_, sink)| sink.sent).sum(), stats.at_ns))
    }

    /// Round trips beside a load, microseconds, sorted, and the forwarded percentage of the load.
    fn trips(&self, mbps: u32, payload: usize, time: Duration) -> Result<(Vec<f64>, f64)> {
        write_load(&self.frames, payload)?;
        let wire_bits = (payload + BESIDE_BYTES) as u64 * 8;
        let pps = u64::from(mbps) * 1_000_000 / wire_bits / ROUTERS as u64;
        let settings = match pps {
            0 => String::new(),
            pps => format!("frames: {}, pps: {pps}", self.frames.display()),
        };
        self.site.node.apply(&self.substrate(&settings));
        let (before, since_ns) = self.forwarded()?;
        let times = self.echo.trips_for(time);
        let (after, until_ns) = self.forwarded()?;
        self.site.node.apply(&self.substrate(""));
        let times = times?;
        ensure!(times.len() > 1, "no round trips");
        let due = (pps * ROUTERS as u64) as f64 * until_ns.saturating_sub(since_ns) as f64 / 1e9;
        let percent = if due > 0.0 { (after - before) as f64 / due * 100.0 } else { 100.0 };
        Ok((times, percent))
    }
}

fn name(number: usize) -> String {
    format!("load{number}")
}

fn write_load(path: &Path, payload: usize) -> Result<()> {
    let stream = FrameStream {
        to_mac: MAC_IN,
        from_mac: MAC_LOAD,
        source: [10, 2, 1, 2],
        destinations: vec![[20, 0, 0, 7]],
        bytes: HEADERS_BYTES + payload,
    };
    stream.write_pcap(path, 1, &[])
}

/// Network of a router. The load comes by `eth0` and leaves by `eth1`; the first router has two
/// more ports for round trips.
fn network(number: usize, kind: &str) -> String {
    let mac = words(MAC_IN);
    let mut interfaces = format!(
        "eth0: {{addresses: [10.2.1.1/24], mac: \"{mac}\"}}, eth1: {{addresses: [10.2.2.1/24]}}"
    );
    let mut externals = format!("g: {{interface: G{number}}}, s: {{interface: S{number}}}");
    let mut links = String::from(
        "{endpoints: [\"r1:eth0\", \"external:g\"]}, {endpoints: [\"r1:eth1\", \"external:s\"]}",
    );
    if number == 0 {
        let [mac_a, mac_b] = [MAC_MIDDLE_A, MAC_MIDDLE_B].map(words);
        interfaces += &format!(
            ", eth2: {{addresses: [10.0.1.1/24], mac: \"{mac_a}\"}}, \
             eth3: {{addresses: [10.0.2.1/24], mac: \"{mac_b}\"}}"
        );
        externals += ", a: {interface: A0}, b: {interface: B0}";
        links += ", {endpoints: [\"r1:eth2\", \"external:a\"]}, {endpoints: [\"r1:eth3\", \"external:b\"]}";
    }
    let name = name(number);
    format!(
        "apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {{name: {name}}}
spec:
  nodes:
    r1: {{interfaces: {{{interfaces}}}, routes: [{{to: 20.0.0.0/24, via: 10.2.2.2}}], {kind}}}
  externals: {{{externals}}}
  links: [{links}]
"
    )
}

/// Names of a payload's figures: mean, mean plus three standard deviations as in the paper, median,
/// the 99th percentile, losses, and the forwarded part of the load.
fn figure_names(payload: usize) -> [&'static str; 6] {
    match payload {
        400 => [
            "figure 10: round trip beside 400 bytes, mean",
            "figure 10: beside 400 bytes, mean and 3 standard deviations",
            "figure 10: beside 400 bytes, median",
            "figure 10: beside 400 bytes, p99",
            "figure 10: beside 400 bytes, lost",
            "figure 10: load of 400 bytes that came out",
        ],
        _ => [
            "figure 10: round trip beside 1400 bytes, mean",
            "figure 10: beside 1400 bytes, mean and 3 standard deviations",
            "figure 10: beside 1400 bytes, median",
            "figure 10: beside 1400 bytes, p99",
            "figure 10: beside 1400 bytes, lost",
            "figure 10: load of 1400 bytes that came out",
        ],
    }
}

/// Figures of sorted round trips, microseconds. Those without an answer only count as losses.
fn readings(times: &[f64], load: f64, payload: usize) -> Vec<Reading> {
    let answered = &times[..times.partition_point(|time| *time < ANSWER_MAX.as_micros() as f64)];
    let count = answered.len() as f64;
    let mean = answered.iter().sum::<f64>() / count;
    let variance = answered.iter().map(|time| (time - mean).powi(2)).sum::<f64>() / count;
    let lost = (1.0 - count / times.len() as f64) * 100.0;
    let at = |share| quantile(answered, share);
    let values = [mean, mean + 3.0 * variance.sqrt(), at(0.5), at(0.99), lost, load];
    let units = ["µs", "µs", "µs", "µs", "%", "%"];
    let all = figure_names(payload).into_iter().zip(values).zip(units);
    all.map(|((what, value), unit)| Reading::new(what, value, unit)).collect()
}

pub(super) fn figure(run: &mut ExperimentRun) -> Result<()> {
    let core = run.cores()[0];
    let loads = if run.quick() { &LOADS_QUICK_MBPS[..] } else { &LOADS_MBPS };
    let payloads = if run.quick() { &PAYLOADS[..1] } else { &PAYLOADS };
    let time = run.time();
    let mut beds = Vec::new();
    for (series, kind) in KINDS {
        beds.extend(run.attempt(series, |_| TripTestbed::start(series, kind, core)));
    }
    run.rounds(|run| {
        for payload in payloads {
            for mbps in loads {
                for bed in &beds {
                    let measure = || bed.trips(*mbps, *payload, time);
                    let x_unit = "Mb/s of load";
                    run.take_as(bed.series, f64::from(*mbps), x_unit, measure, |(times, load)| {
                        readings(&times, load, *payload)
                    });
                }
            }
        }
        Ok(())
    })
}
