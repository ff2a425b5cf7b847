//! What is made of what the mirror says, and what it is told, without any input or output: a bounded piece at a time.

use std::collections::VecDeque;
use std::io;
use std::time::Duration;

use pdp_proto::routes::{FromGuest, ToGuest};

use crate::fib::{DumpCursor, Fib};
use crate::neighbour::ASKED_TIME;

/// Routes of one frame of a dump (some 40 bytes each).
const DUMP_STEP: usize = 256;

/// Dumps that the mirror may have asked for and not got.
const DUMPS_MAX: usize = 16;

/// Between two reports of which neighbours are used.
const USED_INTERVAL: Duration = Duration::from_secs(3);

/// Between two reports of which gateways are wanted. The kernel asks for one for 3 s by itself.
const WANTED_INTERVAL: Duration = Duration::from_millis(100);

/// Until it is looked again whether there is room to say more.
const ROOM_INTERVAL: Duration = Duration::from_millis(1);

/// Neighbours of one report.
const USED_STEP: usize = 512;

/// What has come of a look at what the mirror says.
#[derive(Debug)]
pub enum Heard {
    /// A message.
    Message(ToGuest),
    /// Part of one: there may be more.
    Part,
    /// Nothing.
    Nothing,
}

/// The way to a mirror and back. An error ends it.
pub trait Channel {
    /// What the mirror says next.
    fn hear(&mut self) -> io::Result<Heard>;
    /// Whether what can wait may be said now.
    fn has_room(&self) -> bool;
    /// Says something.
    fn say(&mut self, message: FromGuest) -> io::Result<()>;
    /// Brings what was said on its way, as far as that goes at once.
    fn flush(&mut self) -> io::Result<()>;
}

/// Tables that follow a mirror.
pub trait Tables {
    /// Those that are forwarded by.
    fn fib(&mut self) -> &mut Fib;
    /// Takes a message, which is neither a barrier nor a question.
    fn apply(&mut self, message: ToGuest);
    /// Whether something is to be tidied up before the next message.
    fn is_sweeping(&self) -> bool {
        false
    }
    /// Tidies some of it up.
    fn sweep_some(&mut self) {}
}

impl Tables for Fib {
    fn fib(&mut self) -> &mut Fib {
        self
    }

    fn apply(&mut self, message: ToGuest) {
        self.apply(message);
    }

    fn is_sweeping(&self) -> bool {
        self.is_sweeping()
    }

    fn sweep_some(&mut self) {
        self.sweep_some();
    }
}

/// When a follower is to be tended again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Due {
    /// At once: there is more to do.
    Now,
    /// When the mirror has said something, and at this time at the latest, nanoseconds.
    At(Option<u64>),
}

/// Follows a mirror. Times are nanoseconds of any clock that does not go back.
#[derive(Debug, Default)]
pub struct Follower {
    dumps: VecDeque<u64>,
    cursor: DumpCursor,
    used_ns: Option<u64>,
    /// When stations may be asked for that were not answered for.
    turn_ns: Option<u64>,
    /// When gateways that are wanted may be told.
    wanted_ns: Option<u64>,
    synced: bool,
    messages: u64,
}

impl Follower {
    /// Whether a mirror's snapshot is applied in whole.
    pub fn is_synced(&self) -> bool {
        self.synced
    }

    /// Messages applied.
    pub fn messages(&self) -> u64 {
        self.messages
    }

    /// Whether it owes the mirror an answer.
    pub fn is_busy(&self) -> bool {
        !self.dumps.is_empty()
    }

    /// The mirror is gone, or there is another.
    pub fn restart(&mut self) {
        self.synced = false;
        self.dumps.clear();
        self.cursor = DumpCursor::default();
    }

    /// Goes on with whatever is to be done; after each message only as long as `go_on` says.
    pub fn tend(
        &mut self,
        tables: &mut impl Tables,
        channel: Option<&mut impl Channel>,
        now_ns: u64,
        go_on: impl FnMut() -> bool,
    ) -> io::Result<Due> {
        if now_ns >= *self.turn_ns.get_or_insert(now_ns) {
            tables.fib().turn_asked();
            self.turn_ns = Some(now_ns + ASKED_TIME.as_nanos() as u64);
        }
        if tables.is_sweeping() {
            tables.sweep_some();
            self.synced = !tables.is_sweeping() && channel.is_some();
            return Ok(Due::Now);
        }
        let Some(channel) = channel else { return Ok(Due::At(None)) };
        let mut more = self.apply_some(tables, channel, go_on)? || tables.is_sweeping();
        more |= self.tell_used(tables.fib(), channel, now_ns)?;
        channel.flush()?;
        if let Some(&dump) = self.dumps.front() {
            if channel.has_room() {
                self.dump_some(tables.fib(), channel, dump)?;
                channel.flush()?;
            }
            // Goes on at once if the mirror reads.
            more |= channel.has_room();
        }
        let fib = tables.fib();
        if fib.is_wanting() && self.wanted_ns.is_none_or(|at| now_ns >= at) {
            channel.say(FromGuest::Wanted(fib.take_wanted()))?;
            channel.flush()?;
            self.wanted_ns = Some(now_ns + WANTED_INTERVAL.as_nanos() as u64);
        }
        if more {
            return Ok(Due::Now);
        }
        let wanted_ns = self.wanted_ns.filter(|_| fib.is_wanting());
        let room_ns = self.dumps.front().map(|_| now_ns + ROOM_INTERVAL.as_nanos() as u64);
        Ok(Due::At([self.used_ns, wanted_ns, room_ns].into_iter().flatten().min()))
    }

    /// Returns whether there may be messages left.
    fn apply_some(
        &mut self,
        tables: &mut impl Tables,
        channel: &mut impl Channel,
        mut go_on: impl FnMut() -> bool,
    ) -> io::Result<bool> {
        loop {
            let message = match channel.hear()? {
                Heard::Message(message) => message,
                Heard::Part => return Ok(true),
                Heard::Nothing => return Ok(false),
            };
            self.messages += 1;
            match message {
                ToGuest::Barrier(number) => channel.say(FromGuest::Applied(number))?,
                ToGuest::Dump(number) if self.dumps.len() < DUMPS_MAX => {
                    self.dumps.push_back(number);
                }
                ToGuest::Dump(_) => return Err(io::ErrorKind::InvalidData.into()),
                ToGuest::Begin => {
                    self.synced = false;
                    tables.apply(ToGuest::Begin);
                }
                ToGuest::End => {
                    tables.apply(ToGuest::End);
                    self.synced = !tables.is_sweeping();
                }
                message => tables.apply(message),
            }
            if tables.is_sweeping() || !go_on() {
                return Ok(true);
            }
        }
    }

    /// Returns whether there is more to tell.
    fn tell_used(
        &mut self,
        fib: &mut Fib,
        channel: &mut impl Channel,
        now_ns: u64,
    ) -> io::Result<bool> {
        let interval_ns = USED_INTERVAL.as_nanos() as u64;
        if now_ns < *self.used_ns.get_or_insert(now_ns + interval_ns) {
            return Ok(false);
        }
        let (used, rest) = fib.take_used(USED_STEP);
        if !used.is_empty() {
            channel.say(FromGuest::Used(used))?;
        }
        if !rest {
            self.used_ns = Some(now_ns + interval_ns);
        }
        Ok(rest)
    }

    fn dump_some(&mut self, fib: &Fib, channel: &mut impl Channel, dump: u64) -> io::Result<()> {
        let routes = fib.dump_some(&mut self.cursor, DUMP_STEP);
        if !routes.is_empty() {
            return channel.say(FromGuest::Table { dump, routes });
        }
        self.dumps.pop_front();
        self.cursor = DumpCursor::default();
        channel.say(FromGuest::TableEnd(dump))
    }
}
