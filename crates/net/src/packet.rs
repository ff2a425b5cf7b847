//! Packet sockets: all frames that an interface receives, and frames to send on it.
//!
//! Source: packet(7).

use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, OwnedFd};

use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};

use crate::error::{Context, Result};

/// PACKET_IGNORE_OUTGOING of linux/if_packet.h (kernel 4.20).
const IGNORE_OUTGOING: libc::c_int = 23;

/// A packet socket of the interface `device` with this index in this network namespace: whole
/// Ethernet frames, whatever their destination; not what the machine itself sends. Reading and
/// writing it needs no privilege.
pub fn open(device: &str, index: u32) -> Result<OwnedFd> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    // Without a protocol it gets nothing until it is bound.
    let fd = socket(AddressFamily::Packet, SockType::Raw, flags, None)
        .on("open a packet socket for", device)?;
    set(&fd, IGNORE_OUTGOING, &1 as &libc::c_int).on("ignore what is sent on", device)?;
    let everybody = libc::packet_mreq {
        mr_ifindex: index as libc::c_int,
        mr_type: libc::PACKET_MR_PROMISC as libc::c_ushort,
        mr_alen: 0,
        mr_address: [0; 8],
    };
    set(&fd, libc::PACKET_ADD_MEMBERSHIP, &everybody).on("receive all frames of", device)?;
    let address = libc::sockaddr_ll {
        sll_family: libc::AF_PACKET as libc::c_ushort,
        sll_protocol: (libc::ETH_P_ALL as u16).to_be(),
        sll_ifindex: index as libc::c_int,
        sll_hatype: 0,
        sll_pkttype: 0,
        sll_halen: 0,
        sll_addr: [0; 8],
    };
    // SAFETY: the address is a whole sockaddr_ll of the length given, read during the call alone.
    let bound = unsafe {
        libc::bind(
            fd.as_raw_fd(),
            (&raw const address).cast(),
            size_of::<libc::sockaddr_ll>() as libc::socklen_t,
        )
    };
    if bound == 0 { Ok(fd) } else { Err(io::Error::last_os_error()).on("bind to", device) }
}

/// Sets an option of the packet level.
fn set<T>(fd: &OwnedFd, option: libc::c_int, value: &T) -> io::Result<()> {
    // SAFETY: `value` is readable for the length given, which is its own, during the call alone.
    let result = unsafe {
        libc::setsockopt(
            fd.as_raw_fd(),
            libc::SOL_PACKET,
            option,
            (&raw const *value).cast(),
            size_of::<T>() as libc::socklen_t,
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
