use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::{IntoParams, ToSchema};

use crate::{ObjectChange, specs};

/// Default number of audit entries in one answer.
pub const AUDIT_LIMIT_DEFAULT: u32 = 1000;

/// Largest number of audit entries in one answer.
pub const AUDIT_LIMIT_MAX: u32 = 10_000;

/// Largest number of changed objects that one audit entry names. The entry counts the rest.
pub const AUDIT_OBJECTS_MAX: usize = 10;

/// Longest life of a token, seconds: ten years.
pub const TOKEN_SECONDS_MAX: u64 = 10 * 366 * 24 * 3600;

/// Rights of a user or token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub enum Role {
    /// Read and change everything.
    Operator,
    /// Read and change a tenant's own virtual networks.
    Tenant,
    /// Read the whole node or one tenant's virtual networks, and change nothing.
    Viewer,
}

impl Role {
    /// All roles.
    pub const ALL: [Self; 3] = [Self::Operator, Self::Tenant, Self::Viewer];

    /// The word in JSON and in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Operator => "operator",
            Self::Tenant => "tenant",
            Self::Viewer => "viewer",
        }
    }
}

/// Request for a new token.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct TokenRequest {
    /// Rights of the token's holder.
    pub role: Role,
    /// Tenant whose virtual networks the token grants. Required with the role `tenant`, not
    /// permitted with `operator`. A viewer without a tenant sees the whole node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tenant: Option<String>,
    /// Lifetime, seconds, 1 to [`TOKEN_SECONDS_MAX`]. Absent: until it is revoked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_seconds: Option<u64>,
}

/// A token without its secret.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Token {
    /// Number of the token. Numbers are never reused.
    pub id: u64,
    /// Rights of the token's holder.
    pub role: Role,
    /// Tenant whose virtual networks the token grants.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tenant: Option<String>,
    /// Time of creation, milliseconds since 1970.
    pub created_ms: u64,
    /// Time of expiry, milliseconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_ms: Option<u64>,
}

/// A token just created.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct NewToken {
    /// The token itself, for `Authorization: Bearer`. This is its only appearance: it is stored
    /// nowhere.
    pub secret: String,
    /// The token without its secret.
    pub token: Token,
}

/// A tenant.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct TenantInfo {
    /// Name of the tenant.
    pub name: String,
    /// The stored document, `kind: Tenant`; see `schema/pdp-v1.json`.
    #[schema(schema_with = specs::tenant)]
    pub spec: Value,
    /// Names of its virtual networks.
    pub vnets: Vec<String>,
    /// Bytes of the images that the daemon keeps for the tenant. Its quota `images` limits them.
    #[serde(default)]
    pub image_bytes: u64,
}

/// Selects entries of the audit log.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct AuditQuery {
    /// Only entries from this time on, milliseconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since_ms: Option<u64>,
    /// Only requests of `user:NAME` or `token:ID`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub who: Option<String>,
    /// Only requests that name this vnet in their path or changed it. Also lists each request that
    /// changed more objects than its entry names.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vnet: Option<String>,
    /// Only changes and refusals, no requests that read something.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub changes: bool,
    /// Number of entries, newest first; at most [`AUDIT_LIMIT_MAX`]. Absent:
    /// [`AUDIT_LIMIT_DEFAULT`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<u32>,
}

impl AuditQuery {
    /// Returns the number of entries to list.
    pub fn limit(&self) -> u32 {
        self.limit.unwrap_or(AUDIT_LIMIT_DEFAULT).min(AUDIT_LIMIT_MAX)
    }
}

/// A request in the audit log. The entry has no secrets. Of request bodies it has only the command
/// of `exec` and the names of changed objects.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct AuditEntry {
    /// Number of the entry, ascending.
    pub id: u64,
    /// Time of arrival, milliseconds since 1970.
    pub at_ms: u64,
    /// Identity of the client: `user:NAME` (the user id if it has no name), `token:ID`, `token:?`
    /// for an invalid token, `-` for no token.
    pub who: String,
    /// Origin of the request: `pid 4711`, or an address and port.
    pub from: String,
    /// Rights of the client; absent for an unknown client.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub role: Option<Role>,
    /// Tenant of the client.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tenant: Option<String>,
    /// Method and path.
    pub what: String,
    /// Vnet named in the path.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vnet: Option<String>,
    /// True if the request was permitted to change something. The entry was written before the
    /// change.
    pub changes: bool,
    /// HTTP status. Absent until the request is finished, and forever if the daemon was killed
    /// before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<u16>,
    /// Cause of the failure, one line.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Duration, microseconds: until the answer began, the change was made, or the command ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub duration_us: Option<u64>,
    /// Command run in a guest, with its words quoted for a shell.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
    /// Exit code of the command. Absent if it was aborted; `error` tells why.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit: Option<i32>,
    /// Stored objects that the request changed, by name; at most [`AUDIT_OBJECTS_MAX`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub objects: Vec<ObjectChange>,
    /// Number of changed objects that are not in `objects`.
    #[serde(default)]
    pub more_objects: u64,
}
