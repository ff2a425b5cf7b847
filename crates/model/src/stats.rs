//! Counters, and states that are read together with them.

use std::collections::BTreeMap;
use std::fmt;

use serde::de::{Error, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
#[cfg(feature = "schema")]
use utoipa::ToSchema;

/// Counters since the mux started, or since a vnet was first present. Two samples give rates.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(ToSchema))]
#[serde(rename_all = "camelCase")]
pub struct Stats {
    /// Time of the sample, nanoseconds of the machine's monotonic clock.
    // pdpd adds it.
    #[serde(default)]
    #[cfg_attr(feature = "schema", schema(required))]
    pub at_ns: u64,
    /// External interfaces by name.
    pub externals: BTreeMap<String, ExternalStats>,
    /// Vnets by name.
    pub vnets: BTreeMap<String, VnetStats>,
    /// Worker threads of the mux.
    pub workers: Vec<WorkerStats>,
}

/// Counters of an external interface.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(ToSchema))]
#[serde(rename_all = "camelCase")]
pub struct ExternalStats {
    /// Frames received, including those dropped here.
    pub received: u64,
    /// Frames that the kernel accepted for transmission.
    pub sent: u64,
    /// Frames dropped at the interface, by reason. Received frames that belong to no vnet, and
    /// frames that a port sent and the interface could not transmit.
    #[serde(deserialize_with = "reasons")]
    pub dropped: BTreeMap<String, u64>,
    /// Frames that the kernel dropped because the mux was too slow.
    #[serde(alias = "kernel_dropped")]
    pub kernel_dropped: u64,
    /// Generators: frames received with a sequence number.
    #[serde(default)]
    pub numbered: u64,
    /// Generators: received frames with a lower number than an earlier frame (reordered, RFC 4737
    /// section 3.3). Number 0 begins a new count.
    #[serde(default)]
    pub late: u64,
}

/// Counters of a vnet.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(ToSchema))]
#[serde(rename_all = "camelCase")]
pub struct VnetStats {
    /// Nodes by name. `external` stands for external ends of links that have no node in between.
    pub nodes: BTreeMap<String, NodeStats>,
}

/// Counters of a node, all of one moment. The sum over ports of `received + made + duplicated`
/// equals the sum of `sent + punted + consumed + dropped` plus `inFlight`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(ToSchema))]
#[serde(rename_all = "camelCase")]
pub struct NodeStats {
    /// Ports by name.
    pub ports: BTreeMap<String, PortStats>,
    /// Forwarding guests by number.
    #[cfg_attr(feature = "schema", schema(value_type = BTreeMap<String, GuestStats>))]
    pub guests: BTreeMap<u32, GuestStats>,
    /// Frames that have arrived and are not finished: in guests, and waiting at links.
    #[serde(alias = "in_flight")]
    pub in_flight: u64,
    /// The mux's own forwarding, for routers that use it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub engine: Option<EngineStats>,
    /// Routes of a router, while its mirror answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub routes: Option<RouteStats>,
    /// Helpers that did not answer in time, `tap` or `mirror`. Their counters are missing.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub late: Vec<String>,
    /// True if the TAP helper is connected. Only between mux and pdpd.
    #[serde(default, skip_serializing_if = "is_false", alias = "tap_connected")]
    #[cfg_attr(feature = "schema", schema(ignore))]
    pub tap_connected: bool,
}

/// Counters of a port. Bytes are those of the inner frames.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(ToSchema))]
#[serde(rename_all = "camelCase")]
pub struct PortStats {
    /// Frames received from the port's link; at an external end, from outside.
    pub received: u64,
    /// Their bytes.
    #[serde(alias = "received_bytes")]
    pub received_bytes: u64,
    /// Frames that began here: sent by the node's own stack, or made by a guest. At an external
    /// end: frames from its link.
    pub made: u64,
    /// Frames sent out of the port's link; at an external end, to the outside.
    pub sent: u64,
    /// Their bytes.
    #[serde(alias = "sent_bytes")]
    pub sent_bytes: u64,
    /// Additional copies of the port's sent frames, flooded to several ends of a segment; at an
    /// external end, of its received frames. Each copy counts where it arrives.
    #[serde(default)]
    pub copied: u64,
    /// Frames sent twice because of the link's `duplicate`. Each counts twice in `sent`, or later
    /// in `dropped`.
    #[serde(default)]
    pub duplicated: u64,
    /// Frames with a bit flipped by the link's `corrupt`.
    #[serde(default)]
    pub corrupted: u64,
    /// Frames moved ahead of others by the link's `reorder`.
    #[serde(default)]
    pub reordered: u64,
    /// Frames passed to the node's own stack.
    pub punted: u64,
    /// Frames that ended in a guest: the guest kept them, or does not report what it did with them.
    /// At an external end: frames that its link accepted.
    #[serde(default)]
    pub consumed: u64,
    /// Frames dropped, by reason.
    #[serde(deserialize_with = "reasons")]
    pub dropped: BTreeMap<String, u64>,
    /// Frames that an active capture missed.
    #[serde(alias = "capture_missed")]
    pub capture_missed: u64,
    /// Frames now waiting at the port's link for its rate or delay, or for a next hop.
    #[serde(default)]
    pub waiting: u64,
    /// Counters of the link's queues in order, if it has several. Each is read at a slightly later
    /// moment. Absent in answers about all networks.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub queues: Vec<QueueStats>,
    /// Counters of the helper between the mux and the TAP, while it answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tap: Option<TapStats>,
    /// Problem on the path of its tunnel's frames, if its link is a tunnel. Only between mux and
    /// pdpd.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schema(ignore))]
    pub underlay: Option<UnderlayProblem>,
    /// Reasons in `dropped` that are limits of the spec and dropped a frame in the last
    /// [`LIMITING_S`]. Only between mux and pdpd.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "schema", schema(ignore))]
    pub limiting: Vec<String>,
}

/// Seconds after its last drop for which a limit stays in [`PortStats::limiting`].
pub const LIMITING_S: u64 = 10;

/// Counters of one of a link's queues.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(ToSchema))]
#[serde(rename_all = "camelCase")]
pub struct QueueStats {
    /// Name of the queue.
    pub name: String,
    /// Frames waiting now.
    pub waiting: u64,
    /// Their bytes.
    #[serde(alias = "waiting_bytes")]
    pub waiting_bytes: u64,
    /// Frames sent from the queue.
    pub sent: u64,
    /// Their bytes.
    #[serde(alias = "sent_bytes")]
    pub sent_bytes: u64,
    /// Frames dropped because the queue was full. The port counts them as `queue-full`.
    pub dropped: u64,
}

/// Counters of one TAP's helper since it started.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(ToSchema))]
#[serde(rename_all = "camelCase")]
pub struct TapStats {
    /// Frames from the mux written to the TAP.
    #[serde(alias = "to_tap")]
    pub to_tap: u64,
    /// Frames from the TAP passed to the mux.
    #[serde(alias = "from_tap")]
    pub from_tap: u64,
    /// Frames from the mux that the TAP refused.
    #[serde(alias = "to_tap_refused")]
    pub to_tap_refused: u64,
    /// Frames from the TAP dropped because the channel to the mux was full or not connected.
    #[serde(alias = "from_tap_dropped")]
    pub from_tap_dropped: u64,
}

/// Counters of the mux's own forwarding for a router.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(ToSchema))]
#[serde(rename_all = "camelCase")]
pub struct EngineStats {
    /// True if it has a snapshot of its control guest's routes.
    pub synced: bool,
    /// Number of routes.
    pub routes: u64,
    /// Bytes used by its tables.
    #[serde(alias = "memory_bytes")]
    pub memory_bytes: u64,
    /// Number of route changes applied.
    #[serde(alias = "messages")]
    pub changes: u64,
    /// Why it does not follow its control guest's routes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fault: Option<String>,
    /// Guaranteed power of the mux, thousandths of a core. 0: it borrows power.
    // pdpd adds it.
    #[serde(default)]
    pub power_millicores: u64,
    /// Time of the mux used by all nodes of its vnet together, nanoseconds. It counts against the
    /// total power of the vnet's fast paths.
    #[serde(default, alias = "used_ns")]
    pub used_ns: u64,
    /// Counters of its slow path, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slowpath: Option<SlowPathStats>,
}

/// Counters of the programs that control a fast path.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(ToSchema))]
#[serde(rename_all = "camelCase")]
pub struct SlowPathStats {
    /// Number of connected programs.
    pub programs: u32,
    /// Number of filters.
    pub filters: u32,
    /// Bytes used by filters and their counters.
    #[serde(alias = "memory_bytes")]
    pub memory_bytes: u64,
    /// Why the last disconnected program was disconnected.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fault: Option<String>,
}

/// Counters of a forwarding guest.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(ToSchema))]
#[serde(rename_all = "camelCase")]
pub struct GuestStats {
    /// Name of the FE that runs the guest.
    // pdpd adds it, and the share.
    #[serde(default)]
    #[cfg_attr(feature = "schema", schema(required))]
    pub fe: String,
    /// Guaranteed share of the FE, thousandths of a core.
    #[serde(default)]
    #[cfg_attr(feature = "schema", schema(required))]
    pub share_millicores: u64,
    /// True if the guest is connected and the mux distributes frames to it.
    pub connected: bool,
    /// Frames sent to the guest.
    #[serde(alias = "to_guest")]
    pub to_guest: u64,
    /// Frames received from the guest.
    #[serde(alias = "from_guest")]
    pub from_guest: u64,
    /// Frames completed by the guest (guests on PdP's runtime).
    pub completed: u64,
    /// Frames sent to the guest and not completed (guests on PdP's runtime).
    #[serde(default, alias = "in_flight")]
    pub in_flight: u64,
    /// Number of disconnects for violating the protocol.
    pub faults: u64,
    /// The last violation.
    #[serde(default, skip_serializing_if = "Option::is_none", alias = "last_fault")]
    pub last_fault: Option<String>,
}

/// Counters of a route mirror.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(ToSchema))]
#[serde(rename_all = "camelCase")]
pub struct RouteStats {
    /// IPv4 routes in the mirror's copy of the kernel's main table.
    #[serde(alias = "routes_v4")]
    pub routes_v4: u64,
    /// IPv6 routes.
    #[serde(alias = "routes_v6")]
    pub routes_v6: u64,
    /// Groups of next hops in use.
    pub groups: u64,
    /// Neighbours with a known MAC address.
    pub neighbours: u64,
    /// Routes withheld from guests because of the vrouter's limit.
    #[serde(alias = "routes_refused")]
    pub routes_refused: u64,
    /// Notifications read from the kernel.
    pub notifications: u64,
    /// Number of full dumps after the first.
    pub resyncs: u64,
    /// Number of times that the kernel lost notifications.
    pub overruns: u64,
    /// Each forwarding guest's copy of the routes.
    pub guests: Vec<RouteGuestStats>,
}

/// State of one forwarding guest's copy of the routes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(ToSchema))]
#[serde(rename_all = "camelCase")]
pub struct RouteGuestStats {
    /// Number of the guest in its vrouter.
    pub guest: u32,
    /// True if the guest has the whole snapshot and all changes up to the last barrier.
    pub synced: bool,
    /// Bytes that the guest has not read yet.
    #[serde(alias = "backlog_bytes")]
    pub backlog_bytes: u64,
    /// Latest time from reading a notification until the guest had applied it, µs.
    #[serde(alias = "apply_us")]
    pub apply_us: u64,
    /// Largest such time since the guest connected, µs.
    #[serde(alias = "apply_us_max")]
    pub apply_us_max: u64,
}

/// Counters of a worker thread.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(ToSchema))]
#[serde(rename_all = "camelCase")]
pub struct WorkerStats {
    /// Rounds of the loop with work.
    #[serde(alias = "busy_rounds")]
    pub busy_rounds: u64,
    /// Number of times that the worker went to sleep.
    pub sleeps: u64,
    /// Free packet buffers in the worker's part of the pool.
    #[serde(alias = "free_packets")]
    pub free_packets: u64,
    /// Time used by each stage, in the order of the stages.
    #[serde(default)]
    pub stages: Vec<StageStats>,
}

/// Time used by one stage of a worker.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(ToSchema))]
#[serde(rename_all = "camelCase")]
pub struct StageStats {
    /// Name of the stage. `idle` is polling without finding work, `sleep` is blocked.
    pub stage: String,
    /// Cycles of the time-stamp counter.
    pub cycles: u64,
    /// Number of frames processed.
    pub frames: u64,
}

/// Reason why a tunnel's frames, or the longest of them, do not reach its
/// other end, as far as the host's kernel knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum UnderlayProblem {
    /// The device is down, or gone.
    Down,
    /// The device has no carrier.
    NoCarrier,
    /// The tunnel's local address does not belong to the host.
    NoAddress,
    /// There is no route to the remote address over the device.
    NoRoute,
    /// Nobody answers the address resolution (ARP, neighbour discovery).
    Unanswered {
        /// True if it was for a router on the path, false if for the remote itself.
        router: bool,
    },
    /// The path allows only shorter IP packets than the vlink may send.
    PathMtu {
        /// Longest packet on the path, bytes.
        path_bytes: u32,
        /// Longest packet of the vlink, bytes.
        packet_bytes: u32,
    },
}

fn is_false(is: &bool) -> bool {
    !is
}

/// Most drop reasons that are accepted for one port or external interface. A mux has fewer.
pub const REASONS_MAX: usize = 256;

/// Reads at most [`REASONS_MAX`] reasons, so that a
/// sender of invented ones costs no time and memory.
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
