//! Guaranteed and borrowed power: which changes are
//! rejected and with which message, and which are accepted.

use pdp_spec::units::Cores;
use pdp_spec::{Existing, Intent, Object, SourceFile, Substrate, check, parse};
use proptest::prelude::*;

const NODE: &str = "
apiVersion: pdp/v1
kind: Substrate
metadata: {name: node}
spec:
  mux: {cpus: \"0\"}
  forwardingEngines:
    fe1: {cpus: \"1\", capacity: 1}
    fe2: {cpus: \"2\", capacity: 0.5}
---
apiVersion: pdp/v1
kind: Tenant
metadata: {name: acme}
spec: {quota: {power: 0.3, vnets: 64}}
";

/// A network with one router.
fn lab(name: &str, plane: &str) -> String {
    format!(
        "
apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {{name: {name}}}
spec: {{nodes: {{r1: {{kind: router{plane}}}}}}}
"
    )
}

fn with_plane(name: &str, plane: &str) -> String {
    lab(name, &format!(", dataPlane: {plane}"))
}

fn apply(texts: &[String], existing: &Existing) -> Result<Existing, String> {
    let text = texts.join("---");
    let file = SourceFile { name: "f".into(), text, ..Default::default() };
    let documents = parse(&[file]).unwrap_or_else(|faults| panic!("{faults:#?}"));
    let Intent { substrate, vnets, tenants } = check(&documents, existing)
        .map_err(|faults| faults.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))?;
    Ok(Existing { substrate, vnets, tenants, ..existing.clone() })
}

#[track_caller]
fn node() -> Existing {
    let machine = Existing { cpus: (0..3).collect(), ..Existing::default() };
    apply(&[NODE.into()], &machine).unwrap()
}

/// Returns shares of a network's router, thousandths of a core by engine.
fn has(node: &Existing, vnet: &str) -> Vec<(String, u32)> {
    let shares = &node.vnets[vnet].shares()["r1"];
    shares.iter().map(|share| (share.engine.clone(), share.millicores)).collect()
}

#[test]
fn lab_without_power_fits_on_a_full_machine() {
    let full = [with_plane("a", "{power: 1}"), with_plane("b", "{power: 0.5}")];
    let node = apply(&full, &node()).unwrap();
    let labs: Vec<String> = (0..100).map(|number| lab(&format!("lab{number}"), "")).collect();
    let node = apply(&labs, &node).unwrap();
    for vnet in (0..100).map(|number| format!("lab{number}")) {
        let [(_, 0)] = has(&node, &vnet)[..] else { panic!("{:?}", has(&node, &vnet)) };
        let plane = node.vnets[&vnet].spec.nodes["r1"].guests().unwrap();
        assert!(plane.borrows() && plane.power.is_none(), "{plane:?}");
    }
    // More guests, or an explicit `borrow`: the same result.
    let more = [with_plane("more", "{guests: 3}"), with_plane("aloud", "{borrow: true}")];
    let node = apply(&more, &node).unwrap();
    assert_eq!(has(&node, "more").len(), 3);
    // A router that needs a guarantee is rejected, with advice.
    let words = apply(&[with_plane("c", "{power: 0.2}")], &node).err().unwrap();
    assert_eq!(
        words,
        "f:5:54: node c/r1: power 0.2 does not fit: forwarding engines have 0 free (fe1: 0, fe2: \
         0) (leave power out to borrow unused power, or give a forwarding engine more CPUs and \
         capacity (pdp inspect substrate shows them))"
    );
    // `borrow` with power keeps the guarantee, so it does not help.
    assert!(apply(&[with_plane("c", "{power: 0.2, borrow: true}")], &node).is_err());
    assert!(apply(&[with_plane("c", "{borrow: false}")], &node).is_err());
    // A router releases its guarantee if `power` is removed, and keeps its engine.
    let node = apply(&[lab("a", "")], &node).unwrap();
    assert_eq!(has(&node, "a"), [("fe1".to_owned(), 0)]);
    let node = apply(&[with_plane("c", "{power: 1}")], &node).unwrap();
    assert_eq!(has(&node, "c"), [("fe1".to_owned(), 1000)]);
}

/// docs/spec.md shows the default substrate.
#[test]
fn default_substrate_matches_the_docs() {
    let docs = include_str!("../../../docs/spec.md");
    let (_, text) = docs.split_once("On a machine with two CPUs it is:\n\n```yaml\n").unwrap();
    let (text, _) = text.split_once("```").unwrap();
    let file = SourceFile { name: "f".into(), text: text.into(), ..Default::default() };
    let [document] = &parse(&[file]).unwrap()[..] else { panic!("one document") };
    assert_eq!(document.object, Object::Substrate(Substrate::of_machine(&(0..2).collect())));
}

/// A substrate with only an external interface need not repeat the machine's CPUs.
#[test]
fn substrate_without_cpus_uses_the_machines_cpus() {
    let substrate = |more: &str| {
        "apiVersion: pdp/v1\nkind: Substrate\nmetadata: {name: node}\nspec:\n  interfaces: {A: {device: lab1}}\n"
            .to_owned()
            + more
    };
    let machine = Existing { cpus: (0..3).collect(), ..Existing::default() };
    let node = apply(&[substrate("")], &machine).unwrap();
    let spec = node.substrate.as_ref().unwrap().spec.clone();
    let own = Substrate::of_machine(&machine.cpus).spec;
    assert_eq!((spec.mux, spec.forwarding_engines), (own.mux, own.forwarding_engines));
    assert!(spec.interfaces.contains_key("A"));
    let engine = "  forwardingEngines: {fe1: {cpus: \"1\", capacity: 1}}\n";
    let words = apply(&[substrate(engine)], &machine).err().unwrap();
    assert!(words.contains("mux is missing (give it its cpus"), "{words}");
}

#[test]
fn router_without_borrowing_gets_the_default_power() {
    let node = apply(&[with_plane("a", "{borrow: false}")], &node()).unwrap();
    assert_eq!(has(&node, "a"), [("fe2".to_owned(), 100)]);
    let plane = node.vnets["a"].spec.nodes["r1"].guests().unwrap();
    assert!(!plane.borrows() && plane.power == Some(Cores(100)), "{plane:?}");
}

/// Quotas count a tenant's guests, so these have a guarantee.
#[test]
fn power_quota_counts_every_guest() {
    let labs = |plane: &str| {
        let names = ["acme.a", "acme.b", "acme.c"];
        names.map(|name| with_plane(name, plane)).to_vec()
    };
    for plane in ["{}", "{borrow: true}"] {
        let node = apply(&labs(plane), &node()).unwrap();
        assert_eq!(has(&node, "acme.c"), [("fe2".to_owned(), 100)], "{plane}");
        let acme = Existing { requester: Some("acme".into()), ..node };
        let words = apply(&[lab("acme.d", "")], &acme).err().unwrap();
        assert!(words.contains("power: 0.1 exceeds tenant acme's quota of 0.3"), "{words}");
    }
}

fn fast(name: &str, power: &str) -> String {
    with_plane(name, &format!("{{kind: fastpath, power: {power}}}"))
}

/// Fast paths get the mux's power beyond moving frames, once. A rejection has a reason and advice.
#[test]
fn fast_paths_can_use_half_of_the_mux() {
    let node = apply(&[fast("a", "0.3"), fast("b", "0.15")], &node()).unwrap();
    let refused = |text: String, node: &Existing| apply(&[text], node).err().unwrap();
    assert_eq!(
        refused(fast("c", "0.1"), &node),
        "f:5:70: node c/r1: power 0.1 does not fit: fast paths can have 0.5 of the mux's 1, of \
         which 0.05 is free (ask for less, leave power out to borrow unused power, or give the mux \
         more (spec.mux.power of the Substrate; see pdp inspect substrate))"
    );
    // A router without `power` is never rejected, and
    // others in the same change get what one releases.
    let node = apply(&[with_plane("c", "{kind: fastpath}"), fast("d", "0.05")], &node).unwrap();
    let node = apply(&[fast("c", "0.2"), fast("a", "0.1")], &node).unwrap();
    assert!(apply(&[fast("b", "0.151")], &node).is_err());
    // Fast paths take no power of engines.
    let node = apply(&[with_plane("e", "{power: 1}")], &node).unwrap();
    assert!(has(&node, "e") == [("fe1".to_owned(), 1000)]);
    // The mux can't have less than its guarantees.
    let less = |mux: &str| NODE.split("---").next().unwrap().replace("cpus: \"0\"", mux);
    let words = refused(less("cpus: \"0\", power: 0.9"), &node);
    assert!(
        words
            .contains("power 0.9 leaves 0.45 for fast paths, below the 0.5 of those in a, b, c, d"),
        "{words}"
    );
    let words = refused(less("cpus: \"0\", power: 1, workers: 6"), &node);
    assert!(
        words.contains(
            "power 1 of 6 workers leaves 0.083 for fast paths of one virtual network, below the \
             0.1 of a"
        ),
        "{words}"
    );
    assert!(apply(&[less("cpus: \"0\", power: 1")], &node).is_ok());
    let words = refused(fast("z", "0"), &node);
    assert!(words.contains("power 0 is below 0.001"), "{words}");
}

/// If the kernel forwards, its power is one share of an engine, like a forwarding guest's.
#[test]
fn kernel_power_comes_from_one_engine() {
    let kernel = |name: &str, keys: &str| with_plane(name, &format!("{{kind: kernel{keys}}}"));
    let node = apply(&[kernel("a", ", power: 0.9"), kernel("b", "")], &node()).unwrap();
    assert_eq!(has(&node, "a"), [("fe1".to_owned(), 900)]);
    let [(_, 0)] = has(&node, "b")[..] else { panic!("{:?}", has(&node, "b")) };
    // It is never split, and has no `split` key.
    let words = apply(&[kernel("c", ", power: 0.6")], &node).err().unwrap();
    assert!(words.contains("power 0.6 does not fit"), "{words}");
    let node = apply(&[with_plane("d", "{power: 0.5}")], &node).unwrap();
    assert!(
        apply(&[kernel("c", ", borrow: false")], &node).is_ok_and(|it| has(&it, "c")[0].1 == 100)
    );
    // A tenant's counts, with or without `power`.
    let node =
        apply(&[kernel("a", ""), kernel("acme.a", ""), kernel("acme.b", ", power: 0.2")], &node);
    let node = node.unwrap();
    assert_eq!(has(&node, "acme.a")[0].1, 100);
    assert_eq!(node.vnets["acme.b"].usage().power_millicores, 200);
    let acme = Existing { requester: Some("acme".into()), ..node };
    let words = apply(&[kernel("acme.c", "")], &acme).err().unwrap();
    assert!(words.contains("power: 0.1 exceeds tenant acme's quota of 0.3"), "{words}");
    let words = apply(&[kernel("acme.b", ", power: 0")], &acme).err().unwrap();
    assert!(words.contains("power 0 is below 0.001"), "{words}");
}

/// One worker forwards for a virtual network.
#[test]
fn one_vnets_fast_paths_use_half_a_worker() {
    let two = NODE.replace("cpus: \"0\"", "cpus: \"0,3\", workers: 2");
    let machine = Existing { cpus: (0..4).collect(), ..Existing::default() };
    let node = apply(&[two], &machine).unwrap();
    let words = apply(&[fast("a", "0.6")], &node).err().unwrap();
    assert!(
        words.contains(
            "fast paths of one virtual network can have 0.5 of one of the mux's 2 workers"
        ),
        "{words}"
    );
    assert!(apply(&[fast("a", "0.5"), fast("b", "0.5")], &node).is_ok());
    assert!(apply(&[fast("a", "0.5"), fast("b", "0.5"), fast("c", "0.001")], &node).is_err());
}

/// A tenant's quota counts it, and its errors reveal nothing about others.
#[test]
fn power_quota_counts_fast_paths() {
    let node = apply(&[fast("theirs", "0.3"), fast("acme.a", "0.1")], &node()).unwrap();
    assert_eq!(node.vnets["acme.a"].usage().power_millicores, 100);
    let acme = Existing { requester: Some("acme".into()), ..node };
    let words = apply(&[fast("acme.b", "0.25")], &acme).err().unwrap();
    assert!(words.contains("power: 0.25 exceeds tenant acme's quota of 0.3"), "{words}");
    let words = apply(&[fast("acme.b", "0.15")], &acme).err().unwrap();
    assert!(words.contains("power 0.15 exceeds the mux's free power (ask for less"), "{words}");
    assert!(!words.contains("theirs") && !words.contains("0.5"), "{words}");
    assert!(apply(&[with_plane("acme.b", "{kind: fastpath}")], &acme).is_ok());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// For any changes in any order: a router that borrows is never rejected for power.
    /// One with a guarantee gets it exactly, or is rejected as if nobody borrowed.
    #[test]
    fn borrowing_router_is_accepted_and_takes_no_guarantee(
        steps in proptest::collection::vec((0..12u8, proptest::option::of(1..1200u32)), 1..40),
    ) {
        let (mut alone, mut beside) = (node(), node());
        for (vnet, power) in steps {
            let name = format!("v{vnet}");
            let Some(power) = power else {
                beside = apply(&[lab(&format!("lab{vnet}"), "")], &beside).unwrap();
                continue;
            };
            let wish = [with_plane(&name, &format!("{{power: {power}m}}"))];
            match (apply(&wish, &alone), apply(&wish, &beside)) {
                (Ok(one), Ok(other)) => (alone, beside) = (one, other),
                (Err(one), Err(other)) => {
                    prop_assert_eq!(one, other);
                    continue;
                }
                (one, other) => prop_assert!(false, "{:?} {:?}", one.err(), other.err()),
            }
            prop_assert_eq!(has(&beside, &name).iter().map(|share| share.1).sum::<u32>(), power);
        }
    }
}
