//! Applies pdpd's requests to the current state.
//!
//! All objects are checked and prepared first. Then the vnet's owner gets
//! the new vnet, and then the other workers get what they need to know of
//! it. A request that can't be fulfilled is refused and changes nothing.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use pdp_proto::limits::EXTERNALS_MAX;
use pdp_proto::mux::{self, MuxReply, VlinkEnd};
use pdp_underlay::TunnelNextHop;
use tracing::info;

use crate::classify::Classifier;
use crate::control::base::MuxControl;
use crate::control::netdevs::{DetachedNetdevs, ExternalChange};
use crate::control::peer_listener::RequestRefusal;
use crate::control::plan::{
    KnownExternal, KnownVnet, PlanState, SocketOwner, TrafficClasses, VNETS_MAX, changed, expected,
    layout, outside_ends,
};
use crate::control::{check, schedule};
use crate::core::Core;
use crate::encapsulate::{ExternalPath, VlinkPath};
use crate::engine::VrouterEngine;
use crate::external::WorkerExternal;
use crate::generator::FrameGenerator;
use crate::ringers::RungFor;
use crate::vnet::MuxVnet;

impl MuxControl {
    /// Creates or changes an external interface according to `spec`, with these descriptors.
    pub fn put_external(
        &self,
        spec: mux::ExternalConfig,
        fds: Vec<OwnedFd>,
    ) -> Result<MuxReply, RequestRefusal> {
        let mut state = self.state();
        let slot = state.external_slot(&spec.name).or_else(|| state.free_external());
        let slot = slot.ok_or(format!("more than {EXTERNALS_MAX} external interfaces"))?;
        let known = state.externals[slot].as_ref();
        let new = self.netdevs(known.map(|known| &known.spec), &spec, fds)?;
        if spec.capacity_bps == Some(0) {
            return Err(format!("external {} has a capacity of 0", spec.name).into());
        }
        let applied = |spec: &mux::ExternalConfig| {
            (spec.device().map(|device| device.ifindex), spec.capacity_bps.is_some())
        };
        let moved = known.is_some_and(|it| it.moved || applied(&it.spec) != applied(&spec));
        let had_capacity = known.is_some_and(|it| it.spec.capacity_bps.is_some());
        let capacity = known.and_then(|it| it.capacity.clone());
        let capacity = capacity.or_else(|| spec.capacity_bps.map(|_| Arc::default()));
        let count = match &new {
            ExternalChange::Netdevs(netdevs) => netdevs.len(),
            ExternalChange::Nothing | ExternalChange::Frames(_) => {
                known.map_or(0, |known| known.outlets)
            }
        };
        let worker = known.map_or(slot % self.workers.len(), |known| known.worker);
        let external =
            KnownExternal { spec: spec.clone(), outlets: count, worker, moved, capacity };
        let owner = SocketOwner::External(spec.name.clone());
        let prepared = self.listener.prepare(owner, external.expected(slot), &[])?;
        let known = state.externals[slot].insert(external);
        for worker in self.workers.iter() {
            let spec = spec.clone();
            worker.call(move |worker| set_external(&mut worker.core, slot, &spec))?;
        }
        match new {
            ExternalChange::Netdevs(netdevs) => {
                // The new sockets must not wait while the kernel closes the old ones.
                let DetachedNetdevs { netdevs: before, scheduler } = self.detach_netdevs(slot)?;
                self.add_netdevs(slot, known, scheduler, netdevs)?;
                self.close(before)?;
            }
            ExternalChange::Frames(frames) => {
                if let mux::OutletConfig::Generator(spec) = spec.outlet.clone() {
                    self.workers[worker].call(move |worker| {
                        let external = worker.core.external(slot);
                        if let Some(generator) =
                            external.and_then(|it| it.netdevs.find::<FrameGenerator>())
                        {
                            generator.change(spec, frames);
                        }
                    })?;
                }
            }
            ExternalChange::Nothing if had_capacity || spec.capacity_bps.is_none() => {}
            ExternalChange::Nothing => self.spread_netdevs(slot, known)?,
        }
        self.set_capacity(slot, known)?;
        self.listener.commit(prepared);
        let classifier = Arc::new(state.classifier(None, None)?);
        self.move_to_vnet_worker(&mut state, &classifier)?;
        self.publish(&classifier)?;
        if moved {
            let uses =
                |vnet: &&KnownVnet| outside_ends(&vnet.spec).any(|end| end.interface == spec.name);
            let vnets: Vec<_> = state.vnets.values().filter(uses).cloned().collect();
            // If one vnet can't use the new interface, the others
            // still do. It is tried again with the next call.
            let tried = vnets.into_iter().map(|it| self.install(&mut state, it, Some(&spec.name)));
            if let Some(refused) = tried.filter_map(Result::err).reduce(|first, _| first) {
                return Err(refused);
            }
            if let Some(external) = &mut state.externals[slot] {
                external.moved = false;
                if had_capacity && spec.capacity_bps.is_none() {
                    self.spread_netdevs(slot, external)?;
                }
            }
        }
        info!("external {}: {count} netdevs, {:?}", spec.name, spec.outlet);
        Ok(MuxReply::Done)
    }

    /// Deletes an external interface that no vnet uses.
    pub fn delete_external(&self, name: &str) -> Result<MuxReply, RequestRefusal> {
        let mut state = self.state();
        let slot = state.external_slot(name).ok_or(format!("external {name} does not exist"))?;
        let uses = |vnet: &&KnownVnet| outside_ends(&vnet.spec).any(|end| end.interface == name);
        if let Some(vnet) = state.vnets.values().find(uses) {
            return Err(format!("external {name} is used by vnet {}", vnet.spec.name).into());
        }
        state.externals[slot] = None;
        let DetachedNetdevs { netdevs, scheduler } = self.detach_netdevs(slot)?;
        self.close(netdevs)?;
        self.give_back(scheduler.map_or(vec![], |mut scheduler| scheduler.drain()))?;
        for worker in self.workers.iter() {
            worker.call(move |worker| worker.core.externals[slot].take())?;
        }
        let owner = SocketOwner::External(name.to_string());
        self.listener.commit(self.listener.prepare(owner, HashMap::new(), &[])?);
        Ok(MuxReply::Done)
    }

    /// Creates or changes a vnet according to `spec`.
    pub fn put_vnet(&self, spec: mux::VnetConfig) -> Result<MuxReply, RequestRefusal> {
        check::check(&spec)?;
        let mut state = self.state();
        let at_ns = schedule::now_ns();
        let vnet = match state.vnets.get(&spec.name) {
            Some(known) if known.spec == spec => return Ok(MuxReply::Done),
            Some(known) => {
                let moved = !layout(&known.spec).eq(layout(&spec));
                let generation = if moved { state.generation + 1 } else { known.generation };
                KnownVnet { spec, at_ns, generation, ..known.clone() }
            }
            None => {
                let (worker, slot) = state
                    .free_vnet(&spec, self.workers.len())
                    .ok_or(format!("vnet {}: a worker has at most {VNETS_MAX} vnets", spec.name))?;
                let (generation, classes) = (state.generation + 1, TrafficClasses::new());
                let scheduled = Arc::default();
                KnownVnet { spec, at_ns, worker, slot, generation, classes, scheduled }
            }
        };
        self.install(&mut state, vnet, None)?;
        self.check_schedules();
        Ok(MuxReply::Done)
    }

    /// Installs `vnet`, or changes nothing. `moved` names
    /// an external interface that has been replaced.
    pub(super) fn install(
        &self,
        state: &mut PlanState,
        mut vnet: KnownVnet,
        moved: Option<&str>,
    ) -> Result<(), RequestRefusal> {
        let name = vnet.spec.name.clone();
        let spec = schedule::at(&vnet.spec, vnet.at_ns);
        vnet.classes = state.classes(&vnet, &spec);
        let classifier = Arc::new(state.classifier(Some(&vnet), None)?);
        let mut refused = None;
        let mut made = MuxVnet::new(&spec, vnet.slot, vnet.generation, |number, end| {
            let path = self.vlink_path(state, &vnet, number, end);
            path.map_err(|error| refused.get_or_insert(error).len()).ok()
        });
        if let Some(error) = refused {
            return Err(format!("vnet {name}: {error}").into());
        }
        let before = state.vnets.get(&name);
        made.changed = before
            .and_then(|before| changed(&schedule::at(&before.spec, before.at_ns), &spec, moved));
        let sockets: Vec<_> = slowpaths(&vnet.spec).map(|it| it.socket.clone()).collect();
        let new: Vec<_> = sockets.into_iter().filter(|it| !self.slowpaths.listens(it)).collect();
        let owner = SocketOwner::Vnet(name.clone());
        let prepared = self.listener.prepare(owner, expected(&vnet)?, &new)?;
        made.set_engines(&spec, |spec| self.engine(spec, &vnet))
            .map_err(|error| format!("vnet {name}: {error}"))?;
        self.set_classes(state, &vnet.classes)?;
        self.replace(&vnet, Some(made), &classifier)?;
        self.move_to_vnet_worker(state, &classifier)?;
        self.publish(&classifier)?;
        self.listener.commit(prepared);
        state.generation = state.generation.max(vnet.generation);
        let mut lengths: HashMap<_, _> =
            state.tunnels(&vnet.spec).map(|(ends, _)| (ends, 0)).collect();
        let classes = vnet.classes.clone();
        if let Some(before) = state.vnets.insert(name, vnet) {
            self.remove_classes(state, &before.classes, &classes)?;
            lengths.extend(state.tunnels(&before.spec).map(|(ends, _)| (ends, 0)));
        }
        self.measure(state, lengths);
        Ok(())
    }

    /// Creates an engine for a vnet, with its slow path.
    fn engine(&self, spec: &mux::EngineConfig, vnet: &KnownVnet) -> Result<VrouterEngine, String> {
        let watch = &self.workers[vnet.worker].watch;
        let (mut engine, bell) = self
            .routes
            .engine(spec, watch, vnet.slot)
            .map_err(|error| format!("can't create an engine's doorbell: {error}"))?;
        if let Some(slowpath) = &spec.slowpath {
            let listener = self.listener.take(&slowpath.socket).map(OwnedFd::from);
            if !self.slowpaths.add(&mut engine, &spec.code, slowpath, bell, listener) {
                return Err(format!("no socket listens at {}", slowpath.socket.display()));
            }
        }
        Ok(engine)
    }

    /// Adds these traffic classes to the schedulers, or changes their shares.
    fn set_classes(&self, state: &PlanState, classes: &TrafficClasses) -> Result<(), String> {
        for (slot, known) in state.externals.iter().enumerate() {
            let Some(known) = known else { continue };
            let here = classes.range((slot, String::new())..(slot + 1, String::new()));
            let here: Vec<_> = here.map(|(_, class)| class.clone()).collect();
            if here.is_empty() {
                continue;
            }
            self.workers[known.worker].call(move |worker| {
                let now_ns = worker.core.now_ns;
                let Some(external) = worker.core.external(slot) else { return };
                let Some(scheduler) = &mut external.netdevs.scheduler else { return };
                here.into_iter().for_each(|(class, part)| scheduler.set(class, part, now_ns));
            })?;
        }
        Ok(())
    }

    /// Removes the traffic classes of `before` that are not in
    /// `after` from the schedulers. Their ports must send no more.
    fn remove_classes(
        &self,
        state: &PlanState,
        before: &TrafficClasses,
        after: &TrafficClasses,
    ) -> Result<(), String> {
        for (slot, known) in state.externals.iter().enumerate() {
            let Some(known) = known else { continue };
            let stays = |key, class| after.get(key).is_some_and(|it| Arc::ptr_eq(class, &it.0));
            let here = before.range((slot, String::new())..(slot + 1, String::new()));
            let gone = here.filter(|(key, (class, _))| !stays(key, class));
            let gone: Vec<_> = gone.map(|(_, (class, _))| class.number()).collect();
            if gone.is_empty() {
                continue;
            }
            // The last reference to each class is dropped here, not between two rounds.
            self.workers[known.worker].call(move |worker| {
                let (netdevs, mut tools) = worker.core.netdevs(slot)?;
                tools.alarm.owner = RungFor::External(slot);
                Some(netdevs.remove_classes(&gone, &mut tools))
            })?;
        }
        Ok(())
    }

    /// Replaces `vnet` by `made`, or ends it. Its worker uses `classifier` from the same
    /// round on. The remains of the old vnet are dropped here, not between two rounds.
    fn replace(
        &self,
        vnet: &KnownVnet,
        made: Option<MuxVnet>,
        classifier: &Arc<Classifier>,
    ) -> Result<(), String> {
        let (slot, classifier) = (vnet.slot, classifier.clone());
        let left = self.workers[vnet.worker].call(move |worker| {
            let left = worker.replace(slot, made);
            (left, std::mem::replace(&mut worker.classifier, classifier))
        });
        left.map(drop)
    }

    /// Creates the path to an external end. Vlinks are spread over queues by their `number`.
    fn vlink_path(
        &self,
        state: &PlanState,
        vnet: &KnownVnet,
        number: usize,
        end: &VlinkEnd,
    ) -> Result<VlinkPath, String> {
        let VlinkEnd::External { name, interface, by } = end else {
            return Err("no such port".into());
        };
        let slot = state.external_slot(interface);
        let known = slot.and_then(|slot| state.externals[slot].as_ref());
        let (Some(slot), Some(known)) = (slot, known) else {
            return Err(format!("external {interface} does not exist"));
        };
        let hop = match by.ends() {
            None => Arc::default(),
            Some((local, remote)) => match &known.spec.outlet {
                mux::OutletConfig::Xdp(device) | mux::OutletConfig::Packet(device) => {
                    let mtu = state.mtu(&vnet.spec, &vnet.spec.vlinks[number]);
                    let bytes = mtu + by.overhead();
                    let hop = self.underlay.next_hop(device.ifindex, local, remote, bytes);
                    hop.ok_or("too many tunnels")?
                }
                // A generator takes all frames, whatever their destination.
                mux::OutletConfig::Generator(_) => Arc::new(TunnelNextHop::known([0; 6])),
                mux::OutletConfig::Memif { .. } => {
                    return Err("a memif interface can't have tunnels".into());
                }
            },
        };
        let outside = ExternalPath::new(slot, number, by, || hop);
        let mut outside = outside.ok_or("a tunnel's addresses are of different families")?;
        outside.class = vnet.classes.get(&(slot, name.clone())).map(|it| it.0.clone());
        Ok(VlinkPath::Outside(outside))
    }

    /// Deletes a vnet.
    pub fn delete_vnet(&self, name: &str) -> Result<MuxReply, RequestRefusal> {
        let mut state = self.state();
        let Some(vnet) = state.vnets.get(name).cloned() else {
            return Err(format!("vnet {name} does not exist").into());
        };
        let classifier = Arc::new(state.classifier(None, Some(name))?);
        self.replace(&vnet, None, &classifier)?;
        self.publish(&classifier)?;
        let owner = SocketOwner::Vnet(name.to_string());
        self.listener.commit(self.listener.prepare(owner, HashMap::new(), &[])?);
        self.remove_classes(&state, &vnet.classes, &TrafficClasses::new())?;
        state.vnets.remove(name);
        self.measure(&state, state.tunnels(&vnet.spec).map(|(ends, _)| (ends, 0)).collect());
        Ok(MuxReply::Done)
    }
}

/// Returns the slow paths of a vnet's engines.
fn slowpaths(spec: &mux::VnetConfig) -> impl Iterator<Item = &mux::SlowPathConfig> {
    spec.nodes.iter().filter_map(|node| node.router.as_ref()?.engine.as_ref()?.slowpath.as_ref())
}

fn set_external(core: &mut Core, slot: usize, spec: &mux::ExternalConfig) {
    if core.externals.len() <= slot {
        core.externals.resize_with(slot + 1, || None);
    }
    let mac = spec.device().map_or([0; 6], |device| device.mac);
    let made = || WorkerExternal::new(spec.name.clone(), mac, spec.mtu);
    let external = core.externals[slot].get_or_insert_with(made);
    external.mac = mac;
    external.mtu = spec.mtu;
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Sender, channel};

    use pdp_proto::mux::OutletConfig;

    use super::*;
    use crate::control::workers::{MuxSettings, WorkerHandle};
    use crate::counters::Reason;
    use crate::netdev::{NetdevContext, NetdevDriver};
    use crate::packets::PacketBatch;

    /// Netdev that, when closed, sends the number of netdevs that have replaced it.
    #[derive(Debug)]
    struct Replaced(WorkerHandle, Sender<usize>);

    impl NetdevDriver for Replaced {
        fn room(&mut self) -> usize {
            0
        }

        fn send(&mut self, _: &mut NetdevContext<'_>, _: &mut PacketBatch) -> Reason {
            Reason::ExternalGone
        }

        fn close(self: Box<Self>) -> PacketBatch {
            let count = |worker: &mut crate::worker::Worker| {
                worker.core.external(0).map_or(0, |it| it.netdevs.all().len())
            };
            self.1.send(self.0.call(count).unwrap()).unwrap();
            vec![]
        }
    }

    /// Closing a socket takes the kernel some time. The interface has the next one before that.
    #[test]
    fn replacing_an_interface_does_not_wait_for_closing() {
        let settings = MuxSettings { workers: 1, cpus: vec![], pool_packets: 8192 };
        let control = MuxControl::start(&settings).unwrap();
        let put = |outlet| {
            let external = mux::ExternalConfig::new("A", 1500, outlet);
            assert_eq!(control.put_external(external, vec![]).unwrap(), MuxReply::Done);
        };
        let device = mux::Device { device: "a".into(), ifindex: 1, mac: [0; 6], is_virtual: true };
        put(OutletConfig::Packet(device));
        let (sender, receiver) = channel();
        let netdev = Replaced(control.workers[0].clone(), sender);
        control.add_netdev(0, 0, Box::new(netdev)).unwrap();
        put(OutletConfig::Generator(mux::GeneratorConfig { pps: 0, frames: 0, number_at: None }));
        assert_eq!(receiver.try_recv(), Ok(1));
    }

    /// Vnets are spread by their number. Vnets with power
    /// are spread by the power promised at each worker.
    #[test]
    fn powered_vnet_goes_to_the_least_committed_worker() {
        let settings = MuxSettings { workers: 2, cpus: vec![], pool_packets: 8192 };
        let control = MuxControl::start(&settings).unwrap();
        let mut state = control.state();
        let mut put = |name: &str, power| {
            let engine = mux::EngineConfig {
                code: mux::EngineCode::Ip { routes: "/none".into() },
                memory_bytes: 1,
                slowpath: None,
                power,
            };
            let none = mux::Rate { bps: 0, pps: 0 };
            let router = mux::RouterConfig {
                guests: vec![],
                policy: mux::GuestDistribution::Flow,
                flow: mux::FlowKey::Ip,
                punt_filters: vec![],
                punt_limits: [none; mux::PUNT_CLASSES],
                engine: Some(engine),
            };
            let (name, tap_socket) = (name.to_owned(), "/none".into());
            let node = mux::NodeConfig {
                name: "r1".into(),
                ports: vec![],
                tap_socket,
                router: Some(router),
            };
            let spec = mux::VnetConfig {
                name: name.clone(),
                police: None,
                nodes: vec![node],
                vlinks: vec![],
            };
            let (worker, slot) = state.free_vnet(&spec, 2).unwrap();
            let (classes, scheduled) = (TrafficClasses::new(), Arc::default());
            let (at_ns, generation) = (0, 1);
            let known = KnownVnet { spec, at_ns, worker, slot, generation, classes, scheduled };
            state.vnets.insert(name, known);
            worker
        };
        assert_eq!([put("a", 0), put("b", 0), put("c", 0)], [0, 1, 0]);
        assert_eq!([put("d", 300_000), put("e", 100_000), put("f", 100_000)], [1, 0, 0]);
        assert_eq!([put("g", 100_000), put("h", 0), put("i", 1)], [0, 1, 1]);
    }

    /// One worker has all sockets of an interface with a capacity.
    /// The workers divide them again when the capacity is removed.
    #[test]
    fn interface_with_capacity_has_one_worker() {
        let settings = MuxSettings { workers: 2, cpus: vec![], pool_packets: 8192 };
        let control = MuxControl::start(&settings).unwrap();
        let put = |capacity_bps| {
            let device =
                mux::Device { device: "a".into(), ifindex: 1, mac: [0; 6], is_virtual: true };
            let external = mux::ExternalConfig::new("A", 1500, OutletConfig::Packet(device));
            let external = mux::ExternalConfig { capacity_bps, ..external };
            control.put_external(external, vec![])
        };
        assert_eq!(put(None).unwrap(), MuxReply::Done);
        for owner in 0..2 {
            let netdev = Replaced(control.workers[owner].clone(), channel().0);
            control.add_netdev(0, owner, Box::new(netdev)).unwrap();
        }
        control.state().externals[0].as_mut().unwrap().outlets = 2;
        let netdevs = || {
            let count = |worker: &mut crate::worker::Worker| {
                let netdevs = &mut worker.core.external(0).unwrap().netdevs;
                let own = netdevs.all().iter().map(|netdev| &**netdev as &dyn std::any::Any);
                (own.filter(|it| it.is::<Replaced>()).count(), netdevs.scheduler.is_some())
            };
            [0, 1].map(|worker: usize| control.workers[worker].call(count).unwrap())
        };
        assert_eq!(netdevs(), [(1, false), (1, false)]);
        for capacity_bps in [1000, 2000] {
            assert_eq!(put(Some(capacity_bps)).unwrap(), MuxReply::Done);
            assert_eq!(netdevs(), [(2, true), (0, false)]);
        }
        assert!(put(Some(0)).is_err());
        // Queued frames stay when sockets are replaced.
        let send = |worker: &mut crate::worker::Worker| {
            let Core { externals, packets, now_ns, .. } = &mut worker.core;
            let scheduler = externals[0].as_mut().unwrap().netdevs.scheduler.as_mut().unwrap();
            (0..3).for_each(|_| scheduler.put(0, 0, packets.take().unwrap(), *now_ns));
        };
        control.workers[0].call(send).unwrap();
        let DetachedNetdevs { netdevs: taken, scheduler } = control.detach_netdevs(0).unwrap();
        let known = control.state().externals[0].take().unwrap();
        control.add_netdevs(0, &known, scheduler, taken).unwrap();
        control.state().externals[0] = Some(known);
        let waits = |worker: &mut crate::worker::Worker| {
            let scheduler = &worker.core.external(0).unwrap().netdevs.scheduler;
            scheduler.as_ref().is_some_and(|scheduler| !scheduler.is_empty())
        };
        assert!(control.workers[0].call(waits).unwrap());
        assert_eq!(put(None).unwrap(), MuxReply::Done);
        assert_eq!(netdevs(), [(1, true), (1, false)]);
    }
}
