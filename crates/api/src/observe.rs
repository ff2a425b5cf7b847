use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

/// Selects lines of a log.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct LogQuery {
    /// Only this many of the last lines. Absent: all lines that are kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tail: Option<u64>,
    /// Continue with new lines as they are written.
    #[serde(default)]
    pub follow: bool,
}

/// A MAC address that a segment has learned.
#[derive(
    Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema,
)]
#[serde(rename_all = "camelCase")]
pub struct FdbEntry {
    /// End of the link that last received a frame from it: `h1:eth0`, or `external:NAME`.
    pub endpoint: String,
    /// The MAC address, `02:…`.
    pub mac: String,
    /// Time since that frame, seconds.
    pub age_s: u32,
}

/// Processes of the PdP node itself that have a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub enum NodeProcess {
    /// The daemon.
    Daemon,
    /// The mux.
    Mux,
}

/// A process of a vnet's node: `control`, `tap`, `mirror`, `management`, `g0`, `g1`, …
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
    /// The forwarding guest with this number.
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

/// Text that is not the name of a [`GuestProcess`].
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

/// Options of a capture.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct CaptureQuery {
    /// Bytes to capture of each frame, 0 for all.
    #[serde(default)]
    pub snap_bytes: u32,
    /// Only frames that this classic BPF program accepts. Format: the output of `tcpdump -ddd` with
    /// commas instead of line ends, at most 256 instructions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub filter: Option<String>,
}

/// Selects the frame to trace: the next frame that arrives at the port and matches.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct TraceRequest {
    /// Matches that all must succeed; at most 256, with 256 bytes in all.
    #[serde(default)]
    pub filter: Vec<FrameMatch>,
    /// Classic BPF program that must accept the frame as well. Format: the output of `tcpdump -ddd`
    /// with commas instead of line ends, at most 256 instructions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub program: Option<String>,
    /// Longest wait for such a frame, milliseconds, at most
    /// [`TRACE_WAIT_MS_MAX`](crate::TRACE_WAIT_MS_MAX).
    pub wait_ms: u64,
}

/// Longest wait for a frame to trace, milliseconds.
pub const TRACE_WAIT_MS_MAX: u64 = 60_000;

/// Bytes to match in a frame.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct FrameMatch {
    /// Offset of the first byte from the start of the frame's destination address.
    pub offset: u16,
    /// The expected bytes, after the mask.
    pub value: Vec<u8>,
    /// Bits to compare; as long as `value`.
    pub mask: Vec<u8>,
}

/// The stages of one traced frame.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Trace {
    /// Stages in order.
    pub stages: Vec<TraceStep>,
}

/// One stage of a traced frame.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct TraceStep {
    /// Nanoseconds since the frame arrived.
    pub at_ns: u64,
    /// `receive`, `classify`, `police`, `distribute`, `dispatch`, `forward`, `shape`, `send`,
    /// `punt`, `drop`, `wait`.
    pub stage: String,
    /// Decision of the stage, for people.
    pub detail: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guest_process_names_round_trip() {
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
