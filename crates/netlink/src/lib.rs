//! Netlink (RFC 3549): requests to the kernel, its answers, and its notifications.
//!
//! A [`Request`] holds the bytes of one or more messages. A [`Netlink`] socket sends it, and
//! returns the answer. [`messages`] and [`attributes`] iterate over received bytes. They never
//! panic for any bytes, and allocate nothing: a routing table has a million routes.
//!
//! Constants are those of the crate `libc`. Protocols have no types of their own here: each user
//! reads the fields that it needs.
//! Sources: linux/netlink.h, linux/rtnetlink.h, Documentation/userspace-api/netlink/intro.rst.

#![forbid(unsafe_code)]

mod message;
mod request;
mod socket;

pub use message::{Message, address, attributes, family, is_v6, messages, text, u16_at, u32_at};
pub use request::Request;
pub use socket::{Netlink, NetlinkRead, error_code};
