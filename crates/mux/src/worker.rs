//! A worker thread: one round after the other, each from receiving to sending.
//!
//! A round takes a bounded number of frames from everywhere, so that nobody keeps a worker from
//! the others. After [`IDLE_ROUNDS_MAX`] rounds without work it arms every doorbell and sleeps.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError};

use pdp_afxdp::Packet;
use pdp_proto::mux::WorkerStats;
use rtrb::{Consumer, Producer};

use crate::classify::{Classifier, PortRef};
use crate::core::Core;
use crate::counters::OuterReason;
use crate::peer::{Pulled, UNSURE_SLEEP_NS};
use crate::vnet::Vnet;
use crate::wake::Wake;

/// Frames on their way to another worker's vnets.
pub const HANDOVER_FRAMES: usize = 1024;

/// Rounds without work before sleeping.
const IDLE_ROUNDS_MAX: u32 = 64;

/// Sleep while frames are on their way out, nanoseconds: their packets are to come back.
const SENDING_SLEEP_NS: u64 = 1_000_000;

/// The longest sleep, nanoseconds.
const SLEEP_NS_MAX: u64 = 1_000_000_000;

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
    /// Whose frames are whose, on all external interfaces.
    pub classifier: Arc<Classifier>,
    neighbours: Vec<Option<Neighbour>>,
    commands: Receiver<Command>,
    wake: Arc<Wake>,
    frames: Vec<Packet>,
    pulled: Vec<Pulled>,
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
        core.watch(&*wake)?;
        Ok(Self {
            number,
            core,
            vnets: vec![],
            classifier: Arc::default(),
            neighbours,
            commands,
            wake,
            frames: vec![],
            pulled: vec![],
            stats: WorkerStats::default(),
            due_ns: None,
            ended: false,
        })
    }

    /// Runs until nobody can send commands any more.
    pub fn run(mut self) {
        let mut idle = 0;
        while !self.ended {
            if self.round() {
                idle = 0;
            } else if idle < IDLE_ROUNDS_MAX {
                idle += 1;
                std::hint::spin_loop();
            } else {
                self.sleep();
            }
        }
    }

    /// The packets' way, once through; true if there was any work.
    pub fn round(&mut self) -> bool {
        self.core.tick();
        self.core.packets.collect();
        let mut work = self.obey();
        work += self.receive();
        work += self.take_handed();
        self.due_ns = None;
        let mut pulled = std::mem::take(&mut self.pulled);
        for vnet in self.vnets.iter_mut().flatten() {
            work += vnet.arrivals(&mut self.core);
            vnet.flush(&mut self.core);
            work += vnet.from_peers(&mut self.core, &mut pulled);
            let (sent, due_ns) = vnet.shape(&mut self.core);
            work += sent;
            self.due_ns = [self.due_ns, due_ns].into_iter().flatten().min();
            vnet.flush(&mut self.core);
        }
        self.pulled = pulled;
        work += self.send();
        self.stats.busy_rounds += u64::from(work > 0);
        work > 0
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
                if let Some(Some(external)) = self.core.externals.get_mut(slot) {
                    external.receive(queue, &mut self.core.packets, &mut frames);
                }
                work += frames.len();
                self.classify(slot, &mut frames);
            }
        }
        self.frames = frames;
        work
    }

    /// Takes `frames` that arrived on the external interface in `slot`.
    pub fn classify(&mut self, slot: usize, frames: &mut Vec<Packet>) {
        let classifier = self.classifier.clone();
        let Some(table) = classifier.get(slot) else {
            return frames.drain(..).for_each(|packet| self.core.packets.give(packet));
        };
        for mut packet in frames.drain(..) {
            let result = match table.classify(packet.bytes()) {
                Ok((port, inner)) => {
                    let length = inner.len();
                    let _ = packet.advance(inner.start);
                    let _ = packet.set_len(length);
                    self.deliver(port, slot, packet)
                }
                Err(reason) => Err((reason, packet)),
            };
            if let Err((reason, packet)) = result {
                self.refuse(slot, reason, packet);
            }
        }
    }

    fn refuse(&mut self, external: usize, reason: OuterReason, packet: Packet) {
        if let Some(external) = self.core.external(external) {
            external.counters.drop(reason);
        }
        self.core.packets.give(packet);
    }

    /// To the port if its vnet is here, else to the worker that has it.
    fn deliver(
        &mut self,
        port: PortRef,
        external: usize,
        packet: Packet,
    ) -> Result<(), (OuterReason, Packet)> {
        if port.worker == self.number {
            let vnet = self.vnets.get_mut(usize::from(port.vnet)).and_then(Option::as_mut);
            let Some(vnet) = vnet.filter(|vnet| vnet.generation == port.generation) else {
                return Err((OuterReason::Stale, packet));
            };
            vnet.arrive(&mut self.core, port.port, packet, true);
            return Ok(());
        }
        let neighbour = self.neighbours.get_mut(usize::from(port.worker)).and_then(Option::as_mut);
        let Some(neighbour) = neighbour else { return Err((OuterReason::Stale, packet)) };
        let pushed = neighbour.to.push(Handed { packet, port, external });
        pushed.map_err(|rtrb::PushError::Full(handed)| (OuterReason::HandoverFull, handed.packet))
    }

    /// Frames that other workers received for vnets of this one.
    fn take_handed(&mut self) -> usize {
        let mut work = 0;
        for index in 0..self.neighbours.len() {
            for _ in 0..TAKEN_FRAMES {
                let from = self.neighbours[index].as_mut().map(|neighbour| neighbour.from.pop());
                let Some(Ok(Handed { packet, port, external })) = from else { break };
                work += 1;
                // The vnet may have changed since the other worker looked.
                if let Err((reason, packet)) = self.deliver(port, external, packet) {
                    self.refuse(external, reason, packet);
                }
            }
        }
        work
    }

    /// Lets the kernel and the other workers have what is for them.
    fn send(&mut self) -> usize {
        let mut work = 0;
        let mut scratch = std::mem::take(&mut self.core.scratch);
        for external in self.core.externals.iter_mut().flatten() {
            work += external.flush(&mut self.core.packets, &mut scratch);
        }
        self.core.scratch = scratch;
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
        for link in self.vnets.iter_mut().flatten().flat_map(Vnet::links) {
            quiet &= link.rx.arm();
        }
        self.wake.sleeping();
        if quiet && !self.round() && !self.ended {
            self.stats.sleeps += 1;
            self.core.sleep(self.sleep_ns());
        }
        self.wake.awake();
        for link in self.vnets.iter_mut().flatten().flat_map(Vnet::links) {
            link.rx.disarm();
        }
    }

    fn sleep_ns(&self) -> u64 {
        let mut longest = SLEEP_NS_MAX;
        if self.vnets.iter().flatten().any(Vnet::has_unsure_peer) {
            longest = UNSURE_SLEEP_NS;
        }
        if self.core.externals.iter().flatten().any(|external| external.is_sending()) {
            longest = longest.min(SENDING_SLEEP_NS);
        }
        self.due_ns.map_or(longest, |due| longest.min(due.saturating_sub(self.core.now_ns)))
    }

    /// Counters.
    pub fn stats(&self) -> WorkerStats {
        WorkerStats { free_packets: self.core.packets.free() as u64, ..self.stats.clone() }
    }
}
