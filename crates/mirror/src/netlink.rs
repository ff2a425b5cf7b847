//! Routing netlink sockets.
//!
//! Guarantees that messages come only from the kernel, and that no loss passes unnoticed.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use netlink_sys::protocols::NETLINK_ROUTE;
use netlink_sys::{Socket, SocketAddr};

/// Groups that the mirror follows. One socket for all preserves the kernel's order.
const GROUPS: [u32; 9] = [
    libc::RTNLGRP_LINK,
    libc::RTNLGRP_NEIGH,
    libc::RTNLGRP_IPV4_IFADDR,
    libc::RTNLGRP_IPV4_ROUTE,
    libc::RTNLGRP_IPV6_IFADDR,
    libc::RTNLGRP_IPV6_ROUTE,
    libc::RTNLGRP_IPV4_NETCONF,
    libc::RTNLGRP_IPV6_NETCONF,
    libc::RTNLGRP_NEXTHOP,
];

/// Most bytes of a datagram: an interface with all attributes.
const DATAGRAM_BYTES_MAX: usize = 256 << 10;

/// Result of a read.
#[derive(Debug)]
pub enum NetlinkRead<'a> {
    /// Messages.
    Datagram(&'a [u8]),
    /// Messages were lost for lack of space. Until the queue has been found
    /// empty once, further losses may go unreported.
    Lost,
    /// The queue is empty.
    Empty,
}

/// A netlink socket.
pub struct Netlink {
    socket: Socket,
    buffer: Vec<u8>,
}

impl Netlink {
    /// Opens a socket for requests and dumps.
    pub fn requests() -> io::Result<Self> {
        Self::of(NETLINK_ROUTE)
    }

    /// Opens a socket for notifications of these groups of a protocol. Only their arrival matters.
    pub fn listening(protocol: i32, groups: impl IntoIterator<Item = u32>) -> io::Result<Self> {
        let netlink = Self::of(protocol as isize)?;
        for group in groups {
            netlink.socket.add_membership(group)?;
        }
        Ok(netlink)
    }

    fn of(protocol: isize) -> io::Result<Self> {
        let mut socket = Socket::new(protocol)?;
        socket.bind_auto()?;
        socket.set_netlink_get_strict_chk(true)?;
        socket.set_non_blocking(true)?;
        Ok(Self { socket, buffer: vec![0; DATAGRAM_BYTES_MAX] })
    }

    /// Opens a socket for notifications, of which the kernel keeps twice these bytes. The size
    /// needs CAP_NET_ADMIN in the host's user namespace.
    pub fn notifications(receive_bytes: usize) -> io::Result<Self> {
        let netlink = Self::requests()?;
        rustix::net::sockopt::set_socket_recv_buffer_size_force(&netlink.socket, receive_bytes)?;
        for group in GROUPS {
            netlink.socket.add_membership(group)?;
        }
        Ok(netlink)
    }

    /// Sends a request.
    pub fn send(&self, request: &[u8]) -> io::Result<()> {
        self.socket.send(request, 0).map(|_| ())
    }

    /// Reads the next datagram.
    pub fn receive(&mut self) -> io::Result<NetlinkRead<'_>> {
        loop {
            let received = self.socket.recv_from(&mut &mut self.buffer[..], libc::MSG_TRUNC);
            match received {
                Ok((_, from)) if from != SocketAddr::new(0, from.multicast_groups()) => {}
                Ok((count, _)) if count > self.buffer.len() => return Ok(NetlinkRead::Lost),
                Ok((count, _)) => return Ok(NetlinkRead::Datagram(&self.buffer[..count])),
                Err(error) => match error.raw_os_error() {
                    Some(libc::EINTR) => {}
                    Some(libc::EAGAIN) => return Ok(NetlinkRead::Empty),
                    Some(libc::ENOBUFS) => return Ok(NetlinkRead::Lost),
                    _ => return Err(error),
                },
            }
        }
    }
}

impl AsFd for Netlink {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
