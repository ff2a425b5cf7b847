//! Frames on their way out of a port. In this order: which may leave, and which wait for the vlink's rate
//! ([`Vnet::leave`]); what is done to them on purpose, and which wait for that (`Vnet::go`, `Vnet::impair`); then to
//! another port, or to the outside (`Vnet::carry`); and there they wait until the tunnel's
//! next hop is known and the interface's capacity has room for them, are wrapped, and count as sent if an exit takes them
//! (`Vnet::put_out`). Each step takes a row of frames of one port, be it of one frame.
//!
//! Where an end has several queues, frames wait there for its rate and for the capacity in one, and what is let go has
//! room: whose turn it is is said as late as can be. Only those that take a delay between may have to wait once more.
//!
//! Frames of a tunnel whose next hop is not known yet wait for it: [`HELD_FRAMES_MAX`] of each vlink,
//! and not longer than [`HELD_NS_MAX`]. For the capacity as many wait as for the vlink's rate.

use std::mem;
use std::ops::RangeInclusive;

use pdp_afxdp::Packet;

use crate::class::{Room, on_wire};
use crate::core::Core;
use crate::counters::Reason;
use crate::encapsulate::Way;
use crate::engine::Engine;
use crate::meter::Stage;
use crate::packets::Batch;
use crate::shape::Offered;
use crate::vnet::{Node, PortLink, Vnet};

/// Frames of a vlink that wait for the next hop of its tunnel. The oldest ends for one more.
pub const HELD_FRAMES_MAX: usize = 16;

/// How long a frame waits for that, nanoseconds.
pub const HELD_NS_MAX: u64 = 1_000_000_000;

/// Time between two looks whether it is known, nanoseconds; later a quarter of the time waited.
const HELD_LOOK_NS: u64 = 250_000;

/// Frames of a port that have waited for their delay and go on in one visit: more may be due where the worker comes
/// late, and others are not to lack packets for them.
pub const LATE_FRAMES: usize = 256;

/// When a frame that has waited for its delay is looked at again for which there is no packet, nanoseconds.
const LATE_NS: u64 = 100_000;

/// Frames of one port in a row. One that is traced is a row of its own.
pub(crate) struct Row {
    pub(crate) port: u16,
    pub(crate) mark: u32,
    pub(crate) frames: usize,
    pub(crate) bytes: usize,
    /// From the shortest to the longest.
    bytes_each: RangeInclusive<usize>,
}

impl Row {
    /// Those that come first.
    #[inline]
    fn of(frames: &[Packet]) -> Option<Self> {
        let (first, others) = frames.split_first()?;
        let (port, mark) = (first.port, first.mark);
        let (mut count, mut bytes) = (1, first.len());
        let (mut least, mut most) = (bytes, bytes);
        let alike = |it: &&Packet| it.port == port && it.mark | mark == 0;
        for packet in others.iter().take_while(alike) {
            let length = packet.len();
            (count, bytes) = (count + 1, bytes + length);
            (least, most) = (least.min(length), most.max(length));
        }
        Some(Self { port, mark, frames: count, bytes, bytes_each: least..=most })
    }
}

/// Bytes that wrapped frames take on an interface.
fn wire_bytes(frames: &[Packet]) -> u64 {
    frames.iter().map(|packet| u64::from(on_wire(packet.len()))).sum()
}

/// The engine of a node, which counts what leaves; `has` says whether any node has one.
#[inline]
fn counting(has: bool, nodes: &mut [Node], node: usize) -> Option<&mut Engine> {
    if has { nodes[node].engine() } else { None }
}

impl PortLink {
    /// Whether what is held waits for the capacity of an interface, and for nothing else.
    fn is_in_turn(&self) -> bool {
        self.way.class().is_some() && self.way.find().is_some()
    }

    /// Frames of its vnet at schedulers, as far as it sends there.
    fn of_vnet(&self) -> usize {
        self.way.class().map_or(0, |class| class.of_vnet())
    }

    /// How many more frames may wait in a queue of its vnet's, which has `taken` packets already, beside those that are set
    /// aside. No vnet may hold more
    /// of them than it leaves free for all: n greedy ones have 1/(n+1) of the pool each, and as much stays free. And no
    /// link may hold more than its vnet could still have, and no queue more than its link: else those that are filled
    /// first leave none to the others (Choudhury and Hahne, 1998).
    fn spare(&self, taken: usize, free: usize) -> usize {
        free.saturating_sub(taken + self.shaper.buffers().beside(self.waiting()))
    }

    /// When what is held is looked at again, nanoseconds, if anything is.
    fn look_ns(&self, now_ns: u64) -> Option<u64> {
        let since_ns = self.held.last_ns()?;
        let class = self.way.class().filter(|_| self.is_in_turn());
        let next_hop_ns = || HELD_LOOK_NS.max((now_ns - since_ns) / 4);
        Some(now_ns + class.map_or_else(next_hop_ns, |class| class.look_ns()))
    }

    /// What the interface has room for. Where it has no capacity, all.
    fn room(&self, core: &mut Core) -> Room {
        let Way::Outside(outside) = &self.way else { return Room::all() };
        let Some(class) = &outside.class else { return Room::all() };
        let external = core.external(outside.external);
        let most = external.map_or(usize::MAX, |it| it.exits.room(it.exits.at(outside.spread)));
        class.room(outside.header_bytes()).at_most(most)
    }

    /// What it has room for of several queues' frames: those that were let go before and are held go first.
    fn room_of_queues(&self, core: &mut Core) -> Room {
        let has_class = self.way.class().is_some();
        match self.shaper.has_queues() && has_class {
            false => Room::all(),
            true if self.held.is_empty() => self.room(core),
            true => Room::none(HELD_LOOK_NS),
        }
    }

    /// Packets beside those in queues that count for how many more may wait in its several queues.
    fn beside(&self) -> usize {
        if self.shaper.has_queues() { self.of_vnet() } else { 0 }
    }
}

impl Vnet {
    /// Sends frames out of their ports, or has them wait. Empties `batch`.
    pub(crate) fn leave(&mut self, core: &mut Core, batch: &mut Batch) {
        let count = batch.len();
        if count > 0 {
            self.by_row(core, batch, Self::leave_row);
            core.meter.lap(Stage::Send, count);
        }
    }

    /// Does `next` with the frames of one row after the other. Empties `batch`, as `next` does.
    #[inline]
    pub(crate) fn by_row(
        &mut self,
        core: &mut Core,
        batch: &mut Batch,
        mut next: impl FnMut(&mut Self, &mut Core, Row, &mut Batch),
    ) {
        let Some(row) = Row::of(batch) else { return };
        if row.frames == batch.len() {
            // Nothing has to be moved.
            return next(self, core, row, batch);
        }
        let mut frames = core.scratch.batch();
        let mut rest = batch.drain(..);
        while let Some(row) = Row::of(rest.as_slice()) {
            frames.extend(rest.by_ref().take(row.frames));
            next(self, core, row, &mut frames);
        }
        core.scratch.spare.push(frames);
    }

    /// Sends those that may leave, and that nothing has wait.
    #[inline]
    fn leave_row(&mut self, core: &mut Core, row: Row, frames: &mut Batch) {
        let here = &self.ports[usize::from(row.port)];
        let is_open = here.link.as_ref().is_some_and(|link| link.up && link.shaper.is_open());
        if is_open && here.surely_fits(&row.bytes_each) {
            return self.go(core, row, frames);
        }
        self.queue(core, row.port, frames);
        if let Some(row) = Row::of(frames) {
            self.go(core, row, frames);
        }
    }

    /// Leaves those of a port's frames that may leave, and that its rate lets go at once.
    fn queue(&mut self, core: &mut Core, port: u16, frames: &mut Batch) {
        let mut go = core.scratch.batch();
        let here = &mut self.ports[usize::from(port)];
        let mut room = here.link.as_ref().map_or(Room::all(), |link| {
            link.shaper.expect(frames);
            link.room_of_queues(core)
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
                Offered::Go(packet) => go.push(packet),
                Offered::Full(packet) => here.drop(core, Reason::QueueFull, packet),
                Offered::Waits => {
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

    /// Sends what has waited long enough. Returns how many frames.
    pub fn shape(&mut self, core: &mut Core) -> usize {
        let mut sent = 0;
        while let Some(port) = self.timers.pop(core.now_ns) {
            sent +=
                self.retry(core, port) + self.arrive_late(core, port) + self.release(core, port);
        }
        sent
    }

    /// Sends what has waited long enough for the rate of `port`, and sees when to come again. Returns how many.
    fn release(&mut self, core: &mut Core, port: u16) -> usize {
        let Some(link) = &mut self.ports[usize::from(port)].link else { return 0 };
        let mut frames = core.scratch.batch();
        let mut room = link.room_of_queues(core);
        let before = link.shaper.buffers();
        let due_ns = loop {
            match link.shaper.next(core.now_ns, &mut room) {
                Some(Ok(packet)) => frames.push(packet),
                Some(Err(at_ns)) => break Some(at_ns),
                None => break None,
            }
        };
        self.buffers.change(before, link.shaper.buffers(), &mut core.packets);
        let held_ns = link.look_ns(core.now_ns);
        due_ns.into_iter().chain(held_ns).for_each(|at_ns| self.timers.set(port, at_ns));
        let sent = frames.len();
        self.waiting -= sent;
        self.by_row(core, &mut frames, Self::go);
        core.scratch.spare.push(frames);
        sent
    }

    /// Frames that nothing has wait any more, to another port or to the outside.
    #[inline]
    fn go(&mut self, core: &mut Core, row: Row, frames: &mut Batch) {
        let here = &mut self.ports[usize::from(row.port)];
        if here.is_watched() {
            let wall_ns = core.wall_ns();
            frames.iter().for_each(|packet| here.capture(wall_ns, packet));
        }
        if here
            .link
            .as_ref()
            .and_then(|link| link.line.as_ref())
            .is_some_and(|line| !line.is_open())
        {
            if let Some(engine) = counting(self.has_engines, &mut self.nodes, here.node) {
                engine.count_left(frames, 0, false);
                frames.iter_mut().for_each(|packet| packet.counted = 0);
            }
            return self.impair(core, row.port, frames);
        }
        self.carry(core, row, frames);
    }

    /// Does to a port's frames what its vlink is to do. What need not wait for that goes on.
    #[cold]
    fn impair(&mut self, core: &mut Core, port: u16, frames: &mut Batch) {
        let mut on = core.scratch.batch();
        let here = &mut self.ports[usize::from(port)];
        let (counters, mut lost, mut full) = (&mut here.counters, 0, 0);
        let Some(line) = here.link.as_mut().and_then(|link| link.line.as_mut()) else { return };
        let before = line.waiting();
        for mut packet in frames.drain(..) {
            let fate = line.draw(core.now_ns, packet.len());
            if fate.lost {
                lost += 1;
                core.tracer.end(packet.mark, "drop", || Reason::Loss.name().into());
                core.packets.give(packet);
                continue;
            }
            if let Some(bit) = fate.corrupt {
                packet.bytes_mut()[bit / 8] ^= 1 << (bit % 8);
                counters.corrupted += 1;
            }
            if fate.twice {
                counters.duplicated += 1;
                core.tracer.copied(packet.mark);
            }
            let Some(at_ns) = fate.at_ns else {
                counters.reordered += u64::from(line.waiting() > 0);
                if fate.twice {
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
            for _ in 0..=u8::from(fate.twice) {
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
        self.by_row(core, &mut on, Self::carry);
        core.scratch.spare.push(on);
    }

    /// Sends on what has waited for its vlink's delay, and sees when to come again. Returns how many frames.
    fn arrive_late(&mut self, core: &mut Core, port: u16) -> usize {
        let link = self.ports[usize::from(port)].link.as_mut();
        let Some(line) = link.and_then(|link| link.line.as_mut()) else { return 0 };
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
        self.by_row(core, &mut frames, Self::carry);
        core.scratch.spare.push(frames);
        count
    }

    /// Frames along their port's vlink.
    #[inline]
    fn carry(&mut self, core: &mut Core, row: Row, frames: &mut Batch) {
        let here = &mut self.ports[usize::from(row.port)];
        let Some(link) = &here.link else {
            return here.drop_all(core, Reason::Unconnected, frames);
        };
        let to = match link.way {
            Way::Port(to) => to,
            Way::Segment(at, end) => {
                if let Some(engine) = counting(self.has_engines, &mut self.nodes, here.node) {
                    engine.count_left(frames, 0, false);
                }
                return self.enter_all(core, (at, end), row, frames);
            }
            Way::Outside(_) => {
                // Queues let no more go than has room.
                let had_turn = link.shaper.has_queues() && link.line.is_none();
                let waits = link.way.class().is_some() && !had_turn;
                if !link.held.is_empty() {
                    self.retry(core, row.port);
                }
                if waits {
                    return self.put_out_in_turn(core, row, frames);
                }
                return self.put_out(core, row, frames);
            }
        };
        here.counters.sent += row.frames as u64;
        here.counters.sent_bytes += row.bytes as u64;
        if let Some(engine) = counting(self.has_engines, &mut self.nodes, here.node) {
            engine.count_left(frames, 0, false);
        }
        let there = &self.ports[usize::from(to)];
        let node = &self.nodes[there.node].name;
        core.tracer.note(row.mark, "send", || format!("by the vlink to {node}:{}", there.name));
        frames.iter_mut().for_each(|packet| packet.arrive_at(to));
        self.local.append(frames);
    }

    /// Frames to an interface with a capacity: those that find no room at its scheduler wait.
    fn put_out_in_turn(&mut self, core: &mut Core, row: Row, frames: &mut Batch) {
        let Some(link) = &self.ports[usize::from(row.port)].link else { return };
        let (goes_first, of_vnet) = (link.held.is_empty(), link.of_vnet());
        let taken = self.buffers.beside(self.waiting) + of_vnet;
        let count = match goes_first && taken < core.packets.free() {
            true => {
                let mut room = link.room(core);
                frames.iter().take_while(|packet| room.take(packet.len())).count()
            }
            false => 0,
        };
        if count >= frames.len() {
            return self.put_out(core, row, frames);
        }
        let mut go = core.scratch.batch();
        go.extend(frames.drain(..count));
        self.by_row(core, &mut go, Self::put_out);
        core.scratch.spare.push(go);
        self.hold(core, row.port, frames);
    }

    /// Frames to the outside: the one place where they are wrapped, given to an exit, and counted as sent if it takes
    /// them. What it does not take ends at the port.
    #[inline]
    fn put_out(&mut self, core: &mut Core, row: Row, frames: &mut Batch) {
        let here = &mut self.ports[usize::from(row.port)];
        let Some(PortLink { way: Way::Outside(outside), .. }) = &here.link else {
            return here.drop_all(core, Reason::Unconnected, frames);
        };
        let Some(hop) = outside.find() else { return self.hold(core, row.port, frames) };
        let Some(Some(external)) = core.externals.get(outside.external) else {
            return here.drop_all(core, Reason::ExternalGone, frames);
        };
        let (slot, header_bytes) = (outside.external, outside.header_bytes());
        let (mac, mtu, exit) = (external.mac, external.mtu, external.exits.at(outside.spread));
        let fits = outside.fits(*row.bytes_each.end(), mtu, hop);
        if !fits && row.frames > 1 {
            return self.put_out_each(core, frames);
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
            engine.count_left(frames, header_bytes, false);
        }
        let why = match core.exits(slot) {
            Some((exits, mut tools)) => exits.send(exit, &mut tools, frames),
            None => Reason::ExternalGone,
        };
        if let Some(class) = class.filter(|_| !frames.is_empty()) {
            frames.iter_mut().for_each(|packet| packet.mark = row.mark);
            class.sub(frames.len(), wire_bytes(frames));
        }
        if let Some(engine) = engine.filter(|_| !frames.is_empty()) {
            engine.count_left(frames, header_bytes, true);
        }
        let left_bytes: usize = frames.iter().map(|packet| packet.len() - header_bytes).sum();
        let sent = row.frames - frames.len();
        here.counters.sent += sent as u64;
        here.counters.sent_bytes += (row.bytes - left_bytes) as u64;
        if row.mark != 0 && sent > 0 {
            let detail = || format!("out of {}, {} bytes", here.name, row.bytes);
            core.tracer.end(row.mark, "send", detail);
        }
        here.drop_all(core, why, frames);
    }

    /// The same one by one, where one of them may be too long.
    #[cold]
    fn put_out_each(&mut self, core: &mut Core, frames: &mut Batch) {
        let mut one = core.scratch.batch();
        for packet in frames.drain(..) {
            one.push(packet);
            self.by_row(core, &mut one, Self::put_out);
        }
        core.scratch.spare.push(one);
    }

    /// Has frames wait for their port's tunnel: for its next hop, or for the interface's capacity.
    #[cold]
    fn hold(&mut self, core: &mut Core, port: u16, frames: &mut Batch) {
        let here = &mut self.ports[usize::from(port)];
        for packet in frames.drain(..) {
            let Some(link) = &mut here.link else {
                here.drop(core, Reason::Unconnected, packet);
                continue;
            };
            let in_turn = link.is_in_turn();
            let taken = self.buffers.beside(self.waiting) + link.of_vnet();
            let spare = link.spare(taken, core.packets.free());
            if in_turn && !(spare > 0 && link.shaper.may_hold(&link.held, &packet)) {
                here.drop(core, Reason::QueueFull, packet);
                continue;
            }
            let what = if in_turn { "capacity of the interface" } else { "next hop of the tunnel" };
            let detail = || format!("waits for the {what} of {}", here.name);
            core.tracer.note(packet.mark, "send", detail);
            link.held.push(core.now_ns, packet);
            self.waiting += 1;
            if let Some(at_ns) = link.look_ns(core.now_ns) {
                self.timers.set(port, at_ns);
            }
            // As for frames that wait for a rate.
            if !in_turn
                && (link.held.len() > HELD_FRAMES_MAX
                    || self.buffers.beside(self.waiting) > core.packets.free())
                && let Some(oldest) = link.held.pop()
            {
                self.waiting -= 1;
                here.drop(core, Reason::UnderlayUnresolved, oldest);
            }
        }
    }

    /// Sends what waits for the port's tunnel as far as its next hop is known by now and the capacity has room, and ends
    /// what has waited for the next hop too long. Returns how many frames.
    fn retry(&mut self, core: &mut Core, port: u16) -> usize {
        let here = &mut self.ports[usize::from(port)];
        let Some(link) = &mut here.link else { return 0 };
        let (is_known, now_ns) = (link.way.find().is_some(), core.now_ns);
        let mut frames = core.scratch.batch();
        let mut room = if is_known { link.room(core) } else { Room::all() };
        let is_late = |since_ns: u64| now_ns - since_ns >= HELD_NS_MAX;
        let mut goes =
            |held: &(u64, Packet)| (is_known || is_late(held.0)) && room.take(held.1.len());
        while link.held.first().is_some_and(&mut goes)
            && let Some(packet) = link.held.pop()
        {
            frames.push(packet);
        }
        let count = frames.len();
        self.waiting -= count;
        if is_known {
            self.by_row(core, &mut frames, Self::put_out);
        } else {
            here.drop_all(core, Reason::UnderlayUnresolved, &mut frames);
        }
        core.scratch.spare.push(frames);
        count
    }
}
