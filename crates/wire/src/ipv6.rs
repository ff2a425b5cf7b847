//! IPv6 headers as a router sees them (RFC 8200).

/// Bytes of the fixed header.
pub const HEADER_BYTES: usize = 40;

/// Next header: hop-by-hop options, which routers may have to process.
pub const HOP_BY_HOP: u8 = 0;

/// Next header: options for the destination.
pub const DESTINATION_OPTIONS: u8 = 60;

/// Next header: a fragment.
pub const FRAGMENT: u8 = 44;

/// Next header: ICMPv6.
pub const ICMPV6: u8 = 58;

/// Fields of an IPv6 packet that forwarding uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ipv6Packet {
    /// Bytes of the packet, header included; within the given bytes.
    pub packet_bytes: usize,
    /// Type of the payload.
    pub next_header: u8,
    /// Hop limit.
    pub hop_limit: u8,
    /// Source address.
    pub source: u128,
    /// Destination address.
    pub destination: u128,
}

impl Ipv6Packet {
    /// Reads the header of the packet at the start of `bytes`, which may be longer (Ethernet
    /// padding). `None` if they hold no whole IPv6 packet.
    #[inline]
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let fixed = bytes.first_chunk::<HEADER_BYTES>()?;
        let packet_bytes = HEADER_BYTES + usize::from(u16::from_be_bytes([fixed[4], fixed[5]]));
        if fixed[0] >> 4 != 6 || packet_bytes > bytes.len() {
            return None;
        }
        let address = |at: usize| {
            let mut octets = [0; 16];
            octets.copy_from_slice(&fixed[at..at + 16]);
            u128::from_be_bytes(octets)
        };
        Some(Self {
            packet_bytes,
            next_header: fixed[6],
            hop_limit: fixed[7],
            source: address(8),
            destination: address(24),
        })
    }
}

/// Length of the options that [`skip_options`] skips.
pub const OPTIONS_BYTES: usize = 8;

/// Checks that the destination options at the start of `bytes` can be skipped, like the tunnel
/// encapsulation limit (RFC 2473 section 4.1.1) that Linux's ip6gretap writes. Returns `None` if an
/// option must be understood, or if they are not [`OPTIONS_BYTES`] long.
pub fn skip_options(bytes: &[u8]) -> Option<()> {
    let [_, 0, options @ ..] = bytes.first_chunk::<OPTIONS_BYTES>()? else { return None };
    let mut rest = &options[..];
    while let [kind, after @ ..] = rest {
        rest = match (kind, after) {
            (0, _) => after, // Pad1
            // The two highest bits define the treatment of an
            // unknown option (RFC 8200 section 4.2).
            (kind, [length, value @ ..]) if kind >> 6 == 0 => value.get(usize::from(*length)..)?,
            _ => return None,
        };
    }
    Some(())
}

/// Decrements the hop limit, which must not be 0. Does nothing to fewer than 40 bytes.
#[inline]
pub fn decrement_hop_limit(packet: &mut [u8]) {
    if let Some(header) = packet.first_chunk_mut::<HEADER_BYTES>() {
        header[7] = header[7].wrapping_sub(1);
    }
}

/// True if a packet is neighbour or router discovery (RFC 4861: ICMPv6 types 133 to 137).
#[inline]
pub fn is_discovery(packet: &[u8], header: &Ipv6Packet) -> bool {
    header.next_header == ICMPV6
        && header.packet_bytes > HEADER_BYTES
        && packet.get(HEADER_BYTES).is_some_and(|kind| (133..=137).contains(kind))
}

#[cfg(test)]
mod tests {
    use super::*;
    use etherparse::Ipv6Header;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn ip_parser_reads_etherparse_headers_untruncated(
            source: [u8; 16], destination: [u8; 16], hop_limit: u8, next_header: u8,
            payload in 0u16..100, padding in 0usize..50,
        ) {
            let written = Ipv6Header {
                payload_length: payload,
                next_header: next_header.into(),
                hop_limit,
                source,
                destination,
                ..Default::default()
            };
            let mut bytes = written.to_bytes().to_vec();
            let packet_bytes = 40 + usize::from(payload);
            bytes.resize(packet_bytes + padding, 0);
            let want = Ipv6Packet {
                packet_bytes,
                next_header,
                hop_limit,
                source: u128::from_be_bytes(source),
                destination: u128::from_be_bytes(destination),
            };
            prop_assert_eq!(Ipv6Packet::parse(&bytes), Some(want));
            for length in 0..packet_bytes {
                prop_assert_eq!(Ipv6Packet::parse(&bytes[..length]), None);
            }
            if hop_limit > 0 {
                decrement_hop_limit(&mut bytes);
                let want = Ipv6Packet { hop_limit: hop_limit - 1, ..want };
                prop_assert_eq!(Ipv6Packet::parse(&bytes), Some(want));
            }
        }

        #[test]
        fn noise_never_panics(mut bytes: Vec<u8>) {
            if let Some(header) = Ipv6Packet::parse(&bytes) {
                is_discovery(&bytes, &header);
            }
            decrement_hop_limit(&mut bytes);
        }
    }

    #[test]
    fn nd_detection_needs_an_nd_type() {
        let mut bytes = [0; 41];
        bytes[0] = 0x60;
        bytes[6] = ICMPV6;
        for (length, kind, want) in [
            (1, 135, true),
            (1, 133, true),
            (1, 137, true),
            (1, 128, false),
            (1, 138, false),
            (0, 135, false),
        ] {
            (bytes[5], bytes[40]) = (length, kind);
            let header = Ipv6Packet::parse(&bytes).unwrap();
            assert_eq!(is_discovery(&bytes, &header), want, "{length} {kind}");
        }
    }
}
