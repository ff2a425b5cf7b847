//! The XDP program that gives frames which belong to PdP to AF_XDP sockets and all others to the
//! kernel. Link and maps are pinned, so that they outlive the process; the next one adopts them.

use std::net::IpAddr;
use std::os::fd::BorrowedFd;
use std::path::Path;

use crate::error::Result;

/// Destinations that can be taken on one interface.
pub const TAKES_MAX: usize = 65536;

/// Receive queues that can have a socket.
pub const QUEUES_MAX: u32 = 64;

/// UDP to here is taken: VXLAN and UDP tunnels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Take {
    /// Outer destination address.
    pub local: IpAddr,
    /// UDP destination port.
    pub port: u16,
}

/// How the program runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// In the driver.
    Native,
    /// In the kernel's stack; slower.
    Generic,
}

/// What the program did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Frames given to a socket.
    pub taken: u64,
    /// Frames of PdP that found no socket on their queue and went to the kernel.
    pub no_socket: u64,
    /// Other frames, given to the kernel.
    pub passed: u64,
}

/// The program on one interface. Dropping it leaves the program there; see [`Xdp::detach`].
#[derive(Debug)]
pub struct Xdp {
    mode: Mode,
}

impl Xdp {
    /// Adopts what is pinned in `pins` (below a BPF file system) if it is this program on this
    /// interface; else loads it anew, in the driver if it can. Until sockets are set, all goes to
    /// the kernel.
    pub fn attach(device: &str, pins: &Path) -> Result<Self> {
        todo!("{device} {pins:?}")
    }

    /// How it runs.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// Gives the AF_XDP sockets by queue; queues not named have none.
    pub fn set_sockets(&mut self, sockets: &[(u32, BorrowedFd<'_>)]) -> Result<()> {
        todo!("{sockets:?}")
    }

    /// Replaces what is taken. Those in both old and new never stop being taken.
    pub fn set_takes(&mut self, takes: &[Take]) -> Result<()> {
        todo!("{takes:?}")
    }

    /// Takes every frame, or only what [`Xdp::set_takes`] says.
    pub fn take_all(&mut self, all: bool) -> Result<()> {
        todo!("{all}")
    }

    /// What the program did since it was loaded.
    pub fn counters(&self) -> Result<Counters> {
        todo!()
    }

    /// Takes the program off the interface and removes the pins.
    pub fn detach(self) -> Result<()> {
        todo!()
    }
}

/// Removes the pins in `pins`, and with them the program from its interface. No change if there is
/// none.
pub fn detach(pins: &Path) -> Result<()> {
    todo!("{pins:?}")
}
