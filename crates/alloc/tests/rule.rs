//! The rule's cases one by one, and its properties against a slow search.

use std::collections::{BTreeMap, BTreeSet};

use pdp_alloc::{
    Engine, Engines, Given, Hint, LENT_LOAD_MILLICORES, Refusal, SHARE_MILLICORES_MIN, Share, lend,
};
use proptest::prelude::*;

/// What each vrouter has, by its name.
type Placements = BTreeMap<String, Vec<Share>>;

/// What a vrouter asks for.
#[derive(Clone)]
struct Request {
    vrouter: String,
    millicores: u32,
    split: bool,
}

/// What others have, and what a vrouter has itself.
fn others_and_own<'a>(existing: &'a Placements, vrouter: &str) -> (Given, &'a [Share]) {
    let mut others = Given::new();
    for share in existing.iter().filter(|(key, _)| *key != vrouter).flat_map(|(_, shares)| shares) {
        *others.entry(share.engine.clone()).or_default() += u64::from(share.millicores);
    }
    (others, existing.get(vrouter).map_or(&[], Vec::as_slice))
}

fn allocate(
    engines: &Engines,
    existing: &Placements,
    request: &Request,
) -> Result<Vec<Share>, Refusal> {
    let Request { ref vrouter, millicores, split } = *request;
    let (others, own) = others_and_own(existing, vrouter);
    pdp_alloc::allocate(engines, &others, own, pdp_alloc::Request { millicores, split })
}

fn allocate_guests(
    engines: &Engines,
    existing: &Placements,
    vrouter: &str,
    millicores: u32,
    guests: u32,
) -> Result<Vec<Share>, Refusal> {
    let (others, own) = others_and_own(existing, vrouter);
    pdp_alloc::allocate_guests(engines, &others, own, millicores, guests)
}

fn engines(capacities: &[u32]) -> Engines {
    let engine = |&capacity_millicores| Engine { capacity_millicores, usable: true };
    (1..).map(|n| format!("fe{n}")).zip(capacities.iter().map(engine)).collect()
}

fn request(vrouter: &str, millicores: u32) -> Request {
    Request { vrouter: vrouter.into(), millicores, split: false }
}

fn shares(shares: &[(&str, u32)]) -> Vec<Share> {
    shares.iter().map(|&(engine, millicores)| Share { engine: engine.into(), millicores }).collect()
}

fn placed(placements: &[(&str, &[(&str, u32)])]) -> Placements {
    placements.iter().map(|(key, list)| ((*key).to_owned(), shares(list))).collect()
}

#[test]
fn whole_engines_and_a_rest_that_fits_best() {
    let engines = engines(&[1000, 1000, 1000, 1000]);
    let existing = placed(&[("a", &[("fe1", 300)]), ("b", &[("fe2", 600)])]);
    // 2.3 = two whole idle ones, and 0.3 where the least is left: fe2 with 0.4.
    let got = allocate(&engines, &existing, &request("c", 2300)).unwrap();
    assert_eq!(got, shares(&[("fe3", 1000), ("fe4", 1000), ("fe2", 300)]));
}

#[test]
fn a_number_of_guests() {
    let engines = engines(&[1000, 1000]);
    let none = Placements::new();
    let give = |existing: &Placements, millicores, guests| {
        allocate_guests(&engines, existing, "a", millicores, guests)
    };
    // Spread, then several on one, equal but for the rounding.
    assert_eq!(give(&none, 900, 2).unwrap(), shares(&[("fe1", 450), ("fe2", 450)]));
    let three = [("fe1", 334), ("fe2", 333), ("fe1", 333)];
    assert_eq!(give(&none, 1000, 3).unwrap(), shares(&three));
    // What is there stays; the last go first; of more than fits nothing is given.
    let existing = placed(&[("a", &[("fe2", 400), ("fe2", 400)]), ("b", &[("fe1", 900)])]);
    assert_eq!(give(&existing, 900, 2).unwrap(), shares(&[("fe2", 450), ("fe2", 450)]));
    assert_eq!(give(&existing, 400, 1).unwrap(), shares(&[("fe2", 400)]));
    let refused = give(&existing, 1200, 3).unwrap_err();
    assert_eq!(refused.free_millicores, [("fe1".into(), 100), ("fe2".into(), 1000)].into());
    // One that has no room any more where it is goes elsewhere.
    let existing = placed(&[("a", &[("fe1", 100)]), ("b", &[("fe1", 900)])]);
    assert_eq!(give(&existing, 500, 1).unwrap(), shares(&[("fe2", 500)]));
}

#[test]
fn figure_1_red_and_blue_share_and_green_gets_two() {
    let engines = engines(&[300, 300, 300]);
    let mut placements = Placements::new();
    for (key, millicores) in [("red/r1", 150), ("blue/r1", 150), ("green/r1", 600)] {
        let got = allocate(&engines, &placements, &request(key, millicores)).unwrap();
        placements.insert(key.into(), got);
    }
    assert_eq!(placements["red/r1"][0].engine, placements["blue/r1"][0].engine);
    assert_eq!(placements["green/r1"], shares(&[("fe2", 300), ("fe3", 300)]));
}

#[test]
fn no_guest_for_a_rest_of_nothing_and_one_for_an_exact_fit() {
    let engines = engines(&[1000, 1000]);
    let none = Placements::new();
    assert_eq!(allocate(&engines, &none, &request("a", 1000)).unwrap(), shares(&[("fe1", 1000)]));
    let both = shares(&[("fe1", 1000), ("fe2", 1000)]);
    assert_eq!(allocate(&engines, &none, &request("a", 2000)).unwrap(), both);
    let existing = placed(&[("b", &[("fe1", 400)])]);
    assert_eq!(allocate(&engines, &existing, &request("a", 600)).unwrap(), shares(&[("fe1", 600)]));
}

#[test]
fn no_engine_fits_the_rest() {
    let engines = engines(&[1000, 1000]);
    let existing = placed(&[("b", &[("fe1", 600)]), ("c", &[("fe2", 700)])]);
    let refusal = allocate(&engines, &existing, &request("a", 600)).unwrap_err();
    assert_eq!(refusal.hint, Hint::AllowSplit);
    assert_eq!(
        refusal.to_string(),
        "power 0.6 has no room: forwarding engines have 0.7 free (fe1: 0.4, fe2: 0.3)"
    );
    let split = Request { split: true, ..request("a", 600) };
    assert_eq!(
        allocate(&engines, &existing, &split).unwrap(),
        shares(&[("fe1", 400), ("fe2", 200)])
    );
    let refusal = allocate(&engines, &existing, &request("a", 701)).unwrap_err();
    assert_eq!(refusal.hint, Hint::AskForLess);
    let ways_out =
        "ask for what is free (power: 0.4, or pdp scale with --power 0.4), leave power out";
    assert!(refusal.ways_out().starts_with(ways_out), "{}", refusal.ways_out());
}

#[test]
fn too_few_idle_engines_give_nothing() {
    let engines = engines(&[1000, 1000, 1000]);
    let existing = placed(&[("b", &[("fe1", 100)]), ("c", &[("fe2", 100)])]);
    assert!(allocate(&engines, &existing, &request("a", 2500)).is_err());
}

#[test]
fn different_capacities_take_the_largest_first() {
    let engines = engines(&[500, 2000, 1000]);
    let none = Placements::new();
    assert_eq!(allocate(&engines, &none, &request("a", 900)).unwrap(), shares(&[("fe3", 900)]));
    let two = shares(&[("fe2", 2000), ("fe3", 600)]);
    assert_eq!(allocate(&engines, &none, &request("a", 2600)).unwrap(), two);
}

#[test]
fn a_failed_engine_moves_its_share_alone() {
    let mut engines = engines(&[1000, 1000, 1000]);
    let existing = placed(&[("a", &[("fe1", 1000), ("fe2", 500)])]);
    engines.get_mut("fe1").unwrap().usable = false;
    let got = allocate(&engines, &existing, &request("a", 1500)).unwrap();
    assert_eq!(got, shares(&[("fe3", 1000), ("fe2", 500)]));
}

#[test]
fn a_change_stays_where_it_can() {
    let engines = engines(&[1000, 1000, 1000]);
    // fe1 would fit better; the vrouter is on fe2 and stays.
    let existing = placed(&[("a", &[("fe2", 300)]), ("b", &[("fe1", 500)])]);
    let got = allocate(&engines, &existing, &request("a", 400)).unwrap();
    assert_eq!(got, shares(&[("fe2", 400)]));
    let got = allocate(&engines, &existing, &request("a", 1400)).unwrap();
    assert_eq!(got.iter().find(|share| share.engine == "fe2").unwrap().millicores, 1000);
}

#[test]
fn a_share_too_small_to_enforce_is_rounded_up() {
    let engines = engines(&[1000]);
    let got = allocate(&engines, &Placements::new(), &request("a", 0)).unwrap();
    assert_eq!(got, shares(&[("fe1", SHARE_MILLICORES_MIN)]));
    let got = allocate_guests(&engines, &Placements::new(), "a", 2, 3).unwrap();
    assert_eq!(got, shares(&[("fe1", SHARE_MILLICORES_MIN); 3]));
}

#[test]
fn who_borrows_goes_where_there_is_least_to_do() {
    let mut engines = engines(&[1000, 2000]);
    let others = Given::from([("fe1".into(), 500), ("fe2".into(), 900)]);
    let nothing = |names: &[&str]| Some(shares(&names.iter().map(|n| (*n, 0)).collect::<Vec<_>>()));
    assert_eq!(lend(&engines, &others, &[], 1), nothing(&["fe2"]));
    // One on each before two are on one; those that there are stay, the last go first.
    assert_eq!(lend(&engines, &others, &[], 3), nothing(&["fe2", "fe1", "fe2"]));
    let own = shares(&[("fe1", 100), ("fe1", 100)]);
    assert_eq!(lend(&engines, &others, &own, 3), nothing(&["fe1", "fe1", "fe2"]));
    assert_eq!(lend(&engines, &others, &own, 1), nothing(&["fe1"]));
    // Full is no reason, and a failed one is left.
    let full = Given::from([("fe1".into(), 1000), ("fe2".into(), 2000)]);
    assert_eq!(lend(&engines, &full, &[], 1), nothing(&["fe1"]));
    engines.get_mut("fe1").unwrap().usable = false;
    assert_eq!(lend(&engines, &others, &own, 2), nothing(&["fe2", "fe2"]));
    engines.get_mut("fe2").unwrap().usable = false;
    assert_eq!(lend(&engines, &others, &own, 2), None);
}

/// Fewest guests by the rule: some idle engines whole and at most one more with the rest on it;
/// `None` if there is no way. Tries every set of engines.
fn fewest(engines: &Engines, existing: &Placements, wanted: u32, split: bool) -> Option<usize> {
    let mut used: BTreeMap<&str, u32> = BTreeMap::new();
    for share in existing.values().flatten() {
        *used.entry(&share.engine).or_default() += share.millicores;
    }
    let rooms: Vec<(u32, bool)> = engines
        .iter()
        .map(|(name, engine)| {
            let used = used.get(name.as_str()).copied().unwrap_or(0);
            (engine.capacity_millicores - used, used == 0)
        })
        .collect();
    let mut best = None;
    for set in 1u32..1 << rooms.len() {
        let members: Vec<(u32, bool)> =
            (0..rooms.len()).filter(|i| set & (1 << i) != 0).map(|i| rooms[i]).collect();
        let sum: u32 = members.iter().map(|room| room.0).sum();
        let all_needed = |last: u32| sum - last < wanted && sum >= wanted;
        let by_rule = (0..members.len()).any(|last| {
            let others_whole =
                members.iter().enumerate().all(|(i, room)| i == last || split || room.1);
            others_whole && all_needed(members[last].0)
        });
        if by_rule {
            best = Some(best.map_or(members.len(), |best: usize| best.min(members.len())));
        }
    }
    best
}

/// Engines of a few capacities, and a history of requests with sizes in steps that need no
/// rounding.
fn cases() -> impl Strategy<Value = (Engines, Vec<(u8, u32, bool)>)> {
    let capacities = prop::collection::vec(prop::sample::select(vec![300, 500, 1000, 1700]), 1..7);
    let step = (0..6u8, 1..40u32, any::<bool>());
    let history =
        prop::collection::vec(step.prop_map(|(who, n, split)| (who, n * 50, split)), 1..12);
    (capacities.prop_map(|capacities| engines(&capacities)), history)
}

fn check_capacity(engines: &Engines, placements: &Placements) {
    let mut used: BTreeMap<&str, u32> = BTreeMap::new();
    for share in placements.values().flatten() {
        *used.entry(&share.engine).or_default() += share.millicores;
    }
    for (name, used) in used {
        assert!(used <= engines[name].capacity_millicores, "{name}: {used}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn the_rule_holds_over_a_history((engines, history) in cases()) {
        let mut placements = Placements::new();
        for (who, millicores, split) in history {
            let key = format!("v{who}");
            let request = Request { vrouter: key.clone(), millicores, split };
            let others: Placements =
                placements.iter().filter(|(k, _)| **k != key).map(|(k, v)| (k.clone(), v.clone())).collect();
            let got = allocate(&engines, &placements, &request);
            // Same input, same result.
            prop_assert_eq!(&got, &allocate(&engines, &placements, &request));
            // As few guests as the rule allows; where nothing stands in the way it is given.
            let fewest_whole = fewest(&engines, &others, millicores, false);
            let fewest_split = fewest(&engines, &others, millicores, true);
            match got {
                Ok(shares) => {
                    let sum: u32 = shares.iter().map(|share| share.millicores).sum();
                    prop_assert_eq!(sum, millicores);
                    let distinct: BTreeSet<_> = shares.iter().map(|share| &share.engine).collect();
                    prop_assert_eq!(distinct.len(), shares.len());
                    let unchanged = placements.get(&key) == Some(&shares);
                    let fewest = fewest_whole.or(fewest_split);
                    prop_assert!(unchanged || Some(shares.len()) == fewest, "{shares:?} {fewest:?}");
                    placements.insert(key, shares);
                }
                Err(refusal) => {
                    prop_assert_eq!(fewest_whole, None);
                    prop_assert!(!split || fewest_split.is_none());
                    let hint = if fewest_split.is_some() { Hint::AllowSplit } else { Hint::AskForLess };
                    prop_assert_eq!(refusal.hint, hint);
                    // What it proposes can be had.
                    let possible = refusal.possible_millicores;
                    let less = Request { millicores: possible, ..request };
                    prop_assert!(possible < millicores);
                    prop_assert!(possible == 0 || allocate(&engines, &others, &less).is_ok());
                }
            }
            check_capacity(&engines, &placements);
        }
    }

    /// Any number of those that borrow have a place, on all engines as their capacities are, and those
    /// that are given power get what they would get without them.
    #[test]
    fn who_borrows_is_in_nobodys_way((engines, history) in cases(), lent in 1..200usize) {
        let (mut alone, mut beside) = (Placements::new(), Placements::new());
        let mut loads = Given::new();
        for number in 0..lent {
            let got = lend(&engines, &loads, &[], 1).expect("a place");
            prop_assert!(got.len() == 1 && got[0].millicores == 0, "{got:?}");
            *loads.entry(got[0].engine.clone()).or_default() += LENT_LOAD_MILLICORES;
            beside.insert(format!("lent{number}"), got);
        }
        // Nobody could have gone where there is less to do, one guest more counted.
        for (name, load) in &loads {
            let capacity = u64::from(engines[name].capacity_millicores);
            for (other, engine) in &engines {
                let there = loads.get(other).copied().unwrap_or(0);
                let before = (load - LENT_LOAD_MILLICORES) * u64::from(engine.capacity_millicores);
                prop_assert!(before <= there * capacity, "{name} {other} {loads:?}");
            }
        }
        for (who, millicores, split) in history {
            let request = Request { vrouter: format!("v{who}"), millicores, split };
            let got = allocate(&engines, &alone, &request);
            prop_assert_eq!(&got, &allocate(&engines, &beside, &request));
            if let Ok(shares) = got {
                alone.insert(request.vrouter.clone(), shares.clone());
                beside.insert(request.vrouter, shares);
            }
        }
    }

    #[test]
    fn remove_restores((engines, history) in cases(), wanted in 1..40u32) {
        let mut placements = Placements::new();
        for (who, millicores, split) in history {
            let request = Request { vrouter: format!("v{who}"), millicores, split };
            if let Ok(shares) = allocate(&engines, &placements, &request) {
                placements.insert(request.vrouter, shares);
            }
        }
        let probe = request("probe", wanted * 50);
        let before = allocate(&engines, &placements, &probe);
        let mut with = placements.clone();
        if let Ok(shares) = allocate(&engines, &with, &request("guest", 350)) {
            with.insert("guest".into(), shares);
            with.remove("guest");
        }
        prop_assert_eq!(allocate(&engines, &with, &probe), before);
    }

    /// Amounts that need rounding, and engines that failed: never too little, never over.
    #[test]
    fn any_amount_stays_within_capacity(
        capacities in prop::collection::vec(0..2000u32, 0..6),
        failed in 0..6usize,
        wanted in prop::collection::vec((0..5000u32, any::<bool>()), 1..8),
    ) {
        let mut engines = engines(&capacities);
        if let Some(engine) = engines.values_mut().nth(failed) {
            engine.usable = false;
        }
        let mut placements = Placements::new();
        for (n, (millicores, split)) in wanted.into_iter().enumerate() {
            let request = Request { vrouter: format!("v{n}"), millicores, split };
            if let Ok(shares) = allocate(&engines, &placements, &request) {
                prop_assert!(shares.iter().map(|s| s.millicores).sum::<u32>() >= millicores);
                prop_assert!(shares.iter().all(|s| s.millicores >= SHARE_MILLICORES_MIN));
                prop_assert!(shares.iter().all(|s| engines[&s.engine].usable));
                placements.insert(request.vrouter, shares);
            }
            check_capacity(&engines, &placements);
        }
    }
}
