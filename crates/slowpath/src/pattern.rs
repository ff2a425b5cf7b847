//! Which packets a filter is for: [`Match`] builds it, [`parse`] reads it, and [`text`] writes it.
//!
//! One text form serves the command line, the API and both libraries:
//!
//! ```text
//! ip src 10.0.0.0/8 dst 192.0.2.0/24 proto udp dport 53 in 2
//! ip6 dst 2001:db8::/32 proto tcp sport 1024/0xfc00 dscp 46
//! raw 0a00000100/ffffffff00 in 2
//! ```
//!
//! First `ip` or `ip6`, then any of these, each once; what is not said is any:
//!
//! | word | value |
//! |---|---|
//! | `src`, `dst` | address, with a prefix length or mask |
//! | `proto` | name or number |
//! | `sport`, `dport` | number; 0 in packets without ports and in fragments |
//! | `tos` | the byte of traffic class; `dscp`: its upper six bits, 0 to 63 |
//! | `in` | the vport that the packet came by: its number, or the interface's name where names are known |
//!
//! A number may have a mask behind it, `VALUE/MASK`: the packet's bits under the mask are to be those of the value.
//! Bits of values that are not under the mask are cleared.
//!
//! For code `fields`, `raw` is the bytes of the fields in hexadecimal, the first one's first, and behind a `/` the mask, if
//! not all bits count; then `in` may follow. All bytes of the fields are written: up to 14 make a short pattern, more a long
//! one.

use std::fmt::{self, Write};
use std::marker::PhantomData;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ops::Range;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use pdp_proto::slowpath::Pattern;

/// Bytes of a text that is read.
pub const TEXT_BYTES_MAX: usize = 512;

/// Bytes of a short pattern, and of a long one.
const SHORT_BYTES: usize = 16;
const LONG_BYTES: usize = 40;

/// The last ones of both: the vport that a packet came by.
const VPORT_BYTES: usize = 2;

/// Names of protocols by their numbers (IANA, "Protocol Numbers"); of two for one the first is written.
const PROTOCOLS: &[(&str, u8)] = &[
    ("icmp", 1),
    ("igmp", 2),
    ("tcp", 6),
    ("udp", 17),
    ("dccp", 33),
    ("gre", 47),
    ("esp", 50),
    ("ah", 51),
    ("icmp6", 58),
    ("icmpv6", 58),
    ("ipv6-icmp", 58),
    ("ospf", 89),
    ("pim", 103),
    ("vrrp", 112),
    ("sctp", 132),
    ("udplite", 136),
];

/// The upper six bits of the traffic class (RFC 2474 section 3).
const DSCP_MASK: u8 = 0xfc;

/// Words behind `ip` and `ip6`.
const WORDS: [&str; 8] = ["src", "dst", "proto", "sport", "dport", "tos", "dscp", "in"];

/// Which packets a program's code is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Code {
    /// IPv4 and IPv6.
    Ip,
    /// Fields that the vrouter defines.
    Fields,
}

impl Code {
    /// As the mux numbers it.
    pub fn of(number: u8) -> Self {
        if number == 0 { Self::Ip } else { Self::Fields }
    }
}

/// A text that is no pattern, and why.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct BadPattern(String);

fn bad<T>(why: impl Into<String>) -> Result<T, BadPattern> {
    Err(BadPattern(why.into()))
}

/// A value of which the bits under the mask count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Masked<T> {
    /// What the bits are to be.
    pub value: T,
    /// Which count.
    pub mask: T,
}

macro_rules! masked {
    ($($number:ty),*) => {$(
        impl From<$number> for Masked<$number> {
            /// All of its bits.
            fn from(value: $number) -> Self {
                Self { value, mask: <$number>::MAX }
            }
        }
        impl From<($number, $number)> for Masked<$number> {
            /// A value and a mask.
            fn from((value, mask): ($number, $number)) -> Self {
                Self { value, mask }
            }
        }
    )*};
}

masked!(u8, u16);

/// A part of a pattern of code `ip`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Field {
    Source,
    Destination,
    Protocol,
    SourcePort,
    DestinationPort,
    Class,
    CameBy,
}

impl Field {
    /// In the order in which they are written.
    const ALL: [Self; 7] = [
        Self::Source,
        Self::Destination,
        Self::Protocol,
        Self::SourcePort,
        Self::DestinationPort,
        Self::Class,
        Self::CameBy,
    ];

    /// Its bytes, by the bytes of an address.
    fn place(self, address: usize) -> Range<usize> {
        let (start, bytes) = match self {
            Self::Source => (0, address),
            Self::Destination => (address, address),
            Self::SourcePort => (2 * address, 2),
            Self::DestinationPort => (2 * address + 2, 2),
            Self::Protocol => (2 * address + 4, 1),
            Self::Class => (2 * address + 5, 1),
            Self::CameBy => (2 * address + 6, 2),
        };
        start..start + bytes
    }
}

/// A pattern of either length; bytes behind it are zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Bits {
    long: bool,
    value: [u8; LONG_BYTES],
    mask: [u8; LONG_BYTES],
}

impl Bits {
    fn any(long: bool) -> Self {
        Self { long, value: [0; LONG_BYTES], mask: [0; LONG_BYTES] }
    }

    fn len(&self) -> usize {
        if self.long { LONG_BYTES } else { SHORT_BYTES }
    }

    fn place(&self, field: Field) -> Range<usize> {
        field.place(if self.long { 16 } else { 4 })
    }

    fn get(&self, field: Field) -> (&[u8], &[u8]) {
        let place = self.place(field);
        (&self.value[place.clone()], &self.mask[place])
    }

    fn set(&mut self, field: Field, value: &[u8], mask: &[u8]) {
        let start = self.place(field).start;
        for (at, (value, mask)) in value.iter().zip(mask).enumerate() {
            (self.value[start + at], self.mask[start + at]) = (value & mask, *mask);
        }
    }
}

impl From<Bits> for Pattern {
    fn from(bits: Bits) -> Self {
        let Bits { long, value, mask } = bits;
        if long {
            return Self::Long { value, mask };
        }
        let short = |bytes: [u8; LONG_BYTES]| std::array::from_fn(|at| bytes[at]);
        Self::Short { value: short(value), mask: short(mask) }
    }
}

impl From<&Pattern> for Bits {
    fn from(pattern: &Pattern) -> Self {
        let mut bits = Self::any(matches!(pattern, Pattern::Long { .. }));
        let (value, mask): (&[u8], &[u8]) = match pattern {
            Pattern::Short { value, mask } => (value, mask),
            Pattern::Long { value, mask } => (value, mask),
        };
        for (at, (value, mask)) in value.iter().zip(mask).enumerate() {
            (bits.value[at], bits.mask[at]) = (value & mask, *mask);
        }
        bits
    }
}

/// Packets of IPv4 or of IPv6 that code `ip` has: all of them, until more is said.
///
/// ```
/// use pdp_slowpath::Match;
/// let dns = Match::ip().dst("192.0.2.0/24".parse().unwrap()).proto(17).dport(53);
/// assert_eq!(dns.to_string(), "ip dst 192.0.2.0/24 proto udp dport 53");
/// ```
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Match<N> {
    bits: Bits,
    net: PhantomData<N>,
}

impl Match<Ipv4Net> {
    /// IPv4.
    pub fn ip() -> Self {
        Self { bits: Bits::any(false), net: PhantomData }
    }
}

impl Match<Ipv6Net> {
    /// IPv6.
    pub fn ip6() -> Self {
        Self { bits: Bits::any(true), net: PhantomData }
    }
}

impl<N: Into<IpNet>> Match<N> {
    fn net(mut self, field: Field, net: N) -> Self {
        let octets = |address| match address {
            IpAddr::V4(address) => address.octets().to_vec(),
            IpAddr::V6(address) => address.octets().to_vec(),
        };
        let net = net.into();
        self.bits.set(field, &octets(net.addr()), &octets(net.netmask()));
        self
    }

    fn number<const B: usize>(mut self, field: Field, value: [u8; B], mask: [u8; B]) -> Self {
        self.bits.set(field, &value, &mask);
        self
    }

    /// From an address of this prefix.
    pub fn src(self, net: N) -> Self {
        self.net(Field::Source, net)
    }

    /// To an address of this prefix.
    pub fn dst(self, net: N) -> Self {
        self.net(Field::Destination, net)
    }

    /// Of this protocol: 6 is TCP, 17 UDP.
    pub fn proto(self, proto: impl Into<Masked<u8>>) -> Self {
        let Masked { value, mask } = proto.into();
        self.number(Field::Protocol, [value], [mask])
    }

    /// From this port, or ports: `(1024, 0xfc00)` is 1024 to 2047.
    pub fn sport(self, port: impl Into<Masked<u16>>) -> Self {
        let Masked { value, mask } = port.into();
        self.number(Field::SourcePort, value.to_be_bytes(), mask.to_be_bytes())
    }

    /// To this port, or ports.
    pub fn dport(self, port: impl Into<Masked<u16>>) -> Self {
        let Masked { value, mask } = port.into();
        self.number(Field::DestinationPort, value.to_be_bytes(), mask.to_be_bytes())
    }

    /// With this traffic class, the whole byte.
    pub fn tos(self, class: impl Into<Masked<u8>>) -> Self {
        let Masked { value, mask } = class.into();
        self.number(Field::Class, [value], [mask])
    }

    /// With this differentiated services code point, 0 to 63 (of more the lower six bits count).
    pub fn dscp(self, code_point: u8) -> Self {
        self.tos((code_point << 2, DSCP_MASK))
    }

    /// That came by this vport.
    pub fn came_by(self, vport: impl Into<Masked<u16>>) -> Self {
        let Masked { value, mask } = vport.into();
        self.number(Field::CameBy, value.to_be_bytes(), mask.to_be_bytes())
    }
}

impl<N> From<Match<N>> for Pattern {
    fn from(from: Match<N>) -> Self {
        from.bits.into()
    }
}

impl<N> fmt::Display for Match<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&ip_text(&self.bits, &[]))
    }
}

impl<N> fmt::Debug for Match<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Reads a pattern; `names` are those of the interfaces, in the order of their vports.
///
/// # Errors
/// The text is none, or longer than [`TEXT_BYTES_MAX`].
pub fn parse(text: &str, names: &[impl AsRef<str>]) -> Result<Pattern, BadPattern> {
    if text.len() > TEXT_BYTES_MAX {
        return bad(format!("{} bytes, {TEXT_BYTES_MAX} at most", text.len()));
    }
    let mut words = text.split_ascii_whitespace();
    let (mut bits, known): (_, &[&str]) = match words.next() {
        Some("ip") => (Bits::any(false), &WORDS),
        Some("ip6") => (Bits::any(true), &WORDS),
        Some("raw") => (raw(words.next().unwrap_or_default())?, &["in"]),
        first => {
            let word = first.unwrap_or_default();
            return bad(format!("a match starts with ip, ip6 or raw, not {word:?}"));
        }
    };
    let mut said: Vec<Field> = Vec::new();
    while let Some(word) = words.next() {
        if !known.contains(&word) {
            return bad(format!("unknown word {word:?}; known: {}", known.join(", ")));
        }
        let field = match word {
            "src" => Field::Source,
            "dst" => Field::Destination,
            "proto" => Field::Protocol,
            "sport" => Field::SourcePort,
            "dport" => Field::DestinationPort,
            "tos" | "dscp" => Field::Class,
            _ => Field::CameBy,
        };
        if said.contains(&field) {
            return bad(format!("{word} is said twice"));
        }
        said.push(field);
        let value = words.next().unwrap_or_default();
        let (value, mask) = match field {
            Field::Source | Field::Destination => address(value, bits.long),
            Field::Protocol => {
                let known = PROTOCOLS.iter().find(|(name, _)| *name == value);
                match known {
                    Some((_, number)) => Some((vec![*number], vec![u8::MAX])),
                    None => number(value, 1),
                }
            }
            Field::Class if word == "dscp" => {
                let found = digits(value, 10).filter(|code_point| *code_point < 64);
                found.map(|code_point| (vec![(code_point << 2) as u8], vec![DSCP_MASK]))
            }
            Field::CameBy => {
                let found = names.iter().position(|name| name.as_ref() == value);
                match found.and_then(|vport| u16::try_from(vport).ok()) {
                    Some(vport) => Some((vport.to_be_bytes().to_vec(), vec![u8::MAX; 2])),
                    None => number(value, 2),
                }
            }
            Field::SourcePort | Field::DestinationPort => number(value, 2),
            Field::Class => number(value, 1),
        }
        .ok_or_else(|| BadPattern(format!("{word} {value:?}; {}", hint(word, bits.long, names))))?;
        bits.set(field, &value, &mask);
    }
    Ok(bits.into())
}

/// What a word takes.
fn hint(word: &str, long: bool, names: &[impl AsRef<str>]) -> String {
    match (word, long) {
        ("src" | "dst", false) => "use an IPv4 address or prefix, like 10.0.0.0/8".into(),
        ("src" | "dst", true) => "use an IPv6 address or prefix, like 2001:db8::/32".into(),
        ("proto", _) => {
            let names: Vec<&str> = PROTOCOLS.iter().map(|(name, _)| *name).collect();
            format!("use 0 to 255, VALUE/MASK, or one of {}", names.join(", "))
        }
        ("tos", _) => "use 0 to 255, or VALUE/MASK like 0xb8/0xfc".into(),
        ("dscp", _) => "use 0 to 63".into(),
        ("in", _) if !names.is_empty() => {
            let names: Vec<&str> = names.iter().map(AsRef::as_ref).collect();
            format!("use an interface ({}) or a vport's number", names.join(", "))
        }
        ("in", _) => "use a vport's number".into(),
        _ => "use 0 to 65535, or VALUE/MASK like 1024/0xfc00".into(),
    }
}

/// `ADDRESS`, `ADDRESS/LENGTH` or `ADDRESS/MASK`.
fn address(text: &str, long: bool) -> Option<(Vec<u8>, Vec<u8>)> {
    let octets = |text: &str| match long {
        false => text.parse::<Ipv4Addr>().ok().map(|address| address.octets().to_vec()),
        true => text.parse::<Ipv6Addr>().ok().map(|address| address.octets().to_vec()),
    };
    let Some((value, mask)) = text.split_once('/') else {
        let value = octets(text)?;
        let mask = vec![u8::MAX; value.len()];
        return Some((value, mask));
    };
    let value = octets(value)?;
    let mask = match octets(mask) {
        Some(mask) => mask,
        None => prefix_mask(digits(mask, 10)?.try_into().ok()?, value.len())?,
    };
    Some((value, mask))
}

/// A mask of so many bits.
fn prefix_mask(length: usize, bytes: usize) -> Option<Vec<u8>> {
    let byte = |at: usize| match length.saturating_sub(8 * at) {
        0 => 0,
        bits @ 1..8 => !(u8::MAX >> bits),
        _ => u8::MAX,
    };
    (length <= 8 * bytes).then(|| (0..bytes).map(byte).collect())
}

/// A number without a sign.
fn digits(text: &str, radix: u32) -> Option<u32> {
    let good = !text.is_empty() && text.chars().all(|digit| digit.is_digit(radix));
    good.then(|| u32::from_str_radix(text, radix).ok()).flatten()
}

/// `VALUE` or `VALUE/MASK`, each decimal or after `0x` hexadecimal, of one or two bytes.
fn number(text: &str, bytes: usize) -> Option<(Vec<u8>, Vec<u8>)> {
    let one = |text: &str| {
        let number = match text.strip_prefix("0x") {
            Some(text) => digits(text, 16)?,
            None => digits(text, 10)?,
        };
        let all = number.to_be_bytes();
        let (rest, number) = all.split_at(4 - bytes);
        rest.iter().all(|byte| *byte == 0).then(|| number.to_vec())
    };
    match text.split_once('/') {
        Some((value, mask)) => Some((one(value)?, one(mask)?)),
        None => Some((one(text)?, vec![u8::MAX; bytes])),
    }
}

/// `BYTES` or `BYTES/MASK`.
fn raw(text: &str) -> Result<Bits, BadPattern> {
    let (value, mask) = match text.split_once('/') {
        Some((value, mask)) => (hex(value), hex(mask)),
        None => (hex(text), hex(text).map(|bytes| vec![u8::MAX; bytes.len()])),
    };
    let (Some(value), Some(mask)) = (value, mask) else {
        return bad("use raw BYTES or raw BYTES/MASK, in hexadecimal");
    };
    let most = LONG_BYTES - VPORT_BYTES;
    if value.len() != mask.len() || !(1..=most).contains(&value.len()) {
        let (value, mask) = (value.len(), mask.len());
        return bad(format!(
            "raw of {value} bytes with a mask of {mask}; use 1 to {most}, as many of both"
        ));
    }
    let mut bits = Bits::any(value.len() > SHORT_BYTES - VPORT_BYTES);
    for (at, (value, mask)) in value.iter().zip(mask).enumerate() {
        (bits.value[at], bits.mask[at]) = (value & mask, mask);
    }
    Ok(bits)
}

/// Bytes in hexadecimal.
fn hex(text: &str) -> Option<Vec<u8>> {
    let pairs = text.as_bytes().chunks(2);
    pairs
        .map(|pair| {
            let pair = std::str::from_utf8(pair).ok().filter(|pair| pair.len() == 2)?;
            digits(pair, 16).and_then(|byte| u8::try_from(byte).ok())
        })
        .collect()
}

/// Writes a pattern so that [`parse`] reads it; `names` are those of the interfaces, in the order of their vports.
pub fn text(pattern: &Pattern, code: Code, names: &[impl AsRef<str>]) -> String {
    let bits = Bits::from(pattern);
    let names: Vec<&str> = names.iter().map(AsRef::as_ref).collect();
    match code {
        Code::Ip => ip_text(&bits, &names),
        Code::Fields => raw_text(&bits, &names),
    }
}

fn raw_text(bits: &Bits, names: &[&str]) -> String {
    let (value, mask) = (&bits.value[..bits.len()], &bits.mask[..bits.len()]);
    let fields = bits.len() - VPORT_BYTES;
    let used = mask[..fields].iter().rposition(|byte| *byte != 0).map_or(0, |at| at + 1);
    // As many as say how long it is.
    let least = if bits.long { SHORT_BYTES - VPORT_BYTES + 1 } else { 1 };
    let used = used.max(least);
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let mut out = format!("raw {}", hex(&value[..used]));
    if mask[..used].iter().any(|byte| *byte != u8::MAX) {
        out += &format!("/{}", hex(&mask[..used]));
    }
    let (number, under) = (number_of(&value[fields..]), number_of(&mask[fields..]));
    if under != 0 {
        out += &format!(" in {}", vport_text(number, under, names));
    }
    out
}

/// A number of one or two bytes.
fn number_of(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0, |all, byte| all << 8 | u32::from(*byte))
}

/// A vport by its name, if it has one.
fn vport_text(vport: u32, mask: u32, names: &[&str]) -> String {
    let number = vport.to_string();
    match names.get(vport as usize) {
        _ if mask != u32::from(u16::MAX) => format!("{vport}/{mask:#x}"),
        Some(name) => (*name).to_owned(),
        // An interface may be called as another's number.
        None if names.contains(&number.as_str()) => format!("{number}/0xffff"),
        None => number,
    }
}

fn ip_text(bits: &Bits, names: &[&str]) -> String {
    let mut out = String::from(if bits.long { "ip6" } else { "ip" });
    for field in Field::ALL {
        let (value, mask) = bits.get(field);
        if mask.iter().all(|byte| *byte == 0) {
            continue;
        }
        let whole = mask.iter().all(|byte| *byte == u8::MAX);
        let number_of = |bytes: &[u8]| if bytes.len() > 2 { 0 } else { number_of(bytes) };
        let (number, number_mask) = (number_of(value), number_of(mask));
        let mut one = |word: &str, text: &str| {
            // A String takes whatever is written.
            let _ = write!(out, " {word} {text}");
        };
        let masked = match whole {
            true => number.to_string(),
            false => format!("{number}/{number_mask:#x}"),
        };
        match field {
            Field::Source => one("src", &address_text(value, mask)),
            Field::Destination => one("dst", &address_text(value, mask)),
            Field::Protocol => {
                let known = PROTOCOLS.iter().find(|known| whole && u32::from(known.1) == number);
                one("proto", known.map_or(masked.as_str(), |known| known.0));
            }
            Field::SourcePort => one("sport", &masked),
            Field::DestinationPort => one("dport", &masked),
            Field::Class if number_mask == u32::from(DSCP_MASK) => {
                one("dscp", &(number >> 2).to_string());
            }
            Field::Class if whole => one("tos", &format!("{number:#x}")),
            Field::Class => one("tos", &format!("{number:#x}/{number_mask:#x}")),
            Field::CameBy => one("in", &vport_text(number, number_mask, names)),
        }
    }
    out
}

/// As [`address`] reads it.
fn address_text(value: &[u8], mask: &[u8]) -> String {
    let address = |bytes: &[u8]| match <[u8; 4]>::try_from(bytes) {
        Ok(octets) => IpAddr::from(octets).to_string(),
        Err(_) => IpAddr::from(<[u8; 16]>::try_from(bytes).unwrap_or_default()).to_string(),
    };
    let length: usize = mask.iter().map(|byte| byte.leading_ones() as usize).sum();
    match prefix_mask(length, mask.len()) {
        Some(prefix) if prefix == mask && length == 8 * mask.len() => address(value),
        Some(prefix) if prefix == mask => format!("{}/{length}", address(value)),
        _ => format!("{}/{}", address(value), address(mask)),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const NAMES: [&str; 4] = ["eth0", "eth1", "eth10", "9"];

    fn pattern() -> impl Strategy<Value = Pattern> {
        // Masks as they are, and those of prefixes and whole fields, which random bytes never are.
        let mask = |bytes: usize| {
            let byte = prop_oneof![Just(0), Just(u8::MAX), Just(DSCP_MASK), any::<u8>()];
            let prefix =
                (0..=8 * bytes).prop_map(move |length| prefix_mask(length, bytes).unwrap());
            prop_oneof![prefix, proptest::collection::vec(byte, bytes)]
        };
        let value = |bytes| {
            let byte = prop_oneof![Just(0), 0..4_u8, any::<u8>()];
            proptest::collection::vec(byte, bytes)
        };
        let short = (value(SHORT_BYTES), mask(SHORT_BYTES)).prop_map(|(value, mask)| {
            Pattern::Short { value: value.try_into().unwrap(), mask: mask.try_into().unwrap() }
        });
        let long = (value(LONG_BYTES), mask(LONG_BYTES)).prop_map(|(value, mask)| Pattern::Long {
            value: value.try_into().unwrap(),
            mask: mask.try_into().unwrap(),
        });
        prop_oneof![short, long]
    }

    /// With no bit of the value outside of the mask.
    fn plain(pattern: &Pattern) -> Pattern {
        Bits::from(pattern).into()
    }

    /// A packet's fields, as a person reads them.
    #[derive(Clone, Copy, Debug)]
    struct Packet {
        source: IpAddr,
        destination: IpAddr,
        proto: u8,
        ports: (u16, u16),
        class: u8,
        came_by: u16,
    }

    impl Packet {
        /// The bits that the engine looks up, by the documentation of [`Pattern`].
        fn key(&self) -> Vec<u8> {
            let octets = |address| match address {
                IpAddr::V4(address) => address.octets().to_vec(),
                IpAddr::V6(address) => address.octets().to_vec(),
            };
            let mut key = octets(self.source);
            key.extend(octets(self.destination));
            key.extend(self.ports.0.to_be_bytes());
            key.extend(self.ports.1.to_be_bytes());
            key.extend([self.proto, self.class]);
            key.extend(self.came_by.to_be_bytes());
            key
        }
    }

    fn meets(pattern: &Pattern, key: &[u8]) -> bool {
        let bits = Bits::from(pattern);
        assert_eq!(bits.len(), key.len());
        key.iter().enumerate().all(|(at, byte)| byte & bits.mask[at] == bits.value[at])
    }

    /// Few enough values that packets meet filters.
    fn packet(long: bool) -> impl Strategy<Value = Packet> {
        let address = move || {
            (0..3_u8, 0..3_u8).prop_map(move |(a, b)| match long {
                false => IpAddr::from([10, a, 0, b]),
                true => IpAddr::from([0x20, 1, 0xd, 0xb8, a, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, b]),
            })
        };
        let ports = || prop_oneof![Just(0), Just(53), 1020..1030_u16];
        (
            address(),
            address(),
            prop_oneof![Just(6), Just(17)],
            (ports(), ports()),
            180..190_u8,
            0..3_u16,
        )
            .prop_map(|(source, destination, proto, ports, class, came_by)| Packet {
                source,
                destination,
                proto,
                ports,
                class,
                came_by,
            })
    }

    /// What may be said, and whether a packet is meant by it.
    fn says(filter: &Packet, lengths: (u8, u8), which: u8, packet: &Packet) -> (String, bool) {
        let long = filter.source.is_ipv6();
        let mut text = String::from(if long { "ip6" } else { "ip" });
        let mut meant = true;
        let mut say = |bit: u8, words: String, holds: bool| {
            if which & 1 << bit != 0 {
                text += &words;
                meant &= holds;
            }
        };
        let net = |address, length: u8| {
            IpNet::new(address, length.min(if long { 128 } else { 32 })).unwrap()
        };
        let (source, destination) =
            (net(filter.source, lengths.0), net(filter.destination, lengths.1));
        say(0, format!(" src {source}"), source.contains(&packet.source));
        say(1, format!(" dst {destination}"), destination.contains(&packet.destination));
        let proto = if filter.proto == 6 { "tcp" } else { "udp" };
        say(2, format!(" proto {proto}"), filter.proto == packet.proto);
        let of_block = filter.ports.0 / 4;
        let block = format!(" sport {}/0xfffc", 4 * of_block);
        say(3, block, packet.ports.0 / 4 == of_block);
        say(4, format!(" dport {}", filter.ports.1), filter.ports.1 == packet.ports.1);
        say(5, format!(" dscp {}", filter.class / 4), filter.class / 4 == packet.class / 4);
        let name = NAMES[usize::from(filter.came_by)];
        say(6, format!(" in {name}"), filter.came_by == packet.came_by);
        (text, meant)
    }

    fn both() -> impl Strategy<Value = (Packet, Packet)> {
        any::<bool>().prop_flat_map(|long| (packet(long), packet(long)))
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_again(pattern in pattern()) {
            for names in [&NAMES[..], &[]] {
                let ip = text(&pattern, Code::Ip, names);
                prop_assert_eq!(parse(&ip, names), Ok(plain(&pattern)), "{}", ip);
                prop_assert_eq!(text(&parse(&ip, names).unwrap(), Code::Ip, names), ip);
            }
            let raw = text(&pattern, Code::Fields, &NAMES);
            prop_assert_eq!(parse(&raw, &NAMES), Ok(plain(&pattern)), "{}", raw);
        }

        /// A plain reading of the words is what the bits say.
        #[test]
        fn packets_that_are_meant_are_met(
            (filter, packet) in both(), lengths in (0..=128_u8, 0..=128_u8), which in any::<u8>(),
        ) {
            let (text, meant) = says(&filter, lengths, which, &packet);
            let pattern = parse(&text, &NAMES).unwrap();
            prop_assert_eq!(meets(&pattern, &packet.key()), meant, "{} and {:?}", text, packet);
        }

        #[test]
        fn no_text_is_a_fault(text in ".{0,60}", more in "(ip|ip6|raw|src|in|proto|/|1| |0x|:){0,12}") {
            let _ = (parse(&text, &NAMES), parse(&more, &NAMES));
        }
    }

    #[test]
    fn a_match_is_what_its_text_says() {
        let net = |text: &str| text.parse().unwrap();
        let all = Match::ip()
            .src(net("10.1.2.3/8"))
            .dst(net("192.0.2.1/32"))
            .proto(6)
            .sport((1024, 0xfc00))
            .dport(80)
            .dscp(46)
            .came_by(2);
        let text =
            "ip src 10.0.0.0/8 dst 192.0.2.1 proto tcp sport 1024/0xfc00 dport 80 dscp 46 in 2";
        assert_eq!(all.to_string(), text);
        assert_eq!(parse(text, &NAMES), Ok(all.into()));
        let named = text.replace("in 2", "in eth10");
        assert_eq!(parse(&named, &NAMES), Ok(all.into()));
        assert_eq!(self::text(&all.into(), Code::Ip, &NAMES), named);
        let six = Match::ip6().dst("2001:db8::/32".parse().unwrap()).proto(58).tos((3, 3));
        assert_eq!(six.to_string(), "ip6 dst 2001:db8::/32 proto icmp6 tos 0x3/0x3");
        assert_eq!(parse(&six.to_string(), &NAMES), Ok(six.into()));
        assert_eq!(
            parse(" ip6  proto ipv6-icmp tos 3/3 dst 2001:db8::1/32 ", &NAMES),
            Ok(six.into())
        );
    }

    #[test]
    fn raw_bytes_are_those_of_the_fields() {
        for (text, bytes) in [
            ("raw 88b5", 16),
            ("raw 0a00/ff00 in eth10", 16),
            ("raw 000102030405060708090a0b0c0d", 16),
            ("raw 000102030405060708090a0b0c0d0e", 40),
            ("raw 00/00 in 7/0xf", 16),
            ("raw 00/00 in 9/0xffff", 16),
        ] {
            let found = parse(text, &NAMES).unwrap();
            assert_eq!(found.bytes(), bytes, "{text}");
            let again = self::text(&found, Code::Fields, &NAMES);
            assert_eq!(again, text.replace("0a00/ff00", "0a"));
        }
    }

    #[test]
    fn a_wrong_text_is_refused_with_what_is_right() {
        for (text, why) in [
            ("", "a match starts with ip, ip6 or raw, not \"\""),
            ("udp port 53", "a match starts with ip, ip6 or raw, not \"udp\""),
            ("ip port 53", "unknown word \"port\"; known: src, dst,"),
            ("ip src 2001:db8::1", "src \"2001:db8::1\"; use an IPv4 address or prefix"),
            ("ip6 dst 10.0.0.0/8", "use an IPv6 address or prefix"),
            ("ip src 10.0.0.0/33", "src \"10.0.0.0/33\"; use an IPv4"),
            ("ip src 10.0.0.0/+8", "src \"10.0.0.0/+8\"; use an IPv4"),
            ("ip proto xyz", "proto \"xyz\"; use 0 to 255, VALUE/MASK, or one of icmp, igmp, tcp"),
            ("ip dport", "dport \"\"; use 0 to 65535"),
            ("ip dport 65536", "dport \"65536\"; use 0 to 65535"),
            ("ip dport 1024-2047", "or VALUE/MASK like 1024/0xfc00"),
            ("ip dscp +1", "dscp \"+1\"; use 0 to 63"),
            ("ip dscp 64", "dscp \"64\"; use 0 to 63"),
            ("ip tos 1 dscp 1", "dscp is said twice"),
            (
                "ip in eth7",
                "in \"eth7\"; use an interface (eth0, eth1, eth10, 9) or a vport's number",
            ),
            ("raw", "raw of 0 bytes with a mask of 0; use 1 to 38"),
            ("raw 1", "use raw BYTES or raw BYTES/MASK"),
            ("raw 0102/ff", "raw of 2 bytes with a mask of 1; use 1 to 38"),
            ("raw 01 02", "unknown word \"02\"; known: in"),
            ("raw 01 src 10.0.0.1", "unknown word \"src\"; known: in"),
        ] {
            let refused = parse(text, &NAMES).unwrap_err().to_string();
            assert!(refused.contains(why), "{text}: {refused}");
        }
        assert!(parse(&format!("raw {}", "00".repeat(39)), &NAMES).is_err());
        assert!(parse(&format!("ip {}", " ".repeat(TEXT_BYTES_MAX)), &NAMES).is_err());
    }
}
