//! Cycles in a graph of modules.

use std::collections::{BTreeMap, BTreeSet};

/// Edges between modules, `a::b` each (the crate's root is empty), with the code that causes each.
pub type Edges = BTreeMap<(String, String), BTreeSet<String>>;

/// Name of the crate's root as a unit.
pub const ROOT: &str = "(root)";

/// Lifts edges to siblings: `a::b` uses `a::c::d` becomes `a::b` uses `a::c`, and `a::b` uses `e`
/// becomes `a` uses `e`. Edges between a module and the modules inside it are left out.
pub fn between_siblings(edges: &Edges) -> Edges {
    let mut lifted = Edges::new();
    for ((from, to), causes) in edges {
        let [from, to] = [from, to].map(|it| if it.is_empty() { ROOT } else { it.as_str() });
        let [from, to] = [from, to].map(|it| it.split("::").collect::<Vec<_>>());
        let common = from.iter().zip(&to).take_while(|(from, to)| from == to).count();
        if common < from.len() && common < to.len() {
            let [from, to] = [from, to].map(|it| it[..=common].join("::"));
            lifted.entry((from, to)).or_default().extend(causes.iter().cloned());
        }
    }
    lifted
}

/// Returns the strongly connected components of more than one module.
pub fn cycles(edges: &Edges) -> BTreeSet<BTreeSet<String>> {
    let reached: BTreeMap<&str, BTreeSet<&str>> =
        edges.keys().map(|(from, _)| (from.as_str(), reached_from(edges, from))).collect();
    let with = |it: &str, other: &&&str| reached.get(**other).is_some_and(|all| all.contains(it));
    let part = |(from, all): (&&str, &BTreeSet<&str>)| -> BTreeSet<String> {
        all.iter().filter(|to| with(from, to)).map(|to| (*to).to_owned()).collect()
    };
    reached.iter().map(part).filter(|part| part.len() > 1).collect()
}

/// Returns the modules that a module uses, directly or by others.
fn reached_from<'a>(edges: &'a Edges, from: &str) -> BTreeSet<&'a str> {
    let next = |from: &str| {
        let from = from.to_owned();
        edges.keys().filter(move |edge| edge.0 == from).map(|(_, to)| to.as_str())
    };
    let (mut open, mut found): (Vec<_>, _) = (next(from).collect(), BTreeSet::new());
    while let Some(module) = open.pop() {
        if found.insert(module) {
            open.extend(next(module));
        }
    }
    found
}
