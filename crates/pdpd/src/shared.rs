//! Maps that two versions of something share: what is as before is the same one, by its pointer, so
//! that a new version is made, and told from the one before, without a look into what stays.

use std::collections::BTreeMap;
use std::sync::Arc;

/// Values by name, shared with other versions of the map.
pub type Shared<T> = Arc<BTreeMap<String, Arc<T>>>;

/// Names under which two versions have not the same value, in order.
pub fn differing<'a, T>(before: &'a Shared<T>, after: &'a Shared<T>) -> Vec<&'a str> {
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

/// Has a value under a name, or none. One that equals what is there changes nothing.
pub fn set<T: PartialEq>(map: &mut Shared<T>, name: &str, value: Option<T>) {
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
        /// As a slow comparison has it.
        #[test]
        fn what_differs_is_found(
            steps in proptest::collection::vec((0u8..20, proptest::option::of(0u8..3)), 0..60),
            cut in 0usize..60,
        ) {
            let mut map: Shared<u8> = Arc::default();
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
