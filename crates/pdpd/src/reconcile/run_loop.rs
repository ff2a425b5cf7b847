//! The reconcile loop, which keeps the machine in the desired state. It
//! decides when each object is worked on, and by which worker.
//!
//! Each object has a key in a queue ([`WorkQueue`]). It is checked when its plan changes, when one
//! of its processes ends, when a condition that it waits for is met, and when its back-off
//! ends. The cost of a change thus depends on what it changes and not on what exists. All
//! objects are checked once at the start, and each again every [`RESYNC_PAUSE`]. One thread
//! waits for events and timers; [`WORKERS`] others make the steps ([`Reconciler`]).
//!
//! The failure of one object affects no other. It is shown in the object's health, and
//! the step is retried with growing pauses ([`Backoff`]). A step may occupy a worker
//! for as long as a call to a helper takes at most ([`crate::host::control::CALL_MAX`]), or
//! one of the OCI runtime. The helper runs on its tenant's CPU share.
//!
//! So that nobody else waits for that, a tenant, or a vnet without a tenant, has
//! at most 4 of 32 workers. Tenants that have a worker leave 8 to those without,
//! and all tenants leave 4 to operators ([`WORKERS`]). The next free worker goes
//! to an owner that has none. It takes 28 slow tenants to occupy all workers of
//! tenants, and even then one becomes free every 20 s / 32 on average.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Condvar, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

use pdp_api::{EventKind, Progress};
use pdp_net::interface::InterfaceWatch;
use pdp_spec::shared;
use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};

use crate::events::{WatchHub, event};
use crate::host::HostError;
use crate::intent::state::StateFile;
use crate::kernel::ports::ChangedNode;
use crate::machine::Machine;
use crate::plan::key::{ObjectKey, PerProcess, ProcessRole};
use crate::plan::{DaemonPaths, Plan};
use crate::reconcile::backoff::Backoff;
use crate::reconcile::queue::{WorkQueue, WorkerLimits};
use crate::reconcile::{CutOff, PendingStep, Reconciler, StepContext, StepOutcome};
use crate::util::{error_chain, lock};

/// Steps in progress: all, and those for one tenant or for one vnet without a tenant.
const WORKERS: WorkerLimits = WorkerLimits {
    workers: shared::WORKERS.total.unwrap() as usize,
    per_owner: shared::WORKERS.tenant as usize,
    newcomers: 8,
    operators: shared::WORKERS.operators as usize,
};

/// Range of the pause before a pending object is checked again: a
/// quarter of the time that it has taken so far.
const CHECK_PAUSE_MIN: Duration = Duration::from_millis(2);
const CHECK_PAUSE_MAX: Duration = Duration::from_secs(1);

/// Time after which a client no longer waits for a pending object.
const PATIENCE: Duration = Duration::from_secs(10);

/// Pause before a failed external interface is retried while its device does not change.
const EXTERNAL_PAUSE: Duration = Duration::from_secs(1);

/// Interval at which an object that is as planned is checked without an event.
const RESYNC_PAUSE: Duration = Duration::from_secs(600);

/// Longest chain of objects that wait for each other: a guest, its
/// vnet, an external interface, the mux.
const AFTER_MAX: u32 = 4;

/// Pause before a process that ended just after its start is checked again.
const SETTLE_PAUSE: Duration = Duration::from_millis(50);

/// Health of an object.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Health {
    /// Restarts of each of its processes since pdpd knows it.
    pub restarts: PerProcess<u64>,
    /// The problem, if any.
    pub problem: Option<String>,
}

/// An object that can't be removed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stuck {
    /// The object.
    pub key: ObjectKey,
    /// Reason, from the last attempt.
    pub why: String,
    /// Time since this daemon's first failed attempt.
    pub time: Duration,
}

/// Message to a client that waits for a change.
#[derive(Debug)]
pub enum ChangeProgress {
    /// A step is being made.
    Step(Progress),
    /// Everything that changed is as planned, or its failure is known, or it takes long.
    Done,
}

/// Interval of checks of ports that stay in the kernel.
const PORTS_INTERVAL: Duration = Duration::from_secs(1);

/// The reconcile loop.
#[derive(Debug)]
pub struct ReconcileLoop {
    machine: Arc<dyn Machine>,
    places: DaemonPaths,
    reconciler: Reconciler,
    plan: RwLock<Arc<Plan>>,
    table: Mutex<ObjectTable>,
    /// Notified when a key waits for a worker.
    work: Condvar,
    /// Wakes the waiting thread.
    wake: UnixStream,
    woken: UnixStream,
    watches: Mutex<Watches>,
    epoll: OwnedFd,
    /// Watches devices of external interfaces.
    devices: InterfaceWatch,
    /// Time of the last check of ports that stay in the kernel, and
    /// whether the thread waits for their events.
    ports_seen: Mutex<Instant>,
    watches_ports: AtomicBool,
    /// Receives events for watchers.
    watch_hub: Arc<WatchHub>,
}

#[derive(Debug)]
struct ObjectTable {
    queue: WorkQueue<ObjectKey>,
    objects: BTreeMap<ObjectKey, ObjectState>,
    /// Keys of objects that are not as planned ([`ObjectPhase::Done`]).
    unsettled: BTreeSet<ObjectKey>,
    tickets: Vec<Ticket>,
    /// Numbers of steps begun and ended.
    steps: u64,
    ends: u64,
    stopped: bool,
}

/// A client that waits for a change.
#[derive(Debug)]
struct Ticket {
    keys: BTreeSet<ObjectKey>,
    left: BTreeSet<ObjectKey>,
    news: Sender<ChangeProgress>,
}

#[derive(Debug, Default)]
struct ObjectState {
    how: ObjectPhase,
    backoff: Backoff,
    /// `None` before the first completed step.
    health: Option<Health>,
    /// The pending work, and since when.
    pending: Option<(String, Instant)>,
    /// Time since which the object can't be removed.
    unremovable_since: Option<Instant>,
    /// Last reported step.
    reported: String,
    /// Processes that were started and are not counted yet.
    started: BTreeSet<ProcessRole>,
    /// Processes that ran before, started or adopted.
    ran: BTreeSet<ProcessRole>,
    /// Objects that continue after a completed step of this one.
    dependents: BTreeSet<ObjectKey>,
    /// Number of its last step, in the order in which steps end.
    end: u64,
    /// Ended processes whose end is not reported yet.
    ended: BTreeSet<ProcessRole>,
    /// True if a client requested a restart of its processes.
    renew: bool,
    /// True if a client changed its plan while a step was in progress.
    /// A failure of that step causes no pause.
    asked: bool,
}

/// A step that has ended.
#[derive(Debug)]
struct EndedStep {
    result: Result<StepOutcome, HostError>,
    /// Number of steps that had ended when it began.
    began: u64,
    /// Processes that shall run.
    planned: BTreeSet<ProcessRole>,
    /// Processes that it started.
    started: BTreeSet<ProcessRole>,
    /// True if it was to restart the object's processes.
    renewed: bool,
    /// Objects that have something to do because of it.
    wake: Vec<ObjectKey>,
    /// Pause before the next check if the object is as planned.
    pause: Duration,
}

#[derive(Debug, Default, PartialEq, Eq)]
enum ObjectPhase {
    /// It is to be checked, or is being checked.
    #[default]
    Active,
    /// Something is pending.
    Pending,
    After(ObjectKey),
    Failed,
    Done,
}

/// Processes whose end the loop waits for.
#[derive(Debug, Default)]
struct Watches {
    by_process: BTreeMap<(ObjectKey, ProcessRole), u64>,
    by_token: BTreeMap<u64, (ObjectKey, ProcessRole, OwnedFd)>,
    next: u64,
}

impl ObjectState {
    fn health(&mut self) -> &mut Health {
        self.health.get_or_insert_default()
    }

    /// Counts started processes, except a requested restart, which is neither a failure
    /// nor a sign of one. Returns the started processes, with true for those that ran before.
    fn count(&mut self, now: Instant, renewed: bool) -> BTreeMap<ProcessRole, bool> {
        let started = std::mem::take(&mut self.started);
        if started.is_empty() {
            return BTreeMap::new();
        }
        let requested = renewed && started.contains(&ProcessRole::Main);
        if requested {
            self.renew = false;
            self.backoff = Backoff::default();
        }
        self.backoff.started(now);
        let started: BTreeMap<ProcessRole, bool> =
            started.into_iter().map(|role| (role, !self.ran.insert(role))).collect();
        if !requested && let Some(health) = &mut self.health {
            started.iter().for_each(|(role, ran)| health.restarts[*role] += u64::from(*ran));
        }
        started
    }
}

impl ObjectTable {
    /// Queues a key to be checked as soon as possible.
    fn enqueue(&mut self, key: &ObjectKey) {
        let object = self.objects.entry(key.clone()).or_default();
        object.how = ObjectPhase::Active;
        self.unsettled.insert(key.clone());
        self.queue.add(key.clone());
    }

    /// True if nobody needs to wait for an object any more.
    fn is_settled(&self, key: &ObjectKey) -> bool {
        self.is_settled_by(key, AFTER_MAX)
    }

    fn is_settled_by(&self, key: &ObjectKey, steps: u32) -> bool {
        let Some(object) = self.objects.get(key) else { return true };
        match &object.how {
            ObjectPhase::Active => false,
            ObjectPhase::Pending => {
                object.pending.as_ref().is_some_and(|(_, since)| since.elapsed() > PATIENCE)
            }
            // It continues once the other is as planned.
            ObjectPhase::After(other) => {
                let done =
                    self.objects.get(other).is_none_or(|other| other.how == ObjectPhase::Done);
                !done && steps > 0 && self.is_settled_by(other, steps - 1)
            }
            // A failed removal may succeed on a retry, which the client
            // would otherwise have to request.
            ObjectPhase::Failed => {
                object.unremovable_since.is_none_or(|since| since.elapsed() > PATIENCE)
            }
            ObjectPhase::Done => true,
        }
    }

    /// Queues objects that have something to do because of another one's step.
    fn wake(&mut self, keys: Vec<ObjectKey>) {
        for key in keys {
            if let Some(object) = self.objects.get_mut(&key) {
                // A mux that is unreliable may be so again after the restart.
                if key != ObjectKey::Mux {
                    object.backoff.forgive();
                }
                self.enqueue(&key);
            }
        }
    }

    /// Returns how long the same work has been pending; zero if it is not, or newly so.
    fn waited(&self, key: &ObjectKey, result: &Result<StepOutcome, HostError>) -> Duration {
        let pending = self.objects.get(key).and_then(|object| object.pending.as_ref());
        match (result, pending) {
            (Ok(StepOutcome::Wait(now)), Some((before, since))) if *before == now.what => {
                since.elapsed()
            }
            _ => Duration::ZERO,
        }
    }

    /// Counts a step and the processes that were started. Helpers are counted once the step does
    /// not wait, together with the object's own process. Returns the processes that are counted
    /// now, with true for those that ran before.
    fn account(
        &mut self,
        key: &ObjectKey,
        started: BTreeSet<ProcessRole>,
        waits: bool,
        renewed: bool,
        now: Instant,
    ) -> BTreeMap<ProcessRole, bool> {
        self.ends += 1;
        let end = self.ends;
        let object = self.object(key);
        object.end = end;
        object.started.extend(started);
        if !waits {
            object.reported.clear();
        }
        match waits && !object.started.contains(&ProcessRole::Main) {
            true => BTreeMap::new(),
            false => object.count(now, renewed),
        }
    }

    /// Returns the time of the next check.
    fn enter_pending(
        &mut self,
        key: &ObjectKey,
        step: PendingStep,
        waited: Duration,
        now: Instant,
    ) -> Instant {
        self.object(key).how = ObjectPhase::Pending;
        if waited.is_zero() {
            let report = format!("waiting for {}", step.what);
            self.object(key).pending = Some((step.what, now));
            self.send(key, &report);
        }
        now + (waited / 4).clamp(CHECK_PAUSE_MIN, CHECK_PAUSE_MAX)
    }

    fn enter_done(&mut self, key: &ObjectKey, planned: BTreeSet<ProcessRole>) {
        let object = self.object(key);
        object.ran = planned;
        object.how = ObjectPhase::Done;
        object.pending = None;
        object.unremovable_since = None;
        object.health().problem = None;
        self.wake_dependents(key);
    }

    /// Returns the end of the back-off.
    fn enter_back_off(&mut self, key: &ObjectKey, now: Instant) -> Instant {
        let object = self.object(key);
        object.how = ObjectPhase::Failed;
        object.backoff.waits_until(now).unwrap_or(now)
    }

    /// Returns the time of the next check, unless the other object's next step wakes this one.
    fn enter_after(
        &mut self,
        key: &ObjectKey,
        other: ObjectKey,
        began: u64,
        now: Instant,
    ) -> Option<Instant> {
        self.object(key).how = ObjectPhase::After(other.clone());
        // The other object may have become ready during the step.
        let at = match self.objects.get_mut(&other).filter(|other| other.end <= began) {
            Some(other) => {
                other.dependents.insert(key.clone());
                None
            }
            None => Some(now + CHECK_PAUSE_MIN),
        };
        self.wake_dependents(key);
        at
    }

    fn enter_gone(&mut self, key: &ObjectKey, wanted: bool) {
        self.wake_dependents(key);
        self.objects.remove(key);
        if wanted {
            self.enqueue(key);
        }
    }

    /// Returns the time of the next attempt.
    fn enter_failed(
        &mut self,
        key: &ObjectKey,
        problem: String,
        wanted: bool,
        now: Instant,
    ) -> Instant {
        let report = (!wanted).then(|| format!("{key}: {problem}; retrying"));
        let object = self.object(key);
        object.how = ObjectPhase::Failed;
        object.pending = None;
        object.unremovable_since = (!wanted).then(|| object.unremovable_since.unwrap_or(now));
        object.health().problem = Some(problem);
        let at = match key {
            ObjectKey::External(_) => now + EXTERNAL_PAUSE,
            _ => object.backoff.failed(now),
        };
        if object.asked {
            object.backoff.forgive();
        }
        report.iter().for_each(|report| self.send(key, report));
        self.wake_dependents(key);
        at
    }

    /// Notes whether an object is as planned after a step.
    fn enter_settled(&mut self, key: &ObjectKey, is_wanted_again: bool) {
        let object = self.objects.get_mut(key);
        let is_settled = object.is_none_or(|object| {
            if is_wanted_again {
                object.how = ObjectPhase::Active;
            }
            object.how == ObjectPhase::Done
        });
        match is_settled {
            true => self.unsettled.remove(key),
            false => self.unsettled.insert(key.clone()),
        };
    }

    /// Queues an object's next check. Returns true if it is due before all others.
    fn requeue(&mut self, key: &ObjectKey, at: Instant) -> bool {
        let is_next = self.queue.next_due().is_none_or(|due| at < due);
        self.queue.add_at(key.clone(), at);
        is_next
    }

    fn object(&mut self, key: &ObjectKey) -> &mut ObjectState {
        self.objects.entry(key.clone()).or_default()
    }

    /// Notifies clients that no longer wait for anything.
    fn settle(&mut self, key: &ObjectKey) {
        if self.tickets.is_empty() {
            return;
        }
        let mut tickets = std::mem::take(&mut self.tickets);
        let failed = self.objects.get(key).is_some_and(|object| object.how != ObjectPhase::Done);
        tickets.retain_mut(|ticket| {
            if failed {
                // Also objects that wait for this one.
                ticket.left.retain(|key| !self.is_settled(key));
            } else if self.is_settled(key) {
                ticket.left.remove(key);
            }
            let done = ticket.left.is_empty();
            if done {
                // A client that went away needs no message.
                let _ = ticket.news.send(ChangeProgress::Done);
            }
            !done
        });
        self.tickets = tickets;
    }

    /// Reports what is done for an object, once.
    fn report_step(&mut self, key: &ObjectKey, what: &str) {
        if let Some(object) = self.objects.get_mut(key) {
            if object.reported == what {
                return;
            }
            what.clone_into(&mut object.reported);
        }
        tracing::info!("{what}");
        self.send(key, what);
    }

    fn send(&self, key: &ObjectKey, what: &str) {
        for ticket in self.tickets.iter().filter(|ticket| ticket.keys.contains(key)) {
            let total = ticket.keys.len() as u64;
            let done = total - ticket.left.len() as u64;
            let _ =
                ticket.news.send(ChangeProgress::Step(Progress { done, total, what: what.into() }));
        }
    }

    fn wake_dependents(&mut self, key: &ObjectKey) {
        let Some(object) = self.objects.get_mut(key) else { return };
        for dependent in std::mem::take(&mut object.dependents) {
            if self.objects.contains_key(&dependent) {
                self.enqueue(&dependent);
            }
        }
    }

    /// Returns an object inside of this one, which is removed first.
    fn inner(&self, key: &ObjectKey) -> Option<ObjectKey> {
        let after = |first: ObjectKey, belongs: &dyn Fn(&ObjectKey) -> bool| {
            let found = self.objects.range(first..).next().map(|(key, _)| key);
            found.filter(|key| belongs(key)).cloned()
        };
        match key {
            ObjectKey::External(_) | ObjectKey::Guest { .. } => None,
            ObjectKey::Node { vnet, node } => after(ObjectKey::guest(vnet, node, 0), &|key| {
                key.vnet_name() == Some(vnet) && key.node_name() == node
            }),
            ObjectKey::Vnet(vnet) => {
                let inside = |key: &ObjectKey| key.vnet_name() == Some(vnet);
                after(ObjectKey::node(vnet, ""), &inside)
                    .or_else(|| after(ObjectKey::guest(vnet, "", 0), &inside))
            }
            // Objects that can't be removed do not need the mux any more.
            ObjectKey::Mux => {
                let mut others = self.objects.keys();
                let node = [ObjectKey::Mux, ObjectKey::Leftovers];
                others.find(|of| !node.contains(of) && !self.is_stuck(of, AFTER_MAX)).cloned()
            }
            ObjectKey::Leftovers => {
                self.objects.keys().find(|of| **of != ObjectKey::Leftovers).cloned()
            }
        }
    }

    /// True for an object that can't be removed, and for one that waits for such an object.
    fn is_stuck(&self, key: &ObjectKey, steps: u32) -> bool {
        let Some(object) = self.objects.get(key) else { return false };
        let waits = match &object.how {
            ObjectPhase::After(other) => steps > 0 && self.is_stuck(other, steps - 1),
            _ => false,
        };
        object.unremovable_since.is_some() || waits
    }
}

impl ReconcileLoop {
    /// Creates the loop for this machine and plan. It does nothing before [`ReconcileLoop::run`].
    pub fn new(
        machine: Arc<dyn Machine>,
        state: Arc<StateFile>,
        places: DaemonPaths,
        plan: Arc<Plan>,
    ) -> anyhow::Result<Self> {
        let (wake, woken) = UnixStream::pair()?;
        wake.set_nonblocking(true)?;
        woken.set_nonblocking(true)?;
        let mut table = ObjectTable {
            queue: WorkQueue::new(WORKERS),
            objects: BTreeMap::new(),
            unsettled: BTreeSet::new(),
            tickets: Vec::new(),
            steps: 0,
            ends: 0,
            stopped: false,
        };
        for text in state.journal()?.into_keys() {
            match text.parse::<ObjectKey>() {
                Ok(key) => {
                    // A step of the vnet allows the removal of its objects.
                    key.vnet_name()
                        .map(ObjectKey::vnet)
                        .iter()
                        .for_each(|vnet| table.enqueue(vnet));
                    table.enqueue(&key);
                }
                Err(_) => tracing::warn!("journal: {text:?} is of another version; ignored"),
            }
        }
        plan.keys().iter().for_each(|key| table.enqueue(key));
        table.enqueue(&ObjectKey::Leftovers);
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
            devices: InterfaceWatch::new()?,
            ports_seen: Mutex::new(Instant::now()),
            watches_ports: AtomicBool::new(false),
            watch_hub: Arc::default(),
        })
    }

    /// Returns the hub to which events go.
    pub fn watch_hub(&self) -> &Arc<WatchHub> {
        &self.watch_hub
    }

    /// Returns the current plan.
    pub fn plan(&self) -> Arc<Plan> {
        self.plan.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Sets a new plan, and immediately retries the failed objects that
    /// match `retry`. The messages end with [`ChangeProgress::Done`].
    pub fn want(
        &self,
        plan: Arc<Plan>,
        retry: impl Fn(&ObjectKey) -> bool,
    ) -> Receiver<ChangeProgress> {
        let (sender, news) = mpsc::channel();
        let mut table = lock(&self.table);
        let before = {
            let mut current = self.plan.write().unwrap_or_else(PoisonError::into_inner);
            std::mem::replace(&mut *current, plan.clone())
        };
        let mut keys = plan.changed_from(&before);
        keys.extend(table.unsettled.iter().filter(|key| retry(key)).cloned());
        if plan.is_empty() || plan.damaged != before.damaged {
            keys.insert(ObjectKey::Leftovers);
        }
        for key in &keys {
            let object = table.objects.entry(key.clone()).or_default();
            object.backoff.forgive();
            object.asked = true;
            table.enqueue(key);
        }
        if keys.is_empty() {
            let _ = sender.send(ChangeProgress::Done);
        } else {
            table.tickets.push(Ticket { left: keys.clone(), keys, news: sender });
        }
        drop(table);
        self.work.notify_one();
        news
    }

    /// Restarts the processes of objects without a pause. Objects that
    /// are not planned are ignored. The messages end with [`ChangeProgress::Done`].
    pub fn restart(&self, mut keys: BTreeSet<ObjectKey>) -> Receiver<ChangeProgress> {
        let (sender, news) = mpsc::channel();
        let mut table = lock(&self.table);
        let plan = self.plan();
        keys.retain(|key| plan.has(key));
        if keys.is_empty() {
            let _ = sender.send(ChangeProgress::Done);
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

    /// Returns the health of an object; `None` before its first
    /// completed step, and once it is gone.
    pub fn health(&self, key: &ObjectKey) -> Option<Health> {
        lock(&self.table).objects.get(key)?.health.clone()
    }

    /// Returns the problems of objects for which `of` returns true,
    /// including objects that are being removed.
    pub fn problems(&self, of: impl Fn(&ObjectKey) -> bool) -> Vec<(ObjectKey, String)> {
        let table = lock(&self.table);
        let mut problems = Vec::new();
        // An object that is as planned has no problem.
        for key in table.unsettled.iter().filter(|key| of(key)) {
            let health = table.objects.get(key).and_then(|object| object.health.as_ref());
            if let Some(problem) = health.and_then(|health| health.problem.as_ref()) {
                problems.push((key.clone(), problem.clone()));
            }
        }
        problems
    }

    /// Returns the objects that can't be removed.
    pub fn stuck(&self) -> Vec<Stuck> {
        let table = lock(&self.table);
        let stuck = table.unsettled.iter().filter_map(|key| {
            let object = table.objects.get(key)?;
            let (since, health) = (object.unremovable_since?, object.health.as_ref()?);
            Some(Stuck { key: key.clone(), why: health.problem.clone()?, time: since.elapsed() })
        });
        stuck.collect()
    }

    /// Returns why the device of an external interface can't transmit frames.
    pub fn cut_off(&self, external: &str) -> Option<CutOff> {
        self.reconciler.cut_off(external)
    }

    /// See [`Reconciler::instead_of_xdp`].
    pub fn instead_of_xdp(&self, external: &str) -> Option<String> {
        self.reconciler.instead_of_xdp(external)
    }

    /// True if an external interface loses long frames that senders leave to its device to segment.
    pub fn loses_long_frames(&self, external: &str) -> bool {
        self.reconciler.loses_long_frames(external)
    }

    /// True if parts of a vnet may exist, wanted or not: it is in the journal, or will be.
    pub fn may_exist(&self, vnet: &str) -> bool {
        lock(&self.table).objects.contains_key(&ObjectKey::vnet(vnet))
    }

    /// Returns objects that are not as planned, or not gone yet, by vnet and
    /// node, or the vnet itself. `None` if another plan than `plan` is in force.
    pub fn unsettled(&self, plan: &Arc<Plan>) -> Option<BTreeSet<(String, Option<String>)>> {
        let table = lock(&self.table);
        if !Arc::ptr_eq(&self.plan(), plan) {
            return None;
        }
        let keys = table.unsettled.iter().filter_map(|key| {
            let node = matches!(key, ObjectKey::Node { .. } | ObjectKey::Guest { .. })
                .then(|| key.node_name());
            Some((key.vnet_name()?.to_owned(), node.map(str::to_owned)))
        });
        Some(keys.collect())
    }

    /// Returns vnets that may still exist and are not wanted.
    pub fn being_removed(&self) -> Vec<String> {
        let plan = self.plan();
        let table = lock(&self.table);
        let names = table.objects.keys().filter_map(ObjectKey::vnet_name);
        let names: BTreeSet<&str> = names.filter(|name| !plan.vnets.contains_key(*name)).collect();
        names.into_iter().map(str::to_owned).collect()
    }

    /// Returns the objects of a vnet that are to be removed and not gone yet.
    pub fn unwanted(&self, vnet: &str) -> Vec<ObjectKey> {
        let plan = self.plan();
        let table = lock(&self.table);
        // A removed object counts as planned.
        let keys = table.unsettled.iter();
        keys.filter(|key| key.vnet_name() == Some(vnet) && !plan.has(key)).cloned().collect()
    }

    /// Returns the number of steps made so far.
    pub fn steps(&self) -> u64 {
        lock(&self.table).steps
    }

    /// Ends [`ReconcileLoop::run`] after the steps in progress.
    pub fn stop(&self) {
        lock(&self.table).stopped = true;
        self.work.notify_all();
        self.wake();
    }

    /// Runs until it is stopped.
    ///
    /// # Panics
    /// If a step panics. The other steps have ended then.
    pub fn run(&self) {
        let or_stop = |work: &dyn Fn()| {
            if let Err(panic) = catch_unwind(AssertUnwindSafe(work)) {
                self.stop();
                std::panic::resume_unwind(panic);
            }
        };
        // Leftovers first, since they may be where a new object has to be.
        or_stop(&|| {
            let mut context = StepContext {
                report: &|what| tracing::info!("{what}"),
                inner: None,
                backing_off: false,
                renew: false,
                started: BTreeSet::new(),
                wake: Vec::new(),
                recheck_after: None,
                newest: &|| self.plan(),
            };
            let first = self.reconciler.step(&ObjectKey::Leftovers, &self.plan(), &mut context);
            // It is in the queue as well.
            first.err().iter().for_each(|error| tracing::warn!("{}", error_chain(error)));
        });
        std::thread::scope(|scope| {
            for _ in 0..WORKERS.workers {
                scope.spawn(|| or_stop(&|| while self.work() {}));
            }
            or_stop(&|| while self.wait() {});
        });
    }

    // ---- workers

    /// Waits for a key and makes a step. Returns false once the loop is stopped.
    fn work(&self) -> bool {
        let mut table = lock(&self.table);
        let key = loop {
            if table.stopped {
                return false;
            }
            match table.queue.take() {
                Some(key) if table.objects.contains_key(&key) => break key,
                // It is gone. It was queued again during its last step.
                Some(key) => table.queue.done(&key),
                None => table = self.work.wait(table).unwrap_or_else(PoisonError::into_inner),
            }
        };
        // A worker that finds more work wakes another one.
        self.work.notify_one();
        table.steps += 1;
        let began = table.ends;
        let inner = table.inner(&key);
        table.unsettled.insert(key.clone());
        let object = table.objects.entry(key.clone()).or_default();
        let held = object.backoff.waits(Instant::now());
        let renew = object.renew;
        object.asked = false;
        let ended = std::mem::take(&mut object.ended);
        drop(table);
        for role in ended {
            self.report_end(&key, role, renew);
        }
        let plan = self.plan();
        let mut context = StepContext {
            report: &|what| lock(&self.table).report_step(&key, what),
            inner,
            backing_off: held,
            renew,
            started: BTreeSet::new(),
            wake: Vec::new(),
            recheck_after: None,
            newest: &|| self.plan(),
        };
        let result = self.reconciler.step(&key, &plan, &mut context);
        let StepContext { started, wake, recheck_after: again, .. } = context;
        let pause = match self.watch(&key, &plan, &result) {
            true => again.unwrap_or(RESYNC_PAUSE).clamp(CHECK_PAUSE_MIN, RESYNC_PAUSE),
            false => SETTLE_PAUSE,
        };
        let planned = plan.processes(&key);
        self.end(&key, EndedStep { result, began, planned, started, renewed: renew, wake, pause });
        true
    }

    /// `renew`: a client requested the restart.
    fn report_end(&self, key: &ObjectKey, role: ProcessRole, renew: bool) {
        let directory = self.places.record(key, role);
        // The directory of a process that had to end may be gone already, and with it the reason.
        let how = match (renew, self.machine.has_directory(&directory)) {
            (true, _) => Some("as requested".to_owned()),
            (false, true) => Some(self.machine.ending(&directory)),
            (false, false) => None,
        };
        let shown = how.as_ref().map(|how| format!(" {how}")).unwrap_or_default();
        tracing::info!("{} ended{shown}", directory.display());
        self.watch_hub.post(event(key.process_object(role), EventKind::Ended, how));
    }

    fn report_start(&self, key: &ObjectKey, started: &BTreeMap<ProcessRole, bool>) {
        for (role, ran) in started {
            let what = if *ran { EventKind::Restarted } else { EventKind::Started };
            self.watch_hub.post(event(key.process_object(*role), what, None));
        }
    }

    /// Enters an ended step: what it wakes, counts and changes, and its object's next check.
    fn end(&self, key: &ObjectKey, step: EndedStep) {
        let EndedStep { result, began, planned, started, renewed, wake, pause } = step;
        let mut table = lock(&self.table);
        // A plan that comes later queues the object after this.
        let wanted = self.plan().has(key);
        table.queue.done(key);
        let is_wanted_again = table.queue.is_wanted_again(key);
        let now = Instant::now();
        table.wake(wake);
        let waited = table.waited(key, &result);
        let result = limit_wait(result, waited).map_err(|error| {
            tracing::warn!("{key}: {}", error_chain(&error));
            self.machine.error_text(&error)
        });
        let waits = matches!(result, Ok(StepOutcome::Wait(_)));
        let started = table.account(key, started, waits, renewed, now);
        self.report_start(key, &started);
        let at = match result {
            Ok(StepOutcome::Wait(step)) => Some(table.enter_pending(key, step, waited, now)),
            Ok(StepOutcome::Done) => {
                table.enter_done(key, planned);
                Some(now + pause)
            }
            Ok(StepOutcome::BackingOff) => Some(table.enter_back_off(key, now)),
            Ok(StepOutcome::After(other)) => table.enter_after(key, other, began, now),
            Ok(StepOutcome::Gone) => {
                table.enter_gone(key, wanted);
                None
            }
            Err(problem) => Some(table.enter_failed(key, problem, wanted, now)),
        };
        table.enter_settled(key, is_wanted_again);
        table.settle(key);
        let is_next = at.is_some_and(|at| table.requeue(key, at));
        drop(table);
        self.work.notify_one();
        // The waiting thread does not know of the first of these ports yet.
        if is_next || self.watches_ports.load(Relaxed) != self.machine.watch_ports().is_some() {
            self.wake();
        }
        // Repeated checks of pending work bring no news.
        if !waits || waited.is_zero() {
            self.watch_hub.touch(key);
        }
    }

    // ---- what happens

    fn wake(&self) {
        // A full pipe wakes the thread as well.
        let _ = (&self.wake).write(&[1]);
    }

    /// Watches for the end of an object's processes. Returns false if one that should run does not.
    fn watch(&self, key: &ObjectKey, plan: &Plan, result: &Result<StepOutcome, HostError>) -> bool {
        let mut all_run = true;
        let mut watches = lock(&self.watches);
        if let Ok(StepOutcome::Gone) = result {
            for role in key.roles() {
                watches.forget(key, *role);
            }
            return true;
        }
        for role in plan.processes(key) {
            if watches.by_process.contains_key(&(key.clone(), role)) {
                continue;
            }
            let directory = self.places.record(key, role);
            match self.machine.exit_fd(&directory) {
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
                    watches.by_process.insert((key.clone(), role), token);
                    watches.by_token.insert(token, (key.clone(), role, process));
                }
                Ok(None) => all_run = false,
                Err(error) => tracing::warn!("{}", error_chain(&error)),
            }
        }
        all_run
    }

    /// Waits for events or a timer. Returns false once the loop is stopped.
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
            for ChangedNode { node: (vnet, node), port_gone: lost } in touched {
                let key = ObjectKey::node(&vnet, &node);
                self.watch_hub.touch(&key);
                if lost && table.objects.contains_key(&key) {
                    table.enqueue(&key);
                }
            }
            drop(table);
            self.work.notify_one();
        }
        true
    }

    /// Waits until a time. Returns whether a process ended, whether a device had an
    /// event, and whether a port that stays in the kernel had one. Guests can cause port
    /// events as often as they like, so these are reported once per [`PORTS_INTERVAL`].
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

    /// Queues the objects whose processes ended.
    fn ended(&self) {
        let mut events = Vec::with_capacity(64);
        let none = Timespec { tv_sec: 0, tv_nsec: 0 };
        let buffer = rustix::buffer::spare_capacity(&mut events);
        if epoll::wait(&self.epoll, buffer, Some(&none)).is_err() {
            return;
        }
        let mut watches = lock(&self.watches);
        let ended: Vec<(ObjectKey, ProcessRole)> =
            events.iter().filter_map(|event| watches.end(event.data.u64())).collect();
        drop(watches);
        let mut table = lock(&self.table);
        for (key, role) in ended {
            if let Some(object) = table.objects.get_mut(&key) {
                object.ended.insert(role);
                table.enqueue(&key);
            }
        }
        drop(table);
        self.work.notify_one();
    }
}

/// Turns work that has been pending for too long into an error.
fn limit_wait(
    result: Result<StepOutcome, HostError>,
    waited: Duration,
) -> Result<StepOutcome, HostError> {
    match result {
        Ok(StepOutcome::Wait(step)) if step.max.is_some_and(|max| waited > max) => {
            Err(HostError::Stuck { what: step.what, seconds: waited.as_secs() })
        }
        result => result,
    }
}

impl Watches {
    fn end(&mut self, token: u64) -> Option<(ObjectKey, ProcessRole)> {
        let (key, role, _) = self.by_token.remove(&token)?;
        let process = (key, role);
        self.by_process.remove(&process);
        Some(process)
    }

    fn forget(&mut self, key: &ObjectKey, role: ProcessRole) {
        if let Some(token) = self.by_process.remove(&(key.clone(), role)) {
            self.by_token.remove(&token);
        }
    }
}
