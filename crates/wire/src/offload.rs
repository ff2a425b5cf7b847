//! Work that senders left to their device: completing checksums, and segmenting large packets.
//!
//! A kernel leaves both to any device that claims to support them. Virtual devices (veth, bridge,
//! VXLAN over them) claim so, and pass frames on unchanged. A program that reads such frames must
//! do the work. [`complete`] finds incomplete checksums by itself. [`complete_at`] and [`Cut`] need
//! the offsets, as in `struct virtio_net_hdr`.
//!
//! Supported headers are VLAN tags, IPv4, IPv6, TCP and UDP, also inside VXLAN, Geneve, GRE and IP
//! in IP. Never panics for any bytes.
//! Limits: [`LAYERS_MAX`] headers, [`STEPS_MAX`] steps to find them.
//! Source: Linux Documentation/networking/checksum-offloads.rst and segmentation-offloads.rst,
//! skb_checksum_help of net/core/dev.c, net/ipv4/tcp_offload.c, net/ipv4/udp_offload.c,
//! gre_build_header of include/net/gre.h; VIRTIO 1.2 section 5.1.6.

use crate::checksum::{Sum, checksum};
use crate::ether::kind;
use crate::{ether, geneve, gre, ipv4, ipv6, udp, vxlan};

/// Most headers of IP, TCP and UDP that are found in a frame.
pub const LAYERS_MAX: usize = 8;

/// Most headers of any kind that are parsed.
pub const STEPS_MAX: usize = 16;

/// Bytes of a TCP header without options (RFC 9293 section 3.1).
const TCP_BYTES: usize = 20;

/// Protocol numbers (IANA).
const IPV4_IN_IP: u8 = 4;
const TCP: u8 = 6;
const IPV6_IN_IP: u8 = 41;
const ROUTING: u8 = 43;
const DESTINATION_OPTIONS: u8 = 60;

/// Flags of the optional fields of a GRE header (RFC 2890 section
/// 2), 4 bytes each, and the bytes before them.
const GRE_CHECKSUM: u16 = 0x8000;
const GRE_KEY: u16 = 0x2000;
const GRE_SEQUENCE: u16 = 0x1000;
const GRE_BYTES: usize = 4;

/// Completes the checksums that the sender left to its device. For TCP and UDP, these are checksums
/// that equal the pseudo header's sum. For GRE, which has no pseudo header, they are 0. A complete
/// checksum that looks like this by chance stays valid.
pub fn complete(frame: &mut [u8]) {
    let layers = Layers::of(frame);
    // Inner checksums first: the sum around them covers the completed ones.
    for index in (1..layers.count).rev() {
        let [within, layer] = [layers.all[index - 1], layers.all[index]];
        let Some(field) = layer.checksum_at() else { continue };
        let left = !pseudo_header(frame, within, layer).finish();
        if frame.get(field..field + 2) == Some(&left.to_be_bytes()) {
            complete_at(&mut frame[..layer.end], layer.at, field - layer.at);
        }
    }
}

/// Completes a checksum for which the sender wrote only the pseudo header's
/// sum. It covers everything from `start` on, and is `at` bytes behind
/// `start`. Does nothing if that is beyond the frame.
pub fn complete_at(frame: &mut [u8], start: usize, at: usize) {
    let Some(covered) = frame.get_mut(start..).filter(|covered| at + 2 <= covered.len()) else {
        return;
    };
    let sum = not_none(checksum(covered));
    covered[at..at + 2].copy_from_slice(&sum.to_be_bytes());
}

/// For UDP, zero would mean that there is none (RFC 768).
/// For TCP and GRE, both values are equivalent.
fn not_none(checksum: u16) -> u16 {
    if checksum == 0 { 0xffff } else { checksum }
}

/// Segmentation of a large frame: each segment gets the
/// headers, updated, and its part of the payload.
#[derive(Clone, Copy, Debug)]
pub struct Cut {
    layers: Layers,
    /// Length of all headers, bytes.
    headers: usize,
    /// Length of the payload in each segment but the last, bytes.
    payload: usize,
    /// Offset of the next segment's payload, and the end of all payload.
    next: usize,
    end: usize,
    /// Count of segments so far.
    number: usize,
}

impl Cut {
    /// Starts to segment a frame whose TCP or UDP header is at `start`, with `payload` bytes per
    /// segment. `None` if there is no such header, if unsupported headers precede it, or if GRE
    /// with a sequence number does.
    pub fn new(frame: &[u8], start: usize, payload: usize) -> Option<Self> {
        let mut layers = Layers::of(frame);
        if layers.is_numbered {
            return None;
        }
        let last = layers.all().iter().position(|layer| layer.at == start)?;
        layers.count = last + 1;
        let Layer { protocol, end, .. } = layers.all[last];
        let header = match protocol {
            LayerProtocol::Tcp => usize::from(*frame.get(start + 12)? >> 4) * 4,
            LayerProtocol::Udp => udp::HEADER_BYTES,
            LayerProtocol::Ipv4 | LayerProtocol::Ipv6 | LayerProtocol::Gre => return None,
        };
        let headers = start + header;
        let whole = protocol == LayerProtocol::Udp || header >= TCP_BYTES;
        (whole && payload > 0 && headers < end).then_some(Self {
            layers,
            headers,
            payload,
            next: headers,
            end,
            number: 0,
        })
    }

    /// Returns the length of the longest segment's frame, bytes.
    pub fn longest(&self) -> usize {
        self.headers + self.payload.min(self.end - self.headers)
    }

    /// Returns the length of the next segment's frame, bytes; `None` at the end.
    pub fn next_bytes(&self) -> Option<usize> {
        let left = self.end - self.next;
        (left > 0).then_some(self.headers + self.payload.min(left))
    }

    /// Writes the next segment of `frame`, the frame to segment, into `segment`,
    /// which must have [`Cut::next_bytes`] bytes.
    pub fn write(&mut self, frame: &[u8], segment: &mut [u8]) -> Option<()> {
        let bytes = self.next_bytes()?;
        let payload = bytes - self.headers;
        let last = self.next + payload == self.end;
        let segment = segment.get_mut(..bytes)?;
        segment[..self.headers].copy_from_slice(frame.get(..self.headers)?);
        segment[self.headers..].copy_from_slice(frame.get(self.next..self.next + payload)?);
        for layer in &mut self.layers.all[..self.layers.count] {
            layer.end = bytes;
            layer.update(segment, self.number, self.next - self.headers, last)?;
        }
        for index in (1..self.layers.count).rev() {
            let [within, layer] = [self.layers.all[index - 1], self.layers.all[index]];
            let Some(field) = layer.checksum_at() else { continue };
            // An outer UDP header may have no checksum.
            let is_outer = index + 1 < self.layers.count;
            if is_outer
                && layer.protocol == LayerProtocol::Udp
                && segment.get(field..field + 2) == Some(&[0, 0])
            {
                continue;
            }
            segment.get_mut(field..field + 2)?.fill(0);
            let sum = pseudo_header(segment, within, layer).with(segment.get(layer.at..)?);
            let sum = not_none(sum.finish());
            segment.get_mut(field..field + 2)?.copy_from_slice(&sum.to_be_bytes());
        }
        self.next += payload;
        self.number += 1;
        Some(())
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LayerProtocol {
    Ipv4,
    Ipv6,
    Tcp,
    Udp,
    /// GRE with a checksum.
    Gre,
}

/// Header in a frame.
#[derive(Clone, Copy, Debug)]
struct Layer {
    protocol: LayerProtocol,
    at: usize,
    /// End of its packet.
    end: usize,
}

impl Layer {
    /// Returns the offset of its checksum, if that covers the payload.
    fn checksum_at(self) -> Option<usize> {
        match self.protocol {
            LayerProtocol::Tcp => Some(self.at + 16),
            LayerProtocol::Udp => Some(self.at + 6),
            LayerProtocol::Gre => Some(self.at + GRE_BYTES),
            LayerProtocol::Ipv4 | LayerProtocol::Ipv6 => None,
        }
    }

    /// Updates the header for a segment: the segment's number, the payload
    /// bytes before it, and true if it is the last.
    fn update(self, frame: &mut [u8], number: usize, before: usize, last: bool) -> Option<()> {
        let header = frame.get_mut(self.at..)?;
        let bytes = header.len();
        let mut put = |at: usize, word: u16| {
            header.get_mut(at..at + 2).map(|to| to.copy_from_slice(&word.to_be_bytes()))
        };
        match self.protocol {
            LayerProtocol::Ipv4 => {
                put(2, u16::try_from(bytes).ok()?)?;
                put(10, 0)?;
                let id = u16::from_be_bytes([*header.get(4)?, *header.get(5)?]);
                let id = id.wrapping_add(number as u16);
                header.get_mut(4..6)?.copy_from_slice(&id.to_be_bytes());
                let length = usize::from(*header.first()? & 0xf) * 4;
                let sum = checksum(header.get(..length)?);
                header.get_mut(10..12)?.copy_from_slice(&sum.to_be_bytes());
            }
            LayerProtocol::Ipv6 => {
                put(4, u16::try_from(bytes.checked_sub(ipv6::HEADER_BYTES)?).ok()?)?
            }
            LayerProtocol::Udp => put(4, u16::try_from(bytes).ok()?)?,
            LayerProtocol::Gre => {}
            LayerProtocol::Tcp => {
                let header = header.first_chunk_mut::<TCP_BYTES>()?;
                let first = u32::from_be_bytes([header[4], header[5], header[6], header[7]]);
                let sequence = first.wrapping_add(before as u32);
                header[4..8].copy_from_slice(&sequence.to_be_bytes());
                const FIN_PSH: u8 = 0x09;
                const CWR: u8 = 0x80;
                // CWR signals a single event (RFC 3168 section
                // 6.1.2), so only the first segment has it.
                header[13] &= !(if number > 0 { CWR } else { 0 });
                header[13] &= !(if last { 0 } else { FIN_PSH });
            }
        }
        Some(())
    }
}

/// Returns the pseudo header's sum (RFC 9293 section 3.1, RFC 8200 section 8.1) for `layer` in the
/// packet `within`. GRE has none.
fn pseudo_header(frame: &[u8], within: Layer, layer: Layer) -> Sum {
    if layer.protocol == LayerProtocol::Gre {
        return Sum::default();
    }
    let addresses = match within.protocol {
        LayerProtocol::Ipv4 => within.at + 12..within.at + 20,
        _ => within.at + 8..within.at + 40,
    };
    let protocol = if layer.protocol == LayerProtocol::Tcp { TCP } else { udp::PROTOCOL };
    let sum = Sum::default().with(frame.get(addresses).unwrap_or_default());
    sum.with_word(protocol.into()).with_word((layer.end - layer.at) as u16)
}

/// Headers of IP, TCP, UDP, and GRE with a checksum, outermost first.
#[derive(Clone, Copy, Debug)]
struct Layers {
    all: [Layer; LAYERS_MAX],
    count: usize,
    /// True if a GRE header has a sequence number.
    is_numbered: bool,
}

/// Next header to parse.
enum NextLayer {
    Ethernet(usize),
    Network(u16, usize),
    Transport(u8, usize),
}

impl Layers {
    fn all(&self) -> &[Layer] {
        &self.all[..self.count]
    }

    /// Finds a frame's headers, as far as they are supported and whole.
    fn of(frame: &[u8]) -> Self {
        let none = Layer { protocol: LayerProtocol::Ipv4, at: 0, end: 0 };
        let mut layers = Self { all: [none; LAYERS_MAX], count: 0, is_numbered: false };
        let (mut next, mut end) = (Some(NextLayer::Ethernet(0)), frame.len());
        for _ in 0..STEPS_MAX {
            let Some(now) = next else { break };
            next = layers.step(&now, frame, &mut end);
        }
        layers
    }

    /// Parses one header; returns the next one.
    fn step(&mut self, now: &NextLayer, frame: &[u8], end: &mut usize) -> Option<NextLayer> {
        let bytes = |at: usize| frame.get(at..*end);
        let word = |at: usize| Some(u16::from_be_bytes(*bytes(at)?.first_chunk()?));
        match *now {
            NextLayer::Ethernet(at) => {
                Some(NextLayer::Network(word(at + 12)?, at + ether::HEADER_BYTES))
            }
            NextLayer::Network(kind::VLAN | kind::QINQ, at) => {
                Some(NextLayer::Network(word(at + 2)?, at + 4))
            }
            NextLayer::Network(kind::IPV4, at) => {
                let ip = ipv4::Ipv4Packet::read(bytes(at)?)?;
                // Senders leave no work for fragments.
                if ip.is_fragment {
                    return None;
                }
                *end = at + ip.packet_bytes;
                self.push(LayerProtocol::Ipv4, at, *end)?;
                Some(NextLayer::Transport(ip.protocol, at + ip.header_bytes))
            }
            NextLayer::Network(kind::IPV6, at) => {
                let ip = ipv6::Ipv6Packet::parse(bytes(at)?)?;
                *end = at + ip.packet_bytes;
                self.push(LayerProtocol::Ipv6, at, *end)?;
                Some(NextLayer::Transport(ip.next_header, at + ipv6::HEADER_BYTES))
            }
            NextLayer::Network(..) => None,
            NextLayer::Transport(TCP, at) => {
                bytes(at)?.first_chunk::<TCP_BYTES>()?;
                self.push(LayerProtocol::Tcp, at, *end)?;
                None
            }
            NextLayer::Transport(udp::PROTOCOL, at) => {
                let payload = bytes(at + udp::HEADER_BYTES)?;
                self.push(LayerProtocol::Udp, at, *end)?;
                let header = payload.first_chunk::<{ vxlan::HEADER_BYTES }>()?;
                let is_vxlan = vxlan::parse(header).is_some()
                    && [header[1], header[2], header[3], header[7]] == [0; 4];
                let bytes = match is_vxlan {
                    true => vxlan::HEADER_BYTES,
                    false => geneve::parse(payload).ok().filter(|_| header[7] == 0)?,
                };
                Some(NextLayer::Ethernet(at + udp::HEADER_BYTES + bytes))
            }
            NextLayer::Transport(IPV4_IN_IP, at) => Some(NextLayer::Network(kind::IPV4, at)),
            NextLayer::Transport(IPV6_IN_IP, at) => Some(NextLayer::Network(kind::IPV6, at)),
            NextLayer::Transport(gre::PROTOCOL, at) => {
                let (flags, kind) = (word(at)?, word(at + 2)?);
                if flags & !(GRE_CHECKSUM | GRE_KEY | GRE_SEQUENCE) != 0 {
                    return None;
                }
                if flags & GRE_CHECKSUM != 0 {
                    self.push(LayerProtocol::Gre, at, *end)?;
                }
                self.is_numbered |= flags & GRE_SEQUENCE != 0;
                let inside = at + GRE_BYTES + 4 * flags.count_ones() as usize;
                match kind {
                    gre::ETHERNET => Some(NextLayer::Ethernet(inside)),
                    kind => Some(NextLayer::Network(kind, inside)),
                }
            }
            NextLayer::Transport(ipv6::HOP_BY_HOP | ROUTING | DESTINATION_OPTIONS, at) => {
                let [next, length] = *bytes(at)?.first_chunk()?;
                Some(NextLayer::Transport(next, at + 8 + 8 * usize::from(length)))
            }
            NextLayer::Transport(..) => None,
        }
    }

    fn push(&mut self, protocol: LayerProtocol, at: usize, end: usize) -> Option<()> {
        *self.all.get_mut(self.count)? = Layer { protocol, at, end };
        self.count += 1;
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Encapsulation of TCP or UDP.
    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Around {
        Nothing,
        Tag,
        /// VXLAN in IPv6 (true) or IPv4, with (true) or without a checksum.
        Vxlan(bool, bool),
        /// Geneve in the same variants, with an option.
        Geneve(bool, bool),
        /// GRE with or without a checksum, and with or without a sequence number.
        Gre(bool, bool),
        IpInIp,
    }

    fn ip(v6: bool, protocol: u8, inside: &[u8]) -> Vec<u8> {
        let mut packet;
        if v6 {
            packet = vec![0x60, 0, 0, 0, 0, 0, protocol, 64];
            packet[4..6].copy_from_slice(&(inside.len() as u16).to_be_bytes());
            packet.extend((0..32).map(|at| at * 7 + 1));
        } else {
            packet = vec![0x45, 0, 0, 0, 0xff, 0xfe, 0x40, 0, 64, protocol, 0, 0];
            packet.extend([10, 0, 1, 2, 10, 0, 2, 2]);
            packet[2..4].copy_from_slice(&(20 + inside.len() as u16).to_be_bytes());
            let sum = checksum(&packet);
            packet[10..12].copy_from_slice(&sum.to_be_bytes());
        }
        packet.extend(inside);
        packet
    }

    fn ethernet(v6: bool, tag: bool, packet: &[u8]) -> Vec<u8> {
        let mut frame = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2];
        if tag {
            frame.extend([0x81, 0, 0, 5]);
        }
        frame.extend(if v6 { [0x86, 0xdd] } else { [8, 0] });
        frame.extend(packet);
        frame
    }

    /// Returns a frame without its innermost checksum, and the offset of its innermost header.
    fn frame(around: Around, v6: bool, tcp: bool, payload: &[u8]) -> (Vec<u8>, usize) {
        let mut segment = vec![0x12, 0x34, 0, 80];
        if tcp {
            // With 12 bytes of options, CWR, PSH and FIN; the sequence number wraps.
            segment.extend([0xff, 0xff, 0xff, 0xf0, 0, 0, 0, 9, 0x80, 0x99, 1, 0, 0, 0, 0, 0]);
            segment.extend([1; 12]);
        } else {
            segment.extend((8 + payload.len() as u16).to_be_bytes());
            segment.extend([0, 0]);
        }
        segment.extend(payload);
        let protocol = if tcp { TCP } else { udp::PROTOCOL };
        let packet = ip(v6, protocol, &segment);
        let all = match around {
            Around::Nothing | Around::Tag => ethernet(v6, around == Around::Tag, &packet),
            Around::Vxlan(outer_v6, sum) | Around::Geneve(outer_v6, sum) => {
                let mut datagram = vec![200, 0, 0x12, 0xb5, 0, 0, 0, u8::from(sum)];
                match around {
                    Around::Vxlan(..) => datagram.extend(vxlan::emit(7)),
                    _ => datagram.extend([1, 0, 0x65, 0x58, 0, 0, 7, 0, 1, 2, 3, 0]),
                }
                datagram.extend(ethernet(v6, false, &packet));
                let length = datagram.len() as u16;
                datagram[4..6].copy_from_slice(&length.to_be_bytes());
                ethernet(outer_v6, false, &ip(outer_v6, udp::PROTOCOL, &datagram))
            }
            Around::Gre(sum, number) => {
                let flags = 0x20 | u8::from(sum) << 7 | u8::from(number) << 4;
                let kind = if v6 { kind::IPV6 } else { kind::IPV4 }.to_be_bytes();
                let mut inside = vec![flags, 0, kind[0], kind[1]];
                // The checksum precedes the key, and the sequence number follows it.
                inside.extend([0; 4].iter().filter(|_| sum));
                inside.extend([0, 0, 0, 9]);
                inside.extend([0, 0, 0, 3].iter().filter(|_| number));
                inside.extend(&packet);
                ethernet(false, false, &ip(false, gre::PROTOCOL, &inside))
            }
            Around::IpInIp => {
                let protocol = if v6 { IPV6_IN_IP } else { IPV4_IN_IP };
                ethernet(true, false, &ip(true, protocol, &packet))
            }
        };
        let start = all.len() - segment.len();
        (all, start)
    }

    /// Checks all checksums and lengths of a frame, with etherparse where that parses it. Returns
    /// the payload and the TCP sequence number.
    fn checked(around: Around, bytes: &[u8]) -> (Vec<u8>, u32) {
        use etherparse::{NetSlice, SlicedPacket, TransportSlice};
        let sliced = SlicedPacket::from_ethernet(bytes).expect("a frame");
        let (net, transport) = (sliced.net.expect("IP"), sliced.transport);
        if let NetSlice::Ipv4(packet) = &net {
            let header = packet.header().to_header();
            assert_eq!(header.header_checksum, header.calc_header_checksum());
            assert_eq!(usize::from(header.total_len) + 14, bytes.len() - tag_bytes(around));
        }
        match (around, transport) {
            (Around::Gre(..) | Around::IpInIp, _) => {
                let ip = bytes.len() - net.ip_payload_ref().expect("IP").payload.len();
                let (at, v6) = match around {
                    Around::Gre(sum, number) => {
                        assert!(!sum || checksum(&bytes[ip..]) == 0);
                        let more = 4 * (usize::from(sum) + usize::from(number));
                        (ip + 8 + more, bytes[ip + 2] == 0x86)
                    }
                    _ => (ip, bytes[ip] >> 4 == 6),
                };
                checked(Around::Nothing, &ethernet(v6, false, &bytes[at..]))
            }
            (
                Around::Vxlan(_, sum) | Around::Geneve(_, sum),
                Some(TransportSlice::Udp(datagram)),
            ) => {
                let header = datagram.to_header();
                match sum {
                    true => assert_eq!(header.checksum, udp_sum(&net, &datagram)),
                    false => assert_eq!(header.checksum, 0),
                }
                let option = if matches!(around, Around::Geneve(..)) { 4 } else { 0 };
                checked(Around::Nothing, &datagram.payload()[vxlan::HEADER_BYTES + option..])
            }
            (_, Some(TransportSlice::Udp(datagram))) => {
                assert_eq!(datagram.to_header().checksum, udp_sum(&net, &datagram));
                (datagram.payload().to_vec(), 0)
            }
            (_, Some(TransportSlice::Tcp(segment))) => {
                let header = segment.to_header();
                let sum = match &net {
                    NetSlice::Ipv4(ip) => {
                        header.calc_checksum_ipv4(&ip.header().to_header(), segment.payload())
                    }
                    NetSlice::Ipv6(ip) => {
                        header.calc_checksum_ipv6(&ip.header().to_header(), segment.payload())
                    }
                    other => panic!("{other:?}"),
                };
                assert!(header.checksum == sum.expect("a length") || header.checksum == 0xffff);
                (segment.payload().to_vec(), header.sequence_number)
            }
            (around, other) => panic!("{around:?} {other:?}"),
        }
    }

    fn udp_sum(net: &etherparse::NetSlice<'_>, datagram: &etherparse::UdpSlice<'_>) -> u16 {
        let header = datagram.to_header();
        let sum = match net {
            etherparse::NetSlice::Ipv4(ip) => {
                header.calc_checksum_ipv4(&ip.header().to_header(), datagram.payload())
            }
            etherparse::NetSlice::Ipv6(ip) => {
                header.calc_checksum_ipv6(&ip.header().to_header(), datagram.payload())
            }
            other => panic!("{other:?}"),
        };
        sum.expect("a length")
    }

    fn tag_bytes(around: Around) -> usize {
        if around == Around::Tag { 4 } else { 0 }
    }

    /// Writes the checksum that a sender leaves in the header at `start`.
    fn leave(frame: &mut [u8], start: usize) {
        let layers = Layers::of(frame);
        let index = layers.all().iter().position(|layer| layer.at == start).expect("a header");
        let [within, layer] = [layers.all[index - 1], layers.all[index]];
        let field = layer.checksum_at().expect("TCP or UDP");
        let left = !pseudo_header(frame, within, layer).finish();
        frame[field..field + 2].copy_from_slice(&left.to_be_bytes());
    }

    fn arounds() -> impl Strategy<Value = Around> {
        prop_oneof![
            Just(Around::Nothing),
            Just(Around::Tag),
            any::<(bool, bool)>().prop_map(|(v6, sum)| Around::Vxlan(v6, sum)),
            any::<(bool, bool)>().prop_map(|(v6, sum)| Around::Geneve(v6, sum)),
            any::<(bool, bool)>().prop_map(|(sum, number)| Around::Gre(sum, number)),
            Just(Around::IpInIp),
        ]
    }

    proptest! {
        #[test]
        fn offload_completes_only_partial_checksums(
            (around, v6, tcp) in (arounds(), any::<bool>(), any::<bool>()),
            payload in proptest::collection::vec(any::<u8>(), 0..1400),
            outer_left: bool,
        ) {
            let (mut bytes, start) = frame(around, v6, tcp, &payload);
            leave(&mut bytes, start);
            // The outer checksum covers the inner one as completed (lco_csum of
            // include/linux/skbuff.h), or is the incomplete one while the inner one is complete.
            let outer = match around {
                Around::Vxlan(true, true) | Around::Geneve(true, true) => Some((54, 6)),
                Around::Vxlan(false, true) | Around::Geneve(false, true) => Some((34, 6)),
                Around::Gre(true, _) => Some((34, 4)),
                _ => None,
            };
            if let Some((outer, field)) = outer {
                let field = outer + field;
                let mut whole = bytes.clone();
                complete(&mut whole);
                leave(&mut whole, outer);
                if outer_left {
                    bytes = whole;
                } else {
                    complete(&mut whole);
                    bytes[field..field + 2].copy_from_slice(&whole[field..field + 2]);
                }
            }
            complete(&mut bytes);
            prop_assert_eq!(checked(around, &bytes).0, payload);
            let whole = bytes.clone();
            complete(&mut bytes);
            prop_assert_eq!(&bytes, &whole);
            // A wrong checksum is not an incomplete one.
            let field = start + if tcp { 16 } else { 6 };
            bytes[field] ^= 0x55;
            let wrong = bytes.clone();
            complete(&mut bytes);
            prop_assert_eq!(bytes, wrong);
        }

        #[test]
        fn segments_carry_all_payload_and_valid_headers(
            (around, v6, tcp) in (arounds(), any::<bool>(), any::<bool>()),
            bytes in 1usize..60_000,
            payload in 500usize..1400,
        ) {
            let all: Vec<u8> = (0..bytes).map(|at| (at ^ (at >> 8)) as u8).collect();
            let (long, start) = frame(around, v6, tcp, &all);
            if matches!(around, Around::Gre(_, true)) {
                // Each segment would need a number of its own.
                prop_assert!(Cut::new(&long, start, payload).is_none());
                return Ok(());
            }
            let mut cut = Cut::new(&long, start, payload).expect("known headers");
            let mut got = Vec::new();
            while let Some(length) = cut.next_bytes() {
                prop_assert!(length <= cut.longest());
                let mut segment = vec![0; length];
                cut.write(&long, &mut segment).expect("room");
                let (part, number) = checked(around, &segment);
                if tcp {
                    prop_assert_eq!(number, 0xffff_fff0u32.wrapping_add(got.len() as u32));
                    let flags = segment[length - part.len() - 32 + 13];
                    let (first, last) = (got.is_empty(), cut.next_bytes().is_none());
                    prop_assert_eq!(flags & 0x10, 0x10);
                    prop_assert_eq!(flags & 0x80 != 0, first);
                    prop_assert_eq!(flags & 0x09 != 0, last);
                }
                prop_assert_eq!(part.len(), payload.min(bytes - got.len()));
                got.extend(part);
            }
            prop_assert_eq!(got, all);
        }

        #[test]
        fn noise_never_panics(
            (around, v6, tcp) in (arounds(), any::<bool>(), any::<bool>()),
            noise in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..8),
            end: prop::sample::Index,
            payload in 0usize..100,
        ) {
            let (mut bytes, start) = frame(around, v6, tcp, &[7; 200]);
            for (at, value) in noise {
                let at = at.index(bytes.len());
                bytes[at] = value;
            }
            bytes.truncate(end.index(bytes.len() + 1));
            if let Some(mut cut) = Cut::new(&bytes, start, payload) {
                let mut segments = 0;
                while let Some(length) = cut.next_bytes() {
                    if cut.write(&bytes, &mut vec![0; length]).is_none() {
                        break;
                    }
                    segments += 1;
                }
                prop_assert!(segments <= 200);
            }
            complete_at(&mut bytes, start, payload);
            complete(&mut bytes);
        }
    }

    #[test]
    fn frames_with_unknown_headers_are_not_segmented() {
        let (long, start) = frame(Around::Nothing, false, true, &[1; 3000]);
        assert!(Cut::new(&long, start + 1, 1000).is_none());
        assert!(Cut::new(&long, 14, 1000).is_none(), "IP is not cut");
        assert!(Cut::new(&long, start, 0).is_none());
    }
}
