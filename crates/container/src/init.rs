//! Process 1 of a guest: puts files in place, starts the commands when those that they come after are ready,
//! starts again those that shall run again, and with them those that hang on them, reaps orphans, passes SIGTERM on,
//! and tells the shim how commands are ([`crate::status`]).
//!
//! A forwarding guest ends with its last command and returns what that returned (128 and the
//! signal, if one ended it); others stay until SIGTERM. Single-threaded; it waits for no command, check or
//! reader. What it has to say, and what commands write, goes to standard error, the guest's log.
//!
//! The same program, as [`ENTER`], becomes a command that is run in a guest later as one of its users.
//!
//! Limits: pause before a restart [`PAUSE_MIN`], doubled for each end that follows, up to
//! [`PAUSE_MAX`]; a command that ran for [`GOOD_RUN`] begins anew with the shortest.

mod output;
mod probe;
mod service;
mod stand;

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
use self::output::{Forwarder, Output};
use self::probe::Looks;
use self::service::Service;
use self::stand::{Stand, Who};
use crate::spec::{Command, RunAs};
use crate::status::Told;

/// First pause before a restart.
pub const PAUSE_MIN: Duration = Duration::from_millis(100);

/// Longest pause before a restart.
pub const PAUSE_MAX: Duration = Duration::from_secs(10);

/// After running for so long, a command counts as good.
pub const GOOD_RUN: Duration = Duration::from_secs(30);

/// Pause before the shim is tried to be told again what its pipe did not take.
const TELL_PAUSE: Duration = Duration::from_millis(100);

/// Prefix of process 1's own lines in the log, and its words for a command that it could not start.
pub(crate) const SAYS: &str = "pdp-init: ";
pub(crate) const NOT_STARTED: &str = "can't be started";

/// First argument of the program that is to become a command: what follows are the configuration, the command's user
/// and working directory, each empty where it has none, and the command.
pub(crate) const ENTER: &str = "enter";

/// What stands before the reason why a command was not entered, and the code then: those of the OCI runtime, which
/// clients know.
const NOT_ENTERED: &str = "exec failed: unable to start container process";
const CODE_NOT_ENTERED: u8 = 255;

/// What the file that process 1 is started with says (JSON).
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Config {
    pub commands: Vec<Command>,
    pub files: Vec<Copied>,
    /// Ends with the last command.
    pub ends: bool,
    /// Standard input is where the shim is told how commands are.
    #[serde(default)]
    pub tells: bool,
    /// Descriptors of one process.
    pub open_files_max: u64,
    /// `HOME` of the environment stays, whoever runs a command.
    #[serde(default)]
    pub keeps_home: bool,
    /// A directory that is made before the first command is started, where it can be.
    #[serde(default)]
    pub made: Option<PathBuf>,
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

/// Entry point of `pdp-init CONFIG`, and of `pdp-init enter CONFIG USER WORKDIR PROGRAM ARGUMENTS…`.
pub fn main() -> ExitCode {
    let words: Vec<OsString> = std::env::args_os().skip(1).collect();
    let path = match &*words {
        [verb, words @ ..] if verb == ENTER => {
            let Err(error) = enter(words);
            // At once: clients look for it in the first that they read.
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
    let config: Config = serde_json::from_slice(&fs::read(config)?)?;
    let user = Some(user.to_string_lossy().into_owned()).filter(|user| !user.is_empty());
    let workdir = Some(PathBuf::from(workdir)).filter(|path| !path.as_os_str().is_empty());
    let stand = Stand::of(&RunAs { user, workdir }, config.keeps_home)?;
    if let Some(directory) = stand.directory()? {
        rustix::process::fchdir(directory)?;
    }
    let mut command = std::process::Command::new(program);
    command.args(arguments);
    if let Some(who) = &stand.who {
        command.envs(who.home.iter().map(|home| ("HOME", home)));
        for terminal in [io::stdin().as_fd(), io::stdout().as_fd(), io::stderr().as_fd()] {
            if rustix::termios::isatty(terminal) {
                // Of one that is not the guest's it can't be given, and works all the same.
                let _ = fchown(terminal, Some(who.uid), None);
            }
        }
        who.take_on()?;
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
    if let Some(directory) = &config.made {
        // Whoever can't run in it says so.
        let _ = fs::create_dir_all(directory);
    }
    let mut guest = Guest::new(config)?;
    loop {
        guest.start(Instant::now());
        if guest.ends && guest.services.iter().all(Service::has_ended) {
            return Ok(ExitCode::from(guest.last_code));
        }
        guest.tell(Instant::now());
        guest.wait(&signal_fd);
        while let Some(signal) = signal_fd.read_signal()? {
            let number = signal.ssi_signo as i32;
            if matches!(Signal::try_from(number)?, Signal::SIGTERM | Signal::SIGINT) {
                guest.stopping = true;
                // As process 1: to all others of the guest. None may be left, which is as good.
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
struct Guest {
    services: Vec<Service>,
    /// Ends with the last command.
    ends: bool,
    last_code: u8,
    stopping: bool,
    forwarder: Forwarder,
    /// Whose output is looked at first, so that each has its turn.
    turn: usize,
    /// Where the shim is told how they are.
    shim: Option<File>,
}

impl Guest {
    fn new(config: Config) -> io::Result<Self> {
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
            forwarder: Forwarder::default(),
            turn: 0,
            shim,
        })
    }

    /// Whether a command may start, for those that it comes after.
    fn is_free(&self, index: usize) -> bool {
        let mut after = self.services[index].command.after.iter();
        after.all(|place| self.services.get(*place).is_some_and(Service::is_held))
    }

    /// Starts what is to be started, and looks at what runs.
    fn start(&mut self, now: Instant) {
        for index in 0..self.services.len() {
            let free = !self.stopping && self.is_free(index);
            let service = &mut self.services[index];
            if let Err(code) = service.start_if_due(free, now) {
                self.last_code = code;
            }
            if !self.stopping {
                service.go_on(now);
            }
        }
    }

    /// Tells the shim what is new, as far as it takes it now.
    fn tell(&mut self, now: Instant) {
        let Some(shim) = &mut self.shim else { return };
        for (command, service) in self.services.iter_mut().enumerate() {
            let Some(status) = service.news(now) else { continue };
            let told = Told { command, status };
            let Ok(mut line) = serde_json::to_vec(&told) else { continue };
            line.push(b'\n');
            // A pipe takes so few bytes whole or not at all.
            match shim.write_all(&line) {
                Ok(()) => service.told(told.status),
                // Its pipe is full, or nobody reads it any more.
                Err(_) => return,
            }
        }
    }

    /// Waits until something happens, or is due, and takes what commands wrote.
    fn wait(&mut self, signals: &SignalFd) {
        let now = Instant::now();
        let is_new = |service: &Service| service.news(now).is_some();
        let untold = self.shim.as_ref().filter(|_| self.services.iter().any(is_new));
        let due = (0..self.services.len())
            .filter(|_| !self.stopping)
            .filter_map(|index| self.services[index].due(self.is_free(index)))
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
            (0..count).map(|offset| (self.turn + offset) % count).filter(|_| free).collect();
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
        // Interrupted or not: what there is to do shows itself.
        let _ = poll(&mut fds, timeout.as_ref());
        let came = |at: usize| fds.get(at).is_some_and(|fd| !fd.revents().is_empty());
        let spoke: Vec<_> =
            heard.into_iter().enumerate().filter(|(at, _)| came(first + at)).collect();
        drop(fds);
        self.forwarder.pass_on();
        for (_, index) in spoke {
            if !self.forwarder.is_free() {
                break;
            }
            self.turn = index + 1;
            if let Some(output) = &mut self.services[index].output {
                self.forwarder.take(output);
            }
        }
        self.services.iter_mut().filter_map(Service::looks).for_each(Looks::drain);
    }

    /// Takes note of a process's end.
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
        let hang_on_it = after.take_while(|service| service.command.hangs_on_previous());
        hang_on_it.for_each(|service| service.start_again(now));
    }
}

/// Takes standard input, where the shim is told, and leaves commands one without end in its place.
fn take_stdin() -> io::Result<File> {
    let shim = rustix::io::fcntl_dupfd_cloexec(io::stdin(), 3)?;
    rustix::fs::fcntl_setfl(&shim, OFlags::NONBLOCK)?;
    rustix::stdio::dup2_stdin(&File::open("/dev/null")?)?;
    Ok(shim.into())
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

/// Starts a program in a session of its own, which writes into `output`, or where this process does.
fn spawn(argv: &[String], output: Option<&Output>, stand: &Stand) -> io::Result<Pid> {
    let (program, arguments) =
        argv.split_first().ok_or_else(|| io::Error::other("a command without a program"))?;
    let mut command = std::process::Command::new(program);
    command.args(arguments);
    if let Some(output) = output {
        command.stdout(output.end()?).stderr(output.end()?);
    }
    let (who, directory) = (stand.who.clone(), stand.directory()?);
    if let Some(who) = &who {
        if let Some(output) = output {
            output.give(who.uid, who.gid)?;
        }
        command.envs(who.home.iter().map(|home| ("HOME", home)));
    }
    // SAFETY: after fork, only sigprocmask(2), setsid(2), fchdir(2), setgroups(2), setgid(2) and setuid(2)
    // are called, which are system calls alone in a process of one thread; nothing is allocated.
    unsafe {
        command.pre_exec(move || {
            SigSet::all().thread_unblock()?;
            // A session of its own: a terminal's signals for one command reach no other.
            rustix::process::setsid()?;
            if let Some(directory) = &directory {
                rustix::process::fchdir(directory)?;
            }
            who.as_ref().map_or(Ok(()), Who::take_on)
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
