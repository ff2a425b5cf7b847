//! Output of a router: decoding, comparison, and answers.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::net::{IpAddr, Ipv4Addr};

use pdp_wire::ether::kind;

use super::bench::PORTS;
use super::case::{Case, Expect};
use super::frames::{Arp, FRAGMENT, Host, ICMP, ICMPV6, Mac, V6, discovery, mac_of};

/// Frames with the ports that sent them.
pub type Frames = Vec<(usize, Vec<u8>)>;

fn ether_kind(frame: &[u8]) -> u16 {
    frame.get(12..14).map_or(0, |kind| u16::from_be_bytes([kind[0], kind[1]]))
}

/// Target address of an ARP request or a neighbour solicitation.
pub fn solicitation(frame: &[u8]) -> Option<IpAddr> {
    let packet = frame.get(14..)?;
    match ether_kind(frame) {
        kind::ARP if packet.get(6..8)? == [0, 1] => {
            let target: [u8; 4] = packet.get(24..28)?.try_into().ok()?;
            Some(target.into())
        }
        kind::IPV6 if packet.get(6)? == &ICMPV6 && packet.get(40)? == &135 => {
            let target: [u8; 16] = packet.get(48..64)?.try_into().ok()?;
            Some(target.into())
        }
        _ => None,
    }
}

/// Answer of the requested machine.
pub fn answer(port: usize, request: &[u8], target: IpAddr) -> Option<Vec<u8>> {
    let from: Mac = request.get(6..12)?.try_into().ok()?;
    match target {
        IpAddr::V4(v4) => {
            let asks: [u8; 4] = request.get(28..32)?.try_into().ok()?;
            let sender = (mac_of(port, &v4.octets()), v4);
            let arp = Arp { operation: 2, hardware: 1, sender, target: (from, asks.into()) };
            Some(arp.frame(from))
        }
        IpAddr::V6(v6) => {
            let asks: [u8; 16] = request.get(22..38)?.try_into().ok()?;
            let mac = mac_of(port, &v6.octets());
            let host = Host { v4: Ipv4Addr::UNSPECIFIED, v6, router: [from; PORTS] };
            let mut packet = V6::new(&host);
            packet.link.from = mac;
            (packet.destination, packet.hop_limit) = (asks.into(), 255);
            if packet.destination.is_unspecified() {
                return None;
            }
            packet.segment(ICMPV6, discovery(136, 0x60, v6, Some(mac)));
            Some(packet.frame().1)
        }
    }
}

/// True for messages of the router itself: IGMP, MLD, router solicitations.
pub fn is_own_talk(frame: &[u8]) -> bool {
    match ether_kind(frame) {
        kind::IPV4 => frame.get(23) == Some(&2),
        kind::IPV6 => {
            let report = frame.get(20) == Some(&0) && frame.get(62) == Some(&143);
            report
                || frame.get(20) == Some(&ICMPV6) && matches!(frame.get(54), Some(131..=133 | 143))
        }
        _ => false,
    }
}

/// Clears the fields of a router's own packets that it may choose: identifications.
pub fn plain(mut frame: Vec<u8>, routers: &[Mac]) -> Vec<u8> {
    if !routers.iter().any(|mac| frame[6..12] == *mac) {
        return frame;
    }
    match ether_kind(&frame) {
        // Cases send with a TTL of 64, which is 63 behind a
        // router. The router's own packets start with 64.
        kind::IPV4 if matches!(frame.get(22), Some(64 | 255)) && frame.len() >= 34 => {
            frame[18..20].fill(0);
            frame[24..26].fill(0);
        }
        kind::IPV6 if frame.get(20) == Some(&FRAGMENT) && frame.get(21) == Some(&64) => {
            if let Some(id) = frame.get_mut(58..62) {
                id.fill(0);
            }
        }
        _ => {}
    }
    frame
}

/// Deviation from the expectation, with all output. With unknown neighbours, the control guest's
/// kernel may handle packets for which PdP differs.
pub fn compare(case: &Case, seen: &[[Frames; 2]; 2]) -> Option<String> {
    let is_wrong = |cold: bool, [pdp, kernel]: &[Frames; 2]| match &case.expect {
        Expect::Same => pdp != kernel,
        Expect::SameWays => paths(pdp) != paths(kernel),
        Expect::Differs { kernel: by_kernel, pdp: by_pdp, .. } => {
            let by_guest = words(pdp) == *by_pdp;
            words(kernel) != *by_kernel || !(by_guest || cold && pdp == kernel)
        }
    };
    let wrong = is_wrong(true, &seen[0]) || is_wrong(false, &seen[1]);
    let mut text = String::new();
    if wrong {
        for ([pdp, kernel], when) in seen.iter().zip(["cold", "warm"]) {
            for (frames, who) in [(kernel, "kernel"), (pdp, "PdP")] {
                let _ = writeln!(text, "  {when} {who}: {}", words(frames));
                for (port, frame) in frames {
                    let hex: String = frame.iter().take(90).map(|b| format!("{b:02x}")).collect();
                    let _ = writeln!(text, "    eth{port} {} bytes {hex}", frame.len());
                }
            }
        }
    }
    wrong.then_some(text)
}

/// Packets without their MAC addresses, and ports with their destination MAC addresses.
type DeliveryPaths<'a> = (Vec<&'a [u8]>, BTreeSet<(usize, &'a [u8])>);

/// The packets, and all paths taken.
fn paths(frames: &Frames) -> DeliveryPaths<'_> {
    let mut packets: Vec<&[u8]> = frames.iter().map(|(_, frame)| &frame[12..]).collect();
    packets.sort();
    (packets, frames.iter().map(|(port, frame)| (*port, &frame[..6])).collect())
}

/// Short description of frames: ports and contents.
pub fn words(frames: &Frames) -> String {
    if frames.is_empty() {
        return "nothing".into();
    }
    let mut all: Vec<String> =
        frames.iter().map(|(port, frame)| format!("eth{port} {}", word(frame))).collect();
    all.sort();
    all.dedup();
    all.join(", ")
}

fn word(frame: &[u8]) -> String {
    let at = |index: usize| frame.get(index).copied().unwrap_or_default();
    let icmp = |name: &str, at: usize| {
        let code = |at: usize| frame.get(at).copied().unwrap_or_default();
        format!("{name} {}/{}", code(at), code(at + 1))
    };
    match ether_kind(frame) {
        kind::ARP => format!("arp {}", at(21)),
        kind::IPV4 => match at(23) {
            ICMP => icmp("icmp", 14 + usize::from(at(14) & 15) * 4),
            17 => "udp".into(),
            other => format!("ipv4 {other}"),
        },
        kind::IPV6 => match at(20) {
            ICMPV6 => icmp("icmp6", 54),
            17 => "udp6".into(),
            other => format!("ipv6 {other}"),
        },
        other => format!("{other:04x}"),
    }
}
