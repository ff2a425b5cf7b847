//! Routes and stations that do not fit: their packets go to the control guest, never elsewhere.
//!
//! A driver with small tables gets random messages: routes to gateways, to two gateways, and to
//! links whose stations come and go; own addresses. After each of its writes, random addresses have
//! the result from before the message, the one from after it, or go to the control guest. At the
//! end, when all is removed, all places are free again.

mod common;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::{IpAddr, Ipv4Addr};

use common::{Image, Random};
use ipnet::{IpNet, Ipv4Net};
use pdp_card::table::{GroupEntry, HopEntry, HopSegments, TableRange};
use pdp_card::{LeafKind, LpmSegment, RouteFamily, TableWrite, VeDriver};
use pdp_proto::routes::{GroupHop, RouteDecision, ToGuest};

const GROUPS: u64 = 8;

/// Vports of links.
const LINKS: u64 = 2;

/// Gateways, all known.
const GATEWAYS: u8 = 16;

/// Own addresses at a time; the card has 16.
const LOCALS: usize = 12;

/// After this many calls of `retire`, the driver must write nothing more, even with full tables.
const QUIET_AFTER: usize = 60;

/// The memories that decide where a packet goes.
#[derive(Default)]
struct Memories {
    lpm: Image,
    groups: HashMap<u16, GroupEntry>,
    buckets: HashMap<(u16, u8), u16>,
    hops: HashMap<u16, Option<HopEntry>>,
    arps: HashMap<u16, Option<[u8; 6]>>,
}

/// Where a packet goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Target {
    Excess,
    None,
    Drop,
    Hook,
    Local,
    /// To the control guest, which resolves the neighbour.
    Neighbour,
    Mac([u8; 6]),
}

/// All results that packets to an address can have.
type Targets = BTreeSet<Target>;

/// MAC address of a gateway.
fn mac(last: u8) -> [u8; 6] {
    [2, 0, 0, 0, 0, last]
}

fn gateway(last: u8) -> IpAddr {
    [172, 16, 0, last].into()
}

impl Memories {
    fn write(&mut self, segment: &LpmSegment, write: &TableWrite) {
        match *write {
            TableWrite::Lpm(write) => self.lpm.write(0, segment, &write),
            TableWrite::Group(index, entry) => drop(self.groups.insert(index, entry)),
            TableWrite::Bucket { block, bucket, hop } => {
                self.buckets.insert((block, bucket), hop);
            }
            TableWrite::Hop(index, entry) => drop(self.hops.insert(index, entry)),
            TableWrite::Arp(index, entry) => drop(self.arps.insert(index, entry)),
            _ => {}
        }
    }

    fn hop(&self, hop: u16) -> Target {
        let arp = self.hops[&hop].unwrap().arp;
        arp.and_then(|arp| self.arps[&arp]).map_or(Target::Neighbour, Target::Mac)
    }

    fn targets(&self, segment: &LpmSegment, address: Ipv4Addr) -> Targets {
        let key = u128::from(u32::from(address)) << 96;
        let leaf = self.lpm.lookup(0, segment, RouteFamily::V4, key);
        let one = match leaf.kind {
            LeafKind::Excess => Target::Excess,
            LeafKind::None => Target::None,
            LeafKind::Blackhole => Target::Drop,
            LeafKind::Hook => Target::Hook,
            LeafKind::Local => Target::Local,
            LeafKind::Group => match self.groups[&leaf.group] {
                GroupEntry::Empty => panic!("no hops"),
                GroupEntry::Hop(hop) => self.hop(hop),
                GroupEntry::Block(block) => {
                    let hops = (0..=u8::MAX).map(|bucket| self.buckets[&(block, bucket)]);
                    let hops: BTreeSet<u16> = hops.collect();
                    return hops.into_iter().map(|hop| self.hop(hop)).collect();
                }
            },
        };
        [one].into()
    }
}

/// All that the mirror has sent.
#[derive(Clone, Default)]
struct Wanted {
    groups: BTreeMap<u32, Vec<GroupHop>>,
    routes: BTreeMap<IpNet, RouteDecision>,
    /// Stations on links, by address and vport.
    stations: BTreeMap<(Ipv4Addr, u16), [u8; 6]>,
    locals: BTreeSet<Ipv4Addr>,
}

impl Wanted {
    fn targets(&self, address: Ipv4Addr) -> Targets {
        if self.locals.contains(&address) {
            return [Target::Local].into();
        }
        let covering = self.routes.iter().filter(|(net, _)| net.contains(&IpAddr::V4(address)));
        let longest = covering.max_by_key(|(net, _)| net.prefix_len());
        let Some((_, route)) = longest else { return [Target::None].into() };
        let to = |hop: &GroupHop| match hop.gateway {
            Some(IpAddr::V4(gateway)) => Target::Mac(mac(gateway.octets()[3])),
            _ => {
                let station = self.stations.get(&(address, hop.vport));
                station.map_or(Target::Neighbour, |mac| Target::Mac(*mac))
            }
        };
        match route {
            RouteDecision::Drop => [Target::Drop].into(),
            RouteDecision::Punt => [Target::Hook].into(),
            RouteDecision::Group(id) => self.groups[id].iter().map(to).collect(),
        }
    }

    fn is_on_link(&self, address: Ipv4Addr) -> bool {
        (0..=LINKS as u16).any(|vport| self.stations.contains_key(&(address, vport)))
    }

    fn note(&mut self, message: &ToGuest) {
        match message {
            ToGuest::Group { id, hops, .. } => drop(self.groups.insert(*id, hops.clone())),
            ToGuest::Route { prefix, target } => drop(self.routes.insert(*prefix, *target)),
            ToGuest::RouteGone(prefix) => drop(self.routes.remove(prefix)),
            ToGuest::Local { address: IpAddr::V4(address), .. } => {
                self.locals.insert(*address);
            }
            ToGuest::LocalGone(IpAddr::V4(address)) => drop(self.locals.remove(address)),
            ToGuest::Neighbour { vport, address: IpAddr::V4(address), mac } => match mac {
                Some(mac) => drop(self.stations.insert((*address, *vport), *mac)),
                None => drop(self.stations.remove(&(*address, *vport))),
            },
            _ => {}
        }
    }
}

fn address(random: &mut Random) -> Ipv4Addr {
    let [a, b, c, d] = [2, 4, 8, 256].map(|bound| random.below(bound) as u8);
    Ipv4Addr::new(10 + a, b, c * 32, d)
}

/// Returns a group's hops: a gateway, two of them, or none on a link.
fn hops(random: &mut Random) -> Vec<GroupHop> {
    let hop = |vport, gateway| GroupHop { vport, gateway, weight: 1 };
    let last = random.below(GATEWAYS.into()) as u8;
    let other = (last + 1 + random.below(u64::from(GATEWAYS) - 1) as u8) % GATEWAYS;
    match random.below(4) {
        0 => vec![hop(1 + random.below(LINKS) as u16, None)],
        1 => vec![hop(0, Some(gateway(last))), hop(0, Some(gateway(other)))],
        _ => vec![hop(0, Some(gateway(last)))],
    }
}

/// Returns one of a set, if it is not empty.
fn pick<T: Copy>(random: &mut Random, from: impl ExactSizeIterator<Item = T>) -> Option<T> {
    let count = from.len() as u64;
    let mut from = from;
    (count > 0).then(|| from.nth(random.below(count) as usize).unwrap())
}

/// Returns a message that adds something, or with `shrinks` removes something, if there is one.
fn message(random: &mut Random, wanted: &Wanted, shrinks: bool) -> Option<ToGuest> {
    Some(match (random.below(16), shrinks) {
        (0, _) => ToGuest::Group { id: random.below(GROUPS) as u32, hops: hops(random), mtu: 0 },
        (1..4, true) => {
            let (address, vport) = pick(random, wanted.stations.keys().copied())?;
            ToGuest::Neighbour { vport, address: address.into(), mac: None }
        }
        (4, true) => ToGuest::LocalGone(pick(random, wanted.locals.iter().copied())?.into()),
        (_, true) => ToGuest::RouteGone(pick(random, wanted.routes.keys().copied())?),
        (1..6, false) => {
            let (address, vport) = (address(random), 1 + random.below(LINKS) as u16);
            let [_, a, b, c] = address.octets();
            let mac = Some([6, vport as u8, random.below(2) as u8, a, b, c]);
            ToGuest::Neighbour { vport, address: address.into(), mac }
        }
        (6, false) if wanted.locals.len() < LOCALS => {
            ToGuest::Local { address: address(random).into(), own: random.below(2) == 0 }
        }
        (_, false) => {
            let length = match random.below(8) {
                0 => 1 + random.below(8),
                1 => 32,
                _ => 9 + random.below(24),
            };
            // Some are host routes of stations.
            let station = pick(random, wanted.stations.keys().copied());
            let to = match station {
                Some((station, _)) if random.below(4) == 0 => station,
                _ => address(random),
            };
            let prefix = Ipv4Net::new(to, length as u8).unwrap().trunc().into();
            let target = match random.below(10) {
                0 => RouteDecision::Drop,
                1 => RouteDecision::Punt,
                _ => RouteDecision::Group(random.below(GROUPS) as u32),
            };
            ToGuest::Route { prefix, target }
        }
    })
}

/// A driver and the memories that it writes.
struct Bench {
    seed: u64,
    random: Random,
    segment: LpmSegment,
    driver: VeDriver,
    memories: Memories,
    wanted: Wanted,
}

impl Bench {
    fn new(seed: u64) -> Self {
        let mut random = Random(seed);
        let range = |length| TableRange { base: 0, length };
        let (few, nodes) = (6 + random.below(8) as u16, 3 + random.below(8) as u32);
        let hops = HopSegments {
            arps: range(8 + random.below(24) as u16),
            hops: range(2 * few),
            blocks: range(1),
            groups: range(few),
        };
        let leaf_length = 40 + random.below(60) as u32;
        let segment = LpmSegment { node_base: 0, node_length: nodes, leaf_base: 0, leaf_length };
        let driver = VeDriver::new(&hops, &segment);
        let (memories, wanted) = Default::default();
        let mut bench = Self { seed, random, segment, driver, memories, wanted };
        for write in bench.driver.clear_writes() {
            bench.memories.write(&bench.segment, &write);
        }
        bench
    }

    /// Takes the driver's writes, and checks random addresses after each. Returns their number.
    fn check_writes(&mut self, before: &Wanted, what: &dyn std::fmt::Debug) -> usize {
        let addresses = (0..24).map(|at| {
            let station = pick(&mut self.random, self.wanted.stations.keys().copied());
            match station {
                Some((station, _)) if at % 3 == 0 => station,
                _ => address(&mut self.random),
            }
        });
        let addresses: Vec<Ipv4Addr> = addresses.collect();
        let allowed = |&address: &Ipv4Addr| {
            let mut all = before.targets(address);
            all.extend(self.wanted.targets(address));
            all.insert(Target::Excess);
            // There may be no place for the station.
            if before.is_on_link(address) || self.wanted.is_on_link(address) {
                all.insert(Target::Neighbour);
            }
            all
        };
        let allowed: Vec<Targets> = addresses.iter().map(allowed).collect();
        let writes = self.driver.take_writes();
        for write in &writes {
            self.memories.write(&self.segment, write);
            for (&address, allowed) in addresses.iter().zip(&allowed) {
                let targets = self.memories.targets(&self.segment, address);
                assert!(
                    targets.is_subset(allowed),
                    "seed {}, {what:?}, {write:?}, {address}: {targets:?}, not {allowed:?}",
                    self.seed
                );
            }
        }
        for address in addresses {
            let targets = self.memories.targets(&self.segment, address);
            let want = self.wanted.targets(address);
            let punted = targets == [Target::Neighbour].into() && self.wanted.is_on_link(address);
            let excess = self.driver.excess_count() > 0 && targets == [Target::Excess].into();
            assert!(
                targets == want || punted || excess,
                "seed {}, {what:?}, {address}: {targets:?}, not {want:?}",
                self.seed
            );
        }
        writes.len()
    }

    fn apply(&mut self, message: &ToGuest) {
        let before = self.wanted.clone();
        self.wanted.note(message);
        self.driver.apply(message).unwrap();
        self.check_writes(&before, message);
    }

    fn retire(&mut self) -> usize {
        self.driver.retire();
        let wanted = self.wanted.clone();
        self.check_writes(&wanted, &"retire")
    }

    /// Retires until nothing is written any more.
    fn quiet(&mut self) {
        for _ in 0..QUIET_AFTER {
            self.retire();
        }
        // More calls than all that does not fit needs for one round.
        let writes: usize = (0..10).map(|_| self.retire()).sum();
        assert_eq!(writes, 0, "seed {}: retries without an end", self.seed);
    }
}

#[test]
fn what_does_not_fit_never_leads_elsewhere() {
    let (mut excess_most, mut entered) = (0, 0);
    for seed in 0..24 {
        let mut bench = Bench::new(seed);
        let free = bench.driver.free_tables();
        let known = (0..GATEWAYS).map(|last| ToGuest::Neighbour {
            vport: 0,
            address: gateway(last),
            mac: Some(mac(last)),
        });
        known.for_each(|message| bench.driver.apply(&message).unwrap());
        for id in 0..GROUPS as u32 {
            let message = ToGuest::Group { id, hops: hops(&mut bench.random), mtu: 0 };
            bench.apply(&message);
        }
        for step in 0..600 {
            let shrinks = step >= 400 || bench.random.below(3) == 0;
            let Some(message) = message(&mut bench.random, &bench.wanted, shrinks) else {
                continue;
            };
            bench.apply(&message);
            excess_most = excess_most.max(bench.driver.excess_count());
            let excess = bench.driver.excess_count();
            if bench.random.below(3) == 0 {
                bench.retire();
                entered += excess.saturating_sub(bench.driver.excess_count());
            }
            if step % 200 == 199 {
                bench.quiet();
            }
        }
        // Without routes nothing is excess, and nothing is left.
        let Wanted { groups, routes, stations, locals } = bench.wanted.clone();
        let stations: Vec<_> = stations.into_keys().collect();
        let station = |(address, vport): (Ipv4Addr, u16)| ToGuest::Neighbour {
            vport,
            address: address.into(),
            mac: None,
        };
        let (first, last) = stations.split_at(stations.len() / 2);
        let gone = first.iter().copied().map(station);
        let gone = gone.chain(routes.into_keys().map(ToGuest::RouteGone));
        let gone = gone.chain(locals.into_iter().map(|local| ToGuest::LocalGone(local.into())));
        let gone: Vec<_> = gone.chain(last.iter().copied().map(station)).collect();
        gone.iter().for_each(|message| bench.apply(message));
        bench.quiet();
        assert_eq!(bench.driver.excess_count(), 0, "seed {seed}");
        for id in groups.into_keys() {
            bench.driver.apply(&ToGuest::GroupGone(id)).unwrap();
        }
        bench.quiet();
        assert_eq!(bench.driver.free_tables(), free, "seed {seed}");
        for _ in 0..100 {
            let address = address(&mut bench.random);
            let targets = bench.memories.targets(&bench.segment, address);
            assert_eq!(targets, [Target::None].into(), "seed {seed}");
        }
    }
    println!("at most {excess_most} excess routes; {entered} entered later");
    assert!(excess_most > 20 && entered > 500);
}
