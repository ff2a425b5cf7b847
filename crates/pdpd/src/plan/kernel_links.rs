//! Selection of links that stay in the kernel: those between two vrouters that the kernel
//! forwards for, and whose frames never wait in a queue. Their ports are veths, and the mux
//! takes no part in them. All other ports are TAPs, and their links go through the mux.
//!
//! Source: Trellis (ROADS 2008), section 4.2: two containers of one
//! host are joined without a tunnel.

use pdp_net::interface::InterfaceState;
use pdp_net::napi;
use pdp_net::ports::{PortRate, PortSpec};
use pdp_spec::units::{Endpoint, QueueDepth};
use pdp_spec::{
    Link, LinkEgress, Plane, QUEUE_FRAMES_DEFAULT, QUEUE_FRAMES_DEFAULT_BEFORE, VirtualNetworkSpec,
    tenant_of,
};
use pdp_wire::tunnel::Encapsulation;

use crate::plan::allocations::VnetAllocation;

/// External end of a port's link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelTunnel {
    /// The external interface.
    pub interface: String,
    /// The network device behind it.
    pub device: String,
    /// Encapsulation that identifies the link's frames there.
    pub by: Encapsulation,
    /// Ingress limit that this and all other tunnels of the vnet have
    /// in common: its number, and the rate.
    pub limit: Option<(u32, PortRate)>,
}

/// A port whose frames stay in the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelLinkPort {
    /// Properties of the port.
    pub spec: PortSpec,
    /// Target of its link.
    pub to: KernelLinkTarget,
    /// Egress limit.
    pub rate: Option<PortRate>,
}

/// Target of such a port's link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KernelLinkTarget {
    /// The port with this number.
    Port(u32),
    /// An external interface, by a tunnel.
    Outside(KernelTunnel),
}

/// Desired current state of such a port.
#[derive(Clone, Copy, Debug)]
pub struct KernelLinkPortState<'a> {
    /// Plan of the port.
    pub port: &'a KernelLinkPort,
    /// True if it has carrier.
    pub carrier: bool,
    /// True if its link forwards frames.
    pub joined: bool,
    /// Device of an external link, if it exists.
    pub device: Option<InterfaceState>,
}

/// Returns the ports, by node and interface, whose internal links stay in the kernel.
pub fn kernel_link_ports<'a>(
    vnet: &str,
    spec: &'a VirtualNetworkSpec,
) -> impl Iterator<Item = (&'a str, &'a str)> {
    let links = spec.links.iter().filter_map(|link| ends(vnet, spec, link).ok());
    links.flatten()
}

/// Path of a link's frames.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LinkPath {
    /// The frames stay in the kernel.
    Kernel,
    /// The frames go through the mux. Contains the reason if one end is
    /// a router that the kernel forwards for.
    Mux(Option<String>),
}

impl LinkPath {
    /// Returns the path for a link of the network `vnet`.
    pub(super) fn of(vnet: &str, spec: &VirtualNetworkSpec, link: &Link) -> Self {
        let concerns = link.endpoints.iter().any(|end| match end {
            Endpoint::Port { node, .. } => other_plane(spec, node).is_none(),
            Endpoint::External(_) => false,
        });
        match ends(vnet, spec, link) {
            Ok(_) => Self::Kernel,
            Err(why) => Self::Mux(concerns.then_some(why)),
        }
    }
}

/// Returns the two ports that a link joins in the kernel, or why it goes through the mux.
fn ends<'a>(
    vnet: &str,
    spec: &'a VirtualNetworkSpec,
    link: &'a Link,
) -> Result<[(&'a str, &'a str); 2], String> {
    let [one, other] = &link.endpoints[..] else { return Err("it is a segment".into()) };
    let port = |end: &'a Endpoint| match end {
        Endpoint::External(_) => Err("it leads outside".into()),
        Endpoint::Port { node, interface } => match other_plane(spec, node) {
            Some(what) => Err(format!("{node} is {what}")),
            None => Ok((node.as_str(), interface.as_str())),
        },
    };
    let ports = [port(one)?, port(other)?];
    for end in [one, other] {
        stays(vnet, link, end)?;
    }
    Ok(ports)
}

/// Checks that the kernel may have an end of a link. An error is the reason why not.
fn stays(vnet: &str, link: &Link, end: &Endpoint) -> Result<(), String> {
    let has = match () {
        () if link.segment.is_some() => return Err("it is a segment".into()),
        () if !link.schedule.is_empty() => Some("a schedule"),
        () => waits_for(&link.egress(end)),
    };
    match has {
        Some(what) => Err(format!("it has {what}")),
        // Not between tenants that may not trust each other, if the
        // kernel's work for them is charged to nobody.
        None if tenant_of(vnet).is_some() && !napi::has_thread_ids() => {
            Err("the network is a tenant's".into())
        }
        None => Ok(()),
    }
}

/// Returns the port at an end of a link, if the kernel may have that end.
pub(super) fn port<'a>(
    vnet: &str,
    spec: &'a VirtualNetworkSpec,
    link: &Link,
    end: &'a Endpoint,
) -> Option<(&'a str, &'a str)> {
    let Endpoint::Port { node, interface } = end else { return None };
    let may = other_plane(spec, node).is_none() && stays(vnet, link, end).is_ok();
    may.then_some((node.as_str(), interface.as_str()))
}

/// Describes a node that is no router forwarded by the kernel; `None` if it is one.
fn other_plane(spec: &VirtualNetworkSpec, node: &str) -> Option<String> {
    let Some(node) = spec.nodes.get(node) else { return Some("no node".into()) };
    node.plane().map_or(Some("a host".into()), |plane| of_other_kind(&**plane))
}

/// Describes a data plane by which the kernel does not forward; `None` if it does.
pub(super) fn of_other_kind(plane: &dyn Plane) -> Option<String> {
    plane.needs().kernel.is_none().then(|| format!("a router of kind {}", plane.name()))
}

/// Returns the egress setting that makes frames wait, or that links in the kernel do
/// not support. A rate alone makes no frame wait: frames are sent at once or dropped.
/// A queue with the default size, of this or an earlier version, counts as none.
fn waits_for(leaving: &LinkEgress) -> Option<&'static str> {
    let LinkEgress {
        rate: _,
        burst: _,
        overhead: _,
        seed: _,
        queue,
        queues,
        guarantee,
        weight,
        delay,
        jitter,
        loss,
        reorder,
        corrupt,
        duplicate,
    } = leaving;
    let defaults = [QUEUE_FRAMES_DEFAULT, QUEUE_FRAMES_DEFAULT_BEFORE].map(QueueDepth::Frames);
    let queue = queue.filter(|queue| !defaults.contains(queue));
    let all = [
        (delay.is_some(), "a delay"),
        (jitter.is_some(), "jitter"),
        (loss.is_some(), "loss"),
        (reorder.is_some(), "reordering"),
        (corrupt.is_some(), "corruption"),
        (duplicate.is_some(), "duplication"),
        (queue.is_some(), "a queue"),
        (queues.is_some(), "queues"),
        (guarantee.is_some(), "a guarantee"),
        (weight.is_some(), "a weight"),
    ];
    all.into_iter().find_map(|(is_asked_for, what)| is_asked_for.then_some(what))
}

/// Returns the number of a node's port, given by its interface, the number
/// of the other end of its link, and the rate. `None` if the port is a TAP.
pub(super) fn kernel_link_of(
    vnet: &str,
    spec: &VirtualNetworkSpec,
    allocation: &VnetAllocation,
    node: &str,
    interface: &str,
) -> Option<(u32, u32, Option<PortRate>)> {
    let number =
        |(node, interface): (&str, &str)| allocation.ports.get(node)?.get(interface).copied();
    let own = number((node, interface))?;
    let link = spec.links.iter().find_map(|link| {
        let ends = ends(vnet, spec, link).ok()?;
        ends.contains(&(node, interface)).then_some((link, ends))
    });
    let (link, [one, other]) = link?;
    let peer = if one == (node, interface) { other } else { one };
    let here = link.endpoints.iter().find(|end| match end {
        Endpoint::Port { node: at, interface: by } => at == node && by == interface,
        Endpoint::External(_) => false,
    });
    Some((own, number(peer)?, rate(&link.egress(here?))))
}

/// Returns the egress limit of a link without a queue.
pub(super) fn rate(leaving: &LinkEgress) -> Option<PortRate> {
    leaving.rate.map(|rate| PortRate {
        bps: rate.0,
        burst_bytes: leaving.burst.unwrap_or_default().0,
        overhead_bytes: leaving.overhead.unwrap_or(0),
        pps: 0,
    })
}
