//! Ports of vrouters whose frames stay in the kernel ([`pdp_net::ports`]), as the keeper needs them, and their counters
//! among those of the mux.
//!
//! The kernel's work at each of them is done by a kernel thread of its own, charged to the vrouter's share of a
//! forwarding engine. Once a second an attendant ([`attend`]) looks whether it is still that thread, and lends
//! the short way to those that may go it.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use pdp_container::Process;
use pdp_container::cgroup::Cgroups;
use pdp_net::interface::Watch;
use pdp_net::napi;
use pdp_net::ports::{self, Change, Counters, LEASE_MAX, PortSpec, Power, Reason, Way};
use pdp_net::route_mtu::RouteMtu;
use pdp_proto::mux;

use crate::host::{self, Host, HostError};
use crate::plan::{KernelPlan, Places, PortNow};
use crate::reconcile::lock;

/// A node: its vnet and its name there.
type Node = (String, String);

/// Between two looks of the attendant.
const ATTEND_INTERVAL: Duration = Duration::from_secs(1);

/// The leaf of a vrouter's cgroup that threads are in.
const THREADS: &str = "threads";

/// Ports of a node.
#[derive(Clone, Debug)]
struct Known {
    guest: Process,
    specs: Vec<PortSpec>,
    kernel: Option<KernelPlan>,
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
    /// Frames that nobody paid for, by port.
    unpaid: BTreeMap<u32, u64>,
}

/// All such ports of this daemon.
#[derive(Debug)]
pub struct Ports {
    netns: PathBuf,
    pins: PathBuf,
    /// What there is in the kernel, once any was asked for.
    open: Mutex<Option<ports::Ports>>,
    /// What tells that one of them may be gone.
    watch: Mutex<Option<Arc<Watch>>>,
    /// Which there are to be, and whose.
    known: Mutex<BTreeMap<Node, Known>>,
}

impl Ports {
    /// Those of the daemon that has these places.
    pub fn new(places: &Places) -> Self {
        let (netns, pins) = (places.run.join("ports"), places.pins.join("_ports"));
        let (open, watch, known) = Default::default();
        Self { netns, pins, open, watch, known }
    }

    fn with<T>(
        &self,
        run: impl FnOnce(&mut ports::Ports) -> Result<T, HostError>,
    ) -> Result<T, HostError> {
        self.with_open(&mut lock(&self.open), run)
    }

    fn with_open<T>(
        &self,
        open: &mut Option<ports::Ports>,
        run: impl FnOnce(&mut ports::Ports) -> Result<T, HostError>,
    ) -> Result<T, HostError> {
        let mut ports = match open.take() {
            Some(ports) => ports,
            None => {
                pdp_net::xdp::mount_bpf_fs()?;
                let ports = ports::Ports::open(&self.netns, &self.pins)?;
                *lock(&self.watch) = Some(Arc::new(ports.watch()?));
                ports
            }
        };
        let done = run(&mut ports);
        *open = Some(ports);
        done
    }

    /// Sees to it that ports of a node are there, joined, limited, and with carrier or without.
    pub fn see_to(
        &self,
        (vnet, node): (&str, &str),
        guest: Process,
        kernel: Option<&KernelPlan>,
        wanted: &[PortNow<'_>],
        cgroups: &Cgroups,
    ) -> Result<(), HostError> {
        let key = (vnet.to_owned(), node.to_owned());
        let specs = wanted.iter().map(|it| it.port.spec.clone()).collect();
        let known = Known { guest, specs, kernel: kernel.cloned() };
        match wanted.is_empty() {
            true => lock(&self.known).remove(&key),
            false => lock(&self.known).insert(key, known.clone()),
        };
        if wanted.is_empty() {
            return Ok(());
        }
        let netns = host::network_namespace(guest)?;
        self.with(|ports| {
            for PortNow { port, carrier, joined } in wanted {
                let number = port.spec.number;
                ports.make(netns.as_fd(), &port.spec)?;
                ports.join(number, if *joined { Way::Port(port.to) } else { Way::None })?;
                // Which the other end lost where this one is made anew.
                ports.join(port.to, if *joined { Way::Port(number) } else { Way::None })?;
                ports.police(number, port.rate)?;
                ports.set_carrier(number, *carrier)?;
                serve(ports, netns.as_fd(), &port.spec, kernel, cgroups)?;
            }
            let power = kernel
                .filter(|kernel| !kernel.borrows)
                .map(|kernel| Power { millicores: kernel.placement.power_millicores });
            let Some(vrouter) = known.vrouter() else { return Ok(()) };
            ports.power(vrouter, power)?;
            // Where it may, the attendant lends it.
            if !known.short_way() {
                ports.lend(vrouter, Duration::ZERO, [0; 2])?;
            }
            Ok(())
        })
    }

    fn attend(&self, cgroups: &Cgroups, attended: &mut BTreeMap<Node, Attended>, since: Duration) {
        let all = lock(&self.known).clone();
        attended.retain(|node, it| all.get(node).is_some_and(|known| known.guest == it.guest));
        if all.is_empty() {
            return;
        }
        let used = self.with(|ports| Ok(ports.used(since)?)).unwrap_or_default();
        for (node, known) in all {
            let guest = known.guest;
            let new = || Attended { guest, routes: None, lent: None, unpaid: BTreeMap::new() };
            let attended = attended.entry(node).or_insert_with(new);
            // Whose guest ended is looked at for that.
            let _ = self.serve_again(&known, attended, cgroups);
            if self.lend(&known, attended).is_err() {
                (attended.routes, attended.lent) = (None, None);
            }
            if let (Some(routes), Some(vrouter)) = (&attended.routes, known.vrouter()) {
                let own = used.iter().filter(|used| used.vrouter == vrouter);
                routes.confirm(own.map(|used| (used.index, used.address)));
            }
        }
    }

    /// Has ports served again where frames were dropped since nobody paid for them: the guest took its end down, say,
    /// and its thread went with that.
    fn serve_again(
        &self,
        known: &Known,
        attended: &mut Attended,
        cgroups: &Cgroups,
    ) -> Result<(), HostError> {
        for spec in &known.specs {
            let unpaid = self.with(|ports| Ok(ports.unpaid(spec.number)?))?;
            let before = attended.unpaid.get(&spec.number).copied().unwrap_or(0);
            if unpaid > before {
                let netns = host::network_namespace(known.guest)?;
                self.with(|ports| {
                    serve(ports, netns.as_fd(), spec, known.kernel.as_ref(), cgroups)
                })?;
            }
            attended.unpaid.insert(spec.number, unpaid);
        }
        Ok(())
    }

    /// Lets packets of a vrouter go the short way for a while, if they may, and as far as its routes are known.
    fn lend(&self, known: &Known, attended: &mut Attended) -> Result<(), HostError> {
        let Some(vrouter) = known.vrouter().filter(|_| known.short_way()) else {
            (attended.routes, attended.lent) = (None, None);
            return Ok(());
        };
        let routes = match &mut attended.routes {
            Some(routes) => routes,
            none => {
                let netns = host::network_namespace(known.guest)?;
                none.insert(RouteMtu::open(netns.as_fd())?)
            }
        };
        match (routes.look()?, attended.lent) {
            (Some(now), Some((last, at))) if now == last && at.elapsed() < LEASE_MAX / 3 => {}
            (Some(now), _) => {
                self.with(|ports| Ok(ports.lend(vrouter, LEASE_MAX, now)?))?;
                attended.lent = Some((now, Instant::now()));
            }
            (None, Some(_)) => {
                self.with(|ports| Ok(ports.lend(vrouter, Duration::ZERO, [0; 2])?))?;
                attended.lent = None;
            }
            (None, None) => {}
        }
        Ok(())
    }

    /// Removes all ports but those of the numbers that `kept` says once no other is being made; with the last one all
    /// that they had in common.
    pub fn remove_but(&self, kept: &dyn Fn() -> BTreeSet<u32>) -> Result<(), HostError> {
        let mut open = lock(&self.open);
        if open.is_none() && !self.pins.exists() && !self.netns.exists() {
            return Ok(());
        }
        let kept = kept();
        let is_kept = |spec: &PortSpec| kept.contains(&spec.number);
        lock(&self.known).retain(|_, known| known.specs.iter().any(is_kept));
        if kept.is_empty() {
            *open = None;
            *lock(&self.watch) = None;
            return Ok(ports::destroy(&self.netns, &self.pins)?);
        }
        self.with_open(&mut open, |ports| {
            let gone: Vec<u32> = ports.all()?.difference(&kept).copied().collect();
            Ok(ports.remove(&gone)?)
        })
    }

    /// What tells that a guest may have deleted a port; `None`: there are none.
    pub fn watch(&self) -> Option<Arc<Watch>> {
        lock(&self.watch).clone()
    }

    /// Nodes that a port is gone of.
    pub fn lost(&self) -> Vec<Node> {
        let known = lock(&self.known).clone();
        let is_lost = |guest: Process, specs: &[PortSpec]| -> Result<bool, HostError> {
            let netns = host::network_namespace(guest)?;
            self.with(|ports| {
                let mut lost = false;
                for spec in specs {
                    lost |= ports.changes(netns.as_fd(), spec)?.contains(&Change::Gone);
                }
                Ok(lost)
            })
        };
        // Whose guest ended is looked at for that.
        let lost =
            known.into_iter().filter(|(_, it)| is_lost(it.guest, &it.specs).unwrap_or(false));
        lost.map(|(node, _)| node).collect()
    }

    /// Puts the counters of ports into those that the mux has of their nodes.
    pub fn count(&self, stats: &mut mux::Stats) {
        let known = lock(&self.known);
        let wanted = known.iter().filter(|((vnet, _), _)| stats.vnets.contains_key(vnet));
        let wanted: Vec<_> = wanted.map(|(node, known)| (node.clone(), known.clone())).collect();
        drop(known);
        for ((vnet, node), Known { specs, .. }) in wanted {
            let found = stats.vnets.get_mut(&vnet).and_then(|vnet| vnet.nodes.get_mut(&node));
            let Some(stats) = found else { continue };
            for PortSpec { name, number, .. } in specs {
                let Ok(counted) = self.with(|ports| Ok(ports.counters(number)?)) else {
                    // What the mux has of it would be that it counted nothing.
                    stats.ports.remove(&name);
                    continue;
                };
                stats.in_flight += counted.under_way();
                stats.ports.insert(name, port_stats(&counted));
            }
        }
    }
}

impl Known {
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
            host.ports.attend(host.runtime.cgroups(), &mut attended, since);
            since = now;
            drop(host);
            std::thread::sleep(ATTEND_INTERVAL);
        }
    };
    std::thread::Builder::new().name("ports".into()).spawn(attend).map(drop)
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
