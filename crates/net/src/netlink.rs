//! Requests about interfaces, and netlink sockets that stay in their network namespace.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use pdp_netlink::{Netlink, Request};

use crate::error::{NetContext, Result};
use crate::netns::within;

/// Flags of a request to make an object that does not exist yet.
pub(crate) const NEW: i32 = libc::NLM_F_CREATE | libc::NLM_F_EXCL;

/// Opens a socket in the calling thread's network namespace.
pub(crate) fn routing() -> Result<Netlink> {
    Netlink::routing().on("open", "rtnetlink")
}

/// Returns the header of a request about an interface (`struct ifinfomsg`). Those of its flags that
/// are in `mask` become those of `flags`.
pub(crate) fn link_header(index: u32, flags: i32, mask: i32) -> [u8; 16] {
    let mut header = [0; 16];
    header[4..8].copy_from_slice(&index.to_ne_bytes());
    header[8..12].copy_from_slice(&flags.to_ne_bytes());
    header[12..].copy_from_slice(&mask.to_ne_bytes());
    header
}

/// Returns a request that sets flags of an interface. Attributes may follow.
pub(crate) fn set_link(index: u32, flags: i32) -> Request {
    Request::new(libc::RTM_SETLINK, 0, &link_header(index, flags, flags))
}

/// Returns a request that brings up the interface of this name.
pub(crate) fn bring_up(name: &str) -> Request {
    let mut request = set_link(0, libc::IFF_UP);
    request.text(libc::IFLA_IFNAME, name);
    request
}

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
