//! What a node's own network namespace has beside its interfaces: sysctls, addresses of `lo`, and static routes.

use std::collections::BTreeMap;

use ipnet::IpNet;
use pdp_net::route::{Hop, Kind, Route, Scope};
use pdp_spec::sysctl::{self, SysctlOf, SysctlValue};
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

/// What the kernel hashes flows with that have several next hops (Linux 6.11 and later).
const HASH_SEED: &str = "net.ipv4.fib_multipath_hash_seed";

/// The spec's sysctls, each after those that change others: forwarding has the kernel reset some.
pub(super) fn sysctls(node: &Node) -> Sysctls {
    let mut all: Vec<_> =
        node.sysctls.iter().map(|(name, value)| (name.clone(), value.to_string())).collect();
    all.sort_by_key(|(name, _)| !name.ends_with("forward") && !name.ends_with("forwarding"));
    let of_node = |name: &str| sysctl::sysctl_of(name).0 == SysctlOf::Node;
    let (before, after) = all.into_iter().partition(|(name, _)| of_node(name));
    Sysctls { before, after }
}

/// What a node has beside the `given` sysctls of its spec, where the kernel `has` it: a seed of its own for choosing among several
/// next hops. With the machine's seed all nodes would choose alike, and every second link of a second stage would carry
/// nothing. It follows from the names, so it is the same each time the node starts.
pub(super) fn defaults(
    vnet: &str,
    name: &str,
    given: &BTreeMap<String, SysctlValue>,
    has: impl Fn(&str) -> bool,
) -> Vec<(String, String)> {
    if given.contains_key(HASH_SEED) || !has(HASH_SEED) {
        return Vec::new();
    }
    // FNV-1a, 32 bits. The kernel takes 0 as none.
    let names = [vnet, name].join("/");
    let seed = names
        .bytes()
        .fold(0x811c_9dc5_u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
    vec![(HASH_SEED.to_owned(), seed.max(1).to_string())]
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

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn seed(vnet: &str, name: &str) -> String {
        let defaults = defaults(vnet, name, &BTreeMap::new(), |_| true);
        let [(key, value)] = &defaults[..] else { panic!("{defaults:?}") };
        assert_eq!(key, HASH_SEED);
        value.clone()
    }

    #[test]
    fn each_node_hashes_flows_with_a_seed_of_its_own() {
        let names = (0..256).flat_map(|n| ["red", "blue"].map(|vnet| (vnet, format!("r{n}"))));
        let seeds: BTreeSet<String> = names.map(|(vnet, name)| seed(vnet, &name)).collect();
        assert_eq!(seeds.len(), 512);
        assert_eq!(seed("red", "r1"), seed("red", "r1"));
        assert!(!seeds.contains("0"), "the kernel takes 0 as none");
    }

    #[test]
    fn a_seed_is_left_out_where_the_spec_or_the_kernel_says_so() {
        assert!(defaults("red", "r1", &BTreeMap::new(), |_| false).is_empty());
        let given = BTreeMap::from([(HASH_SEED.to_owned(), SysctlValue::Number(7))]);
        assert!(defaults("red", "r1", &given, |_| true).is_empty());
    }
}
