//! Netdevs of external interfaces: made from pdpd's descriptors, and placed on workers.

use std::io::{Read, Seek};
use std::mem::discriminant;
use std::os::fd::OwnedFd;

use pdp_afxdp::{PacketSocket, XdpSocket};
use pdp_proto::mux;
use rtrb::RingBuffer;

use crate::classify::Classifier;
use crate::control::base::MuxControl;
use crate::control::peer_listener::RequestRefusal;
use crate::control::plan::{KnownExternal, PlanState, SocketOwner};
use crate::core::Core;
use crate::generator::{FRAMES_BYTES_MAX, FrameGenerator, GeneratorFrames};
use crate::netdev::NetdevDriver;
use crate::netdev::path::{PATH_FRAMES, RemoteNetdev};
use crate::netdev::program::MemifNetdev;
use crate::netdev::socket::XdpNetdev;
use crate::packets::PacketBatch;
use crate::ringers::RungFor;
use crate::scheduler::Scheduler;

/// Packets that a worker takes back between two rounds.
const RETURNED_MAX: usize = 1024;

/// Change of an external interface.
pub enum ExternalChange {
    /// Only its addresses and sizes may have changed.
    Nothing,
    /// All of its netdevs are new.
    Netdevs(Vec<Box<dyn NetdevDriver>>),
    /// A generator's parameters and, if given, its frames are new.
    Frames(Option<GeneratorFrames>),
}

/// Parts removed from an external interface.
pub struct DetachedNetdevs {
    /// All of its netdevs.
    pub netdevs: Vec<Box<dyn NetdevDriver>>,
    /// Scheduler of the interface, with the queued frames.
    pub scheduler: Option<Box<Scheduler>>,
}

impl MuxControl {
    /// Compares an external interface with `known`, its
    /// earlier spec, and makes netdevs from these descriptors.
    pub fn netdevs(
        &self,
        known: Option<&mux::ExternalConfig>,
        spec: &mux::ExternalConfig,
        fds: Vec<OwnedFd>,
    ) -> Result<ExternalChange, String> {
        let of_no_use = |error: &dyn std::error::Error| {
            format!("external {}: invalid descriptor: {}", spec.name, chain(error))
        };
        match &spec.outlet {
            mux::OutletConfig::Xdp(_) | mux::OutletConfig::Packet(_)
                if fds.is_empty()
                    && known.is_none_or(|known| {
                        discriminant(&known.outlet) == discriminant(&spec.outlet)
                    }) =>
            {
                Ok(ExternalChange::Nothing)
            }
            mux::OutletConfig::Xdp(device) => boxed_netdevs(fds, |fd| {
                let socket = XdpSocket::new(fd, &self.pool).map_err(|error| of_no_use(&error))?;
                Ok(XdpNetdev { socket, is_virtual: device.is_virtual })
            }),
            mux::OutletConfig::Packet(_) => {
                boxed_netdevs(fds, |fd| PacketSocket::new(fd).map_err(|error| of_no_use(&error)))
            }
            mux::OutletConfig::Memif { .. } => {
                let same = known.is_some_and(|known| known.outlet == spec.outlet);
                Ok(if same {
                    ExternalChange::Nothing
                } else {
                    ExternalChange::Netdevs(vec![Box::<MemifNetdev>::default()])
                })
            }
            mux::OutletConfig::Generator(generator) => {
                let mut frames = None;
                if let Some(fd) = fds.into_iter().next() {
                    let mut file = std::fs::File::from(fd);
                    let mut bytes = Vec::new();
                    let limit = FRAMES_BYTES_MAX as u64 + 1;
                    let read =
                        file.rewind().and_then(|()| file.take(limit).read_to_end(&mut bytes));
                    read.map_err(|error| of_no_use(&error))?;
                    let parsed = GeneratorFrames::parse(&bytes);
                    frames = Some(parsed.map_err(|it| format!("external {}: {it}", spec.name))?);
                }
                Ok(match known.map(|known| &known.outlet) {
                    Some(mux::OutletConfig::Generator(_)) => ExternalChange::Frames(frames),
                    _ => {
                        let frames = frames.unwrap_or_default();
                        let generator = FrameGenerator::new(generator.clone(), frames);
                        ExternalChange::Netdevs(vec![Box::new(generator)])
                    }
                })
            }
        }
    }

    /// Removes all netdevs of the external interface in `slot`, and before
    /// them the other workers' paths to them. Frames that other workers
    /// sent there are transmitted first, as far as there is space.
    pub fn detach_netdevs(&self, slot: usize) -> Result<DetachedNetdevs, String> {
        for worker in self.workers.iter() {
            worker.call(move |it| it.core.external(slot).map(|it| it.netdevs.close_paths()))?;
        }
        let mut taken = DetachedNetdevs { netdevs: vec![], scheduler: None };
        for worker in self.workers.iter() {
            let of_worker = worker.call(move |worker| {
                if let Some((netdevs, mut tools)) = worker.core.netdevs(slot) {
                    tools.alarm.owner = RungFor::External(slot);
                    netdevs.flush(&mut tools);
                }
                let Core { externals, packets, connections, .. } = &mut worker.core;
                let netdevs = &mut externals.get_mut(slot)?.as_mut()?.netdevs;
                if let Some(program) = netdevs.find::<MemifNetdev>() {
                    program.end(connections, "the external interface was removed", false);
                }
                Some((netdevs.detach_all(packets), netdevs.scheduler.take()))
            })?;
            let Some((netdevs, scheduler)) = of_worker else { continue };
            taken.netdevs.extend(netdevs);
            taken.scheduler = taken.scheduler.or(scheduler);
        }
        Ok(taken)
    }

    /// Gives the external interface in `slot` its scheduler, if it
    /// has or had a capacity, and its netdevs, each at its worker.
    pub fn add_netdevs(
        &self,
        slot: usize,
        known: &KnownExternal,
        scheduler: Option<Box<Scheduler>>,
        netdevs: Vec<Box<dyn NetdevDriver>>,
    ) -> Result<(), String> {
        self.workers[known.worker].call(move |worker| {
            if let Some(external) = worker.core.external(slot) {
                external.netdevs.scheduler = scheduler;
            }
        })?;
        for (index, netdev) in netdevs.into_iter().enumerate() {
            self.add_netdev(slot, known.owner(index, self.workers.len()), netdev)?;
        }
        Ok(())
    }

    /// Moves netdevs to the workers where they belong now, if there are several.
    pub fn spread_netdevs(&self, slot: usize, known: &KnownExternal) -> Result<(), String> {
        if known.outlets < 2 || self.workers.len() < 2 {
            return Ok(());
        }
        let DetachedNetdevs { netdevs, scheduler } = self.detach_netdevs(slot)?;
        self.add_netdevs(slot, known, scheduler, netdevs)
    }

    /// Sets an external interface's capacity at its scheduler.
    pub fn set_capacity(&self, slot: usize, known: &KnownExternal) -> Result<(), String> {
        let Some(capacity) = &known.capacity else { return Ok(()) };
        let bps = known.spec.capacity_bps;
        capacity.set(bps);
        self.workers[known.worker].call(move |worker| {
            if let Some(external) = worker.core.external(slot) {
                external.netdevs.scheduler.get_or_insert_default().set_capacity(bps);
            }
        })
    }

    /// Closes netdevs without blocking a worker, and gives back their packets.
    pub fn close(&self, netdevs: Vec<Box<dyn NetdevDriver>>) -> Result<(), String> {
        self.give_back(netdevs.into_iter().flat_map(|netdev| netdev.close()).collect())
    }

    /// Gives packets back to the pool.
    pub fn give_back(&self, mut packets: PacketBatch) -> Result<(), String> {
        while !packets.is_empty() {
            let mut some = packets.split_off(packets.len().saturating_sub(RETURNED_MAX));
            self.workers[0].call(move |worker| {
                worker.core.packets.give_all(&mut some);
                some
            })?;
        }
        Ok(())
    }

    /// Gives a netdev to `owner`, and paths to it to the other workers.
    pub fn add_netdev(
        &self,
        slot: usize,
        owner: usize,
        netdev: Box<dyn NetdevDriver>,
    ) -> Result<(), String> {
        let mut inboxes = Vec::new();
        for other in self.workers.iter().filter(|other| other.number != owner) {
            let (producer, consumer) = RingBuffer::new(PATH_FRAMES);
            inboxes.push(consumer);
            let wake = self.workers[owner].wake.clone();
            other.call(move |worker| {
                if let Some(external) = worker.core.external(slot) {
                    external.netdevs.add_path(RemoteNetdev::new(producer, wake));
                }
            })?;
        }
        self.workers[owner].call(move |worker| {
            if let Some(external) = worker.core.external(slot) {
                external.netdevs.add(netdev, inboxes);
            }
        })
    }

    /// Moves an external interface to the worker of its vnet, if one vnet gets all
    /// of its frames. A memif program there is disconnected, and has to reconnect.
    pub fn move_to_vnet_worker(
        &self,
        state: &mut PlanState,
        classifier: &Classifier,
    ) -> Result<(), RequestRefusal> {
        for (slot, worker) in state.misplaced(classifier) {
            let Some(known) = &mut state.externals[slot] else { continue };
            known.worker = worker;
            let owner = SocketOwner::External(known.spec.name.clone());
            self.listener.commit(self.listener.prepare(owner, known.expected(slot), &[])?);
            let DetachedNetdevs { netdevs, scheduler } = self.detach_netdevs(slot)?;
            self.add_netdevs(slot, known, scheduler, netdevs)?;
        }
        Ok(())
    }
}

/// Makes netdevs from these descriptors.
fn boxed_netdevs<E: NetdevDriver>(
    fds: Vec<OwnedFd>,
    make: impl FnMut(OwnedFd) -> Result<E, String>,
) -> Result<ExternalChange, String> {
    let netdevs: Result<Vec<_>, _> = fds.into_iter().map(make).collect();
    Ok(ExternalChange::Netdevs(
        netdevs?.into_iter().map(|netdev| Box::new(netdev) as Box<dyn NetdevDriver>).collect(),
    ))
}

/// Returns an error with its causes.
fn chain(error: &dyn std::error::Error) -> String {
    match error.source() {
        None => error.to_string(),
        Some(source) => format!("{error}: {}", chain(source)),
    }
}
