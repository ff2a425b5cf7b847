//! Probes for a command's readiness. They run one after another, and process 1 never blocks on
//! them.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, connect, socket_with, sockopt};

use super::output::Output;
use super::run_as::ResolvedRunAs;
use super::spawn;
use crate::spec::{CommandProbe, Probe};

/// Repeated probing of one command.
pub(super) struct ProbeSchedule {
    state: ProbeState,
    /// User and directory of a check's program: those of the command when it was started.
    run_as: ResolvedRunAs,
    /// Reason of the last failed probe.
    pub failure: String,
}

enum ProbeState {
    /// Time of the next probe.
    None { at: Instant },
    /// A program runs, at most until this time.
    Program { pid: Pid, output: Output, until: Instant },
    /// Connections are being made, at most until this time.
    Connecting { sockets: Vec<OwnedFd>, until: Instant },
}

/// Result of a probe.
type ProbeResult = Result<(), String>;

impl ProbeSchedule {
    /// The first probe is due after one interval, so that the command can first clear away its
    /// predecessor's leftovers.
    pub fn new(check: &CommandProbe, run_as: ResolvedRunAs, now: Instant) -> Self {
        let at = now + Duration::from_millis(check.interval_ms);
        Self { state: ProbeState::None { at }, run_as, failure: String::new() }
    }

    /// Probes if it is time. Returns true if the check succeeds.
    pub fn poll(&mut self, check: &CommandProbe, now: Instant) -> bool {
        let timeout = Duration::from_millis(check.timeout_ms);
        let seen = match &mut self.state {
            ProbeState::None { at } if *at > now => return false,
            ProbeState::None { .. } => match begin(&check.what, &self.run_as, now + timeout) {
                Ok(state) => {
                    self.state = state;
                    self.connected()
                }
                Err(seen) => Some(seen),
            },
            ProbeState::Program { until, .. } if *until > now => None,
            ProbeState::Program { .. } => {
                self.end();
                Some(Err(format!("its check does not end within {timeout:?}")))
            }
            ProbeState::Connecting { until, .. } if *until > now => self.connected(),
            ProbeState::Connecting { .. } => Some(Err(format!("no connection within {timeout:?}"))),
        };
        self.note(seen, check, now)
    }

    /// Handles the end of a process. Returns true if it belongs to the check and the check
    /// succeeds.
    pub fn ended(
        &mut self,
        check: &CommandProbe,
        ended: Pid,
        status: ExitStatus,
        now: Instant,
    ) -> bool {
        let ProbeState::Program { pid, output, .. } = &mut self.state else { return false };
        if *pid != ended {
            return false;
        }
        output.drain();
        let seen = match (status.success(), output.last.summary()) {
            (true, _) => Ok(()),
            (false, words) if words.is_empty() => Err(format!("its check ended with {status}")),
            (false, words) => Err(words),
        };
        self.note(Some(seen), check, now)
    }

    fn note(&mut self, seen: Option<ProbeResult>, check: &CommandProbe, now: Instant) -> bool {
        let Some(seen) = seen else { return false };
        self.state = ProbeState::None { at: now + Duration::from_millis(check.interval_ms) };
        match seen {
            Ok(()) => true,
            Err(words) => {
                self.failure = words;
                false
            }
        }
    }

    /// Returns the time of the next action if nothing happens before.
    pub fn next_deadline(&self) -> Instant {
        match &self.state {
            ProbeState::None { at } => *at,
            ProbeState::Program { until, .. } | ProbeState::Connecting { until, .. } => *until,
        }
    }

    /// Returns the descriptors to poll.
    pub fn fds(&self) -> Vec<PollFd<'_>> {
        match &self.state {
            ProbeState::Connecting { sockets, .. } => {
                sockets.iter().map(|socket| PollFd::new(socket, PollFlags::OUT)).collect()
            }
            ProbeState::Program { .. } | ProbeState::None { .. } => Vec::new(),
        }
    }

    /// Reads the output of a check's program, so that the program need not wait.
    pub fn drain(&mut self) {
        if let ProbeState::Program { output, .. } = &mut self.state {
            output.drain();
        }
    }

    /// Kills a check's program. It is reaped like any orphan.
    pub fn end(&self) {
        if let ProbeState::Program { pid, .. } = &self.state {
            let _ = killpg(*pid, Signal::SIGKILL);
        }
    }

    /// Returns the result of pending connections if it is known.
    fn connected(&mut self) -> Option<ProbeResult> {
        let ProbeState::Connecting { sockets, .. } = &mut self.state else { return None };
        let mut last = None;
        let mut open = Vec::new();
        for socket in std::mem::take(sockets) {
            match is_connected(&socket) {
                Ok(true) => return Some(Ok(())),
                Ok(false) => open.push(socket),
                Err(error) => last = Some(Err(error.to_string())),
            }
        }
        *sockets = open;
        last.filter(|_| sockets.is_empty())
    }
}

/// Begins a probe, or returns its result at once.
fn begin(probe: &Probe, run_as: &ResolvedRunAs, until: Instant) -> Result<ProbeState, ProbeResult> {
    match probe {
        Probe::File(path) => Err(match std::fs::metadata(path) {
            Ok(_) => Ok(()),
            Err(error) => Err(format!("{}: {error}", path.display())),
        }),
        Probe::Tcp(port) => {
            let loopback =
                [IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)].into_iter();
            let mut sockets = Vec::new();
            let mut last = String::new();
            for address in loopback {
                match begin_connection(SocketAddr::new(address, *port)) {
                    Ok(socket) => sockets.push(socket),
                    Err(error) => last = format!("TCP port {port}: {error}"),
                }
            }
            match sockets.is_empty() {
                true => Err(Err(last)),
                false => Ok(ProbeState::Connecting { sockets, until }),
            }
        }
        Probe::Command(argv) => {
            let started =
                Output::new().and_then(|output| Ok((spawn(argv, Some(&output), run_as)?, output)));
            match started {
                Ok((pid, output)) => Ok(ProbeState::Program { pid, output, until }),
                Err(error) => {
                    let name = argv.first().map_or("", String::as_str);
                    Err(Err(format!("its check {name} can't be started: {error}")))
                }
            }
        }
    }
}

fn begin_connection(to: SocketAddr) -> io::Result<OwnedFd> {
    let family = if to.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = socket_with(family, SocketType::STREAM, flags, None)?;
    match connect(&socket, &to) {
        Ok(()) | Err(Errno::INPROGRESS) => Ok(socket),
        Err(error) => Err(error.into()),
    }
}

fn is_connected(socket: &OwnedFd) -> io::Result<bool> {
    sockopt::socket_error(socket)??;
    match rustix::net::getpeername(socket) {
        Ok(_) => Ok(true),
        Err(Errno::NOTCONN) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    fn check(probe: Probe) -> CommandProbe {
        CommandProbe { what: probe, interval_ms: 1, timeout_ms: 1000, within_ms: 1000 }
    }

    /// Probes until the check succeeds, at most ten times.
    fn holds(schedule: &mut ProbeSchedule, check: &CommandProbe) -> bool {
        (0..10).any(|_| {
            std::thread::sleep(Duration::from_millis(2));
            schedule.poll(check, Instant::now())
        })
    }

    #[test]
    fn file_probe_follows_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ready");
        let check = check(Probe::File(path.clone()));
        let mut schedule = ProbeSchedule::new(&check, ResolvedRunAs::default(), Instant::now());
        assert!(!holds(&mut schedule, &check));
        assert!(schedule.failure.contains("No such file"), "{}", schedule.failure);
        std::fs::write(path, "").unwrap();
        assert!(holds(&mut schedule, &check));
    }

    #[test]
    fn tcp_probe_follows_the_listener() {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let listener = TcpListener::bind(address).unwrap();
            let port = listener.local_addr().unwrap().port();
            let check = check(Probe::Tcp(port));
            let mut schedule = ProbeSchedule::new(&check, ResolvedRunAs::default(), Instant::now());
            assert!(holds(&mut schedule, &check), "{address}");
            drop(listener);
            let mut schedule = ProbeSchedule::new(&check, ResolvedRunAs::default(), Instant::now());
            assert!(!holds(&mut schedule, &check), "{address}");
            assert!(schedule.failure.contains("refused"), "{}", schedule.failure);
        }
    }
}
