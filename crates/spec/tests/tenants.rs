//! Tenants: what and how much they may use, and that they learn nothing about others.

use std::collections::BTreeMap;
use std::sync::Arc;

use pdp_spec::limits::TENANT_SPECS_DEFAULT;
use pdp_spec::remains::VnetRemains;
use pdp_spec::{
    Diagnostic, Existing, Intent, PlacedVnet, SourceFile, VirtualNetwork, check, parse,
};
use proptest::prelude::*;

const NODE: &str = "
apiVersion: pdp/v1
kind: Substrate
metadata: {name: node}
spec:
  interfaces:
    A: {device: ext-a, capacity: 1Gbps}
    B: {device: ext-b}
    C: {memif: {}}
  mux: {cpus: \"0\", power: 0.5}
  managementHost: {memory: 4Gi}
  forwardingEngines:
    fe-one: {cpus: \"1\", capacity: 1}
---
apiVersion: pdp/v1
kind: Tenant
metadata: {name: acme}
spec:
  unixUsers: [alice]
  quota: {vnets: 2, power: 0.5, cpu: 4, memory: 2Gi, vports: 8, rate: 900M, routes: 300000}
  interfaces:
    A: {vxlan: \"100-199\", udp: \"6000-6009\", locals: [192.0.2.1]}
  images: [/srv/acme]
  binds: [/srv/data, \"/srv/acme:rw\"]
  registries: [r.example/acme]
---
apiVersion: pdp/v1
kind: Tenant
metadata: {name: zeta}
spec:
  interfaces:
    A: {vxlan: \"200-299\", udp: \"6010-6019\"}
    B: {whole: true}
    C: {whole: true}
";

/// A vnet with one router and one host, with an external of its own.
fn vnet(name: &str, external: &str, power: &str) -> String {
    format!(
        "
apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {{name: {name}}}
spec:
  nodes:
    r1:
      kind: router
      interfaces: {{eth0: {{}}, eth1: {{}}}}
      dataPlane: {{power: {power}}}
    h1: {{kind: host, interfaces: {{eth0: {{}}}}}}
  externals: {{x: {external}}}
  links:
    - {{endpoints: [\"r1:eth0\", \"h1:eth0\"], rate: 100M}}
    - {{endpoints: [\"r1:eth1\", \"external:x\"], rate: 100M}}
"
    )
}

fn vxlan(vni: u32) -> String {
    format!("{{interface: A, vxlan: {{vni: {vni}, local: 192.0.2.1, remote: 192.0.2.9}}}}")
}

fn udp(local_port: u16) -> String {
    format!(
        "{{interface: A, udp: {{local: 192.0.2.1, remote: 192.0.2.9, localPort: {local_port}, \
         remotePort: 1}}}}"
    )
}

fn try_apply(text: &str, existing: &Existing) -> Result<Intent, Vec<Diagnostic>> {
    let file = SourceFile { name: "f".into(), text: text.into(), ..Default::default() };
    parse(&[file]).and_then(|documents| check(&documents, existing))
}

fn words(refused: &[Diagnostic]) -> String {
    refused.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
}

/// Returns the state after operators applied these.
#[track_caller]
fn after(texts: &[&str]) -> Existing {
    let mut existing = Existing { cpus: [0, 1].into(), ..Existing::default() };
    for text in texts {
        let intent =
            try_apply(text, &existing).unwrap_or_else(|refused| panic!("{}", words(&refused)));
        existing = Existing {
            substrate: intent.substrate,
            vnets: intent.vnets,
            tenants: intent.tenants,
            ..existing
        };
    }
    existing
}

fn as_tenant(existing: &Existing, tenant: &str) -> Existing {
    Existing { requester: Some(tenant.into()), ..existing.clone() }
}

#[track_caller]
fn refused(text: &str, existing: &Existing) -> String {
    words(&try_apply(text, existing).map(drop).expect_err("refused"))
}

#[test]
fn tenant_can_use_its_grants() {
    let node = as_tenant(&after(&[NODE]), "acme");
    try_apply(&vnet("acme.lab", &vxlan(100), "0.5"), &node).unwrap();
    try_apply(&vnet("acme.lab", &udp(6000), "0.1"), &node).unwrap();
    let zeta = as_tenant(&after(&[NODE]), "zeta");
    try_apply(&vnet("zeta.lab", "{interface: B}", "1"), &zeta).unwrap();
    try_apply(&vnet("zeta.lab", "{interface: C}", "1"), &zeta).unwrap();
}

#[test]
fn vnet_names_are_tenant_dot_name() {
    let node = after(&[NODE]);
    let good = "{interface: A, vxlan: {vni: 1, local: 192.0.2.1, remote: 192.0.2.9}}";
    for (name, said) in [
        ("lab", "name your networks acme.NAME"),
        ("zeta.lab", "name your networks acme.NAME"),
        ("none.lab", "name your networks acme.NAME"),
        ("acme", "name your networks acme.NAME"),
        ("acme.a.b", "is not a TENANT.NAME"),
        ("acme.", "is not a TENANT.NAME"),
        ("acme.A", "is not a TENANT.NAME"),
        ("acme.-", "is not a TENANT.NAME"),
    ] {
        let words = refused(&vnet(name, good, "0.1"), &as_tenant(&node, "acme"));
        assert!(words.contains(said), "{name}: {words}");
    }
    let long = format!("acme.{}", "x".repeat(60));
    let words = refused(&vnet(&long, good, "0.1"), &node);
    assert!(words.contains("63"), "{words}");
    let words = refused(&vnet("none.lab", good, "0.1"), &node);
    assert!(words.contains("tenant none does not exist"), "{words}");
    let dotted = "{apiVersion: pdp/v1, kind: Tenant, metadata: {name: a.b}}";
    assert!(refused(dotted, &node).contains("is not a DNS label"));
    for kind in ["Substrate", "Tenant"] {
        let spec = "spec: {mux: {cpus: \"0\"}}";
        let spec = if kind == "Tenant" { "spec: {}" } else { spec };
        let text =
            format!("{{apiVersion: pdp/v1, kind: {kind}, metadata: {{name: acme}}, {spec}}}");
        let words = refused(&text, &as_tenant(&node, "acme"));
        assert!(words.contains("only operators can apply a"), "{words}");
    }
}

#[test]
fn refusals_do_not_reveal_who_has_a_resource() {
    let node = NODE.replace("4Gi", "16Gi");
    let empty = after(&[&node]);
    // Another tenant and an operator use all of the rest.
    let full = after(&[
        &node,
        &vnet("zeta.lab", &vxlan(200), "0.1"),
        &vnet("zeta.two", "{interface: B}", "0.1"),
        &vnet("zeta.three", "{interface: C}", "0.1"),
        &vnet("ops", &vxlan(7), "0.1"),
        &vnet("ops-udp", &udp(7000), "0.1"),
    ]);
    for external in [
        vxlan(200),
        vxlan(201),
        vxlan(7),
        vxlan(8),
        udp(7000),
        udp(6010),
        udp(4789),
        "{interface: A}".into(),
        "{interface: B}".into(),
        "{interface: C}".into(),
        "{interface: none}".into(),
        vxlan(100).replace("192.0.2.1,", "192.0.2.2,"),
        vxlan(100).replace("remote:", "port: 7000, remote:"),
    ] {
        let text = vnet("acme.lab", &external, "0.1");
        let one = refused(&text, &as_tenant(&empty, "acme"));
        let other = refused(&text, &as_tenant(&full, "acme"));
        assert_eq!(one, other, "{external}");
        assert!(one.contains("tenant acme has no grant"), "{one}");
        for others in ["zeta", "ops", "fe-one", "memif"] {
            assert!(!one.contains(others), "{one}");
        }
    }
}

#[test]
fn full_resources_are_reported_without_their_users() {
    let node = after(&[
        &NODE.replace("4Gi", "1Gi").replace("quota: {", "quota: {} # {"),
        &vnet("zeta.lab", &vxlan(200), "0.7").replace("100M}\n", "800M, guarantee: 800M}\n"),
    ]);
    let acme = as_tenant(&node, "acme");
    for (text, said) in [
        (
            vnet("acme.lab", &vxlan(100), "0.4"),
            "power 0.4 exceeds the free power of the forwarding engines",
        ),
        (
            vnet("acme.lab", &vxlan(100), "0.1")
                .replace("rate: 100M", "rate: 300M, guarantee: 300M"),
            "guarantee 300Mbps exceeds the free capacity of interface A",
        ),
        (
            vnet("acme.lab", &vxlan(100), "0.1")
                .replace("dataPlane:", "resources: {memory: 600Mi}\n      dataPlane:"),
            "the machine has too little memory for these guests",
        ),
    ] {
        let words = refused(&text, &acme);
        assert!(words.contains(said), "{words}");
        // The error reveals neither the users of the rest, nor how much is left.
        for others in ["zeta", "lab/r1 ", "fe-one", "0.3", "200M", "1Gi"] {
            assert!(!words.contains(others), "{others} in {words}");
        }
        let operator = refused(&text, &node);
        assert_ne!(words, operator, "an operator is told more");
    }
}

#[test]
fn granted_keys_are_exclusive_to_the_tenant() {
    // An operator's vnet can't use a tenant's grant, and
    // a grant can't cover what an operator's vnet uses.
    let node = after(&[NODE]);
    for external in [vxlan(150), udp(6001), udp(4789), "{interface: B}".into()] {
        let words = refused(&vnet("ops", &external, "0.1"), &node);
        assert!(words.contains("granted to tenant"), "{words}");
    }
    let node = after(&[NODE, &vnet("ops", &vxlan(7), "0.1")]);
    let wider = "{apiVersion: pdp/v1, kind: Tenant, metadata: {name: third}, \
                 spec: {interfaces: {A: {vxlan: \"1-50\"}}}}";
    let words = refused(wider, &node);
    assert!(words.contains("vnet ops has an external x"), "{words}");
}

/// Keys of every kind can be granted, are denied to others, and nothing else is granted.
#[test]
fn grants_cover_every_key_kind() {
    let ends = "local: 192.0.2.1, remote: 192.0.2.9";
    let tunnel = |kind: &str, key: &str| match kind {
        "vlan" => format!("{{interface: D, vlan: {{{key}}}}}"),
        _ => format!("{{interface: D, {kind}: {{{key}, {ends}}}}}"),
    };
    let keys = [
        ("vxlan", "vni: 5", "vni: 6"),
        ("udp", "localPort: 5, remotePort: 1", "localPort: 6, remotePort: 1"),
        ("gre", "key: 5", "key: 6"),
        ("geneve", "vni: 5", "vni: 6"),
        ("vlan", "id: 5", "id: 6"),
    ];
    let tenant = |name: &str, keys: &str| {
        format!(
            "{{apiVersion: pdp/v1, kind: Tenant, metadata: {{name: {name}}}, \
             spec: {{interfaces: {{D: {{{keys}, locals: [192.0.2.1]}}}}}}}}"
        )
    };
    let node = NODE.replacen("interfaces:", "interfaces:\n    D: {generator: {}}", 1);
    for (kind, own, others) in keys {
        let given = after(&[&node, &tenant("third", &format!("{kind}: 5"))]);
        let third = as_tenant(&given, "third");
        let mine = vnet("third.lab", &tunnel(kind, own), "0.1");
        try_apply(&mine, &third).unwrap_or_else(|refused| panic!("{kind}: {}", words(&refused)));
        for other in [
            tunnel(kind, others),
            tunnel(kind, own).replace("192.0.2.1,", "192.0.2.2,"),
            tunnel(kind, own).replace("vni: 5", "vni: 5, port: 99"),
            tunnel(kind, own).replace("key: 5,", ""),
        ] {
            if other == tunnel(kind, own) {
                continue;
            }
            let words = refused(&vnet("third.lab", &other, "0.1"), &third);
            assert!(words.contains("tenant third has no grant for"), "{kind} {other}: {words}");
        }
        for (kind_b, own_b, _) in keys.iter().filter(|(other, ..)| *other != kind) {
            let words = refused(&vnet("third.lab", &tunnel(kind_b, own_b), "0.1"), &third);
            assert!(words.contains("tenant third has no grant for"), "{words}");
        }
        // Neither an operator's vnet nor another tenant's may use it.
        let words = refused(&vnet("ops", &tunnel(kind, own), "0.1"), &given);
        assert!(words.contains("granted to tenant third"), "{words}");
        try_apply(&vnet("ops", &tunnel(kind, others), "0.1"), &given).unwrap();
        let words = refused(&tenant("fourth", &format!("{kind}: \"1-9\"")), &given);
        assert!(
            words.contains(&format!("{kind} 5 on interface D is granted to tenant third")),
            "{words}"
        );
    }
    // The UDP port of a kind is not available to Ethernet in UDP, nor to another kind.
    let given = after(&[&node, &tenant("third", "geneve: 5")]);
    let udp = tunnel("udp", "localPort: 6081, remotePort: 1");
    let vxlan = tunnel("vxlan", "vni: 1, port: 6081");
    for external in [udp, vxlan] {
        let words = refused(&vnet("ops", &external, "0.1"), &given);
        assert!(words.contains("granted to tenant third"), "{words}");
    }
    let words = refused(&tenant("third", "udp: 6081"), &after(&[&node]));
    assert!(words.contains("udp includes port 6081, which belongs to geneve"), "{words}");
    for (keys, said) in [("vlan: 4095", "vlan 4095-4095"), ("geneve: 16777216", "16777215")] {
        let words = refused(&tenant("third", keys), &after(&[&node]));
        assert!(words.contains(said), "{words}");
    }
}

#[test]
fn overlapping_grants_are_refused() {
    let node = after(&[NODE]);
    let third = |spec: &str| {
        format!("{{apiVersion: pdp/v1, kind: Tenant, metadata: {{name: third}}, spec: {spec}}}")
    };
    for (spec, said) in [
        (
            "{interfaces: {A: {vxlan: \"150-160\"}}}",
            "vxlan 150 on interface A is granted to tenant acme",
        ),
        (
            "{interfaces: {A: {vxlan: \"1-99,299\"}}}",
            "vxlan 299 on interface A is granted to tenant zeta",
        ),
        ("{interfaces: {A: {udp: 6009}}}", "udp 6009 on interface A is granted to tenant acme"),
        ("{interfaces: {B: {whole: true}}}", "the whole interface B is granted to tenant zeta"),
        ("{interfaces: {A: {udp: \"4000-5000\"}}}", "which belongs to vxlan"),
        ("{interfaces: {A: {vxlan: \"16777216\"}}}", "is not within 0 to 16777215"),
        ("{interfaces: {A: {vxlan: \"9-3\"}}}", "ends below its start"),
        ("{unixUsers: [alice]}", "unix user \"alice\" belongs to tenant acme"),
        ("{unixUsers: [root]}", "can't be a tenant"),
        ("{unixUsers: ['0']}", "can't be a tenant"),
        ("{images: [srv]}", "is not an absolute path"),
        ("{images: [/srv/../etc]}", "is not an absolute path"),
        ("{binds: [/srv/../etc]}", "is not an absolute path"),
        ("{binds: [\"srv:rw\"]}", "is not an absolute path"),
    ] {
        let words = refused(&third(spec), &node);
        assert!(words.contains(said), "{spec}: {words}");
    }
    let fits = third("{interfaces: {A: {vxlan: \"1-99,300\", udp: 7000}, B: {vxlan: 100}}}");
    try_apply(&fits, &node).unwrap();
    // Two tenants in one change conflict as well; a tenant
    // that is applied again does not conflict with itself.
    let pair = third("{unixUsers: [eve]}")
        + "\n---\n"
        + &third("{unixUsers: [eve]}").replace("third", "fourth");
    assert!(refused(&pair, &node).contains("unix user \"eve\" belongs to tenant"), "{pair}");
    try_apply(NODE, &node).unwrap();
}

#[test]
fn quota_spans_all_vnets_of_a_tenant() {
    let node = after(&[NODE, &vnet("acme.one", &vxlan(100), "0.3")]);
    let two = |power: &str| vnet("acme.two", &vxlan(101), power);
    try_apply(&two("0.2"), &node).unwrap();
    // Limits apply to operators too, in a tenant's vnet.
    for node in [&node, &as_tenant(&node, "acme")] {
        let words = refused(&two("0.25"), node);
        let said = "power: 0.25 exceeds tenant acme's quota of 0.5, of which its other virtual \
                    networks use 0.3";
        assert!(words.contains(said), "{words}");
    }
    // The same vnet counts once when applied again; a changed one counts anew.
    try_apply(&vnet("acme.one", &vxlan(100), "0.5"), &node).unwrap();
    let both = two("0.1") + "---" + &vnet("acme.three", &vxlan(102), "0.1");
    for (text, said) in [
        (both, "vnets: 2 exceeds tenant acme's quota of 2"),
        (two("0.1").replace("eth1: {}", "eth1: {}, e2: {}, e3: {}, e4: {}"), "vports: 6 exceeds"),
        (
            two("0.1").replace("100M", "400M"),
            "rate: 800Mbps exceeds tenant acme's quota of 900Mbps",
        ),
        (
            two("0.1").replace("dataPlane:", "resources: {cpu: 3}\n      dataPlane:"),
            "cpu: 3.5 exceeds",
        ),
        (two("0.1").replace("dataPlane:", "resources: {memory: 2Gi}\n      dataPlane:"), "memory"),
        (
            two("0.1").replace("dataPlane:", "resources: {routes: 250000}\n      dataPlane:"),
            "routes: 250000 exceeds tenant acme's quota of 300000",
        ),
        (two("0.1").replace("\"external:x\"], rate: 100M", "\"external:x\"]"), "no rate, but"),
    ] {
        let words = refused(&text, &node);
        assert!(words.contains(said), "{said}: {words}");
    }
    // The spec itself, with its files.
    let large = |files: usize| {
        let file = "x".repeat(1 << 20);
        let files: String =
            (0..files).map(|n| format!("/tmp/f{n}: {{content: {file}}}, ")).collect();
        two("0.1").replace("kind: host,", &format!("kind: host, files: {{{files}}},"))
    };
    let bounded = after(&[NODE, &NODE.replace("routes: 300000", "routes: 300000, specs: 2Mi")]);
    try_apply(&large(1), &bounded).unwrap();
    let said = refused(&large(2), &bounded);
    assert!(said.contains("exceeds tenant acme's quota of 2Mi, of which"), "{said}");
    // A default limit applies without a quota, too.
    let mut full = node.clone();
    let (mut one, shares) =
        (VirtualNetwork::clone(&full.vnets["acme.one"]), full.vnets["acme.one"].shares());
    let host = one.spec.nodes.get_mut("h1").unwrap();
    host.env.insert("LARGE".into(), "x".repeat(TENANT_SPECS_DEFAULT as usize));
    let one = Arc::new(PlacedVnet::new(one, shares.clone()));
    Arc::make_mut(&mut full.vnets).insert("acme.one".into(), one);
    let said = refused(&two("0.1"), &full);
    assert!(said.contains("exceeds tenant acme's quota of 64Mi, of which"), "{said}");

    // Resources being removed count until they are gone, and a change that adds nothing is free.
    let one = &node.vnets["acme.one"];
    let mut remains = VnetRemains::default();
    remains.note(one, None, 100);
    let deleted = Existing {
        vnets: Arc::default(),
        remains: Arc::new([("acme.old".to_owned(), remains.clone())].into()),
        now_s: 141,
        ..node.clone()
    };
    for node in [&deleted, &as_tenant(&deleted, "acme")] {
        let words = refused(&two("0.25"), node);
        let said = "power: 0.25 exceeds tenant acme's quota of 0.5, of which its other virtual \
                    networks use 0; networks being removed still use 0.3: acme.old (for 41 s)";
        assert!(words.contains(said), "{words}");
    }
    let both = two("0.1") + "---" + &vnet("acme.three", &vxlan(102), "0.1");
    let words = refused(&both, &deleted);
    assert!(words.contains("vnets: 2 exceeds tenant acme's quota of 2"), "{words}");
    assert!(words.contains("networks being removed still use 1: acme.old"), "{words}");
    try_apply(&two("0.2"), &deleted).unwrap();
    // In the same network, its nodes reuse what remains.
    let again = Existing {
        remains: Arc::new([("acme.one".to_owned(), remains)].into()),
        ..deleted.clone()
    };
    try_apply(&vnet("acme.one", &vxlan(100), "0.5"), &again).unwrap();
    let renamed = vnet("acme.one", &vxlan(100), "0.3").replace("r1", "r9");
    assert!(refused(&renamed, &again).contains("networks being removed still use 0.3: acme.one"));
    let gone = Existing { remains: Arc::default(), ..deleted };
    try_apply(&two("0.25"), &gone).unwrap();

    // A quota below the usage, or a grant without what is used, is rejected.
    let lower = NODE.replace("power: 0.5, cpu", "power: 0.2, cpu");
    assert!(refused(&lower, &node).contains("power: 0.2 is below the 0.3"), "told");
    let narrower = NODE.replace("100-199", "101-199");
    assert!(refused(&narrower, &node).contains("tenant acme has no grant"));
    try_apply(&NODE.replace("quota: {", "quota: {} # {"), &node).unwrap();
}

/// Every resource that others lose once somebody takes it has a
/// default limit per tenant. Errors don't say who has the rest.
#[test]
fn every_shared_resource_has_a_tenant_quota() {
    let image = "kind: host, image: {ociLayout: '/srv/acme/IMAGE'},";
    let pulled = "kind: host, image: 'r.example/acme/one:IMAGE',";
    let memif = "{power: 0.1, program: {run: x, attach: memif}}";
    for (quota, was, is, said) in [
        (
            "vnets: 1",
            "",
            "",
            "vnets: 1 exceeds tenant acme's quota of 1, of which its other virtual \
                              networks use 1",
        ),
        ("nodes: 3", "", "", "nodes: 2 exceeds tenant acme's quota of 3, of which"),
        ("processes: 700", "", "", "processes: 592 exceeds tenant acme's quota of 700, of which"),
        ("logs: 90Mi", "", "", "logs: 48Mi exceeds tenant acme's quota of 90Mi, of which"),
        (
            "volumes: 150Mi",
            "kind: host,",
            "kind: host, volumes: [\"a:/a\", {source: b, target: /b, size: 40Mi}],",
            "volumes: 104Mi exceeds tenant acme's quota of 150Mi, of which",
        ),
        ("descriptors: 17", "", "", "descriptors: 9 exceeds tenant acme's quota of 17, of which"),
        ("regions: 30", "{power: 0.1}", memif, "regions: 34 exceeds tenant acme's quota of 30"),
        ("ociImages: 1", "kind: host,", image, "ociImages: 1 exceeds tenant acme's quota of 1"),
        ("ociImages: 1", "kind: host,", pulled, "ociImages: 1 exceeds tenant acme's quota of 1"),
        ("power: 0.1", "{power: 0.1}", "{power: 0.001, guests: 60}", "power: 0.06 exceeds"),
        // A host's routes count for nobody.
        (
            "memory: 1500Mi",
            "kind: host,",
            "kind: host, resources: {routes: 16000000},",
            "memory: 981552Ki exceeds tenant acme's quota of 1500Mi",
        ),
        (
            "memory: 4Gi",
            "dataPlane: {power",
            "resources: {routes: 16000000}\n      dataPlane: {power",
            "exceeds tenant acme's quota of 4Gi",
        ),
    ] {
        let of = |name: &str, vni| vnet(name, &vxlan(vni), "0.1").replace(was, is);
        let first = match was {
            "" => vnet("acme.one", &vxlan(100), "0.1"),
            _ => {
                of("acme.one", 100).replace("16000000", "1000").replace("guests: 60", "guests: 50")
            }
        };
        let own = match was {
            "" => vnet("acme.two", &vxlan(101), "0.1"),
            _ => of("acme.two", 101).replace("IMAGE", "other"),
        };
        let node = after(&[&roomy(quota)]);
        let one = after(&[&roomy("vnets: 9")]);
        assert!(try_apply(&own, &as_tenant(&one, "acme")).is_ok(), "{quota}: it is good itself");
        let node = match try_apply(&first, &node) {
            Ok(_) => after(&[&roomy(quota), &first]),
            // Rejected by itself, too.
            Err(_) => node,
        };
        let words = refused(&own, &as_tenant(&node, "acme"));
        assert!(words.contains(said), "{quota}: {words}");
    }
}

/// The PdP node, with a quota of acme's that only limits what is named.
fn roomy(quota: &str) -> String {
    let large = "routes: 64000000";
    NODE.replace("4Gi", "1Ti").replace(
        "quota: {vnets: 2, power: 0.5, cpu: 4, memory: 2Gi, vports: 8, rate: 900M, routes: 300000}",
        &match quota.starts_with("memory") {
            true => format!("quota: {{{quota}, {large}}}"),
            false => format!("quota: {{{quota}, {large}, memory: 64Gi}}"),
        },
    )
}

#[test]
fn tenant_without_quota_gets_the_default() {
    let node = NODE.replace("4Gi", "1Ti").replace("quota: {", "quota: {} # {");
    let node = after(&[&node]);
    let hosts = |count: usize, what: &str| {
        let hosts: String =
            (0..count).map(|n| format!("    h{n}: {{kind: host{what}}}\n")).collect();
        format!(
            "apiVersion: pdp/v1\nkind: VirtualNetwork\nmetadata: {{name: acme.lab}}\nspec:\n  \
             nodes:\n{hosts}"
        )
    };
    let small = ", resources: {cpu: 0.01, memory: 4Mi, processes: 8}";
    try_apply(&hosts(100, small), &node).unwrap();
    for (text, said) in [
        (hosts(129, small), "nodes: 129 exceeds tenant acme's quota of 128"),
        (hosts(2, ", resources: {memory: 5Gi}"), "exceeds tenant acme's quota of 8Gi"),
        (hosts(2, ", resources: {processes: 60000}"), "exceeds tenant acme's quota of 16384"),
        (
            hosts(2, ", volumes: [{source: a, target: /a, size: 520Mi}]"),
            "volumes: 1040Mi exceeds tenant acme's quota of 1Gi",
        ),
        (hosts(2, ", resources: {cpu: 9}"), "cpu: 18 exceeds tenant acme's quota of 16"),
    ] {
        let words = refused(&text, &as_tenant(&node, "acme"));
        assert!(words.contains(said), "{said}: {words}");
    }
}

/// The machine's limits on resources without shares: errors
/// have numbers for an operator, and none for a tenant.
#[test]
fn descriptors_and_regions_of_the_node_are_not_exceeded() {
    let limit = |limit| {
        let node = after(&[&roomy("vnets: 9")]);
        Existing {
            descriptors: Some(pdp_spec::Descriptors { limit, unchanged_vnets: 100 }),
            ..node
        }
    };
    // Nine: three interfaces, two nodes with their TAP helpers, a mirror and a guest.
    let text = vnet("acme.lab", &vxlan(100), "0.1");
    try_apply(&text, &limit(109)).unwrap();
    let words = refused(&text, &limit(108));
    for said in ["9 file descriptors", "exceed 8", "may open 108", "keeps 100", "LimitNOFILE"] {
        assert!(words.contains(said), "{said}: {words}");
    }
    let words = refused(&text, &as_tenant(&limit(108), "acme"));
    assert!(words.contains("can't take so many interfaces and processes"), "{words}");
    assert!(!words.contains("108") && !words.contains("100 "), "{words}");

    let memif = "{power: 0.1, guests: 64, program: {run: x, attach: memif}}";
    let interfaces: String = (0..20).map(|n| format!("e{n}: {{}}, ")).collect();
    let wide = vnet("ops", &vxlan(7), "0.1")
        .replace("{power: 0.1}", memif)
        .replace("eth1: {}}", &format!("eth1: {{}}, {interfaces}}}"));
    let words = refused(&wide, &limit(100_000));
    assert!(words.contains("memory regions exceed the 16384 that the mux can map"), "{words}");
}

#[test]
fn tenant_images_come_from_granted_directories() {
    let node = as_tenant(&after(&[NODE]), "acme");
    let with = |image: &str| {
        vnet("acme.lab", &vxlan(100), "0.1")
            .replace("kind: host,", &format!("kind: host, image: {image},"))
    };
    for good in [
        "{rootfs: /srv/acme/x}",
        "{ociLayout: '/srv/acme/x:latest'}",
        "{host: true}",
        "{archive: /srv/acme/x.tar}",
        "'r.example/acme/frr:10'",
        "{pull: r.example/acme}",
    ] {
        try_apply(&with(good), &node).unwrap_or_else(|r| panic!("{good}: {}", words(&r)));
    }
    for bad in [
        "{rootfs: /}",
        "{rootfs: /srv}",
        "{rootfs: /srv/acmeother}",
        "{rootfs: /srv/acme/../zeta}",
        "{rootfs: srv/acme}",
        "{ociLayout: /srv/zeta}",
        "{archive: /srv/zeta.tar}",
        "frr",
        "r.example/acmes/frr",
        "{pull: 'r.example:5000/acme/frr'}",
    ] {
        let words = refused(&with(bad), &node);
        let said = [
            "image is not below a directory",
            "absolute",
            "is in no registry that the tenant may use",
        ];
        assert!(said.iter().any(|said| words.contains(said)), "{bad}: {words}");
    }
    let program = vnet("acme.lab", &vxlan(100), "0.1").replace(
        "{power: 0.1}",
        "{power: 0.1, program: {run: x, attach: memif, image: {rootfs: /etc}}}",
    );
    assert!(refused(&program, &node).contains("image is not below a directory"));
}

#[test]
fn tenant_binds_come_from_granted_directories() {
    let node = as_tenant(&after(&[NODE]), "acme");
    let with = |bind: &str| {
        vnet("acme.lab", &vxlan(100), "0.1")
            .replace("kind: host,", &format!("kind: host, binds: [{bind}],"))
    };
    for good in [
        "\"/srv/data/x:/x:ro\"",
        "\"/srv/data:/x:ro\"",
        "\"/srv/acme/x:/x\"",
        "{source: /srv/data, target: /x, readOnly: true}",
    ] {
        try_apply(&with(good), &node).unwrap_or_else(|r| panic!("{good}: {}", words(&r)));
    }
    for (bad, why) in [
        (
            "\"/srv:/x:ro\"",
            "/srv is not below a directory that the tenant may bind (it may bind /srv/data, \
             /srv/acme:rw)",
        ),
        ("\"/etc/shadow:/x:ro\"", "is not below a directory that the tenant may bind"),
        ("\"/srv/dataother:/x:ro\"", "is not below a directory that the tenant may bind"),
        ("\"/srv/data/../acme:/x:ro\"", "is not an absolute path without .."),
        ("\"/srv/data/..:/x:ro\"", "is not an absolute path without .."),
        ("\"srv/data:/x:ro\"", "is not an absolute path without .."),
        (
            "\"/srv/data:/x\"",
            "is writable, but the tenant may only read it (write /srv/data:/x:ro)",
        ),
        ("\"/srv/data:/x:rw\"", "is writable, but the tenant may only read it"),
        ("{source: /srv/data, target: /x}", "is writable, but the tenant may only read it"),
    ] {
        let words = refused(&with(bad), &node);
        assert!(words.contains(why), "{bad}: {words}");
    }
    // Nor by an operator, in a tenant's vnet; other vnets belong to the operators.
    assert!(refused(&with("\"/etc:/x:ro\""), &after(&[NODE])).contains("is not below a directory"));
}

#[test]
fn tenants_cannot_have_privileged_nodes() {
    let text = |name: &str, what: &str| {
        vnet(name, &vxlan(100), "0.1").replace("kind: host,", &format!("kind: host, {what},"))
    };
    let node = as_tenant(&after(&[NODE]), "acme");
    let privileged = "privileged: true";
    let words = refused(&text("acme.lab", privileged), &node);
    assert!(words.contains("tenants can't have privileged nodes"), "{words}");
    assert!(try_apply(&text("acme.lab", "privileged: false"), &node).is_ok());
    // Nor by an operator, in a tenant's vnet.
    assert!(refused(&text("acme.lab", privileged), &after(&[NODE])).contains("privileged"));
    let own = text("lab", privileged).replace("vni: 100", "vni: 999");
    try_apply(&own, &after(&[NODE])).unwrap_or_else(|report| panic!("{}", self::words(&report)));
}

#[test]
fn management_requires_the_tenants_grant() {
    let text = |name: &str, management: &str| {
        let with = format!("kind: host, management: {management},");
        vnet(name, &vxlan(100), "0.1").replace("kind: host,", &with)
    };
    let lab = |management: &str| text("acme.lab", management);
    let granted = |grant: &str| {
        let with = format!("  images: [/srv/acme]\n  management: {grant}\n");
        NODE.replace("  images: [/srv/acme]\n", &with)
    };
    let ports = "{outside: false, ports: [\"20000:80\"]}";

    let none = as_tenant(&after(&[NODE]), "acme");
    assert!(refused(&lab("{}"), &none).contains("tenant acme has no grant for management.outside"));
    assert!(refused(&lab(ports), &none).contains("it has none; ask an operator"));

    let some = as_tenant(&after(&[&granted("{ports: \"20000-20099\"}")]), "acme");
    assert!(try_apply(&lab(ports), &some).is_ok());
    assert!(
        refused(&lab("{ports: [\"20000:80\"]}"), &some).contains("no grant for management.outside")
    );
    for bad in ["20100:80", "80:80", "0.0.0.0:20000:80", "192.0.2.1:20000:80"] {
        let words = refused(&lab(&format!("{{outside: false, ports: [\"{bad}\"]}}")), &some);
        assert!(words.contains("it has 20000-20099 at 127.0.0.1"), "{bad}: {words}");
    }
    // Also by an operator in its vnet.
    let operator = after(&[&granted("{ports: \"20000-20099\"}")]);
    assert!(refused(&lab("{}"), &operator).contains("no grant for management.outside"));

    let more = "{outside: true, ports: \"20000-20099\", addresses: [0.0.0.0]}";
    let all = as_tenant(&after(&[&granted(more)]), "acme");
    for good in ["20000:80", "0.0.0.0:20000:80", "192.0.2.1:20000:80"] {
        let spec = lab(&format!("{{ports: [\"{good}\"]}}"));
        try_apply(&spec, &all).unwrap_or_else(|report| panic!("{good}: {}", words(&report)));
    }

    // Nobody gets root's ports, nor another tenant's; and operators can't use them.
    assert!(refused(&granted("{ports: \"80\"}"), &Existing::default()).contains("1024"));
    let both =
        format!("{}  management: {{ports: \"20099\"}}\n", granted("{ports: \"20000-20099\"}"));
    assert!(refused(&both, &Existing::default()).contains("port 20099 is granted to tenant"));
    let own = text("lab", ports).replace("vni: 100", "vni: 999");
    assert!(refused(&own, &operator).contains("is granted to tenant acme (20000-20099)"));
    let before = after(&[NODE, &own]);
    let words = refused(&granted("{ports: \"20000-20099\"}"), &before);
    assert!(
        words.contains("vnet lab, node h1: port 20000:80 is granted to tenant acme"),
        "{words}"
    );

    // A duplicate is rejected, without a name if the tenant may not know it.
    let twice = lab("{outside: false, ports: [\"20000:80\", \"20000:81\"]}");
    assert!(refused(&twice, &some).contains("port 20000:81 is taken by 20000:80 of acme.lab/h1"));
    let other = text("other", ports).replace("vni: 100", "vni: 999");
    let words = refused(&other, &before);
    assert!(words.contains("is taken by 20000:80 of lab/h1"), "{words}");
}

proptest! {
    /// Whatever others use, a tenant's change gets the
    /// same answer, as long as nothing shared is full.
    #[test]
    fn other_tenants_do_not_change_the_answer(
        mine in 90u32..310,
        theirs in proptest::collection::btree_set(200u32..300, 0..4),
        operators in proptest::collection::btree_set(300u32..400, 0..3),
    ) {
        let roomy = NODE.replace("4Gi", "1Ti");
        let mut texts = vec![roomy.clone()];
        for vni in theirs {
            texts.push(vnet(&format!("zeta.v{vni}"), &vxlan(vni), "0.01"));
        }
        for vni in operators {
            texts.push(vnet(&format!("ops{vni}"), &vxlan(vni), "0.01"));
        }
        let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
        let text = vnet("acme.lab", &vxlan(mine), "0.1");
        let answer = |existing: Existing| {
            let answer = try_apply(&text, &as_tenant(&existing, "acme"));
            answer.map(|intent| BTreeMap::from([("lab", intent.vnets["acme.lab"].clone())]))
        };
        prop_assert_eq!(answer(after(&texts)), answer(after(&[&roomy])));
    }
}
