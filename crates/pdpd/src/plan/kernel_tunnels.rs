//! Selection of external links that stay in the kernel. Such a link has two ends. One
//! is a port of a vrouter that the kernel forwards for. The other is a VXLAN or UDP
//! tunnel over a device with XDP in its driver. Its frames never wait in a queue.
//!
//! The mux takes no part in these links and does not know their
//! tunnels. All other external links go through the mux.
//!
//! Source: Trellis (ROADS 2008), section 4.2: tunnels are outside of the containers.

use pdp_net::ports::PortRate;
use pdp_spec::units::Endpoint;
use pdp_spec::{DeviceAttach, ExternalForm, Link, SubstrateSpec, VirtualNetworkSpec};
use pdp_wire::tunnel::Encapsulation;

use super::convert;
use super::kernel_links::{self, KernelLinkTarget, KernelTunnel};
use crate::plan::allocations::VnetAllocation;

/// A link that may stay in the kernel.
struct TunnelCandidate<'a> {
    node: &'a str,
    interface: &'a str,
    link: &'a Link,
    /// The end at the port.
    end: &'a Endpoint,
    external: &'a str,
    device: &'a str,
    by: Encapsulation,
}

/// Returns the link if it may stay in the kernel.
fn candidate<'a>(
    vnet: &str,
    spec: &'a VirtualNetworkSpec,
    substrate: &'a SubstrateSpec,
    link: &'a Link,
) -> Option<TunnelCandidate<'a>> {
    let [one, other] = &link.endpoints[..] else { return None };
    let (name, port) = match (one, other) {
        (Endpoint::External(name), port) | (port, Endpoint::External(name)) => (name, port),
        _ => return None,
    };
    let (node, interface) = kernel_links::port(vnet, spec, link, port)?;
    let outside = spec.externals.get(name)?;
    let by = outside.encapsulation();
    let known = matches!(by, Encapsulation::Vxlan(_) | Encapsulation::Udp(_));
    let external = substrate.interfaces.get(&outside.interface)?;
    // Links with a common capacity wait for each other.
    let Some(ExternalForm::Device(device, attach)) = external.outlet() else { return None };
    let driver = attach != DeviceAttach::Packet && external.capacity.is_none();
    let external = &outside.interface;
    let found = TunnelCandidate { node, interface, link, end: port, external, device, by };
    (known && driver).then_some(found)
}

/// Returns all candidates for which `has` returns true. If the vnet has `police`, one place
/// must limit its ingress: either all of its external links stay in the kernel, or none.
fn all<'a>(
    vnet: &str,
    spec: &'a VirtualNetworkSpec,
    substrate: &'a SubstrateSpec,
    has: impl Fn(&TunnelCandidate<'_>) -> bool,
) -> Vec<TunnelCandidate<'a>> {
    let may = spec.links.iter().filter_map(|link| candidate(vnet, spec, substrate, link));
    let stay: Vec<_> = may.filter(has).collect();
    let links = stay.len() + kernel_links::kernel_link_ports(vnet, spec).count() / 2;
    let split = spec.police.is_some() && links < spec.links.len();
    if split { Vec::new() } else { stay }
}

/// Returns the ports, by node and interface, whose external links stay in the kernel.
/// `sends` returns whether a device supports this ([`pdp_net::xdp::redirects`]). While a
/// device is missing, `was` decides: it returns whether a port's link has stayed so far.
pub fn kernel_tunnel_ports<'a>(
    vnet: &str,
    spec: &'a VirtualNetworkSpec,
    substrate: &'a SubstrateSpec,
    sends: impl Fn(&str) -> Option<bool>,
    was: impl Fn(&str, &str) -> bool,
) -> Vec<(&'a str, &'a str)> {
    let stays =
        |it: &TunnelCandidate<'_>| sends(it.device).unwrap_or_else(|| was(it.node, it.interface));
    all(vnet, spec, substrate, stays).into_iter().map(|it| (it.node, it.interface)).collect()
}

/// Returns a vnet's external links that stay in the kernel, according to its allocations.
pub(super) fn kernel_tunnel_links<'a>(
    vnet: &str,
    spec: &'a VirtualNetworkSpec,
    substrate: &'a SubstrateSpec,
    allocation: &VnetAllocation,
) -> Vec<KernelTunnelLink<'a>> {
    let has = |it: &TunnelCandidate<'_>| {
        allocation.ports.get(it.node).is_some_and(|ports| ports.contains_key(it.interface))
    };
    let limit = spec.police.map(convert::rate).map(|police| {
        let rate = PortRate { bps: police.bps, pps: police.pps, ..PortRate::default() };
        (allocation.number, rate)
    });
    let kernel_link = |it: TunnelCandidate<'a>| KernelTunnelLink {
        rate: kernel_links::rate(&it.link.egress(it.end)),
        link: it.link,
        port: (it.node, it.interface),
        tunnel: KernelTunnel {
            interface: it.external.into(),
            device: it.device.into(),
            by: it.by,
            limit,
        },
    };
    all(vnet, spec, substrate, has).into_iter().map(kernel_link).collect()
}

/// Returns the number, target and rate of a node's port, given by its
/// interface; `None` if its link is not among these.
pub(super) fn tunnel_of(
    all: &[KernelTunnelLink<'_>],
    allocation: &VnetAllocation,
    (node, interface): (&str, &str),
) -> Option<(u32, KernelLinkTarget, Option<PortRate>)> {
    let number = *allocation.ports.get(node)?.get(interface)?;
    let found = all.iter().find(|link| link.port == (node, interface))?;
    Some((number, KernelLinkTarget::Outside(found.tunnel.clone()), found.rate))
}

/// An external link that stays in the kernel.
pub(super) struct KernelTunnelLink<'a> {
    pub(super) link: &'a Link,
    /// Node and interface.
    pub(super) port: (&'a str, &'a str),
    pub(super) tunnel: KernelTunnel,
    pub(super) rate: Option<PortRate>,
}
