use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::{IntoParams, ToSchema};

use crate::{Change, specs};

/// Rows of the audit log that one answer has unless it is told otherwise.
pub const AUDIT_LIMIT_DEFAULT: u32 = 1000;

/// Rows of the audit log that one answer has at most.
pub const AUDIT_LIMIT_MAX: u32 = 10_000;

/// Changed objects that a row of the audit log names at most. It counts the rest.
pub const AUDIT_OBJECTS_MAX: usize = 10;

/// Longest life of a token, seconds: ten years.
pub const TOKEN_SECONDS_MAX: u64 = 10 * 366 * 24 * 3600;

/// What somebody may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub enum Role {
    /// Everything.
    Operator,
    /// Everything with a tenant's own virtual networks.
    Tenant,
    /// Looks, at the whole node or at one tenant's virtual networks, and changes nothing.
    Viewer,
}

impl Role {
    /// All of them.
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

/// A token to be made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct TokenRequest {
    /// What who has it may do.
    pub role: Role,
    /// With which tenant's virtual networks: with the role `tenant` always, with `operator` never;
    /// a viewer without one sees the whole node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tenant: Option<String>,
    /// Seconds from now on, 1 to [`TOKEN_SECONDS_MAX`]. Absent: until it is revoked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_seconds: Option<u64>,
}

/// A token, without what makes it one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Token {
    /// Its number; never given again.
    pub id: u64,
    /// What who has it may do.
    pub role: Role,
    /// With which tenant's virtual networks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tenant: Option<String>,
    /// When it was made, milliseconds since 1970.
    pub created_ms: u64,
    /// When it ends, milliseconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_ms: Option<u64>,
}

/// A token that was made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct NewToken {
    /// The token itself, for `Authorization: Bearer`; it is told this once and stored nowhere.
    pub secret: String,
    /// What is known of it.
    pub token: Token,
}

/// A tenant.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct TenantInfo {
    /// Its name.
    pub name: String,
    /// The stored document, `kind: Tenant`; see `schema/pdp-v1.json`.
    #[schema(schema_with = specs::tenant)]
    pub spec: Value,
    /// Its virtual networks, by name.
    pub vnets: Vec<String>,
    /// Bytes of the images that the daemon keeps for it, which its quota `images` bounds.
    #[serde(default)]
    pub image_bytes: u64,
}

/// Which requests of the audit log.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct AuditQuery {
    /// Only those from then on, milliseconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since_ms: Option<u64>,
    /// Only those of `user:NAME` or `token:ID`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub who: Option<String>,
    /// Only requests that name this vnet in their path or changed it. A request that changed more objects than its row
    /// names is listed as well.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vnet: Option<String>,
    /// Only changes and refusals, no requests that read something.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub changes: bool,
    /// The newest so many, at most [`AUDIT_LIMIT_MAX`]. Absent: [`AUDIT_LIMIT_DEFAULT`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<u32>,
}

impl AuditQuery {
    /// The newest so many.
    pub fn limit(&self) -> u32 {
        self.limit.unwrap_or(AUDIT_LIMIT_DEFAULT).min(AUDIT_LIMIT_MAX)
    }
}

/// A request, as the audit log has it: no secrets, and of bodies the commands of `exec` and the names of changed objects
/// alone.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct AuditEntry {
    /// Its number, ascending.
    pub id: u64,
    /// When it came, milliseconds since 1970.
    pub at_ms: u64,
    /// Whose it was: `user:NAME` (or the number of one without a name), `token:ID`, `token:?` for a
    /// token that is none, `-` for none.
    pub who: String,
    /// Where it came from: `pid 4711`, or an address and port.
    pub from: String,
    /// What who asked may do; absent for somebody unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub role: Option<Role>,
    /// Of which tenant who asked is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tenant: Option<String>,
    /// Method and path.
    pub what: String,
    /// The vnet that the path names.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vnet: Option<String>,
    /// It was let through to change something: written down before that.
    pub changes: bool,
    /// HTTP status; absent while it is not finished, and for ever if the daemon was killed then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<u16>,
    /// Why it failed, one line.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Microseconds until its end: until the answer began, a change was made, or a command had ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub duration_us: Option<u64>,
    /// The command that it ran in a guest, its words as a shell reads them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
    /// Its exit code; absent of one that was broken off, which `error` says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit: Option<i32>,
    /// Objects that it changed in what is stored, by name; at most [`AUDIT_OBJECTS_MAX`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub objects: Vec<Change>,
    /// Number of changed objects beyond those.
    #[serde(default)]
    pub more_objects: u64,
}
