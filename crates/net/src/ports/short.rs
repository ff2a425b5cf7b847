//! XDP bypass through a vrouter, and its CPU budget: state that a vrouter's ports share.
//!
//! **XDP bypass.** The program at an inner end handles frames that the namespace would only route.
//! It sends them directly to the far end of the egress link. All other frames pass to the
//! namespace's stack (`bpf/pdp_short.h` lists them). Bypassed frames count as if they had crossed
//! both pairs: delivered to the vrouter at the ingress port, and sent by it at the egress port.
//!
//! The bypass is active while a lease lasts ([`Ports::activate_bypass`]). The watcher of the
//! namespace renews the lease before it ends. If the watcher dies, the lease expires and all frames
//! pass to the stack. Without a lease there is no bypass, as `kernelHooks: strict` requires.
//!
//! From Linux 6.2 on, the program itself reads the kernel's state of the namespace for each frame:
//! hooks of netfilter, tc, queueing disciplines, devices over the port, reverse-path filters, IPsec
//! policies, rules of IPv6. Two tasks remain for the watcher. It provides the smallest MTU of any
//! route. It also has the neighbours of [`Ports::used`] confirmed, since the kernel does not see
//! their use. Before 6.2, the program relies on the watcher ([`Ports::set_bypass_exclusions`]) for
//! all hooks, and reacts as late as the watcher does.
//!
//! **Differences from Linux** for bypassed frames:
//! - The interfaces' counters in the namespace, its SNMP counters and
//!   packet sockets in it (tcpdump) don't see them.
//! - A bypassed frame may overtake one that passes to the stack, within one NAPI poll (64 frames).
//! - Linux caches a route with its nexthop object. If several routes share the object and have
//!   different MTUs, the first packet decides which MTU applies. Bypassed frames never decide this.
//! - A guest may move its end to another namespace and give the index to a device of its own.
//!   Frames for that device then leave on the port.
//!
//! Apart from that, the output is the same, byte for byte: `tests/short.rs`.
//!
//! **Accounting.** With [`Ports::serve`], one NAPI kernel thread serves an inner end (see
//! [`crate::napi`]). Frames that anything else serves are dropped ([`Reason::Unpaid`]) until the
//! new thread is named. This happens when a guest turns threads off, or takes its end down and up.
//!
//! **CPU budget.** From Linux 6.18 on, a cgroup's quota does not bound kernel threads. So
//! each vrouter has a budget of CPU time here ([`Ports::power`]). At each frame, the program
//! at the inner end charges the run time of the serving thread since the last charge, by the
//! scheduler's own account. When the use exceeds the budget by more than 10 ms, frames for
//! the vrouter are refused before the thread is woken ([`Reason::Power`]). The account is
//! exact to a scheduler tick (1 to 10 ms), and all of it is charged. So on average over a
//! second, a vrouter uses what it has. Ports without a named thread are not charged. The
//! budget needs what [`Ports::serve`] needs (Linux 6.8).
//!
//! Limits: [`USED_MAX`]; only frames of one buffer (MTU of about 3,500) are bypassed.
//! Source: Linux net/core/filter.c (`bpf_fib_lookup`), net/ipv4/ip_forward.c,
//! net/ipv6/ip6_output.c, net/core/dev.c (`napi_threaded_poll`), kernel/sched/fair.c
//! (`update_curr`); Documentation/bpf/kfuncs.rst.

use std::collections::BTreeSet;
use std::os::fd::BorrowedFd;
use std::sync::LazyLock;
use std::time::Duration;

use libbpf_rs::{MapCore, MapFlags};
use nix::errno::Errno;
use rustix::time::{ClockId, clock_gettime};
use zerocopy::{FromBytes, IntoBytes};

use super::layout::{Power, UsedEntry, UsedNeighbour, Vrouter};
#[cfg(doc)]
use super::{KernelPortCounters, Reason};
use super::{PortSpec, Ports, WHOLE, check_number};
use crate::error::{Error, NetContext, Result};
use crate::napi::{self, is_threaded, set_threaded, threads};
use crate::pins::other;
use crate::version::version;

/// Most neighbours whose use can be recorded at once, for all vrouters.
pub const USED_MAX: u32 = 1 << 14;

/// Longest lease: the bypass ends this long after the watcher died.
pub const LEASE_MAX: Duration = Duration::from_secs(10);

/// [`Ports::activate_bypass`]: no route has an MTU.
pub const NO_MTU: u32 = u32::MAX;

/// Thread of a port that no thread may serve. No thread has this id.
const NOBODY: u32 = u32::MAX;

/// Packets that must pass to the stack because of hooks at a port.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BypassExclusions {
    /// IPv4 packets that arrive on the port.
    pub in_v4: bool,
    /// IPv6 packets that arrive on the port.
    pub in_v6: bool,
    /// IPv4 packets that would leave on the port.
    pub out_v4: bool,
    /// IPv6 packets that would leave on the port.
    pub out_v6: bool,
}

impl BypassExclusions {
    /// All packets.
    pub const ALL: Self = Self { in_v4: true, in_v6: true, out_v4: true, out_v6: true };

    fn bits(self) -> u8 {
        let flags = [self.in_v4, self.in_v6, self.out_v4, self.out_v6];
        flags.iter().zip(0..).map(|(flag, at)| u8::from(*flag) << at).sum()
    }
}

impl Ports {
    /// Activates the bypass through a vrouter for a time from now on, at most
    /// [`LEASE_MAX`]; zero ends it. `bytes_max` are the smallest MTUs of routes in its
    /// namespace, for IPv4 and for IPv6 ([`NO_MTU`]: none has one).
    pub fn activate_bypass(&self, vrouter: u32, time: Duration, bytes_max: [u32; 2]) -> Result<()> {
        let until = if time.is_zero() { Duration::ZERO } else { now() + time.min(LEASE_MAX) };
        self.change_vrouter(vrouter, |vrouter| {
            vrouter.until_ns = u64::try_from(until.as_nanos()).unwrap_or(u64::MAX);
            vrouter.bytes_max = bytes_max;
        })
    }

    /// Sets the packets that must pass to the stack because of hooks
    /// at port `number`. By default there are none.
    pub fn set_bypass_exclusions(&self, number: u32, aside: BypassExclusions) -> Result<()> {
        check_number("port", number)?;
        self.change(number, |port| port.aside = aside.bits())
    }

    /// Returns the neighbours of all vrouters that received bypassed frames
    /// since `since` of the monotonic clock ([`now`]), in no order. If there are
    /// many, some may be missing for a short time.
    pub fn used(&self, since: Duration) -> Result<Vec<UsedNeighbour>> {
        let neighbours = self.uses()?.into_iter().filter_map(|(_, it)| it.neighbour());
        Ok(neighbours.filter(|used| used.at >= since).collect())
    }

    /// Returns the entries with their keys in the map.
    fn uses(&self) -> Result<Vec<(Vec<u8>, UsedEntry)>> {
        let what = "the neighbours that are used";
        let batch = self.used.lookup_batch(1024, MapFlags::ANY, MapFlags::ANY).map_err(other);
        let uses = batch.on("read", what)?.filter_map(|(key, value)| {
            let value = UsedEntry::read_from_bytes(&value).ok()?;
            Some((key, value))
        });
        Ok(uses.collect())
    }

    /// Limits the CPU time that the kernel threads of a vrouter's ports use together; `None`: no
    /// limit. An unchanged limit keeps its state, including the burst of 10 ms. Ports are charged
    /// once [`Ports::serve`] was called for them.
    ///
    /// # Errors
    /// [`Error::Invalid`]: the limit is zero.
    pub fn power(&self, vrouter: u32, power: Option<Power>) -> Result<()> {
        if power.is_some_and(|power| power.millicores == 0) {
            let text = "1 millicore at least".to_owned();
            return Err(Error::Invalid { object: format!("power of vrouter {vrouter}"), text });
        }
        self.change_vrouter(vrouter, |vrouter| vrouter.set_power(power))
    }

    /// Makes kernel threads alone serve the inner end of a port. Turns threads on if necessary,
    /// registers the thread with the program, and returns it.
    ///
    /// Frames that are served otherwise are dropped from then on ([`Reason::Unpaid`]). After a
    /// guest has turned threads off, or taken its end down and up, the next call lets frames pass
    /// again. If nothing has changed, a call costs only a few queries. Returns no thread if the
    /// port does not exist or is down; then nothing is served until a later call.
    ///
    /// # Errors
    /// The kernel does not report which thread serves an interface
    /// (before Linux 6.8). No thread is registered.
    pub fn serve(&self, guest: BorrowedFd<'_>, spec: &PortSpec) -> Result<Vec<napi::NapiThread>> {
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

    /// Returns the inner end of a port to softirq, where any context may serve it.
    pub fn serve_by_softirq(&self, guest: BorrowedFd<'_>, spec: &PortSpec) -> Result<()> {
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

    /// Removes the state of those of these vrouters that no longer have a port.
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
            if it.neighbour().is_some() && gone.contains(&it.vrouter) {
                self.used
                    .update(&place, UsedEntry::default().as_bytes(), MapFlags::ANY)
                    .map_err(other)
                    .on("forget a neighbour of vrouter", it.vrouter)?;
            }
        }
        Ok(())
    }

    /// CPU time that is charged during the change is lost.
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

/// True if the program itself reads the hooks into forwarding: from
/// Linux 6.2 on. Before, it needs [`Ports::set_bypass_exclusions`].
pub fn reads_hooks() -> bool {
    static OBEYS: LazyLock<bool> = LazyLock::new(|| {
        let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        version(&release) >= (6, 2)
    });
    *OBEYS
}

/// Returns the time of the monotonic clock that leases and uses refer to.
pub fn now() -> Duration {
    let now = clock_gettime(ClockId::Monotonic);
    let (seconds, nanoseconds) = (now.tv_sec.try_into(), now.tv_nsec.try_into());
    Duration::new(seconds.unwrap_or_default(), nanoseconds.unwrap_or_default())
}
