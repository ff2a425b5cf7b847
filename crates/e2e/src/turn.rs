//! Scheduling of the tests of one program: which run at the same time.
//!
//! Most tests mostly wait, and run [`beside`] each other, as many as libtest has threads
//! (`--test-threads`). A test calls [`alone`] in its first line if the load of others could make it
//! fail, and then runs while no other does. Such tests assert a rate, a share of a CPU, a time, or
//! no loss at a rate that takes much of the machine.
//!
//! A test that waits to run alone does not block tests beside others. So a thread may hold several
//! permits without ever waiting for itself. Tests that run alone should come first
//! (`tests/e2e/main.rs`), or threads of libtest stay idle.

use std::io::Write as _;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};
use std::time::Instant;

/// Running tests.
struct RunningTests {
    /// Permits beside others.
    beside: usize,
    /// Thread that runs alone. Its own permits beside others are part of that.
    alone: Option<ThreadId>,
}

static RUNNING: Mutex<RunningTests> = Mutex::new(RunningTests { beside: 0, alone: None });
static CHANGED: Condvar = Condvar::new();

/// Permit to run, returned when dropped. A test's permit then writes its duration to standard
/// error, past libtest, for the summary of `scripts/test`.
#[derive(Debug)]
#[must_use = "the permit ends when it is dropped"]
pub struct TestPermit {
    kind: PermitKind,
    since: Instant,
}

#[derive(Debug)]
enum PermitKind {
    Alone,
    Beside,
    /// Held by the thread that runs alone.
    Within,
}

/// Waits until no test runs, and keeps all others waiting. The thread that called this starts the
/// [`TestNode`](crate::TestNode)s of such a test.
pub fn alone() -> TestPermit {
    let mut running = wait_while(|running| running.beside > 0 || running.alone.is_some());
    running.alone = Some(thread::current().id());
    TestPermit::new(PermitKind::Alone)
}

/// Waits until no other test is alone. Every [`TestNode`](crate::TestNode)
/// calls this, so only tests without a node need to.
pub fn beside() -> TestPermit {
    let own = Some(thread::current().id());
    let mut running = wait_while(|running| running.alone.is_some() && running.alone != own);
    if running.alone.is_some() {
        return TestPermit::new(PermitKind::Within);
    }
    running.beside += 1;
    TestPermit::new(PermitKind::Beside)
}

fn wait_while(must_wait: impl Fn(&RunningTests) -> bool) -> MutexGuard<'static, RunningTests> {
    // A test that panicked has returned its permit as well.
    let running = RUNNING.lock().unwrap_or_else(PoisonError::into_inner);
    CHANGED
        .wait_while(running, |running| must_wait(running))
        .unwrap_or_else(PoisonError::into_inner)
}

impl TestPermit {
    fn new(kind: PermitKind) -> Self {
        Self { kind, since: Instant::now() }
    }

    /// libtest names each test's thread after the test.
    fn report_duration(&self) {
        let thread = thread::current();
        let name = thread.name().filter(|name| name.contains("::"));
        if let Some(name) = name.filter(|_| !matches!(self.kind, PermitKind::Within)) {
            let line = format!("turn: {name} took {:.1} s\n", self.since.elapsed().as_secs_f64());
            // Nobody may read it any more.
            let _ = std::io::stderr().write_all(line.as_bytes());
        }
    }
}

impl Drop for TestPermit {
    fn drop(&mut self) {
        self.report_duration();
        let mut running = RUNNING.lock().unwrap_or_else(PoisonError::into_inner);
        match self.kind {
            PermitKind::Alone => running.alone = None,
            PermitKind::Beside => running.beside -= 1,
            PermitKind::Within => {}
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
    fn exclusive_tests_run_alone_and_others_together() {
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
