//! Static routes and addresses of a guest's network namespace.

use std::io;
use std::net::IpAddr;
use std::os::fd::BorrowedFd;

use ipnet::IpNet;
use nix::net::if_::if_nametoindex;
use pdp_netlink::{Netlink, Request, address, attributes, error_code, family, u32_at};
use serde::{Deserialize, Serialize};

use crate::error::{NetContext, Result};
use crate::netlink::{NEW, routing};
use crate::netns::within;

/// The attribute of a route's metrics that is its MTU, and the flag of a next hop that is on the
/// link in any case (linux/rtnetlink.h).
pub(crate) const RTAX_MTU: u16 = 2;
const RTNH_F_ONLINK: u8 = 4;

/// Types of routes, as ip-route(8) calls them, by number.
const KINDS: [&str; 12] = [
    "unspec",
    "unicast",
    "local",
    "broadcast",
    "anycast",
    "multicast",
    "blackhole",
    "unreachable",
    "prohibit",
    "throw",
    "nat",
    "xresolve",
];

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
    fn request(&self, kind: u16, flags: i32) -> Result<Request> {
        let v6 = self.to.addr().is_ipv6();
        let index = |hop: &StaticRouteHop| match &hop.dev {
            Some(dev) => if_nametoindex(dev.as_str()).on("find", dev),
            None => Ok(0),
        };
        let header = RouteHeader {
            to: self.to,
            kind: self.kind,
            scope: self.scope,
            table: self.table,
            onlink: matches!(&self.hops[..], [hop] if hop.onlink),
        };
        let mut request = header.request(kind, flags);
        if self.metric != 0 {
            request.number(libc::RTA_PRIORITY, self.metric);
        }
        if let [hop] = &self.hops[..] {
            if let Some(via) = hop.via {
                add_gateway(&mut request, v6, via);
            }
            if hop.dev.is_some() {
                request.number(libc::RTA_OIF, index(hop)?);
            }
        } else if !self.hops.is_empty() {
            let indexes = self.hops.iter().map(index).collect::<Result<Vec<_>>>()?;
            request.nested(libc::RTA_MULTIPATH, |hops| {
                for (hop, index) in self.hops.iter().zip(indexes) {
                    let flags = if hop.onlink { RTNH_F_ONLINK } else { 0 };
                    let weight = u8::try_from(hop.weight.saturating_sub(1)).unwrap_or(u8::MAX);
                    // `struct rtnexthop` has its length where an attribute has it, then these.
                    hops.nested(u16::from_ne_bytes([flags, weight]), |one| {
                        one.raw(&index.to_ne_bytes());
                        if let Some(via) = hop.via {
                            add_gateway(one, v6, via);
                        }
                    });
                }
            });
        }
        if let Some(src) = self.src {
            request.address(libc::RTA_PREFSRC, src);
        }
        if let Some(mtu) = self.mtu {
            request.nested(libc::RTA_METRICS, |metrics| _ = metrics.number(RTAX_MTU, mtu));
        }
        Ok(request)
    }
}

/// Fixed part of a route's message.
pub(crate) struct RouteHeader {
    pub to: IpNet,
    pub kind: StaticRouteKind,
    pub scope: StaticRouteScope,
    pub table: u32,
    /// True if the only next hop is on the link in any case.
    pub onlink: bool,
}

impl RouteHeader {
    /// Returns a message of this type, to which attributes may be added.
    pub(crate) fn request(&self, kind: u16, flags: i32) -> Request {
        let route_kind = match self.kind {
            StaticRouteKind::Unicast => libc::RTN_UNICAST,
            StaticRouteKind::Blackhole => libc::RTN_BLACKHOLE,
            StaticRouteKind::Unreachable => libc::RTN_UNREACHABLE,
            StaticRouteKind::Prohibit => libc::RTN_PROHIBIT,
            StaticRouteKind::Throw => libc::RTN_THROW,
        };
        let scope = match self.scope {
            StaticRouteScope::Global => libc::RT_SCOPE_UNIVERSE,
            StaticRouteScope::Link => libc::RT_SCOPE_LINK,
            StaticRouteScope::Host => libc::RT_SCOPE_HOST,
        };
        let (family, bits) = (family(self.to.addr().is_ipv6()), self.to.prefix_len());
        let protocol = libc::RTPROT_STATIC;
        let mut header = [family, bits, 0, 0, 0, protocol, scope, route_kind, 0, 0, 0, 0];
        let route_flags = u32::from(if self.onlink { RTNH_F_ONLINK } else { 0 });
        header[8..].copy_from_slice(&route_flags.to_ne_bytes());
        let mut request = Request::new(kind, flags, &header);
        request.number(libc::RTA_TABLE, self.table).address(libc::RTA_DST, self.to.addr());
        request
    }
}

/// Adds the gateway of a route, which may be of the other family (RFC 8950).
fn add_gateway(request: &mut Request, v6: bool, via: IpAddr) {
    if via.is_ipv6() == v6 {
        request.address(libc::RTA_GATEWAY, via);
        return;
    }
    let mut value = u16::from(family(via.is_ipv6())).to_ne_bytes().to_vec();
    match via {
        IpAddr::V4(via) => value.extend(via.octets()),
        IpAddr::V6(via) => value.extend(via.octets()),
    }
    request.attribute(libc::RTA_VIA, &value);
}

/// Returns the request to add a route in the main table through an interface.
pub(crate) fn new_route(index: u32, to: &IpNet, gateway: IpAddr) -> Request {
    let header = RouteHeader {
        to: *to,
        kind: StaticRouteKind::Unicast,
        scope: StaticRouteScope::Global,
        table: libc::RT_TABLE_MAIN.into(),
        onlink: false,
    };
    let mut request = header.request(libc::RTM_NEWROUTE, NEW);
    add_gateway(&mut request, to.addr().is_ipv6(), gateway);
    request.number(libc::RTA_OIF, index);
    request
}

/// Returns the request to add an address to an interface. It is usable at once.
pub(crate) fn new_address(index: u32, net: &IpNet) -> Request {
    let mut header = [family(net.addr().is_ipv6()), net.prefix_len(), 0, 0, 0, 0, 0, 0];
    header[4..].copy_from_slice(&index.to_ne_bytes());
    let mut request = Request::new(libc::RTM_NEWADDR, NEW, &header);
    request.address(libc::IFA_LOCAL, net.addr()).address(libc::IFA_ADDRESS, net.addr());
    if let IpNet::V4(v4) = net
        && v4.prefix_len() < 31
    {
        request.address(libc::IFA_BROADCAST, v4.broadcast().into());
    }
    request.number(libc::IFA_FLAGS, libc::IFA_F_NODAD);
    request
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
        let gone = gone
            .filter_map(|route| Some((route, route.request(libc::RTM_DELROUTE, 0).ok()?)))
            .collect::<Vec<_>>();
        let flags = libc::NLM_F_CREATE | libc::NLM_F_REPLACE;
        let set = routes.iter().map(|route| Ok((route, route.request(libc::RTM_NEWROUTE, flags)?)));
        let set = set.collect::<Result<Vec<_>>>()?;
        let mut netlink = routing()?;
        for (route, request) in gone.into_iter().rev() {
            remove(&mut netlink, request).on("remove route", route.words())?;
        }
        for (route, mut request) in set {
            netlink.change(&mut request).on("set route", route.words())?;
        }
        Ok(())
    })
}

fn remove(netlink: &mut Netlink, mut request: Request) -> io::Result<()> {
    match netlink.change(&mut request) {
        // A program in the namespace has already removed or changed it.
        Err(error)
            if matches!(
                error_code(&error),
                Some(libc::ESRCH | libc::ENODEV | libc::ENOENT | libc::ENETDOWN)
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
    let bits = if to.is_ipv4() { 32 } else { 128 };
    let header = [family(to.is_ipv6()), bits, bits, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let mut question = Request::new(libc::RTM_GETROUTE, 0, &header);
    question.address(libc::RTA_DST, to).address(libc::RTA_SRC, from);
    question.number(libc::RTA_IIF, interface);
    routing()?.query(&mut question, |answer| verdict(answer.payload)).on("ask for the route to", to)
}

/// Reads the kernel's answer.
fn verdict(payload: &[u8]) -> KernelVerdict {
    let kind = payload.get(7).copied().unwrap_or(libc::RTN_UNSPEC);
    let (mut via, mut interface) = (None, None);
    for (kind, value) in attributes(payload.get(12..).unwrap_or_default()) {
        match kind {
            libc::RTA_GATEWAY => via = address(value),
            libc::RTA_VIA => via = value.get(2..).and_then(address),
            libc::RTA_OIF => interface = u32_at(value, 0),
            _ => {}
        }
    }
    match (kind, interface) {
        (libc::RTN_LOCAL, _) => KernelVerdict::Local,
        (libc::RTN_UNICAST, Some(interface)) => KernelVerdict::Hop { via, interface },
        _ => {
            let word = KINDS.get(usize::from(kind)).map(|word| (*word).to_owned());
            KernelVerdict::Other(word.unwrap_or_else(|| format!("type {kind}")))
        }
    }
}

/// Adds addresses to `lo` in a network namespace. `lo` must be up.
pub fn set_loopback(netns: BorrowedFd<'_>, addresses: &[IpNet]) -> Result<()> {
    if addresses.is_empty() {
        return Ok(());
    }
    within(netns, || {
        let index = if_nametoindex("lo").on("find", "lo")?;
        let mut netlink = routing()?;
        for address in addresses {
            netlink.change(&mut new_address(index, address)).on("add to lo address", address)?;
        }
        Ok(())
    })
}
