//! Control groups: version 1, version 2, or both at once.
//!
//! A cgroup's path is relative to the runtime's own cgroup. Limits are on inner cgroups (`red/r1`),
//! processes in leaves (`red/r1/guest`), as version 2 demands. With version 1, each cgroup is made
//! in every hierarchy, as the OCI runtime does.
//!
//! Source: kernel documentation, admin-guide/cgroup-v1 and cgroup-v2.rst.

mod session;

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};

use crate::error::{Error, ErrorContext, Result};
use crate::spec::Limits;

pub use session::Session;

/// Mode of the runtime's own cgroup, and of missing cgroups above it. A process that can open a
/// cgroup's directory can lock it.
pub const OWN_MODE: u32 = 0o700;

/// Default period of CPU limits, microseconds.
pub const CPU_PERIOD_US: u64 = 10_000;

/// Range of the period, microseconds (kernel: 1 ms to 1 s).
const CPU_PERIOD_US_RANGE: std::ops::RangeInclusive<u64> = 1_000..=1_000_000;

/// Smallest quota that the kernel accepts, microseconds.
const CPU_QUOTA_US_MIN: u64 = 1_000;

/// Longest wait until a kernel thread has run for the first time.
const THREAD_WAIT: Duration = Duration::from_secs(1);

/// Preferred mount point if several are of version 2.
const MOUNT_POINT: &str = "/sys/fs/cgroup";

/// Limit of socket memory (version 1), which version 1 counts separately.
const SOCKETS: &str = "memory.kmem.tcp.limit_in_bytes";

/// Controllers required for limits.
const CONTROLLERS: [&str; 4] = ["cpu", "cpuset", "memory", "pids"];

/// Controllers that are used if the machine has them.
const CONTROLLERS_OPTIONAL: [&str; 1] = ["io"];

/// Version of a machine's cgroups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CgroupVersion {
    /// Version 1, possibly with an additional version 2 tree without controllers.
    V1,
    /// Only version 2.
    V2,
}

/// A tree of cgroups.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Hierarchy {
    mount: PathBuf,
    /// Controllers of the tree (version 1). Version 2 lists them in `cgroup.controllers`.
    controllers: Vec<String>,
}

/// The cgroups of a runtime.
#[derive(Clone, Debug)]
pub struct Cgroups {
    version: CgroupVersion,
    hierarchies: Vec<Hierarchy>,
    name: String,
}

/// Resources used by a cgroup and all cgroups below it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CgroupUsage {
    /// CPU time, nanoseconds.
    pub cpu_ns: u64,
    /// Memory in use, bytes.
    pub memory_bytes: u64,
    /// Number of processes and threads.
    pub processes: u64,
    /// Time that its threads were throttled by the CPU limit, nanoseconds.
    pub throttled_ns: u64,
    /// Processes killed because of the memory limit.
    pub memory_kills: u64,
    /// Number of processes and threads refused because of their limit.
    pub processes_refused: u64,
}

/// Counts of refusals by the limits of a cgroup and of the cgroups below it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LimitHits {
    /// Processes killed because of the memory limit.
    pub memory_kills: u64,
    /// Number of processes and threads refused because of their limit.
    pub processes_refused: u64,
}

impl LimitHits {
    /// True if the limits refused nothing.
    pub fn is_none(&self) -> bool {
        *self == Self::default()
    }
}

impl Cgroups {
    /// Detects the machine's cgroups. All paths are below the cgroup `name`.
    pub fn new(name: &str) -> Result<Self> {
        let mounts = Path::new("/proc/self/mountinfo");
        let (version, hierarchies) = detect(&fs::read_to_string(mounts).at("read", mounts)?)?;
        let cgroups = Self { version, hierarchies, name: name.to_owned() };
        cgroups.check(name)?;
        Ok(cgroups)
    }

    /// Returns the version in use.
    pub fn version(&self) -> CgroupVersion {
        self.version
    }

    /// Makes a cgroup with these limits, or sets the limits of an existing one.
    pub fn ensure(&self, path: &str, limits: &Limits) -> Result<()> {
        self.check(path)?;
        for hierarchy in &self.hierarchies {
            self.make(hierarchy, path)?;
        }
        let set = |file: &'static str, value: String, limited: bool| {
            let controller = file.split('.').next().unwrap_or_default();
            let Some(dir) = self.controlled_by(controller, path) else {
                return if limited { Err(no_controller(controller)) } else { Ok(()) };
            };
            let file = dir.join(file);
            match fs::write(&file, &value) {
                // Without a limit, the file need not exist.
                Err(error) if error.kind() == io::ErrorKind::NotFound && !limited => Ok(()),
                result => result.at("set a limit by", &file),
            }
        };
        let (cpu, memory) = (limits.cpu_cores, limits.memory_bytes);
        let period = period_us(limits)?;
        let quota = cpu.map(|cores| (cores * period as f64).round() as u64);
        let processes = limits.processes.map_or("max".to_owned(), |count| count.to_string());
        match self.version {
            CgroupVersion::V1 => {
                // First remove the quota, since quota and period must fit at every moment.
                set("cpu.cfs_quota_us", "-1".to_owned(), cpu.is_some())?;
                set("cpu.cfs_period_us", period.to_string(), cpu.is_some())?;
                if let Some(quota) = quota {
                    set("cpu.cfs_quota_us", quota.to_string(), true)?;
                }
                let bytes = memory.map_or("-1".to_owned(), |bytes| bytes.to_string());
                set("memory.limit_in_bytes", bytes, memory.is_some())?;
                let sockets =
                    memory.map_or("-1".to_owned(), |bytes| socket_bytes(bytes).to_string());
                set(SOCKETS, sockets, false)?;
            }
            CgroupVersion::V2 => {
                let quota = quota.map_or("max".to_owned(), |quota| quota.to_string());
                set("cpu.max", format!("{quota} {period}"), cpu.is_some())?;
                let bytes = memory.map_or("max".to_owned(), |bytes| bytes.to_string());
                set("memory.max", bytes, memory.is_some())?;
                // Swap would be memory beyond the limit. A kernel may lack the file.
                let swap = if memory.is_some() { "0" } else { "max" };
                let _ = set("memory.swap.max", swap.to_owned(), false);
            }
        }
        set("pids.max", processes, limits.processes.is_some())?;
        if let Some(weight) = limits.io_weight {
            // Only some schedulers of disks have weights, and then these files exist.
            let (file, other) = match self.version {
                CgroupVersion::V1 => ("blkio.bfq.weight", "blkio.weight"),
                CgroupVersion::V2 => ("io.weight", "io.bfq.weight"),
            };
            let set = |file: &str| {
                let dir = self.controlled_by(file.split('.').next().unwrap_or_default(), path);
                dir.is_some_and(|dir| fs::write(dir.join(file), weight.to_string()).is_ok())
            };
            let _ = set(file) || set(other);
        }
        if let Some(weight) = limits.cpu_weight {
            self.weigh(path, weight)?;
        }
        self.set_cpus(path, limits.cpus.as_deref())
    }

    /// Makes a cgroup without limits of its own, for processes.
    pub fn ensure_leaf(&self, path: &str) -> Result<()> {
        self.check(path)?;
        self.hierarchies.iter().try_for_each(|hierarchy| self.make(hierarchy, path))?;
        // Version 1 accounts for a cgroup's sockets only once a limit was set. -1 means no limit.
        match self.controlled_by("memory", path).map(|dir| dir.join(SOCKETS)) {
            Some(file) if self.version == CgroupVersion::V1 && file.exists() => {
                fs::write(&file, "-1").at("set a limit by", &file)
            }
            _ => Ok(()),
        }
    }

    /// Moves a process into a leaf. Makes the leaf if it does not exist.
    pub fn enter(&self, path: &str, pid: u32) -> Result<()> {
        self.ensure_leaf(path)?;
        for hierarchy in &self.hierarchies {
            let file = self.dir(hierarchy, path).join("cgroup.procs");
            fs::write(&file, pid.to_string()).at("enter the cgroup", &file)?;
        }
        Ok(())
    }

    /// Charges the CPU time of a kernel thread to a leaf, under the leaf's weight and on its CPUs.
    /// Makes the leaf if it does not exist. The thread stays there until it ends; it can't be
    /// killed. The leaf can't be removed before, and [`Cgroups::remove`] waits. Only the thread's
    /// CPU time is counted there.
    pub fn charge(&self, path: &str, thread: u32) -> Result<()> {
        self.ensure_leaf(path)?;
        let is_of_cpus = |hierarchy: &&Hierarchy| {
            let mut controllers = hierarchy.controllers.iter();
            self.version == CgroupVersion::V2
                || controllers.any(|it| matches!(&**it, "cpu" | "cpuacct" | "cpuset"))
        };
        for hierarchy in self.hierarchies.iter().filter(is_of_cpus) {
            let file = self.dir(hierarchy, path).join("cgroup.procs");
            let deadline = Instant::now() + THREAD_WAIT;
            let charge = || fs::write(&file, thread.to_string());
            let mut charged = charge();
            // A kernel thread can't be moved before it has run for the first time.
            while let Err(error) = &charged
                && error.kind() == io::ErrorKind::InvalidInput
                && Instant::now() < deadline
            {
                std::thread::sleep(Duration::from_millis(1));
                charged = charge();
            }
            charged.at("charge a kernel thread to", &file)?;
        }
        Ok(())
    }

    /// True if a cgroup exists.
    pub fn exists(&self, path: &str) -> bool {
        self.hierarchies.iter().any(|hierarchy| self.dir(hierarchy, path).is_dir())
    }

    /// Returns the resources used by a cgroup and all cgroups below it.
    pub fn usage(&self, path: &str) -> Result<CgroupUsage> {
        self.check(path)?;
        let file = |controller: &str, name: &str| -> Result<PathBuf> {
            let dir = self.controlled_by(controller, path).ok_or(no_controller(controller))?;
            Ok(dir.join(name))
        };
        let number = |controller, name| -> Result<u64> {
            let file = file(controller, name)?;
            let text = fs::read_to_string(&file).at("read", &file)?;
            Ok(text.trim().parse().unwrap_or_default())
        };
        let field = |controller, name, key| -> Result<u64> {
            let file = file(controller, name)?;
            Ok(keyed(&fs::read_to_string(&file).at("read", &file)?, key))
        };
        Ok(match self.version {
            CgroupVersion::V1 => CgroupUsage {
                cpu_ns: number("cpuacct", "cpuacct.usage")?,
                memory_bytes: number("memory", "memory.usage_in_bytes")?,
                processes: number("pids", "pids.current")?,
                throttled_ns: field("cpu", "cpu.stat", "throttled_time")?,
                memory_kills: self.memory_kills(path),
                processes_refused: self.processes_refused(path),
            },
            CgroupVersion::V2 => CgroupUsage {
                cpu_ns: field("cpu", "cpu.stat", "usage_usec")? * 1000,
                memory_bytes: number("memory", "memory.current")?,
                processes: number("pids", "pids.current")?,
                throttled_ns: field("cpu", "cpu.stat", "throttled_usec")? * 1000,
                memory_kills: self.memory_kills(path),
                processes_refused: self.processes_refused(path),
            },
        })
    }

    /// Counts the refusals by a cgroup's limits since the cgroup was made.
    pub(crate) fn limit_hits(&self, path: &str) -> LimitHits {
        LimitHits {
            memory_kills: self.memory_kills(path),
            processes_refused: self.processes_refused(path),
        }
    }

    /// Counts processes of a cgroup and all cgroups below it that a memory limit killed. 0 if the
    /// kernel does not count them.
    pub(crate) fn memory_kills(&self, path: &str) -> u64 {
        let Some(dir) = self.controlled_by("memory", path) else { return 0 };
        match self.version {
            // The kernel counts at the process's own cgroup, but not above it.
            CgroupVersion::V1 => count_below(&dir, "memory.oom_control", "oom_kill"),
            CgroupVersion::V2 => count(&dir, "memory.events", "oom_kill"),
        }
    }

    /// Counts the times that a cgroup and all cgroups below it were refused a process or thread. 0
    /// if the kernel does not count them. Version 1, and Linux before 6.11, count at the process's
    /// own cgroup. Later versions count at the cgroup with the limit and above.
    fn processes_refused(&self, path: &str) -> u64 {
        let Some(dir) = self.controlled_by("pids", path) else { return 0 };
        match count(&dir, "pids.events", "max") {
            0 => count_below(&dir, "pids.events", "max"),
            here => here,
        }
    }

    /// True if a cgroup that begins to run did not have enough memory for that.
    pub(crate) fn lacks_memory(&self, path: &str) -> bool {
        let full = || {
            let dir = self.controlled_by("memory", path)?;
            fs::read_to_string(dir.join("memory.failcnt")).ok()?.trim().parse::<u64>().ok()
        };
        // The OCI runtime has removed the cgroup of the killed process. With version 1, its count
        // is lost.
        self.memory_kills(path) > 0 || full().is_some_and(|times| times > 0)
    }

    /// Returns the ids of the processes in a cgroup and all cgroups below it.
    pub fn processes(&self, path: &str) -> Result<Vec<u32>> {
        self.check(path)?;
        let dirs = self.hierarchies.iter().map(|hierarchy| self.dir(hierarchy, path));
        Ok(dirs
            .flat_map(|dir| processes_below(&dir))
            .collect::<BTreeSet<_>>()
            .into_iter()
            .collect())
    }

    /// Makes the cgroup above all others. Returns its directory in each hierarchy.
    pub fn own(&self) -> Result<Vec<PathBuf>> {
        self.hierarchies
            .iter()
            .map(|hierarchy| self.make(hierarchy, "").map(|()| self.dir(hierarchy, "")))
            .collect()
    }

    /// Calls [`Cgroups::try_remove`] until nothing is left. Does nothing if the cgroup does not
    /// exist.
    pub fn remove(&self, path: &str, wait: Duration) -> Result<()> {
        if !path.is_empty() {
            self.check(path)?;
        }
        let deadline = Instant::now() + wait;
        while !self.try_remove(path)? {
            if Instant::now() >= deadline {
                let what = format!("cgroup {}", self.oci_path(path));
                return Err(Error::Stuck { what, seconds: wait.as_secs() });
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    }

    /// Kills the processes in a cgroup and all cgroups below it, and removes the cgroups if the
    /// processes have ended. Returns false if something is left. An empty path stands for all
    /// cgroups below the runtime's own, which stays.
    pub fn try_remove(&self, path: &str) -> Result<bool> {
        if !path.is_empty() {
            self.check(path)?;
        }
        let (mut gone, mut first) = (true, Ok(()));
        for hierarchy in &self.hierarchies {
            let dir = self.dir(hierarchy, path);
            let mut dirs = descendants(&dir);
            if path.is_empty() {
                dirs.pop();
            }
            match remove_all(&dirs).at("remove the cgroup", &dir) {
                Ok(true) => continue,
                Ok(false) => gone = false,
                Err(error) => first = first.and(Err(error)),
            }
            for pid in processes_below(&dir) {
                if let Some(pid) = pid.try_into().ok().and_then(Pid::from_raw) {
                    // The process may have ended meanwhile.
                    let _ = kill_process(pid, Signal::KILL);
                }
            }
        }
        first.map(|()| gone)
    }

    /// Lists the names of the cgroups directly below one.
    pub fn below(&self, path: &str) -> BTreeSet<String> {
        let entries =
            self.hierarchies.iter().filter_map(|it| fs::read_dir(self.dir(it, path)).ok());
        let dirs = entries.flatten().flatten().filter(|it| it.path().is_dir());
        dirs.filter_map(|it| it.file_name().into_string().ok()).collect()
    }

    /// Lists the existing directories of a cgroup, one in each hierarchy.
    pub fn dirs(&self, path: &str) -> Vec<PathBuf> {
        let dirs = self.hierarchies.iter().map(|hierarchy| self.dir(hierarchy, path));
        dirs.filter(|dir| dir.is_dir()).collect()
    }

    /// Removes a cgroup if it exists and is empty.
    pub fn remove_if_empty(&self, path: &str) {
        for hierarchy in &self.hierarchies {
            let _ = fs::remove_dir(self.dir(hierarchy, path));
        }
    }

    /// Removes a leaf with its processes. Also removes the cgroups above it that are empty then,
    /// except the runtime's own.
    pub(crate) fn remove_leaf(&self, path: &str, wait: Duration) -> Result<()> {
        self.remove(path, wait)?;
        for hierarchy in &self.hierarchies {
            let mut above = Path::new(path).parent();
            while let Some(inner) = above.filter(|inner| !inner.as_os_str().is_empty())
                && fs::remove_dir(hierarchy.mount.join(&self.name).join(inner)).is_ok()
            {
                above = inner.parent();
            }
        }
        Ok(())
    }

    /// Returns the absolute path for the OCI runtime, which starts at each hierarchy's root.
    pub(crate) fn oci_path(&self, path: &str) -> String {
        format!("/{}/{path}", self.name)
    }

    fn dir(&self, hierarchy: &Hierarchy, path: &str) -> PathBuf {
        hierarchy.mount.join(&self.name).join(path)
    }

    /// Returns the directory that has a cgroup's files of a controller.
    fn controlled_by(&self, controller: &str, path: &str) -> Option<PathBuf> {
        let with = |hierarchy: &&Hierarchy| {
            self.version == CgroupVersion::V2
                || hierarchy.controllers.iter().any(|c| c == controller)
        };
        self.hierarchies.iter().find(with).map(|hierarchy| self.dir(hierarchy, path))
    }

    /// Makes the directories down to a cgroup. The cgroups above it pass the controllers down.
    fn make(&self, hierarchy: &Hierarchy, path: &str) -> Result<()> {
        let mut dir = hierarchy.mount.clone();
        let own = Path::new(&self.name).iter().map(|component| (component, OWN_MODE));
        let inner = Path::new(path).iter().map(|component| (component, 0o755));
        for (component, mode) in own.chain(inner) {
            if self.version == CgroupVersion::V2 {
                pass_controllers_down(&dir)?;
            }
            let parent = dir.clone();
            dir.push(component);
            match fs::DirBuilder::new().mode(mode).create(&dir) {
                // The existing entry may be one of the kernel's files.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists && dir.is_dir() => {}
                result => result.at("make the cgroup", &dir)?,
            }
            if hierarchy.controllers.iter().any(|controller| controller == "cpuset") {
                inherit_cpuset(&parent, &dir)?;
            }
        }
        Ok(())
    }

    /// Sets the CPU weight of a cgroup, thousandths of a core. It takes effect while its siblings
    /// want more CPU time than there is; they share it by weight. Weights up to 10 cores (version
    /// 1: 256 cores) make a difference. Version 1 has no weight below 2 thousandths.
    pub fn weigh(&self, path: &str, millicores: u32) -> Result<()> {
        self.check(path)?;
        let Some(dir) = self.controlled_by("cpu", path) else { return Err(no_controller("cpu")) };
        let (file, weight) = match self.version {
            // 1024 stands for a core, as in the kernel's default.
            CgroupVersion::V1 => {
                ("cpu.shares", (u64::from(millicores) * 1024 / 1000).clamp(2, 1 << 18))
            }
            CgroupVersion::V2 => ("cpu.weight", u64::from(millicores).clamp(1, 10_000)),
        };
        let file = dir.join(file);
        if !dir.exists() {
            self.hierarchies.iter().try_for_each(|hierarchy| self.make(hierarchy, path))?;
        }
        fs::write(&file, weight.to_string()).at("set a weight by", &file)
    }

    /// Sets the CPUs of a cgroup. `None` gives it the CPUs of the cgroup above.
    fn set_cpus(&self, path: &str, cpus: Option<&str>) -> Result<()> {
        let Some(dir) = self.controlled_by("cpuset", path) else {
            return if cpus.is_some() { Err(no_controller("cpuset")) } else { Ok(()) };
        };
        let file = dir.join("cpuset.cpus");
        let cpus = match (cpus, self.version) {
            (Some(cpus), _) => cpus.to_owned(),
            (None, CgroupVersion::V2) if !file.exists() => return Ok(()),
            (None, CgroupVersion::V2) => "\n".to_owned(),
            (None, CgroupVersion::V1) => {
                let above = dir.join("../cpuset.cpus");
                fs::read_to_string(&above).at("read", &above)?
            }
        };
        if self.version == CgroupVersion::V2 {
            return fs::write(&file, &cpus).at("set CPUs by", &file);
        }
        // Version 1 requires a cgroup's CPUs to be among its parent's at every moment. Going up
        // takes CPUs away; going down adds CPUs.
        let files: Vec<_> = descendants(&dir).iter().map(|dir| dir.join("cpuset.cpus")).collect();
        for file in &files {
            let _ = fs::write(file, &cpus);
        }
        files.iter().rev().try_for_each(|file| fs::write(file, &cpus).at("set CPUs by", file))
    }

    fn check(&self, path: &str) -> Result<()> {
        let good =
            |component: &str| !matches!(component, "" | "." | "..") && !component.contains('\0');
        if path.split('/').all(good) {
            return Ok(());
        }
        Err(Error::Cgroup(format!("{path:?} is no cgroup name (join names by /)")))
    }
}

/// Returns the limit of socket memory, bytes, for a memory limit of `bytes`. Cgroup version 1
/// counts sockets separately.
pub fn socket_bytes(bytes: u64) -> u64 {
    bytes / 4
}

fn no_controller(controller: &str) -> Error {
    Error::Cgroup(format!(
        "no controller {controller} on this machine; enable it in the kernel or at boot \
         (cgroup_enable={controller})"
    ))
}

/// Returns the period, long enough for a quota that the kernel accepts.
fn period_us(limits: &Limits) -> Result<u64> {
    let period = limits.cpu_period_us.unwrap_or(CPU_PERIOD_US);
    let Some(cores) = limits.cpu_cores else { return Ok(period) };
    // Smallest share with a quota of at least CPU_QUOTA_US_MIN in the longest period.
    let cores_min = CPU_QUOTA_US_MIN as f64 / *CPU_PERIOD_US_RANGE.end() as f64;
    if !CPU_PERIOD_US_RANGE.contains(&period) || !(cores_min..=4096.0).contains(&cores) {
        return Err(Error::Cgroup(format!(
            "{cores} cores in periods of {period} us: {cores_min} to 4096 cores in periods of \
             {} to {} us can be had",
            CPU_PERIOD_US_RANGE.start(),
            CPU_PERIOD_US_RANGE.end(),
        )));
    }
    Ok(period.max((CPU_QUOTA_US_MIN as f64 / cores).ceil() as u64))
}

/// Finds the hierarchies in the text of `/proc/self/mountinfo`.
fn detect(mountinfo: &str) -> Result<(CgroupVersion, Vec<Hierarchy>)> {
    let mut unified = Vec::new();
    let mut hierarchies: Vec<Hierarchy> = Vec::new();
    for line in mountinfo.lines() {
        // proc(5): "id parent major:minor root mount-point options … - type source options".
        let Some((mount, filesystem)) = line.split_once(" - ") else { continue };
        let Some(mount) = mount.split(' ').nth(4) else { continue };
        let mut filesystem = filesystem.split(' ');
        let (kind, options) = (filesystem.next(), filesystem.nth(1).unwrap_or_default());
        let controllers: Vec<_> = options.split(',').map(str::to_owned).collect();
        let mount = PathBuf::from(mount);
        match kind {
            Some("cgroup2") => unified.push(mount),
            // A hierarchy may be mounted at several mount points.
            Some("cgroup") if hierarchies.iter().all(|h| h.controllers != controllers) => {
                hierarchies.push(Hierarchy { mount, controllers });
            }
            _ => {}
        }
    }
    unified.sort_by_key(|mount| mount != Path::new(MOUNT_POINT));
    let unified = unified.into_iter().next().map(|mount| Hierarchy { mount, controllers: vec![] });
    let has_controllers = CONTROLLERS
        .iter()
        .any(|name| hierarchies.iter().any(|h| h.controllers.iter().any(|c| c == name)));
    match (has_controllers, unified) {
        (true, unified) => {
            hierarchies.extend(unified);
            Ok((CgroupVersion::V1, hierarchies))
        }
        (false, Some(unified)) => Ok((CgroupVersion::V2, vec![unified])),
        (false, None) => {
            Err(Error::Cgroup(format!("none is mounted; mount -t cgroup2 none {MOUNT_POINT}")))
        }
    }
}

/// Passes the controllers of `dir` (version 2) to the cgroups below it.
fn pass_controllers_down(dir: &Path) -> Result<()> {
    let available = dir.join("cgroup.controllers");
    let available = fs::read_to_string(&available).at("read", &available)?;
    let file = dir.join("cgroup.subtree_control");
    let passed = fs::read_to_string(&file).at("read", &file)?;
    for controller in CONTROLLERS.into_iter().chain(CONTROLLERS_OPTIONAL) {
        let has = |list: &str| list.split_ascii_whitespace().any(|name| name == controller);
        if has(&available) && !has(&passed) {
            fs::write(&file, format!("+{controller}")).at("pass controllers down by", &file)?;
        }
    }
    Ok(())
}

/// Sets up a new cpuset of version 1. It is empty at first, and no process could enter it.
fn inherit_cpuset(parent: &Path, dir: &Path) -> Result<()> {
    for name in ["cpuset.cpus", "cpuset.mems"] {
        let (from, to) = (parent.join(name), dir.join(name));
        if fs::read_to_string(&to).at("read", &to)?.trim().is_empty() {
            let value = fs::read_to_string(&from).at("read", &from)?;
            fs::write(&to, value).at("set", &to)?;
        }
    }
    Ok(())
}

/// Returns the number after `key` in a file of a cgroup; 0 if there is none.
fn count(dir: &Path, file: &str, key: &str) -> u64 {
    fs::read_to_string(dir.join(file)).map_or(0, |text| keyed(&text, key))
}

/// Returns the sum of these numbers in a cgroup and all cgroups below it.
fn count_below(dir: &Path, file: &str, key: &str) -> u64 {
    descendants(dir).iter().map(|dir| count(dir, file, key)).sum()
}

/// Returns the number after `key` in a text of lines "key number".
fn keyed(text: &str, key: &str) -> u64 {
    let value = |line: &str| line.strip_prefix(key)?.strip_prefix(' ')?.trim().parse().ok();
    text.lines().find_map(value).unwrap_or_default()
}

/// Returns `dir` and all directories below it, each after those below it.
pub fn descendants(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    for entry in entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())) {
        found.extend(descendants(&entry.path()));
    }
    found.push(dir.to_owned());
    found
}

fn processes_below(dir: &Path) -> Vec<u32> {
    let read = |dir: PathBuf| fs::read_to_string(dir.join("cgroup.procs")).unwrap_or_default();
    let ids = descendants(dir).into_iter().map(read);
    ids.flat_map(|text| text.lines().filter_map(|id| id.parse().ok()).collect::<Vec<_>>()).collect()
}

/// Removes cgroups. Returns false while one has processes.
fn remove_all(dirs: &[PathBuf]) -> io::Result<bool> {
    for dir in dirs {
        match fs::remove_dir(dir) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy => return Ok(false),
            Err(error) => return Err(error),
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;
    use std::sync::atomic::{AtomicU32, Ordering};

    /// Removes its cgroup, even if a test fails.
    struct Guard(Cgroups);

    impl Guard {
        /// Each test has its own cgroup, since tests run in parallel.
        fn new() -> Self {
            static MADE: AtomicU32 = AtomicU32::new(0);
            let number = MADE.fetch_add(1, Ordering::Relaxed);
            Self(Cgroups::new(&format!("pdp-cgroup-{}-{number}", std::process::id())).unwrap())
        }
    }

    impl Drop for Guard {
        fn drop(&mut self) {
            let _ = self.0.remove("", Duration::from_secs(10));
            self.0.remove_if_empty("");
        }
    }

    fn spin(cgroups: &Cgroups, path: &str, script: &str) -> std::process::Child {
        cgroups.ensure_leaf(path).unwrap();
        let mut command = Command::new("sh");
        command.args(["-c", &format!("read x; {script}")]).stdin(std::process::Stdio::piped());
        let mut child = command.spawn().unwrap();
        cgroups.enter(path, child.id()).unwrap();
        drop(child.stdin.take());
        child
    }

    #[test]
    fn detects_cgroup_versions_and_hierarchies() {
        let v2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";
        let (version, hierarchies) = detect(v2).unwrap();
        assert_eq!(version, CgroupVersion::V2);
        assert_eq!(hierarchies[0].mount, Path::new("/sys/fs/cgroup"));
        let hybrid = "1 0 0:1 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n\
                      2 0 0:2 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
                      3 0 0:3 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n\
                      4 0 0:2 / /elsewhere rw - cgroup cgroup rw,memory\n";
        let (version, hierarchies) = detect(hybrid).unwrap();
        assert_eq!((version, hierarchies.len()), (CgroupVersion::V1, 3));
        // Named hierarchies without controllers, in addition to version 2, do not make it version
        // 1.
        let named = "1 0 0:1 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,name=systemd\n";
        assert_eq!(detect(&format!("{v2}{named}")).unwrap().0, CgroupVersion::V2);
        assert!(detect("1 0 0:1 / / rw - ext4 /dev/vda rw\n").is_err());
    }

    #[test]
    fn kernel_control_files_are_not_used_as_cgroups() {
        let guard = Guard::new();
        let cgroups = &guard.0;
        cgroups.ensure_leaf("red/r1").unwrap();
        for name in ["tasks", "cgroup.procs", "notify_on_release", "cpu.shares", "cpu.max"] {
            let path = format!("red/{name}");
            let is_file = |hierarchy: &Hierarchy| cgroups.dir(hierarchy, &path).is_file();
            let is_a_file = cgroups.hierarchies.iter().any(is_file);
            assert_eq!(cgroups.ensure_leaf(&path).is_err(), is_a_file, "{name}");
        }
        assert!(cgroups.ensure_leaf("red/cgroup.procs").is_err());
        assert!(cgroups.try_remove("red").unwrap() && !cgroups.exists("red"));
    }

    #[test]
    fn small_cpu_limits_get_a_longer_period() {
        let limits = |cores| Limits { cpu_cores: Some(cores), ..Limits::default() };
        assert_eq!(period_us(&limits(0.5)).unwrap(), CPU_PERIOD_US);
        assert_eq!(period_us(&limits(0.05)).unwrap(), 20_000);
        assert!(period_us(&limits(0.0001)).is_err());
        assert!(period_us(&limits(f64::NAN)).is_err());
    }

    #[test]
    fn paths_cannot_escape_the_own_cgroup() {
        let cgroups = Guard::new();
        for path in ["", "..", "a/../..", "/a", "a//b", "a/"] {
            assert!(cgroups.0.ensure_leaf(path).is_err(), "{path:?}");
        }
    }

    #[test]
    fn cpu_limit_is_enforced_and_counted() {
        let cgroups = Guard::new();
        let limits = Limits { cpu_cores: Some(0.25), ..Limits::default() };
        cgroups.0.ensure("red/r1", &limits).unwrap();
        let mut child = spin(&cgroups.0, "red/r1/guest", "while :; do :; done");
        let begin = (Instant::now(), cgroups.0.usage("red/r1").unwrap().cpu_ns);
        std::thread::sleep(Duration::from_secs(2));
        let usage = cgroups.0.usage("red/r1").unwrap();
        let cores = (usage.cpu_ns - begin.1) as f64 / begin.0.elapsed().as_nanos() as f64;
        // Only the upper bound matters. How much less depends on the machine's other load.
        assert!(cores < 0.35, "{cores} cores used of 0.25");
        assert!(cores > 0.01 && usage.throttled_ns > 0, "{cores} cores, {usage:?}");
        assert_eq!(usage.processes, 1);
        cgroups.0.remove_leaf("red/r1/guest", Duration::from_secs(10)).unwrap();
        assert!(!child.wait().unwrap().success());
        assert!(!cgroups.0.exists("red"));
    }

    #[test]
    fn separate_hierarchies_charge_only_cpu_time() {
        let guard = Guard::new();
        let cgroups = &guard.0;
        let mut child = Command::new("sh").args(["-c", "while :; do :; done"]).spawn().unwrap();
        cgroups.charge("red/napi", child.id()).unwrap();
        std::thread::sleep(Duration::from_millis(300));
        let usage = cgroups.usage("red").unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        let processes = u64::from(cgroups.version() == CgroupVersion::V2);
        assert!(usage.cpu_ns > 0 && usage.processes == processes, "{usage:?}");
        assert!(cgroups.charge("red/napi", child.id()).is_err(), "it has ended");
    }

    #[test]
    fn cpu_time_follows_weights() {
        let cgroups = Guard::new();
        let cpu = fs::read_to_string("/proc/self/status").unwrap();
        let cpu = cpu.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap();
        let cpu = cpu.trim().split([',', '-']).next().unwrap().to_owned();
        let mut children = Vec::new();
        for (vnet, weight) in [("a", 200), ("b", 800)] {
            // A limit of the inner cgroup does not count outside.
            let limits = Limits {
                cpu_weight: Some(1000 - weight),
                cpus: Some(cpu.clone()),
                ..Limits::default()
            };
            cgroups.0.ensure(&format!("{vnet}/r1"), &limits).unwrap();
            cgroups.0.weigh(vnet, weight).unwrap();
            let guest = format!("{vnet}/r1/guest");
            children.push(spin(&cgroups.0, &guest, "while :; do :; done"));
        }
        let used = || ["a", "b"].map(|vnet| cgroups.0.usage(vnet).unwrap().cpu_ns as f64);
        let begin = used();
        std::thread::sleep(Duration::from_secs(2));
        let end = used();
        let [a, b] = [end[0] - begin[0], end[1] - begin[1]];
        assert!((0.15..0.25).contains(&(a / (a + b))), "{a} and {b} ns");
        for vnet in ["a", "b"] {
            cgroups.0.remove(vnet, Duration::from_secs(10)).unwrap();
        }
        children.iter_mut().for_each(|child| _ = child.wait().unwrap());
    }

    #[test]
    fn memory_and_process_limits_are_enforced() {
        let cgroups = Guard::new();
        let limits = Limits { memory_bytes: Some(32 << 20), ..Limits::default() };
        cgroups.0.ensure("a", &limits).unwrap();
        let hog = "exec python3 -c 'x = bytearray(256 << 20); print(len(x))'";
        assert!(!spin(&cgroups.0, "a/guest", hog).wait().unwrap().success());
        assert!(cgroups.0.usage("a").unwrap().memory_kills > 0);
        cgroups.0.ensure("b", &Limits { processes: Some(3), ..Limits::default() }).unwrap();
        let mut child = spin(&cgroups.0, "b/guest", "sleep 20 & sleep 20 & sleep 20 & exit 0");
        assert!(!child.wait().unwrap().success(), "a fourth process");
        assert!(cgroups.0.usage("b").unwrap().processes_refused > 0);
        assert_eq!(cgroups.0.usage("a").unwrap().processes_refused, 0);
        assert_eq!(cgroups.0.processes("b").unwrap().len(), 2);
        cgroups.0.remove("b", Duration::from_secs(10)).unwrap();
        assert!(!cgroups.0.exists("b"));
    }

    #[test]
    fn cpuset_is_set_and_reset() {
        let cgroups = Guard::new();
        let read = || {
            let dir = cgroups.0.controlled_by("cpuset", "a").unwrap();
            fs::read_to_string(dir.join("cpuset.cpus")).unwrap().trim().to_owned()
        };
        cgroups.0.ensure_leaf("a/guest").unwrap();
        cgroups.0.ensure("a", &Limits { cpus: Some("0".into()), ..Limits::default() }).unwrap();
        assert_eq!(read(), "0");
        cgroups.0.ensure("a", &Limits::default()).unwrap();
        assert_ne!(read(), "0");
    }
}
