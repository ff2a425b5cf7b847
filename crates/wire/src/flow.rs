//! Flow classification: a hash of the bits that a flow's frames have in common.
//!
//! [`ip`] handles IPv4, IPv6 and plain Ethernet. [`bytes`] hashes the bits that a vnet defines, and
//! is independent of protocols. Hashes are the same on every machine and in every run.

use std::hash::Hasher;

use crate::ether;

const TCP: u8 = 6;
const UDP: u8 = 17;
const SCTP: u8 = 132;

/// Returns the hash of a frame's flow. Never panics.
///
/// For IPv4 and IPv6 behind up to two VLAN tags, it covers addresses, protocol and ports (TCP, UDP,
/// SCTP). Ports of fragments are excluded, so that all fragments of a packet have one flow. For
/// other frames, it covers addresses and type.
pub fn ip(frame: &[u8]) -> u32 {
    let mut hash = FlowHash::default();
    let (kind, at) = ether::payload(frame);
    let packet = frame.get(at..).unwrap_or_default();
    let ports = match kind {
        ether::kind::IPV4 if packet.len() >= 20 => {
            hash.write(&packet[12..20]);
            hash.write(&packet[9..10]);
            let whole = u16::from_be_bytes([packet[6], packet[7]]) & 0x3fff == 0;
            (whole && has_ports(packet[9])).then_some(usize::from(packet[0] & 0xf) * 4)
        }
        ether::kind::IPV6 if packet.len() >= 40 => {
            hash.write(&packet[8..40]);
            hash.write(&packet[6..7]);
            has_ports(packet[6]).then_some(40)
        }
        _ => {
            hash.write(frame.get(..ether::HEADER_BYTES).unwrap_or(frame));
            None
        }
    };
    if let Some(ports) = ports.and_then(|at| packet.get(at..at + 4)) {
        hash.write(ports);
    }
    hash.of_flow()
}

/// Returns the hash of the bytes of `frame` under the masks at
/// their offsets; bytes beyond the end are zero.
pub fn bytes<'a>(frame: &[u8], fields: impl IntoIterator<Item = (u16, &'a [u8])>) -> u32 {
    let mut hash = FlowHash::default();
    for (offset, mask) in fields {
        let field = frame.get(usize::from(offset)..).unwrap_or_default();
        for (at, masks) in mask.chunks(8).enumerate() {
            let mut masked = [0; 8];
            for (index, mask) in masks.iter().enumerate() {
                masked[index] = field.get(at * 8 + index).copied().unwrap_or(0) & mask;
            }
            hash.write(&masked);
        }
    }
    hash.of_flow()
}

pub(crate) fn has_ports(protocol: u8) -> bool {
    matches!(protocol, TCP | UDP | SCTP)
}

/// Multiply-and-fold hash, eight bytes per step. It does not resist deliberate collisions: nobody
/// gains by causing them in configured data.
#[derive(Clone, Copy, Debug, Default)]
pub struct FlowHash(u64);

impl Hasher for FlowHash {
    #[inline]
    fn write(&mut self, bytes: &[u8]) {
        let (words, rest) = bytes.as_chunks::<8>();
        for word in words {
            self.write_u64(u64::from_le_bytes(*word));
        }
        if !rest.is_empty() {
            let mut last = [0; 8];
            last[..rest.len()].copy_from_slice(rest);
            self.write_u64(u64::from_le_bytes(last));
        }
    }

    #[inline]
    fn write_u64(&mut self, word: u64) {
        // 2^64 divided by the golden ratio, odd: spreads every bit over the product.
        let product = u128::from(self.0.rotate_left(23) ^ word ^ 0x9e37_79b9_7f4a_7c15)
            * 0xa076_1d64_78bd_642f_u128;
        self.0 = (product >> 64) as u64 ^ product as u64;
    }

    #[inline]
    fn finish(&self) -> u64 {
        self.0
    }
}

impl FlowHash {
    fn of_flow(mut self) -> u32 {
        self.write_u64(0);
        (self.0 >> 32) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use etherparse::PacketBuilder;
    use proptest::prelude::*;

    fn udp(source: [u8; 4], port: u16, payload: &[u8]) -> Vec<u8> {
        let mut frame = Vec::new();
        PacketBuilder::ethernet2([1; 6], [2; 6])
            .ipv4(source, [10, 0, 0, 1], 64)
            .udp(port, 53)
            .write(&mut frame, payload)
            .unwrap();
        frame
    }

    #[test]
    fn fragments_of_a_packet_are_one_flow() {
        let mut first = udp([10, 0, 0, 2], 7, b"abc");
        let mut second = udp([10, 0, 0, 2], 8, b"def");
        assert_ne!(ip(&first), ip(&second));
        first[20] = 0x20;
        second[21] = 9;
        assert_eq!(ip(&first), ip(&second));
    }

    #[test]
    fn flow_hash_sees_behind_vlan_tags() {
        let plain = udp([10, 0, 0, 2], 7, b"abc");
        let mut tagged = plain.clone();
        tagged.splice(12..12, [0x81, 0, 0, 5]);
        assert_eq!(ip(&plain), ip(&tagged));
    }

    #[test]
    fn flow_hash_spreads_flows() {
        let mut counts = [0u32; 16];
        for port in 0..16384 {
            counts[ip(&udp([10, 0, 0, 2], port, b"")) as usize % 16] += 1;
        }
        assert!(counts.iter().all(|count| (900..1150).contains(count)), "{counts:?}");
    }

    proptest! {
        #[test]
        fn flow_hash_ignores_fields_outside_the_key(
            source: [u8; 4], port: u16, one: Vec<u8>, other: Vec<u8>, ttl: u8,
        ) {
            let mut changed = udp(source, port, &other);
            changed[..12].fill(9);
            changed[22] = ttl;
            prop_assert_eq!(ip(&udp(source, port, &one)), ip(&changed));
        }

        #[test]
        fn flow_hash_uses_only_masked_bits(
            frame: Vec<u8>, offset in 0u16..80, mask in prop::collection::vec(any::<u8>(), 1..20),
            noise: Vec<u8>,
        ) {
            let key = |frame: &[u8]| bytes(frame, [(offset, &mask[..])]);
            let mut changed = frame.clone();
            for (at, byte) in changed.iter_mut().enumerate() {
                let under = at.checked_sub(offset.into()).and_then(|at| mask.get(at)).unwrap_or(&0);
                *byte ^= noise.get(at).unwrap_or(&0) & !under;
            }
            prop_assert_eq!(key(&frame), key(&changed));
            let mut longer = frame.clone();
            longer.resize(frame.len() + 30, 0);
            prop_assert_eq!(key(&frame), key(&longer));
        }

        #[test]
        fn noise_never_panics(frame: Vec<u8>) {
            ip(&frame);
        }
    }
}
