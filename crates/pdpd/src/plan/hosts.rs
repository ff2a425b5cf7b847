//! `/etc/hosts` of all hosts and control guests of a vnet. It is one file of root's
//! in the run directory, bound read-only over theirs. When addresses change it is
//! overwritten in place, so that no node is restarted because of another node.
//!
//! A node's name maps to its first address of each family, on loopback if it has one
//! there. Every address also has the name `INTERFACE.NODE`, so that `traceroute` shows the
//! interface that a packet came through. The file omits addresses with only local meaning
//! (loopback, link-local), and interfaces whose names are not valid in host names.
//!
//! Source: hosts(5), RFC 6761 section 6.3.

use std::fmt::Write as _;
use std::net::IpAddr;
use std::path::Path;

use pdp_container::{BindMount, GuestSpec};
use pdp_spec::{Node, VirtualNetworkSpec};

/// Path in the guest.
const HOSTS: &str = "/etc/hosts";

/// Names that mean the machine itself, even if a node has such a name.
const OWN_NAMES: [&str; 3] = ["localhost", "ip6-localhost", "ip6-loopback"];

/// Lines of one file; excess addresses are left out. At most about 3
/// MB, and less than the spec that they come from.
const LINES_MAX: usize = 16_384;

/// Returns the content of the file.
pub(super) fn text(vnet: &str, spec: &VirtualNetworkSpec) -> String {
    let mut text = format!(
        "# All nodes of {vnet}, by PdP. To replace it, set /etc/hosts in the node's `files`.\n\
         127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n"
    );
    let nodes = || spec.nodes.iter().filter(|(name, _)| !is_own(name));
    let of_nodes = nodes().map(|(name, node)| (name, node, true));
    let of_interfaces = nodes().map(|(name, node)| (name, node, false));
    let lines = of_nodes.chain(of_interfaces).flat_map(|(name, node, first)| {
        let addresses = addresses(node).filter(move |(.., is_first)| *is_first == first);
        addresses.filter_map(move |(interface, address, _)| {
            let names = match (first, is_label(interface)) {
                (true, true) => format!("{name} {interface}.{name}"),
                (true, false) => name.clone(),
                (false, true) => format!("{interface}.{name}"),
                (false, false) => return None,
            };
            Some((address, names))
        })
    });
    for (address, names) in lines.take(LINES_MAX) {
        let _ = writeln!(text, "{address}\t{names}");
    }
    text
}

/// Binds the file into a guest, unless its spec has something else there.
pub(super) fn show(file: &Path, control: &mut GuestSpec) {
    let mut files = control.files.iter().map(|file| &file.path);
    let mut binds = control.binds.iter().map(|bind| &bind.target);
    if !files.any(|path| path == HOSTS) && !binds.any(|path| path == HOSTS) {
        let (source, target) = (file.to_owned(), HOSTS.into());
        control.binds.push(BindMount { source, target, writable: false, wished: false });
    }
}

/// Returns a node's addresses with their interfaces, loopback first,
/// and whether each is the first of its family.
fn addresses(node: &Node) -> impl Iterator<Item = (&str, IpAddr, bool)> {
    let of_ports = node.ports().into_iter().flat_map(|(name, interface)| {
        interface.addresses.iter().map(move |address| (name, address.0.addr()))
    });
    let of_loopback = node.loopback.iter().map(|address| ("lo", address.0.addr()));
    let mut seen = [false; 2];
    let all = of_loopback.chain(of_ports);
    all.filter(|(_, address)| is_of_the_vnet(*address)).map(move |(interface, address)| {
        let first = !std::mem::replace(&mut seen[usize::from(address.is_ipv4())], true);
        (interface, address, first)
    })
}

fn is_of_the_vnet(address: IpAddr) -> bool {
    let link_local = match address {
        IpAddr::V4(v4) => v4.is_link_local(),
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    };
    !link_local && !address.is_loopback() && !address.is_unspecified() && !address.is_multicast()
}

fn is_own(name: &str) -> bool {
    OWN_NAMES.iter().any(|own| name.eq_ignore_ascii_case(own))
}

/// True if an interface's name can be part of a host name.
fn is_label(name: &str) -> bool {
    name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
}
