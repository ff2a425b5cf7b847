//! A run of an experiment: rounds, the state of the machine with each sample, progress, time.

use std::cell::Cell;
use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use pdp_e2e::meter;
use signal_hook::consts::{SIGINT, SIGTERM};

use crate::experiments::Experiment;
use crate::machine::{self, Machine};
use crate::sample::{Results, SCHEMA, Sample, State};
use crate::steal::{Ticks, least_disturbed};

/// Share of an experiment's usual time that disturbed samples may be repeated in.
const REPEATS_SHARE: f64 = 0.15;

/// How thoroughly to measure.
#[derive(Clone, Debug, Default)]
pub struct Effort {
    /// Times that everything is measured.
    pub rounds: u32,
    /// Shorter, with fewer parameters.
    pub quick: bool,
    /// The parameters that are measured; none: all.
    pub at: Vec<usize>,
    /// PdP without its peers.
    pub alone: bool,
}

/// Set once this program was told to end.
static INTERRUPTED: OnceLock<Arc<AtomicBool>> = OnceLock::new();

/// Lets SIGINT and SIGTERM end what runs in order, so that nothing of it is left behind.
pub fn end_on_signals() -> Result<()> {
    let flag = INTERRUPTED.get_or_init(Arc::default);
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, flag.clone())?;
    }
    Ok(())
}

/// Whether this program was told to end.
pub fn interrupted() -> bool {
    INTERRUPTED.get().is_some_and(|flag| flag.load(Ordering::Relaxed))
}

/// A figure of one run; see [`Sample`].
#[derive(Clone, Debug)]
pub struct Reading {
    what: &'static str,
    unit: &'static str,
    value: f64,
    cycles: Option<f64>,
    notes: String,
}

impl Reading {
    /// A figure with its unit.
    pub fn new(what: &'static str, value: f64, unit: &'static str) -> Self {
        Self { what, unit, value, cycles: None, notes: String::new() }
    }

    /// What was measured.
    pub fn what(&self) -> &str {
        self.what
    }

    /// The figure.
    pub fn value(&self) -> f64 {
        self.value
    }

    /// With CPU cycles a packet.
    pub fn cycles(self, per_packet: f64) -> Self {
        Self { cycles: Some(per_packet), ..self }
    }

    /// With what else there is to know.
    pub fn notes(self, notes: impl Into<String>) -> Self {
        Self { notes: notes.into(), ..self }
    }
}

/// Figures of one series at one parameter, where a measurement has several of them.
#[derive(Clone, Debug)]
pub struct Point {
    /// As [`Sample::series`].
    pub series: String,
    /// As [`Sample::x`].
    pub x: f64,
    /// As [`Sample::x_unit`].
    pub x_unit: &'static str,
    /// The figures.
    pub readings: Vec<Reading>,
}

/// State of the machine before and during a measurement; see [`Sample`].
#[derive(Clone, Copy, Debug)]
struct Meanwhile {
    core_to_core_ns: f64,
    core_speed: f64,
    stolen: f64,
}

impl Meanwhile {
    /// For progress.
    fn words(&self) -> String {
        let &Self { core_to_core_ns, core_speed, stolen } = self;
        let (state, stolen) = (State::of(core_to_core_ns).word(), stolen * 100.0);
        format!("{state}, {core_to_core_ns:.0} ns, speed {core_speed:.1}, {stolen:.0}% stolen")
    }
}

/// A run of an experiment.
#[derive(Debug)]
pub struct Run {
    effort: Effort,
    /// When it has to be over.
    end: Option<Instant>,
    /// What is left of the time for repeats.
    repeats: Duration,
    round: u32,
    samples: Vec<Sample>,
    missing: Vec<String>,
    /// Whether time was up before all was done.
    cut: bool,
}

impl Run {
    /// Runs an experiment to its end, or until there is no time left. What fails is among what is
    /// missing; also whether it came to its end and has any result.
    pub fn of(experiment: &Experiment, effort: &Effort, end: Option<Instant>) -> (Results, bool) {
        let began = machine::said("date", &["-u", "+%FT%TZ"]);
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
            machine: Machine::here(),
            missing: run.missing,
            samples: run.samples,
        };
        (results, whole)
    }

    /// Whether this is the first round.
    pub fn is_first(&self) -> bool {
        self.round == 1
    }

    /// Shorter, with fewer parameters.
    pub fn quick(&self) -> bool {
        self.effort.quick
    }

    /// Whether this parameter is to be measured.
    pub fn wants(&self, x: usize) -> bool {
        self.effort.at.is_empty() || self.effort.at.contains(&x)
    }

    /// Of all parameters those that are to be measured: those that were asked for; else, where runs are
    /// short, these few.
    pub fn choose(&self, all: &[usize], few: &[usize]) -> Vec<usize> {
        let from = if self.quick() && self.effort.at.is_empty() { few } else { all };
        from.iter().copied().filter(|x| self.wants(*x)).collect()
    }

    /// Whether a series is to be measured: PdP's are always, peers' unless PdP is measured alone.
    pub fn wants_series(&self, series: &str) -> bool {
        !self.effort.alone || series.starts_with("pdp")
    }

    /// How long one sample is measured.
    pub fn time(&self) -> Duration {
        if self.quick() { Duration::from_millis(500) } else { Duration::from_secs(2) }
    }

    /// The cores that generator and sink, and what is measured, run on: the first and the last.
    pub fn cores(&self) -> [usize; 2] {
        [0, machine::cores() - 1]
    }

    /// Time until it has to be over.
    pub fn left(&self) -> Duration {
        self.end.map_or(Duration::MAX, |end| end.saturating_duration_since(Instant::now()))
    }

    /// Whether it has to be over; who is told so goes no further.
    fn over(&mut self) -> bool {
        self.cut |= self.end.is_some_and(|end| Instant::now() >= end);
        self.cut || interrupted()
    }

    /// Does something for each round.
    pub fn rounds(&mut self, mut each: impl FnMut(&mut Self) -> Result<()>) -> Result<()> {
        for round in 1..=self.effort.rounds {
            ensure!(!self.over(), "time was up before round {round}");
            self.round = round;
            each(self)?;
        }
        Ok(())
    }

    /// Tries something; that it fails, or panics as the test harness does, is noted and the rest
    /// goes on. `None` then.
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

    /// Notes what can't be measured, and why.
    pub fn miss(&mut self, text: String) {
        eprintln!("  not measured: {text}");
        if !self.missing.contains(&text) {
            self.missing.push(text);
        }
    }

    /// Takes samples of one series at one parameter. Neither core may poll when this is called.
    pub fn take(
        &mut self,
        series: &str,
        x: f64,
        x_unit: &str,
        measure: impl FnMut() -> Result<Vec<Reading>>,
    ) {
        self.take_as(series, x, x_unit, measure, |readings| readings);
    }

    /// As [`Self::take`], with figures that are made of what was measured: what was disturbed and
    /// measured again does not come to `readings`.
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

    /// As [`Self::take_as`], where one measurement has figures of several series and parameters: a course, or a
    /// distribution.
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

    /// Measures something, again if it was disturbed; with the machine's state meanwhile.
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

    /// Keeps a figure, and tells of it.
    fn keep(
        &mut self,
        reading: Reading,
        (series, x, x_unit): (&str, f64, &str),
        meanwhile: &Meanwhile,
        tell: bool,
    ) {
        if tell {
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
        self.samples.push(Sample {
            series: series.to_owned(),
            what: reading.what.to_owned(),
            x,
            x_unit: x_unit.to_owned(),
            value: reading.value,
            unit: reading.unit.to_owned(),
            round: self.round,
            core_to_core_ns,
            state: State::of(core_to_core_ns),
            core_speed,
            stolen,
            cycles_per_packet: reading.cycles,
            notes: reading.notes,
        });
    }

    /// How fast the slower of these cores is now.
    fn core_speed(&self) -> f64 {
        let mhz: f64 = meter::cpu("cpu MHz").parse().unwrap_or(0.0);
        let speeds = self.cores().map(|cpu| meter::operations_a_cycle(cpu, mhz * 1e6));
        if mhz > 0.0 { speeds[0].min(speeds[1]) } else { 0.0 }
    }

    /// The way between the first and the last core.
    pub fn core_to_core_ns(&self) -> f64 {
        meter::cpu_to_cpu_ns(self.cores())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiments::Subject;

    #[test]
    fn what_fails_or_panics_is_missing_and_the_rest_goes_on() {
        fn some(run: &mut Run) -> Result<()> {
            run.rounds(|run| {
                run.take("good", 1.0, "turn", || Ok(vec![Reading::new("rate", 2.0, "Mpps")]));
                run.take("bad", 1.0, "turn", || anyhow::bail!("no such peer"));
                run.take("worse", 1.0, "turn", || panic!("what a test harness says"));
                Ok(())
            })
        }
        let experiment = Experiment {
            name: "some",
            about: "some",
            seconds: 1,
            subject: Subject::Machine,
            run: some,
        };
        let (results, whole) =
            Run::of(&experiment, &Effort { rounds: 3, quick: true, ..Effort::default() }, None);
        assert!(whole, "what a peer lacks is no failure of the experiment");
        let rounds: Vec<_> = results.samples.iter().map(|s| (&*s.series, s.round)).collect();
        assert_eq!(rounds, [("good", 1), ("good", 2), ("good", 3)]);
        let missing = ["bad, 1 turn: no such peer", "worse, 1 turn: what a test harness says"];
        assert_eq!(results.missing, missing);
    }

    #[test]
    fn when_time_is_up_the_rest_is_missing() {
        fn endless(run: &mut Run) -> Result<()> {
            run.take("first", 1.0, "turn", || Ok(vec![Reading::new("rate", 2.0, "Mpps")]));
            run.end = Some(Instant::now());
            run.take("second", 1.0, "turn", || panic!("time is up"));
            run.attempt("more", |_| Ok(()));
            run.rounds(|_| panic!("time is up"))
        }
        let experiment = Experiment {
            name: "some",
            about: "some",
            seconds: 1,
            subject: Subject::Machine,
            run: endless,
        };
        let (results, whole) =
            Run::of(&experiment, &Effort { rounds: 3, quick: true, ..Effort::default() }, None);
        assert!(!whole);
        assert_eq!(results.samples.len(), 1);
        let missing = ["more: time was up", "all of it: time was up before round 1"];
        assert_eq!(results.missing, missing);
    }

    #[test]
    fn an_experiment_without_results_is_not_whole() {
        for run in [|_: &mut Run| Ok(()), |_: &mut Run| anyhow::bail!("broken")] {
            let experiment = Experiment {
                name: "some",
                about: "some",
                seconds: 1,
                subject: Subject::Machine,
                run,
            };
            assert!(
                !Run::of(
                    &experiment,
                    &Effort { rounds: 1, quick: true, ..Effort::default() },
                    None
                )
                .1
            );
        }
    }
}
