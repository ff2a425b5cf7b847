//! Checks of tenants: their grants are disjoint, and
//! their virtual networks stay within grants and quotas.
//!
//! Errors for a tenant ([`Existing::requester`]) reveal nothing about others.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

use pdp_wire::tunnel::{KINDS, TunnelKind};
use pdp_wire::udp;

use super::placed::VnetTotals;
use super::{DesiredState, Existing, Reporter, bad_name, management, name_hint};
use crate::bind::{self, BindParts};
use crate::image::{Image, ImageSource};
use crate::limits::*;
use crate::object::{Object, Quota, TenantSpec, VirtualNetwork};
use crate::parse::Document;
use crate::path::{BAD_PATH, good_path};
use crate::registry::{self, ImageName};
use crate::remains::{VnetPart, VnetParts};
use crate::tunnel::{External, Grant};
use crate::units::{BitRate, Bytes, Cores};
use crate::usage::Usage;

/// Tenant that owns a virtual network of this name; `None`: the operators.
pub fn tenant_of(vnet: &str) -> Option<&str> {
    vnet.split_once('.').map(|(tenant, _)| tenant)
}

/// Returns an error if the client may not name a document's object.
pub(super) fn may_name(document: &Document, existing: &Existing) -> Option<(String, String)> {
    let asker = existing.requester.as_deref()?;
    let name = document.object.name();
    match &document.object {
        Object::VirtualNetwork(_) if tenant_of(name) == Some(asker) => None,
        Object::VirtualNetwork(_) => Some((
            format!("name {name:?} does not belong to you"),
            format!("name your networks {asker}.NAME"),
        )),
        other => {
            let message = format!("only operators can apply a {}", other.kind());
            Some((message, "remove it, or ask an operator".into()))
        }
    }
}

/// Checks tenants' grants against each other, and virtual networks against grants.
pub(super) fn grants(desired: &DesiredState<'_>, reporter: &mut Reporter) {
    if desired.tenants.len() > TENANTS_MAX {
        let message = format!("{} tenants exceed {TENANTS_MAX}", desired.tenants.len());
        reporter.general(message, "delete some first");
    }
    let changed: Vec<String> = reporter.tenants.keys().map(|name| (*name).to_owned()).collect();
    for name in &changed {
        one(desired, name, reporter);
        for other in desired.tenants.keys().filter(|other| *other != name) {
            // Of two tenants in one change, the error belongs to the later by name.
            if !changed.contains(other) || other < name {
                against(desired, name, other, reporter);
            }
        }
    }
    // Unchanged networks need a check only if tenants change.
    let kept = (!changed.is_empty()).then(|| desired.reserved()).into_iter().flatten();
    let kept = kept.map(|(name, vnet)| (name, &***vnet)).filter(|(name, _)| {
        tenant_of(name).is_none_or(|tenant| changed.iter().any(|changed| changed == tenant))
    });
    for (name, vnet) in kept.chain(&desired.changed) {
        match tenant_of(name) {
            Some(tenant) => uses(desired, name, tenant, vnet, reporter),
            None => operators(desired, name, vnet, reporter),
        }
    }
}

/// Checks a tenant by itself.
fn one(desired: &DesiredState<'_>, name: &str, reporter: &mut Reporter) {
    let spec = &desired.tenants[name].spec;
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
            reporter.tenant(name, &["spec", "unixUsers"], message, "root is always an operator");
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
            let message = format!("udp includes port {port}, which belongs to {kind}");
            reporter.tenant(name, &path("udp"), message, "leave it out");
        }
    }
}

/// Reports grants that two tenants share, as an error of `name`.
fn against(desired: &DesiredState<'_>, name: &str, other: &str, reporter: &mut Reporter) {
    let (mine, theirs) = (&desired.tenants[name].spec, &desired.tenants[other].spec);
    if let Some(user) = mine.unix_users.iter().find(|user| theirs.unix_users.contains(user)) {
        let message = format!("unix user {user:?} belongs to tenant {other}");
        reporter.tenant(name, &["spec", "unixUsers"], message, "a user belongs to one tenant");
    }
    let (own, others) = (mine.management.as_ref(), theirs.management.as_ref());
    management::against(name, own, other, others, reporter);
    for (interface, grant) in &mine.interfaces {
        let Some(given) = theirs.interfaces.get(interface) else { continue };
        for ((kind, mine), (_, theirs)) in grant.keys().into_iter().zip(given.keys()) {
            let key = kind.name;
            if let Some(common) = mine.zip(theirs).and_then(|(mine, theirs)| mine.common(theirs)) {
                let message =
                    format!("{key} {common} on interface {interface} is granted to tenant {other}");
                let hint = "give tenants ranges that do not overlap";
                reporter.tenant(name, &["spec", "interfaces", interface, key], message, hint);
            }
        }
        if grant.whole && given.whole {
            let message = format!("the whole interface {interface} is granted to tenant {other}");
            let path = ["spec", "interfaces", interface, "whole"];
            reporter.tenant(name, &path, message, "only one tenant can have it");
        }
    }
}

/// True if a grant allows an external.
fn allowed(grant: &Grant, external: &External) -> bool {
    let by = external.encapsulation();
    let Some(tunnel) = by.tunnel() else { return grant.whole };
    let kind = tunnel.kind();
    let from_there = |(local, _)| grant.locals.is_empty() || grant.locals.contains(&local);
    tunnel.number().is_some_and(|key| grant.has(kind, key))
        && (kind.port.is_none() || tunnel.takes().udp_port() == kind.port)
        && tunnel.ends().is_none_or(from_there)
}

/// Describes what a grant allows.
fn describe_grant(grant: &Grant) -> String {
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

/// Reports uses of a tenant's virtual network without a grant.
fn uses(
    desired: &DesiredState<'_>,
    name: &str,
    tenant: &str,
    vnet: &VirtualNetwork,
    reporter: &mut Reporter,
) {
    let Some(spec) = desired.tenants.get(tenant).map(|tenant| &tenant.spec) else {
        if reporter.unknown {
            return;
        }
        let message = format!("tenant {tenant} does not exist");
        let hint = "apply the Tenant first, or use a name without a dot";
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
                    false => format!("it has {}", names.join(", ")),
                };
                let message = format!("tenant {tenant} has no grant for interface {interface}");
                let path = [&path[..], &["interface"]].concat();
                reporter.vnet(name, &path, message, hint);
            }
            Some(grant) if !allowed(grant, external) => {
                let message =
                    format!("tenant {tenant} has no grant for this use of interface {interface}");
                let hint = format!("it has {}", describe_grant(grant));
                reporter.vnet(name, &path, message, hint);
            }
            Some(_) => {}
        }
    }
    management::uses(name, tenant, vnet, spec.management.as_ref(), reporter);
    for (node_name, node) in &vnet.spec.nodes {
        let path = ["spec", "nodes", node_name];
        if node.privileged {
            let message = "tenants can't have privileged nodes".to_owned();
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

/// Returns why a tenant may not use an image, and what it may use.
fn image_refused(image: &Image, spec: &TenantSpec) -> Option<(String, String)> {
    let path = match image.source() {
        ImageSource::Host => return None,
        ImageSource::Rootfs(path)
        | ImageSource::OciLayout(path, _)
        | ImageSource::Archive(path, ..) => std::path::Path::new(path),
        ImageSource::Pull(name, _) => {
            return match ImageName::parse(name) {
                Ok(name) => registry::refused(&name, &spec.registries),
                // The node's check reports it.
                Err(_) => None,
            };
        }
    };
    // `..` is rejected in every spec.
    if spec.images.iter().any(|directory| path.starts_with(directory)) {
        return None;
    }
    let hint = match spec.images.is_empty() {
        true => "use the machine's own programs, or ask an operator".to_owned(),
        false => format!("it may use {}", spec.images.join(", ")),
    };
    Some(("image is not below a directory that the tenant may use".to_owned(), hint))
}

/// Returns why a tenant with these grants can't have a bind, and advice. The
/// mount itself checks the path, and that no symbolic link leads out of it.
fn bind_refused(parts: &BindParts, grants: &[String]) -> Option<(String, String)> {
    // `..` is rejected in every spec.
    let source = std::path::Path::new(&parts.source);
    let of = |text: &&String| source.starts_with(bind::grant(text).0);
    let granted: Vec<&String> = grants.iter().filter(of).collect();
    if granted.is_empty() {
        let hint = match grants.is_empty() {
            true => "the tenant has none; ask an operator".to_owned(),
            false => format!("it may bind {}", grants.join(", ")),
        };
        let message = format!("{} is not below a directory that the tenant may bind", parts.source);
        return Some((message, hint));
    }
    (!parts.read_only && !granted.iter().any(|text| bind::grant(text).1)).then(|| {
        let message =
            format!("bind of {} is writable, but the tenant may only read it", parts.source);
        (message, format!("write {}:{}:ro", parts.source, parts.target))
    })
}

/// Reports uses of an operators' virtual network that conflict with tenants' grants.
fn operators(
    desired: &DesiredState<'_>,
    name: &str,
    vnet: &VirtualNetwork,
    reporter: &mut Reporter,
) {
    management::operators(desired, name, vnet, reporter);
    for (external_name, external) in &vnet.spec.externals {
        for (tenant, object) in &*desired.tenants {
            let Some(grant) = object.spec.interfaces.get(&external.interface) else { continue };
            if !uses_grant(grant, external) {
                continue;
            }
            let message = format!(
                "this use of interface {} is granted to tenant {tenant} ({})",
                external.interface,
                describe_grant(&Grant { locals: Vec::new(), ..grant.clone() })
            );
            let hint = "use another key, or remove it from the tenant's grant";
            if reporter.vnets.contains_key(name) {
                reporter.vnet(name, &["spec", "externals", external_name], message, hint);
            } else {
                let message = format!("vnet {name} has an external {external_name}: {message}");
                reporter.tenant(
                    tenant,
                    &["spec", "interfaces", &external.interface],
                    message,
                    hint,
                );
            }
        }
    }
}

/// True if an external uses what a grant allows, or needs a granted UDP port.
fn uses_grant(grant: &Grant, external: &External) -> bool {
    let by = external.encapsulation();
    let Some(tunnel) = by.tunnel() else { return grant.whole };
    let port = tunnel.takes().udp_port();
    let needs = |(kind, keys): (&TunnelKind, Option<_>)| {
        keys.is_some() && kind != tunnel.kind() && kind.port.is_some() && kind.port == port
    };
    tunnel.number().is_some_and(|key| grant.has(tunnel.kind(), key))
        || port.is_some_and(|port| grant.has(&udp::KIND, port.into()))
        || grant.keys().into_iter().any(needs)
}

/// Use of quota by a tenant's virtual networks.
#[derive(Default)]
struct TenantUse<'a> {
    vnets: u64,
    nodes: Usage,
    rate_bps: u64,
    spec_bytes: u64,
    images: BTreeSet<&'a (String, Option<String>)>,
}

/// Formats a quota's value.
type FormatQuantity = fn(u64) -> String;

/// One limit of a quota.
struct QuotaBound {
    /// Key of the quota.
    name: &'static str,
    /// Returns the limit; `None` if there is none.
    max: fn(&Quota) -> Option<u64>,
    /// Returns the current use.
    of: fn(&TenantUse<'_>) -> u64,
    write: FormatQuantity,
}

fn or(value: Option<impl Into<u64>>, default: u64) -> Option<u64> {
    Some(value.map_or(default, Into::into))
}

const QUOTAS: [QuotaBound; 16] = [
    QuotaBound {
        name: "vnets",
        max: |quota| or(quota.vnets, TENANT_VNETS_DEFAULT),
        of: |used| used.vnets,
        write: plain,
    },
    QuotaBound {
        name: "nodes",
        max: |quota| or(quota.nodes, TENANT_NODES_DEFAULT),
        of: |used| used.nodes.nodes,
        write: plain,
    },
    QuotaBound {
        name: "power",
        max: |quota| or(quota.power.map(|power| power.0), TENANT_POWER_DEFAULT),
        of: |used| used.nodes.power_millicores,
        write: cores,
    },
    QuotaBound {
        name: "cpu",
        max: |quota| or(quota.cpu.map(|cpu| cpu.0), TENANT_CPU_DEFAULT),
        of: |used| used.nodes.cpu_millicores,
        write: cores,
    },
    QuotaBound {
        name: "memory",
        max: |quota| or(quota.memory.map(|memory| memory.0), TENANT_MEMORY_DEFAULT),
        of: |used| used.nodes.memory_bytes,
        write: bytes,
    },
    QuotaBound {
        name: "processes",
        max: |quota| or(quota.processes, TENANT_PROCESSES_DEFAULT),
        of: |used| used.nodes.processes,
        write: plain,
    },
    QuotaBound {
        name: "vports",
        max: |quota| or(quota.vports, TENANT_VPORTS_DEFAULT),
        of: |used| used.nodes.vports,
        write: plain,
    },
    QuotaBound {
        name: "rate",
        max: |quota| quota.rate.map(|rate| rate.0),
        of: |used| used.rate_bps,
        write: |value| BitRate(value).to_string(),
    },
    QuotaBound {
        name: "routes",
        max: |quota| or(quota.routes, TENANT_ROUTES_DEFAULT),
        of: |used| used.nodes.routes,
        write: plain,
    },
    QuotaBound {
        name: "specs",
        max: |quota| or(quota.specs.map(|specs| specs.0), TENANT_SPECS_DEFAULT),
        of: |used| used.spec_bytes,
        write: bytes,
    },
    QuotaBound {
        name: "logs",
        max: |quota| or(quota.logs.map(|logs| logs.0), TENANT_LOGS_DEFAULT),
        of: |used| used.nodes.log_bytes,
        write: bytes,
    },
    QuotaBound {
        name: "volumes",
        max: |quota| or(quota.volumes.map(|volumes| volumes.0), TENANT_VOLUMES_DEFAULT),
        of: |used| used.nodes.volume_bytes,
        write: bytes,
    },
    QuotaBound {
        name: "ociImages",
        max: |quota| or(quota.oci_images, TENANT_OCI_IMAGES_DEFAULT),
        of: |used| used.images.len() as u64,
        write: plain,
    },
    QuotaBound {
        name: "descriptors",
        max: |quota| or(quota.descriptors, TENANT_DESCRIPTORS_DEFAULT),
        of: |used| used.nodes.descriptors,
        write: plain,
    },
    QuotaBound {
        name: "regions",
        max: |quota| or(quota.regions, TENANT_REGIONS_DEFAULT),
        of: |used| used.nodes.regions,
        write: plain,
    },
    QuotaBound {
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

impl<'a> TenantUse<'a> {
    /// Adds a part.
    fn add_part(&mut self, part: &'a VnetPart) {
        self.nodes += part.usage;
        self.rate_bps = self.rate_bps.saturating_add(part.rate_bps);
        self.images.extend(&part.images);
    }

    /// Adds a virtual network.
    fn add(&mut self, sums: &'a VnetTotals) {
        self.vnets += 1;
        self.nodes += sums.usage;
        self.rate_bps = self.rate_bps.saturating_add(sums.rate_bps);
        self.spec_bytes = self.spec_bytes.saturating_add(sums.spec_bytes);
        self.images.extend(&sums.images);
    }
}

/// Filters values by virtual network's name: only the tenant's.
fn of_tenant<'a, T>(
    all: &'a BTreeMap<String, T>,
    tenant: &str,
) -> impl Iterator<Item = (&'a String, &'a T)> {
    let first = format!("{tenant}.");
    let from = all.range::<str, _>((Bound::Included(&*first), Bound::Unbounded));
    from.take_while(move |(name, _)| name.starts_with(&first))
}

/// Remains of a tenant's networks beyond the desired state, and additions by a change.
#[derive(Default)]
struct TenantRemains {
    /// Remains by virtual network: 1 if the network itself
    /// remains, and its parts beyond the desired state.
    remains: Vec<(String, u64, Vec<VnetPart>)>,
    /// Additions by the change: new virtual networks, and increases of existing parts.
    new_vnets: u64,
    new_parts: Vec<VnetPart>,
}

impl TenantRemains {
    fn of(tenant: &str, desired: &DesiredState<'_>, changed: &BTreeMap<&str, &VnetTotals>) -> Self {
        let none = VnetParts::new();
        let before = |name: &str| desired.before.get(name).map(|vnet| &vnet.sums().parts);
        let after = |name: &str| match changed.get(name) {
            Some(sums) => Some(&sums.parts),
            None => before(name),
        };
        let mut beside = Self::default();
        for (name, remains) in of_tenant(desired.remains, tenant) {
            let is_gone = u64::from(after(name).is_none());
            let parts = remains.beyond(after(name).unwrap_or(&none)).collect();
            beside.remains.push((name.clone(), is_gone, parts));
        }
        for (name, _) in of_tenant(&desired.changed, tenant) {
            beside.new_vnets += u64::from(before(name).is_none());
            let (was, is) = (before(name).unwrap_or(&none), after(name).unwrap_or(&none));
            let part = |name: &str| was.get(name).cloned().unwrap_or_default();
            beside.new_parts.extend(is.iter().map(|(name, is)| is.beyond(&part(name))));
        }
        beside
    }

    /// Returns the additions by the change.
    fn added(&self) -> TenantUse<'_> {
        let mut new = TenantUse { vnets: self.new_vnets, ..TenantUse::default() };
        self.new_parts.iter().for_each(|part| new.add_part(part));
        new
    }

    /// Adds the remains.
    fn add_to<'a>(&'a self, all: &mut TenantUse<'a>) {
        for (_, vnets, parts) in &self.remains {
            all.vnets += vnets;
            parts.iter().for_each(|part| all.add_part(part));
        }
    }

    /// Lists virtual networks with remains of this resource, and since when.
    fn names(&self, of: fn(&TenantUse<'_>) -> u64, desired: &DesiredState<'_>) -> String {
        let names = self.remains.iter().filter_map(|(name, vnets, parts)| {
            let mut used = TenantUse { vnets: *vnets, ..TenantUse::default() };
            parts.iter().for_each(|part| used.add_part(part));
            let seconds = desired.now_s.saturating_sub(desired.remains.get(name)?.since_s);
            (of(&used) > 0).then(|| format!("{name} (for {seconds} s)"))
        });
        names.collect::<Vec<_>>().join(", ")
    }
}

/// Checks quotas of tenants whose virtual networks or quotas change. `changed` has the sums of
/// changed networks. Remains of earlier ones count for a change that adds to that resource.
pub(super) fn quotas(
    desired: &DesiredState<'_>,
    changed: &BTreeMap<&str, &VnetTotals>,
    reporter: &mut Reporter,
) {
    let touched = desired.changed.keys().filter_map(|name| tenant_of(name));
    let touched: BTreeSet<String> =
        touched.chain(reporter.tenants.keys().copied()).map(str::to_owned).collect();
    for tenant in &touched {
        let beside = TenantRemains::of(tenant, desired, changed);
        // Unchanged use, requested use, both together, and both with the remains.
        let [mut used, mut asked, mut all, mut with_remains] = <[TenantUse; 4]>::default();
        for (name, vnet) in of_tenant(desired.before, tenant) {
            if !desired.changed.contains_key(name) {
                for sum in [&mut used, &mut all, &mut with_remains] {
                    sum.add(vnet.sums());
                }
            }
        }
        for (name, _) in of_tenant(&desired.changed, tenant) {
            if let Some(sums) = changed.get(name.as_str()) {
                for sum in [&mut asked, &mut all, &mut with_remains] {
                    sum.add(sums);
                }
            }
        }
        beside.add_to(&mut with_remains);
        let new = beside.added();
        let first = of_tenant(&desired.changed, tenant).next();
        let Some(object) = desired.tenants.get(tenant) else { continue };
        let quota = &object.spec.quota;
        for QuotaBound { name, max, of, write } in QUOTAS {
            let Some(bound) = max(quota) else { continue };
            let only_remains = of(&all) <= bound && of(&new) > 0 && of(&with_remains) > bound;
            if of(&all) <= bound && !only_remains {
                continue;
            }
            let remains = of(&with_remains).saturating_sub(of(&all));
            let (used, asked) = (of(&used), of(&asked));
            let mut message = format!(
                "{name}: {} exceeds tenant {tenant}'s quota of {}, of which its other virtual \
                 networks use {}",
                write(asked),
                write(bound),
                write(used)
            );
            let mut hint = "ask for less, or ask an operator";
            if only_remains {
                message += &format!(
                    "; networks being removed still use {}: {}",
                    write(remains),
                    beside.names(of, desired)
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
            unlimited(desired, tenant, reporter);
        }
    }
}

/// Reports links without a rate, for a tenant whose quota limits rates.
fn unlimited(desired: &DesiredState<'_>, tenant: &str, reporter: &mut Reporter) {
    let without_rate = |vnet: &VirtualNetwork| {
        let links = vnet.spec.links.iter().enumerate();
        let without = links.filter(|(_, link)| link.rate_bps_max().is_none());
        let named = without.map(|(index, link)| {
            (index, link.name.clone().unwrap_or_else(|| format!("link{}", index + 1)))
        });
        named.collect::<Vec<(usize, String)>>()
    };
    for (name, vnet) in of_tenant(&desired.changed, tenant) {
        for (index, _) in without_rate(vnet) {
            let path = ["spec", "links", &index.to_string()];
            let message = format!("the link has no rate, but tenant {tenant} has a quota for rate");
            reporter.vnet(name, &path, message, "give it a rate");
        }
    }
    for (name, vnet) in of_tenant(desired.before, tenant).filter(|(_, vnet)| !vnet.sums().rated) {
        if desired.changed.contains_key(name) {
            continue;
        }
        for (_, link) in without_rate(vnet) {
            let message = format!("vnet {name}: {link} has no rate");
            let hint = "give it a rate first";
            reporter.tenant(tenant, &["spec", "quota", "rate"], message, hint);
        }
    }
}
