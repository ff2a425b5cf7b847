//! A worker thread: one round after the other, each from receiving to sending.
//!
//! [`Worker::round`] is the packets' way, and [`Worker::visit`] its part through one vnet:
//! `rx -> sort -> (admit -> share -> lane | tap -> order -> dispatch -> leave) -> tx`. A round takes a bounded number
//! of frames from everywhere and visits a bounded number of vnets ([`Turns`]), so that nobody keeps a worker
//! from the others. After some rounds without work ([`Patience`]) every peer is armed, and it sleeps. A vnet
//! that had no work for a while rests, until one of its peers rings or a frame comes for it, and costs nothing
//! meanwhile.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError};

use pdp_afxdp::Packet;
use pdp_memif::Patience;
use pdp_proto::mux::WorkerStats;
use rtrb::{Consumer, Producer};

use crate::classify::{Classifier, PortRef, Table};
use crate::connections::UNSURE_SLEEP_NS;
use crate::core::Core;
use crate::exit::Exit;
use crate::meter::Stage;
use crate::packets::Batch;
use crate::ringers::RungFor;
use crate::turns::Turns;
use crate::vnet::Vnet;
use crate::wake::Wake;

/// The longest sleep, nanoseconds.
const SLEEP_NS_MAX: u64 = 1_000_000_000;

/// Time between two looks at doorbells while there is work, nanoseconds.
const RUNG_EVERY_NS: u64 = 50_000;

/// Frames from outside in a round from which on the worker has other work than to wake peers.
const BUSY_FRAMES: usize = 64;

/// What the control thread wants done between two rounds.
pub type Command = Box<dyn FnOnce(&mut Worker) + Send>;

/// Frames on their way to another worker's vnets.
pub const HANDOVER_FRAMES: usize = 1024;

/// A frame for another worker's vnet, and the slot of the external interface that it came by.
#[derive(Debug)]
pub struct Handed {
    pub(crate) packet: Packet,
    pub(crate) port: PortRef,
    pub(crate) external: usize,
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
    /// Whose turn it is, and what waits for it.
    pub(crate) turns: Turns<Packet>,
    /// Whose frames are whose, on all external interfaces.
    pub classifier: Arc<Classifier>,
    pub(crate) neighbours: Vec<Option<Neighbour>>,
    commands: Receiver<Command>,
    wake: Arc<Wake>,
    /// Slots of vnets whose doorbells were rung, and when these were last looked at.
    rung: Vec<u16>,
    rung_ns: u64,
    /// The batch that is passed from stage to stage, kept so that nothing is allocated.
    batch: Batch,
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
            turns: Turns::new(core.packets.share()),
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
    /// that was not visited since.
    pub fn round(&mut self) -> bool {
        self.core.tick();
        self.core.packets.collect();
        self.due_ns = None;
        let mut work = self.obey() + self.rouse_rung();
        self.core.meter.lap(Stage::Control, 0);
        let received = self.rx() + self.take_handed();
        self.core.alarm.next(self.core.now_ns, received >= BUSY_FRAMES);
        work += received;
        for slot in 0..self.core.externals.len() {
            if let Some((exits, mut tools)) = self.core.exits(slot) {
                exits.refill(&mut tools);
            }
        }
        self.turns.begin(self.core.meter.now());
        while let Some(slot) = self.turns.next(self.core.now_ns, self.core.alarm.is_busy()) {
            work += self.visit(slot);
        }
        work += self.tx();
        self.core.meter.round(work > 0);
        self.stats.busy_rounds += u64::from(work > 0);
        work > 0 || self.turns.may_have_work()
    }

    /// Frames from outside, one external interface after the other. Returns how many.
    fn rx(&mut self) -> usize {
        let mut count = 0;
        let mut batch = std::mem::take(&mut self.batch);
        for slot in 0..self.core.externals.len() {
            let exits = self.core.externals[slot].as_ref().map_or(0, |it| it.exits.all().len());
            for at in 0..exits {
                let room = self.room(slot);
                if let Some((exits, mut tools)) = self.core.exits(slot) {
                    let due_ns = exits.all_mut()[at].receive(room, &mut tools, &mut batch);
                    self.due_ns = [self.due_ns, due_ns].into_iter().flatten().min();
                }
                count += batch.len();
                self.core.meter.lap(Stage::Receive, batch.len());
                if !batch.is_empty() {
                    self.sort(slot, &mut batch);
                }
            }
        }
        self.batch = batch;
        count
    }

    /// How many frames of the external interface in `slot` there is room for, where all go to one
    /// port of this worker's.
    fn room(&mut self, slot: usize) -> usize {
        let sole = self.classifier.get(slot).and_then(Table::sole);
        let Some(port) = sole.filter(|port| port.worker == self.number) else { return usize::MAX };
        let vnet = self.vnets.get_mut(usize::from(port.vnet)).and_then(Option::as_mut);
        let room = vnet.map_or(usize::MAX, |vnet| vnet.room(port.port));
        let room = room.saturating_sub(self.turns.waiting(port.vnet));
        room.min(self.turns.left(port.vnet, self.core.packets.free()))
    }

    /// The way through the vnet in `slot`: from outside to guests and TAPs, and from them out of ports.
    /// Returns how many frames there were.
    fn visit(&mut self, slot: u16) -> usize {
        let Self { core, vnets, turns, batch, .. } = self;
        let vnet = vnets.get_mut(usize::from(slot)).and_then(Option::as_mut);
        let Some(vnet) = vnet else {
            turns.rest(slot);
            return 0;
        };
        core.alarm.owner = RungFor::Vnet(vnet.generation);
        let since = core.meter.now();
        // Who has not finished with those of before gets no others.
        if !vnet.is_late() {
            vnet.frames_max = turns.take(slot, batch);
            batch.iter().for_each(Packet::prefetch);
        }
        let done = vnet.visit(core, batch);
        let cycles = core.meter.now().saturating_sub(since);
        let owed = vnet.take_owed();
        vnet.used_cycles += cycles + owed;
        turns.charge(slot, cycles, done);
        turns.owe(slot, owed);
        if vnet.is_tired(done > 0, core.now_ns) {
            if vnet.arm(core) {
                turns.rest(slot);
            } else {
                return done + 1;
            }
        }
        done
    }

    /// The vnets that do not rest.
    fn awake(&self) -> impl Iterator<Item = &Vnet> {
        self.turns.awake().filter_map(|slot| self.vnets.get(usize::from(slot))?.as_ref())
    }

    /// Whether the vnet in `slot` rests.
    pub fn rests(&self, slot: u16) -> bool {
        !self.turns.awake().any(|awake| awake == slot)
    }

    /// Changes the vnet in `slot`, which is visited from now on; `None` if there is none.
    pub fn change<T>(
        &mut self,
        slot: u16,
        by: impl FnOnce(&mut Vnet, &mut Core) -> T,
    ) -> Option<T> {
        self.turns.rouse(slot);
        let vnet = self.vnets.get_mut(usize::from(slot))?.as_mut()?;
        Some(by(vnet, &mut self.core))
    }

    /// Puts `new` in `slot`, where it goes on as the one before stopped. What is left of that one is for the
    /// caller's thread to drop.
    pub fn replace(&mut self, slot: u16, mut new: Option<Vnet>) -> Option<Vnet> {
        let at = usize::from(slot);
        if self.vnets.len() <= at {
            self.vnets.resize_with(at + 1, || None);
        }
        let mut old = self.vnets[at].take();
        // What came before the change arrives before it.
        let mut waiting = self.turns.remove(slot);
        match &mut old {
            Some(old) => _ = old.arrive(&mut self.core, &mut waiting),
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
            self.turns.put(slot, vnet.generation, vnet.weight(), vnet.power);
        }
        old
    }

    /// Ends the rest of vnets whose peers have rung. Returns how many.
    fn rouse_rung(&mut self) -> usize {
        let now_ns = self.core.now_ns;
        if now_ns.saturating_sub(self.rung_ns) >= RUNG_EVERY_NS {
            self.rung_ns = now_ns;
            self.core.connections.rung(&mut self.rung);
        }
        let count = self.rung.len();
        for slot in self.rung.drain(..) {
            self.turns.rouse(slot);
            if let Some(Some(vnet)) = self.vnets.get_mut(usize::from(slot)) {
                vnet.rung(now_ns);
            }
        }
        count
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

    /// Lets the kernel, the other workers and whoever sleeps have what is for them. Returns how many frames
    /// other workers had for this one's interfaces.
    fn tx(&mut self) -> usize {
        let mut count = 0;
        for slot in 0..self.core.externals.len() {
            let Some((exits, mut tools)) = self.core.exits(slot) else { continue };
            tools.alarm.owner = RungFor::External(slot);
            count += exits.flush(&mut tools);
        }
        for neighbour in self.neighbours.iter().flatten() {
            if neighbour.to.slots() < HANDOVER_FRAMES {
                neighbour.wake.ring();
            }
        }
        let Core { ringers, alarm, now_ns, .. } = &mut self.core;
        ringers.ask(&mut alarm.bells, *now_ns);
        self.core.meter.lap(Stage::Send, 0);
        count
    }

    /// Looks once more, arms every peer, and blocks until something is to be done.
    fn sleep(&mut self) {
        self.wake.sleeping();
        if !self.round() && self.arm() && !self.ended {
            self.stats.sleeps += 1;
            self.core.ringers.settle(&mut self.core.alarm.bells);
            let sockets = self.exits().filter_map(|exit| exit.socket());
            self.core.connections.sleep(self.sleep_ns(), sockets);
            self.core.connections.rung(&mut self.rung);
        }
        self.wake.awake();
        // Peers of our own ring, and are looked at when they do.
        let Self { core, vnets, turns, .. } = self;
        for slot in turns.awake() {
            if let Some(Some(vnet)) = vnets.get_mut(usize::from(slot)) {
                vnet.links()
                    .filter(|link| !link.is_sure())
                    .for_each(|link| link.disarm(core.now_ns));
            }
        }
        for external in core.externals.iter_mut().flatten() {
            external.exits.all_mut().iter_mut().for_each(|exit| exit.disarm(core.now_ns));
        }
        core.meter.lap(Stage::Sleep, 0);
    }

    /// Lets all peers ring; false if one has sent something.
    fn arm(&mut self) -> bool {
        let Self { core, vnets, turns, .. } = self;
        let mut quiet = true;
        for slot in turns.awake() {
            if let Some(Some(vnet)) = vnets.get_mut(usize::from(slot)) {
                core.alarm.owner = RungFor::Vnet(vnet.generation);
                quiet &= vnet.arm(core);
            }
        }
        for slot in 0..core.externals.len() {
            let Some((exits, mut tools)) = core.exits(slot) else { continue };
            tools.alarm.owner = RungFor::External(slot);
            exits.all_mut().iter_mut().for_each(|exit| quiet &= exit.arm(&mut tools));
        }
        quiet
    }

    fn exits(&self) -> impl Iterator<Item = &dyn Exit> {
        let externals = self.core.externals.iter().flatten();
        externals.flat_map(|external| external.exits.all()).map(|exit| &**exit)
    }

    fn sleep_ns(&self) -> u64 {
        let mut longest = self.exits().map(Exit::sleep_ns).fold(SLEEP_NS_MAX, u64::min);
        if self.awake().any(Vnet::has_unsure_peer) {
            longest = longest.min(UNSURE_SLEEP_NS);
        }
        let exits = self.core.externals.iter().flatten().filter_map(|it| it.exits.due_ns());
        let due_ns = self.awake().filter_map(Vnet::due_ns).chain(self.due_ns).chain(exits).min();
        due_ns.map_or(longest, |due| longest.min(due.saturating_sub(self.core.now_ns)))
    }

    /// Counters.
    pub fn stats(&self) -> WorkerStats {
        WorkerStats {
            free_packets: self.core.packets.at_hand() as u64,
            stages: self.core.meter.stats(),
            ..self.stats.clone()
        }
    }
}
