//! The table against a slow model: any mix of changes, flushes, dumps in parts, snapshots in
//! parts and losses ends in what the model says.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use ipnet::IpNet;
use pdp_proto::routes::{Hop, Resolved};
use proptest::prelude::*;

use super::*;
use crate::kernel::{HopState, KernelHop, Link, Nexthop};

#[derive(Clone, Debug)]
enum Step {
    /// A route by prefix, metric and vport, or its removal.
    Add(u8, u32, u32),
    AddByObject(u8, u32, u32),
    Remove(u8, u32),
    Object(u32, u32),
    /// A change that no notification tells of; a loss.
    Silent(u8, u32, u32),
    Flush,
    /// This many things of the dump that runs, or that is begun.
    Dump(usize),
    /// This many prefixes of a new guest's snapshot.
    Snapshot(usize),
    Link(u32, bool),
}

fn step() -> impl Strategy<Value = Step> {
    let (prefix, metric, vport) = (0u8..12, 1u32..3, 1u32..4);
    prop_oneof![
        4 => (prefix.clone(), metric.clone(), vport.clone()).prop_map(|(p, m, v)| Step::Add(p, m, v)),
        1 => (prefix.clone(), metric.clone(), 1u32..3).prop_map(|(p, m, o)| Step::AddByObject(p, m, o)),
        3 => (prefix.clone(), metric.clone()).prop_map(|(p, m)| Step::Remove(p, m)),
        1 => (1u32..3, vport.clone()).prop_map(|(o, v)| Step::Object(o, v)),
        1 => (prefix, metric, vport.clone()).prop_map(|(p, m, v)| Step::Silent(p, m, v)),
        4 => Just(Step::Flush),
        4 => (1usize..6).prop_map(Step::Dump),
        2 => (1usize..6).prop_map(Step::Snapshot),
        1 => (vport, any::<bool>()).prop_map(|(v, up)| Step::Link(v, up)),
    ]
}

fn prefix(index: u8) -> IpNet {
    // Nested, so that neighbours in order are of different lengths.
    format!("10.{}.0.0/{}", index / 3, 16 + index % 3).parse().unwrap()
}

fn hop(ifindex: u32) -> KernelHop {
    let gateway = Some([172, 16, ifindex as u8, 2].into());
    KernelHop { ifindex, gateway, weight: 1, encap: false, state: HopState::default() }
}

/// The largest packet of a route.
fn mtu(metric: u32) -> u32 {
    1300 * (metric - 1)
}

fn route(index: u8, metric: u32, destination: kernel::Destination) -> Route {
    let identity = match &destination {
        kernel::Destination::Hops(hops) => hops[0].ifindex,
        kernel::Destination::Nexthop(id) => 100 + id,
        _ => 0,
    };
    let prefix = prefix(index);
    let table = KernelTable::Main;
    Route {
        prefix,
        table,
        selector: 0,
        metric,
        sibling: false,
        identity,
        destination,
        mtu: mtu(metric),
        expires: None,
    }
}

fn link(ifindex: u32, carrier: bool) -> Event {
    let name = format!("e{ifindex}");
    Event::Link(Link { ifindex, name, up: true, carrier, mac: [0; 6], mtu: 1500, over: None })
}

/// What a guest holds.
#[derive(Default)]
struct Guest {
    groups: HashMap<GroupId, (Vec<Hop>, u32)>,
    routes: BTreeMap<IpNet, Target>,
    vports: BTreeSet<u16>,
}

impl Guest {
    fn apply(&mut self, message: ToGuest) {
        match message {
            ToGuest::Group { id, hops, mtu } => drop(self.groups.insert(id, (hops, mtu))),
            ToGuest::GroupGone(id) => {
                assert!(self.groups.remove(&id).is_some(), "no group {id}");
                let target = Target::Group(id);
                assert!(self.routes.values().all(|other| *other != target), "{id} is in use");
            }
            ToGuest::Route { prefix, target } => {
                if let Target::Group(id) = target {
                    assert!(self.groups.contains_key(&id), "no group {id} yet");
                }
                self.routes.insert(prefix, target);
            }
            ToGuest::RouteGone(prefix) => drop(self.routes.remove(&prefix)),
            ToGuest::Vport(vport) => drop(self.vports.insert(vport.index)),
            _ => {}
        }
    }

    /// With the largest packet of each route that has hops.
    fn resolved(&self) -> BTreeMap<IpNet, (Resolved, u32)> {
        let resolve = |(prefix, target): (&IpNet, &Target)| match target {
            Target::Group(id) => {
                let (hops, mtu) = &self.groups[id];
                (*prefix, (Resolved::Hops(hops.clone()), *mtu))
            }
            Target::Punt => (*prefix, (Resolved::Punt, 0)),
            Target::Drop => (*prefix, (Resolved::Drop, 0)),
        };
        self.routes.iter().map(resolve).collect()
    }
}

struct Run {
    table: Table,
    /// The kernel: one route for each prefix and metric.
    kernel: BTreeMap<(u8, u32), kernel::Destination>,
    objects: BTreeMap<u32, u32>,
    early: Guest,
    late: Option<(Guest, Option<IpNet>, bool)>,
    /// What the dump that runs has still to name.
    left: Option<Vec<Route>>,
    lossy: bool,
}

impl Run {
    fn new() -> Self {
        let vports = vec!["e1".into(), "e2".into()];
        let mut table = Table::new(vports, u64::MAX, 7);
        (1..4).for_each(|ifindex| table.apply(&link(ifindex, true)));
        table.apply(&Event::Nexthop(1, Nexthop::Single(hop(1))));
        table.apply(&Event::Nexthop(2, Nexthop::Single(hop(3))));
        Self {
            table,
            kernel: BTreeMap::new(),
            objects: BTreeMap::from([(1, 1), (2, 3)]),
            early: Guest::default(),
            late: None,
            left: None,
            lossy: false,
        }
    }

    fn add(&mut self, index: u8, metric: u32, destination: kernel::Destination, told: bool) {
        let old = self.kernel.insert((index, metric), destination.clone());
        let placement = if old.is_some() { Placement::Replace } else { Placement::Only };
        if told && old.as_ref() != Some(&destination) {
            self.table.apply(&Event::Route(route(index, metric, destination), placement));
        }
    }

    fn dump(&mut self, count: usize) -> bool {
        let kind = Kind::Routes(false, KernelTable::Main);
        if self.left.is_none() {
            self.table.begin(kind);
            // The kernel walks in the order of prefixes; what it has passed it does not look at
            // again, which is the same as to look at all now.
            let mut all: Vec<Route> =
                self.kernel.iter().map(|((p, m), d)| route(*p, *m, d.clone())).collect();
            all.sort_by_key(|route| (route.prefix, route.metric));
            all.reverse();
            self.left = Some(all);
        }
        let left = self.left.as_mut().unwrap();
        for _ in 0..count {
            match left.pop() {
                Some(route) => self.table.dumped(Event::Route(route, Placement::First)),
                None => {
                    self.left = None;
                    let clean = self.table.end(false);
                    self.lossy &= !clean;
                    return clean;
                }
            }
        }
        false
    }

    fn flush(&mut self) {
        let mut messages = Vec::new();
        self.table.flush(&mut |message| messages.push(message));
        for message in messages {
            if let Some((late, ..)) = &mut self.late {
                late.apply(message.clone());
            }
            self.early.apply(message);
        }
    }

    fn snapshot(&mut self, count: usize) {
        let table = &self.table;
        let (late, from, done) = self.late.get_or_insert_with(|| {
            let mut guest = Guest::default();
            table.snapshot_head(&mut |message| guest.apply(message));
            (guest, None, false)
        });
        if !*done {
            match table.snapshot_routes(*from, count, &mut |message| late.apply(message)) {
                None => *done = true,
                last => *from = last,
            }
        }
    }

    fn step(&mut self, step: &Step) {
        let hops = |vport: u32| kernel::Destination::Hops(vec![hop(vport)]);
        match *step {
            Step::Add(p, m, v) => self.add(p, m, hops(v), true),
            Step::AddByObject(p, m, o) => {
                self.add(p, m, kernel::Destination::Nexthop(o), true);
            }
            Step::Remove(p, m) => {
                if let Some(old) = self.kernel.remove(&(p, m)) {
                    self.table.apply(&Event::RouteGone(route(p, m, old)));
                }
            }
            Step::Object(o, v) => {
                self.objects.insert(o, v);
                self.table.apply(&Event::Nexthop(o, Nexthop::Single(hop(v))));
            }
            Step::Silent(p, m, v) => {
                self.add(p, m, hops(v), false);
                self.lossy = true;
                // A loss ends the dump that runs, as the follower does.
                if self.left.take().is_some() {
                    self.table.abort();
                }
            }
            Step::Flush => self.flush(),
            Step::Dump(count) => drop(self.dump(count)),
            // The head of a snapshot is as of the last flush, and so must its parts be.
            Step::Snapshot(count) => {
                self.flush();
                self.snapshot(count);
            }
            Step::Link(v, carrier) => self.table.apply(&link(v, carrier)),
        }
    }

    fn expected(&self) -> BTreeMap<IpNet, (Resolved, u32)> {
        let mut expected = BTreeMap::new();
        for ((p, metric), destination) in &self.kernel {
            let vport = match destination {
                kernel::Destination::Hops(hops) => hops[0].ifindex,
                kernel::Destination::Nexthop(id) => self.objects[id],
                other => panic!("{other:?}"),
            };
            let resolved = match vport {
                3 => (Resolved::Punt, 0),
                _ => {
                    let (vport, gateway) = (vport as u16 - 1, hop(vport).gateway);
                    (Resolved::Hops(vec![Hop { vport, gateway, weight: 1 }]), mtu(*metric))
                }
            };
            expected.entry(prefix(*p)).or_insert(resolved);
        }
        expected
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn guests_end_with_what_the_kernel_has(steps in prop::collection::vec(step(), 1..120)) {
        let mut run = Run::new();
        let mut linkless = true;
        for step in &steps {
            // The loss of a carrier takes objects away without a word: tested with a kernel.
            linkless &= !matches!(step, Step::Link(_, false));
            if linkless {
                run.step(step);
            }
        }
        run.flush();
        while run.late.as_ref().is_some_and(|(.., done)| !done) {
            run.snapshot(3);
        }
        if run.lossy || run.left.is_some() {
            // The dump that runs may have begun before a loss; one that is clean makes it good.
            while run.left.is_some() {
                run.dump(1);
            }
            while !run.dump(2) {
                run.flush();
            }
            run.flush();
        }
        prop_assert_eq!(run.early.resolved(), run.expected());
        if let Some((late, ..)) = &run.late {
            prop_assert_eq!(late.resolved(), run.expected());
        }
        prop_assert_eq!(run.table.counts().routes[0], run.expected().len() as u64);
        prop_assert_eq!(run.table.counts().groups, run.early.groups.len() as u64);
        // Nothing is left when all is gone.
        for ((p, m), old) in std::mem::take(&mut run.kernel) {
            run.table.apply(&Event::RouteGone(route(p, m, old)));
        }
        run.flush();
        prop_assert!(run.early.routes.is_empty() && run.early.groups.is_empty());
        prop_assert!(run.table.entries.iter().next().is_none());
    }
}

/// What a vport takes beside its own link address: of macvlans over it that are up, as many as fit.
#[test]
fn link_addresses_of_macvlans_are_told_and_bounded() {
    let mut run = Run::new();
    let over = |ifindex: u32, up: bool| {
        let (name, mac) = (format!("v{ifindex}"), [2, 0, 0, 0, 0, ifindex as u8]);
        let over = Some(1);
        Event::Link(Link { ifindex, name, up, carrier: true, mac, mtu: 1500, over })
    };
    let told = |run: &mut Run| {
        let mut told = None;
        run.table.flush(&mut |message| match message {
            ToGuest::Vport(vport) if vport.index == 0 => told = Some(vport.macs),
            ToGuest::Vport(vport) => assert!(vport.macs.is_empty()),
            _ => {}
        });
        told
    };
    assert_eq!(told(&mut run), Some(vec![]));
    run.table.apply(&over(10, true));
    run.table.apply(&over(11, false));
    assert_eq!(told(&mut run), Some(vec![[2, 0, 0, 0, 0, 10]]));
    run.table.apply(&over(11, true));
    run.table.apply(&Event::LinkGone(10));
    assert_eq!(told(&mut run), Some(vec![[2, 0, 0, 0, 0, 11]]));
    (20..60).for_each(|ifindex| run.table.apply(&over(ifindex, true)));
    assert_eq!(told(&mut run).map(|macs| macs.len()), Some(pdp_proto::routes::MACS_MAX));
    (20..60).for_each(|ifindex| run.table.apply(&over(ifindex, false)));
    run.table.apply(&over(11, false));
    assert_eq!(told(&mut run), Some(vec![]));
}
