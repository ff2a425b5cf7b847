//! Files that PdP creates in nodes, as written in specs.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A file.
///
/// Set exactly one of `content` and `from`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct File {
    /// Text of the file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub content: Option<String>,
    /// Path of a text file, relative to the spec file and below its directory, unless `pdp` has
    /// `--allow-files-outside`. `apply` stores it as `content`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
    /// Octal permissions, in quotes.
    #[serde(default = "file_mode")]
    #[schemars(length(min = 3, max = 4), regex(pattern = "^[0-7]{3,4}$"))]
    pub mode: String,
    /// `USER` or `USER:GROUP` of the node, by name or number. Default group: the user's.
    #[serde(default = "file_owner")]
    pub owner: String,
}

fn file_mode() -> String {
    "0644".into()
}

fn file_owner() -> String {
    "root:root".into()
}
