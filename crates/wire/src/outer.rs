//! Outer headers of tunnels: Ethernet, IPv4 or IPv6, and the header of the tunnel's kind.
//!
//! [`parse`] checks everything that must hold before the inner frame is read, except for checksums
//! over the payload. Those cost a pass over all bytes. So [`Outer::checksum_ok`] checks them, for
//! frames that are known to belong to a tunnel.
//!
//! [`HeaderTemplate`] writes the headers: Don't Fragment set, hop limit [`TTL`], no UDP checksum
//! over IPv4 (RFC 7348 section 5), and a real one over IPv6, which receivers require by default
//! (RFC 8200 section 8.1). The outer TOS or traffic class takes the inner packet's ECN mark (RFC
//! 6040 section 4.1). Its DSCP is 0, because the underlay's operator decides how the underlay
//! treats packets (the pipe model of RFC 2983 section 3.1).
//!
//! Source: RFC 791, RFC 8200, RFC 768, RFC 6864 section 4.1 (identification 0 with DF), RFC 6935.

use std::cell::Cell;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ops::Range;

use crate::tunnel::Encapsulation;
pub use crate::tunnel_kind::NotATunnel;
use crate::tunnel_kind::{Fix, Take, TunnelKey};
use crate::{checksum, ecn, ether, flow, gre, ipv4, ipv6, udp, vlan};

/// Time to live, or hop limit, of sent packets.
pub const TTL: u8 = 64;

pub use crate::ipv4::HEADER_BYTES as IPV4_BYTES;
pub use crate::ipv6::HEADER_BYTES as IPV6_BYTES;

/// Bytes of the longest template.
pub const TEMPLATE_BYTES_MAX: usize = ether::HEADER_BYTES + IPV6_BYTES + gre::HEADER_BYTES_MAX;

/// Outer headers of a received frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outer {
    /// Sender.
    pub remote: IpAddr,
    /// Receiver: this side.
    pub local: IpAddr,
    /// Payload of the IP packet.
    pub carried: OuterPayload,
    /// Range of that header and its payload in the frame.
    segment: Range<usize>,
}

/// Payload of an outer IP packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OuterPayload {
    /// A UDP datagram.
    Udp {
        /// Source port.
        remote_port: u16,
        /// Destination port.
        local_port: u16,
        /// Checksum as on the wire; 0: none.
        checksum: u16,
    },
    /// An Ethernet frame in GRE.
    Gre(gre::GreHeader),
}

/// Reads the headers of `frame`. Never panics.
#[inline]
pub fn parse(frame: &[u8]) -> Result<Outer, NotATunnel> {
    let header = ether::EthernetHeader::parse(frame).ok_or(NotATunnel::Malformed)?;
    let packet = &frame[ether::HEADER_BYTES..];
    let (remote, local, protocol, is_fragment, segment): (IpAddr, IpAddr, _, _, _);
    match header.kind {
        ether::kind::IPV4 => {
            let ip = ipv4::Ipv4Packet::read(packet).ok_or(NotATunnel::Malformed)?;
            if !ip.checksum_ok(packet) {
                return Err(NotATunnel::HeaderChecksum);
            }
            remote = Ipv4Addr::from_bits(ip.source).into();
            local = Ipv4Addr::from_bits(ip.destination).into();
            (protocol, is_fragment) = (ip.protocol, ip.is_fragment);
            segment = ip.header_bytes..ip.packet_bytes;
        }
        ether::kind::IPV6 => {
            let ip = ipv6::Ipv6Packet::parse(packet).ok_or(NotATunnel::Malformed)?;
            remote = Ipv6Addr::from_bits(ip.source).into();
            local = Ipv6Addr::from_bits(ip.destination).into();
            let behind = &packet[IPV6_BYTES..ip.packet_bytes];
            let mut start = IPV6_BYTES;
            protocol = match (ip.next_header, behind) {
                (ipv6::DESTINATION_OPTIONS, [gre::PROTOCOL, 0, ..]) => {
                    ipv6::skip_options(behind).ok_or(NotATunnel::Malformed)?;
                    start += ipv6::OPTIONS_BYTES;
                    gre::PROTOCOL
                }
                (other, _) => other,
            };
            segment = start..ip.packet_bytes;
            is_fragment = ip.next_header == ipv6::FRAGMENT;
        }
        _ => return Err(NotATunnel::Other),
    }
    let start = ether::HEADER_BYTES + segment.start;
    let (carried, bytes) = match (protocol, is_fragment) {
        (udp::PROTOCOL, false) => {
            let header = udp::UdpHeader::parse(&packet[segment]).ok_or(NotATunnel::Malformed)?;
            let carried = OuterPayload::Udp {
                remote_port: header.source_port,
                local_port: header.destination_port,
                checksum: header.checksum,
            };
            (carried, usize::from(header.length))
        }
        (gre::PROTOCOL, false) => {
            (OuterPayload::Gre(gre::GreHeader::parse(&packet[segment.clone()])?), segment.len())
        }
        (udp::PROTOCOL | gre::PROTOCOL | ipv6::FRAGMENT, true) => {
            return Err(NotATunnel::Fragment);
        }
        _ => return Err(NotATunnel::Other),
    };
    Ok(Outer { remote, local, carried, segment: start..start + bytes })
}

impl Outer {
    /// Returns the taken traffic that the frame belongs to.
    #[inline]
    pub fn take(&self) -> Take {
        match self.carried {
            OuterPayload::Udp { local_port, .. } => {
                Take::Udp { local: self.local, port: local_port }
            }
            OuterPayload::Gre(_) => Take::Gre { local: self.local },
        }
    }

    /// Returns the key of the tunnel that has this value between the outer addresses.
    #[inline]
    pub fn key(&self, value: u64) -> TunnelKey {
        TunnelKey::new(Some((self.local, self.remote)), value)
    }

    /// Returns the range of the payload behind the header in the frame.
    #[inline]
    pub fn payload(&self) -> Range<usize> {
        let header = match self.carried {
            OuterPayload::Udp { .. } => udp::HEADER_BYTES,
            OuterPayload::Gre(header) => header.bytes,
        };
        self.segment.start + header..self.segment.end
    }

    /// True if the checksum over the payload of `frame`, the parsed frame, is right. A missing
    /// checksum is right over IPv4, and over IPv6 if `none_allowed` (tunnels, RFC 6935).
    #[inline]
    pub fn checksum_ok(&self, frame: &[u8], none_allowed: bool) -> bool {
        let segment = frame.get(self.segment.clone());
        match self.carried {
            OuterPayload::Udp { checksum: 0, .. } => self.local.is_ipv4() || none_allowed,
            OuterPayload::Udp { .. } => {
                segment.is_some_and(|segment| udp::verify(self.remote, self.local, segment))
            }
            OuterPayload::Gre(gre::GreHeader { has_checksum: false, .. }) => true,
            OuterPayload::Gre(_) => segment.is_some_and(|segment| checksum::checksum(segment) == 0),
        }
    }
}

/// Headers before each frame of a tunnel, complete
/// except for the fields that differ for each frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeaderTemplate {
    bytes: [u8; TEMPLATE_BYTES_MAX],
    length: usize,
    /// Outer addresses; `None` if there is no outer IP header.
    ends: Option<(IpAddr, IpAddr)>,
    fix: Fix,
    /// Sequence number of the next frame, if frames have one.
    sequence: Cell<u32>,
    /// Sum of the IPv4 header with a total length and an ECN mark of 0.
    ipv4_sum: checksum::Sum,
}

impl HeaderTemplate {
    /// Makes the headers for a tunnel's frames; [`HeaderTemplate::write`] sets the MAC addresses.
    /// `None` if it is not a tunnel, or its addresses have different families.
    pub fn new(by: &Encapsulation) -> Option<Self> {
        let tunnel = by.tunnel()?;
        let (ends, header) = (tunnel.ends(), tunnel.header());
        let mut bytes = [0; TEMPLATE_BYTES_MAX];
        let ip = ether::HEADER_BYTES;
        let (kind, ip_bytes) = match ends {
            None => {
                let length = header.bytes.len();
                bytes.get_mut(..length)?.copy_from_slice(&header.bytes);
                let (fix, ipv4_sum) = (header.fix, checksum::Sum::default());
                return Some(Self { bytes, length, ends, fix, sequence: Cell::new(0), ipv4_sum });
            }
            Some((IpAddr::V4(local), IpAddr::V4(remote))) => {
                bytes[ip] = 0x45;
                bytes[ip + 6] = 0x40; // Don't Fragment
                bytes[ip + 8] = TTL;
                bytes[ip + 9] = header.protocol;
                bytes[ip + 12..ip + 16].copy_from_slice(&local.octets());
                bytes[ip + 16..ip + 20].copy_from_slice(&remote.octets());
                (ether::kind::IPV4, IPV4_BYTES)
            }
            Some((IpAddr::V6(local), IpAddr::V6(remote))) => {
                bytes[ip] = 0x60;
                bytes[ip + 6] = header.protocol;
                bytes[ip + 7] = TTL;
                bytes[ip + 8..ip + 24].copy_from_slice(&local.octets());
                bytes[ip + 24..ip + 40].copy_from_slice(&remote.octets());
                (ether::kind::IPV6, IPV6_BYTES)
            }
            _ => return None,
        };
        bytes[12..14].copy_from_slice(&kind.to_be_bytes());
        let length = ip + ip_bytes + header.bytes.len();
        bytes.get_mut(ip + ip_bytes..length)?.copy_from_slice(&header.bytes);
        let ipv4_sum = checksum::Sum::default().with(&bytes[ip..ip + IPV4_BYTES]);
        Some(Self { bytes, length, ends, fix: header.fix, sequence: Cell::new(0), ipv4_sum })
    }

    /// Sets the sequence number of the next frame, if frames have one.
    #[must_use]
    pub fn from_number(self, first: u32) -> Self {
        self.sequence.set(first);
        self
    }

    /// Bytes of the headers.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Always false: there is always a header.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Returns the length of the outer IP packet around a frame
    /// of `frame_bytes`; `None` if there is none.
    #[inline]
    pub fn packet_bytes(&self, frame_bytes: usize) -> Option<usize> {
        self.ends.map(|_| self.length - ether::HEADER_BYTES + frame_bytes)
    }

    /// Writes the headers into the first [`HeaderTemplate::len`] bytes of `frame`, before the
    /// inner frame. Returns `None`, with nothing written, if `frame` is too short or
    /// the packet would exceed IP's length field.
    #[inline]
    pub fn write(&self, frame: &mut [u8], destination: [u8; 6], source: [u8; 6]) -> Option<()> {
        let Some((local, remote)) = self.ends else {
            return vlan::insert(frame, &self.bytes[..self.length]);
        };
        let ip = ether::HEADER_BYTES;
        let packet_bytes = u16::try_from(frame.len().checked_sub(ip)?).ok()?;
        let inner = frame.get(self.length..)?;
        let mark = ecn::of(inner) as u8;
        let source_port = match self.fix {
            Fix::Udp { spread: true } => Some(udp::spread(flow::ip(inner))),
            _ => None,
        };
        frame.get_mut(..self.length)?.copy_from_slice(&self.bytes[..self.length]);
        frame[..6].copy_from_slice(&destination);
        frame[6..12].copy_from_slice(&source);
        let v4 = local.is_ipv4();
        let at = ip + if v4 { IPV4_BYTES } else { IPV6_BYTES };
        let segment_bytes = (frame.len() - at) as u16;
        if v4 {
            frame[ip + 1] = mark;
            frame[ip + 2..ip + 4].copy_from_slice(&packet_bytes.to_be_bytes());
            let sum = self.ipv4_sum.with_word(packet_bytes).with_word(mark.into()).finish();
            frame[ip + 10..ip + 12].copy_from_slice(&sum.to_be_bytes());
        } else {
            frame[ip + 1] = mark << 4;
            frame[ip + 4..ip + 6].copy_from_slice(&segment_bytes.to_be_bytes());
        }
        match self.fix {
            Fix::Udp { .. } => {
                if let Some(port) = source_port {
                    frame[at..at + 2].copy_from_slice(&port.to_be_bytes());
                }
                frame[at + 4..at + 6].copy_from_slice(&segment_bytes.to_be_bytes());
                if !v4 {
                    let sum = udp::checksum(local, remote, &frame[at..]);
                    frame[at + 6..at + 8].copy_from_slice(&sum.to_be_bytes());
                }
            }
            Fix::Gre => {
                let (checksum_at, sequence_at) = gre::places(&frame[at..]);
                if let Some(place) = sequence_at {
                    let number = self.sequence.replace(self.sequence.get().wrapping_add(1));
                    frame[at + place..at + place + 4].copy_from_slice(&number.to_be_bytes());
                }
                if let Some(place) = checksum_at {
                    let sum = checksum::checksum(&frame[at..]);
                    frame[at + place..at + place + 2].copy_from_slice(&sum.to_be_bytes());
                }
            }
            Fix::Tag => {}
        }
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vxlan;
    use etherparse::{NetSlice, SlicedPacket, TransportSlice};
    use proptest::prelude::*;

    fn vxlan_of(local: &str, remote: &str) -> Encapsulation {
        let (local, remote) = (local.parse().unwrap(), remote.parse().unwrap());
        Encapsulation::Vxlan(vxlan::VxlanTunnel { local, remote, port: 4789, vni: 9 })
    }

    fn udp_of(local: &str, remote: &str) -> Encapsulation {
        let (local, remote) = (local.parse().unwrap(), remote.parse().unwrap());
        Encapsulation::Udp(udp::UdpTunnel { local, remote, local_port: 50000, remote_port: 4789 })
    }

    fn frame(by: &Encapsulation, payload: &[u8]) -> Vec<u8> {
        let template = HeaderTemplate::new(by).unwrap();
        let mut frame = vec![0; template.len()];
        frame.extend(payload);
        template.write(&mut frame, [2; 6], [4; 6]).unwrap();
        frame
    }

    const PAIRS: [(&str, &str); 2] = [("10.1.2.3", "192.0.2.200"), ("2001:db8::1", "fd00::ffff")];

    #[test]
    fn outer_headers_round_trip_and_match_etherparse() {
        for (from, to) in PAIRS {
            let frame = frame(&vxlan_of(from, to), b"payload");
            let outer = parse(&frame).unwrap();
            assert_eq!((outer.remote, outer.local), (from.parse().unwrap(), to.parse().unwrap()));
            let OuterPayload::Udp { remote_port, local_port, .. } = outer.carried else { panic!() };
            assert!(remote_port >= udp::SPREAD_FIRST && local_port == 4789);
            assert_eq!(&frame[outer.payload()][8..], b"payload");
            assert!(outer.checksum_ok(&frame, false));
            let theirs = SlicedPacket::from_ethernet(&frame).unwrap();
            let Some(TransportSlice::Udp(udp)) = &theirs.transport else { panic!("no UDP") };
            assert_eq!((udp.source_port(), udp.destination_port()), (remote_port, 4789));
            match theirs.net.unwrap() {
                NetSlice::Ipv4(ip) => {
                    let header = ip.header().to_header();
                    assert!(header.dont_fragment && header.time_to_live == TTL);
                    assert_eq!(header.header_checksum, header.calc_header_checksum());
                    assert_eq!(udp.checksum(), 0);
                }
                NetSlice::Ipv6(ip) => {
                    let (header, from) = (ip.header().to_header(), udp.to_header());
                    let sum = from.calc_checksum_ipv6(&header, udp.payload()).unwrap();
                    assert_eq!((header.hop_limit, from.checksum), (TTL, sum));
                }
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn outer_header_copies_ecn_and_clears_dscp() {
        for (from, to) in PAIRS {
            for class in [0, 1, 2, 3, 0xb8, 0xbb] {
                let four = [&[1; 12][..], &[8, 0, 0x45, class], &[0; 18]];
                let six = [&[1; 12][..], &[0x86, 0xdd, 0x60 | class >> 4, class << 4], &[0; 38]];
                for inner in [four.concat(), six.concat()] {
                    let frame = frame(&vxlan_of(from, to), &inner);
                    assert_eq!(ecn::of(&frame) as u8, class & 3);
                    let outer = parse(&frame).expect("its checksum is right");
                    assert!(outer.checksum_ok(&frame, false));
                    let dscp = match SlicedPacket::from_ethernet(&frame).unwrap().net.unwrap() {
                        NetSlice::Ipv4(ip) => ip.header().dcp().value(),
                        NetSlice::Ipv6(ip) => ip.header().traffic_class() >> 2,
                        other => panic!("{other:?}"),
                    };
                    assert_eq!(dscp, 0);
                }
            }
        }
    }

    #[test]
    fn outer_parser_distinguishes_broken_headers() {
        let good = frame(&udp_of(PAIRS[0].0, PAIRS[0].1), b"x");
        let broken = |at: usize, value: u8, mend: bool| {
            let mut frame = good.clone();
            frame[at] = value;
            if mend {
                frame[24..26].fill(0);
                let sum = checksum::checksum(&frame[14..34]);
                frame[24..26].copy_from_slice(&sum.to_be_bytes());
            }
            parse(&frame).map(|_| ())
        };
        assert_eq!(broken(22, 63, false), Err(NotATunnel::HeaderChecksum));
        assert_eq!(broken(20, 0x20, true), Err(NotATunnel::Fragment));
        assert_eq!(broken(21, 1, true), Err(NotATunnel::Fragment));
        assert_eq!(broken(23, 6, true), Err(NotATunnel::Other));
        assert_eq!(broken(14, 0x55, true), Err(NotATunnel::Malformed));
        assert_eq!(broken(14, 0x44, true), Err(NotATunnel::Malformed));
        assert_eq!(broken(17, 200, true), Err(NotATunnel::Malformed));
        assert_eq!(broken(39, 200, true), Err(NotATunnel::Malformed));
        assert_eq!(broken(12, 9, false), Err(NotATunnel::Other));
        let mut six = frame(&udp_of(PAIRS[1].0, PAIRS[1].1), b"x");
        let last = six.len() - 1;
        six[last] ^= 1;
        assert!(!parse(&six).unwrap().checksum_ok(&six, true));
        six[60..62].fill(0);
        assert!(parse(&six).unwrap().checksum_ok(&six, true));
        assert!(!parse(&six).unwrap().checksum_ok(&six, false));
        six[20] = 44;
        assert_eq!(parse(&six), Err(NotATunnel::Fragment));
    }

    fn gre_of(from: &str, to: &str, checksum: bool) -> Encapsulation {
        let (local, remote) = (from.parse().unwrap(), to.parse().unwrap());
        let sequence = !checksum;
        Encapsulation::Gre(gre::GreTunnel { local, remote, key: Some(7), checksum, sequence })
    }

    #[test]
    fn every_truncation_is_refused() {
        for (from, to) in PAIRS {
            for by in [udp_of(from, to), gre_of(from, to, true), gre_of(from, to, false)] {
                let frame = frame(&by, b"payload");
                for length in 0..frame.len() {
                    assert!(parse(&frame[..length]).is_err());
                }
            }
        }
    }

    #[test]
    fn outer_gre_headers_survive_a_round_trip() {
        for (from, to) in PAIRS {
            let sealed = frame(&gre_of(from, to, true), b"payload");
            let outer = parse(&sealed).unwrap();
            let OuterPayload::Gre(header) = outer.carried else { panic!("{outer:?}") };
            assert_eq!((header.key, header.has_checksum, header.sequence), (Some(7), true, None));
            assert_eq!(&sealed[outer.payload()], b"payload");
            assert!(outer.checksum_ok(&sealed, false));
            for at in outer.segment.clone() {
                let mut broken = sealed.clone();
                broken[at] ^= 1;
                let ok = parse(&broken).is_ok_and(|outer| {
                    outer.carried == OuterPayload::Gre(header) && outer.checksum_ok(&broken, false)
                });
                assert!(!ok, "byte {at}");
            }
            let template =
                HeaderTemplate::new(&gre_of(from, to, false)).unwrap().from_number(u32::MAX);
            let mut frame = vec![0; template.len() + 20];
            for number in [u32::MAX, 0, 1] {
                template.write(&mut frame, [2; 6], [4; 6]).unwrap();
                let OuterPayload::Gre(header) = parse(&frame).unwrap().carried else { panic!() };
                assert_eq!((header.sequence, header.has_checksum), (Some(number), false));
            }
            let ip = etherparse::IpHeaders::from_slice(&frame[14..]).unwrap().0;
            assert_eq!(ip.next_header().unwrap().0, gre::PROTOCOL);
        }
    }

    /// Linux's ip6gretap writes the tunnel encapsulation limit before GRE by default.
    #[test]
    fn an_encapsulation_limit_before_gre_is_skipped() {
        let plain = frame(&gre_of(PAIRS[1].0, PAIRS[1].1, true), b"payload");
        let with = |options: [u8; 8]| {
            let mut frame = plain.clone();
            frame[20] = ipv6::DESTINATION_OPTIONS;
            let bytes = u16::from_be_bytes([frame[18], frame[19]]) + 8;
            frame[18..20].copy_from_slice(&bytes.to_be_bytes());
            frame.splice(54..54, options);
            for length in 0..frame.len() {
                assert!(parse(&frame[..length]).is_err());
            }
            parse(&frame).map(|outer| frame[outer.payload()].to_vec())
        };
        assert_eq!(with([47, 0, 4, 1, 4, 1, 1, 0]), Ok(b"payload".to_vec()));
        assert_eq!(with([47, 0, 0, 0, 0, 0, 0, 0]), Ok(b"payload".to_vec()));
        let (other, malformed) = (Err(NotATunnel::Other), Err(NotATunnel::Malformed));
        assert_eq!(with([17, 0, 4, 1, 4, 1, 1, 0]), other, "not before UDP");
        assert_eq!(with([47, 1, 4, 1, 4, 1, 1, 0]), other, "longer");
        assert_eq!(with([47, 0, 4, 9, 4, 1, 1, 0]), malformed, "beyond the end");
        assert_eq!(with([47, 0, 0x44, 1, 4, 1, 1, 0]), malformed, "has to be known");
    }

    #[test]
    fn template_refuses_mixed_address_families() {
        assert_eq!(HeaderTemplate::new(&udp_of(PAIRS[0].0, PAIRS[1].0)), None);
        assert_eq!(HeaderTemplate::new(&Encapsulation::Interface), None);
    }

    proptest! {
        #[test]
        fn noise_never_panics(bytes: Vec<u8>, six: bool) {
            let mut frame = vec![0; 12];
            frame.extend(if six { [0x86, 0xdd] } else { [8, 0] });
            frame.push(if six { 0x60 } else { 0x45 });
            frame.extend(&bytes);
            if let Ok(outer) = parse(&frame) {
                prop_assert!(outer.payload().end <= frame.len());
                outer.checksum_ok(&frame, true);
            }
        }
    }
}
