//! Unpacked images: one directory for each digest, which all guests share.
//!
//! An owner unpacks into a part of its own, in its own cgroup ([`crate::work`]), so that no owner waits for another.
//! The first one that is done gives its part the image's name; the others find it there and drop theirs.

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
use crate::error::{Context, Result};
use crate::spec::bundle;
use crate::tree;
use crate::view;
use crate::work::{Order, Workplace};

/// Images that [`begin`] unpacks for one owner at a time.
pub const UNPACKING_MAX: usize = 2;

/// Time for which an image that [`begin`] unpacked, or the reason of its failure, waits for a guest.
const KEPT_FOR_GUEST: Duration = Duration::from_secs(60);

/// Paths of images and of parts that somebody makes, links or removes.
static BUSY: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());
static FREE: Condvar = Condvar::new();

/// Images that [`begin`] unpacks or has just unpacked, by the path of the part.
static JOBS: Mutex<BTreeMap<PathBuf, Job>> = Mutex::new(BTreeMap::new());

struct Job {
    owner: String,
    root: PathBuf,
    state: JobState,
}

enum JobState {
    Runs,
    Ended(Instant, std::result::Result<(), String>),
}

/// One path that nobody else makes, links or removes.
struct Claim(PathBuf);

impl Claim {
    /// Waits for who has it.
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

/// Unpacks an image below `images` unless it is there, and returns its root. One process at a time may do so.
pub fn unpack(layout: &Path, reference: Option<&str>, images: &Path) -> Result<PathBuf> {
    unpack_then(layout, reference, images, (&Workplace::in_this_process(), ""), |_| Ok(()))
}

/// The same for a guest: `link` is made a link to it, and it is kept as long as that is there. The work is done for
/// an owner.
pub(crate) fn unpack_for(
    link: &Path,
    (layout, reference): (&Path, Option<&str>),
    images: &Path,
    by: (&Workplace, &str),
) -> Result<PathBuf> {
    unpack_then(layout, reference, images, by, |root| symlink(root, link).at("link", link))
}

/// Begins to unpack an image for an owner, and returns at once: true if it is unpacked already. While an owner has
/// [`UNPACKING_MAX`] under way, nothing is begun.
///
/// # Errors
/// Why unpacking failed. The next call begins anew.
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
        Some(JobState::Runs) => return Ok(false),
        // Somebody has removed it since.
        Some(JobState::Ended(_, Ok(()))) | None => {}
        Some(JobState::Ended(_, Err(text))) => {
            let error = failed(layout, text.clone());
            jobs.remove(&part);
            return Err(error);
        }
    }
    let runs = |job: &&Job| job.owner == owner && matches!(job.state, JobState::Runs);
    if jobs.values().filter(runs).count() >= UNPACKING_MAX {
        return Ok(false);
    }
    let (workplace, layout) = (workplace.clone(), layout.to_owned());
    let (reference, of) = (reference.map(str::to_owned), owner.to_owned());
    let (root, place) = (root, part.clone());
    let job = Job { owner: owner.to_owned(), root: root.clone(), state: JobState::Runs };
    let work = move || {
        let done = make(&layout, (reference.as_deref(), &digest), &root, (&workplace, &of));
        if let Some(job) = lock(&JOBS).get_mut(&place) {
            job.state = JobState::Ended(Instant::now(), done);
        }
    };
    std::thread::Builder::new()
        .name("unpack".into())
        .spawn(work)
        .at("begin a thread for", &part)?;
    jobs.insert(part, job);
    Ok(false)
}

/// Removes what is in `images` and no whole image that a guest runs on, in the directories that `guests` returns; but
/// [`STORE`], and what somebody unpacks or will use soon.
pub(crate) fn collect(images: &Path, guests: impl Fn() -> Result<Vec<PathBuf>>) -> Result<()> {
    let there = fs::read_dir(images).at("read", images)?;
    let there: io::Result<Vec<PathBuf>> = there.map(|entry| Ok(entry?.path())).collect();
    let mut there = there.at("read", images)?;
    there.retain(|path| !path.ends_with(STORE));
    if there.is_empty() {
        return Ok(());
    }
    let used = || -> Result<BTreeSet<PathBuf>> {
        let used = |dir: &PathBuf| fs::read_link(bundle(dir).join(view::IMAGE)).ok();
        Ok(guests()?.iter().filter_map(used).collect())
    };
    let before = used()?;
    there.retain(|path| !before.contains(path));
    let soon: BTreeSet<PathBuf> = {
        let mut jobs = lock(&JOBS);
        forget_old(&mut jobs);
        jobs.values().map(|job| job.root.clone()).collect()
    };
    there.retain(|path| !soon.contains(path));
    for path in there {
        let Some(_claim) = Claim::try_now(&path) else { continue };
        if !used()?.contains(&path) {
            discard(&path)?;
        }
    }
    Ok(())
}

/// Forgets jobs that no guest asked about in time.
fn forget_old(jobs: &mut BTreeMap<PathBuf, Job>) {
    jobs.retain(|_, job| match job.state {
        JobState::Runs => true,
        JobState::Ended(at, _) => at.elapsed() < KEPT_FOR_GUEST,
    });
}

/// Removes an image, or a part of one; it is no whole one from the first step on.
fn discard(path: &Path) -> Result<()> {
    let mut part = path.as_os_str().to_owned();
    if !path.as_os_str().as_bytes().ends_with(PART.as_bytes()) {
        part.push(PART);
        tree::remove(Path::new(&part))?;
        fs::rename(path, &part).at("rename", path)?;
    }
    tree::remove(Path::new(&part))
}

/// Unpacks an image unless it is there, and does something with its root before anybody can remove it.
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
        // Somebody may remove it before it is claimed: then it is unpacked once more.
        make(layout, (reference, &digest), &root, by).map_err(|text| failed(layout, text))?;
    }
}

/// Unpacks an image unless it is there.
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
    let order = Order::Unpack {
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

/// Where an owner unpacks what becomes `root`.
fn part_of(root: &Path, owner: &str) -> PathBuf {
    let mut part = root.as_os_str().to_owned();
    part.push(OsStr::new("."));
    part.push(owner);
    part.push(PART);
    PathBuf::from(part)
}

fn lock<T>(mutex: &'static Mutex<T>) -> MutexGuard<'static, T> {
    // A panic leaves nothing under a whole image's name.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
