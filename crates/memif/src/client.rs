//! The side that owns the memory and trusts its server.
//!
//! One memfd holds both rings and all buffers for the client's life: a
//! restarted server gets the same memory. Private memory records the buffer
//! in each slot. So no buffer is lost, whatever the server left behind.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crate::idle::{self, MASKED};
use crate::memory::Mapping;
use crate::message::{AddRing, Hello, Init, MODE_ETHERNET, Message, VERSION};
use crate::ring::{Descriptor, NEXT, Regions, Ring, ring_bytes};
use crate::seqpacket::{self, ReceivedMessage};
use crate::{CHAIN_SLOTS_MAX, HANDSHAKE_MS_MAX, RING_LOG2_MAX, bell};

/// Buffers start at multiples of this, as cache lines do.
const BUFFER_ALIGN_BYTES: u32 = 64;

/// Buffers start at a multiple of this in the region.
const PAGE_BYTES: usize = 4096;

/// Buffers in addition to those that both rings can hold.
const BUFFERS_SPARE_MIN: u32 = 64;

/// Bytes of a client's memory. Offsets have 32 bits, and servers have their own limits.
const MEMORY_BYTES_MAX: u64 = crate::REGION_BYTES_MAX;

/// Sizes of a client's rings and memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemifSettings {
    /// Slots of each of the two rings, as a power of two, 1..=[`RING_LOG2_MAX`]. A server may ask
    /// for fewer.
    pub ring_log2: u8,
    /// Bytes of a buffer, headroom included; a multiple of 64 below 65,536.
    pub buffer_bytes: u32,
    /// Bytes left free before a received frame, for [`Buf::grow_front`].
    pub headroom_bytes: u32,
    /// Number of buffers: at least 64 more than both rings have slots.
    pub buffers: u32,
}

impl Default for MemifSettings {
    /// 1024 slots, 4096 buffers of 2048 bytes with 64 bytes of headroom: 8 MiB.
    fn default() -> Self {
        Self { ring_log2: 10, buffer_bytes: 2048, headroom_bytes: 64, buffers: 4096 }
    }
}

/// Error from creating a client.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The settings contradict each other.
    #[error("memif settings: {0}")]
    Settings(&'static str),
    /// The system refused memory or a descriptor.
    #[error("memif memory")]
    Io(#[from] io::Error),
}

/// State of a client's connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConnectionState {
    /// No server. [`MemifClient::poll`] tries again, once a call.
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
    pool: u32,
    metadata: u32,
    start: u16,
    len: u16,
    capacity: u16,
    more: bool,
}

impl Buf {
    /// The sender's metadata for the frame, in its first buffer.
    #[inline]
    pub fn metadata(&self) -> u32 {
        self.metadata
    }

    /// Sets the metadata that accompanies the frame.
    #[inline]
    pub fn set_metadata(&mut self, metadata: u32) {
        self.metadata = metadata;
    }

    /// Length of the contents, bytes.
    #[inline]
    pub fn len(&self) -> usize {
        usize::from(self.len)
    }

    /// True if it has no bytes.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Longest length that [`Self::set_len`] accepts, bytes.
    #[inline]
    pub fn capacity(&self) -> usize {
        usize::from(self.capacity - self.start)
    }

    /// True if the frame continues in the next buffer received.
    #[inline]
    pub fn continues(&self) -> bool {
        self.more
    }

    /// Removes `bytes` from the front. False (and no change) if there are fewer.
    #[inline]
    pub fn trim_front(&mut self, bytes: usize) -> bool {
        if bytes > self.len() {
            return false;
        }
        self.start += bytes as u16;
        self.len -= bytes as u16;
        true
    }

    /// Adds `bytes` undefined bytes at the front. False (and no change) without enough headroom.
    #[inline]
    pub fn grow_front(&mut self, bytes: usize) -> bool {
        if bytes > usize::from(self.start) {
            return false;
        }
        self.start -= bytes as u16;
        self.len += bytes as u16;
        true
    }

    /// Sets the length to `bytes`: cuts the end, or adds undefined bytes there. False (and no
    /// change) if it exceeds the capacity.
    #[inline]
    pub fn set_len(&mut self, bytes: usize) -> bool {
        if bytes > self.capacity() {
            return false;
        }
        self.len = bytes as u16;
        true
    }
}

/// Ring and the buffers in its slots.
#[derive(Debug)]
struct ClientRing {
    ring: Ring,
    /// Buffer index, by slot.
    buffers: Vec<u32>,
    /// Index of the next slot to give to the server.
    head: u16,
    /// Index of the oldest slot that the server has not yet returned, as far as known.
    tail: u16,
    /// `head` as last published to the server.
    shown: u16,
}

impl ClientRing {
    fn new(ring: Ring) -> Self {
        let buffers = vec![0; usize::from(ring.slots())];
        Self { ring, buffers, head: 0, tail: 0, shown: 0 }
    }

    #[inline]
    fn room(&self) -> u16 {
        self.ring.slots() - self.head.wrapping_sub(self.tail)
    }

    /// Puts a buffer into the ring; the server sees it later. The ring must have a free slot.
    #[inline]
    fn put(&mut self, buffer: u32, descriptor: Descriptor) {
        let slot = self.ring.slot(self.head);
        self.buffers[slot] = buffer;
        self.ring.set_descriptor(self.head, descriptor);
        self.head = self.head.wrapping_add(1);
    }

    /// Slots that the server has returned. `None` if it claims more than it was given.
    fn done(&self) -> Option<u16> {
        let done = self.ring.tail().load(Ordering::Acquire).wrapping_sub(self.tail);
        (done <= self.shown.wrapping_sub(self.tail)).then_some(done)
    }

    /// Takes the oldest slot back, with the descriptor that the server wrote.
    #[inline]
    fn take(&mut self) -> (u32, Descriptor) {
        let descriptor = self.ring.descriptor(self.tail);
        let buffer = self.buffers[self.ring.slot(self.tail)];
        self.tail = self.tail.wrapping_add(1);
        (buffer, descriptor)
    }

    /// Takes back the buffers of the oldest `count` slots.
    fn take_buffers(&mut self, count: u16, free: &mut Vec<u32>) {
        let start = self.ring.slot(self.tail);
        let (wrapped, on) = self.buffers.split_at(start);
        let count_on = on.len().min(count.into());
        free.extend_from_slice(&on[..count_on]);
        free.extend_from_slice(&wrapped[..usize::from(count) - count_on]);
        self.tail = self.tail.wrapping_add(count);
    }

    /// Takes all buffers back and initialises the ring.
    fn reset(&mut self, flags: u16, free: &mut Vec<u32>) {
        self.take_buffers(self.head.wrapping_sub(self.tail), free);
        (self.head, self.tail, self.shown) = (0, 0, 0);
        self.ring.reset(flags);
    }
}

/// Client: its memory, and a connection while there is a server.
///
/// Memory and every [`Buf`] outlive connections. When a
/// server is gone, the buffers in the rings are free again.
#[derive(Debug)]
pub struct MemifClient {
    path: PathBuf,
    interface_id: u32,
    name: String,
    settings: MemifSettings,
    pool: u32,
    memory: Regions,
    memfd: OwnedFd,
    /// Offset of the first buffer.
    buffers_at: usize,
    free: Vec<u32>,
    from_server: ClientRing,
    to_server: ClientRing,
    /// The server rings this doorbell.
    bell: OwnedFd,
    /// The client rings this doorbell to wake the server.
    server_bell: OwnedFd,
    /// True if frames were published since the last [`MemifClient::ring`].
    unheard: bool,
    link: ConnectionState,
    socket: Option<OwnedFd>,
    since: Instant,
    last_error: Option<String>,
}

impl MemifClient {
    /// Allocates memory for interface `interface_id` of the server at `path`. `name` is the name
    /// that the client sends, cut to 31 bytes. Does not connect: see [`Self::poll`].
    pub fn new(
        path: &Path,
        interface_id: u32,
        name: &str,
        settings: MemifSettings,
    ) -> Result<Self, ClientError> {
        /// Distinguishes the buffers of different clients.
        static POOLS: AtomicU32 = AtomicU32::new(0);
        let sizes = Sizes::of(settings).map_err(ClientError::Settings)?;
        let (mapping, memfd) = Mapping::create(sizes.total)?;
        let memory: Regions = Arc::new([mapping]);
        let (from_server, to_server) = sizes
            .rings(&memory, settings.ring_log2)
            .ok_or(ClientError::Settings("rings don't fit"))?;
        Ok(Self {
            path: path.into(),
            interface_id,
            name: name.into(),
            settings,
            pool: POOLS.fetch_add(1, Ordering::Relaxed),
            memory,
            memfd,
            buffers_at: sizes.buffers_at,
            free: (0..settings.buffers).collect(),
            from_server,
            to_server,
            bell: bell::eventfd()?,
            server_bell: bell::eventfd()?,
            unheard: false,
            link: ConnectionState::Down,
            socket: None,
            since: Instant::now(),
            last_error: None,
        })
    }

    /// Connects if there is no connection, advances a handshake, and notices a server that is gone.
    /// Never blocks, but makes system calls. Call it when [`Self::control`] is readable, and at an
    /// interval (such as 20 ms) while the link is not up.
    pub fn poll(&mut self) -> ConnectionState {
        if self.link == ConnectionState::Down {
            match seqpacket::connect(&self.path) {
                Ok(socket) => {
                    self.socket = Some(socket);
                    self.since = Instant::now();
                    self.link = ConnectionState::Connecting;
                }
                Err(error) => self.last_error = Some(error.to_string()),
            }
        }
        if let Err(why) = self.hear() {
            self.go_down(why);
        }
        self.link
    }

    /// Handles the messages received so far.
    fn hear(&mut self) -> Result<(), String> {
        while let Some(socket) = &self.socket {
            match seqpacket::receive(socket).map_err(|error| error.to_string())? {
                ReceivedMessage::Message(Message::Hello(hello), _)
                    if self.link == ConnectionState::Connecting =>
                {
                    self.introduce(&hello)?;
                }
                ReceivedMessage::Message(Message::Ack, _)
                    if self.link == ConnectionState::Connecting => {}
                ReceivedMessage::Message(Message::Connected { .. }, _)
                    if self.link == ConnectionState::Connecting =>
                {
                    self.link = ConnectionState::Up;
                    self.last_error = None;
                    self.flush();
                }
                ReceivedMessage::Message(Message::Disconnect { reason }, _) => return Err(reason),
                ReceivedMessage::Message(..) => return Err("unexpected message".into()),
                ReceivedMessage::End => return Err("server hung up".into()),
                ReceivedMessage::Bad(why) => return Err(why.into()),
                ReceivedMessage::Nothing => break,
            }
        }
        let limit = Duration::from_millis(HANDSHAKE_MS_MAX);
        if self.link == ConnectionState::Connecting && self.since.elapsed() > limit {
            return Err("server does not answer".into());
        }
        Ok(())
    }

    /// Answers the server's hello with the memory, the rings and their doorbells.
    fn introduce(&mut self, hello: &Hello) -> Result<(), String> {
        if !(hello.version_min..=hello.version_max).contains(&VERSION) {
            return Err("server does not speak memif 2.0".into());
        }
        let ring_log2 = self.settings.ring_log2.min(hello.ring_log2_max);
        let sizes = Sizes::of(self.settings)?;
        (self.from_server, self.to_server) =
            sizes.rings(&self.memory, ring_log2).ok_or("rings don't fit")?;
        self.from_server.reset(MASKED, &mut self.free);
        self.to_server.reset(0, &mut self.free);
        let Some(socket) = &self.socket else { return Ok(()) };
        let ring = |to_server, offset: usize| {
            let offset = offset as u32; // checked by `Sizes::of`
            Message::AddRing(AddRing { to_server, index: 0, region: 0, offset, ring_log2 })
        };
        let init = Init {
            version: VERSION,
            interface_id: self.interface_id,
            mode: MODE_ETHERNET,
            name: self.name.clone(),
        };
        let region = Message::AddRegion { index: 0, size: self.memory[0].bytes() as u64 };
        for (message, fd) in [
            (Message::Init(init), None),
            (region, Some(self.memfd.as_fd())),
            (ring(true, 0), Some(self.server_bell.as_fd())),
            (ring(false, sizes.from_server_at), Some(self.bell.as_fd())),
            (Message::Connect { name: self.name.clone() }, None),
        ] {
            seqpacket::send(socket, &message, fd).map_err(|error| error.to_string())?;
        }
        Ok(())
    }

    fn go_down(&mut self, why: String) {
        self.socket = None;
        self.link = ConnectionState::Down;
        self.last_error = Some(why);
        self.from_server.reset(MASKED, &mut self.free);
        self.to_server.reset(0, &mut self.free);
    }

    /// State as of the last [`Self::poll`]. Down if the server has since written invalid indices.
    pub fn link(&self) -> ConnectionState {
        self.link
    }

    /// Reason why the link is or was down, as far as known.
    pub fn last_error(&self) -> Option<&str> {
        self.last_error.as_deref()
    }

    /// Control socket, while there is one. A reconnect makes a new one.
    pub fn control(&self) -> Option<BorrowedFd<'_>> {
        self.socket.as_ref().map(AsFd::as_fd)
    }

    /// Appends the buffers of up to `max` received frames to `bufs`; returns the number of frames.
    /// [`Self::flush`] posts their slots again.
    pub fn receive(&mut self, bufs: &mut Vec<Buf>, max: usize) -> usize {
        self.receive_each(max, |buf| bufs.push(buf))
    }

    /// Like [`Self::receive`], but passes each buffer to `to`.
    #[inline]
    pub fn receive_each(&mut self, max: usize, mut to: impl FnMut(Buf)) -> usize {
        if self.link != ConnectionState::Up {
            return 0;
        }
        let Some(mut done) = self.from_server.done() else {
            self.go_down("server index out of bounds".into());
            return 0;
        };
        let (capacity, start) = self.sizes();
        let mut frames = 0;
        let mut inside = false;
        while done > 0 && (inside || frames < max) {
            let (index, descriptor) = self.from_server.take();
            done -= 1;
            inside = descriptor.flags & NEXT != 0;
            frames += usize::from(!inside);
            let before = index as usize * usize::from(capacity);
            let at = self.buffers_at + before + usize::from(start);
            self.memory[0].prefetch_to_write(at);
            to(Buf {
                index,
                pool: self.pool,
                metadata: descriptor.metadata,
                start,
                len: descriptor.length.min((capacity - start).into()) as u16,
                capacity,
                more: inside,
            });
        }
        frames
    }

    /// Bytes of a buffer, and its headroom. [`Sizes::of`] has checked that both fit.
    #[inline]
    fn sizes(&self) -> (u16, u16) {
        (self.settings.buffer_bytes as u16, self.settings.headroom_bytes as u16)
    }

    /// Offset of a buffer's bytes in the memory. Panics for another client's buffer.
    #[inline]
    fn offset(&self, buf: &Buf) -> usize {
        assert_eq!(buf.pool, self.pool, "a buffer of another client");
        self.buffers_at
            + buf.index as usize * self.settings.buffer_bytes as usize
            + usize::from(buf.start)
    }

    /// Contents of a buffer.
    #[inline]
    pub fn bytes(&self, buf: &Buf) -> &[u8] {
        let offset = self.offset(buf);
        // SAFETY: a buffer with a Buf is in no ring (`Buf` can't be copied, and only `take` and
        // `alloc` make one). So the server, which is trusted, does not write to it. Writing by
        // `bytes_mut` needs this client mutably.
        unsafe { self.memory[0].slice(offset, buf.len()) }
    }

    /// Contents of a buffer, to change in place.
    #[inline]
    pub fn bytes_mut(&mut self, buf: &mut Buf) -> &mut [u8] {
        let offset = self.offset(buf);
        // SAFETY: as in `bytes`. It is the only reference into
        // the memory, since it borrows the client mutably.
        unsafe { self.memory[0].slice_mut(offset, buf.len()) }
    }

    /// Returns an empty buffer with headroom, if one is free.
    pub fn alloc(&mut self) -> Option<Buf> {
        if self.free.is_empty() {
            self.reclaim();
        }
        let index = self.free.pop()?;
        let (capacity, start) = self.sizes();
        let pool = self.pool;
        Some(Buf { index, pool, metadata: 0, start, len: 0, capacity, more: false })
    }

    /// Frees a buffer. Panics for another client's buffer.
    #[inline]
    pub fn free(&mut self, buf: Buf) {
        assert_eq!(buf.pool, self.pool, "a buffer of another client");
        self.free.push(buf.index);
    }

    /// Takes back the buffers that the server has consumed.
    fn reclaim(&mut self) {
        if self.link != ConnectionState::Up {
            return;
        }
        match self.to_server.done() {
            Some(done) => self.to_server.take_buffers(done, &mut self.free),
            None => self.go_down("server index out of bounds".into()),
        }
    }

    /// Free slots for frames; zero while the link is not up.
    pub fn room(&mut self) -> usize {
        self.reclaim();
        if self.link == ConnectionState::Up { self.to_server.room().into() } else { 0 }
    }

    #[inline]
    fn put(&mut self, buf: &Buf, flags: u16) {
        let (length, offset, metadata) = (buf.len.into(), self.offset(buf) as u32, buf.metadata);
        let descriptor = Descriptor { flags, region: 0, length, offset, metadata };
        self.to_server.put(buf.index, descriptor);
    }

    /// Puts a frame of one buffer into the ring without copying it. The server sees it after
    /// [`Self::flush`]. Returns the buffer if the ring is full or the link is not up.
    #[inline]
    pub fn send(&mut self, buf: Buf) -> Result<(), Buf> {
        if self.link != ConnectionState::Up || self.to_server.room() == 0 && self.room() == 0 {
            return Err(buf);
        }
        self.put(&buf, 0);
        Ok(())
    }

    /// Puts a frame of 1 to [`CHAIN_SLOTS_MAX`] buffers into the ring
    /// and empties `bufs`. False (and no change) if their number is out
    /// of range, the ring lacks slots, or the link is not up.
    pub fn send_chain(&mut self, bufs: &mut Vec<Buf>) -> bool {
        if !(1..=CHAIN_SLOTS_MAX).contains(&bufs.len()) || self.room() < bufs.len() {
            return false;
        }
        let last = bufs.len() - 1;
        for (number, buf) in bufs.drain(..).enumerate() {
            self.put(&buf, if number < last { NEXT } else { 0 });
        }
        true
    }

    /// Publishes sent frames to the server, posts free buffers for receiving, and rings if the
    /// server asks for it. Call it after each batch. Ringing is its only system call, and only
    /// happens while the server sleeps.
    pub fn flush(&mut self) {
        self.publish();
        self.ring();
    }

    /// Like [`Self::flush`], but leaves ringing to [`Self::ring`]. Call that at the latest when
    /// there is nothing more to send. Makes no system call.
    pub fn publish(&mut self) {
        // As late as possible: reading the index takes a cache line away from the server.
        if self.free.len() < self.from_server.room().into() {
            self.reclaim();
        }
        if self.link != ConnectionState::Up {
            return;
        }
        // First, so that answers to the frames published below find as many buffers as possible.
        self.post();
        let to_server = &mut self.to_server;
        if to_server.shown != to_server.head {
            to_server.shown = to_server.head;
            to_server.ring.head().store(to_server.head, Ordering::Release);
            self.unheard = true;
        }
    }

    /// Rings if the server sleeps and frames were published since the last call. Checking for sleep
    /// waits until all writes are visible, which is too slow for each batch.
    #[inline]
    pub fn ring(&mut self) {
        if std::mem::take(&mut self.unheard) && idle::is_asleep(self.to_server.ring.flags()) {
            bell::ring_own(self.server_bell.as_fd());
        }
    }

    /// Posts free buffers for receiving.
    fn post(&mut self) {
        let MemifSettings { buffer_bytes, headroom_bytes, .. } = self.settings;
        let from_server = &mut self.from_server;
        for _ in 0..from_server.room() {
            let Some(index) = self.free.pop() else { break };
            let offset = self.buffers_at + index as usize * buffer_bytes as usize;
            let descriptor = Descriptor {
                flags: 0,
                region: 0,
                length: buffer_bytes - headroom_bytes,
                offset: offset as u32 + headroom_bytes,
                metadata: 0,
            };
            from_server.put(index, descriptor);
        }
        if from_server.shown != from_server.head {
            from_server.shown = from_server.head;
            from_server.ring.head().store(from_server.head, Ordering::Release);
        }
    }

    /// Lets the server ring. True if there is nothing to receive, so that polling the descriptor is
    /// safe. False if there is; the doorbell is off again then.
    pub fn arm(&mut self) -> bool {
        let from_server = &self.from_server;
        self.link != ConnectionState::Up
            || idle::arm(from_server.ring.tail(), from_server.tail, from_server.ring.flags())
    }

    /// Like [`Self::arm`], but for a client that waits for free slots in a full ring. True if there
    /// are none. Bound the sleep: some servers do not ring for free slots
    /// ([`crate::Sender::wake`]).
    pub fn arm_for_room(&mut self) -> bool {
        let to_server = &self.to_server;
        let flags = self.from_server.ring.flags();
        self.link != ConnectionState::Up || idle::arm(to_server.ring.tail(), to_server.tail, flags)
    }

    /// Stops the server from ringing and empties the doorbell.
    pub fn disarm(&mut self) {
        idle::disarm(self.from_server.ring.flags());
        bell::drain(self.bell.as_fd());
    }
}

impl AsFd for MemifClient {
    /// Doorbell: an eventfd, readable after the server
    /// rang. It stays the same for the client's life.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }
}

/// Layout of a client's memory: the ring to the server, the ring from it, the buffers.
struct Sizes {
    from_server_at: usize,
    buffers_at: usize,
    total: usize,
}

impl Sizes {
    fn of(settings: MemifSettings) -> Result<Self, &'static str> {
        let MemifSettings { ring_log2, buffer_bytes, headroom_bytes, buffers } = settings;
        if !(1..=RING_LOG2_MAX).contains(&ring_log2) {
            return Err("ring_log2 is not 1..=14");
        }
        if buffer_bytes == 0
            || !buffer_bytes.is_multiple_of(BUFFER_ALIGN_BYTES)
            || buffer_bytes > u16::MAX.into()
        {
            return Err("buffer_bytes is not a multiple of 64 below 65536");
        }
        if headroom_bytes >= buffer_bytes {
            return Err("headroom_bytes leaves no room for a frame");
        }
        let slots = 1usize << ring_log2;
        if buffers < 2 * slots as u32 + BUFFERS_SPARE_MIN {
            return Err("fewer buffers than both rings hold and 64 more");
        }
        let ring = ring_bytes(slots).next_multiple_of(BUFFER_ALIGN_BYTES as usize);
        let buffers_at = (2 * ring).next_multiple_of(PAGE_BYTES);
        let total = buffers_at as u64 + u64::from(buffers) * u64::from(buffer_bytes);
        if total > MEMORY_BYTES_MAX {
            return Err("buffers take more than 128 MiB");
        }
        Ok(Self { from_server_at: ring, buffers_at, total: total as usize })
    }

    fn rings(&self, memory: &Regions, ring_log2: u8) -> Option<(ClientRing, ClientRing)> {
        let ring = |at| Ring::new(memory.clone(), 0, at, 1 << ring_log2).map(ClientRing::new);
        Some((ring(self.from_server_at)?, ring(0)?))
    }
}
