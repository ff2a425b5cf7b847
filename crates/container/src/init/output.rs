//! Passes the output of commands on to the guest's log, and keeps the last lines of each command.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::fchown;
use std::process::Stdio;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::OFlags;
use rustix::pipe::{PipeFlags, pipe_with};

use crate::status::{WORDS_BYTES_MAX, tame};

/// Bytes that are passed on at once: no more than a pipe that polls writable takes without a wait.
const CHUNK_BYTES_MAX: usize = 4096;

/// Lines of what comes that are kept.
const LINES_KEPT: usize = 8;

/// Words, in small letters, of a line that says what is wrong. What follows it is often a detail of that, or how to
/// call the program.
const FAULTS: [&str; 9] =
    ["error", "fail", "fatal", "denied", "cannot", "can't", "unable", "not permitted", "invalid"];

/// The last lines that are not blank, of what comes.
#[derive(Default)]
pub(crate) struct LastLines {
    lines: VecDeque<String>,
    /// The line that has begun; only its beginning is kept.
    begun: Vec<u8>,
}

impl LastLines {
    pub fn take(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            match byte {
                b'\n' | b'\r' => self.end_line(),
                _ if self.begun.len() < WORDS_BYTES_MAX => self.begun.push(byte),
                _ => {}
            }
        }
    }

    fn end_line(&mut self) {
        let line = tame(&String::from_utf8_lossy(&self.begun), WORDS_BYTES_MAX);
        self.begun.clear();
        if !line.is_empty() {
            self.lines.truncate(LINES_KEPT - 1);
            self.lines.push_front(line);
        }
    }

    /// The last line that says what is wrong, or else the last one: at most [`WORDS_BYTES_MAX`] bytes without control
    /// characters; empty where nothing came.
    pub fn words(&self) -> String {
        let begun = tame(&String::from_utf8_lossy(&self.begun), WORDS_BYTES_MAX);
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

/// A pipe that a process writes to.
pub(super) struct Output {
    read: File,
    /// For processes to come, of a command; those of a check have one each.
    write: OwnedFd,
    pub last: LastLines,
}

impl Output {
    pub fn new() -> io::Result<Self> {
        let (read, write) = pipe_with(PipeFlags::CLOEXEC)?;
        // This end alone: who writes waits as for any pipe.
        rustix::fs::fcntl_setfl(&read, OFlags::NONBLOCK)?;
        Ok(Self { read: read.into(), write, last: LastLines::default() })
    }

    /// Its other end.
    pub fn end(&self) -> io::Result<Stdio> {
        Ok(self.write.try_clone()?.into())
    }

    /// Makes it somebody's, who can so open it by its name (`/dev/stdout`).
    pub fn give(&self, uid: u32, gid: u32) -> io::Result<()> {
        fchown(&self.write, Some(uid), Some(gid))
    }

    /// Keeps what is there, up to a bound, and shows it to nobody else.
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

/// Passes on what commands write to standard error, without ever waiting for who reads it.
#[derive(Default)]
pub(super) struct Forwarder {
    /// What was read and waits.
    chunk: Vec<u8>,
}

impl Forwarder {
    /// Whether it takes more.
    pub fn is_free(&self) -> bool {
        self.chunk.is_empty()
    }

    /// Reads from `output`, and passes on what it can.
    pub fn take(&mut self, output: &mut Output) {
        let mut buffer = [0; CHUNK_BYTES_MAX];
        if let Ok(count @ 1..) = output.read.read(&mut buffer) {
            output.last.take(&buffer[..count]);
            self.chunk = buffer[..count].to_vec();
            self.pass_on();
        }
    }

    /// Tries to pass on what waits.
    pub fn pass_on(&mut self) {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let mut log = io::stderr();
        let ready = poll(&mut [PollFd::new(&log, PollFlags::OUT)], Some(&now)) == Ok(1);
        if ready && !self.chunk.is_empty() {
            // Where nobody reads any more it is lost, and the guest about to be ended.
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
        line.words()
    }

    #[test]
    fn the_last_line_is_the_last_that_says_something() {
        assert_eq!(last(&[]), "");
        assert_eq!(last(&["one\ntwo\n"]), "two");
        assert_eq!(last(&["one\ntw", "o"]), "two");
        assert_eq!(last(&["one\n", "\n  \r\n"]), "one");
        assert_eq!(last(&["\u{1b}[31mred\u{7}\n"]), "[31mred");
    }

    #[test]
    fn a_line_that_says_what_is_wrong_comes_before_those_behind_it() {
        let zebra = "privs_init: initial cap_set_proc failed: Operation not permitted\n\
                     Wanted caps: cap_net_admin=p\nHave   caps: =p\n";
        assert_eq!(last(&[zebra]), zebra.lines().next().unwrap());
        assert_eq!(last(&["Error: one\n", "ERROR: two\nusage"]), "ERROR: two");
        assert_eq!(last(&["cannot\n", &"usage\n".repeat(LINES_KEPT - 1)]), "cannot");
        assert_eq!(last(&["cannot\n", &"usage\n".repeat(LINES_KEPT)]), "usage");
    }

    #[test]
    fn a_line_without_end_is_bounded() {
        let mut line = LastLines::default();
        for _ in 0..1000 {
            line.take("é".repeat(100).as_bytes());
        }
        assert!(line.words().len() <= WORDS_BYTES_MAX && line.words().starts_with("éé"));
        assert!(line.begun.capacity() <= 2 * WORDS_BYTES_MAX);
        line.take(&b"x\n".repeat(1000));
        assert_eq!(line.lines.len(), LINES_KEPT);
    }
}
