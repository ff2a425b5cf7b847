//! PdP's router treats packets like the kernel. The test sends the same frames and commands to a
//! PdP router and to a network namespace with the control guest's settings. It compares the output
//! of their four ports byte by byte, with neighbours unknown and known.
//!
//! To add a case, add it to a list in a file of `behaviour/`: a name, shell lines for both
//! routers ([`Case::setup`](case::Case::setup), and [`Case::undo`](case::Case::undo) unless
//! these only add routes and nexthop objects), and frames ([`case::v4`], [`case::v6`]).
//! Both routers have eth0 to eth3 with the addresses 10.N.0.1/16 and fd00:N::1/64
//! (fd00::1/64 on eth0). eth2 has an MTU of 1,400. The default route is via 10.3.0.5 and
//! fd00:3::5. Each case sends from a new machine behind eth0. All other machines answer for
//! themselves, except those whose address ends in 102 (0x66).
//!
//! `PDP_CASES=WORDS` runs the cases whose names contain the words, and prints each router's output.
//!
//! If PdP differs by design, `differs` gives the output
//! of both, and names the row of docs/dataplane.md.

mod addresses;
mod bench;
mod case;
mod frames;
mod hooks;
mod namespace;
mod neighbours;
mod packets;
mod routes;
mod seen;
mod settings;

use std::time::Instant;

use bench::Bench;
use case::{Case, Expect};

fn cases() -> Vec<Case> {
    let lists = [
        packets::cases(),
        addresses::cases(),
        routes::cases(),
        neighbours::cases(),
        settings::cases(),
        hooks::cases(),
    ];
    lists.into_iter().flatten().collect()
}

/// Rows of docs/dataplane.md: the first cell, and the cases named in the last one.
fn rows() -> Vec<(String, Vec<String>)> {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/dataplane.md");
    let page = std::fs::read_to_string(page).expect("the page");
    let mut rows = Vec::new();
    let mut has_cases = false;
    for line in page.lines() {
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        if !line.starts_with('|') {
            has_cases = false;
        } else if cells.last() == Some(&"case") {
            has_cases = true;
        } else if has_cases && !line.starts_with("|--") {
            let names = cells[cells.len() - 1].split('`').skip(1).step_by(2);
            rows.push((cells[0].to_string(), names.map(str::to_string).collect()));
        }
    }
    rows
}

#[test]
fn every_documented_difference_has_a_case() {
    let (cases, rows) = (cases(), rows());
    let mut names = std::collections::BTreeSet::new();
    for case in &cases {
        assert!(names.insert(case.name.as_str()), "twice: {}", case.name);
        if let Expect::Differs { row, .. } = &case.expect {
            let is_named =
                |(what, named): &(String, Vec<String>)| what == row && named.contains(&case.name);
            assert!(rows.iter().any(is_named), "docs/dataplane.md, `{row}`, lacks `{}`", case.name);
        }
    }
    for (what, named) in &rows {
        assert!(!named.is_empty(), "without a case: {what}");
        for name in named {
            assert!(names.contains(name.as_str()), "no such case: {name}");
        }
    }
    assert!(rows.len() > 20, "{} rows", rows.len());
}

#[test]
fn forwarding_guests_behave_like_the_kernel() {
    judge("behaviour", "power: 0.5");
}

#[test]
fn fast_path_behaves_like_the_kernel() {
    judge("engine", "kind: fastpath");
}

fn judge(label: &str, plane: &str) {
    let cases = cases();
    let mut bench = Bench::new(label, plane);
    let started = Instant::now();
    let wanted = std::env::var("PDP_CASES").unwrap_or_default();
    let mut wrong = String::new();
    let mut count = 0;
    for case in cases.iter().filter(|case| case.name.contains(&wanted)) {
        if !bench.can_judge(case) {
            println!("SKIPPED, this kernel cannot: {}", case.name);
            continue;
        }
        if let Some(text) = bench.judge(case) {
            wrong += &format!("{}\n{text}", case.name);
        }
        count += 1;
    }
    println!("{count} cases in {:.1} s", started.elapsed().as_secs_f64());
    assert!(wrong.is_empty(), "not as expected:\n{wrong}");
}
