//! The slow path's channel: a program in a control guest tells the mux's engine how to treat packets, reads counters,
//! and sends frames.
//!
//! The mux listens at a Unix socket that keeps packets apart (SOCK_SEQPACKET). A packet holds whole messages, one after
//! the other, and is no longer than [`PACKET_BYTES_MAX`]. A message is a `u16` with its length in bytes, all of it, a
//! `u8` that says what it is, a `u8` of flags, and what [`Request`] and [`Reply`] say. Numbers are big-endian, as in
//! packets; lengths of strings follow from that of the message.
//!
//! The program says [`Request::Hello`] first, and gets [`Reply::Welcome`]. Changes ([`Request::Set`],
//! [`Request::Remove`], [`Request::Queue`]) are collected until [`Request::Commit`], which has all of them come into force at once, or none:
//! then it is answered with [`Reply::Done`], or with [`Reply::Refused`]. What is asked is answered in order. Whoever
//! says something else than this, or more than there is room for, is told why ([`Reply::Bye`]) and disconnected.
//!
//! After a new connection, [`Reply::Welcome::tables`] tells whether the engine still has what it was told before: if it
//! has another number, it has nothing. A commit with `sweep` removes what was not set since the commit before on the
//! same connection, so that a program which is started anew says all that it wants, and sweeps.
//!
//! Source of what a filter and its result are: Turner et al., "Supercharging PlanetLab", SIGCOMM 2007, sections 2.2 and 4.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Version of this protocol.
pub const VERSION: u16 = 2;

/// Bytes of a packet of the socket.
pub const PACKET_BYTES_MAX: usize = 1 << 16;

/// Copies of a packet beside itself, of one filter.
pub const COPIES_MAX: usize = 8;

/// Filters of a vrouter at most.
pub const FILTERS_MAX: u32 = 131_072;

/// Counters of a vrouter at most.
pub const COUNTERS_MAX: u32 = 131_072;

/// No counter.
pub const NO_COUNTER: u32 = u32::MAX;

/// No filter.
pub const NO_FILTER: u32 = u32::MAX;

/// Queues of one answer; more come in several.
pub const QUEUES_AT_ONCE: usize = 256;

/// Queues that one commit sets.
pub const QUEUES_SET_MAX: usize = 4096;

/// Counters of one answer; more come in several.
pub const COUNTERS_AT_ONCE: usize = 1024;

/// Filters of one answer; more come in several.
pub const FILTERS_AT_ONCE: usize = 256;

/// Bytes of a frame that a program sends.
pub const FRAME_BYTES_MAX: usize = 2048;

/// Bytes that a result has for whoever writes the packet's header.
pub const DATA_BYTES: usize = 16;

/// What a filter looks at: the bits of a packet that are under the mask have to be those of the value.
///
/// Of `ip`: source, destination (4 or 16 bytes each), source port, destination port (2 bytes each, 0 where the packet
/// has none, and in fragments), protocol, traffic class (a byte each), and the vport that it came by (2 bytes). Of `fields`: as
/// its vrouter says, the first field first, zeros behind the last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pattern {
    /// Of IPv4, or of `fields` of up to 128 bits.
    Short {
        /// What they are to be.
        value: [u8; 16],
        /// Which.
        mask: [u8; 16],
    },
    /// Of IPv6, or of `fields` of up to 320 bits.
    Long {
        /// What they are to be.
        value: [u8; 40],
        /// Which.
        mask: [u8; 40],
    },
}

/// What becomes of a packet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// It is dropped.
    Drop,
    /// What would without the filter: a route decides, or whatever the code has for packets that meet none.
    #[default]
    Pass,
    /// It leaves by the result's vport, with a header by its data.
    Send,
    /// It goes to the control guest.
    Punt,
}

impl Verdict {
    /// All, by their numbers.
    pub const ALL: [Self; 4] = [Self::Drop, Self::Pass, Self::Send, Self::Punt];
}

/// What a filter has done to packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Action {
    /// What becomes of it.
    pub verdict: Verdict,
    /// By which vport it leaves if it is sent.
    pub vport: u8,
    /// In which queue of the port that it leaves by it waits, counted from 1; 0: the port chooses.
    pub queue: u16,
    /// What counts it; [`NO_COUNTER`]: nothing.
    pub counter: u32,
    /// How many of `copies` count, [`COPIES_MAX`] at most.
    pub copies_count: u8,
    /// Vports that copies leave by: of a packet that is sent, with the same header; else as it came.
    pub copies: [u8; COPIES_MAX],
    /// For the header of what is sent. Of `ip`: the link address that it goes to, in the first six bytes. Of `fields`:
    /// what is written where its vrouter says.
    pub data: [u8; DATA_BYTES],
}

impl Default for Action {
    fn default() -> Self {
        Self {
            verdict: Verdict::Pass,
            vport: 0,
            queue: 0,
            counter: NO_COUNTER,
            copies_count: 0,
            copies: [0; COPIES_MAX],
            data: [0; DATA_BYTES],
        }
    }
}

impl Action {
    /// Vports that copies leave by.
    pub fn copies(&self) -> &[u8] {
        &self.copies[..usize::from(self.copies_count).min(COPIES_MAX)]
    }
}

/// A filter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Filter {
    /// Its number in its vrouter, below [`Welcome::filters_max`].
    pub id: u32,
    /// Of those that a packet meets the highest counts, and of equal ones the oldest.
    pub priority: u32,
    /// What it looks at.
    pub pattern: Pattern,
    /// What it has done.
    pub action: Action,
}

/// How a queue is to be, within what its spec says; what is 0 is as there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct QueueSetting {
    /// At which vport's end it is.
    pub vport: u8,
    /// Which one of these, counted from 1.
    pub queue: u16,
    /// Its part beside others that have frames.
    pub weight: u32,
    /// Frames that may wait in it.
    pub frames: u32,
    /// Bytes that may.
    pub bytes: u32,
}

/// How a queue is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueState {
    /// Its part beside others that have frames.
    pub weight: u32,
    /// Frames that may wait in it.
    pub frames: u32,
    /// Bytes that may; 0: as many as these frames have.
    pub bytes: u32,
    /// Packets that are set aside for it.
    pub buffers: u32,
    /// Frames that wait.
    pub waiting: u32,
    /// Their bytes.
    pub waiting_bytes: u32,
    /// Frames that it let go.
    pub sent: u64,
    /// Their bytes.
    pub sent_bytes: u64,
    /// Frames that were dropped because it was full.
    pub dropped: u64,
}

/// From the program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    /// 1: what it speaks. `u16`: [`VERSION`].
    Hello(u16),
    /// 2: a filter, new, or in the place of the one with its number: `u32` id, `u32` priority, `u8` verdict (0 drop, 1 pass,
    /// 2 send, 3 punt), `u8` vport, `u16` queue, `u32` counter, `u8` count of copies, 3 bytes of zeros, 8 bytes copies, 16 bytes
    /// data, value and mask of 16 bytes each, or of 40.
    Set(Filter),
    /// 3: there is to be no filter with this number: `u32`.
    Remove(u32),
    /// 4: have it in force: `u64` number of the answer. Flag 1: sweep.
    Commit {
        /// Of the answer.
        number: u64,
        /// Remove all filters that were not set since the commit before.
        sweep: bool,
    },
    /// 5: say what these counters have, all at one moment: `u64` number of the answer, `u32` first, `u32` count.
    Counters {
        /// Of the answer.
        number: u64,
        /// The first.
        first: u32,
        /// How many.
        count: u32,
    },
    /// 6: say what filters there are, from this id on: `u64` number of the answer, `u32` id.
    List {
        /// Of the answer.
        number: u64,
        /// The first id.
        first: u32,
    },
    /// 7: a frame: `u8` way (0: as if it came by the vport; 1: out of the vport), `u8` vport, `u16` queue, the frame. It is not
    /// answered; a frame that there is no room for is dropped and counted.
    Frame {
        /// Out of the vport, and not in by it.
        out: bool,
        /// The vport.
        vport: u8,
        /// The port's queue, counted from 1; 0: the port chooses.
        queue: u16,
        /// From Ethernet's header on, without checksum.
        bytes: Vec<u8>,
    },
    /// 8: how a queue is to be, in force with the next commit: `u8` vport, a zero, `u16` queue, `u32` weight, `u32` frames,
    /// `u32` bytes; what is 0 is as its spec says. A commit with `sweep` has all others be as there.
    Queue(QueueSetting),
    /// 9: say how the queues of a vport are, from one on: `u64` number of the answer, `u8` vport, a zero, `u16` the first,
    /// counted from 1.
    Queues {
        /// Of the answer.
        number: u64,
        /// The vport.
        vport: u8,
        /// The first, counted from 1.
        first: u16,
    },
}

/// What there is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Welcome {
    /// [`VERSION`] of the mux.
    pub version: u16,
    /// The engine's code: 0 `ip`, 1 `fields`.
    pub code: u8,
    /// Its vports.
    pub vports: u16,
    /// Which tables these are: after a change of it, none of the filters and counters of before is there.
    pub tables: u64,
    /// Filters that there may be, of each length of patterns.
    pub filters_max: u32,
    /// Counters.
    pub counters: u32,
}

/// What a counter has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counter {
    /// Packets that met filters which count there.
    pub packets: u64,
    /// Bytes of their frames.
    pub bytes: u64,
    /// Those of them that left, after the queue that they waited in. Copies do not count.
    pub sent: u64,
    /// Bytes of their frames, as they left.
    pub sent_bytes: u64,
}

/// To the program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// 129: to a hello. `u16` version, `u8` code, a zero, `u16` vports, 2 zeros, `u64` tables, `u32` filters, `u32` counters.
    Welcome(Welcome),
    /// 130: in force: `u64` number, `u32` filters that there are.
    Done {
        /// Of the commit.
        number: u64,
        /// Filters in force.
        filters: u32,
    },
    /// 131: nothing of it is: `u64` number, `u32` id of the filter, text.
    Refused {
        /// Of what was asked.
        number: u64,
        /// Of which filter; [`NO_FILTER`] where it is about none.
        id: u32,
        /// Why.
        reason: String,
    },
    /// 132: counters: `u64` number, `u32` the first of these, then four `u64` each: packets, bytes, packets that left, their
    /// bytes. Flag 1: more follow.
    Counters {
        /// Of what was asked.
        number: u64,
        /// The first.
        first: u32,
        /// What they have.
        counters: Vec<Counter>,
        /// More follow.
        more: bool,
    },
    /// 133: filters, each as in [`Request::Set`] after its length (`u16`): `u64` number. Flag 1: more follow.
    Filters {
        /// Of what was asked.
        number: u64,
        /// By their ids.
        filters: Vec<Filter>,
        /// More follow.
        more: bool,
    },
    /// 134: it is disconnected: text.
    Bye(String),
    /// 135: queues: `u64` number, `u16` the first of these, 2 zeros, then each: `u32` weight, frames, bytes, buffers, waiting,
    /// bytes of these, `u64` sent, bytes of these, dropped. Flag 1: more follow.
    Queues {
        /// Of what was asked.
        number: u64,
        /// The first, counted from 1.
        first: u16,
        /// How they are; those of one answer are of one moment.
        queues: Vec<QueueState>,
        /// More follow.
        more: bool,
    },
}

/// Why a packet of the socket is no message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wrong {
    /// A message is not as long as it says, or as its kind is.
    Length(u8),
    /// There is no such kind.
    Kind(u8),
    /// There is no such verdict, or way of a frame.
    Choice(u8),
    /// More copies than [`COPIES_MAX`].
    Copies(u8),
    /// Text that is not UTF-8.
    Text,
}

impl fmt::Display for Wrong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Length(kind) => {
                write!(f, "a message of kind {kind} has another length than its contents")
            }
            Self::Kind(kind) => write!(f, "there is no message of kind {kind}"),
            Self::Choice(number) => write!(f, "there is no choice {number}"),
            Self::Copies(count) => write!(f, "{count} copies, {COPIES_MAX} at most"),
            Self::Text => f.write_str("a text is not UTF-8"),
        }
    }
}

impl std::error::Error for Wrong {}

/// Bytes of a message before what it says.
const HEADER_BYTES: usize = 4;

/// Of a counter.
const COUNTER_BYTES: usize = 32;

/// Of a filter, before its pattern.
const FILTER_BYTES: usize = 44;

const MORE: u8 = 1;
const SWEEP: u8 = 1;

/// Takes what it reads off.
struct Reader<'a> {
    kind: u8,
    flags: u8,
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    /// The next message of a packet, which it takes off; `None` at the end.
    fn next(packet: &mut &'a [u8]) -> Result<Option<Self>, Wrong> {
        if packet.is_empty() {
            return Ok(None);
        }
        let (header, _) = packet.split_first_chunk::<HEADER_BYTES>().ok_or(Wrong::Length(0))?;
        let length = usize::from(u16::from_be_bytes([header[0], header[1]]));
        let message = packet.get(..length).ok_or(Wrong::Length(header[2]))?;
        *packet = &packet[length..];
        let rest = message.get(HEADER_BYTES..).ok_or(Wrong::Length(header[2]))?;
        Ok(Some(Self { kind: header[2], flags: header[3], rest }))
    }

    fn bytes<const N: usize>(&mut self) -> Result<[u8; N], Wrong> {
        let (bytes, rest) = self.rest.split_first_chunk().ok_or(Wrong::Length(self.kind))?;
        self.rest = rest;
        Ok(*bytes)
    }

    fn u8(&mut self) -> Result<u8, Wrong> {
        Ok(self.bytes::<1>()?[0])
    }

    fn u16(&mut self) -> Result<u16, Wrong> {
        Ok(u16::from_be_bytes(self.bytes()?))
    }

    fn u32(&mut self) -> Result<u32, Wrong> {
        Ok(u32::from_be_bytes(self.bytes()?))
    }

    fn u64(&mut self) -> Result<u64, Wrong> {
        Ok(u64::from_be_bytes(self.bytes()?))
    }

    fn all(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.rest)
    }

    fn text(&mut self) -> Result<String, Wrong> {
        std::str::from_utf8(self.all()).map(Into::into).map_err(|_| Wrong::Text)
    }

    fn filter(&mut self) -> Result<Filter, Wrong> {
        let (id, priority) = (self.u32()?, self.u32()?);
        let verdict = self.u8()?;
        let verdict = *Verdict::ALL.get(usize::from(verdict)).ok_or(Wrong::Choice(verdict))?;
        let (vport, queue, counter) = (self.u8()?, self.u16()?, self.u32()?);
        let [copies_count, ..] = self.bytes::<4>()?;
        if usize::from(copies_count) > COPIES_MAX {
            return Err(Wrong::Copies(copies_count));
        }
        let (copies, data) = (self.bytes()?, self.bytes()?);
        let pattern = match self.rest.len() {
            32 => Pattern::Short { value: self.bytes()?, mask: self.bytes()? },
            80 => Pattern::Long { value: self.bytes()?, mask: self.bytes()? },
            _ => return Err(Wrong::Length(self.kind)),
        };
        let action = Action { verdict, vport, queue, counter, copies_count, copies, data };
        Ok(Filter { id, priority, pattern, action })
    }

    fn queue(&mut self) -> Result<QueueState, Wrong> {
        Ok(QueueState {
            weight: self.u32()?,
            frames: self.u32()?,
            bytes: self.u32()?,
            buffers: self.u32()?,
            waiting: self.u32()?,
            waiting_bytes: self.u32()?,
            sent: self.u64()?,
            sent_bytes: self.u64()?,
            dropped: self.u64()?,
        })
    }

    /// That nothing is left.
    fn end<T>(self, value: T) -> Result<Option<T>, Wrong> {
        if self.rest.is_empty() { Ok(Some(value)) } else { Err(Wrong::Length(self.kind)) }
    }
}

/// Adds a message to `packet`, whose contents `write` adds.
fn message(packet: &mut Vec<u8>, kind: u8, flags: u8, write: impl FnOnce(&mut Vec<u8>)) {
    let start = packet.len();
    packet.extend([0, 0, kind, flags]);
    write(packet);
    let length = (packet.len() - start) as u16;
    packet[start..start + 2].copy_from_slice(&length.to_be_bytes());
}

impl QueueState {
    fn write(&self, to: &mut Vec<u8>) {
        let Self { weight, frames, bytes, buffers, waiting, waiting_bytes, .. } = *self;
        let short = [weight, frames, bytes, buffers, waiting, waiting_bytes];
        short.iter().for_each(|it| to.extend(it.to_be_bytes()));
        let long = [self.sent, self.sent_bytes, self.dropped];
        long.iter().for_each(|it| to.extend(it.to_be_bytes()));
    }
}

impl Filter {
    /// The same, with no bit of the value that the mask does not have.
    pub fn under_mask(mut self) -> Self {
        match &mut self.pattern {
            Pattern::Short { value, mask } => {
                value.iter_mut().zip(mask).for_each(|(it, mask)| *it &= *mask)
            }
            Pattern::Long { value, mask } => {
                value.iter_mut().zip(mask).for_each(|(it, mask)| *it &= *mask)
            }
        }
        self
    }

    fn write(&self, to: &mut Vec<u8>) {
        let Action { verdict, vport, queue, counter, copies_count, copies, data } = self.action;
        to.extend(self.id.to_be_bytes());
        to.extend(self.priority.to_be_bytes());
        let verdict = Verdict::ALL.iter().position(|it| *it == verdict).unwrap_or(0);
        to.extend([verdict as u8, vport]);
        to.extend(queue.to_be_bytes());
        to.extend(counter.to_be_bytes());
        to.extend([copies_count, 0, 0, 0]);
        to.extend(copies);
        to.extend(data);
        match self.pattern {
            Pattern::Short { value, mask } => {
                to.extend(value);
                to.extend(mask);
            }
            Pattern::Long { value, mask } => {
                to.extend(value);
                to.extend(mask);
            }
        }
    }
}

impl Request {
    /// The next one of a packet, which it takes off; `None` at the end.
    pub fn take(packet: &mut &[u8]) -> Result<Option<Self>, Wrong> {
        let Some(mut from) = Reader::next(packet)? else { return Ok(None) };
        let flags = from.flags;
        let request = match from.kind {
            1 => Self::Hello(from.u16()?),
            2 => Self::Set(from.filter()?),
            3 => Self::Remove(from.u32()?),
            4 => Self::Commit { number: from.u64()?, sweep: flags & SWEEP != 0 },
            5 => Self::Counters { number: from.u64()?, first: from.u32()?, count: from.u32()? },
            6 => Self::List { number: from.u64()?, first: from.u32()? },
            7 => {
                let out = match from.u8()? {
                    0 => false,
                    1 => true,
                    way => return Err(Wrong::Choice(way)),
                };
                let (vport, queue) = (from.u8()?, from.u16()?);
                Self::Frame { out, vport, queue, bytes: from.all().to_vec() }
            }
            8 => {
                let (vport, _, queue) = (from.u8()?, from.u8()?, from.u16()?);
                let (weight, frames, bytes) = (from.u32()?, from.u32()?, from.u32()?);
                Self::Queue(QueueSetting { vport, queue, weight, frames, bytes })
            }
            9 => {
                let (number, vport, _) = (from.u64()?, from.u8()?, from.u8()?);
                Self::Queues { number, vport, first: from.u16()? }
            }
            kind => return Err(Wrong::Kind(kind)),
        };
        from.end(request)
    }

    /// Adds it to a packet.
    pub fn put(&self, packet: &mut Vec<u8>) {
        match self {
            Self::Hello(version) => message(packet, 1, 0, |to| to.extend(version.to_be_bytes())),
            Self::Set(filter) => message(packet, 2, 0, |to| filter.write(to)),
            Self::Remove(id) => message(packet, 3, 0, |to| to.extend(id.to_be_bytes())),
            Self::Commit { number, sweep } => {
                let flags = if *sweep { SWEEP } else { 0 };
                message(packet, 4, flags, |to| to.extend(number.to_be_bytes()));
            }
            Self::Counters { number, first, count } => message(packet, 5, 0, |to| {
                to.extend(number.to_be_bytes());
                to.extend(first.to_be_bytes());
                to.extend(count.to_be_bytes());
            }),
            Self::List { number, first } => message(packet, 6, 0, |to| {
                to.extend(number.to_be_bytes());
                to.extend(first.to_be_bytes());
            }),
            Self::Frame { out, vport, queue, bytes } => message(packet, 7, 0, |to| {
                to.extend([u8::from(*out), *vport]);
                to.extend(queue.to_be_bytes());
                to.extend(bytes);
            }),
            Self::Queue(QueueSetting { vport, queue, weight, frames, bytes }) => {
                message(packet, 8, 0, |to| {
                    to.extend([*vport, 0]);
                    to.extend(queue.to_be_bytes());
                    [weight, frames, bytes].iter().for_each(|it| to.extend(it.to_be_bytes()));
                });
            }
            Self::Queues { number, vport, first } => message(packet, 9, 0, |to| {
                to.extend(number.to_be_bytes());
                to.extend([*vport, 0]);
                to.extend(first.to_be_bytes());
            }),
        }
    }
}

impl Reply {
    /// The next one of a packet, which it takes off; `None` at the end.
    pub fn take(packet: &mut &[u8]) -> Result<Option<Self>, Wrong> {
        let Some(mut from) = Reader::next(packet)? else { return Ok(None) };
        let more = from.flags & MORE != 0;
        let reply = match from.kind {
            129 => {
                let (version, code, _) = (from.u16()?, from.u8()?, from.u8()?);
                let (vports, _, tables) = (from.u16()?, from.u16()?, from.u64()?);
                let (filters_max, counters) = (from.u32()?, from.u32()?);
                Self::Welcome(Welcome { version, code, vports, tables, filters_max, counters })
            }
            130 => Self::Done { number: from.u64()?, filters: from.u32()? },
            131 => Self::Refused { number: from.u64()?, id: from.u32()?, reason: from.text()? },
            132 => {
                let (number, first) = (from.u64()?, from.u32()?);
                let mut counters = Vec::with_capacity(from.rest.len() / COUNTER_BYTES);
                while !from.rest.is_empty() {
                    let (packets, bytes) = (from.u64()?, from.u64()?);
                    let (sent, sent_bytes) = (from.u64()?, from.u64()?);
                    counters.push(Counter { packets, bytes, sent, sent_bytes });
                }
                Self::Counters { number, first, counters, more }
            }
            133 => {
                let (number, mut filters) = (from.u64()?, Vec::new());
                while !from.rest.is_empty() {
                    let length = usize::from(from.u16()?);
                    let rest = from.rest.get(..length).ok_or(Wrong::Length(133))?;
                    from.rest = &from.rest[length..];
                    let mut one = Reader { kind: 133, flags: 0, rest };
                    filters.push(one.filter()?);
                }
                Self::Filters { number, filters, more }
            }
            134 => Self::Bye(from.text()?),
            135 => {
                let (number, first, _) = (from.u64()?, from.u16()?, from.u16()?);
                let mut queues = Vec::new();
                while !from.rest.is_empty() {
                    queues.push(from.queue()?);
                }
                Self::Queues { number, first, queues, more }
            }
            kind => return Err(Wrong::Kind(kind)),
        };
        from.end(reply)
    }

    /// Adds it to a packet. Texts are cut at 1,024 bytes, lists where [`COUNTERS_AT_ONCE`] and [`FILTERS_AT_ONCE`] say.
    pub fn put(&self, packet: &mut Vec<u8>) {
        let text = |text: &str| text.chars().take(TEXT_CHARS_MAX).collect::<String>();
        match self {
            Self::Welcome(it) => message(packet, 129, 0, |to| {
                to.extend(it.version.to_be_bytes());
                to.extend([it.code, 0]);
                to.extend(it.vports.to_be_bytes());
                to.extend([0, 0]);
                to.extend(it.tables.to_be_bytes());
                to.extend(it.filters_max.to_be_bytes());
                to.extend(it.counters.to_be_bytes());
            }),
            Self::Done { number, filters } => message(packet, 130, 0, |to| {
                to.extend(number.to_be_bytes());
                to.extend(filters.to_be_bytes());
            }),
            Self::Refused { number, id, reason } => message(packet, 131, 0, |to| {
                to.extend(number.to_be_bytes());
                to.extend(id.to_be_bytes());
                to.extend(text(reason).bytes());
            }),
            Self::Counters { number, first, counters, more } => {
                Self::put_counters(*number, *first, counters, *more, packet);
            }
            Self::Filters { number, filters, more } => {
                message(packet, 133, u8::from(*more), |to| {
                    to.extend(number.to_be_bytes());
                    for filter in filters.iter().take(FILTERS_AT_ONCE) {
                        let length = FILTER_BYTES + 2 * filter.pattern.bytes();
                        to.extend((length as u16).to_be_bytes());
                        filter.write(to);
                    }
                });
            }
            Self::Bye(why) => message(packet, 134, 0, |to| to.extend(text(why).bytes())),
            Self::Queues { number, first, queues, more } => {
                message(packet, 135, u8::from(*more), |to| {
                    to.extend(number.to_be_bytes());
                    to.extend(first.to_be_bytes());
                    to.extend([0, 0]);
                    queues.iter().take(QUEUES_AT_ONCE).for_each(|queue| queue.write(to));
                });
            }
        }
    }

    /// Adds a [`Self::Counters`] to a packet, of counters that stay where they are.
    pub fn put_counters(
        number: u64,
        first: u32,
        counters: &[Counter],
        more: bool,
        packet: &mut Vec<u8>,
    ) {
        let counters = &counters[..counters.len().min(COUNTERS_AT_ONCE)];
        message(packet, 132, u8::from(more), |to| {
            to.extend(number.to_be_bytes());
            to.extend(first.to_be_bytes());
            to.reserve(counters.len() * COUNTER_BYTES);
            for Counter { packets, bytes, sent, sent_bytes } in counters {
                let all = [packets, bytes, sent, sent_bytes].map(|it| it.to_be_bytes());
                to.extend_from_slice(all.as_flattened());
            }
        });
    }
}

/// Characters of a text.
const TEXT_CHARS_MAX: usize = 256;

impl Pattern {
    /// Bytes of its value, and of its mask.
    pub fn bytes(&self) -> usize {
        match self {
            Self::Short { value, .. } => value.len(),
            Self::Long { value, .. } => value.len(),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    fn pattern() -> impl Strategy<Value = Pattern> {
        let short =
            any::<([u8; 16], [u8; 16])>().prop_map(|(value, mask)| Pattern::Short { value, mask });
        let bytes = || vec(any::<u8>(), 40).prop_map(|it| <[u8; 40]>::try_from(it).unwrap());
        let long = (bytes(), bytes()).prop_map(|(value, mask)| Pattern::Long { value, mask });
        prop_oneof![short, long]
    }

    prop_compose! {
        fn filter()(
            (id, priority, counter, vport, queue) in any::<(u32, u32, u32, u8, u16)>(),
            verdict in prop::sample::select(&Verdict::ALL[..]),
            copies_count in 0..=COPIES_MAX as u8,
            (copies, data) in any::<([u8; 8], [u8; 16])>(),
            pattern in pattern(),
        ) -> Filter {
            let action = Action { verdict, vport, queue, counter, copies_count, copies, data };
            Filter { id, priority, pattern, action }
        }
    }

    fn request() -> impl Strategy<Value = Request> {
        prop_oneof![
            any::<u16>().prop_map(Request::Hello),
            filter().prop_map(Request::Set),
            any::<u32>().prop_map(Request::Remove),
            any::<(u64, bool)>().prop_map(|(number, sweep)| Request::Commit { number, sweep }),
            any::<(u64, u32, u32)>().prop_map(|(number, first, count)| Request::Counters {
                number,
                first,
                count
            }),
            any::<(u64, u32)>().prop_map(|(number, first)| Request::List { number, first }),
            (any::<(bool, u8, u16)>(), vec(any::<u8>(), 0..2000)).prop_map(
                |((out, vport, queue), bytes)| Request::Frame { out, vport, queue, bytes }
            ),
            any::<(u8, u16, u32, u32, u32)>().prop_map(|(vport, queue, weight, frames, bytes)| {
                Request::Queue(QueueSetting { vport, queue, weight, frames, bytes })
            }),
            any::<(u64, u8, u16)>().prop_map(|(number, vport, first)| Request::Queues {
                number,
                vport,
                first
            }),
        ]
    }

    fn reply() -> impl Strategy<Value = Reply> {
        let queue = any::<([u32; 6], [u64; 3])>().prop_map(|(short, long)| {
            let [weight, frames, bytes, buffers, waiting, waiting_bytes] = short;
            let [sent, sent_bytes, dropped] = long;
            let first = QueueState { weight, frames, bytes, ..QueueState::default() };
            QueueState { buffers, waiting, waiting_bytes, sent, sent_bytes, dropped, ..first }
        });
        let counter = any::<[u64; 4]>().prop_map(|[packets, bytes, sent, sent_bytes]| Counter {
            packets,
            bytes,
            sent,
            sent_bytes,
        });
        prop_oneof![
            any::<(u16, u8, u16, u64, u32, u32)>().prop_map(
                |(version, code, vports, tables, filters_max, counters)| Reply::Welcome(Welcome {
                    version,
                    code,
                    vports,
                    tables,
                    filters_max,
                    counters
                })
            ),
            any::<(u64, u32)>().prop_map(|(number, filters)| Reply::Done { number, filters }),
            (any::<(u64, u32)>(), "[a-zü ]{0,50}")
                .prop_map(|((number, id), reason)| Reply::Refused { number, id, reason }),
            (any::<(u64, u32, bool)>(), vec(counter, 0..COUNTERS_AT_ONCE)).prop_map(
                |((number, first, more), counters)| Reply::Counters {
                    number,
                    first,
                    counters,
                    more
                }
            ),
            (any::<(u64, bool)>(), vec(filter(), 0..FILTERS_AT_ONCE))
                .prop_map(|((number, more), filters)| Reply::Filters { number, filters, more }),
            "[a-z ]{0,50}".prop_map(Reply::Bye),
            (any::<(u64, u16, bool)>(), vec(queue, 0..QUEUES_AT_ONCE)).prop_map(
                |((number, first, more), queues)| Reply::Queues { number, first, queues, more }
            ),
        ]
    }

    proptest! {
        #[test]
        fn requests_are_read_as_written(requests in vec(request(), 0..20)) {
            let mut packet = vec![];
            requests.iter().for_each(|request| request.put(&mut packet));
            let mut rest = &packet[..];
            for request in requests {
                prop_assert_eq!(Request::take(&mut rest), Ok(Some(request)));
            }
            prop_assert_eq!(Request::take(&mut rest), Ok(None));
        }

        #[test]
        fn replies_are_read_as_written(reply in reply()) {
            let mut packet = vec![];
            reply.put(&mut packet);
            prop_assert!(packet.len() < PACKET_BYTES_MAX);
            let mut rest = &packet[..];
            prop_assert_eq!(Reply::take(&mut rest), Ok(Some(reply)));
            prop_assert!(rest.is_empty());
        }

        /// Whatever comes is read, or refused; nothing is taken for another message than it would be written as.
        #[test]
        fn nonsense_is_refused(mut packet in vec(any::<u8>(), 0..300), kind in 0..12_u8) {
            if let [high, low, of, ..] = &mut packet[..] {
                (*high, *of) = (0, kind);
                *low = (*low).max(4);
            }
            let mut rest = &packet[..];
            while let Ok(Some(request)) = Request::take(&mut rest) {
                let mut again = vec![];
                request.put(&mut again);
                prop_assert_eq!(Request::take(&mut &again[..]), Ok(Some(request)));
            }
            let mut rest = &packet[..];
            while let Ok(Some(_)) = Reply::take(&mut rest) {}
        }
    }
}
