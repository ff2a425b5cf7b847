//! Checks of a node's static routes: the kernel must accept each, in the order of the list.

use std::collections::BTreeMap;
use std::net::IpAddr;

use ipnet::IpNet;

use super::interfaces::is_link_local;
use crate::limits::*;
use crate::nearest::nearest;
use crate::node_check::NodeCheck;
use crate::object::Node;
use crate::route::{NextHop, RouteKind, RouteScope, StaticRoute, Via};
use crate::units::Destination;

/// Identity of a route in a table: destination, table, metric.
type RouteKey = (IpNet, u32, u32);

/// The kernel's `main` table.
pub(super) const TABLE_MAIN: u32 = 254;

/// Returns a route's metric or its default.
fn metric(route: &StaticRoute, v4: bool) -> u32 {
    match route.metric {
        // The kernel uses 1024 for IPv6 routes without a metric.
        Some(0) | None if !v4 => 1024,
        metric => metric.unwrap_or(0),
    }
}

pub(super) fn check(check: &mut NodeCheck<'_>, node: &mut Node) {
    check.too_many(&["routes"], node.routes.len(), STATIC_ROUTES_MAX);
    let mut known: BTreeMap<RouteKey, String> = BTreeMap::new();
    for (name, interface) in &node.interfaces {
        for gateway in &interface.gateways {
            let v4 = gateway.is_ipv4();
            let key = (Destination::default_of(v4), TABLE_MAIN, if v4 { 0 } else { 1024 });
            known.insert(key, format!("the gateway {gateway} of {name}"));
        }
    }
    // Destinations on a link from the routes so far. Later routes reach next hops by them.
    let mut on_link: Vec<(IpNet, String)> = Vec::new();
    let mut routes = std::mem::take(&mut node.routes);
    for (index, route) in routes.iter_mut().enumerate() {
        let at = index.to_string();
        let path = ["routes", at.as_str()];
        let Some(prefix) = route.prefix() else {
            let hint = "write 0.0.0.0/0 or ::/0";
            check.fault(&path, "to default has no IP version, and there is no next hop", hint);
            continue;
        };
        route.to = Destination::Prefix(prefix);
        let v4 = prefix.addr().is_ipv4();
        let key = (prefix, route.table.unwrap_or(TABLE_MAIN), metric(route, v4));
        if let Some(other) = known.insert(key, format!("routes[{index}]")) {
            let message = format!("to {prefix} is also the destination of {other}");
            check.fault(
                &path,
                message,
                "give one of them a metric, or one route a list of next hops in via",
            );
        }
        RouteCheck { check: &mut *check, node, path, prefix, on_link: &on_link }.route(route);
        let linked = route.hops().into_iter().filter(|hop| hop.via.is_none());
        on_link.extend(linked.filter_map(|hop| Some((prefix, hop.dev?))));
    }
    node.routes = routes;
}

/// Checks of one route.
struct RouteCheck<'a, 'b> {
    check: &'a mut NodeCheck<'b>,
    node: &'a Node,
    path: [&'a str; 2],
    prefix: IpNet,
    on_link: &'a [(IpNet, String)],
}

impl RouteCheck<'_, '_> {
    fn fault(&mut self, path: &[&str], message: impl Into<String>, hint: impl Into<String>) {
        let path = [&self.path[..], path].concat();
        self.check.fault(&path, message, hint);
    }

    fn route(&mut self, route: &StaticRoute) {
        let v4 = self.prefix.addr().is_ipv4();
        if route.kind != RouteKind::Unicast {
            let given = [
                ("via", route.via.is_some()),
                ("dev", route.dev.is_some()),
                ("onlink", route.onlink),
                ("mtu", route.mtu.is_some()),
                ("src", route.src.is_some()),
            ];
            for (key, _) in given.into_iter().filter(|(_, given)| *given) {
                self.fault(
                    &[key],
                    format!("{key} has no effect: routes of this type have no next hop"),
                    "remove it",
                );
            }
            return;
        }
        let hops = route.hops();
        match &route.via {
            None if route.dev.is_none() => {
                let hint = "give via, dev, or a type such as blackhole";
                self.fault(&[], format!("to {} has no next hop", self.prefix), hint);
            }
            Some(Via::Several(several)) if several.is_empty() => {
                self.fault(&["via"], "via is an empty list", "name a next hop");
            }
            _ => {}
        }
        if hops.len() > HOPS_MAX {
            let message = format!("{} next hops, {HOPS_MAX} at most", hops.len());
            self.fault(&["via"], message, "remove some");
        }
        for (at, hop) in hops.iter().enumerate() {
            let index = at.to_string();
            let path = match &route.via {
                Some(Via::Several(_)) => &["via", index.as_str()][..],
                Some(Via::One(_)) => &["via"],
                None => &["dev"],
            };
            self.hop(path, hop, v4);
            let same = |other: &NextHop| other.via == hop.via && other.dev == hop.dev;
            if hops[..at].iter().any(same) {
                let hint = "give it once, with a weight";
                self.fault(path, "the next hop is given twice", hint);
            }
        }
        let has_hop = hops.iter().any(|hop| hop.via.is_some());
        if let Some(scope) = route.scope
            && has_hop
            && scope != RouteScope::Global
        {
            let hint = "remove scope: a route with a next hop is global";
            self.fault(&["scope"], "scope is not global, but the route has a next hop", hint);
        }
        if route.table == Some(TABLE_LOCAL) {
            let hint = "give addresses by loopback, or use another table";
            self.fault(&["table"], format!("table {TABLE_LOCAL} is the kernel's own"), hint);
        }
        if let Some(mtu) = route.mtu.filter(|mtu| !v4 && *mtu < MTU_V6_MIN) {
            let message = format!("mtu {mtu} is below IPv6's minimum of {MTU_V6_MIN}");
            self.fault(&["mtu"], message, "");
        }
        if let Some(src) = route.src {
            let addresses = self.node.interfaces.values().flat_map(|it| &it.addresses);
            let mut own = addresses.chain(&self.node.loopback);
            if src.is_ipv4() != v4 {
                let message = format!("src {src} and {} are of different IP versions", self.prefix);
                self.fault(&["src"], message, "use a src of the same version");
            } else if !own.any(|address| address.0.addr() == src) {
                let message = format!("src {src} is not an address of the node");
                self.fault(&["src"], message, "use one of an interface, or add it to loopback");
            }
        }
    }

    /// Checks that the kernel finds a next hop on a link.
    fn hop(&mut self, path: &[&str], hop: &NextHop, v4: bool) {
        if let Some(dev) = &hop.dev
            && dev != "lo"
            && !self.node.interfaces.contains_key(dev)
        {
            let names = self.node.interfaces.keys().map(String::as_str);
            let hint = match nearest(dev, names.clone()) {
                Some(nearest) => format!("did you mean {nearest}?"),
                None => format!("interfaces: {}", names.collect::<Vec<_>>().join(", ")),
            };
            self.fault(path, format!("interface {dev} does not exist"), hint);
            return;
        }
        let Some(via) = hop.via else {
            if hop.dev.is_none() {
                self.fault(path, "a next hop has neither via nor dev", "give one of them");
            } else if hop.onlink {
                self.fault(path, "onlink without a next hop", "remove it, or give via");
            }
            return;
        };
        if !v4 && via.is_ipv4() {
            let message = format!("via {via} is IPv4, but the destination {} is IPv6", self.prefix);
            return self.fault(path, message, "use an IPv6 next hop");
        }
        let interfaces = || self.node.interfaces.iter();
        let all =
            interfaces().flat_map(|(name, it)| it.addresses.iter().map(move |at| (at.0, name)));
        if all.clone().any(|(net, _)| net.addr() == via)
            || self.node.loopback.iter().any(|address| address.0.addr() == via)
        {
            let hint = "give the address of the node at the other end";
            return self.fault(path, format!("via {via} is the node's own address"), hint);
        }
        let link_local = is_link_local(via);
        let Some(dev) = &hop.dev else {
            if hop.onlink {
                self.fault(path, "onlink without dev", "name the interface in dev");
            } else if link_local {
                let message = format!("via {via} is link-local and has no dev");
                self.fault(path, message, "name the interface in dev");
            } else if self.link_of(via).is_none() {
                let nets: Vec<_> =
                    all.map(|(net, name)| format!("{} on {name}", net.trunc())).collect();
                let message = format!("via {via} is in no interface's subnet");
                let hint = match nets.is_empty() {
                    true => "give an interface addresses, or set dev and onlink: true".to_owned(),
                    false => format!("subnets: {}; or set dev and onlink: true", nets.join(", ")),
                };
                self.fault(path, message, hint);
            }
            return;
        };
        let here = interfaces().filter(|(name, _)| *name == dev).flat_map(|(_, it)| &it.addresses);
        let reachable = hop.onlink
            || link_local
            || here.clone().any(|address| address.0.contains(&via))
            || self.on_link.iter().any(|(net, by)| by == dev && net.contains(&via));
        if !reachable {
            let message = format!("via {via} is outside the subnets of {dev}");
            let hint = match here.map(|address| address.0.trunc().to_string()).next() {
                Some(net) => format!("use an address in {net}, or add onlink: true"),
                None => format!("give {dev} an address first, or add onlink: true"),
            };
            self.fault(path, message, hint);
        }
    }

    /// Returns the interface on whose link a next hop is.
    fn link_of(&self, via: IpAddr) -> Option<&str> {
        link_of(self.node, via).or_else(|| {
            let by = self.on_link.iter().find(|(net, _)| net.contains(&via))?;
            Some(&by.1)
        })
    }
}

/// Returns the interface in whose subnet an address is.
fn link_of(node: &Node, via: IpAddr) -> Option<&str> {
    let ports = node.ports();
    let found = ports.into_iter().find(|(_, it)| it.addresses.iter().any(|at| at.0.contains(&via)));
    found.map(|(name, _)| name)
}
