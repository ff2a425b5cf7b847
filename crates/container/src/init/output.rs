//! What commands write: passed on to the guest's log, with the last line of each kept.

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

/// The last line that is not blank, of what comes.
#[derive(Default)]
pub(super) struct LastLine {
    last: String,
    /// The line that has begun; only its beginning is kept.
    begun: Vec<u8>,
}

impl LastLine {
    pub fn take(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            match byte {
                b'\n' | b'\r' => {
                    self.last = self.words();
                    self.begun.clear();
                }
                _ if self.begun.len() < WORDS_BYTES_MAX => self.begun.push(byte),
                _ => {}
            }
        }
    }

    /// At most [`WORDS_BYTES_MAX`] bytes without control characters; empty where nothing came.
    pub fn words(&self) -> String {
        let begun = tame(&String::from_utf8_lossy(&self.begun), WORDS_BYTES_MAX);
        if begun.is_empty() { self.last.clone() } else { begun }
    }
}

/// A pipe that a process writes to.
pub(super) struct Output {
    read: File,
    /// For processes to come, of a command; those of a check have one each.
    write: OwnedFd,
    pub last: LastLine,
}

impl Output {
    pub fn new() -> io::Result<Self> {
        let (read, write) = pipe_with(PipeFlags::CLOEXEC)?;
        // This end alone: who writes waits as for any pipe.
        rustix::fs::fcntl_setfl(&read, OFlags::NONBLOCK)?;
        Ok(Self { read: read.into(), write, last: LastLine::default() })
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
        let mut line = LastLine::default();
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
    fn a_line_without_end_is_bounded() {
        let mut line = LastLine::default();
        for _ in 0..1000 {
            line.take("é".repeat(100).as_bytes());
        }
        assert!(line.words().len() <= WORDS_BYTES_MAX && line.words().starts_with("éé"));
        assert!(line.begun.capacity() <= 2 * WORDS_BYTES_MAX);
    }
}
