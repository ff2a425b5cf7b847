//! Netlink sockets.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use netlink_sys::{Socket, SocketAddr};

use crate::message::{Message, Refusal, messages};
use crate::request::Request;

/// Most bytes of a datagram: an interface with all attributes.
const DATAGRAM_BYTES_MAX: usize = 256 << 10;

/// Most dumps for a list, until nothing changes during one.
const LIST_DUMPS_MAX: u32 = 3;

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

/// A netlink socket in the network namespace of the thread that opened it.
///
/// Nothing blocks: the kernel handles a request during the system call that sends it, and writes
/// the next part of a dump while the last one is read. It guarantees that messages come only from
/// the kernel, and that no loss passes unnoticed.
pub struct Netlink {
    socket: Socket,
    buffer: Vec<u8>,
    /// Sequence number of the last request.
    sequence: u32,
}

impl Netlink {
    /// Opens a socket of a protocol (`NETLINK_*`), without groups. The kernel refuses requests with
    /// unknown fields, and explains errors.
    pub fn open(protocol: i32) -> io::Result<Self> {
        let mut socket = Socket::new(protocol as isize)?;
        socket.bind_auto()?;
        socket.set_netlink_get_strict_chk(true)?;
        socket.set_ext_ack(true)?;
        socket.set_cap_ack(true)?;
        socket.set_non_blocking(true)?;
        Ok(Self { socket, buffer: vec![0; DATAGRAM_BYTES_MAX], sequence: 0 })
    }

    /// Opens a socket about interfaces, addresses, neighbours, routes and rules.
    pub fn routing() -> io::Result<Self> {
        Self::open(libc::NETLINK_ROUTE)
    }

    /// Opens a socket for notifications of these groups (`RTNLGRP_*`) of a protocol.
    pub fn listening(protocol: i32, groups: impl IntoIterator<Item = u32>) -> io::Result<Self> {
        let netlink = Self::open(protocol)?;
        netlink.join(groups)?;
        Ok(netlink)
    }

    /// Subscribes to notifications of these groups.
    pub fn join(&self, groups: impl IntoIterator<Item = u32>) -> io::Result<()> {
        groups.into_iter().try_for_each(|group| self.socket.add_membership(group))
    }

    /// Makes the kernel keep twice these bytes of unread messages. This needs CAP_NET_ADMIN in the
    /// host's user namespace.
    pub fn set_receive_bytes(&self, bytes: usize) -> io::Result<()> {
        Ok(rustix::net::sockopt::set_socket_recv_buffer_size_force(&self.socket, bytes)?)
    }

    /// Makes the kernel ignore unknown fields of requests for dumps, or refuse them.
    pub fn set_strict(&self, strict: bool) -> io::Result<()> {
        self.socket.set_netlink_get_strict_chk(strict)
    }

    /// Sends a request. [`Self::receive`] gets its answer, if it has one.
    pub fn send(&self, request: &Request) -> io::Result<()> {
        self.socket.send(request.as_bytes(), 0).map(|_| ())
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

    /// Discards all messages so far. The descriptor becomes readable again at the next one.
    pub fn discard(&self) {
        // A loss is reported once, as an error.
        while match self.socket.recv(&mut &mut [0][..], 0) {
            Ok(_) => true,
            Err(error) => matches!(error.raw_os_error(), Some(libc::ENOBUFS | libc::EINTR)),
        } {}
    }

    /// Makes a change.
    ///
    /// # Errors
    /// The kernel refuses it; see [`error_code`].
    pub fn change(&mut self, request: &mut Request) -> io::Result<()> {
        self.ask(request, libc::NLM_F_ACK, |message| message.is_end().then(|| message.result()))?
    }

    /// Makes the changes of all messages of a request, without regard to earlier ones that fail.
    ///
    /// # Errors
    /// The kernel refuses one of them: the first such error.
    pub fn change_all(&mut self, batch: &Request) -> io::Result<()> {
        self.send(batch)?;
        let mut result = Ok(());
        loop {
            // Without acknowledgements, each answer is an error.
            match self.receive()? {
                NetlinkRead::Datagram(datagram) => {
                    let refused = messages(datagram).try_for_each(|message| message.result());
                    result = result.and(refused);
                }
                NetlinkRead::Lost => {}
                NetlinkRead::Empty => return result,
            }
        }
    }

    /// Asks for one object, and returns what `read` makes of it.
    ///
    /// # Errors
    /// The kernel has no such object; see [`error_code`].
    pub fn query<T>(
        &mut self,
        request: &mut Request,
        read: impl FnOnce(&Message<'_>) -> T,
    ) -> io::Result<T> {
        let mut read = Some(read);
        self.ask(request, 0, |message| match message.is_end() {
            true => Some(message.result().and(Err(io::ErrorKind::UnexpectedEof.into()))),
            false => read.take().map(|read| Ok(read(message))),
        })?
    }

    /// Asks for all objects of a kind, and passes each to `each`.
    ///
    /// # Errors
    /// `Interrupted` if the objects changed meanwhile, so that some may be missing; or the kernel
    /// refuses the request, see [`error_code`]. After any other error, use another socket.
    pub fn dump(
        &mut self,
        request: &mut Request,
        mut each: impl FnMut(&Message<'_>),
    ) -> io::Result<()> {
        let mut interrupted = false;
        self.ask(request, libc::NLM_F_DUMP, |message| {
            interrupted |= message.is_interrupted();
            if message.is_end() {
                return Some(message.result());
            }
            each(message);
            None
        })??;
        if interrupted { Err(io::ErrorKind::Interrupted.into()) } else { Ok(()) }
    }

    /// Returns all objects of a kind, as far as `read` understands them. If they keep changing,
    /// the list may miss some.
    ///
    /// # Errors
    /// As for [`Self::dump`], except `Interrupted`.
    pub fn list<T>(
        &mut self,
        request: &mut Request,
        read: impl Fn(&Message<'_>) -> Option<T>,
    ) -> io::Result<Vec<T>> {
        let mut all = Vec::new();
        for _ in 0..LIST_DUMPS_MAX {
            all.clear();
            match self.dump(request, |message| all.extend(read(message))) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                result => return result.map(|()| all),
            }
        }
        Ok(all)
    }

    /// Sends a request with further flags, and passes each message of its answer to `each` until
    /// that has a result.
    fn ask<T>(
        &mut self,
        request: &mut Request,
        flags: i32,
        mut each: impl FnMut(&Message<'_>) -> Option<T>,
    ) -> io::Result<T> {
        self.sequence = self.sequence.wrapping_add(1);
        let sequence = self.sequence;
        request.stamp(sequence, flags);
        self.send(request)?;
        loop {
            let NetlinkRead::Datagram(datagram) = self.receive()? else {
                return Err(io::Error::from_raw_os_error(libc::ENOBUFS));
            };
            // The remains of an earlier answer may come first.
            let mut own = messages(datagram).filter(|message| message.sequence == sequence);
            if let Some(result) = own.find_map(|message| each(&message)) {
                return Ok(result);
            }
        }
    }
}

impl fmt::Debug for Netlink {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.socket.fmt(to)
    }
}

impl AsFd for Netlink {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Returns the number (`E*`) of an error of this crate, even if it comes with an explanation.
pub fn error_code(error: &io::Error) -> Option<i32> {
    let refusal = || Some(error.get_ref()?.downcast_ref::<Refusal>()?.code);
    error.raw_os_error().or_else(refusal)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{attributes, text};

    fn link(index: u32) -> Request {
        let mut header = [0; 16];
        header[4..8].copy_from_slice(&index.to_ne_bytes());
        Request::new(libc::RTM_GETLINK, 0, &header)
    }

    fn name(message: &Message<'_>) -> Option<String> {
        let mut all = attributes(message.payload.get(16..)?);
        all.find(|(kind, _)| *kind == libc::IFLA_IFNAME).map(|(_, value)| text(value))
    }

    #[test]
    fn queries_and_lists_find_loopback() {
        let mut netlink = Netlink::routing().unwrap();
        assert_eq!(netlink.query(&mut link(1), name).unwrap().unwrap(), "lo");
        let names = netlink.list(&mut link(0), name).unwrap();
        assert!(names.contains(&"lo".into()), "{names:?}");
        let missing = netlink.query(&mut link(0x7fff_ffff), name).unwrap_err();
        assert_eq!(error_code(&missing), Some(libc::ENODEV));
        assert!(matches!(netlink.receive().unwrap(), NetlinkRead::Empty));
    }

    #[test]
    fn errors_have_the_kernels_explanation() {
        let mut netlink = Netlink::routing().unwrap();
        let mut wrong =
            Request::new(libc::RTM_GETLINK, 0, &[0, 0, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        for error in [
            netlink.query(&mut wrong, name).unwrap_err(),
            netlink.dump(&mut wrong, |_| {}).unwrap_err(),
            netlink.change(&mut wrong).unwrap_err(),
            netlink.change_all(&wrong).unwrap_err(),
        ] {
            assert_eq!(error_code(&error), Some(libc::EINVAL));
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
            let text = error.to_string();
            assert!(
                text.starts_with("Invalid argument (os error 22): Invalid values in"),
                "{text}"
            );
        }
        netlink.set_strict(false).unwrap();
        netlink.dump(&mut wrong, |_| {}).unwrap();
    }

    #[test]
    fn answers_match_their_requests() {
        let mut netlink = Netlink::routing().unwrap();
        // Nobody reads this answer.
        netlink.send(&link(0x7fff_ffff)).unwrap();
        assert_eq!(netlink.query(&mut link(1), name).unwrap().unwrap(), "lo");
    }
}
