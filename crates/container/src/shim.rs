//! The supervisor of one guest or helper: `pdp-shim DIR`, with descriptors from 3 on for it.
//!
//! What it is to do comes on its standard input, an [`Order`] as JSON, and is kept nowhere: no file that
//! somebody may have changed says what is run. It detaches (a session and a cgroup of its own), makes the
//! container or starts the process, and only then does the process that was called return, so that its caller
//! knows. It outlives the caller, keeps the log, and writes down how the process ended. It holds none of
//! the descriptors once it has passed them on.
//!
//! Limits: two log files of the order's bytes; lines longer than [`LINE_BYTES_MAX`] are broken;
//! [`LOG_BYTES_PER_SECOND_MAX`] and, of how commands are, [`ear::TOLD_BYTES_PER_SECOND_MAX`], beyond which the
//! writer waits, so that a guest can't spend our time.

mod ear;

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

use self::ear::{Ear, Hearer, Keeper};
use crate::bundle as bundles;
use crate::cgroup::Cgroups;
use crate::error::{Context, Error, Result};
use crate::log::LogFile;
use crate::process::{Exit, Process, end_within, leave_session_keyring};
use crate::runtime::GUEST_MASK;
use crate::spec::{HelperSpec, UserRange, bundle};
use crate::store::{RUNC_PID, Store};
use crate::view::View;

/// The cgroup of all shims: no tenant's, and a name that no vnet can have.
pub(crate) const CGROUP: &str = "_shims";

/// Bytes of a line in the log.
pub const LINE_BYTES_MAX: usize = 4096;

/// What a guest may write into its log.
pub const LOG_BYTES_PER_SECOND_MAX: u64 = 1 << 20;

/// The first descriptor that is passed on.
pub(crate) const DESCRIPTOR_FIRST: i32 = 3;

/// Time of one call of the OCI runtime. Most take 0.1 s; but the first process of a guest is within the
/// guest's share of the CPUs already.
pub(crate) const RUNC_WAIT: Duration = Duration::from_secs(60);

/// The word that the caller hears when all is well.
const READY: &str = "ready";

/// What a shim is to do.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Order {
    /// Directory of the guest or helper.
    pub dir: PathBuf,
    pub what: What,
    /// The OCI runtime.
    pub runc: PathBuf,
    pub runc_root: PathBuf,
    /// Name of the runtime's cgroup.
    pub cgroup: String,
    /// Descriptors from 3 on that it is given.
    pub fds: usize,
    pub log: PathBuf,
    pub log_bytes_max: u64,
}

/// What is to run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum What {
    /// A container, whose bundle is made; how many commands its process 1 tells of, if it does.
    Guest { id: String, users: UserRange, commands: Option<usize> },
    /// A process.
    Helper(HelperSpec),
}

impl What {
    pub fn id(&self) -> &str {
        match self {
            Self::Guest { id, .. } => id,
            Self::Helper(spec) => &spec.id,
        }
    }
}

/// Entry point of `pdp-shim`.
pub fn main() -> ExitCode {
    let order = match serde_json::from_reader::<_, Order>(io::stdin()) {
        Ok(order) => order,
        Err(error) => {
            eprintln!("pdp-shim is started by pdpd, which gives it its order: {error}");
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
fn detach(order: &Order) -> io::Result<()> {
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
            let mut said = String::new();
            File::from(read).read_to_string(&mut said)?;
            if said == READY { Ok(()) } else { Err(io::Error::other(said)) }
        }
    }
}

/// The life of a shim.
fn supervise(order: &Order, mut caller: File) -> i32 {
    match begin(order) {
        Ok((process, output, told)) => {
            // The caller may be gone; the guest stays.
            let _ = caller.write_all(READY.as_bytes());
            drop(caller);
            let log = Log::open(&order.log, order.log_bytes_max);
            let exit = follow(process, Ears { log: Ear::new(output, log), told });
            if let Some(exit) = exit {
                // The directory may be gone if the guest is being removed.
                let _ = Store(&order.dir).set_exit(exit);
            }
            0
        }
        Err(error) => {
            let _ = caller.write_all(words(&error).as_bytes());
            1
        }
    }
}

/// An error with its causes.
fn words(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |error| error.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}

/// Makes the container or starts the process; returns it, the end of its output, and where its process 1 tells of
/// its commands.
fn begin(order: &Order) -> Result<(Process, OwnedFd, Option<Ear<Keeper>>)> {
    let dir = &*order.dir;
    rustix::process::setsid().at("make a session in", dir)?;
    rustix::process::chdir("/").at("go to", Path::new("/"))?;
    // What it writes is for nobody else to read.
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
    Store(dir).set_shim(me)?;
    let (read, write) = pipe_with(PipeFlags::CLOEXEC).at("make a pipe in", dir)?;
    let mut told = None;
    let process = match &order.what {
        What::Guest { id, users, commands } => {
            let mut tells = null;
            if let Some(commands) = *commands {
                let (hears, end) = pipe_with(PipeFlags::CLOEXEC).at("make a pipe in", dir)?;
                let record = Store(dir).record()?.ok_or_else(|| Error::Absent(dir.to_owned()))?;
                let (cgroups, leaf) = (cgroups.clone(), bundles::leaf(&record.cgroup));
                let keeper = Keeper::new(dir, commands, move || cgroups.memory_kills(&leaf))?;
                told = Some(Ear::new(hears, keeper));
                tells = end.into();
            }
            create_container(order, id, *users, tells, write)?;
            let path = dir.join(RUNC_PID);
            let pid = std::fs::read_to_string(&path).at("read", &path)?;
            of(pid.trim().parse().unwrap_or_default(), dir)?
        }
        What::Helper(spec) => of(start_helper(spec, order.fds, &cgroups, write)?.id(), dir)?,
    };
    close_passed(order.fds);
    Store(dir).set_process(process)?;
    Ok((process, read, told))
}

fn of(pid: u32, dir: &Path) -> Result<Process> {
    let gone = io::Error::other("the process has ended already");
    Process::of(pid).ok_or(gone).at("find the process of", dir)
}

/// `tells` becomes the standard input of the container's process 1, which has nothing to read and keeps it from
/// its commands.
fn create_container(
    order: &Order,
    id: &str,
    users: UserRange,
    tells: File,
    output: OwnedFd,
) -> Result<()> {
    let dir = &*order.dir;
    let view = View::prepare(id, dir, users)?;
    let errors = || output.try_clone().map(Stdio::from).at("pass on output in", dir);
    let log = dir.join("bundle/runc.log");
    let mut command = Command::new(&order.runc);
    command
        .arg("--root")
        .arg(&order.runc_root)
        .arg("--log")
        .arg(&log)
        // A key for each guest would be one of the 200 that the kernel gives to all guests of a vnet.
        .args(["--log-format", "json", "create", "--no-new-keyring", "--bundle"])
        .arg(bundle(dir))
        .arg("--pid-file")
        .arg(dir.join(RUNC_PID))
        .arg("--preserve-fds")
        .arg(order.fds.to_string())
        .arg(id)
        .stdin(tells)
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

/// The messages in runc's log (JSON lines), worst last.
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
    // Started from its own directory, so that the user it becomes need not pass all those above:
    // a checkout below /root, with mode 0700, is to work.
    let path = Path::new(program);
    let (Some(directory), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(fail(format!("{program} is no path of a program")));
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
        // SAFETY: the caller of this program opened it for it; it is not closed while it is borrowed.
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

/// Becomes an ordinary user for good: no capability, not by exec either.
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
        // From root to another user: the kernel clears all capabilities.
        check(libc::setresuid(uid, uid, uid))?;
        check(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    }
}

/// The largest number that a capability can have (64 bits in the kernel's interface).
const CAPABILITY_MAX: libc::c_ulong = 63;

/// Closes the descriptors that were passed on: held here, they would keep TAPs alive.
fn close_passed(count: usize) {
    for offset in 0..count as i32 {
        // SAFETY: the caller of this program opened these for it; nothing here owns them.
        drop(unsafe { OwnedFd::from_raw_fd(DESCRIPTOR_FIRST + offset) });
    }
}

/// What the shim hears of its process.
struct Ears {
    log: Ear<Log>,
    told: Option<Ear<Keeper>>,
}

/// Keeps what is heard until the process ends, and says how.
fn follow(process: Process, mut ears: Ears) -> Option<Exit> {
    let pid = Pid::from_raw(process.pid as i32)?;
    let ended = process.pidfd();
    while let Some(ended) = &ended {
        let late = ears.told.as_mut().and_then(|told| told.hearer.write_if_due());
        let mut timeouts: Vec<Duration> = late.into_iter().collect();
        let mut fds = vec![PollFd::new(ended, PollFlags::IN)];
        let log = ears.log.listens(&mut timeouts).map(|fd| fds.push(fd));
        let told = ears.told.as_mut().and_then(|told| told.listens(&mut timeouts));
        let told = told.map(|fd| fds.push(fd));
        let timeout = timeouts.iter().min().and_then(|it| Timespec::try_from(*it).ok());
        // Interrupted or not: what there is to do shows itself.
        let _ = poll(&mut fds, timeout.as_ref());
        let mut came = fds.iter().map(|fd| !fd.revents().is_empty());
        let has_ended = came.next().unwrap_or(false);
        let has_output = log.is_some() && came.next().unwrap_or(false);
        let was_told = told.is_some() && came.next().unwrap_or(false);
        if has_output {
            ears.log.hear();
        }
        if was_told && let Some(told) = &mut ears.told {
            told.hear();
        }
        if has_ended && !has_output {
            break;
        }
    }
    ears.log.hearer.end();
    if let Some(told) = &mut ears.told {
        told.hearer.write();
    }
    let (_, status) = loop {
        match rustix::process::waitpid(Some(pid), WaitOptions::empty()) {
            Err(rustix::io::Errno::INTR) => {}
            result => break result.ok()??,
        }
    };
    let status = ExitStatus::from_raw(status.as_raw());
    Some(Exit { code: status.code(), signal: status.signal(), at_ms: now().as_millis() as u64 })
}

fn now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// A log of lines with times.
struct Log {
    /// `None`: it can't be made, which must not stop the guest.
    file: Option<LogFile>,
    line: Vec<u8>,
}

impl Log {
    fn open(path: &Path, bytes_max: u64) -> Self {
        Self { file: LogFile::open(path, bytes_max).ok(), line: Vec::new() }
    }

    /// Writes what came without a line's end.
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
            // A full disk must not stop it either.
            let _ = file.write_all(&text);
        }
    }
}

impl Hearer for Log {
    const BYTES_PER_SECOND_MAX: u64 = LOG_BYTES_PER_SECOND_MAX;

    fn take(&mut self, bytes: &[u8]) {
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

/// A time since 1970 as RFC 3339 has it, UTC, with milliseconds.
fn stamp(time: Duration) -> String {
    let (days, second) = (time.as_secs() / 86_400, time.as_secs() % 86_400);
    // Days from the first of March of year 0, so that the leap day is a year's last; years in
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
    fn times_are_calendar_times() {
        let at = |seconds, ms| stamp(Duration::from_secs(seconds) + Duration::from_millis(ms));
        assert_eq!(at(0, 0), "1970-01-01T00:00:00.000Z");
        assert_eq!(at(951_827_696, 7), "2000-02-29T12:34:56.007Z");
        assert_eq!(at(4_107_542_399, 999), "2100-02-28T23:59:59.999Z");
    }

    proptest! {
        #[test]
        fn the_log_is_bounded_and_ends_with_what_came_last(
            pieces in prop::collection::vec("[a-z\n]{0,200}", 1..60),
        ) {
            let dir = tempfile::tempdir().unwrap();
            let bytes_max = 1000;
            let path = dir.path().join("log");
            let mut log = Log::open(&path, bytes_max);
            for piece in &pieces {
                log.take(piece.as_bytes());
            }
            log.end();
            let read = |path: &Path| std::fs::read_to_string(path).unwrap_or_default();
            let (new, old) = (read(&path), read(&LogFile::older(&path)));
            prop_assert!(old.len() as u64 <= bytes_max);
            // One line may be longer than the bound of a file.
            prop_assert!(new.len() as u64 <= bytes_max || new.lines().count() == 1);
            let all = old + &new;
            let got: Vec<_> = all.lines().map(|line| &line["1970-01-01T00:00:00.000Z ".len()..]).collect();
            let text = pieces.concat();
            let want: Vec<_> = text.lines().collect();
            prop_assert!(want.ends_with(&got));
        }
    }
}
