//! Whoever is at the other end of a memif connection: forwarding guests, TAP helpers, and programs
//! behind external interfaces.

use std::collections::VecDeque;

use pdp_afxdp::Packet;
use pdp_memif::{Fault, Receiver, Sender};
use pdp_proto::mux::{Attach, Guest as Spec, GuestStats};
use pdp_wire::tag::{self, Tag, Verdict};

use crate::distribute::Guests;
use crate::order::Order;
use crate::packets::Packets;
use crate::ringers::RungFor;
use crate::sleep::{Alarm, Peer, State, WAKE_FRAMES};

/// Frames that a guest can have taken and not completed: both rings and a batch, for rings of any
/// length that memif allows.
pub const OUTSTANDING_MAX: usize = (2 << pdp_memif::RING_LOG2_MAX) + 1024;

/// Frames taken from one ring at a time.
pub const PULL_FRAMES: usize = 256;

/// One connection.
#[derive(Debug)]
pub struct Link {
    /// Frames to the peer.
    pub tx: Sender,
    /// Frames from it.
    pub rx: Receiver,
    /// The connection's number.
    pub epoch: u64,
    /// Whether its doorbell can be relied on, and it is rung once a sleep: programs of our own.
    sure: bool,
    state: State,
    /// When it last sent something, nanoseconds.
    pub(crate) sent_ns: u64,
    /// Whether something was pushed and not shown.
    dirty: bool,
    /// Whether the peer may wait for room.
    full: bool,
}

/// What a peer sent: frames in a row about which it says the same, and their packets in order.
#[derive(Debug, Default)]
pub struct Pulled {
    /// Frames in a row.
    pub runs: Vec<Run>,
    /// The packets of the runs that have any.
    pub packets: Vec<Packet>,
}

/// Frames in a row, or completions without frames.
#[derive(Clone, Copy, Debug)]
pub struct Run {
    /// What the peer says about them.
    pub tag: Tag,
    /// How many.
    pub frames: usize,
    /// Whether there is a packet for each; not where the tag says that no frame follows, or if they
    /// were too long for a packet.
    pub has_packets: bool,
}

impl Pulled {
    /// Frames of all runs.
    pub fn frames(&self) -> usize {
        self.runs.iter().map(|run| run.frames).sum()
    }

    /// Adds what came next.
    #[inline]
    pub fn add(&mut self, tag: Tag, packet: Option<Packet>) {
        let has_packets = packet.is_some();
        self.packets.extend(packet);
        match self.runs.last_mut() {
            Some(run) if (run.tag, run.has_packets) == (tag, has_packets) => run.frames += 1,
            _ => self.runs.push(Run { tag, frames: 1, has_packets }),
        }
    }
}

impl Link {
    /// A connection that the handshake made.
    pub fn new(tx: Sender, rx: Receiver, epoch: u64) -> Self {
        let (sure, state, sent_ns, dirty, full) = Default::default();
        Self { tx, rx, epoch, sure, state, sent_ns, dirty, full }
    }

    /// The peer is a program of our own: its doorbell can be relied on.
    pub fn rely(&mut self) {
        self.tx.ring_once_a_sleep();
        self.sure = true;
    }

    /// Whether its doorbell can be relied on.
    pub fn is_sure(&self) -> bool {
        self.sure
    }

    /// Whether nothing can be there until it rings.
    #[inline]
    pub fn is_armed(&self) -> bool {
        self.state.is_armed()
    }

    /// Copies a frame into the peer's memory, with a tag or zero. False without room.
    #[inline]
    pub fn push(&mut self, tag: u32, frame: &[u8]) -> Result<bool, Fault> {
        self.dirty = true;
        self.tx.push(tag, frame)
    }

    /// Lets the peer see what was pushed, and has it rung for that when it is time, or `at_once`. One that
    /// waits for room is rung once half of its ring was taken: where it shares a CPU with the mux each
    /// ring is two switches between them.
    #[inline]
    pub fn flush(&mut self, alarm: &mut Alarm, at_once: bool) -> Result<(), Fault> {
        let mut state = self.state;
        let flushed = state.flush(self, alarm, at_once);
        self.state = state;
        flushed
    }

    /// Lets the peer ring, which is not looked at any more; false if it has sent something.
    pub fn arm(&mut self, alarm: &mut Alarm) -> Result<bool, Fault> {
        let mut state = self.state;
        let armed = state.arm(self, alarm);
        self.state = state;
        armed
    }

    /// Arms one that has sent nothing for `quiet_ns`, if it can be relied on.
    #[inline]
    pub fn arm_if_quiet(
        &mut self,
        alarm: &mut Alarm,
        now_ns: u64,
        quiet_ns: u64,
    ) -> Result<(), Fault> {
        // One that waits to be rung is when it is time.
        let quiet = self.sure
            && self.state == State::Polled
            && now_ns.saturating_sub(self.sent_ns) >= quiet_ns;
        if quiet { self.arm(alarm).map(|_| ()) } else { Ok(()) }
    }

    /// The peer is looked at from now on, and does not ring.
    pub fn disarm(&mut self, now_ns: u64) {
        let mut state = self.state;
        state.disarm(self);
        self.state = state;
        self.sent_ns = now_ns;
    }

    /// Copies up to `max` frames out of the peer's memory, and no more than there are packets. They
    /// have no tags; `to` gets `None` for one that is longer than a packet.
    pub fn pull(
        &mut self,
        packets: &mut Packets,
        max: usize,
        mut to: impl FnMut(Option<Packet>),
    ) -> Result<(), Fault> {
        let count = self.rx.peek(max.min(packets.free()))?;
        for frame in 0..count {
            to(copy_out(&self.rx, frame, packets));
        }
        if count > 0 {
            self.rx.release(count);
        }
        Ok(())
    }

    /// As [`Link::pull`] on a trunk, where each frame has a tag. Stops before the completion beyond
    /// `completions`, and before what may belong to it. An error is the peer's fault, in words for
    /// it; what came before it was taken.
    pub fn pull_tagged(
        &mut self,
        packets: &mut Packets,
        max: usize,
        mut completions: usize,
        pulled: &mut Pulled,
    ) -> Result<(), String> {
        let count = self.rx.peek(max.min(packets.free())).map_err(|fault| fault.to_string())?;
        let mut taken = 0;
        let mut result = Ok(());
        while taken < count && completions > 0 {
            let tag = match Tag::parse(self.rx.metadata(taken)) {
                Ok(tag) => tag,
                Err(bad) => {
                    result = Err(format!("frame with a bad tag: {bad:x?}"));
                    break;
                }
            };
            let has_frame = matches!(tag.verdict, Verdict::Out | Verdict::Punt(_));
            let packet = if has_frame { copy_out(&self.rx, taken, packets) } else { None };
            pulled.add(tag, packet);
            completions -= usize::from(tag.last);
            taken += 1;
        }
        if taken > 0 {
            self.full |= self.rx.release(taken);
        }
        result
    }
}

impl Peer for Link {
    type Fault = Fault;

    fn show(&mut self) -> Result<bool, Fault> {
        let dirty = std::mem::take(&mut self.dirty);
        if dirty {
            self.tx.show()?;
        }
        Ok(dirty)
    }

    fn is_worth(&self) -> bool {
        self.tx.unheard() >= WAKE_FRAMES.min(self.tx.slots() / 2)
    }

    fn awaits_room(&mut self) -> bool {
        let room = self.full && self.rx.is_half_empty();
        self.full &= !room;
        room
    }

    fn ring(&mut self, alarm: &mut Alarm) -> Result<(), Fault> {
        if let Some(bell) = self.tx.sleeper()?
            && bell.ask()
        {
            match alarm.owner {
                // Its few descriptors make no more waiters than a ring of frames outlasts.
                RungFor::Vnet(_) if bell.is_trusted() => bell.ring()?,
                owner => alarm.bells.push((owner, bell.clone())),
            }
        }
        Ok(())
    }

    fn arm(&mut self) -> bool {
        self.rx.arm()
    }

    fn disarm(&mut self) {
        self.rx.disarm();
    }
}

/// `None` for a frame that is longer than a packet.
#[inline]
fn copy_out(rx: &Receiver, frame: usize, packets: &mut Packets) -> Option<Packet> {
    let mut packet = packets.take()?;
    let room = packet.room_mut();
    if rx.frame_len(frame) > room.len() {
        packets.give(packet);
        return None;
    }
    let got = rx.copy_out(frame, room);
    let _ = packet.set_len(got);
    Some(packet)
}

/// Ports of frames, oldest first: runs of a port (an index in its node) and a count.
#[derive(Debug, Default)]
pub struct Outstanding {
    runs: VecDeque<(u8, u32)>,
    frames: usize,
}

const _: () = assert!(tag::VPORTS_MAX == 256, "a vport is one byte");

impl Outstanding {
    /// Frames in all.
    #[inline]
    pub fn len(&self) -> usize {
        self.frames
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.frames == 0
    }

    /// Adds `frames` of one port.
    #[inline]
    pub fn push(&mut self, port: u8, frames: usize) {
        self.frames += frames;
        match self.runs.back_mut() {
            Some(run) if run.0 == port => run.1 += frames as u32,
            _ => self.runs.push_back((port, frames as u32)),
        }
    }

    /// Takes the oldest `frames` away; false (and nothing done) if there are fewer.
    #[inline]
    pub fn pop(&mut self, mut frames: usize) -> bool {
        if frames > self.frames {
            return false;
        }
        self.frames -= frames;
        while frames > 0
            && let Some(run) = self.runs.front_mut()
        {
            let some = frames.min(run.1 as usize);
            run.1 -= some as u32;
            frames -= some;
            if run.1 == 0 {
                self.runs.pop_front();
            }
        }
        true
    }

    /// Takes all: ports and counts.
    pub fn drain(&mut self) -> impl Iterator<Item = (u8, u32)> {
        self.frames = 0;
        self.runs.drain(..)
    }
}

/// A forwarding guest.
#[derive(Debug)]
pub struct Guest {
    /// As configured.
    pub spec: Spec,
    /// Its connections: one, or by vport for [`Attach::Memif`].
    pub links: Vec<Option<Link>>,
    /// Frames that it has not completed.
    pub outstanding: Outstanding,
    /// Counters but for `connected` and `in_flight`.
    pub stats: GuestStats,
    /// Frames and completions that the mux has taken from it.
    pub(crate) taken: u64,
    pub(crate) silent: Silence,
}

/// For how long a guest has completed nothing.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Silence {
    /// What it had completed, and the mux had taken from it, at the last look.
    completed: u64,
    taken: u64,
    /// Looks in a row at which it had completed no more although it had frames.
    looks: u32,
}

impl Guest {
    /// Counts a breach of the contract, for the tenant to read.
    pub(crate) fn fault(&mut self, fault: String) {
        self.stats.faults += 1;
        self.stats.last_fault = Some(fault);
    }

    /// Not connected yet.
    pub fn new(spec: Spec, ports: usize) -> Self {
        let count = if spec.attach == Attach::Memif { ports } else { 1 };
        Self {
            outstanding: Outstanding::default(),
            spec,
            links: (0..count).map(|_| None).collect(),
            stats: GuestStats::default(),
            taken: 0,
            silent: Silence::default(),
        }
    }

    /// Whether frames can be given to it.
    pub fn is_connected(&self) -> bool {
        self.links.iter().any(Option::is_some)
    }

    /// Whether frames are to be given to it.
    pub fn is_member(&self) -> bool {
        self.is_connected() && !self.spec.leaving
    }

    /// How many completions may be taken from it now. What a guest that has no frame sends is its own,
    /// and waits for nobody.
    #[inline]
    pub fn allowance(&self, order: &Order) -> usize {
        match self.spec.attach {
            Attach::Runtime if !self.outstanding.is_empty() => order.allowance(self.spec.number),
            Attach::Runtime | Attach::Tap | Attach::Memif => 1,
        }
    }

    /// For how many looks in a row it has completed nothing although it had frames. What the mux did not take
    /// from it is none of its silence, but what it sends beside completions is no answer.
    pub fn silence(&mut self) -> u32 {
        let mut links = self.links.iter_mut().flatten();
        let has_sent = links.any(|link| link.rx.peek(1).is_ok_and(|frames| frames > 0));
        let Silence { completed, taken, looks } = self.silent;
        let waits = has_sent && taken == self.taken;
        let owes = !self.outstanding.is_empty() && !waits;
        let looks = if owes && completed == self.stats.completed { looks + 1 } else { 0 };
        self.silent = Silence { completed: self.stats.completed, taken: self.taken, looks };
        looks
    }

    /// Goes on where `old`, the same one, stopped.
    pub fn take_over(&mut self, old: &mut Self) {
        std::mem::swap(&mut self.outstanding, &mut old.outstanding);
        std::mem::swap(&mut self.stats, &mut old.stats);
        (self.taken, self.silent) = (old.taken, old.silent);
        self.links.iter_mut().zip(&mut old.links).for_each(|(place, link)| *place = link.take());
    }
}

impl Guests for [Guest] {
    fn room(&mut self, guest: usize) -> usize {
        let guest = &mut self[guest];
        // A fault shows at the next push, where it is dealt with.
        let rooms = guest.links.iter_mut().flatten().map(|link| link.tx.room().unwrap_or(0));
        rooms.max().unwrap_or(0).min(OUTSTANDING_MAX.saturating_sub(guest.outstanding.len()))
    }

    fn given(&self, guest: usize) -> u64 {
        self[guest].stats.to_guest
    }

    fn done(&self, guest: usize) -> u64 {
        self[guest].stats.to_guest - self[guest].outstanding.len() as u64
    }
}
