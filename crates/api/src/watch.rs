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

/// Time between two samples of a watch that asks for none in particular, milliseconds.
pub const WATCH_EVERY_MS_DEFAULT: u64 = 1000;

/// What to watch.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct WatchQuery {
    /// Only this vnet. It may be one that is not there yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vnet: Option<String>,
    /// Time between two samples, milliseconds, 100 to 60,000. Absent: 1,000.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub every_ms: Option<u64>,
    /// What samples have.
    #[serde(default)]
    #[param(inline)]
    pub detail: Detail,
    /// Begin with the events after this one, `BOOT:SEQ` as snapshots and events say, instead of a snapshot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[param(value_type = Option<String>)]
    pub after: Option<Cursor>,
    /// Begin with the events since then, milliseconds since 1970, as far as they are kept, instead of a snapshot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since_ms: Option<u64>,
}

/// How much a sample has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub enum Detail {
    /// No samples, and what only samples find out is not looked for.
    None,
    /// Sums of each vnet.
    #[default]
    Summary,
    /// Each port and each guest as well.
    Ports,
}

/// A place among the events of one run of the daemon.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cursor {
    /// Which run, and whose events are counted.
    pub boot: String,
    /// Number of the last event that is known.
    pub seq: u64,
}

impl fmt::Display for Cursor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.boot, self.seq)
    }
}

/// Not a [`Cursor`].
#[derive(Debug, thiserror::Error)]
#[error("{0:?} is no place among events; use BOOT:SEQ of a snapshot or an event")]
pub struct BadCursor(String);

impl FromStr for Cursor {
    type Err = BadCursor;

    fn from_str(text: &str) -> Result<Self, BadCursor> {
        let bad = || BadCursor(text.into());
        let (boot, seq) = text.rsplit_once(':').ok_or_else(bad)?;
        Ok(Self { boot: boot.into(), seq: seq.parse().map_err(|_| bad())? })
    }
}

impl Serialize for Cursor {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Cursor {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// One line of a watch: first a `snapshot` (or, with `after`, the events since then), then events and samples as they
/// come. Where events were lost there is a `gap` instead, and a snapshot after it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub enum WatchLine {
    /// What is, after all events up to its number.
    Snapshot(Snapshot),
    /// Something happened.
    Event(WatchEvent),
    /// Counters and gauges of one moment. Who reads slowly gets fewer, always the newest.
    Sample(Box<Sample>),
    /// Events were lost; a snapshot follows.
    Gap(Gap),
    /// The stream ends, and why.
    End(WatchEnd),
}

/// What is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Snapshot {
    /// Which run of the daemon, and whose events are counted: the first half of `after`.
    pub boot: String,
    /// Number of the last event that this has in it.
    pub seq: u64,
    /// When, milliseconds since 1970.
    pub at_ms: u64,
    /// The vnets in scope by name, or the one that was asked for, if it is there.
    pub vnets: Vec<VnetSummary>,
    /// The status of the one that was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<VnetStatus>,
    /// Vnets that were deleted and are being taken down.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub going: Vec<String>,
}

/// Something that happened.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct WatchEvent {
    /// Which run of the daemon, and whose events are counted.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub boot: String,
    /// Its number, ascending, among the events in scope.
    pub seq: u64,
    /// When, milliseconds since 1970.
    pub at_ms: u64,
    /// With what: `vnet/red`, `vnet/red/node/r1`, a process of it as `vnet/red/node/r1/g0` (or `control`, `tap`,
    /// `mirror`, `tap-g0`), `vnet/red/node/r1/port/eth0`, `vnet/red/link/r1-r2`, `mux`, `external/A`,
    /// `substrate/NAME`,
    /// `tenant/NAME`, and `node` for all of it.
    pub object: String,
    /// What.
    pub what: What,
    /// How it is now, of `phase`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub phase: Option<Phase>,
    /// Which one, of `condition` and `conditionGone`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub condition: Option<ConditionKind>,
    /// Why, or how exactly, for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// Who asked for it, `user:NAME` or `token:ID`; for a tenant `operator` where that was no one of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub who: Option<String>,
}

impl WatchEvent {
    /// The vnet that it is about.
    pub fn vnet(&self) -> Option<&str> {
        self.object.strip_prefix("vnet/")?.split('/').next()
    }
}

/// What happens.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema,
)]
#[serde(rename_all = "camelCase")]
pub enum What {
    /// An object's phase or what is wrong with it changed: `phase` and `message` say how it is.
    #[default]
    Phase,
    /// It is there: an object that is wanted and was not before.
    Created,
    /// It is gone with all that belonged to it.
    Gone,
    /// A change of it was stored, and is being made; `who` asked for it, and `message` says for what.
    Begun,
    /// That change is made, as far as could be at once.
    Done,
    /// That change is stored and could not be made; it is being tried again.
    Failed,
    /// A process was started.
    Started,
    /// A process was started again.
    Restarted,
    /// A process ended, and was not made to; `message` says how.
    Ended,
    /// A port or an external interface has carrier.
    CarrierUp,
    /// It has none.
    CarrierDown,
    /// A link was set up.
    LinkUp,
    /// A link was set down, or is down by its schedule.
    LinkDown,
    /// A link has another rate, or does something else to frames.
    LinkSet,
    /// A forwarding guest is connected to the mux, and gets frames.
    Connected,
    /// It is not any more.
    Disconnected,
    /// A forwarding guest's routes equal the kernel's.
    RoutesSynced,
    /// They do not, yet or any more.
    RoutesBehind,
    /// A condition of a node is there, or is otherwise than before; `message` is its.
    Condition,
    /// It is gone, or who tells of it does not answer; `message` is what it was.
    ConditionGone,
    /// A vnet or a node is ready: as its spec says, with its commands ready and its guests connected.
    Ready,
    /// It is not any more.
    Unready,
}

impl What {
    /// All of them.
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

    /// The words in tables.
    pub fn words(self) -> &'static str {
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
    /// So many at most; absent where nobody knows: they were of another run of the daemon.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lost: Option<u64>,
}

/// Why a stream ends.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct WatchEnd {
    /// The daemon stops, or who asked may not any more.
    pub reason: String,
}

/// Counters and gauges of one moment. Two samples give rates.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Sample {
    /// When, milliseconds since 1970.
    pub at_ms: u64,
    /// When, nanoseconds of the machine's monotonic clock.
    pub at_ns: u64,
    /// The vnets in scope by name, or the one that was asked for.
    pub vnets: BTreeMap<String, VnetSample>,
    /// External interfaces by name; not for tenants, nor of one vnet.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub externals: BTreeMap<String, ExternalStats>,
    /// Worker threads of the mux; not for tenants, nor of one vnet.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub workers: Vec<WorkerStats>,
}

/// A vnet in a sample: sums over its nodes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct VnetSample {
    /// Frames that arrived at ports by their links.
    pub received: u64,
    /// Their bytes.
    pub received_bytes: u64,
    /// Frames that left by ports' links.
    pub sent: u64,
    /// Their bytes.
    pub sent_bytes: u64,
    /// Frames dropped, for whatever reason.
    pub dropped: u64,
    /// Frames between arrival and their end.
    pub in_flight: u64,
    /// Of these, frames that wait at links: for their rate or their delay.
    pub waiting: u64,
    /// Forwarding guests.
    pub guests: u32,
    /// Of these, connected and in the distribution.
    pub guests_connected: u32,
    /// What its guests and control guests used, as far as that was looked at.
    #[serde(flatten)]
    pub usage: Usage,
    /// Its nodes by name, where ports were asked for; as `external` the ends outside of links where no node is
    /// between.
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
    /// Frames between arrival and their end.
    pub in_flight: u64,
    /// What its control guest and its helpers used, or the host.
    pub control: Usage,
    /// What the kernel used for a router whose namespace forwards: its threads, and the helper that serves its TAPs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kernel: Option<Usage>,
    /// The routes of a router, when its mirror was last asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub routes: Option<RouteStats>,
}

/// A forwarding guest in a sample.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct GuestSample {
    /// Its counters.
    #[serde(flatten)]
    pub counters: GuestStats,
    /// What it used.
    pub usage: Usage,
}

/// What a guest used since it was made, or several did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Usage {
    /// When that was read, nanoseconds of the machine's monotonic clock, of several the oldest; 0: not yet. With many
    /// guests on a node not all are looked at each time.
    pub usage_at_ns: u64,
    /// CPU time, nanoseconds.
    pub cpu_ns: u64,
    /// Time for which its threads had to wait because of the CPU limit, nanoseconds.
    pub throttled_ns: u64,
    /// Memory held, bytes.
    pub memory_bytes: u64,
    /// Processes killed because of the memory limit.
    pub memory_kills: u64,
}

impl Usage {
    /// With that of another.
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
    fn cursors_read_back_and_nothing_else_is_one() {
        let cursor = Cursor { boot: "a:b".into(), seq: u64::MAX };
        assert_eq!(cursor.to_string().parse::<Cursor>().unwrap(), cursor);
        let query: WatchQuery = serde_urlencoded::from_str("after=x%3A7&detail=ports").unwrap();
        assert_eq!(query.after, Some(Cursor { boot: "x".into(), seq: 7 }));
        assert_eq!(query.detail, Detail::Ports);
        for bad in ["", "7", "a:", "a:-1", "a:18446744073709551616"] {
            assert!(bad.parse::<Cursor>().is_err(), "{bad}");
        }
    }

    #[test]
    fn an_events_vnet_is_that_of_its_object() {
        let of = |object: &str| WatchEvent { object: object.into(), ..WatchEvent::default() };
        assert_eq!(of("vnet/acme.red/node/r1/g0").vnet(), Some("acme.red"));
        assert_eq!(of("vnet/red").vnet(), Some("red"));
        assert_eq!(of("external/vnet").vnet(), None);
    }
}
