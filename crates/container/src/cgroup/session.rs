//! A cgroup for a command run in a guest, so that all its processes can be ended together.
//!
//! Every process started in it stays in it, whatever its session and parent. No search for
//! processes is needed. The limits of the guest's own cgroup, above it, apply.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use super::{CgroupVersion, Cgroups};
use crate::error::{ErrorContext, Result};

/// Longest wait for killed processes. After that, the cgroup is left until the guest's cgroup is
/// removed.
const END_WAIT: Duration = Duration::from_secs(10);

/// Pause between two checks for their end.
const END_PAUSE: Duration = Duration::from_millis(5);

/// The version 1 hierarchy with sessions. It can also keep their processes from forking.
const CONTROLLER: &str = "pids";

/// Number of sessions so far, for their names.
static COUNT: AtomicU64 = AtomicU64::new(0);

/// A cgroup inside a guest's cgroup, with the processes started in it. Dropping removes it;
/// processes that still run continue in the guest's cgroup.
#[derive(Debug)]
pub struct Session {
    dir: PathBuf,
    version: CgroupVersion,
}

impl Cgroups {
    /// Makes a session inside a leaf.
    pub fn session(&self, leaf: &str) -> Result<Session> {
        self.check(leaf)?;
        let leaf = self.controlled_by(CONTROLLER, leaf);
        let leaf = leaf.ok_or_else(|| super::no_controller(CONTROLLER))?;
        loop {
            let number = COUNT.fetch_add(1, Ordering::Relaxed);
            let dir = leaf.join(format!("exec-{}-{number}", std::process::id()));
            match fs::create_dir(&dir) {
                // An earlier process with this id left it.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                made => {
                    made.at("make the cgroup", &dir)?;
                    return Ok(Session { dir, version: self.version });
                }
            }
        }
    }
}

impl Session {
    /// Returns the argument of `runc exec --cgroup` that starts a command in it.
    pub fn argument(&self) -> String {
        let name = self.dir.file_name().unwrap_or_default().to_string_lossy();
        match self.version {
            CgroupVersion::V1 => format!("{CONTROLLER}:{name}"),
            CgroupVersion::V2 => name.into_owned(),
        }
    }

    /// Returns its directory. A process enters by its `cgroup.procs`.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Kills all its processes. The time does not depend on the number of processes on the machine.
    pub fn kill(&self) {
        if self.version == CgroupVersion::V2 && fs::write(self.dir.join("cgroup.kill"), "1").is_ok()
        {
            return;
        }
        // No process can fork any more, so the processes found are all.
        let _ = fs::write(self.dir.join("pids.max"), "0");
        for pid in self.processes() {
            // The process may have ended meanwhile.
            let _ = kill_process(pid, Signal::KILL);
        }
    }

    fn processes(&self) -> Vec<Pid> {
        processes(&self.dir)
    }
}

fn processes(dir: &Path) -> Vec<Pid> {
    let text = fs::read_to_string(dir.join("cgroup.procs")).unwrap_or_default();
    text.lines().filter_map(|id| Pid::from_raw(id.parse().ok()?)).collect()
}

/// Moves a session's remaining processes to the guest's cgroup, and removes the session's. Returns
/// true if it is gone.
fn move_to_guest(dir: &Path) -> bool {
    let leaf = dir.parent().unwrap_or(dir);
    for pid in processes(dir) {
        // The process may have ended meanwhile.
        let _ = fs::write(leaf.join("cgroup.procs"), pid.as_raw_nonzero().to_string());
    }
    match fs::remove_dir(dir) {
        Ok(()) => true,
        Err(error) => error.kind() == io::ErrorKind::NotFound,
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if move_to_guest(&self.dir) {
            return;
        }
        // Killed processes are in it until they have ended. The caller need not wait for that.
        let (dir, end) = (std::mem::take(&mut self.dir), Instant::now() + END_WAIT);
        std::thread::spawn(move || {
            while !move_to_guest(&dir) && Instant::now() < end {
                std::thread::sleep(END_PAUSE);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Child, Command};

    /// Removes its cgroup, even if a test fails.
    struct Guard(Cgroups);

    impl Drop for Guard {
        fn drop(&mut self) {
            let _ = self.0.remove("", Duration::from_secs(10));
            self.0.remove_if_empty("");
        }
    }

    fn start(session: &Session, script: &str) -> Child {
        let enter = format!("echo $$ > {}/cgroup.procs; {script}", session.dir.display());
        Command::new("sh").args(["-c", &enter]).spawn().unwrap()
    }

    fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
        let end = Instant::now() + Duration::from_secs(30);
        while !holds() {
            assert!(Instant::now() < end, "never: {what}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn kill_ends_the_session_and_drop_keeps_processes() {
        let cgroups = Cgroups::new(&format!("pdp-session-{}", std::process::id())).unwrap();
        let guard = Guard(cgroups.clone());
        cgroups.ensure_leaf("guest").unwrap();
        let session = cgroups.session("guest").unwrap();
        let dir = session.dir.clone();
        // Daemons of daemons whose parents have ended, and a program that forks without end.
        let script = "(setsid sh -c 'setsid sleep 600 & sleep 600 &' &) ; \
                      (while :; do sleep 0.01 & done) & sleep 600";
        let mut child = start(&session, script);
        eventually("they run", || session.processes().len() > 4);
        session.kill();
        eventually("all have ended", || session.processes().is_empty());
        child.wait().unwrap();
        drop(session);
        eventually("it is gone", || !dir.exists());

        let session = cgroups.session("guest").unwrap();
        let dir = session.dir.clone();
        let mut child = start(&session, "exec sleep 600");
        eventually("it runs", || !session.processes().is_empty());
        drop(session);
        eventually("it is gone", || !dir.exists());
        assert!(child.try_wait().unwrap().is_none(), "what was left goes on");
        assert_eq!(cgroups.processes("guest").unwrap(), [child.id()]);
        child.kill().unwrap();
        child.wait().unwrap();
        drop(guard);
    }
}
