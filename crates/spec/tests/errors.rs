//! Each possible error of a spec is reported at its position, with the value, the bound and advice.

use std::collections::BTreeMap;

use pdp_spec::units::Base64;
use pdp_spec::{
    Existing, Intent, InterfaceFacts, SourceFile, Substrate, check, check_images, parse,
};

/// A spec without errors. Tests replace one piece of it.
const GOOD: &str = include_str!("figure.yaml");

fn machine() -> Existing {
    let facts = InterfaceFacts { mtu: 1500 };
    let devices = ["ext-a", "ext-b"].map(|device| (device.to_owned(), facts));
    Existing { devices: Some(BTreeMap::from(devices)), cpus: [0, 1].into(), ..Existing::default() }
}

fn apply_to(text: &str, existing: &Existing) -> Result<Intent, String> {
    let file = SourceFile { name: "fig1.yaml".into(), text: text.into(), ..Default::default() };
    let documents = parse(&[file]);
    documents.and_then(|documents| check(&documents, existing)).map_err(|diagnostics| {
        diagnostics.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
    })
}

/// Checks the errors after replacing `from` by `to` in the good spec.
#[track_caller]
fn says(from: &str, to: &str, expected: &str) {
    assert_eq!(GOOD.matches(from).count(), 1, "{from:?} stands once in the good spec");
    let refused = apply_to(&GOOD.replace(from, to), &machine());
    assert_eq!(refused.expect_err("refused"), expected);
}

#[test]
fn valid_spec_is_accepted() {
    let intent = apply_to(GOOD, &machine()).unwrap();
    let red = &intent.vnets["red"];
    assert_eq!(red.spec.nodes["r1"].interfaces["eth0"].mtu, Some(1500));
    assert_eq!(red.spec.nodes["r1"].interfaces["eth2"].mtu, Some(1458));
    assert_eq!(red.spec.links[1].name.as_deref(), Some("link2"));
    let shares = &red.shares()["r1"];
    assert_eq!(shares.iter().map(|s| s.millicores).collect::<Vec<_>>(), [500, 300]);
}

#[test]
fn malformed_yaml_is_refused() {
    let refused = apply_to("kind: [", &machine()).unwrap_err();
    assert!(refused.starts_with("fig1.yaml:1:"), "{refused}");
    assert!(refused.ends_with("(correct the YAML)"), "{refused}");
}

#[test]
fn kind() {
    says(
        "kind: VirtualNetwork",
        "kind: VirtualNetwrok",
        "fig1.yaml:15:7: unknown kind \"VirtualNetwrok\": use Substrate, VirtualNetwork or Tenant \
         (did you mean VirtualNetwork?)",
    );
}

#[test]
fn files_of_other_tools_get_advice() {
    for (text, advice) in [
        ("topology: {nodes: {}}", "containerlab file; write its nodes and links as spec.nodes"),
        ("services: {web: {}}", "docker compose file; write its services as nodes of kind host"),
        ("other: {}", "write kind: Substrate, kind: VirtualNetwork or kind: Tenant"),
    ] {
        let file =
            SourceFile { name: "lab.yaml".into(), text: text.into(), attachments: BTreeMap::new() };
        let faults = parse(&[file]).unwrap_err();
        let [fault] = &faults[..] else { panic!("{faults:?}") };
        assert!(fault.message.starts_with("kind is missing"), "{fault}");
        assert!(fault.hint.contains(advice), "{fault}");
    }
}

#[test]
fn version() {
    let text = GOOD.replacen("pdp/v1", "pdp/v2", 1);
    assert_eq!(
        apply_to(&text, &machine()).unwrap_err(),
        "fig1.yaml:1:13: substrate fig1: unknown apiVersion \"pdp/v2\": use pdp/v1"
    );
}

#[test]
fn unknown_key() {
    says(
        "split: false",
        "splitt: false",
        "fig1.yaml:34:9: node red/r1: unknown key \"splitt\" (did you mean split?)",
    );
    says(
        "{name: fig1}",
        "{name: fig1, colour: 1}",
        "fig1.yaml:3:24: substrate fig1: unknown key \"colour\" (keys here: labels)",
    );
}

#[test]
fn wrong_type() {
    says(
        "power: 0.8",
        "power: [0.8]",
        "fig1.yaml:33:9: node red/r1: power is a list, not a number or text",
    );
    says(
        "mode: \"0640\"",
        "mode: 640",
        "fig1.yaml:28:58: node red/r1: mode 640 is a whole number, not text (put it in quotes)",
    );
    says("who: me", "who: {}", "fig1.yaml:16:32: vnet red: who is a mapping, not text");
}

#[test]
fn labels() {
    let router = |labels: &str| format!("kind: router\n      labels: {{{labels}}}");
    let good = GOOD.replace("kind: router", &router("a.b/role: spine, rack: \"\""));
    assert!(apply_to(&good, &machine()).is_ok());
    says(
        "kind: router",
        &router("a b: spine, role: a/b"),
        "fig1.yaml:22:21: node red/r1: label \"a b\" has characters that labels can't have there \
         (use letters, digits, -, _ and ., with a letter or digit first and last, after an \
         optional domain and /, as in example.org/role)\nfig1.yaml:22:34: node red/r1: value \
         \"a/b\" of label role has characters that labels can't have there (use letters, digits, \
         -, _ and ., with a letter or digit first and last, or nothing)",
    );
    let many: Vec<String> = (0..65).map(|number| format!("l{number}: x")).collect();
    let refused = apply_to(&GOOD.replace("kind: router", &router(&many.join(", "))), &machine());
    assert!(refused.unwrap_err().contains("node red/r1: 65 labels exceed 64 (remove some)"));
}

#[test]
fn missing_key() {
    says("vni: 42, ", "", "fig1.yaml:43:26: external red/to-x: vni is missing (add vni)");
}

#[test]
fn key_twice() {
    says(
        "    h1:\n",
        "    r1:\n",
        "fig1.yaml:39:5: node red/r1: \"r1\" is defined twice (remove or rename one)",
    );
}

#[test]
fn names() {
    says(
        "    to-y: {",
        "    to_y: {",
        "fig1.yaml:44:5: external red/to_y: name \"to_y\" is not a DNS label (write to-y: use letters, digits and -, with a letter or digit first and last)\n\
         fig1.yaml:50:30: link red/last: endpoint external:to-y does not exist (did you mean to-x?)",
    );
    says(
        "eth2: {}",
        "a-name-too-long-for-linux: {}",
        "fig1.yaml:26:9: vport red/r1:a-name-too-long-for-linux: name \
         \"a-name-too-long-for-linux\" has 25 characters, 15 at most (choose a shorter one)\n\
         fig1.yaml:50:19: link red/last: endpoint r1:eth2 does not exist (did you mean eth0?)",
    );
}

#[test]
fn nodes_and_links_may_have_capital_letters() {
    let text = GOOD
        .replace("    h1:\n", "    PE-1:\n")
        .replace("\"h1:eth0\"", "\"PE-1:eth0\"")
        .replace("name: last", "name: To-Y");
    let intent = apply_to(&text, &machine()).unwrap();
    assert!(intent.vnets["red"].spec.nodes.contains_key("PE-1"));
    assert_eq!(intent.vnets["red"].spec.links[2].name.as_deref(), Some("To-Y"));
    // Names of objects have no capital letters: they are
    // names of files, cgroups and tenants' prefixes.
    says(
        "{name: red, ",
        "{name: Red, ",
        "fig1.yaml:16:18: vnet Red: name \"Red\" is not a DNS label (write red: use lower-case letters, digits and -, with \
         a letter or digit first and last)",
    );
    says(
        "    h1:\n      kind: host\n      interfaces: {eth0",
        "    R1:\n      kind: host\n      interfaces: {eth9",
        "fig1.yaml:20:5: node red/r1: name \"r1\" differs from \"R1\" in case only (rename one)\n\
         fig1.yaml:46:30: link red/link1: endpoint h1:eth0 does not exist (did you mean R1?)",
    );
    says(
        "    h1:\n",
        "    External:\n",
        "fig1.yaml:39:5: node red/External: name external is reserved for externals in endpoints \
         (rename the node)\nfig1.yaml:46:30: link red/link1: endpoint h1:eth0 does not exist (did \
         you mean r1?)",
    );
}

#[test]
fn endpoints() {
    says(
        "\"external:to-x\"]",
        "\"external:to-xx\"]",
        "fig1.yaml:48:30: link red/link2: endpoint external:to-xx does not exist \
         (did you mean to-x?)",
    );
    says(
        "\"r1:eth2\"",
        "\"r2:eth2\"",
        "fig1.yaml:50:19: link red/last: endpoint r2:eth2 does not exist (did you mean r1?)",
    );
    says(
        "\"r1:eth2\"",
        "\"r1:eth1\"",
        "fig1.yaml:50:19: link red/last: endpoint r1:eth1 is already used by link2 (an endpoint \
         has one link)",
    );
    says(
        "\"r1:eth2\"",
        "r1",
        "fig1.yaml:50:19: link red/link3: endpoints[0] \"r1\" is not an endpoint \
         (write \"NODE:INTERFACE\" or \"external:NAME\")",
    );
    says(
        "[\"r1:eth2\", \"external:to-y\"]",
        "[\"r1:eth2\"]",
        "fig1.yaml:50:7: link red/link3: endpoints has 1 entry, not within 2 to 256",
    );
}

#[test]
fn link_name_twice() {
    says(
        "name: last",
        "name: link1",
        "fig1.yaml:52:13: link red/link1: name link1 is already used by link 1 (rename one)",
    );
}

#[test]
fn addresses() {
    says(
        "gateways: [10.0.0.1]",
        "gateways: [10.0.1.1]",
        "fig1.yaml:41:64: vport red/h1:eth0: gateway 10.0.1.1 is outside the subnets of eth0 (use \
         an address in 10.0.0.0/24)",
    );
    says(
        "[10.0.0.2/24], gateways: [10.0.0.1]",
        "[10.0.1.2/24]",
        "fig1.yaml:41:39: vport red/h1:eth0: address 10.0.1.2/24 is outside the subnet 10.0.0.0/24 \
         of r1:eth0, the link's other end (use an address in 10.0.0.0/24, or change the other end)",
    );
    says(
        "[10.0.0.2/24], gateways: [10.0.0.1]",
        "[10.0.0.1/24]",
        "fig1.yaml:41:39: vport red/h1:eth0: address 10.0.0.1/24 is also that of r1:eth0, the \
         link's other end (change one, or set anycast: true at both interfaces if they share it on \
         purpose)",
    );
    says(
        "eth2: {}",
        "eth2: {addresses: [10.0.0.1/24, 10.0.0.1/32]}",
        "fig1.yaml:26:41: vport red/r1:eth2: address 10.0.0.1/32 is given twice (remove or change one)",
    );
    says(
        "10.0.0.1/24",
        "10.0.0.255/24",
        "fig1.yaml:24:28: vport red/r1:eth0: addresses[0] \"10.0.0.255/24\" is its subnet's \
         broadcast address (use an address between the subnet's first and last)",
    );
    says(
        "10.0.0.1/24",
        "10.0.0.1",
        "fig1.yaml:24:28: vport red/r1:eth0: addresses[0] \"10.0.0.1\" is not an address with a prefix length (write an address with its prefix length like 10.0.0.1/24 or fd00::1/64)",
    );
}

#[test]
fn mtu() {
    says(
        "mtu: 1400",
        "mtu: 9000",
        "fig1.yaml:25:47: vport red/r1:eth1: mtu 9000 exceeds the underlay's 1450 \
         (set mtu to at most 1450)",
    );
    says(
        "eth0: {addresses: [10.0.0.1/24, fd00::1/64]}",
        "eth0: {mtu: 1701, addresses: [10.0.0.1/24]}",
        "fig1.yaml:24:21: vport red/r1:eth0: mtu 1701 exceeds 1700 (set mtu to at most 1700)",
    );
    says("mtu: 1400", "mtu: 67", "fig1.yaml:25:47: vport red/r1:eth1: mtu 67 is not at least 68");
}

#[test]
fn link_addresses() {
    says(
        "02:00:00:00:00:01",
        "02:00:00:00:00",
        "fig1.yaml:25:21: vport red/r1:eth1: mac \"02:00:00:00:00\" is not a MAC address \
         (write six bytes like 02:00:00:00:00:01)",
    );
    says(
        "02:00:00:00:00:01",
        "01:00:5e:00:00:01",
        "fig1.yaml:25:21: vport red/r1:eth1: mac \"01:00:5e:00:00:01\" is a multicast MAC address \
         (the lowest bit of the first byte must be 0, as in 02:00:00:00:00:01)",
    );
}

#[test]
fn tunnel_keys() {
    says(
        "vni: 42",
        "vni: 16777216",
        "fig1.yaml:43:39: external red/to-x: vni 16777216 is not within 0 to 16777215",
    );
    says(
        "udp: {local: 192.0.2.1, remote: 192.0.2.7, localPort: 5000, remotePort: 5001}",
        "vxlan: {vni: 42, local: 192.0.2.1, remote: 192.0.2.7}",
        "fig1.yaml:44:39: external red/to-y: vxlan 192.0.2.1 > 192.0.2.7 vni 42 port 4789 on \
         interface A is taken by red/to-x (use another key or interface)",
    );
    says(
        "localPort: 5000",
        "localPort: 4789",
        "fig1.yaml:44:80: external red/to-y: UDP port 4789 of 192.0.2.1 is taken by red/to-x for \
         vxlan (use another port)",
    );
    says(
        "interface: A, udp: {local: 192.0.2.1, remote: 192.0.2.7, localPort: 5000, remotePort: 5001}",
        "interface: C",
        "fig1.yaml:44:23: external red/to-y: the substrate has no interface C (did you mean A?)",
    );
    says(
        "udp: {local: 192.0.2.1, remote: 192.0.2.7",
        "udp: {local: 192.0.2.1, remote: fd00::7",
        "fig1.yaml:44:58: external red/to-y: remote fd00::7 and local 192.0.2.1 are of different \
         IP versions (use IPv4 for both, or IPv6)",
    );
    says(
        "udp: {local: 192.0.2.1, remote: 192.0.2.7, localPort: 5000",
        "udp: {local: 192.0.2.1, remote: 192.0.2.7, localPort: 0",
        "fig1.yaml:44:80: external red/to-y: localPort 0 is not within 1 to 65535",
    );
}

/// Each kind of tunnel in place of an existing external.
#[test]
fn every_kind_of_tunnel() {
    let was = "udp: {local: 192.0.2.1, remote: 192.0.2.7, localPort: 5000, remotePort: 5001}";
    let ends = "local: 192.0.2.1, remote: 192.0.2.7";
    let with = |tunnel: &str| apply_to(&GOOD.replace(was, tunnel), &machine());
    // The largest packet within 1,500 bytes, with each kind's headers.
    for (tunnel, mtu) in [
        (format!("vxlan: {{vni: 7, {ends}}}"), 1450),
        (format!("geneve: {{vni: 42, {ends}}}"), 1450),
        (format!("gre: {{{ends}}}"), 1462),
        (format!("gre: {{key: 4294967295, {ends}}}"), 1458),
        (format!("gre: {{key: 0, checksum: true, sequence: true, {ends}}}"), 1450),
        ("gre: {key: 1, local: fd00::1, remote: fd00::7}".into(), 1438),
        ("geneve: {vni: 1, local: fd00::1, remote: fd00::7}".into(), 1430),
        ("vlan: {id: 4094}".into(), 1500),
    ] {
        let intent = with(&tunnel).unwrap_or_else(|refused| panic!("{refused}"));
        let eth2 = &intent.vnets["red"].spec.nodes["r1"].interfaces["eth2"];
        assert_eq!(eth2.mtu, Some(mtu), "{tunnel}");
    }
    for (tunnel, said) in [
        (format!("geneve: {{vni: 16777216, {ends}}}"), "vni 16777216 is not within 0 to 16777215"),
        (format!("geneve: {{vni: 1, port: 4789, {ends}}}"), "taken by red/to-x for vxlan"),
        (format!("gre: {{key: 4294967296, {ends}}}"), "4294967296"),
        ("gre: {local: 192.0.2.1, remote: fd00::7}".into(), "different IP versions"),
        ("gre: {local: 192.0.2.1, remote: 192.0.2.1}".into(), "equals local"),
        ("vlan: {id: 0}".into(), "id 0 is not within 1 to 4094"),
        ("vlan: {id: 4095}".into(), "id 4095 is not within 1 to 4094"),
        (format!("vlan: {{id: 1}}, gre: {{{ends}}}"), "external has gre and vlan"),
    ] {
        let refused = with(&tunnel).expect_err(&tunnel);
        assert!(refused.contains(said), "{refused}");
    }
    // Two on one interface, and one on a missing interface.
    let both = |one: &str, two: &str| {
        let text = GOOD.replace(was, one);
        let was = "vxlan: {vni: 42, local: 192.0.2.1, remote: 192.0.2.7}";
        assert_eq!(text.matches(was).count(), 1);
        apply_to(&text.replace(was, two), &machine())
    };
    let gre = |key: &str| format!("gre: {{{key}{ends}}}");
    both(&gre(""), &gre("key: 0, ")).unwrap();
    both("vlan: {id: 1}", "vlan: {id: 2}").unwrap();
    let refused = both(&gre("key: 7, "), &gre("key: 7, checksum: true, ")).unwrap_err();
    assert!(
        refused.contains("gre 192.0.2.1 > 192.0.2.7 key 7 on interface A is taken"),
        "{refused}"
    );
    let refused = both("vlan: {id: 1}", "vlan: {id: 1}").unwrap_err();
    assert!(refused.contains("vlan id 1 on interface A is taken"), "{refused}");
}

#[test]
fn underlay_mtu_too_small_for_tunnel_is_refused() {
    let mut short = machine();
    short.devices.as_mut().unwrap().insert("ext-a".into(), InterfaceFacts { mtu: 109 });
    let refused = apply_to(GOOD, &short).unwrap_err();
    let said = "no mtu fits: the tunnel takes 50 of the underlay's 109 bytes, and an mtu is at \
                least 68";
    assert!(refused.contains(said), "{refused}");
}

#[test]
fn tunnel_key_of_another_vnet_is_refused() {
    let intent = apply_to(GOOD, &machine()).unwrap();
    let existing = Existing { substrate: intent.substrate, vnets: intent.vnets, ..machine() };
    let blue = "apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {name: blue}
spec:
  nodes: {h: {kind: host, interfaces: {eth0: {}}}}
  externals: {x: {interface: A, vxlan: {vni: 42, local: 192.0.2.1, remote: 192.0.2.7}}}
  links: [{endpoints: [\"h:eth0\", \"external:x\"]}]
";
    assert_eq!(
        apply_to(blue, &existing).unwrap_err(),
        "fig1.yaml:6:46: external blue/x: vxlan 192.0.2.1 > 192.0.2.7 vni 42 port 4789 on \
         interface A is taken by red/to-x (use another key or interface)"
    );
    let other = blue.replace("vni: 42", "vni: 43");
    let intent = apply_to(&other, &existing).unwrap();
    assert_eq!(intent.vnets.keys().collect::<Vec<_>>(), ["blue", "red"]);
    // Another name for the same device is no loophole.
    let twice = GOOD.replace("B: {device: ext-b}", "B: {device: ext-a}");
    assert_eq!(
        apply_to(&twice, &machine()).unwrap_err(),
        "fig1.yaml:7:17: external interface B: device ext-a is taken by external interface A \
         (give each interface a device of its own)"
    );
}

#[test]
fn power() {
    says(
        "power: 0.8",
        "power: 2.0",
        "fig1.yaml:33:16: node red/r1: power 2 does not fit: forwarding engines have 1.5 free \
         (fe1: 0.5, fe2: 0.5, fe3: 0.5) (ask for what is free (power: 1.5, or pdp scale with \
         --power 1.5), leave power out to borrow unused power, or give a forwarding engine more \
         CPUs and capacity (pdp inspect substrate shows them))",
    );
    says(
        "power: 0.8",
        "power: 0m",
        "fig1.yaml:33:16: node red/r1: power 0 is below 0.001 (ask for more)",
    );
    says(
        "power: 0.8",
        "power: 0.8x",
        "fig1.yaml:33:16: node red/r1: power \"0.8x\" is not a number of cores \
         (write cores as 0.5 or thousandths as 500m, with at most three decimals)",
    );
}

#[test]
fn engines_and_the_mux_share_cpus() {
    // The good spec uses both CPUs completely: the flow moves fe1 off CPU 1.
    says(
        "capacity: 500m",
        "capacity: 0.6",
        "fig1.yaml:12:32: forwarding engine fe3: capacity 0.5 exceeds the 0.4 that its CPUs 1 leave \
         beside the mux and other engines (lower the capacity, or the mux's power, or give it other \
         CPUs)",
    );
    says(
        "workers: 1, power: 0.5",
        "workers: 2",
        "fig1.yaml:8:3: mux: power 2 exceeds the 1 of its CPUs 0 \
         (give it more CPUs, fewer workers, or less power)\n\
         fig1.yaml:12:32: forwarding engine fe3: capacity 0.5 exceeds the 0 that its CPUs 1 leave \
         beside the mux and other engines (lower the capacity, or the mux's power, or give it other \
         CPUs)",
    );
    says(
        "fe1: {cpus: \"0-1\"",
        "fe1: {cpus: \"0-2\"",
        "fig1.yaml:10:17: forwarding engine fe1: cpus 0-2: this machine has no CPU 2 (it has 0-1)",
    );
}

#[test]
fn devices() {
    says(
        "device: ext-b",
        "device: ext-bb",
        "fig1.yaml:7:17: external interface B: device ext-bb does not exist (did you mean ext-b?)",
    );
}

#[test]
fn rates() {
    let guaranteed = |one: &str, two: &str| {
        GOOD.replace("rate: 600Mbps", &format!("rate: 600Mbps\n      guarantee: {one}"))
            .replace("rate: 400Mbps", &format!("rate: 400Mbps\n      guarantee: {two}"))
    };
    let all = guaranteed("600Mbps", "400Mbps");
    apply_to(&all, &machine()).unwrap();
    let refused = |text: &str| apply_to(text, &machine()).unwrap_err();
    assert_eq!(
        refused(&all.replace("capacity: 1Gbps", "capacity: 999Mbps")),
        "fig1.yaml:53:18: link red/last: guarantee 400Mbps exceeds the 399Mbps that other links \
         leave on interface A (lower a guarantee of the interface's links)"
    );
    assert_eq!(
        refused(&all.replace(", capacity: 1Gbps", "")).lines().next().unwrap(),
        "fig1.yaml:50:18: link red/link2: interface A has no capacity, so links can't have \
         guarantees (set the interface's capacity in the Substrate)"
    );
    assert_eq!(
        refused(&guaranteed("601Mbps", "1Mbps")),
        "fig1.yaml:50:18: link red/link2: guarantee 601Mbps exceeds the rate 600Mbps (lower it, or \
         raise the rate)"
    );
    says(
        "rate: 100Mbps",
        "rate: 10",
        "fig1.yaml:47:13: link red/link1: rate 10bps is below 8kbps (give a higher rate, or set \
         the link down instead)",
    );
    says(
        "police: {rate: 1Gbps, pps: 100000}",
        "police: {}",
        "fig1.yaml:18:3: vnet red: neither rate nor pps is given (give rate, pps or both)",
    );
}

#[test]
fn files() {
    says(
        "{content: \"log stdout\", ",
        "{from: frr.conf, ",
        "fig1.yaml:28:35: node red/r1: file \"frr.conf\" not found \
         (paths are relative to the spec file)",
    );
    says(
        "{content: \"log stdout\", ",
        "{",
        "fig1.yaml:28:9: node red/r1: file /etc/frr/frr.conf needs exactly one of content and from \
         (give one of them)",
    );
    says(
        "mode: \"0640\"",
        "mode: \"0980\"",
        "fig1.yaml:28:58: node red/r1: mode \"0980\" is not a file mode (write it like \"0640\")",
    );
    says(
        "/etc/frr/frr.conf",
        "/etc/../frr.conf",
        "fig1.yaml:28:9: node red/r1: \"/etc/../frr.conf\" is not an absolute path without .. \
         (begin it with /)",
    );
    for path in ["/say.py", "/usr/bin/say", "/etcetera/x", "/run/pdp/init", "/var/tmp"] {
        let refused = apply_to(&GOOD.replace("/etc/frr/frr.conf", path), &machine());
        assert_eq!(refused.is_err(), path != "/var/tmp", "{path}");
    }
    says(
        "/etc/frr/frr.conf",
        "/say.py",
        "fig1.yaml:28:9: node red/r1: PdP puts no files at /say.py (use a path below one of /etc, \
         /root, /run, /tmp, /var, but not below /run/pdp; put other files into an image)",
    );
}

#[test]
fn commands() {
    says(
        "ospfd -n 1",
        "ospfd \"-n 1",
        "fig1.yaml:29:48: node red/r1: the command's quotes do not close \
         (close them, or give a list)",
    );
}

#[test]
fn data_planes() {
    says(
        "      kind: host\n",
        "      kind: host\n      dataPlane: {}\n",
        "fig1.yaml:41:7: node red/h1: a host has no data plane \
         (make it kind: router, or remove dataPlane)",
    );
    says(
        "value: 0806, mask: ffff",
        "value: 0806, mask: ff00",
        "fig1.yaml:37:57: node red/r1: mask ff00 hides bits that value 0806 has (such a match \
         never applies)",
    );
    says(
        "value: 0806, mask: ffff",
        "value: 080, mask: ffff",
        "fig1.yaml:37:45: node red/r1: value \"080\" needs an even number of hexadecimal digits \
         (write two hexadecimal digits a byte, in quotes, like \"0806\")",
    );
    says(
        "flow: [{offset: 12, mask: ffff}]",
        "flow: [{offset: 1690, mask: \"ffffffffffffffffffffffffffffffffffffffffffffffffffff\"}]",
        "fig1.yaml:36:45: node red/r1: the field ends at byte 1716, but a frame at 1714 (lower the \
         offset)",
    );
    says(
        "policy: flow",
        "policy: rr",
        "fig1.yaml:36:32: node red/r1: unknown policy \"rr\": use flow, round-robin, weighted, flowlet or ordered",
    );
}

/// Each kind of data plane has keys of its own.
#[test]
fn data_plane_kinds_have_their_own_keys() {
    says(
        "      dataPlane:\n",
        "      dataPlane:\n        kind: fastpth\n",
        "fig1.yaml:33:15: node red/r1: unknown kind \"fastpth\": use parallel, fastpath or kernel \
         (did you mean fastpath?)",
    );
    let faults = [(35, "split"), (36, "program"), (37, "distribution")];
    let faults = faults.map(|(line, key)| {
        format!(
            "fig1.yaml:{line}:9: node red/r1: {key:?} is not a key of kind fastpath (remove it, or \
             use kind: parallel)"
        )
    });
    let kind = "      dataPlane:\n        kind: fastpath\n";
    says("      dataPlane:\n", kind, &faults.join("\n"));
    says(
        "      dataPlane:\n",
        "      dataPlane:\n        code: ip\n",
        "fig1.yaml:33:9: node red/r1: \"code\" is not a key of kind parallel (remove it, or use \
         kind: fastpath)",
    );
    let faults =
        [(36, "split"), (37, "program"), (38, "distribution"), (39, "punt"), (40, "puntLimits")];
    let faults: Vec<_> = faults
        .into_iter()
        .map(|(line, key)| {
            let both = ["punt", "puntLimits"].contains(&key);
            let kinds = if both { "parallel or fastpath" } else { "parallel" };
            format!(
                "fig1.yaml:{line}:9: node red/r1: {key:?} is not a key of kind kernel (remove it, \
                 or use kind: {kinds})"
            )
        })
        .collect();
    let code = "fig1.yaml:33:9: node red/r1: \"code\" is not a key of kind kernel (remove it, or \
                use kind: fastpath)\n";
    says(
        "      dataPlane:\n",
        "      dataPlane:\n        code: ip\n        kind: kernel\n",
        &format!("{code}{}", faults.join("\n")),
    );
    says(
        "      dataPlane:\n",
        "      dataPlane:\n        memry: 1\n",
        "fig1.yaml:33:9: node red/r1: unknown key \"memry\" (did you mean memory?)",
    );
}

/// Values that the mux rejects are rejected here already.
#[test]
fn values_the_mux_rejects_are_refused() {
    says(
        "      name: last",
        "      name: last\n      queue: 4097",
        "fig1.yaml:53:14: link red/link3: queue \"4097\" is not 1 to 4096 frames (write frames as \
         a number, or as their time at the rate, like 50ms)",
    );
    let fields = |bytes: usize| {
        let field = |at: usize| format!("{{offset: {at}, mask: \"{}\"}}", "ff".repeat(bytes));
        format!("flow: [{}]", (0..8).map(field).collect::<Vec<_>>().join(", "))
    };
    says(
        "flow: [{offset: 12, mask: ffff}]",
        &fields(33),
        "fig1.yaml:36:38: node red/r1: the fields have 264 bytes together, 256 at most \
         (leave some out)",
    );
    apply_to(&GOOD.replace("flow: [{offset: 12, mask: ffff}]", &fields(32)), &machine()).unwrap();
    let node = |number: usize| {
        let interfaces =
            (0..256).map(|at| format!("e{at}: {}", "{}")).collect::<Vec<_>>().join(", ");
        format!("    many{number}: {{kind: host, interfaces: {{{interfaces}}}}}\n")
    };
    let many = (0..64).map(node).collect::<String>() + "  externals:";
    says(
        "  externals:",
        &many,
        "fig1.yaml:19:3: vnet red: 16388 interfaces of all nodes exceed 16384 (remove some)",
    );
}

#[test]
fn queues() {
    says(
        "split: false",
        "queue: 1000",
        "fig1.yaml:34:16: node red/r1: queue 1000 is not a power of two (use 512 or 1024)",
    );
    says(
        "split: false",
        "queue: 32768",
        "fig1.yaml:34:16: node red/r1: queue 32768 is not within 64 to 16384",
    );
    says(
        "split: false",
        "{queue: 16384, memory: 128Mi}"
            .trim_matches(['{', '}'])
            .replace(", ", "\n        ")
            .as_str(),
        "fig1.yaml:35:17: node red/r1: memory 128Mi is below the 144Mi that queue 16384 needs \
         (set memory to 144Mi, or a smaller queue)",
    );
    let program = "program: {attach: memif, run: x}";
    says(
        "program: router\n",
        &format!("{program}\n        queue: 128\n"),
        "fig1.yaml:36:16: node red/r1: queue needs attach: runtime (remove it: other programs have \
         their own queues)",
    );
    for policy in ["ordered", "flowlet"] {
        let text = GOOD.replace("program: router", program);
        let text = text.replace("policy: flow", &format!("policy: {policy}"));
        assert_eq!(
            apply_to(&text, &machine()).unwrap_err(),
            format!(
                "fig1.yaml:36:32: node red/r1: policy {policy} needs attach: runtime (use flow, or \
                 a program on the runtime)"
            )
        );
    }
    let text = GOOD.replace("policy: flow", "policy: ordered");
    apply_to(&text.replace("split: false", "queue: 64"), &machine()).unwrap();
}

/// Returns a pcap file with frames of these lengths, in base64.
fn pcap(lengths: &[u32]) -> Base64 {
    let mut file = vec![0xd4, 0xc3, 0xb2, 0xa1, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4, 0];
    file.extend([1, 0, 0, 0]);
    for length in lengths {
        file.extend([0; 8]);
        file.extend([length.to_le_bytes(), length.to_le_bytes()].concat());
        file.extend(vec![0; *length as usize]);
    }
    Base64(file.into())
}

#[test]
fn outlets() {
    let b = "{device: ext-b}";
    says(
        b,
        "{device: ext-b, memif: {}}",
        "fig1.yaml:7:5: external interface B: interface has device and memif \
         (give one of device: NAME, memif: {}, generator: {…})",
    );
    says(
        b,
        "{}",
        "fig1.yaml:7:5: external interface B: none of device, memif and generator is given \
         (give one of device: NAME, memif: {}, generator: {…})",
    );
    says(
        b,
        "{memif: {}, attach: packet}",
        "fig1.yaml:7:28: external interface B: attach without device (remove it)",
    );
    says(
        b,
        "{memif: {mtu: 1701}}",
        "fig1.yaml:7:22: external interface B: mtu 1701 is not within 68 to 1700",
    );
    says(
        b,
        "{generator: {pps: 5}}",
        "fig1.yaml:7:26: external interface B: pps without frames (add frames: FILE)",
    );
    says(
        b,
        "{generator: {frames: no.pcap}}",
        "fig1.yaml:7:29: external interface B: file \"no.pcap\" not found \
         (paths are relative to the spec file)",
    );
    says(
        b,
        "{generator: {pcap: AAAA}}",
        "fig1.yaml:7:27: external interface B: pcap is not a pcap file (give frames of Ethernet)",
    );
    says(
        b,
        "{generator: {pcap: A}}",
        "fig1.yaml:7:27: external interface B: pcap \"A\" is not base64: Invalid input length: 1 \
         (write the output of `base64 -w0 FILE`, or name the file in frames)",
    );
    let frames = pcap(&[100, 60]);
    says(
        b,
        &format!("{{generator: {{numberAt: 53, pcap: {frames}}}}}"),
        "fig1.yaml:7:31: external interface B: numberAt 53: the number ends at byte 65, a frame \
         at 60 (lower it, or send longer frames)",
    );
    let good = format!("{{generator: {{numberAt: 48, pps: 9, count: 7, pcap: {frames}}}}}");
    apply_to(&GOOD.replace(b, &good), &machine()).unwrap();
    apply_to(&GOOD.replace(b, "{device: ext-b, attach: packet}"), &machine()).unwrap();
}

/// A memif belongs entirely to one external; tunnels share a generator, like a device.
#[test]
fn memifs_have_one_external() {
    for (outlet, kind) in [("memif: {}", "memif"), ("generator: {}", "generator")] {
        let text = GOOD.replace("{device: ext-b}", &format!("{{{outlet}}}"));
        let tunnel = text.replace("to-x: {interface: A", "to-x: {interface: B");
        let result = apply_to(&tunnel, &machine());
        let hint = if kind == "memif" {
            assert_eq!(
                result.unwrap_err(),
                "fig1.yaml:43:26: external red/to-x: interface B is a memif, which has no tunnels \
                 (remove vxlan, or use an interface with a device)"
            );
            "add an interface: a memif has one external"
        } else {
            result.unwrap();
            "use another key or interface"
        };
        let whole = "to-x: {interface: B} #";
        let text = text.replace("to-x: {", whole);
        apply_to(&text, &machine()).unwrap();
        let twice = text.replace("to-y: {", "to-y: {interface: B} #");
        assert_eq!(
            apply_to(&twice, &machine()).unwrap_err(),
            format!(
                "fig1.yaml:44:23: external red/to-y: the whole interface on interface B is taken \
                 by red/to-x ({hint})"
            )
        );
    }
    // A memif's MTU limits the link's; a generator takes any size.
    let text = GOOD.replace("to-x: {", "to-x: {interface: B} #");
    let memif = text.replace("{device: ext-b}", "{memif: {mtu: 1300}}");
    assert_eq!(
        apply_to(&memif, &machine()).unwrap_err(),
        "fig1.yaml:25:47: vport red/r1:eth1: mtu 1400 exceeds the underlay's 1300 \
         (set mtu to at most 1300)"
    );
    let generator = text.replace("{device: ext-b}", "{generator: {}}");
    apply_to(&generator.replace("mtu: 1400", "mtu: 1700"), &machine()).unwrap();
}

/// A file has space for a substrate and the maximum number of virtual networks.
#[test]
fn file_accepts_the_maximum_number_of_vnets() {
    let vnets = |count: usize| {
        let host = "    h1: {kind: host, interfaces: {eth0: {addresses: [10.0.0.1/24]}}}";
        let vnet = |number| {
            format!(
                "---\napiVersion: pdp/v1\nkind: VirtualNetwork\nmetadata: {{name: v{number}}}\n\
                 spec:\n  nodes:\n{host}\n"
            )
        };
        (0..count).map(vnet).collect::<String>()
    };
    let substrate = "apiVersion: pdp/v1\nkind: Substrate\nmetadata: {name: node}\n\
                     spec:\n  mux: {cpus: \"0\"}\n";
    let most = apply_to(&(substrate.to_owned() + &vnets(1024)), &machine());
    assert_eq!(most.unwrap().vnets.len(), 1024);
    let refused = apply_to(&vnets(1025), &machine()).unwrap_err();
    assert!(refused.contains("1025 virtual networks exceed 1024"), "{refused}");
}

/// A generator's frames file is read with the spec, and its content is stored.
#[test]
fn generator_frames_are_stored_with_the_spec() {
    let text = GOOD.replace("{device: ext-b}", "{generator: {frames: f.pcap, pps: 5}}");
    let read = |content: Vec<u8>| {
        let source = SourceFile::read("fig1.yaml", text.clone(), |path, bytes_max| {
            assert_eq!(path, "f.pcap");
            assert!(bytes_max > 1 << 20);
            Ok(content.clone())
        });
        let documents = parse(&[source]);
        documents
            .and_then(|documents| check(&documents, &machine()))
            .map_err(|wrong| wrong.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))
    };
    let good = pcap(&[60]);
    let substrate = read(good.0.to_vec()).unwrap().substrate.unwrap();
    let generator = substrate.spec.interfaces["B"].generator.clone().unwrap();
    assert_eq!((generator.frames, generator.pcap), (None, Some(good)));
    assert_eq!(
        read(pcap(&[60, 9]).0.to_vec()).unwrap_err(),
        "fig1.yaml:7:29: external interface B: file \"f.pcap\" has a frame 2 of 9 bytes, not 14 \
         to 1714 (give frames of Ethernet in pcap format)"
    );
}

#[test]
fn all_spec_errors_are_reported_together() {
    let text = GOOD.replace("vni: 42", "vni: -1").replace("split: false", "splitt: 1");
    let text = text.replace("workers: 1", "workers: 99");
    let refused = apply_to(&text, &machine()).unwrap_err();
    assert_eq!(refused.lines().count(), 3, "{refused}");
}

#[test]
fn substrates() {
    let intent = apply_to(GOOD, &machine()).unwrap();
    let existing = Existing { substrate: intent.substrate, vnets: intent.vnets, ..machine() };
    // A substrate with less than the allocated power is rejected, and so is one with another name.
    let less =
        GOOD.split("---").next().unwrap().replace("    fe1: {cpus: \"0-1\", capacity: 0.5}\n", "");
    assert_eq!(
        apply_to(&less, &existing).unwrap_err(),
        "fig1.yaml:9:3: substrate fig1: forwarding engine fe1 is removed, but red/r1 runs on it \
         (keep the engine, or delete its users first)"
    );
    let smaller = GOOD.split("---").next().unwrap();
    let smaller = smaller.replace("\"0-1\", capacity: 0.5", "\"0-1\", capacity: 0.4");
    assert_eq!(
        apply_to(&smaller, &existing).unwrap_err(),
        "fig1.yaml:10:34: forwarding engine fe1: capacity 0.4 is below the 0.5 that red/r1 uses \
         (keep the capacity, or lower their power first)"
    );
    let other = GOOD.split("---").next().unwrap().replace("fig1", "fig2");
    assert_eq!(
        apply_to(&other, &existing).unwrap_err(),
        "fig1.yaml:3:18: substrate fig2: the node's substrate is fig1, not fig2 \
         (give it the same name to change it)"
    );
    let twice = format!("{}---\n{}", GOOD.split("---").next().unwrap(), GOOD);
    assert_eq!(
        apply_to(&twice, &machine()).unwrap_err(),
        "fig1.yaml:16:18: substrate fig1: the spec has a second substrate; the first is fig1 (a \
         machine has one; remove or merge one)"
    );
}

#[test]
fn counts() {
    let nodes: String = (0..257).map(|n| format!("    n{n}: {{kind: host}}\n")).collect();
    says(
        "    h1:\n",
        &format!("{nodes}    h1:\n"),
        "fig1.yaml:19:3: vnet red: 259 nodes exceed 256 (remove some)",
    );
    let ports: String = (3..257).map(|n| format!("        eth{n}: {{}}\n")).collect();
    says(
        "        eth2: {}\n",
        &format!("        eth2: {{}}\n{ports}"),
        "fig1.yaml:23:7: node red/r1: 257 interfaces exceed 256 (remove some)",
    );
}

#[test]
fn memory() {
    says(
        "mux: {cpus",
        "managementHost: {memory: 1000Mi}\n  mux: {cpus",
        "memory of all guests and their helpers, 2312788Ki, exceeds managementHost.memory 1000Mi \
         (lower resources.memory, resources.routes or dataPlane.memory, or raise \
         managementHost.memory)",
    );
}

#[test]
fn no_substrate() {
    let text = "apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {name: red}
spec: {nodes: {r: {kind: router}}}
";
    assert_eq!(
        apply_to(text, &machine()).unwrap_err(),
        "fig1.yaml:4:16: node red/r: there is no forwarding engine \
         (apply a Substrate with forwardingEngines first)"
    );
}

/// Without a known PdP node, undefined interfaces and
/// tenants are assumed to exist; everything else is checked.
#[test]
fn spec_files_are_checked_without_a_node() {
    let vnet = GOOD.split_once("---").unwrap().1.replace("name: red", "name: acme.red");
    let cpus = (0..8).collect();
    let alone =
        Existing { substrate: Some(Substrate::of_machine(&cpus)), unknown: true, ..machine() };
    apply_to(&vnet, &alone).unwrap();
    let known = Existing { unknown: false, ..alone.clone() };
    assert!(apply_to(&vnet, &known).unwrap_err().contains("tenant acme does not exist"));
    let twice = vnet.replace("r1:eth2\"", "r1:eth1\"");
    assert!(apply_to(&twice, &alone).unwrap_err().contains("is already used by link2"));
}

#[test]
fn default_substrate_distributes_the_cpus() {
    for (count, power, capacity) in [(1, 500, 500), (2, 1000, 1000), (8, 1000, 7000)] {
        let Substrate { spec, .. } = Substrate::of_machine(&(0..count).collect());
        let engine = &spec.forwarding_engines["fe1"];
        assert_eq!((spec.mux.power.unwrap().0, engine.capacity.0), (power, capacity), "{count}");
    }
}

/// Images are checked where a node changes, and errors have their position.
#[test]
fn image_errors_have_their_position() {
    let text = GOOD.replacen("kind: host", "kind: host\n      image: {rootfs: /none}", 1);
    let file = SourceFile { name: "fig1.yaml".into(), text, ..Default::default() };
    let documents = parse(&[file]).unwrap();
    let check = |image: &pdp_spec::Image| match image.source() {
        pdp_spec::ImageSource::Rootfs(path) => Err(format!("rootfs {path} is not there")),
        _ => Ok(()),
    };
    let found = check_images(&documents, |_, _| true, check, |_| Ok(()));
    assert_eq!(found.len(), 1);
    assert!(found[0].message == "rootfs /none is not there" && found[0].line > 1, "{found:?}");
    assert!(check_images(&documents, |_, _| false, check, |_| Ok(())).is_empty());
}

/// Images by docker's names, or by their source.
#[test]
fn images_have_docker_names_or_sources() {
    let digest = format!("sha256:{}", "5e".repeat(32));
    let with =
        |image: &str| GOOD.replacen("kind: host", &format!("kind: host\n      image: {image}"), 1);
    for good in [
        "frrouting/frr".to_owned(),
        "'registry.example:5000/lab/frr:10'".into(),
        format!("{{pull: frr, digest: '{digest}'}}"),
        "{archive: /srv/frr.tar, reference: 'frr:10'}".into(),
    ] {
        apply_to(&with(&good), &machine()).unwrap_or_else(|refused| panic!("{good}: {refused}"));
    }
    for (bad, said) in [
        ("Frr", "image \"Frr\" needs parts of a-z 0-9, with . _ - inside, joined by /"),
        ("'frr:'", "image \"frr:\" has a tag with characters other than A-Z a-z 0-9 _ . -"),
        ("{pull: 'a b'}", "write it as docker does, like registry.example/frr:10"),
        ("5", "image 5 is a whole number, not a mapping or text"),
        (
            "{pull: frr, archive: /x}",
            "image has more than one of host, rootfs, ociLayout, archive and pull",
        ),
        ("{archive: /x, reference: \"x\\e[2J\"}", "reference has control characters"),
        ("{pull: frr, reference: x}", "reference without ociLayout or archive"),
        (
            "{pull: frr, digest: 'sha256:5e'}",
            "digest \"sha256:5e\" is not sha256: and 64 hexadecimal digits",
        ),
        ("{host: true, digest: 'sha256:5e'}", "digest without archive or pull"),
        ("{archive: frr.tar}", "archive \"frr.tar\" is"),
        ("{archive: \"/srv/\\x01\"}", "archive has control characters, or 6 bytes, 1024 at most"),
        (
            &format!("{{archive: /{}}}", "x".repeat(1024)),
            "archive has control characters, or 1025 bytes, 1024 at most",
        ),
        (&format!("{{rootfs: /{}}}", "x/".repeat(2000)), "rootfs has control characters, or 4001"),
    ] {
        let refused = apply_to(&with(bad), &machine()).unwrap_err();
        assert!(refused.contains(said), "{bad}: {refused}");
    }
}

#[test]
fn file_without_an_object_is_refused() {
    for text in ["", "# nothing", "---\n"] {
        let refused = apply_to(text, &machine()).unwrap_err();
        assert!(refused.starts_with("fig1.yaml:1:1: the file has no object"), "{refused}");
    }
}

/// Three hosts, an external machine and two tunnels.
const LINKS: &str = "apiVersion: pdp/v1
kind: Substrate
metadata: {name: node}
spec:
  mux: {cpus: \"0\", power: 0.5}
  interfaces: {A: {device: ext-a}, B: {device: ext-b}}
---
apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {name: red}
spec:
  nodes:
    h1: {kind: host, interfaces: {eth0: {addresses: [10.0.0.1/24]}}}
    h2: {kind: host, interfaces: {eth0: {addresses: [10.0.0.2/24]}, eth1: {}}}
  externals:
    v: {interface: A, vxlan: {vni: 1, local: 192.0.2.1, remote: 192.0.2.2}}
    w: {interface: A, vxlan: {vni: 2, local: 192.0.2.1, remote: 192.0.2.2}}
    u: {interface: B, udp: {local: fd00::1, remote: fd00::2, localPort: 1, remotePort: 1}}
  links:
    - {endpoints: [ENDS]}
";

#[test]
fn segments_and_transits() {
    // The keys follow the list of ends, if it is closed.
    let closed = |ends: &str| if ends.contains(']') { ends.into() } else { format!("{ends}]") };
    let with = |ends: &str| apply_to(&LINKS.replace("ENDS]", &closed(ends)), &machine());
    let link = |ends: &str| with(ends).unwrap().vnets["red"].spec.links[0].clone();
    let lan = link("\"h1:eth0\", \"h2:eth0\", \"external:v\", \"external:u\"");
    let segment = lan.segment.expect("bounds");
    assert_eq!((segment.addresses, segment.flood_pps), (16_384, 100_000));
    assert_eq!(lan.rate.map(|rate| rate.0), Some(1_000_000_000), "as between two hosts");
    let all = with("\"h1:eth0\", \"h2:eth0\", \"external:v\", \"external:u\"").unwrap();
    let host = &all.vnets["red"].spec.nodes["h1"];
    assert_eq!(host.interfaces["eth0"].mtu, Some(1438), "of the tunnel that carries least");
    let transit = link("\"external:v\", \"external:u\"");
    assert_eq!((transit.segment, transit.rate), (None, None));
    let says = |ends: &str, expected: &str| {
        let words = with(ends).unwrap_err();
        assert!(words.contains(expected), "{words}");
    };
    says(
        "\"external:v\", \"external:w\", \"external:u\"",
        "link red/link1: all ends are tunnels, but a segment does not forward between tunnels \
         (join two of them by a link, or add an interface)",
    );
    says(
        "\"h1:eth0\", \"h2:eth0\"], segment: {addresses: 7}",
        "link red/link1: a link with two ends is not a segment (remove segment, or add an endpoint)",
    );
    says("\"external:v\", \"external:v\"", "endpoint external:v is already used by link1");
    says(
        "\"h1:eth0\", \"h2:eth0\", \"h2:eth1\"], segment: {floodPps: 0}",
        "floodPps 0 is not within 1 to 1000000",
    );
    // Egress of each end counts at its interface.
    let ends = "\"external:v\", \"external:w\"], guarantee: \"60M\", queue: 1";
    let small = LINKS.replace("{device: ext-a}", "{device: ext-a, capacity: 100M}");
    let words = apply_to(&small.replace("ENDS]", ends), &machine()).unwrap_err();
    let expected =
        "link red/link1: guarantee 60Mbps exceeds the 40Mbps that other links leave on interface A";
    assert!(words.contains(expected), "{words}");
    let many: String = (0..17)
        .map(|n| format!("\"h1:e{n}\", \"h2:e{n}\", \"h3:e{n}\"]}}\n    - {{endpoints: ["))
        .collect();
    let ports: String = (0..18).map(|n| format!("e{n}: {{}}, ")).collect();
    let spec = LINKS
        .replace("eth0: {addresses: [10.0.0.1/24]}", &ports)
        .replace("eth0: {addresses: [10.0.0.2/24]}, eth1: {}", &ports)
        .replace(
            "  externals:",
            &format!("    h3: {{kind: host, interfaces: {{{ports}}}}}\n  externals:"),
        )
        .replace("ENDS", &format!("{many}\"h1:e17\", \"external:v\""));
    assert_eq!(
        apply_to(&spec, &machine()).unwrap_err().lines().last().unwrap(),
        "fig1.yaml:20:3: vnet red: its segments learn 278528 addresses, 262144 at most (give each \
         segment fewer addresses)"
    );
}

/// Egress settings of links' ends.
#[test]
fn egress_settings_are_checked() {
    let link = |more: &str| {
        let spec = GOOD.replace("      rate: 100Mbps", &format!("      rate: 100Mbps\n{more}"));
        apply_to(&spec, &machine())
    };
    for (more, expected) in [
        ("      delay: 11s", "48:14: link red/link1: delay 11s exceeds 10s (lower it)"),
        ("      delay: 5", ""),
        (
            "      delay: 5ms\n      jitter: 6",
            "49:15: link red/link1: jitter 6ms exceeds the delay 5ms",
        ),
        ("      reorder: 1%", "48:16: link red/link1: reorder needs a delay"),
        ("      loss: 100.1", "48:13: link red/link1: loss \"100.1\" is above 100%"),
        ("      loss: 0.0000001%", ""),
        (
            "      loss: 0.00000001%",
            "loss \"0.00000001%\" is not a percentage of up to seven decimals",
        ),
        ("      burst: 1000", "48:14: link red/link1: burst 1000 is not 2Ki to 64Mi bytes"),
        ("      weight: 0", "48:15: link red/link1: weight 0 is not within 1 to 1000"),
        ("      overhead: 257", "overhead 257 is not within 0 to 256"),
        ("      queue: 0", "queue \"0\" is not 1 to 4096 frames"),
        ("      queue: 50ms", ""),
        ("      queue: 0ms", "queue \"0ms\" is not a queue's time"),
        (
            "      at: {\"r1:eth1\": {delay: 1ms}}",
            "48:12: link red/link1: r1:eth1 is not an end of the link",
        ),
        ("      at: {\"h1:eth0\": {rate: 1}}", "48:30: link red/link1: rate 1bps is below 8kbps"),
        ("      at: {\"h1:eth0\": {delay: 20ms}}", ""),
        ("      schedule: [{at: 10s, up: false}, {at: 34s, up: true, delay: 80ms}]", ""),
        (
            "      schedule: [{at: 10s}, {at: 10s}]",
            "48:34: link red/link1: at 10s does not exceed 10s of the previous step",
        ),
        (
            "      schedule: [{at: 10s}, {at: 9999ms}]",
            "link red/link1: at 9999ms does not exceed 10s of the previous step",
        ),
        (
            "      schedule: [{at: 1s, jitter: 5ms}]",
            "48:35: link red/link1: jitter 5ms exceeds the delay",
        ),
        (
            "      queues: [{name: a, weight: 3, length: 64, dscp: [46, 44]}, {name: b, length: 9KiB}]",
            "",
        ),
        ("      at: {\"h1:eth0\": {queues: [{name: a}]}}", ""),
        ("      queues: []", "48:7: link red/link1: queues has 0 entries, not within 1 to 4096"),
        ("      queues: [{name: a}, {name: a}]", "48:34: link red/link1: queue a is defined twice"),
        ("      queues: [{name: a b}]", "name \"a b\" is not a DNS label"),
        ("      queues: [{weight: 1}]", "name is missing"),
        ("      queues: [{name: a, weight: 0}]", "weight 0 is not within 1 to 1000"),
        ("      queues: [{name: a, length: 0}]", "length \"0\" is not 1 to 4096 frames"),
        ("      queues: [{name: a, length: 9MiB}]", "length \"9MiB\" is not 1 to 8388608 bytes"),
        ("      queues: [{name: a, length: 1ms}]", "length \"1ms\" is not 1 to 8388608 bytes"),
        ("      queues: [{name: a, buffers: 0}]", "buffers 0 is not within 1 to 4096"),
        ("      queues: [{name: a, length: 64, buffers: 64}, {name: b, buffers: 1000}]", ""),
        ("      queues: [{name: a, length: 9KiB, buffers: 4096}]", ""),
        (
            "      queues: [{name: a, buffers: 1001}]",
            "link red/link1: buffers 1001 exceed the queue's length of 1000 frames (lower buffers, \
             or raise the length)",
        ),
        (
            "      queues: [{name: a, length: 64, buffers: 65}]",
            "48:47: link red/link1: buffers 65 exceed the queue's length of 64 frames",
        ),
        (
            "      queue: 4096\n      queues: [{name: a, buffers: 4096}, {name: b, buffers: 4096}]",
            "",
        ),
        ("      queues: [{name: a, dscp: [64]}]", "dscp[0] 64 is not within 0 to 63"),
        (
            "      queues: [{name: a, dscp: [8]}, {name: b, dscp: [9, 8]}]",
            "link red/link1: DSCP 8 is already used by queue a",
        ),
        (
            "      at: {\"h1:eth0\": {queues: [{name: a, dscp: [8, 8]}]}}",
            "DSCP 8 is already used by queue a",
        ),
        ("      schedule: [{at: 1s, queues: [{name: a}]}]", "unknown key \"queues\""),
        ("      schedule: [{at: 25h}]", "at \"25h\" is not a duration"),
        ("      schedule: [{at: 1500m}]", "at \"1500m\" is above 86400 s"),
    ] {
        match link(more) {
            Ok(_) => assert_eq!(expected, "", "{more}"),
            Err(words) => {
                assert!(!expected.is_empty() && words.contains(expected), "{more}: {words}")
            }
        }
    }
    let intent =
        link("      queue: 50ms\n      at: {\"h1:eth0\": {delay: 20ms, rate: 1Gbps, seed: 3}}");
    let intent = intent.unwrap();
    let link = &intent.vnets["red"].spec.links[0];
    let configs: Vec<_> = link.egress_ends().map(|(_, egress)| egress.to_mux()).collect();
    assert_eq!((configs[0].rate_bps, configs[0].queue_bytes), (Some(100_000_000), 625_000));
    assert_eq!((configs[1].rate_bps, configs[1].queue_bytes), (Some(1_000_000_000), 6_250_000));
    assert_eq!((configs[0].impairments.delay_ns, configs[1].impairments.delay_ns), (0, 20_000_000));
    assert_eq!(link.rate_bps_max(), Some(1_000_000_000));
    // 2.5 MB in flight at 1 Gbps and 20 ms, plus overhead for frames of 60 bytes.
    assert!(
        (2_500_000..4_200_000).contains(&link.delay_line_bytes()),
        "{}",
        link.delay_line_bytes()
    );
    // Each step is complete: missing keys keep their values.
    let spec = "rate: 100Mbps\n      delay: 5ms\n      schedule:\n        - {at: 1s, up: false}\n        \
                - {at: 2s, loss: 1%}\n        - {at: 3s, up: true, delay: 0}";
    let intent = apply_to(&GOOD.replace("rate: 100Mbps", spec), &machine()).unwrap();
    let mut link = intent.vnets["red"].spec.links[0].clone();
    let steps: Vec<_> = link
        .steps()
        .into_iter()
        .map(|(at, up, egress)| {
            let what = egress[1].to_mux().impairments;
            (at.0 / 1_000_000_000, up, what.delay_ns, what.loss.0)
        })
        .collect();
    assert_eq!(
        steps,
        [(1, false, 5_000_000, 0), (2, false, 5_000_000, 10_000_000), (3, true, 0, 10_000_000)]
    );
    // Single keys, as for `pdp link set`.
    let set = |key: &str, value: &str| {
        let value = Some(value.to_owned()).filter(|value| !value.is_empty());
        [(key.to_owned(), value)].into()
    };
    link.set(None, &set("loss", "0.5%")).unwrap();
    link.set(None, &set("delay", "")).unwrap();
    link.set(Some("h1:eth0"), &set("weight", "7")).unwrap();
    let all = link.default_egress();
    assert_eq!((all.loss.unwrap().0, all.delay, all.weight), (5_000_000, None, None));
    assert_eq!(link.at.values().next().unwrap().weight, Some(7));
    link.set(Some("h1:eth0"), &set("weight", "")).unwrap();
    assert!(link.at.is_empty());
    for (at, key, value, expected) in [
        (None, "delay", "soon", "is not a duration"),
        (None, "los", "1", "unknown field `los`"),
        (None, "name", "other", "unknown field `name`"),
        (Some("h1:eth9"), "loss", "1", "the link has no egress at h1:eth9"),
        (Some("h1"), "loss", "1", "h1"),
    ] {
        let error = link.set(at, &set(key, value)).unwrap_err();
        assert!(error.contains(expected), "{error}");
    }
    // Queues are a JSON list, for all ends or for one.
    let queues_at = |link: &pdp_spec::Link, end: &str| link.queues(&end.parse().unwrap());
    link.set(None, &set("queues", r#"[{"name": "a", "dscp": [46]}, {"name": "b", "weight": 3}]"#))
        .unwrap();
    link.set(Some("h1:eth0"), &set("queues", r#"[{"name": "c", "length": "1KiB"}]"#)).unwrap();
    let [all, one] = ["r1:eth0", "h1:eth0"].map(|end| queues_at(&link, end));
    assert_eq!((all.len(), all[0].dscp.as_slice(), all[1].weight), (2, &[46][..], 3));
    assert_eq!((one.len(), one[0].frames, one[0].bytes, link.queues_count()), (1, 4096, 1024, 3));
    assert_eq!(link.mux_bytes(), link.delay_line_bytes() + 3 * 128);
    assert!(link.steps().iter().all(|(_, _, all)| all.iter().all(|it| it.queues.is_none())));
    for wrong in ["[", "[1]", "[{}]", r#"[{"name": "a", "dscp": [256]}]"#, &"[".repeat(9999)] {
        assert!(link.set(None, &set("queues", wrong)).is_err(), "{wrong}");
    }
    link.set(None, &set("queues", "")).unwrap();
    link.set(Some("h1:eth0"), &set("queues", "")).unwrap();
    assert_eq!(link.queues_count(), 0);
    // Frames to the outside egress at the node's interface; the external itself has no egress.
    let end = "rate: 600Mbps\n      at: {\"external:to-x\": {delay: 1ms}}";
    let words = apply_to(&GOOD.replace("rate: 600Mbps", end), &machine()).unwrap_err();
    assert!(words.contains("the link has no egress at external:to-x"), "{words}");
    // The memory is the product of rate and delay, and counts for the network's owner.
    let much = GOOD.replace("rate: 600Mbps", "rate: 10Gbps\n      delay: 10s");
    let words = apply_to(&much, &machine()).unwrap_err();
    assert!(words.contains("delayed frames take"), "{words}");
}
