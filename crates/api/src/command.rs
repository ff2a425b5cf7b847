use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// How a command of a node is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub enum CommandState {
    /// Not started: what it comes after is not ready, or its node does not run.
    #[default]
    Waiting,
    /// Runs, and its `ready` has not held yet.
    Starting,
    /// Runs, and its `ready` has held.
    Ready,
    /// Runs, and has no `ready`.
    Running,
    /// Ended, and is started again after a pause.
    Restarting,
    /// Ended with code 0, or with any code if it may fail, and is not started again.
    Done,
    /// Ended otherwise or could not be started, and is not started again.
    Failed,
}

impl CommandState {
    /// The word in JSON and in tables.
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

/// How a command of a node's `commands` or `exec` is, as the node says itself.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct CommandStatus {
    /// Its name; `exec-1` and so on for those of `exec`.
    pub name: String,
    /// How it is.
    pub state: CommandState,
    /// True if commands after it may start: it is ready, or started if it has no `ready`; with `once`, it is `done`.
    pub ready: bool,
    /// It failed, keeps ending, or is not ready within its time: its node is degraded for it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub troubled: bool,
    /// Times it was started again.
    pub restarts: u32,
    /// What it returned when it ended last: 128 and the signal, if one ended it; 127 if it could not be started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit: Option<u8>,
    /// What it waits for, or how it ended, with the last line that it wrote: at most 160 bytes of the node's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}
