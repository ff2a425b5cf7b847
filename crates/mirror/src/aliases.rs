//! The kernel's routes of one prefix, in the kernel's order.
//!
//! Promises that the list equals the kernel's after the same notifications. Most prefixes have
//! one route, which takes no memory of its own.
//! Sources: fib_table_insert and fib_table_delete (net/ipv4/fib_trie.c), fib6_add_rt2node and
//! fib6_del_route (net/ipv6/ip6_fib.c), Linux 6.18.

use crate::kernel::{Placement, Table};
use crate::paths::Destination;

/// One route of a prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Alias {
    /// Smaller is better.
    pub metric: u32,
    /// Tells it from others of the same class.
    pub identity: u32,
    /// Where it leads.
    pub destination: Destination,
    /// Not 0: for some packets only.
    pub selector: u16,
    /// Table.
    pub table: Table,
    /// Of an IPv6 prefix.
    pub v6: bool,
    /// By a nexthop object.
    pub object: bool,
    /// An IPv6 route that joins with others of its class into one multipath route.
    pub sibling: bool,
}

impl Alias {
    /// Routes of one class compete by order alone; classes come in the kernel's order.
    pub fn class(&self) -> (Table, std::cmp::Reverse<u16>, u32) {
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
    /// In the kernel's order.
    pub fn as_slice(&self) -> &[Alias] {
        match self {
            Self::None => &[],
            Self::One(alias) => std::slice::from_ref(alias),
            Self::Many(aliases) => aliases,
        }
    }

    /// Puts a route where the kernel put it.
    pub fn insert(&mut self, alias: Alias, placement: Placement) {
        if matches!(self, Self::None) {
            *self = Self::One(alias);
            return;
        }
        self.edit(|list| insert(list, alias, placement));
    }

    /// Whether it cannot be told what this replacement did.
    pub fn is_ambiguous(&self, alias: &Alias, placement: Placement) -> bool {
        let mut class = self.as_slice().iter().filter(|other| other.class() == alias.class());
        placement == Placement::Replace
            && alias.v6
            && alias.object
            && class.clone().count() > 1
            && class.any(|other| other.identity == alias.identity)
    }

    /// Removes the route of this class and identity.
    pub fn remove(&mut self, alias: &Alias) {
        let same =
            |other: &Alias| other.class() == alias.class() && other.identity == alias.identity;
        self.edit(|list| {
            if let Some(at) = list.iter().position(same) {
                list.remove(at);
            }
        });
    }

    /// The multipath route of siblings in the class of `alias`.
    pub fn siblings(&self, alias: &Alias) -> Option<&Alias> {
        self.as_slice().iter().find(|other| other.sibling && other.class() == alias.class())
    }

    /// Keeps what `keep` says.
    pub fn retain(&mut self, keep: impl FnMut(&Alias) -> bool) {
        self.edit(|list| list.retain(keep));
    }

    /// Replaces all routes of a table by these, which are in the kernel's order.
    pub fn set_table(&mut self, table: Table, aliases: &[Alias]) {
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

/// A route of a nexthop object is told again after a change of the object, as a replacement,
/// which must not replace the first route of the class. (A real replacement by a route that is
/// there already looks the same but for the request that made it, and only IPv6 permits it: see
/// [`Aliases::is_ambiguous`].) IPv4 never has two alike; IPv6 may put one where another is
/// replaced.
fn is_told_again(class: &[Alias], alias: &Alias) -> bool {
    let is_there = class.iter().any(|other| other.identity == alias.identity);
    is_there && (alias.object || !alias.v6)
}

fn insert(list: &mut Vec<Alias>, alias: Alias, placement: Placement) {
    let class = alias.class();
    if placement == Placement::Only {
        list.retain(|other| other.class() != class);
    }
    let start = list.partition_point(|other| other.class() < class);
    let end = list.partition_point(|other| other.class() <= class);
    // IPv6 tells the whole multipath route when one of its hops is added.
    if let Some(at) = (start..end).find(|at| alias.sibling && list[*at].sibling) {
        list[at] = alias;
        return;
    }
    if is_told_again(&list[start..end], &alias) {
        return;
    }
    match placement {
        Placement::Replace | Placement::Again if start < end => {
            // IPv6 replaces a route of the same sort if there is one, IPv4 the first (there,
            // all are of one sort).
            let same_sort = (start..end).find(|at| list[*at].sibling == alias.sibling);
            list[same_sort.unwrap_or(start)] = alias;
        }
        Placement::First => list.insert(start, alias),
        Placement::Only | Placement::Last | Placement::Replace | Placement::Again => {
            list.insert(end, alias);
        }
    }
}
