//! TAPs inside guests.
//!
//! A TAP lives as long as a descriptor of it is open, and its carrier too: whoever is to outlive
//! the maker needs a copy.

use std::net::IpAddr;
use std::os::fd::{BorrowedFd, OwnedFd};

use ipnet::IpNet;

use crate::error::Result;

/// A TAP to be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TapSpec {
    /// Its name inside, at most 15 bytes.
    pub name: String,
    /// Its link address.
    pub mac: [u8; 6],
    /// Largest IP packet, bytes.
    pub mtu: u32,
    /// Addresses with prefix lengths; none where the guest's own configuration gives them.
    pub addresses: Vec<IpNet>,
    /// Routes: destination and gateway.
    pub routes: Vec<(IpNet, IpAddr)>,
    /// Frames that wait for the reader of the descriptor.
    pub queue_frames: Option<u32>,
    /// User id on the host that may attach to it by name too (programs that work on TAPs).
    pub owner: Option<u32>,
}

/// Makes a TAP inside a network namespace and brings it up with carrier. Not persistent: it goes
/// with its last descriptor. Frames have no header before them (IFF_NO_PI, no IFF_VNET_HDR), so the
/// kernel writes whole checksums and no giant frames. The descriptor does not block.
pub fn create(netns: BorrowedFd<'_>, spec: &TapSpec) -> Result<OwnedFd> {
    todo!("{netns:?} {spec:?}")
}

/// Gives a TAP its carrier or takes it.
pub fn set_carrier(tap: BorrowedFd<'_>, on: bool) -> Result<()> {
    todo!("{tap:?} {on}")
}

/// Name of the interface that a descriptor serves.
pub fn name(tap: BorrowedFd<'_>) -> Result<String> {
    todo!("{tap:?}")
}

/// Changes the MTU of a TAP by name inside a network namespace.
pub fn set_mtu(netns: BorrowedFd<'_>, name: &str, mtu: u32) -> Result<()> {
    todo!("{netns:?} {name} {mtu}")
}
