//! Checks that counters add up and agree with the kernel's.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use pdp_api::{NodeStats, PortStats};

use crate::node::{DemoNode, InterfaceCounts, interface_counters};
use crate::outside::{ExternalMachine, OUTSIDE};
use crate::paths;

/// Sums over a node's ports.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PortSums {
    /// Received by links.
    pub received: u64,
    /// Made in the node.
    pub made: u64,
    /// Sent by links.
    pub sent: u64,
    /// Punted to the control guest.
    pub punted: u64,
    /// Consumed by a guest.
    pub consumed: u64,
    /// Dropped, by reason.
    pub dropped: BTreeMap<String, u64>,
    /// Still in flight.
    pub in_flight: u64,
}

impl PortSums {
    /// Sums a node's counters.
    pub fn of(stats: &NodeStats) -> Self {
        let mut sums = Self { in_flight: stats.in_flight, ..Self::default() };
        for port in stats.ports.values() {
            sums.received += port.received;
            sums.made += port.made;
            sums.sent += port.sent;
            sums.punted += port.punted;
            sums.consumed += port.consumed;
            for (reason, count) in port.dropped.iter().filter(|(_, count)| **count > 0) {
                *sums.dropped.entry(reason.clone()).or_default() += count;
            }
        }
        sums
    }

    /// Frames received and made, less those sent, punted,
    /// consumed, dropped and in flight. 0 if they add up.
    pub fn missing(&self) -> i128 {
        let dropped: u64 = self.dropped.values().sum();
        let ends = [self.sent, self.punted, self.consumed, dropped, self.in_flight];
        let ends: i128 = ends.into_iter().map(i128::from).sum();
        i128::from(self.received) + i128::from(self.made) - ends
    }

    /// Reasons and counts, for people.
    pub fn dropped_text(&self) -> String {
        let one = |(reason, count): (&String, &u64)| format!("{reason} {count}");
        let all: Vec<String> = self.dropped.iter().map(one).collect();
        if all.is_empty() { "0".into() } else { all.join("\n") }
    }
}

/// A vnet and a port of its `r1`.
type At = (&'static str, &'static str);

/// The kernel's counters, by interface.
type KernelCounts = BTreeMap<At, InterfaceCounts>;

/// Counters of the mux before and after reading the kernel's. Since frames flow all the time, the
/// kernel's lie between them.
pub struct CounterSample {
    before: BTreeMap<&'static str, NodeStats>,
    /// On the external machine.
    outside: KernelCounts,
    /// Datagrams that the external machine lost in full socket
    /// buffers. These include the program at its tunnel's end.
    outside_lost: BTreeMap<At, u64>,
    /// Frames that interfaces between the mux and the machines
    /// dropped: its receive ring, or a veth pair's, was full.
    underlay_dropped: u64,
    /// In the control guest.
    inside: KernelCounts,
    after: BTreeMap<&'static str, NodeStats>,
}

impl CounterSample {
    /// Takes a sample of these vnets.
    pub fn take(node: &DemoNode, vnets: &[&str]) -> Result<Self> {
        let outside_of = || OUTSIDE.iter().filter(|(vnet, _)| vnets.contains(vnet));
        let mux = || -> Result<BTreeMap<&'static str, NodeStats>> {
            let mut stats = node.stats()?;
            let mut nodes = BTreeMap::new();
            for (vnet, _) in outside_of() {
                let found = stats.vnets.get_mut(*vnet).and_then(|stats| stats.nodes.remove("r1"));
                nodes.insert(*vnet, found.with_context(|| format!("no counters of {vnet}/r1"))?);
            }
            Ok(nodes)
        };
        let before = mux()?;
        let (mut outside, mut inside) = (BTreeMap::new(), BTreeMap::new());
        let mut outside_lost = BTreeMap::new();
        let dropped = |interfaces: &BTreeMap<String, InterfaceCounts>| -> u64 {
            interfaces.values().map(|interface| interface.dropped).sum()
        };
        let mut underlay_dropped = 0;
        for machine in [paths::underlay(), paths::node()] {
            let text = machine.finish(&["cat", "/proc/net/dev"])?;
            underlay_dropped += dropped(&interface_counters(&text));
        }
        for &(vnet, ports) in outside_of() {
            let control = node.kernel_counters(&format!("{vnet}/r1"))?;
            for (port, machine) in ports {
                let outside_machine = ExternalMachine::named(machine)?.machine();
                let text = outside_machine.finish(&["cat", "/proc/net/dev", "/proc/net/snmp"])?;
                let counters = interface_counters(&text);
                underlay_dropped += dropped(&counters);
                outside_lost.insert((vnet, *port), udp_lost(&text).unwrap_or(0));
                let eth0 = counters.get("eth0").with_context(|| format!("{machine}: no eth0"))?;
                outside.insert((vnet, *port), *eth0);
                let own = control.get(*port).with_context(|| format!("{vnet}/r1: no {port}"))?;
                inside.insert((vnet, *port), *own);
            }
        }
        Ok(Self { before, outside, outside_lost, underlay_dropped, inside, after: mux()? })
    }

    /// Frames that the underlay dropped since `start`.
    pub fn lost_in_underlay(&self, start: &Self) -> u64 {
        self.underlay_dropped.saturating_sub(start.underlay_dropped)
    }

    /// Datagrams that sockets of external machines lost since `start`.
    pub fn lost_outside(&self, start: &Self) -> u64 {
        let sum = |sample: &Self| sample.outside_lost.values().sum::<u64>();
        sum(self).saturating_sub(sum(start))
    }

    /// Differences since `start` between the mux's and the kernel's counters of a vnet, beyond the
    /// losses that the kernel reports.
    pub fn disagreements(&self, start: &Self, vnet: &str) -> Vec<String> {
        let ports = OUTSIDE.iter().filter(|(name, _)| *name == vnet);
        let ports = ports.flat_map(|(name, ports)| ports.iter().map(|port| (*name, *port)));
        ports
            .flat_map(|(name, (port, machine))| self.port_differences(start, (name, port), machine))
            .collect()
    }

    /// Differences of one port.
    fn port_differences(&self, start: &Self, at: At, machine: &str) -> Vec<String> {
        let (vnet, port) = at;
        let bounds = [&start.before, &start.after, &self.before, &self.after]
            .map(|nodes| nodes.get(vnet).and_then(|node| node.ports.get(port)));
        let [Some(began_after), Some(began_before), Some(ended_after), Some(ended_before)] = bounds
        else {
            return vec![format!("{vnet}/r1:{port}: no counters")];
        };
        let since = |of: fn(&Self) -> &KernelCounts| {
            let now = of(self).get(&at).copied().unwrap_or_default();
            let then = of(start).get(&at).copied().unwrap_or_default();
            (now.received.saturating_sub(then.received), now.sent.saturating_sub(then.sent))
        };
        let (outside_in, outside_out) = since(|sample| &sample.outside);
        let (inside_in, inside_out) = since(|sample| &sample.inside);
        let in_sockets = |sample: &Self| sample.outside_lost.get(&at).copied().unwrap_or(0);
        let in_sockets = in_sockets(self).saturating_sub(in_sockets(start));
        let underlay = self.lost_in_underlay(start);

        type Count = fn(&PortStats) -> u64;
        let refused: Count = |port| port.tap.as_ref().map_or(0, |tap| tap.to_tap_refused);
        let unread: Count = |port| port.tap.as_ref().map_or(0, |tap| tap.from_tap_dropped);
        let most = |count: Count| count(ended_before).saturating_sub(count(began_after));
        let least = |count: Count| count(ended_after).saturating_sub(count(began_before));
        // The mux's counter, the kernel's, and how much the kernel's may exceed it (losses before
        // the mux) or fall below it (losses after the mux).
        let control = "the control guest";
        let rows: [(&str, Count, &str, u64, u64, u64); 4] = [
            ("received", |port| port.received, machine, outside_out, underlay, 0),
            ("sent", |port| port.sent, machine, outside_in, 0, underlay + in_sockets),
            ("punted", |port| port.punted, control, inside_in, 0, most(refused)),
            ("made", |port| port.made, control, inside_out, most(unread), 0),
        ];
        let mut found = Vec::new();
        for (what, count, who, kernel, more, less) in rows {
            let (least, most) = (least(count), most(count));
            if kernel < least.saturating_sub(less) || kernel > most + more {
                found.push(format!(
                    "{vnet}/r1:{port}: {what} {least} to {most}, the kernel at {who} counted \
                     {kernel}"
                ));
            }
        }
        found
    }
}

/// Datagrams lost in full socket buffers, from /proc/net/snmp: a line of names, then one of values.
fn udp_lost(text: &str) -> Option<u64> {
    let mut lines = text.lines().filter_map(|line| line.strip_prefix("Udp: "));
    let (names, values) = (lines.next()?, lines.next()?);
    let at = names.split_whitespace().position(|name| name == "RcvbufErrors")?;
    values.split_whitespace().nth(at)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(received: u64, sent: u64, dropped: u64) -> NodeStats {
        let port = PortStats {
            received,
            made: 2,
            sent,
            punted: 1,
            dropped: BTreeMap::from([("police".into(), dropped), ("ttl".into(), 0)]),
            ..PortStats::default()
        };
        NodeStats {
            ports: BTreeMap::from([("eth0".into(), port)]),
            in_flight: 3,
            ..Default::default()
        }
    }

    #[test]
    fn port_sums_report_missing_frames() {
        let sums = PortSums::of(&node(10, 7, 1));
        assert_eq!(sums.missing(), 0);
        assert_eq!(sums.dropped_text(), "police 1");
        assert_eq!(PortSums::of(&node(10, 6, 1)).missing(), 1);
        assert_eq!(PortSums::of(&node(9, 7, 1)).missing(), -1);
    }

    fn sample(received: u64, outside_out: u64, underlay_dropped: u64) -> CounterSample {
        let nodes = || {
            BTreeMap::from([(
                "red",
                NodeStats {
                    ports: ["eth0", "eth1"]
                        .map(|port| (port.to_owned(), PortStats { received, ..Default::default() }))
                        .into(),
                    ..Default::default()
                },
            )])
        };
        let counters = |sent| {
            let own = InterfaceCounts { sent, ..InterfaceCounts::default() };
            BTreeMap::from([(("red", "eth0"), own), (("red", "eth1"), own)])
        };
        CounterSample {
            before: nodes(),
            outside: counters(outside_out),
            outside_lost: BTreeMap::from([(("red", "eth0"), received)]),
            underlay_dropped,
            inside: counters(0),
            after: nodes(),
        }
    }

    #[test]
    fn parses_lost_datagram_counter() {
        let text = "Udp: InDatagrams NoPorts InErrors OutDatagrams RcvbufErrors SndbufErrors\n\
                    Udp: 5 0 3 9 3 0\n";
        assert_eq!(udp_lost(text), Some(3));
        assert_eq!(udp_lost("Udp: RcvbufErrors\n"), None);
    }

    #[test]
    fn kernel_counts_are_compared_with_pdps() {
        let start = sample(5, 7, 3);
        assert!(sample(15, 17, 3).disagreements(&start, "red").is_empty());
        assert_eq!(sample(15, 18, 3).disagreements(&start, "red").len(), 2);
        assert!(sample(15, 18, 4).disagreements(&start, "red").is_empty());
        assert_eq!(sample(15, 16, 12).disagreements(&start, "red").len(), 2);
    }
}
