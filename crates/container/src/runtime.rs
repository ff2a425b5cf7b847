//! Makes, starts, stops, adopts and removes guests and helpers.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::cgroup::Cgroups;
use crate::error::Result;
use crate::process::{Exit, Process};
use crate::spec::{GuestSpec, HelperSpec, Limits};

/// Where things are.
#[derive(Clone, Debug)]
pub struct Paths {
    /// The OCI runtime, `runc`.
    pub runc: PathBuf,
    /// `pdp-shim`.
    pub shim: PathBuf,
    /// `pdp-init`.
    pub init: PathBuf,
    /// State of the OCI runtime, below the run directory: gone with a reboot.
    pub runc_root: PathBuf,
    /// Unpacked images, below the state directory.
    pub images: PathBuf,
    /// Name of the cgroup below which all others are, e.g. `pdp`.
    pub cgroup: String,
}

/// Makes guests and helpers. Holds nothing that another could not make anew.
#[derive(Debug)]
pub struct Runtime {
    paths: Paths,
    cgroups: Cgroups,
}

/// How a guest or helper is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// Nothing of it, or not whole: [`Runtime::delete`] clears what there may be.
    Absent,
    /// Its namespaces exist, its commands wait for [`Runtime::start`].
    Created(Process),
    /// Runs.
    Running(Process),
    /// Ended; `None` if nobody saw how.
    Exited(Option<Exit>),
}

/// What [`Runtime::list`] found.
#[derive(Clone, Debug, PartialEq)]
pub enum Found {
    /// A guest.
    Guest(GuestSpec),
    /// A helper.
    Helper(HelperSpec),
}

impl Runtime {
    /// Finds out which cgroups there are and makes the runtime's own.
    pub fn new(paths: Paths) -> Result<Self> {
        todo!("{paths:?}")
    }

    /// The cgroups, for those without guest or helper, for limits and for usage.
    pub fn cgroups(&self) -> &Cgroups {
        &self.cgroups
    }

    /// Makes a guest up to its namespaces, so that interfaces can be put into it; its commands get
    /// `fds` from descriptor 3 on. The one that is there must have been deleted.
    pub fn create(&self, spec: &GuestSpec, fds: &[BorrowedFd<'_>]) -> Result<Process> {
        todo!("{spec:?} {fds:?} {:?}", self.paths)
    }

    /// Starts the commands of a guest that was made. No change if it runs.
    pub fn start(&self, dir: &Path) -> Result<()> {
        todo!("{dir:?}")
    }

    /// Starts a helper, which gets `fds` from descriptor 3 on.
    pub fn spawn_helper(&self, spec: &HelperSpec, fds: &[BorrowedFd<'_>]) -> Result<Process> {
        todo!("{spec:?} {fds:?}")
    }

    /// Ends a guest or helper: SIGTERM, and SIGKILL after `grace`. No change if it ended.
    pub fn stop(&self, dir: &Path, grace: Duration) -> Result<()> {
        todo!("{dir:?} {grace:?}")
    }

    /// Removes every trace of a guest or helper, running or half-made; its directory's files that
    /// are not this crate's stay (and with them the directory). No change if there is none.
    pub fn delete(&self, dir: &Path) -> Result<()> {
        todo!("{dir:?}")
    }

    /// How the guest or helper of a directory is.
    pub fn state(&self, dir: &Path) -> Result<State> {
        todo!("{dir:?}")
    }

    /// A process descriptor that polls readable once the guest or helper ends; `None` if it has.
    pub fn wait_exit(&self, dir: &Path) -> Result<Option<OwnedFd>> {
        todo!("{dir:?}")
    }

    /// A command that runs `argv` inside a running guest, with what the caller's standard streams
    /// are; `tty`: standard input is a terminal and the guest's side shall be one too.
    pub fn exec_command(
        &self,
        dir: &Path,
        argv: &[OsString],
        tty: bool,
        env: &BTreeMap<String, String>,
    ) -> Result<std::process::Command> {
        todo!("{dir:?} {argv:?} {tty} {env:?}")
    }

    /// Changes a guest's limits while it runs.
    pub fn update_limits(&self, dir: &Path, limits: &Limits) -> Result<()> {
        todo!("{dir:?} {limits:?}")
    }

    /// All guests and helpers in directories at or below `root`, whole or not.
    pub fn list(&self, root: &Path) -> Result<Vec<Found>> {
        todo!("{root:?}")
    }
}
