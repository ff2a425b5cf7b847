//! A vnet: its configuration in the mux, and the directories of its nodes.
//!
//! Its nodes and guests wait until the vnet is as planned. So a leaving guest has returned its
//! frames before its container ends, and a guest that is removed with its vnet gets no more frames.

mod scale;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use pdp_container::Process;
use pdp_proto::mux;

use super::{Reconciler, Removal, StepContext, StepOutcome};
use crate::host::HostError;
use crate::plan::key::ObjectKey;
use crate::plan::{DaemonPaths, DirectoryPlan, Plan, VnetPlan};
use crate::util::lock;

/// Runtime state of a vnet.
#[derive(Debug, Default)]
pub(super) struct VnetRuntime {
    pub(super) ready: VnetReadiness,
    /// The mux that has the configuration.
    pub(super) mux: Option<Process>,
    /// The configuration that it has.
    pub(super) applied: Option<mux::VnetConfig>,
    /// Forwarding guests that get no frames before they have their routes.
    pub(super) arriving: BTreeSet<(String, u32)>,
    /// Guests that must return the frames that they hold, and since when.
    pub(super) draining: BTreeMap<(String, u32), Instant>,
}

/// Step for which the parts of a vnet may proceed.
#[derive(Debug, Default)]
pub(super) enum VnetReadiness {
    /// None.
    #[default]
    Nothing,
    /// To become as in this plan.
    Plan(Arc<VnetPlan>),
    /// To be removed. `forgotten` is true if the mux no longer has the vnet.
    Removal { forgotten: bool },
}

impl Reconciler {
    pub(super) fn vnet_runtime(&self, vnet: &str) -> Arc<Mutex<VnetRuntime>> {
        lock(&self.vnets).entry(vnet.into()).or_default().clone()
    }

    /// True if the parts of a vnet may become as planned.
    pub(super) fn is_ready(&self, vnet: &str, plan: &Plan) -> bool {
        match (plan.vnets.get(vnet), &lock(&self.vnet_runtime(vnet)).ready) {
            (Some(wanted), VnetReadiness::Plan(ready)) => Arc::ptr_eq(wanted, ready),
            (None, VnetReadiness::Removal { .. }) => true,
            _ => false,
        }
    }

    pub(super) fn vnet(
        &self,
        name: &str,
        wanted: &Arc<VnetPlan>,
        plan: &Plan,
        context: &mut StepContext<'_>,
    ) -> Result<StepOutcome, HostError> {
        let (machine, key) = (&self.machine, ObjectKey::vnet(name));
        if self.mux_comes() {
            return Ok(StepOutcome::After(ObjectKey::Mux));
        }
        if let Some(external) = self.external_to_come(wanted, plan) {
            return Ok(StepOutcome::After(external));
        }
        if self.state.journal_entry(&key.to_string())?.is_none() {
            self.state.intend(&key.to_string(), "")?;
        }
        let runtime = self.vnet_runtime(name);
        let mut runtime = lock(&runtime);
        let config = wanted.mux_config();
        for node in wanted.nodes.values() {
            for directory in &node.directories {
                if runtime.applied.as_ref() != Some(&config)
                    || !machine.has_directory(&directory.path)
                {
                    machine.make_directory(directory)?;
                }
            }
        }
        if let Some(node) = wanted.nodes.values().next() {
            let (hosts, gid) = (self.places.hosts(name), node.control.users.base);
            let path = hosts.parent().unwrap_or(&hosts).to_owned();
            machine.make_directory(&DirectoryPlan { path, gid, writable: false })?;
            machine.write_over(&hosts, wanted.hosts.as_bytes())?;
        }
        machine.weigh(&DaemonPaths::vnet_cgroup(name), wanted.weight)?;
        // Before any of its nodes is created.
        if let Some(node) = wanted.nodes.values().next() {
            machine.bound(name, node.control.users.base);
        }
        self.weigh_all(context)?;
        machine.raise_guest_limits(plan.guests, wanted.guests);
        let mux = self.mux_process();
        if runtime.mux != mux {
            (runtime.mux, runtime.applied) = (mux, None);
        }
        if mux.is_some() {
            for node in wanted.nodes.keys() {
                self.defer_arrivals(wanted, node, &mut runtime);
            }
            if !self.let_out(name, wanted, &mut runtime)? {
                return Ok(StepOutcome::wait(format!("guests of {name} to complete their frames")));
            }
        }
        runtime.ready = VnetReadiness::Plan(wanted.clone());
        if mux.is_none() {
            return Err(HostError::NoMux);
        }
        Ok(StepOutcome::Done)
    }

    /// Sets the CPU weight of all vnets together, or removes their
    /// common cgroup if there are no vnets.
    fn weigh_all(&self, context: &StepContext<'_>) -> Result<(), HostError> {
        let _one = lock(&self.weights);
        let plan = (context.newest)();
        if plan.vnets.is_empty() {
            self.machine.remove_if_empty("vnets");
            return Ok(());
        }
        self.machine.raise_neighbour_limits(plan.neighbours);
        self.machine.weigh("vnets", plan.weight_together())
    }

    pub(super) fn remove_vnet(
        &self,
        name: &str,
        plan: &Plan,
        context: &mut StepContext<'_>,
    ) -> Result<StepOutcome, HostError> {
        let machine = &self.machine;
        if plan.mux.is_some() && self.mux_comes() {
            return Ok(StepOutcome::After(ObjectKey::Mux));
        }
        let mut removal = Removal::default();
        {
            let runtime = self.vnet_runtime(name);
            let mut runtime = lock(&runtime);
            if !matches!(runtime.ready, VnetReadiness::Removal { forgotten: true }) {
                // The mux forgets it first, so that it sends nothing to objects that
                // are removed. If that fails, the processes are ended nevertheless.
                let forgets = self.forget_in_mux(name);
                let forgotten = forgets.is_ok();
                removal.step(forgets);
                *runtime = VnetRuntime {
                    ready: VnetReadiness::Removal { forgotten },
                    ..VnetRuntime::default()
                };
            }
        }
        if let Some(inner) = context.inner.take() {
            removal.finish()?;
            return Ok(StepOutcome::After(inner));
        }
        (context.report)(&format!("stopping vnet {name}"));
        removal.end(machine.remove_cgroup(&DaemonPaths::vnet_cgroup(name)));
        if removal.waits {
            return removal.wait(format!("the end of the processes in vnet {name}"));
        }
        removal.step(machine.remove_directory(&self.places.run.join("vnets").join(name)));
        removal.finish()?;
        lock(&self.vnets).remove(name);
        machine.unbound(name, (context.newest)().vnets.is_empty())?;
        self.weigh_all(context)?;
        self.state.forget(&ObjectKey::vnet(name).to_string())?;
        Ok(StepOutcome::Gone)
    }

    fn forget_in_mux(&self, vnet: &str) -> Result<(), HostError> {
        let machine = &self.machine;
        if self.mux_process().is_some() && machine.mux()?.vnets.iter().any(|known| known == vnet) {
            machine.delete_vnet(vnet)?;
        }
        Ok(())
    }
}
