//! Readers of a supervised process's pipes. They never block, and limit the bytes per second.

use std::fs::File;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use crate::error::Result;
use crate::status::{CommandStatuses, GuestCommandStatus, WORDS_BYTES_MAX, sanitize};
use crate::store::RecordStore;

/// Largest amount of status reports of a guest, bytes per second. Beyond that, the guest waits.
pub const TOLD_BYTES_PER_SECOND_MAX: u64 = 1 << 15;

/// Shortest time between two writes of the commands' status.
pub const TOLD_PAUSE: Duration = Duration::from_millis(100);

/// Bytes to read at once.
const READ_BYTES_MAX: usize = 1 << 16;

/// Consumer of a pipe's bytes.
pub(super) trait OutputSink {
    /// Largest rate, bytes per second.
    const BYTES_PER_SECOND_MAX: u64;

    fn consume(&mut self, bytes: &[u8]);
}

/// Read end of a pipe, and its consumer.
pub(super) struct OutputReader<H> {
    /// `None` once the other end is closed.
    pipe: Option<File>,
    budget: ReadBudget,
    pub sink: H,
}

impl<H: OutputSink> OutputReader<H> {
    pub fn new(pipe: OwnedFd, hearer: H) -> Self {
        Self {
            pipe: Some(pipe.into()),
            budget: ReadBudget::new(H::BYTES_PER_SECOND_MAX),
            sink: hearer,
        }
    }

    /// Returns the pipe to poll if reading is permitted now. If not, adds the time until then to
    /// `timeouts`.
    pub fn listens(&mut self, timeouts: &mut Vec<Duration>) -> Option<PollFd<'_>> {
        let pause = self.budget.pause();
        timeouts.extend(pause);
        let pipe = self.pipe.as_ref().filter(|_| pause.is_none())?;
        Some(PollFd::new(pipe, PollFlags::IN))
    }

    /// Reads once from the pipe.
    pub fn read(&mut self) {
        let mut buffer = [0; READ_BYTES_MAX];
        match self.pipe.as_mut().map_or(Ok(0), |pipe| pipe.read(&mut buffer)) {
            Ok(0) | Err(_) => self.pipe = None,
            Ok(count) => {
                self.sink.consume(&buffer[..count]);
                self.budget.spend(count);
            }
        }
    }
}

/// Bytes that may still be read in the current second.
struct ReadBudget {
    since: Instant,
    spent: u64,
    max: u64,
}

impl ReadBudget {
    fn new(max: u64) -> Self {
        Self { since: Instant::now(), spent: 0, max }
    }

    fn spend(&mut self, count: usize) {
        self.spent += count as u64;
    }

    /// Returns the pause before more may be read.
    fn pause(&mut self) -> Option<Duration> {
        let second = Duration::from_secs(1);
        let passed = self.since.elapsed();
        if passed >= second {
            *self = Self::new(self.max);
        }
        (self.spent >= self.max).then(|| second.saturating_sub(passed))
    }
}

/// Writes the commands' status into a file of the guest's directory.
pub(super) struct StatusRecorder {
    dir: PathBuf,
    statuses: CommandStatuses,
    shortage: Shortage,
    /// Time of the last write.
    at: Instant,
    changed: bool,
}

impl StatusRecorder {
    /// Begins with commands that are not started. `kills` returns the number of the guest's
    /// processes that the kernel has killed for lack of memory.
    pub fn new(dir: &Path, commands: usize, kills: impl Fn() -> u64 + 'static) -> Result<Self> {
        let statuses = CommandStatuses::new(commands);
        RecordStore(dir).set_commands(statuses.commands())?;
        let shortage = Shortage::new(statuses.commands(), Box::new(kills));
        Ok(Self { dir: dir.to_owned(), statuses, shortage, at: Instant::now(), changed: false })
    }

    /// Writes changes. If it is too early, returns the time to wait.
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
            let _ = RecordStore(&self.dir)
                .set_commands(&self.shortage.annotate(self.statuses.commands()));
        }
    }
}

impl OutputSink for StatusRecorder {
    const BYTES_PER_SECOND_MAX: u64 = TOLD_BYTES_PER_SECOND_MAX;

    fn consume(&mut self, bytes: &[u8]) {
        if self.statuses.read(bytes) {
            self.changed = true;
            self.shortage.note_ended(self.statuses.commands());
        }
    }
}

/// Finds out which commands ended for lack of memory. Process 1 only sees a signal. The kernel's
/// count, in turn, is not visible to process 1.
struct Shortage {
    kills: Box<dyn Fn() -> u64>,
    /// Number of kills counted so far.
    seen: u64,
    /// Last text about each command, and true if it ended for lack of memory.
    commands: Vec<(String, bool)>,
}

impl Shortage {
    fn new(commands: &[GuestCommandStatus], kills: Box<dyn Fn() -> u64>) -> Self {
        let commands = commands.iter().map(|status| (status.words.clone(), false)).collect();
        Self { kills, seen: 0, commands }
    }

    /// Notes commands that have ended since the last call.
    fn note_ended(&mut self, statuses: &[GuestCommandStatus]) {
        let mut kills = None;
        for ((words, is_short), status) in self.commands.iter_mut().zip(statuses) {
            if *words == status.words {
                continue;
            }
            words.clone_from(&status.words);
            *is_short = KILLED.iter().any(|end| words.starts_with(end))
                && *kills.get_or_insert_with(|| (self.kills)()) > self.seen;
        }
        self.seen = kills.unwrap_or(self.seen);
    }

    /// Returns the commands' status, with the lack of memory added.
    fn annotate(&self, statuses: &[GuestCommandStatus]) -> Vec<GuestCommandStatus> {
        let mut statuses = statuses.to_vec();
        for (status, (_, is_short)) in statuses.iter_mut().zip(&self.commands) {
            if let Some(end) =
                KILLED.iter().find(|end| *is_short && status.words.starts_with(**end))
            {
                let words = format!("{end}{OUT_OF_MEMORY}{}", &status.words[end.len()..]);
                status.words = sanitize(&words, WORDS_BYTES_MAX);
            }
        }
        statuses
    }
}

/// Texts of process 1 about a command that was killed, or a shell whose child was killed.
const KILLED: [&str; 2] = ["ended by signal 9", "ended with code 137"];

const OUT_OF_MEMORY: &str = ", out of memory (resources.memory)";

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::rc::Rc;

    use super::*;

    #[test]
    fn memory_kill_is_attributed_to_its_command() {
        let kills = Rc::new(Cell::new(0));
        let counted = Rc::clone(&kills);
        let statuses = |words: [&str; 2]| {
            words.map(|words| GuestCommandStatus {
                words: words.into(),
                ..GuestCommandStatus::default()
            })
        };
        let mut shortage = Shortage::new(&statuses(["", ""]), Box::new(move || counted.get()));
        let mut annotated = |words: [&str; 2]| {
            shortage.note_ended(&statuses(words));
            shortage
                .annotate(&statuses(words))
                .into_iter()
                .map(|status| status.words)
                .collect::<Vec<_>>()
        };
        assert_eq!(annotated(["ended by signal 9: by hand", ""])[0], "ended by signal 9: by hand");
        kills.set(1);
        let short = "ended by signal 9, out of memory (resources.memory): bytes";
        let killed = ["ended with code 1", "ended by signal 9: bytes"];
        assert_eq!(annotated(killed), ["ended with code 1", short]);
        let long = format!("ended by signal 9: {}", "x".repeat(WORDS_BYTES_MAX));
        assert_eq!(annotated([&long, killed[1]]), [long.clone(), short.to_owned()], "counted once");
        kills.set(2);
        let annotated = annotated(["", "ended with code 137"]);
        assert_eq!(annotated[1], "ended with code 137, out of memory (resources.memory)");
    }
}
