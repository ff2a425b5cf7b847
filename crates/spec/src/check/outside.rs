//! Checks of what virtual networks have on external interfaces: that the interface is there, that
//! no tunnel key is taken twice, that packets fit, that rates do.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use super::{Existing, Intent, Reporter};
use crate::limits::{MTU_DEFAULT, MTU_MAX};
use crate::object::{External, Link, Outlet, VirtualNetwork};
use crate::shape::nearest;
use crate::units::{BitRate, Endpoint};

/// Bytes that a tunnel puts before the inner IP packet: inner Ethernet, UDP, and outer IP header.
const UDP_OVERHEAD_V4: u32 = 14 + 8 + 20;
/// The same over IPv6.
const UDP_OVERHEAD_V6: u32 = 14 + 8 + 40;
/// The VXLAN header (RFC 7348 section 5).
const VXLAN_HEADER: u32 = 8;

/// What tells a link's frames apart on an interface.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Key {
    Whole,
    Vxlan(IpAddr, IpAddr, u16, u32),
    Udp(IpAddr, IpAddr, u16, u16),
}

impl Key {
    fn of(external: &External) -> Self {
        match (&external.vxlan, &external.udp) {
            (Some(v), _) => Self::Vxlan(v.local, v.remote, v.port, v.vni),
            (None, Some(u)) => Self::Udp(u.local, u.remote, u.local_port, u.remote_port),
            (None, None) => Self::Whole,
        }
    }

    /// What people call it, and where it stands in an external.
    fn text(&self) -> (String, &'static [&'static str]) {
        match self {
            Self::Whole => ("the whole interface".into(), &["interface"]),
            Self::Vxlan(local, remote, port, vni) => {
                (format!("vni {vni} from {local} to {remote} port {port}"), &["vxlan", "vni"])
            }
            Self::Udp(local, remote, here, there) => (
                format!("udp from {local} port {here} to {remote} port {there}"),
                &["udp", "localPort"],
            ),
        }
    }

    /// The address and UDP port that its frames arrive at.
    fn arrives_at(&self) -> Option<(IpAddr, u16)> {
        match *self {
            Self::Whole => None,
            Self::Vxlan(local, _, port, _) | Self::Udp(local, _, port, _) => Some((local, port)),
        }
    }
}

pub(super) fn check(
    intent: &mut Intent,
    changed: &BTreeSet<String>,
    existing: &Existing,
    reporter: &mut Reporter,
) {
    // What was there first keeps its key; who comes with the change is at fault.
    let names = || {
        let old = intent.vnets.keys().filter(|name| !changed.contains(*name));
        old.chain(changed.iter().filter(|name| intent.vnets.contains_key(*name)))
    };
    let mut taken: BTreeMap<(String, Key), String> = BTreeMap::new();
    let mut ports: BTreeMap<(String, IpAddr, u16), (bool, String)> = BTreeMap::new();
    for vnet in names() {
        for (name, external) in &intent.vnets[vnet].spec.externals {
            interface_known(intent, vnet, name, external, reporter);
            let key = Key::of(external);
            let (text, place) = key.text();
            let path = [&["spec", "externals", name], place].concat();
            let owner = format!("{vnet}/{name}");
            let kind = kind_without_tunnels(intent, &external.interface);
            if let (Some(kind), true) = (kind, key != Key::Whole) {
                let interface = &external.interface;
                let message = format!("interface {interface} is a {kind}, which has no tunnels");
                let hint = "remove vxlan and udp, or take an interface with a device";
                reporter.vnet(vnet, &["spec", "externals", name, place[0]], message, hint);
            } else if let Some(other) =
                taken.insert((external.interface.clone(), key), owner.clone())
            {
                let by = taken_by(reporter, &other);
                let message = format!("{text} on interface {} {by}", external.interface);
                let hint = match kind {
                    Some(kind) => format!("add an interface: a {kind} has one external"),
                    None => "take another key or interface".into(),
                };
                reporter.vnet(vnet, &path, message, hint);
            }
            let Some((local, port)) = key.arrives_at() else { continue };
            let vxlan = matches!(key, Key::Vxlan(..));
            let at = (external.interface.clone(), local, port);
            let (other_vxlan, other) = ports.entry(at).or_insert_with(|| (vxlan, owner)).clone();
            if other_vxlan != vxlan {
                let kind = if other_vxlan { "VXLAN" } else { "Ethernet in UDP" };
                let by = taken_by(reporter, &other);
                let message = format!("UDP port {port} of {local} {by} for {kind}");
                reporter.vnet(vnet, &path, message, "take another port");
            }
        }
    }
    let substrate = intent.substrate.clone();
    let mtu_of = |interface: &str| -> Option<u32> {
        match substrate.as_ref()?.spec.interfaces.get(interface)?.outlet()? {
            Outlet::Device(device, _) => Some(existing.devices.as_ref()?.get(device)?.mtu),
            Outlet::Memif(memif) => Some(memif.mtu),
            Outlet::Generator(_) => Some(MTU_MAX),
        }
    };
    for (name, vnet) in &mut intent.vnets {
        // Without a change of its own, only a substrate with other devices can be at fault.
        mtus(name, vnet, changed.contains(name), mtu_of, reporter);
    }
    rates(intent, changed, reporter);
}

/// That something is taken, and by which external of which virtual network where who asks may know.
fn taken_by(reporter: &Reporter, owner: &str) -> String {
    let vnet = owner.split_once('/').map_or(owner, |(vnet, _)| vnet);
    if reporter.sees(vnet) { format!("is taken by {owner}") } else { "is taken".to_owned() }
}

/// What people call an interface all of whose frames are one external's.
fn kind_without_tunnels(intent: &Intent, interface: &str) -> Option<&'static str> {
    match intent.substrate.as_ref()?.spec.interfaces.get(interface)?.outlet()? {
        Outlet::Device(..) | Outlet::Generator(_) => None,
        Outlet::Memif(_) => Some("memif"),
    }
}

fn interface_known(
    intent: &Intent,
    vnet: &str,
    name: &str,
    external: &External,
    reporter: &mut Reporter,
) {
    let interfaces = intent.substrate.as_ref().map(|substrate| &substrate.spec.interfaces);
    if interfaces.is_some_and(|interfaces| interfaces.contains_key(&external.interface)) {
        return;
    }
    if reporter.asker.is_some() {
        // Whether it is the tenant's was looked at before; which others there are it is not told.
        let message = format!("interface {} is not there", external.interface);
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

/// The node and interface that a link joins to an external, and the external.
fn outside_end<'a>(
    vnet: &'a VirtualNetwork,
    link: &'a Link,
) -> Option<(&'a str, &'a str, &'a External)> {
    let [a, b] = link.endpoints.as_slice() else { return None };
    let (node, interface, external) = match (a, b) {
        (Endpoint::Port { node, interface }, Endpoint::External(name))
        | (Endpoint::External(name), Endpoint::Port { node, interface }) => (node, interface, name),
        _ => return None,
    };
    Some((node, interface, vnet.spec.externals.get(external)?))
}

/// Checks MTUs against the underlay's, and fills in those that are not given.
fn mtus(
    name: &str,
    vnet: &mut VirtualNetwork,
    changed: bool,
    mtu_of: impl Fn(&str) -> Option<u32>,
    reporter: &mut Reporter,
) {
    let mut bounds: BTreeMap<(String, String), u32> = BTreeMap::new();
    for link in &vnet.spec.links {
        let Some((node, interface, external)) = outside_end(vnet, link) else { continue };
        let Some(underlay) = mtu_of(&external.interface) else { continue };
        let udp = |local: IpAddr| if local.is_ipv4() { UDP_OVERHEAD_V4 } else { UDP_OVERHEAD_V6 };
        let overhead = match Key::of(external) {
            Key::Whole => 0,
            Key::Vxlan(local, ..) => udp(local) + VXLAN_HEADER,
            Key::Udp(local, ..) => udp(local),
        };
        bounds.insert((node.into(), interface.into()), underlay.saturating_sub(overhead));
    }
    for (node_name, node) in &mut vnet.spec.nodes {
        for (interface_name, interface) in &mut node.interfaces {
            let bound = bounds.get(&(node_name.clone(), interface_name.clone())).copied();
            let path = ["spec", "nodes", node_name, "interfaces", interface_name, "mtu"];
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

/// Checks that the rates of links over an interface add up to no more than its capacity.
fn rates(intent: &Intent, changed: &BTreeSet<String>, reporter: &mut Reporter) {
    let Some(substrate) = &intent.substrate else { return };
    let mut left: BTreeMap<&str, u64> = BTreeMap::new();
    for (name, interface) in &substrate.spec.interfaces {
        left.extend(interface.capacity.map(|capacity| (name.as_str(), capacity.0)));
    }
    let old = intent.vnets.keys().filter(|name| !changed.contains(*name));
    for name in old.chain(changed) {
        let Some(vnet) = intent.vnets.get(name) else { continue };
        for (index, link) in vnet.spec.links.iter().enumerate() {
            let Some((_, _, external)) = outside_end(vnet, link) else { continue };
            let (Some(rate), Some(left)) = (link.rate, left.get_mut(external.interface.as_str()))
            else {
                continue;
            };
            match left.checked_sub(rate.0) {
                Some(rest) => *left = rest,
                None => {
                    let interface = &external.interface;
                    let all = format!(
                        "rate {rate} exceeds the {} that other links leave of interface {interface}",
                        BitRate(*left),
                    );
                    let little = format!("interface {interface} has no room for a rate of {rate}");
                    let message = reporter.of_all(all, &little);
                    let path = ["spec", "links", &index.to_string(), "rate"];
                    reporter.vnet(name, &path, message, "lower the rate of a link over it");
                }
            }
        }
    }
}
