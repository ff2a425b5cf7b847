//! Frames on their way along vlinks that are more than a wire between two ports or from one to the outside: into
//! segments, and from ends outside onward without a node between.

use std::mem;

use pdp_afxdp::Packet;

use crate::core::Core;
use crate::counters::Reason;
use crate::leave::Row;
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
        let goes = |packet: &Packet| {
            let at = usize::from(packet.port);
            own_ports.contains(&at) && ports[at].onward.is_some()
        };
        if batch.chunk_by(|a, b| a.port == b.port).all(|run| goes(&run[0])) {
            // Nothing has to be moved.
            mem::swap(&mut onward, batch);
        } else {
            onward.extend(batch.extract_if(.., |packet| goes(packet)));
        }
        self.by_row(core, &mut onward, |vnet, core, row, frames| {
            let here = &mut vnet.ports[usize::from(row.port)];
            match here.onward {
                Some(Onward::Segment(at, end)) => {
                    vnet.enter(core, (at, end), row, frames, &mut out);
                }
                Some(Onward::Out(to)) => {
                    here.counters.consumed += row.frames as u64;
                    frames.iter_mut().for_each(|packet| packet.port = to);
                    out.append(frames);
                }
                None => {}
            }
        });
        self.leave_outside(core, &mut out);
        core.scratch.spare.extend([onward, out]);
    }

    /// A row of frames enters a segment by its end there. Empties `frames`.
    pub(crate) fn enter_all(
        &mut self,
        core: &mut Core,
        place: (u16, u8),
        row: Row,
        frames: &mut Batch,
    ) {
        let mut out = core.scratch.batch();
        self.enter(core, place, row, frames, &mut out);
        self.leave_outside(core, &mut out);
        core.scratch.spare.push(out);
    }

    /// Frames that vlinks brought to their ends outside leave there. Empties `out`.
    fn leave_outside(&mut self, core: &mut Core, out: &mut Batch) {
        core.scratch.groups.by_port(self.own_ports.start, out);
        for run in out.chunk_by(|a, b| a.port == b.port) {
            self.ports[usize::from(run[0].port)].counters.made += run.len() as u64;
        }
        self.leave(core, out);
    }

    /// A row of frames enters a segment by its end there. What is to leave by ends outside is added to `out`. Empties
    /// `frames`.
    fn enter(
        &mut self,
        core: &mut Core,
        (at, end): (u16, u8),
        row: Row,
        frames: &mut Batch,
        out: &mut Batch,
    ) {
        let segment = &mut self.segments[usize::from(at)];
        let mut fates = mem::take(&mut core.scratch.fates);
        let mut all_known = true;
        for packet in &mut *frames {
            let to = segment.forward(end, packet.bytes(), core.now_ns);
            match to {
                To::Port(port) => packet.arrive_at(port),
                To::All | To::Nobody | To::TooMany => all_known = false,
            }
            fates.push(to);
        }
        if all_known {
            self.took(core, row.port, row.mark, row.frames, row.bytes);
            self.bring(frames, out);
        } else {
            let mut one = core.scratch.batch();
            for (mut packet, to) in frames.drain(..).zip(&fates) {
                // Of a flooded frame: the last end that it goes to, where it goes itself.
                let others = || self.segments[usize::from(at)].others(end);
                let last = match to {
                    To::Port(_) => Ok(None),
                    To::All => others().last().map(Some).ok_or(Reason::NoOtherEnd),
                    To::Nobody => Err(Reason::NoOtherEnd),
                    To::TooMany => Err(Reason::FloodLimit),
                };
                let last = match last {
                    Ok(last) => last,
                    Err(reason) => {
                        let here = &mut self.ports[usize::from(row.port)];
                        if reason == Reason::FloodLimit {
                            here.counters.limit(reason, core.now_ns);
                        }
                        here.drop(core, reason, packet);
                        continue;
                    }
                };
                self.took(core, row.port, row.mark, 1, packet.len());
                if let Some(last) = last {
                    self.flood(core, (at, end), last, &packet, out);
                    packet.arrive_at(last);
                }
                one.push(packet);
                self.bring(&mut one, out);
            }
            core.scratch.spare.push(one);
        }
        fates.clear();
        core.scratch.fates = fates;
    }

    /// Counts frames that the segment of a port took.
    fn took(&mut self, core: &mut Core, port: u16, mark: u32, frames: usize, bytes: usize) {
        let at = usize::from(port);
        let counters = &mut self.ports[at].counters;
        if self.own_ports.contains(&at) {
            counters.consumed += frames as u64;
        } else {
            counters.sent += frames as u64;
            counters.sent_bytes += bytes as u64;
        }
        let name = &self.ports[at].name;
        core.tracer.note(mark, "send", || format!("into the segment of {name}"));
    }

    /// Brings frames to the ports at other ends of their segment, which they have already. Empties `frames`.
    #[inline]
    fn bring(&mut self, frames: &mut Batch, out: &mut Batch) {
        let Self { own_ports, local, .. } = self;
        if own_ports.len() < self.ports.len() {
            let inside = |packet: &mut Packet| !own_ports.contains(&usize::from(packet.port));
            local.extend(frames.extract_if(.., inside));
        }
        out.append(frames);
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
        let waiting = self.buffers.beside(self.waiting);
        let Self { segments, ports, own_ports, local, .. } = self;
        let mut copied = 0;
        for to in segments[usize::from(at)].others(end).filter(|to| *to != last) {
            copied += 1;
            core.tracer.copied(packet.mark);
            let is_own = own_ports.contains(&usize::from(to));
            // As for frames that wait for a rate.
            let waits = local.len() + out.len();
            let room = waits < FLOOD_FRAMES_MAX && waiting + waits < core.packets.free();
            let copy = if room { core.packets.copy_of(packet.bytes(), packet.mark) } else { None };
            let Some(copy) = copy else {
                let there = &mut ports[usize::from(to)];
                if is_own {
                    there.counters.made += 1;
                } else {
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
