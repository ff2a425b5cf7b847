//! Some nodes of a virtual network: taken from one spec into another, or out of one, with their links.

use std::collections::BTreeSet;

use crate::link::Link;
use crate::object::VirtualNetwork;
use crate::units::Endpoint;

impl VirtualNetwork {
    /// What there is, with these nodes as this spec has them, and all else as it was; without anything there, these
    /// nodes alone. Of the links that were there those at the nodes go, and those of this spec come, as far as their
    /// ends are there: an end at a node that is not is left out, and so is a link that less than two ends are left
    /// of. Externals come with the links that name them. Nodes that this spec does not have are not looked at.
    #[must_use]
    pub fn only(mut self, nodes: &BTreeSet<String>, there: Option<&Self>) -> Self {
        // By place in the whole list, as where all of it is applied.
        for (index, link) in self.spec.links.iter_mut().enumerate() {
            link.name.get_or_insert_with(|| format!("link{}", index + 1));
        }
        let mine: BTreeSet<String> =
            nodes.iter().filter(|node| self.spec.nodes.contains_key(*node)).cloned().collect();
        let mut wanted = there.cloned().unwrap_or_else(|| {
            let mut empty = self.clone();
            empty.spec.nodes.clear();
            empty.spec.links.clear();
            empty.spec.externals.clear();
            empty
        });
        let spec = &mut wanted.spec;
        spec.nodes.extend(self.spec.nodes.into_iter().filter(|(node, _)| mine.contains(node)));
        spec.links.retain(|link| !link.is_at(&mine));
        let externals = self.spec.externals;
        for mut link in self.spec.links.into_iter().filter(|link| link.is_at(&mine)) {
            let is_there = |end: &Endpoint| match end {
                Endpoint::Port { node, .. } => spec.nodes.contains_key(node),
                // One that is nowhere is told of by the check.
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
            // What was there of it, when ends of it were not.
            let shares =
                |other: &Link| other.endpoints.iter().any(|end| link.endpoints.contains(end));
            spec.links.retain(|other| other.name != link.name || !shares(other));
            spec.links.push(link);
        }
        wanted
    }

    /// The rest without these nodes: a link loses its ends there, and goes where less than two are left.
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
    /// Whether one of its ends is at one of these nodes.
    fn is_at(&self, nodes: &BTreeSet<String>) -> bool {
        let mut ends = self.endpoints.iter();
        ends.any(|end| matches!(end, Endpoint::Port { node, .. } if nodes.contains(node)))
    }

    /// Keeps ends; whether it is still a link.
    fn keep(&mut self, keep: impl Fn(&Endpoint) -> bool) -> bool {
        self.endpoints.retain(&keep);
        self.at.retain(|end, _| keep(end));
        if self.endpoints.len() == 2 {
            // It is no segment any more.
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

    /// Nodes, links by name with their ends, and externals.
    fn told(vnet: &VirtualNetwork) -> (String, Vec<String>, usize) {
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
    fn nodes_come_with_the_links_whose_ends_are_there() {
        let file = vnet(&["a", "b", "c", "d", "e"], &LINKS);
        let alone = file.clone().only(&of(&["a"]), None);
        assert_eq!(told(&alone), ("a".into(), vec!["link3: a:eth1 external:out".into()], 1));
        let two = file.clone().only(&of(&["b", "none"]), Some(&alone));
        let links = vec!["link3: a:eth1 external:out".into(), "link1: a:eth0 b:eth0".into()];
        assert_eq!(told(&two), ("a b".into(), links, 1));
        // A segment with those of its ends that are there, and with the others later.
        let some = file.clone().only(&of(&["c", "d"]), None);
        assert_eq!(told(&some).1, ["link4: c:eth1 d:eth0"]);
        let all = file.clone().only(&of(&["e", "a", "b"]), Some(&some));
        let mut links = told(&all).1;
        links.sort();
        assert_eq!(links, told(&file.clone().only(&of(&["a", "b", "c", "d", "e"]), None)).1);
        assert_eq!(told(&all).0, "a b c d e");
    }

    #[test]
    fn nodes_go_with_their_links() {
        let all =
            vnet(&["a", "b", "c", "d", "e"], &LINKS).only(&of(&["a", "b", "c", "d", "e"]), None);
        let left = all.clone().without(&of(&["b", "e"]));
        let links = vec!["link3: a:eth1 external:out".into(), "link4: c:eth1 d:eth0".into()];
        assert_eq!(told(&left), ("a c d".into(), links, 1));
        assert_eq!(told(&left.without(&of(&["d"]))).1, ["link3: a:eth1 external:out"]);
        assert_eq!(all.clone().without(&of(&[])), all);
    }
}
