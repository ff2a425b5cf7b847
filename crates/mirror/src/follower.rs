//! Keeps the [`MirrorTable`] equal to the kernel's, from
//! notifications, and from dumps where they do not suffice.
//!
//! Guarantees that notifications are always read first. There are two sockets: one for
//! notifications, and one for the running dump. Their events are ordered as follows:
//! - A dump begins after the notification queue was found empty, so that all earlier notifications
//!   are applied (and after a loss: so that the kernel queues again).
//! - A part of a dump is applied after the queue was found empty again, so that
//!   every change that the part shows is known.
//! - State that a notification touched while the dump runs is taken from the notifications.
//!
//! This covers a change between the time when the kernel writes a part and the time
//! when the mirror reads it. If changes happened during a dump, it is repeated
//! after a pause, until a dump runs without changes.
//!
//! Limits: [`NOTIFICATIONS_MAX`] read in one go; dumps take at most half of the time.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use pdp_netlink::{Netlink, NetlinkRead, messages};

use crate::kernel::{DumpKind, KernelEvent, RTM_NEWNEXTHOP, RoutePlacement, event};
use crate::table::MirrorTable;

/// Most notifications read before guests get the changes.
pub const NOTIFICATIONS_MAX: usize = 16_384;

/// Pause after reading notifications. Changes in this time are sent together: sending costs mirror
/// and guest some ten microseconds, for one change as for a hundred.
const GATHER: Duration = Duration::from_micros(500);

/// Most datagrams of a dump applied before guests get the changes; each has up to 32 KiB.
const DUMP_DATAGRAMS_MAX: usize = 16;

/// Pause before repeating a dump during which changes happened; doubles up to `PAUSE_MAX`.
const PAUSE_MIN: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_secs(60);

/// Dumps with concurrent changes after which the first table counts as complete.
const FIRST_PASSES_MAX: u32 = 3;

/// Groups that the mirror follows. One socket for all preserves the kernel's order.
const GROUPS: [u32; 9] = [
    libc::RTNLGRP_LINK,
    libc::RTNLGRP_NEIGH,
    libc::RTNLGRP_IPV4_IFADDR,
    libc::RTNLGRP_IPV4_ROUTE,
    libc::RTNLGRP_IPV6_IFADDR,
    libc::RTNLGRP_IPV6_ROUTE,
    libc::RTNLGRP_IPV4_NETCONF,
    libc::RTNLGRP_IPV6_NETCONF,
    libc::RTNLGRP_NEXTHOP,
];

/// Opens a socket for the mirror's notifications in the calling thread's network namespace, of
/// which the kernel keeps twice these bytes.
pub fn notifications(receive_bytes: usize) -> io::Result<Netlink> {
    let netlink = Netlink::routing()?;
    netlink.set_receive_bytes(receive_bytes)?;
    netlink.join(GROUPS)?;
    Ok(netlink)
}

/// A running dump.
pub struct DumpRun {
    kind: DumpKind,
    socket: Netlink,
    interrupted: bool,
}

/// Result of reading a part of a dump.
pub enum DumpPart {
    /// Existing objects; more follow.
    Events(Vec<KernelEvent>),
    /// The last objects; true if the kernel reported changes during the dump.
    Last(Vec<KernelEvent>, bool),
    /// The dump failed; a later one may succeed.
    Failed,
}

impl DumpRun {
    /// Asks the kernel for a dump.
    pub fn start(kind: DumpKind) -> io::Result<Self> {
        let socket = Netlink::routing()?;
        socket.send(&kind.request())?;
        Ok(Self { kind, socket, interrupted: false })
    }

    /// The next part.
    pub fn part(&mut self) -> io::Result<DumpPart> {
        // The kernel writes the next part while the last is read, so the queue always has one.
        let NetlinkRead::Datagram(datagram) = self.socket.receive()? else {
            return Ok(DumpPart::Failed);
        };
        let mut events = Vec::new();
        for message in messages(datagram) {
            self.interrupted |= message.is_interrupted();
            if !message.is_end() {
                events.extend(event(&message));
                continue;
            }
            return Ok(match (message.error(), message.result()) {
                // The table does not exist yet, or the kernel lacks the feature.
                (libc::ENOENT | libc::EOPNOTSUPP | libc::EAFNOSUPPORT, _) | (_, Ok(())) => {
                    DumpPart::Last(events, self.interrupted)
                }
                (_, Err(error)) => {
                    tracing::warn!(kind = ?self.kind, %error, "the kernel's dump failed");
                    DumpPart::Failed
                }
            });
        }
        Ok(DumpPart::Events(events))
    }
}

/// Follows the kernel; see the module.
pub struct KernelFollower {
    notifications: Netlink,
    /// The mirror's copy.
    pub table: MirrorTable,
    run: Option<DumpRun>,
    /// Part of the dump that waits until the notification queue is empty.
    part: Option<DumpPart>,
    /// Kinds that the running pass still has to dump.
    left: BTreeSet<DumpKind>,
    /// Kinds that the next pass has to dump.
    wanted: BTreeSet<DumpKind>,
    /// Kinds that changed during their dump in this pass.
    unclean: BTreeSet<DumpKind>,
    pass_started: Instant,
    not_before: Instant,
    pause: Duration,
    retry_at: Option<Instant>,
    passes: u32,
    ready: bool,
    /// True if the notification queue was empty at the end of the last step.
    drained: bool,
    /// Time of the next read of notifications.
    read_at: Instant,
    /// Request that made the last change of a nexthop object.
    nexthop_request: Option<(u32, u32)>,
    /// Times that routes were dumped again.
    pub resyncs: u64,
    /// Notifications read.
    pub notifications_count: u64,
    /// Times that notifications were lost.
    pub overruns: u64,
}

impl KernelFollower {
    /// Follows the kernel of the process's network namespace.
    pub fn new(table: MirrorTable, receive_bytes: usize) -> io::Result<Self> {
        let now = Instant::now();
        Ok(Self {
            notifications: notifications(receive_bytes)?,
            table,
            run: None,
            part: None,
            left: BTreeSet::new(),
            wanted: DumpKind::ALL.into(),
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

    /// True once the copy has been complete.
    pub fn is_ready(&self) -> bool {
        self.ready
    }

    /// True if the copy equals the kernel's state as of the last step, as far as can be known.
    pub fn is_settled(&self) -> bool {
        let dumps = [&self.left, &self.wanted, &self.unclean];
        self.ready
            && self.drained
            && self.run.is_none()
            && dumps.iter().all(|kinds| kinds.is_empty())
            && !self.table.has_suspects()
    }

    /// Returns the time at which [`Self::step`] has work even without a notification.
    pub fn due(&self) -> Option<Instant> {
        if self.run.is_some() || !self.left.is_empty() {
            return Some(Instant::now());
        }
        let dump = (!self.wanted.is_empty()).then_some(self.not_before);
        let read = (!self.listens()).then_some(self.read_at);
        let times = [dump, self.retry_at, read, self.table.expiry()];
        times.into_iter().flatten().min()
    }

    /// True if a notification must trigger [`Self::step`]. Shortly after others, notifications
    /// wait, unless a dump waits for them.
    pub fn listens(&self) -> bool {
        self.run.is_some() || !self.left.is_empty() || Instant::now() >= self.read_at
    }

    /// Reads notifications and continues dumps. Returns the
    /// time at which the first notification was read.
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

    /// Reads notifications. The flag is true if there are no more.
    fn read(&mut self) -> io::Result<(Option<Instant>, bool)> {
        let mut first = None;
        for _ in 0..NOTIFICATIONS_MAX {
            match self.notifications.receive()? {
                NetlinkRead::Empty => return Ok((first, true)),
                NetlinkRead::Lost => {
                    self.overruns += 1;
                    self.start_over();
                }
                NetlinkRead::Datagram(datagram) => {
                    first.get_or_insert_with(Instant::now);
                    self.notifications_count += 1;
                    for message in messages(datagram) {
                        if message.kind == RTM_NEWNEXTHOP {
                            self.nexthop_request = message.request();
                        }
                        let again = message.request().is_some()
                            && message.request() == self.nexthop_request;
                        match event(&message) {
                            Some(KernelEvent::Route(route, _)) if again => {
                                self.table.apply(&KernelEvent::Route(route, RoutePlacement::Again));
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

    /// Schedules a dump of everything.
    fn start_over(&mut self) {
        if self.run.take().is_some() {
            self.table.abort();
        }
        self.part = None;
        self.left.clear();
        self.wanted = DumpKind::ALL.into();
    }

    /// Reads a part of the running dump, or starts the next
    /// one. Returns false if there is nothing to do.
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
        let routes = self.left.iter().any(|kind| matches!(kind, DumpKind::Routes(..)));
        self.resyncs += u64::from(routes && self.passes > 0);
        tracing::debug!(pass = self.passes, kinds = ?self.left, "dumps begin");
        self.pass_started = now;
        true
    }

    fn apply_part(&mut self) {
        let Some(part) = self.part.take() else { return };
        let (events, end) = match part {
            DumpPart::Events(events) => (events, None),
            DumpPart::Last(events, interrupted) => (events, Some(interrupted)),
            DumpPart::Failed => {
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

    /// Asks the kernel to confirm a neighbour's MAC address, if it is stale and was used.
    pub fn used(&mut self, vport: u16, address: std::net::IpAddr) {
        let Some(ifindex) = self.table.used(vport, address) else { return };
        self.use_neighbour(ifindex, address, false);
    }

    /// Asks the kernel to resolve a gateway's MAC address.
    pub fn resolve_gateway(&mut self, vport: u16, address: std::net::IpAddr) {
        let Some(ifindex) = self.table.unresolved_interface(vport, address) else { return };
        self.use_neighbour(ifindex, address, true);
    }

    fn use_neighbour(&mut self, ifindex: u32, address: std::net::IpAddr, create: bool) {
        let request = crate::kernel::use_neighbour(ifindex, address, create);
        // An error answer arrives in the queue and is no event. If the kernel has no memory for the
        // request, the next use of the entry repeats it.
        if let Err(error) = self.notifications.send(&request) {
            tracing::debug!(%address, %error, "cannot confirm a neighbour");
        }
    }
}

impl AsFd for KernelFollower {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.notifications.as_fd()
    }
}
