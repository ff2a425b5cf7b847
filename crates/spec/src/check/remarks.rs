//! Remarks about specs that are valid, and probably not what their author means.

use std::net::IpAddr;

use super::Intent;
use super::interfaces::is_link_local;
use crate::diagnostic::Diagnostic;
use crate::link::Link;
use crate::object::{Interface, Object, VirtualNetworkSpec};
use crate::parse::Document;
use crate::units::Endpoint;

/// Returns remarks about the virtual networks of `documents`, from which [`super::check`] made
/// `intent`:
/// - a default gateway that no node on the link has, though each has addresses of its family;
/// - different MTUs at the ends of a link.
pub fn remarks(documents: &[Document], intent: &Intent) -> Vec<Diagnostic> {
    let mut all = Vec::new();
    for document in documents {
        let Object::VirtualNetwork(written) = &document.object else { continue };
        let Some(placed) = intent.vnets.get(&written.metadata.name) else { continue };
        let spec = &placed.spec;
        for link in &spec.links {
            let ends = link.endpoints.iter().map(|end| Port::of(spec, end));
            // The spec does not say which stations an external end leads to.
            let Some(ends) = ends.collect::<Option<Vec<_>>>() else { continue };
            all.extend(mtus(document, link, &ends));
            for port in &ends {
                let gateways = port.interface.gateways.iter().enumerate();
                let others = || ends.iter().filter(|other| *other != port);
                let unknown = gateways.filter(|(_, gateway)| {
                    !is_link_local(**gateway) && others().all(|other| other.lacks(gateway))
                });
                all.extend(unknown.map(|(index, gateway)| {
                    document.diagnostic(
                        &port.path(&["gateways", &index.to_string()]),
                        format!("no node on its link has the address of gateway {gateway}"),
                        "give the address to a node on the link, unless routing software sets it",
                    )
                }));
            }
        }
    }
    all
}

/// An interface of a node, as one end of a link.
#[derive(Clone, Copy, PartialEq)]
struct Port<'a> {
    node: &'a str,
    name: &'a str,
    interface: &'a Interface,
}

impl<'a> Port<'a> {
    /// Returns `None` for an external end.
    fn of(spec: &'a VirtualNetworkSpec, end: &'a Endpoint) -> Option<Self> {
        let Endpoint::Port { node, interface: name } = end else { return None };
        let interface = spec.nodes.get(node)?.interfaces.get(name)?;
        Some(Self { node, name, interface })
    }

    /// True if the interface has addresses of the gateway's family, and the gateway is none of
    /// them.
    fn lacks(&self, gateway: &IpAddr) -> bool {
        let addresses = || self.interface.addresses.iter().map(|address| address.0.addr());
        addresses().any(|it| it.is_ipv4() == gateway.is_ipv4())
            && addresses().all(|it| it != *gateway)
    }

    /// Path of a key of the interface.
    fn path<'b>(&self, key: &[&'b str]) -> Vec<&'b str>
    where
        'a: 'b,
    {
        [&["spec", "nodes", self.node, "interfaces", self.name], key].concat()
    }
}

fn mtus(document: &Document, link: &Link, ends: &[Port<'_>]) -> Option<Diagnostic> {
    let with_mtu = ends.iter().filter_map(|port| Some((port.interface.mtu?, port)));
    let (small, at_small) = with_mtu.clone().min_by_key(|(mtu, _)| *mtu)?;
    let (large, at_large) = with_mtu.max_by_key(|(mtu, _)| *mtu)?;
    let name = |port: &Port<'_>| format!("{}:{}", port.node, port.name);
    (small < large).then(|| {
        document.diagnostic(
            &at_small.path(&["mtu"]),
            format!(
                "mtu {small} differs from {large} of {}, at the other end of {}",
                name(at_large),
                link.name.as_deref().unwrap_or_default()
            ),
            "give all ends the same mtu: larger packets are lost here, and OSPF stays in ExStart",
        )
    })
}
