//! Packet sockets in use: frames in by a ring that the kernel fills, frames out by one system call
//! for many.
//!
//! A frame that comes is copied twice, by the kernel into the ring and from there into a packet.
//! The ring is TPACKET_V2: its slots are handed over one by one. TPACKET_V3 hands over whole
//! blocks, which are milliseconds late when there is little traffic. Frames go out by sendmmsg(2),
//! which copies them, and not by a transmit ring: the kernel gives that ring's slots back while the
//! receiver at the other end of a veth still reads their bytes.
//!
//! A frame comes as it was on the wire: its VLAN tag, which the kernel takes off, is put back, and a
//! checksum that the sender left to its device is completed. Several segments in one frame (GRO,
//! TSO) are not taken apart.
//!
//! Limits: [`RING_ENTRIES`] frames wait in each direction; longer ones than
//! [`RECEIVE_BYTES_MAX`] are told as such and not received.
//! Source: packet(7), Linux Documentation/networking/packet_mmap.rst, net/packet/af_packet.c.

use std::cell::Cell;
use std::io;
use std::mem::{offset_of, zeroed};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, Ordering};

use libc::tpacket2_hdr as Header;

use crate::pool::Packet;
use crate::{Error, RECEIVE_BYTES_MAX, RING_ENTRIES};

/// Bytes of a slot: the kernel's headers, 76 bytes, and the longest frame.
const SLOT_BYTES: usize = 2048;

/// Bytes that the kernel allocates in one piece.
const BLOCK_BYTES: usize = 64 << 10;

const RING_BYTES: usize = RING_ENTRIES as usize * SLOT_BYTES;
const _: () = assert!(RING_BYTES.is_multiple_of(BLOCK_BYTES));
const _: () = assert!(BLOCK_BYTES.is_multiple_of(SLOT_BYTES));

/// TPACKET_V2 of linux/if_packet.h.
const VERSION: libc::c_int = libc::tpacket_versions::TPACKET_V2 as libc::c_int;

/// Bytes of `struct virtio_net_hdr` (linux/virtio_net.h), which is before each frame.
const OFFLOAD_BYTES: usize = 10;

/// VIRTIO_NET_HDR_F_NEEDS_CSUM of linux/virtio_net.h.
const NEEDS_CHECKSUM: u8 = 1;

/// Link addresses before a VLAN tag, and the tag.
const ADDRESSES_BYTES: usize = 12;
const TAG_BYTES: usize = 4;

/// Frames of one system call.
const BATCH: usize = 64;

/// A packet socket of an interface in use.
#[derive(Debug)]
pub struct PacketSocket {
    ring: Slots,
    /// The slot that the kernel fills next, as far as we have read.
    next: usize,
    /// Given to [`PacketSocket::send`], not taken by the kernel yet.
    waiting: Vec<Packet>,
    /// What the kernel counted before its counters were read the last time: reading clears them.
    dropped: Cell<u64>,
    fd: OwnedFd,
}

/// What became of frames that were to be sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sent {
    /// The kernel took them.
    pub taken: usize,
    /// The kernel will never take them: too long for the device, or the device is gone.
    pub refused: usize,
}

impl PacketSocket {
    /// Takes over a packet socket (SOCK_RAW) that is bound to its interface. Needs no privilege.
    pub fn new(fd: OwnedFd) -> Result<Self, Error> {
        set(&fd, libc::PACKET_VERSION, &VERSION, "PACKET_VERSION")?;
        set(&fd, libc::PACKET_VNET_HDR, &1 as &libc::c_int, "PACKET_VNET_HDR")?;
        let request = libc::tpacket_req {
            tp_block_size: BLOCK_BYTES as u32,
            tp_block_nr: (RING_BYTES / BLOCK_BYTES) as u32,
            tp_frame_size: SLOT_BYTES as u32,
            tp_frame_nr: RING_ENTRIES,
        };
        set(&fd, libc::PACKET_RX_RING, &request, "PACKET_RX_RING")?;
        let ring = Slots::map(fd.as_fd())?;
        let waiting = Vec::with_capacity(RING_ENTRIES as usize);
        let socket = Self { ring, next: 0, waiting, dropped: Cell::new(0), fd };
        // What came before the ring was there.
        socket.kernel_dropped();
        socket.dropped.set(0);
        Ok(socket)
    }

    /// Appends up to `count_max` received frames to `frames`, in packets from the end of `free`, of
    /// which `keep` are left. Returns how many more there were that are too long.
    pub fn receive(
        &mut self,
        free: &mut Vec<Packet>,
        keep: usize,
        count_max: usize,
        frames: &mut Vec<Packet>,
    ) -> usize {
        let mut too_long = 0;
        for _ in 0..count_max.min(free.len().saturating_sub(keep)) {
            let Some(slot) = self.ring.filled(self.next) else { break };
            if let Some(mut packet) = free.pop() {
                if slot.copy_to(&mut packet).is_some() {
                    frames.push(packet);
                } else {
                    free.push(packet);
                    too_long += 1;
                }
            }
            self.ring.release(self.next);
            self.next = (self.next + 1) % RING_ENTRIES as usize;
        }
        too_long
    }

    /// Frames that [`PacketSocket::send`] takes now.
    pub fn room(&self) -> usize {
        RING_ENTRIES as usize - self.waiting.len()
    }

    /// Frames given to [`PacketSocket::send`] that the kernel has not taken yet.
    pub fn sending(&self) -> usize {
        self.waiting.len()
    }

    /// Has a frame sent at the next [`PacketSocket::flush`]; gives it back if too many wait.
    pub fn send(&mut self, mut packet: Packet) -> Result<(), Packet> {
        if self.room() == 0 {
            return Err(packet);
        }
        match packet.prepend(OFFLOAD_BYTES) {
            // Nothing is left to the device.
            Some(offload) => offload.fill(0),
            None => return Err(packet),
        }
        self.waiting.push(packet);
        Ok(())
    }

    /// Has the kernel send what waits, and appends the packets to `free`. What a busy device does
    /// not take now waits on.
    pub fn flush(&mut self, free: &mut Vec<Packet>) -> Sent {
        let mut sent = Sent::default();
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

    /// Frames that the kernel had for this socket and dropped, since the ring was full.
    pub fn kernel_dropped(&self) -> u64 {
        // SAFETY: all zeroes is valid, and the kernel writes no more than the size that it is given.
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

    /// Closes the socket and returns the packets that it held.
    pub fn close(self) -> Vec<Packet> {
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
struct Slots(NonNull<u8>);

// SAFETY: the pointer goes to a mapping that this value owns and that nobody else in this process
// knows of.
unsafe impl Send for Slots {}

/// A slot that the kernel has filled.
struct Slot<'a> {
    header: Header,
    bytes: &'a [u8],
}

impl Slots {
    /// Maps the ring of a socket that has one of [`RING_BYTES`].
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
    fn filled(&self, number: usize) -> Option<Slot<'_>> {
        if self.status(number).load(Ordering::Acquire) & libc::TP_STATUS_USER == 0 {
            return None;
        }
        // SAFETY: the slot is inside the mapping, and the kernel does not touch it before its status
        // says that it may ([`Slots::release`]), which takes the borrow's end. Every bit pattern is
        // a valid header.
        unsafe {
            let base = self.0.add(number % RING_ENTRIES as usize * SLOT_BYTES);
            let bytes = std::slice::from_raw_parts(base.as_ptr(), SLOT_BYTES);
            Some(Slot { header: base.cast::<Header>().read(), bytes })
        }
    }

    /// Gives a slot back to the kernel.
    fn release(&mut self, number: usize) {
        self.status(number).store(libc::TP_STATUS_KERNEL, Ordering::Release);
    }
}

impl Drop for Slots {
    fn drop(&mut self) {
        // SAFETY: this value made the mapping, and no borrow of it is left.
        unsafe { libc::munmap(self.0.as_ptr().cast(), RING_BYTES) };
    }
}

impl Slot<'_> {
    /// Makes `packet` the frame as it was on the wire; `None` if it is too long for that.
    fn copy_to(&self, packet: &mut Packet) -> Option<()> {
        let (start, length) = (usize::from(self.header.tp_mac), self.header.tp_snaplen as usize);
        if self.header.tp_len as usize > length || length > RECEIVE_BYTES_MAX {
            return None;
        }
        let frame = self.bytes.get(start..start + length)?;
        let offload = self.bytes.get(start.checked_sub(OFFLOAD_BYTES)?..start)?;
        packet.reset();
        packet.set_len(length)?;
        packet.bytes_mut().copy_from_slice(frame);
        if offload[0] & NEEDS_CHECKSUM != 0 {
            let word = |at: usize| usize::from(u16::from_le_bytes([offload[at], offload[at + 1]]));
            complete_checksum(packet.bytes_mut(), word(6), word(8));
        }
        if self.header.tp_status & libc::TP_STATUS_VLAN_VALID != 0 && length >= ADDRESSES_BYTES {
            let kind = match self.header.tp_status & libc::TP_STATUS_VLAN_TPID_VALID {
                0 => libc::ETH_P_8021Q as u16,
                _ => self.header.tp_vlan_tpid,
            };
            packet.prepend(TAG_BYTES)?;
            let bytes = packet.bytes_mut();
            bytes.copy_within(TAG_BYTES..TAG_BYTES + ADDRESSES_BYTES, 0);
            bytes[12..14].copy_from_slice(&kind.to_be_bytes());
            bytes[14..16].copy_from_slice(&self.header.tp_vlan_tci.to_be_bytes());
        }
        Some(())
    }
}

/// Completes a checksum of which the sender has written the pseudo header's part: that of all from
/// `start`, at `at` after that (skb_checksum_help of net/core/dev.c).
fn complete_checksum(frame: &mut [u8], start: usize, at: usize) {
    let Some(covered) = frame.get_mut(start..).filter(|covered| at + 2 <= covered.len()) else {
        return;
    };
    let (words, rest) = covered.as_chunks::<2>();
    let sum: u64 = words.iter().map(|word| u64::from(u16::from_be_bytes(*word))).sum();
    let mut sum = sum + rest.first().map_or(0, |last| u64::from(*last) << 8);
    while sum >> 16 != 0 {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    // Zero would mean that there is none.
    let checksum = match !(sum as u16) {
        0 => 0xffff,
        checksum => checksum,
    };
    covered[at..at + 2].copy_from_slice(&checksum.to_be_bytes());
}

/// Has the kernel send the first of `packets`, of which there is one; returns how many it took.
fn send_some(fd: &OwnedFd, packets: &[Packet]) -> io::Result<usize> {
    let count = packets.len().min(BATCH);
    // SAFETY: all zeroes is valid for both. What the messages point to is read only, lives longer
    // than the call, and is as long as they say.
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
