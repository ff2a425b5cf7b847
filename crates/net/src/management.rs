//! Management interface of a node, which reaches the outside independently of its vports: a TAP
//! without addresses, in a routing table of its own that only the node's own packets use.
//!
//! The rules match `iif lo`, so forwarded packets never use it. The source address is one of
//! the node's loopback addresses, and `route_localnet` of this interface alone lets such
//! packets leave. So routing daemons see neither its address nor its route, and the tables that
//! the route mirror follows have no trace of it.

use std::net::Ipv4Addr;
use std::os::fd::{BorrowedFd, OwnedFd};

use nix::net::if_::if_nametoindex;
use rtnetlink::packet_route::link::LinkFlags;
use rtnetlink::packet_route::route::RouteFlags;
use rtnetlink::packet_route::rule::RuleAction;
use rtnetlink::{Handle, LinkUnspec, RouteMessageBuilder};

use crate::error::{NetContext, Result};
use crate::netlink::{refused, run_in_thread};
use crate::netns::within;
use crate::sysctl;
use crate::tap::{TapSpec, open_here};

/// Routing table of the interface.
pub const TABLE: u32 = 7777;

/// Priority of the rules before the main table: packets from the source, or to the gateway.
const PRIORITY_FIRST: u32 = 32_760;

/// Priority of the rule after the tables main and default: packets that these have no route for.
const PRIORITY_LAST: u32 = 32_770;

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
        run_in_thread(|handle| async move {
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

/// Adds a rule for the node's own packets, unless it exists.
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
        Err(rtnetlink::Error::NetlinkError(message))
            if message.to_io().kind() == std::io::ErrorKind::AlreadyExists =>
        {
            Ok(())
        }
        result => result.map_err(refused("add rule", format!("{priority}: lookup {TABLE}"))),
    }
}
