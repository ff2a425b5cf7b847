//! Rate limits of frames, as written in specs.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::limits::RATE_PPS_MAX;
use crate::units::BitRate;

/// A rate limit: `rate`, `pps` or both.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct FrameLimit {
    /// Bits per second. Default: unlimited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate: Option<BitRate>,
    /// Frames per second. Default: unlimited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = RATE_PPS_MAX))]
    pub pps: Option<u64>,
}
