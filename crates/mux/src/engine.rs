//! The engine: the mux's own forwarding, for vrouters whose data plane is a fast path.
//!
//! A vrouter's frames are decided on in batches where a forwarding guest would get them, and go on to where its
//! completions would: out of a port, to the control guest, or dropped under a reason. Nothing is copied but
//! what is punted.
//!
//! Routes come by a ring from the thread that reads them (`crate::control::routes`), and are applied between two
//! batches, for [`APPLY_CYCLES`] a visit, which the vnet is charged with as with all else. A snapshot is applied to
//! tables of its own, which are exchanged with those in use once it is whole; those of before go back to that thread.

use std::io;
use std::sync::Arc;

use pdp_afxdp::Packet;
use pdp_ip::{Channel, Decision, Due, Fib, Follower, Forwarder, Frames, Heard, Tables};
use pdp_proto::mux;
use pdp_proto::routes::{FromGuest, ToGuest};
use quanta::Clock;
use rtrb::{Consumer, Producer, RingBuffer};

use crate::wake::Wake;

/// Cycles of one visit in which changes of routes are applied; one more than fits is begun.
pub const APPLY_CYCLES: u64 = 50_000;

/// Messages that wait for an engine.
pub const MESSAGES: usize = 1024;

/// Answers of an engine that wait, and how many are to find room before another message is applied.
const ANSWERS: usize = 64;
const ANSWERS_FREE: usize = 8;

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
        let engine = Self {
            spec,
            tables: Exchanged::default(),
            follower: Follower::default(),
            channel,
            due_ns: None,
            fault: None,
        };
        (engine, Source { to, from })
    }

    /// Whether it is the same as another, whose tables are as good.
    pub fn is_as(&self, other: &Self) -> bool {
        (&self.spec.routes, self.spec.memory_bytes) == (&other.spec.routes, other.spec.memory_bytes)
    }

    /// Decides on frames of a node whose first port is `first`; those that go out have the port then that they leave by.
    pub fn process(
        &mut self,
        forwarder: &mut Forwarder,
        first: u16,
        packets: &mut [Packet],
        decisions: &mut [Decision],
    ) {
        forwarder.process(&mut self.tables.fib, &mut Run { first, packets, decisions });
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
    }

    /// When it has to be tended, if it has, nanoseconds.
    pub fn due_ns(&self) -> Option<u64> {
        self.due_ns.filter(|_| !self.is_idle())
    }

    /// How it is.
    pub fn stats(&self) -> mux::EngineStats {
        let (v4, v6) = self.tables.fib.routes_count();
        mux::EngineStats {
            synced: self.follower.is_synced() && self.fault.is_none(),
            routes: (v4 + v6) as u64,
            memory_bytes: self.tables.memory_bytes() as u64,
            messages: self.follower.messages(),
            fault: self.fault.clone(),
            // Known of the vnet.
            used_ns: 0,
        }
    }
}

/// Frames of a node, as the code sees them.
struct Run<'a> {
    first: u16,
    packets: &'a mut [Packet],
    decisions: &'a mut [Decision],
}

impl Frames for Run<'_> {
    #[inline]
    fn count(&self) -> usize {
        self.packets.len()
    }

    #[inline]
    fn vport(&self, frame: usize) -> u16 {
        self.packets[frame].port - self.first
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
        self.decisions[frame] = decision;
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

/// A thread that is rung once more when this goes.
#[derive(Debug)]
struct RungLast(Arc<Wake>);

impl Drop for RungLast {
    fn drop(&mut self) {
        self.0.ring();
    }
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
        let spec = mux::Engine { routes: "/routes".into(), memory_bytes: 1 << 30, power: 0 };
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
