use std::collections::BTreeMap;

use pdp_spec::SourceFile;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

/// Files to apply. Objects that they describe are created or changed; all other objects stay.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ApplyRequest {
    /// Files with the files that they name, read by the client; at most
    /// [`FILES_MAX`](crate::FILES_MAX).
    pub files: Vec<SourceFile>,
    /// Only report what would change.
    #[serde(default)]
    pub dry_run: bool,
    /// Only these nodes of the files' vnets, and those of their links whose other ends exist. The
    /// rest of these vnets and all other objects of the files stay unchanged. Empty: everything.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub only: Vec<String>,
}

/// Part of a vnet to delete.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct DeleteQuery {
    /// Only these nodes, separated by commas, with their links. Absent: the whole vnet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub only: Option<String>,
}

/// Extent of taking a node down.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct DownRequest {
    /// Forget the stored specs too.
    #[serde(default)]
    pub purge: bool,
    /// Let the daemon exit afterwards, unless a service manager runs it.
    #[serde(default)]
    pub exit: bool,
}

/// A link's administrative state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct LinkRequest {
    /// True if the link forwards frames. Carrier follows at both ends.
    pub up: bool,
    /// With `up: false`: both ends keep their carrier, as if a device in between failed. Frames are
    /// dropped all the same.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub silent: bool,
}

/// Change of how a link's ends send frames. It works like applying a spec with these values.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct LinkChange {
    /// Values by key of a link in the spec (`rate`, `delay`, `loss`, …), each written as in the
    /// spec. `null` restores the value used if the key is absent.
    pub set: BTreeMap<String, Option<String>>,
    /// Only this end, `r1:eth0` or `external:NAME`. Absent: all ends.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at: Option<String>,
    /// Permits a change that restarts routers of kind `kernel`. They restart because their link
    /// moves between the kernel and the mux.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub restart: bool,
}

/// Number of forwarding guests of a router.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ScaleRequest {
    /// Forwarding guests, 1 to 64: `dataPlane.guests` of the spec.
    pub guests: u32,
    /// Total power of all guests, thousandths of a core: `dataPlane.power`. Absent: each guest
    /// keeps its current power, so that the total changes. Guests that borrow power continue to
    /// borrow.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub power_millicores: Option<u32>,
}

/// Part of a vnet to restart.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct RestartRequest {
    /// Nodes to restart, at least one.
    pub nodes: Vec<String>,
    /// Number of the forwarding guest to restart in each node. Absent: the control guest or the
    /// host restarts; forwarding guests continue.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guest: Option<u32>,
}

/// One line of the answer to a change: any number of `progress`, then one `result` or `problem`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub enum ChangeEvent {
    /// The current step.
    Progress(Progress),
    /// The change is done.
    Result(ChangeReport),
    /// The change failed. Earlier steps stay stored, and the daemon tries them again.
    Problem(crate::Problem),
}

/// Progress of a change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Progress {
    /// Steps done.
    pub done: u64,
    /// Total number of steps, as known now.
    pub total: u64,
    /// The current step, e.g. `starting red/r1`.
    pub what: String,
}

/// Report of a change that was or would be made: the objects, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ChangeReport {
    /// Objects that the request named or touched.
    pub changes: Vec<ObjectChange>,
    /// True for a dry run: nothing was done.
    #[serde(default)]
    pub dry_run: bool,
    /// True if the daemon exits now (answer to [`DownRequest::exit`]).
    #[serde(default)]
    pub exits: bool,
}

impl ChangeReport {
    /// True if anything changed.
    pub fn changed(&self) -> bool {
        self.changes.iter().any(|change| change.action != ChangeAction::Unchanged)
    }
}

/// Change of one object.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ObjectChange {
    /// Name of the object: `substrate/NAME`, `vnet/red`, `vnet/red/node/r1`, `vnet/red/link/NAME`.
    pub object: String,
    /// Kind of change.
    pub action: ChangeAction,
    /// Reason or details, for people; may be empty.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub detail: String,
}

/// Kind of an object's change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub enum ChangeAction {
    /// Created.
    Create,
    /// Changed without a restart.
    Change,
    /// Changed by a restart.
    Restart,
    /// Deleted.
    Delete,
    /// Started; it was stored and stopped before.
    Start,
    /// Stopped; its spec stays stored.
    Stop,
    /// Already as requested.
    Unchanged,
}

impl ChangeAction {
    /// Word in JSON and in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Create => "create",
            Self::Change => "change",
            Self::Restart => "restart",
            Self::Delete => "delete",
            Self::Start => "start",
            Self::Stop => "stop",
            Self::Unchanged => "unchanged",
        }
    }
}
