//! Work inside another network namespace.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::thread;

use nix::sched::{CloneFlags, setns, unshare};
use rtnetlink::LinkUnspec;

use crate::error::{Context, Error, Result};
use crate::netlink::{converse, refused};

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

/// Makes a network namespace that has its own loopback interface, which is up, and nothing else.
pub fn alone() -> Result<OwnedFd> {
    in_thread(|| {
        unshare(CloneFlags::CLONE_NEWNET).on("make", "a network namespace")?;
        converse(|handle| async move {
            let lo = LinkUnspec::new_with_name("lo").up().build();
            handle.link().set(lo).execute().await.map_err(refused("set up", "lo"))
        })?;
        let file = std::fs::File::open("/proc/thread-self/ns/net");
        Ok(file.on("open", "a network namespace")?.into())
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
