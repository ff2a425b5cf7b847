//! Management interface of a node, which reaches the outside independently of its vports: a TAP
//! without addresses, in a routing table of its own that only the node's own packets use.
//!
//! The rules match `iif lo`, so forwarded packets never use it. The source address is one of
//! the node's loopback addresses, and `route_localnet` of this interface alone lets such
//! packets leave. So routing daemons see neither its address nor its route, and the tables that
//! the route mirror follows have no trace of it.

use std::io;
use std::net::Ipv4Addr;
use std::os::fd::{BorrowedFd, OwnedFd};

use ipnet::Ipv4Net;
use nix::net::if_::if_nametoindex;
use pdp_netlink::{Netlink, Request, family};

use crate::error::{NetContext, Result};
use crate::netlink::{NEW, routing, set_link};
use crate::netns::within;
use crate::route::{RouteHeader, StaticRouteKind, StaticRouteScope};
use crate::sysctl;
use crate::tap::{TapSpec, open_here};

/// Routing table of the interface.
pub const TABLE: u32 = 7777;

/// Priority of the rules before the main table: packets from the source, or to the gateway.
const PRIORITY_FIRST: u32 = 32_760;

/// Priority of the rule after the tables main and default: packets that these have no route for.
const PRIORITY_LAST: u32 = 32_770;

/// Attributes and action of rules (linux/fib_rules.h).
const FRA_DST: u16 = 1;
const FRA_SRC: u16 = 2;
const FRA_IIFNAME: u16 = 3;
const FRA_PRIORITY: u16 = 6;
const FRA_TABLE: u16 = 15;
const FR_ACT_TO_TBL: u8 = 1;

/// Makes the interface in a network namespace and brings it up, with table and rules.
///
/// The interface disappears when its descriptor is closed; the descriptor does not block. The rules
/// stay, and then lead to an empty table. Only IPv4.
pub fn create(
    netns: BorrowedFd<'_>,
    spec: &TapSpec,
    source: Ipv4Addr,
    gateway: Ipv4Addr,
) -> Result<OwnedFd> {
    within(netns, || {
        let tap = open_here(spec)?;
        let v6 = format!("net.ipv6.conf.{}.disable_ipv6", spec.name);
        sysctl::set_v6_here(&v6, "1")?;
        sysctl::set_here(&format!("net.ipv4.conf.{}.route_localnet", spec.name), "1")?;
        let index = if_nametoindex(spec.name.as_str()).on("find", &spec.name)?;
        let mut netlink = routing()?;
        // The other end answers no ARP.
        let mut link = set_link(index, libc::IFF_UP | libc::IFF_NOARP);
        link.attribute(libc::IFLA_ADDRESS, &spec.mac).number(libc::IFLA_MTU, spec.mtu);
        netlink.change(&mut link).on("set up", &spec.name)?;
        let header = RouteHeader {
            to: Ipv4Net::default().into(),
            kind: StaticRouteKind::Unicast,
            scope: StaticRouteScope::Global,
            table: TABLE,
            onlink: true,
        };
        let mut route = header.request(libc::RTM_NEWROUTE, NEW);
        route.address(libc::RTA_GATEWAY, gateway.into()).number(libc::RTA_OIF, index);
        route.address(libc::RTA_PREFSRC, source.into());
        netlink.change(&mut route).on("add route", format!("default via {gateway}"))?;
        let rules = [(PRIORITY_FIRST, Some(source), None), (PRIORITY_FIRST, None, Some(gateway))];
        for (priority, from, to) in rules.into_iter().chain([(PRIORITY_LAST, None, None)]) {
            add_rule(&mut netlink, priority, from, to)
                .on("add rule", format!("{priority}: lookup {TABLE}"))?;
        }
        Ok(tap)
    })
}

/// Adds a rule for the node's own packets, unless it exists.
fn add_rule(
    netlink: &mut Netlink,
    priority: u32,
    from: Option<Ipv4Addr>,
    to: Option<Ipv4Addr>,
) -> io::Result<()> {
    let bits = |address: Option<Ipv4Addr>| if address.is_some() { 32 } else { 0 };
    let header = [family(false), bits(to), bits(from), 0, 0, 0, 0, FR_ACT_TO_TBL, 0, 0, 0, 0];
    let mut rule = Request::new(libc::RTM_NEWRULE, NEW, &header);
    rule.text(FRA_IIFNAME, "lo").number(FRA_TABLE, TABLE).number(FRA_PRIORITY, priority);
    for (kind, address) in [(FRA_SRC, from), (FRA_DST, to)] {
        if let Some(address) = address {
            rule.address(kind, address.into());
        }
    }
    match netlink.change(&mut rule) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        result => result,
    }
}
