//! Forwards the output of commands to the guest's log, and keeps the last lines of each command.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::fchown;
use std::process::Stdio;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::OFlags;
use rustix::pipe::{PipeFlags, pipe_with};

use crate::status::{WORDS_BYTES_MAX, sanitize};

/// Bytes to forward at once. A pipe that polls writable accepts so many without blocking.
const CHUNK_BYTES_MAX: usize = 4096;

/// Number of last lines kept.
const LINES_KEPT: usize = 8;

/// Lower-case words that mark a line as an error message. Lines after it often have details, or the
/// program's usage.
const FAULTS: [&str; 9] =
    ["error", "fail", "fatal", "denied", "cannot", "can't", "unable", "not permitted", "invalid"];

/// The last lines of a text that are not blank.
#[derive(Default)]
pub(crate) struct LastLines {
    lines: VecDeque<String>,
    /// Beginning of the incomplete line.
    partial_line: Vec<u8>,
}

impl LastLines {
    pub fn take(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            match byte {
                b'\n' | b'\r' => self.end_line(),
                _ if self.partial_line.len() < WORDS_BYTES_MAX => self.partial_line.push(byte),
                _ => {}
            }
        }
    }

    fn end_line(&mut self) {
        let line = sanitize(&String::from_utf8_lossy(&self.partial_line), WORDS_BYTES_MAX);
        self.partial_line.clear();
        if !line.is_empty() {
            self.lines.truncate(LINES_KEPT - 1);
            self.lines.push_front(line);
        }
    }

    /// Returns the last line with an error message, or else the last line. It has at most
    /// [`WORDS_BYTES_MAX`] bytes and no control characters. Empty if there was no text.
    pub fn summary(&self) -> String {
        let begun = sanitize(&String::from_utf8_lossy(&self.partial_line), WORDS_BYTES_MAX);
        let mut lines = [&begun]
            .into_iter()
            .filter(|line| !line.is_empty())
            .chain(&self.lines)
            .take(LINES_KEPT);
        let is_fault = |line: &&String| {
            let line = line.to_lowercase();
            FAULTS.iter().any(|word| line.contains(word))
        };
        let last = lines.clone().next();
        lines.find(is_fault).or(last).cloned().unwrap_or_default()
    }
}

/// A pipe for the output of processes.
pub(super) struct Output {
    read: File,
    /// Write end for future processes of a command. Each process of a check has its own pipe.
    write: OwnedFd,
    pub last: LastLines,
}

impl Output {
    pub fn new() -> io::Result<Self> {
        let (read, write) = pipe_with(PipeFlags::CLOEXEC)?;
        // Only this end is non-blocking: the writer waits as for any pipe.
        rustix::fs::fcntl_setfl(&read, OFlags::NONBLOCK)?;
        Ok(Self { read: read.into(), write, last: LastLines::default() })
    }

    /// Returns a copy of the write end.
    pub fn end(&self) -> io::Result<Stdio> {
        Ok(self.write.try_clone()?.into())
    }

    /// Gives the pipe to a user, who can then open it by name (`/dev/stdout`).
    pub fn give(&self, uid: u32, gid: u32) -> io::Result<()> {
        fchown(&self.write, Some(uid), Some(gid))
    }

    /// Reads available output, up to a limit. Keeps its last lines and does not forward it.
    pub fn drain(&mut self) {
        let mut buffer = [0; CHUNK_BYTES_MAX];
        for _ in 0..(1 << 16) / CHUNK_BYTES_MAX {
            let Ok(count @ 1..) = self.read.read(&mut buffer) else { return };
            self.last.take(&buffer[..count]);
        }
    }
}

impl AsFd for Output {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.read.as_fd()
    }
}

/// Forwards the output of commands to standard error without ever blocking.
#[derive(Default)]
pub(super) struct StderrForwarder {
    /// Bytes that wait to be forwarded.
    chunk: Vec<u8>,
}

impl StderrForwarder {
    /// True if it accepts more.
    pub fn is_free(&self) -> bool {
        self.chunk.is_empty()
    }

    /// Reads from `output`, and forwards as much as possible.
    pub fn take(&mut self, output: &mut Output) {
        let mut buffer = [0; CHUNK_BYTES_MAX];
        if let Ok(count @ 1..) = output.read.read(&mut buffer) {
            output.last.take(&buffer[..count]);
            self.chunk = buffer[..count].to_vec();
            self.pass_on();
        }
    }

    /// Tries to forward the waiting bytes.
    pub fn pass_on(&mut self) {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let mut log = io::stderr();
        let ready = poll(&mut [PollFd::new(&log, PollFlags::OUT)], Some(&now)) == Ok(1);
        if ready && !self.chunk.is_empty() {
            // Without a reader the bytes are lost. The guest is about to be ended then.
            let _ = log.write_all(&self.chunk);
            self.chunk.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn last(pieces: &[&str]) -> String {
        let mut line = LastLines::default();
        pieces.iter().for_each(|piece| line.take(piece.as_bytes()));
        line.summary()
    }

    #[test]
    fn last_line_skips_blank_lines() {
        assert_eq!(last(&[]), "");
        assert_eq!(last(&["one\ntwo\n"]), "two");
        assert_eq!(last(&["one\ntw", "o"]), "two");
        assert_eq!(last(&["one\n", "\n  \r\n"]), "one");
        assert_eq!(last(&["\u{1b}[31mred\u{7}\n"]), "[31mred");
    }

    #[test]
    fn error_lines_take_precedence_over_later_lines() {
        let zebra = "privs_init: initial cap_set_proc failed: Operation not permitted\n\
                     Wanted caps: cap_net_admin=p\nHave   caps: =p\n";
        assert_eq!(last(&[zebra]), zebra.lines().next().unwrap());
        assert_eq!(last(&["Error: one\n", "ERROR: two\nusage"]), "ERROR: two");
        assert_eq!(last(&["cannot\n", &"usage\n".repeat(LINES_KEPT - 1)]), "cannot");
        assert_eq!(last(&["cannot\n", &"usage\n".repeat(LINES_KEPT)]), "usage");
    }

    #[test]
    fn endless_line_is_bounded() {
        let mut line = LastLines::default();
        for _ in 0..1000 {
            line.take("é".repeat(100).as_bytes());
        }
        assert!(line.summary().len() <= WORDS_BYTES_MAX && line.summary().starts_with("éé"));
        assert!(line.partial_line.capacity() <= 2 * WORDS_BYTES_MAX);
        line.take(&b"x\n".repeat(1000));
        assert_eq!(line.lines.len(), LINES_KEPT);
    }
}
