//! Control of the mux by pdpd.
//!
//! pdpd sends the desired state, object by object ([`MuxRequest::PutExternal`],
//! [`MuxRequest::PutVnet`]). The mux compares it with its own state and changes only what differs.
//! So a new pdpd can send everything again to a running mux without disturbing it, and sending
//! everything to a new mux restores it. The mux accepts an object as a whole or not at all.

use std::path::{Path, PathBuf};

use pdp_model::Stats;
pub use pdp_wire::bpf::BpfProgram;
use pdp_wire::tag::PuntClass;
pub use pdp_wire::tunnel::Encapsulation;
use serde::{Deserialize, Serialize};

/// Version of this protocol, in [`MuxReply::Hello`].
pub const VERSION: u32 = 5;

/// Count of punt classes; each has a limit of its own.
pub const PUNT_CLASSES: usize = PuntClass::ALL.len();

/// Node name under which the counters of stand-alone external ends appear
/// ([`VnetConfig::own_ends`]). No node of a vnet has this name.
pub const OUTSIDE: &str = "external";

/// Request from pdpd.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MuxRequest {
    /// Report the version and the existing objects. Answer: [`MuxReply::Hello`] with the packet
    /// pool's memory as descriptor. pdpd makes AF_XDP sockets over it, since the mux lacks the
    /// privilege.
    Hello,
    /// Create or change an external interface. Descriptors: one AF_XDP socket per receive queue, or
    /// packet sockets that share the frames, or the frames of a generator (a memfd, see
    /// [`GeneratorConfig`]). Without descriptors, the mux keeps its sockets and changes only the
    /// rest.
    PutExternal(ExternalConfig),
    /// Delete an external interface and close its sockets. Refused while a vlink uses it.
    DeleteExternal {
        /// Name of the interface.
        name: String,
    },
    /// Listening sockets (SOCK_SEQPACKET) for the objects that follow, one descriptor per path. The
    /// mux binds none itself, since it may not write to any directory.
    Listen {
        /// Paths by which the objects refer to the sockets.
        sockets: Vec<PathBuf>,
    },
    /// Desired state of a vnet.
    PutVnet(Box<VnetConfig>),
    /// Delete a vnet: disconnect its guests and drop its frames in flight.
    DeleteVnet {
        /// Name of the vnet.
        name: String,
    },
    /// Counters of all vnets or one.
    Stats {
        /// Only this vnet.
        vnet: Option<String>,
    },
    /// Write frames of a port as pcap (nanoseconds, Ethernet) into the descriptor that comes with
    /// this message, until its reader closes it. Frames that the reader is too slow for are left
    /// out and counted as `capture_missed`. Answer: [`MuxReply::Done`] once the capture has begun.
    Capture {
        /// The port.
        port: PortName,
        /// Bytes of each frame, 0 for all.
        snap_bytes: u32,
    },
    /// Like [`MuxRequest::Capture`], for frames that a program matches. It is a separate request so
    /// that a mux without programs refuses it.
    CaptureBy {
        /// The port.
        port: PortName,
        /// Bytes of each frame, 0 for all.
        snap_bytes: u32,
        /// Program that selects frames.
        program: BpfProgram,
    },
    /// Return the addresses that a segment has learned, or delete them with `clear`. Answer:
    /// [`MuxReply::Fdb`] or [`MuxReply::Done`].
    Fdb {
        /// The vnet.
        vnet: String,
        /// The vlink.
        vlink: String,
        /// Delete the addresses.
        clear: bool,
    },
    /// Follow the next frame that arrives at a port, to its end. Answer: [`MuxReply::Traced`], or
    /// [`MuxReply::Failed`] after `wait_ms`.
    Trace {
        /// The port.
        port: PortName,
        /// Only a frame with these bytes.
        filter: Vec<BytePattern>,
        /// Longest wait for a frame, milliseconds.
        wait_ms: u64,
    },
    /// Like [`MuxRequest::Trace`], for a frame that a program matches as well.
    TraceBy {
        /// The port.
        port: PortName,
        /// Only a frame with these bytes.
        filter: Vec<BytePattern>,
        /// Program that must match, too.
        program: BpfProgram,
        /// Longest wait for a frame, milliseconds.
        wait_ms: u64,
    },
}

/// Reply of the mux; one per request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum MuxReply {
    /// Version and existing objects.
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
    /// The object needs listening sockets that the mux does not have
    /// ([`MuxRequest::Listen`]). Nothing was changed.
    Lacks {
        /// Paths of the sockets.
        sockets: Vec<PathBuf>,
    },
    /// Counters.
    Stats(Box<Stats>),
    /// Addresses that a segment has learned, in no order.
    Fdb {
        /// The addresses.
        heard: Vec<LearnedMac>,
    },
    /// Path of a frame through the mux.
    Traced {
        /// Stages, in order.
        stages: Vec<TraceStage>,
    },
    /// The request failed, and nothing was changed.
    Failed {
        /// Cause, and what to do.
        error: String,
    },
}

/// MAC address that a segment has learned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LearnedMac {
    /// The address.
    pub mac: [u8; 6],
    /// Index of the end in the vlink.
    pub end: u16,
    /// Time since the last frame from it, seconds.
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
pub struct ExternalConfig {
    /// Name in the substrate.
    pub name: String,
    /// Largest IP packet on it, bytes.
    pub mtu: u32,
    /// Most bits per second that all vlinks over it may send together, of
    /// encapsulated frames with preamble, checksum and gap. The vlinks share this
    /// capacity by their guarantees and weights. `None`: no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capacity_bps: Option<u64>,
    /// Driver of the interface.
    pub outlet: OutletConfig,
}

impl ExternalConfig {
    /// Returns an interface without a capacity limit.
    pub fn new(name: impl Into<String>, mtu: u32, outlet: OutletConfig) -> Self {
        Self { name: name.into(), mtu, capacity_bps: None, outlet }
    }

    /// Returns its network device, if it has one.
    pub fn device(&self) -> Option<&Device> {
        match &self.outlet {
            OutletConfig::Xdp(device) | OutletConfig::Packet(device) => Some(device),
            OutletConfig::Memif { .. } | OutletConfig::Generator(_) => None,
        }
    }

    /// Returns the socket at which the mux listens for its memif program, if it has one.
    pub fn socket(&self) -> Option<&Path> {
        match &self.outlet {
            OutletConfig::Memif { socket } => Some(socket),
            OutletConfig::Xdp(_) | OutletConfig::Packet(_) | OutletConfig::Generator(_) => None,
        }
    }
}

/// Driver of an external interface.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum OutletConfig {
    /// Network device, through AF_XDP.
    Xdp(Device),
    /// Network device, through packet sockets.
    Packet(Device),
    /// Program that speaks memif. All of its frames belong to one vlink
    /// ([`Encapsulation::Interface`]).
    Memif {
        /// Socket at which the mux listens for it, as interface 0.
        socket: PathBuf,
    },
    /// The mux generates the frames itself, and consumes incoming ones. MAC
    /// addresses of tunnelled frames are ignored.
    Generator(GeneratorConfig),
}

/// Network device of an external interface.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    /// Name of the device.
    pub device: String,
    /// Index, for following the underlay's routes and neighbours.
    pub ifindex: u32,
    /// MAC address.
    pub mac: [u8; 6],
    /// True for a software device (veth, bridge, …), which does not
    /// complete the checksums that senders left to it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_virtual: bool,
}

/// Source and sink of frames inside the mux, for measurements. Its frames enter before
/// classification, and use no CPU but the mux's.
///
/// The frames that it repeats come as a memfd: for each, two bytes of length (little-endian) and
/// its bytes, without an end mark.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GeneratorConfig {
    /// Frames per second; 0: as many as the mux takes.
    pub pps: u64,
    /// Total count of frames, after which it stops; 0: no end. Changing this number starts it anew.
    pub frames: u64,
    /// Offset in each frame (bytes from its start) of a sequence number, which is checked in
    /// incoming frames: [`NUMBER_MARK`], then 8 bytes little-endian. `None`: no number.
    pub number_at: Option<u16>,
}

/// Mark before the number of a numbered frame.
pub const NUMBER_MARK: [u8; 4] = *b"PdP#";

/// A vnet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VnetConfig {
    /// Name of the vnet.
    pub name: String,
    /// Limit on traffic from outside for the whole vnet, applied before any work is spent on it.
    pub police: Option<Rate>,
    /// Vrouters and hosts.
    pub nodes: Vec<NodeConfig>,
    /// Vlinks.
    pub vlinks: Vec<Vlink>,
}

impl VnetConfig {
    /// Returns the share of its worker's time that its engines are guaranteed together, millionths.
    pub fn power(&self) -> u32 {
        let routers = self.nodes.iter().filter_map(|node| node.router.as_ref());
        let engines = routers.filter_map(|router| router.engine.as_ref());
        engines.map(|engine| engine.power).fold(0, u32::saturating_add).min(POWER_WHOLE)
    }

    /// Returns the sockets at which the mux listens for its guests, TAP helpers and slow paths.
    pub fn sockets(&self) -> impl Iterator<Item = &Path> {
        self.nodes.iter().flat_map(|node| {
            let guests = node.router.iter().flat_map(|router| &router.guests);
            let engine = node.router.as_ref().and_then(|router| router.engine.as_ref());
            let slowpath = engine.and_then(|engine| engine.slowpath.as_ref());
            let slowpath = slowpath.map(|slowpath| &*slowpath.socket);
            guests.map(|guest| &*guest.socket).chain([&*node.tap_socket]).chain(slowpath)
        })
    }

    /// Returns the stand-alone external ends, ordered by name: those of vlinks that are not wires.
    /// Each comes with the index of its vlink. Their numbers follow those of all nodes' ports.
    pub fn own_ends(&self) -> Vec<OwnEnd<'_>> {
        let vlinks = self.vlinks.iter().enumerate().filter(|(_, vlink)| !vlink.is_wire());
        let ends = vlinks.flat_map(|(vlink, it)| {
            it.ends.iter().enumerate().filter_map(move |(at, end)| match end {
                VlinkEnd::Port { .. } => None,
                VlinkEnd::External { name, .. } => Some(OwnEnd { vlink, at, name, end }),
            })
        });
        let mut ends: Vec<_> = ends.collect();
        ends.sort_by_key(|own| own.name);
        ends
    }
}

/// External end that is a port of its own.
#[derive(Clone, Copy, Debug)]
pub struct OwnEnd<'a> {
    /// Index of its vlink.
    pub vlink: usize,
    /// Index in that vlink.
    pub at: usize,
    /// Name of the end.
    pub name: &'a str,
    /// The end.
    pub end: &'a VlinkEnd,
}

/// Rate limit; the burst follows from the rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rate {
    /// Bits per second (frames' bytes, without preamble, checksum and gap); 0: no limit.
    pub bps: u64,
    /// Packets per second; 0: no limit.
    pub pps: u64,
}

/// A node of a vnet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeConfig {
    /// Name of the node.
    pub name: String,
    /// Ports; the index in this list is the vport in tags.
    pub ports: Vec<PortConfig>,
    /// Socket at which the mux listens for the helper that serves the node's TAPs (a trunk without
    /// completions). The directory exists, and the mux may write to it.
    pub tap_socket: PathBuf,
    /// Forwarder of a vrouter; `None` for a host, whose frames use only its TAPs.
    pub router: Option<RouterConfig>,
}

/// Port of a node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PortConfig {
    /// Name of the port.
    pub name: String,
    /// MAC address of the interface inside the node.
    pub mac: [u8; 6],
    /// Largest IP packet, bytes. Longer frames are dropped and counted.
    pub mtu: u32,
}

/// Forwarder of a vrouter's packets: guests, or the mux itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RouterConfig {
    /// Forwarding guests.
    pub guests: Vec<GuestConfig>,
    /// Policy for distributing frames to the guests.
    pub policy: GuestDistribution,
    /// Bits that identify a flow, for [`GuestDistribution::Flow`] and
    /// [`GuestDistribution::Flowlet`].
    pub flow: FlowKey,
    /// Frames for the control guest rather than the forwarding guests, for programs that cannot
    /// classify punts themselves. The first match decides.
    pub punt_filters: Vec<PuntFilterConfig>,
    /// Limits of punts for each vport, by class, in the order of [`PuntClass::ALL`].
    pub punt_limits: [Rate; PUNT_CLASSES],
    /// Engine of the mux itself; there are no guests then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub engine: Option<EngineConfig>,
}

/// Forwarding by the mux itself for a vrouter.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineConfig {
    /// Forwarding code.
    pub code: EngineCode,
    /// Most bytes for its routes.
    pub memory_bytes: u64,
    /// Slow path, through which programs of the control guest can install filters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slowpath: Option<SlowPathConfig>,
    /// Guaranteed share of its worker's time, in units of 1/[`POWER_WHOLE`].
    #[serde(default, skip_serializing_if = "is_none_of")]
    pub power: u32,
}

/// Unit of shares: all of a worker's time.
pub const POWER_WHOLE: u32 = 1_000_000;

fn is_none_of(power: &u32) -> bool {
    *power == 0
}

/// Forwarding code of an engine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum EngineCode {
    /// IPv4 and IPv6, by the control guest's routes.
    Ip {
        /// Socket of the route mirror (`routes`), to which the mux connects as guest 0.
        routes: PathBuf,
    },
    /// Any protocol, by filters alone.
    Fields(FieldsConfig),
}

/// Matching and rewriting of frames for a protocol that PdP does not know.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FieldsConfig {
    /// Fields that filters match, at most [`KEY_FIELD_BYTES_MAX`] bytes in all.
    pub key: Vec<KeyFieldConfig>,
    /// Writes into frames that a filter sends, in this order.
    pub write: Vec<HeaderWrite>,
    /// Treatment of frames that no filter decides on.
    pub miss: MissPolicy,
}

/// Most bytes of all fields of a key. The ingress vport follows them.
pub const KEY_FIELD_BYTES_MAX: usize = 38;

/// Most bytes of all fields of a short key.
const SHORT_KEY_FIELD_BYTES_MAX: usize = 14;

/// Most writes.
pub const WRITES_MAX: usize = 16;

/// Field of a frame that is part of the key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeyFieldConfig {
    /// Offset from the frame's destination address.
    pub offset: u16,
    /// Count of bytes.
    pub bytes: u8,
}

/// A write into a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeaderWrite {
    /// Offset from the frame's destination address.
    pub offset: u16,
    /// Value that is written.
    pub what: WriteSource,
}

/// Value of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum WriteSource {
    /// Bytes from the data of the filter's result.
    Data {
        /// Index of the first byte.
        from: u8,
        /// Count of bytes.
        bytes: u8,
    },
    /// MAC address of the egress port.
    Source,
    /// The byte decremented by one. If it is 1 or 0, the frame is
    /// punted to the control guest instead of sent.
    Hops,
}

/// Treatment of frames that no filter decides on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MissPolicy {
    /// Drop them.
    Drop,
    /// Punt them to the control guest.
    Punt,
}

impl FieldsConfig {
    /// True if its keys have 40 bytes rather than 16.
    pub fn is_long(&self) -> bool {
        let bytes: usize = self.key.iter().map(|field| usize::from(field.bytes)).sum();
        bytes > SHORT_KEY_FIELD_BYTES_MAX
    }
}

impl HeaderWrite {
    /// Returns the bytes that a frame must have for this write.
    pub fn end(&self) -> usize {
        let bytes = match self.what {
            WriteSource::Data { bytes, .. } => bytes.into(),
            WriteSource::Source => 6,
            WriteSource::Hops => 1,
        };
        usize::from(self.offset) + bytes
    }
}

/// Slow path of an engine, for programs of the control guest ([`crate::slowpath`]).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SlowPathConfig {
    /// Socket at which the mux listens for them ([`MuxRequest::Listen`]).
    pub socket: PathBuf,
    /// Most filters, for each length of patterns; at most [`crate::slowpath::FILTERS_MAX`].
    pub filters: u32,
    /// Count of counters; at most [`crate::slowpath::COUNTERS_MAX`].
    pub counters: u32,
}

/// A forwarding guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestConfig {
    /// Number in its vrouter.
    pub number: u32,
    /// Socket at which the mux listens for it. The directory exists, and the mux may write to it.
    pub socket: PathBuf,
    /// Attachment of the guest.
    pub attach: AttachMode,
    /// Weight in the distribution of frames, thousandths of a core.
    pub weight: u32,
    /// True while it drains: it gets no more frames and completes those
    /// that it has; see [`pdp_model::GuestStats::in_flight`].
    pub leaving: bool,
}

/// Attachment of a forwarding guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum AttachMode {
    /// A program on PdP's runtime: memif interface 0 is a trunk with tags and completions.
    Runtime,
    /// A TAP helper inside the guest: memif interface 0 is a trunk with tags, no completions.
    Tap,
    /// Any program that speaks memif: one interface per vport, with the vport's index as its id,
    /// frames without tags. Frames sent on interface N leave on vport N.
    Memif,
}

/// Policy for distributing frames to the guests of a vrouter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum GuestDistribution {
    /// Round robin.
    RoundRobin,
    /// Round robin, weighted.
    Weighted,
    /// By flow: frames with the same key go to the same guest.
    Flow,
    /// By flow, but a flow may move to a less loaded guest while none of its frames is in a guest.
    Flowlet,
    /// To any guest with free space, regardless of flow. The mux restores
    /// the order of arrival. Runtime guests only.
    Ordered,
}

/// Bits of a frame that identify its flow.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FlowKey {
    /// Addresses, protocol and ports of IPv4 and IPv6; addresses and type of other Ethernet.
    Ip,
    /// These bytes of the frame, counted from its destination address. A byte beyond the end
    /// counts as zero.
    Bytes(Vec<MaskedField>),
}

/// Some bytes of a frame with a mask.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MaskedField {
    /// Offset of the first byte from the frame's start.
    pub offset: u16,
    /// Bits that count; its length is the field's.
    pub mask: Vec<u8>,
}

/// Bytes at an offset that a frame must have.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BytePattern {
    /// Offset of the first byte from the frame's start.
    pub offset: u16,
    /// The bytes, after the mask.
    pub value: Vec<u8>,
    /// Bits that count; as long as `value`.
    pub mask: Vec<u8>,
}

/// Frames that are punted to the control guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PuntFilterConfig {
    /// All of these must match.
    pub matches: Vec<BytePattern>,
    /// Index in [`PuntClass::ALL`] of the class whose limit applies.
    pub class: u8,
}

/// A vlink.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Vlink {
    /// Name, unique in the vnet.
    pub name: String,
    /// Ends of the vlink. Two ends with at least one port: each receives what the
    /// other sends. Two external ends make a transit, which forwards frames from one
    /// to the other. More than two make a segment.
    pub ends: Vec<VlinkEnd>,
    /// Egress settings for each of these ends. Not used for an external end that is joined directly
    /// to a port, since it sends nothing itself.
    pub leaving: Vec<EgressConfig>,
    /// Egress queues for each of these ends; a schedule does not change them. An end beyond this
    /// list, or with an empty list, has a single queue.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub queues: Vec<Vec<QueueConfig>>,
    /// True if it forwards frames.
    pub up: bool,
    /// Ethernet segment, for more than two ends.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub segment: Option<SegmentConfig>,
    /// Schedule of later changes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub schedule: Option<Schedule>,
}

/// Egress queue at an end of a vlink, before its rate and an external
/// interface's capacity. The queues share both by weight.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueueConfig {
    /// Name, unique at its end. A queue with the same name keeps its
    /// frames and counters when the list changes.
    pub name: String,
    /// Weight among queues that have frames, 1 to [`crate::limits::WEIGHT_MAX`]; 0 means 1.
    pub weight: u32,
    /// Most frames and bytes that may wait. Bytes include the overhead; 0 means as many as these
    /// frames have. If both are 0, the limits of the end's single queue apply.
    pub frames: u32,
    /// See `frames`.
    pub bytes: u64,
    /// Packets reserved for the queue: so many frames may always wait in it, within its own limits.
    #[serde(default, skip_serializing_if = "is_none_set_aside")]
    pub buffers: u32,
    /// Frames of these DSCPs use this queue, unless another one was chosen for them. The first
    /// queue gets all frames that match no queue.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub dscp: Vec<u8>,
}

fn is_none_set_aside(buffers: &u32) -> bool {
    *buffers == 0
}

/// Schedule of a vlink's changes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Schedule {
    /// Start of the schedule: CLOCK_BOOTTIME, nanoseconds. Nobody can set this clock.
    pub began_ns: u64,
    /// Steps ordered by time, at most
    /// [`crate::limits::SCHEDULE_STEPS_MAX`] for all vlinks of a vnet.
    pub steps: Vec<ScheduleStep>,
}

/// Complete state of a vlink from some time on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScheduleStep {
    /// Time from the schedule's start, nanoseconds.
    pub at_ns: u64,
    /// True if it forwards frames, unless the vlink is down in general.
    pub up: bool,
    /// Egress settings for each of its ends.
    pub leaving: Vec<EgressConfig>,
}

impl Schedule {
    /// Returns the count of steps that are due by this time.
    pub fn done(&self, now_ns: u64) -> usize {
        let elapsed_ns = now_ns.saturating_sub(self.began_ns);
        self.steps.partition_point(|step| step.at_ns <= elapsed_ns)
    }

    /// Returns the last of these.
    fn last(&self, now_ns: u64) -> Option<&ScheduleStep> {
        self.steps[..self.done(now_ns)].last()
    }

    /// Returns the time of the next step.
    pub fn next_ns(&self, now_ns: u64) -> Option<u64> {
        let next = self.steps.get(self.done(now_ns))?;
        Some(self.began_ns.saturating_add(next.at_ns))
    }
}

/// Egress settings for one end of a vlink: from a port into the vlink, or from the vlink to the
/// outside. Frames pass the rate, then the impairments, then the external interface's capacity.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct EgressConfig {
    /// Rate, bits per second; excess frames wait.
    pub rate_bps: Option<u64>,
    /// Burst after an idle time, bytes. 0: the rate's bytes in 2 ms, at least two full frames.
    pub burst_bytes: u64,
    /// Overhead that each frame counts beyond its own bytes.
    pub overhead_bytes: u32,
    /// Most frames that may wait for the rate, and as many for the interface's capacity.
    pub queue_frames: u32,
    /// Most bytes that may wait, overhead included; 0: as many as these frames have.
    pub queue_bytes: u64,
    /// Guaranteed part of the external interface's capacity, bits per second.
    pub guarantee_bps: u64,
    /// Weight for sharing the unused capacity, 1 to [`crate::limits::WEIGHT_MAX`]; 0 means 1.
    pub weight: u32,
    /// Impairments.
    pub impairments: Impairments,
}

impl EgressConfig {
    /// Returns the most bytes of memory for frames in the delay line.
    pub fn line_bytes(&self) -> u64 {
        let bps = self.rate_bps.unwrap_or(LINE_BPS);
        // At least the default burst.
        let burst = (bps / 8 / 500).max(2 * 2048).max(self.burst_bytes);
        self.impairments.line_bytes(bps, burst)
    }
}

/// Rate that is assumed if none is given, bits per second.
const LINE_BPS: u64 = 10_000_000_000;

/// Deliberate impairments of frames. All 0: none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Impairments {
    /// Delay of each frame, nanoseconds, at most [`crate::limits::DELAY_NS_MAX`].
    pub delay_ns: u64,
    /// Largest deviation from the delay, uniformly distributed, nanoseconds; at most `delay_ns`.
    pub jitter_ns: u64,
    /// Fraction of frames that are lost.
    pub loss: FrameFraction,
    /// Fraction of delayed frames that skip the delay.
    pub reorder: FrameFraction,
    /// Fraction of frames with one bit inverted.
    pub corrupt: FrameFraction,
    /// Fraction of frames that are sent twice.
    pub duplicate: FrameFraction,
    /// Seed of all random choices.
    pub seed: u64,
}

/// Fraction of frames, in thousand-millionths; at most [`FrameFraction::ALL`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct FrameFraction(pub u32);

impl FrameFraction {
    /// All frames.
    pub const ALL: Self = Self(1_000_000_000);
}

impl Impairments {
    /// True if frames pass unchanged.
    pub fn are_none(&self) -> bool {
        Self { seed: 0, ..*self } == Self::default()
    }

    /// Returns the most bytes of memory for frames in the delay line, if they arrive at `bps` with
    /// bursts of `burst_bytes`, even if all are short. 0 without a delay.
    fn line_bytes(&self, bps: u64, burst_bytes: u64) -> u64 {
        if self.delay_ns == 0 {
            return 0;
        }
        let longest_ns = self.delay_ns + self.jitter_ns.min(self.delay_ns);
        let waiting = u128::from(bps) * u128::from(longest_ns) / 8_000_000_000;
        let copies = if self.duplicate == FrameFraction::default() { 1 } else { 2 };
        let waiting = (waiting + u128::from(burst_bytes)) * copies;
        // The shortest frames need most memory, since each has a record.
        let each = u128::from(LINE_FRAME_BYTES_MIN.next_multiple_of(8) + LINE_RECORD_BYTES);
        let bytes = waiting * each / u128::from(LINE_FRAME_BYTES_MIN) + LINE_BYTES_MIN;
        u64::try_from(bytes).unwrap_or(u64::MAX)
    }
}

/// Bytes stored with each frame in a delay line: departure time, length, mark.
pub const LINE_RECORD_BYTES: u64 = 16;

/// Shortest frame that is assumed, bytes.
const LINE_FRAME_BYTES_MIN: u64 = 60;

/// Space for one more of the longest frames, and as much for the ring's wrap-around.
const LINE_BYTES_MIN: u128 = 2 * (2048 + LINE_RECORD_BYTES as u128);

/// Limits of an Ethernet segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SegmentConfig {
    /// Most addresses that it learns.
    pub addresses: u32,
    /// Most frames per second that are flooded to all ends, for each ingress end.
    pub flood_pps: u64,
}

impl Vlink {
    /// True if it has two ends, and frames from outside arrive at a node's port.
    pub fn is_wire(&self) -> bool {
        self.ends.len() == 2 && self.ports().next().is_some()
    }

    /// Returns its state at a time of its schedule's clock.
    pub fn at(&self, now_ns: u64) -> Self {
        let step = self.schedule.as_ref().and_then(|schedule| schedule.last(now_ns));
        let egress = step.map_or(&self.leaving, |step| &step.leaving).clone();
        let (name, ends, segment) = (self.name.clone(), self.ends.clone(), self.segment);
        let (queues, up) = (self.queues.clone(), self.is_up(now_ns));
        Self { name, ends, leaving: egress, queues, up, segment, schedule: None }
    }

    /// True if it forwards frames at a time of its schedule's clock.
    pub fn is_up(&self, now_ns: u64) -> bool {
        let step = self.schedule.as_ref().and_then(|schedule| schedule.last(now_ns));
        self.up && step.is_none_or(|step| step.up)
    }

    /// Returns the time at which its schedule next takes it down or up.
    pub fn next_change_ns(&self, now_ns: u64) -> Option<u64> {
        let (schedule, is_up) = (self.schedule.as_ref()?, self.is_up(now_ns));
        let mut later = schedule.steps.iter().skip(schedule.done(now_ns));
        let step = later.find(|step| self.up && step.up != is_up)?;
        Some(schedule.began_ns.saturating_add(step.at_ns))
    }

    /// Returns the most bytes of memory for frames in its delay lines, over all times.
    pub fn line_bytes_max(&self) -> u64 {
        let bytes = |egress: &Vec<EgressConfig>| {
            egress.iter().map(EgressConfig::line_bytes).fold(0, u64::saturating_add)
        };
        let steps = self.schedule.iter().flat_map(|schedule| &schedule.steps);
        steps.map(|step| bytes(&step.leaving)).fold(bytes(&self.leaving), u64::max)
    }

    /// Returns the egress settings of end `at`.
    pub fn egress(&self, at: usize) -> EgressConfig {
        self.leaving.get(at).copied().unwrap_or_default()
    }

    /// Returns the queues of end `at`.
    pub fn queues(&self, at: usize) -> &[QueueConfig] {
        self.queues.get(at).map_or(&[], Vec::as_slice)
    }

    /// Returns its ends that are ports, as node and index of the port.
    pub fn ports(&self) -> impl Iterator<Item = (&str, u16)> {
        self.ends.iter().filter_map(|end| match end {
            VlinkEnd::Port { node, port } => Some((node.as_str(), *port)),
            VlinkEnd::External { .. } => None,
        })
    }

    /// Returns the external interfaces of its ends.
    pub fn interfaces(&self) -> impl Iterator<Item = &str> {
        self.ends.iter().filter_map(|end| match end {
            VlinkEnd::Port { .. } => None,
            VlinkEnd::External { interface, .. } => Some(interface.as_str()),
        })
    }
}

/// An end of a vlink.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum VlinkEnd {
    /// Port of this vnet.
    Port {
        /// The node.
        node: String,
        /// Index of the port.
        port: u16,
    },
    /// External interface.
    External {
        /// Name, unique in the vnet.
        name: String,
        /// Name of the external interface.
        interface: String,
        /// Encapsulation that distinguishes the vlink's frames on the interface.
        by: Encapsulation,
    },
}

/// One stage of a traced frame.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TraceStage {
    /// Nanoseconds since it arrived.
    pub at_ns: u64,
    /// `receive`, `classify`, `police`, `distribute`, `dispatch`, `shape`, `send`, `punt`, `drop`.
    pub stage: String,
    /// Decision, as text for people.
    pub detail: String,
}
