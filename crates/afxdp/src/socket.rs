//! The unprivileged half: frames in and out of a bound socket, in batches.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use crate::pool::{PacketBuffer, Pool, Region};
use crate::ring::XdpRing;
use crate::{Error, RING_ENTRIES};
use crate::{HEADROOM_BYTES, PACKET_BYTES};

/// System calls in one [`XdpSocket::flush`]: enough for a full ring at 32 frames per call.
const KICKS_MAX: u32 = RING_ENTRIES / 32;

/// An AF_XDP socket in use. The kernel owns the packets given to it until they come back from
/// [`XdpSocket::receive`], [`XdpSocket::complete`] or [`XdpSocket::close`].
#[derive(Debug)]
pub struct XdpSocket {
    // Rings before the descriptor: they must be unmapped first.
    receive: XdpRing<libc::xdp_desc>,
    transmit: XdpRing<libc::xdp_desc>,
    fill: XdpRing<u64>,
    completion: XdpRing<u64>,
    region: Region,
    /// Packets that the kernel holds. Only those can come back.
    lent: Lent,
    sending: u32,
    polled: Polled,
    fd: OwnedFd,
}

/// Polling mode of the socket's queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Polled {
    /// By interrupts: busy polling was not requested, or is not available.
    Not,
    /// By the socket, once the kernel knows its poller.
    /// Before Linux 6.13 that is with the first frame.
    Later,
    /// The socket does it, at each request for frames.
    Busily,
}

impl XdpSocket {
    /// Takes over a descriptor from [`crate::create_socket`] that was made over `pool` and is not
    /// bound yet. Until [`crate::bind_socket`] it receives no frames, and frames to be sent wait.
    pub fn new(fd: OwnedFd, pool: &Pool) -> Result<Self, Error> {
        let offsets: libc::xdp_mmap_offsets = option(&fd, libc::SOL_XDP, libc::XDP_MMAP_OFFSETS)?;
        let region = pool.region();
        let socket = fd.as_fd();
        // SAFETY: each page is mapped once with the entry type that the kernel documents for it.
        let (receive, transmit, fill, completion) = unsafe {
            (
                XdpRing::map(socket, libc::XDP_PGOFF_RX_RING as u64, &offsets.rx)?,
                XdpRing::map(socket, libc::XDP_PGOFF_TX_RING as u64, &offsets.tx)?,
                XdpRing::map(socket, libc::XDP_UMEM_PGOFF_FILL_RING, &offsets.fr)?,
                XdpRing::map(socket, libc::XDP_UMEM_PGOFF_COMPLETION_RING, &offsets.cr)?,
            )
        };
        let busily: libc::c_int = option(&fd, libc::SOL_SOCKET, libc::SO_PREFER_BUSY_POLL)?;
        let polled = match busily {
            0 => Polled::Not,
            _ if has_poller(&fd) => Polled::Busily,
            _ => Polled::Later,
        };
        Ok(Self {
            receive,
            transmit,
            fill,
            completion,
            region,
            lent: Lent(vec![0; region.packets().div_ceil(64)]),
            sending: 0,
            polled,
            fd,
        })
    }

    /// Gives the kernel packets from the end of `free` to receive
    /// into: as many as fit, except for the last `keep`.
    pub fn fill(&mut self, free: &mut Vec<PacketBuffer>, keep: usize) {
        let count = free.len().saturating_sub(keep).min(self.fill.space_now() as usize);
        for packet in free.drain(free.len() - count..) {
            self.lent.lend(self.region, &packet);
            self.fill.write((packet.number() * PACKET_BYTES) as u64);
        }
        self.fill.publish();
    }

    /// Appends up to `count_max` received frames to `packets` and returns how many.
    pub fn receive(&mut self, packets: &mut Vec<PacketBuffer>, count_max: usize) -> usize {
        if self.polled == Polled::Busily {
            // SAFETY: without a buffer, on a descriptor that we own. The result does not matter:
            // frames are received or not.
            unsafe { libc::recv(self.fd.as_raw_fd(), std::ptr::null_mut(), 0, libc::MSG_DONTWAIT) };
        }
        let before = packets.len();
        for _ in 0..count_max {
            let Some(entry) = self.receive.read() else { break };
            let Some(mut packet) = self.lent.take_back(self.region, entry.addr) else { continue };
            let offset = (entry.addr % PACKET_BYTES as u64) as usize;
            if packet.set_contents(offset, entry.len as usize).is_none() {
                packet.reset();
            }
            packet.prefetch();
            packets.push(packet);
        }
        let count = packets.len() - before;
        if count > 0 {
            self.receive.release();
            if self.polled == Polled::Later {
                self.polled = if has_poller(&self.fd) { Polled::Busily } else { Polled::Not };
            }
        }
        count
    }

    /// Frames that [`XdpSocket::send`] takes now.
    pub fn room(&mut self) -> usize {
        self.transmit.space() as usize
    }

    /// Puts a frame into the transmit ring; returns it if the ring is full. The kernel sees it at
    /// the next [`XdpSocket::flush`].
    pub fn send(&mut self, packet: PacketBuffer) -> Result<(), PacketBuffer> {
        if self.transmit.space() == 0 {
            return Err(packet);
        }
        self.lent.lend(self.region, &packet);
        self.transmit.write(libc::xdp_desc {
            addr: packet.address(),
            len: packet.len() as u32,
            options: 0,
        });
        self.sending += 1;
        Ok(())
    }

    /// Makes the kernel send the frames in the ring. Frames that a busy device refuses stay there.
    pub fn flush(&mut self) {
        self.transmit.publish();
        let mut room = self.transmit.space_now();
        for _ in 0..KICKS_MAX {
            if room == RING_ENTRIES || !self.transmit.needs_wakeup() {
                return;
            }
            // SAFETY: a send without data on a descriptor that we own.
            let result = unsafe {
                libc::sendto(
                    self.fd.as_raw_fd(),
                    std::ptr::null(),
                    0,
                    libc::MSG_DONTWAIT,
                    std::ptr::null(),
                    0,
                )
            };
            // EAGAIN: more frames than one call takes, or a full device or send buffer that took
            // none. Other errors: the device is down or gone.
            if result < 0 && std::io::Error::last_os_error().raw_os_error() != Some(libc::EAGAIN) {
                return;
            }
            let before = std::mem::replace(&mut room, self.transmit.space_now());
            if room == before {
                return;
            }
        }
    }

    /// Appends the packets whose frames were sent to `free`; returns their number.
    pub fn complete(&mut self, free: &mut Vec<PacketBuffer>) -> usize {
        let mut count = 0;
        while let Some(address) = self.completion.read() {
            free.extend(self.lent.take_back(self.region, address));
            count += 1;
        }
        if count > 0 {
            self.completion.release();
            self.sending = self.sending.saturating_sub(count);
        }
        count as usize
    }

    /// Frames given to [`XdpSocket::send`] and not sent yet.
    pub fn sending(&self) -> usize {
        self.sending as usize
    }

    /// Frames for this socket that the kernel dropped
    /// because the ring or the fill ring had no entry.
    pub fn kernel_dropped(&self) -> u64 {
        let statistics: Result<libc::xdp_statistics, _> =
            option(&self.fd, libc::SOL_XDP, libc::XDP_STATISTICS);
        statistics.map_or(0, |s| s.rx_dropped + s.rx_ring_full)
    }

    /// Closes the socket and returns the packets that it held.
    pub fn close(self) -> Vec<PacketBuffer> {
        let Self { receive, transmit, fill, completion, region, lent, fd, .. } = self;
        drop((receive, transmit, fill, completion));
        // The kernel waits here until nobody can write into the pool any more.
        drop(fd);
        lent.into_packets(region)
    }
}

impl AsFd for XdpSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// One bit per packet, set while the kernel holds it.
#[derive(Debug)]
struct Lent(Vec<u64>);

impl Lent {
    /// Records that the caller gives the handle to the kernel.
    fn lend(&mut self, region: Region, packet: &PacketBuffer) {
        assert!(region.owns(packet), "a packet of another pool");
        self.0[packet.number() / 64] |= 1 << (packet.number() % 64);
    }

    /// Returns a handle on the packet at `address`, if the kernel has it from us.
    fn take_back(&mut self, region: Region, address: u64) -> Option<PacketBuffer> {
        let number = region.number_at(address)?;
        let (word, bit) = (&mut self.0[number / 64], 1 << (number % 64));
        if *word & bit == 0 {
            return None;
        }
        *word &= !bit;
        // SAFETY: the bit proves that the handle was given to this socket. Clearing it prevents a
        // second handle. `number_at` checked the bound.
        Some(unsafe { region.packet(number) })
    }

    fn into_packets(mut self, region: Region) -> Vec<PacketBuffer> {
        (0..region.packets())
            .filter_map(|number| self.take_back(region, (number * PACKET_BYTES) as u64))
            .collect()
    }
}

/// True if the kernel knows the poller (NAPI) of the socket's queue.
fn has_poller(fd: &OwnedFd) -> bool {
    option(fd, libc::SOL_SOCKET, libc::SO_INCOMING_NAPI_ID).is_ok_and(|id: libc::c_int| id != 0)
}

fn option<T: Copy>(fd: &OwnedFd, level: libc::c_int, name: libc::c_int) -> Result<T, Error> {
    // SAFETY: all zeroes is valid for numbers and the structures of SOL_XDP options, and the kernel
    // writes at most the given size.
    unsafe {
        let mut value = std::mem::zeroed::<T>();
        let mut bytes = size_of::<T>() as libc::socklen_t;
        let result =
            libc::getsockopt(fd.as_raw_fd(), level, name, (&raw mut value).cast(), &mut bytes);
        if result < 0 {
            return Err(Error::last("getsockopt"));
        }
        Ok(value)
    }
}

const _: () = assert!(HEADROOM_BYTES == 256, "XDP_PACKET_HEADROOM of the kernel");
