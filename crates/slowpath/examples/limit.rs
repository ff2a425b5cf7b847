//! A small slow path: if a source sends more packets a
//! second than allowed, drops its packets for ten seconds.
//!
//! `limit PPS SOURCE...`, in the control guest; sources are IPv4 prefixes. Each has a filter and a
//! counter with its number. The fast path forwards, counts and drops on its own.

use std::error::Error;
use std::time::Duration;

use ipnet::Ipv4Net;
use pdp_slowpath::{
    Filter, FilterAction, FilterCounter, IpMatch, SOCKET, SlowPathSession, discard, filter, pass,
};

/// Seconds.
const DROPPED_FOR: u32 = 10;

fn rule(number: u32, source: Ipv4Net, is_dropped: bool) -> Filter {
    let action = if is_dropped { discard() } else { pass() };
    filter(number, 100, IpMatch::ip().src(source), FilterAction { counter: number, ..action })
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let limit: u64 = args.next().ok_or("limit PPS SOURCE...")?.parse()?;
    let sources = args.map(|source| source.parse()).collect::<Result<Vec<Ipv4Net>, _>>()?;
    let count = u32::try_from(sources.len())?;

    let mut slow_path = SlowPathSession::connect(SOCKET)?;
    let rules = (0..).zip(&sources).map(|(number, source)| rule(number, *source, false));
    rules.fold(slow_path.batch(), |batch, rule| batch.set(rule)).commit()?;

    let mut before = vec![FilterCounter::default(); sources.len()];
    // Seconds for which each source stays dropped.
    let mut dropped = vec![0; sources.len()];
    loop {
        // Instead of sleeping, so that a new mux gets the filters at once.
        if let Err(error) = slow_path.keep(Duration::from_secs(1)) {
            eprintln!("{error}");
            continue;
        }
        let now = slow_path.counters(0, count)?;
        let mut batch = slow_path.batch();
        for (number, source) in (0..).zip(&sources) {
            let at = number as usize;
            // A new mux counts from 0.
            let packets = now[at].packets.checked_sub(before[at].packets);
            let is_much = packets.unwrap_or(now[at].packets) > limit;
            let left: u32 = if is_much { DROPPED_FOR } else { dropped[at] - dropped[at].min(1) };
            if (left > 0) != (dropped[at] > 0) {
                println!("{source}: {}", if left > 0 { "dropped" } else { "passes" });
                batch = batch.set(rule(number, *source, left > 0));
            }
            dropped[at] = left;
        }
        batch.commit()?;
        before = now;
    }
}
