//! Outer headers of tunnels: Ethernet, IPv4 or IPv6, UDP.
//!
//! [`parse`] checks what must hold before anything inside is looked at, but for the UDP checksum:
//! that costs a pass over all bytes, so it is [`Outer::checksum_ok`], for frames that are known to
//! be a tunnel's. [`Template`] writes them: Don't Fragment set, hop limit [`TTL`], no UDP checksum
//! over IPv4 (RFC 7348 section 5) and a real one over IPv6, which receivers demand by default
//! (RFC 8200 section 8.1). Of the inner packet's TOS or traffic class the outer one has the ECN mark
//! (RFC 6040 section 4.1) and not the DSCP, which is 0: how the underlay treats packets is for its
//! operator to say, and not for those inside (the pipe model of RFC 2983 section 3.1).
//!
//! Source: RFC 791, RFC 8200, RFC 768, RFC 6864 section 4.1 (identification 0 with DF), RFC 6935.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ops::Range;

use crate::{checksum, ecn, ether, ipv4, ipv6, udp};

/// Time to live, or hop limit, of what we send.
pub const TTL: u8 = 64;

pub use crate::ipv4::HEADER_BYTES as IPV4_BYTES;
pub use crate::ipv6::HEADER_BYTES as IPV6_BYTES;

/// Bytes of the longest template.
pub const TEMPLATE_BYTES_MAX: usize = ether::HEADER_BYTES + IPV6_BYTES + udp::HEADER_BYTES + 8;

/// A received UDP datagram in its frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outer {
    /// Sender.
    pub remote: IpAddr,
    /// Receiver: this side.
    pub local: IpAddr,
    /// UDP source port.
    pub remote_port: u16,
    /// UDP destination port.
    pub local_port: u16,
    /// Where the UDP header and its payload are in the frame.
    segment: Range<usize>,
    /// UDP checksum as on the wire; 0: none.
    checksum: u16,
}

/// Why a frame is no UDP datagram that can be looked into.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotUdp {
    /// Not IPv4 or IPv6, or another protocol than UDP in it.
    Other,
    /// Lengths or versions that contradict each other or the frame.
    Malformed,
    /// The IPv4 header's checksum is wrong.
    HeaderChecksum,
    /// A fragment: tunnels set Don't Fragment.
    Fragment,
}

/// Reads the headers of `frame`. Never panics.
pub fn parse(frame: &[u8]) -> Result<Outer, NotUdp> {
    let header = ether::Header::parse(frame).ok_or(NotUdp::Malformed)?;
    let packet = &frame[ether::HEADER_BYTES..];
    let (remote, local, protocol, is_fragment, segment): (IpAddr, IpAddr, _, _, _);
    match header.kind {
        ether::kind::IPV4 => {
            let ip = ipv4::Header::read(packet).ok_or(NotUdp::Malformed)?;
            if !ip.checksum_ok(packet) {
                return Err(NotUdp::HeaderChecksum);
            }
            remote = Ipv4Addr::from_bits(ip.source).into();
            local = Ipv4Addr::from_bits(ip.destination).into();
            (protocol, is_fragment) = (ip.protocol, ip.is_fragment);
            segment = ip.header_bytes..ip.packet_bytes;
        }
        ether::kind::IPV6 => {
            let ip = ipv6::Header::parse(packet).ok_or(NotUdp::Malformed)?;
            remote = Ipv6Addr::from_bits(ip.source).into();
            local = Ipv6Addr::from_bits(ip.destination).into();
            (protocol, is_fragment) = (ip.next_header, ip.next_header == ipv6::FRAGMENT);
            segment = IPV6_BYTES..ip.packet_bytes;
        }
        _ => return Err(NotUdp::Other),
    }
    match (protocol, is_fragment) {
        (udp::PROTOCOL, false) => {}
        (udp::PROTOCOL | ipv6::FRAGMENT, true) => return Err(NotUdp::Fragment),
        _ => return Err(NotUdp::Other),
    }
    let header = udp::Header::parse(&packet[segment.clone()]).ok_or(NotUdp::Malformed)?;
    let start = ether::HEADER_BYTES + segment.start;
    Ok(Outer {
        remote,
        local,
        remote_port: header.source_port,
        local_port: header.destination_port,
        segment: start..start + usize::from(header.length),
        checksum: header.checksum,
    })
}

impl Outer {
    /// Where the UDP payload is in the frame.
    pub fn payload(&self) -> Range<usize> {
        self.segment.start + udp::HEADER_BYTES..self.segment.end
    }

    /// Whether the UDP checksum of `frame`, the one that was parsed, is right. None at all is
    /// right over IPv4, and over IPv6 where `none_allowed` (tunnels, RFC 6935).
    pub fn checksum_ok(&self, frame: &[u8], none_allowed: bool) -> bool {
        if self.checksum == 0 {
            return self.local.is_ipv4() || none_allowed;
        }
        let segment = frame.get(self.segment.clone());
        segment.is_some_and(|segment| udp::verify(self.remote, self.local, segment))
    }
}

/// The headers before each frame of a tunnel, ready but for lengths, source port, ECN mark and
/// checksums.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Template {
    bytes: [u8; TEMPLATE_BYTES_MAX],
    length: usize,
    local: IpAddr,
    remote: IpAddr,
    /// The IPv4 header's checksum with a total length and an ECN mark of 0.
    ipv4_sum: checksum::Sum,
}

impl Template {
    /// Headers from `local` to `remote`, with `inner` (at most 8 bytes: a VXLAN header) behind the
    /// UDP header. Link addresses are set by [`Template::write`]. `None` if the addresses are of
    /// different families or `inner` is too long.
    pub fn new(local: IpAddr, remote: IpAddr, ports: [u16; 2], inner: &[u8]) -> Option<Self> {
        let mut bytes = [0; TEMPLATE_BYTES_MAX];
        let ip = ether::HEADER_BYTES;
        let (kind, ip_bytes) = match (local, remote) {
            (IpAddr::V4(local), IpAddr::V4(remote)) => {
                bytes[ip] = 0x45;
                bytes[ip + 6] = 0x40; // Don't Fragment
                bytes[ip + 8] = TTL;
                bytes[ip + 9] = udp::PROTOCOL;
                bytes[ip + 12..ip + 16].copy_from_slice(&local.octets());
                bytes[ip + 16..ip + 20].copy_from_slice(&remote.octets());
                (ether::kind::IPV4, IPV4_BYTES)
            }
            (IpAddr::V6(local), IpAddr::V6(remote)) => {
                bytes[ip] = 0x60;
                bytes[ip + 6] = udp::PROTOCOL;
                bytes[ip + 7] = TTL;
                bytes[ip + 8..ip + 24].copy_from_slice(&local.octets());
                bytes[ip + 24..ip + 40].copy_from_slice(&remote.octets());
                (ether::kind::IPV6, IPV6_BYTES)
            }
            _ => return None,
        };
        bytes[12..14].copy_from_slice(&kind.to_be_bytes());
        let udp = ip + ip_bytes;
        bytes[udp..udp + 2].copy_from_slice(&ports[0].to_be_bytes());
        bytes[udp + 2..udp + 4].copy_from_slice(&ports[1].to_be_bytes());
        let length = udp + udp::HEADER_BYTES + inner.len();
        bytes.get_mut(length - inner.len()..length)?.copy_from_slice(inner);
        let ipv4_sum = checksum::Sum::default().with(&bytes[ip..ip + IPV4_BYTES]);
        Some(Self { bytes, length, local, remote, ipv4_sum })
    }

    /// Bytes of the headers.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Never: there is always an Ethernet header.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Bytes of the outer IP packet around a frame of `frame_bytes`.
    pub fn packet_bytes(&self, frame_bytes: usize) -> usize {
        self.length - ether::HEADER_BYTES + frame_bytes
    }

    /// Writes the headers into the first [`Template::len`] bytes of `frame`, around the frame that
    /// follows them there. `source_port` replaces the template's. `None`, with nothing written, if
    /// there is not room or the packet would be longer than IP can say.
    pub fn write(
        &self,
        frame: &mut [u8],
        destination: [u8; 6],
        source: [u8; 6],
        source_port: Option<u16>,
    ) -> Option<()> {
        let ip = ether::HEADER_BYTES;
        let packet_bytes = u16::try_from(frame.len().checked_sub(ip)?).ok()?;
        let mark = ecn::of(frame.get(self.length..)?) as u8;
        frame.get_mut(..self.length)?.copy_from_slice(&self.bytes[..self.length]);
        frame[..6].copy_from_slice(&destination);
        frame[6..12].copy_from_slice(&source);
        let v4 = self.local.is_ipv4();
        let udp = ip + if v4 { IPV4_BYTES } else { IPV6_BYTES };
        let udp_bytes = (frame.len() - udp) as u16;
        if let Some(port) = source_port {
            frame[udp..udp + 2].copy_from_slice(&port.to_be_bytes());
        }
        frame[udp + 4..udp + 6].copy_from_slice(&udp_bytes.to_be_bytes());
        if v4 {
            frame[ip + 1] = mark;
            frame[ip + 2..ip + 4].copy_from_slice(&packet_bytes.to_be_bytes());
            let sum = self.ipv4_sum.with_word(packet_bytes).with_word(mark.into()).finish();
            frame[ip + 10..ip + 12].copy_from_slice(&sum.to_be_bytes());
        } else {
            frame[ip + 1] = mark << 4;
            frame[ip + 4..ip + 6].copy_from_slice(&udp_bytes.to_be_bytes());
            let sum = udp::checksum(self.local, self.remote, &frame[udp..]);
            frame[udp + 6..udp + 8].copy_from_slice(&sum.to_be_bytes());
        }
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use etherparse::{NetSlice, SlicedPacket, TransportSlice};
    use proptest::prelude::*;

    fn frame(local: &str, remote: &str, inner: &[u8], payload: &[u8]) -> Vec<u8> {
        let (local, remote) = (local.parse().unwrap(), remote.parse().unwrap());
        let template = Template::new(local, remote, [1000, 4789], inner).unwrap();
        let mut frame = vec![0; template.len()];
        frame.extend(payload);
        template.write(&mut frame, [2; 6], [4; 6], Some(50000)).unwrap();
        frame
    }

    const PAIRS: [(&str, &str); 2] = [("10.1.2.3", "192.0.2.200"), ("2001:db8::1", "fd00::ffff")];

    #[test]
    fn what_is_written_is_read_and_means_the_same_to_etherparse() {
        for (from, to) in PAIRS {
            let frame = frame(from, to, &[8, 0, 0, 0, 0, 0, 9, 0], b"payload");
            let outer = parse(&frame).unwrap();
            assert_eq!((outer.remote, outer.local), (from.parse().unwrap(), to.parse().unwrap()));
            assert_eq!((outer.remote_port, outer.local_port), (50000, 4789));
            assert_eq!(&frame[outer.payload()][8..], b"payload");
            assert!(outer.checksum_ok(&frame, false));
            let theirs = SlicedPacket::from_ethernet(&frame).unwrap();
            let Some(TransportSlice::Udp(udp)) = &theirs.transport else { panic!("no UDP") };
            assert_eq!((udp.source_port(), udp.destination_port()), (50000, 4789));
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
    fn the_inner_mark_is_the_outer_one_and_the_dscp_is_none() {
        for (from, to) in PAIRS {
            for class in [0, 1, 2, 3, 0xb8, 0xbb] {
                let four = [&[1; 12][..], &[8, 0, 0x45, class], &[0; 18]];
                let six = [&[1; 12][..], &[0x86, 0xdd, 0x60 | class >> 4, class << 4], &[0; 38]];
                for inner in [four.concat(), six.concat()] {
                    let frame = frame(from, to, &[8, 0, 0, 0, 0, 0, 9, 0], &inner);
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
    fn broken_headers_are_told_apart() {
        let good = frame(PAIRS[0].0, PAIRS[0].1, &[], b"x");
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
        assert_eq!(broken(22, 63, false), Err(NotUdp::HeaderChecksum));
        assert_eq!(broken(20, 0x20, true), Err(NotUdp::Fragment));
        assert_eq!(broken(21, 1, true), Err(NotUdp::Fragment));
        assert_eq!(broken(23, 6, true), Err(NotUdp::Other));
        assert_eq!(broken(14, 0x55, true), Err(NotUdp::Malformed));
        assert_eq!(broken(14, 0x44, true), Err(NotUdp::Malformed));
        assert_eq!(broken(17, 200, true), Err(NotUdp::Malformed));
        assert_eq!(broken(39, 200, true), Err(NotUdp::Malformed));
        assert_eq!(broken(12, 9, false), Err(NotUdp::Other));
        let mut six = frame(PAIRS[1].0, PAIRS[1].1, &[], b"x");
        let last = six.len() - 1;
        six[last] ^= 1;
        assert!(!parse(&six).unwrap().checksum_ok(&six, true));
        six[60..62].fill(0);
        assert!(parse(&six).unwrap().checksum_ok(&six, true));
        assert!(!parse(&six).unwrap().checksum_ok(&six, false));
        six[20] = 44;
        assert_eq!(parse(&six), Err(NotUdp::Fragment));
    }

    #[test]
    fn every_truncation_is_refused() {
        for (from, to) in PAIRS {
            let frame = frame(from, to, &[], b"payload");
            for length in 0..frame.len() {
                assert!(parse(&frame[..length]).is_err());
            }
        }
    }

    #[test]
    fn families_do_not_mix() {
        let (v4, v6) = (PAIRS[0].0.parse().unwrap(), PAIRS[1].0.parse().unwrap());
        assert_eq!(Template::new(v4, v6, [1, 2], &[]), None);
        assert_eq!(Template::new(v4, v4, [1, 2], &[0; 40]), None);
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
