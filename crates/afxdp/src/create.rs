//! The privileged half: makes an AF_XDP socket over another process's pool, and binds it.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::thread;
use std::time::{Duration, Instant};

use crate::{Error, PACKET_BYTES, RING_ENTRIES, pool};

/// Bytes that may wait for a device, with the kernel's own overhead.
const SEND_BUFFER_BYTES: libc::c_int = 16 << 20;

/// Frames sent per system call. Without this option (Linux 6.17) the kernel sends 32.
const XDP_MAX_TX_SKB_BUDGET: libc::c_int = 9;

/// Longest time that a queue may be busy. The kernel releases the queue of a closed socket, such as
/// that of a killed mux, some time later.
const BUSY_MAX: Duration = Duration::from_secs(1);

/// Pause before a busy queue is tried again.
const BUSY_PAUSE: Duration = Duration::from_millis(10);

/// Busy polling settings: time that a blocking call would poll, microseconds, and frames that one
/// call takes from the device. No blocking calls are made, but a time of 0 would disable polling.
const BUSY_POLL_US: libc::c_int = 20;
const BUSY_POLL_FRAMES: libc::c_int = 64;

/// Makes a socket over the pool in `memfd`. Needs CAP_NET_RAW. Pools beyond RLIMIT_MEMLOCK also
/// need CAP_IPC_LOCK, as the kernel pins the pool's pages for the socket's life. Call
/// [`crate::XdpSocket::new`] next, then [`bind_socket`].
pub fn create_socket(memfd: BorrowedFd<'_>) -> Result<OwnedFd, Error> {
    let pool_bytes = file_bytes(memfd)?;
    // SAFETY: plain system call; the descriptor is checked and owned by nobody else.
    let socket = unsafe {
        let fd = libc::socket(libc::AF_XDP, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0);
        if fd < 0 {
            return Err(Error::last("socket(AF_XDP)"));
        }
        OwnedFd::from_raw_fd(fd)
    };
    let base = pool::map(memfd, pool_bytes)?;
    let umem = libc::xdp_umem_reg {
        addr: base.as_ptr() as u64,
        len: pool_bytes as u64,
        chunk_size: PACKET_BYTES as u32,
        headroom: 0,
        flags: 0,
        tx_metadata_len: 0,
    };
    let registered = set(&socket, libc::SOL_XDP, libc::XDP_UMEM_REG, &umem);
    let registered = registered.map_err(|()| Error::last("XDP_UMEM_REG"));
    // SAFETY: made above with this size; the kernel has pinned the pages themselves.
    unsafe { libc::munmap(base.as_ptr().cast(), pool_bytes) };
    registered?;
    for (ring, step) in [
        (libc::XDP_UMEM_FILL_RING, "XDP_UMEM_FILL_RING"),
        (libc::XDP_UMEM_COMPLETION_RING, "XDP_UMEM_COMPLETION_RING"),
        (libc::XDP_RX_RING, "XDP_RX_RING"),
        (libc::XDP_TX_RING, "XDP_TX_RING"),
    ] {
        set(&socket, libc::SOL_XDP, ring, &RING_ENTRIES).map_err(|()| Error::last(step))?;
    }
    // Both only speed up sending, so a kernel without such an option does no harm.
    let _ = set(&socket, libc::SOL_SOCKET, libc::SO_SNDBUFFORCE, &SEND_BUFFER_BYTES);
    let _ = set(&socket, libc::SOL_XDP, XDP_MAX_TX_SKB_BUDGET, &RING_ENTRIES);
    Ok(socket)
}

/// Binds a socket of [`create_socket`] to receive queue `queue` of device `ifindex`, in the network
/// namespace in which the socket was made. Before Linux 6.4, its rings can no longer be mapped
/// afterwards (xsk_mmap in net/xdp/xsk.c).
///
/// Blocks for up to a second while another socket uses the queue.
///
/// Frames flow once an XDP program redirects to the socket and its user has filled the fill ring.
/// The kernel copies frames, even if the driver supports zero copy.
pub fn bind_socket(socket: BorrowedFd<'_>, ifindex: u32, queue: u32) -> Result<(), Error> {
    let address = libc::sockaddr_xdp {
        sxdp_family: libc::AF_XDP as u16,
        sxdp_flags: libc::XDP_COPY | libc::XDP_USE_NEED_WAKEUP,
        sxdp_ifindex: ifindex,
        sxdp_queue_id: queue,
        sxdp_shared_umem_fd: 0,
    };
    let since = Instant::now();
    loop {
        // SAFETY: the address is whole and its size is given.
        let result = unsafe {
            libc::bind(
                socket.as_raw_fd(),
                (&raw const address).cast(),
                size_of::<libc::sockaddr_xdp>() as libc::socklen_t,
            )
        };
        if result == 0 {
            return Ok(());
        }
        let error = Error::last("bind");
        let busy = matches!(&error, Error::System { source, .. }
            if source.raw_os_error() == Some(libc::EBUSY));
        if !busy || since.elapsed() > BUSY_MAX {
            return Err(error);
        }
        thread::sleep(BUSY_PAUSE);
    }
}

/// Makes the socket's user poll the device's queue ([`crate::XdpSocket::receive`]) instead of
/// interrupts. Needs CAP_NET_ADMIN.
pub fn poll_busily(socket: BorrowedFd<'_>) -> Result<(), Error> {
    let level = libc::SOL_SOCKET;
    for (option, value, step) in [
        (libc::SO_PREFER_BUSY_POLL, 1, "SO_PREFER_BUSY_POLL"),
        (libc::SO_BUSY_POLL, BUSY_POLL_US, "SO_BUSY_POLL"),
        (libc::SO_BUSY_POLL_BUDGET, BUSY_POLL_FRAMES, "SO_BUSY_POLL_BUDGET"),
    ] {
        set(&socket, level, option, &value).map_err(|()| Error::last(step))?;
    }
    Ok(())
}

fn set<T>(socket: &impl AsFd, level: libc::c_int, name: libc::c_int, value: &T) -> Result<(), ()> {
    let socket = socket.as_fd().as_raw_fd();
    let bytes = size_of::<T>() as libc::socklen_t;
    // SAFETY: `value` is readable for its size.
    let result =
        unsafe { libc::setsockopt(socket, level, name, std::ptr::from_ref(value).cast(), bytes) };
    if result < 0 { Err(()) } else { Ok(()) }
}

fn file_bytes(memfd: BorrowedFd<'_>) -> Result<usize, Error> {
    // SAFETY: all zeroes is a valid `stat`, and the kernel fills it.
    let status = unsafe {
        let mut status: libc::stat = std::mem::zeroed();
        if libc::fstat(memfd.as_raw_fd(), &mut status) < 0 {
            return Err(Error::last("fstat of the pool"));
        }
        status
    };
    let bytes = status.st_size as u64;
    // The kernel pins all of it, and the size comes from an untrusted process.
    let bytes_max = pool::POOL_BYTES_MAX as u64;
    if bytes == 0 || bytes > bytes_max || !bytes.is_multiple_of(PACKET_BYTES as u64) {
        return Err(Error::NotAPool(bytes));
    }
    Ok(bytes as usize)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn descriptor_of_wrong_size_is_no_pool() {
        let file = tempfile::tempfile().unwrap();
        let size = |bytes| {
            file.set_len(bytes).unwrap();
            file_bytes(file.as_fd()).ok()
        };
        let (packet, most) = (PACKET_BYTES as u64, pool::POOL_BYTES_MAX as u64);
        assert_eq!([0, 1, packet + 1, most + packet, 1 << 40].map(size), [None; 5]);
        assert_eq!([packet, most].map(size), [packet, most].map(|bytes| Some(bytes as usize)));
    }
}
