//! Forwarding of frames for vrouters with an engine.

use pdp_afxdp::PacketBuffer;
use pdp_proto::trace::matches;
use pdp_wire::tag::PuntClass;

use crate::core::Core;
use crate::counters::Reason;
use crate::engine::{Copies, EngineVerdict};
use crate::meter::Stage;
use crate::packets::PacketBatch;
use crate::queues::{AtPorts, Queues};
use crate::relay::FLOOD_FRAMES_MAX;
use crate::slowpath::SlowPathOutputs;
use crate::vnet::{MuxNode, MuxPort, MuxRouter, MuxVnet};

/// Cycles of one visit in which engines decide on frames. A node's frames that
/// are decided on together may exceed them. The rest waits for the next visit.
const FORWARD_CYCLES: u64 = 100_000;

/// The ports of a node.
struct NodePorts<'a>(&'a mut [MuxPort]);

impl AtPorts for NodePorts<'_> {
    fn at(&mut self, vport: u8) -> Option<&mut Queues> {
        self.0.get_mut(usize::from(vport))?.several_queues()
    }

    fn each(&mut self, act: &mut dyn FnMut(&mut Queues)) {
        self.0.iter_mut().filter_map(MuxPort::several_queues).for_each(act);
    }
}

impl MuxVnet {
    /// Takes the frames of nodes with engines out of `batch`. Forwarded frames
    /// leave by the ports that the engines chose. The others are punted or dropped.
    pub(crate) fn forward(&mut self, core: &mut Core, batch: &mut PacketBatch) {
        let mut frames = core.scratch.batch();
        let goes = |packet: &PacketBuffer| {
            let here = self.ports.get(usize::from(packet.port));
            let router = here.and_then(|here| self.nodes[here.node].router.as_ref());
            router.is_some_and(|router| router.engine.is_some())
        };
        if batch.chunk_by(|a, b| a.port == b.port).all(|run| goes(&run[0])) {
            // All frames go; swap instead of moving them.
            std::mem::swap(&mut frames, batch);
        } else {
            frames.extend(batch.extract_if(.., |packet| goes(packet)));
        }
        self.punt_filtered(core, &mut frames);
        if !self.engine_backlog.is_empty() {
            // Frames left over from the last visit go first.
            std::mem::swap(&mut frames, &mut self.engine_backlog);
            frames.append(&mut self.engine_backlog);
        }
        if frames.is_empty() {
            return core.scratch.spare.push(frames);
        }
        core.meter.lap(Stage::Distribute, 0);
        self.decide(core, &mut frames);
        let node = |packet: &PacketBuffer| self.ports[usize::from(packet.port)].node;
        for run in frames.chunk_by_mut(|a, b| node(a) == node(b)) {
            core.scratch.groups.by_port(self.nodes[node(&run[0])].first, run);
        }
        core.meter.lap(Stage::Forward, frames.len());
        self.egress(core, &mut frames);
        core.scratch.spare.push(frames);
    }

    /// Lets engines decide on frames. Keeps the forwarded ones, each with
    /// its egress port. Frames beyond the time limit wait in `late`.
    fn decide(&mut self, core: &mut Core, frames: &mut PacketBatch) {
        let end = core.meter.now() + FORWARD_CYCLES;
        let taken = self.buffers.beside(self.waiting) + self.local.len();
        let mut verdicts = std::mem::take(&mut core.scratch.engine_verdicts);
        verdicts.clear();
        verdicts.resize(frames.len(), EngineVerdict::UNDECIDED);
        let mut copies = Copies {
            made: core.scratch.batch(),
            missed: std::mem::take(&mut core.scratch.missed),
            room: FLOOD_FRAMES_MAX.min(core.packets.free().saturating_sub(taken)),
            packets: &mut core.packets,
        };
        let mut at = 0;
        while let Some(node) = frames.get(at).map(|it| self.ports[usize::from(it.port)].node) {
            let ports = self.nodes[node].ports();
            let Some(MuxRouter { engine: Some(engine), macs, .. }) = &mut self.nodes[node].router
            else {
                break;
            };
            let same = |packet: &&PacketBuffer| ports.contains(&packet.port);
            let run = frames[at..].iter().take(engine.frames_at_once()).take_while(same).count();
            let (run, to) = (&mut frames[at..at + run], &mut verdicts[at..at + run]);
            let forwarder = &mut core.scratch.forwarder;
            engine.process(forwarder, ports.clone(), macs, run, to, &mut copies);
            for (packet, verdict) in run.iter_mut().zip(to) {
                match *verdict {
                    EngineVerdict::Out(vport) if usize::from(vport) < ports.len() => {
                        packet.port = ports.start + vport;
                    }
                    // The engine's tables may name a port that the node does not have.
                    EngineVerdict::Out(_) => *verdict = EngineVerdict::Drop(Reason::GuestPortDown),
                    _ => {}
                }
            }
            at += run.len();
            if core.meter.now() > end {
                break;
            }
        }
        let Copies { mut made, mut missed, .. } = copies;
        self.engine_backlog.extend(frames.drain(at..));
        let goes_on = |(packet, verdict): (&PacketBuffer, &EngineVerdict)| {
            packet.mark == 0 && matches!(verdict, EngineVerdict::Out(_))
        };
        if !frames.iter().zip(&verdicts).all(goes_on) {
            self.end_decided(core, frames, &verdicts);
        }
        self.count_made(&made, &mut missed);
        frames.append(&mut made);
        core.scratch.spare.push(made);
        core.scratch.missed = missed;
        core.scratch.engine_verdicts = verdicts;
    }

    /// Punts frames that match a punt filter of their node.
    fn punt_filtered(&mut self, core: &mut Core, frames: &mut PacketBatch) {
        let has_filters =
            |node: &MuxNode| node.router.iter().any(|router| !router.filters.is_empty());
        let node = |packet: &PacketBuffer| &self.nodes[self.ports[usize::from(packet.port)].node];
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

    /// Returns the punt class of the node's filter that matches a frame, if one does.
    fn filter(&self, packet: &PacketBuffer) -> Option<PuntClass> {
        let node = self.ports.get(usize::from(packet.port))?.node;
        let filters = &self.nodes[node].router.as_ref()?.filters;
        let filter = filters.iter().find(|(it, _)| matches(packet.bytes(), it));
        filter.map(|(_, class)| *class)
    }

    /// Punts or drops the frames that are not forwarded, and notes the verdicts of traced frames.
    fn end_decided(
        &mut self,
        core: &mut Core,
        frames: &mut PacketBatch,
        verdicts: &[EngineVerdict],
    ) {
        let mut go_on = core.scratch.batch();
        for (packet, verdict) in frames.drain(..).zip(verdicts) {
            match *verdict {
                EngineVerdict::Out(vport) => {
                    core.tracer.note(packet.mark, "forward", || format!("out of vport {vport}"));
                    go_on.push(packet);
                }
                EngineVerdict::Punt(class) => {
                    self.punt(core, Some(class), &packet);
                    core.packets.give(packet);
                }
                EngineVerdict::Drop(reason) => {
                    self.ports[usize::from(packet.port)].drop(core, reason, packet);
                }
            }
        }
        core.scratch.spare.push(std::mem::replace(frames, go_on));
    }

    /// Lets engines follow their routes and handle requests of
    /// their slow paths. Returns how many of these had work.
    pub(crate) fn poll_engines(&mut self, core: &mut Core) -> usize {
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
            let queues = &mut NodePorts(&mut self.ports[here]);
            let packets = &mut core.packets;
            let mut outputs = SlowPathOutputs { packets, ports, local, out, missed, room, queues };
            work += usize::from(engine.poll(core.now_ns, core.meter.clock()));
            work += usize::from(engine.poll_slowpath(&mut outputs, core.meter.clock()));
        }
        self.count_made(&out, &mut missed);
        core.scratch.missed = missed;
        core.meter.lap(Stage::Routes, work);
        self.egress(core, &mut out);
        core.scratch.spare.push(out);
        work
    }

    /// Counts frames that were made here at their ports, and
    /// copies that found no free packet. Empties `missed`.
    fn count_made(&mut self, made: &PacketBatch, missed: &mut Vec<u16>) {
        for packet in made {
            self.ports[usize::from(packet.port)].counters.stats.made += 1;
        }
        for port in missed.drain(..) {
            let counters = &mut self.ports[usize::from(port)].counters;
            counters.stats.made += 1;
            counters.drop(Reason::NoPacket);
        }
    }

    /// True if frames wait for an engine.
    pub(crate) fn is_late(&self) -> bool {
        !self.engine_backlog.is_empty()
    }

    /// Returns the cycles that other threads spent for its engines since the last call.
    pub(crate) fn take_outstanding_cycles(&self) -> u64 {
        if self.has_engines {
            self.engines().map(|engine| engine.take_outstanding_cycles()).sum()
        } else {
            0
        }
    }
}
