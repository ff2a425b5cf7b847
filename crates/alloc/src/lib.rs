//! Allocation of processing power to vrouters: which
//! forwarding engines (FEs), and how much of each.
//!
//! The rule is Algorithm 1 of the PdP paper (VISA'09). A vrouter that requests R =
//! k·C + r gets k whole idle FEs, and the remainder r on the best-fitting FE, so
//! that it has as few guests as possible. Rules for what the paper leaves open:
//!
//! - **R fits one FE** (R ≤ C, including an exact fit and r = 0): one guest
//!   on the fullest FE with enough free capacity. No guest is made for r = 0.
//! - **FEs of different capacity**: while no FE fits the remainder, the largest
//!   idle FE is taken whole. With equal capacities this is the paper's k·C + r.
//! - **No FE fits r**, or **too few FEs are idle**: refused. If the request allows splitting, the
//!   remainder is divided among as few FEs as possible, those with the most free capacity first.
//! - **All or nothing**: a refusal allocates nothing and changes nothing.
//! - **A failed FE** ([`EngineCapacity::usable`] is false) gets nothing new. A repeated
//!   request of a vrouter with a share there moves that share and keeps the others.
//! - **A share below [`SHARE_MILLICORES_MIN`]** can't be
//!   enforced by a CPU quota, so it is rounded up to it.
//! - **No guarantee** ([`lend`]): the guests use spare power. Their shares are
//!   zero, so an engine fits any number of them, and they never cause a refusal.
//! - **CPUs that the mux needs** are not part of any FE's capacity; the specs' check ensures that.
//!
//! - **A given number of guests** ([`allocate_guests`]): that many equal
//!   shares. Each goes to an FE where the vrouter has the fewest guests;
//!   among those, to the fullest that fits it. An FE may get several.
//!
//! New allocations never move others' shares. A change keeps the vrouter's own
//! shares in place where possible. By the rule, a vrouter has at most one share
//! of an FE. All arithmetic uses integer thousandths of a core. Functions are
//! pure and deterministic; ties go to the FE that is first by name.

#![forbid(unsafe_code)]

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt;

/// Smallest share of an FE, thousandths of a core: the kernel's smallest quota, one millisecond, in
/// its longest period, one second.
pub const SHARE_MILLICORES_MIN: u32 = 1;

/// A forwarding engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineCapacity {
    /// Capacity, thousandths of a core.
    pub capacity_millicores: u32,
    /// True if guests can run on it; false after it failed.
    pub usable: bool,
}

/// Forwarding engines by name.
pub type EngineCapacities = BTreeMap<String, EngineCapacity>;

/// Load of a borrowing guest, thousandths of a core, for distributing such guests over FEs.
pub const LENT_LOAD_MILLICORES: u64 = 100;

/// A share of an FE, for one forwarding guest.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct EngineShare {
    /// The FE's name.
    pub engine: String,
    /// Guaranteed power, thousandths of a core; 0: none, the guest borrows spare power ([`lend`]).
    pub millicores: u32,
}

/// Allocated power of each FE, thousandths of a core, by the FE's name.
pub type AllocatedPower = BTreeMap<String, u64>;

/// A vrouter's request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AllocationRequest {
    /// Processing power, thousandths of a core.
    pub millicores: u32,
    /// True if the remainder beyond whole FEs may be divided among several.
    pub split: bool,
}

/// A request that can't be met. Nothing was allocated.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct AllocationRefusal {
    /// Requested power, thousandths of a core.
    pub wanted_millicores: u32,
    /// Free power of each usable FE for this request, thousandths of a
    /// core, by name. For a change, the vrouter's own shares count as free.
    pub free_millicores: BTreeMap<String, u32>,
    /// Smaller amount that fits, thousandths of a core; 0: none.
    pub possible_millicores: u32,
    /// Advice.
    pub hint: RefusalHint,
}

/// Advice after a refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RefusalHint {
    /// All FEs together have too little free power.
    AskForLess,
    /// The free power suffices, but is divided among too many FEs.
    AllowSplit,
}

impl AllocationRefusal {
    /// Returns what the user can change so that the request fits.
    pub fn advice(&self) -> String {
        let split = match self.hint {
            RefusalHint::AllowSplit => {
                "set split: true to spread it over more forwarding engines, "
            }
            RefusalHint::AskForLess => "",
        };
        let less = match self.possible_millicores {
            0 => String::new(),
            free => {
                let free = f64::from(free) / 1000.0;
                format!("ask for what is free (power: {free}, or pdp scale with --power {free}), ")
            }
        };
        format!(
            "{split}{less}leave power out to borrow unused power, or give a forwarding engine more CPUs \
             and capacity (pdp inspect substrate shows them)"
        )
    }
}

impl fmt::Display for AllocationRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let cores = |millicores: u32| f64::from(millicores) / 1000.0;
        let sum: u64 = self.free_millicores.values().copied().map(u64::from).sum();
        write!(
            f,
            "power {} does not fit: forwarding engines have {} free",
            cores(self.wanted_millicores),
            sum as f64 / 1000.0
        )?;
        let mut before = " (";
        for (engine, free) in &self.free_millicores {
            write!(f, "{before}{engine}: {}", cores(*free))?;
            before = ", ";
        }
        if self.free_millicores.is_empty() { Ok(()) } else { f.write_str(")") }
    }
}

/// An FE during an allocation.
#[derive(Clone)]
struct FreeCapacity<'a> {
    name: &'a str,
    /// Free for this vrouter, thousandths of a core.
    free: u32,
    /// No other vrouter has a share of it.
    idle: bool,
    /// The vrouter already has a share of it.
    in_use: bool,
}

/// Allocates the shares of a vrouter; whole FEs first, the remainder last.
///
/// `others` has the power of all other vrouters, and `own` the
/// shares of this one. FEs that are not in `engines` are ignored.
///
/// # Errors
/// [`AllocationRefusal`] if the rule finds no fit.
pub fn allocate(
    engines: &EngineCapacities,
    others: &AllocatedPower,
    own: &[EngineShare],
    request: AllocationRequest,
) -> Result<Vec<EngineShare>, AllocationRefusal> {
    let rooms = rooms(engines, others, own);
    let millicores = request.millicores.max(SHARE_MILLICORES_MIN);
    if let Some(shares) = stay(&rooms, own, millicores) {
        return Ok(shares);
    }
    if let Some(shares) = by_rule(rooms.clone(), millicores, |room| room.idle) {
        return Ok(shares);
    }
    // A split uses as few FEs as possible, those with the most free power first.
    let spread = by_rule(rooms.clone(), millicores, |_| true);
    match spread {
        Some(shares) if request.split => Ok(shares),
        spread => Err(AllocationRefusal {
            possible_millicores: {
                let sum = rooms.iter().map(|room| room.free).fold(0, u32::saturating_add);
                let fits = |sum| by_rule(rooms.clone(), sum, |room| room.idle || request.split);
                match sum < millicores && sum > 0 && fits(sum).is_some() {
                    true => sum,
                    false => most_free(rooms.iter().map(|room| room.free)),
                }
            },
            wanted_millicores: request.millicores,
            free_millicores: rooms.iter().map(|room| (room.name.to_owned(), room.free)).collect(),
            hint: if spread.is_some() { RefusalHint::AllowSplit } else { RefusalHint::AskForLess },
        }),
    }
}

/// Allocates the shares of a vrouter with exactly `guests` guests. They have `millicores`
/// together, equal except for rounding, in the order of its existing ones. Existing
/// shares stay in place if possible; beyond `guests`, the last ones are removed.
///
/// # Errors
/// [`AllocationRefusal`] if they don't fit.
pub fn allocate_guests(
    engines: &EngineCapacities,
    others: &AllocatedPower,
    own: &[EngineShare],
    millicores: u32,
    guests: u32,
) -> Result<Vec<EngineShare>, AllocationRefusal> {
    let rooms = rooms(engines, others, own);
    let free_millicores: BTreeMap<String, u32> =
        rooms.iter().map(|room| (room.name.to_owned(), room.free)).collect();
    let guests = guests.max(1);
    let part = |index: usize| {
        let more = u32::from((index as u32) < millicores % guests);
        (millicores / guests + more).max(SHARE_MILLICORES_MIN)
    };
    let mut free = free_millicores.clone();
    let mut shares: Vec<Option<EngineShare>> = vec![None; guests as usize];
    // Existing shares come first, so that new ones don't take their space.
    for stays in [true, false] {
        for index in 0..shares.len() {
            let millicores = part(index);
            let engine = match own.get(index) {
                _ if shares[index].is_some() => continue,
                Some(own) if stays => free.contains_key(&own.engine).then(|| own.engine.clone()),
                _ if stays => None,
                _ => {
                    let has = |name: &str| {
                        shares.iter().flatten().filter(|share| share.engine == name).count()
                    };
                    let with_room = free.iter().filter(|(_, room)| **room >= millicores);
                    with_room.min_by_key(|(name, room)| (has(name), **room)).map(|(n, _)| n.clone())
                }
            };
            if let Some(engine) = engine
                && let Some(room) = free.get_mut(&engine)
                && *room >= millicores
            {
                *room -= millicores;
                shares[index] = Some(EngineShare { engine, millicores });
            }
        }
    }
    let given: Option<Vec<EngineShare>> = shares.into_iter().collect();
    given.ok_or_else(|| AllocationRefusal {
        wanted_millicores: millicores,
        possible_millicores: most_free(free_millicores.values().copied()),
        free_millicores,
        hint: RefusalHint::AskForLess,
    })
}

/// Returns the most free millicores of a single forwarding
/// engine; 0 if that is too little for a share.
fn most_free(free: impl Iterator<Item = u32>) -> u32 {
    free.max().filter(|free| *free >= SHARE_MILLICORES_MIN).unwrap_or(0)
}

/// Returns zero shares for a vrouter with `guests` borrowing guests.
/// Each goes to an FE where the vrouter has the fewest guests; among
/// those, to the one with the lowest load relative to its capacity.
///
/// `others` has the power of all other vrouters by FE, with [`LENT_LOAD_MILLICORES`] for each
/// guest that borrows. Existing shares stay in place, except on an FE that is not usable;
/// beyond `guests`, the last ones are removed. Returns `None` only if no FE is usable.
pub fn lend(
    engines: &EngineCapacities,
    others: &AllocatedPower,
    own: &[EngineShare],
    guests: u32,
) -> Option<Vec<EngineShare>> {
    let usable = |name: &str| engines.get(name).is_some_and(|engine| engine.usable);
    let stay = own.iter().take(guests.max(1) as usize);
    let mut names: Vec<Option<&str>> =
        stay.map(|share| usable(&share.engine).then_some(share.engine.as_str())).collect();
    names.resize(guests.max(1) as usize, None);
    for index in 0..names.len() {
        if names[index].is_some() {
            continue;
        }
        let has = |name: &str| names.iter().flatten().filter(|has| **has == name).count();
        let load = |name: &str| u128::from(others.get(name).copied().unwrap_or(0));
        let capacity = |engine: &EngineCapacity| u128::from(engine.capacity_millicores);
        // Compares load per capacity, without the rounding of a division.
        let less = |(a, of_a): &(&String, &EngineCapacity),
                    (b, of_b): &(&String, &EngineCapacity)| {
            let loads = (load(a) * capacity(of_b)).cmp(&(load(b) * capacity(of_a)));
            has(a).cmp(&has(b)).then(loads)
        };
        let here = engines.iter().filter(|(_, engine)| engine.usable);
        let best = here.min_by(less)?.0;
        names[index] = Some(best);
    }
    let share = |name: &str| EngineShare { engine: name.to_owned(), millicores: 0 };
    Some(names.into_iter().flatten().map(share).collect())
}

/// Takes whole FEs, the largest that `whole` admits first, until one fits the remainder.
fn by_rule(
    mut rooms: Vec<FreeCapacity>,
    mut left: u32,
    whole: impl Fn(&FreeCapacity) -> bool,
) -> Option<Vec<EngineShare>> {
    let mut shares = Vec::new();
    loop {
        let rest = left.max(SHARE_MILLICORES_MIN);
        if let Some(best) = best_fit(&rooms, rest) {
            shares.push(take(&mut rooms, best, rest));
            return Some(shares);
        }
        let next = largest(&rooms, &whole)?;
        let free = rooms[next].free;
        shares.push(take(&mut rooms, next, free));
        left -= free;
    }
}

/// Returns the usable FEs with the power that others leave free, by name.
fn rooms<'a>(
    engines: &'a EngineCapacities,
    others: &AllocatedPower,
    own: &[EngineShare],
) -> Vec<FreeCapacity<'a>> {
    let usable = engines.iter().filter(|(_, engine)| engine.usable);
    let room = |(name, engine): (&'a String, &'a EngineCapacity)| {
        let given = others.get(name).copied().unwrap_or(0);
        let in_use = own.iter().any(|share| share.engine == *name);
        let free = u64::from(engine.capacity_millicores).saturating_sub(given);
        FreeCapacity { name, free: u32::try_from(free).unwrap_or(0), idle: given == 0, in_use }
    };
    usable.map(room).collect()
}

/// Returns the vrouter's own shares if they add up to its request. A
/// share that can't stay in place moves to the best-fitting other FE.
fn stay(rooms: &[FreeCapacity], own: &[EngineShare], millicores: u32) -> Option<Vec<EngineShare>> {
    let sum: u64 = own.iter().map(|share| u64::from(share.millicores)).sum();
    if own.is_empty() || sum != u64::from(millicores) {
        return None;
    }
    let holds = |room: &FreeCapacity, share: &EngineShare| {
        room.name == share.engine && share.millicores <= room.free
    };
    let mut others: Vec<FreeCapacity> = rooms.to_vec();
    others.retain(|room| !own.iter().any(|share| holds(room, share)));
    let mut shares = Vec::new();
    for share in own {
        if rooms.iter().any(|room| holds(room, share)) {
            shares.push(share.clone());
        } else {
            let best = best_fit(&others, share.millicores)?;
            shares.push(take(&mut others, best, share.millicores));
        }
    }
    Some(shares)
}

/// Returns the FE that fits `millicores`: one with a
/// share of the vrouter if possible, else the fullest.
fn best_fit(rooms: &[FreeCapacity], millicores: u32) -> Option<usize> {
    (0..rooms.len())
        .filter(|&i| rooms[i].free >= millicores)
        .min_by_key(|&i| (!rooms[i].in_use, rooms[i].free, i))
}

/// Returns the FE of `kind` with the most free power. Ties go to one with a share of the vrouter.
fn largest(rooms: &[FreeCapacity], kind: impl Fn(&FreeCapacity) -> bool) -> Option<usize> {
    (0..rooms.len())
        .filter(|&i| kind(&rooms[i]) && rooms[i].free >= SHARE_MILLICORES_MIN)
        .min_by_key(|&i| (Reverse(rooms[i].free), !rooms[i].in_use, i))
}

fn take(rooms: &mut Vec<FreeCapacity>, index: usize, millicores: u32) -> EngineShare {
    EngineShare { engine: rooms.remove(index).name.to_owned(), millicores }
}
