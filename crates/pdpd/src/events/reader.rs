//! A watcher's connection to the hub.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use pdp_api::{Detail, EventCursor, Gap, Snapshot, VnetStatus, WatchEvent, WatchLine, WatchQuery};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::log::{EventFilter, LogPosition, LogRead};
use super::snapshot::UsageSample;
use super::summary::summary;
use super::{SampleRequest, WatchHub};
use crate::util::{lock, now_ms};

/// Rate limit of one reader after its first [`READER_BURST_BYTES`], bytes per second.
pub const READER_BYTES_PER_S: u64 = 1 << 20;

/// Bytes that a reader gets at once if it got little before.
pub const READER_BURST_BYTES: u64 = 4 << 20;

/// Time for which news are gathered, so that a reader is not woken for each single event.
const GATHER: Duration = Duration::from_millis(20);

/// A watcher, until it is dropped.
#[derive(Debug)]
pub struct WatchReader {
    hub: Arc<WatchHub>,
    id: u64,
    filter: EventFilter,
    detail: Detail,
    every: Duration,
    next: NextDelivery,
    place: LogPosition,
    /// Number of its last sample.
    sample: u64,
    /// Time at which the next sample is due.
    due: Instant,
    version: watch::Receiver<u64>,
    budget: SendBudget,
    /// Lines that are being formatted; they count as seen.
    writing: Option<JoinHandle<Vec<u8>>>,
}

/// Start of a watch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WatchStart {
    /// The current state.
    Now,
    /// Kept events since this time, milliseconds since 1970.
    Since(u64),
    /// Events after this one.
    After(EventCursor),
}

impl WatchStart {
    /// Returns the start that a query requests.
    pub fn of(query: &WatchQuery) -> Self {
        match (&query.after, query.since_ms) {
            (Some(cursor), _) => Self::After(cursor.clone()),
            (None, Some(at_ms)) => Self::Since(at_ms),
            (None, None) => Self::Now,
        }
    }
}

/// Next item for the reader.
#[derive(Debug)]
enum NextDelivery {
    /// This many events were lost; `None` if unknown.
    Gap(Option<u64>),
    Snapshot,
    Events,
}

/// Items that were found, to be formatted without holding a lock.
enum WatchPayload {
    Gap(Gap),
    Snapshot(Box<Snapshot>, Vec<(String, Arc<VnetStatus>)>),
    Events(Vec<WatchEvent>),
    Sample(Arc<UsageSample>),
}

/// Bytes that may be sent by now.
#[derive(Debug)]
struct SendBudget {
    bytes: f64,
    at: Instant,
}

impl SendBudget {
    fn new() -> Self {
        Self { bytes: READER_BURST_BYTES as f64, at: Instant::now() }
    }

    /// Takes bytes, possibly more than are available. Returns the time
    /// at which some are available again.
    fn take(&mut self, bytes: usize) -> Instant {
        let now = Instant::now();
        let earned = now.duration_since(self.at).as_secs_f64() * READER_BYTES_PER_S as f64;
        self.bytes = (self.bytes + earned).min(READER_BURST_BYTES as f64) - bytes as f64;
        self.at = now;
        now + Duration::from_secs_f64((-self.bytes).max(0.0) / READER_BYTES_PER_S as f64)
    }
}

impl Drop for WatchReader {
    fn drop(&mut self) {
        self.hub.remove_reader(self.id);
    }
}

impl WatchReader {
    /// Creates a reader of the current state and what follows, or of what follows a position.
    pub fn new(
        hub: &Arc<WatchHub>,
        filter: EventFilter,
        every: Duration,
        detail: Detail,
        from: &WatchStart,
    ) -> Self {
        let id = {
            let mut readers = lock(&hub.readers);
            readers.next += 1;
            let id = readers.next;
            let wish = SampleRequest { vnet: filter.vnet.clone(), every, detail };
            readers.wishes.insert(id, wish);
            hub.read.notify_all();
            id
        };
        let inside = lock(&hub.inside);
        let (next, place) = match from {
            WatchStart::Now => (NextDelivery::Snapshot, LogPosition::default()),
            WatchStart::Since(at_ms) => (NextDelivery::Events, inside.log.since(*at_ms)),
            WatchStart::After(cursor) => match inside.log.find(&filter, cursor) {
                Some(place) => (NextDelivery::Events, place),
                None => (NextDelivery::Gap(None), LogPosition::default()),
            },
        };
        let sample = inside.sample.as_ref().map_or(0, |sample| sample.number);
        drop(inside);
        Self {
            hub: hub.clone(),
            id,
            filter,
            detail,
            every,
            next,
            place,
            sample,
            due: Instant::now(),
            version: hub.version.subscribe(),
            budget: SendBudget::new(),
            writing: None,
        }
    }

    /// Returns the next complete lines, once there are some. Dropping the future loses no event.
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
            let found = self.collect_updates();
            if !found.is_empty() {
                let (filter, detail) = (self.filter.clone(), self.detail);
                let bytes = move || write(found, &filter, detail);
                // Large amounts are formatted on a blocking thread.
                self.writing = Some(tokio::task::spawn_blocking(bytes));
                continue;
            }
            let waits = lock(&self.hub.inside)
                .sample
                .as_ref()
                .is_some_and(|sample| self.detail != Detail::None && sample.number > self.sample);
            tokio::select! {
                changed = self.version.changed() => {
                    if changed.is_err() {
                        // The hub lives as long as this reader.
                        std::future::pending::<()>().await;
                    }
                    tokio::time::sleep(GATHER).await;
                }
                () = tokio::time::sleep_until(self.due), if waits => {}
            }
        }
    }

    /// Returns the news, which count as seen from then on.
    fn collect_updates(&mut self) -> Vec<WatchPayload> {
        let mut found = Vec::new();
        let mut inside = lock(&self.hub.inside);
        if let NextDelivery::Events = self.next {
            match inside.log.read(&self.filter, &mut self.place) {
                LogRead::Events(events) if events.is_empty() => {}
                LogRead::Events(events) => found.push(WatchPayload::Events(events)),
                LogRead::Lost(count) => self.next = NextDelivery::Gap(Some(count)),
            }
        }
        if let NextDelivery::Gap(lost) = self.next {
            found.push(WatchPayload::Gap(Gap { lost }));
            self.next = NextDelivery::Snapshot;
        }
        if let NextDelivery::Snapshot = self.next {
            self.next = NextDelivery::Events;
            let EventCursor { boot, seq } = inside.log.cursor(&self.filter);
            self.place = inside.log.end(&self.filter);
            let in_scope = |name: &&String| self.filter.selects(Some(name));
            let removing = inside.deleting.iter().filter(in_scope).cloned().collect();
            let vnets = inside.vnets.iter().filter(|(name, _)| in_scope(name));
            let vnets = vnets.map(|(name, status)| (name.clone(), status.clone())).collect();
            let snapshot = Snapshot { boot, seq, at_ms: now_ms(), removing, ..Snapshot::default() };
            found.push(WatchPayload::Snapshot(Box::new(snapshot), vnets));
        }
        let now = Instant::now();
        if self.detail != Detail::None
            && now >= self.due
            && let Some(sample) = &inside.sample
            && sample.number > self.sample
        {
            self.sample = sample.number;
            // Aligned with the sampler, which may be slightly late each time.
            self.due = now + self.every - self.every / 8;
            found.push(WatchPayload::Sample(sample.clone()));
        }
        found
    }
}

/// Formats the items as lines.
fn write(found: Vec<WatchPayload>, filter: &EventFilter, detail: Detail) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut line = |line: &WatchLine| {
        // Plain data with string keys, written to a vector: can't fail.
        let _ = serde_json::to_writer(&mut bytes, line);
        bytes.push(b'\n');
    };
    for found in found {
        match found {
            WatchPayload::Gap(gap) => line(&WatchLine::Gap(gap)),
            WatchPayload::Snapshot(mut snapshot, vnets) => {
                snapshot.vnets = vnets.iter().map(|(name, status)| summary(name, status)).collect();
                if filter.vnet.is_some()
                    && let Some((_, status)) = vnets.into_iter().next()
                {
                    snapshot.status = Some(Arc::unwrap_or_clone(status));
                }
                line(&WatchLine::Snapshot(*snapshot));
            }
            WatchPayload::Events(events) => {
                events.into_iter().for_each(|event| line(&WatchLine::Event(event)));
            }
            WatchPayload::Sample(taken) => {
                line(&WatchLine::Sample(Box::new(taken.sample(filter, detail))));
            }
        }
    }
    bytes
}
