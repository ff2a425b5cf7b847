//! VXLAN: an Ethernet frame behind a header of 8 bytes in UDP (RFC 7348 section 5).

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::tunnel_kind::{self, Fix, Take, TunnelHeader, TunnelKey, TunnelKind};
use crate::udp;

/// Properties of the kind.
pub const KIND: TunnelKind =
    TunnelKind { name: "vxlan", key: "vni", keys: 0..=VNI_END - 1, port: Some(PORT) };

/// UDP destination port (RFC 7348 section 5).
pub const PORT: u16 = 4789;

/// A VXLAN tunnel.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct VxlanTunnel {
    /// Outer address of this side.
    pub local: IpAddr,
    /// Outer address of the other side.
    pub remote: IpAddr,
    /// UDP destination port, usually [`PORT`].
    pub port: u16,
    /// Network identifier, 24 bits.
    pub vni: u32,
}

impl VxlanTunnel {
    /// Returns the tunnel as seen from its other end.
    pub(crate) fn reversed(&self) -> Self {
        let (local, remote) = (self.remote, self.local);
        Self { local, remote, ..*self }
    }
}

impl tunnel_kind::Tunnel for VxlanTunnel {
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

/// Bytes of a header.
pub const HEADER_BYTES: usize = 8;

/// Network identifiers are below this (24 bits).
pub const VNI_END: u32 = 1 << 24;

/// Flag for a valid identifier.
const I_FLAG: u8 = 0x08;

/// Returns the network identifier in the header at the start of `bytes`. `None` if it is too short
/// or the I flag is not set. Ignores reserved bits on receipt, as the RFC requires.
pub fn parse(bytes: &[u8]) -> Option<u32> {
    let header = bytes.first_chunk()?;
    (header[0] & I_FLAG != 0).then(|| vni(header))
}

/// Returns the identifier field of a header, valid or not.
#[inline]
pub fn vni(header: &[u8; HEADER_BYTES]) -> u32 {
    u32::from_be_bytes([0, header[4], header[5], header[6]])
}

/// Returns the header for the low 24 bits of `vni`.
pub fn emit(vni: u32) -> [u8; HEADER_BYTES] {
    let [_, high, middle, low] = vni.to_be_bytes();
    [I_FLAG, 0, 0, 0, high, middle, low, 0]
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn vector() {
        assert_eq!(emit(0x12_3456), [8, 0, 0, 0, 0x12, 0x34, 0x56, 0]);
        assert_eq!(parse(&[0xf7, 0, 0, 0, 0, 0, 1, 0]), None);
        for length in 0..HEADER_BYTES {
            assert_eq!(parse(&emit(1)[..length]), None);
        }
    }

    proptest! {
        #[test]
        fn reserved_bits_are_ignored(vni in 0..VNI_END, noise: [u8; HEADER_BYTES]) {
            let mut bytes = emit(vni);
            for at in [0, 1, 2, 3, 7] {
                bytes[at] |= noise[at];
            }
            prop_assert_eq!(parse(&bytes), Some(vni));
        }
    }
}
