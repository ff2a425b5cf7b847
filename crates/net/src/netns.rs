//! Work inside another network namespace.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::thread;

use nix::sched::{CloneFlags, setns, unshare};

use crate::error::{Error, NetContext, Result};
use crate::netlink::{bring_up, routing};

/// Runs `work` inside a network namespace, in a thread of its own, so that the caller's namespace
/// never changes. Sockets that `work` makes stay in that namespace.
pub fn within<T: Send>(
    netns: BorrowedFd<'_>,
    work: impl FnOnce() -> Result<T> + Send,
) -> Result<T> {
    in_thread(|| {
        setns(netns, CloneFlags::CLONE_NEWNET).on("enter", "a network namespace")?;
        work()
    })
}

/// Makes a network namespace with nothing but a loopback interface, which is up.
pub fn alone() -> Result<OwnedFd> {
    in_thread(|| {
        unshare(CloneFlags::CLONE_NEWNET).on("make", "a network namespace")?;
        routing()?.change(&mut bring_up("lo")).on("set up", "lo")?;
        let file = std::fs::File::open("/proc/thread-self/ns/net");
        Ok(file.on("open", "a network namespace")?.into())
    })
}

/// Runs `work` in a thread of its own, which starts in the caller's namespaces.
pub(crate) fn in_thread<T: Send>(work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    thread::scope(|scope| scope.spawn(work).join()).unwrap_or_else(|_| {
        Err(Error::Invalid {
            object: "work in a thread".into(),
            text: "panicked; this is a bug in PdP".into(),
        })
    })
}
