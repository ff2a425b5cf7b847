//! Facts about interfaces of this network namespace.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use futures::TryStreamExt;
use ipnet::IpNet;
use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, socket,
};
use rtnetlink::packet_route::address::AddressAttribute;
use rtnetlink::packet_route::link::{InfoKind, LinkAttribute, LinkFlags, LinkInfo};

use crate::error::{Error, NetContext, Result};
use crate::ethtool;
use crate::netlink::{refused, run_in_thread};
use crate::tap::{ioctl, named_request};

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
        run_in_thread(|handle| async move {
            let none = || Error::NoInterface(name.to_owned());
            let mut links = handle.link().get().match_name(name.to_owned()).execute();
            let link = links.try_next().await.map_err(|_| none())?.ok_or_else(none)?;
            let mut interface = Self {
                name: name.to_owned(),
                index: link.header.index,
                mac: [0; 6],
                mtu: 0,
                up: link.header.flags.contains(LinkFlags::Up),
                lower_up: link.header.flags.contains(LinkFlags::LowerUp),
                receive_queues: 1,
                addresses: Vec::new(),
                is_virtual: false,
                veth_peer: None,
            };
            let (mut is_veth, mut peer, mut elsewhere) = (false, None, false);
            for attribute in link.attributes {
                match attribute {
                    LinkAttribute::Address(mac) => {
                        interface.mac = mac.try_into().unwrap_or_default();
                    }
                    LinkAttribute::Mtu(mtu) => interface.mtu = mtu,
                    LinkAttribute::NumRxQueues(count) => interface.receive_queues = count,
                    LinkAttribute::LinkInfo(infos) => {
                        interface.is_virtual =
                            infos.iter().any(|info| matches!(info, LinkInfo::Kind(_)));
                        is_veth = infos.contains(&LinkInfo::Kind(InfoKind::Veth));
                    }
                    LinkAttribute::Link(index) => peer = Some(index),
                    LinkAttribute::LinkNetNsId(_) => elsewhere = true,
                    _ => {}
                }
            }
            if let Some(index) = peer.filter(|_| is_veth && !elsewhere) {
                let mut links = handle.link().get().match_index(index).execute();
                let link = links.try_next().await.map_err(refused("read the peer of", name))?;
                let attributes = link.into_iter().flat_map(|link| link.attributes);
                interface.veth_peer =
                    attributes.into_iter().find_map(|attribute| match attribute {
                        LinkAttribute::IfName(name) => Some(name),
                        _ => None,
                    });
            }
            // Netlink reports the possible queues, but queues that are not in use get no frames.
            if let Some(count) = ethtool::receive_queues(name) {
                interface.receive_queues = count;
            }
            let mut addresses =
                handle.address().get().set_link_index_filter(interface.index).execute();
            while let Some(address) =
                addresses.try_next().await.map_err(refused("read the addresses of", name))?
            {
                let length = address.header.prefix_len;
                // For a pair of addresses, the local one. IPv6 has only the other attribute.
                let attributes = &address.attributes;
                let local = attributes.iter().find_map(|attribute| match attribute {
                    AddressAttribute::Local(ip) => Some(*ip),
                    _ => None,
                });
                let any = attributes.iter().find_map(|attribute| match attribute {
                    AddressAttribute::Address(ip) => Some(*ip),
                    _ => None,
                });
                let net = local.or(any).and_then(|ip| IpNet::new(ip, length).ok());
                interface.addresses.extend(net);
            }
            Ok(interface)
        })
    }
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
pub struct InterfaceWatch(OwnedFd);

impl InterfaceWatch {
    /// Watches changes from now on.
    pub fn new() -> Result<Self> {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let links = NetlinkAddr::new(0, libc::RTMGRP_LINK as u32);
        let kind = SockProtocol::NetlinkRoute;
        let socket =
            socket(AddressFamily::Netlink, SockType::Raw, flags, kind).on("open", "rtnetlink")?;
        bind(socket.as_raw_fd(), &links).on("watch", "interfaces")?;
        Ok(Self(socket))
    }

    /// Discards the changes so far. The descriptor becomes readable again at the next change.
    pub fn clear(&self) {
        // An overflow is reported once, as an error. It counts as a change, too.
        while matches!(
            recv(self.0.as_raw_fd(), &mut [0], MsgFlags::empty()),
            Ok(_) | Err(Errno::ENOBUFS)
        ) {}
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
