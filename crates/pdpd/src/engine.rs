//! The node behind the API: changes what is wanted, one change at a time.
//!
//! A change is parsed, checked and planned against what is wanted at that moment, while others are
//! made; it is stored if nothing else was stored meanwhile, and else checked again. What somebody
//! writes costs others no time so, and of one tenant one change at a time is looked at. A change that
//! is stored is handed to the keeper, which works on the machine ([`crate::keeper`]). Answers come from what the
//! keeper last saw, and from the mux and
//! the helpers themselves, so they don't wait for a change that is under way.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex, MutexGuard, RwLock};
use std::time::{Duration, Instant};

use pdp_api::{
    Action, ApplyRequest, Change as Changed, DownRequest, LinkChange, LinkRequest, Problem,
    ProblemKind, Progress, Report, RestartRequest, ScaleRequest, What,
};
use pdp_net::interface::Interface;
use pdp_spec::limits::{GUESTS_MAX, MILLICORES_MAX};
use pdp_spec::units::Cores;
use pdp_spec::{
    DataPlane, Descriptors, Document, Existing, Intent, InterfaceFacts, Object, Tenant,
    VirtualNetwork,
};

use crate::access::{Scope, asker, no_vnet};
use crate::ask::Late;
use crate::host::{Host, find_image, words};
use crate::http::ProgressFn;
use crate::images::Images;
use crate::keeper::{Keeper, News};
use crate::key::Key;
use crate::ledger::Moment;
use crate::model::Model;
use crate::observers::Observers;
use crate::reconcile::lock;
use crate::state::Change;
use crate::watch::{Board, event};

/// How often a change is checked beside others before it is checked with nobody else storing one.
const TRIES_MAX: u32 = 3;

/// How long a change that has no room waits for what is still being removed of earlier ones.
const ROOM_WAIT: Duration = Duration::from_secs(10);

/// Pause before it is looked at again.
const ROOM_PAUSE: Duration = Duration::from_millis(50);

/// Who has the turn to store.
type Turn<'a> = MutexGuard<'a, ()>;

/// A change that was stored, and is being made.
struct Way {
    news: Receiver<News>,
    /// What it changes.
    objects: Vec<Changed>,
}

/// The node.
#[derive(Debug)]
pub struct Engine {
    /// The machine.
    pub host: Arc<Host>,
    /// CPUs of the machine.
    pub cpus: BTreeSet<u32>,
    /// Run by a service manager.
    pub managed: bool,
    /// What it may open.
    descriptors: Descriptors,
    /// Works on the machine.
    pub keeper: Keeper,
    /// Images of registries and archives.
    pub images: Images,
    /// Called when the daemon is to exit.
    exit: Box<dyn ExitFn>,
    /// Held while a change is stored.
    storing: Mutex<()>,
    /// Held while a tenant's change is parsed and checked, by tenant.
    checking: Mutex<BTreeMap<String, Arc<Mutex<()>>>>,
    model: RwLock<Arc<Model>>,
    /// Captures and traces that there are.
    pub(crate) captures: Observers,
    pub(crate) traces: Observers,
    /// Helpers that answer late.
    pub(crate) late: Late,
}

/// Something that ends the daemon, a moment after it is called.
pub trait ExitFn: Fn(bool) + Send + Sync {}

impl<F: Fn(bool) + Send + Sync> ExitFn for F {}

impl std::fmt::Debug for dyn ExitFn {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("exit")
    }
}

impl Engine {
    /// The node as stored. Its keeper is to be run ([`Keeper::run`]).
    pub fn new(
        host: Arc<Host>,
        cpus: BTreeSet<u32>,
        managed: bool,
        descriptors: Descriptors,
        exit: impl ExitFn + 'static,
    ) -> anyhow::Result<Self> {
        let documents = host.state.documents()?;
        let mut ledger = host.state.ledger()?;
        let stopped = ledger.stopped;
        let held = ledger.begin_schedules(&Moment::now());
        if !held.is_empty() {
            host.state.commit(&Change { held, stopped, ..Change::default() })?;
        }
        let mut model = Model::load(&host.places, &cpus, &documents, ledger)?;
        for ((kind, name), why) in &*model.damaged {
            tracing::warn!("{kind} {name}: {why}; apply it again, or delete it");
        }
        model.remains = Arc::new(host.state.remains()?);
        let plan = model.wanted();
        let runtime = &host.runtime;
        let workplace = runtime.workplace().clone();
        let images = Images::open(runtime.paths(), runtime.cgroups().clone(), workplace)?;
        let keeper = Keeper::new(host.clone(), host.state.clone(), host.places.clone(), plan)?;
        let engine = Self {
            host,
            cpus,
            managed,
            descriptors,
            keeper,
            images,
            exit: Box::new(exit),
            storing: Mutex::default(),
            checking: Mutex::default(),
            model: RwLock::new(Arc::new(model)),
            captures: Observers::captures(),
            traces: Observers::traces(),
            late: Late::default(),
        };
        let vnets = engine.model().vnets.keys().cloned().collect::<Vec<_>>();
        engine.board().expect(vnets, engine.keeper.going());
        engine.forget_images();
        engine.free_numbers().map_err(|problem| anyhow::anyhow!(problem.error))?;
        Ok(engine)
    }

    /// What everybody who watches reads from.
    pub fn board(&self) -> &Arc<Board> {
        self.keeper.board()
    }

    /// What is wanted now.
    pub fn model(&self) -> Arc<Model> {
        self.model.read().unwrap_or_else(|poisoned| poisoned.into_inner()).clone()
    }

    /// Applies files, or says what that would do.
    pub(crate) fn change(
        &self,
        scope: &Scope,
        request: ApplyRequest,
        progress: ProgressFn<'_>,
    ) -> Result<Report, Problem> {
        let turns = self.checks_of(scope);
        let mut turn = turns.as_deref().map(lock);
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
        let pin = |documents: &mut Vec<Document>, bring: bool, progress: ProgressFn<'_>| {
            self.images.pin(documents, &only, &self.model(), bring, progress).map_err(refusal)
        };
        let wanted = |before: &Model, documents: &[Document]| match only.is_empty() {
            true => self.applied(scope, before, documents, &named),
            false => self.applied(scope, before, &narrowed(documents, before, &only), &named),
        };
        let (mut held, missing) = pin(&mut documents, false, progress)?;
        if !missing.is_empty() && !dry_run {
            // Nothing is brought for what is refused, and what is brought keeps no other change waiting.
            wanted(&self.model(), &documents)?;
            drop(turn);
            held = pin(&mut documents, true, progress)?.0;
            turn = turns.as_deref().map(lock);
        }
        let check = |before: &Model| wanted(before, &documents);
        if !dry_run {
            self.wait_for_room(scope, progress, check);
        }
        let (mut changes, news) = match dry_run {
            true => (check(&self.model())?.1, None),
            false => self.revise(&retries(scope, &named), check)?,
        };
        drop((documents, turn, held));
        if dry_run {
            changes.extend(missing.into_iter().map(|name| Changed {
                object: format!("image/{name}"),
                action: Action::Create,
                detail: "is got when it is applied".into(),
            }));
            return Ok(Report { changes, dry_run, exits: false });
        }
        self.settle(news, &mut scoped(scope, progress))?;
        self.report(scope, changes, &named)
    }

    /// The model, with what may still be there beside it as far as that is not gone by now.
    fn counted(&self, model: &Model) -> Model {
        let mut counted = model.clone();
        self.forget_remains(&mut counted);
        counted
    }

    /// Forgets what is gone; whether there was any.
    fn forget_remains(&self, model: &mut Model) -> bool {
        if model.remains.is_empty() {
            return false;
        }
        // Of a plan that the keeper doesn't follow yet it knows nothing.
        let Some(open) = self.keeper.open(&model.plan) else { return false };
        model.forget_remains(|vnet, node| !open.contains(&(vnet.into(), node.map(str::to_owned))))
    }

    /// Waits a while for what is being removed, where a change has room without it and has none beside it.
    fn wait_for_room<T>(
        &self,
        scope: &Scope,
        progress: ProgressFn<'_>,
        check: impl Fn(&Model) -> Result<T, Problem>,
    ) {
        let (end, mut told) = (Instant::now() + ROOM_WAIT, false);
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
            if !std::mem::replace(&mut told, true) {
                for vnet in model.remains.keys() {
                    let what = format!("waiting for what is being removed of vnet {vnet}");
                    progress(Progress { done: 0, total: 1, what });
                }
            }
            std::thread::sleep(ROOM_PAUSE);
        }
    }

    /// What the check of a change has to know, but for network devices and who asks.
    fn existing(&self, before: &Model, new_substrate: bool) -> Existing {
        let existing = before.existing(&self.cpus, new_substrate);
        let without_v6 = !pdp_net::sysctl::has_v6();
        Existing { descriptors: Some(self.descriptors), without_v6, ..existing }
    }

    /// What is wanted once documents are applied, and what that changes.
    fn applied(
        &self,
        scope: &Scope,
        before: &Model,
        documents: &[Document],
        named: &BTreeSet<String>,
    ) -> Result<(Model, Vec<Changed>), Problem> {
        if before.ledger.stopped && *scope != Scope::Node {
            return Err(Problem::new(ProblemKind::Conflict, "everything is stopped")
                .hint("an operator starts it by `pdp up`"));
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
            let device = interface.device.as_deref().map(Interface::by_name);
            if let Some(Ok(found)) = device {
                devices.insert(found.name, InterfaceFacts { mtu: found.mtu });
            }
        }
        existing.devices = Some(devices);
        existing.asker = scope.tenant().map(str::to_owned);
        let intent = pdp_spec::check(documents, &existing).map_err(refusal)?;
        // Last: whoever asks learns of no image that is not for it. One that runs may be gone from disk.
        let changes = |vnet: &str, node: &str| {
            let of =
                |vnets: &Arc<pdp_spec::Vnets>| Some(vnets.get(vnet)?.spec.nodes.get(node)?.clone());
            of(&intent.vnets) != of(&before.vnets)
        };
        let find_bind = |source: &str| pdp_container::binds::look(source.as_ref());
        let faults = pdp_spec::check_images(documents, changes, find_image, find_bind);
        if !faults.is_empty() {
            return Err(refusal(faults));
        }
        let after = self.with(before, intent)?;
        let mut changes = after.changes_from(before, named, substrate);
        if *scope != Scope::Node {
            // All that a tenant's files change are its vnets, `vnet/TENANT.NAME/…`.
            changes.retain(|change| change.object.split('/').nth(1).is_some_and(|v| scope.sees(v)));
        }
        for document in documents {
            let Object::Tenant(tenant) = &document.object else { continue };
            let object = format!("tenant/{}", tenant.metadata.name);
            let interfaces = after.effective_substrate(&self.cpus).spec.interfaces;
            let detail = not_there(tenant, |interface| interfaces.contains_key(interface));
            match changes.iter_mut().find(|change| change.object == object) {
                Some(change) => change.detail = detail,
                None => changes.push(Changed { object, action: Action::Unchanged, detail }),
            }
        }
        Ok((after, changes))
    }

    /// What is wanted once a checked change is made.
    fn with(&self, before: &Model, intent: Intent) -> Result<Model, Problem> {
        let going = |vnet: &str| self.keeper.knows(vnet);
        before.with(intent, &self.host.places, &self.cpus, going).map_err(invalid)
    }

    /// Has the numbers of vnets that are gone given out again, and forgets what was still there of them. What is gone
    /// later is with the next change.
    fn free_numbers(&self) -> Result<(), Problem> {
        let going = |vnet: &str| self.keeper.knows(vnet);
        let free = |model: &mut Model| model.free_numbers(going) | self.forget_remains(model);
        if free(&mut Model::clone(&self.model())) {
            self.revise(&|_| false, |before| {
                let mut after = before.clone();
                free(&mut after);
                Ok((after, ()))
            })?;
        }
        Ok(())
    }

    /// Starts all that is stored.
    pub(crate) fn start_all(&self, progress: ProgressFn<'_>) -> Result<Report, Problem> {
        let ((named, changes), news) = self.revise(&|_| true, |before| {
            let mut after = Model::clone(before);
            after.ledger.stopped = false;
            let named: BTreeSet<String> = after.vnets.keys().cloned().collect();
            let changes = after.changes_from(before, &named, false);
            Ok((after, (named, changes)))
        })?;
        self.settle(news, progress)?;
        self.report(&Scope::Node, changes, &named)
    }

    /// Stops everything.
    pub(crate) fn stop_all(
        &self,
        request: DownRequest,
        progress: ProgressFn<'_>,
    ) -> Result<Report, Problem> {
        let (changes, news) = self.revise(&|_| true, |before| {
            let mut after = Model::clone(before);
            after.ledger.stopped = true;
            let mut changes = after.changes_from(before, &BTreeSet::new(), false);
            if request.purge {
                let stopped = changes.iter_mut().filter(|change| change.action == Action::Stop);
                stopped.for_each(|change| change.action = Action::Delete);
            }
            Ok((after, changes))
        })?;
        self.settle(news, progress)?;
        if !self.model().ledger.stopped {
            return Err(Problem::new(
                ProblemKind::Conflict,
                "everything was started again meanwhile",
            )
            .hint("repeat `pdp down`"));
        }
        let things = self.host.state.things().map_err(Problem::internal)?;
        let mut left: Vec<Key> = things.keys().filter_map(|key| key.parse().ok()).collect();
        left.extend(self.keeper.stuck().into_iter().map(|stuck| stuck.key));
        left.extend(self.keeper.problems(|key| *key == Key::Leftovers).into_iter().map(|it| it.0));
        left.sort();
        left.dedup();
        let remains = self.remnants();
        let removes: Vec<&str> = remains.iter().map(|it| it.command.as_str()).collect();
        let removes = match removes.is_empty() {
            true => "see the daemon's log".to_owned(),
            false => format!("remove it by `{}`", removes.join("; ")),
        };
        if !left.is_empty() && !request.purge {
            let hint = format!(
                "all else is stopped; it is being tried again, and `pdp doctor` shows it: {removes}"
            );
            return Err(self.stays(&left).hint(hint));
        }
        if request.purge {
            // What stays bears numbers that nobody else is given, as long as this daemon runs.
            let bears = |vnet: &str| self.keeper.knows(vnet);
            self.revise(&|_| false, |before| match before.ledger.stopped {
                true => Ok((before.purged(bears), ())),
                false => Err(Problem::new(ProblemKind::Conflict, "it was started again meanwhile")
                    .hint("repeat `pdp down --purge`")),
            })?;
        }
        let exits = request.exit && !self.managed;
        if exits {
            (self.exit)(request.purge);
        }
        if !left.is_empty() {
            let ends = if exits {
                "the daemon ends, and tries it once more then"
            } else {
                "it is being tried again"
            };
            return Err(self.stays(&left).hint(format!("all else is removed; {ends}: {removes}")));
        }
        Ok(Report { changes, dry_run: false, exits })
    }

    /// Forgets the substrate.
    pub(crate) fn drop_substrate(&self, progress: ProgressFn<'_>) -> Result<Report, Problem> {
        let retry = retries(&Scope::Node, &BTreeSet::new());
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
        self.report(&Scope::Node, changes, &BTreeSet::new())
    }

    /// Forgets a tenant and its tokens.
    pub(crate) fn drop_tenant(&self, tenant: &str) -> Result<Report, Problem> {
        self.free_numbers()?;
        let (changes, news) = self.revise(&|_| false, |before| {
            if !before.knows_tenant(tenant) {
                return Err(Problem::not_found(format!("no tenant {tenant:?}"))
                    .hint("`pdp get tenants` lists them"));
            }
            let scope = Scope::Tenant(tenant.into());
            let vnets: Vec<&str> =
                before.vnets.keys().filter(|vnet| scope.sees(vnet)).map(String::as_str).collect();
            if !vnets.is_empty() {
                let problem = format!("tenant {tenant} has {}", vnets.join(", "));
                let problem = Problem::new(ProblemKind::Conflict, problem);
                return Err(problem.hint("delete those first"));
            }
            let going: Vec<&str> = before.ledger.vnets.keys().map(String::as_str).collect();
            let going: Vec<&str> = going.into_iter().filter(|vnet| scope.sees(vnet)).collect();
            if !going.is_empty() {
                let problem = format!("tenant {tenant}: {} is not gone yet", going.join(", "));
                let problem = Problem::new(ProblemKind::Conflict, problem);
                return Err(problem.hint("try again once it is; see the daemon's log for why"));
            }
            let after = before.without_tenant(tenant);
            let changes = after.changes_from(before, &BTreeSet::new(), false);
            Ok((after, changes))
        })?;
        self.settle(news, &mut |_| {})?;
        // One of the same name later is somebody else.
        self.forget_images();
        Ok(Report { changes, ..Report::default() })
    }

    /// Forgets images whose tenants are gone.
    fn forget_images(&self) {
        if let Err(error) = self.images.forget_others(&|| self.model()) {
            tracing::warn!("images of tenants that are gone: {error}");
        }
    }

    /// Stops and forgets a vnet.
    pub(crate) fn drop_vnet(
        &self,
        scope: &Scope,
        vnet: &str,
        progress: ProgressFn<'_>,
    ) -> Result<Report, Problem> {
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
            action: Action::Delete,
            detail: String::new(),
        }];
        self.settle(news, &mut scoped(scope, progress))?;
        if self.model().vnets.contains_key(vnet) {
            // Applied again meanwhile: what there is of it now is another's to tell.
            return Ok(Report { changes, ..Report::default() });
        }
        let left = self.keeper.unwanted(vnet);
        if left.is_empty() {
            self.free_numbers()?;
            return Ok(Report { changes, ..Report::default() });
        }
        Err(self.stays(&left).hint("it is being tried again; see the daemon's log"))
    }

    /// What is not taken down yet, and why, as far as that is known.
    fn stays(&self, left: &[Key]) -> Problem {
        let words = |key: &Key| match self.keeper.health(key).and_then(|health| health.problem) {
            Some(problem) => format!("{key}: {problem}"),
            None => key.to_string(),
        };
        let left: Vec<String> = left.iter().map(words).collect();
        Problem::internal(format!("not taken down yet: {}", left.join("; ")))
    }

    /// Stops and forgets nodes of a vnet, with their links.
    pub(crate) fn drop_nodes(
        &self,
        scope: &Scope,
        vnet: &str,
        nodes: &BTreeSet<String>,
        progress: ProgressFn<'_>,
    ) -> Result<Report, Problem> {
        let named = BTreeSet::from([vnet.to_string()]);
        let (changes, news) = self.revise(&retries(scope, &named), |before| {
            let Some(wanted) = before.vnets.get(vnet) else { return Err(no_vnet(vnet)) };
            if before.ledger.stopped {
                return Err(Problem::new(ProblemKind::Conflict, "everything is stopped")
                    .hint("start it by `pdp up` first"));
            }
            if let Some(missing) = nodes.iter().find(|node| !wanted.spec.nodes.contains_key(*node))
            {
                return Err(Problem::not_found(format!("vnet {vnet}: no node {missing:?}"))
                    .hint(format!("`pdp get nodes {vnet}` lists them")));
            }
            let wanted = VirtualNetwork::clone(wanted).without(nodes);
            self.respecified(scope, before, wanted, &named)
        })?;
        self.settle(news, &mut scoped(scope, progress))?;
        self.report(scope, changes, &named)
    }

    /// Sets a link's administrative state.
    pub(crate) fn set_link_state(
        &self,
        scope: &Scope,
        vnet: &str,
        link: &str,
        request: LinkRequest,
    ) -> Result<Report, Problem> {
        let LinkRequest { up, silent } = request;
        if up && silent {
            let problem = Problem::new(
                ProblemKind::Invalid,
                format!("vnet {vnet}: link {link} up, silently"),
            );
            return Err(problem.hint("only one that is down can be silent"));
        }
        let named = BTreeSet::from([vnet.to_string()]);
        let (changes, news) = self.revise(&retries(scope, &named), |before| {
            let Some(plan) = before.plan.vnets.get(vnet) else { return Err(no_vnet(vnet)) };
            let link = &link_of(vnet, plan, link)?.name;
            let mut after = Model::clone(before);
            after.ledger.set_link(vnet, link, up, silent);
            after.replan(before, [vnet], &self.host.places, &self.cpus).map_err(invalid)?;
            let mut changes = after.changes_from(before, &BTreeSet::new(), false);
            changes.retain(|change| change.object != format!("vnet/{vnet}"));
            if changes.is_empty() {
                changes.push(Changed {
                    object: format!("vnet/{vnet}/link/{link}"),
                    action: Action::Unchanged,
                    detail: String::new(),
                });
            }
            Ok((after, changes))
        })?;
        self.settle(news, &mut |_| {})?;
        self.report(scope, changes, &named)
    }

    /// Changes how frames leave by a link's ends, as an applied spec with that would.
    pub(crate) fn change_leaving(
        &self,
        scope: &Scope,
        vnet: &str,
        link: &str,
        request: &LinkChange,
    ) -> Result<Report, Problem> {
        let named = BTreeSet::from([vnet.to_string()]);
        let (changes, news) = self.revise(&retries(scope, &named), |before| {
            let Some(plan) = before.plan.vnets.get(vnet) else { return Err(no_vnet(vnet)) };
            let name = &link_of(vnet, plan, link)?.name;
            let mut wanted = match before.vnets.get(vnet) {
                Some(wanted) => VirtualNetwork::clone(wanted),
                None => return Err(no_vnet(vnet)),
            };
            let links = &mut wanted.spec.links;
            if let Some(link) = links.iter_mut().find(|it| it.name.as_ref() == Some(name)) {
                let set = link.set(request.at.as_deref(), &request.set);
                set.map_err(|why| {
                    let problem = format!("vnet {vnet}: link {name}: {why}");
                    let problem = Problem::new(ProblemKind::Invalid, problem);
                    problem.hint("write keys and values as in the spec of a link: docs/links.md")
                })?;
            }
            let (after, changes) = self.respecified(scope, before, wanted, &named)?;
            let restarts = changes.iter().filter(|change| change.action == Action::Restart);
            let nodes: Vec<_> =
                restarts.filter_map(|change| change.object.rsplit('/').next()).collect();
            if !nodes.is_empty() && !request.restart {
                let problem = format!(
                    "vnet {vnet}: link {name}: this restarts {}, and what was set in them by hand is lost",
                    nodes.join(" and ")
                );
                return Err(Problem::new(ProblemKind::Conflict, problem).hint(
                    "between routers of kind kernel a link that has frames wait goes by the mux, and any \
                     other stays in the kernel (docs/kernel.md); repeat it with --restart (`restart: true`)",
                ));
            }
            Ok((after, changes))
        })?;
        self.settle(news, &mut |_| {})?;
        self.report(scope, changes, &named)
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

    /// Ends and starts anew what runs of nodes.
    pub(crate) fn start_anew(
        &self,
        scope: &Scope,
        vnet: &str,
        request: &RestartRequest,
        progress: ProgressFn<'_>,
    ) -> Result<Report, Problem> {
        let model = self.model();
        let Some(plan) = model.plan.vnets.get(vnet) else { return Err(no_vnet(vnet)) };
        if model.ledger.stopped {
            return Err(Problem::new(ProblemKind::Conflict, "everything is stopped")
                .hint("start it by `pdp up` first"));
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
                Some(guest) => (Key::guest(vnet, name, guest), format!("guest {guest}")),
                None => (Key::node(vnet, name), String::new()),
            };
            if keys.insert(key) {
                let object = format!("vnet/{vnet}/node/{name}");
                changes.push(Changed { object, action: Action::Restart, detail });
            }
        }
        let restarted = keys.iter().map(|key| Changed {
            object: key.object(),
            action: Action::Restart,
            detail: String::new(),
        });
        let objects: Vec<_> = restarted.collect();
        for Changed { object, .. } in &objects {
            self.board().post(event(object.as_str(), What::Begun, Some("restarted".into())));
        }
        let way = Way { news: self.keeper.restart(keys.clone()), objects };
        self.settle(Some(way), &mut scoped(scope, progress))?;
        self.told(changes, |key| keys.contains(key))
    }

    /// What is wanted once a router has other guests, and what that changes.
    fn scaled(
        &self,
        scope: &Scope,
        before: &Model,
        (vnet, node): (&str, &str),
        request: ScaleRequest,
        named: &BTreeSet<String>,
    ) -> Result<(Model, Vec<Changed>), Problem> {
        let Some(wanted) = before.vnets.get(vnet) else { return Err(no_vnet(vnet)) };
        if before.ledger.stopped {
            return Err(Problem::new(ProblemKind::Conflict, "everything is stopped")
                .hint("start it by `pdp up` first"));
        }
        let has = wanted.shares().get(node);
        let mut wanted = VirtualNetwork::clone(wanted);
        let plane = wanted.spec.nodes.get_mut(node).and_then(|node| node.data_plane.as_mut());
        let by_itself = match plane {
            Some(DataPlane::Fastpath(_)) => Some("a fast path: the mux forwards by itself"),
            Some(DataPlane::Kernel(_)) => Some("its control guest's kernel"),
            Some(DataPlane::Parallel(_)) | None => None,
        };
        if let Some(hint) = by_itself {
            let problem = format!("vnet {vnet}: router {node} has no forwarding guests");
            return Err(Problem::new(ProblemKind::Invalid, problem)
                .hint(format!("its data plane is {hint}")));
        }
        let (Some(has), Some(plane)) = (has, plane.and_then(DataPlane::parallel_mut)) else {
            return Err(Problem::not_found(format!("vnet {vnet}: no router {node:?}"))
                .hint(format!("`pdp inspect {vnet}` lists its nodes")));
        };
        if !(1..=GUESTS_MAX).contains(&(request.guests as usize)) {
            let problem = format!("guests {} is not within 1 to {GUESTS_MAX}", request.guests);
            return Err(Problem::new(ProblemKind::Invalid, problem));
        }
        // What one has on the mean, times how many there are to be; of those that borrow none has any.
        let sum: u64 = has.iter().map(|share| u64::from(share.millicores)).sum();
        let mean = (sum * u64::from(request.guests)).div_ceil(has.len().max(1) as u64);
        let power = request.power_millicores.map(u64::from).or(plane.power.map(|_| mean));
        plane.guests = Some(request.guests);
        plane.power =
            power.map(|power| Cores(u32::try_from(power).unwrap_or(u32::MAX).min(MILLICORES_MAX)));
        self.respecified(scope, before, wanted, named)
    }

    /// What is wanted once a vnet has another spec, and what that changes.
    fn respecified(
        &self,
        scope: &Scope,
        before: &Model,
        wanted: VirtualNetwork,
        named: &BTreeSet<String>,
    ) -> Result<(Model, Vec<Changed>), Problem> {
        let before = &self.counted(before);
        let document = pdp_spec::Document::made(Object::VirtualNetwork(wanted));
        let mut existing = self.existing(before, false);
        existing.asker = scope.tenant().map(str::to_owned);
        let intent = pdp_spec::check(&[document], &existing).map_err(no_room)?;
        let after = self.with(before, intent)?;
        let changes = after.changes_from(before, named, false);
        Ok((after, changes))
    }

    /// Makes a new model of the one there is, stores it and has the keeper make the machine so; beside what it
    /// changes, what failed before and is to be tried again by `retry`. `make` is called again where another
    /// was stored meanwhile; at last with nobody else storing any, so that it ends. Returns what `make` told,
    /// and what the keeper will ([`Engine::settle`]).
    fn revise<T>(
        &self,
        retry: &dyn Fn(&Key) -> bool,
        mut make: impl FnMut(&Model) -> Result<(Model, T), Problem>,
    ) -> Result<(T, Option<Way>), Problem> {
        for _ in 0..TRIES_MAX {
            let before = self.model();
            let (after, told) = make(&before)?;
            let turn = lock(&self.storing);
            if Arc::ptr_eq(&before, &self.model()) {
                return Ok((told, Some(self.store(&turn, &before, after, retry)?)));
            }
        }
        let turn = lock(&self.storing);
        let before = self.model();
        let (after, told) = make(&before)?;
        Ok((told, Some(self.store(&turn, &before, after, retry)?)))
    }

    fn store(
        &self,
        _: &Turn<'_>,
        before: &Model,
        after: Model,
        retry: &dyn Fn(&Key) -> bool,
    ) -> Result<Way, Problem> {
        let change = after.change_from(before);
        self.host.state.commit(&change).map_err(|error| internal(&error))?;
        if change.delete.iter().any(|(kind, _)| kind == "VirtualNetwork") {
            let is_vnet = |part: &OsStr| part.to_str().is_some_and(|n| after.vnets.contains_key(n));
            self.late.keep_only(|path| path.iter().any(is_vnet));
        }
        let after = Arc::new(after);
        *self.model.write().unwrap_or_else(|poisoned| poisoned.into_inner()) = after.clone();
        let objects = self.tell_begin(before, &after, &change);
        // In the order in which they are stored.
        Ok(Way { news: self.keeper.want(after.wanted(), retry), objects })
    }

    /// Tells watchers what a change is about to change, and returns it; nothing if nobody asked for the change.
    fn tell_begin(&self, before: &Model, after: &Model, change: &Change) -> Vec<Changed> {
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
                ("deleted", _) => Action::Delete,
                (_, true) => Action::Change,
                (_, false) => Action::Create,
            };
            objects.insert(format!("{kind}/{name}"), (what, action));
        }
        for vnet in change.held.keys().filter(|vnet| after.vnets.contains_key(*vnet)) {
            objects.entry(format!("vnet/{vnet}")).or_insert(("changed", Action::Change));
        }
        let stops = before.ledger.stopped != after.ledger.stopped;
        if stops {
            let what = match after.ledger.stopped {
                true => ("stopped", Action::Stop),
                false => ("started", Action::Start),
            };
            objects.insert("node".into(), what);
        }
        // Otherwise something was tidied up.
        let asked = asker().is_some();
        for (object, (what, _)) in objects.iter().filter(|_| asked) {
            self.board().post(event(object.as_str(), What::Begun, Some((*what).to_owned())));
        }
        let vnets = objects.keys().filter_map(|object| object.strip_prefix("vnet/"));
        self.board().touch_vnets(vnets.chain(change.held.keys().map(String::as_str)));
        if stops {
            self.board().touch_vnets(after.vnets.keys().map(String::as_str));
        }
        if !asked {
            objects.clear();
        }
        let changed = |(object, (_, action))| Changed { object, action, detail: String::new() };
        objects.into_iter().map(changed).collect()
    }

    /// Waits until what a change concerns is as planned, as far as could be; others may change something
    /// meanwhile. The request's row in the audit log gets the changed objects, and watchers are told.
    fn settle(&self, way: Option<Way>, progress: ProgressFn<'_>) -> Result<(), Problem> {
        let Some(Way { news, objects }) = way else { return Ok(()) };
        if let Some(begun) = asker().and_then(|asker| asker.begun)
            && !objects.is_empty()
        {
            // No lock is held here: the log may be slow.
            begun.changed_blocking(objects.clone());
        }
        loop {
            match news.recv() {
                Ok(News::Step(step)) => progress(step),
                Ok(News::Done) => break,
                Err(_) => return Err(keeper_gone()),
            }
        }
        for Changed { object, .. } in objects {
            let below = format!("{object}/");
            let of = |key: &Key| {
                let key = key.object();
                key == object || key.starts_with(&below)
            };
            let first = self.keeper.problems(of).into_iter().next();
            let (what, why) = match first {
                Some((key, problem)) => (What::Failed, Some(format!("{key}: {problem}"))),
                None => (What::Done, None),
            };
            self.board().post(event(object, what, why));
        }
        match self.model().remains.is_empty() {
            true => Ok(()),
            false => self.free_numbers(),
        }
    }

    /// What is held while a tenant's change is looked at; an operator's waits for no other.
    fn checks_of(&self, scope: &Scope) -> Option<Arc<Mutex<()>>> {
        let tenant = scope.tenant()?;
        Some(lock(&self.checking).entry(tenant.into()).or_default().clone())
    }

    /// The report, or what is wrong now with what was named.
    fn report(
        &self,
        scope: &Scope,
        changes: Vec<Changed>,
        named: &BTreeSet<String>,
    ) -> Result<Report, Problem> {
        let concerns = retries(scope, named);
        let concerns = |key: &Key| match key {
            Key::External(_) => !named.is_empty() && concerns(key),
            Key::Leftovers => false,
            _ => concerns(key),
        };
        self.told(changes, concerns)
    }

    /// The report, or what is wrong now with what it concerns.
    fn told(
        &self,
        changes: Vec<Changed>,
        concerns: impl Fn(&Key) -> bool,
    ) -> Result<Report, Problem> {
        let problems = self.keeper.problems(concerns).into_iter();
        let wrong: Vec<String> =
            problems.map(|(key, problem)| format!("{key}: {problem}")).collect();
        if wrong.is_empty() {
            return Ok(Report { changes, ..Report::default() });
        }
        Err(Problem::new(ProblemKind::Internal, wrong.join("\n"))
            .hint("the change is stored and is being tried again; see `pdp get` and `pdp logs`"))
    }
}

/// Names users and interfaces of a tenant that the machine does not have yet.
fn not_there(tenant: &Tenant, has_interface: impl Fn(&str) -> bool) -> String {
    let is_user = |name: &str| {
        name.parse::<u32>().is_ok() || matches!(nix::unistd::User::from_name(name), Ok(Some(_)))
    };
    let users = tenant.spec.unix_users.iter().filter(|user| !is_user(user));
    let interfaces = tenant.spec.interfaces.keys().filter(|name| !has_interface(name));
    let users = users.map(|user| format!("no user {user} on this machine yet"));
    let interfaces = interfaces.map(|name| format!("no external interface {name} yet"));
    users.chain(interfaces).collect::<Vec<_>>().join(", ")
}

/// That each of these nodes is in one of the documents.
fn in_files(documents: &[Document], only: &BTreeSet<String>) -> Result<(), Problem> {
    let mut known = BTreeSet::new();
    for document in documents {
        if let Object::VirtualNetwork(vnet) = &document.object {
            known.extend(vnet.spec.nodes.keys());
        }
    }
    match only.iter().find(|node| !known.contains(node)) {
        None => Ok(()),
        Some(missing) => {
            let names: Vec<&str> = known.into_iter().map(String::as_str).collect();
            let problem =
                Problem::new(ProblemKind::Invalid, format!("no node {missing:?} in the files"));
            Err(problem.hint(format!("their nodes are {}", names.join(", "))))
        }
    }
}

/// Documents of vnets as they are wanted where only these nodes of them are applied.
fn narrowed(documents: &[Document], before: &Model, only: &BTreeSet<String>) -> Vec<Document> {
    let narrow = |document: &Document| match &document.object {
        Object::VirtualNetwork(vnet) => {
            let there =
                before.vnets.get(&vnet.metadata.name).map(|there| VirtualNetwork::clone(there));
            document.with(Object::VirtualNetwork(vnet.clone().only(only, there.as_ref())))
        }
        _ => document.clone(),
    };
    documents.iter().map(narrow).collect()
}

/// What of that which failed before is tried again by a change of these vnets.
fn retries(scope: &Scope, named: &BTreeSet<String>) -> impl Fn(&Key) -> bool + use<> {
    // The node's own are the operators' to know and to mend.
    let (node, named) = (*scope == Scope::Node, named.clone());
    move |key| match key {
        Key::Mux | Key::External(_) | Key::Leftovers => node,
        Key::Vnet(vnet) | Key::Node { vnet, .. } | Key::Guest { vnet, .. } => named.contains(vnet),
    }
}

fn refusal(diagnostics: Vec<pdp_spec::Diagnostic>) -> Problem {
    let faults = pdp_spec::count(diagnostics.len(), "fault");
    let problem = format!("{faults} in the spec; nothing was changed");
    let mut problem = Problem::new(ProblemKind::Invalid, problem);
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

/// A link of a vnet, by its name or one of its ends.
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
    use crate::bounds::Bounds;
    use crate::control::Mux;
    use crate::ledger::Holding;
    use crate::plan::Places;
    use crate::ports::Ports;
    use crate::state::{Change, State};
    use pdp_container::{Paths, Runtime};

    /// One whose keeper never runs.
    fn engine(directory: &std::path::Path) -> Engine {
        let any = || "/bin/true".into();
        let runtime = Runtime::new(Paths {
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
        let places = Places {
            run: directory.join("run"),
            lib: directory.join("lib"),
            pins: directory.join("pins"),
        };
        let host = Host {
            mux: Mux { path: places.mux_control() },
            ports: Ports::new(&places),
            bounds: Bounds::new(&places),
            places,
            runtime: runtime.unwrap(),
            state: Arc::new(State::open(&directory.join("state")).unwrap()),
            settings: crate::settings::Settings::default(),
        };
        let descriptors = Descriptors { limit: 1000, kept: 0 };
        Engine::new(Arc::new(host), [0, 1].into(), false, descriptors, |_| ()).unwrap()
    }

    #[test]
    fn a_number_is_free_after_a_start_if_nothing_bears_it() {
        let directory = tempfile::tempdir().unwrap();
        let first = engine(directory.path());
        let state = &first.host.state;
        let held = [("gone", 0), ("going", 1)].map(|(vnet, number)| {
            (vnet.to_owned(), Some(Arc::new(Holding { number, ..Holding::default() })))
        });
        state.commit(&Change { held: held.into(), ..Change::default() }).unwrap();
        state.intend(&Key::node("going", "r1").to_string(), "").unwrap();
        drop(first);
        let second = engine(directory.path());
        for ledger in [second.model().ledger.clone(), second.host.state.ledger().unwrap()] {
            assert_eq!(ledger.number_of("gone"), None);
            assert_eq!(ledger.number_of("going"), Some(1));
        }
    }

    fn stored(kind: &str, name: &str, body: &str) -> crate::state::Document {
        crate::state::Document { kind: kind.into(), name: name.into(), body: body.into() }
    }

    fn vnet(name: &str) -> crate::state::Document {
        let body = json!({"apiVersion": "pdp/v1", "kind": "VirtualNetwork",
            "metadata": {"name": name}, "spec": {"nodes": {"h": {"kind": "host"}}}});
        stored("VirtualNetwork", name, &body.to_string())
    }

    /// Specs that can't be read in whatever way, and one that can't be planned: they are told, what they hold is
    /// theirs, and all others are planned.
    #[test]
    fn one_stored_spec_that_is_damaged_keeps_nobody_else_from_a_start() {
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
        let held = (0..bad.len()).map(name).chain(["other.good".into()]).enumerate();
        let held = held.map(|(number, vnet)| {
            (vnet, Some(Arc::new(Holding { number: number as u32, ..Holding::default() })))
        });
        let held: BTreeMap<_, _> = held.collect();
        first.host.state.commit(&Change { put, held, ..Change::default() }).unwrap();
        drop(first);
        // Twice: nothing is given back in between.
        for _ in 0..2 {
            let engine = engine(directory.path());
            let model = engine.model();
            assert_eq!(model.vnets.keys().collect::<Vec<_>>(), ["other.good"]);
            assert!(engine.keeper.plan().vnets.contains_key("other.good"));
            for number in 0..bad.len() {
                let why = model.damaged_vnet(&name(number)).expect("told");
                assert!(why.contains("can't be read"), "{why}");
                assert_eq!(model.ledger.number_of(&name(number)), Some(number as u32));
                assert!(model.plan.damaged.contains(&name(number)));
            }
            assert!(model.damaged_vnet("acme.unplanned").unwrap().contains("can't be planned"));
            assert!(model.knows_tenant("acme") && !model.tenants.contains_key("acme"));
            let listed = crate::view::vnets(&engine, &Scope::Tenant("acme".into()));
            assert_eq!(listed.len(), bad.len() + 1);
            assert!(listed.iter().all(|vnet| vnet.phase == pdp_api::Phase::Failed));
            let told = engine.remnants();
            assert!(told.iter().any(|it| it.command == "pdp delete acme.bad0"), "{told:?}");
            assert!(told.iter().any(|it| it.command == "pdp delete tenant/acme"), "{told:?}");
            // Deleted it is gone from the file as well.
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

    /// Found, and told with what removes it; nothing that belongs to somebody is.
    #[test]
    fn what_outlives_its_owner_is_found() {
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
        engine.host.state.intend(&Key::node("acme.there", "h").to_string(), "").unwrap();
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
        assert!(checks.iter().all(|check| check.state == pdp_api::CheckState::Warn));
    }

    /// A tenant may be given what is not there yet, which is told.
    #[test]
    fn users_and_interfaces_that_are_not_there_are_told_when_a_tenant_is_applied() {
        let directory = tempfile::tempdir().unwrap();
        let engine = engine(directory.path());
        let text = "apiVersion: pdp/v1\nkind: Tenant\nmetadata: {name: acme}\nspec: {unixUsers: [nosuch-user, \"7\", \
                    daemon], interfaces: {A: {whole: true}}}\n";
        let file =
            pdp_spec::SourceFile { name: "f".into(), text: text.into(), ..Default::default() };
        let request = ApplyRequest { files: vec![file], dry_run: true, only: vec![] };
        let report = engine.change(&Scope::Node, request, &mut |_| {}).unwrap();
        let told = [(
            "tenant/acme",
            "no user nosuch-user on this machine yet, no external interface A yet",
        )];
        let changes = report.changes.iter().map(|change| (&*change.object, &*change.detail));
        assert_eq!(changes.collect::<Vec<_>>(), told);
    }

    /// Whatever failed: operators are told where, tenants are not.
    #[test]
    fn no_problem_tells_a_tenant_where_the_state_directory_is() {
        use crate::http::Daemon;
        let directory = tempfile::tempdir().unwrap();
        let engine = engine(directory.path());
        let at = engine.host.state_directory().join("pdpd.sqlite").display().to_string();
        let text = || format!("can't write {at}: no space");
        let fault = pdp_spec::Diagnostic { message: text(), hint: text(), ..Default::default() };
        let problem = || Problem {
            diagnostics: vec![fault.clone()],
            ..Problem::internal(text()).hint(text())
        };
        let told = engine.shown_to(&Scope::Tenant("acme".into()), problem());
        let hidden = "can't write STATE/pdpd.sqlite: no space";
        assert_eq!((told.error.as_str(), told.hint.as_deref()), (hidden, Some(hidden)));
        let fault = &told.diagnostics[0];
        assert_eq!((fault.message.as_str(), fault.hint.as_str()), (hidden, hidden));
        assert_eq!(engine.shown_to(&Scope::Node, problem()).error, text());
    }

    /// What the keeper has not removed yet counts: who applies another network in its place waits for it, and is told
    /// what is in the way.
    #[test]
    fn a_change_waits_for_what_is_being_removed_and_is_refused_then() {
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
            let apply = |before: &Model| engine.applied(&Scope::Node, before, &documents, &named);
            engine.revise(&|_| false, apply).unwrap();
        }
        let delete = |before: &Model| {
            Ok((before.without("acme.old", &engine.host.places, &engine.cpus).unwrap(), ()))
        };
        engine.revise(&|_| false, delete).unwrap();
        let mut told = Vec::new();
        let began = Instant::now();
        let request = ApplyRequest { files: vec![lab("acme.new")], dry_run: false, only: vec![] };
        let acme = Scope::Tenant("acme".into());
        let refused = engine.change(&acme, request, &mut |step| told.push(step.what)).unwrap_err();
        assert!(began.elapsed() >= ROOM_WAIT);
        assert_eq!(told, ["waiting for what is being removed of vnet acme.old"]);
        let words = refused.diagnostics[0].to_string();
        assert!(words.contains("vnets: 1 exceeds tenant acme's quota of 1"), "{words}");
        assert!(words.contains("1 of it is still being removed: acme.old (for "), "{words}");
        // The same network is no other one, and the tenant stays as long as something of it is there.
        let again = pdp_spec::parse(&[lab("acme.old")]).unwrap();
        engine.applied(&acme, &engine.model(), &again, &BTreeSet::new()).unwrap();
        let stays = engine.drop_tenant("acme").unwrap_err();
        assert!(stays.error.contains("acme.old is not gone yet"), "{}", stays.error);
    }

    fn down(before: &Model, link: &str) -> Model {
        let mut after = before.clone();
        let mut holding = Holding::default();
        if let Some(before) = before.ledger.vnets.get("red") {
            holding.clone_from(before);
        }
        holding.links_down.insert(link.into());
        after.ledger.set("red", Some(holding));
        after
    }

    /// What a change is made of is looked at while others are stored; what was stored meanwhile is
    /// in it. With the lock of changes held while somebody's files are checked this would not end.
    #[test]
    fn others_store_their_changes_while_one_is_checked() {
        let directory = tempfile::tempdir().unwrap();
        let engine = engine(directory.path());
        let mut looks = 0;
        let told = engine.revise(&|_| false, |before| {
            looks += 1;
            if looks <= 2 {
                let other = format!("other-{looks}");
                engine.revise(&|_| false, |before| Ok((down(before, &other), ()))).unwrap();
            }
            Ok((down(before, "mine"), looks))
        });
        assert_eq!(told.unwrap().0, 3, "checked again after each of the others' changes");
        let names = ["mine", "other-1", "other-2"];
        let stored = engine.host.state.ledger().unwrap();
        assert_eq!(engine.model().ledger, stored);
        assert_eq!(stored.vnets["red"].links_down, names.map(str::to_owned).into());
    }

    /// And it ends, however often others store theirs.
    #[test]
    fn a_change_is_made_at_last_with_nobody_else_making_one() {
        let directory = tempfile::tempdir().unwrap();
        let engine = engine(directory.path());
        let mut looks = 0;
        let told = engine.revise(&|_| false, |before| {
            looks += 1;
            if looks <= TRIES_MAX {
                let other = format!("other-{looks}");
                engine.revise(&|_| false, |before| Ok((down(before, &other), ()))).unwrap();
            } else {
                assert!(engine.storing.try_lock().is_err(), "nobody else stores any");
            }
            Ok((down(before, "mine"), looks))
        });
        assert_eq!(told.unwrap().0, TRIES_MAX + 1);
    }
}
