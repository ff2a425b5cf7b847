//! A command of a guest, and how it is: when it is started, whether it is ready, what becomes of it when it ends.

use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use rustix::event::PollFd;

use super::output::Output;
use super::probe::Looks;
use super::stand::Stand;
use super::{GOOD_RUN, NOT_STARTED, PAUSE_MAX, PAUSE_MIN, SAYS, spawn};
use crate::spec::{Command, Restart};
use crate::status::{CommandState, CommandStatus, WORDS_BYTES_MAX, tame};

/// Ends in a row, without a good run between, from which on a command counts as one that keeps ending.
pub(super) const ENDS_TOLD: u32 = 2;

/// Explains SIGSYS to the user.
const FORBIDDEN: &str =
    "(SIGSYS): a system call that nodes may not make, as those of 32-bit programs";

/// Bytes of a command's own words in what is said of it.
const LINE_BYTES: usize = 48;

/// Stands for the end of a command that could not be started, as with sh(1).
const CODE_NOT_STARTED: u8 = 127;

/// A command and how it is.
pub(super) struct Service {
    pub command: Command,
    /// `HOME` of the environment stays, whoever runs it.
    keeps_home: bool,
    phase: Phase,
    pause: Duration,
    /// What it writes; `None`: that goes where the guest's own does.
    pub output: Option<Output>,
    /// Starts, those that failed as well.
    starts: u32,
    /// Ends in a row that it should not have had.
    ends: u32,
    exit: Option<u8>,
    /// How it ended last, and what it said before that.
    ending: String,
    /// It is being killed because of one before it.
    killed: bool,
    /// What its shim was told.
    told: CommandStatus,
}

enum Phase {
    /// For what it comes after, and until then.
    Waiting {
        until: Instant,
    },
    /// With looks at whether it is ready, until one of them held.
    Running {
        pid: Pid,
        since: Instant,
        looks: Option<Looks>,
    },
    Ended {
        well: bool,
    },
}

impl Service {
    pub fn new(command: Command, keeps_home: bool, output: Option<Output>, now: Instant) -> Self {
        let phase = Phase::Waiting { until: now };
        Self {
            command,
            keeps_home,
            phase,
            pause: PAUSE_MIN,
            output,
            starts: 0,
            ends: 0,
            exit: None,
            ending: String::new(),
            killed: false,
            told: CommandStatus::default(),
        }
    }

    /// Whether what comes after it may start.
    pub fn is_held(&self) -> bool {
        match &self.phase {
            Phase::Waiting { .. } => false,
            Phase::Running { looks, .. } => !self.killed && !self.command.once && looks.is_none(),
            Phase::Ended { well } => *well || !self.command.once,
        }
    }

    pub fn has_ended(&self) -> bool {
        matches!(self.phase, Phase::Ended { .. })
    }

    /// Starts the command when it is time and `free` to; the exit code that stands for it if that fails.
    pub fn start_if_due(&mut self, free: bool, now: Instant) -> Result<(), u8> {
        let Phase::Waiting { until } = self.phase else { return Ok(()) };
        if !free || until > now {
            return Ok(());
        }
        if self.command.argv.is_empty() {
            // That of an image which has none.
            self.phase = Phase::Ended { well: true };
            return Ok(());
        }
        self.starts = self.starts.saturating_add(1);
        if let Some(output) = &mut self.output {
            self.ending = words(&self.ending, &output.last.words());
            output.last = Default::default();
        }
        let begun = Stand::of(&self.command.run_as, self.keeps_home).and_then(|stand| {
            Ok((spawn(&self.command.argv, self.output.as_ref(), &stand)?, stand))
        });
        match begun {
            Ok((pid, stand)) => {
                eprintln!("{SAYS}{} started, process {pid}", self.name());
                let looks = self.command.ready.as_ref().map(|check| Looks::new(check, stand, now));
                self.phase = Phase::Running { pid, since: now, looks };
                Ok(())
            }
            Err(error) => {
                eprintln!("{SAYS}{} {NOT_STARTED}: {error}", self.name());
                self.ends = ENDS_TOLD;
                self.ending = format!("{NOT_STARTED}: {error}");
                self.after_end(CODE_NOT_STARTED, false, now);
                Err(CODE_NOT_STARTED)
            }
        }
    }

    /// Looks at whether it is ready, and forgets earlier ends after a good run.
    pub fn go_on(&mut self, now: Instant) {
        let Phase::Running { since, looks, .. } = &mut self.phase else { return };
        if let (Some(check), Some(under_way)) = (&self.command.ready, &mut *looks)
            && under_way.go_on(check, now)
        {
            *looks = None;
        }
        if now >= *since + GOOD_RUN {
            self.ends = 0;
        }
    }

    /// When there is something to do for it, if nothing happens before; `free`: what it comes after is ready.
    pub fn due(&self, free: bool) -> Option<Instant> {
        match &self.phase {
            Phase::Waiting { until } => free.then_some(*until),
            Phase::Running { since, looks, .. } => {
                let good = (self.ends > 0).then(|| *since + GOOD_RUN);
                let next = looks.as_ref().map(Looks::due);
                [good, next].into_iter().flatten().min()
            }
            Phase::Ended { .. } => None,
        }
    }

    /// The looks that are under way.
    pub fn looks(&mut self) -> Option<&mut Looks> {
        match &mut self.phase {
            Phase::Running { looks, .. } => looks.as_mut(),
            _ => None,
        }
    }

    /// What its looks wait for.
    pub fn fds(&self) -> Vec<PollFd<'_>> {
        match &self.phase {
            Phase::Running { looks: Some(looks), .. } => looks.fds(),
            _ => Vec::new(),
        }
    }

    /// Takes note of a process's end; returns the command's exit code if it was this one's.
    pub fn ended(&mut self, ended: Pid, status: ExitStatus, now: Instant) -> Option<u8> {
        let Phase::Running { pid, since, looks } = &mut self.phase else { return None };
        if *pid != ended {
            if let (Some(check), Some(under_way)) = (&self.command.ready, &mut *looks)
                && under_way.ended(check, ended, status, now)
            {
                *looks = None;
            }
            return None;
        }
        looks.iter().for_each(Looks::end);
        if now >= *since + GOOD_RUN {
            self.pause = PAUSE_MIN;
            self.ends = 0;
        }
        eprintln!("{SAYS}{} (process {ended}) ended: {status}", self.name());
        let (code, signal) = exit_code(status);
        let killed = std::mem::take(&mut self.killed);
        self.ends = if killed { self.ends } else { self.ends.saturating_add(1) };
        self.ending = match signal {
            _ if killed => String::new(),
            Some(libc::SIGSYS) => format!("ended by signal {} {FORBIDDEN}", libc::SIGSYS),
            Some(signal) => format!("ended by signal {signal}"),
            None => format!("ended with code {code}"),
        };
        self.after_end(code, killed, now);
        Some(code)
    }

    /// Has the command started again because of one before it; with its process group ended if it runs.
    pub fn start_again(&mut self, now: Instant) {
        match &self.phase {
            Phase::Running { pid, .. } => {
                eprintln!("{SAYS}{} (process {pid}) is started again with it", self.name());
                self.killed = true;
                let _ = killpg(*pid, Signal::SIGKILL);
            }
            Phase::Ended { .. } if self.command.once => self.phase = Phase::Waiting { until: now },
            Phase::Ended { .. } | Phase::Waiting { .. } => {}
        }
    }

    /// Whether it is to be started again by itself.
    pub fn is_started_again(&self) -> bool {
        self.starts > 0 && matches!(self.phase, Phase::Waiting { .. })
    }

    fn after_end(&mut self, code: u8, killed: bool, now: Instant) {
        self.exit = Some(code);
        let again = match self.command.restart {
            Restart::Never => killed,
            Restart::OnFailure => code != 0,
            Restart::Always | Restart::WithPrevious => true,
        };
        self.phase = match again {
            false => Phase::Ended { well: code == 0 || self.command.may_fail },
            true => {
                let until = now + self.pause;
                self.pause = (self.pause * 2).min(PAUSE_MAX);
                Phase::Waiting { until }
            }
        };
    }

    /// What its shim is to be told, if that is new.
    pub fn news(&self, now: Instant) -> Option<CommandStatus> {
        Some(self.status(now)).filter(|status| *status != self.told)
    }

    /// Its shim was told.
    pub fn told(&mut self, status: CommandStatus) {
        self.told = status;
    }

    fn status(&self, now: Instant) -> CommandStatus {
        let keeps_ending = self.ends >= ENDS_TOLD;
        let (state, troubled, text) = match &self.phase {
            Phase::Waiting { .. } if self.starts == 0 => (CommandState::Waiting, false, None),
            Phase::Waiting { .. } => (CommandState::Restarting, keeps_ending, Some(self.end())),
            Phase::Ended { well: true } => {
                let failed = self.exit.is_some_and(|code| code != 0);
                (CommandState::Done, false, failed.then(|| self.end()))
            }
            Phase::Ended { well: false } => (CommandState::Failed, true, Some(self.end())),
            Phase::Running { since, looks: Some(looks), .. } => {
                let within = self.command.ready.as_ref().map_or(0, |check| check.within_ms);
                let late = now >= *since + Duration::from_millis(within);
                let text = match keeps_ending {
                    true => self.ending.clone(),
                    false => words("not ready", &looks.said),
                };
                (CommandState::Starting, keeps_ending || late, Some(text))
            }
            Phase::Running { looks: None, .. } => {
                let ready = self.command.ready.is_some();
                let state = if ready { CommandState::Ready } else { CommandState::Running };
                (state, keeps_ending, keeps_ending.then(|| self.ending.clone()))
            }
        };
        CommandStatus {
            state,
            restarts: self.starts.saturating_sub(1),
            exit: self.exit,
            troubled,
            words: text.unwrap_or_default(),
        }
    }

    /// How it ended last, and why as far as it said so. A command that runs once is one of many, known by a number:
    /// with its own words, too.
    fn end(&self) -> String {
        let said = self.output.as_ref().map(|output| output.last.words()).unwrap_or_default();
        let text = words(&self.ending, &said);
        if !self.command.once {
            return text;
        }
        let line = tame(&self.command.argv.join(" "), WORDS_BYTES_MAX);
        let short = tame(&line, LINE_BYTES);
        let more = if short == line { "" } else { " …" };
        let line = format!(" ({short}{more})");
        tame(&text, WORDS_BYTES_MAX - line.len()) + &line
    }

    pub fn name(&self) -> &str {
        self.command.argv.first().map_or("", String::as_str)
    }
}

fn words(what: &str, said: &str) -> String {
    match said.is_empty() || what.is_empty() {
        true => what.to_owned(),
        false => tame(&format!("{what}: {said}"), WORDS_BYTES_MAX),
    }
}

/// What stands for an end as with sh(1), and the signal if one ended it.
fn exit_code(status: ExitStatus) -> (u8, Option<i32>) {
    let signal = status.signal();
    let code = status.code().or(signal.map(|signal| 128 + signal));
    (code.and_then(|code| u8::try_from(code).ok()).unwrap_or(u8::MAX), signal)
}
