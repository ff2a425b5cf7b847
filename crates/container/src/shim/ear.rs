//! What a shim hears of its process: pipes that are read without waiting, and so many bytes a second.

use std::fs::File;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use crate::error::Result;
use crate::status::Board;
use crate::store::Store;

/// What a guest may tell of its commands. Who tells more waits.
pub const TOLD_BYTES_PER_SECOND_MAX: u64 = 1 << 15;

/// Shortest time between two writings of how commands are.
pub const TOLD_PAUSE: Duration = Duration::from_millis(100);

/// Bytes that are read at once.
const READ_BYTES_MAX: usize = 1 << 16;

/// Who keeps what is heard.
pub(super) trait Hearer {
    /// Bytes a second.
    const BYTES_PER_SECOND_MAX: u64;

    fn take(&mut self, bytes: &[u8]);
}

/// The end of a pipe, and who keeps what comes.
pub(super) struct Ear<H> {
    /// `None` once nobody has its other end.
    pipe: Option<File>,
    budget: Budget,
    pub hearer: H,
}

impl<H: Hearer> Ear<H> {
    pub fn new(pipe: OwnedFd, hearer: H) -> Self {
        Self { pipe: Some(pipe.into()), budget: Budget::new(H::BYTES_PER_SECOND_MAX), hearer }
    }

    /// What to wait for, if it may be heard now; else the time until then is put to `timeouts`.
    pub fn listens(&mut self, timeouts: &mut Vec<Duration>) -> Option<PollFd<'_>> {
        let pause = self.budget.pause();
        timeouts.extend(pause);
        let pipe = self.pipe.as_ref().filter(|_| pause.is_none())?;
        Some(PollFd::new(pipe, PollFlags::IN))
    }

    /// Reads what is there, once.
    pub fn hear(&mut self) {
        let mut buffer = [0; READ_BYTES_MAX];
        match self.pipe.as_mut().map_or(Ok(0), |pipe| pipe.read(&mut buffer)) {
            Ok(0) | Err(_) => self.pipe = None,
            Ok(count) => {
                self.hearer.take(&buffer[..count]);
                self.budget.spend(count);
            }
        }
    }
}

/// What may be heard in the current second.
struct Budget {
    since: Instant,
    spent: u64,
    max: u64,
}

impl Budget {
    fn new(max: u64) -> Self {
        Self { since: Instant::now(), spent: 0, max }
    }

    fn spend(&mut self, count: usize) {
        self.spent += count as u64;
    }

    /// How long to wait before more.
    fn pause(&mut self) -> Option<Duration> {
        let second = Duration::from_secs(1);
        let passed = self.since.elapsed();
        if passed >= second {
            *self = Self::new(self.max);
        }
        (self.spent >= self.max).then(|| second.saturating_sub(passed))
    }
}

/// Keeps how commands are, in a file of the guest's directory.
pub(super) struct Keeper {
    dir: PathBuf,
    board: Board,
    /// When it was written.
    at: Instant,
    changed: bool,
}

impl Keeper {
    /// None of the commands is started.
    pub fn new(dir: &Path, commands: usize) -> Result<Self> {
        let board = Board::new(commands);
        Store(dir).set_commands(board.commands())?;
        Ok(Self { dir: dir.to_owned(), board, at: Instant::now(), changed: false })
    }

    /// Writes down what changed; if it is too early for that, how long to wait.
    pub fn write_if_due(&mut self) -> Option<Duration> {
        let left = TOLD_PAUSE.saturating_sub(self.at.elapsed());
        if self.changed && left.is_zero() {
            self.write();
        }
        self.changed.then_some(left)
    }

    pub fn write(&mut self) {
        if self.changed {
            self.at = Instant::now();
            self.changed = false;
            // The directory may be gone if the guest is being removed.
            let _ = Store(&self.dir).set_commands(self.board.commands());
        }
    }
}

impl Hearer for Keeper {
    const BYTES_PER_SECOND_MAX: u64 = TOLD_BYTES_PER_SECOND_MAX;

    fn take(&mut self, bytes: &[u8]) {
        self.changed |= self.board.take(bytes);
    }
}
