//! Which links to the outside stay in the kernel: those of two ends, one a port of a vrouter that the kernel forwards
//! for, the other a VXLAN or UDP tunnel over a device with XDP in its driver, whose frames nothing has wait. The mux has
//! no part in them: it does not know their tunnels. All others go by the mux.
//!
//! Source: Trellis (ROADS 2008), section 4.2: tunnels are outside of the containers.

use pdp_net::ports::Rate;
use pdp_spec::units::Endpoint;
use pdp_spec::{DeviceAttach, Link, Outlet, SubstrateSpec, VirtualNetworkSpec};
use pdp_wire::tunnel::Encapsulation;

use super::straight::{self, To};
use super::words;
use crate::ledger::Holding;

/// The outside end of a port's link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Far {
    /// The external interface.
    pub interface: String,
    /// The network device behind it.
    pub device: String,
    /// How the link's frames are told apart there.
    pub by: Encapsulation,
    /// What may come by it and all other tunnels of the vnet: the number of the limit, and the limit.
    pub limit: Option<(u32, Rate)>,
}

/// A link that may be one.
struct Candidate<'a> {
    node: &'a str,
    interface: &'a str,
    link: &'a Link,
    /// The port's.
    end: &'a Endpoint,
    external: &'a str,
    device: &'a str,
    by: Encapsulation,
}

/// The link as one that may stay in the kernel, if it may.
fn candidate<'a>(
    vnet: &str,
    spec: &'a VirtualNetworkSpec,
    substrate: &'a SubstrateSpec,
    link: &'a Link,
) -> Option<Candidate<'a>> {
    let [one, other] = &link.endpoints[..] else { return None };
    let (name, port) = match (one, other) {
        (Endpoint::External(name), port) | (port, Endpoint::External(name)) => (name, port),
        _ => return None,
    };
    let (node, interface) = straight::port(vnet, spec, link, port)?;
    let outside = spec.externals.get(name)?;
    let by = outside.encapsulation();
    let known = matches!(by, Encapsulation::Vxlan(_) | Encapsulation::Udp(_));
    let external = substrate.interfaces.get(&outside.interface)?;
    // Who shares a capacity waits for the others.
    let Some(Outlet::Device(device, attach)) = external.outlet() else { return None };
    let driver = attach != DeviceAttach::Packet && external.capacity.is_none();
    let external = &outside.interface;
    let found = Candidate { node, interface, link, end: port, external, device, by };
    (known && driver).then_some(found)
}

/// All links that stay, where `has` says of what may whether it does. What comes for a vnet with `police` is limited in
/// one place: all of its links stay, or none of those to the outside.
fn all<'a>(
    vnet: &str,
    spec: &'a VirtualNetworkSpec,
    substrate: &'a SubstrateSpec,
    has: impl Fn(&Candidate<'_>) -> bool,
) -> Vec<Candidate<'a>> {
    let may = spec.links.iter().filter_map(|link| candidate(vnet, spec, substrate, link));
    let stay: Vec<_> = may.filter(has).collect();
    let links = stay.len() + straight::straight_ports(vnet, spec).count() / 2;
    let split = spec.police.is_some() && links < spec.links.len();
    if split { Vec::new() } else { stay }
}

/// Ports of a network, by node and interface, whose links to the outside stay in the kernel. `sends` says whether a device can be
/// used so ([`pdp_net::xdp::redirects`]), and `was` of a port whether its link stays so far, which holds while the device
/// is not there.
pub fn far_ports<'a>(
    vnet: &str,
    spec: &'a VirtualNetworkSpec,
    substrate: &'a SubstrateSpec,
    sends: impl Fn(&str) -> Option<bool>,
    was: impl Fn(&str, &str) -> bool,
) -> Vec<(&'a str, &'a str)> {
    let stays = |it: &Candidate<'_>| sends(it.device).unwrap_or_else(|| was(it.node, it.interface));
    all(vnet, spec, substrate, stays).into_iter().map(|it| (it.node, it.interface)).collect()
}

/// A vnet's links to the outside that stay in the kernel, as what was given out says.
pub(super) fn ways<'a>(
    vnet: &str,
    spec: &'a VirtualNetworkSpec,
    substrate: &'a SubstrateSpec,
    holding: &Holding,
) -> Vec<FarLink<'a>> {
    let has = |it: &Candidate<'_>| {
        holding.ports.get(it.node).is_some_and(|ports| ports.contains_key(it.interface))
    };
    let limit = spec.police.map(words::rate).map(|police| {
        let rate = Rate { bps: police.bps, pps: police.pps, ..Rate::default() };
        (holding.number, rate)
    });
    let way = |it: Candidate<'a>| FarLink {
        rate: straight::rate(&it.link.leaving(it.end)),
        link: it.link,
        port: (it.node, it.interface),
        far: Far { interface: it.external.into(), device: it.device.into(), by: it.by, limit },
    };
    all(vnet, spec, substrate, has).into_iter().map(way).collect()
}

/// For the port of a node, by its interface: its number, where it leads, and the rate; `None`: it is none of these.
pub(super) fn way(
    all: &[FarLink<'_>],
    holding: &Holding,
    (node, interface): (&str, &str),
) -> Option<(u32, To, Option<Rate>)> {
    let number = *holding.ports.get(node)?.get(interface)?;
    let found = all.iter().find(|link| link.port == (node, interface))?;
    Some((number, To::Outside(found.far.clone()), found.rate))
}

/// A link to the outside that stays in the kernel.
pub(super) struct FarLink<'a> {
    pub(super) link: &'a Link,
    /// Node and interface.
    pub(super) port: (&'a str, &'a str),
    pub(super) far: Far,
    pub(super) rate: Option<Rate>,
}
