//! The router's tables: routes to groups to neighbours and vports.
//!
//! Applies the mirror's messages in order. During a snapshot everything that it names is stamped
//! with its generation; what is left over when it ends is swept in bounded pieces
//! ([`Fib::sweep_some`]), before any further message.

use std::collections::HashMap;
use std::hash::Hash;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use pdp_lookup::{Cursor, TableV4, TableV6, VALUE_MAX};
use pdp_proto::routes::{Resolved, Target, ToGuest, Vport};
use pdp_wire::tag::VPORTS_MAX;

use crate::group::{Groups, Place, Way};
use crate::neighbour::Neighbours;

/// Values of the tables: these two, or the place of a group.
const PUNT: u32 = VALUE_MAX;
const DROP: u32 = VALUE_MAX - 1;

/// Routes that one step of a sweep looks at.
const SWEEP_STEP: usize = 256;

/// What the tables say of a destination.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Route {
    /// One of the ways of the group at this place.
    Group(Place),
    /// To the control guest.
    Punt,
    /// Nowhere.
    Drop,
    /// There is no route.
    None,
}

/// A set of addresses: the snapshot that named each last, and whether it is the router's own. Two of each
/// packet's addresses are asked for and are hardly ever there, which a bit of the filter mostly says.
#[derive(Debug)]
struct Stamped<A> {
    all: HashMap<A, (u32, bool), foldhash::fast::RandomState>,
    filter: [u64; FILTER_BITS / 64],
    /// Addresses that the filter still has and that are gone.
    stale: usize,
}

/// Bits of the filter: one in four packets is asked for in the set where the router has 256 addresses.
const FILTER_BITS: usize = 1024;

/// An address as 32 bits that differ where addresses do.
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

    /// Whether it is the router's own, if it is in the set.
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

    /// Most of the time in the same time whatever there is: bits of the filter that nobody needs only cost look-ups.
    fn remove(&mut self, address: A) {
        if self.all.remove(&address).is_some() {
            self.stale += 1;
        }
        if self.stale > self.all.len() {
            self.sift();
        }
    }

    /// Bytes, about: of the table's own there is one for each address.
    fn memory_bytes(&self) -> usize {
        self.all.capacity() * (size_of::<(A, (u32, bool))>() + 1)
    }

    /// Forgets those that another snapshot than this named last.
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

/// How far a sweep has come.
#[derive(Debug, Default)]
struct Sweep {
    v4: Cursor<u32>,
    v4_done: bool,
    v6: Cursor<u128>,
}

/// Where a dump has come to.
#[derive(Debug, Default)]
pub(crate) struct DumpCursor {
    v4: Cursor<u32>,
    v4_done: bool,
    v6: Cursor<u128>,
}

/// The tables.
#[derive(Debug)]
pub struct Fib {
    v4: TableV4,
    v6: TableV6,
    groups: Groups,
    neighbours: Neighbours,
    local_v4: Stamped<u32>,
    local_v6: Stamped<u128>,
    /// By index, as far as the mirror has named them.
    vports: Vec<Option<(Vport, u32)>>,
    forwarding_v4: bool,
    forwarding_v6: bool,
    /// Whether the guest chooses among several ways, IPv4 and IPv6.
    chooses: [bool; 2],
    /// From the link address of the first vport.
    seed: u32,
    generation: u32,
    sweep: Option<Sweep>,
}

impl Default for Fib {
    fn default() -> Self {
        Self {
            v4: TableV4::new(),
            v6: TableV6::new(),
            groups: Groups::default(),
            neighbours: Neighbours::default(),
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

/// What forwarding asks.
impl Fib {
    /// The vport, if the mirror has named it.
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

    /// Whether it is the router's itself, and no broadcast address.
    #[inline]
    pub(crate) fn is_own_v4(&self, address: u32) -> bool {
        self.local_v4.get(address) == Some(true)
    }

    #[inline]
    pub(crate) fn is_local_v6(&self, address: u128) -> bool {
        self.local_v6.get(address).is_some()
    }

    /// Values for [`Fib::route`], by destination.
    #[inline]
    pub(crate) fn lookup_v4(&self, destinations: &[u32], values: &mut [u32]) {
        self.v4.lookup_batch(destinations, values);
    }

    #[inline]
    pub(crate) fn lookup_v6(&self, destinations: &[u128], values: &mut [u32]) {
        self.v6.lookup_batch(destinations, values);
    }

    #[inline]
    pub(crate) fn route(value: u32) -> Route {
        match value {
            pdp_lookup::NONE => Route::None,
            PUNT => Route::Punt,
            DROP => Route::Drop,
            place => Route::Group(place),
        }
    }

    /// Makes routers choose differently among equal ways (or the second of two in a row would use
    /// one of its ways alone), and a router's guests alike.
    #[inline]
    pub(crate) fn seed(&self) -> u32 {
        self.seed
    }

    /// The way of a flow in a group.
    #[inline]
    pub(crate) fn way(&self, group: Place, flow: impl FnOnce() -> u32) -> Option<Way> {
        self.groups.way(group, flow)
    }

    /// The link address that a frame for `destination` is sent to on a way; the neighbour counts
    /// as used.
    #[inline]
    pub(crate) fn link_address(
        &mut self,
        way: &Way,
        destination: impl FnOnce() -> IpAddr,
    ) -> Option<[u8; 6]> {
        match way.gateway {
            Some(index) => self.neighbours.mac_of_gateway(index),
            None => self.neighbours.mac_of(way.vport, destination()),
        }
    }
}

/// What the mirror says and asks.
impl Fib {
    /// Applies one message. [`ToGuest::Barrier`] and [`ToGuest::Dump`] are the caller's to answer.
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

    fn set_route(&mut self, prefix: IpNet, target: Target) {
        let value = match target {
            Target::Punt => PUNT,
            Target::Drop => DROP,
            // A group that was never named: the kernel knows better.
            Target::Group(id) => self.groups.place_of(id).unwrap_or(PUNT),
        };
        if let Route::Group(place) = Self::route(value) {
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
        if let Some(Route::Group(place)) = value.map(Self::route) {
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

    /// Whether routes that the last snapshot did not name may still be there.
    pub(crate) fn is_sweeping(&self) -> bool {
        self.sweep.is_some()
    }

    /// Looks at some more routes for whether the last snapshot named them.
    pub(crate) fn sweep_some(&mut self) {
        let Some(sweep) = &mut self.sweep else { return };
        let Self { groups, neighbours, .. } = self;
        let gone = |value| {
            if let Route::Group(place) = Self::route(value) {
                groups.release(place, neighbours);
            }
        };
        if !sweep.v4_done {
            sweep.v4_done = !self.v4.sweep(&mut sweep.v4, SWEEP_STEP, self.generation, gone);
        } else if !self.v6.sweep(&mut sweep.v6, SWEEP_STEP, self.generation, gone) {
            self.sweep = None;
        }
    }

    /// Some more of the routes, at most `count_max`; an empty list at the end.
    pub(crate) fn dump_some(
        &self,
        cursor: &mut DumpCursor,
        count_max: usize,
    ) -> Vec<(IpNet, Resolved)> {
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

    fn resolved(&self, value: u32) -> Resolved {
        match Self::route(value) {
            Route::Drop => Resolved::Drop,
            Route::Punt | Route::None => Resolved::Punt,
            Route::Group(place) => {
                let mut hops = self.groups.hops(place).to_vec();
                hops.sort();
                Resolved::Hops(hops)
            }
        }
    }

    /// Up to `count_max` neighbours that frames were sent to since they were last told, and
    /// whether there may be more.
    pub(crate) fn take_used(&mut self, count_max: usize) -> (Vec<(u16, IpAddr)>, bool) {
        self.neighbours.take_used(count_max)
    }

    /// Whether a frame whose way has no link address may go to the kernel, to ask for it.
    pub(crate) fn may_ask(&mut self, way: &Way, destination: impl FnOnce() -> IpAddr) -> bool {
        way.gateway.is_some() || self.neighbours.may_ask(way.vport, destination())
    }

    /// Another [`ASKED_TIME`](crate::neighbour::ASKED_TIME) begins.
    pub(crate) fn turn_asked(&mut self) {
        self.neighbours.turn_asked();
    }

    /// Gateways that frames were to be sent to and whose link address is not known, told once in a
    /// while; see [`FromGuest::Wanted`](pdp_proto::routes::FromGuest::Wanted).
    pub(crate) fn take_wanted(&mut self) -> Vec<(u16, IpAddr)> {
        self.neighbours.take_wanted()
    }

    /// Whether [`Self::take_wanted`] has any.
    pub fn is_wanting(&self) -> bool {
        self.neighbours.is_wanting()
    }
}

/// What people ask.
impl Fib {
    /// Counts of IPv4 and IPv6 routes.
    pub fn routes_count(&self) -> (usize, usize) {
        (self.v4.len(), self.v6.len())
    }

    /// Count of groups that the mirror has named.
    pub fn groups_count(&self) -> usize {
        self.groups.named()
    }

    /// Count of neighbours with a link address.
    pub fn neighbours_count(&self) -> usize {
        self.neighbours.known()
    }

    /// Bytes of the look-up tables.
    pub fn tables_bytes(&self) -> usize {
        self.v4.memory_bytes() + self.v6.memory_bytes()
    }

    /// Bytes of all of it: a constant time to find out.
    pub fn memory_bytes(&self) -> usize {
        self.tables_bytes()
            + self.groups.memory_bytes()
            + self.neighbours.memory_bytes()
            + self.local_v4.memory_bytes()
            + self.local_v6.memory_bytes()
    }

    /// Where the longest prefix that covers an address leads.
    pub fn resolve(&self, destination: IpAddr) -> Option<Resolved> {
        let value = match destination {
            IpAddr::V4(address) => self.v4.lookup(address.into()),
            IpAddr::V6(address) => self.v6.lookup(address.into()),
        };
        value.map(|value| self.resolved(value))
    }
}
