//! The supervisor of one guest or helper: `pdp-shim DIR`, with descriptors for it from 3 on.
//!
//! The shim reads its order, a [`ShimOrder`] as JSON, from standard input and stores it nowhere.
//! So no file that a process may have changed decides which program runs. The shim detaches (a
//! session and a cgroup of its own), and makes the container or starts the process. Only then does
//! the called process return, so that its caller knows. The shim outlives the caller, writes the
//! log, and records how the process ended. It closes the descriptors once it has passed them on.
//!
//! Limits: two log files of the order's size. Lines longer than [`LINE_BYTES_MAX`] are broken. The
//! shim reads at most [`LOG_BYTES_PER_SECOND_MAX`] of output and
//! [`log_reader::TOLD_BYTES_PER_SECOND_MAX`] of status. Beyond that the writer waits, so that a
//! guest can't use up the shim's time.

mod log_reader;

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::Mode;
use rustix::io::FdFlags;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, WaitOptions};
use serde::{Deserialize, Serialize};

use self::log_reader::{OutputReader, OutputSink, StatusRecorder};
use crate::bundle as bundles;
use crate::cgroup::Cgroups;
use crate::error::{Error, ErrorContext, Result};
use crate::log::LogFile;
use crate::process::{GUEST_MASK, Process, ProcessOutcome, end_within, leave_session_keyring};
use crate::spec::{HelperSpec, UserRange, bundle};
use crate::store::{RUNC_PID, RecordStore};
use crate::view::GuestMounts;

/// The cgroup of all shims. It belongs to no tenant, and no vnet can have its name.
pub(crate) const CGROUP: &str = "_shims";

/// Longest line in the log, bytes.
pub const LINE_BYTES_MAX: usize = 4096;

/// Largest output of a guest into its log, bytes per second.
pub const LOG_BYTES_PER_SECOND_MAX: u64 = 1 << 20;

/// First descriptor that is passed on.
pub(crate) const DESCRIPTOR_FIRST: i32 = 3;

/// Longest time of one call of the OCI runtime. Most calls take 0.1 s. But the first process of a
/// guest already runs within the guest's CPU limit.
pub(crate) const RUNC_WAIT: Duration = Duration::from_secs(60);

/// Message to the caller on success.
const READY: &str = "ready";

/// Order for a shim.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct ShimOrder {
    /// Directory of the guest or helper.
    pub dir: PathBuf,
    pub what: ShimTask,
    /// The OCI runtime.
    pub runc: PathBuf,
    pub runc_root: PathBuf,
    /// Name of the runtime's cgroup.
    pub cgroup: String,
    /// Number of descriptors passed to it, from 3 on.
    pub fds: usize,
    pub log: PathBuf,
    pub log_bytes_max: u64,
}

/// Guest or helper to run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum ShimTask {
    /// A container, whose bundle exists. `commands`: number of commands that its process 1 reports,
    /// if it does.
    Guest { id: String, users: UserRange, commands: Option<usize> },
    /// A process.
    Helper(HelperSpec),
}

impl ShimTask {
    pub fn id(&self) -> &str {
        match self {
            Self::Guest { id, .. } => id,
            Self::Helper(spec) => &spec.id,
        }
    }
}

/// Entry point of `pdp-shim`.
pub fn main() -> ExitCode {
    let order = match serde_json::from_reader::<_, ShimOrder>(io::stdin()) {
        Ok(order) => order,
        Err(error) => {
            eprintln!("pdp-shim expects its order from pdpd on standard input: {error}");
            return ExitCode::FAILURE;
        }
    };
    match detach(&order) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// Forks, and waits until the child has made the guest or failed.
fn detach(order: &ShimOrder) -> io::Result<()> {
    let (read, write) = pipe_with(PipeFlags::CLOEXEC)?;
    // SAFETY: this process has one thread, so the child may do whatever this one may.
    let child = unsafe { libc::fork() };
    match child {
        -1 => Err(io::Error::last_os_error()),
        0 => {
            drop(read);
            let code = supervise(order, File::from(write));
            std::process::exit(code);
        }
        _ => {
            drop(write);
            let mut reply = String::new();
            File::from(read).read_to_string(&mut reply)?;
            if reply == READY { Ok(()) } else { Err(io::Error::other(reply)) }
        }
    }
}

/// Main function of the detached shim.
fn supervise(order: &ShimOrder, mut caller: File) -> i32 {
    match begin(order) {
        Ok((process, output, reports)) => {
            // The caller may be gone. The guest continues all the same.
            let _ = caller.write_all(READY.as_bytes());
            drop(caller);
            let log = ShimLog::open(&order.log, order.log_bytes_max);
            let outcome = follow(
                process,
                OutputReaders { log: OutputReader::new(output, log), status: reports },
            );
            if let Some(outcome) = outcome {
                // The directory may be gone if the guest is being removed.
                let _ = RecordStore(&order.dir).set_outcome(outcome);
            }
            0
        }
        Err(error) => {
            let _ = caller.write_all(error_chain(&error).as_bytes());
            1
        }
    }
}

/// Formats an error with its causes.
fn error_chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |error| error.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}

/// Makes the container or starts the process. Returns the process, its output, and the reader of
/// its process 1's reports.
fn begin(order: &ShimOrder) -> Result<(Process, OwnedFd, Option<OutputReader<StatusRecorder>>)> {
    let dir = &*order.dir;
    rustix::process::setsid().at("make a session in", dir)?;
    rustix::process::chdir("/").at("go to", Path::new("/"))?;
    // Files that the shim writes are not readable for others.
    rustix::process::umask(Mode::from_raw_mode(0o066));
    let null = OpenOptions::new().read(true).write(true).open("/dev/null");
    let null = null.at("open", Path::new("/dev/null"))?;
    rustix::stdio::dup2_stdin(&null).at("redirect", dir)?;
    rustix::stdio::dup2_stdout(&null).at("redirect", dir)?;
    rustix::stdio::dup2_stderr(&null).at("redirect", dir)?;
    let cgroups = Cgroups::new(&order.cgroup)?;
    cgroups.enter(CGROUP, std::process::id())?;
    let init = Pid::from_raw(1);
    rustix::process::set_child_subreaper(init).at("become the reaper in", dir)?;
    let me = of(std::process::id(), dir)?;
    RecordStore(dir).set_shim(me)?;
    let (read, write) = pipe_with(PipeFlags::CLOEXEC).at("make a pipe in", dir)?;
    let mut reports = None;
    let process = match &order.what {
        ShimTask::Guest { id, users, commands } => {
            let mut stdin = null;
            if let Some(commands) = *commands {
                let (read_end, write_end) =
                    pipe_with(PipeFlags::CLOEXEC).at("make a pipe in", dir)?;
                let record =
                    RecordStore(dir).record()?.ok_or_else(|| Error::Absent(dir.to_owned()))?;
                let (cgroups, leaf) = (cgroups.clone(), bundles::leaf(&record.cgroup));
                let recorder =
                    StatusRecorder::new(dir, commands, move || cgroups.memory_kills(&leaf))?;
                reports = Some(OutputReader::new(read_end, recorder));
                stdin = write_end.into();
            }
            create_container(order, id, *users, stdin, write)?;
            let path = dir.join(RUNC_PID);
            let pid = std::fs::read_to_string(&path).at("read", &path)?;
            of(pid.trim().parse().unwrap_or_default(), dir)?
        }
        ShimTask::Helper(spec) => of(start_helper(spec, order.fds, &cgroups, write)?.id(), dir)?,
    };
    close_passed(order.fds);
    RecordStore(dir).set_process(process)?;
    Ok((process, read, reports))
}

fn of(pid: u32, dir: &Path) -> Result<Process> {
    let gone = io::Error::other("the process has ended already");
    Process::of(pid).ok_or(gone).at("find the process of", dir)
}

/// Makes the container. `stdin` becomes the standard input of its process 1, which reads nothing
/// from it and does not pass it to its commands.
fn create_container(
    order: &ShimOrder,
    id: &str,
    users: UserRange,
    stdin: File,
    output: OwnedFd,
) -> Result<()> {
    let dir = &*order.dir;
    let view = GuestMounts::prepare(id, dir, users)?;
    let errors = || output.try_clone().map(Stdio::from).at("pass on output in", dir);
    let log = dir.join("bundle/runc.log");
    let mut command = Command::new(&order.runc);
    command
        .arg("--root")
        .arg(&order.runc_root)
        .arg("--log")
        .arg(&log)
        // The kernel permits the guests of a vnet 200 keys in all. A keyring per guest would use
        // them up.
        .args(["--log-format", "json", "create", "--no-new-keyring", "--bundle"])
        .arg(bundle(dir))
        .arg("--pid-file")
        .arg(dir.join(RUNC_PID))
        .arg("--preserve-fds")
        .arg(order.fds.to_string())
        .arg(id)
        .stdin(stdin)
        .stdout(errors()?)
        .stderr(errors()?);
    // SAFETY: the shim has one thread, so that no lock is held by another at the fork, and the
    // child may allocate and make system calls.
    unsafe {
        command.pre_exec(move || {
            rustix::process::umask(GUEST_MASK);
            leave_session_keyring();
            view.enter()
        });
    }
    let status = command.spawn().and_then(|mut runc| end_within(&mut runc, RUNC_WAIT));
    let status = status.at("run", &order.runc)?;
    if status.success() {
        return Ok(());
    }
    let text = std::fs::read_to_string(&log).unwrap_or_default();
    Err(Error::Runtime { id: id.to_owned(), what: "runc create", text: messages(&text, status) })
}

/// Returns the messages in runc's log (JSON lines), the worst last.
pub(crate) fn messages(log: &str, status: ExitStatus) -> String {
    let message = |line: &str| {
        let line: serde_json::Value = serde_json::from_str(line).ok()?;
        let worth = matches!(line["level"].as_str()?, "error" | "fatal" | "warning");
        worth.then(|| line["msg"].as_str().map(str::to_owned))?
    };
    let all: Vec<_> = log.lines().filter_map(message).collect();
    if all.is_empty() { status.to_string() } else { all.join("; ") }
}

fn start_helper(
    spec: &HelperSpec,
    fds: usize,
    cgroups: &Cgroups,
    output: OwnedFd,
) -> Result<Child> {
    let fail = |text: String| Error::Spec { id: spec.id.clone(), text };
    let (program, arguments) =
        spec.argv.split_first().ok_or_else(|| fail("a command without a program".to_owned()))?;
    let errors = output.try_clone().at("pass on output in", &spec.dir)?;
    // The program is started from its own directory. Its user therefore needs no access to the
    // directories above: a checkout below /root, with mode 0700, works.
    let path = Path::new(program);
    let (Some(directory), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(fail(format!("{program} is not a program's path")));
    };
    let mut command = Command::new(Path::new(".").join(name));
    command
        .arg0(program)
        .args(arguments)
        .current_dir(directory)
        .env_clear()
        .env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
        .envs(&spec.env)
        .stdout(output)
        .stderr(errors);
    if fds > 0 {
        // SAFETY: the caller of this program opened it for it; it is not closed while it is
        // borrowed.
        let stdin = unsafe { BorrowedFd::borrow_raw(DESCRIPTOR_FIRST) };
        rustix::io::fcntl_setfd(stdin, FdFlags::CLOEXEC).at("pass on input in", &spec.dir)?;
        let stdin = stdin.try_clone_to_owned().at("pass on input in", &spec.dir)?;
        command.stdin(stdin);
    }
    let (uid, keep_root, cgroup) = (spec.uid, spec.keep_root, spec.cgroup.clone());
    let cgroups = cgroups.clone();
    // SAFETY: the shim has one thread, so that no lock is held by another at the fork, and the
    // child may allocate and do file input and output.
    unsafe {
        command.pre_exec(move || {
            cgroups.enter(&cgroup, std::process::id()).map_err(io::Error::other)?;
            if keep_root { Ok(()) } else { drop_privileges(uid) }
        });
    }
    command.spawn().at("run", path)
}

/// Becomes an ordinary user forever: no capability, not even by exec.
fn drop_privileges(uid: u32) -> io::Result<()> {
    let check = |result: libc::c_int| {
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    };
    for capability in 0..=CAPABILITY_MAX {
        // SAFETY: takes no pointer. Those that the kernel does not know fail, which is as good.
        unsafe { libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0) };
    }
    // SAFETY: no group is read through the null pointer, since their count is zero; the other
    // calls take no pointer.
    unsafe {
        check(libc::setgroups(0, std::ptr::null()))?;
        check(libc::setresgid(uid, uid, uid))?;
        // Changing from root to another user clears all capabilities.
        check(libc::setresuid(uid, uid, uid))?;
        check(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    }
}

/// Largest possible number of a capability (the kernel's interface has 64 bits).
const CAPABILITY_MAX: libc::c_ulong = 63;

/// Closes the descriptors that were passed on. If the shim kept them open, they would keep TAPs
/// alive.
fn close_passed(count: usize) {
    for offset in 0..count as i32 {
        // SAFETY: the caller of this program opened these for it; nothing here owns them.
        drop(unsafe { OwnedFd::from_raw_fd(DESCRIPTOR_FIRST + offset) });
    }
}

/// Readers of the process's output and reports.
struct OutputReaders {
    log: OutputReader<ShimLog>,
    status: Option<OutputReader<StatusRecorder>>,
}

/// Reads output and reports until the process ends. Returns how it ended.
fn follow(process: Process, mut readers: OutputReaders) -> Option<ProcessOutcome> {
    let pid = Pid::from_raw(process.pid as i32)?;
    let ended = process.pidfd();
    while let Some(ended) = &ended {
        let write_due = readers.status.as_mut().and_then(|reports| reports.sink.write_if_due());
        let mut timeouts: Vec<Duration> = write_due.into_iter().collect();
        let mut fds = vec![PollFd::new(ended, PollFlags::IN)];
        let log = readers.log.listens(&mut timeouts).map(|fd| fds.push(fd));
        let reports = readers.status.as_mut().and_then(|reports| reports.listens(&mut timeouts));
        let reports = reports.map(|fd| fds.push(fd));
        let timeout = timeouts.iter().min().and_then(|it| Timespec::try_from(*it).ok());
        // The result of poll does not matter: all states are checked anyway.
        let _ = poll(&mut fds, timeout.as_ref());
        let mut ready = fds.iter().map(|fd| !fd.revents().is_empty());
        let has_ended = ready.next().unwrap_or(false);
        let has_output = log.is_some() && ready.next().unwrap_or(false);
        let has_reports = reports.is_some() && ready.next().unwrap_or(false);
        if has_output {
            readers.log.read();
        }
        if has_reports && let Some(reports) = &mut readers.status {
            reports.read();
        }
        if has_ended && !has_output {
            break;
        }
    }
    readers.log.sink.end();
    if let Some(reports) = &mut readers.status {
        reports.sink.write();
    }
    let (_, status) = loop {
        match rustix::process::waitpid(Some(pid), WaitOptions::empty()) {
            Err(rustix::io::Errno::INTR) => {}
            result => break result.ok()??,
        }
    };
    let status = ExitStatus::from_raw(status.as_raw());
    Some(ProcessOutcome {
        code: status.code(),
        signal: status.signal(),
        at_ms: now().as_millis() as u64,
    })
}

fn now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// A log of lines with times.
struct ShimLog {
    /// `None` if it can't be made. This must not stop the guest.
    file: Option<LogFile>,
    line: Vec<u8>,
}

impl ShimLog {
    fn open(path: &Path, bytes_max: u64) -> Self {
        Self { file: LogFile::open(path, bytes_max).ok(), line: Vec::new() }
    }

    /// Writes a last line without a line end.
    fn end(&mut self) {
        if !self.line.is_empty() {
            self.write_line();
        }
    }

    fn write_line(&mut self) {
        let mut text = stamp(now()).into_bytes();
        text.push(b' ');
        text.append(&mut self.line);
        text.push(b'\n');
        if let Some(file) = &mut self.file {
            // A full disk must not stop the guest either.
            let _ = file.write_all(&text);
        }
    }
}

impl OutputSink for ShimLog {
    const BYTES_PER_SECOND_MAX: u64 = LOG_BYTES_PER_SECOND_MAX;

    fn consume(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            if byte != b'\n' {
                self.line.push(byte);
            }
            if byte == b'\n' || self.line.len() >= LINE_BYTES_MAX {
                self.write_line();
            }
        }
    }
}

/// Formats a time since 1970 as in RFC 3339, UTC, with milliseconds.
fn stamp(time: Duration) -> String {
    let (days, second) = (time.as_secs() / 86_400, time.as_secs() % 86_400);
    // Days count from March 1 of year 0, so that the leap day is the last of a year. Years are in
    // eras of 400, which have 146,097 days.
    let day = days + 719_468;
    let (era, day) = (day / 146_097, day % 146_097);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (month, next) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    format!(
        "{:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}.{:03}Z",
        era * 400 + year + next,
        second / 3600,
        second / 60 % 60,
        second % 60,
        time.subsec_millis(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn timestamps_are_calendar_times() {
        let at = |seconds, ms| stamp(Duration::from_secs(seconds) + Duration::from_millis(ms));
        assert_eq!(at(0, 0), "1970-01-01T00:00:00.000Z");
        assert_eq!(at(951_827_696, 7), "2000-02-29T12:34:56.007Z");
        assert_eq!(at(4_107_542_399, 999), "2100-02-28T23:59:59.999Z");
    }

    proptest! {
        #[test]
        fn log_is_bounded_and_keeps_the_newest_text(
            pieces in prop::collection::vec("[a-z\n]{0,200}", 1..60),
        ) {
            let dir = tempfile::tempdir().unwrap();
            let bytes_max = 1000;
            let path = dir.path().join("log");
            let mut log = ShimLog::open(&path, bytes_max);
            for piece in &pieces {
                log.consume(piece.as_bytes());
            }
            log.end();
            let read = |path: &Path| std::fs::read_to_string(path).unwrap_or_default();
            let (new, old) = (read(&path), read(&LogFile::older(&path)));
            prop_assert!(old.len() as u64 <= bytes_max);
            // A single line may be longer than the file's limit.
            prop_assert!(new.len() as u64 <= bytes_max || new.lines().count() == 1);
            let all = old + &new;
            let got: Vec<_> = all.lines().map(|line| &line["1970-01-01T00:00:00.000Z ".len()..]).collect();
            let text = pieces.concat();
            let want: Vec<_> = text.lines().collect();
            prop_assert!(want.ends_with(&got));
        }
    }
}
