//! Terminals of commands that were started for a client.

use std::io;
use std::os::fd::OwnedFd;

use nix::fcntl::{FcntlArg, FdFlag, OFlag, fcntl};
use nix::pty::{OpenptyResult, openpty};
use pdp_api::exec::WindowSize;
use rustix::termios::{Winsize, tcsetwinsize};
use tokio::net::unix::pipe;

/// The daemon's side of a terminal.
pub struct Terminal {
    /// Output of the command. It ends with an error (EIO) once the other side is closed everywhere.
    pub output: pipe::Receiver,
    /// Input of the command.
    pub input: pipe::Sender,
    /// Descriptor for [`resize`].
    pub size: OwnedFd,
}

impl Terminal {
    /// Opens a terminal; also returns the command's side.
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

/// Sets a terminal's size; its command receives SIGWINCH.
pub fn resize(terminal: &OwnedFd, size: WindowSize) -> io::Result<()> {
    let size = Winsize { ws_row: size.rows, ws_col: size.columns, ws_xpixel: 0, ws_ypixel: 0 };
    Ok(tcsetwinsize(terminal, size)?)
}
