//! Bind mounts of the machine's files and directories in a node, as written in specs.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A file or directory of the machine, mounted in a node: `SOURCE:TARGET[:ro]`, or a mapping.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum Bind {
    /// `SOURCE:TARGET`, `SOURCE:TARGET:ro` or `SOURCE:TARGET:rw`.
    Line(String),
    /// Source, target and access.
    Parts(BindParts),
}

/// A file or directory of the machine, mounted in a node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct BindParts {
    /// Absolute path without symbolic links. Mounts below it are hidden.
    pub source: String,
    /// Absolute path in the node. With an image: existing, or allowed for `files`.
    pub target: String,
    /// Mount read-only.
    #[serde(default)]
    pub read_only: bool,
}

impl Bind {
    /// Returns source, target and access. `None` if a text does
    /// not have two parts, or three with `ro` or `rw` last.
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

/// Parses a directory that a tenant may bind from, including
/// everything below: `DIR`, or `DIR:rw` with write access.
pub(crate) fn grant(text: &str) -> (&str, bool) {
    match text.strip_suffix(":rw") {
        Some(directory) => (directory, true),
        None => (text.strip_suffix(":ro").unwrap_or(text), false),
    }
}
