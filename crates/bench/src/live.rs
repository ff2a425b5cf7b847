//! A generator and a sink of frames inside the kernel, for measurements over veth
//! (`../net/bpf/measure.bpf.c`).
//!
//! The generator runs an XDP program with live frames (`BPF_F_TEST_XDP_LIVE_FRAMES`)
//! that sends them by a veth device. The device's peer must do NAPI: with an XDP
//! program, or with `gro on`. Without threaded NAPI the receiving end works on the
//! generator's CPU, in its time. Then a sender never sends more than the receiver
//! takes. The sink drops frames as early as the kernel can, on the sender's CPU.
//!
//! Frames are the numbered ones of a stream to one device ([`LoadGenerator::start`],
//! [`StreamSink`]), or those to many devices in turn ([`LoadGenerator::start_for_many`],
//! [`Sinks`]).
//!
//! Limits: [`DESTINATIONS_MAX`]; [`DEVICES_MAX`]; IPv4 and UDP; for a stream one receive queue.
//! Source: Linux Documentation/bpf/bpf_prog_run.rst; RFC 4737 (late frames).

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use libbpf_rs::{
    Link, MapCore, MapFlags, MapHandle, Object, ObjectBuilder, ProgramInput, ProgramMut,
};
use pdp_net::interface::InterfaceInfo;
use pdp_net::netns::within;
use pdp_testbed::meter::{self, Clock, ProcessCycles};
use pdp_wire::{ether, ipv4};

use crate::stream::{FrameStream, HEADERS_BYTES};

/// Destinations of one stream.
pub const DESTINATIONS_MAX: usize = 1 << 20;

/// Most devices of one generator.
pub const DEVICES_MAX: usize = 1024;

/// Headers of a frame: Ethernet, IPv4 and UDP.
pub const PLAIN_BYTES: usize = HEADERS_BYTES;
/// Headers of a tunnelled frame: [`PLAIN_BYTES`] twice, and VXLAN.
pub const TUNNELLED_BYTES: usize = 2 * HEADERS_BYTES + 8;

/// `struct device`, and its words before the headers.
const DEVICE_BYTES: usize = 112;

const OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/measure.bpf.o"));

/// BPF_F_TEST_XDP_LIVE_FRAMES of include/uapi/linux/bpf.h.
const LIVE_FRAMES: u32 = 1 << 1;

/// Size of `struct xdp_md` of include/uapi/linux/bpf.h, and the offset of `data_end` in it.
const XDP_MD_BYTES: usize = 24;
const XDP_MD_DATA_END: usize = 4;

/// Approximate time of one call to the kernel. Each call makes a pool of pages that exists for a
/// second or longer. With thousands of pools, calls take long and finally fail.
const CALL: Duration = Duration::from_millis(10);

/// Frames of the first call, and the fewest of later ones.
const CALL_FRAMES: u32 = 8192;

/// Most frames of a call.
const CALL_FRAMES_MAX: u32 = 1 << 20;

/// Frames of one call between pauses: at most half of a veth's ring.
const BURST_MAX: u32 = 128;

/// Time after which sent frames have arrived or are lost.
const SETTLE_MAX: Duration = Duration::from_secs(5);

/// Pause of a generator that is ahead of its rate.
const PAUSE: Duration = Duration::from_micros(50);

/// Indices in the map of counters.
const MADE: u32 = 0;
const CAME: u32 = 1;

/// Bytes of the number behind the headers.
const NUMBER_BYTES: usize = 8;

/// Load offered by a generator.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Load {
    /// As many frames as possible.
    Most,
    /// This many frames per second, evenly spaced; the generator keeps its CPU busy in between.
    Even(f64),
    /// This many frames per second, in bursts; in between the CPU is free for others. Up to about
    /// 0.2 million: each burst takes a call to the kernel, and see `CALL`.
    Bursts(f64),
}

/// Destination of some of a generator's frames.
#[derive(Clone, Debug)]
pub struct Aim {
    /// Index of a device of the generator's namespace.
    pub device: u32,
    /// If set, the device is the root end of this port of PdP.
    /// The port's program directs the frame to the inner end.
    pub port: Option<u32>,
    /// All headers of a frame, [`PLAIN_BYTES`] or [`TUNNELLED_BYTES`].
    pub headers: Vec<u8>,
}

impl Aim {
    /// Encodes `struct device` of the program. `sum` covers the IPv4 header's words except
    /// destination and checksum.
    fn value(&self, sum: u32) -> Result<Vec<u8>> {
        let is_tunnelled = self.headers.len() == TUNNELLED_BYTES;
        ensure!(is_tunnelled || self.headers.len() == PLAIN_BYTES, "headers of another length");
        let note = self.port.map_or(0, |port| port + 1);
        let mut value =
            [self.device, note, is_tunnelled.into(), sum].map(u32::to_ne_bytes).concat();
        value.extend(&self.headers);
        value.resize(DEVICE_BYTES, 0);
        Ok(value)
    }
}

/// `struct settings` of the program.
#[derive(Clone, Copy, Debug, Default)]
struct GeneratorSettings {
    devices: u32,
    shift: u32,
    pps: u64,
    destinations: u32,
    is_numbered: bool,
}

impl GeneratorSettings {
    fn set(self, object: &Object) -> Result<()> {
        let mut value = [self.devices, self.shift].map(u32::to_ne_bytes).concat();
        value.extend([self.pps, 0, 0].map(u64::to_ne_bytes).concat());
        value.extend([self.destinations, self.is_numbered.into()].map(u32::to_ne_bytes).concat());
        Ok(map(object, "settings")?.update(&[0; 4], &value, MapFlags::ANY)?)
    }
}

/// Result of a generator's load.
#[derive(Clone, Copy, Debug)]
pub struct SentFrames {
    /// Frames made.
    pub frames: u64,
    /// Duration.
    pub seconds: f64,
    /// Cycles used, including those of the receiving end's NAPI unless it is threaded.
    pub cycles: ProcessCycles,
}

enum GeneratorTask {
    Aim { aims: Vec<Aim>, shift: u32, bytes: usize, reply: mpsc::Sender<Result<()>> },
    Send { load: Load, time: Duration, clock: Clock, reply: mpsc::Sender<Result<SentFrames>> },
}

/// Generator in its own thread. Ends when dropped.
#[derive(Debug)]
pub struct LoadGenerator {
    tasks: mpsc::Sender<GeneratorTask>,
    thread: u32,
}

impl LoadGenerator {
    /// Starts it in a network namespace, sending by one of its devices, on one CPU.
    pub fn start(netns: &str, device: &str, cpu: usize, stream: &FrameStream) -> Result<Self> {
        let (stream, device) = (stream.clone(), device.to_owned());
        let start = move || Loaded::of_stream(&device, &stream);
        Self::start_with(named(netns)?, cpu, start)
    }

    /// Starts it in a network namespace, on one CPU; see [`LoadGenerator::aim`].
    pub fn start_for_many(netns: OwnedFd, cpu: usize) -> Result<Self> {
        Self::start_with(netns, cpu, || Loaded::new(GeneratorSettings::default()))
    }

    fn start_with(
        netns: OwnedFd,
        cpu: usize,
        start: impl FnOnce() -> Result<Loaded> + Send + 'static,
    ) -> Result<Self> {
        let (tasks, receive) = mpsc::channel();
        let (reply, result) = mpsc::channel();
        in_netns(netns, move || {
            meter::pin(cpu);
            match start() {
                Ok(mut loaded) => {
                    let _ = reply.send(Ok(thread_id()));
                    loaded.serve(&receive);
                }
                Err(error) => drop(reply.send(Err(error))),
            }
        });
        let thread = result.recv().context("the generator ended")??;
        Ok(Self { tasks, thread })
    }

    /// Thread, whose CPU time includes the interrupts that it handles.
    pub fn thread(&self) -> u32 {
        self.thread
    }

    /// Sends frames of `bytes` bytes to these destinations
    /// from now on, `1 << shift` to each in turn.
    pub fn aim(&self, aims: Vec<Aim>, shift: u32, bytes: usize) -> Result<()> {
        let (reply, result) = mpsc::channel();
        self.tasks
            .send(GeneratorTask::Aim { aims, shift, bytes, reply })
            .ok()
            .context("it ended")?;
        result.recv().context("the generator ended")?
    }

    /// Offers a load for `time`.
    pub fn send(&self, load: Load, time: Duration, clock: &Clock) -> Result<SentFrames> {
        let (reply, result) = mpsc::channel();
        let task = GeneratorTask::Send { load, time, clock: clock.clone(), reply };
        self.tasks.send(task).ok().context("the generator ended")?;
        result.recv().context("the generator ended")?
    }
}

/// The generator's program, ready to run.
struct Loaded {
    object: Object,
    /// Attached to an interface without traffic. The kernel puts unattached programs into its
    /// dispatcher on each call, which takes tens of milliseconds.
    _link: Link,
    settings: GeneratorSettings,
    frame: Vec<u8>,
}

impl Loaded {
    fn new(settings: GeneratorSettings) -> Result<Self> {
        let object = load()?;
        let lo = i32::try_from(InterfaceInfo::by_name("lo")?.index)?;
        let link = program(&object, "generate")?.attach_xdp(lo)?;
        Ok(Self { object, _link: link, settings, frame: Vec::new() })
    }

    fn of_stream(device: &str, stream: &FrameStream) -> Result<Self> {
        let count = stream.destinations.len();
        ensure!(count.is_power_of_two() && count <= DESTINATIONS_MAX, "{count} destinations");
        let destinations = count as u32;
        let mut this = Self::new(GeneratorSettings {
            destinations,
            is_numbered: true,
            ..GeneratorSettings::default()
        })?;
        let map = map(&this.object, "destinations")?;
        for (at, destination) in (0u32..).zip(&stream.destinations) {
            map.update(&at.to_ne_bytes(), destination, MapFlags::ANY)?;
        }
        let headers = stream.headers()?.to_vec();
        let device = InterfaceInfo::by_name(device)?.index;
        this.aim(&[Aim { device, port: None, headers }], 0, stream.bytes)?;
        Ok(this)
    }

    fn aim(&mut self, aims: &[Aim], shift: u32, bytes: usize) -> Result<()> {
        ensure!(!aims.is_empty() && aims.len() <= DEVICES_MAX, "{} devices", aims.len());
        let devices = map(&self.object, "devices")?;
        for (at, aim) in (0u32..).zip(aims) {
            ensure!(aim.headers.len() + NUMBER_BYTES <= bytes, "frames of {bytes} bytes");
            let ip = &aim.headers[ether::HEADER_BYTES..][..ipv4::HEADER_BYTES];
            let words = ip.chunks_exact(2);
            let sum = words.map(|pair| u32::from(u16::from_ne_bytes([pair[0], pair[1]]))).sum();
            devices.update(&at.to_ne_bytes(), &aim.value(sum)?, MapFlags::ANY)?;
        }
        (self.settings.devices, self.settings.shift) = (aims.len() as u32, shift);
        self.frame = vec![0; bytes];
        Ok(())
    }

    fn serve(&mut self, tasks: &mpsc::Receiver<GeneratorTask>) {
        let thread = thread_id();
        for task in tasks {
            // If the program ends, nobody waits for the answer.
            match task {
                GeneratorTask::Aim { aims, shift, bytes, reply } => {
                    let _ = reply.send(self.aim(&aims, shift, bytes));
                }
                GeneratorTask::Send { load, time, clock, reply } => {
                    let meter = clock.start(&[thread], true);
                    let sent = self.generate(load, time);
                    let cycles = clock.stop(meter);
                    let sent = sent.map(|(frames, seconds)| SentFrames { frames, seconds, cycles });
                    let _ = reply.send(sent);
                }
            }
        }
    }

    fn generate(&self, load: Load, time: Duration) -> Result<(u64, f64)> {
        let pps = if let Load::Even(pps) = load { pps as u64 } else { 0 };
        GeneratorSettings { pps, ..self.settings }.set(&self.object)?;
        let counters = map(&self.object, "counters")?;
        let before = total(&counters, MADE)?;
        let start = Instant::now();
        match load {
            Load::Bursts(pps) => self.bursts(pps, time)?,
            Load::Most | Load::Even(_) => self.without_pause(time)?,
        }
        let seconds = start.elapsed().as_secs_f64();
        Ok((total(&counters, MADE)? - before, seconds))
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

/// Frames received by a sink since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SinkCounters {
    /// Number of frames.
    pub received: u64,
    /// Frames of these whose number was lower than an earlier one's.
    pub reordered: u64,
}

/// Sink of a stream. Ends when dropped.
#[derive(Debug)]
pub struct StreamSink {
    counters: MapHandle,
    order: MapHandle,
    _end: mpsc::Sender<()>,
}

impl StreamSink {
    /// Starts it at a device of a network namespace.
    pub fn start(netns: &str, device: &str) -> Result<Self> {
        let (reply, result) = mpsc::channel::<Result<[MapHandle; 2]>>();
        let (end, ended) = mpsc::channel::<()>();
        let device = device.to_owned();
        in_netns(named(netns)?, move || {
            let attached = (|| -> Result<_> {
                let mut sinks = Sinks::new(true)?;
                sinks.attach(InterfaceInfo::by_name(&device)?.index)?;
                let maps = [map(&sinks.object, "counters")?, map(&sinks.object, "order")?];
                Ok((maps, sinks))
            })();
            match attached {
                Ok((maps, _sinks)) => {
                    let _ = reply.send(Ok(maps));
                    // Until the other end is dropped.
                    let _ = ended.recv();
                }
                Err(error) => drop(reply.send(Err(error))),
            }
        });
        let [counters, order] = result.recv().context("the sink ended")??;
        Ok(Self { counters, order, _end: end })
    }

    /// Frames received.
    pub fn counters(&self) -> Result<SinkCounters> {
        let order = self.order.lookup(&[0; 4], MapFlags::ANY)?.context("no counters")?;
        Ok(SinkCounters { received: total(&self.counters, CAME)?, reordered: word(&order) })
    }

    /// Frames received, after `quiet` without further ones.
    pub fn settled(&self, quiet: Duration) -> Result<SinkCounters> {
        let (mut last, end) = (self.counters()?, Instant::now() + SETTLE_MAX);
        while Instant::now() < end {
            thread::sleep(quiet);
            let now = self.counters()?;
            if now == last {
                return Ok(now);
            }
            last = now;
        }
        bail!("frames still arrived {SETTLE_MAX:?} after the last was sent")
    }
}

/// Sinks at many devices. Attached ones end when this is dropped.
#[derive(Debug)]
pub struct Sinks {
    object: Object,
    links: Vec<Link>,
}

impl Sinks {
    /// Makes an empty set. With `numbered` it counts late frames of a stream.
    pub fn new(numbered: bool) -> Result<Self> {
        let object = load()?;
        GeneratorSettings { is_numbered: numbered, ..GeneratorSettings::default() }.set(&object)?;
        Ok(Self { object, links: Vec::new() })
    }

    /// Attaches a sink to a device of the caller's network namespace.
    pub fn attach(&mut self, device: u32) -> Result<()> {
        let link = program(&self.object, "sink")?.attach_xdp(i32::try_from(device)?)?;
        self.links.push(link);
        Ok(())
    }

    /// Replaces the program at the device of a pinned link.
    pub fn replace(&self, pin: &Path) -> Result<()> {
        let mut link = Link::open(pin).with_context(|| pin.display().to_string())?;
        let program = program(&self.object, "sink")?;
        Ok(link.update_prog(&program)?)
    }

    /// Frames received by all of them.
    pub fn received(&self) -> Result<u64> {
        total(&map(&self.object, "counters")?, CAME)
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

/// Sum over all CPUs.
fn total(map: &MapHandle, at: u32) -> Result<u64> {
    let by_cpu = map.lookup_percpu(&at.to_ne_bytes(), MapFlags::ANY)?.context("no counters")?;
    Ok(by_cpu.iter().map(|bytes| word(bytes)).sum())
}

/// Returns the first word.
fn word(bytes: &[u8]) -> u64 {
    bytes.first_chunk().map_or(0, |bytes| u64::from_ne_bytes(*bytes))
}

/// Opens a network namespace by its name in ip-netns(8).
fn named(netns: &str) -> Result<OwnedFd> {
    let path = format!("/run/netns/{netns}");
    Ok(File::open(&path).context(path)?.into())
}

/// Runs `work` in a new thread inside a network namespace.
fn in_netns(netns: OwnedFd, work: impl FnOnce() + Send + 'static) {
    thread::spawn(move || {
        let entered = within(netns.as_fd(), || {
            work();
            Ok(())
        });
        if let Err(error) = entered {
            eprintln!("{error}");
        }
    });
}

/// Number of this thread.
fn thread_id() -> u32 {
    // `/proc/thread-self` is PID/task/TID.
    let link = std::fs::read_link("/proc/thread-self").unwrap_or_default();
    let number = link.file_name().and_then(|name| name.to_str()?.parse().ok());
    number.unwrap_or_else(std::process::id)
}
