//! Addresses and names of interfaces: everything that Linux allows
//! is allowed, and everything else is rejected before a node starts.

use pdp_spec::{Existing, Intent, SourceFile, Substrate, check, parse};

const HEAD: &str = "apiVersion: pdp/v1\nkind: VirtualNetwork\nmetadata: {name: lab}\nspec:\n";

fn apply_to(spec: &str, existing: &Existing) -> Result<Intent, Vec<String>> {
    let text = format!("{HEAD}{spec}");
    let file = SourceFile { name: "f".into(), text, ..Default::default() };
    let documents = parse(&[file]);
    let checked = documents.and_then(|documents| check(&documents, existing));
    checked.map_err(|all| all.iter().map(ToString::to_string).collect())
}

fn machine() -> Existing {
    let cpus = [0, 1].into();
    let substrate = Some(Substrate::of_machine(&cpus));
    Existing { substrate, unknown: true, cpus, ..Existing::default() }
}

#[track_caller]
fn accepts(spec: &str) {
    if let Err(refused) = apply_to(spec, &machine()) {
        panic!("{spec}\n{refused:#?}");
    }
}

/// Each error is one line that contains the words in its place.
#[track_caller]
fn refuses(spec: &str, words: &[&str]) {
    let refused = apply_to(spec, &machine()).expect_err("refused");
    assert_eq!(refused.len(), words.len(), "{refused:#?}");
    for (line, word) in refused.iter().zip(words) {
        assert!(line.contains(word), "{word}\n{refused:#?}");
    }
}

fn node(interfaces: &str, more: &str) -> String {
    format!("  nodes:\n    r1: {{kind: router, interfaces: {{{interfaces}}}{more}}}\n")
}

#[test]
fn interfaces_may_repeat_a_link_local_address() {
    let one = "eth0: {addresses: [\"fe80::1/64\"]}, eth1: {addresses: [\"fe80::1/64\"]}";
    accepts(&node(one, ""));
    let gateways = "  nodes:\n    r1: {kind: router, interfaces: {eth0: {addresses: [\"fe80::1/64\"]}}}\n    \
                    h1: {kind: host, interfaces: {eth0: {addresses: [\"fd00::2/64\"], gateways: [\"fe80::1\"]}}}\n  \
                    links: [{endpoints: [\"r1:eth0\", \"h1:eth0\"]}]\n";
    accepts(gateways);
}

#[test]
fn unnumbered_interfaces_borrow_the_loopbacks_address() {
    let ports =
        "eth0: {addresses: [192.0.2.1/32, \"fd00::1/128\"]}, eth1: {addresses: [192.0.2.1/32]}";
    let more = ", loopback: [192.0.2.1/32, \"fd00::1/128\"], routes: [{to: 192.0.2.2, via: 192.0.2.2, dev: \
                eth0, onlink: true}]";
    accepts(&node(ports, more));
}

#[test]
fn interfaces_may_repeat_addresses_for_vrfs() {
    accepts(&node("eth0: {addresses: [10.0.0.1/24]}, eth1: {addresses: [10.0.0.1/24]}", ""));
}

#[test]
fn duplicate_address_on_an_interface_is_refused() {
    let twice = node("eth0: {addresses: [10.0.0.1/24, 10.0.0.1/32]}", "");
    refuses(&twice, &["vport lab/r1:eth0: address 10.0.0.1/32 is given twice"]);
    let lo = node("eth0: {}", ", loopback: [\"fd00::1/128\", \"fd00::1/128\"]");
    refuses(&lo, &["address fd00::1/128 is given twice"]);
}

fn leaves(one: &str, two: &str) -> String {
    let leaf = |anycast: &str| {
        format!("{{mac: \"02:00:5e:00:00:01\", addresses: [10.1.0.1/24]{anycast}}}")
    };
    format!(
        "  nodes:\n    l1: {{kind: router, interfaces: {{eth0: {}}}}}\n    l2: {{kind: router, interfaces: \
         {{eth0: {}}}}}\n    h: {{kind: host, interfaces: {{eth0: {{addresses: [10.1.0.2/24]}}}}}}\n  links: \
         [{{endpoints: [\"l1:eth0\", \"l2:eth0\", \"h:eth0\"]}}]\n",
        leaf(one),
        leaf(two)
    )
}

#[test]
fn anycast_interfaces_share_their_mac_and_address() {
    accepts(&leaves(", anycast: true", ", anycast: true"));
    let hint = "anycast: true at both";
    for only in [leaves("", ""), leaves(", anycast: true", ""), leaves("", ", anycast: true")] {
        refuses(&only, &[hint, hint]);
    }
}

#[test]
fn invalid_interface_names_are_refused_with_a_suggestion() {
    for name in ["all", "default", ".", ".."] {
        refuses(&node(&format!("{name:?}: {{}}"), ""), &["reserved by Linux (use eth0"]);
    }
    for (name, instead) in [
        ("eth%d", "(write eth-d)"),
        ("ge-0/0/0", "(write ge-0-0-0)"),
        ("Gi1/0:2", "(write Gi1-0-2)"),
        ("eth 0", "(write eth-0)"),
        ("%", "(use eth0"),
    ] {
        refuses(&node(&format!("{name:?}: {{}}"), ""), &[instead]);
    }
    for good in ["swp1.100", "übung", "ge-0.0.0", "abcdefghijklmno", "all0"] {
        accepts(&node(&format!("{good:?}: {{}}"), ""));
    }
}

#[test]
fn suggested_names_are_valid() {
    for (name, instead) in
        [("leaf_1", "write leaf-1:"), ("Spine.2", "write Spine-2:"), ("_x_", "write x:")]
    {
        refuses(&format!("  nodes:\n    {name}: {{kind: host}}\n"), &[instead]);
    }
    let file = |name: &str| {
        let text = HEAD.replace("name: lab", &format!("name: {name}")) + "  nodes: {}\n";
        SourceFile { name: "f".into(), text, ..Default::default() }
    };
    for (name, instead) in
        [("My_Lab", "write my-lab:"), ("Lab", "write lab:"), ("a.b_c", "(use lower-case")]
    {
        let documents = parse(&[file(name)]).unwrap();
        let refused = check(&documents, &machine()).unwrap_err()[0].to_string();
        assert!(refused.contains(instead), "{refused}");
    }
}

#[test]
fn ipv6_needs_an_mtu_of_1280() {
    let small = |mtu: u32, what: &str, more: &str| {
        node(&format!("eth0: {{mtu: {mtu}, {what}}}, eth1.5: {{}}"), more)
    };
    let address = "addresses: [10.0.0.1/24, \"fd00::1/64\"]";
    refuses(&small(576, address, ""), &["address fd00::1/64 needs an mtu of 1280, eth0 has 576"]);
    accepts(&small(1280, address, ""));
    refuses(&small(1279, "gateways: [\"fe80::1\"]", ""), &["gateway fe80::1 needs an mtu of 1280"]);
    let route =
        |route: &str| small(576, "addresses: [10.0.0.1/24]", &format!(", routes: [{route}]"));
    let needs = &["lab/r1: an IPv6 route needs an mtu of 1280, eth0 has 576"];
    refuses(&route("{to: \"fd00::/64\", dev: eth0}"), needs);
    refuses(&route("{to: 10.1.0.0/16, via: \"fe80::1\", dev: eth0}"), needs);
    accepts(&route("{to: 10.1.0.0/16, via: 10.0.0.2}, {to: \"fd00::/64\", dev: eth1.5}"));
    let sysctl = |key: &str| small(576, "", &format!(", sysctls: {{{key}: 0}}"));
    refuses(&sysctl("net.ipv6.conf.eth0.accept_ra"), &["needs an mtu of 1280, eth0 has 576"]);
    accepts(&sysctl("net.ipv6.conf.eth1/5.accept_ra"));
    accepts(&sysctl("net.ipv6.conf.default.accept_ra"));
}

#[test]
fn machine_without_ipv6_refuses_only_ipv6() {
    let machine = Existing { without_v6: true, ..machine() };
    let v4 = node("eth0: {addresses: [10.0.0.1/24]}", ", routes: [{to: default, via: 10.0.0.2}]");
    apply_to(&v4, &machine).unwrap();
    let v6 = node(
        "eth0: {addresses: [\"fd00::1/64\"], gateways: [\"fe80::1\"]}",
        ", loopback: [\"fd00::2/128\"], routes: [{to: 10.0.0.0/8, via: \"fe80::1\", dev: eth0}, {to: \
         \"fd01::/16\", dev: eth0}], sysctls: {net.ipv6.bindv6only: 1}",
    );
    let refused = apply_to(&v6, &machine).unwrap_err();
    let words = [
        "address fd00::1/64",
        "gateway fe80::1",
        "address fd00::2/128",
        "via fe80::1",
        "route fd01::/16",
        "sysctl net.ipv6.bindv6only",
    ];
    assert_eq!(refused.len(), words.len(), "{refused:#?}");
    for (line, word) in refused.iter().zip(words) {
        let said = format!("{word} needs IPv6, which this machine's kernel lacks");
        assert!(line.contains(&said) && line.contains("ipv6.disable=1"), "{line}");
    }
}

#[test]
fn sysctls_of_mpls_and_vrfs_can_be_set() {
    let with = |sysctls: &str| node("eth0: {}", &format!(", sysctls: {{{sysctls}}}"));
    accepts(&with(
        "net.mpls.platform_labels: 1000, net.mpls.conf.eth0.input: 1, net.mpls.conf.lo.input: 1, \
         net.mpls.ip_ttl_propagate: 0, net.mpls.default_ttl: 64, net.vrf.strict_mode: 1, \
         net.ipv4.fib_multipath_hash_seed: 7",
    ));
    accepts(&with("net.mpls.platform_labels: \"131072\""));
    for bad in ["131073", "many"] {
        refuses(
            &with(&format!("net.mpls.platform_labels: {bad}")),
            &["is not a number up to 131072"],
        );
    }
    refuses(&with("net.mpls.conf.all.input: 1"), &["interface all does not exist"]);
    refuses(&with("net.mpls.conf.eth1.input: 1"), &["interface eth1 does not exist"]);
    refuses(
        &with("net.zz.whatever: 1"),
        &["can't be set (not on PdP's list; docs/sysctls.md lists what can be set)"],
    );
}

/// Generated files with hundreds of nodes share a configuration in this way.
#[test]
fn many_aliases_of_one_anchor_are_fine() {
    let mut spec =
        String::from("  nodes:\n    r0: {kind: host, files: &f {/etc/x: {content: x}}}\n");
    (1..250).for_each(|n| spec.push_str(&format!("    r{n}: {{kind: host, files: *f}}\n")));
    accepts(&spec);
}

#[test]
fn alias_expansion_is_bounded() {
    let texts = [
        (vec!["x"; 1000].join(", "), "a spec file has at most 250000 values"),
        ("x".repeat(1 << 17), "a spec file has at most 16777216 bytes"),
    ];
    for (what, said) in texts {
        let aliases = vec!["*a"; 400].join(", ");
        let text = format!("{HEAD}  a: &a [{what}]\n  b: [{aliases}]\n");
        let file = SourceFile { name: "f".into(), text, ..Default::default() };
        let refused = parse(&[file]).unwrap_err();
        assert_eq!(refused.len(), 1, "{refused:?}");
        let words = refused[0].to_string();
        assert!(
            words.contains(said) && words.ends_with("(split it into several files)"),
            "{words}"
        );
    }
}
