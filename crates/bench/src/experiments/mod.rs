//! The experiments, by name.

mod churn;
mod core_latency;
mod fastpath;
mod filtered;
mod kernel;
mod links;
mod lookup;
mod many;
mod memif;
pub(crate) mod paper;
mod router;
mod rtt;
mod schedulers;
mod spp;
mod veth;

use std::time::Duration;

use anyhow::Result;

use crate::run::ExperimentRun;

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

/// All experiments, in the order of running. If time is up, the last ones are missing.
pub const ALL: &[BenchExperiment] = &[
    core_latency::EXPERIMENT,
    lookup::EXPERIMENT,
    router::ROUTER,
    router::ONE_CORE,
    fastpath::EXPERIMENT,
    fastpath::VNETS,
    filtered::EXPERIMENT,
    fastpath::DEAR,
    veth::EXPERIMENT,
    rtt::EXPERIMENT,
    kernel::EXPERIMENT,
    kernel::VNETS,
    many::PORTS,
    many::GUESTS,
    many::TUNNELS,
    router::OVERLOAD,
    router::SCALING,
    memif::RAW,
    memif::MEMIF,
    churn::EXPERIMENT,
    schedulers::EXPERIMENT,
    links::EXPERIMENT,
    many::VNETS,
    veth::LOAD,
    paper::EXPERIMENT,
    spp::EXPERIMENT,
];

/// Returns the experiment of this name.
pub fn named(name: &str) -> Option<&'static BenchExperiment> {
    ALL.iter().find(|experiment| experiment.name == name)
}

#[cfg(test)]
mod tests {
    #[test]
    fn names_are_unique() {
        let names: std::collections::BTreeSet<_> = super::ALL.iter().map(|e| e.name).collect();
        assert_eq!(names.len(), super::ALL.len());
    }
}
