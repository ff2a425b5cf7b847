//! Frames of vrouters that the mux forwards for by itself.

use pdp_afxdp::Packet;
use pdp_proto::trace::matches;
use pdp_wire::tag::PuntClass;

use crate::core::Core;
use crate::counters::Reason;
use crate::engine::{Copies, Fate};
use crate::meter::Stage;
use crate::onward::FLOOD_FRAMES_MAX;
use crate::packets::Batch;
use crate::queues::{AtPorts, Queues};
use crate::slowpath::Ways;
use crate::vnet::{Node, Port, Router, Vnet};

/// Cycles of one visit in which frames are decided on; those that a node has together are all decided on then. What is
/// left has its turn in the next visit.
const FORWARD_CYCLES: u64 = 100_000;

/// The ports of a node.
struct Ports<'a>(&'a mut [Port]);

impl AtPorts for Ports<'_> {
    fn at(&mut self, vport: u8) -> Option<&mut Queues> {
        self.0.get_mut(usize::from(vport))?.several_queues()
    }

    fn each(&mut self, act: &mut dyn FnMut(&mut Queues)) {
        self.0.iter_mut().filter_map(Port::several_queues).for_each(act);
    }
}

impl Vnet {
    /// Frames of nodes with engines, which it takes out of `batch`: those that go on leave by the ports that the engines
    /// say, the others end here.
    pub(crate) fn forward(&mut self, core: &mut Core, batch: &mut Batch) {
        let mut frames = core.scratch.batch();
        let goes = |packet: &Packet| {
            let here = self.ports.get(usize::from(packet.port));
            let router = here.and_then(|here| self.nodes[here.node].router.as_ref());
            router.is_some_and(|router| router.engine.is_some())
        };
        if batch.chunk_by(|a, b| a.port == b.port).all(|run| goes(&run[0])) {
            // Nothing has to be moved.
            std::mem::swap(&mut frames, batch);
        } else {
            frames.extend(batch.extract_if(.., |packet| goes(packet)));
        }
        self.punt_filtered(core, &mut frames);
        if !self.late.is_empty() {
            // What is left of the visit before goes first.
            std::mem::swap(&mut frames, &mut self.late);
            frames.append(&mut self.late);
        }
        if frames.is_empty() {
            return core.scratch.spare.push(frames);
        }
        core.meter.lap(Stage::Distribute, 0);
        self.decide(core, &mut frames);
        let node = |packet: &Packet| self.ports[usize::from(packet.port)].node;
        for run in frames.chunk_by_mut(|a, b| node(a) == node(b)) {
            core.scratch.groups.by_port(self.nodes[node(&run[0])].first, run);
        }
        core.meter.lap(Stage::Forward, frames.len());
        self.leave(core, &mut frames);
        core.scratch.spare.push(frames);
    }

    /// Has engines decide on frames, and leaves those that go on, each at the port that it leaves by. Those that there is
    /// no time for wait.
    fn decide(&mut self, core: &mut Core, frames: &mut Batch) {
        let end = core.meter.now() + FORWARD_CYCLES;
        let taken = self.buffers.beside(self.waiting) + self.local.len();
        let mut fates = std::mem::take(&mut core.scratch.fates_of_engines);
        fates.clear();
        fates.resize(frames.len(), Fate::OPEN);
        let mut copies = Copies {
            made: core.scratch.batch(),
            missed: std::mem::take(&mut core.scratch.missed),
            room: FLOOD_FRAMES_MAX.min(core.packets.free().saturating_sub(taken)),
            packets: &mut core.packets,
        };
        let mut at = 0;
        while let Some(node) = frames.get(at).map(|it| self.ports[usize::from(it.port)].node) {
            let ports = self.nodes[node].ports();
            let Some(Router { engine: Some(engine), macs, .. }) = &mut self.nodes[node].router
            else {
                break;
            };
            let same = |packet: &&Packet| ports.contains(&packet.port);
            let run = frames[at..].iter().take(engine.frames_at_once()).take_while(same).count();
            let (run, to) = (&mut frames[at..at + run], &mut fates[at..at + run]);
            let forwarder = &mut core.scratch.forwarder;
            engine.process(forwarder, ports.clone(), macs, run, to, &mut copies);
            for (packet, fate) in run.iter_mut().zip(to) {
                match *fate {
                    Fate::Out(vport) if usize::from(vport) < ports.len() => {
                        packet.port = ports.start + vport;
                    }
                    // Its tables may name what the node does not have.
                    Fate::Out(_) => *fate = Fate::Drop(Reason::GuestPortDown),
                    _ => {}
                }
            }
            at += run.len();
            if core.meter.now() > end {
                break;
            }
        }
        let Copies { mut made, mut missed, .. } = copies;
        self.late.extend(frames.drain(at..));
        let goes_on =
            |(packet, fate): (&Packet, &Fate)| packet.mark == 0 && matches!(fate, Fate::Out(_));
        if !frames.iter().zip(&fates).all(goes_on) {
            self.end_decided(core, frames, &fates);
        }
        self.count_made(&made, &mut missed);
        frames.append(&mut made);
        core.scratch.spare.push(made);
        core.scratch.missed = missed;
        core.scratch.fates_of_engines = fates;
    }

    /// Punts frames that a filter of their node takes.
    fn punt_filtered(&mut self, core: &mut Core, frames: &mut Batch) {
        let has_filters = |node: &Node| node.router.iter().any(|router| !router.filters.is_empty());
        let node = |packet: &Packet| &self.nodes[self.ports[usize::from(packet.port)].node];
        if !frames.chunk_by(|a, b| a.port == b.port).any(|run| has_filters(node(&run[0]))) {
            return;
        }
        let mut taken = core.scratch.batch();
        taken.extend(frames.extract_if(.., |packet| self.filter(packet).is_some()));
        for packet in taken.drain(..) {
            self.punt(core, self.filter(&packet), &packet);
            core.packets.give(packet);
        }
        core.scratch.spare.push(taken);
    }

    /// The class as which a filter of its node punts a frame, if one does.
    fn filter(&self, packet: &Packet) -> Option<PuntClass> {
        let node = self.ports.get(usize::from(packet.port))?.node;
        let filters = &self.nodes[node].router.as_ref()?.filters;
        let filter = filters.iter().find(|(it, _)| matches(packet.bytes(), it));
        filter.map(|(_, class)| *class)
    }

    /// Ends those frames that do not go on, and says of those that are traced what became of them.
    fn end_decided(&mut self, core: &mut Core, frames: &mut Batch, fates: &[Fate]) {
        let mut go_on = core.scratch.batch();
        for (packet, fate) in frames.drain(..).zip(fates) {
            match *fate {
                Fate::Out(vport) => {
                    core.tracer.note(packet.mark, "forward", || format!("out of vport {vport}"));
                    go_on.push(packet);
                }
                Fate::Punt(class) => {
                    self.punt(core, Some(class), &packet);
                    core.packets.give(packet);
                }
                Fate::Drop(reason) => {
                    self.ports[usize::from(packet.port)].drop(core, reason, packet);
                }
            }
        }
        core.scratch.spare.push(std::mem::replace(frames, go_on));
    }

    /// Has engines follow their routes and obey their slow paths. Returns whether there was anything to do.
    pub(crate) fn tend(&mut self, core: &mut Core) -> usize {
        if !self.has_engines {
            return 0;
        }
        let (mut out, mut missed) =
            (core.scratch.batch(), std::mem::take(&mut core.scratch.missed));
        let mut work = 0;
        for node in &mut self.nodes {
            let ports = node.ports();
            let Some(engine) = node.router.as_mut().and_then(|it| it.engine.as_mut()) else {
                continue;
            };
            let taken = self.buffers.beside(self.waiting) + self.local.len() + out.len();
            let room = FLOOD_FRAMES_MAX.min(core.packets.free().saturating_sub(taken));
            let (local, out, missed) = (&mut self.local, &mut out, &mut missed);
            let here = usize::from(ports.start)..usize::from(ports.end);
            let queues = &mut Ports(&mut self.ports[here]);
            let packets = &mut core.packets;
            let mut ways = Ways { packets, ports, local, out, missed, room, queues };
            work += usize::from(engine.tend(core.now_ns, core.meter.clock()));
            work += usize::from(engine.obey(&mut ways, core.meter.clock()));
        }
        self.count_made(&out, &mut missed);
        core.scratch.missed = missed;
        core.meter.lap(Stage::Routes, work);
        self.leave(core, &mut out);
        core.scratch.spare.push(out);
        work
    }

    /// Counts frames that were made here at their ports, and those that there was no packet for; empties `missed`.
    fn count_made(&mut self, made: &Batch, missed: &mut Vec<u16>) {
        for packet in made {
            self.ports[usize::from(packet.port)].counters.made += 1;
        }
        for port in missed.drain(..) {
            let counters = &mut self.ports[usize::from(port)].counters;
            counters.made += 1;
            counters.drop(Reason::NoPacket);
        }
    }

    /// Whether frames wait for an engine's time.
    pub(crate) fn is_late(&self) -> bool {
        !self.late.is_empty()
    }

    /// Cycles that other threads took for its engines since this was asked before.
    pub(crate) fn take_owed(&self) -> u64 {
        if self.has_engines { self.engines().map(|engine| engine.take_owed()).sum() } else { 0 }
    }
}
