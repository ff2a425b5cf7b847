//! Non-blocking Unix seqpacket sockets with one message, and at most one descriptor, at a time.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

use crate::message::{MESSAGE_BYTES, Message};

const FLAGS: SocketFlags = SocketFlags::NONBLOCK.union(SocketFlags::CLOEXEC);

/// Clients that may wait to be accepted.
const BACKLOG: i32 = 64;

fn socket() -> io::Result<OwnedFd> {
    Ok(rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, FLAGS, None)?)
}

/// Listens at `path` and replaces any earlier listener there.
pub(crate) fn listen(path: &Path) -> io::Result<OwnedFd> {
    let socket = socket()?;
    match rustix::fs::unlink(path) {
        Ok(()) | Err(rustix::io::Errno::NOENT) => {}
        Err(error) => return Err(error.into()),
    }
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    // The directory's permissions control access; the peer's uid differs from ours.
    rustix::fs::chmod(path, rustix::fs::Mode::from_raw_mode(0o666))?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket)
}

/// Connects to `path`. A listener whose queue is full is `WouldBlock`.
pub(crate) fn connect(path: &Path) -> io::Result<OwnedFd> {
    let socket = socket()?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

/// Accepts the next waiting peer, if any.
pub(crate) fn accept(listener: BorrowedFd<'_>) -> io::Result<Option<OwnedFd>> {
    match rustix::net::accept_with(listener, FLAGS) {
        Ok(socket) => Ok(Some(socket)),
        Err(rustix::io::Errno::AGAIN | rustix::io::Errno::CONNABORTED) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Sends a message whole or not at all. `WouldBlock` if the peer does not read.
pub(crate) fn send(
    socket: impl AsFd,
    message: &Message,
    fd: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = fd.as_slice();
    if !fds.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(fds));
    }
    let bytes = message.emit();
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    rustix::io::retry_on_intr(|| {
        rustix::net::sendmsg(&socket, &[IoSlice::new(&bytes)], &mut control, flags)
    })?;
    Ok(())
}

/// Result of receiving from a peer.
#[derive(Debug)]
pub(crate) enum ReceivedMessage {
    /// A message, with its descriptor.
    Message(Message, Option<OwnedFd>),
    /// Nothing yet.
    Nothing,
    /// The peer closed.
    End,
    /// Not a message of this protocol.
    Bad(&'static str),
}

/// Receives without blocking. Closes the descriptors of anything that is not a message.
pub(crate) fn receive(socket: impl AsFd) -> io::Result<ReceivedMessage> {
    let mut bytes = [0; MESSAGE_BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let received = rustix::io::retry_on_intr(|| {
        rustix::net::recvmsg(&socket, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags)
    });
    let received = match received {
        Ok(received) => received,
        Err(rustix::io::Errno::AGAIN) => return Ok(ReceivedMessage::Nothing),
        Err(rustix::io::Errno::CONNRESET) => return Ok(ReceivedMessage::End),
        Err(error) => return Err(error.into()),
    };
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    Ok(if received.bytes == 0 {
        ReceivedMessage::End
    } else if received.bytes != MESSAGE_BYTES || received.flags.contains(ReturnFlags::TRUNC) {
        ReceivedMessage::Bad("message is not 128 bytes")
    } else if fds.len() > 1 || received.flags.contains(ReturnFlags::CTRUNC) {
        ReceivedMessage::Bad("more than one descriptor")
    } else {
        match Message::parse(&bytes) {
            Some(message) => ReceivedMessage::Message(message, fds.pop()),
            None => ReceivedMessage::Bad("unknown message type"),
        }
    })
}
