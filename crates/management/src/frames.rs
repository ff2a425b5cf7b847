//! Decides on the frames of a node's uplink interface, and translates them.
//!
//! Only whole IPv4 packets from the node's uplink address go out, to permitted destinations; the
//! gateway accepts only DNS over UDP. Datagrams and echo requests use the helper's own sockets, and
//! TCP goes to passt. Everything else is dropped. passt accepts no loopback address as the node's,
//! so it sees [`INSIDE`] instead (RFC 1624). Never panics, whatever the bytes.

use std::net::{Ipv4Addr, SocketAddrV4};
use std::ops::Range;

use pdp_proto::management::{GATEWAY, SOURCE};
use pdp_wire::checksum::{Sum, checksum};

use crate::flows::OutboundFlow;

/// The node's address towards passt, and the length of the prefix that it shares with the gateway.
pub const INSIDE: Ipv4Addr = Ipv4Addr::new(192, 0, 0, 2);
/// Length of the prefix; see [`INSIDE`].
pub const PREFIX_LENGTH: u8 = 29;

/// MAC address of the node's interface.
pub const MAC_NODE: [u8; 6] = [2, 0, 0, 0, 0, 2];
/// MAC address of passt.
pub const MAC_PASST: [u8; 6] = [2, 0, 0, 0, 0, 1];

const ETHERNET: usize = 14;
const IPV4: usize = 20;
const IPV4_TYPE: [u8; 2] = [8, 0];
const ICMP: u8 = 1;
const TCP: u8 = 6;
const UDP: u8 = 17;
const DNS_PORT: u16 = 53;
const UDP_HEADER: usize = 8;
const ICMP_HEADER: usize = 8;

/// Longest payload of a datagram, bytes.
pub const DATAGRAM_MAX: usize = u16::MAX as usize - IPV4 - UDP_HEADER;

/// Longest payload of a packet, bytes.
pub const PAYLOAD_MAX: usize = u16::MAX as usize - IPV4;

/// "More fragments" and the offset: all zero in a whole packet.
const FRAGMENT: u16 = 0x3fff;

/// ICMP: echo, and its reply (RFC 792), both with code 0.
const ECHO: u8 = 8;
const ECHO_REPLY: u8 = 0;

/// ICMP destination unreachable: port unreachable (RFC 792), or communication administratively
/// prohibited (RFC 1812 section 5.2.7.1).
const UNREACHABLE: u8 = 3;
const NO_PORT: u8 = 3;
const PROHIBITED: u8 = 13;

/// Bytes of the packet's payload quoted in an error.
const QUOTED: usize = 8;

/// Decision on a frame of the node.
#[derive(Debug, PartialEq, Eq)]
pub enum EgressVerdict {
    /// Forward it to passt, as rewritten.
    Forward,
    /// Send these bytes of it by the flow's socket.
    Datagram(OutboundFlow, Range<usize>),
    /// Send these bytes of it, an ICMP message, by the flow's socket.
    Echo(OutboundFlow, Range<usize>),
    /// Drop it.
    Dropped,
    /// Drop it, and send the node this frame as error.
    Refused(Vec<u8>),
}

/// Checks and rewrites a frame of the node. `allowed` returns true if the node may reach an address
/// of the machine's network.
pub fn egress(frame: &mut [u8], mut allowed: impl FnMut(Ipv4Addr) -> bool) -> EgressVerdict {
    let Some(packet) = Ipv4Frame::of(frame) else { return EgressVerdict::Dropped };
    if packet.source != SOURCE {
        return EgressVerdict::Dropped;
    }
    let goes = if packet.destination == GATEWAY {
        packet.is_dns(frame)
    } else {
        allowed(packet.destination)
    };
    if !goes {
        return packet.refusal(frame).map_or(EgressVerdict::Dropped, EgressVerdict::Refused);
    }
    let verdict = match packet.protocol {
        UDP => packet.datagram(frame).map(|(flow, bytes)| EgressVerdict::Datagram(flow, bytes)),
        ICMP => packet.echo(frame).map(|(flow, bytes)| EgressVerdict::Echo(flow, bytes)),
        TCP => {
            frame[..6].copy_from_slice(&MAC_PASST);
            packet.rewrite(frame, ETHERNET + 12, SOURCE, INSIDE);
            Some(EgressVerdict::Forward)
        }
        _ => None,
    };
    verdict.unwrap_or(EgressVerdict::Dropped)
}

/// Rewrites a frame of passt for the node. False if it is not for the node.
pub fn ingress(frame: &mut [u8]) -> bool {
    let Some(packet) = Ipv4Frame::of(frame) else { return false };
    // passt only answers TCP.
    if packet.destination != INSIDE || packet.protocol != TCP {
        return false;
    }
    frame[..6].copy_from_slice(&MAC_NODE);
    packet.rewrite(frame, ETHERNET + 16, INSIDE, SOURCE);
    true
}

/// Writes the frame that delivers a far end's answer to the node. A frame may exceed the MTU: the
/// node's kernel accepts it whole, without reassembly.
pub fn answer(frame: &mut Vec<u8>, flow: &OutboundFlow, payload: &[u8]) {
    let payload = &payload[..payload.len().min(DATAGRAM_MAX)];
    let length = (UDP_HEADER + payload.len()) as u16;
    start(frame, UDP, *flow.to.ip(), usize::from(length));
    let mut header = [0; UDP_HEADER];
    header[..2].copy_from_slice(&flow.to.port().to_be_bytes());
    header[2..4].copy_from_slice(&flow.port.to_be_bytes());
    header[4..6].copy_from_slice(&length.to_be_bytes());
    // A checksum of zero would mean that there is none (RFC 768).
    let sum = match udp_sum(*flow.to.ip(), SOURCE, length, &header, payload) {
        0 => u16::MAX,
        sum => sum,
    };
    header[6..].copy_from_slice(&sum.to_be_bytes());
    frame.extend_from_slice(&header);
    frame.extend_from_slice(payload);
}

/// Writes the frame that delivers a far end's echo reply to the node, with the identifier of the
/// node's request. False if the message is no echo reply.
pub fn echo_reply(frame: &mut Vec<u8>, flow: &OutboundFlow, message: &[u8]) -> bool {
    let Some(header) = message.first_chunk::<ICMP_HEADER>() else { return false };
    if header[..2] != [ECHO_REPLY, 0] || message.len() > PAYLOAD_MAX {
        return false;
    }
    start(frame, ICMP, *flow.to.ip(), message.len());
    let at = frame.len();
    frame.extend_from_slice(message);
    let reply = &mut frame[at..];
    reply[2..4].fill(0);
    reply[4..6].copy_from_slice(&flow.port.to_be_bytes());
    let sum = checksum(reply);
    reply[2..4].copy_from_slice(&sum.to_be_bytes());
    true
}

/// Writes the frame that reports a closed port at a flow's far end.
pub fn nobody_listens(frame: &mut Vec<u8>, flow: &OutboundFlow) {
    let mut quoted = ipv4_header(UDP, SOURCE, *flow.to.ip(), UDP_HEADER).to_vec();
    quoted.extend_from_slice(&flow.port.to_be_bytes());
    quoted.extend_from_slice(&flow.to.port().to_be_bytes());
    quoted.extend_from_slice(&[0, UDP_HEADER as u8, 0, 0]);
    unreachable(frame, NO_PORT, *flow.to.ip(), &quoted);
}

/// Writes an error about a packet of the node, quoting its header and the beginning of its payload.
fn unreachable(frame: &mut Vec<u8>, code: u8, from: Ipv4Addr, quoted: &[u8]) {
    let mut message = vec![UNREACHABLE, code, 0, 0, 0, 0, 0, 0];
    message.extend_from_slice(quoted);
    let sum = checksum(&message);
    message[2..4].copy_from_slice(&sum.to_be_bytes());
    start(frame, ICMP, from, message.len());
    frame.extend_from_slice(&message);
}

/// Begins a frame for the node whose packet has a payload of `payload` bytes.
fn start(frame: &mut Vec<u8>, protocol: u8, from: Ipv4Addr, payload: usize) {
    frame.clear();
    frame.extend_from_slice(&MAC_NODE);
    frame.extend_from_slice(&MAC_PASST);
    frame.extend_from_slice(&IPV4_TYPE);
    frame.extend_from_slice(&ipv4_header(protocol, from, SOURCE, payload));
}

/// Header of a whole packet. It needs no identification,
/// as it is never fragmented (RFC 6864 section 4.1).
fn ipv4_header(protocol: u8, from: Ipv4Addr, to: Ipv4Addr, payload: usize) -> [u8; IPV4] {
    const DO_NOT_FRAGMENT: u8 = 0x40;
    let mut header = [0; IPV4];
    header[0] = 0x45;
    // Payloads are at most PAYLOAD_MAX.
    header[2..4].copy_from_slice(&((IPV4 + payload) as u16).to_be_bytes());
    header[6] = DO_NOT_FRAGMENT;
    header[8..10].copy_from_slice(&[64, protocol]);
    header[12..16].copy_from_slice(&from.octets());
    header[16..20].copy_from_slice(&to.octets());
    let sum = checksum(&header);
    header[10..12].copy_from_slice(&sum.to_be_bytes());
    header
}

/// Checksum of a datagram. Over a datagram with its correct checksum it is 0.
fn udp_sum(from: Ipv4Addr, to: Ipv4Addr, length: u16, header: &[u8], payload: &[u8]) -> u16 {
    let sum = Sum::default().with(&from.octets()).with(&to.octets());
    let sum = sum.with_word(u16::from(UDP)).with_word(length);
    sum.with(header).with(payload).finish()
}

/// Fields of a whole IPv4 packet in a frame with a complete header.
struct Ipv4Frame {
    source: Ipv4Addr,
    destination: Ipv4Addr,
    protocol: u8,
    /// Offset of its payload in the frame.
    payload: usize,
}

impl Ipv4Frame {
    fn of(frame: &[u8]) -> Option<Self> {
        let header = frame.get(ETHERNET..)?.first_chunk::<IPV4>()?;
        let length = usize::from(header[0] & 0xf) * 4;
        let fragment = u16::from_be_bytes([header[6], header[7]]) & FRAGMENT;
        let fits = length >= IPV4 && frame.len() >= ETHERNET + length;
        if frame[12..14] != IPV4_TYPE || header[0] >> 4 != 4 || fragment != 0 || !fits {
            return None;
        }
        let address =
            |at: usize| Ipv4Addr::new(header[at], header[at + 1], header[at + 2], header[at + 3]);
        Some(Self {
            source: address(12),
            destination: address(16),
            protocol: header[9],
            payload: ETHERNET + length,
        })
    }

    fn is_dns(&self, frame: &[u8]) -> bool {
        let port = frame.get(self.payload + 2..self.payload + 4);
        self.protocol == UDP && port == Some(&DNS_PORT.to_be_bytes())
    }

    /// Offset of the packet's end in the frame, which may be longer or shorter.
    fn end(frame: &[u8]) -> Option<usize> {
        Some(ETHERNET + usize::from(word(frame, ETHERNET + 2)?))
    }

    /// Returns the flow of an echo request, and its message's range in the frame.
    fn echo(&self, frame: &[u8]) -> Option<(OutboundFlow, Range<usize>)> {
        let place = self.payload..Self::end(frame)?;
        let message = frame.get(place.clone())?;
        let header = message.first_chunk::<ICMP_HEADER>()?;
        let is_echo = header[..2] == [ECHO, 0] && checksum(message) == 0;
        let port = u16::from_be_bytes([header[4], header[5]]);
        let flow = OutboundFlow { port, to: SocketAddrV4::new(self.destination, 0) };
        is_echo.then_some((flow, place))
    }

    /// Returns the flow of a datagram, and its payload's range in the frame.
    fn datagram(&self, frame: &[u8]) -> Option<(OutboundFlow, Range<usize>)> {
        let word = |at| word(frame, at);
        let end = Self::end(frame)?;
        let length = word(self.payload + 4)?;
        let datagram = self.payload..self.payload + usize::from(length);
        let payload = self.payload + UDP_HEADER..datagram.end;
        if datagram.end > end || payload.start > payload.end {
            return None;
        }
        let (header, bytes) = frame.get(datagram)?.split_at(UDP_HEADER);
        let sum = udp_sum(self.source, self.destination, length, header, bytes);
        let (port, to) = (word(self.payload)?, word(self.payload + 2)?);
        let sum_right = word(self.payload + 6)? == 0 || sum == 0;
        let flow = OutboundFlow { port, to: SocketAddrV4::new(self.destination, to) };
        (sum_right && port != 0 && to != 0).then_some((flow, payload))
    }

    /// Replaces an address in the header, and updates the checksums that cover it.
    fn rewrite(&self, frame: &mut [u8], at: usize, from: Ipv4Addr, to: Ipv4Addr) {
        frame[at..at + 4].copy_from_slice(&to.octets());
        update(frame, ETHERNET + 10, from, to);
        if self.protocol == TCP {
            update(frame, self.payload + 16, from, to);
        }
    }

    /// Returns the error that tells the node that a packet is
    /// prohibited. Errors get none (RFC 1122 section 3.2.2).
    fn refusal(&self, frame: &[u8]) -> Option<Vec<u8>> {
        if self.protocol == ICMP && frame.get(self.payload) != Some(&ECHO) {
            return None;
        }
        let mut reply = Vec::new();
        let quoted = &frame[ETHERNET..frame.len().min(self.payload + QUOTED)];
        unreachable(&mut reply, PROHIBITED, GATEWAY, quoted);
        Some(reply)
    }
}

fn word(frame: &[u8], at: usize) -> Option<u16> {
    frame.get(at..at + 2).map(|word| u16::from_be_bytes([word[0], word[1]]))
}

/// Updates a checksum after a change of an address that it covers (RFC 1624, equation 3).
fn update(frame: &mut [u8], at: usize, from: Ipv4Addr, to: Ipv4Addr) {
    let Some(field) = frame.get_mut(at..at + 2) else { return };
    let mut sum = u32::from(!u16::from_be_bytes([field[0], field[1]]));
    for (address, mask) in [(from, 0xffff), (to, 0)] {
        let [a, b, c, d] = address.octets();
        for word in [[a, b], [c, d]] {
            sum += u32::from(u16::from_be_bytes(word) ^ mask);
        }
    }
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    field.copy_from_slice(&(!(sum as u16)).to_be_bytes());
}

#[cfg(test)]
mod tests {
    use etherparse::{PacketBuilder, SlicedPacket, TransportSlice};
    use proptest::prelude::*;

    use super::*;

    fn udp(source: Ipv4Addr, destination: Ipv4Addr, port: u16, payload: &[u8]) -> Vec<u8> {
        let builder = PacketBuilder::ethernet2(MAC_NODE, [2; 6])
            .ipv4(source.octets(), destination.octets(), 64)
            .udp(4_000, port);
        let mut frame = Vec::new();
        builder.write(&mut frame, payload).unwrap();
        frame
    }

    fn tcp(source: Ipv4Addr, destination: Ipv4Addr, payload: &[u8]) -> Vec<u8> {
        let builder = PacketBuilder::ethernet2(MAC_NODE, [2; 6])
            .ipv4(source.octets(), destination.octets(), 64)
            .tcp(4_000, 80, 7, 1_000);
        let mut frame = Vec::new();
        builder.write(&mut frame, payload).unwrap();
        frame
    }

    fn echo(source: Ipv4Addr, destination: Ipv4Addr, id: u16, payload: &[u8]) -> Vec<u8> {
        let builder = PacketBuilder::ethernet2(MAC_NODE, [2; 6])
            .ipv4(source.octets(), destination.octets(), 64)
            .icmpv4_echo_request(id, 7);
        let mut frame = Vec::new();
        builder.write(&mut frame, payload).unwrap();
        frame
    }

    /// A reply as a ping socket delivers it, with any checksum and the socket's identifier.
    fn reply(id: u16, payload: &[u8]) -> Vec<u8> {
        let [high, low] = id.to_be_bytes();
        [&[ECHO_REPLY, 0, 0xab, 0xcd, high, low, 0, 7], payload].concat()
    }

    /// True if all checksums of a frame are correct, according to another library.
    fn sums_right(frame: &[u8]) -> bool {
        let packet = SlicedPacket::from_ethernet(frame).unwrap();
        let Some(etherparse::NetSlice::Ipv4(ip)) = packet.net else { return false };
        let header = ip.header().to_header();
        let right = match packet.transport {
            Some(TransportSlice::Udp(udp)) => {
                let of = udp.to_header();
                of.calc_checksum_ipv4(&header, udp.payload()).unwrap() == of.checksum
            }
            Some(TransportSlice::Tcp(tcp)) => {
                let of = tcp.to_header();
                of.calc_checksum_ipv4(&header, tcp.payload()).unwrap() == of.checksum
            }
            Some(TransportSlice::Icmpv4(icmp)) => {
                let of = icmp.header();
                of.icmp_type.calc_checksum(icmp.payload()) == of.checksum
            }
            _ => true,
        };
        right && header.calc_header_checksum() == header.header_checksum
    }

    const THERE: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 9);

    const HEADERS: usize = ETHERNET + IPV4 + UDP_HEADER;

    fn flow(to: Ipv4Addr, port: u16) -> OutboundFlow {
        OutboundFlow { port: 4_000, to: SocketAddrV4::new(to, port) }
    }

    #[test]
    fn passt_carries_only_tcp() {
        let mut question = udp(SOURCE, THERE, 80, b"?");
        assert!(matches!(egress(&mut question, |_| true), EgressVerdict::Datagram(..)));
        assert!(matches!(
            egress(&mut echo(SOURCE, THERE, 9, b"?"), |_| true),
            EgressVerdict::Echo(..)
        ));
        assert!(!ingress(&mut udp(THERE, INSIDE, 80, b"!")));
        assert!(!ingress(&mut echo(THERE, INSIDE, 9, b"!")));
        assert!(ingress(&mut tcp(THERE, INSIDE, b"!")));
        for protocol in (0..=u8::MAX).filter(|protocol| ![ICMP, TCP, UDP].contains(protocol)) {
            let mut sent = tcp(SOURCE, THERE, b"?");
            sent[ETHERNET + 9] = protocol;
            assert_eq!(egress(&mut sent, |_| true), EgressVerdict::Dropped, "{protocol}");
            let mut got = tcp(THERE, INSIDE, b"!");
            got[ETHERNET + 9] = protocol;
            assert!(!ingress(&mut got), "{protocol}");
        }
    }

    #[test]
    fn only_valid_echo_requests_pass() {
        let flow = OutboundFlow { port: 9, to: SocketAddrV4::new(THERE, 0) };
        let whole = echo(SOURCE, THERE, 9, b"question");
        let place = ETHERNET + IPV4..whole.len();
        let mut padded = [&whole[..], &[0; 10]].concat();
        assert_eq!(egress(&mut padded, |_| true), EgressVerdict::Echo(flow, place.clone()));
        for at in place {
            let mut damaged = whole.clone();
            damaged[at] ^= 0x10;
            assert_eq!(egress(&mut damaged, |_| true), EgressVerdict::Dropped, "byte {at}");
        }
        for length in ETHERNET + IPV4..whole.len() {
            assert_eq!(egress(&mut whole[..length].to_vec(), |_| true), EgressVerdict::Dropped);
        }
        for (kind, code) in (0..=u8::MAX).flat_map(|kind| [(kind, 0), (kind, 1)]) {
            let mut other = whole.clone();
            let message = &mut other[ETHERNET + IPV4..];
            message[..4].copy_from_slice(&[kind, code, 0, 0]);
            let sum = checksum(message);
            message[2..4].copy_from_slice(&sum.to_be_bytes());
            let goes = egress(&mut other, |_| true) != EgressVerdict::Dropped;
            assert_eq!(goes, (kind, code) == (ECHO, 0), "type {kind}, code {code}");
        }
    }

    #[test]
    fn pinging_node_gets_only_echo_replies() {
        let flow = OutboundFlow { port: 9, to: SocketAddrV4::new(THERE, 0) };
        let mut frame = Vec::new();
        assert!(echo_reply(&mut frame, &flow, &reply(1, &[0; PAYLOAD_MAX - ICMP_HEADER])));
        assert_eq!(frame.len(), ETHERNET + usize::from(u16::MAX));
        assert!(!echo_reply(&mut frame, &flow, &reply(1, &[0; PAYLOAD_MAX])));
        assert!(!echo_reply(&mut frame, &flow, &reply(1, b"")[..7]));
        let (mut request, mut code) = (reply(1, b"x"), reply(1, b"x"));
        request[0] = ECHO;
        code[1] = 1;
        assert!(!echo_reply(&mut frame, &flow, &request) && !echo_reply(&mut frame, &flow, &code));
    }

    #[test]
    fn damaged_datagrams_are_dropped() {
        let whole = udp(SOURCE, THERE, 80, b"question");
        let mut padded = [&whole[..], &[0; 10]].concat();
        let verdict = EgressVerdict::Datagram(flow(THERE, 80), HEADERS..HEADERS + 8);
        assert_eq!(egress(&mut padded, |_| true), verdict);
        // Each byte of ports, length, checksum and payload.
        for at in HEADERS - UDP_HEADER..whole.len() {
            let mut damaged = whole.clone();
            damaged[at] ^= 0x10;
            assert_eq!(egress(&mut damaged, |_| true), EgressVerdict::Dropped, "byte {at}");
        }
        let mut cut = whole;
        cut.truncate(HEADERS + 3);
        assert_eq!(egress(&mut cut, |_| true), EgressVerdict::Dropped);
    }

    #[test]
    fn icmp_error_quotes_its_flow() {
        let mut reply = Vec::new();
        nobody_listens(&mut reply, &flow(THERE, 80));
        assert!(sums_right(&reply));
        assert_eq!(reply[ETHERNET + 12..][..8], [THERE.octets(), SOURCE.octets()].concat());
        assert_eq!(reply[ETHERNET + IPV4..][..2], [UNREACHABLE, NO_PORT]);
        let quoted = &reply[ETHERNET + IPV4 + 8..];
        let sent = udp(SOURCE, THERE, 80, b"");
        assert_eq!(quoted[12..20], sent[ETHERNET + 12..][..8]);
        assert_eq!(quoted[IPV4..][..6], sent[ETHERNET + IPV4..][..6]);
    }

    #[test]
    fn forbidden_destinations_are_refused_with_icmp_error() {
        let mut frame = tcp(SOURCE, THERE, b"hello");
        assert_eq!(egress(&mut frame, |to| to == THERE), EgressVerdict::Forward);
        let EgressVerdict::Refused(reply) = egress(&mut tcp(SOURCE, THERE, b"hello"), |_| false)
        else {
            panic!("not refused");
        };
        assert!(sums_right(&reply));
        assert_eq!(reply[ETHERNET + IPV4..][..2], [UNREACHABLE, PROHIBITED]);
        assert_eq!(reply[ETHERNET + 16..][..4], SOURCE.octets());
        assert_eq!(reply[ETHERNET + IPV4 + 8..], tcp(SOURCE, THERE, b"hello")[ETHERNET..][..28]);
    }

    #[test]
    fn gateway_answers_only_dns() {
        let ask = |frame: &mut [u8]| egress(frame, |_| panic!("it is none of the machine's"));
        let question = ask(&mut udp(SOURCE, GATEWAY, 53, b"?"));
        assert_eq!(question, EgressVerdict::Datagram(flow(GATEWAY, 53), HEADERS..HEADERS + 1));
        assert!(matches!(ask(&mut udp(SOURCE, GATEWAY, 54, b"?")), EgressVerdict::Refused(_)));
        assert!(matches!(ask(&mut tcp(SOURCE, GATEWAY, b"")), EgressVerdict::Refused(_)));
    }

    #[test]
    fn fragments_foreign_sources_and_protocols_are_dropped() {
        let mut fragment = udp(SOURCE, THERE, 80, b"x");
        fragment[ETHERNET + 6] |= 0x20;
        let mut other = udp(SOURCE, THERE, 80, b"x");
        other[12..14].copy_from_slice(&[0x86, 0xdd]);
        let foreign = udp(Ipv4Addr::new(10, 0, 0, 1), THERE, 80, b"x");
        for mut frame in [fragment, other, foreign] {
            assert_eq!(egress(&mut frame, |_| true), EgressVerdict::Dropped);
        }
        // Errors get no error in return.
        let mut error = Vec::new();
        let builder = PacketBuilder::ethernet2(MAC_NODE, [2; 6])
            .ipv4(SOURCE.octets(), THERE.octets(), 64)
            .icmpv4_raw(3, 1, [0; 4]);
        builder.write(&mut error, &[0; 28]).unwrap();
        assert_eq!(egress(&mut error, |_| false), EgressVerdict::Dropped);
    }

    proptest! {
        #[test]
        fn addresses_are_translated_with_correct_checksums(
            payload in prop::collection::vec(any::<u8>(), 0..64), to: [u8; 4],
        ) {
            let to = Ipv4Addr::from(to);
            prop_assume!(to != GATEWAY);
            let mut frame = tcp(SOURCE, to, &payload);
            prop_assert_eq!(egress(&mut frame, |_| true), EgressVerdict::Forward);
            prop_assert_eq!(&frame[ETHERNET + 12..][..4], INSIDE.octets());
            prop_assert!(sums_right(&frame));
            let mut back = tcp(to, INSIDE, &payload);
            prop_assert!(ingress(&mut back));
            prop_assert_eq!(&back[ETHERNET + 16..][..4], SOURCE.octets());
            prop_assert!(sums_right(&back));
        }

        #[test]
        fn datagrams_and_answers_pass_unchanged(
            payload in prop::collection::vec(any::<u8>(), 0..4_000), to: [u8; 4], port in 1..u16::MAX,
        ) {
            let to = Ipv4Addr::from(to);
            prop_assume!(to != GATEWAY);
            let mut frame = udp(SOURCE, to, port, &payload);
            let verdict = egress(&mut frame, |_| true);
            let EgressVerdict::Datagram(found, bytes) = verdict else { panic!("{verdict:?}") };
            prop_assert_eq!(&frame[bytes], &payload[..]);
            prop_assert_eq!(found, flow(to, port));
            answer(&mut frame, &found, &payload);
            prop_assert!(sums_right(&frame));
            let packet = SlicedPacket::from_ethernet(&frame).unwrap();
            let Some(TransportSlice::Udp(datagram)) = packet.transport else { panic!("not UDP") };
            prop_assert_eq!((datagram.source_port(), datagram.destination_port()), (port, 4_000));
            prop_assert_eq!(datagram.payload(), &payload[..]);
            prop_assert_eq!(&frame[ETHERNET + 12..][..8], [to.octets(), SOURCE.octets()].concat());
        }

        #[test]
        fn echo_replies_carry_the_nodes_identifier(
            payload in prop::collection::vec(any::<u8>(), 0..1_500), to: [u8; 4], id: u16, other: u16,
        ) {
            let to = Ipv4Addr::from(to);
            prop_assume!(to != GATEWAY);
            let mut frame = echo(SOURCE, to, id, &payload);
            let verdict = egress(&mut frame, |_| true);
            let EgressVerdict::Echo(found, bytes) = verdict else { panic!("{verdict:?}") };
            prop_assert_eq!(found, OutboundFlow { port: id, to: SocketAddrV4::new(to, 0) });
            prop_assert_eq!(&frame[bytes][ICMP_HEADER..], &payload[..]);
            prop_assert!(echo_reply(&mut frame, &found, &reply(other, &payload)));
            prop_assert!(sums_right(&frame));
            let message = &frame[ETHERNET + IPV4..];
            prop_assert_eq!([&message[..2], &message[4..8]].concat(), [[0, 0], id.to_be_bytes(), [0, 7]].concat());
            prop_assert_eq!(&message[ICMP_HEADER..], &payload[..]);
            prop_assert_eq!(&frame[ETHERNET + 12..][..8], [to.octets(), SOURCE.octets()].concat());
        }

        #[test]
        fn no_bytes_make_it_panic(mut bytes in prop::collection::vec(any::<u8>(), 0..96), cut: bool) {
            let likes = [
                tcp(SOURCE, GATEWAY, &[0; 8]),
                udp(SOURCE, GATEWAY, 53, &[0; 8]),
                echo(SOURCE, THERE, 9, &[0; 8]),
            ];
            let likes = likes.map(|mut like| {
                let length = bytes.len().min(like.len());
                if cut {
                    like.truncate(length);
                } else {
                    like[..length].iter_mut().zip(&bytes).for_each(|(to, noise)| *to ^= noise & 0x11);
                }
                like
            });
            for frame in [&mut bytes].into_iter().chain(&mut likes.clone()) {
                for allowed in [false, true] {
                    let verdict = egress(frame, |_| allowed);
                    if let EgressVerdict::Datagram(flow, place) | EgressVerdict::Echo(flow, place) = verdict {
                        let message = frame.get(place).expect("a place in the frame");
                        echo_reply(&mut Vec::new(), &flow, message);
                    }
                }
                ingress(frame);
            }
        }
    }
}
