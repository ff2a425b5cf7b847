//! Checks of external interfaces' use by virtual networks: the interface
//! exists, tunnel keys are unique, packets fit, and guarantees fit.

use std::collections::{BTreeMap, BTreeSet};

use pdp_wire::tunnel::{Take, Tunnel, TunnelKey, TunnelKind};

use super::external_use::{ExternalUse, external_use, externals, guarantee_bps, ports};
use super::{DesiredState, Existing, Reporter};
use crate::limits::{MTU_DEFAULT, MTU_MAX, MTU_MIN};
use crate::nearest::nearest;
use crate::object::{ExternalForm, VirtualNetwork};
use crate::tunnel::External;
use crate::units::BitRate;

pub(super) fn check(desired: &mut DesiredState<'_>, existing: &Existing, reporter: &mut Reporter) {
    tunnels(desired, reporter);
    let substrate = desired.substrate.clone();
    let mtu_of = |interface: &str| -> Option<u32> {
        match substrate.as_ref()?.spec.interfaces.get(interface)?.outlet()? {
            ExternalForm::Device(device, _) => Some(existing.devices.as_ref()?.get(device)?.mtu),
            ExternalForm::Memif(memif) => Some(memif.mtu),
            ExternalForm::Generator(_) => Some(MTU_MAX),
        }
    };
    let mut kept: BTreeMap<&str, ExternalUse> = BTreeMap::new();
    let mut mtu_max = 0;
    for (_, vnet) in desired.reserved() {
        vnet.sums().outside.iter().for_each(|(interface, more)| add(&mut kept, interface, more));
        mtu_max = mtu_max.max(vnet.sums().mtu);
    }
    let exceeds = |(interface, outside): (&&str, &ExternalUse)| {
        mtu_of(interface).is_some_and(|mtu| outside.packet_bytes > mtu)
    };
    // Without changes of its own, only a change of devices can cause an error.
    if mtu_max > MTU_MAX || kept.iter().any(exceeds) {
        for (name, vnet) in desired.reserved() {
            mtus(name, &mut VirtualNetwork::clone(vnet), false, mtu_of, reporter);
        }
    }
    for (name, vnet) in &mut desired.changed {
        mtus(name, vnet, true, mtu_of, reporter);
    }
    guarantees(desired, kept, reporter);
}

/// Adds to the use of an interface.
fn add<'a>(all: &mut BTreeMap<&'a str, ExternalUse>, interface: &'a str, more: &ExternalUse) {
    let outside = all.entry(interface).or_default();
    outside.guarantee_bps = outside.guarantee_bps.saturating_add(more.guarantee_bps);
    outside.packet_bytes = outside.packet_bytes.max(more.packet_bytes);
}

/// Checks that interfaces exist and that tunnel keys are unique.
fn tunnels(desired: &DesiredState<'_>, reporter: &mut Reporter) {
    // Existing networks keep their keys; the error belongs to the changed one.
    let mut taken: BTreeMap<(&str, TunnelKey), String> = BTreeMap::new();
    let mut takes: BTreeMap<(&str, Take), (&TunnelKind, String)> = BTreeMap::new();
    let mut new_keys: BTreeSet<(&str, TunnelKey)> = BTreeSet::new();
    let mut new_takes: BTreeSet<(&str, Take)> = BTreeSet::new();
    for (vnet, changed) in &desired.changed {
        let before = desired.before.get(vnet);
        for (name, external) in &changed.spec.externals {
            if before.and_then(|vnet| vnet.spec.externals.get(name)) != Some(external) {
                let by = external.encapsulation();
                new_takes.extend(by.takes().map(|take| (&*external.interface, take)));
                new_keys.insert((&external.interface, by.key()));
            }
        }
    }
    // If the interfaces stay, unchanged networks matter only where new ones may conflict.
    let all = reporter.substrate.is_some();
    let kept = (all || !new_keys.is_empty()).then(|| desired.reserved()).into_iter().flatten();
    let kept = kept.map(|(name, vnet)| (name, &***vnet, all));
    let changed = desired.changed.iter().map(|(name, vnet)| (name, vnet, true));
    for (vnet, spec, whole) in kept.chain(changed) {
        for (name, external) in &spec.spec.externals {
            let interface = external.interface.as_str();
            let by = external.encapsulation();
            let (key, take) = ((interface, by.key()), by.takes().map(|take| (interface, take)));
            if !whole
                && !new_keys.contains(&key)
                && !take.is_some_and(|take| new_takes.contains(&take))
            {
                continue;
            }
            interface_known(desired, vnet, name, external, reporter);
            let tunnel = by.tunnel().map(Tunnel::kind);
            let place = tunnel.map_or(vec!["interface"], |kind| vec![kind.name, kind.key]);
            let path = [&["spec", "externals", name], &place[..]].concat();
            let owner = format!("{vnet}/{name}");
            let kind = kind_without_tunnels(desired, interface);
            if let (Some(kind), Some(tunnel)) = (kind, tunnel) {
                let message = format!("interface {interface} is a {kind}, which has no tunnels");
                let hint = format!("remove {}, or use an interface with a device", tunnel.name);
                reporter.vnet(vnet, &path[..4], message, hint);
            } else if let Some(other) = taken.insert(key, owner.clone()) {
                let by_whom = taken_by(reporter, &other);
                let message = format!("{by} on interface {interface} {by_whom}");
                let hint = match kind {
                    Some(kind) => format!("add an interface: a {kind} has one external"),
                    None => "use another key or interface".into(),
                };
                reporter.vnet(vnet, &path, message, hint);
            }
            let (Some(at), Some(tunnel)) = (take, tunnel) else { continue };
            let (kind, other) = takes.entry(at).or_insert_with(|| (tunnel, owner)).clone();
            if kind != tunnel {
                let by_whom = taken_by(reporter, &other);
                let message = format!("{} {by_whom} for {}", at.1, kind.name);
                reporter.vnet(vnet, &path, message, "use another port");
            }
        }
    }
}

/// Reports that a key is taken, and by which external, if the client may know the network.
fn taken_by(reporter: &Reporter, owner: &str) -> String {
    let vnet = owner.split_once('/').map_or(owner, |(vnet, _)| vnet);
    if reporter.sees(vnet) { format!("is taken by {owner}") } else { "is taken".to_owned() }
}

/// Returns the name of an interface kind that one external uses entirely.
fn kind_without_tunnels(desired: &DesiredState<'_>, interface: &str) -> Option<&'static str> {
    match desired.substrate.as_ref()?.spec.interfaces.get(interface)?.outlet()? {
        ExternalForm::Device(..) | ExternalForm::Generator(_) => None,
        ExternalForm::Memif(_) => Some("memif"),
    }
}

fn interface_known(
    desired: &DesiredState<'_>,
    vnet: &str,
    name: &str,
    external: &External,
    reporter: &mut Reporter,
) {
    let interfaces = desired.substrate.as_ref().map(|substrate| &substrate.spec.interfaces);
    let is_there = |interfaces: &BTreeMap<_, _>| interfaces.contains_key(&external.interface);
    if reporter.unknown || interfaces.is_some_and(is_there) {
        return;
    }
    if reporter.asker.is_some() {
        // An earlier check covers the tenant's grants. The error does not list other interfaces.
        let message = format!("interface {} does not exist", external.interface);
        let hint = "ask an operator";
        reporter.vnet(vnet, &["spec", "externals", name, "interface"], message, hint);
        return;
    }
    let known: Vec<&str> =
        interfaces.into_iter().flat_map(|i| i.keys().map(String::as_str)).collect();
    let hint = match nearest(&external.interface, known.iter().copied()) {
        Some(nearest) => format!("did you mean {nearest}?"),
        None if known.is_empty() => "apply a Substrate with interfaces first".into(),
        None => format!("the substrate has {}", known.join(", ")),
    };
    let message = format!("the substrate has no interface {}", external.interface);
    reporter.vnet(vnet, &["spec", "externals", name, "interface"], message, hint);
}

/// Checks MTUs against the underlay's, and fills in defaults.
fn mtus(
    name: &str,
    vnet: &mut VirtualNetwork,
    changed: bool,
    mtu_of: impl Fn(&str) -> Option<u32>,
    reporter: &mut Reporter,
) {
    let mut bounds: BTreeMap<(String, String), (u32, u32)> = BTreeMap::new();
    for link in &vnet.spec.links {
        let outside = externals(vnet, link).filter_map(|(_, external)| {
            Some((mtu_of(&external.interface)?, external.encapsulation().overhead()))
        });
        let carried = |(mtu, overhead): &(u32, u32)| mtu.saturating_sub(*overhead);
        let Some(least) = outside.min_by_key(carried) else { continue };
        bounds.extend(ports(link).map(|(node, name)| ((node.clone(), name.clone()), least)));
    }
    for (node_name, node) in &mut vnet.spec.nodes {
        for (interface_name, interface) in &mut node.interfaces {
            let outside = bounds.get(&(node_name.clone(), interface_name.clone())).copied();
            let bound = outside.map(|(underlay, overhead)| underlay.saturating_sub(overhead));
            let path = ["spec", "nodes", node_name, "interfaces", interface_name, "mtu"];
            if let Some((underlay, overhead)) = outside
                && underlay < overhead + MTU_MIN
            {
                let message = format!(
                    "no mtu fits: the tunnel takes {overhead} of the underlay's {underlay} bytes, \
                     and an mtu is at least {MTU_MIN}"
                );
                reporter.vnet(
                    name,
                    &path[..5],
                    message,
                    "use an external interface with a larger mtu",
                );
                continue;
            }
            match (interface.mtu, bound) {
                (Some(mtu), Some(bound)) if mtu > bound => {
                    let message = format!("mtu {mtu} exceeds the underlay's {bound}");
                    let hint = format!("set mtu to at most {}", bound.min(MTU_MAX));
                    reporter.vnet(name, &path, message, hint);
                }
                (Some(mtu), _) if mtu > MTU_MAX => {
                    let message = format!("mtu {mtu} exceeds {MTU_MAX}");
                    reporter.vnet(name, &path, message, format!("set mtu to at most {MTU_MAX}"));
                }
                (None, bound) if changed => {
                    interface.mtu = Some(bound.map_or(MTU_DEFAULT, |bound| bound.min(MTU_DEFAULT)));
                }
                _ => {}
            }
        }
    }
}

/// Checks that guarantees over an interface do not exceed its
/// capacity, and that it has a capacity if there are any.
fn guarantees(
    desired: &DesiredState<'_>,
    kept: BTreeMap<&str, ExternalUse>,
    reporter: &mut Reporter,
) {
    let Some(substrate) = &desired.substrate else { return };
    let mut left: BTreeMap<&str, u64> = BTreeMap::new();
    for (name, interface) in &substrate.spec.interfaces {
        left.extend(interface.capacity.map(|capacity| (name.as_str(), capacity.0)));
    }
    // The error belongs to the changed network. Single links matter only if the total is too high.
    let changed: Vec<_> = desired.changed.values().map(external_use).collect();
    let mut all = kept;
    changed.iter().flatten().for_each(|(interface, more)| add(&mut all, interface, more));
    let fits = |(interface, left): (&&str, &u64)| {
        all.get(interface).is_none_or(|outside| outside.guarantee_bps <= *left)
    };
    let has_capacity = |(interface, outside): (&&str, &ExternalUse)| {
        outside.guarantee_bps == 0 || left.contains_key(interface)
    };
    if left.iter().all(fits) && all.iter().all(has_capacity) {
        return;
    }
    let kept = desired.reserved().map(|(name, vnet)| (name, &***vnet));
    for (name, vnet) in kept.chain(&desired.changed) {
        for (index, link) in vnet.spec.links.iter().enumerate() {
            for (end, External { interface, .. }) in externals(vnet, link) {
                let guarantee = BitRate(guarantee_bps(link, end));
                if guarantee.0 == 0 {
                    continue;
                }
                let path = ["spec", "links", &index.to_string(), "guarantee"];
                let Some(left) = left.get_mut(interface.as_str()) else {
                    let message = format!(
                        "interface {interface} has no capacity, so links can't have guarantees"
                    );
                    let hint = "set the interface's capacity in the Substrate";
                    reporter.vnet(name, &path, message, hint);
                    continue;
                };
                match left.checked_sub(guarantee.0) {
                    Some(rest) => *left = rest,
                    None => {
                        let left = BitRate(*left);
                        let all = format!(
                            "guarantee {guarantee} exceeds the {left} that other links leave on \
                             interface {interface}"
                        );
                        let little = format!(
                            "guarantee {guarantee} exceeds the free capacity of interface \
                             {interface}"
                        );
                        let message = reporter.of_all(all, &little);
                        reporter.vnet(
                            name,
                            &path,
                            message,
                            "lower a guarantee of the interface's links",
                        );
                    }
                }
            }
        }
    }
}
