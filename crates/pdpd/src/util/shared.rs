//! Maps whose versions point to the same unchanged values. So a new version is
//! made, and compared with the old one, without a look at unchanged values.

use std::collections::BTreeMap;
use std::sync::Arc;

/// Values by name, in common with other versions of the map.
pub type SharedMap<T> = Arc<BTreeMap<String, Arc<T>>>;

/// Returns the names whose values differ between two versions, in order.
pub fn differing<'a, T>(before: &'a SharedMap<T>, after: &'a SharedMap<T>) -> Vec<&'a str> {
    let mut names = Vec::new();
    if Arc::ptr_eq(before, after) {
        return names;
    }
    let (mut old, mut new) = (before.iter(), after.iter());
    let (mut was, mut is) = (old.next(), new.next());
    loop {
        match (was, is) {
            (Some((name, value)), Some((same, other))) if name == same => {
                if !Arc::ptr_eq(value, other) {
                    names.push(name.as_str());
                }
                (was, is) = (old.next(), new.next());
            }
            (Some((name, _)), other) if other.is_none_or(|(next, _)| name < next) => {
                names.push(name);
                was = old.next();
            }
            (_, Some((name, _))) => {
                names.push(name);
                is = new.next();
            }
            (_, None) => return names,
        }
    }
}

/// Sets or removes the value of a name. An equal value changes nothing.
pub fn set<T: PartialEq>(map: &mut SharedMap<T>, name: &str, value: Option<T>) {
    match (map.get(name), value) {
        (None, None) => {}
        (Some(before), Some(value)) if **before == value => {}
        (_, Some(value)) => drop(Arc::make_mut(map).insert(name.to_owned(), Arc::new(value))),
        (_, None) => drop(Arc::make_mut(map).remove(name)),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Compared with a slow implementation.
        #[test]
        fn shared_map_diff_equals_the_reference(
            steps in proptest::collection::vec((0u8..20, proptest::option::of(0u8..3)), 0..60),
            cut in 0usize..60,
        ) {
            let mut map: SharedMap<u8> = Arc::default();
            let mut before = map.clone();
            for (index, (name, value)) in steps.iter().enumerate() {
                if index == cut {
                    before = map.clone();
                }
                set(&mut map, &name.to_string(), *value);
                prop_assert_eq!(map.get(&name.to_string()).map(|value| **value), *value);
            }
            let names: std::collections::BTreeSet<&String> = before.keys().chain(map.keys()).collect();
            let same = |name: &String| match (before.get(name), map.get(name)) {
                (Some(was), Some(is)) => Arc::ptr_eq(was, is),
                _ => false,
            };
            let slow: Vec<&str> =
                names.into_iter().filter(|name| !same(name)).map(String::as_str).collect();
            prop_assert_eq!(differing(&before, &map), slow);
        }
    }
}
