//! Looks at whether a command is ready: again and again, one look at a time, none of which is waited for.

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
use super::spawn;
use super::stand::Stand;
use crate::spec::{Check, Probe};

/// The looks at one command.
pub(super) struct Looks {
    look: Look,
    /// As whom and where a check's program runs: as the command, and as what that was when it was started.
    stand: Stand,
    /// Why it is not ready, as far as the last look told.
    pub said: String,
}

enum Look {
    /// The next one is due then.
    None { at: Instant },
    /// A program runs, until then at the longest.
    Program { pid: Pid, output: Output, until: Instant },
    /// Connections are being made.
    Connecting { sockets: Vec<OwnedFd>, until: Instant },
}

/// What a look came to.
type Seen = Result<(), String>;

impl Looks {
    /// The first is due after one interval: what the command before this one left, it can clear away.
    pub fn new(check: &Check, stand: Stand, now: Instant) -> Self {
        let at = now + Duration::from_millis(check.interval_ms);
        Self { look: Look::None { at }, stand, said: String::new() }
    }

    /// Looks, if it is time; whether it holds.
    pub fn go_on(&mut self, check: &Check, now: Instant) -> bool {
        let timeout = Duration::from_millis(check.timeout_ms);
        let seen = match &mut self.look {
            Look::None { at } if *at > now => return false,
            Look::None { .. } => match begin(&check.what, &self.stand, now + timeout) {
                Ok(look) => {
                    self.look = look;
                    self.connected()
                }
                Err(seen) => Some(seen),
            },
            Look::Program { until, .. } if *until > now => None,
            Look::Program { .. } => {
                self.end();
                Some(Err(format!("its check does not end within {timeout:?}")))
            }
            Look::Connecting { until, .. } if *until > now => self.connected(),
            Look::Connecting { .. } => Some(Err(format!("no connection within {timeout:?}"))),
        };
        self.note(seen, check, now)
    }

    /// Takes note of a process's end; whether the check holds, if it was its own.
    pub fn ended(&mut self, check: &Check, ended: Pid, status: ExitStatus, now: Instant) -> bool {
        let Look::Program { pid, output, .. } = &mut self.look else { return false };
        if *pid != ended {
            return false;
        }
        output.drain();
        let seen = match (status.success(), output.last.words()) {
            (true, _) => Ok(()),
            (false, words) if words.is_empty() => Err(format!("its check ended with {status}")),
            (false, words) => Err(words),
        };
        self.note(Some(seen), check, now)
    }

    fn note(&mut self, seen: Option<Seen>, check: &Check, now: Instant) -> bool {
        let Some(seen) = seen else { return false };
        self.look = Look::None { at: now + Duration::from_millis(check.interval_ms) };
        match seen {
            Ok(()) => true,
            Err(words) => {
                self.said = words;
                false
            }
        }
    }

    /// When there is something to do, if nothing happens before.
    pub fn due(&self) -> Instant {
        match &self.look {
            Look::None { at } => *at,
            Look::Program { until, .. } | Look::Connecting { until, .. } => *until,
        }
    }

    /// What it waits for.
    pub fn fds(&self) -> Vec<PollFd<'_>> {
        match &self.look {
            Look::Connecting { sockets, .. } => {
                sockets.iter().map(|socket| PollFd::new(socket, PollFlags::OUT)).collect()
            }
            Look::Program { .. } | Look::None { .. } => Vec::new(),
        }
    }

    /// Keeps what a check's program wrote, so that it need not wait.
    pub fn drain(&mut self) {
        if let Look::Program { output, .. } = &mut self.look {
            output.drain();
        }
    }

    /// Ends a check's program; it is reaped as any orphan.
    pub fn end(&self) {
        if let Look::Program { pid, .. } = &self.look {
            let _ = killpg(*pid, Signal::SIGKILL);
        }
    }

    /// What became of connections, if that is known.
    fn connected(&mut self) -> Option<Seen> {
        let Look::Connecting { sockets, .. } = &mut self.look else { return None };
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

/// Begins a look, or tells at once what it came to.
fn begin(what: &Probe, stand: &Stand, until: Instant) -> Result<Look, Seen> {
    match what {
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
                false => Ok(Look::Connecting { sockets, until }),
            }
        }
        Probe::Command(argv) => {
            let started =
                Output::new().and_then(|output| Ok((spawn(argv, Some(&output), stand)?, output)));
            match started {
                Ok((pid, output)) => Ok(Look::Program { pid, output, until }),
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

    fn check(what: Probe) -> Check {
        Check { what, interval_ms: 1, timeout_ms: 1000, within_ms: 1000 }
    }

    /// Looks until it holds, or ten times.
    fn holds(looks: &mut Looks, check: &Check) -> bool {
        (0..10).any(|_| {
            std::thread::sleep(Duration::from_millis(2));
            looks.go_on(check, Instant::now())
        })
    }

    #[test]
    fn a_file_is_there_or_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ready");
        let check = check(Probe::File(path.clone()));
        let mut looks = Looks::new(&check, Stand::default(), Instant::now());
        assert!(!holds(&mut looks, &check));
        assert!(looks.said.contains("No such file"), "{}", looks.said);
        std::fs::write(path, "").unwrap();
        assert!(holds(&mut looks, &check));
    }

    #[test]
    fn a_port_takes_connections_or_not() {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let listener = TcpListener::bind(address).unwrap();
            let port = listener.local_addr().unwrap().port();
            let check = check(Probe::Tcp(port));
            let mut looks = Looks::new(&check, Stand::default(), Instant::now());
            assert!(holds(&mut looks, &check), "{address}");
            drop(listener);
            let mut looks = Looks::new(&check, Stand::default(), Instant::now());
            assert!(!holds(&mut looks, &check), "{address}");
            assert!(looks.said.contains("refused"), "{}", looks.said);
        }
    }
}
