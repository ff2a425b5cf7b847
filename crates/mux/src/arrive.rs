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

/// Bytes that a frame which arrives may have beyond the MTU: a check sequence that was captured with it,
/// or a tag. Linux takes as many (`is_skb_forwardable`).
const FCS_BYTES: usize = 4;

impl Vnet {
    /// What was given to the vnet's ports, and what vlinks inside the node brought in the last round.
    /// Returns how many frames.
    pub fn arrivals(&mut self, core: &mut Core) -> usize {
        let mut count = 0;
        while let Some(port) = self.given_to.pop() {
            let at = usize::from(port);
            let mut frames = std::mem::take(&mut self.ports[at].given);
            count += frames.len();
            self.arrive(core, port, &mut frames, true);
            self.ports[at].given = frames;
        }
        count + self.local_arrivals(core)
    }

    fn local_arrivals(&mut self, core: &mut Core) -> usize {
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

    /// Gives a frame from outside to `port`, where it arrives when the vnet is looked at, with all
    /// others that came meanwhile. Returns it if there is no such port.
    #[inline]
    pub fn give(&mut self, port: u16, packet: Packet) -> Result<(), Packet> {
        let Some(here) = self.ports.get_mut(usize::from(port)) else { return Err(packet) };
        if here.given.is_empty() {
            self.given_to.push(port);
        }
        here.given.push(packet);
        Ok(())
    }

    /// Frames at `port`; from outside the node they are policed. Empties `frames`.
    pub fn arrive(&mut self, core: &mut Core, port: u16, frames: &mut Vec<Packet>, outside: bool) {
        let at = usize::from(port);
        let Some(here) = self.ports.get_mut(at) else { return core.packets.give_all(frames) };
        here.counters.received += frames.len() as u64;
        here.counters.received_bytes += frames.iter().map(|it| it.len() as u64).sum::<u64>();
        let bucket = &mut self.police.bucket;
        if outside && !bucket.is_unlimited() {
            let now_ns = core.now_ns;
            let policed = |packet: &mut Packet| bucket.take(now_ns, packet.len()).is_err();
            for packet in frames.extract_if(.., policed) {
                here.drop(core, Reason::Policed, packet);
            }
        }
        here.look(core, self.slot, frames, outside);
        if here.link.as_ref().is_some_and(|link| !link.up) {
            frames.drain(..).for_each(|packet| here.drop(core, Reason::LinkDown, packet));
        }
        here.fit(core, frames, FCS_BYTES);
        self.distribute(core, at, frames);
        core.packets.give_all(frames);
    }

    /// Frames that there is room for in the guests behind `port`.
    pub fn room(&mut self, port: u16) -> usize {
        let Some(here) = self.ports.get(usize::from(port)) else { return usize::MAX };
        let Some(router) = &mut self.nodes[here.node].router else { return usize::MAX };
        router.distributor.room(&mut router.guests[..])
    }

    /// Frames to the guests, or to the TAP: they are copied there.
    fn distribute(&mut self, core: &mut Core, at: usize, frames: &[Packet]) {
        let node = self.ports[at].node;
        let mut frames = frames;
        while let [first, rest @ ..] = frames {
            let Some(router) = &mut self.nodes[node].router else {
                return frames.iter().for_each(|packet| self.punt(core, at, None, packet));
            };
            let filter = router.filters.iter().find(|(it, _)| trace::matches(first.bytes(), it));
            if let Some(&(_, class)) = filter {
                self.punt(core, at, Some(class), first);
                frames = rest;
                continue;
            }
            let pick = router.distributor.pick(first.bytes(), &mut router.guests[..]);
            let Some((guest, count)) = pick else {
                self.ports[at].end(core, Reason::NoGuest, first);
                frames = rest;
                continue;
            };
            let count = if router.filters.is_empty() { count.min(frames.len()) } else { 1 };
            let (run, behind) = frames.split_at(count);
            self.cross(core, at, guest, run);
            frames = behind;
        }
    }

    /// Copies frames into the memory of a guest.
    fn cross(&mut self, core: &mut Core, at: usize, guest: usize, frames: &[Packet]) {
        let here = &mut self.ports[at];
        let (node, index) = (here.node, here.index);
        let Some(router) = &mut self.nodes[node].router else { return };
        let to = &mut router.guests[guest];
        let number = to.spec.number;
        let (completes, has_tag) = match to.spec.attach {
            Attach::Runtime => (true, true),
            Attach::Tap => (false, true),
            Attach::Memif => (false, false),
        };
        let link_at = if has_tag { 0 } else { usize::from(index) };
        let Some(link) = &mut to.links[link_at] else {
            return frames.iter().for_each(|packet| here.end(core, Reason::NoGuest, packet));
        };
        let window = if completes { OUTSTANDING_MAX } else { usize::MAX };
        let room = window.saturating_sub(to.outstanding.len());
        let (mut given, mut fault, mut stopped_by) = (0, None, Reason::GuestWindowFull);
        for packet in frames.iter().take(room) {
            let tag = if has_tag { Tag::deliver(index, packet.mark as u8).emit() } else { 0 };
            match link.push(tag, packet.bytes()) {
                Ok(true) => given += 1,
                Ok(false) => {
                    stopped_by = Reason::GuestRingFull;
                    break;
                }
                Err(it) => {
                    (fault, stopped_by) = (Some(it.to_string()), Reason::GuestGone);
                    break;
                }
            }
        }
        let (crossed, refused) = frames.split_at(given);
        for packet in crossed.iter().filter(|packet| packet.mark != 0) {
            note_given(core, packet.mark, number, completes);
        }
        refused.iter().for_each(|packet| here.end(core, stopped_by, packet));
        to.stats.to_guest += given as u64;
        if !completes {
            here.counters.consumed += given as u64;
        } else if given > 0 {
            to.outstanding.push(index, given);
            if router.distributor.is_ordered() {
                router.order.note(number, given);
            }
        }
        router.distributor.gave(given);
        if fault.is_some() {
            self.lose_guest(node, guest, link_at, core, fault);
        }
    }

    /// Copies a frame to the node's TAP helper, within the limit of its class if it has one.
    pub(crate) fn punt(
        &mut self,
        core: &mut Core,
        at: usize,
        class: Option<PuntClass>,
        packet: &Packet,
    ) {
        let here = &mut self.ports[at];
        let node = here.node;
        if let Some(class) = class
            && here.punts[class as usize].bucket.take(core.now_ns, packet.len()).is_err()
        {
            return here.end(core, class.into(), packet);
        }
        let Some(tap) = &mut self.nodes[node].tap else {
            return here.end(core, Reason::NoTap, packet);
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
            }
            Ok(false) => here.end(core, Reason::TapRingFull, packet),
            Err(fault) => {
                here.end(core, Reason::NoTap, packet);
                self.lose_tap(node, core, Some(fault.to_string()));
            }
        }
    }
}

/// Ends the frame with this mark at the port with these counters and this name.
pub(crate) fn end(
    counters: &mut PortCounters,
    name: &str,
    core: &mut Core,
    reason: Reason,
    mark: u32,
) {
    counters.drop(reason);
    core.tracer.end(mark, "drop", || format!("{} at {name}", reason.name()));
}

/// Of a traced frame.
fn note_given(core: &mut Core, mark: u32, guest: u32, completes: bool) {
    if completes {
        core.tracer.note(mark, "distribute", || format!("to guest {guest}"));
    } else {
        let detail = || format!("to guest {guest}, which does not say what it does with it");
        core.tracer.end(mark, "distribute", detail);
    }
}

impl Port {
    /// Shows frames that arrived to captures and traces.
    fn look(&mut self, core: &mut Core, vnet: u16, frames: &mut [Packet], outside: bool) {
        self.capture(core, frames);
        for packet in frames {
            if self.wish.is_some() || packet.mark != 0 {
                self.grant_wish(core, vnet, packet, outside);
            }
        }
    }

    /// Drops frames that are too short, or longer than the port's MTU by more than `spare` bytes.
    #[inline]
    pub(crate) fn fit(&mut self, core: &mut Core, frames: &mut Vec<Packet>, spare: usize) {
        let mtu = self.mtu as usize + spare;
        let surely = ether::HEADER_BYTES..=ether::HEADER_BYTES + mtu;
        let fits = |packet: &Packet| {
            surely.contains(&packet.len())
                || packet.len() >= ether::HEADER_BYTES && ether::payload_len(packet.bytes()) <= mtu
        };
        if !frames.iter().all(fits) {
            for packet in frames.extract_if(.., |packet| !fits(packet)) {
                let short = packet.len() < ether::HEADER_BYTES;
                self.drop(core, if short { Reason::Runt } else { Reason::TooBig }, packet);
            }
        }
    }

    /// Ends a frame, counted here under one reason; the packet goes home.
    pub(crate) fn drop(&mut self, core: &mut Core, reason: Reason, packet: Packet) {
        self.end(core, reason, &packet);
        core.packets.give(packet);
    }

    /// Ends a frame, counted here under one reason.
    pub(crate) fn end(&mut self, core: &mut Core, reason: Reason, packet: &Packet) {
        end(&mut self.counters, &self.name, core, reason, packet.mark);
    }

    /// Gives copies to whoever captures here.
    pub(crate) fn capture(&mut self, core: &Core, frames: &[Packet]) {
        if self.captures.is_empty() {
            return;
        }
        let (counters, wall_ns) = (&mut self.counters, core.wall_ns());
        self.captures.retain_mut(|sink| {
            let missed = frames.iter().filter(|packet| !sink.offer(wall_ns, packet.bytes()));
            counters.capture_missed += missed.count() as u64;
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
