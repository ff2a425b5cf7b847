//! Checks objects against each other and against the existing state.
//!
//! Parts: [`substrate`] and [`vnet`] check single objects, [`command`] a node's
//! commands, [`image`] files on disk. [`outside`] checks virtual networks' use of
//! external interfaces, [`management`] their access to the machine's network, [`power`]
//! forwarding engines, [`capacity`] other shared resources, and [`tenant`] ownership.
//!
//! Unchanged virtual networks were checked before. Only their sums ([`placed`]) and
//! tunnel keys are compared with changes. A new substrate or tenant causes a full check.

mod binds;
mod capacity;
mod command;
mod external_use;
mod family;
mod image;
mod impairments;
mod interfaces;
mod label;
mod management;
mod outside;
mod placed;
mod power;
mod published;
mod remarks;
mod routes;
mod substrate;
mod sysctls;
mod tenant;
mod vnet;
mod volumes;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::diagnostic::Diagnostic;
use crate::limits::{NAME_CHARS_MAX, VNETS_MAX};
use crate::object::{Object, Substrate, SubstrateSpec, Tenant, VirtualNetwork};
use crate::parse::{Document, at_most, label};
use crate::remains::RemainsByVnet;
use crate::tree::JsonPointer;
use placed::VnetTotals;

pub use image::check_images;
pub use placed::{PlacedVnet, PowerShares, Vnets};
pub use remarks::remarks;
pub use tenant::tenant_of;

/// The existing state.
#[derive(Clone, Debug, Default)]
pub struct Existing {
    /// The applied substrate.
    pub substrate: Option<Substrate>,
    /// The applied virtual networks.
    pub vnets: Arc<Vnets>,
    /// The applied tenants, by name.
    pub tenants: Arc<BTreeMap<String, Tenant>>,
    /// Tenant that requests the change. It may only name its own virtual
    /// networks, and errors reveal nothing about others. `None`: an operator.
    pub requester: Option<String>,
    /// Network devices of the machine by name. `None`: unknown, not checked.
    pub devices: Option<BTreeMap<String, InterfaceFacts>>,
    /// CPUs of the machine; empty: unknown.
    pub cpus: BTreeSet<u32>,
    /// File descriptor limits of the daemon; `None`: unknown.
    pub descriptors: Option<Descriptors>,
    /// Forwarding engines that currently can't run guests.
    pub failed_engines: BTreeSet<String>,
    /// Resources that may still exist beyond virtual networks' desired state. They count in quotas.
    pub remains: Arc<RemainsByVnet>,
    /// Current time, seconds since 1970, for messages about how long they have existed.
    pub now_s: u64,
    /// True if the machine's kernel has no IPv6, so that nodes have none.
    pub without_v6: bool,
    /// True if no PdP node is known: undefined external
    /// interfaces and tenants are assumed to exist.
    pub unknown: bool,
}

/// File descriptors of the daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Descriptors {
    /// Limit on open descriptors (RLIMIT_NOFILE).
    pub limit: u64,
    /// Descriptors reserved for other purposes than interfaces and processes.
    pub unchanged_vnets: u64,
}

/// Facts about a network device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InterfaceFacts {
    /// Largest IP packet, bytes.
    pub mtu: u32,
}

/// The complete desired state: the previous one with the change applied.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Intent {
    /// The substrate.
    pub substrate: Option<Substrate>,
    /// All virtual networks. Unchanged ones keep their pointers.
    pub vnets: Arc<Vnets>,
    /// All tenants by name.
    pub tenants: Arc<BTreeMap<String, Tenant>>,
}

/// Desired state during the checks.
struct DesiredState<'a> {
    substrate: Option<Substrate>,
    tenants: Arc<BTreeMap<String, Tenant>>,
    /// Existing virtual networks.
    before: &'a Vnets,
    /// Changed and new virtual networks.
    changed: BTreeMap<String, VirtualNetwork>,
    remains: &'a RemainsByVnet,
    now_s: u64,
}

impl<'a> DesiredState<'a> {
    /// Returns the unchanged virtual networks.
    fn reserved(&self) -> impl Iterator<Item = (&'a String, &'a Arc<PlacedVnet>)> {
        self.before.iter().filter(|(name, _)| !self.changed.contains_key(*name))
    }
}

/// Applies `documents` to the existing state and returns the desired state. Objects of
/// the same kind and name are replaced, others stay. A document's status is ignored.
///
/// Fills in defaults that depend on more than the object alone: MAC addresses, MTUs, names
/// and rates of links, data planes of routers. Another check of the result returns the same.
///
/// # Errors
/// All errors; nothing is changed then.
pub fn check(documents: &[Document], existing: &Existing) -> Result<Intent, Vec<Diagnostic>> {
    let (asker, unknown) = (existing.requester.as_deref(), existing.unknown);
    let mut reporter = Reporter { asker, unknown, ..Reporter::default() };
    let mut desired = DesiredState {
        substrate: existing.substrate.clone(),
        tenants: existing.tenants.clone(),
        before: &existing.vnets,
        changed: BTreeMap::new(),
        remains: &existing.remains,
        now_s: existing.now_s,
    };
    for document in documents {
        add(document, existing, &mut desired, &mut reporter);
    }
    let new = desired.changed.keys().filter(|name| !existing.vnets.contains_key(*name));
    let count = existing.vnets.len() + new.count();
    if count > VNETS_MAX {
        let all = format!("{count} virtual networks exceed {VNETS_MAX}");
        let message = reporter.of_all(all, "the machine can't take more virtual networks");
        reporter.general(message, "delete some first");
    }
    if let Some(substrate) = &desired.substrate
        && reporter.substrate.is_some()
    {
        substrate::check(substrate, existing, &mut reporter);
    }
    for vnet in desired.changed.values_mut() {
        vnet::check(vnet, &mut reporter);
    }
    volumes::sizes(&desired, existing, &mut reporter);
    tenant::grants(&desired, &mut reporter);
    if reporter.asker.is_some() && !reporter.diagnostics.is_empty() {
        // Objects of others are not checked further: errors would reveal their owners.
        return Err(at_most(reporter.diagnostics));
    }
    outside::check(&mut desired, existing, &mut reporter);
    family::check(&desired, existing.without_v6, &mut reporter);
    management::ports(&desired, &mut reporter);
    if reporter.diagnostics.is_empty() {
        // Quotas are checked first: a tenant that requests more than
        // its quota learns that, not whether the machine has it.
        let tenants = desired.changed.iter().filter(|(name, _)| tenant_of(name).is_some());
        let asked =
            tenants.map(|(name, vnet)| (&**name, VnetTotals::of(vnet, &power::asked(vnet))));
        let asked: BTreeMap<&str, VnetTotals> = asked.collect();
        let asked = asked.iter().map(|(name, sums)| (*name, sums)).collect();
        tenant::quotas(&desired, &asked, &mut reporter);
    }
    if !reporter.diagnostics.is_empty() {
        return Err(at_most(reporter.diagnostics));
    }
    let shares = power::check(&desired, existing, &mut reporter);
    let vnets = placed(&desired, existing, shares);
    capacity::check(&desired, &vnets, existing, &mut reporter);
    let given = desired.changed.keys().filter_map(|name| Some((&**name, vnets.get(name)?.sums())));
    tenant::quotas(&desired, &given.collect(), &mut reporter);
    let DesiredState { substrate, tenants, .. } = desired;
    let diagnostics = reporter.diagnostics;
    if diagnostics.is_empty() {
        Ok(Intent { substrate, vnets, tenants })
    } else {
        Err(at_most(diagnostics))
    }
}

/// Returns all virtual networks, with new shares for these.
fn placed(
    desired: &DesiredState<'_>,
    existing: &Existing,
    shares: BTreeMap<String, PowerShares>,
) -> Arc<Vnets> {
    let mut vnets = existing.vnets.clone();
    for (name, shares) in shares {
        let before = existing.vnets.get(&name);
        let changed = desired.changed.get(&name).or(before.map(|before| &***before));
        let Some(vnet) = changed else { continue };
        if before.is_none_or(|before| *vnet != ***before || shares != *before.shares()) {
            Arc::make_mut(&mut vnets).insert(name, Arc::new(PlacedVnet::new(vnet.clone(), shares)));
        }
    }
    vnets
}

/// Inserts a document's object. A second one of the same name, or a second substrate, is an error.
fn add<'a>(
    document: &'a Document,
    existing: &Existing,
    desired: &mut DesiredState<'_>,
    reporter: &mut Reporter<'a>,
) {
    let name = document.object.name();
    let metadata = JsonPointer::of(&["metadata", "name"]);
    let mut fault = |message: String, hint: &str| {
        reporter.diagnostics.push(document.at(&metadata, message, hint));
    };
    let bad = match &document.object {
        Object::VirtualNetwork(_) => bad_vnet_name(name),
        _ => bad_name(name),
    };
    if let Some(why) = bad {
        fault(format!("name {name:?} {why}"), &name_hint(name));
    }
    if let Some((message, hint)) = tenant::may_name(document, existing) {
        fault(message, &hint);
        return;
    }
    match &document.object {
        Object::Substrate(substrate) => {
            let before = existing.substrate.as_ref().map(|before| &before.metadata.name);
            if let Some(first) = reporter.substrate {
                let message = format!(
                    "the spec has a second substrate; the first is {}",
                    first.object.name()
                );
                fault(message, "a machine has one; remove or merge one");
                return;
            }
            if let Some(before) = before.filter(|before| *before != name) {
                let hint = "give it the same name to change it";
                fault(format!("the node's substrate is {before}, not {name}"), hint);
            }
            reporter.substrate = Some(document);
            let mut substrate = Substrate { status: None, ..substrate.clone() };
            if substrate.spec.is_of_machine() {
                let own = Substrate::of_machine(&existing.cpus).spec;
                let (mux, forwarding_engines) = (own.mux, own.forwarding_engines);
                substrate.spec = SubstrateSpec { mux, forwarding_engines, ..substrate.spec };
            }
            desired.substrate = Some(substrate);
        }
        Object::VirtualNetwork(vnet) => {
            if reporter.vnets.contains_key(name) {
                fault(format!("virtual network {name} is defined twice"), "rename or remove one");
                return;
            }
            reporter.vnets.insert(name, document);
            let vnet = VirtualNetwork { status: None, ..vnet.clone() };
            desired.changed.insert(name.to_owned(), vnet);
        }
        Object::Tenant(tenant) => {
            if reporter.tenants.contains_key(name) {
                fault(format!("tenant {name} is defined twice"), "rename or remove one");
                return;
            }
            reporter.tenants.insert(name, document);
            let tenant = Tenant { status: None, ..tenant.clone() };
            if existing.tenants.get(name) != Some(&tenant) {
                Arc::make_mut(&mut desired.tenants).insert(name.to_owned(), tenant);
            }
        }
    }
}

/// Collects diagnostics, each with its position if it is in a document.
#[derive(Default)]
struct Reporter<'a> {
    substrate: Option<&'a Document>,
    vnets: BTreeMap<&'a str, &'a Document>,
    tenants: BTreeMap<&'a str, &'a Document>,
    /// See [`Existing::requester`].
    asker: Option<&'a str>,
    /// See [`Existing::unknown`].
    unknown: bool,
    diagnostics: Vec<Diagnostic>,
}

impl Reporter<'_> {
    /// Reports an error of the substrate.
    fn substrate(&mut self, path: &[&str], message: impl Into<String>, hint: impl Into<String>) {
        if let Some(document) = self.substrate {
            self.diagnostics.push(document.at(&JsonPointer::of(path), message, hint));
        }
    }

    /// Reports an error of a virtual network. If it is in no
    /// document, the error belongs to the substrate's change.
    fn vnet(
        &mut self,
        vnet: &str,
        path: &[&str],
        message: impl Into<String>,
        hint: impl Into<String>,
    ) {
        if !self.sees(vnet) {
            // Not caused by the client, and not visible to it.
            return;
        }
        let path = JsonPointer::of(path);
        let diagnostic = match (self.vnets.get(vnet), self.substrate) {
            (Some(document), _) => document.at(&path, message, hint),
            (None, Some(document)) => Diagnostic {
                object: label("VirtualNetwork", vnet, &path),
                ..document.at(&JsonPointer::of(&["spec"]), message, hint)
            },
            (None, None) => Diagnostic {
                object: label("VirtualNetwork", vnet, &path),
                message: message.into(),
                hint: hint.into(),
                ..Default::default()
            },
        };
        self.diagnostics.push(diagnostic);
    }

    /// Reports an error of a tenant.
    fn tenant(
        &mut self,
        tenant: &str,
        path: &[&str],
        message: impl Into<String>,
        hint: impl Into<String>,
    ) {
        if let Some(document) = self.tenants.get(tenant) {
            self.diagnostics.push(document.at(&JsonPointer::of(path), message, hint));
        }
    }

    /// True if the client may know of a virtual network.
    fn sees(&self, vnet: &str) -> bool {
        self.asker.is_none_or(|asker| tenant_of(vnet) == Some(asker))
    }

    /// Returns the operator's message, which mentions all networks, or the tenant's.
    fn of_all(&self, operator: String, tenant: &str) -> String {
        if self.asker.is_none() { operator } else { tenant.to_owned() }
    }

    /// Reports an error of no particular object.
    fn general(&mut self, message: impl Into<String>, hint: impl Into<String>) {
        let (message, hint) = (message.into(), hint.into());
        self.diagnostics.push(Diagnostic { message, hint, ..Default::default() });
    }

    /// Reports that a limit is exceeded.
    fn too_many(&mut self, vnet: &str, path: &[&str], what: &str, count: usize, max: usize) {
        if count > max {
            self.vnet(vnet, path, format!("{count} {what} exceed {max}"), "remove some");
        }
    }
}

/// Suggests a replacement for an object's name that is no DNS label.
fn name_hint(name: &str) -> String {
    const RULE: &str =
        "use lower-case letters, digits and -, with a letter or digit first and last";
    match name.contains('.') {
        true => RULE.to_owned(),
        false => instead(name, &name.to_lowercase(), RULE),
    }
}

/// Like [`name_hint`], for a name inside a virtual network, which may have capital letters.
fn inner_name_hint(name: &str) -> String {
    instead(name, name, "use letters, digits and -, with a letter or digit first and last")
}

/// Returns a DNS label made from a name, with `-` for each character of
/// `letters`, followed by the rule. If that gives no label, only the rule.
fn instead(name: &str, letters: &str, rule: &str) -> String {
    let good = |c: char| if c.is_ascii_alphanumeric() { c } else { '-' };
    let like: String = letters.chars().map(good).collect();
    let like = like.trim_matches('-');
    match like != name && bad_inner_name(like).is_none() {
        true => format!("write {like}: {rule}"),
        false => rule.to_owned(),
    }
}

/// Returns why a name is neither a DNS label nor two of them with a dot between, `TENANT.NAME`.
fn bad_vnet_name(name: &str) -> Option<String> {
    let Some((tenant, own)) = name.split_once('.') else { return bad_name(name) };
    let chars = name.chars().count();
    if chars > NAME_CHARS_MAX {
        return Some(format!("has {chars} characters, {NAME_CHARS_MAX} at most"));
    }
    let bad = bad_name(tenant).or_else(|| bad_name(own));
    bad.map(|_| "is not a TENANT.NAME of two DNS labels".to_owned())
}

/// Returns why a name inside a virtual network, which may have capital letters, is no DNS label.
fn bad_inner_name(name: &str) -> Option<String> {
    bad_name(&name.to_ascii_lowercase())
}

/// Returns why a name is no lower-case DNS label.
fn bad_name(name: &str) -> Option<String> {
    let chars = name.chars().count();
    if chars > NAME_CHARS_MAX {
        return Some(format!("has {chars} characters, {NAME_CHARS_MAX} at most"));
    }
    let good = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    let ends = name.starts_with('-') || name.ends_with('-');
    (name.is_empty() || ends || !name.chars().all(good)).then(|| "is not a DNS label".to_owned())
}
