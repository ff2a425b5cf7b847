//! Work inside another network namespace.

use std::os::fd::BorrowedFd;
use std::thread;

use nix::sched::{CloneFlags, setns};

use crate::error::{Context, Error, Result};

/// Runs `work` inside a network namespace, in a thread of its own, so that the caller's namespace
/// never changes.
pub fn within<T: Send>(
    netns: BorrowedFd<'_>,
    work: impl FnOnce() -> Result<T> + Send,
) -> Result<T> {
    thread::scope(|scope| {
        let worker = scope.spawn(|| {
            setns(netns, CloneFlags::CLONE_NEWNET).on("enter", "a network namespace")?;
            work()
        });
        worker.join().unwrap_or_else(|_| {
            Err(Error::Invalid {
                object: "work in a network namespace".into(),
                text: "panicked; this is a bug in PdP".into(),
            })
        })
    })
}
