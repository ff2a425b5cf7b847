//! A table that is made for one comparison, and keeps no routes of the main table.

use ipnet::IpNet;
use pdp_proto::routes::Resolved;

use super::{Entry, Table, evaluate, is_quiet};
use crate::aliases::Alias;
use crate::kernel::{Route, Table as KernelTable};

impl Table {
    /// Instead of [`Self::dumped`] for routes of the main table: the prefix before, when this is
    /// another, and where it leads. Routes of the local table have been dumped before.
    pub fn resolve(&mut self, route: Route) -> Option<(IpNet, Resolved)> {
        if is_quiet(&route.prefix) || route.table != KernelTable::Main {
            return None;
        }
        let (prefix, routes) = self.dump.as_mut()?.gather.push(route)?;
        self.resolve_prefix(prefix, &routes)
    }

    /// What is left at the end of the dump.
    pub fn resolve_rest(&mut self) -> Vec<(IpNet, Resolved)> {
        let mut rest = Vec::new();
        while let Some((prefix, routes)) = self.dump.as_mut().and_then(|dump| dump.gather.take()) {
            rest.extend(self.resolve_prefix(prefix, &routes));
        }
        self.abort();
        rest
    }

    fn resolve_prefix(&mut self, prefix: IpNet, routes: &[Route]) -> Option<(IpNet, Resolved)> {
        let aliases: Vec<Alias> = routes.iter().map(|route| self.alias(route)).collect();
        let mut all = self.entries.remove(&prefix).map(|entry| entry.aliases).unwrap_or_default();
        all.set_table(KernelTable::Main, &aliases);
        self.paths.refresh();
        let resolved = self.paths.resolved(evaluate(&self.paths, &self.ranges, &prefix, &all).1);
        self.paths.collect();
        Some((prefix, resolved?))
    }

    /// Routes of the prefixes that [`Self::resolve`] has not passed on yet, in things.
    pub fn gathered(&self) -> usize {
        self.dump.as_ref().map_or(0, |dump| dump.gather.things)
    }

    /// Prefixes of the local table that have no route of the main table; once.
    pub fn resolve_local(&mut self) -> Vec<(IpNet, Resolved)> {
        self.paths.refresh();
        let entries = std::mem::take(&mut self.entries);
        let resolve = |(prefix, entry): (IpNet, &Entry)| {
            let outcome = evaluate(&self.paths, &self.ranges, &prefix, &entry.aliases).1;
            Some((prefix, self.paths.resolved(outcome)?))
        };
        entries.iter().filter_map(resolve).collect()
    }
}
