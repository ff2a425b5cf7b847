//! Static routes and addresses of a guest's network namespace.

use std::net::IpAddr;
use std::os::fd::BorrowedFd;

use ipnet::IpNet;
use nix::errno::Errno;
use nix::net::if_::if_nametoindex;
use rtnetlink::packet_route::AddressFamily;
use rtnetlink::packet_route::RouteNetlinkMessage as Message;
use rtnetlink::packet_route::address::{AddressAttribute, AddressFlags};
use rtnetlink::packet_route::route::{
    RouteAddress, RouteAttribute, RouteMessage, RouteMetric, RouteNextHop, RouteScope, RouteType,
    RouteVia,
};
use rtnetlink::{Handle, RouteMessageBuilder, RouteNextHopBuilder};
use serde::{Deserialize, Serialize};

use crate::error::{Error, NetContext, Result};
use crate::netlink::{NetlinkPool, refused, run_in_thread};
use crate::netns::within;

/// Static route, as `ip route` shows it with `proto static`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StaticRouteSpec {
    /// Destination.
    pub to: IpNet,
    /// Treatment of its packets.
    pub kind: StaticRouteKind,
    /// Next hops: at least one for [`StaticRouteKind::Unicast`], none for other kinds.
    pub hops: Vec<StaticRouteHop>,
    /// Metric; lower is better. 0: the kernel's default.
    pub metric: u32,
    /// The table's number.
    pub table: u32,
    /// Source address for packets that the namespace's own programs send.
    pub src: Option<IpAddr>,
    /// Largest packet, bytes.
    pub mtu: Option<u32>,
    /// Distance to the destination.
    pub scope: StaticRouteScope,
}

/// A next hop.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StaticRouteHop {
    /// Address of the next hop; `None` if the destination is on the link of `dev`.
    pub via: Option<IpAddr>,
    /// Interface that reaches it; `None` if the kernel finds it.
    pub dev: Option<String>,
    /// True if the next hop is on that link regardless of its addresses.
    pub onlink: bool,
    /// Weight among the hops, 1 to 256.
    pub weight: u32,
}

/// Treatment of a route's packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "as ip-route(8) has them")]
pub enum StaticRouteKind {
    Unicast,
    Blackhole,
    Unreachable,
    Prohibit,
    Throw,
}

/// Distance to a destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "as ip-route(8) has them")]
pub enum StaticRouteScope {
    Global,
    Link,
    Host,
}

impl StaticRouteSpec {
    /// Identity of the route within the namespace: destination, table and metric.
    fn identity(&self) -> (IpNet, u32, u32) {
        (self.to, self.table, self.metric)
    }

    fn words(&self) -> String {
        let via: Vec<String> = self
            .hops
            .iter()
            .filter_map(|hop| Some(hop.via?.to_string()).or(hop.dev.clone()))
            .collect();
        match via.is_empty() {
            true => format!("{:?} {}", self.kind, self.to).to_lowercase(),
            false => format!("{} via {}", self.to, via.join(", ")),
        }
    }

    /// Returns the netlink message. Interfaces are those of the calling thread's namespace.
    fn message(&self) -> Result<RouteMessage> {
        let invalid =
            |text: String| Error::Invalid { object: format!("route {}", self.words()), text };
        let index = |hop: &StaticRouteHop| match &hop.dev {
            Some(dev) => if_nametoindex(dev.as_str()).on("find", dev),
            None => Ok(0),
        };
        let mut route = RouteMessageBuilder::<IpAddr>::new()
            .destination_prefix(self.to.addr(), self.to.prefix_len())
            .map_err(|error| invalid(error.to_string()))?
            .table_id(self.table)
            .kind(match self.kind {
                StaticRouteKind::Unicast => RouteType::Unicast,
                StaticRouteKind::Blackhole => RouteType::BlackHole,
                StaticRouteKind::Unreachable => RouteType::Unreachable,
                StaticRouteKind::Prohibit => RouteType::Prohibit,
                StaticRouteKind::Throw => RouteType::Throw,
            })
            .scope(match self.scope {
                StaticRouteScope::Global => RouteScope::Universe,
                StaticRouteScope::Link => RouteScope::Link,
                StaticRouteScope::Host => RouteScope::Host,
            });
        if self.metric != 0 {
            route = route.priority(self.metric);
        }
        if let [hop] = &self.hops[..] {
            if let Some(via) = hop.via {
                route = route.gateway(via).map_err(|error| invalid(error.to_string()))?;
            }
            if hop.onlink {
                route = route.onlink();
            }
            if hop.dev.is_some() {
                route = route.output_interface(index(hop)?);
            }
        } else if !self.hops.is_empty() {
            let hops = self.hops.iter().map(|hop| {
                let mut one = match self.to.addr() {
                    IpAddr::V4(_) => RouteNextHopBuilder::new(AddressFamily::Inet),
                    IpAddr::V6(_) => RouteNextHopBuilder::new(AddressFamily::Inet6),
                };
                if let Some(via) = hop.via {
                    one = one.via(via).map_err(|error| invalid(error.to_string()))?;
                }
                if hop.onlink {
                    one = one.onlink();
                }
                let weight = u8::try_from(hop.weight.saturating_sub(1)).unwrap_or(u8::MAX);
                Ok(one.interface(index(hop)?).weight(weight).build())
            });
            route = route.multipath(hops.collect::<Result<Vec<RouteNextHop>>>()?);
        }
        let mut message = route.build();
        let more = &mut message.attributes;
        more.extend(self.src.map(|src| RouteAttribute::PrefSource(src.into())));
        more.extend(self.mtu.map(|mtu| RouteAttribute::Metrics(vec![RouteMetric::Mtu(mtu)])));
        Ok(message)
    }
}

/// Sets the static routes of a network namespace.
///
/// Each route in `routes` replaces an existing one of the same destination, table and metric, in
/// this order. `before` lists the routes that an earlier call set. Those that are no longer wanted
/// are removed, unless they were changed since then.
///
/// # Errors
/// The first route that the kernel refuses, and the cause. The routes before it are set.
pub fn set(
    netns: BorrowedFd<'_>,
    before: &[StaticRouteSpec],
    routes: &[StaticRouteSpec],
) -> Result<()> {
    if before.is_empty() && routes.is_empty() {
        return Ok(());
    }
    within(netns, || {
        let stays = |route: &&StaticRouteSpec| {
            routes.iter().any(|other| other.identity() == route.identity())
        };
        // An interface that is gone took its routes with it.
        let gone = before.iter().filter(|route| !stays(route));
        let gone: Vec<_> = gone.filter_map(|route| Some((route, route.message().ok()?))).collect();
        let set = routes.iter().map(|route| Ok((route, route.message()?)));
        let set = set.collect::<Result<Vec<_>>>()?;
        run_in_thread(|handle| async move {
            for (route, message) in gone.into_iter().rev() {
                remove(&handle, route, message).await?;
            }
            for (route, message) in set {
                let add = handle.route().add(message).replace();
                add.execute().await.map_err(refused("set route", route.words()))?;
            }
            Ok(())
        })
    })
}

async fn remove(handle: &Handle, route: &StaticRouteSpec, message: RouteMessage) -> Result<()> {
    match handle
        .route()
        .del(message)
        .execute()
        .await
        .map_err(refused("remove route", route.words()))
    {
        // A program in the namespace has already removed or changed it.
        Err(Error::Io { source, .. })
            if matches!(
                source.raw_os_error().map(Errno::from_raw),
                Some(Errno::ESRCH | Errno::ENODEV | Errno::ENOENT | Errno::ENETDOWN)
            ) =>
        {
            Ok(())
        }
        result => result,
    }
}

/// Routing decision of a kernel for a packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KernelVerdict {
    /// Local delivery.
    Local,
    /// Forward.
    Hop {
        /// Next hop; `None` if it is the destination itself.
        via: Option<IpAddr>,
        /// Index of the egress interface.
        interface: u32,
    },
    /// Something else, as ip-route(8) calls it.
    Other(String),
}

/// Asks the kernel for the routing decision on a packet from `from` to `to` that the interface of
/// this index receives, in the calling thread's network namespace. If there are several next hops,
/// returns the one for these addresses, without regard to ports.
///
/// # Errors
/// The kernel drops such packets: by a route, for lack
/// of a route, or because it rejects the source.
pub fn lookup(interface: u32, from: IpAddr, to: IpAddr) -> Result<KernelVerdict> {
    let address = |address| match address {
        IpAddr::V4(v4) => RouteAddress::Inet(v4),
        IpAddr::V6(v6) => RouteAddress::Inet6(v6),
    };
    let (family, bits) = match to {
        IpAddr::V4(_) => (AddressFamily::Inet, 32),
        IpAddr::V6(_) => (AddressFamily::Inet6, 128),
    };
    let mut question = RouteMessage::default();
    question.header.address_family = family;
    question.header.destination_prefix_length = bits;
    question.header.source_prefix_length = bits;
    question.attributes = vec![
        RouteAttribute::Destination(address(to)),
        RouteAttribute::Source(address(from)),
        RouteAttribute::Iif(interface),
    ];
    let what = "ask for the route to";
    let answers = NetlinkPool::open()?.exchange(Message::GetRoute(question), 0).on(what, to)?;
    let answer = answers.into_iter().find_map(|answer| match answer {
        Message::NewRoute(route) => Some(route),
        _ => None,
    });
    let answer = answer.ok_or(Errno::ENOMSG).on(what, to)?;
    let (mut via, mut interface) = (None, None);
    for attribute in &answer.attributes {
        match attribute {
            RouteAttribute::Gateway(RouteAddress::Inet(v4))
            | RouteAttribute::Via(RouteVia::Inet(v4)) => via = Some(IpAddr::V4(*v4)),
            RouteAttribute::Gateway(RouteAddress::Inet6(v6))
            | RouteAttribute::Via(RouteVia::Inet6(v6)) => via = Some(IpAddr::V6(*v6)),
            RouteAttribute::Oif(index) => interface = Some(*index),
            _ => {}
        }
    }
    Ok(match (answer.header.kind, interface) {
        (RouteType::Local, _) => KernelVerdict::Local,
        (RouteType::Unicast, Some(interface)) => KernelVerdict::Hop { via, interface },
        (other, _) => KernelVerdict::Other(format!("{other:?}").to_lowercase()),
    })
}

/// Adds addresses to `lo` in a network namespace. `lo` must be up.
pub fn set_loopback(netns: BorrowedFd<'_>, addresses: &[IpNet]) -> Result<()> {
    if addresses.is_empty() {
        return Ok(());
    }
    within(netns, || {
        let index = if_nametoindex("lo").on("find", "lo")?;
        run_in_thread(|handle| async move {
            for address in addresses {
                let mut add = handle.address().add(index, address.addr(), address.prefix_len());
                add.message_mut().attributes.push(AddressAttribute::Flags(AddressFlags::Nodad));
                add.execute().await.map_err(refused("add to lo address", address))?;
            }
            Ok(())
        })
    })
}
