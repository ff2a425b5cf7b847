//! What is wanted, and where it goes: slots and workers, who is expected at which socket, and whose frames
//! are whose. Pure.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;
use std::path::PathBuf;

use pdp_memif::REGIONS_MAX;
use pdp_proto::limits::EXTERNALS_MAX;
use pdp_proto::mux::{self, Attach, Encapsulation, End, PortName, Rate};
use pdp_underlay::Ends;
use pdp_wire::tag::PuntClass;

use crate::classify::{Classifier, PortRef, Table};
use crate::encapsulate;
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
    /// Whether it is another device now than some of its vnets were told.
    pub moved: bool,
}

impl KnownExternal {
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
    pub spec: mux::Vnet,
    /// Its worker.
    pub worker: usize,
    /// Its slot there.
    pub slot: u16,
    /// See [`PortRef`].
    pub generation: u32,
}

impl State {
    /// The slot of the external interface with this name.
    pub fn external_slot(&self, name: &str) -> Option<usize> {
        let is_it = |external: &Option<KnownExternal>| {
            external.as_ref().is_some_and(|external| external.spec.name == name)
        };
        self.externals.iter().position(is_it)
    }

    /// The tunnel at an end of a vlink from a port of this MTU, bytes, and how long its packets are.
    pub fn tunnel(&self, mtu: u32, far: &End) -> Option<(Ends, u32)> {
        let End::External { interface, by } = far else { return None };
        let (local, remote) = encapsulate::ends(by)?;
        let device = self.externals[self.external_slot(interface)?].as_ref()?.spec.device()?;
        Some(((device.ifindex, local, remote), encapsulate::packet_bytes(by, mtu)))
    }

    /// All of a vnet.
    pub fn tunnels(&self, vnet: &mux::Vnet) -> impl Iterator<Item = (Ends, u32)> {
        ends(vnet).filter_map(move |(near, far)| self.tunnel(port(vnet, near)?.1.mtu, far))
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

    /// The worker with the fewest vnets, and a free slot there.
    pub fn free_vnet(&self, workers: usize) -> Option<(usize, u16)> {
        let count = |worker: usize| self.vnets.values().filter(|it| it.worker == worker).count();
        let worker = (0..workers).min_by_key(|worker| count(*worker))?;
        let here = self.vnets.values().filter(|it| it.worker == worker);
        let taken: HashSet<_> = here.map(|it| it.slot).collect();
        (0..VNETS_MAX as u16).find(|slot| !taken.contains(slot)).map(|slot| (worker, slot))
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
            for (port, interface, by) in outside_ends(&vnet.spec) {
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

/// Names of nodes and ports, in order: what port numbers hang on.
pub fn layout(spec: &mux::Vnet) -> impl Iterator<Item = (&str, &str)> {
    spec.nodes
        .iter()
        .flat_map(|node| node.ports.iter().map(|port| (node.name.as_str(), port.name.as_str())))
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
    let is_moved = |end: &End| match end {
        End::External { interface, .. } => moved == Some(interface),
        End::Port { .. } => false,
    };
    let same = |(before, after): &(_, PortSpec<'_>)| {
        let stays = |it: &mux::Vlink| !is_moved(&it.a) && !is_moved(&it.b);
        before == after && after.2.is_none_or(stays)
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

/// All that is said of a port: of itself, of punts, and of its vlink.
type PortSpec<'a> = (&'a mux::Port, Option<[Rate; PuntClass::ALL.len()]>, Option<&'a mux::Vlink>);

fn ports(spec: &mux::Vnet) -> impl Iterator<Item = PortSpec<'_>> {
    let ends = spec.vlinks.iter().flat_map(|it| [(&it.a, it), (&it.b, it)]);
    let vlinks: HashMap<_, _> = ends
        .filter_map(|(end, vlink)| match end {
            End::Port { node, port } => Some(((node.as_str(), *port), vlink)),
            End::External { .. } => None,
        })
        .collect();
    let all = spec.nodes.iter().flat_map(|node| (0..).zip(&node.ports).map(move |it| (node, it)));
    all.map(move |(node, (at, port))| {
        let limits = node.router.as_ref().map(|router| router.punt_limits);
        (port, limits, vlinks.get(&(node.name.as_str(), at)).copied())
    })
}

/// Every vlink as seen from each end: the near one and the far one.
pub fn ends(spec: &mux::Vnet) -> impl Iterator<Item = (&End, &End)> {
    spec.vlinks.iter().flat_map(|vlink| [(&vlink.a, &vlink.b), (&vlink.b, &vlink.a)])
}

/// Every vlink to the outside: its port, counted over all nodes, the interface and how.
pub fn outside_ends(spec: &mux::Vnet) -> impl Iterator<Item = (u16, &str, &Encapsulation)> {
    ends(spec).filter_map(move |ends| {
        let (End::Port { node, port }, End::External { interface, by }) = ends else { return None };
        let at = spec.nodes.iter().position(|known| known.name == *node)?;
        let first: usize = spec.nodes[..at].iter().map(|node| node.ports.len()).sum();
        Some((first as u16 + port, interface.as_str(), by))
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
