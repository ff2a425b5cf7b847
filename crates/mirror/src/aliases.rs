//! The kernel's routes of one prefix, in the kernel's order.
//!
//! Guarantees that the list equals the kernel's after the same notifications. Most prefixes have
//! one route, which takes no memory of its own.
//! Sources: fib_table_insert and fib_table_delete (net/ipv4/fib_trie.c), fib6_add_rt2node and
//! fib6_del_route (net/ipv6/ip6_fib.c), Linux 6.18.

use crate::kernel::{KernelTable, RoutePlacement};
use crate::paths::PathDestination;

/// One route of a prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Alias {
    /// Smaller is better.
    pub metric: u32,
    /// Digest that distinguishes it from others of the same class.
    pub identity: u32,
    /// Destination of its packets.
    pub destination: PathDestination,
    /// Selector of the packets that it applies to; 0: all.
    pub selector: u16,
    /// Table.
    pub table: KernelTable,
    /// True for an IPv6 prefix.
    pub v6: bool,
    /// True if it uses a nexthop object.
    pub object: bool,
    /// True for an IPv6 route that merges with others of its class into one multipath route.
    pub sibling: bool,
}

impl Alias {
    /// Returns the class: classes come in the kernel's order, and
    /// routes of one class compete only by their order.
    pub fn rank(&self) -> (KernelTable, std::cmp::Reverse<u16>, u32) {
        (self.table, std::cmp::Reverse(self.selector), self.metric)
    }
}

/// All routes of one prefix.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Aliases {
    /// None.
    #[default]
    None,
    /// The usual case.
    One(Alias),
    /// More.
    #[allow(clippy::box_collection, reason = "a Vec would double the size of every entry")]
    Many(Box<Vec<Alias>>),
}

impl Aliases {
    /// Returns the routes in the kernel's order.
    pub fn as_slice(&self) -> &[Alias] {
        match self {
            Self::None => &[],
            Self::One(alias) => std::slice::from_ref(alias),
            Self::Many(aliases) => aliases,
        }
    }

    /// Inserts a route at the kernel's position.
    pub fn insert(&mut self, alias: Alias, placement: RoutePlacement) {
        if matches!(self, Self::None) {
            *self = Self::One(alias);
            return;
        }
        self.edit(|list| insert(list, alias, placement));
    }

    /// True if the effect of this replacement is unknown.
    pub fn is_ambiguous(&self, alias: &Alias, placement: RoutePlacement) -> bool {
        let mut class = self.as_slice().iter().filter(|other| other.rank() == alias.rank());
        placement == RoutePlacement::Replace
            && alias.v6
            && alias.object
            && class.clone().count() > 1
            && class.any(|other| other.identity == alias.identity)
    }

    /// Removes the route of this class and identity.
    pub fn remove(&mut self, alias: &Alias) {
        let same = |other: &Alias| other.rank() == alias.rank() && other.identity == alias.identity;
        self.edit(|list| {
            if let Some(at) = list.iter().position(same) {
                list.remove(at);
            }
        });
    }

    /// Returns the multipath route of siblings in the class of `alias`.
    pub fn siblings(&self, alias: &Alias) -> Option<&Alias> {
        self.as_slice().iter().find(|other| other.sibling && other.rank() == alias.rank())
    }

    /// Keeps only the routes for which `keep` returns true.
    pub fn retain(&mut self, keep: impl FnMut(&Alias) -> bool) {
        self.edit(|list| list.retain(keep));
    }

    /// Replaces all routes of a table with these, which are in the kernel's order.
    pub fn set_table(&mut self, table: KernelTable, aliases: &[Alias]) {
        self.edit(|list| {
            list.retain(|alias| alias.table != table);
            list.extend_from_slice(aliases);
            list.sort_by_key(|alias| alias.table);
        });
    }

    fn edit(&mut self, edit: impl FnOnce(&mut Vec<Alias>)) {
        let mut list = match std::mem::take(self) {
            Self::None => Vec::new(),
            Self::One(alias) => vec![alias],
            Self::Many(list) => *list,
        };
        edit(&mut list);
        *self = match *list {
            [] => Self::None,
            [alias] => Self::One(alias),
            _ => Self::Many(Box::new(list)),
        };
    }
}

/// True if a notification repeats a known route.
///
/// After a change of a nexthop object, the kernel sends its routes again as replacements. These
/// must not replace the first route of the class. (A real replacement by an existing route looks
/// the same except for its request, and only IPv6 permits it: see [`Aliases::is_ambiguous`].) IPv4
/// never has two equal routes. In IPv6, replacing one route may put a second copy of another there.
fn is_told_again(class: &[Alias], alias: &Alias) -> bool {
    let is_there = class.iter().any(|other| other.identity == alias.identity);
    is_there && (alias.object || !alias.v6)
}

fn insert(list: &mut Vec<Alias>, alias: Alias, placement: RoutePlacement) {
    let class = alias.rank();
    if placement == RoutePlacement::Only {
        list.retain(|other| other.rank() != class);
    }
    let start = list.partition_point(|other| other.rank() < class);
    let end = list.partition_point(|other| other.rank() <= class);
    // IPv6 sends the whole multipath route when one of its hops is added.
    if let Some(at) = (start..end).find(|at| alias.sibling && list[*at].sibling) {
        list[at] = alias;
        return;
    }
    if is_told_again(&list[start..end], &alias) {
        return;
    }
    match placement {
        RoutePlacement::Replace | RoutePlacement::Again if start < end => {
            // IPv6 replaces a route of the same type if there is one. IPv4
            // replaces the first; all are of one type there.
            let same_sort = (start..end).find(|at| list[*at].sibling == alias.sibling);
            list[same_sort.unwrap_or(start)] = alias;
        }
        RoutePlacement::First => list.insert(start, alias),
        RoutePlacement::Only
        | RoutePlacement::Last
        | RoutePlacement::Replace
        | RoutePlacement::Again => {
            list.insert(end, alias);
        }
    }
}
