//! Which links stay in the kernel: those between two vrouters that it forwards for, whose frames nothing has wait.
//! Their ports are veths, and the mux has no part in them; all others are TAPs, and their links go by the mux.
//!
//! Source: Trellis (ROADS 2008), section 4.2: two containers of one host are joined without a tunnel.

use pdp_net::interface::Condition;
use pdp_net::napi;
use pdp_net::ports::{PortSpec, Rate};
use pdp_spec::units::{Endpoint, Queue};
use pdp_spec::{
    DataPlane, Leaving, Link, NodeKind, QUEUE_FRAMES_DEFAULT, QUEUE_FRAMES_DEFAULT_BEFORE,
    VirtualNetworkSpec, tenant_of,
};

use super::far::Far;
use crate::ledger::Holding;

/// A port whose frames stay in the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StraightPort {
    /// What it is.
    pub spec: PortSpec,
    /// Where its link leads.
    pub to: To,
    /// What may leave by it.
    pub rate: Option<Rate>,
}

/// Where the link of such a port leads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum To {
    /// To the port of this number.
    Port(u32),
    /// To the outside, by a tunnel.
    Outside(Far),
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
    /// The device that it leaves by, where it leads outside and that is there.
    pub device: Option<Condition>,
}

/// Ports of a network, by node and interface, whose links stay in the kernel.
pub fn straight_ports<'a>(
    vnet: &str,
    spec: &'a VirtualNetworkSpec,
) -> impl Iterator<Item = (&'a str, &'a str)> {
    let links = spec.links.iter().filter_map(|link| ends(vnet, spec, link).ok());
    links.flatten()
}

/// Which way a link's frames take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LinkWay {
    /// They stay in the kernel.
    Kernel,
    /// By the mux; with why, where an end of it is a router that the kernel forwards for.
    Mux(Option<String>),
}

impl LinkWay {
    /// That of a link of the network `vnet`.
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

/// The two ports that a link joins in the kernel, or why it goes by the mux.
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

/// Whether the kernel may have an end of a link, or why not.
fn stays(vnet: &str, link: &Link, end: &Endpoint) -> Result<(), String> {
    let has = match () {
        () if link.segment.is_some() => return Err("it is a segment".into()),
        () if !link.schedule.is_empty() => Some("a schedule"),
        () => waits_for(&link.leaving(end)),
    };
    match has {
        Some(what) => Err(format!("it has {what}")),
        // Not for those who may not trust each other, where what the kernel does for them is nobody's time.
        None if tenant_of(vnet).is_some() && !napi::are_told() => {
            Err("the network is a tenant's".into())
        }
        None => Ok(()),
    }
}

/// The port at an end of a link, if the kernel may have that end.
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

/// What a node is, where it is no router that the kernel forwards for.
fn other_plane(spec: &VirtualNetworkSpec, node: &str) -> Option<&'static str> {
    match spec.nodes.get(node).map(|node| (node.kind, &node.data_plane)) {
        Some((NodeKind::Router, Some(DataPlane::Kernel(_)))) => None,
        Some((NodeKind::Router, Some(DataPlane::Fastpath(_)))) => Some("a router of kind fastpath"),
        Some((NodeKind::Router, Some(DataPlane::Parallel(_)) | None)) => {
            Some("a router of kind parallel")
        }
        Some((NodeKind::Host, _)) => Some("a host"),
        None => Some("no node"),
    }
}

/// What frames that leave so may have to wait for, or what else the kernel's links can't do: for a rate alone none has
/// to wait, it is let go at once or dropped. A queue of as many frames as where none is given, now or in earlier versions, is not told from that.
fn waits_for(leaving: &Leaving) -> Option<&'static str> {
    let Leaving {
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
    let defaults = [QUEUE_FRAMES_DEFAULT, QUEUE_FRAMES_DEFAULT_BEFORE].map(Queue::Frames);
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

/// For a port of a node, by its interface: its number, that of the other end of its link, and the rate; `None`: it is a
/// TAP.
pub(super) fn way(
    vnet: &str,
    spec: &VirtualNetworkSpec,
    holding: &Holding,
    node: &str,
    interface: &str,
) -> Option<(u32, u32, Option<Rate>)> {
    let number = |(node, interface): (&str, &str)| holding.ports.get(node)?.get(interface).copied();
    let own = number((node, interface))?;
    let link = spec.links.iter().find_map(|link| {
        let ends = ends(vnet, spec, link).ok()?;
        ends.contains(&(node, interface)).then_some((link, ends))
    });
    let (link, [one, other]) = link?;
    let far = if one == (node, interface) { other } else { one };
    let here = link.endpoints.iter().find(|end| match end {
        Endpoint::Port { node: at, interface: by } => at == node && by == interface,
        Endpoint::External(_) => false,
    });
    Some((own, number(far)?, rate(&link.leaving(here?))))
}

/// What may leave so, where nothing waits.
pub(super) fn rate(leaving: &Leaving) -> Option<Rate> {
    leaving.rate.map(|rate| Rate {
        bps: rate.0,
        burst_bytes: leaving.burst.unwrap_or_default().0,
        overhead_bytes: leaving.overhead.unwrap_or(0),
        pps: 0,
    })
}
