//! Unusual packets.

use super::case::{Case, case, v4, v6};
use super::frames::{
    DF, ECHO, ECHO_V6, FRAGMENT, ICMP, ICMPV6, MF, TCP, echo, mac_of, tcp_syn, udp,
};

pub fn cases() -> Vec<Case> {
    [lengths_and_fields(), options(), malformed(), to_the_router(), links(), of_v6()]
        .into_iter()
        .flatten()
        .collect()
}

const LONGER: &str = "Frames longer than the port's MTU by more than 4 bytes";

fn lengths_and_fields() -> Vec<Case> {
    let mut cases = vec![
        v4("udp forwarded", |_, _| {}),
        v4("20-byte packet, no payload", |p, _| p.segment(61, vec![]).done()),
        v4("with Ethernet padding to 60", |p, _| {
            p.bytes(28);
            p.link.padding = 18;
        }),
        v4("with 300 bytes of trailer", |p, _| p.link.padding = 300),
        v4("reserved flag bit", |p, _| p.fragment = 0x8000),
        v4("wrong UDP checksum goes on", |p, _| {
            p.wrong = true;
            p.segment[6] = 0x77;
        }),
        v4("1500 to mtu 1500, DF", |p, _| p.bytes(1500).fragment = DF),
        v4("1501 into a port of mtu 1500", |p, _| p.bytes(1501).fragment = DF),
        v4("1504 into a port of mtu 1500, no DF", |p, _| p.bytes(1504).done()),
        v4("1505 into a port of mtu 1500", |p, _| p.bytes(1505).fragment = DF).differs(
            LONGER,
            "eth0 icmp 3/4",
            "nothing",
        ),
        v4("1500 with an FCS behind it", |p, _| p.bytes(1500).link.padding = 4),
        v4("1400 to mtu 1400, DF", |p, _| p.to("10.2.0.9").bytes(1400).fragment = DF),
        v4("1401 to mtu 1400, DF", |p, _| p.to("10.2.0.9").bytes(1401).fragment = DF),
        v4("1401 to mtu 1400, no DF", |p, _| p.to("10.2.0.9").bytes(1401).done()),
        v4("1500 to mtu 1400, no DF", |p, _| p.to("10.2.0.9").bytes(1500).done()),
        v4("1500 to mtu 1400, no DF, MF set offset 0", |p, _| {
            p.to("10.2.0.9").bytes(1500).fragment = MF;
        }),
        v4("1500 to mtu 1400, no DF, fragment in the middle", |p, _| {
            p.to("10.2.0.9").bytes(1500).fragment = MF | 185;
        }),
        v4("1500 to mtu 1400, DF and last fragment", |p, _| {
            p.to("10.2.0.9").bytes(1500).fragment = DF | 185;
        }),
        case("v4 fragments through, backwards")
            .v4(|p, _| p.bytes(500).fragment = 60)
            .v4(|p, _| p.bytes(500).fragment = MF),
    ];
    for ttl in [0, 1, 2, 255] {
        cases.push(v4(&format!("ttl {ttl}"), move |p, _| p.ttl = ttl));
        cases.push(v6(&format!("hop limit {ttl}"), move |p, _| p.hop_limit = ttl));
    }
    for tos in [0x03, 0xb8, 0xff] {
        cases.push(v4(&format!("tos {tos:#x} kept"), move |p, _| p.tos = tos));
    }
    cases
}

fn options() -> Vec<Case> {
    let with = |name: &str, options: &'static [u8]| {
        v4(&format!("option {name}"), move |p, _| p.options = options.to_vec())
    };
    vec![
        with("nop", &[1, 1, 1, 0]),
        with("record route", &[7, 11, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
        with("record route, full", &[7, 7, 8, 1, 2, 3, 4, 0]),
        with("router alert", &[0x94, 4, 0, 0]),
        v4("option loose source route via us", |p, _| {
            p.to("10.0.0.1").options = vec![0x83, 7, 4, 10, 1, 0, 9, 0];
        }),
        with("loose source route", &[0x83, 7, 4, 10, 3, 0, 9, 0]),
        with("strict source route", &[0x89, 7, 4, 10, 3, 0, 9, 0]),
        with("malformed length", &[7, 40, 4, 0]),
        with("length 0", &[0x44, 0, 0, 0]),
        with("unknown 0x5e", &[0x5e, 4, 0, 0]),
        with("security", &[0x82, 11, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
        v4("option router alert, to router", |p, _| {
            p.to("10.0.0.1").options = vec![0x94, 4, 0, 0];
            p.segment(ICMP, echo(ECHO, 1, 8));
        }),
        v4("option nop, ttl 1", |p, _| {
            p.options = vec![1, 1, 1, 0];
            p.ttl = 1;
        }),
        v4("option nop, 40 bytes", |p, _| p.options = vec![1; 40]),
    ]
}

fn malformed() -> Vec<Case> {
    vec![
        v4("wrong header checksum", |p, _| p.checksum = Some(|sum| sum ^ 0x1234)),
        v4("version 5", |p, _| p.version = Some(5)),
        v4("version 6 under 0x0800", |p, _| p.version = Some(6)),
        v4("ihl 4", |p, _| p.header_words = Some(4)),
        v4("ihl 15 beyond packet", |p, _| {
            p.header_words = Some(15);
            p.segment(61, vec![]);
        }),
        v4("total length 19", |p, _| p.total = Some(19)),
        v4("total length beyond frame", |p, _| p.total = Some(200)),
        v4("total length short of frame", |p, _| p.total = Some(30)),
        v4("header cut at 10 bytes", |p, _| p.link.cut = Some(24)),
        v4("empty payload frame", |p, _| p.link.cut = Some(14)),
        v4("checksum off by -1", |p, _| p.checksum = Some(|sum| sum.wrapping_sub(1))),
        v4("checksum off by 1", |p, _| p.checksum = Some(|sum| sum.wrapping_add(1))),
        v4("header checksum 0x0000", |p, _| p.checksum = Some(|_| 0)),
        v4("header checksum 0xffff where 0 is right", |p, host| {
            // The identification compensates for the other fields.
            p.checksum = None;
            let right = |p: &super::frames::V4| {
                let (_, frame) = p.frame();
                u16::from_be_bytes([frame[24], frame[25]])
            };
            let _ = host;
            p.id = 0;
            p.id = right(p);
            p.checksum = Some(|sum| if sum == 0 { 0xffff } else { sum });
        }),
        v6("version 4 under 0x86dd", |p, _| p.version = Some(4)),
        v6("payload length beyond frame", |p, _| p.payload = Some(200)),
        v6("payload length short of frame", |p, _| p.payload = Some(10)),
        v6("payload length 0 with UDP", |p, _| p.payload = Some(0)),
        v6("header cut", |p, _| p.link.cut = Some(40)),
    ]
}

fn to_the_router() -> Vec<Case> {
    vec![
        v4("echo of DSCP CS6 to near address", |p, _| {
            p.tos = 0xc0;
            p.to("10.0.0.1").segment(ICMP, echo(ECHO, 1, 8)).done();
        }),
        v4("echo to near address", |p, _| p.to("10.0.0.1").segment(ICMP, echo(ECHO, 1, 8)).done()),
        v4("echo to far address", |p, _| p.to("10.1.0.1").segment(ICMP, echo(ECHO, 1, 8)).done()),
        v4("echo to router ttl 1", |p, _| {
            p.to("10.0.0.1").segment(ICMP, echo(ECHO, 1, 8)).ttl = 1;
        }),
        v4("udp to closed port", |p, _| p.to("10.0.0.1").done()),
        v4("tcp to closed port", |p, _| p.to("10.0.0.1").segment(TCP, tcp_syn()).done()),
        v4("unknown protocol to router", |p, _| p.to("10.0.0.1").segment(253, udp(8)).done()),
        case("v4 fragmented echo to router, in order")
            .v4(|p, _| {
                let whole = summed(echo(ECHO, 7, 400));
                p.to("10.0.0.1").segment(ICMP, whole[..200].to_vec());
                (p.fragment, p.wrong) = (MF, true);
            })
            .v4(|p, _| {
                let whole = summed(echo(ECHO, 7, 400));
                p.to("10.0.0.1").segment(ICMP, whole[200..].to_vec());
                (p.fragment, p.wrong) = (25, true);
            }),
        v6("echo to near", |p, _| p.to("fd00::1").segment(ICMPV6, echo(ECHO_V6, 1, 8)).done()),
        v6("echo to far", |p, _| p.to("fd00:1::1").segment(ICMPV6, echo(ECHO_V6, 1, 8)).done()),
        v6("echo to router, hop limit 1", |p, _| {
            p.to("fd00::1").segment(ICMPV6, echo(ECHO_V6, 1, 8)).hop_limit = 1;
        }),
        v6("udp closed port", |p, _| p.to("fd00::1").done()),
        v6("tcp closed port", |p, _| p.to("fd00::1").segment(TCP, tcp_syn()).done()),
        v6("unknown next header to router", |p, _| p.to("fd00::1").segment(253, udp(8)).done()),
    ]
}

/// Adds the ICMP checksum.
fn summed(mut segment: Vec<u8>) -> Vec<u8> {
    let sum = pdp_wire::checksum::checksum(&segment);
    segment[2..4].copy_from_slice(&sum.to_be_bytes());
    segment
}

fn links() -> Vec<Case> {
    let tagged = |name: &str, tags: &'static [u8]| {
        case(&format!("tag {name}"))
            .v4(move |p, _| p.link.tags = tags.to_vec())
            .v6(move |p, _| p.link.tags = tags.to_vec())
    };
    vec![
        v4("to another station", |p, _| p.link.to = [2, 9, 9, 9, 9, 9]),
        v4("to broadcast MAC", |p, _| p.link.to = [0xff; 6]),
        v4("to multicast MAC", |p, _| p.link.to = [1, 0, 0x5e, 0, 0, 5]),
        v4("for the router to broadcast MAC", |p, _| {
            p.to("10.0.0.1").segment(ICMP, echo(ECHO, 1, 8)).link.to = [0xff; 6];
        }),
        v4("subnet broadcast echo, broadcast MAC", |p, _| {
            p.to("10.0.255.255").segment(ICMP, echo(ECHO, 1, 8)).link.to = [0xff; 6];
        }),
        v4("to MAC of another port of the router", |p, host| p.link.to = host.router[1]),
        v4("from multicast MAC", |p, _| p.link.from = [3, 0, 0, 0, 0, 1]),
        v4("from zero MAC", |p, _| p.link.from = [0; 6]),
        v4("from our own MAC", |p, host| p.link.from = host.router[0]),
        tagged("VLAN 0 priority", &[0x81, 0, 0xe0, 0]),
        tagged("VLAN 5", &[0x81, 0, 0, 5]),
        tagged("VLAN 4095", &[0x81, 0, 0x0f, 0xff]),
        tagged("QinQ 0/0", &[0x88, 0xa8, 0, 0, 0x81, 0, 0, 0]),
        tagged("802.1ad 0", &[0x88, 0xa8, 0, 0]),
        tagged("old 0x9100", &[0x91, 0, 0, 5]),
        v4("VLAN tag cut short", |p, _| {
            p.link.tags = vec![0x81, 0, 0, 0];
            p.link.cut = Some(15);
        }),
        v4("LLC/SNAP IPv4", |p, _| p.link.tags = vec![0, 44, 0xaa, 0xaa, 3, 0, 0, 0]),
        v4("type MPLS", |p, _| p.link.kind = 0x8847),
        v4("type 0x88b5", |p, _| p.link.kind = 0x88b5),
        v4("IPv4 under 0x86dd", |p, _| p.link.kind = 0x86dd),
        v6("to another station", |p, _| p.link.to = [2, 9, 9, 9, 9, 9]),
        v6("to multicast MAC, unicast address", |p, _| p.link.to = [0x33, 0x33, 0, 0, 0, 9]),
        v4("out of where it came from", |p, _| p.to("10.0.7.7").done()),
        v4("in by eth3", |p, host| {
            p.link.enter(host, 3);
            p.from("10.3.0.77");
        }),
        v4("in by eth2, which has an MTU of 1400", |p, host| {
            p.link.enter(host, 2);
            p.from("10.2.0.77").bytes(1404).link.from = mac_of(2, &[10, 2, 0, 77]);
        }),
    ]
}

fn of_v6() -> Vec<Case> {
    let hop_by_hop = |name: &str, rest: &'static [u8]| {
        v6(&format!("hop-by-hop {name}"), move |p, _| p.extension(0, rest).done())
    };
    let routing = |kind: u8, to: &'static str| {
        let where_to = if to == "fd00::1" { "to router" } else { "through" };
        v6(&format!("routing header type {kind}, {where_to}"), move |p, _| {
            let mut rest = vec![kind, 1, 0, 0, 0, 0];
            rest.extend("fd00:3::9".parse::<std::net::Ipv6Addr>().expect("an address").octets());
            p.to(to).extension(43, &rest);
        })
    };
    let mut cases = vec![
        v6("udp", |_, _| {}),
        v6("traffic class and flow label kept", |p, _| p.flow = 0x0b8_12345),
        v6("no payload, next header 59", |p, _| p.segment(59, vec![]).done()),
        v6("next header 59 with payload", |p, _| p.segment(59, udp(8)).done()),
        v6("padding", |p, _| p.link.padding = 20),
        v6("1400 to mtu 1400", |p, _| p.to("fd00:2::9").bytes(1400).done()),
        v6("1401 to mtu 1400", |p, _| p.to("fd00:2::9").bytes(1401).done()),
        v6("1501 into a port of mtu 1500", |p, _| p.bytes(1501).done()),
        v6("too big, ICMPv6 error inside", |p, _| {
            let mut segment = vec![1, 0, 0, 0, 0, 0, 0, 0];
            segment.resize(1461, 0);
            p.to("fd00:2::9").segment(ICMPV6, segment);
        }),
        hop_by_hop("router alert", &[5, 2, 0, 0, 1, 0]),
        hop_by_hop("PadN", &[1, 4, 0, 0, 0, 0]),
        hop_by_hop("unknown option 0x1e", &[0x1e, 4, 0, 0, 0, 0]),
        hop_by_hop("unknown option 0x5e", &[0x5e, 4, 0, 0, 0, 0]),
        hop_by_hop("unknown option 0x9e", &[0x9e, 4, 0, 0, 0, 0]),
        hop_by_hop("unknown option 0xde", &[0xde, 4, 0, 0, 0, 0]),
        v6("hop-by-hop jumbo, length 0", |p, _| {
            p.extension(0, &[0xc2, 4, 0, 1, 0, 0]).payload = Some(0);
        }),
        v6("hop-by-hop cut", |p, _| {
            p.extension(0, &[1, 4, 0, 0, 0, 0]);
            p.segment = vec![];
            p.payload = Some(4);
            p.link.cut = Some(58);
        }),
        v6("destination options", |p, _| p.extension(60, &[1, 4, 0, 0, 0, 0]).done()),
        v6("fragment header, first", |p, _| {
            p.extension(FRAGMENT, &[0, 1, 0, 0, 0, 9, 0][1..]).done()
        }),
        v6("fragment header, later", |p, _| p.extension(FRAGMENT, &[1, 0, 0, 0, 0, 9]).done()),
        v6("atomic fragment", |p, _| p.extension(FRAGMENT, &[0, 0, 0, 0, 0, 9]).done()),
        v6("AH", |p, _| p.extension(51, &[0; 14]).done()),
        v6("two hop-by-hop headers", |p, _| {
            p.extension(0, &[1, 4, 0, 0, 0, 0]).extension(0, &[1, 4, 0, 0, 0, 0]);
        }),
        v6("to another host with discovery of hop limit 64", |p, _| {
            let target = "fd00:1::9".parse().expect("an address");
            p.segment(ICMPV6, super::frames::discovery(135, 0, target, None));
        }),
        v6("out of where it came from by default route", |p, host| {
            p.link.enter(host, 3);
            p.from("fd00:3::77").to("fd00:1::9");
        }),
    ];
    cases.extend([0, 2, 3, 4].map(|kind| routing(kind, "fd00:1::9")));
    cases.extend([0, 2, 4].map(|kind| routing(kind, "fd00::1")));
    cases
}
