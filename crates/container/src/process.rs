//! Processes named by id and start time, so that another process with the same id is not taken
//! for them.

use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::process::{Child, ExitStatus};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde::{Deserialize, Serialize};

/// A process of this boot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Process {
    /// Its id.
    pub pid: u32,
    /// When it began, clock ticks since boot (field 22 of `/proc/PID/stat`).
    pub start_time: u64,
}

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exit {
    /// What it returned, if it did.
    pub code: Option<i32>,
    /// The signal that ended it, if one did.
    pub signal: Option<i32>,
    /// When, milliseconds since 1970.
    pub at_ms: u64,
}

/// Gives this process an empty session keyring of its own, charged to root, in the place of that of whoever started
/// pdpd: a guest is not to have that one. A kernel without keys has none.
pub(crate) fn leave_session_keyring() {
    const KEYCTL_JOIN_SESSION_KEYRING: libc::c_int = 1;
    let unnamed = std::ptr::null::<libc::c_char>();
    // SAFETY: a null pointer is the name of a new keyring (keyctl(2)); nothing is read by it.
    unsafe { libc::syscall(libc::SYS_keyctl, KEYCTL_JOIN_SESSION_KEYRING, unnamed) };
}

impl Process {
    /// The process that has this id now; `None` if there is none or it only waits to be reaped.
    pub fn of(pid: u32) -> Option<Self> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The name, field 2, is in parentheses and may hold anything.
        let mut fields = stat[stat.rfind(')')? + 1..].split_ascii_whitespace();
        if matches!(fields.next()?, "Z" | "X") {
            return None;
        }
        Some(Self { pid, start_time: fields.nth(18)?.parse().ok()? })
    }

    /// Whether it still runs.
    pub fn is_alive(&self) -> bool {
        Self::of(self.pid) == Some(*self)
    }

    /// A descriptor that polls readable once it ends; `None` if it has.
    pub fn pidfd(&self) -> Option<OwnedFd> {
        let fd = pidfd_open(Pid::from_raw(self.pid.try_into().ok()?)?, PidfdFlags::empty()).ok()?;
        // Looked at after opening: the id can't be another's by then without this showing.
        self.is_alive().then_some(fd)
    }

    /// Path of one of its namespaces, e.g. `net` or `user`.
    pub fn namespace(&self, kind: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/ns/{kind}", self.pid))
    }

    /// Sends a signal if it still runs.
    pub(crate) fn signal(&self, signal: Signal) {
        if let Some(fd) = self.pidfd() {
            // It may end meanwhile, which is as good.
            let _ = pidfd_send_signal(fd, signal);
        }
    }

    /// Waits for its end; false if it still runs after `time`.
    pub(crate) fn wait(&self, time: Duration) -> bool {
        self.pidfd().is_none_or(|fd| wait_readable(&fd, time))
    }
}

/// Waits for the end of a child; one that takes longer than `time` is killed, which is an error.
pub(crate) fn end_within(child: &mut Child, time: Duration) -> io::Result<ExitStatus> {
    if let Some(status) = wait_child(child, time)? {
        return Ok(status);
    }
    child.kill()?;
    child.wait()?;
    Err(io::Error::new(io::ErrorKind::TimedOut, format!("not done after {time:?}")))
}

/// Waits for the end of a child; `None` if it still runs after `time`.
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
            // There are no descriptors left.
            None => std::thread::sleep(left.min(Duration::from_millis(20))),
        }
    }
}

/// Waits until a descriptor is readable; false if it is not after `time`.
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
    fn another_process_with_the_same_id_is_not_taken_for_it() {
        let me = Process::of(std::process::id()).unwrap();
        assert!(me.is_alive() && me.pidfd().is_some());
        let other = Process { start_time: me.start_time + 1, ..me };
        assert!(!other.is_alive() && other.pidfd().is_none());
    }

    #[test]
    fn an_ended_child_that_nobody_waited_for_counts_as_ended() {
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
