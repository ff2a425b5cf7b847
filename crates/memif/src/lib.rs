//! memif: packet rings in memory that two processes share, both roles.
//!
//! The *server* (memif's "master") listens on a Unix seqpacket socket; the *client* ("slave")
//! allocates the memory. In PdP the mux is the server, its peer is hostile, and every frame is
//! copied: [`Listener`], [`Handshake`], [`MemifConnection`]. Guests on our runtime and the TAP
//! helper are clients, trust the mux and work in the shared memory itself: [`MemifClient`].
//!
//! A connection has one ring each way. One listener serves several interface ids; each makes a
//! connection of its own.
//!
//! # Sleeping
//!
//! A side that waits for frames:
//! 1. calls `arm()`, which lets the peer ring the doorbell and looks at the ring once more;
//! 2. if that returned true (nothing there), polls the doorbell's descriptor;
//! 3. calls `disarm()` on waking, which stops the peer from ringing the doorbell; a client's also
//!    empties it. A server never does (see [`Bell`]) and has it watched by epoll, edge-triggered.
//!
//! Between two PdP sides no wake-up is lost: the sleeper stores the flag, fences, loads the index;
//! the sender stores the index, fences, loads the flag; one of the two sees the other. DPDK 22.11
//! and libmemif have no fence there, so a sleeper with such a peer bounds its sleep (some
//! milliseconds). memif has no doorbell for free slots: a sender with a full ring waits by time.
//! The exception is a PdP client of PdP's mux ([`MemifClient::arm_for_room`], [`Sender::wake`]).
//!
//! # Limits
//!
//! One ring each way of at most 2^[`RING_LOG2_MAX`] slots, [`REGIONS_MAX`] regions,
//! [`REGION_BYTES_MAX`] bytes in all, chains of [`CHAIN_SLOTS_MAX`] buffers. Regions must be memfds
//! sealed against shrinking, without huge pages. Ethernet mode only. No secrets: the permissions of
//! the socket's directory control access. The client owns the memory, but the kernel charges a page
//! to the cgroup that touches it first. A client that leaves its pages untouched charges them to
//! the server, up to the limit above.
//!
//! Source: memif protocol 2.0 as in DPDK 22.11 drivers/net/memif/memif.h and libmemif.

mod bell;
mod client;
mod fault;
mod idle;
mod memory;
mod message;
mod patience;
mod receiver;
mod ring;
mod sender;
mod seqpacket;
mod server;
pub mod sigbus;
mod thrift;

pub use bell::Bell;
pub use client::{Buf, ClientError, ConnectionState, MemifClient, MemifSettings};
pub use fault::ProtocolViolation;
pub use patience::Patience;
pub use receiver::{Receiver, RingFrame};
pub use sender::Sender;
pub use server::{Closed, Handshake, HandshakeError, Listener, MemifConnection, MemifControl};
pub use sigbus::RegionQuota;
pub use thrift::Thrift;

/// Slots of a ring, as a power of two.
pub const RING_LOG2_MAX: u8 = 14;

/// Regions of one connection, unless [`Listener::accept_for`] sets a lower limit.
pub const REGIONS_MAX: usize = 16;

/// Bytes of all regions of one connection.
pub const REGION_BYTES_MAX: u64 = 128 << 20;

/// Buffers of one frame.
pub const CHAIN_SLOTS_MAX: usize = 64;

/// Time that a client has for its handshake, milliseconds.
pub const HANDSHAKE_MS_MAX: u64 = 5000;
