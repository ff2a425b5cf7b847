//! Groups of next hops and the choice among them.
//!
//! A route refers to a group by its place, so that a group or a neighbour can change without a
//! look at the routes. A flow's hash chooses a bucket, the bucket names a hop. When a group
//! changes, buckets of hops that stay keep their hop as far as the weights allow (a resilient
//! table, as in Linux's nexthop groups of type resilient), so that most flows stay on their way.
//!
//! Limits: shares are rounded to 1/256, one bucket a hop at least.

use std::collections::HashMap;

use pdp_proto::routes::{GroupId, HOPS_MAX, Hop};

use crate::neighbour::{self, Neighbours};

/// Where a group is in [`Groups`].
pub(crate) type Place = u32;

/// Buckets of a group of several hops.
const BUCKETS: usize = 256;

/// A hop with its neighbour found.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Way {
    pub(crate) vport: u16,
    /// The gateway's place; `None` where the destination itself is the neighbour.
    pub(crate) gateway: Option<neighbour::Index>,
    /// It is one of several.
    pub(crate) chosen: bool,
    /// Largest packet of its routes, bytes.
    pub(crate) mtu: u32,
}

#[derive(Debug, Default)]
struct Group {
    hops: Vec<Hop>,
    /// Largest packet, bytes; 0: any.
    mtu: u32,
    ways: Vec<Way>,
    /// Index of a hop by bucket; empty with less than two hops.
    buckets: Vec<u8>,
    /// Routes that refer to it.
    references: u64,
    /// Whether a group of the mirror has this place.
    named: bool,
    /// Whether the place is free.
    free: bool,
}

/// All groups.
#[derive(Debug, Default)]
pub(crate) struct Groups {
    places: Vec<Group>,
    free: Vec<Place>,
    by_id: HashMap<GroupId, Place>,
    /// Hops of all groups, and of these those that have buckets.
    hops: usize,
    bucketed: usize,
    /// During a snapshot: groups from before it, by their hops and MTU.
    before: HashMap<(Vec<Hop>, u32), Place>,
}

impl Groups {
    /// The way of a flow; `None` for a group without hops.
    #[inline]
    pub(crate) fn way(&self, place: Place, flow: impl FnOnce() -> u32) -> Option<Way> {
        let group = &self.places[place as usize];
        if group.buckets.is_empty() {
            return group.ways.first().copied();
        }
        // The upper bits of a product depend on all bits of the hash; its lower bits have already
        // chosen this guest.
        let bucket = flow().wrapping_mul(0x9e37_79b1) >> (u32::BITS - BUCKETS.ilog2());
        group.ways.get(usize::from(group.buckets[bucket as usize])).copied()
    }

    pub(crate) fn place_of(&self, id: GroupId) -> Option<Place> {
        self.by_id.get(&id).copied()
    }

    /// Count of groups that the mirror named.
    pub(crate) fn named(&self) -> usize {
        self.by_id.len()
    }

    /// Bytes, about.
    pub(crate) fn memory_bytes(&self) -> usize {
        let each = size_of::<Group>() + size_of::<(GroupId, Place)>() + 1;
        self.places.capacity() * each
            + self.hops * (size_of::<Hop>() + size_of::<Way>())
            + self.bucketed * BUCKETS
    }

    pub(crate) fn hops(&self, place: Place) -> &[Hop] {
        &self.places[place as usize].hops
    }

    /// A new or replaced group of the mirror. Hops beyond [`HOPS_MAX`] are ignored.
    pub(crate) fn set(
        &mut self,
        id: GroupId,
        mut hops: Vec<Hop>,
        mtu: u32,
        neighbours: &mut Neighbours,
    ) {
        hops.truncate(HOPS_MAX);
        let key = (hops, mtu);
        let place = match self.by_id.get(&id) {
            Some(&place) => place,
            None => {
                let place = self.before.remove(&key).unwrap_or_else(|| self.new_place());
                self.places[place as usize].named = true;
                self.by_id.insert(id, place);
                place
            }
        };
        let (hops, mtu) = key;
        let group = &mut self.places[place as usize];
        if group.hops == hops && group.mtu == mtu {
            return;
        }
        let new_ways = hops
            .iter()
            .map(|hop| Way {
                chosen: hops.len() > 1,
                vport: hop.vport,
                gateway: hop.gateway.map(|address| neighbours.refer(hop.vport, address)),
                mtu: if mtu == 0 { u32::MAX } else { mtu },
            })
            .collect();
        self.hops = self.hops + hops.len() - group.hops.len();
        let bucketed = (usize::from(hops.len() > 1), usize::from(group.hops.len() > 1));
        self.bucketed = self.bucketed + bucketed.0 - bucketed.1;
        let old_ways = std::mem::replace(&mut group.ways, new_ways);
        group.buckets = buckets(&hops, &group.hops, &group.buckets);
        (group.hops, group.mtu) = (hops, mtu);
        release(old_ways, neighbours);
    }

    /// The mirror has dropped a group. Its place lives on while routes refer to it.
    pub(crate) fn gone(&mut self, id: GroupId, neighbours: &mut Neighbours) {
        if let Some(place) = self.by_id.remove(&id) {
            self.unname(place, neighbours);
        }
    }

    /// A snapshot begins: identifiers get a new meaning, routes keep the groups they have.
    pub(crate) fn begin_snapshot(&mut self, neighbours: &mut Neighbours) {
        self.end_snapshot(neighbours);
        for (_, place) in self.by_id.drain() {
            let group = &self.places[place as usize];
            let key = (group.hops.clone(), group.mtu);
            if let Some(double) = self.before.insert(key, place) {
                // Two groups of the same hops: one is found again, the other's routes will leave.
                self.places[double as usize].named = false;
            }
        }
        self.free_unused(neighbours);
    }

    /// Groups that the snapshot did not name live on only while routes refer to them.
    pub(crate) fn end_snapshot(&mut self, neighbours: &mut Neighbours) {
        for (_, place) in std::mem::take(&mut self.before) {
            self.unname(place, neighbours);
        }
    }

    pub(crate) fn refer(&mut self, place: Place) {
        self.places[place as usize].references += 1;
    }

    pub(crate) fn release(&mut self, place: Place, neighbours: &mut Neighbours) {
        let group = &mut self.places[place as usize];
        group.references -= 1;
        self.free_if_unused(place, neighbours);
    }

    fn new_place(&mut self) -> Place {
        match self.free.pop() {
            Some(place) => {
                self.places[place as usize].free = false;
                place
            }
            None => {
                self.places.push(Group::default());
                self.places.len() as Place - 1
            }
        }
    }

    fn unname(&mut self, place: Place, neighbours: &mut Neighbours) {
        self.places[place as usize].named = false;
        self.free_if_unused(place, neighbours);
    }

    fn free_unused(&mut self, neighbours: &mut Neighbours) {
        for place in 0..self.places.len() as Place {
            self.free_if_unused(place, neighbours);
        }
    }

    fn free_if_unused(&mut self, place: Place, neighbours: &mut Neighbours) {
        let group = &mut self.places[place as usize];
        if group.references == 0 && !group.named && !group.free {
            self.hops -= group.hops.len();
            self.bucketed -= usize::from(group.hops.len() > 1);
            release(std::mem::take(&mut group.ways), neighbours);
            *group = Group { free: true, ..Group::default() };
            self.free.push(place);
        }
    }
}

fn release(ways: Vec<Way>, neighbours: &mut Neighbours) {
    for gateway in ways.into_iter().filter_map(|way| way.gateway) {
        neighbours.release(gateway);
    }
}

/// The buckets of `hops`, as like as can be to those that the group had with its hops `old`.
fn buckets(hops: &[Hop], old: &[Hop], old_buckets: &[u8]) -> Vec<u8> {
    if hops.len() < 2 {
        return Vec::new();
    }
    let mut left = shares(hops);
    // A group that had one hop had it in all buckets.
    let old_hop = |bucket: usize| old.get(old_buckets.get(bucket).map_or(0, |&at| at.into()));
    let mut buckets = [None; BUCKETS];
    for (bucket, place) in buckets.iter_mut().enumerate() {
        let same = |hop: &&Hop, new: &Hop| (hop.vport, hop.gateway) == (new.vport, new.gateway);
        let stays = old_hop(bucket).and_then(|old| hops.iter().position(|new| same(&old, new)));
        if let Some(hop) = stays.filter(|&hop| left[hop] > 0) {
            left[hop] -= 1;
            *place = Some(hop);
        }
    }
    // What is left goes round, so that the buckets of a hop are spread.
    let mut next = 0;
    for place in buckets.iter_mut().filter(|place| place.is_none()) {
        while left[next % hops.len()] == 0 {
            next += 1;
        }
        left[next % hops.len()] -= 1;
        *place = Some(next % hops.len());
        next += 1;
    }
    buckets.iter().map(|hop| hop.unwrap_or(0) as u8).collect()
}

/// Buckets of each hop by weight, [`BUCKETS`] in all, at least one each: the largest remainders
/// get what rounding down leaves.
fn shares(hops: &[Hop]) -> Vec<usize> {
    let weight = |hop: &Hop| u64::from(hop.weight.max(1));
    let total: u64 = hops.iter().map(weight).sum();
    let free = (BUCKETS - hops.len()) as u64;
    let mut shares: Vec<usize> =
        hops.iter().map(|hop| 1 + (weight(hop) * free / total) as usize).collect();
    let missing = BUCKETS - shares.iter().sum::<usize>();
    let mut order: Vec<usize> = (0..hops.len()).collect();
    order.sort_by_key(|&hop| std::cmp::Reverse(weight(&hops[hop]) * free % total));
    for &hop in order.iter().take(missing) {
        shares[hop] += 1;
    }
    shares
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::net::IpAddr;

    fn hop(number: u8, weight: u16) -> Hop {
        Hop { vport: 0, gateway: Some(IpAddr::from([10, 0, 0, number])), weight }
    }

    fn hops() -> impl Strategy<Value = Vec<Hop>> {
        prop::collection::btree_map(any::<u8>(), 1u16.., 2..=HOPS_MAX)
            .prop_map(|hops| hops.into_iter().map(|(number, weight)| hop(number, weight)).collect())
    }

    fn count(buckets: &[u8], hops: &[Hop], which: &Hop) -> usize {
        buckets.iter().filter(|&&at| hops[usize::from(at)].gateway == which.gateway).count()
    }

    proptest! {
        #[test]
        fn shares_are_the_weights_and_changes_move_no_more_than_they_must(
            old in hops(), new in hops(),
        ) {
            let before = buckets(&old, &[], &[]);
            let after = buckets(&new, &old, &before);
            let total: f64 = new.iter().map(|hop| f64::from(hop.weight)).sum();
            for hop in &new {
                let want = 1.0 + f64::from(hop.weight) * (BUCKETS - new.len()) as f64 / total;
                let got = count(&after, &new, hop) as f64;
                prop_assert!((got - want).abs() < 1.0, "{hop:?}: {got} for {want}");
            }
            let moved = (0..BUCKETS).filter(|&bucket| {
                let (old, new) = (&old[usize::from(before[bucket])], &new[usize::from(after[bucket])]);
                old.gateway != new.gateway
            });
            let must: usize = old
                .iter()
                .map(|hop| count(&before, &old, hop).saturating_sub(count(&after, &new, hop)))
                .sum();
            prop_assert_eq!(moved.count(), must);
        }
    }

    #[test]
    fn a_hop_that_leaves_moves_its_flows_alone() {
        let (mut groups, mut neighbours) = (Groups::default(), Neighbours::default());
        let all: Vec<Hop> = (0..4).map(|number| hop(number, 1)).collect();
        groups.set(7, all.clone(), 0, &mut neighbours);
        let place = groups.place_of(7).unwrap();
        let gateway = |groups: &Groups, flow: u32| {
            let way = groups.way(place, || flow).unwrap();
            groups.places[place as usize]
                .ways
                .iter()
                .position(|other| other.gateway == way.gateway)
                .and_then(|at| groups.hops(place)[at].gateway)
        };
        let flows: Vec<u32> = (0..4000u32).map(|flow| flow.wrapping_mul(0x85eb_ca6b)).collect();
        let before: Vec<_> = flows.iter().map(|&flow| gateway(&groups, flow)).collect();
        groups.set(7, all[1..].to_vec(), 0, &mut neighbours);
        assert_eq!(groups.place_of(7), Some(place));
        for (flow, before) in flows.iter().zip(before) {
            let after = gateway(&groups, *flow);
            assert!(after == before || before == all[0].gateway);
            assert_ne!(after, all[0].gateway);
        }
    }

    #[test]
    fn identifiers_of_another_mirror_do_not_touch_routes_of_before() {
        let (mut groups, mut neighbours) = (Groups::default(), Neighbours::default());
        let (one, two) = (vec![hop(1, 1)], vec![hop(2, 1)]);
        groups.set(1, one.clone(), 0, &mut neighbours);
        groups.set(2, two.clone(), 0, &mut neighbours);
        let (place_one, place_two) = (groups.place_of(1).unwrap(), groups.place_of(2).unwrap());
        groups.refer(place_one);
        groups.refer(place_two);
        groups.begin_snapshot(&mut neighbours);
        // The other mirror's group 1 has the hop that group 2 had.
        groups.set(1, two.clone(), 0, &mut neighbours);
        assert_eq!(groups.place_of(1), Some(place_two));
        assert_eq!(groups.hops(place_one), one);
        groups.end_snapshot(&mut neighbours);
        assert_eq!(groups.hops(place_one), one, "a route still refers to it");
        groups.release(place_one, &mut neighbours);
        assert!(groups.places[place_one as usize].free);
        groups.set(9, one.clone(), 0, &mut neighbours);
        assert_eq!(groups.place_of(9), Some(place_one), "used again");
        // Two groups of the same hops stay two.
        groups.begin_snapshot(&mut neighbours);
        groups.set(20, two.clone(), 0, &mut neighbours);
        groups.set(21, two.clone(), 0, &mut neighbours);
        groups.set(21, one.clone(), 0, &mut neighbours);
        assert_eq!(groups.hops(groups.place_of(20).unwrap()), two);
    }
}
