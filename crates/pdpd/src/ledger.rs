//! Numbers and placements that were given out: the part of the state that is not in the specs
//! and must stay the same while what depends on it runs.
//!
//! Pure: a change is planned on a copy, and what differs is stored with the specs it belongs to.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use pdp_alloc::Share;
use pdp_net::ports::PORTS_MAX;
use pdp_spec::shared::{KERNEL_PORTS, USER_IDS};
use pdp_spec::{Shares, tenant_of};

use crate::shared::{self, Shared};

/// User ids of the mux and of the vnets begin here: far above those of people and services, below
/// those that systemd-nspawn and container managers take.
pub const UID_BASE: u32 = 0x2000_0000;

/// User ids that the user namespaces of a vnet's guests map 0..65536 onto.
pub const UIDS_PER_VNET: u32 = 1 << 16;

/// From one vnet's user ids to the next's: what is not mapped is for helpers, which nothing in a
/// guest can become.
const UID_STRIDE: u32 = 2 * UIDS_PER_VNET;

/// Numbers of vnets: as many as there are ranges of user ids from [`UID_BASE`] on, of which the first is the mux's.
pub const NUMBERS_MAX: u32 = USER_IDS.total.unwrap() as u32;

/// Numbers that one tenant owns at most.
pub const TENANT_NUMBERS_MAX: usize = USER_IDS.tenant as usize;

/// Numbers that tenants leave to operators.
pub const OPERATORS_NUMBERS: usize = USER_IDS.operators as usize;

/// Owner of numbers that belong to the operators' vnets. No tenant's name begins so.
pub const OPERATORS: &str = "_operators";

/// Owner of numbers whose tenant was deleted.
pub const GONE: &str = "_gone";

/// Owner of a vnet's number: its tenant, or [`OPERATORS`].
pub fn owner_of(vnet: &str) -> &str {
    tenant_of(vnet).unwrap_or(OPERATORS)
}

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
    /// Owner of every number that a vnet ever had. Files that outlast a vnet keep its user ids, so a number stays its
    /// owner's as long as that tenant exists.
    pub owners: Arc<BTreeMap<u32, String>>,
    /// Everything was stopped by its user, and stays so over restarts.
    pub stopped: bool,
}

impl Ledger {
    /// What a vnet holds; where it is new, a number that is free; `None` if none is.
    pub fn of(&self, vnet: &str, free: &mut FreeNumbers) -> Option<Holding> {
        match self.vnets.get(vnet) {
            Some(holding) => Some(Holding::clone(holding)),
            None => {
                Some(Holding { number: free.next(self, owner_of(vnet))?, ..Holding::default() })
            }
        }
    }

    /// The number of a vnet, if it has one.
    pub fn number_of(&self, vnet: &str) -> Option<u32> {
        Some(self.vnets.get(vnet)?.number)
    }

    /// Has a vnet hold this, or nothing, not even its number. The number is its owner's from then on.
    pub fn set(&mut self, vnet: &str, holding: Option<Holding>) {
        if let Some(Holding { number, .. }) = &holding
            && self.owners.get(number).map(String::as_str) != Some(owner_of(vnet))
        {
            Arc::make_mut(&mut self.owners).insert(*number, owner_of(vnet).to_owned());
        }
        shared::set(&mut self.vnets, vnet, holding);
    }

    /// Leaves the numbers of a tenant that was deleted without an owner: a later tenant of that name is another one.
    pub fn forget_tenant(&mut self, tenant: &str) {
        for owner in Arc::make_mut(&mut self.owners).values_mut().filter(|it| *it == tenant) {
            GONE.clone_into(owner);
        }
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
    /// How many are tenants'.
    tenants: u64,
}

impl FreePorts {
    /// With those that ports of this ledger have.
    pub fn of(ledger: &Ledger) -> Self {
        let mut free = Self { taken: BTreeSet::new(), next: 0, tenants: 0 };
        for (name, vnet) in &*ledger.vnets {
            let before = free.taken.len();
            free.taken.extend(vnet.ports.values().flat_map(BTreeMap::values));
            if tenant_of(name).is_some() {
                free.tenants += (free.taken.len() - before) as u64;
            }
        }
        free
    }

    /// The lowest one, which is this vnet's then; `None`: there is none, or tenants have all that they may.
    pub fn take(&mut self, vnet: &str) -> Option<u32> {
        let is_tenants = tenant_of(vnet).is_some();
        if is_tenants && self.tenants >= KERNEL_PORTS.tenants() {
            return None;
        }
        self.tenants += u64::from(is_tenants);
        let number = (self.next..PORTS_MAX).find(|number| !self.taken.contains(number))?;
        self.taken.insert(number);
        self.next = number + 1;
        Some(number)
    }
}

/// Numbers that vnets have, found once for all that want one.
#[derive(Debug, Default)]
pub struct FreeNumbers(Option<BTreeSet<u32>>);

impl FreeNumbers {
    fn next(&mut self, ledger: &Ledger, owner: &str) -> Option<u32> {
        let numbers = || ledger.vnets.values().map(|vnet| vnet.number).collect();
        let taken = self.0.get_or_insert_with(numbers);
        let number = choose(&ledger.owners, taken, owner)?;
        taken.insert(number);
        Some(number)
    }
}

/// The number that an owner gets: the lowest of its own that is not taken, else the lowest that nobody ever had, and
/// only when there is none left one whose tenant was deleted. Never one of another owner.
fn choose(owners: &BTreeMap<u32, String>, taken: &BTreeSet<u32>, owner: &str) -> Option<u32> {
    let of = |whose: &str| {
        let mut numbers =
            owners.iter().filter(|(number, of)| *of == whose && !taken.contains(number));
        numbers.next().map(|(number, _)| *number)
    };
    if let Some(own) = of(owner) {
        return Some(own);
    }
    let count = |whose: &str| owners.values().filter(|of| *of == whose).count();
    let left = NUMBERS_MAX as usize - owners.len() + count(GONE);
    if owner != OPERATORS && (left <= OPERATORS_NUMBERS || count(owner) >= TENANT_NUMBERS_MAX) {
        return None;
    }
    let mut fresh = (0..NUMBERS_MAX).filter(|number| !owners.contains_key(number));
    fresh.next().or_else(|| of(GONE))
}

/// First user id of the vnet of this number.
pub fn vnet_uid_base(vnet: u32) -> u32 {
    UID_BASE + (vnet + 1) * UID_STRIDE
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::{Change, State};
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

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        /// Whatever tenants do, whoever is deleted and however often pdpd is started anew: a number that a tenant had
        /// is no other owner's while that tenant exists, and afterwards nobody's before all others were used.
        #[test]
        fn a_number_once_a_tenants_is_never_anothers(
            steps in proptest::collection::vec((0u8..8, 0usize..4, 0u8..4), 0..80),
        ) {
            const OWNERS: [&str; 4] = ["a.", "b.", "c.", ""];
            let directory = tempfile::tempdir().unwrap();
            let mut state = State::open(directory.path()).unwrap();
            let mut ledger = Ledger::default();
            // By generation: a tenant that is deleted and made again is another.
            let mut generations = [0; 4];
            let mut had: BTreeMap<u32, (usize, u32)> = BTreeMap::new();
            for (what, who, name) in steps {
                let vnet = format!("{}{name}", OWNERS[who]);
                let (before, mut change) = (ledger.clone(), Change::default());
                match what {
                    0..4 => {
                        let holding = ledger.of(&vnet, &mut FreeNumbers::default()).unwrap();
                        let now = (who, generations[who]);
                        let before = had.insert(holding.number, now);
                        prop_assert!(before.is_none_or(|it| it == now), "{vnet}: {before:?}");
                        ledger.set(&vnet, Some(holding));
                    }
                    4..6 => ledger.set(&vnet, None),
                    6 if who < 3 => {
                        (0..4).for_each(|name| ledger.set(&format!("{}{name}", OWNERS[who]), None));
                        let tenant = OWNERS[who].trim_end_matches('.');
                        ledger.forget_tenant(tenant);
                        change.delete.push(("Tenant".into(), tenant.into()));
                        generations[who] += 1;
                    }
                    _ => {
                        drop(state);
                        state = State::open(directory.path()).unwrap();
                        ledger = state.ledger().unwrap();
                    }
                }
                for vnet in shared::differing(&before.vnets, &ledger.vnets) {
                    change.held.insert(vnet.to_owned(), ledger.vnets.get(vnet).cloned());
                }
                state.commit(&change).unwrap();
                prop_assert_eq!(&state.ledger().unwrap(), &ledger);
            }
        }
    }

    #[test]
    fn numbers_have_an_end_and_a_part_that_is_the_operators() {
        let owned = |owner: &str, numbers: std::ops::Range<u32>| {
            numbers.map(|number| (number, owner.to_owned())).collect::<BTreeMap<_, _>>()
        };
        let nothing = BTreeSet::new();
        // Others' are no one's, however free.
        let mut owners = owned("a", 0..NUMBERS_MAX - OPERATORS_NUMBERS as u32);
        assert_eq!(choose(&owners, &nothing, "b"), None);
        let first = NUMBERS_MAX - OPERATORS_NUMBERS as u32;
        assert_eq!(choose(&owners, &nothing, OPERATORS), Some(first));
        assert_eq!(choose(&owners, &nothing, "a"), Some(0), "its own");
        owners.extend(owned(OPERATORS, first..NUMBERS_MAX));
        assert_eq!(
            choose(&owners, &owned(OPERATORS, first..NUMBERS_MAX).into_keys().collect(), OPERATORS),
            None
        );
        // One whose tenant is gone comes after all that nobody had.
        let owners = owned(GONE, 0..NUMBERS_MAX - 1);
        assert_eq!(choose(&owners, &nothing, "b"), Some(NUMBERS_MAX - 1));
        let owners = owned(GONE, 0..NUMBERS_MAX);
        assert_eq!(choose(&owners, &nothing, "b"), Some(0));
        // And no tenant owns more than its part.
        let owners = owned("a", 0..TENANT_NUMBERS_MAX as u32);
        let taken: BTreeSet<u32> = owners.keys().copied().collect();
        assert_eq!(choose(&owners, &taken, "a"), None);
        assert_eq!(choose(&owners, &taken, "b"), Some(TENANT_NUMBERS_MAX as u32));
    }

    #[test]
    fn tenants_leave_kernel_ports_to_operators() {
        let mut free = FreePorts::of(&Ledger::default());
        let tenants = std::iter::from_fn(|| free.take("a.b")).count() as u64;
        assert_eq!(tenants, KERNEL_PORTS.tenants());
        let ports = [("r".to_owned(), (0..10).map(|n| (n.to_string(), n)).collect())].into();
        let mut ledger = Ledger::default();
        ledger.set("a.b", Some(Holding { ports, ..Holding::default() }));
        let mut again = FreePorts::of(&ledger);
        let more = std::iter::from_fn(|| again.take("b.b")).count() as u64;
        assert_eq!(more, KERNEL_PORTS.tenants() - 10, "those that there are count");
        let operators = std::iter::from_fn(|| free.take("red")).count() as u64;
        assert_eq!(operators, KERNEL_PORTS.operators);
        assert_eq!(Some(u64::from(PORTS_MAX)), KERNEL_PORTS.total);
    }

    #[test]
    fn ranges_of_user_ids_do_not_meet_or_overflow() {
        assert!(vnet_uid_base(0) >= UID_BASE + UIDS_PER_VNET);
        assert!(vnet_uid_base(1) - vnet_uid_base(0) > UIDS_PER_VNET);
        let last = u64::from(UID_BASE) + u64::from(NUMBERS_MAX + 1) * u64::from(UID_STRIDE);
        assert!(last < u64::from(u32::MAX) - u64::from(UIDS_PER_VNET));
    }
}
