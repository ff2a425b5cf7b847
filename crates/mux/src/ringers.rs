//! Threads that ring peers' doorbells, so that workers don't.
//!
//! A peer creates its doorbell, and may attach as many waiters to it as it has
//! memory for. At each ring the kernel walks through all of them with interrupts
//! off: 1 µs for one, 14 ms for 100,000. A worker therefore only queues the
//! bells for ringing, except those of guests that it [trusts](Bell::is_trusted).
//!
//! Only one thread at a time rings the bells of one owner. An owner with too many waiters is
//! disconnected ([`pdp_memif::ProtocolViolation::Waiters`]). So [`RINGERS`] owners must do this at
//! the same time to delay the bells of others, and only for as long as one ring takes.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use pdp_memif::Bell;
use tracing::warn;

/// Number of threads. They sleep while there is nothing to ring.
pub const RINGERS: usize = 4;

/// If a bell waits this long, another thread is woken for it, nanoseconds.
/// The thread that was to ring it is still busy with another bell.
const BEHIND_NS: u64 = 50_000;

/// Owner of bells. The bells of one owner are rung one after the other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum RungFor {
    /// The worker itself, which has no bell.
    #[default]
    Nobody,
    /// The vnet of this generation; see [`crate::classify::PortRef`].
    Vnet(u32),
    /// The external interface in this slot.
    External(usize),
}

/// A bell to ring, and its owner.
pub type BellRequest = (RungFor, Arc<Bell>);

/// A worker's handle of the threads. They end with the last handle.
#[derive(Clone, Debug)]
pub struct Ringers {
    threads: Arc<Threads>,
    /// Time when this worker last queued bells, nanoseconds.
    asked_ns: u64,
}

#[derive(Debug)]
struct Threads(Arc<RingerQueue>);

#[derive(Debug, Default)]
struct RingerQueue {
    state: Mutex<RingerState>,
    work: Condvar,
    /// Number of queued bells, readable without the lock.
    queued: AtomicUsize,
}

#[derive(Debug, Default)]
struct RingerState {
    queue: VecDeque<BellRequest>,
    /// Owners whose bell is being rung, and their bells that wait meanwhile.
    busy: HashMap<RungFor, Vec<Arc<Bell>>>,
    /// Number of sleeping threads.
    idle: usize,
    ended: bool,
}

impl Ringers {
    /// Starts the threads. Fails if the kernel cannot ring without blocking.
    pub fn start() -> io::Result<Self> {
        Bell::probe()?;
        let threads = Arc::new(Threads(Arc::default()));
        for number in 0..RINGERS {
            let shared = threads.0.clone();
            let builder = std::thread::Builder::new().name(format!("ringer{number}"));
            builder.spawn(move || {
                // Sets up what ringing needs now, not when a peer waits for it.
                if let Err(error) = Bell::probe() {
                    warn!("ringer {number} can't ring doorbells: {error}");
                }
                shared.run();
            })?;
        }
        Ok(Self { threads, asked_ns: 0 })
    }

    /// Queues `bells` for ringing, and empties it. Does nothing if another thread
    /// holds the lock, which a worker does not wait for. So call it each round.
    #[inline]
    pub fn ring_all(&mut self, bells: &mut Vec<BellRequest>, now_ns: u64) {
        let shared = &self.threads.0;
        let behind = shared.queued.load(Ordering::Relaxed) > 0
            && now_ns.saturating_sub(self.asked_ns) >= BEHIND_NS;
        if (behind || !bells.is_empty())
            && let Ok(state) = shared.state.try_lock()
        {
            self.asked_ns = now_ns;
            shared.put(state, bells, behind);
        }
    }

    /// Queues the bells before the worker sleeps. Waits
    /// for the lock, and wakes a thread if any sleeps.
    pub fn settle(&mut self, bells: &mut Vec<BellRequest>) {
        let shared = &self.threads.0;
        if shared.queued.load(Ordering::Relaxed) > 0 || !bells.is_empty() {
            shared.put(shared.lock(), bells, true);
        }
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.0.lock().ended = true;
        self.0.work.notify_all();
    }
}

impl RingerQueue {
    fn lock(&self) -> MutexGuard<'_, RingerState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues bells. A thread that is awake takes them, unless it
    /// stays busy. Wakes another thread if all sleep, or if `behind`.
    fn put(
        &self,
        mut state: MutexGuard<'_, RingerState>,
        bells: &mut Vec<BellRequest>,
        behind: bool,
    ) {
        let wake = state.idle == RINGERS || behind || !state.queue.is_empty();
        let wake = wake && state.idle > 0;
        state.queue.extend(bells.drain(..));
        self.queued.store(state.queue.len(), Ordering::Relaxed);
        drop(state);
        if wake {
            self.work.notify_one();
        }
    }

    fn run(&self) {
        let mut state = self.lock();
        while !state.ended {
            let Some((owner, bell)) = state.next() else {
                self.queued.store(0, Ordering::Relaxed);
                state.idle += 1;
                state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
                state.idle -= 1;
                continue;
            };
            self.queued.store(state.queue.len(), Ordering::Relaxed);
            drop(state);
            // On a fault, the bell's worker sees it the next time that it queues the bell.
            let _ = bell.ring();
            drop(bell);
            state = self.lock();
            state.done(owner);
        }
    }
}

impl RingerState {
    /// Returns the next bell whose owner has no bell being rung.
    fn next(&mut self) -> Option<BellRequest> {
        while let Some((owner, bell)) = self.queue.pop_front() {
            match self.busy.get_mut(&owner) {
                Some(waiting) => waiting.push(bell),
                None => {
                    self.busy.insert(owner, vec![]);
                    return Some((owner, bell));
                }
            }
        }
        None
    }

    /// Notes that a bell of `owner` was rung.
    fn done(&mut self, owner: RungFor) {
        let waiting = self.busy.remove(&owner).into_iter().flatten();
        self.queue.extend(waiting.map(|bell| (owner, bell)));
    }
}
