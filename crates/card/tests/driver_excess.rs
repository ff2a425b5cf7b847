//! Routes that do not fit: the look-up sends their packets to the control guest, never elsewhere.
//!
//! A driver with small tables gets random messages. After each of its writes, random addresses have
//! the result from before the message, the one from after it, or go to the control guest.

mod common;

use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, Ipv4Addr};

use common::{Image, Random};
use ipnet::{IpNet, Ipv4Net};
use pdp_card::table::{GroupEntry, HopEntry, HopSegments, TableRange};
use pdp_card::{LeafKind, LpmSegment, RouteFamily, TableWrite, VeDriver};
use pdp_proto::routes::{GroupHop, RouteDecision, ToGuest};

const GROUPS: u64 = 6;

/// The memories that decide where a packet goes.
#[derive(Default)]
struct Memories {
    lpm: Image,
    groups: HashMap<u16, GroupEntry>,
    hops: HashMap<u16, Option<HopEntry>>,
    arps: HashMap<u16, Option<[u8; 6]>>,
}

/// Where a packet goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Target {
    Excess,
    None,
    Drop,
    Hook,
    Mac([u8; 6]),
}

/// MAC address of a gateway.
fn mac(last: u8) -> [u8; 6] {
    [2, 0, 0, 0, 0, last]
}

impl Memories {
    fn write(&mut self, segment: &LpmSegment, write: &TableWrite) {
        match *write {
            TableWrite::Lpm(write) => self.lpm.write(0, segment, &write),
            TableWrite::Group(index, entry) => drop(self.groups.insert(index, entry)),
            TableWrite::Hop(index, entry) => drop(self.hops.insert(index, entry)),
            TableWrite::Arp(index, entry) => drop(self.arps.insert(index, entry)),
            _ => {}
        }
    }

    fn target(&self, segment: &LpmSegment, address: Ipv4Addr) -> Target {
        let key = u128::from(u32::from(address)) << 96;
        let leaf = self.lpm.lookup(0, segment, RouteFamily::V4, key);
        match leaf.kind {
            LeafKind::Excess => Target::Excess,
            LeafKind::None => Target::None,
            LeafKind::Blackhole => Target::Drop,
            LeafKind::Hook => Target::Hook,
            LeafKind::Local => panic!("no local address"),
            LeafKind::Group => {
                let GroupEntry::Hop(hop) = self.groups[&leaf.group] else { panic!("one hop") };
                let hop = self.hops[&hop].unwrap();
                Target::Mac(self.arps[&hop.arp.unwrap()].unwrap())
            }
        }
    }
}

/// The routes as the mirror sent them.
#[derive(Clone, Default)]
struct Wanted {
    groups: BTreeMap<u32, u8>,
    routes: BTreeMap<IpNet, Target>,
    /// Group of each route to a group.
    of_group: BTreeMap<IpNet, u32>,
}

impl Wanted {
    fn target(&self, address: Ipv4Addr) -> (Option<IpNet>, Target) {
        let covering = self.routes.iter().filter(|(net, _)| net.contains(&IpAddr::V4(address)));
        let longest = covering.max_by_key(|(net, _)| net.prefix_len());
        longest.map_or((None, Target::None), |(net, target)| (Some(*net), *target))
    }
}

fn address(random: &mut Random) -> Ipv4Addr {
    let [a, b, c, d] = [2, 4, 8, 256].map(|bound| random.below(bound) as u8);
    Ipv4Addr::new(10 + a, b, c * 32, d)
}

fn message(random: &mut Random, wanted: &Wanted) -> ToGuest {
    match random.below(16) {
        0 => {
            let last = random.below(64) as u8;
            let gateway = Some(IpAddr::from([10, 9, 9, last]));
            let hops = vec![GroupHop { vport: 1, gateway, weight: 1 }];
            ToGuest::Group { id: random.below(GROUPS) as u32, hops, mtu: 0 }
        }
        1..10 => {
            let length =
                if random.below(8) == 0 { 1 + random.below(8) } else { 9 + random.below(24) };
            let prefix = Ipv4Net::new(address(random), length as u8).unwrap().trunc().into();
            let target = match random.below(8) {
                0 => RouteDecision::Drop,
                1 => RouteDecision::Punt,
                _ => RouteDecision::Group(random.below(GROUPS) as u32),
            };
            ToGuest::Route { prefix, target }
        }
        _ if wanted.routes.is_empty() => ToGuest::End,
        _ => {
            let at = random.below(wanted.routes.len() as u64) as usize;
            ToGuest::RouteGone(*wanted.routes.keys().nth(at).unwrap())
        }
    }
}

fn note(wanted: &mut Wanted, message: &ToGuest) {
    match message {
        ToGuest::Group { id, hops, .. } => {
            let Some(IpAddr::V4(gateway)) = hops[0].gateway else { panic!("a gateway") };
            wanted.groups.insert(*id, gateway.octets()[3]);
            for (net, of) in &wanted.of_group {
                if of == id {
                    wanted.routes.insert(*net, Target::Mac(mac(gateway.octets()[3])));
                }
            }
        }
        ToGuest::Route { prefix, target } => {
            wanted.of_group.remove(prefix);
            let target = match target {
                RouteDecision::Drop => Target::Drop,
                RouteDecision::Punt => Target::Hook,
                RouteDecision::Group(id) => {
                    wanted.of_group.insert(*prefix, *id);
                    Target::Mac(mac(wanted.groups[id]))
                }
            };
            wanted.routes.insert(*prefix, target);
        }
        ToGuest::RouteGone(prefix) => {
            wanted.routes.remove(prefix);
            wanted.of_group.remove(prefix);
        }
        _ => {}
    }
}

#[test]
fn excess_routes_never_lead_elsewhere() {
    let (mut excess_most, mut entered) = (0, 0);
    for seed in 0..16 {
        let mut random = Random(seed);
        let range = |length| TableRange { base: 0, length };
        let (few, nodes, leaves) = (4 + random.below(4) as u16, 3 + random.below(8) as u32, 40);
        let hops =
            HopSegments { arps: range(64), hops: range(few), blocks: range(1), groups: range(few) };
        let leaf_length = leaves + random.below(60) as u32;
        let lpm = LpmSegment { node_base: 0, node_length: nodes, leaf_base: 0, leaf_length };
        let mut driver = VeDriver::new(&hops, &lpm);
        let mut memories = Memories::default();
        driver.clear_writes().iter().for_each(|write| memories.write(&lpm, write));
        let mut wanted = Wanted::default();
        let first = (0..64).map(|last| ToGuest::Neighbour {
            vport: 1,
            address: [10, 9, 9, last].into(),
            mac: Some(mac(last)),
        });
        let groups = (0..GROUPS as u32).map(|id| {
            let gateway = Some(IpAddr::from([10, 9, 9, id as u8]));
            ToGuest::Group { id, hops: vec![GroupHop { vport: 1, gateway, weight: 1 }], mtu: 0 }
        });
        for message in first.chain(groups) {
            note(&mut wanted, &message);
            driver.apply(&message).unwrap();
        }
        for step in 0..600 {
            let growing = step < 400;
            let message = message(&mut random, &wanted);
            if !growing && matches!(message, ToGuest::Route { .. }) {
                continue;
            }
            let before = wanted.clone();
            note(&mut wanted, &message);
            driver.apply(&message).unwrap();
            let addresses: Vec<_> = (0..24).map(|_| address(&mut random)).collect();
            for write in driver.take_writes() {
                memories.write(&lpm, &write);
                for &address in &addresses {
                    let target = memories.target(&lpm, address);
                    let allowed = [before.target(address).1, wanted.target(address).1];
                    assert!(
                        target == Target::Excess || allowed.contains(&target),
                        "seed {seed}, {message:?}, {address}: {target:?}, not {allowed:?}"
                    );
                }
            }
            excess_most = excess_most.max(driver.excess_count());
            let none = driver.excess_count() == 0;
            for address in addresses {
                let (target, want) = (memories.target(&lpm, address), wanted.target(address).1);
                assert!(
                    target == want || (!none && target == Target::Excess),
                    "seed {seed}, {address}: {target:?}, not {want:?}, {none}"
                );
            }
            let excess = driver.excess_count();
            if random.below(3) == 0 {
                driver.retire();
                driver.take_writes().iter().for_each(|write| memories.write(&lpm, write));
                entered += excess.saturating_sub(driver.excess_count());
            }
        }
        // Without routes nothing is excess, and nothing is left.
        for net in wanted.routes.keys() {
            driver.apply(&ToGuest::RouteGone(*net)).unwrap();
        }
        for _ in 0..20 {
            driver.retire();
        }
        assert_eq!(driver.excess_count(), 0, "seed {seed}");
        driver.take_writes().iter().for_each(|write| memories.write(&lpm, write));
        for _ in 0..100 {
            assert_eq!(memories.target(&lpm, address(&mut random)), Target::None, "seed {seed}");
        }
    }
    println!("at most {excess_most} excess routes; {entered} entered later");
    assert!(excess_most > 20 && entered > 500);
}
