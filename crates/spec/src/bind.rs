//! Files and directories of the machine in a node, as they are written.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A file or directory of the machine in a node: `SOURCE:TARGET[:ro]`, or a mapping.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum Bind {
    /// `SOURCE:TARGET`, `SOURCE:TARGET:ro` or `SOURCE:TARGET:rw`.
    Line(String),
    /// Its parts.
    Parts(BindParts),
}

/// A file or directory of the machine in a node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct BindParts {
    /// Where it is on the machine of the daemon, absolute.
    pub source: String,
    /// Where it is in the node, absolute: in an image below one of the places of `files`, or in place of what the
    /// image has.
    pub target: String,
    /// The node may not write to it.
    #[serde(default)]
    pub read_only: bool,
}

impl Bind {
    /// Its parts; `None` where a line has not two or three of them, the last `ro` or `rw`.
    pub fn parts(&self) -> Option<BindParts> {
        let line = match self {
            Self::Parts(parts) => return Some(parts.clone()),
            Self::Line(line) => line,
        };
        let parts = |source: &str, target: &str, read_only| {
            Some(BindParts { source: source.into(), target: target.into(), read_only })
        };
        match line.split(':').collect::<Vec<_>>()[..] {
            [source, target] | [source, target, "rw"] => parts(source, target, false),
            [source, target, "ro"] => parts(source, target, true),
            _ => None,
        }
    }
}

/// A directory that a tenant may bind from, with what is below: `DIR`, or `DIR:rw` if it may write there.
pub(crate) fn grant(text: &str) -> (&str, bool) {
    match text.strip_suffix(":rw") {
        Some(directory) => (directory, true),
        None => (text.strip_suffix(":ro").unwrap_or(text), false),
    }
}
