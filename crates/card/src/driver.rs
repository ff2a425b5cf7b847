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
//! again after [`VeDriver::retire`]. So a frame sees each entry before or after its change.
//!
//! Limits: 16 vports, 16 own IPv4 addresses, and the VE's parts of the pooled tables. Of a group
//! with several hops, packets by a hop without gateway are punted as neighbour.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;

use ipnet::IpNet;
use pdp_proto::routes::{GroupHop, GroupId, HOPS_MAX, RouteDecision, ToGuest, Vport};

use crate::table::{
    ContextEntry, GroupEntry, HopEntry, HopSegments, MacAddress, TableWrite, VeOptions,
};
use crate::trie::{LpmTrie, RoutePrefix, SegmentFull};
use crate::{Leaf, LeafKind, LpmSegment, RouteFamily};

/// Vports of a VE.
pub const CARD_VPORTS: u8 = 16;

/// Own IPv4 addresses of a VE.
pub const OWN_V4_MAX: usize = 16;

/// Levels of the look-up.
const LEVELS: u8 = 20;

/// Largest size of a packet in the tables; more than a frame can have.
const MTU_MAX: u16 = (1 << 14) - 1;

/// Error from a message whose entries do not fit. Some of its writes may be done, so the driver
/// must not be used further.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DriverError {
    /// A route does not fit.
    #[error("route: {0}")]
    Route(#[from] SegmentFull),
    /// A table is full.
    #[error("all {length} entries of the VE in table {table} are used: give it a larger part")]
    Full {
        /// The table.
        table: &'static str,
        /// Number of its entries.
        length: u16,
    },
    /// A snapshot begins, and the tables are not empty.
    #[error("a snapshot for a VE with tables: make a new driver for it")]
    Snapshot,
}

/// Free places of a table.
#[derive(Clone, Debug)]
struct FreePlaces {
    table: &'static str,
    length: u16,
    /// The last one is used next.
    free: Vec<u16>,
    /// Frames on the way may still read these.
    pending: Vec<u16>,
}

impl FreePlaces {
    fn new(table: &'static str, length: u16) -> Self {
        Self { table, length, free: (0..length).rev().collect(), pending: Vec::new() }
    }

    fn take(&mut self) -> Result<u16, DriverError> {
        let full = DriverError::Full { table: self.table, length: self.length };
        self.free.pop().ok_or(full)
    }

    fn give(&mut self, place: u16) {
        self.pending.push(place);
    }

    fn retire(&mut self) {
        self.free.append(&mut self.pending);
    }
}

/// A neighbour: egress vport and address.
type Station = (u16, IpAddr);

/// Number of a [`DriverGroup`].
type GroupNumber = u32;

/// A group of the mirror.
#[derive(Clone, Debug, Default)]
struct DriverGroup {
    hops: Vec<GroupHop>,
    mtu: u32,
    /// As [`pdp_ip::buckets`] returns them.
    buckets: Vec<u8>,
    index: u16,
    hop_places: Vec<u16>,
    block: Option<u16>,
    /// Number of routes that refer to it.
    references: usize,
    /// A group of the mirror has this number.
    named: bool,
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
    trie: LpmTrie,
    arp_places: FreePlaces,
    hop_places: FreePlaces,
    block_places: FreePlaces,
    group_places: FreePlaces,
    writes: Vec<TableWrite>,
}

impl VeDriver {
    /// Makes a driver for a VE with these parts of the tables.
    pub fn new(hops: &HopSegments, lpm: &LpmSegment) -> Self {
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
            trie: LpmTrie::new(LEVELS, lpm.node_length, lpm.leaf_length),
            arp_places: FreePlaces::new("neighbours", hops.arps.length),
            hop_places: FreePlaces::new("next hops", hops.hops.length),
            block_places: FreePlaces::new("blocks of buckets", hops.blocks.length),
            group_places: FreePlaces::new("groups", hops.groups.length),
            writes: Vec::new(),
        }
    }

    /// Returns writes that empty the VE's tables, after the super user has given it its parts.
    pub fn clear_writes(&self) -> Vec<TableWrite> {
        let mut writes = vec![TableWrite::Options(self.options)];
        writes.extend((0..CARD_VPORTS).map(|vport| TableWrite::Context(vport, None)));
        writes.extend((0..OWN_V4_MAX).map(|slot| TableWrite::OwnV4(slot as u8, None)));
        writes.extend(LpmTrie::clear_writes().into_iter().map(TableWrite::Lpm));
        writes
    }

    /// Takes the writes of the messages so far, in their order.
    pub fn take_writes(&mut self) -> Vec<TableWrite> {
        std::mem::take(&mut self.writes)
    }

    /// Frees the places that earlier messages left. All their writes are in the tables, and all
    /// frames that entered before have left.
    pub fn retire(&mut self) {
        self.trie.retire(self.trie.change());
        for places in [
            &mut self.arp_places,
            &mut self.hop_places,
            &mut self.block_places,
            &mut self.group_places,
        ] {
            places.retire();
        }
    }

    /// Applies one message.
    ///
    /// # Errors
    /// If its entries do not fit.
    pub fn apply(&mut self, message: &ToGuest) -> Result<(), DriverError> {
        match message {
            ToGuest::Begin => {
                let empty = self.vports.is_empty() && self.locals.is_empty();
                let no_routes = self.routes.is_empty() && self.by_id.is_empty();
                if !(empty && no_routes && self.neighbours.is_empty()) {
                    return Err(DriverError::Snapshot);
                }
            }
            ToGuest::Vport(vport) => self.set_vport(vport),
            ToGuest::Local { address, own } => {
                self.locals.insert(*address, *own);
                self.write_own_v4()?;
                self.update(host_prefix(*address))?;
            }
            ToGuest::LocalGone(address) => {
                self.locals.remove(address);
                self.write_own_v4()?;
                self.update(host_prefix(*address))?;
            }
            ToGuest::Group { id, hops, mtu } => self.set_group(*id, hops, *mtu)?,
            ToGuest::GroupGone(id) => {
                if let Some(number) = self.by_id.remove(id) {
                    if let Some(group) = self.groups.get_mut(&number) {
                        group.named = false;
                    }
                    self.free_if_unused(number);
                }
            }
            ToGuest::Route { prefix, target } => {
                let target = match target {
                    RouteDecision::Punt => RouteTarget::Hook,
                    RouteDecision::Drop => RouteTarget::Blackhole,
                    // The kernel decides for a group that was never named.
                    RouteDecision::Group(id) => {
                        self.by_id.get(id).map_or(RouteTarget::Hook, |&n| RouteTarget::Group(n))
                    }
                };
                self.set_route(route_prefix(*prefix), Some(target))?;
            }
            ToGuest::RouteGone(prefix) => self.set_route(route_prefix(*prefix), None)?,
            ToGuest::Neighbour { vport, address, mac } => {
                self.set_neighbour((*vport, *address), *mac)?;
            }
            ToGuest::Forwarding { v4, v6 } => {
                (self.options.forwards_v4, self.options.forwards_v6) = (*v4, *v6);
                self.writes.push(TableWrite::Options(self.options));
            }
            ToGuest::Choosing { v4, v6 } => {
                (self.options.chooses_v4, self.options.chooses_v6) = (*v4, *v6);
                self.writes.push(TableWrite::Options(self.options));
            }
            ToGuest::End | ToGuest::Barrier(_) | ToGuest::Dump(_) => {}
        }
        Ok(())
    }

    fn set_vport(&mut self, vport: &Vport) {
        if vport.index >= CARD_VPORTS.into() {
            return;
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
    }

    fn write_own_v4(&mut self) -> Result<(), DriverError> {
        let mut own: Vec<u32> = Vec::new();
        for (address, is_own) in &self.locals {
            if let (IpAddr::V4(address), true) = (address, is_own) {
                own.push((*address).into());
            }
        }
        if own.len() > OWN_V4_MAX {
            let length = OWN_V4_MAX as u16;
            return Err(DriverError::Full { table: "own IPv4 addresses", length });
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
        Ok(())
    }

    /// Returns the place of a station's MAC address, for one more hop.
    fn refer_arp(&mut self, station: Station) -> Result<u16, DriverError> {
        if let Some((place, references)) = self.arps.get_mut(&station) {
            *references += 1;
            return Ok(*place);
        }
        let place = self.arp_places.take()?;
        self.arps.insert(station, (place, 1));
        let mac = self.neighbours.get(&station).copied();
        self.writes.push(TableWrite::Arp(place, mac));
        Ok(place)
    }

    fn release_arp(&mut self, station: Station) {
        if let Some((place, references)) = self.arps.get_mut(&station) {
            *references -= 1;
            if *references == 0 {
                self.arp_places.give(*place);
                self.arps.remove(&station);
            }
        }
    }

    fn set_group(&mut self, id: GroupId, hops: &[GroupHop], mtu: u32) -> Result<(), DriverError> {
        let hops = &hops[..hops.len().min(HOPS_MAX)];
        let number = match self.by_id.get(&id) {
            Some(&number) => number,
            None => {
                let number = self.next_group;
                self.next_group += 1;
                let index = self.group_places.take()?;
                self.writes.push(TableWrite::Group(index, GroupEntry::Empty));
                self.groups
                    .insert(number, DriverGroup { index, named: true, ..Default::default() });
                self.by_id.insert(id, number);
                number
            }
        };
        let Some(mut group) = self.groups.remove(&number) else { return Ok(()) };
        if group.hops == hops && group.mtu == mtu {
            self.groups.insert(number, group);
            return Ok(());
        }
        let old = group.clone();
        group.buckets = pdp_ip::buckets(hops, &old.hops, &old.buckets);
        (group.hops, group.mtu) = (hops.to_vec(), mtu);
        group.hop_places.clear();
        for hop in hops {
            let arp = match hop.gateway {
                Some(gateway) => Some(self.refer_arp((hop.vport, gateway))?),
                None => None,
            };
            let place = self.hop_places.take()?;
            group.hop_places.push(place);
            // The mirror never names a vport that the card does not have.
            let entry = u8::try_from(hop.vport).ok().filter(|vport| *vport < CARD_VPORTS);
            let entry = entry.map(|vport| HopEntry {
                vport,
                chosen: hops.len() > 1,
                arp,
                mtu: group.mtu_bits(),
            });
            self.writes.push(TableWrite::Hop(place, entry));
        }
        let entry = match group.hop_places[..] {
            [] => GroupEntry::Empty,
            [hop] => GroupEntry::Hop(hop),
            _ => {
                let block = match group.block {
                    Some(block) => block,
                    None => self.block_places.take()?,
                };
                group.block = Some(block);
                for (bucket, &hop) in (0..=u8::MAX).zip(&group.buckets) {
                    let hop = group.hop_places[usize::from(hop)];
                    self.writes.push(TableWrite::Bucket { block, bucket, hop });
                }
                GroupEntry::Block(block)
            }
        };
        self.writes.push(TableWrite::Group(group.index, entry));
        if hops.len() < 2
            && let Some(block) = group.block.take()
        {
            self.block_places.give(block);
        }
        self.groups.insert(number, group);
        self.release_hops(&old);
        // The group may have become, or ceased to be, one for a link.
        let stations: Vec<IpAddr> = self.neighbours.keys().map(|station| station.1).collect();
        stations.into_iter().try_for_each(|address| self.update(host_prefix(address)))
    }

    fn release_hops(&mut self, group: &DriverGroup) {
        for (hop, &place) in group.hops.iter().zip(&group.hop_places) {
            self.hop_places.give(place);
            if let Some(gateway) = hop.gateway {
                self.release_arp((hop.vport, gateway));
            }
        }
    }

    fn free_if_unused(&mut self, number: GroupNumber) {
        let unused = |group: &DriverGroup| group.references == 0 && !group.named;
        if !self.groups.get(&number).is_some_and(unused) {
            return;
        }
        if let Some(group) = self.groups.remove(&number) {
            self.release_hops(&group);
            self.group_places.give(group.index);
            if let Some(block) = group.block {
                self.block_places.give(block);
            }
        }
    }

    fn set_route(
        &mut self,
        prefix: RoutePrefix,
        target: Option<RouteTarget>,
    ) -> Result<(), DriverError> {
        if let Some(RouteTarget::Group(number)) = target
            && let Some(group) = self.groups.get_mut(&number)
        {
            group.references += 1;
        }
        let old = match target {
            Some(target) => self.routes.insert(prefix, target),
            None => self.routes.remove(&prefix),
        };
        self.update(prefix)?;
        let covered = |station: &&Station| covers(&prefix, &host_prefix(station.1));
        let stations: Vec<_> = self.neighbours.keys().filter(covered).copied().collect();
        for (_, address) in stations {
            self.update(host_prefix(address))?;
        }
        if let Some(RouteTarget::Group(number)) = old {
            if let Some(group) = self.groups.get_mut(&number) {
                group.references -= 1;
            }
            self.free_if_unused(number);
        }
        Ok(())
    }

    fn set_neighbour(
        &mut self,
        station: Station,
        mac: Option<MacAddress>,
    ) -> Result<(), DriverError> {
        match mac {
            Some(mac) => self.neighbours.insert(station, mac),
            None => self.neighbours.remove(&station),
        };
        if let Some((place, _)) = self.arps.get(&station) {
            self.writes.push(TableWrite::Arp(*place, mac));
        }
        self.update(host_prefix(station.1))
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
        let station = (group.link()?, host_address(host));
        let known = self.neighbours.contains_key(&station) && station.0 < CARD_VPORTS.into();
        known.then_some((station, group.mtu_bits()))
    }

    /// Writes the leaf of a prefix anew if it has changed.
    fn update(&mut self, prefix: RoutePrefix) -> Result<(), DriverError> {
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
                let arp = Some(self.refer_arp(station)?);
                let (hop, index) = (self.hop_places.take()?, self.group_places.take()?);
                let vport = station.0 as u8;
                let entry = HopEntry { vport, chosen: false, arp, mtu };
                self.writes.push(TableWrite::Hop(hop, Some(entry)));
                self.writes.push(TableWrite::Group(index, GroupEntry::Hop(hop)));
                self.host_groups.insert(prefix, HostGroup { station, mtu, index, hop });
            }
        }
        let leaf = if is_local {
            Some(Leaf { kind: LeafKind::Local, group: 0 })
        } else if let Some(host) = self.host_groups.get(&prefix) {
            Some(Leaf::group(host.index))
        } else {
            self.routes.get(&prefix).map(|target| match target {
                RouteTarget::Hook => Leaf { kind: LeafKind::Hook, group: 0 },
                RouteTarget::Blackhole => Leaf { kind: LeafKind::Blackhole, group: 0 },
                RouteTarget::Group(number) => {
                    self.groups.get(number).map_or(Leaf::NONE, |group| Leaf::group(group.index))
                }
            })
        };
        if leaf != self.trie.get(&prefix) {
            let mut writes = Vec::new();
            match leaf {
                Some(leaf) => self.trie.insert(prefix, leaf, &mut writes)?,
                None => self.trie.remove(prefix, &mut writes)?,
            };
            self.writes.extend(writes.into_iter().map(TableWrite::Lpm));
        }
        if let (false, Some(old)) = (stays, old) {
            self.hop_places.give(old.hop);
            self.group_places.give(old.index);
            self.release_arp(old.station);
        }
        Ok(())
    }
}

/// Returns the prefix of the first `length` bits.
fn masked(family: RouteFamily, key: u128, length: u32) -> RoutePrefix {
    let behind = u128::MAX.checked_shr(length).unwrap_or(0);
    RoutePrefix { family, key: key & !behind, length }
}

fn covers(prefix: &RoutePrefix, host: &RoutePrefix) -> bool {
    prefix.family == host.family && masked(host.family, host.key, prefix.length) == *prefix
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

fn route_prefix(net: IpNet) -> RoutePrefix {
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

    #[test]
    fn freed_places_are_used_again_after_retire() {
        let mut driver = driver(1);
        let full = Err(DriverError::Full { table: "groups", length: 1 });
        driver.apply(&group(1, &[1])).unwrap();
        assert_eq!(driver.apply(&group(2, &[2])), full);
        driver.apply(&ToGuest::GroupGone(1)).unwrap();
        assert_eq!(driver.apply(&group(2, &[2])), full);
        driver.retire();
        driver.apply(&group(2, &[2])).unwrap();
        assert_eq!(driver.arps.len(), 1);
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
        driver.retire();
        assert_eq!(driver.block_places.free.len(), 1);
        assert_eq!(driver.hop_places.free.len(), 8);
    }

    #[test]
    fn second_snapshot_is_an_error() {
        let mut driver = driver(2);
        driver.apply(&ToGuest::Begin).unwrap();
        driver.apply(&group(1, &[1])).unwrap();
        driver.apply(&ToGuest::End).unwrap();
        assert_eq!(driver.apply(&ToGuest::Begin), Err(DriverError::Snapshot));
    }

    #[test]
    fn seventeenth_own_address_is_an_error() {
        let mut driver = driver(2);
        let local = |last| ToGuest::Local { address: [10, 0, 0, last].into(), own: true };
        (0..16).for_each(|last| driver.apply(&local(last)).unwrap());
        let full = DriverError::Full { table: "own IPv4 addresses", length: 16 };
        assert_eq!(driver.apply(&local(16)), Err(full));
    }
}
