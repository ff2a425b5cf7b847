//! Checks of nodes' access to the machine's network: port conflicts, and tenants' grants.

use super::published::{Published, published};
use super::{DesiredState, Reporter};
use crate::limits::TENANT_ENTRIES_MAX;
use crate::management::ManagementGrant;
use crate::object::{Node, VirtualNetwork};
use pdp_proto::management::{INTERFACE, PORTS_MAX};

/// Lowest port of tenants; only root may listen at lower ones.
const TENANT_PORT_MIN: u32 = 1024;

/// Checks a node by itself.
pub(super) fn node(vnet: &str, name: &str, node: &Node, reporter: &mut Reporter) {
    let Some(management) = &node.management else { return };
    let path = ["spec", "nodes", name, "management", "ports"];
    reporter.too_many(vnet, &path, "ports", management.ports.len(), PORTS_MAX);
    if management.outside && node.interfaces.contains_key(INTERFACE) {
        let message = format!("name {INTERFACE} is reserved for management.outside");
        let path = ["spec", "nodes", name, "interfaces", INTERFACE];
        reporter.vnet(vnet, &path, message, "choose another, or set management.outside: false");
    }
    if !management.outside && management.ports.is_empty() {
        let message = "management without outside and ports has no effect";
        reporter.vnet(vnet, &path[..4], message, "give ports, or remove it");
    }
}

/// Checks that no port of the machine is published twice. The error belongs to the changed network.
pub(super) fn ports(desired: &DesiredState<'_>, reporter: &mut Reporter) {
    let changed: Vec<_> =
        desired.changed.iter().map(|(name, vnet)| (name, published(vnet))).collect();
    if changed.iter().all(|(_, ports)| ports.is_empty()) {
        return;
    }
    let kept = desired.reserved().flat_map(|(name, vnet)| {
        vnet.sums().published.iter().map(move |published| (name, published))
    });
    let mut taken: Vec<(&String, &Published)> = kept.collect();
    for (vnet, published) in &changed {
        for published in published {
            let meets =
                |(_, other): &&(&String, &Published)| other.port.conflicts_with(&published.port);
            if let Some((other, at)) = taken.iter().find(meets) {
                let by = match reporter.sees(other) {
                    true => format!("is taken by {} of {other}/{}", at.port, at.node),
                    false => "is taken".to_owned(),
                };
                let message = format!("port {} {by}", published.port);
                published.fault(vnet, message, "use another port of the machine", reporter);
            }
            taken.push((vnet, published));
        }
    }
}

/// Checks a tenant's grant by itself.
pub(super) fn grant(name: &str, grant: &ManagementGrant, reporter: &mut Reporter) {
    let ports = grant.ports.iter().flat_map(|ports| &ports.0);
    for (first, last) in ports.filter(|range| range.0 < TENANT_PORT_MIN || range.1 > 65_535) {
        let message = format!("ports {first}-{last} is not within {TENANT_PORT_MIN} to 65535");
        let path = ["spec", "management", "ports"];
        reporter.tenant(name, &path, message, "a tenant can't have ports reserved for root");
    }
    let path = ["spec", "management", "addresses"];
    let count = grant.addresses.len();
    if count > TENANT_ENTRIES_MAX {
        let message = format!("{count} addresses exceed {TENANT_ENTRIES_MAX}");
        reporter.tenant(name, &path, message, "remove some");
    }
    for address in grant.addresses.iter().filter(|address| address.is_multicast()) {
        let message = format!("address {address} is a multicast address");
        reporter.tenant(name, &path, message, "use addresses of the machine");
    }
}

/// Reports ports that two tenants may publish, as an error of the first.
pub(super) fn against(
    name: &str,
    mine: Option<&ManagementGrant>,
    other: &str,
    theirs: Option<&ManagementGrant>,
    reporter: &mut Reporter,
) {
    let of = |grant: Option<&ManagementGrant>| grant.and_then(|grant| grant.ports.clone());
    let common = of(mine).zip(of(theirs)).and_then(|(mine, theirs)| mine.common(&theirs));
    if let Some(port) = common {
        let message = format!("port {port} is granted to tenant {other}");
        let path = ["spec", "management", "ports"];
        reporter.tenant(name, &path, message, "give tenants ranges that do not overlap");
    }
}

/// Reports access of a tenant's virtual network that the tenant has no grant for.
pub(super) fn uses(
    name: &str,
    tenant: &str,
    vnet: &VirtualNetwork,
    grant: Option<&ManagementGrant>,
    reporter: &mut Reporter,
) {
    let none = ManagementGrant::default();
    let grant = grant.unwrap_or(&none);
    for (node_name, node) in &vnet.spec.nodes {
        if node.management.as_ref().is_some_and(|management| management.outside && !grant.outside) {
            let message = format!("tenant {tenant} has no grant for management.outside");
            let path = ["spec", "nodes", node_name, "management", "outside"];
            let hint = "set management.outside: false, or ask an operator";
            reporter.vnet(name, &path, message, hint);
        }
    }
    let addresses = grant.at();
    for published in published(vnet) {
        let listen = published.port.0.listen;
        let at = addresses.iter().any(|address| {
            *address == listen.ip()
                || address.is_unspecified() && address.is_ipv4() == listen.is_ipv4()
        });
        if !at || !grant.ports.as_ref().is_some_and(|ports| ports.has(listen.port().into())) {
            let message = format!("tenant {tenant} has no grant for port {}", published.port);
            let hint = match &grant.ports {
                None => "it has none; ask an operator".to_owned(),
                Some(ports) => {
                    let at: Vec<String> = addresses.iter().map(ToString::to_string).collect();
                    format!("it has {ports} at {}", at.join(" and "))
                }
            };
            published.fault(name, message, &hint, reporter);
        }
    }
}

/// Reports ports that an operators' virtual network publishes and a tenant has a grant for.
pub(super) fn operators(
    desired: &DesiredState<'_>,
    name: &str,
    vnet: &VirtualNetwork,
    reporter: &mut Reporter,
) {
    let ports = published(vnet);
    for (tenant, object) in &*desired.tenants {
        let grant = object.spec.management.as_ref();
        let Some(granted) = grant.and_then(|grant| grant.ports.as_ref()) else { continue };
        for published in &ports {
            if !granted.has(published.port.0.listen.port().into()) {
                continue;
            }
            let message =
                format!("port {} is granted to tenant {tenant} ({granted})", published.port);
            let hint = "use another port, or remove it from the tenant's grant";
            if reporter.vnets.contains_key(name) {
                published.fault(name, message, hint, reporter);
            } else {
                let message = format!("vnet {name}, node {}: {message}", published.node);
                reporter.tenant(tenant, &["spec", "management", "ports"], message, hint);
            }
        }
    }
}
