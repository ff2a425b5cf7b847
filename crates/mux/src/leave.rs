//! A frame on its way out of a port: shape, encapsulate, send.

use pdp_afxdp::Packet;
use pdp_wire::ether;

use crate::core::Core;
use crate::counters::Reason;
use crate::encapsulate::Way;
use crate::shape::Offered;
use crate::vnet::Vnet;

impl Vnet {
    /// Sends a frame out of port `at`, or lets it wait its turn.
    pub(crate) fn leave(&mut self, core: &mut Core, at: usize, packet: Packet) {
        let here = &mut self.ports[at];
        if packet.len() < ether::HEADER_BYTES {
            return self.drop(core, at, Reason::Runt, packet);
        }
        if ether::payload_len(packet.bytes()) > here.mtu as usize {
            return self.drop(core, at, Reason::TooBig, packet);
        }
        let Some(link) = &mut here.link else {
            return self.drop(core, at, Reason::Unconnected, packet);
        };
        if !link.up {
            return self.drop(core, at, Reason::LinkDown, packet);
        }
        // No vnet may hold more packets in queues than it leaves free for all: n greedy ones have
        // 1/(n+1) of the pool each, and as much stays free (Choudhury and Hahne, 1998).
        let room = self.waiting < core.packets.free();
        let mark = packet.mark;
        match link.shaper.offer(packet, core.now_ns, room) {
            Offered::Go(packet) => self.emit(core, at, packet),
            Offered::Full(packet) => self.drop(core, at, Reason::QueueFull, packet),
            Offered::Waits => {
                self.waiting += 1;
                if link.shaper.waiting() == 1 {
                    self.shaping.push(at as u16);
                }
                core.tracer.note(mark, "shape", || format!("waits for the rate of {}", here.name));
            }
        }
    }

    /// Sends what has waited long enough. Returns how many frames, and when the next one is due.
    pub fn shape(&mut self, core: &mut Core) -> (usize, Option<u64>) {
        let mut sent = 0;
        let mut due: Option<u64> = None;
        let mut index = 0;
        while index < self.shaping.len() {
            let at = usize::from(self.shaping[index]);
            let next = self.ports[at].link.as_mut().and_then(|link| link.shaper.next(core.now_ns));
            match next {
                Some(Ok(packet)) => {
                    self.waiting -= 1;
                    sent += 1;
                    self.emit(core, at, packet);
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
        (sent, due)
    }

    /// Puts a frame onto the port's vlink.
    fn emit(&mut self, core: &mut Core, at: usize, mut packet: Packet) {
        self.ports[at].capture(core, packet.bytes());
        let Some(link) = &self.ports[at].link else {
            return self.drop(core, at, Reason::Unconnected, packet);
        };
        let bytes = packet.len();
        let mark = packet.mark;
        let result = match &link.way {
            Way::Port(to) => {
                core.tracer.note(mark, "send", || {
                    let there = &self.ports[usize::from(*to)];
                    format!("by the vlink to {}:{}", self.nodes[there.node].name, there.name)
                });
                self.local.push((*to, packet));
                Ok(())
            }
            Way::Outside(outside) => match core.externals.get_mut(outside.external) {
                Some(Some(external)) => {
                    match outside.wrap(&mut packet, external.mac, external.mtu) {
                        Ok(()) => external.send(outside.spread, packet),
                        Err(reason) => Err((reason, packet)),
                    }
                }
                _ => Err((Reason::ExternalGone, packet)),
            },
        };
        let here = &mut self.ports[at];
        match result {
            Ok(()) => {
                here.counters.sent += 1;
                here.counters.sent_bytes += bytes as u64;
                if let Some(Way::Outside(_)) = here.link.as_ref().map(|link| &link.way) {
                    core.tracer
                        .end(mark, "send", || format!("out of {}, {bytes} bytes", here.name));
                }
            }
            Err((reason, packet)) => self.drop(core, at, reason, packet),
        }
    }
}
