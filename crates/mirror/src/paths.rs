//! Destinations of routes: lists of hops that many routes share, nexthop objects, interfaces.
//!
//! Routes refer to a path by number. So a change of an interface or a nexthop object is evaluated
//! once per path rather than once per route. For guests, a path with hops is one group.
//!
//! Limits: a path with more than `HOPS_MAX` usable hops is punted to the kernel.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;

use pdp_proto::routes::{GroupHop, GroupId, HOPS_MAX, MACS_MAX, ResolvedRoute, ToGuest};

use crate::kernel::{self, CONF_ALL, HopState, KernelHop, KernelInterface, Nexthop};

/// Destination of a route: a path, or one of the fixed destinations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PathDestination(u32);

impl PathDestination {
    /// The control guest's kernel.
    pub const PUNT: Self = Self(0);
    /// Silent drop.
    pub const DROP: Self = Self(1);
    /// The router itself.
    pub const LOCAL: Self = Self(2);
    /// No route.
    pub const NONE: Self = Self(3);
    /// The router itself and others.
    pub const BROADCAST: Self = Self(4);

    const FIXED: u32 = 5;

    fn path(index: usize) -> Self {
        Self(index as u32 + Self::FIXED)
    }

    /// Returns the path's index, unless the destination is fixed.
    fn index(self) -> Option<usize> {
        self.0.checked_sub(Self::FIXED).map(|index| index as usize)
    }
}

/// Treatment of packets that take a path.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Outcome {
    /// The kernel does not use the path, and tries another route.
    Unusable,
    Punt,
    Drop,
    Hops(Vec<GroupHop>),
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum PathKind {
    /// Family of the routes, and hops without their state, ascending.
    Hops(bool, Vec<KernelHop>),
    /// Nexthop object.
    Object(u32),
}

/// Identity of a path.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct PathKey {
    kind: PathKind,
    /// Largest packet of its routes, bytes; 0: any.
    mtu: u32,
}

#[derive(Debug)]
struct RoutePath {
    source: PathKey,
    /// States, in the order of the source's hops.
    states: Vec<HopState>,
    /// Outcome; `None` until it is first evaluated.
    outcome: Option<Outcome>,
    /// Count of the kernel's routes that refer to it.
    users: u32,
    /// Count of prefixes that guests send by it.
    prefixes_sent: u32,
    /// Group of the path in the guests, while they use it.
    group: Option<GroupId>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Conf {
    forwarding: bool,
    ignore_linkdown: bool,
}

/// All paths, and the state that their outcomes depend on.
#[derive(Debug)]
pub struct RoutePaths {
    vports: Vec<String>,
    links: HashMap<u32, KernelInterface>,
    confs: HashMap<(bool, i32), Conf>,
    objects: HashMap<u32, Nexthop>,
    paths: Vec<Option<RoutePath>>,
    free: Vec<usize>,
    by_source: HashMap<PathKey, usize, foldhash::fast::RandomState>,
    next_group: GroupId,
    changed: HashSet<usize>,
    changed_objects: HashSet<u32>,
    all_changed: bool,
    unused: Vec<usize>,
}

/// Result of [`RoutePaths::refresh`].
#[derive(Debug, Default)]
pub struct Refreshed {
    /// Messages for groups whose hops changed.
    pub groups: Vec<ToGuest>,
    /// True if a path became usable or unusable, or changed between hops and another outcome. Then
    /// every route must be evaluated again.
    pub outcomes_changed: bool,
}

impl RoutePaths {
    /// Makes an empty set. Group numbers start at `first_group`.
    pub fn new(vports: Vec<String>, first_group: GroupId) -> Self {
        Self {
            vports,
            links: HashMap::new(),
            confs: HashMap::new(),
            objects: HashMap::new(),
            paths: Vec::new(),
            free: Vec::new(),
            by_source: HashMap::default(),
            next_group: first_group,
            changed: HashSet::new(),
            changed_objects: HashSet::new(),
            all_changed: false,
            unused: Vec::new(),
        }
    }

    /// Returns the interface of a vport.
    pub fn vport_link(&self, vport: u16) -> Option<&KernelInterface> {
        let name = self.vports.get(usize::from(vport))?;
        self.links.values().find(|link| link.name == *name)
    }

    /// Returns the count of configured vports.
    pub fn vports(&self) -> u16 {
        self.vports.len() as u16
    }

    /// Returns the vport of an interface.
    pub fn vport(&self, ifindex: u32) -> Option<u16> {
        let link = self.links.get(&ifindex)?;
        self.vports.iter().position(|name| *name == link.name).map(|index| index as u16)
    }

    /// Returns the MAC addresses of the macvlans over an interface, the first [`MACS_MAX`].
    pub fn macs_over(&self, ifindex: u32) -> Vec<[u8; 6]> {
        let over = self.links.values().filter(|link| link.up && link.over == Some(ifindex));
        let mut macs: Vec<_> = over.map(|link| link.mac).collect();
        macs.sort();
        macs.dedup();
        macs.truncate(MACS_MAX);
        macs
    }

    /// True if the kernel forwards IPv4 packets that
    /// arrive on an interface and the macvlans over it.
    pub fn forwards_v4(&self, ifindex: u32) -> bool {
        let forwards = |ifindex: u32| {
            self.confs.get(&(false, ifindex as i32)).is_none_or(|conf| conf.forwarding)
        };
        let mut over = self.links.values().filter(|link| link.up && link.over == Some(ifindex));
        forwards(ifindex) && over.all(|link| forwards(link.ifindex))
    }

    /// Updates an interface. Returns true if its state changed in a way that may have made the
    /// kernel change routes without notification.
    pub fn set_link(&mut self, link: KernelInterface) -> bool {
        let ifindex = link.ifindex;
        let essence = |link: &KernelInterface| (link.up, link.carrier, link.name.clone());
        let old = self.links.insert(ifindex, link.clone());
        let changed = old.as_ref().map(essence) != Some(essence(&link));
        self.all_changed |= changed;
        if old.as_ref().is_some_and(|old| old.up) && !link.up {
            self.for_hops_on(ifindex, |state| state.dead = true);
        }
        if old.as_ref().is_some_and(|old| old.carrier != link.carrier) {
            self.for_hops_on(ifindex, |state| state.linkdown = !link.carrier);
        }
        if old.is_some_and(|old| old.up && old.carrier) && !(link.up && link.carrier) {
            self.objects_die(ifindex);
        }
        changed
    }

    /// Forgets an interface.
    pub fn remove_link(&mut self, ifindex: u32) -> bool {
        if self.links.remove(&ifindex).is_none() {
            return false;
        }
        self.confs.retain(|(_, index), _| *index != ifindex as i32);
        self.all_changed = true;
        self.for_hops_on(ifindex, |state| state.dead = true);
        self.objects_die(ifindex);
        true
    }

    /// Returns the indices of all known interfaces.
    pub fn link_indices(&self) -> Vec<u32> {
        self.links.keys().copied().collect()
    }

    /// Repeats the kernel's unreported changes to all hops on an interface.
    fn for_hops_on(&mut self, ifindex: u32, change: impl Fn(&mut HopState)) {
        for path in self.paths.iter_mut().flatten() {
            if let PathKind::Hops(_, hops) = &path.source.kind {
                let on_it = hops.iter().zip(&mut path.states).filter(|(h, _)| h.ifindex == ifindex);
                on_it.for_each(|(_, state)| change(state));
            }
        }
    }

    /// Repeats the kernel's unreported removal of nexthop objects on an interface that goes down or
    /// loses its carrier (nexthop_flush_dev, net/ipv4/nexthop.c).
    fn objects_die(&mut self, ifindex: u32) {
        let on_it =
            |nexthop: &Nexthop| matches!(nexthop, Nexthop::Single(hop) if hop.ifindex == ifindex);
        let gone: Vec<u32> =
            self.objects.iter().filter(|(_, nexthop)| on_it(nexthop)).map(|(id, _)| *id).collect();
        for id in gone {
            self.remove_object(id);
        }
    }

    /// Updates settings. Returns true if the kernel may now report
    /// hops as dead that were not, or vice versa.
    pub fn set_conf(
        &mut self,
        v6: bool,
        ifindex: i32,
        forwarding: Option<bool>,
        ignore_linkdown: Option<bool>,
    ) -> bool {
        let conf = self.confs.entry((v6, ifindex)).or_default();
        conf.forwarding = forwarding.unwrap_or(conf.forwarding);
        if let Some(ignore) = ignore_linkdown
            && ignore != conf.ignore_linkdown
        {
            conf.ignore_linkdown = ignore;
            self.all_changed = true;
            return true;
        }
        false
    }

    /// Forgets settings.
    pub fn remove_conf(&mut self, v6: bool, ifindex: i32) {
        self.confs.remove(&(v6, ifindex));
    }

    /// True if the kernel forwards.
    pub fn forwarding(&self, v6: bool) -> bool {
        self.confs.get(&(v6, CONF_ALL)).is_some_and(|conf| conf.forwarding)
    }

    /// Takes over a nexthop object.
    pub fn set_object(&mut self, id: u32, nexthop: Nexthop) {
        if self.objects.get(&id) != Some(&nexthop) {
            self.objects.insert(id, nexthop);
            self.changed_objects.insert(id);
        }
    }

    /// Removes a nexthop object, also from groups; an emptied group is removed, too. Routes that
    /// use a removed object are gone ([`Self::gone`]).
    pub fn remove_object(&mut self, id: u32) {
        if self.objects.remove(&id).is_none() {
            return;
        }
        self.changed_objects.insert(id);
        let mut empty = Vec::new();
        for (group, nexthop) in &mut self.objects {
            if let Nexthop::Group(members) = nexthop {
                let before = members.len();
                members.retain(|(member, _)| *member != id);
                if members.len() != before {
                    self.changed_objects.insert(*group);
                    if members.is_empty() {
                        empty.push(*group);
                    }
                }
            }
        }
        for group in empty {
            self.objects.remove(&group);
        }
    }

    /// Returns the numbers of all known nexthop objects.
    pub fn object_ids(&self) -> Vec<u32> {
        self.objects.keys().copied().collect()
    }

    /// Returns the path for a destination of the kernel, with packets of at most `mtu` bytes (0:
    /// any). The caller decides if it holds the path.
    pub fn find(
        &mut self,
        v6: bool,
        destination: &kernel::KernelDestination,
        mtu: u32,
    ) -> PathDestination {
        match destination {
            kernel::KernelDestination::Hops(hops) => {
                let mut hops = hops.clone();
                hops.sort();
                let states: Vec<HopState> =
                    hops.iter_mut().map(|hop| std::mem::take(&mut hop.state)).collect();
                let found = self.path(PathKey { kind: PathKind::Hops(v6, hops), mtu });
                if let Some(path) = found.index().and_then(|index| self.paths[index].as_mut())
                    && path.states != states
                {
                    path.states = states;
                    self.changed.extend(found.index());
                }
                found
            }
            kernel::KernelDestination::Nexthop(id) => {
                self.path(PathKey { kind: PathKind::Object(*id), mtu })
            }
            kernel::KernelDestination::Local => PathDestination::LOCAL,
            kernel::KernelDestination::Broadcast => PathDestination::BROADCAST,
            kernel::KernelDestination::Blackhole => PathDestination::DROP,
            kernel::KernelDestination::Kernel => PathDestination::PUNT,
        }
    }

    fn path(&mut self, source: PathKey) -> PathDestination {
        if let Some(index) = self.by_source.get(&source) {
            return PathDestination::path(*index);
        }
        let states = match &source.kind {
            PathKind::Hops(_, hops) => vec![HopState::default(); hops.len()],
            PathKind::Object(_) => Vec::new(),
        };
        let index = self.free.pop().unwrap_or_else(|| {
            self.paths.push(None);
            self.paths.len() - 1
        });
        self.by_source.insert(source.clone(), index);
        self.paths[index] = Some(RoutePath {
            source,
            states,
            outcome: None,
            users: 0,
            prefixes_sent: 0,
            group: None,
        });
        self.changed.insert(index);
        self.unused.push(index);
        PathDestination::path(index)
    }

    fn get(&self, destination: PathDestination) -> Option<&RoutePath> {
        self.paths.get(destination.index()?)?.as_ref()
    }

    fn get_mut(&mut self, destination: PathDestination) -> Option<&mut RoutePath> {
        self.paths.get_mut(destination.index()?)?.as_mut()
    }

    /// Adds a reference by a route.
    pub fn add_reference(&mut self, destination: PathDestination) {
        if let Some(path) = self.get_mut(destination) {
            path.users += 1;
        }
    }

    /// Removes a reference by a route.
    pub fn release(&mut self, destination: PathDestination) {
        if let Some(path) = self.get_mut(destination) {
            path.users -= 1;
            if path.users == 0 {
                self.unused.extend(destination.index());
            }
        }
    }

    /// Returns the hops of a path, for routes from which the kernel can remove single hops.
    pub fn kernel_hops(&self, destination: PathDestination) -> Option<Vec<KernelHop>> {
        let path = self.get(destination)?;
        let PathKind::Hops(_, hops) = &path.source.kind else { return None };
        let whole = |(hop, state): (&KernelHop, &HopState)| KernelHop { state: *state, ..*hop };
        Some(hops.iter().zip(&path.states).map(whole).collect())
    }

    /// Returns the largest packet of a path's routes; 0: any.
    pub fn mtu(&self, destination: PathDestination) -> u32 {
        self.get(destination).map_or(0, |path| path.source.mtu)
    }

    /// Returns the paths whose routes the kernel removed without notification: all hops were on
    /// interfaces that went down, or the nexthop object is gone.
    pub fn gone(&self) -> HashSet<PathDestination> {
        let is_down = |hop: &KernelHop| {
            hop.ifindex != 0 && !self.links.get(&hop.ifindex).is_some_and(|link| link.up)
        };
        let is_gone = |path: &RoutePath| match &path.source.kind {
            PathKind::Hops(_, hops) => hops.iter().all(is_down),
            PathKind::Object(id) => !self.objects.contains_key(id),
        };
        let named =
            |path: &Option<RoutePath>| path.as_ref().is_some_and(|p| p.users > 0 && is_gone(p));
        let paths = self.paths.iter().enumerate().filter(|(_, path)| named(path));
        paths.map(|(index, _)| PathDestination::path(index)).collect()
    }

    /// Evaluates again everything that depends on a change. Call it before [`Self::outcome`].
    pub fn refresh(&mut self) -> Refreshed {
        let mut refreshed = Refreshed::default();
        let objects = std::mem::take(&mut self.changed_objects);
        if !objects.is_empty() {
            let of_changed = |id: &u32| {
                objects.contains(id)
                    || matches!(self.objects.get(id), Some(Nexthop::Group(members))
                        if members.iter().any(|(member, _)| objects.contains(member)))
            };
            for (source, index) in &self.by_source {
                if matches!(&source.kind, PathKind::Object(id) if of_changed(id)) {
                    self.changed.insert(*index);
                }
            }
        }
        let changed: Vec<usize> = if std::mem::take(&mut self.all_changed) {
            self.changed.clear();
            (0..self.paths.len()).collect()
        } else {
            self.changed.drain().collect()
        };
        for index in changed {
            let Some(path) = &self.paths[index] else { continue };
            let outcome = self.work_out(path);
            let Some(path) = &mut self.paths[index] else { continue };
            match (&path.outcome, &outcome, path.group) {
                (Some(old), new, _) if old == new => {}
                (_, Outcome::Hops(hops), Some(id)) => {
                    let (hops, mtu) = (hops.clone(), path.source.mtu);
                    refreshed.groups.push(ToGuest::Group { id, hops, mtu });
                }
                (old, ..) => refreshed.outcomes_changed |= old.is_some(),
            }
            path.outcome = Some(outcome);
        }
        refreshed
    }

    fn work_out(&self, path: &RoutePath) -> Outcome {
        let mut hops = Vec::new();
        let punt = match &path.source.kind {
            PathKind::Hops(v6, all) => {
                let unused = |hop: &KernelHop, state: &HopState| {
                    state.dead || state.linkdown && self.ignores_linkdown(*v6, hop.ifindex)
                };
                let used = all.iter().zip(&path.states).filter(|(hop, state)| !unused(hop, state));
                used.fold(false, |punt, (hop, _)| self.add_hop(*hop, &mut hops) | punt)
            }
            PathKind::Object(id) => match self.objects.get(id) {
                None => return Outcome::Unusable,
                Some(Nexthop::Blackhole) => return Outcome::Drop,
                Some(Nexthop::Single(hop)) => self.add_hop(*hop, &mut hops),
                Some(Nexthop::Group(members)) => {
                    let mut punt = false;
                    for (member, weight) in members {
                        match self.objects.get(member) {
                            Some(Nexthop::Single(hop)) => {
                                let hop = KernelHop { weight: *weight, ..*hop };
                                punt |= self.add_hop(hop, &mut hops);
                            }
                            Some(Nexthop::Blackhole) => return Outcome::Drop,
                            Some(Nexthop::Group(_)) | None => {}
                        }
                    }
                    punt
                }
            },
        };
        if punt {
            return Outcome::Punt;
        }
        hops.sort();
        // Guests know a hop by where it leads, once.
        hops.dedup_by(|hop, kept| {
            let same = (hop.vport, hop.gateway) == (kept.vport, kept.gateway);
            if same {
                kept.weight = kept.weight.saturating_add(hop.weight);
            }
            same
        });
        match hops.len() {
            0 => Outcome::Unusable,
            1 => Outcome::Hops(vec![GroupHop { weight: 1, ..hops.remove(0) }]),
            2..=HOPS_MAX => Outcome::Hops(hops),
            _ => Outcome::Punt,
        }
    }

    /// Adds a hop if the kernel uses it. Returns true if only the kernel can use it.
    fn add_hop(&self, hop: KernelHop, hops: &mut Vec<GroupHop>) -> bool {
        if hop.ifindex == 0 {
            return true;
        }
        if !self.links.get(&hop.ifindex).is_some_and(|link| link.up) {
            return false;
        }
        match self.vport(hop.ifindex) {
            Some(vport) if !hop.encap => {
                hops.push(GroupHop { vport, gateway: hop.gateway, weight: hop.weight });
                false
            }
            _ => true,
        }
    }

    /// IPv4 also considers the setting for all interfaces; IPv6 copies it to each one.
    fn ignores_linkdown(&self, v6: bool, ifindex: u32) -> bool {
        let ignores = |index| self.confs.get(&(v6, index)).is_some_and(|conf| conf.ignore_linkdown);
        ignores(ifindex as i32) || (!v6 && ignores(CONF_ALL))
    }

    /// Returns the outcome for packets of a route with this destination: a path with hops, `PUNT`,
    /// `DROP`, or `NONE` if the kernel would try another route.
    pub fn outcome(&self, destination: PathDestination) -> PathDestination {
        if matches!(destination, PathDestination::LOCAL | PathDestination::BROADCAST) {
            return PathDestination::PUNT;
        }
        let Some(path) = self.get(destination) else { return destination };
        match path.outcome {
            None | Some(Outcome::Unusable) => PathDestination::NONE,
            Some(Outcome::Punt) => PathDestination::PUNT,
            Some(Outcome::Drop) => PathDestination::DROP,
            Some(Outcome::Hops(_)) => destination,
        }
    }

    /// Returns an outcome written out; `None` for no route.
    pub fn resolved(&self, outcome: PathDestination) -> Option<ResolvedRoute> {
        match self.get(outcome).and_then(|path| path.outcome.as_ref()) {
            Some(Outcome::Hops(hops)) => Some(ResolvedRoute::Hops(hops.clone())),
            _ if outcome == PathDestination::PUNT => Some(ResolvedRoute::Punt),
            _ if outcome == PathDestination::DROP => Some(ResolvedRoute::Drop),
            _ => None,
        }
    }

    /// Adds a use by a prefix. Returns the path's group if guests don't have it yet.
    pub fn add_use(&mut self, destination: PathDestination) -> Option<ToGuest> {
        let number = self.next_group;
        let path = self.get_mut(destination)?;
        path.prefixes_sent += 1;
        let (None, Some(Outcome::Hops(hops))) = (path.group, &path.outcome) else { return None };
        let message = ToGuest::Group { id: number, hops: hops.clone(), mtu: path.source.mtu };
        path.group = Some(number);
        self.next_group = number.wrapping_add(1);
        Some(message)
    }

    /// Returns the group of a path that guests use.
    pub fn group(&self, destination: PathDestination) -> Option<GroupId> {
        self.get(destination)?.group
    }

    /// Removes a use by a prefix.
    pub fn remove_use(&mut self, destination: PathDestination) {
        if let Some(path) = self.get_mut(destination) {
            path.prefixes_sent -= 1;
            if path.prefixes_sent == 0 {
                self.unused.extend(destination.index());
            }
        }
    }

    /// Removes paths without routes, and returns the groups that no prefix uses any longer.
    pub fn collect(&mut self) -> Vec<GroupId> {
        let mut gone = Vec::new();
        for index in std::mem::take(&mut self.unused) {
            let Some(path) = &mut self.paths[index] else { continue };
            if path.prefixes_sent == 0 {
                gone.extend(path.group.take());
                if path.users == 0 {
                    self.by_source.remove(&path.source);
                    self.paths[index] = None;
                    self.free.push(index);
                }
            }
        }
        gone
    }

    /// True if a group that guests have contains this gateway.
    pub fn is_gateway(&self, vport: u16, address: IpAddr) -> bool {
        let is = |hop: &GroupHop| (hop.vport, hop.gateway) == (vport, Some(address));
        self.paths.iter().flatten().any(|path| match &path.outcome {
            Some(Outcome::Hops(hops)) => path.group.is_some() && hops.iter().any(is),
            _ => false,
        })
    }

    /// Returns all groups that guests have.
    pub fn groups(&self) -> impl Iterator<Item = ToGuest> {
        self.paths.iter().flatten().filter_map(|path| match &path.outcome {
            Some(Outcome::Hops(hops)) => {
                let mtu = path.source.mtu;
                Some(ToGuest::Group { id: path.group?, hops: hops.clone(), mtu })
            }
            _ => None,
        })
    }
}
