//! Numbers and placements that were given out: the part of the state that is not in the specs
//! and must stay the same while what depends on it runs.
//!
//! Pure: a change is planned on a copy, and the copy is stored with the specs it belongs to.

use std::collections::{BTreeMap, BTreeSet};

/// A vnet's scope of numbers.
pub const VNETS: &str = "vnet";

/// User ids of the mux and of the vnets begin here: far above those of people and services, below
/// those that systemd-nspawn and container managers take.
pub const UID_BASE: u32 = 0x2000_0000;

/// User ids that the user namespaces of a vnet's guests map 0..65536 onto.
pub const UIDS_PER_VNET: u32 = 1 << 16;

/// From one vnet's user ids to the next's: what is not mapped is for helpers, which nothing in a
/// guest can become.
const UID_STRIDE: u32 = 2 * UIDS_PER_VNET;

/// Vnets of one pdpd, with those that are going: the first range of user ids is the mux's.
pub const VNETS_MAX: u32 = 4000;

/// A forwarding guest's share of a forwarding engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// The forwarding engine.
    pub engine: String,
    /// Thousandths of a core.
    pub power_millicores: u32,
}

/// What was given out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ledger {
    /// By scope and name; unique in a scope.
    pub numbers: BTreeMap<String, BTreeMap<String, u32>>,
    /// Forwarding guests by (vnet, node) and number.
    pub placements: BTreeMap<(String, String), BTreeMap<u32, Placement>>,
    /// Vlinks that a user took down, as (vnet, vlink).
    pub links_down: BTreeSet<(String, String)>,
    /// Everything was stopped by its user, and stays so over restarts.
    pub stopped: bool,
}

impl Ledger {
    /// The number of `name` in `scope`: the one it has, or the lowest free one below `limit`;
    /// `None` when all are taken.
    pub fn number(&mut self, scope: &str, name: &str, limit: u32) -> Option<u32> {
        let names = self.numbers.entry(scope.into()).or_default();
        if let Some(&number) = names.get(name) {
            return Some(number);
        }
        let taken: BTreeSet<u32> = names.values().copied().collect();
        let free = (0..limit).find(|number| !taken.contains(number))?;
        names.insert(name.into(), free);
        Some(free)
    }

    /// The number of `name` in `scope`, if it has one.
    pub fn number_of(&self, scope: &str, name: &str) -> Option<u32> {
        self.numbers.get(scope)?.get(name).copied()
    }

    /// What was given out for the vrouters of a vnet.
    pub fn placements_of(
        &self,
        vnet: &str,
    ) -> impl Iterator<Item = (&str, &BTreeMap<u32, Placement>)> {
        let from = (vnet.to_owned(), String::new());
        let theirs = self.placements.range(from..).take_while(move |((of, _), _)| of == vnet);
        theirs.map(|((_, node), placed)| (node.as_str(), placed))
    }

    /// Vlinks of a vnet that a user took down.
    pub fn links_down_of(&self, vnet: &str) -> impl Iterator<Item = &str> {
        let from = (vnet.to_owned(), String::new());
        let theirs = self.links_down.range(from..).take_while(move |(of, _)| of == vnet);
        theirs.map(|(_, link)| link.as_str())
    }

    /// Takes back the numbers in `scope` of names that are not to be kept.
    pub fn keep_only(&mut self, scope: &str, keep: impl Fn(&str) -> bool) {
        if let Some(names) = self.numbers.get_mut(scope) {
            names.retain(|name, _| keep(name));
            if names.is_empty() {
                self.numbers.remove(scope);
            }
        }
    }

    /// Takes back all that a vnet has but its number, which what is left of it still bears.
    pub fn forget_vnet(&mut self, vnet: &str) {
        self.placements.retain(|(of, _), _| of != vnet);
        self.links_down.retain(|(of, _)| of != vnet);
    }
}

/// First user id of the vnet of this number.
pub fn vnet_uid_base(vnet: u32) -> u32 {
    UID_BASE + (vnet + 1) * UID_STRIDE
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn numbers_stay_and_never_meet(
            steps in proptest::collection::vec((any::<bool>(), 0u8..12), 0..60),
        ) {
            let mut ledger = Ledger::default();
            let mut known: BTreeMap<String, u32> = BTreeMap::new();
            for (add, name) in steps {
                let name = name.to_string();
                if add {
                    match ledger.number("s", &name, 8) {
                        Some(number) => {
                            let had = known.insert(name.clone(), number);
                            prop_assert!(had.is_none_or(|had| had == number));
                            let same = known.values().filter(|other| **other == number).count();
                            prop_assert_eq!(same, 1);
                            prop_assert!(number < 8);
                        }
                        None => prop_assert_eq!(known.len(), 8),
                    }
                } else {
                    known.remove(&name);
                    ledger.keep_only("s", |kept| kept != name);
                }
            }
        }
    }

    #[test]
    fn ranges_of_user_ids_do_not_meet_or_overflow() {
        assert!(vnet_uid_base(0) >= UID_BASE + UIDS_PER_VNET);
        assert!(vnet_uid_base(1) - vnet_uid_base(0) > UIDS_PER_VNET);
        let last = u64::from(UID_BASE) + u64::from(VNETS_MAX + 1) * u64::from(UID_STRIDE);
        assert!(last < u64::from(u32::MAX) - u64::from(UIDS_PER_VNET));
    }
}
