//! Paths that a daemon has for itself: run directory, state directory, cgroup, and directory
//! of BPF pins. Two daemons with a path in common would each end the other's processes.
//!
//! A claim is a kernel lock on the object itself, whatever path, mount or network namespace
//! leads there. The kernel releases it when the daemon ends, however that happens:
//!
//! - Run and state directory: fcntl(2) lock on a file in it. The lock belongs to this process
//!   alone. Children that outlive a killed daemon, until they run their program, do not have it.
//! - Cgroups and BPF file systems hold no such files, so the directory itself is locked by
//!   flock(2). Such children inherit this lock. If the process that took it has ended, pdpd waits
//!   at most [`CHILDREN_WAIT`] for the lock.
//!
//! Whoever can open a file or directory can lock it, even if only for reading. Therefore only
//! root can open a locked object, from before it is locked. A daemon's own cgroup has mode
//! [`DIRECTORY_MODE`]. This distinguishes it from cgroups that belong to no daemon and that
//! anybody may lock. Each daemon locks its own cgroup before it checks those above and below.
//! If one daemon's cgroup would contain the other's, at least one of them sees the conflict.

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

/// File that is locked in the run directory.
pub const RUN_LOCK: &str = "pdpd.lock";

/// File that is locked in the state directory.
pub const STATE_LOCK: &str = "state.lock";

/// Mode of a locked file.
const FILE_MODE: u32 = 0o600;

/// Mode of a locked directory.
const DIRECTORY_MODE: u32 = pdp_container::cgroup::OWN_MODE;

/// Longest wait for children of a killed daemon to run their programs.
const CHILDREN_WAIT: Duration = Duration::from_secs(5);

/// Pause between two attempts to lock.
const RETRY_PAUSE: Duration = Duration::from_millis(10);

/// Paths that one daemon claims.
#[derive(Clone, Copy, Debug)]
pub struct ClaimPaths<'a> {
    /// The run directory.
    pub run: &'a Path,
    /// The state directory.
    pub state: &'a Path,
    /// Name of the cgroup.
    pub cgroup: &'a str,
    /// Directory of BPF pins.
    pub pins: &'a Path,
}

/// Why this daemon can't claim a path.
#[derive(Debug, thiserror::Error)]
pub enum ClaimError {
    /// Another daemon has claimed it.
    #[error(
        "{place} is in use by {holder}; start this daemon with --name NAME, which gives it its own \
         paths{other}"
    )]
    Taken {
        /// The path, described for the user.
        place: String,
        /// The process that has claimed it.
        holder: String,
        /// Option with which to choose another path for this object alone.
        other: &'static str,
    },
    /// The path can't be created or locked.
    #[error("{place} can't be locked: {path}")]
    Io {
        /// The path, described for the user.
        place: String,
        /// File or directory.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// The machine's cgroups can't be used.
    #[error(transparent)]
    Host(#[from] HostError),
}

/// Paths that belong to this daemon, as long as this value lives.
#[derive(Debug)]
pub struct Claims {
    _directories: Vec<LockedDirectory>,
    _files: [LockFile; 2],
}

/// Creates missing paths and claims all.
///
/// # Errors
/// Another daemon has claimed one of them. Paths that did not exist before are removed then.
pub fn claim(places: ClaimPaths<'_>) -> Result<Claims, ClaimError> {
    let ClaimPaths { run, state, cgroup, pins } = places;
    let run = ClaimTarget {
        words: format!("run directory {}", run.display()),
        option: ", or another --run-dir",
        path: run,
    };
    let state = ClaimTarget {
        words: format!("state directory {}", state.display()),
        option: ", or another --state-dir",
        path: state,
    };
    let mut files = [run.claim_file(RUN_LOCK)?, state.claim_file(STATE_LOCK)?];
    let mut directories = Vec::new();
    let cgroups = Cgroups::new(cgroup).map_err(HostError::from)?;
    let words = format!("cgroup {cgroup}");
    for path in cgroups.own().map_err(HostError::from)? {
        let place =
            ClaimTarget { words: words.clone(), option: ", or another --cgroup", path: &path };
        let mut directory = place.claim_directory(&path)?;
        // Up to the child of the root cgroup.
        let above = path.ancestors().skip(1).take(Path::new(cgroup).components().count() - 1);
        directory.above = above.map(Path::to_owned).collect();
        directories.push(directory);
    }
    for LockedDirectory { path, above, .. } in &directories {
        let place = ClaimTarget { words: words.clone(), option: ", or another --cgroup", path };
        let below = descendants(path).into_iter().filter(|below| below != path);
        above.iter().cloned().chain(below).try_for_each(|other| place.check_unclaimed(&other))?;
    }
    // Without a BPF file system nothing is pinned.
    let usable = !pins.starts_with(pdp_net::xdp::BPF_FS) || pdp_net::xdp::mount_bpf_fs().is_ok();
    if usable && make_directory(pins).is_ok() {
        let words = format!("directory {} of BPF pins", pins.display());
        let place = ClaimTarget { words, option: ", or another --bpf-pin-dir", path: pins };
        directories.push(place.claim_directory(pins)?);
    }
    files.iter_mut().for_each(|file| file.stays = true);
    Ok(Claims { _directories: directories, _files: files })
}

/// One path to claim.
struct ClaimTarget<'a> {
    words: String,
    option: &'static str,
    path: &'a Path,
}

impl ClaimTarget<'_> {
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

    /// Claims a directory by a lock on a file in it.
    fn claim_file(&self, name: &str) -> Result<LockFile, ClaimError> {
        let failed = self.failed();
        let made = !self.path.exists();
        DirBuilder::new().recursive(true).mode(0o711).create(self.path).map_err(&failed)?;
        let path = self.path.join(name);
        loop {
            let mut open = File::options();
            open.create(true).append(true).read(true).mode(FILE_MODE);
            let file = open.open(&path).map_err(&failed)?;
            // Older versions made it readable.
            let mode = fs::Permissions::from_mode(FILE_MODE);
            file.set_permissions(mode).map_err(&failed)?;
            match fcntl_lock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {}
                Err(Errno::AGAIN | Errno::ACCESS) => {
                    return Err(self.taken(holder_of_file(&file)));
                }
                Err(error) => return Err(failed(error.into())),
            }
            // The previous holder may have removed the file meanwhile.
            if is_at(&file, &path) {
                return Ok(LockFile { path, made, stays: false, _file: file });
            }
        }
    }

    /// Claims a directory by a lock on itself.
    fn claim_directory(&self, path: &Path) -> Result<LockedDirectory, ClaimError> {
        let failed = self.failed();
        loop {
            make_directory(path).map_err(&failed)?;
            let file = File::open(path).map_err(&failed)?;
            let mode = fs::Permissions::from_mode(DIRECTORY_MODE);
            file.set_permissions(mode).map_err(&failed)?;
            self.lock(&file, FlockOperation::NonBlockingLockExclusive)?;
            if is_at(&file, path) {
                return Ok(LockedDirectory { path: path.into(), above: Vec::new(), _file: file });
            }
        }
    }

    /// Checks that no other daemon has claimed a directory.
    fn check_unclaimed(&self, path: &Path) -> Result<(), ClaimError> {
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
                    std::thread::sleep(RETRY_PAUSE);
                }
                Err(error) => return Err(self.failed()(error.into())),
            }
        }
    }
}

fn make_directory(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(DIRECTORY_MODE).create(path)
}

/// A locked file. Unless `stays` is set, dropping it removes the file,
/// and the directory if it was created for the file.
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

/// A locked directory. Dropping it removes the directory if it is
/// empty, and then each empty directory above.
#[derive(Debug)]
struct LockedDirectory {
    path: PathBuf,
    above: Vec<PathBuf>,
    _file: File,
}

impl Drop for LockedDirectory {
    fn drop(&mut self) {
        let mut paths = std::iter::once(&self.path).chain(&self.above);
        let _ = paths.try_for_each(fs::remove_dir);
    }
}

/// True if an open file is the one at this path.
fn is_at(file: &File, path: &Path) -> bool {
    let id = |meta: fs::Metadata| (meta.dev(), meta.ino());
    file.metadata().is_ok_and(|open| fs::metadata(path).is_ok_and(|named| id(open) == id(named)))
}

/// Returns the process that has locked a file by fcntl(2), if it is visible to this one.
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

/// Returns the process that has locked a directory by flock(2), if it still runs.
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

/// Returns a daemon's run directory, found by its open lock file, which only that daemon can open.
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

    /// flock(1) takes the lock and starts a child that outlives it with the lock.
    #[test]
    fn directory_claim_ends_with_its_lock_holder() {
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
        let claim = ClaimTarget { words: "it".into(), option: "", path: &path };
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
    fn other_users_cannot_block_or_lock_a_claim() {
        let above = tempfile::tempdir().unwrap();
        let above = above.path();
        fs::set_permissions(above, fs::Permissions::from_mode(0o755)).unwrap();
        let path = above.join("own");
        let claim = ClaimTarget { words: "it".into(), option: "", path: &path };
        let open_to_nobody =
            |path: &Path| as_nobody("test").arg("-r").arg(path).status().unwrap().success();
        let mut holder = as_nobody("flock");
        holder.arg("-n").arg(above).args(["sh", "-c", "echo; read _"]);
        let mut holder = holder.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        holder.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
        claim.check_unclaimed(above).unwrap();
        holder.kill().unwrap();
        holder.wait().unwrap();

        // State that an older version left.
        fs::create_dir(&path).unwrap();
        fs::write(path.join(RUN_LOCK), "").unwrap();
        assert!(open_to_nobody(&path.join(RUN_LOCK)));
        let _file = claim.claim_file(RUN_LOCK).unwrap();
        assert!(!open_to_nobody(&path.join(RUN_LOCK)));
        let directory = claim.claim_directory(&path).unwrap();
        assert!(!open_to_nobody(&path));
        let taken = claim.check_unclaimed(&path).unwrap_err().to_string();
        assert!(
            taken.contains(&format!("the daemon with pid {} and", std::process::id())),
            "{taken}"
        );
        drop(directory);
        claim.check_unclaimed(&path).unwrap();
    }

    #[test]
    fn nested_cgroup_claims_are_refused() {
        let place = tempfile::tempdir().unwrap();
        let top = format!("pdp-claim-{}", std::process::id());
        let middle = format!("{top}/middle");
        let claimed = |of: &str, cgroup: &str| {
            let [run, state, pins] =
                ["run", "state", "pins"].map(|kind| place.path().join(of).join(kind));
            claim(ClaimPaths { run: &run, state: &state, cgroup, pins: &pins })
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
