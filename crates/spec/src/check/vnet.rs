//! Checks of a virtual network by itself, and defaults that depend on nothing else.

use std::collections::BTreeMap;

use ipnet::IpNet;

use super::interfaces::is_link_local;
use super::{
    Reporter, bad_inner_name, binds, impairments, inner_name_hint, interfaces, label, management,
    routes, sysctls, tenant_of, volumes,
};
use crate::frame_limit::FrameLimit;
use crate::image::ImageSource;
use crate::limits::*;
use crate::nearest::nearest;
use crate::node_check::NodeCheck;
use crate::object::*;
use crate::path::is_below;
use crate::plane::{DataPlaneNeeds, Plane, Punts};
use crate::tunnel::External;
use crate::units::{BitRate, Cores, EXTERNAL, Endpoint};

pub(super) fn check(vnet: &mut VirtualNetwork, reporter: &mut Reporter) {
    let name = vnet.metadata.name.clone();
    let spec = &mut vnet.spec;
    reporter.too_many(
        &name,
        &["metadata", "labels"],
        "labels",
        vnet.metadata.labels.len(),
        LABELS_MAX,
    );
    reporter.too_many(&name, &["spec", "nodes"], "nodes", spec.nodes.len(), NODES_MAX);
    reporter.too_many(&name, &["spec", "links"], "links", spec.links.len(), LINKS_MAX);
    let externals = spec.externals.len();
    reporter.too_many(&name, &["spec", "externals"], "externals", externals, EXTERNALS_MAX);
    let interfaces = spec.nodes.values().map(|node| node.interfaces.len()).sum();
    let what = "interfaces of all nodes";
    reporter.too_many(&name, &["spec", "nodes"], what, interfaces, VNET_PORTS_MAX);
    if let Some((key, message, hint)) = spec.police.as_ref().and_then(bad_limit) {
        reporter.vnet(&name, &[&["spec", "police"], key].concat(), message, hint);
    }
    let mut nodes = BTreeMap::new();
    for (node_name, node) in &mut spec.nodes {
        let path = ["spec", "nodes", node_name];
        if let Some(why) = bad_inner_name(node_name) {
            let hint = inner_name_hint(node_name);
            reporter.vnet(&name, &path, format!("name {node_name:?} {why}"), hint);
        }
        if let Some(other) = nodes.insert(node_name.to_ascii_lowercase(), node_name.clone()) {
            // DNS ignores case (RFC 4343), so both would be one host.
            let message = format!("name {node_name:?} differs from {other:?} in case only");
            reporter.vnet(&name, &path, message, "rename one");
        }
        if node_name.eq_ignore_ascii_case(EXTERNAL) {
            let message = format!("name {EXTERNAL} is reserved for externals in endpoints");
            reporter.vnet(&name, &path, message, "rename the node");
        }
        let report = &mut |path: &[&str], message, hint| reporter.vnet(&name, path, message, hint);
        NodeCheck { vnet: &name, node: node_name, report }.check(node);
        management::node(&name, node_name, node, reporter);
    }
    for (external_name, external) in &spec.externals {
        let path = ["spec", "externals", external_name];
        if let Some(why) = bad_inner_name(external_name) {
            let hint = inner_name_hint(external_name);
            reporter.vnet(&name, &path, format!("name {external_name:?} {why}"), hint);
        }
        tunnel(&name, external_name, external, reporter);
    }
    links(&name, spec, reporter);
}

/// Returns the fault of a limit, if it has one: the path from the limit, message, and hint.
fn bad_limit(limit: &FrameLimit) -> Option<(&'static [&'static str], String, &'static str)> {
    match (limit.rate, limit.pps) {
        (None, None) => {
            Some((&[], "neither rate nor pps is given".to_owned(), "give rate, pps or both"))
        }
        (Some(rate), _) if rate.0 < RATE_BPS_MIN => {
            let message = format!("rate {rate} is below {}", BitRate(RATE_BPS_MIN));
            Some((&["rate"], message, "give a higher rate, or set the link down instead"))
        }
        _ => None,
    }
}

impl NodeCheck<'_> {
    fn check(&mut self, node: &mut Node) {
        self.labels(&node.labels);
        self.image(&["image"], &node.image);
        interfaces::check(self, node);
        routes::check(self, node);
        sysctls::check(self, node);
        self.files(node);
        binds::check(self, node);
        volumes::check(self, node);
        self.commands(node);
        self.environment(node);
        let resources = &node.resources;
        self.power(&["resources", "cpu"], resources.cpu);
        self.memory(&["resources", "memory"], resources.memory);
        match (node.kind, &mut node.data_plane) {
            (NodeKind::Host, Some(_)) => {
                let hint = "make it kind: router, or remove dataPlane";
                self.fault(&["dataPlane"], "a host has no data plane", hint);
            }
            (NodeKind::Host, None) => {}
            (NodeKind::Router, plane) => {
                let plane = plane.get_or_insert_default();
                if let Some((power, borrow)) = plane.power_mut() {
                    // A tenant's quota counts its guests' guarantees.
                    let counted = tenant_of(self.vnet).is_some() || *borrow == Some(false);
                    if counted {
                        power.get_or_insert(Cores(POWER_MILLICORES_DEFAULT));
                    }
                    if power.is_some() {
                        borrow.get_or_insert(false);
                    }
                }
                self.data_plane(&**plane);
            }
        }
    }

    fn labels(&mut self, labels: &BTreeMap<String, String>) {
        self.too_many(&["labels"], labels.len(), LABELS_MAX);
        for (key, value) in labels {
            if let Some(why) = label::bad_key(key) {
                self.fault(&["labels", key], format!("label {key:?} {why}"), label::KEY_HINT);
            }
            if let Some(why) = label::bad_value(value) {
                let message = format!("value {value:?} of label {key} {why}");
                self.fault(&["labels", key], message, label::VALUE_HINT);
            }
        }
    }

    fn files(&mut self, node: &Node) {
        let places = match node.image.source() {
            ImageSource::Host => &FILE_DIRECTORIES[..],
            _ => &FILE_DIRECTORIES_IMAGE[..],
        };
        self.too_many(&["files"], node.files.len(), FILES_MAX);
        for (path, file) in &node.files {
            let below = |place: &&str| is_below(path, place);
            if self.file(&["files", path], path, file) && !places.iter().any(below) {
                let message = format!("PdP puts no files at {path}");
                let hint = format!(
                    "use a path below one of {}, but not below /run/pdp; put other files into an \
                     image",
                    places.join(", ")
                );
                self.fault(&["files", path], message, hint);
            }
        }
    }

    fn environment(&mut self, node: &Node) {
        self.too_many(&["env"], node.env.len(), ENV_MAX);
        for (name, value) in &node.env {
            if name.is_empty() || name.contains(['=', '\0']) || value.contains('\0') {
                let message = format!("environment variable {name:?} has an invalid name or value");
                self.fault(&["env", name], message, "use letters, digits and _");
            }
        }
    }

    fn data_plane(&mut self, plane: &dyn Plane) {
        plane.check(self);
        let DataPlaneNeeds { punts, slowpath, .. } = plane.needs();
        if let Some((filters, counters)) = slowpath {
            self.too_many(&["dataPlane", "filters"], filters as usize, FILTERS_MAX as usize);
            self.too_many(&["dataPlane", "counters"], counters as usize, COUNTERS_MAX as usize);
        }
        if let Some(punts) = punts {
            self.punts(&punts);
        }
    }

    fn punts(&mut self, Punts { filters, limits, .. }: &Punts<'_>) {
        self.too_many(&["dataPlane", "punt"], filters.len(), PUNT_FILTERS_MAX);
        for (filter_index, filter) in filters.iter().enumerate() {
            let filter_index = filter_index.to_string();
            let path = ["dataPlane", "punt", &filter_index, "match"];
            self.too_many(&path, filter.matches.len(), FIELDS_MAX);
            self.fields(&path, filter.matches.iter().map(|one| one.value.0.len()).sum());
            for (index, one) in filter.matches.iter().enumerate() {
                let index = index.to_string();
                let path = [&path[..], &[&index]].concat();
                self.field(&path, one.offset, one.value.0.len());
                let Some(mask) = &one.mask else { continue };
                let path = [&path[..], &["mask"]].concat();
                if mask.0.len() != one.value.0.len() {
                    let message = format!(
                        "mask {mask} has {}, value {} has {}",
                        crate::count(mask.0.len(), "byte"),
                        one.value,
                        one.value.0.len()
                    );
                    self.fault(&path, message, "give both the same length");
                } else if one.value.0.iter().zip(&mask.0).any(|(value, mask)| value & !mask != 0) {
                    let message = format!("mask {mask} hides bits that value {} has", one.value);
                    self.fault(&path, message, "such a match never applies");
                }
            }
        }
        let classes = [
            ("local", limits.local),
            ("neighbour", limits.neighbour),
            ("exception", limits.exception),
            ("hook", limits.hook),
            ("control", limits.control),
        ];
        for (class, limit) in classes {
            if let Some((key, message, hint)) = bad_limit(&limit) {
                let path = [&["dataPlane", "puntLimits", class], key].concat();
                self.fault(&path, message, hint);
            }
        }
    }
}

fn tunnel(vnet: &str, name: &str, external: &External, reporter: &mut Reporter) {
    let all = external.tunnels();
    let kinds: Vec<_> = all.iter().filter_map(|by| Some(by.tunnel()?.kind().name)).collect();
    if let [one, two, ..] = kinds[..] {
        let hint = "keep one, or none for the whole interface";
        let message = format!("external has {one} and {two}");
        return reporter.vnet(vnet, &["spec", "externals", name, two], message, hint);
    }
    let ends = external.encapsulation().ends();
    let (Some(kind), Some((local, remote))) = (kinds.first(), ends) else { return };
    for (key, address) in [("local", local), ("remote", remote)] {
        if address.is_unspecified() || address.is_multicast() || address.is_loopback() {
            let message = format!("{key} {address} can't be a tunnel's end");
            let path = ["spec", "externals", name, kind, key];
            reporter.vnet(vnet, &path, message, "give a unicast address");
        }
    }
    let path = ["spec", "externals", name, kind, "remote"];
    if local.is_ipv4() != remote.is_ipv4() {
        let message = format!("remote {remote} and local {local} are of different IP versions");
        reporter.vnet(vnet, &path, message, "use IPv4 for both, or IPv6");
    } else if local == remote {
        let hint = "join ports of one virtual network by a link without external";
        reporter.vnet(vnet, &path, format!("remote {remote} equals local"), hint);
    }
}

fn links(vnet: &str, spec: &mut VirtualNetworkSpec, reporter: &mut Reporter) {
    let mut names: BTreeMap<String, usize> = BTreeMap::new();
    let mut used: BTreeMap<Endpoint, usize> = BTreeMap::new();
    for index in 0..spec.links.len() {
        let at = index.to_string();
        let link = &mut spec.links[index];
        let name = link.name.get_or_insert_with(|| format!("link{}", index + 1)).clone();
        if let Some(why) = bad_inner_name(&name) {
            let path = ["spec", "links", &at, "name"];
            let hint = inner_name_hint(&name);
            reporter.vnet(vnet, &path, format!("name {name:?} {why}"), hint);
        }
        if let Some(other) = names.insert(name.clone(), index) {
            let message = format!("name {name} is already used by link {}", other + 1);
            reporter.vnet(vnet, &["spec", "links", &at, "name"], message, "rename one");
        }
        impairments::check(vnet, index, link, reporter);
        let ends = link.endpoints.clone();
        segment(vnet, index, spec, reporter);
        for (which, end) in ends.iter().enumerate() {
            let path = ["spec", "links", &at, "endpoints", &which.to_string()];
            if let Some(hint) = unknown(spec, end) {
                reporter.vnet(vnet, &path, format!("endpoint {end} does not exist"), hint);
            } else if let Some(other) = used.insert(end.clone(), index) {
                let other = spec.links[other].name.as_deref().unwrap_or_default();
                let message = format!("endpoint {end} is already used by {other}");
                reporter.vnet(vnet, &path, message, "an endpoint has one link");
            }
        }
        match ends.as_slice() {
            [a, b] => {
                ends_differ(vnet, spec, a, b, reporter);
                ends_fit(vnet, spec, a, b, reporter);
            }
            ends => {
                for (at, b) in ends.iter().enumerate() {
                    ends[..at].iter().for_each(|a| ends_differ(vnet, spec, a, b, reporter));
                }
            }
        }
    }
    impairments::lines(vnet, spec, reporter);
    impairments::all_queues(vnet, spec, reporter);
    impairments::schedules(vnet, spec, reporter);
    let segments = spec.links.iter().filter_map(|link| link.segment);
    let addresses: u64 = segments.map(|segment| u64::from(segment.addresses)).sum();
    if addresses > VNET_ADDRESSES_MAX {
        let message =
            format!("its segments learn {addresses} addresses, {VNET_ADDRESSES_MAX} at most");
        let hint = "give each segment fewer addresses";
        reporter.vnet(vnet, &["spec", "links"], message, hint);
    }
}

/// Checks if the link at `index` is a valid segment, and fills in its limits.
fn segment(vnet: &str, index: usize, spec: &mut VirtualNetworkSpec, reporter: &mut Reporter) {
    let (at, link) = (index.to_string(), &mut spec.links[index]);
    if link.endpoints.len() == 2 {
        if link.segment.is_some() {
            let path = ["spec", "links", &at, "segment"];
            let hint = "remove segment, or add an endpoint";
            reporter.vnet(vnet, &path, "a link with two ends is not a segment", hint);
        }
        return;
    }
    link.segment.get_or_insert_default();
    let is_tunnel = |end: &Endpoint| match end {
        Endpoint::Port { .. } => false,
        Endpoint::External(name) => {
            spec.externals.get(name).is_some_and(|it| it.encapsulation().tunnel().is_some())
        }
    };
    if link.endpoints.iter().all(is_tunnel) {
        let path = ["spec", "links", &at, "endpoints"];
        let message = "all ends are tunnels, but a segment does not forward between tunnels";
        let hint = "join two of them by a link, or add an interface";
        reporter.vnet(vnet, &path, message, hint);
    }
}

/// Returns advice about an endpoint that does not exist; `None` if it does.
fn unknown(spec: &VirtualNetworkSpec, end: &Endpoint) -> Option<String> {
    let hint = |word: &str, known: Vec<&str>, what: &str| match nearest(word, known.iter().copied())
    {
        Some(nearest) => format!("did you mean {nearest}?"),
        None if known.is_empty() => format!("there are no {what}; add one"),
        None => format!("{what}: {}", known.join(", ")),
    };
    match end {
        Endpoint::External(name) if spec.externals.contains_key(name) => None,
        Endpoint::External(name) => {
            let known = spec.externals.keys().map(String::as_str).collect();
            Some(hint(name, known, "externals"))
        }
        Endpoint::Port { node, interface } => match spec.nodes.get(node) {
            Some(found) if found.interfaces.contains_key(interface) => None,
            Some(found) => {
                let known = found.interfaces.keys().map(String::as_str).collect();
                Some(hint(interface, known, "interfaces"))
            }
            None => {
                let known = spec.nodes.keys().map(String::as_str).collect();
                Some(hint(node, known, "nodes"))
            }
        },
    }
}

/// Returns the interfaces at two ends of a link, if both belong to nodes.
fn interfaces<'a>(
    spec: &'a VirtualNetworkSpec,
    a: &Endpoint,
    b: &Endpoint,
) -> Option<[&'a Interface; 2]> {
    let interface = |end: &Endpoint| match end {
        Endpoint::Port { node, interface } => spec.nodes.get(node)?.interfaces.get(interface),
        Endpoint::External(_) => None,
    };
    if a == b { None } else { Some([interface(a)?, interface(b)?]) }
}

/// Checks that two ends of a link have different MAC
/// addresses and IP addresses, unless both are anycast.
fn ends_differ(
    vnet: &str,
    spec: &VirtualNetworkSpec,
    a: &Endpoint,
    b: &Endpoint,
    reporter: &mut Reporter,
) {
    const HINT: &str =
        "change one, or set anycast: true at both interfaces if they share it on purpose";
    let Some([a_port, b_port]) = interfaces(spec, a, b) else { return };
    let Endpoint::Port { node, interface } = b else { return };
    if a_port.anycast && b_port.anycast {
        return;
    }
    let path = ["spec", "nodes", node.as_str(), "interfaces", interface.as_str()];
    if let (Some(a_mac), Some(b_mac)) = (a_port.mac, b_port.mac)
        && a_mac == b_mac
    {
        let message = format!("mac {b_mac} is also that of {a}, the link's other end");
        reporter.vnet(vnet, &[&path[..], &["mac"]].concat(), message, HINT);
    }
    for (index, address) in b_port.addresses.iter().enumerate() {
        if a_port.addresses.iter().any(|other| other.0.addr() == address.0.addr()) {
            let index = index.to_string();
            let path = [&path[..], &["addresses", &index]].concat();
            let message = format!("address {address} is also that of {a}, the link's other end");
            reporter.vnet(vnet, &path, message, HINT);
        }
    }
}

/// Checks that the interfaces at two ends of a link share
/// a subnet, if both have addresses of an IP version.
fn ends_fit(
    vnet: &str,
    spec: &VirtualNetworkSpec,
    a: &Endpoint,
    b: &Endpoint,
    reporter: &mut Reporter,
) {
    let Some([a_port, b_port]) = interfaces(spec, a, b) else { return };
    let Endpoint::Port { node, interface } = b else { return };
    let path = ["spec", "nodes", node.as_str(), "interfaces", interface.as_str()];
    for v4 in [true, false] {
        // A host prefix implies no subnet: routing software borrows
        // such addresses. A link-local prefix is on every link.
        let of_family = |interface: &Interface| -> Vec<(usize, IpNet)> {
            let addresses = interface.addresses.iter().map(|address| address.0).enumerate();
            addresses
                .filter(|(_, net)| {
                    let is_of_subnet = net.prefix_len() < net.max_prefix_len();
                    net.addr().is_ipv4() == v4 && is_of_subnet && !is_link_local(net.addr())
                })
                .collect()
        };
        let (a_nets, b_nets) = (of_family(a_port), of_family(b_port));
        let (Some((_, a_first)), Some((index, b_first))) = (a_nets.first(), b_nets.first()) else {
            continue;
        };
        let together = |a: &IpNet, b: &IpNet| a.contains(&b.addr()) && b.contains(&a.addr());
        if !a_nets.iter().any(|(_, a)| b_nets.iter().any(|(_, b)| together(a, b))) {
            let message = format!(
                "address {b_first} is outside the subnet {} of {a}, the link's other end",
                a_first.trunc()
            );
            let hint = format!("use an address in {}, or change the other end", a_first.trunc());
            let index = index.to_string();
            let path = [&path[..], &["addresses", &index]].concat();
            reporter.vnet(vnet, &path, message, hint);
        }
    }
}
