//! Commands of a node, as its process 1 reports them.

use serde::{Deserialize, Serialize};
#[cfg(feature = "schema")]
use utoipa::ToSchema;

/// State of a node's command.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(ToSchema))]
#[serde(rename_all = "camelCase")]
pub enum CommandState {
    /// Not started: a command that it waits for is not ready, or its node does not run.
    #[default]
    Waiting,
    /// Runs, and its `ready` check has not succeeded yet.
    Starting,
    /// Runs, and its `ready` check has succeeded.
    Ready,
    /// Runs, and has no `ready` check.
    Running,
    /// Ended, and will be restarted after a pause.
    Restarting,
    /// Ended with code 0, or with any code if it may fail. It will not be restarted.
    Done,
    /// Ended otherwise or could not be started. It will not be restarted.
    Failed,
}

impl CommandState {
    /// Word in JSON and in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Starting => "starting",
            Self::Ready => "ready",
            Self::Running => "running",
            Self::Restarting => "restarting",
            Self::Done => "done",
            Self::Failed => "failed",
        }
    }
}
