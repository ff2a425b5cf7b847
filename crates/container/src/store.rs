//! The files of a guest's or helper's directory.
//!
//! The directory is root's and in a tree of root's ([`crate::Paths::records`]); what is read from it is held
//! against that all the same: files of root's, no links, of bounded length.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use rustix::fs::{FileType, Mode, OFlags};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

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

/// Bytes of one file.
const FILE_BYTES_MAX: u64 = 1 << 16;

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
        let files = [SHIM, PID, EXIT, COMMANDS, RUNC_PID, RECORD];
        for name in files.into_iter().flat_map(|name| [part(name), name.to_owned()]) {
            tree::remove(&self.0.join(name))?;
        }
        // Not if somebody else has files there.
        let _ = fs::remove_dir(self.0);
        Ok(())
    }

    fn read<T: DeserializeOwned>(self, name: &str) -> Result<Option<T>> {
        let path = self.0.join(name);
        match read_own(&path) {
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
        fs::set_permissions(&part, fs::Permissions::from_mode(0o600)).at("write", &part)?;
        fs::rename(&part, &path).at("write", &path)
    }
}

/// Reads a file of this process's user's: no link, no device, no pipe that nobody writes.
fn read_own(path: &Path) -> io::Result<Vec<u8>> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = rustix::fs::open(path, flags, Mode::empty())?;
    let stat = rustix::fs::fstat(&file)?;
    let own = stat.st_uid == rustix::process::geteuid().as_raw();
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile || !own {
        return Err(io::Error::other("not a file of root's; somebody else put it there"));
    }
    let mut bytes = Vec::new();
    File::from(file).take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > FILE_BYTES_MAX {
        return Err(io::Error::other(format!("more than {FILE_BYTES_MAX} bytes")));
    }
    Ok(bytes)
}

fn part(name: &str) -> String {
    format!(".{name}.part")
}
