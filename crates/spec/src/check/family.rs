//! Checks for IPv6 where it is not available: on an interface with an MTU below
//! IPv6's minimum (RFC 8200 section 5), or on a machine booted with `ipv6.disable=1`.

use std::net::IpAddr;

use super::{DesiredState, Reporter};
use crate::limits::{MTU_DEFAULT, MTU_V6_MIN};
use crate::object::{Interface, Node};
use crate::sysctl::{SysctlOf, sysctl_of};

/// Prefix of IPv6 sysctls.
const SYSCTLS_V6: &str = "net.ipv6.";

/// Checks changed networks, once their MTUs are known. `without_v6`: the machine has no IPv6.
pub(super) fn check(desired: &DesiredState<'_>, without_v6: bool, reporter: &mut Reporter) {
    for (vnet, changed) in &desired.changed {
        for (name, node) in &changed.spec.nodes {
            let uses = if without_v6 { uses_of_node(node) } else { uses_of_small(node) };
            for Ipv6Use { path, message, hint } in uses {
                let path: Vec<&str> = path.iter().map(String::as_str).collect();
                reporter.vnet(vnet, &[&["spec", "nodes", name], &path[..]].concat(), message, hint);
            }
        }
    }
}

/// Use of IPv6 in a node that does not have it.
struct Ipv6Use {
    path: Vec<String>,
    message: String,
    hint: String,
}

/// Returns a node's uses of IPv6, for a machine without it.
fn uses_of_node(node: &Node) -> Vec<Ipv6Use> {
    let one = |path: &[&str], what: String| Ipv6Use {
        path: path.iter().map(|&key| key.to_owned()).collect(),
        message: format!("{what} needs IPv6, which this machine's kernel lacks"),
        hint: "remove it, or boot the machine without ipv6.disable=1".into(),
    };
    let mut uses = Vec::new();
    for (name, interface) in &node.interfaces {
        for (key, index, address) in of_v6(interface) {
            uses.push(one(&["interfaces", name, key, &index.to_string()], address));
        }
    }
    for (index, address) in node.loopback.iter().enumerate() {
        if address.0.addr().is_ipv6() {
            uses.push(one(&["loopback", &index.to_string()], format!("address {address}")));
        }
    }
    for (index, route) in node.routes.iter().enumerate() {
        let hops = route.hops();
        let to = route.prefix().filter(|to| to.addr().is_ipv6()).map(|to| format!("route {to}"));
        let mut via = hops.iter().filter_map(|hop| hop.via).filter(IpAddr::is_ipv6);
        if let Some(what) = to.or_else(|| via.next().map(|via| format!("via {via}"))) {
            uses.push(one(&["routes", &index.to_string()], what));
        }
    }
    for name in node.sysctls.keys().filter(|name| name.starts_with(SYSCTLS_V6)) {
        uses.push(one(&["sysctls", name], format!("sysctl {name}")));
    }
    uses
}

/// Returns uses of IPv6 on a node's interfaces whose MTU is too small for it.
fn uses_of_small(node: &Node) -> Vec<Ipv6Use> {
    let mut uses = Vec::new();
    for (name, interface) in &node.interfaces {
        let mtu = interface.mtu.unwrap_or(MTU_DEFAULT);
        if mtu >= MTU_V6_MIN {
            continue;
        }
        let mut add = |path: &[&str], what: String| {
            uses.push(Ipv6Use {
                path: path.iter().map(|&key| key.to_owned()).collect(),
                message: format!("{what} needs an mtu of {MTU_V6_MIN}, {name} has {mtu}"),
                hint: format!(
                    "Linux disables IPv6 there; set its mtu to {MTU_V6_MIN}, or remove this"
                ),
            });
        };
        for (key, index, address) in of_v6(interface) {
            add(&["interfaces", name, key, &index.to_string()], address);
        }
        for (index, route) in node.routes.iter().enumerate() {
            let to_v6 = route.prefix().is_some_and(|to| to.addr().is_ipv6());
            let here = |dev: &Option<String>| dev.as_ref() == Some(name);
            let hops = route.hops();
            let mut uses_v6 = hops.iter().filter(|hop| {
                here(&hop.dev) && (to_v6 || hop.via.is_some_and(|via| via.is_ipv6()))
            });
            if uses_v6.next().is_some() {
                add(&["routes", &index.to_string()], "an IPv6 route".into());
            }
        }
        for sysctl in node.sysctls.keys().filter(|name| name.starts_with(SYSCTLS_V6)) {
            // In sysctl names, `/` stands for `.` of an interface's name.
            let is_here = |of: &str| of.replace('/', ".") == *name;
            if matches!(sysctl_of(sysctl).0, SysctlOf::Interface(of) if is_here(of)) {
                add(&["sysctls", sysctl], format!("sysctl {sysctl}"));
            }
        }
    }
    uses
}

/// Returns IPv6 addresses and gateways of an interface: key, index in its list, and description.
fn of_v6(interface: &Interface) -> impl Iterator<Item = (&'static str, usize, String)> {
    let addresses = interface.addresses.iter().enumerate();
    let addresses = addresses.filter(|(_, address)| address.0.addr().is_ipv6());
    let addresses = addresses.map(|(at, address)| ("addresses", at, format!("address {address}")));
    let gateways = interface.gateways.iter().enumerate();
    let gateways = gateways.filter(|(_, gateway)| gateway.is_ipv6());
    let gateways = gateways.map(|(at, gateway)| ("gateways", at, format!("gateway {gateway}")));
    addresses.chain(gateways)
}
