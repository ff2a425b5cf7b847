//! Non-blocking connection to the route mirror.

use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use pdp_proto::channel::FrameReader;
use pdp_proto::routes::{FromGuest, Messages, VERSION, encode};
use rustix::event::PollFlags;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

use crate::fib::DumpCursor;
use crate::follower::{
    FollowerDeadline, MirrorChannel, MirrorFollower, MirrorInput, RouteReport, RouteTables,
};

/// Backlog, bytes, above which deferrable messages wait.
const BACKLOG_BYTES: usize = 64 << 10;

/// Backlog, bytes, above which the mirror counts as stuck.
const BACKLOG_BYTES_MAX: usize = 8 << 20;

/// Time between two attempts to connect.
const RECONNECT_INTERVAL: Duration = Duration::from_millis(200);

/// State of a connection to the mirror.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MirrorStatus {
    /// True if there is a mirror.
    pub connected: bool,
    /// True if its whole snapshot is applied.
    pub synced: bool,
    /// Connections made.
    pub connections: u64,
    /// Messages applied.
    pub messages: u64,
}

/// Keeps tables connected to the route mirror. After an end of file or invalid bytes, it reconnects
/// after 0.2 s. The tables stay as they are until the new mirror's snapshot replaces them.
#[derive(Debug)]
pub struct RouteClient<C = DumpCursor> {
    path: PathBuf,
    guest: u32,
    socket: Option<MirrorSocket>,
    connections: u64,
    connect_ns: u64,
    follower: MirrorFollower<C>,
    /// Origin of all times.
    since: Instant,
}

impl<C: Default> RouteClient<C> {
    /// Makes a client, not yet connected, of the mirror that listens at `path`, for guest number
    /// `guest`.
    pub fn new(path: &Path, guest: u32) -> Self {
        Self {
            path: path.into(),
            guest,
            socket: None,
            connections: 0,
            connect_ns: 0,
            follower: MirrorFollower::default(),
            since: Instant::now(),
        }
    }

    /// Continues connecting, or applies at most `messages_max` messages.
    pub fn poll(
        &mut self,
        tables: &mut impl RouteTables<Report: RouteReport<Cursor = C>>,
        now: Instant,
        messages_max: usize,
    ) -> FollowerDeadline {
        let now_ns = now.saturating_duration_since(self.since).as_nanos() as u64;
        let again_ns = now_ns + RECONNECT_INTERVAL.as_nanos() as u64;
        if self.socket.is_none() && now_ns >= self.connect_ns {
            match MirrorSocket::open(&self.path, self.guest) {
                Ok(socket) => {
                    self.socket = Some(socket);
                    self.connections += 1;
                }
                Err(_) => self.connect_ns = again_ns,
            }
        }
        let mut left = messages_max;
        let go_on = || {
            left -= 1;
            left > 0
        };
        match self.follower.poll(tables, self.socket.as_mut(), now_ns, go_on) {
            Ok(FollowerDeadline::At(at)) => {
                let connect_ns = self.socket.is_none().then_some(self.connect_ns);
                FollowerDeadline::At(at.into_iter().chain(connect_ns).min())
            }
            Ok(FollowerDeadline::Now) => FollowerDeadline::Now,
            Err(_) => {
                self.socket = None;
                self.follower.restart();
                self.connect_ns = again_ns;
                FollowerDeadline::At(Some(again_ns))
            }
        }
    }

    /// Returns the time of a deadline.
    pub fn time(&self, deadline_ns: u64) -> Instant {
        self.since + Duration::from_nanos(deadline_ns)
    }

    /// Socket to wait for, while there is one.
    pub fn socket(&self) -> Option<&MirrorSocket> {
        self.socket.as_ref()
    }

    /// State of the connection.
    pub fn status(&self) -> MirrorStatus {
        MirrorStatus {
            connected: self.socket.is_some(),
            synced: self.follower.is_synced(),
            connections: self.connections,
            messages: self.follower.messages(),
        }
    }
}

/// Socket to the route mirror.
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
