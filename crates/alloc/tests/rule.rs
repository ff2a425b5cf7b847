//! The rule's cases one by one, and its properties against a slow search.

use std::collections::{BTreeMap, BTreeSet};

use pdp_alloc::{
    AllocatedPower, AllocationRefusal, EngineCapacities, EngineCapacity, EngineShare,
    LENT_LOAD_MILLICORES, RefusalHint, SHARE_MILLICORES_MIN, lend,
};
use proptest::prelude::*;

/// Shares of each vrouter, by its name.
type Placements = BTreeMap<String, Vec<EngineShare>>;

/// A vrouter's request.
#[derive(Clone)]
struct Request {
    vrouter: String,
    millicores: u32,
    split: bool,
}

/// Returns the power of others, and the vrouter's own shares.
fn others_and_own<'a>(
    existing: &'a Placements,
    vrouter: &str,
) -> (AllocatedPower, &'a [EngineShare]) {
    let mut others = AllocatedPower::new();
    for share in existing.iter().filter(|(key, _)| *key != vrouter).flat_map(|(_, shares)| shares) {
        *others.entry(share.engine.clone()).or_default() += u64::from(share.millicores);
    }
    (others, existing.get(vrouter).map_or(&[], Vec::as_slice))
}

fn allocate(
    engines: &EngineCapacities,
    existing: &Placements,
    request: &Request,
) -> Result<Vec<EngineShare>, AllocationRefusal> {
    let Request { ref vrouter, millicores, split } = *request;
    let (others, own) = others_and_own(existing, vrouter);
    pdp_alloc::allocate(engines, &others, own, pdp_alloc::AllocationRequest { millicores, split })
}

fn allocate_guests(
    engines: &EngineCapacities,
    existing: &Placements,
    vrouter: &str,
    millicores: u32,
    guests: u32,
) -> Result<Vec<EngineShare>, AllocationRefusal> {
    let (others, own) = others_and_own(existing, vrouter);
    pdp_alloc::allocate_guests(engines, &others, own, millicores, guests)
}

fn engines(capacities: &[u32]) -> EngineCapacities {
    let engine = |&capacity_millicores| EngineCapacity { capacity_millicores, usable: true };
    (1..).map(|n| format!("fe{n}")).zip(capacities.iter().map(engine)).collect()
}

fn request(vrouter: &str, millicores: u32) -> Request {
    Request { vrouter: vrouter.into(), millicores, split: false }
}

fn shares(shares: &[(&str, u32)]) -> Vec<EngineShare> {
    shares
        .iter()
        .map(|&(engine, millicores)| EngineShare { engine: engine.into(), millicores })
        .collect()
}

fn placed(placements: &[(&str, &[(&str, u32)])]) -> Placements {
    placements.iter().map(|(key, list)| ((*key).to_owned(), shares(list))).collect()
}

#[test]
fn allocation_takes_whole_engines_plus_best_fit() {
    let engines = engines(&[1000, 1000, 1000, 1000]);
    let existing = placed(&[("a", &[("fe1", 300)]), ("b", &[("fe2", 600)])]);
    // 2.3 = two whole idle ones, and 0.3 on the fullest that fits it: fe2 with 0.4.
    let got = allocate(&engines, &existing, &request("c", 2300)).unwrap();
    assert_eq!(got, shares(&[("fe3", 1000), ("fe4", 1000), ("fe2", 300)]));
}

#[test]
fn allocation_splits_power_among_guests() {
    let engines = engines(&[1000, 1000]);
    let none = Placements::new();
    let give = |existing: &Placements, millicores, guests| {
        allocate_guests(&engines, existing, "a", millicores, guests)
    };
    // First one each, then several on one, equal except for rounding.
    assert_eq!(give(&none, 900, 2).unwrap(), shares(&[("fe1", 450), ("fe2", 450)]));
    let three = [("fe1", 334), ("fe2", 333), ("fe1", 333)];
    assert_eq!(give(&none, 1000, 3).unwrap(), shares(&three));
    // Existing shares stay, and the last are removed first. If not all fit, nothing is allocated.
    let existing = placed(&[("a", &[("fe2", 400), ("fe2", 400)]), ("b", &[("fe1", 900)])]);
    assert_eq!(give(&existing, 900, 2).unwrap(), shares(&[("fe2", 450), ("fe2", 450)]));
    assert_eq!(give(&existing, 400, 1).unwrap(), shares(&[("fe2", 400)]));
    let refused = give(&existing, 1200, 3).unwrap_err();
    assert_eq!(refused.free_millicores, [("fe1".into(), 100), ("fe2".into(), 1000)].into());
    // A share that no longer fits its engine moves to another.
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
fn exact_fit_takes_no_extra_guest() {
    let engines = engines(&[1000, 1000]);
    let none = Placements::new();
    assert_eq!(allocate(&engines, &none, &request("a", 1000)).unwrap(), shares(&[("fe1", 1000)]));
    let both = shares(&[("fe1", 1000), ("fe2", 1000)]);
    assert_eq!(allocate(&engines, &none, &request("a", 2000)).unwrap(), both);
    let existing = placed(&[("b", &[("fe1", 400)])]);
    assert_eq!(allocate(&engines, &existing, &request("a", 600)).unwrap(), shares(&[("fe1", 600)]));
}

#[test]
fn allocation_is_refused_if_no_engine_fits() {
    let engines = engines(&[1000, 1000]);
    let existing = placed(&[("b", &[("fe1", 600)]), ("c", &[("fe2", 700)])]);
    let refusal = allocate(&engines, &existing, &request("a", 600)).unwrap_err();
    assert_eq!(refusal.hint, RefusalHint::AllowSplit);
    assert_eq!(
        refusal.to_string(),
        "power 0.6 does not fit: forwarding engines have 0.7 free (fe1: 0.4, fe2: 0.3)"
    );
    let split = Request { split: true, ..request("a", 600) };
    assert_eq!(
        allocate(&engines, &existing, &split).unwrap(),
        shares(&[("fe1", 400), ("fe2", 200)])
    );
    let refusal = allocate(&engines, &existing, &request("a", 701)).unwrap_err();
    assert_eq!(refusal.hint, RefusalHint::AskForLess);
    let ways_out =
        "ask for what is free (power: 0.4, or pdp scale with --power 0.4), leave power out";
    assert!(refusal.advice().starts_with(ways_out), "{}", refusal.advice());
}

#[test]
fn allocation_is_refused_with_too_few_idle_engines() {
    let engines = engines(&[1000, 1000, 1000]);
    let existing = placed(&[("b", &[("fe1", 100)]), ("c", &[("fe2", 100)])]);
    assert!(allocate(&engines, &existing, &request("a", 2500)).is_err());
}

#[test]
fn allocation_takes_the_largest_engines_first() {
    let engines = engines(&[500, 2000, 1000]);
    let none = Placements::new();
    assert_eq!(allocate(&engines, &none, &request("a", 900)).unwrap(), shares(&[("fe3", 900)]));
    let two = shares(&[("fe2", 2000), ("fe3", 600)]);
    assert_eq!(allocate(&engines, &none, &request("a", 2600)).unwrap(), two);
}

#[test]
fn failed_engine_moves_only_its_own_share() {
    let mut engines = engines(&[1000, 1000, 1000]);
    let existing = placed(&[("a", &[("fe1", 1000), ("fe2", 500)])]);
    engines.get_mut("fe1").unwrap().usable = false;
    let got = allocate(&engines, &existing, &request("a", 1500)).unwrap();
    assert_eq!(got, shares(&[("fe3", 1000), ("fe2", 500)]));
}

#[test]
fn changed_allocation_keeps_its_engines() {
    let engines = engines(&[1000, 1000, 1000]);
    // fe1 would fit better, but the vrouter stays on fe2.
    let existing = placed(&[("a", &[("fe2", 300)]), ("b", &[("fe1", 500)])]);
    let got = allocate(&engines, &existing, &request("a", 400)).unwrap();
    assert_eq!(got, shares(&[("fe2", 400)]));
    let got = allocate(&engines, &existing, &request("a", 1400)).unwrap();
    assert_eq!(got.iter().find(|share| share.engine == "fe2").unwrap().millicores, 1000);
}

#[test]
fn too_small_shares_are_rounded_up() {
    let engines = engines(&[1000]);
    let got = allocate(&engines, &Placements::new(), &request("a", 0)).unwrap();
    assert_eq!(got, shares(&[("fe1", SHARE_MILLICORES_MIN)]));
    let got = allocate_guests(&engines, &Placements::new(), "a", 2, 3).unwrap();
    assert_eq!(got, shares(&[("fe1", SHARE_MILLICORES_MIN); 3]));
}

#[test]
fn borrowing_guest_goes_to_the_least_loaded_engine() {
    let mut engines = engines(&[1000, 2000]);
    let others = AllocatedPower::from([("fe1".into(), 500), ("fe2".into(), 900)]);
    let nothing = |names: &[&str]| Some(shares(&names.iter().map(|n| (*n, 0)).collect::<Vec<_>>()));
    assert_eq!(lend(&engines, &others, &[], 1), nothing(&["fe2"]));
    // One on each engine before two on one. Existing ones stay, and the last are removed first.
    assert_eq!(lend(&engines, &others, &[], 3), nothing(&["fe2", "fe1", "fe2"]));
    let own = shares(&[("fe1", 100), ("fe1", 100)]);
    assert_eq!(lend(&engines, &others, &own, 3), nothing(&["fe1", "fe1", "fe2"]));
    assert_eq!(lend(&engines, &others, &own, 1), nothing(&["fe1"]));
    // A full engine is no obstacle, and guests leave a failed one.
    let full = AllocatedPower::from([("fe1".into(), 1000), ("fe2".into(), 2000)]);
    assert_eq!(lend(&engines, &full, &[], 1), nothing(&["fe1"]));
    engines.get_mut("fe1").unwrap().usable = false;
    assert_eq!(lend(&engines, &others, &own, 2), nothing(&["fe2", "fe2"]));
    engines.get_mut("fe2").unwrap().usable = false;
    assert_eq!(lend(&engines, &others, &own, 2), None);
}

/// Returns the fewest guests by the rule: some idle engines whole, and at most one more
/// with the remainder. `None` if there is no solution. Tries every set of engines.
fn fewest(
    engines: &EngineCapacities,
    existing: &Placements,
    millicores: u32,
    split: bool,
) -> Option<usize> {
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
        let all_needed = |last: u32| sum - last < millicores && sum >= millicores;
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

/// Engines with a few capacities, and a history of requests with sizes that need no rounding.
fn cases() -> impl Strategy<Value = (EngineCapacities, Vec<(u8, u32, bool)>)> {
    let capacities = prop::collection::vec(prop::sample::select(vec![300, 500, 1000, 1700]), 1..7);
    let step = (0..6u8, 1..40u32, any::<bool>());
    let history = prop::collection::vec(step.prop_map(|(id, n, split)| (id, n * 50, split)), 1..12);
    (capacities.prop_map(|capacities| engines(&capacities)), history)
}

fn check_capacity(engines: &EngineCapacities, placements: &Placements) {
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
    fn allocation_rule_holds_over_any_history((engines, history) in cases()) {
        let mut placements = Placements::new();
        for (id, millicores, split) in history {
            let key = format!("v{id}");
            let request = Request { vrouter: key.clone(), millicores, split };
            let others: Placements =
                placements.iter().filter(|(k, _)| **k != key).map(|(k, v)| (k.clone(), v.clone())).collect();
            let got = allocate(&engines, &placements, &request);
            // The same input gives the same result.
            prop_assert_eq!(&got, &allocate(&engines, &placements, &request));
            // As few guests as the rule allows; refused only if there is no solution.
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
                    let hint = if fewest_split.is_some() { RefusalHint::AllowSplit } else { RefusalHint::AskForLess };
                    prop_assert_eq!(refusal.hint, hint);
                    // The proposed amount can be allocated.
                    let possible = refusal.possible_millicores;
                    let less = Request { millicores: possible, ..request };
                    prop_assert!(possible < millicores);
                    prop_assert!(possible == 0 || allocate(&engines, &others, &less).is_ok());
                }
            }
            check_capacity(&engines, &placements);
        }
    }

    /// Any number of borrowing guests get a place, in proportion to the
    /// engines' capacities. Guaranteed shares are the same as without them.
    #[test]
    fn borrowing_guests_do_not_affect_guaranteed_shares((engines, history) in cases(), lent in 1..200usize) {
        let (mut alone, mut beside) = (Placements::new(), Placements::new());
        let mut loads = AllocatedPower::new();
        for number in 0..lent {
            let got = lend(&engines, &loads, &[], 1).expect("a place");
            prop_assert!(got.len() == 1 && got[0].millicores == 0, "{got:?}");
            *loads.entry(got[0].engine.clone()).or_default() += LENT_LOAD_MILLICORES;
            beside.insert(format!("lent{number}"), got);
        }
        // With one guest more, no other engine would have a lower load.
        for (name, load) in &loads {
            let capacity = u64::from(engines[name].capacity_millicores);
            for (other, engine) in &engines {
                let other_load = loads.get(other).copied().unwrap_or(0);
                let before = (load - LENT_LOAD_MILLICORES) * u64::from(engine.capacity_millicores);
                prop_assert!(before <= other_load * capacity, "{name} {other} {loads:?}");
            }
        }
        for (id, millicores, split) in history {
            let request = Request { vrouter: format!("v{id}"), millicores, split };
            let got = allocate(&engines, &alone, &request);
            prop_assert_eq!(&got, &allocate(&engines, &beside, &request));
            if let Ok(shares) = got {
                alone.insert(request.vrouter.clone(), shares.clone());
                beside.insert(request.vrouter, shares);
            }
        }
    }

    #[test]
    fn removal_restores_the_allocation((engines, history) in cases(), units in 1..40u32) {
        let mut placements = Placements::new();
        for (id, millicores, split) in history {
            let request = Request { vrouter: format!("v{id}"), millicores, split };
            if let Ok(shares) = allocate(&engines, &placements, &request) {
                placements.insert(request.vrouter, shares);
            }
        }
        let probe = request("probe", units * 50);
        let before = allocate(&engines, &placements, &probe);
        let mut with = placements.clone();
        if let Ok(shares) = allocate(&engines, &with, &request("guest", 350)) {
            with.insert("guest".into(), shares);
            with.remove("guest");
        }
        prop_assert_eq!(allocate(&engines, &with, &probe), before);
    }

    /// Amounts that need rounding, and failed engines: never too little, never above capacity.
    #[test]
    fn allocations_stay_within_capacity(
        capacities in prop::collection::vec(0..2000u32, 0..6),
        failed in 0..6usize,
        requests in prop::collection::vec((0..5000u32, any::<bool>()), 1..8),
    ) {
        let mut engines = engines(&capacities);
        if let Some(engine) = engines.values_mut().nth(failed) {
            engine.usable = false;
        }
        let mut placements = Placements::new();
        for (n, (millicores, split)) in requests.into_iter().enumerate() {
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
