//! IPv4 headers as a router sees them (RFC 791, RFC 1812 section 5.2.2).

use crate::checksum;

/// Bytes of a header without options.
pub const HEADER_BYTES: usize = 20;

/// Fields of an IPv4 packet that forwarding uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ipv4Packet {
    /// Bytes of the header, 20..=60.
    pub header_bytes: usize,
    /// Bytes of the packet, header included; within the given bytes.
    pub packet_bytes: usize,
    /// True if it is a fragment.
    pub is_fragment: bool,
    /// Time to live.
    pub ttl: u8,
    /// Protocol of the payload.
    pub protocol: u8,
    /// Source address.
    pub source: u32,
    /// Destination address.
    pub destination: u32,
}

impl Ipv4Packet {
    /// Reads the header of the packet at the start of `bytes`, which may be longer (Ethernet
    /// padding). `None` if RFC 1812 section 5.2.2 requires discarding the packet: too short, not
    /// version 4, invalid lengths, wrong checksum.
    #[inline]
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        Self::read(bytes).filter(|header| header.checksum_ok(bytes))
    }

    /// Like [`Ipv4Packet::parse`], without checking the checksum.
    #[inline]
    pub fn read(bytes: &[u8]) -> Option<Self> {
        let fixed = bytes.first_chunk::<HEADER_BYTES>()?;
        let header_bytes = usize::from(fixed[0] & 0xf) * 4;
        let packet_bytes = usize::from(u16::from_be_bytes([fixed[2], fixed[3]]));
        if fixed[0] >> 4 != 4
            || header_bytes < HEADER_BYTES
            || packet_bytes < header_bytes
            || packet_bytes > bytes.len()
        {
            return None;
        }
        Some(Self {
            header_bytes,
            packet_bytes,
            is_fragment: u16::from_be_bytes([fixed[6], fixed[7]]) & 0x3fff != 0,
            ttl: fixed[8],
            protocol: fixed[9],
            source: u32::from_be_bytes([fixed[12], fixed[13], fixed[14], fixed[15]]),
            destination: u32::from_be_bytes([fixed[16], fixed[17], fixed[18], fixed[19]]),
        })
    }

    /// True if the checksum of `bytes` is right; `bytes` must be those that were read.
    #[inline]
    pub fn checksum_ok(&self, bytes: &[u8]) -> bool {
        // Most headers have no options. A length known to the compiler is summed faster.
        match bytes.first_chunk::<HEADER_BYTES>() {
            Some(fixed) if self.header_bytes == HEADER_BYTES => checksum::checksum(fixed) == 0,
            _ => bytes.get(..self.header_bytes).is_some_and(|all| checksum::checksum(all) == 0),
        }
    }

    /// True if there are options.
    pub fn has_options(&self) -> bool {
        self.header_bytes > HEADER_BYTES
    }
}

/// True if routers must not fragment the packet (DF), or if it is too short to tell.
pub fn must_not_be_fragmented(packet: &[u8]) -> bool {
    packet.get(6).is_none_or(|flags| flags & 0x40 != 0)
}

/// Decrements the time to live, which must not be 0, and updates the checksum incrementally (RFC
/// 1624, equation 3, for this one change: RFC 1141 section 2). Does nothing to fewer than 20 bytes.
#[inline]
pub fn decrement_ttl(packet: &mut [u8]) {
    let Some(header) = packet.first_chunk_mut::<HEADER_BYTES>() else { return };
    header[8] = header[8].wrapping_sub(1);
    // The word sum decreases by 0x0100, so its complement increases by that, with end-around carry.
    let sum = u32::from(u16::from_be_bytes([header[10], header[11]])) + 0x0100;
    [header[10], header[11]] = ((sum + u32::from(sum >= 0xffff)) as u16).to_be_bytes();
}

#[cfg(test)]
mod tests {
    use super::*;
    use etherparse::{Ipv4Header, Ipv4Options};
    use proptest::prelude::*;

    fn header(
        (source, destination, ttl, protocol): ([u8; 4], [u8; 4], u8, u8),
        (dscp, identification): (u8, u16),
        options: &[u8],
        payload: u16,
    ) -> Ipv4Header {
        let mut header =
            Ipv4Header::new(payload, ttl, protocol.into(), source, destination).unwrap();
        header.dscp = (dscp & 63).try_into().unwrap();
        header.identification = identification;
        header.options = Ipv4Options::try_from(options).unwrap();
        header.set_payload_len(payload.into()).unwrap();
        header.header_checksum = header.calc_header_checksum();
        header
    }

    proptest! {
        #[test]
        fn ip_parser_reads_etherparse_headers_untruncated(
            fixed: ([u8; 4], [u8; 4], u8, u8), more: (u8, u16), words in 0usize..=10, padding in 0usize..50,
        ) {
            let written = header(fixed, more, &vec![1; words * 4], 8);
            let mut bytes = written.to_bytes().to_vec();
            bytes.resize(bytes.len() + 8, 0xaa);
            let packet_bytes = bytes.len();
            bytes.resize(packet_bytes + padding, 0);
            let want = Ipv4Packet {
                header_bytes: 20 + words * 4,
                packet_bytes,
                is_fragment: false,
                ttl: fixed.2,
                protocol: fixed.3,
                source: u32::from_be_bytes(fixed.0),
                destination: u32::from_be_bytes(fixed.1),
            };
            prop_assert_eq!(Ipv4Packet::parse(&bytes), Some(want));
            for length in 0..packet_bytes {
                prop_assert_eq!(Ipv4Packet::parse(&bytes[..length]), None);
            }
        }

        #[test]
        fn a_flipped_bit_in_the_header_is_refused(
            fixed: ([u8; 4], [u8; 4], u8, u8), more: (u8, u16), bit in 0usize..160,
        ) {
            let mut bytes = header(fixed, more, &[], 0).to_bytes().to_vec();
            bytes[bit / 8] ^= 0x80 >> (bit % 8);
            prop_assert_eq!(Ipv4Packet::parse(&bytes), None);
        }

        #[test]
        fn incremental_checksum_matches_the_full_one(
            fixed: ([u8; 4], [u8; 4], u8, u8), more: (u8, u16),
        ) {
            let mut written = header(fixed, more, &[], 0);
            written.time_to_live = written.time_to_live.max(1);
            written.header_checksum = written.calc_header_checksum();
            let mut bytes = written.to_bytes().to_vec();
            decrement_ttl(&mut bytes);
            written.time_to_live -= 1;
            written.header_checksum = written.calc_header_checksum();
            prop_assert_eq!(&bytes[..], &written.to_bytes()[..]);
        }

        #[test]
        fn noise_never_panics(mut bytes: Vec<u8>) {
            Ipv4Packet::parse(&bytes);
            decrement_ttl(&mut bytes);
        }
    }

    /// Case in which RFC 1141's equation fails (RFC 1624 section 4): the
    /// checksum must become zero, not minus zero.
    #[test]
    fn ttl_decrement_yields_a_zero_checksum() {
        for ttl in 1..=255u8 {
            let mut bytes = [0; 20];
            bytes[0] = 0x45;
            bytes[8] = ttl - 1;
            let missing = checksum::checksum(&bytes);
            bytes[4..6].copy_from_slice(&missing.to_be_bytes());
            assert_eq!(checksum::checksum(&bytes), 0);
            let want = bytes;
            bytes[8] = ttl;
            let before = checksum::checksum(&bytes);
            bytes[10..12].copy_from_slice(&before.to_be_bytes());
            decrement_ttl(&mut bytes);
            assert_eq!(bytes, want, "ttl {ttl}");
        }
    }
}
