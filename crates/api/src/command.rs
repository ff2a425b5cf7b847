pub use pdp_model::CommandState;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Status of a command of a node's `commands` or `exec`, as reported by the node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct CommandStatus {
    /// Name of the command; `exec-1` and so on for those of `exec`.
    pub name: String,
    /// State of the command.
    pub state: CommandState,
    /// True if later commands may start. The command is ready, or started if it has no `ready`
    /// check; with `once`, it is `done`.
    pub ready: bool,
    /// True if the command failed, keeps ending, or is not ready in time. This makes its node
    /// degraded.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub troubled: bool,
    /// Number of restarts.
    pub restarts: u32,
    /// Last exit code: 128 plus the signal if a signal ended it, 127 if it could not be started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit: Option<u8>,
    /// Reason to wait, or the end of the command with the last line of its output. At most 160
    /// bytes come from the node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}
