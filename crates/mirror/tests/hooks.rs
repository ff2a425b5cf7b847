//! Hooks into the kernel's forwarding are found and reported within a
//! second, and disappear when they are removed.

mod common;

use std::time::{Duration, Instant};

use common::guest::Guest;
use common::{Mirror, Netns, eventually};
use pdp_proto::mirror::HookPolicy;
use pdp_proto::routes::{FromGuest, VportHooks};

/// Longest delay of a report. Retries allow more on a busy
/// machine, so that a single late report fails no test.
const SOON: Duration = Duration::from_secs(1);

const NONE: VportHooks =
    VportHooks { all: false, v4: false, v6: false, out: false, back_v4: false, back_v6: true };
const V4: VportHooks = VportHooks { v4: true, ..NONE };
const V6: VportHooks = VportHooks { v6: true, ..NONE };
const BOTH: VportHooks = VportHooks { v4: true, v6: true, ..NONE };

/// Command, its undo command, frames of e0 and of e1 that
/// guests punt meanwhile, and the hook's description.
const CASES: &[(&str, &str, VportHooks, VportHooks, &str)] = &[
    (
        "ip rule add from 10.1.0.2 lookup 100 pref 7",
        "ip rule del pref 7",
        V4,
        V4,
        "ip rule 7: from 10.1.0.2/32 lookup 100",
    ),
    (
        "ip -6 rule add iif e1 to fd00:9::/64 prohibit pref 9",
        "ip -6 rule del pref 9",
        NONE,
        V6,
        "ip -6 rule 9: to fd00:9::/64 iif e1",
    ),
    ("ip rule add not fwmark 7 lookup 51 pref 8", "ip rule del pref 8", V4, V4, "ip rule 8: not"),
    (
        "ip rule add fwmark 0x100/0xff lookup 52 pref 8",
        "ip rule del pref 8",
        V4,
        V4,
        "ip rule 8: fwmark 0x100",
    ),
    (
        "ip link add vrrp link e1 type macvlan mode bridge; ip link set vrrp up; \
         ip rule add iif vrrp lookup 100 pref 7",
        "ip rule del pref 7; ip link del vrrp",
        NONE,
        V4,
        "iif vrrp",
    ),
    (
        "ip rule del pref 32766",
        "ip rule add lookup main pref 32766",
        V4,
        V4,
        "no ip rule 32766: lookup main",
    ),
    (
        "nft add table inet t; nft 'add chain inet t f {type filter hook forward priority 0; policy drop;}'",
        "nft delete table inet t",
        BOTH,
        BOTH,
        "nft chain inet t f",
    ),
    (
        "nft add table ip6 t; nft 'add chain ip6 t p {type nat hook postrouting priority 100;}'; \
         nft add rule ip6 t p masquerade",
        "nft delete table ip6 t",
        V6,
        V6,
        "nft chain ip6 t p",
    ),
    (
        "nft add table netdev t; nft 'add chain netdev t i {type filter hook ingress device e1 priority 0;}'; \
         nft add rule netdev t i counter",
        "nft delete table netdev t",
        NONE,
        VportHooks { all: true, ..NONE },
        "nft chain netdev t i",
    ),
    (
        "tc qdisc add dev e0 root tbf rate 1mbit burst 10k latency 50ms",
        "tc qdisc del dev e0 root",
        VportHooks { out: true, ..NONE },
        NONE,
        "tc qdisc tbf on e0",
    ),
    (
        "tc qdisc add dev e1 ingress",
        "tc qdisc del dev e1 ingress",
        NONE,
        VportHooks { all: true, ..NONE },
        "tc qdisc ingress on e1",
    ),
    (
        "ip link add br0 type bridge; ip link set e0 master br0",
        "ip link del br0",
        VportHooks { all: true, ..NONE },
        NONE,
        "e0 is in bridge br0",
    ),
    (
        "sysctl -qw net.ipv4.conf.e1.rp_filter=1",
        "sysctl -qw net.ipv4.conf.e1.rp_filter=0",
        NONE,
        V4,
        "rp_filter 1 on e1",
    ),
    (
        "sysctl -qw net.ipv4.conf.e0.send_redirects=1",
        "sysctl -qw net.ipv4.conf.e0.send_redirects=0",
        VportHooks { back_v4: true, ..NONE },
        NONE,
        "send_redirects on e0",
    ),
    (
        "sysctl -qw net.ipv4.fib_multipath_hash_policy=0",
        "sysctl -qw net.ipv4.fib_multipath_hash_policy=1",
        NONE,
        NONE,
        "net.ipv4.fib_multipath_hash_policy = 0",
    ),
];

/// Rules that no forwarded packet matches.
const HARMLESS: &str = "
    ip rule add fwmark 0x1 lookup 100
    ip rule add iif lo lookup 100
    ip -6 rule add oif e0 lookup 100
    ip route add 10.9.0.0/16 dev e0 table 100
    nft add table inet quiet
    nft add chain inet quiet in '{type filter hook input priority 0; policy drop;}'
    nft add chain inet quiet fw '{type filter hook forward priority 0; policy accept;}'
    ip link add br9 type bridge
    tc qdisc add dev x0 root pfifo";

fn namespace() -> Netns {
    let netns = Netns::new(2);
    for setting in [
        "ipv4.conf.all.rp_filter=0",
        "ipv4.conf.all.send_redirects=0",
        "ipv4.conf.default.send_redirects=0",
        "ipv4.conf.e0.send_redirects=0",
        "ipv4.conf.e1.send_redirects=0",
        "ipv4.conf.e0.rp_filter=0",
        "ipv4.conf.e1.rp_filter=0",
        "ipv4.fib_multipath_hash_policy=1",
        "ipv6.fib_multipath_hash_policy=1",
    ] {
        netns.sysctl(&format!("net.{setting}"));
    }
    netns
}

fn sh(netns: &Netns, script: &str) {
    let output = netns.command("sh").args(["-ec", script]).output().unwrap();
    assert!(output.status.success(), "{script}: {output:?}");
}

fn hooked(guest: &Guest) -> Vec<VportHooks> {
    guest.state().vports.values().map(|vport| vport.hooked).collect()
}

fn connect(mirror: &Mirror) -> Guest {
    let guest = Guest::connect(&mirror.config.routes_socket, 0);
    eventually("a snapshot", || guest.snapshots() == 1);
    guest
}

#[test]
fn each_hook_is_reported_while_it_exists() {
    let netns = namespace();
    sh(&netns, HARMLESS);
    let mirror = Mirror::new(&netns);
    let guest = connect(&mirror);
    assert_eq!(mirror.status().hooks, Vec::<String>::new());
    assert_eq!(hooked(&guest), [NONE, NONE]);
    let mut late = Vec::new();
    for &(begin, end, e0, e1, words) in CASES {
        sh(&netns, begin);
        let begun = Instant::now();
        let choosing = !words.contains("hash_policy");
        eventually(begin, || {
            let hooks = mirror.status().hooks;
            assert!(hooks.len() <= 1, "{begin}: {hooks:?}");
            hooks.iter().any(|hook| hook.contains(words))
                && hooked(&guest) == [e0, e1]
                && guest.state().choosing.0 == choosing
        });
        late.extend((begun.elapsed() > SOON).then_some((begin, begun.elapsed())));
        sh(&netns, end);
        eventually(end, || mirror.status().hooks.is_empty() && hooked(&guest) == [NONE, NONE]);
    }
    assert!(late.len() <= 1, "{late:?}");
    // A rule that existed before the mirror. Of many rules, only some are listed one by one.
    let rules: String =
        (0..40).map(|i| format!("ip rule add to 10.9.{i}.1 lookup 100; ")).collect();
    sh(&netns, &rules);
    eventually("many", || mirror.status().hooks.last().is_some_and(|last| last == "and 24 more"));
    let ignoring = Mirror::ignoring(&netns);
    let guest = connect(&ignoring);
    eventually("told, and not done", || ignoring.status().hooks.len() == 17);
    assert_eq!(hooked(&guest), [VportHooks::default(); 2]);
    assert_eq!(ignoring.config.hooks, HookPolicy::Ignore);
}

/// A guest may choose any names, and constantly changing rules cost nobody else anything.
#[test]
fn hostile_names_and_rule_storms_are_harmless() {
    let netns = namespace();
    sh(&netns, "ip link set e1 down; ip link add name \"$(printf 'b\\033[2J')\" type bridge");
    sh(&netns, "ip link set e1 master \"$(printf 'b\\033[2J')\"");
    let table = "t".repeat(250);
    let mirror = Mirror::new(&netns);
    let guest = connect(&mirror);
    sh(&netns, &format!("nft add table ip {table}"));
    let chain = "{type filter hook forward priority 0; policy drop;}";
    sh(&netns, &format!("nft 'add chain ip {table} f {chain}'"));
    eventually("both", || mirror.status().hooks.len() == 2);
    for hook in mirror.status().hooks {
        assert!(hook.len() <= 160 && !hook.contains('\u{1b}'), "{hook:?}");
    }
    let script = "end=$(($(date +%s) + 3)); while [ $(date +%s) -lt $end ]; do
        ip rule add to 10.9.0.1 lookup 100 pref 50; ip rule del pref 50; done";
    let mut storm = netns.command("sh").args(["-c", script]).spawn().unwrap();
    let mut slowest = Duration::ZERO;
    for round in 0..20 {
        let prefix = format!("10.77.{round}.0/24");
        netns.ip(&format!("route add {prefix} via 172.16.0.9"));
        let begun = Instant::now();
        let prefix = prefix.parse().unwrap();
        eventually("the route", || guest.state().routes.contains_key(&prefix));
        slowest = slowest.max(begun.elapsed());
    }
    assert!(slowest < SOON, "{slowest:?}");
    storm.wait().unwrap();
}

/// A gateway that a guest asks for is resolved; an address that is no route's gateway is not.
#[test]
fn requested_gateway_is_resolved() {
    let netns = namespace();
    netns.ip("route add 203.0.113.0/24 nexthop via 172.16.0.9 nexthop via 172.16.1.9");
    let mirror = Mirror::new(&netns);
    let guest = connect(&mirror);
    let address = |text: &str| text.parse().unwrap();
    guest.say(FromGuest::Wanted(vec![
        (0, address("172.16.0.8")),
        (0, address("172.16.1.9")),
        (7, address("172.16.1.9")),
        (1, address("172.16.1.9")),
    ]));
    let neighbours = || netns.ip("neigh show nud all");
    eventually("it is asked for", || neighbours().contains("172.16.1.9 dev e1"));
    let known = neighbours();
    assert!(!known.contains("172.16.0.8") && !known.contains("172.16.1.9 dev e0"), "{known}");
}
