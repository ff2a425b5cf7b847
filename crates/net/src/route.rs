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

use crate::error::{Context, Error, Result};
use crate::netlink::{Kept, converse, refused};
use crate::netns::within;

/// A static route, as `ip route` has it with `proto static`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Route {
    /// Where to.
    pub to: IpNet,
    /// What becomes of packets.
    pub kind: Kind,
    /// Next hops; none but for [`Kind::Unicast`], which has at least one.
    pub hops: Vec<Hop>,
    /// The lower, the better; 0: as the kernel has it.
    pub metric: u32,
    /// The table's number.
    pub table: u32,
    /// Source of what the namespace's own programs send.
    pub src: Option<IpAddr>,
    /// Largest packet, bytes.
    pub mtu: Option<u32>,
    /// How far the destination is.
    pub scope: Scope,
}

/// A next hop.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hop {
    /// Its address; none: the destination is on the link of `dev`.
    pub via: Option<IpAddr>,
    /// The interface by which it is reached; none: as the kernel finds.
    pub dev: Option<String>,
    /// Whether it is on that link whatever addresses there are.
    pub onlink: bool,
    /// Its part beside others, 1 to 256.
    pub weight: u32,
}

/// What becomes of packets by a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "as ip-route(8) has them")]
pub enum Kind {
    Unicast,
    Blackhole,
    Unreachable,
    Prohibit,
    Throw,
}

/// How far a destination is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "as ip-route(8) has them")]
pub enum Scope {
    Global,
    Link,
    Host,
}

impl Route {
    /// What the kernel tells routes of a table apart by.
    fn place(&self) -> (IpNet, u32, u32) {
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

    /// As the kernel is told, with interfaces of the calling thread's namespace.
    fn message(&self) -> Result<RouteMessage> {
        let invalid =
            |text: String| Error::Invalid { object: format!("route {}", self.words()), text };
        let index = |hop: &Hop| match &hop.dev {
            Some(dev) => if_nametoindex(dev.as_str()).on("find", dev),
            None => Ok(0),
        };
        let mut route = RouteMessageBuilder::<IpAddr>::new()
            .destination_prefix(self.to.addr(), self.to.prefix_len())
            .map_err(|error| invalid(error.to_string()))?
            .table_id(self.table)
            .kind(match self.kind {
                Kind::Unicast => RouteType::Unicast,
                Kind::Blackhole => RouteType::BlackHole,
                Kind::Unreachable => RouteType::Unreachable,
                Kind::Prohibit => RouteType::Prohibit,
                Kind::Throw => RouteType::Throw,
            })
            .scope(match self.scope {
                Scope::Global => RouteScope::Universe,
                Scope::Link => RouteScope::Link,
                Scope::Host => RouteScope::Host,
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

/// Gives a network namespace static routes: `wanted`, each in place of what is there of its destination, table and
/// metric, in this order. Of those of `before`, which this set earlier, the ones that are not wanted any more are
/// removed as far as they are still as they were.
///
/// # Errors
/// The first route that the kernel refuses, and why; those before it are set.
pub fn set(netns: BorrowedFd<'_>, before: &[Route], wanted: &[Route]) -> Result<()> {
    if before.is_empty() && wanted.is_empty() {
        return Ok(());
    }
    within(netns, || {
        let stays = |route: &&Route| wanted.iter().any(|other| other.place() == route.place());
        // An interface that is gone took its routes with it.
        let gone = before.iter().filter(|route| !stays(route));
        let gone: Vec<_> = gone.filter_map(|route| Some((route, route.message().ok()?))).collect();
        let set = wanted.iter().map(|route| Ok((route, route.message()?)));
        let set = set.collect::<Result<Vec<_>>>()?;
        converse(|handle| async move {
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

async fn remove(handle: &Handle, route: &Route, message: RouteMessage) -> Result<()> {
    match handle
        .route()
        .del(message)
        .execute()
        .await
        .map_err(refused("remove route", route.words()))
    {
        // Somebody inside did so already, or made it another.
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

/// What a kernel's routes and rules say of a packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It is for this machine.
    Local,
    /// It leaves.
    Hop {
        /// To this next hop; none: to its destination.
        via: Option<IpAddr>,
        /// By the interface of this index.
        interface: u32,
    },
    /// Something else, as ip-route(8) calls it.
    Other(String),
}

/// What the routes and rules of the calling thread's network namespace say of a packet from `from` to `to` that
/// the interface of this index receives. Of several next hops it is one for these addresses, ports not considered.
///
/// # Errors
/// The kernel drops such packets: a route that says so, none at all, or a source that it does not believe.
pub fn ask(interface: u32, from: IpAddr, to: IpAddr) -> Result<Verdict> {
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
    let answers = Kept::open()?.ask(Message::GetRoute(question), 0).on(what, to)?;
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
        (RouteType::Local, _) => Verdict::Local,
        (RouteType::Unicast, Some(interface)) => Verdict::Hop { via, interface },
        (other, _) => Verdict::Other(format!("{other:?}").to_lowercase()),
    })
}

/// Gives a network namespace addresses on `lo`, which is up.
pub fn set_loopback(netns: BorrowedFd<'_>, addresses: &[IpNet]) -> Result<()> {
    if addresses.is_empty() {
        return Ok(());
    }
    within(netns, || {
        let index = if_nametoindex("lo").on("find", "lo")?;
        converse(|handle| async move {
            for address in addresses {
                let mut add = handle.address().add(index, address.addr(), address.prefix_len());
                add.message_mut().attributes.push(AddressAttribute::Flags(AddressFlags::Nodad));
                add.execute().await.map_err(refused("add to lo address", address))?;
            }
            Ok(())
        })
    })
}
