//! Measures filters: look-ups, changes, look-ups while filters
//! change, memory, and the worst case of hostile filters.
//!
//! `cargo run --release -p pdp-filters --example
//! measure-filters -- [--json] [--wide] [--hostile] [FILE...]`
//!
//! Rule sets are generated ([`rules::KINDS`], of 1,000, 10,000 and 100,000 rules), or read
//! from files in ClassBench's format. Port ranges become prefixes, so there are more filters
//! than rules. With `--wide`, keys have 320 bits instead of 112. `--hostile` measures only
//! the worst case. `--write DIRECTORY` writes the generated sets, for other programs. With
//! `--json`, each measurement is a line of JSON, and its field `measure` names it.
//!
//! Keys are independent, 2^20 of them, in batches of 32. `inside`: within a random filter, with
//! random other bits. `uniform`: among all keys. `zipf`: from 100,000 flows inside filters,
//! where the n-th has 1/n of the first's traffic. Look-ups store nothing for later ones.

mod rules;

use std::fmt::Write as _;
use std::hint::black_box;
use std::time::{Duration, Instant};

use pdp_filters::{BATCH, Filter, Filters, NONE, NURSERY_MAX, STEPS_MAX};
use rand::rngs::SmallRng;
use rand::{RngExt as _, SeedableRng};
use rules::{KINDS, Layout, Rule};

const KEYS: usize = 1 << 20;
const FLOWS: usize = 100_000;
const KEYS_TOGETHER: usize = 32;
const ROUNDS: usize = 5;
const SIZES: [usize; 3] = [1_000, 10_000, 100_000];

/// Maximum steps of a look-up.
const STEPS: usize = 2048;

/// Changes per second during look-ups, most of them between two batches.
const CHANGES_PPS: f64 = 100_000.0;
const PIECE: usize = 8;

/// Duration of the changes.
const CHANGING: Duration = Duration::from_secs(2);

/// A fixed secret, for measurements only.
const SECRET: u64 = 0x1234_5678_9abc_def0;

/// Hostile filters, and repetitions of a sequence of calls. Each call
/// counts with its shortest time, without disturbances by the machine.
const HOSTILE: usize = 131_072;
const REPEATS: usize = 5;

/// Bytes written between look-ups, to empty the processor's caches.
const COLD_BYTES: usize = 256 << 20;

fn main() {
    let mut report = Report { json: false };
    let (mut wide, mut only_hostile, mut directory, mut files) = (false, false, None, Vec::new());
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--json" => report.json = true,
            "--wide" => wide = true,
            "--hostile" => only_hostile = true,
            "--write" => directory = Some(arguments.next().expect("a directory")),
            _ => files.push(argument),
        }
    }
    let made = KINDS.iter().flat_map(|kind| {
        SIZES.map(|size| (format!("{}.{size}", kind.name), rules::generate(kind, size, 1)))
    });
    if let Some(directory) = directory {
        for (name, rules) in made {
            let lines: String = rules.iter().map(|rule| format!("{rule}\n")).collect();
            std::fs::write(format!("{directory}/{name}"), lines).expect("a place for a set");
        }
        return;
    }
    let read = files.iter().map(|file| {
        let text = std::fs::read_to_string(file).unwrap_or_else(|error| panic!("{file}: {error}"));
        (file.clone(), rules::read(&text))
    });
    let sets: Vec<(String, Vec<Rule>)> = match (only_hostile, files.is_empty()) {
        (true, _) => Vec::new(),
        (_, true) => made.collect(),
        (_, false) => read.collect(),
    };
    if wide { all::<5>(&report, &sets) } else { all::<2>(&report, &sets) }
}

fn all<const W: usize>(report: &Report, sets: &[(String, Vec<Rule>)])
where
    [u64; W]: Layout,
{
    let mut rates = [Vec::new(), Vec::new()];
    for (name, rules) in sets {
        let (inside, zipf) = measure::<W>(report, name, &rules::filters(rules), rules.len());
        rates[0].push(inside);
        rates[1].push(zipf);
    }
    if sets.is_empty() {
        hostile::<W>(report);
        return;
    }
    for (pattern, rates) in ["inside", "zipf"].into_iter().zip(rates) {
        let logarithms: f64 = rates.iter().map(|rate| rate.ln()).sum();
        let mean = (logarithms / rates.len() as f64).exp();
        let least = rates.into_iter().fold(f64::MAX, f64::min);
        report.line(
            "all sets",
            &[
                ("pattern", text(pattern)),
                ("geometric_mean_million_per_second", number(mean)),
                ("least", number(least)),
            ],
        );
    }
}

/// Measures a set. Returns the rates for keys inside it and for Zipf's keys.
fn measure<const W: usize>(
    report: &Report,
    name: &str,
    all: &[Filter<W>],
    rules: usize,
) -> (f64, f64) {
    // One more slot, for a filter that is set before another is removed.
    let mut filters = Filters::new(all.len() + 1, STEPS, SECRET);
    let start = Instant::now();
    let mut refused = 0;
    for (slot, filter) in all.iter().enumerate() {
        refused += usize::from(filters.set(slot as u32, *filter).is_err());
    }
    filters.commit();
    let set = start.elapsed();
    while !filters.settle(1000) {}
    let settled = start.elapsed();
    let mut masks: Vec<[u64; W]> = all.iter().map(|filter| filter.mask).collect();
    masks.sort_unstable();
    masks.dedup();
    report.line(
        "set",
        &[
            ("set", text(name)),
            ("rules", rules.to_string()),
            ("filters", all.len().to_string()),
            ("masks", masks.len().to_string()),
            ("refused", refused.to_string()),
            ("tables", filters.tables().to_string()),
            ("steps_max", filters.steps().to_string()),
            ("bytes_each", number(filters.memory() as f64 / all.len() as f64)),
            ("set_s", number(set.as_secs_f64())),
            ("settled_s", number(settled.as_secs_f64())),
        ],
    );
    let mut random = SmallRng::seed_from_u64(1);
    let inside: Vec<_> = (0..KEYS).map(|_| within(all, &mut random)).collect();
    let uniform: Vec<[u64; W]> =
        (0..KEYS).map(|_| std::array::from_fn(|_| random.random())).collect();
    let zipf = zipf(all, &mut random);
    let mut medians = Vec::new();
    for (pattern, keys) in [("inside", &inside), ("uniform", &uniform), ("zipf", &zipf)] {
        let mut rates: Vec<f64> = (0..ROUNDS).map(|_| rate(&filters, keys)).collect();
        rates.sort_by(f64::total_cmp);
        report.line(
            "look-ups",
            &[
                ("set", text(name)),
                ("pattern", text(pattern)),
                ("met", number(met(&filters, keys))),
                ("million_per_second", list(&rates)),
            ],
        );
        medians.push(rates[ROUNDS / 2]);
    }
    while_changing(report, name, &mut filters, all, &inside);
    (medians[0], medians[2])
}

/// Returns a key that matches one of the filters.
fn within<const W: usize>(all: &[Filter<W>], random: &mut SmallRng) -> [u64; W] {
    let Filter { value, mask, .. } = all[random.random_range(0..all.len())];
    std::array::from_fn(|word| value[word] | random.random::<u64>() & !mask[word])
}

fn zipf<const W: usize>(all: &[Filter<W>], random: &mut SmallRng) -> Vec<[u64; W]> {
    let flows: Vec<_> = (0..FLOWS).map(|_| within(all, random)).collect();
    let mut sum = 0.0;
    let sums: Vec<f64> = (1..=FLOWS)
        .map(|n| {
            sum += 1.0 / n as f64;
            sum
        })
        .collect();
    let flow = |random: &mut SmallRng| {
        let at = random.random::<f64>() * sum;
        flows[sums.partition_point(|it| *it < at).min(FLOWS - 1)]
    };
    (0..KEYS).map(|_| flow(random)).collect()
}

/// Returns look-ups per second, in millions.
fn rate<const W: usize>(filters: &Filters<W>, keys: &[[u64; W]]) -> f64 {
    let start = Instant::now();
    let mut found = [0; KEYS_TOGETHER];
    for batch in keys.chunks_exact(KEYS_TOGETHER) {
        filters.find(batch, &mut found);
        black_box(&found);
    }
    keys.len() as f64 / start.elapsed().as_secs_f64() / 1e6
}

/// Returns the fraction of keys that match a filter.
fn met<const W: usize>(filters: &Filters<W>, keys: &[[u64; W]]) -> f64 {
    let mut found = vec![0; keys.len()];
    for (keys, found) in keys.chunks(BATCH).zip(found.chunks_mut(BATCH)) {
        filters.find(keys, found);
    }
    found.iter().filter(|slot| **slot != NONE).count() as f64 / keys.len() as f64
}

/// Measures single changes, each committed alone: a
/// filter is removed, and set again by the next change.
fn while_changing<const W: usize>(
    report: &Report,
    name: &str,
    filters: &mut Filters<W>,
    all: &[Filter<W>],
    keys: &[[u64; W]],
) {
    let mut random = SmallRng::seed_from_u64(2);
    let mut gone = None;
    let mut change = |filters: &mut Filters<W>| {
        match gone.take() {
            Some(slot) => _ = filters.set(slot as u32, all[slot]),
            None => {
                let slot = random.random_range(0..all.len());
                gone = filters.remove(slot as u32).is_ok().then_some(slot);
            }
        }
        filters.commit();
        while !filters.settle(1) {}
    };
    let mut shares = Vec::new();
    let (mut changes, mut overdue, mut pauses) = (0, 0, Vec::new());
    for _ in 0..ROUNDS {
        let without = rate(filters, keys);
        let (start, mut count, mut done) = (Instant::now(), 0, 0);
        let mut found = [0; KEYS_TOGETHER];
        for batch in keys.chunks_exact(KEYS_TOGETHER).cycle() {
            let elapsed = start.elapsed();
            if elapsed > CHANGING / ROUNDS as u32 {
                break;
            }
            let due = (elapsed.as_secs_f64() * CHANGES_PPS) as usize - done;
            let pause = Instant::now();
            (0..due.min(PIECE)).for_each(|_| change(filters));
            if due > 0 {
                pauses.push(pause.elapsed());
            }
            done += due.min(PIECE);
            filters.find(batch, &mut found);
            black_box(&found);
            count += KEYS_TOGETHER;
        }
        let elapsed = start.elapsed().as_secs_f64();
        changes += done;
        overdue += (elapsed * CHANGES_PPS) as usize - done;
        shares.push(count as f64 / elapsed / 1e4 / without);
    }
    pauses.sort_unstable();
    shares.sort_by(f64::total_cmp);
    let (start, mut count) = (Instant::now(), 0);
    while start.elapsed() < CHANGING / ROUNDS as u32 {
        (0..100).for_each(|_| change(filters));
        count += 100;
    }
    report.line(
        "changes",
        &[
            ("set", text(name)),
            ("changes", changes.to_string()),
            ("late", overdue.to_string()),
            ("rate_left_percent", list(&shares)),
            ("median_pause_us", number(microseconds(pauses[pauses.len() / 2]))),
            ("p999_pause_us", number(microseconds(pauses[pauses.len() * 999 / 1000]))),
            ("longest_pause_us", number(microseconds(pauses[pauses.len() - 1]))),
            ("changes_per_second", number(f64::from(count) / start.elapsed().as_secs_f64())),
        ],
    );
}

/// Measures the worst known filters. Each matches a key of 0
/// except for one isolated bit, which most tables don't hash.
fn hostile<const W: usize>(report: &Report) {
    // Random bits for each filter: single ones, or whole groups, which tables hash in part.
    let groups = |group: u32| {
        move |random: &mut SmallRng| {
            std::array::from_fn(|_| {
                let bits = random.random::<u64>();
                let lowest = u64::MAX / (u64::MAX >> (64 - group));
                (0..group).fold(0, |all, at| all | (bits & lowest) << at)
            })
        }
    };
    let nested = |random: &mut SmallRng| {
        let bits = random.random_range(1..64 * W as u32);
        std::array::from_fn(|word| {
            let bits = bits.saturating_sub(64 * word as u32).min(64);
            u64::MAX.checked_shl(64 - bits).unwrap_or(0)
        })
    };
    type Masks<'a, const W: usize> = &'a dyn Fn(&mut SmallRng) -> [u64; W];
    let kinds: [(&str, Masks<'_, W>); 5] = [
        ("single bits", &groups(1)),
        ("groups of 4", &groups(4)),
        ("groups of 16", &groups(16)),
        ("nested", &nested),
        ("alike", &|_| [u64::MAX; W]),
    ];
    for (name, masks) in kinds {
        let mut random = SmallRng::seed_from_u64(3);
        let filter = |priority| {
            let mut mask = masks(&mut random);
            mask[W - 1] = mask[W - 1] & !0xffff | 1;
            let mut value = [0; W];
            value[W - 1] = 1;
            Filter { value, mask, priority }
        };
        // Rising priorities move tables forward each time.
        let all: Vec<Filter<W>> = (0..HOSTILE as u32).map(filter).collect();
        for steps in [STEPS, STEPS_MAX] {
            let mut times = Times::default();
            let mut figures = Vec::new();
            for _ in 0..REPEATS {
                figures = attack(&all, steps, &mut times);
            }
            let mut fields = vec![("filters", text(name)), ("steps_allowed", steps.to_string())];
            fields.extend(figures);
            fields.extend(times.longest());
            report.line("hostile", &fields);
        }
    }
}

/// Shortest times of a sequence of calls.
#[derive(Default)]
struct Times {
    all: [Vec<Duration>; 6],
}

impl Times {
    const NAMES: [&str; 6] = [
        "longest_set_us",
        "longest_remove_us",
        "longest_settle_us",
        "abandon_us",
        "key_us",
        "cold_key_us",
    ];

    fn take(&mut self, which: usize, at: usize, time: Duration) {
        match self.all[which].get_mut(at) {
            Some(known) => *known = time.min(*known),
            None => self.all[which].push(time),
        }
    }

    fn longest(&self) -> impl Iterator<Item = (&'static str, String)> {
        let longest =
            |all: &Vec<Duration>| microseconds(all.iter().max().copied().unwrap_or_default());
        Self::NAMES.into_iter().zip(self.all.iter().map(move |all| number(longest(all))))
    }
}

/// Sets all filters, looks up keys, abandons, sets them again, and removes them.
fn attack<const W: usize>(
    all: &[Filter<W>],
    steps: usize,
    times: &mut Times,
) -> Vec<(&'static str, String)> {
    let mut filters = Filters::<W>::new(HOSTILE, steps, SECRET);
    let timed = |call: &mut dyn FnMut()| {
        let start = Instant::now();
        call();
        start.elapsed()
    };
    let (mut set, mut calls) = (0, [0; 5]);
    for (slot, filter) in all.iter().enumerate() {
        let time = timed(&mut || set += u32::from(filters.set(slot as u32, *filter).is_ok()));
        times.take(0, calls[0], time);
        calls[0] += 1;
    }
    let figures = vec![
        ("set", set.to_string()),
        ("tables", filters.tables().to_string()),
        (
            "steps_and_nursery",
            format!("\"{}+{}\"", filters.steps() - NURSERY_MAX.min(filters.steps()), NURSERY_MAX),
        ),
    ];
    filters.commit();
    let keys = [[0; W]; KEYS_TOGETHER];
    let mut found = [0; KEYS_TOGETHER];
    for at in 0..20 {
        let time = timed(&mut || filters.find(&keys, &mut found)) / KEYS_TOGETHER as u32;
        times.take(4, at, time);
    }
    for at in 0..2 {
        black_box(vec![1_u8; COLD_BYTES]);
        let time = timed(&mut || filters.find(&keys[..1], &mut found[..1]));
        times.take(5, at, time);
    }
    while !filters.settle(1000) {}
    for slot in 0..HOSTILE as u32 {
        let time = timed(&mut || _ = filters.remove(slot));
        times.take(1, calls[1], time);
        calls[1] += 1;
    }
    times.take(3, 0, timed(&mut || filters.abandon()));
    while !filters.settle(1000) {}
    (0..HOSTILE as u32).for_each(|slot| _ = filters.remove(slot));
    filters.commit();
    let mut done = false;
    while !done {
        let time = timed(&mut || done = filters.settle(1));
        times.take(2, calls[2], time);
        calls[2] += 1;
    }
    figures
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
    let values: Vec<_> = values.iter().map(|value| format!("{value:.2}")).collect();
    format!("[{}]", values.join(","))
}

/// Writer of results: lines of text or JSON.
struct Report {
    json: bool,
}

impl Report {
    /// Writes one measurement: fields and their values as JSON.
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
