//! Process 1 of a guest: puts files in place, starts the commands, starts again those that shall
//! always run, and with them those that hang on them, reaps orphans, passes SIGTERM on.
//!
//! A forwarding guest ends with its last command and returns what that returned (128 and the
//! signal, if one ended it); others stay until SIGTERM. Single-threaded. What it has to say goes
//! to standard error, the guest's log.
//!
//! Limits: pause before a restart [`PAUSE_MIN`], doubled for each end that follows, up to
//! [`PAUSE_MAX`]; a command that ran for [`GOOD_RUN`] begins anew with the shortest.

use std::fs;
use std::io;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{ExitCode, ExitStatus};
use std::time::{Duration, Instant};

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::{SigSet, Signal, kill, killpg};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};

use crate::process::wait_readable;
use crate::spec::{Command, Restart};

/// First pause before a restart.
pub const PAUSE_MIN: Duration = Duration::from_millis(100);

/// Longest pause before a restart.
pub const PAUSE_MAX: Duration = Duration::from_secs(10);

/// After running for so long, a command counts as good.
pub const GOOD_RUN: Duration = Duration::from_secs(30);

/// Stands for the end of a command that could not be started, as with sh(1).
const CODE_NOT_STARTED: u8 = 127;

/// What the file that process 1 is started with says (JSON).
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Config {
    pub commands: Vec<Command>,
    pub files: Vec<Copied>,
    /// Ends with the last command.
    pub ends: bool,
    /// Descriptors of one process.
    pub open_files_max: u64,
}

/// A file to be copied before the first command is started.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Copied {
    pub from: PathBuf,
    pub to: PathBuf,
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
}

/// A command and how it is.
struct Service {
    command: Command,
    phase: Phase,
    pause: Duration,
}

enum Phase {
    Running { pid: Pid, since: Instant },
    Waiting { until: Instant },
    Ended,
}

/// Entry point of `pdp-init CONFIG`.
pub fn main() -> ExitCode {
    let Some(path) = std::env::args_os().nth(1) else {
        eprintln!("pdp-init: give the path of the configuration");
        return ExitCode::FAILURE;
    };
    run(Path::new(&path)).unwrap_or_else(|error| {
        eprintln!("pdp-init: {error}");
        ExitCode::FAILURE
    })
}

fn run(path: &Path) -> io::Result<ExitCode> {
    let config: Config = serde_json::from_slice(&fs::read(path)?)?;
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
    let now = Instant::now();
    let waiting =
        |command| Service { command, phase: Phase::Waiting { until: now }, pause: PAUSE_MIN };
    let mut services: Vec<_> = config.commands.into_iter().map(waiting).collect();
    let mut last_code = 0;
    let mut stopping = false;
    loop {
        let now = Instant::now();
        if !stopping {
            for service in &mut services {
                if let Err(code) = service.start_if_due(now) {
                    last_code = code;
                }
            }
        }
        if config.ends && services.iter().all(|s| matches!(s.phase, Phase::Ended)) {
            return Ok(ExitCode::from(last_code));
        }
        let due = services.iter().filter_map(|service| match service.phase {
            Phase::Waiting { until } => Some(until.saturating_duration_since(now)),
            _ => None,
        });
        let far = Duration::from_secs(3600);
        wait_readable(&signal_fd, due.min().filter(|_| !stopping).unwrap_or(far));
        while let Some(signal) = signal_fd.read_signal()? {
            let number = signal.ssi_signo as i32;
            if matches!(Signal::try_from(number)?, Signal::SIGTERM | Signal::SIGINT) {
                stopping = true;
                // As process 1: to all others of the guest. None may be left, which is as good.
                let _ = kill(Pid::from_raw(-1), Signal::SIGTERM);
            }
        }
        loop {
            match reap()? {
                Reaped::Child(pid, status) => {
                    let mut ended = services
                        .iter_mut()
                        .enumerate()
                        .filter_map(|(index, service)| Some((index, service.ended(pid, status)?)));
                    if let Some((index, code)) = ended.next() {
                        last_code = code;
                        let after = services[index + 1..].iter();
                        let hang_on_it = |s: &&Service| s.command.restart == Restart::WithPrevious;
                        if !stopping {
                            after.take_while(hang_on_it).for_each(Service::kill);
                        }
                    }
                }
                Reaped::NoneYet => break,
                Reaped::NoChild if stopping => return Ok(ExitCode::SUCCESS),
                Reaped::NoChild => break,
            }
        }
    }
}

/// Gives this process and those it starts at most so many descriptors, and no core dump. What is less
/// already stays: the namespace has no right to more, and nobody has to have one for this.
pub(crate) fn limit(open_files_max: u64) -> io::Result<()> {
    for (resource, max) in [(Resource::RLIMIT_NOFILE, open_files_max), (Resource::RLIMIT_CORE, 0)] {
        let (_, hard) = getrlimit(resource)?;
        let max = max.min(hard);
        setrlimit(resource, max, max)?;
    }
    Ok(())
}

impl Service {
    /// Starts the command when it is time; the exit code that stands for it if that fails.
    fn start_if_due(&mut self, now: Instant) -> Result<(), u8> {
        let Phase::Waiting { until } = self.phase else { return Ok(()) };
        if until > now {
            return Ok(());
        }
        match spawn(&self.command.argv) {
            Ok(pid) => {
                eprintln!("pdp-init: {} started, process {pid}", self.name());
                self.phase = Phase::Running { pid, since: now };
                Ok(())
            }
            Err(error) => {
                eprintln!("pdp-init: {} can't be started: {error}", self.name());
                self.phase = self.after_end(now);
                Err(CODE_NOT_STARTED)
            }
        }
    }

    /// Takes note of a process's end; returns the command's exit code if it was this one.
    fn ended(&mut self, ended: Pid, status: ExitStatus) -> Option<u8> {
        let Phase::Running { pid, since } = self.phase else { return None };
        if pid != ended {
            return None;
        }
        eprintln!("pdp-init: {} (process {pid}) ended: {status}", self.name());
        if since.elapsed() >= GOOD_RUN {
            self.pause = PAUSE_MIN;
        }
        self.phase = self.after_end(Instant::now());
        let code = status.code().or(status.signal().map(|signal| 128 + signal));
        Some(code.and_then(|code| u8::try_from(code).ok()).unwrap_or(u8::MAX))
    }

    /// Ends the command, with its process group, because of one before it.
    fn kill(&self) {
        let Phase::Running { pid, .. } = self.phase else { return };
        eprintln!("pdp-init: {} (process {pid}) is started again with it", self.name());
        let _ = killpg(pid, Signal::SIGKILL);
    }

    fn after_end(&mut self, now: Instant) -> Phase {
        match self.command.restart {
            Restart::Never => Phase::Ended,
            Restart::Always | Restart::WithPrevious => {
                let until = now + self.pause;
                self.pause = (self.pause * 2).min(PAUSE_MAX);
                Phase::Waiting { until }
            }
        }
    }

    fn name(&self) -> &str {
        self.command.argv.first().map_or("", String::as_str)
    }
}

fn spawn(argv: &[String]) -> io::Result<Pid> {
    let (program, arguments) =
        argv.split_first().ok_or_else(|| io::Error::other("a command without a program"))?;
    let mut command = std::process::Command::new(program);
    command.args(arguments);
    // SAFETY: after fork, only sigprocmask(2) and setsid(2) are called, which are
    // async-signal-safe; nothing is allocated.
    unsafe {
        command.pre_exec(|| {
            SigSet::all().thread_unblock()?;
            // A session of its own: a terminal's signals for one command reach no other.
            rustix::process::setsid()?;
            Ok(())
        });
    }
    Ok(Pid::from_raw(command.spawn()?.id() as i32))
}

/// Copies a file into place with its owner and mode. No link is followed at the place itself.
fn place(file: &Copied) -> io::Result<()> {
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
