//! The node behind the API: changes what is wanted, one change at a time, and keeps the machine
//! so.
//!
//! A change is checked, planned, stored, and then handed to the keeper, the one thread that works
//! on the machine ([`keep`]). Answers come from what the keeper last saw, and from the mux and
//! the helpers themselves, so they don't wait for a change that is under way.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, RwLock};
use std::time::{Duration, Instant};

use pdp_api::{
    Action, ApplyRequest, Change as Changed, DownRequest, Problem, ProblemKind, Progress, Report,
    ScaleRequest,
};
use pdp_net::interface::Interface;
use pdp_spec::limits::{GUESTS_MAX, MILLICORES_MAX};
use pdp_spec::units::Cores;
use pdp_spec::{InterfaceFacts, Object};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::access::{Scope, no_vnet};
use crate::host::{self, Host, words};
use crate::http::ProgressFn;
use crate::model::Model;
use crate::plan::Plan;
use crate::reconcile::{Healths, Reconciler};

/// Pause before a run that only repeats what did not settle.
const SETTLE_PAUSE: Duration = Duration::from_millis(50);

/// How often the devices of external interfaces are looked at.
const DEVICES_PAUSE: Duration = Duration::from_secs(1);

/// The node.
#[derive(Debug)]
pub struct Engine {
    /// The machine.
    pub host: Arc<Host>,
    /// CPUs of the machine.
    pub cpus: BTreeSet<u32>,
    /// Run by a service manager.
    pub managed: bool,
    /// Called when the daemon is to exit.
    exit: Box<dyn ExitFn>,
    changing: Mutex<()>,
    model: RwLock<Arc<Model>>,
    seen: RwLock<Arc<Seen>>,
    orders: Mutex<Orders>,
}

/// Something that ends the daemon, a moment after it is called.
pub trait ExitFn: Fn(bool) + Send + Sync {}

impl<F: Fn(bool) + Send + Sync> ExitFn for F {}

impl std::fmt::Debug for dyn ExitFn {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("exit")
    }
}

/// What the keeper last saw.
#[derive(Debug, Default)]
pub struct Seen {
    /// How all objects were.
    pub healths: Healths,
    /// Names of the vnets that were in the plan it saw them by.
    pub vnets: BTreeSet<String>,
}

#[derive(Debug)]
struct Orders {
    sender: Sender<Sender<News>>,
    wake: UnixStream,
}

/// What the keeper tells who waits for it.
enum News {
    Step(Progress),
    Done,
}

/// The keeper's end of [`Engine`].
#[derive(Debug)]
pub struct Keeper {
    orders: Receiver<Sender<News>>,
    wake: UnixStream,
}

impl Engine {
    /// The node as stored. The keeper is to be run by [`keep`].
    pub fn new(
        host: Arc<Host>,
        cpus: BTreeSet<u32>,
        managed: bool,
        exit: impl ExitFn + 'static,
    ) -> anyhow::Result<(Self, Keeper)> {
        let documents = host.state.documents()?;
        let ledger = host.state.ledger()?;
        let model = Model::load(&host.places, &cpus, &documents, ledger)?;
        let (sender, orders) = mpsc::channel();
        let (wake, woken) = UnixStream::pair()?;
        wake.set_nonblocking(true)?;
        woken.set_nonblocking(true)?;
        let engine = Self {
            host,
            cpus,
            managed,
            exit: Box::new(exit),
            changing: Mutex::new(()),
            model: RwLock::new(Arc::new(model)),
            seen: RwLock::default(),
            orders: Mutex::new(Orders { sender, wake }),
        };
        Ok((engine, Keeper { orders, wake: woken }))
    }

    /// What is wanted now.
    pub fn model(&self) -> Arc<Model> {
        self.model.read().unwrap_or_else(|poisoned| poisoned.into_inner()).clone()
    }

    /// What the keeper last saw.
    pub fn seen(&self) -> Arc<Seen> {
        self.seen.read().unwrap_or_else(|poisoned| poisoned.into_inner()).clone()
    }

    /// Applies files, or says what that would do.
    pub(crate) fn change(
        &self,
        scope: &Scope,
        request: ApplyRequest,
        progress: ProgressFn<'_>,
    ) -> Result<Report, Problem> {
        let _turn = (!request.dry_run).then(|| self.turn());
        let before = self.model();
        if before.ledger.stopped && *scope != Scope::Node {
            return Err(Problem::new(ProblemKind::Conflict, "everything is stopped")
                .hint("an operator starts it by `pdp up`"));
        }
        let documents = pdp_spec::parse(&request.files).map_err(refusal)?;
        let mut named = BTreeSet::new();
        let mut tenants = BTreeSet::new();
        let mut substrate = false;
        for document in &documents {
            match &document.object {
                Object::Substrate(_) => substrate = true,
                Object::VirtualNetwork(vnet) => {
                    named.insert(vnet.metadata.name.clone());
                }
                Object::Tenant(tenant) => {
                    tenants.insert(format!("tenant/{}", tenant.metadata.name));
                }
            }
        }
        let mut existing = before.existing(&self.cpus, substrate);
        let mut devices = BTreeMap::new();
        let interfaces = documents.iter().filter_map(|document| match &document.object {
            Object::Substrate(substrate) => Some(substrate),
            Object::VirtualNetwork(_) | Object::Tenant(_) => None,
        });
        for interface in interfaces
            .chain(&existing.substrate)
            .flat_map(|substrate| substrate.spec.interfaces.values())
        {
            let device = interface.device.as_deref().map(Interface::by_name);
            if let Some(Ok(found)) = device {
                devices.insert(found.name, InterfaceFacts { mtu: found.mtu });
            }
        }
        existing.devices = Some(devices);
        existing.asker = scope.tenant().map(str::to_owned);
        let intent = pdp_spec::check(&documents, &existing).map_err(refusal)?;
        let after = before.with(intent, &self.host.places, &self.cpus).map_err(invalid)?;
        let mut changes = after.changes_from(&before, &named, substrate);
        if *scope != Scope::Node {
            // All that a tenant's files change are its vnets, `vnet/TENANT.NAME/…`.
            changes.retain(|change| change.object.split('/').nth(1).is_some_and(|v| scope.sees(v)));
        }
        for object in tenants {
            if !changes.iter().any(|change| change.object == object) {
                let (action, detail) = (Action::Unchanged, String::new());
                changes.push(Changed { object, action, detail });
            }
        }
        if request.dry_run {
            return Ok(Report { changes, dry_run: true, exits: false });
        }
        self.settle(&before, after, &mut scoped(scope, progress))?;
        self.report(scope, changes, &named)
    }

    /// Starts all that is stored.
    pub(crate) fn start_all(&self, progress: ProgressFn<'_>) -> Result<Report, Problem> {
        let _turn = self.turn();
        let before = self.model();
        let mut after = Model::clone(&before);
        after.ledger.stopped = false;
        let named: BTreeSet<String> = after.vnets.keys().cloned().collect();
        let changes = after.changes_from(&before, &named, false);
        self.settle(&before, after, progress)?;
        self.report(&Scope::Node, changes, &named)
    }

    /// Stops everything.
    pub(crate) fn stop_all(
        &self,
        request: DownRequest,
        progress: ProgressFn<'_>,
    ) -> Result<Report, Problem> {
        let _turn = self.turn();
        let before = self.model();
        let mut after = Model::clone(&before);
        after.ledger.stopped = true;
        let changes = after.changes_from(&before, &BTreeSet::new(), false);
        self.settle(&before, after, progress)?;
        let left = self.host.state.things().map_err(Problem::internal)?;
        if !left.is_empty() {
            let names: Vec<String> = left.into_keys().collect();
            return Err(Problem::new(
                ProblemKind::Internal,
                format!("not taken down yet: {}", names.join(", ")),
            )
            .hint("it is being tried again; see the daemon's log and repeat `pdp down`"));
        }
        if request.purge {
            let before = self.model();
            let after = Model::default();
            self.store(&before, after)?;
        }
        let exits = request.exit && !self.managed;
        if exits {
            (self.exit)(request.purge);
        }
        Ok(Report { changes, dry_run: false, exits })
    }

    /// Forgets the substrate.
    pub(crate) fn drop_substrate(&self, progress: ProgressFn<'_>) -> Result<Report, Problem> {
        let _turn = self.turn();
        let before = self.model();
        if before.substrate.is_none() {
            return Err(Problem::not_found("no substrate was applied; the default one is in use"));
        }
        if !before.vnets.is_empty() {
            let names: Vec<&str> = before.vnets.keys().map(String::as_str).collect();
            return Err(Problem::new(
                ProblemKind::Conflict,
                format!("the substrate is used by {}", names.join(", ")),
            )
            .hint("delete those vnets first"));
        }
        let mut after = Model::clone(&before);
        after.substrate = None;
        after.generations.retain(|(kind, _), _| kind != "Substrate");
        after.replan(&self.host.places, &self.cpus).map_err(invalid)?;
        let changes = after.changes_from(&before, &BTreeSet::new(), true);
        self.settle(&before, after, progress)?;
        self.report(&Scope::Node, changes, &BTreeSet::new())
    }

    /// Forgets a tenant and its tokens.
    pub(crate) fn drop_tenant(&self, tenant: &str) -> Result<Report, Problem> {
        let _turn = self.turn();
        let before = self.model();
        if !before.tenants.contains_key(tenant) {
            return Err(Problem::not_found(format!("no tenant {tenant:?}"))
                .hint("`pdp get tenants` lists them"));
        }
        let scope = Scope::Tenant(tenant.into());
        let vnets: Vec<&str> =
            before.vnets.keys().filter(|vnet| scope.sees(vnet)).map(String::as_str).collect();
        if !vnets.is_empty() {
            let problem = format!("tenant {tenant} has {}", vnets.join(", "));
            return Err(Problem::new(ProblemKind::Conflict, problem).hint("delete those first"));
        }
        let after = before.without_tenant(tenant);
        let changes = after.changes_from(&before, &BTreeSet::new(), false);
        self.store(&before, after)?;
        Ok(Report { changes, ..Report::default() })
    }

    /// Stops and forgets a vnet.
    pub(crate) fn drop_vnet(
        &self,
        scope: &Scope,
        vnet: &str,
        progress: ProgressFn<'_>,
    ) -> Result<Report, Problem> {
        let _turn = self.turn();
        let before = self.model();
        if !before.vnets.contains_key(vnet) {
            return Err(no_vnet(vnet));
        }
        let after = before.without(vnet, &self.host.places, &self.cpus).map_err(invalid)?;
        let changes = vec![Changed {
            object: format!("vnet/{vnet}"),
            action: Action::Delete,
            detail: String::new(),
        }];
        self.settle(&before, after, &mut scoped(scope, progress))?;
        let left = self.host.state.things().map_err(Problem::internal)?;
        let prefix = format!("{vnet}/");
        let left: Vec<String> = left
            .into_keys()
            .filter(|key| {
                let name = key.split_once(' ').map_or("", |(_, name)| name);
                name.starts_with(&prefix) || *key == format!("vnet {vnet}")
            })
            .collect();
        if left.is_empty() {
            return Ok(Report { changes, ..Report::default() });
        }
        Err(Problem::internal(format!("not taken down yet: {}", left.join(", ")))
            .hint("it is being tried again; see the daemon's log"))
    }

    /// Sets a link's administrative state.
    pub(crate) fn change_link(
        &self,
        scope: &Scope,
        vnet: &str,
        link: &str,
        up: bool,
    ) -> Result<Report, Problem> {
        let _turn = self.turn();
        let before = self.model();
        let Some(plan) = before.plan.vnets.get(vnet) else { return Err(no_vnet(vnet)) };
        let index = plan.mux.vlinks.iter().position(|known| known.name == link).or_else(|| {
            let is_end = |end: &pdp_spec::units::Endpoint| end.to_string() == link;
            plan.links.iter().position(|ends| ends.iter().any(is_end))
        });
        let Some(index) = index else {
            let names: Vec<&str> = plan.mux.vlinks.iter().map(|link| link.name.as_str()).collect();
            return Err(Problem::not_found(format!("vnet {vnet}: no link {link:?}"))
                .hint(format!("its links are {}; or name an end like r1:eth0", names.join(", "))));
        };
        let key = (vnet.to_string(), plan.mux.vlinks[index].name.clone());
        let mut after = Model::clone(&before);
        if up {
            after.ledger.links_down.remove(&key);
        } else {
            after.ledger.links_down.insert(key.clone());
        }
        after.replan(&self.host.places, &self.cpus).map_err(invalid)?;
        let mut changes = after.changes_from(&before, &BTreeSet::new(), false);
        changes.retain(|change| change.object != format!("vnet/{vnet}"));
        if changes.is_empty() {
            changes.push(Changed {
                object: format!("vnet/{vnet}/link/{}", key.1),
                action: Action::Unchanged,
                detail: String::new(),
            });
        }
        self.settle(&before, after, &mut |_| {})?;
        self.report(scope, changes, &BTreeSet::from([vnet.to_string()]))
    }

    /// Changes the number of forwarding guests of a router, as an applied spec with that number
    /// would.
    pub(crate) fn change_guests(
        &self,
        scope: &Scope,
        vnet: &str,
        node: &str,
        request: ScaleRequest,
        progress: ProgressFn<'_>,
    ) -> Result<Report, Problem> {
        let _turn = self.turn();
        let before = self.model();
        let Some(wanted) = before.vnets.get(vnet) else { return Err(no_vnet(vnet)) };
        if before.ledger.stopped {
            return Err(Problem::new(ProblemKind::Conflict, "everything is stopped")
                .hint("start it by `pdp up` first"));
        }
        let mut wanted = wanted.clone();
        let key = (vnet.to_string(), node.to_string());
        let has = before.ledger.placements.get(&key);
        let plane = wanted.spec.nodes.get_mut(node).and_then(|node| node.data_plane.as_mut());
        let (Some(has), Some(plane)) = (has, plane) else {
            return Err(Problem::not_found(format!("vnet {vnet}: no router {node:?}"))
                .hint(format!("`pdp inspect {vnet}` lists its nodes")));
        };
        if !(1..=GUESTS_MAX).contains(&(request.guests as usize)) {
            let problem = format!("guests {} is not within 1 to {GUESTS_MAX}", request.guests);
            return Err(Problem::new(ProblemKind::Invalid, problem));
        }
        // What one has on the mean, times how many there are to be.
        let sum: u64 = has.values().map(|guest| u64::from(guest.power_millicores)).sum();
        let power = (sum * u64::from(request.guests)).div_ceil(has.len().max(1) as u64);
        let power = request.power_millicores.map_or(power, u64::from);
        plane.guests = Some(request.guests);
        plane.power = Cores(u32::try_from(power).unwrap_or(u32::MAX).min(MILLICORES_MAX));
        let document = pdp_spec::Document::made(Object::VirtualNetwork(wanted));
        let mut existing = before.existing(&self.cpus, false);
        existing.asker = scope.tenant().map(str::to_owned);
        let intent = pdp_spec::check(&[document], &existing).map_err(no_room)?;
        let after = before.with(intent, &self.host.places, &self.cpus).map_err(invalid)?;
        let named = BTreeSet::from([vnet.to_string()]);
        let changes = after.changes_from(&before, &named, false);
        self.settle(&before, after, &mut scoped(scope, progress))?;
        self.report(scope, changes, &named)
    }

    fn turn(&self) -> std::sync::MutexGuard<'_, ()> {
        self.changing.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn store(&self, before: &Model, after: Model) -> Result<(), Problem> {
        let change = after.change_from(before);
        self.host.state.commit(&change, &after.ledger).map_err(|error| internal(&error))?;
        *self.model.write().unwrap_or_else(|poisoned| poisoned.into_inner()) = Arc::new(after);
        Ok(())
    }

    /// Stores a model and waits until the keeper has made the machine so, as far as it could.
    fn settle(
        &self,
        before: &Model,
        after: Model,
        progress: ProgressFn<'_>,
    ) -> Result<(), Problem> {
        self.store(before, after)?;
        let (sender, news) = mpsc::channel();
        {
            let mut orders = self.orders.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            orders.sender.send(sender).map_err(|_| keeper_gone())?;
            // A full pipe wakes as well.
            let _ = orders.wake.write(&[1]);
        }
        loop {
            match news.recv() {
                Ok(News::Step(step)) => progress(step),
                Ok(News::Done) => return Ok(()),
                Err(_) => return Err(keeper_gone()),
            }
        }
    }

    /// The report, or what is wrong now with what was named.
    fn report(
        &self,
        scope: &Scope,
        changes: Vec<Changed>,
        named: &BTreeSet<String>,
    ) -> Result<Report, Problem> {
        let seen = self.seen();
        let mut wrong = Vec::new();
        for (key, health) in &seen.healths {
            use crate::key::Key;
            let touched = match key {
                // The node's own are the operators' to know and to mend.
                Key::Mux => *scope == Scope::Node,
                Key::External(_) => *scope == Scope::Node && !named.is_empty(),
                Key::Vnet(vnet) | Key::Node { vnet, .. } | Key::Guest { vnet, .. } => {
                    named.contains(vnet)
                }
            };
            if let (true, Some(problem)) = (touched, &health.problem) {
                wrong.push(format!("{key}: {problem}"));
            }
        }
        if wrong.is_empty() {
            return Ok(Report { changes, ..Report::default() });
        }
        Err(Problem::new(ProblemKind::Internal, wrong.join("\n"))
            .hint("the change is stored and is being tried again; see `pdp get` and `pdp logs`"))
    }
}

fn refusal(diagnostics: Vec<pdp_spec::Diagnostic>) -> Problem {
    let count = diagnostics.len();
    let mut problem = Problem::new(
        ProblemKind::Invalid,
        match count {
            1 => "1 fault in the spec; nothing was changed".to_string(),
            _ => format!("{count} faults in the spec; nothing was changed"),
        },
    );
    problem.diagnostics = diagnostics;
    problem
}

/// Faults of a spec that nobody wrote: the request can't be met as things are.
fn no_room(diagnostics: Vec<pdp_spec::Diagnostic>) -> Problem {
    let Some(first) = diagnostics.into_iter().next() else {
        return Problem::internal("refused without a reason");
    };
    Problem::new(ProblemKind::Conflict, format!("{}: {}", first.object, first.message))
        .hint(first.hint)
}

fn invalid(error: impl std::error::Error) -> Problem {
    Problem::new(ProblemKind::Invalid, words(&error))
}

fn internal(error: &dyn std::error::Error) -> Problem {
    Problem::internal(words(error))
}

fn keeper_gone() -> Problem {
    Problem::internal("the daemon's keeper ended").hint("start the daemon anew")
}

/// Steps of a change as somebody may know them: those that name a vnet outside of the scope, or none,
/// are left out and not counted.
fn scoped<'a>(scope: &'a Scope, progress: ProgressFn<'a>) -> impl FnMut(Progress) + Send + use<'a> {
    let mut count = 0;
    move |step| match scope {
        Scope::Node => progress(step),
        // As the keeper writes them: `starting node VNET/NODE`.
        Scope::Tenant(_) => {
            if step.what.split([' ', '/']).any(|word| scope.sees(word)) {
                count += 1;
                progress(Progress { done: count, total: count, what: step.what });
            }
        }
    }
}

/// Keeps the machine as the engine wants it, until the engine is gone.
pub fn keep(engine: &Engine, keeper: Keeper) {
    let host = engine.host.clone();
    let mut reconciler = Reconciler::new(&host);
    let mut watched: BTreeMap<PathBuf, OwnedFd> = BTreeMap::new();
    let mut waiting: Vec<Sender<News>> = Vec::new();
    loop {
        loop {
            match keeper.orders.try_recv() {
                Ok(order) => waiting.push(order),
                Err(mpsc::TryRecvError::Empty) => break,
                Err(mpsc::TryRecvError::Disconnected) => return,
            }
        }
        if !waiting.is_empty() {
            reconciler.forgive();
        }
        let plan = engine.model().wanted();
        let listeners = Mutex::new(&waiting);
        let outcome = reconciler.run(&plan, &|done, total, what| {
            let step = Progress { done, total, what: what.into() };
            tracing::info!("{what}");
            for listener in listeners.lock().unwrap_or_else(|p| p.into_inner()).iter() {
                // Who went away needs no news.
                let _ = listener.send(News::Step(step.clone()));
            }
        });
        if plan == Plan::default() {
            remove_places(&host);
        }
        let seen =
            Seen { healths: reconciler.healths(), vnets: plan.vnets.keys().cloned().collect() };
        *engine.seen.write().unwrap_or_else(|poisoned| poisoned.into_inner()) = Arc::new(seen);
        for listener in waiting.drain(..) {
            let _ = listener.send(News::Done);
        }

        watched.retain(|directory, _| outcome.processes.contains(directory));
        let mut unsettled = false;
        for directory in outcome.processes {
            if watched.contains_key(&directory) {
                continue;
            }
            match host.runtime.wait_exit(&directory) {
                Ok(Some(process)) => {
                    watched.entry(directory).or_insert(process);
                }
                Ok(None) => unsettled = true,
                Err(error) => tracing::warn!("{}", words(&error)),
            }
        }
        let mut again = outcome.again;
        if unsettled && again.is_none() {
            again = Some(Instant::now() + SETTLE_PAUSE);
        }
        while !wait(&host, &keeper.wake, &mut watched, again) {
            if again.is_some_and(|at| at <= Instant::now()) || reconciler.devices_changed() {
                break;
            }
        }
    }
}

/// Waits for an order or the end of a watched process (no longer watched then), at most until the
/// time and [`DEVICES_PAUSE`]; whether there was any.
fn wait(
    host: &Host,
    wake: &UnixStream,
    watched: &mut BTreeMap<PathBuf, OwnedFd>,
    again: Option<Instant>,
) -> bool {
    let left = again.map_or(DEVICES_PAUSE, |at| {
        at.saturating_duration_since(Instant::now()).min(DEVICES_PAUSE)
    });
    let timeout =
        Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) };
    let mut descriptors = vec![PollFd::from_borrowed_fd(wake.as_fd(), PollFlags::IN)];
    descriptors
        .extend(watched.values().map(|fd| PollFd::from_borrowed_fd(fd.as_fd(), PollFlags::IN)));
    if poll(&mut descriptors, Some(&timeout)).is_err() {
        return false;
    }
    let ready: Vec<bool> =
        descriptors.iter().map(|descriptor| !descriptor.revents().is_empty()).collect();
    drop(descriptors);
    if ready.first() == Some(&true) {
        let mut bytes = [0; 64];
        while matches!((&*wake).read(&mut bytes), Ok(1..)) {}
    }
    let ended: Vec<PathBuf> = watched
        .keys()
        .zip(ready.iter().skip(1))
        .filter(|(_, ready)| **ready)
        .map(|(directory, _)| directory.clone())
        .collect();
    for directory in ended {
        tracing::info!("{} ended {}", directory.display(), host.ending(&directory));
        watched.remove(&directory);
    }
    ready.contains(&true)
}

/// Removes what is left when nothing is to run: the cgroup, and directories of the pins, of the
/// container runtime and, where the journal was lost, of the mux.
fn remove_places(host: &Host) {
    let removed = host
        .runtime
        .cgroups()
        .remove("", Duration::from_secs(10))
        .map_err(host::HostError::from)
        .and_then(|()| host::remove_directory(&host.places.pins))
        .and_then(|()| host::remove_directory(&host.places.run.join("runc")))
        .and_then(|()| host::remove_directory(&host.places.run.join("mux")));
    if let Err(error) = removed {
        tracing::warn!("clearing up: {}", words(&error));
    }
}
