//! Applies the mirror's messages and reports to it, in bounded pieces and without I/O.

use std::collections::VecDeque;
use std::io;
use std::net::IpAddr;
use std::time::Duration;

use ipnet::IpNet;
use pdp_proto::routes::{FromGuest, ResolvedRoute, ToGuest};

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

/// Part of a router's tables that answers the mirror.
pub trait RouteReport {
    /// Place in a dump.
    type Cursor: Default;
    /// Starts another [`ASKED_TIME`], in which stations may be resolved.
    fn turn_asked(&mut self) {}
    /// Returns neighbours that received frames since they were last returned, at most `count_max`,
    /// and true if there are more.
    fn take_used(&mut self, count_max: usize) -> (Vec<(u16, IpAddr)>, bool);
    /// True if [`Self::take_wanted`] has any.
    fn has_wanted(&self) -> bool;
    /// Returns gateways for [`FromGuest::Wanted`].
    fn take_wanted(&mut self) -> Vec<(u16, IpAddr)>;
    /// Returns the next routes of a dump, at most about `count_max`; none at its end.
    fn dump_some(&self, cursor: &mut Self::Cursor, count_max: usize)
    -> Vec<(IpNet, ResolvedRoute)>;
}

/// Tables that follow a mirror.
pub trait RouteTables {
    /// Type of the part that answers the mirror.
    type Report: RouteReport;
    /// Returns the part that answers the mirror.
    fn report(&mut self) -> &mut Self::Report;
    /// Applies a message, which is neither a barrier nor a dump request.
    fn apply(&mut self, message: ToGuest);
    /// True while frames may pass that see the tables without an applied message. Barriers wait.
    fn is_pending(&self) -> bool {
        false
    }
    /// True if a sweep must finish before the next message.
    fn is_sweeping(&self) -> bool {
        false
    }
    /// Does a part of the sweep.
    fn sweep_some(&mut self) {}
}

impl RouteReport for Fib {
    type Cursor = DumpCursor;

    fn turn_asked(&mut self) {
        self.turn_asked();
    }

    fn take_used(&mut self, count_max: usize) -> (Vec<(u16, IpAddr)>, bool) {
        self.take_used(count_max)
    }

    fn has_wanted(&self) -> bool {
        self.has_wanted()
    }

    fn take_wanted(&mut self) -> Vec<(u16, IpAddr)> {
        self.take_wanted()
    }

    fn dump_some(&self, cursor: &mut DumpCursor, count_max: usize) -> Vec<(IpNet, ResolvedRoute)> {
        self.dump_some(cursor, count_max)
    }
}

impl RouteTables for Fib {
    type Report = Self;

    fn report(&mut self) -> &mut Self {
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
pub struct MirrorFollower<C = DumpCursor> {
    dumps: VecDeque<u64>,
    cursor: C,
    /// Barrier that waits until the tables are in force.
    barrier: Option<u64>,
    used_ns: Option<u64>,
    /// Time when unanswered stations may be resolved again.
    turn_ns: Option<u64>,
    /// Time when wanted gateways may be reported.
    wanted_ns: Option<u64>,
    synced: bool,
    messages: u64,
}

impl<C: Default> MirrorFollower<C> {
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
        !self.dumps.is_empty() || self.barrier.is_some()
    }

    /// Resets after the mirror is gone or replaced.
    pub fn restart(&mut self) {
        self.synced = false;
        self.dumps.clear();
        self.cursor = C::default();
        self.barrier = None;
    }

    /// Continues all pending work. After each message, it stops unless `go_on` returns true.
    pub fn poll(
        &mut self,
        tables: &mut impl RouteTables<Report: RouteReport<Cursor = C>>,
        channel: Option<&mut impl MirrorChannel>,
        now_ns: u64,
        go_on: impl FnMut() -> bool,
    ) -> io::Result<FollowerDeadline> {
        if now_ns >= *self.turn_ns.get_or_insert(now_ns) {
            tables.report().turn_asked();
            self.turn_ns = Some(now_ns + ASKED_TIME.as_nanos() as u64);
        }
        if tables.is_sweeping() {
            tables.sweep_some();
            self.synced = !tables.is_sweeping() && channel.is_some();
            return Ok(FollowerDeadline::Now);
        }
        let Some(channel) = channel else { return Ok(FollowerDeadline::At(None)) };
        let mut more = self.apply_some(tables, channel, go_on)? || tables.is_sweeping();
        more |= self.report_used(tables.report(), channel, now_ns)?;
        channel.flush()?;
        if let Some(&dump) = self.dumps.front() {
            if channel.has_space() {
                self.dump_some(tables.report(), channel, dump)?;
                channel.flush()?;
            }
            // Continue at once if the mirror reads.
            more |= channel.has_space();
        }
        let report = tables.report();
        if report.has_wanted() && self.wanted_ns.is_none_or(|at| now_ns >= at) {
            channel.say(FromGuest::Wanted(report.take_wanted()))?;
            channel.flush()?;
            self.wanted_ns = Some(now_ns + WANTED_INTERVAL.as_nanos() as u64);
        }
        if more {
            return Ok(FollowerDeadline::Now);
        }
        let wanted_ns = self.wanted_ns.filter(|_| report.has_wanted());
        let room_ns = self.is_busy().then(|| now_ns + ROOM_INTERVAL.as_nanos() as u64);
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
            if let Some(number) = self.barrier {
                if tables.is_pending() {
                    return Ok(false);
                }
                self.barrier = None;
                channel.say(FromGuest::Applied(number))?;
            }
            let message = match channel.hear()? {
                MirrorInput::Message(message) => message,
                MirrorInput::Part => return Ok(true),
                MirrorInput::Nothing => return Ok(false),
            };
            self.messages += 1;
            match message {
                ToGuest::Barrier(number) => self.barrier = Some(number),
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
        report: &mut impl RouteReport,
        channel: &mut impl MirrorChannel,
        now_ns: u64,
    ) -> io::Result<bool> {
        let interval_ns = USED_INTERVAL.as_nanos() as u64;
        if now_ns < *self.used_ns.get_or_insert(now_ns + interval_ns) {
            return Ok(false);
        }
        let (used, rest) = report.take_used(USED_STEP);
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
        report: &impl RouteReport<Cursor = C>,
        channel: &mut impl MirrorChannel,
        dump: u64,
    ) -> io::Result<()> {
        let routes = report.dump_some(&mut self.cursor, DUMP_STEP);
        if !routes.is_empty() {
            return channel.say(FromGuest::Table { dump, routes });
        }
        self.dumps.pop_front();
        self.cursor = C::default();
        channel.say(FromGuest::TableEnd(dump))
    }
}
