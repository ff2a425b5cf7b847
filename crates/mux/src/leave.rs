//! Frames on their way out of a port: shape, encapsulate, send.

use pdp_afxdp::Packet;

use crate::arrive::end;
use crate::core::Core;
use crate::counters::Reason;
use crate::encapsulate::Way;
use crate::meter::Stage;
use crate::shape::Offered;
use crate::vnet::Vnet;

impl Vnet {
    /// Sends frames out of port `at`, or lets them wait their turn. Empties `frames`.
    pub(crate) fn leave(&mut self, core: &mut Core, at: usize, frames: &mut Vec<Packet>) {
        if frames.is_empty() {
            return;
        }
        let count = frames.len();
        let here = &mut self.ports[at];
        let mut going = std::mem::take(&mut core.scratch.going);
        for packet in frames.drain(..) {
            if let Err(reason) = here.fits(&packet) {
                here.drop(core, reason, packet);
                continue;
            }
            let Some(link) = &mut here.link else {
                here.drop(core, Reason::Unconnected, packet);
                continue;
            };
            if !link.up {
                here.drop(core, Reason::LinkDown, packet);
                continue;
            }
            // No vnet may hold more packets in queues than it leaves free for all: n greedy ones
            // have 1/(n+1) of the pool each, and as much stays free (Choudhury and Hahne, 1998).
            let room = self.waiting < core.packets.free();
            let mark = packet.mark;
            match link.shaper.offer(packet, core.now_ns, room) {
                Offered::Go(packet) => going.push(packet),
                Offered::Full(packet) => here.drop(core, Reason::QueueFull, packet),
                Offered::Waits => {
                    self.waiting += 1;
                    if link.shaper.waiting() == 1 {
                        self.shaping.push(at as u16);
                    }
                    let detail = || format!("waits for the rate of {}", here.name);
                    core.tracer.note(mark, "shape", detail);
                }
            }
        }
        self.emit(core, at, &mut going);
        core.scratch.going = going;
        core.meter.lap(Stage::Send, count);
    }

    /// Sends what has waited long enough. Returns how many frames, and when the next one is due.
    pub fn shape(&mut self, core: &mut Core) -> (usize, Option<u64>) {
        let mut sent = 0;
        let mut due: Option<u64> = None;
        let mut index = 0;
        let mut going = std::mem::take(&mut core.scratch.going);
        while index < self.shaping.len() {
            let at = usize::from(self.shaping[index]);
            let next = self.ports[at].link.as_mut().and_then(|link| link.shaper.next(core.now_ns));
            match next {
                Some(Ok(packet)) => {
                    self.waiting -= 1;
                    sent += 1;
                    going.push(packet);
                    self.emit(core, at, &mut going);
                }
                Some(Err(at_ns)) => {
                    due = Some(due.map_or(at_ns, |due| due.min(at_ns)));
                    index += 1;
                }
                None => {
                    self.shaping.swap_remove(index);
                }
            }
        }
        core.scratch.going = going;
        (sent, due)
    }

    /// Puts frames onto the port's vlink. Empties `frames`.
    fn emit(&mut self, core: &mut Core, at: usize, frames: &mut Vec<Packet>) {
        if frames.is_empty() {
            return;
        }
        let here = &mut self.ports[at];
        frames.iter().for_each(|packet| here.capture(core, packet.bytes()));
        let Some(link) = &here.link else {
            return frames.drain(..).for_each(|it| here.drop(core, Reason::Unconnected, it));
        };
        let outside = match &link.way {
            Way::Port(to) => {
                let to = *to;
                here.counters.sent += frames.len() as u64;
                here.counters.sent_bytes += frames.iter().map(|it| it.len() as u64).sum::<u64>();
                for packet in frames.drain(..) {
                    if packet.mark != 0 {
                        let there = &self.ports[usize::from(to)];
                        let node = &self.nodes[there.node].name;
                        let detail = || format!("by the vlink to {node}:{}", there.name);
                        core.tracer.note(packet.mark, "send", detail);
                    }
                    self.local.push((to, packet));
                }
                return;
            }
            Way::Outside(outside) => outside,
        };
        let Some(Some(external)) = core.externals.get(outside.external) else {
            return frames.drain(..).for_each(|it| here.drop(core, Reason::ExternalGone, it));
        };
        let (mac, mtu) = (external.mac, external.mtu);
        let mut wrapped = std::mem::take(&mut core.scratch.wrapped);
        let (mut bytes, mut traced) = (0, vec![]);
        for mut packet in frames.drain(..) {
            let length = packet.len() as u64;
            match outside.wrap(&mut packet, mac, mtu) {
                Ok(()) => {
                    if packet.mark != 0 {
                        traced.push((wrapped.len(), packet.mark, length));
                    }
                    bytes += length;
                    wrapped.push(packet);
                }
                Err(reason) => end(&mut here.counters, &here.name, core, reason, packet),
            }
        }
        let Core { externals, packets, connections, tracer, .. } = core;
        let Some(Some(external)) = externals.get_mut(outside.external) else { return };
        let before = wrapped.len();
        let sent = external.send(outside.spread, packets, connections, &mut wrapped);
        let count = before - wrapped.len();
        for (_, mark, length) in traced.iter().filter(|(at, ..)| *at < count) {
            tracer.end(*mark, "send", || format!("out of {}, {length} bytes", here.name));
        }
        if let Err(reason) = sent {
            let header = outside.header_bytes();
            bytes -= wrapped.iter().map(|packet| (packet.len() - header) as u64).sum::<u64>();
            wrapped.drain(..).for_each(|packet| here.drop(core, reason, packet));
        }
        here.counters.sent += count as u64;
        here.counters.sent_bytes += bytes;
        core.scratch.wrapped = wrapped;
    }
}
