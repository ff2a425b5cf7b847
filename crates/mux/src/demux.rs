//! Classifies frames from outside, and passes them to vnets
//! of this worker or to the worker that has their vnet.

use pdp_afxdp::PacketBuffer;
use pdp_wire::{ecn, vlan};

use crate::classify::{InnerFrame, PortRef, TunnelTable};
use crate::counters::OuterReason;
use crate::meter::Stage;
use crate::packets::PacketBatch;
use crate::vnet_scheduler::EnqueueError;
use crate::worker::{Handed, Worker};

/// Frames taken from another worker in one round.
const TAKEN_FRAMES: usize = 256;

impl Worker {
    /// Classifies `frames` that arrived on the external interface in slot `external`. Empties it.
    pub fn classify_frames(&mut self, external: usize, frames: &mut PacketBatch) {
        let count = frames.len();
        let classifier = self.classifier.clone();
        match classifier.get(external) {
            None => self.core.packets.give_all(frames),
            Some(table) => match table.sole() {
                Some(port) if port.worker == self.number => self.give_all(port, external, frames),
                _ => self.classify(table, external, frames),
            },
        }
        self.core.meter.lap(Stage::Classify, count);
    }

    /// Classifies frames of many vnets. All are classified before the first
    /// is passed on, so that the data of their vnets is prefetched meanwhile.
    fn classify(&mut self, table: &TunnelTable, external: usize, frames: &mut PacketBatch) {
        let mut ports = std::mem::take(&mut self.core.scratch.ingress_ports);
        ports.extend(frames.iter_mut().map(|packet| {
            let port = unwrap(table, packet);
            port.iter().for_each(|port| self.scheduler.prefetch(port.vnet));
            port
        }));
        for (packet, port) in frames.drain(..).zip(ports.drain(..)) {
            match port {
                Ok(port) => self.give(port, external, packet),
                Err(reason) => self.refuse(external, reason, packet),
            }
        }
        self.core.scratch.ingress_ports = ports;
    }

    /// Passes frames to one port of this worker.
    fn give_all(&mut self, port: PortRef, external: usize, frames: &mut PacketBatch) {
        frames.iter_mut().for_each(|packet| packet.port = port.port);
        self.scheduler.wake(port.vnet);
        let (owner, free) = ((port.vnet, port.generation), self.core.packets.free());
        let given = self.scheduler.enqueue_all(owner, free, self.core.now_ns, frames);
        if let Err(refused) = given {
            frames.drain(..).for_each(|packet| self.lose(port, external, refused, packet));
        }
    }

    /// Passes a frame to `port`, or to the worker that has its vnet.
    #[inline]
    fn give(&mut self, port: PortRef, external: usize, mut packet: PacketBuffer) {
        if port.worker != self.number {
            return self.hand_over(port, external, packet);
        }
        packet.port = port.port;
        self.scheduler.wake(port.vnet);
        let (owner, free) = ((port.vnet, port.generation), self.core.packets.free());
        if let Err((refused, packet)) =
            self.scheduler.enqueue(owner, free, self.core.now_ns, packet)
        {
            self.lose(port, external, refused, packet);
        }
    }

    fn hand_over(&mut self, port: PortRef, external: usize, packet: PacketBuffer) {
        let to = self.neighbours.get_mut(usize::from(port.worker)).and_then(Option::as_mut);
        let Some(to) = to else { return self.refuse(external, OuterReason::Stale, packet) };
        if let Err(rtrb::PushError::Full(handed)) = to.to.push(Handed { packet, port, external }) {
            self.refuse(external, OuterReason::HandoverFull, handed.packet);
        }
    }

    /// Takes frames that other workers received for this worker's vnets. Returns their number.
    pub(crate) fn take_handed(&mut self) -> usize {
        let mut count = 0;
        for index in 0..self.neighbours.len() {
            for _ in 0..TAKEN_FRAMES {
                let from = self.neighbours[index].as_mut().map(|neighbour| neighbour.from.pop());
                let Some(Ok(Handed { packet, port, external })) = from else { break };
                count += 1;
                self.give(port, external, packet);
            }
        }
        count
    }

    /// Drops a frame that can't be queued for its vnet.
    #[cold]
    fn lose(
        &mut self,
        port: PortRef,
        external: usize,
        refused: EnqueueError,
        packet: PacketBuffer,
    ) {
        let vnet = self.vnets.get_mut(usize::from(port.vnet)).and_then(Option::as_mut);
        let here = vnet.and_then(|vnet| {
            let reason = vnet.queue_drop_reason(port.port);
            Some((vnet.ports.get_mut(usize::from(port.port))?, reason))
        });
        match (refused, here) {
            (EnqueueError::Full, Some((here, reason))) => {
                here.counters.stats.received += 1;
                here.counters.stats.received_bytes += packet.len() as u64;
                here.drop(&mut self.core, reason, packet);
            }
            _ => self.refuse(external, OuterReason::Stale, packet),
        }
    }

    fn refuse(&mut self, external: usize, reason: OuterReason, packet: PacketBuffer) {
        if let Some(external) = self.core.external(external) {
            external.counters.drop(reason);
        }
        self.core.packets.give(packet);
    }
}

/// Returns a frame's port, and removes its outer headers.
#[inline]
fn unwrap(table: &TunnelTable, packet: &mut PacketBuffer) -> Result<PortRef, OuterReason> {
    let (port, inner) = table.classify(packet.bytes())?;
    match inner {
        InnerFrame::Whole => {}
        InnerFrame::Behind(inner) => {
            let (length, outer) = (inner.len(), ecn::of(packet.bytes()));
            let _ = packet.advance(inner.start);
            let _ = packet.set_len(length);
            if !ecn::decapsulate(packet.bytes_mut(), outer) {
                return Err(OuterReason::CeOnNotEct);
            }
        }
        InnerFrame::Untagged => {
            vlan::strip(packet.bytes_mut());
            let _ = packet.advance(vlan::TAG_BYTES);
        }
    }
    Ok(port)
}
