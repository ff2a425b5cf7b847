//! Netlink sockets that stay in their network namespace.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use pdp_netlink::Netlink;

use crate::error::{NetContext, Result};
use crate::netlink::routing;
use crate::netns::within;

/// Pool of netlink sockets in the network namespace where the first one was opened, usable from any
/// namespace. No request waits for another thread's.
#[derive(Debug)]
pub(crate) struct NetlinkPool {
    netns: OwnedFd,
    /// Idle sockets: as many as were ever in use at the same time.
    idle: Mutex<Vec<Netlink>>,
}

impl NetlinkPool {
    /// Opens the pool in the calling thread's network namespace.
    pub(crate) fn open() -> Result<Self> {
        let netns = File::open("/proc/thread-self/ns/net").on("open", "the network namespace")?;
        Ok(Self { netns: netns.into(), idle: Mutex::new(vec![routing()?]) })
    }

    /// Runs `work` with a socket of the pool.
    pub(crate) fn with<T>(
        &self,
        work: impl FnOnce(&mut Netlink) -> io::Result<T>,
    ) -> io::Result<T> {
        let idle = self.idle().pop();
        let mut netlink = match idle {
            Some(netlink) => netlink,
            None => within(self.netns.as_fd(), routing).map_err(io::Error::other)?,
        };
        let result = work(&mut netlink);
        self.idle().push(netlink);
        result
    }

    fn idle(&self) -> MutexGuard<'_, Vec<Netlink>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
