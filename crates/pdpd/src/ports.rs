//! Ports of vrouters whose frames stay in the kernel ([`pdp_net::ports`]), as the keeper needs them, and their counters
//! among those of the mux.
//!
//! The kernel's work at each of them is done by a kernel thread of its own, charged to the vrouter's share of a
//! forwarding engine. Once a second an attendant ([`attend`]) looks whether it is still that thread, and lends
//! the short way to those that may go it.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use pdp_container::Process;
use pdp_container::cgroup::Cgroups;
use pdp_net::interface::Watch;
use pdp_net::ports::{self, Change, Counters, LEASE_MAX, PortSpec, Power, Reason, Way};
use pdp_net::route_mtu::RouteMtu;
use pdp_net::xdp::Xdp;
use pdp_net::{napi, netns};
use pdp_proto::mux;

use crate::far::Ways;
use crate::host::{self, Host, HostError};
use crate::observers::Place;
use crate::plan::{KernelPlan, Places, Plan, PortNow, To};
use crate::reconcile::lock;

/// A node: its vnet and its name there.
type Node = (String, String);

/// Between two looks of the attendant.
const ATTEND_INTERVAL: Duration = Duration::from_secs(1);

/// Ports of a tenant that are served again between two looks, in the long run: a guest that takes its ends down and up
/// asks for it each time, and others wait for about a millisecond meanwhile.
const SERVED_AGAIN: usize = 16;

/// The leaf of a vrouter's cgroup that threads are in.
const THREADS: &str = "threads";

/// All such ports of this daemon.
#[derive(Debug)]
pub struct Ports {
    netns: PathBuf,
    pins: PathBuf,
    /// What there is in the kernel, once any was asked for.
    open: Arc<Mutex<Option<Arc<ports::Ports>>>>,
    /// Ports that are being made or removed, which takes requests to the kernel that others may hold up.
    busy: Mutex<Busy>,
    /// Some of them were removed.
    freed: Condvar,
    /// How many times that was opened: each time its maps may be others.
    opened: AtomicU64,
    /// Where what leaves to the outside goes.
    ways: Arc<Ways>,
    /// What tells that a guest did something to an interface of its own: readable while any of `known` is.
    watch: Mutex<Option<Arc<OwnedFd>>>,
    /// Which there are to be, and whose.
    known: Mutex<BTreeMap<Node, Known>>,
    /// The tokens of `known` are below it.
    tokens: AtomicU64,
    observed: Arc<Mutex<Observed>>,
}

/// Numbers of ports at which somebody is.
#[derive(Debug, Default)]
struct Busy {
    made: Vec<BTreeSet<u32>>,
    removed: BTreeSet<u32>,
}

/// What is looked at.
#[derive(Debug, Default)]
struct Observed {
    /// Nodes, each as many times as somebody looks at a port of it.
    now: Vec<Node>,
    /// Frames that were missed, by number of the port.
    missed: BTreeMap<u32, Arc<AtomicU64>>,
}

/// Somebody looks at frames of a port: packets of its router don't go the short way as long as this is there, which a
/// look into its network namespace does not see.
#[derive(Debug)]
pub struct Observer {
    observed: Arc<Mutex<Observed>>,
    node: Node,
    _place: Place,
    missed: Arc<AtomicU64>,
    /// The router's control guest.
    pub guest: Process,
    /// Its network namespace.
    pub netns: OwnedFd,
    /// Index of the port's interface there.
    pub index: u32,
    /// Whether packets may go the short way otherwise.
    pub short_way: bool,
}

impl Observer {
    /// Counts frames that whoever looks did not see.
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

/// A node of which something is otherwise than when its ports were looked at last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Touched {
    /// The vnet, and the name there.
    pub node: Node,
    /// A port of it is gone.
    pub lost: bool,
}

/// A node's ports as they are to be.
#[derive(Clone, Debug)]
struct Wanted {
    /// In whose network namespace they are.
    guest: Process,
    specs: Vec<PortSpec>,
    kernel: Option<KernelPlan>,
}

/// What is known of a node's ports.
#[derive(Debug)]
struct Known {
    wanted: Wanted,
    /// What the descriptor of `Ports::watch` calls it.
    token: u64,
    /// Tells of interfaces of the guest. It keeps the guest's network namespace, so it goes with the node's ports.
    watch: Watch,
    /// What of them was otherwise than it was made when it was looked at last: a port's name, and what.
    changed: Vec<(String, Vec<Change>)>,
}

/// What the attendant knows of a node.
#[derive(Debug)]
struct Attended {
    /// Its namespace is that of this guest.
    guest: Process,
    /// Where its packets may go the short way.
    routes: Option<RouteMtu>,
    /// With which MTUs that was lent last, and when.
    lent: Option<([u32; 2], Instant)>,
    /// By port.
    unpaid: BTreeMap<u32, Unpaid>,
}

/// What is known of frames of a port that nobody paid for.
#[derive(Clone, Copy, Debug, Default)]
struct Unpaid {
    /// How many there were when it was last as it should be.
    count: u64,
    /// When it was last served again.
    served: Option<Instant>,
}

impl Ports {
    /// Those of the daemon that has these places.
    pub fn new(places: &Places) -> Self {
        let (netns, pins) = (places.run.join("ports"), places.pins.join("_ports"));
        let (open, busy, freed, opened, ways) = Default::default();
        let (watch, known, tokens, observed) = Default::default();
        Self { netns, pins, open, busy, freed, opened, ways, watch, known, tokens, observed }
    }

    /// Does something with what there is. Who only asks begins nothing: it may come late, when the last port is gone.
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

    /// What all ports have in common, which is there afterwards.
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

    /// Makes ports of these numbers, once nobody removes one of them; nobody does before that is done.
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

    /// Sees to it that ports of a node are there, joined, limited, and with carrier or without.
    pub fn see_to(
        &self,
        (vnet, node): (&str, &str),
        guest: Process,
        kernel: Option<&KernelPlan>,
        ports: &[PortNow<'_>],
        cgroups: &Cgroups,
    ) -> Result<(), HostError> {
        let key = (vnet.to_owned(), node.to_owned());
        let specs: Vec<_> = ports.iter().map(|it| it.port.spec.clone()).collect();
        let wanted = Wanted { guest, specs, kernel: kernel.cloned() };
        let Some(vrouter) = wanted.vrouter() else {
            lock(&self.known).remove(&key);
            return Ok(());
        };
        let netns = host::network_namespace(guest)?;
        let numbers = wanted.specs.iter().map(|spec| spec.number).collect();
        self.with_made(numbers, |all| {
            self.know(&key, &wanted, netns.as_fd())?;
            for PortNow { port, carrier, joined, device } in ports {
                let number = port.spec.number;
                all.make(netns.as_fd(), &port.spec)?;
                match &port.to {
                    To::Port(to) => {
                        all.join(number, if *joined { Way::Port(*to) } else { Way::None })?;
                        // Which the other end lost where this one is made anew.
                        all.join(*to, if *joined { Way::Port(number) } else { Way::None })?;
                        self.ways.leave(number);
                    }
                    To::Outside(far) => {
                        let device = device.filter(|_| *joined);
                        Ways::join(&self.ways, &self.open, all, &port.spec, far, device)?;
                    }
                }
                all.police(number, port.rate)?;
                all.set_carrier(number, *carrier)?;
                serve(all, netns.as_fd(), &port.spec, kernel, cgroups)?;
            }
            let limited = kernel.filter(|kernel| !kernel.borrows);
            let power = limited.map(|it| Power { millicores: it.placement.power_millicores });
            all.power(vrouter, power)?;
            // Where it may, the attendant lends it.
            if !wanted.short_way() {
                all.lend(vrouter, Duration::ZERO, [0; 2])?;
            }
            Ok(())
        })?;
        self.look(&key, &wanted);
        Ok(())
    }

    /// Has what a guest does to its interfaces told from now on.
    fn know(&self, key: &Node, wanted: &Wanted, netns: BorrowedFd<'_>) -> Result<(), HostError> {
        let (mut known, wanted) = (lock(&self.known), wanted.clone());
        if let Some(known) = known.get_mut(key).filter(|it| it.wanted.guest == wanted.guest) {
            known.wanted = wanted;
            return Ok(());
        }
        let watch = netns::within(netns, Watch::new)?;
        let token = self.tokens.fetch_add(1, Relaxed);
        if let Some(all) = self.watch() {
            host::epoll_add(all.as_fd(), watch.as_fd(), token)?;
        }
        known.insert(key.clone(), Known { wanted, token, watch, changed: Vec::new() });
        Ok(())
    }

    /// Begins to look at frames of a port, by who has a place for it.
    ///
    /// # Errors
    /// [`HostError::NoPorts`]: it is not there now.
    pub fn observe(
        &self,
        place: Place,
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
            short_way: wanted.short_way(),
        };
        let index = self.with(|ports| {
            // Whoever lends it from here on sees that it is observed.
            ports.lend(vrouter, Duration::ZERO, [0; 2])?;
            let index = ports.index(observer.netns.as_fd(), number)?;
            if index.is_some() {
                observer.missed = lock(&self.observed).missed.entry(number).or_default().clone();
            }
            Ok(index)
        })?;
        observer.index = index.ok_or(HostError::NoPorts)?;
        Ok(observer)
    }

    fn attend(&self, cgroups: &Cgroups, attended: &mut BTreeMap<Node, Attended>, since: Duration) {
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
            let new = || Attended { guest, routes: None, lent: None, unpaid: BTreeMap::new() };
            let attended = attended.entry(node.clone()).or_insert_with(new);
            // Whose guest ended is looked at for that.
            let _ = self.serve_again(wanted, attended, again, cgroups);
            if self.lend(node, wanted, attended).is_err() {
                (attended.routes, attended.lent) = (None, None);
            }
            if let (Some(routes), Some(vrouter)) = (&attended.routes, wanted.vrouter()) {
                routes.confirm(used.remove(&vrouter).unwrap_or_default());
            }
        }
    }

    /// Has ports served again where frames were dropped since nobody paid for them: the guest took its end down, say,
    /// and its thread went with that. Each of them once in an `interval` at most.
    fn serve_again(
        &self,
        wanted: &Wanted,
        attended: &mut Attended,
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

    /// Lets packets of a vrouter go the short way for a while, if they may, and as far as its routes are known.
    fn lend(&self, node: &Node, wanted: &Wanted, attended: &mut Attended) -> Result<(), HostError> {
        let Some(vrouter) = wanted.vrouter().filter(|_| wanted.short_way()) else {
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
        match (routes.look()?, attended.lent) {
            (Some(now), Some((last, at))) if now == last && at.elapsed() < LEASE_MAX / 3 => {}
            (Some(now), _) => {
                let lent = self.with(|ports| {
                    // Whoever comes to observe it from here on ends it.
                    let observed = lock(&self.observed);
                    let may = !observed.now.contains(node);
                    if may {
                        ports.lend(vrouter, LEASE_MAX, now)?;
                    }
                    Ok(may)
                })?;
                attended.lent = lent.then(|| (now, Instant::now()));
            }
            (None, Some(_)) => {
                self.with(|ports| Ok(ports.lend(vrouter, Duration::ZERO, [0; 2])?))?;
                attended.lent = None;
            }
            (None, None) => {}
        }
        Ok(())
    }

    /// Has the program at a device give ports what comes by their tunnels, unless it does since `before`. Returns when it
    /// began, for the next time.
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

    /// Removes all ports but those of the numbers that `kept` says, and those that somebody is making; with the last one
    /// all that they had in common, unless `any` says then that some are to be made.
    pub fn remove_but(
        &self,
        kept: &dyn Fn() -> BTreeSet<u32>,
        any: &dyn Fn() -> bool,
    ) -> Result<(), HostError> {
        let there = self.with(|ports| Ok(ports.all()?));
        if matches!(there, Err(HostError::NoPorts)) {
            return Ok(());
        }
        let gone = {
            let mut busy = lock(&self.busy);
            let kept = kept();
            let is_kept = |spec: &PortSpec| kept.contains(&spec.number);
            lock(&self.known).retain(|_, known| known.wanted.specs.iter().any(is_kept));
            self.ways.retain(&kept);
            lock(&self.observed).missed.retain(|number, _| kept.contains(number));
            // What somebody else is at is theirs to finish, and is looked at again when their node is.
            let is_free = |number: &u32| {
                !busy.removed.contains(number)
                    && !busy.made.iter().any(|made| made.contains(number))
            };
            let there = there.iter().flat_map(|there| there.difference(&kept));
            let gone: BTreeSet<u32> = there.copied().filter(is_free).collect();
            busy.removed.extend(&gone);
            gone
        };
        let removed = self.with(|ports| Ok(ports.remove(&Vec::from_iter(gone.iter().copied()))?));
        let mut busy = lock(&self.busy);
        busy.removed.retain(|number| !gone.contains(number));
        self.freed.notify_all();
        if busy.removed.is_empty() && busy.made.is_empty() && kept().is_empty() && !any() {
            // Held until all is gone: a question opens what it finds.
            let mut open = lock(&self.open);
            *open = None;
            *lock(&self.watch) = None;
            return Ok(ports::destroy(&self.netns, &self.pins)?);
        }
        drop(busy);
        there.and(removed)
    }

    /// What is readable from when a guest did something to an interface of its own, which may be a port, until
    /// [`Ports::touched`] looks; `None`: there are no ports.
    pub fn watch(&self) -> Option<Arc<OwnedFd>> {
        lock(&self.watch).clone()
    }

    /// Looks at the ports of nodes whose guests did something to an interface since the last time.
    pub fn touched(&self) -> Vec<Touched> {
        let Some(all) = self.watch() else { return Vec::new() };
        let count = lock(&self.known).len();
        let told = host::epoll_ready(all.as_fd(), count);
        let known = lock(&self.known);
        let moved = known.iter().filter(|(_, known)| told.contains(&known.token));
        let moved: Vec<_> = moved
            .map(|(node, known)| {
                // Before the look: what happens from now on is told again.
                known.watch.clear();
                (node.clone(), known.wanted.clone())
            })
            .collect();
        drop(known);
        moved
            .into_iter()
            .filter_map(|(node, wanted)| {
                let (lost, changed) = self.look(&node, &wanted);
                (lost || changed).then_some(Touched { node, lost })
            })
            .collect()
    }

    /// Looks at the ports of a node: whether one is gone, and whether one is otherwise than at the last look. Those of a
    /// guest that ended are looked at for that.
    fn look(&self, node: &Node, wanted: &Wanted) -> (bool, bool) {
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
        let is_gone = |(_, changes): &(String, Vec<Change>)| changes.contains(&Change::Gone);
        let lost = found.iter().any(is_gone);
        // It is made again, as it was.
        found.retain(|it| !is_gone(it) && !it.1.is_empty());
        let mut known = lock(&self.known);
        let known = known.get_mut(node).filter(|it| it.wanted.guest == wanted.guest);
        let before = known.map(|known| std::mem::replace(&mut known.changed, found.clone()));
        (lost, before.is_some_and(|before| before != found))
    }

    /// What a guest did to its ends of ports, as far as it was not undone: a port's name, and what.
    pub fn changes(&self, vnet: &str, node: &str) -> Vec<(String, Vec<Change>)> {
        let known = lock(&self.known);
        let known = known.get(&(vnet.to_owned(), node.to_owned()));
        known.map(|known| known.changed.clone()).unwrap_or_default()
    }

    /// Puts the counters of planned ports into those that the mux has of their nodes, whether this daemon looked at them
    /// already or not.
    pub fn count(&self, plan: &Plan, stats: &mut mux::Stats) {
        let nodes = stats.vnets.iter_mut().flat_map(|(vnet, stats)| {
            let plan = plan.vnets.get(vnet);
            let node = move |(name, stats)| Some((plan?.nodes.get(name)?, stats));
            stats.nodes.iter_mut().filter_map(node)
        });
        for (plan, stats) in nodes {
            for PortSpec { name, number, .. } in plan.straight.values().map(|port| &port.spec) {
                let counted = match self.with(|ports| Ok(ports.counters(*number)?)) {
                    Ok(counted) => counted,
                    Err(HostError::NoPorts) => continue,
                    Err(_) => {
                        // What the mux has of it would be that it counted nothing.
                        stats.ports.remove(name);
                        continue;
                    }
                };
                stats.in_flight += counted.under_way();
                let underlay = self.ways.problem(*number);
                let capture_missed = lock(&self.observed)
                    .missed
                    .get(number)
                    .map_or(0, |missed| missed.load(Relaxed));
                let counted = mux::PortStats { underlay, capture_missed, ..port_stats(&counted) };
                stats.ports.insert(name.clone(), counted);
            }
        }
    }
}

impl Wanted {
    /// Its number among vrouters of this kind.
    fn vrouter(&self) -> Option<u32> {
        Some(self.specs.first()?.vrouter)
    }

    /// Whether its packets may go the short way.
    fn short_way(&self) -> bool {
        self.kernel.as_ref().is_some_and(|kernel| kernel.short_way) && ports::obeys_hooks()
    }
}

/// Looks after all ports of a machine again and again, as long as there is a daemon.
///
/// # Errors
/// There is no thread for it.
pub fn attend(host: &Arc<Host>) -> std::io::Result<()> {
    let host = Arc::downgrade(host);
    let attend = move || {
        let (mut attended, mut since) = (BTreeMap::new(), ports::now());
        while let Some(host) = Weak::upgrade(&host) {
            let now = ports::now();
            host.bounds.attend();
            host.ports.attend(host.runtime.cgroups(), &mut attended, since);
            since = now;
            drop(host);
            std::thread::sleep(ATTEND_INTERVAL);
        }
    };
    std::thread::Builder::new().name("ports".into()).spawn(attend).map(drop)
}

/// Who a vnet's ports are counted for: its tenant, or itself where it has none.
pub(crate) fn owner(vnet: &str) -> &str {
    pdp_spec::tenant_of(vnet).unwrap_or(vnet)
}

/// How often one of so many ports of a tenant may be served again, so that no more than [`SERVED_AGAIN`] of them are
/// between two looks.
fn serve_interval(ports: usize) -> Duration {
    ATTEND_INTERVAL * ports.div_ceil(SERVED_AGAIN) as u32
}

/// Has what the kernel does at a port done by threads that are charged to its vrouter, where it has a share.
fn serve(
    ports: &ports::Ports,
    netns: BorrowedFd<'_>,
    spec: &PortSpec,
    kernel: Option<&KernelPlan>,
    cgroups: &Cgroups,
) -> Result<(), HostError> {
    let Some(kernel) = kernel.filter(|_| napi::are_told()) else { return Ok(()) };
    let leaf = format!("{}/{THREADS}", kernel.cgroup);
    for thread in ports.serve(netns, spec)? {
        cgroups.charge(&leaf, thread.pid).map_err(HostError::from)?;
    }
    Ok(())
}

fn port_stats(counted: &Counters) -> mux::PortStats {
    let dropped = Reason::ALL.into_iter().filter_map(|reason| {
        let count = counted.dropped(reason);
        (count > 0).then(|| (reason.name().to_owned(), count))
    });
    mux::PortStats {
        received: counted.from_link.frames,
        received_bytes: counted.from_link.bytes,
        made: counted.from_vrouter.frames,
        sent: counted.to_link.frames,
        sent_bytes: counted.to_link.bytes,
        punted: counted.to_vrouter.frames,
        dropped: dropped.collect(),
        ..mux::PortStats::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A question that comes late, when the last port is gone, leaves nothing behind.
    #[test]
    fn who_only_asks_begins_nothing() {
        let nowhere = std::env::temp_dir().join(format!("pdpd-no-ports-{}", std::process::id()));
        let places =
            Places { run: nowhere.join("run"), lib: PathBuf::new(), pins: nowhere.join("pins") };
        let ports = Ports::new(&places);
        let asked = ports.with(|ports| Ok(ports.all()?));
        assert!(matches!(asked, Err(HostError::NoPorts)), "{asked:?}");
        assert!(!nowhere.exists());
    }

    /// One whose request to the kernel takes long holds up nobody who asks of other ports, or makes or removes them;
    /// and nobody makes a port while it is removed, or removes one while it is made.
    #[test]
    fn a_port_that_takes_long_holds_up_no_other() {
        use std::sync::mpsc::channel;

        let place = tempfile::tempdir().unwrap();
        pdp_net::xdp::mount_bpf_fs().unwrap();
        let pins =
            Path::new(pdp_net::xdp::BPF_FS).join(format!("pdpd-test-{}", std::process::id()));
        let places =
            Places { run: place.path().join("run"), lib: PathBuf::new(), pins: pins.clone() };
        let ports = Ports::new(&places);
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
            // It is none's to remove by now, and what all have in common stays.
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

    /// However many ports a tenant has, no more than some of them are served again in a second; one that has few
    /// waits for none.
    #[test]
    fn few_ports_of_a_tenant_are_served_again() {
        for ports in 1..10_000 {
            let each_second = ports as f64 / serve_interval(ports).as_secs_f64();
            assert!(each_second <= SERVED_AGAIN as f64, "{each_second} of {ports}");
        }
        assert_eq!(serve_interval(SERVED_AGAIN), ATTEND_INTERVAL);
    }
}
