//! Work that the daemon does for an owner outside of its guests: reading an archive, checking an image, unpacking it,
//! making a volume's file system.
//!
//! Each piece of work is a process of its own (`pdp-work`). It runs in its owner's cgroup, so the owner's limits hold
//! for its CPU time, memory and disk bandwidth, and no other owner waits for it. The process keeps only the
//! capabilities that files of other users need, has an empty network namespace, and, where the kernel has Landlock,
//! reads and writes only what its order names. The daemon writes the order once the process is in its cgroup.
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
use crate::error::{Error, words};
use crate::image::{self, Kept, Room};
use crate::process::{end_within, wait_child};
use crate::spec::Limits;
use crate::status::tame;
use crate::volumes;

/// Longest time for one piece of work.
pub const TIME_MAX: Duration = Duration::from_secs(1800);

/// The cgroup above those of all owners: those of vnets are below another one.
pub const CGROUP: &str = "work";

/// Weight of all work together against networks and mux, thousandths of a core: guaranteed power comes first.
const WEIGHT_MILLICORES: u32 = 100;

/// Interval at which the daemon checks for its own end and for a timeout.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// Bytes of an order, and of an answer.
const TEXT_BYTES_MAX: u64 = 1 << 20;

/// Bytes of the reason why an order could not be done.
const REASON_BYTES_MAX: usize = 4096;

/// Capabilities for unpacking: files of other owners and modes. No device nodes, no mounts, no network.
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

/// Cgroup of an owner's work, below the runtime's own.
pub fn cgroup(owner: &str) -> String {
    format!("{CGROUP}/_{owner}")
}

/// One piece of work.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Order {
    /// [`image::convert`].
    Convert { archive: PathBuf, tag: Option<String>, into: PathBuf, bytes_max: u64 },
    /// Makes a checked layout of what is in an inbox.
    Take { inbox: PathBuf, layout: PathBuf, wanted: Option<String>, room: Room },
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
pub(crate) enum Done {
    Nothing,
    Taken(String, Kept),
}

impl Order {
    /// Does it in this process.
    fn perform(&self) -> std::result::Result<Done, String> {
        match self {
            Self::Convert { archive, tag, into, bytes_max } => {
                image::convert(archive, tag.as_deref(), into, *bytes_max).map_err(reason)?;
                Ok(Done::Nothing)
            }
            Self::Take { inbox, layout, wanted, room } => {
                let taken = image::take(inbox, layout, wanted.as_deref(), *room);
                taken
                    .map(|(digest, kept)| Done::Taken(digest, kept))
                    .map_err(|error| error.to_string())
            }
            Self::Unpack { layout, reference, digest, part, root } => {
                image::unpack_alone(layout, (reference.as_deref(), digest), (part, root))
                    .map_err(reason)?;
                Ok(Done::Nothing)
            }
            Self::MakeFileSystem { file } => {
                volumes::make_file_system(file).map_err(|error| error.to_string())?;
                Ok(Done::Nothing)
            }
        }
    }

    /// Paths that the order reads, and paths below which it writes.
    fn paths(&self) -> (Vec<&Path>, Vec<&Path>) {
        match self {
            Self::Convert { archive, into, .. } => (vec![archive], vec![into]),
            Self::Take { inbox, layout, .. } => {
                // It moves files from the one to the other, below a directory for both.
                (vec![], vec![layout.parent().unwrap_or(layout), inbox])
            }
            Self::Unpack { layout, root, .. } => {
                (vec![layout], vec![root.parent().unwrap_or(root)])
            }
            // It runs mke2fs(8), which reads libraries and what is mounted.
            Self::MakeFileSystem { file } => {
                (vec![Path::new("/")], vec![file, Path::new("/dev/null")])
            }
        }
    }
}

/// The reason of an error, without the place on the machine that it concerns.
fn reason(error: Error) -> String {
    match error {
        Error::Image { text, .. } => text,
        Error::Io { what, source, .. } => format!("{what} it: {source}"),
        other => words(&other),
    }
}

/// Where work is done.
#[derive(Clone, Debug)]
pub struct Workplace {
    /// `pdp-work` and the cgroups; `None`: this very process does the work.
    apart: Option<Arc<Apart>>,
}

#[derive(Debug)]
struct Apart {
    program: PathBuf,
    cgroups: Cgroups,
    /// Pieces of work under way, by owner: the cgroup goes with the last one.
    busy: Mutex<BTreeMap<String, usize>>,
    stopping: AtomicBool,
}

/// An owner's cgroup while somebody works in it.
#[derive(Debug)]
pub struct Place<'a> {
    apart: &'a Apart,
    owner: String,
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let mut busy = lock(&self.apart.busy);
        let Some(count) = busy.get_mut(&self.owner) else { return };
        *count -= 1;
        if *count == 0 {
            busy.remove(&self.owner);
            // A process that has just been waited for may still be counted: the next one, or the end of the
            // daemon's cgroup, removes what stays.
            let cgroup = cgroup(&self.owner);
            let _ = self.apart.cgroups.try_remove(&cgroup);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Workplace {
    /// Work is done by processes of `program` in cgroups of these.
    pub fn new(program: PathBuf, cgroups: Cgroups) -> Self {
        let (busy, stopping) = (Mutex::default(), AtomicBool::default());
        Self { apart: Some(Arc::new(Apart { program, cgroups, busy, stopping })) }
    }

    /// Work is done by the caller's thread, with all its rights and without limits: for tests and fuzzing of what is
    /// done, not of where.
    pub fn in_this_process() -> Self {
        Self { apart: None }
    }

    /// Ends the work that is under way, and refuses more.
    pub fn stop(&self) {
        if let Some(apart) = &self.apart {
            apart.stopping.store(true, Ordering::Relaxed);
        }
    }

    /// The owner's cgroup with its limits, until this is dropped; `None` where this process does the work.
    ///
    /// # Errors
    /// The machine's cgroups refuse.
    pub fn place(&self, owner: &str) -> crate::Result<Option<Place<'_>>> {
        let Some(apart) = &self.apart else { return Ok(None) };
        let mut busy = lock(&apart.busy);
        apart.cgroups.weigh(CGROUP, WEIGHT_MILLICORES)?;
        apart.cgroups.ensure(&cgroup(owner), &limits())?;
        *busy.entry(owner.to_owned()).or_default() += 1;
        Ok(Some(Place { apart, owner: owner.to_owned() }))
    }

    /// Does a piece of work for an owner, and waits for it.
    ///
    /// # Errors
    /// Why it could not be done, without paths of the machine.
    pub(crate) fn run(&self, owner: &str, order: &Order) -> std::result::Result<Done, String> {
        match self.place(owner).map_err(|error| words(&error))? {
            Some(place) => place.run(order),
            None => order.perform(),
        }
    }
}

impl Place<'_> {
    fn run(&self, order: &Order) -> std::result::Result<Done, String> {
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
                let done: std::result::Result<Done, String> = serde_json::from_slice(&text)
                    .map_err(|error| format!("pdp-work: its answer: {error}"))?;
                // A hostile image may have taken it over.
                done.map_err(|text| tame(&text, REASON_BYTES_MAX))
            }
            status => Err(format!(
                "pdp-work ended with {status}; more than {} MiB of memory end it",
                limits().memory_bytes.unwrap_or_default() >> 20
            )),
        }
    }

    fn start(&self, order: &Order) -> io::Result<Child> {
        let mut child = Command::new(&self.apart.program)
            .env_clear()
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()?;
        let begun = || -> io::Result<()> {
            let leaf = format!("{}/work", cgroup(&self.owner));
            self.apart.cgroups.enter(&leaf, child.id()).map_err(io::Error::other)?;
            let text = serde_json::to_vec(order)?;
            // The end of the order is the end of the file.
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

    /// Waits for the end of the process; an error if it must not go on.
    fn watch(&self, child: &mut Child) -> std::result::Result<(), String> {
        let begun = Instant::now();
        while !self.apart.stopping.load(Ordering::Relaxed) {
            match wait_child(child, CHECK_INTERVAL) {
                Ok(None) => {}
                Ok(Some(_)) => return Ok(()),
                Err(error) => return Err(format!("pdp-work: {error}")),
            }
            if begun.elapsed() > TIME_MAX {
                return Err(format!("it takes more than {} s", TIME_MAX.as_secs()));
            }
        }
        Err("the daemon ends".to_owned())
    }
}

/// `pdp-work`: reads an order from standard input, does it, and writes the answer to standard output.
pub fn main() -> ExitCode {
    let answer = || -> io::Result<std::result::Result<Done, String>> {
        // Before the order is read: if the daemon has ended already, the order is cut short.
        set_parent_process_death_signal(Some(Signal::KILL))?;
        let mut text = Vec::new();
        io::stdin().take(TEXT_BYTES_MAX).read_to_end(&mut text)?;
        let order: Order = serde_json::from_slice(&text)?;
        confine(&order)?;
        Ok(order.perform().map_err(|text| tame(&text, REASON_BYTES_MAX)))
    };
    let answer = answer().unwrap_or_else(|error| Err(format!("pdp-work: {error}")));
    let written = serde_json::to_writer(io::stdout(), &answer);
    if written.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Takes everything from this process that its order does not need.
fn confine(order: &Order) -> io::Result<()> {
    unshare(CloneFlags::CLONE_NEWNET)?;
    setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) })?;
    set_no_new_privs(true)?;
    restrict_files(order).map_err(io::Error::other)?;
    for capability in CapabilitySet::all().difference(CAPABILITIES).iter() {
        // The kernel may not know all of them.
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

/// Landlock: kernels before 5.19 forbid moving files between directories with it, so there nothing is restricted.
fn restrict_files(order: &Order) -> std::result::Result<(), landlock::RulesetError> {
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
