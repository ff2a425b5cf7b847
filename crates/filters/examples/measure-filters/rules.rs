//! Rules: generated at random or read from files, and converted to filters.

use std::net::Ipv4Addr;

use pdp_filters::Filter;
use rand::rngs::SmallRng;
use rand::seq::IndexedRandom;
use rand::{RngExt as _, SeedableRng};

/// A rule about IPv4 addresses, ports and protocol.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Rule {
    /// Source and destination: address and mask.
    addresses: [(u32, u32); 2],
    /// Source and destination: first and last port.
    ports: [(u16, u16); 2],
    protocol: Option<u8>,
}

/// Text format of ClassBench's sets.
impl std::fmt::Display for Rule {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [(source, source_bits), (destination, destination_bits)] = self.addresses;
        let (source, destination) = (Ipv4Addr::from(source), Ipv4Addr::from(destination));
        write!(f, "@{source}/{source_bits}\t{destination}/{destination_bits}")?;
        for (low, high) in self.ports {
            write!(f, "\t{low} : {high}")?;
        }
        match self.protocol {
            Some(protocol) => write!(f, "\t0x{protocol:02x}/0xFF"),
            None => write!(f, "\t0x00/0x00"),
        }
    }
}

/// Reads rules in the format of ClassBench's sets: fields separated by tabs, addresses
/// `@10.0.0.0/8`, ports `0 : 65535`, the protocol `0x06/0xFF`. Further fields are ignored.
pub fn read(text: &str) -> Vec<Rule> {
    let rule = |line: &str| {
        let fields: Vec<&str> = line.trim_start_matches('@').split('\t').collect();
        let address = |at: usize| {
            let (address, bits) = fields.get(at)?.split_once('/')?;
            Some((address.parse::<Ipv4Addr>().ok()?.to_bits(), bits.parse().ok()?))
        };
        let ports = |at: usize| {
            let (low, high) = fields.get(at)?.split_once(':')?;
            Some((low.trim().parse().ok()?, high.trim().parse().ok()?))
        };
        let (protocol, mask) = fields.get(4)?.split_once('/')?;
        let hex = |text: &str| u8::from_str_radix(text.trim_start_matches("0x"), 16).ok();
        Some(Rule {
            addresses: [address(0)?, address(1)?],
            ports: [ports(2)?, ports(3)?],
            protocol: (hex(mask)? != 0).then_some(hex(protocol)?),
        })
    };
    let line = |line| rule(line).unwrap_or_else(|| panic!("no rule: {line}"));
    text.lines().map(line).collect()
}

/// Layout of keys and filters: addresses first, then ports and protocol. Two words
/// have the 104 bits of IPv4. Five words have IPv6: the prefix 2001:db8::/32, the
/// 32 bits, and for whole addresses 64 more bits derived from these.
pub trait Layout {
    /// Returns value and mask of an address.
    fn address(address: u32, bits: u32) -> (u128, u128);
    /// Returns the words of both addresses and the other fields.
    fn words(addresses: [u128; 2], rest: u64) -> Self;
}

impl Layout for [u64; 2] {
    fn address(address: u32, bits: u32) -> (u128, u128) {
        let mask = u32::MAX.checked_shl(32 - bits).unwrap_or(0);
        (address.into(), mask.into())
    }

    fn words([source, destination]: [u128; 2], rest: u64) -> Self {
        [(source as u64) << 32 | destination as u64, rest]
    }
}

impl Layout for [u64; 5] {
    fn address(address: u32, bits: u32) -> (u128, u128) {
        let host = u64::from(address).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let value = 0x2001_0db8 << 96 | u128::from(address) << 64 | u128::from(host);
        let mask = match bits {
            0 => 0,
            32 => u128::MAX,
            bits => u128::MAX << (96 - bits),
        };
        (value, mask)
    }

    fn words([source, destination]: [u128; 2], rest: u64) -> Self {
        let word = |address: u128, at: u32| (address >> at) as u64;
        [word(source, 64), word(source, 0), word(destination, 64), word(destination, 0), rest]
    }
}

/// Returns the filters of rules. Port ranges become prefixes; earlier rules have higher priorities.
pub fn filters<const W: usize>(rules: &[Rule]) -> Vec<Filter<W>>
where
    [u64; W]: Layout,
{
    let mut all = Vec::new();
    for (at, rule) in rules.iter().enumerate() {
        let [source, destination] =
            rule.addresses.map(|(address, bits)| <[u64; W]>::address(address, bits));
        let protocol = rule.protocol.map_or((0, 0), |protocol| (protocol, u8::MAX));
        for from in prefixes(rule.ports[0]) {
            for to in prefixes(rule.ports[1]) {
                let rest = |from: u16, to: u16, protocol: u8| {
                    u64::from(from) << 48 | u64::from(to) << 32 | u64::from(protocol) << 24
                };
                let value = rest(from.0, to.0, protocol.0);
                let mask = rest(from.1, to.1, protocol.1);
                all.push(Filter {
                    value: <[u64; W]>::words([source.0, destination.0], value),
                    mask: <[u64; W]>::words([source.1, destination.1], mask),
                    priority: (rules.len() - at) as u32,
                });
            }
        }
    }
    all
}

/// Returns value and mask of the prefixes that form a port range.
fn prefixes((low, high): (u16, u16)) -> Vec<(u16, u16)> {
    let (mut low, end, mut all) = (u32::from(low), u32::from(high) + 1, Vec::new());
    while low < end {
        let mut size = 1;
        while low.is_multiple_of(2 * size) && low + 2 * size <= end {
            size *= 2;
        }
        all.push((low as u16, !((size - 1) as u16)));
        low += size;
    }
    all
}

/// Alternatives with their weights.
type Shares<T> = &'static [(u32, T)];

/// A class of port ranges.
#[derive(Clone, Copy)]
enum Ports {
    /// All ports.
    Any,
    /// From 1024.
    High,
    /// Below 1024.
    Low,
    /// A range.
    Range,
    /// A single port.
    One,
}

/// Properties of a kind of rule set.
pub struct Kind {
    /// Name of the kind.
    pub name: &'static str,
    protocols: Shares<Option<u8>>,
    ports: [Shares<Ports>; 2],
    /// Shortest and longest prefixes of source and destination.
    lengths: Shares<[(u32, u32); 2]>,
    /// Probability, per thousand, that an address's bit has its
    /// more frequent value, for the bits of each of its four bytes.
    skew: [u32; 4],
}

use Ports::{Any, High, Low, One, Range};

const TCP: Option<u8> = Some(6);
const UDP: Option<u8> = Some(17);
const ICMP: Option<u8> = Some(1);

/// Kinds of sets, as in Taylor and Turner, "ClassBench: A Packet Classification
/// Benchmark" (INFOCOM 2005): access lists, firewalls, and chains of Linux's
/// filters. Each is characterized by its protocols, port classes, pairs of prefix
/// lengths, and the skew of its address tree. That is the paper's model. The
/// weights are this project's, chosen to make sets about as hard as ClassBench's.
pub const KINDS: [Kind; 3] = [
    Kind {
        name: "acl",
        protocols: &[(80, TCP), (12, UDP), (4, ICMP), (4, None)],
        ports: [&[(97, Any), (3, One)], &[(62, One), (22, Any), (9, Range), (5, High), (2, Low)]],
        lengths: &[
            (12, [(0, 0), (24, 32)]),
            (10, [(8, 16), (32, 32)]),
            (26, [(17, 24), (32, 32)]),
            (16, [(20, 28), (20, 28)]),
            (26, [(32, 32), (32, 32)]),
            (10, [(27, 32), (16, 24)]),
        ],
        skew: [900, 750, 620, 560],
    },
    Kind {
        name: "fw",
        protocols: &[(68, TCP), (18, UDP), (6, ICMP), (8, None)],
        ports: [
            &[(82, Any), (11, High), (6, One), (1, Range)],
            &[(54, One), (30, Any), (4, Range), (9, High), (3, Low)],
        ],
        lengths: &[
            (28, [(0, 0), (22, 32)]),
            (16, [(22, 32), (0, 0)]),
            (6, [(4, 16), (4, 16)]),
            (16, [(12, 24), (24, 32)]),
            (14, [(24, 32), (14, 24)]),
            (20, [(32, 32), (32, 32)]),
        ],
        skew: [880, 700, 600, 560],
    },
    Kind {
        name: "ipc",
        protocols: &[(60, TCP), (22, UDP), (6, ICMP), (12, None)],
        ports: [
            &[(84, Any), (12, One), (3, High), (1, Range)],
            &[(50, One), (40, Any), (4, Range), (5, High), (1, Low)],
        ],
        lengths: &[
            (14, [(0, 0), (24, 32)]),
            (8, [(24, 32), (0, 0)]),
            (20, [(14, 24), (14, 24)]),
            (26, [(16, 28), (32, 32)]),
            (32, [(32, 32), (32, 32)]),
        ],
        skew: [900, 740, 620, 560],
    },
];

/// Number of prefix length pairs in a set: real sets have few masks.
const PAIRS: usize = 48;

/// Number of single ports and of ranges in a set; the first are chosen most often.
const PORTS: usize = 300;
const RANGES: usize = 8;

/// Addresses, as a tree in which most addresses follow
/// one side of each branch. A seed determines the side.
struct Addresses {
    seed: u64,
    skew: [u32; 4],
}

impl Addresses {
    fn prefix(&self, bits: u32, random: &mut SmallRng) -> u32 {
        let mut prefix = 0_u64;
        for at in 0..bits {
            let branch = (prefix | 1 << at.max(1) << 32) ^ self.seed;
            let often = branch.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 63;
            let goes = random.random_range(0..1000) < self.skew[at as usize / 8];
            prefix = prefix << 1 | if goes { often } else { 1 - often };
        }
        ((prefix << 32 >> bits) & u64::from(u32::MAX)) as u32
    }
}

fn choose<T: Copy>(shares: Shares<T>, random: &mut SmallRng) -> T {
    let one = shares.choose_weighted(random, |share| share.0);
    one.expect("shares").1
}

/// Generates `count` different rules of a kind. Rules that
/// check the most bits come first, as for first-match lists.
pub fn generate(kind: &Kind, count: usize, seed: u64) -> Vec<Rule> {
    let mut random = SmallRng::seed_from_u64(seed);
    let ports: Vec<u16> = (0..PORTS).map(|_| random.random_range(1..10_000)).collect();
    let ranges: Vec<(u16, u16)> = (0..RANGES)
        .map(|_| {
            let low = random.random_range(1..50_000);
            (low, low + random.random_range(1..1000))
        })
        .collect();
    let pairs: Vec<[u32; 2]> = (0..PAIRS)
        .map(|_| {
            choose(kind.lengths, &mut random)
                .map(|(shortest, longest)| random.random_range(shortest..=longest))
        })
        .collect();
    let trees = [0; 2].map(|_: u8| Addresses { seed: random.random(), skew: kind.skew });
    // Chooses the n-th about 1/n times as often as the first.
    let rank = |most: usize, random: &mut SmallRng| {
        (most as f64).powf(random.random::<f64>()) as usize % most
    };
    let mut known = std::collections::HashSet::new();
    let mut rules = Vec::new();
    while rules.len() < count {
        let protocol = choose(kind.protocols, &mut random);
        let has_ports = protocol == TCP || protocol == UDP;
        let ports = kind.ports.map(|shares| {
            match if has_ports { choose(shares, &mut random) } else { Any } {
                Any => (0, u16::MAX),
                High => (1024, u16::MAX),
                Low => (0, 1023),
                Range => ranges[rank(RANGES, &mut random)],
                One => [ports[rank(PORTS, &mut random)]; 2].into(),
            }
        });
        let lengths = pairs[random.random_range(0..PAIRS)];
        let addresses =
            [0, 1].map(|at: usize| (trees[at].prefix(lengths[at], &mut random), lengths[at]));
        let rule = Rule { addresses, ports, protocol };
        if known.insert(rule.clone()) {
            rules.push(rule);
        }
    }
    let bits = |rule: &Rule| {
        let ports = rule.ports.map(|(low, high)| 16 - (u32::from(high - low) + 1).ilog2());
        let addresses = rule.addresses[0].1 + rule.addresses[1].1;
        addresses + ports[0] + ports[1] + 8 * u32::from(rule.protocol.is_some())
    };
    rules.sort_by_key(|rule| std::cmp::Reverse(bits(rule)));
    rules
}
