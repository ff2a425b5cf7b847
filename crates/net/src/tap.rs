//! TAPs inside guests.
//!
//! A TAP and its carrier last as long as any descriptor of it is open. To let it outlive its maker,
//! another process needs a copy.

use std::ffi::CStr;
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use ipnet::IpNet;
use nix::fcntl::{OFlag, open};
use nix::net::if_::if_nametoindex;
use nix::sys::stat::Mode;
use pdp_netlink::Request;

use crate::error::{NetContext, Result};
use crate::ethtool;
use crate::ioctl::{ioctl, named_request};
use crate::netlink::{routing, set_link};
use crate::netns::within;
use crate::route;
use crate::sysctl;

/// Default length of the queue to the descriptor's reader, frames.
const QUEUE_FRAMES: u32 = 1024;

/// A TAP to be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TapSpec {
    /// Name inside the guest, at most 15 bytes.
    pub name: String,
    /// MAC address.
    pub mac: [u8; 6],
    /// Largest IP packet, bytes.
    pub mtu: u32,
    /// Addresses with prefix lengths; empty if the guest's own configuration sets them.
    pub addresses: Vec<IpNet>,
    /// Routes: destination and gateway.
    pub routes: Vec<(IpNet, IpAddr)>,
    /// Length of the queue to the descriptor's reader, frames.
    pub queue_frames: Option<u32>,
    /// User id on the host that may also attach to it by name (for programs that use TAPs).
    pub owner: Option<u32>,
}

/// Makes a TAP inside a network namespace and brings it up with carrier.
///
/// It is not persistent: it disappears with its last descriptor. Frames have no header
/// before them (IFF_NO_PI, no IFF_VNET_HDR), so the kernel completes checksums and
/// segments frames. The descriptor does not block.
///
/// IPv6 addresses are usable at once: duplicate address detection is off, since
/// the namespace's maker assigns the addresses.
pub fn create(netns: BorrowedFd<'_>, spec: &TapSpec) -> Result<OwnedFd> {
    within(netns, || {
        let tap = open_here(spec)?;
        let index = if_nametoindex(spec.name.as_str()).on("find", &spec.name)?;
        let mut link = set_link(index, libc::IFF_UP);
        link.attribute(libc::IFLA_ADDRESS, &spec.mac).number(libc::IFLA_MTU, spec.mtu);
        link.number(libc::IFLA_TXQLEN, spec.queue_frames.unwrap_or(QUEUE_FRAMES));
        equip(&spec.name, index, link, &spec.addresses, &spec.routes)?;
        Ok(tap)
    })
}

/// Configures an interface of the calling thread's network namespace as `link` says, and adds
/// addresses and routes. IPv6 addresses are usable at once.
pub(crate) fn equip(
    name: &str,
    index: u32,
    mut link: Request,
    addresses: &[IpNet],
    routes: &[(IpNet, IpAddr)],
) -> Result<()> {
    sysctl::set_v6_here(&format!("net.ipv6.conf.{}.accept_dad", as_key(name)), "0")?;
    let mut netlink = routing()?;
    netlink.change(&mut link).on("set up", name)?;
    for address in addresses {
        netlink.change(&mut route::new_address(index, address)).on("add address", address)?;
    }
    for (to, gateway) in routes {
        netlink
            .change(&mut route::new_route(index, to, *gateway))
            .on("add route", format!("{to} via {gateway} on {name}"))?;
    }
    Ok(())
}

/// Opens a new TAP in the calling thread's network namespace.
pub(crate) fn open_here(spec: &TapSpec) -> Result<OwnedFd> {
    let flags = OFlag::O_RDWR | OFlag::O_NONBLOCK | OFlag::O_CLOEXEC;
    let tap = open("/dev/net/tun", flags, Mode::empty()).on("open", "/dev/net/tun")?;
    let mut request = named_request(&spec.name)?;
    request.ifr_ifru.ifru_flags =
        (libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_TUN_EXCL) as libc::c_short;
    ioctl(&tap, libc::TUNSETIFF, &raw mut request).on("make TAP", &spec.name)?;
    if let Some(owner) = spec.owner {
        // SAFETY: TUNSETOWNER takes the user id as its argument, no pointer.
        let result =
            unsafe { libc::ioctl(tap.as_raw_fd(), libc::TUNSETOWNER, owner as libc::c_ulong) };
        nix::errno::Errno::result(result).on("give away TAP", &spec.name)?;
    }
    Ok(tap)
}

/// Sets or clears the carrier of a TAP, and makes the kernel announce it at once.
///
/// By itself, the kernel announces lost carriers once per second (net/core/link_watch.c), and
/// others sooner. From Linux 6.8 on, a query of the link makes it announce pending changes.
pub fn set_carrier(tap: BorrowedFd<'_>, on: bool) -> Result<()> {
    let mut carrier = libc::c_int::from(on);
    ioctl(&tap, libc::TUNSETCARRIER, &raw mut carrier).on("set the carrier of", "a TAP")?;
    if on {
        return Ok(());
    }
    let name = name(tap)?;
    // The query only speeds up the announcement.
    let _ = within(netns(tap)?.as_fd(), || ethtool::has_link(&name));
    Ok(())
}

/// Returns the network namespace in which a TAP was made.
fn netns(tap: BorrowedFd<'_>) -> Result<OwnedFd> {
    /// From linux/sockios.h.
    const SIOCGSKNS: libc::Ioctl = 0x894c;
    // SAFETY: it takes no argument.
    let fd = unsafe { libc::ioctl(tap.as_raw_fd(), SIOCGSKNS) };
    let fd = nix::errno::Errno::result(fd).on("ask for the network namespace of", "a TAP")?;
    // SAFETY: just opened for us and owned by nobody else.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Returns the name of the interface that a descriptor serves.
pub fn name(tap: BorrowedFd<'_>) -> Result<String> {
    let mut request = named_request("")?;
    ioctl(&tap, libc::TUNGETIFF, &raw mut request).on("ask for the name of", "a TAP")?;
    // SAFETY: the kernel wrote a C string of at most IFNAMSIZ bytes; the array is as large.
    let name = unsafe { CStr::from_ptr(request.ifr_name.as_ptr()) };
    Ok(name.to_string_lossy().into_owned())
}

/// Changes the MTU of a TAP, by name, inside a network namespace.
pub fn set_mtu(netns: BorrowedFd<'_>, name: &str, mtu: u32) -> Result<()> {
    within(netns, || {
        let index = if_nametoindex(name).on("find", name)?;
        let mut request = set_link(index, 0);
        request.number(libc::IFLA_MTU, mtu);
        routing()?.change(&mut request).on("set the MTU of", name)
    })
}

fn as_key(interface: &str) -> String {
    interface.replace('.', "/")
}
