//! Keeps the machine as is wanted: says which object is worked on when, and by whom.
//!
//! Each object has a key in a queue ([`Queue`]) and is looked at when what is planned for it changes,
//! when one of its processes ends, when what it waited for has come, and when its own back-off ends: so
//! what a change costs follows from what it changes and not from what there is. All are looked at once
//! at the start, and each every [`RESYNC_PAUSE`]. One thread waits for processes to end and for times to
//! come; [`WORKERS`] others make the steps ([`Reconciler`]).
//!
//! One object's failure is its own: it is told in its health and tried again with growing pauses
//! ([`Backoff`]). A step may take a worker for as long as a call to a helper, which runs on its tenant's
//! share of the CPU, takes at most ([`crate::control::CALL_MAX`]), or one of the OCI runtime. So
//! that others don't wait for that, a tenant, or a vnet that is no tenant's, has 4 of 32 workers at most, tenants that
//! have one leave 8 to those that have none, and all of them 4 to operators ([`WORKERS`]). Who has none gets the next
//! that is free: it takes 28 such tenants to have all that are theirs, and then one is free every 20 s / 32 on average.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Condvar, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

use pdp_api::{Progress, What};
use pdp_net::interface::Watch;
use pdp_spec::shared;
use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};

use crate::backoff::Backoff;
use crate::host::{HostError, words};
use crate::key::Key;
use crate::machine::Machine;
use crate::plan::{Places, Plan};
use crate::ports::Touched;
use crate::queue::{Bounds, Queue};
use crate::reconcile::{CutOff, Doing, Next, Reconciler, Started, lock};
use crate::state::State;
use crate::watch::{Board, event};

/// Steps that are made at a time; of those, for one tenant, or one vnet that is no tenant's.
const WORKERS: Bounds = Bounds {
    workers: shared::WORKERS.total.unwrap() as usize,
    per_owner: shared::WORKERS.tenant as usize,
    newcomers: 8,
    operators: shared::WORKERS.operators as usize,
};

/// Bounds of the pause before what is under way is looked at again, which is a quarter of the time
/// that it has taken until then.
const LOOK_PAUSE_MIN: Duration = Duration::from_millis(2);
const LOOK_PAUSE_MAX: Duration = Duration::from_secs(1);

/// How long who asked for a change waits for what is under way.
const PATIENCE: Duration = Duration::from_secs(10);

/// Pause before an external interface that failed is tried again while its device stays as it is.
const EXTERNAL_PAUSE: Duration = Duration::from_secs(1);

/// Pause before an object that is as planned is looked at though nothing happened.
const RESYNC_PAUSE: Duration = Duration::from_secs(600);

/// Objects that wait for each other in a row: a guest, its vnet, an external interface, the mux.
const AFTER_MAX: u32 = 4;

/// Pause before another look at a process that ended as its start was over.
const SETTLE_PAUSE: Duration = Duration::from_millis(50);

/// How an object is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Health {
    /// Times that its process was started again since pdpd knows it.
    pub restarts: u64,
    /// Those of its TAP helper.
    pub tap_restarts: u64,
    /// Those of its route mirror.
    pub mirror_restarts: u64,
    /// Those of the helper of its way out and in.
    pub management_restarts: u64,
    /// What is wrong; `None`: nothing.
    pub problem: Option<String>,
}

/// An object that can't be taken down.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stuck {
    /// The object.
    pub key: Key,
    /// Why not, as the last try found.
    pub why: String,
    /// Time since the first try of this daemon that failed.
    pub time: Duration,
}

/// What the keeper tells who waits for it.
#[derive(Debug)]
pub enum News {
    /// What is being done.
    Step(Progress),
    /// All that was changed is as planned, or its failure is told, or it is taking long.
    Done,
}

/// Between two looks at ports that stay in the kernel.
const PORTS_INTERVAL: Duration = Duration::from_secs(1);

/// Keeps the machine.
#[derive(Debug)]
pub struct Keeper {
    machine: Arc<dyn Machine>,
    places: Places,
    reconciler: Reconciler,
    plan: RwLock<Arc<Plan>>,
    table: Mutex<Table>,
    /// Told when a key waits for a worker.
    work: Condvar,
    /// Wakes the thread that waits.
    wake: UnixStream,
    woken: UnixStream,
    watches: Mutex<Watches>,
    epoll: OwnedFd,
    /// Of devices of external interfaces.
    devices: Watch,
    /// When ports that stay in the kernel were looked at last, and whether what happens to them is waited for.
    ports_seen: Mutex<Instant>,
    watches_ports: AtomicBool,
    /// Where it tells what happens.
    board: Arc<Board>,
}

#[derive(Debug)]
struct Table {
    queue: Queue<Key>,
    objects: BTreeMap<Key, Object>,
    /// Keys of those that are not as planned, [`How::Done`].
    open: BTreeSet<Key>,
    tickets: Vec<Ticket>,
    /// Steps that began, and that ended.
    steps: u64,
    ends: u64,
    stopped: bool,
}

/// One that waits for a change.
#[derive(Debug)]
struct Ticket {
    keys: BTreeSet<Key>,
    left: BTreeSet<Key>,
    news: Sender<News>,
}

#[derive(Debug, Default)]
struct Object {
    how: How,
    backoff: Backoff,
    /// `None` before the first step that came to something.
    health: Option<Health>,
    /// What is under way, and since when.
    waiting: Option<(String, Instant)>,
    /// Since when it can't be taken down.
    stays: Option<Instant>,
    /// What was told last.
    told: String,
    /// Processes that were started and not counted yet.
    started: Started,
    /// Objects that go on once a step of this has come to something.
    dependents: BTreeSet<Key>,
    /// Which of all steps its last one was, by their ends.
    end: u64,
    /// Directories of processes that ended.
    ended: Vec<PathBuf>,
    /// What runs of it is to be ended and started anew, as somebody wants it.
    renew: bool,
    /// Somebody wants it otherwise than when its step began: a failure of that step is no reason to pause.
    asked: bool,
}

#[derive(Debug, Default, PartialEq, Eq)]
enum How {
    /// To be looked at, or being looked at.
    #[default]
    Active,
    /// Something is under way.
    Waits,
    After(Key),
    Failed,
    Done,
}

/// Processes whose end is waited for.
#[derive(Debug, Default)]
struct Watches {
    by_directory: BTreeMap<PathBuf, u64>,
    by_token: BTreeMap<u64, (PathBuf, Key, OwnedFd)>,
    next: u64,
}

impl Object {
    fn health(&mut self) -> &mut Health {
        self.health.get_or_insert_default()
    }

    /// Counts what was started, but for what was to be started anew: that is neither a failure nor a sign of one.
    /// What that was, and whether it was there before.
    fn count(&mut self, now: Instant, renewed: bool) -> (Started, bool) {
        let started = std::mem::take(&mut self.started);
        if started == Started::default() {
            return (started, false);
        }
        if renewed && started.itself {
            self.renew = false;
            self.backoff = Backoff::default();
            self.backoff.started(now);
            return (started, true);
        }
        self.backoff.started(now);
        // The first start is no restart.
        if let Some(health) = &mut self.health {
            health.restarts += u64::from(started.itself);
            health.tap_restarts += u64::from(started.tap);
            health.mirror_restarts += u64::from(started.mirror);
            health.management_restarts += u64::from(started.management);
        }
        (started, self.health.is_some())
    }
}

impl Table {
    /// Has a key looked at as soon as can be.
    fn enqueue(&mut self, key: &Key) {
        let object = self.objects.entry(key.clone()).or_default();
        object.how = How::Active;
        self.open.insert(key.clone());
        self.queue.add(key.clone());
    }

    /// Whether nobody needs to wait for an object any more.
    fn is_settled(&self, key: &Key) -> bool {
        self.is_settled_by(key, AFTER_MAX)
    }

    fn is_settled_by(&self, key: &Key, steps: u32) -> bool {
        let Some(object) = self.objects.get(key) else { return true };
        match &object.how {
            How::Active => false,
            How::Waits => {
                object.waiting.as_ref().is_some_and(|(_, since)| since.elapsed() > PATIENCE)
            }
            // It goes on once the other is as planned.
            How::After(other) => {
                let done = self.objects.get(other).is_none_or(|other| other.how == How::Done);
                !done && steps > 0 && self.is_settled_by(other, steps - 1)
            }
            // Of what is to go another try may come to something, as who waits would try again.
            How::Failed => object.stays.is_none_or(|since| since.elapsed() > PATIENCE),
            How::Done => true,
        }
    }

    /// Tells who waits for nothing more.
    fn settle(&mut self, key: &Key) {
        if self.tickets.is_empty() {
            return;
        }
        let mut tickets = std::mem::take(&mut self.tickets);
        let failed = self.objects.get(key).is_some_and(|object| object.how != How::Done);
        tickets.retain_mut(|ticket| {
            if failed {
                // Those that wait for it as well.
                ticket.left.retain(|key| !self.is_settled(key));
            } else if self.is_settled(key) {
                ticket.left.remove(key);
            }
            let done = ticket.left.is_empty();
            if done {
                // Who went away needs no news.
                let _ = ticket.news.send(News::Done);
            }
            !done
        });
        self.tickets = tickets;
    }

    /// Tells what is done for an object, once.
    fn tell(&mut self, key: &Key, what: &str) {
        if let Some(object) = self.objects.get_mut(key) {
            if object.told == what {
                return;
            }
            what.clone_into(&mut object.told);
        }
        tracing::info!("{what}");
        self.send(key, what);
    }

    fn send(&self, key: &Key, what: &str) {
        for ticket in self.tickets.iter().filter(|ticket| ticket.keys.contains(key)) {
            let total = ticket.keys.len() as u64;
            let done = total - ticket.left.len() as u64;
            let _ = ticket.news.send(News::Step(Progress { done, total, what: what.into() }));
        }
    }

    fn wake_dependents(&mut self, key: &Key) {
        let Some(object) = self.objects.get_mut(key) else { return };
        for dependent in std::mem::take(&mut object.dependents) {
            if self.objects.contains_key(&dependent) {
                self.enqueue(&dependent);
            }
        }
    }

    /// An object inside of another, which goes first.
    fn inner(&self, key: &Key) -> Option<Key> {
        let after = |first: Key, belongs: &dyn Fn(&Key) -> bool| {
            let found = self.objects.range(first..).next().map(|(key, _)| key);
            found.filter(|key| belongs(key)).cloned()
        };
        match key {
            Key::External(_) | Key::Guest { .. } => None,
            Key::Node { vnet, node } => after(Key::guest(vnet, node, 0), &|key| {
                key.vnet_name() == Some(vnet) && key.node_name() == node
            }),
            Key::Vnet(vnet) => {
                let inside = |key: &Key| key.vnet_name() == Some(vnet);
                after(Key::node(vnet, ""), &inside)
                    .or_else(|| after(Key::guest(vnet, "", 0), &inside))
            }
            // The mux of what can't be taken down has nothing to do any more.
            Key::Mux => {
                let mut others = self.objects.keys();
                let node = [Key::Mux, Key::Leftovers];
                others.find(|of| !node.contains(of) && !self.is_stuck(of, AFTER_MAX)).cloned()
            }
            Key::Leftovers => self.objects.keys().find(|of| **of != Key::Leftovers).cloned(),
        }
    }

    /// True for an object that can't be taken down, and for one that waits for such a one.
    fn is_stuck(&self, key: &Key, steps: u32) -> bool {
        let Some(object) = self.objects.get(key) else { return false };
        let waits = match &object.how {
            How::After(other) => steps > 0 && self.is_stuck(other, steps - 1),
            _ => false,
        };
        object.stays.is_some() || waits
    }
}

impl Keeper {
    /// Of this machine, which is to be as planned. Nothing is done before it runs ([`Keeper::run`]).
    pub fn new(
        machine: Arc<dyn Machine>,
        state: Arc<State>,
        places: Places,
        plan: Arc<Plan>,
    ) -> anyhow::Result<Self> {
        let (wake, woken) = UnixStream::pair()?;
        wake.set_nonblocking(true)?;
        woken.set_nonblocking(true)?;
        let mut table = Table {
            queue: Queue::new(WORKERS),
            objects: BTreeMap::new(),
            open: BTreeSet::new(),
            tickets: Vec::new(),
            steps: 0,
            ends: 0,
            stopped: false,
        };
        for text in state.things()?.into_keys() {
            match text.parse::<Key>() {
                Ok(key) => {
                    // The vnet of what is taken down lets it go.
                    key.vnet_name().map(Key::vnet).iter().for_each(|vnet| table.enqueue(vnet));
                    table.enqueue(&key);
                }
                Err(_) => tracing::warn!("journal: {text:?} is not of this version; left alone"),
            }
        }
        plan.keys().iter().for_each(|key| table.enqueue(key));
        table.enqueue(&Key::Leftovers);
        Ok(Self {
            reconciler: Reconciler::new(machine.clone(), state, places.clone()),
            machine,
            places,
            plan: RwLock::new(plan),
            table: Mutex::new(table),
            work: Condvar::new(),
            wake,
            woken,
            watches: Mutex::default(),
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            devices: Watch::new()?,
            ports_seen: Mutex::new(Instant::now()),
            watches_ports: AtomicBool::new(false),
            board: Arc::default(),
        })
    }

    /// Where it tells what happens.
    pub fn board(&self) -> &Arc<Board> {
        &self.board
    }

    /// What is wanted now.
    pub fn plan(&self) -> Arc<Plan> {
        self.plan.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Wants a plan from now on, and tries at once what failed and is to be tried again by it. What is
    /// told then ends with [`News::Done`].
    pub fn want(&self, plan: Arc<Plan>, retry: impl Fn(&Key) -> bool) -> Receiver<News> {
        let (sender, news) = mpsc::channel();
        let mut table = lock(&self.table);
        let before = {
            let mut current = self.plan.write().unwrap_or_else(PoisonError::into_inner);
            std::mem::replace(&mut *current, plan.clone())
        };
        let mut keys = plan.changed_from(&before);
        keys.extend(table.open.iter().filter(|key| retry(key)).cloned());
        if plan.is_empty() || plan.damaged != before.damaged {
            keys.insert(Key::Leftovers);
        }
        for key in &keys {
            let object = table.objects.entry(key.clone()).or_default();
            object.backoff.forgive();
            object.asked = true;
            table.enqueue(key);
        }
        if keys.is_empty() {
            let _ = sender.send(News::Done);
        } else {
            table.tickets.push(Ticket { left: keys.clone(), keys, news: sender });
        }
        drop(table);
        self.work.notify_one();
        news
    }

    /// Has what runs of objects ended and started anew, without a pause. What is told then ends with [`News::Done`].
    /// Those that are not to be are left alone.
    pub fn restart(&self, mut keys: BTreeSet<Key>) -> Receiver<News> {
        let (sender, news) = mpsc::channel();
        let mut table = lock(&self.table);
        let plan = self.plan();
        keys.retain(|key| plan.has(key));
        if keys.is_empty() {
            let _ = sender.send(News::Done);
            return news;
        }
        for key in &keys {
            let object = table.objects.entry(key.clone()).or_default();
            object.backoff.forgive();
            object.asked = true;
            object.renew = true;
            table.enqueue(key);
        }
        table.tickets.push(Ticket { left: keys.clone(), keys, news: sender });
        drop(table);
        self.work.notify_one();
        news
    }

    /// How an object is; `None` before the first step that came to something, and once it is gone.
    pub fn health(&self, key: &Key) -> Option<Health> {
        lock(&self.table).objects.get(key)?.health.clone()
    }

    /// What is wrong with objects that are to be, or to be gone, if they are asked for.
    pub fn problems(&self, of: impl Fn(&Key) -> bool) -> Vec<(Key, String)> {
        let table = lock(&self.table);
        let mut problems = Vec::new();
        // One that is as planned has none.
        for key in table.open.iter().filter(|key| of(key)) {
            let health = table.objects.get(key).and_then(|object| object.health.as_ref());
            if let Some(problem) = health.and_then(|health| health.problem.as_ref()) {
                problems.push((key.clone(), problem.clone()));
            }
        }
        problems
    }

    /// What can't be taken down, though it is to be.
    pub fn stuck(&self) -> Vec<Stuck> {
        let table = lock(&self.table);
        let stuck = table.open.iter().filter_map(|key| {
            let object = table.objects.get(key)?;
            let (since, health) = (object.stays?, object.health.as_ref()?);
            Some(Stuck { key: key.clone(), why: health.problem.clone()?, time: since.elapsed() })
        });
        stuck.collect()
    }

    /// Why frames can't go over the device of an external interface.
    pub fn cut_off(&self, external: &str) -> Option<CutOff> {
        self.reconciler.cut_off(external)
    }

    /// As [`Reconciler::instead_of_xdp`].
    pub fn instead_of_xdp(&self, external: &str) -> Option<String> {
        self.reconciler.instead_of_xdp(external)
    }

    /// Whether an external interface loses long frames that senders leave to its device.
    pub fn loses_long_frames(&self, external: &str) -> bool {
        self.reconciler.loses_long_frames(external)
    }

    /// Whether there may be anything of a vnet, wanted or not: it is in the journal, or will be.
    pub fn knows(&self, vnet: &str) -> bool {
        lock(&self.table).objects.contains_key(&Key::vnet(vnet))
    }

    /// Objects that are not as they are planned, or not gone, by vnet and node, or the vnet itself; `None` where
    /// another plan than this is followed.
    pub fn open(&self, plan: &Arc<Plan>) -> Option<BTreeSet<(String, Option<String>)>> {
        let table = lock(&self.table);
        if !Arc::ptr_eq(&self.plan(), plan) {
            return None;
        }
        let keys = table.open.iter().filter_map(|key| {
            let node = matches!(key, Key::Node { .. } | Key::Guest { .. }).then(|| key.node_name());
            Some((key.vnet_name()?.to_owned(), node.map(str::to_owned)))
        });
        Some(keys.collect())
    }

    /// Vnets of which there may be something and that are not wanted.
    pub fn going(&self) -> Vec<String> {
        let plan = self.plan();
        let table = lock(&self.table);
        let names = table.objects.keys().filter_map(Key::vnet_name);
        let names: BTreeSet<&str> = names.filter(|name| !plan.vnets.contains_key(*name)).collect();
        names.into_iter().map(str::to_owned).collect()
    }

    /// What is not gone yet of a vnet, though it is to be.
    pub fn unwanted(&self, vnet: &str) -> Vec<Key> {
        let plan = self.plan();
        let table = lock(&self.table);
        // What is to go is as planned once it is gone.
        let keys = table.open.iter();
        keys.filter(|key| key.vnet_name() == Some(vnet) && !plan.has(key)).cloned().collect()
    }

    /// Steps made so far.
    pub fn steps(&self) -> u64 {
        lock(&self.table).steps
    }

    /// Ends [`Keeper::run`], after the steps that are being made.
    pub fn stop(&self) {
        lock(&self.table).stopped = true;
        self.work.notify_all();
        self.wake();
    }

    /// Works until it is stopped.
    ///
    /// # Panics
    /// If a step does; the others have ended then.
    pub fn run(&self) {
        let or_stop = |work: &dyn Fn()| {
            if let Err(panic) = catch_unwind(AssertUnwindSafe(work)) {
                self.stop();
                std::panic::resume_unwind(panic);
            }
        };
        // First what nothing is known of: it may be where something else is to be.
        or_stop(&|| {
            let mut doing = Doing {
                told: &|what| tracing::info!("{what}"),
                inner: None,
                held: false,
                renew: false,
                started: Started::default(),
                wake: Vec::new(),
                again: None,
                newest: &|| self.plan(),
            };
            let first = self.reconciler.step(&Key::Leftovers, &self.plan(), &mut doing);
            // It is in the queue as well.
            first.err().iter().for_each(|error| tracing::warn!("{}", words(error)));
        });
        std::thread::scope(|scope| {
            for _ in 0..WORKERS.workers {
                scope.spawn(|| or_stop(&|| while self.work() {}));
            }
            or_stop(&|| while self.wait() {});
        });
    }

    // ---- workers

    /// Waits for a key and makes a step; false when it is over.
    fn work(&self) -> bool {
        let mut table = lock(&self.table);
        let key = loop {
            if table.stopped {
                return false;
            }
            match table.queue.take() {
                Some(key) => break key,
                None => table = self.work.wait(table).unwrap_or_else(PoisonError::into_inner),
            }
        };
        // Whoever has work for another has one more woken.
        self.work.notify_one();
        table.steps += 1;
        let began = table.ends;
        let inner = table.inner(&key);
        table.open.insert(key.clone());
        let object = table.objects.entry(key.clone()).or_default();
        let held = object.backoff.waits(Instant::now());
        let renew = object.renew;
        object.asked = false;
        let ended = std::mem::take(&mut object.ended);
        drop(table);
        for directory in ended {
            self.tell_end(&key, &directory, renew);
        }
        let plan = self.plan();
        let mut doing = Doing {
            told: &|what| lock(&self.table).tell(&key, what),
            inner,
            held,
            renew,
            started: Started::default(),
            wake: Vec::new(),
            again: None,
            newest: &|| self.plan(),
        };
        let result = self.reconciler.step(&key, &plan, &mut doing);
        let Doing { started, wake, again, .. } = doing;
        let pause = match self.watch(&key, &plan, &result) {
            true => again.unwrap_or(RESYNC_PAUSE).clamp(LOOK_PAUSE_MIN, RESYNC_PAUSE),
            false => SETTLE_PAUSE,
        };
        self.end(&key, began, result, (started, renew), wake, pause);
        true
    }

    /// `renew`: it was to be started anew.
    fn tell_end(&self, key: &Key, directory: &Path, renew: bool) {
        // What was made to end may be removed, with how that was.
        let how = match (renew, self.machine.has_directory(directory)) {
            (true, _) => Some("as was asked".to_owned()),
            (false, true) => Some(self.machine.ending(directory)),
            (false, false) => None,
        };
        let shown = how.as_ref().map(|how| format!(" {how}")).unwrap_or_default();
        tracing::info!("{} ended{shown}", directory.display());
        let id = directory.file_name().unwrap_or_default().to_string_lossy();
        self.board.post(event(key.process_object(&id), What::Ended, how));
    }

    fn tell_start(&self, key: &Key, started: Started, again: bool) {
        let what = if again { What::Restarted } else { What::Started };
        let object = key.object();
        let own = match key {
            Key::Node { .. } => format!("{object}/control"),
            _ => object.clone(),
        };
        let tap = format!("{object}/tap");
        let mirror = format!("{object}/mirror");
        for (_, object) in [(started.itself, own), (started.tap, tap), (started.mirror, mirror)]
            .into_iter()
            .filter(|it| it.0)
        {
            self.board.post(event(object, what, None));
        }
    }

    fn end(
        &self,
        key: &Key,
        began: u64,
        result: Result<Next, HostError>,
        (started, renewed): (Started, bool),
        wake: Vec<Key>,
        pause_done: Duration,
    ) {
        let wanted = self.plan().has(key);
        let mut table = lock(&self.table);
        table.queue.done(key);
        let again = table.queue.is_wanted_again(key);
        let now = Instant::now();
        for key in wake {
            if let Some(object) = table.objects.get_mut(&key) {
                // A mux that is not to be relied on may be the next one again.
                if key != Key::Mux {
                    object.backoff.forgive();
                }
                table.enqueue(&key);
            }
        }
        // What it waits for may have come while it was looked for.
        let after = match &result {
            Ok(Next::After(other)) => table.objects.get(other).is_some_and(|it| it.end <= began),
            _ => false,
        };
        table.ends += 1;
        let end = table.ends;
        let object = table.objects.entry(key.clone()).or_default();
        object.end = end;
        object.started.add(started);
        let waited = match (&result, &object.waiting) {
            (Ok(Next::Wait(now)), Some((before, since))) if *before == now.what => since.elapsed(),
            _ => Duration::ZERO,
        };
        let result = match result {
            Ok(Next::Wait(waiting)) if waiting.max.is_some_and(|max| waited > max) => {
                Err(HostError::Stuck { what: waiting.what, seconds: waited.as_secs() })
            }
            result => result,
        };
        let pause = (waited / 4).clamp(LOOK_PAUSE_MIN, LOOK_PAUSE_MAX);
        let mut at = None;
        let mut told = None;
        if !matches!(result, Ok(Next::Wait(_))) {
            object.told.clear();
        }
        if object.started.itself || !matches!(result, Ok(Next::Wait(_))) {
            let (started, again) = object.count(now, renewed);
            self.tell_start(key, started, again);
        }
        // Looks at what is under way come to nothing new.
        let news = !matches!(result, Ok(Next::Wait(_))) || waited.is_zero();
        match result {
            Ok(Next::Wait(waiting)) => {
                if waited.is_zero() {
                    told = Some(format!("waiting for {}", waiting.what));
                    object.waiting = Some((waiting.what, now));
                }
                object.how = How::Waits;
                at = Some(now + pause);
            }
            Ok(Next::Done) => {
                object.how = How::Done;
                object.waiting = None;
                object.stays = None;
                object.health().problem = None;
                at = Some(now + pause_done);
                table.wake_dependents(key);
            }
            Ok(Next::Held) => {
                object.how = How::Failed;
                at = Some(object.backoff.waits_until(now).unwrap_or(now));
            }
            Ok(Next::After(other)) => {
                object.how = How::After(other.clone());
                match table.objects.get_mut(&other).filter(|_| after) {
                    Some(other) => drop(other.dependents.insert(key.clone())),
                    None => at = Some(now + LOOK_PAUSE_MIN),
                }
                table.wake_dependents(key);
            }
            Ok(Next::Gone) => {
                table.wake_dependents(key);
                table.objects.remove(key);
                if wanted {
                    table.enqueue(key);
                }
            }
            Err(error) => {
                tracing::warn!("{key}: {}", words(&error));
                let problem = self.machine.told(&error);
                object.how = How::Failed;
                object.waiting = None;
                object.stays = (!wanted).then(|| object.stays.unwrap_or(now));
                if !wanted {
                    told = Some(format!("{key}: {problem}; trying again"));
                }
                object.health().problem = Some(problem);
                at = Some(match key {
                    Key::External(_) => now + EXTERNAL_PAUSE,
                    _ => object.backoff.failed(now),
                });
                if object.asked {
                    object.backoff.forgive();
                }
                table.wake_dependents(key);
            }
        }
        if again && let Some(object) = table.objects.get_mut(key) {
            object.how = How::Active;
        }
        match table.objects.get(key).is_some_and(|object| object.how != How::Done) {
            true => table.open.insert(key.clone()),
            false => table.open.remove(key),
        };
        if let Some(what) = told {
            table.send(key, &what);
        }
        table.settle(key);
        let earlier = at.is_some_and(|at| table.queue.next_due().is_none_or(|due| at < due));
        if let Some(at) = at {
            table.queue.add_at(key.clone(), at);
        }
        drop(table);
        self.work.notify_one();
        // Of the first of such ports who waits knows nothing yet.
        if earlier || self.watches_ports.load(Relaxed) != self.machine.watch_ports().is_some() {
            self.wake();
        }
        if news {
            self.board.touch(key);
        }
    }

    // ---- what happens

    fn wake(&self) {
        // A full pipe wakes as well.
        let _ = (&self.wake).write(&[1]);
    }

    /// Has the end of an object's processes waited for; false if one that is to run does not.
    fn watch(&self, key: &Key, plan: &Plan, result: &Result<Next, HostError>) -> bool {
        let mut all_run = true;
        let mut watches = lock(&self.watches);
        if let Ok(Next::Gone) = result {
            for directory in self.places.processes(key) {
                watches.forget(&directory);
            }
            return true;
        }
        for directory in plan.processes(key) {
            if watches.by_directory.contains_key(directory) {
                continue;
            }
            match self.machine.wait_exit(directory) {
                Ok(Some(process)) => {
                    let token = watches.next;
                    let data = epoll::EventData::new_u64(token);
                    if let Err(error) =
                        epoll::add(&self.epoll, &process, data, epoll::EventFlags::IN)
                    {
                        tracing::warn!("can't wait for {}: {error}", directory.display());
                        continue;
                    }
                    watches.next += 1;
                    watches.by_directory.insert(directory.into(), token);
                    watches.by_token.insert(token, (directory.into(), key.clone(), process));
                }
                Ok(None) => all_run = false,
                Err(error) => tracing::warn!("{}", words(&error)),
            }
        }
        all_run
    }

    /// Waits for what happens, or for a time to come; false when it is over.
    fn wait(&self) -> bool {
        let due = {
            let mut table = lock(&self.table);
            if table.stopped {
                return false;
            }
            if table.queue.promote(Instant::now()) {
                self.work.notify_one();
            }
            table.queue.next_due()
        };
        let (processes, devices, ports) = self.wait_until(due);
        if processes {
            self.ended();
        }
        if devices {
            self.devices.clear();
            let changed = self.reconciler.changed_devices(&self.plan());
            let mut table = lock(&self.table);
            changed.iter().for_each(|key| table.enqueue(key));
            drop(table);
            self.work.notify_one();
        }
        if ports {
            *lock(&self.ports_seen) = Instant::now();
            let touched = self.machine.touched_ports();
            let mut table = lock(&self.table);
            for Touched { node: (vnet, node), lost } in touched {
                let key = Key::node(&vnet, &node);
                self.board.touch(&key);
                if lost {
                    table.enqueue(&key);
                }
            }
            drop(table);
            self.work.notify_one();
        }
        true
    }

    /// Waits until a time; whether a process ended before, whether something happened to a device, and whether to a
    /// port that stays in the kernel. Guests can make that happen as often as they like: it is told once in
    /// [`PORTS_INTERVAL`].
    fn wait_until(&self, until: Option<Instant>) -> (bool, bool, bool) {
        let ports = self.machine.watch_ports();
        self.watches_ports.store(ports.is_some(), Relaxed);
        let rest = PORTS_INTERVAL.saturating_sub(lock(&self.ports_seen).elapsed());
        let again = (ports.is_some() && !rest.is_zero()).then(|| Instant::now() + rest);
        let until = [until, again].into_iter().flatten().min();
        let watched = ports.filter(|_| rest.is_zero());
        let timeout = until.map(|until| {
            let left = until.saturating_duration_since(Instant::now());
            Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) }
        });
        let fds = [self.woken.as_fd(), self.epoll.as_fd(), self.devices.as_fd()];
        let fds = fds.into_iter().chain(watched.iter().map(|watch| watch.as_fd()));
        let mut descriptors: Vec<_> =
            fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
        if poll(&mut descriptors, timeout.as_ref()).is_err() {
            return (false, false, false);
        }
        let mut bytes = [0; 64];
        while matches!((&self.woken).read(&mut bytes), Ok(1..)) {}
        let happened = |at: usize| descriptors.get(at).is_some_and(|it| !it.revents().is_empty());
        let ports = happened(3);
        (happened(1), happened(2), ports)
    }

    /// Has looked at whose processes ended.
    fn ended(&self) {
        let mut events = Vec::with_capacity(64);
        let none = Timespec { tv_sec: 0, tv_nsec: 0 };
        let buffer = rustix::buffer::spare_capacity(&mut events);
        if epoll::wait(&self.epoll, buffer, Some(&none)).is_err() {
            return;
        }
        let mut watches = lock(&self.watches);
        let ended: Vec<(PathBuf, Key)> =
            events.iter().filter_map(|event| watches.end(event.data.u64())).collect();
        drop(watches);
        let mut table = lock(&self.table);
        for (directory, key) in ended {
            if let Some(object) = table.objects.get_mut(&key) {
                object.ended.push(directory);
                table.enqueue(&key);
            }
        }
        drop(table);
        self.work.notify_one();
    }
}

impl Watches {
    fn end(&mut self, token: u64) -> Option<(PathBuf, Key)> {
        let (directory, key, _) = self.by_token.remove(&token)?;
        self.by_directory.remove(&directory);
        Some((directory, key))
    }

    fn forget(&mut self, directory: &Path) {
        if let Some(token) = self.by_directory.remove(directory) {
            self.by_token.remove(&token);
        }
    }
}
