//! A vnet as its worker has it: nodes, their ports, and how they are joined.
//!
//! Made by the control thread from what pdpd wants ([`Vnet::new`]); the worker then moves
//! everything that lives (connections, queues, counters) from the one it had
//! ([`Vnet::take_over`]).

use std::mem;
use std::ops::Range;

use pdp_afxdp::Packet;
use pdp_proto::mux::{
    self, Attach, End, GuestStats, Match, PUNT_CLASSES, QueueStats, Rate, VnetStats,
};
use pdp_wire::tag::PuntClass;

use crate::capture::Sink;
use crate::core::Core;
use crate::counters::{Counted, PortCounters, Reason};
use crate::distribute::{Candidate, Distributor, FLOW_SLOTS};
use crate::encapsulate::Way;
use crate::engine::Engine;
use crate::lane::{Lane, Link, PULL_FRAMES};
use crate::line::Line;
use crate::meter::Stage;
use crate::order::Order;
use crate::packets::Batch;
use crate::peer::{Guest, Silence};
use crate::police::TokenBucket;
use crate::queues::{Buffers, Queues};
use crate::segment::Segment;
use crate::shape::{Held, LOCAL_RATE, Shaper};
use crate::timers::Timers;
use crate::trace::Wish;

/// A vnet without work for this long rests, nanoseconds.
pub const REST_NS: u64 = 1_000_000;

/// The weight of a vnet whose guests have less power in all, or that has none.
pub const WEIGHT_MIN: u32 = 10;

/// A guest that has frames and completes nothing for this long is taken for dead. One with a small share
/// of a core has more time: see `silence_max` in [`crate::dispatch`].
pub const SILENCE_NS_MAX: u64 = 2_000_000_000;

/// Time between two looks whether guests complete anything, nanoseconds. Looks are counted, not time: a
/// mux or a machine that stood still has not looked.
pub const CHECK_NS: u64 = SILENCE_NS_MAX / 8;

const NO_LIMITS: [Rate; PUNT_CLASSES] = [Rate { bps: 0, pps: 0 }; PUNT_CLASSES];

/// Of an end outside: what it carries is looked at where a frame is wrapped.
const OWN_MTU: u32 = u16::MAX as u32;

/// Where a peer of a node is connected: as a guest, and by which of its lanes; or else as the TAP helper.
pub(crate) type Seat = Option<(usize, usize)>;

/// Whose frames are taken next: one connection after the other has its part, also if that takes several
/// rounds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Source {
    pub(crate) node: usize,
    pub(crate) seat: Seat,
    /// Frames left of the connection's part.
    pub(crate) left: usize,
}

impl Default for Source {
    fn default() -> Self {
        Self { node: 0, seat: None, left: PULL_FRAMES }
    }
}

/// A vnet.
#[derive(Debug)]
pub struct Vnet {
    /// Its slot in the worker.
    pub slot: u16,
    /// See [`crate::classify::PortRef`].
    pub generation: u32,
    /// Its name.
    pub name: String,
    pub(crate) police: Limit,
    /// Where it takes over from a vnet with the same ports: those that are to be otherwise.
    pub changed: Option<Vec<u16>>,
    pub(crate) nodes: Vec<Node>,
    pub(crate) ports: Vec<Port>,
    /// Those of them that are ends outside by themselves.
    pub(crate) own_ports: Range<usize>,
    pub(crate) segments: Vec<Segment>,
    /// Frames that vlinks inside the node brought.
    pub(crate) local: Batch,
    /// Frames that an engine had no time for in the visit before.
    pub(crate) late: Batch,
    /// When ports are looked at whose vlinks have frames waiting.
    pub(crate) timers: Timers,
    /// Frames waiting in all vlinks.
    pub(crate) waiting: usize,
    /// What all queues of its have set aside for them.
    pub(crate) buffers: Buffers,
    /// Whose frames are taken next.
    pub(crate) source: Source,
    /// When it was last looked whether its guests complete anything, nanoseconds.
    pub(crate) checked_ns: u64,
    /// When it last had work, nanoseconds.
    busy_ns: u64,
    /// Whether a node has an engine.
    pub(crate) has_engines: bool,
    /// What its engines are guaranteed of its worker's time, of [`mux::POWER_WHOLE`].
    pub(crate) power: u32,
    /// What visits took, cycles.
    pub(crate) used_cycles: u64,
    /// Frames that this visit may take of its peers.
    pub(crate) frames_max: usize,
    /// Whether a peer may sleep through what it was shown, so that it is to be asked again when it is time.
    pub(crate) asks: bool,
}

/// A bucket and the rate that it was made for.
#[derive(Debug)]
pub(crate) struct Limit {
    rate: Rate,
    pub(crate) bucket: TokenBucket,
}

impl Limit {
    fn new(rate: Rate) -> Self {
        Self { rate, bucket: TokenBucket::limit(rate) }
    }

    fn take_over(&mut self, old: &Self) {
        if old.rate == self.rate {
            self.bucket = old.bucket;
        }
    }
}

/// A vrouter or a host.
#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) name: String,
    /// Its first port among the vnet's.
    pub(crate) first: usize,
    pub(crate) count: usize,
    pub(crate) tap: Option<Box<Link>>,
    pub(crate) router: Option<Router>,
}

impl Node {
    /// Its ports among the vnet's, which has no more than 16,384.
    pub(crate) fn ports(&self) -> Range<u16> {
        self.first as u16..(self.first + self.count) as u16
    }

    /// What forwards in the place of guests.
    #[inline]
    pub(crate) fn engine(&mut self) -> Option<&mut Engine> {
        self.router.as_mut()?.engine.as_deref_mut()
    }

    pub(crate) fn guests(&self) -> impl Iterator<Item = &Guest> {
        self.router.iter().flat_map(|router| &router.guests)
    }

    /// The guest with this number.
    fn guest(&mut self, number: u32) -> Option<&mut Guest> {
        let mut guests = self.router.iter_mut().flat_map(|router| &mut router.guests);
        guests.find(|guest| guest.spec.number == number)
    }
}

#[derive(Debug)]
pub(crate) struct Router {
    pub(crate) guests: Vec<Guest>,
    pub(crate) distributor: Distributor,
    pub(crate) order: Order,
    pub(crate) filters: Vec<(Vec<Match>, PuntClass)>,
    /// Forwards in the place of guests.
    pub(crate) engine: Option<Box<Engine>>,
    /// Link addresses of the node's ports.
    pub(crate) macs: Vec<[u8; 6]>,
}

impl Router {
    /// Shares frames out among those who are connected now and do not leave.
    pub(crate) fn redistribute(&mut self) {
        let guests = self.guests.iter();
        let holds = guests.clone().map(|guest| (guest.spec.number, guest.outstanding.len()));
        let members = guests.enumerate().filter(|(_, guest)| guest.is_member()).map(|(at, _)| at);
        self.distributor.set_members(members, holds, &mut self.order);
    }
}

/// A port of a node.
#[derive(Debug)]
pub(crate) struct Port {
    pub(crate) name: String,
    pub(crate) node: usize,
    /// The vport: its place in the node, of which no more than 256 are used.
    pub(crate) index: u8,
    pub(crate) mtu: u32,
    pub(crate) counters: PortCounters,
    pub(crate) punts: [Limit; PUNT_CLASSES],
    pub(crate) link: Option<PortLink>,
    pub(crate) captures: Vec<Sink>,
    pub(crate) wish: Option<Wish>,
    /// Of an end outside: where its frames go on to.
    pub(crate) onward: Option<Onward>,
}

/// Where a vlink takes what comes by an end outside that is a port of its own.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Onward {
    /// Out of this port.
    Out(u16),
    /// Into this one of the vnet's segments, by this end of it.
    Segment(u16, u8),
}

impl Port {
    fn new(name: &str, node: usize, index: usize, mtu: u32, punts: [Rate; PUNT_CLASSES]) -> Self {
        Self {
            name: name.into(),
            node,
            index: index as u8,
            mtu,
            counters: PortCounters::default(),
            punts: punts.map(Limit::new),
            link: None,
            captures: vec![],
            wish: None,
            onward: None,
        }
    }

    /// Packets that wait in its vlink.
    fn waiting(&self) -> usize {
        self.link.as_ref().map_or(0, PortLink::waiting)
    }

    /// What its queues have set aside for them.
    fn buffers(&self) -> Buffers {
        self.link.as_ref().map_or_else(Buffers::default, |link| link.shaper.buffers())
    }

    /// Its queues, where there are several.
    pub(crate) fn several_queues(&mut self) -> Option<&mut Queues> {
        self.link.as_mut()?.shaper.queues()
    }

    /// Counters of its queues, from one of them on.
    pub(crate) fn queues(&self, from: usize) -> impl Iterator<Item = QueueStats> {
        self.link.iter().flat_map(move |link| link.shaper.stats(from))
    }

    /// Frames that do.
    fn in_flight(&self) -> usize {
        self.waiting() + self.link.as_ref().map_or(0, PortLink::delayed)
    }
}

/// A port's end of its vlink.
#[derive(Debug)]
pub(crate) struct PortLink {
    pub(crate) up: bool,
    pub(crate) way: Way,
    pub(crate) shaper: Shaper,
    /// What is done to frames on purpose, and those that wait for that.
    pub(crate) line: Option<Box<Line>>,
    /// Frames that wait for the next hop of the tunnel or for the interface's capacity.
    pub(crate) held: Held,
    /// Name of the vlink and its other end, to know it again.
    identity: (String, End),
}

impl PortLink {
    /// Of end `at` of a vlink towards `far`, by `way`, at `default` if it has no rate.
    fn new(vlink: &mux::Vlink, at: usize, far: &End, way: Way, default: Rate) -> Self {
        let leaving = vlink.leaving(at);
        Self {
            up: vlink.up,
            way,
            line: Line::of(&leaving),
            shaper: Shaper::new(&leaving, vlink.queues(at), default),
            held: Held::default(),
            identity: (vlink.name.clone(), far.clone()),
        }
    }

    /// Goes on with what waits in packets where `old` stopped.
    fn take_over(&mut self, old: &mut Self, now_ns: u64) {
        self.held = mem::take(&mut old.held);
        self.shaper.take_over(&mut old.shaper);
        if self.way.class().is_some() && self.shaper.waits_for_capacity() {
            // It had several queues and now has one, which is behind the rate.
            self.shaper.drain().for_each(|packet| self.held.push(now_ns, packet));
        }
    }

    /// Packets that wait for its rate or for its tunnel.
    pub(crate) fn waiting(&self) -> usize {
        self.shaper.waiting() + self.held.len()
    }

    /// Frames that wait for its delay.
    fn delayed(&self) -> usize {
        self.line.as_ref().map_or(0, |line| line.waiting())
    }

    /// Takes what waits in packets.
    fn drain(&mut self) -> impl Iterator<Item = Packet> {
        std::iter::from_fn(|| self.held.pop()).chain(self.shaper.drain())
    }
}

/// Who connects.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Who {
    /// The node's TAP helper.
    Tap,
    /// The forwarding guest with this number.
    Guest(u32),
}

impl Vnet {
    /// As `spec` says, but for engines ([`Vnet::set_engines`]); `outside` makes the outside ends. What `spec` refers to exists: see
    /// [`crate::control::check`].
    pub fn new(
        spec: &mux::Vnet,
        slot: u16,
        generation: u32,
        mut outside: impl FnMut(usize, &End) -> Option<Way>,
    ) -> Self {
        let mut nodes = Vec::new();
        let mut ports = Vec::new();
        for node in &spec.nodes {
            let limits = node.router.as_ref().map_or(NO_LIMITS, |router| router.punt_limits);
            for (index, port) in node.ports.iter().enumerate() {
                ports.push(Port::new(&port.name, nodes.len(), index, port.mtu, limits));
            }
            nodes.push(Node {
                name: node.name.clone(),
                first: ports.len() - node.ports.len(),
                count: node.ports.len(),
                tap: None,
                router: node.router.as_ref().map(|router| new_router(router, &node.ports)),
            });
        }
        let own = spec.own_ends();
        let own_ports = ports.len()..ports.len() + own.len();
        if !own.is_empty() {
            for (index, end) in own.iter().enumerate() {
                ports.push(Port::new(end.name, nodes.len(), index, OWN_MTU, NO_LIMITS));
            }
            let (name, first, count) = (mux::OUTSIDE.into(), own_ports.start, own.len());
            nodes.push(Node { name, first, count, tap: None, router: None });
        }
        let mut vnet = Self {
            slot,
            generation,
            name: spec.name.clone(),
            police: Limit::new(spec.police.unwrap_or(Rate { bps: 0, pps: 0 })),
            changed: None,
            nodes,
            ports,
            own_ports: own_ports.clone(),
            segments: vec![],
            local: vec![],
            late: vec![],
            timers: Timers::default(),
            waiting: 0,
            buffers: Buffers::default(),
            source: Source::default(),
            checked_ns: 0,
            busy_ns: 0,
            has_engines: false,
            power: 0,
            used_cycles: 0,
            frames_max: usize::MAX,
            asks: true,
        };
        for (number, vlink) in spec.vlinks.iter().enumerate() {
            let ([a, b], true) = (vlink.ends.as_slice(), vlink.is_wire()) else { continue };
            for (end, near, far) in [(0, a, b), (1, b, a)] {
                let Some(at) = vnet.port_of(near) else { continue };
                let way = match vnet.port_of(far) {
                    Some(far) => Some(Way::Port(far as u16)),
                    None => outside(number, far),
                };
                let default = if matches!(way, Some(Way::Port(_))) {
                    LOCAL_RATE
                } else {
                    Rate { bps: 0, pps: 0 }
                };
                vnet.ports[at].link = way.map(|way| PortLink::new(vlink, end, far, way, default));
            }
        }
        let none = Rate { bps: 0, pps: 0 };
        let mut firsts: Vec<Option<usize>> = vec![None; spec.vlinks.len()];
        for (at, end) in own_ports.clone().zip(&own) {
            let vlink = &spec.vlinks[end.vlink];
            let way = outside(end.vlink, end.end);
            vnet.ports[at].link = way.map(|way| PortLink::new(vlink, end.at, end.end, way, none));
            if vlink.segment.is_none()
                && let Some(other) = firsts[end.vlink].replace(at)
            {
                vnet.ports[at].onward = Some(Onward::Out(other as u16));
                vnet.ports[other].onward = Some(Onward::Out(at as u16));
            }
        }
        for vlink in &spec.vlinks {
            vnet.add_segment(vlink);
        }
        vnet.buffers = vnet.ports.iter().map(Port::buffers).fold(Buffers::default(), Buffers::and);
        vnet
    }

    /// Gives vrouters that the mux forwards for, as `spec` says, what does so.
    pub fn set_engines<E>(
        &mut self,
        spec: &mux::Vnet,
        mut engine: impl FnMut(&mux::Engine) -> Result<Engine, E>,
    ) -> Result<(), E> {
        self.power = spec.power();
        for (node, spec) in self.nodes.iter_mut().zip(&spec.nodes) {
            let wanted = spec.router.as_ref().and_then(|router| router.engine.as_ref());
            if let (Some(router), Some(wanted)) = (&mut node.router, wanted) {
                router.engine = Some(Box::new(engine(wanted)?));
                self.has_engines = true;
            }
        }
        Ok(())
    }

    /// Has the ports at the ends of a segment, each with its place there.
    fn add_segment(&mut self, vlink: &mux::Vlink) {
        let Some(spec) = vlink.segment else { return };
        let ports: Vec<_> = vlink.ends.iter().filter_map(|end| self.port_of(end)).collect();
        let tunnel = |end: &End| match end {
            End::Port { .. } => false,
            End::External { by, .. } => by.tunnel().is_some(),
        };
        let ends = ports.iter().map(|at| *at as u16).zip(vlink.ends.iter().map(tunnel));
        let flood = Rate { bps: 0, pps: spec.flood_pps };
        let at = self.segments.len() as u16;
        for (place, (port, end)) in (0..=u8::MAX).zip(ports.iter().zip(&vlink.ends)) {
            match end {
                End::External { .. } => {
                    self.ports[*port].onward = Some(Onward::Segment(at, place));
                }
                End::Port { .. } => {
                    let way = Way::Segment(at, place);
                    let link = PortLink::new(vlink, place.into(), end, way, LOCAL_RATE);
                    self.ports[*port].link = Some(link);
                }
            }
        }
        let addresses = spec.addresses as usize;
        self.segments.push(Segment::new(vlink.name.clone(), addresses, flood, ends));
    }

    fn port_of(&self, end: &End) -> Option<usize> {
        match end {
            End::Port { node, port } => {
                let node = self.nodes.iter().find(|known| known.name == *node)?;
                Some(node.first + usize::from(*port)).filter(|_| usize::from(*port) < node.count)
            }
            End::External { name, .. } => {
                let own = &self.ports[self.own_ports.clone()];
                let at = own.binary_search_by(|port| port.name.cmp(name)).ok()?;
                Some(self.own_ports.start + at)
            }
        }
    }

    /// Its part of a worker's time beside others': the sum of its guests' shares, thousandths of a core,
    /// and at least [`WEIGHT_MIN`]. What engines are guaranteed counts for none: it comes before
    /// ([`crate::turns`]), and what is left is for the moving of frames.
    pub fn weight(&self) -> u32 {
        let weights = self.guests().map(|guest| guest.spec.weight);
        weights.fold(0, u32::saturating_add).max(WEIGHT_MIN)
    }

    fn guests(&self) -> impl Iterator<Item = &Guest> {
        self.nodes.iter().flat_map(Node::guests)
    }

    /// Why a frame for a port is dropped that finds no room to wait for a visit.
    pub(crate) fn behind(&self, port: u16) -> Reason {
        let node = self.ports.get(usize::from(port)).map(|port| &self.nodes[port.node]);
        let router = node.and_then(|node| node.router.as_ref());
        match router.is_some_and(|router| router.engine.is_some()) {
            true => Reason::FastpathPower,
            false => Reason::Behind,
        }
    }

    pub(crate) fn engines(&self) -> impl Iterator<Item = &Engine> {
        let nodes = if self.has_engines { &self.nodes[..] } else { &[] };
        let routers = nodes.iter().filter_map(|node| node.router.as_ref());
        routers.filter_map(|router| router.engine.as_deref())
    }

    fn node(&mut self, name: &str) -> Option<&mut Node> {
        self.nodes.iter_mut().find(|known| known.name == name)
    }

    /// Goes on where `old` stopped, in all that is the same in both. The rest of `old` ends; what is left of
    /// it is not to be dropped by the worker, which has better to do.
    pub fn take_over(&mut self, old: &mut Vnet, core: &mut Core) {
        // Has its turn as it had, if there still is who decides on it.
        let mut late = mem::take(&mut old.late);
        while old.arrive(core, &mut vec![]) > 0 {}
        late.append(&mut old.late);
        self.police.take_over(&old.police);
        self.checked_ns = old.checked_ns;
        self.used_cycles = old.used_cycles;
        let changed = self.changed.take().filter(|_| self.ports.len() == old.ports.len());
        let same_ports = changed.is_some();
        let buffers = old.buffers;
        if let Some(changed) = changed {
            mem::swap(&mut self.ports, &mut old.ports);
            self.buffers = buffers;
            for at in changed.into_iter().map(usize::from) {
                self.buffers = self.buffers.without(self.ports[at].buffers());
                mem::swap(&mut self.ports[at], &mut old.ports[at]);
                take_over_port(&mut self.ports[at], &mut old.ports[at], core);
                self.buffers = self.buffers.and(self.ports[at].buffers());
            }
        }
        let has_engine = |packet: &mut Packet| {
            let router = &self.nodes[self.ports[usize::from(packet.port)].node].router;
            same_ports && router.as_ref().is_some_and(|router| router.engine.is_some())
        };
        self.late.extend(late.extract_if(.., has_engine));
        let ports = if same_ports { &mut self.ports } else { &mut old.ports };
        for packet in late {
            ports[usize::from(packet.port)].drop(core, Reason::Behind, packet);
        }
        self.take_over_segments(old, same_ports, core.now_ns);
        let mut next = 0;
        for was in &mut old.nodes {
            let ports = &mut old.ports[was.first..was.first + was.count];
            let names = ports.iter().map(|port| &port.name);
            let is_it = |at: &usize| {
                let node = &self.nodes[*at];
                let kept = self.ports[node.first..].iter().take(node.count);
                node.name == was.name
                    && node.count >= was.count
                    && kept.zip(names.clone()).all(|(kept, name)| kept.name == *name)
            };
            // Most are in the same order in both.
            let found = match same_ports {
                true => Some(next),
                false => (next..self.nodes.len()).chain(0..next).find(is_it),
            };
            if was.name == mux::OUTSIDE && !same_ports {
                // By itself each, in the order of their names.
                let own = &mut self.ports[self.own_ports.clone()];
                for was in ports.iter_mut() {
                    if let Ok(at) = own.binary_search_by(|port| port.name.cmp(&was.name)) {
                        take_over_port(&mut own[at], was, core);
                    }
                }
                end_node(was, ports, core);
                continue;
            }
            let Some(at) = found else {
                end_node(was, ports, core);
                continue;
            };
            next = at + 1;
            let node = &mut self.nodes[at];
            if !same_ports {
                let kept = self.ports[node.first..].iter_mut();
                kept.zip(ports).for_each(|(port, was)| take_over_port(port, was, core));
            }
            node.tap = was.tap.take();
            take_over_guests(node, was.router.as_mut(), &mut self.ports, core);
        }
        if same_ports {
            self.timers = mem::take(&mut old.timers);
        } else {
            let ports = self.ports.iter().map(Port::buffers);
            self.buffers = ports.fold(Buffers::default(), Buffers::and);
            let waits = self.ports.iter().zip(0..).filter(|(port, _)| port.in_flight() > 0);
            waits.for_each(|(_, at)| self.timers.set(at, core.now_ns));
        }
        let waiting = |at| self.ports[usize::from(at)].waiting();
        self.waiting = self.timers.numbers().map(waiting).sum();
        core.packets.set_aside(buffers.left(), self.buffers.left());
    }

    /// The same for what segments have learned. Of most, and of most of their ends, the order is the same in both.
    fn take_over_segments(&mut self, old: &mut Vnet, same_ports: bool, now_ns: u64) {
        let Self { segments, nodes, ports, .. } = self;
        let mut next = 0;
        for was in &mut old.segments {
            let mut all = (next..segments.len()).chain(0..next);
            let Some(at) = all.find(|at| segments[*at].name == was.name) else { continue };
            next = at + 1;
            let now: Vec<_> = segments[at].ports().collect();
            let is = |before: u16, after: u16| match same_ports {
                true => before == after,
                false => {
                    let before = &old.ports[usize::from(before)];
                    let after = &ports[usize::from(after)];
                    let names = (&old.nodes[before.node].name, &nodes[after.node].name);
                    before.name == after.name && names.0 == names.1
                }
            };
            let mut end = 0;
            let places: Vec<_> = was
                .ports()
                .map(|before| {
                    let found = (end..now.len()).chain(0..end).find(|at| is(before, now[*at]));
                    end = found.map_or(end, |found| found + 1);
                    found.map(|found| found as u8)
                })
                .collect();
            segments[at].take_over(was, &places, now_ns);
        }
    }

    /// It is in use: what its queues have set aside is kept for them.
    pub fn begin(&self, core: &mut Core) {
        core.packets.set_aside(0, self.buffers.left());
    }

    /// Ends all of it; what is left is as in [`Vnet::take_over`].
    pub fn end(&mut self, core: &mut Core) {
        core.packets.set_aside(self.buffers.left(), 0);
        core.packets.give_all(&mut self.local);
        core.packets.give_all(&mut self.late);
        for node in &mut self.nodes {
            end_node(node, &mut self.ports[node.first..node.first + node.count], core);
        }
    }

    /// Takes a connection in, whose doorbell is watched already. Gives it back if nobody is expected there, or
    /// somebody is there: to let go of it may take as long as the peer wants.
    pub fn attach<L: Lane + 'static>(
        &mut self,
        node: &str,
        who: Who,
        interface: u32,
        mut link: Link<L>,
    ) -> Result<(), Link<L>> {
        let Some(node) = self.node(node) else { return Err(link) };
        let (attach, place) = match who {
            Who::Tap => (Attach::Tap, Some(&mut node.tap).filter(|_| interface == 0)),
            Who::Guest(number) => {
                let Some(guest) = node.guest(number) else { return Err(link) };
                (guest.spec.attach, guest.links.get_mut(interface as usize))
            }
        };
        let Some(place) = place.filter(|place| place.is_none()) else { return Err(link) };
        // No more interfaces than ports.
        link.attach(attach, interface as u8);
        *place = Some(Box::new(link));
        node.router.iter_mut().for_each(Router::redistribute);
        Ok(())
    }

    /// Lets go of the connection with this number, whose peer hung up.
    pub fn detach(&mut self, epoch: u64, core: &mut Core) {
        let is_it =
            |link: &Option<Box<Link>>| link.as_ref().is_some_and(|link| link.epoch == epoch);
        let lane = |(at, guest): (_, &Guest)| Some((at, guest.links.iter().position(is_it)?));
        let mut nodes = self.nodes.iter().enumerate();
        let found = nodes.find_map(|(at, node)| match node.guests().enumerate().find_map(lane) {
            None => is_it(&node.tap).then_some((at, None)),
            seat => Some((at, seat)),
        });
        if let Some((node, seat)) = found {
            self.lose(node, seat, core, None);
        }
    }

    /// A connection is gone, or is to go: `fault` says why. What a guest had is lost.
    pub(crate) fn lose(&mut self, node: usize, seat: Seat, core: &mut Core, fault: Option<String>) {
        let Node { tap, router, first, .. } = &mut self.nodes[node];
        let (link, lost) = match (seat, router) {
            (None, _) => (tap.take(), None),
            (Some((guest, lane)), Some(router)) => {
                (router.guests[guest].links[lane].take(), Some((guest, router)))
            }
            (Some(_), None) => return,
        };
        if let Some(link) = link {
            core.connections.end(link, fault.as_deref().unwrap_or("gone"), fault.is_some());
        }
        let Some((guest, router)) = lost else { return };
        let guest = &mut router.guests[guest];
        if let Some(fault) = fault {
            guest.fault(fault);
        }
        for vport in guest.outstanding.drain() {
            self.ports[*first + usize::from(vport)].counters.drop(Reason::GuestGone);
        }
        guest.silent = Silence::default();
        router.order.forget(guest.spec.number);
        router.redistribute();
    }

    /// A guest broke the contract before it was connected.
    pub(crate) fn note_fault(&mut self, node: &str, guest: u32, fault: String) {
        if let Some(guest) = self.node(node).and_then(|node| node.guest(guest)) {
            guest.fault(fault);
        }
    }

    /// Every connection, for sleeping.
    pub(crate) fn links(&mut self) -> impl Iterator<Item = &mut Box<Link>> {
        self.nodes.iter_mut().flat_map(|node| {
            let guests = node.router.iter_mut().flat_map(|router| &mut router.guests);
            node.tap.iter_mut().chain(guests.flat_map(|guest| guest.links.iter_mut().flatten()))
        })
    }

    /// One of its peers has rung: all are looked at again.
    pub fn rung(&mut self, now_ns: u64) {
        self.links().for_each(|link| link.disarm(now_ns));
    }

    /// The way through it: what is in `batch`, which is emptied, to guests and TAPs, and what these have sent out of
    /// its ports. Returns how many frames there were.
    pub fn visit(&mut self, core: &mut Core, batch: &mut Batch) -> usize {
        let arrived = self.arrive(core, batch);
        core.meter.lap(Stage::Distribute, arrived);
        let went = self.from_peers(core) + self.shape(core) + self.tend(core);
        if went > 0 || self.asks {
            self.flush(core);
        }
        arrived + went
    }

    /// Notes whether there was work in this round. True if there was none for [`REST_NS`] and nothing
    /// is on its way, so that it may rest.
    pub fn is_tired(&mut self, work: bool, now_ns: u64) -> bool {
        if work {
            self.busy_ns = now_ns;
        }
        now_ns.saturating_sub(self.busy_ns) >= REST_NS && self.is_idle()
    }

    /// When it is to be looked at again at the latest, nanoseconds.
    pub fn due_ns(&self) -> Option<u64> {
        let check_ns = self.is_owed().then_some(self.checked_ns + CHECK_NS);
        let engines = self.engines().filter_map(Engine::due_ns);
        let late_ns = self.is_late().then_some(0);
        engines.chain(self.timers.next_ns()).chain(check_ns).chain(late_ns).min()
    }

    /// Whether nothing is on its way in it, and every peer rings.
    fn is_idle(&self) -> bool {
        self.local.is_empty()
            && self.late.is_empty()
            && self.timers.next_ns().is_none()
            && !self.is_owed()
            && !self.has_unsure_peer()
            && self.engines().all(Engine::is_idle)
    }

    /// Whether a guest has frames that it has not completed.
    pub fn is_owed(&self) -> bool {
        self.guests().any(|guest| !guest.outstanding.is_empty())
    }

    /// Whether a peer is connected whose doorbell can't be relied on.
    pub(crate) fn has_unsure_peer(&self) -> bool {
        self.guests().any(|g| g.spec.attach == Attach::Memif && g.is_connected())
    }

    /// Copies the counters of a node, all of this moment; not those of queues, of which there may be many.
    pub fn count(&self, node: usize, now_ns: u64) -> Option<Counted> {
        let node = self.nodes.get(node)?;
        let ports = &self.ports[node.first..node.first + node.count];
        let outstanding: usize = node.guests().map(|guest| guest.outstanding.len()).sum();
        let late = self.late.iter().filter(|it| node.ports().contains(&it.port)).count();
        let counted = node.guests().map(|guest| {
            let (connected, in_flight) = (guest.is_connected(), guest.outstanding.len() as u64);
            let stats = GuestStats { connected, in_flight, ..guest.stats.clone() };
            (guest.spec.number, stats)
        });
        Some(Counted {
            now_ns,
            guests: counted.collect(),
            in_flight: (late + outstanding + ports.iter().map(Port::in_flight).sum::<usize>())
                as u64,
            tap_connected: node.tap.is_some(),
            engine: node.router.as_ref().and_then(|it| it.engine.as_ref()).map(|it| it.stats()),
            ports: ports.iter().map(|port| (port.counters.clone(), port.in_flight())).collect(),
        })
    }

    /// All counters, with names, and each limit that ever dropped a frame; queues have none here.
    pub fn stats(&self) -> VnetStats {
        let nodes = self.nodes.iter().enumerate().filter_map(|(at, node)| {
            let ports = &self.ports[node.first..][..node.count];
            let mut stats = self.count(at, 0)?.stats(ports.iter().map(|port| &*port.name));
            for port in ports {
                let stats = stats.ports.get_mut(&port.name);
                stats.into_iter().for_each(|it| it.queues = port.queues(0).collect());
            }
            Some((node.name.clone(), stats))
        });
        VnetStats { nodes: nodes.collect() }
    }
}

fn new_router(spec: &mux::Router, ports: &[mux::Port]) -> Router {
    let filters = spec
        .punt_filters
        .iter()
        .filter_map(|filter| Some((filter.matches.clone(), PuntClass::from_code(filter.class)?)));
    let candidate = |guest: &mux::Guest| Candidate { number: guest.number, weight: guest.weight };
    let candidates: Vec<_> = spec.guests.iter().map(candidate).collect();
    Router {
        guests: spec.guests.iter().map(|guest| Guest::new(guest.clone(), ports.len())).collect(),
        distributor: Distributor::new(spec.policy, spec.flow.clone(), &candidates, FLOW_SLOTS),
        order: Order::default(),
        filters: filters.collect(),
        engine: None,
        macs: ports.iter().map(|port| port.mac).collect(),
    }
}

fn take_over_port(port: &mut Port, was: &mut Port, core: &mut Core) {
    port.counters = mem::take(&mut was.counters);
    port.captures = mem::take(&mut was.captures);
    port.wish = was.wish.take();
    for (limit, was) in port.punts.iter_mut().zip(&was.punts) {
        limit.take_over(was);
    }
    // What has memory of its own is left there, for whoever drops it.
    let Some(was) = &mut was.link else { return };
    let mut lost: Vec<Packet> = Vec::new();
    match &mut port.link {
        Some(link) if link.up && link.identity == was.identity => {
            link.take_over(was, core.now_ns);
            link.line = Line::goes_on(link.line.take(), &mut was.line);
        }
        _ => {
            port.counters.drop_all(Reason::LinkDown, was.delayed() as u64);
            lost.extend(was.drain());
        }
    }
    for packet in lost {
        port.counters.drop(Reason::LinkDown);
        core.tracer.end(packet.mark, "drop", || Reason::LinkDown.name().into());
        core.packets.give(packet);
    }
}

fn take_over_guests(
    node: &mut Node,
    old: Option<&mut Router>,
    ports: &mut [Port],
    core: &mut Core,
) {
    let Some(old) = old else { return };
    if let Some(router) = &mut node.router {
        router.order = mem::take(&mut old.order);
        if let (Some(new), Some(was)) = (&mut router.engine, &mut old.engine)
            && new.is_as(was)
        {
            // The new one was not in use yet.
            mem::swap(new, was);
        } else if old.engine.is_some() {
            // What its programs have set goes with it.
            let ports = &mut ports[node.first..node.first + node.count];
            ports.iter_mut().filter_map(Port::several_queues).for_each(Queues::unset);
        }
    }
    for was in &mut old.guests {
        let mut guests = node.router.iter_mut().flat_map(|router| &mut router.guests);
        let same = guests.find(|guest| {
            (guest.spec.number, guest.spec.attach, &guest.spec.socket)
                == (was.spec.number, was.spec.attach, &was.spec.socket)
        });
        if let Some(guest) = same {
            guest.take_over(was);
            continue;
        }
        for vport in was.outstanding.drain() {
            let port = &mut ports[node.first + usize::from(vport)];
            port.counters.drop(Reason::GuestGone);
        }
        if let Some(router) = &mut node.router {
            router.order.forget(was.spec.number);
        }
        for link in was.links.iter_mut().filter_map(Option::take) {
            core.connections.end(link, "no guest of this vrouter any more", false);
        }
    }
    if let Some(router) = &mut node.router {
        router.redistribute();
    }
}

fn end_node(node: &mut Node, ports: &mut [Port], core: &mut Core) {
    for link in ports.iter_mut().filter_map(|port| port.link.as_mut()) {
        for packet in link.drain() {
            core.tracer.end(packet.mark, "drop", || "the node was removed".into());
            core.packets.give(packet);
        }
    }
    let guests = node.router.iter_mut().flat_map(|router| &mut router.guests);
    let links = guests.flat_map(|guest| guest.links.iter_mut().filter_map(Option::take));
    for link in links.chain(node.tap.take()) {
        core.connections.end(link, "the node was removed", false);
    }
}
