//! The interface through which a node reaches outside beside its vports: a TAP without any address, in a routing
//! table of its own that only the node's own packets are looked up in.
//!
//! Rules say `iif lo`, so no packet that is forwarded meets them. Its source is one of the node's loopback
//! addresses, and `route_localnet` of this interface alone lets it leave: so routing daemons find no address and
//! no route of it, and nothing of it is in the tables that the route mirror follows.

use std::net::Ipv4Addr;
use std::os::fd::{BorrowedFd, OwnedFd};

use nix::net::if_::if_nametoindex;
use rtnetlink::packet_route::link::LinkFlags;
use rtnetlink::packet_route::route::RouteFlags;
use rtnetlink::packet_route::rule::RuleAction;
use rtnetlink::{Handle, LinkUnspec, RouteMessageBuilder};

use crate::error::{Context, Result};
use crate::netlink::{converse, refused};
use crate::netns::within;
use crate::sysctl;
use crate::tap::{TapSpec, open_here};

/// The interface's own table.
pub const TABLE: u32 = 7777;

/// Of rules before the main table: what comes from the source or goes to the gateway.
const PRIORITY_FIRST: u32 = 32_760;

/// Of the rule after the tables main and default: what these have no route for.
const PRIORITY_LAST: u32 = 32_770;

/// Makes the interface in a network namespace and brings it up, with table and rules. It goes with its descriptor,
/// which does not block; rules stay, and lead to an empty table then. IPv4 alone.
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
        converse(|handle| async move {
            let mut link = LinkUnspec::new_with_index(index)
                .address(spec.mac.to_vec())
                .mtu(spec.mtu)
                .up()
                .build();
            // The other end answers no ARP.
            link.header.flags |= LinkFlags::Noarp;
            link.header.change_mask |= LinkFlags::Noarp;
            handle.link().set(link).execute().await.map_err(refused("set up", &spec.name))?;
            let mut route = RouteMessageBuilder::<Ipv4Addr>::new()
                .table_id(TABLE)
                .gateway(gateway)
                .output_interface(index)
                .pref_source(source)
                .build();
            route.header.flags |= RouteFlags::Onlink;
            let added = handle.route().add(route).execute().await;
            added.map_err(refused("add route", format!("default via {gateway}")))?;
            let rules =
                [(PRIORITY_FIRST, Some(source), None), (PRIORITY_FIRST, None, Some(gateway))];
            for (priority, from, to) in rules.into_iter().chain([(PRIORITY_LAST, None, None)]) {
                add_rule(&handle, priority, from, to).await?;
            }
            Ok(())
        })?;
        Ok(tap)
    })
}

/// Adds a rule for the node's own packets, if it is not there.
async fn add_rule(
    handle: &Handle,
    priority: u32,
    from: Option<Ipv4Addr>,
    to: Option<Ipv4Addr>,
) -> Result<()> {
    let mut rule = handle
        .rule()
        .add()
        .v4()
        .input_interface("lo")
        .table_id(TABLE)
        .priority(priority)
        .action(RuleAction::ToTable);
    if let Some(from) = from {
        rule = rule.source_prefix(from, 32);
    }
    if let Some(to) = to {
        rule = rule.destination_prefix(to, 32);
    }
    match rule.execute().await {
        Err(rtnetlink::Error::NetlinkError(said))
            if said.to_io().kind() == std::io::ErrorKind::AlreadyExists =>
        {
            Ok(())
        }
        result => result.map_err(refused("add rule", format!("{priority}: lookup {TABLE}"))),
    }
}
