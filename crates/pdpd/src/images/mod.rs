//! Images from registries and archives. They are pulled when a spec that names
//! them is applied, stored per owner, and known by their digests from then on.
//!
//! The request for a change pulls them before anything is stored, so no step of the reconcile loop
//! waits for a registry. Each tenant pulls one image at a time and does not wait for other tenants.
//! An image that a change needs is not removed before the change is stored or refused
//! ([`PinnedImages`]).

pub mod proxy;
mod skopeo;

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use pdp_api::{
    ChangeAction, ChangeReport, ImageInfo as Info, ImageQuery, ObjectChange, Problem, ProblemKind,
    Progress, PullRequest,
};
use pdp_container::cgroup::Cgroups;
use pdp_container::image::{self, ImageLimits, ImageStore, ImageStoreIndex, UNPACKED_BYTES_MAX};
use pdp_container::work::{self, Workplace};
use pdp_container::{RuntimePaths, free_bytes};
use pdp_spec::limits::{TENANT_IMAGE_FILES_DEFAULT, TENANT_IMAGES_DEFAULT};
use pdp_spec::registry::{self, ImageName, is_digest};
use pdp_spec::shared::DOWNLOADS;
use pdp_spec::{Diagnostic, Document, ImageSource, Object, TenantSpec, tenant_of};
use sha2::{Digest, Sha256};

use crate::access::AccessScope;
use crate::intent::model::Model;
use crate::plan::allocations::{GONE, NODE, UID_BASE, image_owner_of};
use crate::util::{ProgressFn, error_chain, hex, hide, lock};
use skopeo::SkopeoJob;

pub use skopeo::PullLimits;

/// Simultaneous pulls: as many as all tenants may have, plus some for
/// operators. Each has its own user id, after the mux's.
const PULLS_MAX: u32 = 512;

/// Images that are pulled or queued at one time, for one tenant and for all
/// tenants. A pull that hangs thus takes up few of the tenants' request permits.
const TENANT_LINE_MAX: usize = DOWNLOADS.tenant as usize;
const TENANTS_LINE_MAX: usize = DOWNLOADS.tenants() as usize;

/// Longest wait for an earlier daemon's pulls to end.
const END_WAIT: Duration = Duration::from_secs(10);

/// Settings of pulls.
#[derive(Clone, Debug)]
pub struct ImageSettings {
    /// Credentials for registries, in docker's format. Read at each pull, by root alone.
    pub auth: Option<PathBuf>,
    /// Certificates by registry, in docker's layout:
    /// `HOST:PORT/ca.crt`. If unset, skopeo's default applies.
    pub certs: Option<PathBuf>,
    /// Path of skopeo.
    pub skopeo: PathBuf,
    /// Path of pdpd itself, which runs as the pulls' proxy.
    pub pdpd: PathBuf,
    /// Limits of one pull, unless a quota is lower.
    pub bounds: PullLimits,
}

impl Default for ImageSettings {
    fn default() -> Self {
        Self {
            auth: None,
            certs: None,
            skopeo: "/usr/bin/skopeo".into(),
            pdpd: "/proc/self/exe".into(),
            bounds: PullLimits {
                bytes: UNPACKED_BYTES_MAX,
                stall: Duration::from_secs(60),
                time: Duration::from_secs(1800),
                free_bytes: 512 << 20,
            },
        }
    }
}

/// The images of a node.
#[derive(Debug)]
pub struct Images {
    store: ImageStore,
    /// The state directory. Tenants must not learn its path.
    state: PathBuf,
    cgroups: Cgroups,
    workplace: Workplace,
    /// Settings of pulls.
    pub settings: ImageSettings,
    /// By tenant; each lock is held while an image is pulled. Its
    /// references are the pulls in progress and in the queue.
    bringing: Mutex<BTreeMap<String, Arc<Mutex<()>>>>,
    /// User ids of pulls.
    slots: Mutex<PullUserIds>,
    /// Images that pending changes need, by owner and digest.
    pinned: Mutex<BTreeMap<(String, String), usize>>,
    /// True while the daemon ends.
    stopping: AtomicBool,
}

/// Images that can't be removed until this value is dropped.
#[derive(Debug, Default)]
pub struct PinnedImages<'a>(Vec<(&'a Images, (String, String))>);

impl Drop for PinnedImages<'_> {
    fn drop(&mut self) {
        for (images, key) in self.0.drain(..) {
            let mut pinned = lock(&images.pinned);
            if let Some(count) = pinned.get_mut(&key) {
                *count -= 1;
                if *count == 0 {
                    pinned.remove(&key);
                }
            }
        }
    }
}

/// User id of one pull.
struct PullUserId<'a>(&'a Images, u32);

impl Drop for PullUserId<'_> {
    fn drop(&mut self) {
        lock(&self.0.slots).taken.remove(&self.1);
    }
}

/// Owner of images, with its spec if it is a tenant.
#[derive(Clone, Copy)]
struct ImageOwner<'a> {
    name: &'a str,
    tenant: Option<&'a TenantSpec>,
}

impl Images {
    /// Opens the images in a runtime's directories.
    pub fn open(
        paths: &RuntimePaths,
        cgroups: Cgroups,
        workplace: Workplace,
    ) -> pdp_container::Result<Self> {
        // Remains of a daemon that was killed.
        if let Err(error) = cgroups.remove(work::CGROUP, END_WAIT) {
            tracing::warn!("can't end pulls of an earlier daemon: {}", error_chain(&error));
        }
        // Next to the images, so that a pull traverses no directory of other files.
        let works = paths.images.with_file_name("pulls");
        let store = ImageStore::open(&paths.images, &works, workplace.clone())?;
        for owner in store.owners()? {
            if let Err(error) = store.index(&owner) {
                let place = store.owner_directory(&owner);
                tracing::warn!(
                    "images of {owner} can't be read: {}; {}",
                    error_chain(&error),
                    mend(&place)
                );
            }
        }
        Ok(Self {
            store,
            state: paths.images.parent().unwrap_or(&paths.images).to_owned(),
            cgroups,
            workplace,
            settings: ImageSettings::default(),
            bringing: Mutex::default(),
            slots: Mutex::default(),
            pinned: Mutex::default(),
            stopping: AtomicBool::default(),
        })
    }

    /// Ends all pulls and refuses new ones. The daemon ends and waits for its requests.
    pub fn stop(&self) {
        self.stopping.store(true, Ordering::Relaxed);
        self.workplace.stop();
    }

    /// Replaces the images' names in the documents by digests. If `fetch`, it first pulls the
    /// missing images. It does so for `only` these nodes, or for all if that is empty. Returns a
    /// guard that keeps the images until the change is stored, and the names of the missing images.
    ///
    /// # Errors
    /// The images that can't be pulled, each with its place in the documents and the reason.
    pub fn pin(
        &self,
        documents: &mut [Document],
        only: &BTreeSet<String>,
        model: &Model,
        fetch: bool,
        progress: ProgressFn<'_>,
    ) -> Result<(PinnedImages<'_>, BTreeSet<String>), Vec<Diagnostic>> {
        let mut pins = PinnedImages::default();
        let (mut missing, mut faults) = (BTreeSet::new(), Vec::new());
        let given: BTreeMap<String, TenantSpec> = documents
            .iter()
            .filter_map(|document| match &document.object {
                Object::Tenant(it) => Some((it.metadata.name.clone(), it.spec.clone())),
                _ => None,
            })
            .collect();
        for document in documents {
            let Object::VirtualNetwork(vnet) = &mut document.object else { continue };
            let name = vnet.metadata.name.clone();
            let tenant = tenant_of(&name).and_then(|tenant| {
                given.get(tenant).or(model.tenants.get(tenant).map(|tenant| &tenant.spec))
            });
            let owner = ImageOwner { name: image_owner_of(&name), tenant };
            let mut wrong = Vec::new();
            for (node, of) in &mut vnet.spec.nodes {
                if !only.is_empty() && !only.contains(node) {
                    continue;
                }
                for (index, image) in of.images_mut().enumerate() {
                    if image.source().stored_digest().is_none() {
                        continue;
                    }
                    let digest = match self.find(owner, image.source(), &mut pins) {
                        Ok(None) if !fetch => {
                            missing.insert(label(image.source()));
                            continue;
                        }
                        Ok(None) => self.fetch(owner, image.source(), &mut pins, progress),
                        found => found.map(Option::unwrap_or_default),
                    };
                    match digest {
                        Ok(digest) => image.pin(digest),
                        Err(why) => wrong.push((node.clone(), index, why)),
                    }
                }
            }
            for (node, index, why) in wrong {
                let path: &[&str] = match index {
                    0 => &["spec", "nodes", &node, "image"],
                    _ => &["spec", "nodes", &node, "dataPlane", "program", "image"],
                };
                faults.push(document.diagnostic(path, why, HINT));
            }
        }
        if faults.is_empty() { Ok((pins, missing)) } else { Err(faults) }
    }

    /// Pulls the image that a registry's name refers to now, even if an image of that name exists.
    ///
    /// # Errors
    /// The name is invalid, the client may not use it, or the pull failed.
    pub fn pull(
        &self,
        scope: &AccessScope,
        request: &PullRequest,
        model: &Model,
        progress: ProgressFn<'_>,
    ) -> Result<ChangeReport, Problem> {
        let PullRequest { image, tenant } = request;
        let tenant = resolve_owner(scope, tenant.as_deref(), model)?;
        let name = ImageName::parse(image).map_err(|why| {
            let problem = Problem::new(ProblemKind::Invalid, format!("image {image:?} {why}"));
            problem.hint("write it as docker does, like registry.example/frr:10")
        })?;
        if let Some((_, spec)) = tenant
            && let Some((message, hint)) = registry::refused(&name, &spec.registries)
        {
            return Err(Problem::new(ProblemKind::Forbidden, message).hint(hint));
        }
        let owner = ImageOwner {
            name: tenant.map_or(NODE, |(name, _)| name),
            tenant: tenant.map(|(_, spec)| spec),
        };
        let before = self.index(owner.name).map_err(Problem::internal)?;
        let mut pins = PinnedImages::default();
        let digest = self
            .fetch(owner, ImageSource::Pull(image, None), &mut pins, progress)
            .map_err(|why| Problem::new(ProblemKind::Unavailable, why).hint(HINT))?;
        let new = !before.images.contains_key(&digest);
        let action = if new { ChangeAction::Create } else { ChangeAction::Unchanged };
        let change = ObjectChange { object: format!("image/{name}"), action, detail: digest };
        Ok(ChangeReport { changes: vec![change], ..ChangeReport::default() })
    }

    /// Returns the stored images that the client may see.
    ///
    /// # Errors
    /// The store can't be read.
    pub fn list(&self, scope: &AccessScope, model: &Model) -> Result<Vec<Info>, Problem> {
        let owners = match scope.tenant() {
            Some(tenant) => vec![tenant.to_owned()],
            None => self.store.owners().map_err(|error| Problem::internal(error_chain(&error)))?,
        };
        let mut all = Vec::new();
        for owner in owners {
            let tenant = (owner != NODE).then(|| owner.clone());
            let index = match self.index(&owner) {
                Ok(index) => index,
                Err(why) => {
                    let place = self.store.owner_directory(&owner);
                    let hint = match scope.tenant() {
                        Some(_) => "an operator can repair them".to_owned(),
                        None => mend(&place),
                    };
                    all.push(Info {
                        tenant,
                        problem: Some(format!("its images can't be read: {why}; {hint}")),
                        ..Info::default()
                    });
                    continue;
                }
            };
            let used = used(&owner, model);
            for (digest, kept) in &index.images {
                let names = index.names.iter().filter(|(_, named)| named.digest == *digest);
                all.push(Info {
                    tenant: tenant.clone(),
                    names: names.map(|(name, _)| name.clone()).collect(),
                    digest: digest.clone(),
                    packed_bytes: kept.packed_bytes,
                    unpacked_bytes: kept.unpacked_bytes,
                    at_ms: kept.at_ms,
                    used_by: used.get(digest).cloned().unwrap_or_default(),
                    problem: None,
                });
            }
        }
        all.sort_by(|a, b| (&a.tenant, &a.names, &a.digest).cmp(&(&b.tenant, &b.names, &b.digest)));
        Ok(all)
    }

    /// Returns the owners of images.
    pub fn owners(&self) -> Vec<String> {
        self.store.owners().unwrap_or_default()
    }

    /// Returns the owners whose images can't be read, with the reasons.
    pub fn unreadable(&self) -> Vec<(String, String)> {
        let why = |owner: String| self.index(&owner).err().map(|why| (owner, why));
        self.owners().into_iter().filter_map(why).collect()
    }

    /// Returns the directory of an owner's images.
    pub fn place(&self, owner: &str) -> PathBuf {
        self.store.owner_directory(owner)
    }

    /// Returns the bytes that count for an owner's quota; 0 if they can't be read.
    pub fn bytes(&self, owner: &str) -> u64 {
        self.store.index(owner).map_or(0, |index| index.bytes())
    }

    /// Removes an image, named by its digest, a prefix of it, or one of
    /// its names. It is refused if what is stored `now` uses the image.
    ///
    /// # Errors
    /// No image matches, several match, or the image is used.
    pub fn remove(
        &self,
        scope: &AccessScope,
        image: &str,
        query: &ImageQuery,
        now: &dyn Fn() -> Arc<Model>,
    ) -> Result<(), Problem> {
        let model = now();
        let owner =
            resolve_owner(scope, query.tenant.as_deref(), &model)?.map_or(NODE, |(name, _)| name);
        let index = self.index(owner).map_err(Problem::internal)?;
        let digest = find(&index, image)?;
        if let Some(nodes) = used(owner, &model).get(&digest) {
            let problem = format!("image {image} is used by {}", nodes.join(", "));
            return Err(Problem::new(ProblemKind::Conflict, problem).hint("delete those first"));
        }
        let idle = || !used(owner, &now()).contains_key(&digest);
        if !self.discard(owner, &digest, idle).map_err(Problem::internal)? {
            let problem = format!("a running change needs image {image}");
            return Err(Problem::new(ProblemKind::Conflict, problem).hint("try again"));
        }
        Ok(())
    }

    /// Removes all images that nothing stored `now` uses, and returns them.
    ///
    /// # Errors
    /// The store can't be read or written.
    pub fn prune(
        &self,
        scope: &AccessScope,
        query: &ImageQuery,
        now: &dyn Fn() -> Arc<Model>,
    ) -> Result<Vec<Info>, Problem> {
        let model = now();
        let owner = resolve_owner(scope, query.tenant.as_deref(), &model)?.map(|(name, _)| name);
        let mut unused = self.list(scope, &model)?;
        unused.retain(|image| image.tenant.as_deref() == owner && image.used_by.is_empty());
        unused.retain(|image| image.problem.is_none());
        let mut removed = Vec::new();
        for image in unused {
            let owner = owner.unwrap_or(NODE);
            let idle = || !used(owner, &now()).contains_key(&image.digest);
            if self.discard(owner, &image.digest, idle).map_err(Problem::internal)? {
                removed.push(image);
            }
        }
        Ok(removed)
    }

    /// Removes the images of tenants that do not exist `now`.
    ///
    /// # Errors
    /// The store can't be read or written.
    pub fn forget_others(&self, now: &dyn Fn() -> Arc<Model>) -> Result<(), String> {
        let mut first = Ok(());
        for owner in self.store.owners().map_err(|error| error_chain(&error))? {
            let gone = || owner != NODE && !now().knows_tenant(&owner);
            if !gone() {
                continue;
            }
            first = first.and(match self.index(&owner) {
                Ok(index) => index
                    .images
                    .keys()
                    .try_for_each(|digest| self.discard(&owner, digest, gone).map(drop)),
                // Unreadable images are removed as a whole.
                Err(_) => self.store.forget(&owner).map(drop).map_err(|error| error_chain(&error)),
            });
        }
        let model = now();
        lock(&self.slots).keep_only(|owner| owner == NODE || model.tenants.contains_key(owner));
        first
    }

    /// Removes an image that neither a pending change nor a stored spec
    /// needs. Returns true if it was removed. A change pins its images
    /// until it is stored, so `idle` is asked once nobody pins the image.
    fn discard(
        &self,
        owner: &str,
        digest: &str,
        idle: impl FnOnce() -> bool,
    ) -> Result<bool, String> {
        let pinned = lock(&self.pinned);
        if pinned.contains_key(&(owner.to_owned(), digest.to_owned())) || !idle() {
            return Ok(false);
        }
        let gone = self.store.remove(owner, digest).map_err(|error| self.reason(&error))?;
        // Deleting the files takes time.
        drop(pinned);
        Ok(gone.is_some())
    }

    fn index(&self, owner: &str) -> Result<ImageStoreIndex, String> {
        self.store.index(owner).map_err(|error| self.reason(&error))
    }

    /// Returns why an image failed, without paths of the machine.
    fn reason(&self, error: &pdp_container::Error) -> String {
        match error {
            pdp_container::Error::Image { text, .. } => text.clone(),
            other => hide(&self.state, error_chain(other)),
        }
    }

    /// Returns the digest of an existing image, and pins it.
    fn find<'a>(
        &'a self,
        owner: ImageOwner<'_>,
        source: ImageSource<'_>,
        pins: &mut PinnedImages<'a>,
    ) -> Result<Option<String>, String> {
        let all = lock(&self.pinned);
        let index = self.index(owner.name)?;
        let digest = match source.stored_digest() {
            Some("") => {
                let Some(named) = index.names.get(&name_of(source)?) else { return Ok(None) };
                let stale = match source {
                    // If the archive is gone, the stored image counts as current.
                    ImageSource::Archive(path, ..) => {
                        stamp(path.as_ref()).is_ok_and(|now| Some(now) != named.stamp)
                    }
                    _ => false,
                };
                if stale {
                    return Ok(None);
                }
                named.digest.clone()
            }
            digest => digest.unwrap_or_default().to_owned(),
        };
        Ok(index.images.contains_key(&digest).then(|| self.add_pin(all, owner, digest, pins)))
    }

    fn add_pin<'a>(
        &'a self,
        mut all: MutexGuard<'a, BTreeMap<(String, String), usize>>,
        owner: ImageOwner<'_>,
        digest: String,
        pins: &mut PinnedImages<'a>,
    ) -> String {
        let key = (owner.name.to_owned(), digest.clone());
        *all.entry(key.clone()).or_default() += 1;
        pins.0.push((self, key));
        digest
    }

    /// Pulls an image, and returns its digest.
    fn fetch<'a>(
        &'a self,
        owner: ImageOwner<'_>,
        source: ImageSource<'_>,
        pins: &mut PinnedImages<'a>,
        progress: ProgressFn<'_>,
    ) -> Result<String, String> {
        // Operators have no quota that two simultaneous pulls could exceed.
        let line = owner.tenant.map(|_| self.queue_position(owner.name)).transpose()?;
        let _permit = line.as_deref().map(lock);
        if self.stopping.load(Ordering::Relaxed) {
            return Err(skopeo::STOPPED.to_owned());
        }
        let name = label(source);
        let report = &mut |bytes: u64| {
            let what = match bytes {
                0 => format!("getting image {name}"),
                _ => format!("getting image {name}: {:.1} MiB", bytes as f64 / f64::from(1 << 20)),
            };
            progress(Progress { done: 0, total: 1, what });
        };
        report(0);
        let result = match source {
            ImageSource::Archive(path, tag, digest) => {
                self.read_archive(owner, path.as_ref(), tag, digest)
            }
            ImageSource::Pull(name, digest) => ImageName::parse(name)
                .map_err(|why| format!("image {name:?} {why}"))
                .and_then(|name| self.pull_name(owner, &name, digest, report)),
            ImageSource::Host | ImageSource::Rootfs(_) | ImageSource::OciLayout(..) => {
                Err("only pulled images and archives are stored".into())
            }
        };
        let digest = result.map_err(|why| format!("image {name}: {why}"))?;
        Ok(self.add_pin(lock(&self.pinned), owner, digest, pins))
    }

    /// Takes a position in a tenant's queue.
    fn queue_position(&self, tenant: &str) -> Result<Arc<Mutex<()>>, String> {
        let mut lines = lock(&self.bringing);
        // While this is locked, nobody can take another position.
        lines.retain(|_, line| Arc::strong_count(line) > 1);
        let in_line = |line: &Arc<Mutex<()>>| Arc::strong_count(line) - 1;
        let own = lines.get(tenant).map_or(0, in_line);
        let all: usize = lines.values().map(in_line).sum();
        if own >= TENANT_LINE_MAX || all >= TENANTS_LINE_MAX {
            let max = if own >= TENANT_LINE_MAX { TENANT_LINE_MAX } else { TENANTS_LINE_MAX };
            return Err(format!("the limit of {max} images at a time is reached; try again"));
        }
        Ok(lines.entry(tenant.to_owned()).or_default().clone())
    }

    /// Returns what an owner may still store.
    fn remaining_quota(&self, owner: ImageOwner<'_>) -> Result<ImageLimits, String> {
        let Some(tenant) = owner.tenant else {
            return Ok(ImageLimits { bytes: 2 * UNPACKED_BYTES_MAX, files: u64::MAX });
        };
        let bytes = tenant.quota.images.map_or(TENANT_IMAGES_DEFAULT, |bytes| bytes.0);
        let files = tenant.quota.image_files.map_or(TENANT_IMAGE_FILES_DEFAULT, u64::from);
        let index = self.index(owner.name)?;
        let (bytes, files) =
            (bytes.saturating_sub(index.bytes()), files.saturating_sub(index.files()));
        let used_up = match (bytes, files) {
            (0, _) => "images",
            (_, 0) => "imageFiles",
            _ => return Ok(ImageLimits { bytes, files }),
        };
        Err(format!("the quota `{used_up}` is used up; `pdp images prune` removes unused images"))
    }

    fn read_archive(
        &self,
        owner: ImageOwner<'_>,
        path: &Path,
        tag: Option<&str>,
        digest: Option<&str>,
    ) -> Result<String, String> {
        let room = self.remaining_quota(owner)?;
        let stamp = stamp(path).map_err(|error| error.to_string())?;
        let work = self.store.begin(0).map_err(|error| self.reason(&error))?;
        let kept_free = self.settings.bounds.free_bytes;
        let free = free_bytes(&work.inbox()).map_err(|error| error.to_string())?;
        let free = free.saturating_sub(kept_free);
        if std::fs::metadata(path).is_ok_and(|meta| meta.len() > free) {
            return Err(skopeo::full(kept_free));
        }
        let bytes = room.bytes.min(UNPACKED_BYTES_MAX).min(free);
        let converted = self.store.convert(owner.name, path, tag, &work, bytes);
        converted.map_err(|error| self.reason(&error))?;
        let name = (&*archive_name(path, tag), Some(stamp));
        self.store
            .store_image(owner.name, name, &work, digest, room)
            .map_err(|error| self.reason(&error))
    }

    fn pull_name(
        &self,
        owner: ImageOwner<'_>,
        name: &ImageName,
        pinned: Option<&str>,
        report: &mut dyn FnMut(u64),
    ) -> Result<String, String> {
        let room = self.remaining_quota(owner)?;
        let (slot, uid) = self.slot(owner.name)?;
        let work = self.store.begin(uid).map_err(|error| self.reason(&error))?;
        let _place =
            self.workplace.enter_cgroup(owner.name).map_err(|error| self.reason(&error))?;
        let mut bounds = self.settings.bounds;
        bounds.bytes = bounds.bytes.min(room.bytes);
        let job = SkopeoJob {
            skopeo: &self.settings.skopeo,
            pdpd: &self.settings.pdpd,
            registry: &name.registry,
            allowed: allowed(owner, name),
            uid,
            work: &work,
            cgroup: format!("{}/pull-{}", work::cgroup(owner.name), slot.1),
            cgroups: &self.cgroups,
            bounds,
            stopping: &self.stopping,
        };
        let how = self.arguments(owner, name, &job)?;
        // By the digest alone if it is known.
        let repository = name.repository();
        let reference = match (pinned.or(name.digest.as_deref()), &name.tag) {
            (Some(digest), _) => format!("docker://{repository}@{digest}"),
            (None, Some(tag)) => format!("docker://{repository}:{tag}"),
            (None, None) => format!("docker://{repository}"),
        };
        let mut words = how.global.clone();
        words.extend(["inspect".into(), "--raw".into()]);
        words.extend(how.options(""));
        words.push(reference);
        let manifest = job.run(&words, report)?;
        let of_bytes = format!("sha256:{}", hex(&Sha256::digest(&manifest)));
        if let Some(digest) = pinned.or(name.digest.as_deref()).filter(|it| *it != of_bytes) {
            // The response may come from another service. Nobody shall learn its hash.
            tracing::warn!("image {name}: the registry sends {of_bytes} for {digest}");
            return Err("the registry sends a different manifest than requested".to_owned());
        }
        let digest = image::of_index(&manifest)?.unwrap_or(of_bytes);
        if !is_digest(&digest) {
            tracing::warn!("image {name}: its index names {digest:?}, which is not a digest");
            return Err("its index names an invalid digest".to_owned());
        }
        let whole = name.to_string();
        if self.index(owner.name)?.images.contains_key(&digest) {
            self.store.name(owner.name, &whole, &digest).map_err(|error| self.reason(&error))?;
            return Ok(digest);
        }
        let mut words = how.global.clone();
        words.extend(["copy".into(), "--quiet".into(), "--preserve-digests".into()]);
        words.extend(how.options("src-"));
        words.push(format!("docker://{repository}@{digest}"));
        words.push(format!("dir:{}", work.inbox().display()));
        job.run(&words, report)?;
        self.store
            .store_image(owner.name, (&whole, None), &work, Some(&digest), room)
            .map_err(|error| self.reason(&error))
    }

    /// Returns the options with which skopeo reaches a registry.
    fn arguments(
        &self,
        owner: ImageOwner<'_>,
        name: &ImageName,
        job: &SkopeoJob<'_>,
    ) -> Result<RegistryAccess, String> {
        let give = |file: &str, content: &[u8]| {
            job.give(file, content).map_err(|error| format!("{file}: {error}"))
        };
        // The registry's certificate and the digest establish trust.
        let policy = give("policy.json", br#"{"default": [{"type": "insecureAcceptAnything"}]}"#)?;
        let mut global = vec!["--policy".to_owned(), policy.display().to_string()];
        global.extend(["--override-os", "linux", "--override-arch", "amd64"].map(str::to_owned));
        global.extend(["--tmpdir".to_owned(), job.work.scratch().display().to_string()]);
        let may = owner.tenant.is_none_or(|tenant| tenant.registry_auth);
        let auth = match self.settings.auth.as_ref().filter(|_| may) {
            Some(path) => {
                let fail = |why: String| {
                    // Tenants must not learn the path.
                    tracing::warn!("--registry-auth {}: {why}", path.display());
                    "the daemon's credentials for registries can't be read; see its log".to_owned()
                };
                let text = std::fs::read(path).map_err(|error| fail(error.to_string()))?;
                let found = skopeo::credentials(&text, &name.repository()).map_err(fail)?;
                found.map(|found| give("auth.json", found.to_string().as_bytes())).transpose()?
            }
            None => None,
        };
        let certs = self.settings.certs.as_ref().map(|certs| certs.join(&name.registry));
        Ok(RegistryAccess { global, auth, certs: certs.filter(|certs| certs.is_dir()) })
    }

    fn slot(&self, owner: &str) -> Result<(PullUserId<'_>, u32), String> {
        let free = lock(&self.slots).take(owner);
        let free =
            free.ok_or_else(|| format!("the limit of {PULLS_MAX} pulls at a time is reached"))?;
        Ok((PullUserId(self, free), UID_BASE + 1 + free))
    }
}

/// User ids of pulls: those in use, and the last owner of each.
#[derive(Debug, Default)]
struct PullUserIds {
    taken: BTreeSet<u32>,
    owners: BTreeMap<u32, String>,
}

impl PullUserIds {
    /// Takes an id that this owner had before, else an unused one, else one of a deleted owner.
    fn take(&mut self, owner: &str) -> Option<u32> {
        let of = |whose: Option<&str>| {
            let is_whose = |slot: &u32| self.owners.get(slot).map(String::as_str) == whose;
            (0..PULLS_MAX).find(|slot| !self.taken.contains(slot) && is_whose(slot))
        };
        let slot = of(Some(owner)).or_else(|| of(None)).or_else(|| of(Some(GONE)))?;
        self.taken.insert(slot);
        self.owners.insert(slot, owner.to_owned());
        Some(slot)
    }

    /// Frees the ids of deleted owners for others.
    fn keep_only(&mut self, is_there: impl Fn(&str) -> bool) {
        for owner in self.owners.values_mut().filter(|owner| !is_there(owner)) {
            GONE.clone_into(owner);
        }
    }
}

/// Hint for images that can't be pulled.
const HINT: &str = "see docs/images.md for names, credentials, certificates and quotas";

/// Options with which skopeo reaches a registry.
struct RegistryAccess {
    global: Vec<String>,
    auth: Option<PathBuf>,
    certs: Option<PathBuf>,
}

impl RegistryAccess {
    /// Returns skopeo's options, with this prefix in their names.
    fn options(&self, prefix: &str) -> Vec<String> {
        let mut words = match &self.auth {
            Some(auth) => vec![format!("--{prefix}authfile"), auth.display().to_string()],
            None => vec![format!("--{prefix}no-creds")],
        };
        if let Some(certs) = &self.certs {
            words.extend([format!("--{prefix}cert-dir"), certs.display().to_string()]);
        }
        words
    }
}

/// Returns `HOST:PORT` of the registries that a pull may reach at
/// private addresses too. These are its own registry and those from
/// which its owner may pull everything, not only names below a path.
fn allowed(owner: ImageOwner<'_>, name: &ImageName) -> Vec<String> {
    let granted = owner.tenant.into_iter().flat_map(|tenant| &tenant.registries);
    let whole = granted.filter(|prefix| !prefix.trim_end_matches('/').contains('/'));
    let names = whole.map(String::as_str).chain([&*name.registry]);
    names.map(skopeo::host_and_port).collect()
}

/// Resolves the owner of images in a request: a tenant with its spec, or `None` for the operators.
fn resolve_owner<'a>(
    scope: &'a AccessScope,
    tenant: Option<&'a str>,
    model: &'a Model,
) -> Result<Option<(&'a str, &'a TenantSpec)>, Problem> {
    let Some(name) = tenant.or(scope.tenant()) else { return Ok(None) };
    let may = scope.tenant().is_none_or(|own| own == name);
    match model.tenants.get(name).filter(|_| may) {
        Some(tenant) => Ok(Some((name, &tenant.spec))),
        None => {
            Err(Problem::not_found(format!("no tenant {name:?}"))
                .hint("`pdp get tenants` lists them"))
        }
    }
}

/// Returns the name under which an image is stored.
fn name_of(source: ImageSource<'_>) -> Result<String, String> {
    match source {
        ImageSource::Pull(name, _) => ImageName::parse(name).map(|name| name.to_string()),
        ImageSource::Archive(path, tag, _) => Ok(archive_name(path.as_ref(), tag)),
        _ => Err("only pulled images and archives are stored".into()),
    }
}

fn archive_name(path: &Path, tag: Option<&str>) -> String {
    let tag = tag.map_or(String::new(), |tag| format!(":{tag}"));
    // Normalized: `/a//b/./c` is `/a/b/c`.
    let path: PathBuf = path.components().collect();
    format!("archive:{}{tag}", path.display())
}

/// Returns the name of an image that users know.
fn label(source: ImageSource<'_>) -> String {
    match source {
        ImageSource::Archive(path, ..) => path.to_owned(),
        other => name_of(other).unwrap_or_default(),
    }
}

/// Returns a fingerprint of a file, which changes when the file is written.
fn stamp(path: &Path) -> std::io::Result<String> {
    let meta = std::fs::metadata(path)?;
    let (seconds, ns) = (meta.mtime(), meta.mtime_nsec());
    Ok(format!("{}:{}:{}:{seconds}.{ns}", meta.dev(), meta.ino(), meta.len()))
}

/// Returns the hint for images that can't be read.
fn mend(place: &Path) -> String {
    format!("`rm -r {}` removes them, and the next apply fetches them again", place.display())
}

/// Returns the nodes that use an owner's images, by the images' digests.
fn used(owner: &str, model: &Model) -> BTreeMap<String, Vec<String>> {
    let mut used: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (name, vnet) in model.vnets.iter().filter(|(name, _)| image_owner_of(name) == owner) {
        for (node, of) in &vnet.spec.nodes {
            for image in of.images() {
                let source = image.source();
                let Some(digest) = source.stored_digest() else { continue };
                used.entry(digest.to_owned()).or_default().push(format!("{name}/{node}"));
            }
        }
    }
    used
}

/// Finds the digest of an image that a user named.
fn find(index: &ImageStoreIndex, image: &str) -> Result<String, Problem> {
    let name = ImageName::parse(image).map(|name| name.to_string());
    let named = [Some(image.to_owned()), name.ok()].into_iter().flatten();
    if let Some(named) = { named }.find_map(|name| index.names.get(&name)) {
        return Ok(named.digest.clone());
    }
    let hex = image.strip_prefix("sha256:").unwrap_or(image);
    let begins = |digest: &&String| {
        hex.len() >= 6 && digest.strip_prefix("sha256:").is_some_and(|d| d.starts_with(hex))
    };
    let found: Vec<&String> = index.images.keys().filter(begins).collect();
    match found[..] {
        [digest] => Ok(digest.clone()),
        [] => {
            let problem = Problem::not_found(format!("no image {image:?}"));
            Err(problem.hint("`pdp images` lists them"))
        }
        _ => {
            let problem = format!("{} images begin with {image}", found.len());
            Err(Problem::new(ProblemKind::Invalid, problem).hint("give more of the digest"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn images(directory: &Path) -> Images {
        let at = |name: &str| directory.join(name);
        let paths = RuntimePaths {
            runc: at("runc"),
            shim: at("shim"),
            init: at("init"),
            work: at("work"),
            records: at("records"),
            runc_root: at("runc-root"),
            logs: at("logs"),
            images: at("images"),
            volumes: at("volumes"),
            cgroup: "pdp-images-test".into(),
        };
        let cgroups = Cgroups::new(&paths.cgroup).unwrap();
        Images::open(&paths, cgroups, Workplace::in_this_process()).unwrap()
    }

    /// A file that a pull left never belongs to another owner, as with user ids of vnets.
    #[test]
    fn pull_user_ids_stay_with_their_owners() {
        let mut slots = PullUserIds::default();
        let first = slots.take("acme").unwrap();
        slots.taken.remove(&first);
        let others: BTreeSet<u32> = (1..PULLS_MAX).filter_map(|_| slots.take("other")).collect();
        assert!(others.len() == PULLS_MAX as usize - 1 && !others.contains(&first));
        assert_eq!(slots.take("other"), None);
        assert_eq!(slots.take("acme"), Some(first));
        slots.taken.remove(&first);
        slots.keep_only(|owner| owner == "other");
        assert_eq!(slots.take("new"), Some(first), "all others are in use");
    }

    #[test]
    fn pull_queue_is_limited_per_tenant() {
        let directory = tempfile::tempdir().unwrap();
        let images = images(directory.path());
        let mut lines = Vec::new();
        let mut take = |tenant: &str| images.queue_position(tenant).map(|line| lines.push(line));
        for _ in 0..TENANT_LINE_MAX {
            take("acme").unwrap();
        }
        assert!(take("acme").unwrap_err().contains(&TENANT_LINE_MAX.to_string()));
        let others =
            (0..2 * TENANTS_LINE_MAX).map(|number| format!("t{}", number / TENANT_LINE_MAX));
        let taken = others.take_while(|tenant| take(tenant).is_ok()).count();
        assert_eq!(taken, TENANTS_LINE_MAX - TENANT_LINE_MAX);
        lines.pop();
        assert!(images.queue_position("new").is_ok(), "a place is free again");
    }

    #[test]
    fn archive_name_is_independent_of_path_spelling() {
        let name = |path: &str| archive_name(Path::new(path), Some("a:1"));
        for path in ["/srv//acme/./a.tar", "/srv/acme////././a.tar/", "/srv/acme/a.tar"] {
            assert_eq!(name(path), "archive:/srv/acme/a.tar:a:1");
        }
        assert_ne!(name("/srv/acme/../a.tar"), name("/srv/a.tar"));
    }

    /// One owner's unreadable images affect no other owner. No tenant
    /// learns the path of the state directory.
    #[test]
    fn unreadable_images_are_reported_to_their_owner_only() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        let store = at("images").join(image::STORE);
        let digest = format!("sha256:{}", "5e".repeat(32));
        let index = serde_json::json!({"images": {&digest: {}}, "names": {}}).to_string();
        for (owner, text) in [("acme", "{"), ("other", index.as_str()), (NODE, index.as_str())] {
            std::fs::create_dir_all(store.join(owner).join("5e".repeat(32))).unwrap();
            std::fs::write(store.join(owner).join("index.json"), text).unwrap();
        }
        let images = images(directory.path());
        let mut model = Model::default();
        let tenant: pdp_spec::Tenant = serde_json::from_value(serde_json::json!({
            "apiVersion": "pdp/v1", "metadata": {"name": "acme"}, "spec": {}
        }))
        .unwrap();
        Arc::make_mut(&mut model.tenants).insert("acme".into(), tenant);
        let listed = images.list(&AccessScope::Node, &model).unwrap();
        assert_eq!(listed.len(), 3);
        let problem = listed[1].problem.as_ref().unwrap();
        let removes = format!("rm -r {}", store.join("acme").display());
        assert!(listed[1].tenant.as_deref() == Some("acme") && problem.contains(&removes));
        let hidden = |text: &str| {
            assert!(!text.contains(&*directory.path().to_string_lossy()), "{text}");
        };
        let scope = AccessScope::Tenant("acme".into());
        let own = images.list(&scope, &model).unwrap();
        hidden(own[0].problem.as_ref().unwrap());
        let query = ImageQuery::default();
        let now = Arc::new(model);
        let error = images.remove(&scope, "5e5e5e", &query, &|| now.clone()).unwrap_err();
        hidden(&error.error);
        assert!(error.error.contains("STATE/images/store/acme/index.json"), "{}", error.error);
        assert_eq!(images.prune(&scope, &query, &|| now.clone()).unwrap(), []);
        // The images of a deleted tenant are removed though they can't be read.
        assert_eq!(images.forget_others(&|| Arc::new(Model::default())), Ok(()));
        assert_eq!(images.owners(), [NODE]);
    }
}
