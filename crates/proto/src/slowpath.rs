//! Slow path channel: a program in a control guest installs filters in the
//! mux's engine, reads counters, and sends frames.
//!
//! The mux listens at a Unix socket that preserves packet boundaries (SOCK_SEQPACKET). A
//! packet holds whole messages, one after the other, and is no longer than
//! [`PACKET_BYTES_MAX`]. A message consists of:
//! - a `u16` with its length in bytes, header included;
//! - a `u8` with its kind;
//! - a `u8` with flags;
//! - the contents that [`SlowPathRequest`] and [`SlowPathReply`] describe.
//!
//! Numbers are big-endian, as in packets. The length of a string follows from that of the message.
//!
//! The program sends [`SlowPathRequest::Hello`] first, and gets [`SlowPathReply::Welcome`]. The mux
//! collects changes ([`SlowPathRequest::Set`], [`SlowPathRequest::Remove`],
//! [`SlowPathRequest::Queue`]) until [`SlowPathRequest::Commit`], which puts all of them into force
//! at once, or none. It answers a commit with [`SlowPathReply::Done`] or
//! [`SlowPathReply::Refused`]. Requests are answered in order. A program that violates the protocol
//! or exceeds a limit gets the reason ([`SlowPathReply::Bye`]) and is disconnected.
//!
//! After a new connection, [`Welcome::tables`] shows if the engine still has the program's
//! earlier filters: if the number differs, it has none. A commit with `sweep` removes everything
//! that was not set since the previous commit on the same connection. So a restarted program sets
//! everything that it wants, and sweeps.
//!
//! Source of filters and their results: Turner et al., "Supercharging
//! PlanetLab", SIGCOMM 2007, sections 2.2 and 4.

use std::fmt;

pub use pdp_model::{FilterCounter, FilterVerdict};

/// Version of this protocol.
pub const VERSION: u16 = 2;

/// Most bytes of a packet of the socket.
pub const PACKET_BYTES_MAX: usize = 1 << 16;

/// Most copies that one filter makes of a packet, beside the packet itself.
pub const COPIES_MAX: usize = 8;

/// Most filters of a vrouter.
pub const FILTERS_MAX: u32 = 131_072;

/// Most counters of a vrouter.
pub const COUNTERS_MAX: u32 = 131_072;

/// Value for no counter.
pub const NO_COUNTER: u32 = u32::MAX;

/// Value for no filter.
pub const NO_FILTER: u32 = u32::MAX;

/// Most queues in one reply; more queues take several replies.
pub const QUEUES_AT_ONCE: usize = 256;

/// Most queues that one commit sets.
pub const QUEUES_SET_MAX: usize = 4096;

/// Most counters in one reply; more counters take several replies.
pub const COUNTERS_AT_ONCE: usize = 1024;

/// Most filters in one reply; more filters take several replies.
pub const FILTERS_AT_ONCE: usize = 256;

/// Most bytes of a frame that a program sends.
pub const FRAME_BYTES_MAX: usize = 2048;

/// Bytes of data in a filter's result, for writing the packet's header.
pub const DATA_BYTES: usize = 16;

/// Pattern of a filter. A packet matches if its bits under the mask equal those of the value.
///
/// For `ip`: source, destination (4 or 16 bytes each), source port, destination port (2
/// bytes each, 0 if the packet has none, and in fragments), protocol, traffic class (a
/// byte each), and the ingress vport (2 bytes). For `fields`: the fields that the
/// vrouter's spec lists, in its order, padded with zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FilterPattern {
    /// For IPv4, or for `fields` of up to 128 bits.
    Short {
        /// Expected bits.
        value: [u8; 16],
        /// Bits that are compared.
        mask: [u8; 16],
    },
    /// For IPv6, or for `fields` of up to 320 bits.
    Long {
        /// Expected bits.
        value: [u8; 40],
        /// Bits that are compared.
        mask: [u8; 40],
    },
}

/// Result of a filter: the treatment of matching packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FilterAction {
    /// Verdict on the packet.
    pub verdict: FilterVerdict,
    /// Egress vport of a sent packet.
    pub vport: u8,
    /// Queue of the egress port, counted from 1; 0: the port chooses.
    pub queue: u16,
    /// Index of its counter; [`NO_COUNTER`]: none.
    pub counter: u32,
    /// Count of valid entries in `copies`, at most [`COPIES_MAX`].
    pub copies_count: u8,
    /// Egress vports of copies. Copies of a sent packet get the same header; others are unchanged.
    pub copies: [u8; COPIES_MAX],
    /// Data for the header of sent packets. For `ip`: the destination MAC address, in the first six
    /// bytes. For `fields`: data that the vrouter's spec writes into the frame.
    pub data: [u8; DATA_BYTES],
}

impl Default for FilterAction {
    fn default() -> Self {
        Self {
            verdict: FilterVerdict::Pass,
            vport: 0,
            queue: 0,
            counter: NO_COUNTER,
            copies_count: 0,
            copies: [0; COPIES_MAX],
            data: [0; DATA_BYTES],
        }
    }
}

impl FilterAction {
    /// Egress vports of copies.
    pub fn copies(&self) -> &[u8] {
        &self.copies[..usize::from(self.copies_count).min(COPIES_MAX)]
    }
}

/// A filter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Filter {
    /// Number in its vrouter, below [`Welcome::filters_max`].
    pub id: u32,
    /// If several filters match, the highest priority wins; among equals, the oldest.
    pub priority: u32,
    /// Packets that it matches.
    pub pattern: FilterPattern,
    /// Treatment of matching packets.
    pub action: FilterAction,
}

/// Settings of a queue, within the bounds of its spec. A value of 0 means the spec's value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct QueueSetting {
    /// Vport of the queue.
    pub vport: u8,
    /// Number of the queue at that vport, counted from 1.
    pub queue: u16,
    /// Weight among queues that have frames.
    pub weight: u32,
    /// Most frames that may wait.
    pub frames: u32,
    /// Most bytes that may wait.
    pub bytes: u32,
}

/// State of a queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueState {
    /// Weight among queues that have frames.
    pub weight: u32,
    /// Most frames that may wait.
    pub frames: u32,
    /// Most bytes that may wait; 0: as many as these frames have.
    pub bytes: u32,
    /// Packets reserved for it.
    pub buffers: u32,
    /// Frames that wait now.
    pub waiting: u32,
    /// Their bytes.
    pub waiting_bytes: u32,
    /// Frames that left the queue.
    pub sent: u64,
    /// Their bytes.
    pub sent_bytes: u64,
    /// Frames dropped because it was full.
    pub dropped: u64,
}

/// Request from the program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SlowPathRequest {
    /// 1: version of the program. `u16`: [`VERSION`].
    Hello(u16),
    /// 2: add a filter, or replace the one with its number.
    ///
    /// `u32` id, `u32` priority, `u8` verdict (0 drop, 1 pass, 2 send, 3 punt), `u8` vport, `u16`
    /// queue, `u32` counter, `u8` count of copies, 3 bytes of zeros, 8 bytes copies, 16 bytes data,
    /// value and mask of 16 bytes each, or of 40.
    Set(Filter),
    /// 3: remove the filter with this number: `u32`.
    Remove(u32),
    /// 4: put the changes into force: `u64` number of the reply. Flag 1: sweep.
    Commit {
        /// Number of the reply.
        number: u64,
        /// Remove all filters that were not set since the previous commit.
        sweep: bool,
    },
    /// 5: return the values of these counters, all at one moment: `u64`
    /// number of the reply, `u32` first, `u32` count.
    Counters {
        /// Number of the reply.
        number: u64,
        /// First counter.
        first: u32,
        /// Count of counters.
        count: u32,
    },
    /// 6: return the filters, from this id on: `u64` number of the reply, `u32` id.
    List {
        /// Number of the reply.
        number: u64,
        /// First id.
        first: u32,
    },
    /// 7: a frame: `u8` direction (0: as if it arrived on the vport; 1: out of
    /// the vport), `u8` vport, `u16` queue, the frame. There is no reply. A
    /// frame that does not fit is dropped and counted.
    Frame {
        /// True if the frame leaves on the vport; false if it arrives on it.
        out: bool,
        /// The vport.
        vport: u8,
        /// Queue of the port, counted from 1; 0: the port chooses.
        queue: u16,
        /// Frame from its Ethernet header on, without checksum.
        bytes: Vec<u8>,
    },
    /// 8: settings of a queue, in force with the next commit.
    ///
    /// `u8` vport, a zero, `u16` queue, `u32` weight, `u32` frames, `u32` bytes. A value of 0 means
    /// the spec's value. A commit with `sweep` resets all other queues to their spec.
    Queue(QueueSetting),
    /// 9: return the state of a vport's queues, from one on: `u64` number of the reply, `u8` vport,
    /// a zero, `u16` first queue, counted from 1.
    Queues {
        /// Number of the reply.
        number: u64,
        /// The vport.
        vport: u8,
        /// First queue, counted from 1.
        first: u16,
    },
}

/// Description of the engine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Welcome {
    /// [`VERSION`] of the mux.
    pub version: u16,
    /// Code of the engine: 0 `ip`, 1 `fields`.
    pub code: u8,
    /// Count of its vports.
    pub vports: u16,
    /// Identity of the tables: after it changes, none of the earlier filters and counters exists.
    pub tables: u64,
    /// Most filters, of all pattern lengths together.
    pub filters_max: u32,
    /// Count of counters.
    pub counters: u32,
}

/// Reply to the program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SlowPathReply {
    /// 129: reply to a hello. `u16` version, `u8` code, a zero, `u16` vports, 2 zeros, `u64`
    /// tables, `u32` filters, `u32` counters.
    Welcome(Welcome),
    /// 130: the commit is in force: `u64` number, `u32` count of filters.
    Done {
        /// Number of the commit.
        number: u64,
        /// Filters in force.
        filters: u32,
    },
    /// 131: nothing of the request is in force: `u64` number, `u32` id of the filter, text.
    Refused {
        /// Number of the request.
        number: u64,
        /// Id of the offending filter; [`NO_FILTER`] if it concerns none.
        id: u32,
        /// Reason.
        reason: String,
    },
    /// 132: counters: `u64` number, `u32` first counter, then four `u64` each: packets, bytes,
    /// packets that left, their bytes. Flag 1: more follow.
    Counters {
        /// Number of the request.
        number: u64,
        /// First counter.
        first: u32,
        /// Values of the counters.
        counters: Vec<FilterCounter>,
        /// More follow.
        more: bool,
    },
    /// 133: filters, each as in [`SlowPathRequest::Set`] after its length
    /// (`u16`): `u64` number. Flag 1: more follow.
    Filters {
        /// Number of the request.
        number: u64,
        /// Filters, by id.
        filters: Vec<Filter>,
        /// More follow.
        more: bool,
    },
    /// 134: the program is disconnected: text.
    Bye(String),
    /// 135: queues: `u64` number, `u16` first queue, 2 zeros, then for each:
    /// `u32` weight, frames, bytes, buffers, waiting, bytes of these, `u64` sent,
    /// bytes of these, dropped. Flag 1: more follow.
    Queues {
        /// Number of the request.
        number: u64,
        /// First queue, counted from 1.
        first: u16,
        /// States of the queues; those of one reply are of one moment.
        queues: Vec<QueueState>,
        /// More follow.
        more: bool,
    },
}

/// Reason why a packet of the socket holds no valid message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MessageError {
    /// The length of a message does not fit its contents or its kind.
    Length(u8),
    /// There is no such kind.
    Kind(u8),
    /// There is no such verdict or direction of a frame.
    Choice(u8),
    /// More copies than [`COPIES_MAX`].
    Copies(u8),
    /// Text that is not UTF-8.
    Text,
}

impl fmt::Display for MessageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Length(kind) => {
                write!(f, "a message of kind {kind} has a wrong length")
            }
            Self::Kind(kind) => write!(f, "unknown message kind {kind}"),
            Self::Choice(number) => write!(f, "unknown choice {number}"),
            Self::Copies(count) => write!(f, "{count} copies, {COPIES_MAX} at most"),
            Self::Text => f.write_str("a text is not UTF-8"),
        }
    }
}

impl std::error::Error for MessageError {}

/// Bytes of a message's header.
const HEADER_BYTES: usize = 4;

/// Bytes of a counter.
const COUNTER_BYTES: usize = 32;

/// Bytes of a filter, without its pattern.
const FILTER_BYTES: usize = 44;

const MORE: u8 = 1;
const SWEEP: u8 = 1;

/// Reads the contents of a message and removes what it has read.
struct MessageReader<'a> {
    kind: u8,
    flags: u8,
    rest: &'a [u8],
}

impl<'a> MessageReader<'a> {
    /// Removes the next message from a packet and returns its reader; `None` at the end.
    fn next(packet: &mut &'a [u8]) -> Result<Option<Self>, MessageError> {
        if packet.is_empty() {
            return Ok(None);
        }
        let (header, _) =
            packet.split_first_chunk::<HEADER_BYTES>().ok_or(MessageError::Length(0))?;
        let length = usize::from(u16::from_be_bytes([header[0], header[1]]));
        let message = packet.get(..length).ok_or(MessageError::Length(header[2]))?;
        *packet = &packet[length..];
        let rest = message.get(HEADER_BYTES..).ok_or(MessageError::Length(header[2]))?;
        Ok(Some(Self { kind: header[2], flags: header[3], rest }))
    }

    fn bytes<const N: usize>(&mut self) -> Result<[u8; N], MessageError> {
        let (bytes, rest) = self.rest.split_first_chunk().ok_or(MessageError::Length(self.kind))?;
        self.rest = rest;
        Ok(*bytes)
    }

    fn u8(&mut self) -> Result<u8, MessageError> {
        Ok(self.bytes::<1>()?[0])
    }

    fn u16(&mut self) -> Result<u16, MessageError> {
        Ok(u16::from_be_bytes(self.bytes()?))
    }

    fn u32(&mut self) -> Result<u32, MessageError> {
        Ok(u32::from_be_bytes(self.bytes()?))
    }

    fn u64(&mut self) -> Result<u64, MessageError> {
        Ok(u64::from_be_bytes(self.bytes()?))
    }

    fn all(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.rest)
    }

    fn text(&mut self) -> Result<String, MessageError> {
        std::str::from_utf8(self.all()).map(Into::into).map_err(|_| MessageError::Text)
    }

    fn filter(&mut self) -> Result<Filter, MessageError> {
        let (id, priority) = (self.u32()?, self.u32()?);
        let verdict = self.u8()?;
        let verdict =
            *FilterVerdict::ALL.get(usize::from(verdict)).ok_or(MessageError::Choice(verdict))?;
        let (vport, queue, counter) = (self.u8()?, self.u16()?, self.u32()?);
        let [copies_count, ..] = self.bytes::<4>()?;
        if usize::from(copies_count) > COPIES_MAX {
            return Err(MessageError::Copies(copies_count));
        }
        let (copies, data) = (self.bytes()?, self.bytes()?);
        let pattern = match self.rest.len() {
            32 => FilterPattern::Short { value: self.bytes()?, mask: self.bytes()? },
            80 => FilterPattern::Long { value: self.bytes()?, mask: self.bytes()? },
            _ => return Err(MessageError::Length(self.kind)),
        };
        let action = FilterAction { verdict, vport, queue, counter, copies_count, copies, data };
        Ok(Filter { id, priority, pattern, action })
    }

    fn queue(&mut self) -> Result<QueueState, MessageError> {
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

    /// Returns `value` if the whole message was read; otherwise an error.
    fn end<T>(self, value: T) -> Result<Option<T>, MessageError> {
        if self.rest.is_empty() { Ok(Some(value)) } else { Err(MessageError::Length(self.kind)) }
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
    /// Returns the filter with all bits of the value cleared that the mask does not have.
    pub fn under_mask(mut self) -> Self {
        match &mut self.pattern {
            FilterPattern::Short { value, mask } => {
                value.iter_mut().zip(mask).for_each(|(it, mask)| *it &= *mask)
            }
            FilterPattern::Long { value, mask } => {
                value.iter_mut().zip(mask).for_each(|(it, mask)| *it &= *mask)
            }
        }
        self
    }

    fn write(&self, to: &mut Vec<u8>) {
        let FilterAction { verdict, vport, queue, counter, copies_count, copies, data } =
            self.action;
        to.extend(self.id.to_be_bytes());
        to.extend(self.priority.to_be_bytes());
        let verdict = FilterVerdict::ALL.iter().position(|it| *it == verdict).unwrap_or(0);
        to.extend([verdict as u8, vport]);
        to.extend(queue.to_be_bytes());
        to.extend(counter.to_be_bytes());
        to.extend([copies_count, 0, 0, 0]);
        to.extend(copies);
        to.extend(data);
        match self.pattern {
            FilterPattern::Short { value, mask } => {
                to.extend(value);
                to.extend(mask);
            }
            FilterPattern::Long { value, mask } => {
                to.extend(value);
                to.extend(mask);
            }
        }
    }
}

impl SlowPathRequest {
    /// Removes the next request from a packet and returns it; `None` at the end.
    pub fn decode(packet: &mut &[u8]) -> Result<Option<Self>, MessageError> {
        let Some(mut from) = MessageReader::next(packet)? else { return Ok(None) };
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
                    choice => return Err(MessageError::Choice(choice)),
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
            kind => return Err(MessageError::Kind(kind)),
        };
        from.end(request)
    }

    /// Appends the request to a packet.
    pub fn encode(&self, packet: &mut Vec<u8>) {
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

impl SlowPathReply {
    /// Removes the next reply from a packet and returns it; `None` at the end.
    pub fn decode(packet: &mut &[u8]) -> Result<Option<Self>, MessageError> {
        let Some(mut from) = MessageReader::next(packet)? else { return Ok(None) };
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
                    counters.push(FilterCounter { packets, bytes, sent, sent_bytes });
                }
                Self::Counters { number, first, counters, more }
            }
            133 => {
                let (number, mut filters) = (from.u64()?, Vec::new());
                while !from.rest.is_empty() {
                    let length = usize::from(from.u16()?);
                    let rest = from.rest.get(..length).ok_or(MessageError::Length(133))?;
                    from.rest = &from.rest[length..];
                    let mut one = MessageReader { kind: 133, flags: 0, rest };
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
            kind => return Err(MessageError::Kind(kind)),
        };
        from.end(reply)
    }

    /// Appends the reply to a packet. Cuts texts at 1,024 bytes, and lists at [`COUNTERS_AT_ONCE`],
    /// [`FILTERS_AT_ONCE`] and [`QUEUES_AT_ONCE`].
    pub fn encode(&self, packet: &mut Vec<u8>) {
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

    /// Appends a [`Self::Counters`] to a packet, without copying the counters first.
    pub fn put_counters(
        number: u64,
        first: u32,
        counters: &[FilterCounter],
        more: bool,
        packet: &mut Vec<u8>,
    ) {
        let counters = &counters[..counters.len().min(COUNTERS_AT_ONCE)];
        message(packet, 132, u8::from(more), |to| {
            to.extend(number.to_be_bytes());
            to.extend(first.to_be_bytes());
            to.reserve(counters.len() * COUNTER_BYTES);
            for FilterCounter { packets, bytes, sent, sent_bytes } in counters {
                let all = [packets, bytes, sent, sent_bytes].map(|it| it.to_be_bytes());
                to.extend_from_slice(all.as_flattened());
            }
        });
    }
}

/// Most characters of a text.
const TEXT_CHARS_MAX: usize = 256;

impl FilterPattern {
    /// Bytes of its value, and as many of its mask.
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

    fn pattern() -> impl Strategy<Value = FilterPattern> {
        let short = any::<([u8; 16], [u8; 16])>()
            .prop_map(|(value, mask)| FilterPattern::Short { value, mask });
        let bytes = || vec(any::<u8>(), 40).prop_map(|it| <[u8; 40]>::try_from(it).unwrap());
        let long = (bytes(), bytes()).prop_map(|(value, mask)| FilterPattern::Long { value, mask });
        prop_oneof![short, long]
    }

    prop_compose! {
        fn filter()(
            (id, priority, counter, vport, queue) in any::<(u32, u32, u32, u8, u16)>(),
            verdict in prop::sample::select(&FilterVerdict::ALL[..]),
            copies_count in 0..=COPIES_MAX as u8,
            (copies, data) in any::<([u8; 8], [u8; 16])>(),
            pattern in pattern(),
        ) -> Filter {
            let action = FilterAction { verdict, vport, queue, counter, copies_count, copies, data };
            Filter { id, priority, pattern, action }
        }
    }

    fn request() -> impl Strategy<Value = SlowPathRequest> {
        prop_oneof![
            any::<u16>().prop_map(SlowPathRequest::Hello),
            filter().prop_map(SlowPathRequest::Set),
            any::<u32>().prop_map(SlowPathRequest::Remove),
            any::<(u64, bool)>()
                .prop_map(|(number, sweep)| SlowPathRequest::Commit { number, sweep }),
            any::<(u64, u32, u32)>().prop_map(|(number, first, count)| SlowPathRequest::Counters {
                number,
                first,
                count
            }),
            any::<(u64, u32)>().prop_map(|(number, first)| SlowPathRequest::List { number, first }),
            (any::<(bool, u8, u16)>(), vec(any::<u8>(), 0..2000)).prop_map(
                |((out, vport, queue), bytes)| SlowPathRequest::Frame { out, vport, queue, bytes }
            ),
            any::<(u8, u16, u32, u32, u32)>().prop_map(|(vport, queue, weight, frames, bytes)| {
                SlowPathRequest::Queue(QueueSetting { vport, queue, weight, frames, bytes })
            }),
            any::<(u64, u8, u16)>().prop_map(|(number, vport, first)| SlowPathRequest::Queues {
                number,
                vport,
                first
            }),
        ]
    }

    fn reply() -> impl Strategy<Value = SlowPathReply> {
        let queue = any::<([u32; 6], [u64; 3])>().prop_map(|(short, long)| {
            let [weight, frames, bytes, buffers, waiting, waiting_bytes] = short;
            let [sent, sent_bytes, dropped] = long;
            let first = QueueState { weight, frames, bytes, ..QueueState::default() };
            QueueState { buffers, waiting, waiting_bytes, sent, sent_bytes, dropped, ..first }
        });
        let counter = any::<[u64; 4]>().prop_map(|[packets, bytes, sent, sent_bytes]| {
            FilterCounter { packets, bytes, sent, sent_bytes }
        });
        prop_oneof![
            any::<(u16, u8, u16, u64, u32, u32)>().prop_map(
                |(version, code, vports, tables, filters_max, counters)| SlowPathReply::Welcome(
                    Welcome { version, code, vports, tables, filters_max, counters }
                )
            ),
            any::<(u64, u32)>()
                .prop_map(|(number, filters)| SlowPathReply::Done { number, filters }),
            (any::<(u64, u32)>(), "[a-zü ]{0,50}")
                .prop_map(|((number, id), reason)| SlowPathReply::Refused { number, id, reason }),
            (any::<(u64, u32, bool)>(), vec(counter, 0..COUNTERS_AT_ONCE)).prop_map(
                |((number, first, more), counters)| SlowPathReply::Counters {
                    number,
                    first,
                    counters,
                    more
                }
            ),
            (any::<(u64, bool)>(), vec(filter(), 0..FILTERS_AT_ONCE)).prop_map(
                |((number, more), filters)| SlowPathReply::Filters { number, filters, more }
            ),
            "[a-z ]{0,50}".prop_map(SlowPathReply::Bye),
            (any::<(u64, u16, bool)>(), vec(queue, 0..QUEUES_AT_ONCE)).prop_map(
                |((number, first, more), queues)| SlowPathReply::Queues {
                    number,
                    first,
                    queues,
                    more
                }
            ),
        ]
    }

    proptest! {
        #[test]
        fn requests_survive_a_round_trip(requests in vec(request(), 0..20)) {
            let mut packet = vec![];
            requests.iter().for_each(|request| request.encode(&mut packet));
            let mut rest = &packet[..];
            for request in requests {
                prop_assert_eq!(SlowPathRequest::decode(&mut rest), Ok(Some(request)));
            }
            prop_assert_eq!(SlowPathRequest::decode(&mut rest), Ok(None));
        }

        #[test]
        fn replies_survive_a_round_trip(reply in reply()) {
            let mut packet = vec![];
            reply.encode(&mut packet);
            prop_assert!(packet.len() < PACKET_BYTES_MAX);
            let mut rest = &packet[..];
            prop_assert_eq!(SlowPathReply::decode(&mut rest), Ok(Some(reply)));
            prop_assert!(rest.is_empty());
        }

        /// Any packet is read or refused. What is read is written the same way again.
        #[test]
        fn invalid_slow_path_messages_are_refused(mut packet in vec(any::<u8>(), 0..300), kind in 0..12_u8) {
            if let [high, low, of, ..] = &mut packet[..] {
                (*high, *of) = (0, kind);
                *low = (*low).max(4);
            }
            let mut rest = &packet[..];
            while let Ok(Some(request)) = SlowPathRequest::decode(&mut rest) {
                let mut again = vec![];
                request.encode(&mut again);
                prop_assert_eq!(SlowPathRequest::decode(&mut &again[..]), Ok(Some(request)));
            }
            let mut rest = &packet[..];
            while let Ok(Some(_)) = SlowPathReply::decode(&mut rest) {}
        }
    }
}
