//! UDP headers (RFC 768, RFC 8200 section 8.1), and tunnels of Ethernet frames directly in UDP.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::checksum::Sum;
use crate::tunnel_kind::{self, Fix, Take, TunnelKey, TunnelKind};

/// Properties of the kind; keys are local ports.
pub const KIND: TunnelKind =
    TunnelKind { name: "udp", key: "localPort", keys: 1..=0xffff, port: None };

/// A tunnel of Ethernet frames in UDP.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct UdpTunnel {
    /// Outer address of this side.
    pub local: IpAddr,
    /// Outer address of the other side.
    pub remote: IpAddr,
    /// UDP port of this side.
    pub local_port: u16,
    /// UDP port of the other side.
    pub remote_port: u16,
}

impl UdpTunnel {
    /// Returns the tunnel as seen from its other end.
    pub(crate) fn reversed(&self) -> Self {
        let Self { local, remote, local_port, remote_port } = *self;
        Self { local: remote, remote: local, local_port: remote_port, remote_port: local_port }
    }
}

impl tunnel_kind::Tunnel for UdpTunnel {
    fn kind(&self) -> &'static TunnelKind {
        &KIND
    }

    fn ends(&self) -> Option<(IpAddr, IpAddr)> {
        Some((self.local, self.remote))
    }

    fn number(&self) -> Option<u32> {
        Some(self.local_port.into())
    }

    fn key(&self) -> u64 {
        TunnelKey::ports(self.local_port, self.remote_port)
    }

    fn takes(&self) -> Take {
        Take::Udp { local: self.local, port: self.local_port }
    }

    fn header(&self) -> tunnel_kind::TunnelHeader {
        let bytes = ports(self.local_port, self.remote_port).to_vec();
        tunnel_kind::TunnelHeader { protocol: PROTOCOL, bytes, fix: Fix::Udp { spread: false } }
    }

    fn key_text(&self) -> String {
        format!("port {} > {}", self.local_port, self.remote_port)
    }
}

/// First source port for spreading flows over an underlay; all ports up to 65,535 are used (RFC
/// 7348 section 5, RFC 6335's dynamic ports).
pub const SPREAD_FIRST: u16 = 49152;

/// Returns the source port for a flow with this hash.
#[inline]
pub fn spread(hash: u32) -> u16 {
    SPREAD_FIRST | (hash as u16 & (u16::MAX - SPREAD_FIRST))
}

/// Returns a datagram's header, without length and checksum.
pub(crate) fn ports(source_port: u16, destination_port: u16) -> [u8; HEADER_BYTES] {
    UdpHeader { source_port, destination_port, length: 0, checksum: 0 }.emit()
}

/// Bytes of a header.
pub const HEADER_BYTES: usize = 8;

/// Protocol number of UDP in IP headers.
pub const PROTOCOL: u8 = 17;

/// UDP header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UdpHeader {
    /// Port of the sender.
    pub source_port: u16,
    /// Port of the receiver.
    pub destination_port: u16,
    /// Bytes of header and payload.
    pub length: u16,
    /// Checksum as on the wire; 0: none.
    pub checksum: u16,
}

impl UdpHeader {
    /// Reads the header at the start of `segment`. `None` if `segment` is too short, or if the
    /// length field exceeds it or is less than a header's.
    pub fn parse(segment: &[u8]) -> Option<Self> {
        let &[s0, s1, d0, d1, l0, l1, c0, c1] = segment.first_chunk::<HEADER_BYTES>()?;
        let header = Self {
            source_port: u16::from_be_bytes([s0, s1]),
            destination_port: u16::from_be_bytes([d0, d1]),
            length: u16::from_be_bytes([l0, l1]),
            checksum: u16::from_be_bytes([c0, c1]),
        };
        let length = usize::from(header.length);
        (length >= HEADER_BYTES && length <= segment.len()).then_some(header)
    }

    /// Returns the bytes on the wire.
    pub fn emit(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..2].copy_from_slice(&self.source_port.to_be_bytes());
        bytes[2..4].copy_from_slice(&self.destination_port.to_be_bytes());
        bytes[4..6].copy_from_slice(&self.length.to_be_bytes());
        bytes[6..].copy_from_slice(&self.checksum.to_be_bytes());
        bytes
    }
}

/// Returns the checksum to write for `segment` (header with a zero checksum, and payload).
pub fn checksum(source: IpAddr, destination: IpAddr, segment: &[u8]) -> u16 {
    match sum(source, destination, segment) {
        0 => 0xffff, // RFC 768: an all-zero checksum means none.
        sum => sum,
    }
}

/// True if the non-zero checksum in `segment` is right.
pub fn verify(source: IpAddr, destination: IpAddr, segment: &[u8]) -> bool {
    sum(source, destination, segment) == 0
}

fn sum(source: IpAddr, destination: IpAddr, segment: &[u8]) -> u16 {
    let sum = Sum::default();
    let addresses = match (source, destination) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            sum.with(&source.octets()).with(&destination.octets())
        }
        (source, destination) => sum.with(&octets(source)).with(&octets(destination)),
    };
    addresses
        .with_word(u16::from(PROTOCOL))
        .with(&(segment.len() as u32).to_be_bytes())
        .with(segment)
        .finish()
}

fn octets(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
        IpAddr::V6(address) => address.octets(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use etherparse::PacketBuilder;
    use proptest::prelude::*;

    #[test]
    fn udp_headers_with_wrong_lengths_are_refused() {
        let header = UdpHeader { source_port: 1, destination_port: 2, length: 9, checksum: 0 };
        assert_eq!(UdpHeader::parse(&header.emit()), None);
        assert_eq!(UdpHeader::parse(&UdpHeader { length: 7, ..header }.emit()), None);
        let whole = UdpHeader { length: 8, ..header };
        assert_eq!(UdpHeader::parse(&whole.emit()), Some(whole));
        for length in 0..HEADER_BYTES {
            assert_eq!(UdpHeader::parse(&whole.emit()[..length]), None);
        }
    }

    proptest! {
        #[test]
        fn udp_checksums_match_etherparse(
            source: [u8; 16], destination: [u8; 16], v4: bool, payload: Vec<u8>,
        ) {
            let mut packet = Vec::new();
            let (from, to, header) = if v4 {
                let from: [u8; 4] = source[..4].try_into().unwrap();
                let to: [u8; 4] = destination[..4].try_into().unwrap();
                let builder = PacketBuilder::ipv4(from, to, 9).udp(77, 4789);
                builder.write(&mut packet, &payload).unwrap();
                (IpAddr::from(from), IpAddr::from(to), 20)
            } else {
                let builder = PacketBuilder::ipv6(source, destination, 9).udp(77, 4789);
                builder.write(&mut packet, &payload).unwrap();
                (IpAddr::from(source), IpAddr::from(destination), 40)
            };
            let mut segment = packet[header..].to_vec();
            prop_assert!(verify(from, to, &segment));
            let theirs = UdpHeader::parse(&segment).unwrap().checksum;
            segment[6..8].fill(0);
            prop_assert_eq!(checksum(from, to, &segment), theirs);
        }
    }
}
