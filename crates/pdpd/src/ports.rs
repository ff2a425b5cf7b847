//! Ports of vrouters whose frames stay in the kernel ([`pdp_net::ports`]), as the keeper needs them, and their counters
//! among those of the mux.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use pdp_container::Process;
use pdp_net::interface::Watch;
use pdp_net::ports::{self, Change, Counters, PortSpec, Reason, Way};
use pdp_proto::mux;

use crate::host::{self, HostError};
use crate::plan::{Places, PortNow};
use crate::reconcile::lock;

/// A node: its vnet and its name there.
type Node = (String, String);

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
    known: Mutex<BTreeMap<Node, (Process, Vec<PortSpec>)>>,
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
        wanted: &[PortNow<'_>],
    ) -> Result<(), HostError> {
        let key = (vnet.to_owned(), node.to_owned());
        let specs = wanted.iter().map(|it| it.port.spec.clone());
        match wanted.is_empty() {
            true => lock(&self.known).remove(&key),
            false => lock(&self.known).insert(key, (guest, specs.collect())),
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
            }
            Ok(())
        })
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
        lock(&self.known).retain(|_, (_, specs)| specs.iter().any(is_kept));
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
            known.into_iter().filter(|(_, (guest, specs))| is_lost(*guest, specs).unwrap_or(false));
        lost.map(|(node, _)| node).collect()
    }

    /// Puts the counters of ports into those that the mux has of their nodes.
    pub fn count(&self, stats: &mut mux::Stats) {
        let known = lock(&self.known);
        let wanted = known.iter().filter(|((vnet, _), _)| stats.vnets.contains_key(vnet));
        let wanted: Vec<_> = wanted.map(|(node, known)| (node.clone(), known.clone())).collect();
        drop(known);
        for ((vnet, node), (_, specs)) in wanted {
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
