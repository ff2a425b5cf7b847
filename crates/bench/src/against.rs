//! Two builds of PdP in one run: pairs of the same experiment, in turn, each from its own start.
//!
//! A pair is what the build before and this one came to, one right after the other; who is first
//! changes from pair to pair. Everything of a side comes from its own directory, since builds speak
//! their own protocols. Of the pairs' ratios the median counts, with its 95 % interval: a build is no
//! slower where that reaches 1. A pair of which a sample was disturbed, or whose samples are of different
//! states of the cores, is left out.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};

use crate::experiments::{Experiment, Subject};
use crate::machine::{self, Machine};
use crate::run::{Effort, interrupted};
use crate::sample::{Results, SCHEMA, Sample};
use crate::statistics::{Summary, median_interval};

/// Figures of a pair.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Pair {
    /// Whose, as [`Sample::series`].
    pub series: String,
    /// What was measured.
    pub what: String,
    /// The parameter.
    pub x: f64,
    /// What the parameter counts.
    pub x_unit: String,
    /// Unit of the figures.
    pub unit: String,
    /// Of which turn, from 1.
    pub turn: u32,
    /// What the build before came to.
    pub before: f64,
    /// What this one came to.
    pub now: f64,
}

/// What a comparison came to.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Comparison {
    /// [`SCHEMA`].
    pub schema: u32,
    /// Name of the experiment.
    pub experiment: String,
    /// When it began, UTC.
    pub began: String,
    /// How long it took, seconds.
    pub seconds: f64,
    /// Where, and which version.
    pub machine: Machine,
    /// The build before, in words: its commit.
    pub before: String,
    /// Pairs that were left out.
    pub left_out: usize,
    /// The others.
    pub pairs: Vec<Pair>,
}

/// How a figure stands against the build before.
#[derive(Clone, Debug, PartialEq)]
pub struct Ratio {
    /// Whose.
    pub series: String,
    /// What was measured.
    pub what: String,
    /// The parameter, and what it counts.
    pub x: (f64, String),
    /// How many times as good as before: of a rate the ratio, of a time its inverse.
    pub times: Summary,
    /// The 95 % interval of the median; `None` of fewer than six pairs.
    pub interval: Option<[f64; 2]>,
}

impl Ratio {
    /// Whether it is no slower than before, if that can be said.
    pub fn is_no_slower(&self) -> Option<bool> {
        self.interval.map(|[_, upper]| upper >= 1.0)
    }
}

/// Which figures are better.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Better {
    More,
    Less,
}

/// Which figures of a unit are better; of others, such as shares, none.
fn better(what: &str, unit: &str) -> Option<Better> {
    match unit {
        _ if what == "offered" => None,
        "Mpps" | "million" | "million/s" | "thousand/s" | "Mb/s" => Some(Better::More),
        "µs" | "ms" => Some(Better::Less),
        _ => None,
    }
}

impl Comparison {
    /// Compares a build with the one in a directory, of this commit, in as many pairs as there are rounds.
    pub fn of(
        experiment: &Experiment,
        effort: &Effort,
        now: Option<&Path>,
        before: &Path,
        commit: &str,
    ) -> Result<Self> {
        ensure!(
            experiment.subject != Subject::Machine,
            "{} has nothing of PdP in it",
            experiment.name
        );
        let own = std::env::current_exe()?;
        let now = now.or(own.parent()).context("the directory of this program")?;
        let began = machine::said("date", &["-u", "+%FT%TZ"]);
        let (start, directory) = (Instant::now(), tempfile::tempdir()?);
        let (mut pairs, mut left_out) = (Vec::new(), 0);
        for turn in 1..=effort.rounds {
            eprintln!("pair {turn}/{}", effort.rounds);
            let half = |binaries: &Path| half(experiment, effort, binaries, directory.path());
            let [of_before, of_now] = if turn % 2 == 1 {
                let first = half(before)?;
                [first, half(now)?]
            } else {
                let first = half(now)?;
                [half(before)?, first]
            };
            left_out += pair_up(turn, &of_before, &of_now, &mut pairs);
        }
        Ok(Self {
            schema: SCHEMA,
            experiment: experiment.name.to_owned(),
            began,
            seconds: start.elapsed().as_secs_f64().round(),
            machine: Machine::here(),
            before: commit.to_owned(),
            left_out,
            pairs,
        })
    }

    /// Where the comparison of an experiment is kept in the repository.
    pub fn file(experiment: &str) -> String {
        format!("bench/results/{experiment}-against.json")
    }

    /// Writes a file.
    pub fn write(&self, path: &Path) -> Result<()> {
        let mut text = serde_json::to_string_pretty(self)?;
        text.push('\n');
        fs::write(path, text).with_context(|| path.display().to_string())
    }

    /// Reads a file.
    pub fn read(path: &Path) -> Result<Self> {
        let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
        serde_json::from_str(&text).with_context(|| path.display().to_string())
    }

    /// Each figure's ratios, in the order of the samples.
    pub fn ratios(&self) -> Vec<Ratio> {
        let mut order: Vec<Ratio> = Vec::new();
        let mut seen = BTreeMap::new();
        for pair in &self.pairs {
            let Some(better) = better(&pair.what, &pair.unit) else { continue };
            let key = (&pair.series, &pair.what, pair.x.to_bits());
            let times: &mut Vec<f64> = seen.entry(key).or_default();
            times.push(match better {
                Better::More => pair.now / pair.before,
                Better::Less => pair.before / pair.now,
            });
        }
        for pair in &self.pairs {
            let key = (&pair.series, &pair.what, pair.x.to_bits());
            let Some(times) = seen.remove(&key) else { continue };
            let interval = median_interval(&times);
            let Some(times) = Summary::of(times) else { continue };
            let x = (pair.x, pair.x_unit.clone());
            let (series, what) = (pair.series.clone(), pair.what.clone());
            order.push(Ratio { series, what, x, times, interval });
        }
        order
    }

    /// How many times as good as before figures at some parameters are, pair by pair.
    pub fn times(&self, series: &str, what: &str, has: impl Fn(f64) -> bool) -> Vec<f64> {
        let own = self.pairs.iter().filter(|p| p.series == series && p.what == what && has(p.x));
        own.map(|pair| pair.now / pair.before).collect()
    }

    /// Rates at some parameters as shares of the build before's rate at the parameter 1 in the same
    /// turn, percent.
    pub fn of_one(&self, series: &str, has: impl Fn(f64) -> bool) -> Vec<f64> {
        let rates = |has: &dyn Fn(f64) -> bool| -> Vec<&Pair> {
            let own = |p: &&Pair| p.series == series && p.what == "rate" && has(p.x);
            self.pairs.iter().filter(own).collect()
        };
        let ones = rates(&|x| x == 1.0);
        let of_one = |pair: &&Pair| {
            let one = ones.iter().find(|one| one.turn == pair.turn)?;
            Some(pair.now / one.before * 100.0)
        };
        rates(&has).iter().filter_map(of_one).collect()
    }

    /// As a table, for people.
    pub fn table(&self) -> String {
        let mut text = format!("{}, this build against {}\n", self.experiment, self.before);
        for ratio in self.ratios() {
            let Ratio { series, what, x: (x, x_unit), times, interval } = &ratio;
            let interval = interval.map_or("too few pairs".to_owned(), |[lower, upper]| {
                let verdict = if upper >= 1.0 { "no slower" } else { "SLOWER" };
                format!("95%: {lower:.3} to {upper:.3}, {verdict}")
            });
            let (median, count) = (times.median, times.count);
            text += &format!(
                "  {series}, {x} {x_unit}, {what}: {median:.3} times ({interval}; {count} pairs)\n"
            );
        }
        text + &format!("  {} pairs left out: disturbed, or of different states\n", self.left_out)
    }
}

/// One round of an experiment with the binaries of a directory.
fn half(
    experiment: &Experiment,
    effort: &Effort,
    binaries: &Path,
    directory: &Path,
) -> Result<Results> {
    ensure!(!interrupted(), "interrupted");
    let json = directory.join("half.json");
    let mut command = match experiment.subject {
        Subject::Library => Command::new(binaries.join("pdp-bench")),
        _ => Command::new(std::env::current_exe()?),
    };
    command.args(["run", experiment.name, "--rounds", "1", "--json"]).arg(&json);
    if effort.quick {
        command.arg("--quick");
    }
    if experiment.subject == Subject::Pdp {
        command.arg("--alone").arg("--binaries").arg(binaries);
        for at in &effort.at {
            command.args(["--at", &at.to_string()]);
        }
    }
    let status = command.status().with_context(|| format!("{command:?}"))?;
    ensure!(status.success(), "{command:?}: {status}");
    Results::read(&json)
}

/// Adds pairs of two halves; how many were left out.
fn pair_up(turn: u32, before: &Results, now: &Results, pairs: &mut Vec<Pair>) -> usize {
    let mut left_out = 0;
    let compared = |sample: &&Sample| better(&sample.what, &sample.unit).is_some();
    for sample in now.samples.iter().filter(compared) {
        let key = |s: &Sample| (s.series.clone(), s.what.clone(), s.x.to_bits());
        // What was measured several times, as that which others are compared with: the mean of them.
        let own = |results: &Results| -> Vec<Sample> {
            results.samples.iter().filter(|other| key(other) == key(sample)).cloned().collect()
        };
        let (before, now) = (own(before), own(now));
        if now.first() != Some(sample) || before.is_empty() {
            continue;
        }
        let all = || before.iter().chain(&now);
        let full_speed = all().map(|s| s.core_speed).fold(0.0, f64::max);
        if all().any(|s| s.is_disturbed(full_speed) || s.state != sample.state) {
            left_out += 1;
            continue;
        }
        let mean = |samples: &[Sample]| {
            samples.iter().map(|s| s.value).sum::<f64>() / samples.len() as f64
        };
        pairs.push(Pair {
            series: sample.series.clone(),
            what: sample.what.clone(),
            x: sample.x,
            x_unit: sample.x_unit.clone(),
            unit: sample.unit.clone(),
            turn,
            before: mean(&before),
            now: mean(&now),
        });
    }
    left_out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::tests::results;

    #[test]
    fn pairs_are_of_the_same_figure_and_state_and_undisturbed() {
        let before = results(&[
            ("pdp", 1.0, 2.0, 60.0),
            ("pdp", 1.0, 4.0, 60.0),
            ("pdp", 2.0, 1.0, 60.0),
            ("pdp", 3.0, 1.0, 60.0),
        ]);
        let mut now = results(&[
            ("pdp", 1.0, 6.0, 60.0),
            ("pdp", 2.0, 1.0, 300.0),
            ("pdp", 3.0, 1.0, 60.0),
            ("pdp, new", 1.0, 1.0, 60.0),
        ]);
        now.samples[2].stolen = 0.5;
        let mut pairs = Vec::new();
        assert_eq!(pair_up(1, &before, &now, &mut pairs), 2, "another state, and a disturbed one");
        let found: Vec<_> = pairs.iter().map(|p| (&*p.series, p.x, p.before, p.now)).collect();
        assert_eq!(found, [("pdp", 1.0, 3.0, 6.0)]);
    }

    #[test]
    fn rates_are_better_if_more_and_times_if_less() {
        let pair = |what: &str, unit: &str, before, now| Pair {
            series: "pdp".into(),
            what: what.into(),
            x: 1.0,
            x_unit: "routes".into(),
            unit: unit.into(),
            turn: 1,
            before,
            now,
        };
        let mut pairs = vec![pair("loss", "%", 1.0, 2.0), pair("offered", "Mpps", 1.0, 2.0)];
        for more in 0..6 {
            pairs.push(pair("rate", "Mpps", 10.0, 11.0 + f64::from(more)));
            pairs.push(pair("median", "µs", 10.0, 20.0));
        }
        let comparison = Comparison {
            schema: SCHEMA,
            experiment: "router".into(),
            began: String::new(),
            seconds: 1.0,
            machine: Machine::default(),
            before: "some".into(),
            left_out: 0,
            pairs,
        };
        let ratios = comparison.ratios();
        let found: Vec<_> = ratios.iter().map(|r| (&*r.what, r.times.median, r.interval)).collect();
        let expected = [("rate", 1.35, Some([1.1, 1.6])), ("median", 0.5, Some([0.5, 0.5]))];
        assert_eq!(found, expected);
        let no_slower: Vec<_> = ratios.iter().map(Ratio::is_no_slower).collect();
        assert_eq!(no_slower, [Some(true), Some(false)]);
        assert!(comparison.table().contains("pdp, 1 routes, median: 0.500 times"));
    }
}
