//! Frames to the forwarding guests of a vrouter, shared out among them, or to a node's TAP: they are copied there.

use pdp_afxdp::Packet;
use pdp_proto::mux::Attach;
use pdp_wire::tag::{PuntClass, Tag};

use crate::core::Core;
use crate::counters::Reason;
use crate::peer::OUTSTANDING_MAX;
use crate::trace;
use crate::vnet::{Router, Vnet};

impl Vnet {
    /// Frames that there is room for in the guests behind `port`.
    pub fn room(&mut self, port: u16) -> usize {
        let Some(here) = self.ports.get(usize::from(port)) else { return usize::MAX };
        let Some(router) = &mut self.nodes[here.node].router else { return usize::MAX };
        router.distributor.room(&mut router.guests[..])
    }

    /// Frames to whoever is behind their ports.
    pub(crate) fn share(&mut self, core: &mut Core, batch: &[Packet]) {
        let mut batch = batch;
        while let [first, ..] = batch {
            let Some(node) = self.ports.get(usize::from(first.port)).map(|port| port.node) else {
                return;
            };
            let here = &self.nodes[node];
            let ports = here.first..here.first + here.count;
            let same = |packet: &&Packet| ports.contains(&usize::from(packet.port));
            let (run, behind) = batch.split_at(batch.iter().take_while(same).count());
            if here.router.is_some() {
                self.distribute(core, node, run);
            } else {
                run.iter().for_each(|packet| self.punt(core, None, packet));
            }
            batch = behind;
        }
    }

    /// Frames to the guests of a node.
    fn distribute(&mut self, core: &mut Core, node: usize, frames: &[Packet]) {
        let mut picks = std::mem::take(&mut core.scratch.picks);
        if let Some(Router { filters, distributor, guests, .. }) = &self.nodes[node].router
            && filters.is_empty()
            && distributor.pick_by_flow(frames.iter().map(Packet::bytes), &mut picks)
        {
            // Guest by guest, each once.
            for guest in 0..guests.len() {
                let theirs = frames.iter().zip(&picks).filter(|(_, pick)| **pick == guest as u16);
                self.cross(core, node, guest, theirs.map(|(packet, _)| packet));
            }
        } else {
            self.distribute_each(core, node, frames);
        }
        core.scratch.picks = picks;
    }

    /// The same where who gets a frame depends on what became of those before.
    fn distribute_each(&mut self, core: &mut Core, node: usize, frames: &[Packet]) {
        let mut frames = frames;
        while let [first, rest @ ..] = frames {
            let Some(router) = &mut self.nodes[node].router else { return };
            let filter = router.filters.iter().find(|(it, _)| trace::matches(first.bytes(), it));
            if let Some(&(_, class)) = filter {
                self.punt(core, Some(class), first);
                frames = rest;
                continue;
            }
            let pick = router.distributor.pick(first.bytes(), &mut router.guests[..]);
            let Some((guest, count)) = pick else {
                self.ports[usize::from(first.port)].end(&mut core.tracer, Reason::NoGuest, first);
                frames = rest;
                continue;
            };
            let count = if router.filters.is_empty() { count.min(frames.len()) } else { 1 };
            let (run, behind) = frames.split_at(count);
            self.cross(core, node, guest, run.iter());
            frames = behind;
        }
    }

    /// Copies frames of a node's ports into the memory of a guest.
    fn cross<'a>(
        &mut self,
        core: &mut Core,
        node: usize,
        guest: usize,
        frames: impl Iterator<Item = &'a Packet>,
    ) {
        let Self { nodes, ports, .. } = self;
        let Some(router) = &mut nodes[node].router else { return };
        let to = &mut router.guests[guest];
        let completes = to.spec.attach == Attach::Runtime;
        let has_tag = to.spec.attach != Attach::Memif;
        let window = if completes { OUTSTANDING_MAX } else { usize::MAX };
        let room = window.saturating_sub(to.outstanding.len());
        let (mut given, mut lost) = (0, None);
        let mut frames = frames.peekable();
        while let Some(port) = frames.peek().map(|packet| packet.port) {
            let here = &mut ports[usize::from(port)];
            // A program without tags has a ring for each port.
            let at = if has_tag { 0 } else { usize::from(here.index) };
            let (before, mut stopped_by) = (given, None);
            while let Some(packet) = frames.next_if(|packet| packet.port == port) {
                let tag =
                    if has_tag { Tag::deliver(here.index, packet.mark as u8).emit() } else { 0 };
                let pushed = match &mut to.links[at] {
                    _ if stopped_by.is_some() => Ok(false),
                    _ if given >= room => {
                        stopped_by = Some(Reason::GuestWindowFull);
                        Ok(false)
                    }
                    None => {
                        stopped_by = Some(Reason::NoGuest);
                        Ok(false)
                    }
                    Some(_) if lost.is_some() => Ok(false),
                    Some(link) => link.push(tag, packet.bytes()),
                };
                if let Ok(true) = pushed {
                    given += 1;
                    if packet.mark != 0 {
                        note_given(core, packet.mark, to.spec.number, completes);
                    }
                    continue;
                }
                if let Err(fault) = pushed {
                    lost = Some((at, fault.to_string()));
                }
                if lost.is_some() {
                    stopped_by = Some(Reason::GuestGone);
                }
                let reason = *stopped_by.get_or_insert(Reason::GuestRingFull);
                here.end(&mut core.tracer, reason, packet);
            }
            if completes && given > before {
                to.outstanding.push(here.index, given - before);
            } else if !completes {
                here.counters.consumed += (given - before) as u64;
            }
        }
        to.stats.to_guest += given as u64;
        if completes && router.distributor.is_ordered() {
            router.order.note(to.spec.number, given);
        }
        router.distributor.gave(given);
        if let Some((link, fault)) = lost {
            self.lose_guest(node, guest, link, core, Some(fault));
        }
    }

    /// Copies a frame to the TAP helper of its port's node, within the limit of its class if it has one.
    pub(crate) fn punt(&mut self, core: &mut Core, class: Option<PuntClass>, packet: &Packet) {
        let here = &mut self.ports[usize::from(packet.port)];
        let node = here.node;
        if let Some(class) = class
            && here.punts[class as usize].bucket.take(core.now_ns, packet.len()).is_err()
        {
            return here.end(&mut core.tracer, class.into(), packet);
        }
        let Some(tap) = &mut self.nodes[node].tap else {
            return here.end(&mut core.tracer, Reason::NoTap, packet);
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
            Ok(false) => here.end(&mut core.tracer, Reason::TapRingFull, packet),
            Err(fault) => {
                here.end(&mut core.tracer, Reason::NoTap, packet);
                self.lose_tap(node, core, Some(fault.to_string()));
            }
        }
    }
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
