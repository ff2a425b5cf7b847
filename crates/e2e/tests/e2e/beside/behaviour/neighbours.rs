//! Neighbours: requests, answers, and accepted information.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::case::{Case, case, v4, v6};
use super::frames::{Arp, BROADCAST, Host, ICMPV6, Mac, V6, ask, discovery, mac_of, solicited};

/// A machine behind port 1, and its claimed new MAC address.
const NEIGHBOUR: &str = "10.1.0.55";
const NEIGHBOUR_V6: &str = "fd00:1::55";
const MOVED: Mac = [2, 0xbb, 0, 0, 0, 1];

/// Neighbours are accepted at once, and expire after 0.15 s.
const QUICK: &str = "
    for family in 4 6; do for port in 0 1 3; do
        cd /proc/sys/net/ipv$family/neigh/eth$port; echo 0 >locktime; echo 50 >retrans_time_ms
    done; done";
const USUAL: &str = "
    for family in 4 6; do for port in 0 1 3; do
        cd /proc/sys/net/ipv$family/neigh/eth$port; echo 100 >locktime; echo 1000 >retrans_time_ms
    done; done";

/// Time until a neighbour expires and this is reported.
const GIVEN_UP_MS: u64 = 500;

pub fn cases() -> Vec<Case> {
    [unknown(), arp(), claims(), fixed(), of_v6()].into_iter().flatten().collect()
}

fn unknown() -> Vec<Case> {
    let mut many = case("20 packets to a new neighbour, at once");
    for number in 0..20 {
        many = many.v4(move |p, _| p.to("10.1.0.77").id = number);
        many = many.v6(move |p, _| p.to("fd00:1::77").flow = u32::from(number));
    }
    vec![
        many,
        v4("asks for a neighbour", |p, _| p.to("10.1.0.102").done())
            .setup(QUICK)
            .undo(USUAL)
            .asks()
            .after_ms(GIVEN_UP_MS),
        v6("asks for a neighbour", |p, _| p.to("fd00:1::66").done())
            .setup(QUICK)
            .undo(USUAL)
            .asks()
            .after_ms(GIVEN_UP_MS),
        v4("asks for a gateway", |p, _| p.to("203.0.113.5").done())
            .setup("ip route add 203.0.113.0/24 via 10.1.0.102")
            .setup(QUICK)
            .undo(USUAL)
            .asks()
            .after_ms(GIVEN_UP_MS),
    ]
}

/// Case with an ARP packet of the case's machine.
fn arp_case(name: &str, arp: impl Fn(&Host, &mut Arp) + 'static) -> Case {
    case(name).frame(move |host| {
        let sender = (mac_of(0, &host.v4.octets()), host.v4);
        let target = ([0; 6], Ipv4Addr::new(10, 0, 0, 1));
        let mut packet = Arp { operation: 1, hardware: 1, sender, target };
        arp(host, &mut packet);
        (0, packet.frame(BROADCAST))
    })
}

fn arp() -> Vec<Case> {
    let address = |text: &str| text.parse::<Ipv4Addr>().expect("an address");
    vec![
        arp_case("ARP request for the router", |_, _| {}),
        case("ARP request, unicast").frame(|host| {
            let mut frame = ask(host, IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1)));
            frame[..6].copy_from_slice(&host.router[0]);
            (0, frame)
        }),
        arp_case("ARP request for another port's address", move |_, arp| {
            arp.target.1 = address("10.1.0.1");
        }),
        arp_case("ARP probe for the router", move |_, arp| arp.sender.1 = Ipv4Addr::UNSPECIFIED),
        arp_case("ARP request from outside the subnet", move |_, arp| {
            arp.sender.1 = address("198.51.100.7");
        }),
        arp_case("gratuitous ARP for the router's own address", move |_, arp| {
            arp.sender.1 = address("10.0.0.1");
        }),
        arp_case("ARP hardware type 6", |_, arp| arp.hardware = 6),
        arp_case("ARP operation 9", |_, arp| arp.operation = 9),
        arp_case("RARP", |_, arp| arp.operation = 3),
        case("ARP cut").frame(|host| {
            let frame = ask(host, IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1)));
            (0, frame[..30].to_vec())
        }),
        arp_case("ARP for a host behind, proxy_arp 0", move |_, arp| {
            arp.target.1 = address("10.1.0.9")
        }),
        arp_case("ARP for a host behind, proxy_arp 1", move |_, arp| {
            arp.target.1 = address("10.1.0.9")
        })
        .setup(
            "echo 1 >/proc/sys/net/ipv4/conf/eth0/proxy_arp
                 echo 0 >/proc/sys/net/ipv4/neigh/eth0/proxy_delay",
        )
        .undo(
            "echo 0 >/proc/sys/net/ipv4/conf/eth0/proxy_arp
                 echo 80 >/proc/sys/net/ipv4/neigh/eth0/proxy_delay",
        ),
        arp_case("ARP for a proxied neighbour", move |_, arp| arp.target.1 = address("192.0.2.9"))
            .setup(
                "ip neigh add proxy 192.0.2.9 dev eth0
                 echo 0 >/proc/sys/net/ipv4/neigh/eth0/proxy_delay",
            )
            .undo(
                "ip neigh del proxy 192.0.2.9 dev eth0
                 echo 80 >/proc/sys/net/ipv4/neigh/eth0/proxy_delay",
            ),
    ]
}

/// A packet to the neighbour, then a claim sent into a port, then a packet again.
fn claim(name: &str, port: usize, claim_frame: impl Fn(&Host) -> Vec<u8> + 'static) -> Case {
    let to_it =
        |case: Case| case.v4(|p, _| p.to(NEIGHBOUR).done()).v6(|p, _| p.to(NEIGHBOUR_V6).done());
    let claimed = to_it(case(name)).then().frame(move |host| (port, claim_frame(host))).then();
    to_it(claimed).setup(QUICK).undo(USUAL)
}

/// ARP packet of the neighbour.
fn moved(operation: u16, mac: Mac, to: Mac) -> Vec<u8> {
    let it = NEIGHBOUR.parse().expect("an address");
    Arp { operation, hardware: 1, sender: (mac, it), target: (mac, it) }.frame(to)
}

/// Advertisement of the neighbour to all.
fn advertised(host: &Host, flags: u8, hop_limit: u8) -> Vec<u8> {
    let it: Ipv6Addr = NEIGHBOUR_V6.parse().expect("an address");
    let mut packet = V6::new(host);
    packet.link.to = [0x33, 0x33, 0, 0, 0, 1];
    packet.link.from = MOVED;
    (packet.source, packet.hop_limit) = (it, hop_limit);
    packet.to("ff02::1").segment(ICMPV6, discovery(136, flags, it, Some(MOVED)));
    packet.frame().1
}

fn claims() -> Vec<Case> {
    vec![
        claim("gratuitous ARP request with another MAC", 1, |_| moved(1, MOVED, BROADCAST)),
        claim("gratuitous ARP reply with another MAC", 1, |_| moved(2, MOVED, BROADCAST)),
        claim("unsolicited unicast ARP reply with another MAC", 1, |host| {
            moved(2, MOVED, host.router[1])
        }),
        claim("ARP reply on another port for a known neighbour", 3, |host| {
            moved(2, MOVED, host.router[3])
        }),
        claim("ARP reply with a multicast MAC", 1, |host| {
            moved(2, [1, 0, 0x5e, 0, 0, 9], host.router[1])
        }),
        claim("unsolicited NA, override", 1, |host| advertised(host, 0x20, 255)),
        claim("unsolicited NA, no override", 1, |host| advertised(host, 0, 255)),
        claim("unsolicited NA of a router, override", 1, |host| advertised(host, 0xa0, 255)),
        claim("NA with hop limit 64", 1, |host| advertised(host, 0x20, 64)),
        case("unsolicited ARP reply for an unknown address (arp_accept 0)")
            .frame(|host| (1, moved(2, MOVED, host.router[1])))
            .then()
            .v4(|p, _| p.to(NEIGHBOUR).done())
            .asks(),
    ]
}

fn fixed() -> Vec<Case> {
    let to_it = |name: &str| v4(name, |p, _| p.to(NEIGHBOUR).done()).asks();
    let gone = "ip neigh del 10.1.0.55 dev eth1";
    vec![
        to_it("permanent neighbour")
            .setup("ip neigh add 10.1.0.55 lladdr 02:aa:00:00:00:01 dev eth1")
            .undo(gone),
        to_it("permanent neighbour changed")
            .setup("ip neigh add 10.1.0.55 lladdr 02:aa:00:00:00:01 dev eth1")
            .setup("ip neigh change 10.1.0.55 lladdr 02:aa:00:00:00:02 dev eth1 nud permanent")
            .undo(gone),
        to_it("noarp neighbour")
            .setup("ip neigh add 10.1.0.55 lladdr 02:aa:00:00:00:01 dev eth1 nud noarp")
            .undo(gone),
        to_it("deleted neighbour is asked for again")
            .setup("ip neigh add 10.1.0.55 lladdr 02:aa:00:00:00:01 dev eth1")
            .setup(gone),
        v6("permanent neighbour", |p, _| p.to(NEIGHBOUR_V6).done())
            .asks()
            .setup("ip neigh add fd00:1::55 lladdr 02:aa:00:00:00:01 dev eth1")
            .undo("ip neigh del fd00:1::55 dev eth1"),
    ]
}

/// A neighbour solicitation for an address of the router.
fn solicits(
    name: &str,
    target: &'static str,
    change: impl Fn(&mut V6, Ipv6Addr) + 'static,
) -> Case {
    case(name).v6(move |p, host| {
        let target =
            if target.is_empty() { link_local(host) } else { target.parse().expect("one") };
        let (group, mac) = solicited(target);
        (p.destination, p.link.to, p.hop_limit) = (group, mac, 255);
        p.segment(ICMPV6, discovery(135, 0, target, Some(p.link.from)));
        change(p, target);
    })
}

/// The router's link-local address at port 0, derived from its MAC address (RFC 4291 A).
fn link_local(host: &Host) -> Ipv6Addr {
    let [a, b, c, d, e, f] = host.router[0];
    let id = [a ^ 2, b, c, 0xff, 0xfe, d, e, f];
    let mut octets = [0; 16];
    octets[..2].copy_from_slice(&[0xfe, 0x80]);
    octets[8..].copy_from_slice(&id);
    octets.into()
}

fn of_v6() -> Vec<Case> {
    let router = |kind: u8, rest: &'static [u8]| {
        move |p: &mut V6, host: &Host| {
            let _ = host;
            p.hop_limit = 255;
            p.from("fe80::77").to("ff02::1");
            p.link.to = [0x33, 0x33, 0, 0, 0, 1];
            p.segment(ICMPV6, [&[kind, 0, 0, 0], rest].concat());
        }
    };
    vec![
        solicits("NS for the router", "fd00::1", |_, _| {}),
        solicits("NS for the router's link-local address", "", |_, _| {}),
        solicits("NS for another port's address", "fd00:1::1", |_, _| {}),
        solicits("NS for anycast of the subnet", "fd00::", |_, _| {}).after_ms(1200),
        solicits("NS with hop limit 254", "fd00::1", |p, _| p.hop_limit = 254),
        solicits("DAD NS for the router's address", "fd00::1", |p, target| {
            p.source = Ipv6Addr::UNSPECIFIED;
            p.segment(ICMPV6, discovery(135, 0, target, None));
        }),
        case("NS unicast").v6(|p, host| {
            p.hop_limit = 255;
            p.to("fd00::1").link.to = host.router[0];
            let (target, from) = (p.destination, p.link.from);
            p.segment(ICMPV6, discovery(135, 0, target, Some(from)));
        }),
        case("RS").v6(router(133, &[0; 4])),
        case("RA: no default route is learned")
            .v6(router(134, &[64, 0, 7, 8, 0, 0, 0, 0, 0, 0, 0, 0]))
            .then()
            .v6(|p, _| p.to("2001:db8:9::5").done()),
        v6("link-local to link-local of the router", |p, host| {
            p.from("fe80::99").destination = link_local(host);
            p.segment(ICMPV6, super::frames::echo(super::frames::ECHO_V6, 1, 8));
        }),
    ]
}
