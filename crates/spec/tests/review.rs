//! First mistakes of newcomers, from a review of first
//! use. Each error has the object, the value and advice.

use pdp_spec::{Existing, SourceFile, Substrate, check, parse};

/// The lab of docs/first-lab.md.
const LAB: &str = r#"apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {name: lab}
spec:
  nodes:
    r1:
      kind: router
      interfaces:
        eth0: {addresses: [10.1.0.1/24]}
        eth1: {addresses: [10.2.0.1/24]}
    h1: {kind: host, interfaces: {eth0: {addresses: [10.1.0.2/24], gateways: [10.1.0.1]}}}
    h2: {kind: host, interfaces: {eth0: {addresses: [10.2.0.2/24], gateways: [10.2.0.1]}}}
  links:
    - endpoints: ["r1:eth0", "h1:eth0"]
    - endpoints: ["r1:eth1", "h2:eth0"]
"#;

/// Checks like `pdp validate`, without a daemon and without a Substrate.
fn validate(text: &str) -> Result<(), String> {
    let file = SourceFile { name: "lab.yaml".into(), text: text.into(), ..Default::default() };
    let substrate = Some(Substrate::of_machine(&(0..2).collect()));
    let machine = Existing { substrate, unknown: true, ..Existing::default() };
    let checked = parse(&[file]).and_then(|documents| check(&documents, &machine));
    checked
        .map(drop)
        .map_err(|faults| faults.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))
}

/// A mistake, and parts of its error.
const MISTAKES: [(&str, &str, &[&str]); 17] = [
    // Links, which `validate` once did not check.
    (
        "\"h2:eth0\"]",
        "\"h3:eth0\"]",
        &["lab.yaml:15:30: link lab/", "h3:eth0 does not exist", "did you mean h1?"],
    ),
    ("\"h2:eth0\"]", "\"h2:eth7\"]", &["h2:eth7 does not exist", "did you mean eth0?"]),
    ("\"h2:eth0\"]", "\"h1:eth0\"]", &["endpoint h1:eth0 is already used by link1"]),
    (
        "gateways: [10.2.0.1]",
        "gateways: [10.3.0.1]",
        &["vport lab/h2:eth0: gateway 10.3.0.1 is outside"],
    ),
    ("10.2.0.2/24]", "10.2.0.1/24]", &["10.2.0.1"]),
    (
        "10.2.0.2/24], gateways: [10.2.0.1]",
        "10.9.0.2/24]",
        &["address 10.9.0.2/24 is outside the subnet"],
    ),
    ("h1: {kind", "h1_: {kind", &["name \"h1_\"", "use "]),
    (
        "interfaces: {eth0: {addresses: [10.1.0.2",
        "interfaces: {an-interface-too-long: {addresses: [10.1.0.2",
        &["has 21 characters, 15 at most", "choose a shorter one"],
    ),
    // Words of other tools.
    (
        "kind: router",
        "kind: switch",
        &["unknown kind \"switch\": use router or host", "a link with more than two endpoints"],
    ),
    (
        "kind: router",
        "kind: bridge",
        &["unknown kind \"bridge\": use router or host", "a link with more than two endpoints"],
    ),
    ("kind: router", "kind: linux", &["unknown kind \"linux\": use router or host", "kind: host"]),
    ("kind: router", "kind: frr", &["unknown kind \"frr\": use router or host", "kind: router"]),
    (
        "kind: VirtualNetwork",
        "kind: \"\"",
        &["kind is missing: use Substrate, VirtualNetwork or Tenant"],
    ),
    (
        "kind: router",
        "kind: router\n      files: {/say.py: {content: x}}",
        &["PdP puts no files at /say.py", "/etc, /root, /run, /tmp, /var"],
    ),
    (
        "kind: router",
        "kind: router\n      image: {rootfs: /}",
        &["rootfs is the machine's root directory", "host: true"],
    ),
    (
        "kind: router",
        "kind: router\n      dataPlane: {power: 1.5}",
        &[
            "power 1.5 does not fit: forwarding engines have 1 free (fe1: 1)",
            "ask for what is free (power: 1,",
            "pdp scale",
            "leave power out",
            "give a forwarding engine more CPUs and capacity",
        ],
    ),
    (
        "kind: router",
        "kind: router\n      dataPlane: {powr: 1}",
        &["unknown key \"powr\"", "did you mean power?"],
    ),
];

#[test]
fn beginners_mistakes_get_errors_with_advice() {
    validate(LAB).expect("the lab is right");
    for (right, wrong, parts) in MISTAKES {
        assert!(LAB.contains(right), "{right}");
        let text = LAB.replacen(right, wrong, 1);
        let said = validate(&text).expect_err(wrong);
        assert!(
            parts.iter().all(|part| said.contains(part)),
            "{wrong}: {said} lacks one of {parts:?}"
        );
        assert!(said.starts_with("lab.yaml:"), "{said}");
    }
}

/// Ten routers without `power`, and the lab repeatedly: there is always capacity.
#[test]
fn small_machine_has_capacity_for_many_labs() {
    let more: String = (2..12).map(|number| format!("    r{number}: {{kind: router}}\n")).collect();
    validate(&LAB.replacen("  links:", &format!("{more}  links:"), 1)).expect("ten routers");
}
