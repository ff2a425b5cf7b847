//! Frames on their way out of a port: shape, encapsulate, send.
//!
//! Frames of a tunnel whose next hop is not known yet wait for it: [`HELD_FRAMES_MAX`] of each vlink,
//! and not longer than [`HELD_NS_MAX`].

use std::cell::Cell;

use pdp_afxdp::Packet;

use crate::arrive::end;
use crate::core::Core;
use crate::counters::Reason;
use crate::encapsulate::Way;
use crate::meter::Stage;
use crate::shape::Offered;
use crate::vnet::Vnet;

/// Frames of a vlink that wait for the next hop of its tunnel. The oldest ends for one more.
pub const HELD_FRAMES_MAX: usize = 16;

/// How long a frame waits for that, nanoseconds.
pub const HELD_NS_MAX: u64 = 1_000_000_000;

/// Time between two looks whether it is known, nanoseconds; later a quarter of the time waited.
const HELD_LOOK_NS: u64 = 250_000;

impl Vnet {
    /// Sends frames out of port `at`, or lets them wait their turn. Empties `frames`.
    pub(crate) fn leave(&mut self, core: &mut Core, at: usize, frames: &mut Vec<Packet>) {
        if frames.is_empty() {
            return;
        }
        let count = frames.len();
        let here = &mut self.ports[at];
        here.fit(core, frames, 0);
        let stopped_by = match &here.link {
            None => Some(Reason::Unconnected),
            Some(link) if !link.up => Some(Reason::LinkDown),
            Some(link) => {
                if !link.shaper.is_open() {
                    self.offer(core, at, frames);
                }
                None
            }
        };
        match stopped_by {
            None => self.emit(core, at, frames),
            Some(reason) => {
                let here = &mut self.ports[at];
                frames.drain(..).for_each(|packet| here.drop(core, reason, packet));
            }
        }
        core.meter.lap(Stage::Send, count);
    }

    /// Leaves those in `frames` that the rate of port `at` lets go at once.
    fn offer(&mut self, core: &mut Core, at: usize, frames: &mut Vec<Packet>) {
        let here = &mut self.ports[at];
        let Some(link) = &mut here.link else { return };
        let mut going = std::mem::take(&mut core.scratch.going);
        for packet in frames.drain(..) {
            // No vnet may hold more packets in queues than it leaves free for all: n greedy ones
            // have 1/(n+1) of the pool each, and as much stays free (Choudhury and Hahne, 1998).
            let room = self.waiting < core.packets.free();
            let mark = packet.mark;
            match link.shaper.offer(packet, core.now_ns, room) {
                Offered::Go(packet) => going.push(packet),
                Offered::Full(packet) => {
                    end(&mut here.counters, &here.name, core, Reason::QueueFull, mark);
                    core.packets.give(packet);
                }
                Offered::Waits => {
                    self.waiting += 1;
                    if link.waiting() == 1 {
                        self.shaping.push(at as u16);
                    }
                    let detail = || format!("waits for the rate of {}", here.name);
                    core.tracer.note(mark, "shape", detail);
                }
            }
        }
        frames.append(&mut going);
        core.scratch.going = going;
    }

    /// Sends what has waited long enough. Returns how many frames.
    pub fn shape(&mut self, core: &mut Core) -> usize {
        let mut sent = 0;
        self.due_ns = None;
        let mut index = 0;
        let mut going = std::mem::take(&mut core.scratch.going);
        while index < self.shaping.len() {
            let at = usize::from(self.shaping[index]);
            let held_ns = self.retry(core, at, &mut going, &mut sent);
            let next = self.ports[at].link.as_mut().and_then(|link| link.shaper.next(core.now_ns));
            let next_ns = match next {
                Some(Ok(packet)) => {
                    self.waiting -= 1;
                    sent += 1;
                    going.push(packet);
                    self.emit(core, at, &mut going);
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
        core.scratch.going = going;
        sent
    }

    /// Sends what waits for the next hop of the port's tunnel if that is known by now, and ends what
    /// has waited too long. Returns when to look again.
    fn retry(
        &mut self,
        core: &mut Core,
        at: usize,
        going: &mut Vec<Packet>,
        sent: &mut usize,
    ) -> Option<u64> {
        let here = &mut self.ports[at];
        let link = here.link.as_mut().filter(|link| !link.held.is_empty())?;
        if link.way.find().is_some() {
            let before = link.held.len();
            self.put(core, at, going);
            // The neighbour may have been lost again meanwhile.
            let left = self.ports[at].link.as_ref().map_or(0, |link| link.held.len());
            *sent += before - left;
            return (left > 0).then_some(core.now_ns + HELD_LOOK_NS);
        }
        let old = |(since_ns, _): &(u64, Packet)| core.now_ns - since_ns >= HELD_NS_MAX;
        let count = link.held.iter().take_while(|held| old(held)).count();
        self.waiting -= count;
        for (_, packet) in link.held.drain(..count) {
            end(&mut here.counters, &here.name, core, Reason::UnderlayUnresolved, packet.mark);
            core.packets.give(packet);
        }
        let (since_ns, _) = link.held.back()?;
        Some(core.now_ns + HELD_LOOK_NS.max((core.now_ns - since_ns) / 4))
    }

    /// Has frames wait for the next hop of the port's tunnel. Empties `frames`.
    fn hold(&mut self, core: &mut Core, at: usize, frames: &mut Vec<Packet>) {
        let here = &mut self.ports[at];
        let Some(link) = &mut here.link else { return core.packets.give_all(frames) };
        for packet in frames.drain(..) {
            let detail = || format!("waits for the next hop of the tunnel of {}", here.name);
            core.tracer.note(packet.mark, "send", detail);
            link.held.push_back((core.now_ns, packet));
            self.waiting += 1;
            // As for frames that wait for a rate.
            if (link.held.len() > HELD_FRAMES_MAX || self.waiting > core.packets.free())
                && let Some((_, oldest)) = link.held.pop_front()
            {
                self.waiting -= 1;
                end(&mut here.counters, &here.name, core, Reason::UnderlayUnresolved, oldest.mark);
                core.packets.give(oldest);
            }
        }
        if !link.held.is_empty() && !self.shaping.contains(&(at as u16)) {
            self.shaping.push(at as u16);
        }
    }

    /// Puts frames onto the port's vlink. Empties `frames`.
    fn emit(&mut self, core: &mut Core, at: usize, frames: &mut Vec<Packet>) {
        if !frames.is_empty() {
            self.ports[at].capture(core, frames);
            self.put(core, at, frames);
        }
    }

    /// The same, behind those that have waited for a next hop.
    fn put(&mut self, core: &mut Core, at: usize, frames: &mut Vec<Packet>) {
        let here = &mut self.ports[at];
        let Some(link) = &mut here.link else {
            return frames.drain(..).for_each(|it| here.drop(core, Reason::Unconnected, it));
        };
        let outside = match &link.way {
            Way::Port(to) => {
                let to = *to;
                here.counters.sent += frames.len() as u64;
                here.counters.sent_bytes += frames.iter().map(|it| it.len() as u64).sum::<u64>();
                for packet in frames.drain(..) {
                    if packet.mark != 0 {
                        let there = &self.ports[usize::from(to)];
                        let node = &self.nodes[there.node].name;
                        let detail = || format!("by the vlink to {node}:{}", there.name);
                        core.tracer.note(packet.mark, "send", detail);
                    }
                    self.local.push((to, packet));
                }
                return;
            }
            Way::Outside(outside) => outside,
        };
        let Some(hop) = outside.find() else { return self.hold(core, at, frames) };
        if !link.held.is_empty() {
            self.waiting -= link.held.len();
            frames.splice(..0, link.held.drain(..).map(|(_, packet)| packet));
        }
        let Some(Some(external)) = core.externals.get(outside.external) else {
            return frames.drain(..).for_each(|it| here.drop(core, Reason::ExternalGone, it));
        };
        let (mac, mtu) = (external.mac, external.mtu);
        let unchanged = outside.is_plain() && here.mtu <= mtu;
        let why = Cell::new(Reason::UnderlayTooBig);
        let refused = |packet: &mut Packet| {
            let wrapped = outside.wrap(packet, mac, mtu, hop);
            wrapped.map_err(|reason| why.set(reason)).is_err()
        };
        if !unchanged {
            for packet in frames.extract_if(.., refused) {
                end(&mut here.counters, &here.name, core, why.get(), packet.mark);
                core.packets.give(packet);
            }
        }
        let mut traced = vec![];
        let mut bytes = 0;
        for (index, packet) in frames.iter().enumerate() {
            let length = packet.len() - outside.header_bytes();
            bytes += length as u64;
            if packet.mark != 0 {
                traced.push((index, packet.mark, length));
            }
        }
        let Core { externals, packets, connections, tracer, .. } = core;
        let Some(Some(external)) = externals.get_mut(outside.external) else { return };
        let before = frames.len();
        let sent = external.send(outside.spread, packets, connections, frames);
        let count = before - frames.len();
        for (_, mark, length) in traced.iter().filter(|(at, ..)| *at < count) {
            tracer.end(*mark, "send", || format!("out of {}, {length} bytes", here.name));
        }
        if let Err(reason) = sent {
            let header = outside.header_bytes();
            bytes -= frames.iter().map(|packet| (packet.len() - header) as u64).sum::<u64>();
            frames.drain(..).for_each(|packet| here.drop(core, reason, packet));
        }
        here.counters.sent += count as u64;
        here.counters.sent_bytes += bytes;
    }
}
