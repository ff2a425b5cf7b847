//! Allocates power to vrouters, from forwarding engines or from the mux.

use std::collections::BTreeMap;

use pdp_alloc::{
    AllocatedPower, AllocationRefusal, AllocationRequest, EngineCapacities, EngineCapacity,
    EngineShare, LENT_LOAD_MILLICORES, allocate, allocate_guests, lend,
};

use super::{DesiredState, Existing, PowerShares, Reporter};
use crate::limits::GUESTS_MAX;
use crate::object::{Mux, Node, VirtualNetwork};
use crate::plane::EngineDemand;
use crate::units::Cores;

/// Returns the minimum shares of a virtual network's vrouters if all their requests are met.
pub(super) fn asked(vnet: &VirtualNetwork) -> PowerShares {
    let planes = vnet
        .spec
        .nodes
        .iter()
        .filter_map(|(name, node)| Some((name, node.data_plane.as_ref()?.needs().engines?)));
    let share = |asked: EngineDemand| EngineShare {
        engine: String::new(),
        millicores: asked.power.map_or(0, |power| power.0),
    };
    planes.map(|(name, asked)| (name.clone(), vec![share(asked)])).collect()
}

/// Allocates shares for changed virtual networks, and for those with a vrouter without any.
pub(super) fn check(
    desired: &DesiredState<'_>,
    existing: &Existing,
    reporter: &mut Reporter,
) -> BTreeMap<String, PowerShares> {
    let engines: EngineCapacities = desired
        .substrate
        .iter()
        .flat_map(|substrate| &substrate.spec.forwarding_engines)
        .map(|(name, engine)| {
            let usable = !existing.failed_engines.contains(name);
            (name.clone(), EngineCapacity { capacity_millicores: engine.capacity.0, usable })
        })
        .collect();
    let shares = allocate_all(desired, &engines, reporter);
    if reporter.substrate.is_some() {
        capacities(desired, &shares, &engines, reporter);
    }
    if let Some(substrate) = &desired.substrate {
        fastpaths(desired, &substrate.spec.mux, reporter);
    }
    shares
}

/// Checks the guarantees of all fast paths against the mux's
/// power, and those of one virtual network against one worker's.
fn fastpaths(desired: &DesiredState<'_>, mux: &Mux, reporter: &mut Reporter) {
    let (bound, one) = mux.fastpath_power();
    let mut given: u64 = desired.reserved().map(|(_, vnet)| vnet.sums().fastpath).sum();
    let powered = |vnet: &VirtualNetwork| {
        let power = |node: &Node| {
            let plane = node.data_plane.as_ref()?;
            Some(u64::from(plane.needs().mux_millicores)).filter(|power| *power > 0)
        };
        let nodes = vnet.spec.nodes.iter();
        nodes.filter_map(|(name, node)| Some((name.clone(), power(node)?))).collect::<Vec<_>>()
    };
    let has = |name: &str| desired.before.get(name).map_or(0, |vnet| vnet.sums().fastpath);
    let mut askers: Vec<_> =
        desired.changed.iter().map(|(name, vnet)| (name, powered(vnet))).collect();
    let sum = |nodes: &[(String, u64)]| nodes.iter().map(|(_, power)| power).sum::<u64>();
    // Networks that want no more than they have come first, so
    // that others in the same change get what they release.
    askers.sort_by_key(|(name, nodes)| sum(nodes) > has(name));
    for (vnet, nodes) in askers {
        let grows = sum(&nodes) > has(vnet);
        let mut own = 0;
        for (node, power) in nodes {
            let no_room = grows && given + power > u64::from(bound.0);
            if no_room || grows && own + power > u64::from(one.0) {
                let path = ["spec", "nodes", &node, "dataPlane", "power"];
                let asked = Cores(u32::try_from(power).unwrap_or(u32::MAX));
                let (all, free) = (mux.power(), u64::from(bound.0).saturating_sub(given));
                let details = match no_room {
                    true => format!(
                        "power {asked} does not fit: fast paths can have {bound} of the mux's \
                         {all}, of which {} is free",
                        Cores(free as u32)
                    ),
                    false => format!(
                        "power {asked} does not fit: fast paths of one virtual network can have \
                         {one} of one of the mux's {} workers",
                        mux.workers
                    ),
                };
                let message = reporter
                    .of_all(details, &format!("power {asked} exceeds the mux's free power"));
                let hint = reporter.of_all(
                    "ask for less, leave power out to borrow unused power, or give the mux more \
                     (spec.mux.power of the Substrate; see pdp inspect substrate)"
                        .into(),
                    "ask for less, leave power out to borrow unused power, take it from another of \
                     your networks, or ask an operator for more",
                );
                reporter.vnet(vnet, &path, message, hint);
                continue;
            }
            (given, own) = (given + power, own + power);
        }
    }
    if reporter.substrate.is_none() {
        return;
    }
    let kept = desired.reserved().map(|(name, vnet)| (name, vnet.sums().fastpath));
    let powered: Vec<_> = kept.filter(|(_, power)| *power > 0).collect();
    let path = ["spec", "mux", "power"];
    let (power, hint) = (mux.power(), "keep more power, or lower that of the fast paths first");
    let all: u64 = powered.iter().map(|(_, power)| power).sum();
    let has = |millicores: u64| Cores(u32::try_from(millicores).unwrap_or(u32::MAX));
    if all > u64::from(bound.0) {
        let names: Vec<&str> = powered.iter().map(|(name, _)| name.as_str()).collect();
        let (all, names) = (has(all), names.join(", "));
        let message = format!(
            "power {power} leaves {bound} for fast paths, below the {all} of those in {names}"
        );
        reporter.substrate(&path, message, hint);
    } else if let Some((name, most)) = powered.iter().find(|it| it.1 > u64::from(one.0)) {
        let (workers, most) = (mux.workers, has(*most));
        let message = format!(
            "power {power} of {workers} workers leaves {one} for fast paths of one virtual \
             network, below the {most} of {name}"
        );
        reporter.substrate(&path, message, hint);
    }
}

/// A vrouter that requests power.
struct PowerRequester<'a> {
    vnet: &'a str,
    node: &'a str,
    demand: EngineDemand,
    has: u64,
}

impl PowerRequester<'_> {
    /// Requested guarantee, thousandths of a core; 0: none.
    fn requested(&self) -> u32 {
        self.demand.power.map_or(0, |power| power.0)
    }
}

/// Load of forwarding engines.
#[derive(Clone, Default)]
struct EngineLoads {
    /// Guaranteed power.
    given: AllocatedPower,
    /// Guests that borrow, as counted by [`lend`].
    lent: AllocatedPower,
}

impl EngineLoads {
    fn add(&mut self, share: &EngineShare) {
        give(&mut self.given, &share.engine, share.millicores.into());
        if share.millicores == 0 {
            give(&mut self.lent, &share.engine, LENT_LOAD_MILLICORES);
        }
    }

    fn without(&self, shares: &[EngineShare]) -> Self {
        let mut rest = self.clone();
        for share in shares {
            take(&mut rest.given, &share.engine, share.millicores.into());
            if share.millicores == 0 {
                take(&mut rest.lent, &share.engine, LENT_LOAD_MILLICORES);
            }
        }
        rest
    }

    fn sum(&self) -> AllocatedPower {
        let mut sum = self.given.clone();
        self.lent.iter().for_each(|(engine, lent)| give(&mut sum, engine, *lent));
        sum
    }
}

fn allocate_all(
    desired: &DesiredState<'_>,
    engines: &EngineCapacities,
    reporter: &mut Reporter,
) -> BTreeMap<String, PowerShares> {
    let mut loads = EngineLoads::default();
    let mut all: BTreeMap<String, PowerShares> = BTreeMap::new();
    let mut askers: Vec<PowerRequester<'_>> = Vec::new();
    for (name, vnet) in desired.reserved() {
        let sums = vnet.sums();
        for (of, all) in [(&sums.power, &mut loads.given), (&sums.borrowed, &mut loads.lent)] {
            of.iter().for_each(|(engine, millicores)| give(all, engine, *millicores));
        }
        if !sums.placed {
            all.insert(name.clone(), vnet.shares().clone());
            let has_none = |asker: &PowerRequester<'_>| !vnet.shares().contains_key(asker.node);
            askers.extend(routers(name, vnet, vnet.shares()).filter(has_none));
        }
    }
    for (name, vnet) in &desired.changed {
        let mut shares =
            desired.before.get(name).map_or_else(PowerShares::new, |vnet| vnet.shares().clone());
        let asks = |node: &Node| node.of_engines().is_some();
        shares.retain(|node, _| vnet.spec.nodes.get(node).is_some_and(asks));
        shares.values().flatten().for_each(|share| loads.add(share));
        askers.extend(routers(name, vnet, &shares));
        all.insert(name.clone(), shares);
    }
    // Vrouters that release power come first, so that others in the same
    // change get it. Then come the largest, which need whole engines, and last
    // those that borrow. The sort is stable, so names make it deterministic.
    askers.sort_by_key(|asker| {
        let requested = asker.requested();
        (u64::from(requested) > asker.has, std::cmp::Reverse(requested))
    });
    for asker in askers {
        let Some(of_vnet) = all.get_mut(asker.vnet) else { continue };
        let own = of_vnet.get(asker.node).map_or(&[][..], Vec::as_slice);
        let others = loads.without(own);
        match allocate_one(&asker, engines, &others, own) {
            Ok(shares) => {
                loads = others;
                shares.iter().for_each(|share| loads.add(share));
                of_vnet.insert(asker.node.to_owned(), shares);
            }
            Err(refused) => {
                let path = ["spec", "nodes", asker.node, "dataPlane", "power"];
                let (message, hint) = refused.message(&asker, engines, reporter);
                reporter.vnet(asker.vnet, &path, message, hint);
            }
        }
    }
    all
}

/// Why a vrouter gets no power.
enum PowerRefusal {
    NoCapacity(AllocationRefusal),
    NoEngine,
    TooManyGuests(usize),
}

fn allocate_one(
    asker: &PowerRequester<'_>,
    engines: &EngineCapacities,
    others: &EngineLoads,
    own: &[EngineShare],
) -> Result<Vec<EngineShare>, PowerRefusal> {
    let EngineDemand { power, shares, split, .. } = asker.demand;
    let shares = match (power, shares) {
        (None, shares) => {
            return lend(engines, &others.sum(), own, shares.unwrap_or(1))
                .ok_or(PowerRefusal::NoEngine);
        }
        (Some(power), Some(shares)) => {
            allocate_guests(engines, &others.given, own, power.0, shares)
        }
        (Some(power), None) => {
            let request = AllocationRequest { millicores: power.0, split };
            allocate(engines, &others.given, own, request)
        }
    };
    match shares {
        Ok(shares) if shares.len() > GUESTS_MAX => Err(PowerRefusal::TooManyGuests(shares.len())),
        Ok(shares) => Ok(shares),
        Err(_) if engines.is_empty() => Err(PowerRefusal::NoEngine),
        Err(refusal) => Err(PowerRefusal::NoCapacity(refusal)),
    }
}

impl PowerRefusal {
    /// Returns the message for the requester, and advice.
    fn message(
        &self,
        asker: &PowerRequester<'_>,
        engines: &EngineCapacities,
        reporter: &Reporter<'_>,
    ) -> (String, String) {
        let power = Cores(asker.requested());
        match self {
            Self::TooManyGuests(count) => (
                format!("power {power} needs {count} forwarding guests, {GUESTS_MAX} at most"),
                "ask for less, or use larger engines".into(),
            ),
            Self::NoEngine if engines.is_empty() => (
                "there is no forwarding engine".into(),
                "apply a Substrate with forwardingEngines first".into(),
            ),
            Self::NoEngine => (
                "no forwarding engine runs".into(),
                reporter.of_all("`pdp inspect substrate` shows them".into(), "ask an operator"),
            ),
            Self::NoCapacity(refusal) => (
                reporter.of_all(
                    refusal.to_string(),
                    &format!("power {power} exceeds the free power of the forwarding engines"),
                ),
                reporter.of_all(
                    refusal.advice(),
                    "ask for less (power: 0.01, or pdp scale with --power 0.01), take it from another of \
                     your networks, or ask an operator for more",
                ),
            ),
        }
    }
}

/// Returns a virtual network's vrouters that request
/// power of forwarding engines. They have these shares.
fn routers<'a>(
    vnet: &'a str,
    spec: &'a VirtualNetwork,
    shares: &PowerShares,
) -> impl Iterator<Item = PowerRequester<'a>> {
    spec.spec.nodes.iter().filter_map(move |(node, router)| {
        let own = shares.get(node).into_iter().flatten();
        let has = own.map(|share| u64::from(share.millicores)).sum();
        Some(PowerRequester { vnet, node, demand: router.of_engines()?, has })
    })
}

fn give(given: &mut AllocatedPower, engine: &str, millicores: u64) {
    match given.get_mut(engine) {
        Some(sum) => *sum += millicores,
        None => drop(given.insert(engine.to_owned(), millicores)),
    }
}

fn take(given: &mut AllocatedPower, engine: &str, millicores: u64) {
    if let Some(sum) = given.get_mut(engine) {
        *sum = sum.saturating_sub(millicores);
    }
}

/// Checks that a changed substrate still has the power that its engines have given.
fn capacities(
    desired: &DesiredState<'_>,
    shares: &BTreeMap<String, PowerShares>,
    engines: &EngineCapacities,
    reporter: &mut Reporter,
) {
    let mut given: BTreeMap<&str, BTreeMap<String, u64>> = BTreeMap::new();
    let kept = desired.reserved().filter(|(name, _)| !shares.contains_key(*name));
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
                let message =
                    format!("forwarding engine {name} is removed, but {users} runs on it");
                reporter.substrate(
                    &path[..2],
                    message,
                    "keep the engine, or delete its users first",
                );
            }
            Some(engine) if u64::from(engine.capacity_millicores) < millicores => {
                let capacity = Cores(engine.capacity_millicores);
                let message = format!("capacity {capacity} is below the {used} that {users} uses");
                reporter.substrate(&path, message, "keep the capacity, or lower their power first");
            }
            Some(_) => {}
        }
    }
}
