//! Restart delays for objects that keep ending.

use std::time::{Duration, Instant};

/// Pause after the first failure; doubles with each further one.
const PAUSE_MIN: Duration = Duration::from_millis(200);

/// Longest pause.
const PAUSE_MAX: Duration = Duration::from_secs(30);

/// A run of at least this length is no failure.
const GOOD_RUN: Duration = Duration::from_secs(10);

/// Starts and failures of one object. After a run of [`GOOD_RUN`] a restart is immediate.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Backoff {
    started: Option<Instant>,
    failures: u32,
    not_before: Option<Instant>,
}

impl Backoff {
    /// Records a start. If the previous start was recent, the next one has to wait.
    pub fn started(&mut self, now: Instant) {
        // Time spent waiting does not count as a run.
        let before = self.started.max(self.not_before);
        let lately = before.is_some_and(|before| now.saturating_duration_since(before) < GOOD_RUN);
        self.started = Some(now);
        self.not_before = None;
        if lately {
            self.pause(now);
        } else {
            self.failures = 0;
        }
    }

    /// Records a failed start. Returns the time of the next attempt.
    pub fn failed(&mut self, now: Instant) -> Instant {
        self.pause(now)
    }

    fn pause(&mut self, now: Instant) -> Instant {
        let pause = PAUSE_MIN.saturating_mul(1 << self.failures.min(16)).min(PAUSE_MAX);
        self.failures = self.failures.saturating_add(1);
        self.not_before = Some(now + pause);
        now + pause
    }

    /// True if the object has to wait.
    pub fn waits(&self, now: Instant) -> bool {
        self.waits_until(now).is_some()
    }

    /// Returns when the wait ends, if the object has to wait.
    pub fn waits_until(&self, now: Instant) -> Option<Instant> {
        self.not_before.filter(|&at| now < at)
    }

    /// Ends the wait.
    pub fn forgive(&mut self) {
        self.not_before = None;
        self.failures = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crash_loop_backs_off_to_the_maximum() {
        let mut backoff = Backoff::default();
        let mut now = Instant::now();
        backoff.started(now);
        assert!(!backoff.waits(now), "the first restart is immediate");
        let mut pauses = Vec::new();
        for _ in 0..12 {
            backoff.started(now);
            let end = backoff.waits_until(now).unwrap();
            pauses.push(end - now);
            assert!(backoff.waits(now));
            now = end;
            assert!(!backoff.waits(now));
        }
        assert_eq!(pauses[0], PAUSE_MIN);
        assert!(pauses.is_sorted());
        assert_eq!(*pauses.last().unwrap(), PAUSE_MAX);
    }

    #[test]
    fn long_run_resets_the_backoff() {
        let mut backoff = Backoff::default();
        let now = Instant::now();
        backoff.started(now);
        backoff.started(now);
        assert!(backoff.waits(now));
        let later = now + GOOD_RUN * 4;
        backoff.started(later);
        assert!(!backoff.waits(later));
        backoff.started(later);
        assert_eq!(backoff.waits_until(later), Some(later + PAUSE_MIN));
    }
}
