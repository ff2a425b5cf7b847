//! The requested state, and its placement: slots and workers,
//! peers expected at each socket, and the classifier. Pure.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use pdp_memif::REGIONS_MAX;
use pdp_proto::limits::EXTERNALS_MAX;
use pdp_proto::mux::{
    self, AttachMode, Encapsulation, OUTSIDE, PUNT_CLASSES, PortName, Rate, VlinkEnd,
};
use pdp_underlay::TunnelEndpoints;

use crate::classify::{Classifier, PortRef, TunnelTable};
use crate::traffic_class::{Capacity, TrafficClass};
use crate::vnet::NodePeer;
use crate::wfq::BandwidthShare;

/// Vnets of one worker.
pub const VNETS_MAX: usize = 4096;

/// Owner of a socket.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum SocketOwner {
    /// The vnet with this name.
    Vnet(String),
    /// The external interface with this name.
    External(String),
}

impl SocketOwner {
    /// Returns the owner's tenant: true and the tenant for vnets (`TENANT.NAME`),
    /// or the vnet's name without one. False and the name for external interfaces.
    pub fn tenant(&self) -> (bool, &str) {
        match self {
            Self::Vnet(name) => (true, name.split_once('.').map_or(name, |(tenant, _)| tenant)),
            Self::External(name) => (false, name),
        }
    }
}

impl fmt::Display for SocketOwner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Vnet(name) => write!(f, "vnet {name}"),
            Self::External(name) => write!(f, "external {name}"),
        }
    }
}

/// Peer that is expected at a socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Expected {
    /// Owner of the socket.
    pub owner: SocketOwner,
    /// Worker that has the owner.
    pub worker: usize,
    /// The owner's slot there.
    pub slot: u16,
    /// For a vnet: the node, and the peer.
    pub peer: Option<(String, NodePeer)>,
    /// Number of interfaces that may connect; their ids begin at 0.
    pub interfaces: u32,
    /// Memory regions for each interface.
    pub regions: usize,
}

impl fmt::Display for Expected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.peer {
            Some((node, NodePeer::Guest(number))) => {
                write!(f, "{}: guest {number} of {node}", self.owner)
            }
            Some((node, NodePeer::Tap)) => write!(f, "{}: TAP helper of {node}", self.owner),
            None => write!(f, "{}: its program", self.owner),
        }
    }
}

/// The requested state of all objects.
#[derive(Default)]
pub struct PlanState {
    /// External interfaces by slot.
    pub externals: Vec<Option<KnownExternal>>,
    /// Vnets by name.
    pub vnets: BTreeMap<String, KnownVnet>,
    /// Highest generation used; see [`PortRef`].
    pub generation: u32,
}

/// An external interface and its placement.
pub struct KnownExternal {
    /// Spec as requested.
    pub spec: mux::ExternalConfig,
    /// Number of its netdevs.
    pub outlets: usize,
    /// Worker that has the first netdev. The following workers have the others.
    pub worker: usize,
    /// True if some of its vnets still use an earlier device, or if
    /// it gained or lost a capacity that these do not know of yet.
    pub moved: bool,
    /// Capacity, if the interface has or had one.
    pub capacity: Option<Arc<Capacity>>,
}

impl KnownExternal {
    /// Returns the worker for netdev `index`. With a capacity, one worker has all of them.
    pub fn owner(&self, index: usize, workers: usize) -> usize {
        match self.spec.capacity_bps {
            None => (self.worker + index) % workers,
            Some(_) => self.worker,
        }
    }

    /// Returns the peers that may connect for it, in `slot`, by socket.
    pub fn expected(&self, slot: usize) -> HashMap<PathBuf, Expected> {
        let owner = SocketOwner::External(self.spec.name.clone());
        let (worker, slot, interfaces, regions) = (self.worker, slot as u16, 1, REGIONS_MAX);
        let program = Expected { owner, worker, slot, peer: None, interfaces, regions };
        self.spec.socket().map(|socket| (socket.into(), program)).into_iter().collect()
    }
}

/// A vnet and its placement.
#[derive(Clone)]
pub struct KnownVnet {
    /// Spec as requested.
    pub spec: mux::VnetConfig,
    /// Time of the state of its schedules that is installed, by their clock.
    pub at_ns: u64,
    /// Worker that has the vnet.
    pub worker: usize,
    /// Slot of the vnet there.
    pub slot: u16,
    /// See [`PortRef`].
    pub generation: u32,
    /// Traffic classes of its ends at interfaces with a capacity.
    pub classes: TrafficClasses,
    /// Number of its frames at the schedulers of these interfaces.
    pub scheduled: Arc<AtomicUsize>,
}

/// Traffic classes of a vnet, by the interface's slot and the external end's name.
pub type TrafficClasses = BTreeMap<(usize, String), (Arc<TrafficClass>, BandwidthShare)>;

impl PlanState {
    /// Returns the slot of the external interface with this name.
    pub fn external_slot(&self, name: &str) -> Option<usize> {
        let is_it = |external: &Option<KnownExternal>| {
            external.as_ref().is_some_and(|external| external.spec.name == name)
        };
        self.externals.iter().position(is_it)
    }

    /// Returns the tunnel at an external end, and the length of its longest packets, bytes.
    pub fn tunnel(
        &self,
        vnet: &mux::VnetConfig,
        at: &OutsideEnd<'_>,
    ) -> Option<(TunnelEndpoints, u32)> {
        let (local, remote) = at.by.ends()?;
        let device = self.external(at.interface)?.device()?;
        let mtu = self.mtu(vnet, at.vlink);
        Some(((device.ifindex, local, remote), mtu + at.by.overhead()))
    }

    /// Returns all tunnels of a vnet.
    pub fn tunnels(&self, vnet: &mux::VnetConfig) -> impl Iterator<Item = (TunnelEndpoints, u32)> {
        outside_ends(vnet).filter_map(move |at| self.tunnel(vnet, &at))
    }

    /// Returns the longest IP packet on a vlink, bytes: the largest
    /// MTU of its ports or, without ports, what all of its ends carry.
    pub fn mtu(&self, vnet: &mux::VnetConfig, vlink: &mux::Vlink) -> u32 {
        let ports = vlink.ends.iter().filter_map(|end| Some(port(vnet, end)?.1.mtu));
        let carried = vlink.ends.iter().filter_map(|end| {
            let VlinkEnd::External { interface, by, .. } = end else { return None };
            Some(self.external(interface)?.mtu.saturating_sub(by.overhead()))
        });
        ports.max().or(carried.min()).unwrap_or(0)
    }

    /// Returns the external interface with this name.
    fn external(&self, name: &str) -> Option<&mux::ExternalConfig> {
        Some(&self.externals[self.external_slot(name)?].as_ref()?.spec)
    }

    /// Returns a port's vnet, and the port's number, counted over all nodes.
    pub fn port(&self, name: &PortName) -> Option<(&KnownVnet, usize)> {
        let vnet = self.vnets.get(&name.vnet)?;
        let at = layout(&vnet.spec).position(|it| it == (&*name.node, &*name.port))?;
        Some((vnet, at))
    }

    /// Returns a free slot for an external interface.
    pub fn free_external(&mut self) -> Option<usize> {
        if let Some(free) = self.externals.iter().position(Option::is_none) {
            return Some(free);
        }
        if self.externals.len() >= EXTERNALS_MAX {
            return None;
        }
        self.externals.push(None);
        Some(self.externals.len() - 1)
    }

    /// Returns external interfaces that are at the wrong worker, with the right one. These
    /// interfaces keep frames at their source while there is no space. So they belong to
    /// the worker that knows the space: that of the vnet that gets all of their frames.
    pub fn misplaced(&self, tables: &Classifier) -> Vec<(usize, usize)> {
        let slots = self.externals.iter().zip(tables).enumerate();
        let astray = slots.filter_map(|(slot, (external, table))| {
            let external = external.as_ref().filter(|it| it.spec.device().is_none())?;
            let worker = usize::from(table.sole()?.worker);
            (worker != external.worker).then_some((slot, worker))
        });
        astray.collect()
    }

    /// Returns the worker with the fewest vnets, and a free slot there. For a
    /// vnet with guaranteed power, it is the worker that has promised the least.
    pub fn free_vnet(&self, spec: &mux::VnetConfig, workers: usize) -> Option<(usize, u16)> {
        let on = |worker| self.vnets.values().filter(move |it| it.worker == worker);
        let promised = |worker| match spec.power() {
            0 => 0,
            _ => on(worker).map(|it| u64::from(it.spec.power())).sum::<u64>(),
        };
        let worker = (0..workers).min_by_key(|worker| (promised(*worker), on(*worker).count()))?;
        let here = self.vnets.values().filter(|it| it.worker == worker);
        let taken: HashSet<_> = here.map(|it| it.slot).collect();
        (0..VNETS_MAX as u16).find(|slot| !taken.contains(slot)).map(|slot| (worker, slot))
    }

    /// Returns the traffic classes of a vnet whose schedules make it
    /// `spec`: its existing ones, and new ones.
    pub fn classes(&self, vnet: &KnownVnet, spec: &mux::VnetConfig) -> TrafficClasses {
        let ends = outside_ends(spec).filter_map(|end| {
            let slot = self.external_slot(end.interface)?;
            let known = self.externals[slot].as_ref()?;
            let capacity = known.capacity.as_ref().filter(|_| known.spec.capacity_bps.is_some())?;
            let key = (slot, end.external.to_owned());
            let has = vnet.classes.get(&key).map(|it| &it.0).filter(|it| it.is_of(capacity));
            let new = || Arc::new(TrafficClass::new(capacity, &vnet.scheduled));
            let class = has.cloned().unwrap_or_else(new);
            let guarantee_bps = end.egress.guarantee_bps;
            Some((key, (class, BandwidthShare { guarantee_bps, weight: end.egress.weight.max(1) })))
        });
        ends.collect()
    }

    /// Returns the classifier, with `changed` in its new form and without the vnet `without`.
    pub fn classifier(
        &self,
        changed: Option<&KnownVnet>,
        without: Option<&str>,
    ) -> Result<Classifier, String> {
        let mac = |known: &Option<KnownExternal>| {
            known.as_ref().and_then(|it| it.spec.device()).map(|device| device.mac)
        };
        let mut tables: Classifier =
            self.externals.iter().map(|known| TunnelTable::new(mac(known))).collect();
        let name = changed.map(|vnet| vnet.spec.name.as_str());
        let others = self.vnets.values().filter(|vnet| {
            Some(vnet.spec.name.as_str()) != name && Some(vnet.spec.name.as_str()) != without
        });
        for vnet in others.chain(changed) {
            for OutsideEnd { port, interface, by, .. } in outside_ends(&vnet.spec) {
                let slot = self.external_slot(interface);
                let slot = slot.ok_or_else(|| format!("external {interface} does not exist"))?;
                let port = PortRef {
                    worker: vnet.worker as u16,
                    vnet: vnet.slot,
                    port,
                    generation: vnet.generation,
                };
                let taken = tables[slot].insert(by, port);
                taken.map_err(|error| format!("vnet {}: {by} {error}", vnet.spec.name))?;
            }
        }
        Ok(tables)
    }
}

/// A node for counters: one of the vnet's nodes. If there are
/// external ends that are ports of their own, a last node has these.
pub struct CountedNode<'a> {
    /// Name of the node.
    pub name: &'a str,
    /// Names of its ports.
    pub ports: Vec<&'a str>,
    /// Number of its guests.
    pub guests: usize,
}

/// Returns all nodes of a vnet.
pub fn nodes(spec: &mux::VnetConfig) -> impl Iterator<Item = CountedNode<'_>> {
    let nodes = spec.nodes.iter().map(|node| CountedNode {
        name: &node.name,
        ports: node.ports.iter().map(|port| &*port.name).collect(),
        guests: node.router.as_ref().map_or(0, |router| router.guests.len()),
    });
    let ports: Vec<_> = spec.own_ends().into_iter().map(|own| own.name).collect();
    let own = CountedNode { name: OUTSIDE, ports, guests: 0 };
    nodes.chain(Some(own).filter(|own| !own.ports.is_empty()))
}

/// Returns the names of nodes and ports, in the order of port numbers.
pub fn layout(spec: &mux::VnetConfig) -> impl Iterator<Item = (&str, &str)> {
    nodes(spec).flat_map(|node| node.ports.into_iter().map(move |port| (node.name, port)))
}

/// Returns the node and port at an end of a vlink.
pub fn port<'a>(
    spec: &'a mux::VnetConfig,
    end: &VlinkEnd,
) -> Option<(&'a mux::NodeConfig, &'a mux::PortConfig)> {
    let VlinkEnd::Port { node, port } = end else { return None };
    let node = spec.nodes.iter().find(|known| known.name == *node)?;
    Some((node, node.ports.get(usize::from(*port))?))
}

/// Returns the ports, counted over all nodes, that differ between `before` and
/// `after`, themselves or by their vlinks. Includes ports whose vlinks use the
/// external interface `moved`. `None` if the nodes or ports are not the same.
pub fn changed(
    before: &mux::VnetConfig,
    after: &mux::VnetConfig,
    moved: Option<&str>,
) -> Option<Vec<u16>> {
    let same = |(before, after): &(_, ComparedPort<'_>)| {
        let stays = |it: &mux::Vlink| it.interfaces().all(|name| moved != Some(name));
        before == after && after.2.is_none_or(|(_, vlink)| stays(vlink))
    };
    // A layout does not contain nodes without ports.
    let names = [before, after].map(|spec| spec.nodes.iter().map(|node| &node.name));
    let [nodes_before, nodes_after] = names;
    let same_ports = nodes_before.eq(nodes_after) && layout(before).eq(layout(after));
    same_ports.then(|| {
        let ports = ports(before).zip(ports(after));
        (0..).zip(ports).filter(|(_, ports)| !same(ports)).map(|(at, _)| at).collect()
    })
}

/// The parts of a spec that concern a port: the port itself if it belongs to a
/// node, its punt limits, and its vlink, with its number if that is a segment.
type ComparedPort<'a> = (
    Option<&'a mux::PortConfig>,
    Option<[Rate; PUNT_CLASSES]>,
    Option<(Option<usize>, &'a mux::Vlink)>,
);

fn ports(spec: &mux::VnetConfig) -> impl Iterator<Item = ComparedPort<'_>> {
    let mut segments = 0..;
    let mut number = |it: &mux::Vlink| it.segment.and_then(|_| segments.next());
    let numbered: Vec<_> = spec.vlinks.iter().map(|it| (number(it), it)).collect();
    let ends = numbered.iter().flat_map(|it| it.1.ports().map(move |port| (port, *it)));
    let vlinks: HashMap<_, _> = ends.collect();
    let all = spec.nodes.iter().flat_map(|node| (0..).zip(&node.ports).map(move |it| (node, it)));
    let of_nodes = all.map(move |(node, (at, port))| {
        let limits = node.router.as_ref().map(|router| router.punt_limits);
        (Some(port), limits, vlinks.get(&(node.name.as_str(), at)).copied())
    });
    let own = spec.own_ends().into_iter();
    of_nodes.chain(own.map(move |own| (None, None, Some(numbered[own.vlink]))))
}

/// An external end of a vnet.
pub struct OutsideEnd<'a> {
    /// Ingress port of its frames, counted over all nodes.
    pub port: u16,
    /// Names of that port's node and of the port.
    pub name: (&'a str, &'a str),
    /// Vlink of the end.
    pub vlink: &'a mux::Vlink,
    /// Egress settings.
    pub egress: mux::EgressConfig,
    /// Name of the external end.
    pub external: &'a str,
    /// Name of the external interface.
    pub interface: &'a str,
    /// Encapsulation of its frames there.
    pub by: &'a Encapsulation,
}

/// Returns all external ends of a vnet.
pub fn outside_ends(spec: &mux::VnetConfig) -> impl Iterator<Item = OutsideEnd<'_>> {
    let wires = spec.vlinks.iter().filter(|vlink| vlink.is_wire()).filter_map(move |vlink| {
        let (node, port) = vlink.ports().next()?;
        let at = spec.nodes.iter().position(|known| known.name == node)?;
        let first: usize = spec.nodes[..at].iter().map(|node| node.ports.len()).sum();
        let name = spec.nodes[at].ports.get(usize::from(port))?.name.as_str();
        let end = vlink.ends.iter().find(|end| matches!(end, VlinkEnd::External { .. }))?;
        let near = vlink.ends.iter().position(|end| matches!(end, VlinkEnd::Port { .. }))?;
        Some((first as u16 + port, (node, name), vlink, near, end))
    });
    let first: usize = spec.nodes.iter().map(|node| node.ports.len()).sum();
    let own = (first as u16..).zip(spec.own_ends());
    let own = own
        .map(|(port, own)| (port, (OUTSIDE, own.name), &spec.vlinks[own.vlink], own.at, own.end));
    wires.chain(own).filter_map(|(port, name, vlink, near, end)| {
        let VlinkEnd::External { name: external, interface, by } = end else { return None };
        let egress = vlink.egress(near);
        Some(OutsideEnd { port, name, vlink, egress, external, interface, by })
    })
}

/// Returns the peers that may connect for a vnet, by socket.
pub fn expected(vnet: &KnownVnet) -> Result<HashMap<PathBuf, Expected>, String> {
    let mut all = HashMap::new();
    for node in &vnet.spec.nodes {
        let guests = node.router.iter().flat_map(|router| &router.guests).map(|guest| {
            let many = guest.attach == AttachMode::Memif;
            let (interfaces, regions) = if many { (node.ports.len(), REGIONS_MAX) } else { (1, 1) };
            (&guest.socket, NodePeer::Guest(guest.number), interfaces, regions)
        });
        for (path, peer, interfaces, regions) in
            guests.chain([(&node.tap_socket, NodePeer::Tap, 1, 1)])
        {
            let expected = Expected {
                owner: SocketOwner::Vnet(vnet.spec.name.clone()),
                worker: vnet.worker,
                slot: vnet.slot,
                peer: Some((node.name.clone(), peer)),
                interfaces: interfaces as u32,
                regions,
            };
            if all.insert(path.clone(), expected).is_some() {
                return Err(format!("socket {} is used twice", path.display()));
            }
        }
    }
    Ok(all)
}
