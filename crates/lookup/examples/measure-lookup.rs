//! Measures a table with real routes: look-ups, updates, memory.
//!
//! `cargo run --release -p pdp-lookup --example measure-lookup -- V4-FILE V6-FILE`; a file has lines
//! `PREFIX ANYTHING`, and is read through `xz` if its name ends in `.xz`.

use std::hint::black_box;
use std::net::IpAddr;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use pdp_lookup::{Address, Table};

const BATCH: usize = 256;
const ADDRESSES: usize = 1 << 22;
const RUNS: usize = 5;

fn main() {
    let mut routes_v4 = Vec::new();
    let mut routes_v6 = Vec::new();
    for file in std::env::args().skip(1) {
        for line in read(&file).lines() {
            let Some((address, length)) = line.split(' ').next().and_then(|p| p.split_once('/'))
            else {
                continue;
            };
            let length = length.parse().expect("a length");
            match address.parse().expect("an address") {
                IpAddr::V4(a) => routes_v4.push((u32::from(a), length)),
                IpAddr::V6(a) => routes_v6.push((u128::from(a), length)),
            }
        }
    }
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    measure("IPv4", &routes_v4, &mut random, |r| r.next() as u32);
    measure("IPv6", &routes_v6, &mut random, |r| u128::from(r.next()) << 64 | u128::from(r.next()));
}

fn read(file: &str) -> String {
    let program = if file.ends_with(".xz") { "xzcat" } else { "cat" };
    let output = Command::new(program).arg(file).stderr(Stdio::inherit()).output();
    String::from_utf8(output.expect("the file's text").stdout).expect("UTF-8")
}

fn measure<A: Address + std::ops::BitOr<Output = A>>(
    name: &str,
    routes: &[(A, u32)],
    random: &mut Random,
    uniform: impl Fn(&mut Random) -> A,
) {
    if routes.is_empty() {
        return;
    }
    let mut table = Table::new();
    // Neighbouring routes often go the same way; 16 ways.
    let values: Vec<u32> =
        (0..routes.len()).map(|at| (at as u32 / 4).wrapping_mul(2_654_435_761) >> 28).collect();
    let mut slowest = (Duration::ZERO, 0);
    let start = Instant::now();
    for (at, &(address, length)) in routes.iter().enumerate() {
        let one = Instant::now();
        table.insert(address, length, values[at], 0);
        slowest = slowest.max((one.elapsed(), table.len()));
    }
    let built = start.elapsed();
    println!(
        "{name}: {} prefixes, {:.1} MB, built in {:.3} s, slowest insertion {:.0} µs (at {})",
        table.len(),
        table.memory_bytes() as f64 / 1e6,
        built.as_secs_f64(),
        slowest.0.as_secs_f64() * 1e6,
        slowest.1
    );
    let anywhere: Vec<A> = (0..ADDRESSES).map(|_| uniform(random)).collect();
    // A random route, then random bits behind its prefix.
    let inside: Vec<A> = (0..ADDRESSES)
        .map(|_| {
            let (prefix, length) = routes[random.next() as usize % routes.len()];
            let (mut host, mut depth) = (prefix, length.next_multiple_of(6));
            let noise = uniform(random);
            while depth < A::BITS {
                host = host.with_slot(depth, noise.slot(depth));
                depth += 6;
            }
            host
        })
        .collect();
    for (kind, addresses) in [("uniform", anywhere), ("inside prefixes", inside)] {
        let mut values = vec![0; BATCH];
        let mut rates: Vec<f64> = (0..RUNS)
            .map(|_| {
                let start = Instant::now();
                for batch in addresses.chunks(BATCH) {
                    table.lookup_batch(batch, &mut values[..batch.len()]);
                    black_box(&values);
                }
                ADDRESSES as f64 / start.elapsed().as_secs_f64() / 1e6
            })
            .collect();
        rates.sort_by(f64::total_cmp);
        println!(
            "  {kind}: {:.0} M look-ups/s (median of {RUNS}, {:.0} to {:.0})",
            rates[RUNS / 2],
            rates[0],
            rates[RUNS - 1]
        );
    }
    let start = Instant::now();
    let mut slowest = Duration::ZERO;
    let mut updates = 0;
    while start.elapsed() < Duration::from_secs(1) {
        let (address, length) = routes[random.next() as usize % routes.len()];
        let one = Instant::now();
        match random.next() % 4 {
            0 => drop(table.remove(address, length)),
            value => drop(table.insert(address, length, value as u32, 1)),
        }
        slowest = slowest.max(one.elapsed());
        updates += 1;
    }
    println!(
        "  {:.2} M updates/s of random routes, slowest {:.0} µs, {:.1} MB after them",
        f64::from(updates) / start.elapsed().as_secs_f64() / 1e6,
        slowest.as_secs_f64() * 1e6,
        table.memory_bytes() as f64 / 1e6
    );
    for length in [0, 1, 6, 7, 8, 12, 18] {
        let mut times: Vec<Duration> = (0..200u32)
            .map(|turn| {
                let address = uniform(random);
                let start = Instant::now();
                table.insert(address, length, turn, 2);
                table.remove(address, length);
                start.elapsed() / 2
            })
            .collect();
        times.sort();
        println!(
            "  /{length}: insertion or removal {:.1} µs (median), {:.1} µs (slowest of 200)",
            times[100].as_secs_f64() * 1e6,
            times[199].as_secs_f64() * 1e6
        );
    }
}

/// xorshift64*.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }
}
