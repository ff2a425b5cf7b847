//! Allocation of processing power to vrouters: which forwarding engines (FEs), how much of each.
//!
//! The rule is Algorithm 1 of the PdP paper (VISA'09): a vrouter that asks for R = k·C + r gets k
//! whole idle FEs, and the rest r on the FE where it fits best, so that it has as few guests as
//! can be. What the paper leaves open is closed like this:
//!
//! - **R fits one FE** (R ≤ C, an exact fit or r = 0 included): one guest on the fullest FE that
//!   has room. No guest is made for r = 0.
//! - **FEs of different capacity**: while no FE has room for what is left, the largest idle FE is
//!   taken whole. With equal capacities this is the paper's k·C + r.
//! - **No FE has room for r**, or **too few FEs are idle**: refused, or, where the request allows
//!   splitting, what is left is spread, most room first, over as few FEs as can be.
//! - **All or nothing**: a refusal gives nothing and changes nothing.
//! - **A failed FE** ([`Engine::usable`] is false) gets nothing new; a request again for a vrouter
//!   that had a share there moves that share and leaves the others where they are.
//! - **A share below [`SHARE_MILLICORES_MIN`]** can't be enforced by a CPU quota, so it is rounded
//!   up to it.
//! - **Nothing asked for** ([`lend`]): guests that live on what others leave. They have a share of nothing, so that
//!   an engine has room for any number of them, and are no reason to refuse anybody.
//! - **CPUs that the mux needs** are no part of any FE's capacity; the specs' check sees to that.
//!
//! - **A given number of guests** ([`allocate_guests`]): that many equal shares, each on the FE
//!   where the vrouter has the fewest, of those the fullest that has room; several on one FE where
//!   need be.
//!
//! Adding never moves others' shares. A change keeps the vrouter's own shares where they can
//! stay. By the rule a vrouter has at most one share of an FE. All is integer arithmetic in thousandths of a
//! core, pure, and the same for the same input; ties go to the FE that sorts first by name.

#![forbid(unsafe_code)]

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt;

/// Smallest share of an FE, thousandths of a core: the kernel's smallest quota, one millisecond, in
/// its longest period, one second.
pub const SHARE_MILLICORES_MIN: u32 = 1;

/// A forwarding engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Engine {
    /// Its capacity, thousandths of a core.
    pub capacity_millicores: u32,
    /// Whether guests can run on it; false once it failed.
    pub usable: bool,
}

/// Forwarding engines by name.
pub type Engines = BTreeMap<String, Engine>;

/// What a guest that borrows counts for, thousandths of a core, where such guests are spread over FEs.
pub const LENT_LOAD_MILLICORES: u64 = 100;

/// A share of an FE: one forwarding guest.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Share {
    /// The FE's name.
    pub engine: String,
    /// How much of it, thousandths of a core; 0: nothing, what others leave is borrowed ([`lend`]).
    pub millicores: u32,
}

/// What is given of each FE, thousandths of a core, by the FE's name.
pub type Given = BTreeMap<String, u64>;

/// What a vrouter asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Processing power, thousandths of a core.
    pub millicores: u32,
    /// Whether what is left beside whole FEs may be spread over several.
    pub split: bool,
}

/// A request that can't be met. Nothing was given.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct Refusal {
    /// What was asked for, thousandths of a core.
    pub wanted_millicores: u32,
    /// What each usable FE has free for it, thousandths of a core, by name; of a change, what the
    /// vrouter itself has counts as free.
    pub free_millicores: BTreeMap<String, u32>,
    /// Less that there is room for, thousandths of a core; 0: none.
    pub possible_millicores: u32,
    /// What would help.
    pub hint: Hint,
}

/// What would help against a refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hint {
    /// All FEs together have too little room.
    AskForLess,
    /// They have room together, but not as the rule wants it.
    AllowSplit,
}

impl Refusal {
    /// Returns what the user can change so that the request fits.
    pub fn ways_out(&self) -> String {
        let split = match self.hint {
            Hint::AllowSplit => "set split: true to spread it over more forwarding engines, ",
            Hint::AskForLess => "",
        };
        let less = match self.possible_millicores {
            0 => String::new(),
            free => {
                let free = f64::from(free) / 1000.0;
                format!("ask for what is free (power: {free}, or pdp scale with --power {free}), ")
            }
        };
        format!(
            "{split}{less}leave power out to borrow what others leave, or give a forwarding engine more CPUs \
             and capacity (pdp inspect substrate shows them)"
        )
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let cores = |millicores: u32| f64::from(millicores) / 1000.0;
        let sum: u64 = self.free_millicores.values().copied().map(u64::from).sum();
        write!(
            f,
            "power {} has no room: forwarding engines have {} free",
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

/// An FE as the rule sees it while it gives shares.
#[derive(Clone)]
struct Room<'a> {
    name: &'a str,
    /// Free for this vrouter.
    free: u32,
    /// Nobody else has a share of it.
    idle: bool,
    /// The vrouter has a share of it already.
    held: bool,
}

/// The shares that a vrouter gets; whole FEs first, the rest last.
///
/// `others` is what all other vrouters have, and `own` what this one has. What is of FEs that are not in
/// `engines` counts for nothing.
///
/// # Errors
/// [`Refusal`] if the rule finds no room.
pub fn allocate(
    engines: &Engines,
    others: &Given,
    own: &[Share],
    request: Request,
) -> Result<Vec<Share>, Refusal> {
    let rooms = rooms(engines, others, own);
    let wanted = request.millicores.max(SHARE_MILLICORES_MIN);
    if let Some(shares) = stay(&rooms, own, wanted) {
        return Ok(shares);
    }
    if let Some(shares) = by_rule(rooms.clone(), wanted, |room| room.idle) {
        return Ok(shares);
    }
    // What a split gives is also what it would give: as few FEs as can be, most room first.
    let spread = by_rule(rooms.clone(), wanted, |_| true);
    match spread {
        Some(shares) if request.split => Ok(shares),
        spread => Err(Refusal {
            possible_millicores: {
                let sum = rooms.iter().map(|room| room.free).fold(0, u32::saturating_add);
                let fits = |sum| by_rule(rooms.clone(), sum, |room| room.idle || request.split);
                match sum < wanted && sum > 0 && fits(sum).is_some() {
                    true => sum,
                    false => most_free(rooms.iter().map(|room| room.free)),
                }
            },
            wanted_millicores: request.millicores,
            free_millicores: rooms.iter().map(|room| (room.name.to_owned(), room.free)).collect(),
            hint: if spread.is_some() { Hint::AllowSplit } else { Hint::AskForLess },
        }),
    }
}

/// The shares of a vrouter with exactly `guests` guests, which have `millicores` together: equal but
/// for the rounding, in the order of those that it has. These stay where they are if they can; of
/// more than `guests` the last ones go.
///
/// # Errors
/// [`Refusal`] if there is no room.
pub fn allocate_guests(
    engines: &Engines,
    others: &Given,
    own: &[Share],
    millicores: u32,
    guests: u32,
) -> Result<Vec<Share>, Refusal> {
    let rooms = rooms(engines, others, own);
    let free_millicores: BTreeMap<String, u32> =
        rooms.iter().map(|room| (room.name.to_owned(), room.free)).collect();
    let guests = guests.max(1);
    let wanted = |index: usize| {
        let more = u32::from((index as u32) < millicores % guests);
        (millicores / guests + more).max(SHARE_MILLICORES_MIN)
    };
    let mut free = free_millicores.clone();
    let mut shares: Vec<Option<Share>> = vec![None; guests as usize];
    // Those that there are first, so that new ones don't take their room.
    for stays in [true, false] {
        for index in 0..shares.len() {
            let millicores = wanted(index);
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
                shares[index] = Some(Share { engine, millicores });
            }
        }
    }
    let given: Option<Vec<Share>> = shares.into_iter().collect();
    given.ok_or_else(|| Refusal {
        wanted_millicores: millicores,
        possible_millicores: most_free(free_millicores.values().copied()),
        free_millicores,
        hint: Hint::AskForLess,
    })
}

/// Returns the most millicores that a single forwarding engine has free; 0 if that is too little for a share.
fn most_free(free: impl Iterator<Item = u32>) -> u32 {
    free.max().filter(|free| *free >= SHARE_MILLICORES_MIN).unwrap_or(0)
}

/// Shares of nothing for a vrouter with `guests` guests that borrow: each on an FE where the vrouter has the
/// fewest, of those the one with least to do for its capacity. `others` is what all other vrouters have of
/// each FE, [`LENT_LOAD_MILLICORES`] for each guest that borrows. Those that it has stay where they are, but
/// on an FE that is not usable; of more than `guests` the last ones go. None if no FE is usable; room is
/// never the reason.
pub fn lend(engines: &Engines, others: &Given, own: &[Share], guests: u32) -> Option<Vec<Share>> {
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
        let capacity = |engine: &Engine| u128::from(engine.capacity_millicores);
        // Load for a capacity, without the rounding of a division.
        let less = |(a, of_a): &(&String, &Engine), (b, of_b): &(&String, &Engine)| {
            let loads = (load(a) * capacity(of_b)).cmp(&(load(b) * capacity(of_a)));
            has(a).cmp(&has(b)).then(loads)
        };
        let here = engines.iter().filter(|(_, engine)| engine.usable);
        let best = here.min_by(less)?.0;
        names[index] = Some(best);
    }
    let share = |name: &str| Share { engine: name.to_owned(), millicores: 0 };
    Some(names.into_iter().flatten().map(share).collect())
}

/// Takes FEs whole, the largest of those that `whole` admits first, until one has room for what
/// is left.
fn by_rule(
    mut rooms: Vec<Room>,
    mut left: u32,
    whole: impl Fn(&Room) -> bool,
) -> Option<Vec<Share>> {
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

/// Usable FEs with what others leave free, by name.
fn rooms<'a>(engines: &'a Engines, others: &Given, own: &[Share]) -> Vec<Room<'a>> {
    let usable = engines.iter().filter(|(_, engine)| engine.usable);
    let room = |(name, engine): (&'a String, &'a Engine)| {
        let given = others.get(name).copied().unwrap_or(0);
        let held = own.iter().any(|share| share.engine == *name);
        let free = u64::from(engine.capacity_millicores).saturating_sub(given);
        Room { name, free: u32::try_from(free).unwrap_or(0), idle: given == 0, held }
    };
    usable.map(room).collect()
}

/// What the vrouter has, if that is what it asks for; shares that can't stay where they are, each
/// moved to another FE that fits it best.
fn stay(rooms: &[Room], own: &[Share], wanted: u32) -> Option<Vec<Share>> {
    let sum: u64 = own.iter().map(|share| u64::from(share.millicores)).sum();
    if own.is_empty() || sum != u64::from(wanted) {
        return None;
    }
    let holds =
        |room: &Room, share: &Share| room.name == share.engine && share.millicores <= room.free;
    let mut others: Vec<Room> = rooms.to_vec();
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

/// The FE with room for `millicores`: one held already if there is one, else the fullest.
fn best_fit(rooms: &[Room], millicores: u32) -> Option<usize> {
    (0..rooms.len())
        .filter(|&i| rooms[i].free >= millicores)
        .min_by_key(|&i| (!rooms[i].held, rooms[i].free, i))
}

/// The FE with the most room among those of `kind`: ties go to one held already.
fn largest(rooms: &[Room], kind: impl Fn(&Room) -> bool) -> Option<usize> {
    (0..rooms.len())
        .filter(|&i| kind(&rooms[i]) && rooms[i].free >= SHARE_MILLICORES_MIN)
        .min_by_key(|&i| (Reverse(rooms[i].free), !rooms[i].held, i))
}

fn take(rooms: &mut Vec<Room>, index: usize, millicores: u32) -> Share {
    Share { engine: rooms.remove(index).name.to_owned(), millicores }
}
