//! Properties: noise never panics, written values read back, checking twice changes nothing.

use std::collections::BTreeMap;

use pdp_spec::units::{BitRate, Bytes, Cores, CpuSet, Hex, Mac};
use pdp_spec::{
    Document, Existing, InterfaceFacts, Object, SourceFile, Substrate, VirtualNetwork, check,
    parse, render,
};
use proptest::prelude::*;

const OSPF: &str = include_str!("../../../examples/ospf.yaml");
const FIGURE: &str = include_str!("figure.yaml");

fn source(text: &str) -> SourceFile {
    SourceFile { name: "s.yaml".into(), text: text.into(), attachments: BTreeMap::new() }
}

fn machine() -> Existing {
    let facts = InterfaceFacts { mtu: 1500 };
    let devices = ["ext-a", "ext-b"].map(|device| (device.to_owned(), facts));
    Existing { devices: Some(BTreeMap::from(devices)), ..Existing::default() }
}

/// A machine without an applied Substrate.
fn bare_machine() -> Existing {
    Existing { substrate: Some(Substrate::of_machine(&(0..2).collect())), ..machine() }
}

/// Parses, checks and renders, whatever the result.
fn run(text: &str) {
    let sources = [source(text)];
    let wrong = match parse(&sources) {
        Ok(documents) => check(&documents, &machine()).err().unwrap_or_default(),
        Err(wrong) => wrong,
    };
    for diagnostic in &wrong {
        assert!(!diagnostic.message.is_empty());
    }
    render(&wrong, &sources, false);
}

fn as_documents(objects: &[Object]) -> Vec<Document> {
    let sources: Vec<SourceFile> =
        objects.iter().map(|object| source(&serde_json::to_string(object).unwrap())).collect();
    parse(&sources).unwrap()
}

#[test]
fn stored_specs_check_to_the_same_intent() {
    for (text, machine) in [(OSPF, bare_machine()), (FIGURE, machine())] {
        let documents = parse(&[source(text)]).unwrap();
        let first = check(&documents, &machine).unwrap();
        let vnets =
            first.vnets.values().map(|vnet| Object::VirtualNetwork(VirtualNetwork::clone(vnet)));
        let substrate = first.substrate.clone().map(Object::Substrate);
        let objects: Vec<Object> = substrate.into_iter().chain(vnets).collect();
        // On an empty machine, and on top of itself.
        let again = as_documents(&objects);
        for (stored, read) in objects.iter().zip(&again) {
            assert_eq!(stored, &read.object);
        }
        assert_eq!(check(&again, &machine).unwrap(), first);
        let existing =
            Existing { substrate: first.substrate.clone(), vnets: first.vnets.clone(), ..machine };
        assert_eq!(check(&documents, &existing).unwrap(), first);
    }
}

#[test]
fn mac_addresses_are_local_unicast_and_stable() {
    let intent = check(&parse(&[source(OSPF)]).unwrap(), &bare_machine()).unwrap();
    let macs: Vec<Mac> = intent.vnets["ospf"]
        .spec
        .nodes
        .values()
        .flat_map(|node| node.interfaces.values().map(|interface| interface.mac.unwrap()))
        .collect();
    assert!(macs.iter().all(|mac| mac.0[0] == 2));
    let distinct: std::collections::BTreeSet<_> = macs.iter().collect();
    assert_eq!(distinct.len(), macs.len());
    // A change here would give every running interface another address.
    let r1 = &intent.vnets["ospf"].spec.nodes["r1"].interfaces["eth0"];
    assert_eq!(r1.mac.unwrap().to_string(), "02:ca:11:e2:6d:47");
}

#[test]
fn rendered_errors_show_their_position() {
    let sources = [source("apiVersion: pdp/v1\nkind: Substrate\nmetadata: {name: a}\nspek: {}\n")];
    let wrong = parse(&sources).unwrap_err();
    let text = render(&wrong, &sources, false);
    assert!(text.contains("unknown key \"spek\""), "{text}");
    assert!(text.contains("did you mean spec?"), "{text}");
    assert!(text.contains("s.yaml:4:1"), "{text}");
    assert!(text.contains("spek: {}"), "{text}");
}

/// In YAML, a carriage return alone may end a line.
#[test]
fn error_positions_are_right_for_any_line_ending() {
    for end in ["\n", "\r\n", "\r"] {
        let lines =
            ["apiVersion: pdp/v1", "kind: Substrate", "metadata: {name: a}", "spek: {}", ""];
        let sources = [source(&lines.join(end))];
        let wrong = parse(&sources).unwrap_err();
        assert_eq!((wrong[0].line, wrong[0].column), (4, 1), "{end:?}");
        let text = render(&wrong, &sources, false);
        assert!(text.contains("s.yaml:4:1"), "{end:?}: {text}");
    }
}

#[test]
fn nested_aliases_do_not_explode() {
    let mut text = String::from("a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n");
    for n in 1..12 {
        let refs = vec![format!("*a{}", n - 1); 10].join(", ");
        text.push_str(&format!("a{n}: &a{n} [{refs}]\n"));
    }
    run(&text);
}

/// The stack is three quarters of a pdpd thread's stack.
#[test]
fn deep_nesting_is_refused_without_stack_overflow() {
    let block = (0..3000).map(|n| format!("{}a:\n", " ".repeat(n))).collect();
    let texts = ["[".repeat(100_000), "{a: ".repeat(300_000), "- ".repeat(100_000), block];
    let deep = |text: String| {
        parse(&[source(&text)]).unwrap_err();
    };
    let all = std::thread::Builder::new().stack_size(3 << 19);
    all.spawn(move || texts.into_iter().for_each(deep)).unwrap().join().unwrap();
}

/// A vnet's demand on shared resources.
#[derive(Clone, Debug)]
struct Wish {
    tunnel: Option<(bool, u32)>,
    rate_mbps: u32,
    memory_mib: u32,
    power_millicores: u32,
    fastpath_millicores: u32,
    mtu: u32,
}

fn wish() -> impl Strategy<Value = Wish> {
    let tunnel = prop::option::of((any::<bool>(), 4788u32..4791));
    let wish = (tunnel, 1u32..300, 4u32..300, (1u32..300, 1u32..120), 1300u32..1400);
    wish.prop_map(|(tunnel, rate_mbps, memory_mib, (power, fastpath), mtu)| Wish {
        tunnel,
        rate_mbps,
        memory_mib,
        power_millicores: power,
        fastpath_millicores: fastpath,
        mtu,
    })
}

impl Wish {
    /// Bytes of its largest packets on the device.
    fn bytes(&self) -> Option<u32> {
        self.tunnel.map(|(vxlan, _)| self.mtu + if vxlan { 50 } else { 42 })
    }

    fn yaml(&self, name: &str) -> String {
        let Self { tunnel, rate_mbps, memory_mib, power_millicores, fastpath_millicores, mtu } =
            self;
        let node = format!(
            "{{eth0: {{mtu: {mtu}}}}}, resources: {{memory: {memory_mib}Mi}}, \
             dataPlane: {{power: {power_millicores}m}}}}, f: {{kind: router, \
             dataPlane: {{kind: fastpath, power: {fastpath_millicores}m}}"
        );
        let ends = "local: 192.0.2.1, remote: 192.0.2.7";
        let outside = tunnel.map(|(vxlan, number)| match vxlan {
            true => format!("vxlan: {{vni: {number}, {ends}}}"),
            false => format!("udp: {{localPort: {number}, remotePort: 1, {ends}}}"),
        });
        let outside = outside.map(|outside| {
            format!(
                "
  externals: {{x: {{interface: A, {outside}}}}}
  links: [{{endpoints: [\"n:eth0\", \"external:x\"], guarantee: {rate_mbps}M}}]"
            )
        });
        vnet(name, &node, &outside.unwrap_or_default())
    }
}

fn vnet(name: &str, node: &str, more: &str) -> String {
    format!(
        "
---
apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {{name: {name}}}
spec:
  nodes: {{n: {{kind: router, interfaces: {node}}}}}{more}"
    )
}

fn substrate(rate_mbps: u32, memory_mib: u32, power_millicores: u32, mux: u32) -> String {
    format!(
        "apiVersion: pdp/v1
kind: Substrate
metadata: {{name: node}}
spec:
  interfaces: {{A: {{device: ext-a, capacity: {rate_mbps}M}}}}
  mux: {{cpus: \"0\", power: {mux}m}}
  managementHost: {{memory: {memory_mib}Mi}}
  forwardingEngines: {{fe1: {{cpus: \"1-20\", capacity: {power_millicores}m}}}}"
    )
}

/// Returns the state after applying this; `None` if it is rejected.
fn apply(text: &str, before: &Existing) -> Option<Existing> {
    let documents = parse(&[source(text)]).unwrap_or_else(|wrong| panic!("{wrong:?}"));
    let intent = check(&documents, before).ok()?;
    let (substrate, vnets) = (intent.substrate, intent.vnets);
    Some(Existing { substrate, vnets, ..before.clone() })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn noise_never_panics(text in "\\PC{0,200}") {
        run(&text);
    }

    #[test]
    fn bytes_changed_in_a_spec_never_panic(
        changes in prop::collection::vec((0..FIGURE.len(), any::<char>()), 1..4),
    ) {
        let mut chars: Vec<char> = FIGURE.chars().collect();
        for (at, to) in changes {
            let at = at % chars.len();
            chars[at] = to;
        }
        run(&chars.into_iter().collect::<String>());
    }

    #[test]
    fn truncated_specs_never_panic(at in 0..FIGURE.len()) {
        if FIGURE.is_char_boundary(at) {
            run(&FIGURE[..at]);
        }
    }

    /// In any order: shared resources are not exceeded, and no key is taken twice.
    #[test]
    fn applying_one_by_one_equals_all_at_once(
        wishes in prop::collection::vec(wish(), 1..5),
        tight in (1u32..10, 1u32..60, 1u32..10, 1u32..=10, 1400u32..1500),
    ) {
        let (rate, memory, power, mux, mtu) = tight;
        let bounds = substrate(rate * 100, memory * 150, power * 100, mux * 100);
        let vnets: Vec<String> =
            wishes.iter().enumerate().map(|(n, wish)| wish.yaml(&format!("v{n}"))).collect();
        let at_once = apply(&format!("{bounds}{}", vnets.concat()), &machine()).is_some();
        // The substrate first.
        let first = apply(&bounds, &machine()).unwrap();
        let last = vnets.iter().try_fold(first, |before, vnet| apply(vnet, &before));
        prop_assert_eq!(last.is_some(), at_once);
        // The substrate last.
        let roomy = substrate(1_000_000, 1_000_000, 20_000, 1000);
        let all = apply(&format!("{roomy}{}", vnets.concat()), &machine());
        if let Some(all) = &all {
            prop_assert_eq!(apply(&bounds, all).is_some(), at_once);
        }
        // The next change reports a device that takes smaller packets than before.
        if let Some(mut all) = all {
            all.devices.as_mut().unwrap().insert("ext-a".into(), InterfaceFacts { mtu });
            let fits = wishes.iter().all(|wish| wish.bytes().is_none_or(|bytes| bytes <= mtu));
            prop_assert_eq!(apply(&vnet("more", "{}", ""), &all).is_some(), fits);
        }
    }

    #[test]
    fn values_read_back(number in any::<u32>(), large in 0..(1u64 << 50)) {
        let cores = Cores(number % 4_096_001);
        prop_assert_eq!(cores.to_string().parse::<Cores>().unwrap(), cores);
        let json = serde_json::to_string(&cores).unwrap();
        prop_assert_eq!(serde_json::from_str::<Cores>(&json).unwrap(), cores);
        let bytes = Bytes(large);
        prop_assert_eq!(bytes.to_string().parse::<Bytes>().unwrap(), bytes);
        let rate = BitRate(large % 1_000_000_000_001);
        prop_assert_eq!(rate.to_string().parse::<BitRate>().unwrap(), rate);
        let hex = Hex(number.to_be_bytes().to_vec());
        prop_assert_eq!(hex.to_string().parse::<Hex>().unwrap(), hex);
    }

    #[test]
    fn cpu_sets_read_back(cpus in prop::collection::btree_set(0..64u32, 1..20)) {
        let set = CpuSet(cpus);
        prop_assert_eq!(set.to_string().parse::<CpuSet>().unwrap(), set);
    }
}
