//! Route changes through the whole chain while frames are forwarded. A
//! writer changes the control guest's kernel table, the mirror reports the
//! changes, and the forwarding guest applies them between its batches.
//!
//! The writer draws routes of the full IPv4 table at random. It moves each to the other of two next
//! hops, or removes it and adds it again. Frames come from a generator inside the mux, and go to a
//! program over memif that reads its ring every [`LOOK`]. A pause is the longest time between two
//! readings that found frames, so no pause is shorter than that. With two CPUs, writer, kernel and
//! mirror compete with mux and guest. Then pauses are mostly those of a process waiting for a CPU:
//! compare with the run without changes.

use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use pdp_memif::{ConnectionState, MemifClient, MemifSettings};
use pdp_proto::channel::Channel;
use pdp_proto::mirror::{MirrorReply, MirrorRequest, MirrorStatusReply};
use pdp_testbed::meter::{self, Clock};
use pdp_testbed::{TemporaryNode, eventually, retry};

use super::{BenchExperiment, Subject};
use crate::netlink::{MESSAGES_MAX, RouteUpdate, RouteWriter};
use crate::peers::pdp::{Design, Pdp};
use crate::run::{ExperimentRun, Reading};
use crate::site::{self, Prefix, Random, stream, words};

pub(super) const EXPERIMENT: BenchExperiment = BenchExperiment {
    name: "churn",
    about: "changes of routes a second, from the kernel to the guest's table, and what they do to \
            forwarding; full IPv4 table, mux and guest on a core each",
    seconds: 110,
    subject: Subject::Pdp,
    run,
};

/// Requested changes per second. The last rate is unattainable.
const RATES: [u64; 4] = [0, 10_000, 100_000, MOST];
const MOST: u64 = 10_000_000;

/// Frames per second for pauses: below the capacity of mux and guest beside the other work.
const MODERATE_PPS: u64 = 1_000_000;

/// Next hops between which routes change.
const GATEWAYS: [[u8; 4]; 2] = [[10, 0, 2, 2], [10, 0, 2, 3]];

/// One of this many changes of an existing route removes it.
const AWAY: u32 = 8;

/// Time in which changes are written together if they fill less than a call.
const TICK: Duration = Duration::from_millis(1);

/// Time between two readings of the sink.
const LOOK: Duration = Duration::from_micros(100);

/// Frames of the generator, and their length.
const FRAMES: usize = 65_536;
const FRAME_BYTES: usize = 64;

/// Time for mirror and guest to receive everything.
const SETTLE_MAX: Duration = Duration::from_secs(120);

const WARM_UP: Duration = Duration::from_millis(500);

fn run(run: &mut ExperimentRun) -> Result<()> {
    let prefixes = site::internet()?;
    let time = run.time();
    let start = |_: &mut ExperimentRun| UnfollowedKernel::start(&prefixes);
    let alone = run.wants_series("kernel").then(|| run.attempt("kernel", start)).flatten();
    let bed = run.attempt("pdp", |run| ChurnTestbed::start(run.cores(), &prefixes));
    let rates: &[u64] = if run.quick() { &[0, 100_000, MOST] } else { &RATES };
    let (mut alone, Some(mut bed)) = (alone, bed) else { return Ok(()) };
    run.rounds(|run| {
        if let Some(alone) = &mut alone {
            run.take("kernel alone", MOST as f64, "changes asked for", || {
                let (count, seconds) = alone.churn.write(MOST, time)?;
                Ok(vec![Reading::new("changes", count as f64 / seconds / 1e3, "thousand/s")])
            });
        }
        for (series, pps) in [("saturation", 0), ("1 Mpps", MODERATE_PPS)] {
            for &rate in rates {
                run.take(series, rate as f64, "changes asked for", || bed.sample(pps, rate, time));
            }
        }
        Ok(())
    })?;
    run.attempt("the guest's table", |_| bed.compare());
    Ok(())
}

/// Routes and the writer of their changes.
struct RouteChurn {
    writer: RouteWriter,
    /// With the index of its gateway, if the route exists.
    routes: Vec<(Prefix, Option<usize>)>,
    random: Random,
}

impl RouteChurn {
    /// Adds all routes to the kernel.
    fn start(mut writer: RouteWriter, prefixes: &[Prefix]) -> Result<Self> {
        for some in prefixes.chunks(MESSAGES_MAX) {
            let change =
                |prefix: &Prefix| RouteUpdate { prefix: *prefix, gateway: Some(GATEWAYS[0]) };
            writer.write(&some.iter().map(change).collect::<Vec<_>>())?;
        }
        let routes = prefixes.iter().map(|prefix| (*prefix, Some(0))).collect();
        Ok(Self { writer, routes, random: Random::default() })
    }

    /// Changes a random route.
    fn next(&mut self) -> RouteUpdate {
        let random = self.random.draw();
        let at = (u64::from(random) * self.routes.len() as u64) >> 32;
        let (prefix, gateway) = &mut self.routes[at as usize];
        *gateway = match gateway {
            Some(_) if random.is_multiple_of(AWAY) => None,
            Some(gateway) => Some(1 - *gateway),
            None => Some(0),
        };
        RouteUpdate { prefix: *prefix, gateway: gateway.map(|gateway| GATEWAYS[gateway]) }
    }

    /// Makes `rate` changes per second for `time`; returns their number and the seconds used.
    fn write(&mut self, rate: u64, time: Duration) -> Result<(u64, f64)> {
        let (start, mut count) = (Instant::now(), 0);
        loop {
            let elapsed = start.elapsed();
            if elapsed >= time {
                return Ok((count, elapsed.as_secs_f64()));
            }
            let due = (rate as f64 * elapsed.as_secs_f64()) as u64 - count;
            if due == 0 {
                thread::sleep(TICK);
                continue;
            }
            let some = due.min(MESSAGES_MAX as u64);
            let changes: Vec<RouteUpdate> = (0..some).map(|_| self.next()).collect();
            self.writer.write(&changes)?;
            count += some;
        }
    }
}

/// Kernel without a mirror following its routes.
struct UnfollowedKernel {
    churn: RouteChurn,
    _node: TemporaryNode,
}

impl UnfollowedKernel {
    fn start(prefixes: &[Prefix]) -> Result<Self> {
        let mut node = TemporaryNode::prepare("alone");
        let machine = node.machine("mA", "extA");
        machine.run("ip addr add 10.0.2.1/24 dev eth0");
        let interface = index(&machine.run("ip -o link show eth0"))?;
        let netns = PathBuf::from("/run/netns").join(&machine.netns);
        let churn = RouteChurn::start(RouteWriter::open(&netns, interface)?, prefixes)?;
        Ok(Self { churn, _node: node })
    }
}

/// Index of an interface in the output of `ip -o link show`.
fn index(words: &str) -> Result<u32> {
    words.split(':').next().unwrap_or("").trim().parse().with_context(|| words.to_owned())
}

/// Node with a router whose routes change.
struct ChurnTestbed {
    sink: ChurnSink,
    churn: RouteChurn,
    pdp: Pdp,
    mirror: Vec<u32>,
    control: PathBuf,
    design: Design,
    frames: PathBuf,
    clock: Clock,
    node: TemporaryNode,
}

impl ChurnTestbed {
    fn start([mux, guest]: [usize; 2], prefixes: &[Prefix]) -> Result<Self> {
        let node = TemporaryNode::start("churn");
        let design = Design::plain(mux, guest);
        let frames = node.directory.join("frames.pcap");
        stream(prefixes, FRAME_BYTES).write_pcap(&frames, FRAMES, &[])?;
        let pdp = Pdp::start(&node, &design, &interfaces(""))?;
        let router = node.socket_directory("bench0/r1");
        let ip = |line: &str| node.exec("bench0/r1", line);
        let other = words(site::MAC_B);
        ip(&format!("ip neigh replace 10.0.2.3 lladdr {other} dev eth1 nud permanent"));
        // For frames whose route is removed.
        ip("ip route replace default via 10.0.2.2");
        let interface = index(&ip("ip -o link show eth1"))?;
        let pid = std::fs::read_to_string(node.record("bench0.r1").join("pid"))?;
        let pid: serde_json::Value = serde_json::from_str(&pid)?;
        let pid = pid["pid"].as_u64().context("the control guest's process")?;
        let netns = PathBuf::from(format!("/proc/{pid}/ns/net"));
        let sink = ChurnSink::start(&node, mux)?;
        let config = router.join("mirror.json").display().to_string();
        let control = router.join("mirror.sock");
        let churn = RouteChurn::start(RouteWriter::open(&netns, interface)?, prefixes)?;
        let mirror = meter::processes("cmdline", &config);
        let clock = Clock::of_this_machine();
        let bed = Self { sink, churn, pdp, mirror, control, design, frames, clock, node };
        bed.settled()?;
        Ok(bed)
    }

    fn status(&self) -> Result<MirrorStatusReply> {
        let mut channel = Channel::connect(&self.control)?;
        channel.send(&MirrorRequest::Status, &[])?;
        match channel.receive::<MirrorReply>()? {
            Some((MirrorReply::Status(status), _)) => Ok(status),
            other => bail!("unexpected answer of the mirror: {other:?}"),
        }
    }

    /// Waits until the guest has all routes of the kernel.
    fn settled(&self) -> Result<MirrorStatusReply> {
        let mut checks = 0;
        retry(SETTLE_MAX, TICK, "the guest's routes", || {
            let status = self.status()?;
            // The first reply may predate the last change.
            checks = if status.settled && !status.stats.guests.is_empty() { checks + 1 } else { 0 };
            ensure!(checks == 2, "not settled: {status:?}");
            Ok(status)
        })
    }

    fn sample(&mut self, pps: u64, rate: u64, time: Duration) -> Result<Vec<Reading>> {
        let pps = if pps > 0 { format!("pps: {pps}, ") } else { String::new() };
        let source = format!("frames: {}, {pps}", self.frames.display());
        self.node.apply(&self.design.substrate(&interfaces(&source)));
        thread::sleep(WARM_UP);
        let before = self.settled()?;
        let processes: Vec<u32> = self.pdp.processes.iter().chain(&self.mirror).copied().collect();
        let meters: Vec<_> = processes.iter().map(|pid| self.clock.start(&[*pid], false)).collect();
        let start = Instant::now();
        let (received_before, _) = self.sink.counted();
        let (count, seconds) = self.churn.write(rate, time)?;
        let written = Instant::now();
        let (now, pause) = self.sink.counted();
        let pps = (now - received_before) as f64 / seconds;
        let after = self.settled()?;
        let lag = written.elapsed();
        let (_, pause_after) = self.sink.counted();
        let hz = meter::cpu("cpu MHz").parse::<f64>()? * 1e6;
        let used = meters.into_iter().map(|meter| self.clock.stop(meter));
        let metered = start.elapsed().as_secs_f64();
        let cores: Vec<String> = used
            .map(|cycles| format!("{:.2}", (cycles.user + cycles.kernel) / hz / metered))
            .collect();
        self.node.apply(&self.design.substrate(&interfaces("")));
        let notes = format!("cores used by mux, guest, mirror: {}", cores.join(", "));
        let pause = pause.max(pause_after).as_secs_f64() * 1e3;
        let applied = count as f64 / (seconds + lag.as_secs_f64());
        let overruns = after.stats.overruns - before.stats.overruns;
        Ok(vec![
            Reading::new("rate", pps / 1e6, "Mpps").notes(notes),
            Reading::new("pause", pause, "ms"),
            Reading::new("written", count as f64 / seconds / 1e3, "thousand/s"),
            Reading::new("applied", applied / 1e3, "thousand/s"),
            Reading::new("lag", lag.as_secs_f64() * 1e3, "ms"),
            Reading::new("overruns", overruns as f64, ""),
        ])
    }

    /// Compares the guest's table with the kernel's.
    fn compare(&self) -> Result<()> {
        let rows = self.node.json(&["routes", "bench0/r1", "--diff"]);
        ensure!(rows.as_array().is_some_and(Vec::is_empty), "the tables differ: {rows}");
        Ok(())
    }
}

/// Interface A as a generator with these settings, and B for a program.
fn interfaces(source: &str) -> String {
    format!("    A0: {{generator: {{{source}}}}}\n    B0: {{memif: {{}}}}\n")
}

/// Receives and drops the frames of interface B.
struct ChurnSink {
    shared: Arc<ChurnSinkState>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct ChurnSinkState {
    frames: AtomicU64,
    pause_ns: AtomicU64,
    up: AtomicBool,
    end: AtomicBool,
}

impl ChurnSink {
    fn start(node: &TemporaryNode, cpu: usize) -> Result<Self> {
        let socket = node.run_dir().join("externals/B0/memif.sock");
        let settings = MemifSettings {
            ring_log2: 14,
            buffer_bytes: 2048,
            headroom_bytes: 64,
            buffers: 3 << 14,
        };
        let mut client = MemifClient::new(&socket, 0, "sink", settings)?;
        let shared = Arc::new(ChurnSinkState::default());
        let for_thread = shared.clone();
        let thread = thread::spawn(move || {
            meter::pin(cpu);
            // With priority over everything else on its CPU:
            // it must find frames instead of waiting.
            let thread = rustix::thread::gettid().as_raw_nonzero().to_string();
            let _ = Command::new("chrt").args(["-f", "-p", "1", &thread]).output();
            absorb(&mut client, &for_thread);
        });
        let sink = Self { shared, thread: Some(thread) };
        eventually("the sink is connected", || sink.shared.up.load(Ordering::Relaxed));
        Ok(sink)
    }

    /// Frames so far, and the longest pause since the last call.
    fn counted(&self) -> (u64, Duration) {
        let pause_ns = self.shared.pause_ns.swap(0, Ordering::Relaxed);
        (self.shared.frames.load(Ordering::Relaxed), Duration::from_nanos(pause_ns))
    }
}

impl Drop for ChurnSink {
    fn drop(&mut self) {
        self.shared.end.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn absorb(client: &mut MemifClient, shared: &ChurnSinkState) {
    let (mut bufs, mut last) = (Vec::new(), Instant::now());
    while !shared.end.load(Ordering::Relaxed) {
        if client.link() != ConnectionState::Up {
            let up = client.poll() == ConnectionState::Up;
            shared.up.store(up, Ordering::Relaxed);
        }
        client.receive(&mut bufs, usize::MAX);
        if !bufs.is_empty() {
            let now = Instant::now();
            let pause_ns = now.duration_since(last).as_nanos() as u64;
            last = now;
            shared.pause_ns.fetch_max(pause_ns, Ordering::Relaxed);
            shared.frames.fetch_add(bufs.len() as u64, Ordering::Relaxed);
        }
        bufs.drain(..).for_each(|buf| client.free(buf));
        client.flush();
        thread::sleep(LOOK);
    }
}
