//! Ingress of a vnet's ports: counts, polices and checks
//! frames, and copies them to captures and traces.

use std::ops::RangeInclusive;

use pdp_afxdp::PacketBuffer;
use pdp_proto::trace::addresses;
use pdp_wire::ether;

use crate::core::Core;
use crate::counters::Reason;
use crate::packets::PacketBatch;
use crate::trace::{PendingTrace, Tracer};
use crate::vnet::{MuxPort, MuxVnet};

/// Bytes that an arriving frame may have beyond the MTU: a captured check
/// sequence, or a tag. Linux accepts the same (`is_skb_forwardable`).
const FCS_BYTES: usize = 4;

impl MuxVnet {
    /// Passes frames from outside, and those that vlinks inside the vnet delivered since, to
    /// the guests or TAPs behind their ports. Empties `batch`. Returns the number of frames.
    pub fn ingress(&mut self, core: &mut Core, batch: &mut PacketBatch) -> usize {
        let count = batch.len() + self.local.len() + self.engine_backlog.len();
        for outside in [true, false] {
            if !outside {
                // Frames that arrive meanwhile wait for the next visit.
                std::mem::swap(&mut self.local, batch);
            }
            self.check_ingress(core, batch, outside);
            if !self.own_ports.is_empty() {
                self.relay(core, batch);
            }
            self.distribute_batch(core, batch);
            core.packets.give_all(batch);
        }
        if count > 0 {
            self.flush(core);
        }
        count - self.engine_backlog.len()
    }

    /// Keeps in `batch` the frames that pass, and drops the others. Polices frames from outside.
    fn check_ingress(&mut self, core: &mut Core, batch: &mut PacketBatch, outside: bool) {
        let Self { ports, police, slot, .. } = self;
        let bucket = &mut police.bucket;
        let polices = outside && !bucket.is_unlimited();
        let mut plain = !polices;
        for run in batch.chunk_by(|a, b| a.port == b.port) {
            let Some(here) = ports.get_mut(usize::from(run[0].port)) else { continue };
            here.counters.stats.received += run.len() as u64;
            here.counters.stats.received_bytes += run.iter().map(|it| it.len() as u64).sum::<u64>();
            let fits = |it: &PacketBuffer| it.mark == 0 && here.misfit(it, FCS_BYTES).is_none();
            plain &= here.is_open() && !here.is_watched() && run.iter().all(fits);
        }
        if plain {
            return;
        }
        let wall_ns = core.wall_ns();
        let Core { now_ns, tracer, packets, .. } = core;
        let stopped = |packet: &mut PacketBuffer| {
            let Some(here) = ports.get_mut(usize::from(packet.port)) else { return true };
            let mut reason = None;
            if polices && bucket.take(*now_ns, packet.len()).is_err() {
                reason = Some(Reason::Policed);
            } else {
                here.capture(wall_ns, packet);
                here.follow(tracer, *slot, packet, outside);
                if !here.is_open() {
                    reason = Some(Reason::LinkDown);
                }
            }
            let reason = reason.or_else(|| here.misfit(packet, FCS_BYTES));
            reason.inspect(|reason| here.end(tracer, *reason, packet)).is_some()
        };
        batch.extract_if(.., stopped).for_each(|packet| packets.give(packet));
    }
}

impl MuxPort {
    /// True unless its vlink is down.
    pub(crate) fn is_open(&self) -> bool {
        self.link.as_ref().is_none_or(|link| link.up)
    }

    /// True if a capture or a trace waits for frames of this port.
    #[inline]
    pub(crate) fn is_watched(&self) -> bool {
        self.wish.is_some() || !self.captures.is_empty()
    }

    /// True if frames of all these lengths, bytes, fit the port's MTU, whatever they contain.
    #[inline]
    pub(crate) fn surely_fits(&self, bytes: &RangeInclusive<usize>) -> bool {
        *bytes.start() >= ether::HEADER_BYTES
            && *bytes.end() <= ether::HEADER_BYTES + self.mtu as usize
    }

    /// Returns the drop reason of a frame that is too short, or
    /// longer than the port's MTU by more than `spare` bytes.
    #[inline]
    pub(crate) fn misfit(&self, packet: &PacketBuffer, spare: usize) -> Option<Reason> {
        let mtu = self.mtu as usize + spare;
        if (ether::HEADER_BYTES..=ether::HEADER_BYTES + mtu).contains(&packet.len()) {
            None
        } else if packet.len() < ether::HEADER_BYTES {
            Some(Reason::Runt)
        } else {
            (ether::payload_len(packet.bytes()) > mtu).then_some(Reason::TooBig)
        }
    }

    /// Drops a frame, counts it at this port under one reason, and returns the packet to its pool.
    pub(crate) fn drop(&mut self, core: &mut Core, reason: Reason, packet: PacketBuffer) {
        self.end(&mut core.tracer, reason, &packet);
        core.packets.give(packet);
    }

    /// Drops all of `frames` as [`Self::drop`] does, and empties it.
    #[inline]
    pub(crate) fn drop_all(&mut self, core: &mut Core, reason: Reason, frames: &mut PacketBatch) {
        frames.drain(..).for_each(|packet| self.drop(core, reason, packet));
    }

    /// Counts a frame's drop at this port under one reason, and ends its trace.
    pub(crate) fn end(&mut self, tracer: &mut Tracer, reason: Reason, packet: &PacketBuffer) {
        self.counters.drop(reason);
        tracer.end(packet.mark, "drop", || format!("{} at {}", reason.name(), self.name));
    }

    /// Copies a frame to all captures of this port.
    /// `wall_ns` is the time of day, nanoseconds since 1970.
    pub(crate) fn capture(&mut self, wall_ns: u64, packet: &PacketBuffer) {
        let missed = &mut self.counters.stats.capture_missed;
        self.captures.retain_mut(|sink| {
            *missed += u64::from(!sink.offer(wall_ns, packet.bytes()));
            !sink.is_closed()
        });
    }

    /// Begins to trace `packet` if a trace waits for it, or adds to the trace that it has.
    fn follow(&mut self, tracer: &mut Tracer, vnet: u16, packet: &mut PacketBuffer, outside: bool) {
        let matches = |wish: &mut PendingTrace| wish.wants(packet.bytes());
        if let Some(wish) = self.wish.take_if(matches) {
            packet.mark = tracer.start(vnet, wish);
            let bytes = packet.len();
            let by = if outside { "from outside" } else { "by a vlink of this node" };
            tracer.note(packet.mark, "receive", || format!("{bytes} bytes {by}"));
            let addresses = addresses(packet.bytes()).unwrap_or_default();
            tracer.note(packet.mark, "classify", || format!("port {}{addresses}", self.name));
        } else {
            tracer.note(packet.mark, "receive", || format!("at port {}", self.name));
        }
    }
}
