//! Places that a daemon has alone: its run directory, state directory, cgroup and directory of BPF pins. Two daemons
//! that share one would each end what the other runs.
//!
//! A claim is a lock of the kernel's on the place itself, whatever path, mount or network namespace leads there, and it
//! goes with the daemon, however that ends:
//!
//! - In the run and the state directory it is on a file, by fcntl(2): of this process alone, and not of the children
//!   that outlive a killed daemon for the moment before they run their program.
//! - Cgroups and BPF file systems hold no such files, so the directory itself is locked, by flock(2). Such children
//!   have that lock too: where whoever took it has ended, its end is waited for, at most [`CHILDREN_WAIT`]. The
//!   cgroups above are locked as shared, so that nobody claims one in which there is another's.

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;
use pdp_container::Process;
use pdp_container::cgroup::Cgroups;
use rustix::fs::{FlockOperation, fcntl_lock, flock};
use rustix::io::Errno;

use crate::host::HostError;

/// The file that is locked in the run directory.
pub const RUN_LOCK: &str = "pdpd.lock";

/// The file that is locked in the state directory.
pub const STATE_LOCK: &str = "state.lock";

/// Longest wait for children of a killed daemon to run their programs.
const CHILDREN_WAIT: Duration = Duration::from_secs(5);

/// Pause between two looks.
const LOOK_PAUSE: Duration = Duration::from_millis(10);

/// Places, each to be one daemon's.
#[derive(Clone, Copy, Debug)]
pub struct Places<'a> {
    /// The run directory.
    pub run: &'a Path,
    /// The state directory.
    pub state: &'a Path,
    /// Name of the cgroup.
    pub cgroup: &'a str,
    /// Directory of BPF pins.
    pub pins: &'a Path,
}

/// Why a place can't be this daemon's.
#[derive(Debug, thiserror::Error)]
pub enum ClaimError {
    /// It is another's.
    #[error(
        "{place} is in use by {holder}; start this one with --name NAME, which gives it places of its own{other}"
    )]
    Taken {
        /// The place.
        place: String,
        /// Whose it is.
        holder: String,
        /// How to give it another place alone.
        other: &'static str,
    },
    /// It can't be made or locked.
    #[error("{place} can't be locked: {path}")]
    Io {
        /// The place.
        place: String,
        /// Where it is.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// The machine's cgroups can't be used.
    #[error(transparent)]
    Host(#[from] HostError),
}

/// Places that are this daemon's, as long as this is there.
#[derive(Debug)]
pub struct Claims {
    _directories: Vec<Directory>,
    _files: [LockFile; 2],
}

/// Makes places that are not there, and claims them.
///
/// # Errors
/// One of them is another daemon's. Of those that were not there none is left then.
pub fn claim(places: Places<'_>) -> Result<Claims, ClaimError> {
    let Places { run, state, cgroup, pins } = places;
    let run = Place {
        words: format!("run directory {}", run.display()),
        option: ", or another --run-dir",
        path: run,
    };
    let state = Place {
        words: format!("state directory {}", state.display()),
        option: ", or another --state-dir",
        path: state,
    };
    let mut files = [run.claim_file(RUN_LOCK)?, state.claim_file(STATE_LOCK)?];
    let mut directories = Vec::new();
    let cgroups = Cgroups::new(cgroup).map_err(HostError::from)?;
    for path in cgroups.own().map_err(HostError::from)? {
        let words = format!("cgroup {cgroup}");
        let place = Place { words, option: ", or another --cgroup", path: &path };
        // From its own up to the one below the root.
        let above = Path::new(cgroup).components().count() - 1;
        directories.push(place.claim_directory(&path, FlockOperation::NonBlockingLockExclusive)?);
        for path in path.ancestors().skip(1).take(above) {
            directories.push(place.claim_directory(path, FlockOperation::NonBlockingLockShared)?);
        }
    }
    // Without a BPF file system nobody pins anything.
    let there = !pins.starts_with(pdp_net::xdp::BPF_FS) || pdp_net::xdp::mount_bpf_fs().is_ok();
    if there && fs::create_dir_all(pins).is_ok() {
        let words = format!("directory {} of BPF pins", pins.display());
        let place = Place { words, option: ", or another --bpf-pin-dir", path: pins };
        directories.push(place.claim_directory(pins, FlockOperation::NonBlockingLockExclusive)?);
    }
    files.iter_mut().for_each(|file| file.stays = true);
    Ok(Claims { _directories: directories, _files: files })
}

/// A place to claim.
struct Place<'a> {
    words: String,
    option: &'static str,
    path: &'a Path,
}

impl Place<'_> {
    fn failed(&self) -> impl Fn(io::Error) -> ClaimError {
        |source| ClaimError::Io { place: self.words.clone(), path: self.path.into(), source }
    }

    fn taken(&self, holder: Option<u32>) -> ClaimError {
        let holder = match holder {
            Some(pid) => match run_directory_of(pid) {
                Some(run) => {
                    format!("the daemon with pid {pid} and run directory {}", run.display())
                }
                None => format!("the daemon with pid {pid}"),
            },
            None => "another daemon".to_owned(),
        };
        ClaimError::Taken { place: self.words.clone(), holder, other: self.option }
    }

    /// Claims a directory by a file in it.
    fn claim_file(&self, name: &str) -> Result<LockFile, ClaimError> {
        let failed = self.failed();
        let made = !self.path.exists();
        DirBuilder::new().recursive(true).mode(0o711).create(self.path).map_err(&failed)?;
        let path = self.path.join(name);
        loop {
            let open = File::options().create(true).append(true).read(true).open(&path);
            let file = open.map_err(&failed)?;
            match fcntl_lock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {}
                Err(Errno::AGAIN | Errno::ACCESS) => {
                    return Err(self.taken(holder_of_file(&file)));
                }
                Err(error) => return Err(failed(error.into())),
            }
            // Whoever had it may have removed it meanwhile.
            if is_at(&file, &path) {
                return Ok(LockFile { path, made, stays: false, _file: file });
            }
        }
    }

    /// Claims a directory itself.
    fn claim_directory(&self, path: &Path, how: FlockOperation) -> Result<Directory, ClaimError> {
        let failed = self.failed();
        let end = Instant::now() + CHILDREN_WAIT;
        loop {
            fs::create_dir_all(path).map_err(&failed)?;
            let file = File::open(path).map_err(&failed)?;
            match flock(&file, how) {
                Ok(()) if is_at(&file, path) => {
                    return Ok(Directory { path: path.into(), _file: file });
                }
                Ok(()) => {}
                Err(Errno::WOULDBLOCK) => {
                    let holder = holder_of_directory(&file);
                    if holder.is_some() || Instant::now() > end {
                        return Err(self.taken(holder));
                    }
                    std::thread::sleep(LOOK_PAUSE);
                }
                Err(error) => return Err(failed(error.into())),
            }
        }
    }
}

/// A locked file. Unless it stays, it goes again with this, and with it the directory that was made for it.
#[derive(Debug)]
struct LockFile {
    path: PathBuf,
    made: bool,
    stays: bool,
    _file: File,
}

impl Drop for LockFile {
    fn drop(&mut self) {
        if self.stays {
            return;
        }
        let _ = fs::remove_file(&self.path);
        if self.made {
            let _ = self.path.parent().map(fs::remove_dir);
        }
    }
}

/// A locked directory; removed at the end if it is empty.
#[derive(Debug)]
struct Directory {
    path: PathBuf,
    _file: File,
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.path);
    }
}

/// Whether an open file is what a path leads to.
fn is_at(file: &File, path: &Path) -> bool {
    let id = |meta: fs::Metadata| (meta.dev(), meta.ino());
    file.metadata().is_ok_and(|open| fs::metadata(path).is_ok_and(|there| id(open) == id(there)))
}

/// Who has a file locked by fcntl(2), of the processes that this one can know of.
fn holder_of_file(file: &File) -> Option<u32> {
    let mut lock = libc::flock {
        l_type: libc::F_WRLCK as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    };
    fcntl(file.as_fd(), FcntlArg::F_GETLK(&mut lock)).ok()?;
    u32::try_from(lock.l_pid).ok().filter(|pid| *pid > 0)
}

/// Who has locked a directory by flock(2), if that still runs.
fn holder_of_directory(file: &File) -> Option<u32> {
    let meta = file.metadata().ok()?;
    let (major, minor) = (rustix::fs::major(meta.dev()), rustix::fs::minor(meta.dev()));
    let id = format!("{major:02x}:{minor:02x}:{}", meta.ino());
    let locks = fs::read_to_string("/proc/locks").ok()?;
    locks.lines().find_map(|line| {
        // "1: FLOCK  ADVISORY  WRITE 4711 00:1d:276895 0 EOF"
        let fields: Vec<&str> = line.split_whitespace().collect();
        let [_, "FLOCK", _, _, pid, at, ..] = fields[..] else { return None };
        let pid = pid.parse().ok().filter(|_| at == id)?;
        Process::of(pid).map(|process| process.pid)
    })
}

/// The run directory of a daemon, by the lock that it has there.
fn run_directory_of(pid: u32) -> Option<PathBuf> {
    let open = fs::read_dir(format!("/proc/{pid}/fd")).ok()?.flatten();
    let mut paths = open.filter_map(|descriptor| fs::read_link(descriptor.path()).ok());
    let lock = paths.find(|path| path.file_name().is_some_and(|name| name == RUN_LOCK))?;
    lock.parent().map(Path::to_owned)
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::process::{Command, Stdio};

    use super::*;

    /// flock(1) takes the lock and has a child that outlives it with the lock.
    #[test]
    fn a_directory_is_whose_lock_it_has_and_not_a_dead_ones() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("pins");
        fs::create_dir(&path).unwrap();
        let mut holder = Command::new("flock")
            .arg(&path)
            .args(["sh", "-c", "echo; exec sleep 1"])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        holder.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
        let claim = Place { words: "it".into(), option: "", path: &path };
        let exclusive = || claim.claim_directory(&path, FlockOperation::NonBlockingLockExclusive);
        let refused = exclusive().unwrap_err().to_string();
        let by = format!("it is in use by the daemon with pid {};", holder.id());
        assert!(refused.starts_with(&by), "{refused}");
        holder.kill().unwrap();
        holder.wait().unwrap();
        drop(exclusive().unwrap());
        assert!(!path.exists(), "an empty one goes with its claim");
    }
}
