//! Checks of a node's interfaces: their names, addresses and gateways.

use std::collections::BTreeSet;
use std::net::IpAddr;

use crate::limits::{ADDRESSES_MAX, INTERFACE_CHARS_MAX, PORTS_MAX};
use crate::node_check::NodeCheck;
use crate::object::{Interface, Node};
use crate::units::{Address, Mac};

/// Names with another meaning in the kernel: directories, its loopback interface,
/// and the settings of all interfaces (`/proc/sys/net/ipv4/conf/all`).
const NAMES_TAKEN: [&str; 5] = [".", "..", "lo", "all", "default"];

pub(super) fn check(check: &mut NodeCheck<'_>, node: &mut Node) {
    check.too_many(&["interfaces"], node.interfaces.len(), PORTS_MAX);
    for (name, interface) in &mut node.interfaces {
        if let Some((message, hint)) = bad_name(name) {
            check.fault(&["interfaces", name], message, hint);
        }
        addresses(check, &["interfaces", name, "addresses"], &interface.addresses);
        gateways(check, name, interface);
        let mac = default_mac(check.vnet, check.node, name);
        interface.mac.get_or_insert(mac);
    }
    addresses(check, &["loopback"], &node.loopback);
}

/// Returns why no interface can have this name, and advice.
fn bad_name(name: &str) -> Option<(String, String)> {
    let chars = name.chars().count();
    if name.len() > INTERFACE_CHARS_MAX {
        let message =
            format!("name {name:?} has {chars} characters, {INTERFACE_CHARS_MAX} at most");
        return Some((message, "choose a shorter one".into()));
    }
    // The kernel treats `%d` as a pattern for a number.
    let bad = |c: char| "/:%".contains(c) || c.is_whitespace() || c.is_control();
    let is_taken = NAMES_TAKEN.contains(&name);
    if !name.is_empty() && !name.contains(bad) && !is_taken {
        return None;
    }
    let instead = name.replace(bad, "-").trim_matches('-').to_owned();
    let hint = match name {
        "lo" => "every node has it; give its addresses with the node's key loopback: [1.1.1.1/32]"
            .into(),
        _ if is_taken || instead.is_empty() => "use eth0, eth1, …".to_owned(),
        _ => format!("write {instead}"),
    };
    let message = match is_taken {
        true => format!("name {name:?} is reserved by Linux"),
        false => format!("name {name:?} has characters that interface names can't have"),
    };
    Some((message, hint))
}

/// Checks the list at `path`: an interface has each address once. Several interfaces of a node may
/// have the same one. Link-local addresses belong to one link (RFC 4291 section 2.5.6), unnumbered
/// interfaces borrow the loopback's, and VRFs, which a node makes itself, have separate tables.
fn addresses(check: &mut NodeCheck<'_>, path: &[&str], addresses: &[Address]) {
    check.too_many(path, addresses.len(), ADDRESSES_MAX);
    let mut seen = BTreeSet::new();
    for (index, address) in addresses.iter().enumerate() {
        if !seen.insert(address.0.addr()) {
            let index = index.to_string();
            let path = [path, &[&index]].concat();
            check.fault(&path, format!("address {address} is given twice"), "remove or change one");
        }
    }
}

fn gateways(check: &mut NodeCheck<'_>, name: &str, interface: &Interface) {
    for (index, gateway) in interface.gateways.iter().enumerate() {
        let path = ["interfaces", name, "gateways", &index.to_string()];
        let own = interface.addresses.iter().any(|address| address.0.addr() == *gateway);
        let reachable = interface.addresses.iter().any(|address| address.0.contains(gateway));
        let link_local = is_link_local(*gateway);
        let before = &interface.gateways[..index];
        if own {
            let hint = "give the address of the router at the other end";
            check.fault(&path, format!("gateway {gateway} is the interface's own address"), hint);
        } else if !reachable && !link_local {
            let message = format!("gateway {gateway} is outside the subnets of {name}");
            let hint = match interface.addresses.first() {
                Some(address) => format!("use an address in {}", address.0.trunc()),
                None => "give the interface an address first".into(),
            };
            check.fault(&path, message, hint);
        }
        if before.iter().any(|other| other.is_ipv4() == gateway.is_ipv4()) {
            let message = format!("gateway {gateway} is the second of its IP version");
            check.fault(&path, message, "use routing software for more");
        }
    }
}

/// Returns the default MAC address of an interface: locally administered,
/// unicast, and the same for the same names (64-bit FNV-1a of the names).
fn default_mac(vnet: &str, node: &str, interface: &str) -> Mac {
    let names = [vnet, node, interface].join("/");
    let hash = names.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    let [_, _, _, a, b, c, d, e] = (hash ^ (hash >> 40)).to_be_bytes();
    Mac([0x02, a, b, c, d, e])
}

/// True for fe80::/10. Nodes have more of these addresses than their specs name.
pub(super) fn is_link_local(address: IpAddr) -> bool {
    matches!(address, IpAddr::V6(v6) if v6.is_unicast_link_local())
}
