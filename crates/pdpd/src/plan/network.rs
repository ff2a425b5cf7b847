//! What a node's own network namespace has beside its interfaces: sysctls, addresses of `lo`, and static routes.

use ipnet::IpNet;
use pdp_net::route::{Hop, Kind, Route, Scope};
use pdp_spec::sysctl::{self, SysctlOf};
use pdp_spec::{Node, RouteKind, RouteScope};

/// Number of the table that routes are in where nothing else is said.
const TABLE_MAIN: u32 = 254;

/// Metric of routes of IPv6 that have none.
const METRIC_V6: u32 = 1024;

/// Sysctls of a network namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sysctls {
    /// Set before there are interfaces: names and values.
    pub before: Vec<(String, String)>,
    /// Set when there are.
    pub after: Vec<(String, String)>,
}

/// Sysctls, each after those that change others: forwarding has the kernel reset some.
pub(super) fn sysctls(node: &Node) -> Sysctls {
    let mut all: Vec<_> =
        node.sysctls.iter().map(|(name, value)| (name.clone(), value.to_string())).collect();
    all.sort_by_key(|(name, _)| !name.ends_with("forward") && !name.ends_with("forwarding"));
    let of_node = |name: &str| sysctl::sysctl_of(name).0 == SysctlOf::Node;
    let (before, after) = all.into_iter().partition(|(name, _)| of_node(name));
    Sysctls { before, after }
}

impl Sysctls {
    /// Those of either kind, as the hash of a node has them.
    pub(super) fn words(&self) -> impl Iterator<Item = String> {
        self.before.iter().chain(&self.after).map(|(name, value)| format!("{name}={value}"))
    }
}

/// Addresses of `lo`.
pub(super) fn loopback(node: &Node) -> Vec<IpNet> {
    node.loopback.iter().map(|address| address.0).collect()
}

/// Static routes, in order.
pub(super) fn routes(node: &Node) -> Vec<Route> {
    node.routes.iter().filter_map(route).collect()
}

/// `None` where the check of specs would have refused it.
fn route(route: &pdp_spec::StaticRoute) -> Option<Route> {
    let to = route.prefix()?;
    let v4 = to.addr().is_ipv4();
    let hops = route.hops();
    let linked = hops.iter().all(|hop| hop.via.is_none()) && !hops.is_empty();
    Some(Route {
        to,
        kind: match route.kind {
            RouteKind::Unicast => Kind::Unicast,
            RouteKind::Blackhole => Kind::Blackhole,
            RouteKind::Unreachable => Kind::Unreachable,
            RouteKind::Prohibit => Kind::Prohibit,
            RouteKind::Throw => Kind::Throw,
        },
        metric: match route.metric {
            Some(0) | None if !v4 => METRIC_V6,
            metric => metric.unwrap_or(0),
        },
        table: route.table.unwrap_or(TABLE_MAIN),
        src: route.src,
        mtu: route.mtu,
        scope: match route.scope {
            Some(RouteScope::Global) => Scope::Global,
            Some(RouteScope::Link) => Scope::Link,
            Some(RouteScope::Host) => Scope::Host,
            None if linked && v4 => Scope::Link,
            None => Scope::Global,
        },
        hops: hops
            .into_iter()
            .map(|hop| Hop { via: hop.via, dev: hop.dev, onlink: hop.onlink, weight: hop.weight })
            .collect(),
    })
}
