//! A generator and a sink of numbered frames inside the kernel, for measurements over veth
//! (`bpf/live.bpf.c`).
//!
//! The generator runs an XDP program with live frames (`BPF_F_TEST_XDP_LIVE_FRAMES`) that sends
//! them by a veth device, whose peer must do NAPI: with an XDP program, or with `gro on`. Without
//! threaded NAPI the receiving end works on the generator's CPU, in its time: then a sender never
//! sends more than the receiver takes. The sink drops what comes as early as the kernel can, on the
//! CPU of who sent it.
//!
//! Limits: [`DESTINATIONS_MAX`]; IPv4 and UDP; one receive queue.
//! Source: Linux Documentation/bpf/bpf_prog_run.rst; RFC 4737 (late frames).

use std::fs::File;
use std::os::fd::AsFd;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use libbpf_rs::{
    Link, MapCore, MapFlags, MapHandle, Object, ObjectBuilder, ProgramInput, ProgramMut,
};
use pdp_e2e::meter::{self, Clock, Cycles};
use pdp_net::interface::Interface;
use pdp_net::netns::within;
use pdp_wire::{ether, ipv4};

use crate::stream::Stream;

/// Destinations of one stream.
pub const DESTINATIONS_MAX: usize = 1 << 20;

const OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/live.bpf.o"));

/// BPF_F_TEST_XDP_LIVE_FRAMES of include/uapi/linux/bpf.h.
const LIVE_FRAMES: u32 = 1 << 1;

/// Size of `struct xdp_md` of include/uapi/linux/bpf.h, and where the frame's end is in it.
const XDP_MD_BYTES: usize = 24;
const XDP_MD_DATA_END: usize = 4;

/// Time of one call to the kernel, about. Each makes a pool of pages that is there for a second or
/// longer; when there are thousands of them, calls take long, and in the end fail.
const CALL: Duration = Duration::from_millis(10);

/// Frames of the first call, and the least of those after it.
const CALL_FRAMES: u32 = 8192;

/// The most of a call.
const CALL_FRAMES_MAX: u32 = 1 << 20;

/// Frames of one call between pauses: no more than half of what a veth's ring holds.
const BURST_MAX: u32 = 128;

/// Frames that were sent arrive, or are lost, within this time.
const SETTLE_MAX: Duration = Duration::from_secs(5);

/// Pause of a generator that is ahead of its rate.
const PAUSE: Duration = Duration::from_micros(50);

/// What a generator offers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Load {
    /// As many frames as go.
    Most,
    /// So many frames a second, one after the other; in between it keeps its CPU busy.
    Even(f64),
    /// So many frames a second, some at once, and between them the CPU is free for others. Up to
    /// about 0.2 million: it takes a call to the kernel each time, and see `CALL`.
    Bursts(f64),
}

/// A stream as `struct settings` of the program.
fn settings(stream: &Stream, ifindex: u32) -> Result<Vec<u8>> {
    let count = stream.destinations.len();
    ensure!(count.is_power_of_two() && count <= DESTINATIONS_MAX, "{count} destinations");
    let headers = stream.headers()?;
    let ip = &headers[ether::HEADER_BYTES..][..ipv4::HEADER_BYTES];
    let sum: u32 =
        ip.chunks_exact(2).map(|pair| u32::from(u16::from_ne_bytes([pair[0], pair[1]]))).sum();
    let mut settings = Vec::new();
    for word in [ifindex, count as u32 - 1, sum] {
        settings.extend(word.to_ne_bytes());
    }
    settings.extend(headers);
    settings.extend([0; 2]);
    Ok(settings)
}

/// What a generator did.
#[derive(Clone, Copy, Debug)]
pub struct Sent {
    /// Frames that it made.
    pub frames: u64,
    /// In this time.
    pub seconds: f64,
    /// With these cycles; those of the receiving end's NAPI are among them unless it is threaded.
    pub cycles: Cycles,
}

struct Task {
    load: Load,
    time: Duration,
    clock: Clock,
    tell: mpsc::Sender<Result<Sent>>,
}

/// A generator, in a thread of its own. Ends when dropped.
#[derive(Debug)]
pub struct Generator {
    tasks: mpsc::Sender<Task>,
}

impl Generator {
    /// In a network namespace, sending by one of its devices, working on one CPU.
    pub fn start(netns: &str, device: &str, cpu: usize, stream: &Stream) -> Result<Self> {
        let (tasks, receive) = mpsc::channel();
        let (tell, told) = mpsc::channel();
        let (stream, device) = (stream.clone(), device.to_owned());
        in_netns(netns, move || {
            meter::pin(cpu);
            let loaded = Loaded::new(&device, &stream);
            let _ = tell.send(loaded.as_ref().map(|_| ()).map_err(|error| anyhow!("{error:#}")));
            if let Ok(loaded) = loaded {
                loaded.serve(&receive);
            }
        })?;
        told.recv().context("the generator ended")??;
        Ok(Self { tasks })
    }

    /// Offers a load for some time.
    pub fn send(&self, load: Load, time: Duration, clock: &Clock) -> Result<Sent> {
        let (tell, told) = mpsc::channel();
        let task = Task { load, time, clock: clock.clone(), tell };
        self.tasks.send(task).ok().context("the generator ended")?;
        told.recv().context("the generator ended")?
    }
}

/// The generator's program, ready to run.
struct Loaded {
    object: Object,
    /// At an interface that nothing arrives at: programs that are attached nowhere are put into the
    /// kernel's dispatcher by each call to run them, which takes tens of milliseconds.
    _link: Link,
    frame: Vec<u8>,
}

impl Loaded {
    fn new(device: &str, stream: &Stream) -> Result<Self> {
        let ifindex = Interface::by_name(device)?.index;
        let object = load()?;
        let map = |name| map(&object, name);
        map("settings")?.update(&[0; 4], &settings(stream, ifindex)?, MapFlags::ANY)?;
        let destinations = map("destinations")?;
        for (at, destination) in (0u32..).zip(&stream.destinations) {
            destinations.update(&at.to_ne_bytes(), destination, MapFlags::ANY)?;
        }
        let lo = i32::try_from(Interface::by_name("lo")?.index)?;
        let link = program(&object, "generate")?.attach_xdp(lo)?;
        Ok(Self { object, _link: link, frame: vec![0; stream.bytes] })
    }

    fn serve(&self, tasks: &mpsc::Receiver<Task>) {
        let thread = thread_id();
        for task in tasks {
            let meter = task.clock.start(&[thread], true);
            let sent = self.generate(&task);
            let cycles = task.clock.stop(meter);
            // Nobody waits any more if the program ends.
            let sent = sent.map(|(frames, seconds)| Sent { frames, seconds, cycles });
            let _ = task.tell.send(sent);
        }
    }

    fn generate(&self, task: &Task) -> Result<(u64, f64)> {
        let pps = if let Load::Even(pps) = task.load { pps as u64 } else { 0 };
        let pace = [pps, 0, 0].map(u64::to_ne_bytes).concat();
        map(&self.object, "pace")?.update(&[0; 4], &pace, MapFlags::ANY)?;
        let before = counters(&map(&self.object, "counters")?)?.made;
        let start = Instant::now();
        match task.load {
            Load::Bursts(pps) => self.bursts(pps, task.time)?,
            Load::Most | Load::Even(_) => self.without_pause(task.time)?,
        }
        let seconds = start.elapsed().as_secs_f64();
        let made = counters(&map(&self.object, "counters")?)?.made;
        Ok((made - before, seconds))
    }

    fn without_pause(&self, time: Duration) -> Result<()> {
        let (start, mut frames) = (Instant::now(), CALL_FRAMES);
        while start.elapsed() < time {
            let called = Instant::now();
            self.call(frames)?;
            let times = CALL.as_secs_f64() / called.elapsed().as_secs_f64().max(1e-6);
            frames = ((f64::from(frames) * times) as u32).clamp(CALL_FRAMES, CALL_FRAMES_MAX);
        }
        Ok(())
    }

    fn bursts(&self, pps: f64, time: Duration) -> Result<()> {
        let (start, mut asked) = (Instant::now(), 0.0);
        while start.elapsed() < time {
            let due = (pps * start.elapsed().as_secs_f64() - asked) as u32;
            if due == 0 {
                thread::sleep(PAUSE);
                continue;
            }
            let burst = due.min(BURST_MAX);
            self.call(burst)?;
            asked += f64::from(burst);
        }
        Ok(())
    }

    fn call(&self, frames: u32) -> Result<()> {
        let mut context = [0; XDP_MD_BYTES];
        let end = (self.frame.len() as u32).to_ne_bytes();
        context[XDP_MD_DATA_END..XDP_MD_DATA_END + 4].copy_from_slice(&end);
        let input = ProgramInput {
            context_in: Some(&mut context),
            data_in: Some(&self.frame),
            flags: LIVE_FRAMES,
            repeat: frames,
            ..Default::default()
        };
        program(&self.object, "generate")?.test_run(input).context("test run")?;
        Ok(())
    }
}

/// What came to a sink since it was started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Frames that a generator made.
    made: u64,
    /// Frames.
    pub came: u64,
    /// Of these: with a number lower than one that had come before.
    pub late: u64,
}

/// A sink. Ends when dropped.
#[derive(Debug)]
pub struct Sink {
    counters: MapHandle,
    _end: mpsc::Sender<()>,
}

impl Sink {
    /// At a device of a network namespace.
    pub fn start(netns: &str, device: &str) -> Result<Self> {
        let (tell, told) = mpsc::channel::<Result<MapHandle>>();
        let (end, ended) = mpsc::channel::<()>();
        let device = device.to_owned();
        in_netns(netns, move || {
            let attached = (|| -> Result<_> {
                let index = i32::try_from(Interface::by_name(&device)?.index)?;
                let object = load()?;
                let link = program(&object, "sink")?.attach_xdp(index)?;
                Ok((map(&object, "counters")?, link))
            })();
            match attached {
                Ok((counters, _link)) => {
                    let _ = tell.send(Ok(counters));
                    // Until the other end is dropped.
                    let _ = ended.recv();
                }
                Err(error) => drop(tell.send(Err(error))),
            }
        })?;
        let counters = told.recv().context("the sink ended")??;
        Ok(Self { counters, _end: end })
    }

    /// What came.
    pub fn counters(&self) -> Result<Counters> {
        counters(&self.counters)
    }

    /// What came, once nothing has come for `quiet`.
    pub fn settled(&self, quiet: Duration) -> Result<Counters> {
        let (mut last, end) = (self.counters()?, Instant::now() + SETTLE_MAX);
        while Instant::now() < end {
            thread::sleep(quiet);
            let now = self.counters()?;
            if now == last {
                return Ok(now);
            }
            last = now;
        }
        bail!("frames still came {SETTLE_MAX:?} after the last was sent")
    }

    /// Starts numbers anew, as the next generator does.
    pub fn reset(&self) -> Result<()> {
        Ok(self.counters.update(&[0; 4], &[0; 32], MapFlags::ANY)?)
    }
}

fn load() -> Result<Object> {
    libbpf_rs::set_print(None);
    Ok(ObjectBuilder::default().open_memory(OBJECT)?.load()?)
}

fn program<'a>(object: &'a Object, name: &str) -> Result<ProgramMut<'a>> {
    let program = object.progs_mut().find(|program| program.name() == name);
    program.with_context(|| format!("no program {name}"))
}

fn map(object: &Object, name: &str) -> Result<MapHandle> {
    let map = object.maps().find(|map| map.name() == name);
    Ok(MapHandle::try_from(&map.with_context(|| format!("no map {name}"))?)?)
}

fn counters(map: &MapHandle) -> Result<Counters> {
    let bytes = map.lookup(&[0; 4], MapFlags::ANY)?.context("no counters")?;
    let mut words = bytes
        .chunks_exact(8)
        .map(|word| word.first_chunk().map_or(0, |bytes| u64::from_ne_bytes(*bytes)));
    let mut next = || words.next().unwrap_or(0);
    Ok(Counters { made: next(), came: next(), late: next() })
}

/// Does something in a thread of its own inside a network namespace.
fn in_netns(netns: &str, work: impl FnOnce() + Send + 'static) -> Result<()> {
    let path = format!("/run/netns/{netns}");
    let file = File::open(&path).context(path)?;
    thread::spawn(move || {
        let entered = within(file.as_fd(), || {
            work();
            Ok(())
        });
        if let Err(error) = entered {
            eprintln!("{error}");
        }
    });
    Ok(())
}

/// Number of this thread.
fn thread_id() -> u32 {
    // `/proc/thread-self` is PID/task/TID.
    let link = std::fs::read_link("/proc/thread-self").unwrap_or_default();
    let number = link.file_name().and_then(|name| name.to_str()?.parse().ok());
    number.unwrap_or_else(std::process::id)
}
