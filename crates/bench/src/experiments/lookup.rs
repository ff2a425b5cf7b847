//! Longest-prefix match over the Internet's tables, on one core, in batches.

use std::hint::black_box;
use std::net::IpAddr;
use std::time::Instant;

use anyhow::Result;
use pdp_e2e::meter;
use pdp_lookup::{Address, Table};

use super::Experiment;
use crate::run::{Reading, Run};
use crate::site;

pub(super) const EXPERIMENT: Experiment = Experiment {
    name: "lookup",
    about: "look-ups over the Internet's IPv4 and IPv6 tables, on one core, in batches: addresses \
            drawn from all there are, and from the prefixes of the table",
    seconds: 60,
    run,
};

/// Addresses of one batch, and of one sample.
const BATCH: usize = 256;
const ADDRESSES: usize = 1 << 22;

/// Times that all addresses are looked up for a sample.
const TURNS: usize = 4;

fn run(run: &mut Run) -> Result<()> {
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
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let host = |length: u32| u32::MAX.checked_shr(length).unwrap_or(0);
    measure(run, ["IPv4", "IPv4, inside prefixes"], &v4, &mut random, |random, route| {
        let noise = random.next() as u32;
        route.map_or(noise, |(prefix, length)| prefix | noise & host(length))
    })?;
    let host = |length: u32| u128::MAX.checked_shr(length).unwrap_or(0);
    measure(run, ["IPv6, anywhere", "IPv6"], &v6, &mut random, |random, route| {
        let noise = u128::from(random.next()) << 64 | u128::from(random.next());
        route.map_or(noise, |(prefix, length)| prefix | noise & host(length))
    })
}

/// Measures both kinds of addresses: `draw` makes one, of a route or of all there are.
fn measure<A: Address + Sync>(
    run: &mut Run,
    series: [&str; 2],
    routes: &[(A, u32)],
    random: &mut Random,
    draw: impl Fn(&mut Random, Option<(A, u32)>) -> A,
) -> Result<()> {
    let mut table = Table::new();
    for (at, &(address, length)) in routes.iter().enumerate() {
        // Neighbouring routes often go the same way; 16 ways.
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
    let megabytes = table.memory_bytes() as f64 / 1e6;
    let [core, _] = run.cores();
    run.rounds(|run| {
        for (series, addresses) in [(series[0], &anywhere), (series[1], &inside)] {
            run.take(series, routes.len() as f64, "prefixes", || {
                // In a thread of its own, whose core is nobody else's business.
                let seconds = std::thread::scope(|scope| {
                    scope.spawn(|| look_up(&table, addresses, core)).join().unwrap_or(f64::NAN)
                });
                let rate = (ADDRESSES * TURNS) as f64 / seconds;
                let notes = format!("{megabytes:.1} MB; cycles a look-up");
                Ok(vec![
                    Reading::new("rate", rate / 1e6, "million/s").cycles(hz / rate).notes(notes),
                ])
            });
        }
        Ok(())
    })
}

/// Looks all addresses up; how long it takes.
fn look_up<A: Address>(table: &Table<A>, addresses: &[A], core: usize) -> f64 {
    meter::pin(core);
    let mut values = vec![0; BATCH];
    let start = Instant::now();
    for _ in 0..TURNS {
        for batch in addresses.chunks(BATCH) {
            table.lookup_batch(batch, &mut values[..batch.len()]);
            black_box(&values);
        }
    }
    start.elapsed().as_secs_f64()
}

/// xorshift64* (Vigna 2016).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }
}
