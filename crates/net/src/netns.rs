//! Work inside another network namespace.

use std::os::fd::BorrowedFd;

use crate::error::Result;

/// Runs `work` inside a network namespace, in a thread of its own, so that the caller's namespace
/// never changes.
pub fn within<T: Send>(netns: BorrowedFd<'_>, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    let _ = (netns, work);
    todo!()
}
