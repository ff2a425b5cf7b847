//! Whose turn it is: which tests of one program run at the same time.
//!
//! Most tests wait for most of their time, and run [`beside`] each other, as many as libtest has threads
//! (`--test-threads`). One whose assertions a neighbour's load could fail says [`alone`] in its first line,
//! and runs while no other does: what it asserts is a rate, a share of a CPU, a time, or that nothing
//! is lost at a rate which takes much of the machine.
//!
//! Who waits for a turn to be alone keeps nobody from one beside others. So a thread may have several
//! turns without ever waiting for itself, and tests that run alone should come first
//! (`tests/e2e/main.rs`), or threads of libtest stand still.

use std::io::Write as _;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};
use std::time::Instant;

/// Who runs.
struct Running {
    /// Turns beside others.
    beside: usize,
    /// The thread that is alone; its own turns beside others are part of that.
    alone: Option<ThreadId>,
}

static RUNNING: Mutex<Running> = Mutex::new(Running { beside: 0, alone: None });
static CHANGED: Condvar = Condvar::new();

/// A turn; the next one comes when it is dropped. That of a test says then how long it was, on standard error
/// past libtest, for the summary of `scripts/test`.
#[derive(Debug)]
#[must_use = "the turn ends when it is dropped"]
pub struct Turn {
    kind: Kind,
    since: Instant,
}

#[derive(Debug)]
enum Kind {
    Alone,
    Beside,
    /// Of the thread that is alone.
    Within,
}

/// Waits until no test runs, and keeps all others waiting. [`Node`](crate::Node)s of such a test are
/// started by the thread that called this.
pub fn alone() -> Turn {
    let mut running = wait_while(|running| running.beside > 0 || running.alone.is_some());
    running.alone = Some(thread::current().id());
    Turn::new(Kind::Alone)
}

/// Waits until no other test is alone. Every [`Node`](crate::Node) has such a turn, so that only tests without
/// one call this.
pub fn beside() -> Turn {
    let own = Some(thread::current().id());
    let mut running = wait_while(|running| running.alone.is_some() && running.alone != own);
    if running.alone.is_some() {
        return Turn::new(Kind::Within);
    }
    running.beside += 1;
    Turn::new(Kind::Beside)
}

fn wait_while(must_wait: impl Fn(&Running) -> bool) -> MutexGuard<'static, Running> {
    // A test that panicked gave its turn back as well.
    let running = RUNNING.lock().unwrap_or_else(PoisonError::into_inner);
    CHANGED
        .wait_while(running, |running| must_wait(running))
        .unwrap_or_else(PoisonError::into_inner)
}

impl Turn {
    fn new(kind: Kind) -> Self {
        Self { kind, since: Instant::now() }
    }

    /// libtest names a test's thread after it.
    fn tell(&self) {
        let thread = thread::current();
        let name = thread.name().filter(|name| name.contains("::"));
        if let Some(name) = name.filter(|_| !matches!(self.kind, Kind::Within)) {
            let line = format!("turn: {name} took {:.1} s\n", self.since.elapsed().as_secs_f64());
            // Nobody may read it any more.
            let _ = std::io::stderr().write_all(line.as_bytes());
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.tell();
        let mut running = RUNNING.lock().unwrap_or_else(PoisonError::into_inner);
        match self.kind {
            Kind::Alone => running.alone = None,
            Kind::Beside => running.beside -= 1,
            Kind::Within => {}
        }
        CHANGED.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::time::Duration;

    use super::*;

    #[test]
    fn who_is_alone_has_no_neighbour_and_the_others_have() {
        let (neighbours, most) = (AtomicU32::new(0), AtomicU32::new(0));
        let stay = || std::thread::sleep(Duration::from_millis(5));
        thread::scope(|scope| {
            for number in 0..40 {
                let (neighbours, most) = (&neighbours, &most);
                scope.spawn(move || {
                    if number % 4 == 0 {
                        let _alone = alone();
                        let _node = beside();
                        assert_eq!(neighbours.fetch_add(1, Ordering::SeqCst), 0);
                        stay();
                        assert_eq!(neighbours.fetch_sub(1, Ordering::SeqCst), 1);
                    } else {
                        let _nodes = [beside(), beside()];
                        most.fetch_max(neighbours.fetch_add(1, Ordering::SeqCst), Ordering::SeqCst);
                        stay();
                        neighbours.fetch_sub(1, Ordering::SeqCst);
                    }
                });
            }
        });
        assert!(most.load(Ordering::SeqCst) > 0, "none ran beside another");
    }
}
