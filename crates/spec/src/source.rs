//! Spec files as text.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// A spec file and the files that it names.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct SourceFile {
    /// File name, for diagnostics.
    pub name: String,
    /// Content of the file.
    pub text: String,
    /// Files named by `from:` and by a generator's `frames:`, by their path as
    /// written: the text, frames in base64, or the error from reading them.
    #[serde(default)]
    #[schema(value_type = BTreeMap<String, Attachment>)]
    pub attachments: BTreeMap<String, Result<String, String>>,
}

/// Serialized form of an attachment.
#[derive(utoipa::ToSchema)]
#[expect(dead_code, reason = "a Result is written like this")]
enum Attachment {
    /// Content of the file.
    Ok(String),
    /// Error from reading the file.
    Err(String),
}
