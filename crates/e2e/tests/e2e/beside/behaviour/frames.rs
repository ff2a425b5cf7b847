//! Frames of the cases, byte by byte, so that any field can be invalid.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use pdp_wire::checksum::checksum;
use pdp_wire::ether::kind;

pub type Mac = [u8; 6];

/// Default payload of a packet, bytes.
const PAYLOAD_BYTES: usize = 16;

pub const UDP: u8 = 17;
pub const TCP: u8 = 6;
pub const ICMP: u8 = 1;
pub const ICMPV6: u8 = 58;
pub const FRAGMENT: u8 = 44;

/// MAC address of the outside machine with this address
/// behind a port. The last three bytes make it unique.
pub fn mac_of(port: usize, address: &[u8]) -> Mac {
    let [.., a, b, c] = *address else { return [2; 6] };
    [2, 4 + u8::from(address.len() == 16), port as u8, a, b, c]
}

/// Sender of a case's frames, on the link of port 0.
#[derive(Clone, Copy)]
pub struct Host {
    pub v4: Ipv4Addr,
    pub v6: Ipv6Addr,
    /// MAC addresses of the router's ports.
    pub router: [Mac; 4],
}

/// Headers before a packet.
#[derive(Clone)]
pub struct Link {
    /// Port that receives the frame.
    pub port: usize,
    pub to: Mac,
    pub from: Mac,
    /// Tags and anything else between the addresses and the type.
    pub tags: Vec<u8>,
    pub kind: u16,
    /// Number of bytes behind the packet.
    pub padding: usize,
    /// Length after which the frame is cut.
    pub cut: Option<usize>,
}

impl Link {
    fn of(host: &Host, from: Mac, kind: u16) -> Self {
        let to = host.router[0];
        Self { port: 0, to, from, tags: Vec::new(), kind, padding: 0, cut: None }
    }

    /// Selects another port.
    pub fn enter(&mut self, host: &Host, port: usize) {
        (self.port, self.to) = (port, host.router[port]);
    }

    fn frame(&self, packet: Vec<u8>) -> (usize, Vec<u8>) {
        let kind = self.kind.to_be_bytes();
        let mut frame = [&self.to[..], &self.from, &self.tags, &kind, &packet].concat();
        frame.extend(std::iter::repeat_n(0xee, self.padding));
        frame.truncate(self.cut.unwrap_or(usize::MAX));
        (self.port, frame)
    }
}

/// IPv4 packet. `None` fields get correct values.
#[derive(Clone)]
pub struct V4 {
    pub link: Link,
    pub version: Option<u8>,
    /// In words of 32 bits.
    pub header_words: Option<u8>,
    pub tos: u8,
    pub total: Option<u16>,
    pub id: u16,
    /// Flags and offset.
    pub fragment: u16,
    pub ttl: u8,
    pub protocol: u8,
    pub checksum: Option<fn(u16) -> u16>,
    pub source: Ipv4Addr,
    pub destination: Ipv4Addr,
    pub options: Vec<u8>,
    /// Whole segment; its checksum is corrected unless `wrong`.
    pub segment: Vec<u8>,
    pub wrong: bool,
}

pub const DF: u16 = 0x4000;
pub const MF: u16 = 0x2000;

impl V4 {
    /// A datagram of UDP from the host to 10.1.0.9, behind port 1.
    pub fn new(host: &Host) -> Self {
        Self {
            link: Link::of(host, mac_of(0, &host.v4.octets()), kind::IPV4),
            version: None,
            header_words: None,
            tos: 0,
            total: None,
            id: 0x4d2,
            fragment: 0,
            ttl: 64,
            protocol: UDP,
            checksum: None,
            source: host.v4,
            destination: Ipv4Addr::new(10, 1, 0, 9),
            options: Vec::new(),
            segment: udp(PAYLOAD_BYTES),
            wrong: false,
        }
    }

    #[track_caller]
    pub fn to(&mut self, address: &str) -> &mut Self {
        self.destination = address.parse().expect("an address");
        self
    }

    #[track_caller]
    pub fn from(&mut self, address: &str) -> &mut Self {
        self.source = address.parse().expect("an address");
        self.link.from = mac_of(self.link.port, &self.source.octets());
        self
    }

    /// Sets the total length of the packet.
    pub fn bytes(&mut self, bytes: usize) -> &mut Self {
        self.segment = udp(bytes - 28 - self.options.len());
        self
    }

    pub fn segment(&mut self, protocol: u8, segment: Vec<u8>) -> &mut Self {
        (self.protocol, self.segment) = (protocol, segment);
        self
    }

    /// Ends a chain of changes in one line.
    pub fn done(&mut self) {}

    pub fn frame(&self) -> (usize, Vec<u8>) {
        let words = self.header_words.unwrap_or(5 + self.options.len().div_ceil(4) as u8);
        let first = self.version.unwrap_or(4) << 4 | words;
        let mut options = self.options.clone();
        options.resize(options.len().next_multiple_of(4), 0);
        let bytes = 20 + options.len() + self.segment.len();
        let mut packet = vec![first, self.tos];
        packet.extend(self.total.unwrap_or(bytes as u16).to_be_bytes());
        packet.extend(self.id.to_be_bytes());
        packet.extend(self.fragment.to_be_bytes());
        packet.extend([self.ttl, self.protocol, 0, 0]);
        packet.extend(self.source.octets());
        packet.extend(self.destination.octets());
        packet.extend(&options);
        let sum = checksum(&packet);
        let sum = self.checksum.map_or(sum, |change| change(sum));
        packet[10..12].copy_from_slice(&sum.to_be_bytes());
        let mut segment = self.segment.clone();
        if !self.wrong && self.fragment & 0x3fff == 0 {
            let [source, destination] = [self.source.octets(), self.destination.octets()];
            let pseudo = [&source[..], &destination, &[0, self.protocol]].concat();
            sum_up(&mut segment, self.protocol, pseudo);
        }
        packet.extend(segment);
        self.link.frame(packet)
    }
}

/// IPv6 packet. `None` fields get correct values.
#[derive(Clone)]
pub struct V6 {
    pub link: Link,
    pub version: Option<u8>,
    /// Traffic class and flow label.
    pub flow: u32,
    pub payload: Option<u16>,
    pub hop_limit: u8,
    pub source: Ipv6Addr,
    pub destination: Ipv6Addr,
    /// Extension headers with their numbers. Lengths and next headers get correct values.
    pub extensions: Vec<(u8, Vec<u8>)>,
    pub protocol: u8,
    pub segment: Vec<u8>,
    pub wrong: bool,
}

impl V6 {
    /// A datagram of UDP from the host to fd00:1::9, behind port 1.
    pub fn new(host: &Host) -> Self {
        Self {
            link: Link::of(host, mac_of(0, &host.v6.octets()), kind::IPV6),
            version: None,
            flow: 0,
            payload: None,
            hop_limit: 64,
            source: host.v6,
            destination: Ipv6Addr::new(0xfd00, 1, 0, 0, 0, 0, 0, 9),
            extensions: Vec::new(),
            protocol: UDP,
            segment: udp(PAYLOAD_BYTES),
            wrong: false,
        }
    }

    #[track_caller]
    pub fn to(&mut self, address: &str) -> &mut Self {
        self.destination = address.parse().expect("an address");
        self
    }

    #[track_caller]
    pub fn from(&mut self, address: &str) -> &mut Self {
        self.source = address.parse().expect("an address");
        self.link.from = mac_of(self.link.port, &self.source.octets());
        self
    }

    pub fn bytes(&mut self, bytes: usize) -> &mut Self {
        self.segment = udp(bytes - 48);
        self
    }

    pub fn segment(&mut self, protocol: u8, segment: Vec<u8>) -> &mut Self {
        (self.protocol, self.segment) = (protocol, segment);
        self
    }

    /// Adds an extension header, given its contents after the first two bytes.
    pub fn extension(&mut self, number: u8, rest: &[u8]) -> &mut Self {
        self.extensions.push((number, rest.to_vec()));
        self
    }

    /// Ends a chain of changes in one line.
    pub fn done(&mut self) {}

    pub fn frame(&self) -> (usize, Vec<u8>) {
        let mut next = self.protocol;
        let mut headers = Vec::new();
        for (number, rest) in self.extensions.iter().rev() {
            // A fragment header has no length.
            let words = if *number == FRAGMENT { 0 } else { (rest.len() + 2) / 8 - 1 };
            let header = [&[next, words as u8], &rest[..]].concat();
            headers.splice(0..0, header);
            next = *number;
        }
        let mut segment = self.segment.clone();
        if !self.wrong {
            let [source, destination] = [self.source.octets(), self.destination.octets()];
            let pseudo = [&source[..], &destination, &[0, self.protocol]].concat();
            sum_up(&mut segment, self.protocol, pseudo);
        }
        let bytes = headers.len() + segment.len();
        let first = u32::from(self.version.unwrap_or(6)) << 28 | self.flow;
        let mut packet = first.to_be_bytes().to_vec();
        packet.extend(self.payload.unwrap_or(bytes as u16).to_be_bytes());
        packet.extend([next, self.hop_limit]);
        packet.extend(self.source.octets());
        packet.extend(self.destination.octets());
        packet.extend(headers);
        packet.extend(segment);
        self.link.frame(packet)
    }
}

/// Writes the checksum into a segment.
fn sum_up(segment: &mut [u8], protocol: u8, pseudo: Vec<u8>) {
    let at = match protocol {
        UDP => 6,
        TCP => 16,
        ICMP | ICMPV6 => 2,
        _ => return,
    };
    let Some(place) = segment.get_mut(at..at + 2) else { return };
    place.fill(0);
    let length = (segment.len() as u16).to_be_bytes();
    let pseudo = if protocol == ICMP { Vec::new() } else { [&pseudo[..], &length].concat() };
    let sum = checksum(&[&pseudo, &*segment].concat());
    segment[at..at + 2].copy_from_slice(&sum.to_be_bytes());
}

/// Datagram from port 1000 to port 2000, with `bytes` bytes of payload.
pub fn udp(bytes: usize) -> Vec<u8> {
    udp_ports(1000, 2000, bytes)
}

pub fn udp_ports(from: u16, to: u16, bytes: usize) -> Vec<u8> {
    let head = [from, to, 8 + bytes as u16, 0];
    let mut segment: Vec<u8> = head.iter().flat_map(|word| word.to_be_bytes()).collect();
    segment.extend((0..bytes).map(|at| at as u8));
    segment
}

/// The first segment of a connection.
pub fn tcp_syn() -> Vec<u8> {
    let mut segment = vec![0x03, 0xe8, 0x07, 0xd0, 0, 0, 0x10, 0, 0, 0, 0, 0, 0x50, 2, 0xff, 0xff];
    segment.extend([0; 4]);
    segment
}

/// An echo request of either family.
pub fn echo(kind: u8, number: u16, bytes: usize) -> Vec<u8> {
    let mut segment = vec![kind, 0, 0, 0, 0x12, 0x34];
    segment.extend(number.to_be_bytes());
    segment.extend((0..bytes).map(|at| at as u8));
    segment
}

pub const ECHO: u8 = 8;
pub const ECHO_V6: u8 = 128;

/// An ARP packet.
pub struct Arp {
    pub operation: u16,
    pub hardware: u16,
    pub sender: (Mac, Ipv4Addr),
    pub target: (Mac, Ipv4Addr),
}

pub const BROADCAST: Mac = [0xff; 6];

impl Arp {
    pub fn packet(&self) -> Vec<u8> {
        let mut packet = self.hardware.to_be_bytes().to_vec();
        packet.extend([8, 0, 6, 4]);
        packet.extend(self.operation.to_be_bytes());
        for (mac, address) in [self.sender, self.target] {
            packet.extend(mac);
            packet.extend(address.octets());
        }
        packet
    }

    pub fn frame(&self, to: Mac) -> Vec<u8> {
        let from = self.sender.0;
        [&to[..], &from, &kind::ARP.to_be_bytes(), &self.packet(), &[0; 18]].concat()
    }
}

/// Neighbour solicitation (135) or advertisement (136) with the sender's MAC address (RFC 4861).
pub fn discovery(kind: u8, flags: u8, target: Ipv6Addr, mac: Option<Mac>) -> Vec<u8> {
    let mut segment = vec![kind, 0, 0, 0, flags, 0, 0, 0];
    segment.extend(target.octets());
    if let Some(mac) = mac {
        segment.extend([if kind == 135 { 1 } else { 2 }, 1]);
        segment.extend(mac);
    }
    segment
}

/// Solicited-node group of an address (RFC 4291 2.7.1), and its MAC address.
pub fn solicited(address: Ipv6Addr) -> (Ipv6Addr, Mac) {
    let [.., a, b, c] = address.octets();
    let (low, high) = (u16::from_be_bytes([b, c]), 0xff00 | u16::from(a));
    (Ipv6Addr::new(0xff02, 0, 0, 0, 0, 1, high, low), [0x33, 0x33, 0xff, a, b, c])
}

/// Neighbour request of the host.
pub fn ask(host: &Host, wanted: IpAddr) -> Vec<u8> {
    match wanted {
        IpAddr::V4(v4) => {
            let sender = (mac_of(0, &host.v4.octets()), host.v4);
            let arp = Arp { operation: 1, hardware: 1, sender, target: ([0; 6], v4) };
            arp.frame(BROADCAST)
        }
        IpAddr::V6(v6) => {
            let mut packet = V6::new(host);
            let (group, mac) = solicited(v6);
            (packet.destination, packet.link.to, packet.hop_limit) = (group, mac, 255);
            packet.segment(ICMPV6, discovery(135, 0, v6, Some(packet.link.from)));
            packet.frame().1
        }
    }
}
