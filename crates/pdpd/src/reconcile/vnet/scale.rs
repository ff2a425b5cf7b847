//! Adds forwarding guests to a running vrouter and removes them, without loss.
//!
//! For the mux, arriving and leaving guests are alike: they get no frames. An arriving
//! guest, or one that was restarted, is admitted once it has its control guest's
//! routes, provided that others do its work until then. A leaving guest is removed,
//! with its container, once it has returned its frames, or after [`LEAVE_MAX`].
//!
//! Programs that are not on the runtime do not report the frames that they
//! hold. They get [`GRACE`] to return them. The routes of programs other
//! than the built-in router are unknown, so these are admitted at once.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use pdp_model::Stats;
use pdp_proto::mux;

use super::VnetRuntime;
use crate::host::HostError;
use crate::host::control::ControlError;
use crate::plan::VnetPlan;
use crate::reconcile::Reconciler;
use crate::util::lock;

/// Longest wait for the frames of a leaving guest. They are lost after that, and counted.
const LEAVE_MAX: Duration = Duration::from_secs(5);

/// Time to return frames, for a guest that does not report how many it holds.
const GRACE: Duration = Duration::from_millis(200);

impl Reconciler {
    /// Records guests of a node that are to be started while others run.
    pub(in crate::reconcile) fn defer_arrivals(
        &self,
        wanted: &VnetPlan,
        node: &str,
        runtime: &mut VnetRuntime,
    ) {
        let Some(plan) = wanted.nodes.get(node) else { return };
        let key = |number: &u32| (node.to_owned(), *number);
        let runs = |directory: &Path| self.machine.running(directory).is_some();
        let (run, missing): (Vec<_>, Vec<_>) =
            plan.guests.iter().partition(|(_, guest)| runs(&guest.container.dir));
        if plan.guests.len() > 1
            && run.iter().any(|(number, _)| !runtime.arriving.contains(&key(number)))
        {
            runtime.arriving.retain(|(of, number)| of != node || plan.guests.contains_key(number));
            let missing = missing.iter().filter(|(_, guest)| guest.mirrored);
            runtime.arriving.extend(missing.map(|(number, _)| key(number)));
        } else {
            // No guest is left to forward for them. The last one to
            // arrive is admitted, whatever routes it has.
            runtime.arriving.retain(|(of, _)| of != node);
        }
    }

    /// Prepares the start of a guest that ended: the mux sends it no frames until it is admitted.
    pub(in crate::reconcile) fn begin_arrival(&self, vnet: &str, wanted: &VnetPlan, node: &str) {
        let runtime = self.vnet_runtime(vnet);
        let mut runtime = lock(&runtime);
        self.defer_arrivals(wanted, node, &mut runtime);
        if let Err(error) = self.push_arrivals(wanted, &mut runtime) {
            // The whole vnet is sent again in its next step, or to the next mux.
            tracing::warn!("vnet {vnet}: {}", crate::util::error_chain(&error));
        }
    }

    /// Returns true if a running guest gets frames. Admits it if it has its routes.
    pub(in crate::reconcile) fn has_arrived(
        &self,
        vnet: &str,
        wanted: &VnetPlan,
        node: &str,
        number: u32,
    ) -> Result<bool, HostError> {
        let runtime = self.vnet_runtime(vnet);
        let key = (node.to_owned(), number);
        if !lock(&runtime).arriving.contains(&key) {
            return Ok(true);
        }
        let mirror = wanted.nodes.get(node).and_then(|node| node.mirror.as_ref());
        let routes = mirror
            .is_none_or(|mirror| self.machine.has_routes(&mirror.config.control_socket, number));
        let mut runtime = lock(&runtime);
        if routes {
            runtime.arriving.remove(&key);
            self.push_arrivals(wanted, &mut runtime)?;
        }
        Ok(routes)
    }

    /// Updates in the mux which guests get frames, if the mux knows the vnet and something changed.
    fn push_arrivals(&self, wanted: &VnetPlan, runtime: &mut VnetRuntime) -> Result<(), HostError> {
        if runtime.applied.is_none()
            || runtime.mux != self.mux_process()
            || !runtime.draining.is_empty()
        {
            // The whole vnet will be sent anyway.
            return Ok(());
        }
        let config = mux_config(wanted, runtime);
        if runtime.applied.as_ref() != Some(&config) {
            self.machine.put_vnet(config.clone())?;
            runtime.applied = Some(config);
        }
        Ok(())
    }

    /// Sends a vnet to the mux as planned. Guests that the mux has and
    /// the plan lacks first get no more frames, until they have returned
    /// those that they hold. Returns true if the mux has the whole plan.
    pub(in crate::reconcile) fn let_out(
        &self,
        name: &str,
        wanted: &VnetPlan,
        runtime: &mut VnetRuntime,
    ) -> Result<bool, HostError> {
        let mut config = mux_config(wanted, runtime);
        if runtime.applied.as_ref() == Some(&config) {
            return Ok(true);
        }
        let stats = match self.machine.mux_stats(name) {
            // The mux has no such vnet.
            Err(ControlError::Refused { .. }) => Stats::default(),
            stats => stats?,
        };
        let mut since = BTreeMap::new();
        let has = stats.vnets.get(name).map(|vnet| &vnet.nodes);
        for node in &mut config.nodes {
            let (Some(has), Some(plan)) =
                (has.and_then(|has| has.get(&node.name)), wanted.nodes.get(&node.name))
            else {
                continue;
            };
            let Some(router) = &mut node.router else { continue };
            // Guests of a program that is replaced by one of another
            // kind leave at once, since all of them are recreated.
            let Some(attach) = router.guests.first().map(|guest| guest.attach) else { continue };
            let grace = if attach == mux::AttachMode::Runtime { Duration::ZERO } else { GRACE };
            for (&number, guest) in has.guests.iter().filter(|(_, guest)| guest.connected) {
                if plan.guests.contains_key(&number) {
                    continue;
                }
                let key = (node.name.clone(), number);
                let begun = runtime.draining.get(&key).copied();
                let waited = begun.map(|begun| begun.elapsed());
                let frames = guest.in_flight;
                if waited.is_some_and(|waited| waited >= grace && frames == 0) {
                    continue;
                }
                if waited.is_some_and(|waited| waited > LEAVE_MAX) {
                    let who = format!("{name}/{}:g{number}", node.name);
                    let frames = pdp_spec::count(frames, "frame");
                    tracing::warn!("{who}: {frames} not completed in time, and lost");
                    continue;
                }
                since.insert(key, begun.unwrap_or_else(Instant::now));
                router.guests.push(mux::GuestConfig {
                    number,
                    socket: plan.directory.join(format!("g{number}/memif/memif.sock")),
                    attach,
                    weight: 1,
                    leaving: true,
                });
            }
        }
        runtime.draining = since;
        if runtime.applied.as_ref() != Some(&config) {
            self.machine.put_vnet(config.clone())?;
            runtime.applied = Some(config);
        }
        Ok(runtime.draining.is_empty())
    }
}

/// Returns the mux's configuration of a vnet, in which arriving guests get no frames.
fn mux_config(wanted: &VnetPlan, runtime: &VnetRuntime) -> mux::VnetConfig {
    let mut config = wanted.mux_config();
    for node in &mut config.nodes {
        for guest in node.router.iter_mut().flat_map(|router| &mut router.guests) {
            guest.leaving = runtime.arriving.contains(&(node.name.clone(), guest.number));
        }
    }
    config
}
