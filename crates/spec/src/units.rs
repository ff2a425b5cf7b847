//! Values with a unit or a notation: how users write them, their bounds, and their errors.
//!
//! Each type reads several notations (`0.5`, `500m`, `256Mi`,
//! `100Mbps`). It writes one form that reads back to the same value.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{self, Deserializer, Visitor};
use serde::{Deserialize, Serialize, Serializer};

use crate::limits::{
    CPUS_MAX, FIELD_BYTES_MAX, KEY_RANGES_MAX, MILLICORES_MAX, PCAP_BYTES_MAX, QUEUE_BYTES_MAX,
    QUEUE_FRAMES_MAX, RATE_BPS_MAX, SPAN_NS_MAX, USER_CHARS_MAX, USER_ID_MAX,
};

/// Nanoseconds per second.
const SECOND_NS: u64 = 1_000_000_000;
/// One percent, in thousand millionths.
const PERCENT: u64 = 10_000_000;

/// Why a text is not a valid value, and how to write it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{value:?} {problem}")]
pub struct BadValue {
    /// The text.
    pub value: String,
    /// Problem with the text.
    pub problem: String,
    /// Correct notation.
    pub hint: &'static str,
}

fn bad(value: &str, problem: impl Into<String>, hint: &'static str) -> BadValue {
    BadValue { value: value.into(), problem: problem.into(), hint }
}

/// User of a node, optionally with a group, by name or number: `USER` or `USER:GROUP`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct User(pub String);

/// Processing power in thousandths of a core. Written `0.5` or `500m`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Cores(pub u32);

/// Bytes. Written as a number or with `K`, `M`, `G`, `T` (powers of 1000) or `Ki`, `Mi`, `Gi`,
/// `Ti` (powers of 1024).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Bytes(pub u64);

/// Bits per second. Written as a number or with `k`, `M`, `G`, `T`, with or without `bps`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BitRate(pub u64);

/// A span of time in nanoseconds. Written with `ns`, `us`, `ms`, `s` or `m`, or as a number of
/// milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Span(pub u64);

/// Fraction in thousand millionths. Written in percent: `0.1%` or `0.1`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Percent(pub u32);

/// Queue depth. Written as a number of frames or as a span of time with its unit: `256`, `50ms`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum QueueDepth {
    /// Number of frames.
    Frames(u32),
    /// Time that the queued frames take at the link's rate.
    Time(Span),
}

/// Queue length. Written as a number of frames, or as bytes with their unit: `64`, `256KiB`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum QueueLength {
    /// Number of frames.
    Frames(u32),
    /// Number of bytes, as the link's rate counts them.
    Bytes(Bytes),
}

/// MAC address. Written `02:00:00:00:00:01`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Mac(pub [u8; 6]);

/// Bytes. Written in hexadecimal, two digits per byte: `0806`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Hex(pub Vec<u8>);

/// Bytes of a file. Written in base64 (RFC 4648 section 4).
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Base64(pub Arc<[u8]>);

impl fmt::Debug for Base64 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.0.len())
    }
}

/// CPUs. Written in the kernel's notation: `0-3,6`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct CpuSet(pub BTreeSet<u32>);

/// Tunnel keys, as disjoint ranges in ascending order. Written `100-199,300`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct KeySet(pub Vec<(u32, u32)>);

impl KeySet {
    /// True if it contains the key.
    pub fn has(&self, key: u32) -> bool {
        self.0.iter().any(|&(first, last)| (first..=last).contains(&key))
    }

    /// Returns the lowest key that both contain.
    pub fn common(&self, other: &Self) -> Option<u32> {
        let pairs = self.0.iter().flat_map(|one| other.0.iter().map(move |two| (one, two)));
        let common = pairs.map(|(one, two)| (one.0.max(two.0), one.1.min(two.1)));
        common.filter(|(first, last)| first <= last).map(|(first, _)| first).min()
    }
}

/// Address with the prefix length of its subnet. Written `10.0.0.1/24`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Address(pub IpNet);

/// Destination of a route: a prefix without host bits.
/// Written `10.0.0.0/8`, as an address alone, or `default`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Destination {
    /// The default route, of the next hop's IP version.
    Default,
    /// A prefix.
    Prefix(IpNet),
}

impl Destination {
    /// Returns the prefix of all IPv4 or IPv6 addresses.
    pub fn default_of(v4: bool) -> IpNet {
        match v4 {
            true => IpNet::V4(Ipv4Net::new_assert(Ipv4Addr::UNSPECIFIED, 0)),
            false => IpNet::V6(Ipv6Net::new_assert(Ipv6Addr::UNSPECIFIED, 0)),
        }
    }
}

/// End of a link. Written `NODE:INTERFACE` or `external:NAME`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Endpoint {
    /// An interface of a node of the same vnet.
    Port {
        /// Name of the node.
        node: String,
        /// Name of the interface.
        interface: String,
    },
    /// One of the vnet's externals.
    External(String),
}

/// Port of the machine that forwards to a node. Written
/// `[ADDRESS:]PORT_OF_MACHINE:PORT_OF_NODE[/udp]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PublishedPort(pub pdp_proto::management::ManagementPort);

/// Text before the colon of an external endpoint. Not allowed as a node's name.
pub const EXTERNAL: &str = "external";

const CORES_HINT: &str = "write cores as 0.5 or thousandths as 500m, with at most three decimals";
const BYTES_HINT: &str = "write bytes as a number or like 256Mi or 1G";
const RATE_HINT: &str = "write bits a second as a number or like 100Mbps or 1G";
const SPAN_HINT: &str = "write a time like 20ms, 1.5s or 250us";
const PERCENT_HINT: &str = "write a percentage like 0.1% or 5";
const LENGTH_HINT: &str = "write frames like 64, or bytes with their unit like 256KiB";
const QUEUE_HINT: &str = "write frames as a number, or as their time at the rate, like 50ms";
const MAC_HINT: &str = "write six bytes like 02:00:00:00:00:01";
const HEX_HINT: &str = "write two hexadecimal digits a byte, in quotes, like \"0806\"";
const BASE64_HINT: &str = "write the output of `base64 -w0 FILE`, or name the file in frames";
const KEYS_HINT: &str = "write keys as a number, or as ranges in quotes like \"100-199,300\"";
const CPUS_HINT: &str = "write CPU numbers in quotes like \"0-3,6\"";
const ADDRESS_HINT: &str = "write an address with its prefix length like 10.0.0.1/24 or fd00::1/64";
const DESTINATION_HINT: &str = "write a prefix like 10.0.0.0/8 or fd00::/8, an address, or default";
const USER_HINT: &str = "write it like frr, frr:frr or 1000:1000";
const ENDPOINT_HINT: &str = "write \"NODE:INTERFACE\" or \"external:NAME\"";

/// Returns `text` as a decimal number times `scale`, exactly. `None` if it
/// is not a number, needs more decimals than `scale` has, or does not fit.
fn scaled(text: &str, scale: u64) -> Option<u64> {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let digits = |s: &str| s.bytes().all(|b| b.is_ascii_digit());
    if (whole.is_empty() && fraction.is_empty()) || !digits(whole) || !digits(fraction) {
        return None;
    }
    let fraction = fraction.trim_end_matches('0');
    let whole = if whole.is_empty() { 0 } else { whole.parse::<u64>().ok()? };
    let mut value = whole.checked_mul(scale)?;
    if !fraction.is_empty() {
        let power = 10u64.checked_pow(u32::try_from(fraction.len()).ok()?)?;
        let part = u128::from(fraction.parse::<u64>().ok()?) * u128::from(scale);
        if part % u128::from(power) != 0 {
            return None;
        }
        value = value.checked_add(u64::try_from(part / u128::from(power)).ok()?)?;
    }
    Some(value)
}

impl FromStr for Cores {
    type Err = BadValue;

    fn from_str(text: &str) -> Result<Self, BadValue> {
        let value = match text.strip_suffix('m') {
            Some(thousandths) => scaled(thousandths, 1),
            None => scaled(text, 1000),
        }
        .ok_or_else(|| bad(text, "is not a number of cores", CORES_HINT))?;
        match u32::try_from(value) {
            Ok(value) if value <= MILLICORES_MAX => Ok(Self(value)),
            _ => Err(bad(text, format!("is above {} cores", MILLICORES_MAX / 1000), CORES_HINT)),
        }
    }
}

impl fmt::Display for Cores {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (whole, rest) = (self.0 / 1000, self.0 % 1000);
        if rest == 0 {
            return write!(f, "{whole}");
        }
        let digits = format!("{rest:03}");
        write!(f, "{whole}.{}", digits.trim_end_matches('0'))
    }
}

impl FromStr for Bytes {
    type Err = BadValue;

    fn from_str(text: &str) -> Result<Self, BadValue> {
        let units = [("Ki", 1 << 10), ("Mi", 1 << 20), ("Gi", 1 << 30), ("Ti", 1u64 << 40)];
        let decimal = [("K", 1_000), ("k", 1_000), ("M", 1_000_000), ("G", 1_000_000_000)];
        let (number, scale) = units
            .iter()
            .chain(&decimal)
            .chain(&[("T", 1_000_000_000_000)])
            .find_map(|(unit, scale)| Some((text.strip_suffix(unit)?, *scale)))
            .unwrap_or((text, 1));
        let value = scaled(number.trim_end(), scale);
        value.map(Self).ok_or_else(|| bad(text, "is not a number of bytes", BYTES_HINT))
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = [("Ti", 1u64 << 40), ("Gi", 1 << 30), ("Mi", 1 << 20), ("Ki", 1 << 10)];
        let fits = |&&(_, scale): &&(&str, u64)| self.0 != 0 && self.0.is_multiple_of(scale);
        match units.iter().find(fits) {
            Some((unit, scale)) => write!(f, "{}{unit}", self.0 / scale),
            None => write!(f, "{}", self.0),
        }
    }
}

impl FromStr for BitRate {
    type Err = BadValue;

    fn from_str(text: &str) -> Result<Self, BadValue> {
        let number = text.strip_suffix("bps").or(text.strip_suffix("bit")).unwrap_or(text);
        let units = [("k", 1_000), ("K", 1_000), ("M", 1_000_000), ("G", 1_000_000_000)];
        let (number, scale) = units
            .iter()
            .chain(&[("T", 1_000_000_000_000u64)])
            .find_map(|(unit, scale)| Some((number.strip_suffix(unit)?, *scale)))
            .unwrap_or((number, 1));
        match scaled(number.trim_end(), scale) {
            Some(value) if value <= RATE_BPS_MAX => Ok(Self(value)),
            Some(_) => {
                Err(bad(text, format!("is above {} bits a second", RATE_BPS_MAX), RATE_HINT))
            }
            None => Err(bad(text, "is not a number of bits a second", RATE_HINT)),
        }
    }
}

impl fmt::Display for BitRate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units =
            [("T", 1_000_000_000_000), ("G", 1_000_000_000), ("M", 1_000_000), ("k", 1_000)];
        let fits = |&&(_, scale): &&(&str, u64)| self.0 != 0 && self.0.is_multiple_of(scale);
        match units.iter().find(fits) {
            Some((unit, scale)) => write!(f, "{}{unit}bps", self.0 / scale),
            None => write!(f, "{}bps", self.0),
        }
    }
}

impl FromStr for Span {
    type Err = BadValue;

    fn from_str(text: &str) -> Result<Self, BadValue> {
        let units = [("ns", 1), ("us", 1_000), ("µs", 1_000), ("ms", 1_000_000), ("s", SECOND_NS)];
        let (number, scale) = units
            .iter()
            .chain(&[("m", 60 * SECOND_NS)])
            .find_map(|(unit, scale)| Some((text.strip_suffix(unit)?, *scale)))
            .unwrap_or((text, 1_000_000));
        match scaled(number.trim_end(), scale) {
            Some(value) if value <= SPAN_NS_MAX => Ok(Self(value)),
            Some(_) => Err(bad(text, format!("is above {} s", SPAN_NS_MAX / SECOND_NS), SPAN_HINT)),
            None => Err(bad(text, "is not a duration", SPAN_HINT)),
        }
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = [("s", SECOND_NS), ("ms", 1_000_000), ("us", 1_000)];
        let fits = |&&(_, scale): &&(&str, u64)| self.0.is_multiple_of(scale);
        match units.iter().find(fits) {
            Some((unit, scale)) => write!(f, "{}{unit}", self.0 / scale),
            None => write!(f, "{}ns", self.0),
        }
    }
}

impl FromStr for Percent {
    type Err = BadValue;

    fn from_str(text: &str) -> Result<Self, BadValue> {
        let number = text.strip_suffix('%').unwrap_or(text).trim_end();
        match scaled(number, PERCENT).map(u32::try_from) {
            Some(Ok(value)) if u64::from(value) <= 100 * PERCENT => Ok(Self(value)),
            Some(_) => Err(bad(text, "is above 100%", PERCENT_HINT)),
            None => Err(bad(text, "is not a percentage of up to seven decimals", PERCENT_HINT)),
        }
    }
}

impl fmt::Display for Percent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (whole, rest) = (u64::from(self.0) / PERCENT, u64::from(self.0) % PERCENT);
        let digits = format!("{whole}.{rest:07}");
        write!(f, "{}%", digits.trim_end_matches('0').trim_end_matches('.'))
    }
}

impl FromStr for QueueDepth {
    type Err = BadValue;

    fn from_str(text: &str) -> Result<Self, BadValue> {
        if text.ends_with(|last: char| last.is_ascii_alphabetic()) {
            return match text.parse()? {
                Span(0) => Err(bad(text, "is not a queue's time", QUEUE_HINT)),
                span => Ok(Self::Time(span)),
            };
        }
        match text.parse() {
            Ok(frames @ 1..=QUEUE_FRAMES_MAX) => Ok(Self::Frames(frames)),
            Ok(_) => Err(bad(text, format!("is not 1 to {QUEUE_FRAMES_MAX} frames"), QUEUE_HINT)),
            Err(_) => Err(bad(text, "is not a number of frames or a duration", QUEUE_HINT)),
        }
    }
}

impl fmt::Display for QueueDepth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Frames(frames) => frames.fmt(f),
            Self::Time(span) => span.fmt(f),
        }
    }
}

impl FromStr for QueueLength {
    type Err = BadValue;

    fn from_str(text: &str) -> Result<Self, BadValue> {
        if text.ends_with(|last: char| last.is_ascii_alphabetic()) {
            let bytes = text.strip_suffix('B').unwrap_or(text).parse::<Bytes>();
            return match bytes {
                Ok(bytes @ Bytes(1..=QUEUE_BYTES_MAX)) => Ok(Self::Bytes(bytes)),
                _ => Err(bad(text, format!("is not 1 to {QUEUE_BYTES_MAX} bytes"), LENGTH_HINT)),
            };
        }
        match text.parse() {
            Ok(frames @ 1..=QUEUE_FRAMES_MAX) => Ok(Self::Frames(frames)),
            Ok(_) => Err(bad(text, format!("is not 1 to {QUEUE_FRAMES_MAX} frames"), LENGTH_HINT)),
            Err(_) => Err(bad(text, "is not a number of frames or bytes", LENGTH_HINT)),
        }
    }
}

impl fmt::Display for QueueLength {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Frames(frames) => frames.fmt(f),
            Self::Bytes(bytes) => write!(f, "{bytes}B"),
        }
    }
}

impl FromStr for Mac {
    type Err = BadValue;

    fn from_str(text: &str) -> Result<Self, BadValue> {
        let mut bytes = [0; 6];
        let mut parts = text.split(':');
        for byte in &mut bytes {
            let part = parts.next().filter(|part| part.len() == 2 && !part.starts_with('+'));
            *byte = part
                .and_then(|part| u8::from_str_radix(part, 16).ok())
                .ok_or_else(|| bad(text, "is not a MAC address", MAC_HINT))?;
        }
        if parts.next().is_some() {
            return Err(bad(text, "is not a MAC address", MAC_HINT));
        }
        if bytes == [0; 6] {
            return Err(bad(text, "is the zero address", MAC_HINT));
        }
        if bytes[0] & 1 != 0 {
            return Err(bad(
                text,
                "is a multicast MAC address",
                "the lowest bit of the first byte must be 0, as in 02:00:00:00:00:01",
            ));
        }
        Ok(Self(bytes))
    }
}

impl fmt::Display for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

impl FromStr for Hex {
    type Err = BadValue;

    fn from_str(text: &str) -> Result<Self, BadValue> {
        let digits = text.strip_prefix("0x").unwrap_or(text).as_bytes();
        if digits.is_empty() || !digits.len().is_multiple_of(2) {
            return Err(bad(text, "needs an even number of hexadecimal digits", HEX_HINT));
        }
        if digits.len() / 2 > FIELD_BYTES_MAX {
            return Err(bad(text, format!("is longer than {FIELD_BYTES_MAX} bytes"), HEX_HINT));
        }
        let digit = |byte: u8| (byte as char).to_digit(16);
        digits
            .chunks_exact(2)
            .map(|pair| Some((digit(pair[0])? * 16 + digit(pair[1])?) as u8))
            .collect::<Option<Vec<u8>>>()
            .map(Self)
            .ok_or_else(|| bad(text, "has other characters than hexadecimal digits", HEX_HINT))
    }
}

impl fmt::Display for Hex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl FromStr for Base64 {
    type Err = BadValue;

    fn from_str(text: &str) -> Result<Self, BadValue> {
        // Four base64 digits encode three bytes.
        if text.len() / 4 * 3 > PCAP_BYTES_MAX + 3 {
            let message = format!("is longer than {PCAP_BYTES_MAX} bytes");
            return Err(bad("", message, "use fewer frames"));
        }
        match STANDARD.decode(text) {
            Ok(bytes) => Ok(Self(bytes.into())),
            Err(error) => Err(bad("", format!("is not base64: {error}"), BASE64_HINT)),
        }
    }
}

impl fmt::Display for Base64 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&STANDARD.encode(&self.0))
    }
}

impl FromStr for CpuSet {
    type Err = BadValue;

    fn from_str(text: &str) -> Result<Self, BadValue> {
        let mut cpus = BTreeSet::new();
        for part in text.split(',') {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let number = |s: &str| {
                let s = s.trim();
                if s.is_empty() || !s.bytes().all(|b| b.is_ascii_digit()) {
                    return Err(bad(text, "is not a set of CPUs", CPUS_HINT));
                }
                match s.parse::<u32>() {
                    Ok(cpu) if cpu < CPUS_MAX => Ok(cpu),
                    _ => Err(bad(text, format!("has a CPU above {}", CPUS_MAX - 1), CPUS_HINT)),
                }
            };
            let (first, last) = (number(first)?, number(last)?);
            if first > last {
                return Err(bad(text, "has a range that ends below its start", CPUS_HINT));
            }
            cpus.extend(first..=last);
        }
        Ok(Self(cpus))
    }
}

impl fmt::Display for CpuSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut cpus = self.0.iter().copied().peekable();
        let mut comma = "";
        while let Some(first) = cpus.next() {
            let mut last = first;
            while cpus.next_if_eq(&(last + 1)).is_some() {
                last += 1;
            }
            write!(f, "{comma}{first}")?;
            if last > first {
                write!(f, "-{last}")?;
            }
            comma = ",";
        }
        Ok(())
    }
}

impl FromStr for KeySet {
    type Err = BadValue;

    fn from_str(text: &str) -> Result<Self, BadValue> {
        let mut ranges = Vec::new();
        for part in text.split(',') {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let number = |digits: &str| {
                let digits = digits.trim();
                let plain = !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit());
                let number = plain.then(|| digits.parse::<u32>().ok()).flatten();
                number.ok_or_else(|| bad(text, "is not a set of keys", KEYS_HINT))
            };
            let (first, last) = (number(first)?, number(last)?);
            if first > last {
                return Err(bad(text, "has a range that ends below its start", KEYS_HINT));
            }
            ranges.push((first, last));
        }
        if ranges.len() > KEY_RANGES_MAX {
            return Err(bad(text, format!("has more than {KEY_RANGES_MAX} ranges"), KEYS_HINT));
        }
        ranges.sort_unstable();
        if let Some(two) = ranges.windows(2).find(|two| two[0].1 >= two[1].0) {
            return Err(bad(text, format!("includes {} twice", two[1].0), KEYS_HINT));
        }
        Ok(Self(ranges))
    }
}

impl fmt::Display for KeySet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut comma = "";
        for (first, last) in &self.0 {
            write!(f, "{comma}{first}")?;
            if last > first {
                write!(f, "-{last}")?;
            }
            comma = ",";
        }
        Ok(())
    }
}

impl FromStr for Address {
    type Err = BadValue;

    fn from_str(text: &str) -> Result<Self, BadValue> {
        let net: IpNet = text
            .parse()
            .map_err(|_| bad(text, "is not an address with a prefix length", ADDRESS_HINT))?;
        let address = net.addr();
        if address.is_unspecified() || address.is_multicast() || address.is_loopback() {
            return Err(bad(text, "can't be an interface's address", ADDRESS_HINT));
        }
        if let IpNet::V4(net) = net
            && net.prefix_len() < 31
            && (net.addr() == net.network() || net.addr() == net.broadcast())
        {
            let which = if net.addr() == net.network() { "network" } else { "broadcast" };
            return Err(bad(
                text,
                format!("is its subnet's {which} address"),
                "use an address between the subnet's first and last",
            ));
        }
        Ok(Self(net))
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for Destination {
    type Err = BadValue;

    fn from_str(text: &str) -> Result<Self, BadValue> {
        if text == "default" {
            return Ok(Self::Default);
        }
        let alone = || text.parse::<IpAddr>().map(IpNet::from);
        let net: IpNet = text
            .parse()
            .or_else(|_| alone())
            .map_err(|_| bad(text, "is not a route destination", DESTINATION_HINT))?;
        if net.addr() != net.network() {
            let net = net.trunc();
            return Err(bad(
                text,
                format!("has bits beyond its prefix length; its network is {net}"),
                DESTINATION_HINT,
            ));
        }
        if net.network().is_multicast() {
            return Err(bad(
                text,
                "is a multicast prefix",
                "leave multicast routes to routing software",
            ));
        }
        Ok(Self::Prefix(net))
    }
}

impl fmt::Display for Destination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::Prefix(prefix) => prefix.fmt(f),
        }
    }
}

impl FromStr for User {
    type Err = BadValue;

    fn from_str(text: &str) -> Result<Self, BadValue> {
        let good = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
        let is_name = |part: &str| {
            (1..=USER_CHARS_MAX).contains(&part.len())
                && part.chars().all(good)
                && !part.starts_with(['-', '.'])
        };
        let parts: Vec<&str> = text.split(':').collect();
        if parts.len() > 2 || !parts.iter().all(|part| is_name(part)) {
            return Err(bad(text, "is not USER or USER:GROUP", USER_HINT));
        }
        let is_number = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
        let in_range = |part: &str| part.parse().is_ok_and(|id: u32| id <= USER_ID_MAX);
        match parts.into_iter().find(|part| is_number(part) && !in_range(part)) {
            Some(_) => Err(bad(text, format!("has an id outside 0 to {USER_ID_MAX}"), USER_HINT)),
            None => Ok(Self(text.into())),
        }
    }
}

impl fmt::Display for User {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for Endpoint {
    type Err = BadValue;

    fn from_str(text: &str) -> Result<Self, BadValue> {
        match text.split_once(':') {
            Some((EXTERNAL, name)) if !name.is_empty() => Ok(Self::External(name.into())),
            Some((node, interface)) if !node.is_empty() && !interface.is_empty() => {
                Ok(Self::Port { node: node.into(), interface: interface.into() })
            }
            _ => Err(bad(text, "is not an endpoint", ENDPOINT_HINT)),
        }
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Port { node, interface } => write!(f, "{node}:{interface}"),
            Self::External(name) => write!(f, "{EXTERNAL}:{name}"),
        }
    }
}

/// Deserializes a scalar, number or text, through `FromStr`.
fn from_scalar<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: FromStr<Err = BadValue>,
{
    struct Scalar<T>(std::marker::PhantomData<T>);
    impl<T: FromStr<Err = BadValue>> Visitor<'_> for Scalar<T> {
        type Value = T;
        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a number or text")
        }
        fn visit_str<E: de::Error>(self, text: &str) -> Result<T, E> {
            text.parse().map_err(E::custom)
        }
        fn visit_u64<E: de::Error>(self, number: u64) -> Result<T, E> {
            self.visit_str(&number.to_string())
        }
        fn visit_i64<E: de::Error>(self, number: i64) -> Result<T, E> {
            self.visit_str(&number.to_string())
        }
        fn visit_f64<E: de::Error>(self, number: f64) -> Result<T, E> {
            self.visit_str(&number.to_string())
        }
    }
    deserializer.deserialize_any(Scalar(std::marker::PhantomData))
}

/// Implements `Serialize`, `Deserialize` and `JsonSchema` for a value type.
/// Arguments: schema name, JSON types, schema keywords, and text form.
macro_rules! value {
    ($type:ident, $name:literal, $types:tt, $description:literal, $write:expr) => {
        impl<'de> Deserialize<'de> for $type {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                from_scalar(deserializer)
            }
        }

        impl Serialize for $type {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                let write: fn(&Self, S) -> Result<S::Ok, S::Error> = $write;
                write(self, serializer)
            }
        }

        impl JsonSchema for $type {
            fn inline_schema() -> bool {
                true
            }
            fn schema_name() -> Cow<'static, str> {
                $name.into()
            }
            fn json_schema(_: &mut SchemaGenerator) -> Schema {
                json_schema!({ "type": $types, "format": $name, "description": $description })
            }
        }
    };
}

value!(Cores, "cores", ["number", "string"], "Cores: `0.5` or `500m`.", |v, s| s
    .serialize_f64(f64::from(v.0) / 1000.0));
value!(Bytes, "bytes", ["integer", "string"], "Bytes: `268435456` or `256Mi`.", |v, s| s
    .serialize_u64(v.0));
value!(
    BitRate,
    "bit-rate",
    ["integer", "string"],
    "Bits a second: `100000000` or `100Mbps`.",
    |v, s| s.serialize_u64(v.0)
);
value!(Span, "span", ["number", "string"], "Time: `20ms`, or in milliseconds: `20`.", |v, s| s
    .collect_str(v));
value!(Percent, "percent", ["number", "string"], "Percentage: `0.1` or `0.1%`.", |v, s| s
    .collect_str(v));
value!(
    QueueDepth,
    "queue",
    ["integer", "string"],
    "Frames, or their time at the rate: `256` or `50ms`.",
    |v, s| match v {
        QueueDepth::Frames(frames) => s.serialize_u32(*frames),
        QueueDepth::Time(span) => s.collect_str(span),
    }
);
value!(
    QueueLength,
    "length",
    ["integer", "string"],
    "Frames, or bytes with their unit: `64` or `256KiB`.",
    |v, s| match v {
        QueueLength::Frames(frames) => s.serialize_u32(*frames),
        QueueLength::Bytes(_) => s.collect_str(v),
    }
);
value!(Mac, "mac", "string", "MAC address: `02:00:00:00:00:01`.", |v, s| s.collect_str(v));
value!(Hex, "hex", ["integer", "string"], "Bytes in hexadecimal: `\"0806\"`.", |v, s| s
    .collect_str(v));
value!(Base64, "base64", "string", "Bytes in base64.", |v, s| s.collect_str(v));
value!(CpuSet, "cpus", ["integer", "string"], "CPUs: `\"0-3,6\"`.", |v, s| s.collect_str(v));
value!(
    KeySet,
    "keys",
    ["integer", "string"],
    "Keys of tunnels: `7` or `\"100-199,300\"`.",
    |v, s| s.collect_str(v)
);
value!(Address, "address", "string", "Address with prefix length: `10.0.0.1/24`.", |v, s| s
    .collect_str(v));
value!(
    Destination,
    "destination",
    "string",
    "Destination of a route: `10.0.0.0/8`, `10.0.0.1` or `default`.",
    |v, s| s.collect_str(v)
);
value!(
    User,
    "user",
    ["integer", "string"],
    "User of a node, or user and group: `frr`, `frr:frr` or `1000`.",
    |v, s| s.collect_str(v)
);
value!(
    Endpoint,
    "endpoint",
    "string",
    "End of a link: `NODE:INTERFACE` or `external:NAME`.",
    |v, s| s.collect_str(v)
);
value!(
    PublishedPort,
    "published-port",
    "string",
    "Port of the machine and of the node: `8080:80`, `0.0.0.0:5353:53/udp`.",
    |v, s| s.collect_str(v)
);

/// Checks `text` against a `format` of the schema.
/// Accepts formats that this module does not define.
pub(crate) fn check_format(format: &str, text: &str) -> Result<(), BadValue> {
    match format {
        "cores" => text.parse::<Cores>().map(drop),
        "bytes" => text.parse::<Bytes>().map(drop),
        "bit-rate" => text.parse::<BitRate>().map(drop),
        "span" => text.parse::<Span>().map(drop),
        "percent" => text.parse::<Percent>().map(drop),
        "queue" => text.parse::<QueueDepth>().map(drop),
        "length" => text.parse::<QueueLength>().map(drop),
        "mac" => text.parse::<Mac>().map(drop),
        "hex" => text.parse::<Hex>().map(drop),
        "base64" => text.parse::<Base64>().map(drop),
        "cpus" => text.parse::<CpuSet>().map(drop),
        "keys" => text.parse::<KeySet>().map(drop),
        "address" => text.parse::<Address>().map(drop),
        "destination" => text.parse::<Destination>().map(drop),
        "user" => text.parse::<User>().map(drop),
        "endpoint" => text.parse::<Endpoint>().map(drop),
        "published-port" => text.parse::<PublishedPort>().map(drop),
        "ip" => text.parse::<IpAddr>().map(drop).map_err(|_| {
            bad(text, "is not an IP address", "write it like 192.0.2.1 or 2001:db8::1")
        }),
        _ => Ok(()),
    }
}
