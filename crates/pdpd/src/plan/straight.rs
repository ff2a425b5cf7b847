//! Which links stay in the kernel: those between two vrouters that it forwards for, whose frames nothing has wait.
//! Their ports are veths, and the mux has no part in them; all others are TAPs, and their links go by the mux.
//!
//! Source: Trellis (ROADS 2008), section 4.2: two containers of one host are joined without a tunnel.

use pdp_net::ports::{PortSpec, Rate};
use pdp_spec::units::{Endpoint, Queue};
use pdp_spec::{DataPlane, Leaving, Link, QUEUE_FRAMES_DEFAULT, VirtualNetworkSpec};

use crate::ledger::Holding;

/// A port whose frames stay in the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StraightPort {
    /// What it is.
    pub spec: PortSpec,
    /// The number of the port that its link leads to.
    pub to: u32,
    /// What may leave by it.
    pub rate: Option<Rate>,
}

/// What is to be of such a port now.
#[derive(Clone, Copy, Debug)]
pub struct PortNow<'a> {
    /// As it is planned.
    pub port: &'a StraightPort,
    /// Whether it has carrier.
    pub carrier: bool,
    /// Whether its link carries frames.
    pub joined: bool,
}

/// Ports, by node and interface, whose links stay in the kernel.
pub fn straight_ports(spec: &VirtualNetworkSpec) -> impl Iterator<Item = (&str, &str)> {
    let links = spec.links.iter().filter_map(|link| ends(spec, link));
    links.flatten()
}

/// The ports that a link joins in the kernel, if it does.
fn ends<'a>(spec: &'a VirtualNetworkSpec, link: &'a Link) -> Option<[(&'a str, &'a str); 2]> {
    let [one, other] = &link.endpoints[..] else { return None };
    let passes = link.segment.is_none() && link.schedule.is_empty();
    let port = |end: &'a Endpoint| {
        let Endpoint::Port { node, interface } = end else { return None };
        let plane = spec.nodes.get(node)?.data_plane.as_ref()?;
        let stays = matches!(plane, DataPlane::Kernel(_)) && never_waits(&link.leaving(end));
        stays.then_some((node.as_str(), interface.as_str()))
    };
    if passes { Some([port(one)?, port(other)?]) } else { None }
}

/// Whether frames that leave so are let go at once, or dropped: for a rate alone none has to wait, unless a queue is
/// asked for. One of as many frames as where none is given is not told from that.
fn never_waits(leaving: &Leaving) -> bool {
    let Leaving { rate, burst, overhead, seed, queue, .. } = *leaving;
    let plain = queue.is_none_or(|queue| queue == Queue::Frames(QUEUE_FRAMES_DEFAULT));
    plain && *leaving == Leaving { rate, burst, overhead, seed, queue, ..Leaving::default() }
}

/// For a port of a node, by its interface: its number, that of the other end of its link, and the rate; `None`: it is a
/// TAP.
pub(super) fn way(
    spec: &VirtualNetworkSpec,
    holding: &Holding,
    node: &str,
    interface: &str,
) -> Option<(u32, u32, Option<Rate>)> {
    let number = |(node, interface): (&str, &str)| holding.ports.get(node)?.get(interface).copied();
    let own = number((node, interface))?;
    let link = spec.links.iter().find_map(|link| {
        let ends = ends(spec, link)?;
        ends.contains(&(node, interface)).then_some((link, ends))
    });
    let (link, [one, other]) = link?;
    let far = if one == (node, interface) { other } else { one };
    let here = link.endpoints.iter().find(|end| match end {
        Endpoint::Port { node: at, interface: by } => at == node && by == interface,
        Endpoint::External(_) => false,
    });
    let leaving = link.leaving(here?);
    let rate = leaving.rate.map(|rate| Rate {
        bps: rate.0,
        burst_bytes: leaving.burst.unwrap_or_default().0,
        overhead_bytes: leaving.overhead.unwrap_or(0),
        pps: 0,
    });
    Some((own, number(far)?, rate))
}
