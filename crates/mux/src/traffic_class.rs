//! State that a port with an external end shares with the scheduler of its
//! interface: the traffic class of its frames, and how many of these are queued
//! at the scheduler. The port and the scheduler may be at different workers.
//!
//! A port sends at most [`AHEAD_NS`] of the capacity ahead to the scheduler. The rest
//! waits at the port, neither encapsulated nor counted as sent. So the port chooses
//! its next frame late, and the scheduler never runs out of frames meanwhile.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Bytes that a frame takes on an interface beyond its own: Ethernet's
/// preamble, checksum and gap (IEEE Std 802.3 section 4.4.2).
pub const WIRE_BYTES: usize = 24;

/// Shortest frame on an interface, bytes, without [`WIRE_BYTES`].
const FRAME_BYTES_MIN: usize = 60;

/// Frames of one traffic class that may be at the scheduler, as time at the capacity.
pub const AHEAD_NS: u64 = 1_000_000;

/// Frames of one traffic class that may always be there, and the most that may.
const FRAMES: (u64, u64) = (2, 256);

/// Shortest and longest time until a port checks again for space at the scheduler, nanoseconds.
const LOOK_NS: (u64, u64) = (10_000, 2_000_000);

/// Flag: a packet's mark is the number of a traffic class. Marks of traces are never this high.
const IS_CLASS: u32 = 1 << 31;

/// Bits of the byte count in [`TrafficClass::there`].
const BYTES_BITS: u32 = 40;

/// Returns the bytes that a frame of `bytes` takes on an interface.
#[inline]
pub fn on_wire(bytes: usize) -> u32 {
    (bytes.max(FRAME_BYTES_MIN) + WIRE_BYTES) as u32
}

/// An interface's capacity, and the numbers of its traffic classes.
#[derive(Debug, Default)]
pub struct Capacity {
    /// Bits a second; 0: none.
    bps: AtomicU64,
    numbers: Mutex<Numbers>,
}

/// Numbers of traffic classes. 0 belongs to none.
#[derive(Debug, Default)]
struct Numbers {
    last: u32,
    free: Vec<u32>,
}

impl Capacity {
    /// Sets the capacity, bits a second, from now on.
    pub fn set(&self, bps: Option<u64>) {
        self.bps.store(bps.unwrap_or(0), Ordering::Relaxed);
    }
}

/// Traffic class of the frames that one external end sends.
#[derive(Debug)]
pub struct TrafficClass {
    capacity: Arc<Capacity>,
    number: u32,
    /// Frames at the scheduler (high bits), and their bytes on the interface (low bits).
    queued: AtomicU64,
    /// Frames of its vnet at all schedulers.
    of_vnet: Arc<AtomicUsize>,
}

impl TrafficClass {
    /// Creates a traffic class at an interface of this capacity.
    pub fn new(capacity: &Arc<Capacity>, of_vnet: &Arc<AtomicUsize>) -> Self {
        let mut numbers = capacity.numbers.lock().unwrap_or_else(PoisonError::into_inner);
        let number = numbers.free.pop().unwrap_or(numbers.last + 1);
        numbers.last = numbers.last.max(number);
        drop(numbers);
        let (capacity, of_vnet) = (capacity.clone(), of_vnet.clone());
        Self { capacity, number, queued: AtomicU64::new(0), of_vnet }
    }

    /// True if the class belongs to an interface of this capacity.
    pub fn is_of(&self, capacity: &Arc<Capacity>) -> bool {
        Arc::ptr_eq(&self.capacity, capacity)
    }

    /// Returns its number at the interface, counted from 1.
    pub fn number(&self) -> usize {
        self.number as usize
    }

    /// Returns the mark of its frames on their way to the scheduler.
    #[inline]
    pub fn mark(&self) -> u32 {
        IS_CLASS | self.number
    }

    /// Returns the number of the class whose frames have this mark.
    #[inline]
    pub fn of(mark: u32) -> Option<usize> {
        (mark & IS_CLASS != 0).then_some((mark & !IS_CLASS) as usize)
    }

    /// Returns the budget for more frames at the scheduler, each with
    /// `header_bytes` beside its own. It stays valid until the port sends frames.
    #[inline]
    pub fn room(&self, header_bytes: usize) -> SchedulerBudget {
        let (frames, bytes) = self.queued();
        let bytes_max = self.capacity.bps.load(Ordering::Relaxed) / 8 / (1_000_000_000 / AHEAD_NS);
        let (frames_min, frames_max) = FRAMES;
        let look_ns = self.retry_ns();
        SchedulerBudget {
            frames,
            bytes,
            frames_min,
            frames_max,
            bytes_max,
            header_bytes,
            retry_ns: look_ns,
        }
    }

    fn queued(&self) -> (u64, u64) {
        let queued = self.queued.load(Ordering::Relaxed);
        (queued >> BYTES_BITS, queued & ((1 << BYTES_BITS) - 1))
    }

    /// Adds frames that the port sends to the scheduler.
    #[inline]
    pub fn add(&self, frames: usize, bytes: u64) {
        self.queued.fetch_add((frames as u64) << BYTES_BITS | bytes, Ordering::Relaxed);
        self.of_vnet.fetch_add(frames, Ordering::Relaxed);
    }

    /// Removes frames that have left the scheduler.
    #[inline]
    pub fn sub(&self, frames: usize, bytes: u64) {
        self.queued.fetch_sub((frames as u64) << BYTES_BITS | bytes, Ordering::Relaxed);
        self.of_vnet.fetch_sub(frames, Ordering::Relaxed);
    }

    /// Returns the frames of its vnet at all schedulers.
    pub fn of_vnet(&self) -> usize {
        self.of_vnet.load(Ordering::Relaxed)
    }

    /// Returns how long half of the frames at the scheduler takes
    /// at least, nanoseconds. The port need not check again before.
    pub fn retry_ns(&self) -> u64 {
        let bps = self.capacity.bps.load(Ordering::Relaxed).max(1);
        let half_ns = u128::from(self.queued().1) * 4_000_000_000 / u128::from(bps);
        half_ns.clamp(LOOK_NS.0.into(), LOOK_NS.1.into()) as u64
    }
}

/// Budget for frames at a scheduler.
#[derive(Clone, Copy, Debug)]
pub struct SchedulerBudget {
    /// Frames and bytes at the scheduler.
    frames: u64,
    bytes: u64,
    /// Frames that may always be there, the most frames, and the most bytes.
    frames_min: u64,
    frames_max: u64,
    bytes_max: u64,
    header_bytes: usize,
    /// Time from now until the port checks again for more, nanoseconds.
    pub retry_ns: u64,
}

impl SchedulerBudget {
    /// Budget without limits, for interfaces without a capacity.
    pub const fn all() -> Self {
        Self { frames_min: u64::MAX, frames_max: u64::MAX, ..Self::none(0) }
    }

    /// Budget for no frame until the next check.
    pub const fn none(look_ns: u64) -> Self {
        let (frames, bytes, frames_min, frames_max, bytes_max) = (0, 0, 0, 0, 0);
        Self {
            frames,
            bytes,
            frames_min,
            frames_max,
            bytes_max,
            header_bytes: 0,
            retry_ns: look_ns,
        }
    }

    /// Limits the budget to `frames` more frames.
    pub fn at_most(self, frames: usize) -> Self {
        let most = self.frames.saturating_add(frames as u64);
        let (frames_min, frames_max) = (self.frames_min.min(most), self.frames_max.min(most));
        Self { frames_min, frames_max, ..self }
    }

    /// True if a frame of this length fits.
    #[inline]
    pub fn has(&self, length: usize) -> bool {
        let (frames, bytes) = self.with(length);
        frames <= self.frames_min || frames <= self.frames_max && bytes <= self.bytes_max
    }

    /// Takes the budget for a frame of this length. False if it does not fit.
    #[inline]
    pub fn take(&mut self, length: usize) -> bool {
        let has = self.has(length);
        if has {
            (self.frames, self.bytes) = self.with(length);
        }
        has
    }

    fn with(&self, length: usize) -> (u64, u64) {
        (self.frames + 1, self.bytes + u64::from(on_wire(length + self.header_bytes)))
    }
}

impl Drop for TrafficClass {
    fn drop(&mut self) {
        let mut numbers = self.capacity.numbers.lock().unwrap_or_else(PoisonError::into_inner);
        numbers.free.push(self.number);
    }
}
