//! Egress of a vnet's frames. The steps, in order:
//!
//! - [`MuxVnet::egress`] checks frames, and queues those that exceed the vlink's rate.
//! - `MuxVnet::transmit` captures them. `MuxVnet::impair` applies the vlink's impairments, and
//!   delays frames.
//! - `MuxVnet::forward_on_vlink` forwards them to another port, into a segment, or to the outside.
//! - `MuxVnet::transmit_external` sends frames to the outside. Frames wait until the
//!   tunnel's next hop is known and the interface's capacity has space.
//!   Then they are encapsulated, and count as sent if a netdev takes them.
//!
//! Each step takes a burst of frames of one port. A burst may have one frame.
//!
//! At an end with several queues, frames wait in these queues both for the rate and for the
//! capacity. Frames leave the queues only if the capacity has space, so that the next frame is
//! chosen as late as possible. Only frames that are delayed in between may have to wait again.
//!
//! Frames whose tunnel has no known next hop are pending: [`PENDING_FRAMES_MAX`] for each vlink,
//! for [`PENDING_NS_MAX`] at most. For the capacity, as many frames may wait as for the vlink's
//! rate.

use std::mem;
use std::ops::RangeInclusive;

use pdp_afxdp::PacketBuffer;

use crate::core::Core;
use crate::counters::Reason;
use crate::encapsulate::VlinkPath;
use crate::engine::VrouterEngine;
use crate::meter::Stage;
use crate::packets::PacketBatch;
use crate::shape::Offered;
use crate::traffic_class::{SchedulerBudget, on_wire};
use crate::vnet::{MuxNode, MuxVnet, PortLink};

/// Frames of a vlink that wait for its tunnel's next hop, at most. One more drops the oldest.
pub const PENDING_FRAMES_MAX: usize = 16;

/// Longest wait for the next hop, nanoseconds.
pub const PENDING_NS_MAX: u64 = 1_000_000_000;

/// Shortest time between two checks for the next hop, nanoseconds. Later, a quarter of the time
/// waited.
const NEXT_HOP_CHECK_NS: u64 = 250_000;

/// Delayed frames of a port that continue in one visit. If the worker
/// is late more may be due, and they must not take all packets.
pub const LATE_FRAMES: usize = 256;

/// Time until a delayed frame is tried again that found no free packet, nanoseconds.
const LATE_NS: u64 = 100_000;

/// Burst: consecutive frames of one port. A traced frame is a burst of its own.
pub(crate) struct PortBurst {
    pub(crate) port: u16,
    pub(crate) mark: u32,
    pub(crate) frames: usize,
    pub(crate) bytes: usize,
    /// Shortest and longest frame, bytes.
    bytes_each: RangeInclusive<usize>,
}

impl PortBurst {
    /// Returns the first burst of `frames`.
    #[inline]
    fn of(frames: &[PacketBuffer]) -> Option<Self> {
        let (first, others) = frames.split_first()?;
        let (port, mark) = (first.port, first.mark);
        let (mut count, mut bytes) = (1, first.len());
        let (mut least, mut most) = (bytes, bytes);
        let alike = |it: &&PacketBuffer| it.port == port && it.mark | mark == 0;
        for packet in others.iter().take_while(alike) {
            let length = packet.len();
            (count, bytes) = (count + 1, bytes + length);
            (least, most) = (least.min(length), most.max(length));
        }
        Some(Self { port, mark, frames: count, bytes, bytes_each: least..=most })
    }
}

/// Returns the bytes that encapsulated frames take on an interface.
fn wire_bytes(frames: &[PacketBuffer]) -> u64 {
    frames.iter().map(|packet| u64::from(on_wire(packet.len()))).sum()
}

/// Returns the node's engine, which counts the frames
/// that leave. `has` is true if any node has an engine.
#[inline]
fn counting(has: bool, nodes: &mut [MuxNode], node: usize) -> Option<&mut VrouterEngine> {
    if has { nodes[node].engine() } else { None }
}

impl PortLink {
    /// True if pending frames wait for an interface's capacity, not for a next hop.
    fn waits_for_capacity(&self) -> bool {
        self.path.traffic_class().is_some() && self.path.find().is_some()
    }

    /// Returns its vnet's frames at schedulers, if it sends to one.
    fn of_vnet(&self) -> usize {
        self.path.traffic_class().map_or(0, |class| class.of_vnet())
    }

    /// Returns how many more frames may wait in one of its vnet's queues,
    /// beside the reserved packets. The vnet already has `taken` packets.
    ///
    /// No vnet may queue more packets than it leaves free for all. So each of n greedy
    /// vnets gets 1/(n+1) of the pool, and as much stays free. No link may queue more than
    /// its vnet could still get, and no queue more than its link. Otherwise the queues
    /// that fill first would leave none for the others (Choudhury and Hahne, 1998).
    fn spare(&self, taken: usize, free: usize) -> usize {
        free.saturating_sub(taken + self.shaper.buffers().beside(self.waiting()))
    }

    /// Returns when to retry its pending frames, nanoseconds, if it has any.
    fn retry_ns(&self, now_ns: u64) -> Option<u64> {
        let since_ns = self.pending.last_ns()?;
        let class = self.path.traffic_class().filter(|_| self.waits_for_capacity());
        let next_hop_ns = || NEXT_HOP_CHECK_NS.max((now_ns - since_ns) / 4);
        Some(now_ns + class.map_or_else(next_hop_ns, |class| class.retry_ns()))
    }

    /// Returns the budget at its interface, which is unlimited without a capacity.
    fn scheduler_budget(&self, core: &mut Core) -> SchedulerBudget {
        let VlinkPath::Outside(outside) = &self.path else { return SchedulerBudget::all() };
        let Some(class) = &outside.class else { return SchedulerBudget::all() };
        let external = core.external(outside.external);
        let most = external.map_or(usize::MAX, |it| it.netdevs.room(it.netdevs.at(outside.spread)));
        class.room(outside.header_bytes()).at_most(most)
    }

    /// Returns the budget for frames of its several queues.
    /// Pending frames that left the queues earlier go first.
    fn queue_budget(&self, core: &mut Core) -> SchedulerBudget {
        let has_class = self.path.traffic_class().is_some();
        match self.shaper.has_queues() && has_class {
            false => SchedulerBudget::all(),
            true if self.pending.is_empty() => self.scheduler_budget(core),
            true => SchedulerBudget::none(NEXT_HOP_CHECK_NS),
        }
    }

    /// Returns the packets outside of queues that count against its several queues.
    fn beside(&self) -> usize {
        if self.shaper.has_queues() { self.of_vnet() } else { 0 }
    }
}

impl MuxVnet {
    /// Sends frames out of their ports, or queues them. Empties `batch`.
    pub(crate) fn egress(&mut self, core: &mut Core, batch: &mut PacketBatch) {
        let count = batch.len();
        if count > 0 {
            self.by_burst(core, batch, Self::egress_burst);
            core.meter.lap(Stage::Send, count);
        }
    }

    /// Calls `next` with one burst after the other. `next` must empty its frames. Empties `batch`.
    #[inline]
    pub(crate) fn by_burst(
        &mut self,
        core: &mut Core,
        batch: &mut PacketBatch,
        mut next: impl FnMut(&mut Self, &mut Core, PortBurst, &mut PacketBatch),
    ) {
        let Some(row) = PortBurst::of(batch) else { return };
        if row.frames == batch.len() {
            // The batch is one burst; nothing has to be moved.
            return next(self, core, row, batch);
        }
        let mut frames = core.scratch.batch();
        let mut rest = batch.drain(..);
        while let Some(row) = PortBurst::of(rest.as_slice()) {
            frames.extend(rest.by_ref().take(row.frames));
            next(self, core, row, &mut frames);
        }
        core.scratch.spare.push(frames);
    }

    /// Sends the burst's frames that may leave at once. Queues or drops the others.
    #[inline]
    fn egress_burst(&mut self, core: &mut Core, row: PortBurst, frames: &mut PacketBatch) {
        let here = &self.ports[usize::from(row.port)];
        let is_open = here.link.as_ref().is_some_and(|link| link.up && link.shaper.is_open());
        if is_open && here.surely_fits(&row.bytes_each) {
            return self.transmit(core, row, frames);
        }
        self.queue(core, row.port, frames);
        if let Some(row) = PortBurst::of(frames) {
            self.transmit(core, row, frames);
        }
    }

    /// Keeps the frames of a port that may leave at once.
    /// Queues those that exceed its rate, and drops the others.
    fn queue(&mut self, core: &mut Core, port: u16, frames: &mut PacketBatch) {
        let mut go = core.scratch.batch();
        let here = &mut self.ports[usize::from(port)];
        let mut room = here.link.as_ref().map_or(SchedulerBudget::all(), |link| {
            link.shaper.expect(frames);
            link.queue_budget(core)
        });
        for packet in frames.drain(..) {
            let is_down = !here.is_open();
            let stopped_by = here.misfit(&packet, 0).or(is_down.then_some(Reason::LinkDown));
            let link = match &mut here.link {
                Some(link) if stopped_by.is_none() => link,
                _ => {
                    here.drop(core, stopped_by.unwrap_or(Reason::Unconnected), packet);
                    continue;
                }
            };
            let taken = self.buffers.beside(self.waiting) + link.beside();
            let spare = link.spare(taken, core.packets.free());
            let (mark, before) = (packet.mark, link.shaper.buffers());
            match link.shaper.offer(packet, core.now_ns, spare, &mut room) {
                Offered::Send(packet) => go.push(packet),
                Offered::Full(packet) => here.drop(core, Reason::QueueFull, packet),
                Offered::Queued => {
                    self.waiting += 1;
                    self.buffers.change(before, link.shaper.buffers(), &mut core.packets);
                    if link.shaper.waiting() == 1 {
                        self.timers.set(port, core.now_ns);
                    }
                    let detail = || format!("waits for the rate of {}", here.name);
                    core.tracer.note(mark, "shape", detail);
                }
            }
        }
        mem::swap(frames, &mut go);
        core.scratch.spare.push(go);
    }

    /// Sends frames whose wait is over. Returns the number of frames.
    pub fn shape(&mut self, core: &mut Core) -> usize {
        let mut sent = 0;
        while let Some(port) = self.timers.pop(core.now_ns) {
            sent += self.retry(core, port)
                + self.forward_delayed(core, port)
                + self.release(core, port);
        }
        sent
    }

    /// Sends frames of `port` that the rate permits by now,
    /// and sets its timer. Returns the number of frames.
    fn release(&mut self, core: &mut Core, port: u16) -> usize {
        let Some(link) = &mut self.ports[usize::from(port)].link else { return 0 };
        let mut frames = core.scratch.batch();
        let mut room = link.queue_budget(core);
        let before = link.shaper.buffers();
        let due_ns = loop {
            match link.shaper.next(core.now_ns, &mut room) {
                Some(Ok(packet)) => frames.push(packet),
                Some(Err(at_ns)) => break Some(at_ns),
                None => break None,
            }
        };
        self.buffers.change(before, link.shaper.buffers(), &mut core.packets);
        let held_ns = link.retry_ns(core.now_ns);
        due_ns.into_iter().chain(held_ns).for_each(|at_ns| self.timers.set(port, at_ns));
        let sent = frames.len();
        self.waiting -= sent;
        self.by_burst(core, &mut frames, Self::transmit);
        core.scratch.spare.push(frames);
        sent
    }

    /// Captures frames that leave, and passes them to the impairments or to the vlink.
    #[inline]
    fn transmit(&mut self, core: &mut Core, row: PortBurst, frames: &mut PacketBatch) {
        let here = &mut self.ports[usize::from(row.port)];
        if here.is_watched() {
            let wall_ns = core.wall_ns();
            frames.iter().for_each(|packet| here.capture(wall_ns, packet));
        }
        if here
            .link
            .as_ref()
            .and_then(|link| link.delay_line.as_ref())
            .is_some_and(|line| !line.is_open())
        {
            if let Some(engine) = counting(self.has_engines, &mut self.nodes, here.node) {
                engine.count_sent(frames, 0, false);
                frames.iter_mut().for_each(|packet| packet.counted = 0);
            }
            return self.impair(core, row.port, frames);
        }
        self.forward_on_vlink(core, row, frames);
    }

    /// Applies the vlink's impairments to a port's frames. Frames without delay continue at once.
    #[cold]
    fn impair(&mut self, core: &mut Core, port: u16, frames: &mut PacketBatch) {
        let mut on = core.scratch.batch();
        let here = &mut self.ports[usize::from(port)];
        let (counters, mut lost, mut full) = (&mut here.counters, 0, 0);
        let Some(line) = here.link.as_mut().and_then(|link| link.delay_line.as_mut()) else {
            return;
        };
        let before = line.waiting();
        for mut packet in frames.drain(..) {
            let drawn = line.draw(core.now_ns, packet.len());
            if drawn.lost {
                lost += 1;
                core.tracer.end(packet.mark, "drop", || Reason::Loss.name().into());
                core.packets.give(packet);
                continue;
            }
            if let Some(bit) = drawn.corrupt {
                packet.bytes_mut()[bit / 8] ^= 1 << (bit % 8);
                counters.stats.corrupted += 1;
            }
            if drawn.duplicate {
                counters.stats.duplicated += 1;
                core.tracer.copied(packet.mark);
            }
            let Some(at_ns) = drawn.at_ns else {
                counters.stats.reordered += u64::from(line.waiting() > 0);
                if drawn.duplicate {
                    match core.packets.copy_of(packet.bytes(), packet.mark) {
                        Some(copy) => on.push(copy.at(port.into())),
                        None => {
                            counters.drop(Reason::NoPacket);
                            core.tracer.end(packet.mark, "drop", || Reason::NoPacket.name().into());
                        }
                    }
                }
                on.push(packet);
                continue;
            };
            core.tracer
                .note(packet.mark, "delay", || format!("for {} us", (at_ns - core.now_ns) / 1000));
            for _ in 0..=u8::from(drawn.duplicate) {
                if !line.put(at_ns, packet.mark, packet.bytes()) {
                    full += 1;
                    core.tracer.end(packet.mark, "drop", || Reason::DelayFull.name().into());
                }
            }
            core.packets.give(packet);
        }
        counters.drop_all(Reason::Loss, lost);
        counters.drop_all(Reason::DelayFull, full);
        if before == 0
            && let Some(first) = line.first()
        {
            self.timers.set(port, first.at_ns);
        }
        self.by_burst(core, &mut on, Self::forward_on_vlink);
        core.scratch.spare.push(on);
    }

    /// Forwards frames whose delay is over, and sets the timer. Returns the number of frames.
    fn forward_delayed(&mut self, core: &mut Core, port: u16) -> usize {
        let link = self.ports[usize::from(port)].link.as_mut();
        let Some(line) = link.and_then(|link| link.delay_line.as_mut()) else { return 0 };
        let mut frames = core.scratch.batch();
        while let Some(first) = line.first() {
            if first.at_ns > core.now_ns {
                self.timers.set(port, first.at_ns);
                break;
            }
            let taken = self.buffers.beside(self.waiting) + self.local.len() + frames.len();
            let room = frames.len() < LATE_FRAMES && taken < core.packets.free();
            let copy = room.then(|| core.packets.copy_of(line.bytes(&first), first.mark));
            let Some(mut packet) = copy.flatten() else {
                let pause_ns = if frames.is_empty() { LATE_NS } else { 1 };
                self.timers.set(port, core.now_ns + pause_ns);
                break;
            };
            packet.port = port;
            frames.push(packet);
            line.end_first();
        }
        while let Some(memory) = line.spent() {
            core.connections.free(memory);
        }
        let count = frames.len();
        self.by_burst(core, &mut frames, Self::forward_on_vlink);
        core.scratch.spare.push(frames);
        count
    }

    /// Forwards frames along their port's vlink.
    #[inline]
    fn forward_on_vlink(&mut self, core: &mut Core, row: PortBurst, frames: &mut PacketBatch) {
        let here = &mut self.ports[usize::from(row.port)];
        let Some(link) = &here.link else {
            return here.drop_all(core, Reason::Unconnected, frames);
        };
        let to = match link.path {
            VlinkPath::Port(to) => to,
            VlinkPath::Segment(at, end) => {
                if let Some(engine) = counting(self.has_engines, &mut self.nodes, here.node) {
                    engine.count_sent(frames, 0, false);
                }
                return self.enter_all(core, (at, end), row, frames);
            }
            VlinkPath::Outside(_) => {
                // The queues released no more frames than the capacity has space for.
                let had_turn = link.shaper.has_queues() && link.delay_line.is_none();
                let waits = link.path.traffic_class().is_some() && !had_turn;
                if !link.pending.is_empty() {
                    self.retry(core, row.port);
                }
                if waits {
                    return self.transmit_external_within_budget(core, row, frames);
                }
                return self.transmit_external(core, row, frames);
            }
        };
        here.counters.stats.sent += row.frames as u64;
        here.counters.stats.sent_bytes += row.bytes as u64;
        if let Some(engine) = counting(self.has_engines, &mut self.nodes, here.node) {
            engine.count_sent(frames, 0, false);
        }
        let far_port = &self.ports[usize::from(to)];
        let node = &self.nodes[far_port.node].name;
        core.tracer.note(row.mark, "send", || format!("by the vlink to {node}:{}", far_port.name));
        frames.iter_mut().for_each(|packet| packet.arrive_at(to));
        self.local.append(frames);
    }

    /// Sends frames to an interface with a capacity. Frames beyond the budget become pending.
    fn transmit_external_within_budget(
        &mut self,
        core: &mut Core,
        row: PortBurst,
        frames: &mut PacketBatch,
    ) {
        let Some(link) = &self.ports[usize::from(row.port)].link else { return };
        let (goes_first, of_vnet) = (link.pending.is_empty(), link.of_vnet());
        let taken = self.buffers.beside(self.waiting) + of_vnet;
        let count = match goes_first && taken < core.packets.free() {
            true => {
                let mut room = link.scheduler_budget(core);
                frames.iter().take_while(|packet| room.take(packet.len())).count()
            }
            false => 0,
        };
        if count >= frames.len() {
            return self.transmit_external(core, row, frames);
        }
        let mut go = core.scratch.batch();
        go.extend(frames.drain(..count));
        self.by_burst(core, &mut go, Self::transmit_external);
        core.scratch.spare.push(go);
        self.make_pending(core, row.port, frames);
    }

    /// Sends frames to the outside. Only this step encapsulates frames,
    /// gives them to a netdev, and counts them as sent if the netdev
    /// takes them. The port drops the frames that it does not take.
    #[inline]
    fn transmit_external(&mut self, core: &mut Core, row: PortBurst, frames: &mut PacketBatch) {
        let here = &mut self.ports[usize::from(row.port)];
        let Some(PortLink { path: VlinkPath::Outside(outside), .. }) = &here.link else {
            return here.drop_all(core, Reason::Unconnected, frames);
        };
        let Some(hop) = outside.find() else { return self.make_pending(core, row.port, frames) };
        let Some(Some(external)) = core.externals.get(outside.external) else {
            return here.drop_all(core, Reason::ExternalGone, frames);
        };
        let (slot, header_bytes) = (outside.external, outside.header_bytes());
        let (mac, mtu, netdev) = (external.mac, external.mtu, external.netdevs.at(outside.spread));
        let fits = outside.fits(*row.bytes_each.end(), mtu, hop);
        if !fits && row.frames > 1 {
            return self.transmit_external_each(core, frames);
        }
        if !fits || !outside.is_plain() {
            let mut all = frames.iter_mut();
            if let Err(why) = all.try_for_each(|packet| outside.wrap(packet, mac, mtu, hop)) {
                return here.drop_all(core, why, frames);
            }
        }
        let class = outside.class.as_deref();
        if let Some(class) = class {
            frames.iter_mut().for_each(|packet| packet.mark = class.mark());
            class.add(frames.len(), wire_bytes(frames));
        }
        let mut engine = counting(self.has_engines, &mut self.nodes, here.node);
        if let Some(engine) = &mut engine {
            engine.count_sent(frames, header_bytes, false);
        }
        let why = match core.netdevs(slot) {
            Some((netdevs, mut tools)) => netdevs.send(netdev, &mut tools, frames),
            None => Reason::ExternalGone,
        };
        if let Some(class) = class.filter(|_| !frames.is_empty()) {
            frames.iter_mut().for_each(|packet| packet.mark = row.mark);
            class.sub(frames.len(), wire_bytes(frames));
        }
        if let Some(engine) = engine.filter(|_| !frames.is_empty()) {
            engine.count_sent(frames, header_bytes, true);
        }
        let left_bytes: usize = frames.iter().map(|packet| packet.len() - header_bytes).sum();
        let sent = row.frames - frames.len();
        here.counters.stats.sent += sent as u64;
        here.counters.stats.sent_bytes += (row.bytes - left_bytes) as u64;
        if row.mark != 0 && sent > 0 {
            let detail = || format!("out of {}, {} bytes", here.name, row.bytes);
            core.tracer.end(row.mark, "send", detail);
        }
        here.drop_all(core, why, frames);
    }

    /// Sends frames one by one, because one of them may be too long.
    #[cold]
    fn transmit_external_each(&mut self, core: &mut Core, frames: &mut PacketBatch) {
        let mut one = core.scratch.batch();
        for packet in frames.drain(..) {
            one.push(packet);
            self.by_burst(core, &mut one, Self::transmit_external);
        }
        core.scratch.spare.push(one);
    }

    /// Makes frames pending on their port's tunnel: on
    /// its next hop, or on the interface's capacity.
    #[cold]
    fn make_pending(&mut self, core: &mut Core, port: u16, frames: &mut PacketBatch) {
        let here = &mut self.ports[usize::from(port)];
        for packet in frames.drain(..) {
            let Some(link) = &mut here.link else {
                here.drop(core, Reason::Unconnected, packet);
                continue;
            };
            let in_turn = link.waits_for_capacity();
            let taken = self.buffers.beside(self.waiting) + link.of_vnet();
            let spare = link.spare(taken, core.packets.free());
            if in_turn && !(spare > 0 && link.shaper.may_hold(&link.pending, &packet)) {
                here.drop(core, Reason::QueueFull, packet);
                continue;
            }
            let missing =
                if in_turn { "capacity of the interface" } else { "next hop of the tunnel" };
            let detail = || format!("waits for the {missing} of {}", here.name);
            core.tracer.note(packet.mark, "send", detail);
            link.pending.push(core.now_ns, packet);
            self.waiting += 1;
            if let Some(at_ns) = link.retry_ns(core.now_ns) {
                self.timers.set(port, at_ns);
            }
            // The same limit as for frames that wait for a rate.
            if !in_turn
                && (link.pending.len() > PENDING_FRAMES_MAX
                    || self.buffers.beside(self.waiting) > core.packets.free())
                && let Some(oldest) = link.pending.pop()
            {
                self.waiting -= 1;
                here.drop(core, Reason::UnderlayUnresolved, oldest);
            }
        }
    }

    /// Sends the port's pending frames if the next hop is known and the capacity has space.
    /// Drops those that have waited for the next hop too long. Returns the number of frames.
    fn retry(&mut self, core: &mut Core, port: u16) -> usize {
        let here = &mut self.ports[usize::from(port)];
        let Some(link) = &mut here.link else { return 0 };
        let (is_known, now_ns) = (link.path.find().is_some(), core.now_ns);
        let mut frames = core.scratch.batch();
        let mut room = if is_known { link.scheduler_budget(core) } else { SchedulerBudget::all() };
        let is_late = |since_ns: u64| now_ns - since_ns >= PENDING_NS_MAX;
        let mut goes = |pending: &(u64, PacketBuffer)| {
            (is_known || is_late(pending.0)) && room.take(pending.1.len())
        };
        while link.pending.first().is_some_and(&mut goes)
            && let Some(packet) = link.pending.pop()
        {
            frames.push(packet);
        }
        let count = frames.len();
        self.waiting -= count;
        if is_known {
            self.by_burst(core, &mut frames, Self::transmit_external);
        } else {
            here.drop_all(core, Reason::UnderlayUnresolved, &mut frames);
        }
        core.scratch.spare.push(frames);
        count
    }
}
