//! State, events and counters for watchers.
//!
//! The [`WatchHub`] has the status of each vnet, the events that led to it ([`log`]),
//! and the last sample. The reconcile loop and all changes report their actions at
//! once. One thread determines the effect on a vnet's status: it compares the new
//! status with the old one ([`diff`]), for vnets that were touched only.
//!
//! Some facts are not reported to the daemon: connected guests, routes in sync, counters, CPU
//! time. One sampler collects them for all watchers, and only while there are any.
//!
//! A reader ([`WatchReader`]) gets news when it can take them. Nothing waits for it and nothing is
//! stored for it. It gets the newest sample, and a gap and a snapshot if events are no longer kept.
//!
//! Limits: [`log::EVENTS_MAX`] events in total, with messages of [`log::MESSAGE_BYTES_MAX`];
//! [`READER_BYTES_PER_S`] for a reader after its first [`READER_BURST_BYTES`]; as many readers
//! as streams of the API. The sampler takes at most a 25th of a core.

mod diff;
pub mod log;
pub(crate) mod node_counters;
mod reader;
pub(crate) mod snapshot;
pub(crate) mod summary;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use pdp_api::{Detail, EventKind, SubstrateStatus, VnetStatus, WatchEvent};
use pdp_model::VnetStats;
use pdp_proto::mirror;
use tokio::sync::watch;

use crate::access::{AccessScope, Requester, current_requester};
use crate::host::query::HelperReply;
use crate::plan::key::ObjectKey;
use crate::util::{lock, now_ms};
use log::EventLog;
use snapshot::UsageSample;

pub use reader::{READER_BURST_BYTES, READER_BYTES_PER_S, WatchReader, WatchStart};

/// Creates an event of this object, without number and time.
pub(crate) use diff::event;

/// Hub from which all watchers read.
#[derive(Debug)]
pub struct WatchHub {
    inside: Mutex<WatchHubState>,
    /// Incremented at each change.
    version: watch::Sender<u64>,
    pub(crate) touched: Mutex<StaleStatuses>,
    pub(crate) touch: Condvar,
    readers: Mutex<Readers>,
    read: Condvar,
    pub(crate) latest_stats: Mutex<LatestStats>,
    /// Held while a status is determined and published.
    pub(crate) publishing: Mutex<()>,
}

#[derive(Debug, Default)]
struct WatchHubState {
    log: EventLog,
    vnets: BTreeMap<String, Arc<VnetStatus>>,
    /// Deleted vnets that are not gone yet.
    deleting: BTreeSet<String>,
    /// Vnets from before this run without a published status.
    expected: BTreeSet<String>,
    node: Option<SubstrateStatus>,
    sample: Option<Arc<UsageSample>>,
}

/// Objects whose status must be determined again.
#[derive(Debug, Default)]
pub(crate) struct StaleStatuses {
    pub(crate) vnets: BTreeSet<String>,
    pub(crate) node: bool,
}

#[derive(Debug, Default)]
struct Readers {
    wishes: BTreeMap<u64, SampleRequest>,
    next: u64,
}

/// Samples that a reader wants.
#[derive(Clone, Debug)]
pub(crate) struct SampleRequest {
    pub(crate) vnet: Option<String>,
    pub(crate) every: Duration,
    pub(crate) detail: Detail,
}

/// Last answers of the mux and mirrors, by vnet.
#[derive(Debug, Default)]
pub(crate) struct LatestStats {
    pub(crate) mux: BTreeMap<String, Arc<VnetStats>>,
    pub(crate) mirrors: BTreeMap<String, Arc<MirrorReplies>>,
}

/// Answers of a vnet's mirrors with their times, by socket path.
pub(crate) type MirrorReplies =
    BTreeMap<PathBuf, (Instant, HelperReply<mirror::MirrorStatusReply>)>;

impl Default for WatchHub {
    fn default() -> Self {
        Self {
            inside: Mutex::default(),
            version: watch::Sender::new(0),
            touched: Mutex::default(),
            touch: Condvar::new(),
            readers: Mutex::default(),
            read: Condvar::new(),
            latest_stats: Mutex::default(),
            publishing: Mutex::default(),
        }
    }
}

impl WatchHub {
    /// Publishes an event on behalf of the client for which this thread works.
    pub fn post(&self, event: WatchEvent) {
        self.post_for(event, current_requester().as_ref());
    }

    fn post_for(&self, event: WatchEvent, asker: Option<&Requester>) {
        let by_node = asker.is_some_and(|asker| asker.scope == AccessScope::Node);
        let who = asker.map(|asker| asker.identity.clone());
        let event = WatchEvent { at_ms: now_ms(), who, ..event };
        lock(&self.inside).log.push(event, by_node);
        self.notify_readers();
    }

    /// Requests that the status of the object's vnet, or of the node, is determined again.
    pub fn touch(&self, key: &ObjectKey) {
        match key.vnet_name() {
            Some(vnet) => drop(lock(&self.touched).vnets.insert(vnet.to_owned())),
            None => lock(&self.touched).node = true,
        }
        self.touch.notify_one();
    }

    /// Requests that the status of these vnets is determined again.
    pub fn touch_vnets<'a>(&self, vnets: impl IntoIterator<Item = &'a str>) {
        lock(&self.touched).vnets.extend(vnets.into_iter().map(str::to_owned));
        self.touch.notify_one();
    }

    /// Announces vnets from before this run, so that they cause no
    /// events. They stay, or are being removed.
    pub fn expect(
        &self,
        vnets: impl IntoIterator<Item = String>,
        removing: impl IntoIterator<Item = String>,
    ) {
        let mut inside = lock(&self.inside);
        inside.expected.extend(vnets);
        inside.deleting.extend(removing);
    }

    /// Publishes the status of a vnet. `None` means that it is not
    /// wanted; `removing` is true if parts of it exist.
    pub fn publish_vnet(&self, vnet: &str, status: Option<VnetStatus>, removing: bool) {
        let mut inside = lock(&self.inside);
        let WatchHubState { log, vnets, deleting: gone_soon, expected, .. } = &mut *inside;
        let expected = expected.remove(vnet);
        let mut events = Vec::new();
        match status {
            Some(status) => {
                let before = vnets.get(vnet).map(|before| &**before);
                if before.is_some() || !expected {
                    events = diff::vnet(vnet, before, &status);
                }
                gone_soon.remove(vnet);
                vnets.insert(vnet.to_owned(), Arc::new(status));
            }
            None => {
                let was = vnets.remove(vnet).is_some() | gone_soon.remove(vnet) | expected;
                if removing {
                    gone_soon.insert(vnet.to_owned());
                } else if was {
                    events.push(event(format!("vnet/{vnet}"), EventKind::Gone, None));
                }
            }
        }
        let none = events.is_empty();
        let at_ms = now_ms();
        events.into_iter().for_each(|event| log.push(WatchEvent { at_ms, ..event }, false));
        drop(inside);
        if !none {
            self.notify_readers();
        }
    }

    /// Publishes the status of the node.
    pub(crate) fn publish_node(&self, status: SubstrateStatus) {
        let mut inside = lock(&self.inside);
        let before = inside.node.take();
        let events = before.map(|before| diff::node_itself(&before, &status));
        let at_ms = now_ms();
        for event in events.into_iter().flatten() {
            inside.log.push(WatchEvent { at_ms, ..event }, false);
        }
        inside.node = Some(status);
        drop(inside);
        self.notify_readers();
    }

    pub(crate) fn publish_sample(&self, sample: UsageSample) {
        lock(&self.inside).sample = Some(Arc::new(sample));
        self.notify_readers();
    }

    fn notify_readers(&self) {
        self.version.send_modify(|version| *version += 1);
    }

    /// Returns the wishes of all readers of samples.
    pub(crate) fn wishes(&self) -> Vec<SampleRequest> {
        let readers = lock(&self.readers);
        readers.wishes.values().filter(|wish| wish.detail != Detail::None).cloned().collect()
    }

    /// Waits until a reader wants samples.
    pub(crate) fn wait_for_wishes(&self) -> Vec<SampleRequest> {
        loop {
            let wishes = self.wishes();
            if !wishes.is_empty() {
                return wishes;
            }
            let readers = lock(&self.readers);
            if readers.wishes.values().all(|wish| wish.detail == Detail::None) {
                drop(self.read.wait(readers));
            }
        }
    }

    /// Waits for this time, or until a new reader comes.
    pub(crate) fn wait_for_others(&self, pause: Duration) {
        let readers = lock(&self.readers);
        let next = readers.next;
        drop(self.read.wait_timeout_while(readers, pause, |readers| readers.next == next));
    }

    fn remove_reader(&self, reader: u64) {
        lock(&self.readers).wishes.remove(&reader);
    }
}
