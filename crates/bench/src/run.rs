//! A run of an experiment: rounds, the way between cores before each sample, progress.

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

/// How thoroughly to measure.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// Times that everything is measured.
    pub rounds: u32,
    /// Shorter, with fewer parameters.
    pub quick: bool,
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

/// A run of an experiment.
#[derive(Debug)]
pub struct Run {
    effort: Effort,
    round: u32,
    samples: Vec<Sample>,
    missing: Vec<String>,
}

impl Run {
    /// Runs an experiment to its end. What fails is among what is missing.
    pub fn of(experiment: &Experiment, effort: Effort) -> Results {
        let began = machine::said("date", &["-u", "+%FT%TZ"]);
        let start = Instant::now();
        let mut run = Self { effort, round: 1, samples: Vec::new(), missing: Vec::new() };
        eprintln!("{}: {}", experiment.name, experiment.about);
        run.attempt("all of it", |run| (experiment.run)(run));
        Results {
            schema: SCHEMA,
            experiment: experiment.name.to_owned(),
            began,
            seconds: start.elapsed().as_secs_f64().round(),
            quick: effort.quick,
            machine: Machine::here(),
            missing: run.missing,
            samples: run.samples,
        }
    }

    /// Shorter, with fewer parameters.
    pub fn quick(&self) -> bool {
        self.effort.quick
    }

    /// How long one sample is measured.
    pub fn time(&self) -> Duration {
        if self.quick() { Duration::from_millis(500) } else { Duration::from_secs(2) }
    }

    /// The cores that generator and sink, and what is measured, run on: the first and the last.
    pub fn cores(&self) -> [usize; 2] {
        [0, machine::cores() - 1]
    }

    /// Does something for each round.
    pub fn rounds(&mut self, mut each: impl FnMut(&mut Self) -> Result<()>) -> Result<()> {
        for round in 1..=self.effort.rounds {
            ensure!(!interrupted(), "interrupted");
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
        if interrupted() {
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
        let text = format!("{what}: {}", first.join(" "));
        eprintln!("  not measured: {text}");
        if !self.missing.contains(&text) {
            self.missing.push(text);
        }
        None
    }

    /// Takes samples of one series at one parameter. Neither core may poll when this is called.
    pub fn take(
        &mut self,
        series: &str,
        x: f64,
        x_unit: &str,
        measure: impl FnOnce() -> Result<Vec<Reading>>,
    ) {
        if interrupted() {
            return;
        }
        let core_to_core_ns = self.core_to_core_ns();
        let what = format!("{series}, {x} {x_unit}");
        let Some(readings) = self.attempt(&what, |_| measure()) else { return };
        let state = State::of(core_to_core_ns);
        for reading in readings {
            let cycles =
                reading.cycles.map_or(String::new(), |c| format!(", {c:.0} cycles/packet"));
            eprintln!(
                "  round {}/{}: {what}: {} {:.3} {}{cycles} ({}, {core_to_core_ns:.0} ns)",
                self.round,
                self.effort.rounds,
                reading.what,
                reading.value,
                reading.unit,
                state.word(),
            );
            self.samples.push(Sample {
                series: series.to_owned(),
                what: reading.what.to_owned(),
                x,
                x_unit: x_unit.to_owned(),
                value: reading.value,
                unit: reading.unit.to_owned(),
                round: self.round,
                core_to_core_ns,
                state,
                cycles_per_packet: reading.cycles,
                notes: reading.notes,
            });
        }
    }

    /// The way between the first and the last core.
    pub fn core_to_core_ns(&self) -> f64 {
        meter::cpu_to_cpu_ns(self.cores())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        let experiment = Experiment { name: "some", about: "some", run: some };
        let results = Run::of(&experiment, Effort { rounds: 3, quick: true });
        let rounds: Vec<_> = results.samples.iter().map(|s| (&*s.series, s.round)).collect();
        assert_eq!(rounds, [("good", 1), ("good", 2), ("good", 3)]);
        let missing = ["bad, 1 turn: no such peer", "worse, 1 turn: what a test harness says"];
        assert_eq!(results.missing, missing);
    }
}
