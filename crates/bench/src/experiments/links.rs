//! Links compared with their specs: rates, delays, parts of an interface, and segments.
//!
//! Most measurements use a mux alone (`alone.rs`), whose worker has the
//! first core. Times are this program's when it requests counters; the
//! worker answers within microseconds. Single frames are timed on arrival.

mod node;

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use pdp_memif::MemifClient;
use pdp_mux::traffic_class::WIRE_BYTES;
use pdp_proto::mux::{EgressConfig, Impairments, Vlink};
use pdp_testbed::meter;
use pdp_wire::vlan::TAG_BYTES;

use super::{BenchExperiment, Subject};
use crate::alone::{SingleWorkerMux, frame, tagged, vlan_of, vlink, whole};
use crate::run::{ExperimentRun, Reading};
use crate::site::Random;
use crate::statistics::quantile;

pub(super) const EXPERIMENT: BenchExperiment = BenchExperiment {
    name: "links",
    about: "links against what was asked of them: rates from 64 kbit/s to 5 Gbit/s and of 1,000 links at \
            once, delays of 1 to 100 ms, a fast link and a TCP connection with a long delay, shares and \
            guarantees of an interface's capacity, and a segment against a link of two ends",
    seconds: 220,
    subject: Subject::Pdp,
    run,
};

/// Series of the rates of single links.
const ALONE: &str = "pdp, mux alone";

/// Time before the measurement.
const WARM_UP: Duration = Duration::from_millis(300);

/// Frames that may wait in a link's queue.
const QUEUE_FRAMES: u32 = 256;

const TO: [u8; 6] = [2, 0, 0, 0, 0, 2];
const FROM: [u8; 6] = [2, 0, 0, 0, 0, 1];
const BROADCAST: [u8; 6] = [0xff; 6];

/// Offset of the 4-byte number in a memif program's frame.
const NUMBER_AT: usize = 14;

/// Measured rates, Mbit/s.
const RATES_MBPS: [usize; 5] = [1, 10, 100, 1000, 5000];

/// The slowest rate, kbit/s, and the length of its frames.
const SLOW_KBPS: u32 = 64;
const SLOW_BYTES: usize = 500;
/// Readings of the slow link, and the time between two: not that of a whole number of frames.
const SLOW_CHECKS: u32 = 16;
const SLOW_CHECKS_QUICK: u32 = 4;
const SLOW_PAUSE: Duration = Duration::from_millis(290);

/// Number of simultaneous links, and the rate of each.
const MANY: u16 = 1000;
const MANY_BPS: u64 = 2_000_000;
const MANY_BYTES: usize = 250;
const MANY_QUEUE_FRAMES: u32 = 10;

/// Measured delays, milliseconds, and the pause between frames.
const DELAYS_MS: [usize; 3] = [1, 10, 100];
const PAUSE: Duration = Duration::from_millis(1);
const DELAYED_BYTES: usize = 64;

/// The link with a high rate and a long delay.
const FAST_BPS: u64 = 1_000_000_000;
const FAST_DELAY: Duration = Duration::from_millis(100);
const FAST_BYTES: usize = 1500;
const FAST_QUEUE_FRAMES: u32 = 4096;

/// Rate of the interface that links use together, bits per second, and length of their frames.
const CAPACITY_BPS: u64 = 1_000_000_000;
const SHARED_BYTES: usize = 1000;
/// Guaranteed parts, percent.
const PARTS: [u64; 5] = [30, 25, 20, 15, 10];
/// Links with weights.
const SHARERS: usize = 64;

/// The segment: ends, addresses at all ends except the first, and bytes of a frame.
const ENDS: usize = 16;
const ADDRESSES: usize = 10_000;
const SEGMENT_BYTES: usize = 64;
/// Turns of alternating it with a link of two ends.
const SEGMENT_TURNS: u32 = 2;

fn run(run: &mut ExperimentRun) -> Result<()> {
    let cores = run.cores();
    let bed = run.attempt("the mux alone", |_| SingleWorkerMux::start(cores[0]));
    if let Some(bed) = &bed {
        rates(run, bed)?;
        delays(run, bed, cores)?;
        fast(run, bed)?;
        shares(run, bed)?;
        segments(run, bed)?;
        bed.clear()?;
    }
    drop(bed);
    node::guaranteed(run)?;
    node::tcp(run)
}

/// A single link from interface `G` to `S`.
fn through(egress: EgressConfig) -> Vec<Vlink> {
    vec![vlink("through", vec![whole("G"), whole("S")], egress)]
}

fn at_rate(bps: u64) -> EgressConfig {
    EgressConfig { rate_bps: Some(bps), queue_frames: QUEUE_FRAMES, ..EgressConfig::default() }
}

/// Frames per second at one and a half times this rate.
fn too_many(bps: u64, bytes: usize) -> u64 {
    bps * 3 / 2 / 8 / bytes as u64
}

fn percent_off(is: f64, asked: f64) -> f64 {
    (is / asked - 1.0).abs() * 100.0
}

fn rates(run: &mut ExperimentRun, bed: &SingleWorkerMux) -> Result<()> {
    let time = run.time();
    let checks = if run.quick() { SLOW_CHECKS_QUICK } else { SLOW_CHECKS };
    let rates = run.choose(&RATES_MBPS, &[1, 1000]);
    run.rounds(|run| {
        for mbps in &rates {
            run.take(ALONE, *mbps as f64, "Mbit/s", || {
                let off = rate(bed, *mbps as u64 * 1_000_000, time)?;
                Ok(vec![Reading::new("rate off", off, "%")])
            });
        }
        run.take("pdp, a slow link", SLOW_KBPS.into(), "kbit/s", || {
            let off = slow(bed, checks)?;
            Ok(vec![Reading::new("frames off", off, "frames")])
        });
        run.take("pdp, at once", MANY.into(), "links", || {
            let off = many(bed, 2 * time)?;
            Ok(vec![Reading::new("rate off, worst", off, "%")])
        });
        Ok(())
    })
}

/// Deviation of a link from its rate, percent, measured between two frames.
fn rate(bed: &SingleWorkerMux, bps: u64, time: Duration) -> Result<f64> {
    let bytes = if bps > 10_000_000 { 1500 } else { 500 };
    sink_and(bed, through(at_rate(bps)))?;
    bed.generator("G", &[frame(TO, FROM, bytes)], too_many(bps, bytes), 0)?;
    thread::sleep(WARM_UP);
    let before = bed.counted_at_frame("S", WARM_UP)?;
    thread::sleep(time);
    let after = bed.counted_at_frame("S", WARM_UP)?;
    bed.generator("G", &[], 0, 0)?;
    let bits = (after.end("S")?.sent_bytes - before.end("S")?.sent_bytes) as f64 * 8.0;
    Ok(percent_off(bits / after.since(&before), bps as f64))
}

/// Largest deviation of a slow link among all readings, frames.
fn slow(bed: &SingleWorkerMux, checks: u32) -> Result<f64> {
    let bps = u64::from(SLOW_KBPS) * 1000;
    sink_and(bed, through(at_rate(bps)))?;
    // After this time the burst is used up.
    bed.generator("G", &[frame(TO, FROM, SLOW_BYTES)], 20 * too_many(bps, SLOW_BYTES), 0)?;
    thread::sleep(2 * WARM_UP);
    let (before, mut most) = (bed.counted()?, 0.0f64);
    for _ in 0..checks {
        thread::sleep(SLOW_PAUSE);
        let after = bed.counted()?;
        let asked = bps as f64 * after.since(&before) / 8.0 / SLOW_BYTES as f64;
        most = most.max((after.sent_since(&before, "S")? as f64 - asked).abs());
    }
    bed.generator("G", &[], 0, 0)?;
    Ok(most)
}

/// Deviation of the worst of many links from its rate, percent.
fn many(bed: &SingleWorkerMux, time: Duration) -> Result<f64> {
    let egress = EgressConfig { queue_frames: MANY_QUEUE_FRAMES, ..at_rate(MANY_BPS) };
    let ids = 1..=MANY;
    sink_and(bed, vlans(ids.clone().map(|_| egress)))?;
    let frames: Vec<_> = ids.clone().map(|id| tagged(frame(TO, FROM, MANY_BYTES), id)).collect();
    let pps = u64::from(MANY) * MANY_BPS * 11 / 10 / 8 / MANY_BYTES as u64;
    bed.generator("G", &frames, pps, 0)?;
    thread::sleep(2 * WARM_UP);
    let before = bed.counted()?;
    thread::sleep(time);
    let after = bed.counted()?;
    bed.generator("G", &[], 0, 0)?;
    let asked = MANY_BPS as f64 * after.since(&before) / 8.0 / MANY_BYTES as f64;
    let off = ids.map(|id| Ok(percent_off(sent(&after, &before, id)?, asked)));
    off.collect::<Result<Vec<_>>>().map(|off| off.into_iter().fold(0.0, f64::max))
}

/// Frames sent by a VLAN's link.
fn sent(
    after: &crate::alone::TimedStats,
    before: &crate::alone::TimedStats,
    id: u16,
) -> Result<f64> {
    Ok(after.sent_since(before, &format!("S.{id}"))? as f64)
}

/// Links from VLANs of `G` to those of `S`, with identifiers from 1.
fn vlans(leaving: impl Iterator<Item = EgressConfig>) -> Vec<Vlink> {
    let link = |(id, leaving): (u16, EgressConfig)| {
        vlink(format!("l{id}"), vec![vlan_of("G", id), vlan_of("S", id)], leaving)
    };
    (1..).zip(leaving).map(link).collect()
}

/// Sets up these links, with a silent source and a sink of any capacity.
fn sink_and(bed: &SingleWorkerMux, links: Vec<Vlink>) -> Result<()> {
    bed.clear()?;
    bed.generator("G", &[], 0, 0)?;
    bed.sink("S", None)?;
    bed.replace_vlinks(links)
}

fn delays(run: &mut ExperimentRun, bed: &SingleWorkerMux, [mux, other]: [usize; 2]) -> Result<()> {
    let time = run.time();
    let Some(mut ends) = run.attempt("memif", |_| Ok([bed.memif("A")?, bed.memif("B")?])) else {
        return Ok(());
    };
    let delays = run.choose(&DELAYS_MS, &[1, 10]);
    run.rounds(|run| {
        for (series, hog) in [("pdp, mux on its own core", false), ("pdp, beside a hog", true)] {
            for ms in &delays {
                let delay = Duration::from_millis(*ms as u64);
                run.take(series, *ms as f64, "ms", || {
                    let ends = &mut ends;
                    let off = beside(hog, mux, || {
                        thread::scope(|scope| {
                            let delayed = scope.spawn(|| {
                                meter::pin(other);
                                delayed(bed, ends, delay, time)
                            });
                            delayed.join().ok().context("the thread that sends")?
                        })
                    })?;
                    let of = |share| quantile(&off, share);
                    Ok(vec![
                        Reading::new("delay off", of(0.5), "µs"),
                        Reading::new("delay off, p99", of(0.99), "µs"),
                    ])
                });
            }
        }
        Ok(())
    })
}

/// Runs `work`, optionally beside a thread that uses all of a CPU that it gets.
fn beside<T>(hog: bool, cpu: usize, work: impl FnOnce() -> T) -> T {
    let over = AtomicBool::new(!hog);
    thread::scope(|scope| {
        scope.spawn(|| {
            meter::pin(cpu);
            while !over.load(Ordering::Relaxed) {
                std::hint::spin_loop();
            }
        });
        let done = work();
        over.store(true, Ordering::Relaxed);
        done
    })
}

/// Deviations of frames from their delay, microseconds, sorted. They go out and come back by memif.
fn delayed(
    bed: &SingleWorkerMux,
    [from, to]: &mut [MemifClient; 2],
    delay: Duration,
    time: Duration,
) -> Result<Vec<f64>> {
    let delay_ns = delay.as_nanos() as u64;
    let impairments = Impairments { delay_ns, ..Impairments::default() };
    let egress = EgressConfig { impairments, ..at_rate(FAST_BPS) };
    bed.replace_vlinks(vec![vlink("far", vec![whole("A"), whole("B")], egress)])?;
    let mut frame = frame(TO, FROM, DELAYED_BYTES);
    let (mut sent, mut off, mut received) = (Vec::new(), Vec::new(), Vec::new());
    let start = Instant::now();
    // Until all frames have arrived or are late by a second.
    while start.elapsed() < time + delay + Duration::from_secs(1) {
        let now = start.elapsed();
        if now < time && now >= PAUSE * sent.len() as u32 {
            frame[NUMBER_AT..NUMBER_AT + 4].copy_from_slice(&(sent.len() as u32).to_le_bytes());
            let mut buf = from.alloc().context("a buffer")?;
            ensure!(buf.set_len(frame.len()), "a buffer is too short");
            from.bytes_mut(&mut buf).copy_from_slice(&frame);
            sent.push(Instant::now());
            if let Err(buf) = from.send(buf) {
                from.free(buf);
            }
            from.flush();
        }
        let count = to.receive(&mut received, 256);
        let now = Instant::now();
        for buf in received.drain(..) {
            let number = to.bytes(&buf).get(NUMBER_AT..NUMBER_AT + 4);
            let number = number.and_then(|it| it.try_into().ok()).map(u32::from_le_bytes);
            to.free(buf);
            let then = number.and_then(|number| sent.get(number as usize));
            off.extend(then.map(|then| {
                let took_ns = now.duration_since(*then).as_nanos() as f64;
                (took_ns - delay_ns as f64).abs() / 1e3
            }));
        }
        if count > 0 {
            to.flush();
        }
        if start.elapsed() > time && off.len() == sent.len() {
            break;
        }
    }
    ensure!(off.len() == sent.len(), "of {} frames, {} arrived", sent.len(), off.len());
    off.sort_by(f64::total_cmp);
    Ok(off)
}

fn fast(run: &mut ExperimentRun, bed: &SingleWorkerMux) -> Result<()> {
    let time = run.time();
    run.rounds(|run| {
        run.take("pdp, 1 Gbit/s and 100 ms", FAST_BYTES as f64, "bytes", || {
            let delay_ns = FAST_DELAY.as_nanos() as u64;
            let impairments = Impairments { delay_ns, ..Impairments::default() };
            let queue_frames = FAST_QUEUE_FRAMES;
            sink_and(
                bed,
                through(EgressConfig { impairments, queue_frames, ..at_rate(FAST_BPS) }),
            )?;
            let pps = FAST_BPS / 8 / FAST_BYTES as u64;
            bed.generator("G", &[frame(TO, FROM, FAST_BYTES)], pps, 0)?;
            thread::sleep(WARM_UP + FAST_DELAY);
            let before = bed.counted_at_frame("S", WARM_UP)?;
            thread::sleep(time);
            let after = bed.counted_at_frame("S", WARM_UP)?;
            bed.generator("G", &[], 0, 0)?;
            thread::sleep(WARM_UP + FAST_DELAY);
            let rest = bed.counted()?;
            let lost = rest.end("G")?.received - rest.end("S")?.sent;
            let bits = after.sent_since(&before, "S")? as f64 * FAST_BYTES as f64 * 8.0;
            let carried = bits / after.since(&before) / FAST_BPS as f64 * 100.0;
            Ok(vec![
                Reading::new("carried of the rate", carried, "%"),
                Reading::new("frames lost", lost as f64, "frames"),
            ])
        });
        Ok(())
    })
}

fn shares(run: &mut ExperimentRun, bed: &SingleWorkerMux) -> Result<()> {
    let time = run.time();
    let guaranteed = PARTS.map(|percent| EgressConfig {
        guarantee_bps: CAPACITY_BPS * percent / 100,
        queue_frames: QUEUE_FRAMES,
        ..EgressConfig::default()
    });
    let weighted: Vec<_> = (0..SHARERS as u32)
        .map(|at| EgressConfig {
            weight: 1 + at % 4,
            queue_frames: QUEUE_FRAMES,
            ..EgressConfig::default()
        })
        .collect();
    let sum: u32 = weighted.iter().map(|link| link.weight).sum();
    let parts = PARTS.map(|percent| percent as f64 / 100.0);
    let weights: Vec<_> =
        weighted.iter().map(|link| f64::from(link.weight) / f64::from(sum)).collect();
    let kinds = [
        ("pdp, by guarantees", guaranteed.to_vec(), parts.to_vec()),
        ("pdp, by weights", weighted, weights),
    ];
    run.rounds(|run| {
        for (series, links, parts) in &kinds {
            run.take(series, links.len() as f64, "links with a share", || {
                Ok(vec![Reading::new("share off, worst", share(bed, links, parts, time)?, "%")])
            });
        }
        Ok(())
    })
}

/// Deviation of the worst link from its part of the total,
/// percent of that part. Each link sends more than its part.
fn share(
    bed: &SingleWorkerMux,
    links: &[EgressConfig],
    parts: &[f64],
    time: Duration,
) -> Result<f64> {
    sink_and(bed, vec![])?;
    bed.sink("S", Some(CAPACITY_BPS))?;
    bed.replace_vlinks(vlans(links.iter().copied()))?;
    let ids = 1..=links.len() as u16;
    let frames: Vec<_> = ids.clone().map(|id| tagged(frame(TO, FROM, SHARED_BYTES), id)).collect();
    let wire_bytes = (SHARED_BYTES + TAG_BYTES + WIRE_BYTES) as u64;
    bed.generator("G", &frames, 2 * CAPACITY_BPS / 8 / wire_bytes, 0)?;
    thread::sleep(2 * WARM_UP);
    let before = bed.counted()?;
    thread::sleep(time);
    let after = bed.counted()?;
    bed.generator("G", &[], 0, 0)?;
    let sent: Vec<f64> = ids.map(|id| sent(&after, &before, id)).collect::<Result<_>>()?;
    let all: f64 = sent.iter().sum();
    let carried = all * wire_bytes as f64 * 8.0 / after.since(&before);
    ensure!(carried > 0.95 * CAPACITY_BPS as f64, "only {carried:.0} bit/s were carried");
    Ok(sent
        .iter()
        .zip(parts)
        .map(|(sent, part)| percent_off(sent / all, *part))
        .fold(0.0, f64::max))
}

fn segments(run: &mut ExperimentRun, bed: &SingleWorkerMux) -> Result<()> {
    let time = run.time() / SEGMENT_TURNS;
    run.rounds(|run| {
        // Alternating, within one sample: a core that slows down affects both alike.
        run.take("pdp, segment", ENDS as f64, "ends", || {
            let mut sums = [(0.0, 0.0); 2];
            for _ in 0..SEGMENT_TURNS {
                for (ends, (pps, cycles)) in [2, ENDS].into_iter().zip(&mut sums) {
                    let passed = passed(bed, ends, time)?;
                    *pps += passed.0 / f64::from(SEGMENT_TURNS);
                    *cycles += passed.1 / f64::from(SEGMENT_TURNS);
                }
            }
            let [(two_pps, two_cycles), (pps, cycles)] = sums;
            Ok(vec![
                Reading::new("segment", pps / 1e6, "Mpps"),
                Reading::new("a frame there", cycles, "cycles"),
                Reading::new("two ends", two_pps / 1e6, "Mpps"),
                Reading::new("a frame of two ends", two_cycles, "cycles"),
                Reading::new("of two ends", pps / two_pps * 100.0, "%"),
            ])
        });
        Ok(())
    })
}

/// Frames per second from the first end to the addresses
/// behind the others, in random order, and cycles per frame.
fn passed(bed: &SingleWorkerMux, ends: usize, time: Duration) -> Result<(f64, f64)> {
    let mut random = Random::default();
    let mut stations: Vec<[u8; 6]> = (0..ADDRESSES)
        .map(|_| {
            let ([a, b, c, d], [e, ..]) =
                (random.draw().to_be_bytes(), random.draw().to_be_bytes());
            [2, a, b, c, d, e]
        })
        .collect();
    bed.clear()?;
    let names: Vec<_> = (0..ends).map(|end| format!("E{end}")).collect();
    names.iter().try_for_each(|name| bed.generator(name, &[], 0, 0))?;
    let egress = EgressConfig { queue_frames: QUEUE_FRAMES, ..EgressConfig::default() };
    let all = names.iter().map(|name| whole(name)).collect();
    bed.replace_vlinks(vec![vlink("segment", all, egress)])?;
    // Each other end announces each of its addresses with a frame, and is silent then.
    for (at, name) in names.iter().enumerate().skip(1) {
        let own = stations.iter().skip(at - 1).step_by(ends - 1);
        let frames: Vec<_> = own.map(|mac| frame(BROADCAST, *mac, SEGMENT_BYTES)).collect();
        bed.generator(name, &frames, 0, frames.len() as u64)?;
    }
    thread::sleep(WARM_UP);
    names.iter().skip(1).try_for_each(|name| bed.generator(name, &[], 0, 0))?;
    stations.sort_by_cached_key(|_| random.draw());
    let frames: Vec<_> = stations.iter().map(|mac| frame(*mac, FROM, SEGMENT_BYTES)).collect();
    bed.generator("E0", &frames, 0, 0)?;
    thread::sleep(WARM_UP);
    let before = bed.counted()?;
    thread::sleep(time);
    let after = bed.counted()?;
    bed.generator("E0", &[], 0, 0)?;
    let frames: u64 = names[1..].iter().map(|name| after.left_since(&before, name)).sum();
    ensure!(frames > 0, "no frame came out");
    Ok((frames as f64 / after.since(&before), after.cycles_since(&before) as f64 / frames as f64))
}
