//! The Internet's table in the Verilated look-up, with the low levels in external memory.

mod common;

use std::collections::VecDeque;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use common::{FAMILIES, Reference, host_mask};
use pdp_card::{
    Leaf, LpmLookup, LpmModel, LpmSegment, LpmTrie, LpmVariant, LpmWrite, RouteFamily, RoutePrefix,
};

/// Prefixes of `data/` (see data/README.md).
fn prefixes(family: RouteFamily) -> Vec<RoutePrefix> {
    let name = if family == RouteFamily::V4 { "v4" } else { "v6" };
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data");
    let file = data.join(format!("internet-2022-10-29.{name}.txt.xz"));
    let output = Command::new("xzcat").arg(&file).output().expect("xzcat (package xz-utils)");
    assert!(output.status.success(), "{}", file.display());
    let prefix = |line: &str| {
        let (address, length) = line.split(' ').next()?.split_once('/')?;
        let length = length.parse().ok()?;
        let key = match address.parse().ok()? {
            std::net::IpAddr::V4(address) => u128::from(u32::from(address)) << 96,
            std::net::IpAddr::V6(address) => u128::from(address),
        };
        Some(RoutePrefix { family, key, length })
    };
    String::from_utf8(output.stdout).unwrap().lines().filter_map(prefix).collect()
}

/// A prefix's group: one of 1,000, so that neighbours differ as in a router with many peers.
fn group(prefix: &RoutePrefix) -> Leaf {
    let hash = (prefix.key >> 64) as u64 ^ u64::from(prefix.length);
    Leaf::group((hash.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as u16 % 1000)
}

/// All 968,428 prefixes of IPv4 and 177,846 of IPv6 in one VE: the first and the last address of
/// each prefix have the leaf that pdp_lookup has. The other VE has no routes and finds none.
#[test]
fn internet_table_matches_pdp_lookup() {
    let Some(mut model) = LpmModel::new(LpmVariant::LARGE, 1) else {
        eprintln!("skipped: built without Verilator (run `make deps`)");
        return;
    };
    let variant = model.variant();
    // The last places of the memories belong to VE 1.
    let (node_length, leaf_length) = (variant.nodes - 64, variant.leaves - 128);
    let segment = LpmSegment { node_base: 0, node_length, leaf_base: 0, leaf_length };
    let other = LpmSegment {
        node_base: node_length,
        node_length: 64,
        leaf_base: leaf_length,
        leaf_length: 128,
    };
    let mut trie = LpmTrie::new(variant.levels, node_length, leaf_length);
    let mut reference = Reference::default();
    let mut routes = Vec::new();
    let start = Instant::now();
    for family in FAMILIES {
        let reach = 8 + 6 * u32::from(variant.levels);
        routes.extend(prefixes(family).into_iter().filter(|prefix| prefix.length <= reach));
    }
    eprintln!("{} prefixes read in {:?}", routes.len(), start.elapsed());

    let start = Instant::now();
    let mut writes = Vec::new();
    for route in &routes {
        trie.insert(*route, group(route), &mut writes).unwrap();
        trie.retire(trie.change());
        writes.clear();
    }
    let used = |level| node_length - trie.free_nodes(level);
    let nodes: Vec<_> = (1..=variant.levels).map(used).collect();
    let leaves = leaf_length - trie.free_leaves();
    eprintln!("built in {:?}: nodes by level {nodes:?}, {leaves} leaves", start.elapsed());
    for route in &routes {
        reference.change(route, Some(group(route)));
    }

    let start = Instant::now();
    model.write_all([segment.word(0), other.word(1)]);
    let clears = |ve| LpmTrie::clear_writes().into_iter().map(move |write| write.word(ve));
    model.write_all(clears(0).chain(clears(1)));
    trie.image(&mut writes);
    let count = writes.len();
    model.write_all(writes.iter().map(|write: &LpmWrite| write.word(0)));
    assert_eq!(model.refused_count(), 0);
    eprintln!("{count} words written in {:?}", start.elapsed());

    let start = Instant::now();
    let (mut asked, mut done) = (VecDeque::new(), 0u64);
    let last = |route: &RoutePrefix| route.key | host_mask(route.family, route.length);
    let keys =
        routes.iter().flat_map(|route| [(route.family, route.key), (route.family, last(route))]);
    let drain = std::iter::repeat_n((RouteFamily::V4, 0), variant.latency() as usize - 1);
    for (family, key) in keys.chain(drain) {
        // Two look-ups in a hundred are of the VE without routes.
        let ve = u8::from(done % 50 == 1);
        asked.push_back((ve, family, key));
        let lookup = LpmLookup { ve, family, key, token: 0 };
        if let Some(result) = model.step(Some(lookup), None) {
            let (ve, family, key) = asked.pop_front().unwrap();
            let want = if ve == 0 { reference.lookup(family, key) } else { Leaf::NONE };
            assert_eq!((result.leaf, result.fault), (want, false), "VE {ve}: {key:x}");
            done += 1;
        }
    }
    assert_eq!(done, 2 * routes.len() as u64);
    let rate = done as f64 / start.elapsed().as_secs_f64();
    eprintln!(
        "{done} look-ups of {} cycles in {:?}: {rate:.0}/s",
        variant.latency(),
        start.elapsed()
    );
}
