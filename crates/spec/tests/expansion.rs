//! An expanded spec equals the same spec written by hand.
//! Errors have the original positions, and the size is bounded.

use std::fmt::Write as _;
use std::time::Instant;

use pdp_spec::{Existing, Object, SourceFile, VirtualNetworkSpec, check, parse};
use proptest::prelude::*;

fn source(text: &str) -> SourceFile {
    SourceFile { name: "lab.yaml".into(), text: text.into(), ..SourceFile::default() }
}

fn lab(spec: &str) -> String {
    format!("apiVersion: pdp/v1\nkind: VirtualNetwork\nmetadata: {{name: lab}}\nspec:\n{spec}")
}

/// Returns a spec as stored, without the defaults that a check adds.
fn try_spec(text: &str) -> Result<VirtualNetworkSpec, String> {
    let documents = parse(&[source(&lab(text))])
        .map_err(|wrong| wrong.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))?;
    match &documents[0].object {
        Object::VirtualNetwork(vnet) => Ok(vnet.spec.clone()),
        other => panic!("{other:?}"),
    }
}

#[track_caller]
fn spec(text: &str) -> VirtualNetworkSpec {
    try_spec(text).unwrap_or_else(|wrong| panic!("{wrong}"))
}

#[track_caller]
fn same(short: &str, long: &str) {
    assert_eq!(spec(short), spec(long));
}

#[track_caller]
fn refused(text: &str, expected: &str) {
    assert_eq!(try_spec(text).expect_err("refused"), expected);
}

/// A data plane of another kind inherits nothing from the
/// one that it replaces; one without a kind keeps it.
#[test]
fn data_plane_of_another_kind_inherits_nothing() {
    same(
        "
  kinds: {router: {dataPlane: {power: 0.2, guests: 2, kernelHooks: ignore}}}
  groups:
    fast: {dataPlane: {kind: fastpath, puntLimits: {local: {pps: 5}}}}
    slow: {dataPlane: {kind: parallel}}
  nodes:
    r1: {kind: router, group: fast}
    r2: {kind: router, group: fast, dataPlane: {kernelHooks: ignore}}
    r3: {kind: router, group: slow}
    r[4-5]: {kind: router, group: fast, dataPlane: {kind: parallel, guests: '{n}'}}
",
        "
  nodes:
    r1: {kind: router, dataPlane: {kind: fastpath, puntLimits: {local: {pps: 5}}}}
    r2:
      kind: router
      dataPlane: {kind: fastpath, kernelHooks: ignore, puntLimits: {local: {pps: 5}}}
    r3: {kind: router, dataPlane: {power: 0.2, guests: 2, kernelHooks: ignore}}
    r4: {kind: router, dataPlane: {guests: 4}}
    r5: {kind: router, dataPlane: {guests: 5}}
",
    );
}

#[test]
fn nearest_wins() {
    same(
        "
  defaults: {kind: host, env: {A: defaults, B: defaults, C: defaults, D: defaults}, commands: [one, two]}
  kinds: {router: {env: {B: kind}, dataPlane: {power: 0.2, guests: 2}}}
  groups:
    edge: {kind: router, env: {C: group, name: '{name}'}, dataPlane: {power: 0.3}, commands: [three]}
  nodes:
    r1: {group: edge, env: {D: node}}
    h1:
    h2: {env: null, commands: []}
    r2: {kind: router, env: {A: null}, dataPlane: null}
",
        "
  nodes:
    r1:
      kind: router
      env: {A: defaults, B: kind, C: group, D: node, name: r1}
      dataPlane: {power: 0.3, guests: 2}
      commands: [three]
    h1: {kind: host, env: {A: defaults, B: defaults, C: defaults, D: defaults}, commands: [one, two]}
    h2: {kind: host}
    r2: {kind: router, env: {B: kind, C: defaults, D: defaults}, commands: [one, two]}
",
    );
}

#[test]
fn single_values_are_replaced_as_a_whole() {
    same(
        "
  defaults:
    kind: router
    image: {ociLayout: /srv/a, reference: x}
    files: {/etc/a: {content: a, mode: '0600'}, /etc/b: {content: b}}
    dataPlane: {power: 0.2, program: {attach: tap, run: one}}
  nodes:
    r1:
      image: {rootfs: /srv/b}
      files: {/etc/a: {content: c}}
      dataPlane: {program: {attach: memif, run: two}}
",
        "
  nodes:
    r1:
      kind: router
      image: {rootfs: /srv/b}
      files: {/etc/a: {content: c}, /etc/b: {content: b}}
      dataPlane: {power: 0.2, program: {attach: memif, run: two}}
",
    );
}

#[test]
fn links_have_defaults_and_groups() {
    same(
        "
  nodes: {}
  linkDefaults: {delay: 1ms, loss: 0.1%, at: {'a:e': {rate: 1M}}}
  linkGroups: {wan: {delay: 20ms, rate: 10M}}
  links:
    - {endpoints: ['a:e', 'b:e']}
    - {endpoints: ['c:e', 'd:e'], group: wan, rate: 5M, loss: null, at: null}
",
        "
  nodes: {}
  links:
    - {endpoints: ['a:e', 'b:e'], delay: 1ms, loss: 0.1%, at: {'a:e': {rate: 1M}}}
    - {endpoints: ['c:e', 'd:e'], delay: 20ms, rate: 5M}
",
    );
}

#[test]
fn ranges_expand_nodes_interfaces_externals_and_links() {
    same(
        "
  nodes:
    R[09-10]: {kind: router, interfaces: {'eth[0-1]': {addresses: ['10.{n}.{i}.1/24'], mtu: '{n+1400}'}}}
    p[1-2]h[1-2]: {kind: host, env: {ID: '{n*10+m}'}}
    sw: {kind: host, interfaces: {'eth[1-2]': {addresses: ['10.0.{i}.9/24']}, 'odd[': {}}, env: {RAW: '{n}'}}
  externals:
    out[1-2]: {interface: A, vxlan: {vni: '{n+100}', local: 192.0.2.1, remote: '192.0.2.{n+10}'}}
  links:
    - {endpoints: ['R[09-10]:eth0', 'sw:eth{n-8}']}
    - {endpoints: ['a[1-2]:e[1-2]', 'b{m}:e{n}'], name: 'a{n}-b{m}', at: {'b{m}:e{n}': {rate: 1M}}}
    - {endpoints: ['c[1-2]:e', 'external:out[5-6]']}
    - {endpoints: ['R9:e', 'h[1-3]:eth0'], segment: {}}
    - {endpoints: ['x:{n}', 'y:e']}
",
        "
  nodes:
    R09: {kind: router, interfaces: {eth0: {addresses: [10.9.0.1/24], mtu: 1409}, eth1: {addresses: [10.9.1.1/24], mtu: 1409}}}
    R10: {kind: router, interfaces: {eth0: {addresses: [10.10.0.1/24], mtu: 1410}, eth1: {addresses: [10.10.1.1/24], mtu: 1410}}}
    p1h1: {kind: host, env: {ID: '11'}}
    p1h2: {kind: host, env: {ID: '12'}}
    p2h1: {kind: host, env: {ID: '21'}}
    p2h2: {kind: host, env: {ID: '22'}}
    sw: {kind: host, interfaces: {eth1: {addresses: [10.0.1.9/24]}, eth2: {addresses: [10.0.2.9/24]}, 'odd[': {}}, env: {RAW: '{n}'}}
  externals:
    out1: {interface: A, vxlan: {vni: 101, local: 192.0.2.1, remote: 192.0.2.11}}
    out2: {interface: A, vxlan: {vni: 102, local: 192.0.2.1, remote: 192.0.2.12}}
  links:
    - {endpoints: ['R09:eth0', 'sw:eth1']}
    - {endpoints: ['R10:eth0', 'sw:eth2']}
    - {endpoints: ['a1:e1', 'b1:e1'], name: a1-b1, at: {'b1:e1': {rate: 1M}}}
    - {endpoints: ['a1:e2', 'b2:e1'], name: a1-b2, at: {'b2:e1': {rate: 1M}}}
    - {endpoints: ['a2:e1', 'b1:e2'], name: a2-b1, at: {'b1:e2': {rate: 1M}}}
    - {endpoints: ['a2:e2', 'b2:e2'], name: a2-b2, at: {'b2:e2': {rate: 1M}}}
    - {endpoints: ['c1:e', 'external:out5']}
    - {endpoints: ['c2:e', 'external:out6']}
    - {endpoints: ['R9:e', 'h1:eth0', 'h2:eth0', 'h3:eth0'], segment: {}}
    - {endpoints: ['x:{n}', 'y:e']}
",
    );
}

#[test]
fn file_paths_expand_their_placeholders() {
    let text = lab("
  groups: {leaf: {files: {/etc/x: {from: 'conf/{name}'}}}}
  nodes: {'leaf[1-2]': {kind: host, group: leaf}}
");
    let source = SourceFile::read("lab.yaml", text, |path, _| Ok(path.as_bytes().to_vec()));
    let documents = parse(&[source]).unwrap_or_else(|wrong| panic!("{wrong:?}"));
    let Object::VirtualNetwork(vnet) = &documents[0].object else { panic!() };
    let content = |node: &str| vnet.spec.nodes[node].files["/etc/x"].content.clone();
    assert_eq!(content("leaf1").as_deref(), Some("conf/leaf1"));
    assert_eq!(content("leaf2").as_deref(), Some("conf/leaf2"));
}

#[test]
fn template_errors_are_reported_once_with_position() {
    refused(
        "
  defaults: {kind: host, resource: {cpu: 1}}
  nodes:
    h[1-3]: {}
",
        "lab.yaml:6:26: vnet lab: unknown key \"resource\" (did you mean resources?)",
    );
    refused(
        "
  groups:
    unused: {resources: {memory: much}}
  nodes:
    h[255-257]:
      kind: host
      interfaces: {eth0: {addresses: ['10.0.{n}.1/24', '10.{n}.0.1/24']}}
",
        "lab.yaml:7:34: vnet lab: memory \"much\" is not a number of bytes (write bytes as a number or like 256Mi or 1G)\n\
         lab.yaml:11:39: vport lab/h256:eth0: addresses[0] \"10.0.256.1/24\" is not an address with a prefix length (write an address with its prefix length like 10.0.0.1/24 or fd00::1/64)\n\
         lab.yaml:11:56: vport lab/h256:eth0: addresses[1] \"10.256.0.1/24\" is not an address with a prefix length (write an address with its prefix length like 10.0.0.1/24 or fd00::1/64)",
    );
    refused(
        "
  defaults: {kind: host}
  nodes:
    leaf[1-4]: {}
    leaf3: {}
",
        "lab.yaml:9:5: node lab/leaf3: \"leaf3\" is defined twice, by \"leaf[1-4]\" and \"leaf3\" \
         (leave it out of the range, and define shared settings by kinds or a group; for \
         placeholders, write a name like \"r[1-1]\")",
    );
    refused(
        "
  groups: {leaf: {}}
  nodes:
    a: {kind: host, group: laef}
    b[1-]: {kind: host}
    c[1-2]d[1-2]e[1-2]: {kind: host}
    f[1-2]: {kind: host, env: {X: '{n-2}'}}
  links:
    - {endpoints: ['a:e', 'b:e'], group: wan}
",
        "lab.yaml:9:5: node lab/b[1-]: [1-] in \"b[1-]\" is not a range of numbers (write a range \
         like leaf[1-40])\nlab.yaml:10:5: node lab/c[1-2]d[1-2]e[1-2]: \"c[1-2]d[1-2]e[1-2]\" has \
         3 ranges, 2 at most (write it with fewer ranges)\nlab.yaml:8:28: node lab/a: group \
         \"laef\" is not in spec.groups (did you mean leaf?)\nlab.yaml:13:42: link lab/link1: \
         group \"wan\" is not in spec.linkGroups (define it in spec.linkGroups)",
    );
    refused(
        "
  nodes: {'f[1-2]': {kind: host, env: {X: '{n-2}'}}}
",
        "lab.yaml:6:43: node lab/f1: {n-2} is not a whole number of 0 or more where n 1 (change \
         the placeholder or the range)",
    );
    refused(
        "
  kinds: {switch: {}}
  nodes: {}
",
        "lab.yaml:6:11: vnet lab: \"switch\" is not a kind of node (kinds are router and host)",
    );
}

#[test]
fn placeholder_without_range_is_refused_with_a_hint() {
    refused(
        "
  kinds: {host: {interfaces: {eth0: {addresses: ['10.0.{(n-1)%4}.1/24']}}}}
  nodes:
    h1: {kind: host}
",
        "lab.yaml:6:50: vport lab/h1:eth0: addresses[0] \"10.0.{(n-1)%4}.1/24\" is not an address \
         with a prefix length (placeholders need a range in the name: write \"r[1-4]\", or \
         \"r[1-1]\" for one)",
    );
}

#[test]
fn links_with_mismatched_ranges_are_refused() {
    refused(
        "
  nodes: {}
  links: [{endpoints: ['a[1-4]:e', 'b[1-5]:e']}]
",
        "lab.yaml:7:36: link lab/link1: endpoints have ranges of 4 and 5 numbers (they advance \
         together: make them equal, or add segment: {} if all are on one segment)",
    );
    refused(
        "
  nodes: {}
  links: [{endpoints: ['leaf[1-4]:e[1-2]', 'spine[1-2]:e[1-4]']}]
",
        "lab.yaml:7:24: link lab/link1: one endpoint has 2 ranges and another has ranges too (give \
         ranges at one end and placeholders at the others: [\"leaf[1-4]:eth[1-2]\", \
         \"spine{m}:eth{n}\"])",
    );
}

/// A small file with a huge expansion is rejected before it is expanded.
#[test]
fn huge_expansions_are_refused_before_expanding() {
    let began = Instant::now();
    refused(
        "
  nodes: {'a[1-1000000]b[1-1000000]': {kind: host}}
",
        "lab.yaml:6:11: node lab/a[1-1000000]b[1-1000000]: with \"a[1-1000000]b[1-1000000]\" there \
         are 1000000000000 nodes, 256 at most (make the range shorter)",
    );
    refused(
        "
  nodes: {h1: {kind: host, interfaces: {'e[1-1000000]': {}}}}
",
        "lab.yaml:6:41: vport lab/h1:e[1-1000000]: with \"e[1-1000000]\" there are 1000000 \
         interfaces, 256 at most (make the range shorter)",
    );
    refused(
        "
  nodes: {}
  links: [{endpoints: ['a[1-100000]:e[1-100000]', 'b{m}:e{n}']}]
",
        "lab.yaml:7:11: link lab/link1: with these endpoints there are 10000000000 links, 4096 at \
         most (make the ranges shorter)",
    );
    refused(
        "
  nodes: {}
  links: [{endpoints: ['a:e', 'a[1-100000]:e[1-100000]'], segment: {}}]
",
        "lab.yaml:7:31: link lab/link1: the segment has 10000000001 ends, 256 at most (make the ranges shorter)",
    );
    let text = format!(
        "
  defaults: {{kind: host, files: {{/etc/x: {{content: {}}}}}}}
  nodes: {{'a[1-256]': {{}}}}
",
        "x".repeat(1 << 20)
    );
    let why = try_spec(&text).unwrap_err();
    let expected = "lab.yaml:6:52: node lab/a16: expanded, the spec exceeds 16777216 bytes (use \
                    fewer or shorter values; put large files into an image)";
    assert_eq!(why, expected);
    // The expansion would take a minute or more.
    assert!(began.elapsed().as_secs() < 60);
}

/// A network like examples/fabric.yaml, written by hand.
fn fabric_by_hand(leaves: u32, spines: u32, group: bool) -> String {
    let mut text = String::from("\n  nodes:");
    for leaf in 1..=leaves {
        let _ = write!(
            text,
            "\n    leaf{leaf}: {{kind: router, env: {{AS: '{}'}}, interfaces: {{",
            65_000 + leaf
        );
        for spine in 1..=spines {
            let _ = write!(text, "eth{spine}: {{addresses: [10.{spine}.{leaf}.1/31]}}, ");
        }
        text.push_str(if group { "}, dataPlane: {power: 0.01}}" } else { "}}" });
    }
    for spine in 1..=spines {
        let _ = write!(text, "\n    spine{spine}: {{kind: router, interfaces: {{");
        for leaf in 1..=leaves {
            let _ = write!(text, "eth{leaf}: {{addresses: [10.{spine}.{leaf}.0/31]}}, ");
        }
        text.push_str("}}");
    }
    text.push_str("\n  links:");
    for leaf in 1..=leaves {
        for spine in 1..=spines {
            let _ = write!(
                text,
                "\n    - {{endpoints: ['leaf{leaf}:eth{spine}', 'spine{spine}:eth{leaf}'], delay: 1ms}}"
            );
        }
    }
    text.push('\n');
    text
}

fn fabric(leaves: u32, spines: u32, group: bool) -> String {
    let (members, groups) = match group {
        true => ("group: leaf, ", "\n  groups: {leaf: {dataPlane: {power: 0.01}}}"),
        false => ("", ""),
    };
    format!(
        "
  defaults: {{kind: router}}{groups}
  linkDefaults: {{delay: 1ms}}
  nodes:
    leaf[1-{leaves}]: {{{members}env: {{AS: '{{n+65000}}'}}, interfaces: {{'eth[1-{spines}]': {{addresses: ['10.{{i}}.{{n}}.1/31']}}}}}}
    spine[1-{spines}]: {{interfaces: {{'eth[1-{leaves}]': {{addresses: ['10.{{n}}.{{i}}.0/31']}}}}}}
  links:
    - endpoints: ['leaf[1-{leaves}]:eth[1-{spines}]', 'spine{{m}}:eth{{n}}']
"
    )
}

/// Keys and values of all kinds at all places.
fn noise() -> impl Strategy<Value = serde_json::Value> {
    use serde_json::{Value, json};
    let word = prop::sample::select(vec![
        "a[1-3]",
        "a[1-2]:e[1-2]",
        "b{m}:e{n}",
        "{n}",
        "{n-9}",
        "{name}",
        "{{n}}",
        "a[",
        "a[9-1]",
        "router",
        "host",
        "x",
        "",
        "e[1-300]",
        "[0-18446744073709551615]",
        "${n}",
        "10.0.{n}.1/24",
        "7",
    ]);
    let key = prop::sample::select(vec![
        "defaults",
        "kinds",
        "groups",
        "linkDefaults",
        "linkGroups",
        "nodes",
        "links",
        "externals",
        "interfaces",
        "endpoints",
        "group",
        "kind",
        "router",
        "a[1-3]",
        "x",
        "e[1-2]",
        "env",
        "files",
        "image",
        "segment",
        "at",
        "mtu",
        "name",
        "addresses",
        "dataPlane",
        "{name}",
    ]);
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<u32>().prop_map(Value::from),
        word.prop_map(Value::from),
    ];
    leaf.prop_recursive(6, 64, 6, move |inner| {
        let entries = prop::collection::vec((key.clone(), inner.clone()), 0..6);
        prop_oneof![
            prop::collection::vec(inner, 0..4).prop_map(|items| json!(items)),
            entries
                .prop_map(|entries| entries.into_iter().map(|(k, v)| (k.to_owned(), v)).collect()),
        ]
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn ranges_equal_their_written_out_form(
        leaves in 1u32..12, spines in 1u32..12, group in any::<bool>(),
    ) {
        let (short, long) = (fabric(leaves, spines, group), fabric_by_hand(leaves, spines, group));
        prop_assert_eq!(spec(&short), spec(&long));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    /// No panic; an accepted spec is expanded, and accepted again unchanged.
    #[test]
    fn any_spec_is_accepted_or_refused_with_positions(spec in noise()) {
        let document = serde_json::json!({
            "apiVersion": "pdp/v1", "kind": "VirtualNetwork", "metadata": {"name": "lab"}, "spec": spec,
        });
        match parse(&[source(&document.to_string())]) {
            Ok(documents) => {
                let object = &documents[0].object;
                let again = parse(&[source(&serde_json::to_string(object).unwrap())]);
                prop_assert_eq!(&again.expect("it is plain")[0].object, object);
                let _ = check(&documents, &Existing::default());
            }
            Err(wrong) => prop_assert!(wrong.iter().all(|wrong| wrong.line > 0), "{:?}", wrong),
        }
    }
}
