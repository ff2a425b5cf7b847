//! Threads that ring peers' doorbells, so that no worker does.
//!
//! A peer makes its doorbell and may hang on it as many waiters as it has memory for. The kernel goes
//! through all of them at each ring, with interrupts off: 1 µs for one, 14 ms for 100,000. A worker
//! therefore only says which bells are to be rung, but for those of guests that it [trusts](Bell::is_trusted). One owner's bells are rung by one thread at a time,
//! and who has too many waiters is disconnected ([`pdp_memif::Fault::Waiters`]), so that it takes
//! [`RINGERS`] owners who do this at the same moment to delay the bells of others, and then for as long
//! as one ring takes.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use pdp_memif::Bell;
use tracing::warn;

/// Threads that ring. They sleep while there is nothing to ring.
pub const RINGERS: usize = 4;

/// After this long a bell that still waits has another thread woken for it, nanoseconds: the one that
/// was to ring it is busy with another.
const BEHIND_NS: u64 = 50_000;

/// Whose bells are rung one after the other.
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

/// A bell that is to be rung.
pub type Asked = (RungFor, Arc<Bell>);

/// A worker's way to the threads. They end with the last of these.
#[derive(Clone, Debug)]
pub struct Ringers {
    threads: Arc<Threads>,
    /// When this worker last asked, nanoseconds.
    asked_ns: u64,
}

#[derive(Debug)]
struct Threads(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    work: Condvar,
    /// Bells in the queue, for a look without the lock.
    queued: AtomicUsize,
}

#[derive(Debug, Default)]
struct State {
    queue: VecDeque<Asked>,
    /// Whose bell is being rung, and which of its bells wait for that.
    busy: HashMap<RungFor, Vec<Arc<Bell>>>,
    /// Threads that sleep.
    idle: usize,
    ended: bool,
}

impl Ringers {
    /// Starts the threads. Fails where the kernel has no means to ring without waiting.
    pub fn start() -> io::Result<Self> {
        Bell::probe()?;
        let threads = Arc::new(Threads(Arc::default()));
        for number in 0..RINGERS {
            let shared = threads.0.clone();
            let builder = std::thread::Builder::new().name(format!("ringer{number}"));
            builder.spawn(move || {
                // What it needs to ring is made now, and not when a peer waits for it.
                if let Err(error) = Bell::probe() {
                    warn!("ringer {number} can't ring: {error}");
                }
                shared.run();
            })?;
        }
        Ok(Self { threads, asked_ns: 0 })
    }

    /// Has `bells` rung, and empties it; unless one of the threads holds the lock just now, which a
    /// worker does not wait for: call it each round.
    #[inline]
    pub fn ask(&mut self, bells: &mut Vec<Asked>, now_ns: u64) {
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

    /// The same before the worker sleeps: what is asked for is rung, whoever is busy.
    pub fn settle(&mut self, bells: &mut Vec<Asked>) {
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

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues bells. A thread that is awake takes them, if it is not busy for long; another one is woken
    /// where all sleep, or if `behind`.
    fn put(&self, mut state: MutexGuard<'_, State>, bells: &mut Vec<Asked>, behind: bool) {
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
            // Its worker sees a fault when it wants the bell to be rung again.
            let _ = bell.ring();
            drop(bell);
            state = self.lock();
            state.done(owner);
        }
    }
}

impl State {
    /// The next bell whose owner has none being rung.
    fn next(&mut self) -> Option<Asked> {
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

    /// A bell of `owner` was rung.
    fn done(&mut self, owner: RungFor) {
        let waiting = self.busy.remove(&owner).into_iter().flatten();
        self.queue.extend(waiting.map(|bell| (owner, bell)));
    }
}
