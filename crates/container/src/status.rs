//! Status of a guest's commands, as reported by its process 1.
//!
//! Process 1 writes a line of JSON for each change of a command ([`StatusUpdate`]) into a pipe,
//! which the shim reads without blocking. The guest may write anything there, since root of its
//! user namespace can take the pipe. The shim therefore accepts a line only for an existing
//! command. It bounds its text and removes control characters. It skips all other input. Accepted
//! status is shown only as that guest's own state.
//!
//! Limits: [`LINE_BYTES_MAX`] per line, [`WORDS_BYTES_MAX`] of text.

use pdp_model::CommandState;
use serde::{Deserialize, Serialize};

/// Longest line, bytes. A pipe accepts so few bytes whole or not at all.
pub(crate) const LINE_BYTES_MAX: usize = 1024;

/// Longest text about a command, bytes.
pub const WORDS_BYTES_MAX: usize = 160;

/// Status of a command.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GuestCommandStatus {
    /// State of the command.
    pub state: CommandState,
    /// Number of restarts.
    #[serde(default)]
    pub restarts: u32,
    /// Last exit code: 128 plus the signal if a signal ended it, 127 if it could not be started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit: Option<u8>,
    /// True if it failed, keeps ending, or is not ready in time.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub troubled: bool,
    /// Reason of the command's end, with the last line of its output, without control characters.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub words: String,
}

/// A line of process 1.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct StatusUpdate {
    /// Index of the command, from 0 on.
    pub command: usize,
    pub status: GuestCommandStatus,
}

/// Returns the text trimmed, without control characters, cut at `bytes_max`.
pub(crate) fn sanitize(text: &str, bytes_max: usize) -> String {
    let text: String = text.trim().chars().filter(|letter| !letter.is_control()).collect();
    text[..text.floor_char_boundary(bytes_max)].to_owned()
}

/// Status of all commands, collected by the shim.
pub(crate) struct CommandStatuses {
    commands: Vec<GuestCommandStatus>,
    line: Vec<u8>,
}

impl CommandStatuses {
    /// Returns the status of so many commands, none of which is started.
    pub fn new(commands: usize) -> Self {
        Self { commands: vec![GuestCommandStatus::default(); commands], line: Vec::new() }
    }

    pub fn commands(&self) -> &[GuestCommandStatus] {
        &self.commands
    }

    /// Reads bytes as they arrive. Returns true if the status of a command changed.
    pub fn read(&mut self, bytes: &[u8]) -> bool {
        let mut changed = false;
        for &byte in bytes {
            if byte == b'\n' {
                changed |= self.line();
                self.line.clear();
            } else if self.line.len() <= LINE_BYTES_MAX {
                self.line.push(byte);
            }
        }
        changed
    }

    fn line(&mut self) -> bool {
        if self.line.len() > LINE_BYTES_MAX {
            return false;
        }
        let Ok(StatusUpdate { command, mut status }) = serde_json::from_slice(&self.line) else {
            return false;
        };
        let Some(known) = self.commands.get_mut(command) else { return false };
        status.words = sanitize(&status.words, WORDS_BYTES_MAX);
        let changed = *known != status;
        *known = status;
        changed
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn status_line(command: usize, words: &str) -> Vec<u8> {
        let state = CommandState::Ready;
        let status =
            GuestCommandStatus { state, words: words.into(), ..GuestCommandStatus::default() };
        let mut line = serde_json::to_vec(&StatusUpdate { command, status }).unwrap();
        line.push(b'\n');
        line
    }

    #[test]
    fn ignores_status_lines_of_unknown_commands() {
        let mut statuses = CommandStatuses::new(2);
        assert!(
            statuses.read(&status_line(1, "")) && !statuses.read(&status_line(1, "")),
            "told once"
        );
        assert!(
            !statuses.read(&status_line(2, "")) && !statuses.read(&status_line(usize::MAX, ""))
        );
        let states: Vec<_> = statuses.commands().iter().map(|status| status.state).collect();
        assert_eq!(states, [CommandState::Waiting, CommandState::Ready]);
    }

    #[test]
    fn status_text_is_bounded_and_sanitized() {
        let mut statuses = CommandStatuses::new(1);
        statuses.read(&status_line(0, &format!("\u{1b}[2J\r\n{}", "é".repeat(200))));
        let words = &statuses.commands()[0].words;
        assert!(words.starts_with("[2Jé") && words.len() <= WORDS_BYTES_MAX, "{words}");
    }

    #[test]
    fn skips_malformed_lines() {
        let mut statuses = CommandStatuses::new(1);
        for noise in [
            "\n\n{}\n[]\nnull\n".to_owned(),
            "{\"command\":0,\"status\":{\"state\":\"ready\",\"more\":1}}\n".to_owned(),
            "{\"command\":-1,\"status\":{\"state\":\"ready\"}}\n".to_owned(),
            "{\"command\":0,\"status\":{\"state\":\"ready\",\"exit\":256}}\n".to_owned(),
            "[".repeat(1 << 20) + "\n",
            String::from_utf8(status_line(0, &"x".repeat(LINE_BYTES_MAX))).unwrap(),
        ] {
            assert!(!statuses.read(noise.as_bytes()), "{noise:.80}");
        }
        assert!(statuses.line.capacity() <= 2 * LINE_BYTES_MAX, "nothing grows");
        assert!(statuses.read(&status_line(0, "")), "and the next line counts");
    }

    proptest! {
        #[test]
        fn status_parser_stays_bounded_for_any_bytes(
            pieces in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..300), 0..50),
        ) {
            let mut statuses = CommandStatuses::new(3);
            for piece in &pieces {
                statuses.read(piece);
            }
            prop_assert_eq!(statuses.commands().len(), 3);
            prop_assert!(statuses.line.len() <= LINE_BYTES_MAX + 1);
        }

        #[test]
        fn longest_status_text_fits_into_one_line(words in "[\"\\\\a]{160}") {
            prop_assert!(status_line(usize::MAX, &words).len() <= LINE_BYTES_MAX);
        }
    }
}
