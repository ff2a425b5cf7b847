pub use pdp_model::{
    EngineStats, ExternalStats, GuestStats, NodeStats, PortStats, QueueStats, RouteGuestStats,
    RouteStats, SlowPathStats, StageStats, Stats, TapStats, VnetStats, WorkerStats,
};
use serde::{Deserialize, Serialize};
use utoipa::IntoParams;

/// Selects counters.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct StatsQuery {
    /// Only counters of this vnet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vnet: Option<String>,
}
