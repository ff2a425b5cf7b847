//! The files of a guest's or helper's directory.
//!
//! The directory is root's and in a tree of root's ([`crate::Paths::records`]); what is read from it is held
//! against that all the same: files of root's, no links, of bounded length.

use std::fs;
use std::io;
use std::path::Path;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::bounded::{Bounded, part};
use crate::cgroup::LimitHits;
use crate::error::{Context, Result};
use crate::process::{Exit, Process};
use crate::status::CommandStatus;
use crate::tree;

/// Version of what is in these files. One of another version is ended and made anew.
pub const RECORD_VERSION: u32 = 2;

const RECORD: &str = "record.json";
const SHIM: &str = "shim";
const PID: &str = "pid";
const EXIT: &str = "exit";
const COMMANDS: &str = "commands";

/// One file.
const FILE: Bounded = Bounded { bytes_max: 1 << 16 };

/// What the OCI runtime writes; taken over into [`PID`].
pub(crate) const RUNC_PID: &str = "runc.pid";

/// Which kind of process a record is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Kind {
    Guest,
    Helper,
}

/// What whoever comes next has to know of a guest or helper. Written first, removed last. Names no
/// program and no path.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Record {
    /// [`RECORD_VERSION`].
    pub version: u32,
    pub kind: Kind,
    /// That of the guest's limits, or of the helper's processes.
    pub cgroup: String,
    /// What a command that is run in a guest may open.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub open_files_max: Option<u64>,
    /// Whether a guest that can run commands as its users has a root of its own (see
    /// [`crate::bundle::init_call`]); `None`: it can't.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<bool>,
    /// Refusals by its cgroup's limits before the current limits were set.
    #[serde(default, skip_serializing_if = "LimitHits::is_none")]
    pub hits_before: LimitHits,
}

/// A directory of a guest or helper.
#[derive(Clone, Copy)]
pub(crate) struct Store<'a>(pub &'a Path);

impl Store<'_> {
    /// The record, of this version.
    pub fn record(self) -> Result<Option<Record>> {
        let record: Option<Record> = self.read(RECORD)?;
        if let Some(Record { version, .. }) = record
            && version != RECORD_VERSION
        {
            let other = format!("of version {version}, not {RECORD_VERSION}; to be made anew");
            return Err(io::Error::other(other)).at("use", &self.0.join(RECORD));
        }
        Ok(record)
    }

    pub fn set_record(self, record: &Record) -> Result<()> {
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

    pub fn exit(self) -> Result<Option<Exit>> {
        self.read(EXIT)
    }

    pub fn set_exit(self, exit: Exit) -> Result<()> {
        self.write(EXIT, &exit)
    }

    pub fn commands(self) -> Result<Option<Vec<CommandStatus>>> {
        self.read(COMMANDS)
    }

    pub fn set_commands(self, commands: &[CommandStatus]) -> Result<()> {
        self.write(COMMANDS, &commands)
    }

    /// Whether there is anything to remove.
    pub fn exists(self) -> bool {
        self.0.join(RECORD).exists()
    }

    /// Removes what this crate puts there, the record last, and the directory if nothing else is
    /// in it.
    pub fn remove(self) -> Result<()> {
        tree::remove(&self.0.join(crate::spec::BUNDLE))?;
        for name in [SHIM, PID, EXIT, COMMANDS, RUNC_PID, RECORD] {
            let path = self.0.join(name);
            tree::remove(&part(&path))?;
            tree::remove(&path)?;
        }
        // Not if somebody else has files there.
        let _ = fs::remove_dir(self.0);
        Ok(())
    }

    fn read<T: DeserializeOwned>(self, name: &str) -> Result<Option<T>> {
        let path = self.0.join(name);
        FILE.read(&path).at("read", &path)
    }

    /// Whole or not at all, whenever the machine stops.
    fn write<T: Serialize>(self, name: &str, value: &T) -> Result<()> {
        let path = self.0.join(name);
        FILE.write(&path, value).at("write", &path)
    }
}
