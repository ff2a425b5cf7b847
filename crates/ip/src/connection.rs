//! Non-blocking socket to the route mirror.

use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;

use pdp_proto::channel::FrameReader;
use pdp_proto::routes::{FromGuest, Messages, VERSION, encode};
use rustix::event::PollFlags;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

use crate::follower::{MirrorChannel, MirrorInput};

/// Backlog, bytes, above which deferrable messages wait.
const BACKLOG_BYTES: usize = 64 << 10;

/// Backlog, bytes, above which the mirror counts as stuck.
const BACKLOG_BYTES_MAX: usize = 8 << 20;

/// Connection to the route mirror.
#[derive(Debug)]
pub struct MirrorSocket {
    stream: UnixStream,
    reader: FrameReader,
    messages: Messages,
    /// Bytes to write. The first `written` of them are done.
    backlog: Vec<u8>,
    written: usize,
}

impl MirrorSocket {
    /// Connects to the mirror that listens at `path`, as guest number `guest`.
    pub fn open(path: &Path, guest: u32) -> io::Result<Self> {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        connect(&socket, &SocketAddrUnix::new(path)?)?;
        let mut connection = Self {
            stream: socket.into(),
            reader: FrameReader::default(),
            messages: Messages::default(),
            backlog: Vec::new(),
            written: 0,
        };
        connection.say(FromGuest::Hello { version: VERSION, guest })?;
        Ok(connection)
    }

    /// True if bytes wait to be written.
    pub fn has_backlog(&self) -> bool {
        self.written < self.backlog.len()
    }

    /// Returns the events to poll for.
    pub fn wants(&self) -> PollFlags {
        if self.has_backlog() { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN }
    }
}

impl AsFd for MirrorSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

impl MirrorChannel for MirrorSocket {
    /// Reads the socket at most once, and only if no message is left.
    fn hear(&mut self) -> io::Result<MirrorInput> {
        if let Some(message) = self.messages.take()? {
            return Ok(MirrorInput::Message(message));
        }
        if let Some(frame) = self.reader.next_frame()? {
            self.messages.start(frame)?;
            return Ok(MirrorInput::Part);
        }
        match self.reader.read_from(&mut self.stream) {
            Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(_) => Ok(MirrorInput::Part),
            Err(error) if would_block(&error) => Ok(MirrorInput::Nothing),
            Err(error) => Err(error),
        }
    }

    fn has_space(&self) -> bool {
        self.backlog.len() < BACKLOG_BYTES
    }

    fn say(&mut self, message: FromGuest) -> io::Result<()> {
        if self.backlog.len() > BACKLOG_BYTES_MAX {
            return Err(io::ErrorKind::TimedOut.into());
        }
        self.backlog.extend_from_slice(&encode(&[message])?);
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        while self.written < self.backlog.len() {
            match self.stream.write(&self.backlog[self.written..]) {
                Ok(count) => self.written += count,
                Err(error) if would_block(&error) => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        self.backlog.clear();
        self.written = 0;
        Ok(())
    }
}

fn would_block(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}
