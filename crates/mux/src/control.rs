//! What pdpd wants, compared with what there is.
//!
//! Everything is checked and made ready first; then the owner of a vnet gets its new shape, then
//! the others what they have to know of it. What can't be had is refused and changes nothing.

use std::collections::HashMap;
use std::io::{Read, Seek};
use std::mem::discriminant;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, SyncSender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use std::{io, thread};

use pdp_afxdp::{PacketSocket, Pool, Socket};
use pdp_memif::{Bell, Listener, REGIONS_MAX};
use pdp_proto::channel::Channel;
use pdp_proto::limits::EXTERNALS_MAX;
use pdp_proto::mux::{
    self, End, ExternalStats, Match, PortName, Reply, Request, Stats, TraceStage, VERSION,
};
use rtrb::RingBuffer;
use tracing::{info, warn};

use crate::capture::{self, CAPTURES_MAX};
use crate::check;
use crate::classify::Classifier;
use crate::core::{Core, Watch};
use crate::encapsulate::{self, Outside, Way};
use crate::external::{External, Outlet, PATH_FRAMES, Path as SocketPath, Queue};
use crate::generator::{FRAMES_BYTES_MAX, Frames, Generator};
use crate::keeper::{Expected, Keeper, Owner, Refusal};
use crate::known::{
    KnownExternal, KnownVnet, State, VNETS_MAX, expected, layout, outside_ends, port,
};
use crate::packets::Packets;
use crate::ringers::Ringers;
use crate::trace::Wish;
use crate::underlay::{Ends, NextHop, Underlay};
use crate::vnet::Vnet;
use crate::wake::Wake;
use crate::worker::{Command, HANDOVER_FRAMES, Neighbour, Worker};

/// Connections of pdpd (and its tools) at a time.
const CONNECTIONS_MAX: usize = 32;

/// Vnets whose counters are read between two rounds of a worker.
const STATS_VNETS: usize = 64;

/// Commands that may wait for a worker.
const COMMANDS_MAX: usize = 64;

/// The longest wait for a frame to trace, milliseconds.
const TRACE_WAIT_MS_MAX: u64 = 60_000;

/// How a mux is made.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Worker threads.
    pub workers: usize,
    /// Their CPUs, in order; workers beyond the list run where the kernel wants.
    pub cpus: Vec<usize>,
    /// Packets of all workers.
    pub pool_packets: usize,
}

/// How other threads reach a worker.
#[derive(Clone, Debug)]
pub struct WorkerHandle {
    number: usize,
    commands: SyncSender<Command>,
    wake: Arc<Wake>,
    /// What ends its sleep.
    pub watch: Watch,
}

impl WorkerHandle {
    /// Has the worker do something between two rounds, and waits for the answer.
    pub fn call<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Worker) -> T + Send + 'static,
    ) -> Result<T, String> {
        let (reply, answer) = mpsc::channel();
        let command: Command = Box::new(move |worker| {
            // Fails only if the caller is gone.
            let _ = reply.send(work(worker));
        });
        let gone = |number| format!("worker {number} has ended; restart the mux");
        self.commands.send(command).map_err(|_| gone(self.number))?;
        self.wake.ring();
        answer.recv().map_err(|_| gone(self.number))
    }
}

/// A running mux.
#[derive(Clone)]
pub struct Mux(Arc<Shared>);

struct Shared {
    workers: Arc<[WorkerHandle]>,
    pool: Pool,
    keeper: Keeper,
    underlay: Underlay,
    state: Mutex<State>,
    tickets: AtomicU64,
    captures: Arc<AtomicUsize>,
    connections: AtomicUsize,
}

impl Mux {
    /// Starts all threads in the calling thread's network namespace, and the process's handler
    /// for shared memory that is taken away.
    pub fn start(settings: &Settings) -> anyhow::Result<Self> {
        pdp_memif::sigbus::install()?;
        let count = settings.workers.max(1);
        let (pool, parts) = Packets::pool(count, settings.pool_packets / count)?;
        let (dropped, dropped_by_workers) = mpsc::channel();
        let keeper_wake = Arc::new(Wake::new()?);
        let wakes =
            (0..count).map(|_| Wake::new().map(Arc::new)).collect::<io::Result<Vec<_>>>()?;
        let ringers = Ringers::start()?;
        let mut workers = Vec::new();
        for (number, (packets, neighbours)) in parts.into_iter().zip(mesh(&wakes)).enumerate() {
            let (commands, obeyed) = mpsc::sync_channel(COMMANDS_MAX);
            let wake = wakes[number].clone();
            let ringers = ringers.clone();
            let core = Core::new(packets, dropped.clone(), keeper_wake.clone(), ringers)?;
            let watch = core.connections.watch.clone();
            let worker = Worker::new(number as u16, core, neighbours, obeyed, wake.clone())?;
            let cpu = settings.cpus.get(number).map(|id| core_affinity::CoreId { id: *id });
            thread::Builder::new().name(format!("worker{number}")).spawn(move || {
                if let Some(cpu) = cpu
                    && !core_affinity::set_for_current(cpu)
                {
                    warn!("worker {number} can't run on CPU {} alone", cpu.id);
                }
                // What it needs to ring is made now, and not when a peer waits for it.
                if let Err(error) = Bell::probe() {
                    warn!("worker {number} can't ring: {error}");
                }
                worker.run();
            })?;
            workers.push(WorkerHandle { number, commands, wake, watch });
        }
        let workers: Arc<[WorkerHandle]> = workers.into();
        let keeper = Keeper::start(workers.clone(), dropped_by_workers, keeper_wake)?;
        Ok(Self(Arc::new(Shared {
            workers,
            pool,
            keeper,
            underlay: Underlay::start()?,
            state: Mutex::default(),
            tickets: AtomicU64::new(0),
            captures: Arc::default(),
            connections: AtomicUsize::new(0),
        })))
    }

    /// Serves who connects to `listener`, for ever.
    pub fn serve(&self, listener: &UnixListener) -> io::Result<()> {
        listener.set_nonblocking(false)?;
        for stream in listener.incoming() {
            let stream = stream?;
            if self.0.connections.fetch_add(1, Ordering::Relaxed) >= CONNECTIONS_MAX {
                warn!("more than {CONNECTIONS_MAX} control connections");
                self.0.connections.fetch_sub(1, Ordering::Relaxed);
                continue;
            }
            let mux = self.clone();
            thread::Builder::new().name("control".into()).spawn(move || {
                if let Err(error) = mux.converse(Channel::new(stream)) {
                    warn!("control connection: {error}");
                }
                mux.0.connections.fetch_sub(1, Ordering::Relaxed);
            })?;
        }
        Ok(())
    }

    fn converse(&self, mut channel: Channel) -> io::Result<()> {
        while let Some((request, descriptors)) = channel.receive()? {
            let hello = matches!(request, Request::Hello);
            let reply = self.handle(request, descriptors);
            let fds: Vec<BorrowedFd<'_>> = if hello { vec![self.0.pool.memfd()] } else { vec![] };
            channel.send(&reply, &fds)?;
        }
        Ok(())
    }

    /// Answers one request.
    pub fn handle(&self, request: Request, descriptors: Vec<OwnedFd>) -> Reply {
        let result = match request {
            Request::Hello => Ok(self.hello()),
            Request::Listen { sockets } => self.listen(sockets, descriptors),
            Request::PutExternal(spec) => self.put_external(spec, descriptors),
            Request::DeleteExternal { name } => self.delete_external(&name),
            Request::PutVnet(spec) => self.put_vnet(*spec),
            Request::DeleteVnet { name } => self.delete_vnet(&name),
            Request::Stats { vnet } => self.stats(vnet.as_deref()).map_err(Refusal::Failed),
            Request::Capture { port, snap_bytes } => {
                self.capture(&port, snap_bytes, descriptors).map_err(Refusal::Failed)
            }
            Request::Trace { port, filter, wait_ms } => {
                self.trace(&port, filter, wait_ms).map_err(Refusal::Failed)
            }
        };
        result.unwrap_or_else(|refusal| match refusal {
            Refusal::Lacks(sockets) => Reply::Lacks { sockets },
            Refusal::Failed(error) => Reply::Failed { error },
        })
    }

    fn listen(&self, sockets: Vec<PathBuf>, fds: Vec<OwnedFd>) -> Result<Reply, Refusal> {
        if sockets.len() != fds.len() {
            let (paths, count) = (sockets.len(), fds.len());
            return Err(format!("{paths} paths and {count} sockets to listen at").into());
        }
        self.0.keeper.offer(sockets.into_iter().zip(fds.into_iter().map(Listener::new)));
        Ok(Reply::Done)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn hello(&self) -> Reply {
        let state = self.state();
        let ready = state.externals.iter().flatten().filter(|external| external.outlets > 0);
        Reply::Hello {
            version: VERSION,
            externals: ready.map(|external| external.spec.name.clone()).collect(),
            vnets: state.vnets.keys().cloned().collect(),
        }
    }

    fn put_external(&self, spec: mux::External, fds: Vec<OwnedFd>) -> Result<Reply, Refusal> {
        let mut state = self.state();
        let slot = state.external_slot(&spec.name).or_else(|| state.free_external());
        let slot = slot.ok_or(format!("{EXTERNALS_MAX} external interfaces are the most"))?;
        let known = state.externals[slot].as_ref();
        let new = self.outlets(known.map(|known| &known.spec), &spec, fds)?;
        let index = |spec: &mux::External| spec.device().map(|device| device.ifindex);
        let moved = known.is_some_and(|known| index(&known.spec) != index(&spec));
        let count = match &new {
            New::Outlets(outlets) => outlets.len(),
            New::Nothing | New::Frames(_) => known.map_or(0, |known| known.outlets),
        };
        let owner = Owner::External(spec.name.clone());
        let mut expected = HashMap::new();
        if let mux::Outlet::Memif { socket } = &spec.outlet {
            let worker = slot % self.0.workers.len();
            let (owner, slot) = (owner.clone(), slot as u16);
            let (interfaces, regions) = (1, REGIONS_MAX);
            let program = Expected { owner, worker, slot, seat: None, interfaces, regions };
            expected.insert(socket.clone(), program);
        }
        let prepared = self.0.keeper.prepare(owner, expected)?;
        state.externals[slot] = Some(KnownExternal { spec: spec.clone(), outlets: count });
        if matches!(new, New::Outlets(_)) {
            self.close_paths(slot)?;
        }
        for worker in self.0.workers.iter() {
            let (spec, close) = (spec.clone(), matches!(new, New::Outlets(_)));
            worker.call(move |worker| set_external(&mut worker.core, slot, &spec, close))?;
        }
        match new {
            New::Outlets(outlets) => {
                for (index, outlet) in outlets.into_iter().enumerate() {
                    self.add_outlet(slot, (slot + index) % self.0.workers.len(), outlet)?;
                }
            }
            New::Frames(frames) => {
                if let mux::Outlet::Generator(spec) = spec.outlet.clone() {
                    let owner = &self.0.workers[slot % self.0.workers.len()];
                    owner.call(move |worker| {
                        let external = worker.core.external(slot);
                        if let Some(generator) = external.and_then(External::generator) {
                            generator.change(spec, frames);
                        }
                    })?;
                }
            }
            New::Nothing => {}
        }
        self.0.keeper.commit(prepared);
        let classifier = Arc::new(state.classifier(None, None)?);
        self.publish(&classifier)?;
        if moved {
            let vnets: Vec<_> = state.vnets.values().cloned().collect();
            for vnet in vnets {
                self.install(&mut state, vnet)?;
            }
        }
        info!("external {}: {count} outlets, {:?}", spec.name, spec.outlet);
        Ok(Reply::Done)
    }

    /// What is new about an external interface that was as `known` says, with these descriptors.
    fn outlets(
        &self,
        known: Option<&mux::External>,
        spec: &mux::External,
        fds: Vec<OwnedFd>,
    ) -> Result<New, String> {
        let of_no_use = |error: &dyn std::error::Error| {
            format!("a descriptor of external {} is of no use: {}", spec.name, chain(error))
        };
        match &spec.outlet {
            mux::Outlet::Xdp(_) | mux::Outlet::Packet(_)
                if fds.is_empty()
                    && known.is_none_or(|known| {
                        discriminant(&known.outlet) == discriminant(&spec.outlet)
                    }) =>
            {
                Ok(New::Nothing)
            }
            mux::Outlet::Xdp(_) => {
                let sockets = fds.into_iter().map(|fd| Socket::new(fd, &self.0.pool));
                let sockets: Result<Vec<_>, _> = sockets.collect();
                let sockets = sockets.map_err(|error| of_no_use(&error))?;
                Ok(New::Outlets(sockets.into_iter().map(Box::new).map(Outlet::Xdp).collect()))
            }
            mux::Outlet::Packet(_) => {
                let sockets: Result<Vec<_>, _> = fds.into_iter().map(PacketSocket::new).collect();
                let sockets = sockets.map_err(|error| of_no_use(&error))?;
                Ok(New::Outlets(sockets.into_iter().map(Box::new).map(Outlet::Packet).collect()))
            }
            mux::Outlet::Memif { .. } => {
                let same = known.is_some_and(|known| known.outlet == spec.outlet);
                Ok(if same { New::Nothing } else { New::Outlets(vec![Outlet::Memif(None)]) })
            }
            mux::Outlet::Generator(generator) => {
                let mut frames = None;
                if let Some(fd) = fds.into_iter().next() {
                    let mut file = std::fs::File::from(fd);
                    let mut bytes = Vec::new();
                    let limit = FRAMES_BYTES_MAX as u64 + 1;
                    let read =
                        file.rewind().and_then(|()| file.take(limit).read_to_end(&mut bytes));
                    read.map_err(|error| of_no_use(&error))?;
                    let parsed = Frames::parse(&bytes);
                    frames = Some(parsed.map_err(|it| format!("external {}: {it}", spec.name))?);
                }
                Ok(match known.map(|known| &known.outlet) {
                    Some(mux::Outlet::Generator(_)) => New::Frames(frames),
                    _ => {
                        let frames = frames.unwrap_or_default();
                        let generator = Generator::new(generator.clone(), frames);
                        New::Outlets(vec![Outlet::Generator(Box::new(generator))])
                    }
                })
            }
        }
    }

    /// Has no worker send to the outlets of others any more; after that their owners close them.
    fn close_paths(&self, slot: usize) -> Result<(), String> {
        self.0.workers.iter().try_for_each(|worker| {
            worker.call(move |worker| {
                if let Some(external) = worker.core.external(slot) {
                    external.close_paths();
                }
            })
        })
    }

    /// Gives an outlet to `owner`, and the other workers ways to it.
    fn add_outlet(&self, slot: usize, owner: usize, outlet: Outlet) -> Result<(), String> {
        let mut inboxes = Vec::new();
        for other in self.0.workers.iter().filter(|other| other.number != owner) {
            let (producer, consumer) = RingBuffer::new(PATH_FRAMES);
            inboxes.push(consumer);
            let wake = self.0.workers[owner].wake.clone();
            other.call(move |worker| {
                if let Some(external) = worker.core.external(slot) {
                    external.add_path(SocketPath::new(producer, wake));
                }
            })?;
        }
        self.0.workers[owner].call(move |worker| {
            if let Some(external) = worker.core.external(slot) {
                external.add_queue(Queue { outlet, inboxes });
            }
        })
    }

    fn delete_external(&self, name: &str) -> Result<Reply, Refusal> {
        let mut state = self.state();
        let slot = state.external_slot(name).ok_or(format!("there is no external {name}"))?;
        let uses =
            |vnet: &&KnownVnet| outside_ends(&vnet.spec).any(|(_, interface, _)| interface == name);
        if let Some(vnet) = state.vnets.values().find(uses) {
            return Err(format!("external {name} is used by vnet {}", vnet.spec.name).into());
        }
        state.externals[slot] = None;
        self.close_paths(slot)?;
        for worker in self.0.workers.iter() {
            worker.call(move |worker| {
                if let Some(mut external) = worker.core.externals[slot].take() {
                    external.close(&mut worker.core.packets, &worker.core.connections);
                }
            })?;
        }
        let owner = Owner::External(name.to_string());
        self.0.keeper.commit(self.0.keeper.prepare(owner, HashMap::new())?);
        Ok(Reply::Done)
    }

    fn put_vnet(&self, spec: mux::Vnet) -> Result<Reply, Refusal> {
        check::check(&spec)?;
        let mut state = self.state();
        let vnet = match state.vnets.get(&spec.name) {
            Some(known) if known.spec == spec => return Ok(Reply::Done),
            Some(known) => {
                let moved = !layout(&known.spec).eq(layout(&spec));
                let generation = if moved { state.generation + 1 } else { known.generation };
                KnownVnet { spec, generation, ..known.clone() }
            }
            None => {
                let (worker, slot) = state.free_vnet(self.0.workers.len()).ok_or(format!(
                    "vnet {}: {VNETS_MAX} vnets a worker are the most",
                    spec.name
                ))?;
                KnownVnet { spec, worker, slot, generation: state.generation + 1 }
            }
        };
        self.install(&mut state, vnet)?;
        Ok(Reply::Done)
    }

    /// Makes `vnet` what it says, or changes nothing.
    fn install(&self, state: &mut State, vnet: KnownVnet) -> Result<(), Refusal> {
        let name = vnet.spec.name.clone();
        let classifier = Arc::new(state.classifier(Some(&vnet), None)?);
        let mut refused = None;
        let made = Vnet::new(&vnet.spec, vnet.slot, vnet.generation, |number, end| {
            let way = self.way(state, &vnet.spec, number, end);
            way.map_err(|error| refused.get_or_insert(error).len()).ok()
        });
        if let Some(error) = refused {
            return Err(format!("vnet {name}: {error}").into());
        }
        let prepared = self.0.keeper.prepare(Owner::Vnet(name.clone()), expected(&vnet)?)?;
        let (slot, owner, theirs) = (vnet.slot, vnet.worker, classifier.clone());
        self.0.workers[owner].call(move |worker| {
            worker.replace(slot, |old, core| {
                let mut made = made;
                if let Some(old) = old {
                    made.take_over(old, core);
                }
                Some(made)
            });
            worker.classifier = theirs;
        })?;
        self.publish(&classifier)?;
        self.0.keeper.commit(prepared);
        state.generation = state.generation.max(vnet.generation);
        let mut lengths: HashMap<_, _> =
            state.tunnels(&vnet.spec).map(|(ends, _)| (ends, 0)).collect();
        if let Some(before) = state.vnets.insert(name, vnet) {
            lengths.extend(state.tunnels(&before.spec).map(|(ends, _)| (ends, 0)));
        }
        self.measure(state, lengths);
        Ok(())
    }

    /// Has the ways of these tunnels measured with packets as long as the longest of all vnets' now.
    fn measure(&self, state: &State, mut lengths: HashMap<Ends, u32>) {
        if lengths.is_empty() {
            return;
        }
        for (ends, bytes) in state.vnets.values().flat_map(|vnet| state.tunnels(&vnet.spec)) {
            if let Some(longest) = lengths.get_mut(&ends) {
                *longest = bytes.max(*longest);
            }
        }
        self.0.underlay.set_lengths(&lengths);
    }

    /// The way to an outside end; vlinks are spread over queues by their `number`.
    fn way(
        &self,
        state: &State,
        vnet: &mux::Vnet,
        number: usize,
        end: &End,
    ) -> Result<Way, String> {
        let End::External { interface, by } = end else { return Err("no such port".into()) };
        let slot = state.external_slot(interface);
        let known = slot.and_then(|slot| state.externals[slot].as_ref());
        let (Some(slot), Some(known)) = (slot, known) else {
            return Err(format!("there is no external {interface}"));
        };
        let hop = match encapsulate::ends(by) {
            None => Arc::default(),
            Some((local, remote)) => match &known.spec.outlet {
                mux::Outlet::Xdp(device) | mux::Outlet::Packet(device) => {
                    let vlink = &vnet.vlinks[number];
                    let near = [&vlink.a, &vlink.b].into_iter().find_map(|end| port(vnet, end));
                    let mtu = near.map_or(0, |(_, port)| port.mtu);
                    let bytes = encapsulate::packet_bytes(by, mtu);
                    let hop = self.0.underlay.next_hop(device.ifindex, local, remote, bytes);
                    hop.ok_or("too many tunnels")?
                }
                // Frames end there, whoever they are for.
                mux::Outlet::Generator(_) => Arc::new(NextHop::known([0; 6])),
                mux::Outlet::Memif { .. } => return Err("a memif program has no tunnels".into()),
            },
        };
        let outside = Outside::new(slot, number, by, || hop);
        outside.map(Way::Outside).ok_or("a tunnel's addresses are of different families".into())
    }

    fn delete_vnet(&self, name: &str) -> Result<Reply, Refusal> {
        let mut state = self.state();
        let Some(vnet) = state.vnets.get(name).cloned() else {
            return Err(format!("there is no vnet {name}").into());
        };
        let classifier = Arc::new(state.classifier(None, Some(name))?);
        let (slot, theirs) = (vnet.slot, classifier.clone());
        self.0.workers[vnet.worker].call(move |worker| {
            worker.classifier = theirs;
            worker.replace(slot, |old, core| {
                old?.end(core);
                None
            });
        })?;
        self.publish(&classifier)?;
        let owner = Owner::Vnet(name.to_string());
        self.0.keeper.commit(self.0.keeper.prepare(owner, HashMap::new())?);
        state.vnets.remove(name);
        self.measure(&state, state.tunnels(&vnet.spec).map(|(ends, _)| (ends, 0)).collect());
        Ok(Reply::Done)
    }

    fn publish(&self, classifier: &Arc<Classifier>) -> Result<(), String> {
        for worker in self.0.workers.iter() {
            let classifier = classifier.clone();
            worker.call(move |worker| worker.classifier = classifier)?;
        }
        Ok(())
    }

    fn stats(&self, only: Option<&str>) -> Result<Reply, String> {
        let state = self.state();
        if let Some(only) = only
            && !state.vnets.contains_key(only)
        {
            return Err(format!("there is no vnet {only}"));
        }
        let mut stats = Stats::default();
        let wanted = state.vnets.values();
        let wanted = wanted.filter(|vnet| only.is_none_or(|only| only == vnet.spec.name));
        for (number, worker) in self.0.workers.iter().enumerate() {
            let here: Vec<_> = wanted.clone().filter(|vnet| vnet.worker == number).collect();
            for some in here.chunks(STATS_VNETS) {
                let slots: Vec<_> = some.iter().map(|vnet| usize::from(vnet.slot)).collect();
                let counters = worker.call(move |worker| {
                    let vnets = slots.into_iter().map(|slot| worker.vnets[slot].as_ref());
                    vnets.map(|vnet| vnet.map(Vnet::stats).unwrap_or_default()).collect::<Vec<_>>()
                })?;
                for (vnet, mut counters) in some.iter().zip(counters) {
                    self.add_problems(&state, &vnet.spec, &mut counters);
                    stats.vnets.insert(vnet.spec.name.clone(), counters);
                }
            }
            let (own, externals) = worker.call(|worker| {
                let externals = worker.core.externals.iter().flatten();
                let counted = externals.map(|external| (external.name.clone(), external.stats()));
                (worker.stats(), counted.collect::<Vec<_>>())
            })?;
            stats.workers.push(own);
            for (name, counted) in externals {
                add_external(stats.externals.entry(name).or_default(), counted);
            }
        }
        Ok(Reply::Stats(Box::new(stats)))
    }

    /// Adds what is wrong with the ways of a vnet's tunnels.
    fn add_problems(&self, state: &State, vnet: &mux::Vnet, stats: &mut mux::VnetStats) {
        for vlink in &vnet.vlinks {
            for (near, far) in [(&vlink.a, &vlink.b), (&vlink.b, &vlink.a)] {
                let Some((node, port)) = port(vnet, near) else { continue };
                let counters = stats.nodes.get_mut(&node.name);
                if let Some(((ifindex, local, remote), bytes)) = state.tunnel(port.mtu, far)
                    && let Some(counters) = counters.and_then(|it| it.ports.get_mut(&port.name))
                {
                    counters.underlay = self.0.underlay.problem(ifindex, local, remote, bytes);
                }
            }
        }
    }

    fn capture(
        &self,
        name: &PortName,
        snap_bytes: u32,
        descriptors: Vec<OwnedFd>,
    ) -> Result<Reply, String> {
        let [to] = <[OwnedFd; 1]>::try_from(descriptors)
            .map_err(|got| format!("a capture needs one descriptor, not {}", got.len()))?;
        if !capture::is_writable(&to) {
            return Err("the capture's descriptor can't be written to".into());
        }
        let captures = self.0.captures.clone();
        if captures.fetch_add(1, Ordering::Relaxed) >= CAPTURES_MAX {
            captures.fetch_sub(1, Ordering::Relaxed);
            return Err(format!("{CAPTURES_MAX} captures at a time are the most"));
        }
        let (sink, source) = capture::channel(snap_bytes);
        let begun = self.at_port(name, move |vnet, port| {
            vnet.ports[port].captures.push(sink);
        });
        let thread = begun.and_then(|()| {
            let counted = captures.clone();
            let write = move || {
                if let Err(error) = capture::write(source, to) {
                    info!("capture ends: {error}");
                }
                counted.fetch_sub(1, Ordering::Relaxed);
            };
            let builder = thread::Builder::new().name("capture".into());
            builder.spawn(write).map_err(|error| format!("no thread for the capture: {error}"))
        });
        if thread.is_err() {
            captures.fetch_sub(1, Ordering::Relaxed);
        }
        thread.map(|_| Reply::Done)
    }

    fn trace(&self, name: &PortName, filter: Vec<Match>, wait_ms: u64) -> Result<Reply, String> {
        check::check_matches("the trace", &filter)?;
        let ticket = self.0.tickets.fetch_add(1, Ordering::Relaxed);
        let (reply, stages) = mpsc::channel();
        let wish = Wish { ticket, filter, reply };
        self.at_port(name, move |vnet, port| vnet.ports[port].wish = Some(wish))?;
        let wait = Duration::from_millis(wait_ms.min(TRACE_WAIT_MS_MAX));
        match stages.recv_timeout(wait) {
            Ok(stages) => Ok(Reply::Traced { stages }),
            Err(RecvTimeoutError::Disconnected) => {
                Err("another trace took this one's place, or the port is gone".into())
            }
            Err(RecvTimeoutError::Timeout) => {
                let cancel = move |worker: &mut Worker| {
                    for port in worker.vnets.iter_mut().flatten().flat_map(|it| &mut it.ports) {
                        port.wish.take_if(|wish| wish.ticket == ticket);
                    }
                    worker.core.tracer.cancel(ticket)
                };
                for worker in self.0.workers.iter() {
                    if let Some(mut stages) = worker.call(cancel)? {
                        let detail = format!("not ended within {} ms", wait.as_millis());
                        let at_ns = wait.as_nanos() as u64;
                        stages.push(TraceStage { at_ns, stage: "wait".into(), detail });
                        return Ok(Reply::Traced { stages });
                    }
                }
                Err(format!("no such frame arrived within {} ms", wait.as_millis()))
            }
        }
    }

    /// Does something with a port, where it is.
    fn at_port<T: Send + 'static>(
        &self,
        name: &PortName,
        work: impl FnOnce(&mut Vnet, usize) -> T + Send + 'static,
    ) -> Result<T, String> {
        let unknown = || format!("there is no port {}/{}:{}", name.vnet, name.node, name.port);
        let (worker, slot) = match self.state().vnets.get(&name.vnet) {
            Some(vnet) => (vnet.worker, usize::from(vnet.slot)),
            None => return Err(unknown()),
        };
        let wanted = name.clone();
        let done = self.0.workers[worker].call(move |worker| {
            let vnet = worker.vnets[slot].as_mut()?;
            let port = vnet.port_named(&wanted)?;
            Some(work(vnet, usize::from(port)))
        })?;
        done.ok_or_else(unknown)
    }
}

/// What is new about an external interface.
enum New {
    /// At most its addresses and sizes.
    Nothing,
    /// All of its outlets.
    Outlets(Vec<Outlet>),
    /// What a generator makes.
    Frames(Option<Frames>),
}

/// Adds what one worker counted.
fn add_external(sum: &mut ExternalStats, counted: ExternalStats) {
    sum.received += counted.received;
    sum.sent += counted.sent;
    sum.kernel_dropped += counted.kernel_dropped;
    sum.numbered += counted.numbered;
    sum.late += counted.late;
    for (reason, frames) in counted.dropped {
        *sum.dropped.entry(reason).or_default() += frames;
    }
}

fn set_external(core: &mut Core, slot: usize, spec: &mux::External, close: bool) {
    if core.externals.len() <= slot {
        core.externals.resize_with(slot + 1, || None);
    }
    let mac = spec.device().map_or([0; 6], |device| device.mac);
    let made = || External::new(spec.name.clone(), mac, spec.mtu);
    let external = core.externals[slot].get_or_insert_with(made);
    external.mac = mac;
    external.mtu = spec.mtu;
    external.is_virtual = spec.device().is_some_and(|device| device.is_virtual);
    if close {
        external.close(&mut core.packets, &core.connections);
    }
}

/// Rings between each two workers.
fn mesh(wakes: &[Arc<Wake>]) -> Vec<Vec<Option<Neighbour>>> {
    let count = wakes.len();
    let mut rings: Vec<Vec<_>> = (0..count)
        .map(|_| (0..count).map(|_| Some(RingBuffer::new(HANDOVER_FRAMES))).collect())
        .collect();
    let mut to: Vec<Vec<_>> = (0..count).map(|_| (0..count).map(|_| None).collect()).collect();
    let mut from: Vec<Vec<_>> = (0..count).map(|_| (0..count).map(|_| None).collect()).collect();
    for (a, row) in rings.iter_mut().enumerate() {
        for (b, ring) in row.iter_mut().enumerate() {
            if let Some((producer, consumer)) = ring.take().filter(|_| a != b) {
                to[a][b] = Some(producer);
                from[b][a] = Some(consumer);
            }
        }
    }
    let rows = to.into_iter().zip(from);
    rows.map(|(to, from)| {
        let ways = to.into_iter().zip(from).zip(wakes);
        ways.map(|((to, from), wake)| Some(Neighbour { to: to?, from: from?, wake: wake.clone() }))
            .collect()
    })
    .collect()
}

/// An error with its causes.
fn chain(error: &dyn std::error::Error) -> String {
    match error.source() {
        None => error.to_string(),
        Some(source) => format!("{error}: {}", chain(source)),
    }
}

impl AsFd for Mux {
    /// The packet pool's memory.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.pool.memfd()
    }
}
