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

pub use crate::run::{BenchExperiment, Subject};

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
