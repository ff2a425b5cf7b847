//! The mirror's copy of the kernel's state, and the updates for guests.
//!
//! Pure: it takes [`KernelEvent`]s and yields [`ToGuest`] messages. Consider a guest that applied a
//! snapshot and all later messages of [`MirrorTable::flush`]. Its state is guaranteed to describe
//! the kernel's treatment of forwarded packets:
//! - The first usable route of the longest prefix applies, in the kernel's order.
//! - These are punted to the kernel: routes over interfaces that are not vports or into an
//!   encapsulation; routes that answer (unreachable, prohibit, throw); prefixes with a route for
//!   only one type of service or one source; address ranges that are local as a whole.
//! - These are never sent, because guests punt such packets anyway: prefixes inside 127.0.0.0/8,
//!   ::1, fe80::/10 and ff00::/8, and multicast neighbours.
//!
//! Limits:
//! - The kernel's dump omits an IPv6 route between the hops of a multipath route of the same prefix
//!   and metric, and so does the copy.
//! - Among several IPv4 default routes of one metric, the kernel prefers one whose gateway answers
//!   (`fib_select_default`). Guests get the copy's first.
//! - Only the tables main and local are followed, and no policy rules.
//! - `routes_max` prefixes and [`NEIGHBOURS_MAX`] neighbours
//!   are followed; more are punted to the kernel.
//!
//! # Dumps
//! A dump is compared with the copy while notifications are still applied. State that a
//! notification touched since the dump began is taken from the notifications, everything else from
//! the dump (mark). State that the dump did not name is removed (sweep).
//!
//! A dump with concurrent changes is not clean: the kernel's walk can skip a route if its neighbour
//! in the tree is removed (both families count what they skip). So a missing route is removed only
//! if the previous dump missed it too. The caller dumps again until a dump is clean.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::net::IpAddr;
use std::time::Instant;

use ipnet::IpNet;
use pdp_proto::routes::{GroupId, RouteDecision, ToGuest, Vport, VportHooks};

use crate::aliases::{Alias, Aliases};
use crate::kernel::{self, DumpKind, KernelEvent, KernelRoute, KernelTable, RoutePlacement};
use crate::paths::{PathDestination, RoutePaths};
use crate::prefixes::Prefixes;

mod dump;
mod fresh;
#[cfg(test)]
mod tests;

use dump::{Dump, DumpedObject, small};

/// Most neighbours that are followed.
pub const NEIGHBOURS_MAX: usize = 65_536;

/// State of one prefix.
#[derive(Debug)]
struct PrefixEntry {
    aliases: Aliases,
    /// Outcome that guests have.
    pushed: PathDestination,
    /// Number of the last dump (by table) that named it, or during which it was touched.
    seen: [u8; 2],
    /// True if it waits for the next flush.
    queued: bool,
    /// Some if guests have it as an address of the router
    /// (true), or as a broadcast address (false).
    pushed_local: Option<bool>,
}

#[derive(Clone, Copy, Debug)]
struct CachedNeighbour {
    mac: Option<[u8; 6]>,
    stale: bool,
}

/// Counts of objects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TableStats {
    /// IPv4 and IPv6 prefixes of the main table.
    pub routes: [u64; 2],
    /// Groups that guests have.
    pub groups: u64,
    /// Neighbours with a MAC address.
    pub neighbours: u64,
    /// Routes beyond `routes_max`: exact after a dump, a lower bound between dumps.
    pub refused: u64,
}

impl PrefixEntry {
    fn new(seen: [u8; 2]) -> Self {
        let (aliases, none) = (Aliases::None, PathDestination::NONE);
        Self { aliases, pushed: none, seen, queued: false, pushed_local: None }
    }
}

/// Copy of the kernel's state; see the module.
#[derive(Debug)]
pub struct MirrorTable {
    paths: RoutePaths,
    routes_max: u64,
    entries: Prefixes<PrefixEntry>,
    /// Prefixes of the main table, by family.
    counts: [u64; 2],
    refused: [[u64; 2]; 2],
    neighbours: HashMap<(u32, IpAddr), CachedNeighbour>,
    dump: Option<Dump>,
    /// Number of the current or last dump, by family and table.
    epochs: [[u8; 2]; 2],
    queued: Vec<IpNet>,
    /// Prefixes without routes, kept while a dump runs.
    tombstones: Vec<IpNet>,
    queued_neighbours: HashSet<(u32, IpAddr)>,
    links_changed: bool,
    pushed_vports: Vec<Option<Vport>>,
    pushed_neighbours: HashMap<(u16, IpAddr), [u8; 6]>,
    pushed_forwarding: (bool, bool),
    /// Frames of each vport that guests punt because of the kernel's hooks.
    hooked: Vec<VportHooks>,
    /// True if guests choose among several next hops, for IPv4
    /// and IPv6; then the values that guests have.
    choosing: [bool; 2],
    pushed_choosing: [bool; 2],
    /// Prefixes whose routes have changed, while a caller watches.
    watched: Option<HashSet<IpNet>>,
    /// Kinds that the kernel may have changed without notification.
    suspects: HashSet<DumpKind>,
    /// IPv6 prefixes that are local as a whole; then true
    /// if they have changed since the last flush.
    ranges: BTreeSet<IpNet>,
    ranges_changed: bool,
    /// Time at which the next route expires.
    expiry: Option<Instant>,
}

impl MirrorTable {
    /// Makes an empty table, for a router with these interfaces and at most `routes_max` prefixes
    /// in the main table. Group numbers start at `first_group`.
    pub fn new(vports: Vec<String>, routes_max: u64, first_group: GroupId) -> Self {
        let told_vports = vec![None; vports.len()];
        Self {
            paths: RoutePaths::new(vports, first_group),
            routes_max,
            entries: Prefixes::default(),
            counts: [0; 2],
            refused: [[0; 2]; 2],
            neighbours: HashMap::new(),
            dump: None,
            epochs: [[0; 2]; 2],
            queued: Vec::new(),
            tombstones: Vec::new(),
            queued_neighbours: HashSet::new(),
            links_changed: false,
            pushed_vports: told_vports,
            pushed_neighbours: HashMap::new(),
            pushed_forwarding: (false, false),
            hooked: Vec::new(),
            choosing: [true; 2],
            pushed_choosing: [true; 2],
            watched: None,
            suspects: HashSet::new(),
            ranges: BTreeSet::new(),
            ranges_changed: false,
            expiry: None,
        }
    }

    /// Starts recording prefixes whose routes change; discards earlier records.
    pub fn watch(&mut self) {
        self.watched = Some(HashSet::new());
    }

    /// Returns the prefixes whose routes changed since [`Self::watch`], and stops recording.
    pub fn take_watched(&mut self) -> HashSet<IpNet> {
        self.watched.take().unwrap_or_default()
    }

    /// Returns the kinds to dump again. Since the last call, the kernel may
    /// have changed them without notification (routes of an interface that goes
    /// down, or whose preferred source is removed).
    pub fn take_suspects(&mut self) -> HashSet<DumpKind> {
        if self.refused.as_flattened().iter().any(|count| *count > 0)
            && self.counts.iter().sum::<u64>() < self.routes_max
        {
            self.suspects
                .extend(DumpKind::ALL.iter().filter(|kind| matches!(kind, DumpKind::Routes(..))));
        }
        std::mem::take(&mut self.suspects)
    }

    /// Sets what guests punt because of hooks: frames by
    /// vport, and choices among next hops by family.
    pub fn set_hooked(&mut self, hooked: &[VportHooks], multipath: [bool; 2]) {
        self.hooked = hooked.to_vec();
        self.choosing = multipath.map(|kernel| !kernel);
        self.links_changed = true;
    }

    /// Returns the time at which [`Self::expire`] has work.
    pub fn expiry(&self) -> Option<Instant> {
        self.expiry
    }

    /// Schedules a dump if a route has expired. The kernel sends no
    /// notification of this, or of an extended lifetime.
    pub fn expire(&mut self, now: Instant) {
        if self.expiry.take_if(|at| *at <= now).is_some() {
            self.suspects.insert(DumpKind::Routes(true, KernelTable::Main));
        }
    }

    /// True if [`Self::take_suspects`] would return any.
    pub fn has_suspects(&self) -> bool {
        !self.suspects.is_empty()
    }

    /// Returns the counts of objects.
    pub fn counts(&self) -> TableStats {
        TableStats {
            routes: self.counts,
            groups: self.paths.groups().count() as u64,
            neighbours: self.neighbours.values().filter(|n| n.mac.is_some()).count() as u64,
            refused: self.refused.as_flattened().iter().sum(),
        }
    }

    /// Applies a notification.
    pub fn apply(&mut self, event: &KernelEvent) {
        if let Some(dump) = &mut self.dump {
            let route = match event {
                KernelEvent::Route(route, _) | KernelEvent::RouteGone(route) => {
                    Some(DumpKind::Routes(is_v6(&route.prefix), route.table))
                }
                _ => None,
            };
            let small = small(event);
            if route == Some(dump.kind) || small.as_ref().is_some_and(|key| key.kind() == dump.kind)
            {
                dump.clean = false;
            }
            dump.touched.extend(small.filter(|key| key.kind() == dump.kind));
        }
        match event {
            KernelEvent::Route(route, placement) => self.route(route, *placement),
            KernelEvent::RouteGone(route) => self.route_gone(route),
            KernelEvent::Address { v6: false } => {
                self.suspects.insert(DumpKind::Routes(false, KernelTable::Local));
                self.suspects.insert(DumpKind::Routes(false, KernelTable::Main));
            }
            KernelEvent::Address { v6: true } => {}
            other => self.small(other),
        }
    }

    fn small(&mut self, event: &KernelEvent) {
        match event {
            KernelEvent::Link(link) => {
                self.links_changed = true;
                if self.paths.set_link(link.clone()) {
                    self.link_changed();
                }
            }
            KernelEvent::LinkGone(ifindex) => {
                if self.paths.remove_link(*ifindex) {
                    self.links_changed = true;
                    self.link_changed();
                }
            }
            KernelEvent::Conf { v6, ifindex, forwarding, ignore_linkdown } => {
                // Forwarding may differ between vports.
                self.links_changed |= !v6 && forwarding.is_some();
                if self.paths.set_conf(*v6, *ifindex, *forwarding, *ignore_linkdown) {
                    self.link_changed();
                }
            }
            KernelEvent::ConfGone { v6, ifindex } => self.paths.remove_conf(*v6, *ifindex),
            KernelEvent::Neighbour { address, .. } if address.is_multicast() => {}
            KernelEvent::Neighbour { ifindex, address, mac, stale } => {
                let key = (*ifindex, *address);
                if mac.is_none() {
                    self.neighbours.remove(&key);
                } else if self.neighbours.len() < NEIGHBOURS_MAX
                    || self.neighbours.contains_key(&key)
                {
                    self.neighbours.insert(key, CachedNeighbour { mac: *mac, stale: *stale });
                }
                self.queued_neighbours.insert(key);
            }
            KernelEvent::Nexthop(id, nexthop) => self.paths.set_object(*id, nexthop.clone()),
            KernelEvent::NexthopGone(id) => {
                self.paths.remove_object(*id);
                self.purge();
            }
            KernelEvent::Route(..) | KernelEvent::RouteGone(_) | KernelEvent::Address { .. } => {}
        }
    }

    fn link_changed(&mut self) {
        let quiet = |kind: &&DumpKind| {
            matches!(kind, DumpKind::Nexthops | DumpKind::Neighbours | DumpKind::Routes(..))
        };
        self.suspects.extend(DumpKind::ALL.iter().filter(quiet));
        self.purge();
    }

    /// Removes the routes that the kernel removed without notification.
    fn purge(&mut self) {
        let gone = self.paths.gone();
        if gone.is_empty() {
            return;
        }
        let is_gone = |alias: &Alias| gone.contains(&alias.destination);
        let affected = |entry: &PrefixEntry| entry.aliases.as_slice().iter().any(is_gone);
        let prefixes: Vec<IpNet> =
            self.entries.iter().filter(|(_, e)| affected(e)).map(|(prefix, _)| prefix).collect();
        for prefix in prefixes {
            self.edit(prefix, |aliases| aliases.retain(|alias| !is_gone(alias)));
        }
    }

    fn route(&mut self, route: &KernelRoute, placement: RoutePlacement) {
        if is_quiet(&route.prefix) {
            return;
        }
        let alias = self.alias(route);
        if self.refuses(&route.prefix, route.table) {
            return;
        }
        self.touch(route);
        let is_ambiguous = |entry: &PrefixEntry| entry.aliases.is_ambiguous(&alias, placement);
        if alias.v6 && self.entries.get(&route.prefix).is_some_and(is_ambiguous) {
            self.suspects.insert(DumpKind::Routes(true, route.table));
        }
        self.edit(route.prefix, |aliases| aliases.insert(alias, placement));
    }

    fn route_gone(&mut self, route: &KernelRoute) {
        if is_quiet(&route.prefix) {
            return;
        }
        let v6 = is_v6(&route.prefix);
        let refused = &mut self.refused[usize::from(v6)][route.table as usize];
        if *refused > 0 && self.entries.get(&route.prefix).is_none() {
            *refused -= 1;
        }
        self.touch(route);
        let mut alias = self.alias(route);
        let kernel::KernelDestination::Hops(gone) = &route.destination else {
            return self.edit(route.prefix, |aliases| aliases.remove(&alias));
        };
        // IPv6 reports the removed hops of a multipath route.
        let siblings = self.entries.get(&route.prefix).and_then(|e| e.aliases.siblings(&alias));
        let (true, Some(siblings)) = (route.sibling, siblings.copied()) else {
            return self.edit(route.prefix, |aliases| aliases.remove(&alias));
        };
        let mut left = self.paths.kernel_hops(siblings.destination).unwrap_or_default();
        left.retain(|hop| {
            !gone.iter().any(|gone| (gone.ifindex, gone.gateway) == (hop.ifindex, hop.gateway))
        });
        let empty = left.is_empty();
        alias = siblings;
        if !empty {
            let mtu = self.paths.mtu(siblings.destination);
            alias.destination = self.paths.find(v6, &kernel::KernelDestination::Hops(left), mtu);
        }
        self.edit(route.prefix, |aliases| match empty {
            true => aliases.remove(&siblings),
            false => aliases.insert(alias, RoutePlacement::Replace),
        });
    }

    fn alias(&mut self, route: &KernelRoute) -> Alias {
        self.expiry = self.expiry.into_iter().chain(route.expires).min();
        Alias {
            metric: route.metric,
            identity: route.identity,
            destination: self.paths.find(is_v6(&route.prefix), &route.destination, route.mtu),
            selector: route.selector,
            table: route.table,
            v6: is_v6(&route.prefix),
            object: matches!(route.destination, kernel::KernelDestination::Nexthop(_)),
            sibling: route.sibling,
        }
    }

    /// Refuses and counts a new prefix if the table is full.
    fn refuses(&mut self, prefix: &IpNet, table: KernelTable) -> bool {
        let full = self.counts.iter().sum::<u64>() >= self.routes_max;
        let refuses = full && table == KernelTable::Main && self.entries.get(prefix).is_none();
        if refuses {
            self.refused[usize::from(is_v6(prefix))][table as usize] += 1;
        }
        refuses
    }

    /// Marks a prefix as updated by a notification, which takes precedence over a running dump.
    fn touch(&mut self, route: &KernelRoute) {
        let v6 = is_v6(&route.prefix);
        if self.is_dumping(v6, route.table) {
            let epoch = self.epochs[usize::from(v6)][route.table as usize];
            self.entry(route.prefix).seen[route.table as usize] = epoch;
        }
    }

    fn is_dumping(&self, v6: bool, table: KernelTable) -> bool {
        self.dump.as_ref().is_some_and(|dump| dump.kind == DumpKind::Routes(v6, table))
    }

    /// Returns the entry of a prefix; makes it if necessary.
    fn entry(&mut self, prefix: IpNet) -> &mut PrefixEntry {
        let seen = self.seen_of_new(is_v6(&prefix));
        self.entries.get_or_insert_with(&prefix, || PrefixEntry::new(seen))
    }

    /// Returns the initial `seen` of a new entry: not named by a running dump.
    fn seen_of_new(&self, v6: bool) -> [u8; 2] {
        [KernelTable::Local, KernelTable::Main].map(|table| {
            let epoch = self.epochs[usize::from(v6)][table as usize];
            epoch.wrapping_sub(u8::from(self.is_dumping(v6, table)))
        })
    }

    /// Changes the routes of a prefix, and queues it for the next flush.
    fn edit(&mut self, prefix: IpNet, edit: impl FnOnce(&mut Aliases)) {
        let v6 = is_v6(&prefix);
        let entry = self.entry(prefix);
        let old = entry.aliases.clone();
        edit(&mut entry.aliases);
        if entry.aliases == old && (entry.queued || old != Aliases::None) {
            return;
        }
        let new = entry.aliases.clone();
        if !std::mem::replace(&mut entry.queued, true) {
            self.queued.push(prefix);
        }
        if let Some(watched) = &mut self.watched {
            watched.insert(prefix);
        }
        let main = |aliases: &Aliases| {
            aliases.as_slice().iter().any(|alias| alias.table == KernelTable::Main)
        };
        self.counts[usize::from(v6)] += u64::from(main(&new));
        self.counts[usize::from(v6)] -= u64::from(main(&old));
        let is_range = |aliases: &Aliases| {
            let local = |alias: &Alias| alias.table == KernelTable::Local;
            v6 && !is_host(&prefix) && aliases.as_slice().iter().any(local)
        };
        if is_range(&new) != is_range(&old) {
            self.ranges_changed = true;
            if is_range(&new) {
                self.ranges.insert(prefix);
            } else {
                self.ranges.remove(&prefix);
            }
        }
        new.as_slice().iter().for_each(|alias| self.paths.add_reference(alias.destination));
        old.as_slice().iter().for_each(|alias| self.paths.release(alias.destination));
    }

    // Dumps

    /// Begins a dump of this kind. All notifications that were sent before it must be applied.
    pub fn begin(&mut self, kind: DumpKind) {
        self.suspects.remove(&kind);
        if let DumpKind::Routes(v6, table) = kind {
            let epoch = &mut self.epochs[usize::from(v6)][table as usize];
            *epoch = epoch.wrapping_add(1);
            self.refused[usize::from(v6)][table as usize] = 0;
        }
        self.dump = Some(Dump::new(kind));
    }

    /// Applies one object of the dump. All notifications read so far must be applied.
    pub fn dumped(&mut self, event: KernelEvent) {
        let Some(dump) = &mut self.dump else { return };
        if let KernelEvent::Route(route, _) = event {
            // Only this table is compared, whatever the kernel returns.
            if DumpKind::Routes(is_v6(&route.prefix), route.table) != dump.kind
                || is_quiet(&route.prefix)
            {
                return;
            }
            if let Some((prefix, routes)) = dump.gather.push(route) {
                self.compare(prefix, &routes);
            }
        } else if let Some(key) = small(&event)
            && key.kind() == dump.kind
            && !dump.touched.contains(&key)
        {
            dump.named.insert(key);
            self.small(&event);
        }
    }

    /// Applies the dump's routes of a prefix, unless a notification is newer.
    fn compare(&mut self, prefix: IpNet, routes: &[KernelRoute]) {
        let Some(DumpKind::Routes(v6, table)) = self.dump.as_ref().map(|dump| dump.kind) else {
            return;
        };
        if self.refuses(&prefix, table) {
            return;
        }
        let epoch = self.epochs[usize::from(v6)][table as usize];
        let entry = self.entry(prefix);
        if entry.seen[table as usize] == epoch {
            return;
        }
        entry.seen[table as usize] = epoch;
        let aliases: Vec<Alias> = routes.iter().map(|route| self.alias(route)).collect();
        let entry = self.entry(prefix);
        let same =
            entry.aliases.as_slice().iter().filter(|alias| alias.table == table).eq(&aliases);
        if !same {
            self.edit(prefix, |all| all.set_table(table, &aliases));
        }
    }

    /// Aborts the dump.
    pub fn abort(&mut self) {
        self.dump = None;
        self.queue_tombstones();
    }

    /// Ends a complete dump, and sweeps. `interrupted` is true if the kernel reported concurrent
    /// changes (`NLM_F_DUMP_INTR`). Returns true if the dump was clean.
    pub fn end(&mut self, interrupted: bool) -> bool {
        while let Some((prefix, routes)) = self.dump.as_mut().and_then(|dump| dump.gather.take()) {
            self.compare(prefix, &routes);
        }
        let Some(dump) = self.dump.take() else { return false };
        let clean = dump.clean && !interrupted;
        match dump.kind {
            DumpKind::Routes(v6, table) => self.sweep(v6, table, clean),
            _ if interrupted => {}
            _ => {
                for key in self.small_keys(dump.kind) {
                    if !dump.named.contains(&key) && !dump.touched.contains(&key) {
                        self.small(&key.gone());
                    }
                }
            }
        }
        self.queue_tombstones();
        clean
    }

    /// Queues the entries without routes, which were kept so
    /// that the dump would not restore their routes.
    fn queue_tombstones(&mut self) {
        self.queued.append(&mut self.tombstones);
    }

    fn sweep(&mut self, v6: bool, table: KernelTable, clean: bool) {
        let epoch = self.epochs[usize::from(v6)][table as usize];
        let missed_once = epoch.wrapping_sub(1);
        let missing = |(prefix, entry): &(IpNet, &PrefixEntry)| {
            let seen = entry.seen[table as usize];
            let of_table = |alias: &Alias| alias.table == table;
            is_v6(prefix) == v6
                && seen != epoch
                && (clean || seen != missed_once)
                && entry.aliases.as_slice().iter().any(of_table)
        };
        let gone: Vec<IpNet> =
            self.entries.iter().filter(missing).map(|(prefix, _)| prefix).collect();
        for prefix in gone {
            self.edit(prefix, |aliases| aliases.set_table(table, &[]));
        }
    }

    fn small_keys(&self, kind: DumpKind) -> Vec<DumpedObject> {
        match kind {
            DumpKind::Links => {
                self.paths.link_indices().into_iter().map(DumpedObject::Link).collect()
            }
            DumpKind::Neighbours => self
                .neighbours
                .keys()
                .map(|(i, address)| DumpedObject::Neighbour(*i, *address))
                .collect(),
            DumpKind::Nexthops => {
                self.paths.object_ids().into_iter().map(DumpedObject::Object).collect()
            }
            // The settings of an interface are removed with the interface.
            DumpKind::Conf(_) | DumpKind::Routes(..) => Vec::new(),
        }
    }

    // Updates for guests

    /// Sends the changes since the last flush, in an order that
    /// removes no route before its replacement exists.
    pub fn flush(&mut self, push: &mut impl FnMut(ToGuest)) {
        let refreshed = self.paths.refresh();
        self.flush_vports(push);
        refreshed.groups.into_iter().for_each(&mut *push);
        if std::mem::take(&mut self.ranges_changed) || refreshed.outcomes_changed {
            let differs = |(prefix, entry): &(IpNet, &PrefixEntry)| {
                let outcome = evaluate(&self.paths, &self.ranges, prefix, &entry.aliases).1;
                !entry.queued && outcome != entry.pushed
            };
            let prefixes: Vec<IpNet> =
                self.entries.iter().filter(differs).map(|(prefix, _)| prefix).collect();
            self.queued.extend(prefixes);
        }
        let mut gone = Vec::new();
        for prefix in std::mem::take(&mut self.queued) {
            self.flush_prefix(prefix, push, &mut gone);
        }
        gone.into_iter().for_each(|prefix| push(ToGuest::RouteGone(prefix)));
        self.paths.collect().into_iter().for_each(|group| push(ToGuest::GroupGone(group)));
        for key in std::mem::take(&mut self.queued_neighbours) {
            self.flush_neighbour(key, push);
        }
        let forwarding = (self.paths.forwarding(false), self.paths.forwarding(true));
        if self.pushed_forwarding != forwarding {
            self.pushed_forwarding = forwarding;
            push(ToGuest::Forwarding { v4: forwarding.0, v6: forwarding.1 });
        }
        if self.pushed_choosing != self.choosing {
            self.pushed_choosing = self.choosing;
            let [v4, v6] = self.choosing;
            push(ToGuest::Choosing { v4, v6 });
        }
    }

    fn flush_vports(&mut self, push: &mut impl FnMut(ToGuest)) {
        if !std::mem::take(&mut self.links_changed) {
            return;
        }
        for index in 0..self.paths.vports() {
            let pushed = &mut self.pushed_vports[usize::from(index)];
            let now = match (self.paths.vport_link(index), &*pushed) {
                (Some(link), _) => Some(Vport {
                    index,
                    mac: link.mac,
                    mtu: link.mtu,
                    up: link.up && link.carrier,
                    macs: self.paths.macs_over(link.ifindex),
                    hooked: self.hooked.get(usize::from(index)).copied().unwrap_or_default(),
                    forwards_v4: self.paths.forwards_v4(link.ifindex),
                }),
                (None, Some(gone)) => Some(Vport { up: false, ..gone.clone() }),
                (None, None) => None,
            };
            if *pushed != now {
                pushed.clone_from(&now);
                now.into_iter().for_each(|vport| push(ToGuest::Vport(vport)));
            }
        }
        self.queued_neighbours.extend(self.neighbours.keys());
        // Interfaces that are no longer vports.
        let names: Vec<_> =
            (0..self.paths.vports()).map(|v| self.paths.vport_link(v).map(|l| l.ifindex)).collect();
        let stranded: Vec<_> = self
            .pushed_neighbours
            .keys()
            .filter(|(vport, address)| {
                names[usize::from(*vport)]
                    .is_none_or(|ifindex| !self.neighbours.contains_key(&(ifindex, *address)))
            })
            .copied()
            .collect();
        for (vport, address) in stranded {
            self.pushed_neighbours.remove(&(vport, address));
            push(ToGuest::Neighbour { vport, address, mac: None });
        }
    }

    fn flush_neighbour(&mut self, key: (u32, IpAddr), push: &mut impl FnMut(ToGuest)) {
        let (ifindex, address) = key;
        let Some(vport) = self.paths.vport(ifindex) else { return };
        let mac = self.neighbours.get(&key).and_then(|neighbour| neighbour.mac);
        let pushed = match mac {
            Some(mac) => self.pushed_neighbours.insert((vport, address), mac),
            None => self.pushed_neighbours.remove(&(vport, address)),
        };
        if pushed != mac {
            push(ToGuest::Neighbour { vport, address, mac });
        }
    }

    fn flush_prefix(
        &mut self,
        prefix: IpNet,
        push: &mut impl FnMut(ToGuest),
        gone: &mut Vec<IpNet>,
    ) {
        let Some(entry) = self.entries.get_mut(&prefix) else { return };
        let (local, outcome) = evaluate(&self.paths, &self.ranges, &prefix, &entry.aliases);
        entry.queued = false;
        let pushed = std::mem::replace(&mut entry.pushed, outcome);
        let told_local = std::mem::replace(&mut entry.pushed_local, local);
        let empty = entry.aliases == Aliases::None;
        if let Some(own) = local.filter(|_| local != told_local) {
            push(ToGuest::Local { address: prefix.addr(), own });
        }
        if outcome != pushed {
            self.paths.add_use(outcome).into_iter().for_each(&mut *push);
            match self.target(outcome) {
                Some(target) => push(ToGuest::Route { prefix, target }),
                None => gone.push(prefix),
            }
            self.paths.remove_use(pushed);
        }
        if told_local.is_some() && local.is_none() {
            push(ToGuest::LocalGone(prefix.addr()));
        }
        let v6 = is_v6(&prefix);
        let dumping = |table| self.is_dumping(v6, table);
        if !empty {
            return;
        }
        if dumping(KernelTable::Local) || dumping(KernelTable::Main) {
            self.tombstones.push(prefix);
        } else {
            self.entries.remove(&prefix);
        }
    }

    fn target(&self, outcome: PathDestination) -> Option<RouteDecision> {
        match outcome {
            PathDestination::NONE => None,
            PathDestination::PUNT => Some(RouteDecision::Punt),
            PathDestination::DROP => Some(RouteDecision::Drop),
            path => self.paths.group(path).map(RouteDecision::Group),
        }
    }

    /// Sends the part of a snapshot before its routes, as of the last flush.
    pub fn snapshot_head(&self, push: &mut impl FnMut(ToGuest)) {
        push(ToGuest::Begin);
        let (v4, v6) = self.pushed_forwarding;
        push(ToGuest::Forwarding { v4, v6 });
        let [v4, v6] = self.pushed_choosing;
        push(ToGuest::Choosing { v4, v6 });
        self.pushed_vports.iter().flatten().for_each(|vport| push(ToGuest::Vport(vport.clone())));
        for ((vport, address), mac) in &self.pushed_neighbours {
            push(ToGuest::Neighbour { vport: *vport, address: *address, mac: Some(*mac) });
        }
        self.paths.groups().for_each(&mut *push);
    }

    /// Sends up to `count` prefixes of a snapshot after `from`.
    /// Returns the prefix after which to continue.
    ///
    /// Parts may be taken between flushes: each has the current state of its
    /// prefixes, and later flushes send later changes.
    pub fn snapshot_routes(
        &self,
        from: Option<IpNet>,
        count: usize,
        push: &mut impl FnMut(ToGuest),
    ) -> Option<IpNet> {
        let mut last = None;
        for (prefix, entry) in self.entries.after(from).take(count) {
            if let Some(own) = entry.pushed_local {
                push(ToGuest::Local { address: prefix.addr(), own });
            }
            if let Some(target) = self.target(entry.pushed) {
                push(ToGuest::Route { prefix, target });
            }
            last = Some(prefix);
        }
        last
    }

    /// Returns the neighbour's interface if the mirror must ask the kernel to confirm the MAC
    /// address. Then returns `None` until the kernel reports the entry as stale again.
    pub fn used(&mut self, vport: u16, address: IpAddr) -> Option<u32> {
        let ifindex = self.paths.vport_link(vport)?.ifindex;
        let neighbour = self.neighbours.get_mut(&(ifindex, address))?;
        std::mem::take(&mut neighbour.stale).then_some(ifindex)
    }

    /// Returns the interface of a gateway whose MAC address guests lack; `None` if none of their
    /// routes has the gateway, or the kernel knows it.
    pub fn unresolved_interface(&self, vport: u16, address: IpAddr) -> Option<u32> {
        let ifindex = self.paths.vport_link(vport)?.ifindex;
        let is_known = self.neighbours.contains_key(&(ifindex, address));
        (!is_known && self.paths.is_gateway(vport, address)).then_some(ifindex)
    }
}

fn is_v6(prefix: &IpNet) -> bool {
    matches!(prefix, IpNet::V6(_))
}

/// True for destinations whose packets guests always punt.
fn is_quiet(prefix: &IpNet) -> bool {
    match prefix {
        IpNet::V4(v4) => v4.addr().is_loopback() && v4.prefix_len() >= 8,
        IpNet::V6(v6) => {
            let address = v6.addr();
            (address.is_loopback() && v6.prefix_len() == 128)
                || (address.is_unicast_link_local() && v6.prefix_len() >= 10)
                || (address.is_multicast() && v6.prefix_len() >= 8)
        }
    }
}

fn is_host(prefix: &IpNet) -> bool {
    prefix.prefix_len() == prefix.max_prefix_len()
}

/// True if the prefix is inside a shorter one that is local as a whole. Then the kernel ignores its
/// routes in the main table (IPv6; IPv4 merges both tables).
fn is_hidden(ranges: &BTreeSet<IpNet>, prefix: &IpNet) -> bool {
    let mut wider = *prefix;
    !ranges.is_empty()
        && std::iter::from_fn(|| {
            wider = wider.supernet()?;
            Some(ranges.contains(&wider))
        })
        .any(|is_range| is_range)
}

/// Returns two values: some if the prefix is an address of the router itself (true) or a broadcast
/// address (false), and the outcome of the first usable route.
fn evaluate(
    paths: &RoutePaths,
    ranges: &BTreeSet<IpNet>,
    prefix: &IpNet,
    aliases: &Aliases,
) -> (Option<bool>, PathDestination) {
    let is_own = |alias: &&Alias| alias.destination == PathDestination::LOCAL;
    let is_local =
        |alias: &&Alias| is_own(alias) || alias.destination == PathDestination::BROADCAST;
    let aliases = aliases.as_slice();
    let mut locals = aliases.iter().filter(|alias| is_host(prefix) && is_local(alias)).peekable();
    let local = locals.peek().is_some().then(|| locals.any(|alias| is_own(&alias)));
    let hides = is_hidden(ranges, prefix);
    let mut routes = aliases
        .iter()
        .filter(|alias| !(local.is_some() && is_local(alias)))
        .filter(|alias| !(hides && alias.table == KernelTable::Main));
    if routes.clone().any(|alias| alias.selector != 0) {
        return (local, PathDestination::PUNT);
    }
    let outcome = routes
        .find_map(|alias| {
            Some(paths.outcome(alias.destination)).filter(|o| *o != PathDestination::NONE)
        })
        .unwrap_or(PathDestination::NONE);
    (local, outcome)
}
