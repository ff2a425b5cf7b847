//! Frames from outside, sorted by vnet: classified, then to the vnets here or to the worker that has them.

use pdp_afxdp::Packet;
use pdp_wire::{ecn, vlan};

use crate::classify::{Inner, PortRef, Table};
use crate::counters::OuterReason;
use crate::meter::Stage;
use crate::packets::Batch;
use crate::turns::Refused;
use crate::worker::{Handed, Worker};

/// Frames taken from another worker in one round.
const TAKEN_FRAMES: usize = 256;

impl Worker {
    /// Takes `frames` that arrived on the external interface in slot `external`. Empties it.
    pub fn sort(&mut self, external: usize, frames: &mut Batch) {
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

    /// Frames of many vnets'. Whose they are is found for all before the first is given on: what that takes of each
    /// vnet is fetched meanwhile.
    fn classify(&mut self, table: &Table, external: usize, frames: &mut Batch) {
        let mut whose = std::mem::take(&mut self.core.scratch.whose);
        whose.extend(frames.iter_mut().map(|packet| {
            let port = unwrap(table, packet);
            port.iter().for_each(|port| self.turns.prefetch(port.vnet));
            port
        }));
        for (packet, port) in frames.drain(..).zip(whose.drain(..)) {
            match port {
                Ok(port) => self.give(port, external, packet),
                Err(reason) => self.refuse(external, reason, packet),
            }
        }
        self.core.scratch.whose = whose;
    }

    /// Frames of one port here.
    fn give_all(&mut self, port: PortRef, external: usize, frames: &mut Batch) {
        frames.iter_mut().for_each(|packet| packet.port = port.port);
        self.turns.rouse(port.vnet);
        let (whose, free) = ((port.vnet, port.generation), self.core.packets.free());
        let given = self.turns.give_all(whose, free, self.core.now_ns, frames);
        if let Err(refused) = given {
            frames.drain(..).for_each(|packet| self.lose(port, external, refused, packet));
        }
    }

    /// A frame for `port`, or for the worker that has its vnet.
    #[inline]
    fn give(&mut self, port: PortRef, external: usize, mut packet: Packet) {
        if port.worker != self.number {
            return self.hand_over(port, external, packet);
        }
        packet.port = port.port;
        self.turns.rouse(port.vnet);
        let (whose, free) = ((port.vnet, port.generation), self.core.packets.free());
        if let Err((refused, packet)) = self.turns.give(whose, free, self.core.now_ns, packet) {
            self.lose(port, external, refused, packet);
        }
    }

    fn hand_over(&mut self, port: PortRef, external: usize, packet: Packet) {
        let to = self.neighbours.get_mut(usize::from(port.worker)).and_then(Option::as_mut);
        let Some(to) = to else { return self.refuse(external, OuterReason::Stale, packet) };
        if let Err(rtrb::PushError::Full(handed)) = to.to.push(Handed { packet, port, external }) {
            self.refuse(external, OuterReason::HandoverFull, handed.packet);
        }
    }

    /// Frames that other workers received for vnets of this one. Returns how many.
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

    /// A frame that can't wait for its vnet.
    #[cold]
    fn lose(&mut self, port: PortRef, external: usize, refused: Refused, packet: Packet) {
        let vnet = self.vnets.get_mut(usize::from(port.vnet)).and_then(Option::as_mut);
        let here = vnet.and_then(|vnet| {
            let reason = vnet.behind(port.port);
            Some((vnet.ports.get_mut(usize::from(port.port))?, reason))
        });
        match (refused, here) {
            (Refused::Full, Some((here, reason))) => {
                here.counters.received += 1;
                here.counters.received_bytes += packet.len() as u64;
                here.drop(&mut self.core, reason, packet);
            }
            _ => self.refuse(external, OuterReason::Stale, packet),
        }
    }

    fn refuse(&mut self, external: usize, reason: OuterReason, packet: Packet) {
        if let Some(external) = self.core.external(external) {
            external.counters.drop(reason);
        }
        self.core.packets.give(packet);
    }
}

/// Whose a frame is, of which what it was wrapped in is taken off then.
#[inline]
fn unwrap(table: &Table, packet: &mut Packet) -> Result<PortRef, OuterReason> {
    let (port, inner) = table.classify(packet.bytes())?;
    match inner {
        Inner::Whole => {}
        Inner::Behind(inner) => {
            let (length, outer) = (inner.len(), ecn::of(packet.bytes()));
            let _ = packet.advance(inner.start);
            let _ = packet.set_len(length);
            if !ecn::decapsulate(packet.bytes_mut(), outer) {
                return Err(OuterReason::CeOnNotEct);
            }
        }
        Inner::Untagged => {
            vlan::take_off(packet.bytes_mut());
            let _ = packet.advance(vlan::TAG_BYTES);
        }
    }
    Ok(port)
}
