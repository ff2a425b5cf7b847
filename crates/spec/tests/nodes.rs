//! Settings of nodes besides interfaces and commands: loopback addresses, static routes, sysctls.

use pdp_spec::{Existing, Intent, SourceFile, Substrate, check, parse, sysctl};

/// Checks two routers, of which the first has `keys`, and returns the errors.
fn apply(keys: &str) -> Result<Intent, String> {
    let text = format!(
        "apiVersion: pdp/v1\nkind: VirtualNetwork\nmetadata: {{name: v}}\nspec:\n  nodes:\n    r1:\n\
         \x20     kind: router\n      interfaces:\n        eth0: {{addresses: [10.1.0.1/24, \"fd00:1::1/64\"]}}\n\
         \x20       eth1: {{addresses: [10.2.0.1/30], gateways: [10.2.0.2]}}\n        eth2: {{}}\n\
         \x20       eth0.5: {{}}\n      {keys}\n"
    );
    let file = SourceFile { name: "v.yaml".into(), text, ..SourceFile::default() };
    let substrate = Some(Substrate::of_machine(&(0..4).collect()));
    let existing = Existing { substrate, unknown: true, ..Existing::default() };
    let documents = parse(&[file]);
    documents.and_then(|documents| check(&documents, &existing)).map_err(|diagnostics| {
        diagnostics.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
    })
}

/// Checks that these keys are rejected with these words, after line and node.
#[track_caller]
fn says(keys: &str, expected: &str) {
    let refused = apply(keys).expect_err("refused");
    let place = refused.find("node v/r1: ").unwrap_or_else(|| panic!("{refused}"));
    assert!(refused.starts_with("v.yaml:13:"), "{refused}");
    assert_eq!(&refused[place + "node v/r1: ".len()..], expected);
}

#[test]
fn loopback_addresses() {
    let intent = apply("loopback: [1.1.1.1/32, \"2001:db8::1/128\"]").unwrap();
    assert_eq!(intent.vnets["v"].spec.nodes["r1"].loopback.len(), 2);
    says(
        "loopback: [1.1.1.1/32, 1.1.1.1/32]",
        "address 1.1.1.1/32 is given twice (remove or change one)",
    );
    let refused = apply("loopback: [1.1.1.1]").unwrap_err();
    assert!(refused.contains("(write an address with its prefix length like"), "{refused}");
}

#[test]
fn valid_routes_of_every_kind_are_accepted() {
    let intent = apply(
        r#"routes:
        - {to: 10.100.0.0/16, via: 10.1.0.2}
        - {to: default, via: 10.1.0.2, metric: 10}
        - {to: default, via: "fd00:1::2"}
        - {to: 10.101.0.0/16, via: [10.1.0.2, {via: 10.2.0.2, weight: 3}]}
        - {to: 10.102.0.0/16, via: 192.0.2.1, dev: eth2, onlink: true}
        - {to: 10.103.0.0/16, dev: eth2, scope: link}
        - {to: 10.104.0.0/16, via: 10.103.0.9, dev: eth2}
        - {to: 10.105.0.0/16, via: "fe80::1", dev: eth2}
        - {to: 10.106.0.0/16, via: "fd00:1::2"}
        - {to: 10.107.0.0/16, type: blackhole}
        - {to: "fd66::/32", type: throw, table: 100}
        - {to: 10.108.0.1, via: 10.1.0.2, src: 1.1.1.1, mtu: 1300}
      loopback: [1.1.1.1/32]"#,
    );
    let intent = intent.unwrap_or_else(|refused| panic!("{refused}"));
    let routes = &intent.vnets["v"].spec.nodes["r1"].routes;
    let prefixes: Vec<_> = routes.iter().map(|route| route.prefix().unwrap().to_string()).collect();
    assert_eq!(&prefixes[1..3], ["0.0.0.0/0", "::/0"]);
    assert_eq!(prefixes[11], "10.108.0.1/32");
    let weights: Vec<_> = routes[3].hops().iter().map(|hop| hop.weight).collect();
    assert_eq!(weights, [1, 3]);
    // A stored spec reads back unchanged.
    let stored = serde_json::to_string(routes).unwrap();
    assert_eq!(&serde_json::from_str::<Vec<pdp_spec::StaticRoute>>(&stored).unwrap(), routes);
}

#[test]
fn routes_the_kernel_would_refuse_are_refused() {
    let route = |route: &str, expected| says(&format!("routes: [{{to: {route}}}]"), expected);
    route(
        "10.9.0.0/16, via: 192.0.2.1",
        "via 192.0.2.1 is in no interface's subnet (subnets: 10.1.0.0/24 on eth0, fd00:1::/64 on \
         eth0, 10.2.0.0/30 on eth1; or set dev and onlink: true)",
    );
    route(
        "10.9.0.0/16, via: 10.1.0.2, dev: eth1",
        "via 10.1.0.2 is outside the subnets of eth1 (use an address in 10.2.0.0/30, or add \
         onlink: true)",
    );
    route(
        "10.9.0.0/16, via: 10.1.0.1",
        "via 10.1.0.1 is the node's own address (give the address of the node at the other end)",
    );
    route(
        "10.9.0.0/16, via: \"fe80::1\"",
        "via fe80::1 is link-local and has no dev (name the interface in dev)",
    );
    route(
        "\"fd09::/16\", via: 10.1.0.2",
        "via 10.1.0.2 is IPv4, but the destination fd09::/16 is IPv6 (use an IPv6 next hop)",
    );
    route("10.9.0.0/16, dev: eht0", "interface eht0 does not exist (did you mean eth0?)");
    route(
        "10.9.0.0/16",
        "to 10.9.0.0/16 has no next hop (give via, dev, or a type such as blackhole)",
    );
    route(
        "default, type: blackhole",
        "to default has no IP version, and there is no next hop (write 0.0.0.0/0 or ::/0)",
    );
    route(
        "10.9.0.0/16, via: 10.1.0.2, type: blackhole",
        "via has no effect: routes of this type have no next hop (remove it)",
    );
    route(
        "default, via: 10.1.0.2",
        "to 0.0.0.0/0 is also the destination of the gateway 10.2.0.2 of eth1 (give one of them a \
         metric, or one route a list of next hops in via)",
    );
    route(
        "10.9.0.0/16, via: [10.1.0.2, 10.1.0.2]",
        "the next hop is given twice (give it once, with a weight)",
    );
    route("10.9.0.0/16, via: []", "via is an empty list (name a next hop)");
    route(
        "10.9.0.0/16, via: 10.1.0.2, scope: link",
        "scope is not global, but the route has a next hop (remove scope: a route with a next hop \
         is global)",
    );
    route(
        "10.9.0.0/16, via: 10.1.0.2, src: 9.9.9.9",
        "src 9.9.9.9 is not an address of the node (use one of an interface, or add it to \
         loopback)",
    );
    route(
        "10.9.0.0/16, via: 10.1.0.2, table: 255",
        "table 255 is the kernel's own (give addresses by loopback, or use another table)",
    );
    route(
        "\"fd09::/16\", via: \"fd00:1::2\", mtu: 1000",
        "mtu 1000 is below IPv6's minimum of 1280",
    );
    let refused = apply("routes: [{to: 10.9.0.1/16, via: 10.1.0.2}]").unwrap_err();
    assert!(
        refused.contains("has bits beyond its prefix length; its network is 10.9.0.0/16"),
        "{refused}"
    );
}

#[test]
fn program_files_are_checked() {
    let program = |files: &str| {
        format!("dataPlane: {{program: {{run: /hub.py, attach: tap, files: {{{files}}}}}}}")
    };
    let good = "/hub.py: {content: x, mode: \"0755\"}, /opt/a/b: {content: y, owner: \"1000:7\"}";
    apply(&program(good)).unwrap_or_else(|refused| panic!("{refused}"));
    let one = |file: &str, expected| says(&program(file), expected);
    one(
        "/usr/bin/hub: {content: x}",
        "PdP puts no files at /usr/bin/hub (use a path directly below / or below one of /etc, \
         /home, /opt, /root, /run, /srv, /tmp, /var)",
    );
    one(
        "/run/pdp/routes: {content: x}",
        "PdP puts no files at /run/pdp/routes (/run/pdp belongs to PdP; use another path)",
    );
    one(
        "/opt/../x: {content: x}",
        "\"/opt/../x\" is not an absolute path without .. (begin it with /)",
    );
    one("/x: {}", "file /x needs exactly one of content and from (give one of them)");
    one(
        "/x: {content: x, owner: frr}",
        "owner \"frr\" is not a number (the program runs as user and group 1000)",
    );
    let large = format!("/x: {{content: {}}}", "x".repeat(256 << 10));
    apply(&program(&large)).unwrap_or_else(|refused| panic!("{refused}"));
    one(
        &format!("{large}, /y: {{content: y}}"),
        "files have 262145 bytes, 262144 at most (put them into an image instead)",
    );

    // From a file next to the spec.
    let text = "apiVersion: pdp/v1\nkind: VirtualNetwork\nmetadata: {name: v}\nspec: {nodes: {r1: {kind: router, \
                interfaces: {}, dataPlane: {program: {run: /x, attach: tap, files: {/x: {from: hub.py}}}}}}}\n";
    let file = SourceFile::read("v.yaml", text, |path, _| Ok(format!("of {path}").into_bytes()));
    assert_eq!(file.attachments.len(), 1);
    let documents = parse(&[file]).unwrap();
    let object = serde_json::to_value(&documents[0].object).unwrap();
    let found = &object["spec"]["nodes"]["r1"]["dataPlane"]["program"]["files"]["/x"];
    assert_eq!(found["content"], "of hub.py");
    assert!(found.get("from").is_none());
}

#[test]
fn only_listed_sysctls_can_be_set() {
    let keys = "sysctls: {net.ipv4.tcp_ecn: 1, net.ipv4.conf.all.rp_filter: 2, \
                net.ipv4.conf.eth0/5.proxy_arp: 1, net.ipv6.conf.lo.disable_ipv6: 1, \
                net.ipv4.tcp_rmem: \"4096 131072 6291456\"}";
    apply(keys).unwrap_or_else(|refused| panic!("{refused}"));
    let one = |name: &str, expected| says(&format!("sysctls: {{{name}: 1}}"), expected);
    one(
        "net.ipv4.tcp_enc",
        "sysctl \"net.ipv4.tcp_enc\" can't be set (did you mean net.ipv4.tcp_ecn? docs/sysctls.md lists what can be set)",
    );
    one(
        "net.ipv4.conf.eth0.rpfilter",
        "sysctl \"net.ipv4.conf.eth0.rpfilter\" can't be set (did you mean \
         net.ipv4.conf.eth0.rp_filter? docs/sysctls.md lists what can be set)",
    );
    one(
        "net.ipv4.ipfrag_high_thresh",
        "sysctl \"net.ipv4.ipfrag_high_thresh\" can't be set (kernel memory that is charged to no \
         node; docs/sysctls.md lists what can be set)",
    );
    one(
        "kernel.core_pattern",
        "sysctl \"kernel.core_pattern\" can't be set (only settings of a network namespace can be \
         set; docs/sysctls.md lists what can be set)",
    );
    one(
        "net.ipv4.ip_forward",
        "sysctl net.ipv4.ip_forward can't be set on a router (a router forwards, and so do its \
         forwarding guests; make it kind: host, or remove it)",
    );
    one("net.ipv4.conf.eth7.rp_filter", "interface eth7 does not exist (did you mean eth0?)");
    // No interface name makes a sysctl outside the list valid.
    for name in
        ["net.ipv4.conf./../../kernel.rp_filter", "net.ipv4.conf...rp_filter", "net.ipv4.conf.all"]
    {
        assert!(apply(&format!("sysctls: {{\"{name}\": 1}}")).is_err(), "{name}");
    }
    says(
        "sysctls: {net.ipv4.tcp_ecn: \"\"}",
        "sysctl net.ipv4.tcp_ecn has no usable value (give one line of at most 256 characters)",
    );
    assert!(sysctl::sysctls().count() > 150);
}

#[test]
fn volumes() {
    let keys = "volumes: [\"a:/srv/a\", {source: b, target: /srv/b, size: 16Mi}]";
    let intent = apply(keys).unwrap_or_else(|refused| panic!("{refused}"));
    let node = &intent.vnets["v"].spec.nodes["r1"];
    let parts: Vec<_> = node.volumes.iter().map(|volume| volume.parts().unwrap()).collect();
    assert_eq!(parts.iter().map(|parts| parts.size.0 >> 20).collect::<Vec<_>>(), [64, 16]);
    assert_eq!(intent.vnets["v"].usage().volume_bytes, 80 << 20);
    let one = |volume: &str, expected: &str| says(&format!("volumes: [{volume}]"), expected);
    for bad in ["a", "\"a:/b:ro\""] {
        one(
            bad,
            "the volume is not NAME:TARGET (write NAME:TARGET, or a mapping with source, target \
             and size)",
        );
    }
    one(
        "\"/srv:/srv\"",
        "source \"/srv\" is not a volume name: 1 to 63 letters, digits, - and _ (use a name like \
         frr-state; for a path of the machine use binds)",
    );
    one(
        "\"a:srv\"",
        "target \"srv\" is not an absolute path without .. (name a directory in the node, like /var/lib/frr)",
    );
    for bad in ["/run", "/run/pdp/x", "/dev/shm", "/proc"] {
        let said = format!(
            "target {bad} can't have a volume (choose a place that is not at, above or below /dev, \
             /proc, /sys, /run/pdp)"
        );
        one(&format!("\"a:{bad}\""), &said);
    }
    one(
        "\"a:/a\", \"b:/a/\"",
        "target /a is used by another volume or bind (give each its own target)",
    );
    one(
        "\"a:/a\", \"a:/b\"",
        "volume a is defined twice (a volume has one target; rename or remove one)",
    );
    one(
        "{source: a, target: /a, size: 1Mi}",
        "volume a: size 1Mi is not within 16Mi to 1Ti (choose a size within these bounds)",
    );
}

#[test]
fn binds() {
    let keys = "binds: [\"/srv/a:/a\", \"/srv/b:/b:ro\", {source: /srv/c, target: /etc/c, readOnly: true}]";
    let intent = apply(keys).unwrap_or_else(|refused| panic!("{refused}"));
    let binds = &intent.vnets["v"].spec.nodes["r1"].binds;
    let parts: Vec<_> = binds.iter().map(|bind| bind.parts().unwrap()).collect();
    assert_eq!(parts.iter().map(|parts| parts.read_only).collect::<Vec<_>>(), [false, true, true]);
    let one = |bind: &str, expected| says(&format!("binds: [{bind}]"), expected);
    one(
        "/srv/a",
        "the bind is not SOURCE:TARGET, SOURCE:TARGET:ro or SOURCE:TARGET:rw (write SOURCE:TARGET \
         or SOURCE:TARGET:ro)",
    );
    one(
        "\"/srv/a:/a:z\"",
        "the bind is not SOURCE:TARGET, SOURCE:TARGET:ro or SOURCE:TARGET:rw (write SOURCE:TARGET \
         or SOURCE:TARGET:ro)",
    );
    one(
        "\"./a:/a\"",
        "source \"./a\" is not an absolute path without .. (name a file or directory of the daemon's \
        machine, like /srv/lab)",
    );
    one(
        "\"/:/a\"",
        "source \"/\" is not an absolute path without .. (name a file or directory of the daemon's \
        machine, like /srv/lab)",
    );
    one(
        "\"/srv:/proc/x\"",
        "target /proc/x can't be bound (choose a place that is not below /dev, /proc, /sys, \
         /run/pdp)",
    );
    one(
        "\"/srv/a:/a\", \"/srv/b:/a/\"",
        "target /a is used by another bind (give each its own target)",
    );
}
