//! The evaluation of "Supercharging PlanetLab" (Turner et al., SIGCOMM 2007), figure by figure.
//!
//! Here the mux with its fast path represents the paper's network processor. Guests represent its
//! general-purpose server with Click. docs/spp.md gives the details and further differences.

mod queues;
mod rates;
mod rounds;
mod trips;

use anyhow::Result;

use super::{BenchExperiment, Subject};
use crate::run::ExperimentRun;

pub(super) const EXPERIMENT: BenchExperiment = BenchExperiment {
    name: "spp",
    about: "the evaluation of Supercharging PlanetLab: scheduling rounds of eight busy guests (figure 5); queues (7) and \
            outputs (8) of a fast path, five inputs and outputs of 800 Mb/s; throughput by payload (9) and round trips \
            beside eight loaded routers (10) of the fast path, the parallel router, the kernel and programs in guests",
    seconds: 700,
    subject: Subject::Pdp,
    run,
};

/// A figure's number and the function that measures it.
type FigureRun = (usize, fn(&mut ExperimentRun) -> Result<()>);

/// In the order of measurement. `--at` selects them by their numbers.
const FIGURES: [FigureRun; 5] = [
    (7, queues::shares),
    (8, queues::outputs),
    (5, rounds::figure),
    (10, trips::figure),
    (9, rates::figure),
];

fn run(run: &mut ExperimentRun) -> Result<()> {
    for (number, measure) in FIGURES {
        if run.wants(number) {
            run.attempt(format!("figure {number}"), measure);
        }
    }
    Ok(())
}
