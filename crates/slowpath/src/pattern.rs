//! Patterns of filters: [`IpMatch`] builds them, [`parse`] reads them, and [`text`] writes them.
//!
//! One text form serves the command line, the API and both libraries:
//!
//! ```text
//! ip src 10.0.0.0/8 dst 192.0.2.0/24 proto udp dport 53 in 2
//! ip6 dst 2001:db8::/32 proto tcp sport 1024/0xfc00 dscp 46
//! raw 0a00000100/ffffffff00 in 2
//! ```
//!
//! First `ip` or `ip6`, then any of these, each at most once. An omitted word matches any value:
//!
//! | word | value |
//! |---|---|
//! | `src`, `dst` | address, with a prefix length or mask |
//! | `proto` | name or number |
//! | `sport`, `dport` | number; 0 in packets without ports and in fragments |
//! | `tos` | the byte of traffic class; `dscp`: its upper six bits, 0 to 63 |
//! | `in` | the vport that the packet came by: its number, or the interface's name where names are known |
//!
//! A number may be followed by a mask, `VALUE/MASK`: the packet must equal the value in the bits of
//! the mask. Bits of the value outside the mask are cleared.
//!
//! For code `fields`, `raw` gives the bytes of the fields in hexadecimal, the first field first.
//! After a `/` follows the mask, unless all bits count. Then `in` may follow. All bytes of the
//! fields are written: up to 14 make a short pattern, more make a long one.

use std::fmt::{self, Write};
use std::marker::PhantomData;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ops::Range;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use pdp_proto::slowpath::FilterPattern;

/// Longest text that [`parse`] accepts, bytes.
pub const TEXT_BYTES_MAX: usize = 512;

/// Bytes of a short pattern, and of a long one.
const SHORT_BYTES: usize = 16;
const LONG_BYTES: usize = 40;

/// The last bytes of both: the vport that received the packet.
const VPORT_BYTES: usize = 2;

/// Names of protocols by their numbers (IANA, "Protocol
/// Numbers"). If a number has two names, the first is written.
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

/// Words that follow `ip` and `ip6`.
const WORDS: [&str; 8] = ["src", "dst", "proto", "sport", "dport", "tos", "dscp", "in"];

/// Kind of code of a forwarding engine, which defines the meaning of patterns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PatternCode {
    /// IPv4 and IPv6.
    Ip,
    /// Fields that the vrouter defines.
    Fields,
}

impl PatternCode {
    /// Converts the mux's number.
    pub fn of(number: u8) -> Self {
        if number == 0 { Self::Ip } else { Self::Fields }
    }
}

/// Text that is no pattern, with the reason.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct BadPattern(String);

fn bad<T>(why: impl Into<String>) -> Result<T, BadPattern> {
    Err(BadPattern(why.into()))
}

/// Value of which only the bits in the mask count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Masked<T> {
    /// Required bits.
    pub value: T,
    /// Bits that count.
    pub mask: T,
}

macro_rules! masked {
    ($($number:ty),*) => {$(
        impl From<$number> for Masked<$number> {
            /// All bits count.
            fn from(value: $number) -> Self {
                Self { value, mask: <$number>::MAX }
            }
        }
        impl From<($number, $number)> for Masked<$number> {
            /// A value and its mask.
            fn from((value, mask): ($number, $number)) -> Self {
                Self { value, mask }
            }
        }
    )*};
}

masked!(u8, u16);

/// Part of a pattern of code `ip`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum IpField {
    Source,
    Destination,
    Protocol,
    SourcePort,
    DestinationPort,
    Class,
    CameBy,
}

impl IpField {
    /// In the order of the text form.
    const ALL: [Self; 7] = [
        Self::Source,
        Self::Destination,
        Self::Protocol,
        Self::SourcePort,
        Self::DestinationPort,
        Self::Class,
        Self::CameBy,
    ];

    /// Bytes, for addresses of `address` bytes.
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

/// Pattern of either length. Bytes beyond the length are zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct PatternBits {
    long: bool,
    value: [u8; LONG_BYTES],
    mask: [u8; LONG_BYTES],
}

impl PatternBits {
    fn any(long: bool) -> Self {
        Self { long, value: [0; LONG_BYTES], mask: [0; LONG_BYTES] }
    }

    fn len(&self) -> usize {
        if self.long { LONG_BYTES } else { SHORT_BYTES }
    }

    fn place(&self, field: IpField) -> Range<usize> {
        field.place(if self.long { 16 } else { 4 })
    }

    fn get(&self, field: IpField) -> (&[u8], &[u8]) {
        let place = self.place(field);
        (&self.value[place.clone()], &self.mask[place])
    }

    fn set(&mut self, field: IpField, value: &[u8], mask: &[u8]) {
        let start = self.place(field).start;
        for (at, (value, mask)) in value.iter().zip(mask).enumerate() {
            (self.value[start + at], self.mask[start + at]) = (value & mask, *mask);
        }
    }
}

impl From<PatternBits> for FilterPattern {
    fn from(bits: PatternBits) -> Self {
        let PatternBits { long, value, mask } = bits;
        if long {
            return Self::Long { value, mask };
        }
        let short = |bytes: [u8; LONG_BYTES]| std::array::from_fn(|at| bytes[at]);
        Self::Short { value: short(value), mask: short(mask) }
    }
}

impl From<&FilterPattern> for PatternBits {
    fn from(pattern: &FilterPattern) -> Self {
        let mut bits = Self::any(matches!(pattern, FilterPattern::Long { .. }));
        let (value, mask): (&[u8], &[u8]) = match pattern {
            FilterPattern::Short { value, mask } => (value, mask),
            FilterPattern::Long { value, mask } => (value, mask),
        };
        for (at, (value, mask)) in value.iter().zip(mask).enumerate() {
            (bits.value[at], bits.mask[at]) = (value & mask, *mask);
        }
        bits
    }
}

/// IPv4 or IPv6 packets for code `ip`. Matches all of them until further conditions are added.
///
/// ```
/// use pdp_slowpath::IpMatch;
/// let dns = IpMatch::ip().dst("192.0.2.0/24".parse().unwrap()).proto(17).dport(53);
/// assert_eq!(dns.to_string(), "ip dst 192.0.2.0/24 proto udp dport 53");
/// ```
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct IpMatch<N> {
    bits: PatternBits,
    net: PhantomData<N>,
}

impl IpMatch<Ipv4Net> {
    /// All IPv4 packets.
    pub fn ip() -> Self {
        Self { bits: PatternBits::any(false), net: PhantomData }
    }
}

impl IpMatch<Ipv6Net> {
    /// All IPv6 packets.
    pub fn ip6() -> Self {
        Self { bits: PatternBits::any(true), net: PhantomData }
    }
}

impl<N: Into<IpNet>> IpMatch<N> {
    fn net(mut self, field: IpField, net: N) -> Self {
        let octets = |address| match address {
            IpAddr::V4(address) => address.octets().to_vec(),
            IpAddr::V6(address) => address.octets().to_vec(),
        };
        let net = net.into();
        self.bits.set(field, &octets(net.addr()), &octets(net.netmask()));
        self
    }

    fn number<const B: usize>(mut self, field: IpField, value: [u8; B], mask: [u8; B]) -> Self {
        self.bits.set(field, &value, &mask);
        self
    }

    /// From a source address in this prefix.
    pub fn src(self, net: N) -> Self {
        self.net(IpField::Source, net)
    }

    /// To a destination address in this prefix.
    pub fn dst(self, net: N) -> Self {
        self.net(IpField::Destination, net)
    }

    /// Matches this protocol: 6 is TCP, 17 is UDP.
    pub fn proto(self, proto: impl Into<Masked<u8>>) -> Self {
        let Masked { value, mask } = proto.into();
        self.number(IpField::Protocol, [value], [mask])
    }

    /// From this port, or ports: `(1024, 0xfc00)` is 1024 to 2047.
    pub fn sport(self, port: impl Into<Masked<u16>>) -> Self {
        let Masked { value, mask } = port.into();
        self.number(IpField::SourcePort, value.to_be_bytes(), mask.to_be_bytes())
    }

    /// To this port, or ports.
    pub fn dport(self, port: impl Into<Masked<u16>>) -> Self {
        let Masked { value, mask } = port.into();
        self.number(IpField::DestinationPort, value.to_be_bytes(), mask.to_be_bytes())
    }

    /// With this traffic class, the whole byte.
    pub fn tos(self, class: impl Into<Masked<u8>>) -> Self {
        let Masked { value, mask } = class.into();
        self.number(IpField::Class, [value], [mask])
    }

    /// With this differentiated services code point, 0 to 63. Only its lower six bits count.
    pub fn dscp(self, code_point: u8) -> Self {
        self.tos((code_point << 2, DSCP_MASK))
    }

    /// Received by this vport.
    pub fn came_by(self, vport: impl Into<Masked<u16>>) -> Self {
        let Masked { value, mask } = vport.into();
        self.number(IpField::CameBy, value.to_be_bytes(), mask.to_be_bytes())
    }
}

impl<N> From<IpMatch<N>> for FilterPattern {
    fn from(from: IpMatch<N>) -> Self {
        from.bits.into()
    }
}

impl<N> fmt::Display for IpMatch<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&ip_text(&self.bits, &[]))
    }
}

impl<N> fmt::Debug for IpMatch<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Reads a pattern. `names` are the names of the interfaces, in the order of their vports.
///
/// # Errors
/// If the text is no pattern, or is longer than [`TEXT_BYTES_MAX`].
pub fn parse(text: &str, names: &[impl AsRef<str>]) -> Result<FilterPattern, BadPattern> {
    if text.len() > TEXT_BYTES_MAX {
        return bad(format!("{} bytes, {TEXT_BYTES_MAX} at most", text.len()));
    }
    let mut words = text.split_ascii_whitespace();
    let (mut bits, known): (_, &[&str]) = match words.next() {
        Some("ip") => (PatternBits::any(false), &WORDS),
        Some("ip6") => (PatternBits::any(true), &WORDS),
        Some("raw") => (raw(words.next().unwrap_or_default())?, &["in"]),
        first => {
            let word = first.unwrap_or_default();
            return bad(format!("a match starts with ip, ip6 or raw, not {word:?}"));
        }
    };
    let mut seen: Vec<IpField> = Vec::new();
    while let Some(word) = words.next() {
        if !known.contains(&word) {
            return bad(format!("unknown word {word:?}; known: {}", known.join(", ")));
        }
        let field = match word {
            "src" => IpField::Source,
            "dst" => IpField::Destination,
            "proto" => IpField::Protocol,
            "sport" => IpField::SourcePort,
            "dport" => IpField::DestinationPort,
            "tos" | "dscp" => IpField::Class,
            _ => IpField::CameBy,
        };
        if seen.contains(&field) {
            return bad(format!("{word} appears twice"));
        }
        seen.push(field);
        let value = words.next().unwrap_or_default();
        let (value, mask) = match field {
            IpField::Source | IpField::Destination => address(value, bits.long),
            IpField::Protocol => {
                let known = PROTOCOLS.iter().find(|(name, _)| *name == value);
                match known {
                    Some((_, number)) => Some((vec![*number], vec![u8::MAX])),
                    None => number(value, 1),
                }
            }
            IpField::Class if word == "dscp" => {
                let found = digits(value, 10).filter(|code_point| *code_point < 64);
                found.map(|code_point| (vec![(code_point << 2) as u8], vec![DSCP_MASK]))
            }
            IpField::CameBy => {
                let found = names.iter().position(|name| name.as_ref() == value);
                match found.and_then(|vport| u16::try_from(vport).ok()) {
                    Some(vport) => Some((vport.to_be_bytes().to_vec(), vec![u8::MAX; 2])),
                    None => number(value, 2),
                }
            }
            IpField::SourcePort | IpField::DestinationPort => number(value, 2),
            IpField::Class => number(value, 1),
        }
        .ok_or_else(|| BadPattern(format!("{word} {value:?}; {}", hint(word, bits.long, names))))?;
        bits.set(field, &value, &mask);
    }
    Ok(bits.into())
}

/// Hint for the value of a word.
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

/// Returns a mask of `length` bits.
fn prefix_mask(length: usize, bytes: usize) -> Option<Vec<u8>> {
    let byte = |at: usize| match length.saturating_sub(8 * at) {
        0 => 0,
        bits @ 1..8 => !(u8::MAX >> bits),
        _ => u8::MAX,
    };
    (length <= 8 * bytes).then(|| (0..bytes).map(byte).collect())
}

/// Parses an unsigned number.
fn digits(text: &str, radix: u32) -> Option<u32> {
    let good = !text.is_empty() && text.chars().all(|digit| digit.is_digit(radix));
    good.then(|| u32::from_str_radix(text, radix).ok()).flatten()
}

/// Parses `VALUE` or `VALUE/MASK` of one or two bytes. Each is decimal, or hexadecimal after `0x`.
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

/// Parses `BYTES` or `BYTES/MASK`.
fn raw(text: &str) -> Result<PatternBits, BadPattern> {
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
            "raw value of {value} bytes, mask of {mask}; use 1 to {most} bytes for both"
        ));
    }
    let mut bits = PatternBits::any(value.len() > SHORT_BYTES - VPORT_BYTES);
    for (at, (value, mask)) in value.iter().zip(mask).enumerate() {
        (bits.value[at], bits.mask[at]) = (value & mask, mask);
    }
    Ok(bits)
}

/// Parses bytes in hexadecimal.
fn hex(text: &str) -> Option<Vec<u8>> {
    let pairs = text.as_bytes().chunks(2);
    pairs
        .map(|pair| {
            let pair = std::str::from_utf8(pair).ok().filter(|pair| pair.len() == 2)?;
            digits(pair, 16).and_then(|byte| u8::try_from(byte).ok())
        })
        .collect()
}

/// Writes a pattern so that [`parse`] reads it. `names` are the
/// names of the interfaces, in the order of their vports.
pub fn text(pattern: &FilterPattern, code: PatternCode, names: &[impl AsRef<str>]) -> String {
    let bits = PatternBits::from(pattern);
    let names: Vec<&str> = names.iter().map(AsRef::as_ref).collect();
    match code {
        PatternCode::Ip => ip_text(&bits, &names),
        PatternCode::Fields => raw_text(&bits, &names),
    }
}

fn raw_text(bits: &PatternBits, names: &[&str]) -> String {
    let (value, mask) = (&bits.value[..bits.len()], &bits.mask[..bits.len()]);
    let fields = bits.len() - VPORT_BYTES;
    let used = mask[..fields].iter().rposition(|byte| *byte != 0).map_or(0, |at| at + 1);
    // Enough bytes to show the length of the pattern.
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

/// Writes a vport as its name, if it has one.
fn vport_text(vport: u32, mask: u32, names: &[&str]) -> String {
    let number = vport.to_string();
    match names.get(vport as usize) {
        _ if mask != u32::from(u16::MAX) => format!("{vport}/{mask:#x}"),
        Some(name) => (*name).to_owned(),
        // An interface may have another vport's number as its name.
        None if names.contains(&number.as_str()) => format!("{number}/0xffff"),
        None => number,
    }
}

fn ip_text(bits: &PatternBits, names: &[&str]) -> String {
    let mut out = String::from(if bits.long { "ip6" } else { "ip" });
    for field in IpField::ALL {
        let (value, mask) = bits.get(field);
        if mask.iter().all(|byte| *byte == 0) {
            continue;
        }
        let whole = mask.iter().all(|byte| *byte == u8::MAX);
        let number_of = |bytes: &[u8]| if bytes.len() > 2 { 0 } else { number_of(bytes) };
        let (number, number_mask) = (number_of(value), number_of(mask));
        let mut one = |word: &str, text: &str| {
            // Writing to a String always succeeds.
            let _ = write!(out, " {word} {text}");
        };
        let masked = match whole {
            true => number.to_string(),
            false => format!("{number}/{number_mask:#x}"),
        };
        match field {
            IpField::Source => one("src", &address_text(value, mask)),
            IpField::Destination => one("dst", &address_text(value, mask)),
            IpField::Protocol => {
                let known = PROTOCOLS.iter().find(|known| whole && u32::from(known.1) == number);
                one("proto", known.map_or(masked.as_str(), |known| known.0));
            }
            IpField::SourcePort => one("sport", &masked),
            IpField::DestinationPort => one("dport", &masked),
            IpField::Class if number_mask == u32::from(DSCP_MASK) => {
                one("dscp", &(number >> 2).to_string());
            }
            IpField::Class if whole => one("tos", &format!("{number:#x}")),
            IpField::Class => one("tos", &format!("{number:#x}/{number_mask:#x}")),
            IpField::CameBy => one("in", &vport_text(number, number_mask, names)),
        }
    }
    out
}

/// Writes an address in the form that [`address`] reads.
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

    fn pattern() -> impl Strategy<Value = FilterPattern> {
        // Random masks, and those of prefixes and whole fields, which random bytes never are.
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
            FilterPattern::Short {
                value: value.try_into().unwrap(),
                mask: mask.try_into().unwrap(),
            }
        });
        let long = (value(LONG_BYTES), mask(LONG_BYTES)).prop_map(|(value, mask)| {
            FilterPattern::Long { value: value.try_into().unwrap(), mask: mask.try_into().unwrap() }
        });
        prop_oneof![short, long]
    }

    /// Clears the value's bits outside the mask.
    fn plain(pattern: &FilterPattern) -> FilterPattern {
        PatternBits::from(pattern).into()
    }

    /// A packet's fields in readable form.
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
        /// The bits that the engine looks up, according to the documentation of [`Pattern`].
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

    fn meets(pattern: &FilterPattern, key: &[u8]) -> bool {
        let bits = PatternBits::from(pattern);
        assert_eq!(bits.len(), key.len());
        key.iter().enumerate().all(|(at, byte)| byte & bits.mask[at] == bits.value[at])
    }

    /// Few enough values that packets match filters.
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

    /// Returns a pattern's text, and true if it matches the packet.
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
        fn round_trip_keeps_every_value(pattern in pattern()) {
            for names in [&NAMES[..], &[]] {
                let ip = text(&pattern, PatternCode::Ip, names);
                prop_assert_eq!(parse(&ip, names), Ok(plain(&pattern)), "{}", ip);
                prop_assert_eq!(text(&parse(&ip, names).unwrap(), PatternCode::Ip, names), ip);
            }
            let raw = text(&pattern, PatternCode::Fields, &NAMES);
            prop_assert_eq!(parse(&raw, &NAMES), Ok(plain(&pattern)), "{}", raw);
        }

        /// The bits match exactly the packets that a plain reading of the words matches.
        #[test]
        fn patterns_match_exactly_the_described_packets(
            (filter, packet) in both(), lengths in (0..=128_u8, 0..=128_u8), which in any::<u8>(),
        ) {
            let (text, meant) = says(&filter, lengths, which, &packet);
            let pattern = parse(&text, &NAMES).unwrap();
            prop_assert_eq!(meets(&pattern, &packet.key()), meant, "{} and {:?}", text, packet);
        }

        #[test]
        fn pattern_parser_never_panics(text in ".{0,60}", more in "(ip|ip6|raw|src|in|proto|/|1| |0x|:){0,12}") {
            let _ = (parse(&text, &NAMES), parse(&more, &NAMES));
        }
    }

    #[test]
    fn built_match_equals_its_text() {
        let net = |text: &str| text.parse().unwrap();
        let all = IpMatch::ip()
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
        assert_eq!(self::text(&all.into(), PatternCode::Ip, &NAMES), named);
        let six = IpMatch::ip6().dst("2001:db8::/32".parse().unwrap()).proto(58).tos((3, 3));
        assert_eq!(six.to_string(), "ip6 dst 2001:db8::/32 proto icmp6 tos 0x3/0x3");
        assert_eq!(parse(&six.to_string(), &NAMES), Ok(six.into()));
        assert_eq!(
            parse(" ip6  proto ipv6-icmp tos 3/3 dst 2001:db8::1/32 ", &NAMES),
            Ok(six.into())
        );
    }

    #[test]
    fn raw_patterns_match_the_field_bytes() {
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
            let again = self::text(&found, PatternCode::Fields, &NAMES);
            assert_eq!(again, text.replace("0a00/ff00", "0a"));
        }
    }

    #[test]
    fn pattern_errors_say_what_is_accepted() {
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
            ("ip tos 1 dscp 1", "dscp appears twice"),
            (
                "ip in eth7",
                "in \"eth7\"; use an interface (eth0, eth1, eth10, 9) or a vport's number",
            ),
            ("raw", "raw value of 0 bytes, mask of 0; use 1 to 38"),
            ("raw 1", "use raw BYTES or raw BYTES/MASK"),
            ("raw 0102/ff", "raw value of 2 bytes, mask of 1; use 1 to 38"),
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
