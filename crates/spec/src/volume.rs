//! Persistent directories of a node, as written in specs.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::limits::{VOLUME_BYTES_DEFAULT, VOLUME_NAME_CHARS_MAX};
use crate::units::Bytes;

/// A directory that persists across container restarts: `NAME:TARGET`, or a mapping.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum Volume {
    /// `NAME:TARGET`, with 64 MiB.
    Line(String),
    /// Name, target and size.
    Parts(VolumeParts),
}

/// A directory that persists across container restarts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct VolumeParts {
    /// Name, unique in the node: letters, digits, `-` and `_`. It identifies the data.
    #[schemars(length(min = 1, max = VOLUME_NAME_CHARS_MAX))]
    pub source: String,
    /// Absolute path in the node. With an image: existing, or allowed for `files`.
    pub target: String,
    /// Disk space, 16 MiB to 1 TiB, fixed once created. The file system takes 5 MiB and 1/32 of it,
    /// and has one inode per 8 KiB.
    #[serde(default = "default_size")]
    pub size: Bytes,
}

fn default_size() -> Bytes {
    Bytes(VOLUME_BYTES_DEFAULT)
}

impl Volume {
    /// Returns name, target and size; `None` if a text does not have two parts.
    pub fn parts(&self) -> Option<VolumeParts> {
        let line = match self {
            Self::Parts(parts) => return Some(parts.clone()),
            Self::Line(line) => line,
        };
        let (source, target) = line.split_once(':')?;
        let whole = !target.contains(':');
        whole.then(|| VolumeParts {
            source: source.into(),
            target: target.into(),
            size: default_size(),
        })
    }
}
