//! The desired state: the stored specs, their allocations, and the plan made from both.
//!
//! Pure. A change creates a new [`Model`] from the old one. The old one
//! is not changed until the new one is stored.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::SystemTime;

use pdp_api::{ChangeAction, ObjectChange as Changed};
use pdp_container::Limits;
use pdp_net::ports::PORTS_MAX;
use pdp_proto::mux;
use pdp_spec::remains::RemainsByVnet;
use pdp_spec::units::Endpoint;
use pdp_spec::{
    Existing, Intent, Link, Object, PlacedVnet, Substrate, SubstrateSpec, Tenant, VirtualNetwork,
    Vnets, tenant_of,
};

use crate::intent::state::{StateChange, StoredDocument};
use crate::plan::allocations::{
    Allocations, BootInstant, EnginePlacement, FreeNumbers, FreePorts, NUMBERS_MAX, ScheduleStart,
};
use crate::plan::{
    self, DaemonPaths, GuestPlan, KernelPlan, NodePlan, Plan, PlanError, VnetPlan, plan,
};
use crate::util::shared::{self, differing};

/// The desired state. Versions of it have unchanged parts in common.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Model {
    /// The applied substrate; `None` if the default one is used.
    pub substrate: Option<Substrate>,
    /// The applied vnets.
    pub vnets: Arc<Vnets>,
    /// The applied tenants.
    pub tenants: Arc<BTreeMap<String, Tenant>>,
    /// Allocations of the vnets.
    pub allocations: Allocations,
    /// Earlier parts of vnets that may still exist besides the wanted ones.
    pub remains: Arc<RemainsByVnet>,
    /// Everything that shall run unless stopped.
    pub plan: Arc<Plan>,
    /// Networks and tenants whose stored specs can't be used, by kind and name, with the reason.
    /// Nothing of them runs. What they have is kept until they are applied again or deleted.
    pub damaged: Arc<BTreeMap<(String, String), String>>,
}

/// Kinds of stored documents that belong to an owner.
const VNET: &str = "VirtualNetwork";
const TENANT: &str = "Tenant";

/// Why stored specs can't be loaded.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// A stored document can't be parsed.
    #[error("stored {kind} {name} can't be read; apply it again")]
    Document {
        /// Kind of the document.
        kind: String,
        /// Name of the document.
        name: String,
        /// The parse error.
        source: serde_json::Error,
    },
    /// No plan can be made.
    #[error(transparent)]
    Plan(#[from] PlanError),
}

impl Model {
    /// Loads the model from stored documents.
    pub fn load(
        places: &DaemonPaths,
        cpus: &BTreeSet<u32>,
        documents: &[StoredDocument],
        allocations: Allocations,
    ) -> Result<Self, ModelError> {
        let (mut vnets, mut tenants) = (Vnets::new(), BTreeMap::new());
        let mut model = Self { allocations, ..Self::default() };
        let mut damaged = BTreeMap::new();
        for document in documents {
            let (kind, name) = (document.kind.clone(), document.name.clone());
            let object = match serde_json::from_str(&document.body) {
                Ok(object) => object,
                // It belongs to the node. Nothing can be planned without it.
                Err(source) if kind != VNET && kind != TENANT => {
                    return Err(ModelError::Document { kind, name, source });
                }
                Err(source) => {
                    let why = format!("its stored spec can't be read: {source}");
                    damaged.insert((kind, name), why);
                    continue;
                }
            };
            match object {
                Object::Substrate(substrate) => model.substrate = Some(substrate),
                Object::VirtualNetwork(vnet) => {
                    let name = vnet.metadata.name.clone();
                    let allocation = model.allocations.vnets.get(&name);
                    let shares =
                        allocation.map(|allocation| allocation.shares()).unwrap_or_default();
                    vnets.insert(name, Arc::new(PlacedVnet::new(vnet, shares)));
                }
                Object::Tenant(tenant) => {
                    tenants.insert(tenant.metadata.name.clone(), tenant);
                }
            }
        }
        (model.vnets, model.tenants) = (Arc::new(vnets), Arc::new(tenants));
        model.damaged = Arc::new(damaged);
        let none = Self::default();
        let plan = |model: &mut Self| {
            let all = model.vnets.clone();
            model.replan(&none, all.keys().map(String::as_str), places, cpus)
        };
        if plan(&mut model).is_err() {
            // Plan each vnet by itself, so that one that can't be
            // planned does not prevent the others from running.
            let mut too_long = None;
            for (name, vnet) in &*model.vnets.clone() {
                let alone = Arc::new([(name.clone(), vnet.clone())].into());
                if let Err(error) = plan(&mut Self { vnets: alone, ..model.clone() }) {
                    let why = format!("its stored spec can't be planned: {error}");
                    too_long = Some(error).filter(|it| matches!(it, PlanError::PathTooLong { .. }));
                    Arc::make_mut(&mut model.damaged).insert((VNET.into(), name.clone()), why);
                    shared::set(&mut model.vnets, name, None);
                }
            }
            // No network's socket paths fit: the run directory is too long.
            if let Some(error) = too_long.filter(|_| model.vnets.is_empty()) {
                return Err(error.into());
            }
            plan(&mut model)?;
        }
        Ok(model)
    }

    /// Returns why the stored spec of a network can't be used.
    pub fn damaged_vnet(&self, vnet: &str) -> Option<&str> {
        self.damaged.get(&(VNET.into(), vnet.into())).map(String::as_str)
    }

    /// True if a tenant of this name exists, even if its stored spec can't be read.
    pub fn knows_tenant(&self, tenant: &str) -> bool {
        self.tenants.contains_key(tenant)
            || self.damaged.contains_key(&(TENANT.into(), tenant.into()))
    }

    /// Returns the substrate in force.
    pub fn effective_substrate(&self, cpus: &BTreeSet<u32>) -> Substrate {
        self.substrate.clone().unwrap_or_else(|| Substrate::of_machine(cpus))
    }

    /// Returns the facts that the check of a change needs, except those of the machine.
    pub fn existing(&self, cpus: &BTreeSet<u32>, new_substrate: bool) -> Existing {
        let substrate = match (&self.substrate, new_substrate) {
            (None, true) => None,
            _ => Some(self.effective_substrate(cpus)),
        };
        Existing {
            substrate,
            vnets: self.vnets.clone(),
            tenants: self.tenants.clone(),
            cpus: cpus.clone(),
            remains: self.remains.clone(),
            now_s: now_s(),
            ..Existing::default()
        }
    }

    /// Returns the model after a checked change. A new vnet gets a number
    /// that neither a vnet nor, by `may_exist`, the remains of one use.
    pub fn with(
        &self,
        intent: Intent,
        places: &DaemonPaths,
        cpus: &BTreeSet<u32>,
        may_exist: impl Fn(&str) -> bool,
    ) -> Result<Self, PlanError> {
        let mut next = self.clone();
        next.free_numbers(may_exist);
        next.allocations.stopped = false;
        if self.substrate.is_some() || intent.substrate != Some(Substrate::of_machine(cpus)) {
            next.substrate = intent.substrate;
        }
        next.vnets = intent.vnets;
        next.tenants = intent.tenants;
        let again = |(kind, name): &(String, String)| match kind.as_str() {
            VNET => next.vnets.contains_key(name),
            _ => next.tenants.contains_key(name),
        };
        if next.damaged.keys().any(again) {
            Arc::make_mut(&mut next.damaged).retain(|key, _| !again(key));
        }
        let vnets = next.vnets.clone();
        let changed = differing(&self.vnets, &vnets);
        next.give(self, &changed, &next.effective_substrate(cpus).spec)?;
        next.note_remains(self, &changed);
        next.replan(self, changed, places, cpus)?;
        Ok(next)
    }

    /// Frees the numbers of vnets that are gone: neither wanted nor, by
    /// `may_exist`, partly there. Returns true if there were any.
    pub fn free_numbers(&mut self, may_exist: impl Fn(&str) -> bool) -> bool {
        // Each wanted vnet has one.
        if self.allocations.vnets.len() <= self.vnets.len() {
            return false;
        }
        let vnets = self.allocations.vnets.keys();
        let known = |name: &str| self.vnets.contains_key(name) || self.damaged_vnet(name).is_some();
        let gone = vnets.filter(|name| !known(name) && !may_exist(name));
        let gone: Vec<String> = gone.cloned().collect();
        gone.iter().for_each(|name| self.allocations.set(name, None));
        !gone.is_empty()
    }

    /// Records earlier versions of changed tenants' vnets, as far as they shrank
    /// or were deleted. They count in quotas until [`Model::forget_remains`].
    fn note_remains(&mut self, before: &Self, changed: &[&str]) {
        for &name in changed.iter().filter(|name| tenant_of(name).is_some()) {
            let Some(was) = before.vnets.get(name) else { continue };
            let mut remains = self.remains.get(name).cloned().unwrap_or_default();
            remains.note(was, self.vnets.get(name).map(|vnet| &**vnet), now_s());
            if !remains.parts.is_empty() {
                Arc::make_mut(&mut self.remains).insert(name.to_owned(), remains);
            }
        }
    }

    /// Forgets remains that are gone. `follows` gets a vnet and a node, or the vnet itself, and
    /// returns true if the machine is as wanted there. Returns true if any remains were forgotten.
    pub fn forget_remains(&mut self, follows: impl Fn(&str, Option<&str>) -> bool) -> bool {
        if self.remains.is_empty() {
            return false;
        }
        let mut left = RemainsByVnet::clone(&self.remains);
        for (vnet, remains) in &mut left {
            // The links have an empty name.
            remains.parts.retain(|node, _| !follows(vnet, (!node.is_empty()).then_some(node)));
        }
        left.retain(|_, remains| !remains.parts.is_empty());
        let changed = left != *self.remains;
        if changed {
            self.remains = Arc::new(left);
        }
        changed
    }

    /// Returns the model without a vnet, whose number stays its own until [`Model::free_numbers`].
    pub fn without(
        &self,
        vnet: &str,
        places: &DaemonPaths,
        cpus: &BTreeSet<u32>,
    ) -> Result<Self, PlanError> {
        let mut next = self.clone();
        shared::set(&mut next.vnets, vnet, None);
        Arc::make_mut(&mut next.damaged).remove(&(VNET.into(), vnet.into()));
        next.allocations.forget_vnet(vnet);
        next.note_remains(self, &[vnet]);
        next.replan(self, [vnet], places, cpus)?;
        Ok(next)
    }

    /// Returns the model without a tenant, which has no vnets.
    pub fn without_tenant(&self, tenant: &str) -> Self {
        let mut next = self.clone();
        Arc::make_mut(&mut next.tenants).remove(tenant);
        Arc::make_mut(&mut next.damaged).remove(&(TENANT.into(), tenant.into()));
        next.allocations.forget_tenant(tenant);
        next
    }

    /// Returns an empty model. Vnets whose remains still use a number keep that alone. The
    /// owners of numbers stay, since files that outlive everything have their user ids.
    pub fn purged(&self, bears: impl Fn(&str) -> bool) -> Self {
        let mut next = Self { allocations: self.allocations.clone(), ..Self::default() };
        next.allocations.stopped = false;
        for vnet in self.allocations.vnets.keys() {
            match bears(vnet) {
                true => next.allocations.forget_vnet(vnet),
                false => next.allocations.set(vnet, None),
            }
        }
        self.tenants.keys().for_each(|tenant| next.allocations.forget_tenant(tenant));
        next
    }

    /// Remakes the plan of `before` for vnets whose spec or allocations changed, or for
    /// all if the substrate changed. A plan that does not change stays the same object.
    pub fn replan<'a>(
        &'a mut self,
        before: &'a Self,
        changed: impl IntoIterator<Item = &'a str>,
        places: &DaemonPaths,
        cpus: &BTreeSet<u32>,
    ) -> Result<(), PlanError> {
        let names = self.damaged.keys().filter(|(kind, _)| kind == VNET);
        let damaged: BTreeSet<String> = names.map(|(_, name)| name.clone()).collect();
        if self.substrate.is_none() && self.vnets.is_empty() {
            self.plan = Arc::new(Plan { damaged, ..Plan::default() });
            return Ok(());
        }
        let substrate = self.effective_substrate(cpus).spec;
        let same = before.plan.mux.is_some() && before.effective_substrate(cpus).spec == substrate;
        let changed: BTreeSet<&str> = match same {
            true => changed.into_iter().collect(),
            false => before.vnets.keys().chain(self.vnets.keys()).map(String::as_str).collect(),
        };
        let before = (&*before.plan, same);
        let planned = plan(places, &substrate, &self.vnets, &self.allocations, &changed, before)?;
        self.plan = Arc::new(Plan { damaged, ..planned });
        Ok(())
    }

    /// Returns the plan in force.
    pub fn wanted(&self) -> Arc<Plan> {
        match self.allocations.stopped {
            true => Arc::new(self.plan.at_rest()),
            false => self.plan.clone(),
        }
    }

    /// Allocates numbers for vnets that changed since `before`, and for
    /// their guests. A guest keeps its number while it stays on its engine.
    /// A link keeps its state while it is the same link ([`names_before`]).
    fn give(
        &mut self,
        before: &Self,
        changed: &[&str],
        substrate: &SubstrateSpec,
    ) -> Result<(), PlanError> {
        let (mut free, now) = (FreeNumbers::default(), BootInstant::now());
        let mut free_ports = FreePorts::of(&self.allocations);
        for &name in changed {
            let Some(vnet) = self.vnets.get(name) else { continue };
            let mut allocation = self
                .allocations
                .of(name, &mut free)
                .ok_or_else(|| PlanError::NoNumber { vnet: name.to_owned(), max: NUMBERS_MAX })?;
            let number = |node: &String, shares| number_shares(allocation.guests.get(node), shares);
            let shares = vnet.shares().iter();
            let guests = shares.map(|(node, shares)| (node.clone(), number(node, shares)));
            allocation.guests = guests.collect();
            let known = std::mem::take(&mut allocation.ports);
            let was = |node: &str, interface: &str| {
                known.get(node).is_some_and(|ports| ports.contains_key(interface))
            };
            let tunnels = plan::kernel_tunnel_ports(
                name,
                &vnet.spec,
                substrate,
                pdp_net::xdp::redirects,
                was,
            );
            for (node, interface) in plan::kernel_link_ports(name, &vnet.spec).chain(tunnels) {
                let known = known.get(node).and_then(|ports| ports.get(interface)).copied();
                let number = known
                    .or_else(|| free_ports.take(name))
                    .ok_or_else(|| PlanError::NoPort { vnet: name.to_owned(), max: PORTS_MAX })?;
                allocation.ports.entry(node.into()).or_default().insert(interface.into(), number);
            }
            let links = &vnet.spec.links;
            let was = before.vnets.get(name).map_or(links, |vnet| &vnet.spec.links);
            let known_as = names_before(was, links);
            let [down, silent] = [&allocation.links_down, &allocation.links_silent].map(|before| {
                let stays = known_as.iter().filter(|(_, was)| before.contains(**was));
                stays.map(|(is, _)| (*is).to_owned()).collect()
            });
            (allocation.links_down, allocation.links_silent) = (down, silent);
            let scheduled = links.iter().filter(|link| !link.schedule.is_empty());
            let begins = scheduled.filter_map(|link| {
                let (name, hash) =
                    (link.name.clone()?, plan::hash(&(&link.schedule, &link.endpoints)));
                let known = known_as.get(&*name).and_then(|was| allocation.schedules.get(*was));
                let goes_on = known.filter(|it| it.hash == hash && it.boot == now.boot).cloned();
                let anew = || ScheduleStart { hash, boot: now.boot.clone(), at_ns: now.at_ns };
                Some((name, goes_on.unwrap_or_else(anew)))
            });
            allocation.schedules = begins.collect();
            // In the order of the guests, in which they are loaded again.
            let shares = allocation.shares();
            if shares != *vnet.shares() {
                let placed = PlacedVnet::new(VirtualNetwork::clone(vnet), shares);
                shared::set(&mut self.vnets, name, Some(placed));
            }
            self.allocations.set(name, Some(allocation));
        }
        Ok(())
    }

    /// Returns what to store when `self` replaces `before`.
    pub fn change_from(&self, before: &Self) -> StateChange {
        let mut change =
            StateChange { stopped: self.allocations.stopped, ..StateChange::default() };
        let (was, is) = (&before.substrate, &self.substrate);
        if was != is {
            let object = is.clone().map(Object::Substrate);
            let name = is.as_ref().or(was.as_ref()).map(|substrate| &substrate.metadata.name);
            name.iter().for_each(|name| change.document("Substrate", name, object.as_ref()));
        }
        for name in tenants_changed(before, self) {
            let object = self.tenants.get(name).cloned().map(Object::Tenant);
            change.document("Tenant", name, object.as_ref());
        }
        for name in differing(&before.vnets, &self.vnets) {
            let vnet = self.vnets.get(name).map(|vnet| VirtualNetwork::clone(vnet));
            change.document("VirtualNetwork", name, vnet.map(Object::VirtualNetwork).as_ref());
        }
        for (kind, name) in before.damaged.keys().filter(|key| !self.damaged.contains_key(*key)) {
            let again = match kind.as_str() {
                VNET => self.vnets.contains_key(name),
                _ => self.tenants.contains_key(name),
            };
            if !again {
                change.document(kind, name, None);
            }
        }
        for name in differing(&before.allocations.vnets, &self.allocations.vnets) {
            change.allocations.insert(name.to_owned(), self.allocations.vnets.get(name).cloned());
        }
        if !Arc::ptr_eq(&before.remains, &self.remains) {
            let names: BTreeSet<&String> =
                before.remains.keys().chain(self.remains.keys()).collect();
            let (was, is) = (&before.remains, &self.remains);
            for name in names.into_iter().filter(|name| was.get(*name) != is.get(*name)) {
                change.remains.insert(name.clone(), is.get(name).cloned());
            }
        }
        change
    }

    /// Lists the changes from `before` to `self`, object by object. Vnets in `named`
    /// are listed even if unchanged, and so is the substrate if `substrate` is set.
    pub fn changes_from(
        &self,
        before: &Self,
        named: &BTreeSet<String>,
        substrate: bool,
    ) -> Vec<Changed> {
        let mut changes = Vec::new();
        let (old, new) = (before.wanted(), self.wanted());
        if substrate || before.substrate != self.substrate {
            let (was, is) = (before.substrate.as_ref(), self.substrate.as_ref());
            let name = is.or(was).map_or("default", |substrate| substrate.metadata.name.as_str());
            let restart =
                old.mux.as_ref().map(|mux| &mux.hash) != new.mux.as_ref().map(|mux| &mux.hash);
            let (action, detail) = match (was, is) {
                (None, Some(_)) => (ChangeAction::Create, ""),
                (Some(_), None) => (ChangeAction::Delete, ""),
                _ if was == is => (ChangeAction::Unchanged, ""),
                _ if restart => (ChangeAction::Change, "the mux restarts"),
                _ => (ChangeAction::Change, ""),
            };
            changes.push(changed(format!("substrate/{name}"), action, detail));
        }
        for name in tenants_changed(before, self) {
            let action = match (before.tenants.get(name), self.tenants.get(name)) {
                (None, _) => ChangeAction::Create,
                (_, None) => ChangeAction::Delete,
                _ => ChangeAction::Change,
            };
            changes.push(changed(format!("tenant/{name}"), action, ""));
        }
        let mut names: BTreeSet<&str> = named.iter().map(String::as_str).collect();
        names.extend(differing(&old.vnets, &new.vnets));
        for name in names {
            let object = format!("vnet/{name}");
            match (old.vnets.get(name), new.vnets.get(name)) {
                (None, Some(vnet)) => {
                    let nodes = pdp_spec::count(vnet.nodes.len(), "node");
                    let links = pdp_spec::count(vnet.mux.vlinks.len(), "link");
                    let detail = format!("{nodes}, {links}");
                    let action = match before.vnets.contains_key(name) {
                        true => ChangeAction::Start,
                        false => ChangeAction::Create,
                    };
                    changes.push(changed(object, action, &detail));
                }
                (Some(_), None) => {
                    let action = match self.vnets.contains_key(name) {
                        true => ChangeAction::Stop,
                        false => ChangeAction::Delete,
                    };
                    changes.push(changed(object, action, ""));
                }
                (Some(was), Some(is)) => {
                    let mut inner = vnet_changes(&object, was, is);
                    inner.extend(label_changes(
                        &object,
                        before.vnets.get(name),
                        self.vnets.get(name),
                    ));
                    let stored = stored_change(before.vnets.get(name), self.vnets.get(name));
                    let stored = stored.filter(|what| *what == LABELS || inner.is_empty());
                    if !inner.is_empty() || stored.is_some() {
                        changes.push(changed(
                            object,
                            ChangeAction::Change,
                            stored.unwrap_or_default(),
                        ));
                        changes.extend(inner);
                    } else if named.contains(name) {
                        changes.push(changed(object, ChangeAction::Unchanged, ""));
                    }
                }
                (None, None) => {}
            }
        }
        changes
    }
}

/// Returns the former names of links, by their current names. Two links are
/// the same if they have the same ends, or the same name and one common
/// end. The name of an unnamed link follows from its position in the file.
fn names_before<'a>(was: &'a [Link], is: &'a [Link]) -> BTreeMap<&'a str, &'a str> {
    let ends = |link: &'a Link| link.endpoints.iter().map(move |end| (end, link));
    let by_end: BTreeMap<&Endpoint, &Link> = was.iter().flat_map(ends).collect();
    let set = |link: &'a Link| link.endpoints.iter().collect::<BTreeSet<_>>();
    let before = |link: &'a Link| {
        let mut found = link.endpoints.iter().filter_map(|end| by_end.get(end));
        let same = found.find(|was| was.name == link.name || set(was) == set(link))?;
        Some((link.name.as_deref()?, same.name.as_deref()?))
    };
    is.iter().filter_map(before).collect()
}

/// Returns the seconds since 1970.
fn now_s() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    now.map_or(0, |now| now.as_secs())
}

/// Returns the tenants that differ between two models or are in only one of them.
fn tenants_changed<'a>(before: &'a Model, after: &'a Model) -> BTreeSet<&'a str> {
    let (was, is) = (&before.tenants, &after.tenants);
    let mut names: BTreeSet<&str> = BTreeSet::new();
    if !Arc::ptr_eq(was, is) {
        names.extend(was.keys().chain(is.keys()).map(String::as_str));
        names.retain(|name| was.get(*name) != is.get(*name));
    }
    names
}

fn changed(object: String, action: ChangeAction, detail: &str) -> Changed {
    Changed { object, action, detail: detail.into() }
}

fn vnet_changes(object: &str, was: &VnetPlan, is: &VnetPlan) -> Vec<Changed> {
    let mut changes = Vec::new();
    let names: BTreeSet<&String> = was.nodes.keys().chain(is.nodes.keys()).collect();
    for name in names {
        let node = format!("{object}/node/{name}");
        match (was.nodes.get(name), is.nodes.get(name)) {
            (None, Some(_)) => changes.push(changed(node, ChangeAction::Create, "")),
            (Some(_), None) => changes.push(changed(node, ChangeAction::Delete, "")),
            (Some(was_node), Some(is_node)) => {
                let details = node_changes(was_node, is_node);
                let router = |vnet: &VnetPlan| {
                    vnet.mux.nodes.iter().find(|node| &node.name == name).cloned()
                };
                if was_node.hash != is_node.hash {
                    let mut all = vec!["configuration".to_string()];
                    all.extend(details);
                    changes.push(changed(node, ChangeAction::Restart, &all.join(", ")));
                } else if !details.is_empty() {
                    changes.push(changed(node, ChangeAction::Change, &details.join(", ")));
                } else if router(was) != router(is) {
                    changes.push(changed(
                        node,
                        ChangeAction::Change,
                        "distribution or punt limits",
                    ));
                }
            }
            (None, None) => {}
        }
    }
    let old: BTreeMap<_, _> = was.mux.vlinks.iter().map(|link| (&link.name, link)).collect();
    let new: BTreeMap<_, _> = is.mux.vlinks.iter().map(|link| (&link.name, link)).collect();
    let names: BTreeSet<_> = old.keys().chain(new.keys()).copied().collect();
    let was_silent = |name: &str| was.silent.contains(name);
    let is_silent = |name: &str| is.silent.contains(name);
    for name in names {
        let link = format!("{object}/link/{name}");
        match (old.get(name), new.get(name)) {
            (None, Some(_)) => changes.push(changed(link, ChangeAction::Create, "")),
            (Some(_), None) => changes.push(changed(link, ChangeAction::Delete, "")),
            (Some(old), Some(new)) if (old, was_silent(name)) != (new, is_silent(name)) => {
                let detail = match (old.up, new.up) {
                    (_, false) if is_silent(name) && !was_silent(name) => "down, silently",
                    (true, false) => "down",
                    (false, true) => "up",
                    (false, false) if was_silent(name) && !is_silent(name) => "down",
                    _ => &egress_changes(old, new),
                };
                changes.push(changed(link, ChangeAction::Change, detail));
            }
            _ => {}
        }
    }
    if changes.is_empty() && was.mux.police != is.mux.police {
        changes.push(changed(object.to_string(), ChangeAction::Change, "police"));
    }
    changes
}

/// Name of a change of a network's labels.
const LABELS: &str = "labels";

/// Names the stored part of a network that changed, in case nothing
/// else did. Nothing that runs depends on it.
fn stored_change(
    was: Option<&Arc<PlacedVnet>>,
    is: Option<&Arc<PlacedVnet>>,
) -> Option<&'static str> {
    let (was, is) = (was?, is?);
    match was.metadata.labels != is.metadata.labels {
        true => Some(LABELS),
        false => (***was != ***is).then_some("stored spec"),
    }
}

/// Returns the changes of nodes' labels.
fn label_changes(
    object: &str,
    was: Option<&Arc<PlacedVnet>>,
    is: Option<&Arc<PlacedVnet>>,
) -> Vec<Changed> {
    let (Some(was), Some(is)) = (was, is) else { return Vec::new() };
    let mut changes = Vec::new();
    for (name, node) in &is.spec.nodes {
        if was.spec.nodes.get(name).is_some_and(|was| was.labels != node.labels) {
            changes.push(changed(format!("{object}/node/{name}"), ChangeAction::Change, LABELS));
        }
    }
    changes
}

/// Compares one property of two ends.
type Same = fn(&mux::EgressConfig, &mux::EgressConfig) -> bool;

/// Describes how the egress settings of a link's ends changed.
fn egress_changes(old: &mux::Vlink, new: &mux::Vlink) -> String {
    let (was, is) = (&old.leaving, &new.leaving);
    let differs =
        |same: Same| was.len() != is.len() || was.iter().zip(is).any(|(was, is)| !same(was, is));
    let parts: [(&str, Same); 4] = [
        ("rate", |was, is| {
            (was.rate_bps, was.burst_bytes, was.overhead_bytes)
                == (is.rate_bps, is.burst_bytes, is.overhead_bytes)
        }),
        ("queue", |was, is| {
            (was.queue_frames, was.queue_bytes) == (is.queue_frames, is.queue_bytes)
        }),
        ("part", |was, is| (was.guarantee_bps, was.weight) == (is.guarantee_bps, is.weight)),
        ("impairments", |was, is| was.impairments == is.impairments),
    ];
    let differing = parts.iter().filter(|(_, same)| differs(*same)).map(|(what, _)| *what);
    let queues = (old.queues != new.queues).then_some("queues");
    differing.chain(queues).collect::<Vec<_>>().join(", ")
}

fn node_changes(was: &NodePlan, is: &NodePlan) -> Vec<String> {
    let mut details = Vec::new();
    if was.control.limits != is.control.limits {
        details.push("limits".to_string());
    }
    let stays = |name: &str| is.control.volumes.iter().any(|volume| volume.name == name);
    for volume in was.control.volumes.iter().filter(|volume| !stays(&volume.name)) {
        details.push(format!("volume {} removed", volume.name));
    }
    if let (Some(before), Some(after)) = (&was.engine, &is.engine)
        && before.power != after.power
    {
        let [was, is] = [was, is].map(|plan| power_words(plan.mux_millicores));
        // An equal power may be another share of a worker now.
        details.push(format!("the mux's part: {was} to {is}"));
    }
    if let (Some(was), Some(is)) = (&was.kernel, &is.kernel) {
        if was.xdp_bypass != is.xdp_bypass {
            details.push("kernelHooks".to_owned());
        }
        let share = |kernel: &KernelPlan| (kernel.placement.clone(), kernel.limits.clone());
        if share(was) != share(is) {
            let changes = share_changes(&share(was), &share(is));
            details.push(format!("the kernel's part: {changes}"));
        }
    }
    let numbers: BTreeSet<u32> = was.guests.keys().chain(is.guests.keys()).copied().collect();
    for number in numbers {
        match (was.guests.get(&number), is.guests.get(&number)) {
            (None, Some(guest)) => {
                details.push(format!("guest {number} on {} added", guest.placement.engine));
            }
            (Some(_), None) => details.push(format!("guest {number} removed")),
            (Some(was), Some(is)) if was.hash != is.hash => {
                details.push(format!("guest {number} restarted"));
            }
            (Some(was), Some(is)) if was != is => {
                let share =
                    |guest: &GuestPlan| (guest.placement.clone(), guest.container.limits.clone());
                let changes = share_changes(&share(was), &share(is));
                details.push(format!("guest {number}: {changes}"));
            }
            _ => {}
        }
    }
    details
}

/// Describes how a share of a forwarding engine and the resulting limits changed.
fn share_changes(
    (was, was_limits): &(EnginePlacement, Limits),
    (is, is_limits): &(EnginePlacement, Limits),
) -> String {
    let mut changes = Vec::new();
    if was.engine != is.engine {
        changes.push(format!("engine {} to {}", was.engine, is.engine));
    } else if was_limits.cpus != is_limits.cpus {
        changes.push(format!("CPUs of engine {}", is.engine));
    }
    let [power, now] = [was, is].map(|placement| placement.power_millicores);
    if power != now {
        changes.push(format!("{} to {}", power_words(power), power_words(now)));
    }
    // Without power, a guest can only borrow.
    let both = power > 0 && now > 0;
    match (was_limits.cpu_cores, is_limits.cpu_cores) {
        (Some(_), None) if both => changes.push("may borrow now".to_owned()),
        (None, Some(_)) if both => changes.push("may not borrow any more".to_owned()),
        _ if changes.is_empty() => changes.push("limits".to_owned()),
        _ => {}
    }
    changes.join(", ")
}

fn power_words(millicores: u32) -> String {
    match millicores {
        0 => "borrowed power".to_owned(),
        power => format!("{power} millicores"),
    }
}

fn number_shares(
    before: Option<&BTreeMap<u32, EnginePlacement>>,
    shares: &[pdp_alloc::EngineShare],
) -> BTreeMap<u32, EnginePlacement> {
    let mut placed = BTreeMap::new();
    let mut new = Vec::new();
    for share in shares {
        let placement =
            EnginePlacement { engine: share.engine.clone(), power_millicores: share.millicores };
        let stays = before
            .into_iter()
            .flatten()
            .find(|(number, old)| old.engine == share.engine && !placed.contains_key(*number));
        match stays {
            Some((&number, _)) => drop(placed.insert(number, placement)),
            None => new.push(placement),
        }
    }
    // A guest that moves keeps its number, so guests are either added or removed, never both.
    let moves: Vec<u32> = before.into_iter().flatten().map(|(number, _)| *number).collect();
    for placement in new {
        let mut numbers = moves.iter().copied().chain(0..);
        let number = numbers.find(|number| !placed.contains_key(number)).unwrap_or_default();
        placed.insert(number, placement);
    }
    placed
}
