//! Comparison of two builds of PdP in one run. Pairs of the
//! same experiment alternate, each from its own start.
//!
//! A pair is the results of the previous build and this one, measured one right after the other;
//! their order changes from pair to pair. Builds have different internal protocols, so all binaries
//! of a side come from its own directory. The median of the pairs' ratios counts, with its 95 %
//! interval: a build is no slower if that interval reaches 1. A pair is left out if one of its
//! samples was disturbed, or if its samples have different core states.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use pdp_testbed::interrupted;
use serde::{Deserialize, Serialize};

use crate::experiments::{BenchExperiment, Subject};
use crate::machine::{self, MachineInfo};
use crate::run::Effort;
use crate::sample::{FigureSample, Results, SCHEMA};
use crate::statistics::{Summary, median_interval};

/// Figures of a pair.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Pair {
    /// Series, as [`FigureSample::series`].
    pub series: String,
    /// Kind of figure.
    pub what: String,
    /// The parameter.
    pub x: f64,
    /// Unit of the parameter.
    pub x_unit: String,
    /// Unit of the figures.
    pub unit: String,
    /// Number of the turn, from 1.
    pub turn: u32,
    /// Value of the previous build.
    pub before: f64,
    /// Value of this build.
    pub now: f64,
}

/// Result of a comparison.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Comparison {
    /// [`SCHEMA`].
    pub schema: u32,
    /// Name of the experiment.
    pub experiment: String,
    /// Start time, UTC.
    pub began: String,
    /// Duration, seconds.
    pub seconds: f64,
    /// Machine and version.
    pub machine: MachineInfo,
    /// Description of the previous build: its commit.
    pub before: String,
    /// Number of pairs left out.
    pub left_out: usize,
    /// The remaining pairs.
    pub pairs: Vec<Pair>,
}

/// A figure compared with the previous build.
#[derive(Clone, Debug, PartialEq)]
pub struct Ratio {
    /// Series.
    pub series: String,
    /// Kind of figure.
    pub what: String,
    /// The parameter and its unit.
    pub x: (f64, String),
    /// Improvement factor: for a rate the ratio, for a time its inverse.
    pub times: Summary,
    /// The 95 % interval of the median; `None` for fewer than six pairs.
    pub interval: Option<[f64; 2]>,
}

impl Ratio {
    /// True if this build is no slower; `None` for too few pairs.
    pub fn is_no_slower(&self) -> Option<bool> {
        self.interval.map(|[_, upper]| upper >= 1.0)
    }
}

/// Direction of improvement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Better {
    More,
    Less,
}

/// Direction of improvement of a unit; `None` for others, such as shares.
fn better(what: &str, unit: &str) -> Option<Better> {
    match unit {
        _ if what == "offered" => None,
        "Mpps" | "million" | "million/s" | "thousand/s" | "Mb/s" => Some(Better::More),
        "µs" | "ms" => Some(Better::Less),
        _ => None,
    }
}

impl Comparison {
    /// Compares this build with the one of that commit in a
    /// directory, in as many pairs as there are rounds.
    pub fn of(
        experiment: &BenchExperiment,
        effort: &Effort,
        now: Option<&Path>,
        before: &Path,
        commit: &str,
    ) -> Result<Self> {
        ensure!(experiment.subject != Subject::Machine, "{} does not measure PdP", experiment.name);
        let own = std::env::current_exe()?;
        let now = now.or(own.parent()).context("the directory of this program")?;
        let began = machine::first_output_line("date", &["-u", "+%FT%TZ"]);
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
            machine: MachineInfo::here(),
            before: commit.to_owned(),
            left_out,
            pairs,
        })
    }

    /// Path in the repository of an experiment's comparison.
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

    /// Improvement factors of the figures at some parameters, pair by pair.
    pub fn times(&self, series: &str, what: &str, has: impl Fn(f64) -> bool) -> Vec<f64> {
        let own = self.pairs.iter().filter(|p| p.series == series && p.what == what && has(p.x));
        own.map(|pair| pair.now / pair.before).collect()
    }

    /// Rates at some parameters as percentages of the previous
    /// build's rate at parameter 1 in the same turn.
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

    /// Formats a table for people.
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

/// Runs one round of an experiment with the binaries of a directory.
fn half(
    experiment: &BenchExperiment,
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

/// Adds the pairs of two halves; returns the number left out.
fn pair_up(turn: u32, before: &Results, now: &Results, pairs: &mut Vec<Pair>) -> usize {
    let mut left_out = 0;
    let compared = |sample: &&FigureSample| better(&sample.what, &sample.unit).is_some();
    for sample in now.samples.iter().filter(compared) {
        let key = |s: &FigureSample| (s.series.clone(), s.what.clone(), s.x.to_bits());
        // For a value measured several times, as a reference for others: the mean.
        let own = |results: &Results| -> Vec<FigureSample> {
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
        let mean = |samples: &[FigureSample]| {
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
    fn pairs_match_figure_and_state_and_are_undisturbed() {
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
    fn higher_rates_and_shorter_times_are_better() {
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
            machine: MachineInfo::default(),
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
