//! Routes of all kinds.

use super::case::{Case, case, v4, v6};
use super::frames::{DF, ECHO, ECHO_V6, ICMP, ICMPV6, echo, udp_ports};

const TO: &str = "203.0.113.5";
const TO_V6: &str = "2001:db8:9::5";

/// Brings port 1 up again, with everything that it had.
const UP: &str = "
    ip link set eth1 up; ip addr add fd00:1::1/64 dev eth1 nodad 2>/dev/null || true
    ip neigh replace 10.1.255.250 lladdr 02:04:01:01:ff:fa dev eth1";
const DOWN: &str = "ip link set eth1 down";

/// Flows of a case with several paths, each of which carries some of them.
const FLOWS: u16 = 40;

pub fn cases() -> Vec<Case> {
    [sorts(), prefixes(), choices(), mtus(), locals(), multipaths(), objects()]
        .into_iter()
        .flatten()
        .collect()
}

/// One IPv4 packet on a route to 203.0.113.0/24.
fn by(name: &str, route: &str) -> Case {
    let add = format!("ip route add 203.0.113.0/24 {route}");
    v4(name, |p, _| p.to(TO).done()).setup(&add)
}

/// One IPv6 packet on a route to 2001:db8:9::/48.
fn by_v6(name: &str, route: &str) -> Case {
    let add = format!("ip -6 route add 2001:db8:9::/48 {route}");
    v6(name, |p, _| p.to(TO_V6).done()).setup(&add)
}

/// Packets of one family to each of these addresses.
fn to_all(mut case: Case, addresses: &'static [&'static str]) -> Case {
    for to in addresses {
        case = match to.contains(':') {
            true => case.v6(|p, _| p.to(to).done()),
            false => case.v4(|p, _| p.to(to).done()),
        };
    }
    case
}

fn sorts() -> Vec<Case> {
    let mut cases = Vec::new();
    for kind in ["blackhole", "unreachable", "prohibit", "throw"] {
        let add = format!("ip route add {kind} 203.0.113.0/24");
        let add_v6 = format!("ip -6 route add {kind} 2001:db8:9::/48");
        cases.push(v4(kind, |p, _| p.to(TO).done()).setup(&add));
        cases.push(v6(kind, |p, _| p.to(TO_V6).done()).setup(&add_v6));
        cases.push(
            v4(&format!("{kind} inside a covering route"), |p, _| p.to(TO).done())
                .setup(&format!("ip route add 203.0.112.0/20 via 10.1.0.7; {add}")),
        );
    }
    let no_route = "ip route del default; ip -6 route del default";
    let again = "ip route add default via 10.3.0.5 proto static
                 ip -6 route add default via fd00:3::5 proto static";
    let unreachable = vec![3, 1, 0, 0, 0, 0, 0, 0, 0x45, 0, 0, 28, 0, 0, 0, 0, 64, 17, 0, 0];
    let without = [
        v4("no route", |p, _| p.to(TO).done()),
        v6("no route", |p, _| p.to(TO_V6).done()),
        v4("no route, ICMP error inside", move |p, _| {
            p.to(TO).segment(ICMP, unreachable.clone()).done();
        }),
        v4("no route, fragment not first", |p, _| p.to(TO).fragment = 20),
        v4("no route, echo request", |p, _| p.to(TO).segment(ICMP, echo(ECHO, 1, 8)).done()),
        v4("option nop, no route", |p, _| p.to(TO).options = vec![1; 4]),
    ];
    cases.extend(without.map(|case| case.setup(no_route).undo(again)));
    cases.extend([
        by("route via gateway", "via 10.1.0.7"),
        by("route by device, destination is the neighbour", "dev eth1"),
        by("onlink gateway outside every subnet", "via 192.0.2.77 dev eth1 onlink"),
        by("gateway through another route, scope link", "via 192.0.2.78")
            .setup_first("ip route add 192.0.2.78/32 dev eth1 scope link"),
        by("IPv4 via IPv6 link-local", "via inet6 fe80::77 dev eth1"),
        by("IPv4 via IPv6 global", "via inet6 fd00:1::7"),
        by_v6("via gateway", "via fd00:1::7"),
        by_v6("via link-local", "via fe80::77 dev eth1"),
        by_v6("onlink", "via 2001:db8:77::7 dev eth1 onlink"),
        by_v6("by device", "dev eth1"),
        v6("same link-local on two ports", |p, _| p.to(TO_V6).done())
            .v6(|p, _| p.to("2001:db8:a::5").done())
            .setup(
                "ip -6 route add 2001:db8:9::/48 via fe80::77 dev eth1
                 ip -6 route add 2001:db8:a::/48 via fe80::77 dev eth3",
            ),
        v4("to 0.5.0.0/16 with a route of its own", |p, _| p.to("0.5.1.1").done())
            .setup("ip route add 0.5.0.0/16 via 10.1.0.7")
            .differs(super::addresses::RESERVED, "eth1 udp", "nothing"),
        v4("into an encapsulation", |p, _| p.to(TO).done()).setup(
            "ip -6 route add 2001:db8:e::/48 via fd00:1::7
             ip route add 203.0.113.0/24 encap seg6 mode encap segs 2001:db8:e::1 dev eth1 || true",
        ),
    ]);
    cases
}

fn prefixes() -> Vec<Case> {
    vec![
        to_all(
            case("/0 /1 /8 /24 /25 /31 /32 nested").setup(
                "ip route add 128.0.0.0/1 via 10.1.0.21; ip route add 203.0.0.0/8 via 10.1.0.22
                 ip route add 203.0.113.0/24 via 10.1.0.23; ip route add 203.0.113.0/25 via 10.1.0.24
                 ip route add 203.0.113.4/31 via 10.1.0.25; ip route add 203.0.113.5/32 via 10.1.0.26",
            ),
            &["8.8.8.8", "129.1.1.1", "203.9.9.9", "203.0.113.200", "203.0.113.77", "203.0.113.4", TO],
        ),
        to_all(
            case("IPv6 /0 /3 /48 /64 /127 /128 nested").setup(
                "ip -6 route add 2000::/3 via fd00:1::21; ip -6 route add 2001:db8:9::/48 via fd00:1::22
                 ip -6 route add 2001:db8:9::/64 via fd00:1::23
                 ip -6 route add 2001:db8:9::4/127 via fd00:1::24
                 ip -6 route add 2001:db8:9::5/128 via fd00:1::25",
            ),
            &["4000::1", "2002:1::1", "2001:db8:9:1::1", "2001:db8:9::99", "2001:db8:9::4", TO_V6],
        ),
        v4("/31", |p, _| p.to("172.20.0.0").segment(ICMP, echo(ECHO, 1, 8)).done())
            .v4(|p, _| p.to("172.20.0.1").done())
            .setup("ip addr add 172.20.0.0/31 dev eth1")
            .undo("ip addr del 172.20.0.0/31 dev eth1"),
        v4("/32 with peer", |p, _| p.to("172.20.0.1").segment(ICMP, echo(ECHO, 1, 8)).done())
            .v4(|p, _| p.to("172.20.9.9").done())
            .setup("ip addr add 172.20.0.1 peer 172.20.9.9 dev eth1")
            .undo("ip addr del 172.20.0.1 peer 172.20.9.9 dev eth1"),
        v4("/32 on lo", |p, _| p.to("172.20.0.1").segment(ICMP, echo(ECHO, 1, 8)).done())
            .setup("ip addr add 172.20.0.1/32 dev lo")
            .undo("ip addr del 172.20.0.1/32 dev lo"),
        v6("/128 on lo", |p, _| p.to("fd00:99::1").segment(ICMPV6, echo(ECHO_V6, 1, 8)).done())
            .setup("ip addr add fd00:99::1/128 dev lo")
            .undo("ip addr del fd00:99::1/128 dev lo"),
        v4("an address added, pinged at once", |p, _| {
            p.to("172.20.0.1").segment(ICMP, echo(ECHO, 1, 8)).done();
        })
        .v4(|p, _| p.to("172.20.0.9").done())
        .setup("ip addr add 172.20.0.1/24 dev eth1")
        .undo("ip addr del 172.20.0.1/24 dev eth1"),
    ]
}

fn choices() -> Vec<Case> {
    let two = "ip route add 203.0.113.0/24 via 10.1.0.7 metric 10
               ip route add 203.0.113.0/24 via 10.3.0.7 metric 20";
    let two_v6 = "ip -6 route add 2001:db8:9::/48 via fd00:1::7 metric 10
                  ip -6 route add 2001:db8:9::/48 via fd00:3::7 metric 20";
    let v4 = |name: &str| v4(name, |p, _| p.to(TO).done());
    let v6 = |name: &str| v6(name, |p, _| p.to(TO_V6).done());
    vec![
        v4("two metrics, the smaller wins").setup(two),
        v4("the smaller metric goes, the other takes over")
            .setup(two)
            .setup("ip route del 203.0.113.0/24 metric 10"),
        v6("two metrics").setup(two_v6),
        v6("the smaller metric goes")
            .setup(two_v6)
            .setup("ip -6 route del 2001:db8:9::/48 metric 10"),
        v4("same metric twice (prepend)").setup(
            "ip route add 203.0.113.0/24 via 10.1.0.7; ip route prepend 203.0.113.0/24 via 10.3.0.7",
        ),
        v4("same metric twice (append)").setup(
            "ip route add 203.0.113.0/24 via 10.1.0.7; ip route append 203.0.113.0/24 via 10.3.0.7",
        ),
        v4("replace").setup(
            "ip route add 203.0.113.0/24 via 10.1.0.7; ip route replace 203.0.113.0/24 via 10.3.0.7",
        ),
        v4("change").setup(
            "ip route add 203.0.113.0/24 via 10.1.0.7; ip route change 203.0.113.0/24 via 10.3.0.7",
        ),
        v4("tos route: packets with and without").v4(|p, _| p.to(TO).tos = 0x10).setup(
            "ip route add 203.0.113.0/24 via 10.1.0.7
             ip route add 203.0.113.0/24 tos 0x10 via 10.3.0.7",
        ),
        v4("tos route without a plain one")
            .v4(|p, _| p.to(TO).tos = 0x10)
            .setup("ip route add 203.0.113.0/24 tos 0x10 via 10.1.0.7"),
        v4("tos route alone, shorter plain route").v4(|p, _| p.to(TO).tos = 0x10).setup(
            "ip route add 203.0.112.0/20 via 10.1.0.8
             ip route add 203.0.113.0/24 tos 0x10 via 10.1.0.7",
        ),
        v6("source-specific over plain").v6(|p, _| p.to(TO_V6).from("2001:db8:f::1").done()).setup(
            "ip -6 route add 2001:db8:9::/48 via fd00:1::7
             ip -6 route add 2001:db8:9::/48 from 2001:db8:f::/48 via fd00:3::7",
        ),
        v6("source-specific default, plain default")
            .v6(|p, _| p.to(TO_V6).from("2001:db8:f::1").done())
            .setup("ip -6 route add default from 2001:db8:f::/48 via fd00:1::7"),
        v6("source-specific longer prefix, other source falls to shorter")
            .v6(|p, _| p.to(TO_V6).from("2001:db8:f::1").done())
            .setup(
                "ip -6 route add 2001:db8::/32 via fd00:1::7
                 ip -6 route add 2001:db8:9::/48 from 2001:db8:f::/48 via fd00:3::7",
            ),
        v4("route with src, hoplimit, advmss").setup(
            "ip route add 203.0.113.0/24 via 10.1.0.7 src 10.1.0.1 hoplimit 9 advmss 1000",
        ),
        v4("route in table 100 without rule").setup("ip route add 203.0.113.0/24 via 10.1.0.7 table 100")
            .undo("ip route flush table 100"),
        v4("route in table default (253), none in main")
            .setup("ip route add 203.0.113.0/24 via 10.1.0.7 table default; ip route del default")
            .undo(
                "ip route flush table default
                 ip route add default via 10.3.0.5 proto static",
            ),
        v4("two metrics, up again").setup(two).setup(DOWN).setup(UP),
        v4("interface down: the other metric takes over")
            .setup(two)
            .setup(DOWN)
            .undo(UP)
            .dead(&[1]),
        v4("preferred source goes, route goes with it")
            .setup(
                "ip addr add 172.20.0.1/32 dev eth1
                 ip route add 203.0.113.0/24 via 10.1.0.7 src 172.20.0.1
                 ip addr del 172.20.0.1/32 dev eth1",
            ),
        v6("a route that expires, before and beside one of a larger metric")
            .setup(two_v6)
            .setup("ip -6 route replace 2001:db8:9::/48 via fd00:1::7 metric 10 expires 60"),
        v6("a route that expired")
            .setup("ip -6 route add 2001:db8:9::/48 via fd00:1::7 expires 1")
            .wait_ms(1100),
        v6("a route that expired, beside one of a larger metric")
            .setup(two_v6)
            .setup("ip -6 route replace 2001:db8:9::/48 via fd00:1::7 metric 10 expires 1")
            .wait_ms(1100),
        v6("router preference").setup(
            "ip -6 route add 2001:db8:9::/48 via fd00:1::7 pref low
             ip -6 route add 2001:db8:9::/48 via fd00:3::7 metric 512 pref high",
        ),
    ]
}

fn mtus() -> Vec<Case> {
    let long = |name: &str, bytes: usize, fragment: u16, route: &str| {
        v4(name, move |p, _| p.to(TO).bytes(bytes).fragment = fragment)
            .setup(&format!("ip route add 203.0.113.0/24 {route}"))
    };
    let long_v6 = |name: &str, bytes: usize, route: &str| {
        v6(name, move |p, _| p.to(TO_V6).bytes(bytes).done())
            .setup(&format!("ip -6 route add 2001:db8:9::/48 {route}"))
    };
    let object = "ip nexthop add id 9 via 10.1.0.7 dev eth1";
    let object_v6 = "ip nexthop add id 9 via fd00:1::7 dev eth1";
    vec![
        long("route with mtu 1300, DF 1400", 1400, DF, "via 10.1.0.7 mtu 1300"),
        long("route with mtu 1300, DF 1300", 1300, DF, "via 10.1.0.7 mtu 1300"),
        long("route with mtu 1300, DF 1301", 1301, DF, "via 10.1.0.7 mtu 1300"),
        long("route with mtu 1300, no DF 1400", 1400, 0, "via 10.1.0.7 mtu 1300"),
        long("route with mtu lock 1300, DF 1400", 1400, DF, "via 10.1.0.7 mtu lock 1300"),
        long("route with mtu lock 1300, no DF 1400", 1400, 0, "via 10.1.0.7 mtu lock 1300"),
        long("route without mtu beside it, DF 1400", 1400, DF, "via 10.1.0.7")
            .setup("ip route add 198.51.100.0/24 via 10.1.0.7 mtu 1300"),
        long(
            "multipath with mtu 1300, DF 1400",
            1400,
            DF,
            "mtu 1300 nexthop via 10.1.0.7 nexthop via 10.3.0.7",
        ),
        v4("route of an object with mtu 1300, DF 1400", |p, _| p.to(TO).bytes(1400).fragment = DF)
            .setup(object)
            .setup("ip route add 203.0.113.0/24 nhid 9 mtu 1300"),
        v4("route changed to mtu 1300, DF 1400", |p, _| p.to(TO).bytes(1400).fragment = DF).setup(
            "ip route add 203.0.113.0/24 via 10.1.0.7
             ip route replace 203.0.113.0/24 via 10.1.0.7 mtu 1300",
        ),
        v4("route changed from mtu 1300, DF 1400", |p, _| p.to(TO).bytes(1400).fragment = DF)
            .setup(
                "ip route add 203.0.113.0/24 via 10.1.0.7 mtu 1300
             ip route replace 203.0.113.0/24 via 10.1.0.7",
            ),
        long(
            "route with mtu 1500 over an interface of 1400, DF 1450",
            1450,
            DF,
            "via 10.2.0.7 mtu 1500",
        )
        .differs(LARGER, "eth2 udp", "nothing"),
        long_v6(
            "route with mtu 1500 over an interface of 1400, 1450",
            1450,
            "via fd00:2::7 mtu 1500",
        ),
        long_v6("route with mtu 1300, 1400", 1400, "via fd00:1::7 mtu 1300"),
        long_v6("route with mtu lock 1300, 1400", 1400, "via fd00:1::7 mtu lock 1300"),
        long_v6("route with mtu lock 1300, 1300", 1300, "via fd00:1::7 mtu lock 1300"),
        v6("route of an object with mtu lock 1300, 1400", |p, _| p.to(TO_V6).bytes(1400).done())
            .setup(object_v6)
            .setup("ip -6 route add 2001:db8:9::/48 nhid 9 mtu lock 1300"),
        v4("mtu of an interface changed, DF 1400", |p, _| p.bytes(1400).fragment = DF)
            .setup("ip link set eth1 mtu 1320")
            .undo("ip link set eth1 mtu 1500"),
        v6("mtu of an interface changed, 1400", |p, _| p.bytes(1400).done())
            .setup("ip link set eth1 mtu 1320")
            .undo("ip link set eth1 mtu 1500"),
        v6("mtu of IPv6 alone changed, 1400", |p, _| p.bytes(1400).done())
            .setup("echo 1320 >/proc/sys/net/ipv6/conf/eth1/mtu")
            .undo("echo 1500 >/proc/sys/net/ipv6/conf/eth1/mtu")
            .differs(IPV6_MTU, "eth0 icmp6 2/0", "eth1 udp6"),
    ]
}

const LARGER: &str = "A route's MTU that is larger than its interface's (IPv4)";
const IPV6_MTU: &str = "An MTU of IPv6 alone (`net.ipv6.conf.NAME.mtu`)";

fn locals() -> Vec<Case> {
    let ping = |name: &str, to: &'static str| {
        v4(name, move |p, _| p.to(to).segment(ICMP, echo(ECHO, 1, 8)).done())
    };
    let ping_v6 = |name: &str, to: &'static str| {
        v6(name, move |p, _| p.to(to).segment(ICMPV6, echo(ECHO_V6, 1, 8)).done())
    };
    // After a local route was once added, the kernel keeps checking sources fully.
    let range = "ip route add local 203.0.113.0/24 dev lo";
    let gone = "ip route del local 203.0.113.0/24 dev lo";
    let range_v6 = "ip -6 route add local 2001:db8:9::/48 dev lo";
    let gone_v6 = "ip -6 route del local 2001:db8:9::/48 dev lo";
    vec![
        ping_v6("a local range on lo", TO_V6).setup(range_v6).undo(gone_v6),
        ping_v6("a local range hides a longer main route", TO_V6)
            .setup("ip -6 route add 2001:db8:9::/64 via fd00:1::7")
            .setup(range_v6)
            .undo(gone_v6),
        ping_v6("a longer main route beside a local range that comes first", TO_V6)
            .setup(range_v6)
            .setup("ip -6 route add 2001:db8:9::/64 via fd00:1::7")
            .undo(gone_v6),
        ping_v6("a local range that went hides nothing", TO_V6)
            .setup("ip -6 route add 2001:db8:9::/64 via fd00:1::7")
            .setup(range_v6)
            .setup(gone_v6),
        ping_v6("anycast of the subnet", "fd00:1::"),
        ping("a local range on lo", TO).setup(range).undo(gone),
        ping("a longer main route inside a local range", TO)
            .setup(range)
            .setup("ip route add 203.0.113.0/28 via 10.1.0.7")
            .undo(gone),
        v4("a broadcast route", |p, _| p.to("203.0.113.255").done())
            .setup("ip route add broadcast 203.0.113.255 dev eth1 table local")
            .undo("ip route del broadcast 203.0.113.255 dev eth1 table local"),
    ]
}

/// Many flows to one address.
fn flows(mut case: Case, v6: bool) -> Case {
    for flow in 0..FLOWS {
        case = match v6 {
            false => case.v4(move |p, _| p.to(TO).segment = udp_ports(3000 + flow, 9, 8)),
            true => case.v6(move |p, _| p.to(TO_V6).segment = udp_ports(3000 + flow, 9, 8)),
        };
    }
    case.same_ways()
}

fn multipaths() -> Vec<Case> {
    let two = "ip route add 203.0.113.0/24 nexthop via 10.1.0.7 nexthop via 10.3.0.7";
    let two_v6 = "ip -6 route add 2001:db8:9::/48 nexthop via fd00:1::7 nexthop via fd00:3::7";
    let four = "ip route add 203.0.113.0/24 nexthop via 10.1.0.7 nexthop via 10.1.0.8 \\
                nexthop via 10.3.0.7 nexthop via 10.3.0.8";
    vec![
        flows(case("multipath").setup(two), false),
        flows(case("multipath of four").setup(four), false),
        flows(case("IPv6 multipath").setup(two_v6), true),
        flows(
            case("multipath with weights").setup(
                "ip route add 203.0.113.0/24 nexthop via 10.1.0.7 weight 3 nexthop via 10.3.0.7",
            ),
            false,
        ),
        flows(
            case("multipath by gateways of both families").setup(
                "ip route add 203.0.113.0/24 nexthop via 10.1.0.7 nexthop via inet6 fd00:3::7",
            ),
            false,
        ),
        flows(case("multipath: interface of a hop down").setup(two).setup(DOWN).undo(UP), false)
            .dead(&[1]),
        flows(
            case("IPv6 multipath: interface of a hop down").setup(two_v6).setup(DOWN).undo(UP),
            true,
        )
        .dead(&[1]),
        flows(
            case("IPv6 multipath: a hop goes")
                .setup(two_v6)
                .setup("ip -6 route del 2001:db8:9::/48 nexthop via fd00:1::7"),
            true,
        ),
        flows(
            case("multipath with a hop on a device that is no vport").setup(
                "ip route add 203.0.113.0/24 nexthop via 10.1.0.7 nexthop via 10.3.0.7 nexthop dev lo",
            ),
            false,
        ),
        flows(case("multipath: up again").setup(two).setup(DOWN).setup(UP), false),
        flows(case("IPv6 multipath: up again").setup(two_v6).setup(DOWN).setup(UP), true),
        flows(
            case("IPv6 multipath, hops added one by one").setup(
                "ip -6 route add 2001:db8:9::/48 via fd00:1::7
                 ip -6 route append 2001:db8:9::/48 via fd00:3::7",
            ),
            true,
        ),
    ]
}

fn objects() -> Vec<Case> {
    let objects =
        "ip nexthop add id 1 via 10.1.0.7 dev eth1; ip nexthop add id 2 via 10.3.0.7 dev eth3";
    let group = "ip nexthop add id 9 group 1/2; ip route add 203.0.113.0/24 nhid 9";
    let v4 = |name: &str| v4(name, |p, _| p.to(TO).done());
    let v6 = |name: &str| v6(name, |p, _| p.to(TO_V6).done());
    vec![
        v4("nexthop object").setup(objects).setup("ip route add 203.0.113.0/24 nhid 1"),
        v4("nexthop object replaced under a route").setup(objects).setup(
            "ip route add 203.0.113.0/24 nhid 1; ip nexthop replace id 1 via 10.3.0.9 dev eth3",
        ),
        v4("nexthop object becomes a blackhole").setup(objects).setup(
            "ip route add 203.0.113.0/24 nhid 1; ip nexthop replace id 1 blackhole",
        ),
        v4("blackhole nexthop object")
            .setup("ip nexthop add id 7 blackhole; ip route add 203.0.113.0/24 nhid 7"),
        v6("blackhole nexthop object")
            .setup("ip -6 nexthop add id 7 blackhole; ip -6 route add 2001:db8:9::/48 nhid 7"),
        v4("group of one").setup(objects).setup(
            "ip nexthop add id 9 group 1; ip route add 203.0.113.0/24 nhid 9",
        ),
        v4("group of a blackhole").setup(
            "ip nexthop add id 7 blackhole; ip nexthop add id 9 group 7
             ip route add 203.0.113.0/24 nhid 9",
        ),
        flows(case("group of two").setup(objects).setup(group), false),
        v4("group loses a member").setup(objects).setup(group).setup("ip nexthop del id 1"),
        v4("group loses the last: route is gone").setup(objects).setup(group).setup(
            "ip nexthop del id 1; ip nexthop del id 2",
        ),
        v4("group replaced").setup(objects).setup(group).setup("ip nexthop replace id 9 group 2"),
        v4("member of a group replaced").setup(objects).setup(
            "ip nexthop add id 9 group 1; ip route add 203.0.113.0/24 nhid 9
             ip nexthop replace id 1 via 10.3.0.8 dev eth3",
        ),
        v4("nexthop object by device").setup(
            "ip nexthop add id 1 dev eth1; ip route add 203.0.113.0/24 nhid 1",
        ),
        v4("nexthop object onlink").setup(
            "ip nexthop add id 1 via 192.0.2.77 dev eth1 onlink; ip route add 203.0.113.0/24 nhid 1",
        ),
        v4("IPv4 via IPv6 by nexthop object").setup(
            "ip nexthop add id 1 via fd00:1::7 dev eth1; ip route add 203.0.113.0/24 nhid 1",
        ),
        v4("one object for both families").v6(|p, _| p.to(TO_V6).done()).setup(
            "ip nexthop add id 1 via fd00:1::7 dev eth1; ip route add 203.0.113.0/24 nhid 1
             ip -6 route add 2001:db8:9::/48 nhid 1",
        ),
        v4("group: interface of a member down")
            .setup(objects)
            .setup(group)
            .setup(DOWN)
            .undo(UP)
            .dead(&[1]),
        flows(case("group: up again").setup(objects).setup(group).setup(DOWN).setup(UP), false),
        v6("group of a blackhole").setup(
            "ip -6 nexthop add id 7 blackhole; ip nexthop add id 9 group 7
             ip -6 route add 2001:db8:9::/48 nhid 9",
        ),
        flows(
            case("IPv6 group of two").setup(
                "ip nexthop add id 1 via fd00:1::7 dev eth1; ip nexthop add id 2 via fd00:3::7 dev eth3
                 ip nexthop add id 9 group 1/2; ip -6 route add 2001:db8:9::/48 nhid 9",
            ),
            true,
        ),
        flows(
            case("group with weights").setup(objects).setup(
                "ip nexthop add id 9 group 1,5/2,1; ip route add 203.0.113.0/24 nhid 9",
            ),
            false,
        ),
        v6("nexthop object").setup(
            "ip nexthop add id 1 via fd00:1::7 dev eth1; ip -6 route add 2001:db8:9::/48 nhid 1",
        ),
    ]
}
