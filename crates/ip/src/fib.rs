//! The router's tables: routes to groups to neighbours and vports.
//!
//! Applies the mirror's messages in order. During a snapshot, each entry that
//! it names gets the snapshot's generation. After the snapshot and before any
//! further message, the rest is swept in bounded pieces ([`Fib::sweep_some`]).

use std::collections::HashMap;
use std::hash::Hash;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use pdp_lookup::{TableV4, TableV6, VALUE_MAX, WalkCursor};
use pdp_proto::routes::{ResolvedRoute, RouteDecision, ToGuest, Vport};
use pdp_wire::tag::VPORTS_MAX;

use crate::group::{GroupIndex, NexthopGroups, ResolvedHop};
use crate::neighbour::NeighbourTable;

/// Values in the tables: these two, or the index of a group.
const PUNT: u32 = VALUE_MAX;
const DROP: u32 = VALUE_MAX - 1;

/// Routes per step of a sweep.
const SWEEP_STEP: usize = 256;

/// Result of a route look-up.
#[derive(Clone, Copy, Debug)]
pub(crate) enum RouteVerdict {
    /// The group at this index.
    Group(GroupIndex),
    /// Punt to the control guest.
    Punt,
    /// Drop.
    Drop,
    /// No route.
    None,
}

/// Set of addresses. For each: the last snapshot that named it, and
/// whether it is the router's own. Two of each packet's addresses are
/// looked up and rarely found, so a bit filter answers most look-ups.
#[derive(Debug)]
struct Stamped<A> {
    all: HashMap<A, (u32, bool), foldhash::fast::RandomState>,
    filter: [u64; FILTER_BITS / 64],
    /// Removed addresses whose bits are still in the filter.
    stale: usize,
}

/// Bits of the filter. With 256 addresses of the router,
/// one in four packets needs a look-up in the map.
const FILTER_BITS: usize = 1024;

/// Hash of an address: 32 bits that differ for different addresses.
trait Folded {
    fn folded(self) -> u32;
}

impl Folded for u32 {
    #[inline]
    fn folded(self) -> u32 {
        self
    }
}

impl Folded for u128 {
    #[inline]
    fn folded(self) -> u32 {
        let half = (self >> 64) as u64 ^ (self as u64).rotate_left(17);
        (half >> 32) as u32 ^ half as u32
    }
}

impl<A> Default for Stamped<A> {
    fn default() -> Self {
        Self { all: HashMap::default(), filter: [0; FILTER_BITS / 64], stale: 0 }
    }
}

impl<A: Copy + Eq + Hash + Folded> Stamped<A> {
    fn bit(address: A) -> (usize, u64) {
        let bit = address.folded().wrapping_mul(0x9e37_79b1) >> (u32::BITS - FILTER_BITS.ilog2());
        (bit as usize / 64, 1 << (bit % 64))
    }

    /// Returns true if an address in the set is the router's own.
    #[inline]
    fn get(&self, address: A) -> Option<bool> {
        let (word, bit) = Self::bit(address);
        if self.filter[word] & bit == 0 {
            return None;
        }
        self.all.get(&address).map(|(_, own)| *own)
    }

    fn insert(&mut self, address: A, generation: u32, own: bool) {
        let (word, bit) = Self::bit(address);
        self.filter[word] |= bit;
        self.all.insert(address, (generation, own));
    }

    /// Takes constant time on average. Stale bits of the filter only cost look-ups.
    fn remove(&mut self, address: A) {
        if self.all.remove(&address).is_some() {
            self.stale += 1;
        }
        if self.stale > self.all.len() {
            self.sift();
        }
    }

    /// Approximate bytes. The hash map has one more byte per address.
    fn memory_bytes(&self) -> usize {
        self.all.capacity() * (size_of::<(A, (u32, bool))>() + 1)
    }

    /// Removes addresses that this snapshot did not name.
    fn sweep(&mut self, keep: u32) {
        self.all.retain(|_, (generation, _)| *generation == keep);
        self.sift();
    }

    fn sift(&mut self) {
        self.stale = 0;
        self.filter.fill(0);
        for &address in self.all.keys() {
            let (word, bit) = Self::bit(address);
            self.filter[word] |= bit;
        }
    }
}

/// Progress of a sweep.
#[derive(Debug, Default)]
struct Sweep {
    v4: WalkCursor<u32>,
    v4_done: bool,
    v6: WalkCursor<u128>,
}

/// Progress of a dump.
#[derive(Debug, Default)]
pub struct DumpCursor {
    v4: WalkCursor<u32>,
    v4_done: bool,
    v6: WalkCursor<u128>,
}

/// The router's tables.
#[derive(Debug)]
pub struct Fib {
    v4: TableV4,
    v6: TableV6,
    groups: NexthopGroups,
    neighbours: NeighbourTable,
    local_v4: Stamped<u32>,
    local_v6: Stamped<u128>,
    /// By index, up to the highest that the mirror has named.
    vports: Vec<Option<(Vport, u32)>>,
    forwarding_v4: bool,
    forwarding_v6: bool,
    /// True if the guest chooses among several next hops; for IPv4 and IPv6.
    chooses: [bool; 2],
    /// Derived from the first vport's MAC address.
    seed: u32,
    generation: u32,
    sweep: Option<Sweep>,
}

impl Default for Fib {
    fn default() -> Self {
        Self {
            v4: TableV4::new(),
            v6: TableV6::new(),
            groups: NexthopGroups::default(),
            neighbours: NeighbourTable::default(),
            local_v4: Stamped::default(),
            local_v6: Stamped::default(),
            vports: Vec::new(),
            forwarding_v4: false,
            forwarding_v6: false,
            chooses: [true; 2],
            seed: 0,
            generation: 0,
            sweep: None,
        }
    }
}

/// Look-ups for forwarding.
impl Fib {
    /// Returns the vport if the mirror has named it.
    #[inline]
    pub fn vport(&self, index: u16) -> Option<&Vport> {
        self.vports.get(usize::from(index))?.as_ref().map(|(vport, _)| vport)
    }

    #[inline]
    pub(crate) fn forwards_v4(&self) -> bool {
        self.forwarding_v4
    }

    #[inline]
    pub(crate) fn forwards_v6(&self) -> bool {
        self.forwarding_v6
    }

    #[inline]
    pub(crate) fn chooses(&self, v6: bool) -> bool {
        self.chooses[usize::from(v6)]
    }

    #[inline]
    pub(crate) fn is_local_v4(&self, address: u32) -> bool {
        self.local_v4.get(address).is_some()
    }

    /// True if it is an address of the router, and not a broadcast address.
    #[inline]
    pub(crate) fn is_own_v4(&self, address: u32) -> bool {
        self.local_v4.get(address) == Some(true)
    }

    #[inline]
    pub(crate) fn is_local_v6(&self, address: u128) -> bool {
        self.local_v6.get(address).is_some()
    }

    /// Looks up values for [`Fib::route`] by destination.
    #[inline]
    pub(crate) fn lookup_v4(&self, destinations: &[u32], values: &mut [u32]) {
        self.v4.lookup_batch(destinations, values);
    }

    #[inline]
    pub(crate) fn lookup_v6(&self, destinations: &[u128], values: &mut [u32]) {
        self.v6.lookup_batch(destinations, values);
    }

    #[inline]
    pub(crate) fn route(value: u32) -> RouteVerdict {
        match value {
            pdp_lookup::NONE => RouteVerdict::None,
            PUNT => RouteVerdict::Punt,
            DROP => RouteVerdict::Drop,
            place => RouteVerdict::Group(place),
        }
    }

    /// Seed of the next hop choice: different for each router, and equal in all guests of a
    /// router. Otherwise the second of two routers in a row would use only one of its next hops.
    #[inline]
    pub(crate) fn seed(&self) -> u32 {
        self.seed
    }

    /// Returns the next hop of a flow in a group.
    #[inline]
    pub(crate) fn next_hop(
        &self,
        group: GroupIndex,
        flow: impl FnOnce() -> u32,
    ) -> Option<ResolvedHop> {
        self.groups.hop_of_flow(group, flow)
    }

    /// Returns the destination MAC address of a frame to
    /// `destination` by a next hop. Marks the neighbour as used.
    #[inline]
    pub(crate) fn link_address(
        &mut self,
        hop: &ResolvedHop,
        destination: impl FnOnce() -> IpAddr,
    ) -> Option<[u8; 6]> {
        match hop.gateway {
            Some(index) => self.neighbours.mac_of_gateway(index),
            None => self.neighbours.mac_of(hop.vport, destination()),
        }
    }
}

/// Updates and requests of the mirror.
impl Fib {
    /// Applies one message. The caller answers [`ToGuest::Barrier`] and [`ToGuest::Dump`].
    pub fn apply(&mut self, message: ToGuest) {
        let generation = self.generation;
        match message {
            ToGuest::Begin => {
                self.generation += 1;
                self.sweep = None;
                self.groups.begin_snapshot(&mut self.neighbours);
            }
            ToGuest::End => self.end_snapshot(),
            ToGuest::Vport(vport) => {
                if vport.index == 0 {
                    let [_, _, rest @ ..] = vport.mac;
                    self.seed = u32::from_be_bytes(rest).wrapping_mul(0x85eb_ca6b);
                }
                let index = usize::from(vport.index);
                if index < VPORTS_MAX {
                    self.vports.resize(self.vports.len().max(index + 1), None);
                    self.vports[index] = Some((vport, generation));
                }
            }
            ToGuest::Local { address: IpAddr::V4(address), own } => {
                self.local_v4.insert(address.into(), generation, own);
            }
            ToGuest::Local { address: IpAddr::V6(address), own } => {
                self.local_v6.insert(address.into(), generation, own);
            }
            ToGuest::LocalGone(IpAddr::V4(address)) => {
                self.local_v4.remove(address.into());
            }
            ToGuest::LocalGone(IpAddr::V6(address)) => {
                self.local_v6.remove(address.into());
            }
            ToGuest::Group { id, hops, mtu } => {
                self.groups.set(id, hops, mtu, &mut self.neighbours);
            }
            ToGuest::GroupGone(id) => self.groups.gone(id, &mut self.neighbours),
            ToGuest::Route { prefix, target } => self.set_route(prefix, target),
            ToGuest::RouteGone(prefix) => {
                let value = match prefix {
                    IpNet::V4(net) => self.v4.remove(net.addr().into(), net.prefix_len().into()),
                    IpNet::V6(net) => self.v6.remove(net.addr().into(), net.prefix_len().into()),
                };
                self.release(value);
            }
            ToGuest::Neighbour { vport, address, mac } => {
                self.neighbours.set(vport, address, mac, generation);
            }
            ToGuest::Forwarding { v4, v6 } => (self.forwarding_v4, self.forwarding_v6) = (v4, v6),
            ToGuest::Choosing { v4, v6 } => self.chooses = [v4, v6],
            ToGuest::Barrier(_) | ToGuest::Dump(_) => {}
        }
    }

    fn set_route(&mut self, prefix: IpNet, target: RouteDecision) {
        let value = match target {
            RouteDecision::Punt => PUNT,
            RouteDecision::Drop => DROP,
            // The kernel decides for a group that was never named.
            RouteDecision::Group(id) => self.groups.index_of(id).unwrap_or(PUNT),
        };
        if let RouteVerdict::Group(place) = Self::route(value) {
            self.groups.refer(place);
        }
        let generation = self.generation;
        let old = match prefix {
            IpNet::V4(net) => {
                self.v4.insert(net.addr().into(), net.prefix_len().into(), value, generation)
            }
            IpNet::V6(net) => {
                self.v6.insert(net.addr().into(), net.prefix_len().into(), value, generation)
            }
        };
        self.release(old);
    }

    fn release(&mut self, value: Option<u32>) {
        if let Some(RouteVerdict::Group(place)) = value.map(Self::route) {
            self.groups.release(place, &mut self.neighbours);
        }
    }

    fn end_snapshot(&mut self) {
        let keep = self.generation;
        self.groups.end_snapshot(&mut self.neighbours);
        self.neighbours.sweep(keep);
        self.local_v4.sweep(keep);
        self.local_v6.sweep(keep);
        for place in &mut self.vports {
            if place.as_ref().is_some_and(|(_, generation)| *generation != keep) {
                *place = None;
            }
        }
        self.sweep = Some(Sweep::default());
    }

    /// True if routes that the last snapshot did not name may still exist.
    pub(crate) fn is_sweeping(&self) -> bool {
        self.sweep.is_some()
    }

    /// Checks some more routes, and removes those that the last snapshot did not name.
    pub(crate) fn sweep_some(&mut self) {
        let Some(sweep) = &mut self.sweep else { return };
        let Self { groups, neighbours, .. } = self;
        let gone = |value| {
            if let RouteVerdict::Group(place) = Self::route(value) {
                groups.release(place, neighbours);
            }
        };
        if !sweep.v4_done {
            sweep.v4_done = !self.v4.sweep(&mut sweep.v4, SWEEP_STEP, self.generation, gone);
        } else if !self.v6.sweep(&mut sweep.v6, SWEEP_STEP, self.generation, gone) {
            self.sweep = None;
        }
    }

    /// Returns at most `count_max` more routes; an empty list at the end.
    pub(crate) fn dump_some(
        &self,
        cursor: &mut DumpCursor,
        count_max: usize,
    ) -> Vec<(IpNet, ResolvedRoute)> {
        let mut routes = Vec::new();
        if !cursor.v4_done {
            cursor.v4_done =
                !self.v4.walk(&mut cursor.v4, count_max, |address, length, value, _| {
                    let address = Ipv4Addr::from(address);
                    if let Ok(net) = Ipv4Net::new(address, length as u8) {
                        routes.push((net.into(), self.resolved(value)));
                    }
                });
        }
        if routes.len() < count_max {
            let left = count_max - routes.len();
            self.v6.walk(&mut cursor.v6, left, |address, length, value, _| {
                let address = Ipv6Addr::from(address);
                if let Ok(net) = Ipv6Net::new(address, length as u8) {
                    routes.push((net.into(), self.resolved(value)));
                }
            });
        }
        routes
    }

    fn resolved(&self, value: u32) -> ResolvedRoute {
        match Self::route(value) {
            RouteVerdict::Drop => ResolvedRoute::Drop,
            RouteVerdict::Punt | RouteVerdict::None => ResolvedRoute::Punt,
            RouteVerdict::Group(place) => {
                let mut hops = self.groups.hops(place).to_vec();
                hops.sort();
                ResolvedRoute::Hops(hops)
            }
        }
    }

    /// Returns up to `count_max` neighbours that frames were sent
    /// to since the last report, and whether there may be more.
    pub(crate) fn take_used(&mut self, count_max: usize) -> (Vec<(u16, IpAddr)>, bool) {
        self.neighbours.take_used(count_max)
    }

    /// True if the kernel may get a frame with an unknown
    /// MAC address, so that it resolves the neighbour.
    pub(crate) fn may_ask(
        &mut self,
        hop: &ResolvedHop,
        destination: impl FnOnce() -> IpAddr,
    ) -> bool {
        hop.gateway.is_some() || self.neighbours.may_ask(hop.vport, destination())
    }

    /// Starts another [`ASKED_TIME`](crate::neighbour::ASKED_TIME).
    pub(crate) fn turn_asked(&mut self) {
        self.neighbours.turn_asked();
    }

    /// Returns gateways with unknown MAC address that frames were destined to, at
    /// limited rate; see [`FromGuest::Wanted`](pdp_proto::routes::FromGuest::Wanted).
    pub(crate) fn take_wanted(&mut self) -> Vec<(u16, IpAddr)> {
        self.neighbours.take_wanted()
    }

    /// True if [`Self::take_wanted`] has any.
    pub fn has_wanted(&self) -> bool {
        self.neighbours.has_wanted()
    }
}

/// Information for users.
impl Fib {
    /// Returns the numbers of IPv4 and IPv6 routes.
    pub fn routes_count(&self) -> (usize, usize) {
        (self.v4.len(), self.v6.len())
    }

    /// Number of groups that the mirror has named.
    pub fn groups_count(&self) -> usize {
        self.groups.named()
    }

    /// Number of neighbours with a MAC address.
    pub fn neighbours_count(&self) -> usize {
        self.neighbours.known()
    }

    /// Bytes of the look-up tables.
    pub fn tables_bytes(&self) -> usize {
        self.v4.memory_bytes() + self.v6.memory_bytes()
    }

    /// Bytes in total; takes constant time.
    pub fn memory_bytes(&self) -> usize {
        self.tables_bytes()
            + self.groups.memory_bytes()
            + self.neighbours.memory_bytes()
            + self.local_v4.memory_bytes()
            + self.local_v6.memory_bytes()
    }

    /// Resolves an address by its longest matching prefix.
    pub fn resolve(&self, destination: IpAddr) -> Option<ResolvedRoute> {
        let value = match destination {
            IpAddr::V4(address) => self.v4.lookup(address.into()),
            IpAddr::V6(address) => self.v6.lookup(address.into()),
        };
        value.map(|value| self.resolved(value))
    }
}
