//! The files of a guest's or helper's directory.

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::error::{Context, Result};
use crate::process::{Exit, Process};
use crate::spec::{GuestSpec, HelperSpec};

const RECORD: &str = "record.json";
const SHIM: &str = "shim";
const PID: &str = "pid";
const EXIT: &str = "exit";

/// What the OCI runtime writes; taken over into [`PID`].
pub(crate) const RUNC_PID: &str = "runc.pid";

/// The guest's log, and what was before.
pub(crate) const LOGS: [&str; 2] = ["log", "log.1"];

/// A guest or helper as it was asked for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[expect(clippy::large_enum_variant, reason = "few are held at a time, most of them guests")]
pub enum Found {
    /// A guest.
    Guest(GuestSpec),
    /// A helper.
    Helper(HelperSpec),
}

impl Found {
    /// Its id.
    pub fn id(&self) -> &str {
        match self {
            Self::Guest(spec) => &spec.id,
            Self::Helper(spec) => &spec.id,
        }
    }

    /// Its directory.
    pub fn dir(&self) -> &Path {
        match self {
            Self::Guest(spec) => &spec.dir,
            Self::Helper(spec) => &spec.dir,
        }
    }

    pub(crate) fn log_bytes_max(&self) -> u64 {
        match self {
            Self::Guest(spec) => spec.log_bytes_max,
            Self::Helper(spec) => spec.log_bytes_max,
        }
    }
}

/// All that the shim and a later process need to know. Written first, removed last.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Record {
    pub what: Found,
    pub runc: PathBuf,
    pub runc_root: PathBuf,
    /// Name of the runtime's cgroup.
    pub cgroup: String,
    /// Descriptors from 3 on that it is given.
    pub fds: usize,
}

/// A directory of a guest or helper.
#[derive(Clone, Copy)]
pub(crate) struct Store<'a>(pub &'a Path);

impl Store<'_> {
    pub fn record(self) -> Result<Option<Record>> {
        self.read(RECORD)
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

    /// Whether there is anything to remove.
    pub fn exists(self) -> bool {
        self.0.join(RECORD).exists()
    }

    /// Removes what this crate puts there, the record last, and the directory if nothing else is
    /// in it.
    pub fn remove(self) -> Result<()> {
        let bundle = self.0.join(crate::spec::BUNDLE);
        match fs::remove_dir_all(&bundle) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(error).at("remove", &bundle);
            }
            _ => {}
        }
        let files = [SHIM, PID, EXIT, RUNC_PID, LOGS[0], LOGS[1], RECORD];
        for name in files.into_iter().flat_map(|name| [part(name), name.to_owned()]) {
            let path = self.0.join(name);
            match fs::remove_file(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(error).at("remove", &path);
                }
                _ => {}
            }
        }
        // Not if somebody else has files there.
        let _ = fs::remove_dir(self.0);
        Ok(())
    }

    fn read<T: DeserializeOwned>(self, name: &str) -> Result<Option<T>> {
        let path = self.0.join(name);
        match fs::read(&path) {
            Ok(bytes) => {
                serde_json::from_slice(&bytes).map(Some).map_err(io::Error::from).at("read", &path)
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error).at("read", &path),
        }
    }

    /// Whole or not at all, whenever the machine stops.
    fn write<T: Serialize>(self, name: &str, value: &T) -> Result<()> {
        let (path, part) = (self.0.join(name), self.0.join(part(name)));
        let bytes = serde_json::to_vec(value).map_err(io::Error::from).at("write", &path)?;
        fs::write(&part, bytes).at("write", &part)?;
        // Files of a guest's configuration are in the record.
        fs::set_permissions(&part, fs::Permissions::from_mode(0o600)).at("write", &part)?;
        fs::rename(&part, &path).at("write", &path)
    }
}

fn part(name: &str) -> String {
    format!(".{name}.part")
}
