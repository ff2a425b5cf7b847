//! Driver of one VE: turns the route mirror's messages into writes of the VE's tables.
//!
//! | the mirror's message | tables |
//! |---|---|
//! | vport | context; the first vport's MAC address gives the seed of the choice among hops |
//! | local address | host route of kind local, which hides a route of the same prefix |
//! | group | group, hops, buckets; the buckets are those of pdp-ip |
//! | route | the look-up's tables |
//! | neighbour | MAC address; on a link without gateway also a host route to a hop of its own |
//!
//! New entries are written before the entries that refer to them. A place that becomes free is used
//! again after [`VeDriver::retire`]. So a frame sees each entry before or after its change. A
//! second snapshot changes the entries that differ, and at its end removes those that it did not
//! name.
//!
//! # Excess routes
//!
//! A route that does not fit is excess: the card sends its packets to the control guest and counts
//! them. The same goes for the routes of a group whose hops do not fit. An excess route has a
//! *cover*: the longest shorter prefix that can get a leaf of kind excess without more room.
//! Packets of the cover's other addresses also go to the control guest, unless a longer route has
//! them. If no prefix can, the entries of level 0 that lead to the route become excess. Then all
//! packets of these addresses go to the control guest, also those of longer routes. When places
//! become free, [`VeDriver::retire`] lets excess routes enter.
//!
//! A station on a link needs a group, a hop, and a MAC address for itself. Stations never have more
//! than three quarters of these places: the rest is for groups of routes. Packets of further
//! stations are punted as neighbour.
//!
//! Limits: 16 vports, 16 own IPv4 addresses, and the VE's parts of the pooled tables. Of a group
//! with several hops, packets by a hop without gateway are punted as neighbour.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::ops::Bound;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use pdp_proto::routes::{
    GroupHop, GroupId, HOPS_MAX, ResolvedRoute, RouteDecision, ToGuest, Vport,
};

use crate::table::{
    ContextEntry, GroupEntry, HopEntry, HopSegments, INDEX_REACH, MacAddress, TableWrite, VeOptions,
};
use crate::trie::{LpmTrie, ROOT_BITS, RoutePrefix, SegmentFull};
use crate::{Leaf, LeafKind, LpmSegment, RouteFamily};

/// Vports of a VE.
pub const CARD_VPORTS: u8 = 16;

/// Own IPv4 addresses of a VE.
pub const OWN_V4_MAX: usize = 16;

/// Levels of the look-up.
pub(crate) const LEVELS: u8 = 20;

/// Largest size of a packet in the tables; more than a frame can have.
const MTU_MAX: u16 = (1 << 14) - 1;

/// Excess routes that one call of [`VeDriver::retire`] tries again. The same number holds for
/// groups, and for stations.
const RETRIES: usize = 64;

/// Leaf of an excess route and of a cover.
const EXCESS: Leaf = Leaf { kind: LeafKind::Excess, group: 0 };

/// A message that the card cannot follow. The driver continues without it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DriverError {
    /// The card has no such vport.
    #[error("vport {0}: the card has vports 0 to 15: its frames go to the control guest")]
    Vport(u16),
    /// All places of own IPv4 addresses are used.
    #[error(
        "own address {0}: the card has 16 own IPv4 addresses of a VE: it forwards packets from \
         this one instead of dropping them"
    )]
    OwnAddress(IpAddr),
}

/// Free places of a table.
#[derive(Clone, Debug)]
struct FreePlaces {
    /// The last one is used next.
    free: Vec<u16>,
    /// Frames on the way may still read these.
    pending: Vec<u16>,
}

impl FreePlaces {
    fn new(length: u16) -> Self {
        Self { free: (0..length).rev().collect(), pending: Vec::new() }
    }

    fn has(&self, count: usize) -> bool {
        self.free.len() >= count
    }

    /// Takes a place; the caller has checked that there is one.
    fn take(&mut self) -> u16 {
        self.free.pop().expect("a free place")
    }

    fn give(&mut self, place: u16) {
        self.pending.push(place);
    }

    /// Gives a place back that no frame can have read.
    fn give_unread(&mut self, place: u16) {
        self.free.push(place);
    }

    /// Returns true if places have become free.
    fn retire(&mut self) -> bool {
        let some = !self.pending.is_empty();
        self.free.append(&mut self.pending);
        some
    }
}

/// A neighbour: address and egress vport.
type Station = (IpAddr, u16);

/// Number of a [`DriverGroup`].
type GroupNumber = u64;

/// A group of the mirror.
#[derive(Clone, Debug, Default)]
struct DriverGroup {
    hops: Vec<GroupHop>,
    mtu: u32,
    /// As [`pdp_ip::buckets`] returns them.
    buckets: Vec<u8>,
    /// `None`: the group does not fit, so its routes are excess.
    place: Option<GroupPlace>,
    /// Number of routes that refer to it.
    references: usize,
    /// A group of the mirror has this number.
    named: bool,
}

/// Places of a group's entries.
#[derive(Clone, Debug)]
struct GroupPlace {
    index: u16,
    hops: Vec<u16>,
    stations: Vec<Station>,
    block: Option<u16>,
}

impl DriverGroup {
    /// Returns the egress vport if the only hop is the destination itself.
    fn link(&self) -> Option<u16> {
        match self.hops[..] {
            [GroupHop { vport, gateway: None, .. }] => Some(vport),
            _ => None,
        }
    }

    fn mtu_bits(&self) -> u16 {
        mtu_bits(if self.mtu == 0 { u32::MAX } else { self.mtu })
    }
}

fn mtu_bits(mtu: u32) -> u16 {
    mtu.min(MTU_MAX.into()) as u16
}

/// Target of a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RouteTarget {
    Hook,
    Blackhole,
    Group(GroupNumber),
}

/// A group with one hop to a station on a link.
#[derive(Clone, Copy, Debug)]
struct HostGroup {
    station: Station,
    mtu: u16,
    index: u16,
    hop: u16,
}

/// Keys that did not fit and are tried again, a few at a time.
#[derive(Debug)]
struct RetryRound<K> {
    /// Number to try again.
    left: usize,
    /// The one tried last.
    last: Option<K>,
}

impl<K> Default for RetryRound<K> {
    fn default() -> Self {
        Self { left: 0, last: None }
    }
}

impl<K: Copy> RetryRound<K> {
    /// Returns the next ones; `from` returns all from a key on.
    fn next<I: Iterator<Item = K>>(&mut self, from: impl Fn(Bound<K>) -> I) -> Vec<K> {
        let count = self.left.min(RETRIES);
        self.left -= count;
        let behind = self.last.map_or(Bound::Unbounded, Bound::Excluded);
        let next: Vec<K> = from(behind).chain(from(Bound::Unbounded)).take(count).collect();
        self.last = next.last().copied().or(self.last);
        next
    }
}

/// Free places of a VE's parts, without those that wait for [`VeDriver::retire`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FreeTables {
    /// Neighbours.
    pub arps: usize,
    /// Next hops.
    pub hops: usize,
    /// Blocks of 256 buckets.
    pub blocks: usize,
    /// Groups.
    pub groups: usize,
    /// Leaves of the look-up.
    pub leaves: u32,
    /// Nodes of the look-up, by level from 1.
    pub nodes: Vec<u32>,
}

/// Entries that a snapshot has named.
#[derive(Debug, Default)]
struct SnapshotNames {
    vports: BTreeSet<u8>,
    locals: BTreeSet<IpAddr>,
    routes: BTreeSet<RoutePrefix>,
    neighbours: BTreeSet<Station>,
    /// Groups from before the snapshot that it has not found again.
    groups: HashMap<(Vec<GroupHop>, u32), GroupNumber>,
}

/// The tables of one VE.
#[derive(Debug)]
pub struct VeDriver {
    options: VeOptions,
    vports: BTreeMap<u8, Vport>,
    /// True for the router's own addresses, false for broadcast addresses.
    locals: BTreeMap<IpAddr, bool>,
    own_v4: [Option<u32>; OWN_V4_MAX],
    groups: BTreeMap<GroupNumber, DriverGroup>,
    next_group: GroupNumber,
    by_id: HashMap<GroupId, GroupNumber>,
    routes: BTreeMap<RoutePrefix, RouteTarget>,
    neighbours: BTreeMap<Station, MacAddress>,
    /// Places of stations' MAC addresses, with the number of hops that refer to each.
    arps: BTreeMap<Station, (u16, usize)>,
    host_groups: BTreeMap<RoutePrefix, HostGroup>,
    /// Stations on a link for which there was no place. Their packets are punted as neighbour.
    unplaced_hosts: BTreeSet<RoutePrefix>,
    trie: LpmTrie,
    /// Covers of the prefixes whose leaf is not in the look-up. A prefix that is its own cover has
    /// the leaf of kind excess because its last change did not fit.
    excess: BTreeMap<RoutePrefix, RoutePrefix>,
    /// Number of covers by family and slot of level 0.
    blocked: BTreeMap<(RouteFamily, u8), usize>,
    /// Most stations on links that have places.
    hosts_max: usize,
    retry_routes: RetryRound<RoutePrefix>,
    retry_groups: RetryRound<GroupNumber>,
    retry_hosts: RetryRound<RoutePrefix>,
    snapshot: Option<SnapshotNames>,
    arp_places: FreePlaces,
    hop_places: FreePlaces,
    block_places: FreePlaces,
    group_places: FreePlaces,
    writes: Vec<TableWrite>,
}

impl VeDriver {
    /// Makes a driver for a VE with these parts of the tables.
    ///
    /// # Panics
    /// If a part has more entries than an index reaches: 1,024 groups, or 4,096 next hops,
    /// neighbours, or blocks of buckets.
    pub fn new(hops: &HopSegments, lpm: &LpmSegment) -> Self {
        let lengths = [hops.groups, hops.hops, hops.arps, hops.blocks].map(|part| part.length);
        let most = [Leaf::GROUP_MAX + 1, INDEX_REACH, INDEX_REACH, INDEX_REACH];
        assert!(lengths.iter().zip(most).all(|(&length, most)| length <= most), "{hops:?}");
        let [groups, hop_count, arps, _] = lengths;
        let of_stations = [groups, hop_count, arps].map(|length| length - length.div_ceil(4));
        let hosts_max = of_stations.into_iter().min().unwrap_or(0).into();
        Self {
            options: VeOptions { chooses_v4: true, chooses_v6: true, ..VeOptions::default() },
            vports: BTreeMap::new(),
            locals: BTreeMap::new(),
            own_v4: [None; OWN_V4_MAX],
            groups: BTreeMap::new(),
            next_group: 0,
            by_id: HashMap::new(),
            routes: BTreeMap::new(),
            neighbours: BTreeMap::new(),
            arps: BTreeMap::new(),
            host_groups: BTreeMap::new(),
            unplaced_hosts: BTreeSet::new(),
            trie: LpmTrie::new(LEVELS, lpm.node_length, lpm.leaf_length),
            excess: BTreeMap::new(),
            blocked: BTreeMap::new(),
            hosts_max,
            retry_routes: RetryRound::default(),
            retry_groups: RetryRound::default(),
            retry_hosts: RetryRound::default(),
            snapshot: None,
            arp_places: FreePlaces::new(hops.arps.length),
            hop_places: FreePlaces::new(hops.hops.length),
            block_places: FreePlaces::new(hops.blocks.length),
            group_places: FreePlaces::new(hops.groups.length),
            writes: Vec::new(),
        }
    }

    /// Returns writes that empty the VE's tables, after the super user has given it its parts: no
    /// entry leads to what its parts hold. [`crate::setup::clear_ve`] also empties the parts.
    pub fn clear_writes(&self) -> Vec<TableWrite> {
        clear_writes(self.options)
    }

    /// Returns the numbers of free places.
    pub fn free_tables(&self) -> FreeTables {
        FreeTables {
            arps: self.arp_places.free.len(),
            hops: self.hop_places.free.len(),
            blocks: self.block_places.free.len(),
            groups: self.group_places.free.len(),
            leaves: self.trie.free_leaves(),
            nodes: (1..=LEVELS).map(|level| self.trie.free_nodes(level)).collect(),
        }
    }

    /// Takes the writes of the messages so far, in their order.
    pub fn take_writes(&mut self) -> Vec<TableWrite> {
        std::mem::take(&mut self.writes)
    }

    /// True if [`Self::take_writes`] has any.
    pub fn has_writes(&self) -> bool {
        !self.writes.is_empty()
    }

    /// Neighbours with a MAC address, and their vports.
    pub fn known_neighbours(&self) -> impl Iterator<Item = (IpAddr, u16, MacAddress)> {
        self.neighbours.iter().map(|(&(address, vport), &mac)| (address, vport, mac))
    }

    /// Gateways of routes without a MAC address, with their vports.
    pub fn unknown_gateways(&self) -> impl Iterator<Item = (u16, IpAddr)> {
        let unknown = self.arps.keys().filter(|station| !self.neighbours.contains_key(station));
        unknown.map(|&(address, vport)| (vport, address))
    }

    /// Number of prefixes whose last change does not fit. Their packets go to the control guest.
    pub fn excess_count(&self) -> usize {
        let unplaced = |target: &RouteTarget| {
            matches!(target, RouteTarget::Group(number)
                if self.groups.get(number).is_some_and(|group| group.place.is_none()))
        };
        let of_groups = self
            .routes
            .iter()
            .filter(|(prefix, target)| unplaced(target) && !self.excess.contains_key(prefix));
        self.excess.len() + of_groups.count()
    }

    /// Returns up to `count_max` routes behind a prefix, with their hops written out.
    pub fn routes_after(
        &self,
        after: Option<RoutePrefix>,
        count_max: usize,
    ) -> Vec<(IpNet, ResolvedRoute)> {
        let from = after.map_or(Bound::Unbounded, Bound::Excluded);
        let routes = self.routes.range((from, Bound::Unbounded)).take(count_max);
        let resolved = |(prefix, target): (&RoutePrefix, &RouteTarget)| {
            let route = match target {
                RouteTarget::Hook => ResolvedRoute::Punt,
                RouteTarget::Blackhole => ResolvedRoute::Drop,
                RouteTarget::Group(number) => {
                    let group = self.groups.get(number);
                    let mut hops = group.map_or_else(Vec::new, |group| group.hops.clone());
                    hops.sort();
                    ResolvedRoute::Hops(hops)
                }
            };
            (net_of(prefix), route)
        };
        routes.map(resolved).collect()
    }

    /// Frees the places that earlier messages left. If there are any, this call and the next ones
    /// try again what did not fit: up to 64 routes, groups, and stations a call.
    ///
    /// The caller has taken all writes before. They are in the tables, and all frames that entered
    /// before have left. Otherwise a frame may see the next use of a place.
    pub fn retire(&mut self) {
        debug_assert!(self.writes.is_empty(), "writes that are not in the tables");
        let mut freed = self.trie.retire(self.trie.change());
        for places in [
            &mut self.arp_places,
            &mut self.hop_places,
            &mut self.block_places,
            &mut self.group_places,
        ] {
            freed |= places.retire();
        }
        if freed {
            self.retry_routes.left = self.excess.len();
            self.retry_groups.left = self.groups.len();
            self.retry_hosts.left = self.unplaced_hosts.len();
        }
        let groups = |from| self.groups.range((from, Bound::Unbounded)).map(|(&number, _)| number);
        for number in self.retry_groups.next(groups) {
            if self.groups.get(&number).is_some_and(|group| group.place.is_none()) {
                self.place_group(number);
            }
        }
        let hosts = |from| self.unplaced_hosts.range((from, Bound::Unbounded)).copied();
        for host in self.retry_hosts.next(hosts) {
            self.update(host);
        }
        let routes = |from| self.excess.range((from, Bound::Unbounded)).map(|(&prefix, _)| prefix);
        for prefix in self.retry_routes.next(routes) {
            self.sync(prefix);
        }
    }

    /// Applies one message.
    ///
    /// # Errors
    /// If the card cannot follow it. The driver stays in use.
    pub fn apply(&mut self, message: &ToGuest) -> Result<(), DriverError> {
        match message {
            ToGuest::Begin => self.begin_snapshot(),
            ToGuest::End => self.end_snapshot(),
            ToGuest::Vport(vport) => self.set_vport(vport)?,
            ToGuest::Local { address, own } => {
                if let Some(names) = &mut self.snapshot {
                    names.locals.insert(*address);
                }
                self.locals.insert(*address, *own);
                self.write_own_v4();
                self.update(host_prefix(*address));
                if let (IpAddr::V4(v4), true) = (address, own)
                    && !self.own_v4.contains(&Some((*v4).into()))
                {
                    return Err(DriverError::OwnAddress(*address));
                }
            }
            ToGuest::LocalGone(address) => self.remove_local(*address),
            ToGuest::Group { id, hops, mtu } => self.set_group(*id, hops, *mtu),
            ToGuest::GroupGone(id) => {
                if let Some(number) = self.by_id.remove(id) {
                    self.unname(number);
                }
            }
            ToGuest::Route { prefix, target } => {
                let prefix = route_prefix(*prefix);
                if let Some(names) = &mut self.snapshot {
                    names.routes.insert(prefix);
                }
                let target = match target {
                    RouteDecision::Punt => RouteTarget::Hook,
                    RouteDecision::Drop => RouteTarget::Blackhole,
                    // The kernel decides for a group that was never named.
                    RouteDecision::Group(id) => {
                        self.by_id.get(id).map_or(RouteTarget::Hook, |&n| RouteTarget::Group(n))
                    }
                };
                self.set_route(prefix, Some(target));
            }
            ToGuest::RouteGone(prefix) => self.set_route(route_prefix(*prefix), None),
            ToGuest::Neighbour { vport, address, mac } => {
                if let Some(names) = &mut self.snapshot {
                    names.neighbours.insert((*address, *vport));
                }
                self.set_neighbour((*address, *vport), *mac);
            }
            ToGuest::Forwarding { v4, v6 } => {
                (self.options.forwards_v4, self.options.forwards_v6) = (*v4, *v6);
                self.writes.push(TableWrite::Options(self.options));
            }
            ToGuest::Choosing { v4, v6 } => {
                (self.options.chooses_v4, self.options.chooses_v6) = (*v4, *v6);
                self.writes.push(TableWrite::Options(self.options));
            }
            ToGuest::Barrier(_) | ToGuest::Dump(_) => {}
        }
        Ok(())
    }

    fn begin_snapshot(&mut self) {
        // A snapshot that breaks off named its groups in vain.
        self.unname_unfound();
        let mut names = SnapshotNames::default();
        let mut unnamed = Vec::new();
        for (_, number) in std::mem::take(&mut self.by_id) {
            let Some(group) = self.groups.get(&number) else { continue };
            // Of two groups with the same hops, the snapshot finds one again.
            unnamed.extend(names.groups.insert((group.hops.clone(), group.mtu), number));
        }
        unnamed.into_iter().for_each(|number| self.unname(number));
        self.snapshot = Some(names);
    }

    /// Removes what the snapshot did not name.
    fn end_snapshot(&mut self) {
        self.unname_unfound();
        let Some(names) = self.snapshot.take() else { return };
        let gone = self.routes.keys().filter(|route| !names.routes.contains(route));
        for route in gone.copied().collect::<Vec<_>>() {
            self.set_route(route, None);
        }
        let gone = self.neighbours.keys().filter(|station| !names.neighbours.contains(station));
        for station in gone.copied().collect::<Vec<_>>() {
            self.set_neighbour(station, None);
        }
        let gone = self.locals.keys().filter(|address| !names.locals.contains(address));
        for address in gone.copied().collect::<Vec<_>>() {
            self.remove_local(address);
        }
        let gone = self.vports.keys().filter(|vport| !names.vports.contains(vport));
        for vport in gone.copied().collect::<Vec<_>>() {
            self.vports.remove(&vport);
            self.writes.push(TableWrite::Context(vport, None));
        }
    }

    /// Unnames the groups that the snapshot has not found again.
    fn unname_unfound(&mut self) {
        let unfound = self.snapshot.as_mut().map(|names| std::mem::take(&mut names.groups));
        for number in unfound.unwrap_or_default().into_values() {
            self.unname(number);
        }
    }

    fn set_vport(&mut self, vport: &Vport) -> Result<(), DriverError> {
        if vport.index >= CARD_VPORTS.into() {
            return Err(DriverError::Vport(vport.index));
        }
        if let Some(names) = &mut self.snapshot {
            names.vports.insert(vport.index as u8);
        }
        if vport.index == 0 {
            // As in pdp-ip: all forwarders of a router choose the same hop.
            let [_, _, rest @ ..] = vport.mac;
            self.options.seed = u32::from_be_bytes(rest).wrapping_mul(0x85eb_ca6b);
            self.writes.push(TableWrite::Options(self.options));
        }
        let context = ContextEntry {
            up: vport.up,
            forwards_v4: vport.forwards_v4,
            hooked: vport.hooked,
            mtu: mtu_bits(vport.mtu),
        };
        self.writes.push(TableWrite::Context(vport.index as u8, Some(context)));
        self.vports.insert(vport.index as u8, vport.clone());
        Ok(())
    }

    fn remove_local(&mut self, address: IpAddr) {
        self.locals.remove(&address);
        self.write_own_v4();
        self.update(host_prefix(address));
    }

    fn write_own_v4(&mut self) {
        let mut own: Vec<u32> = Vec::new();
        for (address, is_own) in &self.locals {
            if let (IpAddr::V4(address), true) = (address, is_own) {
                own.push((*address).into());
            }
        }
        // An address keeps its slot, so that no frame misses it.
        for slot in 0..OWN_V4_MAX {
            if self.own_v4[slot].is_some_and(|address| !own.contains(&address)) {
                self.own_v4[slot] = None;
                self.writes.push(TableWrite::OwnV4(slot as u8, None));
            }
        }
        own.retain(|address| !self.own_v4.contains(&Some(*address)));
        let free = (0..OWN_V4_MAX).filter(|&slot| self.own_v4[slot].is_none());
        for (slot, address) in free.collect::<Vec<_>>().into_iter().zip(own) {
            self.own_v4[slot] = Some(address);
            self.writes.push(TableWrite::OwnV4(slot as u8, Some(address)));
        }
    }

    /// True if a station's MAC address has a place or can get one.
    fn has_arp(&self, station: &Station) -> bool {
        self.arps.contains_key(station) || self.arp_places.has(1)
    }

    /// Returns the place of a station's MAC address, for one more hop. The caller has checked that
    /// there is one.
    fn refer_arp(&mut self, station: Station) -> u16 {
        if let Some((place, references)) = self.arps.get_mut(&station) {
            *references += 1;
            return *place;
        }
        let place = self.arp_places.take();
        self.arps.insert(station, (place, 1));
        let mac = self.neighbours.get(&station).copied();
        self.writes.push(TableWrite::Arp(place, mac));
        place
    }

    fn release_arp(&mut self, station: Station) {
        if let Some(place) = self.forget_arp(station) {
            self.arp_places.give(place);
        }
    }

    /// Takes back a hop's reference to a station's MAC address. Returns its place after the last.
    fn forget_arp(&mut self, station: Station) -> Option<u16> {
        let (place, references) = self.arps.get_mut(&station)?;
        *references -= 1;
        let place = *place;
        if *references > 0 {
            return None;
        }
        self.arps.remove(&station);
        Some(place)
    }

    fn set_group(&mut self, id: GroupId, hops: &[GroupHop], mtu: u32) {
        let hops = &hops[..hops.len().min(HOPS_MAX)];
        let found = self.snapshot.as_mut().and_then(|names| {
            if self.by_id.contains_key(&id) {
                None
            } else {
                names.groups.remove(&(hops.to_vec(), mtu))
            }
        });
        let number = self.by_id.get(&id).copied().or(found).unwrap_or_else(|| {
            self.next_group += 1;
            let group = DriverGroup { named: true, ..DriverGroup::default() };
            self.groups.insert(self.next_group, group);
            self.next_group
        });
        self.by_id.insert(id, number);
        let Some(group) = self.groups.get_mut(&number) else { return };
        if group.hops == hops && group.mtu == mtu && group.place.is_some() {
            return;
        }
        let old_link = (group.link(), group.mtu);
        group.buckets = pdp_ip::buckets(hops, &group.hops, &group.buckets);
        (group.hops, group.mtu) = (hops.to_vec(), mtu);
        let link = (group.link(), group.mtu);
        self.place_group(number);
        // The group may have become, or ceased to be, one for a link.
        if old_link != link && (old_link.0.is_some() || link.0.is_some()) {
            let stations: Vec<IpAddr> = self.neighbours.keys().map(|station| station.0).collect();
            stations.into_iter().for_each(|address| self.update(host_prefix(address)));
        }
    }

    /// Writes a group's hops to new places, then the group. If they do not fit, the group loses its
    /// place.
    fn place_group(&mut self, number: GroupNumber) {
        let Some(group) = self.groups.get_mut(&number) else { return };
        let old = group.place.take();
        let group = group.clone();
        let new = self.write_group(&group, old.as_ref());
        let moves = old.is_some() != new.is_some();
        let keeps_block = new.as_ref().is_some_and(|new| new.block.is_some());
        let keeps_index = new.is_some();
        if let Some(group) = self.groups.get_mut(&number) {
            group.place = new;
        }
        if moves {
            let mine = |(_, target): &(_, &_)| *target == &RouteTarget::Group(number);
            let routes: Vec<_> = self.routes.iter().filter(mine).map(|(p, _)| *p).collect();
            routes.into_iter().for_each(|prefix| self.sync(prefix));
        }
        if let Some(old) = old {
            self.release_hops(&old);
            if let Some(block) = old.block.filter(|_| !keeps_block) {
                self.block_places.give(block);
            }
            if !keeps_index {
                self.group_places.give(old.index);
            }
        }
    }

    /// Writes a group; it keeps its index and its block. Returns `None` if it does not fit.
    fn write_group(&mut self, group: &DriverGroup, old: Option<&GroupPlace>) -> Option<GroupPlace> {
        let gateways = group.hops.iter().filter_map(|hop| Some((hop.gateway?, hop.vport)));
        let stations: Vec<Station> = gateways.collect();
        let new: BTreeSet<_> = stations.iter().filter(|at| !self.arps.contains_key(at)).collect();
        let (old_index, old_block) = (old.map(|old| old.index), old.and_then(|old| old.block));
        let needs_block = group.hops.len() > 1 && old_block.is_none();
        let fits = self.arp_places.has(new.len())
            && self.hop_places.has(group.hops.len())
            && self.block_places.has(needs_block.into())
            && self.group_places.has(old_index.is_none().into());
        if !fits {
            return None;
        }
        let mut hop_places = Vec::new();
        for hop in &group.hops {
            let arp = hop.gateway.map(|gateway| self.refer_arp((gateway, hop.vport)));
            let place = self.hop_places.take();
            hop_places.push(place);
            // A hop by a vport that the card does not have is punted.
            let entry = u8::try_from(hop.vport).ok().filter(|vport| *vport < CARD_VPORTS);
            let entry = entry.map(|vport| HopEntry {
                vport,
                chosen: group.hops.len() > 1,
                arp,
                mtu: group.mtu_bits(),
            });
            self.writes.push(TableWrite::Hop(place, entry));
        }
        let mut block = None;
        let entry = match hop_places[..] {
            [] => GroupEntry::Empty,
            [hop] => GroupEntry::Hop(hop),
            _ => {
                let at = old_block.unwrap_or_else(|| self.block_places.take());
                block = Some(at);
                for (bucket, &hop) in (0..=u8::MAX).zip(&group.buckets) {
                    let hop = hop_places[usize::from(hop)];
                    self.writes.push(TableWrite::Bucket { block: at, bucket, hop });
                }
                GroupEntry::Block(at)
            }
        };
        let index = old_index.unwrap_or_else(|| self.group_places.take());
        self.writes.push(TableWrite::Group(index, entry));
        Some(GroupPlace { index, hops: hop_places, stations, block })
    }

    fn release_hops(&mut self, place: &GroupPlace) {
        for &hop in &place.hops {
            self.hop_places.give(hop);
        }
        for &station in &place.stations {
            self.release_arp(station);
        }
    }

    fn unname(&mut self, number: GroupNumber) {
        if let Some(group) = self.groups.get_mut(&number) {
            group.named = false;
        }
        self.free_if_unused(number);
    }

    fn free_if_unused(&mut self, number: GroupNumber) {
        let unused = |group: &DriverGroup| group.references == 0 && !group.named;
        if !self.groups.get(&number).is_some_and(unused) {
            return;
        }
        if let Some(place) = self.groups.remove(&number).and_then(|group| group.place) {
            self.release_hops(&place);
            self.group_places.give(place.index);
            if let Some(block) = place.block {
                self.block_places.give(block);
            }
        }
    }

    fn set_route(&mut self, prefix: RoutePrefix, target: Option<RouteTarget>) {
        if let Some(RouteTarget::Group(number)) = target
            && let Some(group) = self.groups.get_mut(&number)
        {
            group.references += 1;
        }
        let old = match target {
            Some(target) => self.routes.insert(prefix, target),
            None => self.routes.remove(&prefix),
        };
        self.update(prefix);
        let net = net_of(&prefix);
        let covered = (net.network(), 0)..=(net.broadcast(), u16::MAX);
        let stations: Vec<IpAddr> =
            self.neighbours.range(covered).map(|(station, _)| station.0).collect();
        for address in stations {
            self.update(host_prefix(address));
        }
        if let Some(RouteTarget::Group(number)) = old {
            if let Some(group) = self.groups.get_mut(&number) {
                group.references -= 1;
            }
            self.free_if_unused(number);
        }
    }

    fn set_neighbour(&mut self, station: Station, mac: Option<MacAddress>) {
        match mac {
            Some(mac) => self.neighbours.insert(station, mac),
            None => self.neighbours.remove(&station),
        };
        if let Some((place, _)) = self.arps.get(&station) {
            self.writes.push(TableWrite::Arp(*place, mac));
        }
        self.update(host_prefix(station.0));
    }

    /// Returns the longest route that covers a host.
    fn route_of(&self, host: &RoutePrefix) -> Option<RouteTarget> {
        let prefix = |length| masked(host.family, host.key, length);
        (0..=host.length).rev().find_map(|length| self.routes.get(&prefix(length)).copied())
    }

    /// Returns the station and the MTU if a host is a known station on a link.
    fn link_station(&self, host: &RoutePrefix) -> Option<(Station, u16)> {
        let RouteTarget::Group(number) = self.route_of(host)? else { return None };
        let group = self.groups.get(&number)?;
        let station = (host_address(host), group.link()?);
        let known = self.neighbours.contains_key(&station) && station.1 < CARD_VPORTS.into();
        known.then_some((station, group.mtu_bits()))
    }

    /// Brings a prefix's host group and leaf up to date.
    fn update(&mut self, prefix: RoutePrefix) {
        self.unplaced_hosts.remove(&prefix);
        let is_host = prefix.length == prefix.family.bits();
        let is_local = is_host && self.locals.contains_key(&host_address(&prefix));
        let station = if is_host && !is_local { self.link_station(&prefix) } else { None };
        let old = self.host_groups.get(&prefix).copied();
        let stays = match (station, old) {
            (Some((station, mtu)), Some(old)) => station == old.station && mtu == old.mtu,
            (station, old) => station.is_none() && old.is_none(),
        };
        if !stays {
            self.host_groups.remove(&prefix);
            if let Some((station, mtu)) = station {
                self.place_host(prefix, station, mtu);
            }
        }
        self.sync(prefix);
        if let (false, Some(old)) = (stays, old) {
            self.hop_places.give(old.hop);
            self.group_places.give(old.index);
            self.release_arp(old.station);
        }
    }

    /// Writes the group of a station on a link, if there is a place.
    fn place_host(&mut self, prefix: RoutePrefix, station: Station, mtu: u16) {
        let fits = self.host_groups.len() < self.hosts_max
            && self.has_arp(&station)
            && self.hop_places.has(1)
            && self.group_places.has(1);
        if !fits {
            self.unplaced_hosts.insert(prefix);
            return;
        }
        let arp = Some(self.refer_arp(station));
        let (hop, index) = (self.hop_places.take(), self.group_places.take());
        let entry = HopEntry { vport: station.1 as u8, chosen: false, arp, mtu };
        self.writes.push(TableWrite::Hop(hop, Some(entry)));
        self.writes.push(TableWrite::Group(index, GroupEntry::Hop(hop)));
        self.host_groups.insert(prefix, HostGroup { station, mtu, index, hop });
    }

    /// Undoes [`VeDriver::place_host`] if the host route does not fit. The route of the link punts
    /// its packets as neighbour. Returns false if the prefix needs a leaf for other reasons.
    fn unplace_host(&mut self, prefix: &RoutePrefix) -> bool {
        if self.trie.get(prefix).is_some() || self.routes.contains_key(prefix) {
            return false;
        }
        let Some(host) = self.host_groups.remove(prefix) else { return false };
        // No leaf leads to these places. To retire them would start the next round of retries.
        self.hop_places.give_unread(host.hop);
        self.group_places.give_unread(host.index);
        if let Some(place) = self.forget_arp(host.station) {
            self.arp_places.give_unread(place);
        }
        self.unplaced_hosts.insert(*prefix);
        true
    }

    /// Returns the leaf of a prefix if all had a place.
    fn wanted(&self, prefix: &RoutePrefix) -> Option<Leaf> {
        let is_host = prefix.length == prefix.family.bits();
        if is_host && self.locals.contains_key(&host_address(prefix)) {
            return Some(Leaf { kind: LeafKind::Local, group: 0 });
        }
        if let Some(host) = self.host_groups.get(prefix) {
            return Some(Leaf::group(host.index));
        }
        self.routes.get(prefix).map(|target| match target {
            RouteTarget::Hook => Leaf { kind: LeafKind::Hook, group: 0 },
            RouteTarget::Blackhole => Leaf { kind: LeafKind::Blackhole, group: 0 },
            RouteTarget::Group(number) => {
                let place = self.groups.get(number).and_then(|group| group.place.as_ref());
                place.map_or(EXCESS, |place| Leaf::group(place.index))
            }
        })
    }

    /// Returns the leaf that a prefix must have beside the excess routes: a cover is excess, and so
    /// is each route between a cover and its route.
    fn required(&self, prefix: &RoutePrefix) -> Option<Leaf> {
        let last = RoutePrefix {
            key: prefix.key | u128::MAX.checked_shr(prefix.length).unwrap_or(0),
            length: u32::MAX,
            ..*prefix
        };
        let wanted = self.wanted(prefix);
        for (route, cover) in self.excess.range(*prefix..=last) {
            debug_assert!(route.length >= prefix.length);
            if cover == prefix && cover.length > ROOT_BITS {
                return Some(EXCESS);
            }
            if (ROOT_BITS + 1..prefix.length).contains(&cover.length) && wanted.is_some() {
                return Some(EXCESS);
            }
        }
        wanted
    }

    fn write_leaf(&mut self, prefix: RoutePrefix, leaf: Option<Leaf>) -> Result<(), SegmentFull> {
        if leaf == self.trie.get(&prefix) {
            return Ok(());
        }
        let mut writes = Vec::new();
        match leaf {
            Some(leaf) => self.trie.insert(prefix, leaf, &mut writes)?,
            None => self.trie.remove(prefix, &mut writes)?,
        };
        self.writes.extend(writes.into_iter().map(TableWrite::Lpm));
        Ok(())
    }

    /// Brings a prefix's leaf up to date, or makes the prefix excess.
    fn sync(&mut self, prefix: RoutePrefix) {
        let cover = self.excess.remove(&prefix);
        let leaf = self.required(&prefix);
        match (self.write_leaf(prefix, leaf), cover) {
            (Ok(()), Some(cover)) => self.uncover(prefix, cover),
            (Ok(()), None) => {}
            (Err(_), Some(cover)) => {
                self.excess.insert(prefix, cover);
            }
            (Err(_), None) if self.unplace_host(&prefix) => {}
            (Err(_), None) => {
                let cover = self.cover(prefix);
                self.excess.insert(prefix, cover);
            }
        }
    }

    /// Covers a prefix whose leaf does not fit; returns the cover.
    fn cover(&mut self, prefix: RoutePrefix) -> RoutePrefix {
        let at = |length| masked(prefix.family, prefix.key, length);
        let lengths = if self.trie.get(&prefix).is_some() {
            // The old leaf must go.
            prefix.length..prefix.length + 1
        } else {
            // A cover above another route would not cover this one.
            let longest = (ROOT_BITS + 1..prefix.length).rev();
            let longest = longest.into_iter().find(|&length| self.trie.get(&at(length)).is_some());
            longest.unwrap_or(ROOT_BITS + 1)..prefix.length
        };
        for cover in lengths.rev().filter(|&length| length > ROOT_BITS).map(at) {
            if self.write_leaf(cover, Some(EXCESS)).is_ok() {
                return cover;
            }
        }
        let cover = at(prefix.length.min(ROOT_BITS));
        self.block(&cover, true);
        cover
    }

    /// Removes the cover of a prefix that is excess no longer.
    fn uncover(&mut self, prefix: RoutePrefix, cover: RoutePrefix) {
        if cover.length <= ROOT_BITS {
            self.block(&cover, false);
            return;
        }
        for length in cover.length..prefix.length {
            let between = masked(prefix.family, prefix.key, length);
            if self.trie.get(&between).is_some() {
                self.sync(between);
            }
        }
    }

    /// Adds a cover to the slots of level 0 under it, or removes it. A slot with covers is excess.
    fn block(&mut self, cover: &RoutePrefix, blocks: bool) {
        let mut writes = Vec::new();
        for slot in LpmTrie::root_slots(cover) {
            let covers = self.blocked.entry((cover.family, slot)).or_default();
            *covers = if blocks { *covers + 1 } else { *covers - 1 };
            self.trie.block(cover.family, slot, *covers > 0, &mut writes);
        }
        self.writes.extend(writes.into_iter().map(TableWrite::Lpm));
    }
}

/// Returns writes after which no packet has a route, and no vport a context.
pub(crate) fn clear_writes(options: VeOptions) -> Vec<TableWrite> {
    let mut writes = vec![TableWrite::Options(options)];
    writes.extend((0..CARD_VPORTS).map(|vport| TableWrite::Context(vport, None)));
    writes.extend((0..OWN_V4_MAX).map(|slot| TableWrite::OwnV4(slot as u8, None)));
    writes.extend(LpmTrie::clear_writes().into_iter().map(TableWrite::Lpm));
    writes
}

/// Returns the prefix of the first `length` bits.
fn masked(family: RouteFamily, key: u128, length: u32) -> RoutePrefix {
    let behind = u128::MAX.checked_shr(length).unwrap_or(0);
    RoutePrefix { family, key: key & !behind, length }
}

fn host_prefix(address: IpAddr) -> RoutePrefix {
    route_prefix(address.into())
}

fn host_address(host: &RoutePrefix) -> IpAddr {
    match host.family {
        RouteFamily::V4 => IpAddr::V4(((host.key >> 96) as u32).into()),
        RouteFamily::V6 => IpAddr::V6(host.key.into()),
    }
}

/// Returns a prefix in the mirror's form.
fn net_of(prefix: &RoutePrefix) -> IpNet {
    let address = host_address(prefix);
    match address {
        IpAddr::V4(address) => Ipv4Net::new_assert(address, prefix.length as u8).into(),
        IpAddr::V6(address) => Ipv6Net::new_assert(address, prefix.length as u8).into(),
    }
}

pub(crate) fn route_prefix(net: IpNet) -> RoutePrefix {
    match net {
        IpNet::V4(net) => {
            let key = u128::from(u32::from(net.network())) << 96;
            masked(RouteFamily::V4, key, net.prefix_len().into())
        }
        IpNet::V6(net) => masked(RouteFamily::V6, net.network().into(), net.prefix_len().into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::TableRange;

    fn driver(groups: u16) -> VeDriver {
        let range = |length| TableRange { base: 0, length };
        let hops =
            HopSegments { arps: range(8), hops: range(8), blocks: range(1), groups: range(groups) };
        let lpm = LpmSegment { node_base: 0, node_length: 64, leaf_base: 0, leaf_length: 512 };
        VeDriver::new(&hops, &lpm)
    }

    fn group(id: GroupId, gateways: &[u8]) -> ToGuest {
        let gateway = |&last: &u8| Some(IpAddr::from([10, 0, 0, last]));
        let hop = |last| GroupHop { vport: 1, gateway: gateway(last), weight: 1 };
        ToGuest::Group { id, hops: gateways.iter().map(hop).collect(), mtu: 0 }
    }

    /// The writes so far are in the tables.
    fn retire(driver: &mut VeDriver) {
        driver.take_writes();
        driver.retire();
    }

    fn neighbour(last: u8, known: bool) -> ToGuest {
        let address = [10, 0, 0, last].into();
        ToGuest::Neighbour { vport: 1, address, mac: known.then_some([2, 0, 0, 0, 0, last]) }
    }

    /// Makes a link on vport 1.
    fn link(driver: &mut VeDriver) {
        let hops = vec![GroupHop { vport: 1, gateway: None, weight: 1 }];
        driver.apply(&ToGuest::Group { id: 9, hops, mtu: 0 }).unwrap();
        let (prefix, target) = ("10.0.0.0/24".parse().unwrap(), RouteDecision::Group(9));
        driver.apply(&ToGuest::Route { prefix, target }).unwrap();
    }

    #[test]
    fn stations_leave_a_quarter_of_the_places_to_routes() {
        let mut driver = driver(8);
        link(&mut driver);
        (1..=20).for_each(|last| driver.apply(&neighbour(last, true)).unwrap());
        assert_eq!((driver.host_groups.len(), driver.unplaced_hosts.len()), (6, 14));
        driver.apply(&group(1, &[100])).unwrap();
        assert_eq!(driver.groups.values().filter(|group| group.place.is_none()).count(), 0);
        // A station that goes makes room for another one, and is forgotten.
        (1..=10).for_each(|last| driver.apply(&neighbour(last, false)).unwrap());
        assert_eq!((driver.host_groups.len(), driver.unplaced_hosts.len()), (0, 10));
        retire(&mut driver);
        assert_eq!((driver.host_groups.len(), driver.unplaced_hosts.len()), (6, 4));
    }

    #[test]
    fn stations_without_a_leaf_give_their_places_back() {
        let range = |length| TableRange { base: 0, length };
        let hops =
            HopSegments { arps: range(8), hops: range(8), blocks: range(0), groups: range(8) };
        // Room for the link's route, but not for a host route.
        let lpm = LpmSegment { node_base: 0, node_length: 3, leaf_base: 0, leaf_length: 8 };
        let mut driver = VeDriver::new(&hops, &lpm);
        link(&mut driver);
        let free = driver.free_tables();
        driver.apply(&neighbour(1, true)).unwrap();
        driver.apply(&neighbour(2, true)).unwrap();
        assert_eq!((driver.unplaced_hosts.len(), driver.excess_count()), (2, 0));
        assert_eq!(driver.free_tables(), free);
        retire(&mut driver);
        retire(&mut driver);
        assert!(driver.take_writes().is_empty(), "retries without an end");
    }

    #[test]
    #[should_panic(expected = "groups: TableRange { base: 0, length: 1025 }")]
    fn parts_that_no_index_reaches_are_refused() {
        driver(1025);
    }

    #[test]
    fn groups_enter_when_places_become_free() {
        let mut driver = driver(1);
        let prefix: IpNet = "10.0.0.0/8".parse().unwrap();
        driver.apply(&group(1, &[1])).unwrap();
        driver.apply(&group(2, &[2])).unwrap();
        driver.apply(&ToGuest::Route { prefix, target: RouteDecision::Group(2) }).unwrap();
        assert_eq!(
            (driver.trie.get(&route_prefix(prefix)), driver.excess_count()),
            (Some(EXCESS), 1)
        );
        driver.apply(&ToGuest::GroupGone(1)).unwrap();
        assert_eq!(driver.excess_count(), 1);
        retire(&mut driver);
        assert_eq!(driver.trie.get(&route_prefix(prefix)), Some(Leaf::group(0)));
        assert_eq!((driver.excess_count(), driver.arps.len()), (0, 1));
    }

    #[test]
    fn groups_stay_while_routes_refer_to_them() {
        let mut driver = driver(2);
        driver.apply(&group(1, &[1, 2])).unwrap();
        let prefix: IpNet = "10.0.0.0/8".parse().unwrap();
        let target = RouteDecision::Group(1);
        driver.apply(&ToGuest::Route { prefix, target }).unwrap();
        driver.apply(&ToGuest::GroupGone(1)).unwrap();
        assert_eq!(driver.groups.len(), 1);
        assert_eq!(driver.trie.get(&route_prefix(prefix)), Some(Leaf::group(0)));
        driver.apply(&ToGuest::RouteGone(prefix)).unwrap();
        assert!(driver.groups.is_empty() && driver.arps.is_empty() && driver.trie.is_empty());
        retire(&mut driver);
        assert_eq!(driver.block_places.free.len(), 1);
        assert_eq!(driver.hop_places.free.len(), 8);
    }

    #[test]
    fn second_snapshot_removes_what_it_does_not_name() {
        let mut driver = driver(4);
        let route = |net: &str, id| ToGuest::Route {
            prefix: net.parse().unwrap(),
            target: RouteDecision::Group(id),
        };
        let local = |last| ToGuest::Local { address: [10, 0, 0, last].into(), own: true };
        let neighbour = |last| ToGuest::Neighbour {
            vport: 1,
            address: [10, 0, 0, last].into(),
            mac: Some([2; 6]),
        };
        let messages = [group(1, &[1]), group(2, &[2]), local(1), local(2), neighbour(1)];
        let routes = [route("10.1.0.0/16", 1), route("10.2.0.0/16", 2)];
        let first = [ToGuest::Begin].into_iter().chain(messages).chain(routes);
        first.chain([ToGuest::End]).for_each(|message| driver.apply(&message).unwrap());
        driver.take_writes();
        let kept = [group(7, &[2]), local(2), neighbour(3), route("10.2.0.0/16", 7)];
        let mut second = vec![ToGuest::Begin];
        second.extend(kept);
        second.push(ToGuest::End);
        second.iter().for_each(|message| driver.apply(message).unwrap());
        // The group of the same hops is the same one, so that the kept route needs no write.
        let node_writes = driver.take_writes();
        let rewritten = node_writes.iter().any(|write| matches!(write, TableWrite::Group(..)));
        assert!(!rewritten, "{node_writes:?}");
        let all = driver.routes_after(None, 10);
        let hop = GroupHop { vport: 1, gateway: Some([10, 0, 0, 2].into()), weight: 1 };
        assert_eq!(all, [("10.2.0.0/16".parse().unwrap(), ResolvedRoute::Hops(vec![hop]))]);
        assert!(driver.routes_after(Some(*driver.routes.keys().next().unwrap()), 10).is_empty());
        assert_eq!(driver.locals.len(), 1);
        assert_eq!(driver.own_v4.iter().flatten().count(), 1);
        assert_eq!(
            driver.neighbours.keys().copied().collect::<Vec<_>>(),
            [([10, 0, 0, 3].into(), 1)]
        );
        assert_eq!(driver.groups.len(), 1);
    }

    #[test]
    fn refuses_what_the_card_does_not_have() {
        let mut driver = driver(2);
        let local = |last| ToGuest::Local { address: [10, 0, 0, last].into(), own: true };
        (0..16).for_each(|last| driver.apply(&local(last)).unwrap());
        let full = Err(DriverError::OwnAddress([10, 0, 0, 16].into()));
        assert_eq!(driver.apply(&local(16)), full);
        driver.apply(&ToGuest::LocalGone([10, 0, 0, 3].into())).unwrap();
        assert_eq!(driver.own_v4[3], Some(u32::from_be_bytes([10, 0, 0, 16])));
        let vport = Vport {
            index: 16,
            mac: [2; 6],
            mtu: 1500,
            up: true,
            hooked: Default::default(),
            macs: Vec::new(),
            forwards_v4: true,
        };
        assert_eq!(driver.apply(&ToGuest::Vport(vport)), Err(DriverError::Vport(16)));
    }
}
