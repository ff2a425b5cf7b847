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

use rustix::process::Signal;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::bundle::{self, DESCRIPTORS_MAX};
use crate::cgroup::{Cgroups, LimitHits, Session};
use crate::error::{Error, ErrorContext, Result};
use crate::image;
use crate::init::{self, LastLines};
use crate::log::LogFile;
use crate::process::{GUEST_MASK, Process, ProcessOutcome, end_within, leave_session_keyring};
use crate::safe_removal;
use crate::shim::{DESCRIPTOR_FIRST, RUNC_WAIT, ShimOrder, ShimTask};
use crate::spec::{GuestSpec, HelperSpec, Limits, RootFilesystem, RunAs, id_is_good};
use crate::status::GuestCommandStatus;
use crate::store::{ProcessKind, ProcessRecord, RECORD_VERSION, RecordStore};
use crate::volumes;
use crate::work::Workplace;

/// Longest wait for the kernel and the shim to end killed processes.
const END_WAIT: Duration = Duration::from_secs(10);

/// Time that killed processes usually take to end.
const KILL_WAIT: Duration = Duration::from_millis(20);

/// Longest wait for a dead guest's shim to record how the guest ended.
const EXIT_WAIT: Duration = Duration::from_secs(2);

/// Memory that every guest needs to start, MiB: for the OCI runtime's first process and copies of
/// small files.
const START_MIB: u64 = 16;

/// Bytes at the end of a log that [`Runtime::last_words`] reads.
const TAIL_BYTES: u64 = 4096;

/// Largest error message kept of the OCI runtime, bytes.
const TEXT_BYTES_MAX: u64 = 1 << 16;

/// Paths of programs and directories, and the name of the cgroup.
#[derive(Clone, Debug)]
pub struct RuntimePaths {
    /// The OCI runtime, `runc`.
    pub runc: PathBuf,
    /// `pdp-shim`.
    pub shim: PathBuf,
    /// `pdp-init`.
    pub init: PathBuf,
    /// `pdp-work`.
    pub work: PathBuf,
    /// Directories of guests and helpers, each named by its id. They lie below the run directory,
    /// so they are gone after a reboot. Only root may write.
    pub records: PathBuf,
    /// State of the OCI runtime, below the run directory as well.
    pub runc_root: PathBuf,
    /// Logs, below the state directory. The run directory is memory that the whole machine shares,
    /// and guests' output must not fill it.
    pub logs: PathBuf,
    /// Unpacked images, below the state directory.
    pub images: PathBuf,
    /// Volumes of guests, below the state directory, in one directory per guest named by its id.
    pub volumes: PathBuf,
    /// Name of the cgroup above all others, e.g. `pdp`.
    pub cgroup: String,
}

/// Makes guests and helpers. It has no state of its own. Several threads may use it for different
/// guests.
#[derive(Clone, Debug)]
pub struct Runtime {
    paths: RuntimePaths,
    cgroups: Cgroups,
    workplace: Workplace,
}

/// State of a guest or helper.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProcessState {
    /// Missing or incomplete. [`Runtime::delete`] removes remains.
    Absent,
    /// The namespaces exist, and the commands wait for [`Runtime::start`].
    Created(Process),
    /// Runs.
    Running(Process),
    /// Runs, but its shim was killed. Its log is not written, its output fails, and its end will
    /// not be recorded. It should be deleted.
    Orphaned(Process),
    /// Ended; `None` if nobody recorded how (the machine or its shim was stopped).
    Exited(Option<ProcessOutcome>),
}

impl Runtime {
    /// Detects the machine's cgroups and makes all paths absolute.
    pub fn new(mut paths: RuntimePaths) -> Result<Self> {
        for path in [&mut paths.runc, &mut paths.shim, &mut paths.init, &mut paths.work] {
            *path = fs::canonicalize(&*path).at("find", path)?;
        }
        let cgroups = Cgroups::new(&paths.cgroup)?;
        let RuntimePaths { records, runc_root, logs, images, volumes, .. } = &mut paths;
        for (path, mode) in
            [(records, 0o711), (runc_root, 0o711), (logs, 0o700), (images, 0o700), (volumes, 0o700)]
        {
            DirBuilder::new().recursive(true).mode(mode).create(&*path).at("make", path)?;
            *path = fs::canonicalize(&*path).at("find", path)?;
        }
        let workplace = Workplace::new(paths.work.clone(), cgroups.clone());
        let this = Self { paths, cgroups, workplace };
        // An older version let all users enter. Environments, files and arguments were readable.
        for dir in this.list()? {
            let mode = fs::metadata(&dir).at("look at", &dir)?.permissions().mode();
            let closed = Permissions::from_mode(mode & 0o770);
            fs::set_permissions(&dir, closed).at("set the mode of", &dir)?;
        }
        Ok(this)
    }

    /// Returns the paths.
    pub fn paths(&self) -> &RuntimePaths {
        &self.paths
    }

    /// Returns the cgroups, for limits of helpers and for usage.
    pub fn cgroups(&self) -> &Cgroups {
        &self.cgroups
    }

    /// Returns the runner of work for owners.
    pub fn workplace(&self) -> &Workplace {
        &self.workplace
    }

    /// Begins to unpack a guest's image if it has one. Returns true once [`Runtime::create`] finds
    /// it unpacked.
    ///
    /// # Errors
    /// Cause of a failed unpacking.
    pub fn unpack(&self, spec: &GuestSpec) -> Result<bool> {
        let images = &self.paths.images;
        let (layout, reference) = match &spec.root {
            RootFilesystem::Host | RootFilesystem::Rootfs(_) => return Ok(true),
            RootFilesystem::OciLayout { path, reference } => (path.clone(), reference.as_deref()),
            RootFilesystem::Image { owner, digest } => (image::layout(images, owner, digest), None),
        };
        image::begin(&layout, reference, images, (&self.workplace, &spec.owner))
    }

    /// Makes a guest up to its namespaces, so that interfaces can be put into it. Its commands
    /// inherit `fds` from descriptor 3 on. An existing guest must be deleted before.
    pub fn create(&self, spec: &GuestSpec, fds: &[BorrowedFd<'_>]) -> Result<Process> {
        bundle::check(spec, fds.len())?;
        let commands = (!spec.profile.is_forwarding()).then_some(spec.commands.len());
        let task = ShimTask::Guest { id: spec.id.clone(), users: spec.users, commands };
        let record = ProcessRecord {
            version: RECORD_VERSION,
            kind: ProcessKind::Guest,
            cgroup: spec.cgroup.clone(),
            open_files_max: Some(spec.open_files_max),
            image: (!spec.profile.is_forwarding()).then_some(spec.root != RootFilesystem::Host),
            hits_before: self.cgroups.limit_hits(&spec.cgroup),
        };
        self.begin(&spec.dir, &record, task, spec.log_bytes_max, fds, || {
            let RuntimePaths { init, images, volumes, .. } = &self.paths;
            let volumes = volumes.join(&spec.id);
            bundle::make(spec, &self.cgroups, init, images, &volumes, &self.workplace)?;
            self.cgroups.ensure(&spec.cgroup, &spec.limits)?;
            self.cgroups.ensure_leaf(&bundle::leaf(&spec.cgroup))
        })?;
        let process =
            RecordStore(&spec.dir).process()?.ok_or_else(|| Error::Absent(spec.dir.clone()))?;
        if spec.profile.is_forwarding() {
            // The OCI runtime sets `lo` up.
            if let Err(error) = loopback_down(process) {
                let _ = self.delete(&spec.dir);
                return Err(error);
            }
        }
        Ok(process)
    }

    /// Starts the commands of a guest in state [`ProcessState::Created`]. Does nothing if it runs
    /// already.
    pub fn start(&self, dir: &Path) -> Result<()> {
        self.guest(dir)?;
        let id = self.id(dir)?;
        match self.state(dir)? {
            ProcessState::Running(_) => Ok(()),
            ProcessState::Created(_) => self.runc("runc start", &["start"], id),
            state => Err(Error::Runtime {
                id: id.to_owned(),
                what: "start",
                text: format!("it is {state:?}, not created (delete it and create it again)"),
            }),
        }
    }

    /// Starts a helper. `stdin` is its standard input; `None` means `/dev/null`. An existing helper
    /// must be deleted before.
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
            return Err(fail("a helper can't have user id 0 (use another)"));
        }
        let task = ShimTask::Helper(spec.clone());
        let record = ProcessRecord {
            version: RECORD_VERSION,
            kind: ProcessKind::Helper,
            cgroup: spec.cgroup.clone(),
            open_files_max: None,
            image: None,
            hits_before: LimitHits::default(),
        };
        self.begin(&spec.dir, &record, task, spec.log_bytes_max, stdin.as_slice(), || {
            self.cgroups.ensure_leaf(&spec.cgroup)
        })?;
        RecordStore(&spec.dir).process()?.ok_or_else(|| Error::Absent(spec.dir.clone()))
    }

    /// Ends a guest or helper with SIGTERM, and with SIGKILL after `grace`. Does nothing if it has
    /// ended.
    pub fn stop(&self, dir: &Path, grace: Duration) -> Result<()> {
        let (ProcessState::Created(process)
        | ProcessState::Running(process)
        | ProcessState::Orphaned(process)) = self.state(dir)?
        else {
            return Ok(());
        };
        if matches!(self.state(dir)?, ProcessState::Running(_)) {
            process.signal(Signal::TERM);
            if process.wait(grace) {
                return Ok(());
            }
        }
        kill(dir, process)
    }

    /// Kills a guest or helper and waits for the short time that its end usually takes. Returns
    /// true if it has ended.
    pub fn kill(&self, dir: &Path) -> Result<bool> {
        let (ProcessState::Created(process)
        | ProcessState::Running(process)
        | ProcessState::Orphaned(process)) = self.state(dir)?
        else {
            return Ok(true);
        };
        process.signal(Signal::KILL);
        Ok(process.wait(KILL_WAIT))
    }

    /// Removes every trace of a guest or helper of any version, running or incomplete. Files in its
    /// directory that this crate did not make stay, and so does the directory then. Does nothing if
    /// it does not exist.
    pub fn delete(&self, dir: &Path) -> Result<()> {
        let (id, store) = (self.id(dir)?, RecordStore(dir));
        let record = match store.record() {
            Ok(None) => return Ok(()),
            Ok(record) => record,
            // The record has another version or is damaged. The OCI runtime's state still
            // identifies the guest.
            Err(_) => None,
        };
        // Unreadable files are not ours. The cgroup and the OCI runtime know the processes too.
        let (shim, process) = (|| store.shim().ok().flatten(), || store.process().ok().flatten());
        // If the maker died, its shim may still be making the guest in the background. Wait for it.
        let deadline = Instant::now() + END_WAIT;
        let shim = shim().filter(Process::is_alive);
        while process().is_none()
            && shim.is_some_and(|shim| shim.is_alive())
            && Instant::now() < deadline
        {
            std::thread::sleep(Duration::from_millis(5));
        }
        // Try each step even if earlier steps failed. Return the first error.
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
                ProcessKind::Guest => bundle::leaf(&record.cgroup),
                ProcessKind::Helper => record.cgroup,
            };
            // A helper's cgroup may have other helpers.
            if record.kind == ProcessKind::Guest || self.cgroups.processes(&leaf)?.is_empty() {
                first = first.and(self.cgroups.remove_leaf(&leaf, END_WAIT));
            }
        }
        for log in self.logs(dir)? {
            first = first.and(safe_removal::remove(&log));
        }
        // Remove the record last: it is how remains are found.
        first?;
        store.remove()
    }

    /// Returns the state of the guest or helper of a directory.
    pub fn state(&self, dir: &Path) -> Result<ProcessState> {
        let store = RecordStore(dir);
        let Some(record) = store.record()? else { return Ok(ProcessState::Absent) };
        let Some(process) = store.process()? else { return Ok(ProcessState::Absent) };
        let shim = store.shim()?;
        // Check the shim before the process, since it outlives the process.
        let is_watched = shim.is_some_and(|shim| shim.is_alive());
        if process.is_alive() {
            if !is_watched {
                return Ok(ProcessState::Orphaned(process));
            }
            // The FIFO exists until the start removes it.
            let waits = self.paths.runc_root.join(self.id(dir)?).join("exec.fifo").exists();
            return Ok(match record.kind == ProcessKind::Guest && waits {
                true => ProcessState::Created(process),
                false => ProcessState::Running(process),
            });
        }
        if let Some(shim) = shim {
            // The shim records how the guest ended, and then ends.
            shim.wait(EXIT_WAIT);
        }
        Ok(ProcessState::Exited(store.outcome()?))
    }

    /// Returns the status of a guest's commands in their order, as reported by the guest. If the
    /// guest has ended, it is their last status. `None` for helpers, forwarding guests, and guests
    /// made by an older version.
    pub fn commands(&self, dir: &Path) -> Result<Option<Vec<GuestCommandStatus>>> {
        RecordStore(dir).commands()
    }

    /// Returns a process descriptor that polls readable once the guest or helper ended or its shim
    /// was killed. `None` if that has happened. [`Runtime::state`] then tells how it ended.
    pub fn wait_exit(&self, dir: &Path) -> Result<Option<OwnedFd>> {
        // The shim ends last, after recording how the process ended.
        Ok(RecordStore(dir).shim()?.and_then(|shim| shim.pidfd()))
    }

    /// Returns a command that runs `argv` inside a running guest with the caller's standard
    /// streams. `tty`: standard input is a terminal, and the guest's side shall be one too. The
    /// session contains all processes that the command starts. If the user or directory does not
    /// exist, the command reports it on standard error. Forwarding guests and guests of an older
    /// version support neither.
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
            let text = "no command given".to_owned();
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
                text:
                    "user and directory can't be chosen: it is a forwarding guest, or was created \
                       by an older version (recreate it)"
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
        RecordStore(dir).set_record(&ProcessRecord { hits_before, ..record })
    }

    /// Counts the refusals by a guest's current limits since they were set.
    pub fn limit_hits(&self, dir: &Path) -> Result<LimitHits> {
        let record = self.guest(dir)?;
        let (now, before) = (self.cgroups.limit_hits(&record.cgroup), record.hits_before);
        Ok(LimitHits {
            memory_kills: now.memory_kills.saturating_sub(before.memory_kills),
            processes_refused: now.processes_refused.saturating_sub(before.processes_refused),
        })
    }

    /// Lists the directories of all guests and helpers of any version, complete or not.
    pub fn list(&self) -> Result<Vec<PathBuf>> {
        let records = &self.paths.records;
        let entries = fs::read_dir(records).at("read", records)?;
        entries.map(|entry| Ok(entry.at("read", records)?.path())).collect()
    }

    /// Removes unpacked images that no guest uses, and remains of interrupted unpacking.
    pub fn collect_images(&self) -> Result<()> {
        image::collect(&self.paths.images, || self.list())
    }

    /// Removes the volumes of a directory's guest except those with the names in `kept`. The guest
    /// must not run.
    pub fn remove_volumes(&self, dir: &Path, kept: &BTreeSet<&str>) -> Result<()> {
        volumes::remove_others(&self.paths.volumes.join(self.id(dir)?), kept)
    }

    /// Removes all volumes except those of the guests of these directories.
    pub fn remove_volumes_but(&self, kept: &BTreeSet<PathBuf>) -> Result<()> {
        let volumes = &self.paths.volumes;
        let mut first = Ok(());
        for entry in fs::read_dir(volumes).at("read", volumes)? {
            let entry = entry.at("read", volumes)?;
            if !kept.contains(&self.paths.records.join(entry.file_name())) {
                first = first.and(safe_removal::remove(&entry.path()));
            }
        }
        first
    }

    /// Returns the paths of a guest's or helper's current and previous log. The files may be
    /// missing.
    pub fn logs(&self, dir: &Path) -> Result<[PathBuf; 2]> {
        let log = self.paths.logs.join(format!("{}.log", self.id(dir)?));
        Ok([log.clone(), LogFile::older(&log)])
    }

    /// Returns the last line of a guest's log that names an error, or else the last line; `None` if
    /// the log is empty.
    pub fn last_words(&self, dir: &Path) -> Option<String> {
        let [log, _] = self.logs(dir).ok()?;
        let mut log = File::open(log).ok()?;
        let length = log.metadata().ok()?.len();
        log.seek(SeekFrom::Start(length.saturating_sub(TAIL_BYTES))).ok()?;
        let mut tail = Vec::new();
        log.take(TAIL_BYTES).read_to_end(&mut tail).ok()?;
        let mut last = LastLines::default();
        for line in String::from_utf8_lossy(&tail).lines() {
            // Each line begins with its time.
            let message = line.split_once(' ').map_or("", |(_, message)| message);
            match message.strip_prefix(init::SAYS) {
                // Lines of process 1 about starts and ends of commands are skipped.
                Some(own) if !own.contains(init::NOT_STARTED) => {}
                own => last.take(format!("{}\n", own.unwrap_or(message)).as_bytes()),
            }
        }
        Some(last.summary()).filter(|words| !words.is_empty())
    }

    /// Removes all logs except those of the guests and helpers of these directories.
    pub fn remove_logs_but(&self, kept: &BTreeSet<PathBuf>) -> Result<()> {
        let logs = &self.paths.logs;
        let mut first = Ok(());
        for entry in fs::read_dir(logs).at("read", logs)? {
            let entry = entry.at("read", logs)?;
            let name = entry.file_name();
            let id = name.to_str().and_then(|name| Some(name.rsplit_once(".log")?.0));
            if !id.is_some_and(|id| kept.contains(&self.paths.records.join(id))) {
                first = first.and(safe_removal::remove(&entry.path()));
            }
        }
        first
    }

    /// Returns the id of a directory's guest or helper. The directory must be in
    /// [`RuntimePaths::records`].
    fn id<'d>(&self, dir: &'d Path) -> Result<&'d str> {
        let id = dir.file_name().and_then(|name| name.to_str());
        let ours = dir.parent() == Some(&*self.paths.records);
        id.filter(|id| ours && id_is_good(id)).ok_or_else(|| Error::Spec {
            id: id.unwrap_or_default().to_owned(),
            text: format!("{} is not one of {}", dir.display(), self.paths.records.display()),
        })
    }

    fn guest(&self, dir: &Path) -> Result<ProcessRecord> {
        match RecordStore(dir).record()? {
            Some(record) if record.kind == ProcessKind::Guest => Ok(record),
            _ => Err(Error::Absent(dir.to_owned())),
        }
    }

    /// Records the intent, prepares the guest or helper, and lets the shim make it. Leaves nothing
    /// if that fails.
    fn begin(
        &self,
        dir: &Path,
        record: &ProcessRecord,
        task: ShimTask,
        log_bytes_max: u64,
        fds: &[BorrowedFd<'_>],
        prepare: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let id = task.id();
        let fail = |text: String| Error::Spec { id: id.to_owned(), text };
        if self.id(dir)? != id {
            return Err(fail(format!("its directory {} has another name", dir.display())));
        }
        if RecordStore(dir).exists() {
            return Err(fail(format!(
                "{} already has a guest or helper (delete it first)",
                dir.display()
            )));
        }
        DirBuilder::new().recursive(true).mode(0o711).create(dir).at("make", dir)?;
        let mode = match &task {
            // The OCI runtime traverses the directory as the guest's root, to reach the guest's
            // files.
            ShimTask::Guest { users, .. } => {
                chown(dir, None, Some(users.base)).at("give away", dir)?;
                0o710
            }
            ShimTask::Helper(_) => 0o700,
        };
        fs::set_permissions(dir, Permissions::from_mode(mode)).at("set the mode of", dir)?;
        for above in dir.ancestors().skip(1) {
            let mode = fs::metadata(above).at("look at", above)?.permissions().mode();
            if mode & 0o001 == 0 {
                let above = above.display();
                return Err(fail(format!("its user ids can't search {above}; chmod o+x {above}")));
            }
        }
        RecordStore(dir).set_record(record)?;
        let order = || -> Result<ShimOrder> {
            let [log, _] = self.logs(dir)?;
            let RuntimePaths { runc, runc_root, cgroup, .. } = self.paths.clone();
            let (dir, fds) = (dir.to_owned(), fds.len());
            Ok(ShimOrder {
                dir,
                what: task.clone(),
                runc,
                runc_root,
                cgroup,
                fds,
                log,
                log_bytes_max,
            })
        };
        let made =
            prepare().and_then(|()| order()).and_then(|order| self.run_shim(id, dir, &order, fds));
        let Err(error) = made else { return Ok(()) };
        // The OCI runtime reports that its first process is gone, but not why.
        let killed = record.kind == ProcessKind::Guest
            && matches!(error, Error::Runtime { .. })
            && self.cgroups.lacks_memory(&record.cgroup);
        // Report the first error.
        let _ = self.delete(dir);
        if killed {
            return Err(fail(format!(
                "it ran out of memory while starting (resources.memory: {START_MIB} MiB or more)"
            )));
        }
        Err(error)
    }

    fn run_shim(
        &self,
        id: &str,
        dir: &Path,
        order: &ShimOrder,
        fds: &[BorrowedFd<'_>],
    ) -> Result<()> {
        // Duplicate above the target numbers, so that no descriptor is overwritten before it is
        // passed on.
        let above = DESCRIPTOR_FIRST + DESCRIPTORS_MAX as i32;
        let passed: Vec<OwnedFd> = fds
            .iter()
            .map(|fd| rustix::io::fcntl_dupfd_cloexec(fd, above))
            .collect::<std::result::Result<_, _>>()
            .at("pass descriptors on to", dir)?;
        let mut command = Command::new(&self.paths.shim);
        // The argument is only for people who list processes.
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
        // If writing fails, the shim has ended and reports why.
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
        // It belongs to the daemon: runc would let the guest report to systemd.
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
            runc.stderr.take().map(|stderr| stderr.take(TEXT_BYTES_MAX).read_to_end(&mut text));
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

/// Sets the loopback interface of a guest down.
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
    // In a separate thread, so that the caller stays in its namespace.
    let result = std::thread::spawn(down).join();
    result.unwrap_or_else(|_| Err(io::Error::other("panicked"))).at("take lo down in", &path)
}
