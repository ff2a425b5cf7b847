//! Geneve: an Ethernet frame behind a header with options in UDP (RFC 8926).
//!
//! No option is supported. Optional ones are ignored. Frames with critical options are refused
//! (section 3.5), and so are control frames for the tunnel's ends (the O bit).

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::tunnel_kind::{self, Fix, Take, TunnelHeader, TunnelKey, TunnelKind};
use crate::{gre, udp, vxlan};

/// Properties of the kind.
pub const KIND: TunnelKind =
    TunnelKind { name: "geneve", key: "vni", keys: 0..=vxlan::VNI_END - 1, port: Some(PORT) };

/// UDP destination port (RFC 8926 section 3.3).
pub const PORT: u16 = 6081;

/// Bytes of a header without options.
pub const HEADER_BYTES: usize = 8;

/// Low bits of the first byte: length of the options, in words of four bytes.
const OPTION_WORDS: u8 = 0x3f;

/// High bits of the second byte: control frame, and critical options.
const CONTROL: u8 = 0x80;
const CRITICAL: u8 = 0x40;

/// A Geneve tunnel.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct GeneveTunnel {
    /// Outer address of this side.
    pub local: IpAddr,
    /// Outer address of the other side.
    pub remote: IpAddr,
    /// UDP destination port, usually [`PORT`].
    pub port: u16,
    /// Network identifier, 24 bits.
    pub vni: u32,
}

impl GeneveTunnel {
    /// Returns the tunnel as seen from its other end.
    pub(crate) fn reversed(&self) -> Self {
        let (local, remote) = (self.remote, self.local);
        Self { local, remote, ..*self }
    }
}

impl tunnel_kind::Tunnel for GeneveTunnel {
    fn kind(&self) -> &'static TunnelKind {
        &KIND
    }

    fn ends(&self) -> Option<(IpAddr, IpAddr)> {
        Some((self.local, self.remote))
    }

    fn number(&self) -> Option<u32> {
        Some(self.vni)
    }

    fn key(&self) -> u64 {
        TunnelKey::vni(self.port, self.vni)
    }

    fn takes(&self) -> Take {
        Take::Udp { local: self.local, port: self.port }
    }

    fn header(&self) -> TunnelHeader {
        let bytes = [udp::ports(udp::SPREAD_FIRST, self.port), emit(self.vni)].concat();
        TunnelHeader { protocol: udp::PROTOCOL, bytes, fix: Fix::Udp { spread: true } }
    }

    fn key_text(&self) -> String {
        format!("vni {} port {}", self.vni, self.port)
    }
}

/// Reason why a header is not followed by a frame to accept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GeneveError {
    /// Unknown version, options beyond the end, or no Ethernet frame.
    Header,
    /// Control frame for the tunnel's ends.
    Control,
    /// Critical options, which must be understood.
    Critical,
}

/// Returns the length of the header at the start of `bytes`, options
/// included. Ignores reserved bits, as the RFC requires.
pub fn parse(bytes: &[u8]) -> Result<usize, GeneveError> {
    let &[first, flags, a, b, ..] =
        bytes.first_chunk::<HEADER_BYTES>().ok_or(GeneveError::Header)?;
    let length = HEADER_BYTES + 4 * usize::from(first & OPTION_WORDS);
    if first & !OPTION_WORDS != 0
        || length > bytes.len()
        || u16::from_be_bytes([a, b]) != gre::ETHERNET
    {
        return Err(GeneveError::Header);
    }
    match flags {
        _ if flags & CONTROL != 0 => Err(GeneveError::Control),
        _ if flags & CRITICAL != 0 => Err(GeneveError::Critical),
        _ => Ok(length),
    }
}

/// Returns the header for the low 24 bits of `vni`, without options.
pub fn emit(vni: u32) -> [u8; HEADER_BYTES] {
    let ([_, high, middle, low], [a, b]) = (vni.to_be_bytes(), gre::ETHERNET.to_be_bytes());
    [0, 0, a, b, high, middle, low, 0]
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn vector() {
        let header = emit(0x12_3456);
        assert_eq!(header, [0, 0, 0x65, 0x58, 0x12, 0x34, 0x56, 0]);
        assert_eq!(vxlan::vni(&header), 0x12_3456);
        let with = |at: usize, bits: u8| {
            let mut bytes = [&header[..], &[0; 8]].concat();
            bytes[at] ^= bits;
            parse(&bytes)
        };
        assert_eq!(with(0, 0), Ok(8));
        assert_eq!(with(0, 2), Ok(16));
        assert_eq!(with(0, 3), Err(GeneveError::Header));
        assert_eq!(with(0, 0x40), Err(GeneveError::Header));
        assert_eq!(with(0, 0x80), Err(GeneveError::Header));
        assert_eq!(with(1, CONTROL), Err(GeneveError::Control));
        assert_eq!(with(1, CONTROL | CRITICAL), Err(GeneveError::Control));
        assert_eq!(with(1, CRITICAL), Err(GeneveError::Critical));
        assert_eq!(with(2, 1), Err(GeneveError::Header));
        // Reserved.
        assert_eq!((with(1, 0x3f), with(7, 0xff)), (Ok(8), Ok(8)));
    }

    proptest! {
        #[test]
        fn every_truncation_is_refused(vni in 0..vxlan::VNI_END, words in 0u8..64) {
            let mut bytes = emit(vni).to_vec();
            bytes[0] = words;
            bytes.resize(HEADER_BYTES + 4 * usize::from(words), 0x5a);
            prop_assert_eq!(parse(&bytes), Ok(bytes.len()));
            for length in 0..bytes.len() {
                prop_assert_eq!(parse(&bytes[..length]), Err(GeneveError::Header));
            }
        }
    }
}
