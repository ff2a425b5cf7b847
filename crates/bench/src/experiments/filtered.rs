//! A slow path's filters while the mux forwards: their number, their rate of change, and how often
//! counters are read. The mux makes and drops the frames, as in `fastpath`.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use pdp_proto::slowpath::{
    COUNTERS_MAX, FILTERS_MAX, Filter, FilterAction, FilterPattern, PACKET_BYTES_MAX,
    SlowPathReply, SlowPathRequest, VERSION,
};
use pdp_testbed::meter::{self, Clock};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recv,
    send, socket_with,
};

use super::{BenchExperiment, Subject};
use crate::bed::{ForwardingTestbed, LoadResult};
use crate::peers::pdp::Design;
use crate::run::{ExperimentRun, Reading};
use crate::site::{self, Prefix};

pub(super) const EXPERIMENT: BenchExperiment = BenchExperiment {
    name: "fastpath-filters",
    about: "the mux's own forwarding with up to 100,000 filters of a slow path, one for each of as many prefixes of the \
            full table; while 100,000 of them change a second, once all have, and while as many counters are read five \
            times a second then",
    seconds: 210,
    subject: Subject::Pdp,
    run,
};

/// Filters of the measurements with changes and counters.
const MANY: usize = 100_000;

/// Requested changes per second, each committed by itself,
/// and the time in which some are sent together.
const CHANGES: u64 = 100_000;
const TICK: Duration = Duration::from_millis(2);

/// Measurements of a round with reads of counters. Each is between two without.
const READINGS: usize = 5;

/// Time between two reads of all counters.
const READ_EVERY: Duration = Duration::from_millis(200);

const FRAME_BYTES: usize = 64;

const PATIENCE: Duration = Duration::from_secs(20);

/// Slow path that sends requests as fast as possible.
struct SlowPathProgram {
    socket: OwnedFd,
    number: u64,
}

impl SlowPathProgram {
    fn connect(path: &Path) -> Result<Self> {
        let (unix, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
        let socket = socket_with(unix, kind, SocketFlags::CLOEXEC, None)?;
        for which in [Timeout::Recv, Timeout::Send] {
            set_socket_timeout(&socket, which, Some(PATIENCE))?;
        }
        connect(&socket, &SocketAddrUnix::new(path)?).context("the slow path's socket")?;
        let mut program = Self { socket, number: 0 };
        program.request(&[SlowPathRequest::Hello(VERSION)])?;
        ensure!(matches!(program.hear()?[..], [SlowPathReply::Welcome(_)]), "no welcome");
        Ok(program)
    }

    fn request(&mut self, requests: &[SlowPathRequest]) -> Result<()> {
        for some in requests.chunks(400) {
            let mut packet = Vec::new();
            some.iter().for_each(|request| request.encode(&mut packet));
            send(&self.socket, &packet, SendFlags::NOSIGNAL)?;
        }
        Ok(())
    }

    fn hear(&mut self) -> Result<Vec<SlowPathReply>> {
        let mut bytes = vec![0; PACKET_BYTES_MAX];
        let (_, length) = recv(&self.socket, &mut bytes[..], RecvFlags::empty())?;
        let (mut packet, mut all) = (&bytes[..length], Vec::new());
        while let Some(reply) = SlowPathReply::decode(&mut packet)? {
            all.push(reply);
        }
        Ok(all)
    }

    fn commit(&mut self, sweep: bool) -> SlowPathRequest {
        self.number += 1;
        SlowPathRequest::Commit { number: self.number, sweep }
    }

    /// Waits until all commits so far are in force.
    fn settle(&mut self) -> Result<()> {
        loop {
            for reply in self.hear()? {
                match reply {
                    SlowPathReply::Done { number, .. } if number == self.number => return Ok(()),
                    SlowPathReply::Refused { id, reason, .. } => bail!("filter {id}: {reason}"),
                    SlowPathReply::Bye(why) => bail!("disconnected: {why}"),
                    _ => {}
                }
            }
        }
    }

    /// Replaces all filters by these. Returns the time that this took.
    fn set(&mut self, filters: &[SlowPathRequest]) -> Result<Duration> {
        let start = Instant::now();
        self.request(filters)?;
        let commit = self.commit(true);
        self.request(&[commit])?;
        self.settle()?;
        Ok(start.elapsed())
    }

    fn read_counters(&mut self, count: u32) -> Result<()> {
        self.request(&[SlowPathRequest::Counters { number: 0, first: 0, count }])?;
        loop {
            if let [SlowPathReply::Counters { more: false, .. }] = self.hear()?[..] {
                return Ok(());
            }
        }
    }
}

/// Action that a program repeats. Returns the amount of work done.
type Act = Box<dyn FnMut(&mut SlowPathProgram) -> Result<u64> + Send>;

/// Activity during a measurement.
struct BackgroundLoad {
    thread: Option<JoinHandle<Result<()>>>,
    end: Arc<AtomicBool>,
    done: Arc<AtomicU64>,
}

impl BackgroundLoad {
    /// Starts it on another core than the mux's, where programs of control guests run too.
    fn start(path: PathBuf, core: usize, mut act: Act) -> Self {
        let (end, done) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (ends, count) = (end.clone(), done.clone());
        let thread = thread::spawn(move || {
            meter::pin(core);
            let mut program = SlowPathProgram::connect(&path)?;
            while !ends.load(Ordering::Relaxed) {
                count.fetch_add(act(&mut program)?, Ordering::Relaxed);
            }
            Ok(())
        });
        Self { thread: Some(thread), end, done }
    }

    /// Stops it; returns the amount of work since it began.
    fn stop(mut self) -> Result<u64> {
        self.end.store(true, Ordering::Relaxed);
        let thread = self.thread.take().context("a thread")?;
        thread.join().map_err(|_| anyhow::anyhow!("it panicked"))??;
        Ok(self.done.load(Ordering::Relaxed))
    }
}

/// Filter for packets to a prefix. It counts them and changes nothing.
fn filter(id: u32, (address, length): Prefix, priority: u32) -> SlowPathRequest {
    let (mut value, mut mask) = ([0; 16], [0; 16]);
    value[4..8].copy_from_slice(&address);
    let bits = u32::MAX.checked_shl(32 - u32::from(length)).unwrap_or(0);
    mask[4..8].copy_from_slice(&bits.to_be_bytes());
    let pattern = FilterPattern::Short { value, mask };
    let action = FilterAction { counter: id, ..FilterAction::default() };
    SlowPathRequest::Set(Filter { id, priority, pattern, action })
}

fn run(run: &mut ExperimentRun) -> Result<()> {
    let [core, other] = run.cores();
    let (time, clock) = (run.time(), Clock::of_this_machine());
    let prefixes = site::internet()?;
    let design =
        Design { slowpath: Some((FILTERS_MAX, COUNTERS_MAX)), ..Design::fastpath(core, 1) };
    let Some(bed) =
        run.attempt("pdp", |_| ForwardingTestbed::start(design, &prefixes, FRAME_BYTES))
    else {
        return Ok(());
    };
    let socket = bed.place("bench0/r1").join("slowpath/control.sock");
    let all: Vec<Prefix> = prefixes.iter().copied().step_by(prefixes.len() / MANY).collect();
    let filters: Vec<SlowPathRequest> = all
        .iter()
        .take(MANY)
        .zip(0..)
        .map(|(prefix, id)| filter(id, *prefix, prefix.1.into()))
        .collect();
    let mut program = SlowPathProgram::connect(&socket)?;
    let counts = run.choose(&[0, 1, 1_000, 10_000, MANY], &[0, MANY]);
    run.rounds(|run| {
        let mut none = None;
        let mut of_none = |passed: &LoadResult| {
            let none = *none.get_or_insert(passed.rate_pps);
            Reading::new("of none", passed.rate_pps / none * 100.0, "%")
        };
        let mut at_rest = 0.0;
        for &count in &counts {
            let set = program.set(&filters[..count])?;
            let offer = || bed.offer(0, time, &clock);
            run.take_as("pdp, filters", count as f64, "filters", offer, |passed| {
                at_rest = passed.rate_pps;
                let mut readings = passed.readings();
                readings.push(of_none(&passed));
                readings.push(Reading::new("set in one batch", set.as_secs_f64() * 1e3, "ms"));
                readings
            });
        }
        program.set(&filters)?;
        let beside = |act: Act| {
            let beside = BackgroundLoad::start(socket.clone(), other, act);
            let start = Instant::now();
            let passed = bed.offer(0, time, &clock);
            let seconds = start.elapsed().as_secs_f64();
            Ok((passed?, beside.stop()? as f64 / seconds))
        };
        let (mut at, mut next) = (0, Instant::now());
        let changed = filters.clone();
        let change = move |program: &mut SlowPathProgram| {
            // Replaces each filter by one for the same packets, but with another counter.
            let mut some = Vec::new();
            for _ in 0..CHANGES * TICK.as_millis() as u64 / 1000 {
                let SlowPathRequest::Set(filter) = &changed[at % changed.len()] else {
                    bail!("a filter")
                };
                let counter = (filter.id + 1 + (at / changed.len()) as u32) % MANY as u32;
                let action = FilterAction { counter, ..filter.action };
                some.push(SlowPathRequest::Set(Filter { action, ..*filter }));
                some.push(program.commit(false));
                at += 1;
            }
            program.request(&some)?;
            program.settle()?;
            next += TICK;
            thread::sleep(next.saturating_duration_since(Instant::now()));
            Ok(some.len() as u64 / 2)
        };
        let measure = || beside(Box::new(change.clone()));
        run.take_as("pdp, filters that change", MANY as f64, "filters", measure, |it| {
            let (passed, rate) = it;
            let mut readings = passed.readings();
            readings.push(Reading::new(
                "of the same at rest",
                passed.rate_pps / at_rest * 100.0,
                "%",
            ));
            readings.push(Reading::new("changes", rate / 1e3, "thousand/s"));
            readings
        });
        // The filters have moved in the tables by now.
        let offer = || bed.offer(0, time, &clock);
        run.take_as("pdp, filters that have changed", MANY as f64, "filters", offer, |passed| {
            let share = passed.rate_pps / at_rest * 100.0;
            let mut readings = passed.readings();
            readings.push(Reading::new("of the same before", share, "%"));
            readings
        });
        // The rate varies by more than this costs. So each measurement is compared with those
        // before and after it, and the median counts.
        let measure = || {
            let (mut all, mut before) = (Vec::new(), bed.offer(0, time, &clock)?);
            for _ in 0..READINGS {
                let (passed, rate) = beside(Box::new(|program| {
                    let next = Instant::now() + READ_EVERY;
                    program.read_counters(MANY as u32)?;
                    thread::sleep(next.saturating_duration_since(Instant::now()));
                    Ok(1)
                }))?;
                let after = bed.offer(0, time, &clock)?;
                let at_rest = (before.rate_pps + after.rate_pps) / 2.0;
                all.push((passed.rate_pps / at_rest * 100.0, passed, rate));
                before = after;
            }
            all.sort_by(|one, other| one.0.total_cmp(&other.0));
            Ok(all.swap_remove(READINGS / 2))
        };
        run.take_as("pdp, counters that are read", MANY as f64, "filters", measure, |it| {
            let (share, passed, rate) = it;
            let mut readings = passed.readings();
            readings.push(Reading::new("of the same at rest", share, "%"));
            readings.push(Reading::new("reads of all", rate, "/s"));
            readings
        });
        let start = Instant::now();
        program.read_counters(MANY as u32)?;
        let took = start.elapsed();
        run.take("pdp, counters read at rest", MANY as f64, "counters", || {
            Ok(vec![Reading::new("time", took.as_secs_f64() * 1e3, "ms")])
        });
        Ok(())
    })
}
