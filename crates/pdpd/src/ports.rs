//! Ports of vrouters whose frames stay in the kernel ([`pdp_net::ports`]), as the keeper needs them, and their counters
//! among those of the mux.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::Mutex;

use pdp_container::Process;
use pdp_net::ports::{self, Counters, Reason, Way};
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
    /// Which there are: their numbers, by node and name.
    known: Mutex<BTreeMap<Node, BTreeMap<String, u32>>>,
}

impl Ports {
    /// Those of the daemon that has these places.
    pub fn new(places: &Places) -> Self {
        let (netns, pins) = (places.run.join("ports"), places.pins.join("_ports"));
        Self { netns, pins, open: Mutex::default(), known: Mutex::default() }
    }

    fn with<T>(
        &self,
        run: impl FnOnce(&mut ports::Ports) -> Result<T, HostError>,
    ) -> Result<T, HostError> {
        let mut open = lock(&self.open);
        let mut ports = match open.take() {
            Some(ports) => ports,
            None => {
                pdp_net::xdp::mount_bpf_fs()?;
                ports::Ports::open(&self.netns, &self.pins)?
            }
        };
        let done = run(&mut ports);
        *open = Some(ports);
        done
    }

    /// Whether anything of this kind was ever made by this daemon or one before.
    fn are_there(&self) -> bool {
        lock(&self.open).is_some() || self.pins.exists() || self.netns.exists()
    }

    /// Sees to it that ports of a node are there, joined, limited, and with carrier or without.
    pub fn see_to(
        &self,
        (vnet, node): (&str, &str),
        guest: Process,
        wanted: &[PortNow<'_>],
    ) -> Result<(), HostError> {
        let key = (vnet.to_owned(), node.to_owned());
        let names = wanted.iter().map(|it| (it.port.spec.name.clone(), it.port.spec.number));
        match wanted.is_empty() {
            true => lock(&self.known).remove(&key),
            false => lock(&self.known).insert(key, names.collect()),
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

    /// Removes all ports but those of these numbers; with the last one all that they had in common.
    pub fn remove_but(&self, kept: &BTreeSet<u32>) -> Result<(), HostError> {
        if !self.are_there() {
            return Ok(());
        }
        lock(&self.known).retain(|_, names| names.values().any(|number| kept.contains(number)));
        if kept.is_empty() {
            *lock(&self.open) = None;
            return Ok(ports::destroy(&self.netns, &self.pins)?);
        }
        self.with(|ports| {
            let gone: Vec<u32> = ports.all()?.difference(kept).copied().collect();
            Ok(ports.remove(&gone)?)
        })
    }

    /// Puts the counters of ports into those that the mux has of their nodes.
    pub fn count(&self, stats: &mut mux::Stats) {
        let known = lock(&self.known);
        let wanted = known.iter().filter(|((vnet, _), _)| stats.vnets.contains_key(vnet));
        let wanted: Vec<_> = wanted.map(|(node, names)| (node.clone(), names.clone())).collect();
        drop(known);
        for ((vnet, node), names) in wanted {
            let found = stats.vnets.get_mut(&vnet).and_then(|vnet| vnet.nodes.get_mut(&node));
            let Some(stats) = found else { continue };
            for (name, number) in names {
                // One that is not there just now has counted nothing more.
                let Ok(counted) = self.with(|ports| Ok(ports.counters(number)?)) else { continue };
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
