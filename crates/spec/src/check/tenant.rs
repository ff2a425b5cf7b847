//! Checks of tenants: that no two may use the same, that their virtual networks use what is
//! theirs and no more than their quotas.
//!
//! What a tenant is told when it asks ([`Existing::asker`]) names nothing of others.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

use pdp_wire::tunnel::{KINDS, Kind};
use pdp_wire::udp;

use super::placed::Sums;
use super::vnet::{BAD_PATH, good_path};
use super::{Existing, Reporter, Wanted, bad_name, management, name_hint};
use crate::bind::{self, BindParts};
use crate::limits::*;
use crate::object::{Image, ImageSource, Object, Quota, TenantSpec, VirtualNetwork};
use crate::parse::Document;
use crate::registry::{self, ImageName};
use crate::remains::{Part, Parts};
use crate::tunnel::{External, Grant};
use crate::units::{BitRate, Bytes, Cores};
use crate::usage::Usage;

/// The tenant whose a virtual network of this name is; `None`: the operators'.
pub fn tenant_of(vnet: &str) -> Option<&str> {
    vnet.split_once('.').map(|(tenant, _)| tenant)
}

/// Whether who asks may name a document's object, as a fault where not.
pub(super) fn may_name(document: &Document, existing: &Existing) -> Option<(String, String)> {
    let asker = existing.asker.as_deref()?;
    let name = document.object.name();
    match &document.object {
        Object::VirtualNetwork(_) if tenant_of(name) == Some(asker) => None,
        Object::VirtualNetwork(_) => Some((
            format!("name {name:?} is not a name of yours"),
            format!("your networks are called {asker}.NAME"),
        )),
        other => {
            let message = format!("a {} is the operators' to apply", other.kind());
            Some((message, "remove it, or ask an operator".into()))
        }
    }
}

/// Checks grants of tenants against each other, and what virtual networks use against them.
pub(super) fn grants(wanted: &Wanted<'_>, reporter: &mut Reporter) {
    if wanted.tenants.len() > TENANTS_MAX {
        let message = format!("{} tenants exceed {TENANTS_MAX}", wanted.tenants.len());
        reporter.general(message, "delete some first");
    }
    let told: Vec<String> = reporter.tenants.keys().map(|name| (*name).to_owned()).collect();
    for name in &told {
        one(wanted, name, reporter);
        for other in wanted.tenants.keys().filter(|other| *other != name) {
            // Of two in one change, the later by name is at fault.
            if !told.contains(other) || other < name {
                against(wanted, name, other, reporter);
            }
        }
    }
    // What stays is as before but for tenants that change.
    let kept = (!told.is_empty()).then(|| wanted.kept()).into_iter().flatten();
    let kept = kept.map(|(name, vnet)| (name, &***vnet)).filter(|(name, _)| {
        tenant_of(name).is_none_or(|tenant| told.iter().any(|told| told == tenant))
    });
    for (name, vnet) in kept.chain(&wanted.changed) {
        match tenant_of(name) {
            Some(tenant) => uses(wanted, name, tenant, vnet, reporter),
            None => operators(wanted, name, vnet, reporter),
        }
    }
}

/// A tenant by itself.
fn one(wanted: &Wanted<'_>, name: &str, reporter: &mut Reporter) {
    let spec = &wanted.tenants[name].spec;
    let counts = [
        ("unixUsers", spec.unix_users.len()),
        ("images", spec.images.len()),
        ("binds", spec.binds.len()),
        ("registries", spec.registries.len()),
    ];
    for (key, count) in counts {
        if count > TENANT_ENTRIES_MAX {
            let message = format!("{count} {key} exceed {TENANT_ENTRIES_MAX}");
            reporter.tenant(name, &["spec", key], message, "remove some");
        }
    }
    for user in &spec.unix_users {
        if user.is_empty() || user == "root" || user.parse() == Ok(0u32) {
            let message = format!("unix user {user:?} can't be a tenant");
            reporter.tenant(name, &["spec", "unixUsers"], message, "root is an operator always");
        }
    }
    for directory in &spec.images {
        if !directory.starts_with('/') || directory.split('/').any(|part| part == "..") {
            let message = format!("images {directory:?} is not an absolute path without ..");
            reporter.tenant(name, &["spec", "images"], message, "write it like /srv/images");
        }
    }
    for directory in &spec.binds {
        if !good_path(bind::grant(directory).0) {
            let message = format!("binds {directory:?} is {BAD_PATH}");
            reporter.tenant(
                name,
                &["spec", "binds"],
                message,
                "write it like /srv/acme or /srv/acme:rw",
            );
        }
    }
    if let Some(grant) = &spec.management {
        management::grant(name, grant, reporter);
    }
    for prefix in &spec.registries {
        if let Err(why) = registry::check_prefix(prefix) {
            let message = format!("registries {prefix:?} {why}");
            let hint = "write it like registry.example or docker.io/frrouting";
            reporter.tenant(name, &["spec", "registries"], message, hint);
        }
    }
    for (interface, grant) in &spec.interfaces {
        let path = |key| ["spec", "interfaces", interface, key];
        if let Some(why) = bad_name(&interface.to_lowercase()) {
            let message = format!("name {interface:?} {why}");
            reporter.tenant(name, &path("")[..3], message, name_hint(interface));
        }
        for (kind, keys) in grant.keys() {
            let (min, max) = (kind.keys.start(), kind.keys.end());
            let ranges = keys.into_iter().flat_map(|keys| &keys.0);
            for (first, last) in ranges.filter(|range| range.0 < *min || range.1 > *max) {
                let message = format!("{} {first}-{last} is not within {min} to {max}", kind.name);
                reporter.tenant(name, &path(kind.name), message, "lower it");
            }
        }
        let ports = KINDS.iter().filter_map(|kind| Some((kind.name, kind.port?)));
        for (kind, port) in ports.filter(|(_, port)| grant.has(&udp::KIND, (*port).into())) {
            let message = format!("udp has port {port}, which is {kind}'s");
            reporter.tenant(name, &path("udp"), message, "leave it out");
        }
    }
}

/// What two tenants both may use, as a fault of `name`.
fn against(wanted: &Wanted<'_>, name: &str, other: &str, reporter: &mut Reporter) {
    let (mine, theirs) = (&wanted.tenants[name].spec, &wanted.tenants[other].spec);
    if let Some(user) = mine.unix_users.iter().find(|user| theirs.unix_users.contains(user)) {
        let message = format!("unix user {user:?} is of tenant {other}");
        reporter.tenant(name, &["spec", "unixUsers"], message, "a user is of one tenant");
    }
    let (own, others) = (mine.management.as_ref(), theirs.management.as_ref());
    management::against(name, own, other, others, reporter);
    for (interface, grant) in &mine.interfaces {
        let Some(given) = theirs.interfaces.get(interface) else { continue };
        for ((kind, mine), (_, theirs)) in grant.keys().into_iter().zip(given.keys()) {
            let key = kind.name;
            if let Some(common) = mine.zip(theirs).and_then(|(mine, theirs)| mine.common(theirs)) {
                let message =
                    format!("{key} {common} on interface {interface} is tenant {other}'s");
                let hint = "give tenants ranges that do not meet";
                reporter.tenant(name, &["spec", "interfaces", interface, key], message, hint);
            }
        }
        if grant.whole && given.whole {
            let message = format!("the whole interface {interface} is tenant {other}'s");
            let path = ["spec", "interfaces", interface, "whole"];
            reporter.tenant(name, &path, message, "only one can have it");
        }
    }
}

/// Whether an external is what a grant allows.
fn allowed(grant: &Grant, external: &External) -> bool {
    let by = external.encapsulation();
    let Some(tunnel) = by.tunnel() else { return grant.whole };
    let kind = tunnel.kind();
    let from_there = |(local, _)| grant.locals.is_empty() || grant.locals.contains(&local);
    tunnel.number().is_some_and(|key| grant.has(kind, key))
        && (kind.port.is_none() || tunnel.takes().udp_port() == kind.port)
        && tunnel.ends().is_none_or(from_there)
}

/// What people call what a grant allows.
fn grant_words(grant: &Grant) -> String {
    let mut words = Vec::new();
    for (kind, keys) in grant.keys() {
        let port = kind.port.map_or(String::new(), |port| format!(" on port {port}"));
        words.extend(keys.map(|keys| format!("{} {} {keys}{port}", kind.name, kind.key)));
    }
    words.extend(grant.whole.then(|| "the whole interface".to_owned()));
    if words.is_empty() {
        return "nothing".into();
    }
    let locals: Vec<String> = grant.locals.iter().map(ToString::to_string).collect();
    let from = match locals.is_empty() {
        true => String::new(),
        false => format!(", from local {}", locals.join(" or ")),
    };
    words.join(", ") + &from
}

/// What a tenant's virtual network uses that is not the tenant's.
fn uses(
    wanted: &Wanted<'_>,
    name: &str,
    tenant: &str,
    vnet: &VirtualNetwork,
    reporter: &mut Reporter,
) {
    let Some(spec) = wanted.tenants.get(tenant).map(|tenant| &tenant.spec) else {
        if reporter.unknown {
            return;
        }
        let message = format!("there is no tenant {tenant}");
        let hint = "apply its Tenant first, or use a name without a dot";
        reporter.vnet(name, &["metadata", "name"], message, hint);
        return;
    };
    for (external_name, external) in &vnet.spec.externals {
        let interface = &external.interface;
        let path = ["spec", "externals", external_name];
        match spec.interfaces.get(interface) {
            None => {
                let names: Vec<&str> = spec.interfaces.keys().map(String::as_str).collect();
                let hint = match names.is_empty() {
                    true => "the tenant has none; ask an operator".to_owned(),
                    false => format!("there are {}", names.join(", ")),
                };
                let message = format!("interface {interface} is not tenant {tenant}'s");
                let path = [&path[..], &["interface"]].concat();
                reporter.vnet(name, &path, message, hint);
            }
            Some(grant) if !allowed(grant, external) => {
                let message = format!("this use of interface {interface} is not tenant {tenant}'s");
                let hint = format!("it has {}", grant_words(grant));
                reporter.vnet(name, &path, message, hint);
            }
            Some(_) => {}
        }
    }
    management::uses(name, tenant, vnet, spec.management.as_ref(), reporter);
    for (node_name, node) in &vnet.spec.nodes {
        let path = ["spec", "nodes", node_name];
        if node.privileged {
            let message = "tenants may not have privileged nodes".to_owned();
            let path = [&path[..], &["privileged"]].concat();
            reporter.vnet(name, &path, message, "remove it, or ask an operator");
        }
        for (index, bind) in node.binds.iter().enumerate() {
            let Some(parts) = bind.parts() else { continue };
            if let Some((message, hint)) = bind_refused(&parts, &spec.binds) {
                let index = index.to_string();
                let path = [&path[..], &["binds", &index]].concat();
                reporter.vnet(name, &path, message, hint);
            }
        }
        for image in node.images() {
            if let Some((message, hint)) = image_refused(image, spec) {
                reporter.vnet(name, &path, message, hint);
            }
        }
    }
}

/// Why a tenant may not use an image, and what it may.
fn image_refused(image: &Image, spec: &TenantSpec) -> Option<(String, String)> {
    let path = match image.source() {
        ImageSource::Host => return None,
        ImageSource::Rootfs(path)
        | ImageSource::OciLayout(path, _)
        | ImageSource::Archive(path, ..) => std::path::Path::new(path),
        ImageSource::Pull(name, _) => {
            return match ImageName::parse(name) {
                Ok(name) => registry::refused(&name, &spec.registries),
                // Told with the node.
                Err(_) => None,
            };
        }
    };
    // `..` in it is refused of everybody's.
    if spec.images.iter().any(|directory| path.starts_with(directory)) {
        return None;
    }
    let hint = match spec.images.is_empty() {
        true => "use the machine's own programs, or ask an operator".to_owned(),
        false => format!("it may use {}", spec.images.join(", ")),
    };
    Some(("image is not below a directory this tenant may use".to_owned(), hint))
}

/// Why a tenant with these grants can't have a bind, and what to do. What is at the path, and that no link leads
/// from it, is looked at when it is mounted.
fn bind_refused(parts: &BindParts, grants: &[String]) -> Option<(String, String)> {
    // `..` in it is refused of everybody's.
    let source = std::path::Path::new(&parts.source);
    let of = |text: &&String| source.starts_with(bind::grant(text).0);
    let granted: Vec<&String> = grants.iter().filter(of).collect();
    if granted.is_empty() {
        let hint = match grants.is_empty() {
            true => "the tenant has none; ask an operator".to_owned(),
            false => format!("it may bind {}", grants.join(", ")),
        };
        let message = format!("{} is not below a directory this tenant may bind", parts.source);
        return Some((message, hint));
    }
    (!parts.read_only && !granted.iter().any(|text| bind::grant(text).1)).then(|| {
        let message = format!("bind of {} may be written, and the tenant may not", parts.source);
        (message, format!("write {}:{}:ro", parts.source, parts.target))
    })
}

/// What an operators' virtual network uses that is a tenant's.
fn operators(wanted: &Wanted<'_>, name: &str, vnet: &VirtualNetwork, reporter: &mut Reporter) {
    management::operators(wanted, name, vnet, reporter);
    for (external_name, external) in &vnet.spec.externals {
        for (tenant, object) in &*wanted.tenants {
            let Some(grant) = object.spec.interfaces.get(&external.interface) else { continue };
            if !meets(grant, external) {
                continue;
            }
            let what = format!(
                "this use of interface {} is tenant {tenant}'s ({})",
                external.interface,
                grant_words(&Grant { locals: Vec::new(), ..grant.clone() })
            );
            let hint = "take another key, or leave it out of the tenant's";
            if reporter.vnets.contains_key(name) {
                reporter.vnet(name, &["spec", "externals", external_name], what, hint);
            } else {
                let what = format!("vnet {name} has an external {external_name}: {what}");
                reporter.tenant(tenant, &["spec", "interfaces", &external.interface], what, hint);
            }
        }
    }
}

/// Whether an external takes what a grant gives, or the UDP port that it needs.
fn meets(grant: &Grant, external: &External) -> bool {
    let by = external.encapsulation();
    let Some(tunnel) = by.tunnel() else { return grant.whole };
    let port = tunnel.takes().udp_port();
    let needs = |(kind, keys): (&Kind, Option<_>)| {
        keys.is_some() && kind != tunnel.kind() && kind.port.is_some() && kind.port == port
    };
    tunnel.number().is_some_and(|key| grant.has(tunnel.kind(), key))
        || port.is_some_and(|port| grant.has(&udp::KIND, port.into()))
        || grant.keys().into_iter().any(needs)
}

/// What virtual networks of a tenant have of what quotas bound.
#[derive(Default)]
struct Use<'a> {
    vnets: u64,
    nodes: Usage,
    rate_bps: u64,
    spec_bytes: u64,
    images: BTreeSet<&'a (String, Option<String>)>,
}

/// How a quota's values are written.
type Write = fn(u64) -> String;

/// One bound of a quota.
struct Quantity {
    /// Its key.
    name: &'static str,
    /// What it is, or `None` for none.
    max: fn(&Quota) -> Option<u64>,
    /// What there is.
    of: fn(&Use<'_>) -> u64,
    write: Write,
}

fn or(value: Option<impl Into<u64>>, default: u64) -> Option<u64> {
    Some(value.map_or(default, Into::into))
}

const QUOTAS: [Quantity; 16] = [
    Quantity {
        name: "vnets",
        max: |quota| or(quota.vnets, TENANT_VNETS_DEFAULT),
        of: |used| used.vnets,
        write: plain,
    },
    Quantity {
        name: "nodes",
        max: |quota| or(quota.nodes, TENANT_NODES_DEFAULT),
        of: |used| used.nodes.nodes,
        write: plain,
    },
    Quantity {
        name: "power",
        max: |quota| or(quota.power.map(|power| power.0), TENANT_POWER_DEFAULT),
        of: |used| used.nodes.power_millicores,
        write: cores,
    },
    Quantity {
        name: "cpu",
        max: |quota| or(quota.cpu.map(|cpu| cpu.0), TENANT_CPU_DEFAULT),
        of: |used| used.nodes.cpu_millicores,
        write: cores,
    },
    Quantity {
        name: "memory",
        max: |quota| or(quota.memory.map(|memory| memory.0), TENANT_MEMORY_DEFAULT),
        of: |used| used.nodes.memory_bytes,
        write: bytes,
    },
    Quantity {
        name: "processes",
        max: |quota| or(quota.processes, TENANT_PROCESSES_DEFAULT),
        of: |used| used.nodes.processes,
        write: plain,
    },
    Quantity {
        name: "vports",
        max: |quota| or(quota.vports, TENANT_VPORTS_DEFAULT),
        of: |used| used.nodes.vports,
        write: plain,
    },
    Quantity {
        name: "rate",
        max: |quota| quota.rate.map(|rate| rate.0),
        of: |used| used.rate_bps,
        write: |value| BitRate(value).to_string(),
    },
    Quantity {
        name: "routes",
        max: |quota| or(quota.routes, TENANT_ROUTES_DEFAULT),
        of: |used| used.nodes.routes,
        write: plain,
    },
    Quantity {
        name: "specs",
        max: |quota| or(quota.specs.map(|specs| specs.0), TENANT_SPECS_DEFAULT),
        of: |used| used.spec_bytes,
        write: bytes,
    },
    Quantity {
        name: "logs",
        max: |quota| or(quota.logs.map(|logs| logs.0), TENANT_LOGS_DEFAULT),
        of: |used| used.nodes.log_bytes,
        write: bytes,
    },
    Quantity {
        name: "volumes",
        max: |quota| or(quota.volumes.map(|volumes| volumes.0), TENANT_VOLUMES_DEFAULT),
        of: |used| used.nodes.volume_bytes,
        write: bytes,
    },
    Quantity {
        name: "ociImages",
        max: |quota| or(quota.oci_images, TENANT_OCI_IMAGES_DEFAULT),
        of: |used| used.images.len() as u64,
        write: plain,
    },
    Quantity {
        name: "descriptors",
        max: |quota| or(quota.descriptors, TENANT_DESCRIPTORS_DEFAULT),
        of: |used| used.nodes.descriptors,
        write: plain,
    },
    Quantity {
        name: "regions",
        max: |quota| or(quota.regions, TENANT_REGIONS_DEFAULT),
        of: |used| used.nodes.regions,
        write: plain,
    },
    Quantity {
        name: "buffers",
        max: |quota| or(quota.buffers, TENANT_BUFFERS_DEFAULT),
        of: |used| used.nodes.buffers,
        write: plain,
    },
];

fn plain(value: u64) -> String {
    value.to_string()
}

fn bytes(value: u64) -> String {
    Bytes(value).to_string()
}

fn cores(millicores: u64) -> String {
    Cores(u32::try_from(millicores).unwrap_or(u32::MAX)).to_string()
}

impl<'a> Use<'a> {
    /// Counts a part in.
    fn add_part(&mut self, part: &'a Part) {
        self.nodes += part.usage;
        self.rate_bps = self.rate_bps.saturating_add(part.rate_bps);
        self.images.extend(&part.images);
    }

    /// Counts a virtual network in.
    fn add(&mut self, sums: &'a Sums) {
        self.vnets += 1;
        self.nodes += sums.usage;
        self.rate_bps = self.rate_bps.saturating_add(sums.rate_bps);
        self.spec_bytes = self.spec_bytes.saturating_add(sums.spec_bytes);
        self.images.extend(&sums.images);
    }
}

/// What is a tenant's of what is there by the names of virtual networks.
fn of_tenant<'a, T>(
    all: &'a BTreeMap<String, T>,
    tenant: &str,
) -> impl Iterator<Item = (&'a String, &'a T)> {
    let first = format!("{tenant}.");
    let from = all.range::<str, _>((Bound::Included(&*first), Bound::Unbounded));
    from.take_while(move |(name, _)| name.starts_with(&first))
}

/// What counts of a tenant beside what is wanted, and what a change makes more.
#[derive(Default)]
struct Beside {
    /// What may still be there, by virtual network: whether that itself is, and its parts beyond what is wanted.
    remains: Vec<(String, u64, Vec<Part>)>,
    /// What the change adds: new virtual networks, and parts beyond those before.
    new_vnets: u64,
    new_parts: Vec<Part>,
}

impl Beside {
    fn of(tenant: &str, wanted: &Wanted<'_>, changed: &BTreeMap<&str, &Sums>) -> Self {
        let none = Parts::new();
        let before = |name: &str| wanted.before.get(name).map(|vnet| &vnet.sums().parts);
        let after = |name: &str| match changed.get(name) {
            Some(sums) => Some(&sums.parts),
            None => before(name),
        };
        let mut beside = Self::default();
        for (name, remains) in of_tenant(wanted.remains, tenant) {
            let is_gone = u64::from(after(name).is_none());
            let parts = remains.beyond(after(name).unwrap_or(&none)).collect();
            beside.remains.push((name.clone(), is_gone, parts));
        }
        for (name, _) in of_tenant(&wanted.changed, tenant) {
            beside.new_vnets += u64::from(before(name).is_none());
            let (was, is) = (before(name).unwrap_or(&none), after(name).unwrap_or(&none));
            let part = |name: &str| was.get(name).cloned().unwrap_or_default();
            beside.new_parts.extend(is.iter().map(|(name, is)| is.beyond(&part(name))));
        }
        beside
    }

    /// What the change adds.
    fn added(&self) -> Use<'_> {
        let mut new = Use { vnets: self.new_vnets, ..Use::default() };
        self.new_parts.iter().for_each(|part| new.add_part(part));
        new
    }

    /// Counts in what may still be there.
    fn add_to<'a>(&'a self, all: &mut Use<'a>) {
        for (_, vnets, parts) in &self.remains {
            all.vnets += vnets;
            parts.iter().for_each(|part| all.add_part(part));
        }
    }

    /// Which virtual networks may still have something of this, and since when.
    fn names(&self, of: fn(&Use<'_>) -> u64, wanted: &Wanted<'_>) -> String {
        let names = self.remains.iter().filter_map(|(name, vnets, parts)| {
            let mut used = Use { vnets: *vnets, ..Use::default() };
            parts.iter().for_each(|part| used.add_part(part));
            let seconds = wanted.now_s.saturating_sub(wanted.remains.get(name)?.since_s);
            (of(&used) > 0).then(|| format!("{name} (for {seconds} s)"))
        });
        names.collect::<Vec<_>>().join(", ")
    }
}

/// Checks that tenants whose virtual networks or quotas change keep to their quotas; `changed` is what
/// counts of those that change. What may still be there of earlier ones counts for a change that adds to it.
pub(super) fn quotas(
    wanted: &Wanted<'_>,
    changed: &BTreeMap<&str, &Sums>,
    reporter: &mut Reporter,
) {
    let touched = wanted.changed.keys().filter_map(|name| tenant_of(name));
    let touched: BTreeSet<String> =
        touched.chain(reporter.tenants.keys().copied()).map(str::to_owned).collect();
    for tenant in &touched {
        let beside = Beside::of(tenant, wanted, changed);
        // What it has beside what changes, what is asked, and both; with what may still be there.
        let [mut used, mut asked, mut all, mut there] = <[Use; 4]>::default();
        for (name, vnet) in of_tenant(wanted.before, tenant) {
            if !wanted.changed.contains_key(name) {
                for sum in [&mut used, &mut all, &mut there] {
                    sum.add(vnet.sums());
                }
            }
        }
        for (name, _) in of_tenant(&wanted.changed, tenant) {
            if let Some(sums) = changed.get(name.as_str()) {
                for sum in [&mut asked, &mut all, &mut there] {
                    sum.add(sums);
                }
            }
        }
        beside.add_to(&mut there);
        let new = beside.added();
        let first = of_tenant(&wanted.changed, tenant).next();
        let Some(object) = wanted.tenants.get(tenant) else { continue };
        let quota = &object.spec.quota;
        for Quantity { name, max, of, write } in QUOTAS {
            let Some(bound) = max(quota) else { continue };
            let only_there = of(&all) <= bound && of(&new) > 0 && of(&there) > bound;
            if of(&all) <= bound && !only_there {
                continue;
            }
            let remains = of(&there).saturating_sub(of(&all));
            let (used, asked) = (of(&used), of(&asked));
            let mut message = format!(
                "{name}: {} exceeds tenant {tenant}'s quota of {}, of which its other virtual \
                 networks use {}",
                write(asked),
                write(bound),
                write(used)
            );
            let mut hint = "ask for less, or ask an operator";
            if only_there {
                message += &format!(
                    "; {} of it is still being removed: {}",
                    write(remains),
                    beside.names(of, wanted)
                );
                hint = "try again once it is gone; if that takes long, ask an operator";
            }
            match first {
                Some((vnet, _)) => {
                    reporter.vnet(vnet, &["spec"], message, hint);
                }
                None => {
                    let message = format!(
                        "{name}: {} is below the {} that its virtual networks have",
                        write(bound),
                        write(used)
                    );
                    let path = ["spec", "quota", name];
                    reporter.tenant(tenant, &path, message, "raise it, or delete some first");
                }
            }
        }
        if quota.rate.is_some() {
            unlimited(wanted, tenant, reporter);
        }
    }
}

/// Links without a rate, of a tenant that has a quota of it.
fn unlimited(wanted: &Wanted<'_>, tenant: &str, reporter: &mut Reporter) {
    let without_rate = |vnet: &VirtualNetwork| {
        let links = vnet.spec.links.iter().enumerate();
        let without = links.filter(|(_, link)| link.rate_bps_max().is_none());
        let named = without.map(|(index, link)| {
            (index, link.name.clone().unwrap_or_else(|| format!("link{}", index + 1)))
        });
        named.collect::<Vec<(usize, String)>>()
    };
    for (name, vnet) in of_tenant(&wanted.changed, tenant) {
        for (index, _) in without_rate(vnet) {
            let path = ["spec", "links", &index.to_string()];
            let message = format!("no rate, but tenant {tenant} has a quota of rate");
            reporter.vnet(name, &path, message, "give it a rate");
        }
    }
    for (name, vnet) in of_tenant(wanted.before, tenant).filter(|(_, vnet)| !vnet.sums().rated) {
        if wanted.changed.contains_key(name) {
            continue;
        }
        for (_, link) in without_rate(vnet) {
            let message = format!("vnet {name}: {link} has no rate");
            let hint = "give it a rate first";
            reporter.tenant(tenant, &["spec", "quota", "rate"], message, hint);
        }
    }
}
