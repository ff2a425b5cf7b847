//! The mirror's copy of the kernel's state, and what to tell guests of it.
//!
//! Pure: fed with [`Event`]s, it yields [`ToGuest`] messages. Promises that a guest that applied
//! a snapshot and all that [`Table::flush`] gave since then holds what the kernel would do with a
//! packet that is forwarded:
//! - the first usable route of the longest prefix, in the kernel's order;
//! - left to the kernel (punted): routes over what is no vport or into an encapsulation, routes
//!   that answer (unreachable, prohibit, throw), prefixes with a route for one type of service or
//!   one source only, address ranges that are local as a whole;
//! - never told, because guests hand such packets over by themselves: prefixes inside 127.0.0.0/8,
//!   ::1, fe80::/10 and ff00::/8, and multicast neighbours.
//!
//! Limits: the kernel's dump leaves out an IPv6 route that stands between the hops of a multipath
//! route of the same prefix and metric, and so does the copy; among several IPv4 default routes of
//! one metric the kernel prefers one whose gateway answers (`fib_select_default`), the copy's first
//! is what guests get; tables other than main and local and policy rules are not followed.
//! `routes_max` prefixes, [`NEIGHBOURS_MAX`] neighbours; more are left to the kernel.
//!
//! # Dumps
//! A dump is compared with the copy while notifications go on being applied. What a notification
//! touched since the dump began is taken from the notifications, everything else from the dump
//! (mark), and what the dump did not name goes (sweep). A dump that ran beside changes is not
//! clean: the kernel's walk can pass over a route whose neighbour in the tree went away (both
//! families count what they skip), so what is missing then goes only when the dump before missed
//! it too, and the caller dumps again until one is clean.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::net::IpAddr;
use std::time::Instant;

use ipnet::IpNet;
use pdp_proto::routes::{GroupId, Hooked, Target, ToGuest, Vport};

use crate::aliases::{Alias, Aliases};
use crate::kernel::{self, Event, Kind, Placement, Route, Table as KernelTable};
use crate::paths::{Destination, Paths};
use crate::prefixes::Prefixes;

mod dump;
mod fresh;
#[cfg(test)]
mod tests;

use dump::{Dump, Small, small};

/// Neighbours that are followed.
pub const NEIGHBOURS_MAX: usize = 65_536;

/// One prefix.
#[derive(Debug)]
struct Entry {
    aliases: Aliases,
    /// What guests were told: an outcome.
    told: Destination,
    /// Number of the last dump (by table) that named it, or during which it was touched.
    seen: [u8; 2],
    /// Waits for the next flush.
    queued: bool,
    /// Guests were told that it is an address of the router (true) or one of its broadcast addresses.
    told_local: Option<bool>,
}

#[derive(Clone, Copy, Debug)]
struct Neighbour {
    mac: Option<[u8; 6]>,
    stale: bool,
}

/// How many of what there is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// IPv4 and IPv6 prefixes of the main table.
    pub routes: [u64; 2],
    /// Groups told to guests.
    pub groups: u64,
    /// Neighbours with a link address.
    pub neighbours: u64,
    /// Routes beyond `routes_max`: exact after a dump, and at least this between dumps.
    pub refused: u64,
}

impl Entry {
    fn new(seen: [u8; 2]) -> Self {
        let (aliases, told) = (Aliases::None, Destination::NONE);
        Self { aliases, told, seen, queued: false, told_local: None }
    }
}

/// See the module.
#[derive(Debug)]
pub struct Table {
    paths: Paths,
    routes_max: u64,
    entries: Prefixes<Entry>,
    /// Prefixes of the main table, by family.
    counts: [u64; 2],
    refused: [[u64; 2]; 2],
    neighbours: HashMap<(u32, IpAddr), Neighbour>,
    dump: Option<Dump>,
    /// Number of the current or last dump, by family and table.
    epochs: [[u8; 2]; 2],
    queued: Vec<IpNet>,
    /// Prefixes without routes, kept while a dump runs.
    tombstones: Vec<IpNet>,
    queued_neighbours: HashSet<(u32, IpAddr)>,
    links_changed: bool,
    told_vports: Vec<Option<Vport>>,
    told_neighbours: HashMap<(u16, IpAddr), [u8; 6]>,
    told_forwarding: (bool, bool),
    /// By vport, what guests are to leave to the kernel because of its hooks.
    hooked: Vec<Hooked>,
    /// Whether guests choose among several next hops, IPv4 and IPv6; and what they were told.
    choosing: [bool; 2],
    told_choosing: [bool; 2],
    /// Prefixes whose routes changed since someone asked, while someone does.
    watched: Option<HashSet<IpNet>>,
    /// The kernel may have changed these without a word.
    suspects: HashSet<Kind>,
    /// IPv6 prefixes that are local as a whole, and whether they are other ones than at the last flush.
    ranges: BTreeSet<IpNet>,
    ranges_changed: bool,
    /// When the next route expires.
    expiry: Option<Instant>,
}

impl Table {
    /// Empty, for a router with these interfaces of at most `routes_max` prefixes in the main table. Group numbers start
    /// at `first_group`.
    pub fn new(vports: Vec<String>, routes_max: u64, first_group: GroupId) -> Self {
        let told_vports = vec![None; vports.len()];
        Self {
            paths: Paths::new(vports, first_group),
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
            told_vports,
            told_neighbours: HashMap::new(),
            told_forwarding: (false, false),
            hooked: Vec::new(),
            choosing: [true; 2],
            told_choosing: [true; 2],
            watched: None,
            suspects: HashSet::new(),
            ranges: BTreeSet::new(),
            ranges_changed: false,
            expiry: None,
        }
    }

    /// From now on notes whose routes change, and forgets those noted before.
    pub fn watch(&mut self) {
        self.watched = Some(HashSet::new());
    }

    /// The prefixes whose routes changed since [`Self::watch`]; notes no more.
    pub fn take_watched(&mut self) -> HashSet<IpNet> {
        self.watched.take().unwrap_or_default()
    }

    /// What is to be dumped again: since the last call the kernel may have changed it without a
    /// notification (routes of an interface that goes down, or whose preferred source goes away).
    pub fn take_suspects(&mut self) -> HashSet<Kind> {
        if self.refused.as_flattened().iter().any(|count| *count > 0)
            && self.counts.iter().sum::<u64>() < self.routes_max
        {
            self.suspects.extend(Kind::ALL.iter().filter(|kind| matches!(kind, Kind::Routes(..))));
        }
        std::mem::take(&mut self.suspects)
    }

    /// From now on guests leave this to the kernel: by vport, and choices among next hops by family.
    pub fn set_hooked(&mut self, hooked: &[Hooked], multipath: [bool; 2]) {
        self.hooked = hooked.to_vec();
        self.choosing = multipath.map(|kernel| !kernel);
        self.links_changed = true;
    }

    /// When [`Self::expire`] has something to do.
    pub fn expiry(&self) -> Option<Instant> {
        self.expiry
    }

    /// The kernel says nothing when a route expires, or is to go on after all: looks again.
    pub fn expire(&mut self, now: Instant) {
        if self.expiry.take_if(|at| *at <= now).is_some() {
            self.suspects.insert(Kind::Routes(true, KernelTable::Main));
        }
    }

    /// Whether [`Self::take_suspects`] has something to take.
    pub fn has_suspects(&self) -> bool {
        !self.suspects.is_empty()
    }

    /// How many of what there is.
    pub fn counts(&self) -> Counts {
        Counts {
            routes: self.counts,
            groups: self.paths.groups().count() as u64,
            neighbours: self.neighbours.values().filter(|n| n.mac.is_some()).count() as u64,
            refused: self.refused.as_flattened().iter().sum(),
        }
    }

    /// Applies a notification.
    pub fn apply(&mut self, event: &Event) {
        if let Some(dump) = &mut self.dump {
            let route = match event {
                Event::Route(route, _) | Event::RouteGone(route) => {
                    Some(Kind::Routes(is_v6(&route.prefix), route.table))
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
            Event::Route(route, placement) => self.route(route, *placement),
            Event::RouteGone(route) => self.route_gone(route),
            Event::Address { v6: false } => {
                self.suspects.insert(Kind::Routes(false, KernelTable::Local));
                self.suspects.insert(Kind::Routes(false, KernelTable::Main));
            }
            Event::Address { v6: true } => {}
            other => self.small(other),
        }
    }

    fn small(&mut self, event: &Event) {
        match event {
            Event::Link(link) => {
                self.links_changed = true;
                if self.paths.set_link(link.clone()) {
                    self.link_changed();
                }
            }
            Event::LinkGone(ifindex) => {
                if self.paths.remove_link(*ifindex) {
                    self.links_changed = true;
                    self.link_changed();
                }
            }
            Event::Conf { v6, ifindex, forwarding, ignore_linkdown } => {
                // A vport may forward or not.
                self.links_changed |= !v6 && forwarding.is_some();
                if self.paths.set_conf(*v6, *ifindex, *forwarding, *ignore_linkdown) {
                    self.link_changed();
                }
            }
            Event::ConfGone { v6, ifindex } => self.paths.remove_conf(*v6, *ifindex),
            Event::Neighbour { address, .. } if address.is_multicast() => {}
            Event::Neighbour { ifindex, address, mac, stale } => {
                let key = (*ifindex, *address);
                if mac.is_none() {
                    self.neighbours.remove(&key);
                } else if self.neighbours.len() < NEIGHBOURS_MAX
                    || self.neighbours.contains_key(&key)
                {
                    self.neighbours.insert(key, Neighbour { mac: *mac, stale: *stale });
                }
                self.queued_neighbours.insert(key);
            }
            Event::Nexthop(id, nexthop) => self.paths.set_object(*id, nexthop.clone()),
            Event::NexthopGone(id) => {
                self.paths.remove_object(*id);
                self.purge();
            }
            Event::Route(..) | Event::RouteGone(_) | Event::Address { .. } => {}
        }
    }

    fn link_changed(&mut self) {
        let quiet =
            |kind: &&Kind| matches!(kind, Kind::Nexthops | Kind::Neighbours | Kind::Routes(..));
        self.suspects.extend(Kind::ALL.iter().filter(quiet));
        self.purge();
    }

    /// Removes the routes that the kernel removed without a word.
    fn purge(&mut self) {
        let gone = self.paths.gone();
        if gone.is_empty() {
            return;
        }
        let is_gone = |alias: &Alias| gone.contains(&alias.destination);
        let affected = |entry: &Entry| entry.aliases.as_slice().iter().any(is_gone);
        let prefixes: Vec<IpNet> =
            self.entries.iter().filter(|(_, e)| affected(e)).map(|(prefix, _)| prefix).collect();
        for prefix in prefixes {
            self.edit(prefix, |aliases| aliases.retain(|alias| !is_gone(alias)));
        }
    }

    fn route(&mut self, route: &Route, placement: Placement) {
        if is_quiet(&route.prefix) {
            return;
        }
        let alias = self.alias(route);
        if self.refuses(&route.prefix, route.table) {
            return;
        }
        self.touch(route);
        let is_ambiguous = |entry: &Entry| entry.aliases.is_ambiguous(&alias, placement);
        if alias.v6 && self.entries.get(&route.prefix).is_some_and(is_ambiguous) {
            self.suspects.insert(Kind::Routes(true, route.table));
        }
        self.edit(route.prefix, |aliases| aliases.insert(alias, placement));
    }

    fn route_gone(&mut self, route: &Route) {
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
        let kernel::Destination::Hops(gone) = &route.destination else {
            return self.edit(route.prefix, |aliases| aliases.remove(&alias));
        };
        // IPv6 tells which hops of a multipath route went.
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
            alias.destination = self.paths.find(v6, &kernel::Destination::Hops(left), mtu);
        }
        self.edit(route.prefix, |aliases| match empty {
            true => aliases.remove(&siblings),
            false => aliases.insert(alias, Placement::Replace),
        });
    }

    fn alias(&mut self, route: &Route) -> Alias {
        self.expiry = self.expiry.into_iter().chain(route.expires).min();
        Alias {
            metric: route.metric,
            identity: route.identity,
            destination: self.paths.find(is_v6(&route.prefix), &route.destination, route.mtu),
            selector: route.selector,
            table: route.table,
            v6: is_v6(&route.prefix),
            object: matches!(route.destination, kernel::Destination::Nexthop(_)),
            sibling: route.sibling,
        }
    }

    /// Counts and refuses a prefix that is new where there is no room.
    fn refuses(&mut self, prefix: &IpNet, table: KernelTable) -> bool {
        let full = self.counts.iter().sum::<u64>() >= self.routes_max;
        let refuses = full && table == KernelTable::Main && self.entries.get(prefix).is_none();
        if refuses {
            self.refused[usize::from(is_v6(prefix))][table as usize] += 1;
        }
        refuses
    }

    /// Notes that a notification says how this prefix is, whatever a dump that runs now says.
    fn touch(&mut self, route: &Route) {
        let v6 = is_v6(&route.prefix);
        if self.is_dumping(v6, route.table) {
            let epoch = self.epochs[usize::from(v6)][route.table as usize];
            self.entry(route.prefix).seen[route.table as usize] = epoch;
        }
    }

    fn is_dumping(&self, v6: bool, table: KernelTable) -> bool {
        self.dump.as_ref().is_some_and(|dump| dump.kind == Kind::Routes(v6, table))
    }

    /// The entry of a prefix, new if need be.
    fn entry(&mut self, prefix: IpNet) -> &mut Entry {
        let seen = self.seen_of_new(is_v6(&prefix));
        self.entries.get_or_insert_with(&prefix, || Entry::new(seen))
    }

    /// What a new entry's `seen` is: a dump that runs has not named it.
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
        new.as_slice().iter().for_each(|alias| self.paths.hold(alias.destination));
        old.as_slice().iter().for_each(|alias| self.paths.release(alias.destination));
    }

    // Dumps

    /// A dump of this kind begins; all notifications that were sent before it are applied.
    pub fn begin(&mut self, kind: Kind) {
        self.suspects.remove(&kind);
        if let Kind::Routes(v6, table) = kind {
            let epoch = &mut self.epochs[usize::from(v6)][table as usize];
            *epoch = epoch.wrapping_add(1);
            self.refused[usize::from(v6)][table as usize] = 0;
        }
        self.dump = Some(Dump::new(kind));
    }

    /// One thing that the dump names; all notifications read so far are applied.
    pub fn dumped(&mut self, event: Event) {
        let Some(dump) = &mut self.dump else { return };
        if let Event::Route(route, _) = event {
            // Whatever the request asked for, only this table is compared.
            if Kind::Routes(is_v6(&route.prefix), route.table) != dump.kind
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

    /// Takes over what the dump says of a prefix, unless a notification knows better.
    fn compare(&mut self, prefix: IpNet, routes: &[Route]) {
        let Some(Kind::Routes(v6, table)) = self.dump.as_ref().map(|dump| dump.kind) else {
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

    /// The dump could not be finished.
    pub fn abort(&mut self) {
        self.dump = None;
        self.queue_tombstones();
    }

    /// The dump is whole; sweeps. `interrupted`: the kernel said that things changed meanwhile
    /// (`NLM_F_DUMP_INTR`). Says whether it was clean.
    pub fn end(&mut self, interrupted: bool) -> bool {
        while let Some((prefix, routes)) = self.dump.as_mut().and_then(|dump| dump.gather.take()) {
            self.compare(prefix, &routes);
        }
        let Some(dump) = self.dump.take() else { return false };
        let clean = dump.clean && !interrupted;
        match dump.kind {
            Kind::Routes(v6, table) => self.sweep(v6, table, clean),
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

    /// Entries without routes were kept so that the dump would not bring routes back.
    fn queue_tombstones(&mut self) {
        self.queued.append(&mut self.tombstones);
    }

    fn sweep(&mut self, v6: bool, table: KernelTable, clean: bool) {
        let epoch = self.epochs[usize::from(v6)][table as usize];
        let missed_once = epoch.wrapping_sub(1);
        let missing = |(prefix, entry): &(IpNet, &Entry)| {
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

    fn small_keys(&self, kind: Kind) -> Vec<Small> {
        match kind {
            Kind::Links => self.paths.link_indices().into_iter().map(Small::Link).collect(),
            Kind::Neighbours => {
                self.neighbours.keys().map(|(i, address)| Small::Neighbour(*i, *address)).collect()
            }
            Kind::Nexthops => self.paths.object_ids().into_iter().map(Small::Object).collect(),
            // Settings of an interface go with the interface.
            Kind::Conf(_) | Kind::Routes(..) => Vec::new(),
        }
    }

    // What guests are told

    /// Passes on, in an order that never takes a route away before its replacement is there, what
    /// changes a guest's state of the last flush to the present one.
    pub fn flush(&mut self, tell: &mut impl FnMut(ToGuest)) {
        let refreshed = self.paths.refresh();
        self.flush_vports(tell);
        refreshed.groups.into_iter().for_each(&mut *tell);
        if std::mem::take(&mut self.ranges_changed) || refreshed.outcomes_changed {
            let differs = |(prefix, entry): &(IpNet, &Entry)| {
                let outcome = evaluate(&self.paths, &self.ranges, prefix, &entry.aliases).1;
                !entry.queued && outcome != entry.told
            };
            let prefixes: Vec<IpNet> =
                self.entries.iter().filter(differs).map(|(prefix, _)| prefix).collect();
            self.queued.extend(prefixes);
        }
        let mut gone = Vec::new();
        for prefix in std::mem::take(&mut self.queued) {
            self.flush_prefix(prefix, tell, &mut gone);
        }
        gone.into_iter().for_each(|prefix| tell(ToGuest::RouteGone(prefix)));
        self.paths.collect().into_iter().for_each(|group| tell(ToGuest::GroupGone(group)));
        for key in std::mem::take(&mut self.queued_neighbours) {
            self.flush_neighbour(key, tell);
        }
        let forwarding = (self.paths.forwarding(false), self.paths.forwarding(true));
        if self.told_forwarding != forwarding {
            self.told_forwarding = forwarding;
            tell(ToGuest::Forwarding { v4: forwarding.0, v6: forwarding.1 });
        }
        if self.told_choosing != self.choosing {
            self.told_choosing = self.choosing;
            let [v4, v6] = self.choosing;
            tell(ToGuest::Choosing { v4, v6 });
        }
    }

    fn flush_vports(&mut self, tell: &mut impl FnMut(ToGuest)) {
        if !std::mem::take(&mut self.links_changed) {
            return;
        }
        for index in 0..self.paths.vports() {
            let told = &mut self.told_vports[usize::from(index)];
            let now = match (self.paths.vport_link(index), &*told) {
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
            if *told != now {
                told.clone_from(&now);
                now.into_iter().for_each(|vport| tell(ToGuest::Vport(vport)));
            }
        }
        self.queued_neighbours.extend(self.neighbours.keys());
        // Interfaces that are no vports any more.
        let names: Vec<_> =
            (0..self.paths.vports()).map(|v| self.paths.vport_link(v).map(|l| l.ifindex)).collect();
        let stranded: Vec<_> = self
            .told_neighbours
            .keys()
            .filter(|(vport, address)| {
                names[usize::from(*vport)]
                    .is_none_or(|ifindex| !self.neighbours.contains_key(&(ifindex, *address)))
            })
            .copied()
            .collect();
        for (vport, address) in stranded {
            self.told_neighbours.remove(&(vport, address));
            tell(ToGuest::Neighbour { vport, address, mac: None });
        }
    }

    fn flush_neighbour(&mut self, key: (u32, IpAddr), tell: &mut impl FnMut(ToGuest)) {
        let (ifindex, address) = key;
        let Some(vport) = self.paths.vport(ifindex) else { return };
        let mac = self.neighbours.get(&key).and_then(|neighbour| neighbour.mac);
        let told = match mac {
            Some(mac) => self.told_neighbours.insert((vport, address), mac),
            None => self.told_neighbours.remove(&(vport, address)),
        };
        if told != mac {
            tell(ToGuest::Neighbour { vport, address, mac });
        }
    }

    fn flush_prefix(
        &mut self,
        prefix: IpNet,
        tell: &mut impl FnMut(ToGuest),
        gone: &mut Vec<IpNet>,
    ) {
        let Some(entry) = self.entries.get_mut(&prefix) else { return };
        let (local, outcome) = evaluate(&self.paths, &self.ranges, &prefix, &entry.aliases);
        entry.queued = false;
        let told = std::mem::replace(&mut entry.told, outcome);
        let told_local = std::mem::replace(&mut entry.told_local, local);
        let empty = entry.aliases == Aliases::None;
        if let Some(own) = local.filter(|_| local != told_local) {
            tell(ToGuest::Local { address: prefix.addr(), own });
        }
        if outcome != told {
            self.paths.tell(outcome).into_iter().for_each(&mut *tell);
            match self.target(outcome) {
                Some(target) => tell(ToGuest::Route { prefix, target }),
                None => gone.push(prefix),
            }
            self.paths.untell(told);
        }
        if told_local.is_some() && local.is_none() {
            tell(ToGuest::LocalGone(prefix.addr()));
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

    fn target(&self, outcome: Destination) -> Option<Target> {
        match outcome {
            Destination::NONE => None,
            Destination::PUNT => Some(Target::Punt),
            Destination::DROP => Some(Target::Drop),
            path => self.paths.group(path).map(Target::Group),
        }
    }

    /// The part of a snapshot before its routes, as of the last flush.
    pub fn snapshot_head(&self, tell: &mut impl FnMut(ToGuest)) {
        tell(ToGuest::Begin);
        let (v4, v6) = self.told_forwarding;
        tell(ToGuest::Forwarding { v4, v6 });
        let [v4, v6] = self.told_choosing;
        tell(ToGuest::Choosing { v4, v6 });
        self.told_vports.iter().flatten().for_each(|vport| tell(ToGuest::Vport(vport.clone())));
        for ((vport, address), mac) in &self.told_neighbours {
            tell(ToGuest::Neighbour { vport: *vport, address: *address, mac: Some(*mac) });
        }
        self.paths.groups().for_each(&mut *tell);
    }

    /// Up to `count` prefixes of a snapshot after `from`; returns where to go on.
    ///
    /// Parts may be taken between flushes: each says how its prefixes are at that time, and what
    /// changes later is told later.
    pub fn snapshot_routes(
        &self,
        from: Option<IpNet>,
        count: usize,
        tell: &mut impl FnMut(ToGuest),
    ) -> Option<IpNet> {
        let mut last = None;
        for (prefix, entry) in self.entries.after(from).take(count) {
            if let Some(own) = entry.told_local {
                tell(ToGuest::Local { address: prefix.addr(), own });
            }
            if let Some(target) = self.target(entry.told) {
                tell(ToGuest::Route { prefix, target });
            }
            last = Some(prefix);
        }
        last
    }

    /// The neighbour's interface, if the kernel is to be asked to confirm its link address; it
    /// is not asked again until it says that the entry went stale again.
    pub fn used(&mut self, vport: u16, address: IpAddr) -> Option<u32> {
        let ifindex = self.paths.vport_link(vport)?.ifindex;
        let neighbour = self.neighbours.get_mut(&(ifindex, address))?;
        std::mem::take(&mut neighbour.stale).then_some(ifindex)
    }

    /// The interface of a gateway whose link address guests lack; `None` if it is the gateway of no route
    /// of theirs, or the kernel knows it.
    pub fn wanted(&self, vport: u16, address: IpAddr) -> Option<u32> {
        let ifindex = self.paths.vport_link(vport)?.ifindex;
        let is_known = self.neighbours.contains_key(&(ifindex, address));
        (!is_known && self.paths.is_gateway(vport, address)).then_some(ifindex)
    }
}

fn is_v6(prefix: &IpNet) -> bool {
    matches!(prefix, IpNet::V6(_))
}

/// Guests hand packets to such destinations over by themselves.
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

/// Whether the prefix is inside a longer one that is local as a whole: the kernel looks at no routes of the
/// main table then (IPv6; IPv4 has both tables in one).
fn is_hidden(ranges: &BTreeSet<IpNet>, prefix: &IpNet) -> bool {
    let mut wider = *prefix;
    !ranges.is_empty()
        && std::iter::from_fn(|| {
            wider = wider.supernet()?;
            Some(ranges.contains(&wider))
        })
        .any(|is_range| is_range)
}

/// Whether the prefix is an address of the router itself (true) or a broadcast address, and the outcome of
/// the first usable route.
fn evaluate(
    paths: &Paths,
    ranges: &BTreeSet<IpNet>,
    prefix: &IpNet,
    aliases: &Aliases,
) -> (Option<bool>, Destination) {
    let is_own = |alias: &&Alias| alias.destination == Destination::LOCAL;
    let is_local = |alias: &&Alias| is_own(alias) || alias.destination == Destination::BROADCAST;
    let aliases = aliases.as_slice();
    let mut locals = aliases.iter().filter(|alias| is_host(prefix) && is_local(alias)).peekable();
    let local = locals.peek().is_some().then(|| locals.any(|alias| is_own(&alias)));
    let hides = is_hidden(ranges, prefix);
    let mut routes = aliases
        .iter()
        .filter(|alias| !(local.is_some() && is_local(alias)))
        .filter(|alias| !(hides && alias.table == KernelTable::Main));
    if routes.clone().any(|alias| alias.selector != 0) {
        return (local, Destination::PUNT);
    }
    let outcome = routes
        .find_map(|alias| {
            Some(paths.outcome(alias.destination)).filter(|o| *o != Destination::NONE)
        })
        .unwrap_or(Destination::NONE);
    (local, outcome)
}
