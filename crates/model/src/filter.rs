//! Filters of a fast path.

use serde::{Deserialize, Serialize};
#[cfg(feature = "schema")]
use utoipa::ToSchema;

/// Verdict of a filter on a packet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(ToSchema), schema(as = FastpathVerdict))]
#[serde(rename_all = "camelCase")]
pub enum FilterVerdict {
    /// Drop the packet.
    Drop,
    /// Treat the packet as if the filter did not exist.
    #[default]
    Pass,
    /// Send the packet out of an interface.
    Send,
    /// Send the packet to the control guest.
    Punt,
}

impl FilterVerdict {
    /// All verdicts, in the order of their numbers on the slow path.
    pub const ALL: [Self; 4] = [Self::Drop, Self::Pass, Self::Send, Self::Punt];

    /// Word in JSON and in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Drop => "drop",
            Self::Pass => "pass",
            Self::Send => "send",
            Self::Punt => "punt",
        }
    }
}

/// Values of one counter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(ToSchema), schema(as = FastpathCounter))]
#[serde(rename_all = "camelCase")]
pub struct FilterCounter {
    /// Packets matched by the filters that use the counter.
    pub packets: u64,
    /// Bytes of their frames.
    pub bytes: u64,
    /// Matched packets that were sent, counted after their queue. Copies do not count.
    pub sent: u64,
    /// Bytes of the frames that were sent, as sent.
    pub sent_bytes: u64,
}
