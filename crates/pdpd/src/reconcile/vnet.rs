//! A vnet: the mux's side of it, and the directories of its nodes.
//!
//! Its nodes and guests wait until it is as planned: so a guest that leaves has given back what it had
//! before its container goes, and one that goes with its vnet gets nothing any more.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use pdp_container::Process;
use pdp_proto::mux;

use super::{Doing, Next, Reconciler, Removal, lock};
use crate::host::HostError;
use crate::key::Key;
use crate::plan::{Directory, Places, Plan, VnetPlan};

/// What is known of a vnet.
#[derive(Debug, Default)]
pub(super) struct VnetSide {
    pub(super) ready: Ready,
    /// The mux that was told.
    pub(super) mux: Option<Process>,
    /// What it was told.
    pub(super) told: Option<mux::Vnet>,
    /// Forwarding guests that get no frames before they have their routes.
    pub(super) arriving: BTreeSet<(String, u32)>,
    /// Guests that are to give back what they have, and since when.
    pub(super) leaving: BTreeMap<(String, u32), Instant>,
}

/// For what the parts of a vnet may go on.
#[derive(Debug, Default)]
pub(super) enum Ready {
    /// Not at all.
    #[default]
    Nothing,
    /// To be as in this plan.
    Plan(Arc<VnetPlan>),
    /// To be taken down. `forgotten`: the mux has no more of it.
    Removal { forgotten: bool },
}

impl Reconciler {
    pub(super) fn vnet_side(&self, vnet: &str) -> Arc<Mutex<VnetSide>> {
        lock(&self.vnets).entry(vnet.into()).or_default().clone()
    }

    /// Whether the parts of a vnet may become as planned.
    pub(super) fn is_ready(&self, vnet: &str, plan: &Plan) -> bool {
        match (plan.vnets.get(vnet), &lock(&self.vnet_side(vnet)).ready) {
            (Some(wanted), Ready::Plan(ready)) => Arc::ptr_eq(wanted, ready),
            (None, Ready::Removal { .. }) => true,
            _ => false,
        }
    }

    pub(super) fn vnet(
        &self,
        name: &str,
        wanted: &Arc<VnetPlan>,
        plan: &Plan,
        doing: &mut Doing<'_>,
    ) -> Result<Next, HostError> {
        let (machine, key) = (&self.machine, Key::vnet(name));
        if self.mux_comes() {
            return Ok(Next::After(Key::Mux));
        }
        if let Some(external) = self.external_to_come(wanted, plan) {
            return Ok(Next::After(external));
        }
        if self.state.thing(&key.to_string())?.is_none() {
            self.state.intend(&key.to_string(), "")?;
        }
        let side = self.vnet_side(name);
        let mut side = lock(&side);
        let told = wanted.told();
        for node in wanted.nodes.values() {
            for directory in &node.directories {
                if side.told.as_ref() != Some(&told) || !machine.has_directory(&directory.path) {
                    machine.make_directory(directory)?;
                }
            }
        }
        if let Some(node) = wanted.nodes.values().next() {
            let (hosts, gid) = (self.places.hosts(name), node.control.users.base);
            let path = hosts.parent().unwrap_or(&hosts).to_owned();
            machine.make_directory(&Directory { path, gid, writable: false })?;
            machine.write_over(&hosts, wanted.hosts.as_bytes())?;
        }
        machine.weigh(&Places::vnet_cgroup(name), wanted.weight)?;
        // Before any of its nodes is made.
        if let Some(node) = wanted.nodes.values().next() {
            machine.bound(name, node.control.users.base);
        }
        self.weigh_all(doing)?;
        machine.make_room_for_guests(plan.guests, wanted.guests);
        let mux = self.mux_process();
        if side.mux != mux {
            (side.mux, side.told) = (mux, None);
        }
        if mux.is_some() {
            for node in wanted.nodes.keys() {
                self.hold_back(wanted, node, &mut side);
            }
            if !self.let_out(name, wanted, &mut side)? {
                return Ok(Next::wait(format!("guests of {name} to give back what they have")));
            }
        }
        side.ready = Ready::Plan(wanted.clone());
        if mux.is_none() {
            return Err(HostError::NoMux);
        }
        Ok(Next::Done)
    }

    /// Says what part of the CPUs all vnets together get, or removes the cgroup that they had.
    fn weigh_all(&self, doing: &Doing<'_>) -> Result<(), HostError> {
        let _one = lock(&self.weights);
        let plan = (doing.newest)();
        if plan.vnets.is_empty() {
            self.machine.remove_if_empty("vnets");
            return Ok(());
        }
        self.machine.make_room_for_neighbours(plan.neighbours);
        self.machine.weigh("vnets", plan.weight_together())
    }

    pub(super) fn remove_vnet(
        &self,
        name: &str,
        plan: &Plan,
        doing: &mut Doing<'_>,
    ) -> Result<Next, HostError> {
        let machine = &self.machine;
        if plan.mux.is_some() && self.mux_comes() {
            return Ok(Next::After(Key::Mux));
        }
        let mut removal = Removal::default();
        {
            let side = self.vnet_side(name);
            let mut side = lock(&side);
            if !matches!(side.ready, Ready::Removal { forgotten: true }) {
                // The mux forgets it first, so that nothing is sent to what goes. One that does not is no reason to
                // let its processes run.
                let forgets = self.forget_in_mux(name);
                let forgotten = forgets.is_ok();
                removal.step(forgets);
                *side = VnetSide { ready: Ready::Removal { forgotten }, ..VnetSide::default() };
            }
        }
        if let Some(inner) = doing.inner.take() {
            removal.finish()?;
            return Ok(Next::After(inner));
        }
        (doing.told)(&format!("stopping vnet {name}"));
        removal.end(machine.remove_cgroup(&Places::vnet_cgroup(name)));
        if removal.waits {
            return removal.wait(format!("the end of what is in vnet {name}"));
        }
        removal.step(machine.remove_directory(&self.places.run.join("vnets").join(name)));
        removal.finish()?;
        lock(&self.vnets).remove(name);
        machine.unbound(name, (doing.newest)().vnets.is_empty())?;
        self.weigh_all(doing)?;
        self.state.forget(&Key::vnet(name).to_string())?;
        Ok(Next::Gone)
    }

    fn forget_in_mux(&self, vnet: &str) -> Result<(), HostError> {
        let machine = &self.machine;
        if self.mux_process().is_some() && machine.mux()?.vnets.iter().any(|known| known == vnet) {
            machine.delete_vnet(vnet)?;
        }
        Ok(())
    }
}
