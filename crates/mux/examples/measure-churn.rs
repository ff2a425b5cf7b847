//! Measures what route changes of many vrouters cost the others that the mux forwards for. The
//! example sends 100,000 changes a second in total into their route channels, as their mirrors do.
//!
//! `cargo run --release -p pdp-mux --example measure-churn -- [ROUNDS] [VROUTERS]`
//!
//! There is one worker, with its own CPU. The example measures, alternately with and without
//! changes, the rate of a vrouter whose frames are made and consumed in the mux. It also measures
//! round-trip times of frames through another vrouter, with a program that polls. The thread that
//! sends the changes has the lowest priority, because it shares a CPU with that program.

#[path = "../tests/common/mod.rs"]
mod common;

use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::engines::{Mirror, engine, engine_stats, host_mac, packet, router_mac};
use common::{Peer, node_stats, outside, put};
use pdp_mux::control::{MuxServer, MuxSettings};
use pdp_proto::mux::{
    Encapsulation, ExternalConfig, GeneratorConfig, MuxReply, MuxRequest, OutletConfig, VnetConfig,
};
use pdp_proto::routes::{RouteDecision, ToGuest};

/// Intended changes a second, of all vrouters together, and
/// the interval at which some of each are sent together.
const CHANGES: usize = 100_000;
const TICK: Duration = Duration::from_millis(10);

/// Routes of each vrouter that change.
const ROUTES: usize = 1000;

const TRIPS: usize = 20_000;
const RATE_TIME: Duration = Duration::from_secs(2);
const FRAME_BYTES: usize = 60;

fn frames_of(frame: &[u8]) -> OwnedFd {
    let fd = rustix::fs::memfd_create("frames", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    let mut file = std::fs::File::from(fd);
    file.write_all(&(frame.len() as u16).to_le_bytes()).unwrap();
    file.write_all(frame).unwrap();
    file.into()
}

/// Lets the generator G make this many frames; 0: without end.
fn generate(mux: &MuxServer, frames: u64, of: Vec<OwnedFd>) {
    let outlet = OutletConfig::Generator(GeneratorConfig { pps: 0, frames, number_at: None });
    let request = MuxRequest::PutExternal(ExternalConfig::new("G", 1500, outlet));
    assert_eq!(mux.handle(request, of), MuxReply::Done);
}

fn started(mux: &MuxServer, vnet: &VnetConfig, listener: &UnixListener) -> Mirror {
    put(mux, vnet);
    let mut mirror = Mirror::accept(listener);
    mirror.snapshot();
    mirror
}

/// Adds a vrouter between two generators.
fn between_generators(mux: &MuxServer, root: &Path) -> Mirror {
    let (mut vnet, listener) = engine(root, "busy");
    vnet.vlinks[0].ends[0] = outside("in", "G", Encapsulation::Interface);
    vnet.vlinks[1].ends[1] = outside("out", "S", Encapsulation::Interface);
    let mut frame = packet([10, 2, 0, 2], 0);
    frame.resize(FRAME_BYTES, 0);
    let sink = OutletConfig::Generator(GeneratorConfig { pps: 0, frames: 1, number_at: None });
    let sink = MuxRequest::PutExternal(ExternalConfig::new("S", 1500, sink));
    assert_eq!(mux.handle(sink, vec![frames_of(&frame)]), MuxReply::Done);
    generate(mux, 1, vec![frames_of(&frame)]);
    started(mux, &vnet, &listener)
}

/// Changes one route of each vrouter after the other, until `ended`.
fn churn(mirrors: &mut [Mirror], active: &AtomicBool, ended: &AtomicBool) {
    rustix::process::setpriority_process(None, 19).unwrap();
    let each = CHANGES * TICK.as_millis() as usize / 1000 / mirrors.len();
    let (mut at, mut next) = (0, Instant::now());
    while !ended.load(Ordering::Relaxed) {
        if active.load(Ordering::Relaxed) {
            let change = |at: usize| {
                let (route, group) = (at % ROUTES, 1 + (at / ROUTES) % 2);
                let prefix = format!("10.{}.{}.0/24", 100 + route / 250, route % 250);
                ToGuest::Route {
                    prefix: prefix.parse().unwrap(),
                    target: RouteDecision::Group(group as u32),
                }
            };
            let some: Vec<_> = (at..at + each).map(change).collect();
            mirrors.iter_mut().for_each(|mirror| mirror.push(&some));
            at += each;
        }
        next += TICK;
        let now = Instant::now();
        next = next.max(now - TICK);
        std::thread::sleep(next.saturating_duration_since(now));
    }
}

fn rate(mux: &MuxServer) -> f64 {
    generate(mux, 0, vec![]);
    let sent = || node_stats(mux, "busy", "r1").ports["eth1"].sent;
    std::thread::sleep(RATE_TIME / 10);
    let (began, before) = (Instant::now(), sent());
    std::thread::sleep(RATE_TIME);
    let rate = (sent() - before) as f64 / began.elapsed().as_secs_f64();
    generate(mux, 1, vec![]);
    rate
}

/// Returns round-trip times in ascending order, microseconds.
fn trips([h1, h2]: &mut [Peer; 2]) -> Vec<f64> {
    let forth = packet([10, 2, 0, 2], 0);
    // The header's sum is unchanged.
    let back = [
        &router_mac(1),
        &host_mac(2),
        &forth[12..26],
        &forth[30..34],
        &forth[26..30],
        &forth[34..],
    ];
    let back = back.concat();
    let mut all: Vec<_> = (0..TRIPS)
        .map(|_| {
            let began = Instant::now();
            assert!(h1.out(0, &forth));
            while h2.receive().is_empty() {}
            assert!(h2.out(0, &back));
            while h1.receive().is_empty() {}
            began.elapsed().as_secs_f64() * 1e6
        })
        .collect();
    all.sort_by(f64::total_cmp);
    all
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() {
    let mut arguments = std::env::args().skip(1).map(|it| it.parse::<usize>().expect("a number"));
    let (rounds, vrouters) = (arguments.next().unwrap_or(5), arguments.next().unwrap_or(100));
    let root = tempfile::tempdir().unwrap();
    let cpus = std::thread::available_parallelism().map_or(1, |it| it.get());
    let settings = MuxSettings { workers: 1, cpus: vec![cpus - 1], pool_packets: 8192 };
    let mux = MuxServer::start(&settings).unwrap();
    let _busy = between_generators(&mux, root.path());
    let (calm, listener) = engine(root.path(), "calm");
    let _calm = started(&mux, &calm, &listener);
    let mut peers = [1, 2].map(|node: usize| Peer::tap_of(&calm.nodes[node]));
    let names: Vec<String> = (0..vrouters).map(|at| format!("v{at}")).collect();
    let mut mirrors: Vec<_> = names
        .iter()
        .map(|name| {
            let (vnet, listener) = engine(root.path(), name);
            started(&mux, &vnet, &listener)
        })
        .collect();
    let applied =
        |mux: &MuxServer| -> u64 { names.iter().map(|name| engine_stats(mux, name).changes).sum() };
    let [active, ended] = [(); 2].map(|()| Arc::new(AtomicBool::new(false)));
    let flags = (active.clone(), ended.clone());
    let feeder = std::thread::spawn(move || churn(&mut mirrors, &flags.0, &flags.1));
    let (mut rates, mut halves, mut tails) = ([vec![], vec![]], [vec![], vec![]], [vec![], vec![]]);
    let mut changes = vec![];
    for round in 1..=rounds {
        for (at, with) in [false, true].into_iter().enumerate() {
            active.store(with, Ordering::Relaxed);
            let (began, before) = (Instant::now(), applied(&mux));
            let rate = rate(&mux);
            let trips = trips(&mut peers);
            let (half, tail) = (trips[TRIPS / 2], trips[TRIPS * 99 / 100]);
            let rest = if with { "changes" } else { "at rest" };
            println!("round {round}, {rest}: {:.2} Mpps, {half:.1} us, p99 {tail:.1}", rate / 1e6);
            rates[at].push(rate);
            halves[at].push(half);
            tails[at].push(tail);
            if with {
                let count = (applied(&mux) - before) as f64;
                changes.push(count / began.elapsed().as_secs_f64());
            }
        }
    }
    ended.store(true, Ordering::Relaxed);
    feeder.join().unwrap();
    let [before, after] = rates.map(|mut all| median(&mut all) / 1e6);
    let share = after / before * 100.0;
    println!("changes of {vrouters} vrouters: {:.0} a second", median(&mut changes));
    println!("rate: {before:.2} Mpps, {after:.2} with changes: {share:.1} %");
    for (what, values) in [("median", halves), ("p99", tails)] {
        let [before, after] = values.map(|mut all| median(&mut all));
        println!("round trip, {what}: {before:.1} us, {after:.1} with changes");
    }
}
