//! Commands that were started for a client: their terminal, and their end.

use std::io;
use std::os::fd::OwnedFd;
use std::process::Command;

use nix::fcntl::{FcntlArg, FdFlag, OFlag, fcntl};
use nix::pty::{OpenptyResult, openpty};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use pdp_api::exec::WindowSize;
use rustix::termios::{Winsize, tcsetwinsize};
use tokio::net::unix::pipe;

/// Rounds of looking for processes that began while the others were stopped.
const ROUNDS_MAX: usize = 16;

/// The side of a terminal that is not the command's.
pub struct Terminal {
    /// What the command writes. Its end is an error (EIO), once nobody has the other side open.
    pub output: pipe::Receiver,
    /// Where to type.
    pub input: pipe::Sender,
    /// For [`resize`].
    pub size: OwnedFd,
}

impl Terminal {
    /// A terminal, and the command's side of it.
    pub fn open(size: WindowSize) -> io::Result<(Self, OwnedFd)> {
        let OpenptyResult { master, slave } = openpty(None, None)?;
        fcntl(&master, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
        fcntl(&master, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC))?;
        fcntl(&slave, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC))?;
        resize(&master, size)?;
        let output = pipe::Receiver::from_owned_fd_unchecked(master.try_clone()?)?;
        let input = pipe::Sender::from_owned_fd_unchecked(master.try_clone()?)?;
        Ok((Self { output, input, size: master }, slave))
    }
}

/// Gives a terminal this size; its command is told by SIGWINCH.
pub fn resize(terminal: &OwnedFd, size: WindowSize) -> io::Result<()> {
    let size = Winsize { ws_row: size.rows, ws_col: size.columns, ws_xpixel: 0, ws_ypixel: 0 };
    Ok(tcsetwinsize(terminal, size)?)
}

/// The command as the leader of a session whose terminal is its standard input.
pub fn with_terminal(command: &Command) -> Command {
    // `setsid` (util-linux) makes the system calls that std can't without unsafe code. It goes
    // on as the command itself, in the same process, as long as that leads no process group.
    let mut leader = Command::new("setsid");
    leader.arg("--ctty").arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => leader.env(name, value),
            None => leader.env_remove(name),
        };
    }
    if let Some(directory) = command.get_current_dir() {
        leader.current_dir(directory);
    }
    leader
}

/// Kills a process that has not been waited for yet, and all that descend from it.
///
/// A runtime that runs a command in a container is its parent, but does not take it along when it
/// is killed, and the command has a process group of its own.
pub fn kill_tree(root: u32) {
    let mut tree = vec![root];
    // Stopped processes start no others, so that a round that finds none is the last.
    for _ in 0..ROUNDS_MAX {
        tree.iter().for_each(|&pid| signal(pid, Signal::SIGSTOP));
        let parents = parents();
        let mut grown = tree.clone();
        loop {
            let more: Vec<u32> = parents
                .iter()
                .filter(|(pid, parent)| grown.contains(parent) && !grown.contains(pid))
                .map(|&(pid, _)| pid)
                .collect();
            if more.is_empty() {
                break;
            }
            grown.extend(more);
        }
        if grown.len() == tree.len() {
            break;
        }
        tree = grown;
    }
    tree.iter().for_each(|&pid| signal(pid, Signal::SIGKILL));
}

fn signal(pid: u32, signal: Signal) {
    if let Ok(pid) = i32::try_from(pid) {
        // It may have ended in between.
        let _ = kill(Pid::from_raw(pid), signal);
    }
}

/// All processes with their parents.
fn parents() -> Vec<(u32, u32)> {
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    entries
        .flatten()
        .filter_map(|entry| {
            let pid = entry.file_name().to_str()?.parse().ok()?;
            let stat = std::fs::read_to_string(entry.path().join("stat")).ok()?;
            // proc_pid_stat(5): the name in parentheses may hold anything; then state, parent.
            let parent = stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()?;
            Some((pid, parent))
        })
        .collect()
}
