//! Latency between two cores, which distinguishes the states of a virtual machine.

use std::time::Duration;

use anyhow::Result;

use super::{BenchExperiment, Subject};
use crate::run::{ExperimentRun, Reading};

pub(super) const EXPERIMENT: BenchExperiment = BenchExperiment {
    name: "core-latency",
    about: "a cache line between the first and the last core, half a round trip",
    seconds: 6,
    subject: Subject::Machine,
    run,
};

/// Samples of a round.
const SAMPLES: u32 = 10;

/// Pause between them.
const PAUSE: Duration = Duration::from_millis(100);

fn run(run: &mut ExperimentRun) -> Result<()> {
    run.rounds(|run| {
        for at in 0..SAMPLES {
            let latency = run.core_to_core_ns();
            run.take("cores", f64::from(at), "sample", || {
                Ok(vec![Reading::new("latency", latency, "ns")])
            });
            std::thread::sleep(PAUSE);
        }
        Ok(())
    })
}
