use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

/// Whose counters.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct StatsQuery {
    /// Only of this vnet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vnet: Option<String>,
}

/// Counters since the mux started (those of a vnet since it was first there). Two samples give
/// rates.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Stats {
    /// When, nanoseconds of the machine's monotonic clock.
    pub at_ns: u64,
    /// External interfaces by name.
    pub externals: BTreeMap<String, ExternalStats>,
    /// Vnets by name.
    pub vnets: BTreeMap<String, VnetStats>,
    /// Worker threads of the mux.
    pub workers: Vec<WorkerStats>,
}

/// Counters of an external interface.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ExternalStats {
    /// Frames received.
    pub received: u64,
    /// Frames that the kernel took for transmission.
    pub sent: u64,
    /// Frames that belong to no vnet, by reason.
    pub dropped: BTreeMap<String, u64>,
    /// Frames that the kernel dropped because the mux was too slow.
    pub kernel_dropped: u64,
    /// Generators: frames that came with a number.
    #[serde(default)]
    pub numbered: u64,
    /// Generators: of these, how many came with a number lower than one that had come before
    /// (reordered, RFC 4737 section 3.3).
    #[serde(default)]
    pub late: u64,
}

/// Counters of a vnet.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct VnetStats {
    /// Nodes by name; as `external` the ends outside of links where no node is between.
    pub nodes: BTreeMap<String, NodeStats>,
}

/// Counters of a node. The sum over ports of `received + made` equals the sum of
/// `sent + punted + consumed + dropped` plus `inFlight`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeStats {
    /// Ports by name.
    pub ports: BTreeMap<String, PortStats>,
    /// Forwarding guests by number.
    #[schema(value_type = BTreeMap<String, GuestStats>)]
    pub guests: BTreeMap<u32, GuestStats>,
    /// Frames between arrival and their end.
    pub in_flight: u64,
    /// Of a router that the mux forwards for by itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub engine: Option<EngineStats>,
    /// The routes of a router, while its mirror answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub routes: Option<RouteStats>,
    /// Its helpers that did not answer in time, `tap` and `mirror`: what they count is missing.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub late: Vec<String>,
}

/// Counters of a port. Bytes are those of the inner frames.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct PortStats {
    /// Frames that arrived by the port's link; at an end outside, from there.
    pub received: u64,
    /// Their bytes.
    pub received_bytes: u64,
    /// Frames that began here: from the node's own stack, or made by a guest; at an end outside: from its link.
    pub made: u64,
    /// Frames that left by the port's link; by an end outside.
    pub sent: u64,
    /// Their bytes.
    pub sent_bytes: u64,
    /// Copies of its frames beyond one for one, where they went to many ends of a segment.
    #[serde(default)]
    pub copied: u64,
    /// Frames that its link's `duplicate` had go twice; they count twice as sent.
    #[serde(default)]
    pub duplicated: u64,
    /// Frames in which its link's `corrupt` turned a bit.
    #[serde(default)]
    pub corrupted: u64,
    /// Frames that its link's `reorder` had overtake others.
    #[serde(default)]
    pub reordered: u64,
    /// Frames handed to the node's own stack.
    pub punted: u64,
    /// Frames that ended in a guest: given to one that says nothing of their fate, or kept. At an end outside: what
    /// its link took.
    #[serde(default)]
    pub consumed: u64,
    /// Frames dropped, by reason.
    pub dropped: BTreeMap<String, u64>,
    /// Frames that an active capture did not get.
    pub capture_missed: u64,
    /// Frames that wait at its link now, for the link's rate or its delay.
    #[serde(default)]
    pub waiting: u64,
    /// Of its link's queues, in order, where it has some; not told where all networks are asked for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub queues: Vec<QueueStats>,
    /// What the helper between the mux and the TAP counts, while it answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tap: Option<TapStats>,
}

/// Counters of one of a link's queues.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
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
    /// Frames that were dropped because it was full, of those that the port counts as `queue-full`.
    pub dropped: u64,
}

/// Counters of one TAP's helper since it started.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct TapStats {
    /// Frames from the mux written to the TAP.
    pub to_tap: u64,
    /// Frames read from the TAP and given to the mux.
    pub from_tap: u64,
    /// Frames from the mux that the TAP refused.
    pub to_tap_refused: u64,
    /// Frames from the TAP that found no room on the way to the mux.
    pub from_tap_dropped: u64,
}

/// Counters of the mux's own forwarding for a router.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct EngineStats {
    /// It has a snapshot of its control guest's routes.
    pub synced: bool,
    /// Routes that it has.
    pub routes: u64,
    /// Bytes that its tables take.
    pub memory_bytes: u64,
    /// Changes that it applied.
    pub changes: u64,
    /// Why it does not follow its control guest's routes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fault: Option<String>,
    /// Power of the mux that it is guaranteed, thousandths of a core; 0: it borrows.
    #[serde(default)]
    pub power_millicores: u64,
    /// The mux's time that its vnet took, all nodes together, since the mux started, nanoseconds: what is held against
    /// the power of all of the vnet's fast paths.
    #[serde(default)]
    pub used_ns: u64,
    /// Its slow path, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slowpath: Option<SlowPathStats>,
}

/// Programs that tell the mux what to do with a fast path's packets.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
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

/// Counters of a forwarding guest.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct GuestStats {
    /// The FE that it is on.
    pub fe: String,
    /// Its share of the FE, thousandths of a core.
    pub share_millicores: u64,
    /// Connected and in the distribution.
    pub connected: bool,
    /// Frames given to it.
    pub to_guest: u64,
    /// Frames got from it.
    pub from_guest: u64,
    /// Completions (guests on PdP's runtime).
    pub completed: u64,
    /// Frames given to it and not completed (guests on PdP's runtime).
    #[serde(default)]
    pub in_flight: u64,
    /// Times it was disconnected for breaking the contract.
    pub faults: u64,
    /// The last such breach.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_fault: Option<String>,
}

/// What a route mirror counts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct RouteStats {
    /// IPv4 routes in the mirror's copy of the kernel's main table.
    pub routes_v4: u64,
    /// IPv6 routes.
    pub routes_v6: u64,
    /// Groups of next hops in use.
    pub groups: u64,
    /// Neighbours with a known link address.
    pub neighbours: u64,
    /// Routes not passed on because of the vrouter's limit.
    pub routes_refused: u64,
    /// Notifications read from the kernel.
    pub notifications: u64,
    /// Full dumps after the first.
    pub resyncs: u64,
    /// Times the kernel said that notifications were lost.
    pub overruns: u64,
    /// How each forwarding guest's copy is.
    pub guests: Vec<RouteGuestStats>,
}

/// How one forwarding guest's copy of the routes is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct RouteGuestStats {
    /// Number of the guest in its vrouter.
    pub guest: u32,
    /// Has the whole snapshot and all changes up to the last barrier.
    pub synced: bool,
    /// Bytes waiting to be read by it.
    pub backlog_bytes: u64,
    /// From a notification's being read to the guest's having applied it, µs.
    pub apply_us: u64,
    /// Largest such time since it connected, µs.
    pub apply_us_max: u64,
}

/// Counters of a worker thread.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct WorkerStats {
    /// Rounds of the loop with work.
    pub busy_rounds: u64,
    /// Times it went to sleep.
    pub sleeps: u64,
    /// Free packets in its part of the pool.
    pub free_packets: u64,
    /// What each stage took, in the order of the stages.
    #[serde(default)]
    pub stages: Vec<StageStats>,
}

/// What a stage of a worker took.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct StageStats {
    /// Its name; `idle` is looking for work without finding any, `sleep` is blocked.
    pub stage: String,
    /// Cycles of the time-stamp counter.
    pub cycles: u64,
    /// Frames that went through.
    pub frames: u64,
}
