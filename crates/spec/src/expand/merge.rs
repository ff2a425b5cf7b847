//! What is nearer over what is further off: mappings key by key, all else as a whole.

use std::collections::BTreeMap;

use crate::tree::{Tree, Value};

/// The kind of a data plane that does not say.
const PARALLEL: &str = "parallel";

/// A mapping without a key.
pub(super) fn without(mut tree: Tree, key: &str) -> Tree {
    if let Value::Map(entries) = &mut tree.value {
        entries.retain(|(_, found, _)| found != key);
    }
    tree
}

/// Whether what is at a path of a node's keys is one thing, of which a nearer one replaces all.
fn is_whole(path: &[String]) -> bool {
    let path: Vec<&str> = path.iter().map(String::as_str).collect();
    matches!(path[..], ["image"] | ["dataPlane", "program"] | ["files", _])
}

/// Whether both are a router's data plane, and of different kinds: the keys of one are not the other's.
fn is_of_another_kind(path: &[String], far: &Tree, near: &Tree) -> bool {
    let kinds = (far.value.text("kind"), near.value.text("kind"));
    matches!(path, [key] if key == "dataPlane")
        && kinds.1.is_some_and(|near| kinds.0.unwrap_or(PARALLEL) != near)
}

/// Puts what is nearer over what is further off. `path`: of both, in a node or link.
pub(super) fn merge(far: &mut Tree, near: Tree, path: &mut Vec<String>) {
    let whole = is_whole(path) || is_of_another_kind(path, far, &near);
    let (entries, nearer) = match (&mut far.value, near.value) {
        (Value::Map(entries), Value::Map(nearer)) if !whole => (entries, nearer),
        (_, value) => {
            *far = Tree { place: near.place, value };
            return;
        }
    };
    let mut index: BTreeMap<String, usize> =
        entries.iter().enumerate().map(|(index, (_, key, _))| (key.clone(), index)).collect();
    let mut gone = Vec::new();
    for (place, key, value) in nearer {
        // One that stands twice is there twice, and found to be.
        let Some(at) = index.remove(&key) else {
            entries.push((place, key, value));
            continue;
        };
        if matches!(value.value, Value::Null) {
            gone.push(at);
            continue;
        }
        entries[at].0 = place;
        path.push(key);
        merge(&mut entries[at].2, value, path);
        path.pop();
    }
    gone.sort_unstable();
    let mut at = 0;
    entries.retain(|_| {
        at += 1;
        gone.binary_search(&(at - 1)).is_err()
    });
}
