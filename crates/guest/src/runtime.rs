//! The loop of a forwarding guest: take frames, let the program decide, complete them in order.
//!
//! Each round takes up to [`Batch::FRAMES_MAX`] frames, no more than the ring has room to complete,
//! and completes all of them before the next. Nothing is allocated and no system call made for a
//! packet; a batch costs at most the doorbell of a sleeping mux. A guest without work looks for
//! some a bounded number of times and then sleeps until a doorbell or a descriptor of the program
//! wakes it, so that it can share a core with the mux. Where it has less than a core, it looks for no
//! more than that leaves room for ([`Thrift`]).
//!
//! When the mux is gone, the program keeps its state and [`Program::tend`] goes on; what is
//! received afterwards comes from a new mux.

use std::ops::RangeInclusive;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use pdp_memif::{Buf, Client, ClientError, Link, Patience, Settings, Thrift};
use pdp_wire::tag::{GuestDrop, Tag, Verdict};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::batch::{Batch, Extra, Frame, Outbox, write_tag};

/// Where the mux listens, unless said otherwise.
const MEMIF: &str = "/run/pdp/memif/memif.sock";

/// Frames since it last did so or slept from which on a guest that finds no more lets others on its CPU go first before
/// it looks: what they have waits, and its own gathers meanwhile. Alone it looks half a microsecond later.
const YIELD_FRAMES: u64 = 64;

/// A yield that took longer, nanoseconds, was to somebody who uses all of its time. Who sleeps is woken before that one's
/// time is over, so that is what the guest does after that, for [`YIELD_AGAIN_NS`].
const YIELD_NS_MAX: u64 = 1_000_000;

/// See [`YIELD_NS_MAX`], nanoseconds.
const YIELD_AGAIN_NS: u64 = 10_000_000;

/// Between two calls of [`Program::tend`] while frames come, and from a sleep in which no descriptor of
/// the program was ready to the next.
const TEND_INTERVAL: Duration = Duration::from_micros(200);

/// Batches between two looks at the clock, while frames come.
const CLOCK_BATCHES: u32 = 8;

/// Batches after which a sleeping mux is woken, while more frames are there: on a CPU that it shares
/// with the guest, waking it for each would cost two switches between them a batch.
const QUIET_BATCHES_MAX: u32 = 8;

/// Between two attempts to reach a mux that is not there.
const RECONNECT_INTERVAL: Duration = Duration::from_millis(20);

/// Between two looks at the control socket while frames come (a sleeper is woken by it).
const CONTROL_INTERVAL: Duration = Duration::from_millis(100);

/// The longest sleep; bounds what a signal that comes just before it can be late.
const SLEEP_MAX: Duration = Duration::from_secs(1);

/// The longest sleep while the ring to the mux is full, which rings once it has taken half of it.
const FULL_SLEEP: Duration = Duration::from_millis(1);

/// How long a guest rests that has looked for work as much as it may: as long as a part of the ring
/// ([`REST_RING`]) takes to fill, by the frames since its last rest, but no longer than this, nor than
/// the ring takes to fill at [`REST_PPS`]. The kernel's timers may add 50 µs.
const REST_MAX: Duration = Duration::from_micros(150);

/// Of the ring, what is to come during a rest: one in so many.
const REST_RING: u64 = 4;

/// Frames a second that the ring has room for during any rest; the first after a pause can't know.
const REST_PPS: u64 = 1_000_000;

/// Frames in each of the two rings, unless said otherwise.
const QUEUE_DEFAULT: u32 = 1024;

/// Buffers beside those that both rings hold: for a batch and its copies, and for frames that the
/// program keeps. As many as the rings have, in this range.
const BUFFERS_SPARE: RangeInclusive<u32> = 1024..=2048;

/// Of these, for a batch and its copies.
const BUFFERS_BATCH: u32 = 512;

/// The rings and buffers of a guest: frames of 1984 bytes, 4 KB for each of `queue`, and as much again
/// for the spare buffers, but 2 MB at least and 4 MB at most.
fn settings(queue: u32) -> Settings {
    let ring_log2 = queue.clamp(2, 1 << pdp_memif::RING_LOG2_MAX).ilog2() as u8;
    let rings = 2 << ring_log2;
    let buffers = rings + rings.clamp(*BUFFERS_SPARE.start(), *BUFFERS_SPARE.end());
    Settings { ring_log2, buffer_bytes: 2048, headroom_bytes: 64, buffers }
}

/// Frames that a program may keep.
fn kept_max(settings: &Settings) -> usize {
    (settings.buffers - (2 << settings.ring_log2) - BUFFERS_BATCH) as usize
}

/// A forwarding program.
pub trait Program {
    /// Decides on every frame of a batch.
    fn process(&mut self, batch: &mut Batch<'_>);

    /// Does what is to be done beside frames, a bounded piece at a time (up to some tens of
    /// microseconds): called when it is due, and a fifth of a millisecond at most after a descriptor
    /// of [`Program::wake_by`] is ready.
    fn tend(&mut self, _now: Instant, _outbox: &mut Outbox<'_>) -> Tended {
        Tended::Until(None)
    }

    /// Descriptors for which a sleeping guest is to wake, and what they are waited for.
    fn wake_by(&self) -> Vec<(BorrowedFd<'_>, PollFlags)> {
        Vec::new()
    }
}

/// What a program has left to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tended {
    /// More at once: call again after the next batch.
    More,
    /// Nothing, up to this time if there is one.
    Until(Option<Instant>),
}

/// Where a guest finds its mux.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct Guest {
    /// Socket of the mux [default: PDP_MEMIF of the environment, or /run/pdp/memif/memif.sock]
    #[arg(long)]
    pub memif: Option<PathBuf>,
    /// Frames in each of the two rings to and from the mux, a power of two up to 16384 [default:
    /// PDP_QUEUE of the environment, or 1024]
    #[arg(long)]
    pub queue: Option<u32>,
    /// File that says how many cores the guest may use, which is looked at again and again [default:
    /// PDP_QUOTA of the environment; without: one]
    #[arg(long)]
    pub quota: Option<PathBuf>,
}

/// The value of an environment variable, if it has one that can be read as that.
pub fn environment<T: std::str::FromStr>(name: &str) -> Option<T> {
    std::env::var(name).ok()?.parse().ok()
}

/// Why a guest can't run.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No memory for the rings.
    #[error("memif client for {}", path.display())]
    Memif {
        /// The socket.
        path: PathBuf,
        /// Why.
        source: ClientError,
    },
    /// Signals can't be waited for.
    #[error("signal handler")]
    Signal(#[source] std::io::Error),
    /// The system refused to wait.
    #[error("waiting for frames")]
    Wait(#[source] std::io::Error),
}

/// What a runtime has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Frames received, each of which was completed.
    pub received: u64,
    /// Copies sent beside frames.
    pub copies: u64,
    /// Copies for which there was no room.
    pub copies_refused: u64,
    /// Frames of the program's own.
    pub made: u64,
    /// Received frames that were no frame of a trunk, or longer than a buffer.
    pub unreadable: u64,
    /// Times the guest went to sleep.
    pub sleeps: u64,
    /// Of these, times that the mux rang.
    pub wakes: u64,
    /// Times it let others on its CPU go first.
    pub yields: u64,
    /// Connections to a mux.
    pub connections: u64,
}

/// When a guest that finds no more frames lets others on its CPU go first.
#[derive(Debug, Default)]
struct Courtesy {
    /// Frames received when it last did, or slept.
    seen: u64,
    /// When it may do so again, nanoseconds.
    again_ns: u64,
}

impl Courtesy {
    /// Whether it is to, with so many frames received so far.
    fn is_due(&mut self, received: u64, now_ns: impl FnOnce() -> u64) -> bool {
        if received - self.seen < YIELD_FRAMES {
            return false;
        }
        self.seen = received;
        now_ns() >= self.again_ns
    }

    /// The others had this time.
    fn yielded(&mut self, time_ns: std::ops::Range<u64>) {
        if time_ns.end - time_ns.start > YIELD_NS_MAX {
            self.again_ns = time_ns.end + YIELD_AGAIN_NS;
        }
    }
}

/// What ended a sleep.
struct Woken {
    /// The mux rang.
    bell: bool,
    /// The control socket or a descriptor of the program is ready.
    other: bool,
}

/// Runs one program on one trunk.
#[derive(Debug)]
pub struct Runtime<P> {
    program: P,
    client: Client,
    frames: Vec<Frame>,
    rest: Vec<Buf>,
    extras: Vec<Extra>,
    kept: usize,
    kept_max: usize,
    counters: Counters,
    tended: Tended,
    batches: u32,
    quiet_batches: u32,
    tend_at: Instant,
    control_at: Instant,
    /// The file that says how many cores it may use.
    quota: Option<PathBuf>,
    thrift: Thrift,
    /// Frames that are to come while it rests.
    rest_frames: u64,
    /// When it last did, nanoseconds since it began to run, and how many it had received.
    last_rest: (u64, u64),
}

/// CPU time of all threads, nanoseconds.
fn cpu_ns() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Runs a program on the trunk of `guest` until SIGTERM or SIGINT.
pub fn run<P: Program>(guest: &Guest, name: &str, program: P) -> Result<(), Error> {
    let stop = std::sync::Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGTERM, signal_hook::consts::SIGINT] {
        signal_hook::flag::register(signal, stop.clone()).map_err(Error::Signal)?;
    }
    let memif = guest.memif.clone().or_else(|| environment("PDP_MEMIF"));
    let memif = memif.unwrap_or_else(|| MEMIF.into());
    let queue = guest.queue.or_else(|| environment("PDP_QUEUE")).unwrap_or(QUEUE_DEFAULT);
    let mut runtime = Runtime::with_queue(&memif, name, queue, program)?;
    runtime.quota = guest.quota.clone().or_else(|| environment("PDP_QUOTA"));
    runtime.run(&stop)
}

impl<P: Program> Runtime<P> {
    /// A runtime for the mux at `memif`, which need not be there yet. The mux sees `name`.
    pub fn new(memif: &Path, name: &str, program: P) -> Result<Self, Error> {
        Self::with_queue(memif, name, QUEUE_DEFAULT, program)
    }

    /// As [`Runtime::new`], with rings of `queue` frames (the power of two below it).
    pub fn with_queue(memif: &Path, name: &str, queue: u32, program: P) -> Result<Self, Error> {
        let settings = settings(queue);
        let client = Client::new(memif, 0, name, settings)
            .map_err(|source| Error::Memif { path: memif.into(), source })?;
        let now = Instant::now();
        Ok(Self {
            program,
            client,
            frames: Vec::with_capacity(Batch::FRAMES_MAX),
            rest: Vec::new(),
            extras: Vec::with_capacity(1 << settings.ring_log2),
            kept: 0,
            kept_max: kept_max(&settings),
            counters: Counters::default(),
            tended: Tended::More,
            batches: 0,
            quiet_batches: 0,
            tend_at: now,
            control_at: now,
            quota: None,
            thrift: Thrift::default(),
            rest_frames: (1 << settings.ring_log2) / REST_RING,
            last_rest: (0, 0),
        })
    }

    /// The program.
    pub fn program(&self) -> &P {
        &self.program
    }

    /// The program, to change.
    pub fn program_mut(&mut self) -> &mut P {
        &mut self.program
    }

    /// What was done so far.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Works until `stop` is set (and a signal or a second has gone by, if it sleeps).
    pub fn run(&mut self, stop: &AtomicBool) -> Result<(), Error> {
        let (mut patience, start) = (Patience::default(), Instant::now());
        let mut courtesy = Courtesy { seen: self.counters.received, ..Courtesy::default() };
        let mut rested = false;
        while !stop.load(Ordering::Relaxed) {
            let work = self.round();
            let now_ns = || start.elapsed().as_nanos() as u64;
            rested &= !work;
            if !work && courtesy.is_due(self.counters.received, now_ns) {
                let before_ns = now_ns();
                rustix::thread::sched_yield();
                courtesy.yielded(before_ns..now_ns());
                self.counters.yields += 1;
                continue;
            }
            if !work && !rested && self.thrift.is_spent(now_ns(), cpu_ns) {
                self.rest(now_ns());
                patience.looked_away();
                rested = true;
            } else if patience.ends(work, || false, now_ns) || self.client.link() != Link::Up {
                self.sleep()?;
                patience.slept();
                courtesy.seen = self.counters.received;
            }
        }
        Ok(())
    }

    /// One batch, and what else is due. Returns whether there was work.
    pub fn round(&mut self) -> bool {
        let received = self.process();
        self.batches = self.batches.wrapping_add(1);
        if received && !self.batches.is_multiple_of(CLOCK_BATCHES) && self.tended != Tended::More {
            return true;
        }
        let now = Instant::now();
        if now >= self.control_at {
            self.look_after_link(now);
        }
        let due = match self.tended {
            Tended::More => true,
            Tended::Until(until) => now >= self.tend_at || until.is_some_and(|until| now >= until),
        };
        if due {
            // Not after what the program has to do beside frames.
            self.client.ring();
            let Self { client, kept, counters, .. } = self;
            self.tended = self.program.tend(now, &mut Outbox { client, kept, counters });
            self.client.flush();
            self.tend_at = now + TEND_INTERVAL;
            if received {
                // The kernel takes a quota away only where it looks at the clock: when the guest
                // calls it, or every 4 ms (HZ=250). Overdrawn by that much, a guest of a tenth of a
                // core would stand still for 40 ms at a time.
                rustix::thread::sched_yield();
            }
        }
        received || self.tended == Tended::More
    }

    fn look_after_link(&mut self, now: Instant) {
        let before = self.client.link();
        let after = self.client.poll();
        if after == Link::Up && before != Link::Up {
            self.counters.connections += 1;
        }
        let interval = if after == Link::Up { CONTROL_INTERVAL } else { RECONNECT_INTERVAL };
        self.control_at = now + interval;
        let words = self.quota.as_ref().and_then(|path| std::fs::read_to_string(path).ok());
        if let Some(cores) = words.and_then(|words| words.trim().parse().ok()) {
            self.thrift.allow(cores);
        }
    }

    fn process(&mut self) -> bool {
        // A frame that is taken must find room for its completion.
        let room = self.client.room();
        if self.receive(room.min(Batch::FRAMES_MAX)) == 0 {
            self.client.ring();
            return false;
        }
        let spare_slots = room - self.frames.len();
        let Self { client, frames, extras, kept, kept_max, counters, .. } = self;
        counters.received += frames.len() as u64;
        self.program.process(&mut Batch {
            client,
            frames,
            extras,
            spare_slots,
            kept,
            kept_max: *kept_max,
            counters,
        });
        self.complete();
        true
    }

    /// Takes up to `max` frames; returns how many.
    fn receive(&mut self, max: usize) -> usize {
        let Self { client, frames, rest, counters, .. } = self;
        let mut inside = false;
        let count = client.receive_each(max, |mut buf| {
            if inside {
                // The rest of a frame that is longer than a buffer: the first piece stands for it.
                inside = buf.continues();
                return rest.push(buf);
            }
            inside = buf.continues();
            let tag = Tag::parse(buf.metadata()).ok();
            let tag = tag.filter(|tag| tag.verdict == Verdict::Deliver);
            let (vport, trace) = tag.map_or((0, 0), |tag| (tag.vport, tag.trace));
            let mut verdict = Verdict::Drop(GuestDrop::Policy);
            if tag.is_none() || inside {
                counters.unreadable += 1;
                verdict = Verdict::Drop(GuestDrop::Malformed);
                buf.set_len(0);
            }
            frames.push(Frame { buf, vport, trace, verdict, to: vport });
        });
        rest.drain(..).for_each(|buf| client.free(buf));
        count
    }

    /// Sends all copies and completions, in order.
    fn complete(&mut self) {
        if self.extras.is_empty() {
            for frame in self.frames.drain(..) {
                send(&mut self.client, frame.completion());
            }
        } else {
            // Each frame's copies go before its completion; programs may have made them in any
            // order.
            self.extras.sort_by_key(|extra| extra.frame);
            let mut extras = self.extras.drain(..).peekable();
            for (index, frame) in self.frames.drain(..).enumerate() {
                while let Some(extra) = extras.next_if(|extra| extra.frame == index) {
                    send(&mut self.client, extra.buf);
                }
                send(&mut self.client, frame.completion());
            }
        }
        self.client.show();
        self.quiet_batches += 1;
        if self.quiet_batches >= QUIET_BATCHES_MAX {
            self.quiet_batches = 0;
            self.client.ring();
        }
    }

    /// Lets frames gather, without being woken for them.
    fn rest(&mut self, now_ns: u64) {
        let since = (now_ns - self.last_rest.0, self.counters.received - self.last_rest.1);
        self.last_rest = (now_ns, self.counters.received);
        let enough = self.rest_frames.saturating_mul(since.0) / since.1.max(1);
        let full = self.rest_frames * REST_RING * 1_000_000_000 / REST_PPS;
        let mut time = Duration::from_nanos(enough.min(full)).min(REST_MAX);
        if let Tended::Until(Some(until)) = self.tended {
            time = time.min(until.saturating_duration_since(Instant::now()));
        }
        std::thread::sleep(time);
    }

    /// Waits for frames, for a descriptor of the program, or for the next thing due.
    fn sleep(&mut self) -> Result<(), Error> {
        let now = Instant::now();
        let mut until = now + SLEEP_MAX;
        if let Tended::Until(Some(time)) = self.tended {
            until = until.min(time);
        }
        if self.client.link() != Link::Up {
            until = until.min(self.control_at);
        } else if self.client.room() == 0 {
            until = until.min(now + FULL_SLEEP);
            if !self.client.arm_for_room() {
                return Ok(());
            }
        } else if !self.client.arm() {
            return Ok(());
        }
        self.counters.sleeps += 1;
        let waited = self.wait(until.saturating_duration_since(now));
        self.client.disarm();
        let woken = waited?;
        self.counters.wakes += u64::from(woken.bell);
        // Frames need neither, and each look is a system call or more.
        let now = Instant::now();
        if woken.other {
            self.tended = Tended::More;
            self.control_at = self.control_at.min(now);
        } else {
            self.tend_at = now + TEND_INTERVAL;
        }
        Ok(())
    }

    fn wait(&self, time: Duration) -> Result<Woken, Error> {
        let mut fds = vec![PollFd::from_borrowed_fd(self.client.as_fd(), PollFlags::IN)];
        fds.extend(self.client.control().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        for (fd, flags) in self.program.wake_by() {
            fds.push(PollFd::from_borrowed_fd(fd, flags));
        }
        let time =
            Timespec { tv_sec: time.as_secs() as i64, tv_nsec: i64::from(time.subsec_nanos()) };
        match poll(&mut fds, Some(&time)) {
            Ok(_) => {
                let mut ready = fds.iter().map(|fd| !fd.revents().is_empty());
                Ok(Woken { bell: ready.next() == Some(true), other: ready.any(|ready| ready) })
            }
            Err(rustix::io::Errno::INTR) => Ok(Woken { bell: false, other: false }),
            Err(error) => Err(Error::Wait(error.into())),
        }
    }
}

impl Frame {
    /// What is sent for it.
    #[inline]
    fn completion(self) -> Buf {
        let Self { mut buf, trace, verdict, to, .. } = self;
        if matches!(verdict, Verdict::Drop(_) | Verdict::Kept) {
            buf.set_len(0);
        }
        write_tag(&mut buf, verdict, to, true, trace);
        buf
    }
}

/// Room was reckoned beforehand: sending fails only when the link just broke, and then nobody
/// waits for the frame.
#[inline]
fn send(client: &mut Client, buf: Buf) {
    if let Err(buf) = client.send(buf) {
        client.free(buf);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn others_go_first_after_many_frames_unless_they_kept_the_cpu() {
        let mut courtesy = Courtesy::default();
        // Frames since the last time, when, and whether it is time; what it took then.
        for (frames, now_ns, due, took_ns) in [
            (63, 0, false, 0),
            (64, 0, true, YIELD_NS_MAX),
            (64, 63, false, 0),
            (128, 70, true, YIELD_NS_MAX + 1),
            (256, YIELD_NS_MAX + 71 + YIELD_AGAIN_NS - 1, false, 0),
            // What came meanwhile is not counted twice.
            (319, u64::MAX / 2, false, 0),
            (320, YIELD_NS_MAX + 71 + YIELD_AGAIN_NS, true, 0),
        ] {
            assert_eq!(courtesy.is_due(frames, || now_ns), due, "{frames}");
            if due {
                courtesy.yielded(now_ns..now_ns + took_ns);
            }
        }
    }
}
