//! The side that owns the memory and trusts its server.
//!
//! One memfd holds both rings and all buffers, for the client's life: a server that comes back
//! gets the same memory. Which buffer lies in which slot is kept in private memory, so that none is lost
//! whatever the server left behind.

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
use crate::seqpacket::{self, Received};
use crate::{CHAIN_SLOTS_MAX, HANDSHAKE_MS_MAX, RING_LOG2_MAX, bell};

/// Buffers start at multiples of this, as cache lines do.
const BUFFER_ALIGN_BYTES: u32 = 64;

/// Buffers start at a multiple of this in the region.
const PAGE_BYTES: usize = 4096;

/// Buffers beyond those that both rings can hold.
const BUFFERS_SPARE_MIN: u32 = 64;

/// Bytes of a client's memory; offsets are 32 bits and servers have limits of their own.
const MEMORY_BYTES_MAX: u64 = crate::REGION_BYTES_MAX;

/// Sizes of a client's rings and memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Slots of each of the two rings, as a power of two, 1..=[`RING_LOG2_MAX`]. A server may ask
    /// for fewer.
    pub ring_log2: u8,
    /// Bytes of a buffer, headroom included; a multiple of 64 below 65,536.
    pub buffer_bytes: u32,
    /// Bytes left free before a received frame, for [`Buf::grow_front`].
    pub headroom_bytes: u32,
    /// Buffers; at least 64 more than both rings have slots.
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
    pool: u32,
    metadata: u32,
    start: u16,
    len: u16,
    capacity: u16,
    more: bool,
}

impl Buf {
    /// The sender's word about the frame, in the first buffer of each.
    #[inline]
    pub fn metadata(&self) -> u32 {
        self.metadata
    }

    /// Sets the word that goes with the frame.
    #[inline]
    pub fn set_metadata(&mut self, metadata: u32) {
        self.metadata = metadata;
    }

    /// Bytes in it.
    #[inline]
    pub fn len(&self) -> usize {
        usize::from(self.len)
    }

    /// Whether it has no bytes.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes that it can be made long by [`Self::set_len`].
    #[inline]
    pub fn capacity(&self) -> usize {
        usize::from(self.capacity - self.start)
    }

    /// Whether the frame goes on in the next buffer received.
    #[inline]
    pub fn continues(&self) -> bool {
        self.more
    }

    /// Takes `bytes` off the front; false (nothing done) if there are fewer.
    #[inline]
    pub fn trim_front(&mut self, bytes: usize) -> bool {
        if bytes > self.len() {
            return false;
        }
        self.start += bytes as u16;
        self.len -= bytes as u16;
        true
    }

    /// Puts `bytes` undefined bytes before the front; false (nothing done) if there is no room.
    #[inline]
    pub fn grow_front(&mut self, bytes: usize) -> bool {
        if bytes > usize::from(self.start) {
            return false;
        }
        self.start -= bytes as u16;
        self.len += bytes as u16;
        true
    }

    /// Makes it `bytes` long, cut or with undefined bytes at the end; false (nothing done) if
    /// there is no room.
    #[inline]
    pub fn set_len(&mut self, bytes: usize) -> bool {
        if bytes > self.capacity() {
            return false;
        }
        self.len = bytes as u16;
        true
    }
}

/// One ring with what lies in it.
#[derive(Debug)]
struct Lane {
    ring: Ring,
    /// By slot: the buffer in it.
    buffers: Vec<u32>,
    /// Index of the next slot to give to the server.
    head: u16,
    /// Index of the first slot that the server has, as far as known.
    tail: u16,
    /// `head` as the server knows it.
    shown: u16,
}

impl Lane {
    fn new(ring: Ring) -> Self {
        let buffers = vec![0; usize::from(ring.slots())];
        Self { ring, buffers, head: 0, tail: 0, shown: 0 }
    }

    #[inline]
    fn room(&self) -> u16 {
        self.ring.slots() - self.head.wrapping_sub(self.tail)
    }

    /// Gives a buffer to the server, which sees it later. There must be room.
    #[inline]
    fn put(&mut self, buffer: u32, descriptor: Descriptor) {
        let slot = self.ring.slot(self.head);
        self.buffers[slot] = buffer;
        self.ring.set_descriptor(self.head, descriptor);
        self.head = self.head.wrapping_add(1);
    }

    /// Slots that the server is done with; `None` if it says more than it was given.
    fn done(&self) -> Option<u16> {
        let done = self.ring.tail().load(Ordering::Acquire).wrapping_sub(self.tail);
        (done <= self.shown.wrapping_sub(self.tail)).then_some(done)
    }

    /// Takes the oldest slot back, with what the server wrote there.
    #[inline]
    fn take(&mut self) -> (u32, Descriptor) {
        let descriptor = self.ring.descriptor(self.tail);
        let buffer = self.buffers[self.ring.slot(self.tail)];
        self.tail = self.tail.wrapping_add(1);
        (buffer, descriptor)
    }

    /// Takes the buffers of the oldest slots back, which are so many.
    fn take_buffers(&mut self, count: u16, free: &mut Vec<u32>) {
        let start = self.ring.slot(self.tail);
        let (wrapped, on) = self.buffers.split_at(start);
        let count_on = on.len().min(count.into());
        free.extend_from_slice(&on[..count_on]);
        free.extend_from_slice(&wrapped[..usize::from(count) - count_on]);
        self.tail = self.tail.wrapping_add(count);
    }

    /// Takes everything back, and makes the ring new.
    fn reset(&mut self, flags: u16, free: &mut Vec<u32>) {
        self.take_buffers(self.head.wrapping_sub(self.tail), free);
        (self.head, self.tail, self.shown) = (0, 0, 0);
        self.ring.reset(flags);
    }
}

/// A client: its memory, and a connection while there is a server.
///
/// Memory and every [`Buf`] outlive connections; what lay in the rings when a server went is free
/// again.
#[derive(Debug)]
pub struct Client {
    path: PathBuf,
    interface_id: u32,
    name: String,
    settings: Settings,
    pool: u32,
    memory: Regions,
    memfd: OwnedFd,
    /// Offset of the first buffer.
    buffers_at: usize,
    free: Vec<u32>,
    from_server: Lane,
    to_server: Lane,
    /// Rung by the server.
    bell: OwnedFd,
    /// Rung for the server.
    server_bell: OwnedFd,
    /// Whether it was shown something since [`Client::ring`].
    unheard: bool,
    link: Link,
    socket: Option<OwnedFd>,
    since: Instant,
    last_error: Option<String>,
}

impl Client {
    /// Allocates memory for interface `interface_id` of the server at `path`. `name` is what the
    /// client calls itself, cut to 31 bytes. Does not connect: see [`Self::poll`].
    pub fn new(
        path: &Path,
        interface_id: u32,
        name: &str,
        settings: Settings,
    ) -> Result<Self, ClientError> {
        /// Tells the buffers of one client from those of another.
        static POOLS: AtomicU32 = AtomicU32::new(0);
        let sizes = Sizes::of(settings).map_err(ClientError::Settings)?;
        let (mapping, memfd) = Mapping::create(sizes.total)?;
        let memory: Regions = Arc::new([mapping]);
        let (from_server, to_server) = sizes
            .lanes(&memory, settings.ring_log2)
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
            link: Link::Down,
            socket: None,
            since: Instant::now(),
            last_error: None,
        })
    }

    /// Connects if there is no connection, goes on with a handshake, notices that the server is
    /// gone. Never blocks; makes system calls: call it when [`Self::control`] is readable, and at
    /// an interval (20 ms, say) while the link is not up.
    pub fn poll(&mut self) -> Link {
        if self.link == Link::Down {
            match seqpacket::connect(&self.path) {
                Ok(socket) => {
                    self.socket = Some(socket);
                    self.since = Instant::now();
                    self.link = Link::Connecting;
                }
                Err(error) => self.last_error = Some(error.to_string()),
            }
        }
        if let Err(why) = self.hear() {
            self.go_down(why);
        }
        self.link
    }

    /// Takes the messages that have come.
    fn hear(&mut self) -> Result<(), String> {
        while let Some(socket) = &self.socket {
            match seqpacket::receive(socket).map_err(|error| error.to_string())? {
                Received::Message(Message::Hello(hello), _) if self.link == Link::Connecting => {
                    self.introduce(&hello)?;
                }
                Received::Message(Message::Ack, _) if self.link == Link::Connecting => {}
                Received::Message(Message::Connected { .. }, _)
                    if self.link == Link::Connecting =>
                {
                    self.link = Link::Up;
                    self.last_error = None;
                    self.flush();
                }
                Received::Message(Message::Disconnect { reason }, _) => return Err(reason),
                Received::Message(..) => return Err("unexpected message".into()),
                Received::End => return Err("server hung up".into()),
                Received::Bad(why) => return Err(why.into()),
                Received::Nothing => break,
            }
        }
        let limit = Duration::from_millis(HANDSHAKE_MS_MAX);
        if self.link == Link::Connecting && self.since.elapsed() > limit {
            return Err("server does not answer".into());
        }
        Ok(())
    }

    /// Answers the server's hello with everything that it needs.
    fn introduce(&mut self, hello: &Hello) -> Result<(), String> {
        if !(hello.version_min..=hello.version_max).contains(&VERSION) {
            return Err("server does not speak memif 2.0".into());
        }
        let ring_log2 = self.settings.ring_log2.min(hello.ring_log2_max);
        let sizes = Sizes::of(self.settings)?;
        (self.from_server, self.to_server) =
            sizes.lanes(&self.memory, ring_log2).ok_or("rings don't fit")?;
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
        self.link = Link::Down;
        self.last_error = Some(why);
        self.from_server.reset(MASKED, &mut self.free);
        self.to_server.reset(0, &mut self.free);
    }

    /// State as of the last [`Self::poll`], or down if the server wrote nonsense since.
    pub fn link(&self) -> Link {
        self.link
    }

    /// Why the link is or was down, as far as known.
    pub fn last_error(&self) -> Option<&str> {
        self.last_error.as_deref()
    }

    /// The control socket, while there is one; another one after each reconnect.
    pub fn control(&self) -> Option<BorrowedFd<'_>> {
        self.socket.as_ref().map(AsFd::as_fd)
    }

    /// Appends the buffers of up to `max` received frames to `bufs`; returns how many frames.
    /// Their slots are posted anew by [`Self::flush`].
    pub fn receive(&mut self, bufs: &mut Vec<Buf>, max: usize) -> usize {
        self.receive_each(max, |buf| bufs.push(buf))
    }

    /// As [`Self::receive`], into other hands.
    #[inline]
    pub fn receive_each(&mut self, max: usize, mut to: impl FnMut(Buf)) -> usize {
        if self.link != Link::Up {
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

    /// Bytes of a buffer, and of these the headroom: [`Sizes::of`] saw that they fit.
    #[inline]
    fn sizes(&self) -> (u16, u16) {
        (self.settings.buffer_bytes as u16, self.settings.headroom_bytes as u16)
    }

    /// Offset in the memory of a buffer's bytes. Panics on another client's.
    #[inline]
    fn offset(&self, buf: &Buf) -> usize {
        assert_eq!(buf.pool, self.pool, "a buffer of another client");
        self.buffers_at
            + buf.index as usize * self.settings.buffer_bytes as usize
            + usize::from(buf.start)
    }

    /// The bytes of a buffer.
    #[inline]
    pub fn bytes(&self, buf: &Buf) -> &[u8] {
        let offset = self.offset(buf);
        // SAFETY: the buffer is in no ring while there is a Buf of it (`Buf` can't be copied, and
        // only `take` and `alloc` make one), so the server, which is trusted, does not write to
        // it; and writing by `bytes_mut` needs this client mutably.
        unsafe { self.memory[0].slice(offset, buf.len()) }
    }

    /// The bytes of a buffer, to change in place.
    #[inline]
    pub fn bytes_mut(&mut self, buf: &mut Buf) -> &mut [u8] {
        let offset = self.offset(buf);
        // SAFETY: as in `bytes`; the only reference into the memory, since it borrows the client
        // mutably.
        unsafe { self.memory[0].slice_mut(offset, buf.len()) }
    }

    /// A free buffer of no bytes, behind the headroom.
    pub fn alloc(&mut self) -> Option<Buf> {
        if self.free.is_empty() {
            self.reclaim();
        }
        let index = self.free.pop()?;
        let (capacity, start) = self.sizes();
        let pool = self.pool;
        Some(Buf { index, pool, metadata: 0, start, len: 0, capacity, more: false })
    }

    /// Gives a buffer back. Panics on another client's.
    #[inline]
    pub fn free(&mut self, buf: Buf) {
        assert_eq!(buf.pool, self.pool, "a buffer of another client");
        self.free.push(buf.index);
    }

    /// Takes back what the server has taken out of the ring.
    fn reclaim(&mut self) {
        if self.link != Link::Up {
            return;
        }
        match self.to_server.done() {
            Some(done) => self.to_server.take_buffers(done, &mut self.free),
            None => self.go_down("server index out of bounds".into()),
        }
    }

    /// Slots that frames can be put into now; none without a link.
    pub fn room(&mut self) -> usize {
        self.reclaim();
        if self.link == Link::Up { self.to_server.room().into() } else { 0 }
    }

    #[inline]
    fn put(&mut self, buf: &Buf, flags: u16) {
        let (length, offset, metadata) = (buf.len.into(), self.offset(buf) as u32, buf.metadata);
        let descriptor = Descriptor { flags, region: 0, length, offset, metadata };
        self.to_server.put(buf.index, descriptor);
    }

    /// Puts a frame of one buffer into the ring without copying it; the server sees it after
    /// [`Self::flush`]. Gives the buffer back if there is no room or no link.
    #[inline]
    pub fn send(&mut self, buf: Buf) -> Result<(), Buf> {
        if self.link != Link::Up || self.to_server.room() == 0 && self.room() == 0 {
            return Err(buf);
        }
        self.put(&buf, 0);
        Ok(())
    }

    /// Puts a frame of several buffers (at most [`CHAIN_SLOTS_MAX`]) into the ring and empties
    /// `bufs`; false (and nothing done) if there is no room or no link, or if they are none or
    /// too many.
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

    /// Shows the server what was sent, posts free buffers for receiving, and rings if the server
    /// wants that. Call it after each batch. The ring is its only system call, and none while
    /// the server is busy.
    pub fn flush(&mut self) {
        self.show();
        self.ring();
    }

    /// As [`Self::flush`], but what is to be rung is left for [`Self::ring`]: call that at the latest
    /// when nothing more is to be sent. Makes no system call.
    pub fn show(&mut self) {
        // No sooner than needed: to look takes a line of the cache away from the server.
        if self.free.len() < self.from_server.room().into() {
            self.reclaim();
        }
        if self.link != Link::Up {
            return;
        }
        // First, so that answers to what is shown below find all the room that there is.
        self.post();
        let lane = &mut self.to_server;
        if lane.shown != lane.head {
            lane.shown = lane.head;
            lane.ring.head().store(lane.head, Ordering::Release);
            self.unheard = true;
        }
    }

    /// Rings if the server sleeps and was shown something since the last call. To look whether it sleeps takes
    /// until all that was written can be seen, which is too long for each batch.
    #[inline]
    pub fn ring(&mut self) {
        if std::mem::take(&mut self.unheard) && idle::is_asleep(self.to_server.ring.flags()) {
            bell::ring_own(self.server_bell.as_fd());
        }
    }

    /// Posts free buffers for receiving.
    fn post(&mut self) {
        let Settings { buffer_bytes, headroom_bytes, .. } = self.settings;
        let lane = &mut self.from_server;
        for _ in 0..lane.room() {
            let Some(index) = self.free.pop() else { break };
            let offset = self.buffers_at + index as usize * buffer_bytes as usize;
            let descriptor = Descriptor {
                flags: 0,
                region: 0,
                length: buffer_bytes - headroom_bytes,
                offset: offset as u32 + headroom_bytes,
                metadata: 0,
            };
            lane.put(index, descriptor);
        }
        if lane.shown != lane.head {
            lane.shown = lane.head;
            lane.ring.head().store(lane.head, Ordering::Release);
        }
    }

    /// Lets the server ring. True if there is nothing to receive, so that polling the descriptor
    /// is safe; false if there is (the doorbell is off again then).
    pub fn arm(&mut self) -> bool {
        let lane = &self.from_server;
        self.link != Link::Up || idle::arm(lane.ring.tail(), lane.tail, lane.ring.flags())
    }

    /// As [`Self::arm`], for who waits for room in a full ring: true if there is none. Servers that do
    /// not ring for room ([`crate::Sender::wake`]) make it necessary to bound the sleep.
    pub fn arm_for_room(&mut self) -> bool {
        let lane = &self.to_server;
        let flags = self.from_server.ring.flags();
        self.link != Link::Up || idle::arm(lane.ring.tail(), lane.tail, flags)
    }

    /// Stops the server from ringing and empties the doorbell.
    pub fn disarm(&mut self) {
        idle::disarm(self.from_server.ring.flags());
        bell::drain(self.bell.as_fd());
    }
}

impl AsFd for Client {
    /// The doorbell: an eventfd, readable when the server rang. The same for the client's life.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }
}

/// Where things lie in a client's memory: the ring to the server, the one from it, the buffers.
struct Sizes {
    from_server_at: usize,
    buffers_at: usize,
    total: usize,
}

impl Sizes {
    fn of(settings: Settings) -> Result<Self, &'static str> {
        let Settings { ring_log2, buffer_bytes, headroom_bytes, buffers } = settings;
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

    fn lanes(&self, memory: &Regions, ring_log2: u8) -> Option<(Lane, Lane)> {
        let lane = |at| Ring::new(memory.clone(), 0, at, 1 << ring_log2).map(Lane::new);
        Some((lane(self.from_server_at)?, lane(0)?))
    }
}
