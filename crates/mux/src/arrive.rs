//! Frames that arrived at a port, on their way to forwarding guests or to the node's TAP:
//! police, check, punt filters, distribute, cross.

use pdp_afxdp::Packet;
use pdp_proto::mux::Attach;
use pdp_wire::ether;
use pdp_wire::tag::{PuntClass, Tag};

use crate::core::Core;
use crate::counters::{PortCounters, Reason};
use crate::peer::OUTSTANDING_MAX;
use crate::trace;
use crate::vnet::{Port, Vnet};

impl Vnet {
    /// What vlinks inside the node brought in the last round. Returns how many frames.
    pub fn arrivals(&mut self, core: &mut Core) -> usize {
        if self.local.is_empty() {
            return 0;
        }
        let mut local = std::mem::take(&mut self.local);
        let mut run = std::mem::take(&mut core.scratch.run);
        let count = local.len();
        let mut arrived = local.drain(..).peekable();
        while let Some((port, packet)) = arrived.next() {
            run.push(packet);
            if arrived.peek().is_none_or(|(next, _)| *next != port) {
                self.arrive(core, port, &mut run, false);
            }
        }
        drop(arrived);
        core.scratch.run = run;
        // Whatever came meanwhile has its turn in the next round.
        local.append(&mut self.local);
        self.local = local;
        count
    }

    /// Frames at `port`; from outside the node they are policed. Empties `frames`.
    pub fn arrive(&mut self, core: &mut Core, port: u16, frames: &mut Vec<Packet>, outside: bool) {
        let at = usize::from(port);
        let Some(here) = self.ports.get_mut(at) else {
            return frames.drain(..).for_each(|packet| core.packets.give(packet));
        };
        here.counters.received += frames.len() as u64;
        let mut admitted = std::mem::take(&mut core.scratch.admitted);
        for packet in frames.drain(..) {
            here.counters.received_bytes += packet.len() as u64;
            let police = outside.then_some(&mut self.police.bucket);
            let is_policed = police.is_some_and(|it| it.take(core.now_ns, packet.len()).is_err());
            if is_policed {
                here.drop(core, Reason::Policed, packet);
            } else if let Some(packet) = here.admit(core, self.slot, packet, outside) {
                admitted.push(packet);
            }
        }
        self.distribute(core, at, &mut admitted);
        core.scratch.admitted = admitted;
    }

    /// Frames that there is room for in the guests behind `port`.
    pub fn room(&mut self, port: u16) -> usize {
        let Some(here) = self.ports.get(usize::from(port)) else { return usize::MAX };
        let Some(router) = &mut self.nodes[here.node].router else { return usize::MAX };
        router.distributor.room(&mut router.guests[..])
    }

    /// Admitted frames to the guests, or to the TAP.
    fn distribute(&mut self, core: &mut Core, at: usize, frames: &mut Vec<Packet>) {
        let node = self.ports[at].node;
        let mut frames = frames.drain(..);
        while let Some(first) = frames.as_slice().first() {
            let Some(router) = &mut self.nodes[node].router else {
                frames.for_each(|packet| self.punt(core, at, None, packet));
                return;
            };
            let wanted = router.filters.iter();
            let filter = wanted.into_iter().find(|(it, _)| trace::matches(first.bytes(), it));
            if let Some((_, class)) = filter {
                let class = *class;
                if let Some(packet) = frames.next() {
                    self.punt(core, at, Some(class), packet);
                }
                continue;
            }
            let pick = router.distributor.pick(first.bytes(), &mut router.guests[..]);
            let Some((guest, mut count)) = pick else {
                if let Some(packet) = frames.next() {
                    self.ports[at].drop(core, Reason::NoGuest, packet);
                }
                continue;
            };
            if !router.filters.is_empty() {
                count = 1;
            }
            self.cross(core, at, guest, frames.by_ref().take(count));
        }
    }

    /// Copies frames into the memory of a guest.
    fn cross(
        &mut self,
        core: &mut Core,
        at: usize,
        guest: usize,
        frames: impl Iterator<Item = Packet>,
    ) {
        let here = &mut self.ports[at];
        let (node, index) = (here.node, here.index);
        let Some(router) = &mut self.nodes[node].router else {
            return frames.for_each(|packet| core.packets.give(packet));
        };
        let to = &mut router.guests[guest];
        let mut room = OUTSTANDING_MAX - to.outstanding.len().min(OUTSTANDING_MAX);
        let number = to.spec.number;
        let (completes, has_tag) = match to.spec.attach {
            Attach::Runtime => (true, true),
            Attach::Tap => (false, true),
            Attach::Memif => (false, false),
        };
        let link_at = if has_tag { 0 } else { usize::from(index) };
        let mut fault = None;
        let mut given = 0;
        for packet in frames {
            let Some(link) = to.links[link_at].as_mut().filter(|_| fault.is_none()) else {
                here.drop(core, Reason::NoGuest, packet);
                continue;
            };
            if completes && room == 0 {
                here.drop(core, Reason::GuestWindowFull, packet);
                continue;
            }
            let tag = if has_tag { Tag::deliver(index, packet.mark as u8).emit() } else { 0 };
            match link.push(tag, packet.bytes()) {
                Ok(true) => {
                    (given, room) = (given + 1, room - 1);
                    note_given(core, packet.mark, number, completes);
                    core.packets.give(packet);
                }
                Ok(false) => here.drop(core, Reason::GuestRingFull, packet),
                Err(it) => {
                    fault = Some(it.to_string());
                    here.drop(core, Reason::GuestGone, packet);
                }
            }
        }
        to.stats.to_guest += given as u64;
        if completes && given > 0 {
            to.outstanding.push(index, given);
            if router.distributor.is_ordered() {
                router.order.note(number, given);
            }
        } else {
            here.counters.consumed += given as u64;
        }
        router.distributor.gave(given);
        if fault.is_some() {
            self.lose_guest(node, guest, link_at, core, fault);
        }
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
            return here.drop(core, class.into(), packet);
        }
        let Some(tap) = &mut self.nodes[node].tap else {
            return here.drop(core, Reason::NoTap, packet);
        };
        match tap.push(Tag::deliver(here.index, 0).emit(), packet.bytes()) {
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
            Ok(false) => here.drop(core, Reason::TapRingFull, packet),
            Err(fault) => {
                here.drop(core, Reason::NoTap, packet);
                self.lose_tap(node, core, Some(fault.to_string()));
            }
        }
    }
}

/// Ends a frame at the port that has these counters and this name.
pub(crate) fn end(
    counters: &mut PortCounters,
    name: &str,
    core: &mut Core,
    reason: Reason,
    packet: Packet,
) {
    counters.drop(reason);
    core.tracer.end(packet.mark, "drop", || format!("{} at {name}", reason.name()));
    core.packets.give(packet);
}

/// Of a traced frame.
fn note_given(core: &mut Core, mark: u32, guest: u32, completes: bool) {
    if mark == 0 {
    } else if completes {
        core.tracer.note(mark, "distribute", || format!("to guest {guest}"));
    } else {
        let detail = || format!("to guest {guest}, which does not say what it does with it");
        core.tracer.end(mark, "distribute", detail);
    }
}

impl Port {
    /// What may go on from here: frames that the port takes now.
    fn admit(
        &mut self,
        core: &mut Core,
        vnet: u16,
        mut packet: Packet,
        outside: bool,
    ) -> Option<Packet> {
        self.capture(core, packet.bytes());
        if self.wish.is_some() || packet.mark != 0 {
            self.grant_wish(core, vnet, &mut packet, outside);
        }
        let reason = if self.link.as_ref().is_some_and(|link| !link.up) {
            Reason::LinkDown
        } else if let Err(reason) = self.fits(&packet) {
            reason
        } else {
            return Some(packet);
        };
        self.drop(core, reason, packet);
        None
    }

    /// Whether a frame is of a length that the port carries.
    #[inline]
    pub(crate) fn fits(&self, packet: &Packet) -> Result<(), Reason> {
        if packet.len() < ether::HEADER_BYTES {
            Err(Reason::Runt)
        } else if packet.len() > ether::HEADER_BYTES + self.mtu as usize
            && ether::payload_len(packet.bytes()) > self.mtu as usize
        {
            Err(Reason::TooBig)
        } else {
            Ok(())
        }
    }

    /// Ends a frame, counted here under one reason.
    pub(crate) fn drop(&mut self, core: &mut Core, reason: Reason, packet: Packet) {
        end(&mut self.counters, &self.name, core, reason, packet);
    }

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
