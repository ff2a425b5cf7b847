//! Next hop groups, and the choice among their hops.
//!
//! A route refers to a group by its index, so groups and neighbours can change without
//! touching routes. A flow's hash chooses a bucket, and the bucket names a hop. When a
//! group changes, buckets of remaining hops keep their hop as far as the weights allow.
//! Most flows then stay on their path, as in Linux's nexthop groups of type resilient.
//!
//! Limits: weights are rounded to 1/256, with at least one bucket per hop.

use std::collections::HashMap;

use pdp_proto::routes::{GroupHop, GroupId, HOPS_MAX};

use crate::neighbour::{self, NeighbourTable};

/// Index of a group in [`NexthopGroups`].
pub(crate) type GroupIndex = u32;

/// Buckets of a group with several hops.
const BUCKETS: usize = 256;

/// A hop with its neighbour's index.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ResolvedHop {
    pub(crate) vport: u16,
    /// The gateway's index; `None` if the destination itself is the neighbour.
    pub(crate) gateway: Option<neighbour::NeighbourIndex>,
    /// True if it is one of several.
    pub(crate) chosen: bool,
    /// Largest packet of its routes, bytes.
    pub(crate) mtu: u32,
}

#[derive(Debug, Default)]
struct NexthopGroup {
    hops: Vec<GroupHop>,
    /// Largest packet, bytes; 0: any.
    mtu: u32,
    resolved: Vec<ResolvedHop>,
    /// Index of a hop by bucket; empty with less than two hops.
    buckets: Vec<u8>,
    /// Number of routes that refer to it.
    references: u64,
    /// True if a group of the mirror has this index.
    named: bool,
    /// True if the index is free.
    free: bool,
}

/// All groups.
#[derive(Debug, Default)]
pub(crate) struct NexthopGroups {
    slots: Vec<NexthopGroup>,
    free: Vec<GroupIndex>,
    by_id: HashMap<GroupId, GroupIndex>,
    /// Number of hops in all groups, and of those in groups with buckets.
    hops: usize,
    bucketed: usize,
    /// During a snapshot: groups from before it, by hops and MTU.
    before: HashMap<(Vec<GroupHop>, u32), GroupIndex>,
}

impl NexthopGroups {
    /// Returns the hop of a flow; `None` for a group without hops.
    #[inline]
    pub(crate) fn hop_of_flow(
        &self,
        place: GroupIndex,
        flow: impl FnOnce() -> u32,
    ) -> Option<ResolvedHop> {
        let group = &self.slots[place as usize];
        if group.buckets.is_empty() {
            return group.resolved.first().copied();
        }
        // The product's upper bits depend on all bits of the
        // hash. The hash's lower bits already chose this guest.
        let bucket = flow().wrapping_mul(0x9e37_79b1) >> (u32::BITS - BUCKETS.ilog2());
        group.resolved.get(usize::from(group.buckets[bucket as usize])).copied()
    }

    pub(crate) fn index_of(&self, id: GroupId) -> Option<GroupIndex> {
        self.by_id.get(&id).copied()
    }

    /// Number of groups that the mirror has named.
    pub(crate) fn named(&self) -> usize {
        self.by_id.len()
    }

    /// Approximate bytes.
    pub(crate) fn memory_bytes(&self) -> usize {
        let each = size_of::<NexthopGroup>() + size_of::<(GroupId, GroupIndex)>() + 1;
        self.slots.capacity() * each
            + self.hops * (size_of::<GroupHop>() + size_of::<ResolvedHop>())
            + self.bucketed * BUCKETS
    }

    pub(crate) fn hops(&self, place: GroupIndex) -> &[GroupHop] {
        &self.slots[place as usize].hops
    }

    /// Adds or replaces a group of the mirror. Hops beyond [`HOPS_MAX`] are ignored.
    pub(crate) fn set(
        &mut self,
        id: GroupId,
        mut hops: Vec<GroupHop>,
        mtu: u32,
        neighbours: &mut NeighbourTable,
    ) {
        hops.truncate(HOPS_MAX);
        let key = (hops, mtu);
        let place = match self.by_id.get(&id) {
            Some(&place) => place,
            None => {
                let place = self.before.remove(&key).unwrap_or_else(|| self.new_place());
                self.slots[place as usize].named = true;
                self.by_id.insert(id, place);
                place
            }
        };
        let (hops, mtu) = key;
        let group = &mut self.slots[place as usize];
        if group.hops == hops && group.mtu == mtu {
            return;
        }
        let new_ways = hops
            .iter()
            .map(|hop| ResolvedHop {
                chosen: hops.len() > 1,
                vport: hop.vport,
                gateway: hop.gateway.map(|address| neighbours.refer(hop.vport, address)),
                mtu: if mtu == 0 { u32::MAX } else { mtu },
            })
            .collect();
        self.hops = self.hops + hops.len() - group.hops.len();
        let bucketed = (usize::from(hops.len() > 1), usize::from(group.hops.len() > 1));
        self.bucketed = self.bucketed + bucketed.0 - bucketed.1;
        let old_ways = std::mem::replace(&mut group.resolved, new_ways);
        group.buckets = buckets(&hops, &group.hops, &group.buckets);
        (group.hops, group.mtu) = (hops, mtu);
        release(old_ways, neighbours);
    }

    /// Removes a group of the mirror. Its index stays in use while routes refer to it.
    pub(crate) fn gone(&mut self, id: GroupId, neighbours: &mut NeighbourTable) {
        if let Some(place) = self.by_id.remove(&id) {
            self.unname(place, neighbours);
        }
    }

    /// Begins a snapshot: identifiers get new meanings, and routes keep their groups.
    pub(crate) fn begin_snapshot(&mut self, neighbours: &mut NeighbourTable) {
        self.end_snapshot(neighbours);
        for (_, place) in self.by_id.drain() {
            let group = &self.slots[place as usize];
            let key = (group.hops.clone(), group.mtu);
            if let Some(double) = self.before.insert(key, place) {
                // Of two groups with the same hops, the snapshot finds
                // one again. The routes of the other will be removed.
                self.slots[double as usize].named = false;
            }
        }
        self.free_unused(neighbours);
    }

    /// Ends a snapshot. Groups that it did not name remain only while routes refer to them.
    pub(crate) fn end_snapshot(&mut self, neighbours: &mut NeighbourTable) {
        for (_, place) in std::mem::take(&mut self.before) {
            self.unname(place, neighbours);
        }
    }

    pub(crate) fn refer(&mut self, place: GroupIndex) {
        self.slots[place as usize].references += 1;
    }

    pub(crate) fn release(&mut self, place: GroupIndex, neighbours: &mut NeighbourTable) {
        let group = &mut self.slots[place as usize];
        group.references -= 1;
        self.free_if_unused(place, neighbours);
    }

    fn new_place(&mut self) -> GroupIndex {
        match self.free.pop() {
            Some(place) => {
                self.slots[place as usize].free = false;
                place
            }
            None => {
                self.slots.push(NexthopGroup::default());
                self.slots.len() as GroupIndex - 1
            }
        }
    }

    fn unname(&mut self, place: GroupIndex, neighbours: &mut NeighbourTable) {
        self.slots[place as usize].named = false;
        self.free_if_unused(place, neighbours);
    }

    fn free_unused(&mut self, neighbours: &mut NeighbourTable) {
        for place in 0..self.slots.len() as GroupIndex {
            self.free_if_unused(place, neighbours);
        }
    }

    fn free_if_unused(&mut self, place: GroupIndex, neighbours: &mut NeighbourTable) {
        let group = &mut self.slots[place as usize];
        if group.references == 0 && !group.named && !group.free {
            self.hops -= group.hops.len();
            self.bucketed -= usize::from(group.hops.len() > 1);
            release(std::mem::take(&mut group.resolved), neighbours);
            *group = NexthopGroup { free: true, ..NexthopGroup::default() };
            self.free.push(place);
        }
    }
}

fn release(hops: Vec<ResolvedHop>, neighbours: &mut NeighbourTable) {
    for gateway in hops.into_iter().filter_map(|hop| hop.gateway) {
        neighbours.release(gateway);
    }
}

/// Returns buckets for `hops` that differ as little
/// as possible from those of the group's hops `old`.
///
/// Each bucket holds the index of a hop. A group with less than two hops has no buckets. Another
/// forwarder that calls this with the same sequence of hops sends each flow to the same hop.
pub fn buckets(hops: &[GroupHop], old: &[GroupHop], old_buckets: &[u8]) -> Vec<u8> {
    if hops.len() < 2 {
        return Vec::new();
    }
    let mut left = shares(hops);
    // A group with a single hop had it in all buckets.
    let old_hop = |bucket: usize| old.get(old_buckets.get(bucket).map_or(0, |&at| at.into()));
    let mut buckets = [None; BUCKETS];
    for (bucket, place) in buckets.iter_mut().enumerate() {
        let same =
            |hop: &&GroupHop, new: &GroupHop| (hop.vport, hop.gateway) == (new.vport, new.gateway);
        let stays = old_hop(bucket).and_then(|old| hops.iter().position(|new| same(&old, new)));
        if let Some(hop) = stays.filter(|&hop| left[hop] > 0) {
            left[hop] -= 1;
            *place = Some(hop);
        }
    }
    // The rest is assigned round robin, which spreads the buckets of a hop.
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

/// Returns the number of buckets of each hop by weight: [`BUCKETS`] in total, at
/// least one each. The largest remainders get the buckets left by rounding down.
fn shares(hops: &[GroupHop]) -> Vec<usize> {
    let weight = |hop: &GroupHop| u64::from(hop.weight.max(1));
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

    fn hop(number: u8, weight: u16) -> GroupHop {
        GroupHop { vport: 0, gateway: Some(IpAddr::from([10, 0, 0, number])), weight }
    }

    fn hops() -> impl Strategy<Value = Vec<GroupHop>> {
        prop::collection::btree_map(any::<u8>(), 1u16.., 2..=HOPS_MAX)
            .prop_map(|hops| hops.into_iter().map(|(number, weight)| hop(number, weight)).collect())
    }

    fn count(buckets: &[u8], hops: &[GroupHop], which: &GroupHop) -> usize {
        buckets.iter().filter(|&&at| hops[usize::from(at)].gateway == which.gateway).count()
    }

    proptest! {
        #[test]
        fn buckets_follow_weights_and_move_minimally(
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
    fn removed_hop_moves_only_its_flows() {
        let (mut groups, mut neighbours) = (NexthopGroups::default(), NeighbourTable::default());
        let all: Vec<GroupHop> = (0..4).map(|number| hop(number, 1)).collect();
        groups.set(7, all.clone(), 0, &mut neighbours);
        let place = groups.index_of(7).unwrap();
        let gateway = |groups: &NexthopGroups, flow: u32| {
            let picked = groups.hop_of_flow(place, || flow).unwrap();
            groups.slots[place as usize]
                .resolved
                .iter()
                .position(|other| other.gateway == picked.gateway)
                .and_then(|at| groups.hops(place)[at].gateway)
        };
        let flows: Vec<u32> = (0..4000u32).map(|flow| flow.wrapping_mul(0x85eb_ca6b)).collect();
        let before: Vec<_> = flows.iter().map(|&flow| gateway(&groups, flow)).collect();
        groups.set(7, all[1..].to_vec(), 0, &mut neighbours);
        assert_eq!(groups.index_of(7), Some(place));
        for (flow, before) in flows.iter().zip(before) {
            let after = gateway(&groups, *flow);
            assert!(after == before || before == all[0].gateway);
            assert_ne!(after, all[0].gateway);
        }
    }

    #[test]
    fn group_ids_of_another_mirror_keep_old_routes() {
        let (mut groups, mut neighbours) = (NexthopGroups::default(), NeighbourTable::default());
        let (one, two) = (vec![hop(1, 1)], vec![hop(2, 1)]);
        groups.set(1, one.clone(), 0, &mut neighbours);
        groups.set(2, two.clone(), 0, &mut neighbours);
        let (place_one, place_two) = (groups.index_of(1).unwrap(), groups.index_of(2).unwrap());
        groups.refer(place_one);
        groups.refer(place_two);
        groups.begin_snapshot(&mut neighbours);
        // The other mirror's group 1 has the hop of the former group 2.
        groups.set(1, two.clone(), 0, &mut neighbours);
        assert_eq!(groups.index_of(1), Some(place_two));
        assert_eq!(groups.hops(place_one), one);
        groups.end_snapshot(&mut neighbours);
        assert_eq!(groups.hops(place_one), one, "a route still refers to it");
        groups.release(place_one, &mut neighbours);
        assert!(groups.slots[place_one as usize].free);
        groups.set(9, one.clone(), 0, &mut neighbours);
        assert_eq!(groups.index_of(9), Some(place_one), "used again");
        // Two groups with the same hops stay separate.
        groups.begin_snapshot(&mut neighbours);
        groups.set(20, two.clone(), 0, &mut neighbours);
        groups.set(21, two.clone(), 0, &mut neighbours);
        groups.set(21, one.clone(), 0, &mut neighbours);
        assert_eq!(groups.hops(groups.index_of(20).unwrap()), two);
    }
}
