//! Table for a single comparison, which stores no routes of the main table.

use ipnet::IpNet;
use pdp_proto::routes::ResolvedRoute;

use super::{MirrorTable, PrefixEntry, evaluate, is_quiet};
use crate::aliases::Alias;
use crate::kernel::{KernelRoute, KernelTable};

impl MirrorTable {
    /// Replaces [`Self::dumped`] for routes of the main table. If the prefix
    /// differs from the previous one, returns that prefix and its outcome.
    /// Routes of the local table must be dumped before.
    pub fn resolve(&mut self, route: KernelRoute) -> Option<(IpNet, ResolvedRoute)> {
        if is_quiet(&route.prefix) || route.table != KernelTable::Main {
            return None;
        }
        let (prefix, routes) = self.dump.as_mut()?.gather.push(route)?;
        self.resolve_prefix(prefix, &routes)
    }

    /// Returns the remaining prefixes at the end of the dump.
    pub fn resolve_rest(&mut self) -> Vec<(IpNet, ResolvedRoute)> {
        let mut rest = Vec::new();
        while let Some((prefix, routes)) = self.dump.as_mut().and_then(|dump| dump.gather.take()) {
            rest.extend(self.resolve_prefix(prefix, &routes));
        }
        self.abort();
        rest
    }

    fn resolve_prefix(
        &mut self,
        prefix: IpNet,
        routes: &[KernelRoute],
    ) -> Option<(IpNet, ResolvedRoute)> {
        let aliases: Vec<Alias> = routes.iter().map(|route| self.alias(route)).collect();
        let mut all = self.entries.remove(&prefix).map(|entry| entry.aliases).unwrap_or_default();
        all.set_table(KernelTable::Main, &aliases);
        self.paths.refresh();
        let resolved = self.paths.resolved(evaluate(&self.paths, &self.ranges, &prefix, &all).1);
        self.paths.collect();
        Some((prefix, resolved?))
    }

    /// Returns the count of objects stored for prefixes
    /// that [`Self::resolve`] has not returned yet.
    pub fn count(&self) -> usize {
        self.dump.as_ref().map_or(0, |dump| dump.gather.objects)
    }

    /// Returns the prefixes of the local table without a
    /// route of the main table. To be called once.
    pub fn resolve_local(&mut self) -> Vec<(IpNet, ResolvedRoute)> {
        self.paths.refresh();
        let entries = std::mem::take(&mut self.entries);
        let resolve = |(prefix, entry): (IpNet, &PrefixEntry)| {
            let outcome = evaluate(&self.paths, &self.ranges, &prefix, &entry.aliases).1;
            Some((prefix, self.paths.resolved(outcome)?))
        };
        entries.iter().filter_map(resolve).collect()
    }
}
