//! Answers requests on a control socket without waiting.
//!
//! Messages of a connection are handled as they come. So a peer that stops in the middle of a
//! message delays nothing. A pdpd that died may leave its connection open while a new one comes.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;

use serde::de::DeserializeOwned;

use crate::channel::Channel;

/// Most connections at a time. A further one replaces the oldest.
pub const CONNECTIONS_MAX: usize = 4;

/// A control socket with its connections.
#[derive(Debug)]
pub struct ControlListener {
    listener: UnixListener,
    connections: Vec<Channel>,
}

impl ControlListener {
    /// Serves clients of `listener`.
    ///
    /// # Errors
    /// If it is no Unix socket, or the system refuses to change its mode.
    pub fn new(listener: UnixListener) -> io::Result<Self> {
        listener.local_addr()?;
        listener.set_nonblocking(true)?;
        Ok(Self { listener, connections: Vec::new() })
    }

    /// Descriptor of the listening socket.
    pub fn listener(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }

    /// Descriptors to wait for: that of the listening socket, and those of the connections.
    pub fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let connections = self.connections.iter().map(|channel| channel.stream().as_fd());
        std::iter::once(self.listener.as_fd()).chain(connections)
    }

    /// Accepts the next waiting connection, if any; returns its descriptor to watch.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn accept(&mut self) -> io::Result<Option<BorrowedFd<'_>>> {
        let stream = match self.listener.accept() {
            Ok((stream, _)) => stream,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
            Err(error) => return Err(error),
        };
        stream.set_nonblocking(true)?;
        if self.connections.len() == CONNECTIONS_MAX {
            self.connections.remove(0);
        }
        self.connections.push(Channel::new(stream));
        Ok(self.connections.last().map(|channel| channel.stream().as_fd()))
    }

    /// Passes each request received on any connection, with its descriptors, to `answer`, which
    /// sends the reply. Removes connections that ended, and reports errors as `program`.
    pub fn serve<Q: DeserializeOwned>(
        &mut self,
        program: &str,
        mut answer: impl FnMut(Q, Vec<OwnedFd>, &mut Channel) -> io::Result<()>,
    ) {
        self.connections.retain_mut(|channel| match answer_all(channel, &mut answer) {
            Ok(()) => false,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => true,
            Err(error) => {
                eprintln!("{program}: control connection ended: {error}");
                false
            }
        });
    }
}

/// Answers until the peer closes, or all received messages are handled (`WouldBlock`).
fn answer_all<Q: DeserializeOwned>(
    channel: &mut Channel,
    answer: &mut impl FnMut(Q, Vec<OwnedFd>, &mut Channel) -> io::Result<()>,
) -> io::Result<()> {
    while let Some((request, descriptors)) = channel.receive::<Q>()? {
        // Replies are small. If one does not fit, the peer does not read.
        answer(request, descriptors, channel).map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock => io::Error::other("peer does not read its answers"),
            _ => error,
        })?;
    }
    Ok(())
}
