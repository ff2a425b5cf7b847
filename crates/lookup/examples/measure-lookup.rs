//! Measures tables with real routes: look-ups, look-ups while routes change, changes, memory.
//!
//! `cargo run --release -p pdp-lookup --example measure-lookup -- [--json] V4-FILE V6-FILE`
//!
//! A file has lines `PREFIX ANYTHING`, and is read through `xz` if its name ends in `.xz`. With
//! `--json`, each measurement is a line of JSON, and its field `measure` names it.
//!
//! For each IP version, 2^20 destinations are drawn independently: `uniform` among
//! all addresses, `inside` within a random prefix of the table. Neighbouring routes
//! often have the same next hop, so four in a row have the same of 16 values.

use std::fmt::Write as _;
use std::hint::black_box;
use std::net::IpAddr;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use pdp_lookup::{AddressBits, PrefixTable, TableV4, TableV6};

const ADDRESSES: usize = 1 << 20;
const BATCHES: [usize; 2] = [32, 64];
const ROUNDS: usize = 9;

/// Route changes per second during look-ups, most of them between two batches.
const CHANGES_PPS: f64 = 100_000.0;
const PIECE: usize = 64;
/// Batches between two readings of the clock.
const BATCHES_PER_LOOK: usize = 16;

fn main() {
    let mut report = Report { json: false };
    let (mut routes_v4, mut routes_v6) = (Vec::new(), Vec::new());
    for argument in std::env::args().skip(1) {
        if argument == "--json" {
            report.json = true;
            continue;
        }
        for line in read(&argument).lines() {
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
    measure(&report, "ipv4", &routes_v4, &mut random, |r| r.next() as u32);
    let wide = |r: &mut Random| u128::from(r.next()) << 64 | u128::from(r.next());
    measure(&report, "ipv6", &routes_v6, &mut random, wide);
    small_tables(&report);
}

fn read(file: &str) -> String {
    let program = if file.ends_with(".xz") { "xzcat" } else { "cat" };
    let output = Command::new(program).arg(file).stderr(Stdio::inherit()).output();
    String::from_utf8(output.expect("the file's text").stdout).expect("UTF-8")
}

fn measure<A: AddressBits>(
    report: &Report,
    family: &str,
    routes: &[(A, u32)],
    random: &mut Random,
    uniform: impl Fn(&mut Random) -> A,
) {
    if routes.is_empty() {
        return;
    }
    let mut table = PrefixTable::new();
    let (start, mut slowest) = (Instant::now(), Duration::ZERO);
    for (at, &(address, length)) in routes.iter().enumerate() {
        let one = Instant::now();
        table.insert(address, length, (at as u32 / 4).wrapping_mul(2_654_435_761) >> 28, 0);
        slowest = slowest.max(one.elapsed());
    }
    report.line(
        "table",
        &[
            ("family", text(family)),
            ("prefixes", table.len().to_string()),
            ("bytes", table.memory_bytes().to_string()),
            ("build_s", number(start.elapsed().as_secs_f64())),
            ("longest_insertion_us", number(microseconds(slowest))),
        ],
    );
    let anywhere: Vec<A> = (0..ADDRESSES).map(|_| uniform(random)).collect();
    let inside: Vec<A> = (0..ADDRESSES)
        .map(|_| {
            let (prefix, length) = routes[random.next() as usize % routes.len()];
            behind(prefix, length, uniform(random))
        })
        .collect();
    for (pattern, addresses) in [("uniform", &anywhere), ("inside", &inside)] {
        for batch in BATCHES {
            let rates: Vec<f64> =
                (0..ROUNDS).map(|_| look_ups(&mut table, addresses, batch, |_| {})).collect();
            report.line(
                "look-ups",
                &[
                    ("family", text(family)),
                    ("pattern", text(pattern)),
                    ("batch", batch.to_string()),
                    ("million_per_second", list(&rates)),
                ],
            );
        }
    }
    while_changing(report, family, &mut table, routes, &inside, random);
    let (start, mut slowest, mut count) = (Instant::now(), Duration::ZERO, 0u32);
    while start.elapsed() < Duration::from_secs(1) {
        let one = Instant::now();
        change(&mut table, routes, random);
        slowest = slowest.max(one.elapsed());
        count += 1;
    }
    report.line(
        "changes",
        &[
            ("family", text(family)),
            ("changes_per_second", number(f64::from(count) / start.elapsed().as_secs_f64())),
            ("longest_change_us", number(microseconds(slowest))),
            ("bytes", table.memory_bytes().to_string()),
        ],
    );
    for length in [0, 1, 6, 7, 12, 13, 18, 24] {
        let mut times: Vec<f64> = (0..200u32)
            .map(|round| {
                let address = uniform(random);
                let start = Instant::now();
                table.insert(address, length, round, 2);
                table.remove(address, length);
                microseconds(start.elapsed() / 2)
            })
            .collect();
        times.sort_by(f64::total_cmp);
        report.line(
            "change of a length",
            &[
                ("family", text(family)),
                ("length", length.to_string()),
                ("median_us", number(times[100])),
                ("longest_us", number(times[199])),
            ],
        );
    }
}

/// Returns an address inside a prefix.
fn behind<A: AddressBits>(prefix: A, length: u32, noise: A) -> A {
    let mut address = prefix;
    for depth in (0..A::BITS).step_by(6) {
        let from_noise = if depth >= length {
            noise.slot(depth)
        } else if depth + 6 > length {
            noise.slot(depth) & ((1 << (depth + 6 - length)) - 1)
        } else {
            0
        };
        address = address.with_slot(depth, from_noise);
    }
    address
}

/// Looks up all addresses. Returns the rate in millions
/// per second, including the work between batches.
fn look_ups<A: AddressBits>(
    table: &mut PrefixTable<A>,
    addresses: &[A],
    batch: usize,
    mut between: impl FnMut(&mut PrefixTable<A>),
) -> f64 {
    let mut values = vec![0; batch];
    let start = Instant::now();
    for (round, addresses) in addresses.chunks_exact(batch).enumerate() {
        if round % BATCHES_PER_LOOK == 0 {
            between(table);
        }
        table.lookup_batch(addresses, &mut values);
        black_box(&values);
    }
    (addresses.len() / batch * batch) as f64 / start.elapsed().as_secs_f64() / 1e6
}

/// Withdraws a random route of the table, announces it again, or changes its next hop.
fn change<A: AddressBits>(table: &mut PrefixTable<A>, routes: &[(A, u32)], random: &mut Random) {
    let (address, length) = routes[random.next() as usize % routes.len()];
    match random.next() % 4 {
        0 => drop(table.remove(address, length)),
        hop => drop(table.insert(address, length, hop as u32, 1)),
    }
}

/// Measures look-ups without and with changes, alternately.
fn while_changing<A: AddressBits>(
    report: &Report,
    family: &str,
    table: &mut PrefixTable<A>,
    routes: &[(A, u32)],
    addresses: &[A],
    random: &mut Random,
) {
    let (mut alone, mut changing, mut pieces) = (Vec::new(), Vec::new(), Vec::new());
    let (mut changes, mut time) = (0usize, Duration::ZERO);
    for _ in 0..ROUNDS {
        alone.push(look_ups(table, addresses, PIECE, |_| {}));
        let (start, mut done) = (Instant::now(), 0);
        changing.push(look_ups(table, addresses, PIECE, |table| {
            let due = (start.elapsed().as_secs_f64() * CHANGES_PPS) as usize;
            let count = (due - done).min(PIECE);
            if count > 0 {
                let piece = Instant::now();
                (0..count).for_each(|_| change(table, routes, random));
                pieces.push(microseconds(piece.elapsed()));
                done += count;
            }
        }));
        changes += done;
        time += start.elapsed();
    }
    pieces.sort_by(f64::total_cmp);
    let longest = pieces.last().copied().unwrap_or(0.0);
    report.line(
        "look-ups while routes change",
        &[
            ("family", text(family)),
            ("pattern", text("inside")),
            ("batch", PIECE.to_string()),
            ("changes_per_second", number(changes as f64 / time.as_secs_f64())),
            ("million_per_second", list(&changing)),
            ("million_per_second_alone", list(&alone)),
            ("longest_piece_us", number(longest)),
            ("piece_p99_us", number(pieces.get(pieces.len() * 99 / 100).copied().unwrap_or(0.0))),
        ],
    );
}

/// Measures the tables' memory for many small networks, each with ten routes per IP version.
fn small_tables(report: &Report) {
    const TABLES: u32 = 1000;
    const ROUTES: u32 = 10;
    let bytes: usize = (0..TABLES)
        .map(|vnet| {
            let (mut v4, mut v6) = (TableV4::new(), TableV6::new());
            v4.insert(0, 0, 0, 0);
            v6.insert(0, 0, 0, 0);
            for route in 1..ROUTES {
                v4.insert(0x0a00_0000 | vnet << 8 | route << 4, 28, route, 0);
                let subnet = u128::from(vnet << 16 | route) << 64;
                v6.insert(0x2001_0db8 << 96 | subnet, 64, route, 0);
            }
            v4.memory_bytes() + v6.memory_bytes()
        })
        .sum();
    report.line(
        "small tables",
        &[
            ("tables", TABLES.to_string()),
            ("routes", ROUTES.to_string()),
            ("bytes", bytes.to_string()),
        ],
    );
}

fn microseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

fn number(value: f64) -> String {
    format!("{value:.3}")
}

fn text(value: &str) -> String {
    format!("\"{value}\"")
}

fn list(values: &[f64]) -> String {
    format!("[{}]", values.iter().map(|value| format!("{value:.1}")).collect::<Vec<_>>().join(","))
}

/// Writer of results: lines of text or JSON.
struct Report {
    json: bool,
}

impl Report {
    /// One measurement: fields and their values as JSON.
    fn line(&self, measure: &str, fields: &[(&str, String)]) {
        let mut line = String::new();
        if self.json {
            let _ = write!(line, "{{\"measure\":{}", text(measure));
            for (name, value) in fields {
                let _ = write!(line, ",\"{name}\":{value}");
            }
            line.push('}');
        } else {
            let _ = write!(line, "{measure}:");
            for (name, value) in fields {
                let _ = write!(line, " {name} {}", value.trim_matches('"'));
            }
        }
        println!("{line}");
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
