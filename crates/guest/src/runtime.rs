//! Loop of a forwarding guest: take frames, let the program decide, complete them in order.
//!
//! Each round takes up to [`Batch::FRAMES_MAX`] frames, at most as many as the ring has room to
//! complete, and completes all of them before the next round. A packet costs no allocation and no
//! system call. A batch costs at most the doorbell of a sleeping mux.
//!
//! A guest without work looks for some for a bounded time. Then it sleeps until a doorbell or a
//! descriptor of the program wakes it, so that it can share a core with the mux. With less than a
//! core, it looks only as much as its quota permits ([`Thrift`]).
//!
//! When the mux is gone, the program keeps its state, and [`ForwardingProgram::poll`] is still
//! called. Frames received afterwards come from a new mux.

use std::ops::RangeInclusive;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use pdp_memif::{Buf, ClientError, ConnectionState, MemifClient, MemifSettings, Patience, Thrift};
use pdp_wire::tag::{GuestDrop, Tag, TagVerdict};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::batch::{Batch, Extra, Outbox, TrunkFrame, write_tag};
use crate::counters::RuntimeCounters;

/// Default socket of the mux.
const MEMIF: &str = "/run/pdp/memif/memif.sock";

/// A guest that received this many frames since its last yield or sleep and finds no more yields
/// its CPU before it looks again. Other threads' work has waited, and its own accumulates
/// meanwhile. A guest that is alone on its CPU looks half a microsecond later.
const YIELD_FRAMES: u64 = 64;

/// If a yield takes longer than this, nanoseconds, the other thread uses its
/// whole time slice. A sleeping thread wakes before that slice is over.
/// Therefore the guest sleeps instead of yielding for [`YIELD_AGAIN_NS`].
const YIELD_NS_MAX: u64 = 1_000_000;

/// Time without yields after a long one, nanoseconds: see [`YIELD_NS_MAX`].
const YIELD_AGAIN_NS: u64 = 10_000_000;

/// Time between two calls of [`ForwardingProgram::poll`] while frames come, and after a sleep in
/// which no descriptor of the program was ready.
const POLL_INTERVAL: Duration = Duration::from_micros(200);

/// Batches between two readings of the clock, while frames come.
const CLOCK_BATCHES: u32 = 8;

/// Batches after which a sleeping mux is woken although more frames wait. On a shared CPU, waking
/// it for each batch would cost two context switches per batch.
const QUIET_BATCHES_MAX: u32 = 8;

/// Time between two attempts to reach an absent mux.
const RECONNECT_INTERVAL: Duration = Duration::from_millis(20);

/// Time between two checks of the control socket while frames come. It also wakes a sleeping guest.
const CONTROL_INTERVAL: Duration = Duration::from_millis(100);

/// Longest sleep. It bounds the delay of a signal that arrives just before it.
const SLEEP_MAX: Duration = Duration::from_secs(1);

/// Longest sleep while the ring to the mux is full. The mux rings once it has taken half of it.
const FULL_SLEEP: Duration = Duration::from_millis(1);

/// Longest pause of a guest that has used up its time for looking. The pause lasts until a part of
/// the ring ([`PAUSE_RING`]) fills, at the rate since the last pause. It never exceeds the time in
/// which the ring fills at [`PAUSE_PPS`]. The kernel's timers may add 50 µs.
const PAUSE_MAX: Duration = Duration::from_micros(150);

/// Fraction of the ring that may fill during a pause: one in this many.
const PAUSE_RING: u64 = 4;

/// Frame rate, per second, that never overflows the ring
/// during a pause. The first pause has no measured rate.
const PAUSE_PPS: u64 = 1_000_000;

/// Default number of frames in each of the two rings.
const QUEUE_DEFAULT: u32 = 1024;

/// Buffers in addition to those of both rings: for a batch and its copies, and for kept frames. As
/// many as the rings have, within this range.
const BUFFERS_SPARE: RangeInclusive<u32> = 1024..=2048;

/// Buffers of these for a batch and its copies.
const BUFFERS_BATCH: u32 = 512;

/// Sizes of a guest's rings and buffers. Frames have 1984 bytes. Each of the `queue` frames takes 4
/// KB, and the spare buffers as much again, but from 2 MB to 4 MB.
fn settings(queue: u32) -> MemifSettings {
    let ring_log2 = queue.clamp(2, 1 << pdp_memif::RING_LOG2_MAX).ilog2() as u8;
    let rings = 2 << ring_log2;
    let buffers = rings + rings.clamp(*BUFFERS_SPARE.start(), *BUFFERS_SPARE.end());
    MemifSettings { ring_log2, buffer_bytes: 2048, headroom_bytes: 64, buffers }
}

/// Most frames that a program may keep.
fn kept_max(settings: &MemifSettings) -> usize {
    (settings.buffers - (2 << settings.ring_log2) - BUFFERS_BATCH) as usize
}

/// A forwarding program.
pub trait ForwardingProgram {
    /// Decides on every frame of a batch.
    fn process(&mut self, batch: &mut Batch<'_>);

    /// Does work besides frames, in bounded pieces of up to some tens of
    /// microseconds. It is called when due, and at most a fifth of a
    /// millisecond after a descriptor of [`ForwardingProgram::wake_by`] is ready.
    fn poll(&mut self, _now: Instant, _outbox: &mut Outbox<'_>) -> NextPoll {
        NextPoll::Until(None)
    }

    /// Descriptors that wake a sleeping guest, and the events to wait for.
    fn wake_by(&self) -> Vec<(BorrowedFd<'_>, PollFlags)> {
        Vec::new()
    }
}

/// Remaining work of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NextPoll {
    /// There is more: call again after the next batch.
    More,
    /// Nothing until this time, if given.
    Until(Option<Instant>),
}

/// Location and size of a guest's trunk to the mux.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct GuestOptions {
    /// Socket of the mux [default: PDP_MEMIF of the environment, or /run/pdp/memif/memif.sock]
    #[arg(long)]
    pub memif: Option<PathBuf>,
    /// Frames in each of the two rings to and from the mux, a power of two up to 16384 [default:
    /// PDP_QUEUE of the environment, or 1024]
    #[arg(long)]
    pub queue: Option<u32>,
    /// File with the number of cores that the guest may use, read repeatedly [default: PDP_QUOTA of
    /// the environment; without: one]
    #[arg(long)]
    pub quota: Option<PathBuf>,
}

/// Value of an environment variable, if it is set and valid.
pub fn environment<T: std::str::FromStr>(name: &str) -> Option<T> {
    std::env::var(name).ok()?.parse().ok()
}

/// Reason why a guest can't run.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No memory for the rings.
    #[error("memif client for {}", path.display())]
    Memif {
        /// The socket.
        path: PathBuf,
        /// The cause.
        source: ClientError,
    },
    /// Signal handlers can't be installed.
    #[error("signal handler")]
    Signal(#[source] std::io::Error),
    /// The system refused to wait.
    #[error("waiting for frames")]
    Wait(#[source] std::io::Error),
}

/// Decides when a guest without frames yields its CPU.
#[derive(Debug, Default)]
struct Courtesy {
    /// Frames received at its last yield or sleep.
    seen: u64,
    /// Earliest time of the next yield, nanoseconds.
    again_ns: u64,
}

impl Courtesy {
    /// True if the guest should yield after `received` frames.
    fn is_due(&mut self, received: u64, now_ns: impl FnOnce() -> u64) -> bool {
        if received - self.seen < YIELD_FRAMES {
            return false;
        }
        self.seen = received;
        now_ns() >= self.again_ns
    }

    /// Records the time that other threads used.
    fn yielded(&mut self, time_ns: std::ops::Range<u64>) {
        if time_ns.end - time_ns.start > YIELD_NS_MAX {
            self.again_ns = time_ns.end + YIELD_AGAIN_NS;
        }
    }
}

/// Events that ended a sleep.
struct Woken {
    /// True if the mux rang.
    bell: bool,
    /// True if the control socket or a descriptor of the program is ready.
    other: bool,
}

/// Runs one program on one trunk.
#[derive(Debug)]
pub struct ProgramRuntime<P> {
    program: P,
    client: MemifClient,
    frames: Vec<TrunkFrame>,
    rest: Vec<Buf>,
    extras: Vec<Extra>,
    kept: usize,
    kept_max: usize,
    counters: RuntimeCounters,
    next_poll: NextPoll,
    batches: u32,
    quiet_batches: u32,
    poll_at: Instant,
    control_at: Instant,
    /// File with the number of cores that it may use.
    quota: Option<PathBuf>,
    thrift: Thrift,
    /// Frames that should arrive during a pause.
    pause_frames: u64,
    /// Start of the last pause, nanoseconds since it began to run, and frames received by then.
    last_pause: (u64, u64),
}

/// CPU time of all threads, nanoseconds.
fn cpu_ns() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Runs a program on the trunk of `guest` until SIGTERM or SIGINT.
pub fn run<P: ForwardingProgram>(
    guest: &GuestOptions,
    name: &str,
    program: P,
) -> Result<(), Error> {
    let stop = std::sync::Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGTERM, signal_hook::consts::SIGINT] {
        signal_hook::flag::register(signal, stop.clone()).map_err(Error::Signal)?;
    }
    let memif = guest.memif.clone().or_else(|| environment("PDP_MEMIF"));
    let memif = memif.unwrap_or_else(|| MEMIF.into());
    let queue = guest.queue.or_else(|| environment("PDP_QUEUE")).unwrap_or(QUEUE_DEFAULT);
    let mut runtime = ProgramRuntime::with_queue(&memif, name, queue, program)?;
    runtime.quota = guest.quota.clone().or_else(|| environment("PDP_QUOTA"));
    runtime.run(&stop)
}

impl<P: ForwardingProgram> ProgramRuntime<P> {
    /// Makes a runtime for the mux at `memif`, which need
    /// not exist yet. `name` is the name sent to the mux.
    pub fn new(memif: &Path, name: &str, program: P) -> Result<Self, Error> {
        Self::with_queue(memif, name, QUEUE_DEFAULT, program)
    }

    /// Like [`ProgramRuntime::new`], with rings of `queue` frames, rounded down to a power of two.
    pub fn with_queue(memif: &Path, name: &str, queue: u32, program: P) -> Result<Self, Error> {
        let settings = settings(queue);
        let client = MemifClient::new(memif, 0, name, settings)
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
            counters: RuntimeCounters::default(),
            next_poll: NextPoll::More,
            batches: 0,
            quiet_batches: 0,
            poll_at: now,
            control_at: now,
            quota: None,
            thrift: Thrift::default(),
            pause_frames: (1 << settings.ring_log2) / PAUSE_RING,
            last_pause: (0, 0),
        })
    }

    /// The program.
    pub fn program(&self) -> &P {
        &self.program
    }

    /// The program, mutable.
    pub fn program_mut(&mut self) -> &mut P {
        &mut self.program
    }

    /// Counters so far.
    pub fn counters(&self) -> RuntimeCounters {
        self.counters
    }

    /// Works until `stop` is set. A sleeping guest notices it after a signal or within a second.
    pub fn run(&mut self, stop: &AtomicBool) -> Result<(), Error> {
        let (mut patience, start) = (Patience::default(), Instant::now());
        let mut courtesy = Courtesy { seen: self.counters.received, ..Courtesy::default() };
        let mut paused = false;
        while !stop.load(Ordering::Relaxed) {
            let work = self.round();
            let now_ns = || start.elapsed().as_nanos() as u64;
            paused &= !work;
            if !work && courtesy.is_due(self.counters.received, now_ns) {
                let before_ns = now_ns();
                rustix::thread::sched_yield();
                courtesy.yielded(before_ns..now_ns());
                self.counters.yields += 1;
                continue;
            }
            if !work && !paused && self.thrift.is_spent(now_ns(), cpu_ns) {
                self.pause(now_ns());
                patience.stop_polling();
                paused = true;
            } else if patience.ends(work, || false, now_ns)
                || self.client.link() != ConnectionState::Up
            {
                self.sleep()?;
                patience.slept();
                courtesy.seen = self.counters.received;
            }
        }
        Ok(())
    }

    /// Processes one batch and other due work. True if there was any.
    pub fn round(&mut self) -> bool {
        let received = self.process();
        self.batches = self.batches.wrapping_add(1);
        if received
            && !self.batches.is_multiple_of(CLOCK_BATCHES)
            && self.next_poll != NextPoll::More
        {
            return true;
        }
        let now = Instant::now();
        if now >= self.control_at {
            self.look_after_link(now);
        }
        let due = match self.next_poll {
            NextPoll::More => true,
            NextPoll::Until(until) => {
                now >= self.poll_at || until.is_some_and(|until| now >= until)
            }
        };
        if due {
            // Ring first: the program's other work must not delay this.
            self.client.ring();
            let Self { client, kept, counters, .. } = self;
            self.next_poll = self.program.poll(now, &mut Outbox { client, kept, counters });
            self.client.flush();
            self.poll_at = now + POLL_INTERVAL;
            if received {
                // The kernel enforces a quota only when it reads the clock: on a system call of the
                // guest, or every 4 ms (HZ=250). A guest of a tenth of a core that overdraws by
                // that much would be stopped for 40 ms at a time.
                rustix::thread::sched_yield();
            }
        }
        received || self.next_poll == NextPoll::More
    }

    fn look_after_link(&mut self, now: Instant) {
        let before = self.client.link();
        let after = self.client.poll();
        if after == ConnectionState::Up && before != ConnectionState::Up {
            self.counters.connections += 1;
        }
        let interval =
            if after == ConnectionState::Up { CONTROL_INTERVAL } else { RECONNECT_INTERVAL };
        self.control_at = now + interval;
        let words = self.quota.as_ref().and_then(|path| std::fs::read_to_string(path).ok());
        if let Some(cores) = words.and_then(|words| words.trim().parse().ok()) {
            self.thrift.allow(cores);
        }
    }

    fn process(&mut self) -> bool {
        // Each received frame needs room for its completion.
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

    /// Takes up to `max` frames; returns their number.
    fn receive(&mut self, max: usize) -> usize {
        let Self { client, frames, rest, counters, .. } = self;
        let mut inside = false;
        let count = client.receive_each(max, |mut buf| {
            if inside {
                // Rest of a frame longer than a buffer: the first piece represents it.
                inside = buf.continues();
                return rest.push(buf);
            }
            inside = buf.continues();
            let tag = Tag::parse(buf.metadata()).ok();
            let tag = tag.filter(|tag| tag.verdict == TagVerdict::Deliver);
            let (vport, trace) = tag.map_or((0, 0), |tag| (tag.vport, tag.trace));
            let mut verdict = TagVerdict::Drop(GuestDrop::Policy);
            if tag.is_none() || inside {
                counters.unreadable += 1;
                verdict = TagVerdict::Drop(GuestDrop::Malformed);
                buf.set_len(0);
            }
            frames.push(TrunkFrame { buf, vport, trace, verdict, to: vport });
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
        self.client.publish();
        self.quiet_batches += 1;
        if self.quiet_batches >= QUIET_BATCHES_MAX {
            self.quiet_batches = 0;
            self.client.ring();
        }
    }

    /// Pauses while frames accumulate, without being woken for them.
    fn pause(&mut self, now_ns: u64) {
        let since = (now_ns - self.last_pause.0, self.counters.received - self.last_pause.1);
        self.last_pause = (now_ns, self.counters.received);
        let enough = self.pause_frames.saturating_mul(since.0) / since.1.max(1);
        let full = self.pause_frames * PAUSE_RING * 1_000_000_000 / PAUSE_PPS;
        let mut time = Duration::from_nanos(enough.min(full)).min(PAUSE_MAX);
        if let NextPoll::Until(Some(until)) = self.next_poll {
            time = time.min(until.saturating_duration_since(Instant::now()));
        }
        std::thread::sleep(time);
    }

    /// Waits for frames, for a descriptor of the program, or for the next due time.
    fn sleep(&mut self) -> Result<(), Error> {
        let now = Instant::now();
        let mut until = now + SLEEP_MAX;
        if let NextPoll::Until(Some(time)) = self.next_poll {
            until = until.min(time);
        }
        if self.client.link() != ConnectionState::Up {
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
        // After frames neither is needed, and each check takes at least one system call.
        let now = Instant::now();
        if woken.other {
            self.next_poll = NextPoll::More;
            self.control_at = self.control_at.min(now);
        } else {
            self.poll_at = now + POLL_INTERVAL;
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

impl TrunkFrame {
    /// Returns the buffer of its completion.
    #[inline]
    fn completion(self) -> Buf {
        let Self { mut buf, trace, verdict, to, .. } = self;
        if matches!(verdict, TagVerdict::Drop(_) | TagVerdict::Kept) {
            buf.set_len(0);
        }
        write_tag(&mut buf, verdict, to, true, trace);
        buf
    }
}

/// Room was checked beforehand. Sending fails only if the link
/// has just gone down, and then nobody waits for the frame.
#[inline]
fn send(client: &mut MemifClient, buf: Buf) {
    if let Err(buf) = client.send(buf) {
        client.free(buf);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guest_pauses_yielding_after_a_slow_yield() {
        let mut courtesy = Courtesy::default();
        // Frames received, the time, whether a yield is due, and how long it takes.
        for (frames, now_ns, due, took_ns) in [
            (63, 0, false, 0),
            (64, 0, true, YIELD_NS_MAX),
            (64, 63, false, 0),
            (128, 70, true, YIELD_NS_MAX + 1),
            (256, YIELD_NS_MAX + 71 + YIELD_AGAIN_NS - 1, false, 0),
            // Frames that arrived meanwhile are not counted twice.
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
