//! Answers pdpd on the control socket.
//!
//! A connection is served as its messages come, without waiting for one, so that a pdpd that
//! stops in the middle of a message holds up nothing. A pdpd that died may leave its connection
//! behind while a new one comes.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixListener;

use pdp_proto::channel::Channel;
use pdp_proto::tap::{Reply, Request};

use crate::ports::Ports;

/// Connections at a time; one more ends the oldest.
pub const CONNECTIONS_MAX: usize = 4;

/// The control socket with its connections.
#[derive(Debug)]
pub struct Control {
    listener: UnixListener,
    connections: Vec<Channel>,
}

impl Control {
    /// Serves who connects to `listener`.
    pub fn new(listener: UnixListener) -> io::Result<Self> {
        listener.local_addr()?;
        listener.set_nonblocking(true)?;
        Ok(Self { listener, connections: Vec::new() })
    }

    /// The descriptor to accept at.
    pub fn listener(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }

    /// Takes the next connection, if one waits; returns its descriptor to watch.
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

    /// Answers what has come on any connection; forgets those that ended.
    pub fn serve(&mut self, ports: &mut Ports) {
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

/// Answers until the peer closed, or nothing more has come (`WouldBlock`).
fn answer_all(channel: &mut Channel, ports: &mut Ports) -> io::Result<()> {
    while let Some((request, fds)) = channel.receive::<Request>()? {
        let (reply, fds) = match request {
            Request::Serve { ports: wanted } => {
                let reply = match ports.replace(wanted, fds) {
                    Ok(()) => Reply::Done,
                    Err(error) => Reply::Failed { error: format!("can't serve: {error}") },
                };
                (reply, Vec::new())
            }
            Request::Hold => {
                let (held, fds) = ports.held();
                (Reply::Held { ports: held }, fds)
            }
            Request::Stats => (Reply::Stats { ports: ports.stats() }, Vec::new()),
        };
        // Replies are small: one that does not fit means a peer that does not read.
        channel.send(&reply, &fds).map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock => io::Error::other("peer does not read its answers"),
            _ => error,
        })?;
    }
    Ok(())
}
