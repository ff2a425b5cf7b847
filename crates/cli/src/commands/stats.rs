//! Counters, and rates between two samples of them.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::Duration;

use pdp_api::client::Client;
use pdp_api::{PortStats, Stats, StatsQuery};
use serde::Serialize;

use crate::daemon::complete;
use crate::failure::CliFailure;
use crate::input::times::seconds;
use crate::interrupt::until_interrupted;
use crate::output::samples::{show, since};
use crate::output::words::{bits, power};
use crate::output::{Format, print, section, table};

/// Time between the two samples of `--rates`.
const RATES_PAUSE: Duration = Duration::from_secs(1);

/// Counters with rates.
#[derive(Serialize)]
struct StatsWithRates {
    #[serde(flatten)]
    stats: Stats,
    /// Rates by port, `VNET/NODE:PORT`.
    #[serde(skip_serializing_if = "Option::is_none")]
    rates: Option<BTreeMap<String, PortRates>>,
}

/// Rates of a port per second.
#[derive(Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
struct PortRates {
    received_pps: f64,
    received_bps: f64,
    sent_pps: f64,
    sent_bps: f64,
    dropped_pps: f64,
}

/// Print counters, and rates between two samples.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: pdp stats red --watch\n         \
                        pdp stats --cycles --watch=10\n         pdp stats --format json")]
pub struct StatsArgs {
    /// Only counters of this vnet.
    #[arg(value_name = "VNET", add = complete::vnets())]
    pub vnet: Option<String>,
    /// Print again and again, with rates, every so many seconds.
    #[arg(short, long, value_name = "SECONDS", num_args = 0..=1, require_equals = true,
        default_missing_value = "1", value_parser = seconds)]
    pub watch: Option<Duration>,
    /// Print once, with the rates of one second.
    #[arg(long, conflicts_with = "watch")]
    pub rates: bool,
    /// Print the cycles per frame of each stage of each mux worker, in one second or in the
    /// interval of --watch.
    /// The mux's workers serve all vnets, so that this goes without VNET.
    #[arg(long, conflicts_with = "vnet")]
    pub cycles: bool,
    #[arg(long, value_enum, default_value_t)]
    pub format: Format,
}

pub async fn stats(client: &Client, args: StatsArgs) -> Result<ExitCode, CliFailure> {
    let query = StatsQuery { vnet: args.vnet };
    let once = (args.rates || args.cycles).then_some(RATES_PAUSE);
    let mut last = client.stats(&query).await?;
    let Some(pause) = args.watch.or(once) else {
        return print(args.format, &StatsWithRates { stats: last, rates: None }, text);
    };
    until_interrupted(async {
        loop {
            tokio::time::sleep(pause).await;
            let stats = client.stats(&query).await?;
            if args.cycles {
                show(args.format, args.watch.is_some(), &cycles(&last, &stats), cycles_text)?;
                last = stats;
            } else {
                let sample = StatsWithRates { rates: Some(rates(&last, &stats)), stats };
                show(args.format, args.watch.is_some(), &sample, text)?;
                last = sample.stats;
            }
            if args.watch.is_none() {
                return Ok(ExitCode::SUCCESS);
            }
        }
    })
    .await
}

/// Cycles of the mux workers' stages between two samples.
#[derive(Debug, PartialEq, Serialize)]
struct CycleReport {
    seconds: f64,
    workers: Vec<WorkerCycles>,
}

#[derive(Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
struct WorkerCycles {
    /// Sum over all stages.
    cycles: u64,
    stages: Vec<StageCycles>,
}

#[derive(Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
struct StageCycles {
    stage: String,
    cycles: u64,
    frames: u64,
    /// Absent if there were no frames.
    #[serde(skip_serializing_if = "Option::is_none")]
    cycles_per_frame: Option<f64>,
    /// Fraction of the worker's cycles, 0 to 1.
    share: f64,
}

fn cycles(before: &Stats, now: &Stats) -> CycleReport {
    let seconds = now.at_ns.saturating_sub(before.at_ns) as f64 / 1e9;
    let workers = now.workers.iter().enumerate().map(|(index, worker)| {
        let then = before.workers.get(index).map_or(&[][..], |worker| &worker.stages);
        let mut stages = Vec::new();
        for stage in &worker.stages {
            let then = then.iter().find(|then| then.stage == stage.stage);
            let cycles = since(then.map_or(0, |then| then.cycles), stage.cycles);
            let frames = since(then.map_or(0, |then| then.frames), stage.frames);
            stages.push(StageCycles {
                stage: stage.stage.clone(),
                cycles,
                frames,
                cycles_per_frame: (frames > 0).then(|| cycles as f64 / frames as f64),
                share: 0.0,
            });
        }
        let all: u64 = stages.iter().map(|stage| stage.cycles).sum();
        for stage in &mut stages {
            stage.share = stage.cycles as f64 / all.max(1) as f64;
        }
        WorkerCycles { cycles: all, stages }
    });
    CycleReport { seconds, workers: workers.collect() }
}

fn cycles_text(cycles: &CycleReport) -> String {
    let mut rows = Vec::new();
    for (index, worker) in cycles.workers.iter().enumerate() {
        for stage in &worker.stages {
            rows.push([
                index.to_string(),
                stage.stage.clone(),
                stage.frames.to_string(),
                stage.cycles_per_frame.map_or("-".into(), |cycles| format!("{cycles:.1}")),
                format!("{:.1} %", stage.share * 100.0),
            ]);
        }
    }
    if rows.is_empty() {
        return "The mux counts no cycles on this machine.\n".into();
    }
    table(["WORKER", "STAGE", "FRAMES", "CYCLES/FRAME", "SHARE"], rows)
}

fn ports(stats: &Stats) -> impl Iterator<Item = (String, &PortStats)> {
    stats.vnets.iter().flat_map(|(vnet, stats)| {
        stats.nodes.iter().flat_map(move |(node, stats)| {
            stats.ports.iter().map(move |(port, stats)| (format!("{vnet}/{node}:{port}"), stats))
        })
    })
}

fn dropped(reasons: &BTreeMap<String, u64>) -> u64 {
    reasons.values().sum()
}

fn rates(before: &Stats, now: &Stats) -> BTreeMap<String, PortRates> {
    let seconds = now.at_ns.saturating_sub(before.at_ns) as f64 / 1e9;
    let before: BTreeMap<String, &PortStats> = ports(before).collect();
    let rate = |then: u64, now: u64| {
        if seconds > 0.0 { since(then, now) as f64 / seconds } else { 0.0 }
    };
    let none = PortStats::default();
    ports(now)
        .map(|(name, port)| {
            let then = before.get(&name).copied().unwrap_or(&none);
            let rates = PortRates {
                received_pps: rate(then.received, port.received),
                received_bps: rate(then.received_bytes, port.received_bytes) * 8.0,
                sent_pps: rate(then.sent, port.sent),
                sent_bps: rate(then.sent_bytes, port.sent_bytes) * 8.0,
                dropped_pps: rate(dropped(&then.dropped), dropped(&port.dropped)),
            };
            (name, rates)
        })
        .collect()
}

fn text(sample: &StatsWithRates) -> String {
    let stats = &sample.stats;
    let rows = ports(stats).map(|(name, port)| {
        let counts = [port.received, port.made, port.sent, port.punted, dropped(&port.dropped)];
        (name, counts.map(|count| count.to_string()))
    });
    let ports = match &sample.rates {
        None => table(
            ["PORT", "RECEIVED", "MADE", "SENT", "PUNTED", "DROPPED"],
            rows.map(|(name, [a, b, c, d, e])| [name, a, b, c, d, e]).collect(),
        ),
        Some(rates) => table(
            [
                "PORT",
                "RECEIVED",
                "MADE",
                "SENT",
                "PUNTED",
                "DROPPED",
                "IN pps",
                "IN",
                "OUT pps",
                "OUT",
                "DROPS pps",
            ],
            rows.map(|(name, [a, b, c, d, e])| {
                let [f, g, h, i, j] = rates.get(&name).map_or_else(Default::default, |rates| {
                    [
                        format!("{:.0}", rates.received_pps),
                        bits(rates.received_bps as u64),
                        format!("{:.0}", rates.sent_pps),
                        bits(rates.sent_bps as u64),
                        format!("{:.0}", rates.dropped_pps),
                    ]
                });
                [name, a, b, c, d, e, f, g, h, i, j]
            })
            .collect(),
        ),
    };
    ports
        + &section("Nodes", &nodes(stats))
        + &section("Forwarding guests", &guests(stats))
        + &section("Engines", &engines(stats))
        + &section("Queues", &queues(stats))
        + &section("Impairments", &impairments(stats))
        + &section("Drops", &drops(stats))
        + &section("External interfaces", &externals(stats))
}

fn nodes(stats: &Stats) -> String {
    let mut rows = Vec::new();
    for (vnet, vnet_stats) in &stats.vnets {
        for (name, node) in &vnet_stats.nodes {
            let routes = node.routes.as_ref();
            let count = |of: fn(&pdp_api::RouteStats) -> u64| {
                routes.map_or("-".into(), |routes| of(routes).to_string())
            };
            rows.push([
                format!("{vnet}/{name}"),
                node.in_flight.to_string(),
                count(|routes| routes.routes_v4),
                count(|routes| routes.routes_v6),
                count(|routes| routes.neighbours),
                count(|routes| routes.resyncs),
            ]);
        }
    }
    or_nothing(["NODE", "IN FLIGHT", "IPv4 ROUTES", "IPv6 ROUTES", "NEIGHBOURS", "RESYNCS"], rows)
}

fn queues(stats: &Stats) -> String {
    let rows = ports(stats).flat_map(|(name, port)| {
        port.queues.iter().map(move |queue| {
            let counts = [queue.waiting, queue.waiting_bytes, queue.sent, queue.sent_bytes];
            let [a, b, c, d] = counts.map(|count| count.to_string());
            [name.clone(), queue.name.clone(), a, b, c, d, queue.dropped.to_string()]
        })
    });
    or_nothing(["PORT", "QUEUE", "WAITING", "BYTES", "SENT", "BYTES", "DROPPED"], rows.collect())
}

fn guests(stats: &Stats) -> String {
    let mut rows = Vec::new();
    for (vnet, vnet_stats) in &stats.vnets {
        for (name, node) in &vnet_stats.nodes {
            for (number, guest) in &node.guests {
                rows.push([
                    format!("{vnet}/{name}:g{number}"),
                    guest.fe.clone(),
                    if guest.connected { "yes" } else { "no" }.into(),
                    guest.to_guest.to_string(),
                    guest.from_guest.to_string(),
                    guest.completed.to_string(),
                    guest.in_flight.to_string(),
                    guest.faults.to_string(),
                    guest.last_fault.clone().unwrap_or_default(),
                ]);
            }
        }
    }
    or_nothing(
        [
            "GUEST",
            "FE",
            "CONNECTED",
            "TO GUEST",
            "FROM GUEST",
            "COMPLETED",
            "IN FLIGHT",
            "FAULTS",
            "LAST FAULT",
        ],
        rows,
    )
}

fn engines(stats: &Stats) -> String {
    let nodes = stats.vnets.iter().flat_map(|(vnet, it)| it.nodes.iter().map(move |it| (vnet, it)));
    let rows = nodes.filter_map(|(vnet, (name, node))| {
        let engine = node.engine.as_ref()?;
        Some([
            format!("{vnet}/{name}"),
            if engine.synced { "yes" } else { "no" }.into(),
            engine.routes.to_string(),
            engine.memory_bytes.to_string(),
            engine.changes.to_string(),
            power(engine.power_millicores),
            format!("{:.3}", engine.used_ns as f64 / 1e9),
            engine.fault.clone().unwrap_or_default(),
        ])
    });
    or_nothing(
        ["ROUTER", "SYNCED", "ROUTES", "BYTES", "CHANGES", "POWER", "USED S", "NOTE"],
        rows.collect(),
    )
}

/// Table of the frames that links corrupted, duplicated and reordered on purpose. Lost frames are
/// among the drops.
fn impairments(stats: &Stats) -> String {
    let rows = ports(stats).filter_map(|(name, port)| {
        let counts = [port.corrupted, port.duplicated, port.reordered];
        let [a, b, c] = counts.map(|count| count.to_string());
        (counts != [0; 3]).then_some([name, a, b, c])
    });
    or_nothing(["PORT", "CORRUPTED", "DUPLICATED", "REORDERED"], rows.collect())
}

fn drops(stats: &Stats) -> String {
    let ports = ports(stats).map(|(name, port)| (name, &port.dropped));
    let outside = stats.externals.iter();
    let outside = outside.map(|(name, external)| (format!("external {name}"), &external.dropped));
    let rows = ports.chain(outside).flat_map(|(name, dropped)| {
        let dropped = dropped.iter().filter(|(_, count)| **count > 0);
        dropped.map(move |(reason, count)| [name.clone(), reason.clone(), count.to_string()])
    });
    or_nothing(["PORT", "REASON", "DROPPED"], rows.collect())
}

fn externals(stats: &Stats) -> String {
    let rows = stats.externals.iter().map(|(name, external)| {
        [
            name.clone(),
            external.received.to_string(),
            external.sent.to_string(),
            dropped(&external.dropped).to_string(),
            external.kernel_dropped.to_string(),
            external.numbered.to_string(),
            external.late.to_string(),
        ]
    });
    let header =
        ["EXTERNAL", "RECEIVED", "SENT", "DROPPED", "DROPPED BY KERNEL", "NUMBERED", "LATE"];
    or_nothing(header, rows.collect())
}

fn or_nothing<const N: usize>(header: [&str; N], rows: Vec<[String; N]>) -> String {
    if rows.is_empty() { String::new() } else { table(header, rows) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(at_ns: u64, received: u64, bytes: u64, drops: u64) -> Stats {
        let port = PortStats {
            received,
            received_bytes: bytes,
            dropped: [("ttl".to_string(), drops)].into(),
            ..Default::default()
        };
        let mut stats = Stats { at_ns, ..Default::default() };
        let vnet = stats.vnets.entry("red".into()).or_default();
        vnet.nodes.entry("r1".into()).or_default().ports.insert("eth0".into(), port);
        stats
    }

    #[test]
    fn rates_are_counter_increases_per_second() {
        let rates = rates(&sample(1_000_000_000, 10, 1000, 1), &sample(3_000_000_000, 30, 5000, 5));
        let port = &rates["red/r1:eth0"];
        assert_eq!((port.received_pps, port.received_bps, port.dropped_pps), (10.0, 16000.0, 2.0));
    }

    #[test]
    fn cycle_report_covers_only_the_interval() {
        let stages = |of: &[(&str, u64, u64)]| {
            let stages = of.iter().map(|(stage, cycles, frames)| pdp_api::StageStats {
                stage: (*stage).into(),
                cycles: *cycles,
                frames: *frames,
            });
            let worker = pdp_api::WorkerStats { stages: stages.collect(), ..Default::default() };
            Stats { workers: vec![worker], ..Default::default() }
        };
        let before = stages(&[("arrive", 1000, 10), ("idle", 500, 0)]);
        let now = stages(&[("arrive", 4000, 40), ("idle", 1500, 0), ("leave", 0, 0)]);
        let CycleReport { workers, .. } = cycles(&before, &now);
        let [worker] = workers.as_slice() else { panic!("one worker") };
        assert_eq!(worker.cycles, 4000);
        let [arrive, idle, leave] = worker.stages.as_slice() else { panic!("three stages") };
        assert_eq!((arrive.cycles_per_frame, arrive.share), (Some(100.0), 0.75));
        assert_eq!((idle.cycles_per_frame, idle.share), (None, 0.25));
        assert_eq!((leave.cycles, leave.share), (0, 0.0));
        // A new mux counts from 0.
        assert_eq!(cycles(&now, &before).workers[0].cycles, 1500);
    }

    #[test]
    fn impairments_table_appears_only_if_needed() {
        let mut stats = sample(0, 1, 100, 0);
        assert_eq!(impairments(&stats), "");
        let node = stats.vnets.get_mut("red").unwrap().nodes.get_mut("r1").unwrap();
        let port = node.ports.get_mut("eth0").unwrap();
        (port.corrupted, port.duplicated, port.reordered) = (11, 22, 33);
        node.ports.insert("eth1".into(), PortStats::default());
        let text = text(&StatsWithRates { stats, rates: None });
        let table = text.split("\nImpairments\n").nth(1).expect("a table");
        let words: Vec<_> = table.split_whitespace().collect();
        assert_eq!(
            words,
            ["PORT", "CORRUPTED", "DUPLICATED", "REORDERED", "red/r1:eth0", "11", "22", "33"]
        );
    }

    #[test]
    fn rates_survive_new_counters_and_equal_times() {
        let restarted = rates(&sample(0, 100, 100, 0), &sample(1_000_000_000, 7, 7, 0));
        assert_eq!(restarted["red/r1:eth0"].received_pps, 7.0);
        let at_once = rates(&sample(5, 1, 1, 0), &sample(5, 9, 9, 0));
        assert_eq!(at_once["red/r1:eth0"].received_pps, 0.0);
    }
}
