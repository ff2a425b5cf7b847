//! Control groups, version 1, 2 and both at once.
//!
//! A cgroup here is a path below the runtime's own. Limits are on inner cgroups (`red/r1`),
//! processes in leaves (`red/r1/guest`), as version 2 demands.

use std::path::PathBuf;
use std::time::Duration;

use crate::error::Result;
use crate::spec::Limits;

/// Default period of CPU limits, microseconds.
pub const CPU_PERIOD_US: u64 = 10_000;

/// Which cgroups a machine has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Version {
    /// Version 1, possibly with a version 2 tree without controllers beside it.
    V1,
    /// Version 2 alone.
    V2,
}

/// The cgroups of a runtime.
#[derive(Clone, Debug)]
pub struct Cgroups {
    version: Version,
    roots: Vec<PathBuf>,
}

/// What a cgroup with all below it used and holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// CPU time, nanoseconds.
    pub cpu_ns: u64,
    /// Memory held, bytes.
    pub memory_bytes: u64,
    /// Processes and threads.
    pub processes: u64,
    /// Time for which some thread had to wait because of the CPU limit, nanoseconds.
    pub throttled_ns: u64,
    /// Times a process was killed because of the memory limit.
    pub memory_kills: u64,
}

impl Cgroups {
    /// The machine's cgroups, all below one of this `name`.
    pub fn new(name: &str) -> Result<Self> {
        todo!("{name}")
    }

    /// Which version is used.
    pub fn version(&self) -> Version {
        self.version
    }

    /// Makes a cgroup with these limits, or sets those of one that is there.
    pub fn ensure(&self, path: &str, limits: &Limits) -> Result<()> {
        todo!("{path} {limits:?} {:?}", self.roots)
    }

    /// Moves a process into a cgroup that has none below it, and makes that.
    pub fn enter(&self, path: &str, pid: u32) -> Result<()> {
        todo!("{path} {pid}")
    }

    /// What a cgroup with all below it used.
    pub fn usage(&self, path: &str) -> Result<Usage> {
        todo!("{path}")
    }

    /// Ids of the processes in a cgroup and all below it.
    pub fn processes(&self, path: &str) -> Result<Vec<u32>> {
        todo!("{path}")
    }

    /// Kills what is left in a cgroup and all below it, and removes them. No change if there is
    /// none.
    pub fn remove(&self, path: &str, wait: Duration) -> Result<()> {
        todo!("{path} {wait:?}")
    }
}
