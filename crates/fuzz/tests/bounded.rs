//! Every target on its corpus, then on mutations of it for a moment. Needs root.
//!
//! `PDP_FUZZ_SEED` selects other mutations, `PDP_FUZZ_MILLIS` another time per target.

use std::fmt::Debug;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use pdp_fuzz::mutate::{SeededRandom, mutate};
use pdp_fuzz::{FuzzTarget, TARGETS};

/// Seed of the mutations.
const SEED: u64 = 1;

/// Time for the mutations of a target.
const MILLIS: u64 = 1500;

/// Largest size of all corpora together, and of one entry, as they are in the repository.
const CORPUS_BYTES_MAX: u64 = 2 << 20;
const ENTRY_BYTES_MAX: u64 = 64 << 10;

fn setting<T: std::str::FromStr<Err: Debug>>(name: &str, default: T) -> T {
    std::env::var(name).map_or(default, |value| value.parse().expect("a number"))
}

/// Entries of a target's corpus, in the order of their names.
fn corpus(target: &FuzzTarget) -> Vec<(PathBuf, Vec<u8>)> {
    let directory = target.corpus();
    let entries =
        std::fs::read_dir(&directory).unwrap_or_else(|error| panic!("{directory:?}: {error}"));
    let mut paths: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    paths.into_iter().map(|path| (path.clone(), std::fs::read(path).unwrap())).collect()
}

fn run(name: &str) {
    let target = FuzzTarget::named(name).unwrap();
    let entries = corpus(&target);
    for (path, bytes) in &entries {
        let whole = catch_unwind(AssertUnwindSafe(|| target.feed(bytes)));
        assert!(whole.is_ok(), "{name} fails on {}", path.display());
    }
    let seed = setting("PDP_FUZZ_SEED", SEED);
    let end = Instant::now() + Duration::from_millis(setting("PDP_FUZZ_MILLIS", MILLIS));
    let mut random = SeededRandom(seed);
    let mut count = 0u64;
    while Instant::now() < end {
        let mut bytes = entries[random.below(entries.len())].1.clone();
        let other = &entries[random.below(entries.len())].1;
        mutate(&mut bytes, other, target.bytes_max, &mut random);
        if catch_unwind(AssertUnwindSafe(|| target.feed(&bytes))).is_err() {
            let kept = std::env::temp_dir().join(format!("{name}-{seed}-{count}"));
            std::fs::write(&kept, &bytes).unwrap();
            panic!("{name} fails on mutation {count} of seed {seed}, kept in {}", kept.display());
        }
        count += 1;
    }
    println!("{name}: {} entries, {count} mutations", entries.len());
}

macro_rules! tests {
    ($($test:ident $name:literal,)*) => {
        const NAMES: &[&str] = &[$($name),*];
        $(#[test]
        fn $test() {
            run($name);
        })*
    };
}

tests! {
    ethernet "ethernet",
    ipv4 "ipv4",
    ipv6 "ipv6",
    udp "udp",
    vxlan "vxlan",
    tag "tag",
    checksum "checksum",
    flow "flow",
    outer "outer",
    encapsulate "encapsulate",
    classify "classify",
    vnet_check "vnet-check",
    worker "worker",
    capture "capture",
    router "router",
    card_frames "card-frames",
    card_registers "card-registers",
    guest_runtime "guest-runtime",
    routes_to_guest "routes-to-guest",
    routes_from_guest "routes-from-guest",
    channel "channel",
    exec_frames "exec-frames",
    netlink "netlink",
    memif_server "memif-server",
    memif_client "memif-client",
    memif_rings "memif-rings",
    spec "spec",
    pcap "pcap",
    http "http",
    image_layer "image-layer",
    image_layout "image-layout",
    image_inbox "image-inbox",
    image_archive "image-archive",
    state "state",
    records "records",
    filters "filters",
    slowpath "slowpath",
}

#[test]
fn every_target_is_run() {
    assert!(TARGETS.iter().map(|target| target.name).eq(NAMES.iter().copied()));
}

#[test]
fn corpora_are_small_and_belong_to_targets() {
    let mut bytes = 0;
    for target in TARGETS {
        let sizes = corpus(target).into_iter().map(|(path, entry)| (path, entry.len() as u64));
        for (path, size) in sizes {
            assert!(size <= ENTRY_BYTES_MAX, "{} has {size} bytes", path.display());
            bytes += size;
        }
    }
    assert!(bytes <= CORPUS_BYTES_MAX, "{bytes} bytes");
    let directory = TARGETS[0].corpus();
    for entry in std::fs::read_dir(directory.parent().unwrap()).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        assert!(FuzzTarget::named(&name).is_some(), "corpus {name} is of no target");
    }
}
