//! The way between two cores: what tells the states of a virtual machine apart.

use std::time::Duration;

use anyhow::Result;

use super::{Experiment, Subject};
use crate::run::{Reading, Run};

pub(super) const EXPERIMENT: Experiment = Experiment {
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

fn run(run: &mut Run) -> Result<()> {
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
