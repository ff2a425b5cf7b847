//! State of a running dump.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashSet};
use std::net::IpAddr;

use ipnet::IpNet;

use crate::kernel::{DumpKind, KernelEvent, KernelRoute};

/// Object other than a route.
#[derive(Debug, PartialEq, Eq, Hash)]
pub enum DumpedObject {
    /// An interface.
    Link(u32),
    /// Settings of an interface, by family.
    Conf(bool, i32),
    /// A neighbour, by interface.
    Neighbour(u32, IpAddr),
    /// A nexthop object.
    Object(u32),
}

/// A running dump.
#[derive(Debug)]
pub struct Dump {
    /// Kind of objects in the dump.
    pub kind: DumpKind,
    /// Objects that notifications touched since it began.
    pub touched: HashSet<DumpedObject>,
    /// Objects that it named.
    pub named: HashSet<DumpedObject>,
    /// True if no notification of this kind arrived while it ran.
    pub clean: bool,
    /// Routes of the current prefix.
    pub gather: Gather,
}

impl Dump {
    /// Makes the state of a new dump.
    pub fn new(kind: DumpKind) -> Self {
        Self {
            kind,
            touched: HashSet::new(),
            named: HashSet::new(),
            clean: true,
            gather: Gather::default(),
        }
    }
}

/// Groups the routes of a dump by prefix.
///
/// The kernel names the routes of a prefix one after the other. The exceptions
/// are IPv6 routes for a source only: these come before the routes of longer
/// prefixes, the others after them (fib6_walk_continue).
#[derive(Debug, Default)]
pub struct Gather {
    current: Option<(IpNet, Vec<KernelRoute>)>,
    partial: BTreeMap<IpNet, Vec<KernelRoute>>,
    /// Count of stored objects.
    pub objects: usize,
}

impl Gather {
    /// Adds a route. If its prefix differs from the
    /// previous one, returns that prefix and its routes.
    pub fn push(&mut self, route: KernelRoute) -> Option<(IpNet, Vec<KernelRoute>)> {
        let prefix = route.prefix;
        self.objects += route.object_count();
        if matches!(prefix, IpNet::V6(_)) && route.selector != 0 {
            self.partial.entry(prefix).or_default().push(route);
            return None;
        }
        if let Some((current, routes)) = &mut self.current
            && *current == prefix
        {
            routes.push(route);
            return None;
        }
        let whole = self.current.replace((prefix, vec![route]));
        whole.map(|whole| self.finish(whole))
    }

    /// At the end of the dump, returns the next remaining prefix; `None` if there is none.
    pub fn take(&mut self) -> Option<(IpNet, Vec<KernelRoute>)> {
        let whole = self.current.take().or_else(|| self.partial.pop_first());
        whole.map(|whole| self.finish(whole))
    }

    fn finish(
        &mut self,
        (prefix, mut routes): (IpNet, Vec<KernelRoute>),
    ) -> (IpNet, Vec<KernelRoute>) {
        routes.extend(self.partial.remove(&prefix).unwrap_or_default());
        self.objects -= routes.iter().map(KernelRoute::object_count).sum::<usize>();
        routes.sort_by_key(|route| (Reverse(route.selector), route.metric));
        (prefix, routes)
    }
}

impl DumpedObject {
    /// Returns the kind of dump that names it.
    pub fn kind(&self) -> DumpKind {
        match self {
            Self::Link(_) => DumpKind::Links,
            Self::Conf(v6, _) => DumpKind::Conf(*v6),
            Self::Neighbour(..) => DumpKind::Neighbours,
            Self::Object(_) => DumpKind::Nexthops,
        }
    }

    /// Returns the event for its removal.
    pub fn gone(self) -> KernelEvent {
        match self {
            Self::Link(ifindex) => KernelEvent::LinkGone(ifindex),
            Self::Conf(v6, ifindex) => KernelEvent::ConfGone { v6, ifindex },
            Self::Neighbour(ifindex, address) => {
                KernelEvent::Neighbour { ifindex, address, mac: None, stale: false }
            }
            Self::Object(id) => KernelEvent::NexthopGone(id),
        }
    }
}

/// Returns the object of an event.
pub fn small(event: &KernelEvent) -> Option<DumpedObject> {
    match event {
        KernelEvent::Link(link) => Some(DumpedObject::Link(link.ifindex)),
        KernelEvent::LinkGone(ifindex) => Some(DumpedObject::Link(*ifindex)),
        KernelEvent::Conf { v6, ifindex, .. } | KernelEvent::ConfGone { v6, ifindex } => {
            Some(DumpedObject::Conf(*v6, *ifindex))
        }
        KernelEvent::Neighbour { ifindex, address, .. } => {
            Some(DumpedObject::Neighbour(*ifindex, *address))
        }
        KernelEvent::Nexthop(id, _) | KernelEvent::NexthopGone(id) => {
            Some(DumpedObject::Object(*id))
        }
        KernelEvent::Route(..) | KernelEvent::RouteGone(_) | KernelEvent::Address { .. } => None,
    }
}
