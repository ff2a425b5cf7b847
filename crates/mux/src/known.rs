//! What the control side knows of externals and vnets: places, slots, and whose frames are whose.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::path::PathBuf;

use pdp_memif::REGIONS_MAX;
use pdp_proto::limits::EXTERNALS_MAX;
use pdp_proto::mux::{self, Attach, Encapsulation, End, PortName};

use crate::classify::{Classifier, PortRef, Table};
use crate::encapsulate;
use crate::keeper::{Expected, Owner};
use crate::underlay::Ends;
use crate::vnet::Who;

/// Vnets of one worker.
pub const VNETS_MAX: usize = 4096;

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
        vnet.vlinks.iter().flat_map(move |vlink| {
            [(&vlink.a, &vlink.b), (&vlink.b, &vlink.a)].into_iter().filter_map(
                move |(near, far)| {
                    let (_, port) = port(vnet, near)?;
                    self.tunnel(port.mtu, far)
                },
            )
        })
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
        let taken =
            |slot: u16| self.vnets.values().any(|it| (it.worker, it.slot) == (worker, slot));
        (0..VNETS_MAX as u16).find(|slot| !taken(*slot)).map(|slot| (worker, slot))
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

/// Counters of vnets are read between two rounds of a worker in parts: nodes of these vnets, each part with
/// so few ports and guests that it takes some microseconds, or one node.
pub fn parts<'a>(
    vnets: impl Iterator<Item = &'a KnownVnet>,
    most: usize,
) -> Vec<Vec<(&'a KnownVnet, Range<usize>)>> {
    let (mut parts, mut weight) = (vec![vec![]], 0);
    for vnet in vnets {
        for (at, node) in vnet.spec.nodes.iter().enumerate() {
            let guests = node.router.as_ref().map_or(0, |router| router.guests.len());
            let own = 1 + node.ports.len() + guests;
            if weight > 0 && weight + own > most {
                parts.push(vec![]);
                weight = 0;
            }
            weight += own;
            let part: &mut Vec<(&KnownVnet, Range<usize>)> = parts.last_mut().expect("never empty");
            match part.last_mut() {
                Some((last, nodes)) if std::ptr::eq(*last, vnet) => nodes.end = at + 1,
                _ => part.push((vnet, at..at + 1)),
            }
        }
    }
    parts
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

/// Every vlink to the outside: its port, counted over all nodes, the interface and how.
pub fn outside_ends(spec: &mux::Vnet) -> impl Iterator<Item = (u16, &str, &Encapsulation)> {
    spec.vlinks.iter().flat_map(move |vlink| {
        [(&vlink.a, &vlink.b), (&vlink.b, &vlink.a)].into_iter().filter_map(move |ends| {
            let (End::Port { node, port }, End::External { interface, by }) = ends else {
                return None;
            };
            let at = spec.nodes.iter().position(|known| known.name == *node)?;
            let first: usize = spec.nodes[..at].iter().map(|node| node.ports.len()).sum();
            Some((first as u16 + port, interface.as_str(), by))
        })
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
