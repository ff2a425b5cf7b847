use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// One thing that the machine has or lacks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Check {
    /// What was looked at, e.g. `AF_XDP`.
    pub name: String,
    /// Whether it is there.
    pub state: CheckState,
    /// What was found.
    pub detail: String,
    /// What to do about it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
}

/// Whether something is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub enum CheckState {
    /// There.
    Ok,
    /// There is less than PdP can use; it works without.
    Warn,
    /// Not there; what needs it does not work.
    Missing,
}

/// What answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Version {
    /// Version of PdP.
    pub version: String,
    /// Process of the daemon.
    pub pid: u32,
    /// Run by a service manager, which starts it again when it exits.
    pub managed: bool,
    /// Where it listens with TLS, if it does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub listens: Option<Listens>,
}

/// Where a daemon listens with TLS.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Listens {
    /// Address and port.
    pub address: String,
    /// SHA-256 of its certificate, hexadecimal.
    pub certificate_sha256: String,
}
