//! Process 1 of a guest. It puts files in place and starts each command when those before it are
//! ready. It restarts commands, and with them the commands bound to them. It reaps orphans, passes
//! SIGTERM on, and reports the status of commands to the shim ([`crate::status`]).
//!
//! A forwarding guest ends with its last command and returns that command's exit code (128 plus the
//! signal, if a signal ended it). Other guests stay until SIGTERM. Process 1 is single-threaded and
//! never blocks on a command, check or reader. Its own messages and the output of commands go to
//! standard error, the guest's log.
//!
//! With [`ENTER`], the same program becomes a command that runs later in a guest as one of its
//! users.
//!
//! Limits: the pause before a restart is first [`PAUSE_MIN`], and doubles with each further end up
//! to [`PAUSE_MAX`]. After [`GOOD_RUN`] of running, a command begins with the shortest pause again.

mod output;
mod probe;
mod run_as;
mod service;

use std::convert::Infallible;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{PermissionsExt, chown, fchown};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{ExitCode, ExitStatus};
use std::time::{Duration, Instant};

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::{SigSet, Signal, kill};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::unistd::Pid;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};

pub(crate) use self::output::LastLines;
use self::output::{Output, StderrForwarder};
use self::probe::ProbeSchedule;
use self::run_as::{GuestUser, ResolvedRunAs};
use self::service::Service;
use crate::spec::{GuestCommand, RunAs};
use crate::status::StatusUpdate;

/// First pause before a restart.
pub const PAUSE_MIN: Duration = Duration::from_millis(100);

/// Longest pause before a restart.
pub const PAUSE_MAX: Duration = Duration::from_secs(10);

/// Running time after which a command counts as good.
pub const GOOD_RUN: Duration = Duration::from_secs(30);

/// Pause before a report is sent again that the shim's pipe did not accept.
const TELL_PAUSE: Duration = Duration::from_millis(100);

/// Prefix of process 1's own lines in the log, and its words for a command that it could not start.
pub(crate) const SAYS: &str = "pdp-init: ";
pub(crate) const NOT_STARTED: &str = "can't be started";

/// First argument that makes the program become a command. The configuration, the user and the
/// working directory follow, the last two empty if not given, and then the command.
pub(crate) const ENTER: &str = "enter";

/// Message prefix and exit code if entering fails. They are those of the OCI runtime, which clients
/// know.
const NOT_ENTERED: &str = "exec failed: unable to start container process";
const CODE_NOT_ENTERED: u8 = 255;

/// Configuration file of process 1 (JSON).
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct InitConfig {
    pub commands: Vec<GuestCommand>,
    pub files: Vec<FileCopy>,
    /// True if the guest ends with its last command.
    pub ends: bool,
    /// True if standard input is the pipe for reports to the shim.
    #[serde(default)]
    pub tells: bool,
    /// Largest number of open descriptors per process.
    pub open_files_max: u64,
    /// True if `HOME` of the environment stays for every user.
    #[serde(default)]
    pub keeps_home: bool,
    /// Directory to make before the first command starts, if possible.
    #[serde(default)]
    pub made: Option<PathBuf>,
}

/// A file to be copied before the first command is started.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct FileCopy {
    pub from: PathBuf,
    pub to: PathBuf,
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
}

/// Entry point of `pdp-init CONFIG`, and of `pdp-init enter CONFIG USER WORKDIR PROGRAM
/// ARGUMENTS…`.
pub fn main() -> ExitCode {
    let words: Vec<OsString> = std::env::args_os().skip(1).collect();
    let path = match &*words {
        [verb, words @ ..] if verb == ENTER => {
            let Err(error) = enter(words);
            // Write at once: clients look for it in the first bytes that they read.
            let _ = io::stderr().write_all(format!("{NOT_ENTERED}: {error}\n").as_bytes());
            return ExitCode::from(CODE_NOT_ENTERED);
        }
        [path, ..] => path,
        [] => {
            eprintln!("{SAYS}give the path of the configuration");
            return ExitCode::FAILURE;
        }
    };
    run(Path::new(path)).unwrap_or_else(|error| {
        eprintln!("{SAYS}{error}");
        ExitCode::FAILURE
    })
}

/// Becomes a command.
fn enter(words: &[OsString]) -> io::Result<Infallible> {
    let [config, user, workdir, program, arguments @ ..] = words else {
        return Err(io::Error::other("enter CONFIG USER WORKDIR PROGRAM ARGUMENTS…"));
    };
    let config: InitConfig = serde_json::from_slice(&fs::read(config)?)?;
    let user = Some(user.to_string_lossy().into_owned()).filter(|user| !user.is_empty());
    let workdir = Some(PathBuf::from(workdir)).filter(|path| !path.as_os_str().is_empty());
    let run_as = ResolvedRunAs::of(&RunAs { user, workdir }, config.keeps_home)?;
    if let Some(directory) = run_as.directory()? {
        rustix::process::fchdir(directory)?;
    }
    let mut command = std::process::Command::new(program);
    command.args(arguments);
    if let Some(guest_user) = &run_as.user {
        command.envs(guest_user.home.iter().map(|home| ("HOME", home)));
        for terminal in [io::stdin().as_fd(), io::stdout().as_fd(), io::stderr().as_fd()] {
            if rustix::termios::isatty(terminal) {
                // If the terminal does not belong to the guest, this fails. The terminal works all
                // the same.
                let _ = fchown(terminal, Some(guest_user.uid), None);
            }
        }
        guest_user.become_user()?;
    }
    let error = command.exec();
    let why = match error.kind() {
        io::ErrorKind::NotFound => "no such program".to_owned(),
        io::ErrorKind::PermissionDenied => "permission denied".to_owned(),
        _ => error.to_string(),
    };
    Err(io::Error::other(format!("{}: {why}", program.display())))
}

fn run(path: &Path) -> io::Result<ExitCode> {
    let config: InitConfig = serde_json::from_slice(&fs::read(path)?)?;
    limit(config.open_files_max)?;
    let signals: SigSet =
        [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP, Signal::SIGCHLD].into_iter().collect();
    signals.thread_block()?;
    let signal_fd = SignalFd::with_flags(&signals, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC)?;
    for file in &config.files {
        place(file).map_err(|error| {
            io::Error::new(error.kind(), format!("{}: {error}", file.to.display()))
        })?;
    }
    if let Some(directory) = &config.made {
        // A command that can't run in it reports the error.
        let _ = fs::create_dir_all(directory);
    }
    let mut guest = GuestServices::new(config)?;
    loop {
        guest.start(Instant::now());
        if guest.ends && guest.services.iter().all(Service::has_ended) {
            return Ok(ExitCode::from(guest.last_code));
        }
        guest.report_status(Instant::now());
        guest.wait(&signal_fd);
        while let Some(signal) = signal_fd.read_signal()? {
            let number = signal.ssi_signo as i32;
            if matches!(Signal::try_from(number)?, Signal::SIGTERM | Signal::SIGINT) {
                guest.stopping = true;
                // Signals all other processes of the guest, as process 1 may. It does not matter if
                // there are none.
                let _ = kill(Pid::from_raw(-1), Signal::SIGTERM);
            }
        }
        loop {
            match reap()? {
                Reaped::Child(pid, status) => guest.ended(pid, status, Instant::now()),
                Reaped::NoneYet => break,
                Reaped::NoChild if guest.stopping => return Ok(ExitCode::SUCCESS),
                Reaped::NoChild => break,
            }
        }
    }
}

/// The guest's commands.
struct GuestServices {
    services: Vec<Service>,
    /// True if the guest ends with its last command.
    ends: bool,
    last_code: u8,
    stopping: bool,
    forwarder: StderrForwarder,
    /// Command whose output is read first, so that each gets its turn.
    next_index: usize,
    /// Pipe for reports of status to the shim.
    shim: Option<File>,
}

impl GuestServices {
    fn new(config: InitConfig) -> io::Result<Self> {
        let shim = config.tells.then(take_stdin).transpose()?;
        let now = Instant::now();
        let service = |command| {
            let output = shim.is_some().then(Output::new).transpose()?;
            Ok(Service::new(command, config.keeps_home, output, now))
        };
        let services = config.commands.into_iter().map(service).collect::<io::Result<_>>()?;
        Ok(Self {
            services,
            ends: config.ends,
            last_code: 0,
            stopping: false,
            forwarder: StderrForwarder::default(),
            next_index: 0,
            shim,
        })
    }

    /// True if the commands that a command waits for permit its start.
    fn is_free(&self, index: usize) -> bool {
        let mut after = self.services[index].command.after.iter();
        after.all(|place| self.services.get(*place).is_some_and(Service::releases_dependents))
    }

    /// Starts commands that are due, and checks running ones.
    fn start(&mut self, now: Instant) {
        for index in 0..self.services.len() {
            let free = !self.stopping && self.is_free(index);
            let service = &mut self.services[index];
            if let Err(code) = service.start_if_due(free, now) {
                self.last_code = code;
            }
            if !self.stopping {
                service.poll(now);
            }
        }
    }

    /// Reports new status to the shim, as far as its pipe has space.
    fn report_status(&mut self, now: Instant) {
        let Some(shim) = &mut self.shim else { return };
        for (command, service) in self.services.iter_mut().enumerate() {
            let Some(status) = service.unreported_status(now) else { continue };
            let update = StatusUpdate { command, status };
            let Ok(mut line) = serde_json::to_vec(&update) else { continue };
            line.push(b'\n');
            // A pipe accepts so few bytes whole or not at all.
            match shim.write_all(&line) {
                Ok(()) => service.set_reported(update.status),
                // The pipe is full, or has no reader any more.
                Err(_) => return,
            }
        }
    }

    /// Waits until something happens or is due, and reads the output of commands.
    fn wait(&mut self, signals: &SignalFd) {
        let now = Instant::now();
        let is_new = |service: &Service| service.unreported_status(now).is_some();
        let untold = self.shim.as_ref().filter(|_| self.services.iter().any(is_new));
        let due = (0..self.services.len())
            .filter(|_| !self.stopping)
            .filter_map(|index| self.services[index].next_deadline(self.is_free(index)))
            .chain(untold.map(|_| now + TELL_PAUSE))
            .min();
        let left = due.map(|due| due.saturating_duration_since(now));
        let timeout = left.and_then(|left| Timespec::try_from(left).ok());
        let log = io::stderr();
        let mut fds = vec![PollFd::new(signals, PollFlags::IN)];
        let free = self.forwarder.is_free();
        if !free {
            fds.push(PollFd::new(&log, PollFlags::OUT));
        }
        let count = self.services.len();
        let outputs: Vec<_> =
            (0..count).map(|offset| (self.next_index + offset) % count).filter(|_| free).collect();
        let first = fds.len();
        let mut heard = Vec::new();
        for index in outputs {
            if let Some(output) = &self.services[index].output {
                fds.push(PollFd::new(output, PollFlags::IN));
                heard.push(index);
            }
        }
        for service in &self.services {
            fds.extend(service.fds());
        }
        // The result of poll does not matter: all states are checked anyway.
        let _ = poll(&mut fds, timeout.as_ref());
        let ready = |at: usize| fds.get(at).is_some_and(|fd| !fd.revents().is_empty());
        let spoke: Vec<_> =
            heard.into_iter().enumerate().filter(|(at, _)| ready(first + at)).collect();
        drop(fds);
        self.forwarder.pass_on();
        for (_, index) in spoke {
            if !self.forwarder.is_free() {
                break;
            }
            self.next_index = index + 1;
            if let Some(output) = &mut self.services[index].output {
                self.forwarder.take(output);
            }
        }
        self.services.iter_mut().filter_map(Service::probe_schedule).for_each(ProbeSchedule::drain);
    }

    /// Handles the end of a process.
    fn ended(&mut self, pid: Pid, status: ExitStatus, now: Instant) {
        let mut all = self.services.iter_mut().enumerate();
        let ended =
            all.find_map(|(index, service)| Some((index, service.ended(pid, status, now)?)));
        let Some((index, code)) = ended else { return };
        self.last_code = code;
        if self.stopping || !self.services[index].is_started_again() {
            return;
        }
        let after = self.services[index + 1..].iter_mut();
        let hang_on_it = after.take_while(|service| service.command.restarts_with_previous());
        hang_on_it.for_each(|service| service.start_again(now));
    }
}

/// Takes over standard input, the pipe to the shim. Leaves `/dev/null` in its place for commands.
fn take_stdin() -> io::Result<File> {
    let shim = rustix::io::fcntl_dupfd_cloexec(io::stdin(), 3)?;
    rustix::fs::fcntl_setfl(&shim, OFlags::NONBLOCK)?;
    rustix::stdio::dup2_stdin(&File::open("/dev/null")?)?;
    Ok(shim.into())
}

/// Limits the open descriptors of this process and its children, and disables core dumps. Lower
/// limits stay: the namespace has no right to raise them, and needs none.
pub(crate) fn limit(open_files_max: u64) -> io::Result<()> {
    for (resource, max) in [(Resource::RLIMIT_NOFILE, open_files_max), (Resource::RLIMIT_CORE, 0)] {
        let (_, hard) = getrlimit(resource)?;
        let max = max.min(hard);
        setrlimit(resource, max, max)?;
    }
    Ok(())
}

/// Starts a program in a session of its own. It writes into `output`, or where this process writes.
fn spawn(argv: &[String], output: Option<&Output>, run_as: &ResolvedRunAs) -> io::Result<Pid> {
    let (program, arguments) =
        argv.split_first().ok_or_else(|| io::Error::other("a command without a program"))?;
    let mut command = std::process::Command::new(program);
    command.args(arguments);
    if let Some(output) = output {
        command.stdout(output.end()?).stderr(output.end()?);
    }
    let (guest_user, directory) = (run_as.user.clone(), run_as.directory()?);
    if let Some(guest_user) = &guest_user {
        if let Some(output) = output {
            output.give(guest_user.uid, guest_user.gid)?;
        }
        command.envs(guest_user.home.iter().map(|home| ("HOME", home)));
    }
    // SAFETY: after fork, only sigprocmask(2), setsid(2), fchdir(2), setgroups(2), setgid(2) and
    // setuid(2) are called, which are system calls alone in a process of one thread; nothing is
    // allocated.
    unsafe {
        command.pre_exec(move || {
            SigSet::all().thread_unblock()?;
            // With its own session, a terminal's signals for one command reach no other.
            rustix::process::setsid()?;
            if let Some(directory) = &directory {
                rustix::process::fchdir(directory)?;
            }
            guest_user.as_ref().map_or(Ok(()), GuestUser::become_user)
        });
    }
    Ok(Pid::from_raw(command.spawn()?.id() as i32))
}

/// Copies a file into place with its owner and mode. Does not follow a symbolic link at the place
/// itself.
fn place(file: &FileCopy) -> io::Result<()> {
    if let Some(parent) = file.to.parent() {
        fs::create_dir_all(parent)?;
    }
    match fs::remove_file(&file.to) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    fs::copy(&file.from, &file.to)?;
    chown(&file.to, Some(file.uid), Some(file.gid))?;
    fs::set_permissions(&file.to, fs::Permissions::from_mode(file.mode))
}

enum Reaped {
    Child(Pid, ExitStatus),
    NoneYet,
    NoChild,
}

fn reap() -> io::Result<Reaped> {
    let mut status = 0;
    // SAFETY: `status` is a valid place for an int for the call's time.
    let pid = unsafe { libc::waitpid(-1, &mut status, libc::WNOHANG) };
    match pid {
        0 => Ok(Reaped::NoneYet),
        1.. => Ok(Reaped::Child(Pid::from_raw(pid), ExitStatus::from_raw(status))),
        _ => match io::Error::last_os_error() {
            error if error.raw_os_error() == Some(libc::ECHILD) => Ok(Reaped::NoChild),
            error => Err(error),
        },
    }
}
