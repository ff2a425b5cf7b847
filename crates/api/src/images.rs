use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

/// An image that the daemon keeps, of a registry or an archive.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ImageInfo {
    /// Whose it is; absent: the operators'.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tenant: Option<String>,
    /// What it was asked for by, whole: `docker.io/library/frr:latest`, `archive:/srv/frr.tar`. None for one that its
    /// names no longer stand for.
    pub names: Vec<String>,
    /// Digest of its manifest; empty where there is a `problem`.
    pub digest: String,
    /// Bytes as it came.
    pub packed_bytes: u64,
    /// Bytes of its files.
    pub unpacked_bytes: u64,
    /// When it came, milliseconds since 1970.
    pub at_ms: u64,
    /// Nodes that run on it: `VNET/NODE`.
    pub used_by: Vec<String>,
    /// Why the images of its owner can't be read, and what to do: this is no image then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

/// An image to be pulled.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PullRequest {
    /// Its name, as docker writes it.
    pub image: String,
    /// For this tenant; absent: for who asks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tenant: Option<String>,
}

/// Whose images.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct ImageQuery {
    /// This tenant's; absent: of who asks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tenant: Option<String>,
}
