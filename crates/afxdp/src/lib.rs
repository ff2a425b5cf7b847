//! The packet pool, AF_XDP sockets over it, and packet sockets.
//!
//! [`Pool`] is one memfd cut into packets of [`PACKET_BYTES`]. A [`PacketBuffer`] is the only
//! handle on its bytes: it can't be copied, so two owners never see the same packet. Every AF_XDP
//! socket uses the whole pool as its UMEM, so that a packet goes from any interface to any other
//! without being copied.
//!
//! Making a socket takes privilege; using it doesn't. So a privileged process calls
//! [`create_socket`] with the pool's memfd and hands the descriptor to the pool's owner. The owner
//! calls [`XdpSocket::new`], which maps the rings. Then the privileged process calls
//! [`bind_socket`].
//!
//! With any driver, the kernel copies frames between pool and device. Only so does it report when
//! it has released a packet: in zero-copy mode it does not for a closed socket.
//!
//! Limits: [`RING_ENTRIES`] entries a ring, [`POOL_PACKETS_MAX`] packets. The kernel drops frames
//! of more than [`RECEIVE_BYTES_MAX`] bytes.
//!
//! Source: Linux Documentation/networking/af_xdp.rst.

mod create;
mod packet_socket;
mod pool;
mod ring;
mod socket;

pub use create::{bind_socket, create_socket, poll_busily};
pub use packet_socket::{PacketSocket, SendOutcome, Unread, WAITING_BYTES};
pub use pool::{PacketBuffer, Pool, prefetch};
pub use socket::XdpSocket;

/// Bytes of a packet, headroom included.
pub const PACKET_BYTES: usize = 2048;

/// Bytes before a packet's contents when it comes from a socket or from [`PacketBuffer::reset`].
pub const HEADROOM_BYTES: usize = 256;

/// Packets of a pool (1 GiB).
pub const POOL_PACKETS_MAX: usize = 1 << 19;

/// Entries of each of a socket's rings.
pub const RING_ENTRIES: u32 = 2048;

/// Bytes of the longest frame that a socket receives: the kernel keeps 256 bytes before it.
pub const RECEIVE_BYTES_MAX: usize = PACKET_BYTES - HEADROOM_BYTES;

/// Error from making a pool or a socket.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A pool of no or too many packets.
    #[error("pool of {0} packets; 1 to {POOL_PACKETS_MAX} are possible")]
    PoolSize(usize),
    /// The descriptor is not a pool's memfd.
    #[error(
        "descriptor of {0} bytes is no packet pool: 1 to {POOL_PACKETS_MAX} times {PACKET_BYTES}"
    )]
    NotAPool(u64),
    /// The kernel refused a step.
    #[error("{step}{hint}")]
    System {
        /// The step that failed.
        step: &'static str,
        /// A remedy that may help.
        hint: &'static str,
        /// The kernel's error.
        source: std::io::Error,
    },
}

impl Error {
    /// True if the kernel or the driver does not support this kind of AF_XDP socket.
    pub fn is_unsupported(&self) -> bool {
        let Self::System { source, .. } = self else { return false };
        let errors =
            [libc::EAFNOSUPPORT, libc::ESOCKTNOSUPPORT, libc::EPROTONOSUPPORT, libc::EOPNOTSUPP];
        source.raw_os_error().is_some_and(|error| errors.contains(&error))
    }

    fn last(step: &'static str) -> Self {
        let source = std::io::Error::last_os_error();
        let hint = match (step, source.raw_os_error()) {
            ("bind", Some(libc::EBUSY)) => ": the queue has a socket already; close it first",
            ("bind", Some(libc::EOPNOTSUPP)) => ": the device's driver can't do this mode",
            ("socket(AF_XDP)", Some(libc::EAFNOSUPPORT)) => {
                ": use a kernel with CONFIG_XDP_SOCKETS, or give the interface attach: packet"
            }
            ("bind", Some(libc::EINVAL)) => ": no such receive queue on the device",
            (_, Some(libc::EPERM)) => ": needs CAP_NET_RAW (and CAP_IPC_LOCK to pin the pool)",
            (_, Some(libc::ENOBUFS)) => ": the pool exceeds RLIMIT_MEMLOCK; needs CAP_IPC_LOCK",
            _ => "",
        };
        Self::System { step, hint, source }
    }
}
