//! Subsets of a virtual network's nodes with their
//! links: merged from one spec into another, or removed.

use std::collections::BTreeSet;

use crate::link::Link;
use crate::object::VirtualNetwork;
use crate::units::Endpoint;

impl VirtualNetwork {
    /// Returns the spec `existing` with these nodes replaced
    /// by this spec's; without `existing`, these nodes alone.
    ///
    /// This spec's links of these nodes replace those in `existing`. An end at a missing
    /// node is removed, and so is a link with less than two ends. Externals are included
    /// with links that name them. Nodes that this spec does not have are ignored.
    #[must_use]
    pub fn only(mut self, nodes: &BTreeSet<String>, existing: Option<&Self>) -> Self {
        // Default names count positions in the whole list, as for the whole spec.
        for (index, link) in self.spec.links.iter_mut().enumerate() {
            link.name.get_or_insert_with(|| format!("link{}", index + 1));
        }
        let mine: BTreeSet<String> =
            nodes.iter().filter(|node| self.spec.nodes.contains_key(*node)).cloned().collect();
        let mut merged = existing.cloned().unwrap_or_else(|| {
            let mut empty = self.clone();
            empty.spec.nodes.clear();
            empty.spec.links.clear();
            empty.spec.externals.clear();
            empty
        });
        let spec = &mut merged.spec;
        spec.nodes.extend(self.spec.nodes.into_iter().filter(|(node, _)| mine.contains(node)));
        spec.links.retain(|link| !link.is_at(&mine));
        let externals = self.spec.externals;
        for mut link in self.spec.links.into_iter().filter(|link| link.is_at(&mine)) {
            let is_there = |end: &Endpoint| match end {
                Endpoint::Port { node, .. } => spec.nodes.contains_key(node),
                // The check reports a missing external.
                Endpoint::External(_) => true,
            };
            if !link.keep(is_there) {
                continue;
            }
            for end in &link.endpoints {
                if let Endpoint::External(name) = end
                    && let Some(external) = externals.get(name)
                {
                    spec.externals.insert(name.clone(), external.clone());
                }
            }
            // An earlier version of the link, from when some of its ends were missing.
            let shares =
                |other: &Link| other.endpoints.iter().any(|end| link.endpoints.contains(end));
            spec.links.retain(|other| other.name != link.name || !shares(other));
            spec.links.push(link);
        }
        merged
    }

    /// Returns the spec without these nodes. Links lose their ends
    /// there; links with less than two ends left are removed.
    #[must_use]
    pub fn without(mut self, nodes: &BTreeSet<String>) -> Self {
        self.spec.nodes.retain(|node, _| !nodes.contains(node));
        self.spec.links.retain_mut(|link| {
            !link.is_at(nodes)
                || link
                    .keep(|end| !matches!(end, Endpoint::Port { node, .. } if nodes.contains(node)))
        });
        self
    }
}

impl Link {
    /// True if one of its ends is at one of these nodes.
    fn is_at(&self, nodes: &BTreeSet<String>) -> bool {
        let mut ends = self.endpoints.iter();
        ends.any(|end| matches!(end, Endpoint::Port { node, .. } if nodes.contains(node)))
    }

    /// Removes ends that `keep` rejects. Returns true if it is still a link.
    fn keep(&mut self, keep: impl Fn(&Endpoint) -> bool) -> bool {
        self.endpoints.retain(&keep);
        self.at.retain(|end, _| keep(end));
        if self.endpoints.len() == 2 {
            // It is no longer a segment.
            self.segment = None;
        }
        self.endpoints.len() >= 2
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Object, SourceFile, parse};

    fn vnet(nodes: &[&str], links: &[&str]) -> VirtualNetwork {
        let node = |name: &&str| {
            format!("    {name}: {{kind: host, interfaces: {{eth0: {{}}, eth1: {{}}}}}}\n")
        };
        let link = |ends: &&str| format!("    - {{endpoints: [{ends}]}}\n");
        let text = format!(
            "apiVersion: pdp/v1\nkind: VirtualNetwork\nmetadata: {{name: red}}\nspec:\n  nodes:\n{}  externals:\n    \
             out: {{interface: A}}\n  links:\n{}",
            nodes.iter().map(node).collect::<String>(),
            links.iter().map(link).collect::<String>()
        );
        let file = SourceFile { name: "red.yaml".into(), text, ..SourceFile::default() };
        match parse(&[file]).unwrap().remove(0).object {
            Object::VirtualNetwork(vnet) => vnet,
            other => panic!("{other:?}"),
        }
    }

    fn of(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    /// Returns nodes, links by name with their ends, and the number of externals.
    fn summary(vnet: &VirtualNetwork) -> (String, Vec<String>, usize) {
        let nodes: Vec<&str> = vnet.spec.nodes.keys().map(String::as_str).collect();
        let link = |link: &Link| {
            let ends: Vec<String> = link.endpoints.iter().map(ToString::to_string).collect();
            format!("{}: {}", link.name.as_deref().unwrap_or("-"), ends.join(" "))
        };
        (nodes.join(" "), vnet.spec.links.iter().map(link).collect(), vnet.spec.externals.len())
    }

    const LINKS: [&str; 4] = [
        "\"a:eth0\", \"b:eth0\"",
        "\"b:eth1\", \"c:eth0\"",
        "\"a:eth1\", \"external:out\"",
        "\"c:eth1\", \"d:eth0\", \"e:eth0\"",
    ];

    #[test]
    fn selected_nodes_bring_their_complete_links() {
        let file = vnet(&["a", "b", "c", "d", "e"], &LINKS);
        let alone = file.clone().only(&of(&["a"]), None);
        assert_eq!(summary(&alone), ("a".into(), vec!["link3: a:eth1 external:out".into()], 1));
        let two = file.clone().only(&of(&["b", "none"]), Some(&alone));
        let links = vec!["link3: a:eth1 external:out".into(), "link1: a:eth0 b:eth0".into()];
        assert_eq!(summary(&two), ("a b".into(), links, 1));
        // A segment first with some of its ends, and later with the others.
        let some = file.clone().only(&of(&["c", "d"]), None);
        assert_eq!(summary(&some).1, ["link4: c:eth1 d:eth0"]);
        let all = file.clone().only(&of(&["e", "a", "b"]), Some(&some));
        let mut links = summary(&all).1;
        links.sort();
        assert_eq!(links, summary(&file.clone().only(&of(&["a", "b", "c", "d", "e"]), None)).1);
        assert_eq!(summary(&all).0, "a b c d e");
    }

    #[test]
    fn removed_nodes_take_their_links_along() {
        let all =
            vnet(&["a", "b", "c", "d", "e"], &LINKS).only(&of(&["a", "b", "c", "d", "e"]), None);
        let left = all.clone().without(&of(&["b", "e"]));
        let links = vec!["link3: a:eth1 external:out".into(), "link4: c:eth1 d:eth0".into()];
        assert_eq!(summary(&left), ("a c d".into(), links, 1));
        assert_eq!(summary(&left.without(&of(&["d"]))).1, ["link3: a:eth1 external:out"]);
        assert_eq!(all.clone().without(&of(&[])), all);
    }
}
