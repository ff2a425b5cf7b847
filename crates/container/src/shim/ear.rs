//! What a shim hears of its process: pipes that are read without waiting, and so many bytes a second.

use std::fs::File;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use crate::error::Result;
use crate::status::{Board, CommandStatus, WORDS_BYTES_MAX, tame};
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
    shortage: Shortage,
    /// When it was written.
    at: Instant,
    changed: bool,
}

impl Keeper {
    /// None of the commands is started.
    /// `kills` returns how many processes of the guest the kernel has killed for want of memory.
    pub fn new(dir: &Path, commands: usize, kills: impl Fn() -> u64 + 'static) -> Result<Self> {
        let board = Board::new(commands);
        Store(dir).set_commands(board.commands())?;
        let shortage = Shortage::new(board.commands(), Box::new(kills));
        Ok(Self { dir: dir.to_owned(), board, shortage, at: Instant::now(), changed: false })
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
            let _ = Store(&self.dir).set_commands(&self.shortage.tell(self.board.commands()));
        }
    }
}

impl Hearer for Keeper {
    const BYTES_PER_SECOND_MAX: u64 = TOLD_BYTES_PER_SECOND_MAX;

    fn take(&mut self, bytes: &[u8]) {
        if self.board.take(bytes) {
            self.changed = true;
            self.shortage.look(self.board.commands());
        }
    }
}

/// Knows which commands ended when memory was short: process 1 sees a signal alone, and the kernel counts where process
/// 1 sees nothing.
struct Shortage {
    kills: Box<dyn Fn() -> u64>,
    /// As many were counted before.
    seen: u64,
    /// Last status of each command, and true if it ended for lack of memory.
    commands: Vec<(String, bool)>,
}

impl Shortage {
    fn new(commands: &[CommandStatus], kills: Box<dyn Fn() -> u64>) -> Self {
        let commands = commands.iter().map(|status| (status.words.clone(), false)).collect();
        Self { kills, seen: 0, commands }
    }

    /// Takes note of commands that have ended since the last look.
    fn look(&mut self, told: &[CommandStatus]) {
        let mut kills = None;
        for ((words, is_short), status) in self.commands.iter_mut().zip(told) {
            if *words == status.words {
                continue;
            }
            words.clone_from(&status.words);
            *is_short = KILLED.iter().any(|end| words.starts_with(end))
                && *kills.get_or_insert_with(|| (self.kills)()) > self.seen;
        }
        self.seen = kills.unwrap_or(self.seen);
    }

    /// Returns the commands' states, with the lack of memory added.
    fn tell(&self, told: &[CommandStatus]) -> Vec<CommandStatus> {
        let mut told = told.to_vec();
        for (status, (_, is_short)) in told.iter_mut().zip(&self.commands) {
            if let Some(end) =
                KILLED.iter().find(|end| *is_short && status.words.starts_with(**end))
            {
                let words = format!("{end}{OUT_OF_MEMORY}{}", &status.words[end.len()..]);
                status.words = tame(&words, WORDS_BYTES_MAX);
            }
        }
        told
    }
}

/// Words of process 1 about a command that was killed, or that exited as a shell whose child was killed.
const KILLED: [&str; 2] = ["ended by signal 9", "ended with code 137"];

const OUT_OF_MEMORY: &str = ", out of memory (resources.memory)";

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::rc::Rc;

    use super::*;

    #[test]
    fn who_was_killed_when_memory_was_short_is_told() {
        let kills = Rc::new(Cell::new(0));
        let counted = Rc::clone(&kills);
        let said = |words: [&str; 2]| {
            words.map(|words| CommandStatus { words: words.into(), ..CommandStatus::default() })
        };
        let mut shortage = Shortage::new(&said(["", ""]), Box::new(move || counted.get()));
        let mut told = |words: [&str; 2]| {
            shortage.look(&said(words));
            shortage.tell(&said(words)).into_iter().map(|status| status.words).collect::<Vec<_>>()
        };
        assert_eq!(told(["ended by signal 9: by hand", ""])[0], "ended by signal 9: by hand");
        kills.set(1);
        let short = "ended by signal 9, out of memory (resources.memory): bytes";
        let killed = ["ended with code 1", "ended by signal 9: bytes"];
        assert_eq!(told(killed), ["ended with code 1", short]);
        let long = format!("ended by signal 9: {}", "x".repeat(WORDS_BYTES_MAX));
        assert_eq!(told([&long, killed[1]]), [long.clone(), short.to_owned()], "counted once");
        kills.set(2);
        let told = told(["", "ended with code 137"]);
        assert_eq!(told[1], "ended with code 137, out of memory (resources.memory)");
    }
}
