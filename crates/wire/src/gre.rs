//! Ethernet over GRE (RFC 2784, RFC 2890; the Trellis paper's EGRE),
//! compatible with Linux's gretap and ip6gretap.
//!
//! Key, checksum and sequence number are present as configured. A frame with a key never belongs to
//! a tunnel without one, and vice versa.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::tunnel_kind::{self, Fix, NotATunnel, Take, TunnelKey, TunnelKind};

/// Properties of the kind. A tunnel without a key is not in the range.
pub const KIND: TunnelKind = TunnelKind { name: "gre", key: "key", keys: 0..=u32::MAX, port: None };

/// Protocol number of GRE in IP headers.
pub const PROTOCOL: u8 = 47;

/// Type of an Ethernet frame behind the header.
pub const ETHERNET: u16 = 0x6558;

/// Bytes of the longest header: with checksum, key and sequence number.
pub const HEADER_BYTES_MAX: usize = 16;

const CHECKSUM: u16 = 0x8000;
const KEY: u16 = 0x2000;
const SEQUENCE: u16 = 0x1000;

/// Routing, strict source route and recursion of RFC 1701, which
/// RFC 2784 section 2.2 removed; and the version.
const REFUSED: u16 = 0x4000 | 0x0c00 | 0x0007;

/// A GRE tunnel.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct GreTunnel {
    /// Outer address of this side.
    pub local: IpAddr,
    /// Outer address of the other side.
    pub remote: IpAddr,
    /// Key that distinguishes tunnels between the same addresses; one of them may have none.
    pub key: Option<u32>,
    /// True if all frames have a checksum.
    pub checksum: bool,
    /// True if all frames have a sequence number, and late ones are dropped.
    pub sequence: bool,
}

impl GreTunnel {
    /// Returns the tunnel as seen from its other end.
    pub(crate) fn reversed(&self) -> Self {
        let (local, remote) = (self.remote, self.local);
        Self { local, remote, ..*self }
    }
}

impl tunnel_kind::Tunnel for GreTunnel {
    fn kind(&self) -> &'static TunnelKind {
        &KIND
    }

    fn ends(&self) -> Option<(IpAddr, IpAddr)> {
        Some((self.local, self.remote))
    }

    fn number(&self) -> Option<u32> {
        self.key
    }

    fn key(&self) -> u64 {
        TunnelKey::gre(self.key)
    }

    fn takes(&self) -> Take {
        Take::Gre { local: self.local }
    }

    fn header(&self) -> tunnel_kind::TunnelHeader {
        let key = self.key.map(u32::to_be_bytes);
        let parts: [(bool, u16, [u8; 4]); 3] = [
            (self.checksum, CHECKSUM, [0; 4]),
            (key.is_some(), KEY, key.unwrap_or_default()),
            (self.sequence, SEQUENCE, [0; 4]),
        ];
        let parts = parts.iter().filter(|(is_there, ..)| *is_there);
        let flags = parts.clone().fold(0, |flags, (_, flag, _)| flags | flag);
        let mut bytes = [flags.to_be_bytes(), ETHERNET.to_be_bytes()].concat();
        parts.for_each(|(_, _, part)| bytes.extend(part));
        tunnel_kind::TunnelHeader { protocol: PROTOCOL, bytes, fix: Fix::Gre }
    }

    fn key_text(&self) -> String {
        self.key.map_or("without key".into(), |key| format!("key {key}"))
    }
}

/// GRE header before an Ethernet frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GreHeader {
    /// True if it has a checksum.
    pub has_checksum: bool,
    /// Key, if it has one.
    pub key: Option<u32>,
    /// Sequence number, if it has one.
    pub sequence: Option<u32>,
    /// Bytes of the header.
    pub bytes: usize,
}

impl GreHeader {
    /// Reads the header at the start of `packet`. Ignores the bits that RFC
    /// 2784 reserves and tells receivers to ignore.
    pub fn parse(packet: &[u8]) -> Result<Self, NotATunnel> {
        let &[a, b, c, d] = packet.first_chunk().ok_or(NotATunnel::Malformed)?;
        let flags = u16::from_be_bytes([a, b]);
        if u16::from_be_bytes([c, d]) != ETHERNET {
            return Err(NotATunnel::Other);
        }
        if flags & REFUSED != 0 {
            return Err(NotATunnel::GreHeader);
        }
        let mut bytes = 4;
        let mut part = |flag| {
            let at = bytes;
            bytes += if flags & flag == 0 { 0 } else { 4 };
            let word = packet.get(at..bytes).ok_or(NotATunnel::Malformed)?;
            Ok(word.first_chunk().map(|word| u32::from_be_bytes(*word)))
        };
        let (checksum, key, sequence) = (part(CHECKSUM)?, part(KEY)?, part(SEQUENCE)?);
        Ok(Self { has_checksum: checksum.is_some(), key, sequence, bytes })
    }
}

/// Returns the offsets of checksum and sequence number in a header with these first bytes.
pub(crate) fn places(header: &[u8]) -> (Option<usize>, Option<usize>) {
    let flags = header.first_chunk().map_or(0, |flags| u16::from_be_bytes(*flags));
    let has = |flag| usize::from(flags & flag != 0);
    let sequence = 4 + 4 * has(CHECKSUM) + 4 * has(KEY);
    ((has(CHECKSUM) > 0).then_some(4), (has(SEQUENCE) > 0).then_some(sequence))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tunnel_kind::Tunnel as _;
    use proptest::prelude::*;

    fn tunnel(key: Option<u32>, checksum: bool, sequence: bool) -> GreTunnel {
        let (local, remote) = ([192, 0, 2, 1].into(), [192, 0, 2, 2].into());
        GreTunnel { local, remote, key, checksum, sequence }
    }

    #[test]
    fn gre_headers_match_the_rfcs() {
        let header = |key, checksum, sequence| tunnel(key, checksum, sequence).header().bytes;
        assert_eq!(header(None, false, false), [0, 0, 0x65, 0x58]);
        assert_eq!(header(Some(7), false, false), [0x20, 0, 0x65, 0x58, 0, 0, 0, 7]);
        let all = header(Some(7), true, true);
        assert_eq!(all, [0xb0, 0, 0x65, 0x58, 0, 0, 0, 0, 0, 0, 0, 7, 0, 0, 0, 0]);
        assert_eq!(all.len(), HEADER_BYTES_MAX);
        assert_eq!(places(&all), (Some(4), Some(12)));
        assert_eq!(places(&header(None, false, true)), (None, Some(4)));
    }

    #[test]
    fn gre_parser_refuses_unsupported_headers() {
        let with = |at: usize, bits: u8| {
            let mut bytes = tunnel(Some(7), false, false).header().bytes;
            bytes[at] |= bits;
            GreHeader::parse(&bytes).map(|header| header.key)
        };
        assert_eq!(with(0, 0), Ok(Some(7)));
        for (at, bits) in [(0, 0x40), (0, 0x08), (0, 0x04), (1, 1), (1, 2), (1, 4)] {
            assert_eq!(with(at, bits), Err(NotATunnel::GreHeader), "{at} {bits:#x}");
        }
        // Reserved, and to be ignored.
        for (at, bits) in [(0, 0x03), (1, 0xf8)] {
            assert_eq!(with(at, bits), Ok(Some(7)), "{at} {bits:#x}");
        }
        assert_eq!(with(3, 1), Err(NotATunnel::Other));
        // A checksum or a sequence number beyond the end.
        assert_eq!(with(0, 0x80), Err(NotATunnel::Malformed));
        assert_eq!(with(0, 0x10), Err(NotATunnel::Malformed));
    }

    proptest! {
        #[test]
        fn gre_headers_round_trip_and_refuse_truncation(key: Option<u32>, checksum: bool, sequence: bool) {
            let bytes = tunnel(key, checksum, sequence).header().bytes;
            let header = GreHeader::parse(&bytes).unwrap();
            prop_assert_eq!((header.key, header.has_checksum), (key, checksum));
            prop_assert_eq!((header.sequence.is_some(), header.bytes), (sequence, bytes.len()));
            for length in 0..bytes.len() {
                prop_assert!(GreHeader::parse(&bytes[..length]).is_err());
            }
        }

        #[test]
        fn noise_never_panics(bytes: Vec<u8>) {
            let _ = (GreHeader::parse(&bytes), places(&bytes));
        }
    }
}
