//! What is to be reached, and by which figure it is judged.

use std::ops::RangeInclusive;

use crate::experiments::{paper, schedulers};
use crate::sample::{Results, State};
use crate::statistics::{Summary, groups};

/// How a figure is judged.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Bound {
    /// Its median is at least this.
    AtLeast(f64),
    /// Its median is at most this.
    AtMost(f64),
    /// None: the figure is asked for, not a value of it.
    Told,
}

/// Something to be reached.
#[derive(Clone, Debug)]
pub struct Target {
    /// In words.
    pub words: &'static str,
    /// Experiment, series and kind of the figure.
    pub figure: [&'static str; 3],
    /// At which parameters.
    pub x: RangeInclusive<u32>,
    /// Only in this state of the cores.
    pub state: Option<State>,
    /// The bound.
    pub bound: Bound,
    /// Figure of another series that is subtracted.
    pub less: Option<&'static str>,
}

/// Parameters: any.
const ANY: RangeInclusive<u32> = 0..=u32::MAX;
/// Two routes, and the full table.
const FEW: RangeInclusive<u32> = 1..=2;
const FULL: RangeInclusive<u32> = 900_000..=1_000_000;

/// The guest's share of a core, percent.
const HALF: RangeInclusive<u32> = 50..=50;
/// Guests.
const THREE: RangeInclusive<u32> = 3..=3;

/// All, in the order in which they are reported.
pub fn all() -> Vec<Target> {
    let target =
        |words, figure, x, state, bound| Target { words, figure, x, state, bound, less: None };
    let (near, far) = (Some(State::Near), Some(State::Far));
    use Bound::{AtLeast, AtMost, Told};
    let router = ["router", "pdp, two cores", "rate"];
    let of_cpu = "of linear, for a guest's CPU second";
    let mut all = vec![
        target(
            "whole way, two cores, 2 routes, near: above 18 Mpps",
            router,
            FEW,
            near,
            AtLeast(18.0),
        ),
        target(
            "whole way, two cores, 2 routes, far: above 13 Mpps",
            router,
            FEW,
            far,
            AtLeast(13.0),
        ),
        target(
            "whole way, two cores, full table, near: above 12 Mpps",
            router,
            FULL,
            near,
            AtLeast(12.0),
        ),
        target(
            "whole way, two cores, full table, far: above 9 Mpps",
            router,
            FULL,
            far,
            AtLeast(9.0),
        ),
        target(
            "whole way, mux and guest on one core, half for each: above 6 Mpps",
            ["one-core", "pdp", "rate"],
            HALF,
            None,
            AtLeast(6.0),
        ),
    ];
    for (words, series) in [
        ("veth to veth, 2 routes, AF_XDP, two cores: above 600 kpps", "pdp, two cores"),
        ("veth to veth, 2 routes, AF_XDP, one core: above 600 kpps", "pdp, one core"),
        ("veth to veth, 2 routes, packet sockets: above 600 kpps", "pdp, packet sockets"),
    ] {
        all.push(target(words, ["veth", series, "rate"], FEW, None, AtLeast(0.6)));
    }
    for (words, series, bound) in [
        (
            "look-ups at random over the full IPv4 table: at least 100 million/s a core",
            "IPv4",
            100.0,
        ),
        (
            "look-ups inside the full IPv4 table's prefixes while 100,000 routes/s change: at least \
             100 million/s a core",
            "IPv4, while updated",
            100.0,
        ),
        ("look-ups over the full IPv6 table: at least 50 million/s a core", "IPv6", 50.0),
        (
            "look-ups over the full IPv6 table while 100,000 routes/s change: at least 50 million/s \
             a core",
            "IPv6, while updated",
            50.0,
        ),
    ] {
        all.push(target(words, ["lookup", series, "rate"], ANY, None, AtLeast(bound)));
    }
    for (words, series, bound) in [
        ("memory of the full IPv4 table: under 64 MB", "IPv4, while updated", 64.0),
        ("memory of the full IPv6 table: under 64 MB", "IPv6, while updated", 64.0),
        ("memory of the tables of 1,000 networks of ten routes: a few MB", "1,000 networks", 8.0),
    ] {
        all.push(target(words, ["lookup", series, "memory"], ANY, None, AtMost(bound)));
    }
    let [experiment, series] = ["churn", "1 Mpps"];
    all.extend([
        target(
            "route changes, as many as go, from the kernel to the guest, 1 Mpps forwarded: at least \
             100,000/s",
            [experiment, series, "applied"],
            1_000_000..=u32::MAX,
            None,
            AtLeast(100.0),
        ),
        target(
            "longest pause in forwarding beside 100,000 route changes/s",
            [experiment, series, "pause"],
            100_000..=100_000,
            None,
            Told,
        ),
        target(
            "longest pause in forwarding without route changes, to compare",
            [experiment, series, "pause"],
            0..=0,
            None,
            Told,
        ),
    ]);
    all.extend([
        target(
            "overload: at ten times the capacity within 5% of the peak",
            ["overload", "pdp", "of peak"],
            10..=10,
            None,
            AtLeast(95.0),
        ),
        target(
            "overload: the same for each second of the guest's CPU time",
            ["overload", "pdp", "of peak, for a guest's CPU second"],
            10..=10,
            None,
            AtLeast(95.0),
        ),
        Target {
            less: Some("kernel"),
            ..target(
                "round-trip time added at idle, against the kernel's forwarding: under 50 µs median",
                ["rtt", "pdp, two cores", "median"],
                ANY,
                None,
                AtMost(50.0),
            )
        },
    ]);
    for (words, series) in schedulers::WORDS {
        all.push(target(words, ["schedulers", series, "p99"], 100..=100, None, Told));
    }
    all.extend([
        target(
            "1 to 1,024 vnets: no cliff (80% of one's rate or more)",
            ["vnets", "pdp", "of one"],
            2..=1024,
            None,
            AtLeast(80.0),
        ),
        target(
            "capped guests scale linearly: within 5% at three guests, ordered",
            ["scaling", "ordered", "of linear"],
            THREE,
            None,
            AtLeast(95.0),
        ),
        target(
            "the same for each second of the guests' CPU time",
            ["scaling", "ordered", of_cpu],
            THREE,
            None,
            AtLeast(95.0),
        ),
        target(
            "capped guests get their quota: three guests, ordered, the one that had least, at least 95%",
            ["scaling", "ordered", "CPU time of the guest that had least"],
            THREE,
            None,
            AtLeast(95.0),
        ),
        target(
            "capped guests get no more: the one that had most, at most 105%",
            ["scaling", "ordered", "CPU time of the guest that had most"],
            THREE,
            None,
            AtMost(105.0),
        ),
        target(
            "ordered distribution, one flow over three unequal guests: no packet late",
            ["pdp-paper", "ordered", paper::REORDERED],
            THREE,
            None,
            AtMost(0.0),
        ),
    ]);
    all
}

/// How a target stands.
#[derive(Clone, Debug, PartialEq)]
pub struct Standing {
    /// What was reached, in the target's state.
    pub reached: Summary,
    /// Its unit.
    pub unit: String,
    /// In which state.
    pub state: State,
    /// Whether that is enough; where the target has a bound.
    pub met: Option<bool>,
}

impl Target {
    /// Whether its figure was measured, but in other states than its own.
    pub fn in_another_state(&self, results: &[Results]) -> bool {
        let anywhere = Self { state: None, ..self.clone() };
        self.state.is_some() && !anywhere.standings(results).is_empty()
    }

    /// How it stands by these results: for each state and parameter that was measured.
    pub fn standings(&self, results: &[Results]) -> Vec<Standing> {
        let [experiment, series, what] = self.figure;
        let Some(results) = results.iter().find(|results| results.experiment == experiment) else {
            return Vec::new();
        };
        let groups = groups(&results.samples, what);
        let in_range = |x: f64| x >= f64::from(*self.x.start()) && x <= f64::from(*self.x.end());
        let unit = results.samples.iter().find(|sample| sample.what == what);
        let own = groups.iter().filter(|group| {
            group.series == series
                && in_range(group.x)
                && self.state.is_none_or(|state| state == group.state)
        });
        own.filter_map(|group| {
            let mut reached = group.value;
            if let Some(other) = self.less {
                let same = |o: &&crate::statistics::Group| {
                    o.series == other && o.x == group.x && o.state == group.state
                };
                let less = groups.iter().find(same)?.value.median;
                let [median, least, most] =
                    [reached.median, reached.least, reached.most].map(|value| value - less);
                reached = Summary { median, least, most, ..reached };
            }
            let met = match self.bound {
                Bound::AtLeast(bound) => Some(reached.median >= bound),
                Bound::AtMost(bound) => Some(reached.median <= bound),
                Bound::Told => None,
            };
            let unit = unit.map_or(String::new(), |sample| sample.unit.clone());
            Some(Standing { reached, unit, state: group.state, met })
        })
        .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::tests::results;

    fn target(less: Option<&'static str>, state: Option<State>, bound: Bound) -> Target {
        Target { words: "", figure: ["veth", "pdp", "rate"], x: FEW, state, bound, less }
    }

    #[test]
    fn a_target_is_judged_by_its_own_series_parameters_and_state() {
        let results = [results(&[
            ("pdp", 2.0, 5.0, 60.0),
            ("pdp", 2.0, 7.0, 60.0),
            ("pdp", 2.0, 2.0, 300.0),
            ("pdp", 900_000.0, 1.0, 60.0),
            ("kernel", 2.0, 1.5, 60.0),
        ])];
        let met = |target: Target| {
            let standings = target.standings(&results);
            standings.iter().map(|s| (s.state, s.reached.median, s.met)).collect::<Vec<_>>()
        };
        let (near, far) = (State::Near, State::Far);
        let at_least = |state, bound| met(target(None, state, Bound::AtLeast(bound)));
        assert_eq!(at_least(Some(near), 6.0), [(near, 6.0, Some(true))]);
        assert_eq!(at_least(Some(near), 6.1), [(near, 6.0, Some(false))]);
        let both = [(near, 6.0, Some(true)), (far, 2.0, Some(false))];
        assert_eq!(at_least(None, 3.0), both);
        assert_eq!(met(target(None, Some(near), Bound::Told)), [(near, 6.0, None)]);
        let less = met(target(Some("kernel"), None, Bound::AtMost(4.5)));
        assert_eq!(less, [(near, 4.5, Some(true))]);

        let elsewhere = |state| target(None, state, Bound::Told).in_another_state(&results[..]);
        assert!(elsewhere(Some(State::Between)), "near and far are there");
        assert!(!elsewhere(None), "any state is its own");
        let mut other = target(None, Some(near), Bound::Told);
        other.figure[1] = "ovs";
        assert!(!other.in_another_state(&results), "never measured");
    }

    #[test]
    fn every_target_is_of_an_experiment() {
        for target in all() {
            let [experiment, _, _] = target.figure;
            assert!(crate::experiments::named(experiment).is_some(), "{experiment}");
        }
    }
}
