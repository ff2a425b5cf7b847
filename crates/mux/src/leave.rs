//! Frames on their way out of a port: shape, encapsulate, send. Where nothing stands in their way, several at a
//! time; else one by one.
//!
//! Frames of a tunnel whose next hop is not known yet wait for it: [`HELD_FRAMES_MAX`] of each vlink,
//! and not longer than [`HELD_NS_MAX`].

use std::mem;
use std::ops::RangeInclusive;

use pdp_afxdp::Packet;
use pdp_underlay::Hop;

use crate::core::Core;
use crate::counters::Reason;
use crate::encapsulate::Way;
use crate::meter::Stage;
use crate::packets::Batch;
use crate::shape::Offered;
use crate::vnet::{PortLink, Vnet};

/// Frames of a vlink that wait for the next hop of its tunnel. The oldest ends for one more.
pub const HELD_FRAMES_MAX: usize = 16;

/// How long a frame waits for that, nanoseconds.
pub const HELD_NS_MAX: u64 = 1_000_000_000;

/// Time between two looks whether it is known, nanoseconds; later a quarter of the time waited.
const HELD_LOOK_NS: u64 = 250_000;

/// Frames of one port in a row.
struct Row {
    port: u16,
    frames: usize,
    bytes: usize,
    /// From the shortest to the longest.
    bytes_each: RangeInclusive<usize>,
    is_traced: bool,
}

impl Row {
    /// Those that come first.
    #[inline]
    fn of(frames: &[Packet]) -> Option<Self> {
        let port = frames.first()?.port;
        let (mut count, mut bytes, mut marks) = (0, 0, 0);
        let (mut least, mut most) = (usize::MAX, 0);
        for packet in frames.iter().take_while(|packet| packet.port == port) {
            let length = packet.len();
            (count, bytes, marks) = (count + 1, bytes + length, marks | packet.mark);
            (least, most) = (least.min(length), most.max(length));
        }
        Some(Self { port, frames: count, bytes, bytes_each: least..=most, is_traced: marks != 0 })
    }
}

/// The exit that frames go out by: the slot of an external interface, and which one there.
type To = (usize, usize);

impl Vnet {
    /// Sends frames out of their ports, or lets them wait their turn. Empties `batch`.
    pub(crate) fn leave(&mut self, core: &mut Core, batch: &mut Batch) {
        let count = batch.len();
        let Some(first) = Row::of(batch) else { return };
        let to = if first.frames == count { self.straight(core, &first) } else { None };
        if let Some((to, hop)) = to {
            // Nothing has to be moved.
            self.wrap(core, &first, hop, batch);
            self.put_out(core, to, batch);
        } else {
            self.leave_by_row(core, batch);
        }
        core.meter.lap(Stage::Send, count);
    }

    /// The same for frames of several ports, or some that do not go straight out.
    fn leave_by_row(&mut self, core: &mut Core, batch: &mut Batch) {
        let mut out = mem::take(&mut core.scratch.out);
        let mut last = None;
        let mut frames = batch.drain(..);
        while let Some(row) = Row::of(frames.as_slice()) {
            let straight = self.straight(core, &row);
            let to = straight.map(|(to, _)| to);
            if let Some(last) = last.filter(|_| last != to) {
                self.put_out(core, last, &mut out);
            }
            last = to;
            let packets = frames.by_ref().take(row.frames);
            if let Some((_, hop)) = straight {
                let at = out.len();
                out.extend(packets);
                self.wrap(core, &row, hop, &mut out[at..]);
                continue;
            }
            for packet in packets {
                if let Some(packet) = self.queue(core, packet) {
                    self.emit(core, packet);
                }
            }
        }
        if let Some(last) = last {
            self.put_out(core, last, &mut out);
        }
        drop(frames);
        core.scratch.out = out;
    }

    /// Where frames of one port go, and by which next hop, if that is straight to the outside. `None` where
    /// somebody watches, or something waits or may not fit.
    #[inline]
    fn straight(&self, core: &Core, row: &Row) -> Option<(To, Hop)> {
        let here = self.ports.get(usize::from(row.port))?;
        let PortLink { way: Way::Outside(outside), shaper, up: true, held, .. } =
            here.link.as_ref()?
        else {
            return None;
        };
        let external = core.externals.get(outside.external)?.as_ref()?;
        let hop = outside.find()?;
        let watched = row.is_traced || here.is_watched();
        let waits = !shaper.is_open() || !held.is_empty();
        let fits = here.surely_fits(&row.bytes_each)
            && outside.fits(*row.bytes_each.end(), external.mtu, hop);
        let to = (outside.external, external.exits.at(outside.spread));
        (fits && !watched && !waits).then_some((to, hop))
    }

    /// Wraps frames of one port that surely fit, and counts them as sent.
    #[inline]
    fn wrap(&mut self, core: &Core, row: &Row, hop: Hop, frames: &mut [Packet]) {
        let here = &mut self.ports[usize::from(row.port)];
        here.counters.sent += row.frames as u64;
        here.counters.sent_bytes += row.bytes as u64;
        let Some(PortLink { way: Way::Outside(outside), .. }) = &here.link else { return };
        if !outside.is_plain()
            && let Some(Some(external)) = core.externals.get(outside.external)
        {
            for packet in frames {
                // It fits.
                let _ = outside.wrap(packet, external.mac, external.mtu, hop);
            }
        }
    }

    /// Gives wrapped frames, which count as sent, to their exit: the one place where frames of a vnet go out.
    /// What the exit does not take ends at its port, and was not sent. Returns whether it took all.
    #[inline]
    fn put_out(&mut self, core: &mut Core, (external, exit): To, frames: &mut Batch) -> bool {
        let why = match core.exits(external) {
            Some((exits, mut tools)) => exits.send(exit, &mut tools, frames),
            None => Reason::ExternalGone,
        };
        let all = frames.is_empty();
        for packet in frames.drain(..) {
            let here = &mut self.ports[usize::from(packet.port)];
            let header = here.link.as_ref().map_or(0, |link| link.way.header_bytes());
            here.counters.sent -= 1;
            here.counters.sent_bytes -= (packet.len() - header) as u64;
            here.drop(core, why, packet);
        }
        all
    }

    /// Returns the frame if it may leave its port, and if the port's rate lets it go at once.
    #[inline]
    fn queue(&mut self, core: &mut Core, packet: Packet) -> Option<Packet> {
        let here = self.ports.get_mut(usize::from(packet.port))?;
        let stopped_by = here.misfit(&packet, 0).or(match &here.link {
            None => Some(Reason::Unconnected),
            Some(link) => (!link.up).then_some(Reason::LinkDown),
        });
        let link = match (stopped_by, &mut here.link) {
            (None, Some(link)) => link,
            (reason, _) => {
                here.drop(core, reason.unwrap_or(Reason::Unconnected), packet);
                return None;
            }
        };
        if link.shaper.is_open() {
            return Some(packet);
        }
        // No vnet may hold more packets in queues than it leaves free for all: n greedy ones
        // have 1/(n+1) of the pool each, and as much stays free (Choudhury and Hahne, 1998).
        let room = self.waiting < core.packets.free();
        let (mark, port) = (packet.mark, packet.port);
        match link.shaper.offer(packet, core.now_ns, room) {
            Offered::Go(packet) => return Some(packet),
            Offered::Full(packet) => here.drop(core, Reason::QueueFull, packet),
            Offered::Waits => {
                self.waiting += 1;
                if !self.shaping.contains(&port) {
                    self.shaping.push(port);
                }
                core.tracer.note(mark, "shape", || format!("waits for the rate of {}", here.name));
            }
        }
        None
    }

    /// Sends what has waited long enough. Returns how many frames.
    pub fn shape(&mut self, core: &mut Core) -> usize {
        let mut sent = 0;
        self.due_ns = None;
        let mut index = 0;
        while index < self.shaping.len() {
            let at = usize::from(self.shaping[index]);
            let held_ns = self.retry(core, at, &mut sent);
            let next = self.ports[at].link.as_mut().and_then(|link| link.shaper.next(core.now_ns));
            let next_ns = match next {
                Some(Ok(packet)) => {
                    self.waiting -= 1;
                    sent += 1;
                    self.emit(core, packet);
                    continue;
                }
                Some(Err(at_ns)) => Some(at_ns),
                None => None,
            };
            match next_ns.into_iter().chain(held_ns).min() {
                Some(at_ns) => {
                    self.due_ns = self.due_ns.into_iter().chain([at_ns]).min();
                    index += 1;
                }
                None => {
                    self.shaping.swap_remove(index);
                }
            }
        }
        sent
    }

    /// Sends what waits for the next hop of the port's tunnel if that is known by now, and ends what
    /// has waited too long. Returns when to look again.
    fn retry(&mut self, core: &mut Core, at: usize, sent: &mut usize) -> Option<u64> {
        let hop = self.ports[at].link.as_ref().and_then(|link| link.way.find());
        let now_ns = core.now_ns;
        let goes = |held: &(u64, Packet)| hop.is_some() || now_ns - held.0 >= HELD_NS_MAX;
        while let Some(packet) = self.unhold(at, goes) {
            match hop {
                Some(hop) => {
                    *sent += 1;
                    self.send(core, hop, packet);
                }
                None => self.ports[at].drop(core, Reason::UnderlayUnresolved, packet),
            }
        }
        let (since_ns, _) = self.ports[at].link.as_ref()?.held.back()?;
        Some(now_ns + HELD_LOOK_NS.max((now_ns - since_ns) / 4))
    }

    /// The frame of port `at` that has waited longest for its next hop, if it may go.
    fn unhold(&mut self, at: usize, goes: impl FnOnce(&(u64, Packet)) -> bool) -> Option<Packet> {
        let held = &mut self.ports[at].link.as_mut()?.held;
        let (_, packet) = if goes(held.front()?) { held.pop_front()? } else { return None };
        self.waiting -= 1;
        Some(packet)
    }

    /// Has a frame wait for the next hop of its port's tunnel.
    fn hold(&mut self, core: &mut Core, packet: Packet) {
        let (at, mark) = (usize::from(packet.port), packet.mark);
        let here = &mut self.ports[at];
        let Some(link) = &mut here.link else { return core.packets.give(packet) };
        let detail = || format!("waits for the next hop of the tunnel of {}", here.name);
        core.tracer.note(mark, "send", detail);
        link.held.push_back((core.now_ns, packet));
        self.waiting += 1;
        let held = link.held.len();
        if !self.shaping.contains(&(at as u16)) {
            self.shaping.push(at as u16);
        }
        // As for frames that wait for a rate.
        if (held > HELD_FRAMES_MAX || self.waiting > core.packets.free())
            && let Some(oldest) = self.unhold(at, |_| true)
        {
            self.ports[at].drop(core, Reason::UnderlayUnresolved, oldest);
        }
    }

    /// Puts a frame onto its port's vlink, behind those that have waited for a next hop.
    #[inline]
    fn emit(&mut self, core: &mut Core, mut packet: Packet) {
        let at = usize::from(packet.port);
        let here = &mut self.ports[at];
        if here.is_watched() {
            here.capture(core.wall_ns(), &packet);
        }
        match here.link.as_ref().map(|link| (&link.way, link.held.is_empty())) {
            None => here.drop(core, Reason::Unconnected, packet),
            Some((&Way::Port(to), _)) => {
                here.counters.sent += 1;
                here.counters.sent_bytes += packet.len() as u64;
                if packet.mark != 0 {
                    let there = &self.ports[usize::from(to)];
                    let node = &self.nodes[there.node].name;
                    let detail = || format!("by the vlink to {node}:{}", there.name);
                    core.tracer.note(packet.mark, "send", detail);
                }
                packet.port = to;
                self.local.push(packet);
            }
            Some((Way::Outside(outside), none_held)) => match outside.find() {
                None => self.hold(core, packet),
                Some(hop) => {
                    while !none_held && let Some(packet) = self.unhold(at, |_| true) {
                        self.send(core, hop, packet);
                    }
                    self.send(core, hop, packet);
                }
            },
        }
    }

    /// Sends a frame out of its port to the outside, wrapped.
    fn send(&mut self, core: &mut Core, hop: Hop, mut packet: Packet) {
        let here = &mut self.ports[usize::from(packet.port)];
        let Some(Way::Outside(outside)) = here.link.as_ref().map(|link| &link.way) else {
            return core.packets.give(packet);
        };
        let Some(Some(external)) = core.externals.get(outside.external) else {
            return here.drop(core, Reason::ExternalGone, packet);
        };
        let (port, mark, bytes) = (usize::from(packet.port), packet.mark, packet.len());
        let to = (outside.external, external.exits.at(outside.spread));
        if let Err(reason) = outside.wrap(&mut packet, external.mac, external.mtu, hop) {
            return here.drop(core, reason, packet);
        }
        here.counters.sent += 1;
        here.counters.sent_bytes += bytes as u64;
        let mut one = mem::take(&mut core.scratch.one);
        one.push(packet);
        if self.put_out(core, to, &mut one) {
            let name = &self.ports[port].name;
            core.tracer.end(mark, "send", || format!("out of {name}, {bytes} bytes"));
        }
        core.scratch.one = one;
    }
}
