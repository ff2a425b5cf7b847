//! The real Internet table with its announcers, and the reference look-up: a plain prefix tree,
//! implemented differently from the one that forwards.

use std::collections::HashSet;
use std::net::IpAddr;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use pdp_testbed::finish;
use prefix_trie::PrefixMap;

/// Peers that announce the table.
pub const PEERS: usize = 4;

/// One of this many prefixes is announced by a second peer too.
const SHARED_ONE_OF: u64 = 4;

/// A set of peers, by bit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Peers(pub u8);

impl Peers {
    /// True if `peer` is in it.
    pub fn has(self, peer: usize) -> bool {
        self.0 >> peer & 1 == 1
    }
}

/// Table with the announcers of each prefix.
#[derive(Default)]
pub struct AnnouncementTable {
    v4: PrefixMap<Ipv4Net, Peers>,
    v6: PrefixMap<Ipv6Net, Peers>,
    /// All prefixes, in the files' order.
    pub prefixes: Vec<IpNet>,
    /// Prefixes that peers withdraw and announce again while the demo runs.
    pub moving: HashSet<IpNet>,
}

impl AnnouncementTable {
    /// Reads the compressed files of a directory.
    pub fn read(directory: &Path) -> Result<Self> {
        let mut table = Self::default();
        for family in ["v4", "v6"] {
            let path = directory.join(format!("internet-2022-10-29.{family}.txt.xz"));
            let unpacked = finish(Command::new("xz").arg("-dc").arg(&path));
            let text = unpacked.context("is the package xz-utils installed?")?;
            for line in text.lines() {
                let prefix = line.split_whitespace().next().unwrap_or_default();
                let prefix: IpNet =
                    prefix.parse().with_context(|| format!("{}: {line:?}", path.display()))?;
                table.add(prefix);
            }
        }
        Ok(table)
    }

    /// Adds a prefix.
    pub fn add(&mut self, prefix: IpNet) {
        let peers = announcers(prefix);
        match prefix {
            IpNet::V4(prefix) => drop(self.v4.insert(prefix, peers)),
            IpNet::V6(prefix) => drop(self.v6.insert(prefix, peers)),
        }
        self.prefixes.push(prefix);
    }

    /// Prefixes of one family.
    pub fn count(&self, v4: bool) -> usize {
        if v4 { self.v4.len() } else { self.v6.len() }
    }

    /// Longest prefix that covers an address, and its announcers.
    pub fn look_up(&self, address: IpAddr) -> Option<(IpNet, Peers)> {
        match address {
            IpAddr::V4(address) => {
                let (prefix, peers) = self.v4.get_lpm(&Ipv4Net::from(address))?;
                Some((IpNet::V4(prefix), *peers))
            }
            IpAddr::V6(address) => {
                let (prefix, peers) = self.v6.get_lpm(&Ipv6Net::from(address))?;
                Some((IpNet::V6(prefix), *peers))
            }
        }
    }

    /// Peers that announce exactly this prefix.
    pub fn announced(&self, prefix: IpNet) -> Option<Peers> {
        match prefix {
            IpNet::V4(prefix) => self.v4.get(&prefix).copied(),
            IpNet::V6(prefix) => self.v6.get(&prefix).copied(),
        }
    }

    /// Peers that announce any prefix that covers an address.
    pub fn look_up_any(&self, address: IpAddr) -> Peers {
        let peers = match address {
            IpAddr::V4(address) => {
                let covers = self.v4.cover_values(&Ipv4Net::from(address));
                covers.fold(0, |set, peers| set | peers.0)
            }
            IpAddr::V6(address) => {
                let covers = self.v6.cover_values(&Ipv6Net::from(address));
                covers.fold(0, |set, peers| set | peers.0)
            }
        };
        Peers(peers)
    }

    /// The moving prefixes that one peer announces.
    pub fn moving_of(&self, peer: usize) -> impl Iterator<Item = IpNet> {
        self.moving.iter().copied().filter(move |prefix| announcers(*prefix).has(peer))
    }

    /// BIRD's static routes of one peer for a family.
    pub fn routes_of(&self, peer: usize, v4: bool) -> String {
        let mine = self.prefixes.iter().filter(|prefix| matches!(prefix, IpNet::V4(_)) == v4);
        let mine = mine.filter(|prefix| announcers(**prefix).has(peer));
        let mine = mine.filter(|prefix| !self.moving.contains(*prefix));
        mine.map(|prefix| format!("route {prefix} blackhole;\n")).collect()
    }

    /// Draws `count` addresses, each inside a random prefix of the table.
    pub fn draw(&self, count: usize, random: &mut SplitMix64) -> Vec<IpAddr> {
        if self.prefixes.is_empty() {
            return Vec::new();
        }
        let prefix = |random: &mut SplitMix64| {
            self.prefixes[(random.next() % self.prefixes.len() as u64) as usize]
        };
        (0..count).map(|_| inside(prefix(random), random)).collect()
    }
}

/// Announcers of a prefix: one peer by the prefix's hash, and for some a second one.
pub fn announcers(prefix: IpNet) -> Peers {
    // FNV-1a, 64 bits; the upper half is better mixed.
    let text = prefix.to_string();
    let hash = text.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    }) >> 32;
    let first = (hash % PEERS as u64) as usize;
    let mut peers = 1 << first;
    if (hash / PEERS as u64).is_multiple_of(SHARED_ONE_OF) {
        peers |= 1 << ((first + 1) % PEERS);
    }
    Peers(peers)
}

/// Random address inside a prefix. Skips its first
/// address and, in IPv4, its last, if it has others.
fn inside(prefix: IpNet, random: &mut SplitMix64) -> IpAddr {
    match prefix {
        IpNet::V4(prefix) => {
            let size = 1u64 << (32 - prefix.prefix_len());
            let offset = if size > 2 { 1 + random.next() % (size - 2) } else { 0 };
            IpAddr::from((prefix.network().to_bits() + offset as u32).to_be_bytes())
        }
        IpNet::V6(prefix) => {
            let host = u128::from(random.next()) << 64 | u128::from(random.next());
            let mask = prefix.hostmask().to_bits();
            IpAddr::from((prefix.network().to_bits() | (host & mask)).to_be_bytes())
        }
    }
}

/// Repeatable pseudo-random numbers (splitmix64).
pub struct SplitMix64(pub u64);

impl SplitMix64 {
    /// Returns the next number.
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_shipped_table_is_whole() {
        let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data");
        let table = AnnouncementTable::read(&data).unwrap();
        assert_eq!(table.count(true), 968_428);
        assert_eq!(table.count(false), 177_846);
        // Every peer has between a quarter and slightly more than 1.25 quarters of it.
        for peer in 0..PEERS {
            let has = table.prefixes.iter().filter(|p| announcers(**p).has(peer)).count();
            let share = has as f64 / table.prefixes.len() as f64;
            assert!((0.25..0.40).contains(&share), "peer {peer}: {share}");
        }
        let mut random = SplitMix64(1);
        for address in table.draw(10_000, &mut random) {
            assert!(table.look_up(address).is_some(), "{address}");
        }
    }

    proptest! {
        #[test]
        fn table_lookup_finds_the_longest_prefix(
            nets in prop::collection::vec((any::<u32>(), 1..=32u8), 1..40),
            address in any::<u32>(),
            near in any::<prop::sample::Index>(),
        ) {
            let mut table = AnnouncementTable::default();
            let nets: Vec<IpNet> = nets
                .iter()
                .map(|&(bits, length)| {
                    IpNet::V4(Ipv4Net::new(bits.into(), length).unwrap().trunc())
                })
                .collect();
            nets.iter().for_each(|net| table.add(*net));
            let close = inside(nets[near.index(nets.len())], &mut SplitMix64(u64::from(address)));
            for address in [IpAddr::from(address.to_be_bytes()), close] {
                let slow = nets.iter().filter(|net| net.contains(&address));
                let slow = slow.max_by_key(|net| net.prefix_len()).copied();
                let fast = table.look_up(address);
                prop_assert_eq!(fast.map(|(net, _)| net), slow);
                prop_assert_eq!(fast.map(|(_, peers)| peers), slow.map(announcers));
            }
        }

        #[test]
        fn drawn_addresses_are_inside_their_prefix(bits in any::<u128>(), length in 0..=128u8, seed in any::<u64>()) {
            let net = IpNet::V6(Ipv6Net::new(bits.into(), length).unwrap().trunc());
            prop_assert!(net.contains(&inside(net, &mut SplitMix64(seed))));
            let net = Ipv4Net::new((bits as u32).into(), length % 33).unwrap().trunc();
            let address = inside(IpNet::V4(net), &mut SplitMix64(seed));
            prop_assert!(IpNet::V4(net).contains(&address));
        }
    }
}
