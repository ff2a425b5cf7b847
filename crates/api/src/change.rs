use std::collections::BTreeMap;

use pdp_spec::SourceFile;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

/// Files to apply. What they describe is created or changed; what they do not name stays.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ApplyRequest {
    /// The files with what they name, read by the client; at most [`FILES_MAX`](crate::FILES_MAX).
    pub files: Vec<SourceFile>,
    /// Only say what would change.
    #[serde(default)]
    pub dry_run: bool,
    /// Only these nodes of the files' vnets, with their links as far as the other ends are there; all else of these
    /// vnets stays as it is, and other objects of the files are left alone. Empty: all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub only: Vec<String>,
}

/// What of a vnet to delete.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct DeleteQuery {
    /// Only these nodes, with commas between; their links go with them. Absent: all of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub only: Option<String>,
}

/// How far to take a node down.
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
    /// Whether it carries frames; carrier follows at both ends.
    pub up: bool,
    /// Of one that is down: both ends keep their carrier, as when something in between fails. Frames are
    /// dropped all the same.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub silent: bool,
}

/// What is to be otherwise in how frames leave by a link's ends, as an applied spec with that would have it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct LinkChange {
    /// By keys of a link in the spec (`rate`, `delay`, `loss`, …), each as it is written there; `null`: as where it is
    /// not given.
    pub set: BTreeMap<String, Option<String>>,
    /// At this end alone, `r1:eth0` or `external:NAME`; absent: at all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at: Option<String>,
    /// Permits a change that restarts routers of kind `kernel`, since their link moves between the kernel and the mux.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub restart: bool,
}

/// How many forwarding guests a router is to have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ScaleRequest {
    /// Forwarding guests, 1 to 64: `dataPlane.guests` of the spec.
    pub guests: u32,
    /// Power of all of them together, thousandths of a core: `dataPlane.power`. Absent: each has what
    /// each has now, so that the sum changes; those that borrow go on to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub power_millicores: Option<u32>,
}

/// What of a vnet is to be ended and started anew.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct RestartRequest {
    /// Of these nodes, at least one.
    pub nodes: Vec<String>,
    /// The forwarding guest of this number, of each of them. Absent: the control guest or the host; forwarding guests
    /// stay.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guest: Option<u32>,
}

/// One line of the answer to a change: any number of `progress`, then one `result` or `problem`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub enum Event {
    /// What is being done.
    Progress(Progress),
    /// Done.
    Result(Report),
    /// Failed; what was done before stays stored and is tried again.
    Problem(crate::Problem),
}

/// What is being done.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Progress {
    /// Steps done.
    pub done: u64,
    /// Steps in all, as known now.
    pub total: u64,
    /// The step at hand, e.g. `starting red/r1`.
    pub what: String,
}

/// What a change did (or would do), object by object, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Report {
    /// The objects that the request named or touched.
    pub changes: Vec<Change>,
    /// Nothing was done: a dry run.
    #[serde(default)]
    pub dry_run: bool,
    /// The daemon exits now (answer to [`DownRequest::exit`]).
    #[serde(default)]
    pub exits: bool,
}

impl Report {
    /// Whether anything changed.
    pub fn changed(&self) -> bool {
        self.changes.iter().any(|change| change.action != Action::Unchanged)
    }
}

/// What became of one object.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Change {
    /// The object: `substrate/NAME`, `vnet/red`, `vnet/red/node/r1`, `vnet/red/link/NAME`.
    pub object: String,
    /// What was done.
    pub action: Action,
    /// Why or what exactly, for people; may be empty.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub detail: String,
}

/// What was done with an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub enum Action {
    /// It is new.
    Create,
    /// Changed while it runs.
    Change,
    /// Changed by a new start.
    Restart,
    /// It is gone.
    Delete,
    /// It was stored and stopped, and runs now.
    Start,
    /// It is stopped; its spec stays stored.
    Stop,
    /// It was so already.
    Unchanged,
}

impl Action {
    /// The word in JSON and in tables.
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
