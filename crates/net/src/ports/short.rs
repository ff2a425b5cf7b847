//! What the ports of a vrouter have in common: the short way through it, and the CPU time that it may use.
//!
//! **The short way.** The program at an inner end sends what the namespace would only route straight to the far end of
//! the link that it leaves by; all else passes to the namespace's stack (`bpf/pdp_short.h` says what that is). Counted
//! is as if it had gone over both pairs: given to the vrouter at the port that it came in by, sent by it at the other.
//!
//! Frames go the short way while a lease lasts ([`Ports::lend`]). Whoever watches the namespace gives it again before it
//! ends; when the watcher dies, it ends by itself, and all frames pass. Without one nothing goes the short way, which
//! is what `kernelHooks: strict` wants. From Linux 6.2 the program reads what the kernel itself holds of the namespace,
//! for each frame: hooks of netfilter, tc, queueing disciplines, devices over the port, reverse-path filters, IPsec
//! policies, rules of IPv6. There what is left to the watcher is the smallest MTU of a route, and to have neighbours
//! confirmed that [`Ports::used`] tells of, since the kernel does not see that they are used. Before 6.2 the watcher's
//! word ([`Ports::tell`]) is all that makes it stand aside, as late as the watcher is.
//!
//! **Otherwise than Linux**, where frames go the short way: the interfaces' counters in the namespace, its SNMP
//! counters and packet sockets in it (tcpdump) don't see them. A frame that passes and one behind it that doesn't may
//! change places, within what one poll of NAPI takes (64 frames). Linux keeps the route that it found with a nexthop
//! object, so that of routes which share one and have several MTUs the first packet decides; frames that are sent here
//! do not. That apart, the same comes out, byte for byte: `tests/short.rs`. A guest that moves its end to another
//! namespace and gives the index to a device of its own has what would go out by that leave by the port.
//!
//! **Who works, pays.** With [`Ports::serve`] an inner end is served by one kernel thread of NAPI (see [`crate::napi`]) or
//! not at all: what a guest has done by others, since it turned threads off or took its end down and up, is dropped
//! ([`Reason::Unpaid`]) until its new thread is named.
//!
//! **Power.** A cgroup's quota does not hold kernel threads from Linux 6.18 on, so a vrouter has a budget of CPU time
//! here ([`Ports::power`]). At each frame the program at the inner end charges what the thread that serves it has run
//! since the last charge, by the scheduler's own account; where more was used than the budget and 10 ms have, what comes
//! for the vrouter is refused before the thread is woken ([`Reason::Power`]). The account is exact to a tick of the
//! scheduler (1 to 10 ms), and all of it is charged, so that a vrouter uses what it has on the average over a
//! second. Nothing is charged for ports that no thread is named for. Needed is what [`Ports::serve`] needs (Linux 6.8).
//!
//! Limits: [`USED_MAX`]; frames of one buffer (MTU of about 3,500) go the short way.
//! Source: Linux net/core/filter.c (`bpf_fib_lookup`), net/ipv4/ip_forward.c, net/ipv6/ip6_output.c, net/core/dev.c
//! (`napi_threaded_poll`), kernel/sched/fair.c (`update_curr`); Documentation/bpf/kfuncs.rst.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::os::fd::BorrowedFd;
use std::sync::LazyLock;
use std::time::Duration;

use libbpf_rs::{MapCore, MapFlags};
use nix::errno::Errno;
use rustix::time::{ClockId, clock_gettime};
use zerocopy::{FromBytes, IntoBytes};

use super::layout::{Use, Vrouter};
#[cfg(doc)]
use super::{Counters, Reason};
use super::{PortSpec, Ports, WHOLE, check_number};
use crate::error::{Context, Error, Result};
use crate::napi::{self, is_threaded, set_threaded, threads};
use crate::xdp::other;

/// Neighbours whose use can be noted at once, of all vrouters.
pub const USED_MAX: u32 = 1 << 14;

/// Longest lease: how long frames may go on by the short way when nobody watches any more.
pub const LEASE_MAX: Duration = Duration::from_secs(10);

/// [`Ports::lend`]: no route has an MTU.
pub const NO_MTU: u32 = u32::MAX;

/// As the thread of a port: none may serve it. No thread has this number.
const NOBODY: u32 = u32::MAX;

/// What hooks into forwarding at a port: these go by the stack.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Aside {
    /// IPv4 packets that come in by it.
    pub in_v4: bool,
    /// IPv6 packets that come in by it.
    pub in_v6: bool,
    /// IPv4 packets that would go out by it.
    pub out_v4: bool,
    /// IPv6 packets that would go out by it.
    pub out_v6: bool,
}

impl Aside {
    /// Everything.
    pub const ALL: Self = Self { in_v4: true, in_v6: true, out_v4: true, out_v6: true };

    fn bits(self) -> u8 {
        let flags = [self.in_v4, self.in_v6, self.out_v4, self.out_v6];
        flags.iter().zip(0..).map(|(flag, at)| u8::from(*flag) << at).sum()
    }
}

/// CPU time that a vrouter's kernel threads may use for its frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Power {
    /// Thousandths of a CPU, at least 1.
    pub millicores: u32,
}

/// Frames that were given to a vrouter at a port, by what became of them. All but `short` passed to its stack.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ways {
    /// Sent out of another port, or dropped there: it is among what the vrouter sent by that.
    pub short: u64,
    /// There was no lease.
    pub silent: u64,
    /// Something hooks into forwarding.
    pub hooked: u64,
    /// Not plainly routed: options, fragments, a TTL that ends, groups, errors, not IP, not for this port, ….
    pub special: u64,
    /// No plain unicast route out of another port, or that is down.
    pub route: u64,
    /// A neighbour that is not known yet.
    pub neighbour: u64,
    /// Larger than an MTU on its way.
    pub too_big: u64,
    /// A source that the stack validates: an address of the router, or one without a route.
    pub source: u64,
}

/// A neighbour that frames were sent to by the short way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Used {
    /// Whose neighbour: [`PortSpec::vrouter`].
    pub vrouter: u32,
    /// Its address.
    pub address: IpAddr,
    /// The interface that it is at, by its index in the vrouter's namespace.
    pub index: u32,
    /// When, by the monotonic clock of the machine ([`now`]); to a quarter of a second.
    pub at: Duration,
}

impl Ports {
    /// Lets frames go the short way through a vrouter for so long ([`LEASE_MAX`] at most) from now on; zero ends it.
    /// `bytes_max` are the smallest MTUs of routes in its namespace, of IPv4 and of IPv6 ([`NO_MTU`]: none has one).
    pub fn lend(&self, vrouter: u32, time: Duration, bytes_max: [u32; 2]) -> Result<()> {
        let until = if time.is_zero() { Duration::ZERO } else { now() + time.min(LEASE_MAX) };
        self.change_vrouter(vrouter, |vrouter| {
            vrouter.until_ns = u64::try_from(until.as_nanos()).unwrap_or(u64::MAX);
            vrouter.bytes_max = bytes_max;
        })
    }

    /// Says what hooks into forwarding at port `number`. Until told, nothing does.
    pub fn tell(&self, number: u32, aside: Aside) -> Result<()> {
        check_number("port", number)?;
        self.change(number, |port| port.aside = aside.bits())
    }

    /// Neighbours that frames were sent to by the short way since `since` of the monotonic clock ([`now`]), of all
    /// vrouters, by no order. Where there are many some may be missing, but not for long.
    pub fn used(&self, since: Duration) -> Result<Vec<Used>> {
        let told = self.uses()?.into_iter().filter_map(|(_, it)| it.told());
        Ok(told.filter(|used| used.at >= since).collect())
    }

    /// With their places.
    fn uses(&self) -> Result<Vec<(Vec<u8>, Use)>> {
        let what = "the neighbours that are used";
        let batch = self.used.lookup_batch(1024, MapFlags::ANY, MapFlags::ANY).map_err(other);
        let uses = batch.on("read", what)?.filter_map(|(key, value)| {
            let value = Use::read_from_bytes(&value).ok()?;
            Some((key, value))
        });
        Ok(uses.collect())
    }

    /// Holds the kernel threads of a vrouter's ports to so much CPU time together; `None`: no longer. Where it stays
    /// as it is, its burst of 10 ms is not had anew. It is charged for ports that [`Ports::serve`] was called for.
    ///
    /// # Errors
    /// [`Error::Invalid`]: no power at all.
    pub fn power(&self, vrouter: u32, power: Option<Power>) -> Result<()> {
        if power.is_some_and(|power| power.millicores == 0) {
            let text = "1 millicore at least".to_owned();
            return Err(Error::Invalid { object: format!("power of vrouter {vrouter}"), text });
        }
        self.change_vrouter(vrouter, |vrouter| vrouter.set_power(power))
    }

    /// Has the inner end of a port served by kernel threads, and by no others: turns threads on where they are not,
    /// names the one that there is to the program, and returns it. What is served otherwise is dropped from then on
    /// ([`Reason::Unpaid`]). A guest that turns them off, or takes its end down and up, gets frames again with the
    /// next call; none where all is as it should be but a few questions. Returns none where the port is not
    /// there, or is down: then nothing is served until a later call.
    ///
    /// # Errors
    /// The kernel does not say which thread serves an interface (before Linux 6.8): nothing is named.
    pub fn serve(&self, guest: BorrowedFd<'_>, spec: &PortSpec) -> Result<Vec<napi::Thread>> {
        let number = spec.number;
        let root = self.root(number)?.filter(|root| root.alias == WHOLE);
        let inner = root.map(|root| self.inner(&root, guest)).transpose()?.flatten();
        let Some(inner) = inner else { return Ok(Vec::new()) };
        let mut found = threads(guest, inner.index)?;
        if found.is_empty() && inner.up {
            set_threaded(guest, &inner.name, true)?;
            found = threads(guest, inner.index)?;
        }
        // A port has one queue.
        let named = found.first().map(|thread| thread.pid);
        self.change(number, |port| {
            let before = if port.thread == 0 { NOBODY } else { port.thread };
            port.thread = named.unwrap_or(before);
        })?;
        Ok(found)
    }

    /// Has the inner end of a port served in softirq, by whoever does.
    pub fn unserve(&self, guest: BorrowedFd<'_>, spec: &PortSpec) -> Result<()> {
        self.change(spec.number, |port| port.thread = 0)?;
        let root = self.root(spec.number)?;
        let inner = root.map(|root| self.inner(&root, guest)).transpose()?.flatten();
        match inner {
            Some(inner) if inner.up && is_threaded(guest, &inner.name)? => {
                set_threaded(guest, &inner.name, false)
            }
            _ => Ok(()),
        }
    }

    /// Leaves nothing behind of those of these vrouters that have no port any more.
    pub(super) fn forget_vrouters(&self, mut gone: BTreeSet<u32>) -> Result<()> {
        for (_, port) in self.all_settings()?.iter().filter(|(_, port)| port.inner != 0) {
            gone.remove(&port.vrouter);
        }
        if gone.is_empty() {
            return Ok(());
        }
        for &vrouter in &gone {
            self.change_vrouter(vrouter, |vrouter| *vrouter = Vrouter::default())?;
        }
        for (place, it) in self.uses()? {
            if it.told().is_some() && gone.contains(&it.vrouter) {
                self.used
                    .update(&place, Use::default().as_bytes(), MapFlags::ANY)
                    .map_err(other)
                    .on("forget a neighbour of vrouter", it.vrouter)?;
            }
        }
        Ok(())
    }

    /// What its threads are charged with meanwhile is lost.
    fn change_vrouter(&self, number: u32, change: impl FnOnce(&mut Vrouter)) -> Result<()> {
        check_number("vrouter", number)?;
        let key = number.to_ne_bytes();
        let _alone = self.alone();
        let found = self.vrouters.lookup(&key, MapFlags::LOCK).map_err(other);
        let found = found.on("read the settings of vrouter", number)?;
        let was = found.and_then(|bytes| Vrouter::read_from_bytes(&bytes).ok());
        let was = was.ok_or(Errno::ENOENT).on("read the settings of vrouter", number)?;
        let mut vrouter = was;
        change(&mut vrouter);
        if vrouter == was {
            return Ok(());
        }
        self.vrouters
            .update(&key, vrouter.as_bytes(), MapFlags::LOCK)
            .map_err(other)
            .on("change the settings of vrouter", number)
    }
}

/// Whether the program reads by itself what hooks into forwarding: from Linux 6.2 on. Before, [`Ports::tell`] has to.
pub fn obeys_hooks() -> bool {
    static OBEYS: LazyLock<bool> = LazyLock::new(|| {
        let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        crate::probe::version(&release) >= (6, 2)
    });
    *OBEYS
}

/// The monotonic clock that leases and uses are counted by.
pub fn now() -> Duration {
    let now = clock_gettime(ClockId::Monotonic);
    let (seconds, nanoseconds) = (now.tv_sec.try_into(), now.tv_nsec.try_into());
    Duration::new(seconds.unwrap_or_default(), nanoseconds.unwrap_or_default())
}
