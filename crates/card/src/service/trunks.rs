//! Frames between the routers' trunks and the card's lines.
//!
//! A router's vport is at port `vport % PORTS` of the card, on a segment of its own. A frame stays
//! in its trunk's buffer: the card reads it from there, and writes the frame that leaves to it. The
//! card's verdicts come in the order of the frames, and so do the frames of each of its queues. So
//! frames need no number on the card.

use std::collections::{HashSet, VecDeque};
use std::path::Path;

use pdp_memif::{Buf, ClientError, ConnectionState, MemifClient, MemifSettings};
use pdp_wire::tag::{GuestDrop, PuntClass, Tag, TagVerdict};

use crate::CardVerdict;
use crate::card::{CardLines, FrameMeta, HOST_LINE, LINES, LineBeat, LineFrame, PORTS};
use crate::driver::CARD_VPORTS;
use crate::header::FRAME_BYTES_MAX;
use crate::table::MacAddress;

/// Beats that wait at the lines. More would only delay frames of other routers.
const WAITING_BEATS: usize = 64;

/// Beats that a router may use the card for in its turn, times its weight: the longest frame.
const QUANTUM: i64 = 28;

/// Stations of a router that are remembered as used; others look unused for a while.
const USED_STATIONS: usize = 4096;

/// Trunk of 1,024 frames each way.
const TRUNK: MemifSettings =
    MemifSettings { ring_log2: 10, buffer_bytes: 2048, headroom_bytes: 64, buffers: 3072 };

/// Segment of a router's vport.
pub(super) fn segment_of(ve: u8, vport: u8) -> u16 {
    u16::from(ve) * u16::from(CARD_VPORTS) + u16::from(vport)
}

/// Port of a router's vport.
pub(super) fn port_of(vport: u8) -> u8 {
    vport % PORTS
}

/// Name of a frame on the card.
#[derive(Clone, Copy, Debug)]
struct FrameId {
    ve: u8,
    number: u64,
}

/// A frame between its arrival and its completion.
#[derive(Debug)]
struct TrunkFrame {
    buf: Buf,
    vport: u8,
    trace: u8,
    /// The mux that sent it is gone, and expects no completion.
    orphan: bool,
    /// Verdict, and its vport.
    verdict: Option<(TagVerdict, u8)>,
}

/// Counters of a trunk's frames.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct TrunkCounters {
    pub(super) received: u64,
    pub(super) forwarded: u64,
    pub(super) punted: u64,
    pub(super) dropped: u64,
}

/// A router's connection to the mux.
#[derive(Debug)]
pub(super) struct Trunk {
    client: MemifClient,
    /// Frames on the card, and those behind them that are decided, in order of arrival.
    frames: VecDeque<TrunkFrame>,
    /// Number of the first one.
    first: u64,
    weight: u8,
    /// Beats that the router may still send in its turn; negative after a long frame.
    balance: i64,
    used: HashSet<(u8, MacAddress)>,
    /// A frame was punted since its neighbour is unknown.
    wants_neighbour: bool,
    counters: TrunkCounters,
}

impl Trunk {
    pub(super) fn client(&mut self) -> &mut MemifClient {
        &mut self.client
    }

    pub(super) fn connection(&self) -> &MemifClient {
        &self.client
    }

    pub(super) fn set_weight(&mut self, weight: u8) {
        self.weight = weight.max(1);
    }

    pub(super) fn counters(&self) -> TrunkCounters {
        self.counters
    }

    /// True if none of its frames is on the card.
    pub(super) fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    /// Takes the stations to which frames were sent, by vport and MAC address.
    pub(super) fn take_used(&mut self) -> HashSet<(u8, MacAddress)> {
        std::mem::take(&mut self.used)
    }

    /// True if a neighbour was unknown since the last call.
    pub(super) fn take_wants(&mut self) -> bool {
        std::mem::take(&mut self.wants_neighbour)
    }

    /// Connects, notices a mux that is gone, and returns the state of the connection.
    pub(super) fn look_after(&mut self) -> ConnectionState {
        let was_up = self.client.link() == ConnectionState::Up;
        let state = self.client.poll();
        if !was_up || state != ConnectionState::Up {
            // A new mux knows nothing of the frames of an old one.
            self.frames.iter_mut().for_each(|frame| frame.orphan = true);
        }
        state
    }

    fn frame(&mut self, number: u64) -> Option<&mut TrunkFrame> {
        self.frames.get_mut(number.checked_sub(self.first)? as usize)
    }

    /// Takes the next frame from the mux; returns its number, vport, and bytes, or `None` in place
    /// of these if it does not enter the card.
    fn receive(&mut self) -> Option<Option<(u64, u8, usize)>> {
        // Each frame needs room for its completion.
        if self.client.room() <= self.frames.len() {
            return None;
        }
        let (mut first, mut rest) = (None, Vec::new());
        self.client.receive_each(1, |buf| match first {
            None => first = Some(buf),
            Some(_) => rest.push(buf),
        });
        let buf = first?;
        let is_chain = !rest.is_empty();
        rest.into_iter().for_each(|buf| self.client.free(buf));
        self.counters.received += 1;
        let tag = Tag::parse(buf.metadata()).ok();
        let tag = tag.filter(|tag| tag.verdict == TagVerdict::Deliver);
        let (vport, trace) = tag.map_or((0, 0), |tag| (tag.vport, tag.trace));
        let verdict = if tag.is_none() || is_chain || buf.is_empty() {
            Some(TagVerdict::Drop(GuestDrop::Malformed))
        } else if vport >= CARD_VPORTS || buf.len() > FRAME_BYTES_MAX {
            // The card has no such vport, or no room for it.
            Some(TagVerdict::Punt(PuntClass::Exception))
        } else {
            None
        };
        let (number, bytes) = (self.first + self.frames.len() as u64, buf.len());
        let verdict = verdict.map(|verdict| (verdict, vport));
        let enters = verdict.is_none();
        self.frames.push_back(TrunkFrame { buf, vport, trace, orphan: false, verdict });
        Some(enters.then_some((number, vport, bytes)))
    }

    /// Sends the completions of the first frames that have a verdict.
    fn complete(&mut self) {
        let mut sent = false;
        while let Some((verdict, vport)) = self.frames.front().and_then(|frame| frame.verdict)
            && let Some(frame) = self.frames.pop_front()
        {
            self.first += 1;
            let TrunkFrame { mut buf, trace, orphan, .. } = frame;
            match verdict {
                TagVerdict::Out => self.counters.forwarded += 1,
                TagVerdict::Punt(_) => self.counters.punted += 1,
                _ => {
                    self.counters.dropped += 1;
                    buf.set_len(0);
                }
            }
            buf.set_metadata(Tag { verdict, vport, last: true, trace }.emit());
            let refused = if orphan { Some(buf) } else { self.client.send(buf).err() };
            if let Some(buf) = refused {
                self.client.free(buf);
            }
            sent = true;
        }
        if sent {
            self.client.flush();
        }
    }
}

/// The trunks of all routers, and their frames on the card.
#[derive(Debug)]
pub(super) struct TrunkLines {
    /// By VE.
    trunks: Vec<Option<Trunk>>,
    /// VE whose turn it is.
    turn: usize,
    beat_bytes: usize,
    waiting_beats: usize,
    /// Frames that wait to enter, by line.
    waiting: [VecDeque<FrameId>; LINES],
    /// Bytes of the first waiting frame that have entered.
    entered: [usize; LINES],
    /// Frames that have entered and have no verdict, by line.
    undecided: [VecDeque<FrameId>; LINES],
    /// Frames in the card's queues, by line and slot: VE, or behind all VEs.
    queued: Vec<VecDeque<FrameId>>,
    /// Bytes of the frame that is leaving, by line.
    left: [usize; LINES],
    /// Frames that are on the card or wait for it.
    inside: usize,
}

/// Returns the class of a punted frame's verdict, or the reason of a dropped frame's; `None` for a
/// frame that leaves by a vport.
fn fate(verdict: CardVerdict) -> Option<Result<PuntClass, GuestDrop>> {
    Some(match verdict {
        CardVerdict::Out => return None,
        CardVerdict::PuntLocal => Ok(PuntClass::Local),
        CardVerdict::PuntNeighbour => Ok(PuntClass::Neighbour),
        CardVerdict::PuntException => Ok(PuntClass::Exception),
        CardVerdict::PuntHook => Ok(PuntClass::Hook),
        CardVerdict::PuntControl => Ok(PuntClass::Control),
        CardVerdict::DropNotForUs | CardVerdict::DropNoVe => Err(GuestDrop::NotForUs),
        CardVerdict::DropMalformed => Err(GuestDrop::Malformed),
        CardVerdict::DropPolicy | CardVerdict::DropRate | CardVerdict::DropSpoof => {
            Err(GuestDrop::Policy)
        }
        CardVerdict::DropBlackhole => Err(GuestDrop::Blackhole),
        CardVerdict::DropQueue => Err(GuestDrop::NoBuffer),
    })
}

impl TrunkLines {
    /// Makes lines of a card with this number of VEs and bytes per beat, without trunks.
    pub(super) fn new(ves: u32, beat_bytes: usize) -> Self {
        let queues = LINES * (ves as usize + 1);
        Self {
            trunks: (0..ves).map(|_| None).collect(),
            turn: 0,
            beat_bytes,
            waiting_beats: 0,
            waiting: Default::default(),
            entered: [0; LINES],
            undecided: Default::default(),
            queued: (0..queues).map(|_| VecDeque::new()).collect(),
            left: [0; LINES],
            inside: 0,
        }
    }

    /// Adds a router's trunk to the mux that listens at `path`, which need not exist yet.
    pub(super) fn add(&mut self, ve: u8, path: &Path, weight: u8) -> Result<(), ClientError> {
        let client = MemifClient::new(path, 0, "pdp-card", TRUNK)?;
        self.trunks[usize::from(ve)] = Some(Trunk {
            client,
            frames: VecDeque::new(),
            first: 0,
            weight: weight.max(1),
            balance: 0,
            used: HashSet::new(),
            wants_neighbour: false,
            counters: TrunkCounters::default(),
        });
        Ok(())
    }

    /// Removes a router's trunk, once none of its frames is on the card.
    pub(super) fn remove(&mut self, ve: u8) {
        let trunk = &mut self.trunks[usize::from(ve)];
        debug_assert!(trunk.as_ref().is_none_or(Trunk::is_empty), "frames of VE {ve}");
        *trunk = None;
    }

    pub(super) fn trunk(&mut self, ve: u8) -> Option<&mut Trunk> {
        self.trunks[usize::from(ve)].as_mut()
    }

    pub(super) fn all(&self) -> impl Iterator<Item = &Trunk> {
        self.trunks.iter().flatten()
    }

    pub(super) fn all_mut(&mut self) -> impl Iterator<Item = &mut Trunk> {
        self.trunks.iter_mut().flatten()
    }

    /// True if no frame is on the card or waits for it.
    pub(super) fn is_empty(&self) -> bool {
        self.inside == 0
    }

    /// Takes frames from the trunks until enough wait at the lines, by deficit round robin
    /// (Shreedhar and Varghese 1995). `is_open` tells of which VEs.
    pub(super) fn feed(&mut self, is_open: impl Fn(u8) -> bool) {
        let mut empty = 0;
        while empty < self.trunks.len() && self.waiting_beats < WAITING_BEATS {
            let ve = self.turn as u8;
            let Some(trunk) = self.trunks[self.turn].as_mut().filter(|_| is_open(ve)) else {
                empty += 1;
                self.turn = (self.turn + 1) % self.trunks.len();
                continue;
            };
            if trunk.balance <= 0 {
                trunk.balance += QUANTUM * i64::from(trunk.weight);
            }
            let mut is_dry = false;
            while trunk.balance > 0 && self.waiting_beats < WAITING_BEATS {
                let Some(entering) = trunk.receive() else {
                    is_dry = true;
                    trunk.balance = trunk.balance.min(0);
                    break;
                };
                empty = 0;
                let Some((number, vport, bytes)) = entering else {
                    trunk.balance -= 1;
                    continue;
                };
                let beats = bytes.div_ceil(self.beat_bytes);
                trunk.balance -= beats as i64;
                self.waiting_beats += beats;
                self.inside += 1;
                self.waiting[usize::from(port_of(vport))].push_back(FrameId { ve, number });
            }
            if is_dry || trunk.balance <= 0 {
                empty += usize::from(is_dry);
                self.turn = (self.turn + 1) % self.trunks.len();
            }
        }
    }

    /// Sends all completions that are due.
    pub(super) fn complete(&mut self) {
        self.all_mut().for_each(Trunk::complete);
    }

    fn finish(&mut self, id: FrameId, verdict: TagVerdict, vport: Option<u8>) {
        self.inside -= 1;
        let frame = self.trunk(id.ve).and_then(|trunk| trunk.frame(id.number));
        if let Some(frame) = frame {
            frame.verdict = Some((verdict, vport.unwrap_or(frame.vport)));
        }
    }

    fn queue(&mut self, line: u8, meta: &FrameMeta) -> &mut VecDeque<FrameId> {
        let slot = if meta.owned { usize::from(meta.ve) } else { self.trunks.len() };
        &mut self.queued[usize::from(line) * (self.trunks.len() + 1) + slot]
    }
}

impl CardLines for TrunkLines {
    fn next(&self, line: u8) -> Option<LineFrame<'_>> {
        let line = usize::from(line);
        let id = self.waiting[line].front()?;
        let trunk = self.trunks[usize::from(id.ve)].as_ref()?;
        let frame = trunk.frames.get((id.number - trunk.first) as usize)?;
        let rest = &trunk.client.bytes(&frame.buf)[self.entered[line]..];
        Some(LineFrame { rest, user: segment_of(id.ve, frame.vport) })
    }

    fn enter(&mut self, line: u8, bytes: usize, _cycle: u64) {
        let at = usize::from(line);
        self.waiting_beats -= 1;
        self.entered[at] += bytes;
        let Some(&id) = self.waiting[at].front() else { return };
        let length = self.trunk(id.ve).and_then(|trunk| Some(trunk.frame(id.number)?.buf.len()));
        if length == Some(self.entered[at]) {
            self.entered[at] = 0;
            self.undecided[at].extend(self.waiting[at].pop_front());
        }
    }

    fn decide(&mut self, line: u8, meta: FrameMeta) {
        let Some(id) = self.undecided[usize::from(line)].pop_front() else { return };
        match fate(meta.verdict) {
            None => self.queue(port_of(meta.vport), &meta).push_back(id),
            Some(Ok(_)) => self.queue(HOST_LINE, &meta).push_back(id),
            Some(Err(reason)) => self.finish(id, TagVerdict::Drop(reason), None),
        }
    }

    fn leave(&mut self, beat: LineBeat<'_>, _cycle: u64) {
        let line = usize::from(beat.line);
        let Some(&id) = self.queue(beat.line, &beat.meta).front() else { return };
        let from = self.left[line];
        let to = from + beat.bytes.len();
        self.left[line] = if beat.last { 0 } else { to };
        let Some(trunk) = self.trunks[usize::from(id.ve)].as_mut() else { return };
        let Some(at) = id.number.checked_sub(trunk.first) else { return };
        let Trunk { client, frames, used, wants_neighbour, .. } = trunk;
        let Some(frame) = frames.get_mut(at as usize) else { return };
        // A frame never leaves longer than it entered.
        let bytes = client.bytes_mut(&mut frame.buf);
        if let Some(place) = bytes.get_mut(from..to) {
            place.copy_from_slice(beat.bytes);
        }
        if !beat.last {
            return;
        }
        let (verdict, vport) = match fate(beat.meta.verdict) {
            Some(Ok(class)) => {
                *wants_neighbour |= class == PuntClass::Neighbour;
                (TagVerdict::Punt(class), None)
            }
            _ => {
                if let Some(&station) = bytes.first_chunk()
                    && used.len() < USED_STATIONS
                {
                    used.insert((beat.meta.vport, station));
                }
                (TagVerdict::Out, Some(beat.meta.vport))
            }
        };
        frame.buf.set_len(to);
        self.queue(beat.line, &beat.meta).pop_front();
        self.finish(id, verdict, vport);
    }
}
