use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use crate::{
    ConditionKind, ExternalStats, GuestStats, Phase, PortStats, RouteStats, VnetStatus,
    VnetSummary, WorkerStats,
};

/// Bounds of the time between two samples of a watch, milliseconds.
pub const WATCH_EVERY_MS: std::ops::RangeInclusive<u64> = 100..=60_000;

/// Default time between two samples of a watch, milliseconds.
pub const WATCH_EVERY_MS_DEFAULT: u64 = 1000;

/// Options of a watch.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct WatchQuery {
    /// Only this vnet. The vnet need not exist yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vnet: Option<String>,
    /// Time between two samples, milliseconds, 100 to 60,000. Absent: 1,000.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub every_ms: Option<u64>,
    /// Detail of samples.
    #[serde(default)]
    #[param(inline)]
    pub detail: Detail,
    /// Begin with the events after this one, `BOOT:SEQ` of a snapshot or event, instead of a
    /// snapshot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[param(value_type = Option<String>)]
    pub after: Option<EventCursor>,
    /// Begin with the kept events since this time, milliseconds since 1970, instead of a snapshot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since_ms: Option<u64>,
}

/// Detail of samples.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub enum Detail {
    /// No samples. The daemon does not collect what only samples need.
    None,
    /// Sums for each vnet.
    #[default]
    Summary,
    /// Each port and each guest as well.
    Ports,
}

/// Position in the events of one run of the daemon.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EventCursor {
    /// Run of the daemon, and scope of the events that are counted.
    pub boot: String,
    /// Number of the last known event.
    pub seq: u64,
}

impl fmt::Display for EventCursor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.boot, self.seq)
    }
}

/// Text that is not a [`EventCursor`].
#[derive(Debug, thiserror::Error)]
#[error("{0:?} is not an event cursor; use BOOT:SEQ of a snapshot or an event")]
pub struct BadEventCursor(String);

impl FromStr for EventCursor {
    type Err = BadEventCursor;

    fn from_str(text: &str) -> Result<Self, BadEventCursor> {
        let bad = || BadEventCursor(text.into());
        let (boot, seq) = text.rsplit_once(':').ok_or_else(bad)?;
        Ok(Self { boot: boot.into(), seq: seq.parse().map_err(|_| bad())? })
    }
}

impl Serialize for EventCursor {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for EventCursor {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// One line of a watch. The first is a `snapshot`, or with `after` the events since then. Events
/// and samples follow as they occur. If events were lost, a `gap` replaces them and a snapshot
/// follows.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub enum WatchLine {
    /// The state after all events up to its number.
    Snapshot(Snapshot),
    /// Something happened.
    Event(WatchEvent),
    /// Counters and gauges of one moment. A slow reader gets fewer samples, always the newest.
    Sample(Box<WatchSample>),
    /// Events were lost; a snapshot follows.
    Gap(Gap),
    /// The stream ends; this is the reason.
    End(WatchEnd),
}

/// State of the vnets in scope.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Snapshot {
    /// Run of the daemon, and scope of the events that are counted: the first half of `after`.
    pub boot: String,
    /// Number of the last event that the snapshot includes.
    pub seq: u64,
    /// Time of the snapshot, milliseconds since 1970.
    pub at_ms: u64,
    /// Vnets in scope by name. If the watch asks for one vnet: only that one, if it exists.
    pub vnets: Vec<VnetSummary>,
    /// Status of the vnet that the watch asks for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<VnetStatus>,
    /// Deleted vnets that are not gone yet.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub removing: Vec<String>,
}

/// An event.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct WatchEvent {
    /// Run of the daemon, and scope of the events that are counted.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub boot: String,
    /// Number of the event, ascending among the events in scope.
    pub seq: u64,
    /// Time of the event, milliseconds since 1970.
    pub at_ms: u64,
    /// Object of the event: `vnet/red`, `vnet/red/node/r1`, a process of the node as
    /// `vnet/red/node/r1/g0` (or `control`, `tap`, `mirror`, `management`, `tap-g0`),
    /// `vnet/red/node/r1/port/eth0`, `vnet/red/link/r1-r2`, `mux`, `external/A`, `substrate/NAME`,
    /// `tenant/NAME`, and `node` for the whole PdP node.
    pub object: String,
    /// Kind of the event.
    pub what: EventKind,
    /// New phase, for `phase`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub phase: Option<Phase>,
    /// Kind of the condition, for `condition` and `conditionGone`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub condition: Option<ConditionKind>,
    /// Reason or details, for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// Client that requested the change, `user:NAME` or `token:ID`. Tenants see `operator` for a
    /// client that is not their own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub who: Option<String>,
}

impl WatchEvent {
    /// Returns the vnet of the event.
    pub fn vnet(&self) -> Option<&str> {
        self.object.strip_prefix("vnet/")?.split('/').next()
    }
}

/// Kind of an event.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema,
)]
#[serde(rename_all = "camelCase")]
pub enum EventKind {
    /// An object's phase or error changed; `phase` and `message` have the new ones.
    #[default]
    Phase,
    /// A new object is wanted.
    Created,
    /// An object is gone with all its parts.
    Gone,
    /// A change of the object was stored and begins. `who` requested it; `message` describes it.
    Begun,
    /// The change is done, as far as possible at once.
    Done,
    /// The change is stored but failed. The daemon retries.
    Failed,
    /// A process was started.
    Started,
    /// A process was restarted.
    Restarted,
    /// A process ended by itself; `message` tells how.
    Ended,
    /// A port or an external interface has carrier.
    CarrierUp,
    /// A port or an external interface lost carrier.
    CarrierDown,
    /// A client set a link up.
    LinkUp,
    /// A client set a link down.
    LinkDown,
    /// A link's rate or impairments changed.
    LinkSet,
    /// A forwarding guest connected to the mux and receives frames.
    Connected,
    /// A forwarding guest disconnected.
    Disconnected,
    /// A forwarding guest's routes equal the kernel's.
    RoutesSynced,
    /// A forwarding guest's routes differ from the kernel's.
    RoutesBehind,
    /// A node's condition appeared or changed; `message` is the condition's.
    Condition,
    /// A condition ended, or the process that reports it does not answer. `message` is the
    /// condition's last.
    ConditionGone,
    /// A vnet or a node is ready: as its spec says, with its commands ready and its guests
    /// connected.
    Ready,
    /// A vnet or a node is no longer ready.
    Unready,
}

impl EventKind {
    /// All kinds.
    pub const ALL: [Self; 22] = [
        Self::Phase,
        Self::Created,
        Self::Gone,
        Self::Begun,
        Self::Done,
        Self::Failed,
        Self::Started,
        Self::Restarted,
        Self::Ended,
        Self::CarrierUp,
        Self::CarrierDown,
        Self::LinkUp,
        Self::LinkDown,
        Self::LinkSet,
        Self::Connected,
        Self::Disconnected,
        Self::RoutesSynced,
        Self::RoutesBehind,
        Self::Condition,
        Self::ConditionGone,
        Self::Ready,
        Self::Unready,
    ];

    /// Words in tables.
    pub fn label(self) -> &'static str {
        match self {
            Self::Phase => "phase",
            Self::Created => "created",
            Self::Gone => "gone",
            Self::Begun => "change begun",
            Self::Done => "change done",
            Self::Failed => "change failed",
            Self::Started => "started",
            Self::Restarted => "restarted",
            Self::Ended => "ended",
            Self::CarrierUp => "carrier up",
            Self::CarrierDown => "carrier down",
            Self::LinkUp => "link up",
            Self::LinkDown => "link down",
            Self::LinkSet => "link set",
            Self::Connected => "connected",
            Self::Disconnected => "disconnected",
            Self::RoutesSynced => "routes synced",
            Self::RoutesBehind => "routes behind",
            Self::Condition => "condition",
            Self::ConditionGone => "condition gone",
            Self::Ready => "ready",
            Self::Unready => "not ready",
        }
    }
}

/// Events were lost.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Gap {
    /// Largest possible number of lost events. Absent if unknown: they are from another run of the
    /// daemon.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lost: Option<u64>,
}

/// Why a watch ends.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct WatchEnd {
    /// The daemon stops, or the client has lost its rights.
    pub reason: String,
}

/// Counters and gauges of one moment. Two samples give rates.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct WatchSample {
    /// Time of the sample, milliseconds since 1970.
    pub at_ms: u64,
    /// Time of the sample, nanoseconds of the machine's monotonic clock.
    pub at_ns: u64,
    /// Vnets in scope by name, or the one that the watch asks for.
    pub vnets: BTreeMap<String, VnetSample>,
    /// External interfaces by name. Absent for tenants and in watches of one vnet.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub externals: BTreeMap<String, ExternalStats>,
    /// Worker threads of the mux. Absent for tenants and in watches of one vnet.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub workers: Vec<WorkerStats>,
}

/// A vnet in a sample: sums over its nodes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct VnetSample {
    /// Frames that ports received from their links.
    pub received: u64,
    /// Their bytes.
    pub received_bytes: u64,
    /// Frames that ports sent out of their links.
    pub sent: u64,
    /// Their bytes.
    pub sent_bytes: u64,
    /// Frames dropped, for any reason.
    pub dropped: u64,
    /// Frames that have arrived and are not finished.
    pub in_flight: u64,
    /// Part of these frames that wait at links for their rate or delay.
    pub waiting: u64,
    /// Number of forwarding guests.
    pub guests: u32,
    /// Number of forwarding guests that are connected and receive frames.
    pub guests_connected: u32,
    /// Resources used by its guests and control guests, as far as they were read.
    #[serde(flatten)]
    pub usage: ResourceUsage,
    /// Nodes by name, if the watch asks for ports. `external` stands for external ends of links
    /// that have no node in between.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub nodes: BTreeMap<String, NodeSample>,
}

/// A node in a sample.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeSample {
    /// Ports by name.
    pub ports: BTreeMap<String, PortStats>,
    /// Forwarding guests by number.
    #[schema(value_type = BTreeMap<String, GuestSample>)]
    pub guests: BTreeMap<u32, GuestSample>,
    /// Frames that have arrived and are not finished.
    pub in_flight: u64,
    /// Resources used by its control guest and its helpers, or by the host.
    pub control: ResourceUsage,
    /// Resources that the kernel used for a router whose namespace forwards: by its threads, and by
    /// the helper that serves its TAPs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kernel: Option<ResourceUsage>,
    /// Routes of a router, as its mirror last reported.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub routes: Option<RouteStats>,
}

/// A forwarding guest in a sample.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct GuestSample {
    /// Counters of the guest.
    #[serde(flatten)]
    pub counters: GuestStats,
    /// Resources used by the guest.
    pub usage: ResourceUsage,
}

/// Resources used by one or several guests since they were made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ResourceUsage {
    /// Time of reading, nanoseconds of the machine's monotonic clock; the oldest of several; 0: not
    /// read yet. With many guests on a node, each sample reads only some of them.
    pub usage_at_ns: u64,
    /// CPU time, nanoseconds.
    pub cpu_ns: u64,
    /// Time that its threads were throttled by the CPU limit, nanoseconds.
    pub throttled_ns: u64,
    /// Memory used, bytes.
    pub memory_bytes: u64,
    /// Processes killed because of the memory limit.
    pub memory_kills: u64,
}

impl ResourceUsage {
    /// Adds the resources of another guest.
    pub fn add(&mut self, other: &Self) {
        self.usage_at_ns = match (self.usage_at_ns, other.usage_at_ns) {
            (0, at) | (at, 0) => at,
            (one, two) => one.min(two),
        };
        self.cpu_ns += other.cpu_ns;
        self.throttled_ns += other.throttled_ns;
        self.memory_bytes += other.memory_bytes;
        self.memory_kills += other.memory_kills;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn event_cursors_round_trip_and_reject_garbage() {
        let cursor = EventCursor { boot: "a:b".into(), seq: u64::MAX };
        assert_eq!(cursor.to_string().parse::<EventCursor>().unwrap(), cursor);
        let query: WatchQuery = serde_urlencoded::from_str("after=x%3A7&detail=ports").unwrap();
        assert_eq!(query.after, Some(EventCursor { boot: "x".into(), seq: 7 }));
        assert_eq!(query.detail, Detail::Ports);
        for bad in ["", "7", "a:", "a:-1", "a:18446744073709551616"] {
            assert!(bad.parse::<EventCursor>().is_err(), "{bad}");
        }
    }

    #[test]
    fn event_vnet_is_derived_from_its_object() {
        let of = |object: &str| WatchEvent { object: object.into(), ..WatchEvent::default() };
        assert_eq!(of("vnet/acme.red/node/r1/g0").vnet(), Some("acme.red"));
        assert_eq!(of("vnet/red").vnet(), Some("red"));
        assert_eq!(of("external/vnet").vnet(), None);
    }
}
