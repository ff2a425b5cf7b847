//! One who watches.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use pdp_api::{Cursor, Detail, Gap, Snapshot, VnetStatus, WatchEvent, WatchLine, WatchQuery};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::log::{Filter, Place, Read};
use super::taken::Taken;
use super::{Board, Wish};
use crate::reconcile::lock;
use crate::state::access::now_ms;
use crate::view;

/// Bytes a second for one reader, after its first [`READER_BURST_BYTES`].
pub const READER_BYTES_PER_S: u64 = 1 << 20;

/// Bytes that a reader gets at once that got few before.
pub const READER_BURST_BYTES: u64 = 4 << 20;

/// How long what is new is gathered, so that who reads is not woken for each event of many.
const GATHER: Duration = Duration::from_millis(20);

/// One who watches, until this is dropped.
#[derive(Debug)]
pub struct Reader {
    board: Arc<Board>,
    id: u64,
    filter: Filter,
    detail: Detail,
    every: Duration,
    next: Next,
    place: Place,
    /// Number of the last sample that it got.
    sample: u64,
    /// When it is to get another.
    due: Instant,
    version: watch::Receiver<u64>,
    budget: Budget,
    /// What is being written, which counts as seen.
    writing: Option<JoinHandle<Vec<u8>>>,
}

/// Where a reader begins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum From {
    /// With what is.
    Now,
    /// With the events since then that are kept, milliseconds since 1970.
    Since(u64),
    /// With the events after this one.
    After(Cursor),
}

impl From {
    /// As a query says.
    pub fn of(query: &WatchQuery) -> Self {
        match (&query.after, query.since_ms) {
            (Some(cursor), _) => Self::After(cursor.clone()),
            (None, Some(at_ms)) => Self::Since(at_ms),
            (None, None) => Self::Now,
        }
    }
}

/// What it is to get next.
#[derive(Debug)]
enum Next {
    /// So many events were lost, or nobody knows how many.
    Gap(Option<u64>),
    Snapshot,
    Events,
}

/// What a look found, to be written where it holds nobody up.
enum Found {
    Gap(Gap),
    Snapshot(Box<Snapshot>, Vec<(String, Arc<VnetStatus>)>),
    Events(Vec<WatchEvent>),
    Sample(Arc<Taken>),
}

/// Bytes that may be sent by now.
#[derive(Debug)]
struct Budget {
    bytes: f64,
    at: Instant,
}

impl Budget {
    fn new() -> Self {
        Self { bytes: READER_BURST_BYTES as f64, at: Instant::now() }
    }

    /// Takes bytes, of which more may be taken than there are; when there are some again.
    fn take(&mut self, bytes: usize) -> Instant {
        let now = Instant::now();
        let came = now.duration_since(self.at).as_secs_f64() * READER_BYTES_PER_S as f64;
        self.bytes = (self.bytes + came).min(READER_BURST_BYTES as f64) - bytes as f64;
        self.at = now;
        now + Duration::from_secs_f64((-self.bytes).max(0.0) / READER_BYTES_PER_S as f64)
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.board.leave(self.id);
    }
}

impl Reader {
    /// One more, of what there is from now on, or after a place.
    pub fn new(
        board: &Arc<Board>,
        filter: Filter,
        every: Duration,
        detail: Detail,
        from: &From,
    ) -> Self {
        let id = {
            let mut readers = lock(&board.readers);
            readers.next += 1;
            let id = readers.next;
            let wish = Wish { vnet: filter.vnet.clone(), every, detail };
            readers.wishes.insert(id, wish);
            board.read.notify_all();
            id
        };
        let inside = lock(&board.inside);
        let (next, place) = match from {
            From::Now => (Next::Snapshot, Place::default()),
            From::Since(at_ms) => (Next::Events, inside.log.since(*at_ms)),
            From::After(cursor) => match inside.log.find(&filter, cursor) {
                Some(place) => (Next::Events, place),
                None => (Next::Gap(None), Place::default()),
            },
        };
        let sample = inside.sample.as_ref().map_or(0, |sample| sample.number);
        drop(inside);
        Self {
            board: board.clone(),
            id,
            filter,
            detail,
            every,
            next,
            place,
            sample,
            due: Instant::now(),
            version: board.version.subscribe(),
            budget: Budget::new(),
            writing: None,
        }
    }

    /// The next lines, whole, when there are some. Dropping the future loses no event.
    pub async fn next(&mut self) -> Bytes {
        let ready = self.budget.take(0);
        tokio::time::sleep_until(ready).await;
        loop {
            if let Some(writing) = &mut self.writing {
                let bytes = writing.await.unwrap_or_default();
                self.writing = None;
                self.budget.take(bytes.len());
                return bytes.into();
            }
            self.version.borrow_and_update();
            let found = self.look();
            if !found.is_empty() {
                let (filter, detail) = (self.filter.clone(), self.detail);
                let bytes = move || write(found, &filter, detail);
                // Much is written on a thread of its own.
                self.writing = Some(tokio::task::spawn_blocking(bytes));
                continue;
            }
            let waits = lock(&self.board.inside)
                .sample
                .as_ref()
                .is_some_and(|sample| self.detail != Detail::None && sample.number > self.sample);
            tokio::select! {
                changed = self.version.changed() => {
                    if changed.is_err() {
                        // The board lives as long as this.
                        std::future::pending::<()>().await;
                    }
                    tokio::time::sleep(GATHER).await;
                }
                () = tokio::time::sleep_until(self.due), if waits => {}
            }
        }
    }

    /// What is new, which counts as seen from then on.
    fn look(&mut self) -> Vec<Found> {
        let mut found = Vec::new();
        let mut inside = lock(&self.board.inside);
        if let Next::Events = self.next {
            match inside.log.read(&self.filter, &mut self.place) {
                Read::Events(events) if events.is_empty() => {}
                Read::Events(events) => found.push(Found::Events(events)),
                Read::Lost(count) => self.next = Next::Gap(Some(count)),
            }
        }
        if let Next::Gap(lost) = self.next {
            found.push(Found::Gap(Gap { lost }));
            self.next = Next::Snapshot;
        }
        if let Next::Snapshot = self.next {
            self.next = Next::Events;
            let Cursor { boot, seq } = inside.log.cursor(&self.filter);
            self.place = inside.log.end(&self.filter);
            let in_scope = |name: &&String| self.filter.has(Some(name));
            let going = inside.going.iter().filter(in_scope).cloned().collect();
            let vnets = inside.vnets.iter().filter(|(name, _)| in_scope(name));
            let vnets = vnets.map(|(name, status)| (name.clone(), status.clone())).collect();
            let snapshot = Snapshot { boot, seq, at_ms: now_ms(), going, ..Snapshot::default() };
            found.push(Found::Snapshot(Box::new(snapshot), vnets));
        }
        let now = Instant::now();
        if self.detail != Detail::None
            && now >= self.due
            && let Some(sample) = &inside.sample
            && sample.number > self.sample
        {
            self.sample = sample.number;
            // In step with the sampler, which may be a little late each time.
            self.due = now + self.every - self.every / 8;
            found.push(Found::Sample(sample.clone()));
        }
        found
    }
}

/// As lines.
fn write(found: Vec<Found>, filter: &Filter, detail: Detail) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut line = |line: &WatchLine| {
        // Plain data with string keys, and a vector takes every byte.
        let _ = serde_json::to_writer(&mut bytes, line);
        bytes.push(b'\n');
    };
    for found in found {
        match found {
            Found::Gap(gap) => line(&WatchLine::Gap(gap)),
            Found::Snapshot(mut snapshot, vnets) => {
                snapshot.vnets =
                    vnets.iter().map(|(name, status)| view::summary(name, status)).collect();
                if filter.vnet.is_some()
                    && let Some((_, status)) = vnets.into_iter().next()
                {
                    snapshot.status = Some(Arc::unwrap_or_clone(status));
                }
                line(&WatchLine::Snapshot(*snapshot));
            }
            Found::Events(events) => {
                events.into_iter().for_each(|event| line(&WatchLine::Event(event)));
            }
            Found::Sample(taken) => {
                line(&WatchLine::Sample(Box::new(taken.sample(filter, detail))));
            }
        }
    }
    bytes
}
