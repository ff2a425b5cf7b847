//! Terminals of commands that were started for a client.

use std::io;
use std::os::fd::OwnedFd;

use nix::fcntl::{FcntlArg, FdFlag, OFlag, fcntl};
use nix::pty::{OpenptyResult, openpty};
use pdp_api::exec::WindowSize;
use rustix::termios::{Winsize, tcsetwinsize};
use tokio::net::unix::pipe;

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
