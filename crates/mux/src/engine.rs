//! The engine: the mux's own forwarding, for vrouters whose data plane is a fast path.
//!
//! The engine decides on a vrouter's frames in batches, at the point where a forwarding
//! guest would get them. The frames continue where the guest's completions would: out of a
//! port, to the control guest, or dropped under a reason. Only punted frames are copied.
//!
//! Filters of a slow path are matched after the rules that precede the route
//! look-up, and before that look-up ([`crate::actions`], [`crate::slowpath`]).
//!
//! Routes arrive by a ring from the thread that reads them (`crate::control::routes`).
//! The engine applies them between two batches, for [`APPLY_CYCLES`] a visit, which are
//! charged to the vnet like all other work. A snapshot is applied to new tables. Once
//! complete they replace the tables in use, and the old ones go back to that thread.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use pdp_afxdp::PacketBuffer;
use pdp_filters::{Filters, NONE};
use pdp_ip::{
    Decision, FRAMES_MAX, Fib, FollowerDeadline, FrameBatch, IpForwarder, MirrorChannel,
    MirrorFollower, MirrorInput, RouteTables, Routed,
};
use pdp_model::EngineStats;
use pdp_proto::mux;
use pdp_proto::routes::{FromGuest, ToGuest};
use pdp_proto::slowpath::{FilterAction, FilterVerdict};
use pdp_wire::key;
use pdp_wire::tag::PuntClass;
use quanta::Clock;
use rtrb::{Consumer, Producer, RingBuffer};

use crate::actions::Actions;
use crate::counters::Reason;
use crate::fields::{FieldForwarder, Unsent};
use crate::packets::{PacketBatch, Packets};
use crate::slowpath::{EngineSlowPath, PUNTED_AS, SlowPathHandle, SlowPathOutputs};
use crate::wake::{RungLast, Wake};

/// Cycles of one visit in which route changes are applied. The last change may exceed them.
pub const APPLY_CYCLES: u64 = 50_000;

/// Messages that may be queued for an engine.
pub const MESSAGES: usize = 1024;

/// Answers of an engine that may be queued, and the free
/// places that are required before it applies another message.
const ANSWERS: usize = 64;
const ANSWERS_FREE: usize = 8;

/// Filter steps for frames that are decided on together, if there is more than one frame.
const STEPS_AT_ONCE: usize = 1 << 15;

/// Time until the engine checks again for space in the ring, nanoseconds.
const ROOM_NS: u64 = 1_000_000;

/// Old tables that may wait to be given back.
const GONE_MAX: usize = 4;

/// Message to an engine.
#[derive(Debug)]
pub enum ToEngine {
    /// A new mirror, with this number. It knows nothing of earlier messages.
    Begin(u32),
    /// A message of the mirror.
    Message(ToGuest),
}

/// Message from an engine.
#[derive(Debug)]
pub enum FromEngine {
    /// The engine is in use and needs a mirror, or another one because the last was wrong.
    WantsMirror,
    /// A message for the mirror with this number.
    Message(u32, FromGuest),
    /// Tables that the engine no longer uses.
    RetiredFib(Box<Fib>),
}

/// The other end of an engine's rings.
#[derive(Debug)]
pub struct EngineFeed {
    /// To the engine.
    pub to: Producer<ToEngine>,
    /// From it.
    pub from: Consumer<FromEngine>,
}

/// Forwarding engine of a vrouter.
#[derive(Debug)]
pub struct VrouterEngine {
    spec: mux::EngineConfig,
    tables: Exchanged,
    follower: MirrorFollower,
    channel: Rings,
    /// Time of the next poll at the latest, nanoseconds. `None`: when a message arrives.
    due_ns: Option<u64>,
    /// Reason why it does not follow its mirror.
    fault: Option<String>,
    slowpath: Option<EngineSlowPath>,
    /// Forwarder for any protocol. Without it the engine forwards IPv4 and IPv6 by routes.
    fields: Option<FieldForwarder>,
}

/// Verdict on a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EngineVerdict {
    /// Forward it out of this port.
    Out(u16),
    /// Punt it to the control guest.
    Punt(PuntClass),
    /// Drop it.
    Drop(Reason),
}

impl EngineVerdict {
    /// Initial verdict, before any decision.
    pub const UNDECIDED: Self = Self::Drop(Reason::GuestPolicy);
}

/// Copies that filters make.
#[derive(Debug)]
pub struct Copies<'a> {
    /// Source of free packets.
    pub packets: &'a mut Packets,
    /// The copies, with their egress ports.
    pub made: PacketBatch,
    /// Egress ports of copies that found no free packet.
    pub missed: Vec<u16>,
    /// Packets that copies may take.
    pub room: usize,
}

impl VrouterEngine {
    /// Returns an engine that is not in use yet, and the other end
    /// of its rings. The engine rings `reader`, that end's thread.
    pub fn new(spec: mux::EngineConfig, reader: Arc<Wake>) -> (Self, EngineFeed) {
        let (to, from_source) = RingBuffer::new(MESSAGES);
        let (to_source, from) = RingBuffer::new(ANSWERS);
        let channel = Rings {
            from: from_source,
            to: to_source,
            reader: RungLast(reader),
            state: MirrorState::NotYet,
            mirror: 0,
        };
        let fields = match &spec.code {
            mux::EngineCode::Ip { .. } => None,
            mux::EngineCode::Fields(fields) => Some(FieldForwarder::new(fields)),
        };
        let engine = Self {
            spec,
            tables: Exchanged::default(),
            follower: MirrorFollower::default(),
            channel,
            due_ns: None,
            fault: None,
            slowpath: None,
            fields,
        };
        (engine, EngineFeed { to, from })
    }

    /// Adds a slow path, and returns its other end. The engine rings `reader`, that end's thread.
    pub fn add_slowpath(&mut self, reader: Arc<Wake>) -> SlowPathHandle {
        let (slowpath, desk) = EngineSlowPath::new(reader);
        self.slowpath = Some(slowpath);
        desk
    }

    /// True if the other engine has the same spec, so that its
    /// tables can be kept. The guaranteed power may differ.
    pub fn has_same_spec(&self, other: &Self) -> bool {
        let tables = |engine: &Self| mux::EngineConfig { power: 0, ..engine.spec.clone() };
        tables(self) == tables(other)
    }

    /// Returns how many frames the engine decides on together, at most.
    pub fn frames_at_once(&self) -> usize {
        let Some(actions) = self.actions() else { return FRAMES_MAX };
        let short = actions.short.as_ref().map_or(0, |set| set.steps());
        let long = actions.long.as_ref().map_or(0, |set| set.steps());
        (STEPS_AT_ONCE / short.max(long).max(1)).clamp(1, FRAMES_MAX)
    }

    /// Returns its slow path's filters, if it has any.
    fn actions(&self) -> Option<&Actions> {
        let actions = self.slowpath.as_ref()?.actions.as_deref()?;
        (!actions.is_empty()).then_some(actions)
    }

    /// Decides on frames of a node with these ports and MAC
    /// addresses. Takes at most [`Self::frames_at_once`] frames.
    pub fn process(
        &mut self,
        forwarder: &mut IpForwarder,
        ports: Range<u16>,
        macs: &[[u8; 6]],
        packets: &mut [PacketBuffer],
        verdicts: &mut [EngineVerdict],
        copies: &mut Copies<'_>,
    ) {
        let mut run = EngineBatch { ports, macs, packets, verdicts };
        if let Some(fields) = &self.fields {
            let actions = self.slowpath.as_mut().and_then(|it| it.actions.as_deref_mut());
            return match fields.is_long() {
                false => process_fields::<16, 2>(fields, actions, |it| &it.short, &mut run, copies),
                true => process_fields::<40, 5>(fields, actions, |it| &it.long, &mut run, copies),
            };
        }
        let fib = &mut self.tables.fib;
        let actions = self.slowpath.as_mut().and_then(|it| it.actions.as_deref_mut());
        let Some(actions) = actions.filter(|actions| !actions.is_empty()) else {
            return forwarder.process(fib, &mut run);
        };
        forwarder.classify(fib, &mut run);
        if let Some(set) = &actions.short {
            let mut met = match_filters(set, forwarder.routed_v4(), &run, key::v4);
            forwarder.retain_v4(|packet| match met.next() {
                None | Some(NONE) => true,
                Some(slot) => actions.act(slot, packet, fib, &mut run, copies),
            });
        }
        if let Some(set) = &actions.long {
            let mut met = match_filters(set, forwarder.routed_v6(), &run, key::v6);
            forwarder.retain_v6(|packet| match met.next() {
                None | Some(NONE) => true,
                Some(slot) => actions.act(slot, packet, fib, &mut run, copies),
            });
        }
        forwarder.route(fib, &mut run);
    }

    /// Counts sent frames by the counters of their filters. The first `header_bytes` of each do
    /// not count. With `back`, takes the count back for frames that were not sent after all.
    #[inline]
    pub fn count_sent(&mut self, frames: &[PacketBuffer], header_bytes: usize, back: bool) {
        let actions = self.slowpath.as_mut().and_then(|it| it.actions.as_deref_mut());
        let Some(actions) = actions else { return };
        for packet in frames.iter().filter(|packet| packet.counted != 0) {
            actions.count_sent(packet.counted, packet.len() - header_bytes, back);
        }
    }

    /// Returns the cycles that other threads spent for it since the last call.
    pub fn take_outstanding_cycles(&self) -> u64 {
        self.slowpath.as_ref().map_or(0, EngineSlowPath::take_outstanding_cycles)
    }

    /// Handles requests of the control guest's programs,
    /// for a bounded time. True if there were any.
    pub fn poll_slowpath(&mut self, outputs: &mut SlowPathOutputs<'_>, clock: &Clock) -> bool {
        let Some(slowpath) = &mut self.slowpath else { return false };
        let end = clock.raw() + APPLY_CYCLES;
        slowpath.poll(outputs, || clock.raw() < end)
    }

    /// Applies messages of the mirror and answers them, for a bounded time. True if there was work.
    pub fn poll(&mut self, now_ns: u64, clock: &Clock) -> bool {
        if self.channel.state == MirrorState::NotYet {
            self.channel.request_mirror();
        }
        let is_due = self.due_ns.is_some_and(|due| now_ns >= due);
        let has_nothing = self.channel.from.is_empty() && self.tables.gone.is_empty();
        if !is_due && has_nothing && !self.tables.fib.has_wanted() {
            return false;
        }
        while self.channel.state != MirrorState::Yes {
            match self.channel.from.pop() {
                Ok(ToEngine::Begin(number)) => {
                    self.channel.mirror = number;
                    self.channel.state = MirrorState::Yes;
                    self.follower.restart();
                    self.fault = None;
                }
                // Message of a mirror that the engine no longer wants.
                Ok(ToEngine::Message(_)) => {}
                Err(_) => break,
            }
        }
        self.give_back();
        let end = clock.raw() + APPLY_CYCLES;
        let follows = self.channel.state == MirrorState::Yes && self.tables.gone.len() < GONE_MAX;
        let channel = Some(&mut self.channel).filter(|_| follows);
        let before = self.follower.messages();
        let result = self.follower.poll(&mut self.tables, channel, now_ns, || clock.raw() < end);
        let fault = match result {
            Ok(FollowerDeadline::Now) => {
                self.due_ns = Some(now_ns);
                None
            }
            Ok(FollowerDeadline::At(due_ns)) => {
                // Messages that it has no space to answer now stay in the ring.
                let waits = (!self.channel.from.is_empty()).then_some(now_ns + ROOM_NS);
                self.due_ns = due_ns.into_iter().chain(waits).min();
                None
            }
            // A new mirror has replaced the old one.
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {
                self.follower.restart();
                self.due_ns = Some(now_ns);
                None
            }
            Err(error) => Some(format!("invalid message from its route mirror: {error}")),
        };
        let (bytes, max) = (self.tables.memory_bytes(), self.spec.memory_bytes);
        let too_many =
            || format!("its routes take {bytes} bytes, more than {max} (raise resources.routes)");
        if let Some(fault) = fault.or_else(|| (bytes as u64 > max).then(too_many)) {
            self.tables.gone.extend(self.tables.next.take());
            self.follower.restart();
            self.fault = Some(fault);
            self.channel.request_mirror();
        }
        self.give_back();
        self.follower.messages() > before || self.due_ns.is_some_and(|due| now_ns >= due)
    }

    fn give_back(&mut self) {
        while let Some(fib) = self.tables.gone.pop() {
            if let Err(rtrb::PushError::Full(FromEngine::RetiredFib(fib))) =
                self.channel.to.push(FromEngine::RetiredFib(fib))
            {
                self.tables.gone.push(fib);
                break;
            }
            self.channel.reader.0.ring();
        }
    }

    /// True if no messages wait for it or for its mirror.
    pub fn is_idle(&self) -> bool {
        self.channel.from.is_empty()
            && !self.follower.is_busy()
            && self.tables.gone.is_empty()
            && !self.tables.fib.has_wanted()
            && self.channel.state != MirrorState::NotYet
            && self.slowpath.as_ref().is_none_or(EngineSlowPath::is_idle)
    }

    /// Returns the time of its next poll, nanoseconds, if it needs one.
    pub fn due_ns(&self) -> Option<u64> {
        let works = self.slowpath.as_ref().is_some_and(|it| !it.is_idle());
        if works { Some(0) } else { self.due_ns.filter(|_| !self.is_idle()) }
    }

    /// Returns its state and counters.
    pub fn stats(&self) -> EngineStats {
        let (v4, v6) = self.tables.fib.routes_count();
        EngineStats {
            synced: (self.follower.is_synced() || self.fields.is_some()) && self.fault.is_none(),
            routes: (v4 + v6) as u64,
            memory_bytes: self.tables.memory_bytes() as u64,
            changes: self.follower.messages(),
            fault: self.fault.clone(),
            slowpath: self.slowpath.as_ref().map(EngineSlowPath::stats),
            // The control thread adds the vnet's time, and pdpd the rest.
            ..EngineStats::default()
        }
    }
}

/// Returns the slots of the filters that match these packets.
fn match_filters<const W: usize>(
    set: &Filters<W>,
    packets: &[Routed],
    run: &EngineBatch<'_>,
    key: impl Fn(&[u8], u16) -> [u64; W],
) -> std::array::IntoIter<u32, FRAMES_MAX> {
    let (mut keys, mut slots) = ([[0; W]; FRAMES_MAX], [NONE; FRAMES_MAX]);
    for (packet, to) in packets.iter().zip(&mut keys) {
        *to = key(run.bytes(packet.frame()), run.vport(packet.frame()));
    }
    set.find(&keys[..packets.len()], &mut slots[..packets.len()]);
    slots.into_iter()
}

impl Actions {
    /// Applies the action of the filter in a slot to a
    /// packet. True if the route look-up decides on it.
    fn act(
        &mut self,
        slot: u32,
        packet: Routed,
        fib: &Fib,
        run: &mut EngineBatch<'_>,
        copies: &mut Copies<'_>,
    ) -> bool {
        let (frame, action) = (packet.frame(), self.action(slot));
        run.packets[frame].counted = self.count_packet(action.counter, run.bytes(frame).len());
        run.packets[frame].queue = action.queue;
        if action.verdict == FilterVerdict::Send {
            let to = action.data.first_chunk().copied().unwrap_or_default();
            let decision = packet.send(fib, run, action.vport.into(), to);
            run.decide(frame, decision);
            if matches!(decision, Decision::Out(_)) {
                copies.make(&action, &run.ports, &run.packets[frame], |vport, copy| {
                    let source = fib.vport(vport.into()).map(|vport| vport.mac);
                    if let Some((to, source)) = copy.get_mut(6..12).zip(source) {
                        to.copy_from_slice(&source);
                    }
                });
            }
            return false;
        }
        run.act_unsent(&action, frame, copies)
    }
}

/// Decides on frames of any protocol, by filters with keys of `B` bytes.
fn process_fields<const B: usize, const W: usize>(
    fields: &FieldForwarder,
    mut actions: Option<&mut Actions>,
    set_of: impl Fn(&Actions) -> &Option<Box<Filters<W>>>,
    run: &mut EngineBatch<'_>,
    copies: &mut Copies<'_>,
) {
    let (mut keys, mut slots) = ([[0; W]; FRAMES_MAX], [NONE; FRAMES_MAX]);
    let (mut frames, mut count) = ([0_usize; FRAMES_MAX], 0);
    for frame in 0..run.count() {
        match fields.key::<B, W>(run.bytes(frame), run.vport(frame)) {
            Some(key) => {
                (keys[count], frames[count]) = (key, frame);
                count += 1;
            }
            None => run.verdicts[frame] = EngineVerdict::Drop(Reason::GuestMalformed),
        }
    }
    if let Some(set) = actions.as_deref().and_then(|actions| set_of(actions).as_ref()) {
        set.find(&keys[..count], &mut slots[..count]);
    }
    for (&frame, slot) in frames[..count].iter().zip(slots) {
        let is_open = actions.as_deref_mut().filter(|_| slot != NONE).is_none_or(|actions| {
            let action = actions.action(slot);
            let bytes = run.bytes(frame).len();
            run.packets[frame].counted = actions.count_packet(action.counter, bytes);
            run.packets[frame].queue = action.queue;
            match action.verdict {
                FilterVerdict::Send => run.send_fields(fields, &action, frame, copies),
                _ => run.act_unsent(&action, frame, copies),
            }
        });
        if is_open {
            run.verdicts[frame] = match fields.punts() {
                true => EngineVerdict::Punt(PUNTED_AS),
                false => EngineVerdict::Drop(Reason::Unmatched),
            };
        }
    }
}

impl EngineBatch<'_> {
    /// Applies an action that does not send the frame. True if the next stage decides on it.
    fn act_unsent(&mut self, action: &FilterAction, frame: usize, copies: &mut Copies<'_>) -> bool {
        copies.make(action, &self.ports, &self.packets[frame], |_, _| {});
        match action.verdict {
            FilterVerdict::Pass => return true,
            FilterVerdict::Punt => self.verdicts[frame] = EngineVerdict::Punt(PUNTED_AS),
            FilterVerdict::Drop | FilterVerdict::Send => {
                self.verdicts[frame] = EngineVerdict::Drop(Reason::Filtered)
            }
        }
        false
    }

    /// Sends a frame by an action, after the writes that the spec
    /// asks for. Always returns false: the decision is final.
    fn send_fields(
        &mut self,
        fields: &FieldForwarder,
        action: &FilterAction,
        frame: usize,
        copies: &mut Copies<'_>,
    ) -> bool {
        let macs = self.macs;
        let mac = |vport: u8| macs.get(usize::from(vport)).copied();
        let Some(source) = mac(action.vport) else {
            self.verdicts[frame] = EngineVerdict::Drop(Reason::GuestPortDown);
            return false;
        };
        let written = fields.write(self.packets[frame].bytes_mut(), &action.data, &source);
        self.verdicts[frame] = match written {
            Ok(()) => EngineVerdict::Out(action.vport.into()),
            Err(Unsent::Hops) => EngineVerdict::Punt(PuntClass::Exception),
            Err(Unsent::Short) => EngineVerdict::Drop(Reason::GuestMalformed),
        };
        if written.is_ok() {
            copies.make(action, &self.ports, &self.packets[frame], |vport, copy| {
                mac(vport).iter().for_each(|mac| fields.readdress(copy, mac));
            });
        }
        false
    }
}

impl Copies<'_> {
    /// Makes the copies that an action asks for. `change` may modify them.
    fn make(
        &mut self,
        action: &FilterAction,
        ports: &Range<u16>,
        packet: &PacketBuffer,
        change: impl Fn(u8, &mut [u8]),
    ) {
        for &vport in action.copies() {
            let port = ports.start + u16::from(vport);
            if !ports.contains(&port) {
                continue;
            }
            let copy = match self.room {
                0 => None,
                _ => self.packets.copy_of(packet.bytes(), 0),
            };
            let Some(mut copy) = copy else {
                self.missed.push(port);
                continue;
            };
            self.room -= 1;
            change(vport, copy.bytes_mut());
            let mut copy = copy.at(port.into());
            copy.queue = action.queue;
            self.made.push(copy);
        }
    }
}

/// Frames of a node, as [`FrameBatch`] for the forwarding code.
struct EngineBatch<'a> {
    ports: Range<u16>,
    macs: &'a [[u8; 6]],
    packets: &'a mut [PacketBuffer],
    verdicts: &'a mut [EngineVerdict],
}

impl FrameBatch for EngineBatch<'_> {
    #[inline]
    fn count(&self) -> usize {
        self.packets.len()
    }

    #[inline]
    fn vport(&self, frame: usize) -> u16 {
        self.packets[frame].port - self.ports.start
    }

    #[inline]
    fn bytes(&self, frame: usize) -> &[u8] {
        self.packets[frame].bytes()
    }

    #[inline]
    fn bytes_mut(&mut self, frame: usize) -> &mut [u8] {
        self.packets[frame].bytes_mut()
    }

    #[inline]
    fn cut(&mut self, frame: usize, bytes: usize) {
        let packet = &mut self.packets[frame];
        // Frames never grow here.
        let _ = packet.set_len(bytes.min(packet.len()));
    }

    #[inline]
    fn decide(&mut self, frame: usize, decision: Decision) {
        self.verdicts[frame] = match decision {
            Decision::Out(vport) => EngineVerdict::Out(vport),
            Decision::Punt(class) => EngineVerdict::Punt(class),
            Decision::Drop(reason) => EngineVerdict::Drop(reason.into()),
        };
    }
}

/// State of the connection to a mirror.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MirrorState {
    /// The engine is not in use yet.
    NotYet,
    /// It waits for a mirror.
    No,
    /// It has a mirror.
    Yes,
}

/// Rings to and from the thread that has the mirror's connection.
#[derive(Debug)]
struct Rings {
    from: Consumer<ToEngine>,
    to: Producer<FromEngine>,
    // Declared after the rings, so that the reader finds them abandoned when it is rung.
    reader: RungLast,
    state: MirrorState,
    /// Number of the mirror.
    mirror: u32,
}

impl Rings {
    /// Asks for a mirror, as soon as the ring has space.
    fn request_mirror(&mut self) {
        self.state = match self.to.push(FromEngine::WantsMirror) {
            Ok(()) => MirrorState::No,
            Err(_) => MirrorState::NotYet,
        };
        self.reader.0.ring();
    }
}

impl MirrorChannel for Rings {
    fn hear(&mut self) -> io::Result<MirrorInput> {
        if self.to.slots() < ANSWERS_FREE {
            return Ok(MirrorInput::Nothing);
        }
        match self.from.pop() {
            Ok(ToEngine::Message(message)) => Ok(MirrorInput::Message(message)),
            Ok(ToEngine::Begin(number)) => {
                self.mirror = number;
                Err(io::ErrorKind::ConnectionReset.into())
            }
            Err(_) => Ok(MirrorInput::Nothing),
        }
    }

    fn has_space(&self) -> bool {
        self.to.slots() >= ANSWERS / 2
    }

    fn say(&mut self, message: FromGuest) -> io::Result<()> {
        self.to
            .push(FromEngine::Message(self.mirror, message))
            .map_err(|_| io::Error::from(io::ErrorKind::TimedOut))
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.to.slots() < ANSWERS {
            self.reader.0.ring();
        }
        Ok(())
    }
}

/// Tables in use, and tables that a snapshot fills.
#[derive(Debug, Default)]
struct Exchanged {
    fib: Box<Fib>,
    next: Option<Box<Fib>>,
    #[allow(clippy::vec_box, reason = "the thread that drops them takes the boxes")]
    gone: Vec<Box<Fib>>,
}

impl Exchanged {
    fn memory_bytes(&self) -> usize {
        self.fib.memory_bytes() + self.next.as_ref().map_or(0, |next| next.memory_bytes())
    }
}

impl RouteTables for Exchanged {
    type Report = Fib;

    fn report(&mut self) -> &mut Fib {
        &mut self.fib
    }

    fn apply(&mut self, message: ToGuest) {
        match message {
            ToGuest::Begin => self.gone.extend(self.next.replace(Box::default())),
            ToGuest::End => {
                if let Some(next) = self.next.take() {
                    self.gone.push(std::mem::replace(&mut self.fib, next));
                }
            }
            message => self.next.as_mut().unwrap_or(&mut self.fib).apply(message),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engine_retries_soon_when_answers_do_not_fit() {
        let spec = mux::EngineConfig {
            code: mux::EngineCode::Ip { routes: "/routes".into() },
            memory_bytes: 1 << 30,
            slowpath: None,
            power: 0,
        };
        let (mut engine, mut source) = VrouterEngine::new(spec, Arc::new(Wake::new().unwrap()));
        let clock = Clock::new();
        engine.poll(0, &clock);
        assert!(matches!(source.from.pop(), Ok(FromEngine::WantsMirror)));
        source.to.push(ToEngine::Begin(1)).unwrap();
        for number in 0..200 {
            source.to.push(ToEngine::Message(ToGuest::Barrier(number))).unwrap();
        }
        let (mut now_ns, mut next) = (0, 0);
        while next < 200 {
            while engine.poll(now_ns, &clock) {}
            while let Ok(FromEngine::Message(1, FromGuest::Applied(number))) = source.from.pop() {
                assert_eq!(number, next);
                next += 1;
            }
            let due_ns = engine.due_ns().unwrap_or(now_ns);
            assert!(due_ns <= now_ns + ROOM_NS, "{next} answered, due in {} ns", due_ns - now_ns);
            now_ns = due_ns;
        }
        assert!(engine.is_idle());
    }
}
