//! Finds remains that outlive their network or tenant: user ids, records, cgroups,
//! directories, mounts, volumes and images. Each is reported with the command that removes it.
//!
//! An object that is created or removed during the search is in the
//! plan or journal before it appears on the machine, and until it is
//! gone from there. So the results are compared with both afterwards.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use pdp_api::{MachineCheck, MachineCheckState};
use pdp_container::safe_removal;

use crate::engine::DaemonCore;
use crate::host::upgrade;
use crate::plan::allocations::NODE;
use crate::plan::allocations::{UIDS_PER_VNET, vnet_uid_base};
use crate::plan::key::ObjectKey;
use crate::util::error_chain;

/// Reported entries of one kind.
const REPORTED_MAX: usize = 16;

/// An object that outlives its owner.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Remnant {
    /// The object.
    pub what: String,
    /// Why it still exists, as far as known.
    pub why: String,
    /// Command that removes it.
    pub command: String,
}

/// A network that is being removed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VnetRemoval {
    /// Name of the network.
    pub vnet: String,
    /// The first part that can't be removed, the reason, and the time since then.
    pub stuck: Option<(ObjectKey, String, Duration)>,
}

impl VnetRemoval {
    /// Describes its state.
    pub fn words(&self) -> String {
        match &self.stuck {
            Some((key, why, time)) => {
                format!(
                    "can't be removed for {} s; the daemon retries: {key}: {why}",
                    time.as_secs()
                )
            }
            None => "is being removed".to_owned(),
        }
    }
}

impl DaemonCore {
    /// Returns the networks that are deleted but not gone.
    pub fn removals(&self) -> Vec<VnetRemoval> {
        let (stuck, model) = (self.reconcile_loop.stuck(), self.model());
        let names = self.reconcile_loop.being_removed().into_iter();
        // A stopped or damaged network is reported as such.
        let gone = names
            .filter(|vnet| !model.vnets.contains_key(vnet) && model.damaged_vnet(vnet).is_none());
        let removals = gone.map(|vnet| {
            let of = stuck.iter().filter(|it| it.key.vnet_name() == Some(&vnet));
            let first = of.max_by_key(|it| it.time);
            let stuck = first.map(|it| (it.key.clone(), it.why.clone(), it.time));
            VnetRemoval { vnet, stuck }
        });
        removals.collect()
    }

    /// Returns the findings for `pdp doctor`.
    pub fn checks_of_remains(&self) -> Vec<MachineCheck> {
        let check = |state, detail: String, hint: Option<String>| MachineCheck {
            name: "left over".into(),
            state,
            detail,
            hint,
        };
        let found = self.remnants();
        if found.is_empty() {
            let detail = "nothing outlives its network or tenant";
            return vec![check(MachineCheckState::Ok, detail.into(), None)];
        }
        let finding = |it: Remnant| {
            let hint = format!("remove it with `{}`", it.command);
            check(MachineCheckState::Warn, format!("{}: {}", it.what, it.why), Some(hint))
        };
        found.into_iter().map(finding).collect()
    }

    /// Returns all objects that outlive their owner, and those whose removal fails.
    pub fn remnants(&self) -> Vec<Remnant> {
        let places = &self.host.places;
        let paths = self.host.runtime.paths();
        let cgroups = self.host.runtime.cgroups();
        // Search first, and then compare with what is known.
        let networks = names(&places.run.join("vnets"));
        let externals = names(&places.run.join("externals"));
        let (records, volumes) = (names(&places.records()), names(&paths.volumes));
        let groups = cgroups.below("vnets");
        let mounts = Mounts::read();
        let owners = self.images.unreadable();

        let (model, plan) = (self.model(), self.reconcile_loop.plan());
        let entries = self.host.state.journal().unwrap_or_default();
        let journal = entries.keys().filter_map(|key| key.parse::<ObjectKey>().ok());
        let keys: BTreeSet<ObjectKey> = plan.keys().into_iter().chain(journal).collect();
        let vnets: BTreeSet<&str> = keys
            .iter()
            .filter_map(ObjectKey::vnet_name)
            .chain(model.vnets.keys().map(String::as_str))
            .collect();
        let processes: BTreeSet<PathBuf> =
            keys.iter().flat_map(|key| places.processes(key)).collect();

        let mut found = Vec::new();
        let mut add = |what: String, why: &str, command: String| {
            found.push(Remnant { what, why: why.to_owned(), command });
        };
        let removal = |place: &Path| mounts.removal(place);
        // An object that was removed since it was found is no remnant.
        let dir = |place: &Path| place.exists().then(|| format!("directory {}", place.display()));
        for it in self.removals() {
            let number = model.allocations.number_of(&it.vnet);
            let ids = number.map_or(String::new(), |number| {
                let first = vnet_uid_base(number);
                format!(", which has the user ids {first} to {}", first + UIDS_PER_VNET - 1)
            });
            let place = match &it.stuck {
                Some((ObjectKey::Guest { vnet, node, number }, ..)) => {
                    places.node(vnet, node).join(format!("g{number}"))
                }
                Some((ObjectKey::Node { vnet, node }, ..)) => places.node(vnet, node),
                Some(_) => places.run.join("vnets").join(&it.vnet),
                // Its removal has only begun.
                None => continue,
            };
            add(format!("network {}{ids}", it.vnet), &it.words(), removal(&place));
        }
        for stuck in self.reconcile_loop.stuck() {
            let place = match &stuck.key {
                ObjectKey::Mux => places.run.join("mux"),
                ObjectKey::External(name) => places.run.join("externals").join(name),
                ObjectKey::Vnet(vnet)
                | ObjectKey::Node { vnet, .. }
                | ObjectKey::Guest { vnet, .. } => {
                    // Deleted vnets are reported above.
                    if !model.vnets.contains_key(vnet) {
                        continue;
                    }
                    places.run.join("vnets").join(vnet)
                }
                ObjectKey::Leftovers => continue,
            };
            add(stuck.key.to_string(), &stuck.why, removal(&place));
        }
        let unknown = "no network has it";
        let numbers =
            model.allocations.vnets.keys().filter(|vnet| {
                !vnets.contains(vnet.as_str()) && model.damaged_vnet(vnet).is_none()
            });
        for vnet in numbers.filter(|vnet| !self.reconcile_loop.may_exist(vnet)) {
            // The next change frees them, whatever it is.
            add(format!("user ids of network {vnet}"), "it is gone", "pdp apply -f FILE".into());
        }
        for name in networks.iter().filter(|name| !vnets.contains(name.as_str())) {
            let place = places.run.join("vnets").join(name);
            if let Some(what) = dir(&place) {
                add(what, unknown, removal(&place));
            }
        }
        for name in names(&places.run).into_iter().filter(|name| name.starts_with(upgrade::LEFT)) {
            let place = places.run.join(name);
            if let Some(what) = dir(&place) {
                add(what, "left by another version", removal(&place));
            }
        }
        for name in externals {
            let place = places.run.join("externals").join(&name);
            if !keys.contains(&ObjectKey::external(&name))
                && let Some(what) = dir(&place)
            {
                add(what, "no external has it", removal(&place));
            }
        }
        for name in records {
            let place = places.records().join(name);
            if !processes.contains(&place) && place.exists() {
                add(format!("record {}", place.display()), "no process has it", removal(&place));
            }
        }
        let kept: BTreeSet<&PathBuf> = plan.with_volumes().collect();
        for name in volumes {
            let record = places.records().join(&name);
            let known = kept.contains(&record) || processes.contains(&record);
            let place = paths.volumes.join(name);
            if !known && plan.damaged.is_empty() && place.exists() {
                add(format!("volumes {}", place.display()), "no node has them", removal(&place));
            }
        }
        let known: BTreeSet<String> =
            vnets.iter().map(|vnet| crate::plan::DaemonPaths::vnet_cgroup(vnet)).collect();
        for group in groups.into_iter().map(|name| format!("vnets/{name}")) {
            let dirs = cgroups.dirs(&group);
            if !known.contains(&group) && group.starts_with("vnets/_") && !dirs.is_empty() {
                add(format!("cgroup {group}"), unknown, end_cgroup(&dirs));
            }
        }
        for mount in mounts.below(&places.run) {
            let below = mount.strip_prefix(&places.run).unwrap_or(mount);
            let mut parts = below.iter().map(|part| part.to_string_lossy().into_owned());
            let known = match (parts.next().as_deref(), parts.next()) {
                (None, _) => true,
                (Some("vnets"), Some(vnet)) => networks.contains(&vnet),
                // The namespace of kernel ports. pdpd removes it with the last port.
                (Some("ports"), None) => true,
                _ => false,
            };
            if !known && safe_removal::is_mounted(mount).unwrap_or(false) {
                let command = format!("umount -l {}", quoted(mount));
                add(format!("mount {}", mount.display()), unknown, command);
            }
        }
        for (owner, why) in owners {
            let place = self.images.place(&owner);
            let of = if owner == NODE { "operators".to_owned() } else { format!("tenant {owner}") };
            add(format!("images of {of}"), &why, removal(&place));
        }
        for owner in self.images.owners() {
            if owner != NODE && !model.knows_tenant(&owner) {
                let place = self.images.place(&owner);
                add(
                    format!("images of tenant {owner}"),
                    "there is no such tenant",
                    removal(&place),
                );
            }
        }
        for ((kind, name), why) in &*model.damaged {
            let object = if kind == "Tenant" { format!("tenant/{name}") } else { name.clone() };
            add(format!("{kind} {name}"), why, format!("pdp delete {object}"));
        }
        let left = found.len().saturating_sub(REPORTED_MAX);
        if left > 0 {
            found.truncate(REPORTED_MAX);
            if let Some(last) = found.last_mut() {
                last.why += &format!(" (and {left} more)");
            }
        }
        found
    }
}

/// Returns the names in a directory; empty if it can't be read.
fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

/// The mounts of this mount namespace, in the order of their creation.
struct Mounts(Vec<PathBuf>);

impl Mounts {
    fn read() -> Self {
        Self(safe_removal::mounts().unwrap_or_else(|error| {
            tracing::warn!("mounts: {}", error_chain(&error));
            Vec::new()
        }))
    }

    fn below<'a>(&'a self, place: &'a Path) -> impl DoubleEndedIterator<Item = &'a PathBuf> {
        self.0.iter().filter(move |mount| mount.starts_with(place))
    }

    /// Returns the command that removes a directory and unmounts
    /// everything below it, the last mount first.
    fn removal(&self, place: &Path) -> String {
        let mounts = self.below(place).rev();
        let unmount: String =
            mounts.map(|mount| format!("umount -l {}; ", quoted(mount))).collect();
        format!("{unmount}rm -rf --one-file-system {}", quoted(place))
    }
}

/// Returns the command that ends the processes in a cgroup and removes it.
fn end_cgroup(dirs: &[PathBuf]) -> String {
    let dirs: Vec<String> = dirs.iter().map(|dir| quoted(dir)).collect();
    let dirs = dirs.join(" ");
    format!(
        "find {dirs} -name cgroup.procs -exec cat {{}} + | xargs -r kill -9; find {dirs} -depth -type d -exec rmdir {{}} +"
    )
}

/// Quotes a path for a shell.
fn quoted(path: &Path) -> String {
    let text = path.to_string_lossy();
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-+:@".contains(c);
    match text.chars().all(plain) {
        true => text.into_owned(),
        false => format!("'{}'", text.replace('\'', r"'\''")),
    }
}
