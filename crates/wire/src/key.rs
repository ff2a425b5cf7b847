//! Match key of fast path filters: the bits of a packet that filters compare.
//!
//! | bytes of IPv4 | of IPv6 | what |
//! |---|---|---|
//! | 0–3 | 0–15 | source |
//! | 4–7 | 16–31 | destination |
//! | 8–9 | 32–33 | source port: of TCP, UDP, SCTP; 0 of others, and of fragments |
//! | 10–11 | 34–35 | destination port, in the same way |
//! | 12 | 36 | protocol; of IPv6 that of the first header behind the fixed one, extension or not |
//! | 13 | 37 | traffic class: DSCP in the upper six bits |
//! | 14–15 | 38–39 | ingress vport |
//!
//! Words have eight bytes, big-endian.

use crate::ether;
use crate::flow::has_ports;

/// Words of an IPv4 packet's key.
pub const V4_WORDS: usize = 2;

/// Words of an IPv6 packet's key.
pub const V6_WORDS: usize = 5;

/// Returns the key of a frame with an IPv4 packet, whose header is whole, that arrived on `vport`.
#[inline]
pub fn v4(frame: &[u8], vport: u16) -> [u64; V4_WORDS] {
    let packet = frame.get(ether::HEADER_BYTES..).unwrap_or_default();
    let Some(header) = packet.first_chunk::<20>() else { return [0; V4_WORDS] };
    let whole = u16::from_be_bytes([header[6], header[7]]) & 0x3fff == 0;
    let at = usize::from(header[0] & 0xf) * 4;
    let ports = ports(packet, header[9], whole.then_some(at));
    let [.., s0, s1, s2, s3, d0, d1, d2, d3] = *header;
    let rest = u64::from(header[9]) << 24 | u64::from(header[1]) << 16 | u64::from(vport);
    [u64::from_be_bytes([s0, s1, s2, s3, d0, d1, d2, d3]), ports << 32 | rest]
}

/// Returns the key of a frame with an IPv6 packet, whose
/// fixed header is whole, that arrived on `vport`.
#[inline]
pub fn v6(frame: &[u8], vport: u16) -> [u64; V6_WORDS] {
    let packet = frame.get(ether::HEADER_BYTES..).unwrap_or_default();
    let Some(header) = packet.first_chunk::<40>() else { return [0; V6_WORDS] };
    let class = header[0] << 4 | header[1] >> 4;
    let ports = ports(packet, header[6], Some(header.len()));
    let word =
        |at: usize| header[8 + 8 * at..].first_chunk().map_or(0, |word| u64::from_be_bytes(*word));
    let rest = u64::from(header[6]) << 24 | u64::from(class) << 16 | u64::from(vport);
    [word(0), word(1), word(2), word(3), ports << 32 | rest]
}

/// Returns both ports of a protocol whose header is at
/// `at`, the source port first; 0 if it has none.
#[inline]
fn ports(packet: &[u8], protocol: u8, at: Option<usize>) -> u64 {
    let header = at.filter(|_| has_ports(protocol)).and_then(|at| packet.get(at..));
    header.and_then(|it| it.first_chunk()).map_or(0, |ports| u32::from_be_bytes(*ports).into())
}

#[cfg(test)]
mod tests {
    use etherparse::PacketBuilder;
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn filter_keys_match_packet_fields(
            (source, destination) in any::<([u8; 4], [u8; 4])>(),
            (source6, destination6) in any::<([u8; 16], [u8; 16])>(),
            (from, to, vport) in any::<(u16, u16, u16)>(),
        ) {
            let rest = |protocol: u8, ports: (u16, u16)| {
                let vport = u64::from(vport);
                u64::from(ports.0) << 48 | u64::from(ports.1) << 32 | u64::from(protocol) << 24 | vport
            };
            let addresses = u64::from_be_bytes([source, destination].concat().try_into().unwrap());
            let mut frame = vec![];
            let packet = PacketBuilder::ethernet2([1; 6], [2; 6]).ipv4(source, destination, 9);
            packet.udp(from, to).write(&mut frame, &[]).unwrap();
            prop_assert_eq!(v4(&frame, vport), [addresses, rest(17, (from, to))]);
            // A fragment, and a protocol without ports.
            frame[20] = 0x20;
            prop_assert_eq!(v4(&frame, vport), [addresses, rest(17, (0, 0))]);
            (frame[20], frame[23], frame[15]) = (0, 1, 0xb8);
            prop_assert_eq!(v4(&frame, vport), [addresses, rest(1, (0, 0)) | 0xb8_0000]);
            let mut frame = vec![];
            let packet = PacketBuilder::ethernet2([1; 6], [2; 6]).ipv6(source6, destination6, 9);
            packet.tcp(from, to, 0, 0).write(&mut frame, &[]).unwrap();
            let words = v6(&frame, vport);
            let bytes: Vec<u8> = words[..4].iter().flat_map(|word| word.to_be_bytes()).collect();
            prop_assert_eq!(&bytes[..16], source6);
            prop_assert_eq!(&bytes[16..], destination6);
            prop_assert_eq!(words[4], rest(6, (from, to)));
            (frame[14], frame[15]) = (0x6b, 0x80);
            prop_assert_eq!(v6(&frame, vport)[4], rest(6, (from, to)) | 0xb8_0000);
        }

        #[test]
        fn filter_keys_accept_frames_of_any_length(frame in proptest::collection::vec(any::<u8>(), 0..100)) {
            _ = (v4(&frame, 1), v6(&frame, 1));
        }
    }
}
