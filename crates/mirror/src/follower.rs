//! Keeps the [`Table`] equal to the kernel: reads notifications, and dumps where they don't do.
//!
//! Promises that notifications are always read first, whatever else there is to do. Two sockets:
//! one for notifications, one for the dump that runs. Their order to each other is found so:
//! - a dump begins after the queue of notifications was found empty, so that all before it is
//!   applied (and after a loss: so that the kernel has begun to queue again);
//! - a part of a dump is applied after the queue was found empty again, so that a change that
//!   the part already shows is known as such;
//! - what a notification touched while the dump runs is taken from the notifications.
//!
//! A change between the kernel's writing a part and our reading it escapes none of these; where
//! a dump ran beside changes it is repeated, after a pause, until one ran alone.
//!
//! Limits: [`NOTIFICATIONS_MAX`] read in one go; dumps take at most half of the time.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use crate::kernel::{Event, Kind, Placement, messages};
use crate::netlink::{Netlink, Received};
use crate::table::Table;

/// Notifications read before guests are told of them.
pub const NOTIFICATIONS_MAX: usize = 16_384;

/// Between reading notifications and reading more. What comes meanwhile is told at once: telling
/// costs mirror and guest some ten microseconds, whether of one change or of a hundred.
const GATHER: Duration = Duration::from_micros(500);

/// Datagrams of a dump applied before guests are told of them; one has up to 32 KiB.
const DUMP_DATAGRAMS_MAX: usize = 16;

/// Pause before a dump that did not run alone is repeated; doubles up to `PAUSE_MAX`.
const PAUSE_MIN: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_secs(60);

/// Dumps beside changes after which the first table counts as whole.
const FIRST_PASSES_MAX: u32 = 3;

/// A dump that runs.
pub struct DumpRun {
    kind: Kind,
    socket: Netlink,
    interrupted: bool,
}

/// What a part of a dump gave.
pub enum Part {
    /// Things that are there; more follow.
    Events(Vec<Event>),
    /// The last things; whether the kernel said that they changed meanwhile.
    Last(Vec<Event>, bool),
    /// The dump failed; it may do so no longer later.
    Failed,
}

impl DumpRun {
    /// Asks the kernel for a dump.
    pub fn start(kind: Kind) -> io::Result<Self> {
        let socket = Netlink::requests()?;
        socket.send(&kind.request(1))?;
        Ok(Self { kind, socket, interrupted: false })
    }

    /// The next part.
    pub fn part(&mut self) -> io::Result<Part> {
        // The kernel writes the next part while the last is read, so the queue has always one.
        let Received::Datagram(datagram) = self.socket.receive()? else { return Ok(Part::Failed) };
        let mut events = Vec::new();
        for message in messages(datagram) {
            self.interrupted |= message.flags & libc::NLM_F_DUMP_INTR as u16 != 0;
            match i32::from(message.kind) {
                libc::NLMSG_ERROR | libc::NLMSG_DONE => {
                    return Ok(match message.error() {
                        // There is no such table yet, or no such thing in this kernel.
                        0 | libc::ENOENT | libc::EOPNOTSUPP | libc::EAFNOSUPPORT => {
                            Part::Last(events, self.interrupted)
                        }
                        error => {
                            let error = io::Error::from_raw_os_error(error);
                            tracing::warn!(kind = ?self.kind, %error, "the kernel's dump failed");
                            Part::Failed
                        }
                    });
                }
                _ => events.extend(message.event()),
            }
        }
        Ok(Part::Events(events))
    }
}

/// See the module.
pub struct Follower {
    notifications: Netlink,
    /// The mirror's copy.
    pub table: Table,
    run: Option<DumpRun>,
    /// What was read of the dump and waits for the queue of notifications to be empty.
    part: Option<Part>,
    /// What the pass that runs has still to dump.
    left: BTreeSet<Kind>,
    /// What the next pass has to dump.
    wanted: BTreeSet<Kind>,
    /// What ran beside changes in this pass.
    unclean: BTreeSet<Kind>,
    pass_started: Instant,
    not_before: Instant,
    pause: Duration,
    retry_at: Option<Instant>,
    passes: u32,
    ready: bool,
    /// The queue of notifications was empty at the end of the last step.
    drained: bool,
    /// When notifications are read next.
    read_at: Instant,
    /// What made the last change of a nexthop object.
    nexthop_request: Option<(u32, u32)>,
    /// Times that routes were dumped after the first time.
    pub resyncs: u64,
    /// Notifications read.
    pub notifications_count: u64,
    /// Times that notifications were lost.
    pub overruns: u64,
}

impl Follower {
    /// Follows the kernel of the network namespace that the process is in.
    pub fn new(table: Table, receive_bytes: usize) -> io::Result<Self> {
        let now = Instant::now();
        Ok(Self {
            notifications: Netlink::notifications(receive_bytes)?,
            table,
            run: None,
            part: None,
            left: BTreeSet::new(),
            wanted: Kind::ALL.into(),
            unclean: BTreeSet::new(),
            pass_started: now,
            not_before: now,
            pause: PAUSE_MIN,
            retry_at: None,
            passes: 0,
            ready: false,
            drained: false,
            read_at: now,
            nexthop_request: None,
            resyncs: 0,
            notifications_count: 0,
            overruns: 0,
        })
    }

    /// Whether the copy was whole once.
    pub fn is_ready(&self) -> bool {
        self.ready
    }

    /// Whether the copy is the kernel's as of the last step, as far as can be known.
    pub fn is_settled(&self) -> bool {
        let dumps = [&self.left, &self.wanted, &self.unclean];
        self.ready
            && self.drained
            && self.run.is_none()
            && dumps.iter().all(|kinds| kinds.is_empty())
            && !self.table.has_suspects()
    }

    /// When [`Self::step`] has something to do without a notification.
    pub fn due(&self) -> Option<Instant> {
        if self.run.is_some() || !self.left.is_empty() {
            return Some(Instant::now());
        }
        let wanted = (!self.wanted.is_empty()).then_some(self.not_before);
        let gathered = (!self.listens()).then_some(self.read_at);
        let times = [wanted, self.retry_at, gathered, self.table.expiry()];
        times.into_iter().flatten().min()
    }

    /// Whether a notification is a reason for [`Self::step`]: those that come shortly after others
    /// wait, unless a dump does.
    pub fn listens(&self) -> bool {
        self.run.is_some() || !self.left.is_empty() || Instant::now() >= self.read_at
    }

    /// Reads notifications and goes on with dumps. Returns when the first notification was read.
    pub fn step(&mut self) -> io::Result<Option<Instant>> {
        if !self.listens() {
            self.drained = false;
            return Ok(None);
        }
        let (mut first, mut drained) = self.read()?;
        for _ in 0..DUMP_DATAGRAMS_MAX {
            if !drained || !self.dump_step()? {
                break;
            }
            let read;
            (read, drained) = self.read()?;
            first = first.or(read);
            if drained {
                self.apply_part();
            }
        }
        self.drained = drained;
        if first.is_some() && drained {
            self.read_at = Instant::now() + GATHER;
        }
        Ok(first)
    }

    /// Reads notifications; true if there are no more.
    fn read(&mut self) -> io::Result<(Option<Instant>, bool)> {
        let mut first = None;
        for _ in 0..NOTIFICATIONS_MAX {
            match self.notifications.receive()? {
                Received::Empty => return Ok((first, true)),
                Received::Lost => {
                    self.overruns += 1;
                    self.start_over();
                }
                Received::Datagram(datagram) => {
                    first.get_or_insert_with(Instant::now);
                    self.notifications_count += 1;
                    for message in messages(datagram) {
                        if message.is_nexthop() {
                            self.nexthop_request = message.request();
                        }
                        let again = message.request().is_some()
                            && message.request() == self.nexthop_request;
                        match message.event() {
                            Some(Event::Route(route, _)) if again => {
                                self.table.apply(&Event::Route(route, Placement::Again));
                            }
                            Some(event) => self.table.apply(&event),
                            None => {}
                        }
                    }
                }
            }
        }
        Ok((first, false))
    }

    /// Everything is to be dumped (again).
    fn start_over(&mut self) {
        if self.run.take().is_some() {
            self.table.abort();
        }
        self.part = None;
        self.left.clear();
        self.wanted = Kind::ALL.into();
    }

    /// Reads a part of the dump that runs, or starts the next; false if there is nothing to do.
    fn dump_step(&mut self) -> io::Result<bool> {
        if self.part.is_some() {
            return Ok(true);
        }
        if let Some(run) = &mut self.run {
            self.part = Some(run.part()?);
            return Ok(true);
        }
        if self.left.is_empty() && !self.next_pass() {
            return Ok(false);
        }
        if let Some(kind) = self.left.pop_first() {
            self.table.begin(kind);
            self.run = Some(DumpRun::start(kind)?);
        }
        Ok(true)
    }

    fn next_pass(&mut self) -> bool {
        let now = Instant::now();
        self.table.expire(now);
        self.wanted.extend(self.table.take_suspects());
        if self.retry_at.is_some_and(|at| at <= now) {
            self.retry_at = None;
            self.wanted.append(&mut self.unclean);
        }
        if self.wanted.is_empty() || now < self.not_before {
            return false;
        }
        self.left = std::mem::take(&mut self.wanted);
        let routes = self.left.iter().any(|kind| matches!(kind, Kind::Routes(..)));
        self.resyncs += u64::from(routes && self.passes > 0);
        tracing::debug!(pass = self.passes, kinds = ?self.left, "dumps begin");
        self.pass_started = now;
        true
    }

    fn apply_part(&mut self) {
        let Some(part) = self.part.take() else { return };
        let (events, end) = match part {
            Part::Events(events) => (events, None),
            Part::Last(events, interrupted) => (events, Some(interrupted)),
            Part::Failed => {
                self.table.abort();
                return self.end_run(false);
            }
        };
        events.into_iter().for_each(|event| self.table.dumped(event));
        if let Some(interrupted) = end {
            let clean = self.table.end(interrupted);
            self.end_run(clean);
        }
    }

    fn end_run(&mut self, clean: bool) {
        let Some(run) = self.run.take() else { return };
        if clean {
            self.unclean.remove(&run.kind);
        } else {
            self.unclean.insert(run.kind);
        }
        if !self.left.is_empty() {
            return;
        }
        let now = Instant::now();
        self.passes += 1;
        self.not_before = now + now.duration_since(self.pass_started);
        if self.unclean.is_empty() {
            (self.retry_at, self.pause, self.ready) = (None, PAUSE_MIN, true);
        } else if self.ready || self.passes >= FIRST_PASSES_MAX {
            self.ready = true;
            self.retry_at = Some(now + self.pause);
            self.pause = (self.pause * 2).min(PAUSE_MAX);
        } else {
            self.retry_at = Some(now);
        }
    }

    /// Asks the kernel to confirm a neighbour's link address, if that is stale and was used.
    pub fn used(&mut self, vport: u16, address: std::net::IpAddr) {
        let Some(ifindex) = self.table.used(vport, address) else { return };
        self.use_neighbour(ifindex, address, false);
    }

    /// Asks the kernel to find a gateway's link address.
    pub fn wanted(&mut self, vport: u16, address: std::net::IpAddr) {
        let Some(ifindex) = self.table.wanted(vport, address) else { return };
        self.use_neighbour(ifindex, address, true);
    }

    fn use_neighbour(&mut self, ifindex: u32, address: std::net::IpAddr, create: bool) {
        let request = crate::kernel::use_neighbour(ifindex, address, create);
        // The answer, if it is an error, comes to the queue and is no event. If the kernel has no
        // memory for the request, the entry is asked for when it is used next.
        if let Err(error) = self.notifications.send(&request) {
            tracing::debug!(%address, %error, "cannot have a neighbour confirmed");
        }
    }
}

impl AsFd for Follower {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.notifications.as_fd()
    }
}
