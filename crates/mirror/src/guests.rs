//! Forwarding guests, and for each what it was sent, has still to read, and has applied.
//!
//! Guarantees that a slow guest delays nobody. At most [`BACKLOG_BYTES_MAX`] wait for
//! it; beyond that it is disconnected, and gets a snapshot when it connects again.
//! Frames are made once and shared by all guests.
//!
//! Limits: [`GUESTS_MAX`] connections, [`HELLO_TIME_MAX`] for a guest to identify itself,
//! [`BARRIERS_MAX`] unanswered barriers per guest that are distinguished.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::rc::Rc;
use std::time::{Duration, Instant};

use ipnet::IpNet;
use pdp_model::RouteGuestStats;
use pdp_proto::channel::FrameReader;
use pdp_proto::routes::{
    BATCH_MAX, FROM_GUEST_BYTES_MAX, FromGuest, ToGuest, VERSION, decode, encode,
};

use crate::follower::KernelFollower;
use crate::table::MirrorTable;

/// Most connections of guests.
pub const GUESTS_MAX: usize = 128;

/// Most bytes that wait for one guest. A full table takes about half.
pub const BACKLOG_BYTES_MAX: usize = 32 << 20;

/// A snapshot continues while less than this waits for the guest.
const SNAPSHOT_BACKLOG_BYTES: usize = 256 << 10;

/// Longest time for a guest to identify itself.
const HELLO_TIME_MAX: Duration = Duration::from_secs(10);

/// Most unanswered barriers of a guest.
const BARRIERS_MAX: usize = 1024;

/// Most reads from one guest before the others get their turn; each has up to 64 KiB.
const READS_MAX: usize = 16;

/// Collects messages into frames.
#[derive(Default)]
pub struct FrameEncoder {
    batch: Vec<ToGuest>,
    /// Whole frames.
    frames: Vec<Rc<[u8]>>,
}

impl FrameEncoder {
    /// Adds a message.
    pub fn push(&mut self, message: ToGuest) {
        self.batch.push(message);
        if self.batch.len() == BATCH_MAX {
            self.close();
        }
    }

    fn close(&mut self) {
        if self.batch.is_empty() {
            return;
        }
        match encode(&self.batch) {
            Ok(frame) => self.frames.push(frame.into()),
            Err(error) => tracing::error!(%error, "cannot encode messages to guests"),
        }
        self.batch.clear();
    }

    fn finish(mut self) -> Vec<Rc<[u8]>> {
        self.close();
        self.frames
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SnapshotPhase {
    /// Connected; no snapshot has begun.
    New,
    /// The snapshot continues after this prefix.
    Snapshot(Option<IpNet>),
    /// The guest has the snapshot.
    Live,
}

struct MirroredGuest {
    stream: UnixStream,
    reader: FrameReader,
    connected: Instant,
    number: Option<u32>,
    phase: SnapshotPhase,
    waiting: VecDeque<Rc<[u8]>>,
    /// Bytes of the first waiting frame that were already written.
    written: usize,
    backlog_bytes: usize,
    barriers: VecDeque<(u64, Instant)>,
    /// Number of the barrier after the snapshot, and of the last answered one.
    snapshot_barrier: u64,
    applied: u64,
    apply_us: u64,
    apply_us_max: u64,
}

/// Answer of a guest to a dump request.
pub enum TableAnswer {
    /// Some of the table, by number of the dump.
    Table(u64, Vec<(IpNet, pdp_proto::routes::ResolvedRoute)>),
    /// The table is whole.
    TableEnd(u64),
}

/// Most gateways that a guest may ask for at once.
const WANTED_MAX: usize = 64;

/// All guests.
pub struct Guests {
    listener: UnixListener,
    guests: Vec<MirroredGuest>,
    barrier: u64,
    backlog_bytes_max: usize,
}

impl Guests {
    /// Accepts guests on this listener. `backlog_bytes_max` is for tests.
    pub fn new(listener: UnixListener, backlog_bytes_max: Option<usize>) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let backlog_bytes_max = backlog_bytes_max.unwrap_or(BACKLOG_BYTES_MAX);
        Ok(Self { listener, guests: Vec::new(), barrier: 0, backlog_bytes_max })
    }

    /// The listener.
    pub fn listener(&self) -> &UnixListener {
        &self.listener
    }

    /// Returns the connections, with true for those that have bytes to write.
    pub fn streams(&self) -> impl Iterator<Item = (&UnixStream, bool)> {
        self.guests.iter().map(|guest| (&guest.stream, !guest.waiting.is_empty()))
    }

    /// True if a snapshot can continue at once.
    pub fn is_busy(&self) -> bool {
        self.guests.iter().any(|guest| {
            matches!(guest.phase, SnapshotPhase::Snapshot(_))
                && guest.backlog_bytes < SNAPSHOT_BACKLOG_BYTES
        })
    }

    /// Returns the time at which the next guest has failed to identify itself.
    pub fn due(&self) -> Option<Instant> {
        let nameless = self.guests.iter().filter(|guest| guest.number.is_none());
        nameless.map(|guest| guest.connected + HELLO_TIME_MAX).min()
    }

    /// Returns the status of each identified guest.
    pub fn stats(&self) -> Vec<RouteGuestStats> {
        let status = |guest: &MirroredGuest| {
            Some(RouteGuestStats {
                guest: guest.number?,
                synced: guest.phase == SnapshotPhase::Live
                    && guest.applied >= guest.snapshot_barrier,
                backlog_bytes: guest.backlog_bytes as u64,
                apply_us: guest.apply_us,
                apply_us_max: guest.apply_us_max,
            })
        };
        self.guests.iter().filter_map(status).collect()
    }

    /// Accepts new connections.
    pub fn accept(&mut self) {
        while let Ok((stream, _)) = self.listener.accept() {
            if self.guests.len() >= GUESTS_MAX {
                tracing::warn!("a guest is refused: {GUESTS_MAX} are connected");
                continue;
            }
            if let Err(error) = stream.set_nonblocking(true) {
                tracing::warn!(%error, "a guest's connection cannot be used");
                continue;
            }
            self.guests.push(MirroredGuest {
                stream,
                reader: FrameReader::with_max(FROM_GUEST_BYTES_MAX),
                connected: Instant::now(),
                number: None,
                phase: SnapshotPhase::New,
                waiting: VecDeque::new(),
                written: 0,
                backlog_bytes: 0,
                barriers: VecDeque::new(),
                snapshot_barrier: 0,
                applied: 0,
                apply_us: 0,
                apply_us_max: 0,
            });
        }
    }

    /// Sends changes to the guests; `read` is the time at
    /// which the first notification of them was read.
    pub fn broadcast(&mut self, table: &mut MirrorTable, read: Instant) {
        let listens = |guest: &&mut MirroredGuest| guest.phase != SnapshotPhase::New;
        if !self.guests.iter_mut().any(|guest| listens(&guest)) {
            table.flush(&mut |_| {});
            return;
        }
        let mut frames = FrameEncoder::default();
        table.flush(&mut |message| frames.push(message));
        if frames.batch.is_empty() && frames.frames.is_empty() {
            return;
        }
        self.barrier += 1;
        frames.push(ToGuest::Barrier(self.barrier));
        let frames = frames.finish();
        for guest in self.guests.iter_mut().filter(listens) {
            guest.send(&frames);
            let full = guest.barriers.len() >= BARRIERS_MAX;
            match guest.barriers.back_mut() {
                // The last barrier stands for all that do not fit.
                Some(last) if full => last.0 = self.barrier,
                _ => guest.barriers.push_back((self.barrier, read)),
            }
        }
    }

    /// Continues snapshots, writes and reads. Returns the guests' answers, with their numbers.
    pub fn step(&mut self, follower: &mut KernelFollower) -> Vec<(u32, TableAnswer)> {
        let mut answers = Vec::new();
        let now = Instant::now();
        let mut index = 0;
        while index < self.guests.len() {
            let guest = &mut self.guests[index];
            let read = guest.read(follower, &mut answers);
            if follower.is_ready() && guest.number.is_some() {
                guest.continue_snapshot(&follower.table, &mut self.barrier);
            }
            let result = read.and_then(|()| guest.write());
            let overdue = guest.number.is_none() && now > guest.connected + HELLO_TIME_MAX;
            let number = guest.number;
            if let Err(error) = result {
                tracing::info!(guest = ?number, %error, "a guest is disconnected");
                self.guests.remove(index);
            } else if overdue || guest.backlog_bytes > self.backlog_bytes_max {
                let bytes = guest.backlog_bytes;
                tracing::warn!(guest = ?number, bytes, "a guest is too slow: disconnected");
                self.guests.remove(index);
            } else {
                index += 1;
            }
        }
        self.drop_replaced();
        answers
    }

    /// If several connections identify as the same guest, only the last one stays.
    fn drop_replaced(&mut self) {
        let numbers: Vec<_> = self.guests.iter().map(|guest| guest.number).collect();
        let mut index = 0;
        self.guests.retain(|guest| {
            index += 1;
            guest.number.is_none() || !numbers[index..].contains(&guest.number)
        });
    }

    /// Asks a guest for its table under this number. Returns false if there
    /// is no such guest, or it has no snapshot yet.
    pub fn ask_table(&mut self, number: u32, dump: u64) -> bool {
        let is_it = |guest: &&mut MirroredGuest| {
            guest.number == Some(number) && guest.phase == SnapshotPhase::Live
        };
        let Some(guest) = self.guests.iter_mut().find(is_it) else { return false };
        let mut frames = FrameEncoder::default();
        frames.push(ToGuest::Dump(dump));
        guest.send(&frames.finish());
        true
    }

    /// True if the guest is connected and has its snapshot.
    pub fn is_live(&self, number: u32) -> bool {
        self.guests
            .iter()
            .any(|guest| guest.number == Some(number) && guest.phase == SnapshotPhase::Live)
    }

    /// True if every guest has its snapshot and has applied everything that it was sent.
    pub fn have_applied_all(&self) -> bool {
        let has =
            |guest: &MirroredGuest| guest.phase == SnapshotPhase::Live && guest.barriers.is_empty();
        self.guests.iter().all(has)
    }

    /// True if the guest has applied everything that it was sent.
    pub fn has_applied_all(&self, number: u32) -> bool {
        self.guests.iter().any(|guest| guest.number == Some(number) && guest.barriers.is_empty())
    }
}

impl MirroredGuest {
    fn send(&mut self, frames: &[Rc<[u8]>]) {
        self.backlog_bytes += frames.iter().map(|frame| frame.len()).sum::<usize>();
        self.waiting.extend(frames.iter().cloned());
    }

    fn continue_snapshot(&mut self, table: &MirrorTable, barrier: &mut u64) {
        let mut frames = FrameEncoder::default();
        let mut push = |message| frames.push(message);
        let from = match self.phase {
            SnapshotPhase::New => {
                table.snapshot_head(&mut push);
                self.phase = SnapshotPhase::Snapshot(None);
                None
            }
            SnapshotPhase::Snapshot(from) => from,
            SnapshotPhase::Live => return,
        };
        if self.backlog_bytes < SNAPSHOT_BACKLOG_BYTES {
            if let Some(last) = table.snapshot_routes(from, BATCH_MAX, &mut push) {
                self.phase = SnapshotPhase::Snapshot(Some(last));
            } else {
                *barrier += 1;
                push(ToGuest::End);
                push(ToGuest::Barrier(*barrier));
                self.barriers.push_back((*barrier, Instant::now()));
                self.snapshot_barrier = *barrier;
                self.phase = SnapshotPhase::Live;
            }
        }
        self.send(&frames.finish());
    }

    fn write(&mut self) -> io::Result<()> {
        while let Some(frame) = self.waiting.front() {
            match self.stream.write(&frame[self.written..]) {
                Ok(count) => {
                    self.written += count;
                    self.backlog_bytes -= count;
                    if self.written == frame.len() {
                        self.waiting.pop_front();
                        self.written = 0;
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn read(
        &mut self,
        follower: &mut KernelFollower,
        answers: &mut Vec<(u32, TableAnswer)>,
    ) -> io::Result<()> {
        for _ in 0..READS_MAX {
            match self.reader.read_from(&mut self.stream) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
            while let Some(frame) = self.reader.next_frame()? {
                let batch = decode::<FromGuest>(frame)?;
                for message in batch {
                    self.handle_message(message, follower, answers)?;
                }
            }
        }
        Ok(())
    }

    fn handle_message(
        &mut self,
        message: FromGuest,
        follower: &mut KernelFollower,
        answers: &mut Vec<(u32, TableAnswer)>,
    ) -> io::Result<()> {
        match (self.number, message) {
            (None, FromGuest::Hello { version: VERSION, guest }) => self.number = Some(guest),
            (None, FromGuest::Hello { version, .. }) => {
                return Err(invalid(format!("version {version}, not {VERSION}")));
            }
            (None, _) => return Err(invalid("no hello first".into())),
            (Some(_), FromGuest::Hello { .. }) => return Err(invalid("a second hello".into())),
            (Some(_), FromGuest::Applied(barrier)) => self.applied(barrier),
            (Some(_), FromGuest::Used(used)) => {
                used.into_iter().for_each(|(vport, address)| follower.used(vport, address));
            }
            (Some(_), FromGuest::Wanted(requests)) => {
                let requests = requests.into_iter().take(WANTED_MAX);
                requests.for_each(|(vport, address)| follower.resolve_gateway(vport, address));
            }
            (Some(guest), FromGuest::Table { dump, routes }) => {
                answers.push((guest, TableAnswer::Table(dump, routes)));
            }
            (Some(guest), FromGuest::TableEnd(dump)) => {
                answers.push((guest, TableAnswer::TableEnd(dump)));
            }
        }
        Ok(())
    }

    fn applied(&mut self, barrier: u64) {
        while let Some((number, read)) = self.barriers.front().copied()
            && number <= barrier
        {
            self.barriers.pop_front();
            self.applied = number;
            self.apply_us = read.elapsed().as_micros() as u64;
            // A snapshot is not an update, and delays the updates that are sent during it.
            if self.phase == SnapshotPhase::Live && number > self.snapshot_barrier {
                self.apply_us_max = self.apply_us_max.max(self.apply_us);
            }
        }
    }
}

fn invalid(text: String) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, text)
}
