use std::fmt;

use serde::de::{SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use utoipa::{IntoParams, ToSchema};

/// Filters of one request.
pub const FASTPATH_FILTERS_MAX: usize = 131_072;

/// Filters of one answer; more are asked for from [`FastpathFilters::next`] on.
pub const FASTPATH_FILTERS_AT_ONCE: usize = 4096;

/// Counters of one answer.
pub const FASTPATH_COUNTERS_AT_ONCE: u32 = 16_384;

/// Which filters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct FastpathFiltersQuery {
    /// From this number on; 0 if absent.
    #[serde(default)]
    pub first: u32,
}

/// Which counters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct FastpathCountersQuery {
    /// The first; 0 if absent.
    #[serde(default)]
    pub first: u32,
    /// How many, 16,384 at most; if absent: as many as there are, or as one answer has room for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub count: Option<u32>,
}

/// A filter of a fast path.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct FastpathFilter {
    /// Its number, below the router's `filters`; one with the same number is replaced.
    pub id: u32,
    /// Of those that a packet meets the one with the highest counts, and of equal ones the oldest.
    pub priority: u32,
    /// Which packets: `ip src 10.0.0.0/8 proto udp dport 53 in eth0`; see docs/slowpath.md.
    pub r#match: String,
    /// What becomes of them.
    pub verdict: FastpathVerdict,
    /// Of `send`: the interface that they leave by.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub out: Option<String>,
    /// Of `send`, where the code is `ip`: the link address that they go to, `02:00:00:00:00:01`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<String>,
    /// In which queue of the port that they leave by they wait, counted from 1; absent: the port chooses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queue: Option<u16>,
    /// The counter that counts them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub counter: Option<u32>,
    /// Interfaces that copies leave by, 8 at most.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub copies: Vec<String>,
    /// Of `send`, where the code is `fields`: up to 16 bytes for the packet's header, in hexadecimal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data: Option<String>,
}

/// What becomes of a packet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub enum FastpathVerdict {
    /// It is dropped.
    Drop,
    /// What would without the filter.
    #[default]
    Pass,
    /// It leaves by an interface.
    Send,
    /// It goes to the control guest.
    Punt,
}

impl FastpathVerdict {
    /// As it is written.
    pub fn name(self) -> &'static str {
        match self {
            Self::Drop => "drop",
            Self::Pass => "pass",
            Self::Send => "send",
            Self::Punt => "punt",
        }
    }
}

/// The filters of a fast path.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct FastpathFilters {
    /// What forwards: `ip` or `fields`.
    pub code: String,
    /// Filters that there may be.
    pub filters_max: u32,
    /// Counters.
    pub counters: u32,
    /// By their numbers; 4,096 at most.
    pub filters: Vec<FastpathFilter>,
    /// There are more from this number on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<u32>,
}

/// Changes of the filters of a fast path that come into force together, or not at all.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct FastpathChange {
    /// These there are to be, 131,072 at most.
    #[serde(default, deserialize_with = "filters")]
    pub set: Vec<FastpathFilter>,
    /// Filters with these numbers there are not to be.
    #[serde(default)]
    pub remove: Vec<u32>,
    /// How queues are to be, in force together with that; 4,096 at most.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub queues: Vec<FastpathQueueSetting>,
    /// All other filters go, and all other queues are as the spec says.
    #[serde(default)]
    pub sweep: bool,
}

/// How a queue of a fast path's is to be, within what the spec says of it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct FastpathQueueSetting {
    /// The interface that frames leave by.
    pub port: String,
    /// Which of its queues, counted from 1.
    pub queue: u16,
    /// Its part beside other queues that have frames; absent: as the spec says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight: Option<u32>,
    /// Frames that may wait in it; absent: as the spec says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub frames: Option<u32>,
    /// Bytes that may; absent: as the spec says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u32>,
}

/// Which queues.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct FastpathQueuesQuery {
    /// Those of this interface; of all if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port: Option<String>,
}

/// How queues of a fast path are.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct FastpathQueues {
    /// Of one interface after the other, in their order.
    pub queues: Vec<FastpathQueue>,
}

/// How a queue of a fast path is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct FastpathQueue {
    /// The interface that frames leave by.
    pub port: String,
    /// Which of its queues, counted from 1.
    pub queue: u16,
    /// Its name in the spec.
    pub name: String,
    /// Its part beside other queues that have frames.
    pub weight: u32,
    /// Frames that may wait in it.
    pub frames: u32,
    /// Bytes that may; absent: as many as these frames have.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u32>,
    /// Packets that are set aside for it.
    pub buffers: u32,
    /// Frames that wait.
    pub waiting: u32,
    /// Their bytes.
    pub waiting_bytes: u32,
    /// Frames that it let go.
    pub sent: u64,
    /// Their bytes.
    pub sent_bytes: u64,
    /// Frames that were dropped because it was full.
    pub dropped: u64,
}

/// No more than [`FASTPATH_FILTERS_MAX`], however many come.
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

/// What a change of filters came to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct FastpathChanged {
    /// Filters in force.
    pub filters: u32,
}

/// What counters of a fast path have, all at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct FastpathCounters {
    /// The first one's number.
    pub first: u32,
    /// In order.
    pub counters: Vec<FastpathCounter>,
    /// Counters that the router has.
    pub total: u32,
}

/// What a counter of a fast path has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct FastpathCounter {
    /// Packets that met filters which count there.
    pub packets: u64,
    /// Bytes of their frames.
    pub bytes: u64,
    /// Those of them that left, after the queue that they waited in; copies do not count.
    pub sent: u64,
    /// Bytes of their frames, as they left.
    pub sent_bytes: u64,
}

/// A frame that a fast path is to send.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct FastpathFrame {
    /// The interface.
    pub port: String,
    /// Out of it, or as if it had come by it.
    pub way: FastpathWay,
    /// Of `out`: the queue that it waits in, counted from 1; absent: the port chooses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queue: Option<u16>,
    /// From Ethernet's header on, without checksum, in hexadecimal; 14 to 2,048 bytes.
    pub frame: String,
}

/// Where a frame goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub enum FastpathWay {
    /// As if it had come by the interface: filters and routes decide.
    In,
    /// Out of the interface.
    Out,
}
