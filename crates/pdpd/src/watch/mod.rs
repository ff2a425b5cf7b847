//! What is, what happened and what was counted, for everybody who watches.
//!
//! The [`Board`] has the status of each vnet, the events that led there ([`log`]), and the last sample. The keeper and
//! whoever makes changes say what they do at once; what that made of a vnet's status is found by one thread, by
//! comparing it with the one before ([`differ`]), for those vnets alone that something happened to. What nobody tells
//! the daemon (which guests are connected, whose routes are in step, counters, CPU time) is looked for only
//! while somebody watches, by one sampler for all who do ([`sampler`]).
//!
//! A reader ([`Reader`]) gets what is new when it can take it. Nothing waits for it and nothing is kept for it: of
//! samples it gets the newest, and where events are not kept any more it gets a gap and a snapshot.
//!
//! Limits: [`log::EVENTS_MAX`] events for all, [`log::MESSAGE_BYTES_MAX`] of each one's message,
//! [`READER_BYTES_PER_S`] for a reader after its first [`READER_BURST_BYTES`], and as many readers as there may be
//! streams ([`crate::http`]). The sampler takes [`sampler::LOAD_MAX`] of a core at most.

mod differ;
pub mod log;
mod reader;
mod sampler;
mod taken;
mod teller;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use pdp_api::{Detail, SubstrateStatus, VnetStatus, WatchEvent, What};
use pdp_proto::{mirror, mux};
use tokio::sync::watch;

use crate::access::{Asker, Scope, asker};
use crate::ask::Answer;
use crate::key::Key;
use crate::reconcile::lock;
use crate::state::access::now_ms;
use log::Log;
use taken::Taken;

pub use reader::{From, READER_BURST_BYTES, READER_BYTES_PER_S, Reader};
pub use sampler::LOAD_MAX;
pub use teller::{open, start};

/// An event of this object, with neither number nor time.
pub(crate) use differ::event;

/// What everybody who watches reads from.
#[derive(Debug)]
pub struct Board {
    inside: Mutex<Inside>,
    /// Counts what is new.
    version: watch::Sender<u64>,
    touched: Mutex<Touched>,
    touch: Condvar,
    readers: Mutex<Readers>,
    read: Condvar,
    seen: Mutex<Seen>,
    /// Held while a status is found and put on the board.
    telling: Mutex<()>,
}

#[derive(Debug, Default)]
struct Inside {
    log: Log,
    vnets: BTreeMap<String, Arc<VnetStatus>>,
    /// Deleted, and not gone yet.
    going: BTreeSet<String>,
    /// Vnets of before this run, of which nothing was told yet.
    expected: BTreeSet<String>,
    node: Option<SubstrateStatus>,
    sample: Option<Arc<Taken>>,
}

/// What something happened to, so that its status is to be found anew.
#[derive(Debug, Default)]
struct Touched {
    vnets: BTreeSet<String>,
    node: bool,
}

#[derive(Debug, Default)]
struct Readers {
    wishes: BTreeMap<u64, Wish>,
    next: u64,
}

/// What a reader wants of samples.
#[derive(Clone, Debug)]
struct Wish {
    vnet: Option<String>,
    every: Duration,
    detail: Detail,
}

/// What the mux and mirrors said last, by vnet.
#[derive(Debug, Default)]
struct Seen {
    mux: BTreeMap<String, Arc<mux::VnetStats>>,
    mirrors: BTreeMap<String, Arc<Mirrors>>,
}

/// What mirrors of a vnet said and when, by where they listen.
type Mirrors = BTreeMap<PathBuf, (Instant, Answer<mirror::Status>)>;

impl Default for Board {
    fn default() -> Self {
        Self {
            inside: Mutex::default(),
            version: watch::Sender::new(0),
            touched: Mutex::default(),
            touch: Condvar::new(),
            readers: Mutex::default(),
            read: Condvar::new(),
            seen: Mutex::default(),
            telling: Mutex::default(),
        }
    }
}

impl Board {
    /// Puts an event on the board, as asked for by who this thread works for.
    pub fn post(&self, event: WatchEvent) {
        self.post_for(event, asker().as_ref());
    }

    fn post_for(&self, event: WatchEvent, asker: Option<&Asker>) {
        let by_node = asker.is_some_and(|asker| asker.scope == Scope::Node);
        let who = asker.map(|asker| asker.who.clone());
        let event = WatchEvent { at_ms: now_ms(), who, ..event };
        lock(&self.inside).log.push(event, by_node);
        self.tell_readers();
    }

    /// Has the status found anew of what something happened to.
    pub fn touch(&self, key: &Key) {
        match key.vnet_name() {
            Some(vnet) => drop(lock(&self.touched).vnets.insert(vnet.to_owned())),
            None => lock(&self.touched).node = true,
        }
        self.touch.notify_one();
    }

    /// The same of vnets.
    pub fn touch_vnets<'a>(&self, vnets: impl IntoIterator<Item = &'a str>) {
        lock(&self.touched).vnets.extend(vnets.into_iter().map(str::to_owned));
        self.touch.notify_one();
    }

    /// Vnets that are no news: they were there before this run, to stay or to go.
    pub fn expect(
        &self,
        vnets: impl IntoIterator<Item = String>,
        going: impl IntoIterator<Item = String>,
    ) {
        let mut inside = lock(&self.inside);
        inside.expected.extend(vnets);
        inside.going.extend(going);
    }

    /// Puts on the board how a vnet is. `None`: it is not wanted; `going`: there is something of it.
    pub fn tell(&self, vnet: &str, status: Option<VnetStatus>, going: bool) {
        let mut inside = lock(&self.inside);
        let Inside { log, vnets, going: gone_soon, expected, .. } = &mut *inside;
        let expected = expected.remove(vnet);
        let mut events = Vec::new();
        match status {
            Some(status) => {
                let before = vnets.get(vnet).map(|before| &**before);
                if before.is_some() || !expected {
                    events = differ::vnet(vnet, before, &status);
                }
                gone_soon.remove(vnet);
                vnets.insert(vnet.to_owned(), Arc::new(status));
            }
            None => {
                let was = vnets.remove(vnet).is_some() | gone_soon.remove(vnet) | expected;
                if going {
                    gone_soon.insert(vnet.to_owned());
                } else if was {
                    events.push(event(format!("vnet/{vnet}"), What::Gone, None));
                }
            }
        }
        let none = events.is_empty();
        let at_ms = now_ms();
        events.into_iter().for_each(|event| log.push(WatchEvent { at_ms, ..event }, false));
        drop(inside);
        if !none {
            self.tell_readers();
        }
    }

    /// Puts on the board how the node is.
    fn tell_node(&self, status: SubstrateStatus) {
        let mut inside = lock(&self.inside);
        let before = inside.node.take();
        let events = before.map(|before| differ::node_itself(&before, &status));
        let at_ms = now_ms();
        for event in events.into_iter().flatten() {
            inside.log.push(WatchEvent { at_ms, ..event }, false);
        }
        inside.node = Some(status);
        drop(inside);
        self.tell_readers();
    }

    fn tell_sample(&self, sample: Taken) {
        lock(&self.inside).sample = Some(Arc::new(sample));
        self.tell_readers();
    }

    fn tell_readers(&self) {
        self.version.send_modify(|version| *version += 1);
    }

    /// Who reads samples wants what.
    fn wishes(&self) -> Vec<Wish> {
        let readers = lock(&self.readers);
        readers.wishes.values().filter(|wish| wish.detail != Detail::None).cloned().collect()
    }

    /// Waits while nobody wants samples.
    fn wait_for_wishes(&self) -> Vec<Wish> {
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

    /// Waits for so long, or until somebody else comes who reads.
    fn wait_for_others(&self, pause: Duration) {
        let readers = lock(&self.readers);
        let next = readers.next;
        drop(self.read.wait_timeout_while(readers, pause, |readers| readers.next == next));
    }

    fn leave(&self, reader: u64) {
        lock(&self.readers).wishes.remove(&reader);
    }
}
