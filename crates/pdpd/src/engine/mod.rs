//! The node behind the API: changes the desired state, one change at a time.
//!
//! A change is parsed, checked and planned against the current desired state while other changes
//! are made. It is stored if no other change was stored meanwhile; otherwise it is checked again.
//! A large file thus delays no other client. Changes of one tenant are checked one at a time.
//!
//! A stored change is handed to the reconcile loop, which works on the machine
//! ([`crate::reconcile::run_loop`]). Answers come from the last results of that loop, from the
//! mux, and from the helpers themselves. They do not wait for a change in progress.

mod guests;
pub mod remains;

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex, MutexGuard, RwLock};
use std::time::{Duration, Instant};

use pdp_api::{
    ApplyRequest, ChangeAction, ChangeReport, DownRequest, EventKind, LinkChange, LinkRequest,
    ObjectChange as Changed, Problem, ProblemKind, Progress, RestartRequest, ScaleRequest,
};
use pdp_net::interface::InterfaceInfo;
use pdp_spec::limits::{GUESTS_MAX, MILLICORES_MAX};
use pdp_spec::units::Cores;
use pdp_spec::{
    Descriptors, Document, Existing, Intent, InterfaceFacts, Object, Tenant, VirtualNetwork,
};

use crate::access::{AccessScope, current_requester, no_vnet};
use crate::events::{WatchHub, event};
use crate::host::control::ControlError;
use crate::host::find_image;
use crate::host::query::LateHelpers;
use crate::images::Images;
use crate::intent::model::Model;
use crate::intent::state::StateChange;
use crate::kernel::observers::Observers;
use crate::machine::{Host, Machine};
use crate::plan::allocations::BootInstant;
use crate::plan::key::ObjectKey;
use crate::reconcile::run_loop::{ChangeProgress, ReconcileLoop};
use crate::util::{ProgressFn, error_chain, hide, lock};

pub(crate) use guests::has_guest;

/// Number of times that a change is checked while others store theirs.
/// After that no other change is stored while it is checked.
const TRIES_MAX: u32 = 3;

/// Longest wait of a change that does not fit, for the removal of earlier objects.
const ROOM_WAIT: Duration = Duration::from_secs(10);

/// Pause before the change is checked again.
const ROOM_PAUSE: Duration = Duration::from_millis(50);

/// Exclusive right to store a change.
type StoreLock<'a> = MutexGuard<'a, ()>;

/// A stored change that is in progress.
struct PendingChange {
    news: Receiver<ChangeProgress>,
    /// Objects that it changes.
    objects: Vec<Changed>,
}

/// The node.
///
/// Calls of the API arrive on separate threads, several at a time, and may block. A call
/// that changes something is never aborted, even if its client goes away.
///
/// If a call has an [`AccessScope`], its answer, steps and problem name nothing
/// outside of it. A vnet that a call names is in the client's scope.
#[derive(Debug)]
pub struct DaemonCore {
    /// The machine.
    pub host: Arc<Host>,
    /// CPUs of the machine.
    pub cpus: BTreeSet<u32>,
    /// True if a service manager runs the daemon.
    pub managed: bool,
    /// Numbers of descriptors that the daemon may open.
    descriptors: Descriptors,
    /// Works on the machine.
    pub reconcile_loop: ReconcileLoop,
    /// Images from registries and archives.
    pub images: Images,
    /// Called to end the daemon.
    exit: Box<dyn ExitFn>,
    /// Held while a change is stored.
    storing: Mutex<()>,
    /// By tenant; each lock is held while a change of that tenant is parsed and checked.
    checking: Mutex<BTreeMap<String, Arc<Mutex<()>>>>,
    model: RwLock<Arc<Model>>,
    /// Captures and traces in progress.
    pub(crate) captures: Observers,
    pub(crate) traces: Observers,
    /// Helpers that answer late.
    pub(crate) late_helpers: LateHelpers,
}

/// Function that ends the daemon a moment after the call.
pub trait ExitFn: Fn(bool) + Send + Sync {}

impl<F: Fn(bool) + Send + Sync> ExitFn for F {}

impl std::fmt::Debug for dyn ExitFn {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("exit")
    }
}

impl DaemonCore {
    /// Loads the stored node. The caller must run its reconcile loop ([`ReconcileLoop::run`]),
    /// which acts on `machine`: the host itself, except in tests.
    pub fn new(
        host: Arc<Host>,
        machine: Arc<dyn Machine>,
        cpus: BTreeSet<u32>,
        managed: bool,
        descriptors: Descriptors,
        exit: impl ExitFn + 'static,
    ) -> anyhow::Result<Self> {
        let documents = host.state.documents()?;
        let mut allocations = host.state.allocations()?;
        let stopped = allocations.stopped;
        let started = allocations.begin_schedules(&BootInstant::now());
        if !started.is_empty() {
            host.state.commit(&StateChange {
                allocations: started,
                stopped,
                ..StateChange::default()
            })?;
        }
        let mut model = Model::load(&host.places, &cpus, &documents, allocations)?;
        for ((kind, name), why) in &*model.damaged {
            tracing::warn!("{kind} {name}: {why}; apply it again, or delete it");
        }
        model.remains = Arc::new(host.state.remains()?);
        let plan = model.wanted();
        let runtime = &host.runtime;
        let workplace = runtime.workplace().clone();
        let images = Images::open(runtime.paths(), runtime.cgroups().clone(), workplace)?;
        let reconcile_loop =
            ReconcileLoop::new(machine, host.state.clone(), host.places.clone(), plan)?;
        let engine = Self {
            host,
            cpus,
            managed,
            descriptors,
            reconcile_loop,
            images,
            exit: Box::new(exit),
            storing: Mutex::default(),
            checking: Mutex::default(),
            model: RwLock::new(Arc::new(model)),
            captures: Observers::captures(),
            traces: Observers::traces(),
            late_helpers: LateHelpers::default(),
        };
        let vnets = engine.model().vnets.keys().cloned().collect::<Vec<_>>();
        engine.watch_hub().expect(vnets, engine.reconcile_loop.being_removed());
        engine.forget_images();
        engine.free_numbers().map_err(|problem| anyhow::anyhow!(problem.error))?;
        Ok(engine)
    }

    /// Returns the hub from which all watchers read.
    pub fn watch_hub(&self) -> &Arc<WatchHub> {
        self.reconcile_loop.watch_hub()
    }

    /// Returns the current desired state.
    pub fn model(&self) -> Arc<Model> {
        self.model.read().unwrap_or_else(|poisoned| poisoned.into_inner()).clone()
    }

    /// Returns the applied tenants by name.
    pub fn tenants(&self) -> Arc<BTreeMap<String, Tenant>> {
        self.model().tenants.clone()
    }

    /// Returns a problem as a client of this scope may see it. Tenants do not learn paths of the
    /// machine.
    pub fn redact_for(&self, scope: &AccessScope, problem: Problem) -> Problem {
        if *scope == AccessScope::Node {
            return problem;
        }
        let hide = |text: String| hide(self.host.state_directory(), text);
        let mut problem =
            Problem { error: hide(problem.error), hint: problem.hint.map(hide), ..problem };
        for diagnostic in &mut problem.diagnostics {
            diagnostic.message = hide(std::mem::take(&mut diagnostic.message));
            diagnostic.hint = hide(std::mem::take(&mut diagnostic.hint));
        }
        problem
    }

    /// Applies files, or returns what that would change. All files are checked before anything is
    /// done.
    pub fn apply(
        &self,
        scope: &AccessScope,
        request: ApplyRequest,
        progress: ProgressFn<'_>,
    ) -> Result<ChangeReport, Problem> {
        let checks = self.checks_of(scope);
        let mut permit = checks.as_deref().map(lock);
        let ApplyRequest { files, dry_run, only } = request;
        let mut documents = pdp_spec::parse(&files).map_err(refusal)?;
        drop(files);
        let only: BTreeSet<String> = only.into_iter().collect();
        if !only.is_empty() {
            documents.retain(|document| matches!(document.object, Object::VirtualNetwork(_)));
            in_files(&documents, &only)?;
        }
        let mut named = BTreeSet::new();
        for document in &documents {
            if let Object::VirtualNetwork(vnet) = &document.object {
                named.insert(vnet.metadata.name.clone());
            }
        }
        let pin = |documents: &mut Vec<Document>, fetch: bool, progress: ProgressFn<'_>| {
            self.images.pin(documents, &only, &self.model(), fetch, progress).map_err(refusal)
        };
        let applied = |before: &Model, documents: &[Document]| match only.is_empty() {
            true => self.applied(scope, before, documents, &named),
            false => self.applied(scope, before, &narrowed(documents, before, &only), &named),
        };
        let (mut pins, missing) = pin(&mut documents, false, progress)?;
        if !missing.is_empty() && !dry_run {
            // Check before pulling, so that nothing is pulled for a refused
            // change. Pull without the lock, so that no other change waits.
            applied(&self.model(), &documents)?;
            drop(permit);
            pins = pin(&mut documents, true, progress)?.0;
            permit = checks.as_deref().map(lock);
        }
        let check = |before: &Model| applied(before, &documents);
        if !dry_run {
            self.wait_for_room(scope, progress, check);
        }
        let (mut changes, news) = match dry_run {
            true => (check(&self.model())?.1, None),
            false => self.revise(&retries(scope, &named), check)?,
        };
        drop((documents, permit, pins));
        if dry_run {
            changes.extend(missing.into_iter().map(|name| Changed {
                object: format!("image/{name}"),
                action: ChangeAction::Create,
                detail: "will be fetched by apply".into(),
            }));
            return Ok(ChangeReport { changes, dry_run, exits: false });
        }
        self.settle(news, &mut scoped(scope, progress))?;
        self.report(scope, changes, &named)
    }

    /// Returns the model with only those remains that still exist.
    fn counted(&self, model: &Model) -> Model {
        let mut counted = model.clone();
        self.forget_remains(&mut counted);
        counted
    }

    /// Forgets remains that are gone. Returns true if there were any.
    fn forget_remains(&self, model: &mut Model) -> bool {
        if model.remains.is_empty() {
            return false;
        }
        // Nothing is known about a plan that the reconcile loop does not follow yet.
        let Some(open) = self.reconcile_loop.unsettled(&model.plan) else { return false };
        model.forget_remains(|vnet, node| !open.contains(&(vnet.into(), node.map(str::to_owned))))
    }

    /// Waits a while for ongoing removals, if the change fits without
    /// the removed objects and does not fit with them.
    fn wait_for_room<T>(
        &self,
        scope: &AccessScope,
        progress: ProgressFn<'_>,
        check: impl Fn(&Model) -> Result<T, Problem>,
    ) {
        let (end, mut reported) = (Instant::now() + ROOM_WAIT, false);
        let mut progress = scoped(scope, progress);
        while Instant::now() < end {
            let model = self.counted(&self.model());
            if model.remains.is_empty() || check(&model).is_ok() {
                return;
            }
            let without = Model { remains: Arc::default(), ..model.clone() };
            if check(&without).is_err() {
                return;
            }
            if !std::mem::replace(&mut reported, true) {
                for vnet in model.remains.keys() {
                    let what = format!("waiting for the removal of vnet {vnet}");
                    progress(Progress { done: 0, total: 1, what });
                }
            }
            std::thread::sleep(ROOM_PAUSE);
        }
    }

    /// Returns the facts that the check of a change needs, except network devices and the client.
    fn existing(&self, before: &Model, new_substrate: bool) -> Existing {
        let existing = before.existing(&self.cpus, new_substrate);
        let without_v6 = !pdp_net::sysctl::has_v6();
        Existing { descriptors: Some(self.descriptors), without_v6, ..existing }
    }

    /// Returns the desired state after documents are applied, and the changes.
    fn applied(
        &self,
        scope: &AccessScope,
        before: &Model,
        documents: &[Document],
        named: &BTreeSet<String>,
    ) -> Result<(Model, Vec<Changed>), Problem> {
        if before.allocations.stopped && *scope != AccessScope::Node {
            return Err(Problem::new(ProblemKind::Conflict, "everything is stopped")
                .hint("an operator starts it with `pdp up`"));
        }
        let before = &self.counted(before);
        let is_substrate = |document: &Document| matches!(document.object, Object::Substrate(_));
        let substrate = documents.iter().any(is_substrate);
        let mut existing = self.existing(before, substrate);
        let mut devices = BTreeMap::new();
        let interfaces = documents.iter().filter_map(|document| match &document.object {
            Object::Substrate(substrate) => Some(substrate),
            Object::VirtualNetwork(_) | Object::Tenant(_) => None,
        });
        for interface in interfaces
            .chain(&existing.substrate)
            .flat_map(|substrate| substrate.spec.interfaces.values())
        {
            let device = interface.device.as_deref().map(InterfaceInfo::by_name);
            if let Some(Ok(found)) = device {
                devices.insert(found.name, InterfaceFacts { mtu: found.mtu });
            }
        }
        existing.devices = Some(devices);
        existing.requester = scope.tenant().map(str::to_owned);
        let intent = pdp_spec::check(documents, &existing).map_err(refusal)?;
        // Images come last, so that the client learns nothing of an image that
        // it may not use. The image of a running guest may be gone from disk.
        let changes = |vnet: &str, node: &str| {
            let of =
                |vnets: &Arc<pdp_spec::Vnets>| Some(vnets.get(vnet)?.spec.nodes.get(node)?.clone());
            of(&intent.vnets) != of(&before.vnets)
        };
        let find_bind = |source: &str| pdp_container::binds::check(source.as_ref());
        let faults = pdp_spec::check_images(documents, changes, find_image, find_bind);
        if !faults.is_empty() {
            return Err(refusal(faults));
        }
        let after = self.with(before, intent)?;
        let mut changes = after.changes_from(before, named, substrate);
        if *scope != AccessScope::Node {
            // A tenant's files change only its own vnets, `vnet/TENANT.NAME/…`.
            changes.retain(|change| change.object.split('/').nth(1).is_some_and(|v| scope.sees(v)));
        }
        for document in documents {
            let Object::Tenant(tenant) = &document.object else { continue };
            let object = format!("tenant/{}", tenant.metadata.name);
            let interfaces = after.effective_substrate(&self.cpus).spec.interfaces;
            let detail = missing_on_machine(tenant, |interface| interfaces.contains_key(interface));
            match changes.iter_mut().find(|change| change.object == object) {
                Some(change) => change.detail = detail,
                None => changes.push(Changed { object, action: ChangeAction::Unchanged, detail }),
            }
        }
        Ok((after, changes))
    }

    /// Returns the desired state after a checked change.
    fn with(&self, before: &Model, intent: Intent) -> Result<Model, Problem> {
        let may_exist = |vnet: &str| self.reconcile_loop.may_exist(vnet);
        before.with(intent, &self.host.places, &self.cpus, may_exist).map_err(invalid)
    }

    /// Frees the numbers of deleted vnets and forgets their remains
    /// that are gone. What goes later is freed with the next change.
    fn free_numbers(&self) -> Result<(), Problem> {
        let may_exist = |vnet: &str| self.reconcile_loop.may_exist(vnet);
        let free = |model: &mut Model| model.free_numbers(may_exist) | self.forget_remains(model);
        if free(&mut Model::clone(&self.model())) {
            self.revise(&|_| false, |before| {
                let mut after = before.clone();
                free(&mut after);
                Ok((after, ()))
            })?;
        }
        Ok(())
    }

    /// Starts everything that is stored.
    pub fn up(&self, progress: ProgressFn<'_>) -> Result<ChangeReport, Problem> {
        let ((named, changes), news) = self.revise(&|_| true, |before| {
            let mut after = Model::clone(before);
            after.allocations.stopped = false;
            let named: BTreeSet<String> = after.vnets.keys().cloned().collect();
            let changes = after.changes_from(before, &named, false);
            Ok((after, (named, changes)))
        })?;
        self.settle(news, progress)?;
        self.report(&AccessScope::Node, changes, &named)
    }

    /// Stops all vnets and the mux. If [`ChangeReport::exits`] is set, the
    /// daemon exits by itself a moment after this returns.
    pub fn down(
        &self,
        request: DownRequest,
        progress: ProgressFn<'_>,
    ) -> Result<ChangeReport, Problem> {
        let (changes, news) = self.revise(&|_| true, |before| {
            let mut after = Model::clone(before);
            after.allocations.stopped = true;
            let mut changes = after.changes_from(before, &BTreeSet::new(), false);
            if request.purge {
                let stopped =
                    changes.iter_mut().filter(|change| change.action == ChangeAction::Stop);
                stopped.for_each(|change| change.action = ChangeAction::Delete);
            }
            Ok((after, changes))
        })?;
        self.settle(news, progress)?;
        if !self.model().allocations.stopped {
            return Err(Problem::new(
                ProblemKind::Conflict,
                "everything was started again meanwhile",
            )
            .hint("repeat `pdp down`"));
        }
        let journal = self.host.state.journal().map_err(Problem::internal)?;
        let mut left: Vec<ObjectKey> = journal.keys().filter_map(|key| key.parse().ok()).collect();
        left.extend(self.reconcile_loop.stuck().into_iter().map(|stuck| stuck.key));
        left.extend(
            self.reconcile_loop
                .problems(|key| *key == ObjectKey::Leftovers)
                .into_iter()
                .map(|it| it.0),
        );
        left.sort();
        left.dedup();
        let remains = self.remnants();
        let removes: Vec<&str> = remains.iter().map(|it| it.command.as_str()).collect();
        let removes = match removes.is_empty() {
            true => "see the daemon's log".to_owned(),
            false => format!("remove it with `{}`", removes.join("; ")),
        };
        if !left.is_empty() && !request.purge {
            let hint = format!(
                "everything else is stopped; the daemon retries, and `pdp doctor` shows what is \
                 left: {removes}"
            );
            return Err(self.stays(&left).hint(hint));
        }
        if request.purge {
            // Remains use numbers. No other vnet gets these numbers while this daemon runs.
            let bears = |vnet: &str| self.reconcile_loop.may_exist(vnet);
            self.revise(&|_| false, |before| match before.allocations.stopped {
                true => Ok((before.purged(bears), ())),
                false => Err(Problem::new(
                    ProblemKind::Conflict,
                    "everything was started again meanwhile",
                )
                .hint("repeat `pdp down --purge`")),
            })?;
        }
        let exits = request.exit && !self.managed;
        if exits {
            (self.exit)(request.purge);
        }
        if !left.is_empty() {
            let ends = if exits {
                "the daemon ends, and retries once more then"
            } else {
                "it is being tried again"
            };
            return Err(self
                .stays(&left)
                .hint(format!("everything else is removed; {ends}: {removes}")));
        }
        Ok(ChangeReport { changes, dry_run: false, exits })
    }

    /// Deletes the substrate; refused while vnets exist.
    pub fn delete_substrate(&self, progress: ProgressFn<'_>) -> Result<ChangeReport, Problem> {
        let retry = retries(&AccessScope::Node, &BTreeSet::new());
        let (changes, news) = self.revise(&retry, |before| {
            if before.substrate.is_none() {
                let problem = "no substrate was applied; the default one is in use";
                return Err(Problem::not_found(problem));
            }
            if !before.vnets.is_empty() {
                let names: Vec<&str> = before.vnets.keys().map(String::as_str).collect();
                return Err(Problem::new(
                    ProblemKind::Conflict,
                    format!("the substrate is used by {}", names.join(", ")),
                )
                .hint("delete those vnets first"));
            }
            let mut after = Model::clone(before);
            after.substrate = None;
            after.replan(before, [], &self.host.places, &self.cpus).map_err(invalid)?;
            let changes = after.changes_from(before, &BTreeSet::new(), true);
            Ok((after, changes))
        })?;
        self.settle(news, progress)?;
        self.report(&AccessScope::Node, changes, &BTreeSet::new())
    }

    /// Deletes a tenant and its tokens; refused while it has vnets.
    pub fn delete_tenant(&self, tenant: &str) -> Result<ChangeReport, Problem> {
        self.free_numbers()?;
        let (changes, news) = self.revise(&|_| false, |before| {
            if !before.knows_tenant(tenant) {
                return Err(Problem::not_found(format!("no tenant {tenant:?}"))
                    .hint("`pdp get tenants` lists them"));
            }
            let scope = AccessScope::Tenant(tenant.into());
            let vnets: Vec<&str> =
                before.vnets.keys().filter(|vnet| scope.sees(vnet)).map(String::as_str).collect();
            if !vnets.is_empty() {
                let problem = format!("tenant {tenant} has {}", vnets.join(", "));
                let problem = Problem::new(ProblemKind::Conflict, problem);
                return Err(problem.hint("delete those first"));
            }
            let removing: Vec<&str> = before.allocations.vnets.keys().map(String::as_str).collect();
            let removing: Vec<&str> =
                removing.into_iter().filter(|vnet| scope.sees(vnet)).collect();
            if !removing.is_empty() {
                let problem = format!("tenant {tenant}: {} is not gone yet", removing.join(", "));
                let problem = Problem::new(ProblemKind::Conflict, problem);
                return Err(
                    problem.hint("try again once it is gone; the daemon's log says what delays it")
                );
            }
            let after = before.without_tenant(tenant);
            let changes = after.changes_from(before, &BTreeSet::new(), false);
            Ok((after, changes))
        })?;
        self.settle(news, &mut |_| {})?;
        // A later tenant of the same name is a different one.
        self.forget_images();
        Ok(ChangeReport { changes, ..ChangeReport::default() })
    }

    /// Forgets the images of deleted tenants.
    fn forget_images(&self) {
        if let Err(error) = self.images.forget_others(&|| self.model()) {
            tracing::warn!("images of tenants that are gone: {error}");
        }
    }

    /// Stops and deletes a vnet.
    pub fn delete_vnet(
        &self,
        scope: &AccessScope,
        vnet: &str,
        progress: ProgressFn<'_>,
    ) -> Result<ChangeReport, Problem> {
        let retry = retries(scope, &BTreeSet::from([vnet.to_string()]));
        let (_, news) = self.revise(&retry, |before| {
            if !before.vnets.contains_key(vnet) && before.damaged_vnet(vnet).is_none() {
                return Err(no_vnet(vnet));
            }
            let after = before.without(vnet, &self.host.places, &self.cpus).map_err(invalid)?;
            Ok((after, ()))
        })?;
        let changes = vec![Changed {
            object: format!("vnet/{vnet}"),
            action: ChangeAction::Delete,
            detail: String::new(),
        }];
        self.settle(news, &mut scoped(scope, progress))?;
        if self.model().vnets.contains_key(vnet) {
            // Applied again meanwhile. Its new state belongs to the report of that change.
            return Ok(ChangeReport { changes, ..ChangeReport::default() });
        }
        let left = self.reconcile_loop.unwanted(vnet);
        if left.is_empty() {
            self.free_numbers()?;
            return Ok(ChangeReport { changes, ..ChangeReport::default() });
        }
        Err(self.stays(&left).hint("the daemon retries; see its log"))
    }

    /// Returns a problem that lists objects not removed yet, with the reasons that are known.
    fn stays(&self, left: &[ObjectKey]) -> Problem {
        let words = |key: &ObjectKey| match self
            .reconcile_loop
            .health(key)
            .and_then(|health| health.problem)
        {
            Some(problem) => format!("{key}: {problem}"),
            None => key.to_string(),
        };
        let left: Vec<String> = left.iter().map(words).collect();
        Problem::internal(format!("not removed yet: {}", left.join("; ")))
    }

    /// Stops and deletes nodes of a vnet, with their links.
    pub fn delete_nodes(
        &self,
        scope: &AccessScope,
        vnet: &str,
        nodes: &BTreeSet<String>,
        progress: ProgressFn<'_>,
    ) -> Result<ChangeReport, Problem> {
        let named = BTreeSet::from([vnet.to_string()]);
        let (changes, news) = self.revise(&retries(scope, &named), |before| {
            let Some(network) = before.vnets.get(vnet) else { return Err(no_vnet(vnet)) };
            if before.allocations.stopped {
                return Err(Problem::new(ProblemKind::Conflict, "everything is stopped")
                    .hint("start it with `pdp up` first"));
            }
            if let Some(missing) = nodes.iter().find(|node| !network.spec.nodes.contains_key(*node))
            {
                return Err(Problem::not_found(format!("vnet {vnet}: no node {missing:?}"))
                    .hint(format!("`pdp get nodes {vnet}` lists them")));
            }
            let network = VirtualNetwork::clone(network).without(nodes);
            self.respecified(scope, before, network, &named)
        })?;
        self.settle(news, &mut scoped(scope, progress))?;
        self.report(scope, changes, &named)
    }

    /// Sets a link's administrative state; `link` is its name or one of its ends, `r1:eth0`.
    pub fn set_link(
        &self,
        scope: &AccessScope,
        vnet: &str,
        link: &str,
        request: LinkRequest,
    ) -> Result<ChangeReport, Problem> {
        let LinkRequest { up, silent } = request;
        if up && silent {
            let problem = Problem::new(
                ProblemKind::Invalid,
                format!("vnet {vnet}: link {link}: up can't be silent"),
            );
            return Err(problem.hint("only a link that is down can be silent"));
        }
        let named = BTreeSet::from([vnet.to_string()]);
        let (changes, news) = self.revise(&retries(scope, &named), |before| {
            let Some(plan) = before.plan.vnets.get(vnet) else { return Err(no_vnet(vnet)) };
            let link = &link_of(vnet, plan, link)?.name;
            let mut after = Model::clone(before);
            after.allocations.set_link(vnet, link, up, silent);
            after.replan(before, [vnet], &self.host.places, &self.cpus).map_err(invalid)?;
            let mut changes = after.changes_from(before, &BTreeSet::new(), false);
            changes.retain(|change| change.object != format!("vnet/{vnet}"));
            if changes.is_empty() {
                changes.push(Changed {
                    object: format!("vnet/{vnet}/link/{link}"),
                    action: ChangeAction::Unchanged,
                    detail: String::new(),
                });
            }
            Ok((after, changes))
        })?;
        self.settle(news, &mut |_| {})?;
        self.report(scope, changes, &named)
    }

    /// Changes the impairments of a link's ends, like an applied spec with them.
    pub fn change_link(
        &self,
        scope: &AccessScope,
        vnet: &str,
        link: &str,
        request: &LinkChange,
    ) -> Result<ChangeReport, Problem> {
        let named = BTreeSet::from([vnet.to_string()]);
        let (changes, news) = self.revise(&retries(scope, &named), |before| {
            let Some(plan) = before.plan.vnets.get(vnet) else { return Err(no_vnet(vnet)) };
            let name = &link_of(vnet, plan, link)?.name;
            let mut network = match before.vnets.get(vnet) {
                Some(network) => VirtualNetwork::clone(network),
                None => return Err(no_vnet(vnet)),
            };
            let links = &mut network.spec.links;
            if let Some(link) = links.iter_mut().find(|it| it.name.as_ref() == Some(name)) {
                let set = link.set(request.at.as_deref(), &request.set);
                set.map_err(|why| {
                    let problem = format!("vnet {vnet}: link {name}: {why}");
                    let problem = Problem::new(ProblemKind::Invalid, problem);
                    problem.hint("write keys and values as in the spec of a link: docs/links.md")
                })?;
            }
            let (after, changes) = self.respecified(scope, before, network, &named)?;
            let restarts = changes.iter().filter(|change| change.action == ChangeAction::Restart);
            let nodes: Vec<_> =
                restarts.filter_map(|change| change.object.rsplit('/').next()).collect();
            if !nodes.is_empty() && !request.restart {
                let problem = format!(
                    "vnet {vnet}: link {name}: this restarts {}, and settings made in them by hand \
                     are lost",
                    nodes.join(" and ")
                );
                return Err(Problem::new(ProblemKind::Conflict, problem).hint(
                    "a link between kernel routers uses the mux if frames wait in it, or else the \
                     kernel (docs/kernel.md); repeat it with --restart (`restart: true`)",
                ));
            }
            Ok((after, changes))
        })?;
        self.settle(news, &mut |_| {})?;
        self.report(scope, changes, &named)
    }

    /// Changes the number of a router's forwarding guests, like an applied spec with that number.
    pub fn scale(
        &self,
        scope: &AccessScope,
        vnet: &str,
        node: &str,
        request: ScaleRequest,
        progress: ProgressFn<'_>,
    ) -> Result<ChangeReport, Problem> {
        let named = BTreeSet::from([vnet.to_string()]);
        self.wait_for_room(scope, progress, |before| {
            self.scaled(scope, before, (vnet, node), request, &named)
        });
        let (changes, news) = self.revise(&retries(scope, &named), |before| {
            self.scaled(scope, before, (vnet, node), request, &named)
        })?;
        self.settle(news, &mut scoped(scope, progress))?;
        self.report(scope, changes, &named)
    }

    /// Restarts the processes of nodes.
    pub fn restart(
        &self,
        scope: &AccessScope,
        vnet: &str,
        request: &RestartRequest,
        progress: ProgressFn<'_>,
    ) -> Result<ChangeReport, Problem> {
        let model = self.model();
        let Some(plan) = model.plan.vnets.get(vnet) else { return Err(no_vnet(vnet)) };
        if model.allocations.stopped {
            return Err(Problem::new(ProblemKind::Conflict, "everything is stopped")
                .hint("start it with `pdp up` first"));
        }
        if request.nodes.is_empty() {
            return Err(Problem::new(
                ProblemKind::Invalid,
                format!("vnet {vnet}: no nodes to restart"),
            ));
        }
        let (mut keys, mut changes) = (BTreeSet::new(), Vec::new());
        for name in &request.nodes {
            let hint = format!("`pdp inspect {vnet}` lists its nodes with their guests");
            let Some(node) = plan.nodes.get(name) else {
                let problem = Problem::not_found(format!("vnet {vnet}: no node {name:?}"));
                return Err(problem.hint(hint));
            };
            let (key, detail) = match request.guest {
                Some(guest) if !node.guests.contains_key(&guest) => {
                    let problem =
                        format!("vnet {vnet}: node {name} has no forwarding guest {guest}");
                    return Err(Problem::not_found(problem).hint(hint));
                }
                Some(guest) => (ObjectKey::guest(vnet, name, guest), format!("guest {guest}")),
                None => (ObjectKey::node(vnet, name), String::new()),
            };
            if keys.insert(key) {
                let object = format!("vnet/{vnet}/node/{name}");
                changes.push(Changed { object, action: ChangeAction::Restart, detail });
            }
        }
        let restarted = keys.iter().map(|key| Changed {
            object: key.object(),
            action: ChangeAction::Restart,
            detail: String::new(),
        });
        let objects: Vec<_> = restarted.collect();
        for Changed { object, .. } in &objects {
            self.watch_hub().post(event(
                object.as_str(),
                EventKind::Begun,
                Some("restarted".into()),
            ));
        }
        let pending = PendingChange { news: self.reconcile_loop.restart(keys.clone()), objects };
        self.settle(Some(pending), &mut scoped(scope, progress))?;
        self.report_or_problem(changes, |key| keys.contains(key))
    }

    /// Returns the desired state with another number of guests for a router, and the changes.
    fn scaled(
        &self,
        scope: &AccessScope,
        before: &Model,
        (vnet, node): (&str, &str),
        request: ScaleRequest,
        named: &BTreeSet<String>,
    ) -> Result<(Model, Vec<Changed>), Problem> {
        let Some(network) = before.vnets.get(vnet) else { return Err(no_vnet(vnet)) };
        if before.allocations.stopped {
            return Err(Problem::new(ProblemKind::Conflict, "everything is stopped")
                .hint("start it with `pdp up` first"));
        }
        let has = network.shares().get(node);
        let mut network = VirtualNetwork::clone(network);
        let plane = network.spec.nodes.get_mut(node).and_then(|node| node.data_plane.as_mut());
        if let Some(plane) = plane.as_ref().filter(|plane| plane.needs().guests.is_none()) {
            let problem = format!("vnet {vnet}: router {node} has no forwarding guests");
            return Err(Problem::new(ProblemKind::Invalid, problem)
                .hint(format!("its data plane is {}", plane.forwarder())));
        }
        let (Some(has), Some(plane)) = (has, plane.and_then(|plane| plane.guests_mut())) else {
            return Err(Problem::not_found(format!("vnet {vnet}: no router {node:?}"))
                .hint(format!("`pdp inspect {vnet}` lists its nodes")));
        };
        if !(1..=GUESTS_MAX).contains(&(request.guests as usize)) {
            let problem = format!("guests {} is not within 1 to {GUESTS_MAX}", request.guests);
            return Err(Problem::new(ProblemKind::Invalid, problem));
        }
        // The mean share of a guest, times the new number of guests.
        // Guests that borrow have no share.
        let sum: u64 = has.iter().map(|share| u64::from(share.millicores)).sum();
        let mean = (sum * u64::from(request.guests)).div_ceil(has.len().max(1) as u64);
        let power = request.power_millicores.map(u64::from).or(plane.power.map(|_| mean));
        plane.guests = Some(request.guests);
        plane.power =
            power.map(|power| Cores(u32::try_from(power).unwrap_or(u32::MAX).min(MILLICORES_MAX)));
        self.respecified(scope, before, network, named)
    }

    /// Returns the desired state with another spec for a vnet, and the changes.
    fn respecified(
        &self,
        scope: &AccessScope,
        before: &Model,
        network: VirtualNetwork,
        named: &BTreeSet<String>,
    ) -> Result<(Model, Vec<Changed>), Problem> {
        let before = &self.counted(before);
        let document = pdp_spec::Document::from_object(Object::VirtualNetwork(network));
        let mut existing = self.existing(before, false);
        existing.requester = scope.tenant().map(str::to_owned);
        let intent = pdp_spec::check(&[document], &existing).map_err(no_room)?;
        let after = self.with(before, intent)?;
        let changes = after.changes_from(before, named, false);
        Ok((after, changes))
    }

    /// Makes a new model from the current one, stores it, and passes it to the reconcile
    /// loop. Failed objects that match `retry` are tried again, in addition to what changes.
    ///
    /// If another change was stored meanwhile, `make` is called again. The
    /// last call has the exclusive right to store, so this ends. Returns the
    /// result of `make`, and the change in progress for [`DaemonCore::settle`].
    fn revise<T>(
        &self,
        retry: &dyn Fn(&ObjectKey) -> bool,
        mut make: impl FnMut(&Model) -> Result<(Model, T), Problem>,
    ) -> Result<(T, Option<PendingChange>), Problem> {
        for _ in 0..TRIES_MAX {
            let before = self.model();
            let (after, result) = make(&before)?;
            let permit = lock(&self.storing);
            if Arc::ptr_eq(&before, &self.model()) {
                return Ok((result, Some(self.store(&permit, &before, after, retry)?)));
            }
        }
        let permit = lock(&self.storing);
        let before = self.model();
        let (after, result) = make(&before)?;
        Ok((result, Some(self.store(&permit, &before, after, retry)?)))
    }

    fn store(
        &self,
        _: &StoreLock<'_>,
        before: &Model,
        after: Model,
        retry: &dyn Fn(&ObjectKey) -> bool,
    ) -> Result<PendingChange, Problem> {
        let change = after.change_from(before);
        self.host.state.commit(&change).map_err(|error| internal(&error))?;
        if change.delete.iter().any(|(kind, _)| kind == "VirtualNetwork") {
            let is_vnet = |part: &OsStr| part.to_str().is_some_and(|n| after.vnets.contains_key(n));
            self.late_helpers.keep_only(|path| path.iter().any(is_vnet));
        }
        let after = Arc::new(after);
        *self.model.write().unwrap_or_else(|poisoned| poisoned.into_inner()) = after.clone();
        let objects = self.announce(before, &after, &change);
        // In the order in which they are stored.
        Ok(PendingChange { news: self.reconcile_loop.want(after.wanted(), retry), objects })
    }

    /// Tells watchers what a change is about to change, and returns the
    /// objects. Does nothing if no client requested the change.
    fn announce(&self, before: &Model, after: &Model, change: &StateChange) -> Vec<Changed> {
        let put = change.put.iter().map(|document| (&document.kind, &document.name, "applied"));
        let deleted = change.delete.iter().map(|(kind, name)| (kind, name, "deleted"));
        let mut objects = BTreeMap::new();
        for (kind, name, what) in put.chain(deleted) {
            let (kind, was) = match kind.as_str() {
                "VirtualNetwork" => ("vnet", before.vnets.contains_key(name)),
                "Tenant" => ("tenant", before.tenants.contains_key(name)),
                _ => ("substrate", before.substrate.is_some()),
            };
            let action = match (what, was) {
                ("deleted", _) => ChangeAction::Delete,
                (_, true) => ChangeAction::Change,
                (_, false) => ChangeAction::Create,
            };
            objects.insert(format!("{kind}/{name}"), (what, action));
        }
        for vnet in change.allocations.keys().filter(|vnet| after.vnets.contains_key(*vnet)) {
            objects.entry(format!("vnet/{vnet}")).or_insert(("changed", ChangeAction::Change));
        }
        let stops = before.allocations.stopped != after.allocations.stopped;
        if stops {
            let what = match after.allocations.stopped {
                true => ("stopped", ChangeAction::Stop),
                false => ("started", ChangeAction::Start),
            };
            objects.insert("node".into(), what);
        }
        // Without a client this is a clean-up.
        let requested = current_requester().is_some();
        for (object, (what, _)) in objects.iter().filter(|_| requested) {
            self.watch_hub().post(event(
                object.as_str(),
                EventKind::Begun,
                Some((*what).to_owned()),
            ));
        }
        let vnets = objects.keys().filter_map(|object| object.strip_prefix("vnet/"));
        self.watch_hub().touch_vnets(vnets.chain(change.allocations.keys().map(String::as_str)));
        if stops {
            self.watch_hub().touch_vnets(after.vnets.keys().map(String::as_str));
        }
        if !requested {
            objects.clear();
        }
        let changed = |(object, (_, action))| Changed { object, action, detail: String::new() };
        objects.into_iter().map(changed).collect()
    }

    /// Waits until the objects of a change are as planned, as far as
    /// possible; other changes may follow meanwhile. Adds the changed
    /// objects to the request's audit log entry and tells watchers.
    fn settle(
        &self,
        pending: Option<PendingChange>,
        progress: ProgressFn<'_>,
    ) -> Result<(), Problem> {
        let Some(PendingChange { news, objects }) = pending else { return Ok(()) };
        if let Some(begun) = current_requester().and_then(|asker| asker.audit_entry)
            && !objects.is_empty()
        {
            // No lock is held here, since the log may be slow.
            begun.changed_blocking(objects.clone());
        }
        loop {
            match news.recv() {
                Ok(ChangeProgress::Step(step)) => progress(step),
                Ok(ChangeProgress::Done) => break,
                Err(_) => return Err(reconciler_gone()),
            }
        }
        for Changed { object, .. } in objects {
            let below = format!("{object}/");
            let of = |key: &ObjectKey| {
                let key = key.object();
                key == object || key.starts_with(&below)
            };
            let first = self.reconcile_loop.problems(of).into_iter().next();
            let (what, why) = match first {
                Some((key, problem)) => (EventKind::Failed, Some(format!("{key}: {problem}"))),
                None => (EventKind::Done, None),
            };
            self.watch_hub().post(event(object, what, why));
        }
        match self.model().remains.is_empty() {
            true => Ok(()),
            false => self.free_numbers(),
        }
    }

    /// Returns the lock to hold while a tenant's change is checked. Operators' changes need none.
    fn checks_of(&self, scope: &AccessScope) -> Option<Arc<Mutex<()>>> {
        let tenant = scope.tenant()?;
        Some(lock(&self.checking).entry(tenant.into()).or_default().clone())
    }

    /// Returns the report, or the current problems of the named vnets.
    fn report(
        &self,
        scope: &AccessScope,
        changes: Vec<Changed>,
        named: &BTreeSet<String>,
    ) -> Result<ChangeReport, Problem> {
        let concerns = retries(scope, named);
        let concerns = |key: &ObjectKey| match key {
            ObjectKey::External(_) => !named.is_empty() && concerns(key),
            ObjectKey::Leftovers => false,
            _ => concerns(key),
        };
        self.report_or_problem(changes, concerns)
    }

    /// Returns the report, or the current problems of the objects for
    /// which `concerns` returns true.
    fn report_or_problem(
        &self,
        changes: Vec<Changed>,
        concerns: impl Fn(&ObjectKey) -> bool,
    ) -> Result<ChangeReport, Problem> {
        let problems = self.reconcile_loop.problems(concerns).into_iter();
        let wrong: Vec<String> =
            problems.map(|(key, problem)| format!("{key}: {problem}")).collect();
        if wrong.is_empty() {
            return Ok(ChangeReport { changes, ..ChangeReport::default() });
        }
        Err(Problem::new(ProblemKind::Internal, wrong.join("\n"))
            .hint("the change is stored, and the daemon retries; see `pdp get` and `pdp logs`"))
    }
}

/// Lists users and interfaces of a tenant that the machine does not have yet.
fn missing_on_machine(tenant: &Tenant, has_interface: impl Fn(&str) -> bool) -> String {
    let is_user = |name: &str| {
        name.parse::<u32>().is_ok() || matches!(nix::unistd::User::from_name(name), Ok(Some(_)))
    };
    let users = tenant.spec.unix_users.iter().filter(|user| !is_user(user));
    let interfaces = tenant.spec.interfaces.keys().filter(|name| !has_interface(name));
    let users = users.map(|user| format!("no user {user} on this machine yet"));
    let interfaces = interfaces.map(|name| format!("no external interface {name} yet"));
    users.chain(interfaces).collect::<Vec<_>>().join(", ")
}

/// Checks that each of these nodes is in one of the documents.
fn in_files(documents: &[Document], only: &BTreeSet<String>) -> Result<(), Problem> {
    let mut names = BTreeSet::new();
    for document in documents {
        if let Object::VirtualNetwork(vnet) = &document.object {
            names.extend(vnet.spec.nodes.keys());
        }
    }
    match only.iter().find(|node| !names.contains(node)) {
        None => Ok(()),
        Some(missing) => {
            let names: Vec<&str> = names.into_iter().map(String::as_str).collect();
            let problem =
                Problem::new(ProblemKind::Invalid, format!("no node {missing:?} in the files"));
            Err(problem.hint(format!("their nodes are {}", names.join(", "))))
        }
    }
}

/// Returns the vnets' documents such that only these nodes of them are applied.
fn narrowed(documents: &[Document], before: &Model, only: &BTreeSet<String>) -> Vec<Document> {
    let narrow = |document: &Document| match &document.object {
        Object::VirtualNetwork(vnet) => {
            let stored =
                before.vnets.get(&vnet.metadata.name).map(|stored| VirtualNetwork::clone(stored));
            document.with(Object::VirtualNetwork(vnet.clone().only(only, stored.as_ref())))
        }
        _ => document.clone(),
    };
    documents.iter().map(narrow).collect()
}

/// Returns a predicate: true for failed objects that a change of these vnets tries again.
fn retries(scope: &AccessScope, named: &BTreeSet<String>) -> impl Fn(&ObjectKey) -> bool + use<> {
    // Only operators may know of the node's own objects and repair them.
    let (node, named) = (*scope == AccessScope::Node, named.clone());
    move |key| match key {
        ObjectKey::Mux | ObjectKey::External(_) | ObjectKey::Leftovers => node,
        ObjectKey::Vnet(vnet) | ObjectKey::Node { vnet, .. } | ObjectKey::Guest { vnet, .. } => {
            named.contains(vnet)
        }
    }
}

fn refusal(diagnostics: Vec<pdp_spec::Diagnostic>) -> Problem {
    let faults = pdp_spec::count(diagnostics.len(), "fault");
    let problem = format!("{faults} in the spec; nothing was changed");
    let mut problem = Problem::new(ProblemKind::Invalid, problem);
    problem.diagnostics = diagnostics;
    problem
}

/// Reports faults of a generated spec: the request can't be met at present.
fn no_room(diagnostics: Vec<pdp_spec::Diagnostic>) -> Problem {
    let Some(first) = diagnostics.into_iter().next() else {
        return Problem::internal("refused without a reason");
    };
    Problem::new(ProblemKind::Conflict, format!("{}: {}", first.object, first.message))
        .hint(first.hint)
}

fn invalid(error: impl std::error::Error) -> Problem {
    Problem::new(ProblemKind::Invalid, error_chain(&error))
}

fn internal(error: &dyn std::error::Error) -> Problem {
    Problem::internal(error_chain(error))
}

/// Problem of a call to the mux or a helper.
pub(crate) fn unavailable(error: ControlError) -> Problem {
    let kind = match &error {
        ControlError::Refused { .. } => ProblemKind::Conflict,
        ControlError::Unreachable { .. } => ProblemKind::Unavailable,
        ControlError::Unexpected { .. } => ProblemKind::Internal,
    };
    Problem::new(kind, error_chain(&error))
}

fn reconciler_gone() -> Problem {
    Problem::internal("the daemon's reconciler ended").hint("restart the daemon")
}

/// Filters the progress of a change by scope. A step is dropped and not
/// counted if it names a vnet outside of the scope, or no vnet.
fn scoped<'a>(
    scope: &'a AccessScope,
    progress: ProgressFn<'a>,
) -> impl FnMut(Progress) + Send + use<'a> {
    let mut count = 0;
    move |step| match scope {
        AccessScope::Node => progress(step),
        // Format of the reconcile loop: `starting node VNET/NODE`.
        AccessScope::Tenant(_) => {
            if step.what.split([' ', '/']).any(|word| scope.sees(word)) {
                count += 1;
                progress(Progress { done: count, total: count, what: step.what });
            }
        }
    }
}

/// Returns a vnet's link, found by its name or one of its ends.
pub(crate) fn link_of<'a>(
    vnet: &str,
    plan: &'a crate::plan::VnetPlan,
    link: &str,
) -> Result<&'a pdp_proto::mux::Vlink, Problem> {
    let vlinks = &plan.mux.vlinks;
    let index = vlinks.iter().position(|known| known.name == link).or_else(|| {
        let is_end = |end: &pdp_spec::units::Endpoint| end.to_string() == link;
        plan.links.iter().position(|ends| ends.iter().any(is_end))
    });
    index.map(|index| &vlinks[index]).ok_or_else(|| {
        let names: Vec<&str> = vlinks.iter().map(|link| link.name.as_str()).collect();
        let hint = format!("its links are {}; or name an end like r1:eth0", names.join(", "));
        Problem::not_found(format!("vnet {vnet}: no link {link:?}")).hint(hint)
    })
}

#[cfg(test)]
mod tests {

    use serde_json::json;

    use super::*;
    use crate::host::bounds::GuestLimits;
    use crate::host::control::MuxClient;
    use crate::intent::state::{StateChange, StateFile};
    use crate::kernel::ports::KernelPorts;
    use crate::plan::DaemonPaths;
    use crate::plan::allocations::VnetAllocation;
    use pdp_container::{Runtime, RuntimePaths};

    /// An engine whose reconcile loop never runs.
    fn engine(directory: &std::path::Path) -> DaemonCore {
        let any = || "/bin/true".into();
        let runtime = Runtime::new(RuntimePaths {
            runc: any(),
            shim: any(),
            init: any(),
            work: any(),
            records: directory.join("records"),
            runc_root: directory.join("runc"),
            logs: directory.join("logs"),
            images: directory.join("images"),
            volumes: directory.join("volumes"),
            cgroup: "pdp-engine-test".into(),
        });
        let places = DaemonPaths {
            run: directory.join("run"),
            lib: directory.join("lib"),
            pins: directory.join("pins"),
        };
        let host = Arc::new(Host {
            mux: MuxClient { path: places.mux_control() },
            ports: KernelPorts::new(&places),
            bounds: GuestLimits::new(&places),
            places,
            runtime: runtime.unwrap(),
            state: Arc::new(StateFile::open(&directory.join("state")).unwrap()),
            settings: crate::host::settings::KernelSettings::default(),
        });
        let descriptors = Descriptors { limit: 1000, unchanged_vnets: 0 };
        DaemonCore::new(host.clone(), host, [0, 1].into(), false, descriptors, |_| ()).unwrap()
    }

    #[test]
    fn start_frees_numbers_of_removed_vnets() {
        let directory = tempfile::tempdir().unwrap();
        let first = engine(directory.path());
        let state = &first.host.state;
        let stored = [("gone", 0), ("going", 1)].map(|(vnet, number)| {
            (
                vnet.to_owned(),
                Some(Arc::new(VnetAllocation { number, ..VnetAllocation::default() })),
            )
        });
        state
            .commit(&StateChange { allocations: stored.into(), ..StateChange::default() })
            .unwrap();
        state.intend(&ObjectKey::node("going", "r1").to_string(), "").unwrap();
        drop(first);
        let second = engine(directory.path());
        for allocations in
            [second.model().allocations.clone(), second.host.state.allocations().unwrap()]
        {
            assert_eq!(allocations.number_of("gone"), None);
            assert_eq!(allocations.number_of("going"), Some(1));
        }
    }

    fn stored(kind: &str, name: &str, body: &str) -> crate::intent::state::StoredDocument {
        crate::intent::state::StoredDocument {
            kind: kind.into(),
            name: name.into(),
            body: body.into(),
        }
    }

    fn vnet(name: &str) -> crate::intent::state::StoredDocument {
        let body = json!({"apiVersion": "pdp/v1", "kind": "VirtualNetwork",
            "metadata": {"name": name}, "spec": {"nodes": {"h": {"kind": "host"}}}});
        stored("VirtualNetwork", name, &body.to_string())
    }

    /// Specs that can't be read for various reasons, and one that can't be planned.
    /// They are reported, their allocations stay theirs, and all others are planned.
    #[test]
    fn damaged_stored_specs_do_not_block_other_vnets() {
        let directory = tempfile::tempdir().unwrap();
        let first = engine(directory.path());
        let whole = vnet("acme.half").body;
        let bad =
            ["", "{", "null", "\u{0}", r#"{"kind": "VirtualNetwork"}"#, &whole[..whole.len() / 2]];
        let name = |number: usize| format!("acme.bad{number}");
        let mut put: Vec<_> = bad
            .iter()
            .enumerate()
            .map(|(number, body)| stored("VirtualNetwork", &name(number), body))
            .collect();
        put.extend([vnet("other.good"), vnet("acme.unplanned"), stored("Tenant", "acme", "{")]);
        let allocated = (0..bad.len()).map(name).chain(["other.good".into()]).enumerate();
        let allocated = allocated.map(|(number, vnet)| {
            (
                vnet,
                Some(Arc::new(VnetAllocation {
                    number: number as u32,
                    ..VnetAllocation::default()
                })),
            )
        });
        let allocated: BTreeMap<_, _> = allocated.collect();
        first
            .host
            .state
            .commit(&StateChange { put, allocations: allocated, ..StateChange::default() })
            .unwrap();
        drop(first);
        // Twice: nothing is freed in between.
        for _ in 0..2 {
            let engine = engine(directory.path());
            let model = engine.model();
            assert_eq!(model.vnets.keys().collect::<Vec<_>>(), ["other.good"]);
            assert!(engine.reconcile_loop.plan().vnets.contains_key("other.good"));
            for number in 0..bad.len() {
                let why = model.damaged_vnet(&name(number)).expect("told");
                assert!(why.contains("can't be read"), "{why}");
                assert_eq!(model.allocations.number_of(&name(number)), Some(number as u32));
                assert!(model.plan.damaged.contains(&name(number)));
            }
            assert!(model.damaged_vnet("acme.unplanned").unwrap().contains("can't be planned"));
            assert!(model.knows_tenant("acme") && !model.tenants.contains_key("acme"));
            let listed = crate::status::view::vnets(&engine, &AccessScope::Tenant("acme".into()));
            assert_eq!(listed.len(), bad.len() + 1);
            assert!(listed.iter().all(|vnet| vnet.phase == pdp_api::Phase::Failed));
            let remnants = engine.remnants();
            assert!(remnants.iter().any(|it| it.command == "pdp delete acme.bad0"), "{remnants:?}");
            assert!(
                remnants.iter().any(|it| it.command == "pdp delete tenant/acme"),
                "{remnants:?}"
            );
            // A deleted one is gone from the file as well.
            let after = model.without("acme.bad1", &engine.host.places, &engine.cpus).unwrap();
            let change = after.change_from(&model);
            assert_eq!(change.delete, [("VirtualNetwork".to_owned(), "acme.bad1".to_owned())]);
            assert!(
                after.damaged_vnet("acme.bad1").is_none()
                    && !after.plan.damaged.contains("acme.bad1")
            );
            let gone = model.without_tenant("acme");
            assert_eq!(gone.change_from(&model).delete, [("Tenant".to_owned(), "acme".to_owned())]);
        }
    }

    /// Remains are found and reported with the command that removes
    /// them. Objects that have an owner are not reported.
    #[test]
    fn remnants_without_an_owner_are_reported() {
        let directory = tempfile::tempdir().unwrap();
        let engine = engine(directory.path());
        assert_eq!(engine.remnants(), []);
        let paths = engine.host.runtime.paths();
        let run = &engine.host.places.run;
        let left = [
            run.join("vnets/acme.gone"),
            run.join("externals/E"),
            engine.host.places.records().join("acme_gone.h"),
            paths.volumes.join("acme_gone.h"),
            paths.images.join("store/acme"),
            run.join("left-vnets-0"),
        ];
        for dir in &left {
            std::fs::create_dir_all(dir).unwrap();
        }
        engine.host.state.intend(&ObjectKey::node("acme.there", "h").to_string(), "").unwrap();
        for name in ["vnets/acme.there", "vnets/acme.there/h"] {
            std::fs::create_dir_all(run.join(name)).unwrap();
        }
        std::fs::create_dir_all(engine.host.places.records().join("acme_there.h")).unwrap();
        let found = engine.remnants();
        for dir in &left {
            let removes = format!("rm -rf --one-file-system {}", dir.display());
            assert!(found.iter().any(|it| it.command == removes), "{removes} in {found:#?}");
        }
        assert_eq!(found.len(), left.len(), "{found:#?}");
        let checks = engine.checks_of_remains();
        assert!(checks.iter().all(|check| check.state == pdp_api::MachineCheckState::Warn));
    }

    /// A tenant may list users and interfaces that do not exist yet. The report says so.
    #[test]
    fn applying_a_tenant_reports_missing_users_and_interfaces() {
        let directory = tempfile::tempdir().unwrap();
        let engine = engine(directory.path());
        let text = "apiVersion: pdp/v1\nkind: Tenant\nmetadata: {name: acme}\nspec: {unixUsers: [nosuch-user, \"7\", \
                    daemon], interfaces: {A: {whole: true}}}\n";
        let file =
            pdp_spec::SourceFile { name: "f".into(), text: text.into(), ..Default::default() };
        let request = ApplyRequest { files: vec![file], dry_run: true, only: vec![] };
        let report = engine.apply(&AccessScope::Node, request, &mut |_| {}).unwrap();
        let expected = [(
            "tenant/acme",
            "no user nosuch-user on this machine yet, no external interface A yet",
        )];
        let changes = report.changes.iter().map(|change| (&*change.object, &*change.detail));
        assert_eq!(changes.collect::<Vec<_>>(), expected);
    }

    /// For all failures: operators learn the path, tenants do not.
    #[test]
    fn problems_hide_the_state_directory_from_tenants() {
        let directory = tempfile::tempdir().unwrap();
        let engine = engine(directory.path());
        let at = engine.host.state_directory().join("pdpd.sqlite").display().to_string();
        let text = || format!("can't write {at}: no space");
        let fault = pdp_spec::Diagnostic { message: text(), hint: text(), ..Default::default() };
        let problem = || Problem {
            diagnostics: vec![fault.clone()],
            ..Problem::internal(text()).hint(text())
        };
        let redacted = engine.redact_for(&AccessScope::Tenant("acme".into()), problem());
        let hidden = "can't write STATE/pdpd.sqlite: no space";
        assert_eq!((redacted.error.as_str(), redacted.hint.as_deref()), (hidden, Some(hidden)));
        let fault = &redacted.diagnostics[0];
        assert_eq!((fault.message.as_str(), fault.hint.as_str()), (hidden, hidden));
        assert_eq!(engine.redact_for(&AccessScope::Node, problem()).error, text());
    }

    /// Objects that are still being removed count. A client that applies another
    /// network in their place waits, and then learns what is in the way.
    #[test]
    fn change_waits_for_removals_before_it_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let engine = engine(directory.path());
        let file =
            |text: String| pdp_spec::SourceFile { name: "f".into(), text, ..Default::default() };
        let lab = |name: &str| {
            file(format!(
                "apiVersion: pdp/v1\nkind: VirtualNetwork\nmetadata: {{name: {name}}}\n\
                 spec: {{nodes: {{h1: {{kind: host}}}}}}\n"
            ))
        };
        let tenant = file(
            "apiVersion: pdp/v1\nkind: Tenant\nmetadata: {name: acme}\nspec: {quota: {vnets: 1}}\n"
                .into(),
        );
        for file in [tenant, lab("acme.old")] {
            let documents = pdp_spec::parse(&[file]).unwrap();
            let named = BTreeSet::new();
            let apply =
                |before: &Model| engine.applied(&AccessScope::Node, before, &documents, &named);
            engine.revise(&|_| false, apply).unwrap();
        }
        let delete = |before: &Model| {
            Ok((before.without("acme.old", &engine.host.places, &engine.cpus).unwrap(), ()))
        };
        engine.revise(&|_| false, delete).unwrap();
        let mut steps = Vec::new();
        let began = Instant::now();
        let request = ApplyRequest { files: vec![lab("acme.new")], dry_run: false, only: vec![] };
        let acme = AccessScope::Tenant("acme".into());
        let refused = engine.apply(&acme, request, &mut |step| steps.push(step.what)).unwrap_err();
        assert!(began.elapsed() >= ROOM_WAIT);
        assert_eq!(steps, ["waiting for the removal of vnet acme.old"]);
        let words = refused.diagnostics[0].to_string();
        assert!(words.contains("vnets: 1 exceeds tenant acme's quota of 1"), "{words}");
        assert!(words.contains("networks being removed still use 1: acme.old (for "), "{words}");
        // The same network counts once. The tenant stays as long as some of it exists.
        let again = pdp_spec::parse(&[lab("acme.old")]).unwrap();
        engine.applied(&acme, &engine.model(), &again, &BTreeSet::new()).unwrap();
        let stays = engine.delete_tenant("acme").unwrap_err();
        assert!(stays.error.contains("acme.old is not gone yet"), "{}", stays.error);
    }

    fn down(before: &Model, link: &str) -> Model {
        let mut after = before.clone();
        let mut allocation = VnetAllocation::default();
        if let Some(before) = before.allocations.vnets.get("red") {
            allocation.clone_from(before);
        }
        allocation.links_down.insert(link.into());
        after.allocations.set("red", Some(allocation));
        after
    }

    /// Changes of others are stored while one is checked, and the check then includes
    /// them. This test would hang if the store lock were held while files are checked.
    #[test]
    fn changes_can_be_stored_while_another_is_checked() {
        let directory = tempfile::tempdir().unwrap();
        let engine = engine(directory.path());
        let mut checks = 0;
        let result = engine.revise(&|_| false, |before| {
            checks += 1;
            if checks <= 2 {
                let other = format!("other-{checks}");
                engine.revise(&|_| false, |before| Ok((down(before, &other), ()))).unwrap();
            }
            Ok((down(before, "mine"), checks))
        });
        assert_eq!(result.unwrap().0, 3, "checked again after each of the others' changes");
        let names = ["mine", "other-1", "other-2"];
        let stored = engine.host.state.allocations().unwrap();
        assert_eq!(engine.model().allocations, stored);
        assert_eq!(stored.vnets["red"].links_down, names.map(str::to_owned).into());
    }

    /// The change ends, however often others store theirs.
    #[test]
    fn last_retry_of_a_change_excludes_other_changes() {
        let directory = tempfile::tempdir().unwrap();
        let engine = engine(directory.path());
        let mut checks = 0;
        let result = engine.revise(&|_| false, |before| {
            checks += 1;
            if checks <= TRIES_MAX {
                let other = format!("other-{checks}");
                engine.revise(&|_| false, |before| Ok((down(before, &other), ()))).unwrap();
            } else {
                assert!(engine.storing.try_lock().is_err(), "nobody else stores any");
            }
            Ok((down(before, "mine"), checks))
        });
        assert_eq!(result.unwrap().0, TRIES_MAX + 1);
    }
}
