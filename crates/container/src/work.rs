//! Work that the daemon does for an owner outside of its guests: reading an archive, checking or
//! unpacking an image, making a volume's file system.
//!
//! Each piece of work is a process of its own (`pdp-work`). It runs in its owner's cgroup. The
//! owner's limits therefore apply to its CPU time, memory and disk bandwidth, and no other owner
//! waits for it. The process keeps only the capabilities needed for files of other users, and has
//! an empty network namespace. If the kernel has Landlock, it can only read and write the paths of
//! its order. The daemon writes the order once the process is in its cgroup.
//!
//! Limits: [`TIME_MAX`], and [`limits`] for all work of one owner together.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use landlock::{
    ABI, Access, AccessFs, CompatLevel, Compatible, Ruleset, RulesetAttr, RulesetCreatedAttr,
    path_beneath_rules,
};
use nix::sched::{CloneFlags, unshare};
use rustix::process::{Resource, Rlimit, Signal, set_parent_process_death_signal, setrlimit};
use rustix::thread::{
    CapabilitySet, CapabilitySets, remove_capability_from_bounding_set, set_capabilities,
    set_no_new_privs,
};
use serde::{Deserialize, Serialize};

use crate::cgroup::Cgroups;
use crate::error::{Error, error_chain};
use crate::image::{self, ImageLimits, StoredImage};
use crate::process::{end_within, wait_child};
use crate::spec::Limits;
use crate::status::sanitize;
use crate::volumes;

/// Longest time for one piece of work.
pub const TIME_MAX: Duration = Duration::from_secs(1800);

/// The cgroup above those of all owners. The cgroups of vnets are elsewhere.
pub const CGROUP: &str = "work";

/// CPU weight of all work together, relative to networks and mux, thousandths of a core. Guaranteed
/// power comes first.
const WEIGHT_MILLICORES: u32 = 100;

/// Interval at which the daemon checks for its own end and for a timeout.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// Largest order and largest answer, bytes.
const TEXT_BYTES_MAX: u64 = 1 << 20;

/// Largest reason of a failed order, bytes.
const REASON_BYTES_MAX: usize = 4096;

/// Capabilities for unpacking files of other owners and modes. No device nodes, no mounts, no
/// network.
const CAPABILITIES: CapabilitySet = CapabilitySet::CHOWN
    .union(CapabilitySet::DAC_OVERRIDE)
    .union(CapabilitySet::FOWNER)
    .union(CapabilitySet::FSETID);

/// Limits of all work of one owner together.
pub fn limits() -> Limits {
    Limits {
        cpu_cores: Some(1.0),
        cpu_weight: Some(100),
        memory_bytes: Some(512 << 20),
        processes: Some(128),
        io_weight: Some(50),
        ..Limits::default()
    }
}

/// Name of the cgroup of an owner's work, below the runtime's own.
pub fn cgroup(owner: &str) -> String {
    format!("{CGROUP}/_{owner}")
}

/// A piece of work.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum WorkOrder {
    /// Runs [`image::convert`].
    Convert { archive: PathBuf, tag: Option<String>, into: PathBuf, bytes_max: u64 },
    /// Makes a checked layout from the contents of an inbox.
    Take { inbox: PathBuf, layout: PathBuf, wanted: Option<String>, room: ImageLimits },
    /// Unpacks the image with this digest.
    Unpack {
        layout: PathBuf,
        reference: Option<String>,
        digest: String,
        part: PathBuf,
        root: PathBuf,
    },
    /// Makes an ext4 file system in a file.
    MakeFileSystem { file: PathBuf },
}

/// Result of an order.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum WorkResult {
    Nothing,
    Taken(String, StoredImage),
}

impl WorkOrder {
    /// Performs the order in this process.
    fn perform(&self) -> std::result::Result<WorkResult, String> {
        match self {
            Self::Convert { archive, tag, into, bytes_max } => {
                image::convert(archive, tag.as_deref(), into, *bytes_max).map_err(reason)?;
                Ok(WorkResult::Nothing)
            }
            Self::Take { inbox, layout, wanted, room } => {
                let taken = image::make_layout(inbox, layout, wanted.as_deref(), *room);
                taken
                    .map(|(digest, kept)| WorkResult::Taken(digest, kept))
                    .map_err(|error| error.to_string())
            }
            Self::Unpack { layout, reference, digest, part, root } => {
                image::unpack_alone(layout, (reference.as_deref(), digest), (part, root))
                    .map_err(reason)?;
                Ok(WorkResult::Nothing)
            }
            Self::MakeFileSystem { file } => {
                volumes::make_file_system(file).map_err(|error| error.to_string())?;
                Ok(WorkResult::Nothing)
            }
        }
    }

    /// Returns the paths that the order reads, and the paths below which it writes.
    fn paths(&self) -> (Vec<&Path>, Vec<&Path>) {
        match self {
            Self::Convert { archive, into, .. } => (vec![archive], vec![into]),
            Self::Take { inbox, layout, .. } => {
                // The order moves files between the two, through a directory above both.
                (vec![], vec![layout.parent().unwrap_or(layout), inbox])
            }
            Self::Unpack { layout, root, .. } => {
                (vec![layout], vec![root.parent().unwrap_or(root)])
            }
            // mke2fs(8) reads libraries and the list of mounts.
            Self::MakeFileSystem { file } => {
                (vec![Path::new("/")], vec![file, Path::new("/dev/null")])
            }
        }
    }
}

/// Returns the reason of an error, without paths of the machine.
fn reason(error: Error) -> String {
    match error {
        Error::Image { text, .. } => text,
        Error::Io { what, source, .. } => format!("{what} it: {source}"),
        other => error_chain(&other),
    }
}

/// Runs work for owners.
#[derive(Clone, Debug)]
pub struct Workplace {
    /// `pdp-work` and the cgroups; `None`: this process does the work.
    isolated: Option<Arc<IsolatedWork>>,
}

#[derive(Debug)]
struct IsolatedWork {
    program: PathBuf,
    cgroups: Cgroups,
    /// Number of running pieces of work by owner. The owner's cgroup is removed with the last one.
    busy: Mutex<BTreeMap<String, usize>>,
    stopping: AtomicBool,
}

/// An owner's cgroup while work runs in it.
#[derive(Debug)]
pub struct WorkCgroup<'a> {
    isolated: &'a IsolatedWork,
    owner: String,
}

impl Drop for WorkCgroup<'_> {
    fn drop(&mut self) {
        let mut busy = lock(&self.isolated.busy);
        let Some(count) = busy.get_mut(&self.owner) else { return };
        *count -= 1;
        if *count == 0 {
            busy.remove(&self.owner);
            // The kernel may still count a process that has just ended. The owner's next work, or
            // the end of the daemon's cgroup, then removes the cgroup.
            let cgroup = cgroup(&self.owner);
            let _ = self.isolated.cgroups.try_remove(&cgroup);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Workplace {
    /// Returns a runner that starts `program` in these cgroups.
    pub fn new(program: PathBuf, cgroups: Cgroups) -> Self {
        let (busy, stopping) = (Mutex::default(), AtomicBool::default());
        Self { isolated: Some(Arc::new(IsolatedWork { program, cgroups, busy, stopping })) }
    }

    /// Returns a runner that works in the caller's thread, with all its rights and without limits.
    /// For tests and fuzzing of the work itself.
    pub fn in_this_process() -> Self {
        Self { isolated: None }
    }

    /// Ends running work, and refuses more.
    pub fn stop(&self) {
        if let Some(apart) = &self.isolated {
            apart.stopping.store(true, Ordering::Relaxed);
        }
    }

    /// Makes the owner's cgroup with its limits, until the result is dropped. Returns `None` if
    /// this process does the work.
    ///
    /// # Errors
    /// The machine's cgroups refuse.
    pub fn enter_cgroup(&self, owner: &str) -> crate::Result<Option<WorkCgroup<'_>>> {
        let Some(apart) = &self.isolated else { return Ok(None) };
        let mut busy = lock(&apart.busy);
        apart.cgroups.weigh(CGROUP, WEIGHT_MILLICORES)?;
        apart.cgroups.ensure(&cgroup(owner), &limits())?;
        *busy.entry(owner.to_owned()).or_default() += 1;
        Ok(Some(WorkCgroup { isolated: apart, owner: owner.to_owned() }))
    }

    /// Does a piece of work for an owner, and waits for it.
    ///
    /// # Errors
    /// Cause of the failure, without paths of the machine.
    pub(crate) fn run(
        &self,
        owner: &str,
        order: &WorkOrder,
    ) -> std::result::Result<WorkResult, String> {
        match self.enter_cgroup(owner).map_err(|error| error_chain(&error))? {
            Some(place) => place.run(order),
            None => order.perform(),
        }
    }
}

impl WorkCgroup<'_> {
    fn run(&self, order: &WorkOrder) -> std::result::Result<WorkResult, String> {
        let fail = |error: io::Error| format!("pdp-work: {error}");
        let mut child = self.start(order).map_err(fail)?;
        let watched = self.watch(&mut child);
        if watched.is_err() {
            let _ = child.kill();
        }
        let ended = end_within(&mut child, CHECK_INTERVAL);
        watched?;
        let mut text = Vec::new();
        if let Some(output) = child.stdout.take() {
            output.take(TEXT_BYTES_MAX).read_to_end(&mut text).map_err(fail)?;
        }
        match ended.map_err(fail)? {
            status if status.success() => {
                let done: std::result::Result<WorkResult, String> =
                    serde_json::from_slice(&text)
                        .map_err(|error| format!("pdp-work: invalid answer: {error}"))?;
                // A hostile image may have taken the process over.
                done.map_err(|text| sanitize(&text, REASON_BYTES_MAX))
            }
            status => Err(format!(
                "pdp-work ended with {status} (it may use {} MiB of memory)",
                limits().memory_bytes.unwrap_or_default() >> 20
            )),
        }
    }

    fn start(&self, order: &WorkOrder) -> io::Result<Child> {
        let mut child = Command::new(&self.isolated.program)
            .env_clear()
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()?;
        let begun = || -> io::Result<()> {
            let leaf = format!("{}/work", cgroup(&self.owner));
            self.isolated.cgroups.enter(&leaf, child.id()).map_err(io::Error::other)?;
            let text = serde_json::to_vec(order)?;
            // Closing the pipe marks the end of the order.
            child.stdin.take().map_or(Ok(()), |mut stdin| stdin.write_all(&text))
        };
        let begun = { begun }();
        if let Err(error) = begun {
            let _ = child.kill();
            let _ = child.wait();
            return Err(error);
        }
        Ok(child)
    }

    /// Waits for the end of the process. Returns an error if the process must be killed.
    fn watch(&self, child: &mut Child) -> std::result::Result<(), String> {
        let begun = Instant::now();
        while !self.isolated.stopping.load(Ordering::Relaxed) {
            match wait_child(child, CHECK_INTERVAL) {
                Ok(None) => {}
                Ok(Some(_)) => return Ok(()),
                Err(error) => return Err(format!("pdp-work: {error}")),
            }
            if begun.elapsed() > TIME_MAX {
                return Err(format!("it takes longer than {} s", TIME_MAX.as_secs()));
            }
        }
        Err("the daemon is stopping".to_owned())
    }
}

/// `pdp-work`: reads an order from standard input, performs it, and writes the answer to standard
/// output.
pub fn main() -> ExitCode {
    let answer = || -> io::Result<std::result::Result<WorkResult, String>> {
        // Set this before reading the order. If the daemon has ended before, the order is
        // incomplete.
        set_parent_process_death_signal(Some(Signal::KILL))?;
        let mut text = Vec::new();
        io::stdin().take(TEXT_BYTES_MAX).read_to_end(&mut text)?;
        let order: WorkOrder = serde_json::from_slice(&text)?;
        confine(&order)?;
        Ok(order.perform().map_err(|text| sanitize(&text, REASON_BYTES_MAX)))
    };
    let answer = answer().unwrap_or_else(|error| Err(format!("pdp-work: {error}")));
    let written = serde_json::to_writer(io::stdout(), &answer);
    if written.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Drops all rights that the order does not need.
fn confine(order: &WorkOrder) -> io::Result<()> {
    unshare(CloneFlags::CLONE_NEWNET)?;
    setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) })?;
    set_no_new_privs(true)?;
    restrict_files(order).map_err(io::Error::other)?;
    for capability in CapabilitySet::all().difference(CAPABILITIES).iter() {
        // The kernel may not know all capabilities.
        let _ = remove_capability_from_bounding_set(capability);
    }
    set_capabilities(
        None,
        CapabilitySets {
            effective: CAPABILITIES,
            permitted: CAPABILITIES,
            inheritable: CapabilitySet::empty(),
        },
    )?;
    Ok(())
}

/// Restricts file access with Landlock. Kernels before 5.19 would forbid moving files between
/// directories, so nothing is restricted there.
fn restrict_files(order: &WorkOrder) -> std::result::Result<(), landlock::RulesetError> {
    let all = AccessFs::from_all(ABI::V2);
    let ruleset = Ruleset::default()
        .set_compatibility(CompatLevel::HardRequirement)
        .handle_access(all)
        .and_then(Ruleset::create);
    let Ok(ruleset) = ruleset else { return Ok(()) };
    let (read, written) = order.paths();
    let ruleset = ruleset
        .set_compatibility(CompatLevel::BestEffort)
        .add_rules(path_beneath_rules(read, AccessFs::from_read(ABI::V2)))?
        .add_rules(path_beneath_rules(written, all))?;
    ruleset.restrict_self()?;
    Ok(())
}
