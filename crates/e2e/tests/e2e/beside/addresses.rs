//! One address on several interfaces: link-local gateways, unnumbered links, customers of VRFs,
//! anycast gateways. Also equal-cost paths in two stages, where each node chooses independently.

use pdp_e2e::{TestNode, all_answered, eventually};

/// Data planes of routers, as `dataPlane` values of a spec.
const PLANES: [(&str, &str); 3] =
    [("parallel", "{}"), ("fastpath", "{kind: fastpath}"), ("kernel", "{kind: kernel}")];

fn vnet(name: &str, spec: &str) -> String {
    format!(
        "---\napiVersion: pdp/v1\nkind: VirtualNetwork\nmetadata: {{name: {name}}}\nspec:\n{spec}"
    )
}

fn pings(node: &TestNode, from: &str, to: &str) {
    let ping = || node.try_exec(from, &format!("ping -c3 -i0.1 -W2 {to}"));
    eventually(&format!("{from} reaches {to}"), || {
        ping().is_ok_and(|output| all_answered(&output, 3))
    });
}

/// A router with `fe80::1` on each interface, which is its hosts' gateway.
fn link_local(name: &str, plane: &str) -> String {
    let port = |number: u8| format!("{{addresses: [\"fe80::1/64\", \"2001:db8:{number}::1/64\"]}}");
    let host = |number: u8| {
        format!(
            "    h{number}: {{kind: host, interfaces: {{eth0: {{addresses: [\"2001:db8:{number}::2/64\"], \
             gateways: [\"fe80::1\"]}}}}}}\n"
        )
    };
    vnet(
        name,
        &format!(
            "  nodes:\n    r1: {{kind: router, dataPlane: {plane}, interfaces: {{eth0: {}, eth1: {}}}}}\n{}{}  \
             links: [{{endpoints: [\"r1:eth0\", \"h1:eth0\"]}}, {{endpoints: [\"r1:eth1\", \"h2:eth0\"]}}]\n",
            port(1),
            port(2),
            host(1),
            host(2)
        ),
    )
}

/// Three routers in a row, each with one IPv4 and one IPv6 address on loopback and on all of its
/// interfaces.
fn unnumbered(name: &str, plane: &str) -> String {
    let route = |to: u8, via: u8, dev: &str| {
        format!(
            "{{to: 192.0.2.{to}, via: 192.0.2.{via}, dev: {dev}, onlink: true}}, {{to: \"2001:db8::{to}\", via: \
             \"2001:db8::{via}\", dev: {dev}, onlink: true}}"
        )
    };
    let router = |number: u8, ports: &[&str], routes: &[String]| {
        let all = format!("[192.0.2.{number}/32, \"2001:db8::{number}/128\"]");
        let ports: Vec<_> =
            ports.iter().map(|port| format!("{port}: {{addresses: {all}}}")).collect();
        format!(
            "    r{number}: {{kind: router, dataPlane: {plane}, loopback: {all}, interfaces: {{{}}}, routes: \
             [{}]}}\n",
            ports.join(", "),
            routes.join(", ")
        )
    };
    vnet(
        name,
        &format!(
            "  nodes:\n{}{}{}  links: [{{endpoints: [\"r1:eth0\", \"r2:eth0\"]}}, {{endpoints: [\"r2:eth1\", \
             \"r3:eth0\"]}}]\n",
            router(1, &["eth0"], &[route(2, 2, "eth0"), route(3, 2, "eth0")]),
            router(2, &["eth0", "eth1"], &[route(1, 1, "eth0"), route(3, 3, "eth1")]),
            router(3, &["eth0"], &[route(2, 2, "eth0"), route(1, 2, "eth0")])
        ),
    )
}

#[test]
fn link_local_gateways_and_unnumbered_links_forward() {
    let node = TestNode::start("addresses");
    for (plane, words) in PLANES {
        let (one, two) = (format!("ll-{plane}"), format!("un-{plane}"));
        node.apply(&[link_local(&one, words), unnumbered(&two, words)].concat());
        pings(&node, &format!("{one}/h1"), "2001:db8:2::2");
        for to in ["192.0.2.2", "192.0.2.3", "2001:db8::3"] {
            pings(&node, &format!("{two}/r1"), to);
        }
        // Names resolve to the loopback's address, and each interface has its own name.
        let names = node.exec(&format!("{two}/r1"), "getent ahostsv4 r3 eth1.r2");
        assert!(names.contains("192.0.2.3") && names.contains("192.0.2.2"), "{names}");
        let hosts = node.exec(&format!("{one}/h1"), "cat /etc/hosts");
        assert!(!hosts.contains("fe80"), "{hosts}");
        node.pdp(&["delete", &one, &two]);
    }
}

/// Two customers with the same addresses. The router has both interfaces in
/// the same subnet, as needed for VRFs that it makes later. Until then the
/// kernel decides which customer answers; each can reach the router.
#[test]
fn router_interfaces_may_have_equal_subnets() {
    let node = TestNode::start("equal-subnets");
    for (plane, words) in PLANES {
        let name = format!("pe-{plane}");
        node.apply(&vnet(
            &name,
            &format!(
                "  nodes:\n    pe: {{kind: router, dataPlane: {words}, interfaces: {{eth0: {{addresses: \
                 [10.0.0.1/24]}}, eth1: {{addresses: [10.0.0.1/24]}}}}}}\n    red: {{kind: host, interfaces: \
                 {{eth0: {{addresses: [10.0.0.2/24]}}}}}}\n    blue: {{kind: host, interfaces: {{eth0: \
                 {{addresses: [10.0.0.2/24]}}}}}}\n  links: [{{endpoints: [\"pe:eth0\", \"red:eth0\"]}}, \
                 {{endpoints: [\"pe:eth1\", \"blue:eth0\"]}}]\n"
            ),
        ));
        let pe = format!("{name}/pe");
        eventually("both have their address", || {
            let output = node.try_exec(&pe, "ip -4 -br addr").unwrap_or_default();
            output.matches("10.0.0.1/24").count() == 2
        });
        pings(&node, &format!("{name}/red"), "10.0.0.1");
        node.pdp(&["delete", &name]);
    }
}

/// Two leaves with one gateway address and MAC address on a segment. Both answer ARP; a host's
/// frames reach one of them.
#[test]
fn two_leaves_forward_as_one_anycast_gateway() {
    let leaf = |number: u8| {
        format!(
            "    leaf{number}: {{kind: router, loopback: [10.9.0.53/32, 192.0.2.{number}/32], interfaces: {{eth0: \
             {{mac: \"02:00:5e:00:00:01\", addresses: [10.1.0.1/24], anycast: true}}}}}}\n"
        )
    };
    let host = |number: u8| {
        format!(
            "    pc{number}: {{kind: host, interfaces: {{eth0: {{addresses: [10.1.0.1{number}/24], gateways: \
             [10.1.0.1]}}}}}}\n"
        )
    };
    let spec = format!(
        "  nodes:\n{}{}{}{}  links:\n    - {{endpoints: [\"leaf1:eth0\", \"leaf2:eth0\", \"pc1:eth0\", \
         \"pc2:eth0\"]}}\n",
        leaf(1),
        leaf(2),
        host(1),
        host(2)
    );
    let node = TestNode::start("anycast");
    node.apply(&vnet("any", &spec));
    for pc in ["any/pc1", "any/pc2"] {
        pings(&node, pc, "10.1.0.1");
        pings(&node, pc, "10.9.0.53");
    }
    pings(&node, "any/pc1", "10.1.0.12");
    // Without the key it is an error.
    let refused = node.try_apply(&vnet("any", &spec.replace(", anycast: true", ""))).unwrap_err();
    assert!(refused.contains("anycast: true at both interfaces"), "{refused}");
}

/// s chooses between a and b, each of which chooses between c and d.
fn two_stages(plane: &str) -> String {
    let router = |name: &str, ports: &str, routes: &str| {
        format!(
            "    {name}: {{kind: router, dataPlane: {plane}, interfaces: {{{ports}}}, routes: [{routes}]}}\n"
        )
    };
    let port = |name: &str, address: &str| format!("{name}: {{addresses: [{address}]}}");
    let middle = |name: &str, up: u8, left: u8, right: u8| {
        let ports = [
            port("eth0", &format!("10.0.{up}.1/31")),
            port("eth1", &format!("10.0.{left}.0/31")),
            port("eth2", &format!("10.0.{right}.0/31")),
        ];
        let routes = format!(
            "{{to: 10.2.0.0/24, via: [{{via: 10.0.{left}.1}}, {{via: 10.0.{right}.1}}]}}, {{to: 10.1.0.0/24, via: \
             10.0.{up}.0}}"
        );
        router(name, &ports.join(", "), &routes)
    };
    let last = |name: &str, one: u8, two: u8, down: u8| {
        let ports = [
            port("eth0", &format!("10.0.{one}.1/31")),
            port("eth1", &format!("10.0.{two}.1/31")),
            port("eth2", &format!("10.0.{down}.0/31")),
        ];
        let routes = format!(
            "{{to: 10.2.0.0/24, via: 10.0.{down}.1}}, {{to: 10.1.0.0/24, via: 10.0.{one}.0}}"
        );
        router(name, &ports.join(", "), &routes)
    };
    let first = router(
        "s",
        "eth0: {addresses: [10.1.0.1/24]}, eth1: {addresses: [10.0.1.0/31]}, eth2: {addresses: [10.0.2.0/31]}",
        "{to: 10.2.0.0/24, via: [{via: 10.0.1.1}, {via: 10.0.2.1}]}",
    );
    let end = router(
        "t",
        "eth0: {addresses: [10.0.7.1/31]}, eth1: {addresses: [10.0.8.1/31]}, eth2: {addresses: [10.2.0.1/24]}",
        "{to: 10.1.0.0/24, via: 10.0.7.0}",
    );
    let host = |name: &str, net: u8| {
        format!(
            "    {name}: {{kind: host, interfaces: {{eth0: {{addresses: [10.{net}.0.2/24], gateways: \
             [10.{net}.0.1]}}}}}}\n"
        )
    };
    let links = [
        "src:eth0 s:eth0",
        "s:eth1 a:eth0",
        "s:eth2 b:eth0",
        "a:eth1 c:eth0",
        "a:eth2 d:eth0",
        "b:eth1 c:eth1",
        "b:eth2 d:eth1",
        "c:eth2 t:eth0",
        "d:eth2 t:eth1",
        "t:eth2 dst:eth0",
    ];
    let links: String = links
        .map(|ends| format!("    - endpoints: [\"{}\"]\n", ends.replace(' ', "\", \"")))
        .concat();
    let middles =
        [middle("a", 1, 3, 4), middle("b", 2, 5, 6), last("c", 3, 5, 7), last("d", 4, 6, 8)]
            .concat();
    let hosts = [host("src", 1), host("dst", 2)].concat();
    vnet("ecmp", &format!("  nodes:\n{hosts}{first}{middles}{end}  links:\n{links}"))
}

/// 400 flows of five packets.
const FLOWS: &str = r#"
import socket, time
for port in range(400):
    flow = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    flow.bind(("", 20000 + port))
    for _ in range(5):
        flow.sendto(b"x" * 100, ("10.2.0.2", 9000))
    flow.close()
    if port % 20 == 19:
        time.sleep(0.02)
"#;

#[test]
fn second_ecmp_stage_uses_all_its_links() {
    if !std::path::Path::new("/proc/sys/net/ipv4/fib_multipath_hash_seed").exists() {
        // Before Linux 6.11.
        return;
    }
    let node = TestNode::start("two-stages");
    node.apply(&two_stages("{kind: kernel}"));
    pings(&node, "ecmp/src", "10.2.0.2");
    let seed = |name: &str| node.exec(name, "sysctl -n net.ipv4.fib_multipath_hash_seed");
    assert_ne!(seed("ecmp/s"), seed("ecmp/a"));
    let ends = [("a", "eth1"), ("a", "eth2"), ("b", "eth1"), ("b", "eth2")];
    let sent = || {
        let stats = node.json(&["stats"]);
        ends.map(|(name, port)| {
            let port = &stats["vnets"]["ecmp"]["nodes"][name]["ports"][port];
            port["sent"].as_u64().unwrap_or_default()
        })
    };
    let before = sent();
    node.pdp(&["exec", "ecmp/src", "--", "python3", "-c", FLOWS]);
    eventually("all of them have passed", || {
        sent().iter().sum::<u64>() >= before.iter().sum::<u64>() + 2000
    });
    // A quarter of 2,000 each, with some tolerance for chance.
    let grown: Vec<u64> = sent().iter().zip(before).map(|(now, before)| now - before).collect();
    assert!(grown.iter().all(|sent| (250..=750).contains(sent)), "{grown:?}");
}
