//! Makes, starts, stops, adopts and removes guests and helpers.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::bundle::{self, DESCRIPTORS_MAX};
use crate::cgroup::Cgroups;
use crate::error::{Context, Error, Result};
use crate::process::{Exit, Process};
use crate::shim::DESCRIPTOR_FIRST;
use crate::spec::{GuestSpec, HelperSpec, Limits};
use crate::store::{Found, Record, Store};

/// Time that the kernel and the shim have to end what was killed.
const END_WAIT: Duration = Duration::from_secs(10);

/// Time for which a dead guest's shim may write down how it ended.
const EXIT_WAIT: Duration = Duration::from_secs(2);

/// Depth of guests' directories below the run directory.
const LIST_DEPTH_MAX: usize = 8;

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

/// Makes guests and helpers. Holds nothing that another could not make anew, and may be used by
/// several threads for different guests.
#[derive(Clone, Debug)]
pub struct Runtime {
    paths: Paths,
    cgroups: Cgroups,
}

/// How a guest or helper is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Nothing of it, or not whole: [`Runtime::delete`] clears what there may be.
    Absent,
    /// Its namespaces exist, its commands wait for [`Runtime::start`].
    Created(Process),
    /// Runs.
    Running(Process),
    /// Runs, but its shim was killed: nobody keeps its log or will see how it ends, and what it
    /// writes fails. To be deleted.
    Orphaned(Process),
    /// Ended; `None` if nobody saw how (the machine or its shim was stopped).
    Exited(Option<Exit>),
}

impl Runtime {
    /// Finds out which cgroups there are. All paths become absolute.
    pub fn new(mut paths: Paths) -> Result<Self> {
        for path in [&mut paths.runc, &mut paths.shim, &mut paths.init] {
            *path = fs::canonicalize(&*path).at("find", path)?;
        }
        let cgroups = Cgroups::new(&paths.cgroup)?;
        for path in [&mut paths.runc_root, &mut paths.images] {
            DirBuilder::new().recursive(true).mode(0o711).create(&*path).at("make", path)?;
            *path = fs::canonicalize(&*path).at("find", path)?;
        }
        Ok(Self { paths, cgroups })
    }

    /// The cgroups, for limits of helpers' and for usage.
    pub fn cgroups(&self) -> &Cgroups {
        &self.cgroups
    }

    /// Makes a guest up to its namespaces, so that interfaces can be put into it; its commands get
    /// `fds` from descriptor 3 on. One that is there already must be deleted before.
    pub fn create(&self, spec: &GuestSpec, fds: &[BorrowedFd<'_>]) -> Result<Process> {
        bundle::check(spec, fds.len())?;
        let record = self.record(Found::Guest(spec.clone()), fds.len());
        self.begin(&record, fds, || {
            bundle::make(spec, &self.cgroups, &self.paths.init, &self.paths.images)?;
            self.cgroups.ensure(&spec.cgroup, &spec.limits)?;
            self.cgroups.ensure_leaf(&bundle::leaf(&spec.cgroup))
        })?;
        let process = Store(&spec.dir).process()?.ok_or_else(|| Error::Absent(spec.dir.clone()))?;
        if spec.profile.is_forwarding() {
            // The OCI runtime brings it up.
            if let Err(error) = loopback_down(process) {
                let _ = self.delete(&spec.dir);
                return Err(error);
            }
        }
        Ok(process)
    }

    /// Starts the commands of a guest that was made. No change if it runs.
    pub fn start(&self, dir: &Path) -> Result<()> {
        let record = self.guest(dir)?.0;
        match self.state(dir)? {
            State::Running(_) => Ok(()),
            State::Created(_) => runc(&record, "runc start", &["start", record.what.id()]),
            state => Err(Error::Runtime {
                id: record.what.id().to_owned(),
                what: "start",
                text: format!("it is not waiting for that but {state:?}; delete and create it"),
            }),
        }
    }

    /// Starts a helper, which gets `fds` from descriptor 3 on. One that is there already must be
    /// deleted before.
    pub fn spawn_helper(&self, spec: &HelperSpec, fds: &[BorrowedFd<'_>]) -> Result<Process> {
        let fail = |text: &str| Error::Spec { id: spec.id.clone(), text: text.to_owned() };
        if !spec.argv.first().is_some_and(|program| program.starts_with('/')) {
            return Err(fail("its program must be an absolute path"));
        }
        if fds.len() > DESCRIPTORS_MAX {
            return Err(fail("more than 32 descriptors"));
        }
        if !spec.keep_root && spec.uid == 0 {
            return Err(fail("user id 0 has rights beyond those of a helper; give it another"));
        }
        let record = self.record(Found::Helper(spec.clone()), fds.len());
        self.begin(&record, fds, || self.cgroups.ensure_leaf(&spec.cgroup))?;
        Store(&spec.dir).process()?.ok_or_else(|| Error::Absent(spec.dir.clone()))
    }

    /// Ends a guest or helper: SIGTERM, and SIGKILL after `grace`. No change if it ended.
    pub fn stop(&self, dir: &Path, grace: Duration) -> Result<()> {
        let (State::Created(process) | State::Running(process) | State::Orphaned(process)) =
            self.state(dir)?
        else {
            return Ok(());
        };
        if matches!(self.state(dir)?, State::Running(_)) {
            process.signal(Signal::TERM);
            if process.wait(grace) {
                return Ok(());
            }
        }
        process.signal(Signal::KILL);
        if process.wait(END_WAIT) {
            return Ok(());
        }
        let what = format!("process {} of {}", process.pid, dir.display());
        Err(Error::Stuck { what, seconds: END_WAIT.as_secs() })
    }

    /// Removes every trace of a guest or helper, running or half-made; its directory's files that
    /// are not this crate's stay (and with them the directory). No change if there is none.
    pub fn delete(&self, dir: &Path) -> Result<()> {
        let store = Store(dir);
        let Some(record) = store.record()? else { return Ok(()) };
        // A shim that is just making a guest whose maker died would go on behind our back.
        let deadline = Instant::now() + END_WAIT;
        let shim = store.shim()?.filter(Process::is_alive);
        while store.process()?.is_none()
            && shim.is_some_and(|shim| shim.is_alive())
            && Instant::now() < deadline
        {
            std::thread::sleep(Duration::from_millis(5));
        }
        self.stop(dir, Duration::ZERO)?;
        if let Some(shim) = shim
            && !shim.wait(EXIT_WAIT)
        {
            shim.signal(Signal::KILL);
            shim.wait(END_WAIT);
        }
        let leaf = match &record.what {
            Found::Guest(spec) => {
                if record.runc_root.join(&spec.id).exists() {
                    runc(&record, "runc delete", &["delete", "--force", &spec.id])?;
                }
                bundle::leaf(&spec.cgroup)
            }
            // Other helpers may be in its cgroup.
            Found::Helper(spec) => spec.cgroup.clone(),
        };
        if matches!(record.what, Found::Guest(_)) || self.cgroups.processes(&leaf)?.is_empty() {
            self.cgroups.remove_leaf(&leaf, END_WAIT)?;
        }
        store.remove()
    }

    /// How the guest or helper of a directory is.
    pub fn state(&self, dir: &Path) -> Result<State> {
        let store = Store(dir);
        let Some(record) = store.record()? else { return Ok(State::Absent) };
        let Some(process) = store.process()? else { return Ok(State::Absent) };
        let shim = store.shim()?;
        // Looked at before the process, which it outlives.
        let is_watched = shim.is_some_and(|shim| shim.is_alive());
        if process.is_alive() {
            if !is_watched {
                return Ok(State::Orphaned(process));
            }
            // Held until the start, and removed by it.
            let waits = record.runc_root.join(record.what.id()).join("exec.fifo").exists();
            let guest = matches!(record.what, Found::Guest(_));
            return Ok(match guest && waits {
                true => State::Created(process),
                false => State::Running(process),
            });
        }
        if let Some(shim) = shim {
            // It writes down how the guest ended, and ends.
            shim.wait(EXIT_WAIT);
        }
        Ok(State::Exited(store.exit()?))
    }

    /// A process descriptor that polls readable once the guest or helper ended, or its shim was
    /// killed; `None` if it has. [`Runtime::state`] says then how.
    pub fn wait_exit(&self, dir: &Path) -> Result<Option<OwnedFd>> {
        // The shim ends last, when it has written down how the other ended.
        Ok(Store(dir).shim()?.and_then(|shim| shim.pidfd()))
    }

    /// A command that runs `argv` inside a running guest, with what the caller's standard streams
    /// are; `tty`: standard input is a terminal and the guest's side shall be one too.
    pub fn exec_command(
        &self,
        dir: &Path,
        argv: &[OsString],
        tty: bool,
        env: &BTreeMap<String, String>,
    ) -> Result<Command> {
        let (record, spec) = self.guest(dir)?;
        if argv.is_empty() {
            let text = "no command to run in it was given".to_owned();
            return Err(Error::Spec { id: spec.id, text });
        }
        let mut command = runc_command(&record);
        command.arg("exec");
        if tty {
            command.arg("--tty");
        }
        for (key, value) in env {
            command.arg("--env").arg(format!("{key}={value}"));
        }
        command.arg(&spec.id).args(argv);
        Ok(command)
    }

    /// Changes a guest's limits while it runs.
    pub fn update_limits(&self, dir: &Path, limits: &Limits) -> Result<()> {
        let (mut record, mut spec) = self.guest(dir)?;
        self.cgroups.ensure(&spec.cgroup, limits)?;
        spec.limits = limits.clone();
        record.what = Found::Guest(spec);
        Store(dir).set_record(&record)
    }

    /// All guests and helpers in directories at or below `root`, whole or not.
    pub fn list(&self, root: &Path) -> Result<Vec<Found>> {
        let mut found = Vec::new();
        list_below(root, LIST_DEPTH_MAX, &mut found)?;
        Ok(found)
    }

    fn record(&self, what: Found, fds: usize) -> Record {
        let Paths { runc, runc_root, cgroup, .. } = self.paths.clone();
        Record { what, runc, runc_root, cgroup, fds }
    }

    fn guest(&self, dir: &Path) -> Result<(Record, GuestSpec)> {
        match Store(dir).record()? {
            Some(record) => match record.what.clone() {
                Found::Guest(spec) => Ok((record, spec)),
                Found::Helper(_) => Err(Error::Absent(dir.to_owned())),
            },
            None => Err(Error::Absent(dir.to_owned())),
        }
    }

    /// Writes down what is intended, prepares it and has the shim make it; leaves nothing when
    /// that fails.
    fn begin(
        &self,
        record: &Record,
        fds: &[BorrowedFd<'_>],
        prepare: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let (id, dir) = (record.what.id(), record.what.dir());
        let fail = |text: String| Error::Spec { id: id.to_owned(), text };
        if !dir.is_absolute() {
            return Err(fail(format!("directory {}: not an absolute path", dir.display())));
        }
        if Store(dir).exists() {
            return Err(fail(format!("{} has one already; delete it before", dir.display())));
        }
        DirBuilder::new().recursive(true).mode(0o711).create(dir).at("make", dir)?;
        for above in dir.ancestors() {
            let mode = fs::metadata(above).at("look at", above)?.permissions().mode();
            if mode & 0o001 == 0 {
                let above = above.display();
                return Err(fail(format!("its user ids can't search {above}; chmod o+x {above}")));
            }
        }
        Store(dir).set_record(record)?;
        let made = prepare().and_then(|()| self.run_shim(id, dir, fds));
        if made.is_err() {
            // What failed first is what the caller has to know.
            let _ = self.delete(dir);
        }
        made
    }

    fn run_shim(&self, id: &str, dir: &Path, fds: &[BorrowedFd<'_>]) -> Result<()> {
        // Above those that they become, so that none is overwritten before it is passed on.
        let above = DESCRIPTOR_FIRST + DESCRIPTORS_MAX as i32;
        let passed: Vec<OwnedFd> = fds
            .iter()
            .map(|fd| rustix::io::fcntl_dupfd_cloexec(fd, above))
            .collect::<std::result::Result<_, _>>()
            .at("pass descriptors on to", dir)?;
        let mut command = Command::new(&self.paths.shim);
        command.arg(dir).env_clear().env("PATH", SHIM_PATH);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        // SAFETY: after the fork only dup2(2) is called, which is async-signal-safe; nothing is
        // allocated. The descriptors are open as long as `passed`, which the closure owns.
        unsafe {
            command.pre_exec(move || {
                for (offset, fd) in passed.iter().enumerate() {
                    if libc::dup2(fd.as_raw_fd(), DESCRIPTOR_FIRST + offset as i32) < 0 {
                        return Err(io::Error::last_os_error());
                    }
                }
                Ok(())
            });
        }
        let output = command.output().at("run", &self.paths.shim)?;
        if output.status.success() {
            return Ok(());
        }
        let text = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        Err(Error::Runtime { id: id.to_owned(), what: "pdp-shim", text })
    }
}

const SHIM_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

fn list_below(dir: &Path, depth: usize, found: &mut Vec<Found>) -> Result<()> {
    if let Some(record) = Store(dir).record()? {
        found.push(record.what);
    }
    if depth == 0 {
        return Ok(());
    }
    let entries = match fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries.at("read", dir)?,
    };
    for entry in entries {
        let entry = entry.at("read", dir)?;
        let is_dir = entry.file_type().is_ok_and(|kind| kind.is_dir());
        if is_dir && entry.file_name() != OsStr::new(crate::spec::BUNDLE) {
            list_below(&entry.path(), depth - 1, found)?;
        }
    }
    Ok(())
}

fn runc_command(record: &Record) -> Command {
    let mut command = Command::new(&record.runc);
    command.arg("--root").arg(&record.runc_root);
    command
}

fn runc(record: &Record, what: &'static str, arguments: &[&str]) -> Result<()> {
    let output = runc_command(record).args(arguments).stdin(Stdio::null()).output();
    let output = output.at("run", &record.runc)?;
    if output.status.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    Err(Error::Runtime { id: record.what.id().to_owned(), what, text })
}

/// Takes the loopback interface of a guest down.
fn loopback_down(process: Process) -> Result<()> {
    let path = process.namespace("net");
    let netns = File::open(&path).at("open", &path)?;
    let down = move || -> io::Result<()> {
        move_into_link_name_space(
            std::os::fd::AsFd::as_fd(&netns),
            Some(LinkNameSpaceType::Network),
        )?;
        let socket = std::net::UdpSocket::bind("127.0.0.1:0")
            .or_else(|_| std::net::UdpSocket::bind("0.0.0.0:0"))?;
        // SAFETY: all bytes zero is a value of this type: integers, and a union of such.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        request.ifr_name[0] = b'l' as libc::c_char;
        request.ifr_name[1] = b'o' as libc::c_char;
        // SAFETY: the request is a whole ifreq with a terminated name, as this ioctl wants
        // (netdevice(7)); flags of zero are "not up".
        match unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS, &mut request) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    };
    // In a thread of its own: the caller stays in its namespace.
    let result = std::thread::spawn(down).join();
    result.unwrap_or_else(|_| Err(io::Error::other("panicked"))).at("take lo down in", &path)
}
