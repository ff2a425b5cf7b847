//! Control of the mux by pdpd.
//!
//! pdpd says what is wanted, object by object ([`Request::PutExternal`], [`Request::PutVnet`]);
//! the mux compares with what it has and changes only what differs, so that sending all again to
//! a mux that already runs (a new pdpd) disturbs nothing, and sending all to a new mux brings
//! everything back. An object is accepted whole or not at all.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

pub use pdp_wire::bpf::Program;
use pdp_wire::tag::PuntClass;
pub use pdp_wire::tunnel::Encapsulation;
use serde::de::{Error, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

/// Version of this protocol, in [`Reply::Hello`].
pub const VERSION: u32 = 5;

/// Classes of punts, each with a limit of its own.
pub const PUNT_CLASSES: usize = PuntClass::ALL.len();

/// The node that ends outside which are ports of their own count at ([`Vnet::own_ends`]). No node of a vnet has this
/// name.
pub const OUTSIDE: &str = "external";

/// From pdpd.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// What is there. Answer: [`Reply::Hello`] with the packet pool's memory as descriptor, over
    /// which pdpd makes AF_XDP sockets (the mux has no privilege to).
    Hello,
    /// An external interface. Its descriptors: one AF_XDP socket per receive queue, or packet
    /// sockets that share the frames, or the frames of a generator (a memfd, see [`Generator`]).
    /// Without descriptors: keep what is there, change only the rest.
    PutExternal(External),
    /// Forget an external interface and close its sockets. Refused while a vlink uses it.
    DeleteExternal {
        /// Its name.
        name: String,
    },
    /// Sockets (SOCK_SEQPACKET) that listen, one descriptor for each path, for what is put next. The mux binds
    /// none itself: it has no right to any directory.
    Listen {
        /// The paths, as they will be named.
        sockets: Vec<PathBuf>,
    },
    /// A vnet as it is to be.
    PutVnet(Box<Vnet>),
    /// Forget a vnet: its guests are disconnected, what is in flight is dropped.
    DeleteVnet {
        /// Its name.
        name: String,
    },
    /// Counters of all vnets or one.
    Stats {
        /// Only this vnet.
        vnet: Option<String>,
    },
    /// Write frames of a port as pcap (nanoseconds, Ethernet) into the descriptor that comes with
    /// this message, until its reader closes. What the reader is too slow for is left out and
    /// counted as `capture_missed`. Answer: [`Reply::Done`] once it has begun.
    Capture {
        /// The port.
        port: PortName,
        /// Bytes of each frame, 0 for all.
        snap_bytes: u32,
    },
    /// The same of those frames alone that a program wants; a request of its own, so that a mux which knows none
    /// refuses it.
    CaptureBy {
        /// The port.
        port: PortName,
        /// Bytes of each frame, 0 for all.
        snap_bytes: u32,
        /// What it wants.
        program: Program,
    },
    /// Which addresses a segment has learned, or with `clear` that it is to forget them. Answer: [`Reply::Fdb`], or
    /// [`Reply::Done`].
    Fdb {
        /// The vnet.
        vnet: String,
        /// The vlink.
        vlink: String,
        /// Forget them.
        clear: bool,
    },
    /// Follow the next frame that arrives at a port, to its end. Answer: [`Reply::Traced`], or
    /// [`Reply::Failed`] after `wait_ms`.
    Trace {
        /// The port.
        port: PortName,
        /// Only a frame with these bytes.
        filter: Vec<Match>,
        /// How long to wait for one, milliseconds.
        wait_ms: u64,
    },
    /// The same of a frame that a program wants as well.
    TraceBy {
        /// The port.
        port: PortName,
        /// Only a frame with these bytes.
        filter: Vec<Match>,
        /// And that it wants.
        program: Program,
        /// How long to wait for one, milliseconds.
        wait_ms: u64,
    },
}

/// Answer of the mux; one a request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Reply {
    /// What is there.
    Hello {
        /// [`VERSION`].
        version: u32,
        /// External interfaces that have their sockets.
        externals: Vec<String>,
        /// Vnets.
        vnets: Vec<String>,
    },
    /// Done.
    Done,
    /// What was put would have the mux listen where it has no socket ([`Request::Listen`]); nothing was changed.
    Lacks {
        /// Paths of the sockets.
        sockets: Vec<PathBuf>,
    },
    /// Counters.
    Stats(Box<Stats>),
    /// Addresses that a segment has learned, in no order.
    Fdb {
        /// The addresses.
        heard: Vec<Heard>,
    },
    /// What became of a frame.
    Traced {
        /// Its stages, in order.
        stages: Vec<TraceStage>,
    },
    /// The request could not be met, and nothing was changed.
    Failed {
        /// What, and what to do.
        error: String,
    },
}

/// An address that a segment has learned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Heard {
    /// The address.
    pub mac: [u8; 6],
    /// At which end of the vlink.
    pub end: u16,
    /// How long ago it was heard, seconds.
    pub age_s: u32,
}

/// A port: a vport of a vrouter or an interface of a host.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct PortName {
    /// The vnet.
    pub vnet: String,
    /// The node.
    pub node: String,
    /// The port.
    pub port: String,
}

/// An external interface.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct External {
    /// Its name in the substrate.
    pub name: String,
    /// Largest IP packet on it, bytes.
    pub mtu: u32,
    /// What vlinks over it may send in all, bits a second of wrapped frames with preamble, checksum and gap: they share
    /// it by their guarantees and weights. `None`: they do not wait for each other.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capacity_bps: Option<u64>,
    /// What is behind it.
    pub outlet: Outlet,
}

impl External {
    /// Without a bound to what it sends in all.
    pub fn new(name: impl Into<String>, mtu: u32, outlet: Outlet) -> Self {
        Self { name: name.into(), mtu, capacity_bps: None, outlet }
    }

    /// Its network device, if that is what is behind it.
    pub fn device(&self) -> Option<&Device> {
        match &self.outlet {
            Outlet::Xdp(device) | Outlet::Packet(device) => Some(device),
            Outlet::Memif { .. } | Outlet::Generator(_) => None,
        }
    }

    /// Where the mux listens for its program, if that is what is behind it.
    pub fn socket(&self) -> Option<&Path> {
        match &self.outlet {
            Outlet::Memif { socket } => Some(socket),
            Outlet::Xdp(_) | Outlet::Packet(_) | Outlet::Generator(_) => None,
        }
    }
}

/// What is behind an external interface.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Outlet {
    /// A network device, by AF_XDP.
    Xdp(Device),
    /// A network device, by packet sockets.
    Packet(Device),
    /// A program that speaks memif. All of its frames are those of one vlink
    /// ([`Encapsulation::Interface`]).
    Memif {
        /// Where the mux listens for it, as interface 0.
        socket: PathBuf,
    },
    /// The mux makes the frames itself, and ends those that come. Link addresses of tunnels' frames
    /// are not looked at.
    Generator(Generator),
}

/// A network device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    /// Its name.
    pub device: String,
    /// Its index, to follow the routes and neighbours of the underlay.
    pub ifindex: u32,
    /// Its link address.
    pub mac: [u8; 6],
    /// Software (veth, bridge, …): nobody completes the checksums that senders left to it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_virtual: bool,
}

/// A source and sink of frames inside the mux, for measurements: its frames enter before
/// classification, and no CPU but the mux's is needed. The frames that it repeats come as a memfd:
/// each as two bytes of length (little-endian) and its bytes, without an end mark.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Generator {
    /// Frames a second; 0: as many as are taken.
    pub pps: u64,
    /// Frames in all, then it stops; 0: no end. A change of this number starts anew.
    pub frames: u64,
    /// Where in each frame (bytes from its start) a number is written that counts the frames, and
    /// looked for in those that come: [`NUMBER_MARK`], then 8 bytes little-endian. `None`: nowhere.
    pub number_at: Option<u16>,
}

/// What tells numbered frames from others.
pub const NUMBER_MARK: [u8; 4] = *b"PdP#";

/// A vnet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Vnet {
    /// Its name.
    pub name: String,
    /// Limit on what may arrive from outside for the whole vnet, before any work is spent on it.
    pub police: Option<Rate>,
    /// Its vrouters and hosts.
    pub nodes: Vec<Node>,
    /// Its vlinks.
    pub vlinks: Vec<Vlink>,
}

impl Vnet {
    /// What its engines are guaranteed together of its worker's time, millionths.
    pub fn power(&self) -> u32 {
        let routers = self.nodes.iter().filter_map(|node| node.router.as_ref());
        let engines = routers.filter_map(|router| router.engine.as_ref());
        engines.map(|engine| engine.power).fold(0, u32::saturating_add).min(POWER_WHOLE)
    }

    /// Where the mux listens for its guests, TAP helpers and slow paths.
    pub fn sockets(&self) -> impl Iterator<Item = &Path> {
        self.nodes.iter().flat_map(|node| {
            let guests = node.router.iter().flat_map(|router| &router.guests);
            let engine = node.router.as_ref().and_then(|router| router.engine.as_ref());
            let slowpath = engine.and_then(|engine| engine.slowpath.as_ref());
            let slowpath = slowpath.map(|slowpath| &*slowpath.socket);
            guests.map(|guest| &*guest.socket).chain([&*node.tap_socket]).chain(slowpath)
        })
    }

    /// Ends outside that are ports of their own, in the order of their names: those of vlinks that are no wires. They
    /// are numbered behind the ports of all nodes. Each with the place of its vlink.
    pub fn own_ends(&self) -> Vec<OwnEnd<'_>> {
        let vlinks = self.vlinks.iter().enumerate().filter(|(_, vlink)| !vlink.is_wire());
        let ends = vlinks.flat_map(|(vlink, it)| {
            it.ends.iter().enumerate().filter_map(move |(at, end)| match end {
                End::Port { .. } => None,
                End::External { name, .. } => Some(OwnEnd { vlink, at, name, end }),
            })
        });
        let mut ends: Vec<_> = ends.collect();
        ends.sort_by_key(|own| own.name);
        ends
    }
}

/// An end outside that is a port of its own.
#[derive(Clone, Copy, Debug)]
pub struct OwnEnd<'a> {
    /// The place of its vlink.
    pub vlink: usize,
    /// Its place there.
    pub at: usize,
    /// Its name.
    pub name: &'a str,
    /// The end.
    pub end: &'a End,
}

/// A rate with the burst that it allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rate {
    /// Bits a second (frames' bytes, without preamble, checksum and gap); 0: no limit.
    pub bps: u64,
    /// Packets a second; 0: no limit.
    pub pps: u64,
}

/// A node of a vnet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Node {
    /// Its name.
    pub name: String,
    /// Its ports; the index in this list is the vport in tags.
    pub ports: Vec<Port>,
    /// Where the mux listens for the helper that serves the node's TAPs (a trunk without
    /// completions). The directory exists and is the mux's to write.
    pub tap_socket: PathBuf,
    /// What forwards; `None` for a host, whose frames go to and come from its TAPs alone.
    pub router: Option<Router>,
}

/// A port of a node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Port {
    /// Its name.
    pub name: String,
    /// Link address of the interface inside.
    pub mac: [u8; 6],
    /// Largest IP packet, bytes. Longer frames are dropped and counted.
    pub mtu: u32,
}

/// What forwards a vrouter's packets: guests, or the mux itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Router {
    /// Forwarding guests.
    pub guests: Vec<Guest>,
    /// How frames are shared out among them.
    pub policy: Policy,
    /// Which bits make a flow, for [`Policy::Flow`] and [`Policy::Flowlet`].
    pub flow: FlowKey,
    /// Frames that go to the control guest and not to the forwarding guests, for programs that
    /// can't tell by themselves. The first that matches decides.
    pub punt_filters: Vec<PuntFilter>,
    /// Limits of punts for each vport, by class, in the order of [`PuntClass::ALL`].
    pub punt_limits: [Rate; PUNT_CLASSES],
    /// The mux forwards by itself, and there are no guests.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub engine: Option<Engine>,
}

/// How the mux forwards for a vrouter.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Engine {
    /// What forwards.
    pub code: Code,
    /// Bytes that its routes may take.
    pub memory_bytes: u64,
    /// Programs of the control guest may tell it what to do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slowpath: Option<SlowPath>,
    /// What it is guaranteed of its worker's time, of [`POWER_WHOLE`].
    #[serde(default, skip_serializing_if = "is_none_of")]
    pub power: u32,
}

/// All of a worker's time, as parts of it are told.
pub const POWER_WHOLE: u32 = 1_000_000;

fn is_none_of(power: &u32) -> bool {
    *power == 0
}

/// What forwards in an engine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Code {
    /// IPv4 and IPv6, by the control guest's routes.
    Ip {
        /// Where the route mirror listens (`routes`), to which the mux connects as guest 0.
        routes: PathBuf,
    },
    /// Any protocol, by filters alone.
    Fields(Fields),
}

/// How frames of a protocol are looked at and changed that PdP knows nothing of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fields {
    /// What filters are compared with, [`KEY_FIELD_BYTES_MAX`] in all at most.
    pub key: Vec<KeyField>,
    /// What is written into frames that a filter sends, in this order.
    pub write: Vec<Write>,
    /// What becomes of frames that no filter decides on.
    pub miss: Miss,
}

/// Bytes of all fields of a key at most: the vport that a frame came by is behind them.
pub const KEY_FIELD_BYTES_MAX: usize = 38;

/// The same of a short key.
const SHORT_KEY_FIELD_BYTES_MAX: usize = 14;

/// Writes at most.
pub const WRITES_MAX: usize = 16;

/// Bytes of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeyField {
    /// From the frame's destination address on.
    pub offset: u16,
    /// How many.
    pub bytes: u8,
}

/// Something that is written into a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Write {
    /// From the frame's destination address on.
    pub offset: u16,
    /// What.
    pub what: Written,
}

/// What is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Written {
    /// Bytes of the data of the filter's result.
    Data {
        /// From this one on.
        from: u8,
        /// How many.
        bytes: u8,
    },
    /// The link address of the port that the frame leaves by.
    Source,
    /// One less than what the byte has; a frame where it has 1 or 0 is not sent, but goes to the control guest.
    Hops,
}

/// What becomes of frames that no filter decides on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Miss {
    /// They are dropped.
    Drop,
    /// They go to the control guest.
    Punt,
}

impl Fields {
    /// Whether its keys have 40 bytes, and not 16.
    pub fn is_long(&self) -> bool {
        let bytes: usize = self.key.iter().map(|field| usize::from(field.bytes)).sum();
        bytes > SHORT_KEY_FIELD_BYTES_MAX
    }
}

impl Write {
    /// Bytes that a frame has at least.
    pub fn end(&self) -> usize {
        let bytes = match self.what {
            Written::Data { bytes, .. } => bytes.into(),
            Written::Source => 6,
            Written::Hops => 1,
        };
        usize::from(self.offset) + bytes
    }
}

/// Where programs of a control guest tell an engine what to do ([`crate::slowpath`]).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SlowPath {
    /// Where the mux listens for them ([`Request::Listen`]).
    pub socket: PathBuf,
    /// Filters that there may be, of each length of patterns; [`crate::slowpath::FILTERS_MAX`] at most.
    pub filters: u32,
    /// Counters; [`crate::slowpath::COUNTERS_MAX`] at most.
    pub counters: u32,
}

/// A forwarding guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Guest {
    /// Its number in its vrouter.
    pub number: u32,
    /// Where the mux listens for it. The directory exists and is the mux's to write.
    pub socket: PathBuf,
    /// How it is attached.
    pub attach: Attach,
    /// Its share, thousandths of a core.
    pub weight: u32,
    /// It gets no frames any more and completes those that it has: see [`GuestStats::in_flight`].
    pub leaving: bool,
}

/// How a forwarding guest is attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Attach {
    /// A program on PdP's runtime: memif interface 0 is a trunk with tags and completions.
    Runtime,
    /// A TAP helper inside the guest: memif interface 0 is a trunk with tags, no completions.
    Tap,
    /// Any program that speaks memif: one interface per vport, its id the vport's index, frames
    /// without tags. What it sends on interface N leaves by vport N.
    Memif,
}

/// How frames are shared out among the guests of a vrouter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Policy {
    /// In turn.
    RoundRobin,
    /// In turn, each as often as its weight says.
    Weighted,
    /// By flow: frames with the same key go to the same guest.
    Flow,
    /// By flow, but a flow may go to a guest with less to do when none of its frames is in a
    /// guest.
    Flowlet,
    /// Whatever their flow, to who has room, and sent on in the order in which they came. Runtime
    /// guests only.
    Ordered,
}

/// Which bits of a frame make a flow.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FlowKey {
    /// Addresses, protocol and ports of IPv4 and IPv6; addresses and type of other Ethernet.
    Ip,
    /// These bytes of the frame, counted from its destination address. A byte beyond the end
    /// counts as zero.
    Bytes(Vec<Field>),
}

/// Some bytes of a frame with a mask.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Field {
    /// Offset of the first byte from the frame's start.
    pub offset: u16,
    /// Which bits count; its length is the field's.
    pub mask: Vec<u8>,
}

/// Bytes at an offset that a frame must have.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Match {
    /// Offset of the first byte from the frame's start.
    pub offset: u16,
    /// The bytes, after the mask.
    pub value: Vec<u8>,
    /// Which bits count; as long as `value`.
    pub mask: Vec<u8>,
}

/// Frames that go to the control guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PuntFilter {
    /// All of these must match.
    pub matches: Vec<Match>,
    /// Index in [`PuntClass::ALL`] of the class whose limit counts.
    pub class: u8,
}

/// A vlink.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Vlink {
    /// Its name, unique in the vnet.
    pub name: String,
    /// Its ends. Of two, one or both ports: each gets what leaves by the other. Two outside, which makes it a
    /// transit: what arrives by one leaves by the other. More make it a segment.
    pub ends: Vec<End>,
    /// How frames leave by each of these ends. Not used of an end outside that a port is joined to by itself, which
    /// has nothing to send.
    pub leaving: Vec<Leaving>,
    /// The queues that frames wait in at each of these ends, by a schedule always the same; an end beyond, or without
    /// any, has one for all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub queues: Vec<Vec<Queue>>,
    /// Whether it carries frames.
    pub up: bool,
    /// Of more than two ends: an Ethernet segment.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub segment: Option<Segment>,
    /// What it is to be later.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub schedule: Option<Schedule>,
}

/// One of the queues that frames wait in at an end of a vlink, for its rate and for an interface's capacity. They share
/// by weight.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Queue {
    /// Its name, unique at its end: what it has stays with it when there are others.
    pub name: String,
    /// Its part beside others that have frames, 1 to [`crate::limits::WEIGHT_MAX`]; 0 is 1.
    pub weight: u32,
    /// Frames that may wait, and bytes that may, as they count (0: as many as these frames have); both 0: as at the end
    /// where it has one for all.
    pub frames: u32,
    /// See `frames`.
    pub bytes: u64,
    /// Packets that are set aside for it: so many frames may wait in it whatever others have, where there is room for
    /// them in it.
    #[serde(default, skip_serializing_if = "is_none_set_aside")]
    pub buffers: u32,
    /// Frames of these DSCPs are for it, unless another one was chosen for them. The first queue has all that is for none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub dscp: Vec<u8>,
}

fn is_none_set_aside(buffers: &u32) -> bool {
    *buffers == 0
}

/// What a vlink is to be at which time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Schedule {
    /// When it began: CLOCK_BOOTTIME, nanoseconds, which nobody sets.
    pub began_ns: u64,
    /// In the order of their times, at most [`crate::limits::SCHEDULE_STEPS_MAX`] of all vlinks of a vnet.
    pub steps: Vec<Step>,
}

/// All of what a vlink is from some time on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Step {
    /// When, from the schedule's beginning, nanoseconds.
    pub at_ns: u64,
    /// Whether it carries frames, unless it is down in any case.
    pub up: bool,
    /// How frames leave by each of its ends.
    pub leaving: Vec<Leaving>,
}

impl Schedule {
    /// Steps that are done at this moment.
    pub fn done(&self, now_ns: u64) -> usize {
        let elapsed_ns = now_ns.saturating_sub(self.began_ns);
        self.steps.partition_point(|step| step.at_ns <= elapsed_ns)
    }

    /// The last of these.
    fn last(&self, now_ns: u64) -> Option<&Step> {
        self.steps[..self.done(now_ns)].last()
    }

    /// When the next one is to be done.
    pub fn next_ns(&self, now_ns: u64) -> Option<u64> {
        let next = self.steps.get(self.done(now_ns))?;
        Some(self.began_ns.saturating_add(next.at_ns))
    }
}

/// How frames leave by one end of a vlink: into it from a port, and to the outside at an end there. First comes the
/// rate, then what is done to them on purpose, then the external interface's capacity.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Leaving {
    /// Rate, bits a second; frames beyond it wait.
    pub rate_bps: Option<u64>,
    /// Bytes that may go at once after a rest. 0: what goes at the rate in 2 ms, and two full frames at least.
    pub burst_bytes: u64,
    /// Bytes that each frame counts beyond its own.
    pub overhead_bytes: u32,
    /// Frames that may wait for the rate, and as many for the interface's capacity.
    pub queue_frames: u32,
    /// Bytes that may, as they count; 0: as many as these frames have.
    pub queue_bytes: u64,
    /// Its part of the external interface's capacity whatever others send, bits a second.
    pub guarantee_bps: u64,
    /// Its part of what is unused of that beside others, 1 to [`crate::limits::WEIGHT_MAX`]; 0 is 1.
    pub weight: u32,
    /// What is done to frames on purpose.
    pub impairments: Impairments,
}

impl Leaving {
    /// Bytes of memory that frames can take which wait for the delay.
    pub fn line_bytes(&self) -> u64 {
        let bps = self.rate_bps.unwrap_or(LINE_BPS);
        // As the burst where it is not told.
        let burst = (bps / 8 / 500).max(2 * 2048).max(self.burst_bytes);
        self.impairments.line_bytes(bps, burst)
    }
}

/// What is reckoned with where there is no rate, bits a second.
const LINE_BPS: u64 = 10_000_000_000;

/// What is done to frames on purpose. All of 0: nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Impairments {
    /// How long each frame waits, nanoseconds, at most [`crate::limits::DELAY_NS_MAX`].
    pub delay_ns: u64,
    /// How much longer or shorter a frame may wait than that, evenly spread, nanoseconds; at most `delay_ns`.
    pub jitter_ns: u64,
    /// Frames that are lost.
    pub loss: Share,
    /// Frames that do not wait at all, of those that would.
    pub reorder: Share,
    /// Frames of which one bit is turned.
    pub corrupt: Share,
    /// Frames that go twice.
    pub duplicate: Share,
    /// What all that is drawn follows from.
    pub seed: u64,
}

/// A part of all frames: thousand millionths, at most [`Share::ALL`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Share(pub u32);

impl Share {
    /// All of them.
    pub const ALL: Self = Self(1_000_000_000);
}

impl Impairments {
    /// Whether frames pass as they are.
    pub fn are_none(&self) -> bool {
        Self { seed: 0, ..*self } == Self::default()
    }

    /// Bytes of memory that frames can take which wait for the delay, where they come at `bps` with bursts of
    /// `burst_bytes`, however short they are. 0 without a delay.
    fn line_bytes(&self, bps: u64, burst_bytes: u64) -> u64 {
        if self.delay_ns == 0 {
            return 0;
        }
        let longest_ns = self.delay_ns + self.jitter_ns.min(self.delay_ns);
        let waiting = u128::from(bps) * u128::from(longest_ns) / 8_000_000_000;
        let copies = if self.duplicate == Share::default() { 1 } else { 2 };
        let waiting = (waiting + u128::from(burst_bytes)) * copies;
        // The shortest frames need most: each has a record of its own.
        let each = u128::from(LINE_FRAME_BYTES_MIN.next_multiple_of(8) + LINE_RECORD_BYTES);
        let bytes = waiting * each / u128::from(LINE_FRAME_BYTES_MIN) + LINE_BYTES_MIN;
        u64::try_from(bytes).unwrap_or(u64::MAX)
    }
}

/// Bytes beside each frame that waits for a delay: when it goes, how long it is, its mark.
pub const LINE_RECORD_BYTES: u64 = 16;

/// Shortest frame that is reckoned with, bytes.
const LINE_FRAME_BYTES_MIN: u64 = 60;

/// Room for one more of the longest, and as much where the ring begins again.
const LINE_BYTES_MIN: u128 = 2 * (2048 + LINE_RECORD_BYTES as u128);

/// What an Ethernet segment may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Segment {
    /// Addresses that it learns.
    pub addresses: u32,
    /// Frames a second that go to all ends, for each end that they come by.
    pub flood_pps: u64,
}

impl Vlink {
    /// Whether it has two ends, and frames that come from outside arrive at a port of a node.
    pub fn is_wire(&self) -> bool {
        self.ends.len() == 2 && self.ports().next().is_some()
    }

    /// As it is at a moment of its schedule's clock.
    pub fn at(&self, now_ns: u64) -> Self {
        let step = self.schedule.as_ref().and_then(|schedule| schedule.last(now_ns));
        let leaving = step.map_or(&self.leaving, |step| &step.leaving).clone();
        let (name, ends, segment) = (self.name.clone(), self.ends.clone(), self.segment);
        let (queues, up) = (self.queues.clone(), self.is_up(now_ns));
        Self { name, ends, leaving, queues, up, segment, schedule: None }
    }

    /// Whether it carries frames at a moment of its schedule's clock.
    pub fn is_up(&self, now_ns: u64) -> bool {
        let step = self.schedule.as_ref().and_then(|schedule| schedule.last(now_ns));
        self.up && step.is_none_or(|step| step.up)
    }

    /// When it is next to go down or up by its schedule.
    pub fn turns_ns(&self, now_ns: u64) -> Option<u64> {
        let (schedule, is_up) = (self.schedule.as_ref()?, self.is_up(now_ns));
        let mut later = schedule.steps.iter().skip(schedule.done(now_ns));
        let step = later.find(|step| self.up && step.up != is_up)?;
        Some(schedule.began_ns.saturating_add(step.at_ns))
    }

    /// Bytes of memory that frames can take which wait for its delays, at whatever time.
    pub fn line_bytes_max(&self) -> u64 {
        let bytes = |leaving: &Vec<Leaving>| {
            leaving.iter().map(Leaving::line_bytes).fold(0, u64::saturating_add)
        };
        let steps = self.schedule.iter().flat_map(|schedule| &schedule.steps);
        steps.map(|step| bytes(&step.leaving)).fold(bytes(&self.leaving), u64::max)
    }

    /// How frames leave by end `at`.
    pub fn leaving(&self, at: usize) -> Leaving {
        self.leaving.get(at).copied().unwrap_or_default()
    }

    /// The queues at end `at`.
    pub fn queues(&self, at: usize) -> &[Queue] {
        self.queues.get(at).map_or(&[], Vec::as_slice)
    }

    /// Its ends that are ports: node, and index of the port.
    pub fn ports(&self) -> impl Iterator<Item = (&str, u16)> {
        self.ends.iter().filter_map(|end| match end {
            End::Port { node, port } => Some((node.as_str(), *port)),
            End::External { .. } => None,
        })
    }

    /// External interfaces that it ends at.
    pub fn interfaces(&self) -> impl Iterator<Item = &str> {
        self.ends.iter().filter_map(|end| match end {
            End::Port { .. } => None,
            End::External { interface, .. } => Some(interface.as_str()),
        })
    }
}

/// An end of a vlink.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum End {
    /// A port of this vnet.
    Port {
        /// The node.
        node: String,
        /// Index of the port.
        port: u16,
    },
    /// The outside.
    External {
        /// Its name, unique in the vnet.
        name: String,
        /// Name of the external interface.
        interface: String,
        /// How the vlink's frames are told apart there.
        by: Encapsulation,
    },
}

/// Counters since the mux started (those of a vnet since it was first put).
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Stats {
    /// External interfaces by name.
    pub externals: BTreeMap<String, ExternalStats>,
    /// Vnets by name.
    pub vnets: BTreeMap<String, VnetStats>,
    /// Worker threads.
    pub workers: Vec<WorkerStats>,
}

/// Reasons of drops that are read of one port or external interface; more are refused. There are fewer.
pub const REASONS_MAX: usize = 256;

/// As many as may be, so that who sends others than there are takes no time and memory.
fn reasons<'de, D: Deserializer<'de>>(from: D) -> Result<BTreeMap<String, u64>, D::Error> {
    struct Reasons;

    impl<'de> Visitor<'de> for Reasons {
        type Value = BTreeMap<String, u64>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(f, "counters of at most {REASONS_MAX} reasons")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let mut reasons = BTreeMap::new();
            while let Some((reason, count)) = map.next_entry()? {
                reasons.insert(reason, count);
                if reasons.len() > REASONS_MAX {
                    return Err(A::Error::custom(format!("more than {REASONS_MAX} reasons")));
                }
            }
            Ok(reasons)
        }
    }

    from.deserialize_map(Reasons)
}

/// Counters of an external interface.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExternalStats {
    /// Frames received, those that are dropped here too.
    pub received: u64,
    /// Frames that the kernel took for transmission.
    pub sent: u64,
    /// Frames dropped here, by reason: no vnet to charge (unknown tunnel, malformed outer header, …);
    /// `refused` by the device or with the program `gone` after a port had sent them.
    #[serde(deserialize_with = "reasons")]
    pub dropped: BTreeMap<String, u64>,
    /// Frames that the kernel dropped because the mux was too slow (XDP_STATISTICS,
    /// PACKET_STATISTICS).
    pub kernel_dropped: u64,
    /// Generators: frames that came with a number.
    #[serde(default)]
    pub numbered: u64,
    /// Generators: of these, how many came with a number lower than one that had come before
    /// (reordered, RFC 4737 section 3.3). Number 0 begins a new count.
    #[serde(default)]
    pub late: u64,
}

/// Counters of a vnet.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VnetStats {
    /// Nodes by name; as [`OUTSIDE`] the ends outside that are ports of their own.
    pub nodes: BTreeMap<String, NodeStats>,
}

/// Counters of a node, all of one moment. At rest and otherwise, for every kind of node: the sum
/// over ports of `received + made` equals the sum of `sent + punted + consumed + dropped` plus
/// `in_flight`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeStats {
    /// Ports by name.
    pub ports: BTreeMap<String, PortStats>,
    /// Forwarding guests by number.
    pub guests: BTreeMap<u32, GuestStats>,
    /// Frames between arrival and their end: in guests, and in vlinks' queues.
    pub in_flight: u64,
    /// Whether the TAP helper is connected.
    pub tap_connected: bool,
    /// Of a vrouter that the mux forwards for by itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub engine: Option<EngineStats>,
}

/// How the mux's own forwarding for a vrouter is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineStats {
    /// Whether its tables are the control guest's.
    pub synced: bool,
    /// Routes that they have.
    pub routes: u64,
    /// Bytes that they take.
    pub memory_bytes: u64,
    /// Changes that were applied.
    pub messages: u64,
    /// Why they do not follow the control guest's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fault: Option<String>,
    /// The worker's time that its vnet's frames and changes took, those of all of its nodes, nanoseconds.
    #[serde(default)]
    pub used_ns: u64,
    /// Its slow path, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slowpath: Option<SlowPathStats>,
}

/// How an engine's slow path is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SlowPathStats {
    /// Programs that are connected.
    pub programs: u32,
    /// Filters that there are.
    pub filters: u32,
    /// Bytes that they and their counters take.
    pub memory_bytes: u64,
    /// Why a program was disconnected, the last one that was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fault: Option<String>,
}

/// Counters of a port. Bytes are those of the inner frames.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PortStats {
    /// Frames that arrived at the port by its vlink; at an end outside: from there.
    pub received: u64,
    /// Their bytes.
    pub received_bytes: u64,
    /// Frames that began here: from the node's TAP, or made by a guest beyond one for one; at an end outside: from
    /// its vlink.
    pub made: u64,
    /// Frames that left by the port's vlink; by an end outside.
    pub sent: u64,
    /// Their bytes.
    pub sent_bytes: u64,
    /// Copies of them beyond one for one, where they went to many ends of a segment; at an end outside: of those that
    /// arrived. Where each is to go it counts as received (or made), and perhaps as dropped.
    #[serde(default)]
    pub copied: u64,
    /// Frames that went twice on purpose: as `sent` (or `dropped` later) they count twice.
    #[serde(default)]
    pub duplicated: u64,
    /// Frames in which a bit was turned on purpose.
    #[serde(default)]
    pub corrupted: u64,
    /// Frames that overtook others on purpose.
    #[serde(default)]
    pub reordered: u64,
    /// Frames handed to the node's TAP.
    pub punted: u64,
    /// Frames that ended in a guest: those given to a guest that says nothing of their fate
    /// ([`Attach::Memif`], [`Attach::Tap`]), and those that a runtime guest kept. What such a guest
    /// sends is `made`. At an end outside: what its vlink took.
    #[serde(default)]
    pub consumed: u64,
    /// Frames dropped, by reason.
    #[serde(deserialize_with = "reasons")]
    pub dropped: BTreeMap<String, u64>,
    /// Frames that an active capture did not get.
    pub capture_missed: u64,
    /// Frames that wait at its vlink now: in queues, for their delay, for a next hop.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub waiting: u64,
    /// Of its queues, in order, where there are several, each of a moment somewhat later; not told where all vnets are
    /// asked for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub queues: Vec<QueueStats>,
    /// What is wrong with the way of its tunnel's frames, where its vlink is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub underlay: Option<UnderlayProblem>,
    /// Reasons of `dropped` that are limits of the spec and dropped a frame in the last [`LIMITING_S`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub limiting: Vec<String>,
}

/// Seconds after its last drop for which a limit is in [`PortStats::limiting`].
pub const LIMITING_S: u64 = 10;

/// Counters of one of a port's queues.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueueStats {
    /// Its name.
    pub name: String,
    /// Frames that wait in it now.
    pub waiting: u64,
    /// Their bytes.
    pub waiting_bytes: u64,
    /// Frames that it let go.
    pub sent: u64,
    /// Their bytes.
    pub sent_bytes: u64,
    /// Frames that were dropped because it was full.
    pub dropped: u64,
}

fn is_zero(count: &u64) -> bool {
    *count == 0
}

/// Why a tunnel's frames, or the longest of them, do not get to its other end, as far as the host's
/// kernel knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum UnderlayProblem {
    /// The device is down, or gone.
    Down,
    /// The device has no carrier.
    NoCarrier,
    /// The tunnel's local address is none of the host's.
    NoAddress,
    /// There is no route to the remote address by the device.
    NoRoute,
    /// Nobody answers for the link address (ARP, neighbour discovery).
    Unanswered {
        /// Of a router on the way, and not of the remote itself.
        router: bool,
    },
    /// The way carries shorter IP packets than the vlink may send.
    PathMtu {
        /// The longest that it carries, bytes.
        path_bytes: u32,
        /// The vlink's longest, bytes.
        packet_bytes: u32,
    },
}

/// Counters of a forwarding guest.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestStats {
    /// Connected and in the distribution.
    pub connected: bool,
    /// Frames given to it.
    pub to_guest: u64,
    /// Frames got from it (completions without a frame not counted).
    pub from_guest: u64,
    /// Completions (runtime guests).
    pub completed: u64,
    /// Frames given to it and not completed (runtime guests).
    #[serde(default)]
    pub in_flight: u64,
    /// Times it was disconnected for breaking the contract.
    pub faults: u64,
    /// The last such breach.
    pub last_fault: Option<String>,
}

/// Counters of a worker thread.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerStats {
    /// Rounds of the loop with work.
    pub busy_rounds: u64,
    /// Times it went to sleep.
    pub sleeps: u64,
    /// Free packets in its part of the pool.
    pub free_packets: u64,
    /// Cycles of the time-stamp counter and frames by stage, in the order of the stages.
    #[serde(default)]
    pub stages: Vec<StageStats>,
}

/// What a stage of a worker took.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageStats {
    /// Its name; `idle` is looking for work without finding any, `sleep` is blocked.
    pub stage: String,
    /// Cycles of the time-stamp counter.
    pub cycles: u64,
    /// Frames that went through.
    pub frames: u64,
}

/// One stage of a traced frame.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TraceStage {
    /// Nanoseconds since it arrived.
    pub at_ns: u64,
    /// `receive`, `classify`, `police`, `distribute`, `dispatch`, `shape`, `send`, `punt`, `drop`.
    pub stage: String,
    /// What was decided, for people.
    pub detail: String,
}
