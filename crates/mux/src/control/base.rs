//! What all requests work on.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::Thread;

use pdp_afxdp::Pool;
use pdp_underlay::{Ends, Underlay};

use crate::classify::Classifier;
use crate::control::keeper::Keeper;
use crate::control::plan::State;
use crate::control::routes::Routes;
use crate::control::slowpath::SlowPaths;
use crate::control::workers::{self, Settings, WorkerHandle};
use crate::wake::Wake;

/// All that there is, and what is wanted.
pub struct Control {
    pub(super) workers: Arc<[WorkerHandle]>,
    pub(super) pool: Pool,
    pub(super) keeper: Keeper,
    pub(super) underlay: Underlay,
    pub(super) routes: Routes,
    pub(super) slowpaths: SlowPaths,
    state: Mutex<State>,
    /// Traces until now.
    pub(super) tickets: AtomicU64,
    pub(super) captures: Arc<AtomicUsize>,
    /// The thread that does what schedules say.
    pub(super) clock: OnceLock<Thread>,
}

impl Drop for Control {
    fn drop(&mut self) {
        self.clock.get().inspect(|thread| thread.unpark());
    }
}

impl Control {
    /// Starts all threads in the calling thread's network namespace.
    pub fn start(settings: &Settings) -> anyhow::Result<Self> {
        let wake = Arc::new(Wake::new()?);
        let (workers, pool, dropped) = workers::start(settings, &wake)?;
        Ok(Self {
            keeper: Keeper::start(workers.clone(), dropped, wake)?,
            workers,
            pool,
            underlay: Underlay::start()?,
            routes: Routes::start()?,
            slowpaths: SlowPaths::start()?,
            state: Mutex::default(),
            tickets: AtomicU64::new(0),
            captures: Arc::default(),
            clock: OnceLock::new(),
        })
    }

    /// What is wanted; nobody else changes it meanwhile.
    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has all workers classify by `classifier`.
    pub fn publish(&self, classifier: &Arc<Classifier>) -> Result<(), String> {
        for worker in self.workers.iter() {
            let classifier = classifier.clone();
            // The one before is dropped here.
            worker.call(move |worker| std::mem::replace(&mut worker.classifier, classifier))?;
        }
        Ok(())
    }

    /// Has the ways of these tunnels measured with packets as long as the longest of all vnets' now.
    pub fn measure(&self, state: &State, mut lengths: HashMap<Ends, u32>) {
        if lengths.is_empty() {
            return;
        }
        for (ends, bytes) in state.vnets.values().flat_map(|vnet| state.tunnels(&vnet.spec)) {
            if let Some(longest) = lengths.get_mut(&ends) {
                *longest = bytes.max(*longest);
            }
        }
        self.underlay.set_lengths(&lengths);
    }
}
