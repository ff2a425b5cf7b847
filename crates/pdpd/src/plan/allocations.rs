//! Allocated numbers and placements: the part of the state that is not
//! in the specs and must not change while objects that depend on it run.
//!
//! Pure: a change is planned on a copy, and the differences are stored together with the specs.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use pdp_alloc::EngineShare;
use pdp_net::ports::PORTS_MAX;
use pdp_spec::shared::{KERNEL_PORTS, USER_IDS};
use pdp_spec::{PowerShares, tenant_of};

use crate::util::shared::{self, SharedMap};

/// First user id of the mux and the vnets. It is far above those of people and
/// services, and below those that systemd-nspawn and container managers take.
pub const UID_BASE: u32 = 0x2000_0000;

/// User ids onto which the user namespaces of a vnet's guests map 0..65536.
pub const UIDS_PER_VNET: u32 = 1 << 16;

/// Distance between the first user ids of two vnets. Unmapped ids are
/// for helpers; nothing in a guest can become them.
const UID_STRIDE: u32 = 2 * UIDS_PER_VNET;

/// Number of vnet numbers: one for each range of user ids from
/// [`UID_BASE`] on, except the first, which is the mux's.
pub const NUMBERS_MAX: u32 = USER_IDS.total.unwrap() as u32;

/// Numbers that one tenant owns at most.
pub const TENANT_NUMBERS_MAX: usize = USER_IDS.tenant as usize;

/// Numbers that are reserved for operators.
pub const OPERATORS_NUMBERS: usize = USER_IDS.operators as usize;

/// Owner of the numbers of operators' vnets. No tenant's name begins so.
pub const OPERATORS: &str = "_operators";

/// Owner of the numbers of deleted tenants.
pub const GONE: &str = "_gone";

/// Returns the owner of a vnet's number: its tenant, or [`OPERATORS`].
pub fn owner_of(vnet: &str) -> &str {
    tenant_of(vnet).unwrap_or(OPERATORS)
}

/// Share of a forwarding engine, for a forwarding guest or for the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EnginePlacement {
    /// The forwarding engine.
    pub engine: String,
    /// CPU power, thousandths of a core.
    pub power_millicores: u32,
}

/// Allocations of one vnet.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VnetAllocation {
    /// Number of the vnet, unique.
    pub number: u32,
    /// Shares of forwarding guests by vrouter and number. If the kernel forwards, only its share.
    pub guests: BTreeMap<String, BTreeMap<u32, EnginePlacement>>,
    /// Numbers of ports whose frames stay in the kernel, by vrouter and interface; unique.
    pub ports: BTreeMap<String, BTreeMap<String, u32>>,
    /// Vlinks that a user set down.
    pub links_down: BTreeSet<String>,
    /// Vlinks among these whose ends keep their carrier.
    pub links_silent: BTreeSet<String>,
    /// Start times of the vlinks' schedules.
    pub schedules: BTreeMap<String, ScheduleStart>,
}

/// Start time of a schedule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScheduleStart {
    /// Hash of the schedule; another schedule starts anew.
    pub hash: String,
    /// Boot id of the machine whose clock counts.
    pub boot: String,
    /// CLOCK_BOOTTIME, nanoseconds.
    pub at_ns: u64,
}

/// Current time, comparable with [`ScheduleStart`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BootInstant {
    /// Boot id of the machine.
    pub boot: String,
    /// CLOCK_BOOTTIME, nanoseconds.
    pub at_ns: u64,
}

impl BootInstant {
    /// Reads the machine's clock.
    pub fn now() -> Self {
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        Self { boot: boot.trim().into(), at_ns: now_ns() }
    }
}

/// Returns the clock of schedules, CLOCK_BOOTTIME, nanoseconds.
pub fn now_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

impl VnetAllocation {
    /// Returns the shares of its vrouters.
    pub fn shares(&self) -> PowerShares {
        let share = |placement: &EnginePlacement| EngineShare {
            engine: placement.engine.clone(),
            millicores: placement.power_millicores,
        };
        let guests = self.guests.iter();
        guests.map(|(node, guests)| (node.clone(), guests.values().map(share).collect())).collect()
    }
}

/// All allocations.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Allocations {
    /// By vnet. A vnet that is being removed has its number alone.
    pub vnets: SharedMap<VnetAllocation>,
    /// Owner of every number that a vnet ever had. Files that outlive a vnet keep its
    /// user ids, so its number stays with the owner as long as that tenant exists.
    pub owners: Arc<BTreeMap<u32, String>>,
    /// True if the user stopped everything; this survives restarts.
    pub stopped: bool,
}

impl Allocations {
    /// Returns the allocations of a vnet. A new vnet gets a free
    /// number; `None` if no number is free.
    pub fn of(&self, vnet: &str, free: &mut FreeNumbers) -> Option<VnetAllocation> {
        match self.vnets.get(vnet) {
            Some(allocation) => Some(VnetAllocation::clone(allocation)),
            None => Some(VnetAllocation {
                number: free.next(self, owner_of(vnet))?,
                ..VnetAllocation::default()
            }),
        }
    }

    /// Returns the number of a vnet, if it has one.
    pub fn number_of(&self, vnet: &str) -> Option<u32> {
        Some(self.vnets.get(vnet)?.number)
    }

    /// Sets the allocations of a vnet. `None` removes them, including
    /// its number. From then on the number belongs to the vnet's owner.
    pub fn set(&mut self, vnet: &str, allocation: Option<VnetAllocation>) {
        if let Some(VnetAllocation { number, .. }) = &allocation
            && self.owners.get(number).map(String::as_str) != Some(owner_of(vnet))
        {
            Arc::make_mut(&mut self.owners).insert(*number, owner_of(vnet).to_owned());
        }
        shared::set(&mut self.vnets, vnet, allocation);
    }

    /// Removes the owner of a deleted tenant's numbers. A later tenant
    /// of that name is a different one.
    pub fn forget_tenant(&mut self, tenant: &str) {
        for owner in Arc::make_mut(&mut self.owners).values_mut().filter(|it| *it == tenant) {
            GONE.clone_into(owner);
        }
    }

    /// Frees everything that a vnet has except its number, which its remains still use.
    pub fn forget_vnet(&mut self, vnet: &str) {
        let number = self.number_of(vnet);
        self.set(vnet, number.map(|number| VnetAllocation { number, ..VnetAllocation::default() }));
    }

    /// Restarts schedules that began before the machine was booted, since its
    /// clock began anew. Returns the new allocations of the vnets that changed.
    pub fn begin_schedules(
        &mut self,
        now: &BootInstant,
    ) -> BTreeMap<String, Option<Arc<VnetAllocation>>> {
        let is_old = |began: &ScheduleStart| began.boot != now.boot;
        let old = self.vnets.iter().filter(|(_, it)| it.schedules.values().any(is_old));
        let mut started = BTreeMap::new();
        for (vnet, allocation) in old {
            let mut allocation = VnetAllocation::clone(allocation);
            for began in allocation.schedules.values_mut().filter(|it| is_old(it)) {
                (began.boot, began.at_ns) = (now.boot.clone(), now.at_ns);
            }
            started.insert(vnet.clone(), Some(Arc::new(allocation)));
        }
        for (vnet, allocation) in &started {
            self.set(vnet, allocation.as_deref().cloned());
        }
        started
    }

    /// Sets a vlink up or down. If down and `silent`, its ends keep their carrier.
    pub fn set_link(&mut self, vnet: &str, link: &str, up: bool, silent: bool) {
        let Some(allocation) = self.vnets.get(vnet) else { return };
        let mut allocation = VnetAllocation::clone(allocation);
        let put = |links: &mut BTreeSet<String>, is_in| match is_in {
            true => drop(links.insert(link.to_owned())),
            false => drop(links.remove(link)),
        };
        put(&mut allocation.links_down, !up);
        put(&mut allocation.links_silent, !up && silent);
        self.set(vnet, Some(allocation));
    }
}

/// Free port numbers. Numbers that a change frees are available to the next change.
#[derive(Debug)]
pub struct FreePorts {
    taken: BTreeSet<u32>,
    next: u32,
    /// Number of tenants' ports.
    tenants: u64,
}

impl FreePorts {
    /// Returns the numbers that no port of this ledger uses.
    pub fn of(allocations: &Allocations) -> Self {
        let mut free = Self { taken: BTreeSet::new(), next: 0, tenants: 0 };
        for (name, vnet) in &*allocations.vnets {
            let before = free.taken.len();
            free.taken.extend(vnet.ports.values().flat_map(BTreeMap::values));
            if tenant_of(name).is_some() {
                free.tenants += (free.taken.len() - before) as u64;
            }
        }
        free
    }

    /// Takes the lowest free number for a vnet. `None` if none is free,
    /// or if tenants have as many as they may.
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

/// Numbers of the vnets, collected once for all that need a new one.
#[derive(Debug, Default)]
pub struct FreeNumbers(Option<BTreeSet<u32>>);

impl FreeNumbers {
    fn next(&mut self, allocations: &Allocations, owner: &str) -> Option<u32> {
        let numbers = || allocations.vnets.values().map(|vnet| vnet.number).collect();
        let taken = self.0.get_or_insert_with(numbers);
        let number = choose(&allocations.owners, taken, owner)?;
        taken.insert(number);
        Some(number)
    }
}

/// Returns the number for an owner: its own lowest free one, else the lowest unused
/// one, else one of a deleted tenant. Never returns a number of another owner.
fn choose(owners: &BTreeMap<u32, String>, taken: &BTreeSet<u32>, owner: &str) -> Option<u32> {
    let of = |owner: &str| {
        let mut numbers =
            owners.iter().filter(|(number, of)| *of == owner && !taken.contains(number));
        numbers.next().map(|(number, _)| *number)
    };
    if let Some(own) = of(owner) {
        return Some(own);
    }
    let count = |owner: &str| owners.values().filter(|of| *of == owner).count();
    let left = NUMBERS_MAX as usize - owners.len() + count(GONE);
    if owner != OPERATORS && (left <= OPERATORS_NUMBERS || count(owner) >= TENANT_NUMBERS_MAX) {
        return None;
    }
    let mut fresh = (0..NUMBERS_MAX).filter(|number| !owners.contains_key(number));
    fresh.next().or_else(|| of(GONE))
}

/// Returns the first user id of the vnet with this number.
pub fn vnet_uid_base(vnet: u32) -> u32 {
    UID_BASE + (vnet + 1) * UID_STRIDE
}

/// Owner of the operators' images. No tenant's name begins so.
pub const NODE: &str = "_node";

/// Returns the owner of a vnet's images.
pub fn image_owner_of(vnet: &str) -> &str {
    tenant_of(vnet).unwrap_or(NODE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::intent::state::{StateChange, StateFile};
    use proptest::prelude::*;

    #[test]
    fn schedules_restart_only_after_a_reboot() {
        let moment = |boot: &str, at_ns| BootInstant { boot: boot.into(), at_ns };
        let began =
            |boot: &str, at_ns| ScheduleStart { hash: "1".into(), boot: boot.into(), at_ns };
        let allocation = |began| VnetAllocation {
            schedules: [("l".into(), began)].into(),
            ..VnetAllocation::default()
        };
        let mut allocations = Allocations::default();
        allocations.set("red", Some(allocation(began("a", 5))));
        allocations.set("blue", Some(VnetAllocation { number: 1, ..VnetAllocation::default() }));
        assert!(allocations.begin_schedules(&moment("a", 9)).is_empty());
        let started = allocations.begin_schedules(&moment("b", 2));
        let anew = allocation(began("b", 2));
        assert_eq!(started.keys().collect::<Vec<_>>(), ["red"]);
        assert_eq!((started["red"].as_deref(), &*allocations.vnets["red"]), (Some(&anew), &anew));
    }

    proptest! {
        #[test]
        fn vnet_numbers_are_stable_and_unique(
            steps in proptest::collection::vec((any::<bool>(), 0u8..12), 0..60),
        ) {
            let mut allocations = Allocations::default();
            let mut known: BTreeMap<String, u32> = BTreeMap::new();
            for (add, name) in steps {
                let name = name.to_string();
                if add {
                    let allocation = allocations.of(&name, &mut FreeNumbers::default()).unwrap();
                    let had = known.insert(name.clone(), allocation.number);
                    prop_assert!(had.is_none_or(|had| had == allocation.number));
                    let same = known.values().filter(|other| **other == allocation.number).count();
                    prop_assert_eq!(same, 1);
                    prop_assert!(allocation.number < 12, "the lowest");
                    allocations.set(&name, Some(allocation));
                } else {
                    known.remove(&name);
                    allocations.set(&name, None);
                }
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        /// For all sequences of changes, deletions and restarts: a number
        /// that a tenant had never goes to another owner while that tenant
        /// exists. Afterwards it is reused only when all others were used.
        #[test]
        fn tenant_numbers_are_not_reused_by_other_owners(
            steps in proptest::collection::vec((0u8..8, 0usize..4, 0u8..4), 0..80),
        ) {
            const OWNERS: [&str; 4] = ["a.", "b.", "c.", ""];
            let directory = tempfile::tempdir().unwrap();
            let mut state = StateFile::open(directory.path()).unwrap();
            let mut allocations = Allocations::default();
            // By generation: a tenant that is deleted and created again is a different one.
            let mut generations = [0; 4];
            let mut had: BTreeMap<u32, (usize, u32)> = BTreeMap::new();
            for (what, who, name) in steps {
                let vnet = format!("{}{name}", OWNERS[who]);
                let (before, mut change) = (allocations.clone(), StateChange::default());
                match what {
                    0..4 => {
                        let allocation =
                            allocations.of(&vnet, &mut FreeNumbers::default()).unwrap();
                        let now = (who, generations[who]);
                        let before = had.insert(allocation.number, now);
                        prop_assert!(before.is_none_or(|it| it == now), "{vnet}: {before:?}");
                        allocations.set(&vnet, Some(allocation));
                    }
                    4..6 => allocations.set(&vnet, None),
                    6 if who < 3 => {
                        (0..4).for_each(|name| {
                            allocations.set(&format!("{}{name}", OWNERS[who]), None);
                        });
                        let tenant = OWNERS[who].trim_end_matches('.');
                        allocations.forget_tenant(tenant);
                        change.delete.push(("Tenant".into(), tenant.into()));
                        generations[who] += 1;
                    }
                    _ => {
                        drop(state);
                        state = StateFile::open(directory.path()).unwrap();
                        allocations = state.allocations().unwrap();
                    }
                }
                for vnet in shared::differing(&before.vnets, &allocations.vnets) {
                    let allocation = allocations.vnets.get(vnet).cloned();
                    change.allocations.insert(vnet.to_owned(), allocation);
                }
                state.commit(&change).unwrap();
                prop_assert_eq!(&state.allocations().unwrap(), &allocations);
            }
        }
    }

    #[test]
    fn numbers_are_limited_and_partly_reserved_for_operators() {
        let owned = |owner: &str, numbers: std::ops::Range<u32>| {
            numbers.map(|number| (number, owner.to_owned())).collect::<BTreeMap<_, _>>()
        };
        let nothing = BTreeSet::new();
        // Numbers of other owners are never given out, even if free.
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
        // Numbers of deleted tenants come after all unused ones.
        let owners = owned(GONE, 0..NUMBERS_MAX - 1);
        assert_eq!(choose(&owners, &nothing, "b"), Some(NUMBERS_MAX - 1));
        let owners = owned(GONE, 0..NUMBERS_MAX);
        assert_eq!(choose(&owners, &nothing, "b"), Some(0));
        // No tenant owns more than its limit.
        let owners = owned("a", 0..TENANT_NUMBERS_MAX as u32);
        let taken: BTreeSet<u32> = owners.keys().copied().collect();
        assert_eq!(choose(&owners, &taken, "a"), None);
        assert_eq!(choose(&owners, &taken, "b"), Some(TENANT_NUMBERS_MAX as u32));
    }

    #[test]
    fn tenants_cannot_exhaust_kernel_ports() {
        let mut free = FreePorts::of(&Allocations::default());
        let tenants = std::iter::from_fn(|| free.take("a.b")).count() as u64;
        assert_eq!(tenants, KERNEL_PORTS.tenants());
        let ports = [("r".to_owned(), (0..10).map(|n| (n.to_string(), n)).collect())].into();
        let mut allocations = Allocations::default();
        allocations.set("a.b", Some(VnetAllocation { ports, ..VnetAllocation::default() }));
        let mut again = FreePorts::of(&allocations);
        let more = std::iter::from_fn(|| again.take("b.b")).count() as u64;
        assert_eq!(more, KERNEL_PORTS.tenants() - 10, "those that there are count");
        let operators = std::iter::from_fn(|| free.take("red")).count() as u64;
        assert_eq!(operators, KERNEL_PORTS.operators);
        assert_eq!(Some(u64::from(PORTS_MAX)), KERNEL_PORTS.total);
    }

    #[test]
    fn uid_ranges_neither_overlap_nor_overflow() {
        assert!(vnet_uid_base(0) >= UID_BASE + UIDS_PER_VNET);
        assert!(vnet_uid_base(1) - vnet_uid_base(0) > UIDS_PER_VNET);
        let last = u64::from(UID_BASE) + u64::from(NUMBERS_MAX + 1) * u64::from(UID_STRIDE);
        assert!(last < u64::from(u32::MAX) - u64::from(UIDS_PER_VNET));
    }
}
