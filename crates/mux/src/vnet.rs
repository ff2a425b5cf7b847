//! A vnet at its worker: nodes, their ports, and the vlinks between them.
//!
//! The control thread creates it from pdpd's request ([`MuxVnet::new`]). The worker then moves all
//! runtime state (connections, queues, counters) from the old vnet into it
//! ([`MuxVnet::take_over`]).

use std::mem;
use std::ops::Range;

use pdp_afxdp::PacketBuffer;
use pdp_model::{GuestStats, NodeStats, QueueStats, VnetStats};
use pdp_proto::mux::{self, AttachMode, BytePattern, PUNT_CLASSES, Rate, VlinkEnd};
use pdp_wire::tag::PuntClass;

use crate::capture::CaptureSink;
use crate::channel::{PULL_FRAMES, PeerChannel, PeerConnection};
use crate::core::Core;
use crate::counters::{NodeCounters, PortCounters, Reason};
use crate::delay_line::DelayLine;
use crate::distribute::{Distributor, FLOW_SLOTS, GuestCandidate};
use crate::encapsulate::VlinkPath;
use crate::engine::VrouterEngine;
use crate::meter::Stage;
use crate::order::CompletionOrder;
use crate::packets::PacketBatch;
use crate::peer::{MuxGuest, Silence};
use crate::police::TokenBucket;
use crate::queues::{Buffers, Queues};
use crate::segment::MuxSegment;
use crate::shape::{LOCAL_RATE, PendingFrames, Shaper};
use crate::timers::Timers;
use crate::trace::PendingTrace;

/// A vnet without work for this long goes idle, nanoseconds.
pub const IDLE_NS: u64 = 1_000_000;

/// Weight of a vnet whose guests have less power in total, or that has no guests.
pub const WEIGHT_MIN: u32 = 10;

/// A guest that has frames and completes nothing for this long is considered dead. One
/// with a small part of a core has more time: see `silence_max` in [`crate::dispatch`].
pub const SILENCE_NS_MAX: u64 = 2_000_000_000;

/// Time between two checks of the guests' progress, nanoseconds. Checks are counted
/// instead of time, because a mux or a machine that stood still did not check.
pub const CHECK_NS: u64 = SILENCE_NS_MAX / 8;

const NO_LIMITS: [Rate; PUNT_CLASSES] = [Rate { bps: 0, pps: 0 }; PUNT_CLASSES];

/// MTU of an external end's port. The actual limit is checked when a frame is encapsulated.
const OWN_MTU: u32 = u16::MAX as u32;

/// Connection of a node's peer: the indices of a guest
/// and of its channel, or `None` for the TAP helper.
pub(crate) type PeerIndex = Option<(usize, usize)>;

/// Peer whose frames are taken next. Each connection in
/// turn gets its part, even if that takes several rounds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PeerCursor {
    pub(crate) node: usize,
    pub(crate) peer: PeerIndex,
    /// Frames left of the connection's part.
    pub(crate) left: usize,
}

impl Default for PeerCursor {
    fn default() -> Self {
        Self { node: 0, peer: None, left: PULL_FRAMES }
    }
}

/// A vnet.
#[derive(Debug)]
pub struct MuxVnet {
    /// Slot in the worker.
    pub slot: u16,
    /// See [`crate::classify::PortRef`].
    pub generation: u32,
    /// Name of the vnet.
    pub name: String,
    pub(crate) police: RateLimit,
    /// Ports that have changed, if it takes over from a vnet with the same ports.
    pub changed: Option<Vec<u16>>,
    pub(crate) nodes: Vec<MuxNode>,
    pub(crate) ports: Vec<MuxPort>,
    /// Ports that are external ends by themselves.
    pub(crate) own_ports: Range<usize>,
    pub(crate) segments: Vec<MuxSegment>,
    /// Frames that vlinks inside the node delivered.
    pub(crate) local: PacketBatch,
    /// Frames that an engine had no time for in the last visit.
    pub(crate) engine_backlog: PacketBatch,
    /// Times when ports are checked whose vlinks have queued or delayed frames.
    pub(crate) timers: Timers,
    /// Frames that wait at all vlinks, in packets.
    pub(crate) waiting: usize,
    /// Packets that are reserved for all of its queues.
    pub(crate) buffers: Buffers,
    /// Peer whose frames are taken next.
    pub(crate) source: PeerCursor,
    /// Time of the last check of its guests' progress, nanoseconds.
    pub(crate) checked_ns: u64,
    /// Time when it last had work, nanoseconds.
    busy_ns: u64,
    /// True if a node has an engine.
    pub(crate) has_engines: bool,
    /// Part of its worker's time that its engines are guaranteed, of [`mux::POWER_WHOLE`].
    pub(crate) power: u32,
    /// Cycles that visits took.
    pub(crate) used_cycles: u64,
    /// Frames that this visit may take from its peers.
    pub(crate) frames_max: usize,
    /// True if a peer may have missed a notification and must be notified again.
    pub(crate) must_renotify: bool,
}

/// A token bucket, and the rate that it was made for.
#[derive(Debug)]
pub(crate) struct RateLimit {
    rate: Rate,
    pub(crate) bucket: TokenBucket,
}

impl RateLimit {
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
pub(crate) struct MuxNode {
    pub(crate) name: String,
    /// Index of its first port among the vnet's.
    pub(crate) first: usize,
    pub(crate) count: usize,
    pub(crate) tap: Option<Box<PeerConnection>>,
    pub(crate) router: Option<MuxRouter>,
}

impl MuxNode {
    /// Returns its ports among the vnet's, which has at most 16,384.
    pub(crate) fn ports(&self) -> Range<u16> {
        self.first as u16..(self.first + self.count) as u16
    }

    /// Returns the engine that forwards instead of guests.
    #[inline]
    pub(crate) fn engine(&mut self) -> Option<&mut VrouterEngine> {
        self.router.as_mut()?.engine.as_deref_mut()
    }

    pub(crate) fn guests(&self) -> impl Iterator<Item = &MuxGuest> {
        self.router.iter().flat_map(|router| &router.guests)
    }

    /// Returns the guest with this number.
    fn guest(&mut self, number: u32) -> Option<&mut MuxGuest> {
        let mut guests = self.router.iter_mut().flat_map(|router| &mut router.guests);
        guests.find(|guest| guest.spec.number == number)
    }
}

#[derive(Debug)]
pub(crate) struct MuxRouter {
    pub(crate) guests: Vec<MuxGuest>,
    pub(crate) distributor: Distributor,
    pub(crate) order: CompletionOrder,
    pub(crate) filters: Vec<(Vec<BytePattern>, PuntClass)>,
    /// Engine that forwards instead of guests.
    pub(crate) engine: Option<Box<VrouterEngine>>,
    /// MAC addresses of the node's ports.
    pub(crate) macs: Vec<[u8; 6]>,
}

impl MuxRouter {
    /// Distributes frames to the guests that are connected and not about to leave.
    pub(crate) fn redistribute(&mut self) {
        let guests = self.guests.iter();
        let holds = guests.clone().map(|guest| (guest.spec.number, guest.outstanding.len()));
        let members = guests.enumerate().filter(|(_, guest)| guest.is_member()).map(|(at, _)| at);
        self.distributor.set_members(members, holds, &mut self.order);
    }
}

/// A port of a node.
#[derive(Debug)]
pub(crate) struct MuxPort {
    pub(crate) name: String,
    pub(crate) node: usize,
    /// Vport: its index in the node, of which at most 256 are used.
    pub(crate) index: u8,
    pub(crate) mtu: u32,
    pub(crate) counters: PortCounters,
    pub(crate) punts: [RateLimit; PUNT_CLASSES],
    pub(crate) link: Option<PortLink>,
    pub(crate) captures: Vec<CaptureSink>,
    pub(crate) wish: Option<PendingTrace>,
    /// For an external end: where its frames are relayed to.
    pub(crate) relay: Option<RelayTarget>,
}

/// Destination of frames that arrive at an external end which is a port of its own.
#[derive(Clone, Copy, Debug)]
pub(crate) enum RelayTarget {
    /// Out of this port.
    Out(u16),
    /// Into the vnet's segment with this number, by this end of it.
    Segment(u16, u8),
}

impl MuxPort {
    fn new(name: &str, node: usize, index: usize, mtu: u32, punts: [Rate; PUNT_CLASSES]) -> Self {
        Self {
            name: name.into(),
            node,
            index: index as u8,
            mtu,
            counters: PortCounters::default(),
            punts: punts.map(RateLimit::new),
            link: None,
            captures: vec![],
            wish: None,
            relay: None,
        }
    }

    /// Returns the packets that wait in its vlink.
    fn waiting(&self) -> usize {
        self.link.as_ref().map_or(0, PortLink::waiting)
    }

    /// Returns the packets that are reserved for its queues.
    fn buffers(&self) -> Buffers {
        self.link.as_ref().map_or_else(Buffers::default, |link| link.shaper.buffers())
    }

    /// Returns its queues, if there are several.
    pub(crate) fn several_queues(&mut self) -> Option<&mut Queues> {
        self.link.as_mut()?.shaper.queues()
    }

    /// Returns the counters of its queues, beginning with queue `from`.
    pub(crate) fn queues(&self, from: usize) -> impl Iterator<Item = QueueStats> {
        self.link.iter().flat_map(move |link| link.shaper.stats(from))
    }

    /// Returns the frames that wait in its vlink, in packets or delayed.
    fn in_flight(&self) -> usize {
        self.waiting() + self.link.as_ref().map_or(0, PortLink::delayed)
    }
}

/// A port's end of its vlink.
#[derive(Debug)]
pub(crate) struct PortLink {
    pub(crate) up: bool,
    pub(crate) path: VlinkPath,
    pub(crate) shaper: Shaper,
    /// Impairments of the vlink, and the delayed frames.
    pub(crate) delay_line: Option<Box<DelayLine>>,
    /// Frames that are pending on the tunnel's next hop or on the interface's capacity.
    pub(crate) pending: PendingFrames,
    /// Name of the vlink and its other end, to find it again after a change.
    identity: (String, VlinkEnd),
}

impl PortLink {
    /// Creates end `at` of a vlink towards `far`, with path
    /// `path`. The rate is `default` if none is configured.
    fn new(vlink: &mux::Vlink, at: usize, far: &VlinkEnd, path: VlinkPath, default: Rate) -> Self {
        let egress = vlink.egress(at);
        Self {
            up: vlink.up,
            path,
            delay_line: DelayLine::of(&egress),
            shaper: Shaper::new(&egress, vlink.queues(at), default),
            pending: PendingFrames::default(),
            identity: (vlink.name.clone(), far.clone()),
        }
    }

    /// Takes over the frames in packets from `old`.
    fn take_over(&mut self, old: &mut Self, now_ns: u64) {
        self.pending = mem::take(&mut old.pending);
        self.shaper.take_over(&mut old.shaper);
        if self.path.traffic_class().is_some() && self.shaper.waits_for_capacity() {
            // The end had several queues and now has one, which precedes the capacity.
            self.shaper.drain().for_each(|packet| self.pending.push(now_ns, packet));
        }
    }

    /// Returns the packets that wait for its rate or for its tunnel.
    pub(crate) fn waiting(&self) -> usize {
        self.shaper.waiting() + self.pending.len()
    }

    /// Returns the delayed frames.
    fn delayed(&self) -> usize {
        self.delay_line.as_ref().map_or(0, |line| line.waiting())
    }

    /// Removes and returns the packets that wait.
    fn drain(&mut self) -> impl Iterator<Item = PacketBuffer> {
        std::iter::from_fn(|| self.pending.pop()).chain(self.shaper.drain())
    }
}

/// Peer that connects to a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum NodePeer {
    /// The node's TAP helper.
    Tap,
    /// The forwarding guest with this number.
    Guest(u32),
}

impl MuxVnet {
    /// Creates the vnet that `spec` describes, without engines
    /// ([`MuxVnet::set_engines`]). `outside` creates the external ends. All
    /// references in `spec` must be valid: see [`crate::control::check`].
    pub fn new(
        spec: &mux::VnetConfig,
        slot: u16,
        generation: u32,
        mut outside: impl FnMut(usize, &VlinkEnd) -> Option<VlinkPath>,
    ) -> Self {
        let mut nodes = Vec::new();
        let mut ports = Vec::new();
        for node in &spec.nodes {
            let limits = node.router.as_ref().map_or(NO_LIMITS, |router| router.punt_limits);
            for (index, port) in node.ports.iter().enumerate() {
                ports.push(MuxPort::new(&port.name, nodes.len(), index, port.mtu, limits));
            }
            nodes.push(MuxNode {
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
                ports.push(MuxPort::new(end.name, nodes.len(), index, OWN_MTU, NO_LIMITS));
            }
            let (name, first, count) = (mux::OUTSIDE.into(), own_ports.start, own.len());
            nodes.push(MuxNode { name, first, count, tap: None, router: None });
        }
        let mut vnet = Self {
            slot,
            generation,
            name: spec.name.clone(),
            police: RateLimit::new(spec.police.unwrap_or(Rate { bps: 0, pps: 0 })),
            changed: None,
            nodes,
            ports,
            own_ports: own_ports.clone(),
            segments: vec![],
            local: vec![],
            engine_backlog: vec![],
            timers: Timers::default(),
            waiting: 0,
            buffers: Buffers::default(),
            source: PeerCursor::default(),
            checked_ns: 0,
            busy_ns: 0,
            has_engines: false,
            power: 0,
            used_cycles: 0,
            frames_max: usize::MAX,
            must_renotify: true,
        };
        for (number, vlink) in spec.vlinks.iter().enumerate() {
            let ([a, b], true) = (vlink.ends.as_slice(), vlink.is_wire()) else { continue };
            for (end, near, far) in [(0, a, b), (1, b, a)] {
                let Some(at) = vnet.port_of(near) else { continue };
                let path = match vnet.port_of(far) {
                    Some(far) => Some(VlinkPath::Port(far as u16)),
                    None => outside(number, far),
                };
                let default = if matches!(path, Some(VlinkPath::Port(_))) {
                    LOCAL_RATE
                } else {
                    Rate { bps: 0, pps: 0 }
                };
                vnet.ports[at].link =
                    path.map(|path| PortLink::new(vlink, end, far, path, default));
            }
        }
        let none = Rate { bps: 0, pps: 0 };
        let mut firsts: Vec<Option<usize>> = vec![None; spec.vlinks.len()];
        for (at, end) in own_ports.clone().zip(&own) {
            let vlink = &spec.vlinks[end.vlink];
            let path = outside(end.vlink, end.end);
            vnet.ports[at].link =
                path.map(|path| PortLink::new(vlink, end.at, end.end, path, none));
            if vlink.segment.is_none()
                && let Some(other) = firsts[end.vlink].replace(at)
            {
                vnet.ports[at].relay = Some(RelayTarget::Out(other as u16));
                vnet.ports[other].relay = Some(RelayTarget::Out(at as u16));
            }
        }
        for vlink in &spec.vlinks {
            vnet.add_segment(vlink);
        }
        vnet.buffers =
            vnet.ports.iter().map(MuxPort::buffers).fold(Buffers::default(), Buffers::and);
        vnet
    }

    /// Creates the engines of the vrouters that the mux itself forwards for, as `spec` says.
    pub fn set_engines<E>(
        &mut self,
        spec: &mux::VnetConfig,
        mut engine: impl FnMut(&mux::EngineConfig) -> Result<VrouterEngine, E>,
    ) -> Result<(), E> {
        self.power = spec.power();
        for (node, spec) in self.nodes.iter_mut().zip(&spec.nodes) {
            let config = spec.router.as_ref().and_then(|router| router.engine.as_ref());
            if let (Some(router), Some(config)) = (&mut node.router, config) {
                router.engine = Some(Box::new(engine(config)?));
                self.has_engines = true;
            }
        }
        Ok(())
    }

    /// Adds a segment, and connects the ports at its ends.
    fn add_segment(&mut self, vlink: &mux::Vlink) {
        let Some(spec) = vlink.segment else { return };
        let ports: Vec<_> = vlink.ends.iter().filter_map(|end| self.port_of(end)).collect();
        let tunnel = |end: &VlinkEnd| match end {
            VlinkEnd::Port { .. } => false,
            VlinkEnd::External { by, .. } => by.tunnel().is_some(),
        };
        let ends = ports.iter().map(|at| *at as u16).zip(vlink.ends.iter().map(tunnel));
        let flood = Rate { bps: 0, pps: spec.flood_pps };
        let at = self.segments.len() as u16;
        for (place, (port, end)) in (0..=u8::MAX).zip(ports.iter().zip(&vlink.ends)) {
            match end {
                VlinkEnd::External { .. } => {
                    self.ports[*port].relay = Some(RelayTarget::Segment(at, place));
                }
                VlinkEnd::Port { .. } => {
                    let path = VlinkPath::Segment(at, place);
                    let link = PortLink::new(vlink, place.into(), end, path, LOCAL_RATE);
                    self.ports[*port].link = Some(link);
                }
            }
        }
        let addresses = spec.addresses as usize;
        self.segments.push(MuxSegment::new(vlink.name.clone(), addresses, flood, ends));
    }

    fn port_of(&self, end: &VlinkEnd) -> Option<usize> {
        match end {
            VlinkEnd::Port { node, port } => {
                let node = self.nodes.iter().find(|known| known.name == *node)?;
                Some(node.first + usize::from(*port)).filter(|_| usize::from(*port) < node.count)
            }
            VlinkEnd::External { name, .. } => {
                let own = &self.ports[self.own_ports.clone()];
                let at = own.binary_search_by(|port| port.name.cmp(name)).ok()?;
                Some(self.own_ports.start + at)
            }
        }
    }

    /// Returns its weight for the worker's time: the sum of its guests' shares, thousandths of a
    /// core, and at least [`WEIGHT_MIN`]. Guaranteed power of engines does not count. It is served
    /// first ([`crate::vnet_scheduler`]), and the weight divides the rest of the time for moving
    /// frames.
    pub fn weight(&self) -> u32 {
        let weights = self.guests().map(|guest| guest.spec.weight);
        weights.fold(0, u32::saturating_add).max(WEIGHT_MIN)
    }

    fn guests(&self) -> impl Iterator<Item = &MuxGuest> {
        self.nodes.iter().flat_map(MuxNode::guests)
    }

    /// Returns the drop reason for frames of a port that can't be queued for a visit.
    pub(crate) fn queue_drop_reason(&self, port: u16) -> Reason {
        let node = self.ports.get(usize::from(port)).map(|port| &self.nodes[port.node]);
        let router = node.and_then(|node| node.router.as_ref());
        match router.is_some_and(|router| router.engine.is_some()) {
            true => Reason::FastpathPower,
            false => Reason::Behind,
        }
    }

    pub(crate) fn engines(&self) -> impl Iterator<Item = &VrouterEngine> {
        let nodes = if self.has_engines { &self.nodes[..] } else { &[] };
        let routers = nodes.iter().filter_map(|node| node.router.as_ref());
        routers.filter_map(|router| router.engine.as_deref())
    }

    fn node(&mut self, name: &str) -> Option<&mut MuxNode> {
        self.nodes.iter_mut().find(|known| known.name == name)
    }

    /// Takes over the runtime state of all parts that are the same in
    /// `old`. Ends the other parts of `old`. The caller drops the remains
    /// at another thread, because the worker has no time for that.
    pub fn take_over(&mut self, old: &mut MuxVnet, core: &mut Core) {
        // Frames in `late` continue if their vrouter still has an engine.
        let mut backlog = mem::take(&mut old.engine_backlog);
        while old.ingress(core, &mut vec![]) > 0 {}
        backlog.append(&mut old.engine_backlog);
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
        let has_engine = |packet: &mut PacketBuffer| {
            let router = &self.nodes[self.ports[usize::from(packet.port)].node].router;
            same_ports && router.as_ref().is_some_and(|router| router.engine.is_some())
        };
        self.engine_backlog.extend(backlog.extract_if(.., has_engine));
        let ports = if same_ports { &mut self.ports } else { &mut old.ports };
        for packet in backlog {
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
            // Most nodes are in the same order in both.
            let found = match same_ports {
                true => Some(next),
                false => (next..self.nodes.len()).chain(0..next).find(is_it),
            };
            if was.name == mux::OUTSIDE && !same_ports {
                // Each external end is found by its own name.
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
            let ports = self.ports.iter().map(MuxPort::buffers);
            self.buffers = ports.fold(Buffers::default(), Buffers::and);
            let waits = self.ports.iter().zip(0..).filter(|(port, _)| port.in_flight() > 0);
            waits.for_each(|(_, at)| self.timers.set(at, core.now_ns));
        }
        let waiting = |at| self.ports[usize::from(at)].waiting();
        self.waiting = self.timers.numbers().map(waiting).sum();
        core.packets.reserve(buffers.left(), self.buffers.left());
    }

    /// Takes over the learned addresses of segments. Most segments,
    /// and most of their ends, are in the same order in both.
    fn take_over_segments(&mut self, old: &mut MuxVnet, same_ports: bool, now_ns: u64) {
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

    /// Reserves packets for its queues, when the vnet comes into use.
    pub fn begin(&self, core: &mut Core) {
        core.packets.reserve(0, self.buffers.left());
    }

    /// Ends all parts. The remains are dropped as for [`MuxVnet::take_over`].
    pub fn end(&mut self, core: &mut Core) {
        core.packets.reserve(self.buffers.left(), 0);
        core.packets.give_all(&mut self.local);
        core.packets.give_all(&mut self.engine_backlog);
        for node in &mut self.nodes {
            end_node(node, &mut self.ports[node.first..node.first + node.count], core);
        }
    }

    /// Attaches a connection, whose doorbell is already watched. Returns the
    /// connection if no peer is expected there, or if one is already connected. The
    /// worker must not drop it, because that may take as long as the peer wants.
    pub fn attach<L: PeerChannel + 'static>(
        &mut self,
        node: &str,
        peer: NodePeer,
        interface: u32,
        mut link: PeerConnection<L>,
    ) -> Result<(), PeerConnection<L>> {
        let Some(node) = self.node(node) else { return Err(link) };
        let (attach, place) = match peer {
            NodePeer::Tap => (AttachMode::Tap, Some(&mut node.tap).filter(|_| interface == 0)),
            NodePeer::Guest(number) => {
                let Some(guest) = node.guest(number) else { return Err(link) };
                (guest.spec.attach, guest.links.get_mut(interface as usize))
            }
        };
        let Some(place) = place.filter(|place| place.is_none()) else { return Err(link) };
        // A guest has no more interfaces than ports.
        link.attach(attach, interface as u8);
        *place = Some(Box::new(link));
        node.router.iter_mut().for_each(MuxRouter::redistribute);
        Ok(())
    }

    /// Detaches the connection with this number, whose peer hung up.
    pub fn detach(&mut self, epoch: u64, core: &mut Core) {
        let is_it = |link: &Option<Box<PeerConnection>>| {
            link.as_ref().is_some_and(|link| link.epoch == epoch)
        };
        let channel = |(at, guest): (_, &MuxGuest)| Some((at, guest.links.iter().position(is_it)?));
        let mut nodes = self.nodes.iter().enumerate();
        let found =
            nodes.find_map(|(at, node)| match node.guests().enumerate().find_map(channel) {
                None => is_it(&node.tap).then_some((at, None)),
                peer => Some((at, peer)),
            });
        if let Some((node, peer)) = found {
            self.disconnect(node, peer, core, None);
        }
    }

    /// Ends a connection that is gone, or that must end because
    /// of `fault`. The frames that a guest had are lost.
    pub(crate) fn disconnect(
        &mut self,
        node: usize,
        peer: PeerIndex,
        core: &mut Core,
        fault: Option<String>,
    ) {
        let MuxNode { tap, router, first, .. } = &mut self.nodes[node];
        let (link, lost) = match (peer, router) {
            (None, _) => (tap.take(), None),
            (Some((guest, channel)), Some(router)) => {
                (router.guests[guest].links[channel].take(), Some((guest, router)))
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

    /// Records that a guest broke the contract before it was connected.
    pub(crate) fn note_fault(&mut self, node: &str, guest: u32, fault: String) {
        if let Some(guest) = self.node(node).and_then(|node| node.guest(guest)) {
            guest.fault(fault);
        }
    }

    /// Returns all connections, for arming and disarming.
    pub(crate) fn links(&mut self) -> impl Iterator<Item = &mut Box<PeerConnection>> {
        self.nodes.iter_mut().flat_map(|node| {
            let guests = node.router.iter_mut().flat_map(|router| &mut router.guests);
            node.tap.iter_mut().chain(guests.flat_map(|guest| guest.links.iter_mut().flatten()))
        })
    }

    /// Polls all peers again, because one of them has rung.
    pub fn note_ring(&mut self, now_ns: u64) {
        self.links().for_each(|link| link.disarm(now_ns));
    }

    /// Visits the vnet: passes `batch` to guests and TAPs, and sends what these
    /// have sent out of its ports. Empties `batch`. Returns the number of frames.
    pub fn visit(&mut self, core: &mut Core, batch: &mut PacketBatch) -> usize {
        let arrived = self.ingress(core, batch);
        core.meter.lap(Stage::Distribute, arrived);
        let went = self.from_peers(core) + self.shape(core) + self.poll_engines(core);
        if went > 0 || self.must_renotify {
            self.flush(core);
        }
        arrived + went
    }

    /// Records whether there was work in this round. True if there was none for
    /// [`IDLE_NS`] and no frame is under way, so that the vnet may go idle.
    pub fn update_idle(&mut self, work: bool, now_ns: u64) -> bool {
        if work {
            self.busy_ns = now_ns;
        }
        now_ns.saturating_sub(self.busy_ns) >= IDLE_NS && self.is_idle()
    }

    /// Returns the latest time of the next visit, nanoseconds.
    pub fn due_ns(&self) -> Option<u64> {
        let check_ns = self.has_outstanding().then_some(self.checked_ns + CHECK_NS);
        let engines = self.engines().filter_map(VrouterEngine::due_ns);
        let late_ns = self.is_late().then_some(0);
        engines.chain(self.timers.next_ns()).chain(check_ns).chain(late_ns).min()
    }

    /// True if no frame is under way in it, and every peer rings.
    fn is_idle(&self) -> bool {
        self.local.is_empty()
            && self.engine_backlog.is_empty()
            && self.timers.next_ns().is_none()
            && !self.has_outstanding()
            && !self.has_unsure_peer()
            && self.engines().all(VrouterEngine::is_idle)
    }

    /// True if a guest has outstanding frames.
    pub fn has_outstanding(&self) -> bool {
        self.guests().any(|guest| !guest.outstanding.is_empty())
    }

    /// True if a connected peer has an unreliable doorbell.
    pub(crate) fn has_unsure_peer(&self) -> bool {
        self.guests().any(|g| g.spec.attach == AttachMode::Memif && g.is_connected())
    }

    /// Copies the counters of a node, all of this moment,
    /// without those of queues, of which there may be many.
    pub fn count(&self, node: usize, now_ns: u64) -> Option<NodeCounters> {
        let node = self.nodes.get(node)?;
        let ports = &self.ports[node.first..node.first + node.count];
        let outstanding: usize = node.guests().map(|guest| guest.outstanding.len()).sum();
        let backlog =
            self.engine_backlog.iter().filter(|it| node.ports().contains(&it.port)).count();
        let counted = node.guests().map(|guest| {
            let (connected, in_flight) = (guest.is_connected(), guest.outstanding.len() as u64);
            let stats = GuestStats { connected, in_flight, ..guest.stats.clone() };
            (guest.spec.number, stats)
        });
        let in_flight = backlog + outstanding + ports.iter().map(MuxPort::in_flight).sum::<usize>();
        let engine = node.router.as_ref().and_then(|it| it.engine.as_ref());
        let node = NodeStats {
            guests: counted.collect(),
            in_flight: in_flight as u64,
            tap_connected: node.tap.is_some(),
            engine: engine.map(|it| it.stats()),
            ..NodeStats::default()
        };
        let ports = ports.iter().map(|port| (port.counters.clone(), port.in_flight())).collect();
        Some(NodeCounters { now_ns, ports, node })
    }

    /// Returns all counters with names, and each limit that
    /// ever dropped a frame. Queues have no names here.
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

fn new_router(spec: &mux::RouterConfig, ports: &[mux::PortConfig]) -> MuxRouter {
    let filters = spec
        .punt_filters
        .iter()
        .filter_map(|filter| Some((filter.matches.clone(), PuntClass::from_code(filter.class)?)));
    let candidate =
        |guest: &mux::GuestConfig| GuestCandidate { number: guest.number, weight: guest.weight };
    let candidates: Vec<_> = spec.guests.iter().map(candidate).collect();
    MuxRouter {
        guests: spec.guests.iter().map(|guest| MuxGuest::new(guest.clone(), ports.len())).collect(),
        distributor: Distributor::new(spec.policy, spec.flow.clone(), &candidates, FLOW_SLOTS),
        order: CompletionOrder::default(),
        filters: filters.collect(),
        engine: None,
        macs: ports.iter().map(|port| port.mac).collect(),
    }
}

fn take_over_port(port: &mut MuxPort, was: &mut MuxPort, core: &mut Core) {
    port.counters = mem::take(&mut was.counters);
    port.captures = mem::take(&mut was.captures);
    port.wish = was.wish.take();
    for (limit, was) in port.punts.iter_mut().zip(&was.punts) {
        limit.take_over(was);
    }
    // Objects with memory of their own stay in `was`. Its owner drops them.
    let Some(was) = &mut was.link else { return };
    let mut lost: Vec<PacketBuffer> = Vec::new();
    match &mut port.link {
        Some(link) if link.up && link.identity == was.identity => {
            link.take_over(was, core.now_ns);
            link.delay_line = DelayLine::continue_from(link.delay_line.take(), &mut was.delay_line);
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
    node: &mut MuxNode,
    old: Option<&mut MuxRouter>,
    ports: &mut [MuxPort],
    core: &mut Core,
) {
    let Some(old) = old else { return };
    if let Some(router) = &mut node.router {
        router.order = mem::take(&mut old.order);
        if let (Some(new), Some(was)) = (&mut router.engine, &mut old.engine)
            && new.has_same_spec(was)
        {
            // The new engine was not in use yet.
            mem::swap(new, was);
        } else if old.engine.is_some() {
            // The settings of its programs end with it.
            let ports = &mut ports[node.first..node.first + node.count];
            ports.iter_mut().filter_map(MuxPort::several_queues).for_each(Queues::unset);
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
            core.connections.end(link, "the guest was removed from its router", false);
        }
    }
    if let Some(router) = &mut node.router {
        router.redistribute();
    }
}

fn end_node(node: &mut MuxNode, ports: &mut [MuxPort], core: &mut Core) {
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
