//! Relays frames along vlinks that are more than a wire between two ports or from a port to the
//! outside. These are segments, and transits between external ends without a node between them.

use std::mem;

use pdp_afxdp::PacketBuffer;

use crate::core::Core;
use crate::counters::Reason;
use crate::egress::PortBurst;
use crate::packets::PacketBatch;
use crate::segment::SegmentVerdict;
use crate::vnet::{MuxVnet, RelayTarget};

/// Frames that may wait for the vnet's next visit. Beyond them a
/// segment makes no more copies: one expensive visit takes this many.
pub const FLOOD_FRAMES_MAX: usize = 4096;

impl MuxVnet {
    /// Takes the frames out of `batch` that arrived at external ends
    /// which are ports of their own. Frames of a transit leave by its
    /// other end. Frames of a segment go where the segment forwards them.
    pub(crate) fn relay(&mut self, core: &mut Core, batch: &mut PacketBatch) {
        let (mut relayed, mut out) = (core.scratch.batch(), core.scratch.batch());
        let Self { ports, own_ports, .. } = self;
        let goes = |packet: &PacketBuffer| {
            let at = usize::from(packet.port);
            own_ports.contains(&at) && ports[at].relay.is_some()
        };
        if batch.chunk_by(|a, b| a.port == b.port).all(|run| goes(&run[0])) {
            // All frames go; swap instead of moving them.
            mem::swap(&mut relayed, batch);
        } else {
            relayed.extend(batch.extract_if(.., |packet| goes(packet)));
        }
        self.by_burst(core, &mut relayed, |vnet, core, row, frames| {
            let here = &mut vnet.ports[usize::from(row.port)];
            match here.relay {
                Some(RelayTarget::Segment(at, end)) => {
                    vnet.enter(core, (at, end), row, frames, &mut out);
                }
                Some(RelayTarget::Out(to)) => {
                    here.counters.stats.consumed += row.frames as u64;
                    frames.iter_mut().for_each(|packet| packet.port = to);
                    out.append(frames);
                }
                None => {}
            }
        });
        self.egress_external(core, &mut out);
        core.scratch.spare.extend([relayed, out]);
    }

    /// Passes a burst into a segment by its end there, and
    /// sends what leaves by external ends. Empties `frames`.
    pub(crate) fn enter_all(
        &mut self,
        core: &mut Core,
        place: (u16, u8),
        row: PortBurst,
        frames: &mut PacketBatch,
    ) {
        let mut out = core.scratch.batch();
        self.enter(core, place, row, frames, &mut out);
        self.egress_external(core, &mut out);
        core.scratch.spare.push(out);
    }

    /// Sends frames that vlinks delivered to their external ends. Empties `out`.
    fn egress_external(&mut self, core: &mut Core, out: &mut PacketBatch) {
        core.scratch.groups.by_port(self.own_ports.start, out);
        for run in out.chunk_by(|a, b| a.port == b.port) {
            self.ports[usize::from(run[0].port)].counters.stats.made += run.len() as u64;
        }
        self.egress(core, out);
    }

    /// Passes a burst into a segment by its end there. Adds the
    /// frames that leave by external ends to `out`. Empties `frames`.
    fn enter(
        &mut self,
        core: &mut Core,
        (at, end): (u16, u8),
        row: PortBurst,
        frames: &mut PacketBatch,
        out: &mut PacketBatch,
    ) {
        let segment = &mut self.segments[usize::from(at)];
        let mut verdicts = mem::take(&mut core.scratch.segment_verdicts);
        let mut all_known = true;
        for packet in &mut *frames {
            let to = segment.forward(end, packet.bytes(), core.now_ns);
            match to {
                SegmentVerdict::Port(port) => packet.arrive_at(port),
                SegmentVerdict::All | SegmentVerdict::Nobody | SegmentVerdict::TooMany => {
                    all_known = false
                }
            }
            verdicts.push(to);
        }
        if all_known {
            self.took(core, row.port, row.mark, row.frames, row.bytes);
            self.deliver(frames, out);
        } else {
            let mut one = core.scratch.batch();
            for (mut packet, to) in frames.drain(..).zip(&verdicts) {
                // For a flooded frame, the last of its ends. The
                // frame itself goes there, and copies to the others.
                let others = || self.segments[usize::from(at)].others(end);
                let last = match to {
                    SegmentVerdict::Port(_) => Ok(None),
                    SegmentVerdict::All => others().last().map(Some).ok_or(Reason::NoOtherEnd),
                    SegmentVerdict::Nobody => Err(Reason::NoOtherEnd),
                    SegmentVerdict::TooMany => Err(Reason::FloodLimit),
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
                self.deliver(&mut one, out);
            }
            core.scratch.spare.push(one);
        }
        verdicts.clear();
        core.scratch.segment_verdicts = verdicts;
    }

    /// Counts frames that a port's segment took.
    fn took(&mut self, core: &mut Core, port: u16, mark: u32, frames: usize, bytes: usize) {
        let at = usize::from(port);
        let counters = &mut self.ports[at].counters;
        if self.own_ports.contains(&at) {
            counters.stats.consumed += frames as u64;
        } else {
            counters.stats.sent += frames as u64;
            counters.stats.sent_bytes += bytes as u64;
        }
        let name = &self.ports[at].name;
        core.tracer.note(mark, "send", || format!("into the segment of {name}"));
    }

    /// Delivers frames to the ports at other ends of their
    /// segment, which the frames already name. Empties `frames`.
    #[inline]
    fn deliver(&mut self, frames: &mut PacketBatch, out: &mut PacketBatch) {
        let Self { own_ports, local, .. } = self;
        if own_ports.len() < self.ports.len() {
            let inside = |packet: &mut PacketBuffer| !own_ports.contains(&usize::from(packet.port));
            local.extend(frames.extract_if(.., inside));
        }
        out.append(frames);
    }

    /// Delivers copies of a frame to all other ends of its segment except `last`. A
    /// copy without a free packet counts as delivered, and is dropped at its end.
    fn flood(
        &mut self,
        core: &mut Core,
        (at, end): (u16, u8),
        last: u16,
        packet: &PacketBuffer,
        out: &mut PacketBatch,
    ) {
        let waiting = self.buffers.beside(self.waiting);
        let Self { segments, ports, own_ports, local, .. } = self;
        let mut copied = 0;
        for to in segments[usize::from(at)].others(end).filter(|to| *to != last) {
            copied += 1;
            core.tracer.copied(packet.mark);
            let is_own = own_ports.contains(&usize::from(to));
            // The same limit as for frames that wait for a rate.
            let waits = local.len() + out.len();
            let room = waits < FLOOD_FRAMES_MAX && waiting + waits < core.packets.free();
            let copy = if room { core.packets.copy_of(packet.bytes(), packet.mark) } else { None };
            let Some(copy) = copy else {
                let far_port = &mut ports[usize::from(to)];
                if is_own {
                    far_port.counters.stats.made += 1;
                } else {
                    far_port.counters.stats.received += 1;
                    far_port.counters.stats.received_bytes += packet.len() as u64;
                }
                far_port.end(&mut core.tracer, Reason::NoPacket, packet);
                continue;
            };
            let queue = if is_own { &mut *out } else { &mut *local };
            queue.push(copy.at(to.into()));
        }
        ports[usize::from(packet.port)].counters.stats.copied += copied;
    }
}
