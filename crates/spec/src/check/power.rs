//! Gives vrouters their power.

use std::collections::{BTreeMap, BTreeSet};

use pdp_alloc::{Engine, Engines, Request, allocate, allocate_guests};

use super::{Existing, Intent, Reporter, placement_key};
use crate::limits::GUESTS_MAX;
use crate::object::{DataPlane, NodeKind};
use crate::units::Cores;

pub(super) fn check(
    intent: &mut Intent,
    changed: &BTreeSet<String>,
    existing: &Existing,
    reporter: &mut Reporter,
) {
    let engines: Engines = intent
        .substrate
        .iter()
        .flat_map(|substrate| &substrate.spec.forwarding_engines)
        .map(|(name, engine)| {
            let usable = !existing.failed_engines.contains(name);
            (name.clone(), Engine { capacity_millicores: engine.capacity.0, usable })
        })
        .collect();
    place(intent, changed, &engines, reporter);
    capacities(intent, &engines, reporter);
}

/// A router whose power may have changed.
struct Asker {
    vnet: String,
    node: String,
    plane: DataPlane,
    has: u32,
}

fn place(
    intent: &mut Intent,
    changed: &BTreeSet<String>,
    engines: &Engines,
    reporter: &mut Reporter,
) {
    let mut routers = BTreeMap::new();
    for (vnet_name, vnet) in &intent.vnets {
        for (name, node) in &vnet.spec.nodes {
            if node.kind == NodeKind::Router {
                let plane = node.data_plane.clone().unwrap_or_default();
                routers.insert(placement_key(vnet_name, name), (vnet_name, name, plane));
            }
        }
    }
    intent.placements.retain(|key, _| routers.contains_key(key));
    let mut askers: Vec<Asker> = Vec::new();
    for (key, (vnet, node, plane)) in routers {
        let placed = intent.placements.get(&key);
        if changed.contains(vnet) || placed.is_none() {
            let has = placed.into_iter().flatten().map(|share| share.millicores).sum();
            askers.push(Asker { vnet: vnet.clone(), node: node.clone(), plane, has });
        }
    }
    // First those that give power back, so that others of the same change can have it; then the
    // largest first, which need whole engines. Names make it deterministic: the sort is stable.
    askers.sort_by_key(|asker| {
        let wanted = asker.plane.power.0;
        (wanted > asker.has, std::cmp::Reverse(wanted))
    });
    for Asker { vnet, node, plane, .. } in askers {
        let key = placement_key(&vnet, &node);
        let path = ["spec", "nodes", &node, "dataPlane", "power"];
        let request =
            Request { vrouter: key.clone(), millicores: plane.power.0, split: plane.split };
        let shares = match plane.guests {
            Some(guests) => {
                allocate_guests(engines, &intent.placements, &key, plane.power.0, guests)
            }
            None => allocate(engines, &intent.placements, &request),
        };
        match shares {
            Ok(shares) if shares.len() > GUESTS_MAX => {
                let message = format!(
                    "power {} needs {} forwarding guests, {GUESTS_MAX} at most",
                    plane.power,
                    shares.len()
                );
                reporter.vnet(&vnet, &path, message, "ask for less, or use larger engines");
            }
            Ok(shares) => {
                intent.placements.insert(key, shares);
            }
            Err(refusal) if engines.is_empty() => {
                let message = format!("power {}: there is no forwarding engine", plane.power);
                let hint = "apply a Substrate with forwardingEngines first";
                debug_assert!(refusal.free_millicores.is_empty());
                reporter.vnet(&vnet, &path, message, hint);
            }
            Err(refusal) => {
                let little = format!("power {}: the forwarding engines have no room", plane.power);
                let hint =
                    reporter.of_all(refusal.hint.to_string(), "ask for less, or an operator");
                let message = reporter.of_all(refusal.to_string(), &little);
                reporter.vnet(&vnet, &path, message, hint);
            }
        }
    }
}

/// Checks that no engine has given more than a changed substrate leaves it.
fn capacities(intent: &Intent, engines: &Engines, reporter: &mut Reporter) {
    for (name, given) in pdp_alloc::given(&intent.placements) {
        let users = given.keys().copied().collect::<Vec<_>>().join(", ");
        let millicores: u64 = given.values().sum();
        let used = Cores(u32::try_from(millicores).unwrap_or(u32::MAX));
        let path = ["spec", "forwardingEngines", name, "capacity"];
        match engines.get(name) {
            None => {
                let message = format!("forwarding engine {name} is gone, but {users} runs on it");
                reporter.substrate(&path[..2], message, "keep it, or delete those first");
            }
            Some(engine) if u64::from(engine.capacity_millicores) < millicores => {
                let capacity = Cores(engine.capacity_millicores);
                let message =
                    format!("capacity {capacity} is below the {used} that {users} has of it");
                reporter.substrate(&path, message, "keep the capacity, or lower their power first");
            }
            Some(_) => {}
        }
    }
}
