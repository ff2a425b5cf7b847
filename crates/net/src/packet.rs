//! Packet sockets, for receiving and sending frames on an interface.
//!
//! Source: packet(7).

use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use nix::sys::socket::{AddressFamily, SockFlag, SockType, setsockopt, socket, sockopt};

use crate::error::{NetContext, Result};

/// Send buffer of a device, bytes, with the kernel's own overhead.
const SEND_BUFFER_BYTES: usize = 16 << 20;

/// Opens packet sockets on the interface `device` with this index in this network namespace.
///
/// They receive whole Ethernet frames for any destination that pass `filter`, a socket
/// program; frames that the machine itself sends are excluded. Several sockets share the
/// frames by flow. Sent frames go directly to the device, past traffic control, as with
/// AF_XDP. Reading and writing needs no privilege.
pub fn open(device: &str, index: u32, count: u32, filter: BorrowedFd<'_>) -> Result<Vec<OwnedFd>> {
    let sockets: Vec<OwnedFd> =
        (0..count).map(|_| open_one(device, index, filter)).collect::<Result<_>>()?;
    let mut group = libc::fanout_args {
        id: 0,
        type_flags: (libc::PACKET_FANOUT_HASH
            | libc::PACKET_FANOUT_FLAG_UNIQUEID
            | libc::PACKET_FANOUT_FLAG_IGNORE_OUTGOING) as u16,
        max_num_members: count,
    };
    for socket in sockets.iter().filter(|_| count > 1) {
        set(socket, libc::SOL_PACKET, libc::PACKET_FANOUT, &group)
            .on("set the fanout group of", device)?;
        // The kernel chose a number for the first one.
        group.id = fanout_id(socket).on("read the fanout group of", device)?;
        group.type_flags &= !(libc::PACKET_FANOUT_FLAG_UNIQUEID as u16);
    }
    Ok(sockets)
}

fn open_one(device: &str, index: u32, filter: BorrowedFd<'_>) -> Result<OwnedFd> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    // Without a protocol, the socket receives nothing until it is bound.
    let fd = socket(AddressFamily::Packet, SockType::Raw, flags, None)
        .on("open a packet socket for", device)?;
    set(&fd, libc::SOL_SOCKET, libc::SO_ATTACH_BPF, &filter.as_raw_fd())
        .on("attach the filter to", device)?;
    let on: libc::c_int = 1;
    set(&fd, libc::SOL_PACKET, libc::PACKET_IGNORE_OUTGOING, &on)
        .on("ignore frames sent on", device)?;
    set(&fd, libc::SOL_PACKET, libc::PACKET_QDISC_BYPASS, &on)
        .on("send past traffic control on", device)?;
    // Without the privilege, the buffers are smaller; nothing else changes.
    let _ = setsockopt(&fd, sockopt::RcvBufForce, &pdp_afxdp::WAITING_BYTES);
    let _ = setsockopt(&fd, sockopt::SndBufForce, &SEND_BUFFER_BYTES);
    let everybody = libc::packet_mreq {
        mr_ifindex: index as libc::c_int,
        mr_type: libc::PACKET_MR_PROMISC as libc::c_ushort,
        mr_alen: 0,
        mr_address: [0; 8],
    };
    set(&fd, libc::SOL_PACKET, libc::PACKET_ADD_MEMBERSHIP, &everybody)
        .on("receive all frames of", device)?;
    bind(&fd, index).on("bind to", device)?;
    Ok(fd)
}

/// Binds a packet socket to the interface of this index, or to all (0).
pub(crate) fn bind(fd: &OwnedFd, index: u32) -> io::Result<()> {
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
    if bound == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Returns the number of the fanout group, whose sockets share frames.
fn fanout_id(fd: &OwnedFd) -> io::Result<u16> {
    let mut value: libc::c_int = 0;
    let mut bytes = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: `value` is writable for the length given, which is its own, during the call alone.
    let result = unsafe {
        libc::getsockopt(
            fd.as_raw_fd(),
            libc::SOL_PACKET,
            libc::PACKET_FANOUT,
            (&raw mut value).cast(),
            &mut bytes,
        )
    };
    // The mode is in the upper half.
    if result == 0 { Ok(value as u16) } else { Err(io::Error::last_os_error()) }
}

/// Sets a socket option.
pub(crate) fn set<T>(
    fd: &OwnedFd,
    level: libc::c_int,
    option: libc::c_int,
    value: &T,
) -> io::Result<()> {
    // SAFETY: `value` is readable for the length given, which is its own, during the call alone.
    let result = unsafe {
        libc::setsockopt(
            fd.as_raw_fd(),
            level,
            option,
            (&raw const *value).cast(),
            size_of::<T>() as libc::socklen_t,
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
