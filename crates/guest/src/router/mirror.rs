//! The connection to the route mirror, read and written without blocking, a bounded piece at a
//! time.
//!
//! A connection that ends, or whose bytes make no sense, is made anew after
//! [`RECONNECT_INTERVAL`]; the tables stay as they are until the new mirror's snapshot replaces
//! them.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use pdp_proto::channel::FrameReader;
use pdp_proto::routes::{FromGuest, Messages, ToGuest, VERSION, encode};
use rustix::event::PollFlags;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

use super::fib::{DumpCursor, Fib};
use super::neighbour::ASKED_TIME;
use crate::Tended;

/// Messages applied in one go (about half a microsecond each).
const MESSAGES_STEP: usize = 64;

/// Routes of one frame of a dump (some 40 bytes each).
const DUMP_STEP: usize = 256;

/// Bytes that wait to be read by the mirror, beyond which no more of a dump is made.
const BACKLOG_BYTES: usize = 64 << 10;

/// Bytes that wait to be read by the mirror, beyond which it is taken for stuck.
const BACKLOG_BYTES_MAX: usize = 8 << 20;

/// Dumps that the mirror may have asked for and not got.
const DUMPS_MAX: usize = 16;

/// Between two reports of which neighbours are used.
const USED_INTERVAL: Duration = Duration::from_secs(3);

/// Between two reports of which gateways are wanted. The kernel asks for one for 3 s by itself.
const WANTED_INTERVAL: Duration = Duration::from_millis(100);

/// Neighbours of one report.
const USED_STEP: usize = 512;

/// Between two attempts to connect.
const RECONNECT_INTERVAL: Duration = Duration::from_millis(200);

/// How the connection is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Status {
    /// There is a mirror.
    pub connected: bool,
    /// Its snapshot is applied in whole.
    pub synced: bool,
    /// Connections made.
    pub connections: u64,
    /// Messages applied.
    pub messages: u64,
}

#[derive(Debug)]
struct Connection {
    stream: UnixStream,
    reader: FrameReader,
    messages: Messages,
    /// Bytes to write; those before `written` are.
    backlog: Vec<u8>,
    written: usize,
    dumps: VecDeque<u64>,
    cursor: DumpCursor,
}

/// The connection, or the wait for one.
#[derive(Debug)]
pub(super) struct Mirror {
    path: PathBuf,
    guest: u32,
    connection: Option<Connection>,
    connect_at: Option<Instant>,
    used_at: Option<Instant>,
    /// When stations may be asked for that were not answered for.
    turn_at: Option<Instant>,
    /// When gateways that are wanted may be told.
    wanted_at: Option<Instant>,
    status: Status,
}

impl Mirror {
    pub(super) fn new(path: &Path, guest: u32) -> Self {
        Self {
            path: path.into(),
            guest,
            connection: None,
            connect_at: None,
            used_at: None,
            wanted_at: None,
            turn_at: None,
            status: Status::default(),
        }
    }

    pub(super) fn status(&self) -> Status {
        self.status
    }

    /// What a sleeping guest is to wake by.
    pub(super) fn wake_by(&self) -> Vec<(BorrowedFd<'_>, PollFlags)> {
        self.connection.iter().map(|it| (it.stream.as_fd(), it.wants())).collect()
    }

    /// Goes on with whatever is to be done, for some tens of microseconds.
    pub(super) fn tend(&mut self, fib: &mut Fib, now: Instant) -> Tended {
        if now >= *self.turn_at.get_or_insert(now) {
            fib.turn_asked();
            self.turn_at = Some(now + ASKED_TIME);
        }
        if fib.is_sweeping() {
            fib.sweep_some();
            self.status.synced = !fib.is_sweeping() && self.connection.is_some();
            return Tended::More;
        }
        if self.connection.is_none() {
            match self.connect_at {
                Some(at) if now < at => return Tended::Until(Some(at)),
                _ => self.connect(now),
            }
        }
        let Some(connection) = &mut self.connection else {
            return Tended::Until(self.connect_at);
        };
        let used_at = *self.used_at.get_or_insert(now + USED_INTERVAL);
        let result = connection.step(fib, now >= used_at, &mut self.status);
        let result = result.and_then(|step| {
            if fib.is_wanting() && self.wanted_at.is_none_or(|at| now >= at) {
                connection.say(&[FromGuest::Wanted(fib.take_wanted())])?;
                connection.write_some()?;
                self.wanted_at = Some(now + WANTED_INTERVAL);
            }
            Ok(step)
        });
        match result {
            Ok(step) => {
                if step.used_told {
                    self.used_at = Some(now + USED_INTERVAL);
                }
                let wanted_at = self.wanted_at.filter(|_| fib.is_wanting());
                let due = self.used_at.into_iter().chain(wanted_at).min();
                if step.more { Tended::More } else { Tended::Until(due) }
            }
            Err(_) => {
                self.connection = None;
                self.status.connected = false;
                self.status.synced = false;
                self.connect_at = Some(now + RECONNECT_INTERVAL);
                Tended::Until(self.connect_at)
            }
        }
    }

    fn connect(&mut self, now: Instant) {
        match Connection::open(&self.path, self.guest) {
            Ok(connection) => {
                self.connection = Some(connection);
                self.status.connected = true;
                self.status.connections += 1;
            }
            Err(_) => self.connect_at = Some(now + RECONNECT_INTERVAL),
        }
    }
}

struct Step {
    more: bool,
    used_told: bool,
}

impl Connection {
    fn open(path: &Path, guest: u32) -> io::Result<Self> {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        connect(&socket, &SocketAddrUnix::new(path)?)?;
        let mut connection = Self {
            stream: socket.into(),
            reader: FrameReader::default(),
            messages: Messages::default(),
            backlog: Vec::new(),
            written: 0,
            dumps: VecDeque::new(),
            cursor: DumpCursor::default(),
        };
        connection.say(&[FromGuest::Hello { version: VERSION, guest }])?;
        Ok(connection)
    }

    fn wants(&self) -> PollFlags {
        if self.written < self.backlog.len() {
            PollFlags::IN | PollFlags::OUT
        } else {
            PollFlags::IN
        }
    }

    /// Applies some messages or reads some more, tells what is due, writes what can be written.
    fn step(&mut self, fib: &mut Fib, tell_used: bool, status: &mut Status) -> io::Result<Step> {
        let mut more = self.apply_some(fib, status)?;
        if !more && !fib.is_sweeping() {
            more = self.read_some()?;
        }
        more |= fib.is_sweeping();
        let mut used_told = false;
        if tell_used {
            let (used, rest) = fib.take_used(USED_STEP);
            if !used.is_empty() {
                self.say(&[FromGuest::Used(used)])?;
            }
            more |= rest;
            used_told = !rest;
        }
        self.write_some()?;
        if let Some(&dump) = self.dumps.front()
            && self.backlog.len() < BACKLOG_BYTES
        {
            self.dump_some(fib, dump)?;
            self.write_some()?;
            // Goes on at once if the mirror reads, and else when the socket has room.
            more |= self.backlog.len() < BACKLOG_BYTES;
        }
        Ok(Step { more, used_told })
    }

    /// Returns whether there are messages left.
    fn apply_some(&mut self, fib: &mut Fib, status: &mut Status) -> io::Result<bool> {
        for _ in 0..MESSAGES_STEP {
            let Some(message) = self.messages.take()? else { return Ok(false) };
            status.messages += 1;
            match message {
                ToGuest::Barrier(number) => self.say(&[FromGuest::Applied(number)])?,
                ToGuest::Dump(number) if self.dumps.len() < DUMPS_MAX => {
                    self.dumps.push_back(number);
                }
                ToGuest::Dump(_) => return Err(io::ErrorKind::InvalidData.into()),
                ToGuest::Begin => {
                    status.synced = false;
                    fib.apply(ToGuest::Begin);
                }
                message => fib.apply(message),
            }
            if fib.is_sweeping() {
                break;
            }
        }
        Ok(true)
    }

    /// Returns whether something has come.
    fn read_some(&mut self) -> io::Result<bool> {
        if let Some(frame) = self.reader.next_frame()? {
            self.messages.start(frame)?;
            return Ok(true);
        }
        match self.reader.read_from(&mut self.stream) {
            Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(_) => Ok(true),
            Err(error) if would_block(&error) => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn dump_some(&mut self, fib: &Fib, dump: u64) -> io::Result<()> {
        let routes = fib.dump_some(&mut self.cursor, DUMP_STEP);
        if routes.is_empty() {
            self.dumps.pop_front();
            self.cursor = DumpCursor::default();
            self.say(&[FromGuest::TableEnd(dump)])
        } else {
            self.say(&[FromGuest::Table { dump, routes }])
        }
    }

    fn say(&mut self, messages: &[FromGuest]) -> io::Result<()> {
        if self.backlog.len() > BACKLOG_BYTES_MAX {
            return Err(io::ErrorKind::TimedOut.into());
        }
        self.backlog.extend_from_slice(&encode(messages)?);
        Ok(())
    }

    fn write_some(&mut self) -> io::Result<()> {
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
