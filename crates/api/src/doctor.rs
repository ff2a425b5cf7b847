use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// One ability of the machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct MachineCheck {
    /// Name of the ability, e.g. `AF_XDP`.
    pub name: String,
    /// Result of the check.
    pub state: MachineCheckState,
    /// Details of the result.
    pub detail: String,
    /// Advice on what to do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
}

/// Result of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub enum MachineCheckState {
    /// Available.
    Ok,
    /// PdP works, but could use more than is available.
    Warn,
    /// Missing. Features that need it do not work.
    Missing,
}

/// Version of the daemon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct DaemonVersion {
    /// Version of PdP.
    pub version: String,
    /// Process id of the daemon.
    pub pid: u32,
    /// True if a service manager runs the daemon and restarts it when it exits.
    pub managed: bool,
    /// Address for TLS, if the daemon has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub listens: Option<Listens>,
}

/// Address at which a daemon listens with TLS.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Listens {
    /// Address and port.
    pub address: String,
    /// SHA-256 of its certificate, hexadecimal.
    pub certificate_sha256: String,
}
