//! Frames of vrouters that the mux forwards for by itself.

use pdp_afxdp::Packet;
use pdp_ip::{Decision, FRAMES_MAX};
use pdp_wire::tag::{GuestDrop, PuntClass};

use crate::core::Core;
use crate::meter::Stage;
use crate::packets::Batch;
use crate::trace;
use crate::vnet::{Node, Router, Vnet};

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
        if frames.is_empty() {
            return core.scratch.spare.push(frames);
        }
        self.punt_filtered(core, &mut frames);
        core.meter.lap(Stage::Distribute, 0);
        let (mut at, count) = (0, frames.len());
        let mut decisions = std::mem::take(&mut core.scratch.decisions);
        decisions.clear();
        decisions.resize(count, Decision::Drop(GuestDrop::Policy));
        while let Some(node) = frames.get(at).map(|it| self.ports[usize::from(it.port)].node) {
            let Node { first, count, router, .. } = &mut self.nodes[node];
            let (first, ports) = (*first as u16, *count as u16);
            let same = |packet: &&Packet| (first..first + ports).contains(&packet.port);
            let run = frames[at..].iter().take(FRAMES_MAX).take_while(same).count();
            let (run, to) = (&mut frames[at..at + run], &mut decisions[at..at + run]);
            if let Some(Router { engine: Some(engine), .. }) = router {
                engine.process(&mut core.scratch.forwarder, first, run, to);
            }
            for (packet, decision) in run.iter_mut().zip(to) {
                match *decision {
                    Decision::Out(vport) if vport < ports => packet.port = first + vport,
                    // Its tables may name what the node does not have.
                    Decision::Out(_) => *decision = Decision::Drop(GuestDrop::PortDown),
                    _ => {}
                }
            }
            at += run.len();
        }
        let goes_on =
            |(packet, to): (&Packet, &Decision)| packet.mark == 0 && matches!(to, Decision::Out(_));
        if !frames.iter().zip(&decisions).all(goes_on) {
            self.end_decided(core, &mut frames, &decisions);
        }
        core.scratch.decisions = decisions;
        let node = |packet: &Packet| self.ports[usize::from(packet.port)].node;
        for run in frames.chunk_by_mut(|a, b| node(a) == node(b)) {
            core.scratch.groups.by_port(self.nodes[node(&run[0])].first, run);
        }
        core.meter.lap(Stage::Forward, count);
        self.leave(core, &mut frames);
        core.scratch.spare.push(frames);
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
        let filter = filters.iter().find(|(it, _)| trace::matches(packet.bytes(), it));
        filter.map(|(_, class)| *class)
    }

    /// Ends those frames that do not go on, and says of those that are traced what became of them.
    fn end_decided(&mut self, core: &mut Core, frames: &mut Batch, decisions: &[Decision]) {
        let mut go_on = core.scratch.batch();
        for (packet, decision) in frames.drain(..).zip(decisions) {
            match *decision {
                Decision::Out(vport) => {
                    core.tracer.note(packet.mark, "forward", || format!("out of vport {vport}"));
                    go_on.push(packet);
                }
                Decision::Punt(class) => {
                    self.punt(core, Some(class), &packet);
                    core.packets.give(packet);
                }
                Decision::Drop(reason) => {
                    self.ports[usize::from(packet.port)].drop(core, reason.into(), packet);
                }
            }
        }
        core.scratch.spare.push(std::mem::replace(frames, go_on));
    }

    /// Has engines follow their routes. Returns whether there was anything to do.
    pub(crate) fn tend(&mut self, core: &mut Core) -> usize {
        if !self.has_engines {
            return 0;
        }
        let engines = self.nodes.iter_mut().filter_map(|it| it.router.as_mut()?.engine.as_mut());
        let work = engines.filter_map(|it| it.tend(core.now_ns, core.meter.clock()).then_some(()));
        let work = work.count();
        core.meter.lap(Stage::Routes, work);
        work
    }
}
