//! Merges inherited values with nearer ones: mappings key by key, everything else as a whole.

use std::collections::BTreeMap;

use crate::plane::DataPlane;
use crate::tree::{Tree, YamlValue};

/// Returns a mapping without a key.
pub(super) fn without(mut tree: Tree, key: &str) -> Tree {
    if let YamlValue::Map(entries) = &mut tree.value {
        entries.retain(|(_, found, _)| found != key);
    }
    tree
}

/// True if a nearer value at this path of a node's keys replaces the inherited one as a whole.
fn is_whole(path: &[String]) -> bool {
    let path: Vec<&str> = path.iter().map(String::as_str).collect();
    matches!(path[..], ["image"] | ["dataPlane", "program"] | ["files", _])
}

/// True if both are router data planes of different kinds, whose keys differ.
fn is_of_another_kind(path: &[String], inherited: &Tree, near: &Tree) -> bool {
    let kinds = (inherited.value.text("kind"), near.value.text("kind"));
    matches!(path, [key] if key == "dataPlane")
        && kinds.1.is_some_and(|near| kinds.0.unwrap_or(DataPlane::default().name()) != near)
}

/// Merges the nearer value into the inherited one. `path`: path of both in a node or link.
pub(super) fn merge(inherited: &mut Tree, near: Tree, path: &mut Vec<String>) {
    let whole = is_whole(path) || is_of_another_kind(path, inherited, &near);
    let (entries, nearer) = match (&mut inherited.value, near.value) {
        (YamlValue::Map(entries), YamlValue::Map(nearer)) if !whole => (entries, nearer),
        (_, value) => {
            *inherited = Tree { position: near.position, value };
            return;
        }
    };
    let mut index: BTreeMap<String, usize> =
        entries.iter().enumerate().map(|(index, (_, key, _))| (key.clone(), index)).collect();
    let mut removed = Vec::new();
    for (place, key, value) in nearer {
        // Duplicate keys stay duplicates, for a later check.
        let Some(at) = index.remove(&key) else {
            entries.push((place, key, value));
            continue;
        };
        if matches!(value.value, YamlValue::Null) {
            removed.push(at);
            continue;
        }
        entries[at].0 = place;
        path.push(key);
        merge(&mut entries[at].2, value, path);
        path.pop();
    }
    removed.sort_unstable();
    let mut at = 0;
    entries.retain(|_| {
        at += 1;
        removed.binary_search(&(at - 1)).is_err()
    });
}
