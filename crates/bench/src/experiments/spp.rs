//! The evaluation of "Supercharging PlanetLab" (Turner et al., SIGCOMM 2007), figure by figure.
//!
//! The paper's network processor is here the mux with its fast path, and its general-purpose server with Click what
//! guests do. docs/spp.md says which, and what else differs.

mod queues;
mod rates;
mod rounds;
mod trips;

use anyhow::Result;

use super::{Experiment, Subject};
use crate::run::Run;

pub(super) const EXPERIMENT: Experiment = Experiment {
    name: "spp",
    about: "the evaluation of Supercharging PlanetLab: scheduling rounds of eight busy guests (figure 5); queues (7) and \
            outputs (8) of a fast path, five inputs and outputs of 800 Mb/s; throughput by payload (9) and round trips \
            beside eight loaded routers (10) of the fast path, the parallel router, the kernel and programs in guests",
    seconds: 700,
    subject: Subject::Pdp,
    run,
};

/// A figure's number, and what measures it.
type Figure = (usize, fn(&mut Run) -> Result<()>);

/// In the order in which they are measured. `--at` chooses among them by their numbers.
const FIGURES: [Figure; 5] = [
    (7, queues::shares),
    (8, queues::outputs),
    (5, rounds::figure),
    (10, trips::figure),
    (9, rates::figure),
];

fn run(run: &mut Run) -> Result<()> {
    for (number, measure) in FIGURES {
        if run.wants(number) {
            run.attempt(format!("figure {number}"), measure);
        }
    }
    Ok(())
}
