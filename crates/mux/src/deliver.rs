//! Distributes frames to the consumers behind their ports: a
//! vrouter's engine, its forwarding guests, or a node's TAP.

use pdp_afxdp::PacketBuffer;
use pdp_proto::mux::AttachMode;
use pdp_proto::trace::matches;
use pdp_wire::tag::PuntClass;

use crate::core::Core;
use crate::counters::Reason;
use crate::packets::PacketBatch;
use crate::peer::OUTSTANDING_MAX;
use crate::vnet::{MuxNode, MuxRouter, MuxVnet};

/// Free slots in a TAP helper's ring (of 512) that other punts leave to routing
/// protocols and neighbour discovery. Without them a flood would cost adjacencies.
const TAP_KEPT: usize = 128;

impl MuxVnet {
    /// Returns how many frames the guests behind `port` can take.
    pub fn guest_space(&mut self, port: u16) -> usize {
        let Some(here) = self.ports.get(usize::from(port)) else { return usize::MAX };
        let Some(router) = &mut self.nodes[here.node].router else { return usize::MAX };
        router.distributor.room(&mut router.guests[..])
    }

    /// Passes frames to the consumers behind their ports. May change
    /// the order of `batch`, and removes frames that engines handled.
    pub(crate) fn distribute_batch(&mut self, core: &mut Core, batch: &mut PacketBatch) {
        if self.has_engines {
            self.forward(core, batch);
        }
        let mut batch = &mut batch[..];
        while let [first, ..] = batch {
            let Some(node) = self.ports.get(usize::from(first.port)).map(|port| port.node) else {
                return;
            };
            let here = &self.nodes[node];
            let ports = here.first..here.first + here.count;
            let same = |packet: &&PacketBuffer| ports.contains(&usize::from(packet.port));
            let (run, behind) = batch.split_at_mut(batch.iter().take_while(same).count());
            if here.router.is_some() {
                self.distribute_to_guests(core, node, run);
            } else {
                run.iter().for_each(|packet| self.punt(core, None, packet));
            }
            batch = behind;
        }
    }

    /// Passes frames to the guests of a node.
    fn distribute_to_guests(&mut self, core: &mut Core, node: usize, frames: &mut [PacketBuffer]) {
        let mut groups = std::mem::take(&mut core.scratch.groups);
        if let Some(MuxRouter { filters, distributor, .. }) = &self.nodes[node].router
            && filters.is_empty()
            && distributor
                .pick_by_flow(frames.iter().map(PacketBuffer::bytes), &mut groups.destinations)
        {
            groups.group(frames);
            let mut frames = &frames[..];
            for run in groups.destinations.chunk_by(|a, b| a == b) {
                let (theirs, behind) = frames.split_at(run.len());
                self.give_to_guest(core, node, run[0].into(), theirs);
                frames = behind;
            }
        } else {
            self.distribute_each(core, node, frames);
        }
        core.scratch.groups = groups;
    }

    /// Passes frames one by one, if the guest of a frame depends on the frames before it.
    fn distribute_each(&mut self, core: &mut Core, node: usize, frames: &[PacketBuffer]) {
        let mut frames = frames;
        while let [first, rest @ ..] = frames {
            let Some(router) = &mut self.nodes[node].router else { return };
            let filter = router.filters.iter().find(|(it, _)| matches(first.bytes(), it));
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
            self.give_to_guest(core, node, guest, run);
            frames = behind;
        }
    }

    /// Gives frames of a node's ports to a guest.
    fn give_to_guest(
        &mut self,
        core: &mut Core,
        node: usize,
        guest: usize,
        frames: &[PacketBuffer],
    ) {
        let Some(router) = &self.nodes[node].router else { return };
        if router.guests[guest].spec.attach == AttachMode::Memif {
            // A program without tags has a channel for each port.
            for run in frames.chunk_by(|a, b| a.port == b.port) {
                let channel = self.ports[usize::from(run[0].port)].index.into();
                self.push(core, node, guest, channel, run);
            }
        } else {
            self.push(core, node, guest, 0, frames);
        }
    }

    /// Gives frames to a guest by one of its channels.
    fn push(
        &mut self,
        core: &mut Core,
        node: usize,
        guest: usize,
        channel: usize,
        frames: &[PacketBuffer],
    ) {
        let Self { nodes, ports, .. } = self;
        let first = nodes[node].first as u16;
        let Some(router) = &mut nodes[node].router else { return };
        let to = &mut router.guests[guest];
        let completes = to.spec.attach == AttachMode::Runtime;
        let window = if completes {
            OUTSTANDING_MAX.saturating_sub(to.outstanding.len())
        } else {
            usize::MAX
        };
        let fit = &frames[..frames.len().min(window)];
        let (given, stopped_by, fault) = match &mut to.links[channel] {
            None => (0, Reason::NoGuest, None),
            Some(link) => match link.channel.push(first, fit) {
                Ok(given) if given < fit.len() => (given, Reason::GuestRingFull, None),
                Ok(given) => (given, Reason::GuestWindowFull, None),
                Err(fault) => (0, Reason::GuestGone, Some(fault)),
            },
        };
        let (given, refused) = frames.split_at(given);
        to.stats.to_guest += given.len() as u64;
        if completes {
            to.outstanding.push(first, given);
            if router.distributor.is_ordered() {
                router.order.note(to.spec.number, given.len());
            }
        } else {
            for packet in given {
                ports[usize::from(packet.port)].counters.stats.consumed += 1;
            }
        }
        for packet in given.iter().filter(|packet| packet.mark != 0) {
            note_given(core, packet.mark, to.spec.number, completes);
        }
        router.distributor.gave(given.len());
        for packet in refused {
            ports[usize::from(packet.port)].end(&mut core.tracer, stopped_by, packet);
        }
        if fault.is_some() {
            self.disconnect(node, Some((guest, channel)), core, fault);
        }
    }

    /// Copies a frame to the TAP helper of its port's node,
    /// within the punt limit of its class if it has one.
    pub(crate) fn punt(
        &mut self,
        core: &mut Core,
        class: Option<PuntClass>,
        packet: &PacketBuffer,
    ) {
        let here = &mut self.ports[usize::from(packet.port)];
        let node = here.node;
        if let Some(class) = class
            && here.punts[class as usize].bucket.take(core.now_ns, packet.len()).is_err()
        {
            here.counters.limit(class.into(), core.now_ns);
            return here.end(&mut core.tracer, class.into(), packet);
        }
        let MuxNode { tap, first, .. } = &mut self.nodes[node];
        let Some(tap) = tap else {
            return here.end(&mut core.tracer, Reason::NoTap, packet);
        };
        let kept = class.map_or(0, kept);
        let given = match kept > 0 && tap.channel.room() <= kept {
            true => Ok(0),
            false => tap.channel.push(*first as u16, std::slice::from_ref(packet)),
        };
        match given {
            Ok(1) => {
                here.counters.stats.punted += 1;
                core.tracer.end(packet.mark, "punt", || {
                    format!(
                        "to the TAP of {}, {}",
                        here.name,
                        class.map_or("host", PuntClass::name)
                    )
                });
            }
            Ok(_) => here.end(&mut core.tracer, Reason::TapRingFull, packet),
            Err(fault) => {
                here.end(&mut core.tracer, Reason::NoTap, packet);
                self.disconnect(node, None, core, Some(fault));
            }
        }
    }
}

/// Returns the free slots that packets of this class leave in a TAP helper's ring.
fn kept(class: PuntClass) -> usize {
    match class {
        PuntClass::Local | PuntClass::Exception | PuntClass::Hook => TAP_KEPT,
        PuntClass::Neighbour | PuntClass::Control => 0,
    }
}

/// Notes the guest of a traced frame.
fn note_given(core: &mut Core, mark: u32, guest: u32, completes: bool) {
    if completes {
        core.tracer.note(mark, "distribute", || format!("to guest {guest}"));
    } else {
        let detail = || format!("to guest {guest}, which sends no completions");
        core.tracer.end(mark, "distribute", detail);
    }
}
