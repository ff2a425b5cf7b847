//! Counters, and rates between two samples of them.

use std::collections::BTreeMap;
use std::io::{self, IsTerminal};
use std::process::ExitCode;
use std::time::Duration;

use pdp_api::client::Client;
use pdp_api::{PortStats, Stats, StatsQuery};
use serde::Serialize;

use crate::args::{self, Format};
use crate::failure::Failure;
use crate::output::{print, section, table, write};
use crate::show::bits;

/// Time between the two samples of `--rates`.
const RATES_PAUSE: Duration = Duration::from_secs(1);

/// Counters with rates.
#[derive(Serialize)]
struct Sample {
    #[serde(flatten)]
    stats: Stats,
    /// By port, `VNET/NODE:PORT`.
    #[serde(skip_serializing_if = "Option::is_none")]
    rates: Option<BTreeMap<String, Rates>>,
}

/// What went by in a second.
#[derive(Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
struct Rates {
    received_pps: f64,
    received_bps: f64,
    sent_pps: f64,
    sent_bps: f64,
    dropped_pps: f64,
}

pub async fn stats(client: &Client, args: args::Stats) -> Result<ExitCode, Failure> {
    let query = StatsQuery { vnet: args.vnet };
    let mut last = client.stats(&query).await?;
    let Some(pause) = args.watch.or(args.rates.then_some(RATES_PAUSE)) else {
        return print(args.format, &Sample { stats: last, rates: None }, text);
    };
    loop {
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            interrupted = tokio::signal::ctrl_c() => {
                interrupted?;
                return Ok(ExitCode::SUCCESS);
            }
        }
        let stats = client.stats(&query).await?;
        let sample = Sample { rates: Some(rates(&last, &stats)), stats };
        match args.format {
            // One line a sample, for programs that read line by line.
            Format::Json if args.watch.is_some() => {
                let line = serde_json::to_string(&sample).map_err(io::Error::other)? + "\n";
                write(line.as_bytes())?;
            }
            Format::Yaml if args.watch.is_some() => {
                write(b"---\n")?;
                print(args.format, &sample, text)?;
            }
            Format::Table if args.watch.is_some() && io::stdout().is_terminal() => {
                // Home, and clear to the end (ECMA-48).
                write(format!("\x1b[H\x1b[2J{}", text(&sample)).as_bytes())?;
            }
            format => {
                print(format, &sample, text)?;
            }
        }
        if args.watch.is_none() {
            return Ok(ExitCode::SUCCESS);
        }
        last = sample.stats;
    }
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

fn rates(before: &Stats, now: &Stats) -> BTreeMap<String, Rates> {
    let seconds = now.at_ns.saturating_sub(before.at_ns) as f64 / 1e9;
    let before: BTreeMap<String, &PortStats> = ports(before).collect();
    // A counter that went back belongs to a new mux: what it has counted is since then.
    let rate = |then: u64, now: u64| {
        let count = if now >= then { now - then } else { now };
        if seconds > 0.0 { count as f64 / seconds } else { 0.0 }
    };
    let none = PortStats::default();
    ports(now)
        .map(|(name, port)| {
            let then = before.get(&name).copied().unwrap_or(&none);
            let rates = Rates {
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

fn text(sample: &Sample) -> String {
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
                    guest.faults.to_string(),
                    guest.last_fault.clone().unwrap_or_default(),
                ]);
            }
        }
    }
    or_nothing(
        ["GUEST", "FE", "CONNECTED", "TO GUEST", "FROM GUEST", "COMPLETED", "FAULTS", "LAST FAULT"],
        rows,
    )
}

fn drops(stats: &Stats) -> String {
    let rows = ports(stats).flat_map(|(name, port)| {
        port.dropped
            .iter()
            .filter(|(_, count)| **count > 0)
            .map(move |(reason, count)| [name.clone(), reason.clone(), count.to_string()])
            .collect::<Vec<_>>()
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
        ]
    });
    or_nothing(["EXTERNAL", "RECEIVED", "SENT", "DROPPED", "DROPPED BY KERNEL"], rows.collect())
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
    fn rates_are_differences_by_time() {
        let rates = rates(&sample(1_000_000_000, 10, 1000, 1), &sample(3_000_000_000, 30, 5000, 5));
        let port = &rates["red/r1:eth0"];
        assert_eq!((port.received_pps, port.received_bps, port.dropped_pps), (10.0, 16000.0, 2.0));
    }

    #[test]
    fn rates_survive_new_counters_and_equal_times() {
        let restarted = rates(&sample(0, 100, 100, 0), &sample(1_000_000_000, 7, 7, 0));
        assert_eq!(restarted["red/r1:eth0"].received_pps, 7.0);
        let at_once = rates(&sample(5, 1, 1, 0), &sample(5, 9, 9, 0));
        assert_eq!(at_once["red/r1:eth0"].received_pps, 0.0);
    }
}
