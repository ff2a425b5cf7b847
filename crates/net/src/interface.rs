//! Facts about interfaces of this network namespace.

use futures::TryStreamExt;
use ipnet::IpNet;
use rtnetlink::packet_route::address::AddressAttribute;
use rtnetlink::packet_route::link::{InfoKind, LinkAttribute, LinkFlags, LinkInfo};

use crate::error::{Error, Result};
use crate::ethtool;
use crate::netlink::{converse, refused};

/// An interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interface {
    /// Its name.
    pub name: String,
    /// Its index.
    pub index: u32,
    /// Its link address.
    pub mac: [u8; 6],
    /// Largest IP packet, bytes.
    pub mtu: u32,
    /// Administratively up.
    pub up: bool,
    /// With carrier.
    pub lower_up: bool,
    /// Receive queues in use: as many AF_XDP sockets.
    pub receive_queues: u32,
    /// Addresses with their prefix lengths.
    pub addresses: Vec<IpNet>,
    /// Software, not hardware: veth, bridge, VXLAN, ….
    pub is_virtual: bool,
    /// Of one end of a veth: the other end, if that is in this namespace.
    pub veth_peer: Option<String>,
}

impl Interface {
    /// The interface of this name.
    pub fn by_name(name: &str) -> Result<Self> {
        converse(|handle| async move {
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
            // Netlink says those that there can be; others than those in use get no frames.
            if let Some(count) = ethtool::receive_queues(name) {
                interface.receive_queues = count;
            }
            let mut addresses =
                handle.address().get().set_link_index_filter(interface.index).execute();
            while let Some(address) =
                addresses.try_next().await.map_err(refused("read the addresses of", name))?
            {
                let length = address.header.prefix_len;
                // Of a pair of addresses, the local one; IPv6 has the other attribute alone.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loopback_interface_is_found_also_inside_a_runtime() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let lo = runtime.block_on(async { Interface::by_name("lo") }).unwrap();
        assert_eq!((lo.index, lo.mtu), (1, 65_536));
        assert!(matches!(Interface::by_name("no-such"), Err(Error::NoInterface(_))));
    }
}
