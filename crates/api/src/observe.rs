use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

/// Which log, from where.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct LogQuery {
    /// Only the last lines, this many; all that is kept if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tail: Option<u64>,
    /// Go on with what is written from now on.
    #[serde(default)]
    pub follow: bool,
}

/// A link address that a segment has learned.
#[derive(
    Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema,
)]
#[serde(rename_all = "camelCase")]
pub struct FdbEntry {
    /// The end of the link that it was last heard at: `h1:eth0`, or `external:NAME`.
    pub endpoint: String,
    /// The address, `02:…`.
    pub mac: String,
    /// How long ago that was, seconds.
    pub age_s: u32,
}

/// Processes of the node itself that have a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub enum NodeProcess {
    /// The daemon.
    Daemon,
    /// The mux.
    Mux,
}

/// A process that belongs to a node of a vnet: `control`, `tap`, `mirror`, `management`, `g0`, `g1`, …
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum GuestProcess {
    /// The control guest or the host.
    #[default]
    Control,
    /// The TAP helper.
    Tap,
    /// The route mirror.
    Mirror,
    /// The management helper.
    Management,
    /// The forwarding guest of this number.
    Guest(u32),
}

impl fmt::Display for GuestProcess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Control => f.write_str("control"),
            Self::Tap => f.write_str("tap"),
            Self::Mirror => f.write_str("mirror"),
            Self::Management => f.write_str("management"),
            Self::Guest(number) => write!(f, "g{number}"),
        }
    }
}

/// Not the name of a [`GuestProcess`].
#[derive(Debug, thiserror::Error)]
#[error(
    "unknown process {0:?}; use control, tap, mirror, management, or g0, g1, … for a forwarding guest"
)]
pub struct UnknownProcess(String);

impl FromStr for GuestProcess {
    type Err = UnknownProcess;

    fn from_str(text: &str) -> Result<Self, UnknownProcess> {
        match text {
            "control" => Ok(Self::Control),
            "tap" => Ok(Self::Tap),
            "mirror" => Ok(Self::Mirror),
            "management" => Ok(Self::Management),
            _ => text
                .strip_prefix('g')
                .filter(|digits| digits.bytes().all(|byte| byte.is_ascii_digit()))
                .and_then(|digits| digits.parse().ok())
                .map(Self::Guest)
                .ok_or_else(|| UnknownProcess(text.into())),
        }
    }
}

impl Serialize for GuestProcess {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for GuestProcess {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// How to capture.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct CaptureQuery {
    /// Bytes of each frame, 0 for all.
    #[serde(default)]
    pub snap_bytes: u32,
    /// Only frames that this program of classic BPF wants: what `tcpdump -ddd` prints, with commas for ends of
    /// lines, at most 256 instructions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub filter: Option<String>,
}

/// Which frame to follow: the next that arrives at the port and has these bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct TraceRequest {
    /// All of these must match; at most 256, with 256 bytes in all.
    #[serde(default)]
    pub filter: Vec<FrameMatch>,
    /// And this program of classic BPF must want it: what `tcpdump -ddd` prints, with commas for ends of lines, at
    /// most 256 instructions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub program: Option<String>,
    /// How long to wait for such a frame, milliseconds, at most
    /// [`TRACE_WAIT_MS_MAX`](crate::TRACE_WAIT_MS_MAX).
    pub wait_ms: u64,
}

/// Longest wait for a frame to trace, milliseconds.
pub const TRACE_WAIT_MS_MAX: u64 = 60_000;

/// Bytes that a frame must have.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct FrameMatch {
    /// Offset of the first byte from the frame's destination address.
    pub offset: u16,
    /// The bytes, after the mask.
    pub value: Vec<u8>,
    /// Which bits count; as long as `value`.
    pub mask: Vec<u8>,
}

/// What became of one frame.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Trace {
    /// Its stages, in order.
    pub stages: Vec<Stage>,
}

/// One stage of a traced frame.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Stage {
    /// Nanoseconds since it arrived.
    pub at_ns: u64,
    /// `receive`, `classify`, `police`, `distribute`, `dispatch`, `forward`, `shape`, `send`, `punt`, `drop`, `wait`.
    pub stage: String,
    /// What was decided, for people.
    pub detail: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_are_named_and_nothing_else_is() {
        for (name, process) in [
            ("control", GuestProcess::Control),
            ("tap", GuestProcess::Tap),
            ("mirror", GuestProcess::Mirror),
            ("management", GuestProcess::Management),
            ("g0", GuestProcess::Guest(0)),
            ("g4294967295", GuestProcess::Guest(u32::MAX)),
        ] {
            assert_eq!(name.parse::<GuestProcess>().unwrap(), process);
            assert_eq!(process.to_string(), name);
            let json = serde_json::to_string(&process).unwrap();
            assert_eq!(serde_json::from_str::<GuestProcess>(&json).unwrap(), process);
        }
        for name in ["", "g", "g-1", "g+1", "g4294967296", "Control", "g1/../.."] {
            assert!(name.parse::<GuestProcess>().is_err(), "{name}");
        }
    }
}
