//! Requests about interfaces.

use pdp_netlink::{Netlink, Request};

use crate::error::{NetContext, Result};

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
