//! TAPs inside guests.
//!
//! A TAP lives as long as a descriptor of it is open, and its carrier too: whoever is to outlive
//! the maker needs a copy.

use std::ffi::CStr;
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use ipnet::IpNet;
use nix::fcntl::{OFlag, open};
use nix::net::if_::if_nametoindex;
use nix::sys::stat::Mode;
use rtnetlink::packet_route::address::{AddressAttribute, AddressFlags};
use rtnetlink::packet_route::link::LinkMessage;
use rtnetlink::{LinkUnspec, RouteMessageBuilder};

use crate::error::{Context, Error, Result};
use crate::ethtool;
use crate::netlink::{converse, refused};
use crate::netns::within;
use crate::sysctl;

/// Frames that wait for the reader of the descriptor, unless said otherwise.
const QUEUE_FRAMES: u32 = 1024;

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
///
/// IPv6 addresses are usable at once: duplicate address detection is off, since the namespace's
/// maker gives the addresses.
pub fn create(netns: BorrowedFd<'_>, spec: &TapSpec) -> Result<OwnedFd> {
    within(netns, || {
        let tap = open_here(spec)?;
        let index = if_nametoindex(spec.name.as_str()).on("find", &spec.name)?;
        let link = LinkUnspec::new_with_index(index)
            .address(spec.mac.to_vec())
            .mtu(spec.mtu)
            .txqueuelen(spec.queue_frames.unwrap_or(QUEUE_FRAMES))
            .up()
            .build();
        equip(&spec.name, link, &spec.addresses, &spec.routes)?;
        Ok(tap)
    })
}

/// Sets an interface of the calling thread's network namespace as `link` has it, which brings it up, and gives it
/// addresses and routes. IPv6 addresses are usable at once.
pub(crate) fn equip(
    name: &str,
    link: LinkMessage,
    addresses: &[IpNet],
    routes: &[(IpNet, IpAddr)],
) -> Result<()> {
    let index = link.header.index;
    sysctl::set_v6_here(&format!("net.ipv6.conf.{}.accept_dad", as_key(name)), "0")?;
    converse(|handle| async move {
        handle.link().set(link).execute().await.map_err(refused("set up", name))?;
        for address in addresses {
            let mut add = handle.address().add(index, address.addr(), address.prefix_len());
            add.message_mut().attributes.push(AddressAttribute::Flags(AddressFlags::Nodad));
            add.execute().await.map_err(refused("add address", address))?;
        }
        for (destination, gateway) in routes {
            let route = RouteMessageBuilder::<IpAddr>::new()
                .destination_prefix(destination.addr(), destination.prefix_len())
                .and_then(|route| route.gateway(*gateway))
                .map_err(|error| Error::Invalid {
                    object: format!("route {destination} via {gateway}"),
                    text: error.to_string(),
                })?
                .output_interface(index)
                .build();
            handle
                .route()
                .add(route)
                .execute()
                .await
                .map_err(refused("add route", format!("{destination} via {gateway} on {name}")))?;
        }
        Ok(())
    })
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

/// Gives a TAP its carrier or takes it, and has the kernel tell so at once. By itself it tells of carriers that
/// are lost once a second (net/core/link_watch.c), and of others sooner; from Linux 6.8 on who asks for a link
/// has it tell what it has not told yet.
pub fn set_carrier(tap: BorrowedFd<'_>, on: bool) -> Result<()> {
    let mut carrier = libc::c_int::from(on);
    ioctl(&tap, libc::TUNSETCARRIER, &raw mut carrier).on("set the carrier of", "a TAP")?;
    if on {
        return Ok(());
    }
    let name = name(tap)?;
    // It only makes it sooner.
    let _ = within(netns(tap)?.as_fd(), || ethtool::has_link(&name));
    Ok(())
}

/// The network namespace that a TAP was made in.
fn netns(tap: BorrowedFd<'_>) -> Result<OwnedFd> {
    /// Of linux/sockios.h.
    const SIOCGSKNS: libc::Ioctl = 0x894c;
    // SAFETY: it takes no argument.
    let fd = unsafe { libc::ioctl(tap.as_raw_fd(), SIOCGSKNS) };
    let fd = nix::errno::Errno::result(fd).on("ask for the network namespace of", "a TAP")?;
    // SAFETY: just opened for us and owned by nobody else.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Name of the interface that a descriptor serves.
pub fn name(tap: BorrowedFd<'_>) -> Result<String> {
    let mut request = named_request("")?;
    ioctl(&tap, libc::TUNGETIFF, &raw mut request).on("ask for the name of", "a TAP")?;
    // SAFETY: the kernel wrote a C string of at most IFNAMSIZ bytes; the array is as large.
    let name = unsafe { CStr::from_ptr(request.ifr_name.as_ptr()) };
    Ok(name.to_string_lossy().into_owned())
}

/// Changes the MTU of a TAP by name inside a network namespace.
pub fn set_mtu(netns: BorrowedFd<'_>, name: &str, mtu: u32) -> Result<()> {
    within(netns, || {
        let index = if_nametoindex(name).on("find", name)?;
        converse(|handle| async move {
            let link = LinkUnspec::new_with_index(index).mtu(mtu).build();
            handle.link().set(link).execute().await.map_err(refused("set the MTU of", name))
        })
    })
}

fn as_key(interface: &str) -> String {
    interface.replace('.', "/")
}

pub(crate) fn named_request(name: &str) -> Result<libc::ifreq> {
    if name.len() >= libc::IFNAMSIZ {
        return Err(Error::Invalid {
            object: format!("interface {name}"),
            text: format!("{} bytes, {} at most", name.len(), libc::IFNAMSIZ - 1),
        });
    }
    // SAFETY: an all-zero `ifreq` is valid: a character array and a union of integers and a
    // pointer that may be null.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from as libc::c_char;
    }
    Ok(request)
}

/// An ioctl whose argument the kernel reads and may write.
pub(crate) fn ioctl<T>(
    fd: &impl AsRawFd,
    request: libc::Ioctl,
    argument: *mut T,
) -> nix::Result<()> {
    // SAFETY: callers give the address of a live, exclusively borrowed value of the type that the
    // request takes; the kernel keeps no reference to it.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), request, argument) };
    nix::errno::Errno::result(result).map(drop)
}
