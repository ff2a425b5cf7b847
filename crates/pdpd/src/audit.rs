//! The audit log: a row a request, whoever came and whatever became of it.
//!
//! A request that may change something is written down before it acts, and refused if that can't
//! be done; its row has no result until it ended, and keeps none if the daemon is killed before.
//! How it ended, and all other requests, are written within [`GATHER_TIME`]: a daemon that is killed
//! may lose that. One thread writes, several rows at a time, so that many who begin at once wait for
//! one write to the disk together; no other part of the daemon waits for it.
//!
//! Limits: [`QUEUE_MAX`] rows wait to be written, then requests wait; [`TEXT_BYTES_MAX`] of each of a
//! row's texts, and [`AUDIT_OBJECTS_MAX`] objects of a row; how many rows are kept of whom says
//! [`trail`](crate::state::trail).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use pdp_api::{AUDIT_OBJECTS_MAX, AuditEntry, Change, Problem};
use tokio::sync::{mpsc, oneshot};

use crate::host::words;
use crate::state::State;
use crate::state::trail::{End, Kept, Write};

/// Rows that may wait to be written.
const QUEUE_MAX: usize = 1024;

/// How long rows that nobody waits for are gathered before they are written together.
const GATHER_TIME: Duration = Duration::from_millis(50);

/// Bytes that are kept of a method and path, of an error, and of a command.
const TEXT_BYTES_MAX: usize = 512;

/// Told, once it is on the disk, the row's id, or why it is not.
type Written = oneshot::Sender<Result<u64, String>>;

enum Order {
    /// Nobody waits for it.
    Write(Write),
    /// Who sent it waits.
    Begin(Write, Written),
    Flush(oneshot::Sender<()>),
}

/// The log, open for writing.
#[derive(Clone, Debug)]
pub struct Audit {
    queue: mpsc::Sender<Order>,
}

/// A request that was written down and has not ended.
#[derive(Debug)]
pub struct Begun {
    queue: mpsc::Sender<Order>,
    id: u64,
    start: Instant,
    /// Somebody else than who answers says how it ended.
    taken: AtomicBool,
}

impl Audit {
    /// Starts the thread that writes; it ends with the last clone of this.
    pub fn start(state: Arc<State>) -> std::io::Result<Self> {
        let (queue, orders) = mpsc::channel(QUEUE_MAX);
        let clock = tokio::runtime::Builder::new_current_thread().enable_time().build()?;
        std::thread::Builder::new()
            .name("audit".into())
            .spawn(move || clock.block_on(write(&state, orders)))?;
        Ok(Self { queue })
    }

    /// Has a row written soon; waits where too many do. Of its owner `kept` rows are.
    pub async fn note(&self, entry: AuditEntry, kept: Kept) {
        send(&self.queue, Write::Row(Box::new(entry), kept)).await;
    }

    /// Writes a row of a request that has not acted yet.
    pub async fn begin(
        &self,
        entry: AuditEntry,
        kept: Kept,
        start: Instant,
    ) -> Result<Begun, Problem> {
        let id = commit(&self.queue, Write::Row(Box::new(entry), kept)).await?;
        Ok(Begun { queue: self.queue.clone(), id, start, taken: AtomicBool::new(false) })
    }

    /// Waits until all that was noted before is written.
    pub async fn flush(&self) {
        let (done, written) = oneshot::channel();
        if self.queue.send(Order::Flush(done)).await.is_ok() {
            let _ = written.await;
        }
    }
}

impl Begun {
    /// From now on the caller is to [`Begun::end`] it, whatever is answered.
    pub fn take(&self) {
        self.taken.store(true, Ordering::Relaxed);
    }

    /// Whether somebody else says how it ended.
    pub fn is_taken(&self) -> bool {
        self.taken.load(Ordering::Relaxed)
    }

    /// Writes down which command it runs, before it does.
    pub async fn runs(&self, command: &str) -> Result<(), Problem> {
        commit(&self.queue, Write::Command(self.id, cut(command))).await.map(drop)
    }

    /// Adds the changed objects to its row soon. Blocks while the queue is full.
    pub fn changed_blocking(&self, mut objects: Vec<Change>) {
        let more = objects.len().saturating_sub(AUDIT_OBJECTS_MAX) as u64;
        objects.truncate(AUDIT_OBJECTS_MAX);
        self.send_blocking(Write::Objects(self.id, objects, more));
    }

    /// Has it written down soon how it ended.
    pub async fn end(&self, status: u16, error: Option<&str>, exit: Option<i32>) {
        send(&self.queue, self.ended(status, error, exit)).await;
    }

    /// The same outside of a task. Blocks where many rows wait.
    pub fn end_blocking(&self, status: u16, error: Option<&str>) {
        self.send_blocking(self.ended(status, error, None));
    }

    fn send_blocking(&self, write: Write) {
        if self.queue.blocking_send(Order::Write(write)).is_err() {
            gone();
        }
    }

    fn ended(&self, status: u16, error: Option<&str>, exit: Option<i32>) -> Write {
        let error = error.map(line);
        Write::End(self.id, End { status, error, duration_us: us(self.start), exit })
    }
}

/// Microseconds since then.
pub fn us(start: Instant) -> u64 {
    u64::try_from(start.elapsed().as_micros()).unwrap_or(u64::MAX)
}

/// A method and path as it is kept.
pub fn what(method: &str, path: &str) -> String {
    cut(&format!("{method} {path}"))
}

/// An error's first line as it is kept.
pub fn line(error: &str) -> String {
    cut(error.lines().next().unwrap_or(""))
}

fn cut(text: &str) -> String {
    let end = text.floor_char_boundary(TEXT_BYTES_MAX);
    // A row is one line wherever it is shown.
    text[..end].replace(|c: char| c.is_control(), "?")
}

fn gone() {
    tracing::error!("the audit log is not written any more; start the daemon anew");
}

async fn send(queue: &mpsc::Sender<Order>, write: Write) {
    if queue.send(Order::Write(write)).await.is_err() {
        gone();
    }
}

/// Waits until it is on the disk.
async fn commit(queue: &mpsc::Sender<Order>, write: Write) -> Result<u64, Problem> {
    let (done, written) = oneshot::channel();
    let refused = || {
        gone();
        Problem::internal("the audit log is not written any more").hint("start the daemon anew")
    };
    queue.send(Order::Begin(write, done)).await.map_err(|_| refused())?;
    written.await.map_err(|_| refused())?.map_err(Problem::internal)
}

async fn write(state: &State, mut orders: mpsc::Receiver<Order>) {
    while let Some(first) = orders.recv().await {
        let mut lot = vec![first];
        let gathered = tokio::time::Instant::now() + GATHER_TIME;
        // Until somebody waits; then what is there goes along.
        while matches!(lot.last(), Some(Order::Write(_))) && lot.len() < QUEUE_MAX {
            match tokio::time::timeout_at(gathered, orders.recv()).await {
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

/// Writes a lot, and tells who waits.
fn finish(state: &State, lot: Vec<Order>) {
    let mut writes = Vec::new();
    // Of each row, in order, who waits for its id; then of what else somebody waits for.
    let (mut rows, mut others, mut flushes) = (Vec::new(), Vec::new(), Vec::new());
    for order in lot {
        let (write, waits) = match order {
            Order::Write(write) => (write, None),
            Order::Begin(write, waits) => (write, Some(waits)),
            Order::Flush(done) => {
                flushes.push(done);
                continue;
            }
        };
        match write {
            Write::Row(..) => rows.push(waits),
            _ => others.extend(waits),
        }
        writes.push(write);
    }
    let result = match writes.is_empty() {
        true => Ok(Vec::new()),
        false => state.trail.write(&writes).map_err(|error| words(&error)),
    };
    if let Err(error) = &result {
        let rows = pdp_spec::count(writes.len(), "row");
        tracing::error!("the audit log lost {rows}: {error}");
    }
    let ids = result.as_ref().map_or(&[][..], Vec::as_slice);
    for (index, waits) in rows.into_iter().enumerate() {
        let id = result.as_ref().map_err(Clone::clone);
        // Who went away needs no answer.
        let _ = waits.map(|waits| waits.send(id.map(|_| ids.get(index).copied().unwrap_or(0))));
    }
    for waits in others {
        let _ = waits.send(result.as_ref().map(|_| 0).map_err(Clone::clone));
    }
    for done in flushes {
        let _ = done.send(());
    }
}
