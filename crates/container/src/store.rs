//! Files of a guest's or helper's directory.
//!
//! The directory is root's, in a tree of root's ([`crate::RuntimePaths::records`]). Its files are
//! checked all the same: they must be files of root's, not links, and of bounded size.

use std::fs;
use std::io;
use std::path::Path;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::bounded::{Bounded, part};
use crate::cgroup::LimitHits;
use crate::error::{ErrorContext, Result};
use crate::process::{Process, ProcessOutcome};
use crate::safe_removal;
use crate::status::GuestCommandStatus;

/// Version of these files. Guests and helpers of another version are ended and made anew.
pub const RECORD_VERSION: u32 = 2;

const RECORD: &str = "record.json";
const SHIM: &str = "shim";
const PID: &str = "pid";
const EXIT: &str = "exit";
const COMMANDS: &str = "commands";

/// Size limit of each file.
const FILE: Bounded = Bounded { bytes_max: 1 << 16 };

/// File with the process id that the OCI runtime writes. Its content is taken over into [`PID`].
pub(crate) const RUNC_PID: &str = "runc.pid";

/// Kind of process that a record describes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum ProcessKind {
    Guest,
    Helper,
}

/// Facts about a guest or helper that a later daemon needs. Written first, removed last. Has no
/// program and no path.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ProcessRecord {
    /// [`RECORD_VERSION`].
    pub version: u32,
    pub kind: ProcessKind,
    /// Cgroup of the guest's limits, or of the helper's processes.
    pub cgroup: String,
    /// Limit of open files for commands that run later in a guest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub open_files_max: Option<u64>,
    /// True if the guest has a root of its own (see [`crate::bundle::init_call`]). `None`: it can't
    /// run commands as its users.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<bool>,
    /// Refusals by its cgroup's limits before the current limits were set.
    #[serde(default, skip_serializing_if = "LimitHits::is_none")]
    pub hits_before: LimitHits,
}

/// A directory of a guest or helper.
#[derive(Clone, Copy)]
pub(crate) struct RecordStore<'a>(pub &'a Path);

impl RecordStore<'_> {
    /// Returns the record if it has this version.
    pub fn record(self) -> Result<Option<ProcessRecord>> {
        let record: Option<ProcessRecord> = self.read(RECORD)?;
        if let Some(ProcessRecord { version, .. }) = record
            && version != RECORD_VERSION
        {
            let other = format!("version {version}, not {RECORD_VERSION} (recreate it)");
            return Err(io::Error::other(other)).at("use", &self.0.join(RECORD));
        }
        Ok(record)
    }

    pub fn set_record(self, record: &ProcessRecord) -> Result<()> {
        self.write(RECORD, record)
    }

    pub fn shim(self) -> Result<Option<Process>> {
        self.read(SHIM)
    }

    pub fn set_shim(self, process: Process) -> Result<()> {
        self.write(SHIM, &process)
    }

    pub fn process(self) -> Result<Option<Process>> {
        self.read(PID)
    }

    pub fn set_process(self, process: Process) -> Result<()> {
        self.write(PID, &process)
    }

    pub fn outcome(self) -> Result<Option<ProcessOutcome>> {
        self.read(EXIT)
    }

    pub fn set_outcome(self, outcome: ProcessOutcome) -> Result<()> {
        self.write(EXIT, &outcome)
    }

    pub fn commands(self) -> Result<Option<Vec<GuestCommandStatus>>> {
        self.read(COMMANDS)
    }

    pub fn set_commands(self, commands: &[GuestCommandStatus]) -> Result<()> {
        self.write(COMMANDS, &commands)
    }

    /// True if there is anything to remove.
    pub fn exists(self) -> bool {
        self.0.join(RECORD).exists()
    }

    /// Removes the files that this crate makes, the record last, and the directory if it is empty
    /// then.
    pub fn remove(self) -> Result<()> {
        safe_removal::remove(&self.0.join(crate::spec::BUNDLE))?;
        for name in [SHIM, PID, EXIT, COMMANDS, RUNC_PID, RECORD] {
            let path = self.0.join(name);
            safe_removal::remove(&part(&path))?;
            safe_removal::remove(&path)?;
        }
        // Fails if there are other files, which stay.
        let _ = fs::remove_dir(self.0);
        Ok(())
    }

    fn read<T: DeserializeOwned>(self, name: &str) -> Result<Option<T>> {
        let path = self.0.join(name);
        FILE.read(&path).at("read", &path)
    }

    /// Writes a file atomically, even if the machine stops.
    fn write<T: Serialize>(self, name: &str, value: &T) -> Result<()> {
        let path = self.0.join(name);
        FILE.write(&path, value).at("write", &path)
    }
}
