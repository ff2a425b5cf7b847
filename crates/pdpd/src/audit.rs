//! The audit log: a row a request, whoever came and whatever became of it.
//!
//! A request that may change something is written down before it acts, and refused if that can't
//! be done; its row has no result until it ended, and keeps none if the daemon is killed before.
//! All others are written once they are answered, by a thread of its own, several at a time: a
//! daemon that is killed may lose those of the last [`GATHER_TIME`].
//!
//! Limits: [`QUEUE_MAX`] rows wait to be written, then requests wait; [`WHAT_CHARS_MAX`] and
//! [`ERROR_CHARS_MAX`] of a row's texts; the rows kept are
//! [`AUDIT_ROWS_MAX`](crate::state::access::AUDIT_ROWS_MAX).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use pdp_api::{AuditEntry, Problem};
use tokio::sync::{mpsc, oneshot};

use crate::host::words;
use crate::state::State;

/// Rows that may wait to be written.
const QUEUE_MAX: usize = 1024;

/// How long rows are gathered before they are written together.
const GATHER_TIME: Duration = Duration::from_millis(50);

/// Characters of a method and path that are kept.
const WHAT_CHARS_MAX: usize = 512;

/// Characters of an error that are kept.
const ERROR_CHARS_MAX: usize = 512;

enum Order {
    Write(Box<AuditEntry>),
    Flush(oneshot::Sender<()>),
}

/// The log, open for writing.
#[derive(Clone, Debug)]
pub struct Audit {
    state: Arc<State>,
    queue: mpsc::Sender<Order>,
}

/// A request that was written down and has not ended.
#[derive(Debug)]
pub struct Begun {
    state: Arc<State>,
    id: u64,
    start: Instant,
    /// Somebody else than who answers says how it ended.
    taken: AtomicBool,
}

impl Audit {
    /// Starts the thread that writes; it ends with the last clone of this.
    pub fn start(state: Arc<State>) -> std::io::Result<Self> {
        let (queue, orders) = mpsc::channel(QUEUE_MAX);
        let to = state.clone();
        std::thread::Builder::new().name("audit".into()).spawn(move || write(&to, orders))?;
        Ok(Self { state, queue })
    }

    /// Has a row written soon; waits where too many do.
    pub async fn note(&self, entry: AuditEntry) {
        if self.queue.send(Order::Write(Box::new(entry))).await.is_err() {
            tracing::error!("the audit log is not written any more; start the daemon anew");
        }
    }

    /// Writes a row of a request that has not acted yet. Blocks.
    pub fn begin(&self, entry: AuditEntry, start: Instant) -> Result<Begun, Problem> {
        let id = self.state.audit(&[entry]).map_err(|error| Problem::internal(words(&error)))?;
        let taken = AtomicBool::new(false);
        Ok(Begun { state: self.state.clone(), id, start, taken })
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

    /// Writes down how it ended. Blocks.
    pub fn end(&self, status: u16, error: Option<&str>) {
        let error = error.map(line);
        if let Err(error) = self.state.audit_end(self.id, status, error.as_deref(), us(self.start))
        {
            tracing::error!("{}", words(&error));
        }
    }
}

/// Microseconds since then.
pub fn us(start: Instant) -> u64 {
    u64::try_from(start.elapsed().as_micros()).unwrap_or(u64::MAX)
}

/// A method and path as it is kept.
pub fn what(method: &str, path: &str) -> String {
    cut(&format!("{method} {path}"), WHAT_CHARS_MAX)
}

/// An error's first line as it is kept.
pub fn line(error: &str) -> String {
    cut(error.lines().next().unwrap_or(""), ERROR_CHARS_MAX)
}

fn cut(text: &str, chars_max: usize) -> String {
    // A row is one line wherever it is shown.
    let plain = |c: char| if c.is_control() { '?' } else { c };
    text.chars().take(chars_max).map(plain).collect()
}

fn write(state: &State, mut orders: mpsc::Receiver<Order>) {
    while let Some(first) = orders.blocking_recv() {
        if matches!(first, Order::Write(_)) {
            std::thread::sleep(GATHER_TIME);
        }
        let mut rows = Vec::new();
        let mut waiting = Vec::new();
        let mut next = Some(first);
        while let Some(order) = next {
            match order {
                Order::Write(row) => rows.push(*row),
                Order::Flush(done) => waiting.push(done),
            }
            next = if rows.len() < QUEUE_MAX { orders.try_recv().ok() } else { None };
        }
        if !rows.is_empty()
            && let Err(error) = state.audit(&rows)
        {
            tracing::error!("{} rows of the audit log are lost: {}", rows.len(), words(&error));
        }
        for done in waiting {
            let _ = done.send(());
        }
    }
}
