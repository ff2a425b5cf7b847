//! Applies the mirror's messages and reports to it, in bounded pieces and without I/O.

use std::collections::VecDeque;
use std::io;
use std::time::Duration;

use pdp_proto::routes::{FromGuest, ToGuest};

use crate::fib::{DumpCursor, Fib};
use crate::neighbour::ASKED_TIME;

/// Routes per frame of a dump (some 40 bytes each).
const DUMP_STEP: usize = 256;

/// Maximum number of requested dumps that are pending.
const DUMPS_MAX: usize = 16;

/// Interval between reports of used neighbours.
const USED_INTERVAL: Duration = Duration::from_secs(3);

/// Interval between requests for gateways. After one request, the kernel tries for 3 s.
const WANTED_INTERVAL: Duration = Duration::from_millis(100);

/// Interval between checks for space to report more.
const ROOM_INTERVAL: Duration = Duration::from_millis(1);

/// Neighbours per report.
const USED_STEP: usize = 512;

/// Result of reading from the mirror.
#[derive(Debug)]
pub enum MirrorInput {
    /// A message.
    Message(ToGuest),
    /// A part of a message; there may be more.
    Part,
    /// Nothing.
    Nothing,
}

/// Connection to a mirror. An error ends it.
pub trait MirrorChannel {
    /// Reads the mirror's next message.
    fn hear(&mut self) -> io::Result<MirrorInput>;
    /// True if deferrable messages may be sent now.
    fn has_space(&self) -> bool;
    /// Sends a message.
    fn say(&mut self, message: FromGuest) -> io::Result<()>;
    /// Writes pending messages, as far as possible without blocking.
    fn flush(&mut self) -> io::Result<()>;
}

/// Tables that follow a mirror.
pub trait RouteTables {
    /// Returns the tables for forwarding.
    fn fib(&mut self) -> &mut Fib;
    /// Applies a message, which is neither a barrier nor a dump request.
    fn apply(&mut self, message: ToGuest);
    /// True if a sweep must finish before the next message.
    fn is_sweeping(&self) -> bool {
        false
    }
    /// Does a part of the sweep.
    fn sweep_some(&mut self) {}
}

impl RouteTables for Fib {
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

/// Deadline for polling a follower again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FollowerDeadline {
    /// Immediately, since there is more to do.
    Now,
    /// When the mirror has sent something, or at this time at the latest, nanoseconds.
    At(Option<u64>),
}

/// Follows a mirror. Times are nanoseconds of any monotonic clock.
#[derive(Debug, Default)]
pub struct MirrorFollower {
    dumps: VecDeque<u64>,
    cursor: DumpCursor,
    used_ns: Option<u64>,
    /// Time when unanswered stations may be resolved again.
    turn_ns: Option<u64>,
    /// Time when wanted gateways may be reported.
    wanted_ns: Option<u64>,
    synced: bool,
    messages: u64,
}

impl MirrorFollower {
    /// True if a mirror's snapshot is completely applied.
    pub fn is_synced(&self) -> bool {
        self.synced
    }

    /// Number of applied messages.
    pub fn messages(&self) -> u64 {
        self.messages
    }

    /// True if an answer to the mirror is pending.
    pub fn is_busy(&self) -> bool {
        !self.dumps.is_empty()
    }

    /// Resets after the mirror is gone or replaced.
    pub fn restart(&mut self) {
        self.synced = false;
        self.dumps.clear();
        self.cursor = DumpCursor::default();
    }

    /// Continues all pending work. After each message, it stops unless `go_on` returns true.
    pub fn poll(
        &mut self,
        tables: &mut impl RouteTables,
        channel: Option<&mut impl MirrorChannel>,
        now_ns: u64,
        go_on: impl FnMut() -> bool,
    ) -> io::Result<FollowerDeadline> {
        if now_ns >= *self.turn_ns.get_or_insert(now_ns) {
            tables.fib().turn_asked();
            self.turn_ns = Some(now_ns + ASKED_TIME.as_nanos() as u64);
        }
        if tables.is_sweeping() {
            tables.sweep_some();
            self.synced = !tables.is_sweeping() && channel.is_some();
            return Ok(FollowerDeadline::Now);
        }
        let Some(channel) = channel else { return Ok(FollowerDeadline::At(None)) };
        let mut more = self.apply_some(tables, channel, go_on)? || tables.is_sweeping();
        more |= self.report_used(tables.fib(), channel, now_ns)?;
        channel.flush()?;
        if let Some(&dump) = self.dumps.front() {
            if channel.has_space() {
                self.dump_some(tables.fib(), channel, dump)?;
                channel.flush()?;
            }
            // Continue at once if the mirror reads.
            more |= channel.has_space();
        }
        let fib = tables.fib();
        if fib.has_wanted() && self.wanted_ns.is_none_or(|at| now_ns >= at) {
            channel.say(FromGuest::Wanted(fib.take_wanted()))?;
            channel.flush()?;
            self.wanted_ns = Some(now_ns + WANTED_INTERVAL.as_nanos() as u64);
        }
        if more {
            return Ok(FollowerDeadline::Now);
        }
        let wanted_ns = self.wanted_ns.filter(|_| fib.has_wanted());
        let room_ns = self.dumps.front().map(|_| now_ns + ROOM_INTERVAL.as_nanos() as u64);
        Ok(FollowerDeadline::At([self.used_ns, wanted_ns, room_ns].into_iter().flatten().min()))
    }

    /// Returns true if there may be more messages.
    fn apply_some(
        &mut self,
        tables: &mut impl RouteTables,
        channel: &mut impl MirrorChannel,
        mut go_on: impl FnMut() -> bool,
    ) -> io::Result<bool> {
        loop {
            let message = match channel.hear()? {
                MirrorInput::Message(message) => message,
                MirrorInput::Part => return Ok(true),
                MirrorInput::Nothing => return Ok(false),
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

    /// Returns true if there is more to report.
    fn report_used(
        &mut self,
        fib: &mut Fib,
        channel: &mut impl MirrorChannel,
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

    fn dump_some(
        &mut self,
        fib: &Fib,
        channel: &mut impl MirrorChannel,
        dump: u64,
    ) -> io::Result<()> {
        let routes = fib.dump_some(&mut self.cursor, DUMP_STEP);
        if !routes.is_empty() {
            return channel.say(FromGuest::Table { dump, routes });
        }
        self.dumps.pop_front();
        self.cursor = DumpCursor::default();
        channel.say(FromGuest::TableEnd(dump))
    }
}
