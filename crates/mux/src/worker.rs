//! A worker thread: one round after the other, each from receiving to sending.
//!
//! A round takes a bounded number of frames from everywhere, and looks at a bounded number of vnets in
//! turn, so that nobody keeps a worker from the others. After some rounds without work ([`Patience`])
//! it arms every doorbell and sleeps. A vnet that had no work for a while rests ([`Vnet::rest`]) until
//! one of its peers rings or a frame comes for it, so that idle vnets do not slow the others down.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError};

use pdp_afxdp::Packet;
use pdp_memif::Patience;
use pdp_proto::mux::WorkerStats;
use pdp_wire::ecn;
use rtrb::{Consumer, Producer};

use crate::classify::{Classifier, PortRef, Table};
use crate::core::Core;
use crate::counters::OuterReason;
use crate::external::External;
use crate::meter::Stage;
use crate::peer::{Link, UNSURE_SLEEP_NS};
use crate::ringers::RungFor;
use crate::vnet::Vnet;
use crate::wake::Wake;

/// Frames on their way to another worker's vnets.
pub const HANDOVER_FRAMES: usize = 1024;

/// Sleep while frames are on their way out, nanoseconds: their packets are to come back.
const SENDING_SLEEP_NS: u64 = 1_000_000;

/// Time between two looks at the doorbells of resting vnets while there is work, nanoseconds.
const RUNG_EVERY_NS: u64 = 50_000;

/// The longest sleep, nanoseconds.
const SLEEP_NS_MAX: u64 = 1_000_000_000;

/// Vnets that are looked at in one round: where more have work, each look is to find more of it.
const LOOKS_MAX: usize = 16;

/// Frames from outside in a round from which on the worker has other work than to wake peers.
const BUSY_FRAMES: usize = 64;

/// Frames taken from another worker in one round.
const TAKEN_FRAMES: usize = 256;

/// What the control thread wants done between two rounds.
pub type Command = Box<dyn FnOnce(&mut Worker) + Send>;

/// A frame for another worker's vnet, and the slot of the external interface that it came by.
#[derive(Debug)]
pub struct Handed {
    packet: Packet,
    port: PortRef,
    external: usize,
}

/// The way to another worker.
#[derive(Debug)]
pub struct Neighbour {
    /// Frames for its vnets.
    pub to: Producer<Handed>,
    /// Frames for ours.
    pub from: Consumer<Handed>,
    /// Its doorbell.
    pub wake: Arc<Wake>,
}

/// A worker's state; everything in it is its own.
pub struct Worker {
    /// Its number.
    pub number: u16,
    /// What its vnets share.
    pub core: Core,
    /// Vnets by slot.
    pub vnets: Vec<Option<Vnet>>,
    /// Slots of the vnets that do not rest, in the order in which they are looked at.
    awake: VecDeque<u16>,
    /// Looks at vnets since there was work.
    in_vain: usize,
    /// Slots of vnets whose doorbells were rung.
    rung: Vec<u16>,
    /// When doorbells were last looked at.
    rung_ns: u64,
    /// Whose frames are whose, on all external interfaces.
    pub classifier: Arc<Classifier>,
    neighbours: Vec<Option<Neighbour>>,
    commands: Receiver<Command>,
    wake: Arc<Wake>,
    frames: Vec<Packet>,
    stats: WorkerStats,
    due_ns: Option<u64>,
    ended: bool,
}

impl Worker {
    /// Number `number`; `neighbours` are the other workers by their numbers.
    pub fn new(
        number: u16,
        core: Core,
        neighbours: Vec<Option<Neighbour>>,
        commands: Receiver<Command>,
        wake: Arc<Wake>,
    ) -> std::io::Result<Self> {
        core.connections.watch.add(&*wake)?;
        Ok(Self {
            number,
            core,
            vnets: vec![],
            awake: VecDeque::new(),
            in_vain: 0,
            rung: vec![],
            rung_ns: 0,
            classifier: Arc::default(),
            neighbours,
            commands,
            wake,
            frames: vec![],
            stats: WorkerStats::default(),
            due_ns: None,
            ended: false,
        })
    }

    /// Runs until nobody can send commands any more.
    pub fn run(mut self) {
        let mut patience = Patience::default();
        while !self.ended {
            let work = self.round();
            let owed = || self.awake().any(Vnet::is_owed);
            if patience.ends(work, owed, || self.core.now_ns) {
                self.sleep();
                patience.slept();
            }
        }
    }

    /// The packets' way, once through; true if there was any work, or if there may be some in a vnet
    /// that was not looked at since.
    pub fn round(&mut self) -> bool {
        self.core.tick();
        self.core.packets.collect();
        self.due_ns = None;
        let mut work = self.obey() + self.rouse_rung();
        self.core.meter.lap(Stage::Control, 0);
        let received = self.receive() + self.take_handed();
        self.core.alarm.next(self.core.now_ns, received >= BUSY_FRAMES);
        work += received;
        let Core { externals, packets, scratch, .. } = &mut self.core;
        for external in externals.iter_mut().flatten() {
            external.refill(packets, &mut scratch.back);
        }
        work += self.look();
        work += self.send();
        let Core { ringers, alarm, now_ns, .. } = &mut self.core;
        ringers.ask(&mut alarm.bells, *now_ns);
        self.core.meter.lap(Stage::Send, 0);
        self.core.meter.round(work > 0);
        self.stats.busy_rounds += u64::from(work > 0);
        if work > 0 {
            self.in_vain = 0;
        }
        work > 0 || self.in_vain < self.awake.len()
    }

    /// What the vnets have whose turn it is. Those that rest have none.
    fn look(&mut self) -> usize {
        let mut work = 0;
        let count = self.awake.len().min(LOOKS_MAX);
        let Self { core, vnets, awake, .. } = self;
        for _ in 0..count {
            let Some(slot) = awake.pop_front() else { break };
            let vnet = vnets.get_mut(usize::from(slot)).and_then(Option::as_mut);
            let Some(vnet) = vnet else { continue };
            let arrived = vnet.arrivals(core);
            vnet.flush(core);
            core.meter.lap(Stage::Distribute, arrived);
            let came = vnet.from_peers(core);
            let sent = vnet.shape(core);
            if came + sent > 0 {
                vnet.flush(core);
            }
            let done = arrived + came + sent;
            work += done;
            if vnet.is_tired(done > 0, core.now_ns) {
                if vnet.rest() {
                    continue;
                }
                work += 1;
            }
            awake.push_back(slot);
        }
        self.in_vain += count;
        work
    }

    /// The vnets that do not rest.
    fn awake(&self) -> impl Iterator<Item = &Vnet> {
        self.awake.iter().filter_map(|slot| self.vnets.get(usize::from(*slot))?.as_ref())
    }

    /// Changes the vnet in `slot`, which is looked at from now on; `None` if there is none.
    pub fn change<T>(
        &mut self,
        slot: u16,
        by: impl FnOnce(&mut Vnet, &mut Core) -> T,
    ) -> Option<T> {
        let vnet = self.vnets.get_mut(usize::from(slot))?.as_mut()?;
        if vnet.rouse(self.core.now_ns) {
            self.awake.push_back(slot);
        }
        Some(by(vnet, &mut self.core))
    }

    /// Puts what `by` makes of the vnet in `slot`, if there is one, in its place.
    pub fn replace(&mut self, slot: u16, by: impl FnOnce(Option<Vnet>, &mut Core) -> Option<Vnet>) {
        self.change(slot, |_, _| ());
        let at = usize::from(slot);
        if self.vnets.len() <= at {
            self.vnets.resize_with(at + 1, || None);
        }
        let was = self.vnets[at].take();
        self.vnets[at] = by(was, &mut self.core);
        if !self.awake.contains(&slot) {
            self.awake.push_back(slot);
        }
    }

    /// Ends the rest of vnets whose peers have rung. Returns how many.
    fn rouse_rung(&mut self) -> usize {
        let now_ns = self.core.now_ns;
        let rest = self.awake.len() < self.vnets.len();
        if rest && now_ns.saturating_sub(self.rung_ns) >= RUNG_EVERY_NS {
            self.rung_ns = now_ns;
            self.core.connections.rung(&mut self.rung);
        }
        let before = self.awake.len();
        for slot in self.rung.drain(..) {
            let vnet = self.vnets.get_mut(usize::from(slot)).and_then(Option::as_mut);
            if vnet.is_some_and(|vnet| vnet.answer(now_ns)) {
                self.awake.push_back(slot);
            }
        }
        self.awake.len() - before
    }

    /// Commands of the control thread, one a round.
    fn obey(&mut self) -> usize {
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

    /// Frames from outside: classified, then to their ports here or to the worker that has them.
    fn receive(&mut self) -> usize {
        let mut work = 0;
        let mut frames = std::mem::take(&mut self.frames);
        for slot in 0..self.core.externals.len() {
            let queues = self.core.externals[slot].as_ref().map_or(0, |e| e.queues().len());
            for queue in 0..queues {
                let room = self.room(slot);
                let Core { now_ns, externals, packets, connections, .. } = &mut self.core;
                if let Some(Some(external)) = externals.get_mut(slot) {
                    let due_ns =
                        external.receive(queue, *now_ns, room, packets, connections, &mut frames);
                    self.due_ns = [self.due_ns, due_ns].into_iter().flatten().min();
                }
                work += frames.len();
                self.core.meter.lap(Stage::Receive, frames.len());
                if !frames.is_empty() {
                    self.classify(slot, &mut frames);
                }
            }
        }
        self.frames = frames;
        work
    }

    /// How many frames of the external interface in `slot` there is room for, where all go to one
    /// port of this worker's.
    fn room(&mut self, slot: usize) -> usize {
        let sole = self.classifier.get(slot).and_then(Table::sole);
        let Some(port) = sole.filter(|port| port.worker == self.number) else { return usize::MAX };
        let vnet = self.vnets.get_mut(usize::from(port.vnet)).and_then(Option::as_mut);
        vnet.map_or(usize::MAX, |vnet| vnet.room(port.port))
    }

    /// Takes `frames` that arrived on the external interface in `slot`.
    pub fn classify(&mut self, slot: usize, frames: &mut Vec<Packet>) {
        let classifier = self.classifier.clone();
        let Some(table) = classifier.get(slot) else {
            return frames.drain(..).for_each(|packet| self.core.packets.give(packet));
        };
        let count = frames.len();
        if let Some(port) = table.sole() {
            self.core.meter.lap(Stage::Classify, count);
            if port.worker == self.number
                && let Some(Some(vnet)) = self.vnets.get(usize::from(port.vnet))
                && vnet.generation == port.generation
            {
                self.change(port.vnet, |vnet, core| vnet.arrive(core, port.port, frames, true));
            } else {
                frames.drain(..).for_each(|packet| self.give(port, slot, packet));
            }
            return self.core.meter.lap(Stage::Distribute, count);
        }
        for mut packet in frames.drain(..) {
            match table.classify(packet.bytes()) {
                Ok((port, inner)) => {
                    let (length, outer) = (inner.len(), ecn::of(packet.bytes()));
                    let _ = packet.advance(inner.start);
                    let _ = packet.set_len(length);
                    if inner.start > 0 && !ecn::decapsulate(packet.bytes_mut(), outer) {
                        self.refuse(slot, OuterReason::CeOnNotEct, packet);
                        continue;
                    }
                    self.give(port, slot, packet);
                }
                Err(reason) => self.refuse(slot, reason, packet),
            }
        }
        self.core.meter.lap(Stage::Classify, count);
    }

    fn refuse(&mut self, external: usize, reason: OuterReason, packet: Packet) {
        if let Some(external) = self.core.external(external) {
            external.counters.drop(reason);
        }
        self.core.packets.give(packet);
    }

    /// Gives a frame to `port`, or to the worker that has its vnet.
    fn give(&mut self, port: PortRef, external: usize, packet: Packet) {
        if port.worker == self.number {
            let vnet = self.vnets.get_mut(usize::from(port.vnet)).and_then(Option::as_mut);
            let vnet = vnet.filter(|vnet| vnet.generation == port.generation);
            let Some(vnet) = vnet else { return self.refuse(external, OuterReason::Stale, packet) };
            if vnet.rouse(self.core.now_ns) {
                self.awake.push_back(port.vnet);
            }
            return match vnet.give(port.port, packet) {
                Ok(()) => {}
                Err(packet) => self.refuse(external, OuterReason::Stale, packet),
            };
        }
        let to = self.neighbours.get_mut(usize::from(port.worker)).and_then(Option::as_mut);
        let Some(to) = to else { return self.refuse(external, OuterReason::Stale, packet) };
        if let Err(rtrb::PushError::Full(handed)) = to.to.push(Handed { packet, port, external }) {
            self.refuse(external, OuterReason::HandoverFull, handed.packet);
        }
    }

    /// Frames that other workers received for vnets of this one.
    fn take_handed(&mut self) -> usize {
        let mut work = 0;
        for index in 0..self.neighbours.len() {
            for _ in 0..TAKEN_FRAMES {
                let from = self.neighbours[index].as_mut().map(|neighbour| neighbour.from.pop());
                let Some(Ok(Handed { packet, port, external })) = from else { break };
                work += 1;
                self.give(port, external, packet);
            }
        }
        work
    }

    /// Lets the kernel and the other workers have what is for them.
    fn send(&mut self) -> usize {
        let mut work = 0;
        let Core { externals, packets, connections, scratch, alarm, .. } = &mut self.core;
        for (slot, external) in externals.iter_mut().enumerate() {
            let Some(external) = external else { continue };
            let owner = RungFor::External(slot);
            work += external.flush(packets, connections, &mut scratch.back, (owner, alarm));
        }
        for neighbour in self.neighbours.iter().flatten() {
            if neighbour.to.slots() < HANDOVER_FRAMES {
                neighbour.wake.ring();
            }
        }
        work
    }

    /// Arms every doorbell, looks once more, and blocks until something is to be done.
    fn sleep(&mut self) {
        let mut quiet = true;
        self.for_links(|link| quiet &= link.rx.arm());
        self.wake.sleeping();
        if quiet && !self.round() && !self.ended {
            self.stats.sleeps += 1;
            self.core.ringers.settle(&mut self.core.alarm.bells);
            let sockets = self.core.externals.iter().flatten().flat_map(External::sockets);
            self.core.connections.sleep(self.sleep_ns(), sockets);
            self.core.connections.rung(&mut self.rung);
        }
        self.wake.awake();
        self.for_links(|link| link.rx.disarm());
        self.core.meter.lap(Stage::Sleep, 0);
    }

    /// Of all that do not rest.
    fn for_links(&mut self, mut work: impl FnMut(&mut Link)) {
        let vnets = self.vnets.iter_mut().flatten().filter(|vnet| !vnet.is_resting());
        vnets.flat_map(Vnet::links).for_each(&mut work);
        self.core.externals.iter_mut().flatten().flat_map(External::links).for_each(work);
    }

    fn sleep_ns(&self) -> u64 {
        let mut longest = SLEEP_NS_MAX;
        let unsure = |external: &External| external.has_unsure_peer();
        if self.awake().any(Vnet::has_unsure_peer)
            || self.core.externals.iter().flatten().any(unsure)
        {
            longest = UNSURE_SLEEP_NS;
        }
        if self.core.externals.iter().flatten().any(|external| external.is_sending()) {
            longest = longest.min(SENDING_SLEEP_NS);
        }
        let due_ns = self.awake().filter_map(Vnet::due_ns).chain(self.due_ns).min();
        due_ns.map_or(longest, |due| longest.min(due.saturating_sub(self.core.now_ns)))
    }

    /// Counters.
    pub fn stats(&self) -> WorkerStats {
        WorkerStats {
            free_packets: self.core.packets.free() as u64,
            stages: self.core.meter.stats(),
            ..self.stats.clone()
        }
    }
}
