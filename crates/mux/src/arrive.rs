//! A frame that arrived at a port, on its way to a forwarding guest or to the node's TAP:
//! police, check, punt filters, distribute, cross.

use pdp_afxdp::Packet;
use pdp_proto::mux::Attach;
use pdp_wire::ether;
use pdp_wire::tag::{PuntClass, Tag};

use crate::core::Core;
use crate::counters::Reason;
use crate::peer::OUTSTANDING_MAX;
use crate::trace;
use crate::vnet::{Port, Vnet};

impl Vnet {
    /// What vlinks inside the node brought in the last round. Returns how many frames.
    pub fn arrivals(&mut self, core: &mut Core) -> usize {
        let mut local = std::mem::take(&mut self.local);
        let count = local.len();
        for (port, packet) in local.drain(..) {
            self.arrive(core, port, packet, false);
        }
        // Whatever came meanwhile has its turn in the next round.
        local.append(&mut self.local);
        self.local = local;
        count
    }

    /// One frame at `port`; from outside the node it is policed.
    pub fn arrive(&mut self, core: &mut Core, port: u16, mut packet: Packet, outside: bool) {
        let at = usize::from(port);
        let Some(here) = self.ports.get_mut(at) else { return core.packets.give(packet) };
        let bytes = packet.len();
        here.counters.received += 1;
        here.counters.received_bytes += bytes as u64;
        if outside && self.police.bucket.take(core.now_ns, bytes).is_err() {
            return self.drop(core, at, Reason::Policed, packet);
        }
        here.capture(core, packet.bytes());
        here.grant_wish(core, self.slot, &mut packet, outside);
        if here.link.as_ref().is_some_and(|link| !link.up) {
            return self.drop(core, at, Reason::LinkDown, packet);
        }
        if bytes < ether::HEADER_BYTES {
            return self.drop(core, at, Reason::Runt, packet);
        }
        if ether::payload_len(packet.bytes()) > here.mtu as usize {
            return self.drop(core, at, Reason::TooBig, packet);
        }
        let Some(router) = &mut self.nodes[here.node].router else {
            return self.punt(core, at, None, packet);
        };
        for (matches, class) in &router.filters {
            if trace::matches(packet.bytes(), matches) {
                let class = *class;
                return self.punt(core, at, Some(class), packet);
            }
        }
        match router.distributor.pick(packet.bytes()) {
            Some(guest) => self.cross(core, at, guest, packet),
            None => self.drop(core, at, Reason::NoGuest, packet),
        }
    }

    /// Copies a frame into the memory of a guest.
    fn cross(&mut self, core: &mut Core, at: usize, guest: usize, packet: Packet) {
        let here = &mut self.ports[at];
        let (node, index) = (here.node, here.index);
        let Some(router) = &mut self.nodes[node].router else { return core.packets.give(packet) };
        let to = &mut router.guests[guest];
        let number = to.spec.number;
        let (link_at, tag) = match to.spec.attach {
            Attach::Runtime | Attach::Tap => (0, Some(Tag::deliver(index, packet.mark as u8))),
            Attach::Memif => (usize::from(index), None),
        };
        let Some(link) = &mut to.links[link_at] else {
            return self.drop(core, at, Reason::NoGuest, packet);
        };
        let completes = to.spec.attach == Attach::Runtime;
        if completes && to.outstanding.len() >= OUTSTANDING_MAX {
            return self.drop(core, at, Reason::GuestWindowFull, packet);
        }
        match link.push(tag, packet.bytes()) {
            Ok(true) => {}
            Ok(false) => return self.drop(core, at, Reason::GuestRingFull, packet),
            Err(fault) => {
                self.lose_guest(node, guest, link_at, core, Some(fault.to_string()));
                return self.drop(core, at, Reason::GuestGone, packet);
            }
        }
        to.stats.to_guest += 1;
        if completes {
            to.outstanding.push_back(index as u8);
            core.tracer.note(packet.mark, "distribute", || format!("to guest {number}"));
        } else {
            here.counters.consumed += 1;
            let detail = || format!("to guest {number}, which does not say what it does with it");
            core.tracer.end(packet.mark, "distribute", detail);
        }
        core.packets.give(packet);
    }

    /// Hands a frame to the node's TAP helper, within the limit of its class if it has one.
    pub(crate) fn punt(
        &mut self,
        core: &mut Core,
        at: usize,
        class: Option<PuntClass>,
        packet: Packet,
    ) {
        let here = &mut self.ports[at];
        let node = here.node;
        if let Some(class) = class
            && here.punts[class as usize].bucket.take(core.now_ns, packet.len()).is_err()
        {
            return self.drop(core, at, class.into(), packet);
        }
        let Some(tap) = &mut self.nodes[node].tap else {
            return self.drop(core, at, Reason::NoTap, packet);
        };
        match tap.push(Some(Tag::deliver(here.index, 0)), packet.bytes()) {
            Ok(true) => {
                here.counters.punted += 1;
                core.tracer.end(packet.mark, "punt", || {
                    format!(
                        "to the TAP of {}, {}",
                        here.name,
                        class.map_or("host", PuntClass::name)
                    )
                });
                core.packets.give(packet);
            }
            Ok(false) => self.drop(core, at, Reason::TapRingFull, packet),
            Err(fault) => {
                self.lose_tap(node, core, Some(fault.to_string()));
                self.drop(core, at, Reason::NoTap, packet);
            }
        }
    }

    /// Ends a frame, counted at a port under one reason.
    pub(crate) fn drop(&mut self, core: &mut Core, at: usize, reason: Reason, packet: Packet) {
        let port = &mut self.ports[at];
        port.counters.drop(reason);
        core.tracer.end(packet.mark, "drop", || format!("{} at {}", reason.name(), port.name));
        core.packets.give(packet);
    }
}

impl Port {
    /// Gives a copy to whoever captures here.
    pub(crate) fn capture(&mut self, core: &Core, frame: &[u8]) {
        if self.captures.is_empty() {
            return;
        }
        let (counters, wall_ns) = (&mut self.counters, core.wall_ns());
        self.captures.retain_mut(|sink| {
            if !sink.offer(wall_ns, frame) {
                counters.capture_missed += 1;
            }
            !sink.is_closed()
        });
    }

    /// Begins to follow `packet` if somebody wants to.
    fn grant_wish(&mut self, core: &mut Core, vnet: u16, packet: &mut Packet, outside: bool) {
        if let Some(wish) = self.wish.take_if(|wish| trace::matches(packet.bytes(), &wish.filter)) {
            packet.mark = core.tracer.start(vnet, wish);
            let bytes = packet.len();
            let by = if outside { "from outside" } else { "by a vlink of this node" };
            core.tracer.note(packet.mark, "receive", || format!("{bytes} bytes {by}"));
            core.tracer.note(packet.mark, "classify", || format!("port {}", self.name));
        } else if packet.mark != 0 {
            core.tracer.note(packet.mark, "receive", || format!("at port {}", self.name));
        }
    }
}
