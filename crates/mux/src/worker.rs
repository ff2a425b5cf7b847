//! A worker thread: it runs rounds, each from receiving to sending.
//!
//! [`Worker::round`] is the packet path, and [`Worker::visit`] its part through one vnet:
//! `rx -> demux -> (ingress -> deliver -> channel | tap -> order -> dispatch -> egress) -> tx`.
//!
//! A round takes a bounded number of frames from each source and visits a bounded
//! number of vnets ([`VnetScheduler`]). So none of them keeps the worker from the others.
//! After some rounds without work ([`Patience`]) the worker arms all peers and sleeps.
//!
//! A vnet with no work for a while goes idle. The worker skips it until a
//! frame arrives or a peer rings its doorbell, so it costs nothing meanwhile.

use pdp_model::WorkerStats;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError};

use pdp_afxdp::PacketBuffer;
use pdp_memif::Patience;
use rtrb::{Consumer, Producer};

use crate::classify::{Classifier, PortRef, TunnelTable};
use crate::connections::UNSURE_SLEEP_NS;
use crate::core::Core;
use crate::meter::Stage;
use crate::netdev::NetdevDriver;
use crate::packets::PacketBatch;
use crate::ringers::RungFor;
use crate::vnet::MuxVnet;
use crate::vnet_scheduler::VnetScheduler;
use crate::wake::Wake;

/// Longest sleep, nanoseconds.
const SLEEP_NS_MAX: u64 = 1_000_000_000;

/// Time between two checks of doorbells while there is work, nanoseconds.
const RUNG_EVERY_NS: u64 = 50_000;

/// Frames from outside in a round from which on the worker
/// counts as busy: it has other work than to wake peers.
const BUSY_FRAMES: usize = 64;

/// Command of the control thread, which the worker runs between two rounds.
pub type WorkerCommand = Box<dyn FnOnce(&mut Worker) + Send>;

/// Frames that may be queued for another worker.
pub const HANDOVER_FRAMES: usize = 1024;

/// A frame for another worker's vnet, and the slot of its ingress external interface.
#[derive(Debug)]
pub struct Handed {
    pub(crate) packet: PacketBuffer,
    pub(crate) port: PortRef,
    pub(crate) external: usize,
}

/// Rings to and from another worker.
#[derive(Debug)]
pub struct NeighbourWorker {
    /// Frames for its vnets.
    pub to: Producer<Handed>,
    /// Frames for our vnets.
    pub from: Consumer<Handed>,
    /// The other worker's doorbell.
    pub wake: Arc<Wake>,
}

/// State of a worker. It shares none of it.
pub struct Worker {
    /// Number of this worker.
    pub number: u16,
    /// State that its vnets share.
    pub core: Core,
    /// Vnets by slot.
    pub vnets: Vec<Option<MuxVnet>>,
    /// Scheduler of the vnets, with their queued frames.
    pub(crate) scheduler: VnetScheduler<PacketBuffer>,
    /// Classifier of all external interfaces.
    pub classifier: Arc<Classifier>,
    pub(crate) neighbours: Vec<Option<NeighbourWorker>>,
    commands: Receiver<WorkerCommand>,
    wake: Arc<Wake>,
    /// Slots of vnets whose doorbells were rung, and the time of the last check.
    rung: Vec<u16>,
    rung_ns: u64,
    /// Batch that is passed from stage to stage, reused so that nothing is allocated.
    batch: PacketBatch,
    stats: WorkerStats,
    due_ns: Option<u64>,
    ended: bool,
}

impl Worker {
    /// Creates worker `number`. `neighbours` are the other workers by number.
    pub fn new(
        number: u16,
        core: Core,
        neighbours: Vec<Option<NeighbourWorker>>,
        commands: Receiver<WorkerCommand>,
        wake: Arc<Wake>,
    ) -> std::io::Result<Self> {
        core.connections.watch.add(&*wake)?;
        Ok(Self {
            number,
            scheduler: VnetScheduler::new(core.packets.total()),
            core,
            vnets: vec![],
            classifier: Arc::default(),
            neighbours,
            commands,
            wake,
            rung: vec![],
            rung_ns: 0,
            batch: vec![],
            stats: WorkerStats::default(),
            due_ns: None,
            ended: false,
        })
    }

    /// Runs until the last sender of commands is gone.
    pub fn run(mut self) {
        let mut patience = Patience::default();
        while !self.ended {
            let work = self.round();
            let outstanding = || self.awake().any(MuxVnet::has_outstanding);
            if patience.ends(work, outstanding, || self.core.now_ns) {
                self.sleep();
                patience.slept();
            }
        }
    }

    /// Runs the packet path once. True if there was work, or
    /// if a vnet that was not visited since may have some.
    pub fn round(&mut self) -> bool {
        self.core.tick();
        self.core.packets.collect();
        self.due_ns = None;
        let mut work = self.run_command() + self.wake_rung();
        self.core.meter.lap(Stage::Control, 0);
        let received = self.rx() + self.take_handed();
        self.core.alarm.next(self.core.now_ns, received >= BUSY_FRAMES);
        work += received;
        for slot in 0..self.core.externals.len() {
            if let Some((netdevs, mut tools)) = self.core.netdevs(slot) {
                netdevs.refill(&mut tools);
            }
        }
        self.scheduler.begin(self.core.meter.now());
        while let Some(slot) = self.scheduler.next(self.core.now_ns, self.core.alarm.is_busy()) {
            work += self.visit(slot);
        }
        work += self.tx();
        self.core.meter.round(work > 0);
        self.stats.busy_rounds += u64::from(work > 0);
        work > 0 || self.scheduler.may_have_work()
    }

    /// Receives frames from all external interfaces. Returns their number.
    fn rx(&mut self) -> usize {
        let mut count = 0;
        let mut batch = std::mem::take(&mut self.batch);
        for slot in 0..self.core.externals.len() {
            let netdevs = self.core.externals[slot].as_ref().map_or(0, |it| it.netdevs.all().len());
            for at in 0..netdevs {
                let room = self.room(slot);
                if let Some((netdevs, mut tools)) = self.core.netdevs(slot) {
                    let due_ns = netdevs.all_mut()[at].receive(room, &mut tools, &mut batch);
                    self.due_ns = [self.due_ns, due_ns].into_iter().flatten().min();
                }
                count += batch.len();
                self.core.meter.lap(Stage::Receive, batch.len());
                if !batch.is_empty() {
                    self.classify_frames(slot, &mut batch);
                }
            }
        }
        self.batch = batch;
        count
    }

    /// Returns how many frames of the external interface in `slot`
    /// can be queued, if all go to one port of this worker.
    fn room(&mut self, slot: usize) -> usize {
        let sole = self.classifier.get(slot).and_then(TunnelTable::sole);
        let Some(port) = sole.filter(|port| port.worker == self.number) else { return usize::MAX };
        let vnet = self.vnets.get_mut(usize::from(port.vnet)).and_then(Option::as_mut);
        let room = vnet.map_or(usize::MAX, |vnet| vnet.guest_space(port.port));
        let room = room.saturating_sub(self.scheduler.waiting(port.vnet));
        room.min(self.scheduler.receive_limit(port.vnet, self.core.packets.free()))
    }

    /// Visits the vnet in `slot`: passes frames from outside to guests and
    /// TAPs, and frames of these out of ports. Returns the number of frames.
    fn visit(&mut self, slot: u16) -> usize {
        let Self { core, vnets, scheduler, batch, .. } = self;
        let vnet = vnets.get_mut(usize::from(slot)).and_then(Option::as_mut);
        let Some(vnet) = vnet else {
            scheduler.set_idle(slot);
            return 0;
        };
        core.alarm.owner = RungFor::Vnet(vnet.generation);
        let since = core.meter.now();
        // A vnet with a backlog of earlier frames gets no new ones.
        if !vnet.is_late() {
            vnet.frames_max = scheduler.dequeue(slot, batch);
            batch.iter().for_each(PacketBuffer::prefetch);
        }
        let done = vnet.visit(core, batch);
        let cycles = core.meter.now().saturating_sub(since);
        let outside = vnet.take_outstanding_cycles();
        vnet.used_cycles += cycles + outside;
        scheduler.charge(slot, cycles, done);
        scheduler.charge_outside_visit(slot, outside);
        if vnet.update_idle(done > 0, core.now_ns) {
            if vnet.arm(core) {
                scheduler.set_idle(slot);
            } else {
                return done + 1;
            }
        }
        done
    }

    /// Returns the active vnets.
    fn awake(&self) -> impl Iterator<Item = &MuxVnet> {
        self.scheduler.awake().filter_map(|slot| self.vnets.get(usize::from(slot))?.as_ref())
    }

    /// True if the vnet in `slot` is idle.
    pub fn is_idle(&self, slot: u16) -> bool {
        !self.scheduler.awake().any(|awake| awake == slot)
    }

    /// Changes the vnet in `slot`, and activates it. `None` if there is no vnet.
    pub fn change<T>(
        &mut self,
        slot: u16,
        by: impl FnOnce(&mut MuxVnet, &mut Core) -> T,
    ) -> Option<T> {
        self.scheduler.wake(slot);
        let vnet = self.vnets.get_mut(usize::from(slot))?.as_mut()?;
        Some(by(vnet, &mut self.core))
    }

    /// Puts `new` in `slot`, where it takes over from the old vnet. The
    /// caller drops the returned remains of the old one, at its own thread.
    pub fn replace(&mut self, slot: u16, mut new: Option<MuxVnet>) -> Option<MuxVnet> {
        let at = usize::from(slot);
        if self.vnets.len() <= at {
            self.vnets.resize_with(at + 1, || None);
        }
        let mut old = self.vnets[at].take();
        // Frames that arrived before the change are handled before it.
        let mut waiting = self.scheduler.remove(slot);
        match &mut old {
            Some(old) => _ = old.ingress(&mut self.core, &mut waiting),
            None => self.core.packets.give_all(&mut waiting),
        }
        match (&mut new, &mut old) {
            (Some(new), Some(old)) => new.take_over(old, &mut self.core),
            (Some(new), None) => new.begin(&mut self.core),
            (None, Some(old)) => old.end(&mut self.core),
            (None, None) => {}
        }
        self.vnets[at] = new;
        if let Some(vnet) = &self.vnets[at] {
            self.scheduler.insert(slot, vnet.generation, vnet.weight(), vnet.power);
        }
        old
    }

    /// Activates vnets whose peers have rung. Returns their number.
    fn wake_rung(&mut self) -> usize {
        let now_ns = self.core.now_ns;
        if now_ns.saturating_sub(self.rung_ns) >= RUNG_EVERY_NS {
            self.rung_ns = now_ns;
            self.core.connections.rung(&mut self.rung);
        }
        let count = self.rung.len();
        for slot in self.rung.drain(..) {
            self.scheduler.wake(slot);
            if let Some(Some(vnet)) = self.vnets.get_mut(usize::from(slot)) {
                vnet.note_ring(now_ns);
            }
        }
        count
    }

    /// Runs one command of the control thread. Returns the number of commands.
    fn run_command(&mut self) -> usize {
        match self.commands.try_recv() {
            Ok(command) => {
                command(self);
                1
            }
            Err(TryRecvError::Empty) => 0,
            Err(TryRecvError::Disconnected) => {
                self.ended = true;
                0
            }
        }
    }

    /// Passes sent frames to the kernel and to other workers, and rings peers.
    /// Returns how many frames other workers had for this one's interfaces.
    fn tx(&mut self) -> usize {
        let mut count = 0;
        for slot in 0..self.core.externals.len() {
            let Some((netdevs, mut tools)) = self.core.netdevs(slot) else { continue };
            tools.alarm.owner = RungFor::External(slot);
            count += netdevs.flush(&mut tools);
        }
        for neighbour in self.neighbours.iter().flatten() {
            if neighbour.to.slots() < HANDOVER_FRAMES {
                neighbour.wake.ring();
            }
        }
        let Core { ringers, alarm, now_ns, .. } = &mut self.core;
        ringers.ring_all(&mut alarm.bells, *now_ns);
        self.core.meter.lap(Stage::Send, 0);
        count
    }

    /// Runs one more round, arms every peer, and blocks until there is work.
    fn sleep(&mut self) {
        self.wake.sleeping();
        if !self.round() && self.arm() && !self.ended {
            self.stats.sleeps += 1;
            self.core.ringers.settle(&mut self.core.alarm.bells);
            let sockets = self.netdevs().filter_map(|netdev| netdev.socket());
            self.core.connections.sleep(self.sleep_ns(), sockets);
            self.core.connections.rung(&mut self.rung);
        }
        self.wake.awake();
        // PdP's own peers are still armed. They are polled again when they ring.
        let Self { core, vnets, scheduler, .. } = self;
        for slot in scheduler.awake() {
            if let Some(Some(vnet)) = vnets.get_mut(usize::from(slot)) {
                vnet.links()
                    .filter(|link| !link.is_reliable())
                    .for_each(|link| link.disarm(core.now_ns));
            }
        }
        for external in core.externals.iter_mut().flatten() {
            external.netdevs.all_mut().iter_mut().for_each(|netdev| netdev.disarm(core.now_ns));
        }
        core.meter.lap(Stage::Sleep, 0);
    }

    /// Lets all peers ring. False if one has sent something.
    fn arm(&mut self) -> bool {
        let Self { core, vnets, scheduler, .. } = self;
        let mut quiet = true;
        for slot in scheduler.awake() {
            if let Some(Some(vnet)) = vnets.get_mut(usize::from(slot)) {
                core.alarm.owner = RungFor::Vnet(vnet.generation);
                quiet &= vnet.arm(core);
            }
        }
        for slot in 0..core.externals.len() {
            let Some((netdevs, mut tools)) = core.netdevs(slot) else { continue };
            tools.alarm.owner = RungFor::External(slot);
            netdevs.all_mut().iter_mut().for_each(|netdev| quiet &= netdev.arm(&mut tools));
        }
        quiet
    }

    fn netdevs(&self) -> impl Iterator<Item = &dyn NetdevDriver> {
        let externals = self.core.externals.iter().flatten();
        externals.flat_map(|external| external.netdevs.all()).map(|netdev| &**netdev)
    }

    fn sleep_ns(&self) -> u64 {
        let mut longest = self.netdevs().map(NetdevDriver::sleep_ns).fold(SLEEP_NS_MAX, u64::min);
        if self.awake().any(MuxVnet::has_unsure_peer) {
            longest = longest.min(UNSURE_SLEEP_NS);
        }
        let netdevs = self.core.externals.iter().flatten().filter_map(|it| it.netdevs.due_ns());
        let due_ns =
            self.awake().filter_map(MuxVnet::due_ns).chain(self.due_ns).chain(netdevs).min();
        due_ns.map_or(longest, |due| longest.min(due.saturating_sub(self.core.now_ns)))
    }

    /// Returns the counters.
    pub fn stats(&self) -> WorkerStats {
        WorkerStats {
            free_packets: self.core.packets.at_hand() as u64,
            stages: self.core.meter.stats(),
            ..self.stats.clone()
        }
    }
}
