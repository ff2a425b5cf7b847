//! Gives vrouters their power.

use std::collections::BTreeMap;

use pdp_alloc::{Engine, Engines, Given, Request, Share, allocate, allocate_guests};

use super::{Existing, Reporter, Shares, Wanted};
use crate::limits::GUESTS_MAX;
use crate::object::{DataPlane, Node, NodeKind, VirtualNetwork};
use crate::units::Cores;

/// What a virtual network's vrouters have once they get what they ask for, at the least that it takes.
pub(super) fn asked(vnet: &VirtualNetwork) -> Shares {
    let planes =
        vnet.spec.nodes.iter().filter_map(|(name, node)| Some((name, node.data_plane.as_ref()?)));
    let share = |plane: &DataPlane| Share { engine: String::new(), millicores: plane.power.0 };
    planes.map(|(name, plane)| (name.clone(), vec![share(plane)])).collect()
}

/// Shares of virtual networks that change, and of those of which a vrouter has none.
pub(super) fn check(
    wanted: &Wanted<'_>,
    existing: &Existing,
    reporter: &mut Reporter,
) -> BTreeMap<String, Shares> {
    let engines: Engines = wanted
        .substrate
        .iter()
        .flat_map(|substrate| &substrate.spec.forwarding_engines)
        .map(|(name, engine)| {
            let usable = !existing.failed_engines.contains(name);
            (name.clone(), Engine { capacity_millicores: engine.capacity.0, usable })
        })
        .collect();
    let shares = place(wanted, &engines, reporter);
    if reporter.substrate.is_some() {
        capacities(wanted, &shares, &engines, reporter);
    }
    shares
}

/// A vrouter that is to have power.
struct Asker<'a> {
    vnet: &'a str,
    node: &'a str,
    plane: DataPlane,
    has: u64,
}

fn place(
    wanted: &Wanted<'_>,
    engines: &Engines,
    reporter: &mut Reporter,
) -> BTreeMap<String, Shares> {
    let mut given = Given::new();
    let mut all: BTreeMap<String, Shares> = BTreeMap::new();
    let mut askers: Vec<Asker<'_>> = Vec::new();
    for (name, vnet) in wanted.kept() {
        for (engine, millicores) in &vnet.sums().power {
            give(&mut given, engine, *millicores);
        }
        if !vnet.sums().placed {
            all.insert(name.clone(), vnet.shares().clone());
            askers.extend(routers(name, vnet, vnet.shares()).filter(|asker| asker.has == 0));
        }
    }
    for (name, vnet) in &wanted.changed {
        let mut shares =
            wanted.before.get(name).map_or_else(Shares::new, |vnet| vnet.shares().clone());
        let is_router = |node: &Node| node.kind == NodeKind::Router;
        shares.retain(|node, _| vnet.spec.nodes.get(node).is_some_and(is_router));
        for share in shares.values().flatten() {
            give(&mut given, &share.engine, share.millicores.into());
        }
        askers.extend(routers(name, vnet, &shares));
        all.insert(name.clone(), shares);
    }
    // First those that give power back, so that others of the same change can have it; then the
    // largest first, which need whole engines. Names make it deterministic: the sort is stable.
    askers.sort_by_key(|asker| {
        let wanted = asker.plane.power.0;
        (u64::from(wanted) > asker.has, std::cmp::Reverse(wanted))
    });
    for Asker { vnet, node, plane, .. } in askers {
        let path = ["spec", "nodes", node, "dataPlane", "power"];
        let Some(of_vnet) = all.get_mut(vnet) else { continue };
        let own = of_vnet.get(node).map_or(&[][..], Vec::as_slice);
        let mut others = given.clone();
        for share in own {
            take(&mut others, share);
        }
        let request = Request { millicores: plane.power.0, split: plane.split };
        let shares = match plane.guests {
            Some(guests) => allocate_guests(engines, &others, own, plane.power.0, guests),
            None => allocate(engines, &others, own, request),
        };
        match shares {
            Ok(shares) if shares.len() > GUESTS_MAX => {
                let message = format!(
                    "power {} needs {} forwarding guests, {GUESTS_MAX} at most",
                    plane.power,
                    shares.len()
                );
                reporter.vnet(vnet, &path, message, "ask for less, or use larger engines");
            }
            Ok(shares) => {
                given = others;
                for share in &shares {
                    give(&mut given, &share.engine, share.millicores.into());
                }
                of_vnet.insert(node.to_owned(), shares);
            }
            Err(refusal) if engines.is_empty() => {
                let message = format!("power {}: there is no forwarding engine", plane.power);
                let hint = "apply a Substrate with forwardingEngines first";
                debug_assert!(refusal.free_millicores.is_empty());
                reporter.vnet(vnet, &path, message, hint);
            }
            Err(refusal) => {
                let little = format!("power {}: the forwarding engines have no room", plane.power);
                let hint =
                    reporter.of_all(refusal.hint.to_string(), "ask for less, or an operator");
                let message = reporter.of_all(refusal.to_string(), &little);
                reporter.vnet(vnet, &path, message, hint);
            }
        }
    }
    all
}

/// A virtual network's vrouters, which have these shares.
fn routers<'a>(
    vnet: &'a str,
    spec: &'a VirtualNetwork,
    shares: &Shares,
) -> impl Iterator<Item = Asker<'a>> {
    let routers = spec.spec.nodes.iter().filter(|(_, node)| node.kind == NodeKind::Router);
    routers.map(move |(node, router)| {
        let own = shares.get(node).into_iter().flatten();
        let has = own.map(|share| u64::from(share.millicores)).sum();
        Asker { vnet, node, plane: router.data_plane.clone().unwrap_or_default(), has }
    })
}

fn give(given: &mut Given, engine: &str, millicores: u64) {
    match given.get_mut(engine) {
        Some(sum) => *sum += millicores,
        None => drop(given.insert(engine.to_owned(), millicores)),
    }
}

fn take(given: &mut Given, share: &Share) {
    if let Some(sum) = given.get_mut(&share.engine) {
        *sum = sum.saturating_sub(share.millicores.into());
    }
}

/// Checks that no engine has given more than a changed substrate leaves it.
fn capacities(
    wanted: &Wanted<'_>,
    shares: &BTreeMap<String, Shares>,
    engines: &Engines,
    reporter: &mut Reporter,
) {
    let mut given: BTreeMap<&str, BTreeMap<String, u64>> = BTreeMap::new();
    let kept = wanted.kept().filter(|(name, _)| !shares.contains_key(*name));
    let kept = kept.map(|(name, vnet)| (name, vnet.shares()));
    for (vnet, shares) in kept.chain(shares) {
        for (node, share) in
            shares.iter().flat_map(|(node, all)| all.iter().map(move |s| (node, s)))
        {
            let users = given.entry(&share.engine).or_default();
            *users.entry(format!("{vnet}/{node}")).or_default() += u64::from(share.millicores);
        }
    }
    for (name, given) in given {
        let users = given.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
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
