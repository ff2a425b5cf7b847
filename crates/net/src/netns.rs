//! Work inside another network namespace.

use std::os::fd::BorrowedFd;
use std::thread;

use nix::sched::{CloneFlags, setns};

use crate::error::{Context, Error, Result};

/// Runs `work` inside a network namespace, in a thread of its own, so that the caller's namespace
/// never changes. Sockets made there stay there.
pub fn within<T: Send>(
    netns: BorrowedFd<'_>,
    work: impl FnOnce() -> Result<T> + Send,
) -> Result<T> {
    in_thread(|| {
        setns(netns, CloneFlags::CLONE_NEWNET).on("enter", "a network namespace")?;
        work()
    })
}

/// Runs `work` in a thread of its own, which begins in the caller's namespaces.
pub(crate) fn in_thread<T: Send>(work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    thread::scope(|scope| scope.spawn(work).join()).unwrap_or_else(|_| {
        Err(Error::Invalid {
            object: "work in a thread".into(),
            text: "panicked; this is a bug in PdP".into(),
        })
    })
}
