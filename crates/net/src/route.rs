//! Static routes and addresses of a guest's network namespace.

use std::net::IpAddr;
use std::os::fd::BorrowedFd;

use ipnet::IpNet;
use nix::errno::Errno;
use nix::net::if_::if_nametoindex;
use rtnetlink::packet_route::AddressFamily;
use rtnetlink::packet_route::address::{AddressAttribute, AddressFlags};
use rtnetlink::packet_route::route::{
    RouteAttribute, RouteMessage, RouteMetric, RouteNextHop, RouteScope, RouteType,
};
use rtnetlink::{Handle, RouteMessageBuilder, RouteNextHopBuilder};
use serde::{Deserialize, Serialize};

use crate::error::{Context, Error, Result};
use crate::netlink::{converse, refused};
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
