//! Places that a daemon has alone: its run directory, state directory, cgroup and directory of BPF pins. Two daemons
//! that share one would each end what the other runs.
//!
//! A claim is a lock of the kernel's on the place itself, whatever path, mount or network namespace leads there, and it
//! goes with the daemon, however that ends:
//!
//! - In the run and the state directory it is on a file, by fcntl(2): of this process alone, and not of the children
//!   that outlive a killed daemon for the moment before they run their program.
//! - Cgroups and BPF file systems hold no such files, so the directory itself is locked, by flock(2). Such children
//!   have that lock too: where whoever took it has ended, its end is waited for, at most [`CHILDREN_WAIT`].
//!
//! Whoever can open a file or directory can lock it, if only for reading. So what is locked is root's alone to open,
//! from before it is locked: a daemon's own cgroup has mode [`DIRECTORY_MODE`], and that tells it from those that are
//! nobody's and anybody may lock. A daemon has its own locked when it looks at those above and below, and so do others:
//! of two that would have one in the other's, not both see nothing.

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;
use pdp_container::Process;
use pdp_container::cgroup::{Cgroups, descendants};
use rustix::fs::{FlockOperation, fcntl_lock, flock};
use rustix::io::Errno;

use crate::host::HostError;

/// The file that is locked in the run directory.
pub const RUN_LOCK: &str = "pdpd.lock";

/// The file that is locked in the state directory.
pub const STATE_LOCK: &str = "state.lock";

/// Mode of a file that is locked.
const FILE_MODE: u32 = 0o600;

/// Mode of a directory that is locked itself.
const DIRECTORY_MODE: u32 = pdp_container::cgroup::OWN_MODE;

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
    let words = format!("cgroup {cgroup}");
    for path in cgroups.own().map_err(HostError::from)? {
        let place = Place { words: words.clone(), option: ", or another --cgroup", path: &path };
        let mut directory = place.claim_directory(&path)?;
        // Up to the one below the root.
        let above = path.ancestors().skip(1).take(Path::new(cgroup).components().count() - 1);
        directory.above = above.map(Path::to_owned).collect();
        directories.push(directory);
    }
    for Directory { path, above, .. } in &directories {
        let place = Place { words: words.clone(), option: ", or another --cgroup", path };
        let below = descendants(path).into_iter().filter(|below| below != path);
        above.iter().cloned().chain(below).try_for_each(|other| place.look(&other))?;
    }
    // Without a BPF file system nobody pins anything.
    let there = !pins.starts_with(pdp_net::xdp::BPF_FS) || pdp_net::xdp::mount_bpf_fs().is_ok();
    if there && make_directory(pins).is_ok() {
        let words = format!("directory {} of BPF pins", pins.display());
        let place = Place { words, option: ", or another --bpf-pin-dir", path: pins };
        directories.push(place.claim_directory(pins)?);
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
                None => format!("process {pid}"),
            },
            None => "another process".to_owned(),
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
            let mut open = File::options();
            open.create(true).append(true).read(true).mode(FILE_MODE);
            let file = open.open(&path).map_err(&failed)?;
            // An older version made it readable.
            let mode = fs::Permissions::from_mode(FILE_MODE);
            file.set_permissions(mode).map_err(&failed)?;
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
    fn claim_directory(&self, path: &Path) -> Result<Directory, ClaimError> {
        let failed = self.failed();
        loop {
            make_directory(path).map_err(&failed)?;
            let file = File::open(path).map_err(&failed)?;
            let mode = fs::Permissions::from_mode(DIRECTORY_MODE);
            file.set_permissions(mode).map_err(&failed)?;
            self.lock(&file, FlockOperation::NonBlockingLockExclusive)?;
            if is_at(&file, path) {
                return Ok(Directory { path: path.into(), above: Vec::new(), _file: file });
            }
        }
    }

    /// Looks whether another has claimed a directory.
    fn look(&self, path: &Path) -> Result<(), ClaimError> {
        let Ok(file) = File::open(path) else { return Ok(()) };
        let open_to_others = file.metadata().is_ok_and(|meta| meta.mode() & 0o077 != 0);
        if open_to_others {
            return Ok(());
        }
        self.lock(&file, FlockOperation::NonBlockingLockShared)
    }

    fn lock(&self, file: &File, how: FlockOperation) -> Result<(), ClaimError> {
        let end = Instant::now() + CHILDREN_WAIT;
        loop {
            match flock(file, how) {
                Ok(()) => return Ok(()),
                Err(Errno::WOULDBLOCK) => {
                    let holder = holder_of_directory(file);
                    if holder.is_some() || Instant::now() > end {
                        return Err(self.taken(holder));
                    }
                    std::thread::sleep(LOOK_PAUSE);
                }
                Err(error) => return Err(self.failed()(error.into())),
            }
        }
    }
}

fn make_directory(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(DIRECTORY_MODE).create(path)
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

/// A locked directory; removed at the end if it is empty, and then those above it that are.
#[derive(Debug)]
struct Directory {
    path: PathBuf,
    above: Vec<PathBuf>,
    _file: File,
}

impl Drop for Directory {
    fn drop(&mut self) {
        let mut paths = std::iter::once(&self.path).chain(&self.above);
        let _ = paths.try_for_each(fs::remove_dir);
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

/// The run directory of a daemon, by the lock that it has there: nobody else can open it.
fn run_directory_of(pid: u32) -> Option<PathBuf> {
    let mut open = fs::read_dir(format!("/proc/{pid}/fd")).ok()?.flatten();
    let lock = open.find_map(|descriptor| {
        let path = fs::read_link(descriptor.path()).ok()?;
        let meta = fs::metadata(descriptor.path()).ok()?;
        let own = meta.uid() == rustix::process::geteuid().as_raw() && meta.mode() & 0o077 == 0;
        (own && path.file_name()? == RUN_LOCK).then_some(path)
    })?;
    lock.parent().map(Path::to_owned)
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::process::CommandExt;
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
        let exclusive = || claim.claim_directory(&path);
        let refused = exclusive().unwrap_err().to_string();
        let by = format!("it is in use by process {};", holder.id());
        assert!(refused.starts_with(&by), "{refused}");
        holder.kill().unwrap();
        holder.wait().unwrap();
        drop(exclusive().unwrap());
        assert!(!path.exists(), "an empty one goes with its claim");
    }

    fn as_nobody(program: &str) -> Command {
        let mut command = Command::new(program);
        command.uid(65534).gid(65534);
        command
    }

    #[test]
    fn nobody_else_can_lock_what_is_claimed_nor_keep_one_from_claiming_below_what_is_not() {
        let above = tempfile::tempdir().unwrap();
        let above = above.path();
        fs::set_permissions(above, fs::Permissions::from_mode(0o755)).unwrap();
        let path = above.join("own");
        let claim = Place { words: "it".into(), option: "", path: &path };
        let open_to_nobody =
            |path: &Path| as_nobody("test").arg("-r").arg(path).status().unwrap().success();
        let mut holder = as_nobody("flock");
        holder.arg("-n").arg(above).args(["sh", "-c", "echo; read _"]);
        let mut holder = holder.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        holder.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
        claim.look(above).unwrap();
        holder.kill().unwrap();
        holder.wait().unwrap();

        // As an older version left them.
        fs::create_dir(&path).unwrap();
        fs::write(path.join(RUN_LOCK), "").unwrap();
        assert!(open_to_nobody(&path.join(RUN_LOCK)));
        let _file = claim.claim_file(RUN_LOCK).unwrap();
        assert!(!open_to_nobody(&path.join(RUN_LOCK)));
        let directory = claim.claim_directory(&path).unwrap();
        assert!(!open_to_nobody(&path));
        let taken = claim.look(&path).unwrap_err().to_string();
        assert!(
            taken.contains(&format!("the daemon with pid {} and", std::process::id())),
            "{taken}"
        );
        drop(directory);
        claim.look(&path).unwrap();
    }

    #[test]
    fn a_cgroup_is_refused_that_has_a_claimed_one_above_or_below() {
        let place = tempfile::tempdir().unwrap();
        let top = format!("pdp-claim-{}", std::process::id());
        let middle = format!("{top}/middle");
        let claimed = |of: &str, cgroup: &str| {
            let [run, state, pins] =
                ["run", "state", "pins"].map(|kind| place.path().join(of).join(kind));
            claim(Places { run: &run, state: &state, cgroup, pins: &pins })
        };
        let first = claimed("1", &middle).unwrap();
        for cgroup in [&top, &middle, &format!("{middle}/inner")] {
            let refused = claimed("2", cgroup).map(drop).unwrap_err();
            assert!(matches!(refused, ClaimError::Taken { .. }), "{cgroup}: {refused}");
        }
        let beside = claimed("3", &format!("{top}/beside")).unwrap();
        let dirs = Cgroups::new(&top).unwrap();
        assert!(dirs.exists("beside") && !dirs.exists("middle/inner"));
        drop((first, beside));
        assert!(!dirs.exists(""), "empty ones go, those above too");
    }
}
