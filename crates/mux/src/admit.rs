//! Frames that arrive at the ports of a vnet: counted, policed, checked, and shown to whoever watches.

use std::ops::RangeInclusive;

use pdp_afxdp::Packet;
use pdp_proto::trace::addresses;
use pdp_wire::ether;

use crate::core::Core;
use crate::counters::Reason;
use crate::packets::Batch;
use crate::trace::{Tracer, Wish};
use crate::vnet::{Port, Vnet};

/// Bytes that a frame which arrives may have beyond the MTU: a check sequence that was captured with it,
/// or a tag. Linux takes as many (`is_skb_forwardable`).
const FCS_BYTES: usize = 4;

impl Vnet {
    /// Frames from outside, and those that vlinks inside of the node brought since, to the guests or TAPs
    /// behind their ports. Empties `batch`. Returns how many there were.
    pub fn arrive(&mut self, core: &mut Core, batch: &mut Batch) -> usize {
        let count = batch.len() + self.local.len() + self.late.len();
        for outside in [true, false] {
            if !outside {
                // Whatever comes meanwhile has its turn in the next visit.
                std::mem::swap(&mut self.local, batch);
            }
            self.admit(core, batch, outside);
            if !self.own_ports.is_empty() {
                self.pass_on(core, batch);
            }
            self.share(core, batch);
            core.packets.give_all(batch);
        }
        if count > 0 {
            self.flush(core);
        }
        count - self.late.len()
    }

    /// Leaves those in `batch` that go on. Those from outside are policed.
    fn admit(&mut self, core: &mut Core, batch: &mut Batch, outside: bool) {
        let Self { ports, police, slot, .. } = self;
        let bucket = &mut police.bucket;
        let polices = outside && !bucket.is_unlimited();
        let mut plain = !polices;
        for run in batch.chunk_by(|a, b| a.port == b.port) {
            let Some(here) = ports.get_mut(usize::from(run[0].port)) else { continue };
            here.counters.received += run.len() as u64;
            here.counters.received_bytes += run.iter().map(|it| it.len() as u64).sum::<u64>();
            let fits = |it: &Packet| it.mark == 0 && here.misfit(it, FCS_BYTES).is_none();
            plain &= here.is_open() && !here.is_watched() && run.iter().all(fits);
        }
        if plain {
            return;
        }
        let wall_ns = core.wall_ns();
        let Core { now_ns, tracer, packets, .. } = core;
        let stopped = |packet: &mut Packet| {
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

impl Port {
    /// Whether its vlink is not down.
    pub(crate) fn is_open(&self) -> bool {
        self.link.as_ref().is_none_or(|link| link.up)
    }

    /// Whether somebody captures here, or wants to trace a frame.
    #[inline]
    pub(crate) fn is_watched(&self) -> bool {
        self.wish.is_some() || !self.captures.is_empty()
    }

    /// Whether frames of all of these lengths, bytes, fit the port's MTU, whatever is in them.
    #[inline]
    pub(crate) fn surely_fits(&self, bytes: &RangeInclusive<usize>) -> bool {
        *bytes.start() >= ether::HEADER_BYTES
            && *bytes.end() <= ether::HEADER_BYTES + self.mtu as usize
    }

    /// What is wrong with a frame that is too short, or longer than the port's MTU by more than `spare`
    /// bytes.
    #[inline]
    pub(crate) fn misfit(&self, packet: &Packet, spare: usize) -> Option<Reason> {
        let mtu = self.mtu as usize + spare;
        if (ether::HEADER_BYTES..=ether::HEADER_BYTES + mtu).contains(&packet.len()) {
            None
        } else if packet.len() < ether::HEADER_BYTES {
            Some(Reason::Runt)
        } else {
            (ether::payload_len(packet.bytes()) > mtu).then_some(Reason::TooBig)
        }
    }

    /// Ends a frame, counted here under one reason; the packet goes home.
    pub(crate) fn drop(&mut self, core: &mut Core, reason: Reason, packet: Packet) {
        self.end(&mut core.tracer, reason, &packet);
        core.packets.give(packet);
    }

    /// The same for all of `frames`, which it empties.
    #[inline]
    pub(crate) fn drop_all(&mut self, core: &mut Core, reason: Reason, frames: &mut Batch) {
        frames.drain(..).for_each(|packet| self.drop(core, reason, packet));
    }

    /// Ends a frame, counted here under one reason.
    pub(crate) fn end(&mut self, tracer: &mut Tracer, reason: Reason, packet: &Packet) {
        self.counters.drop(reason);
        tracer.end(packet.mark, "drop", || format!("{} at {}", reason.name(), self.name));
    }

    /// Gives copies to whoever captures here. `wall_ns` is the time of day, nanoseconds since 1970.
    pub(crate) fn capture(&mut self, wall_ns: u64, packet: &Packet) {
        let missed = &mut self.counters.capture_missed;
        self.captures.retain_mut(|sink| {
            *missed += u64::from(!sink.offer(wall_ns, packet.bytes()));
            !sink.is_closed()
        });
    }

    /// Begins to follow `packet` if somebody wants to, and goes on if it is followed.
    fn follow(&mut self, tracer: &mut Tracer, vnet: u16, packet: &mut Packet, outside: bool) {
        let wanted = |wish: &mut Wish| wish.wants(packet.bytes());
        if let Some(wish) = self.wish.take_if(wanted) {
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
