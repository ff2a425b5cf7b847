//! Unpacked images: one directory for each digest, shared by all guests.
//!
//! Each owner unpacks into a temporary directory of its own, in its own cgroup ([`crate::work`]),
//! so that no owner waits for another. The first complete one is renamed to the image's name. The
//! other owners then find it and drop theirs.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::{PART, STORE, failed, manifest};
use crate::error::{ErrorContext, Result};
use crate::safe_removal;
use crate::spec::bundle;
use crate::work::{WorkOrder, Workplace};

/// Largest number of images that [`begin`] unpacks for one owner at a time.
pub const UNPACKING_MAX: usize = 2;

/// Time for which the result of [`begin`], an image or the reason of its failure, is kept for a
/// guest.
const KEPT_FOR_GUEST: Duration = Duration::from_secs(60);

/// Paths of images and temporary directories that some thread makes, links or removes.
static BUSY: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());
static FREE: Condvar = Condvar::new();

/// Images that [`begin`] unpacks or has just unpacked, by the path of the temporary directory.
static JOBS: Mutex<BTreeMap<PathBuf, UnpackJob>> = Mutex::new(BTreeMap::new());

struct UnpackJob {
    owner: String,
    root: PathBuf,
    state: UnpackJobState,
}

enum UnpackJobState {
    Runs,
    Ended(Instant, std::result::Result<(), String>),
}

/// Exclusive use of one path for making, linking or removing.
struct Claim(PathBuf);

impl Claim {
    /// Waits until no other thread uses the path.
    fn wait(path: &Path) -> Self {
        let mut busy = lock(&BUSY);
        while !busy.insert(path.to_owned()) {
            busy = FREE.wait(busy).unwrap_or_else(PoisonError::into_inner);
        }
        Self(path.to_owned())
    }

    fn try_now(path: &Path) -> Option<Self> {
        lock(&BUSY).insert(path.to_owned()).then(|| Self(path.to_owned()))
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        lock(&BUSY).remove(&self.0);
        FREE.notify_all();
    }
}

/// Unpacks an image below `images` if it does not exist, and returns its root. Only one process at
/// a time may do so.
pub fn unpack(layout: &Path, reference: Option<&str>, images: &Path) -> Result<PathBuf> {
    unpack_then(layout, reference, images, (&Workplace::in_this_process(), ""), |_| Ok(()))
}

/// Unpacks an image for a guest. Makes `link` a link to it. The image is kept as long as the link
/// exists. The work runs for an owner.
pub(crate) fn unpack_for(
    link: &Path,
    (layout, reference): (&Path, Option<&str>),
    images: &Path,
    by: (&Workplace, &str),
) -> Result<PathBuf> {
    unpack_then(layout, reference, images, by, |root| symlink(root, link).at("link", link))
}

/// Begins to unpack an image for an owner, and returns at once. Returns true if it is already
/// unpacked. Does nothing while the owner has [`UNPACKING_MAX`] images in progress.
///
/// # Errors
/// Cause of a failed unpacking. The next call tries again.
pub(crate) fn begin(
    layout: &Path,
    reference: Option<&str>,
    images: &Path,
    (workplace, owner): (&Workplace, &str),
) -> Result<bool> {
    let (digest, _) = manifest(layout, reference)?;
    let root = root_of(images, &digest);
    if root.is_dir() {
        return Ok(true);
    }
    let part = part_of(&root, owner);
    let mut jobs = lock(&JOBS);
    forget_old(&mut jobs);
    match jobs.get(&part).map(|job| &job.state) {
        Some(UnpackJobState::Runs) => return Ok(false),
        // It has been removed since.
        Some(UnpackJobState::Ended(_, Ok(()))) | None => {}
        Some(UnpackJobState::Ended(_, Err(text))) => {
            let error = failed(layout, text.clone());
            jobs.remove(&part);
            return Err(error);
        }
    }
    let runs = |job: &&UnpackJob| job.owner == owner && matches!(job.state, UnpackJobState::Runs);
    if jobs.values().filter(runs).count() >= UNPACKING_MAX {
        return Ok(false);
    }
    let (workplace, layout) = (workplace.clone(), layout.to_owned());
    let (reference, of) = (reference.map(str::to_owned), owner.to_owned());
    let (root, place) = (root, part.clone());
    let job =
        UnpackJob { owner: owner.to_owned(), root: root.clone(), state: UnpackJobState::Runs };
    let work = move || {
        let done = make(&layout, (reference.as_deref(), &digest), &root, (&workplace, &of));
        if let Some(job) = lock(&JOBS).get_mut(&place) {
            job.state = UnpackJobState::Ended(Instant::now(), done);
        }
    };
    std::thread::Builder::new()
        .name("unpack".into())
        .spawn(work)
        .at("begin a thread for", &part)?;
    jobs.insert(part, job);
    Ok(false)
}

/// Removes everything in `images` that no guest runs on, and incomplete images. `guests` returns
/// the directories of guests. Keeps [`STORE`], and images that are being unpacked or will be used
/// soon.
pub(crate) fn collect(images: &Path, guests: impl Fn() -> Result<Vec<PathBuf>>) -> Result<()> {
    let found = fs::read_dir(images).at("read", images)?;
    let found: io::Result<Vec<PathBuf>> = found.map(|entry| Ok(entry?.path())).collect();
    let mut found = found.at("read", images)?;
    found.retain(|path| !path.ends_with(STORE));
    if found.is_empty() {
        return Ok(());
    }
    let used = || -> Result<BTreeSet<PathBuf>> {
        let used = |dir: &PathBuf| fs::read_link(bundle(dir).join(super::LINK)).ok();
        Ok(guests()?.iter().filter_map(used).collect())
    };
    let before = used()?;
    found.retain(|path| !before.contains(path));
    let soon: BTreeSet<PathBuf> = {
        let mut jobs = lock(&JOBS);
        forget_old(&mut jobs);
        jobs.values().map(|job| job.root.clone()).collect()
    };
    found.retain(|path| !soon.contains(path));
    for path in found {
        let Some(_claim) = Claim::try_now(&path) else { continue };
        if !used()?.contains(&path) {
            discard(&path)?;
        }
    }
    Ok(())
}

/// Forgets jobs that no guest asked about in time.
fn forget_old(jobs: &mut BTreeMap<PathBuf, UnpackJob>) {
    jobs.retain(|_, job| match job.state {
        UnpackJobState::Runs => true,
        UnpackJobState::Ended(at, _) => at.elapsed() < KEPT_FOR_GUEST,
    });
}

/// Removes an image or temporary directory. From the first step on, it no longer has the name of a
/// complete image.
fn discard(path: &Path) -> Result<()> {
    let mut part = path.as_os_str().to_owned();
    if !path.as_os_str().as_bytes().ends_with(PART.as_bytes()) {
        part.push(PART);
        safe_removal::remove(Path::new(&part))?;
        fs::rename(path, &part).at("rename", path)?;
    }
    safe_removal::remove(Path::new(&part))
}

/// Unpacks an image if it does not exist, and calls `then` with its root before another thread can
/// remove it.
fn unpack_then(
    layout: &Path,
    reference: Option<&str>,
    images: &Path,
    by: (&Workplace, &str),
    then: impl FnOnce(&Path) -> Result<()>,
) -> Result<PathBuf> {
    let (digest, _) = manifest(layout, reference)?;
    let root = root_of(images, &digest);
    loop {
        {
            let _claim = Claim::wait(&root);
            if root.is_dir() {
                then(&root)?;
                return Ok(root);
            }
        }
        // If it is removed before it is claimed, unpack it again.
        make(layout, (reference, &digest), &root, by).map_err(|text| failed(layout, text))?;
    }
}

/// Unpacks an image if it does not exist.
fn make(
    layout: &Path,
    (reference, digest): (Option<&str>, &str),
    root: &Path,
    (workplace, owner): (&Workplace, &str),
) -> std::result::Result<(), String> {
    let part = part_of(root, owner);
    let _claim = Claim::wait(&part);
    if root.is_dir() {
        return Ok(());
    }
    if let Some(images) = root.parent() {
        fs::create_dir_all(images).map_err(|error| format!("its directory: {error}"))?;
    }
    let order = WorkOrder::Unpack {
        layout: layout.to_owned(),
        reference: reference.map(str::to_owned),
        digest: digest.to_owned(),
        part,
        root: root.to_owned(),
    };
    workplace.run(owner, &order).map(drop)
}

fn root_of(images: &Path, digest: &str) -> PathBuf {
    images.join(digest.replace(':', "-"))
}

/// Returns the temporary directory in which an owner unpacks `root`.
fn part_of(root: &Path, owner: &str) -> PathBuf {
    let mut part = root.as_os_str().to_owned();
    part.push(OsStr::new("."));
    part.push(owner);
    part.push(PART);
    PathBuf::from(part)
}

fn lock<T>(mutex: &'static Mutex<T>) -> MutexGuard<'static, T> {
    // A panic leaves no incomplete image under a complete image's name.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
