//! Where routes lead: lists of hops shared by many routes, nexthop objects, interfaces.
//!
//! Routes name a path by number, so that what happens to an interface or a nexthop object is
//! worked out once for each path, not once for each route. A path that has hops is one group for
//! the guests.
//!
//! Limits: a path with more than `HOPS_MAX` usable hops is left to the kernel.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;

use pdp_proto::routes::{GroupId, HOPS_MAX, Hop, MACS_MAX, Resolved, ToGuest};

use crate::kernel::{self, CONF_ALL, HopState, KernelHop, Link, Nexthop};

/// Where a route leads: to a path, or one of the fixed ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Destination(u32);

impl Destination {
    /// To the control guest's kernel.
    pub const PUNT: Self = Self(0);
    /// Nowhere, silently.
    pub const DROP: Self = Self(1);
    /// To the router itself.
    pub const LOCAL: Self = Self(2);
    /// There is no route.
    pub const NONE: Self = Self(3);
    /// To the router itself and others.
    pub const BROADCAST: Self = Self(4);

    const FIXED: u32 = 5;

    fn path(index: usize) -> Self {
        Self(index as u32 + Self::FIXED)
    }

    /// The path's index, unless this is a fixed end.
    fn index(self) -> Option<usize> {
        self.0.checked_sub(Self::FIXED).map(|index| index as usize)
    }
}

/// What becomes of a packet that takes a path.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Outcome {
    /// The kernel does not use it, and looks for another route.
    Unusable,
    Punt,
    Drop,
    Hops(Vec<Hop>),
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Way {
    /// Hops without their state, ascending; family of the routes.
    Hops(bool, Vec<KernelHop>),
    /// Nexthop object.
    Object(u32),
}

/// What tells a path from others.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Source {
    way: Way,
    /// Largest packet of its routes; 0: any.
    mtu: u32,
}

#[derive(Debug)]
struct Path {
    source: Source,
    /// By place in the source's hops.
    states: Vec<HopState>,
    /// `None` until it is worked out for the first time.
    outcome: Option<Outcome>,
    /// Routes of the kernel that name it.
    users: u32,
    /// Prefixes that the guests were told to send by it.
    told: u32,
    /// Its name for the guests, while any was told.
    group: Option<GroupId>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Conf {
    forwarding: bool,
    ignore_linkdown: bool,
}

/// All paths, and what their outcome depends on.
#[derive(Debug)]
pub struct Paths {
    vports: Vec<String>,
    links: HashMap<u32, Link>,
    confs: HashMap<(bool, i32), Conf>,
    objects: HashMap<u32, Nexthop>,
    paths: Vec<Option<Path>>,
    free: Vec<usize>,
    by_source: HashMap<Source, usize, foldhash::fast::RandomState>,
    next_group: GroupId,
    changed: HashSet<usize>,
    changed_objects: HashSet<u32>,
    all_changed: bool,
    unused: Vec<usize>,
}

/// What [`Paths::refresh`] found.
#[derive(Debug, Default)]
pub struct Refreshed {
    /// Groups whose hops changed, as guests are told.
    pub groups: Vec<ToGuest>,
    /// Some path became usable or unusable, or changed from hops to something else: every route
    /// is to be looked at.
    pub outcomes_changed: bool,
}

impl Paths {
    /// No paths. Group numbers start at `first_group`.
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

    /// The interface that is this vport.
    pub fn vport_link(&self, vport: u16) -> Option<&Link> {
        let name = self.vports.get(usize::from(vport))?;
        self.links.values().find(|link| link.name == *name)
    }

    /// Count of configured vports.
    pub fn vports(&self) -> u16 {
        self.vports.len() as u16
    }

    /// The vport that this interface is.
    pub fn vport(&self, ifindex: u32) -> Option<u16> {
        let link = self.links.get(&ifindex)?;
        self.vports.iter().position(|name| *name == link.name).map(|index| index as u16)
    }

    /// Link addresses of the macvlans over an interface, the first [`MACS_MAX`].
    pub fn macs_over(&self, ifindex: u32) -> Vec<[u8; 6]> {
        let over = self.links.values().filter(|link| link.up && link.over == Some(ifindex));
        let mut macs: Vec<_> = over.map(|link| link.mac).collect();
        macs.sort();
        macs.dedup();
        macs.truncate(MACS_MAX);
        macs
    }

    /// Whether the kernel forwards packets of IPv4 that come by an interface and the macvlans over it.
    pub fn forwards_v4(&self, ifindex: u32) -> bool {
        let forwards = |ifindex: u32| {
            self.confs.get(&(false, ifindex as i32)).is_none_or(|conf| conf.forwarding)
        };
        let mut over = self.links.values().filter(|link| link.up && link.over == Some(ifindex));
        forwards(ifindex) && over.all(|link| forwards(link.ifindex))
    }

    /// Takes over an interface; says whether its state changed so that the kernel may have
    /// changed routes without a word.
    pub fn set_link(&mut self, link: Link) -> bool {
        let ifindex = link.ifindex;
        let essence = |link: &Link| (link.up, link.carrier, link.name.clone());
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

    /// The interfaces that are known.
    pub fn link_indices(&self) -> Vec<u32> {
        self.links.keys().copied().collect()
    }

    /// What the kernel does, without a word, with all hops on an interface.
    fn for_hops_on(&mut self, ifindex: u32, change: impl Fn(&mut HopState)) {
        for path in self.paths.iter_mut().flatten() {
            if let Way::Hops(_, hops) = &path.source.way {
                let on_it = hops.iter().zip(&mut path.states).filter(|(h, _)| h.ifindex == ifindex);
                on_it.for_each(|(_, state)| change(state));
            }
        }
    }

    /// What the kernel does, without a word, with nexthop objects on an interface that goes down
    /// or loses its carrier (nexthop_flush_dev, net/ipv4/nexthop.c).
    fn objects_die(&mut self, ifindex: u32) {
        let on_it =
            |nexthop: &Nexthop| matches!(nexthop, Nexthop::Single(hop) if hop.ifindex == ifindex);
        let gone: Vec<u32> =
            self.objects.iter().filter(|(_, nexthop)| on_it(nexthop)).map(|(id, _)| *id).collect();
        for id in gone {
            self.remove_object(id);
        }
    }

    /// Takes over settings; says whether the kernel may show hops as dead now that were not, or
    /// the other way.
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

    /// Whether the kernel forwards.
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

    /// Forgets a nexthop object, and takes it out of groups; a group without members goes too.
    /// Routes that name what is gone are gone ([`Self::gone`]).
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

    /// The nexthop objects that are known.
    pub fn object_ids(&self) -> Vec<u32> {
        self.objects.keys().copied().collect()
    }

    /// The path for what the kernel says, with packets of `mtu` bytes at most (0: any); the caller holds it
    /// or not.
    pub fn find(&mut self, v6: bool, destination: &kernel::Destination, mtu: u32) -> Destination {
        match destination {
            kernel::Destination::Hops(hops) => {
                let mut hops = hops.clone();
                hops.sort();
                let states: Vec<HopState> =
                    hops.iter_mut().map(|hop| std::mem::take(&mut hop.state)).collect();
                let found = self.path(Source { way: Way::Hops(v6, hops), mtu });
                if let Some(path) = found.index().and_then(|index| self.paths[index].as_mut())
                    && path.states != states
                {
                    path.states = states;
                    self.changed.extend(found.index());
                }
                found
            }
            kernel::Destination::Nexthop(id) => self.path(Source { way: Way::Object(*id), mtu }),
            kernel::Destination::Local => Destination::LOCAL,
            kernel::Destination::Broadcast => Destination::BROADCAST,
            kernel::Destination::Blackhole => Destination::DROP,
            kernel::Destination::Kernel => Destination::PUNT,
        }
    }

    fn path(&mut self, source: Source) -> Destination {
        if let Some(index) = self.by_source.get(&source) {
            return Destination::path(*index);
        }
        let states = match &source.way {
            Way::Hops(_, hops) => vec![HopState::default(); hops.len()],
            Way::Object(_) => Vec::new(),
        };
        let index = self.free.pop().unwrap_or_else(|| {
            self.paths.push(None);
            self.paths.len() - 1
        });
        self.by_source.insert(source.clone(), index);
        self.paths[index] =
            Some(Path { source, states, outcome: None, users: 0, told: 0, group: None });
        self.changed.insert(index);
        self.unused.push(index);
        Destination::path(index)
    }

    fn get(&self, destination: Destination) -> Option<&Path> {
        self.paths.get(destination.index()?)?.as_ref()
    }

    fn get_mut(&mut self, destination: Destination) -> Option<&mut Path> {
        self.paths.get_mut(destination.index()?)?.as_mut()
    }

    /// One more route leads there.
    pub fn hold(&mut self, destination: Destination) {
        if let Some(path) = self.get_mut(destination) {
            path.users += 1;
        }
    }

    /// One route fewer.
    pub fn release(&mut self, destination: Destination) {
        if let Some(path) = self.get_mut(destination) {
            path.users -= 1;
            if path.users == 0 {
                self.unused.extend(destination.index());
            }
        }
    }

    /// The hops that a path of hops is made of, for routes of which single hops can go.
    pub fn kernel_hops(&self, destination: Destination) -> Option<Vec<KernelHop>> {
        let path = self.get(destination)?;
        let Way::Hops(_, hops) = &path.source.way else { return None };
        let whole = |(hop, state): (&KernelHop, &HopState)| KernelHop { state: *state, ..*hop };
        Some(hops.iter().zip(&path.states).map(whole).collect())
    }

    /// The largest packet of a path's routes; 0: any.
    pub fn mtu(&self, destination: Destination) -> u32 {
        self.get(destination).map_or(0, |path| path.source.mtu)
    }

    /// Paths that routes name, though the kernel has removed those routes without a word: all
    /// hops were on interfaces that went down, or the nexthop object is gone.
    pub fn gone(&self) -> HashSet<Destination> {
        let is_down = |hop: &KernelHop| {
            hop.ifindex != 0 && !self.links.get(&hop.ifindex).is_some_and(|link| link.up)
        };
        let is_gone = |path: &Path| match &path.source.way {
            Way::Hops(_, hops) => hops.iter().all(is_down),
            Way::Object(id) => !self.objects.contains_key(id),
        };
        let named = |path: &Option<Path>| path.as_ref().is_some_and(|p| p.users > 0 && is_gone(p));
        let paths = self.paths.iter().enumerate().filter(|(_, path)| named(path));
        paths.map(|(index, _)| Destination::path(index)).collect()
    }

    /// Works out anew what depends on what changed. To be called before [`Self::outcome`].
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
                if matches!(&source.way, Way::Object(id) if of_changed(id)) {
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

    fn work_out(&self, path: &Path) -> Outcome {
        let mut hops = Vec::new();
        let punt = match &path.source.way {
            Way::Hops(v6, all) => {
                let unused = |hop: &KernelHop, state: &HopState| {
                    state.dead || state.linkdown && self.ignores_linkdown(*v6, hop.ifindex)
                };
                let used = all.iter().zip(&path.states).filter(|(hop, state)| !unused(hop, state));
                used.fold(false, |punt, (hop, _)| self.add_hop(*hop, &mut hops) | punt)
            }
            Way::Object(id) => match self.objects.get(id) {
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
            1 => Outcome::Hops(vec![Hop { weight: 1, ..hops.remove(0) }]),
            2..=HOPS_MAX => Outcome::Hops(hops),
            _ => Outcome::Punt,
        }
    }

    /// Adds a hop if the kernel uses it; true if only the kernel can.
    fn add_hop(&self, hop: KernelHop, hops: &mut Vec<Hop>) -> bool {
        if hop.ifindex == 0 {
            return true;
        }
        if !self.links.get(&hop.ifindex).is_some_and(|link| link.up) {
            return false;
        }
        match self.vport(hop.ifindex) {
            Some(vport) if !hop.encap => {
                hops.push(Hop { vport, gateway: hop.gateway, weight: hop.weight });
                false
            }
            _ => true,
        }
    }

    /// IPv4 heeds the setting for all interfaces too; IPv6 writes it to each.
    fn ignores_linkdown(&self, v6: bool, ifindex: u32) -> bool {
        let ignores = |index| self.confs.get(&(v6, index)).is_some_and(|conf| conf.ignore_linkdown);
        ignores(ifindex as i32) || (!v6 && ignores(CONF_ALL))
    }

    /// What becomes of packets of a route that leads there: a path with hops, `PUNT`, `DROP`, or
    /// `NONE` where the kernel would look for another route.
    pub fn outcome(&self, destination: Destination) -> Destination {
        if matches!(destination, Destination::LOCAL | Destination::BROADCAST) {
            return Destination::PUNT;
        }
        let Some(path) = self.get(destination) else { return destination };
        match path.outcome {
            None | Some(Outcome::Unusable) => Destination::NONE,
            Some(Outcome::Punt) => Destination::PUNT,
            Some(Outcome::Drop) => Destination::DROP,
            Some(Outcome::Hops(_)) => destination,
        }
    }

    /// An outcome written out; `None` for no route.
    pub fn resolved(&self, outcome: Destination) -> Option<Resolved> {
        match self.get(outcome).and_then(|path| path.outcome.as_ref()) {
            Some(Outcome::Hops(hops)) => Some(Resolved::Hops(hops.clone())),
            _ if outcome == Destination::PUNT => Some(Resolved::Punt),
            _ if outcome == Destination::DROP => Some(Resolved::Drop),
            _ => None,
        }
    }

    /// One more prefix is told with this path; its group if that was not told before.
    pub fn tell(&mut self, destination: Destination) -> Option<ToGuest> {
        let number = self.next_group;
        let path = self.get_mut(destination)?;
        path.told += 1;
        let (None, Some(Outcome::Hops(hops))) = (path.group, &path.outcome) else { return None };
        let told = ToGuest::Group { id: number, hops: hops.clone(), mtu: path.source.mtu };
        path.group = Some(number);
        self.next_group = number.wrapping_add(1);
        Some(told)
    }

    /// The group of a path that was told.
    pub fn group(&self, destination: Destination) -> Option<GroupId> {
        self.get(destination)?.group
    }

    /// One prefix fewer is told with this path.
    pub fn untell(&mut self, destination: Destination) {
        if let Some(path) = self.get_mut(destination) {
            path.told -= 1;
            if path.told == 0 {
                self.unused.extend(destination.index());
            }
        }
    }

    /// Forgets paths that no route names, and names groups that no prefix is told with any more.
    pub fn collect(&mut self) -> Vec<GroupId> {
        let mut gone = Vec::new();
        for index in std::mem::take(&mut self.unused) {
            let Some(path) = &mut self.paths[index] else { continue };
            if path.told == 0 {
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

    /// Whether a group that guests know has this gateway.
    pub fn is_gateway(&self, vport: u16, address: IpAddr) -> bool {
        let is = |hop: &Hop| (hop.vport, hop.gateway) == (vport, Some(address));
        self.paths.iter().flatten().any(|path| match &path.outcome {
            Some(Outcome::Hops(hops)) => path.group.is_some() && hops.iter().any(is),
            _ => false,
        })
    }

    /// All groups that guests know.
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
