//! The side that owns the memory and trusts its server.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

/// Sizes of a client's rings and memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Slots of each of the two rings, as a power of two, 1..=[`crate::RING_LOG2_MAX`].
    pub ring_log2: u8,
    /// Bytes of a buffer, headroom included.
    pub buffer_bytes: u32,
    /// Bytes left free before a received frame, for [`Buf::grow_front`].
    pub headroom_bytes: u32,
    /// Buffers; more than both rings can hold.
    pub buffers: u32,
}

impl Default for Settings {
    /// 1024 slots, 4096 buffers of 2048 bytes with 64 bytes of headroom: 8 MiB.
    fn default() -> Self {
        Self { ring_log2: 10, buffer_bytes: 2048, headroom_bytes: 64, buffers: 4096 }
    }
}

/// Why a client can't be made.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// Settings that don't fit together.
    #[error("memif settings: {0}")]
    Settings(&'static str),
    /// The system refused memory or a descriptor.
    #[error("memif memory")]
    Io(#[from] io::Error),
}

/// State of a client's connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Link {
    /// No server. [`Client::poll`] tries again, once a call.
    Down,
    /// Connected, handshake not done.
    Connecting,
    /// Frames can flow.
    Up,
}

/// A piece of a buffer, owned by the user until it is sent or freed. Dropping it loses the buffer.
#[derive(Debug)]
#[must_use = "a dropped Buf is a lost buffer: send or free it"]
pub struct Buf {
    index: u32,
    start: u32,
    len: u32,
    capacity: u32,
    more: bool,
    pool: u32,
}

impl Buf {
    /// Bytes in it.
    pub fn len(&self) -> usize {
        self.len as usize
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether the frame goes on in the next buffer received.
    pub fn continues(&self) -> bool {
        self.more
    }

    /// Takes `bytes` off the front; false (nothing done) if there are fewer.
    pub fn trim_front(&mut self, bytes: usize) -> bool {
        if bytes > self.len() {
            return false;
        }
        self.start += bytes as u32;
        self.len -= bytes as u32;
        true
    }

    /// Puts `bytes` undefined bytes before the front; false (nothing done) if there is no room.
    pub fn grow_front(&mut self, bytes: usize) -> bool {
        if bytes > self.start as usize {
            return false;
        }
        self.start -= bytes as u32;
        self.len += bytes as u32;
        true
    }

    /// Makes it `bytes` long, cut or with undefined bytes at the end; false (nothing done) if
    /// there is no room.
    pub fn set_len(&mut self, bytes: usize) -> bool {
        if bytes > (self.capacity - self.start) as usize {
            return false;
        }
        self.len = bytes as u32;
        true
    }
}

/// A client: its memory, and a connection while there is a server.
///
/// Memory and every [`Buf`] outlive connections; what lay in the rings when a server went is free
/// again.
#[derive(Debug)]
pub struct Client {
    bell: OwnedFd,
}

impl Client {
    /// Allocates memory for interface `interface_id` of the server at `path`. `name` is what the
    /// client calls itself, cut to 31 bytes. Does not connect: see [`Self::poll`].
    pub fn new(
        _path: &Path,
        _interface_id: u32,
        _name: &str,
        _settings: Settings,
    ) -> Result<Self, ClientError> {
        todo!()
    }

    /// Connects if there is no connection, goes on with a handshake, notices that the server is
    /// gone. Never blocks; makes system calls: call it when [`Self::control`] is readable, and at
    /// an interval (20 ms, say) while the link is not up.
    pub fn poll(&mut self) -> Link {
        todo!()
    }

    /// State as of the last [`Self::poll`].
    pub fn link(&self) -> Link {
        todo!()
    }

    /// Why the link is down, as far as known.
    pub fn last_error(&self) -> Option<&str> {
        todo!()
    }

    /// The control socket, while there is one; another one after each reconnect.
    pub fn control(&self) -> Option<BorrowedFd<'_>> {
        todo!()
    }

    /// Appends up to `max` buffers of received frames to `bufs`, whole frames only; returns how
    /// many. Their slots are posted anew by [`Self::flush`].
    pub fn receive(&mut self, _bufs: &mut Vec<Buf>, _max: usize) -> usize {
        todo!()
    }

    /// The bytes of a buffer.
    pub fn bytes(&self, _buf: &Buf) -> &[u8] {
        todo!()
    }

    /// The bytes of a buffer, to change in place.
    pub fn bytes_mut(&mut self, _buf: &mut Buf) -> &mut [u8] {
        todo!()
    }

    /// A free buffer of no bytes, behind the headroom.
    pub fn alloc(&mut self) -> Option<Buf> {
        todo!()
    }

    /// Gives a buffer back.
    pub fn free(&mut self, _buf: Buf) {
        todo!()
    }

    /// Puts a frame of one buffer into the ring without copying it; the server sees it after
    /// [`Self::flush`]. Gives the buffer back if there is no room or no link.
    pub fn send(&mut self, _buf: Buf) -> Result<(), Buf> {
        todo!()
    }

    /// Puts a frame of several buffers (at most [`crate::CHAIN_SLOTS_MAX`]) into the ring and
    /// empties `bufs`; false (and nothing done) if there is no room or no link.
    pub fn send_chain(&mut self, _bufs: &mut Vec<Buf>) -> bool {
        todo!()
    }

    /// Slots that frames can be put into now.
    pub fn room(&mut self) -> usize {
        todo!()
    }

    /// Shows the server what was sent, posts free buffers for receiving, and rings if the server
    /// wants that. Call it after each batch.
    pub fn flush(&mut self) {
        todo!()
    }

    /// Lets the server ring. True if there is nothing to receive, so that polling the descriptor
    /// is safe; false if there is (the doorbell is off again then).
    pub fn arm(&mut self) -> bool {
        todo!()
    }

    /// Stops the server from ringing and empties the doorbell.
    pub fn disarm(&mut self) {
        todo!()
    }
}

impl AsFd for Client {
    /// The doorbell: an eventfd, readable when the server rang. The same for the client's life.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }
}
