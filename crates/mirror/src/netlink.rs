//! Sockets to the kernel's routing part.
//!
//! Promises that only the kernel is listened to, and that nothing lost passes unnoticed.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use netlink_sys::protocols::NETLINK_ROUTE;
use netlink_sys::{Socket, SocketAddr};

/// Everything that the mirror follows. One socket for all keeps the kernel's order.
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

/// Bytes of the largest datagram: an interface with everything that the kernel says of it.
const DATAGRAM_BYTES_MAX: usize = 256 << 10;

/// What a read gave.
#[derive(Debug)]
pub enum Received<'a> {
    /// Messages.
    Datagram(&'a [u8]),
    /// The kernel had more to say than there was room for. What it says before the queue was
    /// found empty once may lack more, without another such report.
    Lost,
    /// The queue is empty.
    Empty,
}

/// A socket.
pub struct Netlink {
    socket: Socket,
    buffer: Vec<u8>,
}

impl Netlink {
    /// For requests and dumps.
    pub fn requests() -> io::Result<Self> {
        Self::of(NETLINK_ROUTE)
    }

    /// For notifications of these groups of a protocol, of which only that they come is of interest.
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

    /// For notifications, of which the kernel keeps twice these bytes. Needs CAP_NET_ADMIN in the host's
    /// user namespace for that.
    pub fn notifications(receive_bytes: usize) -> io::Result<Self> {
        let netlink = Self::requests()?;
        rustix::net::sockopt::set_socket_recv_buffer_size_force(&netlink.socket, receive_bytes)?;
        for group in GROUPS {
            netlink.socket.add_membership(group)?;
        }
        Ok(netlink)
    }

    /// Asks the kernel.
    pub fn send(&self, request: &[u8]) -> io::Result<()> {
        self.socket.send(request, 0).map(|_| ())
    }

    /// The next datagram.
    pub fn receive(&mut self) -> io::Result<Received<'_>> {
        loop {
            let received = self.socket.recv_from(&mut &mut self.buffer[..], libc::MSG_TRUNC);
            match received {
                Ok((_, from)) if from != SocketAddr::new(0, from.multicast_groups()) => {}
                Ok((count, _)) if count > self.buffer.len() => return Ok(Received::Lost),
                Ok((count, _)) => return Ok(Received::Datagram(&self.buffer[..count])),
                Err(error) => match error.raw_os_error() {
                    Some(libc::EINTR) => {}
                    Some(libc::EAGAIN) => return Ok(Received::Empty),
                    Some(libc::ENOBUFS) => return Ok(Received::Lost),
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
