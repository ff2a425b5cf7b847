//! State that all requests work on.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::Thread;

use pdp_afxdp::Pool;
use pdp_underlay::{TunnelEndpoints, Underlay};

use crate::classify::Classifier;
use crate::control::peer_listener::PeerListener;
use crate::control::plan::PlanState;
use crate::control::routes::MirrorThread;
use crate::control::slowpath::SlowPaths;
use crate::control::workers::{self, MuxSettings, WorkerHandle};
use crate::wake::Wake;

/// The mux's threads, and the requested state.
pub struct MuxControl {
    pub(super) workers: Arc<[WorkerHandle]>,
    pub(super) pool: Pool,
    pub(super) listener: PeerListener,
    pub(super) underlay: Underlay,
    pub(super) routes: MirrorThread,
    pub(super) slowpaths: SlowPaths,
    state: Mutex<PlanState>,
    /// Number of traces so far.
    pub(super) tickets: AtomicU64,
    pub(super) captures: Arc<AtomicUsize>,
    /// Thread that executes schedules.
    pub(super) clock: OnceLock<Thread>,
}

impl Drop for MuxControl {
    fn drop(&mut self) {
        self.clock.get().inspect(|thread| thread.unpark());
    }
}

impl MuxControl {
    /// Starts all threads in the calling thread's network namespace.
    pub fn start(settings: &MuxSettings) -> anyhow::Result<Self> {
        let wake = Arc::new(Wake::new()?);
        let (workers, pool, dropped) = workers::start(settings, &wake)?;
        Ok(Self {
            listener: PeerListener::start(workers.clone(), dropped, wake)?,
            workers,
            pool,
            underlay: Underlay::start()?,
            routes: MirrorThread::start()?,
            slowpaths: SlowPaths::start()?,
            state: Mutex::default(),
            tickets: AtomicU64::new(0),
            captures: Arc::default(),
            clock: OnceLock::new(),
        })
    }

    /// Locks and returns the requested state.
    pub fn state(&self) -> MutexGuard<'_, PlanState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives `classifier` to all workers.
    pub fn publish(&self, classifier: &Arc<Classifier>) -> Result<(), String> {
        for worker in self.workers.iter() {
            let classifier = classifier.clone();
            // The old one is dropped here.
            worker.call(move |worker| std::mem::replace(&mut worker.classifier, classifier))?;
        }
        Ok(())
    }

    /// Starts measurements of these tunnels' paths. The packets
    /// are as long as the longest of any vnet on that path.
    pub fn measure(&self, state: &PlanState, mut lengths: HashMap<TunnelEndpoints, u32>) {
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
