//! Control by pdpd: status and tables.
//!
//! Promises that neither a silent nor a slow pdpd holds up the mirror: answers are made only as
//! fast as they are read, and a connection that reads nothing for [`STALL_TIME_MAX`] is closed.
//!
//! Limits: [`CONNECTIONS_MAX`] connections, [`REQUEST_BYTES_MAX`] a request, [`REQUESTS_MAX`]
//! of them waiting; a connection's requests are answered one after the other, tables of all
//! connections too.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};

use pdp_proto::channel::{FrameReader, frame};
use pdp_proto::mirror::{Config, Reply, Request, Status};

use crate::follower::Follower;
use crate::guests::{Answer, Guests};
use crate::hooks::Hooks;
use crate::tables::{Progress, Tables};

/// Connections of pdpd.
pub const CONNECTIONS_MAX: usize = 32;

/// Bytes of a request.
pub const REQUEST_BYTES_MAX: usize = 64 << 10;

/// Requests of one connection that wait.
const REQUESTS_MAX: usize = 64;

/// Bytes of answers that wait before more are made.
const WAITING_BYTES_MAX: usize = 1 << 20;

/// Rows of one reply.
const ROWS_MAX: usize = 1024;

/// Time for a connection that has an answer waiting to read some of it.
const STALL_TIME_MAX: Duration = Duration::from_secs(30);

struct Connection {
    stream: UnixStream,
    reader: FrameReader,
    waiting: Vec<u8>,
    written: usize,
    progress: Instant,
    requests: VecDeque<Request>,
    tables: Option<Box<Tables>>,
}

/// All connections of pdpd.
pub struct Control {
    listener: UnixListener,
    connections: Vec<Connection>,
    config: Config,
}

impl Control {
    /// pdpd comes by this listener.
    pub fn new(listener: UnixListener, config: Config) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        Ok(Self { listener, connections: Vec::new(), config })
    }

    /// The listener.
    pub fn listener(&self) -> &UnixListener {
        &self.listener
    }

    /// The connections, and whether bytes wait to be written.
    pub fn streams(&self) -> impl Iterator<Item = (&UnixStream, bool)> {
        self.connections.iter().map(|c| (&c.stream, !c.waiting.is_empty()))
    }

    /// Whether an answer can go on at once, or a request's turn has come.
    pub fn is_busy(&self) -> bool {
        let is_free = !self.connections.iter().any(|connection| connection.tables.is_some());
        self.connections.iter().any(|connection| {
            connection.waiting.len() < WAITING_BYTES_MAX
                && match &connection.tables {
                    Some(tables) => tables.is_busy(),
                    None => is_free && !connection.requests.is_empty(),
                }
        })
    }

    /// Whether an answer waits for a guest, or a connection for its reader.
    pub fn is_waiting(&self) -> bool {
        self.connections.iter().any(|c| c.tables.is_some() || !c.waiting.is_empty())
    }

    /// Takes new connections.
    pub fn accept(&mut self) {
        while let Ok((stream, _)) = self.listener.accept() {
            if self.connections.len() >= CONNECTIONS_MAX || stream.set_nonblocking(true).is_err() {
                tracing::warn!("a control connection is refused: {CONNECTIONS_MAX} at most");
                continue;
            }
            self.connections.push(Connection {
                stream,
                reader: FrameReader::with_max(REQUEST_BYTES_MAX),
                waiting: Vec::new(),
                written: 0,
                progress: Instant::now(),
                requests: VecDeque::new(),
                tables: None,
            });
        }
    }

    /// Reads requests and goes on with answers; `answers` are what guests said.
    pub fn step(
        &mut self,
        follower: &mut Follower,
        hooks: &Hooks,
        guests: &mut Guests,
        answers: Vec<(u32, Answer)>,
    ) {
        for (guest, answer) in answers {
            if let Some(connection) = self.connections.iter_mut().find(|c| c.tables.is_some()) {
                connection.take(guest, answer);
            }
        }
        let mut busy = self.connections.iter().any(|c| c.tables.is_some());
        let config = &self.config;
        self.connections.retain_mut(|connection| {
            let result = connection.step(follower, hooks, guests, config, &mut busy);
            if let Err(error) = &result
                && error.kind() != ErrorKind::UnexpectedEof
            {
                tracing::info!(%error, "a control connection is closed");
            }
            result.is_ok()
        });
        if !self.connections.iter().any(|c| c.tables.is_some()) {
            follower.table.take_watched();
        }
    }
}

impl Connection {
    fn step(
        &mut self,
        follower: &mut Follower,
        hooks: &Hooks,
        guests: &mut Guests,
        config: &Config,
        busy: &mut bool,
    ) -> io::Result<()> {
        self.write()?;
        self.read()?;
        if self.waiting.len() >= WAITING_BYTES_MAX {
            return Ok(());
        }
        if self.tables.is_none() {
            match self.requests.pop_front() {
                Some(Request::Status) => {
                    self.reply(&Reply::Status(status(follower, hooks, guests)))?;
                }
                Some(Request::Routes { source, within }) if !*busy => {
                    *busy = true;
                    self.tables = Some(Box::new(Tables::new(source, within, config)));
                }
                Some(waits) => self.requests.push_front(waits),
                None => {}
            }
        }
        // A guest is asked at once; nothing else would wake us to do so.
        if let Some(tables) = &mut self.tables {
            let progress = tables.step(guests, &mut follower.table);
            self.go_on(progress)?;
        }
        self.write()
    }

    fn take(&mut self, guest: u32, answer: Answer) {
        let Some(tables) = &mut self.tables else { return };
        if let Err(error) = tables.take(guest, answer) {
            // An answer that cannot be encoded or is too large ends the connection at its write.
            self.go_on(Progress::Failed(error)).unwrap_or_default();
        }
    }

    fn go_on(&mut self, progress: Progress) -> io::Result<()> {
        match progress {
            Progress::Rows(rows) => {
                for rows in rows.chunks(ROWS_MAX) {
                    self.reply(&Reply::Routes(rows.to_vec()))?;
                }
            }
            Progress::End => {
                self.tables = None;
                self.reply(&Reply::End)?;
            }
            Progress::Failed(error) => {
                self.tables = None;
                self.reply(&Reply::Failed { error })?;
            }
        }
        Ok(())
    }

    fn reply(&mut self, reply: &Reply) -> io::Result<()> {
        if self.waiting.is_empty() {
            self.progress = Instant::now();
        }
        self.waiting.extend(frame(&serde_json::to_vec(reply)?)?);
        Ok(())
    }

    fn write(&mut self) -> io::Result<()> {
        while self.written < self.waiting.len() {
            match self.stream.write(&self.waiting[self.written..]) {
                Ok(count) => {
                    self.written += count;
                    self.progress = Instant::now();
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    if self.progress.elapsed() > STALL_TIME_MAX {
                        return Err(ErrorKind::TimedOut.into());
                    }
                    return Ok(());
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        self.waiting.clear();
        self.written = 0;
        Ok(())
    }

    fn read(&mut self) -> io::Result<()> {
        loop {
            match self.reader.read_from(&mut self.stream) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
            while let Some(frame) = self.reader.next_frame()? {
                if self.requests.len() >= REQUESTS_MAX {
                    let text = format!("more than {REQUESTS_MAX} requests wait");
                    return Err(io::Error::new(ErrorKind::InvalidData, text));
                }
                self.requests.push_back(serde_json::from_slice(frame)?);
            }
        }
    }
}

fn status(follower: &Follower, hooks: &Hooks, guests: &Guests) -> Status {
    let counts = follower.table.counts();
    Status {
        routes_v4: counts.routes[0],
        routes_v6: counts.routes[1],
        groups: counts.groups,
        neighbours: counts.neighbours,
        routes_refused: counts.refused,
        notifications: follower.notifications_count,
        resyncs: follower.resyncs,
        overruns: follower.overruns,
        settled: follower.is_settled() && hooks.is_settled() && guests.have_applied_all(),
        hooks: hooks.words().to_vec(),
        guests: guests.status(),
    }
}
