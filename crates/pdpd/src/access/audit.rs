//! The audit log: one entry for each request, whoever sent it and however it ended.
//!
//! A request that may change something is logged before it acts. If
//! that fails, the request is refused. Its entry has no result until
//! the request ends, and never gets one if the daemon is killed before.
//!
//! Results and all other requests are written within [`GATHER_TIME`]; a daemon that is killed
//! may lose them. One thread writes, several entries at a time. Requests that begin at the
//! same time thus wait for one disk write together. No other part of the daemon waits for it.
//!
//! Limits: at most [`QUEUE_MAX`] entries wait to be written, then requests wait. Each text of
//! an entry has at most [`TEXT_BYTES_MAX`], and an entry has at most [`AUDIT_OBJECTS_MAX`]
//! objects. [`trail`](crate::intent::state::trail) says how many entries are kept per owner.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use pdp_api::{AUDIT_OBJECTS_MAX, AuditEntry, ObjectChange, Problem};
use tokio::sync::{mpsc, oneshot};

use crate::intent::state::StateFile;
use crate::intent::state::trail::{AuditRetention, RequestEnd, TrailWrite};
use crate::util::error_chain;

/// Entries that may wait to be written.
const QUEUE_MAX: usize = 1024;

/// Time for which entries without a waiting request are gathered into one write.
const GATHER_TIME: Duration = Duration::from_millis(50);

/// Longest method and path, error, or command that is kept, bytes.
const TEXT_BYTES_MAX: usize = 512;

/// Receives the entry's id once it is on the disk, or the reason why it is not.
type AuditReply = oneshot::Sender<Result<u64, String>>;

enum AuditOrder {
    /// Nobody waits for the write.
    Write(TrailWrite),
    /// The sender waits for the write.
    Begin(TrailWrite, AuditReply),
    Flush(oneshot::Sender<()>),
}

/// The audit log, open for writing.
#[derive(Clone, Debug)]
pub struct Audit {
    queue: mpsc::Sender<AuditOrder>,
}

/// A logged request that has not ended.
#[derive(Debug)]
pub struct PendingAudit {
    queue: mpsc::Sender<AuditOrder>,
    id: u64,
    start: Instant,
    /// True if somebody other than the HTTP handler reports the result.
    taken: AtomicBool,
}

impl Audit {
    /// Starts the writer thread, which ends with the last clone of this value.
    pub fn start(state: Arc<StateFile>) -> std::io::Result<Self> {
        let (queue, orders) = mpsc::channel(QUEUE_MAX);
        let clock = tokio::runtime::Builder::new_current_thread().enable_time().build()?;
        std::thread::Builder::new()
            .name("audit".into())
            .spawn(move || clock.block_on(write(&state, orders)))?;
        Ok(Self { queue })
    }

    /// Queues an entry to be written soon; waits while the queue is
    /// full. The log keeps `kept` entries of its owner.
    pub async fn note(&self, entry: AuditEntry, kept: AuditRetention) {
        send(&self.queue, TrailWrite::Entry(Box::new(entry), kept)).await;
    }

    /// Writes the entry of a request that has not acted yet.
    pub async fn begin(
        &self,
        entry: AuditEntry,
        kept: AuditRetention,
        start: Instant,
    ) -> Result<PendingAudit, Problem> {
        let id = commit(&self.queue, TrailWrite::Entry(Box::new(entry), kept)).await?;
        Ok(PendingAudit { queue: self.queue.clone(), id, start, taken: AtomicBool::new(false) })
    }

    /// Waits until all earlier entries are written.
    pub async fn flush(&self) {
        let (done, written) = oneshot::channel();
        if self.queue.send(AuditOrder::Flush(done)).await.is_ok() {
            let _ = written.await;
        }
    }
}

impl PendingAudit {
    /// Obliges the caller to [`PendingAudit::end`] the entry, whatever the handler answers.
    pub fn take(&self) {
        self.taken.store(true, Ordering::Relaxed);
    }

    /// True if somebody other than the HTTP handler reports the result.
    pub fn is_taken(&self) -> bool {
        self.taken.load(Ordering::Relaxed)
    }

    /// Logs the command that the request runs, before it runs.
    pub async fn runs(&self, command: &str) -> Result<(), Problem> {
        commit(&self.queue, TrailWrite::Command(self.id, cut(command))).await.map(drop)
    }

    /// Queues the changed objects for the request's entry. Blocks while the queue is full.
    pub fn changed_blocking(&self, mut objects: Vec<ObjectChange>) {
        let more = objects.len().saturating_sub(AUDIT_OBJECTS_MAX) as u64;
        objects.truncate(AUDIT_OBJECTS_MAX);
        self.send_blocking(TrailWrite::Objects(self.id, objects, more));
    }

    /// Queues the result of the request.
    pub async fn end(&self, status: u16, error: Option<&str>, exit: Option<i32>) {
        send(&self.queue, self.ended(status, error, exit)).await;
    }

    /// Like [`PendingAudit::end`], outside of an async task. Blocks while the queue is full.
    pub fn end_blocking(&self, status: u16, error: Option<&str>) {
        self.send_blocking(self.ended(status, error, None));
    }

    fn send_blocking(&self, write: TrailWrite) {
        if self.queue.blocking_send(AuditOrder::Write(write)).is_err() {
            writer_gone();
        }
    }

    fn ended(&self, status: u16, error: Option<&str>, exit: Option<i32>) -> TrailWrite {
        let error = error.map(line);
        TrailWrite::End(
            self.id,
            RequestEnd { status, error, duration_us: us(self.start), exit_code: exit },
        )
    }
}

/// Returns the microseconds since `start`.
pub fn us(start: Instant) -> u64 {
    u64::try_from(start.elapsed().as_micros()).unwrap_or(u64::MAX)
}

/// Returns a method and path, shortened for the log.
pub fn what(method: &str, path: &str) -> String {
    cut(&format!("{method} {path}"))
}

/// Returns an error's first line, shortened for the log.
pub fn line(error: &str) -> String {
    cut(error.lines().next().unwrap_or(""))
}

fn cut(text: &str) -> String {
    let end = text.floor_char_boundary(TEXT_BYTES_MAX);
    // An entry is one line wherever it is shown.
    text[..end].replace(|c: char| c.is_control(), "?")
}

fn writer_gone() {
    tracing::error!("the audit log's writer ended; restart the daemon");
}

async fn send(queue: &mpsc::Sender<AuditOrder>, write: TrailWrite) {
    if queue.send(AuditOrder::Write(write)).await.is_err() {
        writer_gone();
    }
}

/// Waits until the write is on the disk.
async fn commit(queue: &mpsc::Sender<AuditOrder>, write: TrailWrite) -> Result<u64, Problem> {
    let (done, written) = oneshot::channel();
    let refused = || {
        writer_gone();
        Problem::internal("the audit log's writer ended").hint("restart the daemon")
    };
    queue.send(AuditOrder::Begin(write, done)).await.map_err(|_| refused())?;
    written.await.map_err(|_| refused())?.map_err(Problem::internal)
}

async fn write(state: &StateFile, mut orders: mpsc::Receiver<AuditOrder>) {
    while let Some(first) = orders.recv().await {
        let mut lot = vec![first];
        let deadline = tokio::time::Instant::now() + GATHER_TIME;
        // Gather until a request waits, then write everything gathered so far.
        while matches!(lot.last(), Some(AuditOrder::Write(_))) && lot.len() < QUEUE_MAX {
            match tokio::time::timeout_at(deadline, orders.recv()).await {
                Ok(Some(order)) => lot.push(order),
                Ok(None) | Err(_) => break,
            }
        }
        while lot.len() < QUEUE_MAX
            && let Ok(order) = orders.try_recv()
        {
            lot.push(order);
        }
        finish(state, lot);
    }
}

/// Writes a batch and answers the waiting requests.
fn finish(state: &StateFile, lot: Vec<AuditOrder>) {
    let mut writes = Vec::new();
    // The waiting sender of each entry's id, in order; then the senders
    // that wait for anything else.
    let (mut rows, mut others, mut flushes) = (Vec::new(), Vec::new(), Vec::new());
    for order in lot {
        let (write, waits) = match order {
            AuditOrder::Write(write) => (write, None),
            AuditOrder::Begin(write, waits) => (write, Some(waits)),
            AuditOrder::Flush(done) => {
                flushes.push(done);
                continue;
            }
        };
        match write {
            TrailWrite::Entry(..) => rows.push(waits),
            _ => others.extend(waits),
        }
        writes.push(write);
    }
    let result = match writes.is_empty() {
        true => Ok(Vec::new()),
        false => state.trail.write(&writes).map_err(|error| error_chain(&error)),
    };
    if let Err(error) = &result {
        let rows = pdp_spec::count(writes.len(), "row");
        tracing::error!("the audit log lost {rows}: {error}");
    }
    let ids = result.as_ref().map_or(&[][..], Vec::as_slice);
    for (index, waits) in rows.into_iter().enumerate() {
        let id = result.as_ref().map_err(Clone::clone);
        // A receiver that went away needs no answer.
        let _ = waits.map(|waits| waits.send(id.map(|_| ids.get(index).copied().unwrap_or(0))));
    }
    for waits in others {
        let _ = waits.send(result.as_ref().map(|_| 0).map_err(Clone::clone));
    }
    for done in flushes {
        let _ = done.send(());
    }
}
