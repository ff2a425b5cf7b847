//! What is known of a dump while it runs.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashSet};
use std::net::IpAddr;

use ipnet::IpNet;

use crate::kernel::{Event, Kind, Route};

/// A thing that is no route.
#[derive(Debug, PartialEq, Eq, Hash)]
pub enum Small {
    /// An interface.
    Link(u32),
    /// Its settings, by family.
    Conf(bool, i32),
    /// A neighbour, by interface.
    Neighbour(u32, IpAddr),
    /// A nexthop object.
    Object(u32),
}

/// A dump that runs.
#[derive(Debug)]
pub struct Dump {
    /// Of what.
    pub kind: Kind,
    /// Told of by notifications since it began.
    pub touched: HashSet<Small>,
    /// Named by it.
    pub named: HashSet<Small>,
    /// No notification of this kind came while it ran.
    pub clean: bool,
    /// Routes of the prefix that it is at.
    pub gather: Gather,
}

impl Dump {
    /// A dump that begins.
    pub fn new(kind: Kind) -> Self {
        Self {
            kind,
            touched: HashSet::new(),
            named: HashSet::new(),
            clean: true,
            gather: Gather::default(),
        }
    }
}

/// Puts the routes of each prefix together.
///
/// The kernel names the routes of a prefix one after the other, but for those of IPv6 that hold
/// for a source only: these come before the ones of longer prefixes, the others after them
/// (fib6_walk_continue).
#[derive(Debug, Default)]
pub struct Gather {
    current: Option<(IpNet, Vec<Route>)>,
    partial: BTreeMap<IpNet, Vec<Route>>,
    /// What is kept so.
    pub things: usize,
}

impl Gather {
    /// Adds a route; the prefix before, when this is another.
    pub fn push(&mut self, route: Route) -> Option<(IpNet, Vec<Route>)> {
        let prefix = route.prefix;
        self.things += route.things();
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

    /// At the end: what is left, until there is no more.
    pub fn take(&mut self) -> Option<(IpNet, Vec<Route>)> {
        let whole = self.current.take().or_else(|| self.partial.pop_first());
        whole.map(|whole| self.finish(whole))
    }

    fn finish(&mut self, (prefix, mut routes): (IpNet, Vec<Route>)) -> (IpNet, Vec<Route>) {
        routes.extend(self.partial.remove(&prefix).unwrap_or_default());
        self.things -= routes.iter().map(Route::things).sum::<usize>();
        routes.sort_by_key(|route| (Reverse(route.selector), route.metric));
        (prefix, routes)
    }
}

impl Small {
    /// By which dump it is named.
    pub fn kind(&self) -> Kind {
        match self {
            Self::Link(_) => Kind::Links,
            Self::Conf(v6, _) => Kind::Conf(*v6),
            Self::Neighbour(..) => Kind::Neighbours,
            Self::Object(_) => Kind::Nexthops,
        }
    }

    /// The notification that it is gone.
    pub fn gone(self) -> Event {
        match self {
            Self::Link(ifindex) => Event::LinkGone(ifindex),
            Self::Conf(v6, ifindex) => Event::ConfGone { v6, ifindex },
            Self::Neighbour(ifindex, address) => {
                Event::Neighbour { ifindex, address, mac: None, stale: false }
            }
            Self::Object(id) => Event::NexthopGone(id),
        }
    }
}

/// The thing that an event is of.
pub fn small(event: &Event) -> Option<Small> {
    match event {
        Event::Link(link) => Some(Small::Link(link.ifindex)),
        Event::LinkGone(ifindex) => Some(Small::Link(*ifindex)),
        Event::Conf { v6, ifindex, .. } | Event::ConfGone { v6, ifindex } => {
            Some(Small::Conf(*v6, *ifindex))
        }
        Event::Neighbour { ifindex, address, .. } => Some(Small::Neighbour(*ifindex, *address)),
        Event::Nexthop(id, _) | Event::NexthopGone(id) => Some(Small::Object(*id)),
        Event::Route(..) | Event::RouteGone(_) | Event::Address { .. } => None,
    }
}
