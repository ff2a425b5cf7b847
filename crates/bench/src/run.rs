//! Run of an experiment: rounds, the state of the machine with each sample, progress, time.

use std::cell::Cell;
use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use pdp_testbed::{interrupted, meter};

use crate::machine::{self, MachineInfo};
pub use crate::reading::Reading;
use crate::sample::{CoreProximity, FigureSample, Results, SCHEMA};
use crate::steal::{Ticks, least_disturbed};

/// Part of an experiment's usual time that repeats of disturbed samples may take.
const REPEATS_SHARE: f64 = 0.15;

/// Thoroughness of measurements.
#[derive(Clone, Debug, Default)]
pub struct Effort {
    /// Number of rounds.
    pub rounds: u32,
    /// Shorter, with fewer parameters.
    pub quick: bool,
    /// Parameters to measure; empty for all.
    pub at: Vec<usize>,
    /// Only PdP, without its peers.
    pub alone: bool,
}

/// Figures of one series at one parameter, for measurements with several of them.
#[derive(Clone, Debug)]
pub struct Point {
    /// As [`FigureSample::series`].
    pub series: String,
    /// As [`FigureSample::x`].
    pub x: f64,
    /// As [`FigureSample::x_unit`].
    pub x_unit: &'static str,
    /// The figures.
    pub readings: Vec<Reading>,
}

/// State of the machine before and during a measurement; see [`FigureSample`].
#[derive(Clone, Copy, Debug)]
struct Meanwhile {
    core_to_core_ns: f64,
    core_speed: f64,
    stolen: f64,
}

impl Meanwhile {
    /// Formats it for progress.
    fn words(&self) -> String {
        let &Self { core_to_core_ns, core_speed, stolen } = self;
        let (state, stolen) = (CoreProximity::of(core_to_core_ns).word(), stolen * 100.0);
        format!("{state}, {core_to_core_ns:.0} ns, speed {core_speed:.1}, {stolen:.0}% stolen")
    }
}

/// An experiment.
#[derive(Clone, Copy, Debug)]
pub struct BenchExperiment {
    /// Name, and that of its results.
    pub name: &'static str,
    /// Description for people.
    pub about: &'static str,
    /// Usual duration on two cores, seconds. Progress and the distribution of time rely on it.
    pub seconds: u32,
    /// Part of PdP that it measures.
    pub subject: Subject,
    /// Runs it.
    pub run: fn(&mut ExperimentRun) -> Result<()>,
}

/// Part of PdP that an experiment measures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Subject {
    /// Nothing: only the machine and peers.
    Machine,
    /// A part of it inside this program.
    Library,
    /// A node.
    Pdp,
}

/// Duration of a quick run, as a fraction of the usual one.
const QUICK_SHARE: f64 = 0.25;

impl BenchExperiment {
    /// Usual duration.
    pub fn usual(&self, quick: bool) -> Duration {
        let share = if quick { QUICK_SHARE } else { 1.0 };
        Duration::from_secs(self.seconds.into()).mul_f64(share)
    }
}

/// A run of an experiment.
#[derive(Debug)]
pub struct ExperimentRun {
    effort: Effort,
    /// Time when it must be over.
    end: Option<Instant>,
    /// Remaining time for repeats.
    repeats: Duration,
    round: u32,
    samples: Vec<FigureSample>,
    missing: Vec<String>,
    /// True if time was up before all was done.
    cut: bool,
}

impl ExperimentRun {
    /// Runs an experiment to its end, or until time is up. Failures are listed as missing. The flag
    /// is true if it finished and has any result.
    pub fn of(
        experiment: &BenchExperiment,
        effort: &Effort,
        end: Option<Instant>,
    ) -> (Results, bool) {
        let began = machine::first_output_line("date", &["-u", "+%FT%TZ"]);
        let start = Instant::now();
        let repeats = experiment.usual(effort.quick).mul_f64(REPEATS_SHARE);
        let (samples, missing) = (Vec::new(), Vec::new());
        let effort = effort.clone();
        let quick = effort.quick;
        let mut run = Self { effort, end, repeats, round: 1, samples, missing, cut: false };
        eprintln!("{}: {}", experiment.name, experiment.about);
        let done = run.attempt("all of it", |run| (experiment.run)(run));
        let whole = done.is_some() && !run.cut && !run.samples.is_empty();
        let results = Results {
            schema: SCHEMA,
            experiment: experiment.name.to_owned(),
            began,
            seconds: start.elapsed().as_secs_f64().round(),
            quick,
            machine: MachineInfo::here(),
            missing: run.missing,
            samples: run.samples,
        };
        (results, whole)
    }

    /// True during the first round.
    pub fn is_first(&self) -> bool {
        self.round == 1
    }

    /// Shorter, with fewer parameters.
    pub fn quick(&self) -> bool {
        self.effort.quick
    }

    /// True if this parameter should be measured.
    pub fn wants(&self, x: usize) -> bool {
        self.effort.at.is_empty() || self.effort.at.contains(&x)
    }

    /// Selects the parameters to measure: the requested ones; otherwise, in quick runs, these few.
    pub fn choose(&self, all: &[usize], few: &[usize]) -> Vec<usize> {
        let from = if self.quick() && self.effort.at.is_empty() { few } else { all };
        from.iter().copied().filter(|x| self.wants(*x)).collect()
    }

    /// True if a series should be measured. PdP's always are, peers' unless PdP is measured alone.
    pub fn wants_series(&self, series: &str) -> bool {
        !self.effort.alone || series.starts_with("pdp")
    }

    /// Duration of one sample.
    pub fn time(&self) -> Duration {
        if self.quick() { Duration::from_millis(500) } else { Duration::from_secs(2) }
    }

    /// The first core, for the measured program, and the last one, for generator and sink.
    pub fn cores(&self) -> [usize; 2] {
        [0, machine::cores() - 1]
    }

    /// Remaining time.
    pub fn left(&self) -> Duration {
        self.end.map_or(Duration::MAX, |end| end.saturating_duration_since(Instant::now()))
    }

    /// True if it must be over. Callers then stop.
    fn over(&mut self) -> bool {
        self.cut |= self.end.is_some_and(|end| Instant::now() >= end);
        self.cut || interrupted()
    }

    /// Calls `each` for each round.
    pub fn rounds(&mut self, mut each: impl FnMut(&mut Self) -> Result<()>) -> Result<()> {
        for round in 1..=self.effort.rounds {
            ensure!(!self.over(), "time was up before round {round}");
            self.round = round;
            each(self)?;
        }
        Ok(())
    }

    /// Runs a step. Errors and panics, as of the test harness, are
    /// recorded, and the run continues; returns `None` then.
    pub fn attempt<T>(
        &mut self,
        what: impl Display,
        work: impl FnOnce(&mut Self) -> Result<T>,
    ) -> Option<T> {
        if self.over() {
            self.miss(format!("{what}: time was up"));
            return None;
        }
        let error = match catch_unwind(AssertUnwindSafe(|| work(self))) {
            Ok(Ok(done)) => return Some(done),
            Ok(Err(error)) => format!("{error:#}"),
            Err(panic) => {
                let text = panic.downcast_ref::<String>().cloned();
                let text = text.or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_owned()));
                text.unwrap_or_else(|| "panicked".to_owned())
            }
        };
        let first: Vec<&str> = error.lines().take(3).collect();
        self.miss(format!("{what}: {}", first.join(" ")));
        None
    }

    /// Records a missing measurement and the reason.
    pub fn miss(&mut self, text: String) {
        eprintln!("  not measured: {text}");
        if !self.missing.contains(&text) {
            self.missing.push(text);
        }
    }

    /// Takes samples of one series at one parameter. No core may poll when this is called.
    pub fn take(
        &mut self,
        series: &str,
        x: f64,
        x_unit: &str,
        measure: impl FnMut() -> Result<Vec<Reading>>,
    ) {
        self.take_as(series, x, x_unit, measure, |readings| readings);
    }

    /// Like [`Self::take`], with figures computed from the measurement. Disturbed measurements that
    /// are repeated never reach `readings`.
    pub fn take_as<T>(
        &mut self,
        series: &str,
        x: f64,
        x_unit: &str,
        measure: impl FnMut() -> Result<T>,
        readings: impl FnOnce(T) -> Vec<Reading>,
    ) {
        let what = format!("{series}, {x} {x_unit}");
        let Some((measured, state)) = self.measure(&what, measure) else { return };
        for reading in readings(measured) {
            self.keep(reading, (series, x, x_unit), &state, true);
        }
    }

    /// Like [`Self::take_as`], for a measurement with figures of several series and parameters,
    /// such as a course or a distribution.
    pub fn take_points<T>(
        &mut self,
        what: &str,
        measure: impl FnMut() -> Result<T>,
        points: impl FnOnce(T) -> Vec<Point>,
    ) {
        let Some((measured, state)) = self.measure(what, measure) else { return };
        let points = points(measured);
        let (round, rounds, count) = (self.round, self.effort.rounds, points.len());
        eprintln!("  round {round}/{rounds}: {what}: {count} points ({})", state.words());
        for Point { series, x, x_unit, readings } in points {
            for reading in readings {
                self.keep(reading, (&series, x, x_unit), &state, false);
            }
        }
    }

    /// Measures, and repeats it if it was disturbed. Returns the machine's state meanwhile as well.
    fn measure<T>(
        &mut self,
        what: &str,
        mut measure: impl FnMut() -> Result<T>,
    ) -> Option<(T, Meanwhile)> {
        if self.over() {
            return None;
        }
        let (end, mut left) = (self.end, self.repeats);
        let took = Cell::new(Duration::ZERO);
        let measure_once = || {
            let start = Instant::now();
            let (core_to_core_ns, core_speed) = (self.core_to_core_ns(), self.core_speed());
            let before = Ticks::now();
            let measured = self.attempt(what, |_| measure())?;
            took.set(start.elapsed());
            let stolen = Ticks::now().stolen_since(&before);
            Some(((measured, Meanwhile { core_to_core_ns, core_speed, stolen }), stolen))
        };
        let may_repeat = || {
            let (took, now) = (took.get(), Instant::now());
            let may = left >= took && end.is_none_or(|end| now + took < end) && !interrupted();
            left -= if may { took } else { Duration::ZERO };
            may
        };
        let kept = least_disturbed(measure_once, may_repeat);
        self.repeats = left;
        Some(kept?.0)
    }

    /// Records a figure and prints it.
    fn keep(
        &mut self,
        reading: Reading,
        (series, x, x_unit): (&str, f64, &str),
        meanwhile: &Meanwhile,
        print: bool,
    ) {
        if print {
            let cycles =
                reading.cycles.map_or(String::new(), |c| format!(", {c:.0} cycles/packet"));
            eprintln!(
                "  round {}/{}: {series}, {x} {x_unit}: {} {:.3} {}{cycles} ({})",
                self.round,
                self.effort.rounds,
                reading.what,
                reading.value,
                reading.unit,
                meanwhile.words(),
            );
        }
        let &Meanwhile { core_to_core_ns, core_speed, stolen } = meanwhile;
        self.samples.push(FigureSample {
            series: series.to_owned(),
            what: reading.what.to_owned(),
            x,
            x_unit: x_unit.to_owned(),
            value: reading.value,
            unit: reading.unit.to_owned(),
            round: self.round,
            core_to_core_ns,
            state: CoreProximity::of(core_to_core_ns),
            core_speed,
            stolen,
            cycles_per_packet: reading.cycles,
            notes: reading.notes,
        });
    }

    /// Current speed of the slower of these cores.
    fn core_speed(&self) -> f64 {
        let mhz: f64 = meter::cpu("cpu MHz").parse().unwrap_or(0.0);
        let speeds = self.cores().map(|cpu| meter::operations_a_cycle(cpu, mhz * 1e6));
        if mhz > 0.0 { speeds[0].min(speeds[1]) } else { 0.0 }
    }

    /// Latency between the first and the last core.
    pub fn core_to_core_ns(&self) -> f64 {
        meter::cpu_to_cpu_ns(self.cores())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failed_samples_are_missing_and_the_run_continues() {
        fn some(run: &mut ExperimentRun) -> Result<()> {
            run.rounds(|run| {
                run.take("good", 1.0, "turn", || Ok(vec![Reading::new("rate", 2.0, "Mpps")]));
                run.take("bad", 1.0, "turn", || anyhow::bail!("no such peer"));
                run.take("worse", 1.0, "turn", || panic!("what a test harness says"));
                Ok(())
            })
        }
        let experiment = BenchExperiment {
            name: "some",
            about: "some",
            seconds: 1,
            subject: Subject::Machine,
            run: some,
        };
        let (results, whole) = ExperimentRun::of(
            &experiment,
            &Effort { rounds: 3, quick: true, ..Effort::default() },
            None,
        );
        assert!(whole, "what a peer lacks is no failure of the experiment");
        let rounds: Vec<_> = results.samples.iter().map(|s| (&*s.series, s.round)).collect();
        assert_eq!(rounds, [("good", 1), ("good", 2), ("good", 3)]);
        let missing = ["bad, 1 turn: no such peer", "worse, 1 turn: what a test harness says"];
        assert_eq!(results.missing, missing);
    }

    #[test]
    fn time_limit_skips_the_remaining_samples() {
        fn endless(run: &mut ExperimentRun) -> Result<()> {
            run.take("first", 1.0, "turn", || Ok(vec![Reading::new("rate", 2.0, "Mpps")]));
            run.end = Some(Instant::now());
            run.take("second", 1.0, "turn", || panic!("time is up"));
            run.attempt("more", |_| Ok(()));
            run.rounds(|_| panic!("time is up"))
        }
        let experiment = BenchExperiment {
            name: "some",
            about: "some",
            seconds: 1,
            subject: Subject::Machine,
            run: endless,
        };
        let (results, whole) = ExperimentRun::of(
            &experiment,
            &Effort { rounds: 3, quick: true, ..Effort::default() },
            None,
        );
        assert!(!whole);
        assert_eq!(results.samples.len(), 1);
        let missing = ["more: time was up", "all of it: time was up before round 1"];
        assert_eq!(results.missing, missing);
    }

    #[test]
    fn experiment_without_results_is_incomplete() {
        for run in [|_: &mut ExperimentRun| Ok(()), |_: &mut ExperimentRun| anyhow::bail!("broken")]
        {
            let experiment = BenchExperiment {
                name: "some",
                about: "some",
                seconds: 1,
                subject: Subject::Machine,
                run,
            };
            assert!(
                !ExperimentRun::of(
                    &experiment,
                    &Effort { rounds: 1, quick: true, ..Effort::default() },
                    None
                )
                .1
            );
        }
    }
}
