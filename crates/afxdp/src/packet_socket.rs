//! Packet sockets in use. The kernel fills a ring with
//! received frames; one system call sends many frames.
//!
//! A received frame is copied twice: by the kernel into the ring, and from there into a packet. The
//! ring is TPACKET_V2, which hands over slots one by one. TPACKET_V3 hands over whole blocks, which
//! come milliseconds late under little traffic. Frames are sent by sendmmsg(2), which copies them.
//! A transmit ring would not do: the kernel returns its slots while the receiver at the other end
//! of a veth still reads their bytes.
//!
//! Frames are received as they were on the wire:
//! - A VLAN tag that the kernel has removed is put back.
//! - A checksum that the sender left to its device is completed.
//! - A frame of several segments (TSO, USO, GRO) is cut into its segments.
//!
//! A frame longer than a slot waits outside the ring and is
//! read by its own system call: one for up to 45 segments.
//!
//! Limits: [`RING_ENTRIES`] frames wait in each direction, and [`WAITING_BYTES`] of frames longer
//! than a slot. Frames that are longer than [`RECEIVE_BYTES_MAX`] even when cut are counted and
//! dropped. Only Internet checksums are completed, not SCTP's.
//!
//! Source: packet(7), Linux Documentation/networking/packet_mmap.rst, net/packet/af_packet.c.

use std::cell::Cell;
use std::io;
use std::mem::{offset_of, zeroed};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, Ordering};

use libc::tpacket2_hdr as Header;

use pdp_wire::offload::{Cut, complete_at};

use crate::pool::PacketBuffer;
use crate::{Error, RECEIVE_BYTES_MAX, RING_ENTRIES};

/// Bytes of a slot: the kernel's headers (76 bytes) and the longest frame.
const SLOT_BYTES: usize = 2048;

/// Bytes that the kernel allocates in one piece.
const BLOCK_BYTES: usize = 64 << 10;

const RING_BYTES: usize = RING_ENTRIES as usize * SLOT_BYTES;
const _: () = assert!(RING_BYTES.is_multiple_of(BLOCK_BYTES));
const _: () = assert!(BLOCK_BYTES.is_multiple_of(SLOT_BYTES));

/// TPACKET_V2 of linux/if_packet.h.
const VERSION: libc::c_int = libc::tpacket_versions::TPACKET_V2 as libc::c_int;

/// Bytes of `struct virtio_net_hdr` (linux/virtio_net.h), which precedes each frame.
const OFFLOAD_BYTES: usize = 10;

/// VIRTIO_NET_HDR_F_NEEDS_CSUM and VIRTIO_NET_HDR_GSO_NONE of linux/virtio_net.h.
const NEEDS_CHECKSUM: u8 = 1;
const ONE_SEGMENT: u8 = 0;

/// PACKET_COPY_THRESH of linux/if_packet.h: queue a frame that is longer than its slot as a whole.
const QUEUE_LONG: libc::c_int = 7;

/// Bytes of the longest frame that is cut: an IP packet with its link header.
const LONG_BYTES: usize = (64 << 10) + ADDRESSES_BYTES + TAG_BYTES;

/// Bytes of waiting frames longer than a slot, including the kernel's overhead.
pub const WAITING_BYTES: usize = 16 << 20;

/// MAC addresses before a VLAN tag, and the tag.
const ADDRESSES_BYTES: usize = 12;
const TAG_BYTES: usize = 4;

/// Frames of one system call.
const BATCH: usize = 64;

/// Packet socket of an interface.
#[derive(Debug)]
pub struct PacketSocket {
    ring: PacketRing,
    /// The slot that the kernel fills next, as far as read.
    next: usize,
    /// Frame of that slot while it is being cut.
    long: Box<Long>,
    /// Packets given to [`PacketSocket::send`] that the kernel has not taken yet.
    waiting: Vec<PacketBuffer>,
    /// The kernel's drops up to the last reading of its counters. Reading clears them.
    dropped: Cell<u64>,
    fd: OwnedFd,
}

/// Frames that arrived but were not received.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Unread {
    /// Longer than a packet.
    pub too_long: usize,
    /// Frames of several segments, but with headers that prevent cutting.
    pub not_cut: usize,
}

/// Result of sending frames.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SendOutcome {
    /// The kernel took them.
    pub taken: usize,
    /// The kernel will never take them: they are too long for the device, or the device is gone.
    pub refused: usize,
}

impl PacketSocket {
    /// Takes over a packet socket (SOCK_RAW) that is bound to its interface. Needs no privilege.
    pub fn new(fd: OwnedFd) -> Result<Self, Error> {
        set(&fd, libc::PACKET_VERSION, &VERSION, "PACKET_VERSION")?;
        set(&fd, libc::PACKET_VNET_HDR, &1 as &libc::c_int, "PACKET_VNET_HDR")?;
        set(&fd, QUEUE_LONG, &1 as &libc::c_int, "PACKET_COPY_THRESH")?;
        let request = libc::tpacket_req {
            tp_block_size: BLOCK_BYTES as u32,
            tp_block_nr: (RING_BYTES / BLOCK_BYTES) as u32,
            tp_frame_size: SLOT_BYTES as u32,
            tp_frame_nr: RING_ENTRIES,
        };
        set(&fd, libc::PACKET_RX_RING, &request, "PACKET_RX_RING")?;
        let ring = PacketRing::map(fd.as_fd())?;
        let waiting = Vec::with_capacity(RING_ENTRIES as usize);
        let long = Box::new(Long { bytes: [0; OFFLOAD_BYTES + LONG_BYTES], cut: None, tag: None });
        let socket = Self { ring, next: 0, long, waiting, dropped: Cell::new(0), fd };
        // Discard drops from before the ring existed.
        socket.kernel_dropped();
        socket.dropped.set(0);
        Ok(socket)
    }

    /// Appends up to `count_max` received frames to `frames`, in packets from the end of `free`, of
    /// which `keep` remain. Returns the number of frames that could not be received.
    pub fn receive(
        &mut self,
        free: &mut Vec<PacketBuffer>,
        keep: usize,
        count_max: usize,
        frames: &mut Vec<PacketBuffer>,
    ) -> Unread {
        let mut unread = Unread::default();
        for _ in 0..count_max.min(free.len().saturating_sub(keep)) {
            let Some(slot) = self.ring.filled(self.next) else { break };
            let Some(mut packet) = free.pop() else { break };
            if self.long.cut.is_none() {
                match slot.read(&mut packet) {
                    SlotContent::Whole => {
                        frames.push(packet);
                        self.release();
                        continue;
                    }
                    SlotContent::TooLong => unread.too_long += 1,
                    // The kernel had no memory for the rest of it.
                    SlotContent::Lost => self.dropped.set(self.dropped.get() + 1),
                    SlotContent::Segments => self.long.copy(&slot, &mut unread),
                    SlotContent::Queued => match self.long.read(&self.fd, &slot, &mut unread) {
                        Ok(()) => {}
                        Err(_) => self.dropped.set(self.dropped.get() + 1),
                    },
                }
            }
            // Its slot stays until it is cut, so that the descriptor stays readable.
            match self.long.next(&mut packet) {
                Some(()) => frames.push(packet),
                None => free.push(packet),
            }
            if self.long.cut.is_none() {
                self.release();
            }
        }
        unread
    }

    fn release(&mut self) {
        self.ring.release(self.next);
        self.next = (self.next + 1) % RING_ENTRIES as usize;
    }

    /// Frames that [`PacketSocket::send`] takes now.
    pub fn room(&self) -> usize {
        RING_ENTRIES as usize - self.waiting.len()
    }

    /// Frames given to [`PacketSocket::send`] that the kernel has not taken yet.
    pub fn sending(&self) -> usize {
        self.waiting.len()
    }

    /// Queues a frame for the next [`PacketSocket::flush`]; returns it if too many wait.
    pub fn send(&mut self, mut packet: PacketBuffer) -> Result<(), PacketBuffer> {
        if self.room() == 0 {
            return Err(packet);
        }
        match packet.prepend(OFFLOAD_BYTES) {
            // Leave nothing to the device.
            Some(offload) => offload.fill(0),
            None => return Err(packet),
        }
        self.waiting.push(packet);
        Ok(())
    }

    /// Makes the kernel send the waiting frames, and appends their packets to `free`. Frames that a
    /// busy device refuses keep waiting.
    pub fn flush(&mut self, free: &mut Vec<PacketBuffer>) -> SendOutcome {
        let mut sent = SendOutcome::default();
        while sent.taken + sent.refused < self.waiting.len() {
            let from = sent.taken + sent.refused;
            match send_some(&self.fd, &self.waiting[from..]) {
                Ok(count) => sent.taken += count,
                Err(error) => match error.raw_os_error() {
                    Some(libc::EINTR) => {}
                    Some(libc::EAGAIN | libc::ENOBUFS) => break,
                    Some(libc::EMSGSIZE | libc::EINVAL) => sent.refused += 1,
                    // The device is down or gone.
                    _ => sent.refused = self.waiting.len() - sent.taken,
                },
            }
        }
        free.extend(self.waiting.drain(..sent.taken + sent.refused));
        sent
    }

    /// Frames for this socket that the kernel dropped because the ring was full.
    pub fn kernel_dropped(&self) -> u64 {
        // SAFETY: all zeroes is valid, and the kernel writes no more than the size that it is
        // given.
        let fresh = unsafe {
            let mut counted = zeroed::<libc::tpacket_stats>();
            let mut bytes = size_of_val(&counted) as libc::socklen_t;
            let result = libc::getsockopt(
                self.fd.as_raw_fd(),
                libc::SOL_PACKET,
                libc::PACKET_STATISTICS,
                (&raw mut counted).cast(),
                &mut bytes,
            );
            if result < 0 { 0 } else { counted.tp_drops }
        };
        self.dropped.set(self.dropped.get() + u64::from(fresh));
        self.dropped.get()
    }

    /// Closes the socket and returns its packets.
    pub fn close(self) -> Vec<PacketBuffer> {
        self.waiting
    }
}

impl AsFd for PacketSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// The mapped ring.
#[derive(Debug)]
struct PacketRing(NonNull<u8>);

// SAFETY: the pointer goes to a mapping that this value owns,
// and that is unknown to anyone else in this process.
unsafe impl Send for PacketRing {}

/// A slot that the kernel has filled.
struct PacketRingSlot<'a> {
    header: Header,
    bytes: &'a [u8],
}

impl PacketRing {
    /// Maps the ring of a socket whose ring has [`RING_BYTES`].
    fn map(socket: BorrowedFd<'_>) -> Result<Self, Error> {
        // SAFETY: a new mapping at an address of the kernel's choice disturbs no other.
        let map = unsafe {
            libc::mmap(
                ptr::null_mut(),
                RING_BYTES,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_POPULATE,
                socket.as_raw_fd(),
                0,
            )
        };
        match NonNull::new(map.cast()) {
            Some(base) if map != libc::MAP_FAILED => Ok(Self(base)),
            _ => Err(Error::last("mmap of the packet socket's ring")),
        }
    }

    fn status(&self, number: usize) -> &AtomicU32 {
        let at = number % RING_ENTRIES as usize * SLOT_BYTES + offset_of!(Header, tp_status);
        // SAFETY: inside the mapping that `self` owns, aligned as slots and field are; both sides
        // touch it as one word.
        unsafe { self.0.add(at).cast().as_ref() }
    }

    /// The slot, if the kernel has filled it.
    fn filled(&self, number: usize) -> Option<PacketRingSlot<'_>> {
        if self.status(number).load(Ordering::Acquire) & libc::TP_STATUS_USER == 0 {
            return None;
        }
        // SAFETY: the slot is inside the mapping. The kernel does not touch
        // it before its status permits that ([`PacketRing::release`]), which needs
        // the borrow to end. Every bit pattern is a valid header.
        unsafe {
            let base = self.0.add(number % RING_ENTRIES as usize * SLOT_BYTES);
            let bytes = std::slice::from_raw_parts(base.as_ptr(), SLOT_BYTES);
            Some(PacketRingSlot { header: base.cast::<Header>().read(), bytes })
        }
    }

    /// Gives a slot back to the kernel.
    fn release(&mut self, number: usize) {
        self.status(number).store(libc::TP_STATUS_KERNEL, Ordering::Release);
    }
}

impl Drop for PacketRing {
    fn drop(&mut self) {
        // SAFETY: this value made the mapping, and no borrow of it is left.
        unsafe { libc::munmap(self.0.as_ptr().cast(), RING_BYTES) };
    }
}

/// Contents of a slot.
enum SlotContent {
    /// One frame, which was read.
    Whole,
    /// Several segments.
    Segments,
    /// The beginning of a frame that waits in the queue.
    Queued,
    /// One frame that is longer than a packet.
    TooLong,
    /// The beginning of a frame whose rest is lost.
    Lost,
}

impl PacketRingSlot<'_> {
    /// Fills `packet` with the frame as it was on the wire, if the slot has one whole frame.
    fn read(&self, packet: &mut PacketBuffer) -> SlotContent {
        let length = self.header.tp_snaplen as usize;
        if self.header.tp_status & libc::TP_STATUS_COPY != 0 {
            return SlotContent::Queued;
        }
        let Some((offload, frame)) = self.frame() else { return SlotContent::Lost };
        if (self.header.tp_len as usize) > length {
            return SlotContent::Lost;
        }
        if offload[1] != ONE_SEGMENT {
            return SlotContent::Segments;
        }
        packet.reset();
        if length > RECEIVE_BYTES_MAX || packet.set_len(length).is_none() {
            return SlotContent::TooLong;
        }
        packet.bytes_mut().copy_from_slice(frame);
        if let Some((start, at)) = checksum_left(offload) {
            complete_at(packet.bytes_mut(), start, at);
        }
        match put_tag(packet, self.tag()) {
            Some(()) => SlotContent::Whole,
            None => SlotContent::TooLong,
        }
    }

    /// Returns the offload header, and the frame or its beginning.
    fn frame(&self) -> Option<(&[u8; OFFLOAD_BYTES], &[u8])> {
        let (start, length) = (usize::from(self.header.tp_mac), self.header.tp_snaplen as usize);
        let offload = self.bytes.get(start.checked_sub(OFFLOAD_BYTES)?..start)?.first_chunk()?;
        Some((offload, self.bytes.get(start..start + length)?))
    }

    /// VLAN tag that the kernel has removed.
    fn tag(&self) -> Option<[u8; TAG_BYTES]> {
        if self.header.tp_status & libc::TP_STATUS_VLAN_VALID == 0 {
            return None;
        }
        let kind = match self.header.tp_status & libc::TP_STATUS_VLAN_TPID_VALID {
            0 => libc::ETH_P_8021Q as u16,
            _ => self.header.tp_vlan_tpid,
        };
        let ([a, b], [c, d]) = (kind.to_be_bytes(), self.header.tp_vlan_tci.to_be_bytes());
        Some([a, b, c, d])
    }
}

/// A frame of several segments.
#[derive(Debug)]
struct Long {
    /// Offload header and frame.
    bytes: [u8; OFFLOAD_BYTES + LONG_BYTES],
    /// Progress of cutting; `None` without a frame.
    cut: Option<Cut>,
    tag: Option<[u8; TAG_BYTES]>,
}

impl Long {
    /// Begins with the frame in a slot.
    fn copy(&mut self, slot: &PacketRingSlot<'_>, unread: &mut Unread) {
        let Some((offload, frame)) = slot.frame() else { return };
        self.bytes[..OFFLOAD_BYTES].copy_from_slice(offload);
        self.bytes[OFFLOAD_BYTES..OFFLOAD_BYTES + frame.len()].copy_from_slice(frame);
        self.begin(OFFLOAD_BYTES + frame.len(), slot.tag(), unread);
    }

    /// Begins with the first frame in the queue, which belongs to `slot`.
    fn read(
        &mut self,
        fd: &OwnedFd,
        slot: &PacketRingSlot<'_>,
        unread: &mut Unread,
    ) -> io::Result<()> {
        // SAFETY: the kernel writes into `bytes`, no more than its length.
        let length = unsafe {
            let (to, room) = (self.bytes.as_mut_ptr().cast(), self.bytes.len());
            libc::recv(fd.as_raw_fd(), to, room, libc::MSG_DONTWAIT | libc::MSG_TRUNC)
        };
        let length = usize::try_from(length).map_err(|_| io::Error::last_os_error())?;
        self.begin(length, slot.tag(), unread);
        Ok(())
    }

    /// Begins to cut the first `length` of the bytes.
    fn begin(&mut self, length: usize, tag: Option<[u8; TAG_BYTES]>, unread: &mut Unread) {
        let all = self.bytes.get(..length).and_then(|all| all.split_first_chunk());
        let Some((offload, frame)) = all.filter(|(offload, _)| offload[1] != ONE_SEGMENT) else {
            unread.too_long += 1;
            return;
        };
        let payload = usize::from(u16::from_le_bytes([offload[4], offload[5]]));
        let cut = checksum_left(offload).and_then(|(start, _)| Cut::new(frame, start, payload));
        let fits = |cut: &Cut| cut.longest() <= RECEIVE_BYTES_MAX;
        match cut {
            Some(cut) if fits(&cut) => (self.cut, self.tag) = (Some(cut), tag),
            Some(_) => unread.too_long += 1,
            None => unread.not_cut += 1,
        }
    }

    /// Fills `packet` with the next segment; `None` if there are no more.
    fn next(&mut self, packet: &mut PacketBuffer) -> Option<()> {
        let cut = self.cut.as_mut()?;
        packet.reset();
        let written = cut.next_bytes().and_then(|bytes| {
            packet.set_len(bytes)?;
            cut.write(&self.bytes[OFFLOAD_BYTES..], packet.bytes_mut())?;
            put_tag(packet, self.tag)
        });
        if written.is_none() || cut.next_bytes().is_none() {
            self.cut = None;
        }
        written
    }
}

/// For a checksum that the sender left to its device: offset where
/// summing begins, and position of the checksum after that.
fn checksum_left(offload: &[u8; OFFLOAD_BYTES]) -> Option<(usize, usize)> {
    let word = |at: usize| usize::from(u16::from_le_bytes([offload[at], offload[at + 1]]));
    (offload[0] & NEEDS_CHECKSUM != 0).then(|| (word(6), word(8)))
}

/// Inserts a VLAN tag behind a frame's addresses.
fn put_tag(packet: &mut PacketBuffer, tag: Option<[u8; TAG_BYTES]>) -> Option<()> {
    let Some(tag) = tag.filter(|_| packet.len() >= ADDRESSES_BYTES) else { return Some(()) };
    packet.prepend(TAG_BYTES)?;
    let bytes = packet.bytes_mut();
    bytes.copy_within(TAG_BYTES..TAG_BYTES + ADDRESSES_BYTES, 0);
    bytes[ADDRESSES_BYTES..ADDRESSES_BYTES + TAG_BYTES].copy_from_slice(&tag);
    Some(())
}

/// Makes the kernel send the first of `packets`, which must not be empty; returns how many it took.
fn send_some(fd: &OwnedFd, packets: &[PacketBuffer]) -> io::Result<usize> {
    let count = packets.len().min(BATCH);
    // SAFETY: all zeroes is valid for both. The data that the messages point to is only read,
    // outlives the call, and has the stated length.
    let taken = unsafe {
        let mut vectors = zeroed::<[libc::iovec; BATCH]>();
        let mut messages = zeroed::<[libc::mmsghdr; BATCH]>();
        for ((packet, vector), message) in packets.iter().zip(&mut vectors).zip(&mut messages) {
            vector.iov_base = packet.bytes().as_ptr().cast_mut().cast();
            vector.iov_len = packet.len();
            message.msg_hdr.msg_iov = vector;
            message.msg_hdr.msg_iovlen = 1;
        }
        let flags = libc::MSG_DONTWAIT;
        libc::sendmmsg(fd.as_raw_fd(), messages.as_mut_ptr(), count as libc::c_uint, flags as _)
    };
    if taken < 0 { Err(io::Error::last_os_error()) } else { Ok(taken as usize) }
}

fn set<T>(fd: &OwnedFd, option: libc::c_int, value: &T, step: &'static str) -> Result<(), Error> {
    // SAFETY: `value` is readable for its size, during the call alone.
    let result = unsafe {
        libc::setsockopt(
            fd.as_raw_fd(),
            libc::SOL_PACKET,
            option,
            ptr::from_ref(value).cast(),
            size_of::<T>() as libc::socklen_t,
        )
    };
    if result < 0 { Err(Error::last(step)) } else { Ok(()) }
}
