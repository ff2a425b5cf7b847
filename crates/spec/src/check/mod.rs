//! Whether objects fit together, with each other and with what there is already.
//!
//! Parts: [`substrate`] and [`vnet`] look at one object, [`command`] at what its nodes run, [`image`] at what is on disk,
//! [`outside`] at what virtual networks share on external interfaces, [`management`] at what is beside networks, [`power`]
//! at forwarding engines, [`room`] at what else all share of
//! the machine, [`tenant`] at whose all that is.
//!
//! A virtual network that stays as it is was checked before: of it only sums ([`placed`]) and tunnel
//! keys are held against what changes, but for a new substrate or tenant, against which all is checked.

mod binds;
mod command;
mod family;
mod image;
mod interfaces;
mod label;
mod leaving;
mod management;
mod outside;
mod placed;
mod power;
mod remarks;
mod room;
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
use crate::remains::AllRemains;
use crate::tree::Path;
use placed::Sums;

pub use image::check_images;
pub use placed::{Placed, Shares, Vnets};
pub use remarks::remarks;
pub use tenant::tenant_of;
pub(crate) use vnet::{BAD_PATH, good_path};

/// What there is.
#[derive(Clone, Debug, Default)]
pub struct Existing {
    /// The substrate that was applied.
    pub substrate: Option<Substrate>,
    /// Virtual networks that were applied.
    pub vnets: Arc<Vnets>,
    /// Tenants that were applied, by name.
    pub tenants: Arc<BTreeMap<String, Tenant>>,
    /// The tenant that asks for the change: it may name its own virtual networks alone, and what
    /// it is told names nothing of others. `None`: an operator.
    pub asker: Option<String>,
    /// Network devices of the machine by name; `None`: not known, nothing is checked against them.
    pub devices: Option<BTreeMap<String, InterfaceFacts>>,
    /// CPUs of the machine; empty: not known.
    pub cpus: BTreeSet<u32>,
    /// What the daemon may open; `None`: not known.
    pub descriptors: Option<Descriptors>,
    /// Forwarding engines that guests can't run on at present.
    pub failed_engines: BTreeSet<String>,
    /// What may still be there of virtual networks beside what is wanted of them. It counts in quotas.
    pub remains: Arc<AllRemains>,
    /// Seconds since 1970, to say how long that has been so.
    pub now_s: u64,
    /// The machine's kernel has no IPv6, so that nodes have none.
    pub without_v6: bool,
    /// Nothing is known of a node: external interfaces and tenants that are not described are taken as
    /// there.
    pub unknown: bool,
}

/// Descriptors of the daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Descriptors {
    /// How many it may open (RLIMIT_NOFILE).
    pub limit: u64,
    /// How many of these are kept for other things than interfaces and processes.
    pub kept: u64,
}

/// What is known of a network device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InterfaceFacts {
    /// Largest IP packet, bytes.
    pub mtu: u32,
}

/// What is to be, all of it: what was applied before, with the change made.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Intent {
    /// The substrate.
    pub substrate: Option<Substrate>,
    /// All virtual networks. Those that are as before are the same ones, by their pointers.
    pub vnets: Arc<Vnets>,
    /// All tenants by name.
    pub tenants: Arc<BTreeMap<String, Tenant>>,
}

/// What is to be, while it is looked at.
struct Wanted<'a> {
    substrate: Option<Substrate>,
    tenants: Arc<BTreeMap<String, Tenant>>,
    /// Virtual networks that there are.
    before: &'a Vnets,
    /// Those that change or are new.
    changed: BTreeMap<String, VirtualNetwork>,
    remains: &'a AllRemains,
    now_s: u64,
}

impl<'a> Wanted<'a> {
    /// Virtual networks that stay as they are.
    fn kept(&self) -> impl Iterator<Item = (&'a String, &'a Arc<Placed>)> {
        self.before.iter().filter(|(name, _)| !self.changed.contains_key(*name))
    }
}

/// What is to be once `documents` are applied to what there is: objects of the same kind and name
/// are replaced, others stay. A document's status is ignored.
///
/// Defaults that need more than the object alone are filled in: link addresses, MTUs, names and
/// rates of links, data planes of routers. Checking what came out again gives the same.
///
/// # Errors
/// Everything that is wrong; nothing is changed then.
pub fn check(documents: &[Document], existing: &Existing) -> Result<Intent, Vec<Diagnostic>> {
    let (asker, unknown) = (existing.asker.as_deref(), existing.unknown);
    let mut reporter = Reporter { asker, unknown, ..Reporter::default() };
    let mut wanted = Wanted {
        substrate: existing.substrate.clone(),
        tenants: existing.tenants.clone(),
        before: &existing.vnets,
        changed: BTreeMap::new(),
        remains: &existing.remains,
        now_s: existing.now_s,
    };
    for document in documents {
        add(document, existing, &mut wanted, &mut reporter);
    }
    let new = wanted.changed.keys().filter(|name| !existing.vnets.contains_key(*name));
    let count = existing.vnets.len() + new.count();
    if count > VNETS_MAX {
        let all = format!("{count} virtual networks exceed {VNETS_MAX}");
        let message = reporter.of_all(all, "the node has no room for more virtual networks");
        reporter.general(message, "delete some first");
    }
    if let Some(substrate) = &wanted.substrate
        && reporter.substrate.is_some()
    {
        substrate::check(substrate, existing, &mut reporter);
    }
    for vnet in wanted.changed.values_mut() {
        vnet::check(vnet, &mut reporter);
    }
    volumes::sizes(&wanted, existing, &mut reporter);
    tenant::grants(&wanted, &mut reporter);
    if reporter.asker.is_some() && !reporter.diagnostics.is_empty() {
        // What is not the tenant's is not looked at any further: that would tell who has it.
        return Err(at_most(reporter.diagnostics));
    }
    outside::check(&mut wanted, existing, &mut reporter);
    family::check(&wanted, existing.without_v6, &mut reporter);
    management::ports(&wanted, &mut reporter);
    if reporter.diagnostics.is_empty() {
        // What is asked first: who asks for more than is his is told that, and not that it is not there.
        let tenants = wanted.changed.iter().filter(|(name, _)| tenant_of(name).is_some());
        let asked = tenants.map(|(name, vnet)| (&**name, Sums::of(vnet, &power::asked(vnet))));
        let asked: BTreeMap<&str, Sums> = asked.collect();
        let asked = asked.iter().map(|(name, sums)| (*name, sums)).collect();
        tenant::quotas(&wanted, &asked, &mut reporter);
    }
    if !reporter.diagnostics.is_empty() {
        return Err(at_most(reporter.diagnostics));
    }
    let shares = power::check(&wanted, existing, &mut reporter);
    let vnets = placed(&wanted, existing, shares);
    room::check(&wanted, &vnets, existing, &mut reporter);
    let given = wanted.changed.keys().filter_map(|name| Some((&**name, vnets.get(name)?.sums())));
    tenant::quotas(&wanted, &given.collect(), &mut reporter);
    let Wanted { substrate, tenants, .. } = wanted;
    let diagnostics = reporter.diagnostics;
    if diagnostics.is_empty() {
        Ok(Intent { substrate, vnets, tenants })
    } else {
        Err(at_most(diagnostics))
    }
}

/// All virtual networks, once these have new shares.
fn placed(
    wanted: &Wanted<'_>,
    existing: &Existing,
    shares: BTreeMap<String, Shares>,
) -> Arc<Vnets> {
    let mut vnets = existing.vnets.clone();
    for (name, shares) in shares {
        let before = existing.vnets.get(&name);
        let changed = wanted.changed.get(&name).or(before.map(|before| &***before));
        let Some(vnet) = changed else { continue };
        if before.is_none_or(|before| *vnet != ***before || shares != *before.shares()) {
            Arc::make_mut(&mut vnets).insert(name, Arc::new(Placed::new(vnet.clone(), shares)));
        }
    }
    vnets
}

/// Puts a document's object where it belongs; a second one of a name, or of the substrate, is a
/// fault.
fn add<'a>(
    document: &'a Document,
    existing: &Existing,
    wanted: &mut Wanted<'_>,
    reporter: &mut Reporter<'a>,
) {
    let name = document.object.name();
    let metadata = Path::of(&["metadata", "name"]);
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
                let message = format!("there is a substrate already: {}", first.object.name());
                fault(message, "a node has one; remove or merge one of them");
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
            wanted.substrate = Some(substrate);
        }
        Object::VirtualNetwork(vnet) => {
            if reporter.vnets.contains_key(name) {
                fault(format!("virtual network {name} is defined twice"), "rename or remove one");
                return;
            }
            reporter.vnets.insert(name, document);
            let vnet = VirtualNetwork { status: None, ..vnet.clone() };
            wanted.changed.insert(name.to_owned(), vnet);
        }
        Object::Tenant(tenant) => {
            if reporter.tenants.contains_key(name) {
                fault(format!("tenant {name} is defined twice"), "rename or remove one");
                return;
            }
            reporter.tenants.insert(name, document);
            let tenant = Tenant { status: None, ..tenant.clone() };
            if existing.tenants.get(name) != Some(&tenant) {
                Arc::make_mut(&mut wanted.tenants).insert(name.to_owned(), tenant);
            }
        }
    }
}

/// Collects diagnostics, each with the place of what it is about where that is in a document.
#[derive(Default)]
struct Reporter<'a> {
    substrate: Option<&'a Document>,
    vnets: BTreeMap<&'a str, &'a Document>,
    tenants: BTreeMap<&'a str, &'a Document>,
    /// See [`Existing::asker`].
    asker: Option<&'a str>,
    /// See [`Existing::unknown`].
    unknown: bool,
    diagnostics: Vec<Diagnostic>,
}

impl Reporter<'_> {
    /// About the substrate.
    fn substrate(&mut self, path: &[&str], message: impl Into<String>, hint: impl Into<String>) {
        if let Some(document) = self.substrate {
            self.diagnostics.push(document.at(&Path::of(path), message, hint));
        }
    }

    /// About a virtual network; where it is in no document, the substrate's change is at fault.
    fn vnet(
        &mut self,
        vnet: &str,
        path: &[&str],
        message: impl Into<String>,
        hint: impl Into<String>,
    ) {
        if !self.sees(vnet) {
            // Not of the asker's making, nor to be known by it.
            return;
        }
        let path = Path::of(path);
        let diagnostic = match (self.vnets.get(vnet), self.substrate) {
            (Some(document), _) => document.at(&path, message, hint),
            (None, Some(document)) => Diagnostic {
                object: label("VirtualNetwork", vnet, &path),
                ..document.at(&Path::of(&["spec"]), message, hint)
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

    /// About a tenant.
    fn tenant(
        &mut self,
        tenant: &str,
        path: &[&str],
        message: impl Into<String>,
        hint: impl Into<String>,
    ) {
        if let Some(document) = self.tenants.get(tenant) {
            self.diagnostics.push(document.at(&Path::of(path), message, hint));
        }
    }

    /// Whether who asks may know of a virtual network.
    fn sees(&self, vnet: &str) -> bool {
        self.asker.is_none_or(|asker| tenant_of(vnet) == Some(asker))
    }

    /// What is told an operator, or a tenant, where the first says something of all.
    fn of_all(&self, operator: String, tenant: &str) -> String {
        if self.asker.is_none() { operator } else { tenant.to_owned() }
    }

    /// About no object in particular.
    fn general(&mut self, message: impl Into<String>, hint: impl Into<String>) {
        let (message, hint) = (message.into(), hint.into());
        self.diagnostics.push(Diagnostic { message, hint, ..Default::default() });
    }

    /// About more of something than its bound.
    fn too_many(&mut self, vnet: &str, path: &[&str], what: &str, count: usize, max: usize) {
        if count > max {
            self.vnet(vnet, path, format!("{count} {what} exceed {max}"), "remove some");
        }
    }
}

/// What to write instead of an object's name that is no DNS label.
fn name_hint(name: &str) -> String {
    const RULE: &str =
        "use lower-case letters, digits and -, with a letter or digit first and last";
    match name.contains('.') {
        true => RULE.to_owned(),
        false => instead(name, &name.to_lowercase(), RULE),
    }
}

/// The same of a name inside of a virtual network, which may have capital letters.
fn inner_name_hint(name: &str) -> String {
    instead(name, name, "use letters, digits and -, with a letter or digit first and last")
}

/// A DNS label like a name, with `-` for each other character of `letters`, before the rule; the rule alone where that
/// makes none.
fn instead(name: &str, letters: &str, rule: &str) -> String {
    let good = |c: char| if c.is_ascii_alphanumeric() { c } else { '-' };
    let like: String = letters.chars().map(good).collect();
    let like = like.trim_matches('-');
    match like != name && bad_inner_name(like).is_none() {
        true => format!("write {like}: {rule}"),
        false => rule.to_owned(),
    }
}

/// Why a name is neither a DNS label nor two with a dot between, `TENANT.NAME`.
fn bad_vnet_name(name: &str) -> Option<String> {
    let Some((tenant, own)) = name.split_once('.') else { return bad_name(name) };
    let chars = name.chars().count();
    if chars > NAME_CHARS_MAX {
        return Some(format!("has {chars} characters, {NAME_CHARS_MAX} at most"));
    }
    let bad = bad_name(tenant).or_else(|| bad_name(own));
    bad.map(|_| "is not a TENANT.NAME of two DNS labels".to_owned())
}

/// Why a name inside of a virtual network, which may have capital letters, is no DNS label.
fn bad_inner_name(name: &str) -> Option<String> {
    bad_name(&name.to_ascii_lowercase())
}

/// Why a name is no DNS label in lower case.
fn bad_name(name: &str) -> Option<String> {
    let chars = name.chars().count();
    if chars > NAME_CHARS_MAX {
        return Some(format!("has {chars} characters, {NAME_CHARS_MAX} at most"));
    }
    let good = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    let ends = name.starts_with('-') || name.ends_with('-');
    (name.is_empty() || ends || !name.chars().all(good)).then(|| "is not a DNS label".to_owned())
}
