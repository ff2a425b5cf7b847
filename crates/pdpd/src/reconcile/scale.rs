//! Forwarding guests that are added to or taken from a vrouter that runs, without loss.
//!
//! To the mux, a guest that arrives and one that leaves are alike: it gets no frames. One that
//! arrives, or comes again after it ended, is let in once it has its control guest's routes, if
//! there are others to do its work until then. One that leaves is taken out, with its container,
//! once it has given back what it had, or after [`LEAVE_MAX`].
//!
//! Programs that are not on the runtime don't say what they have: they get [`GRACE`] to give it
//! back. Of a program that is not the built-in router nothing is known of its routes: it is let in
//! at once.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use pdp_proto::mux;

use super::vnet::VnetSide;
use super::{Reconciler, lock};
use crate::control::ControlError;
use crate::host::HostError;
use crate::plan::VnetPlan;

/// Longest wait for what a guest that leaves still has; it is lost then, and counted.
const LEAVE_MAX: Duration = Duration::from_secs(5);

/// What a guest that says nothing of its frames gets for giving back what it has.
const GRACE: Duration = Duration::from_millis(200);

impl Reconciler {
    /// Remembers guests of a node that are to be started beside others that run.
    pub(super) fn hold_back(&self, wanted: &VnetPlan, node: &str, side: &mut VnetSide) {
        let Some(plan) = wanted.nodes.get(node) else { return };
        let key = |number: &u32| (node.to_owned(), *number);
        let runs = |directory: &Path| self.machine.running(directory).is_some();
        let (run, missing): (Vec<_>, Vec<_>) =
            plan.guests.iter().partition(|(_, guest)| runs(&guest.container.dir));
        if plan.guests.len() > 1
            && run.iter().any(|(number, _)| !side.arriving.contains(&key(number)))
        {
            side.arriving.retain(|(of, number)| of != node || plan.guests.contains_key(number));
            let missing = missing.iter().filter(|(_, guest)| guest.mirrored);
            side.arriving.extend(missing.map(|(number, _)| key(number)));
        } else {
            // Nobody is left to forward for them; whoever comes last is let in, whatever it has.
            side.arriving.retain(|(of, _)| of != node);
        }
    }

    /// Before a guest is started that runs no more: the mux gives it nothing until it is let in.
    pub(super) fn begin_arrival(&self, vnet: &str, wanted: &VnetPlan, node: &str) {
        let side = self.vnet_side(vnet);
        let mut side = lock(&side);
        self.hold_back(wanted, node, &mut side);
        if let Err(error) = self.tell(wanted, &mut side) {
            // It is told as a whole once more when the vnet or the mux comes to it.
            tracing::warn!("vnet {vnet}: {}", crate::host::words(&error));
        }
    }

    /// Whether a guest that runs gets frames; lets it in if it has its routes.
    pub(super) fn has_arrived(
        &self,
        vnet: &str,
        wanted: &VnetPlan,
        node: &str,
        number: u32,
    ) -> Result<bool, HostError> {
        let side = self.vnet_side(vnet);
        let key = (node.to_owned(), number);
        if !lock(&side).arriving.contains(&key) {
            return Ok(true);
        }
        let mirror = wanted.nodes.get(node).and_then(|node| node.mirror.as_ref());
        let routes = mirror
            .is_none_or(|mirror| self.machine.has_routes(&mirror.config.control_socket, number));
        let mut side = lock(&side);
        if routes {
            side.arriving.remove(&key);
            self.tell(wanted, &mut side)?;
        }
        Ok(routes)
    }

    /// Tells the mux who gets frames now, if it knows the vnet and that is new.
    fn tell(&self, wanted: &VnetPlan, side: &mut VnetSide) -> Result<(), HostError> {
        if side.told.is_none() || side.mux != self.mux_process() || !side.leaving.is_empty() {
            // It will be told of the whole.
            return Ok(());
        }
        let told = to_tell(wanted, side);
        if side.told.as_ref() != Some(&told) {
            self.machine.put_vnet(told.clone())?;
            side.told = Some(told);
        }
        Ok(())
    }

    /// Tells the mux of a vnet as planned; first only that guests which the mux has and the plan hasn't
    /// get nothing any more, until they have given back what they had. Whether it is told of all.
    pub(super) fn let_out(
        &self,
        name: &str,
        wanted: &VnetPlan,
        side: &mut VnetSide,
    ) -> Result<bool, HostError> {
        let mut told = to_tell(wanted, side);
        if side.told.as_ref() == Some(&told) {
            return Ok(true);
        }
        let stats = match self.machine.mux_stats(name) {
            // It has no such vnet.
            Err(ControlError::Refused { .. }) => mux::Stats::default(),
            stats => stats?,
        };
        let mut since = BTreeMap::new();
        let has = stats.vnets.get(name).map(|vnet| &vnet.nodes);
        for node in &mut told.nodes {
            let (Some(has), Some(plan)) =
                (has.and_then(|has| has.get(&node.name)), wanted.nodes.get(&node.name))
            else {
                continue;
            };
            let Some(router) = &mut node.router else { continue };
            // A program that was replaced by one of another kind leaves at once: all of its guests
            // start anew.
            let Some(attach) = router.guests.first().map(|guest| guest.attach) else { continue };
            let grace = if attach == mux::Attach::Runtime { Duration::ZERO } else { GRACE };
            for (&number, guest) in has.guests.iter().filter(|(_, guest)| guest.connected) {
                if plan.guests.contains_key(&number) {
                    continue;
                }
                let key = (node.name.clone(), number);
                let begun = side.leaving.get(&key).copied();
                let waited = begun.map(|begun| begun.elapsed());
                let frames = guest.in_flight;
                if waited.is_some_and(|waited| waited >= grace && frames == 0) {
                    continue;
                }
                if waited.is_some_and(|waited| waited > LEAVE_MAX) {
                    let who = format!("{name}/{}:g{number}", node.name);
                    let frames = pdp_spec::count(frames, "frame");
                    tracing::warn!("{who}: {frames} not given back in time, and lost");
                    continue;
                }
                since.insert(key, begun.unwrap_or_else(Instant::now));
                router.guests.push(mux::Guest {
                    number,
                    socket: plan.directory.join(format!("g{number}/memif/memif.sock")),
                    attach,
                    weight: 1,
                    leaving: true,
                });
            }
        }
        side.leaving = since;
        if side.told.as_ref() != Some(&told) {
            self.machine.put_vnet(told.clone())?;
            side.told = Some(told);
        }
        Ok(side.leaving.is_empty())
    }
}

/// What the mux is told of a vnet: guests that arrive get nothing yet.
fn to_tell(wanted: &VnetPlan, side: &VnetSide) -> mux::Vnet {
    let mut told = wanted.told();
    for node in &mut told.nodes {
        for guest in node.router.iter_mut().flat_map(|router| &mut router.guests) {
            guest.leaving = side.arriving.contains(&(node.name.clone(), guest.number));
        }
    }
    told
}
