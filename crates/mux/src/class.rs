//! What the port at an end outside and the scheduler of its interface have in common: which class its frames are of, and
//! how many of them are at the scheduler. Each of both may be at another worker.
//!
//! A port sends no more there than [`AHEAD_NS`] of the capacity, and the rest waits with it, not wrapped and not counted
//! as sent. So what a port has to send next is decided late, and what the scheduler has never runs out meanwhile.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Bytes that a frame takes on an interface beyond its own: preamble, checksum and gap of Ethernet (IEEE Std 802.3
/// section 4.4.2).
pub const WIRE_BYTES: usize = 24;

/// The shortest frame that there is on one, without these.
const FRAME_BYTES_MIN: usize = 60;

/// What frames of one class may take at the scheduler, as time at the capacity.
pub const AHEAD_NS: u64 = 1_000_000;

/// How many frames may be there in any case, and at the most.
const FRAMES: (u64, u64) = (2, 256);

/// The time between two looks of a port whether there is room again, nanoseconds: the shortest and the longest.
const LOOK_NS: (u64, u64) = (10_000, 2_000_000);

/// Says that a packet's mark is the number of a class; no trace has a mark so high.
const IS_CLASS: u32 = 1 << 31;

/// Bits of the count of bytes in [`Class::there`].
const BYTES_BITS: u32 = 40;

/// Bytes that a frame of `bytes` takes on an interface.
#[inline]
pub fn on_wire(bytes: usize) -> u32 {
    (bytes.max(FRAME_BYTES_MIN) + WIRE_BYTES) as u32
}

/// An interface's capacity, and which numbers its classes have.
#[derive(Debug, Default)]
pub struct Capacity {
    /// Bits a second; 0: none.
    bps: AtomicU64,
    numbers: Mutex<Numbers>,
}

/// Numbers of classes. 0 is nobody's.
#[derive(Debug, Default)]
struct Numbers {
    last: u32,
    free: Vec<u32>,
}

impl Capacity {
    /// From now on, bits a second.
    pub fn set(&self, bps: Option<u64>) {
        self.bps.store(bps.unwrap_or(0), Ordering::Relaxed);
    }
}

/// The frames that leave by one end.
#[derive(Debug)]
pub struct Class {
    capacity: Arc<Capacity>,
    number: u32,
    /// Frames at the scheduler, and their bytes on the interface.
    there: AtomicU64,
    /// Frames of its vnet at all schedulers.
    of_vnet: Arc<AtomicUsize>,
}

impl Class {
    /// One more at an interface of this capacity.
    pub fn new(capacity: &Arc<Capacity>, of_vnet: &Arc<AtomicUsize>) -> Self {
        let mut numbers = capacity.numbers.lock().unwrap_or_else(PoisonError::into_inner);
        let number = numbers.free.pop().unwrap_or(numbers.last + 1);
        numbers.last = numbers.last.max(number);
        drop(numbers);
        let (capacity, of_vnet) = (capacity.clone(), of_vnet.clone());
        Self { capacity, number, there: AtomicU64::new(0), of_vnet }
    }

    /// Whether it is one of an interface of this capacity.
    pub fn is_of(&self, capacity: &Arc<Capacity>) -> bool {
        Arc::ptr_eq(&self.capacity, capacity)
    }

    /// Its number at the interface, from 1.
    pub fn number(&self) -> usize {
        self.number as usize
    }

    /// The mark of its frames on their way to the scheduler.
    #[inline]
    pub fn mark(&self) -> u32 {
        IS_CLASS | self.number
    }

    /// The number of the class whose frame has this mark.
    #[inline]
    pub fn of(mark: u32) -> Option<usize> {
        (mark & IS_CLASS != 0).then_some((mark & !IS_CLASS) as usize)
    }

    /// The room that there is for more frames of `header_bytes` beside their own. There stays as much until the port sends
    /// some.
    #[inline]
    pub fn room(&self, header_bytes: usize) -> Room {
        let (frames, bytes) = self.there();
        let bytes_max = self.capacity.bps.load(Ordering::Relaxed) / 8 / (1_000_000_000 / AHEAD_NS);
        let (frames_min, frames_max) = FRAMES;
        let look_ns = self.look_ns();
        Room { frames, bytes, frames_min, frames_max, bytes_max, header_bytes, look_ns }
    }

    fn there(&self) -> (u64, u64) {
        let there = self.there.load(Ordering::Relaxed);
        (there >> BYTES_BITS, there & ((1 << BYTES_BITS) - 1))
    }

    /// The port sends so many.
    #[inline]
    pub fn add(&self, frames: usize, bytes: u64) {
        self.there.fetch_add((frames as u64) << BYTES_BITS | bytes, Ordering::Relaxed);
        self.of_vnet.fetch_add(frames, Ordering::Relaxed);
    }

    /// So many are not there any more.
    #[inline]
    pub fn sub(&self, frames: usize, bytes: u64) {
        self.there.fetch_sub((frames as u64) << BYTES_BITS | bytes, Ordering::Relaxed);
        self.of_vnet.fetch_sub(frames, Ordering::Relaxed);
    }

    /// Frames of its vnet at all schedulers.
    pub fn of_vnet(&self) -> usize {
        self.of_vnet.load(Ordering::Relaxed)
    }

    /// How long half of what is there takes at the least, nanoseconds: until then the port need not look again.
    pub fn look_ns(&self) -> u64 {
        let bps = self.capacity.bps.load(Ordering::Relaxed).max(1);
        let half_ns = u128::from(self.there().1) * 4_000_000_000 / u128::from(bps);
        half_ns.clamp(LOOK_NS.0.into(), LOOK_NS.1.into()) as u64
    }
}

/// What has room at a scheduler.
#[derive(Clone, Copy, Debug)]
pub struct Room {
    /// What is there.
    frames: u64,
    bytes: u64,
    /// So many may be there in any case, so many at most, and these bytes.
    frames_min: u64,
    frames_max: u64,
    bytes_max: u64,
    header_bytes: usize,
    /// When to look again whether there is more, from now on, nanoseconds.
    pub look_ns: u64,
}

impl Room {
    /// For all that comes: where there is no capacity.
    pub const fn all() -> Self {
        Self { frames_min: u64::MAX, frames_max: u64::MAX, ..Self::none(0) }
    }

    /// For nothing, until one looks again.
    pub const fn none(look_ns: u64) -> Self {
        let (frames, bytes, frames_min, frames_max, bytes_max) = (0, 0, 0, 0, 0);
        Self { frames, bytes, frames_min, frames_max, bytes_max, header_bytes: 0, look_ns }
    }

    /// For no more than `frames` of these.
    pub fn at_most(self, frames: usize) -> Self {
        let most = self.frames.saturating_add(frames as u64);
        let (frames_min, frames_max) = (self.frames_min.min(most), self.frames_max.min(most));
        Self { frames_min, frames_max, ..self }
    }

    /// Whether a frame of this length has some.
    #[inline]
    pub fn has(&self, length: usize) -> bool {
        let (frames, bytes) = self.with(length);
        frames <= self.frames_min || frames <= self.frames_max && bytes <= self.bytes_max
    }

    /// Takes it for a frame of this length, if it has some.
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

impl Drop for Class {
    fn drop(&mut self) {
        let mut numbers = self.capacity.numbers.lock().unwrap_or_else(PoisonError::into_inner);
        numbers.free.push(self.number);
    }
}
