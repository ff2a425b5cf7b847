//! What is measured, by name.

mod core_latency;
mod lookup;
mod memif;
mod paper;
mod router;
mod rtt;
mod veth;

use anyhow::Result;

use crate::run::Run;

/// Something that is measured.
#[derive(Clone, Copy, Debug)]
pub struct Experiment {
    /// Its name, that of its results.
    pub name: &'static str,
    /// What it measures, for people.
    pub about: &'static str,
    /// Does it.
    pub run: fn(&mut Run) -> Result<()>,
}

/// All, in the order in which they are run.
pub const ALL: &[Experiment] = &[
    core_latency::EXPERIMENT,
    lookup::EXPERIMENT,
    memif::RAW,
    memif::MEMIF,
    veth::EXPERIMENT,
    veth::LOAD,
    rtt::EXPERIMENT,
    router::ROUTER,
    router::ONE_CORE,
    router::OVERLOAD,
    router::VNETS,
    router::SCALING,
    router::REORDER,
    paper::EXPERIMENT,
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
