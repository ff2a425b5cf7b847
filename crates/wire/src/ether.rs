//! Ethernet II headers (IEEE 802.3 clause 3, RFC 894).

/// Bytes of a header.
pub const HEADER_BYTES: usize = 14;

/// Types that this crate reads or writes.
pub mod kind {
    /// IPv4.
    pub const IPV4: u16 = 0x0800;
    /// ARP.
    pub const ARP: u16 = 0x0806;
    /// 802.1Q tag.
    pub const VLAN: u16 = 0x8100;
    /// 802.1ad outer tag.
    pub const QINQ: u16 = 0x88a8;
    /// IPv6.
    pub const IPV6: u16 = 0x86dd;
    /// Smallest type; below are lengths of LLC frames (IEEE 802.3 section 3.2.6).
    pub const MIN: u16 = 0x0600;
}

/// Ethernet header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EthernetHeader {
    /// Destination address.
    pub destination: [u8; 6],
    /// Source address.
    pub source: [u8; 6],
    /// Type of the payload, or a length below 1536.
    pub kind: u16,
}

impl EthernetHeader {
    /// Reads the header at the start of `frame`; `None` if it is too short.
    pub fn parse(frame: &[u8]) -> Option<Self> {
        let bytes = frame.first_chunk::<HEADER_BYTES>()?;
        let (destination, rest) = bytes.split_first_chunk::<6>()?;
        let (source, rest) = rest.split_first_chunk::<6>()?;
        let kind = u16::from_be_bytes(*rest.first_chunk::<2>()?);
        Some(Self { destination: *destination, source: *source, kind })
    }

    /// Returns the bytes on the wire.
    pub fn emit(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..6].copy_from_slice(&self.destination);
        bytes[6..12].copy_from_slice(&self.source);
        bytes[12..].copy_from_slice(&self.kind.to_be_bytes());
        bytes
    }
}

/// Returns the type and the offset of the payload behind up to
/// two VLAN tags. The type is 0 beyond the end.
#[inline]
pub fn payload(frame: &[u8]) -> (u16, usize) {
    let mut at = HEADER_BYTES;
    loop {
        let kind = frame.get(at - 2..at).map_or(0, |it| u16::from_be_bytes([it[0], it[1]]));
        if !matches!(kind, kind::VLAN | kind::QINQ) || at == HEADER_BYTES + 8 {
            return (kind, at);
        }
        at += 4;
    }
}

/// Returns the length of the payload without VLAN tags, which an MTU limits.
pub fn payload_len(frame: &[u8]) -> usize {
    frame.len().saturating_sub(payload(frame).1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn truncated_ethernet_headers_are_refused() {
        for length in 0..HEADER_BYTES {
            assert_eq!(EthernetHeader::parse(&[0; HEADER_BYTES][..length]), None);
        }
    }

    #[test]
    fn vlan_tags_do_not_count_as_payload() {
        let mut frame = [0; 100];
        assert_eq!(payload_len(&frame), 86);
        frame[12..14].copy_from_slice(&kind::QINQ.to_be_bytes());
        frame[16..18].copy_from_slice(&kind::VLAN.to_be_bytes());
        assert_eq!(payload_len(&frame), 78);
        assert_eq!(payload_len(&frame[..15]), 0);
    }

    proptest! {
        #[test]
        fn comes_back(bytes: [u8; HEADER_BYTES]) {
            prop_assert_eq!(EthernetHeader::parse(&bytes).unwrap().emit(), bytes);
        }
    }
}
