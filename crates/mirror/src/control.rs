//! Control by pdpd: status and tables.
//!
//! Guarantees that neither a silent nor a slow pdpd delays the mirror. It makes replies only as
//! fast as they are read, and closes a connection that reads nothing for [`STALL_TIME_MAX`].
//!
//! Limits: [`CONNECTIONS_MAX`] connections, [`REQUEST_BYTES_MAX`] per request, [`REQUESTS_MAX`]
//! waiting requests per connection. A connection's requests are answered one after the other. Only
//! one connection at a time gets a table.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};

use pdp_model::RouteStats;
use pdp_proto::channel::{FrameReader, frame};
use pdp_proto::mirror::{MirrorConfig, MirrorReply, MirrorRequest, MirrorStatusReply};

use crate::follower::KernelFollower;
use crate::guests::{Guests, TableAnswer};
use crate::hooks::Hooks;
use crate::tables::{TableQuery, TableQueryProgress};

/// Most connections of pdpd.
pub const CONNECTIONS_MAX: usize = 32;

/// Most bytes of a request.
pub const REQUEST_BYTES_MAX: usize = 64 << 10;

/// Most waiting requests of one connection.
const REQUESTS_MAX: usize = 64;

/// Most bytes of waiting replies; no more replies are made meanwhile.
const WAITING_BYTES_MAX: usize = 1 << 20;

/// Most routes in one reply.
const ROWS_MAX: usize = 1024;

/// Longest time for which a connection with a waiting reply may read nothing.
const STALL_TIME_MAX: Duration = Duration::from_secs(30);

struct PdpdConnection {
    stream: UnixStream,
    reader: FrameReader,
    waiting: Vec<u8>,
    written: usize,
    progress: Instant,
    requests: VecDeque<MirrorRequest>,
    tables: Option<Box<TableQuery>>,
}

/// All connections of pdpd.
pub struct MirrorControl {
    listener: UnixListener,
    connections: Vec<PdpdConnection>,
    config: MirrorConfig,
}

impl MirrorControl {
    /// Accepts pdpd's connections on this listener.
    pub fn new(listener: UnixListener, config: MirrorConfig) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        Ok(Self { listener, connections: Vec::new(), config })
    }

    /// The listener.
    pub fn listener(&self) -> &UnixListener {
        &self.listener
    }

    /// Returns the connections, with true for those that have bytes to write.
    pub fn streams(&self) -> impl Iterator<Item = (&UnixStream, bool)> {
        self.connections.iter().map(|c| (&c.stream, !c.waiting.is_empty()))
    }

    /// True if a reply can continue at once, or a request can be answered.
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

    /// True if a reply waits for a guest, or a connection waits for its reader.
    pub fn is_waiting(&self) -> bool {
        self.connections.iter().any(|c| c.tables.is_some() || !c.waiting.is_empty())
    }

    /// Accepts new connections.
    pub fn accept(&mut self) {
        while let Ok((stream, _)) = self.listener.accept() {
            if self.connections.len() >= CONNECTIONS_MAX || stream.set_nonblocking(true).is_err() {
                tracing::warn!("a control connection is refused: {CONNECTIONS_MAX} at most");
                continue;
            }
            self.connections.push(PdpdConnection {
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

    /// Reads requests and continues replies; `answers` came from guests.
    pub fn step(
        &mut self,
        follower: &mut KernelFollower,
        hooks: &Hooks,
        guests: &mut Guests,
        answers: Vec<(u32, TableAnswer)>,
    ) {
        for (guest, answer) in answers {
            if let Some(connection) = self.connections.iter_mut().find(|c| c.tables.is_some()) {
                connection.handle_answer(guest, answer);
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

impl PdpdConnection {
    fn step(
        &mut self,
        follower: &mut KernelFollower,
        hooks: &Hooks,
        guests: &mut Guests,
        config: &MirrorConfig,
        busy: &mut bool,
    ) -> io::Result<()> {
        self.write()?;
        self.read()?;
        if self.waiting.len() >= WAITING_BYTES_MAX {
            return Ok(());
        }
        if self.tables.is_none() {
            match self.requests.pop_front() {
                Some(MirrorRequest::Status) => {
                    self.reply(&MirrorReply::Status(status(follower, hooks, guests)))?;
                }
                Some(MirrorRequest::Routes { source, within }) if !*busy => {
                    *busy = true;
                    self.tables = Some(Box::new(TableQuery::new(source, within, config)));
                }
                Some(waits) => self.requests.push_front(waits),
                None => {}
            }
        }
        // Asks the guest at once, since nothing else would wake the mirror.
        if let Some(tables) = &mut self.tables {
            let progress = tables.step(guests, &mut follower.table);
            self.send_progress(progress)?;
        }
        self.write()
    }

    fn handle_answer(&mut self, guest: u32, answer: TableAnswer) {
        let Some(tables) = &mut self.tables else { return };
        if let Err(error) = tables.handle_answer(guest, answer) {
            // If the reply cannot be encoded or is too large,
            // the connection ends at its next write.
            self.send_progress(TableQueryProgress::Failed(error)).unwrap_or_default();
        }
    }

    fn send_progress(&mut self, progress: TableQueryProgress) -> io::Result<()> {
        match progress {
            TableQueryProgress::Rows(rows) => {
                for rows in rows.chunks(ROWS_MAX) {
                    self.reply(&MirrorReply::Routes(rows.to_vec()))?;
                }
            }
            TableQueryProgress::End => {
                self.tables = None;
                self.reply(&MirrorReply::End)?;
            }
            TableQueryProgress::Failed(error) => {
                self.tables = None;
                self.reply(&MirrorReply::Failed { error })?;
            }
        }
        Ok(())
    }

    fn reply(&mut self, reply: &MirrorReply) -> io::Result<()> {
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

fn status(follower: &KernelFollower, hooks: &Hooks, guests: &Guests) -> MirrorStatusReply {
    let counts = follower.table.counts();
    MirrorStatusReply {
        stats: RouteStats {
            routes_v4: counts.routes[0],
            routes_v6: counts.routes[1],
            groups: counts.groups,
            neighbours: counts.neighbours,
            routes_refused: counts.refused,
            notifications: follower.notifications_count,
            resyncs: follower.resyncs,
            overruns: follower.overruns,
            guests: guests.stats(),
        },
        settled: follower.is_settled() && hooks.is_settled() && guests.have_applied_all(),
        hooks: hooks.descriptions().to_vec(),
    }
}
