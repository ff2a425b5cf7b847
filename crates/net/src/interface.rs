//! Facts about interfaces of this network namespace.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use ipnet::IpNet;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};
use pdp_netlink::{Netlink, Request, address, attributes, text, u32_at};

use crate::error::{Error, NetContext, Result};
use crate::ethtool;
use crate::ioctl::{ioctl, named_request};
use crate::netlink::{link_header, routing};

/// An interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InterfaceInfo {
    /// Name.
    pub name: String,
    /// Index.
    pub index: u32,
    /// MAC address.
    pub mac: [u8; 6],
    /// Largest IP packet, bytes.
    pub mtu: u32,
    /// Administratively up.
    pub up: bool,
    /// True if it has carrier.
    pub lower_up: bool,
    /// Receive queues in use; each needs an AF_XDP socket.
    pub receive_queues: u32,
    /// Addresses with their prefix lengths.
    pub addresses: Vec<IpNet>,
    /// True for software devices: veth, bridge, VXLAN, ….
    pub is_virtual: bool,
    /// Other end of a veth, if that is in this namespace.
    pub veth_peer: Option<String>,
}

impl InterfaceInfo {
    /// The interface of this name.
    pub fn by_name(name: &str) -> Result<Self> {
        let none = || Error::NoInterface(name.to_owned());
        let mut netlink = routing()?;
        let mut request = Request::new(libc::RTM_GETLINK, 0, &[0; 16]);
        request.text(libc::IFLA_IFNAME, name);
        let link = netlink.query(&mut request, |link| Self::read(name, link.payload));
        let (mut interface, peer) = link.ok().flatten().ok_or_else(none)?;
        if let Some(index) = peer {
            let mut request = Request::new(libc::RTM_GETLINK, 0, &link_header(index, 0, 0));
            interface.veth_peer = netlink
                .query(&mut request, |link| name_of(link.payload))
                .on("read the peer of", name)?;
        }
        // Netlink reports the possible queues, but queues that are not in use get no frames.
        if let Some(count) = ethtool::receive_queues(name) {
            interface.receive_queues = count;
        }
        let mut header = [0; 8];
        header[4..].copy_from_slice(&interface.index.to_ne_bytes());
        let mut request = Request::new(libc::RTM_GETADDR, 0, &header);
        let addresses = netlink.list(&mut request, |message| address_of(message.payload));
        interface.addresses = addresses.on("read the addresses of", name)?;
        Ok(interface)
    }

    /// Reads a message about the interface of this name, without addresses. Returns also the index
    /// of its peer, if it is a veth whose peer is in this namespace.
    fn read(name: &str, payload: &[u8]) -> Option<(Self, Option<u32>)> {
        let flags = u32_at(payload, 8)? as i32;
        let mut interface = Self {
            name: name.to_owned(),
            index: u32_at(payload, 4)?,
            mac: [0; 6],
            mtu: 0,
            up: flags & libc::IFF_UP != 0,
            lower_up: flags & libc::IFF_LOWER_UP != 0,
            receive_queues: 1,
            addresses: Vec::new(),
            is_virtual: false,
            veth_peer: None,
        };
        let (mut is_veth, mut peer, mut elsewhere) = (false, None, false);
        for (kind, value) in attributes(payload.get(16..)?) {
            match kind {
                libc::IFLA_ADDRESS => interface.mac = value.try_into().unwrap_or_default(),
                libc::IFLA_MTU => interface.mtu = u32_at(value, 0)?,
                libc::IFLA_NUM_RX_QUEUES => interface.receive_queues = u32_at(value, 0)?,
                libc::IFLA_LINKINFO => {
                    let mut kinds =
                        attributes(value).filter(|(kind, _)| *kind == libc::IFLA_INFO_KIND);
                    let kind = kinds.next().map(|(_, value)| text(value));
                    interface.is_virtual = kind.is_some();
                    is_veth = kind.is_some_and(|kind| kind == "veth");
                }
                libc::IFLA_LINK => peer = u32_at(value, 0),
                libc::IFLA_LINK_NETNSID => elsewhere = true,
                _ => {}
            }
        }
        Some((interface, peer.filter(|_| is_veth && !elsewhere)))
    }
}

/// Returns the name in a message about an interface.
fn name_of(payload: &[u8]) -> Option<String> {
    let mut names = attributes(payload.get(16..)?).filter(|(kind, _)| *kind == libc::IFLA_IFNAME);
    names.next().map(|(_, value)| text(value))
}

/// Returns the address in a message about one, with its prefix length. For a pair of addresses, it
/// is the local one. IPv6 has only the other attribute.
fn address_of(payload: &[u8]) -> Option<IpNet> {
    let (mut local, mut any) = (None, None);
    for (kind, value) in attributes(payload.get(8..)?) {
        match kind {
            libc::IFA_LOCAL => local = address(value),
            libc::IFA_ADDRESS => any = address(value),
            _ => {}
        }
    }
    IpNet::new(local.or(any)?, *payload.get(1)?).ok()
}

/// Carrier state of an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Carrier {
    /// It can send and receive frames.
    Yes,
    /// It is administratively down.
    Down,
    /// It has no link partner.
    Lost,
}

/// Properties of an interface that can change during its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InterfaceState {
    /// Index; it changes if another interface takes over the name.
    pub index: u32,
    /// MAC address.
    pub mac: [u8; 6],
    /// Largest IP packet, bytes.
    pub mtu: u32,
    /// Carrier state.
    pub carrier: Carrier,
}

impl InterfaceState {
    /// Reads the state of the interface of this name; `None` if
    /// there is none. Takes four quick system calls.
    pub fn of(name: &str) -> Option<Self> {
        let any = socket(AddressFamily::Inet, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None);
        let any = any.ok()?;
        let ask = |what| {
            let mut request = named_request(name).ok()?;
            ioctl(&any.as_raw_fd(), what, &raw mut request).ok()?;
            Some(request.ifr_ifru)
        };
        // SAFETY: each request's answer is read as what it is.
        let (index, address, mtu, flags) = unsafe {
            (
                ask(libc::SIOCGIFINDEX)?.ifru_ifindex,
                ask(libc::SIOCGIFHWADDR)?.ifru_hwaddr.sa_data,
                ask(libc::SIOCGIFMTU)?.ifru_mtu,
                libc::c_int::from(ask(libc::SIOCGIFFLAGS)?.ifru_flags),
            )
        };
        let carrier = match (flags & libc::IFF_UP != 0, flags & libc::IFF_RUNNING != 0) {
            (false, _) => Carrier::Down,
            (true, false) => Carrier::Lost,
            (true, true) => Carrier::Yes,
        };
        let mac = std::array::from_fn(|at| address[at] as u8);
        Some(Self { index: index as u32, mac, mtu: mtu as u32, carrier })
    }
}

/// Makes an interface of this network namespace receive frames for all MAC addresses
/// (promiscuous mode): a vnet on a whole interface has addresses of its own. The
/// setting stays when the interface is released.
pub fn receive_all(name: &str) -> Result<()> {
    let any = socket(AddressFamily::Inet, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None)
        .on("open a socket to configure", name)?;
    let mut request = named_request(name)?;
    ioctl(&any.as_raw_fd(), libc::SIOCGIFFLAGS, &raw mut request).on("read the flags of", name)?;
    // SAFETY: the kernel has just written the flags.
    let flags = unsafe { request.ifr_ifru.ifru_flags };
    if libc::c_int::from(flags) & libc::IFF_PROMISC == 0 {
        request.ifr_ifru.ifru_flags = flags | libc::IFF_PROMISC as libc::c_short;
        ioctl(&any.as_raw_fd(), libc::SIOCSIFFLAGS, &raw mut request)
            .on("receive all frames of", name)?;
    }
    Ok(())
}

/// Notifies of possible changes of interfaces in this network namespace.
#[derive(Debug)]
pub struct InterfaceWatch(Netlink);

impl InterfaceWatch {
    /// Watches changes from now on.
    pub fn new() -> Result<Self> {
        let netlink = Netlink::listening(libc::NETLINK_ROUTE, [libc::RTNLGRP_LINK]);
        Ok(Self(netlink.on("watch", "interfaces")?))
    }

    /// Discards the changes so far. The descriptor becomes readable again at the next change.
    pub fn clear(&self) {
        self.0.discard();
    }
}

impl AsFd for InterfaceWatch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_loopback_interface_inside_a_runtime() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let lo = runtime.block_on(async { InterfaceInfo::by_name("lo") }).unwrap();
        assert_eq!((lo.index, lo.mtu), (1, 65_536));
        assert!(matches!(InterfaceInfo::by_name("no-such"), Err(Error::NoInterface(_))));
    }
}
