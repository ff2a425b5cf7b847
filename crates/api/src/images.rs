use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

/// An image of a registry or an archive that the daemon keeps.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ImageInfo {
    /// Owner of the image. Absent: the operators.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tenant: Option<String>,
    /// Full names by which it was requested: `docker.io/library/frr:latest`,
    /// `archive:/srv/frr.tar`. Empty if its names now refer to other images.
    pub names: Vec<String>,
    /// Digest of its manifest; empty where there is a `problem`.
    pub digest: String,
    /// Bytes of the image as received, packed.
    pub packed_bytes: u64,
    /// Bytes of the image's files.
    pub unpacked_bytes: u64,
    /// Time of arrival, milliseconds since 1970.
    pub at_ms: u64,
    /// Nodes that run on it: `VNET/NODE`.
    pub used_by: Vec<String>,
    /// Why the owner's images can't be read, and what to do. With it, the entry is not an image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

/// Request to pull an image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PullRequest {
    /// Name of the image, in docker's notation.
    pub image: String,
    /// Tenant to keep it for. Absent: the client's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tenant: Option<String>,
}

/// Selects an owner's images.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct ImageQuery {
    /// Tenant that owns the images. Absent: the client's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tenant: Option<String>,
}
