//! Performance targets, and the figures that judge them.

use std::ops::RangeInclusive;

use crate::against::Comparison;
use crate::experiments::paper;
use crate::sample::{CoreProximity, Results};
use crate::statistics::{SampleGroup, Summary, groups};

/// Criterion of a target.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Bound {
    /// Median is at least this.
    AtLeast(f64),
    /// Median is at most this.
    AtMost(f64),
    /// None: the figure is only reported.
    ReportOnly,
}

/// Reference of a figure.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Baseline {
    /// Nothing.
    Nothing,
    /// Subtract the figure of another series of the same run.
    Less(&'static str),
    /// Divide by the figure of another series of the same run.
    Over(&'static str),
    /// The same figure of the previous build, by pairs.
    Before,
    /// The previous build's figure at parameter 1, by pairs. Without pairs, the figure as measured.
    BeforeOne,
}

/// Performance target.
#[derive(Clone, Debug)]
pub struct BenchTarget {
    /// Description.
    pub description: &'static str,
    /// Description of the value to reach.
    pub goal: &'static str,
    /// Experiment, series and kind of the figure.
    pub figure: [&'static str; 3],
    /// Range of parameters.
    pub x: RangeInclusive<u32>,
    /// Required state of the cores, if any.
    pub state: Option<CoreProximity>,
    /// The bound.
    pub bound: Bound,
    /// Reference.
    pub beside: Baseline,
}

/// Any parameter.
const ANY: RangeInclusive<u32> = 0..=u32::MAX;
/// Parameters: two routes, and the full table.
const FEW: RangeInclusive<u32> = 1..=2;
const FULL: RangeInclusive<u32> = 900_000..=1_000_000;

/// Parameter: the guest's share of a core, percent.
const HALF: RangeInclusive<u32> = 50..=50;
/// Parameter: guests.
const THREE: RangeInclusive<u32> = 3..=3;

/// All targets, in the order of the report.
pub fn all() -> Vec<BenchTarget> {
    use Baseline::{Before, BeforeOne, Less, Nothing, Over};
    use Bound::{AtLeast, AtMost, ReportOnly};
    let target = |words, goal, figure, x, bound| BenchTarget {
        description: words,
        goal,
        figure,
        x,
        state: None,
        bound,
        beside: Nothing,
    };
    let router = ["router", "pdp, two cores", "rate"];
    let in_state = |words, goal, x, state, bound| BenchTarget {
        state: Some(state),
        ..target(words, goal, router, x, AtLeast(bound))
    };
    let beside = |beside, target| BenchTarget { beside, ..target };
    let (near, far) = (CoreProximity::Near, CoreProximity::Far);
    let of_cpu = "of linear, for a guest's CPU second";
    let mut all = vec![
        beside(
            Before,
            target(
                "whole path, two cores, 2 routes, against the commit before",
                "1.1 times, better 1.25",
                router,
                FEW,
                AtLeast(1.1),
            ),
        ),
        in_state("whole path, two cores, 2 routes, near", "18 Mpps", FEW, near, 18.0),
        in_state("whole path, two cores, 2 routes, far", "13 Mpps", FEW, far, 13.0),
        in_state("whole path, two cores, full table, near", "12 Mpps", FULL, near, 12.0),
        in_state("whole path, two cores, full table, far", "9 Mpps", FULL, far, 9.0),
        target(
            "whole path, mux and guest on one core, half for each",
            "6 Mpps",
            ["one-core", "pdp", "rate"],
            HALF,
            AtLeast(6.0),
        ),
    ];
    for (words, goal, count, bound) in [
        ("16 vnets, of one's rate at the commit before", "90%", 16, 90.0),
        ("64 vnets", "75%", 64, 75.0),
        ("256 vnets", "60%", 256, 60.0),
        ("1,024 vnets", "45%", 1024, 45.0),
    ] {
        let figure = ["vnets", "pdp", "of one"];
        all.push(beside(BeforeOne, target(words, goal, figure, count..=count, AtLeast(bound))));
    }
    for (words, count) in [
        ("1,024 vnets of which 16 have traffic, of the rate of 16", 1024),
        ("256 vnets of which 16 have traffic, of the rate of 16", 256),
    ] {
        let figure = ["vnets", "pdp, 16 with traffic", "of 16"];
        all.push(target(words, "95%", figure, count..=count, AtLeast(95.0)));
    }
    for (words, count) in [
        ("frames to 4 ports of a router in turn, of one port's rate", 4),
        ("16 ports", 16),
        ("64 ports", 64),
    ] {
        let figure = ["ports", "pdp", "of one"];
        all.push(target(words, "90%", figure, count..=count, AtLeast(90.0)));
    }
    for (words, count) in
        [("flow over 2 guests of a core, of one guest's rate", 2), ("4 guests", 4)]
    {
        let figure = ["guests", "pdp", "of one"];
        all.push(target(words, "85%", figure, count..=count, AtLeast(85.0)));
    }
    for (words, series) in [
        ("VXLAN over IPv4 on both sides, of plain interfaces' rate", "pdp, VXLAN over IPv4"),
        ("VXLAN over IPv6 on both sides, of plain interfaces' rate", "pdp, VXLAN over IPv6"),
    ] {
        all.push(target(words, "", ["tunnels", series, "of plain"], ANY, ReportOnly));
    }
    for (words, series) in [
        ("veth to veth, 2 routes, against Open vSwitch's AF_XDP datapath", "pdp, two cores"),
        (
            "the same with busy polling, which Linux does with a veth before 6.13",
            "pdp, busy polling",
        ),
    ] {
        let ratio = target(words, "1 times", ["veth", series, "rate"], FEW, AtLeast(1.0));
        all.push(beside(Over("ovs, AF_XDP"), ratio));
    }
    for (words, series) in [
        ("veth to veth, 2 routes, AF_XDP, two cores", "pdp, two cores"),
        ("veth to veth, 2 routes, AF_XDP, one core", "pdp, one core"),
        ("veth to veth, 2 routes, packet sockets", "pdp, packet sockets"),
    ] {
        all.push(target(words, "0.6 Mpps", ["veth", series, "rate"], FEW, AtLeast(0.6)));
    }
    all.push(beside(
        Less("kernel"),
        target(
            "round-trip time added at idle, against the kernel's forwarding, median",
            "under 50 µs",
            ["rtt", "pdp, two cores", "median"],
            ANY,
            AtMost(50.0),
        ),
    ));
    for (words, goal, series, bound) in [
        ("look-ups at random, full IPv4 table", "100 million/s a core", "IPv4", 100.0),
        (
            "the same inside its prefixes beside 100,000 changes/s",
            "100 million/s a core",
            "IPv4, while updated",
            100.0,
        ),
        ("look-ups at random, full IPv6 table", "50 million/s a core", "IPv6", 50.0),
        (
            "the same inside its prefixes beside 100,000 changes/s",
            "50 million/s a core",
            "IPv6, while updated",
            50.0,
        ),
    ] {
        all.push(target(words, goal, ["lookup", series, "rate"], ANY, AtLeast(bound)));
    }
    for (words, goal, series, bound) in [
        ("memory of the full IPv4 table", "under 64 MB", "IPv4, while updated", 64.0),
        ("memory of the full IPv6 table", "under 64 MB", "IPv6, while updated", 64.0),
        ("memory of the tables of 1,000 networks of ten routes", "a few MB", "1,000 networks", 8.0),
    ] {
        all.push(target(words, goal, ["lookup", series, "memory"], ANY, AtMost(bound)));
    }
    let churn = |what| ["churn", "1 Mpps", what];
    all.extend([
        target(
            "route changes, as many as go, from the kernel to the guest, beside 1 Mpps",
            "100 thousand/s",
            churn("applied"),
            1_000_000..=u32::MAX,
            AtLeast(100.0),
        ),
        target(
            "longest pause in forwarding beside 100,000 route changes/s",
            "",
            churn("pause"),
            100_000..=100_000,
            ReportOnly,
        ),
        target("the same without route changes", "", churn("pause"), 0..=0, ReportOnly),
        target(
            "overload: at ten times the capacity, of the peak",
            "95%",
            ["overload", "pdp", "of peak"],
            10..=10,
            AtLeast(95.0),
        ),
        target(
            "the same for each second of the guest's CPU time",
            "95%",
            ["overload", "pdp", "of peak, for a guest's CPU second"],
            10..=10,
            AtLeast(95.0),
        ),
    ]);
    let ordered =
        |words, goal, what, bound| target(words, goal, ["scaling", "ordered", what], THREE, bound);
    all.extend([
        ordered(
            "three capped guests, ordered, of three times one's rate",
            "95%",
            "of linear",
            AtLeast(95.0),
        ),
        ordered("the same for each second of their CPU time", "95%", of_cpu, AtLeast(95.0)),
        ordered(
            "CPU time of the one that had least, of its quota",
            "95% or more",
            "CPU time of the guest that had least",
            AtLeast(95.0),
        ),
        ordered(
            "CPU time of the one that had most, of its quota",
            "105% or less",
            "CPU time of the guest that had most",
            AtMost(105.0),
        ),
        target(
            "ordered, one flow over three unequal guests: packets late",
            "none",
            ["pdp-paper", "ordered", paper::REORDERED],
            THREE,
            AtMost(0.0),
        ),
    ]);
    all.extend(links());
    all.extend(fastpath());
    all.extend(kernel());
    all
}

/// Targets of the fast path.
fn fastpath() -> Vec<BenchTarget> {
    use Baseline::{Less, Nothing};
    use Bound::{AtLeast, AtMost};
    let beside = |beside, words, goal, figure, x, bound| BenchTarget {
        description: words,
        goal,
        figure,
        x,
        state: None,
        bound,
        beside,
    };
    let target = |words, goal, figure, x, bound| beside(Nothing, words, goal, figure, x, bound);
    let (fast, power) = ("pdp, fast path", "pdp, with power");
    let many = 100_000..=100_000;
    let of_filters = |series, what| ["fastpath-filters", series, what];
    vec![
        target(
            "fast path, full table, one core",
            "10 Mpps",
            ["fastpath", fast, "rate"],
            FULL,
            AtLeast(10.0),
        ),
        target(
            "the same, of the router guest on the same core",
            "160%",
            ["fastpath", fast, "of the guest"],
            FULL,
            AtLeast(160.0),
        ),
        target(
            "1,024 networks of fast paths, of one's rate",
            "85%",
            ["fastpath-vnets", fast, "of one"],
            1024..=1024,
            AtLeast(85.0),
        ),
        beside(
            Less("kernel"),
            "fast path, round-trip time added at idle, against the kernel's forwarding, median",
            "30 µs or less",
            ["rtt", fast, "median"],
            ANY,
            AtMost(30.0),
        ),
        target(
            "100,000 filters in one batch, until in force",
            "under 1 s",
            of_filters("pdp, filters", "set in one batch"),
            many.clone(),
            AtMost(1000.0),
        ),
        target(
            "single changes of 100,000 filters",
            "100 thousand/s",
            of_filters("pdp, filters that change", "changes"),
            many.clone(),
            AtLeast(100.0),
        ),
        target(
            "rate meanwhile, of that without changes",
            "80%",
            of_filters("pdp, filters that change", "of the same at rest"),
            many.clone(),
            AtLeast(80.0),
        ),
        target(
            "100,000 counters of one moment, until the program has them",
            "10 ms",
            of_filters("pdp, counters read at rest", "time"),
            many.clone(),
            AtMost(10.0),
        ),
        target(
            "rate while they are read five times a second, of that without",
            "98%",
            of_filters("pdp, counters that are read", "of the same at rest"),
            many,
            AtLeast(98.0),
        ),
        // 95 % of 0.4 cores.
        target(
            "a network with power 0.4 beside 8 dear ones, of what it has alone",
            "38%: 95% of what it is guaranteed",
            ["fastpath-dear", power, "of all there is"],
            8..=8,
            AtLeast(38.0),
        ),
        target(
            "round trip through it meanwhile, p99",
            "under 200 µs",
            ["fastpath-dear", power, "round trip, p99"],
            8..=8,
            AtMost(200.0),
        ),
        target(
            "five full queues of 30, 25, 20, 15 and 10% in any second, the worst off its part",
            "0.5%",
            ["spp", "pdp, all queues full", "figure 7: part off in any second, worst"],
            ANY,
            AtMost(0.5),
        ),
        target(
            "the rate that they share, off what was asked in any second",
            "0.5%",
            ["spp", "pdp, all queues full", "figure 7: rate off in any second"],
            ANY,
            AtMost(0.5),
        ),
    ]
}

/// Targets of routers that forward in their namespace.
fn kernel() -> Vec<BenchTarget> {
    use Bound::{AtLeast, AtMost, ReportOnly};
    let target = |words, goal, figure, x: u32, bound| BenchTarget {
        description: words,
        goal,
        figure,
        x: x..=x,
        state: None,
        bound,
        beside: Baseline::Nothing,
    };
    let (bytes, of_plain) = (64, "of plain");
    let mut all = Vec::new();
    for (words, goal, series, bound) in [
        (
            "kernel plane, short way, of plain forwarding by CPU time",
            "120%",
            "pdp, short way",
            120.0,
        ),
        ("the same in threads", "120%", "pdp, short way, threads", 120.0),
        ("far, by VXLAN", "120%", "pdp, short way, far", 120.0),
        ("the same in threads", "120%", "pdp, short way, far, threads", 120.0),
        ("whole stack, of plain forwarding by CPU time", "60%", "pdp, stack", 60.0),
        ("the same in threads", "60%", "pdp, stack, threads", 60.0),
        ("far, by VXLAN", "60%", "pdp, stack, far", 60.0),
        ("the same in threads", "60%", "pdp, stack, far, threads", 60.0),
    ] {
        all.push(target(words, goal, ["kernel", series, of_plain], bytes, AtLeast(bound)));
    }
    for (words, series) in [
        ("whole stack, far, of Linux's VXLAN devices in the namespace", "pdp, stack, far"),
        ("the same in threads", "pdp, stack, far, threads"),
    ] {
        let figure = ["kernel", series, "of VXLAN devices"];
        all.push(target(words, "1.4 times", figure, bytes, AtLeast(1.4)));
    }
    for (words, series) in [
        ("round trip added to plain forwarding's, short way, median", "pdp, short way"),
        ("the same in threads", "pdp, short way, threads"),
        ("whole stack", "pdp, stack"),
        ("the same in threads", "pdp, stack, threads"),
    ] {
        let figure = ["kernel", series, "round trip added"];
        all.push(target(words, "under 15 µs", figure, bytes, AtMost(15.0)));
    }
    for (words, series, connections) in [
        ("TCP, one connection, short way in threads", "pdp, short way, threads", 1),
        ("plain, with segmentation offload", "kernel, plain, segmentation offload", 1),
        ("plain, without it, as PdP's ports", "kernel, plain, no segmentation offload", 1),
        ("TCP, eight connections, short way in threads", "pdp, short way, threads", 8),
        ("plain, with segmentation offload", "kernel, plain, segmentation offload", 8),
        ("plain, without it, as PdP's ports", "kernel, plain, no segmentation offload", 8),
    ] {
        all.push(target(words, "", ["kernel", series, "TCP"], connections, ReportOnly));
    }
    for (words, series) in [
        ("64 of them by the short way, in turn, of one", "pdp, short way, in turn"),
        ("the same in threads", "pdp, short way, in turn, threads"),
        ("64 in bursts of 32", "pdp, short way, bursts of 32"),
        ("the same in threads", "pdp, short way, bursts of 32, threads"),
        ("64 by the whole stack, in turn", "pdp, stack, in turn"),
        ("the same in threads", "pdp, stack, in turn, threads"),
    ] {
        all.push(target(words, "85%", ["kernel-vnets", series, "of one"], 64, AtLeast(85.0)));
    }
    for (words, series) in [
        ("256 of them by the short way, in turn, of one", "pdp, short way, in turn"),
        ("the same in threads", "pdp, short way, in turn, threads"),
        ("256 in bursts of 32", "pdp, short way, bursts of 32"),
        ("the same in threads", "pdp, short way, bursts of 32, threads"),
        ("256 by the whole stack, in turn", "pdp, stack, in turn"),
        ("the same in threads", "pdp, stack, in turn, threads"),
    ] {
        all.push(target(words, "55%", ["kernel-vnets", series, "of one"], 256, AtLeast(55.0)));
    }
    for (words, series) in [
        (
            "512 by the short way, in turn, of plain forwarding by CPU time",
            "pdp, short way, in turn",
        ),
        ("the same in threads", "pdp, short way, in turn, threads"),
        ("512 in bursts of 32", "pdp, short way, bursts of 32"),
        ("512 by the whole stack, in turn", "pdp, stack, in turn"),
        ("the same in threads", "pdp, stack, in turn, threads"),
    ] {
        let figure = ["kernel-vnets", series, of_plain];
        all.push(target(words, "50%: at most twice its cost", figure, 512, AtLeast(50.0)));
    }
    for (words, what) in [
        ("memory of the kernel for an idle one: namespace, two ports, threads", "memory"),
        ("its threads", "threads"),
    ] {
        all.push(target(words, "", ["kernel-vnets", "pdp, idle, threads", what], 512, ReportOnly));
    }
    all
}

/// Targets of links.
fn links() -> Vec<BenchTarget> {
    use Bound::{AtLeast, AtMost, ReportOnly};
    let target = |words, goal, series, what, x, bound| BenchTarget {
        description: words,
        goal,
        figure: ["links", series, what],
        x,
        state: None,
        bound,
        beside: Baseline::Nothing,
    };
    let (alone, own, hog) = ("pdp, mux alone", "pdp, mux on its own core", "pdp, beside a hog");
    let part = "pdp, 10 of 100 Mbit/s guaranteed";
    let fast = "pdp, 1 Gbit/s and 100 ms";
    let mut all = Vec::new();
    for (words, mbps) in [
        ("a link of 1 Mbit/s, off its rate", 1),
        ("of 10 Mbit/s", 10),
        ("of 100 Mbit/s", 100),
        ("of 1 Gbit/s", 1000),
        ("of 5 Gbit/s", 5000),
    ] {
        all.push(target(words, "0.5%", alone, "rate off", mbps..=mbps, AtMost(0.5)));
    }
    all.extend([
        target(
            "a link of 64 kbit/s, off its rate",
            "a frame",
            "pdp, a slow link",
            "frames off",
            ANY,
            AtMost(1.0),
        ),
        target(
            "1,000 links at once, the worst off its rate",
            "0.5%",
            "pdp, at once",
            "rate off, worst",
            ANY,
            AtMost(0.5),
        ),
    ]);
    for (words, ms) in
        [("a delay of 1 ms, off it, mux on its own core", 1), ("of 10 ms", 10), ("of 100 ms", 100)]
    {
        let x = ms..=ms;
        all.push(target(words, "100 µs", own, "delay off", x, AtMost(100.0)));
    }
    for (words, ms) in [("the same of 1 ms beside a hog", 1), ("of 10 ms", 10), ("of 100 ms", 100)]
    {
        all.push(target(words, "", hog, "delay off", ms..=ms, ReportOnly));
    }
    all.extend([
        target(
            "1 Gbit/s with 100 ms in frames of 1,500 bytes, of the rate",
            "99.5%",
            fast,
            "carried of the rate",
            ANY,
            AtLeast(99.5),
        ),
        target("frames lost there", "none", fast, "frames lost", ANY, AtMost(0.0)),
        target(
            "one TCP connection over 100 Mbit/s and 50 ms each way",
            "90 Mbit/s",
            "pdp, 50 ms each way",
            "TCP",
            ANY,
            AtLeast(90.0),
        ),
        target(
            "guarantees of 30, 25, 20, 15 and 10%, the worst off its part",
            "0.5%",
            "pdp, by guarantees",
            "share off, worst",
            ANY,
            AtMost(0.5),
        ),
        target(
            "64 links by weights, the worst off its part",
            "0.5%",
            "pdp, by weights",
            "share off, worst",
            ANY,
            AtMost(0.5),
        ),
        target(
            "a link at 90% of its guarantee while others send ten times the capacity: delay, median",
            "",
            part,
            "guaranteed: delay, median",
            ANY,
            ReportOnly,
        ),
        target(
            "the same, p99",
            "1.8 ms and how late the worker is",
            part,
            "guaranteed: delay, p99",
            ANY,
            ReportOnly,
        ),
        target("frames lost there", "none", part, "guaranteed: frames lost", ANY, AtMost(0.0)),
        target(
            "frames through a segment of 16 ends and 10,000 addresses, of those of two ends",
            "50%",
            "pdp, segment",
            "of two ends",
            ANY,
            AtLeast(50.0),
        ),
    ]);
    all
}

/// Result of a target.
#[derive(Clone, Debug, PartialEq)]
pub struct TargetResult {
    /// Value reached.
    pub reached: Summary,
    /// Unit.
    pub unit: String,
    /// State of the cores; `None` for pairs.
    pub state: Option<CoreProximity>,
    /// True if it meets the bound, if there is one.
    pub met: Option<bool>,
    /// Measured commit.
    pub commit: String,
}

impl BenchTarget {
    /// True if its figure was measured, but only in other states.
    pub fn in_another_state(&self, results: &[Results]) -> bool {
        let anywhere = Self { state: None, ..self.clone() };
        self.state.is_some() && anywhere.standing(results, &[]).is_some()
    }

    /// Result according to these measurements, in the state with the most samples.
    pub fn standing(
        &self,
        results: &[Results],
        comparisons: &[Comparison],
    ) -> Option<TargetResult> {
        let [experiment, series, what] = self.figure;
        let has = |x: f64| x >= f64::from(*self.x.start()) && x <= f64::from(*self.x.end());
        let met = |median: f64| match self.bound {
            Bound::AtLeast(bound) => Some(median >= bound),
            Bound::AtMost(bound) => Some(median <= bound),
            Bound::ReportOnly => None,
        };
        if let Some(comparison) = comparisons.iter().find(|c| c.experiment == experiment) {
            let (values, unit) = match self.beside {
                Baseline::Before => (comparison.times(series, what, has), "times"),
                Baseline::BeforeOne => (comparison.of_one(series, has), "%"),
                _ => (Vec::new(), ""),
            };
            if let Some(reached) = Summary::of(values) {
                let (unit, commit) = (unit.to_owned(), comparison.machine.pdp.clone());
                return Some(TargetResult {
                    reached,
                    unit,
                    state: None,
                    met: met(reached.median),
                    commit,
                });
            }
        }
        if self.beside == Baseline::Before {
            return None;
        }
        let results = results.iter().find(|results| results.experiment == experiment)?;
        let groups = groups(&results.samples, what);
        let own = groups.iter().filter(|group| {
            let is_in_state = self.state.is_none_or(|state| state == group.state);
            group.series == series && has(group.x) && is_in_state
        });
        // Among equal counts the nearer state wins: groups are in that order.
        let group = own.rev().max_by_key(|group| group.value.count)?;
        let unit = results.samples.iter().find(|sample| sample.what == what)?.unit.clone();
        let of_other = |other: &str| {
            let same =
                |o: &&SampleGroup| o.series == other && o.x == group.x && o.state == group.state;
            Some(groups.iter().find(same)?.value.median)
        };
        let change = |change: &dyn Fn(f64) -> f64| {
            let Summary { median, least, most, count } = group.value;
            Summary { median: change(median), least: change(least), most: change(most), count }
        };
        let (reached, unit) = match self.beside {
            Baseline::Less(other) => {
                let other = of_other(other)?;
                (change(&|value| value - other), unit)
            }
            Baseline::Over(other) => {
                let other = of_other(other)?;
                (change(&|value| value / other), "times".to_owned())
            }
            _ => (group.value, unit),
        };
        let (state, commit) = (Some(group.state), results.machine.pdp.clone());
        Some(TargetResult { reached, unit, state, met: met(reached.median), commit })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::tests::results;

    fn target(beside: Baseline, state: Option<CoreProximity>, bound: Bound) -> BenchTarget {
        let figure = ["veth", "pdp", "rate"];
        BenchTarget { description: "", goal: "", figure, x: FEW, state, bound, beside }
    }

    #[test]
    fn target_uses_only_its_own_series_and_state() {
        let results = [results(&[
            ("pdp", 2.0, 5.0, 60.0),
            ("pdp", 2.0, 7.0, 60.0),
            ("pdp", 2.0, 2.0, 300.0),
            ("pdp", 900_000.0, 1.0, 60.0),
            ("kernel", 2.0, 1.5, 60.0),
        ])];
        let stands = |beside, state, bound| {
            let standing = target(beside, state, bound).standing(&results, &[]);
            standing.map(|s| (s.state, s.reached.median, s.met))
        };
        let (near, far) = (Some(CoreProximity::Near), Some(CoreProximity::Far));
        let at_least = |state, bound| stands(Baseline::Nothing, state, Bound::AtLeast(bound));
        assert_eq!(at_least(near, 6.0), Some((near, 6.0, Some(true))));
        assert_eq!(at_least(near, 6.1), Some((near, 6.0, Some(false))));
        assert_eq!(at_least(far, 3.0), Some((far, 2.0, Some(false))));
        assert_eq!(at_least(None, 3.0), Some((near, 6.0, Some(true))), "most samples are near");
        assert_eq!(stands(Baseline::Nothing, near, Bound::ReportOnly), Some((near, 6.0, None)));
        let less = stands(Baseline::Less("kernel"), None, Bound::AtMost(4.5));
        assert_eq!(less, Some((near, 4.5, Some(true))));
        let over = stands(Baseline::Over("kernel"), None, Bound::AtLeast(4.1));
        assert_eq!(over, Some((near, 4.0, Some(false))));
        assert_eq!(stands(Baseline::Before, None, Bound::AtLeast(1.0)), None, "no pairs");
        assert_eq!(at_least(Some(CoreProximity::Between), 1.0), None);

        let elsewhere = |state| {
            target(Baseline::Nothing, state, Bound::ReportOnly).in_another_state(&results[..])
        };
        assert!(elsewhere(Some(CoreProximity::Between)), "near and far are there");
        assert!(!elsewhere(None), "any state is its own");
        let mut other = target(Baseline::Nothing, near, Bound::ReportOnly);
        other.figure[1] = "ovs";
        assert!(!other.in_another_state(&results), "never measured");
    }

    #[test]
    fn every_target_names_an_experiment() {
        for target in all() {
            let [experiment, _, _] = target.figure;
            assert!(crate::experiments::named(experiment).is_some(), "{experiment}");
        }
    }
}
