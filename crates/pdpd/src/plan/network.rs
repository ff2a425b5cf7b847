//! Contents of a node's network namespace besides its interfaces:
//! sysctls, addresses of `lo`, and static routes.

use std::collections::BTreeMap;

use ipnet::IpNet;
use pdp_net::route::{StaticRouteHop, StaticRouteKind, StaticRouteScope, StaticRouteSpec};
use pdp_spec::sysctl::{self, SysctlOf, SysctlValue};
use pdp_spec::{Node, RouteKind, RouteScope};

/// Number of the default routing table.
const TABLE_MAIN: u32 = 254;

/// Default metric of IPv6 routes.
const METRIC_V6: u32 = 1024;

/// Sysctls of a network namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SysctlPlan {
    /// Names and values that are set before the interfaces exist.
    pub before: Vec<(String, String)>,
    /// Names and values that are set once they exist.
    pub after: Vec<(String, String)>,
}

/// Seed of the kernel's hash that distributes flows over several next hops (Linux 6.11 and later).
const HASH_SEED: &str = "net.ipv4.fib_multipath_hash_seed";

/// Returns the spec's sysctls. Those that change others come first:
/// setting forwarding makes the kernel reset some.
pub(super) fn sysctls(node: &Node) -> SysctlPlan {
    let mut all: Vec<_> =
        node.sysctls.iter().map(|(name, value)| (name.clone(), value.to_string())).collect();
    all.sort_by_key(|(name, _)| !name.ends_with("forward") && !name.ends_with("forwarding"));
    let of_node = |name: &str| sysctl::sysctl_of(name).0 == SysctlOf::Node;
    let (before, after) = all.into_iter().partition(|(name, _)| of_node(name));
    SysctlPlan { before, after }
}

/// Returns a node's default sysctls, unless they are in the `given` ones of its spec
/// or the kernel lacks them: its own seed for distributing flows over next hops.
///
/// If all nodes used the machine's seed, they would make the same
/// choice, and every second link of a second stage would stay idle. The
/// seed follows from the names, so it is the same at each start.
pub(super) fn defaults(
    vnet: &str,
    name: &str,
    given: &BTreeMap<String, SysctlValue>,
    has: impl Fn(&str) -> bool,
) -> Vec<(String, String)> {
    if given.contains_key(HASH_SEED) || !has(HASH_SEED) {
        return Vec::new();
    }
    // FNV-1a, 32 bits. The kernel treats 0 as unset.
    let names = [vnet, name].join("/");
    let seed = names
        .bytes()
        .fold(0x811c_9dc5_u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
    vec![(HASH_SEED.to_owned(), seed.max(1).to_string())]
}

impl SysctlPlan {
    /// Returns both kinds, in the format of a node's hash.
    pub(super) fn words(&self) -> impl Iterator<Item = String> {
        self.before.iter().chain(&self.after).map(|(name, value)| format!("{name}={value}"))
    }
}

/// Returns the addresses of `lo`.
pub(super) fn loopback(node: &Node) -> Vec<IpNet> {
    node.loopback.iter().map(|address| address.0).collect()
}

/// Returns the static routes, in order.
pub(super) fn routes(node: &Node) -> Vec<StaticRouteSpec> {
    node.routes.iter().filter_map(route).collect()
}

/// Returns `None` for a route that the check of specs refuses.
fn route(route: &pdp_spec::StaticRoute) -> Option<StaticRouteSpec> {
    let to = route.prefix()?;
    let v4 = to.addr().is_ipv4();
    let hops = route.hops();
    let linked = hops.iter().all(|hop| hop.via.is_none()) && !hops.is_empty();
    Some(StaticRouteSpec {
        to,
        kind: match route.kind {
            RouteKind::Unicast => StaticRouteKind::Unicast,
            RouteKind::Blackhole => StaticRouteKind::Blackhole,
            RouteKind::Unreachable => StaticRouteKind::Unreachable,
            RouteKind::Prohibit => StaticRouteKind::Prohibit,
            RouteKind::Throw => StaticRouteKind::Throw,
        },
        metric: match route.metric {
            Some(0) | None if !v4 => METRIC_V6,
            metric => metric.unwrap_or(0),
        },
        table: route.table.unwrap_or(TABLE_MAIN),
        src: route.src,
        mtu: route.mtu,
        scope: match route.scope {
            Some(RouteScope::Global) => StaticRouteScope::Global,
            Some(RouteScope::Link) => StaticRouteScope::Link,
            Some(RouteScope::Host) => StaticRouteScope::Host,
            None if linked && v4 => StaticRouteScope::Link,
            None => StaticRouteScope::Global,
        },
        hops: hops
            .into_iter()
            .map(|hop| StaticRouteHop {
                via: hop.via,
                dev: hop.dev,
                onlink: hop.onlink,
                weight: hop.weight,
            })
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
    fn each_node_has_its_own_flow_hash_seed() {
        let names = (0..256).flat_map(|n| ["red", "blue"].map(|vnet| (vnet, format!("r{n}"))));
        let seeds: BTreeSet<String> = names.map(|(vnet, name)| seed(vnet, &name)).collect();
        assert_eq!(seeds.len(), 512);
        assert_eq!(seed("red", "r1"), seed("red", "r1"));
        assert!(!seeds.contains("0"), "the kernel takes 0 as none");
    }

    #[test]
    fn hash_seed_respects_spec_and_kernel_support() {
        assert!(defaults("red", "r1", &BTreeMap::new(), |_| false).is_empty());
        let given = BTreeMap::from([(HASH_SEED.to_owned(), SysctlValue::Number(7))]);
        assert!(defaults("red", "r1", &given, |_| true).is_empty());
    }
}
