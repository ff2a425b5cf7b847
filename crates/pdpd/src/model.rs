//! What is wanted: the stored specs, what was given out for them, and the plan of both.
//!
//! Pure. A change is a new [`Model`] made from the old one; the old one stays as it is until the
//! new one is stored.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use pdp_api::{Action, Change as Changed};
use pdp_spec::{Existing, Intent, Object, Substrate, Tenant, VirtualNetwork};

use crate::ledger::{Ledger, Placement, VNETS, VNETS_MAX};
use crate::plan::{NodePlan, Places, Plan, PlanError, VnetPlan, plan};
use crate::state::{Change, Document};

/// What is wanted.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Model {
    /// The substrate as applied; `None`: a default one is used.
    pub substrate: Option<Substrate>,
    /// Vnets as applied.
    pub vnets: BTreeMap<String, VirtualNetwork>,
    /// Tenants as applied.
    pub tenants: BTreeMap<String, Tenant>,
    /// Changes of each document so far.
    pub generations: BTreeMap<(String, String), u32>,
    /// What was given out.
    pub ledger: Ledger,
    /// All that is to run unless stopped.
    pub plan: Arc<Plan>,
}

/// Why stored specs can't be read.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// A stored document that is none.
    #[error("stored {kind} {name} can't be read; apply it again")]
    Document {
        /// Its kind.
        kind: String,
        /// Its name.
        name: String,
        /// What is wrong with it.
        source: serde_json::Error,
    },
    /// No plan for it.
    #[error(transparent)]
    Plan(#[from] PlanError),
}

impl Model {
    /// From what is stored.
    pub fn load(
        places: &Places,
        cpus: &BTreeSet<u32>,
        documents: &[Document],
        ledger: Ledger,
    ) -> Result<Self, ModelError> {
        let mut model = Self { ledger, ..Self::default() };
        for document in documents {
            let object =
                serde_json::from_str(&document.body).map_err(|source| ModelError::Document {
                    kind: document.kind.clone(),
                    name: document.name.clone(),
                    source,
                })?;
            model
                .generations
                .insert((document.kind.clone(), document.name.clone()), document.generation);
            match object {
                Object::Substrate(substrate) => model.substrate = Some(substrate),
                Object::VirtualNetwork(vnet) => {
                    model.vnets.insert(vnet.metadata.name.clone(), vnet);
                }
                Object::Tenant(tenant) => {
                    model.tenants.insert(tenant.metadata.name.clone(), tenant);
                }
            }
        }
        model.replan(&Self::default(), places, cpus)?;
        Ok(model)
    }

    /// The substrate that holds.
    pub fn effective_substrate(&self, cpus: &BTreeSet<u32>) -> Substrate {
        self.substrate.clone().unwrap_or_else(|| default_substrate(cpus))
    }

    /// What the check of a change has to know, beside the machine's facts.
    pub fn existing(&self, cpus: &BTreeSet<u32>, new_substrate: bool) -> Existing {
        let mut placements = pdp_alloc::Placements::new();
        for ((vnet, node), guests) in &self.ledger.placements {
            let shares = guests.values().map(|placement| pdp_alloc::Share {
                engine: placement.engine.clone(),
                millicores: placement.power_millicores,
            });
            placements.insert(pdp_spec::placement_key(vnet, node), shares.collect());
        }
        let substrate = match (&self.substrate, new_substrate) {
            (None, true) => None,
            _ => Some(self.effective_substrate(cpus)),
        };
        Existing {
            substrate,
            vnets: self.vnets.clone(),
            tenants: self.tenants.clone(),
            placements,
            cpus: cpus.clone(),
            ..Existing::default()
        }
    }

    /// The model once a checked change is made. New vnets get numbers that neither a vnet has nor, by
    /// `going`, anything that is left of one.
    pub fn with(
        &self,
        intent: Intent,
        places: &Places,
        cpus: &BTreeSet<u32>,
        going: impl Fn(&str) -> bool,
    ) -> Result<Self, PlanError> {
        let mut next = self.clone();
        next.ledger.stopped = false;
        if self.substrate.is_some() || intent.substrate != Some(default_substrate(cpus)) {
            next.substrate = intent.substrate;
        }
        next.vnets = intent.vnets;
        next.tenants = intent.tenants;
        next.free_numbers(going);
        for name in next.vnets.keys() {
            let number = next.ledger.number(VNETS, name, VNETS_MAX);
            number.ok_or_else(|| PlanError::NoNumber { vnet: name.clone(), max: VNETS_MAX })?;
        }
        next.place(&intent.placements);
        next.count_generations(self);
        next.replan(self, places, cpus)?;
        Ok(next)
    }

    /// Takes back the numbers of vnets that are gone: neither wanted nor, by `going`, partly there.
    /// Whether there were any.
    pub fn free_numbers(&mut self, going: impl Fn(&str) -> bool) -> bool {
        let count = |ledger: &Ledger| ledger.numbers.get(VNETS).map_or(0, BTreeMap::len);
        let (before, vnets) = (count(&self.ledger), &self.vnets);
        self.ledger.keep_only(VNETS, |name| vnets.contains_key(name) || going(name));
        count(&self.ledger) < before
    }

    /// The model without a vnet, whose number stays its own until [`Model::free_numbers`].
    pub fn without(
        &self,
        vnet: &str,
        places: &Places,
        cpus: &BTreeSet<u32>,
    ) -> Result<Self, PlanError> {
        let mut next = self.clone();
        next.vnets.remove(vnet);
        next.ledger.forget_vnet(vnet);
        next.generations.remove(&("VirtualNetwork".to_string(), vnet.to_string()));
        next.replan(self, places, cpus)?;
        Ok(next)
    }

    /// The model without a tenant, which has no vnets.
    pub fn without_tenant(&self, tenant: &str) -> Self {
        let mut next = self.clone();
        next.tenants.remove(tenant);
        next.generations.remove(&("Tenant".to_string(), tenant.to_string()));
        next
    }

    /// Makes the plan anew; of a vnet that is made from the same as `before` it stays the same one.
    pub fn replan(
        &mut self,
        before: &Self,
        places: &Places,
        cpus: &BTreeSet<u32>,
    ) -> Result<(), PlanError> {
        if self.substrate.is_none() && self.vnets.is_empty() {
            self.plan = Arc::default();
            return Ok(());
        }
        let substrate = self.effective_substrate(cpus);
        let specs = self.vnets.iter().map(|(name, vnet)| (name.as_str(), &vnet.spec));
        let kept = match before.effective_substrate(cpus).spec == substrate.spec {
            true => self.made_from_the_same(before),
            false => BTreeMap::new(),
        };
        self.plan = Arc::new(plan(places, &substrate.spec, specs, &self.ledger, kept)?);
        Ok(())
    }

    /// Plans of vnets that are made from the same as before, beside the substrate.
    fn made_from_the_same(&self, before: &Self) -> BTreeMap<String, Arc<VnetPlan>> {
        let same = |name: &String, vnet: &VirtualNetwork| {
            let (was, is) = (&before.ledger, &self.ledger);
            before.vnets.get(name).is_some_and(|before| before.spec == vnet.spec)
                && was.number_of(VNETS, name) == is.number_of(VNETS, name)
                && was.placements_of(name).eq(is.placements_of(name))
                && was.links_down_of(name).eq(is.links_down_of(name))
        };
        let vnets = self.vnets.iter().filter(|(name, vnet)| same(name, vnet));
        vnets
            .filter_map(|(name, _)| Some((name.clone(), before.plan.vnets.get(name)?.clone())))
            .collect()
    }

    /// What is to run now.
    pub fn wanted(&self) -> Arc<Plan> {
        if self.ledger.stopped { Arc::default() } else { self.plan.clone() }
    }

    /// Shares as guests: a guest keeps its number while it stays on its engine.
    fn place(&mut self, placements: &pdp_alloc::Placements) {
        let mut placed = BTreeMap::new();
        for (vnet, spec) in &self.vnets {
            for node in spec.spec.nodes.keys() {
                let Some(shares) = placements.get(&pdp_spec::placement_key(vnet, node)) else {
                    continue;
                };
                let key = (vnet.clone(), node.clone());
                let before = self.ledger.placements.get(&key);
                placed.insert(key, number_shares(before, shares));
            }
        }
        self.ledger.placements = placed;
        // Links that are gone can't be down.
        let vnets = &self.vnets;
        self.ledger.links_down.retain(|(vnet, link)| {
            vnets.get(vnet).is_some_and(|vnet| {
                vnet.spec.links.iter().any(|known| known.name.as_ref() == Some(link))
            })
        });
    }

    fn count_generations(&mut self, before: &Self) {
        for (name, vnet) in &self.vnets {
            if before.vnets.get(name) != Some(vnet) {
                let key = ("VirtualNetwork".to_string(), name.clone());
                *self.generations.entry(key).or_default() += 1;
            }
        }
        for (name, tenant) in &self.tenants {
            if before.tenants.get(name) != Some(tenant) {
                *self.generations.entry(("Tenant".to_string(), name.clone())).or_default() += 1;
            }
        }
        if let Some(substrate) = &self.substrate
            && before.substrate.as_ref() != Some(substrate)
        {
            let key = ("Substrate".to_string(), substrate.metadata.name.clone());
            *self.generations.entry(key).or_default() += 1;
        }
    }

    /// What is to be stored when `self` comes after `before`.
    pub fn change_from(&self, before: &Self) -> Change {
        let mut change = Change::default();
        let (old, new) = (before.objects(), self.objects());
        for (key, object) in &new {
            if old.get(key) != Some(object) {
                change.put.push(Document {
                    kind: key.0.clone(),
                    name: key.1.clone(),
                    generation: self.generations.get(key).copied().unwrap_or(1),
                    body: serde_json::to_string(object).unwrap_or_default(),
                });
            }
        }
        change.delete = old.into_keys().filter(|key| !new.contains_key(key)).collect();
        change
    }

    fn objects(&self) -> BTreeMap<(String, String), Object> {
        let substrate = self.substrate.iter().cloned().map(Object::Substrate);
        let vnets = self.vnets.values().cloned().map(Object::VirtualNetwork);
        let tenants = self.tenants.values().cloned().map(Object::Tenant);
        substrate
            .chain(vnets)
            .chain(tenants)
            .map(|object| ((object.kind().to_string(), object.name().to_string()), object))
            .collect()
    }

    /// What the step from `before` to `self` does, object by object; `named` are the vnets that
    /// are told of even where nothing changes, and `substrate` whether that is.
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
                (None, Some(_)) => (Action::Create, ""),
                (Some(_), None) => (Action::Delete, ""),
                _ if was == is => (Action::Unchanged, ""),
                _ if restart => (Action::Change, "the mux starts anew"),
                _ => (Action::Change, ""),
            };
            changes.push(changed(format!("substrate/{name}"), action, detail));
        }
        let tenants: BTreeSet<&String> = before.tenants.keys().chain(self.tenants.keys()).collect();
        for name in tenants {
            let (was, is) = (before.tenants.get(name), self.tenants.get(name));
            let action = match (was, is) {
                _ if was == is => continue,
                (None, _) => Action::Create,
                (_, None) => Action::Delete,
                _ => Action::Change,
            };
            changes.push(changed(format!("tenant/{name}"), action, ""));
        }
        let mut names: BTreeSet<&String> = named.iter().collect();
        names.extend(old.vnets.keys().chain(new.vnets.keys()));
        for name in names {
            let object = format!("vnet/{name}");
            match (old.vnets.get(name), new.vnets.get(name)) {
                (None, Some(vnet)) => {
                    let detail =
                        format!("{} nodes, {} links", vnet.nodes.len(), vnet.mux.vlinks.len());
                    changes.push(changed(object, Action::Create, &detail));
                }
                (Some(_), None) => changes.push(changed(object, Action::Delete, "")),
                (Some(was), Some(is)) => {
                    let inner = vnet_changes(&object, was, is);
                    if !inner.is_empty() {
                        changes.push(changed(object, Action::Change, ""));
                        changes.extend(inner);
                    } else if named.contains(name) {
                        changes.push(changed(object, Action::Unchanged, ""));
                    }
                }
                (None, None) => {}
            }
        }
        changes
    }
}

fn changed(object: String, action: Action, detail: &str) -> Changed {
    Changed { object, action, detail: detail.into() }
}

fn vnet_changes(object: &str, was: &VnetPlan, is: &VnetPlan) -> Vec<Changed> {
    let mut changes = Vec::new();
    let names: BTreeSet<&String> = was.nodes.keys().chain(is.nodes.keys()).collect();
    for name in names {
        let node = format!("{object}/node/{name}");
        match (was.nodes.get(name), is.nodes.get(name)) {
            (None, Some(_)) => changes.push(changed(node, Action::Create, "")),
            (Some(_), None) => changes.push(changed(node, Action::Delete, "")),
            (Some(was_node), Some(is_node)) => {
                let details = node_changes(was_node, is_node);
                let router = |vnet: &VnetPlan| {
                    vnet.mux.nodes.iter().find(|node| &node.name == name).cloned()
                };
                if was_node.hash != is_node.hash {
                    let mut all = vec!["configuration".to_string()];
                    all.extend(details);
                    changes.push(changed(node, Action::Restart, &all.join(", ")));
                } else if !details.is_empty() {
                    changes.push(changed(node, Action::Change, &details.join(", ")));
                } else if router(was) != router(is) {
                    changes.push(changed(node, Action::Change, "distribution or punt limits"));
                }
            }
            (None, None) => {}
        }
    }
    let old: BTreeMap<_, _> = was.mux.vlinks.iter().map(|link| (&link.name, link)).collect();
    let new: BTreeMap<_, _> = is.mux.vlinks.iter().map(|link| (&link.name, link)).collect();
    let names: BTreeSet<_> = old.keys().chain(new.keys()).copied().collect();
    for name in names {
        let link = format!("{object}/link/{name}");
        match (old.get(name), new.get(name)) {
            (None, Some(_)) => changes.push(changed(link, Action::Create, "")),
            (Some(_), None) => changes.push(changed(link, Action::Delete, "")),
            (Some(was), Some(is)) if was != is => {
                let detail = match (was.up, is.up) {
                    (true, false) => "down",
                    (false, true) => "up",
                    _ if was.rate_bps != is.rate_bps => "rate",
                    _ => "",
                };
                changes.push(changed(link, Action::Change, detail));
            }
            _ => {}
        }
    }
    if changes.is_empty() && was.mux.police != is.mux.police {
        changes.push(changed(object.to_string(), Action::Change, "police"));
    }
    changes
}

fn node_changes(was: &NodePlan, is: &NodePlan) -> Vec<String> {
    let mut details = Vec::new();
    if was.control.limits != is.control.limits {
        details.push("limits".to_string());
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
            (Some(was), Some(is)) if was != is => details.push(format!(
                "guest {number}: {} to {} millicores",
                was.placement.power_millicores, is.placement.power_millicores
            )),
            _ => {}
        }
    }
    details
}

fn number_shares(
    before: Option<&BTreeMap<u32, Placement>>,
    shares: &[pdp_alloc::Share],
) -> BTreeMap<u32, Placement> {
    let mut placed = BTreeMap::new();
    let mut new = Vec::new();
    for share in shares {
        let placement =
            Placement { engine: share.engine.clone(), power_millicores: share.millicores };
        let stays = before
            .into_iter()
            .flatten()
            .find(|(number, old)| old.engine == share.engine && !placed.contains_key(*number));
        match stays {
            Some((&number, _)) => drop(placed.insert(number, placement)),
            None => new.push(placement),
        }
    }
    // One that moves keeps its number, so that guests are either added or removed, never both.
    let moves: Vec<u32> = before.into_iter().flatten().map(|(number, _)| *number).collect();
    for placement in new {
        let mut numbers = moves.iter().copied().chain(0..);
        let number = numbers.find(|number| !placed.contains_key(number)).unwrap_or_default();
        placed.insert(number, placement);
    }
    placed
}

/// What holds while no substrate was applied: the mux on the first CPU, one engine on the others;
/// half and half where there is one CPU only. No external interfaces.
pub fn default_substrate(cpus: &BTreeSet<u32>) -> Substrate {
    let first: BTreeSet<u32> = cpus.iter().take(1).copied().collect();
    let rest: BTreeSet<u32> = cpus.iter().skip(1).copied().collect();
    let (power, engine_cpus, capacity) = match rest.len() as u32 {
        0 => (500, first.clone(), 500),
        count => (1000, rest, count * 1000),
    };
    Substrate {
        api_version: pdp_spec::ApiVersion::V1,
        metadata: pdp_spec::Metadata { name: "default".into(), ..Default::default() },
        spec: pdp_spec::SubstrateSpec {
            interfaces: BTreeMap::new(),
            mux: pdp_spec::Mux {
                cpus: pdp_spec::units::CpuSet(first),
                workers: 1,
                power: Some(pdp_spec::units::Cores(power)),
            },
            forwarding_engines: BTreeMap::from([(
                "fe1".to_string(),
                pdp_spec::ForwardingEngine {
                    cpus: pdp_spec::units::CpuSet(engine_cpus),
                    capacity: pdp_spec::units::Cores(capacity),
                },
            )]),
            management_host: None,
        },
        status: None,
    }
}
