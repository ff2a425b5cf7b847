//! What a sender left to its device: checksums to complete, long segments to cut.
//!
//! A kernel leaves both to any device that says it can do them. Virtual devices (veth, bridge, VXLAN over
//! them) say so, and pass frames on as they are: who takes them there has to do it. [`complete`] finds such
//! checksums by themselves, [`complete_at`] and [`Cut`] want to be told where they are, as `struct
//! virtio_net_hdr` does.
//!
//! Looked into are VLAN tags, IPv4, IPv6, TCP and UDP, and what is in VXLAN, Geneve, GRE and IP in IP.
//! Never panics, whatever the bytes.
//! Limits: [`LAYERS_MAX`] headers, [`STEPS_MAX`] steps to find them.
//! Source: Linux Documentation/networking/checksum-offloads.rst and segmentation-offloads.rst,
//! skb_checksum_help of net/core/dev.c, net/ipv4/tcp_offload.c, net/ipv4/udp_offload.c, gre_build_header of
//! include/net/gre.h; VIRTIO 1.2 section 5.1.6.

use crate::checksum::{Sum, checksum};
use crate::ether::kind;
use crate::{ether, geneve, gre, ipv4, ipv6, udp, vxlan};

/// Headers of IP, TCP and UDP that are looked for in a frame.
pub const LAYERS_MAX: usize = 8;

/// Headers of any kind that are passed on the way.
pub const STEPS_MAX: usize = 16;

/// Bytes of a TCP header without options (RFC 9293 section 3.1).
const TCP_BYTES: usize = 20;

/// Protocol numbers (IANA).
const IPV4_IN_IP: u8 = 4;
const TCP: u8 = 6;
const IPV6_IN_IP: u8 = 41;
const ROUTING: u8 = 43;
const DESTINATION_OPTIONS: u8 = 60;

/// Flags of what a GRE header has (RFC 2890 section 2), 4 bytes each, and the bytes before that.
const GRE_CHECKSUM: u16 = 0x8000;
const GRE_KEY: u16 = 0x2000;
const GRE_SEQUENCE: u16 = 0x1000;
const GRE_BYTES: usize = 4;

/// Completes the checksums that the sender left to its device: those of TCP and UDP that are the sum of the
/// pseudo header alone, and those of GRE, which has none, that are 0. It makes them what they have to be, so one
/// that is whole and looks the same by chance stays as good as it is.
pub fn complete(frame: &mut [u8]) {
    let layers = Layers::of(frame);
    // What is inside first: the sum around it counts what is completed.
    for index in (1..layers.count).rev() {
        let [within, layer] = [layers.all[index - 1], layers.all[index]];
        let Some(field) = layer.checksum_at() else { continue };
        let left = !pseudo_header(frame, within, layer).finish();
        if frame.get(field..field + 2) == Some(&left.to_be_bytes()) {
            complete_at(&mut frame[..layer.end], layer.at, field - layer.at);
        }
    }
}

/// Completes a checksum of which the sender has written the pseudo header's part: that of all from
/// `start`, at `at` after that. Does nothing where that is beyond the frame.
pub fn complete_at(frame: &mut [u8], start: usize, at: usize) {
    let Some(covered) = frame.get_mut(start..).filter(|covered| at + 2 <= covered.len()) else {
        return;
    };
    let sum = not_none(checksum(covered));
    covered[at..at + 2].copy_from_slice(&sum.to_be_bytes());
}

/// Of UDP, zero would mean that there is none (RFC 768); of TCP and GRE both mean the same.
fn not_none(checksum: u16) -> u16 {
    if checksum == 0 { 0xffff } else { checksum }
}

/// How a frame of many segments is cut: each gets the headers, brought up to date, and its part of the
/// payload.
#[derive(Clone, Copy, Debug)]
pub struct Cut {
    layers: Layers,
    /// Bytes of all headers.
    headers: usize,
    /// Bytes of payload in each segment but the last.
    payload: usize,
    /// Where the next segment's payload begins, and where all payload ends.
    next: usize,
    end: usize,
    /// Segments so far.
    number: usize,
}

impl Cut {
    /// Of a frame whose TCP or UDP header is at `start`, into segments of `payload` bytes. `None` if there
    /// is no such header, or the way to it has others than are known here, or GRE with a number.
    pub fn new(frame: &[u8], start: usize, payload: usize) -> Option<Self> {
        let mut layers = Layers::of(frame);
        if layers.is_numbered {
            return None;
        }
        let last = layers.all().iter().position(|layer| layer.at == start)?;
        layers.count = last + 1;
        let Layer { what, end, .. } = layers.all[last];
        let header = match what {
            What::Tcp => usize::from(*frame.get(start + 12)? >> 4) * 4,
            What::Udp => udp::HEADER_BYTES,
            What::Ipv4 | What::Ipv6 | What::Gre => return None,
        };
        let headers = start + header;
        let whole = what == What::Udp || header >= TCP_BYTES;
        (whole && payload > 0 && headers < end).then_some(Self {
            layers,
            headers,
            payload,
            next: headers,
            end,
            number: 0,
        })
    }

    /// Bytes of the longest segment's frame.
    pub fn longest(&self) -> usize {
        self.headers + self.payload.min(self.end - self.headers)
    }

    /// Bytes of the next segment's frame; `None`: that was all.
    pub fn next_bytes(&self) -> Option<usize> {
        let left = self.end - self.next;
        (left > 0).then_some(self.headers + self.payload.min(left))
    }

    /// Writes the next segment of `frame`, the one that is cut, into `segment`, which has
    /// [`Cut::next_bytes`].
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
            // Of UDP around what is cut there may be none.
            let is_outer = index + 1 < self.layers.count;
            if is_outer && layer.what == What::Udp && segment.get(field..field + 2) == Some(&[0, 0])
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
enum What {
    Ipv4,
    Ipv6,
    Tcp,
    Udp,
    /// With a checksum.
    Gre,
}

/// A header in a frame.
#[derive(Clone, Copy, Debug)]
struct Layer {
    what: What,
    at: usize,
    /// Where its packet ends.
    end: usize,
}

impl Layer {
    /// Where its checksum is that covers what comes after it.
    fn checksum_at(self) -> Option<usize> {
        match self.what {
            What::Tcp => Some(self.at + 16),
            What::Udp => Some(self.at + 6),
            What::Gre => Some(self.at + GRE_BYTES),
            What::Ipv4 | What::Ipv6 => None,
        }
    }

    /// Makes it that of a segment: which one, and how much payload is before it.
    fn update(self, frame: &mut [u8], number: usize, before: usize, last: bool) -> Option<()> {
        let header = frame.get_mut(self.at..)?;
        let bytes = header.len();
        let mut put = |at: usize, word: u16| {
            header.get_mut(at..at + 2).map(|to| to.copy_from_slice(&word.to_be_bytes()))
        };
        match self.what {
            What::Ipv4 => {
                put(2, u16::try_from(bytes).ok()?)?;
                put(10, 0)?;
                let id = u16::from_be_bytes([*header.get(4)?, *header.get(5)?]);
                let id = id.wrapping_add(number as u16);
                header.get_mut(4..6)?.copy_from_slice(&id.to_be_bytes());
                let length = usize::from(*header.first()? & 0xf) * 4;
                let sum = checksum(header.get(..length)?);
                header.get_mut(10..12)?.copy_from_slice(&sum.to_be_bytes());
            }
            What::Ipv6 => put(4, u16::try_from(bytes.checked_sub(ipv6::HEADER_BYTES)?).ok()?)?,
            What::Udp => put(4, u16::try_from(bytes).ok()?)?,
            What::Gre => {}
            What::Tcp => {
                let header = header.first_chunk_mut::<TCP_BYTES>()?;
                let first = u32::from_be_bytes([header[4], header[5], header[6], header[7]]);
                let sequence = first.wrapping_add(before as u32);
                header[4..8].copy_from_slice(&sequence.to_be_bytes());
                const FIN_PSH: u8 = 0x09;
                const CWR: u8 = 0x80;
                // CWR tells of one event (RFC 3168 section 6.1.2): the first says it.
                header[13] &= !(if number > 0 { CWR } else { 0 });
                header[13] &= !(if last { 0 } else { FIN_PSH });
            }
        }
        Some(())
    }
}

/// The sum of the pseudo header (RFC 9293 section 3.1, RFC 8200 section 8.1) of `layer` in the packet `within`.
/// GRE has none.
fn pseudo_header(frame: &[u8], within: Layer, layer: Layer) -> Sum {
    if layer.what == What::Gre {
        return Sum::default();
    }
    let addresses = match within.what {
        What::Ipv4 => within.at + 12..within.at + 20,
        _ => within.at + 8..within.at + 40,
    };
    let protocol = if layer.what == What::Tcp { TCP } else { udp::PROTOCOL };
    let sum = Sum::default().with(frame.get(addresses).unwrap_or_default());
    sum.with_word(protocol.into()).with_word((layer.end - layer.at) as u16)
}

/// Headers of IP, TCP, UDP, and GRE with a checksum, outermost first.
#[derive(Clone, Copy, Debug)]
struct Layers {
    all: [Layer; LAYERS_MAX],
    count: usize,
    /// There is GRE that numbers its packets.
    is_numbered: bool,
}

/// A header that is to be looked at.
enum Next {
    Ethernet(usize),
    Network(u16, usize),
    Transport(u8, usize),
}

impl Layers {
    fn all(&self) -> &[Layer] {
        &self.all[..self.count]
    }

    /// Those of a frame, as far as they are known and whole.
    fn of(frame: &[u8]) -> Self {
        let none = Layer { what: What::Ipv4, at: 0, end: 0 };
        let mut layers = Self { all: [none; LAYERS_MAX], count: 0, is_numbered: false };
        let (mut next, mut end) = (Some(Next::Ethernet(0)), frame.len());
        for _ in 0..STEPS_MAX {
            let Some(now) = next else { break };
            next = layers.step(&now, frame, &mut end);
        }
        layers
    }

    /// Takes one header in; what comes after it.
    fn step(&mut self, now: &Next, frame: &[u8], end: &mut usize) -> Option<Next> {
        let bytes = |at: usize| frame.get(at..*end);
        let word = |at: usize| Some(u16::from_be_bytes(*bytes(at)?.first_chunk()?));
        match *now {
            Next::Ethernet(at) => Some(Next::Network(word(at + 12)?, at + ether::HEADER_BYTES)),
            Next::Network(kind::VLAN | kind::QINQ, at) => {
                Some(Next::Network(word(at + 2)?, at + 4))
            }
            Next::Network(kind::IPV4, at) => {
                let ip = ipv4::Header::read(bytes(at)?)?;
                // Of a fragment nobody leaves anything to a device.
                if ip.is_fragment {
                    return None;
                }
                *end = at + ip.packet_bytes;
                self.push(What::Ipv4, at, *end)?;
                Some(Next::Transport(ip.protocol, at + ip.header_bytes))
            }
            Next::Network(kind::IPV6, at) => {
                let ip = ipv6::Header::parse(bytes(at)?)?;
                *end = at + ip.packet_bytes;
                self.push(What::Ipv6, at, *end)?;
                Some(Next::Transport(ip.next_header, at + ipv6::HEADER_BYTES))
            }
            Next::Network(..) => None,
            Next::Transport(TCP, at) => {
                bytes(at)?.first_chunk::<TCP_BYTES>()?;
                self.push(What::Tcp, at, *end)?;
                None
            }
            Next::Transport(udp::PROTOCOL, at) => {
                let payload = bytes(at + udp::HEADER_BYTES)?;
                self.push(What::Udp, at, *end)?;
                let header = payload.first_chunk::<{ vxlan::HEADER_BYTES }>()?;
                let is_vxlan = vxlan::parse(header).is_some()
                    && [header[1], header[2], header[3], header[7]] == [0; 4];
                let bytes = match is_vxlan {
                    true => vxlan::HEADER_BYTES,
                    false => geneve::parse(payload).ok().filter(|_| header[7] == 0)?,
                };
                Some(Next::Ethernet(at + udp::HEADER_BYTES + bytes))
            }
            Next::Transport(IPV4_IN_IP, at) => Some(Next::Network(kind::IPV4, at)),
            Next::Transport(IPV6_IN_IP, at) => Some(Next::Network(kind::IPV6, at)),
            Next::Transport(gre::PROTOCOL, at) => {
                let (flags, kind) = (word(at)?, word(at + 2)?);
                if flags & !(GRE_CHECKSUM | GRE_KEY | GRE_SEQUENCE) != 0 {
                    return None;
                }
                if flags & GRE_CHECKSUM != 0 {
                    self.push(What::Gre, at, *end)?;
                }
                self.is_numbered |= flags & GRE_SEQUENCE != 0;
                let inside = at + GRE_BYTES + 4 * flags.count_ones() as usize;
                match kind {
                    gre::ETHERNET => Some(Next::Ethernet(inside)),
                    kind => Some(Next::Network(kind, inside)),
                }
            }
            Next::Transport(ipv6::HOP_BY_HOP | ROUTING | DESTINATION_OPTIONS, at) => {
                let [next, length] = *bytes(at)?.first_chunk()?;
                Some(Next::Transport(next, at + 8 + 8 * usize::from(length)))
            }
            Next::Transport(..) => None,
        }
    }

    fn push(&mut self, what: What, at: usize, end: usize) -> Option<()> {
        *self.all.get_mut(self.count)? = Layer { what, at, end };
        self.count += 1;
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// What is around TCP or UDP.
    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Around {
        Nothing,
        Tag,
        /// VXLAN in IPv4 or IPv6, with a checksum or none.
        Vxlan(bool, bool),
        /// The same, with an option.
        Geneve(bool, bool),
        /// With a checksum, a number, or neither.
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

    /// A frame without its inmost checksum, and where its inmost header is.
    fn frame(around: Around, v6: bool, tcp: bool, payload: &[u8]) -> (Vec<u8>, usize) {
        let mut segment = vec![0x12, 0x34, 0, 80];
        if tcp {
            // With 12 bytes of options, CWR, PSH and FIN; the sequence wraps.
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
                // The sum stands before the key, the number behind it.
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

    /// Payload of a frame all of whose checksums and lengths are right, by another's code where it looks
    /// into it; the number of its TCP segment.
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
        fn what_is_left_is_completed_and_what_is_whole_stays(
            (around, v6, tcp) in (arounds(), any::<bool>(), any::<bool>()),
            payload in proptest::collection::vec(any::<u8>(), 0..1400),
            outer_left: bool,
        ) {
            let (mut bytes, start) = frame(around, v6, tcp, &payload);
            leave(&mut bytes, start);
            // The outer sum counts the inner one as completed (lco_csum of include/linux/skbuff.h), or is
            // what is left while the inner one is whole.
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
            // A wrong one is nothing that was left.
            let field = start + if tcp { 16 } else { 6 };
            bytes[field] ^= 0x55;
            let wrong = bytes.clone();
            complete(&mut bytes);
            prop_assert_eq!(bytes, wrong);
        }

        #[test]
        fn segments_have_all_payload_and_right_headers(
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
    fn what_has_no_known_header_is_not_cut() {
        let (long, start) = frame(Around::Nothing, false, true, &[1; 3000]);
        assert!(Cut::new(&long, start + 1, 1000).is_none());
        assert!(Cut::new(&long, 14, 1000).is_none(), "IP is not cut");
        assert!(Cut::new(&long, start, 0).is_none());
    }
}
