//! What of a node outlasts its container, as it is written.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::limits::{VOLUME_BYTES_DEFAULT, VOLUME_NAME_CHARS_MAX};
use crate::units::Bytes;

/// A directory of a node that outlasts its container: `NAME:TARGET`, or a mapping.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum Volume {
    /// `NAME:TARGET`, of 64 MiB.
    Line(String),
    /// Its parts.
    Parts(VolumeParts),
}

/// A directory of a node that outlasts its container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct VolumeParts {
    /// What it is called among the node's: letters, digits, `-` and `_`. By its name it is found again, wherever it is
    /// mounted.
    #[schemars(length(min = 1, max = VOLUME_NAME_CHARS_MAX))]
    pub source: String,
    /// Where it is in the node, absolute: in an image below one of the places of `files`, or in place of what the
    /// image has.
    pub target: String,
    /// Bytes that it takes of the daemon's disk, from 16 MiB on, of which its file system needs some 5 MiB and one in
    /// 32. It has an inode for each 8 KiB. Can't be changed.
    #[serde(default = "default_size")]
    pub size: Bytes,
}

fn default_size() -> Bytes {
    Bytes(VOLUME_BYTES_DEFAULT)
}

impl Volume {
    /// Its parts; `None` where a line has not two of them.
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
