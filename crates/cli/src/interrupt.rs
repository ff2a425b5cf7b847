//! Interrupts (Ctrl-C).

use std::process::ExitCode;

use tokio::signal::unix::{SignalKind, signal};

use crate::failure::CliFailure;

/// Runs `work` until it ends, or until an interrupt (Ctrl-C) ends it successfully. The signal is
/// caught from start to end, so that no interrupt is missed between two waits.
pub async fn until_interrupted(
    work: impl Future<Output = Result<ExitCode, CliFailure>>,
) -> Result<ExitCode, CliFailure> {
    let mut interrupt = signal(SignalKind::interrupt())?;
    tokio::select! {
        ended = work => ended,
        _ = interrupt.recv() => Ok(ExitCode::SUCCESS),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use nix::sys::signal::{Signal, raise};

    use super::*;

    #[tokio::test]
    async fn interrupt_between_two_waits_is_noticed() {
        let work = async {
            tokio::time::sleep(Duration::from_millis(1)).await;
            raise(Signal::SIGINT).unwrap();
            loop {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        let ended = tokio::time::timeout(Duration::from_secs(20), until_interrupted(work)).await;
        assert_eq!(ended.unwrap().ok(), Some(ExitCode::SUCCESS));
    }
}
