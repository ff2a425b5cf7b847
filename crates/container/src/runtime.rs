//! Makes, starts, stops, adopts and removes guests and helpers.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fs::{self, DirBuilder, File, Permissions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::fs::Mode;
use rustix::process::Signal;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::bundle::{self, DESCRIPTORS_MAX};
use crate::cgroup::{Cgroups, LimitHits, Session};
use crate::error::{Context, Error, Result};
use crate::image;
use crate::init::{self, LastLines};
use crate::log::LogFile;
use crate::process::{Exit, Process, end_within, leave_session_keyring};
use crate::shim::{DESCRIPTOR_FIRST, Order, RUNC_WAIT, What};
use crate::spec::{GuestSpec, HelperSpec, Limits, Root, RunAs, id_is_good};
use crate::status::CommandStatus;
use crate::store::{Kind, RECORD_VERSION, Record, Store};
use crate::tree;
use crate::volumes;
use crate::work::Workplace;

/// Time that the kernel and the shim have to end what was killed.
const END_WAIT: Duration = Duration::from_secs(10);

/// Time that what was killed mostly takes to end.
const KILL_WAIT: Duration = Duration::from_millis(20);

/// Time for which a dead guest's shim may write down how it ended.
const EXIT_WAIT: Duration = Duration::from_secs(2);

/// Memory in which every guest starts, MiB: the OCI runtime's first process and copies of small files.
const START_MIB: u64 = 16;

/// Bytes at the end of a log that [`Runtime::last_words`] reads.
const TAIL_BYTES: u64 = 4096;

/// What the OCI runtime says of a failure, at most.
const TEXT_BYTES_MAX: u64 = 1 << 16;

/// Where things are.
#[derive(Clone, Debug)]
pub struct Paths {
    /// The OCI runtime, `runc`.
    pub runc: PathBuf,
    /// `pdp-shim`.
    pub shim: PathBuf,
    /// `pdp-init`.
    pub init: PathBuf,
    /// `pdp-work`.
    pub work: PathBuf,
    /// Directories of guests and helpers, each named by its id; below the run directory: gone with a
    /// reboot. Root's alone to write.
    pub records: PathBuf,
    /// State of the OCI runtime, below the run directory too.
    pub runc_root: PathBuf,
    /// Logs, below the state directory: what a guest writes must not fill the run directory, which is
    /// memory that the whole machine shares.
    pub logs: PathBuf,
    /// Unpacked images, below the state directory.
    pub images: PathBuf,
    /// Volumes of guests, each in a directory named by its id, below the state directory.
    pub volumes: PathBuf,
    /// Name of the cgroup below which all others are, e.g. `pdp`.
    pub cgroup: String,
}

/// The mask of what makes a guest's files, from within or for it. pdpd's own is closer.
pub(crate) const GUEST_MASK: Mode = Mode::from_raw_mode(0o022);

/// Makes guests and helpers. Holds nothing that another could not make anew, and may be used by
/// several threads for different guests.
#[derive(Clone, Debug)]
pub struct Runtime {
    paths: Paths,
    cgroups: Cgroups,
    workplace: Workplace,
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
        for path in [&mut paths.runc, &mut paths.shim, &mut paths.init, &mut paths.work] {
            *path = fs::canonicalize(&*path).at("find", path)?;
        }
        let cgroups = Cgroups::new(&paths.cgroup)?;
        let Paths { records, runc_root, logs, images, volumes, .. } = &mut paths;
        for (path, mode) in
            [(records, 0o711), (runc_root, 0o711), (logs, 0o700), (images, 0o700), (volumes, 0o700)]
        {
            DirBuilder::new().recursive(true).mode(mode).create(&*path).at("make", path)?;
            *path = fs::canonicalize(&*path).at("find", path)?;
        }
        let workplace = Workplace::new(paths.work.clone(), cgroups.clone());
        let this = Self { paths, cgroups, workplace };
        // An older version let everybody pass, to environments, files and arguments.
        for dir in this.list()? {
            let mode = fs::metadata(&dir).at("look at", &dir)?.permissions().mode();
            let closed = Permissions::from_mode(mode & 0o770);
            fs::set_permissions(&dir, closed).at("set the mode of", &dir)?;
        }
        Ok(this)
    }

    /// Where things are.
    pub fn paths(&self) -> &Paths {
        &self.paths
    }

    /// The cgroups, for limits of helpers' and for usage.
    pub fn cgroups(&self) -> &Cgroups {
        &self.cgroups
    }

    /// Where work for owners is done.
    pub fn workplace(&self) -> &Workplace {
        &self.workplace
    }

    /// Begins to unpack a guest's image, unless it has none. Returns true once [`Runtime::create`] finds it unpacked.
    ///
    /// # Errors
    /// Why it can't be unpacked.
    pub fn unpack(&self, spec: &GuestSpec) -> Result<bool> {
        let images = &self.paths.images;
        let (layout, reference) = match &spec.root {
            Root::Host | Root::Rootfs(_) => return Ok(true),
            Root::OciLayout { path, reference } => (path.clone(), reference.as_deref()),
            Root::Image { owner, digest } => (image::layout(images, owner, digest), None),
        };
        image::begin(&layout, reference, images, (&self.workplace, &spec.owner))
    }

    /// Makes a guest up to its namespaces, so that interfaces can be put into it; its commands get
    /// `fds` from descriptor 3 on. One that is there already must be deleted before.
    pub fn create(&self, spec: &GuestSpec, fds: &[BorrowedFd<'_>]) -> Result<Process> {
        bundle::check(spec, fds.len())?;
        let commands = (!spec.profile.is_forwarding()).then_some(spec.commands.len());
        let what = What::Guest { id: spec.id.clone(), users: spec.users, commands };
        let record = Record {
            version: RECORD_VERSION,
            kind: Kind::Guest,
            cgroup: spec.cgroup.clone(),
            open_files_max: Some(spec.open_files_max),
            image: (!spec.profile.is_forwarding()).then_some(spec.root != Root::Host),
            hits_before: self.cgroups.limit_hits(&spec.cgroup),
        };
        self.begin(&spec.dir, &record, what, spec.log_bytes_max, fds, || {
            let Paths { init, images, volumes, .. } = &self.paths;
            let volumes = volumes.join(&spec.id);
            bundle::make(spec, &self.cgroups, init, images, &volumes, &self.workplace)?;
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
        self.guest(dir)?;
        let id = self.id(dir)?;
        match self.state(dir)? {
            State::Running(_) => Ok(()),
            State::Created(_) => self.runc("runc start", &["start"], id),
            state => Err(Error::Runtime {
                id: id.to_owned(),
                what: "start",
                text: format!("it is not waiting for that but {state:?}; delete and create it"),
            }),
        }
    }

    /// Starts a helper; `stdin` is its standard input, `/dev/null` where there is none. One that is there
    /// already must be deleted before.
    pub fn spawn_helper(
        &self,
        spec: &HelperSpec,
        stdin: Option<BorrowedFd<'_>>,
    ) -> Result<Process> {
        let fail = |text: &str| Error::Spec { id: spec.id.clone(), text: text.to_owned() };
        if !spec.argv.first().is_some_and(|program| program.starts_with('/')) {
            return Err(fail("its program must be an absolute path"));
        }
        if !spec.keep_root && spec.uid == 0 {
            return Err(fail("user id 0 has rights beyond those of a helper; give it another"));
        }
        let what = What::Helper(spec.clone());
        let record = Record {
            version: RECORD_VERSION,
            kind: Kind::Helper,
            cgroup: spec.cgroup.clone(),
            open_files_max: None,
            image: None,
            hits_before: LimitHits::default(),
        };
        self.begin(&spec.dir, &record, what, spec.log_bytes_max, stdin.as_slice(), || {
            self.cgroups.ensure_leaf(&spec.cgroup)
        })?;
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
        kill(dir, process)
    }

    /// Kills a guest or helper; whether it has ended. The moment that this mostly takes is waited for.
    pub fn kill(&self, dir: &Path) -> Result<bool> {
        let (State::Created(process) | State::Running(process) | State::Orphaned(process)) =
            self.state(dir)?
        else {
            return Ok(true);
        };
        process.signal(Signal::KILL);
        Ok(process.wait(KILL_WAIT))
    }

    /// Removes every trace of a guest or helper, running or half-made, and of whatever version; its
    /// directory's files that are not this crate's stay (and with them the directory). No change if there is
    /// none.
    pub fn delete(&self, dir: &Path) -> Result<()> {
        let (id, store) = (self.id(dir)?, Store(dir));
        let record = match store.record() {
            Ok(None) => return Ok(()),
            Ok(record) => record,
            // Of another version, or damaged: what it is shows in the OCI runtime's state.
            Err(_) => None,
        };
        // What can't be read is not ours; the cgroup and the OCI runtime know the processes too.
        let (shim, process) = (|| store.shim().ok().flatten(), || store.process().ok().flatten());
        // A shim that is just making a guest whose maker died would go on behind our back.
        let deadline = Instant::now() + END_WAIT;
        let shim = shim().filter(Process::is_alive);
        while process().is_none()
            && shim.is_some_and(|shim| shim.is_alive())
            && Instant::now() < deadline
        {
            std::thread::sleep(Duration::from_millis(5));
        }
        // Each whatever became of those before; what failed first is told.
        let mut first = process().map_or(Ok(()), |process| kill(dir, process));
        if let Some(shim) = shim
            && !shim.wait(EXIT_WAIT)
        {
            shim.signal(Signal::KILL);
            shim.wait(END_WAIT);
        }
        if self.paths.runc_root.join(id).exists() {
            first = first.and(self.runc("runc delete", &["delete", "--force"], id));
        }
        if let Some(record) = record {
            let leaf = match record.kind {
                Kind::Guest => bundle::leaf(&record.cgroup),
                Kind::Helper => record.cgroup,
            };
            // Other helpers may be in a helper's cgroup.
            if record.kind == Kind::Guest || self.cgroups.processes(&leaf)?.is_empty() {
                first = first.and(self.cgroups.remove_leaf(&leaf, END_WAIT));
            }
        }
        for log in self.logs(dir)? {
            first = first.and(tree::remove(&log));
        }
        // It is known by its record until all else is gone.
        first?;
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
            let waits = self.paths.runc_root.join(self.id(dir)?).join("exec.fifo").exists();
            return Ok(match record.kind == Kind::Guest && waits {
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

    /// How a guest's commands are, in their order, as it says itself; `None` for helpers, for forwarding guests,
    /// and for guests that an older version made. They are as they were last where it has ended.
    pub fn commands(&self, dir: &Path) -> Result<Option<Vec<CommandStatus>>> {
        Store(dir).commands()
    }

    /// A process descriptor that polls readable once the guest or helper ended, or its shim was
    /// killed; `None` if it has. [`Runtime::state`] says then how.
    pub fn wait_exit(&self, dir: &Path) -> Result<Option<OwnedFd>> {
        // The shim ends last, when it has written down how the other ended.
        Ok(Store(dir).shim()?.and_then(|shim| shim.pidfd()))
    }

    /// A command that runs `argv` inside a running guest, with what the caller's standard streams
    /// are; `tty`: standard input is a terminal and the guest's side shall be one too. The session has
    /// all that the command starts. A user that is not there, or a directory, the command says on standard error;
    /// a forwarding guest, or one of an older version, has neither to give.
    pub fn exec_command(
        &self,
        dir: &Path,
        argv: &[OsString],
        run_as: &RunAs,
        tty: bool,
        env: &BTreeMap<String, String>,
    ) -> Result<(Command, Session)> {
        let record = self.guest(dir)?;
        let id = self.id(dir)?;
        if argv.is_empty() {
            let text = "no command to run in it was given".to_owned();
            return Err(Error::Spec { id: id.to_owned(), text });
        }
        let session = self.cgroups.session(&bundle::leaf(&record.cgroup))?;
        let mut command = self.runc_command();
        command.arg("exec").arg("--cgroup").arg(session.argument());
        if tty {
            command.arg("--tty");
        }
        for (key, value) in env {
            command.arg("--env").arg(format!("{key}={value}"));
        }
        command.arg(id);
        if !run_as.is_default() {
            let image = record.image.ok_or_else(|| Error::Spec {
                id: id.to_owned(),
                text: "it can't run commands as its users, or elsewhere: it is a forwarding guest, or of an \
                       older version until it is made anew"
                    .to_owned(),
            })?;
            command.args(bundle::init_call(image)).arg(init::ENTER).arg(bundle::INIT_JSON);
            command.arg(run_as.user.as_deref().unwrap_or_default());
            command.arg(run_as.workdir.as_deref().unwrap_or(Path::new("")));
        }
        command.args(argv);
        let open_files_max = record.open_files_max;
        // SAFETY: between fork and exec only system calls are made, on values of the stack.
        unsafe {
            command.pre_exec(move || {
                if tty {
                    rustix::process::setsid()?;
                    rustix::process::ioctl_tiocsctty(rustix::stdio::stdin())?;
                }
                rustix::process::umask(GUEST_MASK);
                leave_session_keyring();
                open_files_max.map_or(Ok(()), init::limit)
            });
        }
        Ok((command, session))
    }

    /// Changes a guest's limits while it runs.
    pub fn update_limits(&self, dir: &Path, limits: &Limits) -> Result<()> {
        let record = self.guest(dir)?;
        self.cgroups.ensure(&record.cgroup, limits)?;
        let hits_before = self.cgroups.limit_hits(&record.cgroup);
        Store(dir).set_record(&Record { hits_before, ..record })
    }

    /// Counts the refusals by a guest's limits since these limits were set.
    pub fn limit_hits(&self, dir: &Path) -> Result<LimitHits> {
        let record = self.guest(dir)?;
        let (now, before) = (self.cgroups.limit_hits(&record.cgroup), record.hits_before);
        Ok(LimitHits {
            memory_kills: now.memory_kills.saturating_sub(before.memory_kills),
            processes_refused: now.processes_refused.saturating_sub(before.processes_refused),
        })
    }

    /// Directories of all guests and helpers, whole or not, of whatever version.
    pub fn list(&self) -> Result<Vec<PathBuf>> {
        let records = &self.paths.records;
        let entries = fs::read_dir(records).at("read", records)?;
        entries.map(|entry| Ok(entry.at("read", records)?.path())).collect()
    }

    /// Removes unpacked images that no guest runs on, and what a crash left of one.
    pub fn collect_images(&self) -> Result<()> {
        image::collect(&self.paths.images, || self.list())
    }

    /// Removes the volumes of the guest of a directory, which does not run, but those of these names.
    pub fn remove_volumes(&self, dir: &Path, kept: &BTreeSet<&str>) -> Result<()> {
        volumes::keep(&self.paths.volumes.join(self.id(dir)?), kept)
    }

    /// Removes volumes but those of the guests of these directories.
    pub fn remove_volumes_but(&self, kept: &BTreeSet<PathBuf>) -> Result<()> {
        let volumes = &self.paths.volumes;
        let mut first = Ok(());
        for entry in fs::read_dir(volumes).at("read", volumes)? {
            let entry = entry.at("read", volumes)?;
            if !kept.contains(&self.paths.records.join(entry.file_name())) {
                first = first.and(tree::remove(&entry.path()));
            }
        }
        first
    }

    /// A guest's or helper's log, and what was before it; there may be none.
    pub fn logs(&self, dir: &Path) -> Result<[PathBuf; 2]> {
        let log = self.paths.logs.join(format!("{}.log", self.id(dir)?));
        Ok([log.clone(), LogFile::older(&log)])
    }

    /// Returns the last line of a guest's log that names an error, or else the last line; `None` if the log is empty.
    pub fn last_words(&self, dir: &Path) -> Option<String> {
        let [log, _] = self.logs(dir).ok()?;
        let mut log = File::open(log).ok()?;
        let length = log.metadata().ok()?.len();
        log.seek(SeekFrom::Start(length.saturating_sub(TAIL_BYTES))).ok()?;
        let mut tail = Vec::new();
        log.take(TAIL_BYTES).read_to_end(&mut tail).ok()?;
        let mut last = LastLines::default();
        for line in String::from_utf8_lossy(&tail).lines() {
            // Each begins with its time.
            let said = line.split_once(' ').map_or("", |(_, said)| said);
            match said.strip_prefix(init::SAYS) {
                // Process 1 says of each command that it started and ended.
                Some(own) if !own.contains(init::NOT_STARTED) => {}
                own => last.take(format!("{}\n", own.unwrap_or(said)).as_bytes()),
            }
        }
        Some(last.words()).filter(|words| !words.is_empty())
    }

    /// Removes logs but those of the guests and helpers of these directories.
    pub fn remove_logs_but(&self, kept: &BTreeSet<PathBuf>) -> Result<()> {
        let logs = &self.paths.logs;
        let mut first = Ok(());
        for entry in fs::read_dir(logs).at("read", logs)? {
            let entry = entry.at("read", logs)?;
            let name = entry.file_name();
            let id = name.to_str().and_then(|name| Some(name.rsplit_once(".log")?.0));
            if !id.is_some_and(|id| kept.contains(&self.paths.records.join(id))) {
                first = first.and(tree::remove(&entry.path()));
            }
        }
        first
    }

    /// The id of the guest or helper of a directory, which must be one of ours.
    fn id<'d>(&self, dir: &'d Path) -> Result<&'d str> {
        let id = dir.file_name().and_then(|name| name.to_str());
        let ours = dir.parent() == Some(&*self.paths.records);
        id.filter(|id| ours && id_is_good(id)).ok_or_else(|| Error::Spec {
            id: id.unwrap_or_default().to_owned(),
            text: format!("{} is not one of {}", dir.display(), self.paths.records.display()),
        })
    }

    fn guest(&self, dir: &Path) -> Result<Record> {
        match Store(dir).record()? {
            Some(record) if record.kind == Kind::Guest => Ok(record),
            _ => Err(Error::Absent(dir.to_owned())),
        }
    }

    /// Writes down what is intended, prepares it and has the shim make it; leaves nothing when
    /// that fails.
    fn begin(
        &self,
        dir: &Path,
        record: &Record,
        what: What,
        log_bytes_max: u64,
        fds: &[BorrowedFd<'_>],
        prepare: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let id = what.id();
        let fail = |text: String| Error::Spec { id: id.to_owned(), text };
        if self.id(dir)? != id {
            return Err(fail(format!("its directory {} has another name", dir.display())));
        }
        if Store(dir).exists() {
            return Err(fail(format!("{} has one already; delete it before", dir.display())));
        }
        DirBuilder::new().recursive(true).mode(0o711).create(dir).at("make", dir)?;
        let mode = match &what {
            // The OCI runtime passes it as the guest's root, on the way to the guest's files.
            What::Guest { users, .. } => {
                chown(dir, None, Some(users.base)).at("give away", dir)?;
                0o710
            }
            What::Helper(_) => 0o700,
        };
        fs::set_permissions(dir, Permissions::from_mode(mode)).at("set the mode of", dir)?;
        for above in dir.ancestors().skip(1) {
            let mode = fs::metadata(above).at("look at", above)?.permissions().mode();
            if mode & 0o001 == 0 {
                let above = above.display();
                return Err(fail(format!("its user ids can't search {above}; chmod o+x {above}")));
            }
        }
        Store(dir).set_record(record)?;
        let order = || -> Result<Order> {
            let [log, _] = self.logs(dir)?;
            let Paths { runc, runc_root, cgroup, .. } = self.paths.clone();
            let (dir, fds) = (dir.to_owned(), fds.len());
            Ok(Order { dir, what: what.clone(), runc, runc_root, cgroup, fds, log, log_bytes_max })
        };
        let made =
            prepare().and_then(|()| order()).and_then(|order| self.run_shim(id, dir, &order, fds));
        let Err(error) = made else { return Ok(()) };
        // The OCI runtime says that its first process is gone, and not why.
        let killed = record.kind == Kind::Guest
            && matches!(error, Error::Runtime { .. })
            && self.cgroups.lacks_memory(&record.cgroup);
        // What failed first is what the caller has to know.
        let _ = self.delete(dir);
        if killed {
            return Err(fail(format!(
                "its memory was full before it had started; give it {START_MIB} MiB or more (resources.memory)"
            )));
        }
        Err(error)
    }

    fn run_shim(&self, id: &str, dir: &Path, order: &Order, fds: &[BorrowedFd<'_>]) -> Result<()> {
        // Above those that they become, so that none is overwritten before it is passed on.
        let above = DESCRIPTOR_FIRST + DESCRIPTORS_MAX as i32;
        let passed: Vec<OwnedFd> = fds
            .iter()
            .map(|fd| rustix::io::fcntl_dupfd_cloexec(fd, above))
            .collect::<std::result::Result<_, _>>()
            .at("pass descriptors on to", dir)?;
        let mut command = Command::new(&self.paths.shim);
        // Its argument is for people.
        command.arg(dir).env_clear().env("PATH", SHIM_PATH);
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
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
        let order = serde_json::to_vec(order).map_err(io::Error::from).at("order", dir)?;
        let mut shim = command.spawn().at("run", &self.paths.shim)?;
        // One that can't be told says why when it ends.
        let _ = shim.stdin.take().map(|mut stdin| stdin.write_all(&order));
        let output = shim.wait_with_output().at("run", &self.paths.shim)?;
        if output.status.success() {
            return Ok(());
        }
        let text = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        Err(Error::Runtime { id: id.to_owned(), what: "pdp-shim", text })
    }

    fn runc_command(&self) -> Command {
        let mut command = Command::new(&self.paths.runc);
        command.arg("--root").arg(&self.paths.runc_root);
        // The daemon's own: runc would have the guest report to systemd.
        command.env_remove("NOTIFY_SOCKET");
        command
    }

    fn runc(&self, what: &'static str, arguments: &[&str], id: &str) -> Result<()> {
        let mut command = self.runc_command();
        command.args(arguments).arg(id).stdin(Stdio::null()).stdout(Stdio::null());
        let mut run = || -> io::Result<Option<String>> {
            let mut runc = command.stderr(Stdio::piped()).spawn()?;
            let status = end_within(&mut runc, RUNC_WAIT)?;
            if status.success() {
                return Ok(None);
            }
            let mut text = Vec::new();
            runc.stderr.take().map(|said| said.take(TEXT_BYTES_MAX).read_to_end(&mut text));
            let text = String::from_utf8_lossy(&text).trim().to_owned();
            Ok(Some(if text.is_empty() { status.to_string() } else { text }))
        };
        match run().at("run", &self.paths.runc)? {
            None => Ok(()),
            Some(text) => Err(Error::Runtime { id: id.to_owned(), what, text }),
        }
    }
}

const SHIM_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

fn kill(dir: &Path, process: Process) -> Result<()> {
    process.signal(Signal::KILL);
    if process.wait(END_WAIT) {
        return Ok(());
    }
    let what = format!("process {} of {}", process.pid, dir.display());
    Err(Error::Stuck { what, seconds: END_WAIT.as_secs() })
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
