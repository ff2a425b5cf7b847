//! Waits with a deadline and a reason, and the signals that end them.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use signal_hook::consts::{SIGINT, SIGTERM};

/// Longest wait of [`eventually`].
pub const EVENTUALLY_MAX: Duration = Duration::from_secs(60);

/// Pause between two checks of [`eventually`].
pub const POLL_PAUSE: Duration = Duration::from_millis(50);

/// Polls until `done`; panics after [`EVENTUALLY_MAX`].
#[track_caller]
pub fn eventually(what: &str, mut done: impl FnMut() -> bool) {
    let end = Instant::now() + EVENTUALLY_MAX;
    while !done() {
        assert!(Instant::now() < end, "not within {EVENTUALLY_MAX:?}: {what}");
        std::thread::sleep(POLL_PAUSE);
    }
}

/// Repeats `attempt` until it succeeds, with pauses, and returns its result. After `limit`, and
/// once this program is [`interrupted`], it fails: the last error tells what is missing.
pub fn retry<T>(
    limit: Duration,
    pause: Duration,
    what: &str,
    mut attempt: impl FnMut() -> Result<T>,
) -> Result<T> {
    let end = Instant::now() + limit;
    loop {
        match attempt() {
            Ok(result) => return Ok(result),
            Err(error) if Instant::now() > end => {
                return Err(error.context(format!("{what}: not within {} s", limit.as_secs())));
            }
            Err(_) if interrupted() => bail!("{what}: interrupted"),
            Err(_) => std::thread::sleep(pause),
        }
    }
}

/// Set once this program received SIGINT or SIGTERM.
static INTERRUPTED: OnceLock<Arc<AtomicBool>> = OnceLock::new();

/// Makes SIGINT and SIGTERM end a run in order, so that nothing of it is left behind.
pub fn end_on_signals() -> Result<()> {
    let flag = INTERRUPTED.get_or_init(Arc::default);
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, flag.clone())?;
    }
    Ok(())
}

/// True if this program received SIGINT or SIGTERM since [`end_on_signals`].
pub fn interrupted() -> bool {
    INTERRUPTED.get().is_some_and(|flag| flag.load(Ordering::Relaxed))
}

#[cfg(test)]
mod tests {
    use anyhow::ensure;

    use super::*;

    #[test]
    fn waits_end_with_the_first_success_or_the_last_error() {
        let mut tries = 0;
        let mut wait = |needed, limit| {
            tries = 0;
            retry(limit, Duration::ZERO, "it", || {
                tries += 1;
                ensure!(tries >= needed, "try {tries} is not enough");
                Ok(tries)
            })
        };
        assert_eq!(wait(3, Duration::from_secs(60)).unwrap(), 3);
        let error = format!("{:#}", wait(u64::MAX, Duration::from_millis(5)).unwrap_err());
        assert!(error.starts_with("it: not within 0 s: try "), "{error}");
    }
}
