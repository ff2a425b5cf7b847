//! A command of a guest: its start, its readiness, and its end.

use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use pdp_model::CommandState;
use rustix::event::PollFd;

use super::output::Output;
use super::probe::ProbeSchedule;
use super::run_as::ResolvedRunAs;
use super::{GOOD_RUN, NOT_STARTED, PAUSE_MAX, PAUSE_MIN, SAYS, spawn};
use crate::spec::{CommandRestart, GuestCommand};
use crate::status::{GuestCommandStatus, WORDS_BYTES_MAX, sanitize};

/// Number of ends in a row, without a good run in between, from which on a command counts as one
/// that keeps ending.
pub(super) const ENDS_TOLD: u32 = 2;

/// Explains SIGSYS to the user.
const FORBIDDEN: &str =
    "(SIGSYS): a system call that nodes may not make, such as those of 32-bit programs";

/// Largest part of a command's words in the text about it, bytes.
const LINE_BYTES: usize = 48;

/// Exit code of a command that could not be started, as with sh(1).
const CODE_NOT_STARTED: u8 = 127;

/// A command and its state.
pub(super) struct Service {
    pub command: GuestCommand,
    /// True if `HOME` of the environment stays for every user.
    keeps_home: bool,
    phase: ServicePhase,
    pause: Duration,
    /// Pipe for its output. `None`: it writes where the guest writes.
    pub output: Option<Output>,
    /// Number of starts, including failed ones.
    starts: u32,
    /// Number of unexpected ends in a row.
    ends: u32,
    exit_status: Option<u8>,
    /// Reason of the command's last end, and its last output before.
    ending: String,
    /// True if it is being killed because of a command before it.
    killed: bool,
    /// Last status reported to the shim.
    reported: GuestCommandStatus,
}

enum ServicePhase {
    /// Waits for the commands before it, and until this time.
    Waiting {
        until: Instant,
    },
    /// Runs. Probes for its readiness continue until one succeeds.
    Running {
        pid: Pid,
        since: Instant,
        schedule: Option<ProbeSchedule>,
    },
    Ended {
        well: bool,
    },
}

impl Service {
    pub fn new(
        command: GuestCommand,
        keeps_home: bool,
        output: Option<Output>,
        now: Instant,
    ) -> Self {
        let phase = ServicePhase::Waiting { until: now };
        Self {
            command,
            keeps_home,
            phase,
            pause: PAUSE_MIN,
            output,
            starts: 0,
            ends: 0,
            exit_status: None,
            ending: String::new(),
            killed: false,
            reported: GuestCommandStatus::default(),
        }
    }

    /// True if commands that wait for it may start.
    pub fn releases_dependents(&self) -> bool {
        match &self.phase {
            ServicePhase::Waiting { .. } => false,
            ServicePhase::Running { schedule, .. } => {
                !self.killed && !self.command.once && schedule.is_none()
            }
            ServicePhase::Ended { well } => *well || !self.command.once,
        }
    }

    pub fn has_ended(&self) -> bool {
        matches!(self.phase, ServicePhase::Ended { .. })
    }

    /// Starts the command if its time has come and it is `free` to start. Returns the corresponding
    /// exit code if that fails.
    pub fn start_if_due(&mut self, free: bool, now: Instant) -> Result<(), u8> {
        let ServicePhase::Waiting { until } = self.phase else { return Ok(()) };
        if !free || until > now {
            return Ok(());
        }
        if self.command.argv.is_empty() {
            // The image's own command, of an image that has none.
            self.phase = ServicePhase::Ended { well: true };
            return Ok(());
        }
        self.starts = self.starts.saturating_add(1);
        if let Some(output) = &mut self.output {
            self.ending = words(&self.ending, &output.last.summary());
            output.last = Default::default();
        }
        let begun = ResolvedRunAs::of(&self.command.run_as, self.keeps_home).and_then(|run_as| {
            Ok((spawn(&self.command.argv, self.output.as_ref(), &run_as)?, run_as))
        });
        match begun {
            Ok((pid, run_as)) => {
                eprintln!("{SAYS}{} started, process {pid}", self.name());
                let schedule =
                    self.command.ready.as_ref().map(|check| ProbeSchedule::new(check, run_as, now));
                self.phase = ServicePhase::Running { pid, since: now, schedule };
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

    /// Probes for readiness, and forgets earlier ends after a good run.
    pub fn poll(&mut self, now: Instant) {
        let ServicePhase::Running { since, schedule, .. } = &mut self.phase else { return };
        if let (Some(check), Some(under_way)) = (&self.command.ready, &mut *schedule)
            && under_way.poll(check, now)
        {
            *schedule = None;
        }
        if now >= *since + GOOD_RUN {
            self.ends = 0;
        }
    }

    /// Returns the time of the next action if nothing happens before. `free`: the commands before
    /// it are ready.
    pub fn next_deadline(&self, free: bool) -> Option<Instant> {
        match &self.phase {
            ServicePhase::Waiting { until } => free.then_some(*until),
            ServicePhase::Running { since, schedule, .. } => {
                let good = (self.ends > 0).then(|| *since + GOOD_RUN);
                let next = schedule.as_ref().map(ProbeSchedule::next_deadline);
                [good, next].into_iter().flatten().min()
            }
            ServicePhase::Ended { .. } => None,
        }
    }

    /// Returns the probing in progress.
    pub fn probe_schedule(&mut self) -> Option<&mut ProbeSchedule> {
        match &mut self.phase {
            ServicePhase::Running { schedule, .. } => schedule.as_mut(),
            _ => None,
        }
    }

    /// Returns the descriptors that its probes wait for.
    pub fn fds(&self) -> Vec<PollFd<'_>> {
        match &self.phase {
            ServicePhase::Running { schedule: Some(schedule), .. } => schedule.fds(),
            _ => Vec::new(),
        }
    }

    /// Handles the end of a process. Returns the command's exit code if it was the command's
    /// process.
    pub fn ended(&mut self, ended: Pid, status: ExitStatus, now: Instant) -> Option<u8> {
        let ServicePhase::Running { pid, since, schedule } = &mut self.phase else { return None };
        if *pid != ended {
            if let (Some(check), Some(under_way)) = (&self.command.ready, &mut *schedule)
                && under_way.ended(check, ended, status, now)
            {
                *schedule = None;
            }
            return None;
        }
        schedule.iter().for_each(ProbeSchedule::end);
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

    /// Restarts the command because of a command before it. If it runs, kills its process group.
    pub fn start_again(&mut self, now: Instant) {
        match &self.phase {
            ServicePhase::Running { pid, .. } => {
                eprintln!("{SAYS}{} (process {pid}) is started again with it", self.name());
                self.killed = true;
                let _ = killpg(*pid, Signal::SIGKILL);
            }
            ServicePhase::Ended { .. } if self.command.once => {
                self.phase = ServicePhase::Waiting { until: now }
            }
            ServicePhase::Ended { .. } | ServicePhase::Waiting { .. } => {}
        }
    }

    /// True if it will be restarted by itself.
    pub fn is_started_again(&self) -> bool {
        self.starts > 0 && matches!(self.phase, ServicePhase::Waiting { .. })
    }

    fn after_end(&mut self, code: u8, killed: bool, now: Instant) {
        self.exit_status = Some(code);
        let again = match self.command.restart {
            CommandRestart::Never => killed,
            CommandRestart::OnFailure => code != 0,
            CommandRestart::Always | CommandRestart::WithPrevious => true,
        };
        self.phase = match again {
            false => ServicePhase::Ended { well: code == 0 || self.command.may_fail },
            true => {
                let until = now + self.pause;
                self.pause = (self.pause * 2).min(PAUSE_MAX);
                ServicePhase::Waiting { until }
            }
        };
    }

    /// Returns the status to report to the shim, if it is new.
    pub fn unreported_status(&self, now: Instant) -> Option<GuestCommandStatus> {
        Some(self.status(now)).filter(|status| *status != self.reported)
    }

    /// Notes that this status was reported to the shim.
    pub fn set_reported(&mut self, status: GuestCommandStatus) {
        self.reported = status;
    }

    fn status(&self, now: Instant) -> GuestCommandStatus {
        let keeps_ending = self.ends >= ENDS_TOLD;
        let (state, troubled, text) = match &self.phase {
            ServicePhase::Waiting { .. } if self.starts == 0 => {
                (CommandState::Waiting, false, None)
            }
            ServicePhase::Waiting { .. } => {
                (CommandState::Restarting, keeps_ending, Some(self.end()))
            }
            ServicePhase::Ended { well: true } => {
                let failed = self.exit_status.is_some_and(|code| code != 0);
                (CommandState::Done, false, failed.then(|| self.end()))
            }
            ServicePhase::Ended { well: false } => (CommandState::Failed, true, Some(self.end())),
            ServicePhase::Running { since, schedule: Some(schedule), .. } => {
                let within = self.command.ready.as_ref().map_or(0, |check| check.within_ms);
                let overdue = now >= *since + Duration::from_millis(within);
                let text = match keeps_ending {
                    true => self.ending.clone(),
                    false => words("not ready", &schedule.failure),
                };
                (CommandState::Starting, keeps_ending || overdue, Some(text))
            }
            ServicePhase::Running { schedule: None, .. } => {
                let ready = self.command.ready.is_some();
                let state = if ready { CommandState::Ready } else { CommandState::Running };
                (state, keeps_ending, keeps_ending.then(|| self.ending.clone()))
            }
        };
        GuestCommandStatus {
            state,
            restarts: self.starts.saturating_sub(1),
            exit: self.exit_status,
            troubled,
            words: text.unwrap_or_default(),
        }
    }

    /// Describes how it last ended, and why if it wrote so. A command with `once` is one of many
    /// and only known by number, so its words are added.
    fn end(&self) -> String {
        let last = self.output.as_ref().map(|output| output.last.summary()).unwrap_or_default();
        let text = words(&self.ending, &last);
        if !self.command.once {
            return text;
        }
        let line = sanitize(&self.command.argv.join(" "), WORDS_BYTES_MAX);
        let short = sanitize(&line, LINE_BYTES);
        let more = if short == line { "" } else { " …" };
        let line = format!(" ({short}{more})");
        sanitize(&text, WORDS_BYTES_MAX - line.len()) + &line
    }

    pub fn name(&self) -> &str {
        self.command.argv.first().map_or("", String::as_str)
    }
}

fn words(status: &str, detail: &str) -> String {
    match detail.is_empty() || status.is_empty() {
        true => status.to_owned(),
        false => sanitize(&format!("{status}: {detail}"), WORDS_BYTES_MAX),
    }
}

/// Returns the exit code as with sh(1), and the signal if one ended the process.
fn exit_code(status: ExitStatus) -> (u8, Option<i32>) {
    let signal = status.signal();
    let code = status.code().or(signal.map(|signal| 128 + signal));
    (code.and_then(|code| u8::try_from(code).ok()).unwrap_or(u8::MAX), signal)
}
