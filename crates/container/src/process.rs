//! Processes identified by id and start time, so that a later process with the same id is not
//! mistaken for them.

use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::process::{Child, ExitStatus};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde::{Deserialize, Serialize};

/// File mode mask of processes that make a guest's files, inside or for it. pdpd's own mask is
/// stricter.
pub(crate) const GUEST_MASK: Mode = Mode::from_raw_mode(0o022);

/// A process since the machine's last boot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Process {
    /// Process id.
    pub pid: u32,
    /// Start time, clock ticks since boot (field 22 of `/proc/PID/stat`).
    pub start_time: u64,
}

/// End of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessOutcome {
    /// Exit code, if it returned one.
    pub code: Option<i32>,
    /// Signal that ended it, if one did.
    pub signal: Option<i32>,
    /// Time of the end, milliseconds since 1970.
    pub at_ms: u64,
}

/// Replaces this process's session keyring by an empty one of its own, charged to root. A guest
/// must not get the keyring of whoever started pdpd. Does nothing on a kernel without keys.
pub(crate) fn leave_session_keyring() {
    const KEYCTL_JOIN_SESSION_KEYRING: libc::c_int = 1;
    let unnamed = std::ptr::null::<libc::c_char>();
    // SAFETY: a null pointer is the name of a new keyring (keyctl(2)); nothing is read by it.
    unsafe { libc::syscall(libc::SYS_keyctl, KEYCTL_JOIN_SESSION_KEYRING, unnamed) };
}

impl Process {
    /// Returns the process that has this id now. `None` if there is none or it is a zombie.
    pub fn of(pid: u32) -> Option<Self> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The name, field 2, is in parentheses and may have any characters.
        let mut fields = stat[stat.rfind(')')? + 1..].split_ascii_whitespace();
        if matches!(fields.next()?, "Z" | "X") {
            return None;
        }
        Some(Self { pid, start_time: fields.nth(18)?.parse().ok()? })
    }

    /// True if it still runs.
    pub fn is_alive(&self) -> bool {
        Self::of(self.pid) == Some(*self)
    }

    /// Returns a descriptor that polls readable once the process ends; `None` if it has ended.
    pub fn pidfd(&self) -> Option<OwnedFd> {
        let fd = pidfd_open(Pid::from_raw(self.pid.try_into().ok()?)?, PidfdFlags::empty()).ok()?;
        // Checked after opening: if the id belonged to another process by then, this would show.
        self.is_alive().then_some(fd)
    }

    /// Path of one of its namespaces, e.g. `net` or `user`.
    pub fn namespace(&self, kind: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/ns/{kind}", self.pid))
    }

    /// Sends a signal if it still runs.
    pub(crate) fn signal(&self, signal: Signal) {
        if let Some(fd) = self.pidfd() {
            // It does not matter if it ends meanwhile.
            let _ = pidfd_send_signal(fd, signal);
        }
    }

    /// Waits for its end. Returns false if it still runs after `time`.
    pub(crate) fn wait(&self, time: Duration) -> bool {
        self.pidfd().is_none_or(|fd| wait_readable(&fd, time))
    }
}

/// Waits for the end of a child. If it takes longer than `time`, kills it and returns an error.
pub(crate) fn end_within(child: &mut Child, time: Duration) -> io::Result<ExitStatus> {
    if let Some(status) = wait_child(child, time)? {
        return Ok(status);
    }
    child.kill()?;
    child.wait()?;
    Err(io::Error::new(io::ErrorKind::TimedOut, format!("not finished after {time:?}")))
}

/// Waits for the end of a child. Returns `None` if it still runs after `time`.
pub(crate) fn wait_child(child: &mut Child, time: Duration) -> io::Result<Option<ExitStatus>> {
    let begun = Instant::now();
    let fd = Process::of(child.id()).and_then(|process| process.pidfd());
    loop {
        let status = child.try_wait()?;
        let left = time.saturating_sub(begun.elapsed());
        if status.is_some() || left.is_zero() {
            return Ok(status);
        }
        match &fd {
            Some(fd) => drop(wait_readable(fd, left)),
            // No descriptor was available.
            None => std::thread::sleep(left.min(Duration::from_millis(20))),
        }
    }
}

/// Waits until a descriptor is readable. Returns false if it is not after `time`.
pub(crate) fn wait_readable(fd: &impl AsFd, time: Duration) -> bool {
    let deadline = Instant::now() + time;
    loop {
        let left = Timespec::try_from(deadline.saturating_duration_since(Instant::now())).ok();
        match poll(&mut [PollFd::new(fd, PollFlags::IN)], left.as_ref()) {
            Ok(0) => return false,
            Err(Errno::INTR) => {}
            _ => return true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reused_pid_is_a_different_process() {
        let me = Process::of(std::process::id()).unwrap();
        assert!(me.is_alive() && me.pidfd().is_some());
        let other = Process { start_time: me.start_time + 1, ..me };
        assert!(!other.is_alive() && other.pidfd().is_none());
    }

    #[test]
    fn zombie_counts_as_ended() {
        let mut child = std::process::Command::new("sleep").arg("100").spawn().unwrap();
        let process = Process::of(child.id()).unwrap();
        assert!(!process.wait(Duration::from_millis(1)));
        process.signal(Signal::KILL);
        assert!(process.wait(Duration::from_secs(20)));
        assert!(!process.is_alive());
        child.wait().unwrap();
    }

    #[test]
    fn a_child_that_takes_too_long_is_killed() {
        let mut child = std::process::Command::new("sleep").arg("100").spawn().unwrap();
        let late = end_within(&mut child, Duration::from_millis(1)).unwrap_err();
        assert_eq!(late.kind(), io::ErrorKind::TimedOut);
        assert!(child.try_wait().unwrap().is_some());
        let mut child = std::process::Command::new("true").spawn().unwrap();
        assert!(end_within(&mut child, Duration::from_secs(20)).unwrap().success());
    }
}
