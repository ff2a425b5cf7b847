//! Frames on their way along vlinks that are more than a wire between two ports or from one to the outside: into
//! segments, and from ends outside onward without a node between.

use pdp_afxdp::Packet;

use crate::core::Core;
use crate::counters::Reason;
use crate::packets::Batch;
use crate::segment::To;
use crate::vnet::{Onward, Vnet};

/// Frames that may wait for the vnet's next visit for a segment to have another one copied: what a visit
/// that is dear takes.
pub const FLOOD_FRAMES_MAX: usize = 4096;

impl Vnet {
    /// Takes frames out of `batch` that came by ends outside which are ports of their own. Those of a transit leave
    /// by its other end, those of a segment go to where it says.
    pub(crate) fn pass_on(&mut self, core: &mut Core, batch: &mut Batch) {
        let (mut onward, mut out) = (core.scratch.batch(), core.scratch.batch());
        let Self { ports, own_ports, .. } = self;
        onward.extend(batch.extract_if(.., |packet| {
            let at = usize::from(packet.port);
            own_ports.contains(&at) && ports[at].onward.is_some()
        }));
        for mut packet in onward.drain(..) {
            let here = &mut self.ports[usize::from(packet.port)];
            match here.onward {
                Some(Onward::Segment(at, end)) => self.enter(core, (at, end), packet, &mut out),
                Some(Onward::Out(to)) => {
                    here.counters.consumed += 1;
                    self.ports[usize::from(to)].counters.made += 1;
                    packet.port = to;
                    out.push(packet);
                }
                None => {}
            }
        }
        core.scratch.groups.by_port(self.own_ports.start, &mut out);
        self.leave(core, &mut out);
        core.scratch.spare.extend([onward, out]);
    }

    /// Frames of one port enter a segment by its end there. Empties `frames`.
    pub(crate) fn enter_all(&mut self, core: &mut Core, place: (u16, u8), frames: &mut Batch) {
        let mut out = core.scratch.batch();
        frames.drain(..).for_each(|packet| self.enter(core, place, packet, &mut out));
        core.scratch.groups.by_port(self.own_ports.start, &mut out);
        self.leave(core, &mut out);
        core.scratch.spare.push(out);
    }

    /// A frame of its port enters a segment by its end there. What is to leave by an end outside is added to `out`.
    #[inline]
    fn enter(&mut self, core: &mut Core, (at, end): (u16, u8), packet: Packet, out: &mut Batch) {
        let segment = &mut self.segments[usize::from(at)];
        let to = segment.forward(end, packet.bytes(), core.now_ns);
        let here = usize::from(packet.port);
        let reason = match to {
            To::Port(to) => {
                self.took(core, &packet);
                return self.bring(to, packet, out);
            }
            To::All => {
                let Some(last) = segment.others(end).last() else {
                    return self.ports[here].drop(core, Reason::NoOtherEnd, packet);
                };
                self.took(core, &packet);
                self.flood(core, (at, end), last, &packet, out);
                return self.bring(last, packet, out);
            }
            To::Nobody => Reason::NoOtherEnd,
            To::TooMany => Reason::FloodLimit,
        };
        self.ports[here].drop(core, reason, packet);
    }

    /// Counts a frame that its segment took.
    fn took(&mut self, core: &mut Core, packet: &Packet) {
        let at = usize::from(packet.port);
        let counters = &mut self.ports[at].counters;
        if self.own_ports.contains(&at) {
            counters.consumed += 1;
        } else {
            counters.sent += 1;
            counters.sent_bytes += packet.len() as u64;
        }
        let name = &self.ports[at].name;
        core.tracer.note(packet.mark, "send", || format!("into the segment of {name}"));
    }

    /// Brings a frame to the port at another end of its segment.
    #[inline]
    fn bring(&mut self, to: u16, mut packet: Packet, out: &mut Batch) {
        packet.port = to;
        if self.own_ports.contains(&usize::from(to)) {
            self.ports[usize::from(to)].counters.made += 1;
            out.push(packet);
        } else {
            self.local.push(packet);
        }
    }

    /// Brings copies of a frame to all other ends of its segment but `last`. One for which there is no packet has
    /// come to its end, and is dropped there.
    fn flood(
        &mut self,
        core: &mut Core,
        (at, end): (u16, u8),
        last: u16,
        packet: &Packet,
        out: &mut Batch,
    ) {
        let Self { segments, ports, own_ports, local, waiting, .. } = self;
        let mut copied = 0;
        for to in segments[usize::from(at)].others(end).filter(|to| *to != last) {
            copied += 1;
            core.tracer.copied(packet.mark);
            let there = &mut ports[usize::from(to)];
            let is_own = own_ports.contains(&usize::from(to));
            there.counters.made += u64::from(is_own);
            // As for frames that wait for a rate.
            let waits = local.len() + out.len();
            let room = waits < FLOOD_FRAMES_MAX && *waiting + waits < core.packets.free();
            let copy = if room { core.packets.copy_of(packet.bytes(), packet.mark) } else { None };
            let Some(copy) = copy else {
                if !is_own {
                    there.counters.received += 1;
                    there.counters.received_bytes += packet.len() as u64;
                }
                there.end(&mut core.tracer, Reason::NoPacket, packet);
                continue;
            };
            let queue = if is_own { &mut *out } else { &mut *local };
            queue.push(copy.at(to.into()));
        }
        ports[usize::from(packet.port)].counters.copied += copied;
    }
}
