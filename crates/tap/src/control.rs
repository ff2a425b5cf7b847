//! Answers pdpd on the control socket.
//!
//! Messages of a connection are handled as they come, without waiting.
//! So a pdpd that stops in the middle of a message delays nothing. A
//! pdpd that died may leave its connection open while a new one comes.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixListener;

use pdp_proto::channel::Channel;
use pdp_proto::tap::{TapReply, TapRequest};

use crate::ports::TapPorts;

/// Most connections at a time. A further one replaces the oldest.
pub const CONNECTIONS_MAX: usize = 4;

/// The control socket with its connections.
#[derive(Debug)]
pub struct TapControl {
    listener: UnixListener,
    connections: Vec<Channel>,
}

impl TapControl {
    /// Serves clients of `listener`.
    pub fn new(listener: UnixListener) -> io::Result<Self> {
        listener.local_addr()?;
        listener.set_nonblocking(true)?;
        Ok(Self { listener, connections: Vec::new() })
    }

    /// Descriptor of the listening socket.
    pub fn listener(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }

    /// Accepts the next waiting connection, if any; returns its descriptor to watch.
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

    /// Answers the messages received on all connections; removes those that ended.
    pub fn serve(&mut self, ports: &mut TapPorts) {
        self.connections.retain_mut(|channel| match answer_all(channel, ports) {
            Ok(()) => false,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => true,
            Err(error) => {
                eprintln!("pdp-tap: control connection ended: {error}");
                false
            }
        });
    }
}

/// Answers until the peer closes, or all received messages are handled (`WouldBlock`).
fn answer_all(channel: &mut Channel, ports: &mut TapPorts) -> io::Result<()> {
    while let Some((request, fds)) = channel.receive::<TapRequest>()? {
        let (reply, fds) = match request {
            TapRequest::Serve { ports: requested } => {
                let reply = match ports.replace(requested, fds) {
                    Ok(()) => TapReply::Done,
                    Err(error) => TapReply::Failed { error: format!("can't serve: {error}") },
                };
                (reply, Vec::new())
            }
            TapRequest::Hold => {
                let (taps, fds) = ports.taps_and_descriptors();
                (TapReply::Held { ports: taps }, fds)
            }
            TapRequest::Stats => (TapReply::Stats { ports: ports.stats() }, Vec::new()),
        };
        // Replies are small. If one does not fit, the peer does not read.
        channel.send(&reply, &fds).map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock => io::Error::other("peer does not read its answers"),
            _ => error,
        })?;
    }
    Ok(())
}
