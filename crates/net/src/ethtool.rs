//! Offloads of interfaces, by the ethtool ioctl.

use nix::errno::Errno;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};
use std::os::fd::AsRawFd;

use crate::error::{Context, Result};
use crate::tap::{ioctl, named_request};

/// `struct ethtool_value` of linux/ethtool.h.
#[repr(C)]
struct Value {
    command: u32,
    data: u32,
}

/// ETHTOOL_STXCSUM, STSO, SGSO, SGRO of linux/ethtool.h.
const OFFLOADS: [u32; 4] = [0x17, 0x1f, 0x24, 0x2c];

/// Turns transmit checksum, segmentation (TSO, GSO) and receive aggregation (GRO) off on an
/// interface of this network namespace, so that frames that AF_XDP or packet sockets read at the
/// other end of a veth are whole. Offloads that the device doesn't have are passed over.
pub fn offloads_off(device: &str) -> Result<()> {
    let any = socket(AddressFamily::Inet, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None)
        .on("open a socket to configure", device)?;
    for command in OFFLOADS {
        let mut value = Value { command, data: 0 };
        let mut request = named_request(device)?;
        request.ifr_ifru.ifru_data = (&raw mut value).cast();
        match ioctl(&any.as_raw_fd(), libc::SIOCETHTOOL, &raw mut request) {
            Ok(()) | Err(Errno::EOPNOTSUPP) => {}
            Err(error) => return Err(error).on("turn offloads off on", device),
        }
    }
    Ok(())
}
