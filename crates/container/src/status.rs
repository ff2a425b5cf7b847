//! How the commands of a guest are, as its process 1 tells it.
//!
//! Process 1 writes a line of JSON for each command that changed ([`Told`]) into a pipe that the shim reads
//! without ever waiting. The guest may write what it likes there: root of its user namespace can take the
//! pipe. So a line counts for one of as many commands as the guest was made with, its words are bounded and
//! without control characters, and whatever else comes is passed over. What is believed is shown as that
//! guest's own state and nowhere else.
//!
//! Limits: [`LINE_BYTES_MAX`] a line, [`WORDS_BYTES_MAX`] of words.

use serde::{Deserialize, Serialize};

/// Bytes of a line; below what a pipe takes at once or not at all.
pub(crate) const LINE_BYTES_MAX: usize = 1024;

/// Bytes of what is said of a command.
pub const WORDS_BYTES_MAX: usize = 160;

/// How a command is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CommandState {
    /// Not started: what it comes after is not ready.
    #[default]
    Waiting,
    /// Runs, and is not ready yet.
    Starting,
    /// Runs, and its check has held.
    Ready,
    /// Runs, and has no check.
    Running,
    /// Ended or could not be started, and is started again after a pause.
    Restarting,
    /// Ended for good, with code 0 or, where it may fail, with any.
    Done,
    /// Ended otherwise or could not be started, for good.
    Failed,
}

/// What is known of a command.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CommandStatus {
    /// How it is.
    pub state: CommandState,
    /// Times it was started again.
    #[serde(default)]
    pub restarts: u32,
    /// What it returned when it ended last (128 and the signal, if one ended it; 127 if it could not be
    /// started).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit: Option<u8>,
    /// It failed, keeps ending, or is not ready within its time.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub troubled: bool,
    /// How it ended, and the last line that it wrote; without control characters.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub words: String,
}

/// A line.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Told {
    /// Which command, from 0.
    pub command: usize,
    pub status: CommandStatus,
}

/// Text without control characters or spaces around it, cut at `bytes_max`.
pub(crate) fn tame(text: &str, bytes_max: usize) -> String {
    let text: String = text.trim().chars().filter(|letter| !letter.is_control()).collect();
    text[..text.floor_char_boundary(bytes_max)].to_owned()
}

/// The shim's side: what was told of each command.
pub(crate) struct Board {
    commands: Vec<CommandStatus>,
    line: Vec<u8>,
}

impl Board {
    /// For a guest with so many commands, none of which is started.
    pub fn new(commands: usize) -> Self {
        Self { commands: vec![CommandStatus::default(); commands], line: Vec::new() }
    }

    pub fn commands(&self) -> &[CommandStatus] {
        &self.commands
    }

    /// Takes bytes as they come; whether a command is otherwise than before.
    pub fn take(&mut self, bytes: &[u8]) -> bool {
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
        let Ok(Told { command, mut status }) = serde_json::from_slice(&self.line) else {
            return false;
        };
        let Some(known) = self.commands.get_mut(command) else { return false };
        status.words = tame(&status.words, WORDS_BYTES_MAX);
        let changed = *known != status;
        *known = status;
        changed
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn told(command: usize, words: &str) -> Vec<u8> {
        let state = CommandState::Ready;
        let status = CommandStatus { state, words: words.into(), ..CommandStatus::default() };
        let mut line = serde_json::to_vec(&Told { command, status }).unwrap();
        line.push(b'\n');
        line
    }

    #[test]
    fn a_line_counts_for_a_command_that_there_is() {
        let mut board = Board::new(2);
        assert!(board.take(&told(1, "")) && !board.take(&told(1, "")), "told once");
        assert!(!board.take(&told(2, "")) && !board.take(&told(usize::MAX, "")));
        let states: Vec<_> = board.commands().iter().map(|status| status.state).collect();
        assert_eq!(states, [CommandState::Waiting, CommandState::Ready]);
    }

    #[test]
    fn words_are_bounded_and_harmless() {
        let mut board = Board::new(1);
        board.take(&told(0, &format!("\u{1b}[2J\r\n{}", "é".repeat(200))));
        let words = &board.commands()[0].words;
        assert!(words.starts_with("[2Jé") && words.len() <= WORDS_BYTES_MAX, "{words}");
    }

    #[test]
    fn what_no_line_is_is_passed_over() {
        let mut board = Board::new(1);
        for noise in [
            "\n\n{}\n[]\nnull\n".to_owned(),
            "{\"command\":0,\"status\":{\"state\":\"ready\",\"more\":1}}\n".to_owned(),
            "{\"command\":-1,\"status\":{\"state\":\"ready\"}}\n".to_owned(),
            "{\"command\":0,\"status\":{\"state\":\"ready\",\"exit\":256}}\n".to_owned(),
            "[".repeat(1 << 20) + "\n",
            String::from_utf8(told(0, &"x".repeat(LINE_BYTES_MAX))).unwrap(),
        ] {
            assert!(!board.take(noise.as_bytes()), "{noise:.80}");
        }
        assert!(board.line.capacity() <= 2 * LINE_BYTES_MAX, "nothing grows");
        assert!(board.take(&told(0, "")), "and the next line counts");
    }

    proptest! {
        #[test]
        fn any_bytes_leave_it_within_its_bounds(
            pieces in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..300), 0..50),
        ) {
            let mut board = Board::new(3);
            for piece in &pieces {
                board.take(piece);
            }
            prop_assert_eq!(board.commands().len(), 3);
            prop_assert!(board.line.len() <= LINE_BYTES_MAX + 1);
        }

        #[test]
        fn the_longest_words_fit_into_a_line(words in "[\"\\\\a]{160}") {
            prop_assert!(told(usize::MAX, &words).len() <= LINE_BYTES_MAX);
        }
    }
}
