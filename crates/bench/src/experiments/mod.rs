//! What is measured, by name.

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

use crate::run::Run;

/// Something that is measured.
#[derive(Clone, Copy, Debug)]
pub struct Experiment {
    /// Its name, that of its results.
    pub name: &'static str,
    /// What it measures, for people.
    pub about: &'static str,
    /// How long it usually takes on two cores, seconds: what progress is told and time shared out by.
    pub seconds: u32,
    /// What of PdP it measures.
    pub subject: Subject,
    /// Does it.
    pub run: fn(&mut Run) -> Result<()>,
}

/// What of PdP an experiment measures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Subject {
    /// Nothing: the machine and others.
    Machine,
    /// A part of it inside this program.
    Library,
    /// A node.
    Pdp,
}

/// Share of its usual time that a quick run takes.
const QUICK_SHARE: f64 = 0.25;

impl Experiment {
    /// How long it usually takes.
    pub fn usual(&self, quick: bool) -> Duration {
        let share = if quick { QUICK_SHARE } else { 1.0 };
        Duration::from_secs(self.seconds.into()).mul_f64(share)
    }
}

/// All, in the order in which they are run: should time be up, the last are missing.
pub const ALL: &[Experiment] = &[
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

/// The one of a name.
pub fn named(name: &str) -> Option<&'static Experiment> {
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
