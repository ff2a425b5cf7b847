//! What is wanted, and where it goes: slots and workers, who is expected at which socket, and whose frames
//! are whose. Pure.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use pdp_memif::REGIONS_MAX;
use pdp_proto::limits::EXTERNALS_MAX;
use pdp_proto::mux::{self, Attach, Encapsulation, End, OUTSIDE, PUNT_CLASSES, PortName, Rate};
use pdp_underlay::Ends;

use crate::class::{Capacity, Class};
use crate::classify::{Classifier, PortRef, Table};
use crate::fair::Part;
use crate::vnet::Who;

/// Vnets of one worker.
pub const VNETS_MAX: usize = 4096;

/// What somebody is expected for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Owner {
    /// The vnet with this name.
    Vnet(String),
    /// The external interface with this name.
    External(String),
}

impl Owner {
    /// Who it is of: of one tenant's vnets (`TENANT.NAME`) the tenant, of others themselves.
    pub fn tenant(&self) -> (bool, &str) {
        match self {
            Self::Vnet(name) => (true, name.split_once('.').map_or(name, |(tenant, _)| tenant)),
            Self::External(name) => (false, name),
        }
    }
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Vnet(name) => write!(f, "vnet {name}"),
            Self::External(name) => write!(f, "external {name}"),
        }
    }
}

/// Somebody who is expected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Expected {
    /// For what.
    pub owner: Owner,
    /// The worker that has it.
    pub worker: usize,
    /// The owner's slot there.
    pub slot: u16,
    /// Of a vnet: of which node, and who.
    pub seat: Option<(String, Who)>,
    /// Interface ids from 0 that may connect.
    pub interfaces: u32,
    /// Regions that each may have.
    pub regions: usize,
}

impl fmt::Display for Expected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.seat {
            Some((node, who)) => write!(f, "{}: {who:?} of {node}", self.owner),
            None => write!(f, "{}: its program", self.owner),
        }
    }
}

/// Everything, as last put.
#[derive(Default)]
pub struct State {
    /// By slot.
    pub externals: Vec<Option<KnownExternal>>,
    /// By name.
    pub vnets: BTreeMap<String, KnownVnet>,
    /// The highest that was given; see [`PortRef`].
    pub generation: u32,
}

/// An external interface, in its slot.
pub struct KnownExternal {
    /// As put.
    pub spec: mux::External,
    /// Count of its outlets.
    pub outlets: usize,
    /// The worker that has the first of them; those after it have the others.
    pub worker: usize,
    /// Whether it is another device now than some of its vnets were told, or has a capacity where it had none, or the
    /// other way.
    pub moved: bool,
    /// Its capacity, if it has or had one.
    pub capacity: Option<Arc<Capacity>>,
}

impl KnownExternal {
    /// The worker that has its outlet `index`. Where there is a capacity one has all of them.
    pub fn owner(&self, index: usize, workers: usize) -> usize {
        match self.spec.capacity_bps {
            None => (self.worker + index) % workers,
            Some(_) => self.worker,
        }
    }

    /// Who may connect for it, in `slot`, and where.
    pub fn expected(&self, slot: usize) -> HashMap<PathBuf, Expected> {
        let owner = Owner::External(self.spec.name.clone());
        let (worker, slot, interfaces, regions) = (self.worker, slot as u16, 1, REGIONS_MAX);
        let program = Expected { owner, worker, slot, seat: None, interfaces, regions };
        self.spec.socket().map(|socket| (socket.into(), program)).into_iter().collect()
    }
}

/// A vnet, and where it is.
#[derive(Clone)]
pub struct KnownVnet {
    /// As put.
    pub wanted: mux::Vnet,
    /// The same as it is now, by its schedules.
    pub spec: mux::Vnet,
    /// Its worker.
    pub worker: usize,
    /// Its slot there.
    pub slot: u16,
    /// See [`PortRef`].
    pub generation: u32,
    /// Classes of its ends at interfaces with a capacity, by the slots of these and the names of its externals.
    pub classes: Classes,
    /// Its frames at the schedulers of these.
    pub scheduled: Arc<AtomicUsize>,
}

/// Classes of a vnet, by slots of external interfaces and names of its externals.
pub type Classes = BTreeMap<(usize, String), (Arc<Class>, Part)>;

impl State {
    /// The slot of the external interface with this name.
    pub fn external_slot(&self, name: &str) -> Option<usize> {
        let is_it = |external: &Option<KnownExternal>| {
            external.as_ref().is_some_and(|external| external.spec.name == name)
        };
        self.externals.iter().position(is_it)
    }

    /// The tunnel at an end of a vlink, and how long its packets are, bytes.
    pub fn tunnel(&self, vnet: &mux::Vnet, at: &OutsideEnd<'_>) -> Option<(Ends, u32)> {
        let (local, remote) = at.by.ends()?;
        let device = self.external(at.interface)?.device()?;
        let mtu = self.mtu(vnet, at.vlink);
        Some(((device.ifindex, local, remote), mtu + at.by.overhead()))
    }

    /// All of a vnet.
    pub fn tunnels(&self, vnet: &mux::Vnet) -> impl Iterator<Item = (Ends, u32)> {
        outside_ends(vnet).filter_map(move |at| self.tunnel(vnet, &at))
    }

    /// The longest IP packet on a vlink, bytes: its ports', or what all of its ends carry.
    pub fn mtu(&self, vnet: &mux::Vnet, vlink: &mux::Vlink) -> u32 {
        let ports = vlink.ends.iter().filter_map(|end| Some(port(vnet, end)?.1.mtu));
        let carried = vlink.ends.iter().filter_map(|end| {
            let End::External { interface, by, .. } = end else { return None };
            Some(self.external(interface)?.mtu.saturating_sub(by.overhead()))
        });
        ports.max().or(carried.min()).unwrap_or(0)
    }

    /// The external interface with this name.
    fn external(&self, name: &str) -> Option<&mux::External> {
        Some(&self.externals[self.external_slot(name)?].as_ref()?.spec)
    }

    /// The vnet of a port, and the port, counted over all nodes.
    pub fn port(&self, name: &PortName) -> Option<(&KnownVnet, usize)> {
        let vnet = self.vnets.get(&name.vnet)?;
        let at = layout(&vnet.spec).position(|it| it == (&*name.node, &*name.port))?;
        Some((vnet, at))
    }

    /// A slot for another one.
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

    /// External interfaces whose frames stay where they come from while there is no room for them, and
    /// that are not on the worker which knows how much there is: their slots, and that worker. It is that
    /// of the vnet that gets all of their frames.
    pub fn astray(&self, tables: &Classifier) -> Vec<(usize, usize)> {
        let slots = self.externals.iter().zip(tables).enumerate();
        let astray = slots.filter_map(|(slot, (external, table))| {
            let external = external.as_ref().filter(|it| it.spec.device().is_none())?;
            let worker = usize::from(table.sole()?.worker);
            (worker != external.worker).then_some((slot, worker))
        });
        astray.collect()
    }

    /// The worker with the fewest vnets, and a free slot there; for one whose engines are guaranteed something, that
    /// which promised the least.
    pub fn free_vnet(&self, spec: &mux::Vnet, workers: usize) -> Option<(usize, u16)> {
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

    /// The classes of a vnet as it is to be: those that it has, and new ones.
    pub fn classes(&self, vnet: &KnownVnet) -> Classes {
        let ends = outside_ends(&vnet.spec).filter_map(|end| {
            let slot = self.external_slot(end.interface)?;
            let known = self.externals[slot].as_ref()?;
            let capacity = known.capacity.as_ref().filter(|_| known.spec.capacity_bps.is_some())?;
            let key = (slot, end.external.to_owned());
            let has = vnet.classes.get(&key).map(|it| &it.0).filter(|it| it.is_of(capacity));
            let new = || Arc::new(Class::new(capacity, &vnet.scheduled));
            let class = has.cloned().unwrap_or_else(new);
            let guarantee_bps = end.leaving.guarantee_bps;
            Some((key, (class, Part { guarantee_bps, weight: end.leaving.weight.max(1) })))
        });
        ends.collect()
    }

    /// Whose frames are whose, with `changed` as it is to be and without the vnet `without`.
    pub fn classifier(
        &self,
        changed: Option<&KnownVnet>,
        without: Option<&str>,
    ) -> Result<Classifier, String> {
        let mac = |known: &Option<KnownExternal>| {
            known.as_ref().and_then(|it| it.spec.device()).map(|device| device.mac)
        };
        let mut tables: Classifier =
            self.externals.iter().map(|known| Table::new(mac(known))).collect();
        let name = changed.map(|vnet| vnet.spec.name.as_str());
        let others = self.vnets.values().filter(|vnet| {
            Some(vnet.spec.name.as_str()) != name && Some(vnet.spec.name.as_str()) != without
        });
        for vnet in others.chain(changed) {
            for OutsideEnd { port, interface, by, .. } in outside_ends(&vnet.spec) {
                let slot = self.external_slot(interface);
                let slot = slot.ok_or_else(|| format!("there is no external {interface}"))?;
                let port = PortRef {
                    worker: vnet.worker as u16,
                    vnet: vnet.slot,
                    port,
                    generation: vnet.generation,
                };
                let taken = tables[slot].insert(by, port);
                taken.map_err(|error| format!("vnet {}: {by:?} {error}", vnet.spec.name))?;
            }
        }
        Ok(tables)
    }
}

/// A node that is counted: one of the vnet's, or behind them, if there are any, the ends outside that are ports of
/// their own.
pub struct CountedNode<'a> {
    /// Its name.
    pub name: &'a str,
    /// Names of its ports.
    pub ports: Vec<&'a str>,
    /// Count of its guests.
    pub guests: usize,
}

/// All of a vnet.
pub fn nodes(spec: &mux::Vnet) -> impl Iterator<Item = CountedNode<'_>> {
    let nodes = spec.nodes.iter().map(|node| CountedNode {
        name: &node.name,
        ports: node.ports.iter().map(|port| &*port.name).collect(),
        guests: node.router.as_ref().map_or(0, |router| router.guests.len()),
    });
    let ports: Vec<_> = spec.own_ends().into_iter().map(|own| own.name).collect();
    let own = CountedNode { name: OUTSIDE, ports, guests: 0 };
    nodes.chain(Some(own).filter(|own| !own.ports.is_empty()))
}

/// Names of nodes and ports, in order: what port numbers hang on.
pub fn layout(spec: &mux::Vnet) -> impl Iterator<Item = (&str, &str)> {
    nodes(spec).flat_map(|node| node.ports.into_iter().map(move |port| (node.name, port)))
}

/// The port at an end of a vlink, and its node.
pub fn port<'a>(spec: &'a mux::Vnet, end: &End) -> Option<(&'a mux::Node, &'a mux::Port)> {
    let End::Port { node, port } = end else { return None };
    let node = spec.nodes.iter().find(|known| known.name == *node)?;
    Some((node, node.ports.get(usize::from(*port))?))
}

/// Ports, counted over all nodes, that are otherwise in `after` than in `before`, or whose vlinks are, or those by
/// the external interface `moved`. `None` if these have not the same nodes and ports.
pub fn changed(before: &mux::Vnet, after: &mux::Vnet, moved: Option<&str>) -> Option<Vec<u16>> {
    let same = |(before, after): &(_, PortSpec<'_>)| {
        let stays = |it: &mux::Vlink| it.interfaces().all(|name| moved != Some(name));
        before == after && after.2.is_none_or(|(_, vlink)| stays(vlink))
    };
    // Nodes without ports are in no layout.
    let names = [before, after].map(|spec| spec.nodes.iter().map(|node| &node.name));
    let [nodes_before, nodes_after] = names;
    let same_ports = nodes_before.eq(nodes_after) && layout(before).eq(layout(after));
    same_ports.then(|| {
        let ports = ports(before).zip(ports(after));
        (0..).zip(ports).filter(|(_, ports)| !same(ports)).map(|(at, _)| at).collect()
    })
}

/// All that is said of a port: of itself if it is a node's, of punts, and of its vlink, with its number if that is a
/// segment.
type PortSpec<'a> =
    (Option<&'a mux::Port>, Option<[Rate; PUNT_CLASSES]>, Option<(Option<usize>, &'a mux::Vlink)>);

fn ports(spec: &mux::Vnet) -> impl Iterator<Item = PortSpec<'_>> {
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

/// An end outside.
pub struct OutsideEnd<'a> {
    /// The port that its frames arrive at, counted over all nodes.
    pub port: u16,
    /// Names of that port's node and of the port.
    pub name: (&'a str, &'a str),
    /// Its vlink.
    pub vlink: &'a mux::Vlink,
    /// How frames leave by it.
    pub leaving: mux::Leaving,
    /// Its name.
    pub external: &'a str,
    /// The external interface.
    pub interface: &'a str,
    /// How its frames are told apart there.
    pub by: &'a Encapsulation,
}

/// Every end outside of a vnet.
pub fn outside_ends(spec: &mux::Vnet) -> impl Iterator<Item = OutsideEnd<'_>> {
    let wires = spec.vlinks.iter().filter(|vlink| vlink.is_wire()).filter_map(move |vlink| {
        let (node, port) = vlink.ports().next()?;
        let at = spec.nodes.iter().position(|known| known.name == node)?;
        let first: usize = spec.nodes[..at].iter().map(|node| node.ports.len()).sum();
        let name = spec.nodes[at].ports.get(usize::from(port))?.name.as_str();
        let end = vlink.ends.iter().find(|end| matches!(end, End::External { .. }))?;
        let near = vlink.ends.iter().position(|end| matches!(end, End::Port { .. }))?;
        Some((first as u16 + port, (node, name), vlink, near, end))
    });
    let first: usize = spec.nodes.iter().map(|node| node.ports.len()).sum();
    let own = (first as u16..).zip(spec.own_ends());
    let own = own
        .map(|(port, own)| (port, (OUTSIDE, own.name), &spec.vlinks[own.vlink], own.at, own.end));
    wires.chain(own).filter_map(|(port, name, vlink, near, end)| {
        let End::External { name: external, interface, by } = end else { return None };
        let leaving = vlink.leaving(near);
        Some(OutsideEnd { port, name, vlink, leaving, external, interface, by })
    })
}

/// Who may connect for a vnet, and where.
pub fn expected(vnet: &KnownVnet) -> Result<HashMap<PathBuf, Expected>, String> {
    let mut all = HashMap::new();
    for node in &vnet.spec.nodes {
        let guests = node.router.iter().flat_map(|router| &router.guests).map(|guest| {
            let many = guest.attach == Attach::Memif;
            let (interfaces, regions) = if many { (node.ports.len(), REGIONS_MAX) } else { (1, 1) };
            (&guest.socket, Who::Guest(guest.number), interfaces, regions)
        });
        for (path, who, interfaces, regions) in guests.chain([(&node.tap_socket, Who::Tap, 1, 1)]) {
            let expected = Expected {
                owner: Owner::Vnet(vnet.spec.name.clone()),
                worker: vnet.worker,
                slot: vnet.slot,
                seat: Some((node.name.clone(), who)),
                interfaces: interfaces as u32,
                regions,
            };
            if all.insert(path.clone(), expected).is_some() {
                return Err(format!("socket {} is there twice", path.display()));
            }
        }
    }
    Ok(all)
}
