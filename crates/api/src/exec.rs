//! Running a command in a guest.
//!
//! The client sends `POST` [`paths::exec`](crate::paths::exec) with an [`ExecRequest`] and
//! `Connection: upgrade`, `Upgrade: pdp-exec`. After status 101 both sides send frames:
//!
//! ```text
//! byte  0      1 2 3 4        5…
//!       kind   length (BE)    payload
//! ```
//!
//! | kind | from | payload |
//! |---|---|---|
//! | 0 stdin | client | bytes |
//! | 1 stdout | daemon | bytes |
//! | 2 stderr | daemon | bytes (never with a terminal) |
//! | 3 resize | client | rows, columns: `u16` BE each |
//! | 4 exit | daemon | exit code, `i32` BE; 128 + n for signal n; the last frame |
//! | 5 end of stdin | client | none |
//! | 6 broken off | daemon | why, as UTF-8 text; the last frame |
//!
//! The command is killed when its client disconnects. A payload has at most [`PAYLOAD_BYTES_MAX`]
//! bytes. A violation of this format ends the connection.

use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use utoipa::ToSchema;

use crate::GuestProcess;

/// Name of the protocol in the `Upgrade` header.
pub const UPGRADE: &str = "pdp-exec";

/// Largest payload of one frame, bytes.
pub const PAYLOAD_BYTES_MAX: usize = 64 << 10;

const HEADER_BYTES: usize = 5;

/// Command to run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ExecRequest {
    /// Program and arguments; the shell of the guest if empty.
    #[serde(default)]
    pub command: Vec<String>,
    /// Guest of the node to run it in: `control` or `g0`, `g1`, ….
    #[serde(default)]
    #[schema(value_type = String)]
    pub process: GuestProcess,
    /// User of the control guest, `USER` or `USER:GROUP` by name or number (0 to 65535). The
    /// guest's own files resolve names. Default: root.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Absolute path of the working directory in the control guest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workdir: Option<String>,
    /// Size of the terminal; absent for no terminal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tty: Option<WindowSize>,
    /// The client's `TERM`, for a terminal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub term: Option<String>,
}

/// Size of a terminal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct WindowSize {
    /// Lines.
    pub rows: u16,
    /// Characters per line.
    pub columns: u16,
}

/// One frame of the connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExecFrame {
    /// Bytes for the command.
    Stdin(Vec<u8>),
    /// Bytes from the command, or from its terminal.
    Stdout(Vec<u8>),
    /// Bytes from the command's standard error.
    Stderr(Vec<u8>),
    /// The client's terminal has this size now.
    Resize(WindowSize),
    /// The command ended.
    Exit(i32),
    /// End of the bytes for the command.
    StdinEnd,
    /// The daemon ended the command; the text is the cause.
    BrokenOff(String),
}

/// Cause of a failure to read or write frames.
#[derive(Debug, thiserror::Error)]
pub enum ExecFrameError {
    /// Unknown kind, or a payload that does not fit its kind.
    #[error("exec frame: unknown kind {kind} or wrong length {length}")]
    Malformed {
        /// The kind.
        kind: u8,
        /// Bytes of the payload, as announced.
        length: u32,
    },
    /// The connection failed.
    #[error("exec connection")]
    Io(#[from] std::io::Error),
}

impl ExecFrame {
    /// Returns the bytes for the connection. Payloads are at most [`PAYLOAD_BYTES_MAX`] long.
    pub fn emit(&self) -> Vec<u8> {
        let exit;
        let size;
        let (kind, payload): (u8, &[u8]) = match self {
            Self::Stdin(bytes) => (0, bytes),
            Self::Stdout(bytes) => (1, bytes),
            Self::Stderr(bytes) => (2, bytes),
            Self::Resize(window) => {
                let [a, b] = window.rows.to_be_bytes();
                let [c, d] = window.columns.to_be_bytes();
                size = [a, b, c, d];
                (3, &size)
            }
            Self::Exit(code) => {
                exit = code.to_be_bytes();
                (4, &exit)
            }
            Self::StdinEnd => (5, &[]),
            Self::BrokenOff(why) => (6, why.as_bytes()),
        };
        debug_assert!(payload.len() <= PAYLOAD_BYTES_MAX);
        let mut bytes = Vec::with_capacity(HEADER_BYTES + payload.len());
        bytes.push(kind);
        bytes.extend_from_slice(&(payload.len() as u32).to_be_bytes());
        bytes.extend_from_slice(payload);
        bytes
    }

    fn parse(kind: u8, payload: Vec<u8>) -> Result<Self, ExecFrameError> {
        let malformed = ExecFrameError::Malformed { kind, length: payload.len() as u32 };
        Ok(match (kind, payload.as_slice()) {
            (0, _) => Self::Stdin(payload),
            (1, _) => Self::Stdout(payload),
            (2, _) => Self::Stderr(payload),
            (3, &[a, b, c, d]) => Self::Resize(WindowSize {
                rows: u16::from_be_bytes([a, b]),
                columns: u16::from_be_bytes([c, d]),
            }),
            (4, &[a, b, c, d]) => Self::Exit(i32::from_be_bytes([a, b, c, d])),
            (5, []) => Self::StdinEnd,
            (6, _) => Self::BrokenOff(String::from_utf8(payload).map_err(|_| malformed)?),
            _ => return Err(malformed),
        })
    }
}

/// Reads the next frame. Returns `None` if the peer has closed between two frames.
///
/// Do not cancel this future: a partly read frame would be lost.
pub async fn read_frame(
    from: &mut (impl AsyncRead + Unpin),
) -> Result<Option<ExecFrame>, ExecFrameError> {
    let mut header = [0; HEADER_BYTES];
    if from.read(&mut header[..1]).await? == 0 {
        return Ok(None);
    }
    from.read_exact(&mut header[1..]).await?;
    let [kind, a, b, c, d] = header;
    let length = u32::from_be_bytes([a, b, c, d]);
    if length as usize > PAYLOAD_BYTES_MAX {
        return Err(ExecFrameError::Malformed { kind, length });
    }
    let mut payload = vec![0; length as usize];
    from.read_exact(&mut payload).await?;
    ExecFrame::parse(kind, payload).map(Some)
}

/// Writes one frame and flushes it.
pub async fn write_frame(
    to: &mut (impl AsyncWrite + Unpin),
    frame: &ExecFrame,
) -> Result<(), ExecFrameError> {
    to.write_all(&frame.emit()).await?;
    Ok(to.flush().await?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn read(bytes: &[u8]) -> Result<Option<ExecFrame>, ExecFrameError> {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(read_frame(&mut &*bytes))
    }

    fn frames() -> impl Strategy<Value = ExecFrame> {
        let payload = || proptest::collection::vec(any::<u8>(), 0..300);
        prop_oneof![
            payload().prop_map(ExecFrame::Stdin),
            payload().prop_map(ExecFrame::Stdout),
            payload().prop_map(ExecFrame::Stderr),
            any::<(u16, u16)>()
                .prop_map(|(rows, columns)| ExecFrame::Resize(WindowSize { rows, columns })),
            any::<i32>().prop_map(ExecFrame::Exit),
            Just(ExecFrame::StdinEnd),
            ".{0,40}".prop_map(ExecFrame::BrokenOff),
        ]
    }

    #[test]
    fn exec_frames_have_the_documented_encoding() {
        assert_eq!(ExecFrame::Stdin(b"ab".to_vec()).emit(), [0, 0, 0, 0, 2, b'a', b'b']);
        let size = WindowSize { rows: 258, columns: 3 };
        assert_eq!(ExecFrame::Resize(size).emit(), [3, 0, 0, 0, 4, 1, 2, 0, 3]);
        assert_eq!(ExecFrame::Exit(-2).emit(), [4, 0, 0, 0, 4, 255, 255, 255, 254]);
        assert_eq!(ExecFrame::StdinEnd.emit(), [5, 0, 0, 0, 0]);
    }

    #[test]
    fn oversized_exec_payloads_are_refused_unread() {
        let mut bytes = vec![0];
        bytes.extend((PAYLOAD_BYTES_MAX as u32 + 1).to_be_bytes());
        assert!(matches!(read(&bytes), Err(ExecFrameError::Malformed { .. })));
        let full = ExecFrame::Stdout(vec![7; PAYLOAD_BYTES_MAX]);
        assert_eq!(read(&full.emit()).unwrap(), Some(full));
    }

    proptest! {
        #[test]
        fn exec_frames_round_trip_and_truncation_fails(frame in frames()) {
            let bytes = frame.emit();
            prop_assert_eq!(read(&bytes).unwrap(), Some(frame));
            prop_assert!(read(&[]).unwrap().is_none());
            for length in 1..bytes.len() {
                prop_assert!(matches!(read(&bytes[..length]), Err(ExecFrameError::Io(_))));
            }
        }

        #[test]
        fn noise_is_refused_or_read_back(bytes in proptest::collection::vec(any::<u8>(), 0..40)) {
            if let Ok(Some(frame)) = read(&bytes) {
                prop_assert!(bytes.starts_with(&frame.emit()));
            }
        }
    }
}
