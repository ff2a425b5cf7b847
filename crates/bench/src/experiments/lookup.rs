//! Longest-prefix match over the Internet's tables, on one core, in batches, also while routes
//! change; memory of tables. The same core makes changes between batches, as in a forwarding guest.

use std::hint::black_box;
use std::net::IpAddr;
use std::time::Instant;

use anyhow::{Context, Result};
use pdp_lookup::{AddressBits, PrefixTable, TableV4, TableV6};
use pdp_testbed::meter;

use super::{BenchExperiment, Subject};
use crate::run::{ExperimentRun, Reading};
use crate::site;

pub(super) const EXPERIMENT: BenchExperiment = BenchExperiment {
    name: "lookup",
    about: "look-ups over the Internet's IPv4 and IPv6 tables, on one core, in batches: addresses \
            drawn from all there are, and from the prefixes of the table; the same while 100,000 \
            routes a second change; memory, also of many small tables",
    seconds: 15,
    subject: Subject::Library,
    run,
};

/// Addresses of one batch, and of one sample.
const BATCH: usize = 64;
const ADDRESSES: usize = 1 << 22;

/// Passes over all addresses per sample.
const TURNS: usize = 4;

/// Changes of routes per second, most of them between two
/// batches, and batches between two readings of the clock.
const CHANGES_PPS: f64 = 100_000.0;
const CHANGES_MAX: usize = 64;
const BATCHES_A_LOOK: usize = 16;

/// Number of small networks, and IPv4 and IPv6 routes of each.
const NETWORKS: u32 = 1000;
const ROUTES: u32 = 10;

fn run(run: &mut ExperimentRun) -> Result<()> {
    let v4 = site::prefixes("data/internet-2022-10-29.v4.txt.xz")?;
    let v4: Vec<(u32, u32)> = v4
        .into_iter()
        .filter_map(|(address, length)| match address {
            IpAddr::V4(address) => Some((address.into(), length)),
            IpAddr::V6(_) => None,
        })
        .collect();
    let v6 = site::prefixes("data/internet-2022-10-29.v6.txt.xz")?;
    let v6: Vec<(u128, u32)> = v6
        .into_iter()
        .filter_map(|(address, length)| match address {
            IpAddr::V6(address) => Some((address.into(), length)),
            IpAddr::V4(_) => None,
        })
        .collect();
    let mut random = XorShift64(0x9e37_79b9_7f4a_7c15);
    let host = |length: u32| u32::MAX.checked_shr(length).unwrap_or(0);
    let series = ["IPv4", "IPv4, inside prefixes", "IPv4, while updated"];
    measure(run, series, &v4, &mut random, |random, route| {
        let noise = random.next() as u32;
        route.map_or(noise, |(prefix, length)| prefix | noise & host(length))
    })?;
    let host = |length: u32| u128::MAX.checked_shr(length).unwrap_or(0);
    let series = ["IPv6, anywhere", "IPv6", "IPv6, while updated"];
    measure(run, series, &v6, &mut random, |random, route| {
        let noise = u128::from(random.next()) << 64 | u128::from(random.next());
        route.map_or(noise, |(prefix, length)| prefix | noise & host(length))
    })?;
    run.take("1,000 networks", f64::from(2 * ROUTES), "prefixes", || {
        Ok(vec![Reading::new("memory", small_tables() as f64 / 1e6, "MB")])
    });
    Ok(())
}

/// Memory of the tables of many small networks, bytes.
fn small_tables() -> usize {
    let of = |network: u32| {
        let (mut v4, mut v6) = (TableV4::new(), TableV6::new());
        v4.insert(0, 0, 0, 0);
        v6.insert(0, 0, 0, 0);
        for route in 1..ROUTES {
            v4.insert(0x0a00_0000 | network << 8 | route << 4, 28, route, 0);
            let subnet = u128::from(network << 16 | route) << 64;
            v6.insert(0x2001_0db8 << 96 | subnet, 64, route, 0);
        }
        v4.memory_bytes() + v6.memory_bytes()
    };
    (0..NETWORKS).map(of).sum()
}

/// Measures both kinds of addresses, and those inside prefixes while routes change. `draw` returns
/// a random address, in a route or in the whole address space.
fn measure<A: AddressBits + Send + Sync>(
    run: &mut ExperimentRun,
    series: [&str; 3],
    routes: &[(A, u32)],
    random: &mut XorShift64,
    draw: impl Fn(&mut XorShift64, Option<(A, u32)>) -> A,
) -> Result<()> {
    let mut table = PrefixTable::new();
    for (at, &(address, length)) in routes.iter().enumerate() {
        // Neighbouring routes often have the same next hop; there are 16.
        let value = (at as u32 / 4).wrapping_mul(2_654_435_761) >> 28;
        table.insert(address, length, value, 0);
    }
    let anywhere: Vec<A> = (0..ADDRESSES).map(|_| draw(random, None)).collect();
    let inside: Vec<A> = (0..ADDRESSES)
        .map(|_| {
            let at = random.next() as usize % routes.len();
            draw(random, Some(routes[at]))
        })
        .collect();
    let hz = meter::cpu("cpu MHz").parse::<f64>()? * 1e6;
    let [core, _] = run.cores();
    let [all, prefixes, updated] = series;
    run.rounds(|run| {
        let kinds = [(all, &anywhere, None), (prefixes, &inside, None)];
        for (series, addresses, changes) in
            kinds.into_iter().chain([(updated, &inside, Some(routes))])
        {
            run.take(series, routes.len() as f64, "prefixes", || {
                // In its own thread, which may pin itself to a core.
                let looked_up = std::thread::scope(|scope| {
                    let work = || look_up(&mut table, addresses, changes, random, core);
                    scope.spawn(work).join()
                });
                let (seconds, changed) = looked_up.ok().context("look-ups")?;
                let rate = (ADDRESSES * TURNS) as f64 / seconds;
                let mut readings = vec![
                    // Cycles per look-up.
                    Reading::new("rate", rate / 1e6, "million/s").cycles(hz / rate),
                    Reading::new("memory", table.memory_bytes() as f64 / 1e6, "MB"),
                ];
                if changes.is_some() {
                    let rate = changed as f64 / seconds / 1e3;
                    readings.push(Reading::new("changes", rate, "thousand/s"));
                }
                Ok(readings)
            });
        }
        Ok(())
    })
}

/// Looks up all addresses while changing some of these routes;
/// returns the seconds used and the number of changes.
fn look_up<A: AddressBits>(
    table: &mut PrefixTable<A>,
    addresses: &[A],
    changes: Option<&[(A, u32)]>,
    random: &mut XorShift64,
    core: usize,
) -> (f64, usize) {
    meter::pin(core);
    let mut values = vec![0; BATCH];
    let (start, mut changed) = (Instant::now(), 0);
    for _ in 0..TURNS {
        for (number, batch) in addresses.chunks(BATCH).enumerate() {
            if let Some(routes) = changes.filter(|_| number % BATCHES_A_LOOK == 0) {
                let due = (start.elapsed().as_secs_f64() * CHANGES_PPS) as usize;
                let count = (due - changed).min(CHANGES_MAX);
                (0..count).for_each(|_| change(table, routes, random));
                changed += count;
            }
            table.lookup_batch(batch, &mut values[..batch.len()]);
            black_box(&values);
        }
    }
    (start.elapsed().as_secs_f64(), changed)
}

/// Withdraws a random route, announces it again, or changes its next hop.
fn change<A: AddressBits>(
    table: &mut PrefixTable<A>,
    routes: &[(A, u32)],
    random: &mut XorShift64,
) {
    let (address, length) = routes[random.next() as usize % routes.len()];
    match random.next() % 4 {
        0 => drop(table.remove(address, length)),
        hop => drop(table.insert(address, length, hop as u32, 1)),
    }
}

/// xorshift64* (Vigna 2016).
struct XorShift64(u64);

impl XorShift64 {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }
}
