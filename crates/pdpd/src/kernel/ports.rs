//! Ports of vrouters whose frames stay in the kernel ([`pdp_net::ports`]),
//! for the reconcile loop, and their counters among those of the mux.
//!
//! Each port has its own kernel thread, which is charged to the vrouter's share of a
//! forwarding engine. Once a second a monitor checks that this thread still does
//! the work, and grants the XDP bypass to vrouters that may use it.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use pdp_container::Process;
use pdp_container::cgroup::Cgroups;
use pdp_model::{PortStats, Stats};
use pdp_net::interface::InterfaceWatch;
use pdp_net::ports::{
    self, InnerEndChange, KernelPortCounters, LEASE_MAX, LinkTarget, PortSpec, Power, Reason,
};
use pdp_net::route_mtu::RouteMtu;
use pdp_net::xdp::Xdp;
use pdp_net::{napi, netns};

use crate::host::{self, HostError};
use crate::kernel::observers::ObserverPermit;
use crate::kernel::tunnels::KernelTunnels;
use crate::plan::key::owner;
use crate::plan::{DaemonPaths, KernelLinkPortState, KernelLinkTarget, KernelPlan, Plan};
use crate::util::lock;

/// A node: its vnet and its name there.
type NodeId = (String, String);

/// Interval of the monitor.
pub(crate) const ATTEND_INTERVAL: Duration = Duration::from_secs(1);

/// Ports of a tenant whose threads are set up again per interval, in the long run. A guest that
/// sets its ends down and up causes this each time, and delays others by about a millisecond.
const SERVED_AGAIN: usize = 16;

/// Leaf of a vrouter's cgroup that contains the threads.
const THREADS: &str = "threads";

/// All such ports of this daemon.
#[derive(Debug)]
pub struct KernelPorts {
    netns: PathBuf,
    pins: PathBuf,
    /// Kernel objects, once a port was requested.
    open: Arc<Mutex<Option<Arc<ports::Ports>>>>,
    /// Ports that are being created or removed. This takes kernel
    /// requests that other processes may delay.
    busy: Mutex<Busy>,
    /// Notified when some of them are removed.
    freed: Condvar,
    /// Number of times that `open` was opened. Each time its maps may be others.
    opened: AtomicU64,
    /// Kernel tunnels of external links.
    tunnels: Arc<KernelTunnels>,
    /// Epoll instance that is readable when a guest changed one of its
    /// interfaces: it contains the descriptors of `known`.
    watch: Mutex<Option<Arc<OwnedFd>>>,
    /// Planned ports, by node.
    known: Mutex<BTreeMap<NodeId, NodePortState>>,
    /// All tokens in `known` are below this.
    tokens: AtomicU64,
    observed: Arc<Mutex<Observed>>,
}

/// Numbers of ports that are being created or removed.
#[derive(Debug, Default)]
struct Busy {
    made: Vec<BTreeSet<u32>>,
    removed: BTreeSet<u32>,
}

/// Observed ports.
#[derive(Debug, Default)]
struct Observed {
    /// Nodes, once for each observer of one of their ports.
    now: Vec<NodeId>,
    /// Frames that observers missed, by port number.
    missed: BTreeMap<u32, Arc<AtomicU64>>,
}

/// Observer of a port's frames. While it exists, packets of the port's router
/// do not use the XDP bypass, which is invisible in its network namespace.
#[derive(Debug)]
pub struct Observer {
    observed: Arc<Mutex<Observed>>,
    node: NodeId,
    _place: ObserverPermit,
    missed: Arc<AtomicU64>,
    /// The router's control guest.
    pub guest: Process,
    /// Network namespace of that guest.
    pub netns: OwnedFd,
    /// Index of the port's interface there.
    pub index: u32,
    /// True if packets may otherwise use the XDP bypass.
    pub xdp_bypass: bool,
}

impl Observer {
    /// Counts frames that the observer did not see.
    pub fn missed(&self, frames: u32) {
        self.missed.fetch_add(frames.into(), Relaxed);
    }
}

impl Drop for Observer {
    fn drop(&mut self) {
        let mut observed = lock(&self.observed);
        if let Some(at) = observed.now.iter().position(|node| *node == self.node) {
            observed.now.swap_remove(at);
        }
    }
}

/// A node whose ports changed since they were checked last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChangedNode {
    /// The vnet, and the name there.
    pub node: NodeId,
    /// True if one of its ports is gone.
    pub port_gone: bool,
}

/// Planned ports of a node.
#[derive(Clone, Debug)]
struct DesiredPorts {
    /// Guest in whose network namespace they are.
    guest: Process,
    specs: Vec<PortSpec>,
    kernel: Option<KernelPlan>,
}

/// Known state of a node's ports.
#[derive(Debug)]
struct NodePortState {
    wanted: DesiredPorts,
    /// Token in the epoll instance `Ports::watch`.
    token: u64,
    /// Watches interfaces of the guest. It keeps the guest's network
    /// namespace alive, so it is removed with the node's ports.
    watch: InterfaceWatch,
    /// Deviations from the plan at the last check: a port's name, and the changes.
    changed: Vec<(String, Vec<InnerEndChange>)>,
}

/// State of the monitor for one node.
#[derive(Debug)]
pub(crate) struct NodePortMonitor {
    /// Guest to whose network namespace the state belongs.
    guest: Process,
    /// Watcher of the routes that the XDP bypass may use.
    routes: Option<RouteMtu>,
    /// MTUs with which the bypass was last granted, and when.
    lent: Option<([u32; 2], Instant)>,
    /// Uncharged frames, by port.
    unpaid: BTreeMap<u32, UnaccountedFrames>,
}

/// Frames of a port whose processing was charged to nobody.
#[derive(Clone, Copy, Debug, Default)]
struct UnaccountedFrames {
    /// Their number at the last check.
    count: u64,
    /// Time at which the port's thread was last set up again.
    served: Option<Instant>,
}

impl KernelPorts {
    /// Ports of the daemon with these paths.
    pub fn new(places: &DaemonPaths) -> Self {
        let (netns, pins) = (places.run.join("ports"), places.pins.join("_ports"));
        let (open, busy, freed, opened, tunnels) = Default::default();
        let (watch, known, tokens, observed) = Default::default();
        Self { netns, pins, open, busy, freed, opened, tunnels, watch, known, tokens, observed }
    }

    /// Runs a function on the kernel objects. A query creates none,
    /// since it may come after the last port is gone.
    fn with<T>(
        &self,
        run: impl FnOnce(&ports::Ports) -> Result<T, HostError>,
    ) -> Result<T, HostError> {
        let open = lock(&self.open).clone();
        let ports = match open {
            Some(ports) => ports,
            None if self.pins.exists() || self.netns.exists() => self.opened()?,
            None => return Err(HostError::NoPorts),
        };
        run(&ports)
    }

    /// Returns the kernel objects that all ports have in common; creates them if needed.
    fn opened(&self) -> Result<Arc<ports::Ports>, HostError> {
        let mut open = lock(&self.open);
        if let Some(ports) = &*open {
            return Ok(ports.clone());
        }
        pdp_net::xdp::mount_bpf_fs()?;
        let ports = Arc::new(ports::Ports::open(&self.netns, &self.pins)?);
        *lock(&self.watch) = Some(Arc::new(host::epoll()?));
        self.opened.fetch_add(1, Relaxed);
        Ok(open.insert(ports).clone())
    }

    /// Creates ports with these numbers once none of them is being
    /// removed. None is removed before this returns.
    fn with_made<T>(
        &self,
        numbers: BTreeSet<u32>,
        run: impl FnOnce(&ports::Ports) -> Result<T, HostError>,
    ) -> Result<T, HostError> {
        let mut busy = lock(&self.busy);
        while !busy.removed.is_disjoint(&numbers) {
            busy = self.freed.wait(busy).unwrap_or_else(PoisonError::into_inner);
        }
        busy.made.push(numbers.clone());
        drop(busy);
        let done = self.opened().and_then(|ports| run(&ports));
        let mut busy = lock(&self.busy);
        if let Some(at) = busy.made.iter().position(|made| *made == numbers) {
            busy.made.swap_remove(at);
        }
        done
    }

    /// Sets up the ports of a node: creates, joins and limits them, and sets their carrier.
    pub fn see_to(
        &self,
        (vnet, node): (&str, &str),
        guest: Process,
        kernel: Option<&KernelPlan>,
        ports: &[KernelLinkPortState<'_>],
        cgroups: &Cgroups,
    ) -> Result<(), HostError> {
        let key = (vnet.to_owned(), node.to_owned());
        let specs: Vec<_> = ports.iter().map(|it| it.port.spec.clone()).collect();
        let wanted = DesiredPorts { guest, specs, kernel: kernel.cloned() };
        let Some(vrouter) = wanted.vrouter() else {
            lock(&self.known).remove(&key);
            return Ok(());
        };
        let netns = host::network_namespace(guest)?;
        let numbers = wanted.specs.iter().map(|spec| spec.number).collect();
        self.with_made(numbers, |all| {
            self.know(&key, &wanted, netns.as_fd())?;
            for KernelLinkPortState { port, carrier, joined, device } in ports {
                let number = port.spec.number;
                all.make(netns.as_fd(), &port.spec)?;
                match &port.to {
                    KernelLinkTarget::Port(to) => {
                        all.join(
                            number,
                            if *joined { LinkTarget::Port(*to) } else { LinkTarget::None },
                        )?;
                        // A port that was recreated also lost the link from its other end.
                        all.join(
                            *to,
                            if *joined { LinkTarget::Port(number) } else { LinkTarget::None },
                        )?;
                        self.tunnels.remove(number);
                    }
                    KernelLinkTarget::Outside(tunnel) => {
                        let device = device.filter(|_| *joined);
                        KernelTunnels::join(
                            &self.tunnels,
                            &self.open,
                            all,
                            &port.spec,
                            tunnel,
                            device,
                        )?;
                    }
                }
                all.police(number, port.rate)?;
                all.set_carrier(number, *carrier)?;
                serve(all, netns.as_fd(), &port.spec, kernel, cgroups)?;
            }
            let limited = kernel.filter(|kernel| !kernel.borrows);
            let power = limited.map(|it| Power { millicores: it.placement.power_millicores });
            all.power(vrouter, power)?;
            // If permitted, the monitor grants it.
            if !wanted.xdp_bypass() {
                all.activate_bypass(vrouter, Duration::ZERO, [0; 2])?;
            }
            Ok(())
        })?;
        self.check_node(&key, &wanted);
        Ok(())
    }

    /// Watches from now on what a guest does to its interfaces.
    fn know(
        &self,
        key: &NodeId,
        wanted: &DesiredPorts,
        netns: BorrowedFd<'_>,
    ) -> Result<(), HostError> {
        let (mut known, wanted) = (lock(&self.known), wanted.clone());
        if let Some(known) = known.get_mut(key).filter(|it| it.wanted.guest == wanted.guest) {
            known.wanted = wanted;
            return Ok(());
        }
        let watch = netns::within(netns, InterfaceWatch::new)?;
        let token = self.tokens.fetch_add(1, Relaxed);
        if let Some(all) = self.watch() {
            host::epoll_add(all.as_fd(), watch.as_fd(), token)?;
        }
        known.insert(key.clone(), NodePortState { wanted, token, watch, changed: Vec::new() });
        Ok(())
    }

    /// Starts to observe frames of a port, with a permit.
    ///
    /// # Errors
    /// [`HostError::NoPorts`]: the port does not exist now.
    pub fn observe(
        &self,
        place: ObserverPermit,
        vnet: &str,
        node: &str,
        port: &str,
    ) -> Result<Observer, HostError> {
        let node = (vnet.to_owned(), node.to_owned());
        let wanted = lock(&self.known).get(&node).map(|known| known.wanted.clone());
        let wanted = wanted.ok_or(HostError::NoPorts)?;
        let is_it = |spec: &&PortSpec| spec.name == port;
        let (number, vrouter) = wanted
            .specs
            .iter()
            .find(is_it)
            .map(|it| (it.number, it.vrouter))
            .ok_or(HostError::NoPorts)?;
        let netns = host::network_namespace(wanted.guest)?;
        lock(&self.observed).now.push(node.clone());
        let mut observer = Observer {
            observed: self.observed.clone(),
            node,
            _place: place,
            missed: Arc::default(),
            guest: wanted.guest,
            netns,
            index: 0,
            xdp_bypass: wanted.xdp_bypass(),
        };
        let index = self.with(|ports| {
            // From here on, whoever grants the bypass sees the observer.
            ports.activate_bypass(vrouter, Duration::ZERO, [0; 2])?;
            let index = ports.index(observer.netns.as_fd(), number)?;
            if index.is_some() {
                observer.missed = lock(&self.observed).missed.entry(number).or_default().clone();
            }
            Ok(index)
        })?;
        observer.index = index.ok_or(HostError::NoPorts)?;
        Ok(observer)
    }

    pub(crate) fn attend(
        &self,
        cgroups: &Cgroups,
        attended: &mut BTreeMap<NodeId, NodePortMonitor>,
        since: Duration,
    ) {
        let known = lock(&self.known);
        let all: BTreeMap<_, _> =
            known.iter().map(|(node, it)| (node.clone(), it.wanted.clone())).collect();
        drop(known);
        attended.retain(|node, it| all.get(node).is_some_and(|wanted| wanted.guest == it.guest));
        if all.is_empty() {
            return;
        }
        let mut used: BTreeMap<u32, Vec<_>> = BTreeMap::new();
        for it in self.with(|ports| Ok(ports.used(since)?)).unwrap_or_default() {
            used.entry(it.vrouter).or_default().push((it.index, it.address));
        }
        let mut owned: BTreeMap<&str, usize> = BTreeMap::new();
        for ((vnet, _), wanted) in &all {
            *owned.entry(owner(vnet)).or_default() += wanted.specs.len();
        }
        for (node, wanted) in &all {
            let again = serve_interval(owned[owner(&node.0)]);
            let guest = wanted.guest;
            let new =
                || NodePortMonitor { guest, routes: None, lent: None, unpaid: BTreeMap::new() };
            let attended = attended.entry(node.clone()).or_insert_with(new);
            // An ended guest is checked because of its end.
            let _ = self.serve_again(wanted, attended, again, cgroups);
            if self.lend(node, wanted, attended).is_err() {
                (attended.routes, attended.lent) = (None, None);
            }
            if let (Some(routes), Some(vrouter)) = (&attended.routes, wanted.vrouter()) {
                routes.confirm(used.remove(&vrouter).unwrap_or_default());
            }
        }
    }

    /// Sets up a port's thread again if frames were dropped because nobody was
    /// charged for them. This happens, for example, when the guest set its end
    /// down and its thread ended. Each port at most once per `interval`.
    fn serve_again(
        &self,
        wanted: &DesiredPorts,
        attended: &mut NodePortMonitor,
        interval: Duration,
        cgroups: &Cgroups,
    ) -> Result<(), HostError> {
        for spec in &wanted.specs {
            let count = self.with(|ports| Ok(ports.unpaid(spec.number)?))?;
            let unpaid = attended.unpaid.entry(spec.number).or_default();
            if unpaid.served.is_some_and(|at| at.elapsed() < interval) {
                continue;
            }
            if count > unpaid.count {
                unpaid.served = Some(Instant::now());
                let netns = host::network_namespace(wanted.guest)?;
                self.with(|ports| {
                    serve(ports, netns.as_fd(), spec, wanted.kernel.as_ref(), cgroups)
                })?;
            }
            unpaid.count = count;
        }
        Ok(())
    }

    /// Grants packets of a vrouter the XDP bypass for a while, if they
    /// may use it, and as far as its routes are known.
    fn lend(
        &self,
        node: &NodeId,
        wanted: &DesiredPorts,
        attended: &mut NodePortMonitor,
    ) -> Result<(), HostError> {
        let Some(vrouter) = wanted.vrouter().filter(|_| wanted.xdp_bypass()) else {
            (attended.routes, attended.lent) = (None, None);
            return Ok(());
        };
        let routes = match &mut attended.routes {
            Some(routes) => routes,
            none => {
                let netns = host::network_namespace(wanted.guest)?;
                none.insert(RouteMtu::open(netns.as_fd())?)
            }
        };
        match (routes.poll()?, attended.lent) {
            (Some(now), Some((last, at))) if now == last && at.elapsed() < LEASE_MAX / 3 => {}
            (Some(now), _) => {
                let lent = self.with(|ports| {
                    // From here on, a new observer revokes it.
                    let observed = lock(&self.observed);
                    let may = !observed.now.contains(node);
                    if may {
                        ports.activate_bypass(vrouter, LEASE_MAX, now)?;
                    }
                    Ok(may)
                })?;
                attended.lent = lent.then(|| (now, Instant::now()));
            }
            (None, Some(_)) => {
                self.with(|ports| Ok(ports.activate_bypass(vrouter, Duration::ZERO, [0; 2])?))?;
                attended.lent = None;
            }
            (None, None) => {}
        }
        Ok(())
    }

    /// Makes the program at a device deliver tunnel frames to ports, unless
    /// it does so since `before`. Returns the program, and the new value for
    /// `before`: the number of times that the common objects were opened.
    pub fn attach(
        &self,
        device: &str,
        pins: &Path,
        before: Option<u64>,
    ) -> Result<Option<(Xdp, u64)>, HostError> {
        self.with_made(BTreeSet::new(), |ports| {
            let opened = self.opened.load(Relaxed);
            if before == Some(opened) {
                return Ok(None);
            }
            Ok(Some((Xdp::attach_for(device, pins, ports)?, opened)))
        })
    }

    /// Removes all ports except the numbers that `kept` returns and those that
    /// are being created. After the last port it also removes the common kernel
    /// objects, unless `any` returns true because more ports are wanted.
    pub fn remove_but(
        &self,
        kept: &dyn Fn() -> BTreeSet<u32>,
        any: &dyn Fn() -> bool,
    ) -> Result<(), HostError> {
        let existing = self.with(|ports| Ok(ports.all()?));
        if matches!(existing, Err(HostError::NoPorts)) {
            return Ok(());
        }
        let gone = {
            let mut busy = lock(&self.busy);
            let kept = kept();
            let is_kept = |spec: &PortSpec| kept.contains(&spec.number);
            lock(&self.known).retain(|_, known| known.wanted.specs.iter().any(is_kept));
            self.tunnels.retain(&kept);
            lock(&self.observed).missed.retain(|number, _| kept.contains(number));
            // Ports that are being created or removed elsewhere are
            // skipped. They are checked again with their node.
            let is_free = |number: &u32| {
                !busy.removed.contains(number)
                    && !busy.made.iter().any(|made| made.contains(number))
            };
            let existing = existing.iter().flat_map(|existing| existing.difference(&kept));
            let gone: BTreeSet<u32> = existing.copied().filter(is_free).collect();
            busy.removed.extend(&gone);
            gone
        };
        let removed = self.with(|ports| Ok(ports.remove(&Vec::from_iter(gone.iter().copied()))?));
        let mut busy = lock(&self.busy);
        busy.removed.retain(|number| !gone.contains(number));
        self.freed.notify_all();
        if busy.removed.is_empty() && busy.made.is_empty() && kept().is_empty() && !any() {
            // Locked until everything is gone, since a query opens what it finds.
            let mut open = lock(&self.open);
            *open = None;
            *lock(&self.watch) = None;
            return Ok(ports::destroy(&self.netns, &self.pins)?);
        }
        drop(busy);
        existing.and(removed)
    }

    /// Returns a descriptor that is readable from when a guest changed one of its interfaces,
    /// which may be a port, until [`KernelPorts::touched`] is called. `None` if no ports exist.
    pub fn watch(&self) -> Option<Arc<OwnedFd>> {
        lock(&self.watch).clone()
    }

    /// Checks the ports of nodes whose guests changed an interface since the last call.
    pub fn touched(&self) -> Vec<ChangedNode> {
        let Some(all) = self.watch() else { return Vec::new() };
        let count = lock(&self.known).len();
        let ready = host::epoll_ready(all.as_fd(), count);
        let known = lock(&self.known);
        let moved = known.iter().filter(|(_, known)| ready.contains(&known.token));
        let moved: Vec<_> = moved
            .map(|(node, known)| {
                // Before the check, so that later changes are reported again.
                known.watch.clear();
                (node.clone(), known.wanted.clone())
            })
            .collect();
        drop(known);
        moved
            .into_iter()
            .filter_map(|(node, wanted)| {
                let (lost, changed) = self.check_node(&node, &wanted);
                (lost || changed).then_some(ChangedNode { node, port_gone: lost })
            })
            .collect()
    }

    /// Checks the ports of a node. Returns whether one is gone, and whether one
    /// changed since the last check. The end of a guest is handled elsewhere.
    fn check_node(&self, node: &NodeId, wanted: &DesiredPorts) -> (bool, bool) {
        let found = host::network_namespace(wanted.guest).and_then(|netns| {
            self.with(|ports| {
                let each = wanted.specs.iter().map(|spec| {
                    let changes = ports.changes(netns.as_fd(), spec)?;
                    Ok((spec.name.clone(), changes))
                });
                each.collect::<Result<Vec<_>, HostError>>()
            })
        });
        let Ok(mut found) = found else { return (false, false) };
        let is_gone =
            |(_, changes): &(String, Vec<InnerEndChange>)| changes.contains(&InnerEndChange::Gone);
        let lost = found.iter().any(is_gone);
        // It is recreated as it was.
        found.retain(|it| !is_gone(it) && !it.1.is_empty());
        let mut known = lock(&self.known);
        let known = known.get_mut(node).filter(|it| it.wanted.guest == wanted.guest);
        let before = known.map(|known| std::mem::replace(&mut known.changed, found.clone()));
        (lost, before.is_some_and(|before| before != found))
    }

    /// Returns a guest's changes to its ends of ports, as far as they
    /// persist: a port's name, and the changes.
    pub fn changes(&self, vnet: &str, node: &str) -> Vec<(String, Vec<InnerEndChange>)> {
        let known = lock(&self.known);
        let known = known.get(&(vnet.to_owned(), node.to_owned()));
        known.map(|known| known.changed.clone()).unwrap_or_default()
    }

    /// Adds the counters of planned ports to those of the mux, even if
    /// this daemon has not checked the ports yet.
    pub fn count(&self, plan: &Plan, stats: &mut Stats) {
        let nodes = stats.vnets.iter_mut().flat_map(|(vnet, stats)| {
            let plan = plan.vnets.get(vnet);
            let node = move |(name, stats)| Some((plan?.nodes.get(name)?, stats));
            stats.nodes.iter_mut().filter_map(node)
        });
        for (plan, stats) in nodes {
            for PortSpec { name, number, .. } in plan.kernel_links.values().map(|port| &port.spec) {
                let counted = match self.with(|ports| Ok(ports.counters(*number)?)) {
                    Ok(counted) => counted,
                    Err(HostError::NoPorts) => continue,
                    Err(_) => {
                        // The mux's own counters of this port are all zero.
                        stats.ports.remove(name);
                        continue;
                    }
                };
                stats.in_flight += counted.in_transit();
                let underlay = self.tunnels.problem(*number);
                let capture_missed = lock(&self.observed)
                    .missed
                    .get(number)
                    .map_or(0, |missed| missed.load(Relaxed));
                let counted = PortStats { underlay, capture_missed, ..port_stats(&counted) };
                stats.ports.insert(name.clone(), counted);
            }
        }
    }
}

impl DesiredPorts {
    /// Returns its number among vrouters of this kind.
    fn vrouter(&self) -> Option<u32> {
        Some(self.specs.first()?.vrouter)
    }

    /// True if its packets may use the XDP bypass.
    fn xdp_bypass(&self) -> bool {
        self.kernel.as_ref().is_some_and(|kernel| kernel.xdp_bypass) && ports::reads_hooks()
    }
}

/// Returns the shortest time between two setups of the same port's thread, for a tenant
/// with this many ports. It ensures at most [`SERVED_AGAIN`] setups per interval.
fn serve_interval(ports: usize) -> Duration {
    ATTEND_INTERVAL * ports.div_ceil(SERVED_AGAIN) as u32
}

/// Moves the kernel's work for a port to threads that are charged to
/// its vrouter, if the vrouter has a share.
fn serve(
    ports: &ports::Ports,
    netns: BorrowedFd<'_>,
    spec: &PortSpec,
    kernel: Option<&KernelPlan>,
    cgroups: &Cgroups,
) -> Result<(), HostError> {
    let Some(kernel) = kernel.filter(|_| napi::has_thread_ids()) else { return Ok(()) };
    let leaf = format!("{}/{THREADS}", kernel.cgroup);
    for thread in ports.serve(netns, spec)? {
        cgroups.charge(&leaf, thread.pid).map_err(HostError::from)?;
    }
    Ok(())
}

fn port_stats(counted: &KernelPortCounters) -> PortStats {
    let dropped = Reason::ALL.into_iter().filter_map(|reason| {
        let count = counted.dropped(reason);
        (count > 0).then(|| (reason.name().to_owned(), count))
    });
    PortStats {
        received: counted.from_link.frames,
        received_bytes: counted.from_link.bytes,
        made: counted.from_vrouter.frames,
        sent: counted.to_link.frames,
        sent_bytes: counted.to_link.bytes,
        punted: counted.to_vrouter.frames,
        dropped: dropped.collect(),
        ..PortStats::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A late query, after the last port is gone, creates nothing.
    #[test]
    fn port_query_creates_no_kernel_objects() {
        let nowhere = std::env::temp_dir().join(format!("pdpd-no-ports-{}", std::process::id()));
        let places = DaemonPaths {
            run: nowhere.join("run"),
            lib: PathBuf::new(),
            pins: nowhere.join("pins"),
        };
        let ports = KernelPorts::new(&places);
        let result = ports.with(|ports| Ok(ports.all()?));
        assert!(matches!(result, Err(HostError::NoPorts)), "{result:?}");
        assert!(!nowhere.exists());
    }

    /// A port whose kernel request takes long delays no query, creation or removal of other
    /// ports. No port is created while it is removed, or removed while it is created.
    #[test]
    fn slow_port_does_not_delay_other_ports() {
        use std::sync::mpsc::channel;

        let place = tempfile::tempdir().unwrap();
        pdp_net::xdp::mount_bpf_fs().unwrap();
        let pins =
            Path::new(pdp_net::xdp::BPF_FS).join(format!("pdpd-test-{}", std::process::id()));
        let places =
            DaemonPaths { run: place.path().join("run"), lib: PathBuf::new(), pins: pins.clone() };
        let ports = KernelPorts::new(&places);
        let numbers = |numbers: &[u32]| BTreeSet::from_iter(numbers.iter().copied());
        std::thread::scope(|scope| {
            let ((begun, begins), (go_on, goes_on)) = (channel(), channel());
            let slow = ports.with_made(numbers(&[0]), |_| Ok(()));
            slow.unwrap();
            let slow = scope.spawn(|| {
                ports.with_made(numbers(&[1, 2]), move |_| {
                    begun.send(()).unwrap();
                    goes_on.recv().unwrap();
                    Ok(())
                })
            });
            begins.recv().unwrap();
            assert!(ports.with(|ports| Ok(ports.counters(7)?)).is_ok());
            ports.with_made(numbers(&[3]), |_| Ok(())).unwrap();
            // The port can't be removed now, and the common objects stay.
            ports.remove_but(&|| numbers(&[]), &|| false).unwrap();
            assert!(places.pins.join("_ports").exists());
            go_on.send(()).unwrap();
            slow.join().unwrap().unwrap();

            lock(&ports.busy).removed.insert(4);
            let made = scope.spawn(|| ports.with_made(numbers(&[4]), |_| Ok(())));
            ports.with_made(numbers(&[5]), |_| Ok(())).unwrap();
            std::thread::sleep(Duration::from_millis(50));
            assert!(!made.is_finished(), "it is being removed");
            lock(&ports.busy).removed.clear();
            ports.freed.notify_all();
            made.join().unwrap().unwrap();
        });
        ports.remove_but(&|| numbers(&[]), &|| false).unwrap();
        assert!(!places.pins.join("_ports").exists());
        let _ = std::fs::remove_dir(&pins);
    }

    /// PdP sets up only some of a tenant's many ports again per second.
    /// A tenant with few ports never waits.
    #[test]
    fn port_restarts_per_second_are_limited() {
        for ports in 1..10_000 {
            let each_second = ports as f64 / serve_interval(ports).as_secs_f64();
            assert!(each_second <= SERVED_AGAIN as f64, "{each_second} of {ports}");
        }
        assert_eq!(serve_interval(SERVED_AGAIN), ATTEND_INTERVAL);
    }
}
