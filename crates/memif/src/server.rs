//! The side that listens and trusts nothing.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

/// How a connected peer broke the rules. The connection is to be dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// More slots announced than the ring has.
    #[error("ring index {head} is more than {slots} slots ahead of {tail}")]
    Index {
        /// The peer's index.
        head: u16,
        /// Our index.
        tail: u16,
        /// Slots of the ring.
        slots: u32,
    },
    /// A descriptor that names a region that does not exist.
    #[error("descriptor in region {region}, {count} regions")]
    Region {
        /// The region named.
        region: u16,
        /// Regions of the connection.
        count: usize,
    },
    /// A descriptor that reaches out of its region.
    #[error("descriptor of {length} bytes at {offset}, region of {size} bytes")]
    Bounds {
        /// Offset in the region.
        offset: u32,
        /// Bytes of the buffer.
        length: u32,
        /// Bytes of the region.
        size: u64,
    },
    /// A frame of too many buffers, or whose last buffer was not announced.
    #[error("chain of {slots} buffers does not end")]
    Chain {
        /// Buffers seen.
        slots: usize,
    },
    /// An empty buffer posted for frames.
    #[error("posted a buffer of no bytes")]
    Empty,
    /// The memory is gone.
    #[error("shared memory is gone")]
    Poisoned,
}

/// Why a handshake failed.
#[derive(Debug, thiserror::Error)]
pub enum HandshakeError {
    /// A system call failed, or the peer hung up.
    #[error("memif handshake")]
    Io(#[from] io::Error),
    /// The peer sent what it must not; it was told so.
    #[error("memif peer refused: {0}")]
    Refused(&'static str),
    /// The peer gave up.
    #[error("memif peer left: {0}")]
    Left(String),
}

/// Why a connection ended.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("memif peer left: {reason}")]
pub struct Closed {
    /// What the peer said, or why it is taken for gone.
    pub reason: String,
}

/// Listens at a path.
#[derive(Debug)]
pub struct Listener {
    socket: OwnedFd,
}

impl Listener {
    /// Listens at `path`; a stale socket file there is removed. Never blocks afterwards.
    pub fn bind(_path: &Path) -> io::Result<Self> {
        todo!()
    }

    /// The next client that is waiting, if any.
    pub fn accept(&self) -> io::Result<Option<Handshake>> {
        todo!()
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// A client on its way to a connection.
#[derive(Debug)]
pub struct Handshake {
    socket: OwnedFd,
}

impl Handshake {
    /// Goes on as far as messages have come, without blocking. Call it when the descriptor is
    /// readable and from time to time: it fails once the handshake takes longer than
    /// [`crate::HANDSHAKE_MS_MAX`].
    ///
    /// `accepts` says whether the interface id that the client asks for may connect now.
    /// After `Ok(Some(_))` or an error the handshake is over: drop it.
    pub fn poll(
        &mut self,
        _accepts: impl FnOnce(u32) -> bool,
    ) -> Result<Option<Connection>, HandshakeError> {
        todo!()
    }
}

impl AsFd for Handshake {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// A connected client.
#[derive(Debug)]
pub struct Connection {
    /// The interface id that the client asked for.
    pub interface_id: u32,
    /// What the client calls itself; any text, at most 32 bytes.
    pub name: String,
    /// Frames to the client.
    pub tx: Sender,
    /// Frames from the client.
    pub rx: Receiver,
    /// The control socket. Keep it: dropping it tells the client that the server is gone.
    pub control: Control,
}

/// The control socket of a connection; readable when the client left.
#[derive(Debug)]
pub struct Control {
    socket: OwnedFd,
}

impl Control {
    /// Whether the client is still there. Never blocks.
    pub fn check(&mut self) -> Result<(), Closed> {
        todo!()
    }

    /// Tells the client why, and closes.
    pub fn disconnect(self, _reason: &str) {
        todo!()
    }
}

impl AsFd for Control {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Frames from a client.
///
/// `peek`, then `frame_len` and `copy_out` as often as wanted, then `release`.
#[derive(Debug)]
pub struct Receiver {
    bell: OwnedFd,
}

impl Receiver {
    /// Looks at up to `max` frames beyond those released: each descriptor is read once, checked
    /// and kept, so that what the client writes afterwards changes the bytes of a frame at most,
    /// never its bounds. Returns how many frames there are, 0 for none.
    pub fn peek(&mut self, _max: usize) -> Result<usize, Fault> {
        todo!()
    }

    /// Bytes of a frame that `peek` found. Panics if `frame` is not below its result.
    pub fn frame_len(&self, _frame: usize) -> usize {
        todo!()
    }

    /// Copies from byte `from` of a frame that `peek` found; returns how many bytes there were,
    /// at most `to.len()`. The client may change the bytes between two copies: copy once, then
    /// decide. Panics if `frame` is not below the result of `peek`.
    pub fn copy_out(&self, _frame: usize, _from: usize, _to: &mut [u8]) -> usize {
        todo!()
    }

    /// Gives the oldest `frames` frames that `peek` found back to the client, in one store. The
    /// numbers of the others go down by as many.
    pub fn release(&mut self, _frames: usize) {
        todo!()
    }

    /// Lets the client ring. True if there is nothing to receive, so that polling the descriptor
    /// is safe; false if there is (the doorbell is off again then).
    pub fn arm(&mut self) -> bool {
        todo!()
    }

    /// Stops the client from ringing and empties the doorbell.
    pub fn disarm(&mut self) {
        todo!()
    }
}

impl AsFd for Receiver {
    /// The doorbell: an eventfd, readable when the client rang.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }
}

/// Frames to a client.
#[derive(Debug)]
pub struct Sender {
    bell: OwnedFd,
}

impl Sender {
    /// Buffers that the client has posted and that are not filled yet. A frame takes one, or
    /// several if it is longer than the client's buffers.
    pub fn room(&mut self) -> Result<usize, Fault> {
        todo!()
    }

    /// Puts a frame, gathered from `parts`, into the ring; the client sees it after
    /// [`Self::flush`]. False (and nothing done) if there is no room.
    pub fn push(&mut self, _parts: &[&[u8]]) -> Result<bool, Fault> {
        todo!()
    }

    /// Shows the client what was pushed, and rings if it wants that. The only system call here,
    /// and none while the client is busy.
    pub fn flush(&mut self) -> Result<(), Fault> {
        let _ = &self.bell;
        todo!()
    }

    /// Frames flushed whose buffers the client has not posted anew: not taken yet, or taken a
    /// moment ago. What is lost when the client dies is at most this.
    pub fn untaken(&mut self) -> usize {
        todo!()
    }
}
