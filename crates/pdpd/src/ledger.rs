//! Numbers and placements that were given out: the part of the state that is not in the specs
//! and must stay the same while what depends on it runs.
//!
//! Pure: a change is planned on a copy, and what differs is stored with the specs it belongs to.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use pdp_alloc::Share;
use pdp_net::ports::PORTS_MAX;
use pdp_spec::Shares;

use crate::shared::{self, Shared};

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

/// A share of a forwarding engine: a forwarding guest's, or the kernel's where it forwards.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// The forwarding engine.
    pub engine: String,
    /// Thousandths of a core.
    pub power_millicores: u32,
}

/// What was given out for a vnet.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Holding {
    /// Its number, no other vnet's.
    pub number: u32,
    /// Forwarding guests by vrouter and number; where the kernel forwards, its share alone.
    pub guests: BTreeMap<String, BTreeMap<u32, Placement>>,
    /// Numbers of ports whose frames stay in the kernel, by vrouter and interface; no other port's.
    pub ports: BTreeMap<String, BTreeMap<String, u32>>,
    /// Vlinks that a user took down.
    pub links_down: BTreeSet<String>,
    /// Of these, those whose ends keep their carrier.
    pub links_silent: BTreeSet<String>,
    /// When schedules of vlinks began.
    pub schedules: BTreeMap<String, Began>,
}

/// When a schedule began.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Began {
    /// What it is: another one begins anew.
    pub hash: String,
    /// The boot of the machine whose clock counts.
    pub boot: String,
    /// By CLOCK_BOOTTIME, nanoseconds.
    pub at_ns: u64,
}

/// Now, as [`Began`] has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Moment {
    /// The boot of the machine.
    pub boot: String,
    /// CLOCK_BOOTTIME, nanoseconds.
    pub at_ns: u64,
}

impl Moment {
    /// By the machine's clock.
    pub fn now() -> Self {
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        Self { boot: boot.trim().into(), at_ns: now_ns() }
    }
}

/// The clock of schedules, nanoseconds: CLOCK_BOOTTIME.
pub fn now_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

impl Holding {
    /// Shares of its vrouters.
    pub fn shares(&self) -> Shares {
        let share = |placement: &Placement| Share {
            engine: placement.engine.clone(),
            millicores: placement.power_millicores,
        };
        let guests = self.guests.iter();
        guests.map(|(node, guests)| (node.clone(), guests.values().map(share).collect())).collect()
    }
}

/// What was given out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ledger {
    /// By vnet. One that is going has its number alone.
    pub vnets: Shared<Holding>,
    /// Everything was stopped by its user, and stays so over restarts.
    pub stopped: bool,
}

impl Ledger {
    /// What a vnet holds; where it is new, a number that is free; `None` if none is.
    pub fn of(&self, vnet: &str, free: &mut FreeNumbers) -> Option<Holding> {
        match self.vnets.get(vnet) {
            Some(holding) => Some(Holding::clone(holding)),
            None => Some(Holding { number: free.next(self)?, ..Holding::default() }),
        }
    }

    /// The number of a vnet, if it has one.
    pub fn number_of(&self, vnet: &str) -> Option<u32> {
        Some(self.vnets.get(vnet)?.number)
    }

    /// Has a vnet hold this, or nothing, not even its number.
    pub fn set(&mut self, vnet: &str, holding: Option<Holding>) {
        shared::set(&mut self.vnets, vnet, holding);
    }

    /// Takes back all that a vnet has but its number, which what is left of it still bears.
    pub fn forget_vnet(&mut self, vnet: &str) {
        let number = self.number_of(vnet);
        self.set(vnet, number.map(|number| Holding { number, ..Holding::default() }));
    }

    /// Has schedules begin anew that began before the machine was booted, whose clock is another. Returns what vnets
    /// hold that held something else before.
    pub fn begin_schedules(&mut self, now: &Moment) -> BTreeMap<String, Option<Arc<Holding>>> {
        let is_old = |began: &Began| began.boot != now.boot;
        let old = self.vnets.iter().filter(|(_, it)| it.schedules.values().any(is_old));
        let mut held = BTreeMap::new();
        for (vnet, holding) in old {
            let mut holding = Holding::clone(holding);
            for began in holding.schedules.values_mut().filter(|it| is_old(it)) {
                (began.boot, began.at_ns) = (now.boot.clone(), now.at_ns);
            }
            held.insert(vnet.clone(), Some(Arc::new(holding)));
        }
        for (vnet, holding) in &held {
            self.set(vnet, holding.as_deref().cloned());
        }
        held
    }

    /// Takes a vlink down, with the carrier of its ends or `silent`ly without, or up.
    pub fn set_link(&mut self, vnet: &str, link: &str, up: bool, silent: bool) {
        let Some(holding) = self.vnets.get(vnet) else { return };
        let mut holding = Holding::clone(holding);
        let put = |links: &mut BTreeSet<String>, is_in| match is_in {
            true => drop(links.insert(link.to_owned())),
            false => drop(links.remove(link)),
        };
        put(&mut holding.links_down, !up);
        put(&mut holding.links_silent, !up && silent);
        self.set(vnet, Some(holding));
    }
}

/// Numbers that no port has. What is given back by a change is free for the next one.
#[derive(Debug)]
pub struct FreePorts {
    taken: BTreeSet<u32>,
    next: u32,
}

impl FreePorts {
    /// With those that ports of this ledger have.
    pub fn of(ledger: &Ledger) -> Self {
        let ports = ledger.vnets.values().flat_map(|vnet| vnet.ports.values());
        Self { taken: ports.flat_map(BTreeMap::values).copied().collect(), next: 0 }
    }

    /// The lowest one, which is taken then; `None`: there is none.
    pub fn take(&mut self) -> Option<u32> {
        let number = (self.next..PORTS_MAX).find(|number| !self.taken.contains(number))?;
        self.taken.insert(number);
        self.next = number + 1;
        Some(number)
    }
}

/// Numbers that no vnet has, found once for all that want one.
#[derive(Debug, Default)]
pub struct FreeNumbers(Option<VecDeque<u32>>);

impl FreeNumbers {
    fn next(&mut self, ledger: &Ledger) -> Option<u32> {
        let free = self.0.get_or_insert_with(|| {
            let taken: BTreeSet<u32> = ledger.vnets.values().map(|vnet| vnet.number).collect();
            (0..VNETS_MAX).filter(|number| !taken.contains(number)).collect()
        });
        free.pop_front()
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

    #[test]
    fn schedules_go_on_until_the_machine_is_booted() {
        let moment = |boot: &str, at_ns| Moment { boot: boot.into(), at_ns };
        let began = |boot: &str, at_ns| Began { hash: "1".into(), boot: boot.into(), at_ns };
        let holding =
            |began| Holding { schedules: [("l".into(), began)].into(), ..Holding::default() };
        let mut ledger = Ledger::default();
        ledger.set("red", Some(holding(began("a", 5))));
        ledger.set("blue", Some(Holding { number: 1, ..Holding::default() }));
        assert!(ledger.begin_schedules(&moment("a", 9)).is_empty());
        let held = ledger.begin_schedules(&moment("b", 2));
        let anew = holding(began("b", 2));
        assert_eq!(held.keys().collect::<Vec<_>>(), ["red"]);
        assert_eq!((held["red"].as_deref(), &*ledger.vnets["red"]), (Some(&anew), &anew));
    }

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
                    let holding = ledger.of(&name, &mut FreeNumbers::default()).unwrap();
                    let had = known.insert(name.clone(), holding.number);
                    prop_assert!(had.is_none_or(|had| had == holding.number));
                    let same = known.values().filter(|other| **other == holding.number).count();
                    prop_assert_eq!(same, 1);
                    prop_assert!(holding.number < 12, "the lowest");
                    ledger.set(&name, Some(holding));
                } else {
                    known.remove(&name);
                    ledger.set(&name, None);
                }
            }
        }
    }

    #[test]
    fn numbers_have_an_end() {
        let (mut ledger, mut free) = (Ledger::default(), FreeNumbers::default());
        for vnet in 0..VNETS_MAX {
            let holding = ledger.of(&vnet.to_string(), &mut free).unwrap();
            assert_eq!(holding.number, vnet);
            ledger.set(&vnet.to_string(), Some(holding));
        }
        assert_eq!(ledger.of("more", &mut free), None);
        assert_eq!(ledger.of("more", &mut FreeNumbers::default()), None);
        assert!(ledger.of("7", &mut free).is_some());
    }

    #[test]
    fn ranges_of_user_ids_do_not_meet_or_overflow() {
        assert!(vnet_uid_base(0) >= UID_BASE + UIDS_PER_VNET);
        assert!(vnet_uid_base(1) - vnet_uid_base(0) > UIDS_PER_VNET);
        let last = u64::from(UID_BASE) + u64::from(VNETS_MAX + 1) * u64::from(UID_STRIDE);
        assert!(last < u64::from(u32::MAX) - u64::from(UIDS_PER_VNET));
    }
}
