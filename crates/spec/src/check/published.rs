//! Ports of the machine that nodes publish.

use super::Reporter;
use crate::object::{Node, VirtualNetwork};
use crate::units::PublishedPort;

/// A port that a node publishes.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Published {
    pub(super) node: String,
    index: usize,
    pub(super) port: PublishedPort,
}

/// Returns all ports that a virtual network publishes.
pub(super) fn published(vnet: &VirtualNetwork) -> Vec<Published> {
    let of_node = |(name, node): (&String, &Node)| {
        let ports = node.management.iter().flat_map(|management| &management.ports).enumerate();
        let published = |(index, port): (usize, &PublishedPort)| Published {
            node: name.clone(),
            index,
            port: *port,
        };
        ports.map(published).collect::<Vec<_>>()
    };
    vnet.spec.nodes.iter().flat_map(of_node).collect()
}

impl Published {
    pub(super) fn fault(&self, vnet: &str, message: String, hint: &str, reporter: &mut Reporter) {
        let index = self.index.to_string();
        let path = ["spec", "nodes", &self.node, "management", "ports", &index];
        reporter.vnet(vnet, &path, message, hint);
    }
}
