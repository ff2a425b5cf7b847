//! The worker threads, and how other threads reach them.

use std::io;
use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, SyncSender};
use std::thread;

use pdp_afxdp::Pool;
use pdp_memif::Bell;
use rtrb::RingBuffer;
use rustix::thread::set_current_timer_slack;
use tracing::warn;

use crate::connections::{Dropped, SleepWatch};
use crate::core::Core;
use crate::packets::Packets;
use crate::ringers::Ringers;
use crate::wake::Wake;
use crate::worker::{HANDOVER_FRAMES, NeighbourWorker, Worker, WorkerCommand};

/// Commands that may be queued for a worker.
const COMMANDS_MAX: usize = 64;

/// Settings of a mux.
#[derive(Clone, Debug)]
pub struct MuxSettings {
    /// Number of worker threads.
    pub workers: usize,
    /// Their CPUs, in order; workers beyond the list run where the kernel wants.
    pub cpus: Vec<usize>,
    /// Packets of all workers together.
    pub pool_packets: usize,
}

/// Handle by which other threads reach a worker.
#[derive(Clone, Debug)]
pub struct WorkerHandle {
    /// Number of the worker.
    pub number: usize,
    commands: SyncSender<WorkerCommand>,
    /// Doorbell of the worker.
    pub wake: Arc<Wake>,
    /// Descriptors that end its sleep.
    pub watch: SleepWatch,
}

impl WorkerHandle {
    /// Runs `work` at the worker between two rounds, and returns its result.
    pub fn call<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Worker) -> T + Send + 'static,
    ) -> Result<T, String> {
        let (reply, answer) = mpsc::channel();
        let command: WorkerCommand = Box::new(move |worker| {
            // Fails only if the caller is gone.
            let _ = reply.send(work(worker));
        });
        let gone = |number| format!("worker {number} has ended; restart the mux");
        self.commands.send(command).map_err(|_| gone(self.number))?;
        self.wake.ring();
        answer.recv().map_err(|_| gone(self.number))
    }

    /// Runs `work` at the worker, without a result. Logs an error.
    pub fn notify(&self, work: impl FnOnce(&mut Worker) + Send + 'static) {
        if let Err(error) = self.call(work) {
            warn!("{error}");
        }
    }
}

/// Starts the workers with a common pool, in the calling thread's network namespace. The
/// last result receives the connections that they give up. They ring `listener_wake` for these.
pub fn start(
    settings: &MuxSettings,
    listener_wake: &Arc<Wake>,
) -> anyhow::Result<(Arc<[WorkerHandle]>, Pool, Receiver<Dropped>)> {
    let count = settings.workers.max(1);
    let (dropped, dropped_by_workers) = mpsc::channel();
    let (pool, parts) = Packets::pool(count, settings.pool_packets / count)?;
    let wakes = (0..count).map(|_| Wake::new().map(Arc::new)).collect::<io::Result<Vec<_>>>()?;
    let ringers = Ringers::start()?;
    let mut workers = Vec::new();
    for (number, (packets, neighbours)) in parts.into_iter().zip(mesh(&wakes)).enumerate() {
        let (commands, received) = mpsc::sync_channel(COMMANDS_MAX);
        let wake = wakes[number].clone();
        let ringers = ringers.clone();
        let core = Core::new(packets, dropped.clone(), listener_wake.clone(), ringers)?;
        let watch = core.connections.watch.clone();
        let worker = Worker::new(number as u16, core, neighbours, received, wake.clone())?;
        let cpu = settings.cpus.get(number).map(|id| core_affinity::CoreId { id: *id });
        thread::Builder::new().name(format!("worker{number}")).spawn(move || {
            if let Some(cpu) = cpu
                && !core_affinity::set_for_current(cpu)
            {
                warn!("worker {number} can't be pinned to CPU {}", cpu.id);
            }
            // Otherwise the kernel ends each sleep up to 50 µs late, to end several at once.
            if let Err(error) = set_current_timer_slack(NonZeroU64::new(1)) {
                warn!("worker {number} may wake late: {error}");
            }
            // Sets up what ringing needs now, not when a peer waits for it.
            if let Err(error) = Bell::probe() {
                warn!("worker {number} can't ring doorbells: {error}");
            }
            worker.run();
        })?;
        workers.push(WorkerHandle { number, commands, wake, watch });
    }
    Ok((workers.into(), pool, dropped_by_workers))
}

/// Creates rings between each two workers.
fn mesh(wakes: &[Arc<Wake>]) -> Vec<Vec<Option<NeighbourWorker>>> {
    let ring = || RingBuffer::new(HANDOVER_FRAMES);
    let count = wakes.len();
    let mut mesh: Vec<Vec<_>> = vec![];
    mesh.resize_with(count, || (0..count).map(|_| None).collect());
    for (a, b) in (0..count).flat_map(|a| (0..a).map(move |b| (a, b))) {
        let ((to_a, at_a), (to_b, at_b)) = (ring(), ring());
        mesh[a][b] = Some(NeighbourWorker { to: to_b, from: at_a, wake: wakes[b].clone() });
        mesh[b][a] = Some(NeighbourWorker { to: to_a, from: at_b, wake: wakes[a].clone() });
    }
    mesh
}
