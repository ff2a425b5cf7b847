//! What pdpd wants, compared with what there is.
//!
//! Everything is checked and made ready first; then the owner of a vnet gets its new shape, then
//! the others what they have to know of it. What can't be had is refused and changes nothing.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use pdp_proto::limits::EXTERNALS_MAX;
use pdp_proto::mux::{self, End, Reply};
use pdp_underlay::NextHop;
use tracing::info;

use crate::classify::Classifier;
use crate::control::base::Control;
use crate::control::exits::{New, Taken};
use crate::control::keeper::Refusal;
use crate::control::plan::{
    Classes, KnownExternal, KnownVnet, Owner, State, VNETS_MAX, changed, expected, layout,
    outside_ends,
};
use crate::control::{check, schedule};
use crate::core::Core;
use crate::encapsulate::{Outside, Way};
use crate::engine::Engine;
use crate::external::External;
use crate::generator::Generator;
use crate::ringers::RungFor;
use crate::vnet::Vnet;

impl Control {
    /// Makes an external interface what `spec` says, with these descriptors.
    pub fn put_external(&self, spec: mux::External, fds: Vec<OwnedFd>) -> Result<Reply, Refusal> {
        let mut state = self.state();
        let slot = state.external_slot(&spec.name).or_else(|| state.free_external());
        let slot = slot.ok_or(format!("{EXTERNALS_MAX} external interfaces are the most"))?;
        let known = state.externals[slot].as_ref();
        let new = self.exits(known.map(|known| &known.spec), &spec, fds)?;
        if spec.capacity_bps == Some(0) {
            return Err(format!("external {} has a capacity of 0", spec.name).into());
        }
        let told = |spec: &mux::External| {
            (spec.device().map(|device| device.ifindex), spec.capacity_bps.is_some())
        };
        let moved = known.is_some_and(|it| it.moved || told(&it.spec) != told(&spec));
        let had_capacity = known.is_some_and(|it| it.spec.capacity_bps.is_some());
        let capacity = known.and_then(|it| it.capacity.clone());
        let capacity = capacity.or_else(|| spec.capacity_bps.map(|_| Arc::default()));
        let count = match &new {
            New::Exits(exits) => exits.len(),
            New::Nothing | New::Frames(_) => known.map_or(0, |known| known.outlets),
        };
        let worker = known.map_or(slot % self.workers.len(), |known| known.worker);
        let external =
            KnownExternal { spec: spec.clone(), outlets: count, worker, moved, capacity };
        let owner = Owner::External(spec.name.clone());
        let prepared = self.keeper.prepare(owner, external.expected(slot), &[])?;
        let known = state.externals[slot].insert(external);
        for worker in self.workers.iter() {
            let spec = spec.clone();
            worker.call(move |worker| set_external(&mut worker.core, slot, &spec))?;
        }
        match new {
            New::Exits(exits) => {
                // None is to be without the other while the kernel lets go of the sockets of before.
                let Taken { exits: before, scheduler } = self.take_exits(slot)?;
                self.add_exits(slot, known, scheduler, exits)?;
                self.close(before)?;
            }
            New::Frames(frames) => {
                if let mux::Outlet::Generator(spec) = spec.outlet.clone() {
                    self.workers[worker].call(move |worker| {
                        let external = worker.core.external(slot);
                        if let Some(generator) =
                            external.and_then(|it| it.exits.find::<Generator>())
                        {
                            generator.change(spec, frames);
                        }
                    })?;
                }
            }
            New::Nothing if had_capacity || spec.capacity_bps.is_none() => {}
            New::Nothing => self.spread_exits(slot, known)?,
        }
        self.set_capacity(slot, known)?;
        self.keeper.commit(prepared);
        let classifier = Arc::new(state.classifier(None, None)?);
        self.bring_home(&mut state, &classifier)?;
        self.publish(&classifier)?;
        if moved {
            let uses =
                |vnet: &&KnownVnet| outside_ends(&vnet.spec).any(|end| end.interface == spec.name);
            let vnets: Vec<_> = state.vnets.values().filter(uses).cloned().collect();
            // One that it can't be had for keeps it from no other, and is tried again with the next of these calls.
            let tried = vnets.into_iter().map(|it| self.install(&mut state, it, Some(&spec.name)));
            if let Some(refused) = tried.filter_map(Result::err).reduce(|first, _| first) {
                return Err(refused);
            }
            if let Some(external) = &mut state.externals[slot] {
                external.moved = false;
                if had_capacity && spec.capacity_bps.is_none() {
                    self.spread_exits(slot, external)?;
                }
            }
        }
        info!("external {}: {count} exits, {:?}", spec.name, spec.outlet);
        Ok(Reply::Done)
    }

    /// Ends an external interface that no vnet uses.
    pub fn delete_external(&self, name: &str) -> Result<Reply, Refusal> {
        let mut state = self.state();
        let slot = state.external_slot(name).ok_or(format!("there is no external {name}"))?;
        let uses = |vnet: &&KnownVnet| outside_ends(&vnet.spec).any(|end| end.interface == name);
        if let Some(vnet) = state.vnets.values().find(uses) {
            return Err(format!("external {name} is used by vnet {}", vnet.spec.name).into());
        }
        state.externals[slot] = None;
        let Taken { exits, scheduler } = self.take_exits(slot)?;
        self.close(exits)?;
        self.give_back(scheduler.map_or(vec![], |mut scheduler| scheduler.drain()))?;
        for worker in self.workers.iter() {
            worker.call(move |worker| worker.core.externals[slot].take())?;
        }
        let owner = Owner::External(name.to_string());
        self.keeper.commit(self.keeper.prepare(owner, HashMap::new(), &[])?);
        Ok(Reply::Done)
    }

    /// Makes a vnet what `spec` says.
    pub fn put_vnet(&self, spec: mux::Vnet) -> Result<Reply, Refusal> {
        check::check(&spec)?;
        let mut state = self.state();
        let (wanted, spec) = (spec.clone(), schedule::at(&spec, schedule::now_ns()));
        let vnet = match state.vnets.get(&spec.name) {
            Some(known) if known.wanted == wanted => return Ok(Reply::Done),
            Some(known) => {
                let moved = !layout(&known.spec).eq(layout(&spec));
                let generation = if moved { state.generation + 1 } else { known.generation };
                KnownVnet { wanted, spec, generation, ..known.clone() }
            }
            None => {
                let (worker, slot) = state.free_vnet(&spec, self.workers.len()).ok_or(format!(
                    "vnet {}: {VNETS_MAX} vnets a worker are the most",
                    spec.name
                ))?;
                let (generation, classes) = (state.generation + 1, Classes::new());
                let scheduled = Arc::default();
                KnownVnet { wanted, spec, worker, slot, generation, classes, scheduled }
            }
        };
        self.install(&mut state, vnet, None)?;
        self.look_at_schedules();
        Ok(Reply::Done)
    }

    /// Makes `vnet` what it says, or changes nothing. `moved` is an external interface that is another now.
    pub(super) fn install(
        &self,
        state: &mut State,
        mut vnet: KnownVnet,
        moved: Option<&str>,
    ) -> Result<(), Refusal> {
        let name = vnet.spec.name.clone();
        vnet.classes = state.classes(&vnet);
        let classifier = Arc::new(state.classifier(Some(&vnet), None)?);
        let mut refused = None;
        let mut made = Vnet::new(&vnet.spec, vnet.slot, vnet.generation, |number, end| {
            let way = self.way(state, &vnet, number, end);
            way.map_err(|error| refused.get_or_insert(error).len()).ok()
        });
        if let Some(error) = refused {
            return Err(format!("vnet {name}: {error}").into());
        }
        let before = state.vnets.get(&name);
        made.changed = before.and_then(|before| changed(&before.spec, &vnet.spec, moved));
        let sockets: Vec<_> = slowpaths(&vnet.spec).map(|it| it.socket.clone()).collect();
        let new: Vec<_> = sockets.into_iter().filter(|it| !self.slowpaths.listens(it)).collect();
        let owner = Owner::Vnet(name.clone());
        let prepared = self.keeper.prepare(owner, expected(&vnet)?, &new)?;
        made.set_engines(&vnet.spec, |spec| self.engine(spec, &vnet))
            .map_err(|error| format!("vnet {name}: {error}"))?;
        self.set_classes(state, &vnet.classes)?;
        self.replace(&vnet, Some(made), &classifier)?;
        self.bring_home(state, &classifier)?;
        self.publish(&classifier)?;
        self.keeper.commit(prepared);
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

    /// An engine for a vnet, with its slow path.
    fn engine(&self, spec: &mux::Engine, vnet: &KnownVnet) -> Result<Engine, String> {
        let watch = &self.workers[vnet.worker].watch;
        let (mut engine, bell) = self
            .routes
            .engine(spec, watch, vnet.slot)
            .map_err(|error| format!("no descriptor for an engine: {error}"))?;
        if let Some(slowpath) = &spec.slowpath {
            let listener = self.keeper.take(&slowpath.socket).map(OwnedFd::from);
            if !self.slowpaths.add(&mut engine, &spec.code, slowpath, bell, listener) {
                return Err(format!("nobody listens at {}", slowpath.socket.display()));
            }
        }
        Ok(engine)
    }

    /// Has schedulers know these classes and what they are to get.
    fn set_classes(&self, state: &State, classes: &Classes) -> Result<(), String> {
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
                let Some(scheduler) = &mut external.exits.scheduler else { return };
                here.into_iter().for_each(|(class, part)| scheduler.set(class, part, now_ns));
            })?;
        }
        Ok(())
    }

    /// Has schedulers let go of the classes of `before` that are not in `after`, whose ports send no more.
    fn remove_classes(
        &self,
        state: &State,
        before: &Classes,
        after: &Classes,
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
            // The last of each is let go of here, and not between two rounds.
            self.workers[known.worker].call(move |worker| {
                let (exits, mut tools) = worker.core.exits(slot)?;
                tools.alarm.owner = RungFor::External(slot);
                Some(exits.remove_classes(&gone, &mut tools))
            })?;
        }
        Ok(())
    }

    /// Puts `made` in the place of `vnet`, or ends it, and has its worker classify by `classifier` from the
    /// same round on. What is left of the one before is dropped here, and not between two rounds.
    fn replace(
        &self,
        vnet: &KnownVnet,
        made: Option<Vnet>,
        classifier: &Arc<Classifier>,
    ) -> Result<(), String> {
        let (slot, classifier) = (vnet.slot, classifier.clone());
        let left = self.workers[vnet.worker].call(move |worker| {
            let left = worker.replace(slot, made);
            (left, std::mem::replace(&mut worker.classifier, classifier))
        });
        left.map(drop)
    }

    /// The way to an outside end; vlinks are spread over queues by their `number`.
    fn way(
        &self,
        state: &State,
        vnet: &KnownVnet,
        number: usize,
        end: &End,
    ) -> Result<Way, String> {
        let End::External { name, interface, by } = end else { return Err("no such port".into()) };
        let slot = state.external_slot(interface);
        let known = slot.and_then(|slot| state.externals[slot].as_ref());
        let (Some(slot), Some(known)) = (slot, known) else {
            return Err(format!("there is no external {interface}"));
        };
        let hop = match by.ends() {
            None => Arc::default(),
            Some((local, remote)) => match &known.spec.outlet {
                mux::Outlet::Xdp(device) | mux::Outlet::Packet(device) => {
                    let mtu = state.mtu(&vnet.spec, &vnet.spec.vlinks[number]);
                    let bytes = mtu + by.overhead();
                    let hop = self.underlay.next_hop(device.ifindex, local, remote, bytes);
                    hop.ok_or("too many tunnels")?
                }
                // Frames end there, whoever they are for.
                mux::Outlet::Generator(_) => Arc::new(NextHop::known([0; 6])),
                mux::Outlet::Memif { .. } => return Err("a memif program has no tunnels".into()),
            },
        };
        let outside = Outside::new(slot, number, by, || hop);
        let mut outside = outside.ok_or("a tunnel's addresses are of different families")?;
        outside.class = vnet.classes.get(&(slot, name.clone())).map(|it| it.0.clone());
        Ok(Way::Outside(outside))
    }

    /// Ends a vnet.
    pub fn delete_vnet(&self, name: &str) -> Result<Reply, Refusal> {
        let mut state = self.state();
        let Some(vnet) = state.vnets.get(name).cloned() else {
            return Err(format!("there is no vnet {name}").into());
        };
        let classifier = Arc::new(state.classifier(None, Some(name))?);
        self.replace(&vnet, None, &classifier)?;
        self.publish(&classifier)?;
        let owner = Owner::Vnet(name.to_string());
        self.keeper.commit(self.keeper.prepare(owner, HashMap::new(), &[])?);
        self.remove_classes(&state, &vnet.classes, &Classes::new())?;
        state.vnets.remove(name);
        self.measure(&state, state.tunnels(&vnet.spec).map(|(ends, _)| (ends, 0)).collect());
        Ok(Reply::Done)
    }
}

/// Where engines of a vnet have slow paths.
fn slowpaths(spec: &mux::Vnet) -> impl Iterator<Item = &mux::SlowPath> {
    spec.nodes.iter().filter_map(|node| node.router.as_ref()?.engine.as_ref()?.slowpath.as_ref())
}

fn set_external(core: &mut Core, slot: usize, spec: &mux::External) {
    if core.externals.len() <= slot {
        core.externals.resize_with(slot + 1, || None);
    }
    let mac = spec.device().map_or([0; 6], |device| device.mac);
    let made = || External::new(spec.name.clone(), mac, spec.mtu);
    let external = core.externals[slot].get_or_insert_with(made);
    external.mac = mac;
    external.mtu = spec.mtu;
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Sender, channel};

    use pdp_proto::mux::Outlet;

    use super::*;
    use crate::control::workers::{Settings, WorkerHandle};
    use crate::counters::Reason;
    use crate::exit::{Exit, Tools};
    use crate::packets::Batch;

    /// Tells, when it is closed, how many are in its place.
    #[derive(Debug)]
    struct Replaced(WorkerHandle, Sender<usize>);

    impl Exit for Replaced {
        fn room(&mut self) -> usize {
            0
        }

        fn send(&mut self, _: &mut Tools<'_>, _: &mut Batch) -> Reason {
            Reason::ExternalGone
        }

        fn close(self: Box<Self>) -> Batch {
            let count = |worker: &mut crate::worker::Worker| {
                worker.core.external(0).map_or(0, |it| it.exits.all().len())
            };
            self.1.send(self.0.call(count).unwrap()).unwrap();
            vec![]
        }
    }

    /// The kernel takes its time to close a socket: the interface has the next one before that.
    #[test]
    fn a_replaced_interface_does_not_wait_for_what_is_closed() {
        let settings = Settings { workers: 1, cpus: vec![], pool_packets: 8192 };
        let control = Control::start(&settings).unwrap();
        let put = |outlet| {
            let external = mux::External::new("A", 1500, outlet);
            assert_eq!(control.put_external(external, vec![]).unwrap(), Reply::Done);
        };
        let device = mux::Device { device: "a".into(), ifindex: 1, mac: [0; 6], is_virtual: true };
        put(Outlet::Packet(device));
        let (told, tells) = channel();
        let exit = Replaced(control.workers[0].clone(), told);
        control.add_exit(0, 0, Box::new(exit)).unwrap();
        put(Outlet::Generator(mux::Generator { pps: 0, frames: 0, number_at: None }));
        assert_eq!(tells.try_recv(), Ok(1));
    }

    /// Vnets are spread by their number, those with power by what was promised.
    #[test]
    fn who_has_power_goes_where_the_least_was_promised() {
        let settings = Settings { workers: 2, cpus: vec![], pool_packets: 8192 };
        let control = Control::start(&settings).unwrap();
        let mut state = control.state();
        let mut put = |name: &str, power| {
            let engine = mux::Engine {
                code: mux::Code::Ip { routes: "/none".into() },
                memory_bytes: 1,
                slowpath: None,
                power,
            };
            let none = mux::Rate { bps: 0, pps: 0 };
            let router = mux::Router {
                guests: vec![],
                policy: mux::Policy::Flow,
                flow: mux::FlowKey::Ip,
                punt_filters: vec![],
                punt_limits: [none; mux::PUNT_CLASSES],
                engine: Some(engine),
            };
            let (name, tap_socket) = (name.to_owned(), "/none".into());
            let node =
                mux::Node { name: "r1".into(), ports: vec![], tap_socket, router: Some(router) };
            let spec =
                mux::Vnet { name: name.clone(), police: None, nodes: vec![node], vlinks: vec![] };
            let (worker, slot) = state.free_vnet(&spec, 2).unwrap();
            let (classes, scheduled) = (Classes::new(), Arc::default());
            let wanted = spec.clone();
            let known = KnownVnet { wanted, spec, worker, slot, generation: 1, classes, scheduled };
            state.vnets.insert(name, known);
            worker
        };
        assert_eq!([put("a", 0), put("b", 0), put("c", 0)], [0, 1, 0]);
        assert_eq!([put("d", 300_000), put("e", 100_000), put("f", 100_000)], [1, 0, 0]);
        assert_eq!([put("g", 100_000), put("h", 0), put("i", 1)], [0, 1, 1]);
    }

    /// One worker has all sockets of an interface with a capacity; the workers share them again when that is gone.
    #[test]
    fn all_exits_of_an_interface_with_a_capacity_are_at_one_worker() {
        let settings = Settings { workers: 2, cpus: vec![], pool_packets: 8192 };
        let control = Control::start(&settings).unwrap();
        let put = |capacity_bps| {
            let device =
                mux::Device { device: "a".into(), ifindex: 1, mac: [0; 6], is_virtual: true };
            let external = mux::External::new("A", 1500, Outlet::Packet(device));
            let external = mux::External { capacity_bps, ..external };
            control.put_external(external, vec![])
        };
        assert_eq!(put(None).unwrap(), Reply::Done);
        for owner in 0..2 {
            let exit = Replaced(control.workers[owner].clone(), channel().0);
            control.add_exit(0, owner, Box::new(exit)).unwrap();
        }
        control.state().externals[0].as_mut().unwrap().outlets = 2;
        let exits = || {
            let count = |worker: &mut crate::worker::Worker| {
                let exits = &mut worker.core.external(0).unwrap().exits;
                let own = exits.all().iter().map(|exit| &**exit as &dyn std::any::Any);
                (own.filter(|it| it.is::<Replaced>()).count(), exits.scheduler.is_some())
            };
            [0, 1].map(|worker: usize| control.workers[worker].call(count).unwrap())
        };
        assert_eq!(exits(), [(1, false), (1, false)]);
        for capacity_bps in [1000, 2000] {
            assert_eq!(put(Some(capacity_bps)).unwrap(), Reply::Done);
            assert_eq!(exits(), [(2, true), (0, false)]);
        }
        assert!(put(Some(0)).is_err());
        // What waits for its turn stays when sockets are made anew.
        let send = |worker: &mut crate::worker::Worker| {
            let Core { externals, packets, now_ns, .. } = &mut worker.core;
            let scheduler = externals[0].as_mut().unwrap().exits.scheduler.as_mut().unwrap();
            (0..3).for_each(|_| scheduler.put(0, 0, packets.take().unwrap(), *now_ns));
        };
        control.workers[0].call(send).unwrap();
        let Taken { exits: taken, scheduler } = control.take_exits(0).unwrap();
        let known = control.state().externals[0].take().unwrap();
        control.add_exits(0, &known, scheduler, taken).unwrap();
        control.state().externals[0] = Some(known);
        let waits = |worker: &mut crate::worker::Worker| {
            let scheduler = &worker.core.external(0).unwrap().exits.scheduler;
            scheduler.as_ref().is_some_and(|scheduler| !scheduler.is_empty())
        };
        assert!(control.workers[0].call(waits).unwrap());
        assert_eq!(put(None).unwrap(), Reply::Done);
        assert_eq!(exits(), [(1, true), (1, false)]);
    }
}
