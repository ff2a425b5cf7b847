use std::fmt;

pub use pdp_model::{FilterCounter, FilterVerdict};
use serde::de::{SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use utoipa::{IntoParams, ToSchema};

/// Largest number of filters in one request.
pub const FASTPATH_FILTERS_MAX: usize = 131_072;

/// Largest number of filters in one answer. Ask for more from [`FastpathFilters::next`] on.
pub const FASTPATH_FILTERS_AT_ONCE: usize = 4096;

/// Largest number of counters in one answer.
pub const FASTPATH_COUNTERS_AT_ONCE: u32 = 16_384;

/// Selects filters of a fast path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct FastpathFiltersQuery {
    /// Lowest filter number; 0 if absent.
    #[serde(default)]
    pub first: u32,
}

/// Selects counters of a fast path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct FastpathCountersQuery {
    /// Number of the first counter; 0 if absent.
    #[serde(default)]
    pub first: u32,
    /// Number of counters, at most 16,384. Absent: all, up to 16,384.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub count: Option<u32>,
}

/// A filter of a fast path.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct FastpathFilter {
    /// Number of the filter, below the router's `filters`. It replaces a filter with the same
    /// number.
    pub id: u32,
    /// If several filters match a packet, the highest priority wins; among equals, the oldest.
    pub priority: u32,
    /// Packets to match: `ip src 10.0.0.0/8 proto udp dport 53 in eth0`; see docs/slowpath.md.
    pub r#match: String,
    /// Verdict on matching packets.
    pub verdict: FilterVerdict,
    /// For `send`: the egress interface.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub out: Option<String>,
    /// For `send` with the code `ip`: the destination MAC address, `02:00:00:00:00:01`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<String>,
    /// Queue of the egress port, counted from 1. Absent: the port chooses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queue: Option<u16>,
    /// Number of the counter for matching packets.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub counter: Option<u32>,
    /// Egress interfaces of copies, at most 8.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub copies: Vec<String>,
    /// For `send` with the code `fields`: up to 16 bytes for the packet's header, in hexadecimal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data: Option<String>,
}

/// The filters of a fast path.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct FastpathFilters {
    /// Code that forwards packets: `ip` or `fields`.
    pub code: String,
    /// Largest number of filters.
    pub filters_max: u32,
    /// Number of counters.
    pub counters: u32,
    /// Filters ordered by number; at most 4,096.
    pub filters: Vec<FastpathFilter>,
    /// Number from which on there are more filters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<u32>,
}

/// Atomic change of a fast path's filters: all parts come into force together, or none does.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct FastpathChange {
    /// Filters to add or replace, at most 131,072.
    #[serde(default, deserialize_with = "filters")]
    pub set: Vec<FastpathFilter>,
    /// Numbers of filters to remove.
    #[serde(default)]
    pub remove: Vec<u32>,
    /// New settings of queues, at most 4,096. They come into force together with the filters.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub queues: Vec<FastpathQueueSetting>,
    /// Remove all other filters, and reset all other queues to the spec's settings.
    #[serde(default)]
    pub sweep: bool,
}

/// Settings of a fast path's queue, within the limits of the spec.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct FastpathQueueSetting {
    /// Egress interface.
    pub port: String,
    /// Number of the interface's queue, counted from 1.
    pub queue: u16,
    /// Weight relative to other queues that have frames. Absent: as in the spec.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight: Option<u32>,
    /// Largest number of waiting frames. Absent: as in the spec.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub frames: Option<u32>,
    /// Largest number of waiting bytes. Absent: as in the spec.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u32>,
}

/// Selects queues of a fast path.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct FastpathQueuesQuery {
    /// Only queues of this interface. Absent: of all interfaces.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port: Option<String>,
}

/// The queues of a fast path.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct FastpathQueues {
    /// Queues, interface by interface, each interface's in order.
    pub queues: Vec<FastpathQueue>,
}

/// Settings and counters of a fast path's queue.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct FastpathQueue {
    /// Egress interface.
    pub port: String,
    /// Number of the interface's queue, counted from 1.
    pub queue: u16,
    /// Name of the queue in the spec.
    pub name: String,
    /// Weight relative to other queues that have frames.
    pub weight: u32,
    /// Largest number of waiting frames.
    pub frames: u32,
    /// Largest number of waiting bytes. Absent: as many as the frames have.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u32>,
    /// Packet buffers of the mux reserved for the queue.
    pub buffers: u32,
    /// Frames waiting now.
    pub waiting: u32,
    /// Their bytes.
    pub waiting_bytes: u32,
    /// Frames sent from the queue.
    pub sent: u64,
    /// Their bytes.
    pub sent_bytes: u64,
    /// Frames dropped because the queue was full.
    pub dropped: u64,
}

/// Reads a list of filters. Fails beyond [`FASTPATH_FILTERS_MAX`].
fn filters<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<FastpathFilter>, D::Error> {
    struct Bounded;
    impl<'de> Visitor<'de> for Bounded {
        type Value = Vec<FastpathFilter>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(f, "up to {FASTPATH_FILTERS_MAX} filters")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
            let mut all = Vec::new();
            while let Some(filter) = seq.next_element()? {
                if all.len() == FASTPATH_FILTERS_MAX {
                    return Err(serde::de::Error::invalid_length(all.len() + 1, &self));
                }
                all.push(filter);
            }
            Ok(all)
        }
    }
    from.deserialize_seq(Bounded)
}

/// Result of a change of filters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct FastpathChanged {
    /// Number of filters in force.
    pub filters: u32,
}

/// Counters of a fast path, all read at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct FastpathCounters {
    /// Number of the first counter.
    pub first: u32,
    /// Counters in order of their numbers.
    pub counters: Vec<FilterCounter>,
    /// Number of counters that the router has.
    pub total: u32,
}

/// A frame for a fast path to send.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct FastpathFrame {
    /// Name of the interface.
    pub port: String,
    /// Direction: out of the interface, or as if received from it.
    // The alias reads the field's old name. It goes with the next version.
    #[serde(alias = "way")]
    pub direction: FastpathDirection,
    /// For `out`: the queue, counted from 1. Absent: the port chooses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queue: Option<u16>,
    /// Bytes from the Ethernet header on, without checksum, in hexadecimal; 14 to 2,048 bytes.
    pub frame: String,
}

/// Direction of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub enum FastpathDirection {
    /// As if received from the interface: filters and routes decide.
    In,
    /// Out of the interface.
    Out,
}
