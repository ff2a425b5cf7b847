//! Frames between a node's interface to outside and passt: which go, and as what.
//!
//! To outside go whole IPv4 packets of the node's address there, to addresses that [`Judge`] allows; to the gateway
//! only DNS by UDP. passt takes no loopback address for the node's, so that it sees [`INSIDE`] instead (RFC 1624).
//! Never panics, whatever the bytes.

use std::net::Ipv4Addr;

use pdp_proto::management::{GATEWAY, SOURCE};
use pdp_wire::checksum::checksum;

/// What passt takes the node's address for, and the length of the prefix that it shares with the gateway.
pub const INSIDE: Ipv4Addr = Ipv4Addr::new(192, 0, 0, 2);
/// See [`INSIDE`].
pub const PREFIX_LENGTH: u8 = 29;

/// Link address of the node's interface.
pub const MAC_NODE: [u8; 6] = [2, 0, 0, 0, 0, 2];
/// Link address of passt.
pub const MAC_PASST: [u8; 6] = [2, 0, 0, 0, 0, 1];

const ETHERNET: usize = 14;
const IPV4: usize = 20;
const IPV4_TYPE: [u8; 2] = [8, 0];
const ICMP: u8 = 1;
const TCP: u8 = 6;
const UDP: u8 = 17;
const DNS_PORT: u16 = 53;

/// "More fragments" and the offset: all zero in a packet that is whole.
const FRAGMENT: u16 = 0x3fff;

/// ICMP: destination unreachable, since communication is administratively prohibited (RFC 1812 section 5.2.7.1).
const UNREACHABLE: u8 = 3;
const PROHIBITED: u8 = 13;

/// Bytes of the packet's payload that an error quotes.
const QUOTED: usize = 8;

/// What becomes of a frame of the node.
#[derive(Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It goes to passt, as it is now.
    Goes,
    /// It goes nowhere.
    Dropped,
    /// It goes nowhere, and this frame tells the node so.
    Refused(Vec<u8>),
}

/// Judges and rewrites a frame of the node; `allowed` says whether the node may reach an address of the machine's
/// network.
pub fn leave(frame: &mut [u8], mut allowed: impl FnMut(Ipv4Addr) -> bool) -> Verdict {
    let Some(packet) = Packet::of(frame) else { return Verdict::Dropped };
    if packet.source != SOURCE {
        return Verdict::Dropped;
    }
    let goes = if packet.destination == GATEWAY {
        packet.is_dns(frame)
    } else {
        allowed(packet.destination)
    };
    if !goes {
        return packet.refusal(frame).map_or(Verdict::Dropped, Verdict::Refused);
    }
    frame[..6].copy_from_slice(&MAC_PASST);
    packet.rewrite(frame, ETHERNET + 12, SOURCE, INSIDE);
    Verdict::Goes
}

/// Rewrites a frame of passt for the node; false: it is not for it.
pub fn arrive(frame: &mut [u8]) -> bool {
    let Some(packet) = Packet::of(frame) else { return false };
    if packet.destination != INSIDE {
        return false;
    }
    frame[..6].copy_from_slice(&MAC_NODE);
    packet.rewrite(frame, ETHERNET + 16, INSIDE, SOURCE);
    true
}

/// A whole IPv4 packet in a frame, whose header is there.
struct Packet {
    source: Ipv4Addr,
    destination: Ipv4Addr,
    protocol: u8,
    /// Where its payload begins in the frame.
    payload: usize,
}

impl Packet {
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

    /// Puts another address where one is, in the header and in what its checksums cover.
    fn rewrite(&self, frame: &mut [u8], at: usize, from: Ipv4Addr, to: Ipv4Addr) {
        frame[at..at + 4].copy_from_slice(&to.octets());
        update(frame, ETHERNET + 10, from, to);
        match self.protocol {
            TCP => update(frame, self.payload + 16, from, to),
            UDP if frame.get(self.payload + 6..self.payload + 8) != Some(&[0, 0]) => {
                update(frame, self.payload + 6, from, to);
            }
            _ => {}
        }
    }

    /// What tells the node that a packet may not go; nothing tells of an error (RFC 1122 section 3.2.2).
    fn refusal(&self, frame: &[u8]) -> Option<Vec<u8>> {
        const ICMP_HEADER: usize = 8;
        const ECHO: u8 = 8;
        if self.protocol == ICMP && frame.get(self.payload) != Some(&ECHO) {
            return None;
        }
        let quoted = &frame[ETHERNET..frame.len().min(self.payload + QUOTED)];
        let length = IPV4 + ICMP_HEADER + quoted.len();
        let mut reply = Vec::with_capacity(ETHERNET + length);
        reply.extend_from_slice(&MAC_NODE);
        reply.extend_from_slice(&MAC_PASST);
        reply.extend_from_slice(&IPV4_TYPE);
        let mut header = [0; IPV4];
        header[0] = 0x45;
        // At most 60 + 8 + 28 bytes.
        header[2..4].copy_from_slice(&(length as u16).to_be_bytes());
        header[8..10].copy_from_slice(&[64, ICMP]);
        header[12..16].copy_from_slice(&GATEWAY.octets());
        header[16..20].copy_from_slice(&SOURCE.octets());
        let sum = checksum(&header);
        header[10..12].copy_from_slice(&sum.to_be_bytes());
        reply.extend_from_slice(&header);
        let mut message = vec![UNREACHABLE, PROHIBITED, 0, 0, 0, 0, 0, 0];
        message.extend_from_slice(quoted);
        let sum = checksum(&message);
        message[2..4].copy_from_slice(&sum.to_be_bytes());
        reply.extend_from_slice(&message);
        Some(reply)
    }
}

/// Brings a checksum up to date that covers an address which was another (RFC 1624, equation 3).
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

    /// Whether all checksums of a frame are right, by somebody else's code.
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
            _ => true,
        };
        right && header.calc_header_checksum() == header.header_checksum
    }

    const THERE: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 9);

    #[test]
    fn only_what_is_allowed_goes_and_the_node_is_told() {
        let mut frame = tcp(SOURCE, THERE, b"hello");
        assert_eq!(leave(&mut frame, |to| to == THERE), Verdict::Goes);
        let Verdict::Refused(told) = leave(&mut tcp(SOURCE, THERE, b"hello"), |_| false) else {
            panic!("not refused");
        };
        assert!(sums_right(&told));
        assert_eq!(told[ETHERNET + IPV4..][..2], [UNREACHABLE, PROHIBITED]);
        assert_eq!(told[ETHERNET + 16..][..4], SOURCE.octets());
        assert_eq!(told[ETHERNET + IPV4 + 8..], tcp(SOURCE, THERE, b"hello")[ETHERNET..][..28]);
    }

    #[test]
    fn the_gateway_answers_names_and_nothing_else() {
        let ask = |frame: &mut [u8]| leave(frame, |_| panic!("it is none of the machine's"));
        assert_eq!(ask(&mut udp(SOURCE, GATEWAY, 53, b"?")), Verdict::Goes);
        assert!(matches!(ask(&mut udp(SOURCE, GATEWAY, 54, b"?")), Verdict::Refused(_)));
        assert!(matches!(ask(&mut tcp(SOURCE, GATEWAY, b"")), Verdict::Refused(_)));
    }

    #[test]
    fn fragments_others_addresses_and_other_protocols_go_nowhere() {
        let mut fragment = udp(SOURCE, THERE, 80, b"x");
        fragment[ETHERNET + 6] |= 0x20;
        let mut other = udp(SOURCE, THERE, 80, b"x");
        other[12..14].copy_from_slice(&[0x86, 0xdd]);
        let foreign = udp(Ipv4Addr::new(10, 0, 0, 1), THERE, 80, b"x");
        for mut frame in [fragment, other, foreign] {
            assert_eq!(leave(&mut frame, |_| true), Verdict::Dropped);
        }
        // Errors are answered by none.
        let mut error = Vec::new();
        let builder = PacketBuilder::ethernet2(MAC_NODE, [2; 6])
            .ipv4(SOURCE.octets(), THERE.octets(), 64)
            .icmpv4_raw(3, 1, [0; 4]);
        builder.write(&mut error, &[0; 28]).unwrap();
        assert_eq!(leave(&mut error, |_| false), Verdict::Dropped);
    }

    proptest! {
        #[test]
        fn addresses_change_there_and_back_with_their_checksums(
            payload in prop::collection::vec(any::<u8>(), 0..64), to: [u8; 4], by_tcp: bool,
        ) {
            let to = Ipv4Addr::from(to);
            prop_assume!(to != GATEWAY);
            let mut frame = if by_tcp {
                tcp(SOURCE, to, &payload)
            } else {
                udp(SOURCE, to, 80, &payload)
            };
            prop_assert_eq!(leave(&mut frame, |_| true), Verdict::Goes);
            prop_assert_eq!(&frame[ETHERNET + 12..][..4], INSIDE.octets());
            prop_assert!(sums_right(&frame));
            let mut back = if by_tcp {
                tcp(to, INSIDE, &payload)
            } else {
                udp(to, INSIDE, 80, &payload)
            };
            prop_assert!(arrive(&mut back));
            prop_assert_eq!(&back[ETHERNET + 16..][..4], SOURCE.octets());
            prop_assert!(sums_right(&back));
        }

        #[test]
        fn no_bytes_make_it_panic(mut bytes in prop::collection::vec(any::<u8>(), 0..96), cut: bool) {
            let mut like = tcp(SOURCE, GATEWAY, &[0; 8]);
            let length = bytes.len().min(like.len());
            if cut {
                like.truncate(length);
            } else {
                like[..length].iter_mut().zip(&bytes).for_each(|(to, noise)| *to ^= noise & 0x11);
            }
            for frame in [&mut bytes, &mut like] {
                leave(frame, |_| false);
                leave(frame, |_| true);
                arrive(frame);
            }
        }
    }
}
