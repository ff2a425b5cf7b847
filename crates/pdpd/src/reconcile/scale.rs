//! Forwarding guests that are added to or taken from a vrouter that runs, without loss.
//!
//! To the mux, a guest that arrives and one that leaves are alike: it gets no frames. One that
//! arrives, or comes again after it ended, is let in once it has its control guest's routes, if
//! there are others to do its work until then. One that leaves is taken out, with its container,
//! once it has given back what it had. Both waits are bounded.
//!
//! Programs that are not on the runtime don't say what they have: they get [`GRACE`] to give it
//! back. Of a program that is not the built-in router nothing is known of its routes: it is let in
//! at once.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use pdp_proto::mux;

use super::{Reconciler, Told};
use crate::control::{ControlError, Mirror};
use crate::host::{HostError, words};
use crate::key::Key;
use crate::plan::{Plan, VnetPlan};

/// Longest wait of a run for the routes of guests that arrive; later runs look again.
const ARRIVE_MAX: Duration = Duration::from_secs(10);

/// Longest wait for what a guest that leaves still has; it is lost then, and counted.
const LEAVE_MAX: Duration = Duration::from_secs(5);

/// What a guest that says nothing of its frames gets for giving back what it has.
const GRACE: Duration = Duration::from_millis(200);

/// Between two looks.
const LOOK_PAUSE: Duration = Duration::from_millis(5);

/// Longest wait for a route mirror's answer.
const MIRROR_WAIT: Duration = Duration::from_secs(1);

impl Reconciler<'_> {
    /// Remembers guests that are to be started beside others that run.
    pub(super) fn hold_back(&mut self, name: &str, plan: &VnetPlan) {
        for (node, node_plan) in &plan.nodes {
            if node_plan.guests.len() < 2 {
                // Whoever comes last is let in, whatever it has.
                self.mux.arriving.retain(|key| !is_guest_of(key, name, node));
                continue;
            }
            let runs = |directory: &Path| self.host.running(directory).is_some();
            let (run, missing): (Vec<_>, Vec<_>) =
                node_plan.guests.iter().partition(|(_, guest)| runs(&guest.container.dir));
            let key = |number: &u32| Key::guest(name, node, *number);
            if run.iter().any(|(number, _)| !self.mux.arriving.contains(&key(number))) {
                let missing = missing.iter().filter(|(_, guest)| guest.mirrored);
                self.mux.arriving.extend(missing.map(|(number, _)| key(number)));
            } else {
                // Nobody is left to forward for them.
                self.mux.arriving.retain(|key| !is_guest_of(key, name, node));
            }
        }
    }

    /// What the mux is told of a vnet: guests that arrive get nothing yet.
    pub(super) fn vnet_told(&self, name: &str, plan: &VnetPlan) -> mux::Vnet {
        let mut told = plan.mux.clone();
        for node in &mut told.nodes {
            for guest in node.router.iter_mut().flat_map(|router| &mut router.guests) {
                let key = Key::guest(name, &node.name, guest.number);
                guest.leaving = self.mux.arriving.contains(&key);
            }
        }
        told
    }

    /// Lets guests in that have their routes; whether all are in.
    pub(super) fn let_in(&mut self, plan: &Plan, told: Told<'_>) -> bool {
        self.mux.arriving.retain(|key| guest_of(plan, key).is_some());
        let end = Instant::now() + ARRIVE_MAX;
        let total = self.mux.arriving.len() as u64;
        while !self.mux.arriving.is_empty() {
            let mut waits = false;
            for key in self.mux.arriving.clone() {
                let Some((mirror, directory)) = guest_of(plan, &key) else { continue };
                let runs = self.host.running(directory).is_some();
                if runs && has_routes(&key, mirror) {
                    self.mux.arriving.remove(&key);
                } else {
                    waits |= runs;
                }
            }
            self.tell_arrivals(plan);
            if !waits || Instant::now() > end {
                break;
            }
            let left = self.mux.arriving.len() as u64;
            told(total - left, total, "waiting until new guests have their routes");
            std::thread::sleep(LOOK_PAUSE);
        }
        self.tell_arrivals(plan);
        self.mux.arriving.is_empty()
    }

    fn tell_arrivals(&mut self, plan: &Plan) {
        for (name, vnet) in &plan.vnets {
            let wanted = self.vnet_told(name, vnet);
            // A vnet that was refused is told of again by the next run, with all that belongs to it.
            if self.mux.vnets.get(name).is_none_or(|before| *before == wanted) {
                continue;
            }
            match self.host.mux.put_vnet(wanted.clone()) {
                Ok(()) => drop(self.mux.vnets.insert(name.clone(), wanted)),
                Err(error) => tracing::warn!("vnet {name}: {}", words(&error)),
            }
        }
    }

    /// Waits until guests that the mux has and the plan hasn't have given back what they had.
    pub(super) fn let_out(
        &self,
        name: &str,
        plan: &VnetPlan,
        wanted: &mux::Vnet,
        told: Told<'_>,
    ) -> Result<(), HostError> {
        let stats = match self.host.mux.stats(Some(name)) {
            // It has no such vnet.
            Err(ControlError::Refused { .. }) => return Ok(()),
            stats => stats?,
        };
        let Some(has) = stats.vnets.get(name) else { return Ok(()) };
        let mut vnet = wanted.clone();
        let mut leaving: Vec<(String, u32)> = Vec::new();
        let mut grace = Duration::ZERO;
        for node in &mut vnet.nodes {
            let (Some(has), Some(node_plan)) =
                (has.nodes.get(&node.name), plan.nodes.get(&node.name))
            else {
                continue;
            };
            let Some(router) = &mut node.router else { continue };
            // A program that was replaced by one of another kind leaves at once: all of its guests
            // start anew.
            let Some(attach) = router.guests.first().map(|guest| guest.attach) else { continue };
            for (&number, _) in has.guests.iter().filter(|(_, guest)| guest.connected) {
                if node_plan.guests.contains_key(&number) {
                    continue;
                }
                router.guests.push(mux::Guest {
                    number,
                    socket: node_plan.directory.join(format!("g{number}/memif/memif.sock")),
                    attach,
                    weight: 1,
                    leaving: true,
                });
                if attach != mux::Attach::Runtime {
                    grace = GRACE;
                }
                leaving.push((node.name.clone(), number));
            }
        }
        if leaving.is_empty() {
            return Ok(());
        }
        self.host.mux.put_vnet(vnet)?;
        std::thread::sleep(grace);
        let end = Instant::now() + LEAVE_MAX;
        loop {
            let stats = self.host.mux.stats(Some(name))?;
            let left: BTreeMap<String, u64> = leaving
                .iter()
                .filter_map(|(node, number)| {
                    let guest = stats.vnets.get(name)?.nodes.get(node)?.guests.get(number)?;
                    (guest.in_flight > 0)
                        .then(|| (format!("{name}/{node}:g{number}"), guest.in_flight))
                })
                .collect();
            if left.is_empty() {
                return Ok(());
            }
            let names: Vec<&str> = left.keys().map(String::as_str).collect();
            let frames: u64 = left.values().sum();
            if Instant::now() > end {
                let names = names.join(", ");
                tracing::warn!("{names}: {frames} frames not given back in time; they are lost");
                return Ok(());
            }
            let total = leaving.len() as u64;
            let what = format!("waiting for {frames} frames in {}", names.join(", "));
            told(total - left.len() as u64, total, &what);
            std::thread::sleep(LOOK_PAUSE);
        }
    }
}

fn is_guest_of(key: &Key, vnet: &str, node: &str) -> bool {
    matches!(key, Key::Guest { vnet: of, node: at, .. } if of == vnet && at == node)
}

/// The mirror's control socket and the directory of a guest that the plan has.
fn guest_of<'p>(plan: &'p Plan, key: &Key) -> Option<(&'p Path, &'p Path)> {
    let Key::Guest { vnet, node, number } = key else { return None };
    let node = plan.vnets.get(vnet)?.nodes.get(node)?;
    let guest = node.guests.get(number)?;
    Some((&node.mirror.as_ref()?.config.control_socket, &guest.container.dir))
}

/// Whether a guest's tables equal the kernel's, as far as its mirror knows.
fn has_routes(key: &Key, mirror: &Path) -> bool {
    let Key::Guest { number, .. } = key else { return false };
    let status = Mirror { path: mirror.into() }.status(MIRROR_WAIT);
    status.is_ok_and(|status| {
        status.guests.iter().any(|guest| guest.guest == *number && guest.synced)
    })
}
