//! The table against a slow model. Any mix of changes, flushes, dumps in parts, snapshots in parts
//! and losses must end in the model's state.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use ipnet::IpNet;
use pdp_proto::routes::{GroupHop, ResolvedRoute};
use proptest::prelude::*;

use super::*;
use crate::kernel::{HopState, KernelHop, KernelInterface, Nexthop};

#[derive(Clone, Debug)]
enum Step {
    /// Adds a route by prefix, metric and vport.
    Add(u8, u32, u32),
    AddByObject(u8, u32, u32),
    Remove(u8, u32),
    Object(u32, u32),
    /// A change without a notification, which counts as a loss.
    Silent(u8, u32, u32),
    Flush,
    /// Reads this many objects of the running dump, or of a new one.
    Dump(usize),
    /// Reads this many prefixes of a new guest's snapshot.
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
    // Nested, so that neighbouring prefixes in the order have different lengths.
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

fn route(index: u8, metric: u32, destination: kernel::KernelDestination) -> KernelRoute {
    let identity = match &destination {
        kernel::KernelDestination::Hops(hops) => hops[0].ifindex,
        kernel::KernelDestination::Nexthop(id) => 100 + id,
        _ => 0,
    };
    let prefix = prefix(index);
    let table = KernelTable::Main;
    KernelRoute {
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

fn link(ifindex: u32, carrier: bool) -> KernelEvent {
    let name = format!("e{ifindex}");
    KernelEvent::Link(KernelInterface {
        ifindex,
        name,
        up: true,
        carrier,
        mac: [0; 6],
        mtu: 1500,
        over: None,
    })
}

/// State of a guest.
#[derive(Default)]
struct Guest {
    groups: HashMap<GroupId, (Vec<GroupHop>, u32)>,
    routes: BTreeMap<IpNet, RouteDecision>,
    vports: BTreeSet<u16>,
}

impl Guest {
    fn apply(&mut self, message: ToGuest) {
        match message {
            ToGuest::Group { id, hops, mtu } => drop(self.groups.insert(id, (hops, mtu))),
            ToGuest::GroupGone(id) => {
                assert!(self.groups.remove(&id).is_some(), "no group {id}");
                let target = RouteDecision::Group(id);
                assert!(self.routes.values().all(|other| *other != target), "{id} is in use");
            }
            ToGuest::Route { prefix, target } => {
                if let RouteDecision::Group(id) = target {
                    assert!(self.groups.contains_key(&id), "no group {id} yet");
                }
                self.routes.insert(prefix, target);
            }
            ToGuest::RouteGone(prefix) => drop(self.routes.remove(&prefix)),
            ToGuest::Vport(vport) => drop(self.vports.insert(vport.index)),
            _ => {}
        }
    }

    /// Returns the routes, with the largest packet of each route that has hops.
    fn resolved(&self) -> BTreeMap<IpNet, (ResolvedRoute, u32)> {
        let resolve = |(prefix, target): (&IpNet, &RouteDecision)| match target {
            RouteDecision::Group(id) => {
                let (hops, mtu) = &self.groups[id];
                (*prefix, (ResolvedRoute::Hops(hops.clone()), *mtu))
            }
            RouteDecision::Punt => (*prefix, (ResolvedRoute::Punt, 0)),
            RouteDecision::Drop => (*prefix, (ResolvedRoute::Drop, 0)),
        };
        self.routes.iter().map(resolve).collect()
    }
}

struct Run {
    table: MirrorTable,
    /// The kernel's routes: one for each prefix and metric.
    kernel: BTreeMap<(u8, u32), kernel::KernelDestination>,
    objects: BTreeMap<u32, u32>,
    early: Guest,
    late_guest: Option<(Guest, Option<IpNet>, bool)>,
    /// Routes that the running dump has still to name.
    left: Option<Vec<KernelRoute>>,
    lossy: bool,
}

impl Run {
    fn new() -> Self {
        let vports = vec!["e1".into(), "e2".into()];
        let mut table = MirrorTable::new(vports, u64::MAX, 7);
        (1..4).for_each(|ifindex| table.apply(&link(ifindex, true)));
        table.apply(&KernelEvent::Nexthop(1, Nexthop::Single(hop(1))));
        table.apply(&KernelEvent::Nexthop(2, Nexthop::Single(hop(3))));
        Self {
            table,
            kernel: BTreeMap::new(),
            objects: BTreeMap::from([(1, 1), (2, 3)]),
            early: Guest::default(),
            late_guest: None,
            left: None,
            lossy: false,
        }
    }

    fn add(
        &mut self,
        index: u8,
        metric: u32,
        destination: kernel::KernelDestination,
        notified: bool,
    ) {
        let old = self.kernel.insert((index, metric), destination.clone());
        let placement = if old.is_some() { RoutePlacement::Replace } else { RoutePlacement::Only };
        if notified && old.as_ref() != Some(&destination) {
            self.table.apply(&KernelEvent::Route(route(index, metric, destination), placement));
        }
    }

    fn dump(&mut self, count: usize) -> bool {
        let kind = DumpKind::Routes(false, KernelTable::Main);
        if self.left.is_none() {
            self.table.begin(kind);
            // The kernel walks in the order of prefixes and never returns to earlier ones. For the
            // test, this equals reading all of them now.
            let mut all: Vec<KernelRoute> =
                self.kernel.iter().map(|((p, m), d)| route(*p, *m, d.clone())).collect();
            all.sort_by_key(|route| (route.prefix, route.metric));
            all.reverse();
            self.left = Some(all);
        }
        let left = self.left.as_mut().unwrap();
        for _ in 0..count {
            match left.pop() {
                Some(route) => self.table.dumped(KernelEvent::Route(route, RoutePlacement::First)),
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
            if let Some((late_guest, ..)) = &mut self.late_guest {
                late_guest.apply(message.clone());
            }
            self.early.apply(message);
        }
    }

    fn snapshot(&mut self, count: usize) {
        let table = &self.table;
        let (late_guest, from, done) = self.late_guest.get_or_insert_with(|| {
            let mut guest = Guest::default();
            table.snapshot_head(&mut |message| guest.apply(message));
            (guest, None, false)
        });
        if !*done {
            match table.snapshot_routes(*from, count, &mut |message| late_guest.apply(message)) {
                None => *done = true,
                last => *from = last,
            }
        }
    }

    fn step(&mut self, step: &Step) {
        let hops = |vport: u32| kernel::KernelDestination::Hops(vec![hop(vport)]);
        match *step {
            Step::Add(p, m, v) => self.add(p, m, hops(v), true),
            Step::AddByObject(p, m, o) => {
                self.add(p, m, kernel::KernelDestination::Nexthop(o), true);
            }
            Step::Remove(p, m) => {
                if let Some(old) = self.kernel.remove(&(p, m)) {
                    self.table.apply(&KernelEvent::RouteGone(route(p, m, old)));
                }
            }
            Step::Object(o, v) => {
                self.objects.insert(o, v);
                self.table.apply(&KernelEvent::Nexthop(o, Nexthop::Single(hop(v))));
            }
            Step::Silent(p, m, v) => {
                self.add(p, m, hops(v), false);
                self.lossy = true;
                // A loss aborts the running dump, as in the follower.
                if self.left.take().is_some() {
                    self.table.abort();
                }
            }
            Step::Flush => self.flush(),
            Step::Dump(count) => drop(self.dump(count)),
            // The head of a snapshot is as of the last flush, so its parts must be, too.
            Step::Snapshot(count) => {
                self.flush();
                self.snapshot(count);
            }
            Step::Link(v, carrier) => self.table.apply(&link(v, carrier)),
        }
    }

    fn expected(&self) -> BTreeMap<IpNet, (ResolvedRoute, u32)> {
        let mut expected = BTreeMap::new();
        for ((p, metric), destination) in &self.kernel {
            let vport = match destination {
                kernel::KernelDestination::Hops(hops) => hops[0].ifindex,
                kernel::KernelDestination::Nexthop(id) => self.objects[id],
                other => panic!("{other:?}"),
            };
            let resolved = match vport {
                3 => (ResolvedRoute::Punt, 0),
                _ => {
                    let (vport, gateway) = (vport as u16 - 1, hop(vport).gateway);
                    (
                        ResolvedRoute::Hops(vec![GroupHop { vport, gateway, weight: 1 }]),
                        mtu(*metric),
                    )
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
    fn guests_converge_to_the_kernels_state(steps in prop::collection::vec(step(), 1..120)) {
        let mut run = Run::new();
        let mut linkless = true;
        for step in &steps {
            // A lost carrier removes objects without notification; tests with a kernel cover it.
            linkless &= !matches!(step, Step::Link(_, false));
            if linkless {
                run.step(step);
            }
        }
        run.flush();
        while run.late_guest.as_ref().is_some_and(|(.., done)| !done) {
            run.snapshot(3);
        }
        if run.lossy || run.left.is_some() {
            // The running dump may have begun before a loss; a clean dump repairs it.
            while run.left.is_some() {
                run.dump(1);
            }
            while !run.dump(2) {
                run.flush();
            }
            run.flush();
        }
        prop_assert_eq!(run.early.resolved(), run.expected());
        if let Some((late_guest, ..)) = &run.late_guest {
            prop_assert_eq!(late_guest.resolved(), run.expected());
        }
        prop_assert_eq!(run.table.counts().routes[0], run.expected().len() as u64);
        prop_assert_eq!(run.table.counts().groups, run.early.groups.len() as u64);
        // Nothing is left when all is gone.
        for ((p, m), old) in std::mem::take(&mut run.kernel) {
            run.table.apply(&KernelEvent::RouteGone(route(p, m, old)));
        }
        run.flush();
        prop_assert!(run.early.routes.is_empty() && run.early.groups.is_empty());
        prop_assert!(run.table.entries.iter().next().is_none());
    }
}

/// MAC addresses that a vport accepts beside its own: those of
/// macvlans over it that are up, as many as fit.
#[test]
fn macvlan_addresses_are_reported_and_bounded() {
    let mut run = Run::new();
    let over = |ifindex: u32, up: bool| {
        let (name, mac) = (format!("v{ifindex}"), [2, 0, 0, 0, 0, ifindex as u8]);
        let over = Some(1);
        KernelEvent::Link(KernelInterface {
            ifindex,
            name,
            up,
            carrier: true,
            mac,
            mtu: 1500,
            over,
        })
    };
    let pushed_macs = |run: &mut Run| {
        let mut pushed_macs = None;
        run.table.flush(&mut |message| match message {
            ToGuest::Vport(vport) if vport.index == 0 => pushed_macs = Some(vport.macs),
            ToGuest::Vport(vport) => assert!(vport.macs.is_empty()),
            _ => {}
        });
        pushed_macs
    };
    assert_eq!(pushed_macs(&mut run), Some(vec![]));
    run.table.apply(&over(10, true));
    run.table.apply(&over(11, false));
    assert_eq!(pushed_macs(&mut run), Some(vec![[2, 0, 0, 0, 0, 10]]));
    run.table.apply(&over(11, true));
    run.table.apply(&KernelEvent::LinkGone(10));
    assert_eq!(pushed_macs(&mut run), Some(vec![[2, 0, 0, 0, 0, 11]]));
    (20..60).for_each(|ifindex| run.table.apply(&over(ifindex, true)));
    assert_eq!(pushed_macs(&mut run).map(|macs| macs.len()), Some(pdp_proto::routes::MACS_MAX));
    (20..60).for_each(|ifindex| run.table.apply(&over(ifindex, false)));
    run.table.apply(&over(11, false));
    assert_eq!(pushed_macs(&mut run), Some(vec![]));
}
