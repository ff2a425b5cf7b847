//! The engine: the mux's own forwarding, for vrouters whose data plane is a fast path.
//!
//! A vrouter's frames are decided on in batches where a forwarding guest would get them, and go on to where its
//! completions would: out of a port, to the control guest, or dropped under a reason. Nothing is copied but
//! what is punted.
//!
//! Where a slow path has filters, they are asked between the rules up to the route and the route
//! ([`crate::actions`], [`crate::slowpath`]).
//!
//! Routes come by a ring from the thread that reads them (`crate::control::routes`), and are applied between two
//! batches, for [`APPLY_CYCLES`] a visit, which the vnet is charged with as with all else. A snapshot is applied to
//! tables of its own, which are exchanged with those in use once it is whole; those of before go back to that thread.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use pdp_afxdp::Packet;
use pdp_filters::{Filters, NONE};
use pdp_ip::{
    Channel, Decision, Due, FRAMES_MAX, Fib, Follower, Forwarder, Frames, Heard, Routed, Tables,
};
use pdp_proto::mux;
use pdp_proto::routes::{FromGuest, ToGuest};
use pdp_proto::slowpath::{Action, Verdict};
use pdp_wire::key;
use pdp_wire::tag::PuntClass;
use quanta::Clock;
use rtrb::{Consumer, Producer, RingBuffer};

use crate::actions::Actions;
use crate::counters::Reason;
use crate::fields::{Fields, Unsent};
use crate::packets::{Batch, Packets};
use crate::slowpath::{Desk, PUNTED_AS, SlowPath, Ways};
use crate::wake::{RungLast, Wake};

/// Cycles of one visit in which changes of routes are applied; one more than fits is begun.
pub const APPLY_CYCLES: u64 = 50_000;

/// Messages that wait for an engine.
pub const MESSAGES: usize = 1024;

/// Answers of an engine that wait, and how many are to find room before another message is applied.
const ANSWERS: usize = 64;
const ANSWERS_FREE: usize = 8;

/// Steps that filters may take for frames which are decided on together, if more than one is.
const STEPS_AT_ONCE: usize = 1 << 15;

/// Until it is looked again whether there is, nanoseconds.
const ROOM_NS: u64 = 1_000_000;

/// Tables that wait to be given back.
const GONE_MAX: usize = 4;

/// For an engine.
#[derive(Debug)]
pub enum ToEngine {
    /// There is a mirror, the one with this number, which knows nothing of what was said before.
    Begin(u32),
    /// It says this.
    Message(ToGuest),
}

/// From an engine.
#[derive(Debug)]
pub enum FromEngine {
    /// It is in use: it wants a mirror, or another one, as the one before was wrong.
    Wants,
    /// For the mirror with this number.
    Message(u32, FromGuest),
    /// Nothing is forwarded by these any more.
    Gone(Box<Fib>),
}

/// The other end of an engine's rings.
#[derive(Debug)]
pub struct Source {
    /// To the engine.
    pub to: Producer<ToEngine>,
    /// From it.
    pub from: Consumer<FromEngine>,
}

/// A vrouter's engine.
#[derive(Debug)]
pub struct Engine {
    spec: mux::Engine,
    tables: Exchanged,
    follower: Follower,
    channel: Rings,
    /// When it is to be tended again at the latest, nanoseconds; `None`: once there is a message.
    due_ns: Option<u64>,
    /// Why it does not follow its mirror.
    fault: Option<String>,
    slowpath: Option<SlowPath>,
    /// For any protocol; without it, IPv4 and IPv6 by routes.
    fields: Option<Fields>,
}

/// What becomes of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// Out of this port.
    Out(u16),
    /// To the control guest.
    Punt(PuntClass),
    /// Dropped.
    Drop(Reason),
}

impl Fate {
    /// Before anything has decided.
    pub const OPEN: Self = Self::Drop(Reason::GuestPolicy);
}

/// Copies that filters make.
#[derive(Debug)]
pub struct Copies<'a> {
    /// Where there are packets.
    pub packets: &'a mut Packets,
    /// The copies, at the ports that they leave by.
    pub made: Batch,
    /// Ports of those that there was no packet for.
    pub missed: Vec<u16>,
    /// Packets that may be taken.
    pub room: usize,
}

impl Engine {
    /// One that is not in use yet, and the other end of its rings, whose thread `reader` rings.
    pub fn new(spec: mux::Engine, reader: Arc<Wake>) -> (Self, Source) {
        let (to, from_source) = RingBuffer::new(MESSAGES);
        let (to_source, from) = RingBuffer::new(ANSWERS);
        let channel = Rings {
            from: from_source,
            to: to_source,
            reader: RungLast(reader),
            state: Following::NotYet,
            mirror: 0,
        };
        let fields = match &spec.code {
            mux::Code::Ip { .. } => None,
            mux::Code::Fields(fields) => Some(Fields::new(fields)),
        };
        let engine = Self {
            spec,
            tables: Exchanged::default(),
            follower: Follower::default(),
            channel,
            due_ns: None,
            fault: None,
            slowpath: None,
            fields,
        };
        (engine, Source { to, from })
    }

    /// Has it obey a slow path, whose thread `reader` rings. Returns the other end.
    pub fn add_slowpath(&mut self, reader: Arc<Wake>) -> Desk {
        let (slowpath, desk) = SlowPath::new(reader);
        self.slowpath = Some(slowpath);
        desk
    }

    /// Whether it is the same as another, whose tables are as good.
    pub fn is_as(&self, other: &Self) -> bool {
        let tables = |engine: &Self| mux::Engine { power: 0, ..engine.spec.clone() };
        tables(self) == tables(other)
    }

    /// Frames that it decides on together at most.
    pub fn frames_at_once(&self) -> usize {
        let Some(actions) = self.actions() else { return FRAMES_MAX };
        let short = actions.short.as_ref().map_or(0, |set| set.steps());
        let long = actions.long.as_ref().map_or(0, |set| set.steps());
        (STEPS_AT_ONCE / short.max(long).max(1)).clamp(1, FRAMES_MAX)
    }

    /// What its slow path has it do, if that is anything.
    fn actions(&self) -> Option<&Actions> {
        let actions = self.slowpath.as_ref()?.actions.as_deref()?;
        (!actions.is_empty()).then_some(actions)
    }

    /// Decides on frames of a node with these ports, which have these link addresses, as many as [`Self::frames_at_once`] says.
    pub fn process(
        &mut self,
        forwarder: &mut Forwarder,
        ports: Range<u16>,
        macs: &[[u8; 6]],
        packets: &mut [Packet],
        fates: &mut [Fate],
        copies: &mut Copies<'_>,
    ) {
        let mut run = Run { ports, macs, packets, fates };
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
            let mut met = meet(set, forwarder.routed_v4(), &run, key::v4);
            forwarder.retain_v4(|packet| match met.next() {
                None | Some(NONE) => true,
                Some(slot) => actions.act(slot, packet, fib, &mut run, copies),
            });
        }
        if let Some(set) = &actions.long {
            let mut met = meet(set, forwarder.routed_v6(), &run, key::v6);
            forwarder.retain_v6(|packet| match met.next() {
                None | Some(NONE) => true,
                Some(slot) => actions.act(slot, packet, fib, &mut run, copies),
            });
        }
        forwarder.route(fib, &mut run);
    }

    /// Counts frames that leave, each with `header_bytes` before it that do not count, by what their filters count with; or,
    /// `back`, that were counted so and did not leave.
    #[inline]
    pub fn count_left(&mut self, frames: &[Packet], header_bytes: usize, back: bool) {
        let actions = self.slowpath.as_mut().and_then(|it| it.actions.as_deref_mut());
        let Some(actions) = actions else { return };
        for packet in frames.iter().filter(|packet| packet.counted != 0) {
            actions.count_left(packet.counted, packet.len() - header_bytes, back);
        }
    }

    /// Cycles that others took for it since this was asked before.
    pub fn take_owed(&self) -> u64 {
        self.slowpath.as_ref().map_or(0, SlowPath::take_owed)
    }

    /// Does what programs of the control guest ask for, for a bounded time. Returns whether there was anything.
    pub fn obey(&mut self, ways: &mut Ways<'_>, clock: &Clock) -> bool {
        let Some(slowpath) = &mut self.slowpath else { return false };
        let end = clock.raw() + APPLY_CYCLES;
        slowpath.tend(ways, || clock.raw() < end)
    }

    /// Applies what the mirror says, for a bounded time, and says what it is to know. Returns whether there was anything.
    pub fn tend(&mut self, now_ns: u64, clock: &Clock) -> bool {
        if self.channel.state == Following::NotYet {
            self.channel.want();
        }
        let is_due = self.due_ns.is_some_and(|due| now_ns >= due);
        let has_nothing = self.channel.from.is_empty() && self.tables.gone.is_empty();
        if !is_due && has_nothing && !self.tables.fib.is_wanting() {
            return false;
        }
        while self.channel.state != Following::Yes {
            match self.channel.from.pop() {
                Ok(ToEngine::Begin(number)) => {
                    self.channel.mirror = number;
                    self.channel.state = Following::Yes;
                    self.follower.restart();
                    self.fault = None;
                }
                // Of a mirror that is to go.
                Ok(ToEngine::Message(_)) => {}
                Err(_) => break,
            }
        }
        self.give_back();
        let end = clock.raw() + APPLY_CYCLES;
        let follows = self.channel.state == Following::Yes && self.tables.gone.len() < GONE_MAX;
        let channel = Some(&mut self.channel).filter(|_| follows);
        let before = self.follower.messages();
        let result = self.follower.tend(&mut self.tables, channel, now_ns, || clock.raw() < end);
        let fault = match result {
            Ok(Due::Now) => {
                self.due_ns = Some(now_ns);
                None
            }
            Ok(Due::At(due_ns)) => {
                // What it has no room to answer now stays where it is.
                let waits = (!self.channel.from.is_empty()).then_some(now_ns + ROOM_NS);
                self.due_ns = due_ns.into_iter().chain(waits).min();
                None
            }
            // It has another one by now.
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {
                self.follower.restart();
                self.due_ns = Some(now_ns);
                None
            }
            Err(error) => Some(format!("its route mirror made no sense: {error}")),
        };
        let (bytes, max) = (self.tables.memory_bytes(), self.spec.memory_bytes);
        let too_many =
            || format!("its routes take {bytes} bytes, {max} at most: raise resources.routes");
        if let Some(fault) = fault.or_else(|| (bytes as u64 > max).then(too_many)) {
            self.tables.gone.extend(self.tables.next.take());
            self.follower.restart();
            self.fault = Some(fault);
            self.channel.want();
        }
        self.give_back();
        self.follower.messages() > before || self.due_ns.is_some_and(|due| now_ns >= due)
    }

    fn give_back(&mut self) {
        while let Some(fib) = self.tables.gone.pop() {
            if let Err(rtrb::PushError::Full(FromEngine::Gone(fib))) =
                self.channel.to.push(FromEngine::Gone(fib))
            {
                self.tables.gone.push(fib);
                break;
            }
            self.channel.reader.0.ring();
        }
    }

    /// Whether nothing waits for it, nor for its mirror.
    pub fn is_idle(&self) -> bool {
        self.channel.from.is_empty()
            && !self.follower.is_busy()
            && self.tables.gone.is_empty()
            && !self.tables.fib.is_wanting()
            && self.channel.state != Following::NotYet
            && self.slowpath.as_ref().is_none_or(SlowPath::is_idle)
    }

    /// When it has to be tended, if it has, nanoseconds.
    pub fn due_ns(&self) -> Option<u64> {
        let works = self.slowpath.as_ref().is_some_and(|it| !it.is_idle());
        if works { Some(0) } else { self.due_ns.filter(|_| !self.is_idle()) }
    }

    /// How it is.
    pub fn stats(&self) -> mux::EngineStats {
        let (v4, v6) = self.tables.fib.routes_count();
        mux::EngineStats {
            synced: (self.follower.is_synced() || self.fields.is_some()) && self.fault.is_none(),
            routes: (v4 + v6) as u64,
            memory_bytes: self.tables.memory_bytes() as u64,
            messages: self.follower.messages(),
            fault: self.fault.clone(),
            slowpath: self.slowpath.as_ref().map(SlowPath::stats),
            // Known of the vnet.
            used_ns: 0,
        }
    }
}

/// The slots of the filters that these packets meet.
fn meet<const W: usize>(
    set: &Filters<W>,
    packets: &[Routed],
    run: &Run<'_>,
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
    /// Does what the filter in a slot says with a packet; whether a route is to decide on it.
    fn act(
        &mut self,
        slot: u32,
        packet: Routed,
        fib: &Fib,
        run: &mut Run<'_>,
        copies: &mut Copies<'_>,
    ) -> bool {
        let (frame, action) = (packet.frame(), self.action(slot));
        run.packets[frame].counted = self.count_packet(action.counter, run.bytes(frame).len());
        run.packets[frame].queue = action.queue;
        if action.verdict == Verdict::Send {
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
    fields: &Fields,
    mut actions: Option<&mut Actions>,
    set_of: impl Fn(&Actions) -> &Option<Box<Filters<W>>>,
    run: &mut Run<'_>,
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
            None => run.fates[frame] = Fate::Drop(Reason::GuestMalformed),
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
                Verdict::Send => run.send_fields(fields, &action, frame, copies),
                _ => run.act_unsent(&action, frame, copies),
            }
        });
        if is_open {
            run.fates[frame] = match fields.punts() {
                true => Fate::Punt(PUNTED_AS),
                false => Fate::Drop(Reason::Unmatched),
            };
        }
    }
}

impl Run<'_> {
    /// Does what a filter says with a frame that it does not send; whether something else is to decide on it.
    fn act_unsent(&mut self, action: &Action, frame: usize, copies: &mut Copies<'_>) -> bool {
        copies.make(action, &self.ports, &self.packets[frame], |_, _| {});
        match action.verdict {
            Verdict::Pass => return true,
            Verdict::Punt => self.fates[frame] = Fate::Punt(PUNTED_AS),
            Verdict::Drop | Verdict::Send => self.fates[frame] = Fate::Drop(Reason::Filtered),
        }
        false
    }

    /// Sends a frame by a filter, with what is to be written. Nothing else is to decide on it.
    fn send_fields(
        &mut self,
        fields: &Fields,
        action: &Action,
        frame: usize,
        copies: &mut Copies<'_>,
    ) -> bool {
        let macs = self.macs;
        let mac = |vport: u8| macs.get(usize::from(vport)).copied();
        let Some(source) = mac(action.vport) else {
            self.fates[frame] = Fate::Drop(Reason::GuestPortDown);
            return false;
        };
        let written = fields.write(self.packets[frame].bytes_mut(), &action.data, &source);
        self.fates[frame] = match written {
            Ok(()) => Fate::Out(action.vport.into()),
            Err(Unsent::Hops) => Fate::Punt(PuntClass::Exception),
            Err(Unsent::Short) => Fate::Drop(Reason::GuestMalformed),
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
    /// Makes those that a filter's result says, which `change` may change.
    fn make(
        &mut self,
        action: &Action,
        ports: &Range<u16>,
        packet: &Packet,
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

/// Frames of a node, as the code sees them.
struct Run<'a> {
    ports: Range<u16>,
    macs: &'a [[u8; 6]],
    packets: &'a mut [Packet],
    fates: &'a mut [Fate],
}

impl Frames for Run<'_> {
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
        // None grows.
        let _ = packet.set_len(bytes.min(packet.len()));
    }

    #[inline]
    fn decide(&mut self, frame: usize, decision: Decision) {
        self.fates[frame] = match decision {
            Decision::Out(vport) => Fate::Out(vport),
            Decision::Punt(class) => Fate::Punt(class),
            Decision::Drop(reason) => Fate::Drop(reason.into()),
        };
    }
}

/// Whether there is a mirror.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Following {
    /// The engine is not in use yet.
    NotYet,
    /// It waits for one.
    No,
    /// It has one.
    Yes,
}

/// The rings to and from the thread that has the connection to the mirror.
#[derive(Debug)]
struct Rings {
    from: Consumer<ToEngine>,
    to: Producer<FromEngine>,
    // Behind the rings: it sees that they are gone.
    reader: RungLast,
    state: Following,
    /// The mirror's number.
    mirror: u32,
}

impl Rings {
    /// Asks for a mirror, once there is room to.
    fn want(&mut self) {
        self.state = match self.to.push(FromEngine::Wants) {
            Ok(()) => Following::No,
            Err(_) => Following::NotYet,
        };
        self.reader.0.ring();
    }
}

impl Channel for Rings {
    fn hear(&mut self) -> io::Result<Heard> {
        if self.to.slots() < ANSWERS_FREE {
            return Ok(Heard::Nothing);
        }
        match self.from.pop() {
            Ok(ToEngine::Message(message)) => Ok(Heard::Message(message)),
            Ok(ToEngine::Begin(number)) => {
                self.mirror = number;
                Err(io::ErrorKind::ConnectionReset.into())
            }
            Err(_) => Ok(Heard::Nothing),
        }
    }

    fn has_room(&self) -> bool {
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

/// Tables in use, and those that a snapshot makes.
#[derive(Debug, Default)]
struct Exchanged {
    fib: Box<Fib>,
    next: Option<Box<Fib>>,
    #[allow(clippy::vec_box, reason = "they are moved as they are, from here to who drops them")]
    gone: Vec<Box<Fib>>,
}

impl Exchanged {
    fn memory_bytes(&self) -> usize {
        self.fib.memory_bytes() + self.next.as_ref().map_or(0, |next| next.memory_bytes())
    }
}

impl Tables for Exchanged {
    fn fib(&mut self) -> &mut Fib {
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
    fn what_finds_no_room_for_its_answer_is_looked_at_soon_again() {
        let spec = mux::Engine {
            code: mux::Code::Ip { routes: "/routes".into() },
            memory_bytes: 1 << 30,
            slowpath: None,
            power: 0,
        };
        let (mut engine, mut source) = Engine::new(spec, Arc::new(Wake::new().unwrap()));
        let clock = Clock::new();
        engine.tend(0, &clock);
        assert!(matches!(source.from.pop(), Ok(FromEngine::Wants)));
        source.to.push(ToEngine::Begin(1)).unwrap();
        for number in 0..200 {
            source.to.push(ToEngine::Message(ToGuest::Barrier(number))).unwrap();
        }
        let (mut now_ns, mut next) = (0, 0);
        while next < 200 {
            while engine.tend(now_ns, &clock) {}
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
