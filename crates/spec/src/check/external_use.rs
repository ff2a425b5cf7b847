//! Use of external interfaces by virtual networks.

use std::collections::BTreeMap;

use crate::link::Link;
use crate::object::VirtualNetwork;
use crate::tunnel::External;
use crate::units::Endpoint;

/// Use of an external interface by a virtual network.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct ExternalUse {
    /// Sum of its links' guarantees, bits per second.
    pub(super) guarantee_bps: u64,
    /// Largest packet, including tunnel headers, bytes.
    pub(super) packet_bytes: u32,
}

/// Returns a virtual network's use of each external interface at its links.
pub(super) fn external_use(vnet: &VirtualNetwork) -> BTreeMap<String, ExternalUse> {
    let mut all: BTreeMap<String, ExternalUse> = BTreeMap::new();
    for link in &vnet.spec.links {
        let nodes = &vnet.spec.nodes;
        let mtu = ports(link).filter_map(|(node, name)| nodes.get(node)?.interfaces.get(name)?.mtu);
        let mtu = mtu.max();
        for (end, external) in externals(vnet, link) {
            let outside = all.entry(external.interface.clone()).or_default();
            let guarantee_bps = guarantee_bps(link, end);
            outside.guarantee_bps = outside.guarantee_bps.saturating_add(guarantee_bps);
            let packet = mtu.map_or(0, |mtu| mtu + external.encapsulation().overhead());
            outside.packet_bytes = outside.packet_bytes.max(packet);
        }
    }
    all
}

/// Returns the externals at a link, each with its end.
pub(super) fn externals<'a>(
    vnet: &'a VirtualNetwork,
    link: &'a Link,
) -> impl Iterator<Item = (&'a Endpoint, &'a External)> {
    link.endpoints.iter().filter_map(|end| match end {
        Endpoint::Port { .. } => None,
        Endpoint::External(name) => Some((end, vnet.spec.externals.get(name)?)),
    })
}

/// Returns the nodes' interfaces at a link.
pub(super) fn ports(link: &Link) -> impl Iterator<Item = (&String, &String)> {
    link.endpoints.iter().filter_map(|end| match end {
        Endpoint::Port { node, interface } => Some((node, interface)),
        Endpoint::External(_) => None,
    })
}

/// Returns the guarantee of a link to the outside at an end, bits per second. If the
/// link joins a node's interface to the external, that interface's settings apply.
pub(super) fn guarantee_bps(link: &Link, external: &Endpoint) -> u64 {
    let by = match link.has_egress(external) {
        true => Some(external),
        false => link.endpoints.iter().find(|end| *end != external),
    };
    let Some(at) = by.and_then(|by| link.endpoints.iter().position(|end| end == by)) else {
        return 0;
    };
    let now = link.egress(&link.endpoints[at]).guarantee;
    let later = link.steps().into_iter().map(|(_, _, egress)| egress[at].guarantee);
    later.chain([now]).flatten().max().unwrap_or_default().0
}
